//! A guest's reset of the machine: memory, devices and vCPUs as they were at the start, in the same
//! process, under the same servers. Events and rings of operators go on; the guest's counters are those
//! of a new machine.
//!
//! KVM has no call that resets a VM. What its parts held when the VM was made is kept and written back
//! (`Chips`, `FirstState`), as it is for a vCPU that comes again.

use std::sync::Arc;

use arc_swap::ArcSwap;
use kernel_images::packed::PackedSymbols;
use perf_core::error_line;
use vmm_sys_util::eventfd::EventFd;
use vpmu::Model;

use super::config::VmConfig;
use super::error::VmError;
use super::plan::{Plan, needs_full_kvm};
use crate::boot;
use crate::devices::Bus;
use crate::kernels::uncounted::Uncounted;
use crate::kvm::chips::Chips;
use crate::kvm::vm_fd::VmFd;
use crate::memory::GuestRam;
use crate::pmu::VmPmu;
use crate::vcpu::control::{RunControl, StopReason};
use crate::vcpu::maker::VcpuMaker;
use crate::vcpu::roster::Roster;

/// Restarts that are told of; a guest may do nothing else.
const MOST_LINES: u64 = 16;

/// What a machine is made anew with.
pub(super) struct Again {
    pub config: VmConfig,
    pub uncounted: Arc<Uncounted>,
    pub model: Model,
    /// RDPMC that was not replaced may be served at the guest's handler of #GP.
    pub gate: bool,
    /// The kernel needs a KVM that runs Linux.
    pub needs_full_kvm: bool,
    pub fd: Arc<VmFd>,
    pub chips: Chips,
}

/// Starts the machine again each time its guest resets it. To be called from the main loop, when
/// [`Restarter::event`] is readable.
pub struct Restarter {
    pub(super) again: Again,
    pub(super) ram: GuestRam,
    pub(super) bus: Arc<Bus>,
    pub(super) pmu: Arc<VmPmu>,
    pub(super) control: Arc<RunControl>,
    pub(super) roster: Arc<Roster>,
    pub(super) symbols: Arc<ArcSwap<PackedSymbols>>,
    pub(super) restarts: u64,
}

impl Restarter {
    /// Readable when there is something to do.
    pub fn event(&self) -> &EventFd {
        self.control.reset_event()
    }

    /// Does what can be done now for a reset. If the machine cannot be made anew, the VM ends, and a line
    /// says why.
    pub fn serve(&mut self) {
        // Empty if it was looked at already.
        let _ = self.control.reset_event().read();
        let (again, restarts) = (&self.again, &mut self.restarts);
        let made = self.roster.restart(again.config.cpus.present(), || {
            let maker = again.make(&self.ram, &self.bus, &self.pmu, &self.control, &self.symbols)?;
            *restarts += 1;
            if *restarts <= MOST_LINES {
                let last = if *restarts == MOST_LINES {
                    "; no more of this is said"
                } else {
                    ""
                };
                log::info!("the guest reset the machine, which starts again ({restarts}){last}");
            }
            Ok::<_, VmError>(maker)
        });
        if let Err(e) = made {
            log::error!("the VM cannot start again: {}", error_line(&e));
            self.control.stop(StopReason::NotRestarted);
        }
    }
}

impl Again {
    /// The machine as at the start, but for its vCPUs, which are made by what this returns.
    fn make(
        &self,
        ram: &GuestRam,
        bus: &Arc<Bus>,
        pmu: &Arc<VmPmu>,
        control: &Arc<RunControl>,
        symbols: &ArcSwap<PackedSymbols>,
    ) -> Result<VcpuMaker, VmError> {
        let plan = Plan::of(&self.config);
        bus.reset();
        ram.clear()?;
        let loaded = boot::load(ram, &plan.boot_request(bus.pci().is_some()))?;
        if needs_full_kvm(&loaded.kind) != self.needs_full_kvm {
            return Err(VmError::OtherKernel);
        }
        if self.needs_full_kvm && plan.has_pmu {
            self.uncounted.hide(ram.memory(), &loaded.event_tables);
        }
        self.chips.restore(&self.fd)?;
        pmu.probe().forget();
        symbols.store(loaded.symbols.clone());
        plan.vcpu_maker(
            &self.fd,
            self.model,
            self.gate,
            &loaded,
            ram,
            bus,
            pmu,
            control,
            &self.uncounted,
        )
    }
}
