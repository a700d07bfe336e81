//! Time from opening the files of a snapshot until the VM is ready to run, for small and large
//! memory, compared with the time to build the same VM for a boot. Also prints the size of the
//! state file. The variants are interleaved.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use kvm_ioctls::Kvm;
use perf_core::pmu::host::HostPerfCapabilities;
use test_support::figures::{self, BenchmarkFigure, BenchmarkTarget, median};
use vmm::boot::KernelSource;
use vmm::kvm::host;
use vmm::pmu::PmuConfig;
use vmm::vcpu::kick;
use vmm::vm::restore::{RestoredMachine, RestoredMemory};
use vmm::vm::save::VmSnapshot;
use vmm::vm::{BackgroundKvmSetup, Vm, VmBuildInputs, VmConfig};
use vpmu::{CounterBackingPolicy, PmuModel};

/// Number of repetitions of each variant.
const TURNS: usize = 31;
const SMALL: u64 = 64 << 20;
const LARGE: u64 = 4 << 30;
/// Maximum size of the state file with one vCPU, in KiB.
const MAX_STATE_KIB: f64 = 80.0;
/// Multiboot kernel that executes `hlt` and jumps back to its start, with its load address in the
/// header.
const KERNEL: [u32; 9] = [
    0x1BAD_B002,
    0x1_0003,
    0u32.wrapping_sub(0x1BAD_B002).wrapping_sub(0x1_0003),
    0x10_0000,
    0x10_0000,
    0,
    0x10_1000,
    0x10_0020,
    0x00FD_EBF4,
];

fn config(memory_bytes: u64) -> VmConfig {
    let image: Vec<u8> = KERNEL.iter().flat_map(|word| word.to_le_bytes()).collect();
    let pmu = PmuConfig::new(PmuModel::INTEL, CounterBackingPolicy::Clock);
    VmConfig::new(KernelSource::Builtin(image.leak()), memory_bytes, pmu)
}

fn parts<'a>(kvm: &'a Kvm, config: &'a VmConfig, probe: &'a HostPerfCapabilities) -> VmBuildInputs<'a> {
    VmBuildInputs {
        begun: BackgroundKvmSetup::now(),
        kvm,
        config,
        devices: Vec::new(),
        probe,
        console: Box::new(io::sink()),
    }
}

/// Saves a running VM in `dir`.
fn save(
    kvm: &Kvm,
    config: &VmConfig,
    probe: &HostPerfCapabilities,
    dir: &Path,
) -> Result<(), Box<dyn Error>> {
    let vm = Vm::boot(parts(kvm, config, probe))?.start()?;
    // Gives the guest time to halt.
    std::thread::sleep(Duration::from_millis(50));
    let mut snapshot = VmSnapshot::begin(vm.snapshots(), BTreeMap::new())?;
    while !snapshot.advance()? {
        std::thread::sleep(Duration::from_micros(50));
    }
    let memory = File::create(dir.join("memory"))?;
    memory.set_len(snapshot.memory_bytes())?;
    let mut next = 0;
    while next < snapshot.memory_bytes() {
        let piece = snapshot.read_memory(next)?;
        memory.write_all_at(&piece.data, next)?;
        next = piece.next;
    }
    fs::write(dir.join("state"), snapshot.state()?)?;
    Ok(())
}

/// Returns two durations in milliseconds, both measured from the call: until the state is loaded,
/// and until the VM is built from it.
fn restore(
    kvm: &Kvm,
    config: &VmConfig,
    probe: &HostPerfCapabilities,
    dir: &Path,
) -> Result<(f64, f64), Box<dyn Error>> {
    let began = Instant::now();
    let state = Box::new(snapshot::decode(&fs::read(dir.join("state"))?)?);
    let memory = File::open(dir.join("memory"))?;
    snapshot::memory::check_size(&memory, &state.memory)?;
    let read = began.elapsed();
    let saved = RestoredMachine {
        state,
        memory: RestoredMemory::Snapshot(memory),
        accepts_losses: false,
    };
    let vm = Vm::restore(parts(kvm, config, probe), saved)?;
    let built = began.elapsed();
    drop(vm);
    Ok((read.as_secs_f64() * 1e3, built.as_secs_f64() * 1e3))
}

