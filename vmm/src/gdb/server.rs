//! The socket that debuggers connect to, and the thread that serves them.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use gdbstub::conn::Connection;
use gdbstub::stub::state_machine::GdbStubStateMachine;
use gdbstub::stub::{DisconnectReason, GdbStub, MultiThreadStopReason};
use perf_core::error_line;
use sandbox::ThreadKind;
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::target::Machine;
use crate::console::poll::wait_readable;
use crate::console::stream::Listener;
use crate::privileges;
use crate::vcpu::control::{RunControl, StopReason};
use crate::vcpu::debugger::{Debugger, HoldError};
use crate::vm::RunningVm;

/// How long a client may take to read what it is sent.
const WRITE_PATIENCE: Duration = Duration::from_secs(5);
/// How long the thread may take to tell the client of the VM's end.
const END_PATIENCE: Duration = Duration::from_millis(500);
/// Bytes read at once.
const READ_BYTES: usize = 4096;

/// Nobody can connect.
#[derive(Debug, thiserror::Error)]
pub enum GdbError {
    /// Not there.
    #[error(
        "--gdb {}: cannot listen there; choose a path in a directory that this user may write to, where nothing is",
        path.display()
    )]
    Listen {
        /// Where.
        path: PathBuf,
        /// What the host said.
        source: io::Error,
    },
    /// No thread or descriptor.
    #[error("starting the thread for debuggers failed")]
    Thread(#[source] io::Error),
}

/// A socket for debuggers that nobody serves yet. Only this user can connect.
#[derive(Debug)]
pub struct GdbSocket {
    listener: Listener,
    path: PathBuf,
}

impl GdbSocket {
    /// Listens at `path`.
    ///
    /// # Errors
    /// [`GdbError::Listen`].
    pub fn bind(path: &Path) -> Result<Self, GdbError> {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        match Listener::bind(&path) {
            Ok(listener) => Ok(Self { listener, path }),
            Err(source) => Err(GdbError::Listen { path, source }),
        }
    }

    /// Serves debuggers of `vm`, one at a time, on a thread of its own.
    ///
    /// # Errors
    /// [`GdbError::Thread`].
    pub fn serve(self, vm: &RunningVm) -> Result<GdbServer, GdbError> {
        let control = vm.control().clone();
        let machine = Machine::new(
            control.clone(),
            vm.roster().clone(),
            vm.ram().memory().clone(),
            vm.free_breakpoints(),
        );
        if let Some(debugger) = control.debugger() {
            debugger.kicks(vm.kicker().clone());
        }
        log::info!("gdb: target remote {}", self.path.display());
        let end = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(GdbError::Thread)?;
        let client = Arc::default();
        let loop_ = Loop {
            machine,
            control,
            listener: self.listener,
            end: end.try_clone().map_err(GdbError::Thread)?,
            client: Arc::clone(&client),
        };
        let builder = thread::Builder::new().name("gdb".into());
        let keep = privileges::keep_no_capability;
        let thread = sandbox::spawn_prepared(ThreadKind::Debugger, builder, keep, move || loop_.run())
            .map_err(GdbError::Thread)?;
        Ok(GdbServer {
            end,
            client,
            thread: Some(thread),
        })
    }
}

/// The client that is there.
type Current = Arc<Mutex<Option<UnixStream>>>;

fn lock(current: &Current) -> MutexGuard<'_, Option<UnixStream>> {
    current.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The thread that serves debuggers. It ends when this is dropped.
#[derive(Debug)]
pub struct GdbServer {
    end: EventFd,
    client: Current,
    thread: Option<JoinHandle<()>>,
}

impl Drop for GdbServer {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        let _ = self.end.write(1);
        // It tells the client of the end, if that reads.
        let end = std::time::Instant::now() + END_PATIENCE;
        while !thread.is_finished() && std::time::Instant::now() < end {
            thread::sleep(Duration::from_millis(1));
        }
        if let Some(client) = &*lock(&self.client) {
            let _ = client.shutdown(std::net::Shutdown::Both);
        }
        if thread.join().is_err() {
            log::error!("the thread for debuggers panicked");
        }
    }
}

/// Why a session ended before its client wanted.
#[derive(Debug, thiserror::Error)]
enum SessionError {
    #[error("the socket failed")]
    Socket(#[from] io::Error),
    #[error("the machine cannot be stopped")]
    Hold(#[from] HoldError),
    #[error("it does not speak gdb's protocol: {0}")]
    Protocol(String),
}

/// What a wait ended with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Woken {
    /// The client has sent something, or is gone.
    Client,
    /// A vCPU has stopped the machine.
    Stop,
    /// The VM has ended, or is about to.
    End,
}

/// What the thread runs.
struct Loop {
    machine: Machine,
    control: Arc<RunControl>,
    listener: Listener,
    end: EventFd,
    client: Current,
}

impl Loop {
    fn run(mut self) {
        while let Some(stream) = self.next_client() {
            match self.session(stream) {
                Ok(DisconnectReason::Kill) => {
                    log::info!("gdb: the debugger has killed the VM");
                    self.machine.detach();
                    self.control.stop(StopReason::Operator);
                }
                Ok(reason) => log::info!("gdb: the debugger has gone ({reason:?})"),
                Err(error) => log::warn!("gdb: the debugger is let go: {}", error_line(&error)),
            }
            *lock(&self.client) = None;
            self.machine.detach();
        }
    }

