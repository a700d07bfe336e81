//! Tests of exact counts on the host's KVM with a minimal VMM loop, from the guest's WRMSR to the
//! single step.
//!
//! The guests run at CPL 0 in real mode. Each guest enables counter 0, runs a block of code with a
//! known instruction count, and disables the counter. The count includes four instructions around
//! the block: the enabling WRMSR and three MOV instructions. It does not include the disabling
//! WRMSR.

#![expect(unsafe_code, reason = "guest memory")]

use std::sync::Arc;

use kvm_bindings::{
    KVM_CAP_X86_USER_SPACE_MSR, KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP, KVM_GUESTDBG_USE_HW_BP,
    kvm_enable_cap, kvm_guest_debug, kvm_userspace_memory_region,
};
use kvm_ioctls::{
    Kvm, MsrExitReason, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags, VcpuExit, VcpuFd, VmFd,
};
use perf_core::pmu::VcpuId;
use perf_core::pmu::vmm_pmu::{VmmPmu, VmmPmuCounts};
use perf_core::{PerfCore, PerfCoreConfig};
use vpmu::exact::*;
use vpmu::registers::*;
use vpmu::*;

use test_support::skip;

const MEMORY_BYTES: usize = 0x1_0000;
const CODE: u64 = 0x1000;
const UD_HANDLER: u64 = 0x2000;
const NMI_HANDLER: u64 = 0x2100;
const STACK: u64 = 0x8000;
/// Maximum number of VM exits of a test guest.
const MOST_EXITS: u32 = 10_000;

/// #UD handler that skips UD2, five instructions: push bp; mov bp, sp; add word [bp + 2], 2; pop
/// bp; iret.
const UD_CODE: &[u8] = &[0x55, 0x89, 0xE5, 0x83, 0x46, 0x02, 0x02, 0x5D, 0xCF];
/// NMI handler, two instructions: inc si; iret.
const NMI_CODE: &[u8] = &[0x46, 0xCF];

/// Guest memory with a real-mode interrupt vector table at address 0.
struct Memory(*mut u8);

impl Memory {
    fn write(&mut self, at: u64, bytes: &[u8]) {
        assert!(at as usize + bytes.len() <= MEMORY_BYTES);
        // SAFETY: the range is within the mapping, and the guest does not run during the write.
        unsafe {
            self.0
                .add(at as usize)
                .copy_from_nonoverlapping(bytes.as_ptr(), bytes.len())
        };
    }
}

impl SteppedGuestMemory for Memory {
    fn read(&mut self, linear: u64, buffer: &mut [u8]) -> usize {
        let n = buffer.len().min(MEMORY_BYTES.saturating_sub(linear as usize));
        if n > 0 {
            // SAFETY: the range is within the mapping, and the guest does not run during the read.
            unsafe {
                self.0
                    .add(linear as usize)
                    .copy_to_nonoverlapping(buffer.as_mut_ptr(), n)
            };
        }
        n
    }

    fn gate(&mut self, vector: u8) -> Option<u64> {
        let mut offset = [0; 2];
        self.read(u64::from(vector) * 4, &mut offset);
        Some(u64::from(u16::from_le_bytes(offset))).filter(|&offset| offset != 0)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping has this length, and the VM that used it has been dropped.
        unsafe { libc::munmap(self.0.cast(), MEMORY_BYTES) };
    }
}

struct Machine {
    vcpu: VcpuFd,
    _vm: VmFd,
    memory: Memory,
    vpmu: Vpmu,
    events: PerfCoreEvents,
    meter: SingleStepMeter,
    vmm_counts: Arc<VmmPmuCounts>,
}

impl Machine {
    /// Creates a guest that executes the code `block`. Returns `None` if KVM is missing or cannot
    /// trap MSRs.
    fn new(block: &[u8], selector: u32) -> Option<Self> {
        let vm = Kvm::new().ok()?.create_vm().ok()?;
        let mut cap = kvm_enable_cap {
            cap: KVM_CAP_X86_USER_SPACE_MSR,
            ..Default::default()
        };
        cap.args[0] = u64::from(MsrExitReason::Filter.bits());
        vm.enable_cap(&cap).ok()?;
        let range = MsrFilterRange {
            flags: MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE,
            base: IA32_PERFEVTSEL0,
            msr_count: 8,
            bitmap: &[0],
        };
        vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &[range]).ok()?;

