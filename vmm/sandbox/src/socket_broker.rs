//! Broker process that connects to Unix sockets for the VM, and removes the VM's own sockets when
//! the VM exits.
//!
//! No thread of a running VM may create a socket, connect, or remove a file, because seccomp
//! filters cannot check paths, and landlock does not restrict connections. A compromised thread
//! could otherwise reach the control sockets of other VMs. [`SocketBroker::start`] therefore forks
//! a process before any guest data is loaded. During start-up, the VM registers the destinations to
//! which it will connect, until it calls [`SocketBroker::seal`]. From then on, the broker accepts
//! only fixed-size requests with two numbers: the destination and its port. The broker reads no
//! paths and no guest data after the seal.
//!
//! The broker outlives the VM for a short time, regardless of how the VM exits, because the closing
//! of the VM's socket tells the broker that the VM has exited.
#![expect(
    unsafe_code,
    reason = "fork(2), socket(2), connect(2) and what a process does after a fork"
)]

use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{Access, AtFlags, FileType, Mode, accessat, fstat, openat, unlinkat};
use rustix::io::Errno;
use seccompiler::{BpfProgram, SeccompAction, apply_filter};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::paths::{self, PrivilegedDirectory};
use crate::service::{EXIT_UNCONFINED, exit_process, keep_only_descriptor, trim_heap};
use crate::start::{SandboxError, SeccompMode};
use crate::{HelperProcessStartError, ProcessConfinement, SandboxedThreadKind, files, filter, lists};

/// Process name of the broker, as displayed by `ps`.
const NAME: &std::ffi::CStr = c"socket-broker";
/// Timeout for an answer from the broker.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Maximum length of a socket path, in bytes (unix(7), `sun_path`).
const MAX_NAME: usize = 107;

/// Operation that a request asks the socket broker to perform.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum BrokerOperation {
    /// Registers one socket as a destination. Its file name is passed in the request, and its
    /// directory as a descriptor.
    AddExact = b'E',
    /// Registers a set of sockets as a destination. Their file names consist of the name in the
    /// request, an underscore and a port.
    AddNumbered = b'N',
    /// Registers a socket that the VM has created, to be removed when the VM exits.
    RemoveAtEnd = b'R',
    /// Ends the registration of destinations and sockets.
    Seal = b'S',
    /// Connects to a registered destination.
    Connect = b'C',
}

impl BrokerOperation {
    fn from_byte(byte: u8) -> Option<Self> {
        [
            Self::AddExact,
            Self::AddNumbered,
            Self::RemoveAtEnd,
            Self::Seal,
            Self::Connect,
        ]
        .into_iter()
        .find(|operation| *operation as u8 == byte)
    }
}

/// A message from the VM. After `SocketBroker::seal`, messages may no longer contain a name.
struct BrokerRequest {
    operation: BrokerOperation,
    destination: u16,
    port: u32,
    name: OsString,
}

impl BrokerRequest {
    const BYTES: usize = 8 + MAX_NAME;

    fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[0] = self.operation as u8;
        bytes[1] = u8::try_from(self.name.len()).unwrap_or(0);
        bytes[2..4].copy_from_slice(&self.destination.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.port.to_le_bytes());
        for (to, from) in bytes[8..].iter_mut().zip(self.name.as_bytes()) {
            *to = *from;
        }
        bytes
    }

    /// Decodes a message. Returns `None` if it is malformed.
    fn from_bytes(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let name = bytes[8..].get(..bytes[1].into())?;
        Some(Self {
            operation: BrokerOperation::from_byte(bytes[0])?,
            destination: u16::from_le_bytes([bytes[2], bytes[3]]),
            port: u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
            name: OsString::from_vec(name.to_vec()),
        })
    }
}

// ---------------------------------------------------------------- VM side

/// The VM's connection to the socket broker. The broker exits when this value is dropped.
#[derive(Debug)]
pub struct SocketBroker {
    /// Connection to the broker, `None` after the broker has exited or timed out.
    control: Mutex<Option<UnixStream>>,
}

