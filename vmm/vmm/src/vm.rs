//! A virtual machine, which is created from a configuration and run until it stops.

mod config;
mod error;
mod hardware;
pub mod host_check;
pub mod migrate;
mod pending_setup;
mod plan;
pub mod restart;
pub mod restore;
pub mod save;

use std::io::Write;
use std::sync::Arc;

use arc_swap::ArcSwap;
use kernel_images::packed::CompressedKernelSymbols;
use kvm_bindings::CpuId;
use perf_core::pmu::host::HostPerfCapabilities;
use snapshot::state::SavedVcpuPmu;
use virtio_devices::device::VirtioDevice;

use crate::boot::{self, LoadedGuest};
use crate::devices::DeviceBus;
use crate::devices::cpu_plug::VcpuSet;
use crate::kvm::host::Kvm;
use crate::kvm::memslot::MemorySlots;
use crate::kvm::saved_vcpu::VcpuStateLayout;
use crate::memory::GuestRam;
use crate::memory::dirty::WriteProtector;
use crate::numbers::VcpuCountRange;
use crate::pmu::VmPmu;
use crate::vcpu::control::{VmRunControl, VmStopReason};
use crate::vcpu::kicker::Kicker;
use crate::vcpu::registry::VcpuRegistry;
use crate::vcpu::saved::cpuid_leaves;
pub use config::{DebuggerConfig, HaltPolling, ParseHaltPollingError, VmConfig};
pub use error::VmError;
use guest_patching::uncounted::UncountableEventSet;
use hardware::VmHardware;
pub use pending_setup::BackgroundKvmSetup;
use plan::{VcpuParts, VmPlan};
use restart::{GuestResetHandler, RestartContext};
use restore::{NewMachine, RestoredMachine, format_name};
use save::VmSnapshotInputs;

/// A VM that is ready to start.
pub struct Vm {
    registry: Arc<VcpuRegistry>,
    on_first_entry: Option<Box<dyn FnOnce() + Send>>,
    start: StartState,
    cpus: VcpuCountRange,
    loaded: LoadedGuest,
    slots: MemorySlots,
    hardware: VmHardware,
    restart_context: Option<RestartContext>,
    snapshots: Arc<VmSnapshotInputs>,
    /// Present vCPUs of a restored VM, and the saved PMU state of each; `None` if the VM was not
    /// restored.
    restored: Option<(VcpuSet, Vec<(u8, SavedVcpuPmu)>)>,
    free_breakpoints: usize,
}

/// Inputs with which [`Vm::boot`] and [`Vm::restore`] build a VM.
pub struct VmBuildInputs<'a> {
    /// KVM resources whose creation has already been started.
    pub begun: BackgroundKvmSetup,
    /// Handle of /dev/kvm.
    pub kvm: &'a Kvm,
    /// Configuration of the VM.
    pub config: &'a VmConfig,
    /// Virtio devices in the order of their PCI device numbers.
    pub devices: Vec<Box<dyn VirtioDevice>>,
    /// Properties of the host's perf events.
    pub probe: &'a HostPerfCapabilities,
    /// Writer for the output of the serial port.
    pub console: Box<dyn Write + Send>,
}

impl Vm {
    /// Builds the machine and loads the guest. The machine receives the virtio devices `devices`.
    /// `probe` describes the host's perf events. The output of the serial port goes to `console`.
    ///
    /// # Errors
    /// Returns a [`VmError`] with the problem and the remedy in one line.
    pub fn new(
        kvm: &Kvm,
        config: &VmConfig,
        devices: Vec<Box<dyn VirtioDevice>>,
        probe: &HostPerfCapabilities,
        console: Box<dyn Write + Send>,
    ) -> Result<Self, VmError> {
        Self::boot(VmBuildInputs {
            begun: BackgroundKvmSetup::now(),
            kvm,
            config,
            devices,
            probe,
            console,
        })
    }

