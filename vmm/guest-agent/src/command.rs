//! Executes one command: connects its streams, delivers signals and reports its exit.
//!
//! One thread reads the host's frames. A second thread transfers the command's input and output. A
//! third thread waits for the exit of the command. Output that the command wrote before its exit is
//! sent before the exit is reported. The agent does not wait for child processes that keep the
//! output open.

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

use guest_agent::request::{CommandExit, ExecRequest, Terminal};
use guest_agent::terminal;
use guest_agent::wire::{Frame, FrameKind, INPUT_WINDOW, read_frame, write_frame};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid, waitpid};
use nix::unistd::Pid;

use crate::ends::{close, line, refuse};

/// Time between SIGHUP and SIGKILL for a command after its host has disconnected.
const EXIT_GRACE_PERIOD: Duration = Duration::from_secs(5);
/// Maximum number of output bytes that are read from the command at a time.
const TRANSFER_BYTES: usize = 64 << 10;
/// Maximum number of transfers after the command has exited. Sufficient for twice the maximum pipe
/// capacity (pipe(7)); needed because a surviving child process may write indefinitely.
const MAX_FINAL_TRANSFERS: usize = 2 * (1 << 20) / TRANSFER_BYTES;

/// Process group of a command. `None` once the command has exited, before its process is reaped.
struct ProcessGroup(Mutex<Option<Pid>>);

impl ProcessGroup {
    fn signal(&self, signal: Signal) {
        let pid = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pid) = *pid {
            // The call fails only if all processes of the group have exited.
            let _ = killpg(pid, signal);
        }
    }
}

/// The agent's ends of the pipes or of the terminal that a command uses.
struct CommandStreams {
    stdin: Option<File>,
    stdout: Option<File>,
    stderr: Option<File>,
    /// `true` if the command runs on a terminal. End of file is then signalled by a control
    /// character.
    terminal: bool,
}

