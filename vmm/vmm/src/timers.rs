//! Timers of perf-core in the main loop: one for ticks, and one for rotations of multiplexed events
//! that are due between ticks.
//!
//! Under [`MuxPolicy::Rotate`], every tick rotates events. Under [`MuxPolicy::Adaptive`], perf-core
//! determines when the next rotation is due, and the second timer fires then.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::str::FromStr;
use std::time::Duration;

use perf_core::mux::MuxPolicy;
use perf_core::pmu::host::HostPerfCapabilities;
use perf_core::{PendingTickWork, PerfCore, error_line};
use vmm_sys_util::timerfd::TimerFd;

use crate::kvm::host::Kvm;
use crate::kvm::rotation_cost;

/// Value of `--mux`, from which [`MuxPolicyChoice::resolve_policy`] derives the policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MuxPolicyChoice {
    /// Adaptive multiplexing, with an interval that follows from the measured cost of a rotation.
    #[default]
    Auto,
    /// The multiplexing policy that the operator has chosen.
    Fixed(MuxPolicy),
}

impl MuxPolicyChoice {
    /// Returns the multiplexing policy for this host and, if the cost of a rotation was measured,
    /// the initial interval of the adaptive policy. Nothing is measured on a host without hardware
    /// counters.
    pub fn resolve_policy(self, kvm: &Kvm, probe: &HostPerfCapabilities) -> (MuxPolicy, Option<Duration>) {
        match self {
            Self::Fixed(policy) => (policy, None),
            Self::Auto if probe.slots() == 0 => (MuxPolicy::Adaptive, None),
            Self::Auto => match rotation_cost::probe(kvm, probe) {
                Ok(cost) => {
                    log::info!("multiplexing: {}", cost.in_words());
                    (MuxPolicy::Adaptive, Some(cost.turn()))
                }
                Err(e) => {
                    log::warn!("multiplexing intervals are ticks: {}", error_line(&e));
                    (MuxPolicy::Rotate, None)
                }
            },
        }
    }
}

/// Error when parsing [`MuxPolicyChoice`].
#[derive(Debug, thiserror::Error)]
#[error("must be auto, adaptive or rotate")]
pub struct ParseMuxPolicyError;

impl FromStr for MuxPolicyChoice {
    type Err = ParseMuxPolicyError;

    fn from_str(text: &str) -> Result<Self, ParseMuxPolicyError> {
        match text {
            "auto" => Ok(Self::Auto),
            _ => text.parse().map(Self::Fixed).map_err(|_| ParseMuxPolicyError),
        }
    }
}

/// Minimum time between two expirations of the rotation timer. Rotations that are due on several
/// vCPUs within this time are performed together, so the number of vCPUs does not affect the rate
/// of the timer.
const MIN_ROTATION_INTERVAL: Duration = Duration::from_micros(150);

/// Tick interval while events are multiplexed or sampled by frequency.
const TICK_INTERVAL: Duration = Duration::from_millis(4);
/// Tick interval while ticks are needed only to unthrottle events that are sampled with a fixed
/// period. Longer than [`TICK_INTERVAL`], because each tick wakes the main thread, which is costly
/// for a VM that shares its CPU with many others.
const UNTHROTTLE_INTERVAL: Duration = Duration::from_millis(32);
/// Tick interval while no event needs ticks. Each tick checks whether this is still so.
const IDLE_INTERVAL: Duration = Duration::from_millis(100);
/// Number of ticks at [`TICK_INTERVAL`] that follow the last tick that an event needed. An event
/// that was throttled once will probably be throttled again, and then waits for a tick.
const EXTRA_TICKS: u32 = 250;

/// Timer for perf-core's ticks. Fires every 4 ms while an event needs ticks, and less often
/// otherwise.
#[derive(Debug)]
pub struct SchedulingTickTimer {
    timer: TimerFd,
    pace: Duration,
    /// Number of remaining ticks at [`TICK_INTERVAL`] that no event needs any more.
    extra_ticks: u32,
}

