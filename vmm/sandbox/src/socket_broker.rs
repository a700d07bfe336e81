//! A process that connects to Unix sockets for the VM, and removes the VM's own sockets when the VM ends.
//!
//! No thread of a running VM may create a socket, connect or remove a file: the kernel's filters do not see
//! paths, and landlock does not restrict connections. Who took a thread over could otherwise operate the
//! neighbours of the VM. So [`SocketBroker::start`] forks a process before anything of the guest is there.
//! The VM names the destinations while it starts; [`SocketBroker::seal`] ends that. From then on the broker
//! reads requests of a fixed size that carry two numbers: which destination, and which port of it. It never
//! reads a path, and nothing of the guest's.
//!
//! The broker outlives the VM by a moment, however the VM ends: its end of the socket tells.
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

use rustix::fs::{AtFlags, FileType, Mode, fstat, openat, unlinkat};
use rustix::io::Errno;
use seccompiler::{BpfProgram, SeccompAction, apply_filter};
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

use crate::paths::{self, Directory};
use crate::service::{UNFIT, give_back_what_is_free, leave, only_descriptor};
use crate::start::{Mode as FilterMode, SandboxError};
use crate::{Confinement, ThreadKind, WorkersError, files, filter, lists};

/// Name of the process, in `ps`.
const NAME: &std::ffi::CStr = c"socket-broker";
/// How long the VM waits for an answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// Maximum length of the name of a socket, in bytes (unix(7), `sun_path`).
const MAX_NAME: usize = 107;

/// What the VM asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Operation {
    /// A destination with exactly this name; its directory comes along.
    AddExact = b'E',
    /// Destinations with this name, an underscore and a port.
    AddNumbered = b'N',
    /// A socket of the VM's own, to be removed at its end.
    RemoveAtEnd = b'R',
    /// No more names.
    Seal = b'S',
    /// A connection.
    Connect = b'C',
}

impl Operation {
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

/// A message of the VM. Names are there before the seal only.
struct Request {
    operation: Operation,
    destination: u16,
    port: u32,
    name: OsString,
}

impl Request {
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

    /// `None`: not a message.
    fn from_bytes(bytes: &[u8; Self::BYTES]) -> Option<Self> {
        let name = bytes[8..].get(..bytes[1].into())?;
        Some(Self {
            operation: Operation::from_byte(bytes[0])?,
            destination: u16::from_le_bytes([bytes[2], bytes[3]]),
            port: u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]),
            name: OsString::from_vec(name.to_vec()),
        })
    }
}

// ---------------------------------------------------------------- the VM's side

/// The VM's end of the broker. The broker ends with it.
#[derive(Debug)]
pub struct SocketBroker {
    /// `None`: the broker has ended, or does not answer.
    control: Mutex<Option<UnixStream>>,
}

/// A Unix socket, or the Unix sockets of all ports, that the broker connects to.
#[derive(Clone, Debug)]
pub struct Destination {
    broker: Arc<SocketBroker>,
    index: u16,
}

impl Destination {
    /// A connection to the socket of `port`; one without numbers ignores the port. The socket does not
    /// block. A name that is a symbolic link is refused.
    ///
    /// # Errors
    /// Those of `connect(2)`; [`ErrorKind::NotConnected`] if the broker has ended.
    pub fn connect(&self, port: u32) -> io::Result<UnixStream> {
        let request = Request {
            operation: Operation::Connect,
            destination: self.index,
            port,
            name: OsString::new(),
        };
        let (_, socket) = self.broker.ask(&request, None)?;
        socket.map(UnixStream::from).ok_or(ErrorKind::InvalidData.into())
    }
}

impl SocketBroker {
    /// Starts the broker: a copy of this process, in which no thread but the calling one may exist.
    /// `give_up` gives up its rights.
    ///
    /// # Errors
    /// [`WorkersError`].
    pub fn start(confinement: Confinement, give_up: fn() -> bool) -> Result<Arc<Self>, WorkersError> {
        let os = |what| move |e| WorkersError::Os(what, e);
        let (ours, its) = UnixStream::pair().map_err(os("socketpair"))?;
        ours.set_read_timeout(Some(ANSWER_LIMIT))
            .and_then(|()| ours.set_write_timeout(Some(ANSWER_LIMIT)))
            .map_err(os("setsockopt"))?;
        let filters = filters(confinement.seccomp)
            .map_err(|e| WorkersError::Sandbox(SandboxError::Compile(ThreadKind::Socket, e)))?;
        // SAFETY: no other thread exists, as the documentation demands, so the child has all that it needs
        // and no lock is held by another.
        match unsafe { libc::fork() } {
            -1 => Err(os("fork")(io::Error::last_os_error())),
            0 => {
                let served = panic::catch_unwind(AssertUnwindSafe(|| {
                    serve(its, &filters, confinement.landlock, give_up)
                }));
                leave(if matches!(served, Ok(Ok(()))) { 0 } else { UNFIT })
            }
            _ => Ok(Arc::new(Self {
                control: Mutex::new(Some(ours)),
            })),
        }
    }

