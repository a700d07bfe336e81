//! Derives settings from the configuration of a VM. Creates the PMU, the vCPUs, the PCI bus and the
//! RDPMC emulation of the VM with these settings.

use std::io::{self, Write};
use std::sync::Arc;

use guest_patching::hwbp::{self, HardwareBreakpointError};
use guest_patching::rdpmc::RdpmcMode;
use guest_patching::running::RunningKernelPatcher;
use guest_patching::sites::RdpmcSites;
use guest_patching::uncounted::UncountableEventSet;
use kvm_bindings::CpuId;
use perf_core::branch::BranchFilter;
use perf_core::error_line;
use perf_core::pmu::host::HostPerfCapabilities;
use snapshot::state::SavedMachineProperties;
use virtio_devices::device::{DeviceFailureCallback, VirtioDevice};
use virtio_devices::transport::bus::PciBus;
use virtio_devices::transport::machine::PciBackend;
use vm_memory::{Bytes, GuestAddress};
use vpmu::{CounterBackingPolicy, HostPmuProperties, PmuGeneration, PmuModel};

use super::config::VmConfig;
use super::error::VmError;
use super::hardware::VmHardware;
use super::pending_setup::BackgroundKvmSetup;
use super::restart::RestartContext;
use super::restore::{RestoredMachine, is_same_tsc};
use crate::boot::{self, BootError, GuestLoadParams, KernelFormat, LoadedGuest, layout};
use crate::devices::{DeviceBus, ports};
use crate::kvm::call::KvmIoctlError;
use crate::kvm::chips::IrqchipState;
use crate::kvm::cpuid::{self, GuestCpuidConfig};
use crate::kvm::execution;
use crate::kvm::host::Kvm;
use crate::kvm::host::{self, VirtualizationMethod};
use crate::kvm::initial_state::InitialVcpuState;
use crate::kvm::misc_enable;
use crate::kvm::msr_filter::{self, MsrFilterError};
use crate::kvm::pci_backend::KvmPciBackend;
use crate::kvm::stats_fd::stats_fd;
use crate::kvm::stepping::{self, BREAKPOINTS};
use crate::kvm::vm_fd::VmFd;
use crate::kvm::vpmu_probe::{self, KvmPmuCapabilities};
use crate::memory::GuestRam;
use crate::pmu::countable::CountableKernelEvents;
use crate::pmu::{GuestSamplingContext, KvmVpmu, PmuConfig, VmPmu};
use crate::vcpu::control::{ResetPolicy, VmRunControl, VmStopReason};
use crate::vcpu::debugger::Debugger;
use crate::vcpu::factory::{RdpmcConfig, StepperConfig, VcpuFactory};
use crate::vcpu::kvm_vcpu::KvmVcpu;

/// Environment variable that disables the straight-line runs of the exact backing, so that every
/// instruction is single-stepped. For comparing the two methods.
const WITHOUT_RUNS: &str = "PERFVISOR_EXACT_WITHOUT_RUNS";

/// Settings derived from a VM configuration.
pub(super) struct VmPlan<'a> {
    pub(super) config: &'a VmConfig,
    /// `true` if the guest has a PMU.
    pub(super) has_pmu: bool,
    /// `true` if the VMM emulates the PMU registers and RDPMC, `false` without a PMU or if KVM's
    /// own vPMU does.
    pub(super) traps: bool,
    /// `true` if RDPMC instructions in the kernel's text are replaced.
    pub(super) replaces: bool,
    /// `true` if the exact backing is used, which counts by single-stepping.
    pub(super) stepped: bool,
}

/// Inputs with which the vCPUs of a VM are created in KVM.
pub(super) struct VcpuParts<'a> {
    pub(super) supported: CpuId,
    pub(super) gate: bool,
    pub(super) hardware: &'a VmHardware,
    pub(super) loaded: &'a LoadedGuest,
    /// TSC frequency in kHz of the machine from which a VM is restored; `None` if the VM is not
    /// restored.
    pub(super) saved_tsc_khz: Option<u32>,
    /// `true` if CPUID enumerates KVM's steal time record.
    pub(super) shows_steal_time: bool,
}

impl<'a> VmPlan<'a> {
    pub(super) fn new(kvm: &'a Kvm, config: &'a VmConfig) -> Result<Self, VmError> {
        let limit = host::max_vcpu_count(kvm);
        if usize::from(config.cpus.max()) > limit {
            return Err(VmError::TooManyVcpus {
                asked: config.cpus.max(),
                limit,
            });
        }
        Ok(Self::of(config))
    }

