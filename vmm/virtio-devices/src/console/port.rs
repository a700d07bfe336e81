//! Host end of the console: input for the guest, and the window size.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vm_memory::{Bytes, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::device::ConfigChangeNotifier;
use crate::serve::GuestDescriptorChain;

/// Capacity of the buffer for console input, in bytes.
pub const INPUT_BYTES: usize = 4096;

/// Size of a terminal window, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TerminalSize {
    /// Width of the window, as number of columns.
    pub columns: u16,
    /// Height of the window, as number of rows.
    pub rows: u16,
}

#[derive(Debug, Default)]
struct PendingInput {
    bytes: VecDeque<u8>,
    /// `true` if input was rejected because the buffer was full, and the sender has not been
    /// notified of free space yet.
    refused: bool,
}

/// The host's end of a console: an input buffer of [`INPUT_BYTES`] bytes and the window size. All
/// methods can be called from any thread and never block.
#[derive(Debug)]
pub struct ConsolePort {
    waiting: Mutex<PendingInput>,
    /// Eventfd that notifies the device's thread of new console input.
    input_event: EventFd,
    room: EventFd,
    /// Window size in the layout of the device configuration: columns and rows (virtio 1.2, 5.3.4).
    /// 0 if unknown.
    size: AtomicU32,
    change: Mutex<Option<ConfigChangeNotifier>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ConsolePort {
    /// Creates the port of a console. `size` is the size of the terminal window, if there is one.
    ///
    /// # Errors
    /// Returns an error if the host has run out of file descriptors.
    pub fn new(size: Option<TerminalSize>) -> io::Result<Self> {
        Ok(Self {
            waiting: Mutex::default(),
            input_event: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
            room: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
            size: AtomicU32::new(size.map_or(0, packed)),
            change: Mutex::new(None),
        })
    }

    /// Buffers as much of `bytes` as fits and returns the number of bytes accepted.
    pub fn send(&self, bytes: &[u8]) -> usize {
        let mut waiting = lock(&self.waiting);
        let count = bytes.len().min(INPUT_BYTES.saturating_sub(waiting.bytes.len()));
        waiting.bytes.extend(&bytes[..count]);
        waiting.refused |= count < bytes.len();
        drop(waiting);
        if count > 0 {
            // The write fails only if the counter is full, in which case a wake-up is already
            // pending.
            let _ = self.input_event.write(1);
        }
        count
    }

    /// Returns the eventfd that the device signals when the buffer has space again, after
    /// [`ConsolePort::send`] has rejected input.
    pub fn space_event(&self) -> &EventFd {
        &self.room
    }

    /// Sets the window size of the console. Has no effect on a device created without a size.
    pub fn resize(&self, size: TerminalSize) {
        let packed = packed(size);
        if self.size.load(Ordering::Acquire) != 0
            && self.size.swap(packed, Ordering::AcqRel) != packed
            && let Some(change) = &*lock(&self.change)
        {
            change.notify();
        }
    }

    /// Returns the window size in the layout of the device configuration: columns and rows.
    pub(super) fn config(&self) -> [u8; 4] {
        self.size.load(Ordering::Acquire).to_le_bytes()
    }

    pub(super) fn set_config_notifier(&self, change: Option<ConfigChangeNotifier>) {
        *lock(&self.change) = change;
    }

    pub(super) fn input_event(&self) -> &EventFd {
        &self.input_event
    }

    pub(super) fn has_input(&self) -> bool {
        !lock(&self.waiting).bytes.is_empty()
    }

    /// Moves pending input to the writable buffers of a descriptor chain and returns the number of
    /// bytes moved.
    pub(super) fn fill(&self, memory: &GuestMemoryMmap, chain: GuestDescriptorChain<'_>) -> u32 {
        let mut waiting = lock(&self.waiting);
        let mut written = 0;
        for buffer in chain.writable() {
            let input = waiting.bytes.make_contiguous();
            let count = input.len().min(buffer.len() as usize);
            // The buffer is outside guest RAM. The input is kept for the next buffer.
            if count == 0 || memory.write_slice(&input[..count], buffer.addr()).is_err() {
                break;
            }
            waiting.bytes.drain(..count);
            written += count;
        }
        if written > 0 && std::mem::take(&mut waiting.refused) {
            let _ = self.room.write(1);
        }
        u32::try_from(written).expect("at most INPUT_BYTES")
    }
}

fn packed(size: TerminalSize) -> u32 {
    u32::from(size.columns) | u32::from(size.rows) << 16
}
