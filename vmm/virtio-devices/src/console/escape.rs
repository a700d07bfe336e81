//! Escape sequences with which a terminal user leaves a guest's console.

/// The byte of Ctrl-A, the prefix of key sequences for the VMM.
const ESCAPE: u8 = 0x01;

/// Action for a byte that the user types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConsoleKeyAction {
    /// Send this byte to the guest.
    Guest(u8),
    /// Terminate the VM (key sequence Ctrl-A x).
    Quit,
    /// List the key sequences (Ctrl-A h).
    Help,
    /// Do nothing, because the byte is the prefix or completes an unknown key sequence.
    Nothing,
}

/// Parser of escape sequences: Ctrl-A x terminates the VM, Ctrl-A Ctrl-A sends one Ctrl-A, and
/// Ctrl-A h lists the sequences.
#[derive(Clone, Copy, Debug, Default)]
pub struct ConsoleEscapeParser {
    pending: bool,
}

impl ConsoleEscapeParser {
    /// Processes the next byte from the terminal and returns the action to take.
    pub fn feed(&mut self, byte: u8) -> ConsoleKeyAction {
        if !std::mem::take(&mut self.pending) {
            if byte == ESCAPE {
                self.pending = true;
                return ConsoleKeyAction::Nothing;
            }
            return ConsoleKeyAction::Guest(byte);
        }
        match byte {
            b'x' | b'X' => ConsoleKeyAction::Quit,
            b'h' | b'H' | b'?' => ConsoleKeyAction::Help,
            ESCAPE => ConsoleKeyAction::Guest(ESCAPE),
            _ => ConsoleKeyAction::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(bytes: &[u8]) -> Vec<ConsoleKeyAction> {
        let mut escape = ConsoleEscapeParser::default();
        bytes
            .iter()
            .map(|b| escape.feed(*b))
            .filter(|k| *k != ConsoleKeyAction::Nothing)
            .collect()
    }

    #[test]
    fn escape_parser_handles_only_control_a() {
        assert_eq!(
            keys(b"a\x03\x04"),
            [
                ConsoleKeyAction::Guest(b'a'),
                ConsoleKeyAction::Guest(3),
                ConsoleKeyAction::Guest(4)
            ]
        );
        assert_eq!(keys(b"\x01x"), [ConsoleKeyAction::Quit]);
        assert_eq!(
            keys(b"\x01\x01x"),
            [ConsoleKeyAction::Guest(1), ConsoleKeyAction::Guest(b'x')]
        );
        assert_eq!(keys(b"\x01qz"), [ConsoleKeyAction::Guest(b'z')]);
        assert_eq!(
            keys(b"\x01hz"),
            [ConsoleKeyAction::Help, ConsoleKeyAction::Guest(b'z')]
        );
    }
}