    pub(super) fn of(config: &'a VmConfig) -> Self {
        let has_pmu = !matches!(config.pmu.model.generation(), PmuGeneration::Off(_));
        let traps = has_pmu && config.own_pmu.is_none();
        Self {
            config,
            has_pmu,
            traps,
            replaces: traps && matches!(config.rdpmc, RdpmcMode::Auto | RdpmcMode::Trap),
            stepped: has_pmu && config.pmu.policy == CounterBackingPolicy::Exact,
        }
    }

    /// Returns the factory that creates the vCPUs of the loaded guest.
    pub(super) fn vcpu_factory(
        &self,
        hardware: &VmHardware,
        gate: bool,
        loaded: &LoadedGuest,
        uncounted: &Arc<UncountableEventSet>,
    ) -> Result<VcpuFactory, VmError> {
        let VmHardware { fd, model, pmu, .. } = hardware;
        let breakpoints = self.breakpoints(loaded)?;
        let gate = gate && breakpoints.len() < BREAKPOINTS;
        let stepping = StepperConfig {
            vendor: model.vendor(),
            host: self.config.pmu.stepping,
            is_only_vcpu: self.config.cpus.max() == 1,
            without_runs: std::env::var_os(WITHOUT_RUNS).is_some(),
            syncs_registers: fd.syncs_registers(),
        };
        Ok(VcpuFactory {
            vm: fd.clone(),
            bus: hardware.bus.clone(),
            pmu: pmu.clone(),
            control: hardware.control.clone(),
            memory: hardware.ram.memory().clone(),
            breakpoints,
            debug_control: (model.debug_control_bits() != 0).then_some(*model),
            rdpmc: self.rdpmc_parts(loaded, &hardware.ram, gate, uncounted),
            stepper: self.stepped.then(|| stepping.clone()),
            bursts: pmu
                .check_branches(BranchFilter::KERNEL)
                .is_ok()
                .then_some(stepping),
            entry: loaded.entry,
            pins: self.config.pins.clone(),
        })
    }

    /// Creates the run control of the VM, with debugger support if configured.
    pub(super) fn make_control(&self, kvm: &Kvm) -> io::Result<VmRunControl> {
        let control = VmRunControl::new(self.config.on_reset)?;
        let Some(wanted) = self.config.debugger else {
            return Ok(control);
        };
        let blocks = stepping::blocks_interrupts(kvm);
        let debugger = Debugger::new(self.config.cpus.max(), blocks)?;
        let control = control.with_debugger(Some(debugger));
        if wanted.wait
            && let Some(debugger) = control.debugger()
        {
            debugger.stop_vcpus(&control);
        }
        Ok(control)
    }

