//! A virtual machine: made from a configuration, run until it ends.

pub mod restart;

use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::Arc;

use arc_swap::ArcSwap;
use kernel_images::symbols::KernelSymbols;
use kvm_bindings::{CpuId, KVM_CAP_HALT_POLL, KVM_PIT_SPEAKER_DUMMY, kvm_enable_cap, kvm_pit_config};
use kvm_ioctls::{Cap, Kvm, VmFd};
use perf_core::pmu::host::HostProbe;
use virtio_devices::device::{LastResort, VirtioDevice};
use virtio_devices::transport::bus::{BusError, PciBus};
use virtio_devices::transport::machine::Machine;
use vpmu::{Backability, BackingPolicy, Generation, Model};

use crate::boot::{self, BootError, BootProtocol, BootRequest, KernelKind, KernelSource, Loaded, layout};
use crate::devices::{Bus, ports};
use crate::kernels::running::RunningKernels;
use crate::kernels::uncounted::Uncounted;
use crate::kvm::chips::{ChipError, Chips};
use crate::kvm::cpuid::{self, CpuidError, GuestCpu};
use crate::kvm::event_filter::KvmFilterError;
use crate::kvm::host::{self, Flavour, HostError};
use crate::kvm::memslot::MemorySlots;
use crate::kvm::misc_enable;
use crate::kvm::msr_filter::{self, MsrFilterError};
use crate::kvm::own_pmu::{self, OwnPmu};
use crate::kvm::pci_machine::KvmMachine;
use crate::kvm::signature::CpuSignature;
use crate::kvm::stats_fd::stats_fd;
use crate::kvm::stepping::{self, BREAKPOINTS};
use crate::memory::{GuestRam, MemoryError, MemoryKind};
use crate::numbers::VcpuNumbers;
use crate::pmu::{GuestProbe, OwnVmPmu, PmuConfig, VmPmu};
use crate::rdpmc::RdpmcMode;
use crate::rdpmc::hwbp::{self, HwbpError};
use crate::rdpmc::sites::Sites;
use crate::vcpu::affinity::{PinError, Pinning};
use crate::vcpu::control::{OnReset, RunControl, StopReason};
use crate::vcpu::debugger::Debugger;
use crate::vcpu::first_state::{FirstState, StateError};
use crate::vcpu::kicker::Kicker;
use crate::vcpu::kvm_vcpu::KvmVcpu;
use crate::vcpu::maker::{RdpmcParts, StepperParts, VcpuMaker};
use crate::vcpu::roster::{Roster, RosterError};
use restart::{Again, Restarter};