        // SAFETY: creates a new anonymous mapping, which is unmapped when the memory is dropped.
        let mapped = unsafe {
            let (protection, flags) = (
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
            );
            libc::mmap(std::ptr::null_mut(), MEMORY_BYTES, protection, flags, -1, 0)
        };
        assert_ne!(mapped, libc::MAP_FAILED);
        let mut memory = Memory(mapped.cast());
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: MEMORY_BYTES as u64,
            userspace_addr: mapped as u64,
        };
        // SAFETY: the region is the mapping above, which outlives the VM.
        unsafe { vm.set_user_memory_region(region).unwrap() };

        let set = |register: u8, value: u32| [&[0x66, 0xB8 + register][..], &value.to_le_bytes()].concat();
        let (eax, ecx, edx, wrmsr, hlt) = (0, 1, 2, vec![0x0F, 0x30], vec![0xF4]);
        let program = [
            set(ecx, IA32_PERFEVTSEL0),
            set(eax, selector),
            set(edx, 0),
            wrmsr.clone(), // 1
            block.to_vec(),
            set(ecx, IA32_PERFEVTSEL0), // 2
            set(eax, 0),                // 3
            set(edx, 0),                // 4
            wrmsr,
            hlt,
        ]
        .concat();
        memory.write(CODE, &program);
        memory.write(UD_HANDLER, UD_CODE);
        memory.write(NMI_HANDLER, NMI_CODE);
        memory.write(6 * 4, &(UD_HANDLER as u32).to_le_bytes());
        memory.write(2 * 4, &(NMI_HANDLER as u32).to_le_bytes());

        let vcpu = vm.create_vcpu(0).unwrap();
        let mut sregs = vcpu.get_sregs().unwrap();
        sregs.cs.base = 0;
        sregs.cs.selector = 0;
        vcpu.set_sregs(&sregs).unwrap();
        let mut regs = vcpu.get_regs().unwrap();
        (regs.rip, regs.rsp, regs.rflags) = (CODE, STACK, 2);
        vcpu.set_regs(&regs).unwrap();

        let core = PerfCore::new(PerfCoreConfig::default());
        let vmm_counts = Arc::new(VmmPmuCounts::new(vmm_counts::SELECTORS));
        let driver = VmmPmu::new();
        driver.add_vcpu(VcpuId(0), vmm_counts.clone());
        core.register(Arc::new(driver));
        core.add_vcpu(VcpuId(0), 0).unwrap().sched_in();
        let events = PerfCoreEvents::new(
            core,
            VcpuId(0),
            CounterBackingSelector::new(CounterBackingPolicy::Exact, None, |_| None),
        );
        Some(Self {
            vcpu,
            _vm: vm,
            memory,
            vpmu: Vpmu::new(PmuModel::INTEL),
            events,
            meter: SingleStepMeter::new(Vendor::Intel),
            vmm_counts,
        })
    }

    fn state(&self) -> SteppedCpuState {
        let regs = self.vcpu.get_regs().unwrap();
        let sregs = self.vcpu.get_sregs().unwrap();
        SteppedCpuState {
            rip: regs.rip,
            rflags: regs.rflags,
            cpl: 0,
            size: CodeSegmentMode::Bits16,
            gpr: [
                regs.rax, regs.rcx, regs.rdx, regs.rbx, regs.rsp, regs.rbp, regs.rsi, regs.rdi, regs.r8,
                regs.r9, regs.r10, regs.r11, regs.r12, regs.r13, regs.r14, regs.r15,
            ],
            segment_bases: [
                sregs.es.base,
                sregs.cs.base,
                sregs.ss.base,
                sregs.ds.base,
                sregs.fs.base,
                sregs.gs.base,
            ],
        }
    }

    /// Enables or disables single-stepping of the vCPU, which is at `rip`. Handlers start with the
    /// trap flag clear, so a breakpoint is set on each handler except one at `rip`.
    fn set_stepping(&self, on: bool, rip: u64) {
        let mut debug = kvm_guest_debug::default();
        if on {
            debug.control = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP | KVM_GUESTDBG_USE_HW_BP;
            debug.arch.debugreg[7] = 0x400;
            for (n, handler) in [UD_HANDLER, NMI_HANDLER].into_iter().enumerate() {
                debug.arch.debugreg[n] = handler;
                if handler != rip {
                    debug.arch.debugreg[7] |= 2 << (2 * n);
                }
            }
        }
        self.vcpu.set_guest_debug(&debug).unwrap();
    }

    /// Runs the guest until HLT and returns the count of counter 0. Injects an NMI when the guest
    /// reaches the address `nmi_at`.
    fn run(mut self, mut nmi_at: Option<u64>) -> u64 {
        for _ in 0..MOST_EXITS {
            self.vpmu.reconcile(&mut self.events);
            let state = self.state();
            if self.events.needs_stepping() {
                if !self.meter.in_step() {
                    self.meter.begin(&state, &mut self.memory);
                }
                self.set_stepping(true, state.rip);
            } else {
                self.meter.abandon();
                self.set_stepping(false, 0);
            }
            match self.vcpu.run().unwrap() {
                VcpuExit::X86Wrmsr(exit) => {
                    let (msr, value) = (MsrAddress(exit.index), exit.data);
                    *exit.error = 0;
                    assert_eq!(
                        self.vpmu.write_msr(msr, value, &mut self.events),
                        MsrWriteOutcome::Done
                    );
                }
                VcpuExit::Debug(_) => {
                    let state = self.state();
                    let step = self.meter.end(&state, &mut self.memory);
                    assert!(!step.lost, "{state:#x?}");
                    step.feed(&self.vmm_counts);
                    if nmi_at == Some(state.rip) {
                        nmi_at = None;
                        self.vcpu.nmi().unwrap();
                    }
                }
                VcpuExit::Hlt => {
                    // The guest must have reached the address at which the NMI is injected.
                    assert_eq!(nmi_at, None);
                    return match self.vpmu.read_msr(MsrAddress(IA32_PMC0), &mut self.events) {
                        MsrReadOutcome::Value(value) => value,
                        MsrReadOutcome::InjectGp => panic!("counter 0 is missing"),
                    };
                }
                other => panic!("unexpected exit {other:?}"),
            }
        }
        panic!("the guest did not halt");
    }
}

