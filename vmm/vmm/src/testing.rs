//! VMs with a few bytes of guest code, for tests of the servers. Run on the KVM of this host.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use perf_core::pmu::host::{GenericEvent, HostPerfCapabilities};
use virtio_devices::device::VirtioDevice;
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vpmu::{CounterBackingPolicy, PmuModel};

use crate::boot::KernelSource;
use crate::control::server::VmControlInterface;
use crate::devices::DeviceBus;
use crate::kvm::host;
use crate::pmu::{GuestSamplingContext, PmuConfig, VmPmu};
use crate::vcpu::kick;
use crate::vm::restore::{RestoredMachine, RestoredMemory};
use crate::vm::save::VmSnapshot;
use crate::vm::{RunningVm, Vm, VmConfig};

/// Guest-physical address of the guest code, which runs in 32-bit mode without paging.
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

/// Starts a VM with two vCPUs and a guest that halts forever. The guest has an Intel PMU with the
/// clock backing, which counts by CPU time. Without KVM, prints a message and returns `None`.
pub(crate) fn halted_vm() -> Option<RunningVm> {
    // Guest code `hlt; jmp` to the start.
    vm(&[0xF4, 0xEB, 0xFD], |_| ())
}

/// Starts a VM whose guest executes `code`, or returns `None` without KVM. `change` can modify the
/// configuration.
pub(crate) fn vm(code: &[u8], change: impl FnOnce(&mut VmConfig)) -> Option<RunningVm> {
    vm_with_devices(code, Vec::new(), change)
}

/// Starts a VM with virtio devices like [`vm`].
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
    let vm = Vm::new(
        &kvm,
        &config,
        devices,
        &HostPerfCapabilities::run(),
        Box::new(io::sink()),
    )
    .unwrap();
    Some(vm.start().unwrap())
}

/// Number of entries of each queue that [`start_device`] sets up.
pub(crate) const QUEUE_SIZE: u16 = 16;

/// Returns the guest-physical addresses of the descriptor table, the available ring and the used
/// ring of queue number `queue`, as [`start_device`] sets it up.
pub(crate) fn queue_addresses(queue: u64) -> [u64; 3] {
    [0, 0x1000, 0x2000].map(|offset| 0x20_0000 + queue * 0x4000 + offset)
}

/// Starts the first virtio device with `queues` queues, as a driver does that accepts no device
/// feature. The queues raise interrupt `vector` of vCPU 0. Returns the base address of the device's
/// BAR.
pub(crate) fn start_device(bus: &DeviceBus, vector: u8, queues: u64) -> u64 {
    let pci = bus.pci().unwrap();
    let select = |register: u32| {
        pci.write_port(0xCF8, &(1 << 31 | 1 << 11 | register).to_le_bytes());
    };
    let read = |register| {
        select(register);
        let mut value = [0; 4];
        pci.read_port(0xCFC, &mut value);
        u32::from_le_bytes(value)
    };
    let configure = |register, value: u32| {
        select(register);
        pci.write_port(0xCFC, &value.to_le_bytes());
    };
    let bar = u64::from(read(0x10));
    let write = |offset: u64, value: u64, bytes: usize| {
        assert!(pci.write_memory(bar + offset, &value.to_le_bytes()[..bytes]));
    };
    configure(4, 6);
    // The first capability is MSI-X. Entry 1 of its table is used for the queues.
    configure(read(0x34) & 0xFC, 1 << 31);
    write(0x4010, 0xFEE0_0000, 8);
    write(0x4018, vector.into(), 8);
    // Set the device status and accept VERSION_1.
    write(20, 3, 1);
    write(8, 1, 4);
    write(12, 1, 4);
    write(20, 11, 1);
    for queue in 0..queues {
        write(22, queue, 2);
        write(24, QUEUE_SIZE.into(), 2);
        write(26, 1, 2);
        for (offset, address) in [32, 40, 48].into_iter().zip(queue_addresses(queue)) {
            write(offset, address, 8);
        }
        write(28, 1, 2);
    }
    write(20, 15, 1);
    bar
}

/// Takes a snapshot of `vm`, which continues to run.
pub(crate) fn snapshot_of(vm: &RunningVm) -> RestoredMachine {
    let mut snapshot = VmSnapshot::begin(vm.snapshots(), BTreeMap::new()).unwrap();
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
    RestoredMachine {
        state,
        memory: RestoredMemory::Snapshot(memory),
        accepts_losses: false,
    }
}

/// Returns the memory file of a snapshot.
pub(crate) fn memory_file(memory: &RestoredMemory) -> &File {
    match memory {
        RestoredMemory::Snapshot(file) => file,
        RestoredMemory::Diff { .. } | RestoredMemory::Moved(_) => panic!("more than a file, or none"),
    }
}

/// Returns the configuration of a VM whose guest executes `code`.
pub(crate) fn config(code: &[u8]) -> VmConfig {
    VmConfig {
        cpus: "2".parse().unwrap(),
        ..VmConfig::new(
            KernelSource::Builtin(kernel(code).leak()),
            32 << 20,
            PmuConfig::new(PmuModel::INTEL, CounterBackingPolicy::Auto),
        )
    }
}

/// Waits until all vCPUs of `vm` are attached to perf-core, and returns the control interface of
/// the VM.
pub(crate) fn control_target(vm: &RunningVm) -> VmControlInterface {
    let control_target = VmControlInterface {
        moved_from: None,
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
        metadata: None,
        bus: vm.bus().clone(),
        symbols: vm.symbols().clone(),
        flat: true,
        memory_bytes: 32 << 20,
        balloon: None,
        snapshots: vm.snapshots().clone(),
        options: BTreeMap::new(),
        view_requests: AtomicU64::new(0),
    };
    // A vCPU that replies has attached to perf-core.
    let look = control_target.request_views();
    while !control_target.views(look).complete {
        std::thread::sleep(Duration::from_millis(1));
    }
    control_target
}

/// Returns the PMU of a VM on a host that can open the generic events in `opens`. If `opens` is
/// `None`, the host has no PMU.
pub(crate) fn pmu(opens: Option<&[&str]>, interprets_kernel: bool) -> VmPmu {
    let mut probe = HostPerfCapabilities::run();
    probe.hardware_pmu = opens.is_some();
    for GenericEvent {
        name, opens: opened, ..
    } in &mut probe.generic
    {
        *opened = opens.is_some_and(|opens| opens.contains(&name.as_str()));
    }
    let config = PmuConfig::new(PmuModel::INTEL, CounterBackingPolicy::None);
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
    VmPmu::new(
        config,
        &probe,
        None,
        interprets_kernel,
        GuestSamplingContext::new(memory, None),
    )
}
