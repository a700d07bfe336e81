//! Timers of perf-core in the main loop: one for ticks, and one for rotations of multiplexed events
//! that are due between ticks.
//!
//! Under [`MuxPolicy::Rotate`], every tick rotates events. Under [`MuxPolicy::Adaptive`], perf-core
//! determines when the next rotation is due, and the second timer fires then.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::str::FromStr;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use perf_core::mux::MuxPolicy;
use perf_core::pmu::host::HostPerfCapabilities;
use perf_core::{PendingTickWork, PerfCore, TickTimer, error_line};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
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

/// Tick interval while ticks have work: events are multiplexed, sampled by frequency or throttled.
const TICK_INTERVAL: Duration = Duration::from_millis(4);
/// Tick interval while ticks only check whether the host has taken hardware counters away. Each
/// tick wakes the main thread, which is costly for a VM that shares its CPU with many others.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Requests of perf-core for ticks, which wake the main loop.
#[derive(Debug, Default)]
pub struct TickRequests {
    /// Event that wakes the main loop after a request; unset until the loop has a timer.
    wakeup: OnceLock<EventFd>,
    /// The most demanding [`PendingTickWork`] that the timer satisfies or that was requested.
    need: AtomicU8,
}

impl TickTimer for TickRequests {
    fn request(&self, need: PendingTickWork) {
        let need = need as u8;
        // Most requests find the timer running, and then cost one load.
        if self.need.load(Ordering::Relaxed) < need
            && self.need.fetch_max(need, Ordering::AcqRel) < need
            && let Some(wakeup) = self.wakeup.get()
        {
            // A write fails only if the counter is at its maximum, and the loop then wakes anyway.
            let _ = wakeup.write(1);
        }
    }
}

/// Timer for perf-core's ticks. Fires every 4 ms while ticks have work, less often while hardware
/// counters are in use, and otherwise not at all.
#[derive(Debug)]
pub struct SchedulingTickTimer {
    timer: TimerFd,
    wakeup: EventFd,
    requests: Arc<TickRequests>,
    /// Interval of the timer; `None` while it is disarmed.
    interval: Option<Duration>,
}

impl SchedulingTickTimer {
    /// Creates a disarmed timer that serves `requests`. Wakes the main loop once, for requests that
    /// were made before.
    ///
    /// # Errors
    /// Returns an error if timerfd_create or eventfd fails.
    pub fn new(requests: Arc<TickRequests>) -> io::Result<Self> {
        let timer = TimerFd::new().map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
        let wakeup = EventFd::new(EFD_NONBLOCK)?;
        wakeup.write(1)?;
        // A second timer for the same requests would not be woken.
        let _ = requests.wakeup.set(wakeup.try_clone()?);
        Ok(Self {
            timer,
            wakeup,
            requests,
            interval: None,
        })
    }

    /// Returns the event that wakes the main loop after a request for more ticks.
    /// [`SchedulingTickTimer::serve_requests`] serves the request.
    pub fn wakeup(&self) -> &EventFd {
        &self.wakeup
    }

    /// Runs perf-core's tick after the timer has expired, and adjusts the interval. Accounts for
    /// all expirations if this thread is late.
    pub fn handle_expiration(&mut self, core: &PerfCore) {
        let expirations = self.timer.wait().unwrap_or(1);
        core.tick_after(expirations);
        self.requests
            .need
            .store(core.tick_need() as u8, Ordering::Release);
        // A context may have requested ticks after `tick_need` examined it and before the store.
        let need = core.tick_need();
        self.requests.need.fetch_max(need as u8, Ordering::AcqRel);
        self.set_interval(interval_for(need as u8));
    }

    /// Shortens the interval if perf-core has requested more ticks. Must be called after each
    /// iteration of the main loop, when no expiration is left to be handled. Never lengthens the
    /// interval, because a client that keeps opening and closing events could then suppress ticks.
    pub fn serve_requests(&mut self) {
        let requested = interval_for(self.requests.need.load(Ordering::Acquire));
        if requested.is_some_and(|requested| self.interval.is_none_or(|interval| requested < interval)) {
            self.set_interval(requested);
        }
    }

    fn set_interval(&mut self, interval: Option<Duration>) {
        if interval == self.interval {
            return;
        }
        self.interval = interval;
        let set = match interval {
            Some(interval) => self.timer.reset(interval, Some(interval)),
            None => self.timer.clear(),
        };
        if let Err(e) = set {
            log::error!("timerfd_settime: {e}");
        }
    }
}

