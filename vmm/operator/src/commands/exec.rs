//! `perfvisor exec`: runs a command in a guest, with local input and output.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::io::{self, IsTerminal, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;
use guest_agent::request::{AgentOperation, CommandExit, ExecRequest, Terminal};
use guest_agent::wire::{FrameKind, INPUT_WINDOW, write_frame};
use perf_core::error_line;
use ratatui::crossterm::terminal;
use virtio_devices::console::escape::{ConsoleEscapeParser, ConsoleKeyAction};

use super::guest::{AgentAddress, GuestAgentError};
use super::{NAP, OperatorCommandError, print_stderr};
use crate::exit::ExitStatus;
use crate::signals::StopSignals;
use crate::values::parse_seconds;

/// Maximum number of bytes of standard input in a frame to the agent.
const MAX_INPUT_FRAME: usize = 32 << 10;
/// Interval at which the terminal size is polled, in units of [`NAP`].
const SIZE_POLL_NAPS: u32 = 10;
/// Exit status of a process killed by SIGPIPE, as a shell reports it.
const SIGPIPE_STATUS: u8 = 141;

/// Number of stop signals within [`FORCED_EXIT_WINDOW`] that terminate `perfvisor exec` even if the
/// guest does not react.
const FORCED_EXIT_SIGNALS: usize = 3;
/// Time within which [`FORCED_EXIT_SIGNALS`] stop signals must arrive to terminate `perfvisor
/// exec`.
const FORCED_EXIT_WINDOW: Duration = Duration::from_secs(5);
/// Timeout for the agent to acknowledge a forwarded signal, after which the guest is considered
/// hung.
const SIGNAL_TIMEOUT: Duration = Duration::from_secs(10);

const EXIT_STATUS_HELP: &str = "\
Exit status: that of the command; 128 plus the number of the signal that terminated it; 2 if the command could not
be started; 8 if the connection to the VM or its agent was lost or closed while the command ran.

SIGINT, SIGTERM and SIGHUP are forwarded to the command. Three of them within 5 seconds close the connection,
regardless of the guest; with -t, so does Ctrl-A x (Ctrl-A Ctrl-A sends Ctrl-A). One of them closes it after
10 seconds if the guest hangs. The command then gets SIGHUP.

Example: perfvisor exec web perf stat -a sleep 1";

/// `perfvisor exec`.
#[derive(Clone, Debug, Args)]
#[command(after_help = EXIT_STATUS_HELP)]
pub struct ExecArgs {
    /// Name of the VM, as shown by perfvisor ps.
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Allocate a terminal for the command. Ctrl-C and changes of the window size are forwarded.
    #[arg(short, long)]
    pub terminal: bool,
    /// Set a variable in the environment of the command.
    #[arg(short, long = "env", value_name = "K=V", value_parser = parse_variable)]
    pub env: Vec<(String, String)>,
    /// Run the command in this directory of the guest.
    #[arg(short = 'C', long, value_name = "DIR")]
    pub directory: Option<String>,
    /// Wait up to this time for a guest that is still booting.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub wait: Option<Duration>,
    /// Use the vsock socket at this path, for a VM started with --vsock socket=PATH.
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
    /// Command with its arguments.
    #[arg(value_name = "COMMAND", required = true, trailing_var_arg = true)]
    pub command: Vec<String>,
}

/// Error returned when an environment variable cannot be parsed.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("must be NAME=VALUE")]
pub struct EnvironmentVariableError;

fn parse_variable(text: &str) -> Result<(String, String), EnvironmentVariableError> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err(EnvironmentVariableError),
    }
}

