//! Tests of rules for Intel registers (SDM vol. 3, "Architectural Performance Monitoring") that the
//! reference model does not implement or rarely reaches. `reference_model.rs` tests all other
//! rules.

use vpmu::registers::*;
use vpmu::*;

use crate::common::Guest;

const ENABLED: u64 = 0x43_003C; // cycles at all privilege levels

fn versions() -> impl Iterator<Item = (u32, Guest)> {
    (1..=5).map(|version| (version, Guest::of(&format!("intel-v{version}"), None)))
}

#[test]
fn intel_reserved_bits_fault() {
    for (version, mut guest) in versions() {
        // SDM vol. 4, 390H and 391H: the uncore bit requires version 3; LBR_FRZ, CTR_FRZ and ASCI
        // require version 4.
        let clearable: u64 = match version {
            1 | 2 => 0xC000_0007_0000_000F,
            3 => 0xE000_0007_0000_000F,
            _ => 0xFC00_0007_0000_000F,
        };
        for (msr, writable) in [
            (IA32_PERFEVTSEL0, 0xFFDF_FFFF),
            (IA32_FIXED_CTR_CTRL, 0xBBB),
            (IA32_PERF_GLOBAL_CTRL, 0x7_0000_000F),
            (IA32_PERF_GLOBAL_STATUS_RESET, clearable),
            (IA32_PERF_GLOBAL_STATUS_SET, 0x7C00_0007_0000_000F),
            (IA32_DEBUGCTL, 0x1000),
            (IA32_PERF_GLOBAL_STATUS, 0),
            (IA32_PERF_CAPABILITIES, 0),
        ] {
            if guest.try_read(msr).is_none() {
                continue;
            }
            for bit in 0..64 {
                let expected = writable >> bit & 1 != 0;
                let written = guest.try_write(msr, 1 << bit);
                assert_eq!(written, expected, "version {version}, MSR {msr:#x}, bit {bit}");
                match msr {
                    IA32_PERF_GLOBAL_STATUS_RESET => {}
                    IA32_PERF_GLOBAL_STATUS_SET if expected => {
                        assert_eq!(guest.read(IA32_PERF_GLOBAL_STATUS), 1 << bit);
                        guest.write(IA32_PERF_GLOBAL_STATUS_RESET, 1 << bit);
                        assert_eq!(guest.read(IA32_PERF_GLOBAL_STATUS), 0, "bit {bit} is cleared");
                    }
                    _ if expected => assert_eq!(guest.read(msr), 1 << bit),
                    _ => {}
                }
            }
        }
        for read_only in [
            IA32_PERF_GLOBAL_STATUS,
            IA32_PERF_CAPABILITIES,
            IA32_PERF_GLOBAL_INUSE,
        ] {
            assert!(
                !guest.try_write(read_only, 0),
                "version {version}, {read_only:#x}: even zero faults"
            );
        }
    }
}

/// A late overflow notification does not undo a write of the guest to the global control. The
/// freeze takes effect before the write, as if the notification had been on time.
#[test]
fn late_freeze_does_not_undo_control_write() {
    let mut guest = Guest::of("intel", None);
    guest.write(IA32_DEBUGCTL, DEBUGCTL_FREEZE_ON_PMI);
    guest.write(IA32_PERFEVTSEL0, ENABLED | 1 << 20);
    guest.write(IA32_A_PMC0, (1 << 48) - 10);
    guest.events.run_through(20);
    guest.write(IA32_PERF_GLOBAL_CTRL, 0b11);
    guest.notice();
    assert_eq!(guest.read(IA32_PERF_GLOBAL_CTRL), 0b11);
    assert_eq!(guest.read(IA32_PERF_GLOBAL_STATUS), 1);
    assert!(guest.vpmu.pmi_pending());
}

