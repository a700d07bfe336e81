//! Tests of the KVM behavior on which the machine relies: exits report exactly the guest's
//! accesses, an exit request neither loses nor repeats an instruction, and guest memory and
//! registers have the values set by the host.
//!
//! The guests execute a few instructions in 32-bit mode, without paging and without an IDT.

use std::error::Error;
use std::sync::Arc;

use kvm_bindings::{Msrs, kvm_mp_state, kvm_msi, kvm_msr_entry, kvm_regs, kvm_segment};
use proptest::prelude::*;
use test_support::skip;
use vm_memory::{Bytes, GuestAddress};
use vmm::kvm::kickable_vcpu::{KickableVcpu, SyncReg, VcpuExit};
use vmm::kvm::memslot::MemorySlots;
use vmm::kvm::vm_fd::VmFd;
use vmm::kvm::{cpuid, host, msr_filter};
use vmm::memory::{GuestRam, MMIO_HOLE_START};
use vmm_sys_util::eventfd::EventFd;

/// Guest-physical address of the code; `DATA` is that of its data.
const CODE: u64 = 0x10_0000;
const DATA: u64 = 0x20_0000;
/// RAM size in bytes. Addresses above are unmapped.
const RAM: u64 = 32 << 20;
/// HLT opcode. HLT exits to user space without an in-kernel interrupt controller.
const HLT: u8 = 0xF4;

/// Description of a VM exit.
#[derive(Clone, Debug, PartialEq, Eq)]
enum GuestAction {
    /// Port write: port, access width in bytes, and data.
    Out(u16, usize, Vec<u8>),
    /// Port read: port and number of bytes.
    In(u16, usize),
    /// MMIO write: address and data.
    Write(u64, Vec<u8>),
    /// MMIO read: address and number of bytes.
    Read(u64, usize),
    Rdmsr(u32),
    Wrmsr(u32, u64),
    Halt,
    Shutdown,
    /// An internal error of KVM (KVM_EXIT_INTERNAL_ERROR).
    Internal,
    /// KVM_RUN returned before the guest executed anything.
    Interrupted,
    /// Any other exit, which no test expects.
    Other(String),
}

struct Guest {
    vcpu: KickableVcpu,
    vm: Arc<VmFd>,
    ram: GuestRam,
    _slots: MemorySlots,
    /// Value that the VMM returns for reads of ports, unmapped memory and filtered MSRs. `None`
    /// makes an access to a filtered MSR fault.
    answer: Option<u64>,
}

impl Guest {
    /// Creates a guest that is about to execute `code`. Returns `None` if KVM is unavailable.
    fn new(code: &[u8]) -> Option<Self> {
        Self::with(code, |_| ())
    }

    /// Creates a guest in a VM that `prepare` configures before the vCPU exists.
    fn with(code: &[u8], prepare: impl FnOnce(&VmFd)) -> Option<Self> {
        let Ok(kvm) = host::open() else {
            skip::skipped("no usable /dev/kvm here", false);
            return None;
        };
        let ram = GuestRam::new(RAM).unwrap();
        ram.memory().write_slice(code, GuestAddress(CODE)).unwrap();
        let vm = Arc::new(VmFd::new(&kvm).unwrap());
        prepare(&vm);
        let slots = ram.register(&vm).unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        vcpu.set_cpuid2(&cpuid::supported(&kvm).unwrap()).unwrap();
        let mut sregs = vcpu.get_sregs().unwrap();
        let flat = |selector: u16, type_: u8| kvm_segment {
            base: 0,
            limit: u32::MAX,
            selector,
            type_,
            present: 1,
            db: 1,
            s: 1,
            g: 1,
            ..Default::default()
        };
        sregs.cs = flat(8, 0xB);
        (sregs.ds, sregs.es, sregs.ss) = (flat(16, 3), flat(16, 3), flat(16, 3));
        sregs.idt.limit = 0;
        sregs.cr0 = 1 << 4 | 1;
        vcpu.set_sregs(&sregs).unwrap();
        let mut regs = vcpu.get_regs().unwrap();
        (regs.rip, regs.rsp, regs.rflags) = (CODE, DATA, 2);
        vcpu.set_regs(&regs).unwrap();
        Some(Self {
            vcpu: KickableVcpu::new(vcpu),
            vm,
            ram,
            _slots: slots,
            answer: Some(0),
        })
    }

