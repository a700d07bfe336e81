//! Tests of the branch records: registers, collection before a PMI, freezing and saved state.

use perf_core::branch::{BranchEntry, BranchKind};
use proptest::prelude::*;
use vpmu::registers::*;
use vpmu::*;

use crate::common::Guest;

const COUNTER_INT: u64 = 0x53_003C; // cycles at all privilege levels, with overflow interrupt
const AMD_COUNTER_INT: u64 = 0x53_0076;
const ALL_BRANCHES: u64 = 0x7F_0007;
const FREEZE: u64 = DEBUGCTL_FREEZE_BRANCHES_ON_PMI;

const KINDS: [BranchKind; 11] = [
    BranchKind::Unknown,
    BranchKind::Conditional,
    BranchKind::Unconditional,
    BranchKind::Indirect,
    BranchKind::Call,
    BranchKind::IndirectCall,
    BranchKind::Return,
    BranchKind::SystemCall,
    BranchKind::SystemReturn,
    BranchKind::InterruptReturn,
    BranchKind::Interrupt,
];

fn guest(name: &str) -> Guest {
    Guest::new(Guest::of(name, None).vpmu.model().with_branch_records())
}

fn jump(from: u64) -> BranchEntry {
    BranchEntry {
        from,
        to: from + 0x100,
        kind: BranchKind::Conditional,
        ..BranchEntry::default()
    }
}

/// Returns the addresses of the registers with the source and the target of record `n`, followed by
/// the address of the record's info register (Intel) or of LBR_SELECT (AMD).
fn record(guest: &Guest, n: u32) -> [u32; 3] {
    match guest.vpmu.model().vendor() {
        Vendor::Intel => [IA32_LBR_FROM_IP0 + n, IA32_LBR_TO_IP0 + n, IA32_LBR_INFO0 + n],
        Vendor::Amd => [LBR_FROM0 + 2 * n, LBR_FROM0 + 2 * n + 1, LBR_SELECT],
    }
}

fn sources(guest: &mut Guest, count: u32) -> Vec<u64> {
    (0..count).map(|n| guest.read(record(guest, n)[0])).collect()
}

fn set_enabled(guest: &mut Guest, on: bool) {
    match guest.vpmu.model().vendor() {
        Vendor::Intel => guest.write(IA32_LBR_CTL, if on { ALL_BRANCHES } else { 0 }),
        Vendor::Amd => guest.write(DBG_EXTN_CFG, u64::from(on) << 6),
    }
}

/// Makes counter 0 overflow, after which a PMI is due.
fn overflow(guest: &mut Guest) {
    run_to_overflow(guest);
    assert!(guest.vpmu.pmi_pending());
}

/// Sets counter 0 close to its overflow and runs the guest until it overflows. The counter does not
/// overflow if the guest has frozen its counters.
fn run_to_overflow(guest: &mut Guest) {
    let (counter, selector, select) = match guest.vpmu.model().vendor() {
        Vendor::Intel => (IA32_A_PMC0, IA32_PERFEVTSEL0, COUNTER_INT),
        Vendor::Amd => (PERF_CTR0, PERF_CTL0, AMD_COUNTER_INT),
    };
    guest.write(counter, (1 << 48) - 10);
    guest.write(selector, select);
    guest.events.run(10);
    for counter in guest.events.take_notified().collect::<Vec<_>>() {
        guest.vpmu.overflowed(counter, &mut guest.events);
    }
}

fn status(guest: &mut Guest) -> u64 {
    guest.read(match guest.vpmu.model().vendor() {
        Vendor::Intel => IA32_PERF_GLOBAL_STATUS,
        Vendor::Amd => PERF_CNTR_GLOBAL_STATUS,
    })
}

#[test]
fn reserved_bits_of_branch_records_fault_on_intel() {
    for version in 2..=5 {
        let mut guest = guest(&format!("intel-v{version}"));
        for bit in 0..64 {
            let value = 1 << bit;
            let canonical = bit < 56;
            for (msr, expected) in [
                (IA32_LBR_CTL, ALL_BRANCHES >> bit & 1 != 0),
                (IA32_LBR_DEPTH, [3, 4, 5].contains(&bit)),
                (MSR_LASTBRANCH_TOS, bit < 5),
                (IA32_LBR_FROM_IP0, canonical),
                (IA32_LBR_TO_IP0 + 7, canonical),
                (IA32_LBR_INFO0, true),
                (IA32_DEBUGCTL, bit == 11 || bit == 12),
            ] {
                assert_eq!(guest.try_write(msr, value), expected, "{msr:#x}, bit {bit}");
            }
        }
        guest.write(IA32_LBR_TO_IP0, 0xFFFF_FFFF_8100_0000);
        assert_eq!(guest.read(IA32_LBR_TO_IP0), 0xFFFF_FFFF_8100_0000);
        guest.write(IA32_LBR_INFO0, !0);
        assert_eq!(guest.read(IA32_LBR_INFO0), 0xFF00_0000_0000_FFFF);
        assert_eq!(guest.read(IA32_PERF_CAPABILITIES), 0x203F);
    }
}

