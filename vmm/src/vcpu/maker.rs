//! Making a vCPU: from KVM's, which is made once with the VM, to one that can run, which is made each time it
//! comes.

use std::fmt;
use std::io;
use std::sync::Arc;

use kernel_images::packed::PackedSymbols;
use vm_memory::GuestMemoryMmap;
use vpmu::Vendor;

use super::affinity::Pinning;
use super::control::RunControl;
use super::debugctl::DebugControl;
use super::failure::{RestartError, VcpuError};
use super::gate::{Gate, PlantedGate};
use super::kvm_vcpu::KvmVcpu;
use super::pmi::Lvtpc;
use super::rdpmc::Rdpmc;
use super::running::Vcpu;
use super::seat::Seat;
use super::step::Stepper;
use crate::boot;
use crate::devices::Bus;
use crate::kernels::running::RunningKernels;
use crate::kvm::stepping::Stepping;
use crate::kvm::vm_fd::VmFd;
use crate::pmu::{VcpuPmu, VmPmu};
use crate::rdpmc::sites::{Sites, SitesOfVcpu};

/// How RDPMC is served, for the vCPUs of a VM.
pub struct RdpmcParts {
    /// The kernel is Linux.
    pub linux: bool,
    /// Where it was replaced.
    pub sites: Arc<Sites>,
    /// What serves it elsewhere: what it planted in all vCPUs' sight, and the kernel's symbols.
    pub gate: Option<(Option<Arc<PlantedGate>>, Arc<PackedSymbols>)>,
    /// Finds it in the kernels that the guest starts itself.
    pub running: Option<Arc<RunningKernels>>,
}

/// Who steps, for the vCPUs of a VM.
pub struct StepperParts {
    /// The model's vendor.
    pub vendor: Vendor,
    /// What the host can step.
    pub host: Stepping,
    /// The VM never has another vCPU.
    pub alone: bool,
    /// Each instruction is stepped.
    pub without_runs: bool,
}

/// What all vCPUs of a VM are made from.
pub struct VcpuMaker {
    /// The VM.
    pub vm: Arc<VmFd>,
    /// Its devices.
    pub bus: Arc<Bus>,
    /// What counts it.
    pub pmu: Arc<VmPmu>,
    /// Its run state.
    pub control: Arc<RunControl>,
    /// Its memory.
    pub memory: GuestMemoryMmap,
    /// Where RDPMC is served by hardware breakpoints.
    pub breakpoints: Vec<u64>,
    /// IA32_DEBUGCTL is trapped.
    pub keeps_debug_control: bool,
    /// `None`: nothing stands for RDPMC.
    pub rdpmc: Option<RdpmcParts>,
    /// With the exact backing.
    pub stepper: Option<StepperParts>,
    /// Who stays on one CPU of the host.
    pub pins: Pinning,
    /// How the boot processor enters what was loaded.
    pub entry: boot::Entry,
}

impl fmt::Debug for VcpuMaker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VcpuMaker").finish_non_exhaustive()
    }
}

impl VcpuMaker {
    /// A vCPU for `seat` that has yet to run: all that is ours is new.
    ///
    /// # Errors
    /// [`VcpuError`]; KVM's vCPU comes back with it.
    pub fn make(&self, kvm: KvmVcpu, seat: &Arc<Seat>) -> Result<Vcpu, (KvmVcpu, VcpuError)> {
        let vcpu_pmu = self.pmu.vcpu(kvm.id(), kvm.tsc_khz());
        self.make_with(kvm, seat, Some(vcpu_pmu))
    }

    /// Makes KVM's vCPU what it was when it was made, and ready to enter what is loaded now.
    ///
    /// # Errors
    /// [`RestartError`].
    pub(super) fn restore(&self, kvm: &KvmVcpu) -> Result<(), RestartError> {
        kvm.restore()?;
        if kvm.id() == 0 {
            boot::configure_bsp(&self.entry, kvm.fd())?;
        }
        Ok(())
    }

    /// The same with a PMU that is there.
    pub(super) fn make_with(
        &self,
        kvm: KvmVcpu,
        seat: &Arc<Seat>,
        vcpu_pmu: Option<VcpuPmu>,
    ) -> Result<Vcpu, (KvmVcpu, VcpuError)> {
        let masks = vcpu_pmu
            .as_ref()
            .is_some_and(crate::pmu::VcpuPmu::masks_lvtpc_on_delivery);
        let debug_control = self.keeps_debug_control.then(|| {
            DebugControl::new(kvm.cpuid()).ok_or(VcpuError::Os(
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
            seat.clone(),
            self.control.clone(),
        );
        vcpu.stay_on(pin);
        vcpu.stop_at_rdpmc(&self.breakpoints);
        if let Some(control) = debug_control {
            vcpu.keep_debug_control(control);
        }
        if let Some(parts) = &self.rdpmc {
            let sites = SitesOfVcpu::new(parts.sites.clone());
            let mut rdpmc = Rdpmc::new(self.memory.clone(), parts.linux, sites);
            if let Some((planted, symbols)) = &parts.gate {
                rdpmc = rdpmc.with_gate(Gate::new(planted.clone(), self.memory.clone(), symbols.clone()));
            }
            if let Some(running) = &parts.running {
                rdpmc = rdpmc.with_running(running.clone());
            }
            vcpu.serve_rdpmc(rdpmc);
        }
        if let Some(parts) = &self.stepper {
            let mut stepper = Stepper::new(parts.vendor, self.memory.clone(), parts.host, parts.alone);
            // Only where CPL 0 is emulated: a guest of the lab that was stepped and recorded hung with them.
            if self.vm.syncs_registers() && !parts.host.user {
                stepper = stepper.with_synced_registers();
            }
            vcpu.step_with(if parts.without_runs {
                stepper.without_runs()
            } else {
                stepper
            });
        }
        Ok(vcpu)
    }
}