#[test]
fn fixed_counters_exist_by_bitmap_in_version_five() {
    // This host has only fixed counters 1 and 3.
    let mut host = |leaf: u32, _| match leaf {
        0 => CpuidRegs {
            eax: 0xA,
            ebx: 0x756E_6547,
            edx: 0x4965_6E69,
            ecx: 0x6C65_746E,
        },
        0xA => CpuidRegs {
            eax: 0x0830_0405,
            ebx: 0,
            ecx: 0b1010,
            edx: 48 << 5,
        },
        _ => CpuidRegs::default(),
    };
    let mut guest = Guest::new(PmuModel::host(&mut host).unwrap());
    for n in 0..4 {
        assert_eq!(guest.try_read(IA32_FIXED_CTR0 + n).is_some(), n % 2 == 1);
        assert_eq!(guest.rdpmc(1 << 30 | n).is_some(), n % 2 == 1);
        assert_eq!(guest.try_write(IA32_FIXED_CTR_CTRL, 0xB << (4 * n)), n % 2 == 1);
        assert_eq!(guest.try_write(IA32_PERF_GLOBAL_CTRL, 1 << (32 + n)), n % 2 == 1);
    }
}

/// MSRs that a model lacks must trap and fault, because a hypervisor may otherwise return zero: all
/// branch records, the debug store, the version 6 registers and AMD registers.
#[test]
fn unimplemented_registers_trap_and_fault() {
    let low = [
        0x40, 0x60, 0x1A6, 0x1C8, 0x1C9, 0x329, 0x3F1, 0x3F2, 0x3F6, 0x3F7, 0x600, 0x680, 0x69F, 0x6C0,
        0x6DF, 0xDC0, 0xDDF, 0x1200, 0x121F, 0x14CE, 0x14CF, 0x1500, 0x151F, 0x1600, 0x161F, 0x1900, 0x1903,
        0x1980, 0x1984,
    ];
    let amd = [0x105, 0x10E, 0x10F].map(|n| 0xC000_0000 + n);
    let amd_core = [0x230, 0x247, 0x25F, 0x280, 0x300, 0x31F, 0x800, 0x1030, 0x103D].map(|n| 0xC001_0000 + n);
    let absent = [&low[..], &amd, &amd_core].concat();
    for name in ["intel-v1", "intel-v2", "intel-v5", "amd-k7", "amd", "amd-v2"] {
        let mut guest = Guest::of(name, None);
        let trapped = guest.vpmu.model().trapped_msrs();
        for &msr in &absent {
            let traps = trapped.iter().any(|range| range.contains(&msr));
            let faults = guest.try_read(msr).is_none() && !guest.try_write(msr, 0);
            assert!(traps && faults, "{name}: {msr:#x}");
        }
        for pair in trapped.windows(2) {
            assert!(pair[0].end() < pair[1].start(), "{name}: {pair:x?} overlap");
        }
    }
}

/// Event selectors have the bits IN_TX (every selector) and IN_TXCP (only that of counter 2) only
/// if the processor supports transactions (SDM vol. 3, "Intel TSX and Performance Monitoring").
#[test]
fn transaction_bits_require_transactions() {
    for (model, in_tx) in [
        (PmuModel::INTEL, false),
        (PmuModel::INTEL.with_transactions(), true),
    ] {
        let mut guest = Guest::new(model);
        for n in 0..4 {
            assert_eq!(
                guest.try_write(IA32_PERFEVTSEL0 + n, ENABLED | 1 << 32),
                in_tx,
                "IN_TX of {n}"
            );
            let checkpointed = in_tx && n == 2;
            assert_eq!(
                guest.try_write(IA32_PERFEVTSEL0 + n, ENABLED | 1 << 33),
                checkpointed,
                "IN_TXCP of {n}"
            );
            assert!(!guest.try_write(IA32_PERFEVTSEL0 + n, ENABLED | 1 << 34));
        }
        if in_tx {
            let request = |guest: &Guest, n| guest.events.request(CounterIndex::general(n).unwrap()).unwrap();
            assert!(request(&guest, 0).in_transaction && !request(&guest, 0).checkpointed);
            assert!(!request(&guest, 2).in_transaction && request(&guest, 2).checkpointed);
            let saved = guest.vpmu.save(&mut guest.events);
            assert!(Vpmu::new(model).restore(&saved, &mut guest.events).is_ok());
            assert!(
                Vpmu::new(PmuModel::INTEL)
                    .restore(&saved, &mut guest.events)
                    .is_err()
            );
        }
    }
    assert_eq!(PmuModel::AMD.with_transactions(), PmuModel::AMD);
}

