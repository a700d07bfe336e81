//! Attribution of guest time to privilege levels.
//!
//! A clock cannot observe the guest's privilege level continuously. Instead the level is sampled
//! slightly more than a thousand times per second while an event counts a single level. Each sample
//! attributes the guest time since the previous sample to the sampled level. The result is an
//! estimate, which never decreases. It is correct on average, off by up to one tick at each end,
//! and inaccurate for a guest that runs in phase with the ticks.
//!
//! There are two sources, in order of increasing cost:
//! - The host kernel's samples. A `cpu-clock` event that does not exclude the guest writes records
//!   with headers that distinguish guest user time from guest kernel time. This requires no guest
//!   exit, and reading the ring takes no system call. A software-only KVM that interprets the
//!   guest's kernel accounts for this time as host kernel time. In this case, host kernel time is
//!   attributed to level 0.
//! - Kicks. A timer signal forces the vCPU to exit the guest, and its thread reports the current
//!   level ([`super::VcpuRunTimeClock::tick`]). The timer is one-shot and each report re-arms it,
//!   so a slow VMM is not kicked again before the guest has made progress. Time in which no event
//!   is started does not count towards the tick: a guest that stops and starts its events many
//!   times per tick is sampled as often as one that leaves them enabled. After the last event
//!   stops, the timer may expire once more without effect.
//!
//! On some hosts, the host kernel's samples do not show the guest, show it only part of the time,
//! or show it at the wrong level, as with an emulated AMD-V. Therefore the vCPUs first use kicks
//! and only observe the ring of samples. After a period of guest time, the ring is used if its
//! samples show the guest for most of that period, and show it at CPL3 if kicks found it at CPL3.
//! Otherwise the kicks remain in use. The source that is not used is then closed for all vCPUs.

use std::io;
use std::sync::atomic::{AtomicU8, Ordering};

use perf_event_open_sys::bindings as b;

use crate::pmu::clock::MIN_TIMER_NS;
use crate::pmu::timer::Timer;

use crate::pmu::host::fd::{PerfFd, PerfMap, new_attr};

/// Time between two samples of the privilege level, in nanoseconds: CPU time of the vCPU's thread
/// for the host kernel's samples, wall-clock time for kicks. Not a divisor of a millisecond: guest
/// timers often have such a period, and the samples must not run in phase with them.
pub(crate) const TICK_PERIOD_NS: u64 = 997_003;

/// Base-2 logarithm of the number of data pages of the ring. 16 KiB of 8-byte records hold the
/// samples of two seconds.
const RING_LOG2_PAGES: u32 = 2;

/// Guest time after which the ring of host samples is accepted or rejected, in ticks.
const EVALUATION_TICKS: u64 = 32;

/// Number of kicks that must find the guest at CPL3 before the privilege levels in the ring are
/// trusted.
const EVALUATION_USER_KICKS: u64 = 8;

/// Maximum time between kicks while the guest makes no progress, in nanoseconds.
const MAX_BACKOFF_NS: u64 = 10_000_000;

/// A kick may arrive early by at most the remaining wait divided by this number. A kick is early if
/// its timer kept running while no event was started.
const EARLY_DIVISOR: u64 = 16;

/// State of the test that determines whether the host kernel's samples show the guest. Shared by
/// all vCPUs.
static SAMPLES: AtomicU8 = AtomicU8::new(UNPROVEN);
const UNPROVEN: u8 = 0;
const SHOW_GUEST: u8 = 1;
const BLIND: u8 = 2;

/// The source of the samples of the guest's privilege level on this host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum LevelSource {
    /// The host kernel's samples, which require no guest exit.
    KernelRing,
    /// Same as `KernelRing`, but with host kernel samples attributed to level 0, because this KVM
    /// interprets the guest's kernel.
    KernelRingInterpreted,
    /// Kicks of the vCPU by a timer, after which the vCPU's thread reports the level.
    #[default]
    Kicks,
}

impl LevelSource {
    /// Returns the source with which a new vCPU starts: the host kernel's samples if they are known
    /// to show the guest, otherwise kicks.
    fn first() -> Self {
        match SAMPLES.load(Ordering::Relaxed) {
            SHOW_GUEST => Self::KernelRing,
            _ => Self::Kicks,
        }
    }
}

/// The privilege level of the guest that an event counts: user mode or kernel mode only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PrivilegeLevel {
    User,
    Kernel,
}