    /// Runs the guest until its next exit.
    fn step(&mut self) -> GuestAction {
        let answer = self.answer;
        let exit = self.vcpu.run();
        let width = exit.io_width;
        let fill = |to: &mut [u8]| {
            for (to, from) in to.iter_mut().zip(answer.unwrap_or(0).to_le_bytes()) {
                *to = from;
            }
        };
        match exit.exit {
            Ok(VcpuExit::IoOut(port, bytes)) => GuestAction::Out(port, width, bytes.to_vec()),
            Ok(VcpuExit::IoIn(port, bytes)) => {
                fill(bytes);
                GuestAction::In(port, bytes.len())
            }
            Ok(VcpuExit::MmioWrite(address, bytes)) => GuestAction::Write(address, bytes.to_vec()),
            Ok(VcpuExit::MmioRead(address, bytes)) => {
                fill(bytes);
                GuestAction::Read(address, bytes.len())
            }
            Ok(VcpuExit::X86Rdmsr(read)) => {
                *read.error = answer.is_none().into();
                *read.data = answer.unwrap_or(0);
                GuestAction::Rdmsr(read.index)
            }
            Ok(VcpuExit::X86Wrmsr(write)) => {
                *write.error = answer.is_none().into();
                GuestAction::Wrmsr(write.index, write.data)
            }
            Ok(VcpuExit::Hlt) => GuestAction::Halt,
            Ok(VcpuExit::Shutdown) => GuestAction::Shutdown,
            Ok(VcpuExit::InternalError) => GuestAction::Internal,
            Ok(other) => GuestAction::Other(format!("{other:?}")),
            Err(e) if e.errno() == libc::EINTR => GuestAction::Interrupted,
            Err(e) => GuestAction::Other(e.to_string()),
        }
    }

    /// Returns all exits until the guest halts. Fails after 100 exits.
    fn all(&mut self) -> Vec<GuestAction> {
        let mut did = Vec::new();
        while did.last() != Some(&GuestAction::Halt) {
            did.push(self.step());
            assert!(did.len() < 100, "{did:?}");
        }
        did.pop();
        did
    }

    fn word(&self, address: u64) -> u32 {
        self.ram.memory().read_obj(GuestAddress(address)).unwrap()
    }
}

/// Each port access causes an exit with its port, its width and exactly its data.
#[test]
fn port_exit_reports_width_and_data() {
    let code = [
        0xB8, 0x44, 0x33, 0x22, 0x11, // mov eax, 0x11223344
        0xE6, 0x10, // out 0x10, al
        0x66, 0xE7, 0x11, // out 0x11, ax
        0xE7, 0x12, // out 0x12, eax
        0xE4, 0x30, // in al, 0x30
        0x66, 0xE5, 0x31, // in ax, 0x31
        0xE5, 0x32, // in eax, 0x32
        HLT,
    ];
    let Some(mut guest) = Guest::new(&code) else {
        return;
    };
    let whole = [0x44, 0x33, 0x22, 0x11];
    assert_eq!(
        guest.all(),
        [
            GuestAction::Out(0x10, 1, whole[..1].to_vec()),
            GuestAction::Out(0x11, 2, whole[..2].to_vec()),
            GuestAction::Out(0x12, 4, whole.to_vec()),
            GuestAction::In(0x30, 1),
            GuestAction::In(0x31, 2),
            GuestAction::In(0x32, 4),
        ]
    );
}

