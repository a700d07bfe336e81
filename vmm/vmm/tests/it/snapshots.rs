//! Tests of snapshots of a running guest. The guest's output, counts and PMIs are equal with and
//! without the snapshot.

mod backing;
mod random_cuts;
mod rounds;

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use guest_patching::rdpmc::RdpmcMode;
use perf_core::error_line;
use perf_core::pmu::host::HostPerfCapabilities;
use random_cuts::cut_at_random;
use snapshot::diff::{BaseSnapshot, SnapshotBaseChain, SnapshotDiffWriter};
use snapshot::state::SavedMachine;
use test_support::skip;
use vm_memory::{Bytes as _, GuestAddress};
use vmm::boot::KernelSource;
use vmm::kvm::host;
use vmm::pmu::PmuConfig;
use vmm::vcpu::control::{ResetPolicy, VmStopReason};
use vmm::vcpu::kick;
use vmm::vm::restore::{RestoredMachine, RestoredMemory};
use vmm::vm::save::{SnapshotError, VmSnapshot};
use vmm::vm::{BackgroundKvmSetup, RunningVm, Vm, VmBuildInputs, VmConfig};
use vpmu::{CounterBackingPolicy, PmuModel};

/// Code of the guest, assembled from `snapshots/guest.s`.
const GUEST: &[u8] = include_bytes!("snapshots/guest.bin");
/// Number of iterations of the guest's main loop.
const ROUNDS: u32 = 2000;
/// Exit status of the guest: (0x10 << 1) | 1.
const DONE: VmStopReason = VmStopReason::DebugExit(33);
/// Number of snapshots of each guest that causes only one type of exit.
const STRING_SNAPSHOTS: usize = 8;
/// Maximum time that a guest may run, after which the test fails.
const MAX_DURATION: Duration = Duration::from_secs(60);

/// Output of the serial port.
#[derive(Clone, Default)]
struct Output(Arc<Mutex<Vec<u8>>>);

impl Output {
    fn bytes(&self) -> Vec<u8> {
        self.0.lock().unwrap().clone()
    }

