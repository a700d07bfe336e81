//! A VM in a child process: its console, control socket and threads.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::procfs::{ThreadAccounting, vcpu_threads};
use crate::host::StopRequestedCheck;
use control_api::client::{Client, ClientError};
use control_api::protocol::{SnapshotId, VcpuView, VmGuestCounters};
use control_api::request;
use perf_core::SharePolicy;

/// Maximum length of a console line in bytes. Longer lines are split.
const MAX_LINE: u64 = 64 << 10;
/// Maximum number of queued console lines.
const MAX_LINES: usize = 4096;
/// Maximum number of kept VMM messages.
const MAX_MESSAGES: usize = 50;
/// Maximum number of kept console lines for an error message.
const MAX_LAST_LINES: usize = 12;
/// Maximum length of each kept console line in characters.
const MAX_SHOWN: usize = 200;
/// Timeout for the control socket to appear.
const SOCKET_TIMEOUT: Duration = Duration::from_secs(20);
/// Timeout for the vCPUs to report their counters.
const VIEW_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval between checks for Ctrl-C.
const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Timeout for the VM to exit after its guest has ended.
const END_TIMEOUT: Duration = Duration::from_secs(20);

/// Sharing policies. Each guest is measured under all of them.
pub(crate) const SHARE_POLICIES: [SharePolicy; 3] = [
    SharePolicy::GuestFirst,
    SharePolicy::OperatorFirst,
    SharePolicy::Strict,
];

/// Error returned when a VM cannot be measured.
#[derive(Debug, thiserror::Error)]
pub enum VmMeasurementError {
    /// Starting the VM or writing to it failed.
    #[error("{0}")]
    Io(&'static str, #[source] std::io::Error),
    /// A request on the control socket failed.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The VM exited unexpectedly.
    #[error("the VM exited while {doing} (status {status}){}{}", last_message_suffix(.messages), console_excerpt(.console))]
    Ended {
        /// Exit status of the VM's process, or -1 if a signal terminated it.
        status: i32,
        /// Operation that was in progress.
        doing: String,
        /// Last messages of the VMM.
        messages: Vec<String>,
        /// Last lines of the guest's console output.
        console: Vec<String>,
    },
    /// A timeout expired. The values are the timeout in seconds, and the operation.
    #[error("no output of the guest for {0} s while {1}")]
    Silent(u64, String),
    /// The user interrupted the program with Ctrl-C or another signal.
    #[error("interrupted")]
    Interrupted,
    /// Reading the operator's ring failed.
    #[error("the ring of vCPU 0")]
    Ring(#[source] perf_core::ring::RingReadError),
    /// The guest or the VM sent an unexpected reply.
    #[error("cannot parse the guest's reply: {0}")]
    Answer(String),
}

fn last_message_suffix(messages: &[String]) -> String {
    let text = |line: &String| {
        let line = line.trim_start_matches("perfvisor: ");
        format!(": {}", line.trim_start_matches("error: "))
    };
    messages.last().map(text).unwrap_or_default()
}

fn console_excerpt(console: &[String]) -> String {
    if console.is_empty() {
        return String::new();
    }
    format!("\nthe guest's last lines:\n  {}", console.join("\n  "))
}

/// A running VM. Dropping it kills the process.
pub struct ChildVm {
    child: Child,
    stdin: ChildStdin,
    lines: Receiver<String>,
    last_lines: VecDeque<String>,
    messages: Arc<Mutex<VecDeque<String>>>,
    name: String,
    client: Option<Client>,
    threads: Vec<u32>,
    signals: StopRequestedCheck,
}

impl ChildVm {
    /// Starts `perfvisor run` with `arguments` and a unique VM name.
    ///
    /// # Errors
    /// Returns [`VmMeasurementError::Io`] if the program cannot be started.
    pub fn start(arguments: &[String], signals: &StopRequestedCheck) -> Result<Self, VmMeasurementError> {
        let program = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("/proc/self/exe"));
        Self::start_with(Command::new(program), arguments, signals)
    }

    /// Starts another program with the arguments of `perfvisor run`.
    fn start_with(
        mut program: Command,
        arguments: &[String],
        signals: &StopRequestedCheck,
    ) -> Result<Self, VmMeasurementError> {
        static STARTED: AtomicU32 = AtomicU32::new(0);
        let nth = STARTED.fetch_add(1, Ordering::Relaxed);
        let name = format!("validate-{}-{nth}", std::process::id());
        log::debug!("starting perfvisor run {}", arguments.join(" "));
        let mut child = program
            .args(["run", "--name", &name])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|e| VmMeasurementError::Io("starting perfvisor run", e))?;
        let missing =
            || VmMeasurementError::Io("starting perfvisor run", std::io::ErrorKind::BrokenPipe.into());
        let stdin = child.stdin.take().ok_or_else(missing)?;
        let stdout = child.stdout.take().ok_or_else(missing)?;
        let stderr = child.stderr.take().ok_or_else(missing)?;
        let (sender, lines) = sync_channel(MAX_LINES);
        let messages = Arc::new(Mutex::new(VecDeque::new()));
        let kept = messages.clone();
        let spawn = |name: &str, work: Box<dyn FnOnce() + Send>| {
            thread::Builder::new()
                .name(name.into())
                .spawn(work)
                .map_err(|e| VmMeasurementError::Io("starting a thread", e))
        };
        let mut vm = Self {
            child,
            stdin,
            lines,
            last_lines: VecDeque::new(),
            messages,
            name,
            client: None,
            threads: Vec::new(),
            signals: signals.clone(),
        };
        let started = spawn("console", Box::new(move || read_lines(stdout, &sender)))
            .and_then(|_| spawn("messages", Box::new(move || keep_messages(stderr, &kept))));
        if let Err(e) = started {
            vm.kill();
            return Err(e);
        }
        Ok(vm)
    }