/// A string instruction may be reported as one exit with several accesses. The data is split into
/// accesses by the access width.
#[test]
fn string_port_write_is_split_by_width() {
    let code = [
        0xFC, // cld
        0xBE, 0x00, 0x00, 0x20, 0x00, // mov esi, DATA
        0xB9, 0x05, 0x00, 0x00, 0x00, // mov ecx, 5
        0x66, 0xBA, 0x13, 0x00, // mov dx, 0x13
        0xF3, 0x6E, // rep outsb
        0xB9, 0x03, 0x00, 0x00, 0x00, // mov ecx, 3
        0x66, 0xF3, 0x6F, // rep outsw
        HLT,
    ];
    let Some(mut guest) = Guest::new(&code) else {
        return;
    };
    let text = b"abcde112233";
    guest.ram.memory().write_slice(text, GuestAddress(DATA)).unwrap();
    let mut written = Vec::new();
    for did in guest.all() {
        let GuestAction::Out(0x13, width, bytes) = did else {
            panic!("{did:?}");
        };
        let right = if written.len() < 5 { 1 } else { 2 };
        assert_eq!((width, bytes.len() % width), (right, 0), "{bytes:?}");
        written.extend(bytes);
    }
    assert_eq!(written, text);
}

/// A port read changes only as many bytes of the destination register as it reads.
#[test]
fn port_read_changes_only_its_bytes() {
    let code = [
        0xB8, 0xDD, 0xCC, 0xBB, 0xAA, // mov eax, 0xAABBCCDD
        0xE4, 0x30, // in al, 0x30
        0xE7, 0x10, // out 0x10, eax
        0x66, 0xE5, 0x30, // in ax, 0x30
        0xE7, 0x10, // out 0x10, eax
        HLT,
    ];
    let Some(mut guest) = Guest::new(&code) else {
        return;
    };
    guest.answer = Some(0x7766_5544_3322_1100);
    let out = |value: u32| GuestAction::Out(0x10, 4, value.to_le_bytes().to_vec());
    assert_eq!(
        guest.all(),
        [
            GuestAction::In(0x30, 1),
            out(0xAABB_CC00),
            GuestAction::In(0x30, 2),
            out(0xAABB_1100)
        ]
    );
}

/// An access above the end of RAM or in the MMIO hole exits with its address and data; an access to
/// RAM does not exit.
#[test]
fn access_beyond_ram_is_mmio() {
    let mut code = vec![0xB8, 0x44, 0x33, 0x22, 0x11]; // mov eax, 0x11223344
    for address in [
        DATA as u32,
        RAM as u32 - 4,
        RAM as u32,
        MMIO_HOLE_START as u32 + 0x10,
    ] {
        code.push(0xA3); // mov [address], eax
        code.extend(address.to_le_bytes());
    }
    code.push(0xA0); // mov al, [0xE0000001]
    code.extend(0xE000_0001u32.to_le_bytes());
    code.push(HLT);
    let Some(mut guest) = Guest::new(&code) else {
        return;
    };
    let bytes = vec![0x44, 0x33, 0x22, 0x11];
    assert_eq!(
        guest.all(),
        [
            GuestAction::Write(RAM, bytes.clone()),
            GuestAction::Write(MMIO_HOLE_START + 0x10, bytes),
            GuestAction::Read(0xE000_0001, 1)
        ]
    );
    assert_eq!(
        (guest.word(DATA), guest.word(RAM - 4)),
        (0x1122_3344, 0x1122_3344)
    );
}

