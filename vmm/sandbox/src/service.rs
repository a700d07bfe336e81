//! Processes that work for one VM and end with it: forked while the VM's process has one thread, and confined
//! at once, so that each has one socket, one filter and the rights that its work needs.
#![expect(unsafe_code, reason = "fork(2), and what a process does behind it")]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::panic::{self, AssertUnwindSafe};

use seccompiler::{BpfProgram, apply_filter};

use crate::files;

/// The exit status of a process that could not be confined.
pub(crate) const UNFIT: i32 = 125;

/// How a service process is confined.
pub(crate) struct ServiceProcess<'a> {
    /// The name that `ps` shows.
    pub(crate) name: &'a CStr,
    /// The seccomp filters.
    pub(crate) filters: &'a [BpfProgram],
    /// Landlock rules that allow no file are applied.
    pub(crate) landlock: bool,
    /// Landlock does not restrict the signals of events that the process opens.
    pub(crate) signals: bool,
    /// Drops the process's rights; returns whether it succeeded.
    pub(crate) give_up: fn() -> bool,
}

impl ServiceProcess<'_> {
    /// Forks the process, which keeps `socket` as its only descriptor, calls `prepare`, confines itself and
    /// ends when `serve` returns. The calling thread must be the only one.
    ///
    /// # Errors
    /// The error of `fork(2)`.
    pub(crate) fn start<T>(
        &self,
        socket: OwnedFd,
        prepare: impl FnOnce() -> T,
        serve: impl FnOnce(OwnedFd, T) -> io::Result<()>,
    ) -> io::Result<()> {
        // SAFETY: no other thread exists, as the caller says, so the child has all it needs, and no lock is
        // held by another.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                let run = || self.run(socket, prepare, serve);
                let ended = panic::catch_unwind(AssertUnwindSafe(run));
                leave(if matches!(ended, Ok(Ok(()))) { 0 } else { UNFIT })
            }
            _ => Ok(()),
        }
    }

    fn run<T>(
        &self,
        socket: OwnedFd,
        prepare: impl FnOnce() -> T,
        serve: impl FnOnce(OwnedFd, T) -> io::Result<()>,
    ) -> io::Result<()> {
        ends_with_its_parent(self.name);
        // SAFETY: the call takes numbers. Keys of the terminal are not for this process.
        unsafe { libc::setpgid(0, 0) };
        let socket = only_descriptor(socket)?;
        let prepared = prepare();
        give_back_what_is_free();
        if !(self.give_up)() {
            return Err(io::Error::other("rights that stay"));
        }
        if self.landlock {
            files::nothing(self.signals).map_err(io::Error::other)?;
        }
        for filter in self.filters {
            apply_filter(filter).map_err(io::Error::other)?;
        }
        serve(socket, prepared)
    }
}

/// Ends this process without what destructors and handlers would do: they are of the one it is a copy of.
pub(crate) fn leave(status: i32) -> ! {
    // SAFETY: it does not return, and has no conditions.
    unsafe { libc::_exit(status) }
}

/// Returns memory to the host that the process which this is a copy of has freed: this one sleeps nearly
/// always.
pub(crate) fn give_back_what_is_free() {
    // SAFETY: the call takes a number.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}

/// This process ends when its parent does, and has a name of its own.
pub(crate) fn ends_with_its_parent(name: &CStr) {
    // SAFETY: the calls take numbers and a string that lives.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::prctl(libc::PR_SET_NAME, name.as_ptr());
    }
}

/// Closes all descriptors but `kept`. What is written to standard output and error is lost.
pub(crate) fn only_descriptor(kept: OwnedFd) -> io::Result<OwnedFd> {
    const FIRST: RawFd = 3;
    let (_, nowhere) = io::pipe()?;
    // SAFETY: the calls take descriptors and numbers. What is closed behind its owner's back is of the
    // process that this one is a copy of: nothing of it is used or dropped here any more, as `start` ends
    // this process without destructors.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        let copy = libc::fcntl(kept.as_raw_fd(), libc::F_DUPFD_CLOEXEC, FIRST);
        if copy < 0 {
            return Err(io::Error::last_os_error());
        }
        for stream in 0..FIRST {
            libc::dup2(nowhere.as_raw_fd(), stream);
        }
        std::mem::forget((kept, nowhere));
        close_all_but(copy);
        Ok(OwnedFd::from_raw_fd(copy))
    }
}

/// # Safety
/// No descriptor from 3 on but `kept` is used any more.
unsafe fn close_all_but(kept: RawFd) {
    let close = |from: RawFd, to: libc::c_uint| {
        // SAFETY: it takes numbers; what it closes is nobody's, as the caller says.
        unsafe { libc::syscall(libc::SYS_close_range, from, to, 0) == 0 }
    };
    let below = kept.unsigned_abs().saturating_sub(1);
    if (kept == 3 || close(3, below)) && close(kept + 1, libc::c_uint::MAX) {
        return;
    }
    // Linux before 5.9. This early there are few.
    for fd in (3..4096).filter(|fd| *fd != kept) {
        // SAFETY: as above.
        unsafe { libc::close(fd) };
    }
}
