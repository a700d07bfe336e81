//! A keyboard controller without a keyboard, which answers the guest's probes and can reset the
//! machine.
//!
//! A command that has a response gives it immediately. A driver that waits for a missing response
//! polls the status port ten thousand times, with one exit per poll.

use snapshot::state::SavedLegacyDevices;

use super::outcome::DeviceWriteOutcome;

/// Status bit: the output buffer is full.
const STATUS_OUTPUT_FULL: u8 = 1 << 0;
/// Status bit: system flag, set after a passed self-test.
const STATUS_SYSTEM: u8 = 1 << 2;
/// Status bit: the keyboard is not locked.
const STATUS_UNLOCKED: u8 = 1 << 4;
/// Controller command: read the configuration byte.
const READ_CONFIG: u8 = 0x20;
/// Controller command: write the configuration byte.
const WRITE_CONFIG: u8 = 0x60;
/// Controller command: test the mouse port.
const TEST_AUX: u8 = 0xA9;
/// Controller command: self-test.
const SELF_TEST: u8 = 0xAA;
/// Controller command: test the keyboard port.
const TEST_KEYBOARD: u8 = 0xAB;
/// Controller command: read the input port.
const READ_INPUT: u8 = 0xC0;
/// Controller command: read the output port.
const READ_OUTPUT: u8 = 0xD0;
/// Controller command: write the output port.
const WRITE_OUTPUT: u8 = 0xD1;
/// Controller command: loop the next data byte back through the mouse port.
const AUX_LOOP: u8 = 0xD3;
/// Controller command: send the next data byte to the mouse.
const WRITE_AUX: u8 = 0xD4;
/// Controller command: pulse the reset line of the processor.
const PULSE_RESET: u8 = 0xFE;
/// Bit 0 of the controller's output port: while clear, the processor is held in reset.
const OUTPUT_NOT_RESET: u8 = 1 << 0;
/// Bit 1 of the controller's output port: address line A20.
const OUTPUT_A20: u8 = 1 << 1;
/// Response to the self-test command: passed.
const SELF_TEST_PASSED: u8 = 0x55;
/// Response to a port test: the port works.
const PORT_OK: u8 = 0x00;
/// Response to a port test: the clock line is stuck.
const PORT_STUCK: u8 = 0x01;
/// Response of a keyboard or mouse port without a device: "resend".
const RESEND: u8 = 0xFE;

/// A keyboard controller without a keyboard.
#[derive(Debug, Default)]
pub(super) struct I8042 {
    config: u8,
    /// Last command, if it still expects a data byte.
    pending: Option<u8>,
    output: Option<u8>,
}

impl I8042 {
    /// Copies the registers to `board`, for a snapshot.
    pub fn save(&self, board: &mut SavedLegacyDevices) {
        board.i8042_config = self.config;
        board.i8042_pending = self.pending;
        board.i8042_output = self.output;
    }

    /// Restores the registers from a snapshot.
    pub fn restore(&mut self, board: &SavedLegacyDevices) {
        self.config = board.i8042_config;
        self.pending = board.i8042_pending;
        self.output = board.i8042_output;
    }

    pub fn read_data(&mut self) -> u8 {
        self.output.take().unwrap_or(0)
    }

    pub fn read_status(&self) -> u8 {
        let full = if self.output.is_some() {
            STATUS_OUTPUT_FULL
        } else {
            0
        };
        STATUS_SYSTEM | STATUS_UNLOCKED | full
    }

    pub fn write_command(&mut self, command: u8) -> DeviceWriteOutcome {
        self.pending = None;
        match command {
            READ_CONFIG => self.output = Some(self.config),
            SELF_TEST => self.output = Some(SELF_TEST_PASSED),
            TEST_KEYBOARD => self.output = Some(PORT_OK),
            // There is no second port (mouse), so its test reports a stuck clock line.
            TEST_AUX => self.output = Some(PORT_STUCK),
            READ_INPUT => self.output = Some(0),
            READ_OUTPUT => self.output = Some(OUTPUT_NOT_RESET | OUTPUT_A20),
            WRITE_CONFIG | WRITE_OUTPUT | AUX_LOOP | WRITE_AUX => self.pending = Some(command),
            PULSE_RESET => return DeviceWriteOutcome::Reset,
            _ => {}
        }
        DeviceWriteOutcome::Continue
    }

    pub fn write_data(&mut self, value: u8) -> DeviceWriteOutcome {
        match self.pending.take() {
            Some(WRITE_CONFIG) => self.config = value,
            Some(WRITE_OUTPUT) if value & OUTPUT_NOT_RESET == 0 => return DeviceWriteOutcome::Reset,
            Some(WRITE_OUTPUT) => {}
            Some(_) | None => self.output = Some(RESEND),
        }
        DeviceWriteOutcome::Continue
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i8042_answers_probe_commands_immediately() {
        let mut c = I8042::default();
        for (command, answer) in [(0x20, 0), (0xAA, 0x55), (0xAB, 0), (0xA9, 1)] {
            assert_eq!(c.read_status() & 1, 0);
            c.write_command(command);
            assert_eq!(c.read_status() & 1, 1);
            assert_eq!(c.read_data(), answer);
        }
        c.write_command(0x60);
        c.write_data(0x47);
        c.write_command(0x20);
        assert_eq!(c.read_data(), 0x47);
    }

    /// A command that takes a data byte uses exactly one, unless another command follows first. Any
    /// other data byte goes to a keyboard port without a device, which responds with "resend".
    #[test]
    fn i8042_command_consumes_one_data_byte() {
        let mut c = I8042::default();
        for command in [AUX_LOOP, WRITE_AUX] {
            c.write_command(command);
            assert_eq!(c.read_status() & STATUS_OUTPUT_FULL, 0, "{command:#x}");
            c.write_data(0xF4);
            assert_eq!(c.read_data(), RESEND, "{command:#x}");
        }
        c.write_command(WRITE_CONFIG);
        c.write_command(READ_INPUT);
        assert_eq!(c.read_data(), 0);
        c.write_data(0x47);
        assert_eq!(
            c.read_data(),
            RESEND,
            "the configuration was not waiting any more"
        );
        c.write_command(READ_CONFIG);
        assert_eq!((c.read_data(), c.read_data()), (0, 0));
        c.write_command(READ_OUTPUT);
        assert_eq!(c.read_data(), OUTPUT_NOT_RESET | OUTPUT_A20);
    }

    /// Only two commands reset the machine: a write to the output port in which the reset bit is
    /// clear, and the pulse command. The same byte written to another port of the controller does
    /// not.
    #[test]
    fn i8042_resets_only_through_output_port() {
        for low in [0x00, 0x02, 0xDE, 0xFE] {
            for command in 0..=u8::MAX {
                let mut c = I8042::default();
                let pulsed = c.write_command(command);
                assert_eq!(
                    pulsed == DeviceWriteOutcome::Reset,
                    command == PULSE_RESET,
                    "{command:#x}"
                );
                let pulled = c.write_data(low);
                assert_eq!(
                    pulled == DeviceWriteOutcome::Reset,
                    command == WRITE_OUTPUT,
                    "{command:#x}, {low:#x}"
                );
                assert_eq!(c.write_data(low), DeviceWriteOutcome::Continue, "once");
            }
        }
        let mut c = I8042::default();
        c.write_command(WRITE_OUTPUT);
        assert_eq!(c.write_data(OUTPUT_NOT_RESET), DeviceWriteOutcome::Continue);
    }
}
