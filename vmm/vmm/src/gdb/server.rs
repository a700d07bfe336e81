//! The socket for debuggers and the thread that serves them.

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
use sandbox::{SandboxedThreadKind, privileges};
use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::target::GdbTarget;
use crate::console::poll::wait_readable;
use crate::console::stream::Listener;
use crate::vcpu::control::{VmRunControl, VmStopReason};
use crate::vcpu::debugger::{Debugger, VcpuStopError};
use crate::vm::RunningVm;

/// Maximum time that a write to the client may take.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time that the server thread may take to report the end of the VM to the client.
const END_TIMEOUT: Duration = Duration::from_millis(500);
/// Maximum number of bytes that one read from the client returns.
const READ_BYTES: usize = 4096;

/// Error when starting the gdb server.
#[derive(Debug, thiserror::Error)]
pub enum GdbError {
    /// Creating the socket for debuggers failed.
    #[error(
        "--gdb {}: cannot listen; choose an unused path in a directory that this user may write to",
        path.display()
    )]
    Listen {
        /// Path of the socket for debuggers.
        path: PathBuf,
        /// Error of the system call that created the socket.
        source: io::Error,
    },
    /// Creating the thread or a descriptor failed.
    #[error("failed to start the thread for debuggers")]
    Thread(#[source] io::Error),
}

/// A listening socket for debuggers, without a thread that serves it. Only the VM's user can
/// connect.
#[derive(Debug)]
pub struct GdbSocket {
    listener: Listener,
    path: PathBuf,
}

impl GdbSocket {
    /// Creates a socket for debuggers at `path`.
    ///
    /// # Errors
    /// Returns [`GdbError::Listen`] if the socket cannot be created.
    pub fn bind(path: &Path) -> Result<Self, GdbError> {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        match Listener::bind(&path) {
            Ok(listener) => Ok(Self { listener, path }),
            Err(source) => Err(GdbError::Listen { path, source }),
        }
    }

    /// Starts a thread that serves debuggers of `vm`, one at a time.
    ///
    /// # Errors
    /// Returns [`GdbError::Thread`] if the thread cannot be started.
    pub fn serve(self, vm: &RunningVm) -> Result<GdbServer, GdbError> {
        let control = vm.control().clone();
        let machine = GdbTarget::new(
            control.clone(),
            vm.registry().clone(),
            vm.ram().memory().clone(),
            vm.free_breakpoints(),
        );
        if let Some(debugger) = control.debugger() {
            debugger.kicks(vm.kicker().clone());
        }
        log::info!("gdb: target remote {}", self.path.display());
        let end = EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC).map_err(GdbError::Thread)?;
        let client = Arc::default();
        let loop_ = GdbServerLoop {
            machine,
            control,
            listener: self.listener,
            end: end.try_clone().map_err(GdbError::Thread)?,
            client: Arc::clone(&client),
        };
        let builder = thread::Builder::new().name("gdb".into());
        let keep = privileges::drop_thread_capabilities;
        let thread =
            sandbox::spawn_prepared(SandboxedThreadKind::Debugger, builder, keep, move || loop_.run())
                .map_err(GdbError::Thread)?;
        Ok(GdbServer {
            end,
            client,
            thread: Some(thread),
        })
    }
}

/// Connection of the current client; `None` without a client.
type Current = Arc<Mutex<Option<UnixStream>>>;

fn lock(current: &Current) -> MutexGuard<'_, Option<UnixStream>> {
    current.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Handle of the thread that serves debuggers. The thread is stopped on drop.
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
        // Give the thread time to report the end to the client.
        let end = std::time::Instant::now() + END_TIMEOUT;
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

