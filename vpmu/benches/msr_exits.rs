//! Measures the time that the PMU adds to an MSR exit. Compares a VMM that returns a constant with
//! the same VMM using the example PMU, in interleaved runs on one vCPU.
//!
//! The guest executes the access in an endless loop, so a run measures only its exits. The
//! difference between the two VMMs is the cost of the registers, the counting events, the reconcile
//! pass before the next entry and the vCPU clock. Counters count cycles on the host PMU if
//! available, and otherwise on the clock.
#[expect(dead_code, reason = "the example has a guest and a loop of its own")]
#[path = "../examples/tiny_vmm.rs"]
mod tiny_vmm;

use std::error::Error;
use std::time::Instant;

use kvm_ioctls::{VcpuExit, VcpuFd};
use test_support::figures::{self, BenchmarkFigure, BenchmarkTarget, median};
use tiny_vmm::{CODE, Pmu, machine, trap_msrs};
use vpmu::registers::{IA32_PERF_GLOBAL_CTRL, IA32_PERFEVTSEL0, IA32_PMC0};
use vpmu::{MsrAddress, MsrReadOutcome, MsrWriteOutcome, PmuModel};

/// Selector for cycles at all privilege levels, enabled, without an overflow interrupt.
const SELECTOR: u32 = 0x43_003C;
const ENABLE: u32 = 1 << 22;
/// Number of runs of each VMM, and number of exits per run.
const TURNS: usize = 31;
const EXITS: u32 = 2000;

/// MSR access that the guest repeats. `written` contains the initial value to write and the bits
/// that change on each write, or is `None` for a read.
struct Access {
    name: [&'static str; 2],
    msr: u32,
    written: Option<(u32, u32)>,
}

const ACCESSES: [Access; 3] = [
    Access {
        name: [
            "RDMSR of a running counter: share of the exit",
            "RDMSR of a running counter: added",
        ],
        msr: IA32_PMC0,
        written: None,
    },
    Access {
        name: [
            "WRMSR to a selector, off or on: share of the exit",
            "WRMSR to a selector, off or on: added",
        ],
        msr: IA32_PERFEVTSEL0,
        written: Some((SELECTOR, ENABLE)),
    },
    Access {
        name: [
            "WRMSR of global control, four counters off or on: share of the exit",
            "WRMSR of global control, four counters off or on: added",
        ],
        msr: IA32_PERF_GLOBAL_CTRL,
        written: Some((0xF, 0xF)),
    },
];

/// How the VMM handles the MSR exits of a run: with a constant, or with the example PMU.
enum ExitHandling<'p> {
    Constant,
    Pmu(&'p mut Pmu),
}

impl Access {
    fn code(&self) -> Vec<u8> {
        let mov = |register: u8, value: u32| [&[0x66, register][..], &value.to_le_bytes()].concat();
        match self.written {
            // mov ecx, msr; again: rdmsr; jmp again
            None => [mov(0xb9, self.msr), vec![0x0f, 0x32, 0xeb, 0xfc]].concat(),
            // mov ecx, msr; mov eax, first; mov edx, 0; again: xor eax, changing; wrmsr; jmp again
            Some((first, changing)) => [
                mov(0xb9, self.msr),
                mov(0xb8, first),
                mov(0xba, 0),
                mov(0x35, changing),
                vec![0x0f, 0x30, 0xeb, 0xf6],
            ]
            .concat(),
        }
    }

