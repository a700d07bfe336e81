//! Which privilege level the guest's time belongs to.
//!
//! A clock cannot see the guest's privilege level at every instant. It is sampled instead, a little more than
//! a thousand times a second, while an event asks for one level. At each look the guest time since the look
//! before goes to the level seen. That is an estimate: right on average, off by up to one tick at each end,
//! and blind to a guest that keeps in step with the ticks. It never goes back.
//!
//! Two sources, the cheaper first:
//! - The host kernel's own samples. A `cpu-clock` event that does not exclude the guest writes records whose
//!   header says guest user or guest kernel. Nothing leaves the guest for it, and reading the ring is no
//!   system call. On a software-only KVM that interprets the guest's kernel, such time looks like host kernel
//!   time; there it is taken as level 0.
//! - Kicks: a timer's signal takes the vCPU out of the guest, and its thread reports the level it finds
//!   ([`super::VcpuClock::tick`]). It rings once and is set again by that report, so that a slow VMM is never
//!   rung out of the guest before the guest has got anywhere. Time in which no event is on does not count: a
//!   guest that switches its events off and on many times per tick is still looked at as often as one that
//!   leaves them on. It may ring once, for nothing, after the last event has gone off.
//!
//! Not every host's samples show the guest; some show it now and then only, and some at the wrong level (an
//! emulated AMD-V does). Until they have shown it for most of a stretch of guest time, and at CPL3 where the
//! kicks found it there, the kicks are what counts, and the ring is only watched; then one of the two is
//! given up, for all vCPUs.

use std::io;
use std::sync::atomic::{AtomicU8, Ordering};

use perf_event_open_sys::bindings as b;

use super::timer::{MIN_TIMER_NS, Timer};

use crate::pmu::host::fd::{PerfFd, PerfMap, new_attr};

/// Thread time between looks. Not a whole part of a millisecond: the guest's own timers are.
pub(crate) const TICK_PERIOD_NS: u64 = 997_003;

/// 16 KiB of 8-byte records: two seconds of ticks between two drains.
const RING_LOG2_PAGES: u32 = 2;

/// Guest time after which the ring is judged, in ticks.
const JUDGED_TICKS: u64 = 32;

/// Kicks that must have found the guest at CPL3 before the ring's levels are believed.
const JUDGED_USER_LOOKS: u64 = 8;

/// The longest a kick is put off when the guest makes no headway, ns.
const MOST_PATIENCE_NS: u64 = 10_000_000;

/// The part of a wait by which a kick may come early, because the events were off for so long meanwhile.
const MOST_EARLY_PART: u64 = 16;

/// Found out once for all vCPUs: whether the kernel's samples show the guest on this host.
static SAMPLES: AtomicU8 = AtomicU8::new(UNPROVEN);
const UNPROVEN: u8 = 0;
const SHOW_GUEST: u8 = 1;
const BLIND: u8 = 2;

/// How the privilege level is learnt on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LevelSource {
    /// From the host kernel's samples, with no exit from the guest.
    KernelRing,
    /// As `KernelRing`; host kernel samples are level 0, because this KVM interprets the guest's kernel.
    KernelRingInterpreted,
    /// From kicks of the vCPU.
    Kicks,
}

impl LevelSource {
    /// The source to begin with.
    fn first() -> Self {
        match SAMPLES.load(Ordering::Relaxed) {
            SHOW_GUEST => Self::KernelRing,
            _ => Self::Kicks,
        }
    }
}

/// A privilege level an event can ask for alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    User,
    Kernel,
}

/// Kicks of the vCPU at the pace of the looks.
#[derive(Debug)]
struct Kicks {
    timer: Timer,
    /// What it was set to last, ns.
    wait_ns: u64,
    /// Guest time when it was set for a whole wait.
    set_at_ns: u64,
    /// What was left of the wait when the last event stopped, ns.
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

