//! Tests of the AMD registers, one rule per test (APM vol. 2 §13.2).

use vpmu::registers::*;
use vpmu::*;

use crate::common::Guest;

const ENABLED: u64 = 0x43_0076; // cycles at every level

#[test]
fn amd_generations_have_their_registers() {
    for (name, counters, core, v2) in [
        ("amd-k7", 4, false, false),
        ("amd", 6, true, false),
        ("amd-v2", 6, true, true),
    ] {
        let mut guest = Guest::of(name, None);
        for n in 0..4 {
            assert!(
                guest.try_read(PERF_LEGACY_CTL0 + n).is_some()
                    && guest.try_read(PERF_LEGACY_CTR0 + n).is_some()
            );
        }
        for n in 0..15 {
            let exists = core && n < counters;
            assert_eq!(
                guest.try_read(PERF_CTL0 + 2 * n).is_some(),
                exists,
                "{name}, counter {n}"
            );
            assert_eq!(
                guest.try_write(PERF_CTR0 + 2 * n, 0),
                exists,
                "{name}, counter {n}"
            );
            assert_eq!(guest.rdpmc(n).is_some(), n < counters, "{name}, counter {n}");
        }
        for msr in 0xC000_0300..=0xC000_0303 {
            assert_eq!(guest.try_read(msr).is_some(), v2, "{name}, {msr:#x}");
            assert_eq!(guest.try_write(msr, 0), v2, "{name}, {msr:#x}");
        }
        assert!(guest.try_read(IA32_PMC0).is_none() && guest.try_read(IA32_PERF_GLOBAL_CTRL).is_none());
        assert!(guest.rdpmc(1 << 30).is_none());
    }
    let mut guest = Guest::of("amd", None);
    guest.write(PERF_LEGACY_CTL0 + 3, 0x76);
    guest.write(PERF_CTR0 + 6, 99);
    assert_eq!(
        (guest.read(PERF_CTL0 + 6), guest.read(PERF_LEGACY_CTR0 + 3)),
        (0x76, 99)
    );
}

#[test]
fn amd_reserved_bits_are_ignored() {
    let mut guest = Guest::of("amd-v2", None);
    guest.write(PERF_CTL0, u64::MAX);
    assert_eq!(guest.read(PERF_CTL0), !0xFFFF_FCF0_0028_0000);
    guest.write(PERF_CTR0, u64::MAX);
    assert_eq!(guest.read(PERF_CTR0), (1 << 48) - 1);
    guest.write(PERF_CNTR_GLOBAL_CTL, u64::MAX);
    assert_eq!(guest.read(PERF_CNTR_GLOBAL_CTL), 0x3F);
    guest.write(PERF_CNTR_GLOBAL_STATUS_SET, u64::MAX);
    assert_eq!(guest.read(PERF_CNTR_GLOBAL_STATUS), 0x3F);
}

#[test]
fn global_status_ignores_writes_and_has_registers_to_set_and_clear_it() {
    let mut guest = Guest::of("amd-v2", None);
    guest.write(PERF_CNTR_GLOBAL_STATUS, 0x3F);
    assert_eq!(guest.read(PERF_CNTR_GLOBAL_STATUS), 0);
    guest.write(PERF_CNTR_GLOBAL_STATUS_SET, 0b110);
    guest.write(PERF_CNTR_GLOBAL_STATUS_CLR, 0b010);
    assert_eq!(guest.read(PERF_CNTR_GLOBAL_STATUS), 0b100);
    assert_eq!(
        (
            guest.read(PERF_CNTR_GLOBAL_STATUS_CLR),
            guest.read(PERF_CNTR_GLOBAL_STATUS_SET)
        ),
        (0, 0)
    );
    assert!(!guest.vpmu.pmi_pending());
}

#[test]
fn amd_global_control_enables_counters_at_reset() {
    let mut guest = Guest::of("amd-v2", Some("15"));
    assert_eq!(guest.read(PERF_CNTR_GLOBAL_CTL), 0x7FFF);
    guest.write(PERF_CTL0 + 28, ENABLED);
    guest.run(5);
    guest.write(PERF_CNTR_GLOBAL_CTL, 0x3FFF);
    guest.run(5);
    assert_eq!(guest.read(PERF_CTR0 + 28), 5);
}

