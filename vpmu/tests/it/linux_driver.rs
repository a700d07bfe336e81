//! Tests with the register accesses of Linux 6.1's drivers at boot and at run time.

use vpmu::registers::*;
use vpmu::*;

use crate::common::Guest;

/// Runs the guest until a PMI is due and returns the number of ticks run.
fn run_until_pmi(guest: &mut Guest, at_most: u64) -> u64 {
    let mut ran = 0;
    while ran < at_most && !guest.vpmu.pmi_pending() {
        ran += guest.events.run(at_most - ran);
        guest.notice();
    }
    ran
}

#[test]
fn linux_intel_driver_probes_and_samples() {
    let mut guest = Guest::new(PmuModel::INTEL);
    assert_eq!(guest.read(0x345), 1 << 13);
    for msr in 0x186..=0x189 {
        assert_eq!(guest.read(msr), 0);
    }
    assert_eq!(guest.read(0x38D), 0);
    guest.write(0xC4, 0xFFFF);
    assert_eq!(guest.read(0xC4), 0xFFFF);
    guest.write(0xC4, 0);

    // perf record -e cycles -c 1000, on fixed counter 1.
    const PERIOD: u64 = 1000;
    let reload = (1 << 48) - PERIOD;
    guest.write(IA32_PERF_GLOBAL_CTRL, 0);
    guest.write(IA32_FIXED_CTR0 + 1, reload);
    guest.write(IA32_FIXED_CTR_CTRL, 0xB0);
    guest.write(IA32_PERF_GLOBAL_CTRL, 0x7_0000_000F);
    for sample in 0..100 {
        assert_eq!(run_until_pmi(&mut guest, 10 * PERIOD), PERIOD, "sample {sample}");
        assert_eq!(guest.vpmu.pmi_ready(sample * 1_000_000), PmiReadiness::Now);
        guest.vpmu.pmi_delivered(sample * 1_000_000);
        guest.write(IA32_PERF_GLOBAL_CTRL, 0);
        assert_eq!(guest.read(IA32_PERF_GLOBAL_STATUS), 1 << 33);
        guest.write(IA32_PERF_GLOBAL_STATUS_RESET, 1 << 33);
        guest.write(IA32_FIXED_CTR0 + 1, reload);
        assert_eq!(guest.read(IA32_PERF_GLOBAL_STATUS), 0);
        guest.write(IA32_PERF_GLOBAL_CTRL, 0x7_0000_000F);
    }
    assert!(!guest.vpmu.pmi_pending());
    assert_eq!(
        guest.vpmu.pmi_counts(),
        PmiCounts {
            delivered: 100,
            ..PmiCounts::default()
        }
    );
}

#[test]
fn linux_amd_drivers_probe_and_sample() {
    let v2 = PmuModel::new(PmuGeneration::AmdV2, None, None).unwrap();
    for model in [PmuModel::AMD, v2] {
        let mut guest = Guest::new(model);
        for n in 0..6 {
            assert_eq!(guest.read(PERF_CTL0 + 2 * n), 0);
        }
        guest.write(PERF_CTR0 + 10, 0xFFFF);
        assert_eq!(guest.read(PERF_CTR0 + 10), 0xFFFF);
        if model == v2 {
            guest.write(PERF_CNTR_GLOBAL_CTL, 0);
            guest.write(PERF_CNTR_GLOBAL_STATUS_CLR, 0x3F);
            guest.write(PERF_CNTR_GLOBAL_CTL, 0x3F);
        }
        // perf record -e cycles -c 500, on counter 2.
        guest.write(PERF_CTR0 + 4, (1 << 48) - 500);
        guest.write(PERF_CTL0 + 4, 0x53_0076);
        assert_eq!(run_until_pmi(&mut guest, 1_000_000), 500);
        guest.vpmu.pmi_delivered(0);
        assert_eq!(guest.read(PERF_CTR0 + 4), 0);
        if model == v2 {
            assert_eq!(guest.read(PERF_CNTR_GLOBAL_STATUS), 0b100);
        }
        guest.events.run(7);
        // The K7 register accesses the same counter.
        assert_eq!(guest.read(PERF_LEGACY_CTR0 + 2), 7);
    }
}

#[test]
fn reenabling_opens_no_events() {
    let mut guest = Guest::new(PmuModel::INTEL);
    guest.write(IA32_PERFEVTSEL0, 0x43_003C);
    guest.events.calls = 0;
    guest.vpmu.reconcile(&mut guest.events);
    assert_eq!(guest.events.calls, 0);
    guest.write(IA32_PERF_GLOBAL_CTRL, 0);
    assert_eq!(guest.events.calls, 1, "one reading");
    guest.write(IA32_PERF_GLOBAL_CTRL, 0xF);
    assert_eq!(guest.events.calls, 2, "and one more");
    guest.write(IA32_PERFEVTSEL0, 0x43_003C);
    assert_eq!(guest.events.calls, 2, "the same value again is no change");
}
