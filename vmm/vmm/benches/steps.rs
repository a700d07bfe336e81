//! Benchmark: cost that the exact backing, which counts by single-stepping the guest, adds to a
//! single step. Compares a plain loop of KVM_RUN that single-steps without decoding, the stepper,
//! and the stepper when it runs straight-line code without stops. The variants are interleaved on
//! one vCPU.
//!
//! The guest is an endless loop of ten instructions and a branch in 64-bit mode at CPL 0.
use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

use kvm_bindings::{KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP, kvm_guest_debug, kvm_segment};
use test_support::figures::{self, BenchmarkFigure, BenchmarkTarget, median};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm::kvm::execution;
use vmm::kvm::kickable_vcpu::{KickableVcpu, VcpuExit};
use vmm::kvm::stepping::SteppingSupport;
use vmm::kvm::vm_fd::VmFd;
use vmm::kvm::{cpuid, host};
use vmm::memory::GuestRam;
use vmm::vcpu::step::debug::GuestDebug;
use vmm::vcpu::step::{Stepper, VcpuStepAction};
use vpmu::exact::RetiredCounts;
use vpmu::{PrivilegeLevels, Vendor};

/// Number of repetitions of each variant. Each repetition executes `INSTRUCTIONS` instructions,
/// which is so short that other processes on a busy host interrupt few repetitions.
const TURNS: usize = 301;
const INSTRUCTIONS: u64 = 220;
const TABLES: u64 = 0x1000;
const CODE: u64 = 0x5000;
/// Guest code: mov eax, 1; add eax, ecx; lea edx, [rax+5]; mov [0x9000], eax; mov eax, [0x9000];
/// xor eax, edx; push rax; pop rax; nop; dec ecx; jmp to the first instruction.
const LOOP: [u8; 33] = [
    0xb8, 1, 0, 0, 0, 0x01, 0xc8, 0x8d, 0x50, 0x05, 0x89, 0x04, 0x25, 0, 0x90, 0, 0, 0x8b, 0x04, 0x25, 0,
    0x90, 0, 0, 0x31, 0xd0, 0x50, 0x58, 0x90, 0xff, 0xc9, 0xeb, 0xdf,
];

/// Execution method of the guest.
#[expect(clippy::large_enum_variant, reason = "there is one of it at a time")]
enum Variant {
    /// A loop of KVM_RUN that single-steps without decoding instructions.
    Bare,
    /// The stepper that counts retired instructions, starting with empty caches.
    Stepper(Stepper),
}

/// Executes at least [`INSTRUCTIONS`] guest instructions. Returns two values per instruction:
/// nanoseconds, and number of VM entries.
fn turn(vcpu: &mut KickableVcpu, way: Variant) -> Result<(f64, f64), Box<dyn Error>> {
    let levels = PrivilegeLevels {
        user: false,
        kernel: true,
    };
    let room = || RetiredCounts {
        instructions: u32::MAX,
        loads: u32::MAX,
        stores: u32::MAX,
        ..RetiredCounts::default()
    };
    let (mut entries, mut retired) = (0u64, 0u64);
    let began = Instant::now();
    match way {
        Variant::Bare => {
            vcpu.set_guest_debug(&kvm_guest_debug {
                control: KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP,
                ..Default::default()
            })?;
            while retired < INSTRUCTIONS {
                let VcpuExit::Debug(_) = vcpu.run().exit? else {
                    return Err("it did not stop behind a step".into());
                };
                (entries, retired) = (entries + 1, retired + 1);
            }
        }
        Variant::Stepper(mut stepper) => {
            let mut debug = GuestDebug::default();
            while retired < INSTRUCTIONS {
                stepper.settle(vcpu)?;
                if stepper.prepare(vcpu, &mut debug, levels, &room)? != VcpuStepAction::Enter {
                    return Err("an instruction was executed here".into());
                }
                let why = vcpu.run().exit?;
                stepper.after_run();
                let VcpuExit::Debug(stop) = why else {
                    return Err(format!("{why:?}").into());
                };
                let step = stepper
                    .handle_debug_exit(vcpu, &stop)?
                    .ok_or("not the stepper's stop")?;
                entries += 1;
                retired += u64::from(step.kernel.instructions);
            }
        }
    }
    let ns = began.elapsed().as_nanos() as f64;
    Ok((ns / retired as f64, entries as f64 / retired as f64))
}

