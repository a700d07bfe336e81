//! A VM without a terminal: in a shell's background, as a daemon of its own, under a service manager.
#![expect(unsafe_code, reason = "fork(2), setsid(2), dup2(2), signal(2)")]

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::Path;

use crate::exit::ExitStatus;

/// What the parent is told when the VM runs.
const RUNS: u8 = b'R';

/// Why there is no daemon.
#[derive(Debug, thiserror::Error)]
#[error("--daemonize: {0} failed")]
pub struct DaemonError(&'static str, #[source] io::Error);

/// A terminal's job control must not stop the VM: writing to a terminal from the background is allowed
/// whatever `stty tostop` says, and reading from it fails instead of stopping the process. The terminal
/// is then left as it is, and the guest has no input.
pub fn survive_job_control() {
    // SAFETY: ignoring these signals runs no code of ours. SIGTTIN and SIGTTOU have no other use here.
    unsafe {
        libc::signal(libc::SIGTTIN, libc::SIG_IGN);
        libc::signal(libc::SIGTTOU, libc::SIG_IGN);
    }
}

/// The process that becomes the daemon, until its VM runs.
pub struct Starting {
    tell: PipeWriter,
    /// `/dev/null`. When the VM runs it is too late to open it: landlock keeps the process from such files.
    null: File,
}

/// Goes on in a process of its own, in a session of its own. The first process waits until the VM runs,
/// or does not, and ends with 0 or with the other's exit status: this returns in the second process only.
///
/// No other thread may exist yet.
///
/// # Errors
/// [`DaemonError`].
pub fn daemonize() -> Result<Starting, DaemonError> {
    let failed = |what| move |e| DaemonError(what, e);
    let (hear, tell) = io::pipe().map_err(failed("pipe"))?;
    // SAFETY: the process has one thread, so the child has all that it needs, and no lock is held by another.
    match unsafe { libc::fork() } {
        -1 => Err(DaemonError("fork", io::Error::last_os_error())),
        0 => {
            drop(hear);
            // SAFETY: the call takes nothing. The child leads no process group, so it does not fail.
            unsafe { libc::setsid() };
            let null = File::options().read(true).write(true).open("/dev/null");
            let null = null.map_err(failed("opening /dev/null"))?;
            replace(libc::STDIN_FILENO, &null).map_err(failed("dup2"))?;
            Ok(Starting { tell, null })
        }
        child => {
            drop(tell);
            std::process::exit(wait_for(child, hear))
        }
    }
}

/// The exit status of the first process.
fn wait_for(child: libc::pid_t, mut hear: PipeReader) -> i32 {
    let mut word = [0];
    if matches!(hear.read(&mut word), Ok(1)) && word[0] == RUNS {
        return 0;
    }
    let mut status = 0;
    // SAFETY: `status` is a valid place for the length of the call.
    let ended = unsafe { libc::waitpid(child, &mut status, 0) };
    if ended == child && libc::WIFEXITED(status) {
        return libc::WEXITSTATUS(status);
    }
    ExitStatus::Internal.code().into()
}

/// `null` in the place of a standard stream.
fn replace(stream: i32, null: &File) -> io::Result<()> {
    // SAFETY: both are descriptors of this process; a standard stream's owner is the process.
    if unsafe { libc::dup2(null.as_raw_fd(), stream) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

impl Starting {
    /// Where the streams of the daemon lead.
    pub fn null(&self) -> &File {
        &self.null
    }

    /// The VM runs: the first process ends with 0, and the standard streams are let go.
    ///
    /// # Errors
    /// [`DaemonError`].
    pub fn runs(mut self) -> Result<(), DaemonError> {
        for stream in [libc::STDOUT_FILENO, libc::STDERR_FILENO] {
            replace(stream, &self.null).map_err(|e| DaemonError("dup2", e))?;
        }
        // Nobody hears it if the first process was killed: the VM runs all the same.
        let _ = self.tell.write_all(&[RUNS]);
        Ok(())
    }
}

/// Variable with the address of the service manager's socket (sd_notify(3)).
const NOTIFY_SOCKET: &str = "NOTIFY_SOCKET";

/// The connection to a service manager. It is made before the VM's threads have their filters: afterwards
/// none of them can connect to anything.
#[derive(Debug, Default)]
pub struct ServiceManager(Option<UnixDatagram>);

impl ServiceManager {
    /// Connects to the service manager that started this process, if one did. A failure is logged.
    pub fn connect() -> Self {
        let Some(address) = std::env::var_os(NOTIFY_SOCKET) else {
            return Self(None);
        };
        let connected = address_of(address.as_encoded_bytes()).and_then(|address| {
            let socket = UnixDatagram::unbound()?;
            socket.connect_addr(&address)?;
            Ok(socket)
        });
        Self(connected.inspect_err(|e| log::warn!("NOTIFY_SOCKET: {e}")).ok())
    }

    /// Tells that the VM runs.
    pub fn ready(&self) {
        self.notify(&format!("READY=1\nMAINPID={}\n", std::process::id()));
    }

    /// Tells that the VM is ending.
    pub fn stopping(&self) {
        self.notify("STOPPING=1\n");
    }

    fn notify(&self, state: &str) {
        if let Some(Err(e)) = self.0.as_ref().map(|socket| socket.send(state.as_bytes())) {
            log::warn!("NOTIFY_SOCKET: {e}");
        }
    }
}

/// The address that `NOTIFY_SOCKET` names: an absolute path, or an abstract name after `@`.
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

/// A file that reaches the limit of file sizes fails with an error, instead of ending the VM (SIGXFSZ).
pub fn survive_file_size_limit() {
    // SAFETY: ignoring the signal runs no code of ours; write(2) returns EFBIG then.
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
