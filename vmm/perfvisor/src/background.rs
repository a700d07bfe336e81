//! A VM without a terminal: in a shell's background, as a daemon of its own, under a service manager.
#![expect(unsafe_code, reason = "fork(2), setsid(2), dup2(2), signal(2)")]

use std::fs::File;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::os::fd::AsRawFd;

use sd_notify::NotifyState;

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

/// Tells a service manager, if there is one, that the VM runs.
pub fn tell_ready() {
    notify(&[NotifyState::Ready, NotifyState::MainPid(std::process::id())]);
}

/// Tells it that the VM is ending.
pub fn tell_stopping() {
    notify(&[NotifyState::Stopping]);
}

fn notify(state: &[NotifyState<'_>]) {
    if let Err(e) = sd_notify::notify(state) {
        log::warn!("NOTIFY_SOCKET: {e}");
    }
}