    /// Adds the socket at `path` as a destination.
    ///
    /// # Errors
    /// Those of [`Directory::of`]; the broker has ended.
    pub fn add(self: &Arc<Self>, path: &Path) -> io::Result<Destination> {
        // Who listens comes and goes: it is the name that counts.
        let whole = std::fs::canonicalize(path);
        self.name(Operation::AddExact, whole.as_deref().unwrap_or(path))
    }

    /// Adds the sockets whose path is `path`, an underscore and a port.
    ///
    /// # Errors
    /// As [`SocketBroker::add`].
    pub fn add_numbered(self: &Arc<Self>, path: &Path) -> io::Result<Destination> {
        self.name(Operation::AddNumbered, path)
    }

    /// Has the socket at `path` removed when the VM ends, if it is the same file then.
    ///
    /// # Errors
    /// As [`SocketBroker::add`].
    pub fn remove_at_end(self: &Arc<Self>, path: &Path) -> io::Result<()> {
        self.name(Operation::RemoveAtEnd, path).map(drop)
    }

    fn name(self: &Arc<Self>, operation: Operation, path: &Path) -> io::Result<Destination> {
        let (directory, name) = Directory::of(path)?;
        if name.len() > MAX_NAME {
            let why = format!("a socket's file name has at most {MAX_NAME} bytes here; choose a shorter one");
            return Err(io::Error::new(ErrorKind::InvalidInput, why));
        }
        let request = Request {
            operation,
            destination: 0,
            port: 0,
            name,
        };
        let (index, _) = self.ask(&request, Some(&directory))?;
        Ok(Destination {
            broker: self.clone(),
            index: u16::try_from(index).map_err(io::Error::other)?,
        })
    }

    /// The broker takes no names any more, and its filter. To be called before the guest runs.
    ///
    /// # Errors
    /// The broker has ended, or cannot be confined.
    pub fn seal(&self) -> io::Result<()> {
        let request = Request {
            operation: Operation::Seal,
            destination: 0,
            port: 0,
            name: OsString::new(),
        };
        self.ask(&request, None).map(drop)
    }

    /// Ends the broker, and waits until it has removed the VM's sockets.
    pub fn finish(&self) {
        let control = self.control.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(mut control) = control
            && control.shutdown(Shutdown::Write).is_ok()
        {
            // The end, or a broker that is stopped.
            let _ = control.read(&mut [0]);
        }
    }

