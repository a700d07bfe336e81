//! A pseudo-terminal, the target of `--console pty`.
#![expect(unsafe_code, reason = "openpty, termios and ttyname")]

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;

/// Maximum length in bytes of a pseudo-terminal's path, including the NUL. `/dev/pts/N` is far
/// shorter.
const MAX_NAME: usize = 64;

/// A pseudo-terminal whose slave end is also kept open. The terminal therefore exists before a user
/// opens it and after the last user closes it.
pub(super) struct Pty {
    pub(super) master: File,
    pub(super) name: PathBuf,
    _slave: OwnedFd,
}

impl Pty {
    /// Opens a new pseudo-terminal in raw mode, in which guest output is not echoed as input.
    pub(super) fn open() -> io::Result<Self> {
        let (mut master, mut slave) = (-1, -1);
        // SAFETY: termios is a plain C struct for which all zeroes is a valid value.
        let mut settings: libc::termios = unsafe { std::mem::zeroed() };
        let null = std::ptr::null_mut();
        // SAFETY: both integers are writable; name, termios and window size may be null
        // (openpty(3)).
        if unsafe { libc::openpty(&mut master, &mut slave, null, null.cast(), null.cast()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: openpty succeeded, so both descriptors are open and owned by no one else.
        let (master, slave) = unsafe { (OwnedFd::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) };
        let mut name = [0; MAX_NAME];
        // SAFETY: the descriptors are open; `settings` is a valid, writable termios; `name` is
        // writable for the given length. No one else uses the master, so changing its flags affects
        // no one.
        unsafe {
            if libc::tcgetattr(slave.as_raw_fd(), &mut settings) != 0 {
                return Err(io::Error::last_os_error());
            }
            libc::cfmakeraw(&mut settings);
            if libc::tcsetattr(slave.as_raw_fd(), libc::TCSANOW, &settings) != 0 {
                return Err(io::Error::last_os_error());
            }
            let error = libc::ttyname_r(slave.as_raw_fd(), name.as_mut_ptr(), name.len());
            if error != 0 {
                return Err(io::Error::from_raw_os_error(error));
            }
            for fd in [master.as_raw_fd(), slave.as_raw_fd()] {
                if libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) != 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            if libc::fcntl(master.as_raw_fd(), libc::F_SETFL, libc::O_RDWR | libc::O_NONBLOCK) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        // SAFETY: ttyname_r has written a NUL-terminated string to `name`.
        let name = unsafe { CStr::from_ptr(name.as_ptr()) };
        Ok(Self {
            master: master.into(),
            name: PathBuf::from(name.to_string_lossy().into_owned()),
            _slave: slave,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};

    use super::*;

    fn user_end(pty: &Pty) -> File {
        File::options().read(true).write(true).open(&pty.name).unwrap()
    }

    /// Bytes pass unchanged in both directions: no echo, no line editing, no carriage returns.
    #[test]
    fn raw_pty_passes_bytes_unchanged() {
        let mut pty = Pty::open().unwrap();
        let mut user = user_end(&pty);
        let all: Vec<u8> = (0..=255).collect();
        pty.master.write_all(&all).unwrap();
        let mut read = [0; 256];
        user.read_exact(&mut read).unwrap();
        assert_eq!(read[..], all);
        // With echo enabled, the guest would receive its own output first, as input.
        user.write_all(&all).unwrap();
        let mut read = Vec::new();
        while read.len() < all.len() {
            let mut piece = [0; 256];
            match pty.master.read(&mut piece) {
                Ok(n) => read.extend_from_slice(&piece[..n]),
                Err(e) => assert_eq!(e.kind(), ErrorKind::WouldBlock),
            }
        }
        assert_eq!(read, all);
    }

    /// Output that nobody reads does not block the VMM.
    #[test]
    fn unread_pty_does_not_block() {
        let mut pty = Pty::open().unwrap();
        let mut written = 0;
        let full = loop {
            match pty.master.write(&[b'x'; 4096]) {
                Ok(n) => written += n,
                Err(e) => break e,
            }
            assert!(written < 1 << 24, "it takes everything");
        };
        assert_eq!(full.kind(), ErrorKind::WouldBlock);
    }

    /// A pseudo-terminal outlives each program that opens it, and child processes do not inherit
    /// its descriptors.
    #[test]
    fn pty_survives_users_and_is_close_on_exec() {
        let mut pty = Pty::open().unwrap();
        drop(user_end(&pty));
        let mut byte = [0];
        assert_eq!(
            pty.master.read(&mut byte).unwrap_err().kind(),
            ErrorKind::WouldBlock,
            "no hang-up"
        );
        let mut user = user_end(&pty);
        user.write_all(b"y").unwrap();
        while pty.master.read(&mut byte).is_err() {}
        assert_eq!(byte, *b"y");
        for fd in [pty.master.as_raw_fd(), pty._slave.as_raw_fd()] {
            let flags = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap();
            let flags = flags
                .lines()
                .find_map(|line| line.strip_prefix("flags:"))
                .unwrap();
            let flags = libc::c_int::from_str_radix(flags.trim(), 8).unwrap();
            assert_eq!(flags & libc::O_CLOEXEC, libc::O_CLOEXEC);
        }
    }
}