/// Returns a vCPU at the beginning of the loop, and the values that keep its memory mapped.
fn guest(kvm: &host::Kvm) -> Result<(KickableVcpu, GuestMemoryMmap, impl Sized), Box<dyn Error>> {
    let ram = GuestRam::new(32 << 20)?;
    let memory = ram.memory().clone();
    // All entries are present and writable. The last one maps a 2 MiB page.
    for (table, entry) in [(0, TABLES + 0x1003), (1, TABLES + 0x2003), (2, 0x83)] {
        memory.write_obj::<u64>(entry, GuestAddress(TABLES + table * 0x1000))?;
    }
    memory.write_slice(&LOOP, GuestAddress(CODE))?;
    let vm = Arc::new(VmFd::new(kvm)?);
    let slots = ram.register(&vm)?;
    let vcpu = vm.create_vcpu(0)?;
    vcpu.set_cpuid2(&cpuid::supported(kvm)?)?;
    let segment = |selector, type_, l| kvm_segment {
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        db: 1 - l,
        s: 1,
        l,
        g: 1,
        ..Default::default()
    };
    let mut sregs = vcpu.get_sregs()?;
    (sregs.cs, sregs.ss) = (segment(8, 0xb, 1), segment(16, 3, 0));
    (sregs.ds, sregs.es) = (sregs.ss, sregs.ss);
    sregs.idt.limit = 0;
    (sregs.cr3, sregs.cr4) = (TABLES, 1 << 5);
    sregs.cr0 = 1 << 31 | 1 << 5 | 1 << 4 | 1;
    sregs.efer = 1 << 10 | 1 << 8;
    vcpu.set_sregs(&sregs)?;
    let mut regs = vcpu.get_regs()?;
    (regs.rip, regs.rsp, regs.rflags) = (CODE, 0x8000, 2);
    vcpu.set_regs(&regs)?;
    Ok((KickableVcpu::new(vcpu), memory, (ram, slots)))
}

fn main() -> Result<(), Box<dyn Error>> {
    if std::env::args().any(|word| word == "--list") {
        return Ok(());
    }
    let Ok(kvm) = host::open() else {
        println!("steps: SKIPPED: no usable /dev/kvm here");
        return Ok(());
    };
    let host: SteppingSupport = execution::probe(&kvm)?.stepping;
    if !host.kernel {
        println!("steps: SKIPPED: this KVM does not step");
        return Ok(());
    }
    let (mut vcpu, memory, _kept) = guest(&kvm)?;
    let syncs = host::syncs_registers(&kvm);
    let stepper = || {
        let stepper = Stepper::new(Vendor::Intel, memory.clone(), host, true);
        if syncs {
            stepper.with_synced_registers()
        } else {
            stepper
        }
    };
    let turns = if figures::is_dry_run() { 1 } else { TURNS };
    let mut times = [const { Vec::new() }; 3];
    let mut entries = 1.0;
    for turn_of in 0..=turns {
        let ways = [
            Variant::Bare,
            Variant::Stepper(stepper().without_runs()),
            Variant::Stepper(stepper()),
        ];
        for (way, times) in ways.into_iter().zip(&mut times) {
            let (ns, entries_of_way) = turn(&mut vcpu, way)?;
            entries = entries_of_way;
            // The first repetition of each variant is a warm-up and not recorded.
            if turn_of > 0 {
                times.push(ns);
            }
        }
    }
    let [bare, stepped, run] = times.map(median);
    println!(
        "  an instruction: {bare:.0} ns stepped with nothing decoded, {stepped:.0} by the stepper, {run:.0} in runs"
    );
    let all = [
        BenchmarkFigure::new(
            "a step beside one with nothing decoded",
            Some(stepped / bare),
            "times",
            BenchmarkTarget::AtMost(1.2),
        ),
        BenchmarkFigure::new(
            "entries for each instruction of a loop of eleven, in runs",
            Some(entries),
            "",
            BenchmarkTarget::AtMost(1.0 / 3.0),
        ),
        BenchmarkFigure::new(
            "an instruction in runs beside a step with nothing decoded",
            Some(run / bare),
            "times",
            BenchmarkTarget::None,
        ),
    ];
    figures::report("steps", &all, false, serde_json::Map::new());
    Ok(())
}
