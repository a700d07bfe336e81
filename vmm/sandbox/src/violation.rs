//! Handling of seccomp violations: logs one line and terminates the process.
#![expect(unsafe_code, reason = "a signal handler, and system calls in it")]

use std::cell::Cell;
use std::io;
use std::mem::{MaybeUninit, zeroed};
use std::ptr;
use std::sync::OnceLock;

use syscalls::Sysno;

use crate::kind::SandboxedThreadKind;

/// `SYS_SECCOMP` of `sigaction(2)`: the signal was sent by a seccomp filter.
const SYS_SECCOMP: libc::c_int = 1;

/// Layout of `siginfo_t` for `SIGSYS` (include/uapi/asm-generic/siginfo.h, `_sigsys`).
#[repr(C)]
struct SigSys {
    signo: libc::c_int,
    errno: libc::c_int,
    code: libc::c_int,
    _pad: libc::c_int,
    call_addr: *mut libc::c_void,
    syscall: libc::c_int,
    arch: libc::c_uint,
}

/// Actions to take when the process terminates immediately, without running destructors.
#[derive(Clone, Copy, Debug)]
pub struct SeccompTerminationActions {
    /// Callback that runs before the log line is written and may restore the terminal. The callback
    /// may run in a signal handler.
    pub first: fn(),
    /// Descriptor to which the log line is written in addition to standard error.
    pub log: Option<libc::c_int>,
    /// Exit status of the process.
    pub status: u8,
}

static WILL: OnceLock<SeccompTerminationActions> = OnceLock::new();

thread_local!(static KIND: Cell<Option<SandboxedThreadKind>> = const { Cell::new(None) });

/// Records the kind of the calling thread.
pub(crate) fn set_thread_kind(kind: SandboxedThreadKind) {
    KIND.with(|own| own.set(Some(kind)));
}

/// Returns the kind of the calling thread, or `None` if it has not been set.
#[must_use]
pub fn kind() -> Option<SandboxedThreadKind> {
    KIND.with(Cell::get)
}

/// Terminates the process as specified by `will`, without running destructors or exit handlers.
pub fn end_now(will: SeccompTerminationActions) -> ! {
    (will.first)();
    // SAFETY: _exit does not return and has no preconditions.
    unsafe { libc::_exit(will.status.into()) }
}

/// Sets the termination actions of the process. Only the first call has an effect.
pub(crate) fn set_termination_actions(will: SeccompTerminationActions) {
    let _ = WILL.set(will);
}