const INSTRUCTIONS: u32 = 0x43_00C0;
const BRANCHES: u32 = 0x43_00C4;
const TAKEN: u32 = 0x43_20C4;
const LOADS: u32 = 0x43_81D0;
const STORES: u32 = 0x43_82D0;
/// Number of counted instructions that surround the block of code under test.
const AROUND: u64 = 4;

/// Checks in five runs that counter 0 counts `expected` events while the guest executes `block`.
fn expect(block: &[u8], nmi_at: Option<u64>, selector: u32, expected: u64) {
    for round in 0..5 {
        let Some(machine) = Machine::new(block, selector) else {
            return skip::skipped("no KVM here that traps MSRs", false);
        };
        assert_eq!(
            machine.run(nmi_at),
            expected,
            "selector {selector:#x}, round {round}"
        );
    }
}

/// Machine code of a loop with 50 iterations: mov cx, 50; dec cx; jnz back.
const LOOP: &[u8] = &[0xB9, 50, 0, 0x49, 0x75, 0xFD];

#[test]
fn empty_block_counts_only_enabling_wrmsr() {
    expect(&[], None, INSTRUCTIONS, AROUND);
}

#[test]
fn loop_counts_its_instructions_and_branches() {
    expect(LOOP, None, INSTRUCTIONS, AROUND + 1 + 50 * 2);
    expect(LOOP, None, BRANCHES, 50);
    expect(LOOP, None, TAKEN, 49);
    // With USR set and OS clear, the counter does not count, because the guest runs at CPL 0.
    expect(LOOP, None, 0x41_00C0, 0);
}

#[test]
fn string_instruction_counts_once() {
    // mov cx, 17; mov si, 0x3000; mov di, 0x3100; rep movsb; rep stosb with cx = 0
    let block = [0xB9, 17, 0, 0xBE, 0, 0x30, 0xBF, 0, 0x31, 0xF3, 0xA4, 0xF3, 0xAA];
    expect(&block, None, INSTRUCTIONS, AROUND + 5);
    expect(&block, None, LOADS, 1);
    expect(&block, None, STORES, 1);
}

#[test]
fn mov_ss_shadow_hides_no_instruction() {
    // mov ax, ss; mov ss, ax; nop; nop
    expect(
        &[0x8C, 0xD0, 0x8E, 0xD0, 0x90, 0x90],
        None,
        INSTRUCTIONS,
        AROUND + 4,
    );
}

/// A sequence of fences hides no instruction from the exact count, although a single step stops
/// only after the sequence if KVM emulates code at CPL 0.
#[test]
fn row_of_fences_hides_no_instruction() {
    for fence in [[0x0F, 0xAE, 0xE8], [0x0F, 0xAE, 0xF0], [0x0F, 0xAE, 0xF8]] {
        let row = [&[fence; 20].concat()[..], &[0x90]].concat();
        expect(&row, None, INSTRUCTIONS, AROUND + 21);
    }
}

#[test]
fn faulting_instruction_does_not_count_but_handler_does() {
    // nop; ud2; nop
    expect(&[0x90, 0x0F, 0x0B, 0x90], None, INSTRUCTIONS, AROUND + 2 + 5);
}

#[test]
fn nmi_adds_only_its_handler() {
    // The block starts after three MOV instructions of six bytes each and the WRMSR. The NMI is
    // injected between the NOPs.
    let block_at = CODE + 3 * 6 + 2;
    expect(&[0x90; 10], Some(block_at + 4), INSTRUCTIONS, AROUND + 10 + 2);
}
