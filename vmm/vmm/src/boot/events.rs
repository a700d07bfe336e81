//! Builds the ACPI device of the VM generation ID, and the event device that notifies the guest.
//!
//! A generic event device (ACPI 6.5, 5.6.9) has a method that the guest calls with the number of
//! the interrupt that it received. [`crate::devices::generation`] describes the generation ID, and
//! [`super::processors`] the hot-pluggable processors.
//!
//! ```text
//! Scope (\_SB)
//!   Device (VGEN)      compatible with VM_Gen_Counter: ADDR, the address of the generation ID
//!   Device (GED)       ACPI0013: _CRS the interrupts, _EVT (interrupt) notifies VGEN or calls SCAN
//! ```

use acpi_tables::aml::{
    Arg, Device, Equal, If, Interrupt, Method, MethodCall, Name, Notify, Package, Path, ResourceTemplate,
    Scope, ZERO,
};

use super::aml::bytes_of;
use super::layout;
use crate::devices::ports;

/// Device-specific Notify value (5.6.6) with which the guest's driver learns that the generation ID
/// has changed.
const GENERATION_CHANGED: u8 = 0x80;

/// Returns the AML of the generation ID device and the event device, for the root scope. If
/// `hotplug` is set, the event device also handles the interrupt of CPU hot-plug.
pub(super) fn devices(hotplug: bool) -> Vec<u8> {
    let hid = Name::new("_HID".into(), &"PRFV0001");
    // VM_Gen_Counter, the ID in the specification of the VM generation ID, is longer than an ACPI
    // ID may be. Hyper-V provides both IDs.
    let ids = Package::new(vec![&"VM_Gen_Counter", &"VMGENCTR"]);
    let cid = Name::new("_CID".into(), &ids);
    let ddn = Name::new("_DDN".into(), &"VM_Gen_Counter");
    let address = Package::new(vec![&layout::GENERATION_ID, &ZERO]);
    let addr = Name::new("ADDR".into(), &address);
    let generation = Device::new("VGEN".into(), vec![&hid, &cid, &ddn, &addr]);

    let hid = Name::new("_HID".into(), &"ACPI0013");
    let uid = Name::new("_UID".into(), &ZERO);
    let edge = |line| Interrupt::new(true, true, false, false, line);
    let (generation_irq, plug_irq) = (edge(ports::GENERATION_IRQ), edge(ports::CPU_PLUG_IRQ));
    let path = Path::new("VGEN");
    let notify = Notify::new(&path, &GENERATION_CHANGED);
    let is_generation = Equal::new(&Arg(0), &ports::GENERATION_IRQ);
    let if_generation = If::new(&is_generation, vec![&notify]);
    let scan = MethodCall::new("\\_SB_.CPUS.SCAN".into(), vec![]);
    let is_plug = Equal::new(&Arg(0), &ports::CPU_PLUG_IRQ);
    let if_plug = If::new(&is_plug, vec![&scan]);
    let (resources, evt) = if hotplug {
        (
            ResourceTemplate::new(vec![&generation_irq, &plug_irq]),
            Method::new("_EVT".into(), 1, true, vec![&if_generation, &if_plug]),
        )
    } else {
        (
            ResourceTemplate::new(vec![&generation_irq]),
            Method::new("_EVT".into(), 1, true, vec![&if_generation]),
        )
    };
    let crs = Name::new("_CRS".into(), &resources);
    let events = Device::new("GED_".into(), vec![&hid, &uid, &crs, &evt]);
    bytes_of(&Scope::new("_SB_".into(), vec![&generation, &events]))
}
