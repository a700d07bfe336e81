//! Guest consoles: targets for the output and sources for the input of the serial port and the
//! virtio console.
//!
//! | module | contents |
//! |---|---|
//! | `target` | the command-line syntax: `tty`, `file=PATH`, `socket=PATH`, `pty`, `none` |
//! | `backend` | an open console |
//! | `output` | standard output and files: a buffer and a thread |
//! | `input` | standard input, with the keys that end the VM |
//! | `stream` | a socket client or a pseudo-terminal: both directions on the main loop |
//! | `terminal` | raw mode of the operator's terminal, and its restoration on every exit path |
//!
//! Only standard output and files can block a vCPU, when they are slower than the guest and the
//! buffer is full. A write to the serial port blocks without limit, a write to the virtio console
//! for at most 100 ms. Clients never block a vCPU: if a client is too slow, the oldest output is
//! lost.

pub mod backend;
mod input;
mod output;
pub(crate) mod poll;
mod pty;
mod standard;
pub mod stream;
pub mod target;
mod terminal;

use virtio_devices::console::port::ConsolePort;
use vmm_sys_util::eventfd::EventFd;

pub use backend::{Console, ConsoleError};
pub use input::ConsoleInput;
pub use output::ConsoleOutput;
pub use target::{ConsoleTarget, ConsoleTargetError};
pub use terminal::{RawTerminal, restore_terminal, window_size};

/// Size in bytes of the buffer for console input that the guest has not accepted yet.
const INPUT_BUFFER_BYTES: usize = 4096;

/// A guest device that receives console input.
pub trait ConsoleInputSink: Send + Sync {
    /// Passes as many of `bytes` to the guest as the device has space for, and returns their
    /// number. Never blocks.
    fn send(&self, bytes: &[u8]) -> usize;

    /// Returns the eventfd that signals free space in the device's input buffer, after
    /// [`ConsoleInputSink::send`] did not accept all bytes.
    fn space_event(&self) -> &EventFd;
}

/// Passes console input to the virtio console.
impl ConsoleInputSink for ConsolePort {
    fn send(&self, bytes: &[u8]) -> usize {
        ConsolePort::send(self, bytes)
    }

    fn space_event(&self) -> &EventFd {
        ConsolePort::space_event(self)
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use std::io::{self, Write};
    use std::sync::{Arc, Mutex};

    /// A writer whose contents a test can inspect.
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