/// When the host clears guest memory, the guest reads zeros, although it keeps using the same host
/// memory.
#[test]
fn cleared_memory_is_zero_for_guest() {
    let code = [
        0xB8, 0x44, 0x33, 0x22, 0x11, // mov eax, 0x11223344
        0xA3, 0x00, 0x00, 0x20, 0x00, // mov [DATA], eax
        0xE6, 0x10, // out 0x10, al
        0xA1, 0x00, 0x00, 0x20, 0x00, // mov eax, [DATA]
        0xE7, 0x11, // out 0x11, eax
        HLT,
    ];
    let Some(mut guest) = Guest::new(&code) else {
        return;
    };
    assert_eq!(guest.step(), GuestAction::Out(0x10, 1, vec![0x44]));
    assert_eq!(guest.word(DATA), 0x1122_3344);
    guest.ram.clear().unwrap();
    assert_eq!((guest.word(DATA), guest.word(CODE)), (0, 0));
    guest.ram.memory().write_slice(&code, GuestAddress(CODE)).unwrap();
    assert_eq!(guest.all(), [GuestAction::Out(0x11, 4, vec![0; 4])]);
}

/// An exit request before the entry ends KVM_RUN before the first instruction, and the guest can
/// continue afterwards.
#[test]
fn exit_request_precedes_first_instruction() {
    let Some(mut guest) = Guest::new(&[0xB0, 0x07, 0xE6, 0x10, HLT]) else {
        return;
    };
    guest.vcpu.request_exit();
    for _ in 0..3 {
        assert_eq!(
            guest.step(),
            GuestAction::Interrupted,
            "the request stays until it is cleared"
        );
        assert_eq!(guest.vcpu.get_regs().unwrap().rip, CODE);
    }
    guest.vcpu.clear_exit_request();
    assert_eq!(guest.all(), [GuestAction::Out(0x10, 1, vec![7])]);
}

/// Completing a pending write executes it once without running the next instruction, so registers
/// may be read and changed afterwards.
#[test]
fn completing_an_exit_stops_between_two_instructions() {
    let code = [
        0xB8, 0x01, 0x00, 0x00, 0x00, // mov eax, 1
        0xE6, 0x10, // out 0x10, al
        0x40, // inc eax
        0xE6, 0x11, // out 0x11, al
        HLT,
    ];
    let Some(mut guest) = Guest::new(&code) else {
        return;
    };
    assert_eq!(guest.step(), GuestAction::Out(0x10, 1, vec![1]));
    guest.vcpu.complete_exit().unwrap();
    let regs = guest.vcpu.get_regs().unwrap();
    assert_eq!((regs.rip, regs.rax), (CODE + 7, 1));
    assert_eq!(
        guest.step(),
        GuestAction::Interrupted,
        "the request to leave is still there"
    );
    guest.vcpu.clear_exit_request();
    // The host may change registers between the two instructions.
    guest.vcpu.set_regs(&kvm_regs { rax: 40, ..regs }).unwrap();
    assert_eq!(guest.all(), [GuestAction::Out(0x11, 1, vec![41])]);
}

/// An access to a filtered MSR exits with the MSR's index and value, and the guest reads the value
/// that the host returns. KVM handles adjacent MSRs.
#[test]
fn filtered_msr_exits_to_host() {
    let code = [
        0xB9, 0xC1, 0x00, 0x00, 0x00, // mov ecx, 0xC1
        0x0F, 0x32, // rdmsr
        0xE7, 0x10, // out 0x10, eax
        0x92, // xchg eax, edx
        0xE7, 0x11, // out 0x11, eax
        0x0F, 0x30, // wrmsr
        0xB9, 0x74, 0x01, 0x00, 0x00, // mov ecx, 0x174
        0x0F, 0x30, // wrmsr
        0x0F, 0x32, // rdmsr
        0xE7, 0x12, // out 0x12, eax
        HLT,
    ];
    let filter = |vm: &VmFd| msr_filter::install(vm, &[0xC1..=0xC4]).unwrap();
    let Some(mut guest) = Guest::with(&code, filter) else {
        return;
    };
    guest.answer = Some(0x0000_1122_0000_3344);
    let out = |port, value: u32| GuestAction::Out(port, 4, value.to_le_bytes().to_vec());
    assert_eq!(
        guest.all(),
        [
            GuestAction::Rdmsr(0xC1),
            out(0x10, 0x3344),
            out(0x11, 0x1122),
            GuestAction::Wrmsr(0xC1, 0x0000_3344_0000_1122),
            // Output of IA32_SYSENTER_CS, whose accesses do not exit.
            out(0x12, 0x1122),
        ]
    );
}

