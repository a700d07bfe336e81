//! Tests of snapshots at random exits. The outputs of the source and of the restored VM, with their
//! counts and PMIs, equal that of a VM without a snapshot.
//!
//! `make snapshots` takes a thousand snapshots of each guest. A failure names the seed of its
//! snapshot; set `PERFVISOR_SNAPSHOT_SEED` to begin with this seed. The seed determines where the
//! guest is interrupted, but not the exit that follows, because the host schedules the vCPU.

use std::hash::{BuildHasher as _, RandomState};

use snapshot::state::SavedVcpu;
use vmm::kvm::execution;
use vpmu::{PmiShare, Vpmu};

use super::*;

/// Code of the paced guest, assembled from `paced.s`.
const PACED: &[u8] = include_bytes!("paced.bin");
/// Code of the single-stepped guest, assembled from `stepped.s`.
const STEPPED: &[u8] = include_bytes!("stepped.bin");
/// Number of loop iterations in which the paced guest (`paced.s`) reads a counter with RDPMC, each
/// with one byte of output.
const READS: usize = 12;
/// Number of loop iterations of the paced guest (`paced.s`) without RDPMC.
const PACED_ROUNDS: u32 = 30;
/// Guest address at which the paced guest stores 1 while it waits for a PMI that only the PMI limit
/// can delay.
const WAITS: u64 = 0x1a_0008;
/// Interrupt vector of the paced guest's PMIs.
const VECTOR: usize = 0x40;
/// Limit on the rate of PMIs of the paced guest, in PMIs per second. The first 16 PMIs are not
/// delayed.
const PMI_LIMIT: u32 = 150;
/// Default number of snapshots of a test.
const SNAPSHOTS: usize = 20;
/// Default number of snapshots of a guest that is single-stepped, which takes longer.
const STEPPED_SNAPSHOTS: usize = 8;
/// Maximum time from the output byte at which a snapshot is due to the snapshot, in microseconds.
const MAX_DELAY_US: u64 = 1000;

/// Offset of the in-service register (ISR) in the page of the local APIC. The following constants
/// are the offsets of other registers.
const XAPIC_ISR: usize = 0x100;
const XAPIC_IRR: usize = 0x200;
const XAPIC_LVTPC: usize = 0x340;

/// Returns the value of an environment variable that is a number.
fn number_in(variable: &str) -> Option<u64> {
    let value = std::env::var(variable).ok()?;
    Some(
        value
            .parse()
            .unwrap_or_else(|_| panic!("{variable}={value} is not a number")),
    )
}

/// Returns the number of snapshots of a test, which is `default` unless `PERFVISOR_SNAPSHOTS` is
/// set.
fn snapshots_or(default: usize) -> usize {
    number_in("PERFVISOR_SNAPSHOTS").map_or(default, |number| usize::try_from(number).unwrap())
}

/// Number of snapshots that were taken in each state of a PMI.
#[derive(Debug, Default)]
struct MetStates {
    /// Number of snapshots in which a counter has overflowed and the PMI is not delivered.
    due: usize,
    /// Number of snapshots in which the PMI is due and LVTPC is masked.
    masked: usize,
    /// Number of snapshots in which the PMI is due and delayed by the PMI limit.
    throttled: usize,
    /// Number of snapshots in which the PMI is due and the last instruction that the guest executed
    /// is an emulated RDPMC.
    behind_rdpmc: usize,
    /// Number of snapshots taken after the PMI was sent: it is requested in the local APIC, or the
    /// guest executes its handler.
    in_service: usize,
}

impl MetStates {
    fn record(&mut self, saved: &RestoredMachine) {
        let vcpu = &saved.state.vcpus[0];
        self.in_service += usize::from(is_in_service(vcpu));
        if !is_pmi_due(&vcpu.pmu.registers.0) {
            return;
        }
        self.due += 1;
        let mut waits = [0];
        memory_file(saved).read_exact_at(&mut waits, WAITS).unwrap();
        let is_masked = vcpu.lapic.0[XAPIC_LVTPC + 2] & 1 != 0;
        self.masked += usize::from(is_masked);
        self.throttled += usize::from(waits == [1]);
        self.behind_rdpmc += usize::from(!is_masked && vcpu.pmu.last_rdpmc.is_some());
    }
}

/// Returns `true` if a PMI is due in a saved PMU, whose model depends on the host.
fn is_pmi_due(registers: &[u8]) -> bool {
    let is_due = |model| {
        let mut pmu = Vpmu::new(model);
        pmu.restore_before_use(registers).map(|()| pmu.pmi_pending())
    };
    let model = PmuModel::INTEL;
    is_due(model)
        .or_else(|_| is_due(model.with_transactions()))
        .unwrap()
}

/// Returns `true` if the vector of the paced guest's PMI is requested or in service in the local
/// APIC, or an NMI was sent for a PMI.
fn is_in_service(vcpu: &SavedVcpu) -> bool {
    let at = VECTOR / 32 * 16 + VECTOR % 32 / 8;
    let requested = vcpu.lapic.0[XAPIC_IRR + at] | vcpu.lapic.0[XAPIC_ISR + at];
    requested >> (VECTOR % 8) & 1 != 0 || vcpu.pmu.nmi_sent
}