    /// An event is on again. The timer is not stopped when the last one goes off, as setting it is a system
    /// call: if it still rings at about the right time, it is left alone, and else set for what was left.
    fn go_on(&mut self) -> io::Result<()> {
        let left_ns = self.left_ns.max(MIN_TIMER_NS);
        let early_ns = left_ns.saturating_sub(self.timer.left_ns());
        if early_ns <= left_ns / MOST_EARLY_PART {
            return Ok(());
        }
        self.timer.set(left_ns)
    }

    fn hold(&mut self) {
        self.left_ns = self.timer.left_ns();
    }

    /// It has rung; the guest's time is `now_ns`.
    fn again(&mut self, now_ns: u64) -> io::Result<()> {
        let had_ns = now_ns.saturating_sub(self.set_at_ns);
        self.wait_ns = if had_ns >= self.wait_ns / 8 {
            TICK_PERIOD_NS
        } else {
            // The guest is halted, waits for a processor, or the VMM needs longer than a tick to get back
            // into it.
            (self.wait_ns * 2).min(MOST_PATIENCE_NS)
        };
        self.set_at_ns = now_ns;
        self.timer.set(self.wait_ns)
    }
}

/// The split of one vCPU's guest time.
#[derive(Debug)]
pub(crate) struct CplSplit {
    tid: i32,
    source: LevelSource,
    signal: Option<i32>,
    ring: Option<(PerfFd, PerfMap)>,
    kicks: Option<Kicks>,
    /// Started events that want one level.
    users: u32,
    user_ns: u64,
    kernel_ns: u64,
    /// Guest time up to which everything is attributed or carried, while `users > 0`.
    mark_ns: u64,
    /// Unattributed time of earlier spans.
    carry_ns: u64,
    /// Guest time of the spans in which the ring was watched, and when the present one began.
    watched_ns: u64,
    watched_from_ns: u64,
    /// Samples of the guest in the watched ring, those of them at CPL3, and kicks that found it at CPL3.
    seen_guest: u64,
    seen_user: u64,
    kicked_user: u64,
}

impl CplSplit {
    pub(crate) fn new(tid: i32) -> Self {
        Self {
            tid,
            source: LevelSource::first(),
            signal: None,
            ring: None,
            kicks: None,
            users: 0,
            user_ns: 0,
            kernel_ns: 0,
            mark_ns: 0,
            carry_ns: 0,
            watched_ns: 0,
            watched_from_ns: 0,
            seen_guest: 0,
            seen_user: 0,
            kicked_user: 0,
        }
    }

    pub(crate) fn source(&self) -> LevelSource {
        self.source
    }

    /// This host's KVM interprets the guest's kernel. To be said before the first event starts.
    pub(crate) fn kernel_is_interpreted(&mut self) {
        self.source = LevelSource::KernelRingInterpreted;
    }

    /// An event that wants one level starts at guest time `now_ns`.
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

    /// An event that wants one level stops.
    pub(crate) fn stop(&mut self, now_ns: u64) {
        self.look(now_ns);
        self.users = self.users.saturating_sub(1);
        if self.users > 0 {
            return;
        }
        self.carry_ns += now_ns.saturating_sub(self.mark_ns);
        self.watched_ns += now_ns.saturating_sub(self.watched_from_ns);
        // The kernel keeps what is left of a tick's period, so that short spans are looked at as often, for
        // their length, as long ones.
        if let Some((fd, _)) = &self.ring
            && let Err(e) = fd.disable()
        {
            log::warn!(
                "cannot stop the privilege level samples: {}",
                crate::error_line(&e)
            );
        }
        if let Some(kicks) = &mut self.kicks {
            kicks.hold();
        }
    }

    /// Guest time attributed to `level` so far, ns.
    pub(crate) fn read(&mut self, level: Level, now_ns: u64) -> u64 {
        self.look(now_ns);
        match level {
            Level::User => self.user_ns,
            Level::Kernel => self.kernel_ns,
        }
    }

    /// Whether the timer that asks for the level has rung.
    pub(crate) fn tick_is_due(&self) -> bool {
        self.users > 0 && self.kicks.as_ref().is_some_and(|kicks| kicks.timer.rang())
    }

