//! Restarts the machine after a reset by its guest, in the same process. Memory, devices and vCPUs
//! return to their initial state. The servers, and the events and rings of operators, are kept. The
//! guest's counters are reset.
//!
//! KVM cannot reset a VM. Instead, the initial state of the VM's parts is saved and later written
//! back (`IrqchipState`, `InitialVcpuState`), as for a vCPU that is removed and added again.

use std::sync::Arc;

use arc_swap::ArcSwap;
use kernel_images::packed::CompressedKernelSymbols;
use perf_core::error_line;
use vmm_sys_util::eventfd::EventFd;

use super::config::VmConfig;
use super::error::VmError;
use super::hardware::VmHardware;
use super::plan::{VmPlan, needs_full_kvm};
use crate::boot;
use crate::kvm::chips::IrqchipState;
use crate::vcpu::control::VmStopReason;
use crate::vcpu::factory::VcpuFactory;
use crate::vcpu::registry::VcpuRegistry;
use guest_patching::uncounted::UncountableEventSet;

/// Maximum number of restarts that are logged, because a guest may reset the machine in a loop.
const MAX_LOGGED_RESTARTS: u64 = 16;

/// Inputs with which the machine is constructed anew after a reset.
pub(super) struct RestartContext {
    pub config: VmConfig,
    pub uncounted: Arc<UncountableEventSet>,
    /// `true` if RDPMC instructions that were not replaced are emulated at the guest's #GP handler
    /// where possible.
    pub gate: bool,
    /// `true` if the kernel needs a KVM that does not interpret CPL 0.
    pub needs_full_kvm: bool,
    pub chips: IrqchipState,
}

/// Restarts the machine after each reset by its guest. The main loop calls
/// [`GuestResetHandler::serve`] when [`GuestResetHandler::event`] is readable.
pub struct GuestResetHandler {
    pub(super) restart_context: RestartContext,
    pub(super) hardware: VmHardware,
    pub(super) registry: Arc<VcpuRegistry>,
    pub(super) symbols: Arc<ArcSwap<CompressedKernelSymbols>>,
    pub(super) restarts: u64,
}

impl GuestResetHandler {
    /// Returns the eventfd that is readable when the next step of a reset is due.
    pub fn event(&self) -> &EventFd {
        self.hardware.control.reset_event()
    }

    /// Performs the steps of a pending reset that are possible now. If the machine cannot be
    /// constructed anew, logs the reason and stops the VM.
    pub fn serve(&mut self) {
        // The read fails if the eventfd is already clear.
        let _ = self.hardware.control.reset_event().read();
        let (again, restarts) = (&self.restart_context, &mut self.restarts);
        let made = self.registry.restart(again.config.cpus.present(), || {
            let factory = again.make(&self.hardware, &self.symbols)?;
            *restarts += 1;
            if *restarts <= MAX_LOGGED_RESTARTS {
                let last = if *restarts == MAX_LOGGED_RESTARTS {
                    "; no more of this is said"
                } else {
                    ""
                };
                log::info!("the guest reset the machine; restarting ({restarts}){last}");
            }
            Ok::<_, VmError>(factory)
        });
        if let Err(e) = made {
            log::error!("cannot restart the VM: {}", error_line(&e));
            self.hardware.control.stop(VmStopReason::NotRestarted);
        }
    }
}

impl RestartContext {
    /// Resets all of the machine except its vCPUs, and returns the factory for the vCPUs.
    fn make(
        &self,
        hardware: &VmHardware,
        symbols: &ArcSwap<CompressedKernelSymbols>,
    ) -> Result<VcpuFactory, VmError> {
        let plan = VmPlan::of(&self.config);
        let VmHardware { ram, bus, .. } = hardware;
        bus.reset();
        ram.clear()?;
        let loaded = boot::load(ram, &plan.boot_request(bus.pci().is_some()))?;
        boot::write_generation_id(ram, bus.generation().id())?;
        if needs_full_kvm(&loaded.kind) != self.needs_full_kvm {
            return Err(VmError::OtherKernel);
        }
        if self.needs_full_kvm && plan.has_pmu {
            self.uncounted.hide(ram.memory(), &loaded.event_tables);
            self.uncounted.hide_topdown(ram.memory(), &loaded.topdown);
            plan.withdraw_user_rdpmc(self.gate, &loaded, ram);
        }
        self.chips.restore(&hardware.fd)?;
        hardware.pmu.probe().clear_kernel();
        symbols.store(loaded.symbols.clone());
        plan.vcpu_factory(hardware, self.gate, &loaded, &self.uncounted)
    }
}