    /// Builds the machine and loads the guest, like [`Vm::new`], with KVM resources whose creation
    /// has already been started. Waits until these exist.
    ///
    /// # Errors
    /// Returns a [`VmError`] with the problem and the remedy in one line.
    pub fn boot(inputs: VmBuildInputs<'_>) -> Result<Self, VmError> {
        Self::build(inputs, None)
    }

    /// Builds the machine and restores the guest from a snapshot or from another process. Ignores
    /// the guest's kernel in the configuration. The reset policy must be
    /// [`ResetPolicy::Exit`](crate::vcpu::control::ResetPolicy::Exit), because a restored VM cannot
    /// restart.
    ///
    /// # Errors
    /// Returns a [`VmError`] with the problem and the remedy in one line.
    pub fn restore(inputs: VmBuildInputs<'_>, saved: RestoredMachine) -> Result<Self, VmError> {
        Self::build(inputs, Some(saved))
    }

    /// Builds the machine, which boots a kernel unless it is restored from `saved`.
    fn build(inputs: VmBuildInputs<'_>, saved: Option<RestoredMachine>) -> Result<Self, VmError> {
        let kvm = inputs.kvm;
        PreparedVm::new(inputs, saved.as_ref())?.create_vcpus(kvm, saved)
    }

    /// Returns the guest that is loaded into memory.
    pub fn loaded(&self) -> &LoadedGuest {
        &self.loaded
    }

    /// Returns the device bus of the VM.
    pub fn bus(&self) -> &Arc<DeviceBus> {
        &self.hardware.bus
    }

    /// Returns the run state and stop reason of the VM.
    pub fn control(&self) -> &Arc<VmRunControl> {
        &self.hardware.control
    }

    /// Sets a function to call directly before the first guest instruction.
    pub fn on_first_entry(&mut self, f: Box<dyn FnOnce() + Send>) {
        self.on_first_entry = Some(f);
    }

    /// Makes [`Vm::start`] leave a restored VM paused.
    pub fn start_paused(&mut self) {
        self.start = StartState::Paused;
    }

    /// Makes [`Vm::start`] leave a restored VM paused and its devices stopped, until
    /// [`RunningVm::take_over`] is called.
    pub fn start_held(&mut self) {
        self.start = StartState::Held;
    }

    /// Starts the threads of the vCPUs that are initially present.
    ///
    /// # Errors
    /// Returns [`VmError::Vcpu`] if a thread cannot be started. In this case, all other threads are
    /// stopped.
    pub fn start(self) -> Result<RunningVm, VmError> {
        let symbols = Arc::new(ArcSwap::new(self.loaded.symbols.clone()));
        let restarter = self.restart_context.map(|restart_context| GuestResetHandler {
            restart_context,
            hardware: self.hardware.clone(),
            registry: self.registry.clone(),
            symbols: symbols.clone(),
            restarts: 0,
        });
        let running = RunningVm {
            restarter,
            symbols,
            registry: self.registry,
            loaded: self.loaded,
            _slots: self.slots,
            hardware: self.hardware,
            snapshots: self.snapshots,
            free_breakpoints: self.free_breakpoints,
        };
        match self.restored {
            None => running.registry.start(self.cpus.present(), self.on_first_entry)?,
            Some((present, saved)) => {
                if self.start != StartState::Held
                    && let Some(pci) = running.hardware.bus.pci()
                {
                    pci.resume();
                }
                // Keep the vCPUs paused until the states of all vCPUs are restored.
                running.hardware.control.set_paused(true);
                running.registry.start_set(present, saved, self.on_first_entry)?;
                running
                    .hardware
                    .control
                    .set_paused(self.start != StartState::Running);
            }
        }
        Ok(running)
    }
}

/// A VM whose guest is loaded into memory, and which has no vCPUs yet.
struct PreparedVm<'a> {
    plan: VmPlan<'a>,
    uncounted: Arc<UncountableEventSet>,
    loaded: LoadedGuest,
    /// Number of hardware breakpoints that RDPMC emulation uses.
    breakpoints: usize,
    slots: MemorySlots,
    supported: CpuId,
    hardware: VmHardware,
    /// `true` if RDPMC instructions that were not replaced are emulated at the guest's #GP handler.
    gate: bool,
}

