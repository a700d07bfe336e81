//! Datagrams on a Unix socket with at most one descriptor each.
#![expect(unsafe_code, reason = "sendmsg(2) and recvmsg(2)")]

use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// Buffer for one control message with one descriptor.
#[repr(C, align(8))]
struct Control([u8; 24]);

/// Length of a control message with exactly one descriptor. With a longer buffer, the sender could
/// pass a second descriptor.
const CONTROL_BYTES: usize = size_of::<libc::cmsghdr>() + size_of::<RawFd>();

/// Creates a pair of connected sockets (`SOCK_SEQPACKET`). Receiving from the first socket fails
/// after the timeout `patience`.
///
/// # Errors
/// Returns an error if `socketpair(2)` or `setsockopt(2)` fails.
pub(super) fn pair(patience: Duration) -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends = [-1; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: the array has space for two descriptors.
    checked(unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) }.into())?;
    // SAFETY: the kernel has just returned these descriptors, and they are not owned elsewhere.
    let [ours, its] = ends.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
    let time = libc::timeval {
        tv_sec: patience.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_usec: 0,
    };
    for option in [libc::SO_RCVTIMEO, libc::SO_SNDTIMEO] {
        // SAFETY: the value is a live timeval with the length that is passed.
        let set = unsafe {
            libc::setsockopt(
                ours.as_raw_fd(),
                libc::SOL_SOCKET,
                option,
                (&raw const time).cast(),
                u32::try_from(size_of::<libc::timeval>()).unwrap_or(0),
            )
        };
        checked(set.into())?;
    }
    Ok((ours, its))
}

/// Sends one datagram with an optional descriptor. The call is restarted if a signal interrupts it.
///
/// # Errors
/// Returns an error if `sendmsg(2)` fails.
pub(super) fn send(socket: BorrowedFd<'_>, bytes: &[u8], passed: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut part = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut control = Control([0; 24]);
    // SAFETY: a zeroed msghdr is valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    if let Some(passed) = passed {
        let header = libc::cmsghdr {
            cmsg_len: CONTROL_BYTES,
            cmsg_level: libc::SOL_SOCKET,
            cmsg_type: libc::SCM_RIGHTS,
        };
        let place = control.0.as_mut_ptr();
        // SAFETY: the buffer is aligned for a header and has space for it and one descriptor.
        unsafe {
            place.cast::<libc::cmsghdr>().write(header);
            place
                .add(size_of::<libc::cmsghdr>())
                .cast::<RawFd>()
                .write(passed.as_raw_fd());
        }
        message.msg_control = place.cast();
        message.msg_controllen = CONTROL_BYTES;
    }
    // SAFETY: the message refers to live memory, which the kernel reads.
    let sent = uninterrupted(|| unsafe { libc::sendmsg(socket.as_raw_fd(), &message, libc::MSG_NOSIGNAL) })?;
    if sent == bytes.len() {
        Ok(())
    } else {
        Err(io::ErrorKind::WriteZero.into())
    }
}

/// Receives one datagram. Returns its length, which is 0 at the end of the connection, and the
/// passed descriptor. A datagram longer than `buffer` is an error. The call is restarted if a
/// signal interrupts it.
///
/// # Errors
/// Returns an error if `recvmsg(2)` fails.
pub(super) fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut part = libc::iovec {
        iov_base: buffer.as_mut_ptr().cast(),
        iov_len: buffer.len(),
    };
    let mut control = Control([0; 24]);
    // SAFETY: a zeroed msghdr is valid.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    let count = uninterrupted(|| {
        message.msg_iov = &raw mut part;
        message.msg_iovlen = 1;
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = CONTROL_BYTES;
        // SAFETY: the message refers to live memory of the given lengths.
        unsafe { libc::recvmsg(socket.as_raw_fd(), &mut message, libc::MSG_CMSG_CLOEXEC) }
    })?;
    let passed = (message.msg_controllen >= CONTROL_BYTES).then(|| {
        let place = control.0.as_ptr();
        // SAFETY: the buffer is aligned for a header and has space for one descriptor after it.
        unsafe {
            let header = place.cast::<libc::cmsghdr>().read();
            let fd = place.add(size_of::<libc::cmsghdr>()).cast::<RawFd>().read();
            let is_descriptor = header.cmsg_level == libc::SOL_SOCKET && header.cmsg_type == libc::SCM_RIGHTS;
            // The kernel created this descriptor for this process.
            is_descriptor.then(|| OwnedFd::from_raw_fd(fd))
        }
    });
    if message.msg_flags & libc::MSG_TRUNC != 0 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok((count, passed.flatten()))
}

fn uninterrupted(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        match checked(call().try_into().unwrap_or(-1)) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            result => return result.map(|count| usize::try_from(count).unwrap_or(0)),
        }
    }
}

fn checked(result: libc::c_long) -> io::Result<libc::c_long> {
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}
