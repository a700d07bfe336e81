//! Tests of a guest that stops its counters for a few exits. The events of these counters keep
//! counting, the guest observes no difference, and the host receives few requests.

use vpmu::registers::*;
use vpmu::*;

use crate::common::Guest;

/// Returns a guest with four running instruction counters that interrupt on overflow.
fn four_counters() -> Guest {
    let mut guest = Guest::new(PmuModel::INTEL);
    guest.write(IA32_PERF_GLOBAL_CTRL, 0xF);
    for n in 0..4 {
        guest.write(IA32_A_PMC0 + n, (1 << 48) - 1_000_000);
        guest.write(IA32_PERFEVTSEL0 + n, 0x53_00C0);
    }
    guest
}

fn counter(n: u32) -> CounterIndex {
    CounterIndex::from_bit(n).unwrap()
}

/// A task switch costs one call per counter at the stop and one at the restart, which reads the
/// event or, if the guest has written the counter, re-arms it.
#[test]
fn task_switch_reads_or_rearms_each_counter_once() {
    let mut guest = four_counters();
    guest.run(100);
    for written in [0, 1, 4] {
        let (calls, enables) = (guest.events.calls, guest.events.enables);
        guest.write(IA32_PERF_GLOBAL_CTRL, 0);
        for n in 0..written {
            guest.read(IA32_PMC0 + n);
            guest.write(IA32_A_PMC0 + n, (1 << 48) - 2_000_000);
        }
        guest.write(IA32_PERF_GLOBAL_CTRL, 0xF);
        assert_eq!(guest.events.calls - calls, 8, "{written}");
        assert_eq!(guest.events.enables, enables, "none is started anew");
    }
}

#[test]
fn counts_during_pause_are_ignored() {
    let mut guest = four_counters();
    guest.run(100);
    guest.write(IA32_PERF_GLOBAL_CTRL, 0);
    let stopped = guest.read(IA32_PMC0);
    guest.run(700);
    assert_eq!(guest.read(IA32_PMC0), stopped);
    guest.write(IA32_A_PMC0 + 1, 5);
    guest.run(1);
    guest.write(IA32_PERF_GLOBAL_CTRL, 0xF);
    assert_eq!(guest.read(IA32_PMC0), stopped);
    assert_eq!(guest.read(IA32_PMC0 + 1), 5);
    guest.run(10);
    assert_eq!(guest.read(IA32_PMC0), stopped + 10);
    assert_eq!(guest.read(IA32_PMC0 + 1), 15);
    let overflow = (1 << 48) - (stopped + 10);
    guest.run(overflow - 1);
    assert!(!guest.vpmu.pmi_pending(), "not before its time");
    guest.run(1);
    assert!(guest.vpmu.pmi_pending());
}

#[test]
fn selector_enable_bit_pauses_counter() {
    let mut guest = Guest::new(PmuModel::AMD);
    guest.write(PERF_CTL0, 0x53_00C0);
    guest.run(10);
    let enables = guest.events.enables;
    guest.write(PERF_CTL0, 0x13_00C0);
    guest.run(100);
    assert_eq!(guest.read(PERF_CTR0), 10);
    guest.write(PERF_CTL0, 0x53_00C0);
    guest.run(1);
    assert_eq!(guest.read(PERF_CTR0), 11);
    assert_eq!(guest.events.enables, enables);
    let calls = guest.events.calls;
    guest.write(PERF_CTL0, 0x13_00C0);
    guest.write(PERF_CTL0, 0x53_00C0);
    // Stopping and starting the counter only reads its event twice.
    assert_eq!(guest.events.calls - calls, 2);
    guest.write(PERF_CTL0, 0x53_00C1);
    // A change of the event starts the new event.
    assert_eq!(guest.events.enables, enables + 1);
}

