//! Builds the ACPI tables, which describe the processors, the interrupt controllers and the
//! power-off and reset registers (ACPI specification 6.5, chapter 5).

use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Device, EISAName, IO, Interrupt, Name, Package, ResourceTemplate,
    Scope, ZERO,
};
use acpi_tables::facs::FACS;
use acpi_tables::fadt::{FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace as GasSpace, GAS};
use acpi_tables::madt::{EnabledStatus, IoApic, ProcessorLocalApic};
use acpi_tables::rsdp::Rsdp;
use acpi_tables::sdt::Sdt;
use acpi_tables::xsdt::XSDT;

use virtio_devices::transport::bus::{CONFIG_PORT, CONFIG_PORTS};

use super::aml::bytes_of;
use super::{events, layout, processors};
use crate::devices::ports;
use crate::numbers::VcpuCountRange;

const OEM_ID: [u8; 6] = *b"PERFVI";
const OEM_TABLE: [u8; 8] = *b"PERFVISR";
const OEM_REVISION: u32 = 1;

/// Interrupt number of the system control interrupt (SCI), which reports ACPI events such as a
/// press of the power button.
pub const SCI_IRQ: u8 = 9;
/// I/O APIC ID, the lowest ID that no local APIC can have.
pub const IO_APIC_ID: u8 = layout::MAX_CPUS;

/// MADT flag: the machine also has two 8259 PICs (5.2.12, table 5.20).
const MADT_PCAT_COMPAT: u32 = 1;
/// MADT revision of a machine without CPU hot-plug.
const MADT_REVISION: u8 = 4;
/// MADT revision of a machine with CPU hot-plug: the first one whose local APIC entries have the
/// flag "online capable" (5.2.12.2).
const MADT_REVISION_ONLINE_CAPABLE: u8 = 5;
/// MADT interrupt source override flags: the interrupt is active high (table 5.26).
const ACTIVE_HIGH: u16 = 1;
/// MADT interrupt source override flags: the interrupt is level-triggered (table 5.26).
const LEVEL: u16 = 3 << 2;

/// FADT IA-PC boot flag (table 5.11): legacy devices are present. The flags for an 8042 (bit 1) and
/// for the absence of a CMOS clock (bit 5) stay clear. With the 8042 flag set, the guest would
/// probe the controller, which costs thousands of exits.
const BOOT_LEGACY_DEVICES: u16 = 1 << 0;
/// FADT IA-PC boot flag (table 5.11): VGA is absent.
const BOOT_NO_VGA: u16 = 1 << 2;

/// Builds the ACPI tables and returns the guest-physical address and the bytes of each. The first
/// table is the RSDP, at [`layout::RSDP`]. If `pci` is set, the tables describe a PCI bus.
pub(crate) fn tables(cpus: VcpuCountRange, pci: bool) -> Vec<(u64, Vec<u8>)> {
    let mut at = layout::ACPI_TABLES;
    let mut placed: Vec<(u64, Vec<u8>)> = Vec::new();
    let mut place = |bytes: Vec<u8>| {
        let address = at;
        // The FACS requires 64-byte alignment.
        at = (at + bytes.len() as u64).next_multiple_of(64);
        placed.push((address, bytes));
        address
    };
    let dsdt = place(dsdt(cpus, pci));
    let facs = place(bytes_of(&FACS::new()));
    let fadt = place(fadt(dsdt, facs));
    let madt = place(madt(cpus));
    let mut xsdt = XSDT::new(OEM_ID, OEM_TABLE, OEM_REVISION);
    xsdt.add_entry(fadt);
    xsdt.add_entry(madt);
    let xsdt = place(bytes_of(&xsdt));
    placed.insert(0, (layout::RSDP, bytes_of(&Rsdp::new(OEM_ID, xsdt))));
    placed
}

/// Builds the DSDT, which describes the power-off sleep state, the serial port, the VM generation
/// ID, the PCI bus if `pci` is set and, with CPU hot-plug, the processors.
#[expect(clippy::cast_possible_truncation, reason = "the serial port has 8 registers")]
fn dsdt(cpus: VcpuCountRange, pci: bool) -> Vec<u8> {
    let s5 = Name::new(
        "_S5_".into(),
        &Package::new(vec![&ports::S5_SLEEP_TYPE, &ports::S5_SLEEP_TYPE, &ZERO, &ZERO]),
    );
    let hid = Name::new("_HID".into(), &EISAName::new("PNP0501"));
    let uid = Name::new("_UID".into(), &ZERO);
    let io = IO::new(ports::COM1, ports::COM1, 1, ports::COM1_LEN as u8);
    let irq = Interrupt::new(true, true, false, false, ports::COM1_IRQ);
    let resources = ResourceTemplate::new(vec![&io, &irq]);
    let crs = Name::new("_CRS".into(), &resources);
    let com1 = Device::new("COM1".into(), vec![&hid, &uid, &crs]);
    let scope = Scope::new("_SB_".into(), vec![&com1]);
    let mut sdt = Sdt::new(*b"DSDT", 36, 2, OEM_ID, OEM_TABLE, OEM_REVISION);
    sdt.append_slice(&bytes_of(&s5));
    sdt.append_slice(&bytes_of(&scope));
    if pci {
        sdt.append_slice(&pci_bus());
    }
    if cpus.can_change() {
        sdt.append_slice(&processors::devices(cpus));
    }
    sdt.append_slice(&events::devices(cpus.can_change()));
    sdt.as_slice().to_vec()
}