/// Event 3CH/01H is not the event of fixed counter 2, which counts at the TSC frequency. 3CH/01H
/// uses a model-specific clock. KVM also distinguishes the two events.
#[test]
fn event_3c_01_differs_from_fixed_counter_2() {
    let mut guest = Guest::of("intel", None);
    guest.write(IA32_PERFEVTSEL0, 0x43_013C);
    guest.write(IA32_FIXED_CTR_CTRL, 0x300);
    guest.write(IA32_PERF_GLOBAL_CTRL, 1 << 34 | 1);
    let event = |counter: Option<CounterIndex>| guest.events.request(counter.unwrap()).unwrap().event;
    assert_eq!(
        event(CounterIndex::general(0)),
        DecodedCounterEvent::Architectural(ArchEvent::BusCycles)
    );
    assert_eq!(
        event(CounterIndex::fixed(2)),
        DecodedCounterEvent::Architectural(ArchEvent::RefCycles)
    );
    // Bit 2 of CPUID.0AH:EBX refers to 3CH/01H, regardless of fixed counter 2.
    let mut leaf = CpuidRegs::default();
    let all_but_bus = ArchEvent::ALL
        .into_iter()
        .filter(|&event| event != ArchEvent::BusCycles);
    PmuModel::INTEL.adjust_cpuid(0xA, 0, &mut leaf, all_but_bus.collect());
    assert_eq!(leaf.ebx, 1 << 2);
}

/// A model omits fixed counter 3 if its event cannot be counted, because CPUID has no other way to
/// report this event as unavailable.
#[test]
fn fixed_counter_3_requires_countable_slots() {
    let four = *Guest::of("intel-v5", Some("8+4")).vpmu.model();
    assert_eq!(
        four.without_uncountable_slots(ArchEventSet::EXACT).fixed_bitmap(),
        0b111
    );
    let slots = ArchEventSet::NONE.with(ArchEvent::TopdownSlots);
    assert_eq!(four.without_uncountable_slots(slots), four);
    let mut leaf = CpuidRegs::default();
    four.without_uncountable_slots(ArchEventSet::CLOCK)
        .adjust_cpuid(0xA, 0, &mut leaf, ArchEventSet::CLOCK);
    assert_eq!((leaf.edx & 0x1F, leaf.ecx, leaf.eax >> 24), (3, 0b111, 7));
}

/// OUT, RDMSR and similar instructions exit before they retire. Instruction counters must include
/// these instructions if they count at the instruction's privilege level. Branch counters must not
/// include them.
#[test]
fn emulated_instructions_count() {
    let mut guest = Guest::of("intel", None);
    for (n, selector) in [0x43_00C0u64, 0x41_00C0, 0x42_00C0, 0x43_00C4]
        .into_iter()
        .enumerate()
    {
        guest.write(IA32_PERFEVTSEL0 + n as u32, selector);
    }
    guest.write(IA32_FIXED_CTR_CTRL, 0x033);
    guest.write(IA32_PERF_GLOBAL_CTRL, 0x3_0000_000F);
    guest.run(100);
    guest.vpmu.count_emulated_instruction(Cpl(0), &mut guest.events);
    guest.vpmu.count_emulated_instruction(Cpl(0), &mut guest.events);
    guest.vpmu.count_emulated_instruction(Cpl(3), &mut guest.events);
    let general: Vec<u64> = (0..4).map(|n| guest.read(IA32_PMC0 + n)).collect();
    assert_eq!(general, [103, 101, 102, 100]);
    assert_eq!(
        (guest.read(IA32_FIXED_CTR0), guest.read(IA32_FIXED_CTR0 + 1)),
        (103, 100)
    );
    // The PMU is not notified for backings that count these instructions themselves.
    for backing in [CounterBacking::Exact, CounterBacking::Clock, CounterBacking::None] {
        let mut guest = Guest::of("amd", None);
        guest.events.backing_of = match backing {
            CounterBacking::Exact => |_| CounterBacking::Exact,
            CounterBacking::Clock => |_| CounterBacking::Clock,
            _ => |_| CounterBacking::None,
        };
        guest.write(PERF_CTL0, 0x43_00C0);
        assert_eq!(guest.vpmu.needs_emulated_instructions(), (false, false));
        guest.vpmu.count_emulated_instruction(Cpl(0), &mut guest.events);
        assert_eq!(guest.read(PERF_CTR0), 0, "{backing:?}");
    }
}

