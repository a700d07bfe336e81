//! Waits until file descriptors are readable or writable.
#![expect(unsafe_code, reason = "poll(2)")]

use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

/// Waits until `fd` is writable or broken, but at most for `limit`. May return early because of a
/// signal.
pub(super) fn wait_for_room(fd: RawFd, limit: Option<Duration>) {
    let mut poll = libc::pollfd {
        fd,
        events: libc::POLLOUT,
        revents: 0,
    };
    let timeout = limit.map_or(-1, |limit| i32::try_from(limit.as_millis()).unwrap_or(i32::MAX));
    // SAFETY: the pointer refers to one valid pollfd for the duration of the call.
    unsafe { libc::poll(&mut poll, 1, timeout) };
}

/// Waits until at least one of `fds` is readable or broken, and returns for each of them whether it
/// is. Negative descriptors are ignored.
pub(crate) fn wait_readable<const N: usize>(fds: [RawFd; N]) -> io::Result<[bool; N]> {
    let mut polls = fds.map(|fd| libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    });
    loop {
        // SAFETY: the pointer refers to `N` valid pollfds for the duration of the call.
        let ready = unsafe { libc::poll(polls.as_mut_ptr(), N as libc::nfds_t, -1) };
        if ready >= 0 {
            return Ok(polls.map(|poll| poll.revents != 0));
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}
