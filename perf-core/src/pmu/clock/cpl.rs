//! Which privilege level the guest's time belongs to.
//!
//! A clock cannot see the guest's privilege level at every instant. It is sampled instead, a little more than a
//! thousand times a second of thread time, while an event asks for one level. At each look the guest time since the look
//! before goes to the level seen. That is an estimate: right on average, off by up to one tick at each end, and
//! blind to a guest that keeps in step with the ticks. It never goes back.
//!
//! Two sources, the cheaper first:
//! - The host kernel's own samples. A `cpu-clock` event that does not exclude the guest writes records whose header
//!   says guest user or guest kernel. Nothing leaves the guest for it, and reading the ring is no system call.
//!   On a software-only KVM that interprets the guest's kernel, such time looks like host kernel time; there it
//!   is taken as level 0.
//! - Where the ring never shows the guest, the ticks are signals that kick the vCPU, and its thread reports the
//!   level it finds ([`super::VcpuClock::tick`]).

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use perf_event_open_sys::bindings as b;

use crate::pmu::host::fd::{PerfFd, PerfMap, new_attr};

/// Thread time between looks. Not a whole part of a millisecond: the guest's own timers are.
pub(crate) const TICK_PERIOD_NS: u64 = 997_003;

/// 16 KiB of 8-byte records: two seconds of ticks between two drains.
const RING_LOG2_PAGES: u32 = 2;

/// This many looks during guest time without once seeing the guest: the kernel's samples do not show it here.
const BLIND_LOOKS: u64 = 8;

/// Found out once for all vCPUs: the kernel's samples do not show the guest on this host.
static BLIND: AtomicBool = AtomicBool::new(false);

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
    /// The source tried first on this host.
    #[must_use]
    pub fn of_host() -> Self {
        if Path::new("/sys/module/kvm_pvm").exists() {
            Self::KernelRingInterpreted
        } else {
            Self::KernelRing
        }
    }
}

/// A privilege level an event can ask for alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    User,
    Kernel,
}

#[derive(Debug)]
enum Ticker {
    Closed,
    Ring(PerfFd, PerfMap),
    Signal(PerfFd),
}

/// The split of one vCPU's guest time.
#[derive(Debug)]
pub(crate) struct CplSplit {
    tid: i32,
    source: LevelSource,
    signal: Option<i32>,
    ticker: Ticker,
    /// Started events that want one level.
    users: u32,
    user_ns: u64,
    kernel_ns: u64,
    /// Guest time up to which everything is attributed or carried, while `users > 0`.
    mark_ns: u64,
    /// Unattributed time of earlier spans.
    carry_ns: u64,
    /// Looks that saw the guest, and looks that saw only the host, since the source was chosen.
    seen_guest: u64,
    seen_host: u64,
}

impl CplSplit {
    pub(crate) fn new(tid: i32) -> Self {
        Self {
            tid,
            source: if BLIND.load(Ordering::Relaxed) {
                LevelSource::Kicks
            } else {
                LevelSource::of_host()
            },
            signal: None,
            ticker: Ticker::Closed,
            users: 0,
            user_ns: 0,
            kernel_ns: 0,
            mark_ns: 0,
            carry_ns: 0,
            seen_guest: 0,
            seen_host: 0,
        }
    }

    pub(crate) fn source(&self) -> LevelSource {
        self.source
    }

    /// An event that wants one level starts at guest time `now_ns`.
    pub(crate) fn start(&mut self, signal: Option<i32>, now_ns: u64) -> io::Result<()> {
        if self.users == 0 {
            self.signal = signal;
            self.switch_on()?;
            self.mark_ns = now_ns;
        }
        self.users += 1;
        Ok(())
    }

