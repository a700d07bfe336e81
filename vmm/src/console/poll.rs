//! Waiting for room in a descriptor.
#![expect(unsafe_code, reason = "poll(2)")]

use std::os::fd::RawFd;
use std::time::Duration;

/// Waits until `fd` takes bytes or is broken, at most for `limit`. May return early, on a signal.
pub(super) fn wait_for_room(fd: RawFd, limit: Option<Duration>) {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLOUT,
        revents: 0,
    };
    let timeout = limit.map_or(-1, |limit| i32::try_from(limit.as_millis()).unwrap_or(i32::MAX));
    // SAFETY: one valid pollfd for the length of the call.
    unsafe { libc::poll(&mut poll, 1, timeout) };
}
