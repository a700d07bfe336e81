//! A command or a shell in the lab, with its streams, terminal and signals, and the files that are
//! copied out afterwards.

use std::fs::Permissions;
use std::io::{self, IsTerminal, Read, Write, stderr, stdin, stdout};
use std::os::unix::fs::PermissionsExt;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use integration::artefacts::describe;
use integration::lab::{Lab, LabError, LabProcess};
use integration::limit::ProcessTimeLimits;
use integration::process::{HostCommand, OutputSink, ProcessRunError};
use lab_agent::ordered::OutputStream;
use lab_agent::terminal::{RawMode, window_size};
use lab_agent::wire::{ProcessExit, StdioMode, TerminalSize};
use nix::sys::signal::{SigSet, Signal};

use crate::args::{LabArgs, LabFileArgument, directory_of};

/// Exit status that reports a timed-out command, as in timeout(1).
const TIMED_OUT: u8 = 124;
/// Maximum size of a file that `--get` copies out of the lab, in bytes.
const MAX_GET_BYTES: u64 = 4 << 30;
/// Time limit for a command to exit after Ctrl-C before it is killed.
const END_PATIENCE: Duration = Duration::from_secs(10);
/// Window size that is used if the size of the user's terminal is unknown.
const DEFAULT_SIZE: TerminalSize = TerminalSize {
    rows: 24,
    columns: 80,
};
/// First byte of an escape sequence on a terminal: Ctrl-A, as in QEMU.
const ESCAPE: u8 = 1;

const WELCOME: &str = "
This is the lab host: Debian's kernel with a real kvm_amd, in QEMU.
  perfvisor check
  perfvisor run
  perfvisor run --kernel /guest/vmlinux --initrd /guest/initrd --pmu amd \\
      --cmdline 'console=ttyS0 tsc=reliable no_timer_check pv.script=shell'
Leave with \"exit\", or end the lab with Ctrl-A x. Ctrl-A a types Ctrl-A.
";

/// An event during a session, other than the command's exit.
enum SessionEvent {
    /// This process received a signal that requests termination.
    Stop(Signal),
    /// The window size of the user's terminal has changed.
    Resized,
    /// The reader of this process's standard output or standard error has closed it.
    OutputClosed,
    /// The user typed the escape sequence Ctrl-A x.
    Escaped,
}

/// Receiver of termination signals and SIGWINCH.
pub struct LabSignals {
    events: Receiver<SessionEvent>,
    sender: Sender<SessionEvent>,
    received: Arc<OnceLock<Signal>>,
}

impl LabSignals {
    /// Blocks termination signals and SIGWINCH in this thread and in the threads that it creates
    /// later, and receives them in a separate thread. The first termination signal sets
    /// `cancelled`.
    ///
    /// # Errors
    /// Returns an error if signals cannot be blocked.
    pub fn handle(cancelled: Arc<AtomicBool>) -> io::Result<Self> {
        let mut set = SigSet::empty();
        for signal in [
            Signal::SIGINT,
            Signal::SIGTERM,
            Signal::SIGHUP,
            Signal::SIGQUIT,
            Signal::SIGWINCH,
        ] {
            set.add(signal);
        }
        set.thread_block()?;
        let (sender, events) = channel();
        let received = Arc::new(OnceLock::new());
        let (tell, first) = (sender.clone(), Arc::clone(&received));
        thread::spawn(move || {
            while let Ok(signal) = set.wait() {
                let event = if signal == Signal::SIGWINCH {
                    SessionEvent::Resized
                } else {
                    let _ = first.set(signal);
                    cancelled.store(true, Ordering::Relaxed);
                    SessionEvent::Stop(signal)
                };
                if tell.send(event).is_err() {
                    return;
                }
            }
        });
        Ok(Self {
            events,
            sender,
            received,
        })
    }

    /// Returns the first termination signal received, if any.
    pub fn received(&self) -> Option<Signal> {
        self.received.get().copied()
    }
}

/// Runs the command or the shell, copies the files out, and returns the exit status.
pub fn run(lab: Lab, request: &LabArgs, signals: LabSignals) -> ExitCode {
    let lab = Arc::new(lab);
    let is_shell = request.argv.is_empty();
    let is_terminal = stdin().is_terminal() && stdout().is_terminal();
    let wants_terminal = request.tty || (is_shell && is_terminal);
    if is_shell && is_terminal {
        eprintln!("{WELCOME}");
    }
    let status = match start(&lab, request, wants_terminal, signals) {
        // Leaving an interactive shell counts as success, regardless of its last command.
        Ok(_) if is_shell && is_terminal => 0,
        Ok(status) => status,
        Err(CommandFailure { status, message }) => {
            eprintln!("lab: error: {message}");
            status
        }
    };
    // Try every file, even after a failure.
    let failed = request.gets.iter().filter(|get| !copy_out(&lab, get)).count();
    // The lab's state is discarded, so no orderly shutdown is needed.
    lab.abandon();
    ExitCode::from(if status == 0 && failed > 0 { 1 } else { status })
}