/// The event of a stopped counter is stopped and frees its slot even if other counters are paused
/// repeatedly in the meantime.
#[test]
fn stopped_counter_frees_slot_despite_other_pauses() {
    let mut guest = four_counters();
    guest.write(IA32_PERF_GLOBAL_CTRL, 2);
    assert!(guest.events.is_running(counter(0)));
    for _ in 0..100 {
        guest.write(IA32_PERF_GLOBAL_CTRL, 0);
        guest.write(IA32_PERF_GLOBAL_CTRL, 2);
    }
    assert!(!guest.events.is_running(counter(0)));
    assert!(guest.events.is_running(counter(1)));
}

#[test]
fn stopped_counter_frees_slot() {
    let mut guest = four_counters();
    guest.write(IA32_PERF_GLOBAL_CTRL, 0);
    assert!(guest.events.is_running(counter(0)));
    for _ in 0..100 {
        guest.vpmu.reconcile(&mut guest.events);
    }
    assert!(!guest.events.is_running(counter(0)));
    guest.run(50);
    guest.write(IA32_PERF_GLOBAL_CTRL, 0xF);
    guest.run(3);
    assert_eq!(guest.read(IA32_PMC0), (1 << 48) - 1_000_000 + 3);
}

#[test]
fn overflow_during_pause_ends_pause() {
    let mut guest = four_counters();
    guest.write(IA32_PERF_GLOBAL_CTRL, 0);
    guest.run(1_000_000);
    assert!(!guest.events.is_running(counter(0)));
    assert!(!guest.vpmu.pmi_pending());
    assert_eq!(guest.read(IA32_PERF_GLOBAL_STATUS), 0);
    guest.write(IA32_PERF_GLOBAL_CTRL, 0xF);
    guest.run(999_999);
    assert!(!guest.vpmu.pmi_pending());
    guest.run(1);
    assert!(guest.vpmu.pmi_pending());
}

#[test]
fn paused_counter_frees_slot_for_another() {
    let mut guest = Guest::new(PmuModel::INTEL);
    guest.events.set_slots(Some(1));
    guest.write(IA32_PERFEVTSEL0, 0x53_00C0);
    guest.write(IA32_PERF_GLOBAL_CTRL, 1);
    guest.write(IA32_PERF_GLOBAL_CTRL, 0);
    guest.write(IA32_PERFEVTSEL0 + 1, 0x53_00C0);
    guest.write(IA32_PERF_GLOBAL_CTRL, 2);
    assert!(guest.events.is_running(counter(1)));
    assert!(!guest.events.is_running(counter(0)));
    assert!(!guest.vpmu.has_uncounted());
}

#[test]
fn event_lost_during_pause_is_restarted() {
    let mut guest = four_counters();
    guest.write(IA32_PERF_GLOBAL_CTRL, 0);
    guest.events.set_slots(Some(0));
    guest.vpmu.reconcile(&mut guest.events);
    assert!(!guest.vpmu.has_uncounted(), "nobody wants it now");
    guest.events.set_slots(None);
    guest.write(IA32_PERF_GLOBAL_CTRL, 0xF);
    guest.run(7);
    assert_eq!(guest.read(IA32_PMC0), (1 << 48) - 1_000_000 + 7);
}

#[test]
fn exact_events_stop_immediately() {
    let mut guest = four_counters();
    guest.events.backing_of = |request| match request.event {
        DecodedCounterEvent::Architectural(ArchEvent::Instructions) => CounterBacking::Hardware,
        _ => CounterBacking::Exact,
    };
    guest.write(IA32_PERFEVTSEL0, 0x53_00C1);
    guest.write(IA32_PERF_GLOBAL_CTRL, 0);
    assert!(!guest.events.is_running(counter(0)), "or all would be stepped");
    assert!(guest.events.is_running(counter(1)));
    let enables = guest.events.enables;
    guest.run(10);
    guest.write(IA32_PERF_GLOBAL_CTRL, 0xF);
    guest.run(5);
    assert_eq!(guest.read(IA32_PMC0), (1 << 48) - 1_000_000 + 5);
    assert_eq!(guest.events.enables, enables, "it keeps its place, too");
}
