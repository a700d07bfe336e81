//! Constructs a runnable vCPU from a KVM vCPU. The KVM vCPU is created once, with the VM.
//! Everything else is constructed anew whenever the vCPU is added.

use std::fmt;
use std::io;
use std::sync::Arc;

use guest_patching::gate::{GpHandlerInterception, GpHandlerTrap};
use guest_patching::running::RunningKernelPatcher;
use guest_patching::sites::{RdpmcSites, VcpuRdpmcSites};
use kernel_images::packed::CompressedKernelSymbols;
use vm_memory::GuestMemoryMmap;
use vpmu::{PmuModel, Vendor};

use super::affinity::VcpuPinning;
use super::control::VmRunControl;
use super::debugctl::DebugControl;
use super::failure::{RestartError, VcpuError};
use super::kvm_vcpu::KvmVcpu;
use super::pmi::Lvtpc;
use super::rdpmc::RdpmcEmulator;
use super::running::Vcpu;
use super::slot::VcpuSlot;
use super::step::Stepper;
use crate::boot;
use crate::devices::DeviceBus;
use crate::kvm::stepping::SteppingSupport;
use crate::kvm::vm_fd::VmFd;
use crate::pmu::{VcpuPmu, VmPmu};

/// Parameters of RDPMC emulation for the vCPUs of a VM.
pub struct RdpmcConfig {
    /// `true` if the guest kernel is Linux.
    pub linux: bool,
    /// Locations of the RDPMC instructions that were replaced.
    pub sites: Arc<RdpmcSites>,
    /// Interception of the guest's #GP handler, to emulate RDPMC instructions that were not
    /// replaced: the trap, if it is in guest memory and therefore shared by all vCPUs, and the
    /// kernel's symbols. `None` without interception.
    pub gate: Option<(Option<Arc<GpHandlerTrap>>, Arc<CompressedKernelSymbols>)>,
    /// Replaces RDPMC in kernels that the guest itself starts. `None` if these kernels are left
    /// unchanged.
    pub running: Option<Arc<RunningKernelPatcher>>,
}

/// Parameters of single-stepping for the vCPUs of a VM.
#[derive(Clone, Debug)]
pub struct StepperConfig {
    /// CPU vendor of the guest model.
    pub vendor: Vendor,
    /// Single-stepping features of the host's KVM.
    pub host: SteppingSupport,
    /// `true` if the VM has one vCPU and no CPU hot-plug.
    pub is_only_vcpu: bool,
    /// `true` to single-step every instruction, which disables straight-line runs.
    pub without_runs: bool,
    /// `true` if KVM can copy registers at each exit.
    pub syncs_registers: bool,
}

impl StepperConfig {
    /// Creates a stepper for a vCPU.
    pub(super) fn stepper(&self, memory: GuestMemoryMmap) -> Stepper {
        let mut stepper = Stepper::new(self.vendor, memory, self.host, self.is_only_vcpu);
        // Synchronized registers are used only where CPL 0 is emulated. A stepped and recorded
        // guest of the lab hung when they were used elsewhere.
        if self.syncs_registers && !self.host.user {
            stepper = stepper.with_synced_registers();
        }
        if self.without_runs {
            stepper.without_runs()
        } else {
            stepper
        }
    }
}

/// Factory for the vCPUs of a VM.
pub struct VcpuFactory {
    /// The VM in KVM.
    pub vm: Arc<VmFd>,
    /// Device bus.
    pub bus: Arc<DeviceBus>,
    /// PMU of the VM.
    pub pmu: Arc<VmPmu>,
    /// Run state of the VM.
    pub control: Arc<VmRunControl>,
    /// Guest memory.
    pub memory: GuestMemoryMmap,
    /// Linear addresses of the RDPMC instructions that are emulated with hardware breakpoints.
    pub breakpoints: Vec<u64>,
    /// PMU model of the guest if IA32_DEBUGCTL is trapped, and `None` otherwise.
    pub debug_control: Option<PmuModel>,
    /// Parameters of RDPMC emulation; `None` if RDPMC is not emulated.
    pub rdpmc: Option<RdpmcConfig>,
    /// Parameters of single-stepping for the exact backing; `None` with another backing.
    pub stepper: Option<StepperConfig>,
    /// Parameters of single-stepping for branch stacks and branch records; `None` if neither is
    /// possible.
    pub bursts: Option<StepperConfig>,
    /// Pinning of vCPUs to host CPUs.
    pub pins: VcpuPinning,
    /// Initial execution state of the boot processor.
    pub entry: boot::BootProcessorState,
}

