//! Connects the doorbells and MSI messages of PCI functions to KVM: ioeventfd, GSI routing and
//! irqfd.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use kvm_bindings::{
    KVM_IRQ_ROUTING_IRQCHIP, KVM_IRQ_ROUTING_MSI, KVM_IRQCHIP_IOAPIC, KVM_IRQCHIP_PIC_MASTER,
    KVM_IRQCHIP_PIC_SLAVE, KvmIrqRouting, kvm_irq_routing_entry, kvm_irq_routing_entry__bindgen_ty_1,
    kvm_irq_routing_irqchip, kvm_irq_routing_msi, kvm_irq_routing_msi__bindgen_ty_1,
};
use kvm_ioctls::{IoEventAddress, NoDatamatch};
use virtio_devices::device::DeviceFailureCallback;
use virtio_devices::transport::machine::{MsiMessage, PciBackend};
use vmm_sys_util::eventfd::EventFd;

use super::vm_fd::VmFd;

/// Number of inputs of KVM's I/O APIC. GSIs from this number on are MSI messages.
const IO_APIC_INPUTS: u32 = 24;
/// Number of inputs of the two PICs, eight each. The I/O APIC inputs with the same numbers are
/// connected to the same interrupts.
const PIC_INPUTS: u32 = 16;
const INPUTS_OF_A_PIC: u32 = 8;

/// Connects the functions of a VM's PCI bus to KVM.
pub struct KvmPciBackend {
    vm: Arc<VmFd>,
    /// MSI message of each interrupt line of the bus, as last routed in KVM.
    messages: Mutex<Vec<Option<MsiMessage>>>,
    fatal_error_callback: DeviceFailureCallback,
}

impl KvmPciBackend {
    /// Creates the connection for a VM with interrupt controllers in KVM. `fatal_error_callback`
    /// ends the VM after a fatal error.
    pub fn new(vm: Arc<VmFd>, fatal_error_callback: DeviceFailureCallback) -> Self {
        Self {
            vm,
            messages: Mutex::default(),
            fatal_error_callback,
        }
    }

    /// Routes the interrupt line `line` to its MSI message in KVM, if the message has changed.
    fn route(&self, line: u32, message: MsiMessage) -> io::Result<()> {
        let mut messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
        let n = usize::try_from(line).map_err(io::Error::other)?;
        if messages.len() <= n {
            messages.resize(n + 1, None);
        }
        if messages[n] == Some(message) {
            return Ok(());
        }
        let before = messages[n].replace(message);
        let told = routing(&messages).and_then(|table| Ok(self.vm.raw().set_gsi_routing(&table)?));
        if told.is_err() {
            messages[n] = before;
        }
        told
    }
}

impl PciBackend for KvmPciBackend {
    fn add_doorbell(&self, address: u64, kick: &EventFd) -> io::Result<()> {
        Ok(self
            .vm
            .raw()
            .register_ioevent(kick, &IoEventAddress::Mmio(address), NoDatamatch)?)
    }

    fn remove_doorbell(&self, address: u64, kick: &EventFd) -> io::Result<()> {
        Ok(self
            .vm
            .raw()
            .unregister_ioevent(kick, &IoEventAddress::Mmio(address), NoDatamatch)?)
    }

    fn connect(&self, line: u32, message: MsiMessage, vector: &EventFd) -> io::Result<()> {
        self.route(line, message)?;
        Ok(self.vm.raw().register_irqfd(vector, gsi(line))?)
    }

    fn disconnect(&self, line: u32, vector: &EventFd) -> io::Result<()> {
        Ok(self.vm.raw().unregister_irqfd(vector, gsi(line))?)
    }

    fn fatal_error_callback(&self) -> DeviceFailureCallback {
        self.fatal_error_callback.clone()
    }
}

/// Returns the GSI of interrupt line `line` of the PCI bus.
fn gsi(line: u32) -> u32 {
    IO_APIC_INPUTS.saturating_add(line)
}