/// A timer that kicks the vCPU once per [`TICK_PERIOD_NS`].
#[derive(Debug)]
struct Kicks {
    timer: Timer,
    /// Duration for which the timer was last armed, in nanoseconds.
    wait_ns: u64,
    /// Guest time at which the timer was last armed for a whole wait, in nanoseconds.
    set_at_ns: u64,
    /// Time until the next kick, in nanoseconds, when the last started event stopped.
    left_ns: u64,
}

impl Kicks {
    fn open(tid: i32, signal: Option<i32>) -> io::Result<Self> {
        let signal = signal.ok_or_else(|| io::Error::other("no signal to kick the vCPU with"))?;
        Ok(Self {
            timer: Timer::open(tid, signal)?,
            wait_ns: TICK_PERIOD_NS,
            set_at_ns: 0,
            left_ns: TICK_PERIOD_NS,
        })
    }

    /// Resumes the wait when an event starts again.
    ///
    /// The timer stays armed when the last event stops, to save a system call. This method arms the
    /// timer for the remainder of the wait, unless the timer will expire at nearly the right time
    /// anyway.
    fn resume(&mut self) -> io::Result<()> {
        let left_ns = self.left_ns.max(MIN_TIMER_NS);
        let early_ns = left_ns.saturating_sub(self.timer.left_ns());
        if early_ns <= left_ns / EARLY_DIVISOR {
            return Ok(());
        }
        self.timer.set(left_ns)
    }

    fn suspend(&mut self) {
        self.left_ns = self.timer.left_ns();
    }

    /// Re-arms the kick timer after it has expired, at guest time `now_ns`.
    fn rearm(&mut self, now_ns: u64) -> io::Result<()> {
        let had_ns = now_ns.saturating_sub(self.set_at_ns);
        self.wait_ns = if had_ns >= self.wait_ns / 8 {
            TICK_PERIOD_NS
        } else {
            // The guest is halted, waits for a host CPU, or the VMM needs longer than a tick to
            // re-enter it.
            (self.wait_ns * 2).min(MAX_BACKOFF_NS)
        };
        self.set_at_ns = now_ns;
        self.timer.set(self.wait_ns)
    }
}

/// The attribution of one vCPU's guest time to privilege levels.
#[derive(Debug, Default)]
pub(crate) struct CplAttribution {
    tid: i32,
    source: LevelSource,
    signal: Option<i32>,
    ring: Option<(PerfFd, PerfMap)>,
    kicks: Option<Kicks>,
    /// Number of started events that count a single privilege level.
    users: u32,
    user_ns: u64,
    kernel_ns: u64,
    /// Guest time at which the unattributed time of the current span begins, in nanoseconds. Valid
    /// only while `users > 0`.
    mark_ns: u64,
    /// Guest time of earlier spans that has not been attributed yet, in nanoseconds.
    carry_ns: u64,
    /// `watched_ns`: guest time for which the ring was observed, excluding the current span.
    /// `watched_from_ns`: guest time at which the observation in the current span started.
    watched_ns: u64,
    watched_from_ns: u64,
    /// `seen_guest`: number of guest samples in the observed ring. `seen_user`: number of these
    /// samples at CPL3. `kicked_user`: number of kicks that found the guest at CPL3.
    seen_guest: u64,
    seen_user: u64,
    kicked_user: u64,
}

impl CplAttribution {
    pub(crate) fn new(tid: i32) -> Self {
        Self {
            tid,
            source: LevelSource::first(),
            ..Self::default()
        }
    }

    /// Selects the source for a KVM that interprets the guest's kernel. Must be called before the
    /// first event starts.
    pub(crate) fn kernel_is_interpreted(&mut self) {
        self.source = LevelSource::KernelRingInterpreted;
    }

    /// Records that an event that counts a single privilege level is started at guest time
    /// `now_ns`.
    pub(crate) fn start(&mut self, signal: Option<i32>, now_ns: u64) -> io::Result<()> {
        if self.users == 0 {
            self.signal = signal;
            self.switch_on()?;
            self.mark_ns = now_ns;
            self.watched_from_ns = now_ns;
        }
        self.users += 1;
        Ok(())
    }

