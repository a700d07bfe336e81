//! Keeper process, which starts workers one at a time.
//!
//! The keeper communicates with the VM through one socket and blocks in a read while idle.
#![expect(unsafe_code, reason = "fork(2), and what a process does behind it")]

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::panic::{self, AssertUnwindSafe};
use std::sync::OnceLock;
use std::time::Duration;

use seccompiler::{BpfProgram, SeccompAction, apply_filter};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use super::worker_exit::{MOST_WORDS, PANICKED};
use crate::service::{ServiceProcess, exit_process, exit_with_parent};
use crate::{filter, lists, service};

/// Message to the keeper: start a worker.
pub(super) const START_WORKER: u8 = b'B';
/// Message to the keeper: terminate the worker.
pub(super) const TERMINATE_WORKER: u8 = b'G';
/// Process name of the keeper, as displayed by `ps`.
const KEEPER_NAME: &std::ffi::CStr = c"worker-keeper";
const WORKER_NAME: &std::ffi::CStr = c"kernel-reader";

/// Message from the worker keeper to the VM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeeperMessage {
    /// A worker has been started. The VM's end of the worker's socket is passed with the message.
    StartedWorker,
    /// The worker could not be started. The value is the error number.
    Failed(i32),
    /// The worker has exited with this `wait(2)` status. The message is followed by `text` bytes of
    /// the worker's output.
    WorkerExit { status: i32, text: u16 },
}

impl KeeperMessage {
    pub(super) const BYTES: usize = 8;

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let (letter, number, text) = match self {
            Self::StartedWorker => (b'b', 0, 0),
            Self::Failed(errno) => (b'f', errno, 0),
            Self::WorkerExit { status, text } => (b'e', status, text),
        };
        let mut bytes = [letter; Self::BYTES];
        bytes[2..4].copy_from_slice(&text.to_le_bytes());
        bytes[4..].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    /// Decodes a message from the keeper. The message is trusted, because the keeper never reads
    /// guest data.
    pub(super) fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let [letter, _, text @ .., a, b, c, d] = bytes;
        let (number, text) = (i32::from_le_bytes([a, b, c, d]), u16::from_le_bytes(text));
        match letter {
            b'b' => Self::StartedWorker,
            b'e' => Self::WorkerExit { status: number, text },
            _ => Self::Failed(number),
        }
    }
}

/// Resource limits of a worker.
#[derive(Clone, Copy, Debug)]
pub struct WorkerLimits {
    /// Maximum size of the address space, including the program itself, in bytes.
    pub memory_bytes: u64,
    /// Maximum CPU time of a worker, in seconds.
    pub cpu_seconds: u64,
}

/// Configuration of the keeper.
pub(super) struct KeeperConfig {
    /// Seccomp filters of the keeper.
    pub(super) filters: Vec<BpfProgram>,
    /// Seccomp action for a call that is not on the worker's list, or `None` if workers have no
    /// filter.
    pub(super) otherwise: Option<SeccompAction>,
    pub(super) landlock: bool,
    pub(super) limits: WorkerLimits,
    /// Timeout after which the VM stops waiting for a message from a worker.
    pub(super) timeout: Duration,
    pub(super) give_up: fn() -> bool,
    pub(super) work: fn(UnixStream, u32),
}

/// Starts the keeper, which communicates over `control`.
pub(super) fn start(control: UnixStream, job: KeeperConfig) -> io::Result<()> {
    let service = ServiceProcess {
        name: KEEPER_NAME,
        filters: &job.filters,
        landlock: job.landlock,
        signals: false,
        give_up: job.give_up,
    };
    service.start(control.into(), OomScore::of_this_process, |control, turn| {
        keep(control.into(), turn.as_ref(), &job)
    })
}

/// OOM score adjustment of this process and its children (`oom_score_adj` of proc(5)).
struct OomScore {
    file: File,
    own: String,
}

impl OomScore {
    const FILE: &str = "/proc/self/oom_score_adj";
    /// Score of a process that the OOM killer selects first.
    const FIRST: &str = "1000";

