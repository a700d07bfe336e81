//! I/O port and interrupt numbers of the devices.

use std::ops::RangeInclusive;

/// First I/O port of the first serial port.
pub const COM1: u16 = 0x3F8;
/// Number of ports of the first serial port.
pub const COM1_LEN: u16 = 8;
/// Interrupt number of the first serial port.
pub const COM1_IRQ: u32 = 4;
/// Data port of the keyboard controller.
pub const I8042_DATA: u16 = 0x60;
/// System control port B: gate of timer 2 and speaker.
pub const SYSTEM_CONTROL_B: u16 = 0x61;
/// Command and status port of the keyboard controller.
pub const I8042_COMMAND: u16 = 0x64;
/// Port that selects a CMOS register.
pub const CMOS_INDEX: u16 = 0x70;
/// Port that reads or writes the selected CMOS register.
pub const CMOS_DATA: u16 = 0x71;
/// Index of the CMOS century register.
pub const CMOS_CENTURY: u8 = 0x32;
/// Port for power-on self-test codes. Kernels also write to it as a delay.
pub const POST: u16 = 0x80;
/// Debug-exit port. A write of `value` ends the VM with exit status `(value << 1) | 1`.
pub const DEBUG_EXIT: u16 = 0xF4;
/// Ports of the debug-exit device.
pub const DEBUG_EXIT_PORTS: RangeInclusive<u16> = DEBUG_EXIT..=DEBUG_EXIT + 3;
/// System control port A: fast control of A20 and fast reset.
pub const SYSTEM_CONTROL_A: u16 = 0x92;
/// Selector port of the fw_cfg device.
pub const FW_CFG_SELECT: u16 = 0x510;
/// Data port of the fw_cfg device.
pub const FW_CFG_DATA: u16 = 0x511;
/// First I/O port of the ACPI PM1a event block: a status and an enable register of 16 bits each.
pub const PM1A_EVENT: u16 = 0x600;
/// Length of the PM1a event block in bytes.
pub const PM1A_EVENT_LEN: u8 = 4;
/// I/O port of the ACPI PM1a control block.
pub const PM1A_CONTROL: u16 = 0x604;
/// Length of the PM1a control block in bytes.
pub const PM1A_CONTROL_LEN: u8 = 2;
/// Value of the PM1 control field SLP_TYP that selects the state S5 (soft off).
pub const S5_SLEEP_TYPE: u8 = 0;
/// First I/O port of the CPU hot-plug registers. Belongs to no device if the machine has no CPU
/// hot-plug.
pub const CPU_PLUG: u16 = 0xCD8;
/// Number of I/O ports of the CPU hot-plug registers.
pub const CPU_PLUG_LEN: u16 = 12;
/// Interrupt number of CPU hot-plug events.
pub const CPU_PLUG_IRQ: u32 = 5;
/// Interrupt number that announces a new VM generation ID.
pub const GENERATION_IRQ: u32 = 10;
/// PCI configuration address port. Reads as all ones without a PCI bus.
pub const PCI_ADDRESS: u16 = 0xCF8;
/// I/O port of the reset control register (port CF9H).
pub const RESET_CONTROL: u16 = 0xCF9;
/// Value that requests a full reset when written to [`RESET_CONTROL`].
pub const RESET_VALUE: u8 = 0x06;
/// First port of the PCI configuration data.
pub const PCI_DATA: u16 = 0xCFC;
/// Last port of the PCI configuration data.
pub const PCI_DATA_END: u16 = 0xCFF;
