//! A virtual machine, which is created from a configuration and run until it stops.

mod config;
mod error;
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
use perf_core::pmu::host::HostPerfCapabilities;
use snapshot::state::SavedVcpuPmu;
use virtio_devices::device::VirtioDevice;

use crate::boot::{self, LoadedGuest};
use crate::devices::DeviceBus;
use crate::devices::cpu_plug::VcpuSet;
use crate::kvm::chips::IrqchipState;
use crate::kvm::cpuid;
use crate::kvm::host::Kvm;
use crate::kvm::memslot::MemorySlots;
use crate::kvm::saved_vcpu::VcpuStateLayout;
use crate::kvm::stepping::BREAKPOINTS;
use crate::memory::GuestRam;
use crate::memory::dirty::WriteProtector;
use crate::numbers::VcpuCountRange;
use crate::pmu::VmPmu;
use crate::vcpu::control::{ResetPolicy, VmRunControl, VmStopReason};
use crate::vcpu::kicker::Kicker;
use crate::vcpu::kvm_vcpu::KvmVcpu;
use crate::vcpu::registry::VcpuRegistry;
use crate::vcpu::saved::cpuid_leaf;
pub use config::{DebuggerConfig, HaltPolling, ParseHaltPollingError, VmConfig};
pub use error::VmError;
use guest_patching::rdpmc::RdpmcMode;
pub use pending_setup::BackgroundKvmSetup;
use plan::{VcpuParts, VmPlan, needs_full_kvm};
use restart::{GuestResetHandler, RestartContext};
use restore::{NewMachine, RestoredMachine, format_name};
use save::VmSnapshotInputs;

/// A VM that is ready to start.
pub struct Vm {
    registry: Arc<VcpuRegistry>,
    on_first_entry: Option<Box<dyn FnOnce() + Send>>,
    start: StartState,
    cpus: VcpuCountRange,
    bus: Arc<DeviceBus>,
    pmu: Arc<VmPmu>,
    control: Arc<VmRunControl>,
    loaded: LoadedGuest,
    slots: MemorySlots,
    ram: GuestRam,
    again: Option<RestartContext>,
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
    pub fn boot(parts: VmBuildInputs<'_>) -> Result<Self, VmError> {
        Self::build(parts, None)
    }

    /// Builds the machine and restores the guest from a snapshot or from another process. Ignores
    /// the guest's kernel in the configuration. The reset policy must be [`ResetPolicy::Exit`],
    /// because a restored VM cannot restart.
    ///
    /// # Errors
    /// Returns a [`VmError`] with the problem and the remedy in one line.
    pub fn restore(parts: VmBuildInputs<'_>, saved: RestoredMachine) -> Result<Self, VmError> {
        Self::build(parts, Some(saved))
    }

    fn build(parts: VmBuildInputs<'_>, saved: Option<RestoredMachine>) -> Result<Self, VmError> {
        let VmBuildInputs {
            mut begun,
            kvm,
            config,
            devices,
            probe,
            console,
        } = parts;
        let plan = VmPlan::new(kvm, config)?;
        config.pins.check(config.cpus.max())?;
        let uncounted = Arc::new(plan.uncounted(probe));
        let (ram, loaded) = match &saved {
            Some(saved) => saved.load(config)?,
            None => {
                let ram = GuestRam::with_backing(config.memory_bytes, config.memory_kind)?;
                let loaded = boot::load(&ram, &plan.boot_request(!devices.is_empty()))?;
                (ram, loaded)
            }
        };
        let breakpoints = plan.breakpoints(&loaded)?;
        plan.check_kernel(kvm, &loaded)?;
        if saved.is_none() {
            plan.hide_uncounted(&uncounted, &loaded, &ram);
        }
        // Preallocation takes long, so it follows all checks of the guest.
        ram.fill()?;

        let fd = plan.take_vm(kvm, &mut begun)?;
        let slots = ram.register(&fd)?;
        let (supported, model) = plan.processor(kvm)?;
        let pmu = plan.make_pmu(kvm, model, probe, &fd, &ram)?;
        let bus = plan.make_bus(console, &fd)?;
        if saved.as_ref().is_none_or(|saved| !saved.is_moved()) {
            boot::write_generation_id(&ram, bus.generation().id())?;
        }
        let control = Arc::new(plan.make_control(kvm).map_err(|e| VmError::Os("eventfd", e))?);
        let bus = Arc::new(VmPlan::add_pci(bus, devices, loaded.pci, &fd, &ram, &control)?);
        let gate = plan.has_gate(kvm, &loaded, breakpoints.len())?;
        if saved.is_none() {
            let withdrawn = plan.withdraw_user_rdpmc(gate, &loaded, &ram);
            plan.log_user_rdpmc(gate, &loaded, withdrawn);
        }
        let parts = VcpuParts {
            supported,
            model,
            gate,
            pmu: &pmu,
            loaded: &loaded,
            saved_tsc_khz: saved.as_ref().map(|saved| saved.state.shape.tsc_khz),
            shows_steal_time: saved.as_ref().map_or(!plan.stepped, |saved| {
                let first = saved.state.vcpus.first();
                first.is_some_and(|vcpu| cpuid::shows_stolen_time(&vcpu.cpuid))
            }),
        };
        let vcpus = (0..config.cpus.max()).map(|id| plan.make_vcpu(kvm, &fd, &parts, id));
        let vcpus = vcpus.collect::<Result<Vec<KvmVcpu>, VmError>>()?;
        let factory = plan.vcpu_factory(&fd, model, gate, &loaded, &ram, &bus, &pmu, &control, &uncounted)?;
        let layout = Arc::new(VcpuStateLayout::of(kvm, &fd)?);
        let shape = plan.shape(model, gate, &vcpus);
        if let Some(saved) = &saved {
            let machine = NewMachine {
                fd: &fd,
                layout: &layout,
                vcpus: &vcpus,
                bus: &bus,
                pmu: &pmu,
                shape: &shape,
                can_step: factory.bursts.is_some(),
                is_stepped: plan.stepped,
            };
            machine.restore(saved)?;
            if let Some(running) = factory.rdpmc.as_ref().and_then(|rdpmc| rdpmc.running.as_ref()) {
                running.restore(&saved.state.kernel);
            }
        }
        let again = match config.on_reset {
            ResetPolicy::Exit => None,
            ResetPolicy::Restart => Some(RestartContext {
                config: config.clone(),
                uncounted,
                model,
                gate,
                needs_full_kvm: needs_full_kvm(&loaded.kind),
                chips: IrqchipState::of(&fd)?,
                fd: fd.clone(),
            }),
        };
        let leaves = |vcpu: &KvmVcpu| vcpu.cpuid().as_slice().iter().map(cpuid_leaf).collect();
        let cpuid = (0..).zip(vcpus.iter().map(leaves)).collect();
        let registry = VcpuRegistry::new(vcpus, factory, control.clone(), bus.cpu_plug().cloned());
        let registry = Arc::new(registry);
        let snapshots = VmSnapshotInputs {
            fd,
            layout,
            ram: ram.clone(),
            bus: bus.clone(),
            pmu: pmu.clone(),
            registry: registry.clone(),
            control: control.clone(),
            shape,
            kernel: (format_name(&loaded.kind), loaded.kernel.clone()),
            unsupported: plan.unsupported_in_snapshot(),
            cpuid,
            protector: WriteProtector::open().map(Arc::new),
        };
        Ok(Self {
            registry,
            on_first_entry: None,
            start: StartState::Running,
            cpus: config.cpus,
            bus,
            pmu,
            control,
            loaded,
            slots,
            ram,
            again,
            snapshots: Arc::new(snapshots),
            restored: saved.map(RestoredMachine::into_vcpus),
            // With `--rdpmc hwbp`, the trap at the #GP handler of a kernel that is found later may
            // need one more breakpoint.
            free_breakpoints: match config.rdpmc {
                RdpmcMode::Hwbp => BREAKPOINTS.saturating_sub(breakpoints.len() + usize::from(gate)),
                _ => BREAKPOINTS,
            },
        })
    }

