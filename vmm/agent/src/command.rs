//! One command: its streams, its signals, its end.
//!
//! One thread reads what the host sends. Another moves everything else: input, output and the news that the
//! command has ended, which a third waits for. What the command wrote before its end has come before the end
//! is told; a child that it leaves behind with its output open is not waited for.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use guest_agent::request::{Exec, Exit, Terminal};
use guest_agent::wire::{Frame, INPUT_WINDOW, Kind, read_frame, write_frame};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid, waitpid};
use nix::unistd::Pid;

use crate::ends::{close, line, refuse};
use crate::terminal;

/// How long a command may live on whose host has gone and which was told so (SIGHUP).
const GRACE: Duration = Duration::from_secs(5);
/// Bytes that are moved at once.
const PIECE: usize = 64 << 10;
/// Pieces that a pipe may hold when the command has ended: twice the most a pipe can be given (pipe(7)). A
/// child that it left behind may write for ever.
const LAST_PIECES: usize = 2 * (1 << 20) / PIECE;

/// The command's process group, as long as its leader has not been waited for.
struct Group(Mutex<Option<Pid>>);

impl Group {
    fn signal(&self, signal: Signal) {
        let pid = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pid) = *pid {
            // It fails when all of the group have ended.
            let _ = killpg(pid, signal);
        }
    }
}

/// The streams of a command on this side.
struct Streams {
    stdin: Option<File>,
    stdout: Option<File>,
    stderr: Option<File>,
    /// The terminal is for input and output; its end of file is a character.
    terminal: bool,
}

/// Runs a command until it ends or the host goes.
///
/// # Errors
/// The system lacks what is needed to watch it.
pub fn run(exec: &Exec, stream: UnixStream) -> io::Result<()> {
    // All that may be refused is had before there is a command.
    let (news, mut bell) = io::pipe()?;
    let ended = bell.try_clone()?;
    nonblocking(&news)?;
    let mut host = Host {
        stream: stream.try_clone()?,
        gone: false,
    };
    let (child, streams, master) = match start(exec) {
        Ok(started) => started,
        Err(why) => {
            refuse(&stream, &line(&why));
            close(&stream);
            return Ok(());
        }
    };
    let pid = i32::try_from(child.id()).map_or(Pid::from_raw(0), Pid::from_raw);
    let group = Arc::new(Group(Mutex::new(Some(pid))));
    let (input, inputs) = channel();
    let waiting = group.clone();
    let waiter = thread::Builder::new().spawn(move || wait(child, pid, &waiting, ended));
    let waiter = waiter.inspect_err(|_| {
        // Nobody else waits for it.
        group.signal(Signal::SIGKILL);
        let _ = waitpid(pid, None);
    })?;
    let pump = thread::Builder::new().spawn(move || {
        let moved = pump(streams, &news, &inputs, &mut host);
        if moved.is_err() {
            host.leave();
        }
        // The last byte of the news was that it has ended, or it will be ended.
        let exit = waiter.join().unwrap_or(Exit::Status(255));
        if let (Ok(()), Ok(exit)) = (moved, serde_json::to_vec(&exit)) {
            host.send(Kind::Exit, &exit);
        }
    });
    let pump = pump.inspect_err(|_| group.signal(Signal::SIGKILL))?;
    obey(&stream, &group, &input, &mut bell, master.as_ref());
    group.signal(Signal::SIGHUP);
    drop((input, bell));
    let until = Instant::now() + GRACE;
    while !pump.is_finished() && Instant::now() < until {
        thread::sleep(Duration::from_millis(20));
    }
    group.signal(Signal::SIGKILL);
    let _ = pump.join();
    Ok(())
}

/// The way to the host. When that has gone, what is sent is lost, and the command goes on: it gets SIGHUP and
/// may have something to bring to its end.
struct Host {
    stream: UnixStream,
    gone: bool,
}

impl Host {
    fn send(&mut self, kind: Kind, payload: &[u8]) {
        if !self.gone && write_frame(&mut self.stream, kind, payload).is_err() {
            self.leave();
        }
    }