/// Errors of `perfvisor exec`.
#[derive(Debug, thiserror::Error)]
pub enum ExecCommandError {
    #[error(transparent)]
    Command(#[from] OperatorCommandError),
    #[error(transparent)]
    Guest(#[from] GuestAgentError),
    #[error("cannot set the terminal to raw mode")]
    Terminal(#[source] io::Error),
}

/// A terminal in raw mode, restored on drop.
struct RawModeGuard;

impl RawModeGuard {
    fn enter() -> io::Result<Option<Self>> {
        if !io::stdin().is_terminal() {
            return Ok(None);
        }
        terminal::enable_raw_mode()?;
        Ok(Some(Self))
    }
}

impl Drop for RawModeGuard {
    fn drop(&mut self) {
        let _ = terminal::disable_raw_mode();
    }
}

/// Flow-control window, which limits the number of bytes sent without an acknowledgement by the
/// agent.
#[derive(Default)]
struct FlowControlWindow {
    used: Mutex<u32>,
    taken: Condvar,
}

impl FlowControlWindow {
    fn take(&self, count: u32) {
        let used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        let mut used = self
            .taken
            .wait_while(used, |used| *used + count > INPUT_WINDOW)
            .unwrap_or_else(PoisonError::into_inner);
        *used += count;
    }

    fn give(&self, count: u32) {
        let mut used = self.used.lock().unwrap_or_else(PoisonError::into_inner);
        *used = used.saturating_sub(count);
        self.taken.notify_all();
    }
}

/// Writing end of the connection to the agent, shared by several threads.
type SharedOutput = Arc<Mutex<UnixStream>>;

fn send(out: &SharedOutput, kind: FrameKind, payload: &[u8]) -> io::Result<()> {
    let mut stream = out.lock().unwrap_or_else(PoisonError::into_inner);
    write_frame(&mut *stream, kind, payload)
}

/// Runs a command in the guest, and returns its exit status.
///
/// # Errors
/// Returns [`ExecCommandError`] if the command cannot be started.
pub fn exec(args: &ExecArgs) -> Result<ExitStatus, ExecCommandError> {
    let way = AgentAddress {
        name: args.name.clone(),
        socket: args.socket.clone(),
        wait: args.wait,
    };
    let mut env = args.env.clone();
    if let (true, Ok(term)) = (args.terminal, std::env::var("TERM")) {
        env.insert(0, ("TERM".to_owned(), term));
    }
    let stream = way.request_job(AgentOperation::Exec(ExecRequest {
        argv: args.command.clone(),
        env,
        cwd: args.directory.clone(),
        terminal: args.terminal.then(size),
    }))?;
    // A stop signal that arrives before the command starts terminates this program. Later signals
    // are forwarded to the command.
    let signals = StopSignals::block().map_err(OperatorCommandError::Signals)?;
    let raw = if args.terminal {
        RawModeGuard::enter().map_err(ExecCommandError::Terminal)?
    } else {
        None
    };
    let copy = || stream.try_clone().map_err(|error| lost(&way, error));
    let out: SharedOutput = Arc::new(Mutex::new(copy()?));
    let exit = Arc::new(ConnectionShutdown {
        stream: copy()?,
        reason: OnceLock::new(),
        frames: AtomicU64::new(0),
        writes: AtomicBool::new(false),
    });
    let window = Arc::new(FlowControlWindow::default());
    // These threads run until the process exits.
    let (input_out, input_window) = (out.clone(), window.clone());
    let escape = raw.is_some().then(|| exit.clone());
    std::thread::spawn(move || forward_input(&input_out, &input_window, escape.as_deref()));
    let follows_size = args.terminal;
    let (signals_exit, (words, to_send)) = (exit.clone(), mpsc::channel());
    std::thread::spawn(move || forward_signals(&words, &signals, follows_size, &signals_exit));
    // Signals have their own thread, because an agent that stops reading blocks the sender.
    std::thread::spawn(move || {
        for (kind, payload) in to_send {
            if send(&out, kind, &payload).is_err() {
                return;
            }
        }
    });
    let status = serve(&way, &stream, &window, &exit);
    drop(raw);
    status
}

fn lost(way: &AgentAddress, error: io::Error) -> GuestAgentError {
    let (name, source) = (way.name.clone(), error.into());
    GuestAgentError::Wire { name, source }
}

/// Handle that ends `perfvisor exec` while the command in the guest still runs. Shuts down the
/// connection to the agent, which wakes all threads.
struct ConnectionShutdown {
    stream: UnixStream,
    /// Message that states why the connection was shut down.
    reason: OnceLock<&'static str>,
    /// Number of frames received from the agent.
    frames: AtomicU64,
    /// `true` while the output of a frame is being written, which may block until the reader of the
    /// output continues.
    writes: AtomicBool,
}

impl ConnectionShutdown {
    fn take(&self, reason: &'static str) {
        let _ = self.reason.set(reason);
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Message printed when `perfvisor exec` exits on a user request while the command still runs.
const LEFT: &str = "left; the command in the guest gets SIGHUP";
/// Message printed when the agent does not acknowledge a signal.
const HANGS: &str =
    "left: the guest does not answer the signal; the command gets SIGHUP once the guest runs again";

/// Prints the output of the command in the guest until the command exits.
fn serve(
    way: &AgentAddress,
    mut stream: &UnixStream,
    window: &FlowControlWindow,
    exit: &ConnectionShutdown,
) -> Result<ExitStatus, ExecCommandError> {
    loop {
        let frame = match way.next(&mut stream) {
            Ok(frame) => frame,
            Err(error) => {
                // The command has been started, so the exit status must not be that of an invalid
                // argument.
                let line = exit
                    .reason
                    .get()
                    .map_or_else(|| error_line(&error), |&why| why.to_owned());
                print_stderr(&format!("perfvisor: error: {line}\r\n"));
                return Ok(ExitStatus::Internal);
            }
        };
        exit.frames.fetch_add(1, Ordering::Relaxed);
        exit.writes.store(true, Ordering::Relaxed);
        let written = match frame.kind {
            FrameKind::Stdout => io::stdout()
                .write_all(&frame.payload)
                .and_then(|()| io::stdout().flush()),
            FrameKind::Stderr => io::stderr().write_all(&frame.payload),
            FrameKind::Taken => {
                window.give(frame.number().unwrap_or(0));
                Ok(())
            }
            FrameKind::Exit => {
                return match serde_json::from_slice::<CommandExit>(&frame.payload) {
                    Ok(exit) => Ok(ExitStatus::Command(exit.code())),
                    Err(_) => Err(way.refused(&frame).into()),
                };
            }
            _ => return Err(way.refused(&frame).into()),
        };
        exit.writes.store(false, Ordering::Relaxed);
        if written.is_err() {
            // The reader of the output has closed the pipe. The agent terminates the command when
            // the connection closes.
            return Ok(ExitStatus::Command(SIGPIPE_STATUS));
        }
    }
}

/// Help text with the key sequences of `perfvisor exec`, for a terminal in raw mode.
const KEYS: &str = "\r\nCtrl-A x       leave the command, which gets SIGHUP\r\n\
    Ctrl-A Ctrl-A  send Ctrl-A to the command\r\nCtrl-A h       list the keys\r\n";

/// Forwards standard input to the command in the guest. `escape` is the connection that Ctrl-A x
/// shuts down, if standard input is a terminal in raw mode.
fn forward_input(out: &SharedOutput, window: &FlowControlWindow, escape: Option<&ConnectionShutdown>) {
    let mut buffer = vec![0; MAX_INPUT_FRAME];
    let mut keys = ConsoleEscapeParser::default();
    loop {
        let count = match io::stdin().read(&mut buffer) {
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => 0,
        };
        let mut piece = Cow::Borrowed(&buffer[..count]);
        if let Some(exit) = escape {
            let mut typed = Vec::with_capacity(count);
            for &byte in &buffer[..count] {
                match keys.feed(byte) {
                    ConsoleKeyAction::Guest(byte) => typed.push(byte),
                    // Ignore the error. If standard error is closed, the help is lost.
                    ConsoleKeyAction::Help => drop(io::stderr().write_all(KEYS.as_bytes())),
                    ConsoleKeyAction::Nothing => {}
                    ConsoleKeyAction::Quit => return exit.take(LEFT),
                }
            }
            if typed.is_empty() && count > 0 {
                continue;
            }
            piece = Cow::Owned(typed);
        }
        // The conversion cannot fail, because a piece has at most [`MAX_INPUT_FRAME`] bytes.
        window.take(u32::try_from(piece.len()).unwrap_or(0));
        if send(out, FrameKind::Stdin, &piece).is_err() || count == 0 {
            return;
        }
    }
}

/// Forwards signals and changes of the terminal size to the command in the guest. Terminates this
/// program after several signals in a short time, or if the agent does not acknowledge a signal.
fn forward_signals(
    words: &Sender<(FrameKind, Vec<u8>)>,
    signals: &StopSignals,
    follows_size: bool,
    exit: &ConnectionShutdown,
) {
    let mut last = size();
    let mut came: VecDeque<Instant> = VecDeque::new();
    // The first unacknowledged signal: its time, and the number of frames received before it. Any
    // further frame from the agent acknowledges the signal.
    let mut waiting: Option<(Instant, u64)> = None;
    for nap in 0_u32.. {
        std::thread::sleep(NAP);
        let frames = exit.frames.load(Ordering::Relaxed);
        let writes = exit.writes.load(Ordering::Relaxed);
        waiting = waiting.filter(|&(_, before)| frames == before && !writes);
        if waiting.is_some_and(|(at, _)| at.elapsed() >= SIGNAL_TIMEOUT) {
            return exit.take(HANGS);
        }
        let signal = signals.take().and_then(|signal| u32::try_from(signal).ok());
        if let Some(signal) = signal {
            came.retain(|at| at.elapsed() < FORCED_EXIT_WINDOW);
            came.push_back(Instant::now());
            if came.len() >= FORCED_EXIT_SIGNALS {
                return exit.take(LEFT);
            }
            waiting = waiting.or(Some((Instant::now(), frames)));
            if words
                .send((FrameKind::Signal, signal.to_le_bytes().to_vec()))
                .is_err()
            {
                return;
            }
        }
        if follows_size && nap.is_multiple_of(SIZE_POLL_NAPS) {
            let now = size();
            if now != std::mem::replace(&mut last, now)
                && words.send((FrameKind::Resize, now.to_bytes().to_vec())).is_err()
            {
                return;
            }
        }
    }
}

/// Returns the size of the terminal, or a default size if there is no terminal.
fn size() -> Terminal {
    let (columns, rows) = terminal::size().unwrap_or((80, 24));
    Terminal { rows, columns }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_have_a_name_and_a_value() {
        assert_eq!(parse_variable("A=b=c"), Ok(("A".into(), "b=c".into())));
        assert_eq!(parse_variable("A="), Ok(("A".into(), String::new())));
        for bad in ["A", "=b", ""] {
            assert_eq!(parse_variable(bad), Err(EnvironmentVariableError));
        }
    }
}
