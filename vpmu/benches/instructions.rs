//! Instruction counts of each hot path, compared with a committed baseline: `make bench-check`.
//!
//! Run time depends on the machine and its load, while instruction counts are almost constant. This
//! benchmark therefore uses instruction counts to detect whether a change made a path more
//! expensive, and fails if a count exceeds the baseline by more than 3 %. Work of the host kernel
//! is excluded, because the benchmark supplies event counts and the time itself.
//!
//! Each result is the difference between two runs, which excludes the setup. A baseline is valid
//! for one compiler version. With another compiler, or if ptrace is not permitted, the benchmark
//! reports that no comparison was made.
//!
//! `--only NAME` runs one operation 20,000 times without counting, for `valgrind --tool=callgrind`.

#[path = "../../perf-core/benches/nothing/mod.rs"]
mod nothing;

use std::collections::BTreeMap;
use std::fs;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::Arc;

use nothing::NoopPmu;
use perf_core::attr::{ReadFormat, SampleType};
use perf_core::pmu::VcpuId;
use perf_core::pmu::clock::{ClockPmu, VcpuRunTimeClock};
use perf_core::pmu::vmm_pmu::{VmmPmu, VmmPmuCounts};
use perf_core::record::{EncodeRecord, RecordFormat, Sample};
use perf_core::ring::{Ring, RingFullPolicy, RingReader};
use perf_core::time::{Clock, ManualClock};
use perf_core::*;
use serde::{Deserialize, Serialize};
use test_support::steps;
use vpmu::registers::*;
use vpmu::{
    ArchEvent, CounterBackingPolicy, CounterBackingSelector, PerfCoreEvents, PmiShare, PmuModel, RdpmcIndex,
    Vpmu, vmm_counts,
};
use vpmu::{Cpl, MsrAddress};

const VCPU: VcpuId = VcpuId(0);
/// Relative increase of an instruction count over the baseline above which the check fails.
const TOLERANCE: f64 = 0.03;
/// Increase of an instruction count that the check always tolerates, in instructions. On a path of
/// few instructions, a single additional one may exceed 3 %.
const FEW: f64 = 4.0;
/// Number of calls of an operation before its instructions are counted. These calls make tables
/// grow to their final size and execute all code paths once.
const WARM_UP: u64 = 16;
/// Number of calls in the shorter of the two runs whose difference is the result.
const TIMES: u64 = 4;
/// Number of times that the operation selected by `--only` is called.
const PROFILED: u64 = 20_000;

#[derive(Serialize, Deserialize)]
struct Baseline {
    /// First line of the output of `rustc --version`.
    rustc: String,
    /// Number of instructions per call of each operation, by operation name.
    instructions: BTreeMap<String, f64>,
}

/// Perf core with one vCPU, event counts that the benchmark supplies, and a mock driver with
/// several slots.
struct BenchMachine {
    core: PerfCore,
    session: Session,
    context: Arc<VcpuEventContext>,
    vmm_counts: Arc<VmmPmuCounts>,
    clock: Arc<ManualClock>,
}

impl BenchMachine {
    fn new(slots: usize) -> Self {
        let clock = Arc::new(ManualClock::new());
        let core = PerfCore::new(PerfCoreConfig {
            clock: Arc::clone(&clock) as Arc<dyn Clock>,
            ..PerfCoreConfig::default()
        });
        let vmm_counts = Arc::new(VmmPmuCounts::new(vmm_counts::SELECTORS));
        let driver = VmmPmu::new();
        driver.add_vcpu(VCPU, vmm_counts.clone());
        core.register(Arc::new(driver));
        // This clock reports overflows only at guest entry, which does not occur in this benchmark.
        let clocks = ClockPmu::new(Some(libc::SIGUSR2));
        clocks.add_vcpu(VCPU, Arc::new(VcpuRunTimeClock::for_current_thread(1_000_000)));
        core.register(Arc::new(clocks));
        core.register(Arc::new(NoopPmu { slots }));
        let context = core.add_vcpu(VCPU, 0).expect("the first vCPU");
        context.sched_in();
        let session = core.session(0, SessionRole::Admin);
        Self {
            core,
            session,
            context,
            vmm_counts,
            clock,
        }
    }

    fn open(&self, leader: Option<&EventHandle>) -> EventHandle {
        let attr = Attr::counting(EventType::SIM, 0);
        self.core
            .open(
                &self.session,
                attr,
                EventOpenTarget::Vcpu(VCPU),
                leader,
                OpenFlags::default(),
            )
            .expect("the driver opens every event")
    }
}