    /// Measures the cost that the PMU adds to an exit of this access. Returns the cost in
    /// nanoseconds and as a fraction of the exit's time.
    fn measure(&self, turns: usize) -> Result<(f64, f64), Box<dyn Error>> {
        let (vm, mut vcpu) = machine(&[(CODE, self.code())])?;
        trap_msrs(&vm, &PmuModel::INTEL.trapped_msrs())?;
        let mut pmu = Pmu::new(PmuModel::INTEL, vcpu.get_tsc_khz().unwrap_or(1_000_000))?;
        for (msr, value) in (0..4)
            .map(|n| (IA32_PERFEVTSEL0 + n, SELECTOR))
            .chain([(IA32_PERF_GLOBAL_CTRL, 0xF)])
        {
            let _ = pmu
                .registers
                .write_msr(MsrAddress(msr), value.into(), &mut pmu.events);
        }
        pmu.registers.reconcile(&mut pmu.events);
        let (mut constant, mut ours) = (Vec::new(), Vec::new());
        // The first run of each variant is a warm-up.
        for turn in 0..=turns {
            for (way, times) in [
                (ExitHandling::Constant, &mut constant),
                (ExitHandling::Pmu(&mut pmu), &mut ours),
            ] {
                let ns = exits(&mut vcpu, way)?;
                if turn > 0 {
                    times.push(ns);
                }
            }
        }
        pmu.registers.detach(&mut pmu.events);
        let (constant, ours) = (median(constant), median(ours));
        println!(
            "  {}: {constant:.0} ns answered with a constant, {ours:.0} with the PMU",
            self.name[0]
        );
        Ok((ours - constant, (ours - constant) / ours))
    }
}

/// Runs the guest for [`EXITS`] exits that the VMM handles as `way` specifies. Returns the mean
/// time per exit, in nanoseconds.
fn exits(vcpu: &mut VcpuFd, way: ExitHandling<'_>) -> Result<f64, Box<dyn Error>> {
    let began = Instant::now();
    match way {
        ExitHandling::Constant => {
            for _ in 0..EXITS {
                match vcpu.run()? {
                    VcpuExit::X86Rdmsr(exit) => (*exit.error, *exit.data) = (0, 0),
                    VcpuExit::X86Wrmsr(exit) => *exit.error = 0,
                    other => return Err(format!("{other:?}").into()),
                }
            }
        }
        ExitHandling::Pmu(pmu) => {
            for _ in 0..EXITS {
                pmu.registers.reconcile(&mut pmu.events);
                pmu.clock.guest_enter();
                let exit = vcpu.run();
                pmu.clock.guest_exit();
                match exit? {
                    VcpuExit::X86Rdmsr(exit) => {
                        match pmu.registers.read_msr(MsrAddress(exit.index), &mut pmu.events) {
                            MsrReadOutcome::Value(value) => (*exit.error, *exit.data) = (0, value),
                            MsrReadOutcome::InjectGp => *exit.error = 1,
                        }
                    }
                    VcpuExit::X86Wrmsr(exit) => {
                        let written =
                            pmu.registers
                                .write_msr(MsrAddress(exit.index), exit.data, &mut pmu.events);
                        *exit.error = u8::from(written == MsrWriteOutcome::InjectGp);
                    }
                    other => return Err(format!("{other:?}").into()),
                }
            }
        }
    }
    Ok(began.elapsed().as_nanos() as f64 / f64::from(EXITS))
}

fn main() -> Result<(), Box<dyn Error>> {
    if std::env::args().any(|word| word == "--list") {
        return Ok(());
    }
    if !std::path::Path::new("/dev/kvm").exists() {
        println!("msr_exits: SKIPPED: no /dev/kvm here");
        return Ok(());
    }
    let turns = if figures::is_dry_run() { 1 } else { TURNS };
    let mut all = Vec::new();
    for access in &ACCESSES {
        let (ns, share) = access.measure(turns)?;
        let [of_exit, added] = access.name;
        all.push(BenchmarkFigure::new(
            of_exit,
            Some(100.0 * share),
            "%",
            BenchmarkTarget::AtMost(5.0),
        ));
        all.push(BenchmarkFigure::new(
            added,
            Some(ns),
            "ns",
            BenchmarkTarget::AtMost(300.0),
        ));
    }
    figures::report("msr-exits", &all, false, serde_json::Map::new());
    Ok(())
}