/// Builds the ACPI device of the PCI bus (PNP0A03): bus number, configuration ports and MMIO
/// window. The device has no interrupt routing table, because no PCI function uses an interrupt
/// pin.
fn pci_bus() -> Vec<u8> {
    let hid = Name::new("_HID".into(), &EISAName::new("PNP0A03"));
    let uid = Name::new("_UID".into(), &ZERO);
    let bus = AddressSpace::<u16>::new_bus_number(0, 0);
    let io = IO::new(CONFIG_PORT, CONFIG_PORT, 1, CONFIG_PORTS);
    let window = layout::PCI_WINDOW;
    let cacheable = AddressSpaceCacheable::NotCacheable;
    let memory = AddressSpace::<u32>::new_memory(cacheable, true, window.start, window.end - 1, None);
    let resources = ResourceTemplate::new(vec![&bus, &io, &memory]);
    let crs = Name::new("_CRS".into(), &resources);
    let pci0 = Device::new("PCI0".into(), vec![&hid, &uid, &crs]);
    bytes_of(&Scope::new("_SB_".into(), vec![&pci0]))
}

/// Builds the FADT. The table names no SMI command port, so the guest finds ACPI mode already
/// enabled.
#[expect(clippy::cast_possible_truncation, reason = "the layout puts it below 4 GiB")]
fn fadt(dsdt: u64, facs: u64) -> Vec<u8> {
    let io = |port: u16, bits: u8, size| GAS::new(GasSpace::SystemIo, bits, 0, size, u64::from(port));
    let mut fadt = FADTBuilder::new(OEM_ID, OEM_TABLE, OEM_REVISION)
        .dsdt_64(dsdt)
        .firmware_ctrl_32(facs as u32)
        .flag(Flags::Wbinvd)
        .flag(Flags::ProcC1)
        .flag(Flags::SlpButton)
        .flag(Flags::ResetRegSup)
        .flag(Flags::Headless)
        .preferred_pm_profile(PmProfile::EnterpriseServer);
    fadt.dsdt = (dsdt as u32).into();
    fadt.sci_int = u16::from(SCI_IRQ).into();
    fadt.pm1a_evt_blk = u32::from(ports::PM1A_EVENT).into();
    fadt.pm1_evt_len = ports::PM1A_EVENT_LEN;
    fadt.pm1a_cnt_blk = u32::from(ports::PM1A_CONTROL).into();
    fadt.pm1_cnt_len = ports::PM1A_CONTROL_LEN;
    fadt.x_pm1a_evt_blk = io(
        ports::PM1A_EVENT,
        8 * ports::PM1A_EVENT_LEN,
        AccessSize::WordAccess,
    );
    fadt.x_pm1a_cnt_blk = io(
        ports::PM1A_CONTROL,
        8 * ports::PM1A_CONTROL_LEN,
        AccessSize::WordAccess,
    );
    // Latencies above these limits mean that C2 and C3 are not supported (5.2.9).
    fadt.p_lvl2_lat = 101.into();
    fadt.p_lvl3_lat = 1001.into();
    fadt.century = ports::CMOS_CENTURY;
    fadt.iapc_boot_arch = (BOOT_LEGACY_DEVICES | BOOT_NO_VGA).into();
    fadt.reset_reg = io(ports::RESET_CONTROL, 8, AccessSize::ByteAccess);
    fadt.reset_value = ports::RESET_VALUE;
    bytes_of(&fadt.finalize())
}

/// Builds the MADT, which lists the processors and the interrupt controllers.
fn madt(cpus: VcpuCountRange) -> Vec<u8> {
    let revision = if cpus.can_change() {
        MADT_REVISION_ONLINE_CAPABLE
    } else {
        MADT_REVISION
    };
    let mut madt = Sdt::new(*b"APIC", 44, revision, OEM_ID, OEM_TABLE, OEM_REVISION);
    madt.write_u32(36, layout::LOCAL_APIC);
    madt.write_u32(40, MADT_PCAT_COMPAT);
    for id in 0..cpus.max() {
        let status = if id < cpus.present() {
            EnabledStatus::Enabled
        } else {
            EnabledStatus::DisabledOnlineCapable
        };
        madt.append_slice(&bytes_of(&ProcessorLocalApic::new(id, id, status)));
    }
    madt.append_slice(&bytes_of(&IoApic::new(IO_APIC_ID, layout::IO_APIC, 0)));
    // IRQ 0 needs no override: KVM's default routing connects the timer interrupt to I/O APIC input
    // 0, which is the ACPI default.
    madt.append_slice(&source_override(SCI_IRQ, u32::from(SCI_IRQ), LEVEL | ACTIVE_HIGH));
    // The NMI is LINT1 of every local APIC (type 4; processor 0xFF means all).
    madt.append_slice(&[4, 6, 0xFF, 0, 0, 1]);
    madt.as_slice().to_vec()
}

