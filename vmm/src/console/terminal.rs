//! Raw mode of the terminal on standard input, and its end on every way out of the process.
#![expect(unsafe_code, reason = "termios and signal handlers")]

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Once, OnceLock};

use virtio_devices::console::port::WindowSize;

/// The terminal's settings to go back to, set once in the process's life.
static SAVED: OnceLock<libc::termios> = OnceLock::new();
/// The terminal is raw now.
static RAW: AtomicBool = AtomicBool::new(false);
static HOOKS: Once = Once::new();

/// Signals from outside that end the process. A handler installed before raw mode is left alone: its
/// owner ends the VM in order.
const ENDING_SIGNALS: [libc::c_int; 5] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGABRT,
];
/// Signals of a fault in this process. The runtime handles some of them to report stack overflows and
/// then lets the fault happen again, so these are taken over and handed on.
const FAULT_SIGNALS: [libc::c_int; 4] = [libc::SIGILL, libc::SIGFPE, libc::SIGBUS, libc::SIGSEGV];
/// What each of [`FAULT_SIGNALS`] did before.
static PREVIOUS: [OnceLock<libc::sigaction>; FAULT_SIGNALS.len()] = [const { OnceLock::new() }; 4];

/// Raw mode of the terminal on standard input, if it is one. Restored when this is dropped, when the
/// process exits, on a panic of any thread, and on fatal signals that nobody else handles.
#[derive(Debug)]
pub struct RawTerminal(());

impl RawTerminal {
    /// Makes the terminal raw. `Ok(None)` if standard input is not a terminal.
    ///
    /// Handlers for SIGTERM and SIGINT installed before this are left alone; install them first.
    pub fn enter() -> io::Result<Option<Self>> {
        // SAFETY: isatty only looks at a descriptor number.
        if unsafe { libc::isatty(libc::STDIN_FILENO) } != 1 {
            return Ok(None);
        }
        // SAFETY: termios is a plain C struct for which all zeroes is a valid value.
        let mut settings: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: `settings` is a valid, writable termios for the length of the call.
        if unsafe { libc::tcgetattr(libc::STDIN_FILENO, &mut settings) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let saved = *SAVED.get_or_init(|| settings);
        HOOKS.call_once(install_hooks);
        let mut raw = saved;
        // SAFETY: cfmakeraw only changes the struct it is given.
        unsafe { libc::cfmakeraw(&mut raw) };
        // Output keeps its processing: messages of the VMM itself end lines with "\n" only.
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

/// The size of the window on standard output, if that is a terminal.
pub fn window_size() -> Option<WindowSize> {
    // SAFETY: winsize is a plain C struct for which all zeroes is a valid value.
    let mut size: libc::winsize = unsafe { std::mem::zeroed() };
    // SAFETY: TIOCGWINSZ writes one winsize (ioctl_tty(2)); `size` is one, valid for the length of the call.
    let result = unsafe { libc::ioctl(libc::STDOUT_FILENO, libc::TIOCGWINSZ, &mut size) };
    (result == 0).then_some(WindowSize {
        columns: size.ws_col,
        rows: size.ws_row,
    })
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        restore_terminal();
    }
}

/// Restores the terminal if it is raw. May be called from anywhere, a signal handler included, and
/// any number of times.
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
    // SAFETY: signal and raise are async-signal-safe; with the default action back the signal ends
    // the process as if we had never handled it, once this handler returns and it is unblocked.
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
    // SA_SIGINFO the kernel passes a valid siginfo. After the return a real fault happens again and
    // meets the previous action; a signal that was sent (code 0 or below) does not, so it is raised.
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
    // SAFETY: `at_exit` has the signature atexit wants and may run at any time during exit.
    unsafe { libc::atexit(at_exit) };
    let previous = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        // First, so the message is readable.
        restore_terminal();
        previous(info);
    }));
    // SAFETY: all structs are valid for the calls, and zeroed ones are valid actions; the handlers
    // only use async-signal-safe functions and atomics. A handler of an ending signal that someone
    // else installed is not replaced, one of a fault is saved before ours can run.
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
            // On the alternate stack, for a stack overflow leaves no other.
            ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(signal, &ours, std::ptr::null_mut());
        }
    }
}
