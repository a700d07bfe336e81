//! What happens when a thread asks for what it may not: one line, and the end of the process.
#![expect(unsafe_code, reason = "a signal handler, and system calls in it")]

use std::cell::Cell;
use std::io;
use std::mem::{MaybeUninit, zeroed};
use std::ptr;
use std::sync::OnceLock;

use syscalls::Sysno;

use crate::kind::ThreadKind;

/// `SYS_SECCOMP` of `sigaction(2)`: the signal is a filter's.
const SYS_SECCOMP: libc::c_int = 1;

/// `siginfo_t` of a `SIGSYS` (include/uapi/asm-generic/siginfo.h, `_sigsys`).
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

/// What a process does at its end that no destructor gets to.
#[derive(Clone, Copy, Debug)]
pub struct LastWill {
    /// Called in a signal handler, before the line is written: may restore the terminal.
    pub first: fn(),
    /// Another descriptor that gets the line, besides standard error.
    pub log: Option<libc::c_int>,
    /// The exit status.
    pub status: u8,
}

static WILL: OnceLock<LastWill> = OnceLock::new();

thread_local!(static KIND: Cell<Option<ThreadKind>> = const { Cell::new(None) });

/// Says what the calling thread is.
pub(crate) fn is_of(kind: ThreadKind) {
    KIND.with(|own| own.set(Some(kind)));
}

/// What the calling thread is; `None` if nobody has said.
#[must_use]
pub fn kind() -> Option<ThreadKind> {
    KIND.with(Cell::get)
}

/// Ends the process by `will`, without what destructors and handlers at the exit would do.
pub fn end_now(will: LastWill) -> ! {
    (will.first)();
    // SAFETY: it does not return, and has no conditions.
    unsafe { libc::_exit(will.status.into()) }
}

/// The process ends by `will`; the first one counts.
pub(crate) fn leave(will: LastWill) {
    let _ = WILL.set(will);
}

/// Has the process end by `will` when a filter is met.
pub(crate) fn watch(will: LastWill) -> io::Result<()> {
    leave(will);
    // SAFETY: a zeroed sigaction is a valid one; the handler has the signature that SA_SIGINFO wants and
    // does only what a signal handler may.
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

/// Ends the process with a line, without what destructors and handlers at the exit would do.
pub(crate) fn end(line: &Line) -> ! {
    tell(line);
    // SAFETY: it does not return, and is async-signal-safe.
    unsafe { libc::_exit(WILL.get().map_or(libc::EXIT_FAILURE, |will| will.status.into())) }
}

/// Writes a line where a fault is told, and restores the terminal before. For signal handlers too.
pub(crate) fn tell(line: &Line) {
    let will = WILL.get();
    if let Some(will) = will {
        (will.first)();
    }
    for fd in [Some(libc::STDERR_FILENO), will.and_then(|will| will.log)]
        .into_iter()
        .flatten()
    {
        // SAFETY: the bytes are those of a live buffer. Nothing can be done if nobody takes them.
        unsafe { libc::write(fd, line.bytes.as_ptr().cast(), line.length) };
    }
}

extern "C" fn on_sigsys(_: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a valid siginfo, and SigSys is its layout for this signal; a
    // siginfo is larger than that whatever its code is.
    let info = unsafe { &*info.cast::<SigSys>() };
    let mut line = Line::default();
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

/// The name of the calling thread.
pub(crate) fn own_name(buffer: &mut [u8; 16]) -> &str {
    // SAFETY: PR_GET_NAME writes at most 16 bytes, the last of them zero, to a live buffer of that size.
    unsafe { libc::prctl(libc::PR_GET_NAME, buffer.as_mut_ptr()) };
    let length = buffer.iter().position(|byte| *byte == 0).unwrap_or(0);
    std::str::from_utf8(&buffer[..length]).unwrap_or("?")
}

/// A line of text that is put together without memory of the allocator's, which a thread that was
/// interrupted may be in.
pub(crate) struct Line {
    bytes: [u8; 400],
    length: usize,
}

impl Default for Line {
    fn default() -> Self {
        Self {
            bytes: [0; 400],
            length: 0,
        }
    }
}

impl Line {
    /// Adds text; what does not fit is left out.
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

/// Whether this kernel has filters that can do `action` (seccomp(2), `SECCOMP_GET_ACTION_AVAIL`).
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
    fn a_line_has_its_numbers_and_no_more_than_fits() {
        let mut line = Line::default();
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