    pub(super) fn boot_request(&self, pci: bool) -> GuestLoadParams<'a> {
        GuestLoadParams {
            kernel: &self.config.kernel,
            protocol: self.config.boot_protocol,
            initrd: self.config.initrd.as_deref(),
            cmdline: &self.config.cmdline,
            cpus: self.config.cpus,
            pci,
            patch_rdpmc: self.replaces,
        }
    }

    /// Loads the guest's kernel into new guest RAM, or restores both from `saved`. If `has_devices`
    /// is set, the machine has a PCI bus.
    pub(super) fn load_guest(
        &self,
        saved: Option<&RestoredMachine>,
        has_devices: bool,
    ) -> Result<(GuestRam, LoadedGuest), VmError> {
        let config = self.config;
        if let Some(saved) = saved {
            return saved.load(config);
        }
        let ram = GuestRam::with_backing(config.memory_bytes, config.memory_kind)?;
        let loaded = boot::load(&ram, &self.boot_request(has_devices))?;
        Ok((ram, loaded))
    }

    /// Returns the linear addresses of the RDPMC instructions that are emulated with hardware
    /// breakpoints.
    pub(super) fn breakpoints(&self, loaded: &LoadedGuest) -> Result<Vec<u64>, HardwareBreakpointError> {
        if self.config.rdpmc == RdpmcMode::Hwbp && self.traps {
            hwbp::addresses(&loaded.rdpmc_sites, self.config.pmu.stepping.breakpoints)
        } else {
            Ok(Vec::new())
        }
    }

    /// Returns the inputs for restarting the VM after a reset, or `None` if a reset stops it. The
    /// interrupt controllers must be in their initial state.
    pub(super) fn restart_context(
        &self,
        hardware: &VmHardware,
        uncounted: Arc<UncountableEventSet>,
        gate: bool,
        loaded: &LoadedGuest,
    ) -> Result<Option<RestartContext>, VmError> {
        if self.config.on_reset == ResetPolicy::Exit {
            return Ok(None);
        }
        Ok(Some(RestartContext {
            config: self.config.clone(),
            uncounted,
            gate,
            needs_full_kvm: needs_full_kvm(&loaded.kind),
            chips: IrqchipState::of(&hardware.fd)?,
        }))
    }

    /// Returns the number of hardware breakpoints that are left for a debugger if RDPMC emulation
    /// uses `breakpoints` of them.
    pub(super) fn free_breakpoints(&self, breakpoints: usize, gate: bool) -> usize {
        match self.config.rdpmc {
            // The trap at the #GP handler of a kernel that is found later may need one more.
            RdpmcMode::Hwbp => BREAKPOINTS.saturating_sub(breakpoints + usize::from(gate)),
            _ => BREAKPOINTS,
        }
    }

    /// Checks that this host's KVM can run the kernel.
    pub(super) fn check_kernel(&self, kvm: &Kvm, loaded: &LoadedGuest) -> Result<(), VmError> {
        self.check_rdpmc(&loaded.kind)?;
        if !needs_full_kvm(&loaded.kind) {
            return Ok(());
        }
        if execution::probe(kvm)?.interprets_kernels {
            return Err(BootError::NeedsFullKvm {
                flavour: VirtualizationMethod::SoftwareOnly.to_string(),
            }
            .into());
        }
        Ok(())
    }

    /// Removes events that this VM cannot count from the event tables of a loaded Linux kernel.
    pub(super) fn hide_uncounted(
        &self,
        uncounted: &UncountableEventSet,
        loaded: &LoadedGuest,
        ram: &GuestRam,
    ) {
        if self.has_pmu && needs_full_kvm(&loaded.kind) {
            uncounted.log(&uncounted.hide(ram.memory(), &loaded.event_tables));
            uncounted.hide_topdown(ram.memory(), &loaded.topdown);
        }
    }

    /// Checks that the guest's kernel can read its counters. Linux reads counters only with RDPMC
    /// at CPL 0, which KVM does not support for the guest while its own vPMU is disabled.
    pub(super) fn check_rdpmc(&self, kind: &KernelFormat) -> Result<(), VmError> {
        let unserved = self.traps && self.config.rdpmc == RdpmcMode::Off;
        if unserved && needs_full_kvm(kind) {
            return Err(VmError::RdpmcOff);
        }
        Ok(())
    }

    /// Returns the CPUID leaves that KVM supports for this VM. Also returns the PMU model, which
    /// depends on some of these features.
    pub(super) fn processor(&self, kvm: &Kvm) -> Result<(CpuId, PmuModel), VmError> {
        let mut supported = cpuid::supported(kvm)?;
        let execution = execution::probe(kvm)?;
        // TSX adds bits to the event selects, so the PMU model must have it if and only if CPUID
        // enumerates it.
        if execution.interprets_kernels && !execution.shows_hidden_transactions {
            cpuid::hide_transactions(&mut supported);
        }
        let mut model = self.config.pmu.model;
        if cpuid::has_transactions(&supported) {
            model = model.with_transactions();
        }
        Ok((supported, model))
    }

    /// Returns the properties of this machine that a machine must have to restore its snapshots.
    pub(super) fn shape(&self, model: PmuModel, gate: bool, vcpus: &[KvmVcpu]) -> SavedMachineProperties {
        SavedMachineProperties {
            vcpus_at_start: self.config.cpus.present(),
            max_vcpus: self.config.cpus.max(),
            pmu: model.to_string(),
            tsc_khz: vcpus.first().map_or(0, KvmVcpu::tsc_khz),
            debug_exit: self.config.debug_exit,
            gp_gate: gate,
        }
    }

    /// Returns the options of this VM with which no snapshot can be taken.
    pub(super) fn unsupported_in_snapshot(&self) -> Vec<&'static str> {
        let config = self.config;
        let options = [
            // Flags in guest memory and system calls in progress may contain the stepper's trap
            // flag, if KVM does not emulate CPL 0.
            ("--backing exact", self.stepped && config.pmu.stepping.user),
            ("--backing kvm", config.own_pmu.is_some()),
            ("--rdpmc hwbp", self.traps && config.rdpmc == RdpmcMode::Hwbp),
            ("--gdb", config.debugger.is_some()),
            ("--nested", config.nested),
        ];
        let used = options.into_iter().filter(|(_, used)| *used);
        used.map(|(option, _)| option).collect()
    }

    /// Returns the VM that was created in the background, with KVM's own vPMU disabled unless the
    /// guest uses it.
    pub(super) fn take_vm(&self, kvm: &Kvm, begun: &mut BackgroundKvmSetup) -> Result<Arc<VmFd>, VmError> {
        let fd = Arc::new(begun.take_vm(kvm)?);
        if self.config.own_pmu.is_none() && !host::disable_kvm_vpmu(kvm, &fd)? {
            log::debug!("KVM_PMU_CAP_DISABLE is not offered; the MSR filter alone keeps KVM's PMU away");
        }
        Ok(fd)
    }

    /// Creates the PMU of the VM. Sets up which accesses to PMU registers exit to it.
    pub(super) fn make_pmu(
        &self,
        kvm: &Kvm,
        model: PmuModel,
        probe: &HostPerfCapabilities,
        fd: &Arc<VmFd>,
        ram: &GuestRam,
    ) -> Result<Arc<VmPmu>, VmError> {
        let config = PmuConfig {
            model,
            ..self.config.pmu.clone()
        };
        let pmu = VmPmu::new(
            config,
            probe,
            statistics(&**fd),
            execution::probe(kvm)?.interprets_kernels,
            GuestSamplingContext::new(ram.memory().clone(), self.config.kernel_reader.clone()),
        );
        let pmu = match self.config.own_pmu {
            Some(offered) => pmu.with_own(KvmVpmu::new(fd.clone(), offered)),
            None => pmu,
        };
        if self.config.own_pmu.is_none() {
            match msr_filter::install(fd, &self.config.pmu.model.trapped_msrs()) {
                // A guest without a PMU can do without the filter, because KVM then handles PMU
                // registers much like hardware.
                Err(e @ MsrFilterError::Unsupported(_)) if !self.has_pmu => {
                    log::info!("{}", error_line(&e));
                }
                installed => installed?,
            }
        }
        pmu.set_kvm_filter(&self.config.pmu.filter)?;
        if let Some(limit_ns) = self.config.halt_polling.limit_ns(self.config.pmu.policy) {
            limit_halt_polling(fd, limit_ns);
        }
        Ok(Arc::new(pmu))
    }

    pub(super) fn make_bus(
        &self,
        console: Box<dyn Write + Send>,
        fd: &Arc<VmFd>,
    ) -> Result<DeviceBus, VmError> {
        let bus = DeviceBus::new(console, self.config.memory_bytes, self.config.cpus)
            .map_err(|e| VmError::Os("making the devices", e))?;
        let bus = if self.config.debug_exit {
            bus
        } else {
            bus.without_debug_exit()
        };
        fd.connect_line(bus.serial_irq(), ports::COM1_IRQ)?;
        let vm = fd.clone();
        bus.connect_sci_to(Box::new(move |level| {
            if let Err(e) = vm.set_line(boot::SCI_IRQ.into(), level) {
                log::error!("{}", error_line(&e));
            }
        }));
        if let Some(plug) = bus.cpu_plug() {
            fd.connect_line(plug.interrupt(), ports::CPU_PLUG_IRQ)?;
        }
        fd.connect_line(bus.generation().interrupt(), ports::GENERATION_IRQ)?;
        Ok(bus)
    }

    /// Adds a PCI bus with `devices`, if the guest's ACPI tables describe a PCI bus.
    pub(super) fn add_pci(
        bus: DeviceBus,
        devices: Vec<Box<dyn VirtioDevice>>,
        told: bool,
        fd: &Arc<VmFd>,
        ram: &GuestRam,
        control: &Arc<VmRunControl>,
    ) -> Result<DeviceBus, VmError> {
        if !told {
            return Ok(bus);
        }
        let control = control.clone();
        let fatal_error_callback =
            DeviceFailureCallback::new(Arc::new(move || control.stop(VmStopReason::Failed)));
        let machine: Arc<dyn PciBackend> = Arc::new(KvmPciBackend::new(fd.clone(), fatal_error_callback));
        let pci = PciBus::new(devices, ram.memory(), layout::PCI_WINDOW, &machine)?;
        Ok(bus.with_pci(pci))
    }

    /// Returns whether RDPMC instructions that were not replaced are emulated at the guest's #GP
    /// handler. Requires a free hardware breakpoint, a KVM on which RDPMC faults, and another
    /// backing than exact. For a kernel other than Linux, the operator must also have requested the
    /// emulation.
    pub(super) fn has_gate(
        &self,
        kvm: &Kvm,
        loaded: &LoadedGuest,
        breakpoints: usize,
    ) -> Result<bool, VmError> {
        let asked = match self.config.rdpmc {
            RdpmcMode::Auto => needs_full_kvm(&loaded.kind),
            RdpmcMode::Trap | RdpmcMode::Hwbp => true,
            RdpmcMode::Off => false,
        };
        // Probing for faults creates a VM, so it runs only if the result matters.
        let faults = self.traps && asked && host::rdpmc_faults(kvm)?;
        Ok(faults && !self.stepped && breakpoints < BREAKPOINTS)
    }

    /// Makes a Linux kernel report that programs may not use RDPMC (`cap_user_rdpmc`), if RDPMC in
    /// programs is not emulated. Programs that respect this read counters with read(2) instead.
    /// Returns `true` if the kernel was changed.
    pub(super) fn withdraw_user_rdpmc(&self, gate: bool, loaded: &LoadedGuest, ram: &GuestRam) -> bool {
        if gate || !self.traps || !needs_full_kvm(&loaded.kind) {
            return false;
        }
        let Some(at) = loaded.user_rdpmc.map(GuestAddress) else {
            return false;
        };
        ram.memory().read_obj::<u32>(at).ok() == Some(1) && ram.memory().write_obj(0u32, at).is_ok()
    }

    /// Logs that RDPMC in programs of a Linux guest is not emulated, and whether the kernel
    /// nevertheless reports that programs may use it.
    pub(super) fn log_user_rdpmc(&self, gate: bool, loaded: &LoadedGuest, withdrawn: bool) {
        if gate || !self.traps || !needs_full_kvm(&loaded.kind) {
            return;
        }
        let effect = if self.stepped {
            "get SIGSEGV: --backing exact does not emulate it"
        } else {
            "read counters that do not count: this host's KVM answers it (AMD-V in Linux 6.1; fixed in 6.12), or no breakpoint is free"
        };
        let remedy = if withdrawn {
            "the kernel does not announce it (cap_user_rdpmc is 0)"
        } else {
            "`echo 0 >/sys/bus/event_source/devices/cpu/rdpmc` in the guest makes them use read(2)"
        };
        log::warn!("programs of the guest that use RDPMC {effect}; {remedy}");
    }

    /// Returns the properties of the guest's vCPUs from which the CPUID table is built.
    pub(super) fn guest_cpuid<'m>(
        &'m self,
        model: &'m PmuModel,
        fd: &VmFd,
        tsc_khz: u32,
        gate: bool,
        shows_steal_time: bool,
    ) -> GuestCpuidConfig<'m> {
        let config = self.config;
        GuestCpuidConfig {
            pmu: model,
            backability: config.backability,
            cpus: config.cpus.max(),
            tsc_khz,
            tsc_deadline: fd.has_tsc_deadline(),
            nested: config.nested,
            signature: config.cpu_signature,
            shows_steal_time,
            enters_handlers: gate || self.stepped,
        }
    }

    /// Creates all vCPUs that the VM may have in KVM, and configures them.
    pub(super) fn make_vcpus(&self, kvm: &Kvm, parts: &VcpuParts<'_>) -> Result<Vec<KvmVcpu>, VmError> {
        let ids = 0..self.config.cpus.max();
        ids.map(|id| self.make_vcpu(kvm, parts, id)).collect()
    }

    /// Creates vCPU `id` in KVM and configures it.
    fn make_vcpu(&self, kvm: &Kvm, parts: &VcpuParts<'_>, id: u8) -> Result<KvmVcpu, VmError> {
        let config = self.config;
        let VmHardware { fd, model, pmu, .. } = parts.hardware;
        let vcpu = fd
            .create_vcpu(id)
            .map_err(|e| vcpu_error(e, config.own_pmu.as_ref()))?;
        let host_khz = vcpu.get_tsc_khz()?;
        let saved_khz = parts.saved_tsc_khz.filter(|saved| is_same_tsc(*saved, host_khz));
        let tsc_khz = saved_khz.unwrap_or(host_khz);
        let cpu = self.guest_cpuid(model, fd, tsc_khz, parts.gate, parts.shows_steal_time);
        let table = cpuid::for_vcpu(&parts.supported, cpu, id)?;
        vcpu.set_cpuid2(&table)?;
        if config.own_pmu.is_some() {
            vpmu_probe::set_capabilities(kvm, &vcpu, &config.pmu.model)?;
        } else if model.intel_version() > 0 && !misc_enable::announce_pmu(&vcpu)? {
            log::info!(
                "this host's KVM does not allow setting IA32_MISC_ENABLE; bit 7 does not \
                 show the PMU"
            );
        }
        boot::configure_local_apic(&vcpu)?;
        if id == 0 {
            parts.loaded.configure_bsp(&vcpu)?;
        }
        if let Some(stats) = statistics(&vcpu) {
            pmu.add_statistics(id, stats);
        }
        let restarts = config.on_reset == ResetPolicy::Restart;
        let first = if restarts || config.cpus.can_change() && id > 0 {
            Some(InitialVcpuState::of(kvm, &vcpu)?)
        } else {
            None
        };
        Ok(KvmVcpu::new(id, vcpu, tsc_khz, table, first))
    }

    /// Returns the events to hide from the guest's kernel, because they cannot be counted.
    pub(super) fn uncounted(&self, probe: &HostPerfCapabilities) -> UncountableEventSet {
        let VmConfig { pmu, backability, .. } = self.config;
        let hides = self.config.hide_uncounted;
        let host = HostPmuProperties::vendor(&mut cpuid::read_host);
        let countable = CountableKernelEvents::new(&pmu.model, host, pmu.policy, *backability, probe.clone());
        let countable = if pmu.hides_denied {
            countable.with_filter(pmu.filter.clone())
        } else {
            countable
        };
        UncountableEventSet::new(pmu.model.vendor(), Box::new(countable), hides)
    }

    /// Returns the parameters of RDPMC emulation, or `None` if the VMM does not emulate RDPMC.
    pub(super) fn rdpmc_parts(
        &self,
        loaded: &LoadedGuest,
        ram: &GuestRam,
        gate: bool,
        uncounted: &Arc<UncountableEventSet>,
    ) -> Option<RdpmcConfig> {
        if !self.traps || self.config.rdpmc == RdpmcMode::Off {
            return None;
        }
        let linux = needs_full_kvm(&loaded.kind);
        let planted = self.replaces.then(Arc::default);
        let sites = RdpmcSites::new(if self.replaces { &loaded.rdpmc_sites } else { &[] });
        let running = (self.replaces && linux).then(|| {
            Arc::new(RunningKernelPatcher::new(
                ram.memory().clone(),
                sites.clone(),
                loaded.text.clone(),
                &loaded.rdpmc_sites,
                gate,
                uncounted.clone(),
            ))
        });
        Some(RdpmcConfig {
            linux,
            sites,
            gate: gate.then(|| (planted, loaded.symbols.clone())),
            running,
        })
    }
}

