//! SIGTERM, SIGINT and SIGHUP as a descriptor, so that they end the VM in order and not the process in the middle.
#![allow(unsafe_code)]

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// The signals that ask the VM to end.
const STOP_SIGNALS: [libc::c_int; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];

/// The blocked stop signals, readable one by one.
#[derive(Debug)]
pub struct StopSignals(OwnedFd);

impl StopSignals {
    /// Blocks the stop signals in the calling thread, and in every thread it starts later, and makes them readable.
    ///
    /// # Errors
    /// The system call's error.
    pub fn block() -> io::Result<Self> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initialises the set it is given; the later calls get that initialised set, and signalfd
        // returns a descriptor of its own that nothing else owns.
        unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            for signal in STOP_SIGNALS {
                libc::sigaddset(set.as_mut_ptr(), signal);
            }
            let error = libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), std::ptr::null_mut());
            if error != 0 {
                return Err(io::Error::from_raw_os_error(error));
            }
            let fd = libc::signalfd(-1, set.as_ptr(), libc::SFD_NONBLOCK | libc::SFD_CLOEXEC);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(Self(OwnedFd::from_raw_fd(fd)))
        }
    }

    /// The number of a signal that came, if one did.
    pub fn take(&self) -> Option<i32> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::uninit();
        let size = size_of::<libc::signalfd_siginfo>();
        // SAFETY: the buffer is as large as said; a signalfd gives whole structures or an error.
        let got = unsafe { libc::read(self.0.as_raw_fd(), info.as_mut_ptr().cast(), size) };
        if got != size as isize {
            return None;
        }
        // SAFETY: read(2) has just filled the whole structure.
        let info = unsafe { info.assume_init() };
        i32::try_from(info.ssi_signo).ok()
    }
}

impl AsRawFd for StopSignals {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}
