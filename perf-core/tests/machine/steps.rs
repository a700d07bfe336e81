//! Instructions a piece of code takes, counted exactly and without a PMU: a copy of this process runs it under
//! single-stepping.

use std::io;

/// User-space instructions of `work`, run once in a forked copy of the process. `work` must not allocate or take a lock
/// that another thread might hold, since other threads do not exist in the copy.
///
/// `None` where processes may not be traced.
pub fn instructions(work: impl FnOnce()) -> Option<u64> {
    // SAFETY: the child runs `work`, which by contract does what is allowed after a fork, raises signals and exits
    // without returning to the caller.
    let child = unsafe { libc::fork() };
    match child {
        -1 => None,
        0 => {
            // SAFETY: as above; ptrace with TRACEME takes no pointers.
            unsafe {
                if libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) != 0 {
                    libc::_exit(1);
                }
                libc::raise(libc::SIGSTOP);
                work();
                libc::raise(libc::SIGSTOP);
                libc::_exit(0)
            }
        }
        child => {
            let counted = step(child);
            // SAFETY: the child is ours and nobody else waits for it.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, std::ptr::null_mut(), 0);
            }
            counted.ok()
        }
    }
}

/// Steps from the child's first stop to its second.
fn step(child: i32) -> io::Result<u64> {
    wait(child, libc::SIGSTOP)?;
    let mut steps = 0;
    loop {
        // SAFETY: single-stepping takes no pointers.
        if unsafe { libc::ptrace(libc::PTRACE_SINGLESTEP, child, 0, 0) } != 0 {
            return Err(io::Error::last_os_error());
        }
        if wait(child, libc::SIGTRAP)? == libc::SIGSTOP {
            return Ok(steps);
        }
        steps += 1;
    }
}

/// Waits for the child to stop by `signal` or SIGSTOP.
fn wait(child: i32, signal: i32) -> io::Result<i32> {
    let mut status = 0;
    // SAFETY: the pointer is valid for the time of the call.
    if unsafe { libc::waitpid(child, &raw mut status, 0) } != child {
        return Err(io::Error::last_os_error());
    }
    if libc::WIFSTOPPED(status) && [signal, libc::SIGSTOP].contains(&libc::WSTOPSIG(status)) {
        return Ok(libc::WSTOPSIG(status));
    }
    Err(io::Error::other("the child ended"))
}