/// Why a VM could not be made.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// KVM is missing or unusable.
    #[error(transparent)]
    Host(#[from] HostError),
    /// Guest memory could not be had.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// The guest could not be loaded.
    #[error(transparent)]
    Boot(#[from] BootError),
    /// The guest's CPUID could not be made.
    #[error(transparent)]
    Cpuid(#[from] CpuidError),
    /// PMU registers cannot be trapped.
    #[error(transparent)]
    MsrFilter(#[from] MsrFilterError),
    /// RDPMC cannot be served by breakpoints.
    #[error(transparent)]
    Hwbp(#[from] HwbpError),
    /// KVM's own vPMU cannot filter events as asked.
    #[error(transparent)]
    Filter(#[from] KvmFilterError),
    /// The host's PMU is in use by events that count guests, and KVM's mediated vPMU needs it whole.
    #[error(
        "--backing kvm: the host's PMU is taken by events that count guests, and KVM's mediated vPMU needs it whole; end them (perf on \
         the host, other VMs with --backing hardware), or use --backing auto"
    )]
    PmuTaken,
    /// A vCPU could not be made.
    #[error(transparent)]
    Vcpu(#[from] RosterError),
    /// What a vCPU that can be added holds could not be read.
    #[error(transparent)]
    State(#[from] StateError),
    /// More vCPUs than this host's KVM takes.
    #[error("{asked} vCPUs: this host's KVM takes at most {limit} vCPUs in a VM")]
    TooManyVcpus {
        /// What was asked.
        asked: u8,
        /// What KVM takes.
        limit: usize,
    },
    /// A KVM call failed.
    #[error("{what} failed")]
    Kvm {
        /// The call.
        what: &'static str,
        /// Its error.
        source: kvm_ioctls::Error,
    },
    /// The kernel's file was replaced by one that needs another machine.
    #[error("the kernel is of another kind than the one that the VM began with; start a new VM for it")]
    OtherKernel,
    /// KVM's interrupt controllers or timer.
    #[error(transparent)]
    Chips(#[from] ChipError),
    /// No PCI bus can be made for the devices.
    #[error(transparent)]
    Pci(#[from] BusError),
    /// vCPUs cannot be where they are to be.
    #[error(transparent)]
    Pin(#[from] PinError),
    /// Another system call failed.
    #[error("{0} failed")]
    Os(&'static str, #[source] io::Error),
}

/// What to run.
#[derive(Clone, Debug)]
pub struct VmConfig {
    /// The kernel.
    pub kernel: KernelSource,
    /// How the kernel is entered.
    pub boot_protocol: BootProtocol,
    /// Its initrd.
    pub initrd: Option<PathBuf>,
    /// Its command line.
    pub cmdline: String,
    /// vCPUs at the start and at most.
    pub cpus: VcpuNumbers,
    /// RAM in bytes.
    pub memory_bytes: u64,
    /// How it is had from the host.
    pub memory_kind: MemoryKind,
    /// The PMU.
    pub pmu: PmuConfig,
    /// What the PMU's backing can count.
    pub backability: Backability,
    /// KVM's own vPMU, if the guest is to have that.
    pub own_pmu: Option<OwnPmu>,
    /// How RDPMC in the kernel's text is served.
    pub rdpmc: RdpmcMode,
    /// Whether perf in the guest is told what cannot be counted, by its kernel's own tables.
    pub hide_uncounted: bool,
    /// Whether a debugger may come, and whether the guest waits for it.
    pub debugger: Option<DebuggerWanted>,
    /// vCPUs that stay on one CPU of the host.
    pub pins: Pinning,
    /// Whether the guest may run guests of its own.
    pub nested: bool,
    /// What a reset of the machine by its guest leads to.
    pub on_reset: OnReset,
    /// Family, model and stepping of its processors, if not the usual ones.
    pub cpu_signature: Option<CpuSignature>,
}

/// That a debugger may come.
#[derive(Clone, Copy, Debug)]
pub struct DebuggerWanted {
    /// No vCPU runs before.
    pub wait: bool,
}

/// A VM that is ready to start.
pub struct Vm {
    roster: Arc<Roster>,
    on_first_entry: Option<Box<dyn FnOnce() + Send>>,
    cpus: VcpuNumbers,
    bus: Arc<Bus>,
    pmu: Option<Arc<VmPmu>>,
    control: Arc<RunControl>,
    loaded: Loaded,
    slots: MemorySlots,
    ram: GuestRam,
    again: Option<Again>,
    free_breakpoints: usize,
}

impl Vm {
    /// Builds the machine and loads the guest. `devices` become its virtio devices; `probe` says what the
    /// host's perf events can do; `console` takes the serial port's output.
    ///
    /// # Errors
    /// [`VmError`], one line that names what is wrong and what to do.
    pub fn new(
        kvm: &Kvm,
        config: &VmConfig,
        devices: Vec<Box<dyn VirtioDevice>>,
        probe: &HostProbe,
        console: Box<dyn Write + Send>,
    ) -> Result<Self, VmError> {
        let plan = Plan::new(kvm, config)?;
        config.pins.check(config.cpus.max())?;
        let ram = GuestRam::of_kind(config.memory_bytes, config.memory_kind)?;
        let loaded = boot::load(&ram, &plan.boot_request(!devices.is_empty()))?;
        let breakpoints = plan.breakpoints(&loaded)?;
        let uncounted = Arc::new(plan.uncounted(probe));
        plan.check_kernel(kvm, &uncounted, &loaded, &ram)?;

        let fd = plan.make_vm(kvm)?;
        let slots = ram.register(&fd)?;
        let supported = cpuid::supported(kvm)?;
        let mut model = config.pmu.model;
        if cpuid::has_transactions(&supported) {
            model = model.with_transactions();
        }
        let pmu = plan.make_pmu(kvm, model, probe, &fd, &ram)?;
        let bus = plan.make_bus(console, &fd)?;
        let control = Arc::new(plan.make_control(kvm).map_err(|e| VmError::Os("eventfd", e))?);
        let bus = Arc::new(Plan::add_pci(bus, devices, loaded.pci, &fd, &ram, &control)?);
        let gate = plan.has_gate(kvm, &loaded, breakpoints.len())?;
        let parts = VcpuParts {
            supported,
            model,
            gate,
            pmu: pmu.as_deref(),
            loaded: &loaded,
        };
        let vcpus = (0..config.cpus.max()).map(|id| plan.make_vcpu(kvm, &fd, &parts, id));
        let vcpus = vcpus.collect::<Result<Vec<KvmVcpu>, VmError>>()?;
        let maker = plan.vcpu_maker(
            &fd,
            model,
            gate,
            &loaded,
            &ram,
            &bus,
            pmu.as_ref(),
            &control,
            &uncounted,
        )?;
        let again = match config.on_reset {
            OnReset::Exit => None,
            OnReset::Restart => Some(Again {
                config: config.clone(),
                uncounted,
                model,
                gate,
                needs_full_kvm: needs_full_kvm(&loaded.kind),
                chips: Chips::of(&fd)?,
                fd,
            }),
        };
        let roster = Roster::new(vcpus, maker, control.clone(), bus.cpu_plug().cloned());
        Ok(Self {
            roster: Arc::new(roster),
            on_first_entry: None,
            cpus: config.cpus,
            bus,
            pmu,
            control,
            loaded,
            slots,
            ram,
            again,
            // Where breakpoints serve RDPMC, the kernel that is found later may need one more.
            free_breakpoints: match config.rdpmc {
                RdpmcMode::Hwbp => BREAKPOINTS.saturating_sub(breakpoints.len() + usize::from(gate)),
                _ => BREAKPOINTS,
            },
        })
    }

    /// What was loaded.
    pub fn loaded(&self) -> &Loaded {
        &self.loaded
    }

    /// The devices.
    pub fn bus(&self) -> &Arc<Bus> {
        &self.bus
    }

    /// Run state and end.
    pub fn control(&self) -> &Arc<RunControl> {
        &self.control
    }

    /// Calls `f` right before the first guest instruction.
    pub fn on_first_entry(&mut self, f: Box<dyn FnOnce() + Send>) {
        self.on_first_entry = Some(f);
    }

    /// Starts the threads of the vCPUs that are there at the start.
    ///
    /// # Errors
    /// [`VmError::Vcpu`]; threads that were started are stopped again.
    pub fn start(self) -> Result<RunningVm, VmError> {
        let symbols = Arc::new(ArcSwap::new(self.loaded.symbols.clone()));
        let restarter = self.again.map(|again| Restarter {
            again,
            ram: self.ram.clone(),
            bus: self.bus.clone(),
            pmu: self.pmu.clone(),
            control: self.control.clone(),
            roster: self.roster.clone(),
            symbols: symbols.clone(),
            restarts: 0,
        });
        let running = RunningVm {
            restarter,
            symbols,
            roster: self.roster,
            loaded: self.loaded,
            control: self.control,
            bus: self.bus,
            pmu: self.pmu,
            _slots: self.slots,
            ram: self.ram,
            free_breakpoints: self.free_breakpoints,
        };
        running.roster.start(self.cpus.present(), self.on_first_entry)?;
        Ok(running)
    }
}

/// A VM whose vCPU threads run. Dropping it stops them.
pub struct RunningVm {
    restarter: Option<Restarter>,
    symbols: Arc<ArcSwap<KernelSymbols>>,
    roster: Arc<Roster>,
    loaded: Loaded,
    control: Arc<RunControl>,
    bus: Arc<Bus>,
    pmu: Option<Arc<VmPmu>>,
    _slots: MemorySlots,
    ram: GuestRam,
    free_breakpoints: usize,
}

impl RunningVm {
    /// Run state and end.
    pub fn control(&self) -> &Arc<RunControl> {
        &self.control
    }

    /// The devices.
    pub fn bus(&self) -> &Arc<Bus> {
        &self.bus
    }

    /// The PMU, unless the guest has none.
    pub fn pmu(&self) -> Option<&Arc<VmPmu>> {
        self.pmu.as_ref()
    }

    /// The guest's memory.
    pub fn ram(&self) -> &GuestRam {
        &self.ram
    }

    /// What was loaded at the start.
    pub fn loaded(&self) -> &Loaded {
        &self.loaded
    }

    /// The symbols of the kernel that was loaded last.
    pub fn symbols(&self) -> &Arc<ArcSwap<KernelSymbols>> {
        &self.symbols
    }

    /// What starts the VM again when its guest resets it; once, and only if that is configured.
    pub fn take_restarter(&mut self) -> Option<Restarter> {
        self.restarter.take()
    }

    /// How many hardware breakpoints RDPMC leaves free.
    pub fn free_breakpoints(&self) -> usize {
        self.free_breakpoints
    }

    /// The vCPUs.
    pub fn roster(&self) -> &Arc<Roster> {
        &self.roster
    }

    /// Makes every vCPU look at its run state.
    pub fn kicker(&self) -> &Kicker {
        self.roster.kicker()
    }

    /// Stops the vCPUs, unless they have ended, and waits for their threads.
    pub fn stop_and_join(&mut self) {
        if self.kicker().is_empty() {
            return;
        }
        if self.control.reason().is_none() {
            self.control.stop(StopReason::Operator);
        }
        self.kicker().join();
        // Nobody uses the devices any more: their threads finish what was begun, and end.
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

/// A call of KVM that failed.
fn call(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> VmError {
    move |source| VmError::Kvm { what, source }
}

/// What follows from a configuration, and the machine's parts made by it.
struct Plan<'a> {
    config: &'a VmConfig,
    has_pmu: bool,
    /// PMU registers and RDPMC are ours to serve; with KVM's own vPMU they are KVM's.
    traps: bool,
    /// RDPMC is replaced in the kernel's text.
    replaces: bool,
    /// Counters count by single steps.
    stepped: bool,
}

/// What KVM's vCPUs are made with.
struct VcpuParts<'a> {
    supported: CpuId,
    model: Model,
    gate: bool,
    pmu: Option<&'a VmPmu>,
    loaded: &'a Loaded,
}

impl<'a> Plan<'a> {
    fn new(kvm: &'a Kvm, config: &'a VmConfig) -> Result<Self, VmError> {
        let limit = kvm.get_max_vcpus();
        if usize::from(config.cpus.max()) > limit {
            return Err(VmError::TooManyVcpus {
                asked: config.cpus.max(),
                limit,
            });
        }
        Ok(Self::of(config))
    }

    fn of(config: &'a VmConfig) -> Self {
        let has_pmu = !matches!(config.pmu.model.generation(), Generation::Off(_));
        let traps = has_pmu && config.own_pmu.is_none();
        Self {
            config,
            has_pmu,
            traps,
            replaces: traps && matches!(config.rdpmc, RdpmcMode::Auto | RdpmcMode::Trap),
            stepped: has_pmu && config.pmu.policy == BackingPolicy::Exact,
        }
    }

    /// What the vCPUs are made from, for the guest that was loaded.
    #[expect(
        clippy::too_many_arguments,
        reason = "all of the machine's parts come together here"
    )]
    fn vcpu_maker(
        &self,
        fd: &Arc<VmFd>,
        model: Model,
        gate: bool,
        loaded: &Loaded,
        ram: &GuestRam,
        bus: &Arc<Bus>,
        pmu: Option<&Arc<VmPmu>>,
        control: &Arc<RunControl>,
        uncounted: &Arc<Uncounted>,
    ) -> Result<VcpuMaker, VmError> {
        let breakpoints = self.breakpoints(loaded)?;
        let gate = gate && breakpoints.len() < BREAKPOINTS;
        Ok(VcpuMaker {
            vm: fd.clone(),
            bus: bus.clone(),
            pmu: pmu.cloned(),
            control: control.clone(),
            memory: ram.memory().clone(),
            breakpoints,
            keeps_debug_control: model.intel_version() >= 2,
            rdpmc: self.rdpmc_parts(loaded, ram, gate, uncounted),
            stepper: self.stepped.then(|| StepperParts {
                vendor: model.vendor(),
                host: self.config.pmu.stepping,
                alone: self.config.cpus.max() == 1,
            }),
            entry: loaded.entry,
            pins: self.config.pins.clone(),
        })
    }

    /// The run state, with a place for a debugger if one may come.
    fn make_control(&self, kvm: &Kvm) -> io::Result<RunControl> {
        let control = RunControl::new(self.config.on_reset)?;
        let Some(wanted) = self.config.debugger else {
            return Ok(control);
        };
        let blocks = stepping::blocks_interrupts(kvm);
        let debugger = Debugger::new(self.config.cpus.max(), blocks)?;
        let control = control.with_debugger(Some(debugger));
        if wanted.wait
            && let Some(debugger) = control.debugger()
        {
            debugger.hold(&control);
        }
        Ok(control)
    }

    fn boot_request(&self, pci: bool) -> BootRequest<'a> {
        BootRequest {
            kernel: &self.config.kernel,
            protocol: self.config.boot_protocol,
            initrd: self.config.initrd.as_deref(),
            cmdline: &self.config.cmdline,
            cpus: self.config.cpus,
            pci,
            patch_rdpmc: self.replaces,
        }
    }

    /// Where RDPMC is served by hardware breakpoints.
    fn breakpoints(&self, loaded: &Loaded) -> Result<Vec<u64>, HwbpError> {
        if self.config.rdpmc == RdpmcMode::Hwbp && self.traps {
            hwbp::addresses(&loaded.rdpmc_sites, self.config.pmu.stepping)
        } else {
            Ok(Vec::new())
        }
    }

    /// Whether this host's KVM runs the kernel; and the kernel is told what cannot be counted.
    fn check_kernel(
        &self,
        kvm: &Kvm,
        uncounted: &Uncounted,
        loaded: &Loaded,
        ram: &GuestRam,
    ) -> Result<(), VmError> {
        if !needs_full_kvm(&loaded.kind) {
            return Ok(());
        }
        if host::interprets_kernels(kvm)? {
            return Err(BootError::NeedsFullKvm {
                flavour: Flavour::SoftwareOnly.to_string(),
            }
            .into());
        }
        if self.has_pmu {
            uncounted.tell(&uncounted.hide(ram.memory(), &loaded.event_tables));
        }
        Ok(())
    }

    /// A VM with KVM's devices.
    #[expect(clippy::cast_possible_truncation, reason = "x86-64 only: usize has 64 bits")]
    fn make_vm(&self, kvm: &Kvm) -> Result<Arc<VmFd>, VmError> {
        let fd = Arc::new(kvm.create_vm().map_err(call("KVM_CREATE_VM"))?);
        if self.config.own_pmu.is_none()
            && !host::disable_own_pmu(kvm, &fd).map_err(call("KVM_ENABLE_CAP(KVM_CAP_PMU_CAPABILITY)"))?
        {
            log::debug!("KVM_PMU_CAP_DISABLE is not offered; the MSR filter alone keeps KVM's PMU away");
        }
        fd.set_identity_map_address(layout::KVM_IDENTITY_MAP)
            .map_err(call("KVM_SET_IDENTITY_MAP_ADDR"))?;
        fd.set_tss_address(layout::KVM_TSS as usize)
            .map_err(call("KVM_SET_TSS_ADDR"))?;
        fd.create_irq_chip().map_err(call("KVM_CREATE_IRQCHIP"))?;
        fd.create_pit2(kvm_pit_config {
            flags: KVM_PIT_SPEAKER_DUMMY,
            ..Default::default()
        })
        .map_err(call("KVM_CREATE_PIT2"))?;
        Ok(fd)
    }

    /// The PMU of the VM, and what KVM is to leave to it.
    fn make_pmu(
        &self,
        kvm: &Kvm,
        model: Model,
        probe: &HostProbe,
        fd: &Arc<VmFd>,
        ram: &GuestRam,
    ) -> Result<Option<Arc<VmPmu>>, VmError> {
        if !self.has_pmu {
            return Ok(None);
        }
        let config = PmuConfig {
            model,
            ..self.config.pmu.clone()
        };
        let pmu = VmPmu::new(
            config,
            probe,
            statistics(&**fd),
            host::interprets_kernels(kvm)?,
            GuestProbe::new(ram.memory().clone()),
        );
        let pmu = match self.config.own_pmu {
            Some(offered) => pmu.with_own(OwnVmPmu::new(fd.clone(), offered)),
            None => pmu,
        };
        if self.traps {
            msr_filter::install(fd, &self.config.pmu.model.trapped_msrs())?;
        }
        pmu.set_kvms_filter(&self.config.pmu.filter)?;
        stop_halt_polling(fd);
        Ok(Some(Arc::new(pmu)))
    }

    fn make_bus(&self, console: Box<dyn Write + Send>, fd: &Arc<VmFd>) -> Result<Bus, VmError> {
        let bus = Bus::new(console, self.config.memory_bytes, self.config.cpus)
            .map_err(|e| VmError::Os("making the devices", e))?;
        fd.register_irqfd(bus.serial_irq(), ports::COM1_IRQ)
            .map_err(call("KVM_IRQFD"))?;
        let vm = fd.clone();
        bus.lead_sci_to(Box::new(move |level| {
            if let Err(e) = vm.set_irq_line(boot::SCI_IRQ.into(), level) {
                log::error!("KVM_IRQ_LINE failed: {e}");
            }
        }));
        if let Some(plug) = bus.cpu_plug() {
            fd.register_irqfd(plug.interrupt(), ports::CPU_PLUG_IRQ)
                .map_err(call("KVM_IRQFD"))?;
        }
        Ok(bus)
    }

    /// The bus with a PCI bus that has `devices`, if the guest is told of one.
    fn add_pci(
        bus: Bus,
        devices: Vec<Box<dyn VirtioDevice>>,
        told: bool,
        fd: &Arc<VmFd>,
        ram: &GuestRam,
        control: &Arc<RunControl>,
    ) -> Result<Bus, VmError> {
        if !told {
            return Ok(bus);
        }
        let control = control.clone();
        let last_resort = LastResort::new(Arc::new(move || control.stop(StopReason::Failed)));
        let machine: Arc<dyn Machine> = Arc::new(KvmMachine::new(fd.clone(), last_resort));
        let pci = PciBus::new(devices, ram.memory(), layout::PCI_WINDOW, &machine)?;
        Ok(bus.with_pci(pci))
    }

    /// Whether RDPMC that was not replaced is served at the guest's handler of #GP. A breakpoint there needs
    /// one that is left over. What is not Linux is left as it is unless the user asks.
    fn has_gate(&self, kvm: &Kvm, loaded: &Loaded, breakpoints: usize) -> Result<bool, VmError> {
        let faults = self.traps && rdpmc_faults(kvm, &loaded.kind)?;
        Ok(faults
            && !self.stepped
            && breakpoints < BREAKPOINTS
            && match self.config.rdpmc {
                RdpmcMode::Auto => needs_full_kvm(&loaded.kind),
                RdpmcMode::Trap | RdpmcMode::Hwbp => true,
                RdpmcMode::Off => false,
            })
    }

    /// KVM's vCPU `id`, configured.
    fn make_vcpu(&self, kvm: &Kvm, fd: &VmFd, parts: &VcpuParts<'_>, id: u8) -> Result<KvmVcpu, VmError> {
        let config = self.config;
        let vcpu = fd.create_vcpu(id.into()).map_err(|e| match &config.own_pmu {
            Some(own) if own.mediated && e.errno() == libc::EBUSY => VmError::PmuTaken,
            _ => call("KVM_CREATE_VCPU")(e),
        })?;
        let tsc_khz = vcpu.get_tsc_khz().map_err(call("KVM_GET_TSC_KHZ"))?;
        let cpu = GuestCpu {
            pmu: &parts.model,
            backability: config.backability,
            cpus: config.cpus.max(),
            tsc_khz,
            tsc_deadline: fd.check_extension(Cap::TscDeadlineTimer),
            nested: config.nested,
            signature: config.cpu_signature,
            stepped: self.stepped,
            enters_handlers: parts.gate || self.stepped,
        };
        let table = cpuid::for_vcpu(&parts.supported, cpu, id)?;
        vcpu.set_cpuid2(&table).map_err(call("KVM_SET_CPUID2"))?;
        if config.own_pmu.is_some() {
            own_pmu::set_capabilities(kvm, &vcpu, &config.pmu.model).map_err(call("KVM_SET_MSRS"))?;
        } else if parts.model.intel_version() > 0
            && !misc_enable::announce_pmu(&vcpu).map_err(call("KVM_SET_MSRS(IA32_MISC_ENABLE)"))?
        {
            log::info!("this host's KVM lets no one set IA32_MISC_ENABLE; its bit 7 does not show the PMU");
        }
        boot::configure_local_apic(&vcpu)?;
        if id == 0 {
            parts.loaded.configure_bsp(&vcpu)?;
        }
        if let Some(pmu) = parts.pmu
            && let Some(stats) = statistics(&vcpu)
        {
            pmu.add_statistics(id, stats);
        }
        let restarts = config.on_reset == OnReset::Restart;
        let first = if restarts || config.cpus.can_change() && id > 0 {
            Some(FirstState::of(kvm, &vcpu)?)
        } else {
            None
        };
        Ok(KvmVcpu::new(id, vcpu, tsc_khz, table, first))
    }

    /// What the guest's kernels are told that nobody counts.
    fn uncounted(&self, probe: &HostProbe) -> Uncounted {
        let VmConfig { pmu, backability, .. } = self.config;
        let hides = self.config.hide_uncounted;
        Uncounted::new(&pmu.model, pmu.policy, *backability, probe.clone(), hides)
    }

    /// What serves RDPMC; `None`: KVM does.
    fn rdpmc_parts(
        &self,
        loaded: &Loaded,
        ram: &GuestRam,
        gate: bool,
        uncounted: &Arc<Uncounted>,
    ) -> Option<RdpmcParts> {
        if !self.traps || self.config.rdpmc == RdpmcMode::Off {
            return None;
        }
        let linux = needs_full_kvm(&loaded.kind);
        let planted = self.replaces.then(Arc::default);
        let sites = Sites::new(if self.replaces { &loaded.rdpmc_sites } else { &[] });
        let running = (self.replaces && linux).then(|| {
            Arc::new(RunningKernels::new(
                ram.memory().clone(),
                sites.clone(),
                loaded.text.clone(),
                &loaded.rdpmc_sites,
                gate,
                uncounted.clone(),
            ))
        });
        Some(RdpmcParts {
            linux,
            sites,
            gate: gate.then(|| (planted, loaded.symbols.clone())),
            running,
        })
    }
}

/// Whether a kernel of this kind needs a KVM that runs CPL 0 on the processor. Linux does: it uses
/// instructions that KVM's emulator lacks. Other kernels may do without.
fn needs_full_kvm(kind: &KernelKind) -> bool {
    kind.is_linux()
}

/// KVM's binary statistics of a VM or vCPU; kernels before 5.14 have none, and the events they back are not
/// supported.
fn statistics(of: &impl std::os::fd::AsRawFd) -> Option<std::os::fd::OwnedFd> {
    stats_fd(of)
        .inspect_err(|e| log::info!("KVM_GET_STATS_FD: {e}"))
        .ok()
}

/// Whether RDPMC outside the kernel's text faults, so that it can be served. Else programs get numbers that
/// nobody counted, and the user is told.
fn rdpmc_faults(kvm: &Kvm, kind: &KernelKind) -> Result<bool, HostError> {
    let faults = host::rdpmc_faults(kvm)?;
    if !faults && needs_full_kvm(kind) {
        log::warn!(
            "programs of the guest that use RDPMC read counters that do not count: this host's KVM answers it (AMD-V in Linux 6.1; \
             fixed in 6.12); `echo 0 >/sys/bus/event_source/devices/cpu/rdpmc` in the guest makes them use read(2)"
        );
    }
    Ok(faults)
}

/// Makes a halted vCPU sleep at once. KVM would otherwise poll for a wake-up on the vCPU thread's CPU time,
/// which the clock backing would count as guest cycles.
fn stop_halt_polling(vm: &VmFd) {
    let cap = kvm_enable_cap {
        cap: KVM_CAP_HALT_POLL,
        ..Default::default()
    };
    if let Err(e) = vm.enable_cap(&cap) {
        log::info!(
            "KVM_CAP_HALT_POLL is not offered ({e}); cycles of an idle guest may include halt polling"
        );
    }
}