/// Converts an error of KVM_CREATE_VCPU. While events count guests, KVM rejects the first vCPU of a
/// VM with a mediated vPMU.
fn vcpu_error(error: KvmIoctlError, own: Option<&KvmPmuCapabilities>) -> VmError {
    match own {
        Some(own) if own.mediated && error.errno() == libc::EBUSY => VmError::PmuTaken,
        _ => error.into(),
    }
}

/// Returns whether a kernel of this format needs a KVM that does not interpret CPL 0. Linux does,
/// because it uses instructions that KVM's emulator lacks.
pub(super) fn needs_full_kvm(kind: &KernelFormat) -> bool {
    kind.is_linux()
}

/// Returns the descriptor of KVM's binary statistics of a VM or a vCPU. Returns `None` on kernels
/// before 5.14, which have no binary statistics. Events that the statistics count are then
/// unsupported.
pub(super) fn statistics(of: &impl std::os::fd::AsRawFd) -> Option<std::os::fd::OwnedFd> {
    stats_fd(of)
        .inspect_err(|e| log::info!("KVM_GET_STATS_FD: {e}"))
        .ok()
}

/// Limits the time that a halted vCPU polls. Without the limit, the time would count as guest
/// cycles.
fn limit_halt_polling(vm: &VmFd, limit_ns: u32) {
    if let Err(e) = vm.limit_halt_polling(limit_ns) {
        log::info!(
            "{}; cycles of an idle guest may include halt polling",
            error_line(&e)
        );
    }
}