fn instructions() -> usize {
    vmm_counts::exact_selector(ArchEvent::Instructions).expect("the VMM supplies them")
}

/// Guest with four running counters, whose register accesses are handled as at VM exits.
struct BenchGuest {
    machine: BenchMachine,
    vpmu: Vpmu,
    events: PerfCoreEvents,
}

impl BenchGuest {
    fn new(model: PmuModel) -> Self {
        Self::counted_by(model, CounterBackingPolicy::Exact, 0x53_00C0)
    }

    fn counted_by(model: PmuModel, policy: CounterBackingPolicy, selector: u64) -> Self {
        let machine = BenchMachine::new(4);
        let sources = CounterBackingSelector::new(policy, Some(model.vendor()), |_| Some(0));
        let events = PerfCoreEvents::new(machine.core.clone(), VCPU, sources);
        let mut new = Self {
            machine,
            vpmu: Vpmu::new(model),
            events,
        };
        new.vpmu.set_pmi_share(PmiShare::default_of(model.vendor()));
        for n in 0..4 {
            new.write(new.selector(n), selector);
        }
        new
    }

    fn selector(&self, n: u32) -> u32 {
        if *self.vpmu.model() == PmuModel::AMD {
            PERF_CTL0 + 2 * n
        } else {
            IA32_PERFEVTSEL0 + n
        }
    }

    /// Handles a WRMSR exit and the guest entry after it.
    fn write(&mut self, msr: u32, value: u64) {
        let done = self
            .vpmu
            .write_msr(black_box(MsrAddress(msr)), value, &mut self.events);
        black_box(done);
        self.vpmu.reconcile(&mut self.events);
    }

    /// Handles an RDMSR exit of the guest.
    fn read(&mut self, msr: u32) {
        black_box(self.vpmu.read_msr(black_box(MsrAddress(msr)), &mut self.events));
    }

    /// Performs the accesses of a Linux task switch between two tasks with four events each:
    /// disables, reads, sets and re-enables four counters.
    fn switch_tasks(&mut self, n: u64) {
        self.write(IA32_PERF_GLOBAL_CTRL, 0);
        for counter in 0..4 {
            self.read(IA32_PMC0 + counter);
            self.write(IA32_PMC0 + counter, n);
        }
        self.write(IA32_PERF_GLOBAL_CTRL, 0xF);
    }

    /// Overflows the counter of `IA32_A_PMC0` and delivers the PMI.
    fn overflow(&mut self, n: u64) {
        self.write(IA32_A_PMC0, (1 << 48) - 1);
        self.machine.vmm_counts.add(instructions(), 0, 1);
        let Self {
            machine,
            vpmu,
            events,
            ..
        } = self;
        machine
            .context
            .service_overflows(&mut UnavailableRegs, &mut |report| {
                if let Some(counter) = PerfCoreEvents::counter_of(report.cookie) {
                    vpmu.overflowed(counter, events);
                }
            });
        self.vpmu.reconcile(&mut self.events);
        self.vpmu.pmi_delivered(n);
        self.vpmu.observe_handler(false, n);
    }
}

/// Instruction counts measured by one run of the benchmark.
#[derive(Default)]
struct Measurements {
    all: BTreeMap<String, f64>,
    /// Name of the only operation to run. Its instructions are not counted, because it runs under a
    /// profiler.
    only: Option<String>,
}

impl Measurements {
    /// Counts the instructions of one `work` call and stores the number under `name`. Returns the
    /// number, or `None` if ptrace is not permitted.
    fn put(&mut self, name: &str, work: &mut dyn FnMut(u64)) -> Option<f64> {
        if let Some(only) = &self.only {
            if only == name {
                (0..PROFILED).for_each(work);
            }
            return Some(0.0);
        }
        (0..WARM_UP).for_each(&mut *work);
        let mut run = |times: u64| steps::instructions(|| (WARM_UP..WARM_UP + times).for_each(&mut *work));
        let (once, twice) = (run(TIMES)?, run(2 * TIMES)?);
        let each = twice.saturating_sub(once) as f64 / TIMES as f64;
        self.all.insert(name.to_owned(), each);
        Some(each)
    }
}

