//! Raw mode of the terminal on standard input, and its restoration on every exit path of the
//! process.
#![expect(unsafe_code, reason = "termios and signal handlers")]

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Once, OnceLock};

use virtio_devices::console::port::TerminalSize;

/// Terminal settings before raw mode. Set once in the lifetime of the process.
static SAVED: OnceLock<libc::termios> = OnceLock::new();
/// `true` while the terminal is in raw mode.
static RAW: AtomicBool = AtomicBool::new(false);
static HOOKS: Once = Once::new();

/// Signals that terminate the process and before which the terminal is restored. A handler that was
/// installed before raw mode is kept, because it shuts the VM down cleanly.
const ENDING_SIGNALS: [libc::c_int; 5] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGABRT,
];
/// Signals that a fault in this process raises. The Rust runtime handles some of them, to report
/// stack overflows. After the terminal is restored, the previous action of the signal is
/// reinstalled and handles the fault when it occurs again.
const FAULT_SIGNALS: [libc::c_int; 4] = [libc::SIGILL, libc::SIGFPE, libc::SIGBUS, libc::SIGSEGV];
/// Actions of [`FAULT_SIGNALS`] before raw mode.
static PREVIOUS: [OnceLock<libc::sigaction>; FAULT_SIGNALS.len()] = [const { OnceLock::new() }; 4];

/// Guard that keeps the terminal on standard input in raw mode. The original settings are restored
/// on drop, at process exit, on a panic of any thread, and on fatal signals without another
/// handler.
#[derive(Debug)]
pub struct RawTerminal(());

impl RawTerminal {
    /// Puts the terminal on standard input into raw mode. Returns `Ok(None)` if standard input is
    /// not a terminal.
    ///
    /// Handlers for SIGTERM and SIGINT should be installed before this call, because existing
    /// handlers are kept.
    pub fn enter() -> io::Result<Option<Self>> {
        // SAFETY: isatty only inspects a descriptor number.
        if unsafe { libc::isatty(libc::STDIN_FILENO) } != 1 {
            return Ok(None);
        }
        // SAFETY: termios is a plain C struct for which all zeroes is a valid value.
        let mut settings: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: `settings` is a valid, writable termios for the duration of the call.
        if unsafe { libc::tcgetattr(libc::STDIN_FILENO, &mut settings) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let saved = *SAVED.get_or_init(|| settings);
        HOOKS.call_once(install_hooks);
        let mut raw = saved;
        // SAFETY: cfmakeraw only changes the struct that it is given.
        unsafe { libc::cfmakeraw(&mut raw) };
        // Keep output processing, because VMM messages end lines without a carriage return.
        raw.c_oflag = saved.c_oflag;
        RAW.store(true, Ordering::SeqCst);
        // SAFETY: `raw` is a valid termios.
        if unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, &raw) } != 0 {
            let error = io::Error::last_os_error();
            RAW.store(false, Ordering::SeqCst);
            return Err(error);
        }
        Ok(Some(RawTerminal(())))
    }
}

/// Returns the window size of the terminal on standard output, or `None` if standard output is not
/// a terminal.
pub fn window_size() -> Option<TerminalSize> {
    // SAFETY: winsize is a plain C struct for which all zeroes is a valid value.
    let mut size: libc::winsize = unsafe { std::mem::zeroed() };
    // SAFETY: TIOCGWINSZ writes one winsize (ioctl_tty(2)); `size` is one, valid for the duration
    // of the call.
    let result = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &mut size) };
    (result == 0).then_some(TerminalSize {
        columns: size.ws_col,
        rows: size.ws_row,
    })
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        restore_terminal();
    }
}

/// Restores the original settings if the terminal is in raw mode. Async-signal-safe. May be called
/// repeatedly.
pub fn restore_terminal() {
    if RAW.swap(false, Ordering::SeqCst)
        && let Some(saved) = SAVED.get()
    {
        // SAFETY: `saved` is a valid termios; tcsetattr is async-signal-safe (POSIX 2.4.3).
        unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, saved) };
    }
}

extern "C" fn at_exit() {
    restore_terminal();
}

extern "C" fn on_ending_signal(signal: libc::c_int) {
    restore_terminal();
    // SAFETY: signal and raise are async-signal-safe. With the default action restored, the signal
    // terminates the process as soon as this handler returns and the signal is unblocked.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    restore_terminal();
    let previous = FAULT_SIGNALS
        .iter()
        .position(|s| *s == signal)
        .and_then(|i| PREVIOUS[i].get());
    // SAFETY: sigaction, signal and raise are async-signal-safe; `previous` is a valid action; with
    // SA_SIGINFO the kernel passes a valid siginfo. After the return a real fault occurs again and
    // runs the previous action. A signal that was sent (code 0 or below) does not recur and is
    // raised instead.
    unsafe {
        match previous {
            Some(previous) => _ = libc::sigaction(signal, previous, std::ptr::null_mut()),
            None => _ = libc::signal(signal, libc::SIG_DFL),
        }
        if (*info).si_code <= 0 {
            libc::raise(signal);
        }
    }
}

fn install_hooks() {
    // SAFETY: `at_exit` has the signature that atexit requires and may run at any time during exit.
    unsafe { libc::atexit(at_exit) };
    let previous = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        // Restore the terminal first so that the message is readable.
        restore_terminal();
        previous(info);
    }));
    // SAFETY: all structs are valid for the calls, and zeroed ones are valid actions. The handlers
    // use only async-signal-safe functions and atomics. An existing handler of a terminating signal
    // is not replaced, and the previous action of a fault signal is saved before the new handler
    // can run.
    unsafe {
        for signal in ENDING_SIGNALS {
            let mut current: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(signal, std::ptr::null(), &mut current) == 0
                && current.sa_sigaction == libc::SIG_DFL
            {
                let mut ours: libc::sigaction = std::mem::zeroed();
                ours.sa_sigaction = on_ending_signal as extern "C" fn(libc::c_int) as usize;
                libc::sigaction(signal, &ours, std::ptr::null_mut());
            }
        }
        for (signal, saved) in FAULT_SIGNALS.into_iter().zip(&PREVIOUS) {
            let mut current: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(signal, std::ptr::null(), &mut current) != 0 {
                continue;
            }
            let _ = saved.set(current);
            let mut ours: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_fault;
            ours.sa_sigaction = handler as usize;
            // Use the alternate stack, because after a stack overflow the normal stack is
            // exhausted.
            ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(signal, &ours, std::ptr::null_mut());
        }
    }
}