impl SchedulingTickTimer {
    /// Creates the timer, which is already armed.
    ///
    /// # Errors
    /// Returns an error if timerfd_create or timerfd_settime fails.
    pub fn new() -> io::Result<Self> {
        let os = |e: vmm_sys_util::errno::Error| io::Error::from_raw_os_error(e.errno());
        let mut timer = TimerFd::new().map_err(os)?;
        timer.reset(TICK_INTERVAL, Some(TICK_INTERVAL)).map_err(os)?;
        Ok(Self {
            timer,
            pace: TICK_INTERVAL,
            extra_ticks: 0,
        })
    }

    /// Runs perf-core's tick after the timer has expired, and adjusts the interval. Accounts for
    /// all expirations if this thread is late.
    pub fn handle_expiration(&mut self, core: &PerfCore) {
        let expirations = self.timer.wait().unwrap_or(1);
        // Determine the need before the tick, because a tick may remove it by unthrottling events.
        let before = core.tick_need();
        core.tick_after(expirations);
        let need = core.tick_need();
        self.extra_ticks = match before.max(need) {
            PendingTickWork::Work => EXTRA_TICKS,
            PendingTickWork::Watch => self.extra_ticks.saturating_sub(1),
            PendingTickWork::None => 0,
        };
        self.keep(self.pace_for(need));
    }

    /// Shortens the tick interval if an event needs ticks now. Must be called after events may have
    /// been opened or enabled. Never lengthens the interval, because a client that keeps opening
    /// and closing events could then suppress ticks.
    pub fn shorten_interval(&mut self, core: &PerfCore) {
        if self.pace > TICK_INTERVAL {
            self.keep(self.pace_for(core.tick_need()).min(self.pace));
        }
    }

