//! The main loop's timers for the perf core: ticks, and turns where they are shorter than a tick.
//!
//! Under [`MuxPolicy::Rotate`] every tick is a turn. Under [`MuxPolicy::Adaptive`] the core says when the
//! next turn is due, and a timer of its own rings then.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::str::FromStr;
use std::time::Duration;

use perf_core::mux::MuxPolicy;
use perf_core::pmu::host::HostProbe;
use perf_core::{Core, TickNeed, error_line};
use vmm_sys_util::timerfd::TimerFd;

use crate::kvm::host::Kvm;
use crate::kvm::turn_cost;

/// What `--mux` chooses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MuxChoice {
    /// The adaptive policy, with turns as long as what they cost here demands.
    #[default]
    Auto,
    /// A policy as it is.
    Fixed(MuxPolicy),
}

impl MuxChoice {
    /// How events take turns on this host, and how long the first turns of the adaptive policy are if that
    /// was measured. Where there are no counters nothing is measured.
    pub fn settle(self, kvm: &Kvm, probe: &HostProbe) -> (MuxPolicy, Option<Duration>) {
        match self {
            Self::Fixed(policy) => (policy, None),
            Self::Auto if probe.slots() == 0 => (MuxPolicy::Adaptive, None),
            Self::Auto => match turn_cost::probe(kvm, probe) {
                Ok(cost) => {
                    log::info!("events that share counters: {}", cost.in_words());
                    (MuxPolicy::Adaptive, Some(cost.turn()))
                }
                Err(e) => {
                    log::warn!(
                        "events that share counters take turns of a tick: {}",
                        error_line(&e)
                    );
                    (MuxPolicy::Rotate, None)
                }
            },
        }
    }
}

/// What is no choice of `--mux`.
#[derive(Debug, thiserror::Error)]
#[error("must be auto, adaptive or rotate")]
pub struct UnknownChoice;

impl FromStr for MuxChoice {
    type Err = UnknownChoice;

    fn from_str(text: &str) -> Result<Self, UnknownChoice> {
        match text {
            "auto" => Ok(Self::Auto),
            _ => text.parse().map(Self::Fixed).map_err(|_| UnknownChoice),
        }
    }
}

/// Least time between two rings. vCPUs whose turns are due within it take them together, so that many vCPUs
/// do not ring more often than a few.
const LEAST: Duration = Duration::from_micros(150);

/// Time between ticks while events take turns, or sample by a frequency that their period follows.
const TICK: Duration = Duration::from_millis(4);
/// Time between ticks while events sample at a fixed period, of which one may come to be throttled. Each is
/// a wake-up of the main thread, which a VM that shares its processor with many others pays for as often, and
/// has the less of the processor.
const WATCH: Duration = Duration::from_millis(32);
/// Time between looks whether ticks are needed, while they are not.
const IDLE_TICK: Duration = Duration::from_millis(100);
/// Ticks that still come every [`TICK`] after the last that was needed: who is throttled once is throttled
/// again, and is to wait for a tick then.
const LINGER: u32 = 250;

/// Rings every 4 ms while the core needs it, else rarely.
#[derive(Debug)]
pub struct Ticks {
    timer: TimerFd,
    pace: Duration,
    /// How many more come at [`TICK`] although none is needed.
    linger: u32,
}

impl Ticks {
    /// A timer that rings.
    ///
    /// # Errors
    /// timerfd_create or timerfd_settime failed.
    pub fn new() -> io::Result<Self> {
        let os = |e: vmm_sys_util::errno::Error| io::Error::from_raw_os_error(e.errno());
        let mut timer = TimerFd::new().map_err(os)?;
        timer.reset(TICK, Some(TICK)).map_err(os)?;
        Ok(Self {
            timer,
            pace: TICK,
            linger: 0,
        })
    }

    /// It rang: the core's tick, after which it may ring less often. Where this thread is late the
    /// timer has expired several times.
    pub fn rang(&mut self, core: &Core) {
        let expirations = self.timer.wait().unwrap_or(1);
        // A tick itself may leave nothing to do: it lifts throttles.
        let before = core.tick_need();
        core.tick_after(expirations);
        let need = core.tick_need();
        self.linger = match before.max(need) {
            TickNeed::Work => LINGER,
            TickNeed::Watch => self.linger.saturating_sub(1),
            TickNeed::None => 0,
        };
        self.keep(self.pace_for(need));
    }

    /// After whatever may have opened or enabled events: if ticks are needed now, the next one does not wait
    /// for the rare look. It never slows down, or who opens and closes all the time would keep ticks
    /// away.
    pub fn hurry(&mut self, core: &Core) {
        if self.pace > TICK {
            self.keep(self.pace_for(core.tick_need()).min(self.pace));
        }
    }

