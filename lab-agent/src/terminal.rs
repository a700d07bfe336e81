//! Handling of terminals: the terminal of the lab's user, and the terminals of commands in the lab.
#![expect(unsafe_code, reason = "ioctl for the window size")]

use std::fs::File;
use std::io::{self, IsTerminal};
use std::os::fd::{AsFd, AsRawFd};
use std::process::Command;

use guest_agent::request::Terminal;
use nix::pty::Winsize;
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};

use crate::wire::TerminalSize;

/// Raw mode of the terminal on standard input. Dropping this value restores the former mode.
pub struct RawMode {
    former: Termios,
}

impl RawMode {
    /// Puts the terminal on standard input into raw mode. Keys arrive one by one, and Ctrl-C
    /// arrives as a byte instead of sending a signal. Returns `None` if standard input is not a
    /// terminal.
    ///
    /// # Errors
    /// Returns an error if the mode cannot be changed.
    pub fn enter() -> io::Result<Option<Self>> {
        let stdin = io::stdin();
        if !stdin.is_terminal() {
            return Ok(None);
        }
        let former = tcgetattr(&stdin)?;
        let mut raw = former.clone();
        cfmakeraw(&mut raw);
        // Keep output processing, because this program ends its lines with only a line feed.
        raw.output_flags = former.output_flags;
        tcsetattr(&stdin, SetArg::TCSADRAIN, &raw)?;
        Ok(Some(Self { former }))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        let _ = tcsetattr(io::stdin(), SetArg::TCSADRAIN, &self.former);
    }
}

/// Returns the window size of a terminal, or `None` if it is not a terminal or has no size.
pub fn window_size(terminal: impl AsFd) -> Option<TerminalSize> {
    let mut size = Winsize {
        ws_row: 0,
        ws_col: 0,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: TIOCGWINSZ writes one winsize, which lives until the call has returned.
    let result = unsafe { libc::ioctl(terminal.as_fd().as_raw_fd(), libc::TIOCGWINSZ, &raw mut size) };
    // A serial line without a configured size reports zero.
    (result == 0 && size.ws_row > 0 && size.ws_col > 0).then_some(TerminalSize {
        rows: size.ws_row,
        columns: size.ws_col,
    })
}

/// Sets the window size of a terminal. The kernel then sends SIGWINCH to the terminal's foreground
/// process group.
pub fn set_window_size(terminal: impl AsFd, size: TerminalSize) {
    guest_agent::terminal::resize(terminal, size.into());
}

/// Connects the three standard streams of `command` to a new terminal, which becomes the
/// controlling terminal of the command's session. Returns the master end of the terminal. Reading
/// from the master end fails with EIO after the last process has closed the terminal.
///
/// # Errors
/// Returns an error if no terminals or descriptors are left.
pub fn attach(command: &mut Command, size: TerminalSize) -> io::Result<File> {
    guest_agent::terminal::attach(command, size.into()).map(File::from)
}

impl From<TerminalSize> for Terminal {
    fn from(size: TerminalSize) -> Self {
        let TerminalSize { rows, columns } = size;
        Self { rows, columns }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    /// Runs `script` on a terminal of size `size` and returns its output. While the script runs,
    /// calls `meanwhile` with the master end of the terminal.
    fn output(script: &str, size: TerminalSize, meanwhile: impl FnOnce(&File)) -> String {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        let mut master = attach(&mut command, size).unwrap();
        let mut child = command.spawn().unwrap();
        // The command holds the slave end, so the terminal would never be closed.
        drop(command);
        meanwhile(&master);
        let mut text = Vec::new();
        let mut buffer = [0; 1024];
        while let Ok(length @ 1..) = master.read(&mut buffer) {
            text.extend_from_slice(&buffer[..length]);
        }
        assert!(child.wait().unwrap().success());
        String::from_utf8(text).unwrap().replace('\r', "")
    }

    #[test]
    fn command_sees_the_window_size_and_its_changes() {
        let size = TerminalSize {
            rows: 33,
            columns: 132,
        };
        let other = TerminalSize {
            rows: 40,
            columns: 71,
        };
        assert_eq!(output("stty size; test -t 2", size, |_| ()), "33 132\n");
        let script = "stty size; while [ \"$(stty size)\" = '33 132' ]; do :; done; stty size";
        let changed = output(script, size, |master| {
            assert_eq!(window_size(master), Some(size));
            let mut byte = [0];
            // After the first line, the command has read the first window size.
            (&*master).read_exact(&mut byte).unwrap();
            set_window_size(master, other);
        });
        assert_eq!(changed, "3 132\n40 71\n");
    }

    #[test]
    fn pipe_has_no_window_size() {
        let (reader, _writer) = io::pipe().unwrap();
        assert_eq!(window_size(&reader), None);
    }
}
