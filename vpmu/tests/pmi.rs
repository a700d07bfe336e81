//! Overflows and their interrupts: none lost, none spurious.

mod common;

use std::sync::Arc;

use common::Guest;
use vpmu::registers::*;
use vpmu::*;

const ENABLED: u64 = 0x43_003C;
const INTERRUPTING: u64 = 0x53_003C;
const SECOND_NS: u64 = 1_000_000_000;

fn sampling(period: u64) -> Guest {
    let mut guest = Guest::of("intel", None);
    guest.write(IA32_PERFEVTSEL0, INTERRUPTING);
    guest.write(IA32_A_PMC0, (1 << 48) - period);
    guest
}

#[test]
fn a_pmi_that_is_due_stays_due_whatever_the_guest_clears() {
    let mut guest = sampling(10);
    guest.run(10);
    guest.write(IA32_PERF_GLOBAL_STATUS_RESET, 1);
    guest.write(IA32_PERFEVTSEL0, 0);
    guest.write(IA32_PERF_GLOBAL_CTRL, 0);
    assert!(guest.vpmu.pmi_pending());
    guest.vpmu.pmi_delivered(0);
    assert!(!guest.vpmu.pmi_pending());
}

#[test]
fn counters_that_overflow_together_share_one_pmi_and_show_all_their_bits() {
    let mut guest = Guest::of("intel", Some("8+4"));
    guest.write(IA32_PERF_GLOBAL_CTRL, 0);
    for n in 0..8 {
        guest.write(IA32_PERFEVTSEL0 + n, INTERRUPTING);
        guest.write(IA32_A_PMC0 + n, (1 << 48) - 100);
    }
    guest.write(IA32_FIXED_CTR_CTRL, 0xBBBB);
    for n in 0..4 {
        guest.write(IA32_FIXED_CTR0 + n, (1 << 48) - 100);
    }
    guest.write(IA32_PERF_GLOBAL_CTRL, 0xF_0000_00FF);
    guest.run(100);
    assert_eq!(guest.read(IA32_PERF_GLOBAL_STATUS), 0xF_0000_00FF);
    guest.vpmu.pmi_delivered(0);
    assert!(!guest.vpmu.pmi_pending());
    assert_eq!(guest.vpmu.pmi_counts().delivered, 1);
    guest.run(1000);
    assert!(!guest.vpmu.pmi_pending());
}

#[test]
fn without_the_interrupt_bit_there_is_status_and_no_pmi() {
    let mut guest = Guest::of("intel", None);
    guest.write(IA32_PERFEVTSEL0, ENABLED);
    guest.write(IA32_A_PMC0, (1 << 48) - 10);
    guest.run(50);
    assert_eq!(
        (guest.read(IA32_PERF_GLOBAL_STATUS), guest.read(IA32_PMC0)),
        (1, 40)
    );
    assert!(!guest.vpmu.pmi_pending());
}

#[test]
fn a_counter_rewritten_while_it_runs_overflows_at_its_new_distance() {
    let mut guest = sampling(1_000);
    guest.run(999);
    guest.write(IA32_A_PMC0, (1 << 48) - 50);
    guest.run(49);
    assert!(!guest.vpmu.pmi_pending());
    guest.run(1);
    assert!(guest.vpmu.pmi_pending());
    assert_eq!(guest.read(IA32_PMC0), 0);
}

#[test]
fn a_read_that_comes_before_the_notification_sees_the_overflow_and_it_counts_once() {
    let mut guest = sampling(10);
    guest.events.run_through(25);
    assert_eq!(guest.read(IA32_PMC0), 15);
    assert_eq!(guest.read(IA32_PERF_GLOBAL_STATUS), 1);
    assert!(guest.vpmu.pmi_pending());
    guest.vpmu.pmi_delivered(0);
    guest.write(IA32_PERF_GLOBAL_STATUS_RESET, 1);
    guest.notice();
    assert_eq!(guest.read(IA32_PERF_GLOBAL_STATUS), 0);
    assert!(!guest.vpmu.pmi_pending());
}