    fn pace_for(&self, need: TickNeed) -> Duration {
        match need {
            TickNeed::Work => TICK,
            TickNeed::Watch if self.linger > 0 => TICK,
            TickNeed::Watch => WATCH,
            TickNeed::None => IDLE_TICK,
        }
    }

    fn keep(&mut self, pace: Duration) {
        if pace != self.pace {
            self.pace = pace;
            if let Err(e) = self.timer.reset(pace, Some(pace)) {
                log::error!("timerfd_settime: {e}");
            }
        }
    }
}

impl AsRawFd for Ticks {
    fn as_raw_fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }
}

/// Rings when the next turn of events that share counters is due.
#[derive(Debug)]
pub struct Turns {
    policy: MuxPolicy,
    timer: TimerFd,
    armed: bool,
}

impl Turns {
    /// A timer that does not ring yet.
    ///
    /// # Errors
    /// timerfd_create failed.
    pub fn new(policy: MuxPolicy) -> io::Result<Self> {
        let timer = TimerFd::new().map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
        Ok(Self {
            policy,
            timer,
            armed: false,
        })
    }

    /// Sets the timer, if events share counters and it is not set: after each tick, because who shares
    /// changes.
    pub fn follow(&mut self, core: &Core) {
        if self.policy == MuxPolicy::Rotate || self.armed {
            return;
        }
        let Some(due) = core.next_turn_ns() else { return };
        let left = Duration::from_nanos(due.saturating_sub(core.now_ns())).max(LEAST);
        match self.timer.reset(left, None) {
            Ok(()) => self.armed = true,
            Err(e) => log::error!("timerfd_settime: {e}"),
        }
    }

    /// It rang: whose turn is over leaves, and the timer is set anew while events share counters.
    pub fn rang(&mut self, core: &Core) {
        let _ = self.timer.wait();
        self.armed = false;
        core.rotate();
        self.follow(core);
    }
}

impl AsRawFd for Turns {
    fn as_raw_fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use perf_core::attr::{Attr, EventType};
    use perf_core::pmu::VcpuId;
    use perf_core::pmu::sim::SimPmu;
    use perf_core::time::ManualClock;
    use perf_core::{
        CoreConfig, CpuMode, Handle, OpenFlags, OpenTarget, Role, SampleRegs, Scope, Session, VcpuContext,
    };

    use super::*;

    /// Registers of a vCPU that has none.
    struct Nowhere;

    impl SampleRegs for Nowhere {
        fn mode(&mut self) -> CpuMode {
            CpuMode::GuestKernel
        }

        fn ip(&mut self) -> u64 {
            0
        }
    }

    struct Rig {
        core: Core,
        handles: Vec<Handle>,
        _kept: (Session, Arc<VcpuContext>),
    }

    /// A core with four events for two slots.
    fn contended(mux: MuxPolicy) -> Rig {
        let core = Core::new(CoreConfig {
            mux,
            ..CoreConfig::default()
        });
        core.register(Arc::new(SimPmu::with_slots(2)));
        let vcpu = core.add_vcpu(VcpuId(0), 1).unwrap();
        let session = core.session(0, Role::Admin);
        let open = |config| {
            let attr = Attr {
                ty: EventType::SIM,
                config,
                ..Attr::default()
            };
            let target = OpenTarget::Vcpu(VcpuId(0));
            core.open(&session, attr, target, None, OpenFlags::default())
        };
        let handles = (0..4).map(|config| open(config).unwrap()).collect();
        vcpu.sched_in();
        Rig {
            core,
            handles,
            _kept: (session, vcpu),
        }
    }

    fn have_run(handles: &[Handle]) -> usize {
        let ran = |h: &&Handle| h.read().unwrap().time_running_ns > 0;
        handles.iter().filter(ran).count()
    }

    /// No tick comes in this test: turns happen because the timer rings.
    #[test]
    fn adaptive_turns_come_by_their_own_timer() {
        let Rig { core, handles, _kept } = contended(MuxPolicy::Adaptive);
        assert_eq!(have_run(&handles), 2);
        let mut turns = Turns::new(MuxPolicy::Adaptive).unwrap();
        turns.follow(&core);
        let mut rings = 0;
        while have_run(&handles) < 4 {
            assert!(turns.armed && rings < 100, "{rings} rings brought nobody's turn");
            turns.rang(&core);
            rings += 1;
        }
    }

