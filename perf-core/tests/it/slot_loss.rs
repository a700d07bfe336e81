//! Tests of events that lose their slot while they count: detection, times and recovery.

use std::sync::Arc;

use perf_core::pmu::sim::{SimPmu, SimPmuConfig};
use perf_core::pmu::{Pmu, VcpuId};
use perf_core::time::ManualClock;
use perf_core::*;

const VCPU: VcpuId = VcpuId(0);
/// A time in nanoseconds after which a tick checks for lost slots again.
const WHILE_NS: u64 = 50_000_000;

struct SlotLossFixture {
    core: PerfCore,
    clock: Arc<ManualClock>,
    pmu: SimPmu,
    vcpu: Arc<VcpuEventContext>,
    session: Session,
}

impl SlotLossFixture {
    fn new(config: SimPmuConfig) -> Self {
        let clock = Arc::new(ManualClock::new());
        let core = PerfCore::new(PerfCoreConfig {
            clock: clock.clone(),
            ..PerfCoreConfig::default()
        });
        let pmu = SimPmu::new(config);
        core.register(Arc::new(pmu.clone()) as Arc<dyn Pmu>);
        let vcpu = core.add_vcpu(VCPU, 1).unwrap();
        vcpu.sched_in();
        let session = core.session(0, SessionRole::Guest);
        Self {
            core,
            clock,
            pmu,
            vcpu,
            session,
        }
    }

    fn slots(slots: usize) -> Self {
        Self::new(SimPmuConfig {
            slots: Some(slots),
            ..SimPmuConfig::default()
        })
    }

    fn open(&self, pinned: bool) -> EventHandle {
        let attr = Attr {
            pinned,
            ..Attr::counting(EventType::SIM, 1)
        };
        let target = EventOpenTarget::Vcpu(VCPU);
        self.core
            .open(&self.session, attr, target, None, OpenFlags::default())
            .unwrap()
    }

    /// Runs the vCPU for `ns` nanoseconds. Every active event counts these nanoseconds.
    fn run(&self, ns: u64) {
        self.clock.advance(ns);
        self.pmu.advance(VCPU, |_| ns);
    }
}

/// A tick detects that a pinned event has lost its slot, even if the event is not read. The event
/// then enters the error state.
#[test]
fn pinned_event_enters_error_state_when_its_slot_is_taken_and_recovers_when_enabled() {
    let rig = SlotLossFixture::slots(2);
    let events = [rig.open(true), rig.open(true)];
    rig.run(1000);
    let errors = rig.vcpu.errors();
    rig.pmu.take_slots(1);
    rig.run(WHILE_NS);
    assert_eq!(rig.vcpu.errors(), errors, "nobody has looked");
    rig.core.tick();
    assert_eq!(rig.vcpu.errors(), errors + 1);
    assert!(rig.core.has_unhandled_errors());
    assert!(rig.vcpu.take_errors() && !rig.vcpu.take_errors() && !rig.core.has_unhandled_errors());
    let lost = events.iter().find(|e| e.state() == EventState::Error).unwrap();
    let kept = events.iter().find(|e| e.state() == EventState::Active).unwrap();
    assert_eq!(lost.failure().unwrap().cause, PinnedEventFailureCause::Taken);
    assert_eq!(kept.failure(), None);
    assert_eq!(
        (lost.count().unwrap(), kept.count().unwrap()),
        (1000, 1000 + WHILE_NS)
    );
    lost.enable(EventOrGroup::Event).unwrap();
    let failure = lost.failure().unwrap();
    // The event cannot be started, because its slot is still taken.
    assert_eq!(failure.cause, PinnedEventFailureCause::Busy);
    assert_eq!(failure.since_ns, rig.vcpu.time_ns());
    rig.pmu.take_slots(0);
    lost.enable(EventOrGroup::Event).unwrap();
    assert_eq!((lost.state(), lost.failure()), (EventState::Active, None));
    rig.run(10);
    assert_eq!(lost.count().unwrap(), 1010);
}

/// The time running ends when the slot was taken away, not when the loss was detected.
#[test]
fn running_time_ends_when_slot_is_lost() {
    let late_ns = 300;
    let rig = SlotLossFixture::new(SimPmuConfig {
        slots: Some(1),
        late_ns,
        ..SimPmuConfig::default()
    });
    let event = rig.open(true);
    rig.run(1000);
    rig.pmu.take_slots(1);
    rig.run(late_ns);
    let reading = event.read().unwrap();
    assert_eq!(event.state(), EventState::Error);
    assert_eq!((reading.value, reading.time_running_ns), (1000, 1000));
    assert_eq!(event.failure().unwrap().since_ns, 1000);
    // The reported time of loss is limited to the time at which the event was started.
    rig.pmu.take_slots(0);
    event.enable(EventOrGroup::Event).unwrap();
    rig.run(100);
    rig.pmu.take_slots(1);
    let reading = event.read().unwrap();
    assert_eq!(event.failure().unwrap().since_ns, 1000 + late_ns);
    assert!(
        reading.time_running_ns >= 1000 && reading.time_running_ns <= reading.time_enabled_ns,
        "{reading:?}"
    );
}

/// A multiplexed event that loses its slot does not fail. A later tick schedules it again, and its
/// time enabled includes the wait.
#[test]
fn flexible_event_waits_for_its_slot_to_come_back() {
    let rig = SlotLossFixture::slots(1);
    let event = rig.open(false);
    rig.run(1000);
    rig.pmu.take_slots(1);
    rig.run(WHILE_NS);
    rig.core.tick();
    assert_eq!((event.state(), rig.vcpu.errors()), (EventState::Inactive, 0));
    assert!(rig.core.needs_tick(), "who would put it on again?");
    rig.run(WHILE_NS);
    rig.core.tick();
    rig.pmu.take_slots(0);
    rig.core.tick();
    assert_eq!(event.state(), EventState::Active);
    rig.run(1000);
    let reading = event.read().unwrap();
    assert_eq!(reading.value, 2000);
    assert_eq!(reading.time_enabled_ns, 2000 + 2 * WHILE_NS);
    // The running time includes the time up to the tick that detected the loss.
    assert_eq!(reading.time_running_ns, 2000 + WHILE_NS);
}

/// Reads and periodic ticks detect a lost slot. Ticks in quick succession skip the check, because
/// it takes a system call for each event.
#[test]
fn lost_slot_is_detected_by_reads_and_periodic_ticks() {
    let rig = SlotLossFixture::slots(1);
    let event = rig.open(true);
    rig.run(WHILE_NS);
    rig.core.tick();
    rig.pmu.take_slots(1);
    rig.run(1000);
    rig.core.tick();
    // This tick does not check the slot, because the last check was less than the minimum interval
    // ago.
    assert_eq!(event.state(), EventState::Active);
    assert_eq!(event.count().unwrap(), WHILE_NS);
    assert_eq!(event.state(), EventState::Error);
}
