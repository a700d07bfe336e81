//! Processes here and in the lab, behind one handle.

use std::io::{self, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{ChildStdin, Stdio};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use lab_agent::cpu_time::{WATCH_PERIOD, cpu_ticks_of_group};
use lab_agent::ordered::OutputStream;
use lab_agent::wire::Ended;

use crate::limit::{Limit, Overrun};

/// Why a process could not be run to its end.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    /// It could not be started.
    #[error("cannot start {command}: {message}")]
    Start {
        /// The command line.
        command: String,
        /// What the system said.
        message: String,
    },
    /// It took longer than allowed, or did nothing any more, and was killed.
    #[error("{command}: {overrun}; last output, {silent:.0?} before:\n{tail}")]
    TimedOut {
        /// The command line.
        command: String,
        /// The bound it passed.
        overrun: Overrun,
        /// For how long it had printed nothing: all the time tells a hang from slowness.
        silent: Duration,
        /// The end of what it printed.
        tail: String,
    },
    /// The lab went away while it ran.
    #[error("{command}: the lab host is gone: {message}")]
    LabGone {
        /// The command line.
        command: String,
        /// What became of the lab.
        message: String,
    },
    /// It could not be written to.
    #[error("cannot write to {command}")]
    Stdin {
        /// The command line.
        command: String,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// A program with its arguments and what to add to its environment.
#[derive(Debug, Clone)]
pub struct Command {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Variables added to the environment.
    pub env: Vec<(String, String)>,
}

impl Command {
    /// A program, so far without arguments.
    pub fn new(program: impl Into<String>) -> Self {
        Self {
            argv: vec![program.into()],
            env: Vec::new(),
        }
    }

    /// A shell command line.
    pub fn shell(line: impl Into<String>) -> Self {
        Self::new("sh").arg("-c").arg(line)
    }

    /// Adds an argument.
    pub fn arg(mut self, argument: impl Into<String>) -> Self {
        self.argv.push(argument.into());
        self
    }

    /// Adds arguments.
    pub fn args<T: Into<String>>(mut self, arguments: impl IntoIterator<Item = T>) -> Self {
        self.argv.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Sets a variable of the environment.
    pub fn env(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// The command line for messages.
    pub fn line(&self) -> String {
        self.argv.join(" ")
    }
}

/// What a process printed and how it ended.
#[derive(Debug, Clone)]
pub struct Output {
    /// Standard output.
    pub stdout: Vec<u8>,
    /// Standard error.
    pub stderr: Vec<u8>,
    /// Exit status, or the signal that killed it.
    pub ended: Ended,
    /// From start to end, as seen from here.
    pub elapsed: Duration,
}

impl Output {
    /// Exit status; `None` if a signal killed it.
    pub fn code(&self) -> Option<i32> {
        self.ended.code
    }

    /// Whether it ended with status 0.
    pub fn success(&self) -> bool {
        self.ended.code == Some(0)
    }

    /// Standard output as text, carriage returns removed.
    pub fn stdout_text(&self) -> String {
        text(&self.stdout)
    }

    /// Standard error as text, carriage returns removed.
    pub fn stderr_text(&self) -> String {
        text(&self.stderr)
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).replace('\r', "")
}

/// A function that takes the output of a process as it comes, instead of its being kept. It may
/// block: then the process waits as well, once the buffers between them are full.
pub type OutputSink = Box<dyn Fn(OutputStream, &[u8]) + Send + Sync>;

/// What is known of a process so far; shared between its handle and the threads that feed it.
#[derive(Default)]
pub(crate) struct Progress {
    state: Mutex<State>,
    changed: Condvar,
    sink: Option<OutputSink>,
}

#[derive(Default)]
struct State {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    /// When the last of it came.
    heard: Option<Instant>,
    /// What CPU time was last known to be used, and when that had changed.
    ticks: u64,
    worked: Option<Instant>,
    end: Option<End>,
}

#[derive(Clone)]
enum End {
    Exited(Ended),
    NotStarted(String),
    LabGone(String),
}

impl Progress {
    /// The progress of a process whose output goes to `sink`.
    pub(crate) fn with_sink(sink: OutputSink) -> Self {
        Self {
            sink: Some(sink),
            ..Self::default()
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes output of the process.
    pub(crate) fn output(&self, stream: OutputStream, bytes: &[u8]) {
        // Not under the lock: the sink may be slow.
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

    pub(crate) fn exited(&self, ended: Ended) {
        self.lock().end.get_or_insert(End::Exited(ended));
        self.changed.notify_all();
    }

    pub(crate) fn not_started(&self, message: String) {
        self.lock().end.get_or_insert(End::NotStarted(message));
        self.changed.notify_all();
    }

    pub(crate) fn lab_gone(&self, message: String) {
        self.lock().end.get_or_insert(End::LabGone(message));
        self.changed.notify_all();
    }

    /// So much CPU time has been used.
    pub(crate) fn used(&self, ticks: u64) {
        let mut state = self.lock();
        if state.ticks != ticks {
            state.ticks = ticks;
            state.worked = Some(Instant::now());
        }
    }

    /// Waits until `done` says so; if a bound is passed before, counted from `start`, says which. A silence
    /// before this call is none: nobody waited for a word.
    fn wait_until(
        &self,
        start: Instant,
        limit: Limit,
        mut done: impl FnMut(&State) -> bool,
    ) -> Result<(), Overrun> {
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
                .wait_timeout(state, limit.left(all, silent, still))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }

    /// Watches the CPU time of a process group of this machine until it has ended.
    fn watch(&self, group: i32) {
        while self
            .wait_until(Instant::now(), WATCH_PERIOD.into(), |state| state.end.is_some())
            .is_err()
        {
            self.used(cpu_ticks_of_group(group));
        }
    }
}

/// How to reach a process: it is here or in the lab.
pub(crate) trait Control: Send {
    /// Writes to its standard input; an empty slice closes it.
    fn stdin(&mut self, bytes: &[u8]) -> io::Result<()>;
    /// Sends a signal to it and its children.
    fn signal(&mut self, number: i32);
}

/// A running process. Dropping the handle kills it.
pub struct Process {
    command: String,
    started: Instant,
    progress: Arc<Progress>,
    control: Box<dyn Control>,
}

impl Process {
    pub(crate) fn new(command: &Command, progress: Arc<Progress>, control: Box<dyn Control>) -> Self {
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
    /// When the program does not exist or cannot be executed.
    pub fn start_here(command: &Command) -> Result<Self, ProcessError> {
        let start_error = |message: String| ProcessError::Start {
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
        let progress = Arc::new(Progress::default());
        let pid = i32::try_from(child.id()).unwrap_or(0);
        let control = Here {
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
                Ok(status) => Ended {
                    code: status.code(),
                    signal: status.signal(),
                },
                Err(_) => Ended {
                    code: None,
                    signal: None,
                },
            });
        });
        Ok(Self::new(command, progress, Box::new(control)))
    }

    /// Waits until the process has ended; kills it when it passes one of the bounds of `limit`, which begin
    /// with its start.
    ///
    /// # Errors
    /// When it could not be started, took too long, or the lab went away.
    pub fn wait(self, limit: impl Into<Limit>) -> Result<Output, ProcessError> {
        self.wait_or_look(limit, String::new)
    }

    /// As [`Process::wait`]. What `look` says of a process that took too long, before it is killed, is told
    /// with its last output.
    ///
    /// # Errors
    /// Those of [`Process::wait`].
    pub fn wait_or_look(
        mut self,
        limit: impl Into<Limit>,
        look: impl FnOnce() -> String,
    ) -> Result<Output, ProcessError> {
        let ended = |state: &State| state.end.is_some();
        if let Err(overrun) = self.progress.wait_until(self.started, limit.into(), ended) {
            let error = self.timed_out(overrun, look);
            self.control.signal(libc::SIGKILL);
            return Err(error);
        }
        let mut state = self.progress.lock();
        let command = self.command.clone();
        match state.end.clone() {
            Some(End::Exited(ended)) => Ok(Output {
                stdout: std::mem::take(&mut state.stdout),
                stderr: std::mem::take(&mut state.stderr),
                ended,
                elapsed: self.started.elapsed(),
            }),
            Some(End::NotStarted(message)) => Err(ProcessError::Start { command, message }),
            Some(End::LabGone(message)) => Err(ProcessError::LabGone { command, message }),
            None => unreachable!("wait_until saw an end"),
        }
    }

    /// Waits until standard output contains `text`, within the bounds of `limit` from now on. Returns
    /// whether it does; false also when the process ended without printing it.
    pub fn wait_for(&self, text: &str, limit: impl Into<Limit>) -> bool {
        self.wait_for_in(|state| &state.stdout, text, limit.into())
    }

    /// As [`Process::wait_for`], on standard error.
    pub fn wait_for_message(&self, text: &str, limit: impl Into<Limit>) -> bool {
        self.wait_for_in(|state| &state.stderr, text, limit.into())
    }

    fn wait_for_in(&self, stream: impl Fn(&State) -> &Vec<u8>, text: &str, limit: Limit) -> bool {
        let contains = |state: &State| {
            stream(state)
                .windows(text.len())
                .any(|window| window == text.as_bytes())
        };
        let done = |state: &State| contains(state) || state.end.is_some();
        self.progress.wait_until(Instant::now(), limit, done).is_ok() && contains(&self.progress.lock())
    }

    /// Passes what it prints on standard output to `sink` as it comes, until it has ended or
    /// it has passed a bound of `limit`. Call [`Process::wait`] afterwards.
    pub fn follow(&self, limit: impl Into<Limit>, mut sink: impl FnMut(&[u8])) {
        let mut seen = 0;
        let limit = limit.into();
        loop {
            let mut fresh = Vec::new();
            let result = self.progress.wait_until(self.started, limit, |state| {
                fresh.extend_from_slice(&state.stdout[seen..]);
                seen = state.stdout.len();
                !fresh.is_empty() || state.end.is_some()
            });
            // Not under the lock: the sink may be slow.
            sink(&fresh);
            if result.is_err() || fresh.is_empty() {
                return;
            }
        }
    }

    /// What it has printed on standard output so far.
    pub fn stdout_so_far(&self) -> String {
        text(&self.progress.lock().stdout)
    }

    /// Writes to its standard input.
    ///
    /// # Errors
    /// When it no longer reads.
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), ProcessError> {
        self.send(bytes)
    }

    /// Closes its standard input.
    ///
    /// # Errors
    /// When the lab is gone.
    pub fn close_stdin(&mut self) -> Result<(), ProcessError> {
        self.send(&[])
    }

    /// Sends a signal, such as `libc::SIGTERM`, to it and its children.
    pub fn signal(&mut self, number: i32) {
        self.control.signal(number);
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), ProcessError> {
        self.control.stdin(bytes).map_err(|source| ProcessError::Stdin {
            command: self.command.clone(),
            source,
        })
    }

    fn timed_out(&self, overrun: Overrun, look: impl FnOnce() -> String) -> ProcessError {
        let (silent, mut tail) = {
            let state = self.progress.lock();
            let mut tail = last_lines(&text(&state.stdout), 30);
            tail.push_str(&last_lines(&text(&state.stderr), 10));
            (state.heard.unwrap_or(self.started).elapsed(), tail)
        };
        // Not under the lock: more of its output may come meanwhile.
        tail.push_str(&look());
        ProcessError::TimedOut {
            command: self.command.clone(),
            overrun,
            silent,
            tail,
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if self.progress.lock().end.is_none() {
            self.control.signal(libc::SIGKILL);
        }
    }
}

/// The last `count` lines of `text`.
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

/// A process on this machine.
struct Here {
    pid: i32,
    stdin: Option<ChildStdin>,
}

impl Control for Here {
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
            // SAFETY: kill(2) takes two integers and touches no memory of ours.
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
        let command = Command::shell("echo out; echo err >&2; exit 3");
        let output = Process::start_here(&command).unwrap().wait(LIMIT).unwrap();
        assert_eq!(output.stdout_text(), "out\n");
        assert_eq!(output.stderr_text(), "err\n");
        assert_eq!(output.code(), Some(3));
    }

    #[test]
    fn a_process_that_hangs_is_killed_with_its_children_and_its_last_words_are_told() {
        let command = Command::shell("echo before; sleep 1000 & sleep 1000");
        let process = Process::start_here(&command).unwrap();
        assert!(process.wait_for("before", LIMIT));
        let error = process
            .wait_or_look(Duration::from_millis(300), || "looked\n".to_owned())
            .unwrap_err();
        let ProcessError::TimedOut { silent, tail, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(tail, "before\nlooked\n");
        assert!(*silent > Duration::ZERO, "{error}");
    }

    /// A VM that runs a load says nothing for half an hour, and then it is told to end.
    #[test]
    fn a_silence_from_before_the_wait_is_no_hang() {
        let limit = Limit {
            silent: Duration::from_secs(6),
            still: Duration::from_secs(6),
            overall: LIMIT * 10,
        };
        let mut process = Process::start_here(&Command::new("cat")).unwrap();
        std::thread::sleep(limit.silent + Duration::from_secs(1));
        process.close_stdin().unwrap();
        assert!(process.wait(limit).unwrap().success());
    }

    /// The bound on stillness is what tells a hang from slowness: it must not end what works in silence.
    #[test]
    fn a_process_that_works_in_silence_is_not_taken_for_one_that_hangs() {
        let limit = Limit {
            still: 2 * WATCH_PERIOD + WATCH_PERIOD / 2,
            ..Limit::from(LIMIT * 10)
        };
        let busy = Command::shell(
            "end=$(($(date +%s) + 16)); while [ $(date +%s) -lt $end ]; do :; done; echo done",
        );
        let still = Command::shell("sleep 1000");
        let [busy, still] = [busy, still].map(|command| Process::start_here(&command).unwrap());
        let error = still.wait(limit).unwrap_err();
        let bound = Overrun::Still(limit.still);
        assert!(
            matches!(&error, ProcessError::TimedOut { overrun, .. } if *overrun == bound),
            "{error}"
        );
        assert_eq!(busy.wait(limit).unwrap().stdout_text(), "done\n");
    }

    #[test]
    fn standard_input_reaches_the_process_until_it_is_closed() {
        let mut process = Process::start_here(&Command::new("cat")).unwrap();
        process.write(b"hello").unwrap();
        assert!(process.wait_for("hello", LIMIT));
        process.close_stdin().unwrap();
        assert!(process.write(b"more").is_err());
        assert!(process.wait(LIMIT).unwrap().success());
    }

    #[test]
    fn following_sees_everything_once_and_in_order() {
        let command = Command::shell("echo one; sleep 0.1; echo two; exit 4");
        let process = Process::start_here(&command).unwrap();
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
    fn waiting_for_text_ends_when_the_process_does() {
        let process = Process::start_here(&Command::new("true")).unwrap();
        assert!(!process.wait_for("never printed", LIMIT));
    }

    #[test]
    fn a_program_that_does_not_exist_is_named() {
        let error = Process::start_here(&Command::new("/does/not/exist"))
            .err()
            .unwrap();
        assert!(error.to_string().contains("/does/not/exist"), "{error}");
    }
}