/// Returns the complete GSI routing table, which KVM replaces as a whole. The inputs of the
/// interrupt controllers are routed as in KVM's default table: an input of a PIC is also an input
/// of the I/O APIC with the same number. `boot/acpi.rs` relies on this for the timer interrupt, 0.
fn routing(messages: &[Option<MsiMessage>]) -> io::Result<KvmIrqRouting> {
    let pics = (0..PIC_INPUTS).map(|input| {
        let chip = if input < INPUTS_OF_A_PIC {
            KVM_IRQCHIP_PIC_MASTER
        } else {
            KVM_IRQCHIP_PIC_SLAVE
        };
        chip_entry(input, chip, input % INPUTS_OF_A_PIC)
    });
    let io_apic = (0..IO_APIC_INPUTS).map(|input| chip_entry(input, KVM_IRQCHIP_IOAPIC, input));
    let lines = (0..).zip(messages);
    let sent = lines.filter_map(|(line, message)| message.map(|message| message_entry(line, message)));
    let entries: Vec<_> = pics.chain(io_apic).chain(sent).collect();
    KvmIrqRouting::from_entries(&entries).map_err(|e| io::Error::other(format!("{e:?}")))
}

fn chip_entry(input: u32, irqchip: u32, pin: u32) -> kvm_irq_routing_entry {
    kvm_irq_routing_entry {
        gsi: input,
        type_: KVM_IRQ_ROUTING_IRQCHIP,
        u: kvm_irq_routing_entry__bindgen_ty_1 {
            irqchip: kvm_irq_routing_irqchip { irqchip, pin },
        },
        ..Default::default()
    }
}

#[expect(clippy::cast_possible_truncation, reason = "halves of an address")]
fn message_entry(line: u32, message: MsiMessage) -> kvm_irq_routing_entry {
    kvm_irq_routing_entry {
        gsi: gsi(line),
        type_: KVM_IRQ_ROUTING_MSI,
        u: kvm_irq_routing_entry__bindgen_ty_1 {
            msi: kvm_irq_routing_msi {
                address_lo: message.address as u32,
                address_hi: (message.address >> 32) as u32,
                data: message.data,
                __bindgen_anon_1: kvm_irq_routing_msi__bindgen_ty_1::default(),
            },
        },
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;

    fn machine() -> Option<KvmPciBackend> {
        let Ok(kvm) = crate::kvm::host::open() else {
            eprintln!("SKIP: there is no KVM here");
            return None;
        };
        let vm = Arc::new(VmFd::new(&kvm).unwrap());
        vm.add_irqchip().unwrap();
        Some(KvmPciBackend::new(vm, DeviceFailureCallback::default()))
    }

    #[test]
    fn msi_vector_keeps_signals_after_disconnect() {
        let Some(machine) = machine() else { return };
        let vector = EventFd::new(EFD_NONBLOCK).unwrap();
        let message = MsiMessage {
            address: 0xFEE0_0000,
            data: 0x41,
        };
        assert!(machine.disconnect(3, &vector).is_ok(), "KVM does not mind");
        machine.connect(3, message, &vector).unwrap();
        assert!(machine.connect(3, message, &vector).is_err(), "it is connected");
        machine.disconnect(3, &vector).unwrap();
        vector.write(1).unwrap();
        assert_eq!(vector.read().unwrap(), 1);
        // The highest interrupt line of a fully populated bus.
        machine.connect(31 * 64, message, &vector).unwrap();
    }

    #[test]
    fn duplicate_doorbell_is_rejected() {
        let Some(machine) = machine() else { return };
        let [one, other] = [(); 2].map(|()| EventFd::new(EFD_NONBLOCK).unwrap());
        machine.add_doorbell(0xE000_3000, &one).unwrap();
        assert!(machine.add_doorbell(0xE000_3000, &other).is_err());
        machine.add_doorbell(0xE000_3004, &other).unwrap();
        machine.remove_doorbell(0xE000_3000, &one).unwrap();
        assert!(machine.remove_doorbell(0xE000_3000, &one).is_err());
    }
}
