//! Tests that a guest continues to count when it is restored under a backing (source of the counts)
//! that differs from the one at the snapshot.

use vmm::kvm::execution;
use vmm::vm::restore::announced_events;

use super::*;

/// Guest code that enables counter 0 for cycles and counter 1 for the paravirtual event that counts
/// changes of the backing (the source of the counts). The code writes the low 16 bits of counter 0
/// to the serial port 10,000 times, so that most of these bytes follow a late snapshot, and writes
/// counter 1 once.
const CODE: [u8; 67] = [
    0x31, 0xD2, // xor edx, edx
    0xB9, 0x86, 0x01, 0x00, 0x00, // mov ecx, 0x186
    0xB8, 0x3C, 0x00, 0x43, 0x00, // mov eax, 0x43003c: cycles
    0x0F, 0x30, // wrmsr
    0xB9, 0x87, 0x01, 0x00, 0x00, // mov ecx, 0x187
    0xB8, 0xFF, 0x0D, 0x43, 0x00, // mov eax, 0x430dff: changes of backings
    0x0F, 0x30, // wrmsr
    0xBE, 0x10, 0x27, 0x00, 0x00, // mov esi, 10000
    0xB9, 0xC1, 0x00, 0x00, 0x00, // next: mov ecx, 0xc1
    0x0F, 0x32, // rdmsr
    0x66, 0xBA, 0xF8, 0x03, // mov dx, 0x3f8
    0xEE, // out dx, al
    0xC1, 0xE8, 0x08, // shr eax, 8
    0xEE, // out dx, al
    0x4E, // dec esi
    0x75, 0xED, // jnz next
    0xB9, 0xC2, 0x00, 0x00, 0x00, // mov ecx, 0xc2
    0x0F, 0x32, // rdmsr
    0x66, 0xBA, 0xF8, 0x03, // mov dx, 0x3f8
    0xEE, // out dx, al
    0xB0, 0x10, 0xE6, 0xF4, 0xF4, // mov al, 0x10; out 0xf4, al; hlt
];
/// Number of instructions between two reads of the counter.
const INSTRUCTIONS: u16 = 8;

fn with_policy(policy: CounterBackingPolicy) -> VmConfig {
    let mut config = config(&CODE);
    config.pmu.policy = policy;
    config.pmu.saved_policy = Some(CounterBackingPolicy::Clock);
    config
}

/// Takes a snapshot of the guest while its cycles are estimated from CPU time (`--backing clock`).
/// Returns `None` without KVM.
fn counting_by_clock() -> Option<(RestoredMachine, usize)> {
    let source = TestVm::start(&with_policy(CounterBackingPolicy::Clock), None)?;
    while source.output.len() < 100 {
        std::hint::spin_loop();
    }
    source.snapshot()
}

/// Restores the guest from a snapshot that was taken after `cut` bytes of its output. Returns the
/// values of counter 0 that the restored guest writes, except the first, and the value of counter
/// 1.
fn restored(config: &VmConfig, saved: RestoredMachine, cut: usize) -> (Vec<u16>, u8) {
    let output = TestVm::start(config, Some(saved)).unwrap().finish();
    let (changes, output) = output.split_last().unwrap();
    let words = output[2 + cut % 2..].chunks_exact(2);
    let values = words.map(|word| u16::from_le_bytes(word.try_into().unwrap()));
    (values.collect(), *changes)
}

/// Returns the configuration of a guest that is single-stepped; `None` if KVM cannot do so.
fn stepped() -> Option<VmConfig> {
    let mut config = with_policy(CounterBackingPolicy::Exact);
    config.pmu.stepping = execution::probe(&host::open().ok()?).unwrap().stepping;
    if !config.pmu.stepping.kernel {
        skip::skipped("this host's KVM cannot single-step guests", false);
        return None;
    }
    Some(config)
}

fn assert_exact(values: &[u16]) {
    assert!(values.len() > 300, "{} values", values.len());
    let is_exact = |pair: &[u16]| pair[1].wrapping_sub(pair[0]) == INSTRUCTIONS;
    assert!(values.windows(2).all(is_exact), "{values:?}");
}

#[test]
fn restored_guest_counts_by_steps_exactly() {
    let Some(mut config) = stepped() else { return };
    let Some((saved, cut)) = counting_by_clock() else {
        return;
    };
    config.backability = announced_events(&saved.state).unwrap();
    let (values, changes) = restored(&config, saved, cut);
    assert_exact(&values);
    assert_eq!(changes, 1);
}

/// A guest that was single-stepped at the snapshot is single-stepped from its first instruction
/// after the restore. KVM's debug state is not part of the snapshot and is set again. With a
/// different backing (source of the counts), the restored guest is not single-stepped.
#[test]
fn guest_debug_state_is_applied_anew() {
    let Some(mut config) = stepped() else { return };
    if config.pmu.stepping.user {
        skip::skipped("a guest that is stepped by the trap flag cannot be saved", false);
        return;
    }
    config.pmu.saved_policy = Some(CounterBackingPolicy::Exact);
    let source = TestVm::start(&config, None).unwrap();
    while source.output.len() < 100 {
        std::thread::sleep(Duration::from_millis(1));
    }
    let (saved, cut) = source.snapshot().unwrap();
    drop(source);
    config.backability = announced_events(&saved.state).unwrap();
    let again = copy_of(&saved);
    let (values, changes) = restored(&config, saved, cut);
    assert_exact(&values);
    assert_eq!(changes, 0);

    config.pmu.policy = CounterBackingPolicy::Clock;
    let vm = TestVm::start(&config, Some(again)).unwrap();
    let slot = vm.vm.registry().slots()[0].clone();
    vm.finish();
    assert_eq!(slot.stats().steps.get(), 0);
}

#[test]
fn counter_that_would_stand_still_needs_consent() {
    let Some((mut saved, cut)) = counting_by_clock() else {
        return;
    };
    let mut config = with_policy(CounterBackingPolicy::None);
    config.backability = announced_events(&saved.state).unwrap();
    assert_refused(&config, &saved, "the guest counts cycles", |_| ());
    assert_refused(&config, &saved, "--restore-loses", |_| ());

    saved.accepts_losses = true;
    let (values, changes) = restored(&config, saved, cut);
    assert!(
        values.len() > 300 && changes == 1,
        "{} values, {changes}",
        values.len()
    );
    assert!(values.windows(2).all(|pair| pair[0] == pair[1]), "{values:?}");
}

#[test]
fn same_backing_is_no_change() {
    let Some((saved, cut)) = counting_by_clock() else {
        return;
    };
    let (values, changes) = restored(&with_policy(CounterBackingPolicy::Clock), saved, cut);
    assert!(
        values.len() > 300 && changes == 0,
        "{} values, {changes}",
        values.len()
    );
}
