//! Logs the reason for the end of a VM, and detects a Linux panic on the serial console.

use std::io::{self, Write};
use std::sync::{Arc, Mutex, PoisonError};

use vmm::vcpu::control::VmStopReason;

/// Start of the line that Linux prints when it panics.
const PANIC: &str = "Kernel panic - not syncing: ";
/// Maximum length of a console line that is searched, in bytes.
const MAX_LINE: usize = 256;

/// Console writer that stores the last panic message of a Linux guest.
pub(super) struct PanicDetector {
    console: Box<dyn Write + Send>,
    line: Vec<u8>,
    panic: PanicMessage,
}

/// The last panic message of the guest's kernel; empty if it did not panic.
#[derive(Clone, Debug, Default)]
pub(super) struct PanicMessage(Arc<Mutex<String>>);

impl PanicDetector {
    pub(super) fn new(console: Box<dyn Write + Send>) -> (Self, PanicMessage) {
        let panic = PanicMessage::default();
        let detector = Self {
            console,
            line: Vec::new(),
            panic: panic.clone(),
        };
        (detector, panic)
    }

    fn search(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if byte == b'\n' {
                self.panic.search(&self.line);
                self.line.clear();
            } else if self.line.len() < MAX_LINE {
                self.line.push(byte);
            }
        }
    }
}

impl Write for PanicDetector {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.console.write(bytes)?;
        self.search(bytes.get(..written).unwrap_or_default());
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.console.flush()
    }
}

impl PanicMessage {
    /// Stores the panic message if `line` contains one. The guest controls the contents of `line`.
    fn search(&self, line: &[u8]) {
        let line = String::from_utf8_lossy(line);
        // At the end of its panic handling, Linux prints the message once more after `---[ end`.
        if let Some((_, message)) = line.split_once(PANIC)
            && !line.contains("---[ end")
        {
            let printable = |c: char| if c.is_ascii_graphic() || c == ' ' { c } else { '?' };
            let message = message.trim_end().chars().map(printable).collect();
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = message;
        }
    }

    fn text(&self) -> String {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Logs why the VM ended, unless the guest or the operator stopped it in the usual way or the cause
/// has been logged.
pub(super) fn log_end(reason: Option<VmStopReason>, panic: &PanicMessage) {
    if let Some(line) = end_line(reason, &panic.text()) {
        log::warn!("{line}");
    }
}

fn end_line(reason: Option<VmStopReason>, panic: &str) -> Option<String> {
    match reason? {
        VmStopReason::Reset if panic.is_empty() => Some(
            "the VM ended: the guest reset the machine; use --on-reset restart to boot it again".to_owned(),
        ),
        VmStopReason::Reset => Some(format!(
            "the VM ended: the guest's kernel panicked ({panic}) and reset the machine"
        )),
        VmStopReason::Signal(signal) => {
            let name = match signal {
                libc::SIGTERM => "SIGTERM".to_owned(),
                libc::SIGINT => "SIGINT".to_owned(),
                libc::SIGHUP => "SIGHUP".to_owned(),
                libc::SIGQUIT => "SIGQUIT".to_owned(),
                other => format!("signal {other}"),
            };
            Some(if panic.is_empty() {
                format!("the VM ended: {name}")
            } else {
                format!("the VM ended: {name}; the guest's kernel had panicked ({panic})")
            })
        }
        // The vCPU or the restart has logged the cause.
        VmStopReason::TripleFault | VmStopReason::Failed | VmStopReason::NotRestarted => None,
        VmStopReason::PowerOff | VmStopReason::DebugExit(_) | VmStopReason::Operator => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panic_of(pieces: &[&[u8]]) -> String {
        let (mut detector, panic) = PanicDetector::new(Box::new(io::sink()));
        for piece in pieces {
            detector.write_all(piece).unwrap();
        }
        panic.text()
    }

    #[test]
    fn panic_message_is_found_in_console_output_of_single_bytes() {
        let text =
            b"[    1.2] Kernel panic - not syncing: VFS: Unable to mount root fs\r\n[    1.3] CPU: 0\r\n\
            [    1.9] ---[ end Kernel panic - not syncing: VFS: Unable to mount root fs ]---\r\n";
        let bytes: Vec<&[u8]> = text.chunks(1).collect();
        assert_eq!(panic_of(&bytes), "VFS: Unable to mount root fs");
        assert_eq!(panic_of(&[text]), "VFS: Unable to mount root fs");
        assert_eq!(panic_of(&[b"login: \r\nKernel panics are rare\r\n"]), "");
    }

    #[test]
    fn panic_message_is_bounded_and_printable() {
        let mut line = b"Kernel panic - not syncing: \x1b[2J\xff".to_vec();
        line.extend([b'x'; 5000]);
        line.push(b'\n');
        let message = panic_of(&[&line]);
        assert!(message.starts_with("?[2J?xxx"), "{message}");
        assert!(message.len() < MAX_LINE);
    }

    #[test]
    fn end_line_names_the_cause_of_an_unusual_end() {
        let line = |reason, panic| end_line(Some(reason), panic).unwrap_or_default();
        assert!(line(VmStopReason::Reset, "").contains("the guest reset the machine"));
        assert!(line(VmStopReason::Reset, "Oops").contains("panicked (Oops)"));
        assert_eq!(
            line(VmStopReason::Signal(libc::SIGTERM), ""),
            "the VM ended: SIGTERM"
        );
        assert!(line(VmStopReason::Signal(libc::SIGINT), "Oops").contains("panicked (Oops)"));
        assert_eq!(line(VmStopReason::PowerOff, "Oops"), "");
        assert_eq!(line(VmStopReason::Operator, ""), "");
    }
}