    /// Records that an event that counts a single privilege level is stopped.
    pub(crate) fn stop(&mut self, now_ns: u64) {
        self.drain_ring(now_ns);
        self.users = self.users.saturating_sub(1);
        if self.users > 0 {
            return;
        }
        self.carry_ns += now_ns.saturating_sub(self.mark_ns);
        self.watched_ns += now_ns.saturating_sub(self.watched_from_ns);
        // Disabling the kernel's clock event preserves the remainder of its period, so the sampling
        // rate does not depend on the length of the spans.
        if let Some((fd, _)) = &self.ring
            && let Err(e) = fd.disable()
        {
            log::warn!(
                "cannot stop the privilege level samples: {}",
                crate::error_line(&e)
            );
        }
        if let Some(kicks) = &mut self.kicks {
            kicks.suspend();
        }
    }

    /// Returns the guest time attributed to privilege level `level` so far, in nanoseconds.
    pub(crate) fn read(&mut self, level: PrivilegeLevel, now_ns: u64) -> u64 {
        self.drain_ring(now_ns);
        match level {
            PrivilegeLevel::User => self.user_ns,
            PrivilegeLevel::Kernel => self.kernel_ns,
        }
    }

    /// Returns `true` if the kick timer has expired.
    pub(crate) fn tick_is_due(&self) -> bool {
        self.users > 0 && self.kicks.as_ref().is_some_and(|kicks| kicks.timer.has_expired())
    }

    /// Records the privilege level at which the vCPU's thread found the guest after an exit, or
    /// `None` if the guest was halted.
    pub(crate) fn tick(&mut self, cpl: Option<u8>, now_ns: u64) {
        if self.users == 0 {
            return;
        }
        let Some(kicks) = &mut self.kicks else { return };
        // Ignores signals of overflows. Overflows of a single-level event always occur at that
        // level, so only expirations of the kick timer are unbiased samples of the level.
        if !kicks.timer.has_expired() {
            return;
        }
        if let Err(e) = kicks.rearm(now_ns) {
            log::warn!(
                "cannot arm the next privilege level tick: {}",
                crate::error_line(&e)
            );
        }
        // A halted guest consumes no time. All unattributed time was consumed before the halt, and
        // the next sample attributes it.
        if let (Some(cpl), LevelSource::Kicks) = (cpl, self.source) {
            let user = u64::from(cpl == 3);
            self.kicked_user += user;
            self.attribute_pending(user, 1 - user, now_ns);
        }
    }

    /// Returns `true` if the vCPU's thread must report the privilege level after each kick.
    pub(crate) fn uses_kicks(&self) -> bool {
        self.users > 0 && self.kicks.is_some()
    }

    fn switch_on(&mut self) -> io::Result<()> {
        let found = SAMPLES.load(Ordering::Relaxed);
        let wants_ring = self.source != LevelSource::Kicks || found != BLIND;
        if !wants_ring {
            self.ring = None;
        } else if self.ring.is_none() {
            self.ring = match open_ring(self.tid) {
                Ok(ring) => Some(ring),
                Err(e) => {
                    log::debug!(
                        "no ring for privilege level samples ({}): kicks instead",
                        crate::error_line(&e)
                    );
                    self.source = LevelSource::Kicks;
                    None
                }
            };
        }
        // Without a kick signal, the ring is used even if it has not been tested.
        if (found == SHOW_GUEST || self.signal.is_none())
            && self.ring.is_some()
            && self.source == LevelSource::Kicks
        {
            self.source = LevelSource::KernelRing;
        }
        if self.source != LevelSource::Kicks {
            self.kicks = None;
        } else if self.kicks.is_none() {
            self.kicks = Some(Kicks::open(self.tid, self.signal)?);
        }
        if let Some((fd, _)) = &self.ring {
            fd.enable()?;
        }
        if let Some(kicks) = &mut self.kicks {
            kicks.resume()?;
        }
        Ok(())
    }

    /// Reads all records of the ring. Attributes guest time according to the samples or, while
    /// kicks are the source, evaluates the ring.
    fn drain_ring(&mut self, now_ns: u64) {
        if self.users == 0 {
            return;
        }
        let Some((_, map)) = &mut self.ring else {
            return;
        };
        let (mut user, mut kernel, mut host) = (0u64, 0u64, 0u64);
        map.drain(|record| {
            if record.type_ == b::PERF_RECORD_SAMPLE {
                match u32::from(record.misc) & b::PERF_RECORD_MISC_CPUMODE_MASK {
                    b::PERF_RECORD_MISC_GUEST_USER => user += 1,
                    b::PERF_RECORD_MISC_GUEST_KERNEL => kernel += 1,
                    b::PERF_RECORD_MISC_KERNEL => host += 1,
                    _ => {}
                }
            }
        });
        match self.source {
            LevelSource::KernelRing => self.attribute_pending(user, kernel, now_ns),
            LevelSource::KernelRingInterpreted => self.attribute_pending(user, kernel + host, now_ns),
            LevelSource::Kicks => {
                self.seen_guest += user + kernel;
                self.seen_user += user;
                self.evaluate_ring(now_ns);
            }
        }
    }