    /// Reads console lines until `wanted` returns a value.
    ///
    /// # Errors
    /// Returns [`VmMeasurementError::Ended`] if the VM exits and [`VmMeasurementError::Silent`]
    /// after the time limit.
    pub fn wait_for<T>(
        &mut self,
        limit: Duration,
        what: &str,
        mut wanted: impl FnMut(&str) -> Option<T>,
    ) -> Result<T, VmMeasurementError> {
        let until = Instant::now() + limit;
        loop {
            if (self.signals)() {
                return Err(VmMeasurementError::Interrupted);
            }
            let left = until.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left.min(SIGNAL_CHECK_INTERVAL)) {
                Ok(line) => {
                    log::trace!("{}: {line}", self.name);
                    if self.last_lines.len() == MAX_LAST_LINES {
                        self.last_lines.pop_front();
                    }
                    self.last_lines.push_back(line.chars().take(MAX_SHOWN).collect());
                    if let Some(found) = wanted(&line) {
                        return Ok(found);
                    }
                }
                Err(RecvTimeoutError::Timeout) if left > SIGNAL_CHECK_INTERVAL => {}
                Err(RecvTimeoutError::Timeout) => {
                    return Err(VmMeasurementError::Silent(limit.as_secs(), what.to_owned()));
                }
                Err(RecvTimeoutError::Disconnected) => return Err(self.ended(what)),
            }
        }
    }

    /// Returns the error for a VM whose console is closed.
    fn ended(&mut self, doing: &str) -> VmMeasurementError {
        let status = self.wait(END_TIMEOUT).unwrap_or(-1);
        // Ctrl-C is sent to the VM too, which may exit before this process handles the signal.
        if (self.signals)() {
            return VmMeasurementError::Interrupted;
        }
        let messages = self.messages.lock().unwrap_or_else(PoisonError::into_inner);
        VmMeasurementError::Ended {
            status,
            doing: doing.to_owned(),
            messages: messages.iter().cloned().collect(),
            console: self.last_lines.iter().cloned().collect(),
        }
    }

    /// Instructs the guest to end, and waits until the VM has exited with status 0.
    ///
    /// # Errors
    /// Returns [`VmMeasurementError::Ended`] for any other status.
    pub fn end(mut self, limit: Duration) -> Result<(), VmMeasurementError> {
        let doing = "it was told to end";
        self.type_line("end")?;
        match self.wait(limit) {
            Some(0) => Ok(()),
            Some(_) => Err(self.ended(doing)),
            None => Err(VmMeasurementError::Silent(limit.as_secs(), doing.into())),
        }
    }

    /// Types a line on the guest's console.
    ///
    /// # Errors
    /// Returns [`VmMeasurementError::Ended`] if the VM has exited and [`VmMeasurementError::Io`] if
    /// the write fails.
    pub fn type_line(&mut self, line: &str) -> Result<(), VmMeasurementError> {
        let sent = self
            .stdin
            .write_all(format!("{line}\n").as_bytes())
            .and_then(|()| self.stdin.flush());
        match sent {
            Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Err(self.ended("it was typed to")),
            other => other.map_err(|e| VmMeasurementError::Io("writing to the guest's console", e)),
        }
    }

    /// Returns the connection to the VM's control socket, and connects at first use.
    ///
    /// # Errors
    /// Returns [`VmMeasurementError::Client`] if the connection fails.
    pub fn client(&mut self) -> Result<&mut Client, VmMeasurementError> {
        if self.client.is_none() {
            self.client = Some(self.connect()?);
        }
        match &mut self.client {
            Some(client) => Ok(client),
            None => unreachable!("it was just made"),
        }
    }

    /// Sets the sharing policy of the VM.
    ///
    /// # Errors
    /// Returns [`VmMeasurementError::Client`] if the request fails.
    pub fn share(&mut self, policy: SharePolicy) -> Result<(), VmMeasurementError> {
        Ok(self.client()?.call(request::Share { policy })?)
    }

    /// Opens another connection to the VM's control socket.
    ///
    /// # Errors
    /// Returns [`VmMeasurementError::Client`] if the connection fails.
    pub fn connect(&mut self) -> Result<Client, VmMeasurementError> {
        let until = Instant::now() + SOCKET_TIMEOUT;
        loop {
            match Client::connect(Some(&self.name)) {
                Err(ClientError::NoSuchVm { .. }) if Instant::now() < until => {
                    thread::sleep(Duration::from_millis(5));
                }
                other => return Ok(other?),
            }
        }
    }

    /// Returns the host kernel's accounting data for each vCPU thread.
    ///
    /// # Errors
    /// Returns [`VmMeasurementError::Io`] if the kernel does not provide the data.
    pub fn facts(&mut self) -> Result<Vec<ThreadAccounting>, VmMeasurementError> {
        let pid = self.child.id();
        if self.threads.is_empty() {
            self.threads = vcpu_threads(pid);
        }
        let unknown = || {
            let e = std::io::Error::other("no schedstat of the vCPU's thread");
            VmMeasurementError::Io("reading /proc", e)
        };
        self.threads
            .iter()
            .map(|tid| ThreadAccounting::read(pid, *tid).ok_or_else(unknown))
            .collect()
    }

    /// Returns the host's view of the guest's counters, ordered by vCPU.
    ///
    /// # Errors
    /// Returns a [`VmMeasurementError`] if the request fails or is not completed in time.
    pub fn views(&mut self) -> Result<Vec<VcpuView>, VmMeasurementError> {
        let until = Instant::now() + VIEW_TIMEOUT;
        let client = self.client()?;
        let asked: SnapshotId = client.call(request::GuestView)?;
        loop {
            let mut seen: VmGuestCounters = client.call(request::GuestViewResult {
                generation: asked.generation,
            })?;
            if seen.complete {
                seen.vcpus.sort_by_key(|view| view.vcpu);
                return Ok(seen.vcpus);
            }
            if Instant::now() > until {
                let what = "its vCPUs were asked for their counters".to_owned();
                return Err(VmMeasurementError::Silent(VIEW_TIMEOUT.as_secs(), what));
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits for the VM to exit and returns its exit status, or -1 if a signal terminated it.
    /// Returns `None` if the VM is still running after `limit`.
    pub fn wait(&mut self, limit: Duration) -> Option<i32> {
        let until = Instant::now() + limit;
        loop {
            match self.child.try_wait() {
                Ok(Some(status)) => return Some(status.code().unwrap_or(-1)),
                Ok(None) if Instant::now() < until => thread::sleep(Duration::from_millis(5)),
                _ => return None,
            }
        }
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for ChildVm {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Passes the lines of `stream` to `take` until the stream ends or `take` returns `false`. Splits
/// long lines.
fn split_lines(stream: impl Read, mut take: impl FnMut(String) -> bool) {
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    while let Ok(1..) = (&mut reader).take(MAX_LINE).read_until(b'\n', &mut line) {
        if !take(String::from_utf8_lossy(&line).trim_end().to_owned()) {
            return;
        }
        line.clear();
    }
}

/// Forwards the guest's lines until the console closes or the receiver is dropped.
fn read_lines(stream: impl Read, sender: &SyncSender<String>) {
    split_lines(stream, |line| sender.send(line).is_ok());
}

fn keep_messages(stream: impl Read, kept: &Mutex<VecDeque<String>>) {
    split_lines(stream, |text| {
        log::debug!("the VM says: {text}");
        let mut kept = kept.lock().unwrap_or_else(PoisonError::into_inner);
        kept.push_back(text);
        if kept.len() > MAX_MESSAGES {
            kept.pop_front();
        }
        true
    });
}

#[cfg(test)]
pub(crate) mod tests;