    fn len(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns a multiboot image that contains `code`.
fn kernel(code: &[u8]) -> Vec<u8> {
    let load = 0x10_0000u32;
    let (magic, flags) = (0x1BAD_B002u32, 0x1_0003u32);
    let sum = 0u32.wrapping_sub(magic).wrapping_sub(flags);
    let header = [magic, flags, sum, load, load, 0, load + 0x1000, load + 32];
    let header = header.iter().flat_map(|word| word.to_le_bytes());
    header.chain(code.iter().copied()).collect()
}

fn config(code: &[u8]) -> VmConfig {
    let image: &'static [u8] = kernel(code).leak();
    let pmu = PmuConfig::new(PmuModel::INTEL, CounterBackingPolicy::Clock);
    VmConfig {
        rdpmc: RdpmcMode::Auto,
        ..VmConfig::new(KernelSource::Builtin(image), 32 << 20, pmu)
    }
}

struct TestVm {
    vm: RunningVm,
    output: Output,
}

impl TestVm {
    /// Starts the guest, or restores it. Returns `None` without KVM.
    fn start(config: &VmConfig, saved: Option<RestoredMachine>) -> Option<Self> {
        Self::build(config, saved).map(|built| built.unwrap_or_else(|line| panic!("{line}")))
    }

    fn build(config: &VmConfig, saved: Option<RestoredMachine>) -> Option<Result<Self, String>> {
        let Ok(kvm) = host::open() else {
            skip::skipped("no KVM here", false);
            return None;
        };
        kick::install_handlers().unwrap();
        let output = Output::default();
        let parts = VmBuildInputs {
            begun: BackgroundKvmSetup::now(),
            kvm: &kvm,
            config,
            devices: Vec::new(),
            probe: &HostPerfCapabilities::run(),
            console: Box::new(output.clone()),
        };
        let built = match saved {
            None => Vm::boot(parts),
            Some(saved) => Vm::restore(parts, saved),
        };
        Some(match built.and_then(Vm::start) {
            Ok(vm) => Ok(Self { vm, output }),
            Err(e) => Err(error_line(&e)),
        })
    }

    /// Waits until the guest stops, and returns its output.
    fn finish(mut self) -> Vec<u8> {
        let start = Instant::now();
        while self.vm.control().reason().is_none() {
            assert!(start.elapsed() < MAX_DURATION, "the guest does not end");
            std::thread::sleep(Duration::from_millis(1));
        }
        self.vm.stop_and_join();
        assert_eq!(self.vm.control().reason(), Some(DONE));
        self.output.bytes()
    }

    /// Returns the contents of guest memory.
    fn memory(&self) -> Vec<u8> {
        let mut bytes = vec![0; usize::try_from(self.vm.ram().size_bytes()).unwrap()];
        let memory = self.vm.ram().memory();
        memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
        bytes
    }

    /// Takes a snapshot. Returns it with the number of bytes that the guest had written by then, or
    /// `None` if the guest has ended. The guest continues to run.
    fn snapshot(&self) -> Option<(RestoredMachine, usize)> {
        self.snapshot_then(|_| ())
    }

    /// Takes a snapshot, and calls `check` with the memory file before the guest continues.
    fn snapshot_then(&self, check: impl FnOnce(&File)) -> Option<(RestoredMachine, usize)> {
        let begun = VmSnapshot::begin(self.vm.snapshots(), Default::default());
        let mut snapshot = match begun {
            Ok(snapshot) => snapshot,
            Err(SnapshotError::Ended) => return None,
            Err(e) => panic!("{}", error_line(&e)),
        };
        loop {
            match snapshot.advance() {
                Ok(true) => break,
                Ok(false) => std::thread::sleep(Duration::from_micros(50)),
                Err(SnapshotError::Ended) => return None,
                Err(e) => panic!("{}", error_line(&e)),
            }
        }
        let cut = self.output.len();
        let file = tempfile::tempfile().unwrap();
        file.set_len(snapshot.memory_bytes()).unwrap();
        let mut offset = 0;
        while offset < snapshot.memory_bytes() {
            let piece = snapshot.read_memory(offset).unwrap();
            file.write_all_at(&piece.data, offset).unwrap();
            offset = piece.next;
        }
        let state = snapshot.state().unwrap();
        assert_eq!(self.output.len(), cut, "the guest is paused");
        check(&file);
        Some((machine(&state, file), cut))
    }
}

/// Returns the contents of a memory file.
fn contents(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn machine(state: &[u8], memory: File) -> RestoredMachine {
    RestoredMachine {
        state: Box::new(snapshot::decode(state).unwrap()),
        memory: RestoredMemory::Snapshot(memory),
        accepts_losses: false,
    }
}

fn memory_file(machine: &RestoredMachine) -> &File {
    match &machine.memory {
        RestoredMemory::Snapshot(file) => file,
        RestoredMemory::Diff { .. } | RestoredMemory::Moved(_) => panic!("more than a file, or none"),
    }
}

/// Returns the five results at the end of the output: the values of counters 0 and 1, the number of
/// PMIs, the overflow status, and whether the PMI arrived after LVTPC was unmasked.
fn results(output: &[u8]) -> Vec<u32> {
    let words = output[output.len() - 20..].chunks(4);
    words
        .map(|word| u32::from_le_bytes(word.try_into().unwrap()))
        .collect()
}

/// The VMM completes a pending exit before it reads the registers for a snapshot. Completing a
/// string instruction takes several steps, because KVM performs the instruction in parts.
#[test]
fn an_open_exit_is_completed_in_a_loop_before_registers_are_read() {
    // mov esi, 0x100020; mov ecx, 4096; mov dx, 0x3f8; rep outsb; mov al, 0x10; out 0xf4, al; hlt
    let code = [
        0xBE, 0x20, 0x00, 0x10, 0x00, 0xB9, 0x00, 0x10, 0x00, 0x00, 0x66, 0xBA, 0xF8, 0x03, 0xF3, 0x6E, 0xB0,
        0x10, 0xE6, 0xF4, 0xF4,
    ];
    if let Some(output) = cut_at_random(&config(&code), STRING_SNAPSHOTS, &[usize::MAX]) {
        assert_eq!((output.len(), &output[..code.len()]), (4096, &code[..]));
    }
}

/// A WRMSR is not executed twice if a snapshot is taken at its exit. Counter 0 counts the exits at
/// MSR accesses, and the guest writes its value as output.
#[test]
fn a_wrmsr_is_not_done_twice() {
    let code = [
        0x31, 0xD2, // xor edx, edx
        0xB9, 0x86, 0x01, 0x00, 0x00, // mov ecx, 0x186
        0xB8, 0xFF, 0x0A, 0x43, 0x00, // mov eax, 0x430aff: exits at MSRs
        0x0F, 0x30, // wrmsr
        0xBE, 0xD0, 0x07, 0x00, 0x00, // mov esi, 2000
        0xB9, 0xC2, 0x00, 0x00, 0x00, // next: mov ecx, 0xc2
        0x89, 0xF0, // mov eax, esi
        0x0F, 0x30, // wrmsr
        0xB9, 0xC1, 0x00, 0x00, 0x00, // mov ecx, 0xc1
        0x0F, 0x32, // rdmsr
        0x66, 0xBA, 0xF8, 0x03, // mov dx, 0x3f8
        0xEE, // out dx, al
        0x31, 0xD2, // xor edx, edx
        0x4E, // dec esi
        0x75, 0xE6, // jnz next
        0xB0, 0x10, 0xE6, 0xF4, 0xF4, // mov al, 0x10; out 0xf4, al; hlt
    ];
    if let Some(output) = cut_at_random(&config(&code), STRING_SNAPSHOTS, &[usize::MAX]) {
        assert_eq!(output.len(), 2000);
        let step = output[1].wrapping_sub(output[0]);
        assert_eq!(step, 2, "a write and a read");
        let is_regular = |pair: &[u8]| pair[1].wrapping_sub(pair[0]) == step;
        assert!(output.windows(2).all(is_regular), "{:?}", &output[..20]);
    }
}

/// A snapshot, and the number of bytes that the guest had written by then, since its start or its
/// restore.
type Cut = (RestoredMachine, usize);

/// Returns a second restorable copy of a snapshot.
fn copy_of(saved: &RestoredMachine) -> RestoredMachine {
    RestoredMachine {
        state: saved.state.clone(),
        memory: RestoredMemory::Snapshot(memory_file(saved).try_clone().unwrap()),
        accepts_losses: saved.accepts_losses,
    }
}

/// Returns three values: the guest's output without a snapshot, a snapshot, and a snapshot of the
/// VM that was restored from the first snapshot.
fn two_cuts(config: &VmConfig) -> Option<(Vec<u8>, [Cut; 2])> {
    let expected = TestVm::start(config, None)?.finish();
    let cut = |saved: Option<&RestoredMachine>| {
        loop {
            let vm = TestVm::start(config, saved.map(copy_of)).unwrap();
            while vm.output.len() < 500 {
                std::hint::spin_loop();
            }
            // On a busy host, the guest may have ended.
            if let Some(taken) = vm.snapshot() {
                return taken;
            }
        }
    };
    let (first, length) = cut(None);
    let second = cut(Some(&first));
    Some((expected, [(first, length), second]))
}

/// A snapshot of a restored VM is equivalent to one of the original VM, and a snapshot can be
/// restored several times.
#[test]
fn restored_vm_can_be_saved_again() {
    let config = config(GUEST);
    let Some((expected, [(again, cut), (second, more)])) = two_cuts(&config) else {
        return;
    };
    let rest = TestVm::start(&config, Some(second)).unwrap().finish();
    assert!([&expected[..cut + more], &rest].concat() == expected);
    // The first restore must not have written the memory file.
    let rest = TestVm::start(&config, Some(again)).unwrap().finish();
    assert!([&expected[..cut], &rest].concat() == expected);
}

/// Takes a snapshot of a guest that has written its first bytes. Returns it with the number of
/// bytes that the guest had written by then, or `None` without KVM.
fn cut_after_start(config: &VmConfig) -> Option<(RestoredMachine, usize)> {
    loop {
        let source = TestVm::start(config, None)?;
        while source.output.len() < 16 {
            std::hint::spin_loop();
        }
        // On a busy host, the guest may have ended.
        if let Some(taken) = source.snapshot() {
            return Some(taken);
        }
    }
}

/// Takes a snapshot of a guest that has run for a while. Returns `None` without KVM.
fn saved() -> Option<(VmConfig, RestoredMachine)> {
    let config = config(GUEST);
    let source = TestVm::start(&config, None)?;
    while source.output.len() < 100 {
        std::hint::spin_loop();
    }
    let (saved, _) = source.snapshot().unwrap();
    Some((config, saved))
}

/// The VMM's own writes to guest memory are in the memory file. The VMM makes the last ones, a
/// patch of an RDPMC and the removal of the trap at the #GP handler, before the snapshot first
/// reads memory.
#[test]
fn vmm_writes_are_in_memory_file() {
    let config = config(GUEST);
    let Some(source) = TestVm::start(&config, None) else {
        return;
    };
    while source.output.len() < 100 {
        std::hint::spin_loop();
    }
    let snapshot = |vm: &TestVm| vm.snapshot_then(|file| assert!(vm.memory() == contents(file)));
    // On a busy host, the guest may have ended.
    let Some((saved, _)) = snapshot(&source) else {
        return;
    };
    assert!(!saved.state.kernel.rdpmc_sites.is_empty());
    snapshot(&TestVm::start(&config, Some(saved)).unwrap());
}

/// A trap flag that the VMM has set does not reach the guest after a restore. Single-stepping for
/// branch stacks sets the flag, which may remain in a copy of RFLAGS in guest memory. A restore
/// with another source of the counts (`--backing`) either removes the flag or fails, because the
/// guest that loads this copy has no #DB handler.
#[test]
fn stepper_trap_flag_is_cleared_for_other_backing() {
    let code = [
        0xBC, 0x00, 0x00, 0x1F, 0x00, // mov esp, 0x1f0000
        0xBE, 0x00, 0x40, 0x00, 0x00, // mov esi, 16384
        0x66, 0xBA, 0xF8, 0x03, // mov dx, 0x3f8
        0x89, 0xF0, // next: mov eax, esi
        0xEE, // out dx, al
        0x4E, // dec esi
        0x75, 0xFA, // jnz next
        0x68, 0x02, 0x01, 0x00, 0x00, // push 0x102: the trap flag
        0x9D, // popf
        0xB0, 0x55, // mov al, 0x55
        0xEE, // out dx, al
        0xB0, 0x10, 0xE6, 0xF4, 0xF4, // mov al, 0x10; out 0xf4, al; hlt
    ];
    let config = config(&code);
    let Some((mut saved, cut)) = cut_after_start(&config) else {
        return;
    };
    assert!(!saved.state.vcpus[0].pmu.stray_trap_flags);
    saved.state.vcpus[0].pmu.stray_trap_flags = true;
    match TestVm::build(&config, Some(saved)).unwrap() {
        Ok(vm) => {
            let rest = vm.finish();
            assert_eq!((cut + rest.len(), rest.last()), (16385, Some(&0x55)));
        }
        Err(line) => assert!(line.contains("trap flags"), "{line}"),
    }
}

/// The memory of a restored VM cannot be cleared, because the contents of the file would reappear,
/// so a reset by its guest stops the VM. The file remains unchanged.
#[test]
fn a_reset_after_restore_ends_the_vm_and_leaves_the_file() {
    let code = [
        0xBE, 0x00, 0x40, 0x00, 0x00, // mov esi, 16384
        0x66, 0xBA, 0xF8, 0x03, // mov dx, 0x3f8
        0x89, 0x34, 0xB5, 0x00, 0x00, 0x20, 0x00, // next: mov [0x200000 + esi * 4], esi
        0x89, 0xF0, // mov eax, esi
        0xEE, // out dx, al
        0x4E, // dec esi
        0x75, 0xF3, // jnz next
        0x66, 0xBA, 0xF9, 0x0C, // mov dx, 0xcf9
        0xB0, 0x06, 0xEE, 0xF4, // mov al, 6; out dx, al; hlt
    ];
    for on_reset in [ResetPolicy::Exit, ResetPolicy::Restart] {
        let config = VmConfig {
            on_reset,
            ..config(&code)
        };
        let Some((saved, _)) = cut_after_start(&config) else {
            return;
        };
        let file = memory_file(&saved).try_clone().unwrap();
        let before = contents(&file);
        let mut restored = TestVm::start(&config, Some(saved)).unwrap();
        let mut restarter = restored.vm.take_restarter();
        while restored.vm.control().reason().is_none() {
            if let Some(restarter) = &mut restarter {
                restarter.serve();
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        restored.vm.stop_and_join();
        let expected = match on_reset {
            ResetPolicy::Exit => VmStopReason::Reset,
            ResetPolicy::Restart => VmStopReason::NotRestarted,
        };
        assert_eq!(restored.vm.control().reason(), Some(expected));
        assert!(contents(&file) == before);
    }
}

/// A machine that differs from the saved one is rejected with a one-line error that names the
/// difference, before any thread has run.
#[test]
fn other_machines_are_refused_by_name() {
    let Some((config, saved)) = saved() else { return };
    type Change = fn(&mut SavedMachine);
    let changes: [(&str, Change); 11] = [
        ("MSR 0x12345678", |s| s.vcpus[0].msrs.push((0x1234_5678, 0))),
        ("CPUID leaf 0x", |s| s.vcpus[0].cpuid[1][3] ^= 1),
        ("CPUID", |s| s.vcpus[0].cpuid.truncate(3)),
        ("a PMU", |s| s.shape.pmu = "amd".into()),
        ("interrupt controllers", |s| drop(s.vm.irqchips.pop())),
        ("numbers of vCPUs", |s| s.vcpus.clear()),
        ("numbers of vCPUs", |s| s.vcpus[0].id = 9),
        ("kernel format", |s| s.kernel.format = "hurd".into()),
        ("virtual PMU of vCPU 0", |s| s.vcpus[0].pmu.registers.0[20] ^= 1),
        ("kvm_regs", |s| s.vcpus[0].regs.0.truncate(3)),
        ("1 virtio devices", |s| s.devices.push(Default::default())),
    ];
    for (words, change) in changes {
        assert_refused(&config, &saved, words, change);
    }
}

/// Checks that restoring a modified snapshot is rejected with a one-line error that contains
/// `words`.
#[track_caller]
fn assert_refused(
    config: &VmConfig,
    saved: &RestoredMachine,
    words: &str,
    change: impl Fn(&mut SavedMachine),
) {
    let mut state = saved.state.clone();
    change(&mut state);
    let machine = RestoredMachine {
        state,
        memory: RestoredMemory::Snapshot(memory_file(saved).try_clone().unwrap()),
        accepts_losses: saved.accepts_losses,
    };
    let line = match TestVm::build(config, Some(machine)).unwrap() {
        Ok(_) => panic!("{words}: restored"),
        Err(line) => line,
    };
    assert!(line.contains(words), "{words}: {line}");
    assert!(!line.contains('\n'), "{line}");
}

/// Without TSC scaling, a different TSC frequency is rejected, because the guest's time would run
/// at a different speed. A higher frequency is rejected too, which KVM could only imitate by
/// advancing the guest's TSC.
#[test]
fn a_slower_tsc_without_scaling_is_refused() {
    let Some((config, saved)) = saved() else { return };
    let words = "TSC frequency in kHz of";
    assert_refused(&config, &saved, words, |s| s.shape.tsc_khz *= 2);
    assert_refused(&config, &saved, words, |s| s.shape.tsc_khz /= 2);
}

#[test]
fn a_file_cut_short_is_refused() {
    let Some((config, saved)) = saved() else { return };
    memory_file(&saved).set_len((32 << 20) - 1).unwrap();
    let line = TestVm::build(&config, Some(saved)).unwrap().err().unwrap();
    assert!(line.contains("33554431 bytes, expected 33554432"), "{line}");
}

/// Parts of a VM that a snapshot cannot include are reported before the VM is paused.
#[test]
fn unsupported_options_are_refused_by_name() {
    type Change = fn(&mut VmConfig);
    let changes: [(&str, Change); 3] = [
        ("--rdpmc hwbp", |c| c.rdpmc = RdpmcMode::Hwbp),
        ("--backing exact", |c| {
            c.pmu.policy = CounterBackingPolicy::Exact;
            c.pmu.stepping.user = true;
        }),
        ("--gdb", |c| {
            c.debugger = Some(vmm::vm::DebuggerConfig { wait: false })
        }),
    ];
    for (option, change) in changes {
        let mut config = config(GUEST);
        change(&mut config);
        let Some(built) = TestVm::build(&config, None) else {
            return;
        };
        // On a host without hardware breakpoints, such a VM cannot be created.
        let Ok(vm) = built else { continue };
        let refused = VmSnapshot::begin(vm.vm.snapshots(), Default::default()).unwrap_err();
        let line = error_line(&refused);
        assert!(line.contains(option), "{option}: {line}");
        assert_eq!(vm.vm.control().parked(), 0);
    }
}

/// An abandoned snapshot, for example of a killed client, leaves a running VM running and a paused
/// VM paused.
#[test]
fn given_up_snapshot_leaves_the_vm_as_it_was() {
    let config = config(GUEST);
    for paused in [false, true] {
        let Some(source) = TestVm::start(&config, None) else {
            return;
        };
        while source.output.len() < 100 {
            std::hint::spin_loop();
        }
        assert!(source.vm.control().set_paused(paused));
        source.vm.kicker().kick();
        let mut snapshot = VmSnapshot::begin(source.vm.snapshots(), Default::default()).unwrap();
        assert!(matches!(snapshot.read_memory(0), Err(SnapshotError::Order)));
        while !snapshot.advance().unwrap() {
            std::thread::sleep(Duration::from_micros(50));
        }
        assert!(matches!(snapshot.read_memory(4096), Err(SnapshotError::Order)));
        assert!(matches!(snapshot.state(), Err(SnapshotError::Order)));
        drop(snapshot);
        assert_eq!(source.vm.control().is_pause_requested(), paused);
        source.vm.control().set_paused(false);
        source.finish();
    }
}

/// Returns the diff between the last snapshot of `bases` and the memory of a later full snapshot.
/// The first base is a full snapshot, and each other base is a diff based on its predecessor.
fn diff_of(bases: &[&RestoredMachine], later: &RestoredMachine) -> RestoredMachine {
    let open = || {
        let opened = bases.iter().map(|base| {
            let state = snapshot::encode(&base.state).unwrap();
            let (RestoredMemory::Snapshot(file) | RestoredMemory::Diff { changes: file, .. }) = &base.memory
            else {
                panic!("it has no file");
            };
            BaseSnapshot::new(Path::new("base"), &state, file.try_clone().unwrap()).unwrap()
        });
        let opened: Vec<_> = opened.collect();
        let need = opened.last().unwrap().state_crc();
        SnapshotBaseChain::new(Path::new("diff"), need, opened).unwrap()
    };
    let mut writer = SnapshotDiffWriter::new(open(), later.state.memory.bytes).unwrap();
    let memory = contents(memory_file(later));
    let file = tempfile::tempfile().unwrap();
    file.set_len(memory.len() as u64).unwrap();
    let mut offset = 0;
    for chunk in memory.chunks(2 << 20) {
        for range in writer.compare(offset, chunk).unwrap() {
            let at = offset + range.start as u64;
            file.write_all_at(&chunk[range], at).unwrap();
        }
        offset += chunk.len() as u64;
    }
    let (state, _) = writer.finish(&snapshot::encode(&later.state).unwrap()).unwrap();
    RestoredMachine {
        memory: RestoredMemory::Diff {
            base: Box::new(open()),
            changes: file.try_clone().unwrap(),
        },
        ..machine(&state, file)
    }
}

/// A guest that is restored from a diff continues in the same way as one restored from a full
/// snapshot that was taken at the same time.
#[test]
fn diff_restores_to_equal_results() {
    let config = config(GUEST);
    let Some((expected, [(base, cut), (full, more)])) = two_cuts(&config) else {
        return;
    };
    let diff = diff_of(&[&base], &full);
    let vm = TestVm::start(&config, Some(diff)).unwrap();
    assert!([&expected[..cut + more], &vm.finish()].concat() == expected);
}

/// The diff contains pages that only the VMM has written since the base, whether their range is
/// mapped or copied, and pages that have become zero.
#[test]
fn vmm_writes_are_in_dirty_set() {
    const SHORT: u64 = 0x90_0000;
    const LONG: u64 = 0xA0_0000;
    const ZEROED: u64 = 0xB0_0000;
    // hlt; jmp to it: the guest writes nothing.
    let config = config(&[0xF4, 0xEB, 0xFD]);
    let Some(source) = TestVm::start(&config, None) else {
        return;
    };
    let ram = source.vm.ram().memory();
    ram.write_obj(9u8, GuestAddress(ZEROED)).unwrap();
    let (base, _) = source.snapshot().unwrap();
    let (same, _) = source.snapshot().unwrap();
    let unchanged = diff_of(&[&base], &same).state.memory.base.unwrap();
    assert!(unchanged.runs.len() <= 1, "{:?}", unchanged.runs);
    ram.write_obj(7u8, GuestAddress(SHORT)).unwrap();
    ram.write_slice(&[8; 128 << 10], GuestAddress(LONG)).unwrap();
    ram.write_obj(0u8, GuestAddress(ZEROED)).unwrap();
    let (later, _) = source.snapshot().unwrap();
    let diff = diff_of(&[&base], &later);
    let runs = &diff.state.memory.base.as_ref().unwrap().runs;
    for run in [(SHORT, 4096), (LONG, 128 << 10), (ZEROED, 4096)] {
        assert!(runs.contains(&run), "{run:x?} of {runs:x?}");
    }
    let restored = TestVm::start(&config, Some(diff)).unwrap();
    let byte = |at| {
        restored
            .vm
            .ram()
            .memory()
            .read_obj::<u8>(GuestAddress(at))
            .unwrap()
    };
    let last = LONG + (128 << 10) - 1;
    assert_eq!([SHORT, LONG, last, ZEROED].map(byte), [7, 8, 8, 0]);
}

/// When a VM is restored from a diff that is based on another diff, each page of memory comes from
/// the highest snapshot that contains it. Covers mapped and copied ranges of the two diffs, and
/// pages of the full snapshot.
#[test]
fn diff_of_a_diff_restores_the_memory_of_all() {
    const LONG: u64 = 0xA0_0000;
    const LONG_BYTES: usize = 128 << 10;
    // hlt; jmp to it: the guest writes nothing.
    let config = config(&[0xF4, 0xEB, 0xFD]);
    let Some(source) = TestVm::start(&config, None) else {
        return;
    };
    let ram = source.vm.ram().memory();
    let write = |at: u64, value: u8, bytes: usize| {
        ram.write_slice(&vec![value; bytes], GuestAddress(at)).unwrap();
    };
    write(0x90_0000, 1, 0x3000);
    let (full, _) = source.snapshot().unwrap();
    write(0x90_1000, 2, 0x2000);
    write(LONG, 2, LONG_BYTES);
    let (later, _) = source.snapshot().unwrap();
    let first = diff_of(&[&full], &later);
    write(0x90_2000, 0, 0x1000);
    write(LONG + 0x1_0000, 3, 0x1000);
    let (last, _) = source.snapshot().unwrap();
    let second = diff_of(&[&full, &first], &last);
    let runs = second.state.memory.base.as_ref().unwrap().runs.clone();
    assert!(
        runs.iter().map(|(_, bytes)| bytes).sum::<u64>() <= 0x4000,
        "{runs:x?}"
    );

    let restored = TestVm::start(&config, Some(second)).unwrap();
    let memory = restored.vm.ram().memory();
    let byte = |at| memory.read_obj::<u8>(GuestAddress(at)).unwrap();
    assert_eq!([0x90_0000, 0x90_1000, 0x90_2000].map(byte), [1, 2, 0]);
    let parts = [
        LONG,
        LONG + 0x1_0000,
        LONG + 0x1_1000,
        LONG + LONG_BYTES as u64 - 1,
    ];
    assert_eq!(parts.map(byte), [2, 3, 2, 2]);
}