    /// Events that come while nothing needed ticks take turns at once, not after the rare look of 100 ms.
    #[test]
    fn ticks_hurry_when_events_begin_to_share() {
        let mut rig = contended(MuxPolicy::Rotate);
        let more = rig.handles.split_off(2);
        more.iter().for_each(|h| h.disable(Scope::Event).unwrap());
        let mut ticks = Ticks::new().unwrap();
        ticks.rang(&rig.core);
        ticks.hurry(&rig.core);
        assert_eq!(ticks.pace, IDLE_TICK, "two events on two slots need no ticks");
        more.iter().for_each(|h| h.enable(Scope::Event).unwrap());
        ticks.hurry(&rig.core);
        assert_eq!(ticks.pace, TICK);
        ticks.rang(&rig.core);
        ticks.rang(&rig.core);
        assert_eq!((have_run(&rig.handles), have_run(&more)), (2, 2));
    }

    /// A recording at a fixed period needs a look now and then. Once it was throttled, each tick is to lift
    /// that for a while.
    #[test]
    fn ticks_are_rare_beside_a_recording_until_it_is_throttled() {
        let pmu = Arc::new(SimPmu::with_slots(2));
        let core = Core::new(CoreConfig {
            sample_rate_hz: 1000,
            ..CoreConfig::default()
        });
        core.register(pmu.clone());
        let vcpu = core.add_vcpu(VcpuId(0), 1).unwrap();
        let session = core.session(0, Role::Admin);
        let attr = Attr::sampling(EventType::SIM, 1, 10);
        let target = OpenTarget::Vcpu(VcpuId(0));
        let flags = OpenFlags {
            cookie: Some(1),
            ..OpenFlags::default()
        };
        let recorded = core.open(&session, attr, target, None, flags).unwrap();
        vcpu.sched_in();
        let mut ticks = Ticks::new().unwrap();
        ticks.rang(&core);
        assert_eq!(ticks.pace, WATCH);
        while core.tick_need() != TickNeed::Work {
            pmu.advance(VcpuId(0), |_| 10);
            vcpu.service_overflows(&mut Nowhere, &mut |_| ());
        }
        ticks.rang(&core);
        assert_eq!((ticks.pace, core.tick_need()), (TICK, TickNeed::Watch));
        for _ in 0..LINGER {
            assert_eq!(ticks.pace, TICK);
            ticks.rang(&core);
        }
        assert_eq!(ticks.pace, WATCH);
        drop(recorded);
        ticks.rang(&core);
        assert_eq!(ticks.pace, IDLE_TICK);
    }

    /// The main loop was late for several ticks: what overflowed in them is the rate of all of
    /// them, not of one, which would make the period that follows a frequency several times as
    /// long.
    #[test]
    fn late_ticks_count_for_the_time_that_has_passed() {
        let pmu = Arc::new(SimPmu::with_slots(1));
        let core = Core::new(CoreConfig {
            // Stands still, so that only ticks adjust the period.
            clock: Arc::new(ManualClock::default()),
            ..CoreConfig::default()
        });
        core.register(pmu.clone());
        let vcpu = core.add_vcpu(VcpuId(0), 1).unwrap();
        let session = core.session(0, Role::Admin);
        let attr = Attr {
            freq: true,
            // One overflow a tick.
            ..Attr::sampling(EventType::SIM, 1, 250)
        };
        let target = OpenTarget::Vcpu(VcpuId(0));
        let flags = OpenFlags {
            cookie: Some(1),
            ..OpenFlags::default()
        };
        let _recorded = core.open(&session, attr, target, None, flags).unwrap();
        vcpu.sched_in();
        let overflows_in = |counts| {
            pmu.advance(VcpuId(0), |_| counts);
            let mut times = 0;
            vcpu.service_overflows(&mut Nowhere, &mut |overflowed| times += overflowed.times);
            times
        };
        let mut ticks = Ticks::new().unwrap();
        // The first period is 1. The next one is an eighth of the way to what overflowed in a tick.
        assert_eq!(overflows_in(8_000), 8_000);
        std::thread::sleep(5 * TICK);
        ticks.rang(&core);
        let times = overflows_in(1_000_000);
        assert!(
            times > 1_000_000 / 300,
            "{times} overflows: a period for one tick"
        );
    }

    #[test]
    fn the_timer_rests_where_nobody_waits_and_where_ticks_are_the_turns() {
        let rig = contended(MuxPolicy::Rotate);
        let mut turns = Turns::new(MuxPolicy::Rotate).unwrap();
        turns.follow(&rig.core);
        assert!(!turns.armed);

        let mut rig = contended(MuxPolicy::Adaptive);
        let mut turns = Turns::new(MuxPolicy::Adaptive).unwrap();
        turns.follow(&rig.core);
        assert!(turns.armed);
        rig.handles.truncate(2);
        turns.rang(&rig.core);
        assert!(!turns.armed, "two events on two slots take no turns");
    }
}