/// Waits until the guest of `source` has written `length` bytes or its VM has stopped, and then for
/// `delay`.
fn run_until(source: &TestVm, length: usize, delay: Duration) {
    while source.output.len() < length && source.vm.control().reason().is_none() {
        std::hint::spin_loop();
    }
    let start = Instant::now();
    while start.elapsed() < delay {
        std::hint::spin_loop();
    }
}

/// Takes `number` snapshots, each of a new VM at a random byte of its output. Compares the output
/// of this VM, and that of the VM restored from the snapshot, with the output of a VM without a
/// snapshot. Returns the latter, or `None` without KVM.
///
/// The random byte is among the first `n` bytes of the output, where `n` is a random element of
/// `parts`.
pub(super) fn cut_at_random(config: &VmConfig, number: usize, parts: &[usize]) -> Option<Vec<u8>> {
    let expected = TestVm::start(config, None)?.finish();
    let (start, mut met, mut taken) = (Instant::now(), MetStates::default(), 0);
    let first = number_in("PERFVISOR_SNAPSHOT_SEED").unwrap_or_else(|| RandomState::new().hash_one(0));
    let mut seed = first;
    while taken < number {
        let part = parts[usize::try_from(seed >> 60).unwrap() % parts.len()];
        let target = usize::try_from(seed >> 33).unwrap() % part.min(expected.len());
        let source = TestVm::start(config, None).unwrap();
        run_until(
            &source,
            target,
            Duration::from_micros((seed >> 16) % MAX_DELAY_US),
        );
        if let Some((saved, cut)) = source.snapshot() {
            taken += 1;
            met.record(&saved);
            let which = format!("snapshot {taken} with PERFVISOR_SNAPSHOT_SEED={seed}, at byte {cut}");
            let restored = TestVm::start(config, Some(saved)).unwrap();
            assert!(source.finish() == expected, "{which}: the source differs");
            let joined = [&expected[..cut], &restored.finish()].concat();
            assert!(joined == expected, "{which}: the restored VM differs");
        }
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
    }
    let elapsed = start.elapsed().as_secs();
    eprintln!("{number} snapshots from seed {first} in {elapsed} s, of which {met:?}");
    Some(expected)
}

/// A snapshot at any exit neither loses nor repeats an instruction, a count or a PMI, in the
/// restored VM and in the source.
#[test]
fn output_and_counts_are_equal_with_and_without_the_cut() {
    let Some(output) = cut_at_random(&config(GUEST), snapshots_or(SNAPSHOTS), &[usize::MAX]) else {
        return;
    };
    let [counted, _, pmis, status, after] = results(&output)[..] else {
        panic!("no results")
    };
    // Each round makes four port accesses besides RDPMC traps. The accesses that write the results
    // come after the last read of the counter.
    assert_eq!((counted, pmis, status & 2, after), (4 * ROUNDS, 1, 0, 1));
}

/// A PMI that is due, masked, delayed by the PMI limit or pending after an RDPMC at the snapshot is
/// delivered once, and before a counter read that shows its overflow.
#[test]
fn each_pmi_is_delivered_once_with_and_without_the_cut() {
    let mut config = config(PACED);
    config.pmu.pmi_limit = PMI_LIMIT;
    // The default PMI share would delay PMIs in the rounds that read a counter.
    config.pmu.pmi_share = PmiShare::UNLIMITED;
    let Some(output) = cut_at_random(&config, snapshots_or(SNAPSHOTS), &[READS, usize::MAX]) else {
        return;
    };
    let reads = u32::try_from(READS).unwrap();
    // Each round makes seven port accesses, and four more while LVTPC is masked, in half of the
    // rounds. Three accesses follow the last PMI.
    let counts = [7 * PACED_ROUNDS + 4 * PACED_ROUNDS / 2, 0u32.wrapping_sub(4)];
    let expected = [counts[0], counts[1], reads + PACED_ROUNDS, 0, reads];
    assert_eq!(results(&output), expected);
}

/// Each instruction is counted once, by single steps and by straight-line runs, and each PMI
/// interrupts the same instruction, with and without a snapshot.
#[test]
fn stepped_counts_are_exact_with_and_without_the_cut() {
    let mut config = config(STEPPED);
    config.pmu.policy = CounterBackingPolicy::Exact;
    config.pmu.pmi_share = PmiShare::UNLIMITED;
    let Ok(kvm) = host::open() else {
        skip::skipped("no KVM here", false);
        return;
    };
    config.pmu.stepping = execution::probe(&kvm).unwrap().stepping;
    if !config.pmu.stepping.kernel || config.pmu.stepping.user {
        skip::skipped("this host's KVM does not emulate CPL 0", false);
        return;
    }
    let Some(output) = cut_at_random(&config, snapshots_or(STEPPED_SNAPSHOTS), &[usize::MAX]) else {
        return;
    };
    let [counted, _, pmis, ..] = results(&output)[..] else {
        panic!("no results")
    };
    assert!(counted > 4000 && pmis > 30, "{counted} instructions, {pmis} PMIs");
}