/// Each source and target register of a branch record keeps a value that the guest writes, because
/// Linux checks each register by changing its low bits.
#[test]
fn every_record_keeps_what_is_written() {
    for name in ["intel", "intel-v5", "amd-v2"] {
        let mut guest = guest(name);
        let count = if name == "amd-v2" { 16 } else { 32 };
        for n in 0..count {
            for msr in &record(&guest, n)[..2] {
                guest.write(*msr, 0xFFFF + u64::from(n));
                assert_eq!(guest.read(*msr), 0xFFFF + u64::from(n), "{name}: {msr:#x}");
            }
        }
    }
}

#[test]
fn write_to_the_depth_clears_and_limits_records() {
    let mut guest = guest("intel");
    assert_eq!(guest.read(IA32_LBR_DEPTH), 32);
    for depth in [8, 16, 32] {
        guest.write(IA32_LBR_FROM_IP0, 1);
        guest.write(IA32_LBR_DEPTH, depth);
        for n in 0..32 {
            for msr in record(&guest, n) {
                let expected = (u64::from(n) < depth).then_some(0);
                assert_eq!(guest.try_read(msr), expected, "{msr:#x} at depth {depth}");
                assert_eq!(guest.try_write(msr, 0), expected.is_some());
            }
        }
    }
    for depth in [0, 7, 24, 64, 1 << 32 | 8] {
        assert!(!guest.try_write(IA32_LBR_DEPTH, depth));
    }
}

#[test]
fn amd_drops_reserved_bits_of_branch_records() {
    let mut guest = guest("amd-v2");
    for (msr, kept) in [
        (DBG_EXTN_CFG, 1 << 6),
        (LBR_SELECT, 0x1FF),
        (LBR_FROM0, !0),
        (LBR_FROM0 + 31, !(1 << 61)),
        (IA32_DEBUGCTL, 0x1800),
    ] {
        guest.write(msr, !0);
        assert_eq!(guest.read(msr), kept, "{msr:#x}");
    }
}

#[test]
fn models_without_branch_records_are_unchanged() {
    for name in ["intel", "intel-v5", "amd-v2", "intel-v1", "amd", "amd-k7", "off"] {
        let mut guest = Guest::of(name, None);
        let with = guest.vpmu.model().with_branch_records();
        let has_some = ["intel", "intel-v5", "amd-v2"].contains(&name);
        assert_eq!(with.has_branch_records(), has_some, "{name}");
        assert_eq!(with == *guest.vpmu.model(), !has_some, "{name}");
        let addresses = [
            LBR_SELECT,
            DBG_EXTN_CFG,
            MSR_LASTBRANCH_TOS,
            IA32_LBR_CTL,
            IA32_LBR_DEPTH,
        ];
        let records = [LBR_FROM0, IA32_LBR_FROM_IP0, IA32_LBR_TO_IP0, IA32_LBR_INFO0];
        for msr in addresses.into_iter().chain(records) {
            assert_eq!(guest.try_read(msr), None, "{name}: {msr:#x}");
            assert!(!guest.try_write(msr, 0), "{name}: {msr:#x}");
        }
        // A model without branch records does not store the status bit of frozen records.
        if name == "amd-v2" {
            guest.write(PERF_CNTR_GLOBAL_STATUS_SET, !0);
            assert_eq!(guest.read(PERF_CNTR_GLOBAL_STATUS), 0x3F);
        }
    }
}