#[cfg(test)]
mod tests {
    use vpmu::{ArchEventSet, HostPmuProperties, Vendor};

    use super::*;
    use crate::testing;

    /// Only a mediated vPMU needs the host's PMU exclusively. If the PMU is in use, the error names
    /// everything that may use it.
    #[test]
    fn busy_vcpu_of_mediated_vm_names_holders_of_pmu() {
        let line = |mediated, errno| {
            let own = KvmPmuCapabilities {
                mediated,
                masked_filter: true,
                filter: true,
                pmu: HostPmuProperties {
                    generation: PmuGeneration::AmdV2,
                    general: 6,
                    fixed_bitmap: 0,
                    width: 48,
                },
                events: ArchEventSet::NONE,
            };
            let error = KvmIoctlError::with_errno("KVM_CREATE_VCPU", errno);
            error_line(&vcpu_error(error, Some(&own)))
        };
        let taken = line(true, libc::EBUSY);
        for holder in ["kernel.nmi_watchdog=0", "perf on the host", "--backing hardware"] {
            assert!(taken.contains(holder), "{taken}");
        }
        for (mediated, errno) in [(true, libc::EINVAL), (false, libc::EBUSY)] {
            assert!(line(mediated, errno).starts_with("KVM_CREATE_VCPU failed"));
        }
    }