    /// Returns the guest that is loaded into memory.
    pub fn loaded(&self) -> &LoadedGuest {
        &self.loaded
    }

    /// Returns the device bus of the VM.
    pub fn bus(&self) -> &Arc<DeviceBus> {
        &self.bus
    }

    /// Returns the run state and stop reason of the VM.
    pub fn control(&self) -> &Arc<VmRunControl> {
        &self.control
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
        let restarter = self.again.map(|again| GuestResetHandler {
            restart_context: again,
            ram: self.ram.clone(),
            bus: self.bus.clone(),
            pmu: self.pmu.clone(),
            control: self.control.clone(),
            registry: self.registry.clone(),
            symbols: symbols.clone(),
            restarts: 0,
        });
        let running = RunningVm {
            restarter,
            symbols,
            registry: self.registry,
            loaded: self.loaded,
            control: self.control,
            bus: self.bus,
            pmu: self.pmu,
            _slots: self.slots,
            ram: self.ram,
            snapshots: self.snapshots,
            free_breakpoints: self.free_breakpoints,
        };
        match self.restored {
            None => running.registry.start(self.cpus.present(), self.on_first_entry)?,
            Some((present, saved)) => {
                if self.start != StartState::Held
                    && let Some(pci) = running.bus.pci()
                {
                    pci.resume();
                }
                // Keep the vCPUs paused until the states of all vCPUs are restored.
                running.control.set_paused(true);
                running.registry.start_set(present, saved, self.on_first_entry)?;
                running.control.set_paused(self.start != StartState::Running);
            }
        }
        Ok(running)
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
    control: Arc<VmRunControl>,
    bus: Arc<DeviceBus>,
    pmu: Arc<VmPmu>,
    _slots: MemorySlots,
    ram: GuestRam,
    snapshots: Arc<VmSnapshotInputs>,
    free_breakpoints: usize,
}

impl RunningVm {
    /// Starts the devices and vCPUs of a VM that [`Vm::start_held`] has prepared. The VM must not
    /// run in another process any more. If `paused` is set, the vCPUs stay paused.
    pub fn take_over(&self, paused: bool) {
        if let Some(pci) = self.bus.pci() {
            save::report_claims(pci.claim());
            pci.resume();
        }
        self.control.set_paused(paused);
        self.registry.kicker().kick();
    }

    /// Returns the run state and stop reason of the VM.
    pub fn control(&self) -> &Arc<VmRunControl> {
        &self.control
    }

    /// Returns the device bus of the VM.
    pub fn bus(&self) -> &Arc<DeviceBus> {
        &self.bus
    }

    /// Returns the PMU of the VM, with the perf core that counts for operators and the guest.
    pub fn pmu(&self) -> &Arc<VmPmu> {
        &self.pmu
    }

    /// Returns the guest's memory.
    pub fn ram(&self) -> &GuestRam {
        &self.ram
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
        if self.control.reason().is_none() {
            self.control.stop(VmStopReason::Operator);
        }
        self.kicker().join();
        // No vCPU uses the devices any more. The device threads finish pending requests and exit.
        if let Some(pci) = self.bus.pci() {
            pci.reset();
        }
    }
}

impl Drop for RunningVm {
    fn drop(&mut self) {
        self.stop_and_join();
    }
}
