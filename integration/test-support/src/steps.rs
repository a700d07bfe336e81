//! Counts the instructions and system calls of a piece of code exactly and without a PMU, by
//! running it in a forked child under ptrace.
#![expect(unsafe_code, reason = "fork and ptrace")]

use std::io;

/// Returns the number of user-space instructions that `work` executes when it is run once in a
/// forked child.
///
/// `work` must neither allocate nor take a lock that another thread may hold, because that thread
/// does not exist in the child. Returns `None` if this process may not trace its child.
pub fn instructions(work: impl FnOnce()) -> Option<u64> {
    trace(|| (), |_| work(), step)
}

/// Returns the numbers of the system calls that `work` makes when it is run once in a forked child,
/// after `setup`.
///
/// Excludes the system calls of `setup`, and returns from signal handlers (`rt_sigreturn`), because
/// the latter belong to the handler. Returns `None` if this process may not trace its child.
pub fn system_calls<T>(setup: impl FnOnce() -> T, work: impl FnOnce(&mut T)) -> Option<Vec<u64>> {
    trace(setup, work, calls)
}

fn trace<T, R>(
    setup: impl FnOnce() -> T,
    work: impl FnOnce(&mut T),
    count: impl FnOnce(i32) -> io::Result<R>,
) -> Option<R> {
    // SAFETY: the child runs `setup` and `work`, which by contract only do what is allowed after a
    // fork, raises signals, and exits without returning to the caller.
    let child = unsafe { libc::fork() };
    match child {
        -1 => None,
        0 => {
            let mut made = setup();
            // SAFETY: as above; ptrace with TRACEME takes no pointers.
            unsafe {
                if libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) != 0 {
                    libc::_exit(1);
                }
                libc::raise(libc::SIGSTOP);
                work(&mut made);
                libc::raise(libc::SIGSTOP);
                libc::_exit(0)
            }
        }
        child => {
            let counted = count(child);
            // SAFETY: the child belongs to this process, and nothing else waits for it.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, std::ptr::null_mut(), 0);
            }
            counted.ok()
        }
    }
}

/// Returns the number of instructions that the child executes between its first and second stop, by
/// single-stepping.
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

/// Returns the numbers of the system calls that the child makes between its first and second stop,
/// without those that stop the child.
fn calls(child: i32) -> io::Result<Vec<u64>> {
    wait(child, libc::SIGSTOP)?;
    // SAFETY: the option is passed by value.
    unsafe { libc::ptrace(libc::PTRACE_SETOPTIONS, child, 0, libc::PTRACE_O_TRACESYSGOOD) };
    let (mut calls, mut entering, mut signal) = (Vec::new(), true, 0);
    loop {
        // SAFETY: the signal to deliver is passed by value.
        if unsafe { libc::ptrace(libc::PTRACE_SYSCALL, child, 0, signal) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let mut status = 0;
        // SAFETY: the pointer is valid for the duration of the call.
        if unsafe { libc::waitpid(child, &raw mut status, 0) } != child || !libc::WIFSTOPPED(status) {
            return Err(io::Error::other("the child ended"));
        }
        signal = 0;
        match libc::WSTOPSIG(status) {
            libc::SIGSTOP => {
                // The traced range also contains the return of the first raise and the call of the
                // second.
                let raising = [
                    libc::SYS_rt_sigprocmask,
                    libc::SYS_gettid,
                    libc::SYS_getpid,
                    libc::SYS_tgkill,
                ];
                calls.retain(|n| !raising.contains(&(*n as i64)) && *n != libc::SYS_rt_sigreturn as u64);
                return Ok(calls);
            }
            s if s == libc::SIGTRAP | 0x80 => {
                if entering {
                    calls.push(call_number(child)?);
                }
                // Signal returns, and the raise that is in progress at the start, have no exit
                // stop.
                entering = !entering;
            }
            other => signal = other,
        }
    }
}

fn call_number(child: i32) -> io::Result<u64> {
    // SAFETY: zeroed registers are valid, and the kernel fills them in.
    unsafe {
        let mut regs: libc::user_regs_struct = std::mem::zeroed();
        if libc::ptrace(libc::PTRACE_GETREGS, child, 0, &raw mut regs) != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(regs.orig_rax)
    }
}

/// Waits until the child is stopped by `signal` or by SIGSTOP. Returns the signal.
fn wait(child: i32, signal: i32) -> io::Result<i32> {
    let mut status = 0;
    // SAFETY: the pointer is valid for the duration of the call.
    if unsafe { libc::waitpid(child, &raw mut status, 0) } != child {
        return Err(io::Error::last_os_error());
    }
    if libc::WIFSTOPPED(status) && [signal, libc::SIGSTOP].contains(&libc::WSTOPSIG(status)) {
        return Ok(libc::WSTOPSIG(status));
    }
    Err(io::Error::other("the child ended"))
}