/// Registered Unix socket, or set of Unix sockets numbered by port, to which the broker connects.
#[derive(Clone, Debug)]
pub struct SocketDestination {
    broker: Arc<SocketBroker>,
    index: u16,
}

impl SocketDestination {
    /// Connects to this destination. For a set of sockets, `port` selects the socket; for a single
    /// socket, it is ignored. The returned socket is non-blocking. A symbolic link at the socket's
    /// path is rejected.
    ///
    /// # Errors
    /// Returns an error if `connect(2)` fails, or [`ErrorKind::NotConnected`] if the broker has
    /// exited.
    pub fn connect(&self, port: u32) -> io::Result<UnixStream> {
        let request = BrokerRequest {
            operation: BrokerOperation::Connect,
            destination: self.index,
            port,
            name: OsString::new(),
        };
        let (_, socket) = self.broker.request(&request, None)?;
        socket.map(UnixStream::from).ok_or(ErrorKind::InvalidData.into())
    }
}

impl SocketBroker {
    /// Forks the broker from this process, which must have no thread other than the calling one.
    /// The broker calls `give_up` to drop its privileges.
    ///
    /// # Errors
    /// Returns a [`HelperProcessStartError`] if the process cannot be started or its filters cannot
    /// be created.
    pub fn start(
        confinement: ProcessConfinement,
        give_up: fn() -> bool,
    ) -> Result<Arc<Self>, HelperProcessStartError> {
        let os = |what| move |e| HelperProcessStartError::Os(what, e);
        let (ours, its) = UnixStream::pair().map_err(os("socketpair"))?;
        ours.set_read_timeout(Some(ANSWER_LIMIT))
            .and_then(|()| ours.set_write_timeout(Some(ANSWER_LIMIT)))
            .map_err(os("setsockopt"))?;
        let filters = filters(confinement.seccomp).map_err(|e| {
            HelperProcessStartError::Sandbox(SandboxError::Compile(SandboxedThreadKind::Socket, e))
        })?;
        // SAFETY: no other thread exists, as the documentation requires, so all memory of the child
        // is consistent and no lock is held by another thread.
        match unsafe { libc::fork() } {
            -1 => Err(os("fork")(io::Error::last_os_error())),
            0 => {
                let served = panic::catch_unwind(AssertUnwindSafe(|| {
                    serve(its, &filters, confinement.landlock, give_up)
                }));
                exit_process(if matches!(served, Ok(Ok(()))) {
                    0
                } else {
                    EXIT_UNCONFINED
                })
            }
            _ => Ok(Arc::new(Self {
                control: Mutex::new(Some(ours)),
            })),
        }
    }

    /// Registers the socket at `path` as a destination.
    ///
    /// # Errors
    /// Returns the same errors as [`PrivilegedDirectory::of`], or an error if the broker has
    /// exited.
    pub fn add(self: &Arc<Self>, path: &Path) -> io::Result<SocketDestination> {
        // The listener may be replaced, so the destination is identified by name.
        self.name(BrokerOperation::AddExact, paths::resolve_socket(path)?)
    }

    /// Registers a set of sockets as a destination. The path of each socket consists of `path`, an
    /// underscore and a port.
    ///
    /// # Errors
    /// Returns the same errors as [`SocketBroker::add`].
    pub fn add_numbered(self: &Arc<Self>, path: &Path) -> io::Result<SocketDestination> {
        self.name(BrokerOperation::AddNumbered, PrivilegedDirectory::of(path)?)
    }

    /// Registers the socket at `path` for removal when the VM exits. The broker removes the file at
    /// `path` only if it is still the same file.
    ///
    /// # Errors
    /// Returns the same errors as [`SocketBroker::add`], and [`ErrorKind::PermissionDenied`] if the
    /// broker, which has no capabilities, may not remove files in the directory.
    pub fn remove_at_end(self: &Arc<Self>, path: &Path) -> io::Result<()> {
        self.name(BrokerOperation::RemoveAtEnd, PrivilegedDirectory::of(path)?)
            .map(drop)
    }

