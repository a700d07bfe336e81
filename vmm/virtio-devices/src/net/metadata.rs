//! Transfers frames between the guest and the metadata service, without using the tap device.
//!
//! The service's TCP/IP stack runs in the device's thread. A timer in the thread's epoll set wakes
//! the thread for retransmissions and for connections that become idle.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use diagnostics::guest_log;
use mmds::service::MetadataService;
use mmds::stack::{FRAME_PREFIX_BYTES, MetadataStack};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::timerfd::TimerFd;

use super::tap::{HEADER_BYTES, MAX_FRAME_BYTES};

/// Minimum delay with which the metadata timer is armed.
const MIN_DELAY: Duration = Duration::from_millis(1);

/// The timer of a [`MetadataNetPort`].
#[derive(Debug)]
pub struct MetadataTimer {
    fd: RawFd,
    timer: Mutex<TimerFd>,
}

impl MetadataTimer {
    /// Creates a disarmed timer.
    ///
    /// # Errors
    /// Returns the error of `timerfd_create(2)`.
    pub fn new() -> io::Result<Self> {
        let timer = TimerFd::new().map_err(|e| io::Error::from_raw_os_error(e.errno()))?;
        let fd = timer.as_raw_fd();
        let timer = Mutex::new(timer);
        Ok(Self { fd, timer })
    }

    fn timer(&self) -> MutexGuard<'_, TimerFd> {
        self.timer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Connection of a network device to the metadata service.
pub struct MetadataNetPort {
    stack: MetadataStack,
    timer: Arc<MetadataTimer>,
    is_armed: bool,
    /// The next frame for the guest, already taken from the stack, without a virtio-net header.
    next: Option<Vec<u8>>,
}

impl MetadataNetPort {
    /// Creates a port of a network device to `service`, without TCP connections.
    pub fn new(service: Arc<MetadataService>, timer: Arc<MetadataTimer>) -> Self {
        Self {
            stack: MetadataStack::new(service, Instant::now()),
            timer,
            is_armed: false,
            next: None,
        }
    }

    /// Processes a frame from the guest if it is addressed to the metadata service. `pieces` are
    /// the segments of the virtio-net header and the frame. Returns `false` for other frames.
    pub(super) fn take(&mut self, memory: &GuestMemoryMmap, pieces: &[(GuestAddress, u32)]) -> bool {
        let Some(prefix) = copy_frame(memory, pieces, HEADER_BYTES + FRAME_PREFIX_BYTES) else {
            return false;
        };
        if !self.stack.wants(&prefix) {
            return false;
        }
        // The guest may have changed the frame in the meantime, so the stack checks it again.
        if let Some(frame) = copy_frame(memory, pieces, MAX_FRAME_BYTES) {
            self.stack.receive(&frame, Instant::now());
        }
        self.fetch();
        true
    }

    /// Returns the next frame for the guest. Its virtio-net header requests no offload.
    pub(super) fn next_frame(&mut self) -> Option<Vec<u8>> {
        self.fetch();
        let frame = self.next.take()?;
        self.fetch();
        Some([&[0; HEADER_BYTES][..], &frame].concat())
    }

    /// Returns whether the metadata service has a frame for the guest.
    pub(super) fn has_frames(&self) -> bool {
        self.next.is_some()
    }

    fn fetch(&mut self) {
        if self.next.is_none() {
            self.next = self.stack.next_frame(Instant::now());
        }
    }

    /// Arms the metadata timer for the time at which the TCP/IP stack must run next.
    pub(super) fn arm_timer(&mut self) {
        // A frame that waits for a guest buffer needs no timer, because it is delivered when the
        // guest adds a buffer.
        let delay = self.stack.poll_delay(Instant::now());
        let armed = match delay {
            Some(delay) => self.timer.timer().reset(delay.max(MIN_DELAY), None),
            None if self.is_armed => self.timer.timer().clear(),
            None => Ok(()),
        };
        self.is_armed = delay.is_some();
        if let Err(e) = armed {
            guest_log!(
                Error,
                "timerfd_settime: {e}; a connection to the metadata service may stall"
            );
        }
    }

    /// Handles an event of the metadata timer. The caller must then arm the timer again.
    pub(super) fn handle_timer(&mut self) {
        if let Err(e) = self.timer.timer().clear() {
            guest_log!(Error, "timerfd_settime: {e}");
        }
        self.stack.poll(Instant::now());
        self.fetch();
    }
}

/// Provides the timer's file descriptor for the epoll set of the device's thread.
impl AsRawFd for MetadataNetPort {
    fn as_raw_fd(&self) -> RawFd {
        self.timer.fd
    }
}

/// Copies the frame in `pieces` without its virtio-net header. Reads at most `limit` bytes,
/// including the header.
fn copy_frame(memory: &GuestMemoryMmap, pieces: &[(GuestAddress, u32)], limit: usize) -> Option<Vec<u8>> {
    let total: usize = pieces.iter().map(|(_, length)| *length as usize).sum();
    let mut bytes = vec![0; total.min(limit)];
    let mut rest = &mut bytes[..];
    for (address, length) in pieces {
        let count = rest.len().min(*length as usize);
        let (now, later) = rest.split_at_mut(count);
        memory.read_slice(now, *address).ok()?;
        rest = later;
    }
    (bytes.len() >= HEADER_BYTES).then(|| bytes.split_off(HEADER_BYTES))
}

#[cfg(test)]
mod tests;
