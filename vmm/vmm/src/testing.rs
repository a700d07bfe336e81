//! Real VMs with a few bytes of guest code, for tests of the servers.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use perf_core::pmu::host::{GenericEvent, HostProbe};
use virtio_devices::device::VirtioDevice;
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vpmu::{BackingPolicy, PmuModel};

use crate::boot::KernelSource;
use crate::control::server::ControlledVm;
use crate::kvm::host;
use crate::pmu::{GuestSamplingContext, PmuConfig, VmPmu};
use crate::vcpu::kick;
use crate::vm::restore::RestoredMachine;
use crate::vm::save::Snapshot;
use crate::vm::{RunningVm, Vm, VmConfig};

/// Address of the guest code, which runs in 32-bit mode without paging.
pub(crate) const CODE: u64 = 0x10_0020;

/// Builds a multiboot kernel from guest code.
fn kernel(code: &[u8]) -> Vec<u8> {
    let load = 0x10_0000u32;
    let (magic, flags) = (0x1BAD_B002u32, 0x1_0003u32);
    let sum = 0u32.wrapping_sub(magic).wrapping_sub(flags);
    let entry = load + 32;
    let header = [magic, flags, sum, load, load, 0, load + 0x1000, entry];
    let header = header.iter().flat_map(|word| word.to_le_bytes());
    header.chain(code.iter().copied()).collect()
}

/// Starts a VM of two vCPUs with an Intel PMU on the clock backing and a guest that halts forever.
/// Prints a message and returns `None` without KVM.
pub(crate) fn halted_vm() -> Option<RunningVm> {
    // Guest code `hlt; jmp` to the start.
    vm(&[0xF4, 0xEB, 0xFD], |_| ())
}

/// Starts a VM with this guest code. `change` adjusts its configuration.
pub(crate) fn vm(code: &[u8], change: impl FnOnce(&mut VmConfig)) -> Option<RunningVm> {
    vm_with_devices(code, Vec::new(), change)
}

/// Starts a VM with virtio devices.
pub(crate) fn vm_with_devices(
    code: &[u8],
    devices: Vec<Box<dyn VirtioDevice>>,
    change: impl FnOnce(&mut VmConfig),
) -> Option<RunningVm> {
    let Ok(kvm) = host::open() else {
        eprintln!("SKIP: there is no KVM here");
        return None;
    };
    kick::install_handlers().unwrap();
    let mut config = config(code);
    change(&mut config);
    let vm = Vm::new(&kvm, &config, devices, &HostProbe::run(), Box::new(io::sink())).unwrap();
    Some(vm.start().unwrap())
}

/// Takes a snapshot of `vm`, which goes on.
pub(crate) fn snapshot_of(vm: &RunningVm) -> RestoredMachine {
    let mut snapshot = Snapshot::begin(vm.snapshots(), BTreeMap::new()).unwrap();
    while !snapshot.advance().unwrap() {
        std::thread::sleep(Duration::from_micros(50));
    }
    let memory = tempfile::tempfile().unwrap();
    memory.set_len(snapshot.memory_bytes()).unwrap();
    let mut next = 0;
    while next < snapshot.memory_bytes() {
        let piece = snapshot.read_memory(next).unwrap();
        memory.write_all_at(&piece.data, next).unwrap();
        next = piece.next;
    }
    let state = Box::new(snapshot::decode(&snapshot.state().unwrap()).unwrap());
    RestoredMachine { state, memory }
}

/// Returns the configuration of a VM with this guest code.
pub(crate) fn config(code: &[u8]) -> VmConfig {
    VmConfig {
        cpus: "2".parse().unwrap(),
        ..VmConfig::new(
            KernelSource::Builtin(kernel(code).leak()),
            32 << 20,
            PmuConfig::new(PmuModel::INTEL, BackingPolicy::Auto),
        )
    }
}

/// Returns the control interface of `vm` after all of its vCPUs have attached to perf-core.
pub(crate) fn control_target(vm: &RunningVm) -> ControlledVm {
    let control_target = ControlledVm {
        name: "vm".into(),
        pmu_name: "intel".into(),
        guest: "halted".into(),
        console: String::new(),
        virtio_console: String::new(),
        started: Instant::now(),
        control: vm.control().clone(),
        pmu: vm.pmu().clone(),
        registry: vm.registry().clone(),
        limiters: Vec::new(),
        bus: vm.bus().clone(),
        symbols: vm.symbols().clone(),
        flat: true,
        memory_bytes: 32 << 20,
        snapshots: vm.snapshots().clone(),
        options: BTreeMap::new(),
        looks: AtomicU64::new(0),
    };
    // A vCPU that replies has attached to perf-core.
    let look = control_target.request_views();
    while !control_target.views(look).complete {
        std::thread::sleep(Duration::from_millis(1));
    }
    control_target
}

/// Returns the PMU of a VM on a host that opens these generic events, or that has no PMU if
/// `None`.
pub(crate) fn pmu(opens: Option<&[&str]>, interprets_kernel: bool) -> VmPmu {
    let mut probe = HostProbe::run();
    probe.hardware_pmu = opens.is_some();
    for GenericEvent {
        name, opens: opened, ..
    } in &mut probe.generic
    {
        *opened = opens.is_some_and(|opens| opens.contains(&name.as_str()));
    }
    let config = PmuConfig::new(PmuModel::INTEL, BackingPolicy::None);
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
    VmPmu::new(
        config,
        &probe,
        None,
        interprets_kernel,
        GuestSamplingContext::new(memory, None),
    )
}
