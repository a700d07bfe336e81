//! ACPI power management registers. The guest powers off through them, and receives presses of the
//! power button as a fixed feature (ACPI 6.5, 4.8.2.2 and 4.8.3).

use snapshot::state::SavedLegacyDevices;

use super::outcome::DeviceWriteOutcome;
use super::ports;

/// PM1 status and enable bit of the power button (4.8.3.1, table 4.15).
const PWRBTN: u16 = 1 << 8;
/// Bit of the PM1 control register that reports ACPI mode. Always set, because there is no legacy
/// mode.
const SCI_EN: u16 = 1 << 0;
/// Shift of the sleep type field in the PM1 control register.
const SLP_TYP_SHIFT: u16 = 10;
/// Mask of the sleep type field, after the shift.
const SLP_TYP_MASK: u16 = 7;
/// Bit of the PM1 control register that enters the selected sleep state.
const SLP_EN: u16 = 1 << 13;

/// Callback that sets the level of the SCI: `true` to assert it.
pub type SciLine = Box<dyn Fn(bool) + Send + Sync>;

/// ACPI power management registers: the PM1a event block and the PM1a control block.
#[derive(Default)]
pub(super) struct AcpiPm {
    status: u16,
    enable: u16,
    control: u16,
    /// Callback that sets the level of the SCI; `None` before [`AcpiPm::connect_sci`].
    sci: Option<SciLine>,
}

impl AcpiPm {
    /// Sets the callback for the level of the SCI.
    pub fn connect_sci(&mut self, sci: SciLine) {
        self.sci = Some(sci);
    }

    /// Resets the registers to their initial state.
    pub fn reset(&mut self) {
        *self = Self {
            sci: self.sci.take(),
            ..Self::default()
        };
        self.update_sci_level();
    }

    /// Copies the registers to `board`, for a snapshot.
    pub fn save(&self, board: &mut SavedLegacyDevices) {
        board.acpi_pm = [self.status, self.enable, self.control];
    }

    /// Restores saved registers and the level of the SCI. The I/O APIC must already be restored.
    pub fn restore(&mut self, board: &SavedLegacyDevices) {
        let [status, enable, control] = board.acpi_pm;
        self.status = status & PWRBTN;
        self.enable = enable;
        self.control = control & !SLP_EN;
        self.update_sci_level();
    }

    /// Presses the power button. Returns `false`, without an effect, if the guest has not enabled
    /// the power button event.
    pub fn press_power_button(&mut self) -> bool {
        if !self.is_power_button_enabled() {
            return false;
        }
        self.status |= PWRBTN;
        self.update_sci_level();
        true
    }

    /// Returns whether the guest has enabled the power button event.
    pub fn is_power_button_enabled(&self) -> bool {
        self.enable & PWRBTN != 0
    }

    /// Asserts the SCI if an enabled event is pending, and deasserts it otherwise.
    fn update_sci_level(&self) {
        if let Some(sci) = &self.sci {
            sci(self.status & self.enable & PWRBTN != 0);
        }
    }

    /// Reads the byte at `offset` from the start of the event block.
    pub fn read_byte(&self, offset: u16) -> u8 {
        let word = match offset / 2 {
            0 => self.status,
            1 => self.enable,
            _ => self.control | SCI_EN,
        };
        word.to_le_bytes()[usize::from(offset & 1)]
    }

    /// Writes the byte at `offset` from the start of the event block.
    pub fn write_byte(&mut self, offset: u16, value: u8) -> DeviceWriteOutcome {
        let merge = |word: u16| {
            let mut bytes = word.to_le_bytes();
            bytes[usize::from(offset & 1)] = value;
            u16::from_le_bytes(bytes)
        };
        match offset / 2 {
            // Writing a one clears the status bit.
            0 => {
                self.status &= !merge(0);
                self.update_sci_level();
                DeviceWriteOutcome::Continue
            }
            1 => {
                self.enable = merge(self.enable);
                self.update_sci_level();
                DeviceWriteOutcome::Continue
            }
            _ => self.write_control(merge(self.control)),
        }
    }

