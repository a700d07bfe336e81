//! ACPI power management registers: just enough to power off. ACPI 6.5, 4.8.3.

use super::{BusOutcome, ports};

/// PM1 control: the interrupt mode is SCI; always set, as there is no other mode.
const SCI_EN: u16 = 1 << 0;
/// PM1 control: sleep type and enable.
const SLP_TYP_SHIFT: u16 = 10;
const SLP_TYP_MASK: u16 = 7;
const SLP_EN: u16 = 1 << 13;

/// The PM1a event and control blocks.
#[derive(Debug, Default)]
pub(super) struct AcpiPm {
    enable: u16,
    control: u16,
}

impl AcpiPm {
    /// One byte, `offset` from the event block. Status is always 0: no event ever happens.
    pub fn read_byte(&self, offset: u16) -> u8 {
        let word = match offset / 2 {
            0 => 0,
            1 => self.enable,
            _ => self.control | SCI_EN,
        };
        word.to_le_bytes()[usize::from(offset & 1)]
    }

    /// One byte, `offset` from the event block.
    pub fn write_byte(&mut self, offset: u16, value: u8) -> BusOutcome {
        let merge = |word: u16| {
            let mut bytes = word.to_le_bytes();
            bytes[usize::from(offset & 1)] = value;
            u16::from_le_bytes(bytes)
        };
        match offset / 2 {
            0 => BusOutcome::Continue,
            1 => {
                self.enable = merge(self.enable);
                BusOutcome::Continue
            }
            _ => self.write_control(merge(self.control)),
        }
    }

    /// The whole control register. SLP_EN starts the sleep and reads as zero.
    pub fn write_control(&mut self, value: u16) -> BusOutcome {
        self.control = value & !SLP_EN;
        let sleep_type = (value >> SLP_TYP_SHIFT) & SLP_TYP_MASK;
        if value & SLP_EN != 0 && sleep_type == u16::from(ports::S5_SLEEP_TYPE) {
            return BusOutcome::PowerOff;
        }
        BusOutcome::Continue
    }
}
