//! The receive and transmit queues, whose contents come from the guest's console driver and may be
//! malformed.

use std::io::Write;

use diagnostics::guest_log;
use vm_memory::{Bytes, GuestMemoryMmap};

use super::port::ConsolePort;
use crate::device::ActiveQueue;
use crate::serve::{GuestDescriptorChain, VirtqueueError, serve_queue, serve_queue_while};

/// Maximum number of output bytes taken from one descriptor chain. Further bytes are discarded.
/// Linux sends at most one page.
pub const MAX_OUTPUT_BYTES: usize = 64 << 10;
/// Maximum number of output bytes that are copied from guest memory at a time.
const CHUNK_BYTES: usize = 4096;

/// The driver's receive and transmit queues of a console.
#[derive(Debug)]
pub struct ConsoleQueues {
    /// Receive queue, which contains buffers for the guest's input.
    pub input: ActiveQueue,
    /// Transmit queue, which contains the guest's output.
    pub output: ActiveQueue,
}

impl ConsoleQueues {
    /// Writes the driver's output to `sink`.
    ///
    /// # Errors
    /// Returns a [`VirtqueueError`] if the driver violates the virtqueue rules.
    pub fn serve_output(
        &mut self,
        memory: &GuestMemoryMmap,
        sink: &mut dyn Write,
    ) -> Result<(), VirtqueueError> {
        serve_queue(&mut self.output, memory, |chain| {
            take(sink, memory, chain);
            0
        })
    }

    /// Copies pending input to the driver's available buffers.
    ///
    /// # Errors
    /// Returns a [`VirtqueueError`] if the driver violates the virtqueue rules.
    pub fn serve_input(
        &mut self,
        memory: &GuestMemoryMmap,
        port: &ConsolePort,
    ) -> Result<(), VirtqueueError> {
        serve_queue_while(
            &mut self.input,
            memory,
            || port.has_input(),
            |chain| port.fill(memory, chain),
        )
    }
}

/// Writes the output in a descriptor chain to `sink`. Bytes that the sink does not accept are
/// discarded, as on an unconnected serial line.
pub(super) fn take(sink: &mut dyn Write, memory: &GuestMemoryMmap, chain: GuestDescriptorChain<'_>) {
    let mut left = MAX_OUTPUT_BYTES;
    let mut chunk = [0; CHUNK_BYTES];
    for buffer in chain.readable() {
        let mut at = buffer.addr();
        let mut count = left.min(buffer.len() as usize);
        left -= count;
        while count > 0 {
            let piece = &mut chunk[..count.min(CHUNK_BYTES)];
            // The buffer is outside guest RAM, which is a driver error.
            if memory.read_slice(piece, at).is_err() {
                return;
            }
            if let Err(e) = sink.write_all(piece) {
                guest_log!(Debug, "hvc0: {e}");
                return;
            }
            count -= piece.len();
            // The segment was read, so its end address does not overflow.
            at.0 += piece.len() as u64;
        }
        if left == 0 {
            return;
        }
    }
}
