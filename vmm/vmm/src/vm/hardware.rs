//! The hardware of a VM that its vCPUs share: the VM in KVM, its memory, PMU and devices.

use std::sync::Arc;

use vpmu::PmuModel;

use super::VmBuildInputs;
use super::error::VmError;
use super::plan::VmPlan;
use crate::devices::DeviceBus;
use crate::kvm::vm_fd::VmFd;
use crate::memory::GuestRam;
use crate::pmu::VmPmu;
use crate::vcpu::control::VmRunControl;

/// The hardware that all vCPUs of a VM share, and the run control of the VM.
#[derive(Clone)]
pub(super) struct VmHardware {
    pub(super) fd: Arc<VmFd>,
    pub(super) ram: GuestRam,
    pub(super) model: PmuModel,
    pub(super) pmu: Arc<VmPmu>,
    pub(super) bus: Arc<DeviceBus>,
    pub(super) control: Arc<VmRunControl>,
}

impl VmHardware {
    /// Creates the PMU, the devices and the run control for the VM `fd` with the memory `ram`. If
    /// `has_pci` is set, the guest's ACPI tables describe a PCI bus.
    pub(super) fn new(
        plan: &VmPlan<'_>,
        inputs: VmBuildInputs<'_>,
        fd: Arc<VmFd>,
        ram: GuestRam,
        model: PmuModel,
        has_pci: bool,
    ) -> Result<Self, VmError> {
        let pmu = plan.make_pmu(inputs.kvm, model, inputs.probe, &fd, &ram)?;
        let bus = plan.make_bus(inputs.console, &fd)?;
        let control = plan.make_control(inputs.kvm);
        let control = Arc::new(control.map_err(|e| VmError::Os("eventfd", e))?);
        let bus = VmPlan::add_pci(bus, inputs.devices, has_pci, &fd, &ram, &control)?;
        Ok(Self {
            fd,
            ram,
            model,
            pmu,
            bus: Arc::new(bus),
            control,
        })
    }
}