/// Measures the operations of perf-core.
fn measure_core(all: &mut Measurements) -> Option<()> {
    for groups in [10, 100] {
        let m = BenchMachine::new(4);
        let _events: Vec<_> = (0..groups).map(|_| m.open(None)).collect();
        let mut tick = |_| {
            m.clock.advance(10_000_000);
            m.context.tick();
        };
        // Runs every group once before counting, because later runs of a group cost more than the
        // first.
        (0..groups + 10).for_each(&mut tick);
        all.put(&format!("core: tick, {groups} groups"), &mut tick)?;
    }
    let m = BenchMachine::new(8);
    let leader = m.open(None);
    let _members: Vec<_> = (0..7).map(|_| m.open(Some(&leader))).collect();
    all.put("core: read one event", &mut |_| drop(black_box(leader.read())))?;
    all.put("core: read one event's count alone", &mut |_| {
        let _ = black_box(leader.count());
    })?;
    all.put("core: read a group of 8", &mut |_| {
        drop(black_box(leader.read_group()))
    })?;
    all.put("core: vCPU out and in, 8 events", &mut |_| {
        m.context.sched_out();
        m.context.sched_in();
    })?;
    all.put("core: disable and enable a group of 8", &mut |_| {
        let _ = black_box(leader.disable(EventOrGroup::Event));
        let _ = black_box(leader.enable(EventOrGroup::Event));
    })?;
    all.put("core: a software event that nobody counts", &mut |_| {
        m.context
            .software_event(black_box(SoftwareEventId::Halts), 1, None, &mut |_| {});
    })?;
    Some(())
}

/// Measures writing and reading of ring buffer records.
fn measure_ring(all: &mut Measurements) -> Option<()> {
    let format = RecordFormat {
        sample_type: SampleType::IP | SampleType::TID | SampleType::TIME | SampleType::PERIOD,
        read_format: ReadFormat::empty(),
        sample_id_all: false,
    };
    let ring = Arc::new(Ring::new(64, RingFullPolicy::Overwrite).ok()?);
    let sample = |n| Sample {
        ip: 0xffff_ffff_8100_0000 + n,
        pid: 1,
        tid: 2,
        time_ns: n,
        period: 1000,
        ..Sample::default()
    };
    all.put("ring: write a sample of 40 bytes", &mut |n| {
        let _ = black_box(sample(black_box(n)).write(format, &ring));
    })?;
    let ring = Arc::new(Ring::new(64, RingFullPolicy::Writable).ok()?);
    let mut reader = RingReader::of(Arc::clone(&ring));
    all.put("ring: write a sample of 40 bytes and read it", &mut |n| {
        assert!(sample(black_box(n)).write(format, &ring).is_ok());
        assert!(black_box(reader.next_record()).is_ok_and(|record| record.is_some()));
    })?;
    Some(())
}

/// Measures the handling of the guest's register accesses.
fn measure_registers(all: &mut Measurements) -> Option<()> {
    let mut g = BenchGuest::new(PmuModel::INTEL);
    g.write(IA32_PERF_GLOBAL_CTRL, 0xF);
    all.put("vpmu: RDMSR of a running counter", &mut |_| g.read(IA32_PMC0))?;
    all.put("vpmu: RDPMC of a running counter", &mut |_| {
        let value = g
            .vpmu
            .rdpmc(black_box(RdpmcIndex(1)), Cpl(0), false, &mut g.events);
        black_box(value);
    })?;
    all.put("vpmu: before an entry, nothing changed", &mut |_| {
        g.vpmu.reconcile(black_box(&mut g.events));
    })?;
    all.put("vpmu: WRMSR to a running counter", &mut |n| {
        g.write(IA32_PMC0, n & 0xffff);
    })?;
    all.put("vpmu: WRMSR to a selector, two events by turns", &mut |n| {
        g.write(IA32_PERFEVTSEL0, if n % 2 == 0 { 0x53_00C0 } else { 0x53_00C4 });
    })?;
    all.put(
        "vpmu: WRMSR of global control, four counters off or on",
        &mut |n| {
            g.write(IA32_PERF_GLOBAL_CTRL, if n % 2 == 0 { 0 } else { 0xF });
        },
    )?;
    all.put("vpmu: a guest's context switch, four events", &mut |n| {
        g.switch_tasks(n);
    })?;
    all.put("vpmu: an overflow, from the driver to the PMI", &mut |n| {
        g.overflow(n);
    })?;
    let mut g = BenchGuest::counted_by(PmuModel::INTEL, CounterBackingPolicy::Clock, 0x53_003C);
    g.write(IA32_PERF_GLOBAL_CTRL, 0xF);
    all.put("vpmu: WRMSR to a running clock", &mut |n| {
        g.write(IA32_PMC0, n & 0xffff);
    })?;
    all.put("vpmu: WRMSR of global control, four clocks off or on", &mut |n| {
        g.write(IA32_PERF_GLOBAL_CTRL, if n % 2 == 0 { 0 } else { 0xF });
    })?;
    all.put("vpmu: a guest's context switch, four clocks", &mut |n| {
        g.switch_tasks(n);
    })?;
    let mut g = BenchGuest::counted_by(PmuModel::INTEL, CounterBackingPolicy::Hardware, 0x53_00C0);
    g.write(IA32_PERF_GLOBAL_CTRL, 0xF);
    all.put(
        "vpmu: WRMSR of global control, four of the host's off or on",
        &mut |n| {
            g.write(IA32_PERF_GLOBAL_CTRL, if n % 2 == 0 { 0 } else { 0xF });
        },
    )?;
    all.put("vpmu: a guest's context switch, four of the host's", &mut |n| {
        g.switch_tasks(n);
    })?;
    let mut g = BenchGuest::new(PmuModel::AMD);
    all.put("vpmu: WRMSR to a selector of AMD's, off or on", &mut |n| {
        let selector = g.selector(0);
        g.write(selector, if n % 2 == 0 { 0x13_00C0 } else { 0x53_00C0 });
    })?;
    Some(())
}

