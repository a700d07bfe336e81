//! A virtual machine: created from a configuration and run until it ends.

mod config;
mod error;
mod pending_setup;
mod plan;
pub mod restart;

use std::io::Write;
use std::sync::Arc;

use arc_swap::ArcSwap;
use kernel_images::packed::PackedSymbols;
use perf_core::pmu::host::HostProbe;
use virtio_devices::device::VirtioDevice;

use crate::boot::{self, LoadedGuest};
use crate::devices::Bus;
use crate::kvm::chips::IrqchipState;
use crate::kvm::cpuid::{self};
use crate::kvm::host::{self, Kvm};
use crate::kvm::memslot::MemorySlots;
use crate::kvm::stepping::BREAKPOINTS;
use crate::memory::GuestRam;
use crate::numbers::VcpuNumbers;
use crate::pmu::VmPmu;
use crate::vcpu::control::{ResetPolicy, RunControl, StopReason};
use crate::vcpu::kicker::Kicker;
use crate::vcpu::kvm_vcpu::KvmVcpu;
use crate::vcpu::registry::VcpuRegistry;
pub use config::{DebuggerConfig, HaltPolling, ParseHaltPollingError, VmConfig};
pub use error::VmError;
use guest_patching::rdpmc::RdpmcMode;
pub use pending_setup::PendingKvmSetup;
use plan::{VcpuParts, VmPlan, needs_full_kvm};
use restart::{RestartContext, Restarter};

/// A VM that is ready to start.
pub struct Vm {
    registry: Arc<VcpuRegistry>,
    on_first_entry: Option<Box<dyn FnOnce() + Send>>,
    cpus: VcpuNumbers,
    bus: Arc<Bus>,
    pmu: Arc<VmPmu>,
    control: Arc<RunControl>,
    loaded: LoadedGuest,
    slots: MemorySlots,
    ram: GuestRam,
    again: Option<RestartContext>,
    free_breakpoints: usize,
}

impl Vm {
    /// Builds the machine and loads the guest. `devices` become its virtio devices, `probe`
    /// describes the host's perf events, and `console` receives the serial port's output.
    ///
    /// # Errors
    /// Returns a [`VmError`] with the problem and the remedy in one line.
    pub fn new(
        kvm: &Kvm,
        config: &VmConfig,
        devices: Vec<Box<dyn VirtioDevice>>,
        probe: &HostProbe,
        console: Box<dyn Write + Send>,
    ) -> Result<Self, VmError> {
        Self::with_pending_setup(PendingKvmSetup::now(), kvm, config, devices, probe, console)
    }

    /// [`Vm::new`] with KVM resources whose creation was started earlier. Joins the threads that
    /// create them.
    ///
    /// # Errors
    /// Returns a [`VmError`] with the problem and the remedy in one line.
    pub fn with_pending_setup(
        begun: PendingKvmSetup,
        kvm: &Kvm,
        config: &VmConfig,
        devices: Vec<Box<dyn VirtioDevice>>,
        probe: &HostProbe,
        console: Box<dyn Write + Send>,
    ) -> Result<Self, VmError> {
        let mut begun = begun;
        let plan = VmPlan::new(kvm, config)?;
        config.pins.check(config.cpus.max())?;
        let ram = GuestRam::with_backing(config.memory_bytes, config.memory_kind)?;
        let loaded = boot::load(&ram, &plan.boot_request(!devices.is_empty()))?;
        let breakpoints = plan.breakpoints(&loaded)?;
        let uncounted = Arc::new(plan.uncounted(probe));
        plan.check_kernel(kvm, &uncounted, &loaded, &ram)?;
        // Preallocation takes long, so it follows all checks of the guest.
        ram.fill()?;

        let fd = plan.take_vm(kvm, &mut begun)?;
        let slots = ram.register(&fd)?;
        let mut supported = cpuid::supported(kvm)?;
        if host::interprets_kernels(kvm)? {
            cpuid::hide_transactions(&mut supported);
        }
        let mut model = config.pmu.model;
        if cpuid::has_transactions(&supported) {
            model = model.with_transactions();
        }
        let pmu = plan.make_pmu(kvm, model, probe, &fd, &ram)?;
        let bus = plan.make_bus(console, &fd)?;
        let control = Arc::new(plan.make_control(kvm).map_err(|e| VmError::Os("eventfd", e))?);
        let bus = Arc::new(VmPlan::add_pci(bus, devices, loaded.pci, &fd, &ram, &control)?);
        let gate = plan.has_gate(kvm, &loaded, breakpoints.len())?;
        let withdrawn = plan.withdraw_user_rdpmc(gate, &loaded, &ram);
        plan.log_user_rdpmc(gate, &loaded, withdrawn);
        let parts = VcpuParts {
            supported,
            model,
            gate,
            pmu: &pmu,
            loaded: &loaded,
        };
        let vcpus = (0..config.cpus.max()).map(|id| plan.make_vcpu(kvm, &fd, &parts, id));
        let vcpus = vcpus.collect::<Result<Vec<KvmVcpu>, VmError>>()?;
        let factory = plan.vcpu_factory(&fd, model, gate, &loaded, &ram, &bus, &pmu, &control, &uncounted)?;
        let again = match config.on_reset {
            ResetPolicy::Exit => None,
            ResetPolicy::Restart => Some(RestartContext {
                config: config.clone(),
                uncounted,
                model,
                gate,
                needs_full_kvm: needs_full_kvm(&loaded.kind),
                chips: IrqchipState::of(&fd)?,
                fd,
            }),
        };
        let registry = VcpuRegistry::new(vcpus, factory, control.clone(), bus.cpu_plug().cloned());
        Ok(Self {
            registry: Arc::new(registry),
            on_first_entry: None,
            cpus: config.cpus,
            bus,
            pmu,
            control,
            loaded,
            slots,
            ram,
            again,
            // If breakpoints emulate RDPMC, a kernel that is found later may need one more.
            free_breakpoints: match config.rdpmc {
                RdpmcMode::Hwbp => BREAKPOINTS.saturating_sub(breakpoints.len() + usize::from(gate)),
                _ => BREAKPOINTS,
            },
        })
    }