/// The WRMSR that enables a counter is counted, because it retires after counting has started. The
/// WRMSR that disables the counter is not, because it retires after counting has stopped.
#[test]
fn only_enabling_wrmsr_counts() {
    let mut guest = Guest::of("intel", None);
    guest.write(IA32_PERFEVTSEL0, 0x43_00C0);
    guest.write(IA32_PERF_GLOBAL_CTRL, 0);
    guest.vpmu.count_emulated_instruction(Cpl(0), &mut guest.events);
    for control in [1, 0] {
        guest.write(IA32_PERF_GLOBAL_CTRL, control);
        guest.vpmu.count_emulated_instruction(Cpl(0), &mut guest.events);
        guest.run(10);
    }
    assert_eq!(guest.read(IA32_PMC0), 11);
}

/// An instruction that exits can make the counter overflow, and shortens the period for which the
/// host event is armed.
#[test]
fn emulated_instruction_can_overflow_counter() {
    let mut guest = Guest::of("intel", None);
    guest.write(IA32_PERFEVTSEL0, 0x53_00C0);
    guest.write(IA32_A_PMC0, (1 << 48) - 3);
    guest.run(1);
    guest.vpmu.count_emulated_instruction(Cpl(0), &mut guest.events);
    guest.vpmu.reconcile(&mut guest.events);
    assert!(!guest.vpmu.pmi_pending());
    guest.run(1);
    assert!(guest.vpmu.pmi_pending(), "two in guest mode and one outside");
    assert_eq!(
        (guest.read(IA32_PMC0), guest.read(IA32_PERF_GLOBAL_STATUS)),
        (0, 1)
    );
    guest.vpmu.pmi_delivered(0);
    guest.write(IA32_A_PMC0, (1 << 48) - 1);
    guest.vpmu.count_emulated_instruction(Cpl(0), &mut guest.events);
    assert!(guest.vpmu.pmi_pending());
    assert_eq!(guest.read(IA32_PMC0), 0);
}

/// If the counter is far from an overflow, the host event is re-armed after some exits, but not
/// after each one.
#[test]
fn exits_far_from_overflow_do_not_rearm() {
    let mut guest = Guest::of("intel", None);
    guest.write(IA32_PERFEVTSEL0, 0x53_00C0);
    guest.write(IA32_A_PMC0, (1 << 48) - 100_000);
    let before = guest.events.calls;
    for _ in 0..1000 {
        guest.vpmu.count_emulated_instruction(Cpl(0), &mut guest.events);
        guest.vpmu.reconcile(&mut guest.events);
    }
    assert!(
        guest.events.calls - before <= 10,
        "{} calls",
        guest.events.calls - before
    );
    // The PMI is delayed by less than the tolerated fraction of the period.
    guest.run(99_000 + 400);
    assert!(guest.vpmu.pmi_pending());
}

/// The event number of conditional branches is decoded according to the guest's processor
/// signature. rr programs C4H/01H on a Skylake signature and C4H/11H on Ice Lake.
#[test]
fn conditional_branches_depend_on_signature() {
    const CONDITIONAL_01: u64 = 0x51_01C4;
    let counter = CounterIndex::general(0).unwrap();
    let event = |guest: &Guest| guest.events.request(counter).unwrap().event;
    let mut guest = Guest::of("intel", None);
    guest.write(IA32_PERFEVTSEL0, CONDITIONAL_01 | 1 << 22);
    assert_eq!(event(&guest), DecodedCounterEvent::Raw);
    // A new signature also changes the event of a programmed counter.
    guest.vpmu.set_signature(0x0005_0657);
    guest.vpmu.reconcile(&mut guest.events);
    let conditional = DecodedCounterEvent::Architectural(ArchEvent::ConditionalBranches);
    assert_eq!(event(&guest), conditional);
    assert_eq!(
        guest.vpmu.counters_view(&mut guest.events)[0]
            .request
            .unwrap()
            .event,
        conditional
    );
    guest.vpmu.reset(&mut guest.events);
    guest.write(IA32_PERFEVTSEL0, CONDITIONAL_01 | 1 << 22);
    assert_eq!(event(&guest), conditional, "a reset keeps the signature");
}
