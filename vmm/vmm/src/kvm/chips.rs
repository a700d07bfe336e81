//! Saves the initial state of KVM's interrupt controllers and timer and restores it at a machine
//! reset.

use kvm_bindings::{
    KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, kvm_irqchip, kvm_pit_state2,
};

use snapshot::state::SavedKvmDevices;

use super::bytes::{from_bytes, to_bytes};
use super::call::KvmIoctlError;
use super::vm_fd::VmFd;

/// Interrupt controllers in the order in which they are restored.
const CHIPS: [u32; 3] = [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE, KVM_IRQCHIP_IOAPIC];

/// State of the two PICs, the I/O APIC and the PIT.
pub struct IrqchipState {
    irq: Vec<kvm_irqchip>,
    pit: kvm_pit_state2,
}

impl IrqchipState {
    /// Reads the current state of the interrupt controllers and the timer of `vm`.
    ///
    /// # Errors
    /// Returns a [`KvmIoctlError`] if KVM cannot read a chip.
    pub fn of(vm: &VmFd) -> Result<Self, KvmIoctlError> {
        let irq = CHIPS
            .into_iter()
            .map(|chip_id| {
                let mut chip = kvm_irqchip {
                    chip_id,
                    ..Default::default()
                };
                vm.raw()
                    .get_irqchip(&mut chip)
                    .map_err(KvmIoctlError::of("KVM_GET_IRQCHIP"))
                    .map(|()| chip)
            })
            .collect::<Result<_, _>>()?;
        Ok(Self {
            irq,
            pit: vm.raw().get_pit2().map_err(KvmIoctlError::of("KVM_GET_PIT2"))?,
        })
    }

    /// Returns the state for a snapshot, which also contains the value `clock_ns` of kvmclock.
    pub fn to_saved(&self, clock_ns: u64) -> SavedKvmDevices {
        SavedKvmDevices {
            irqchips: self.irq.iter().map(to_bytes).collect(),
            pit: to_bytes(&self.pit),
            clock_ns,
        }
    }

    /// Returns the state that a snapshot contains. Returns `None` if the snapshot does not contain
    /// three interrupt controllers and a timer.
    pub fn from_saved(saved: &SavedKvmDevices) -> Option<Self> {
        let irq: Vec<kvm_irqchip> = saved.irqchips.iter().map(from_bytes).collect::<Option<_>>()?;
        let ids: Vec<u32> = irq.iter().map(|chip| chip.chip_id).collect();
        (ids == CHIPS).then_some(())?;
        Some(Self {
            irq,
            pit: from_bytes(&saved.pit)?,
        })
    }

    /// Writes the state to KVM. No vCPU may run during the call.
    ///
    /// # Errors
    /// Returns a [`KvmIoctlError`] if KVM rejects the state of a chip.
    pub fn restore(&self, vm: &VmFd) -> Result<(), KvmIoctlError> {
        let vm = vm.raw();
        vm.set_pit2(&self.pit)
            .map_err(KvmIoctlError::of("KVM_SET_PIT2"))?;
        for chip in &self.irq {
            vm.set_irqchip(chip)
                .map_err(KvmIoctlError::of("KVM_SET_IRQCHIP"))?;
        }
        Ok(())
    }
}

impl std::fmt::Debug for IrqchipState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Chips").finish_non_exhaustive()
    }
}

#[cfg(test)]
#[expect(unsafe_code, reason = "reads the union in which KVM gives a chip's registers")]
mod tests {
    use kvm_bindings::kvm_pit_config;

    use super::*;

    /// A reset returns the PIT and the PICs to their initial state after the guest has programmed
    /// them.
    #[test]
    fn reset_restores_programmed_irqchips() {
        let Ok(kvm) = crate::kvm::host::open() else {
            eprintln!("SKIP: there is no KVM here");
            return;
        };
        let vm = VmFd::new(&kvm).unwrap();
        assert_eq!(
            IrqchipState::of(&vm).unwrap_err().to_string(),
            "KVM_GET_IRQCHIP failed",
            "a VM without chips"
        );
        vm.add_irqchip().unwrap();
        vm.raw().create_pit2(kvm_pit_config::default()).unwrap();
        let new = IrqchipState::of(&vm).unwrap();

        let mut pit = vm.raw().get_pit2().unwrap();
        let count = pit.channels[2].count;
        pit.channels[2].count = count ^ 0x1234;
        vm.raw().set_pit2(&pit).unwrap();
        let mut masks = Vec::new();
        for chip_id in [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE] {
            let mut chip = kvm_irqchip {
                chip_id,
                ..Default::default()
            };
            vm.raw().get_irqchip(&mut chip).unwrap();
            // SAFETY: KVM has filled the `pic` member, because the chip is a PIC.
            let pic = unsafe { &mut chip.chip.pic };
            masks.push(pic.imr);
            pic.imr ^= 0x5A;
            vm.raw().set_irqchip(&chip).unwrap();
        }

        new.restore(&vm).unwrap();
        assert_eq!(vm.raw().get_pit2().unwrap().channels[2].count, count);
        for (chip_id, mask) in [KVM_IRQCHIP_PIC_MASTER, KVM_IRQCHIP_PIC_SLAVE]
            .into_iter()
            .zip(masks)
        {
            let mut chip = kvm_irqchip {
                chip_id,
                ..Default::default()
            };
            vm.raw().get_irqchip(&mut chip).unwrap();
            // SAFETY: KVM has filled the `pic` member, because the chip is a PIC.
            assert_eq!(unsafe { chip.chip.pic }.imr, mask, "PIC {chip_id}");
        }
    }
}