    /// Opens the score adjustment of this process. Returns `None` if the value cannot be read or
    /// written.
    fn of_this_process() -> Option<Self> {
        let open = || File::options().read(true).write(true).open(Self::FILE);
        let opened = open().or_else(|_| {
            // A process that has changed its user owns its files in /proc only while it is
            // dumpable.
            let dumpable = |yes: libc::c_ulong| {
                // SAFETY: the call passes only integers. This process holds no data of a guest or
                // client.
                unsafe { libc::prctl(libc::PR_SET_DUMPABLE, yes) }
            };
            dumpable(1);
            let opened = open();
            dumpable(0);
            opened
        });
        let mut file = opened.ok()?;
        let mut own = String::new();
        file.read_to_string(&mut own).ok()?;
        Some(Self { file, own })
    }

    /// If `first` is `true`, makes this process and its later children the first ones that the OOM
    /// killer selects. Otherwise, restores the original score. Neither change requires privileges.
    fn set(&self, first: bool) {
        let turn = if first { Self::FIRST } else { self.own.trim() };
        // If the write fails, the score is unchanged.
        let _ = (&self.file).write(turn.as_bytes());
    }
}

/// Starts workers on request of the VM, until the VM exits. `turn` controls the OOM score.
fn keep(mut control: UnixStream, turn: Option<&OomScore>, job: &KeeperConfig) -> io::Result<()> {
    let mut number = 0;
    while let Some(word) = read_message(&mut control) {
        if word != START_WORKER {
            continue;
        }
        match begin(&control, turn, job, number) {
            Ok(begun) => {
                number += 1;
                watch(&mut control, begun)?;
            }
            Err(e) => {
                let errno = e.raw_os_error().unwrap_or(libc::EIO);
                control.write_all(&KeeperMessage::Failed(errno).to_bytes())?;
            }
        }
    }
    Ok(())
}

/// Reads one message from the VM. Returns `None` after the VM has exited.
fn read_message(control: &mut UnixStream) -> Option<u8> {
    let mut word = [0];
    control.read_exact(&mut word).ok()?;
    Some(word[0])
}

/// A running worker.
struct StartedWorker {
    pid: libc::pid_t,
    /// Pipe that receives the worker's standard error, from which its last output is read.
    last_words: PipeReader,
    socket: UnixStream,
}

fn begin(
    control: &UnixStream,
    turn: Option<&OomScore>,
    job: &KeeperConfig,
    number: u32,
) -> io::Result<StartedWorker> {
    let (socket, its) = UnixStream::pair()?;
    socket.set_read_timeout(Some(job.timeout))?;
    socket.set_write_timeout(Some(job.timeout))?;
    let (last_words, its_end) = io::pipe()?;
    // When memory is low, the kernel kills workers before the VM, because they hold no persistent
    // state.
    turn.inspect(|turn| turn.set(true));
    // SAFETY: this process has one thread.
    let pid = unsafe { libc::fork() };
    if pid != 0 {
        turn.inspect(|turn| turn.set(false));
    }
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            let not_its = [Some(control.as_raw_fd()), turn.map(|turn| turn.file.as_raw_fd())];
            for fd in not_its.into_iter().flatten() {
                // SAFETY: the descriptor is not used again, because `leave` runs no destructors.
                unsafe { libc::close(fd) };
            }
            drop((socket, last_words));
            be_worker(its, its_end, job, number)
        }
        pid => Ok(StartedWorker {
            pid,
            last_words,
            socket,
        }),
    }
}

