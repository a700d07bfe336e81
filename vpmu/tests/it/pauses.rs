//! Tests of a guest that stops its counters for a few exits. Their events keep counting, the guest
//! observes no difference, and the host receives few requests.

use vpmu::registers::*;
use vpmu::*;

use crate::common::Guest;

/// Returns a guest with four running instruction counters that interrupt on overflow.
fn four_counters() -> Guest {
    let mut guest = Guest::new(Model::INTEL);
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

#[test]
fn a_switch_between_tasks_reads_all_events_twice_and_arms_those_that_were_written() {
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
        assert_eq!(guest.events.calls - calls, 8 + u64::from(written), "{written}");
        assert_eq!(guest.events.enables, enables, "none is started anew");
    }
}

#[test]
fn what_is_counted_in_a_pause_is_left_out() {
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
fn one_selectors_enable_bit_pauses_too() {
    let mut guest = Guest::new(Model::AMD);
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
    assert_eq!(
        guest.events.calls - calls,
        2,
        "two readings: it is armed as it was"
    );
    guest.write(PERF_CTL0, 0x53_00C1);
    assert_eq!(
        guest.events.enables,
        enables + 1,
        "another event is another event"
    );
}

/// Repeated pauses of other counters do not extend the pause of a stopped counter.
#[test]
fn a_counter_that_stays_stopped_gives_its_place_back_while_another_pauses_often() {
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
fn a_counter_that_stays_stopped_gives_its_place_back() {
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
fn an_overflow_in_a_pause_is_none_and_ends_it() {
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
fn a_paused_counter_makes_room_for_another() {
    let mut guest = Guest::new(Model::INTEL);
    guest.events.set_places(Some(1));
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
fn an_event_that_is_lost_in_a_pause_is_started_anew() {
    let mut guest = four_counters();
    guest.write(IA32_PERF_GLOBAL_CTRL, 0);
    guest.events.set_places(Some(0));
    guest.vpmu.reconcile(&mut guest.events);
    assert!(!guest.vpmu.has_uncounted(), "nobody wants it now");
    guest.events.set_places(None);
    guest.write(IA32_PERF_GLOBAL_CTRL, 0xF);
    guest.run(7);
    assert_eq!(guest.read(IA32_PMC0), (1 << 48) - 1_000_000 + 7);
}

#[test]
fn what_costs_more_than_a_call_while_it_counts_is_stopped_at_once() {
    let mut guest = four_counters();
    guest.events.backing_of = |request| match request.event {
        GuestEvent::Architectural(ArchEvent::Instructions) => Backing::Hardware,
        _ => Backing::Exact,
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