    /// The thread that reads notices it, too.
    fn leave(&mut self) {
        self.gone = true;
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Why a command did not start. The host prints it with its cause.
#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error("no command")]
    Empty,
    #[error("{0}: no such command in the guest")]
    NoCommand(String),
    #[error("{0}: no such directory in the guest")]
    NoDirectory(String),
    #[error("{program}")]
    System {
        program: String,
        #[source]
        source: io::Error,
    },
}

/// Starts it; the terminal's end if it has one.
fn start(exec: &Exec) -> Result<(Child, Streams, Option<OwnedFd>), StartError> {
    let (program, arguments) = exec.argv.split_first().ok_or(StartError::Empty)?;
    let mut command = Command::new(program);
    command.args(arguments).envs(exec.env.iter().cloned());
    let home = std::env::var("HOME").unwrap_or_else(|_| "/".to_owned());
    let directory = exec.cwd.clone().unwrap_or(home);
    command.current_dir(&directory);
    let system = |source| StartError::System {
        program: program.clone(),
        source,
    };
    let master = match exec.terminal {
        Some(size) => Some(terminal::attach(&mut command, size).map_err(system)?),
        None => {
            let pipe = Stdio::piped;
            command
                .stdin(pipe())
                .stdout(pipe())
                .stderr(pipe())
                .process_group(0);
            None
        }
    };
    let mut child = command.spawn().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound if !std::path::Path::new(&directory).is_dir() => {
            StartError::NoDirectory(directory.clone())
        }
        io::ErrorKind::NotFound => StartError::NoCommand(program.clone()),
        _ => system(error),
    })?;
    // It holds the terminal's other end open, and then the terminal has no end.
    drop(command);
    let file = |fd: OwnedFd| -> io::Result<File> {
        nonblocking(&fd)?;
        Ok(File::from(fd))
    };
    let streams = (|| -> io::Result<Streams> {
        Ok(match &master {
            Some(master) => Streams {
                stdin: Some(file(master.try_clone()?)?),
                stdout: Some(file(master.try_clone()?)?),
                stderr: None,
                terminal: true,
            },
            None => Streams {
                stdin: child.stdin.take().map(|s| file(s.into())).transpose()?,
                stdout: child.stdout.take().map(|s| file(s.into())).transpose()?,
                stderr: child.stderr.take().map(|s| file(s.into())).transpose()?,
                terminal: false,
            },
        })
    })();
    match streams {
        Ok(streams) => Ok((child, streams, master)),
        Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(system(error))
        }
    }
}

fn nonblocking(fd: &impl AsFd) -> io::Result<()> {
    fcntl(fd, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    Ok(())
}

/// Waits for its end, and tells of it. Until the process has been waited for its number is no other's, so
/// signals are stopped before.
fn wait(mut child: Child, pid: Pid, group: &Group, mut ended: PipeWriter) -> Exit {
    while waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) == Err(nix::errno::Errno::EINTR) {
    }
    *group.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    let exit = match child.wait() {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => Exit::Status(u8::try_from(code).unwrap_or(u8::MAX)),
            (None, signal) => Exit::Signal(signal.and_then(|s| u8::try_from(s).ok()).unwrap_or(0)),
        },
        Err(_) => Exit::Status(u8::MAX),
    };
    let _ = ended.write_all(b"e");
    exit
}

/// Does what the host says until it goes.
fn obey(
    mut stream: &UnixStream,
    group: &Group,
    input: &Sender<Vec<u8>>,
    bell: &mut PipeWriter,
    master: Option<&OwnedFd>,
) {
    while let Ok(Some(frame)) = read_frame(&mut stream) {
        let Frame { kind, payload } = &frame;
        match kind {
            Kind::Stdin => {
                if input.send(payload.clone()).is_err() || bell.write_all(b"i").is_err() {
                    // It has ended; what else comes says nothing to it.
                    continue;
                }
            }
            Kind::Signal => {
                let number = frame.number().and_then(|number| i32::try_from(number).ok());
                if let Some(Ok(signal)) = number.map(Signal::try_from) {
                    group.signal(signal);
                }
            }
            Kind::Resize => {
                if let (Some(master), Some(size)) = (master, Terminal::from_bytes(payload)) {
                    terminal::resize(master, size);
                }
            }
            _ => return,
        }
    }
}