/// Installs the SIGSYS handler, which terminates the process as specified by `will`.
pub(crate) fn watch(will: SeccompTerminationActions) -> io::Result<()> {
    set_termination_actions(will);
    // SAFETY: a zeroed sigaction is valid. The handler has the signature that SA_SIGINFO requires
    // and is async-signal-safe.
    unsafe {
        let mut action: libc::sigaction = zeroed();
        action.sa_sigaction = on_sigsys as extern "C" fn(_, _, _) as usize;
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        if libc::sigaction(libc::SIGSYS, &action, ptr::null_mut()) != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// Logs `line` and terminates the process with the configured status, without running destructors
/// or exit handlers.
pub(crate) fn end(line: &SignalSafeLine) -> ! {
    log_line(line);
    // SAFETY: _exit does not return and is async-signal-safe.
    unsafe { libc::_exit(WILL.get().map_or(libc::EXIT_FAILURE, |will| will.status.into())) }
}

/// Restores the terminal and writes `line` to standard error and to the log. Async-signal-safe.
pub(crate) fn log_line(line: &SignalSafeLine) {
    let will = WILL.get();
    if let Some(will) = will {
        (will.first)();
    }
    for fd in [Some(libc::STDERR_FILENO), will.and_then(|will| will.log)]
        .into_iter()
        .flatten()
    {
        // SAFETY: the bytes belong to a live buffer. A write error is ignored because there is no
        // other place to report it.
        unsafe { libc::write(fd, line.bytes.as_ptr().cast(), line.length) };
    }
}

extern "C" fn on_sigsys(_: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a valid siginfo, and SigSys is its layout for this
    // signal. A siginfo is larger than SigSys for every code.
    let info = unsafe { &*info.cast::<SigSys>() };
    let mut line = SignalSafeLine::default();
    line.text("perfvisor: error: thread ");
    line.text(own_name(&mut [0; 16]));
    if let Some(kind) = kind() {
        line.text(" (");
        line.text(kind.name());
        line.text(")");
    }
    if info.code != SYS_SECCOMP {
        line.text(" was sent SIGSYS; the VM ends\n");
        end(&line);
    }
    let number = info.syscall.unsigned_abs();
    line.text(" asked the kernel for ");
    let name = usize::try_from(number).ok().and_then(Sysno::new);
    line.text(name.map_or("system call", |call| call.name()));
    line.text(" (");
    line.number(number.into());
    // SAFETY: with SA_SIGINFO the third argument is a valid ucontext_t.
    let registers = unsafe { &(*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    for (at, argument) in [libc::REG_RDI, libc::REG_RSI, libc::REG_RDX]
        .into_iter()
        .enumerate()
    {
        line.text(if at == 0 { "; arguments " } else { ", " });
        let value = usize::try_from(argument).ok().and_then(|at| registers.get(at));
        line.hex(value.map_or(0, |value| value.cast_unsigned()));
    }
    line.text(
        "), which its seccomp filter forbids: the VM ends; please report this, --seccomp log goes on\n",
    );
    end(&line);
}

/// Returns the name of the calling thread.
pub(crate) fn own_name(buffer: &mut [u8; 16]) -> &str {
    // SAFETY: PR_GET_NAME writes at most 16 bytes, including the terminating zero, to a live buffer
    // of that size.
    unsafe { libc::prctl(libc::PR_GET_NAME, buffer.as_mut_ptr()) };
    let length = buffer.iter().position(|byte| *byte == 0).unwrap_or(0);
    std::str::from_utf8(&buffer[..length]).unwrap_or("?")
}

/// A line of text in a fixed buffer. No memory is allocated, because the thread that a signal
/// interrupted may hold the allocator's lock.
pub(crate) struct SignalSafeLine {
    bytes: [u8; 400],
    length: usize,
}

impl Default for SignalSafeLine {
    fn default() -> Self {
        Self {
            bytes: [0; 400],
            length: 0,
        }
    }
}

impl SignalSafeLine {
    /// Appends text, truncated to the remaining space.
    pub(crate) fn text(&mut self, text: &str) {
        let room = &mut self.bytes[self.length..];
        let count = text.len().min(room.len());
        room[..count].copy_from_slice(&text.as_bytes()[..count]);
        self.length += count;
    }

    fn digits(&mut self, mut number: u64, base: u64) {
        let mut digits = [0; 20];
        let mut at = digits.len();
        loop {
            at -= 1;
            digits[at] = b"0123456789abcdef"[usize::try_from(number % base).unwrap_or(0)];
            number /= base;
            if number == 0 {
                break;
            }
        }
        self.text(std::str::from_utf8(&digits[at..]).unwrap_or("?"));
    }

    pub(crate) fn number(&mut self, number: u64) {
        self.digits(number, 10);
    }

    pub(crate) fn hex(&mut self, number: u64) {
        self.text("0x");
        self.digits(number, 16);
    }
}

/// Returns whether the kernel supports the filter action `action` (seccomp(2),
/// `SECCOMP_GET_ACTION_AVAIL`).
pub(crate) fn has_action(action: u32) -> bool {
    let mut action = MaybeUninit::new(action);
    // SAFETY: the operation reads an int from a live variable.
    let result = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_GET_ACTION_AVAIL,
            0,
            action.as_mut_ptr(),
        )
    };
    result == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_formats_numbers_and_truncates() {
        let mut line = SignalSafeLine::default();
        line.number(0);
        line.text(" ");
        line.number(u64::MAX);
        line.text(" ");
        line.hex(0xffff_ff9c);
        assert_eq!(&line.bytes[..line.length], b"0 18446744073709551615 0xffffff9c");
        line.text(&"x".repeat(1000));
        assert_eq!(line.length, line.bytes.len());
    }
}
