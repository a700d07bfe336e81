//! The side of the device that the rest of the program holds: input for the guest, the size of the window.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vm_memory::{Bytes, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use crate::device::ConfigChange;
use crate::serve::Chain;

/// Bytes of input that wait for the driver.
pub const INPUT_BYTES: usize = 4096;

/// How many columns and rows a terminal has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowSize {
    /// Columns.
    pub columns: u16,
    /// Rows.
    pub rows: u16,
}

#[derive(Debug, Default)]
struct Waiting {
    bytes: VecDeque<u8>,
    /// Some input found no room: its owner waits to be told of some.
    refused: bool,
}

/// Takes input for the guest from any thread, never blocks, and keeps at most [`INPUT_BYTES`].
#[derive(Debug)]
pub struct Port {
    waiting: Mutex<Waiting>,
    /// For the device's thread: there is input.
    came: EventFd,
    room: EventFd,
    /// Columns and rows as they lie in the configuration (virtio 1.2, 5.3.4); 0 is not known.
    size: AtomicU32,
    change: Mutex<Option<ConfigChange>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Port {
    /// A port that nobody listens to yet; `size` as for [`super::Console::new`].
    ///
    /// # Errors
    /// The host has no descriptor left.
    pub fn new(size: Option<WindowSize>) -> io::Result<Self> {
        Ok(Self {
            waiting: Mutex::default(),
            came: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
            room: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
            size: AtomicU32::new(size.map_or(0, packed)),
            change: Mutex::new(None),
        })
    }

    /// Takes as much of `bytes` as there is room for; returns how many that was.
    pub fn send(&self, bytes: &[u8]) -> usize {
        let mut waiting = lock(&self.waiting);
        let count = bytes.len().min(INPUT_BYTES.saturating_sub(waiting.bytes.len()));
        waiting.bytes.extend(&bytes[..count]);
        waiting.refused |= count < bytes.len();
        drop(waiting);
        if count > 0 {
            // Only a full counter fails, and then the thread is on its way.
            let _ = self.came.write(1);
        }
        count
    }

    /// Written when the guest has taken input after [`Port::send`] had no room for some.
    pub fn room(&self) -> &EventFd {
        &self.room
    }

    /// The operator's terminal has another size now. Without effect on a device that was made without one.
    pub fn resize(&self, size: WindowSize) {
        let packed = packed(size);
        if self.size.load(Ordering::Acquire) != 0
            && self.size.swap(packed, Ordering::AcqRel) != packed
            && let Some(change) = &*lock(&self.change)
        {
            change.tell();
        }
    }

    /// The configuration's first four bytes: columns, rows.
    pub(super) fn config(&self) -> [u8; 4] {
        self.size.load(Ordering::Acquire).to_le_bytes()
    }

    pub(super) fn tells_changes_by(&self, change: Option<ConfigChange>) {
        *lock(&self.change) = change;
    }

    pub(super) fn came(&self) -> &EventFd {
        &self.came
    }

    pub(super) fn has_input(&self) -> bool {
        !lock(&self.waiting).bytes.is_empty()
    }

    /// Moves input to a chain's buffers; how many bytes that was.
    pub(super) fn fill(&self, memory: &GuestMemoryMmap, chain: Chain<'_>) -> u32 {
        let mut waiting = lock(&self.waiting);
        let mut written = 0;
        for buffer in chain.writable() {
            let input = waiting.bytes.make_contiguous();
            let count = input.len().min(buffer.len() as usize);
            // Not RAM: the guest's own affair, and the input is for the next buffer.
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

fn packed(size: WindowSize) -> u32 {
    u32::from(size.columns) | u32::from(size.rows) << 16
}