/// Runs a command until it exits or the host disconnects.
///
/// # Errors
/// Returns an error if the system lacks resources to monitor the command.
pub fn run(exec: &ExecRequest, stream: UnixStream) -> io::Result<()> {
    // Acquire all resources that may fail before the command starts.
    let (news, mut bell) = io::pipe()?;
    let ended = bell.try_clone()?;
    nonblocking(&news)?;
    let mut host = HostConnection {
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
    let group = Arc::new(ProcessGroup(Mutex::new(Some(pid))));
    let (input, inputs) = channel();
    let waiting = group.clone();
    let waiter = thread::Builder::new().spawn(move || wait(child, pid, &waiting, ended));
    let waiter = waiter.inspect_err(|_| {
        // The waiting thread could not be started, so reap the command in this thread.
        group.signal(Signal::SIGKILL);
        let _ = waitpid(pid, None);
    })?;
    let pump = thread::Builder::new().spawn(move || {
        let moved = pump(streams, &news, &inputs, &mut host);
        if moved.is_err() {
            host.leave();
        }
        // This join does not block for long: the command has exited, or is being killed.
        let exit = waiter.join().unwrap_or(CommandExit::Status(255));
        if let (Ok(()), Ok(exit)) = (moved, serde_json::to_vec(&exit)) {
            host.send(FrameKind::Exit, &exit);
        }
    });
    let pump = pump.inspect_err(|_| group.signal(Signal::SIGKILL))?;
    handle_frames(&stream, &group, &input, &mut bell, master.as_ref());
    group.signal(Signal::SIGHUP);
    drop((input, bell));
    let until = Instant::now() + EXIT_GRACE_PERIOD;
    while !pump.is_finished() && Instant::now() < until {
        thread::sleep(Duration::from_millis(20));
    }
    group.signal(Signal::SIGKILL);
    let _ = pump.join();
    Ok(())
}

/// Connection to the host that requested the command. After a disconnect, frames are discarded,
/// because the command may need time to exit after SIGHUP.
struct HostConnection {
    stream: UnixStream,
    gone: bool,
}

impl HostConnection {
    fn send(&mut self, kind: FrameKind, payload: &[u8]) {
        if !self.gone && write_frame(&mut self.stream, kind, payload).is_err() {
            self.leave();
        }
    }

    /// Shuts down the connection. This also ends the thread that reads from it.
    fn leave(&mut self) {
        self.gone = true;
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

/// Error returned when a command cannot be started. The host prints the error with its cause.
#[derive(Debug, thiserror::Error)]
enum StartError {
    #[error("no command")]
    Empty,
    #[error("{0}: command not found in the guest")]
    NoCommand(String),
    #[error("{0}: directory not found in the guest")]
    NoDirectory(String),
    #[error("{program}")]
    System {
        program: String,
        #[source]
        source: io::Error,
    },
}

/// Starts the command of a request. Returns the master end of the command's terminal, if any.
fn start(exec: &ExecRequest) -> Result<(Child, CommandStreams, Option<OwnedFd>), StartError> {
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
    // The command builder holds the slave end open, which would prevent the end of file on the
    // terminal.
    drop(command);
    let file = |fd: OwnedFd| -> io::Result<File> {
        nonblocking(&fd)?;
        Ok(File::from(fd))
    };
    let streams = (|| -> io::Result<CommandStreams> {
        Ok(match &master {
            Some(master) => CommandStreams {
                stdin: Some(file(master.try_clone()?)?),
                stdout: Some(file(master.try_clone()?)?),
                stderr: None,
                terminal: true,
            },
            None => CommandStreams {
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

/// Waits until the command exits, and returns how it ended. Blocks further signals before reaping
/// the process, because its process ID may be reused afterwards.
fn wait(mut child: Child, pid: Pid, group: &ProcessGroup, mut ended: PipeWriter) -> CommandExit {
    while waitid(Id::Pid(pid), WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT) == Err(nix::errno::Errno::EINTR) {
    }
    *group.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    let exit = match child.wait() {
        Ok(status) => match (status.code(), status.signal()) {
            (Some(code), _) => CommandExit::Status(u8::try_from(code).unwrap_or(u8::MAX)),
            (None, signal) => CommandExit::Signal(signal.and_then(|s| u8::try_from(s).ok()).unwrap_or(0)),
        },
        Err(_) => CommandExit::Status(u8::MAX),
    };
    let _ = ended.write_all(b"e");
    exit
}

/// Handles frames from the host until it disconnects.
fn handle_frames(
    mut stream: &UnixStream,
    group: &ProcessGroup,
    input: &Sender<HostMessage>,
    bell: &mut PipeWriter,
    master: Option<&OwnedFd>,
) {
    while let Ok(Some(frame)) = read_frame(&mut stream) {
        let Frame { kind, payload } = &frame;
        match kind {
            FrameKind::Stdin => {
                if input.send(HostMessage::Stdin(payload.clone())).is_err() || bell.write_all(b"i").is_err() {
                    // The command has exited, so further frames have no effect.
                    continue;
                }
            }
            FrameKind::Signal => {
                let number = frame.number().and_then(|number| i32::try_from(number).ok());
                if let Some(Ok(signal)) = number.map(Signal::try_from) {
                    group.signal(signal);
                }
                // The other thread acknowledges the signal. If it has exited, the exit report is
                // the acknowledgment.
                if input.send(HostMessage::Signalled).is_ok() {
                    let _ = bell.write_all(b"i");
                }
            }
            FrameKind::Resize => {
                if let (Some(master), Some(size)) = (master, Terminal::from_bytes(payload)) {
                    terminal::resize(master, size);
                }
            }
            _ => return,
        }
    }
}

/// Message from the thread that reads the host's frames to the thread that transfers the command's
/// input and output.
enum HostMessage {
    /// Standard input for the command.
    Stdin(Vec<u8>),
    /// A signal has been sent to the command.
    Signalled,
}

/// Input that the command has not read yet.
#[derive(Default)]
struct PendingStdin {
    bytes: VecDeque<u8>,
    end: bool,
}

/// Transfers the command's input and output until the command exits.
fn pump(
    mut streams: CommandStreams,
    mut news: &PipeReader,
    inputs: &Receiver<HostMessage>,
    out: &mut HostConnection,
) -> io::Result<()> {
    out.send(FrameKind::Accepted, &[]);
    let mut pending = PendingStdin::default();
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
        for message in inputs.try_iter() {
            match message {
                HostMessage::Stdin(piece) => {
                    pending.end |= piece.is_empty();
                    pending.bytes.extend(piece);
                }
                HostMessage::Signalled => out.send(FrameKind::Taken, &0_u32.to_le_bytes()),
            }
        }
        if pending.bytes.len() > usize::try_from(INPUT_WINDOW).unwrap_or(usize::MAX) {
            return Err(io::Error::other("the host sends more input than it may"));
        }
        write_input(&mut streams, &mut pending, out);
        // After the exit, read all remaining output. Before the exit, alternate between the
        // streams.
        for _ in 0..if ended { MAX_FINAL_TRANSFERS } else { 1 } {
            let more = send_output(&mut streams.stdout, FrameKind::Stdout, out);
            if !(send_output(&mut streams.stderr, FrameKind::Stderr, out) | more) {
                break;
            }
        }
    }
    Ok(())
}

/// Writes as much pending input to the command as possible without blocking.
fn write_input(streams: &mut CommandStreams, pending: &mut PendingStdin, out: &mut HostConnection) {
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
            // The command has closed its input.
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
            // Ctrl-D, which the terminal interprets as end of input.
            pending.bytes.push_back(4);
        } else {
            streams.stdin = None;
        }
    }
    if taken > 0 {
        let taken = u32::try_from(taken).unwrap_or(u32::MAX);
        out.send(FrameKind::Taken, &taken.to_le_bytes());
    }
}

/// Sends one chunk of the command's output to the host. Returns `false` if there was no output.
fn send_output(stream: &mut Option<File>, kind: FrameKind, out: &mut HostConnection) -> bool {
    let Some(file) = stream else {
        return false;
    };
    let mut buffer = vec![0; TRANSFER_BYTES];
    match file.read(&mut buffer) {
        Ok(count @ 1..) => {
            out.send(kind, &buffer[..count]);
            true
        }
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => false,
        Err(error) if error.kind() == io::ErrorKind::Interrupted => true,
        // End of file, which a terminal reports as an error.
        Ok(_) | Err(_) => {
            *stream = None;
            false
        }
    }
}