    /// Attributes the guest time that has not been attributed yet. Divides it between user and
    /// kernel mode in proportion to the numbers of samples `user` and `kernel`.
    #[expect(clippy::cast_possible_truncation, reason = "a part of a number of 64 bits")]
    fn attribute_pending(&mut self, user: u64, kernel: u64, now_ns: u64) {
        let looks = user + kernel;
        if looks == 0 {
            return;
        }
        let pending = self.carry_ns + now_ns.saturating_sub(self.mark_ns);
        let to_user = (u128::from(pending) * u128::from(user) / u128::from(looks)) as u64;
        self.user_ns += to_user;
        self.kernel_ns += pending - to_user;
        self.carry_ns = 0;
        self.mark_ns = self.mark_ns.max(now_ns);
    }

    /// Chooses between the ring and the kicks after the ring was observed for long enough.
    ///
    /// The ring of an emulated host is rejected, because its samples show only some of the guest's
    /// time. Kicks cost more but are correct. The ring is not accepted before kicks have found the
    /// guest at CPL3.
    fn evaluate_ring(&mut self, now_ns: u64) {
        let watched_ns = self.watched_ns + now_ns.saturating_sub(self.watched_from_ns);
        if watched_ns < EVALUATION_TICKS * TICK_PERIOD_NS {
            return;
        }
        let expected = watched_ns / TICK_PERIOD_NS;
        let Some(fair) = is_ring_trustworthy(self.seen_guest, self.seen_user, self.kicked_user, expected)
        else {
            return;
        };
        if fair {
            log::debug!("the host's samples show the guest: privilege levels are learnt from them");
            SAMPLES.store(SHOW_GUEST, Ordering::Relaxed);
            self.source = LevelSource::KernelRing;
            self.kicks = None;
        } else {
            log::info!(
                "the host's samples show the guest for {} of {expected} ms, at CPL3 for {}, where \
                kicks found CPL3 {} times; kicks determine privilege levels instead",
                self.seen_guest,
                self.seen_user,
                self.kicked_user
            );
            SAMPLES.store(BLIND, Ordering::Relaxed);
            self.ring = None;
        }
    }
}

/// Returns `Some(true)` if the ring of host samples is trustworthy, `Some(false)` if it is not, and
/// `None` if it is too early to decide. `expected` is the number of ticks of the observation,
/// `seen_guest` the number of guest samples in the ring, `seen_user` the number of these samples at
/// CPL3, and `kicked_user` the number of kicks that found the guest at CPL3.
fn is_ring_trustworthy(seen_guest: u64, seen_user: u64, kicked_user: u64, expected: u64) -> Option<bool> {
    if seen_guest * 4 < expected * 3 {
        Some(false)
    } else if kicked_user < EVALUATION_USER_KICKS {
        None
    } else {
        Some(seen_user * 2 >= kicked_user)
    }
}