#[test]
fn an_early_or_uncalled_for_notification_does_nothing_and_the_overflow_still_comes() {
    let mut guest = sampling(10);
    guest.events.run(4);
    for slot in 0..MAX_COUNTERS {
        let counter = CounterIndex::from_slot(slot).unwrap();
        assert!(!guest.vpmu.overflowed(counter, &mut guest.events));
    }
    guest.vpmu.reconcile(&mut guest.events);
    assert!(!guest.vpmu.pmi_pending());
    guest.run(6);
    assert!(guest.vpmu.pmi_pending());
}

#[test]
fn intel_masks_lvtpc_with_the_delivery_and_amd_does_not() {
    assert!(Vpmu::new(Model::INTEL).delivery_masks_lvtpc());
    assert!(!Vpmu::new(Model::AMD).delivery_masks_lvtpc());
}

#[test]
fn a_guest_with_period_one_gets_no_more_pmis_than_the_limit_and_loses_none() {
    const LIMIT: u32 = 1_000;
    let mut guest = sampling(1);
    guest.vpmu.set_pmi_limit(LIMIT);
    let mut now_ns = 0;
    let (mut delivered_in_first_second, mut held) = (0, 0);
    for _ in 0..3_000 {
        guest.run(1);
        match guest.vpmu.pmi_ready(now_ns) {
            PmiReady::No => panic!("the overflow was lost"),
            PmiReady::Now => {}
            PmiReady::NotBefore { time_ns } => {
                held += 1;
                assert!(guest.vpmu.pmi_pending());
                // Asking again is not another one held back.
                assert_ne!(guest.vpmu.pmi_ready(now_ns), PmiReady::Now);
                now_ns = time_ns;
                assert_eq!(guest.vpmu.pmi_ready(now_ns), PmiReady::Now);
            }
        }
        guest.vpmu.pmi_delivered(now_ns);
        delivered_in_first_second += u64::from(now_ns < SECOND_NS);
        guest.write(IA32_A_PMC0, (1 << 48) - 1);
        now_ns += 1_000;
    }
    assert!(
        delivered_in_first_second <= u64::from(LIMIT) + 17,
        "{delivered_in_first_second}"
    );
    assert_eq!(
        guest.vpmu.pmi_counts(),
        PmiCounts {
            delivered: 3_000,
            throttled: held
        }
    );
    assert!(held > 2_900);
}

#[test]
fn a_filter_stops_counters_that_are_already_running_and_lets_them_go_on_later() {
    let mut guest = Guest::of("intel", None);
    guest.write(IA32_PERFEVTSEL0, ENABLED);
    guest.write(IA32_FIXED_CTR_CTRL, 0x30);
    guest.write(IA32_PERF_GLOBAL_CTRL, 0x2_0000_000F);
    guest.run(10);
    let deny = EventFilter::from_toml("action = \"deny\"\nevents = [{ select = 0x3C, umask = 0 }]").unwrap();
    guest.vpmu.set_filter(Arc::new(deny));
    guest.vpmu.reconcile(&mut guest.events);
    guest.run(10);
    assert_eq!(guest.read(IA32_PMC0), 10, "denied: constant, and no fault");
    assert_eq!(
        guest.read(IA32_FIXED_CTR0 + 1),
        20,
        "the bitmap decides for fixed counters, and lists none"
    );
    let view = guest.vpmu.counters_view(&mut guest.events);
    assert!(view[0].enabled && !view[0].allowed);
    guest.vpmu.set_filter(Arc::new(EventFilter::allow_all()));
    guest.vpmu.reconcile(&mut guest.events);
    guest.run(10);
    assert_eq!(guest.read(IA32_PMC0), 20);
}

#[test]
fn the_operator_sees_what_the_guest_programmed() {
    let mut guest = sampling(10);
    guest.run(25);
    let view = guest.vpmu.counters_view(&mut guest.events);
    assert_eq!(view.len(), 7);
    let first = &view[0];
    assert_eq!(first.counter.to_string(), "gp0");
    assert_eq!((first.value, first.overflows, first.pmi_requests), (15, 1, 1));
    assert_eq!(first.request.unwrap().event.to_string(), "cycles");
    assert_eq!(first.backing, Some(Backing::Hardware));
    assert_eq!(first.times.time_running_ns, 25);
    assert_eq!(view[6].counter.to_string(), "fixed2");
    assert_eq!(
        (view[6].request, view[6].backing, view[6].enabled),
        (None, None, false)
    );
}
