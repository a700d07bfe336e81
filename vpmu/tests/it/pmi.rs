//! Tests of overflows and PMIs: none is lost, and none is spurious.

use std::sync::Arc;

use vpmu::registers::*;
use vpmu::*;

use crate::common::Guest;

const ENABLED: u64 = 0x43_003C;
const INTERRUPTING: u64 = 0x53_003C;
const SECOND_NS: u64 = 1_000_000_000;

fn sampling(period: u64) -> Guest {
    let mut guest = Guest::of("intel", None);
    guest.write(IA32_PERFEVTSEL0, INTERRUPTING);
    guest.write(IA32_A_PMC0, (1 << 48) - period);
    guest
}

/// A physical processor would have delivered the PMI on the overflow, before the guest cleared
/// anything.
#[test]
fn a_pmi_that_need_not_wait_is_due_whatever_the_guest_clears() {
    let mut guest = sampling(10);
    guest.run(10);
    guest.write(IA32_PERF_GLOBAL_STATUS_RESET, 1);
    guest.write(IA32_PERFEVTSEL0, 0);
    guest.write(IA32_PERF_GLOBAL_CTRL, 0);
    assert!(guest.vpmu.pmi_pending());
    guest.vpmu.pmi_delivered(0);
    assert!(!guest.vpmu.pmi_pending());
}

/// Returns a guest with two sampling counters, as used by Linux, in the PMI handler of the first
/// one: delivery has masked LVTPC.
fn two_sampling_and_in_the_handler() -> Guest {
    let mut guest = Guest::of("intel", None);
    for n in 0..2 {
        guest.write(IA32_PERFEVTSEL0 + n, INTERRUPTING);
        guest.write(IA32_A_PMC0 + n, (1 << 48) - 10 * u64::from(n + 1));
    }
    guest.run(10);
    assert_eq!(guest.vpmu.pmi_ready(0), PmiReady::Now);
    guest.vpmu.pmi_delivered(0);
    guest
}

/// Linux since Haswell unmasks LVTPC after it has served all overflows. A later NMI is reported as
/// "unknown reason".
#[test]
fn an_overflow_that_the_handler_serves_while_lvtpc_is_masked_gives_no_second_pmi() {
    let mut guest = two_sampling_and_in_the_handler();
    // The second counter overflows before the handler stops the counters.
    guest.run(10);
    assert!(guest.vpmu.pmi_pending());
    assert!(guest.vpmu.pmi_must_wait(), "its status bit is set");
    guest.write(IA32_PERF_GLOBAL_CTRL, 0);
    assert_eq!(guest.read(IA32_PERF_GLOBAL_STATUS), 3);
    guest.write(IA32_PERF_GLOBAL_STATUS_RESET, 3);
    assert!(!guest.vpmu.pmi_pending());
    guest.write(IA32_PERF_GLOBAL_CTRL, 3);
    assert_eq!(guest.vpmu.pmi_ready(0), PmiReady::No);
    assert_eq!(
        guest.vpmu.pmi_counts(),
        PmiCounts {
            delivered: 1,
            throttled: 0,
            withdrawn: 1
        }
    );
}

#[test]
fn an_overflow_whose_status_bit_is_left_comes_when_lvtpc_is_unmasked() {
    let mut guest = two_sampling_and_in_the_handler();
    guest.write(IA32_PERF_GLOBAL_STATUS_RESET, 1);
    guest.run(10);
    assert!(guest.vpmu.pmi_must_wait());
    // Only the status bit of the second counter matters.
    guest.write(IA32_PERF_GLOBAL_STATUS_RESET, 1);
    guest.write(IA32_PERF_GLOBAL_CTRL, 0);
    guest.write(IA32_PERFEVTSEL0 + 1, 0);
    guest.write(IA32_A_PMC0 + 1, 0);
    assert!(guest.vpmu.pmi_must_wait());
    assert_eq!(guest.vpmu.pmi_ready(0), PmiReady::Now);
}

#[test]
fn an_overflow_found_by_the_write_that_clears_it_gives_no_pmi_behind_a_mask() {
    let mut guest = two_sampling_and_in_the_handler();
    guest.write(IA32_PERF_GLOBAL_STATUS_RESET, 1);
    guest.events.run_through(10);
    // The overflow has not been detected yet.
    guest.write(IA32_PERF_GLOBAL_STATUS_RESET, 2);
    assert!(guest.vpmu.pmi_pending(), "without a mask it would be delivered");
    assert!(!guest.vpmu.pmi_must_wait());
    assert_eq!(guest.vpmu.pmi_counts().withdrawn, 1);
    guest.notice();
    assert!(!guest.vpmu.pmi_pending());
}