fn open_ring(tid: i32) -> io::Result<(PerfFd, PerfMap)> {
    let mut attr = new_attr(b::PERF_TYPE_SOFTWARE, u64::from(b::PERF_COUNT_SW_CPU_CLOCK));
    attr.__bindgen_anon_1.sample_period = TICK_PERIOD_NS;
    attr.set_disabled(1);
    let fd = PerfFd::open(&mut attr, tid)?;
    let map = fd.map(Some(RING_LOG2_PAGES))?;
    Ok((fd, map))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Host kernel samples are attributed to the guest only if the caller has determined that KVM
    /// interprets the guest's kernel. The driver cannot determine this and never assumes it.
    #[test]
    fn host_kernel_samples_count_as_guest_only_if_interpreted() {
        assert_ne!(CplAttribution::new(0).source, LevelSource::KernelRingInterpreted);
        let mut split = CplAttribution::new(0);
        split.kernel_is_interpreted();
        assert_eq!(split.source, LevelSource::KernelRingInterpreted);
        assert!(!split.uses_kicks());
    }

    /// Returns a [`CplAttribution`] with one started event. Tests report levels to it as if the
    /// kick timer had expired.
    fn running() -> CplAttribution {
        let mut split = CplAttribution::new(0);
        split.source = LevelSource::Kicks;
        split.users = 1;
        split
    }

    fn attribute_tick(split: &mut CplAttribution, cpl: u8, now_ns: u64) {
        let user = u64::from(cpl == 3);
        split.attribute_pending(user, 1 - user, now_ns);
    }

    proptest! {
        /// For any sequence of ticks, the attributed time never decreases and never exceeds the
        /// guest time.
        #[test]
        fn attribution_is_monotonic_and_bounded(steps in prop::collection::vec((0u64..5_000_000, 0u8..4), 0..200)) {
            let mut split = running();
            let (mut now, mut last_user, mut last_kernel) = (0u64, 0, 0);
            for (step, cpl) in steps {
                now += step;
                attribute_tick(&mut split, cpl, now);
                let (user, kernel) = (split.read(PrivilegeLevel::User, now), split.read(PrivilegeLevel::Kernel, now));
                prop_assert!(user >= last_user && kernel >= last_kernel);
                prop_assert_eq!(user + kernel, now);
                (last_user, last_kernel) = (user, kernel);
            }
        }
    }

    #[test]
    fn time_between_spans_is_not_attributed() {
        let mut split = running();
        attribute_tick(&mut split, 3, 1_000);
        // No event is started from 1,500 to 9,000. The next sample therefore attributes 500 ns of
        // the first span and 300 ns of the second.
        split.stop(1_500);
        split.users = 1;
        split.mark_ns = 9_000;
        attribute_tick(&mut split, 0, 9_300);
        assert_eq!(split.read(PrivilegeLevel::User, 9_300), 1_000);
        assert_eq!(split.read(PrivilegeLevel::Kernel, 9_300), 800);
    }

    #[test]
    fn ticks_without_single_level_event_have_no_effect() {
        let mut split = CplAttribution::new(0);
        split.tick(Some(3), 1_000);
        assert_eq!(split.read(PrivilegeLevel::User, 2_000), 0);
    }

    #[test]
    fn ring_without_guest_or_level_samples_is_rejected() {
        assert_eq!(is_ring_trustworthy(32, 20, 19, 32), Some(true));
        assert_eq!(is_ring_trustworthy(9, 9, 9, 32), Some(false));
        assert_eq!(is_ring_trustworthy(32, 0, 20, 32), Some(false));
        // If the guest was never at CPL3, the ring cannot be tested for samples at CPL3.
        assert_eq!(is_ring_trustworthy(32, 0, 0, 32), None);
    }

    /// Guest time in spans shorter than a tick is sampled too, because the remainder of the wait
    /// for a kick carries over to the next span. A span is a period in which an event is started.
    #[test]
    fn short_spans_do_not_postpone_kicks_indefinitely() {
        let mut kicks = Kicks::open(crate::pmu::host::fd::current_tid(), Some(libc::SIGCONT)).unwrap();
        let before = kicks.left_ns;
        kicks.resume().unwrap();
        std::thread::sleep(std::time::Duration::from_micros(50));
        kicks.suspend();
        let left_ns = kicks.left_ns;
        assert!(left_ns < before);
        // The remaining wait does not pass while no event is started.
        std::thread::sleep(std::time::Duration::from_nanos(left_ns));
        kicks.resume().unwrap();
        let set_ns = kicks.timer.left_ns();
        assert!(set_ns <= left_ns.max(MIN_TIMER_NS), "{set_ns} of {left_ns} ns");
        assert_eq!(kicks.left_ns, left_ns);
    }

    /// Kicks of a guest that makes no progress become less frequent, and return to the usual rate
    /// when the guest runs again.
    #[test]
    fn kicks_back_off_without_guest_progress() {
        let mut kicks = Kicks::open(crate::pmu::host::fd::current_tid(), Some(libc::SIGCONT)).unwrap();
        for _ in 0..10 {
            kicks.rearm(0).unwrap();
        }
        assert_eq!(kicks.wait_ns, MAX_BACKOFF_NS);
        kicks.rearm(MAX_BACKOFF_NS).unwrap();
        assert_eq!(kicks.wait_ns, TICK_PERIOD_NS);
    }
}