    fn ask(&self, request: &Request, along: Option<&Directory>) -> io::Result<(i32, Option<OwnedFd>)> {
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
                // A late answer would be taken for the answer to the next request.
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

/// Sends a request, and returns the number in the answer, negative for an error, and the socket with it.
fn exchange(
    stream: &mut UnixStream,
    request: &Request,
    along: Option<&Directory>,
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

/// Fills `bytes`, and returns the descriptor that came along. `None`: the other end is closed.
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

// ---------------------------------------------------------------- the broker's side

fn filters(mode: FilterMode) -> Result<Vec<BpfProgram>, seccompiler::BackendError> {
    match mode {
        FilterMode::Off => Ok(Vec::new()),
        // There is nobody to write a line.
        FilterMode::On => Ok(vec![
            filter::refuse(&lists::refused_to_workers())?,
            filter::compile(&lists::of_socket_broker(), SeccompAction::KillProcess)?,
        ]),
        FilterMode::Log => Ok(vec![filter::compile(
            &lists::of_socket_broker(),
            SeccompAction::Log,
        )?]),
    }
}

/// A name in a directory.
struct Named {
    directory: OwnedFd,
    name: OsString,
}

impl Named {
    /// Opens the file to look at it, and checks that it is a socket.
    fn look(&self, name: &OsStr) -> io::Result<OwnedFd> {
        let file = openat(&self.directory, name, lists::LOOK, Mode::empty())?;
        match FileType::from_raw_mode(fstat(&file)?.st_mode) {
            FileType::Socket => Ok(file),
            _ => Err(Errno::CONNREFUSED.into()),
        }
    }

    fn identity(&self) -> io::Result<(u64, u64)> {
        let meta = fstat(self.look(&self.name)?)?;
        Ok((meta.st_dev, meta.st_ino))
    }
}

/// What the VM has named.
#[derive(Default)]
struct Names {
    /// With whether the port is part of the name.
    destinations: Vec<(Named, bool)>,
    /// With which files they are.
    own: Vec<(Named, (u64, u64))>,
}

fn serve(
    control: UnixStream,
    filters: &[BpfProgram],
    landlock: bool,
    give_up: fn() -> bool,
) -> io::Result<()> {
    // SAFETY: the calls take numbers and a string that lives. Signals that end a VM are for the VM, whose end
    // is this process's too; keys of the terminal are not for it.
    unsafe {
        libc::prctl(libc::PR_SET_NAME, NAME.as_ptr());
        libc::setpgid(0, 0);
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
            libc::signal(signal, libc::SIG_IGN);
        }
    }
    let mut control = UnixStream::from(only_descriptor(control.into())?);
    give_back_what_is_free();
    if !give_up() {
        return Err(io::Error::other("rights that stay"));
    }
    let mut names = Names::default();
    let mut sealed = false;
    let served = loop {
        let mut bytes = [0; Request::BYTES];
        let along = match receive(&mut control, &mut bytes) {
            Ok(Some(along)) => along,
            Ok(None) => break Ok(()),
            Err(e) => break Err(e),
        };
        let answer = match Request::from_bytes(&bytes) {
            Some(request) if request.operation == Operation::Seal && !sealed => {
                sealed = true;
                confine(&names, filters, landlock).map(|()| (0, None))
            }
            Some(request) if request.operation == Operation::Connect => {
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
            // Nobody listens there, so the next VM replaces what stays.
            let _ = unlinkat(&named.directory, &named.name, AtFlags::empty());
        }
    }
    served
}

fn confine(names: &Names, filters: &[BpfProgram], landlock: bool) -> io::Result<()> {
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

impl Names {
    /// Returns the number of a destination.
    fn add(&mut self, request: Request, directory: Option<OwnedFd>) -> io::Result<i32> {
        let named = Named {
            directory: directory.ok_or(Errno::BADF)?,
            name: request.name,
        };
        if request.operation == Operation::RemoveAtEnd {
            let identity = named.identity()?;
            self.own.push((named, identity));
            return Ok(0);
        }
        let numbered = request.operation == Operation::AddNumbered;
        self.destinations.push((named, numbered));
        i32::try_from(self.destinations.len() - 1).map_err(io::Error::other)
    }

    fn connect(&self, request: &Request) -> io::Result<OwnedFd> {
        let destination = self.destinations.get(usize::from(request.destination));
        let (named, numbered) = destination.ok_or(Errno::NOENT)?;
        let mut name = named.name.clone();
        if *numbered {
            name.push(format!("_{}", request.port));
        }
        // A link would lead to a socket of somebody else's.
        let file = named.look(&name)?;
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        connect(Path::new(&path))
    }
}

/// A connection to the socket at `path`, without waiting for room in its queue.
fn connect(path: &Path) -> io::Result<OwnedFd> {
    let (address, length) = paths::address(path)?;
    // SAFETY: the call takes numbers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, lists::SOCKET_TYPE, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so this is a descriptor that nobody else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: the address lives for the call and is at least as long as is said; the descriptor is open.
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
            (Operation::AddExact, "back-end.sock"),
            (Operation::AddNumbered, ""),
            (Operation::RemoveAtEnd, "x"),
            (Operation::Seal, ""),
            (Operation::Connect, ""),
        ] {
            let request = Request {
                operation,
                destination: 515,
                port: u32::MAX - 1,
                name: name.into(),
            };
            let again = Request::from_bytes(&request.to_bytes()).unwrap();
            assert_eq!(
                (again.operation, again.destination, again.port, again.name),
                (operation, 515, u32::MAX - 1, OsString::from(name))
            );
        }
    }

    #[test]
    fn bytes_that_are_not_a_request_are_refused() {
        let mut bytes = [0; Request::BYTES];
        assert!(Request::from_bytes(&bytes).is_none());
        bytes[0] = b'C';
        assert!(Request::from_bytes(&bytes).is_some());
        bytes[1] = u8::try_from(MAX_NAME + 1).unwrap();
        assert!(
            Request::from_bytes(&bytes).is_none(),
            "a name longer than the message"
        );
    }
}
