//! Runs processes locally and in the lab through one interface.

use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{ChildStdin, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use lab_agent::cpu_time::{WATCH_PERIOD, cpu_ticks_of_group};
use lab_agent::ordered::OutputStream;
use lab_agent::wire::ProcessExit;

use crate::limit::{ExceededTimeLimit, ProcessTimeLimits};

/// Error returned when a process cannot be run to its end.
#[derive(Debug, thiserror::Error)]
pub enum ProcessRunError {
    /// The process could not be started.
    #[error("cannot start {command}: {message}")]
    Start {
        /// Command line of the process that could not be started.
        command: String,
        /// Error message of the operating system.
        message: String,
    },
    /// The process exceeded a time limit and was killed.
    #[error("{command}: {overrun}; last output, {silent:.0?} before:\n{tail}")]
    TimedOut {
        /// Command line of the process that was killed.
        command: String,
        /// Time limit that the process exceeded.
        overrun: ExceededTimeLimit,
        /// Time since the last output. A long time suggests that the process hangs, a short time
        /// that it is slow.
        silent: Duration,
        /// Last lines of the output of the process.
        tail: String,
    },
    /// The lab ended while the process was running.
    #[error("{command}: the lab host has exited: {message}")]
    LabGone {
        /// Command line of the process that was running.
        command: String,
        /// Reason why the lab ended.
        message: String,
    },
    /// Writing to the standard input of the process failed.
    #[error("cannot write to {command}")]
    Stdin {
        /// Command line of the process that did not accept its input.
        command: String,
        /// Error returned by the write to standard input.
        #[source]
        source: io::Error,
    },
}

/// A program with its arguments and additional environment variables.
#[derive(Debug, Clone)]
pub struct HostCommand {
    /// Program and its arguments.
    pub argv: Vec<String>,
    /// Environment variables of the process, in addition to the inherited ones.
    pub env: Vec<(String, String)>,
}

impl HostCommand {
    /// Creates a command that runs `program` without arguments.
    pub fn new(program: impl Into<String>) -> Self {
        Self {
            argv: vec![program.into()],
            env: Vec::new(),
        }
    }

    /// Creates a command that runs a shell command line.
    pub fn shell(line: impl Into<String>) -> Self {
        Self::new("sh").arg("-c").arg(line)
    }

    /// Adds an argument to the command.
    pub fn arg(mut self, argument: impl Into<String>) -> Self {
        self.argv.push(argument.into());
        self
    }

    /// Adds arguments to the command.
    pub fn args<T: Into<String>>(mut self, arguments: impl IntoIterator<Item = T>) -> Self {
        self.argv.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Sets an environment variable of the command.
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Returns the program and its arguments, separated by spaces, for messages.
    pub fn line(&self) -> String {
        self.argv.join(" ")
    }
}

/// The output and exit status of a process.
#[derive(Debug, Clone)]
pub struct ProcessOutput {
    /// Contents of the standard output.
    pub stdout: Vec<u8>,
    /// Contents of the standard error.
    pub stderr: Vec<u8>,
    /// How the process ended: its exit status, or the signal that killed it.
    pub ended: ProcessExit,
    /// Run time, measured by the clock of this machine.
    pub elapsed: Duration,
}

impl ProcessOutput {
    /// Returns the exit status, or `None` if a signal killed the process.
    pub fn code(&self) -> Option<i32> {
        self.ended.code
    }

    /// Returns whether the process exited with status 0.
    pub fn success(&self) -> bool {
        self.ended.code == Some(0)
    }

    /// Returns standard output as text without carriage returns.
    pub fn stdout_text(&self) -> String {
        text(&self.stdout)
    }

    /// Returns standard error as text without carriage returns.
    pub fn stderr_text(&self) -> String {
        text(&self.stderr)
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).replace('\r', "")
}

/// A callback that receives the output of a process as it arrives.
///
/// Without a callback, the output is stored in memory. A callback that blocks also blocks the
/// process as soon as the buffers between them are full.
pub type OutputSink = Box<dyn Fn(OutputStream, &[u8]) + Send + Sync>;

/// Output and state of a process, shared by the process handle and the threads that receive the
/// output.
#[derive(Default)]
pub(crate) struct ProcessProgress {
    state: Mutex<ProcessState>,
    changed: Condvar,
    sink: Option<OutputSink>,
}

#[derive(Default)]
struct ProcessState {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    /// Time at which the process last wrote output.
    heard: Option<Instant>,
    /// CPU time used until the last check, in clock ticks.
    ticks: u64,
    /// Time at which `ticks` last changed.
    worked: Option<Instant>,
    end: Option<OutputEnd>,
}

#[derive(Clone)]
enum OutputEnd {
    Exited(ProcessExit),
    NotStarted(String),
    LabGone(String),
}

impl ProcessProgress {
    /// Creates the progress of a process, with `sink` as the receiver of its output.
    pub(crate) fn with_sink(sink: OutputSink) -> Self {
        Self {
            sink: Some(sink),
            ..Self::default()
        }
    }

    fn lock(&self) -> MutexGuard<'_, ProcessState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the process has written `bytes` to `stream`, and passes them to the sink.
    pub(crate) fn output(&self, stream: OutputStream, bytes: &[u8]) {
        // Call the sink without the lock, because it may be slow.
        if let Some(sink) = &self.sink {
            sink(stream, bytes);
        }
        let mut state = self.lock();
        if self.sink.is_none() {
            match stream {
                OutputStream::Stdout => state.stdout.extend_from_slice(bytes),
                OutputStream::Stderr => state.stderr.extend_from_slice(bytes),
            }
        }
        state.heard = Some(Instant::now());
        drop(state);
        self.changed.notify_all();
    }

    pub(crate) fn exited(&self, ended: ProcessExit) {
        self.lock().end.get_or_insert(OutputEnd::Exited(ended));
        self.changed.notify_all();
    }

    pub(crate) fn not_started(&self, message: String) {
        self.lock().end.get_or_insert(OutputEnd::NotStarted(message));
        self.changed.notify_all();
    }

    pub(crate) fn lab_gone(&self, message: String) {
        self.lock().end.get_or_insert(OutputEnd::LabGone(message));
        self.changed.notify_all();
    }

    /// Records the total CPU time that the process has used so far, in clock ticks.
    pub(crate) fn used(&self, ticks: u64) {
        let mut state = self.lock();
        if state.ticks != ticks {
            state.ticks = ticks;
            state.worked = Some(Instant::now());
        }
    }

    /// Waits until `done` returns `true`. The total run time is counted from `start`, and the time
    /// without output from this call.
    ///
    /// # Errors
    /// Returns the first limit that the process exceeds.
    fn wait_until(
        &self,
        start: Instant,
        limit: ProcessTimeLimits,
        mut done: impl FnMut(&ProcessState) -> bool,
    ) -> Result<(), ExceededTimeLimit> {
        let began = Instant::now();
        let mut state = self.lock();
        loop {
            if done(&state) {
                return Ok(());
            }
            let silent = state.heard.unwrap_or(start).max(began);
            let still = state.worked.unwrap_or(silent).max(silent);
            let [all, silent, still] = [start, silent, still].map(|instant| instant.elapsed());
            if let Some(overrun) = limit.overrun(all, silent, still) {
                return Err(overrun);
            }
            state = self
                .changed
                .wait_timeout(state, limit.time_left(all, silent, still))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Monitors the CPU time of the local process group `group` until its process exits.
    fn watch(&self, group: i32) {
        while self
            .wait_until(Instant::now(), WATCH_PERIOD.into(), |state| state.end.is_some())
            .is_err()
        {
            self.used(cpu_ticks_of_group(group));
        }
    }
}

/// Operations on a process that runs locally or in the lab.
pub(crate) trait ProcessControl: Send {
    /// Writes to the standard input of the process. An empty slice closes it.
    fn stdin(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Sends a signal to the process and its children.
    fn signal(&mut self, number: i32);
}

/// A handle to a running process. The process is killed when the handle is dropped.
pub struct HostProcess {
    command: String,
    started: Instant,
    progress: Arc<ProcessProgress>,
    control: Box<dyn ProcessControl>,
}

impl HostProcess {
    pub(crate) fn new(
        command: &HostCommand,
        progress: Arc<ProcessProgress>,
        control: Box<dyn ProcessControl>,
    ) -> Self {
        Self {
            command: command.line(),
            started: Instant::now(),
            progress,
            control,
        }
    }

    /// Starts a process on this machine.
    ///
    /// # Errors
    /// Returns an error if the program does not exist or cannot be executed.
    pub fn start_here(command: &HostCommand) -> Result<Self, ProcessRunError> {
        let start_error = |message: String| ProcessRunError::Start {
            command: command.line(),
            message,
        };
        let (program, arguments) = command
            .argv
            .split_first()
            .ok_or_else(|| start_error("no program".to_owned()))?;
        let mut child = std::process::Command::new(program)
            .args(arguments)
            .envs(command.env.iter().cloned())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(|error| start_error(error.to_string()))?;
        let progress = Arc::new(ProcessProgress::default());
        let pid = i32::try_from(child.id()).unwrap_or(0);
        let control = LocalProcess {
            pid,
            stdin: child.stdin.take(),
        };
        let stdout = child.stdout.take();
        let stderr = child.stderr.take();
        let watched = Arc::clone(&progress);
        thread::spawn(move || watched.watch(pid));
        let feed = Arc::clone(&progress);
        thread::spawn(move || {
            let errors = {
                let feed = Arc::clone(&feed);
                thread::spawn(move || pump(stderr, |bytes| feed.output(OutputStream::Stderr, bytes)))
            };
            pump(stdout, |bytes| feed.output(OutputStream::Stdout, bytes));
            let _ = errors.join();
            feed.exited(match child.wait() {
                Ok(status) => ProcessExit {
                    code: status.code(),
                    signal: status.signal(),
                },
                Err(_) => ProcessExit {
                    code: None,
                    signal: None,
                },
            });
        });
        Ok(Self::new(command, progress, Box::new(control)))
    }

    /// Waits until the process exits. Kills it if it exceeds a limit, counted from its start.
    ///
    /// # Errors
    /// Returns an error if the process could not be started or exceeded a limit, or if the lab
    /// ended.
    pub fn wait(self, limit: impl Into<ProcessTimeLimits>) -> Result<ProcessOutput, ProcessRunError> {
        self.wait_or_diagnose(limit, String::new)
    }

    /// Waits until the process exits, as [`HostProcess::wait`] does. If the process exceeds a
    /// limit, calls `look` before killing the process and adds its result to the error.
    ///
    /// # Errors
    /// Returns the same errors as [`HostProcess::wait`].
    pub fn wait_or_diagnose(
        mut self,
        limit: impl Into<ProcessTimeLimits>,
        look: impl FnOnce() -> String,
    ) -> Result<ProcessOutput, ProcessRunError> {
        let ended = |state: &ProcessState| state.end.is_some();
        if let Err(overrun) = self.progress.wait_until(self.started, limit.into(), ended) {
            let error = self.timed_out(overrun, look);
            self.control.signal(libc::SIGKILL);
            return Err(error);
        }
        let mut state = self.progress.lock();
        let command = self.command.clone();
        match state.end.clone() {
            Some(OutputEnd::Exited(ended)) => Ok(ProcessOutput {
                stdout: std::mem::take(&mut state.stdout),
                stderr: std::mem::take(&mut state.stderr),
                ended,
                elapsed: self.started.elapsed(),
            }),
            Some(OutputEnd::NotStarted(message)) => Err(ProcessRunError::Start { command, message }),
            Some(OutputEnd::LabGone(message)) => Err(ProcessRunError::LabGone { command, message }),
            None => unreachable!("wait_until saw an end"),
        }
    }

    /// Waits until the standard output of the process contains `text`. `limit` applies from this
    /// call. Returns `false` if the process exits or exceeds a limit before printing the text.
    pub fn wait_for(&self, text: &str, limit: impl Into<ProcessTimeLimits>) -> bool {
        self.wait_for_in(|state| &state.stdout, text, limit.into())
    }

    /// Waits until the standard error of the process contains `text`. Otherwise like
    /// [`HostProcess::wait_for`].
    pub fn wait_for_message(&self, text: &str, limit: impl Into<ProcessTimeLimits>) -> bool {
        self.wait_for_in(|state| &state.stderr, text, limit.into())
    }

    fn wait_for_in(
        &self,
        stream: impl Fn(&ProcessState) -> &Vec<u8>,
        text: &str,
        limit: ProcessTimeLimits,
    ) -> bool {
        let contains = |state: &ProcessState| {
            stream(state)
                .windows(text.len())
                .any(|window| window == text.as_bytes())
        };
        let done = |state: &ProcessState| contains(state) || state.end.is_some();
        self.progress.wait_until(Instant::now(), limit, done).is_ok() && contains(&self.progress.lock())
    }

    /// Passes the standard output of the process to `sink` as it arrives, until the process exits
    /// or exceeds a limit. The caller must still call [`HostProcess::wait`].
    pub fn follow(&self, limit: impl Into<ProcessTimeLimits>, mut sink: impl FnMut(&[u8])) {
        let mut seen = 0;
        let limit = limit.into();
        loop {
            let mut fresh = Vec::new();
            let result = self.progress.wait_until(self.started, limit, |state| {
                fresh.extend_from_slice(&state.stdout[seen..]);
                seen = state.stdout.len();
                !fresh.is_empty() || state.end.is_some()
            });
            // Call the sink without the lock, because it may be slow.
            sink(&fresh);
            if result.is_err() || fresh.is_empty() {
                return;
            }
        }
    }

    /// Returns the standard output received so far.
    pub fn stdout_so_far(&self) -> String {
        text(&self.progress.lock().stdout)
    }

    /// Writes to the standard input of the process.
    ///
    /// # Errors
    /// Returns an error if the process no longer reads its standard input.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), ProcessRunError> {
        self.send(bytes)
    }

    /// Closes standard input.
    ///
    /// # Errors
    /// Returns an error if the lab has ended.
    pub fn close_stdin(&mut self) -> Result<(), ProcessRunError> {
        self.send(&[])
    }

    /// Sends a signal, such as `libc::SIGTERM`, to the process and its children.
    pub fn signal(&mut self, number: i32) {
        self.control.signal(number);
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), ProcessRunError> {
        self.control
            .stdin(bytes)
            .map_err(|source| ProcessRunError::Stdin {
                command: self.command.clone(),
                source,
            })
    }

    fn timed_out(&self, overrun: ExceededTimeLimit, look: impl FnOnce() -> String) -> ProcessRunError {
        let (silent, mut tail) = {
            let state = self.progress.lock();
            let mut tail = last_lines(&text(&state.stdout), 30);
            tail.push_str(&last_lines(&text(&state.stderr), 10));
            (state.heard.unwrap_or(self.started).elapsed(), tail)
        };
        // Call `look` without the lock, because more output may arrive.
        tail.push_str(&look());
        ProcessRunError::TimedOut {
            command: self.command.clone(),
            overrun,
            silent,
            tail,
        }
    }
}

impl Drop for HostProcess {
    fn drop(&mut self) {
        if self.progress.lock().end.is_none() {
            self.control.signal(libc::SIGKILL);
        }
    }
}

/// Returns the last `count` lines of `text`.
pub(crate) fn last_lines(text: &str, count: usize) -> String {
    let lines: Vec<_> = text.lines().collect();
    let mut out = String::new();
    for line in &lines[lines.len().saturating_sub(count)..] {
        out.push_str(line);
        out.push('\n');
    }
    out
}

fn pump(pipe: Option<impl Read>, mut sink: impl FnMut(&[u8])) {
    let Some(mut pipe) = pipe else { return };
    let mut buffer = [0; 16 << 10];
    loop {
        match pipe.read(&mut buffer) {
            Ok(0) => return,
            Ok(length) => sink(&buffer[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return,
        }
    }
}

/// A running process on this machine.
struct LocalProcess {
    pid: i32,
    stdin: Option<ChildStdin>,
}

impl ProcessControl for LocalProcess {
    fn stdin(&mut self, bytes: &[u8]) -> io::Result<()> {
        match &mut self.stdin {
            _ if bytes.is_empty() => self.stdin = None,
            Some(stdin) => stdin.write_all(bytes)?,
            None => return Err(io::ErrorKind::BrokenPipe.into()),
        }
        Ok(())
    }

    #[expect(unsafe_code, reason = "calls of the system")]
    fn signal(&mut self, number: i32) {
        if self.pid > 0 {
            // SAFETY: kill(2) takes two integers and accesses no memory of this process.
            unsafe { libc::kill(-self.pid, number) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(20);

    #[test]
    fn output_and_status_are_captured_apart() {
        let command = HostCommand::shell("echo out; echo err >&2; exit 3");
        let output = HostProcess::start_here(&command).unwrap().wait(LIMIT).unwrap();
        assert_eq!(output.stdout_text(), "out\n");
        assert_eq!(output.stderr_text(), "err\n");
        assert_eq!(output.code(), Some(3));
    }

    #[test]
    fn hung_process_is_killed_with_children_and_reported() {
        let command = HostCommand::shell("echo before; sleep 1000 & sleep 1000");
        let process = HostProcess::start_here(&command).unwrap();
        assert!(process.wait_for("before", LIMIT));
        let error = process
            .wait_or_diagnose(Duration::from_millis(300), || "looked\n".to_owned())
            .unwrap_err();
        let ProcessRunError::TimedOut { silent, tail, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(tail, "before\nlooked\n");
        assert!(*silent > Duration::ZERO, "{error}");
    }

    /// The time without output is counted from the call of `HostProcess::wait`. A VM under load may
    /// print nothing for half an hour before the test requests it to stop.
    #[test]
    fn silence_before_wait_does_not_count() {
        let limit = ProcessTimeLimits {
            silent: Duration::from_secs(6),
            still: Duration::from_secs(6),
            overall: LIMIT * 10,
        };
        let mut process = HostProcess::start_here(&HostCommand::new("cat")).unwrap();
        std::thread::sleep(limit.silent + Duration::from_secs(1));
        process.close_stdin().unwrap();
        assert!(process.wait(limit).unwrap().success());
    }

    /// The limit `still` does not kill a process that uses CPU time without printing anything.
    #[test]
    fn silent_busy_process_is_not_killed() {
        let limit = ProcessTimeLimits {
            still: 2 * WATCH_PERIOD + WATCH_PERIOD / 2,
            ..ProcessTimeLimits::from(LIMIT * 10)
        };
        let busy = HostCommand::shell(
            "end=$(($(date +%s) + 16)); while [ $(date +%s) -lt $end ]; do :; done; echo done",
        );
        let still = HostCommand::shell("sleep 1000");
        let [busy, still] = [busy, still].map(|command| HostProcess::start_here(&command).unwrap());
        let error = still.wait(limit).unwrap_err();
        let bound = ExceededTimeLimit::Still(limit.still);
        assert!(
            matches!(&error, ProcessRunError::TimedOut { overrun, .. } if *overrun == bound),
            "{error}"
        );
        assert_eq!(busy.wait(limit).unwrap().stdout_text(), "done\n");
    }

    #[test]
    fn standard_input_reaches_the_process_until_it_is_closed() {
        let mut process = HostProcess::start_here(&HostCommand::new("cat")).unwrap();
        process.write(b"hello").unwrap();
        assert!(process.wait_for("hello", LIMIT));
        process.close_stdin().unwrap();
        assert!(process.write(b"more").is_err());
        assert!(process.wait(LIMIT).unwrap().success());
    }

    #[test]
    fn follow_passes_output_once_in_order() {
        let command = HostCommand::shell("echo one; sleep 0.1; echo two; exit 4");
        let process = HostProcess::start_here(&command).unwrap();
        let mut seen = Vec::new();
        process.follow(LIMIT, |bytes| seen.extend_from_slice(bytes));
        assert_eq!(seen, b"one\ntwo\n");
        let output = process.wait(LIMIT).unwrap();
        assert_eq!(
            (output.stdout_text().as_str(), output.code()),
            ("one\ntwo\n", Some(4))
        );
    }

    #[test]
    fn wait_for_ends_with_process() {
        let process = HostProcess::start_here(&HostCommand::new("true")).unwrap();
        assert!(!process.wait_for("never printed", LIMIT));
    }

    #[test]
    fn missing_program_is_reported_by_name() {
        let error = HostProcess::start_here(&HostCommand::new("/does/not/exist"))
            .err()
            .unwrap();
        assert!(error.to_string().contains("/does/not/exist"), "{error}");
    }
}
