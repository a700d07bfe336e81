//! What the PMU adds to an exit for one of its registers: a VMM that answers each with a constant, and the
//! same one with the PMU of the example, by turns on one vCPU.
//!
//! The guest does nothing but the access, for ever. So a turn's time is that of its exits, and the difference
//! of the two ways is ours: the registers, the counting events, the pass before the next entry and the
//! vCPU's clock. Counters count cycles, by the host's PMU where it has one and else by the clock.
#[path = "../../perf-core/benches/figures/mod.rs"]
mod figures;
#[expect(dead_code, reason = "the example has a guest and a loop of its own")]
#[path = "../examples/tiny_vmm.rs"]
mod tiny_vmm;

use std::error::Error;
use std::time::Instant;

use figures::{Figure, Target, median};
use kvm_ioctls::{VcpuExit, VcpuFd};
use tiny_vmm::{CODE, Pmu, machine, trap_msrs};
use vpmu::registers::{IA32_PERF_GLOBAL_CTRL, IA32_PERFEVTSEL0, IA32_PMC0};
use vpmu::{Model, MsrAddress, MsrRead, MsrWrite};

/// Cycles at all privilege levels, enabled; nobody waits for the overflow.
const SELECTOR: u32 = 0x43_003C;
const ENABLE: u32 = 1 << 22;
/// Turns of each way, and exits in one.
const TURNS: usize = 31;
const EXITS: u32 = 2000;

/// The guest's one access: its register, what is written first, and which bits change each time. `None`: it
/// reads.
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

/// What is done with exits.
enum Way<'p> {
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

    /// Nanoseconds that the PMU adds to an exit, and its share of the whole.
    fn measure(&self, turns: usize) -> Result<(f64, f64), Box<dyn Error>> {
        let (vm, mut vcpu) = machine(&[(CODE, self.code())])?;
        trap_msrs(&vm, &Model::INTEL.trapped_msrs())?;
        let mut pmu = Pmu::new(Model::INTEL, vcpu.get_tsc_khz().unwrap_or(1_000_000))?;
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
        // The first turn of each is not counted.
        for turn in 0..=turns {
            for (way, times) in [(Way::Constant, &mut constant), (Way::Pmu(&mut pmu), &mut ours)] {
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

/// Nanoseconds of each of [`EXITS`] exits.
fn exits(vcpu: &mut VcpuFd, way: Way<'_>) -> Result<f64, Box<dyn Error>> {
    let began = Instant::now();
    match way {
        Way::Constant => {
            for _ in 0..EXITS {
                match vcpu.run()? {
                    VcpuExit::X86Rdmsr(exit) => (*exit.error, *exit.data) = (0, 0),
                    VcpuExit::X86Wrmsr(exit) => *exit.error = 0,
                    other => return Err(format!("{other:?}").into()),
                }
            }
        }
        Way::Pmu(pmu) => {
            for _ in 0..EXITS {
                pmu.registers.reconcile(&mut pmu.events);
                pmu.clock.guest_enter();
                let exit = vcpu.run();
                pmu.clock.guest_exit();
                match exit? {
                    VcpuExit::X86Rdmsr(exit) => {
                        match pmu.registers.read_msr(MsrAddress(exit.index), &mut pmu.events) {
                            MsrRead::Value(value) => (*exit.error, *exit.data) = (0, value),
                            MsrRead::InjectGp => *exit.error = 1,
                        }
                    }
                    VcpuExit::X86Wrmsr(exit) => {
                        let written =
                            pmu.registers
                                .write_msr(MsrAddress(exit.index), exit.data, &mut pmu.events);
                        *exit.error = u8::from(written == MsrWrite::InjectGp);
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
    let turns = if figures::only_tried() { 1 } else { TURNS };
    let mut all = Vec::new();
    for access in &ACCESSES {
        let (ns, share) = access.measure(turns)?;
        let [of_exit, added] = access.name;
        all.push(Figure::new(
            of_exit,
            Some(100.0 * share),
            "%",
            Target::AtMost(5.0),
        ));
        all.push(Figure::new(added, Some(ns), "ns", Target::AtMost(300.0)));
    }
    figures::report("msr-exits", &all, false, serde_json::Map::new());
    Ok(())
}