/// Reports the start of a worker to the VM, waits until it exits, and reports how it exited.
fn watch(control: &mut UnixStream, begun: StartedWorker) -> io::Result<()> {
    let StartedWorker {
        pid,
        mut last_words,
        socket,
    } = begun;
    let told = control.send_with_fd(&KeeperMessage::StartedWorker.to_bytes()[..], socket.as_raw_fd());
    drop(socket);
    // The VM sees the end of the worker on its socket and then requests the status, or requests the
    // termination of the worker.
    let gone = told.is_err() || read_message(control).is_none();
    // The kill has no effect on a worker that is already exiting.
    let mut status = 0;
    // SAFETY: the process is a child that has not been reaped, so its ID is still valid, and
    // `status` is valid for the duration of the call.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        while libc::waitpid(pid, &mut status, 0) < 0
            && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
    }
    if gone {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut words = [0; MOST_WORDS];
    // The read does not block, because all write ends of the pipe are closed.
    let length = last_words.read(&mut words).unwrap_or(0);
    let text = u16::try_from(length).unwrap_or(0);
    control.write_all(&KeeperMessage::WorkerExit { status, text }.to_bytes())?;
    control.write_all(&words[..text.into()])
}

/// Location and message of a panic in this worker, to be written to its output.
static LAST_WORDS: OnceLock<String> = OnceLock::new();

fn be_worker(socket: UnixStream, mut last_words: PipeWriter, job: &KeeperConfig, number: u32) -> ! {
    exit_with_parent(WORKER_NAME);
    // Capture the runtime's messages when it aborts, especially on memory exhaustion. SAFETY: the
    // call takes descriptors, and the replaced one is an unused copy from the keeper.
    unsafe { libc::dup2(last_words.as_raw_fd(), libc::STDERR_FILENO) };
    panic::set_hook(Box::new(|info| {
        let mut words = String::new();
        if let Some(place) = info.location() {
            let _ = write!(words, "at {place}: ");
        }
        let said = info.payload_as_str().unwrap_or("nothing");
        let _ = write!(words, "{}", said.replace('\n', " "));
        let _ = LAST_WORDS.set(words);
    }));
    // A panic drops the worker's socket before the process exits. The copy ensures that the VM sees
    // the end of the connection only after the process has exited.
    let Ok(held) = socket.try_clone() else {
        exit_process(service::EXIT_UNCONFINED)
    };
    if !apply_limits(&job.limits) || confined(job).is_none() {
        exit_process(service::EXIT_UNCONFINED);
    }
    let done = panic::catch_unwind(AssertUnwindSafe(|| (job.work)(socket, number)));
    if done.is_err() {
        let words = LAST_WORDS.get().map_or(&[][..], |words| words.as_bytes());
        let _ = last_words.write_all(&words[..words.len().min(MOST_WORDS)]);
    }
    std::mem::forget(held);
    exit_process(if done.is_ok() { 0 } else { PANICKED })
}

fn confined(job: &KeeperConfig) -> Option<()> {
    let Some(otherwise) = job.otherwise.clone() else {
        return Some(());
    };
    let list = lists::of_worker(std::process::id());
    apply_filter(&filter::compile(&list, otherwise).ok()?).ok()
}

/// Applies the resource limits to this worker, which can then write no files, open no new
/// descriptors and write no core dump. Returns whether all limits were set.
fn apply_limits(limits: &WorkerLimits) -> bool {
    let limit = |resource, soft: u64, hard: u64| {
        let limit = libc::rlimit {
            rlim_cur: soft,
            rlim_max: hard,
        };
        // SAFETY: the limit outlives the call.
        unsafe { libc::setrlimit(resource, &limit) == 0 }
    };
    let seconds = limits.cpu_seconds;
    limit(libc::RLIMIT_AS, limits.memory_bytes, limits.memory_bytes)
        && limit(libc::RLIMIT_CPU, seconds, seconds + 1)
        && limit(libc::RLIMIT_CORE, 0, 0)
        && limit(libc::RLIMIT_FSIZE, 0, 0)
        && limit(libc::RLIMIT_NOFILE, 0, 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeper_messages_round_trip() {
        for said in [
            KeeperMessage::StartedWorker,
            KeeperMessage::Failed(libc::EAGAIN),
            KeeperMessage::WorkerExit { status: 0, text: 0 },
            KeeperMessage::WorkerExit {
                status: -1,
                text: 300,
            },
        ] {
            assert_eq!(KeeperMessage::from_bytes(said.to_bytes()), said);
        }
    }
}