#[test]
fn event_select_has_twelve_bits() {
    let mut guest = Guest::of("amd", None);
    guest.write(PERF_CTL0, 0xF_0043_01FF);
    let counter = CounterIndex::general(0).unwrap();
    let request = guest.events.request(counter).unwrap();
    assert_eq!(
        request.selection,
        EventSelection::General(EventSelect(0xFFF), UnitMask(1))
    );
    assert_eq!(request.event, GuestEvent::Paravirtual(ParavirtualEvent::VmExits));
}

/// APM vol. 2 §13.2.1, HG_ONLY. The first level executes no nested guest here.
#[test]
fn host_only_and_guest_only_depend_on_svme() {
    const GUEST_ONLY: u64 = 1 << 40;
    const HOST_ONLY: u64 = 1 << 41;
    for (model, selector, counter) in [
        ("amd-k7", PERF_LEGACY_CTL0, PERF_LEGACY_CTR0),
        ("amd", PERF_CTL0, PERF_CTR0),
        ("amd-v2", PERF_CTL0, PERF_CTR0),
    ] {
        for (bits, without, with) in [
            (0, true, true),
            (GUEST_ONLY, false, false),
            (HOST_ONLY, false, true),
            (GUEST_ONLY | HOST_ONLY, true, true),
        ] {
            let mut guest = Guest::of(model, None);
            let mut expected = 0;
            let mut run = |guest: &mut Guest, counts: bool| {
                guest.run(10);
                expected += if counts { 10 } else { 0 };
                assert_eq!(guest.read(counter), expected, "{model}, {bits:#x}");
            };
            guest.write(selector, ENABLED | bits);
            assert_eq!(guest.read(selector), ENABLED | bits);
            let depends = bits == GUEST_ONLY || bits == HOST_ONLY;
            assert_eq!(guest.vpmu.needs_svme(), depends, "{model}, {bits:#x}");
            run(&mut guest, without);
            for svme in [true, false, true] {
                guest.vpmu.set_svme(svme);
                guest.vpmu.reconcile(&mut guest.events);
                assert!(!guest.vpmu.needs_svme());
                run(&mut guest, if svme { with } else { without });
            }
            // A change of the bits alone takes effect, and a counter that was stopped asks again.
            guest.write(selector, ENABLED | GUEST_ONLY);
            run(&mut guest, false);
            guest.vpmu.set_svme(true);
            guest.write(selector, ENABLED | HOST_ONLY);
            run(&mut guest, true);
            guest.vpmu.set_svme(true);
            guest.write(selector, (ENABLED | HOST_ONLY) & !(1 << 22));
            assert!(!guest.vpmu.needs_svme());
            guest.write(selector, ENABLED | HOST_ONLY);
            assert!(guest.vpmu.needs_svme());
        }
    }
    assert!(!Guest::of("intel", None).try_write(IA32_PERFEVTSEL0, GUEST_ONLY | ENABLED));
}

/// EFER is not part of the saved state, so the restored PMU asks for it.
#[test]
fn restored_host_only_counter_requests_svme() {
    let mut guest = Guest::of("amd", None);
    guest.write(PERF_CTL0, ENABLED | 1 << 41);
    let saved = guest.vpmu.save(&mut guest.events);
    let mut there = Guest::of("amd", None);
    assert!(!there.vpmu.needs_svme());
    there.vpmu.restore(&saved, &mut there.events).unwrap();
    assert!(there.vpmu.needs_svme());
    there.vpmu.set_svme(true);
    there.vpmu.reconcile(&mut there.events);
    there.run(10);
    assert_eq!(there.read(PERF_CTR0), 10);
}

#[test]
fn with_the_pmu_off_the_k7_registers_read_zero_and_drop_writes() {
    let mut guest = Guest::new(PmuModel::off(Vendor::Amd));
    for msr in 0xC001_0000..=0xC001_0007 {
        guest.write(msr, u64::MAX);
        assert_eq!(guest.read(msr), 0);
    }
    assert!(guest.try_read(PERF_CTL0).is_none() && guest.rdpmc(0).is_none());
}

#[test]
fn amd_debug_control_is_not_emulated() {
    assert!(
        !PmuModel::AMD
            .trapped_msrs()
            .into_iter()
            .flatten()
            .any(|msr| msr == IA32_DEBUGCTL)
    );
    assert!(
        PmuModel::INTEL
            .trapped_msrs()
            .into_iter()
            .flatten()
            .any(|msr| msr == IA32_DEBUGCTL)
    );
}
