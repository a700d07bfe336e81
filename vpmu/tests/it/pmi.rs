//! Tests that no overflow or PMI is lost, and that none is spurious. `reference_model.rs` tests
//! random sequences of overflows, deliveries and registers.

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

/// Returns a guest with two sampling counters, as used by Linux, in the PMI handler of the first
/// counter. Delivery of this PMI has masked LVTPC.
fn guest_in_pmi_handler() -> Guest {
    let mut guest = Guest::of("intel", None);
    for n in 0..2 {
        guest.write(IA32_PERFEVTSEL0 + n, INTERRUPTING);
        guest.write(IA32_A_PMC0 + n, (1 << 48) - 10 * u64::from(n + 1));
    }
    guest.run(10);
    assert_eq!(guest.vpmu.pmi_ready(0), PmiReadiness::Now);
    guest.vpmu.pmi_delivered(0);
    guest
}

/// An overflow that is served while LVTPC is masked raises no PMI. Linux since Haswell unmasks
/// LVTPC after it has served all overflows, and reports a later NMI as "unknown reason".
#[test]
fn overflow_served_while_masked_raises_no_pmi() {
    let mut guest = guest_in_pmi_handler();
    // The second counter overflows before the handler stops the counters.
    guest.run(10);
    assert!(guest.vpmu.pmi_pending());
    assert!(guest.vpmu.defer_pmi(), "its status bit is set");
    guest.write(IA32_PERF_GLOBAL_CTRL, 0);
    assert_eq!(guest.read(IA32_PERF_GLOBAL_STATUS), 3);
    guest.write(IA32_PERF_GLOBAL_STATUS_RESET, 3);
    assert!(!guest.vpmu.pmi_pending());
    guest.write(IA32_PERF_GLOBAL_CTRL, 3);
    assert_eq!(guest.vpmu.pmi_ready(0), PmiReadiness::No);
    assert_eq!(
        guest.vpmu.pmi_counts(),
        PmiCounts {
            delivered: 1,
            withdrawn: 1,
            ..PmiCounts::default()
        }
    );
}

#[test]
fn overflow_cleared_on_detection_raises_no_pmi() {
    let mut guest = guest_in_pmi_handler();
    guest.write(IA32_PERF_GLOBAL_STATUS_RESET, 1);
    guest.events.run_through(10);
    // The VMM has not detected the overflow of counter 1 when the guest clears it.
    guest.write(IA32_PERF_GLOBAL_STATUS_RESET, 2);
    assert!(guest.vpmu.pmi_pending(), "without a mask it would be delivered");
    assert!(!guest.vpmu.defer_pmi());
    assert_eq!(guest.vpmu.pmi_counts().withdrawn, 1);
    guest.notice();
    assert!(!guest.vpmu.pmi_pending());
}

/// A PMI that the rate limit delays is withdrawn when its overflow is served.
#[test]
fn throttled_pmi_is_withdrawn_when_served() {
    let mut guest = sampling(1);
    guest.vpmu.set_pmi_limit(1);
    let hold = |guest: &mut Guest| {
        for _ in 0..100 {
            guest.write(IA32_A_PMC0, (1 << 48) - 1);
            guest.run(1);
            match guest.vpmu.pmi_ready(0) {
                PmiReadiness::Now => guest.vpmu.pmi_delivered(0),
                PmiReadiness::NotBefore { time_ns } => return time_ns,
                PmiReadiness::No => panic!("an overflow was lost"),
            }
        }
        panic!("nothing was held back");
    };
    let until = hold(&mut guest);
    guest.write(IA32_PERF_GLOBAL_STATUS_RESET, 1);
    assert_eq!(guest.vpmu.pmi_ready(until), PmiReadiness::No);
    assert_eq!(guest.vpmu.pmi_counts().withdrawn, 1);
    let until = hold(&mut guest);
    // The guest has not served the counter this time, so the delayed PMI is delivered.
    assert_eq!(guest.vpmu.pmi_ready(until), PmiReadiness::Now);
}

/// A deferred PMI stays due if the guest serves one counter while another counter has an overflow
/// that has not been detected yet.
#[test]
fn deferred_pmi_is_kept_for_undetected_overflow() {
    let mut guest = Guest::of("amd", None);
    for n in 0..2 {
        guest.write(PERF_CTL0 + 2 * n, INTERRUPTING);
        guest.write(PERF_CTR0 + 2 * n, -10i64 as u64 - u64::from(n) * 10);
    }
    guest.run(10);
    assert!(guest.vpmu.defer_pmi());
    guest.events.run_through(10);
    guest.write(PERF_CTR0, -1000i64 as u64);
    assert!(guest.vpmu.pmi_pending());
    guest.write(PERF_CTR0 + 2, -1000i64 as u64);
    assert!(!guest.vpmu.pmi_pending());
}

/// Returns a new guest into whose PMU the PMU state of `guest` has been restored.
fn save_and_restore(mut guest: Guest, model: &str) -> Guest {
    let saved = guest.vpmu.save(&mut guest.events);
    let mut there = Guest::of(model, None);
    there.vpmu.restore(&saved, &mut there.events).unwrap();
    there.vpmu.reconcile(&mut there.events);
    assert_eq!(there.vpmu.save(&mut there.events), saved);
    there
}