/// A rejected MSR access faults at the instruction. This guest has no handler, so it shuts down.
#[test]
fn rejected_msr_access_faults() {
    for access in [[0x0F, 0x32], [0x0F, 0x30]] {
        let code = [&[0xB9, 0xC2, 0x00, 0x00, 0x00][..], &access, &[0xE6, 0x10, HLT]].concat();
        let filter = |vm: &VmFd| msr_filter::install(vm, &[0xC1..=0xC4]).unwrap();
        let Some(mut guest) = Guest::with(&code, filter) else {
            return;
        };
        guest.answer = None;
        let first = guest.step();
        assert!(
            matches!(first, GuestAction::Rdmsr(0xC2) | GuestAction::Wrmsr(0xC2, _)),
            "{first:?}"
        );
        assert_eq!(
            guest.step(),
            GuestAction::Shutdown,
            "the write behind it has not run"
        );
    }
}

/// An empty MSR filter intercepts no MSRs, and a range in the filter includes its first and its
/// last MSR.
#[test]
fn msr_filter_range_is_inclusive() {
    let read = |msr: u32| {
        let mut code = vec![0xB9];
        code.extend(msr.to_le_bytes());
        code.extend([0x0F, 0x32, HLT]);
        code
    };
    let first = |msr, ranges: &[std::ops::RangeInclusive<u32>]| {
        let mut guest = Guest::with(&read(msr), |vm| msr_filter::install(vm, ranges).unwrap())?;
        Some(guest.step())
    };
    // IA32_SYSENTER_CS, ESP and EIP, which KVM emulates for any guest.
    let Some(unfiltered) = first(0x175, &[]) else {
        return;
    };
    assert_eq!(unfiltered, GuestAction::Halt);
    for (msr, exits) in [(0x174, false), (0x175, true), (0x176, true)] {
        let right = if exits {
            GuestAction::Rdmsr(msr)
        } else {
            GuestAction::Halt
        };
        assert_eq!(first(msr, &[0x175..=0x176]), Some(right), "{msr:#x}");
    }
    assert_eq!(
        first(0xC000_0081, &[0x175..=0x176, 0xC000_0081..=0xC000_0081]),
        Some(GuestAction::Rdmsr(0xC000_0081))
    );
}

/// Too many ranges are rejected with a specific error before KVM is called.
#[test]
fn msr_filter_rejects_too_many_ranges() {
    let Ok(kvm) = host::open() else {
        skip::skipped("no usable /dev/kvm here", false);
        return;
    };
    let vm = VmFd::new(&kvm).unwrap();
    let far: Vec<_> = (0..17u32).map(|n| n << 20..=n << 20).collect();
    let error = msr_filter::install(&vm, &far).unwrap_err();
    assert_eq!(
        error.to_string(),
        "17 MSR ranges must be trapped, but KVM supports at most 16"
    );
    msr_filter::install(&vm, &far[..16]).unwrap();
}

/// A fault without a handler ends the guest with a shutdown or an emulation failure. KVM_RUN itself
/// does not fail.
#[test]
fn fault_without_handler_ends_guest() {
    for fault in [&[0x0F, 0x0B][..], &[0xCC], &[0xCD, 0x80]] {
        let code = [fault, &[0xE6, 0x10, HLT]].concat();
        let Some(mut guest) = Guest::new(&code) else {
            return;
        };
        let did = guest.step();
        assert!(
            matches!(did, GuestAction::Shutdown | GuestAction::Internal),
            "{fault:x?}: {did:?}"
        );
    }
}

