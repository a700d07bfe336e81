//! Derives settings from a configuration and creates the machine's parts.

use std::io::{self, Write};
use std::sync::Arc;

use kvm_bindings::CpuId;
use perf_core::error_line;
use perf_core::pmu::host::HostProbe;
use snapshot::state::MachineShape;
use virtio_devices::device::{FatalErrorCallback, VirtioDevice};
use virtio_devices::transport::bus::PciBus;
use virtio_devices::transport::machine::PciBackend;
use vpmu::{BackingPolicy, Generation, PmuModel};

use super::begun::PendingKvmSetup;
use super::config::VmConfig;
use super::error::VmError;
use crate::boot::{self, BootError, BootRequest, KernelFormat, LoadedGuest, layout};
use crate::devices::{Bus, ports};
use crate::kernels::running::RunningKernelPatcher;
use crate::kernels::uncounted::UncountableEvents;
use crate::kvm::cpuid::{self, GuestCpuidConfig};
use crate::kvm::host::Kvm;
use crate::kvm::host::{self, HostError, KvmFlavour};
use crate::kvm::initial_state::InitialVcpuState;
use crate::kvm::misc_enable;
use crate::kvm::msr_filter::{self, MsrFilterError};
use crate::kvm::own_pmu::{self};
use crate::kvm::pci_backend::KvmPciBackend;
use crate::kvm::stats_fd::stats_fd;
use crate::kvm::stepping::{self, BREAKPOINTS};
use crate::kvm::vm_fd::VmFd;
use crate::memory::GuestRam;
use crate::pmu::{GuestSamplingContext, KvmVpmu, PmuConfig, VmPmu};
use crate::rdpmc::RdpmcMode;
use crate::rdpmc::hwbp::{self, HardwareBreakpointError};
use crate::rdpmc::sites::RdpmcSites;
use crate::vcpu::control::{ResetPolicy, RunControl, StopReason};
use crate::vcpu::debugger::Debugger;
use crate::vcpu::factory::{RdpmcConfig, StepperConfig, VcpuFactory};
use crate::vcpu::kvm_vcpu::KvmVcpu;

/// Environment variable that makes the exact backing step every instruction instead of entering
/// straight-line runs at once, to compare the two.
const WITHOUT_RUNS: &str = "PERFVISOR_EXACT_WITHOUT_RUNS";

/// Settings derived from a VM configuration.
pub(super) struct VmPlan<'a> {
    pub(super) config: &'a VmConfig,
    /// The guest has a PMU.
    pub(super) has_pmu: bool,
    /// The VMM emulates the PMU registers and RDPMC. With KVM's own vPMU, KVM does.
    pub(super) traps: bool,
    /// RDPMC is replaced in the kernel's text.
    pub(super) replaces: bool,
    /// Counters are backed by single-stepping.
    pub(super) stepped: bool,
}