    fn name(
        self: &Arc<Self>,
        operation: BrokerOperation,
        (directory, name): (PrivilegedDirectory, OsString),
    ) -> io::Result<SocketDestination> {
        if name.len() > MAX_NAME {
            let why = format!("a socket's file name has at most {MAX_NAME} bytes here; choose a shorter one");
            return Err(io::Error::new(ErrorKind::InvalidInput, why));
        }
        let request = BrokerRequest {
            operation,
            destination: 0,
            port: 0,
            name,
        };
        let (index, _) = self.request(&request, Some(&directory))?;
        Ok(SocketDestination {
            broker: self.clone(),
            index: u16::try_from(index).map_err(io::Error::other)?,
        })
    }

    /// Ends the registration of names and applies the broker's filter. Call this before the guest
    /// runs.
    ///
    /// # Errors
    /// Returns an error if the broker has exited or cannot be confined.
    pub fn seal(&self) -> io::Result<()> {
        let request = BrokerRequest {
            operation: BrokerOperation::Seal,
            destination: 0,
            port: 0,
            name: OsString::new(),
        };
        self.request(&request, None).map(drop)
    }

    /// Stops the broker and waits until it has removed the VM's sockets.
    pub fn finish(&self) {
        let control = self.control.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut control) = control
            && control.shutdown(Shutdown::Write).is_ok()
        {
            // The read returns at end of file, or after the timeout if the broker has been stopped
            // by a signal.
            let _ = control.read(&mut [0]);
        }
    }

    fn request(
        &self,
        request: &BrokerRequest,
        along: Option<&PrivilegedDirectory>,
    ) -> io::Result<(i32, Option<OwnedFd>)> {
        let mut control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        let stream = control.as_mut().ok_or_else(|| {
            io::Error::new(
                ErrorKind::NotConnected,
                "the process that connects to sockets has ended; restart the VM",
            )
        })?;
        match exchange(stream, request, along) {
            Ok((number, socket)) if number >= 0 => Ok((number, socket)),
            Ok((errno, _)) => Err(io::Error::from_raw_os_error(-errno)),
            Err(e) => {
                // Close the connection, because a late answer would be mistaken for the answer to
                // the next request.
                *control = None;
                Err(e)
            }
        }
    }
}

impl Drop for SocketBroker {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Sends a request to the broker. Returns the number in the response, which is negative for an
/// error, and the socket that the broker has passed, if any.
fn exchange(
    stream: &mut UnixStream,
    request: &BrokerRequest,
    along: Option<&PrivilegedDirectory>,
) -> io::Result<(i32, Option<OwnedFd>)> {
    let bytes = request.to_bytes();
    let sent = match along {
        Some(directory) => stream
            .send_with_fd(&bytes[..], directory.fd().as_raw_fd())
            .map_err(|e| io::Error::from_raw_os_error(e.errno()))?,
        None => 0,
    };
    stream.write_all(&bytes[sent..])?;
    let mut answer = [0; 4];
    let socket = receive(stream, &mut answer)?.ok_or(ErrorKind::UnexpectedEof)?;
    Ok((i32::from_le_bytes(answer), socket))
}

/// Reads `bytes.len()` bytes and returns the passed descriptor, if any. Returns `None` if the peer
/// has closed the connection.
fn receive(stream: &mut UnixStream, bytes: &mut [u8]) -> io::Result<Option<Option<OwnedFd>>> {
    let (count, file) = loop {
        match stream.recv_with_fd(bytes) {
            Ok(received) => break received,
            Err(e) if e.errno() == libc::EINTR => {}
            Err(e) => return Err(io::Error::from_raw_os_error(e.errno())),
        }
    };
    if count == 0 {
        return Ok(None);
    }
    stream.read_exact(bytes.get_mut(count..).unwrap_or_default())?;
    Ok(Some(file.map(OwnedFd::from)))
}

// ---------------------------------------------------------------- broker side

fn filters(mode: SeccompMode) -> Result<Vec<BpfProgram>, seccompiler::BackendError> {
    match mode {
        SeccompMode::Off => Ok(Vec::new()),
        // The broker has no handler that could log a violation.
        SeccompMode::On => Ok(vec![
            filter::refuse(&lists::refused_to_workers())?,
            filter::compile(&lists::of_socket_broker(), SeccompAction::KillProcess)?,
        ]),
        SeccompMode::Log => Ok(vec![filter::compile(
            &lists::of_socket_broker(),
            SeccompAction::Log,
        )?]),
    }
}

/// A socket, given by its directory and its file name.
struct NamedSocket {
    directory: OwnedFd,
    name: OsString,
}

impl NamedSocket {
    /// Opens the socket file with a descriptor that only refers to its path, and checks that the
    /// file is a socket.
    fn open_socket_path(&self, name: &OsStr) -> io::Result<OwnedFd> {
        let file = openat(&self.directory, name, lists::PATH_ONLY, Mode::empty())?;
        match FileType::from_raw_mode(fstat(&file)?.st_mode) {
            FileType::Socket => Ok(file),
            _ => Err(Errno::CONNREFUSED.into()),
        }
    }

