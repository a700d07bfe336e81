//! Handling of fault signals (such as SIGSEGV): logs one line and terminates the process.
//!
//! The default handlers of the Rust runtime are not sufficient. They either report a stack
//! overflow, or return and rely on the fault occurring again. A signal that another process has
//! sent does not occur again and would be lost.
#![expect(unsafe_code, reason = "a signal handler, and system calls in it")]

use std::io;
use std::mem::zeroed;
use std::ptr;

use crate::violation::{self, SeccompTerminationActions, SignalSafeLine, end, own_name};

/// Numbers and names of the fault signals.
const FAULTS: [(libc::c_int, &str); 4] = [
    (libc::SIGSEGV, "SIGSEGV"),
    (libc::SIGBUS, "SIGBUS"),
    (libc::SIGILL, "SIGILL"),
    (libc::SIGFPE, "SIGFPE"),
];

/// Installs handlers for fault signals. The handler first logs one line. If another process has
/// sent the signal, the handler then terminates this process as specified by `will`. After a real
/// fault, the signal terminates this process.
///
/// # Errors
/// Returns an error if `sigaction(2)` fails.
pub fn watch_faults(will: SeccompTerminationActions) -> io::Result<()> {
    violation::set_termination_actions(will);
    for (signal, _) in FAULTS {
        // SAFETY: a zeroed sigaction is valid. The handler has the signature that SA_SIGINFO
        // requires and is async-signal-safe.
        unsafe {
            let mut action: libc::sigaction = zeroed();
            action.sa_sigaction = on_fault as extern "C" fn(_, _, _) as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            if libc::sigaction(signal, &action, ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
    }
    Ok(())
}

extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: with SA_SIGINFO the kernel passes a valid siginfo.
    let info = unsafe { &*info };
    let mut line = SignalSafeLine::default();
    line.text("perfvisor: error: thread ");
    line.text(own_name(&mut [0; 16]));
    if let Some(kind) = violation::kind() {
        line.text(" (");
        line.text(kind.name());
        line.text(")");
    }
    let name = FAULTS.iter().find(|(of, _)| *of == signal);
    let name = name.map_or("a signal", |(_, name)| name);
    if info.si_code <= 0 {
        line.text(" was sent ");
        line.text(name);
        // SAFETY: a code of 0 or below means that a process sent the signal, so si_pid is valid.
        let sender = unsafe { info.si_pid() };
        line.text(" by process ");
        line.number(u64::from(sender.unsigned_abs()));
        line.text("; the VM ends\n");
        end(&line);
    }
    line.text(" has a fault: ");
    line.text(name);
    line.text(" at address ");
    // SAFETY: a code above 0 means that the kernel sent the signal, so si_addr is valid for these
    // signals.
    line.hex(unsafe { info.si_addr() } as u64);
    line.text(", instruction ");
    // SAFETY: with SA_SIGINFO the third argument is a valid ucontext_t.
    let registers = unsafe { &(*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs };
    let instruction = usize::try_from(libc::REG_RIP)
        .ok()
        .and_then(|at| registers.get(at));
    line.hex(instruction.map_or(0, |at| at.cast_unsigned()));
    line.text("; the VM ends with it, please report this\n");
    violation::log_line(&line);
    // SAFETY: signal is async-signal-safe. The fault recurs after the return and terminates the
    // process.
    unsafe { libc::signal(signal, libc::SIG_DFL) };
}