impl<'a> PreparedVm<'a> {
    /// Loads or restores the guest's memory, and creates the hardware that the vCPUs share.
    fn new(mut inputs: VmBuildInputs<'a>, saved: Option<&RestoredMachine>) -> Result<Self, VmError> {
        let (kvm, config) = (inputs.kvm, inputs.config);
        let plan = VmPlan::new(kvm, config)?;
        config.pins.check(config.cpus.max())?;
        let uncounted = Arc::new(plan.uncounted(inputs.probe));
        let (ram, loaded) = plan.load_guest(saved, !inputs.devices.is_empty())?;
        let breakpoints = plan.breakpoints(&loaded)?.len();
        plan.check_kernel(kvm, &loaded)?;
        if saved.is_none() {
            plan.hide_uncounted(&uncounted, &loaded, &ram);
        }
        // Preallocation takes long, so it follows all checks of the guest.
        ram.fill()?;

        let fd = plan.take_vm(kvm, &mut inputs.begun)?;
        let slots = ram.register(&fd)?;
        let (supported, model) = plan.processor(kvm)?;
        let hardware = VmHardware::new(&plan, inputs, fd, ram, model, loaded.pci)?;
        if saved.is_none_or(|saved| !saved.is_moved()) {
            boot::write_generation_id(&hardware.ram, hardware.bus.generation().id())?;
        }
        let gate = plan.has_gate(kvm, &loaded, breakpoints)?;
        if saved.is_none() {
            let withdrawn = plan.withdraw_user_rdpmc(gate, &loaded, &hardware.ram);
            plan.log_user_rdpmc(gate, &loaded, withdrawn);
        }
        Ok(Self {
            plan,
            uncounted,
            loaded,
            breakpoints,
            slots,
            supported,
            hardware,
            gate,
        })
    }

    /// Creates the vCPUs, and writes the state of `saved` to the machine.
    fn create_vcpus(self, kvm: &Kvm, saved: Option<RestoredMachine>) -> Result<Vm, VmError> {
        let Self {
            plan,
            loaded,
            hardware,
            gate,
            ..
        } = self;
        let parts = VcpuParts {
            supported: self.supported,
            gate,
            hardware: &hardware,
            loaded: &loaded,
            saved_tsc_khz: saved.as_ref().map(|saved| saved.state.shape.tsc_khz),
            shows_steal_time: saved
                .as_ref()
                .map_or(!plan.stepped, RestoredMachine::shows_steal_time),
        };
        let vcpus = plan.make_vcpus(kvm, &parts)?;
        let factory = plan.vcpu_factory(&hardware, gate, &loaded, &self.uncounted)?;
        let layout = Arc::new(VcpuStateLayout::of(kvm, &hardware.fd)?);
        let shape = plan.shape(hardware.model, gate, &vcpus);
        if let Some(saved) = &saved {
            let machine = NewMachine {
                hardware: &hardware,
                layout: &layout,
                vcpus: &vcpus,
                shape: &shape,
                factory: &factory,
                is_stepped: plan.stepped,
            };
            machine.restore(saved)?;
        }
        let restart_context = plan.restart_context(&hardware, self.uncounted, gate, &loaded)?;
        let cpuid = vcpus.iter().map(|vcpu| cpuid_leaves(vcpu.cpuid()));
        let cpuid = (0..).zip(cpuid).collect();
        let (control, plug) = (hardware.control.clone(), hardware.bus.cpu_plug().cloned());
        let registry = Arc::new(VcpuRegistry::new(vcpus, factory, control, plug));
        let snapshots = VmSnapshotInputs {
            hardware: hardware.clone(),
            layout,
            registry: registry.clone(),
            shape,
            kernel: (format_name(&loaded.kind), loaded.kernel.clone()),
            unsupported: plan.unsupported_in_snapshot(),
            cpuid,
            protector: WriteProtector::open().map(Arc::new),
        };
        Ok(Vm {
            registry,
            on_first_entry: None,
            start: StartState::Running,
            cpus: plan.config.cpus,
            loaded,
            slots: self.slots,
            hardware,
            restart_context,
            snapshots: Arc::new(snapshots),
            restored: saved.map(RestoredMachine::into_vcpus),
            free_breakpoints: plan.free_breakpoints(self.breakpoints, gate),
        })
    }
}