    fn pace_for(&self, need: PendingTickWork) -> Duration {
        match need {
            PendingTickWork::Work => TICK_INTERVAL,
            PendingTickWork::Watch if self.extra_ticks > 0 => TICK_INTERVAL,
            PendingTickWork::Watch => UNTHROTTLE_INTERVAL,
            PendingTickWork::None => IDLE_INTERVAL,
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

impl AsRawFd for SchedulingTickTimer {
    fn as_raw_fd(&self) -> RawFd {
        self.timer.as_raw_fd()
    }
}

/// Timer that fires when a rotation of multiplexed events is due.
#[derive(Debug)]
pub struct RotationTimer {
    policy: MuxPolicy,
    timer: TimerFd,
    armed: bool,
}

impl RotationTimer {
    /// Creates the timer, which is not armed yet.
    ///
    /// # Errors
    /// Returns an error if timerfd_create fails.
    pub fn new(policy: MuxPolicy) -> io::Result<Self> {
        let timer = TimerFd::new().map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
        Ok(Self {
            policy,
            timer,
            armed: false,
        })
    }

    /// Arms the timer for the next rotation if events are multiplexed and the timer is not armed.
    /// Must be called after each tick, because the set of multiplexed events changes.
    pub fn follow(&mut self, core: &PerfCore) {
        if self.policy == MuxPolicy::Rotate || self.armed {
            return;
        }
        let Some(due) = core.next_turn_ns() else { return };
        let left = Duration::from_nanos(due.saturating_sub(core.now_ns())).max(MIN_ROTATION_INTERVAL);
        match self.timer.reset(left, None) {
            Ok(()) => self.armed = true,
            Err(e) => log::error!("timerfd_settime: {e}"),
        }
    }

    /// Rotates the events that are due after the timer has expired. Arms the timer again while
    /// events are multiplexed.
    pub fn handle_expiration(&mut self, core: &PerfCore) {
        let _ = self.timer.wait();
        self.armed = false;
        core.rotate();
        self.follow(core);
    }
}

impl AsRawFd for RotationTimer {
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
        CpuMode, EventHandle, EventOpenTarget, EventOrGroup, OpenFlags, PerfCoreConfig, SampleRegs, Session,
        SessionRole, VcpuEventContext,
    };

    use super::*;

    /// Registers of a fictitious vCPU that is always in guest kernel mode at address 0.
    struct NoVcpuRegisters;

    impl SampleRegs for NoVcpuRegisters {
        fn mode(&mut self) -> CpuMode {
            CpuMode::GuestKernel
        }

        fn ip(&mut self) -> u64 {
            0
        }
    }

    struct ContendedCore {
        core: PerfCore,
        handles: Vec<EventHandle>,
        _kept: (Session, Arc<VcpuEventContext>),
    }

    /// A perf core with four events for two slots.
    fn contended(mux: MuxPolicy) -> ContendedCore {
        let core = PerfCore::new(PerfCoreConfig {
            mux,
            ..PerfCoreConfig::default()
        });
        core.register(Arc::new(SimPmu::with_slots(2)));
        let vcpu = core.add_vcpu(VcpuId(0), 1).unwrap();
        let session = core.session(0, SessionRole::Admin);
        let open = |config| {
            let attr = Attr {
                ty: EventType::SIM,
                config,
                ..Attr::default()
            };
            let target = EventOpenTarget::Vcpu(VcpuId(0));
            core.open(&session, attr, target, None, OpenFlags::default())
        };
        let handles = (0..4).map(|config| open(config).unwrap()).collect();
        vcpu.sched_in();
        ContendedCore {
            core,
            handles,
            _kept: (session, vcpu),
        }
    }

    fn have_run(handles: &[EventHandle]) -> usize {
        let ran = |h: &&EventHandle| h.read().unwrap().time_running_ns > 0;
        handles.iter().filter(ran).count()
    }

    /// [`RotationTimer`] rotates events. The test runs no ticks, so nothing else can rotate them.
    #[test]
    fn rotation_timer_rotates_events() {
        let ContendedCore { core, handles, _kept } = contended(MuxPolicy::Adaptive);
        assert_eq!(have_run(&handles), 2);
        let mut turns = RotationTimer::new(MuxPolicy::Adaptive).unwrap();
        turns.follow(&core);
        let mut rings = 0;
        while have_run(&handles) < 4 {
            assert!(turns.armed && rings < 100, "{rings} rings brought nobody's turn");
            turns.handle_expiration(&core);
            rings += 1;
        }
    }

    /// Events that are opened while no ticks are needed are rotated after a short interval, and not
    /// only after the idle interval of 100 ms.
    #[test]
    fn tick_interval_shortens_when_events_multiplex() {
        let mut rig = contended(MuxPolicy::Rotate);
        let more = rig.handles.split_off(2);
        more.iter().for_each(|h| h.disable(EventOrGroup::Event).unwrap());
        let mut ticks = SchedulingTickTimer::new().unwrap();
        ticks.handle_expiration(&rig.core);
        ticks.shorten_interval(&rig.core);
        assert_eq!(ticks.pace, IDLE_INTERVAL, "two events on two slots need no ticks");
        more.iter().for_each(|h| h.enable(EventOrGroup::Event).unwrap());
        ticks.shorten_interval(&rig.core);
        assert_eq!(ticks.pace, TICK_INTERVAL);
        ticks.handle_expiration(&rig.core);
        ticks.handle_expiration(&rig.core);
        assert_eq!((have_run(&rig.handles), have_run(&more)), (2, 2));
    }

    /// Sampling with a fixed period needs few ticks. After an event was throttled, ticks are
    /// frequent for a while.
    #[test]
    fn fixed_period_sampling_ticks_rarely_until_throttled() {
        let pmu = Arc::new(SimPmu::with_slots(2));
        let core = PerfCore::new(PerfCoreConfig {
            sample_rate_hz: 1000,
            ..PerfCoreConfig::default()
        });
        core.register(pmu.clone());
        let vcpu = core.add_vcpu(VcpuId(0), 1).unwrap();
        let session = core.session(0, SessionRole::Admin);
        let attr = Attr::sampling(EventType::SIM, 1, 10);
        let target = EventOpenTarget::Vcpu(VcpuId(0));
        let flags = OpenFlags {
            cookie: Some(1),
            ..OpenFlags::default()
        };
        let recorded = core.open(&session, attr, target, None, flags).unwrap();
        vcpu.sched_in();
        let mut ticks = SchedulingTickTimer::new().unwrap();
        ticks.handle_expiration(&core);
        assert_eq!(ticks.pace, UNTHROTTLE_INTERVAL);
        while core.tick_need() != PendingTickWork::Work {
            pmu.advance(VcpuId(0), |_| 10);
            vcpu.service_overflows(&mut NoVcpuRegisters, &mut |_| ());
        }
        ticks.handle_expiration(&core);
        assert_eq!(
            (ticks.pace, core.tick_need()),
            (TICK_INTERVAL, PendingTickWork::Watch)
        );
        for _ in 0..EXTRA_TICKS {
            assert_eq!(ticks.pace, TICK_INTERVAL);
            ticks.handle_expiration(&core);
        }
        assert_eq!(ticks.pace, UNTHROTTLE_INTERVAL);
        drop(recorded);
        ticks.handle_expiration(&core);
        assert_eq!(ticks.pace, IDLE_INTERVAL);
    }

    /// If ticks were missed, the overflows are attributed to all the time that has elapsed. With a
    /// single tick's time, the period of a frequency event would become several times too long.
    #[test]
    fn missed_ticks_count_towards_elapsed_time() {
        let pmu = Arc::new(SimPmu::with_slots(1));
        let core = PerfCore::new(PerfCoreConfig {
            // The clock does not advance, so only ticks adjust the period.
            clock: Arc::new(ManualClock::default()),
            ..PerfCoreConfig::default()
        });
        core.register(pmu.clone());
        let vcpu = core.add_vcpu(VcpuId(0), 1).unwrap();
        let session = core.session(0, SessionRole::Admin);
        let attr = Attr {
            freq: true,
            // One overflow per tick.
            ..Attr::sampling(EventType::SIM, 1, 250)
        };
        let target = EventOpenTarget::Vcpu(VcpuId(0));
        let flags = OpenFlags {
            cookie: Some(1),
            ..OpenFlags::default()
        };
        let _recorded = core.open(&session, attr, target, None, flags).unwrap();
        vcpu.sched_in();
        let overflows_in = |counts| {
            pmu.advance(VcpuId(0), |_| counts);
            let mut times = 0;
            vcpu.service_overflows(&mut NoVcpuRegisters, &mut |overflowed| times += overflowed.times);
            times
        };
        let mut ticks = SchedulingTickTimer::new().unwrap();
        // The first period is 1. Each adjustment moves it by an eighth of the distance to the
        // number of overflows per tick.
        assert_eq!(overflows_in(8_000), 8_000);
        std::thread::sleep(5 * TICK_INTERVAL);
        ticks.handle_expiration(&core);
        let times = overflows_in(1_000_000);
        assert!(
            times > 1_000_000 / 300,
            "{times} overflows: a period for one tick"
        );
    }

    #[test]
    fn rotation_timer_is_disarmed_without_multiplexing() {
        let rig = contended(MuxPolicy::Rotate);
        let mut turns = RotationTimer::new(MuxPolicy::Rotate).unwrap();
        turns.follow(&rig.core);
        assert!(!turns.armed);

        let mut rig = contended(MuxPolicy::Adaptive);
        let mut turns = RotationTimer::new(MuxPolicy::Adaptive).unwrap();
        turns.follow(&rig.core);
        assert!(turns.armed);
        rig.handles.truncate(2);
        turns.handle_expiration(&rig.core);
        assert!(!turns.armed, "two events on two slots take no turns");
    }
}