#[test]
fn cpuid_announces_branch_records_only_with_them() {
    let leaf = |model: &PmuModel, number| {
        let mut regs = CpuidRegs::default();
        model.adjust_cpuid(number, 0, &mut regs, ArchEventSet::NONE);
        regs
    };
    let intel = PmuModel::INTEL;
    let with = intel.with_branch_records();
    assert_eq!((leaf(&with, 7).edx, leaf(&intel, 7).edx), (1 << 19, 0));
    let lbr = leaf(&with, 0x1C);
    assert_eq!((lbr.eax, lbr.ebx, lbr.ecx, lbr.edx), (0xB, 3, 4, 0));
    assert_eq!(leaf(&intel, 0x1C), CpuidRegs::default());
    assert_eq!((leaf(&with, 0).eax, leaf(&intel, 0).eax), (0x1C, 0xA));
    let amd = *Guest::of("amd-v2", None).vpmu.model();
    let with = leaf(&amd.with_branch_records(), 0x8000_0022);
    assert_eq!((with.eax, with.ebx), (7, 6 | 16 << 4));
    let without = leaf(&amd, 0x8000_0022);
    assert_eq!((without.eax, without.ebx), (1, 6));
}

#[test]
fn records_are_collected_and_frozen_before_the_pmi() {
    for (name, depth, frozen_status) in [
        ("intel", 32, 0),
        ("intel-v3", 32, 0),
        ("intel-v4", 32, STATUS_LBR_FRZ),
        ("intel-v5", 32, STATUS_LBR_FRZ),
        ("amd-v2", 16, STATUS_LBR_FRZ),
    ] {
        let mut guest = guest(name);
        guest.write(IA32_DEBUGCTL, FREEZE);
        set_enabled(&mut guest, true);
        assert_eq!(guest.vpmu.requested_branches(), None, "no PMI is due");
        overflow(&mut guest);
        let request = guest.vpmu.requested_branches().unwrap();
        assert_eq!(u32::from(request.depth), depth);
        assert!(request.levels.user && request.levels.kernel);
        guest.vpmu.begin_branches(0);
        assert!(guest.vpmu.is_collecting_branches() && guest.vpmu.requested_branches().is_none());
        for n in 0..u64::from(depth) {
            let full = guest.vpmu.add_branch(&jump(0x1000 + n));
            assert_eq!(full, n + 1 == u64::from(depth), "{name}: branch {n}");
        }
        // When all records are in use, further branches do not replace them.
        assert!(guest.vpmu.add_branch(&jump(0x9000)));
        guest.vpmu.complete_branches();
        let newest_first: Vec<u64> = (0..u64::from(depth)).rev().map(|n| 0x1000 + n).collect();
        assert_eq!(sources(&mut guest, depth), newest_first, "{name}");
        assert_eq!(status(&mut guest), frozen_status | 1, "{name}");
        if name == "intel" {
            // On this model, the freeze has cleared the enable bit of the records.
            assert_eq!(guest.read(IA32_LBR_CTL), ALL_BRANCHES & !1);
        }
        guest.vpmu.pmi_delivered(1);
        // Frozen records stay unchanged for the next PMI.
        overflow(&mut guest);
        assert_eq!(guest.vpmu.requested_branches(), None, "{name}");
        guest.vpmu.pmi_delivered(2);
        match name {
            "amd-v2" => guest.write(PERF_CNTR_GLOBAL_STATUS_CLR, !0),
            "intel-v4" | "intel-v5" => guest.write(IA32_PERF_GLOBAL_STATUS_RESET, STATUS_LBR_FRZ | 1),
            _ => set_enabled(&mut guest, true),
        }
        overflow(&mut guest);
        assert!(guest.vpmu.requested_branches().is_some(), "{name}");
    }
}

/// If the branches for a PMI cannot be collected, the guest does not see records of an earlier PMI.
#[test]
fn interrupted_collection_leaves_no_old_records() {
    for name in ["intel-v4", "amd-v2"] {
        let mut guest = guest(name);
        set_enabled(&mut guest, true);
        for branches in [2, 0] {
            overflow(&mut guest);
            guest.vpmu.begin_branches(0);
            for n in 0..branches {
                assert!(!guest.vpmu.add_branch(&jump(0x1000 + n)));
            }
            guest.vpmu.complete_branches();
            guest.vpmu.pmi_delivered(0);
            let expected = if branches == 2 {
                [0x1001, 0x1000, 0]
            } else {
                [0; 3]
            };
            assert_eq!(sources(&mut guest, 3), expected, "{name}");
            // The records are not frozen, because the guest has not set the freeze bit in DebugCtl.
            assert_eq!(status(&mut guest) & STATUS_LBR_FRZ, 0);
        }
        overflow(&mut guest);
        guest.vpmu.begin_branches(0);
        set_enabled(&mut guest, false);
        // The collection can end, because the guest has disabled the records.
        assert!(guest.vpmu.add_branch(&jump(1)));
        assert_eq!(sources(&mut guest, 1), [0]);
    }
}