    /// The vCPU's thread is out of the guest and saw it at this level; `None`: it was halted there.
    pub(crate) fn tick(&mut self, cpl: Option<u8>, now_ns: u64) {
        if self.users == 0 {
            return;
        }
        let Some(kicks) = &mut self.kicks else { return };
        // Any overflow brings the thread here, and those of an event that counts one level come at that
        // level: only the timer's own rings are fair looks.
        if !kicks.timer.rang() {
            return;
        }
        if let Err(e) = kicks.again(now_ns) {
            log::warn!(
                "the next privilege level tick could not be set: {}",
                crate::error_line(&e)
            );
        }
        // A halted guest uses no time: what is pending was used before, at a level the next look tells.
        if let (Some(cpl), LevelSource::Kicks) = (cpl, self.source) {
            let user = u64::from(cpl == 3);
            self.kicked_user += user;
            self.settle(user, 1 - user, now_ns);
        }
    }

    /// Whether the vCPU's thread must report levels at kicks.
    pub(crate) fn by_kicks(&self) -> bool {
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
        // With no signal to kick with, the ring is all there is.
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
            kicks.go_on()?;
        }
        Ok(())
    }

    /// Takes in what the kernel's ring has to say.
    fn look(&mut self, now_ns: u64) {
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
            LevelSource::KernelRing => self.settle(user, kernel, now_ns),
            LevelSource::KernelRingInterpreted => self.settle(user, kernel + host, now_ns),
            LevelSource::Kicks => {
                self.seen_guest += user + kernel;
                self.seen_user += user;
                self.judge_ring(now_ns);
            }
        }
    }

    /// Gives the pending time to the levels in the proportion they were seen.
    #[expect(clippy::cast_possible_truncation, reason = "a part of a number of 64 bits")]
    fn settle(&mut self, user: u64, kernel: u64, now_ns: u64) {
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

    /// Decides between the ring and the kicks, once the ring has been watched for long enough. An emulated
    /// host shows part of the guest, and not a fair part: that is not good enough, because kicks only cost
    /// more. A guest that has not been at CPL3 yet leaves the question of the levels open.
    fn judge_ring(&mut self, now_ns: u64) {
        let watched_ns = self.watched_ns + now_ns.saturating_sub(self.watched_from_ns);
        if watched_ns < JUDGED_TICKS * TICK_PERIOD_NS {
            return;
        }
        let expected = watched_ns / TICK_PERIOD_NS;
        let Some(fair) = ring_is_fair(self.seen_guest, self.seen_user, self.kicked_user, expected) else {
            return;
        };
        if fair {
            log::debug!("the host's samples show the guest: privilege levels are learnt from them");
            SAMPLES.store(SHOW_GUEST, Ordering::Relaxed);
            self.source = LevelSource::KernelRing;
            self.kicks = None;
        } else {
            log::info!(
                "the host's samples show the guest for {} of {expected} ms, at CPL3 for {} where kicks found it there {} \
                 times: privilege levels are learnt by kicks",
                self.seen_guest,
                self.seen_user,
                self.kicked_user
            );
            SAMPLES.store(BLIND, Ordering::Relaxed);
            self.ring = None;
        }
    }
}