fn compiler() -> String {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(rustc).arg("--version").output();
    output.map_or_else(
        |_| "unknown".into(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    )
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if words.iter().any(|word| word == "--test" || word == "--list") {
        return ExitCode::SUCCESS;
    }
    let only = words.iter().position(|word| word == "--only");
    let mut all = Measurements {
        only: only.and_then(|at| words.get(at + 1).cloned()),
        ..Measurements::default()
    };
    let counted = measure_core(&mut all)
        .and_then(|()| measure_ring(&mut all))
        .and_then(|()| measure_registers(&mut all));
    if all.only.is_some() {
        return ExitCode::SUCCESS;
    }
    if counted.is_none() {
        println!("bench-check: SKIPPED, nothing was compared: processes may not be traced here");
        return ExitCode::SUCCESS;
    }
    let now = Baseline {
        rustc: compiler(),
        instructions: all.all,
    };
    let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/instructions.json");
    let result = if words.iter().any(|word| word == "--keep") {
        keep(&now, &kept)
    } else {
        compare(&now, &kept)
    };
    result.unwrap_or_else(|error| {
        eprintln!("bench-check: {error}");
        ExitCode::FAILURE
    })
}

/// Writes the results `now` to `path` as the new baseline.
fn keep(now: &Baseline, path: &Path) -> Result<ExitCode, String> {
    let text = serde_json::to_string_pretty(now).map_err(|e| e.to_string())?;
    fs::write(path, text + "\n").map_err(|e| format!("{}: {e}", path.display()))?;
    println!("bench-check: the baseline is now what this run counted");
    Ok(ExitCode::SUCCESS)
}

/// Prints the results of this run next to the baseline at `path`. Fails if an instruction count
/// exceeds its baseline by more than the tolerance.
fn compare(now: &Baseline, path: &PathBuf) -> Result<ExitCode, String> {
    let name = path.display();
    let text = fs::read_to_string(path).map_err(|e| format!("{name}: {e}"))?;
    let kept: Baseline = serde_json::from_str(&text).map_err(|e| format!("{name}: {e}"))?;
    let same = kept.rustc == now.rustc;
    println!(
        "{:<52} {:>9} {:>9} {:>8}",
        "instructions", "now", "baseline", "change"
    );
    let mut dearer = 0;
    for (operation, &count) in &now.instructions {
        let Some(&before) = kept.instructions.get(operation) else {
            println!("{operation:<52} {count:>9.1} {:>9} {:>8}", "-", "-");
            continue;
        };
        let more = count - before;
        let worse = more > FEW && more > TOLERANCE * before;
        dearer += usize::from(worse);
        println!(
            "{operation:<52} {count:>9.1} {before:>9.1} {:>+7.1}%{}",
            100.0 * more / before.max(1.0),
            if worse { " DEARER" } else { "" }
        );
    }
    for gone in kept
        .instructions
        .keys()
        .filter(|name| !now.instructions.contains_key(*name))
    {
        println!("{gone:<52} is in the baseline and was not counted");
        dearer += 1;
    }
    if !same {
        println!(
            "bench-check: SKIPPED, nothing was judged: the baseline is of {}, this is {}",
            kept.rustc, now.rustc
        );
        return Ok(ExitCode::SUCCESS);
    }
    if dearer == 0 {
        println!("bench-check: nothing takes more than 3 % more instructions than the baseline");
        return Ok(ExitCode::SUCCESS);
    }
    Err(format!(
        "{dearer} of them took more than 3 % more instructions than the baseline; if that is meant, say why and type: make bench-baseline"
    ))
}