/// Reason why the command could not be run or was terminated.
struct CommandFailure {
    status: u8,
    message: String,
}

/// Runs the command in the lab and returns its exit status.
fn start(
    lab: &Arc<Lab>,
    request: &LabArgs,
    terminal: bool,
    signals: LabSignals,
) -> Result<u8, CommandFailure> {
    let streams = if terminal {
        StdioMode::Terminal(window_size(stdout()).unwrap_or(DEFAULT_SIZE))
    } else {
        StdioMode::Ordered
    };
    let sink = output_sink(signals.sender.clone());
    let (process, remote) = lab
        .stream(&command(request, terminal), streams, sink)
        .map_err(|error| failure(&error))?;
    let raw = if terminal {
        RawMode::enter().ok().flatten()
    } else {
        None
    };
    let is_raw = raw.is_some();
    // A command without a terminal has no input and must see end of file.
    if terminal || request.argv.is_empty() {
        let (input, events) = (remote.clone(), signals.sender.clone());
        thread::spawn(move || forward_input(&input, is_raw, &events));
    } else {
        remote.write(&[]).map_err(|error| CommandFailure {
            status: 1,
            message: error.to_string(),
        })?;
    }
    let reaction = Arc::new(Mutex::new(None));
    let (weak, kept) = (Arc::downgrade(lab), Arc::clone(&reaction));
    thread::spawn(move || react(&signals.events, &remote, &weak, &kept));
    let limit = if request.argv.is_empty() {
        ProcessTimeLimits::from(Duration::MAX)
    } else {
        ProcessTimeLimits::from(request.time_limit())
    };
    let result = process.wait(limit);
    // Restore the terminal mode before printing messages.
    drop(raw);
    let reaction = *reaction.lock().unwrap_or_else(PoisonError::into_inner);
    match (result, reaction) {
        (Ok(output), _) => Ok(exit_status(output.ended)),
        (Err(_), Some(status)) => Ok(status),
        (Err(error), None) => Err(failure(&error)),
    }
}

/// Returns the command of a request, or a shell.
fn command(request: &LabArgs, terminal: bool) -> HostCommand {
    let mut command = HostCommand {
        argv: request.argv.clone(),
        env: Vec::new(),
    };
    if request.argv.is_empty() {
        command = HostCommand::shell("cd; exec sh");
    }
    match std::env::var("TERM") {
        Ok(kind) if terminal => command.env("TERM", kind),
        _ => command,
    }
}

fn failure(error: &ProcessRunError) -> CommandFailure {
    let status = match error {
        ProcessRunError::TimedOut { .. } => TIMED_OUT,
        // The status that a shell returns for a missing command.
        ProcessRunError::Start { .. } => 127,
        _ => 1,
    };
    let message = match error {
        // The output was shown as it arrived.
        ProcessRunError::TimedOut { command, overrun, .. } => format!("{command}: {overrun}"),
        _ => describe(error),
    };
    CommandFailure { status, message }
}

/// Converts the way in which a command ended, an exit status or a signal, to the exit status that a
/// shell would report.
fn exit_status(ended: ProcessExit) -> u8 {
    let code = match (ended.code, ended.signal) {
        (Some(code), _) => code,
        (None, Some(signal)) => 128 + signal,
        (None, None) => 1,
    };
    u8::try_from(code).unwrap_or(1)
}

/// Returns the exit status that a shell reports for a program killed by a signal.
pub fn signal_status(signal: Signal) -> ExitCode {
    ExitCode::from(exit_status(ProcessExit {
        code: None,
        signal: Some(signal as i32),
    }))
}

/// Creates a sink that writes the command's standard output and standard error to those of this
/// process.
fn output_sink(events: Sender<SessionEvent>) -> OutputSink {
    let events = Mutex::new(events);
    let closed = AtomicBool::new(false);
    Box::new(move |stream, bytes| {
        if closed.load(Ordering::Relaxed) {
            return;
        }
        let written = match stream {
            OutputStream::Stdout => write_all(&mut stdout().lock(), bytes),
            OutputStream::Stderr => write_all(&mut stderr().lock(), bytes),
        };
        if written.is_err() {
            closed.store(true, Ordering::Relaxed);
            let events = events.lock().unwrap_or_else(PoisonError::into_inner);
            let _ = events.send(SessionEvent::OutputClosed);
        }
    })
}

fn write_all(out: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    out.write_all(bytes)?;
    out.flush()
}