    /// A VM with `--nested` cannot be saved, because a vCPU in a nested guest would be restored
    /// without its nested state. A guest without `--nested` has no nested state, because KVM
    /// rejects EFER.SVME and CR4.VMXE.
    #[test]
    fn snapshot_excludes_nested_state() {
        let mut config = testing::config(&[]);
        assert!(VmPlan::of(&config).unsupported_in_snapshot().is_empty());
        config.nested = true;
        assert_eq!(VmPlan::of(&config).unsupported_in_snapshot(), ["--nested"]);
    }

    /// A VM whose stepper uses the trap flag cannot be saved, because the flag may be in guest
    /// memory. With a KVM that emulates CPL 0, the stepper does not need the flag.
    #[test]
    fn snapshot_excludes_exact_backing_with_trap_flags() {
        let mut config = testing::config(&[]);
        config.pmu.policy = CounterBackingPolicy::Exact;
        assert!(VmPlan::of(&config).unsupported_in_snapshot().is_empty());
        config.pmu.stepping.user = true;
        assert_eq!(VmPlan::of(&config).unsupported_in_snapshot(), ["--backing exact"]);
    }

    /// A Linux kernel is rejected if RDPMC is not emulated, because the kernel would crash when it
    /// first reads a counter.
    #[test]
    fn rdpmc_off_refuses_linux_with_emulated_pmu() {
        let mut config = testing::config(&[]);
        for rdpmc in [RdpmcMode::Off, RdpmcMode::Auto, RdpmcMode::Trap, RdpmcMode::Hwbp] {
            config.rdpmc = rdpmc;
            let refused = |kind| VmPlan::of(&config).check_rdpmc(&kind).is_err();
            assert_eq!(
                refused(KernelFormat::Vmlinux),
                rdpmc == RdpmcMode::Off,
                "{rdpmc:?}"
            );
            let compression = "gzip";
            assert_eq!(
                refused(KernelFormat::BzImage { compression }),
                rdpmc == RdpmcMode::Off,
                "{rdpmc:?}"
            );
            assert!(!refused(KernelFormat::Multiboot) && !refused(KernelFormat::Pvh));
        }
    }

    #[test]
    fn rdpmc_off_is_accepted_for_linux_without_pmu() {
        let mut config = testing::config(&[]);
        config.pmu.model = PmuModel::off(Vendor::Amd);
        assert!(VmPlan::of(&config).check_rdpmc(&KernelFormat::Vmlinux).is_ok());
    }
}