/// State of a restored VM after [`Vm::start`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StartState {
    Running,
    /// The vCPUs are paused.
    Paused,
    /// The vCPUs are paused and the devices are stopped, because the VM may still run in another
    /// process.
    Held,
}

/// A VM whose vCPU threads are running. The threads are stopped on drop.
pub struct RunningVm {
    restarter: Option<GuestResetHandler>,
    symbols: Arc<ArcSwap<CompressedKernelSymbols>>,
    registry: Arc<VcpuRegistry>,
    loaded: LoadedGuest,
    _slots: MemorySlots,
    hardware: VmHardware,
    snapshots: Arc<VmSnapshotInputs>,
    free_breakpoints: usize,
}

impl RunningVm {
    /// Starts the devices and vCPUs of a VM that [`Vm::start_held`] has prepared. The VM must not
    /// run in another process any more. If `paused` is set, the vCPUs stay paused.
    pub fn take_over(&self, paused: bool) {
        if let Some(pci) = self.hardware.bus.pci() {
            save::report_claims(pci.claim());
            pci.resume();
        }
        self.hardware.control.set_paused(paused);
        self.registry.kicker().kick();
    }

    /// Returns the run state and stop reason of the VM.
    pub fn control(&self) -> &Arc<VmRunControl> {
        &self.hardware.control
    }

    /// Returns the device bus of the VM.
    pub fn bus(&self) -> &Arc<DeviceBus> {
        &self.hardware.bus
    }

    /// Returns the PMU of the VM, with the perf core that counts for operators and the guest.
    pub fn pmu(&self) -> &Arc<VmPmu> {
        &self.hardware.pmu
    }

    /// Returns the guest's memory.
    pub fn ram(&self) -> &GuestRam {
        &self.hardware.ram
    }

    /// Returns the guest that was loaded at the start.
    pub fn loaded(&self) -> &LoadedGuest {
        &self.loaded
    }

    /// Returns the symbols of the kernel that was loaded last.
    pub fn symbols(&self) -> &Arc<ArcSwap<CompressedKernelSymbols>> {
        &self.symbols
    }

    /// Returns the handler of guest resets. Returns `None` if the VM does not restart after resets,
    /// or if the handler was already taken.
    pub fn take_restarter(&mut self) -> Option<GuestResetHandler> {
        self.restarter.take()
    }

    /// Returns the number of hardware breakpoints that a debugger can use, because RDPMC emulation
    /// does not need them.
    pub fn free_breakpoints(&self) -> usize {
        self.free_breakpoints
    }

    /// Returns the parts of the VM that a snapshot needs.
    pub fn snapshots(&self) -> &Arc<VmSnapshotInputs> {
        &self.snapshots
    }

    /// Returns the vCPU registry.
    pub fn registry(&self) -> &Arc<VcpuRegistry> {
        &self.registry
    }

    /// Returns the kicker, with which every vCPU can be made to check its run state.
    pub fn kicker(&self) -> &Kicker {
        self.registry.kicker()
    }

    /// Stops the vCPUs if they still run, and waits until their threads have ended.
    pub fn stop_and_join(&mut self) {
        if self.kicker().is_empty() {
            return;
        }
        if self.hardware.control.reason().is_none() {
            self.hardware.control.stop(VmStopReason::Operator);
        }
        self.kicker().join();
        // No vCPU uses the devices any more. The device threads finish pending requests and exit.
        if let Some(pci) = self.hardware.bus.pci() {
            pci.reset();
        }
    }
}

impl Drop for RunningVm {
    fn drop(&mut self) {
        self.stop_and_join();
    }
}