/// Handles session events until the lab terminates. If an event terminates the command, the exit
/// status to report is stored in `reaction`.
fn react(
    events: &Receiver<SessionEvent>,
    remote: &LabProcess,
    lab: &Weak<Lab>,
    reaction: &Mutex<Option<u8>>,
) {
    let mut stopping = false;
    loop {
        let event = if stopping {
            events.recv_timeout(END_PATIENCE)
        } else {
            events.recv().map_err(|_| RecvTimeoutError::Disconnected)
        };
        let keep = |status| {
            reaction
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .get_or_insert(status);
        };
        let abandon = || {
            if let Some(lab) = lab.upgrade() {
                lab.abandon();
            }
        };
        match event {
            Ok(SessionEvent::Resized) => {
                if let Some(size) = window_size(stdout()) {
                    remote.resize(size);
                }
            }
            Ok(SessionEvent::Stop(signal)) => {
                keep(exit_status(ProcessExit {
                    code: None,
                    signal: Some(signal as i32),
                }));
                // A second signal kills the command.
                if stopping {
                    abandon();
                } else {
                    remote.signal(signal as i32);
                }
                stopping = true;
            }
            Ok(SessionEvent::OutputClosed) => {
                keep(exit_status(ProcessExit {
                    code: None,
                    signal: Some(libc::SIGPIPE),
                }));
                remote.signal(libc::SIGPIPE);
                stopping = true;
            }
            Ok(SessionEvent::Escaped) => {
                keep(0);
                abandon();
            }
            Err(RecvTimeoutError::Timeout) => remote.signal(libc::SIGKILL),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

/// Forwards this process's standard input to the command until end of file. On a raw terminal, the
/// escape sequence Ctrl-A x also ends the forwarding.
fn forward_input(remote: &LabProcess, is_raw: bool, events: &Sender<SessionEvent>) {
    let mut buffer = [0; 4096];
    let mut escape = EscapeFilter::default();
    loop {
        let length = match stdin().lock().read(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Ok(length) => length,
            Err(_) => 0,
        };
        if length == 0 {
            let _ = remote.write(&[]);
            return;
        }
        let typed = if is_raw {
            match escape.filter(&buffer[..length]) {
                Some(typed) => typed,
                None => {
                    let _ = events.send(SessionEvent::Escaped);
                    return;
                }
            }
        } else {
            buffer[..length].to_vec()
        };
        if !typed.is_empty() && remote.write(&typed).is_err() {
            return;
        }
    }
}

/// Filter for escape sequences typed on a raw terminal. Ctrl-A x terminates the lab, and Ctrl-A a
/// sends Ctrl-A.
#[derive(Default)]
struct EscapeFilter {
    begun: bool,
}

impl EscapeFilter {
    /// Returns the bytes for the command, or `None` to terminate the lab.
    fn filter(&mut self, typed: &[u8]) -> Option<Vec<u8>> {
        let mut bytes = Vec::new();
        for byte in typed {
            match (std::mem::take(&mut self.begun), *byte) {
                (false, ESCAPE) => self.begun = true,
                (false, byte) => bytes.push(byte),
                (true, b'x' | b'X') => return None,
                (true, b'a' | ESCAPE) => bytes.push(ESCAPE),
                // This is not an escape sequence, so pass both bytes on.
                (true, byte) => bytes.extend([ESCAPE, byte]),
            }
        }
        Some(bytes)
    }
}

/// Copies a file out of the lab and prints one line on failure. Replaces an existing file only when
/// the copy is complete.
fn copy_out(lab: &Lab, get: &LabFileArgument) -> bool {
    let report = |error: &dyn std::error::Error| {
        let file = get.file.display();
        eprintln!("lab: error: --get {}={file}: {}", get.lab_path, describe(error));
        false
    };
    let part = tempfile::Builder::new()
        .prefix(".lab-get-")
        // The umask of the process applies.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(directory_of(&get.file));
    let part = match part {
        Ok(part) => part,
        Err(error) => return report(&error),
    };
    let file = match part.as_file().try_clone() {
        Ok(file) => file,
        Err(error) => return report(&error),
    };
    match lab.get_into(&get.lab_path, file, MAX_GET_BYTES) {
        Ok(()) => {}
        // The agent's message names the file.
        Err(LabError::Transfer { message, .. }) => return report(&io::Error::other(message)),
        Err(error) => return report(&error),
    }
    match part.persist(&get.file) {
        Ok(_) => true,
        Err(error) => report(&error.error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exit_status_encodes_signal() {
        let status = |code, signal| exit_status(ProcessExit { code, signal });
        assert_eq!(status(Some(0), None), 0);
        assert_eq!(status(Some(255), None), 255);
        assert_eq!(status(None, Some(libc::SIGINT)), 130);
        assert_eq!(status(None, Some(libc::SIGKILL)), 137);
        assert_eq!(status(None, None), 1);
    }

    #[test]
    fn escape_sequences_may_span_reads() {
        let mut escape = EscapeFilter::default();
        assert_eq!(escape.filter(b"ls\r").unwrap(), b"ls\r");
        assert_eq!(escape.filter(b"\x01").unwrap(), b"");
        assert_eq!(escape.filter(b"a\x01\x01b").unwrap(), b"\x01\x01b");
        assert_eq!(escape.filter(b"\x01q").unwrap(), b"\x01q");
        assert_eq!(escape.filter(b"\x01"), Some(vec![]));
        assert_eq!(escape.filter(b"x"), None);
    }
}
