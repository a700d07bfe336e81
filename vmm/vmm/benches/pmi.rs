//! Benchmark: cost of a PMI beyond the register accesses of the guest's PMU driver. Compares a
//! guest whose counter overflows continuously with the same guest under a minimal VMM that answers
//! each register access with a constant and sends NMIs at the same rate. The two variants are
//! interleaved.
//!
//! The guest executes a countdown loop. Its NMI handler makes the accesses of Linux's driver (6.1)
//! for one counter, with RDMSR instead of RDPMC. Times are CPU time, which excludes other
//! processes, minus the time of the same work without interrupts.
#![expect(unsafe_code, reason = "the clock of the process")]

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use kvm_bindings::kvm_segment;
use perf_core::pmu::host::HostPerfCapabilities;
use test_support::figures::{self, BenchmarkFigure, BenchmarkTarget, median};
use vm_memory::{Bytes, GuestAddress};
use vmm::boot::KernelSource;
use vmm::kvm::host::{self, Kvm};
use vmm::kvm::kickable_vcpu::{KickableVcpu, VcpuExit};
use vmm::kvm::vm_fd::VmFd;
use vmm::kvm::{cpuid, msr_filter};
use vmm::memory::GuestRam;
use vmm::pmu::PmuConfig;
use vmm::vcpu::control::VmStopReason;
use vmm::vcpu::kick::{self, KickTimer};
use vmm::vm::{Vm, VmConfig};
use vpmu::registers::{
    IA32_PERF_GLOBAL_CTRL, IA32_PERF_GLOBAL_STATUS, IA32_PERF_GLOBAL_STATUS_RESET, IA32_PERFEVTSEL0,
    IA32_PMC0,
};
use vpmu::{CounterBackingPolicy, PmuGeneration, PmuModel};

/// Number of repetitions of each variant.
const TURNS: usize = 21;
/// Minimum CPU time of the guest's work in one repetition without interrupts. `INTERRUPTS` is the
/// minimum number of interrupts in one repetition.
const WORK: Duration = Duration::from_millis(100);
const INTERRUPTS: u32 = 100;
/// Minimum interval between interrupts; increased to 1.5 times the cost of one interrupt if that is
/// longer.
const PERIOD: Duration = Duration::from_micros(100);
/// Interval between interrupts while calibrating.
const TRIED_PERIOD: Duration = Duration::from_millis(2);
const TRIES: usize = 5;

/// Load address of the image. The following constants are offsets in the image.
const LOAD: u32 = 0x10_0000;
const HEADER_BYTES: u32 = 32;
const HANDLER: u32 = 0x400;
const IDT: u32 = 0x800;
const IDT_BYTES: u16 = 3 * 16;
const GDT: u32 = 0x840;
const GDT_BYTES: u16 = 3 * 8;
const IDT_POINTER: u32 = 0x880;
const GDT_POINTER: u32 = 0x890;
/// Page tables, starting with the root. The first 2 MiB are mapped by one page.
const TABLES: u32 = 0x1000;
const IMAGE_BYTES: u32 = 0x4000;
const STACK: u32 = 0x18_0000;
const RAM_BYTES: u64 = 32 << 20;
/// isa-debug-exit port, written when the guest has completed its work.
const DONE_PORT: u16 = 0xF4;
/// Guest-physical address of KVM's identity map (KVM API 4.41); `TASK_STATE` is that of the task
/// state segment (KVM API 4.42).
const IDENTITY_MAP: u64 = 0xFEFF_C000;
const TASK_STATE: u64 = 0xFEFF_D000;