    fn identity(&self) -> io::Result<(u64, u64)> {
        let meta = fstat(self.open_socket_path(&self.name)?)?;
        Ok((meta.st_dev, meta.st_ino))
    }
}

/// Sockets that the VM has registered.
#[derive(Default)]
struct RegisteredSockets {
    /// Registered destinations. The second element is `true` for a set of sockets, whose file names
    /// end with an underscore and a port.
    destinations: Vec<(NamedSocket, bool)>,
    /// The VM's own sockets, which are removed when it exits, each with its device and inode
    /// number.
    own: Vec<(NamedSocket, (u64, u64))>,
}

fn serve(
    control: UnixStream,
    filters: &[BpfProgram],
    landlock: bool,
    give_up: fn() -> bool,
) -> io::Result<()> {
    // SAFETY: the calls pass integers and a string that outlives them. Signals that terminate a VM
    // are ignored because the VM's exit also ends this process, and terminal signals must not reach
    // it.
    unsafe {
        libc::prctl(libc::PR_SET_NAME, NAME.as_ptr());
        libc::setpgid(0, 0);
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
            libc::signal(signal, libc::SIG_IGN);
        }
    }
    let mut control = UnixStream::from(keep_only_descriptor(control.into())?);
    trim_heap();
    if !give_up() {
        return Err(io::Error::other("rights that stay"));
    }
    let mut names = RegisteredSockets::default();
    let mut sealed = false;
    let served = loop {
        let mut bytes = [0; BrokerRequest::BYTES];
        let along = match receive(&mut control, &mut bytes) {
            Ok(Some(along)) => along,
            Ok(None) => break Ok(()),
            Err(e) => break Err(e),
        };
        let answer = match BrokerRequest::from_bytes(&bytes) {
            Some(request) if request.operation == BrokerOperation::Seal && !sealed => {
                sealed = true;
                confine(&names, filters, landlock).map(|()| (0, None))
            }
            Some(request) if request.operation == BrokerOperation::Connect => {
                names.connect(&request).map(|socket| (0, Some(socket)))
            }
            Some(request) if !sealed => names.add(request, along).map(|index| (index, None)),
            _ => Err(Errno::PERM.into()),
        };
        if let Err(e) = reply(&mut control, answer) {
            break Err(e);
        }
    };
    for (named, identity) in names.own {
        if named.identity().is_ok_and(|now| now == identity) {
            // A failed removal is harmless, because the next VM replaces a socket without a
            // listener.
            let _ = unlinkat(&named.directory, &named.name, AtFlags::empty());
        }
    }
    served
}