#[test]
fn amd_counters_freeze_on_pmi_with_branch_records() {
    let mut guest = guest("amd-v2");
    guest.write(IA32_DEBUGCTL, DEBUGCTL_FREEZE_ON_PMI);
    overflow(&mut guest);
    guest.vpmu.reconcile(&mut guest.events);
    assert_eq!(status(&mut guest), STATUS_CTR_FRZ | 1);
    let frozen = guest.read(PERF_CTR0);
    guest.events.run_through(5);
    assert_eq!(guest.read(PERF_CTR0), frozen);
    guest.write(PERF_CNTR_GLOBAL_STATUS_CLR, STATUS_CTR_FRZ | 1);
    guest.events.run_through(5);
    assert_eq!(guest.read(PERF_CTR0), frozen + 5);
}

/// The time that a PMI is delayed to collect branches counts as part of the PMI handler's time.
#[test]
fn collection_counts_as_time_of_the_handler() {
    let mut guest = guest("intel");
    guest.vpmu.set_pmi_share(PmiShare::from_percent(50).unwrap());
    set_enabled(&mut guest, true);
    overflow(&mut guest);
    let began_ns = guest.events.now_ns();
    guest.vpmu.begin_branches(began_ns);
    guest.events.wait(5000);
    guest.vpmu.complete_branches();
    let delivered_ns = guest.events.now_ns();
    assert_eq!(guest.vpmu.pmi_ready(delivered_ns), PmiReadiness::Now);
    guest.vpmu.pmi_delivered(delivered_ns);
    guest.events.wait(100);
    // The handler serves its counter and enables it again.
    guest.write(IA32_PERF_GLOBAL_CTRL, 0);
    guest.write(IA32_PERF_GLOBAL_STATUS_RESET, 1);
    guest.write(IA32_PERF_GLOBAL_CTRL, 1);
    overflow(&mut guest);
    let now_ns = guest.events.now_ns();
    let PmiReadiness::NotBefore { time_ns } = guest.vpmu.pmi_ready(now_ns) else {
        panic!("the PMI is not held back");
    };
    assert!(time_ns >= delivered_ns + 100 + 5100, "{time_ns}");
}

#[test]
fn branch_records_survive_save_and_restore() {
    for name in ["intel", "intel-v5", "amd-v2"] {
        let mut guest = guest(name);
        if name != "amd-v2" {
            guest.write(IA32_LBR_DEPTH, 16);
            guest.write(MSR_LASTBRANCH_TOS, 3);
        } else {
            guest.write(LBR_SELECT, 0x81);
        }
        guest.write(IA32_DEBUGCTL, FREEZE);
        set_enabled(&mut guest, true);
        overflow(&mut guest);
        guest.vpmu.begin_branches(0);
        guest.vpmu.add_branch(&BranchEntry {
            from_user: true,
            to_user: true,
            ..jump(0x1234)
        });
        guest.vpmu.complete_branches();
        let bytes = guest.vpmu.save(&mut guest.events);
        assert_eq!(bytes[5], 4, "layout version");
        let mut there = Guest::new(*guest.vpmu.model());
        there.vpmu.restore(&bytes, &mut there.events).unwrap();
        assert_eq!(there.vpmu.save(&mut there.events), bytes, "{name}");
        assert_eq!(sources(&mut there, 2), [0x1234, 0]);
        // A PMU without branch records rejects the state.
        let refused = Guest::of(name, None).vpmu.restore_before_use(&bytes);
        assert!(
            matches!(refused, Err(VpmuStateError::OtherModel { .. })),
            "{name}"
        );
        // Register values that no guest could have written are also rejected.
        let mut damaged = bytes.clone();
        let last = damaged.len() - 4 - 16 * 24 - 4 * 8;
        damaged[last + 4] = 0xFF;
        fix_checksum(&mut damaged);
        let refused = there.vpmu.restore(&damaged, &mut there.events);
        assert_eq!(
            refused,
            Err(VpmuStateError::Impossible("a branch record has reserved bits")),
            "{name}"
        );
        assert_eq!(there.vpmu.save(&mut there.events), bytes, "unchanged");
        // After a reset, the records are empty.
        there.vpmu.reset(&mut there.events);
        assert_eq!(sources(&mut there, 1), [0]);
    }
}

/// Models without branch records continue to use layout version 3, which contains no branch
/// records.
#[test]
fn state_without_branch_records_keeps_its_layout() {
    let mut guest = Guest::of("amd-v2", None);
    let bytes = guest.vpmu.save(&mut guest.events);
    assert_eq!(bytes[5], 3);
    for version in [1, 2, 4] {
        let mut other = bytes.clone();
        other[5] = version;
        fix_checksum(&mut other);
        assert!(
            guest.vpmu.restore(&other, &mut guest.events).is_err(),
            "{version}"
        );
    }
}