/// Whether a ring that showed the guest `seen_guest` times in `expected` ticks, `seen_user` times at CPL3, is
/// to be believed, when kicks found it at CPL3 `kicked_user` times; `None`: too early to tell.
fn ring_is_fair(seen_guest: u64, seen_user: u64, kicked_user: u64, expected: u64) -> Option<bool> {
    if seen_guest * 4 < expected * 3 {
        Some(false)
    } else if kicked_user < JUDGED_USER_LOOKS {
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

    /// Only who knows the KVM can tell that it interprets the guest's kernel: the driver takes nothing for
    /// granted.
    #[test]
    fn host_kernel_time_is_the_guests_only_where_its_kernel_is_interpreted() {
        assert_ne!(CplSplit::new(0).source(), LevelSource::KernelRingInterpreted);
        let mut split = CplSplit::new(0);
        split.kernel_is_interpreted();
        assert_eq!(split.source(), LevelSource::KernelRingInterpreted);
        assert!(!split.by_kicks());
    }

    /// A split with an event on, that is told levels as if its timer had rung.
    fn running() -> CplSplit {
        let mut split = CplSplit::new(0);
        split.source = LevelSource::Kicks;
        split.users = 1;
        split
    }

    fn see(split: &mut CplSplit, cpl: u8, now_ns: u64) {
        let user = u64::from(cpl == 3);
        split.settle(user, 1 - user, now_ns);
    }

    proptest! {
        /// Whatever the ticks say, attributed time never goes back and never exceeds the guest's time.
        #[test]
        fn attribution_is_monotonic_and_bounded(steps in prop::collection::vec((0u64..5_000_000, 0u8..4), 0..200)) {
            let mut split = running();
            let (mut now, mut last_user, mut last_kernel) = (0u64, 0, 0);
            for (step, cpl) in steps {
                now += step;
                see(&mut split, cpl, now);
                let (user, kernel) = (split.read(Level::User, now), split.read(Level::Kernel, now));
                prop_assert!(user >= last_user && kernel >= last_kernel);
                prop_assert_eq!(user + kernel, now);
                (last_user, last_kernel) = (user, kernel);
            }
        }
    }

    #[test]
    fn time_between_spans_is_not_attributed() {
        let mut split = running();
        see(&mut split, 3, 1_000);
        // Off from 1,500 to 9,000: only the 500 before and the 300 after belong to the next look.
        split.stop(1_500);
        split.users = 1;
        split.mark_ns = 9_000;
        see(&mut split, 0, 9_300);
        assert_eq!(split.read(Level::User, 9_300), 1_000);
        assert_eq!(split.read(Level::Kernel, 9_300), 800);
    }

    #[test]
    fn ticks_without_an_event_that_wants_them_change_nothing() {
        let mut split = CplSplit::new(0);
        split.tick(Some(3), 1_000);
        assert_eq!(split.read(Level::User, 2_000), 0);
    }

    #[test]
    fn a_ring_that_hides_the_guest_or_its_level_is_not_believed() {
        assert_eq!(ring_is_fair(32, 20, 19, 32), Some(true));
        assert_eq!(ring_is_fair(9, 9, 9, 32), Some(false));
        assert_eq!(ring_is_fair(32, 0, 20, 32), Some(false));
        // A guest that stays at CPL0 tells nothing about how CPL3 would look.
        assert_eq!(ring_is_fair(32, 0, 0, 32), None);
    }

    /// Spans shorter than a tick add up to looks: what was left when one ended is where the next begins.
    #[test]
    fn short_spans_do_not_put_the_kick_off_for_ever() {
        let mut kicks = Kicks::open(crate::pmu::host::fd::current_tid(), Some(libc::SIGCONT)).unwrap();
        let before = kicks.left_ns;
        kicks.go_on().unwrap();
        std::thread::sleep(std::time::Duration::from_micros(50));
        kicks.hold();
        let left_ns = kicks.left_ns;
        assert!(left_ns < before);
        // It goes on from there, however long that is ago.
        std::thread::sleep(std::time::Duration::from_nanos(left_ns));
        kicks.go_on().unwrap();
        let set_ns = kicks.timer.left_ns();
        assert!(set_ns <= left_ns.max(MIN_TIMER_NS), "{set_ns} of {left_ns} ns");
        assert_eq!(kicks.left_ns, left_ns);
    }

    /// A guest that gets nowhere is kicked less and less often, and at the usual pace once it runs again.
    #[test]
    fn kicks_wait_for_a_guest_without_headway() {
        let mut kicks = Kicks::open(crate::pmu::host::fd::current_tid(), Some(libc::SIGCONT)).unwrap();
        for _ in 0..10 {
            kicks.again(0).unwrap();
        }
        assert_eq!(kicks.wait_ns, MOST_PATIENCE_NS);
        kicks.again(MOST_PATIENCE_NS).unwrap();
        assert_eq!(kicks.wait_ns, TICK_PERIOD_NS);
    }
}