impl fmt::Debug for VcpuFactory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VcpuMaker").finish_non_exhaustive()
    }
}

impl VcpuFactory {
    /// Creates a runnable vCPU from the KVM vCPU `kvm`. Everything that the VMM keeps for the vCPU
    /// is in its initial state.
    ///
    /// # Errors
    /// Returns the [`VcpuError`] together with the KVM vCPU.
    pub fn make(&self, kvm: KvmVcpu, slot: &Arc<VcpuSlot>) -> Result<Vcpu, (KvmVcpu, VcpuError)> {
        let vcpu_pmu = self.pmu.vcpu(kvm.id(), kvm.tsc_khz());
        self.make_with(kvm, slot, Some(vcpu_pmu))
    }

    /// Restores the initial state of a KVM vCPU. For vCPU 0, also sets the registers with which the
    /// boot processor enters the loaded kernel.
    ///
    /// # Errors
    /// Returns [`RestartError::State`] if the state cannot be restored, and [`RestartError::Boot`]
    /// if vCPU 0 cannot be prepared.
    pub(super) fn restore(&self, kvm: &KvmVcpu) -> Result<(), RestartError> {
        kvm.restore()?;
        if kvm.id() == 0 {
            boot::configure_bsp(&self.entry, kvm.fd())?;
        }
        Ok(())
    }

    /// Creates a runnable vCPU like [`VcpuFactory::make`], but with the PMU `vcpu_pmu`.
    pub(super) fn make_with(
        &self,
        kvm: KvmVcpu,
        slot: &Arc<VcpuSlot>,
        mut vcpu_pmu: Option<VcpuPmu>,
    ) -> Result<Vcpu, (KvmVcpu, VcpuError)> {
        if let Some(pmu) = &mut vcpu_pmu
            && let Some(leaf) = kvm.cpuid().as_slice().iter().find(|leaf| leaf.function == 1)
        {
            pmu.registers().set_signature(leaf.eax);
        }
        let masks = vcpu_pmu
            .as_ref()
            .is_some_and(crate::pmu::VcpuPmu::masks_lvtpc_on_delivery);
        let debug_control = self.debug_control.as_ref().map(|model| {
            DebugControl::new(kvm.cpuid(), model).ok_or(VcpuError::Os(
                "making an MSR list",
                io::ErrorKind::OutOfMemory.into(),
            ))
        });
        let parts = Lvtpc::new(kvm.id(), masks)
            .map_err(VcpuError::from)
            .and_then(|lvtpc| Ok((lvtpc, debug_control.transpose()?)));
        let (lvtpc, debug_control) = match parts {
            Ok(parts) => parts,
            Err(e) => return Err((kvm, e)),
        };
        let pin = self.pins.of(kvm.id());
        let mut vcpu = Vcpu::new(
            kvm,
            lvtpc,
            self.vm.clone(),
            self.bus.clone(),
            vcpu_pmu,
            slot.clone(),
            self.control.clone(),
        );
        vcpu.pin_to_host_cpu(pin);
        vcpu.set_rdpmc_breakpoints(&self.breakpoints);
        if let Some(control) = debug_control {
            vcpu.set_debug_control(control);
        }
        if let Some(parts) = &self.rdpmc {
            let sites = VcpuRdpmcSites::new(parts.sites.clone());
            let mut rdpmc = RdpmcEmulator::new(self.memory.clone(), parts.linux, sites);
            if let Some((planted, symbols)) = &parts.gate {
                rdpmc = rdpmc.with_gate(GpHandlerInterception::new(
                    planted.clone(),
                    self.memory.clone(),
                    symbols.clone(),
                ));
            }
            if let Some(running) = &parts.running {
                rdpmc = rdpmc.with_running(running.clone());
            }
            vcpu.set_rdpmc_emulator(rdpmc);
        }
        if let Some(parts) = &self.stepper {
            vcpu.set_stepper(parts.stepper(self.memory.clone()));
        }
        if let Some(config) = &self.bursts {
            vcpu.set_bursts(config.clone(), self.memory.clone());
        }
        Ok(vcpu)
    }
}