/// Returns the tick interval for a [`PendingTickWork`] as an integer.
fn interval_for(need: u8) -> Option<Duration> {
    if need >= PendingTickWork::Work as u8 {
        Some(TICK_INTERVAL)
    } else if need >= PendingTickWork::CheckCounters as u8 {
        Some(CHECK_INTERVAL)
    } else {
        None
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
        let handles = open_sim(&core, &session, 4);
        vcpu.sched_in();
        ContendedCore {
            core,
            handles,
            _kept: (session, vcpu),
        }
    }

    /// Opens `n` events of the simulated PMU.
    fn open_sim(core: &PerfCore, session: &Session, n: u64) -> Vec<EventHandle> {
        let open = |config| {
            let attr = Attr {
                ty: EventType::SIM,
                config,
                ..Attr::default()
            };
            let target = EventOpenTarget::Vcpu(VcpuId(0));
            core.open(session, attr, target, None, OpenFlags::default())
        };
        (0..n).map(|config| open(config).unwrap()).collect()
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

    /// Timer of a core without a main loop: the test calls its methods instead.
    fn timer_of(config: PerfCoreConfig) -> (PerfCore, SchedulingTickTimer) {
        let requests = Arc::new(TickRequests::default());
        let core = PerfCore::new(PerfCoreConfig {
            tick_timer: Some(requests.clone()),
            ..config
        });
        (core, SchedulingTickTimer::new(requests).unwrap())
    }

    /// Runs the main loop's work after a wakeup. Returns whether there was one.
    fn wakes(ticks: &mut SchedulingTickTimer) -> bool {
        let woken = ticks.wakeup().read().is_ok();
        ticks.serve_requests();
        woken
    }

    /// Ticks are not needed without hardware events, rare while hardware events count, and frequent
    /// once events share slots. The change is noticed at once, without polling.
    #[test]
    fn ticks_follow_requests() {
        let (core, mut ticks) = timer_of(PerfCoreConfig {
            mux: MuxPolicy::Rotate,
            ..PerfCoreConfig::default()
        });
        core.register(Arc::new(SimPmu::with_slots(2)));
        let vcpu = core.add_vcpu(VcpuId(0), 1).unwrap();
        let session = core.session(0, SessionRole::Admin);
        vcpu.sched_in();
        assert!(wakes(&mut ticks), "requests may precede the timer");
        assert_eq!(ticks.interval, None);
        let events = open_sim(&core, &session, 4);
        events[2..]
            .iter()
            .for_each(|h| h.disable(EventOrGroup::Event).unwrap());
        assert!(wakes(&mut ticks));
        ticks.handle_expiration(&core);
        assert_eq!(ticks.interval, Some(CHECK_INTERVAL));
        assert!(!wakes(&mut ticks));
        events[2..]
            .iter()
            .for_each(|h| h.enable(EventOrGroup::Event).unwrap());
        assert!(wakes(&mut ticks));
        assert_eq!(ticks.interval, Some(TICK_INTERVAL));
        ticks.handle_expiration(&core);
        ticks.handle_expiration(&core);
        assert_eq!(have_run(&events), 4);
        assert!(!wakes(&mut ticks), "a running timer is not requested again");
        drop(events);
        ticks.handle_expiration(&core);
        assert_eq!(ticks.interval, None);
    }

    /// Sampling with a fixed period needs frequent ticks only while an event is throttled, and
    /// perf-core requests them at once.
    #[test]
    fn throttling_requests_frequent_ticks() {
        let pmu = Arc::new(SimPmu::with_slots(2));
        let (core, mut ticks) = timer_of(PerfCoreConfig {
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
        wakes(&mut ticks);
        ticks.handle_expiration(&core);
        assert_eq!(ticks.interval, Some(CHECK_INTERVAL));
        for _ in 0..3 {
            while core.tick_need() != PendingTickWork::Work {
                pmu.advance(VcpuId(0), |_| 10);
                vcpu.service_overflows(&mut NoVcpuRegisters, &mut |_| ());
            }
            assert!(wakes(&mut ticks));
            assert_eq!(ticks.interval, Some(TICK_INTERVAL));
            ticks.handle_expiration(&core);
            assert_eq!(ticks.interval, Some(CHECK_INTERVAL));
        }
        drop(recorded);
        ticks.handle_expiration(&core);
        assert_eq!(ticks.interval, None);
    }

    /// If ticks were missed, the overflows are attributed to all the time that has elapsed. With a
    /// single tick's time, the period of a frequency event would become several times too long.
    #[test]
    fn missed_ticks_count_towards_elapsed_time() {
        let pmu = Arc::new(SimPmu::with_slots(1));
        let (core, mut ticks) = timer_of(PerfCoreConfig {
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
        assert!(wakes(&mut ticks), "an event with a frequency requests ticks");
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
