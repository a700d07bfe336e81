//! Service processes of a VM, which exit with the VM. Each is forked while the VM's process is
//! single-threaded, and immediately confines itself to one socket, one seccomp filter and the
//! privileges that its task requires.
#![expect(unsafe_code, reason = "fork(2), and what a process does behind it")]

use std::ffi::CStr;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::panic::{self, AssertUnwindSafe};

use seccompiler::{BpfProgram, apply_filter};

use crate::files;

/// First file descriptor after the standard streams.
const FIRST: RawFd = 3;
/// Exit status of a process that could not be confined.
pub(crate) const EXIT_UNCONFINED: i32 = 125;

/// Restrictions of a service process.
pub(crate) struct ServiceProcess<'a> {
    /// Process name, as displayed by `ps`.
    pub(crate) name: &'a CStr,
    /// Seccomp filters of the process.
    pub(crate) filters: &'a [BpfProgram],
    /// `true` to apply landlock rules that allow no file.
    pub(crate) landlock: bool,
    /// `true` if landlock must not restrict the signals that perf events opened by this process
    /// send.
    pub(crate) signals: bool,
    /// Function that drops the process's privileges. Returns whether it succeeded.
    pub(crate) give_up: fn() -> bool,
}

impl ServiceProcess<'_> {
    /// Forks the service process. It closes all descriptors except `socket`, calls `prepare`,
    /// confines itself, calls `serve`, and exits when `serve` returns. The calling thread must be
    /// the only one of its process.
    ///
    /// # Errors
    /// Returns an error if `fork(2)` fails.
    pub(crate) fn start<T>(
        &self,
        socket: OwnedFd,
        prepare: impl FnOnce() -> T,
        serve: impl FnOnce(OwnedFd, T) -> io::Result<()>,
    ) -> io::Result<()> {
        // SAFETY: no other thread exists, as the caller guarantees, so all memory of the child is
        // consistent and no lock is held by another thread.
        match unsafe { libc::fork() } {
            -1 => Err(io::Error::last_os_error()),
            0 => {
                let run = || self.run(socket, prepare, serve);
                let ended = panic::catch_unwind(AssertUnwindSafe(run));
                exit_process(if matches!(ended, Ok(Ok(()))) {
                    0
                } else {
                    EXIT_UNCONFINED
                })
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
        exit_with_parent(self.name);
        // SAFETY: the call passes only integers. Terminal signals must not reach this process.
        unsafe { libc::setpgid(0, 0) };
        let socket = keep_only_descriptor(socket)?;
        let prepared = prepare();
        trim_heap();
        if !(self.give_up)() {
            return Err(io::Error::other("rights that stay"));
        }
        if self.landlock {
            files::deny_all(self.signals).map_err(io::Error::other)?;
        }
        for filter in self.filters {
            apply_filter(filter).map_err(io::Error::other)?;
        }
        serve(socket, prepared)
    }
}

/// Terminates this process without running destructors or exit handlers, which belong to the parent
/// process.
pub(crate) fn exit_process(status: i32) -> ! {
    // SAFETY: _exit does not return and has no preconditions.
    unsafe { libc::_exit(status) }
}

/// Returns the free heap memory inherited from the parent to the host, because this process is
/// mostly idle and does not need it.
pub(crate) fn trim_heap() {
    // SAFETY: the call passes only an integer.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Sets the process name and makes the process exit when its parent exits.
pub(crate) fn exit_with_parent(name: &CStr) {
    // SAFETY: the calls pass integers and a string that outlives them.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::prctl(libc::PR_SET_NAME, name.as_ptr());
    }
}

/// Closes all descriptors except `kept`. Redirects the standard streams to a pipe that has no
/// reader.
pub(crate) fn keep_only_descriptor(kept: OwnedFd) -> io::Result<OwnedFd> {
    // SAFETY: the call passes only a descriptor and integers.
    let copy = unsafe { libc::fcntl(kept.as_raw_fd(), libc::F_DUPFD_CLOEXEC, FIRST) };
    if copy < 0 {
        return Err(io::Error::last_os_error());
    }
    std::mem::forget(kept);
    keep_only_descriptors(&mut [copy])?;
    // SAFETY: the descriptor is open and not owned elsewhere.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// Closes all descriptors except `kept`, which must not be standard streams. Redirects the standard
/// streams to a pipe that has no reader. Values that own a closed descriptor must neither be used
/// nor dropped in this process afterwards, so the process must end with [`exit_process`].
pub(crate) fn keep_only_descriptors(kept: &mut [RawFd]) -> io::Result<()> {
    let (_, nowhere) = io::pipe()?;
    // SAFETY: the calls pass only descriptors and integers.
    unsafe {
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        for stream in 0..FIRST {
            libc::dup2(nowhere.as_raw_fd(), stream);
        }
    }
    std::mem::forget(nowhere);
    kept.sort_unstable();
    // SAFETY: the closed descriptors are copies inherited from the parent, or of the pipe, and are
    // not used, as the caller guarantees.
    unsafe { close_all_but(kept) };
    Ok(())
}

/// Closes all descriptors from 3 on, except those in `kept`, which is sorted.
///
/// # Safety
/// The closed descriptors must not be used afterwards.
unsafe fn close_all_but(kept: &[RawFd]) {
    let close = |from: RawFd, to: libc::c_uint| {
        // SAFETY: the call passes only integers, and the caller guarantees that the closed
        // descriptors are unused.
        unsafe { libc::syscall(libc::SYS_close_range, from, to, 0) == 0 }
    };
    let mut from = FIRST;
    let mut closed = true;
    for fd in kept {
        closed &= from == *fd || close(from, fd.unsigned_abs().saturating_sub(1));
        from = fd + 1;
    }
    if closed && close(from, libc::c_uint::MAX) {
        return;
    }
    // Fallback for Linux before 5.9. Few descriptors are open at this time.
    for fd in (FIRST..4096).filter(|fd| !kept.contains(fd)) {
        // SAFETY: as for `close_range`.
        unsafe { libc::close(fd) };
    }
}