/// Reason why the session with a debugger ended.
#[derive(Debug, thiserror::Error)]
enum SessionError {
    #[error("the socket failed")]
    Socket(#[from] io::Error),
    #[error("cannot stop the machine")]
    Hold(#[from] VcpuStopError),
    #[error("gdb protocol error: {0}")]
    Protocol(String),
}

/// Reason why [`wait`] has returned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WakeReason {
    /// The client has sent data or has disconnected.
    Client,
    /// A vCPU has stopped the machine for the debugger.
    Stop,
    /// The VM has ended or is about to end.
    End,
}

/// State of the thread that serves debuggers.
struct GdbServerLoop {
    machine: GdbTarget,
    control: Arc<VmRunControl>,
    listener: Listener,
    end: EventFd,
    client: Current,
}

impl GdbServerLoop {
    fn run(mut self) {
        while let Some(stream) = self.next_client() {
            match self.session(stream) {
                Ok(DisconnectReason::Kill) => {
                    log::info!("gdb: the debugger terminated the VM");
                    self.machine.detach();
                    self.control.stop(VmStopReason::Operator);
                }
                Ok(reason) => log::info!("gdb: the debugger disconnected ({reason:?})"),
                Err(error) => log::warn!("gdb: the debugger was disconnected: {}", error_line(&error)),
            }
            *lock(&self.client) = None;
            self.machine.detach();
        }
    }

    /// Waits for a client. Returns `None` when the VM ends.
    fn next_client(&self) -> Option<UnixStream> {
        loop {
            let socket = &self.listener.socket;
            match wait(socket, None, &self.end, self.control.stopped_event()) {
                Ok(WakeReason::Client) => {}
                Ok(WakeReason::Stop | WakeReason::End) => return None,
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

    /// Attaches the debugger to the machine. Returns the connection to the client for reading, and
    /// for writing.
    fn attach(&mut self, stream: UnixStream) -> Result<(UnixStream, Client), SessionError> {
        stream.set_nonblocking(false)?;
        stream.set_write_timeout(Some(WRITE_TIMEOUT))?;
        let reader = stream.try_clone()?;
        *lock(&self.client) = Some(stream.try_clone()?);
        self.machine.attach()?;
        let out = Vec::with_capacity(READ_BYTES);
        Ok((reader, Client { stream, out }))
    }

    /// Serves one client until it disconnects.
    fn session(&mut self, stream: UnixStream) -> Result<DisconnectReason, SessionError> {
        let (reader, client) = self.attach(stream)?;
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
                        WakeReason::Client => {
                            let count = (&reader).read(&mut bytes)?;
                            if count == 0 {
                                return Ok(DisconnectReason::Disconnect);
                            }
                            unread = 0..count;
                            Ok(waiting)
                        }
                        WakeReason::Stop => match (waiting, self.machine.stop_reason()?) {
                            (GdbStubStateMachine::Running(running), reason) => {
                                running.report_stop(&mut self.machine, reason)
                            }
                            (other, _) => Ok(other),
                        },
                        WakeReason::End => match waiting {
                            GdbStubStateMachine::Running(running) => {
                                let end = MultiThreadStopReason::Exited(self.exit_code());
                                running.report_stop(&mut self.machine, end)
                            }
                            // The client is not waiting for a reply, so the end cannot be reported.
                            // It detects that the connection is closed.
                            _ => return Ok(DisconnectReason::Disconnect),
                        },
                    }
                }
            }
            .map_err(|e| protocol(&e))?;
        }
    }

    /// Returns the exit status of the VM to report to gdb.
    fn exit_code(&self) -> u8 {
        match self.control.reason() {
            Some(VmStopReason::PowerOff | VmStopReason::Operator) => 0,
            Some(VmStopReason::DebugExit(status)) => status,
            _ => 1,
        }
    }
}

/// Waits until the client has sent data, a vCPU has stopped the machine, or the VM ends. The end of
/// the VM is reported only if neither of the others has occurred, so data that the client sent
/// before is processed.
fn wait(
    client: &impl AsRawFd,
    stops: Option<&EventFd>,
    end: &EventFd,
    stopped: &EventFd,
) -> io::Result<WakeReason> {
    // poll(2) ignores a negative descriptor.
    let stops = stops.map_or(-1, AsRawFd::as_raw_fd);
    let fds = [client.as_raw_fd(), stops, end.as_raw_fd(), stopped.as_raw_fd()];
    let [client, stops, ..] = wait_readable(fds)?;
    Ok(match (client, stops) {
        (true, _) => WakeReason::Client,
        (_, true) => WakeReason::Stop,
        _ => WakeReason::End,
    })
}

/// Connection of the gdb stub to its client. Collects the bytes of a packet and sends them in one
/// write.
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
