//! Running a VM without a terminal: as a background job of a shell, as a daemon ([`daemonize`]), or
//! under a service manager ([`ServiceNotifier`]).
#![expect(unsafe_code, reason = "fork(2), setsid(2), dup2(2), signal(2)")]

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;

use operator::exit::ExitStatus;
use sandbox::SupervisorLink;

/// Byte that the daemon writes to its parent when the VM is running.
const VM_RUNNING: u8 = b'R';

/// Error returned when the daemon cannot be started: the failed operation and the operating
/// system's error.
#[derive(Debug, thiserror::Error)]
#[error("--daemonize: {0} failed")]
pub struct DaemonError(&'static str, #[source] io::Error);

/// Ignores SIGTTIN and SIGTTOU, so that a terminal's job control cannot stop the VM.
///
/// In a background process, writes to the terminal then succeed even with `stty tostop`, and reads
/// fail instead of stopping the process. The caller must leave the terminal settings unchanged and
/// give the guest no input.
pub fn survive_job_control() {
    // SAFETY: ignoring these signals runs no code of this process. SIGTTIN and SIGTTOU have no
    // other use here.
    unsafe {
        libc::signal(libc::SIGTTIN, libc::SIG_IGN);
        libc::signal(libc::SIGTTOU, libc::SIG_IGN);
    }
}

/// A daemon process that is not running its VM yet.
pub struct DaemonStartup {
    tell: PipeWriter,
    /// `/dev/null`, opened early because landlock denies access to it once the VM is running.
    null: File,
}

/// Forks, and continues in the child in a new session.
///
/// The parent waits until the VM is running and then exits with 0. If the child exits first, the
/// parent exits with the child's exit status. This function therefore returns only in the child.
/// The process must have a single thread.
///
/// # Errors
/// Returns [`DaemonError`] if a system call fails.
pub fn daemonize() -> Result<DaemonStartup, DaemonError> {
    let failed = |what| move |e| DaemonError(what, e);
    let (hear, tell) = io::pipe().map_err(failed("pipe"))?;
    // SAFETY: the process has one thread, so the child inherits no lock that another thread holds.
    match unsafe { libc::fork() } {
        -1 => Err(DaemonError("fork", io::Error::last_os_error())),
        0 => {
            drop(hear);
            // SAFETY: setsid takes no arguments. The child is no process group leader, so the call
            // cannot fail.
            unsafe { libc::setsid() };
            let null = File::options().read(true).write(true).open("/dev/null");
            let null = null.map_err(failed("opening /dev/null"))?;
            replace(libc::STDIN_FILENO, &null).map_err(failed("dup2"))?;
            Ok(DaemonStartup { tell, null })
        }
        child => {
            drop(tell);
            std::process::exit(wait_for_child(child, hear))
        }
    }
}

/// Waits until the VM is running or the child exits, and returns the status with which the parent
/// must exit.
fn wait_for_child(child: libc::pid_t, mut hear: PipeReader) -> i32 {
    let mut word = [0];
    if matches!(hear.read(&mut word), Ok(1)) && word[0] == VM_RUNNING {
        return 0;
    }
    let mut status = 0;
    // SAFETY: `status` is valid for writes during the call.
    let ended = unsafe { libc::waitpid(child, &mut status, 0) };
    if ended == child && libc::WIFEXITED(status) {
        return libc::WEXITSTATUS(status);
    }
    ExitStatus::Internal.code().into()
}

/// Redirects a standard stream to `null`.
fn replace(stream: i32, null: &File) -> io::Result<()> {
    // SAFETY: both descriptors are open in this process, which owns its standard streams.
    if unsafe { libc::dup2(null.as_raw_fd(), stream) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

impl DaemonStartup {
    /// Returns `/dev/null`, to which the daemon's standard streams are redirected.
    pub fn null(&self) -> &File {
        &self.null
    }

    /// Makes the parent exit with 0 and redirects the standard streams to `/dev/null`. Called once
    /// the VM is running.
    ///
    /// # Errors
    /// Returns [`DaemonError`] if a standard stream cannot be redirected.
    pub fn runs(mut self) -> Result<(), DaemonError> {
        for stream in [libc::STDOUT_FILENO, libc::STDERR_FILENO] {
            replace(stream, &self.null).map_err(|e| DaemonError("dup2", e))?;
        }
        // Ignore the error. If the parent was killed, the VM continues.
        let _ = self.tell.write_all(&[VM_RUNNING]);
        Ok(())
    }
}

/// Environment variable with the address of the service manager's socket (sd_notify(3)).
const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";

/// Byte with which a VM reports to its supervisor that it is running. The supervisor forwards the
/// report to the service manager.
const VM_READY: u8 = b'R';
const VM_STOPPING: u8 = b'S';

/// The service manager that started this process, if any.
///
/// Must be created before the VM's threads install their seccomp filters, which forbid connect(2).
#[derive(Debug)]
pub enum ServiceNotifier {
    /// No service manager started this process.
    None,
    /// The socket that is connected to the service manager.
    Direct(UnixDatagram),
    /// A connection to the VM's supervisor. Service managers accept messages only from the process
    /// that they started.
    Supervisor(SupervisorLink),
}

impl ServiceNotifier {
    /// Connects to the service manager that started this process, if any. Logs a failure.
    pub fn connect() -> Self {
        let Some(address) = std::env::var_os(NOTIFY_SOCKET) else {
            return Self::None;
        };
        let connected = address_of(address.as_encoded_bytes()).and_then(|address| {
            let socket = UnixDatagram::unbound()?;
            socket.connect_addr(&address)?;
            Ok(socket)
        });
        connected
            .inspect_err(|e| log::warn!("NOTIFY_SOCKET: {e}"))
            .map_or(Self::None, Self::Direct)
    }

    /// Returns the socket that is connected to the service manager, or `None` if this process has
    /// no direct connection.
    pub fn socket(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Self::Direct(socket) => Some(socket.as_fd()),
            Self::None | Self::Supervisor(_) => None,
        }
    }

    /// Notifies the service manager that the VM is running.
    pub fn ready(&self) {
        self.report(VM_READY);
    }

    /// Notifies the service manager that the VM is shutting down.
    pub fn stopping(&self) {
        self.report(VM_STOPPING);
    }

    fn report(&self, report: u8) {
        if let Err(e) = self.pass(report) {
            log::warn!("NOTIFY_SOCKET: {e}");
        }
    }

    /// Forwards a report of the VM, such as `VM_READY`, to the service manager. Unknown reports
    /// have no effect.
    ///
    /// # Errors
    /// Returns the error of `write(2)`.
    pub fn pass(&self, report: u8) -> io::Result<()> {
        let socket = match self {
            Self::None => return Ok(()),
            Self::Supervisor(link) => return link.report(report),
            Self::Direct(socket) => socket,
        };
        let state = match report {
            VM_READY => format!("READY=1\nMAINPID={}\n", std::process::id()),
            VM_STOPPING => "STOPPING=1\n".into(),
            _ => return Ok(()),
        };
        // Use write(2), because the supervisor's filter does not permit send(2).
        rustix::io::write(socket, state.as_bytes())?;
        Ok(())
    }
}

/// Parses the value of `NOTIFY_SOCKET`, which is an absolute path or an abstract name after `@`.
fn address_of(text: &[u8]) -> io::Result<SocketAddr> {
    match text {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        [b'/', ..] => SocketAddr::from_pathname(Path::new(OsStr::from_bytes(text))),
        _ => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "not a path and not an abstract name (@NAME)",
        )),
    }
}

/// Ignores SIGXFSZ, so that a write beyond the file size limit fails with EFBIG instead of killing
/// the VM.
pub fn survive_file_size_limit() {
    // SAFETY: ignoring the signal runs no code of this process.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notify_socket_is_a_path_or_an_abstract_name() {
        let path = address_of(b"/run/systemd/notify").unwrap();
        assert_eq!(path.as_pathname(), Some(Path::new("/run/systemd/notify")));
        let name = address_of(b"@notify").unwrap();
        assert_eq!(name.as_abstract_name(), Some(&b"notify"[..]));
        for wrong in [&b""[..], b"notify", b"vsock:2:1"] {
            assert!(address_of(wrong).is_err(), "{wrong:?}");
        }
    }
}