/// Bit CR4.PAE, which 64-bit mode requires in addition to `EFER_LME` (SDM vol. 3 §10.8.5).
const CR4_PAE: u32 = 1 << 5;
const IA32_EFER: u32 = 0xC000_0080;
const EFER_LME: u64 = 1 << 8;
/// CR0 with PG, ET and PE set.
const CR0_PAGED: u32 = 1 << 31 | 1 << 4 | 1;
/// Index of the MSR IA32_APIC_BASE. `X2APIC` are its bits EN and EXTD (SDM vol. 3 §11.12.1). The
/// further constants are indexes of x2APIC registers (table 11-6).
const IA32_APIC_BASE: u32 = 0x1B;
const X2APIC: u32 = 0xC00;
const X2APIC_SPURIOUS: u32 = 0x80F;
const X2APIC_LVT_PMI: u32 = 0x834;
/// LVT entry with NMI delivery, unmasked.
const LVT_NMI: u32 = 0x400;
/// MSR index of AMD's PERF_CTL0. The following constants are the indexes of PERF_CTR0 and of the
/// global registers of version 2 (APM vol. 2 §13.2).
const AMD_CTL0: u32 = 0xC001_0200;
const AMD_CTR0: u32 = 0xC001_0201;
const AMD_GLOBAL_STATUS: u32 = 0xC000_0300;
const AMD_GLOBAL_CTL: u32 = 0xC000_0301;
const AMD_GLOBAL_STATUS_CLEAR: u32 = 0xC000_0302;
/// Event select that counts cycles at all privilege levels on Intel; `AMD_CYCLES` is that of AMD.
/// `INTERRUPT` is the bit that enables interrupts.
const INTEL_CYCLES: u32 = 0x43_003C;
const AMD_CYCLES: u32 = 0x43_0076;
const INTERRUPT: u32 = 1 << 20;

/// A register access of the guest.
#[derive(Clone, Copy)]
enum Access {
    Read(u32),
    Write(u32, u64),
}
use Access::{Read, Write};

/// A PMU model and the register accesses of its driver.
struct Case {
    name: [&'static str; 2],
    generation: PmuGeneration,
    selector: (u32, u32),
    counter: u32,
    global: Option<u32>,
    /// Register accesses of the interrupt handler, first those before it rewrites the counter, then
    /// those after.
    handler: (&'static [Access], &'static [Access]),
}

const INTEL_HANDLER: (&[Access], &[Access]) = (
    &[
        Write(IA32_PERF_GLOBAL_CTRL, 0),
        Read(IA32_PERF_GLOBAL_STATUS),
        Write(IA32_PERF_GLOBAL_STATUS_RESET, 1),
        Read(IA32_PMC0),
    ],
    &[
        Read(IA32_PERF_GLOBAL_STATUS),
        Write(IA32_PERF_GLOBAL_CTRL, 1),
        Write(X2APIC_LVT_PMI, LVT_NMI as u64),
    ],
);

const CASES: [Case; 4] = [
    Case {
        name: ["a PMI of AMD's version 1", "exits of a PMI of AMD's version 1"],
        generation: PmuGeneration::AmdCore,
        selector: (AMD_CTL0, AMD_CYCLES),
        counter: AMD_CTR0,
        global: None,
        handler: (&[Write(X2APIC_LVT_PMI, LVT_NMI as u64), Read(AMD_CTR0)], &[]),
    },
    Case {
        name: ["a PMI of AMD's version 2", "exits of a PMI of AMD's version 2"],
        generation: PmuGeneration::AmdV2,
        selector: (AMD_CTL0, AMD_CYCLES),
        counter: AMD_CTR0,
        global: Some(AMD_GLOBAL_CTL),
        handler: (
            &[Write(AMD_GLOBAL_CTL, 0), Read(AMD_GLOBAL_STATUS), Read(AMD_CTR0)],
            &[
                Write(AMD_GLOBAL_STATUS_CLEAR, 1),
                Write(AMD_GLOBAL_CTL, 1),
                Write(X2APIC_LVT_PMI, LVT_NMI as u64),
            ],
        ),
    },
    Case {
        name: [
            "a PMI of Intel's version 2",
            "exits of a PMI of Intel's version 2",
        ],
        generation: PmuGeneration::Intel(2),
        selector: (IA32_PERFEVTSEL0, INTEL_CYCLES),
        counter: IA32_PMC0,
        global: Some(IA32_PERF_GLOBAL_CTRL),
        handler: INTEL_HANDLER,
    },
    Case {
        name: [
            "a PMI of Intel's version 4",
            "exits of a PMI of Intel's version 4",
        ],
        generation: PmuGeneration::Intel(4),
        selector: (IA32_PERFEVTSEL0, INTEL_CYCLES),
        counter: IA32_PMC0,
        global: Some(IA32_PERF_GLOBAL_CTRL),
        handler: INTEL_HANDLER,
    },
];

/// Measured values of one repetition.
struct Measurement {
    cpu: Duration,
    interrupts: u64,
    exits: u64,
}

impl Access {
    #[expect(clippy::cast_possible_truncation, reason = "two halves")]
    fn code(self) -> Vec<u8> {
        let mov = |register: u8, value: u32| [&[register][..], &value.to_le_bytes()].concat();
        match self {
            // mov ecx, msr; rdmsr
            Read(msr) => [mov(0xb9, msr), vec![0x0f, 0x32]].concat(),
            // mov ecx, msr; mov eax, low; mov edx, high; wrmsr
            Write(msr, value) => [
                mov(0xb9, msr),
                mov(0xb8, value as u32),
                mov(0xba, (value >> 32) as u32),
                vec![0x0f, 0x30],
            ]
            .concat(),
        }
    }
}

impl Case {
    /// Returns the number of accesses in the interrupt handler that exit to user space.
    fn accesses(&self) -> usize {
        let (before, behind) = self.handler;
        let ours = |access: &&Access| !matches!(access, Write(X2APIC_LVT_PMI, _));
        before.iter().chain(behind).filter(ours).count() + 1
    }

