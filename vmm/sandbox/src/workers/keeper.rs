//! The keeper of workers: a process that starts one after the other.
//!
//! It speaks to the VM by one socket, and sleeps in a read of it for as long as there is nothing to do.
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

use super::ended::{MOST_WORDS, PANICKED};
use crate::service::{ServiceProcess, ends_with_its_parent, leave};
use crate::{filter, lists, service};

/// To the keeper: a worker is wanted.
pub(super) const BEGIN: u8 = b'B';
/// To the keeper: the worker has to end now.
pub(super) const GIVE_UP: u8 = b'G';
/// As the processes are called, in `ps`.
const KEEPER_NAME: &std::ffi::CStr = c"worker-keeper";
const WORKER_NAME: &std::ffi::CStr = c"kernel-reader";

/// What the keeper says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Said {
    /// There is a worker; its socket comes along.
    Begun,
    /// There is none, for this error.
    Failed(i32),
    /// The worker has ended, with this status of `wait(2)`; so many bytes of text follow.
    Ended { status: i32, text: u16 },
}

impl Said {
    pub(super) const BYTES: usize = 8;

    fn to_bytes(self) -> [u8; Self::BYTES] {
        let (letter, number, text) = match self {
            Self::Begun => (b'b', 0, 0),
            Self::Failed(errno) => (b'f', errno, 0),
            Self::Ended { status, text } => (b'e', status, text),
        };
        let mut bytes = [letter; Self::BYTES];
        bytes[2..4].copy_from_slice(&text.to_le_bytes());
        bytes[4..].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    /// The keeper is believed: it reads nothing of a guest's.
    pub(super) fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        let [letter, _, text @ .., a, b, c, d] = bytes;
        let (number, text) = (i32::from_le_bytes([a, b, c, d]), u16::from_le_bytes(text));
        match letter {
            b'b' => Self::Begun,
            b'e' => Self::Ended { status: number, text },
            _ => Self::Failed(number),
        }
    }
}

/// What one worker may take.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Address space, bytes, with the program itself.
    pub memory_bytes: u64,
    /// Time of a processor, seconds.
    pub cpu_seconds: u64,
}

/// What the keeper does.
pub(super) struct Job {
    /// The keeper's filters.
    pub(super) filters: Vec<BpfProgram>,
    /// What is done with a call of a worker that is not on its list; `None`: it has no list.
    pub(super) otherwise: Option<SeccompAction>,
    pub(super) landlock: bool,
    pub(super) limits: Limits,
    /// How long the VM waits for a message of a worker.
    pub(super) patience: Duration,
    pub(super) give_up: fn() -> bool,
    pub(super) work: fn(UnixStream, u32),
}

/// Starts the keeper, which speaks by `control`.
pub(super) fn start(control: UnixStream, job: Job) -> io::Result<()> {
    let service = ServiceProcess {
        name: KEEPER_NAME,
        filters: &job.filters,
        landlock: job.landlock,
        signals: false,
        give_up: job.give_up,
    };
    service.start(control.into(), OomTurn::of_this_process, |control, turn| {
        keep(control.into(), turn.as_ref(), &job)
    })
}

/// When this process, and those it starts, are ended for want of memory on the host (`oom_score_adj` of
/// proc(5)).
struct OomTurn {
    file: File,
    own: String,
}

impl OomTurn {
    const FILE: &str = "/proc/self/oom_score_adj";
    /// Before all others.
    const FIRST: &str = "1000";