/// Input that the command has not taken.
#[derive(Default)]
struct Pending {
    bytes: VecDeque<u8>,
    end: bool,
}

/// Moves input and output until the command has ended.
fn pump(
    mut streams: Streams,
    mut news: &PipeReader,
    inputs: &Receiver<Vec<u8>>,
    out: &mut Host,
) -> io::Result<()> {
    out.send(Kind::Accepted, &[]);
    let mut pending = Pending::default();
    let mut ended = false;
    while !ended {
        let feeds = streams.stdin.is_some() && !pending.bytes.is_empty();
        {
            let mut fds = vec![PollFd::new(news.as_fd(), PollFlags::POLLIN)];
            if let Some(stdin) = streams.stdin.as_ref().filter(|_| feeds) {
                fds.push(PollFd::new(stdin.as_fd(), PollFlags::POLLOUT));
            }
            for output in [&streams.stdout, &streams.stderr].into_iter().flatten() {
                fds.push(PollFd::new(output.as_fd(), PollFlags::POLLIN));
            }
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
        let mut bytes = [0; 256];
        match news.read(&mut bytes) {
            Ok(count) => ended = bytes[..count].contains(&b'e'),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
        for piece in inputs.try_iter() {
            pending.end |= piece.is_empty();
            pending.bytes.extend(piece);
        }
        if pending.bytes.len() > usize::try_from(INPUT_WINDOW).unwrap_or(usize::MAX) {
            return Err(io::Error::other("the host sends more input than it may"));
        }
        feed(&mut streams, &mut pending, out);
        // After its end all it wrote is taken; before, one piece of each in turn.
        for _ in 0..if ended { LAST_PIECES } else { 1 } {
            let more = forward(&mut streams.stdout, Kind::Stdout, out);
            if !(forward(&mut streams.stderr, Kind::Stderr, out) | more) {
                break;
            }
        }
    }
    Ok(())
}

/// Gives the command what it takes of its input.
fn feed(streams: &mut Streams, pending: &mut Pending, out: &mut Host) {
    let mut taken = 0;
    while let Some(stdin) = &mut streams.stdin {
        let (first, _) = pending.bytes.as_slices();
        if first.is_empty() {
            break;
        }
        match stdin.write(first) {
            Ok(count) => {
                pending.bytes.drain(..count);
                taken += count;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // It reads no more.
            Err(_) => streams.stdin = None,
        }
    }
    if streams.stdin.is_none() {
        taken += pending.bytes.len();
        pending.bytes.clear();
    }
    if pending.end && pending.bytes.is_empty() {
        pending.end = false;
        if streams.terminal {
            // Ctrl-D, which the terminal takes for the end of input.
            pending.bytes.push_back(4);
        } else {
            streams.stdin = None;
        }
    }
    if taken > 0 {
        let taken = u32::try_from(taken).unwrap_or(u32::MAX);
        out.send(Kind::Taken, &taken.to_le_bytes());
    }
}

/// Sends a piece of output. Whether there was one.
fn forward(stream: &mut Option<File>, kind: Kind, out: &mut Host) -> bool {
    let Some(file) = stream else {
        return false;
    };
    let mut buffer = vec![0; PIECE];
    match file.read(&mut buffer) {
        Ok(count @ 1..) => {
            out.send(kind, &buffer[..count]);
            true
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
        Err(error) if error.kind() == io::ErrorKind::Interrupted => true,
        // The end; of a terminal it is an error.
        Ok(_) | Err(_) => {
            *stream = None;
            false
        }
    }
}