    /// Waits for a client; `None`: the VM ends.
    fn next_client(&self) -> Option<UnixStream> {
        loop {
            let socket = &self.listener.socket;
            match wait(socket, None, &self.end, self.control.stopped_event()) {
                Ok(Woken::Client) => {}
                Ok(Woken::Stop | Woken::End) => return None,
                Err(error) => {
                    log::error!("gdb: {}", error_line(&error));
                    return None;
                }
            }
            match socket.accept() {
                Ok((stream, _)) => return Some(stream),
                Err(error) => log::debug!("gdb: no client: {error}"),
            }
        }
    }

    /// One client, from its connection to its end.
    fn session(&mut self, stream: UnixStream) -> Result<DisconnectReason, SessionError> {
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(WRITE_PATIENCE))?;
        let reader = stream.try_clone()?;
        *lock(&self.client) = Some(stream.try_clone()?);
        self.machine.attach()?;
        let client = Client {
            stream,
            out: Vec::with_capacity(READ_BYTES),
        };
        let protocol = |error: &dyn std::fmt::Display| SessionError::Protocol(error.to_string());
        let mut stub = GdbStub::new(client)
            .run_state_machine(&mut self.machine)
            .map_err(|e| protocol(&e))?;
        let mut bytes = [0; READ_BYTES];
        let mut unread = 0..0;
        loop {
            stub = match stub {
                GdbStubStateMachine::Disconnected(gone) => return Ok(gone.get_reason()),
                GdbStubStateMachine::CtrlCInterrupt(interrupt) => {
                    let reason = self.machine.stop_reason()?;
                    interrupt.interrupt_handled(&mut self.machine, Some(reason))
                }
                GdbStubStateMachine::Idle(idle) if !unread.is_empty() => {
                    let at = unread.start;
                    unread.start += 1;
                    idle.incoming_data(&mut self.machine, bytes[at])
                }
                GdbStubStateMachine::Running(running) if !unread.is_empty() => {
                    let at = unread.start;
                    unread.start += 1;
                    running.incoming_data(&mut self.machine, bytes[at])
                }
                waiting => {
                    let is_running = matches!(waiting, GdbStubStateMachine::Running(_));
                    let stops = is_running.then(|| self.control.debugger()).flatten();
                    let stops = stops.map(Debugger::event);
                    match wait(&reader, stops, &self.end, self.control.stopped_event())? {
                        Woken::Client => {
                            let count = (&reader).read(&mut bytes)?;
                            if count == 0 {
                                return Ok(DisconnectReason::Disconnect);
                            }
                            unread = 0..count;
                            Ok(waiting)
                        }
                        Woken::Stop => match (waiting, self.machine.stop_reason()?) {
                            (GdbStubStateMachine::Running(running), reason) => {
                                running.report_stop(&mut self.machine, reason)
                            }
                            (other, _) => Ok(other),
                        },
                        Woken::End => match waiting {
                            GdbStubStateMachine::Running(running) => {
                                let end = MultiThreadStopReason::Exited(self.exit_code());
                                running.report_stop(&mut self.machine, end)
                            }
                            // It has asked for nothing that could be answered: it sees the socket's end.
                            _ => return Ok(DisconnectReason::Disconnect),
                        },
                    }
                }
            }
            .map_err(|e| protocol(&e))?;
        }
    }

    /// What gdb shows as the exit status.
    fn exit_code(&self) -> u8 {
        match self.control.reason() {
            Some(StopReason::PowerOff | StopReason::Operator) => 0,
            Some(StopReason::DebugExit(status)) => status,
            _ => 1,
        }
    }
}

/// Waits for `client`, `stops` or an end. An end comes last: what a client sent before it is served.
fn wait(
    client: &impl AsRawFd,
    stops: Option<&EventFd>,
    end: &EventFd,
    stopped: &EventFd,
) -> io::Result<Woken> {
    // A negative descriptor is none.
    let stops = stops.map_or(-1, AsRawFd::as_raw_fd);
    let fds = [client.as_raw_fd(), stops, end.as_raw_fd(), stopped.as_raw_fd()];
    let [client, stops, ..] = wait_readable(fds)?;
    Ok(match (client, stops) {
        (true, _) => Woken::Client,
        (_, true) => Woken::Stop,
        _ => Woken::End,
    })
}

/// The stub's way to a client: a packet goes out in one piece.
struct Client {
    stream: UnixStream,
    out: Vec<u8>,
}

impl Connection for Client {
    type Error = io::Error;

    fn write(&mut self, byte: u8) -> io::Result<()> {
        self.out.push(byte);
        if self.out.len() < READ_BYTES {
            return Ok(());
        }
        self.flush()
    }

    fn flush(&mut self) -> io::Result<()> {
        let sent = self.stream.write_all(&self.out);
        self.out.clear();
        sent
    }
}