/// A restored PMI is still attributed to the counters that requested it. The status bit of the
/// first counter is from an earlier PMI, so the guest must serve only the second counter.
#[test]
fn restored_pmi_keeps_its_sources() {
    let mut guest = guest_in_pmi_handler();
    guest.run(10);
    let mut there = save_and_restore(guest, "intel");
    assert!(there.vpmu.defer_pmi());
    there.write(IA32_PERF_GLOBAL_STATUS_RESET, 2);
    assert!(!there.vpmu.pmi_pending());
}

#[test]
fn restored_pmi_stays_deferred() {
    for (model, selector, counter, status_clear) in [
        (
            "intel",
            IA32_PERFEVTSEL0,
            IA32_A_PMC0,
            IA32_PERF_GLOBAL_STATUS_RESET,
        ),
        ("amd-v2", PERF_CTL0, PERF_CTR0, PERF_CNTR_GLOBAL_STATUS_CLR),
    ] {
        let mut guest = Guest::of(model, None);
        guest.write(selector, INTERRUPTING);
        guest.write(counter, (1 << 48) - 10);
        guest.run(10);
        assert!(guest.vpmu.defer_pmi(), "{model}");
        let mut there = save_and_restore(guest, model);
        assert!(there.vpmu.pmi_pending(), "{model}");
        there.write(status_clear, 1);
        assert!(!there.vpmu.pmi_pending(), "{model}: served while it had to wait");
    }
}

/// A restored PMI stays due after the guest has cleared the interrupt bit of its counter, because
/// this does not serve the counter.
#[test]
fn restored_pmi_survives_cleared_interrupt_bit() {
    for (model, selector, counter) in [
        ("amd-k7", PERF_LEGACY_CTL0, PERF_LEGACY_CTR0),
        ("amd", PERF_CTL0, PERF_CTR0),
    ] {
        let mut guest = Guest::of(model, None);
        guest.write(selector, INTERRUPTING);
        guest.write(counter, -10i64 as u64);
        guest.run(10);
        guest.write(selector, ENABLED);
        let mut there = save_and_restore(guest, model);
        assert!(there.vpmu.defer_pmi(), "{model}: still to come");
        assert_eq!(there.vpmu.pmi_ready(0), PmiReadiness::Now, "{model}");
    }
}

#[test]
fn read_before_notification_accounts_overflow_once() {
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
fn early_notification_is_ignored() {
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
fn only_intel_delivery_masks_lvtpc() {
    assert!(Vpmu::new(PmuModel::INTEL).delivery_masks_lvtpc());
    assert!(!Vpmu::new(PmuModel::AMD).delivery_masks_lvtpc());
}

#[test]
fn pmi_rate_limit_loses_no_overflows() {
    const LIMIT: u32 = 1_000;
    let mut guest = sampling(1);
    guest.vpmu.set_pmi_limit(LIMIT);
    let mut now_ns = 0;
    let (mut delivered_in_first_second, mut held) = (0, 0);
    for _ in 0..3_000 {
        guest.run(1);
        match guest.vpmu.pmi_ready(now_ns) {
            PmiReadiness::No => panic!("the overflow was lost"),
            PmiReadiness::Now => {}
            PmiReadiness::NotBefore { time_ns } => {
                held += 1;
                assert!(guest.vpmu.pmi_pending());
                // Further queries do not count the same PMI as throttled again.
                assert_ne!(guest.vpmu.pmi_ready(now_ns), PmiReadiness::Now);
                now_ns = time_ns;
                assert_eq!(guest.vpmu.pmi_ready(now_ns), PmiReadiness::Now);
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
            ..PmiCounts::default()
        }
    );
    assert!(held > 2_900);
}

#[test]
fn filter_applies_to_running_counters() {
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
    // Fixed counter 1 does not count, because the filter's bitmap does not list it.
    assert_eq!(guest.read(IA32_FIXED_CTR0 + 1), 20);
    let view = guest.vpmu.counters_view(&mut guest.events);
    assert!(view[0].enabled && !view[0].allowed);
    guest.vpmu.set_filter(Arc::new(EventFilter::allow_all()));
    guest.vpmu.reconcile(&mut guest.events);
    guest.run(10);
    assert_eq!(guest.read(IA32_PMC0), 20);
}

#[test]
fn counters_view_shows_programmed_events() {
    let mut guest = sampling(10);
    guest.run(25);
    let view = guest.vpmu.counters_view(&mut guest.events);
    assert_eq!(view.len(), 7);
    let first = &view[0];
    assert_eq!(first.counter.to_string(), "gp0");
    assert_eq!((first.value, first.overflows, first.pmi_requests), (15, 1, 1));
    assert_eq!(first.request.unwrap().event.to_string(), "cycles");
    assert_eq!(first.backing, Some(CounterBacking::Hardware));
    assert_eq!(first.times.time_running_ns, 25);
    assert_eq!(view[6].counter.to_string(), "fixed2");
    assert_eq!(
        (view[6].request, view[6].backing, view[6].enabled),
        (None, None, false)
    );
}