/// Builds a MADT interrupt source override (5.2.12.5), which maps ISA interrupt `irq` to global
/// system interrupt `gsi`.
fn source_override(irq: u8, gsi: u32, flags: u16) -> [u8; 10] {
    let g = gsi.to_le_bytes();
    let f = flags.to_le_bytes();
    [2, 10, 0, irq, g[0], g[1], g[2], g[3], f[0], f[1]]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum(bytes: &[u8]) -> u8 {
        bytes.iter().fold(0, |a, b| a.wrapping_add(*b))
    }

    /// The MADT has no override for the timer interrupt: KVM's timer raises I/O APIC input 0, the
    /// input that Linux uses without an override.
    #[test]
    fn timer_irq_has_no_source_override() {
        let madt = madt("1".parse().unwrap());
        let mut at = 44;
        let mut overridden = Vec::new();
        while at < madt.len() {
            if madt[at] == 2 {
                overridden.push(madt[at + 3]);
            }
            at += usize::from(madt[at + 1]);
        }
        assert_eq!(overridden, [SCI_IRQ]);
    }

    #[test]
    fn checksums_addresses_and_processor_counts_are_right_for_every_size() {
        for cpus in ["1", "2", "63", "64", "1,max=2", "3,max=64", "63,max=64"] {
            let numbers: VcpuCountRange = cpus.parse().unwrap();
            let tables = tables(numbers, true);
            let (rsdp_at, rsdp) = &tables[0];
            assert_eq!(*rsdp_at, layout::RSDP);
            assert_eq!(sum(&rsdp[..20]), 0);
            assert_eq!(sum(rsdp), 0);
            let end = tables.iter().map(|(a, b)| a + b.len() as u64).max().unwrap();
            assert!(end <= layout::ACPI_END, "{cpus} cpus end at {end:#x}");
            let xsdt_at = u64::from_le_bytes(rsdp[24..32].try_into().unwrap());
            let find = |at: u64| &tables.iter().find(|(a, _)| *a == at).unwrap().1;
            let xsdt = find(xsdt_at);
            assert_eq!(sum(xsdt), 0);
            let mut signatures = Vec::new();
            for entry in xsdt[36..].chunks_exact(8) {
                let table = find(u64::from_le_bytes(entry.try_into().unwrap()));
                assert_eq!(sum(table), 0);
                assert_eq!(
                    u32::from_le_bytes(table[4..8].try_into().unwrap()) as usize,
                    table.len()
                );
                signatures.push(table[..4].to_vec());
                if &table[..4] == b"APIC" {
                    let mut at = 44;
                    let mut lapics = Vec::new();
                    while at < table.len() {
                        if table[at] == 0 {
                            lapics.push((table[at + 3], table[at + 4]));
                        }
                        at += usize::from(table[at + 1]);
                    }
                    assert_eq!(at, table.len());
                    // Flags of a processor's MADT entry: enabled (1), or online capable (2).
                    let flags = |id| if id < numbers.present() { 1 } else { 2 };
                    let expected: Vec<_> = (0..numbers.max()).map(|id| (id, flags(id))).collect();
                    assert_eq!(lapics, expected);
                    assert_eq!(table[8], if numbers.can_change() { 5 } else { 4 });
                }
                if &table[..4] == b"FACP" {
                    let dsdt = find(u64::from(u32::from_le_bytes(table[40..44].try_into().unwrap())));
                    assert_eq!(&dsdt[..4], b"DSDT");
                    assert_eq!(sum(dsdt), 0);
                    // Every processor has a device, and every processor except the first has an
                    // _EJ0 method. Without hot-plug, there are no such devices.
                    let count = |what: &[u8]| dsdt.windows(what.len()).filter(|w| *w == what).count();
                    let devices = if numbers.can_change() {
                        usize::from(numbers.max())
                    } else {
                        0
                    };
                    assert_eq!(count(b"ACPI0007"), devices, "{cpus}");
                    assert_eq!(count(b"_EJ0"), devices.saturating_sub(1), "{cpus}");
                    assert_eq!(count(b"ACPI0013"), 1, "{cpus}");
                    assert_eq!(count(b"VGEN\x08_HID"), 1, "{cpus}");
                    // Notify (VGEN, 0x80), after the package with the address of the ID.
                    assert_eq!(count(b"\x86VGEN\x0a\x80"), 1, "{cpus}");
                    let address = u32::try_from(layout::GENERATION_ID).unwrap().to_le_bytes();
                    assert_eq!(count(&[&b"\x0c"[..], &address].concat()), 1, "{cpus}");
                    let scans = if numbers.can_change() { 2 } else { 0 };
                    assert_eq!(count(b"SCAN"), scans, "{cpus}");
                    let facs = find(u64::from(u32::from_le_bytes(table[36..40].try_into().unwrap())));
                    assert_eq!(&facs[..4], b"FACS");
                }
            }
            assert_eq!(signatures, [b"FACP".to_vec(), b"APIC".to_vec()]);
        }
    }
}