fn confine(names: &RegisteredSockets, filters: &[BpfProgram], landlock: bool) -> io::Result<()> {
    if landlock {
        let own: Vec<_> = names
            .own
            .iter()
            .map(|(named, _)| named.directory.as_fd())
            .collect();
        files::only_removal(&own).map_err(io::Error::other)?;
    }
    for filter in filters {
        apply_filter(filter).map_err(io::Error::other)?;
    }
    Ok(())
}

fn reply(control: &mut UnixStream, answer: io::Result<(i32, Option<OwnedFd>)>) -> io::Result<()> {
    let (number, socket) = match answer {
        Ok(answer) => answer,
        Err(e) => (-e.raw_os_error().unwrap_or(libc::EIO), None),
    };
    let bytes = number.to_le_bytes();
    let sent = match socket {
        Some(socket) => control
            .send_with_fd(&bytes[..], socket.as_raw_fd())
            .map_err(|e| io::Error::from_raw_os_error(e.errno()))?,
        None => 0,
    };
    control.write_all(&bytes[sent..])
}

impl RegisteredSockets {
    /// Registers a destination and returns its number.
    fn add(&mut self, request: BrokerRequest, directory: Option<OwnedFd>) -> io::Result<i32> {
        let named = NamedSocket {
            directory: directory.ok_or(Errno::BADF)?,
            name: request.name,
        };
        if request.operation == BrokerOperation::RemoveAtEnd {
            let identity = named.identity()?;
            let needed = Access::WRITE_OK | Access::EXEC_OK;
            accessat(&named.directory, ".", needed, AtFlags::empty())?;
            self.own.push((named, identity));
            return Ok(0);
        }
        let numbered = request.operation == BrokerOperation::AddNumbered;
        self.destinations.push((named, numbered));
        i32::try_from(self.destinations.len() - 1).map_err(io::Error::other)
    }

    fn connect(&self, request: &BrokerRequest) -> io::Result<OwnedFd> {
        let destination = self.destinations.get(usize::from(request.destination));
        let (named, numbered) = destination.ok_or(Errno::NOENT)?;
        let mut name = named.name.clone();
        if *numbered {
            name.push(format!("_{}", request.port));
        }
        // Symbolic links are rejected because they may lead to sockets of other users.
        let file = named.open_socket_path(&name)?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        connect(Path::new(&path))
    }
}

/// Connects to the socket at `path`. Fails if the listener's queue is full.
fn connect(path: &Path) -> io::Result<OwnedFd> {
    let (address, length) = paths::address(path)?;
    // SAFETY: the call passes only integers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, lists::SOCKET_TYPE, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so the descriptor is open and not owned elsewhere.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: the address outlives the call and is at least `length` bytes long, and the descriptor
    // is open.
    if unsafe { libc::connect(fd, (&raw const address).cast(), length) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_survives_encoding() {
        for (operation, name) in [
            (BrokerOperation::AddExact, "back-end.sock"),
            (BrokerOperation::AddNumbered, ""),
            (BrokerOperation::RemoveAtEnd, "x"),
            (BrokerOperation::Seal, ""),
            (BrokerOperation::Connect, ""),
        ] {
            let request = BrokerRequest {
                operation,
                destination: 515,
                port: u32::MAX - 1,
                name: name.into(),
            };
            let again = BrokerRequest::from_bytes(&request.to_bytes()).unwrap();
            assert_eq!(
                (again.operation, again.destination, again.port, again.name),
                (operation, 515, u32::MAX - 1, OsString::from(name))
            );
        }
    }

    #[test]
    fn malformed_request_bytes_are_rejected() {
        let mut bytes = [0; BrokerRequest::BYTES];
        assert!(BrokerRequest::from_bytes(&bytes).is_none());
        bytes[0] = b'C';
        assert!(BrokerRequest::from_bytes(&bytes).is_some());
        bytes[1] = u8::try_from(MAX_NAME + 1).unwrap();
        assert!(
            BrokerRequest::from_bytes(&bytes).is_none(),
            "a name longer than the message"
        );
    }
}
