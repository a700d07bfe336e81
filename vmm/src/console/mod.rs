//! The guest's consoles: where the output of its serial port and of its virtio console goes, and where their
//! input comes from.
//!
//! | module | story |
//! |---|---|
//! | `target` | what the user asks for: `tty`, `file=PATH`, `socket=PATH`, `pty`, `none` |
//! | `backend` | a console that is open there |
//! | `output` | standard output and files: a buffer and a thread |
//! | `input` | standard input, with the keys that end the VM |
//! | `stream` | a client of a socket, or a pseudo-terminal: both directions on the main loop |
//! | `terminal` | raw mode of the operator's terminal, and its end on every way out |
//!
//! Only standard output and files can make a vCPU wait, when they are slower than the guest and the buffer is
//! full: one that writes to the serial port as long as it takes, one that writes to the virtio console for a
//! tenth of a second. A client never can: what it does not take in time is lost, the oldest first.

pub mod backend;
mod input;
mod output;
pub(crate) mod poll;
mod pty;
mod standard;
pub mod stream;
pub mod target;
mod terminal;

use virtio_devices::console::port::Port;
use vmm_sys_util::eventfd::EventFd;

pub use backend::{Console, ConsoleError};
pub use input::{ConsoleInput, Escape, Key};
pub use output::ConsoleOutput;
pub use target::{ConsoleTarget, TargetError};
pub use terminal::{RawTerminal, restore_terminal, window_size};

/// Bytes read ahead of the guest.
const INPUT_BUFFER_BYTES: usize = 4096;

/// The side of a device that takes a console's input.
pub trait GuestInput: Send + Sync {
    /// Gives the guest as much of `bytes` as fits; returns how many that was. Never blocks.
    fn send(&self, bytes: &[u8]) -> usize;

    /// Written when there is room again for what [`GuestInput::send`] did not take.
    fn room(&self) -> &EventFd;
}

/// The virtio console.
impl GuestInput for Port {
    fn send(&self, bytes: &[u8]) -> usize {
        Port::send(self, bytes)
    }

    fn room(&self) -> &EventFd {
        Port::room(self)
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use std::io::{self, Write};
    use std::sync::{Arc, Mutex};

    /// A writer whose contents a test can look at.
    #[derive(Clone, Default)]
    pub(crate) struct SharedBuffer(Arc<Mutex<Vec<u8>>>);

    impl SharedBuffer {
        pub fn contents(&self) -> Vec<u8> {
            self.0.lock().unwrap().clone()
        }
    }

    impl Write for SharedBuffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
}