#[test]
fn a_served_counter_that_overflows_again_asks_again() {
    let mut guest = two_sampling_and_in_the_handler();
    guest.run(10);
    assert!(guest.vpmu.pmi_must_wait());
    guest.write(IA32_PERF_GLOBAL_STATUS_RESET, 3);
    assert!(!guest.vpmu.pmi_pending());
    guest.write(IA32_A_PMC0, (1 << 48) - 5);
    guest.run(5);
    assert!(guest.vpmu.pmi_must_wait());
    assert_eq!(guest.vpmu.pmi_ready(0), PmiReady::Now);
}

/// A PMI that the rate limit delays follows the same rule.
#[test]
fn a_pmi_that_the_rate_limit_holds_is_withdrawn_when_it_is_served() {
    let mut guest = sampling(1);
    guest.vpmu.set_pmi_limit(1);
    let hold = |guest: &mut Guest| {
        for _ in 0..100 {
            guest.write(IA32_A_PMC0, (1 << 48) - 1);
            guest.run(1);
            match guest.vpmu.pmi_ready(0) {
                PmiReady::Now => guest.vpmu.pmi_delivered(0),
                PmiReady::NotBefore { time_ns } => return time_ns,
                PmiReady::No => panic!("an overflow was lost"),
            }
        }
        panic!("nothing was held back");
    };
    let until = hold(&mut guest);
    guest.write(IA32_PERF_GLOBAL_STATUS_RESET, 1);
    assert_eq!(guest.vpmu.pmi_ready(until), PmiReady::No);
    assert_eq!(guest.vpmu.pmi_counts().withdrawn, 1);
    let until = hold(&mut guest);
    assert_eq!(
        guest.vpmu.pmi_ready(until),
        PmiReady::Now,
        "not served, and not lost"
    );
}

/// Without a global status, Linux checks the top bit of each sampling counter and writes the
/// counters that overflowed.
#[test]
fn without_a_global_status_a_counter_is_served_by_writing_it() {
    for (model, selector, counter, stride) in [
        ("amd-k7", PERF_LEGACY_CTL0, PERF_LEGACY_CTR0, 1),
        ("amd", PERF_CTL0, PERF_CTR0, 2),
        ("intel-v1", IA32_PERFEVTSEL0, IA32_PMC0, 1),
    ] {
        let mut guest = Guest::of(model, None);
        let start = |guest: &mut Guest, n: u32| {
            guest.write(selector + stride * n, INTERRUPTING);
            guest.write(counter + stride * n, -10i64 as u64);
        };
        start(&mut guest, 0);
        start(&mut guest, 1);
        guest.run(10);
        assert!(guest.vpmu.pmi_must_wait(), "{model}");
        // Stopping a counter does not serve it: the handler would find both counters past their
        // overflow.
        guest.write(selector, 0);
        guest.write(selector + stride, ENABLED);
        start(&mut guest, 0);
        assert!(
            guest.vpmu.pmi_must_wait(),
            "{model}: the other is still to be served"
        );
        start(&mut guest, 1);
        assert!(!guest.vpmu.pmi_pending(), "{model}");
        assert_eq!(guest.vpmu.pmi_counts().withdrawn, 1, "{model}");
        guest.run(10);
        assert_eq!(guest.vpmu.pmi_ready(0), PmiReady::Now, "{model}");
        // A PMI that does not have to wait is delivered even if the counter was written.
        start(&mut guest, 0);
        assert_eq!(guest.vpmu.pmi_ready(0), PmiReady::Now, "{model}");
    }
}

/// Serving one counter must not hide an undetected overflow of another.
#[test]
fn a_pmi_that_waits_is_kept_for_an_overflow_nobody_noticed_yet() {
    let mut guest = Guest::of("amd", None);
    for n in 0..2 {
        guest.write(PERF_CTL0 + 2 * n, INTERRUPTING);
        guest.write(PERF_CTR0 + 2 * n, -10i64 as u64 - u64::from(n) * 10);
    }
    guest.run(10);
    assert!(guest.vpmu.pmi_must_wait());
    guest.events.run_through(10);
    guest.write(PERF_CTR0, -1000i64 as u64);
    assert!(guest.vpmu.pmi_pending());
    guest.write(PERF_CTR0 + 2, -1000i64 as u64);
    assert!(!guest.vpmu.pmi_pending());
}

/// The saved state does not include the sources of the PMI, so every possible source must be
/// served.
#[test]
fn a_pmi_that_travels_is_withdrawn_only_when_all_that_can_have_asked_are_served() {
    let mut guest = two_sampling_and_in_the_handler();
    guest.run(10);
    let saved = guest.vpmu.save(&mut guest.events);
    let mut there = Guest::of("intel", None);
    there.vpmu.restore(&saved, &mut there.events).unwrap();
    assert!(there.vpmu.pmi_must_wait());
    there.write(IA32_PERF_GLOBAL_STATUS_RESET, 2);
    assert!(there.vpmu.pmi_pending());
    there.write(IA32_PERF_GLOBAL_STATUS_RESET, 1);
    assert!(!there.vpmu.pmi_pending());
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
                // Repeated queries count as throttled only once.
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
            throttled: held,
            withdrawn: 0
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
