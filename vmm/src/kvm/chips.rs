//! KVM's interrupt controllers and timer as they were when the VM was made, to be put back when the
//! machine is reset.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_irqchip, kvm_pit_state2,
};
use kvm_ioctls::VmFd;

/// A call of KVM that failed.
#[derive(Debug, thiserror::Error)]
#[error("{what} failed")]
pub struct ChipError {
    what: &'static str,
    source: kvm_ioctls::Error,
}

fn failed(what: &'static str) -> impl Fn(kvm_ioctls::Error) -> ChipError {
    move |source| ChipError { what, source }
}

/// The two PICs, the I/O APIC and the PIT.
pub struct Chips {
    irq: Vec<kvm_irqchip>,
    pit: kvm_pit_state2,
}

impl Chips {
    /// As they are in `vm`.
    ///
    /// # Errors
    /// [`ChipError`].
    pub fn of(vm: &VmFd) -> Result<Self, ChipError> {
        let irq = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC]
            .into_iter()
            .map(|chip_id| {
                let mut chip = kvm_irqchip {
                    chip_id,
                    ..Default::default()
                };
                vm.get_irqchip(&mut chip)
                    .map_err(failed("KVM_GET_IRQCHIP"))
                    .map(|()| chip)
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            irq,
            pit: vm.get_pit2().map_err(failed("KVM_GET_PIT2"))?,
        })
    }

    /// Puts them back. No vCPU may be in the guest.
    ///
    /// # Errors
    /// [`ChipError`].
    pub fn restore(&self, vm: &VmFd) -> Result<(), ChipError> {
        vm.set_pit2(&self.pit).map_err(failed("KVM_SET_PIT2"))?;
        for chip in &self.irq {
            vm.set_irqchip(chip).map_err(failed("KVM_SET_IRQCHIP"))?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for Chips {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Chips").finish_non_exhaustive()
    }
}