fn branches() -> impl Strategy<Value = Vec<BranchEntry>> {
    let branch =
        (0..KINDS.len(), any::<[bool; 2]>(), 0..1u64 << 47).prop_map(|(kind, users, from)| BranchEntry {
            from,
            to: from ^ 0xFF,
            kind: KINDS[kind],
            from_user: users[0],
            to_user: users[1],
        });
    prop::collection::vec(branch, 0..100)
}

proptest! {
    /// For any branch filter, the records contain the branches that the filter selects, most recent
    /// first, up to the number of records.
    #[test]
    fn records_are_the_selected_branches(
        taken in branches(), filter in 0u64..0x80, levels in 0u64..4, depth in 0usize..3,
        is_amd in any::<bool>(),
    ) {
        let mut guest = guest(if is_amd { "amd-v2" } else { "intel-v5" });
        let depth = if is_amd { 16 } else { [8, 16, 32][depth] };
        if is_amd {
            guest.write(LBR_SELECT, !(filter << 2 | levels));
            guest.write(DBG_EXTN_CFG, 1 << 6);
        } else {
            guest.write(IA32_LBR_DEPTH, depth);
            guest.write(IA32_LBR_CTL, 1 | levels << 1 | filter << 16);
        }
        overflow(&mut guest);
        guest.vpmu.begin_branches(0);
        let mut expected = Vec::new();
        for branch in &taken {
            let full = guest.vpmu.add_branch(branch);
            let bits = |user| if user { 2 } else { 1 };
            let wanted = bits(branch.from_user) | bits(branch.to_user);
            // Position of the branch type's bit in LBR_SELECT and in IA32_LBR_CTL.
            let bit = match (branch.kind, is_amd) {
                (BranchKind::Conditional, _) => 0,
                (BranchKind::Call, true) | (BranchKind::Unconditional, false) => 1,
                (BranchKind::IndirectCall, true) | (BranchKind::Indirect, false) => 2,
                (BranchKind::Return, true) | (BranchKind::Call, false) => 3,
                (BranchKind::Indirect, true) | (BranchKind::IndirectCall, false) => 4,
                (BranchKind::Unconditional, true) | (BranchKind::Return, false) => 5,
                _ => 6,
            };
            if levels & wanted == wanted && filter >> bit & 1 != 0 && expected.len() < depth as usize {
                expected.insert(0, branch.from);
            }
            prop_assert_eq!(full, expected.len() == depth as usize);
        }
        guest.vpmu.complete_branches();
        let count = expected.len();
        expected.resize(depth as usize, 0);
        prop_assert_eq!(sources(&mut guest, depth as u32), expected);
        if is_amd {
            let valid = (0..depth as u32).filter(|n| guest.read(LBR_FROM0 + 2 * n + 1) >> 63 != 0).count();
            prop_assert_eq!(valid, count);
        }
    }

    /// Any sequence of guest accesses and VMM calls leaves the PMU in a state that can be saved and
    /// restored, and no call panics.
    #[test]
    fn any_accesses_leave_a_valid_state(
        steps in prop::collection::vec((0usize..14, any::<u64>(), 0u32..64), 0..60),
        is_amd in any::<bool>(),
    ) {
        let mut guest = guest(if is_amd { "amd-v2" } else { "intel-v2" });
        for (step, value, shift) in steps {
            let msr = [
                IA32_LBR_CTL, IA32_LBR_DEPTH, MSR_LASTBRANCH_TOS, IA32_LBR_FROM_IP0 + shift % 33,
                IA32_LBR_TO_IP0 + shift % 33, LBR_SELECT, DBG_EXTN_CFG, LBR_FROM0 + shift % 33, IA32_DEBUGCTL,
            ];
            match step {
                0..9 => { guest.try_write(msr[step], value >> shift); }
                9 => run_to_overflow(&mut guest),
                10 => guest.vpmu.begin_branches(value),
                11 => { guest.vpmu.add_branch(&jump(value >> shift)); }
                12 => guest.vpmu.complete_branches(),
                _ => guest.vpmu.pmi_delivered(value),
            }
            let bytes = guest.vpmu.save(&mut guest.events);
            let mut there = Guest::new(*guest.vpmu.model());
            prop_assert_eq!(there.vpmu.restore(&bytes, &mut there.events), Ok(()));
        }
    }
}