    /// An event that wants one level stops.
    pub(crate) fn stop(&mut self, now_ns: u64) {
        self.look(now_ns);
        self.users = self.users.saturating_sub(1);
        if self.users == 0 {
            self.carry_ns += now_ns.saturating_sub(self.mark_ns);
            // The kernel keeps what is left of the tick's period, so that short spans are looked at as often, for
            // their length, as long ones.
            if let Ticker::Ring(fd, _) | Ticker::Signal(fd) = &self.ticker
                && let Err(e) = fd.disable()
            {
                log::warn!("cannot stop the privilege level ticks: {e}");
            }
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

    /// The vCPU's thread saw the guest at `cpl`.
    pub(crate) fn tick(&mut self, cpl: u8, now_ns: u64) {
        if self.users > 0 {
            let user = u64::from(cpl == 3);
            self.settle(user, 1 - user, now_ns);
        }
    }

    /// Whether the vCPU's thread must report levels at kicks.
    pub(crate) fn by_kicks(&self) -> bool {
        self.users > 0 && matches!(self.ticker, Ticker::Signal(_))
    }

    fn switch_on(&mut self) -> io::Result<()> {
        match &self.ticker {
            Ticker::Ring(fd, _) | Ticker::Signal(fd) => return fd.enable(),
            Ticker::Closed => {}
        }
        let fd = open_ticks(self.tid)?;
        if self.source != LevelSource::Kicks {
            match fd.map(Some(RING_LOG2_PAGES)) {
                Ok(map) => {
                    fd.enable()?;
                    self.ticker = Ticker::Ring(fd, map);
                    return Ok(());
                }
                Err(e) => log::debug!("no ring for privilege level ticks ({e}): kicks instead"),
            }
            self.source = LevelSource::Kicks;
        }
        self.by_signal(fd)
    }

    fn by_signal(&mut self, fd: PerfFd) -> io::Result<()> {
        let signal = self
            .signal
            .ok_or_else(|| io::Error::other("no signal to kick the vCPU with"))?;
        fd.signal_thread(self.tid, signal)?;
        fd.enable()?;
        self.ticker = Ticker::Signal(fd);
        Ok(())
    }

    /// Takes in what the kernel's ring has to say.
    fn look(&mut self, now_ns: u64) {
        if self.users == 0 {
            return;
        }
        let Ticker::Ring(_, map) = &mut self.ticker else {
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
        if self.source == LevelSource::KernelRingInterpreted {
            kernel += std::mem::take(&mut host);
        }
        self.settle(user, kernel, now_ns);
        self.seen_guest += user + kernel;
        self.seen_host += host;
        self.leave_blind_ring(now_ns);
    }

    /// Gives the pending time to the levels in the proportion they were seen.
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

    /// Goes over to kicks when the ring has shown only the host although the guest ran for most of that time.
    fn leave_blind_ring(&mut self, now_ns: u64) {
        let pending = self.carry_ns + now_ns.saturating_sub(self.mark_ns);
        if self.seen_guest > 0
            || self.seen_host < BLIND_LOOKS
            || pending < self.seen_host * TICK_PERIOD_NS / 2
        {
            return;
        }
        self.seen_host = 0;
        if self.signal.is_none() {
            return;
        }
        let reopened = open_ticks(self.tid).and_then(|fd| self.by_signal(fd));
        match reopened {
            Ok(()) => {
                log::info!("the host's samples do not show the guest: privilege levels are learnt by kicks");
                self.source = LevelSource::Kicks;
                BLIND.store(true, Ordering::Relaxed);
            }
            Err(e) => log::warn!("cannot learn privilege levels by kicks: {e}"),
        }
    }
}

fn open_ticks(tid: i32) -> io::Result<PerfFd> {
    let mut attr = new_attr(b::PERF_TYPE_SOFTWARE, u64::from(b::PERF_COUNT_SW_CPU_CLOCK));
    attr.__bindgen_anon_1.sample_period = TICK_PERIOD_NS;
    attr.set_disabled(1);
    PerfFd::open(&mut attr, tid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn running(source: LevelSource) -> CplSplit {
        let mut split = CplSplit::new(0);
        split.source = source;
        split.users = 1;
        split
    }

    proptest! {
        /// Whatever the ticks say, attributed time never goes back and never exceeds the guest's time.
        #[test]
        fn attribution_is_monotonic_and_bounded(steps in prop::collection::vec((0u64..5_000_000, 0u8..4), 0..200)) {
            let mut split = running(LevelSource::Kicks);
            let (mut now, mut last_user, mut last_kernel) = (0u64, 0, 0);
            for (step, cpl) in steps {
                now += step;
                split.tick(cpl, now);
                let (user, kernel) = (split.read(Level::User, now), split.read(Level::Kernel, now));
                prop_assert!(user >= last_user && kernel >= last_kernel);
                prop_assert_eq!(user + kernel, now);
                (last_user, last_kernel) = (user, kernel);
            }
        }
    }

    #[test]
    fn time_between_spans_is_not_attributed() {
        let mut split = running(LevelSource::Kicks);
        split.tick(3, 1_000);
        // Off from 1,500 to 9,000: only the 500 before and the 300 after belong to the next look.
        split.stop(1_500);
        split.users = 1;
        split.mark_ns = 9_000;
        split.tick(0, 9_300);
        assert_eq!(split.read(Level::User, 9_300), 1_000);
        assert_eq!(split.read(Level::Kernel, 9_300), 800);
    }

    #[test]
    fn ticks_without_an_event_that_wants_them_change_nothing() {
        let mut split = CplSplit::new(0);
        split.tick(3, 1_000);
        assert_eq!(split.read(Level::User, 2_000), 0);
    }
}