fn boot(kvm: &Kvm, config: &VmConfig, probe: &HostPerfCapabilities) -> Result<f64, Box<dyn Error>> {
    let began = Instant::now();
    let vm = Vm::boot(parts(kvm, config, probe))?;
    let built = began.elapsed();
    drop(vm);
    Ok(built.as_secs_f64() * 1e3)
}

fn main() -> Result<(), Box<dyn Error>> {
    if std::env::args().any(|word| word == "--list") {
        return Ok(());
    }
    let Ok(kvm) = host::open() else {
        println!("restore: SKIPPED: no usable /dev/kvm here");
        return Ok(());
    };
    kick::install_handlers()?;
    let probe = HostPerfCapabilities::run();
    let sizes = [SMALL, LARGE].map(config);
    let dirs = [tempfile::tempdir()?, tempfile::tempdir()?];
    for (config, dir) in sizes.iter().zip(&dirs) {
        save(&kvm, config, &probe, dir.path())?;
    }
    let turns = if figures::is_dry_run() { 1 } else { TURNS };
    let mut booted = [const { Vec::new() }; 2];
    let mut decoded = [const { Vec::new() }; 2];
    let mut restored = [const { Vec::new() }; 2];
    // The first repetition is a warm-up and not recorded.
    for turn in 0..=turns {
        for (n, (config, dir)) in sizes.iter().zip(&dirs).enumerate() {
            let (read, built) = restore(&kvm, config, &probe, dir.path())?;
            let boot = boot(&kvm, config, &probe)?;
            if turn > 0 {
                decoded[n].push(read);
                restored[n].push(built);
                booted[n].push(boot);
            }
        }
    }
    let least = restored
        .each_ref()
        .map(|times| times.iter().copied().fold(f64::MAX, f64::min));
    let [decoded, _] = decoded.map(median);
    let ([boot_small, boot_large], [small, large]) = (booted.map(median), restored.map(median));
    let kib = |n: usize, name| fs::metadata(dirs[n].path().join(name)).map(|file| file.len() as f64 / 1024.0);
    let state_kib = kib(0, "state")?.max(kib(1, "state")?);
    let figure = |name, value, unit, target| BenchmarkFigure::new(name, Some(value), unit, target);
    let all = [
        figure(
            "state file, 1 vCPU",
            state_kib,
            "KiB",
            BenchmarkTarget::AtMost(MAX_STATE_KIB),
        ),
        figure(
            "read and decode the state, 64 MiB",
            decoded,
            "ms",
            BenchmarkTarget::None,
        ),
        figure("restore, 64 MiB, median", small, "ms", BenchmarkTarget::None),
        figure("restore, 64 MiB, minimum", least[0], "ms", BenchmarkTarget::None),
        figure("restore, 4 GiB, median", large, "ms", BenchmarkTarget::None),
        figure("restore, 4 GiB, minimum", least[1], "ms", BenchmarkTarget::None),
        figure(
            "build for a boot, 64 MiB, median",
            boot_small,
            "ms",
            BenchmarkTarget::None,
        ),
        figure(
            "build for a boot, 4 GiB, median",
            boot_large,
            "ms",
            BenchmarkTarget::None,
        ),
        figure(
            "restore minus build, 64 MiB",
            small - boot_small,
            "ms",
            BenchmarkTarget::AtMost(5.0),
        ),
        figure(
            "restore minus build, 4 GiB",
            large - boot_large,
            "ms",
            BenchmarkTarget::AtMost(5.0),
        ),
    ];
    figures::report("restore", &all, false, serde_json::Map::new());
    Ok(())
}