/// Inputs for configuring KVM's vCPUs.
pub(super) struct VcpuParts<'a> {
    pub(super) supported: CpuId,
    pub(super) model: PmuModel,
    pub(super) gate: bool,
    pub(super) pmu: &'a VmPmu,
    pub(super) loaded: &'a LoadedGuest,
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

    /// Returns the vCPU factory for the loaded guest.
    #[expect(
        clippy::too_many_arguments,
        reason = "all of the machine's parts come together here"
    )]
    pub(super) fn vcpu_factory(
        &self,
        fd: &Arc<VmFd>,
        model: PmuModel,
        gate: bool,
        loaded: &LoadedGuest,
        ram: &GuestRam,
        bus: &Arc<Bus>,
        pmu: &Arc<VmPmu>,
        control: &Arc<RunControl>,
        uncounted: &Arc<UncountableEvents>,
    ) -> Result<VcpuFactory, VmError> {
        let breakpoints = self.breakpoints(loaded)?;
        let gate = gate && breakpoints.len() < BREAKPOINTS;
        Ok(VcpuFactory {
            vm: fd.clone(),
            bus: bus.clone(),
            pmu: pmu.clone(),
            control: control.clone(),
            memory: ram.memory().clone(),
            breakpoints,
            traps_debug_control: model.intel_version() >= 2,
            rdpmc: self.rdpmc_parts(loaded, ram, gate, uncounted),
            stepper: self.stepped.then(|| StepperConfig {
                vendor: model.vendor(),
                host: self.config.pmu.stepping,
                alone: self.config.cpus.max() == 1,
                without_runs: std::env::var_os(WITHOUT_RUNS).is_some(),
            }),
            entry: loaded.entry,
            pins: self.config.pins.clone(),
        })
    }

    /// Creates the run state, with debugger support if configured.
    pub(super) fn make_control(&self, kvm: &Kvm) -> io::Result<RunControl> {
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

    pub(super) fn boot_request(&self, pci: bool) -> BootRequest<'a> {
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

    /// Returns the RDPMC addresses that are emulated with hardware breakpoints.
    pub(super) fn breakpoints(&self, loaded: &LoadedGuest) -> Result<Vec<u64>, HardwareBreakpointError> {
        if self.config.rdpmc == RdpmcMode::Hwbp && self.traps {
            hwbp::addresses(&loaded.rdpmc_sites, self.config.pmu.stepping)
        } else {
            Ok(Vec::new())
        }
    }

    /// Checks that this host's KVM can run the kernel.
    pub(super) fn check_kernel(&self, kvm: &Kvm, loaded: &LoadedGuest) -> Result<(), VmError> {
        self.check_rdpmc(&loaded.kind)?;
        if !needs_full_kvm(&loaded.kind) {
            return Ok(());
        }
        if host::interprets_kernels(kvm)? {
            return Err(BootError::NeedsFullKvm {
                flavour: KvmFlavour::SoftwareOnly.to_string(),
            }
            .into());
        }
        Ok(())
    }

    /// Hides uncountable events in the tables of a loaded Linux kernel.
    pub(super) fn hide_uncounted(&self, uncounted: &UncountableEvents, loaded: &LoadedGuest, ram: &GuestRam) {
        if self.has_pmu && needs_full_kvm(&loaded.kind) {
            uncounted.tell(&uncounted.hide(ram.memory(), &loaded.event_tables));
        }
    }

    /// Checks that the guest's kernel can read its counters. Linux reads them by RDPMC at CPL 0 and
    /// has no other way. KVM's RDPMC knows no counters once KVM's own vPMU is disabled.
    pub(super) fn check_rdpmc(&self, kind: &KernelFormat) -> Result<(), VmError> {
        let unserved = self.traps && self.config.rdpmc == RdpmcMode::Off;
        if unserved && needs_full_kvm(kind) {
            return Err(VmError::RdpmcOff);
        }
        Ok(())
    }

    /// Returns the CPUID leaves that KVM supports for this VM, and the PMU model with the features of
    /// the processor.
    pub(super) fn processor(&self, kvm: &Kvm) -> Result<(CpuId, PmuModel), VmError> {
        let mut supported = cpuid::supported(kvm)?;
        if host::interprets_kernels(kvm)? {
            cpuid::hide_transactions(&mut supported);
        }
        let mut model = self.config.pmu.model;
        if cpuid::has_transactions(&supported) {
            model = model.with_transactions();
        }
        Ok((supported, model))
    }

    /// Returns the properties of the machine that must be equal where a snapshot is restored.
    pub(super) fn shape(&self, model: PmuModel, gate: bool, vcpus: &[KvmVcpu]) -> MachineShape {
        MachineShape {
            vcpus_at_start: self.config.cpus.present(),
            max_vcpus: self.config.cpus.max(),
            pmu: model.to_string(),
            tsc_khz: vcpus.first().map_or(0, KvmVcpu::tsc_khz),
            debug_exit: self.config.debug_exit,
            gp_gate: gate,
        }
    }

    /// Returns the options with which no snapshot can be taken.
    pub(super) fn unsupported_in_snapshot(&self) -> Vec<&'static str> {
        let config = self.config;
        let options = [
            ("--backing exact", self.stepped),
            ("--backing kvm", config.own_pmu.is_some()),
            ("--rdpmc hwbp", self.traps && config.rdpmc == RdpmcMode::Hwbp),
            ("--gdb", config.debugger.is_some()),
            ("--nested", config.nested),
        ];
        let used = options.into_iter().filter(|(_, used)| *used);
        used.map(|(option, _)| option).collect()
    }

    /// Returns the VM with its in-kernel devices.
    pub(super) fn take_vm(&self, kvm: &Kvm, begun: &mut PendingKvmSetup) -> Result<Arc<VmFd>, VmError> {
        let fd = Arc::new(begun.take_vm(kvm)?);
        if self.config.own_pmu.is_none() && !host::disable_kvm_vpmu(kvm, &fd)? {
            log::debug!("KVM_PMU_CAP_DISABLE is not offered; the MSR filter alone keeps KVM's PMU away");
        }
        Ok(fd)
    }

    /// Creates the VM's perf-core side and configures which PMU accesses KVM forwards to it.
    pub(super) fn make_pmu(
        &self,
        kvm: &Kvm,
        model: PmuModel,
        probe: &HostProbe,
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
            host::interprets_kernels(kvm)?,
            GuestSamplingContext::new(ram.memory().clone(), self.config.kernel_reader.clone()),
        );
        let pmu = match self.config.own_pmu {
            Some(offered) => pmu.with_own(KvmVpmu::new(fd.clone(), offered)),
            None => pmu,
        };
        if self.config.own_pmu.is_none() {
            match msr_filter::install(fd, &self.config.pmu.model.trapped_msrs()) {
                // Without a PMU, KVM behaves much like hardware.
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

    pub(super) fn make_bus(&self, console: Box<dyn Write + Send>, fd: &Arc<VmFd>) -> Result<Bus, VmError> {
        let bus = Bus::new(console, self.config.memory_bytes, self.config.cpus)
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
        Ok(bus)
    }

    /// Adds a PCI bus with `devices`, if the guest's tables describe one.
    pub(super) fn add_pci(
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
        let fatal_error_callback =
            FatalErrorCallback::new(Arc::new(move || control.stop(StopReason::Failed)));
        let machine: Arc<dyn PciBackend> = Arc::new(KvmPciBackend::new(fd.clone(), fatal_error_callback));
        let pci = PciBus::new(devices, ram.memory(), layout::PCI_WINDOW, &machine)?;
        Ok(bus.with_pci(pci))
    }

    /// Returns whether RDPMC that was not replaced is emulated at the guest's #GP handler. This
    /// needs a free breakpoint. For kernels other than Linux it must be requested by the user.
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
        let faults = self.traps && asked && rdpmc_faults(kvm, &loaded.kind)?;
        Ok(faults && !self.stepped && breakpoints < BREAKPOINTS)
    }

    /// Creates and configures KVM's vCPU `id`.
    pub(super) fn make_vcpu(
        &self,
        kvm: &Kvm,
        fd: &VmFd,
        parts: &VcpuParts<'_>,
        id: u8,
    ) -> Result<KvmVcpu, VmError> {
        let config = self.config;
        let vcpu = fd.create_vcpu(id).map_err(|e| match &config.own_pmu {
            Some(own) if own.mediated && e.errno() == libc::EBUSY => VmError::PmuTaken,
            _ => e.into(),
        })?;
        let tsc_khz = vcpu.get_tsc_khz()?;
        let cpu = GuestCpuidConfig {
            pmu: &parts.model,
            backability: config.backability,
            cpus: config.cpus.max(),
            tsc_khz,
            tsc_deadline: fd.has_tsc_deadline(),
            nested: config.nested,
            signature: config.cpu_signature,
            stepped: self.stepped,
            enters_handlers: parts.gate || self.stepped,
        };
        let table = cpuid::for_vcpu(&parts.supported, cpu, id)?;
        vcpu.set_cpuid2(&table)?;
        if config.own_pmu.is_some() {
            own_pmu::set_capabilities(kvm, &vcpu, &config.pmu.model)?;
        } else if parts.model.intel_version() > 0 && !misc_enable::announce_pmu(&vcpu)? {
            log::info!("this host's KVM lets no one set IA32_MISC_ENABLE; its bit 7 does not show the PMU");
        }
        boot::configure_local_apic(&vcpu)?;
        if id == 0 {
            parts.loaded.configure_bsp(&vcpu)?;
        }
        if let Some(stats) = statistics(&vcpu) {
            parts.pmu.add_statistics(id, stats);
        }
        let restarts = config.on_reset == ResetPolicy::Restart;
        let first = if restarts || config.cpus.can_change() && id > 0 {
            Some(InitialVcpuState::of(kvm, &vcpu)?)
        } else {
            None
        };
        Ok(KvmVcpu::new(id, vcpu, tsc_khz, table, first))
    }

    /// Returns the events to hide from the guest's kernels.
    pub(super) fn uncounted(&self, probe: &HostProbe) -> UncountableEvents {
        let VmConfig { pmu, backability, .. } = self.config;
        let hides = self.config.hide_uncounted;
        let uncounted = UncountableEvents::new(&pmu.model, pmu.policy, *backability, probe.clone(), hides);
        if pmu.hides_denied {
            uncounted.within(pmu.filter.clone())
        } else {
            uncounted
        }
    }

    /// Returns the parts of RDPMC emulation, or `None` if KVM handles RDPMC.
    pub(super) fn rdpmc_parts(
        &self,
        loaded: &LoadedGuest,
        ram: &GuestRam,
        gate: bool,
        uncounted: &Arc<UncountableEvents>,
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

/// Returns whether a kernel of this kind needs a KVM that runs CPL 0 natively. Linux does, because
/// it uses instructions that KVM's emulator lacks.
pub(super) fn needs_full_kvm(kind: &KernelFormat) -> bool {
    kind.is_linux()
}

/// Returns the binary statistics of a VM or vCPU. Kernels before 5.14 have none, and the events
/// that they back are unsupported then.
pub(super) fn statistics(of: &impl std::os::fd::AsRawFd) -> Option<std::os::fd::OwnedFd> {
    stats_fd(of)
        .inspect_err(|e| log::info!("KVM_GET_STATS_FD: {e}"))
        .ok()
}

/// Returns whether RDPMC outside the kernel's text faults, so that it can be emulated. Otherwise
/// user programs read counters that do not count. This is a property of the host; `check` and `run
/// -v` report it.
pub(super) fn rdpmc_faults(kvm: &Kvm, kind: &KernelFormat) -> Result<bool, HostError> {
    let faults = host::rdpmc_faults(kvm)?;
    if !faults && needs_full_kvm(kind) {
        log::warn!(
            "programs of the guest that use RDPMC read counters that do not count: this host's KVM answers it (AMD-V in Linux 6.1; \
             fixed in 6.12); `echo 0 >/sys/bus/event_source/devices/cpu/rdpmc` in the guest makes them use read(2)"
        );
    }
    Ok(faults)
}

/// Limits halt polling in KVM, which would otherwise count as guest cycles.
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
    use vpmu::Vendor;

    use super::*;
    use crate::testing;

    /// A Linux kernel without RDPMC emulation crashes at its first counter read.
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
