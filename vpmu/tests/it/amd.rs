//! Tests of rules for AMD registers (APM vol. 2 §13.2) that the reference model does not implement.
//! `reference_model.rs` tests all other rules.

use vpmu::registers::*;
use vpmu::*;

use crate::common::Guest;

const ENABLED: u64 = 0x43_0076; // cycles at all privilege levels

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
    assert_eq!(
        request.event,
        DecodedCounterEvent::Paravirtual(ParavirtualEvent::VmExits)
    );
}

/// The host-only and guest-only bits depend on EFER.SVME (APM vol. 2 §13.2.1, HG_ONLY). The guest
/// executes no nested guest in this test.
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
            // A write that changes only the host-only and guest-only bits takes effect. A stopped
            // counter requests EFER.SVME again.
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

/// After a restore, a PMU with an enabled host-only counter requests EFER.SVME, because EFER is not
/// part of the saved state.
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