    /// `None`: the kernel does not tell, or lets nobody say.
    fn of_this_process() -> Option<Self> {
        let open = || File::options().read(true).write(true).open(Self::FILE);
        let opened = open().or_else(|_| {
            // Who has changed its user is not the owner of its own files in /proc.
            let dumpable = |yes: libc::c_ulong| {
                // SAFETY: the call takes numbers. This process has nothing of a guest's or of a client's.
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

    /// This process, and who is started from now on, is ended first, or when it would have been: no right is
    /// needed for either.
    fn set(&self, first: bool) {
        let turn = if first { Self::FIRST } else { self.own.trim() };
        // As it was, if not.
        let _ = (&self.file).write(turn.as_bytes());
    }
}

/// Starts workers until the VM is gone.
fn keep(mut control: UnixStream, turn: Option<&OomTurn>, job: &Job) -> io::Result<()> {
    let mut number = 0;
    while let Some(word) = heard(&mut control) {
        if word != BEGIN {
            continue;
        }
        match begin(&control, turn, job, number) {
            Ok(begun) => {
                number += 1;
                watch(&mut control, begun)?;
            }
            Err(e) => {
                let errno = e.raw_os_error().unwrap_or(libc::EIO);
                control.write_all(&Said::Failed(errno).to_bytes())?;
            }
        }
    }
    Ok(())
}

/// One word of the VM's; `None`: it is gone.
fn heard(control: &mut UnixStream) -> Option<u8> {
    let mut word = [0];
    control.read_exact(&mut word).ok()?;
    Some(word[0])
}

/// A worker that runs.
struct Begun {
    pid: libc::pid_t,
    /// Its last words come by this.
    last_words: PipeReader,
    socket: UnixStream,
}

fn begin(control: &UnixStream, turn: Option<&OomTurn>, job: &Job, number: u32) -> io::Result<Begun> {
    let (socket, its) = UnixStream::pair()?;
    socket.set_read_timeout(Some(job.patience))?;
    socket.set_write_timeout(Some(job.patience))?;
    let (last_words, its_end) = io::pipe()?;
    // What a worker has is its own, so it ends before the VM.
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
                // SAFETY: the descriptor is not used any more: `leave` runs no destructors.
                unsafe { libc::close(fd) };
            }
            drop((socket, last_words));
            be_worker(its, its_end, job, number)
        }
        pid => Ok(Begun {
            pid,
            last_words,
            socket,
        }),
    }
}

/// Tells the VM of a worker, and of its end.
fn watch(control: &mut UnixStream, begun: Begun) -> io::Result<()> {
    let Begun {
        pid,
        mut last_words,
        socket,
    } = begun;
    let told = control.send_with_fd(&Said::Begun.to_bytes()[..], socket.as_raw_fd());
    drop(socket);
    // The VM hears by the socket when the worker has ended, and says so, or that it is not wanted any more.
    let gone = told.is_err() || heard(control).is_none();
    // One that is ending ends as it would.
    let mut status = 0;
    // SAFETY: the process is a child that nobody has waited for, so the number is still its own; `status` is
    // a valid place for the length of the call.
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
    // All other ends of the pipe are closed.
    let length = last_words.read(&mut words).unwrap_or(0);
    let text = u16::try_from(length).unwrap_or(0);
    control.write_all(&Said::Ended { status, text }.to_bytes())?;
    control.write_all(&words[..text.into()])
}

/// Where a panic was, and what it said.
static LAST_WORDS: OnceLock<String> = OnceLock::new();

fn be_worker(socket: UnixStream, mut last_words: PipeWriter, job: &Job, number: u32) -> ! {
    ends_with_its_parent(WORKER_NAME);
    // What the runtime says when it gives up, for want of memory above all.
    // SAFETY: the call takes descriptors; what was there is of the keeper, and leads nowhere.
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
    // The VM is to see its end no sooner than it has ended: a panic drops what it has.
    let Ok(held) = socket.try_clone() else {
        leave(service::UNFIT)
    };
    if !limited(&job.limits) || confined(job).is_none() {
        leave(service::UNFIT);
    }
    let done = panic::catch_unwind(AssertUnwindSafe(|| (job.work)(socket, number)));
    if done.is_err() {
        let words = LAST_WORDS.get().map_or(&[][..], |words| words.as_bytes());
        let _ = last_words.write_all(&words[..words.len().min(MOST_WORDS)]);
    }
    std::mem::forget(held);
    leave(if done.is_ok() { 0 } else { PANICKED })
}

fn confined(job: &Job) -> Option<()> {
    let Some(otherwise) = job.otherwise.clone() else {
        return Some(());
    };
    let list = lists::of_worker(std::process::id());
    apply_filter(&filter::compile(&list, otherwise).ok()?).ok()
}

/// Takes on limits. No file is written, no descriptor opened, no core left.
fn limited(limits: &Limits) -> bool {
    let limit = |resource, soft: u64, hard: u64| {
        let limit = libc::rlimit {
            rlim_cur: soft,
            rlim_max: hard,
        };
        // SAFETY: the limit lives for the length of the call.
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
    fn what_is_said_is_heard() {
        for said in [
            Said::Begun,
            Said::Failed(libc::EAGAIN),
            Said::Ended { status: 0, text: 0 },
            Said::Ended {
                status: -1,
                text: 300,
            },
        ] {
            assert_eq!(Said::from_bytes(said.to_bytes()), said);
        }
    }
}