    /// Returns a multiboot kernel that counts down from `rounds` while its counter overflows every
    /// `period` cycles.
    fn image(&self, rounds: u32, period: u64, interrupts: bool) -> Vec<u8> {
        let rearm = Write(self.counter, period.wrapping_neg() & ((1 << 48) - 1));
        let selector = self.selector.1 | if interrupts { INTERRUPT } else { 0 };
        let mut on = vec![rearm, Write(self.selector.0, selector.into())];
        let mut off = vec![Write(self.selector.0, 0)];
        if let Some(global) = self.global {
            on.push(Write(global, 1));
            off.insert(0, Write(global, 0));
        }
        let code = |accesses: &[Access]| accesses.iter().flat_map(|a| a.code()).collect::<Vec<u8>>();
        let address = |at: u32| (LOAD + at).to_le_bytes();
        let apic_base = [
            Read(IA32_APIC_BASE).code(),
            [&[0x0d][..], &X2APIC.to_le_bytes()].concat(), // or eax, X2APIC
            vec![0x0f, 0x30],
        ];
        let mov_eax = |value: u32| [&[0xb8][..], &value.to_le_bytes()].concat();
        let to_64_bits = [
            [&[0x0f, 0x01, 0x15][..], &address(GDT_POINTER)].concat(), // lgdt
            [mov_eax(16), vec![0x8e, 0xd0]].concat(),                  // mov ss, ax
            [mov_eax(CR4_PAE), vec![0x0f, 0x22, 0xe0]].concat(),       // mov cr4, eax
            [mov_eax(LOAD + TABLES), vec![0x0f, 0x22, 0xd8]].concat(), // mov cr3, eax
            Write(IA32_EFER, EFER_LME).code(),
            [mov_eax(CR0_PAGED), vec![0x0f, 0x22, 0xc0]].concat(), // mov cr0, eax
        ]
        .concat();
        let next = HEADER_BYTES + to_64_bits.len() as u32 + 7;
        let program = [
            to_64_bits,
            [&[0xea][..], &address(next), &[8, 0]].concat(), // jmp 8:next
            [&[0xbc][..], &STACK.to_le_bytes()].concat(),    // mov esp, STACK
            [&[0x0f, 0x01, 0x1c, 0x25][..], &address(IDT_POINTER)].concat(), // lidt
            apic_base.concat(),
            code(&[
                Write(X2APIC_SPURIOUS, 0x1ff),
                Write(X2APIC_LVT_PMI, LVT_NMI.into()),
            ]),
            code(&on),
            // mov esi, rounds; again: dec esi; jnz again
            [&[0xbe][..], &rounds.to_le_bytes(), &[0xff, 0xce, 0x75, 0xfc]].concat(),
            code(&off),
            // out DONE_PORT, al; again: hlt; jmp again
            vec![0xe6, DONE_PORT as u8, 0xf4, 0xeb, 0xfd],
        ];
        let (before, behind) = self.handler;
        let handler = [
            vec![0x50, 0x51, 0x52], // push rax; push rcx; push rdx
            code(before),
            rearm.code(),
            code(behind),
            vec![0x5a, 0x59, 0x58, 0x48, 0xcf], // pop rdx; pop rcx; pop rax; iretq
        ];
        let (magic, flags) = (0x1BAD_B002u32, 0x1_0003u32);
        let sum = 0u32.wrapping_sub(magic).wrapping_sub(flags);
        let header = [
            magic,
            flags,
            sum,
            LOAD,
            LOAD,
            0,
            LOAD + IMAGE_BYTES,
            LOAD + HEADER_BYTES,
        ];
        let at = LOAD + HANDLER;
        let gate = u64::from(at & 0xffff) | 8 << 16 | 0x8e00 << 32 | u64::from(at >> 16) << 48;
        let pointer = |bytes: u16, at: u32| [&(bytes - 1).to_le_bytes()[..], &address(at), &[0; 4]].concat();
        let word = |value: u64| value.to_le_bytes().to_vec();
        let table = |at: u32| u64::from(LOAD + at) | 3;
        let parts = [
            (0, header.iter().flat_map(|word| word.to_le_bytes()).collect()),
            (HEADER_BYTES, program.concat()),
            (HANDLER, handler.concat()),
            (IDT + 2 * 16, word(gate)),
            (GDT + 8, word(0x00af_9a00_0000_ffff)),
            (GDT + 16, word(0x00cf_9200_0000_ffff)),
            (IDT_POINTER, pointer(IDT_BYTES, IDT)),
            (GDT_POINTER, pointer(GDT_BYTES, GDT)),
            (TABLES, word(table(TABLES + 0x1000))),
            (TABLES + 0x1000, word(table(TABLES + 0x2000))),
            (TABLES + 0x2000, word(0x83)),
        ];
        let mut image = vec![0; IMAGE_BYTES as usize];
        for (at, bytes) in parts {
            image[at as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
        image
    }

    fn model(&self) -> Result<PmuModel, Box<dyn Error>> {
        Ok(PmuModel::new(self.generation, None, None)?)
    }

    /// Runs the guest under the minimal VMM, which answers register accesses with constants. If
    /// `period` is set, the VMM sends an NMI each time that `period` has elapsed.
    fn constant(
        &self,
        kvm: &Kvm,
        image: &[u8],
        period: Option<Duration>,
    ) -> Result<Measurement, Box<dyn Error>> {
        let began = cpu_time();
        let ram = GuestRam::new(RAM_BYTES)?;
        ram.memory().write_slice(image, GuestAddress(LOAD.into()))?;
        let vm = Arc::new(VmFd::new(kvm)?);
        vm.add_chips(IDENTITY_MAP, TASK_STATE)?;
        msr_filter::install(&vm, &self.model()?.trapped_msrs())?;
        let _slots = ram.register(&vm)?;
        let vcpu = vm.create_vcpu(0)?;
        vcpu.set_cpuid2(&cpuid::supported(kvm)?)?;
        let flat = |selector, type_| kvm_segment {
            limit: u32::MAX,
            selector,
            type_,
            present: 1,
            db: 1,
            s: 1,
            g: 1,
            ..Default::default()
        };
        let mut sregs = vcpu.get_sregs()?;
        sregs.cs = flat(8, 0xb);
        (sregs.ds, sregs.es, sregs.ss) = (flat(16, 3), flat(16, 3), flat(16, 3));
        sregs.cr0 = 1 << 4 | 1;
        vcpu.set_sregs(&sregs)?;
        let mut regs = vcpu.get_regs()?;
        (regs.rip, regs.rflags) = ((LOAD + HEADER_BYTES).into(), 2);
        vcpu.set_regs(&regs)?;
        let mut vcpu = KickableVcpu::new(vcpu);
        let timer = KickTimer::for_current_thread()?;
        let (mut nmis, mut exits) = (0, 0);
        // The first NMI is armed at the first register write, when the guest has loaded its IDT.
        let mut begins = true;
        loop {
            exits += 1;
            match vcpu.run().exit {
                Ok(VcpuExit::X86Rdmsr(exit)) => (*exit.error, *exit.data) = (0, 0),
                Ok(VcpuExit::X86Wrmsr(exit)) => {
                    *exit.error = 0;
                    if std::mem::take(&mut begins)
                        && let Some(period) = period
                    {
                        timer.kick_in(period);
                    }
                }
                Ok(VcpuExit::IoOut(DONE_PORT, _)) => break,
                Err(e) if e.errno() == libc::EINTR => {
                    vcpu.clear_exit_request();
                    nmis += 1;
                    vcpu.nmi()?;
                    timer.kick_in(period.ok_or("a kick of somebody else")?);
                }
                Ok(VcpuExit::InternalError) => {
                    let (error, regs) = (vcpu.internal_exit(), vcpu.get_regs()?);
                    return Err(format!("KVM gave up at {:#x}: {error:x?}", regs.rip).into());
                }
                other => return Err(format!("{other:?}").into()),
            }
        }
        drop(vcpu);
        Ok(Measurement {
            cpu: cpu_time() - began,
            interrupts: nmis,
            exits,
        })
    }

    /// Runs the guest under Perfvisor.
    fn ours(&self, kvm: &Kvm, image: Vec<u8>) -> Result<Measurement, Box<dyn Error>> {
        let began = cpu_time();
        let config = VmConfig::new(
            // Leaks a few KiB per repetition until the process exits.
            KernelSource::Builtin(image.leak()),
            RAM_BYTES,
            PmuConfig::new(self.model()?, CounterBackingPolicy::Auto),
        );
        let vm = Vm::new(
            kvm,
            &config,
            Vec::new(),
            &HostPerfCapabilities::run(),
            Box::new(io::sink()),
        )?;
        let mut vm = vm.start()?;
        while vm.control().reason().is_none() {
            thread::sleep(Duration::from_millis(20));
        }
        vm.stop_and_join();
        let reason = vm.control().reason();
        if !matches!(reason, Some(VmStopReason::DebugExit(_))) {
            return Err(format!("the guest ended by {reason:?}").into());
        }
        let registry = vm.registry().clone();
        let stats = registry.slots()[0].stats();
        let (interrupts, exits) = (stats.pmi_nmi.get(), stats.exits.get());
        drop(vm);
        Ok(Measurement {
            cpu: cpu_time() - began,
            interrupts,
            exits,
        })
    }

    /// Returns two pairs, for the minimal VMM and for Perfvisor: CPU time per interrupt in
    /// nanoseconds, and exits per interrupt.
    fn turn(&self, kvm: &Kvm, work: &Work) -> Result<[(f64, f64); 2], Box<dyn Error>> {
        let image = |interrupts| self.image(work.rounds, work.period_cycles, interrupts);
        let of_one = |with: Measurement, without: Measurement| {
            let n = with.interrupts as f64;
            let ns = with.cpu.as_nanos() as f64 - without.cpu.as_nanos() as f64;
            (ns / n, (with.exits as f64 - without.exits as f64) / n)
        };
        Ok([
            of_one(
                self.constant(kvm, &image(true), Some(work.period))?,
                self.constant(kvm, &image(true), None)?,
            ),
            of_one(self.ours(kvm, image(true))?, self.ours(kvm, image(false))?),
        ])
    }
}

/// Work of the guest in one repetition.
struct Work {
    rounds: u32,
    period: Duration,
    period_cycles: u64,
}

impl Work {
    /// Chooses the amount of work from the measured costs of an interrupt and of a loop iteration
    /// on this host.
    fn of(kvm: &Kvm) -> Result<Self, Box<dyn Error>> {
        let case = &CASES[2];
        let tsc_khz = u64::from(VmFd::new(kvm)?.create_vcpu(0)?.get_tsc_khz()?);
        let cycles = |period: Duration| tsc_khz * u64::try_from(period.as_micros()).unwrap_or(0) / 1000;
        let image = |rounds| case.image(rounds, cycles(TRIED_PERIOD), true);
        let mut tried = 50_000;
        while case.constant(kvm, &image(tried), None)?.cpu < WORK / 2 {
            tried *= 2;
        }
        let image = image(tried);
        let mut tries = Vec::new();
        for _ in 0..TRIES {
            let alone = case.constant(kvm, &image, None)?.cpu;
            let interrupted = case.constant(kvm, &image, Some(TRIED_PERIOD))?;
            let interrupts = u32::try_from(interrupted.interrupts.max(1))?;
            tries.push((interrupted.cpu.saturating_sub(alone) / interrupts, alone));
        }
        tries.sort();
        let (one, alone) = tries[TRIES / 2];
        let period = PERIOD.max(one * 3 / 2);
        let work = WORK.max(INTERRUPTS * period);
        let rounds = f64::from(tried) * work.as_secs_f64() / alone.as_secs_f64();
        println!(
            "  an interrupt every {} µs, in work of {} ms",
            period.as_micros(),
            work.as_millis()
        );
        Ok(Self {
            rounds: rounds.min(f64::from(u32::MAX)) as u32,
            period,
            period_cycles: cycles(period),
        })
    }
}

/// Returns the CPU time of the process.
fn cpu_time() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a live local of the type that the call writes.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    Duration::new(
        u64::try_from(time.tv_sec).unwrap_or(0),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

fn main() -> Result<(), Box<dyn Error>> {
    if std::env::args().any(|word| word == "--list") {
        return Ok(());
    }
    let Ok(kvm) = host::open() else {
        println!("pmi: SKIPPED: no usable /dev/kvm here");
        return Ok(());
    };
    kick::install_handlers()?;
    let turns = if figures::is_dry_run() { 1 } else { TURNS };
    let work = Work::of(&kvm)?;
    let mut all = Vec::new();
    for case in &CASES {
        let mut ways = [const { Vec::new() }; 2];
        let mut exits = Vec::new();
        for _ in 0..turns {
            let turn = case.turn(&kvm, &work)?;
            for (way, (ns, _)) in ways.iter_mut().zip(turn) {
                way.push(ns);
            }
            exits.push(turn[1].1);
        }
        let ratios = ways[0].iter().zip(&ways[1]).map(|(bare, ours)| ours / bare);
        let mut ratios: Vec<f64> = ratios.collect();
        ratios.sort_by(f64::total_cmp);
        let (least, most) = (ratios[0], ratios[ratios.len() - 1]);
        let [bare, ours] = ways.map(median);
        println!(
            "  {}: {:.1} µs with constants and a kick, {:.1} µs with the PMU; by turns {least:.2} to {most:.2} times",
            case.name[0],
            bare / 1e3,
            ours / 1e3
        );
        let [ratio, of_exits] = case.name;
        all.push(BenchmarkFigure::new(
            ratio,
            Some(median(ratios)),
            "times",
            BenchmarkTarget::AtMost(1.3),
        ));
        let exits = median(exits) - case.accesses() as f64 - 1.0;
        all.push(BenchmarkFigure::new(
            of_exits,
            Some(exits),
            "beyond its accesses and a kick",
            BenchmarkTarget::None,
        ));
    }
    figures::report("pmi", &all, false, serde_json::Map::new());
    Ok(())
}