    /// Writes the control register. Returns [`DeviceWriteOutcome::PowerOff`] if the write sets
    /// SLP_EN with the sleep type of soft-off. SLP_EN always reads as zero.
    pub fn write_control(&mut self, value: u16) -> DeviceWriteOutcome {
        self.control = value & !SLP_EN;
        let sleep_type = (value >> SLP_TYP_SHIFT) & SLP_TYP_MASK;
        if value & SLP_EN != 0 && sleep_type == u16::from(ports::S5_SLEEP_TYPE) {
            return DeviceWriteOutcome::PowerOff;
        }
        DeviceWriteOutcome::Continue
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    /// A press of the power button asserts the SCI until the guest clears the status bit. A guest
    /// that has not enabled the power button event does not see the press.
    #[test]
    fn power_button_asserts_sci_until_acknowledged() {
        let level = Arc::new(AtomicBool::new(false));
        let mut pm = AcpiPm::default();
        let line = level.clone();
        pm.connect_sci(Box::new(move |up| line.store(up, Ordering::SeqCst)));
        let is_up = || level.load(Ordering::SeqCst);

        assert!(!pm.press_power_button() && !is_up());
        pm.write_byte(3, 1);
        assert!(!is_up() && pm.read_byte(1) == 0);
        assert!(pm.press_power_button() && is_up());
        assert_eq!((pm.read_byte(0), pm.read_byte(1)), (0, 1));
        pm.write_byte(1, 0xfe);
        assert!(is_up(), "the bits of other events clear nothing");
        pm.write_byte(3, 0);
        assert!(!is_up() && pm.read_byte(1) == 1, "masked, and still there");
        pm.write_byte(3, 1);
        assert!(is_up());
        pm.write_byte(1, 1);
        assert!(!is_up() && pm.read_byte(1) == 0);

        assert!(pm.press_power_button() && is_up());
        pm.reset();
        assert!(!is_up() && !pm.is_power_button_enabled() && pm.read_byte(1) == 0);
    }

    proptest::proptest! {
        /// The SCI is asserted exactly while a bit is set in both the status and the enable
        /// register. Only writing a one clears a status bit. Only the sleep type of soft-off powers
        /// the machine off.
        #[test]
        fn sci_level_follows_status_and_enable(
            steps in proptest::collection::vec((0u16..7, proptest::prelude::any::<u8>()), 0..60),
        ) {
            let level = Arc::new(AtomicBool::new(false));
            let mut pm = AcpiPm::default();
            let line = level.clone();
            pm.connect_sci(Box::new(move |up| line.store(up, Ordering::SeqCst)));
            // Model of the status and enable bytes that contain the power button bit.
            let (mut status, mut enable) = (0u8, 0u8);
            for (offset, value) in steps {
                let outcome = if offset == 6 {
                    let is_power_button_enabled = enable & 1 != 0;
                    assert_eq!(pm.press_power_button(), is_power_button_enabled);
                    status |= u8::from(is_power_button_enabled);
                    DeviceWriteOutcome::Continue
                } else {
                    pm.write_byte(offset, value)
                };
                match offset {
                    1 => status &= !value,
                    3 => enable = value,
                    _ => {}
                }
                let off = offset == 5 && value & 0x20 != 0 && value & 0x1C == 0;
                assert_eq!(outcome == DeviceWriteOutcome::PowerOff, off, "{offset}: {value:#x}");
                assert_eq!((pm.read_byte(1), pm.read_byte(3)), (status, enable));
                assert_eq!(level.load(Ordering::SeqCst), status & enable & 1 != 0);
                assert_eq!(pm.read_byte(4) & 1, 1, "there is no other mode than ACPI's");
                assert_eq!(pm.read_byte(5) & 0x20, 0, "the sleep that was asked for does not read back");
            }
        }
    }
}