    /// Returns the loaded guest.
    pub fn loaded(&self) -> &LoadedGuest {
        &self.loaded
    }

    /// Returns the devices.
    pub fn bus(&self) -> &Arc<Bus> {
        &self.bus
    }

    /// Returns the run state and end of the VM.
    pub fn control(&self) -> &Arc<RunControl> {
        &self.control
    }

    /// Sets a callback that runs just before the first guest instruction.
    pub fn on_first_entry(&mut self, f: Box<dyn FnOnce() + Send>) {
        self.on_first_entry = Some(f);
    }

    /// Starts the threads of the vCPUs that are present at the start.
    ///
    /// # Errors
    /// Returns [`VmError::Vcpu`] if a thread cannot be started. All others are stopped again.
    pub fn start(self) -> Result<RunningVm, VmError> {
        let symbols = Arc::new(ArcSwap::new(self.loaded.symbols.clone()));
        let restarter = self.again.map(|again| Restarter {
            again,
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
            free_breakpoints: self.free_breakpoints,
        };
        running.registry.start(self.cpus.present(), self.on_first_entry)?;
        Ok(running)
    }
}

/// A VM whose vCPU threads run. Dropping it stops them.
pub struct RunningVm {
    restarter: Option<Restarter>,
    symbols: Arc<ArcSwap<PackedSymbols>>,
    registry: Arc<VcpuRegistry>,
    loaded: LoadedGuest,
    control: Arc<RunControl>,
    bus: Arc<Bus>,
    pmu: Arc<VmPmu>,
    _slots: MemorySlots,
    ram: GuestRam,
    free_breakpoints: usize,
}

impl RunningVm {
    /// Returns the run state and end of the VM.
    pub fn control(&self) -> &Arc<RunControl> {
        &self.control
    }

    /// Returns the devices.
    pub fn bus(&self) -> &Arc<Bus> {
        &self.bus
    }

    /// Returns the perf-core side of the VM, for operators and for the guest's PMU.
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
    pub fn symbols(&self) -> &Arc<ArcSwap<PackedSymbols>> {
        &self.symbols
    }

    /// Returns the restarter that handles guest resets. Returns `None` if restarts are not
    /// configured or the restarter was already taken.
    pub fn take_restarter(&mut self) -> Option<Restarter> {
        self.restarter.take()
    }

    /// Returns the number of hardware breakpoints that RDPMC emulation leaves free.
    pub fn free_breakpoints(&self) -> usize {
        self.free_breakpoints
    }

    /// Returns the vCPU registry.
    pub fn registry(&self) -> &Arc<VcpuRegistry> {
        &self.registry
    }

    /// Returns the kicker that makes every vCPU check its run state.
    pub fn kicker(&self) -> &Kicker {
        self.registry.kicker()
    }

    /// Stops the vCPUs if they still run, and joins their threads.
    pub fn stop_and_join(&mut self) {
        if self.kicker().is_empty() {
            return;
        }
        if self.control.reason().is_none() {
            self.control.stop(StopReason::Operator);
        }
        self.kicker().join();
        // No vCPU uses the devices any more. Their threads finish pending requests and exit.
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