/// Executing code outside memory causes an internal error with at most 15 instruction bytes.
#[test]
fn code_outside_memory_is_internal_error() {
    let Some(mut guest) = Guest::new(&[0xE9, 0xFB, 0xFF, 0xEF, 0x00]) else {
        return;
    };
    // jmp CODE + 0xF00000, twice: beyond the end of RAM.
    let far = [0xE9, 0xFB, 0xFF, 0xFF, 0x01];
    guest
        .ram
        .memory()
        .write_slice(&far, GuestAddress(CODE + 0xF0_0000))
        .unwrap();
    match guest.step() {
        GuestAction::Internal => {
            let internal = guest.vcpu.internal_exit();
            assert!(internal.bytes().len() <= 15, "{internal:?}");
        }
        GuestAction::Shutdown => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(guest.vcpu.get_regs().unwrap().rip, CODE + 0x2F0_0000);
}

/// Registers synchronized at an exit equal those read with KVM calls, and registers synchronized at
/// an entry are loaded.
#[test]
fn registers_synchronize_at_exit_and_entry() {
    let code = [0xB8, 0x05, 0x00, 0x00, 0x00, 0xE6, 0x10, 0xE7, 0x11, HLT];
    let Some(mut guest) = Guest::new(&code) else {
        return;
    };
    if !guest.vm.syncs_registers() {
        skip::skipped("this KVM has no KVM_CAP_SYNC_REGS", false);
        return;
    }
    guest.vcpu.sync_at_exit(SyncReg::Register, true);
    assert_eq!(guest.step(), GuestAction::Out(0x10, 1, vec![5]));
    guest.vcpu.complete_exit().unwrap();
    guest.vcpu.clear_exit_request();
    let asked = guest.vcpu.get_regs().unwrap();
    let came = guest.vcpu.sync_regs_mut().regs;
    assert_eq!(
        (came.rax, came.rip, came.rsp, came.rflags),
        (asked.rax, asked.rip, asked.rsp, asked.rflags)
    );
    guest.vcpu.sync_regs_mut().regs.rax = 0xAABB_CCDD;
    guest.vcpu.sync_at_entry(SyncReg::Register, true);
    assert_eq!(
        guest.step(),
        GuestAction::Out(0x11, 4, 0xAABB_CCDDu32.to_le_bytes().to_vec())
    );
    // Without synchronization, the vCPU keeps its registers.
    guest.vcpu.sync_at_exit(SyncReg::Register, false);
    guest.vcpu.sync_at_entry(SyncReg::Register, false);
    guest.vcpu.sync_regs_mut().regs.rip = 0;
    assert_eq!(guest.step(), GuestAction::Halt);
}

/// KVM calls in an invalid order fail immediately with the name of the call and its errno.
#[test]
fn failed_kvm_call_reports_name_and_errno() {
    let Ok(kvm) = host::open() else {
        skip::skipped("no usable /dev/kvm here", false);
        return;
    };
    let vm = VmFd::new(&kvm).unwrap();
    let line = vm.set_line(4, true).unwrap_err();
    assert_eq!(
        (line.call(), line.errno()),
        ("KVM_IRQ_LINE", libc::ENXIO),
        "no interrupt controllers"
    );
    let vcpu = vm.create_vcpu(0).unwrap();
    let twice = vm.create_vcpu(0).unwrap_err();
    assert_eq!((twice.call(), twice.errno()), ("KVM_CREATE_VCPU", libc::EEXIST));
    let late = vm.add_irqchip().unwrap_err();
    assert_eq!(
        (late.call(), late.errno()),
        ("KVM_CREATE_IRQCHIP", libc::EINVAL),
        "it has a vCPU"
    );
    let page = vcpu.get_lapic().unwrap_err();
    assert_eq!(page.to_string(), "KVM_GET_LAPIC failed");
    assert!(
        page.source().unwrap().to_string().contains("os error"),
        "{page:?}"
    );
    let again = vm.add_chips(0xFFFB_C000, 0xFFFB_D000).unwrap_err();
    assert_eq!(
        again.call(),
        "KVM_SET_IDENTITY_MAP_ADDR",
        "what comes first is what fails"
    );
}

/// A rejected state is reported with the name of the call and leaves the vCPU unchanged.
#[test]
fn rejected_state_leaves_vcpu_unchanged() {
    let Some(guest) = Guest::with(&[HLT], |vm| vm.add_irqchip().unwrap()) else {
        return;
    };
    let vcpu = &guest.vcpu;
    let (regs, sregs) = (vcpu.get_regs().unwrap(), vcpu.get_sregs().unwrap());
    let mut wrong = sregs;
    // Invalid states: paging without protection (SDM vol. 3 §2.5), and long mode active but not
    // enabled.
    wrong.cr0 = 1 << 31;
    wrong.efer = 1 << 10;
    wrong.cr4 = 1 << 5;
    let refused = vcpu.set_sregs(&wrong).unwrap_err();
    assert_eq!((refused.call(), refused.errno()), ("KVM_SET_SREGS", libc::EINVAL));
    assert_eq!(
        (vcpu.get_regs().unwrap(), vcpu.get_sregs().unwrap()),
        (regs, sregs)
    );
    let mut debug = vcpu.get_debug_regs().unwrap();
    let before = debug.dr7;
    debug.dr7 = 1 << 40;
    let refused = vcpu.set_debug_regs(&debug).unwrap_err();
    assert_eq!(
        (refused.call(), refused.errno()),
        ("KVM_SET_DEBUGREGS", libc::EINVAL)
    );
    assert_eq!(vcpu.get_debug_regs().unwrap().dr7, before);
    let refused = vcpu.set_mp_state(kvm_mp_state { mp_state: 99 }).unwrap_err();
    assert_eq!(
        (refused.call(), refused.errno()),
        ("KVM_SET_MP_STATE", libc::EINVAL)
    );
    assert_eq!(vcpu.get_mp_state().unwrap().mp_state, 0, "it can run");
    let mut events = vcpu.get_vcpu_events().unwrap();
    events.flags = 1 << 31;
    let refused = vcpu.set_vcpu_events(&events).unwrap_err();
    assert_eq!(
        (refused.call(), refused.errno()),
        ("KVM_SET_VCPU_EVENTS", libc::EINVAL)
    );
}

/// An MSR list is processed up to the first unknown MSR, and the number of processed entries is
/// returned.
#[test]
fn msr_list_ends_at_unknown_msr() {
    const STAR: u32 = 0xC000_0081;
    const LSTAR: u32 = 0xC000_0082;
    const NONE: u32 = 0x0BAD_0BAD;
    let Some(guest) = Guest::new(&[HLT]) else {
        return;
    };
    let list = |values: &[(u32, u64)]| {
        let entry = |&(index, data): &(u32, u64)| kvm_msr_entry {
            index,
            data,
            ..Default::default()
        };
        Msrs::from_entries(&values.iter().map(entry).collect::<Vec<_>>()).unwrap()
    };
    let vcpu = &guest.vcpu;
    let set = vcpu.set_msrs(&list(&[(STAR, 0x1111), (NONE, 1), (LSTAR, 0x2222)]));
    assert_eq!(set, Ok(1));
    let mut read = list(&[(STAR, 0), (LSTAR, 0xAAAA), (NONE, 0xAAAA), (STAR, 0xAAAA)]);
    assert_eq!(vcpu.get_msrs(&mut read), Ok(2));
    let values: Vec<u64> = read.as_slice().iter().map(|entry| entry.data).collect();
    let [first, second, _, behind] = values[..] else {
        panic!("{values:x?}");
    };
    assert_eq!((first, second), (0x1111, 0), "the second was not written");
    assert_eq!(behind, 0xAAAA, "those behind are not read");
}

/// An interrupt line accepts one eventfd. A line that KVM does not have is rejected.
#[test]
fn irq_line_accepts_one_eventfd() {
    let Ok(kvm) = host::open() else {
        skip::skipped("no usable /dev/kvm here", false);
        return;
    };
    let trigger = EventFd::new(libc::EFD_NONBLOCK).unwrap();
    let bare = VmFd::new(&kvm).unwrap();
    let refused = bare.connect_line(&trigger, 4).unwrap_err();
    assert_eq!(refused.call(), "KVM_IRQFD", "there are no interrupt controllers");
    let vm = VmFd::new(&kvm).unwrap();
    vm.add_irqchip().unwrap();
    vm.connect_line(&trigger, 4).unwrap();
    let twice = vm.connect_line(&trigger, 4).unwrap_err();
    assert_eq!((twice.call(), twice.errno()), ("KVM_IRQFD", libc::EBUSY));
    vm.set_line(4, true).unwrap();
    vm.set_line(4, false).unwrap();
}

/// An MSI to a missing or disabled local APIC is reported as not delivered.
#[test]
fn undelivered_msi_is_reported() {
    let Some(guest) = Guest::with(&[HLT], |vm| vm.add_irqchip().unwrap()) else {
        return;
    };
    let to = |id: u32| kvm_msi {
        address_lo: 0xFEE0_0000 | id << 12,
        data: 0x40,
        ..Default::default()
    };
    assert!(!guest.vm.signal_msi(to(5)).unwrap(), "no such APIC");
    let spurious = 0xF0;
    let mut page = guest.vcpu.get_lapic().unwrap();
    // Bit 8 of the spurious-interrupt vector register enables the APIC.
    for (on, there) in [(0, false), (1, true)] {
        page.regs[spurious + 1] = on;
        guest.vcpu.set_lapic(&page).unwrap();
        assert_eq!(guest.vm.signal_msi(to(0)).unwrap(), there, "switched on: {on}");
    }
}

/// A queued NMI stays pending until it is delivered. Without a handler, the NMI shuts the guest
/// down.
#[test]
fn queued_nmi_stays_pending_until_delivered() {
    let code = [0xE6, 0x10, 0x90, 0x90, HLT];
    let Some(mut guest) = Guest::with(&code, |vm| vm.add_irqchip().unwrap()) else {
        return;
    };
    guest.vcpu.nmi().unwrap();
    assert_eq!(guest.vcpu.get_vcpu_events().unwrap().nmi.pending, 1);
    assert_eq!(guest.step(), GuestAction::Shutdown);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Registers set by the host are returned by KVM and visible to the guest.
    #[test]
    fn registers_read_back_as_set(
        values: [u64; 14],
        flags in prop::sample::select(vec![0u64, 1, 1 << 6, 1 << 7, 1 << 10, 1 << 11]),
    ) {
        let code = [0xE7, 0x10, HLT]; // out 0x10, eax
        let Some(mut guest) = Guest::new(&code) else { return Ok(()) };
        let [rax, rbx, rcx, rdx, rsi, rdi, rbp, r8, r9, r10, r11, r12, r13, r14] = values;
        let regs = kvm_regs {
            rax, rbx, rcx, rdx, rsi, rdi, rbp, r8, r9, r10, r11, r12, r13, r14,
            r15: !r14,
            rsp: DATA,
            rip: CODE,
            rflags: 2 | flags,
        };
        guest.vcpu.set_regs(&regs).unwrap();
        prop_assert_eq!(guest.vcpu.get_regs().unwrap(), regs);
        prop_assert_eq!(guest.step(), GuestAction::Out(0x10, 4, (rax as u32).to_le_bytes().to_vec()));
        prop_assert_eq!(guest.step(), GuestAction::Halt);
        let after = guest.vcpu.get_regs().unwrap();
        prop_assert_eq!((after.rax, after.r8, after.r14, after.rbx), (rax, r8, r14, rbx), "the guest touched none");
        prop_assert_eq!(after.rip, CODE + 3);
    }
}
