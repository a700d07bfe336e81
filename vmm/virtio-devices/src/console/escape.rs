//! Escape sequences with which a terminal user leaves a guest's console.

/// The byte of Ctrl-A, the prefix of key sequences for the VMM.
const ESCAPE: u8 = 0x01;

/// Action for a byte that the user types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyAction {
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
pub struct EscapeParser {
    pending: bool,
}

impl EscapeParser {
    /// Processes the next byte from the terminal and returns the action to take.
    pub fn feed(&mut self, byte: u8) -> KeyAction {
        if !std::mem::take(&mut self.pending) {
            if byte == ESCAPE {
                self.pending = true;
                return KeyAction::Nothing;
            }
            return KeyAction::Guest(byte);
        }
        match byte {
            b'x' | b'X' => KeyAction::Quit,
            b'h' | b'H' | b'?' => KeyAction::Help,
            ESCAPE => KeyAction::Guest(ESCAPE),
            _ => KeyAction::Nothing,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(bytes: &[u8]) -> Vec<KeyAction> {
        let mut escape = EscapeParser::default();
        bytes
            .iter()
            .map(|b| escape.feed(*b))
            .filter(|k| *k != KeyAction::Nothing)
            .collect()
    }

    #[test]
    fn escape_parser_handles_only_control_a() {
        assert_eq!(
            keys(b"a\x03\x04"),
            [KeyAction::Guest(b'a'), KeyAction::Guest(3), KeyAction::Guest(4)]
        );
        assert_eq!(keys(b"\x01x"), [KeyAction::Quit]);
        assert_eq!(keys(b"\x01\x01x"), [KeyAction::Guest(1), KeyAction::Guest(b'x')]);
        assert_eq!(keys(b"\x01qz"), [KeyAction::Guest(b'z')]);
        assert_eq!(keys(b"\x01hz"), [KeyAction::Help, KeyAction::Guest(b'z')]);
    }
}
