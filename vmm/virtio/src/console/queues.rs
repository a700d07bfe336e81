//! The driver's queues, whatever their descriptors say.

use std::io::Write;

use perf_core::guest_log;
use vm_memory::{Bytes, GuestMemoryMmap};

use super::port::Port;
use crate::device::ActiveQueue;
use crate::serve::{Chain, QueueError, serve_queue, serve_queue_while};

/// The most bytes that are taken of one chain; more of it is lost. Linux sends at most a page.
pub const MOST_BYTES: usize = 64 << 10;
/// Bytes that are copied at once.
const CHUNK_BYTES: usize = 4096;

/// The driver's two queues.
#[derive(Debug)]
pub struct Queues {
    /// The driver's buffers for input.
    pub input: ActiveQueue,
    /// Its output.
    pub output: ActiveQueue,
}

impl Queues {
    /// Takes what the driver has written.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn serve_output(&mut self, memory: &GuestMemoryMmap, sink: &mut dyn Write) -> Result<(), QueueError> {
        serve_queue(&mut self.output, memory, |chain| {
            take(sink, memory, chain);
            0
        })
    }

    /// Gives the driver what there is for it, as far as it has buffers.
    ///
    /// # Errors
    /// [`QueueError`].
    pub fn serve_input(&mut self, memory: &GuestMemoryMmap, port: &Port) -> Result<(), QueueError> {
        serve_queue_while(
            &mut self.input,
            memory,
            || port.has_input(),
            |chain| port.fill(memory, chain),
        )
    }
}

/// Writes a chain's bytes to `sink`; what it does not take is lost, as on a line without a listener.
pub(super) fn take(sink: &mut dyn Write, memory: &GuestMemoryMmap, chain: Chain<'_>) {
    let mut left = MOST_BYTES;
    let mut chunk = [0; CHUNK_BYTES];
    for buffer in chain.readable() {
        let mut at = buffer.addr();
        let mut count = left.min(buffer.len() as usize);
        left -= count;
        while count > 0 {
            let piece = &mut chunk[..count.min(CHUNK_BYTES)];
            // Not RAM: the guest's own affair.
            if memory.read_slice(piece, at).is_err() {
                return;
            }
            if let Err(e) = sink.write_all(piece) {
                guest_log!(Debug, "hvc0: {e}");
                return;
            }
            count -= piece.len();
            // The piece was read, so its end is an address.
            at.0 += piece.len() as u64;
        }
        if left == 0 {
            return;
        }
    }
}
