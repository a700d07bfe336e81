//! Pseudoterminal of a command that runs in the guest.
#![expect(
    unsafe_code,
    reason = "ioctls of terminals, and what a child does between fork and exec"
)]

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use nix::fcntl::OFlag;
use nix::pty::{Winsize, grantpt, posix_openpt, unlockpt};

use crate::request::Terminal;

/// Makes a new terminal the controlling terminal of `command` and connects the three standard
/// streams of the command to it. Returns the master end of the terminal.
///
/// # Errors
/// Returns an error if no terminal is available.
pub fn attach(command: &mut Command, size: Terminal) -> io::Result<OwnedFd> {
    let (master, slave) = open()?;
    resize(&master, size);
    command
        .stdin(Stdio::from(slave.try_clone()?))
        .stdout(Stdio::from(slave.try_clone()?))
        .stderr(Stdio::from(slave));
    // SAFETY: between fork and exec the child makes two system calls, which are async-signal-safe
    // (signal-safety(7)), and accesses no memory except its own stack.
    unsafe {
        command.pre_exec(|| {
            if libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        });
    }
    Ok(master)
}

/// Opens a new terminal and returns its master and slave ends. Both have the close-on-exec flag,
/// which openpty(3) does not set. A command that inherits the master end would prevent its own
/// terminal from being hung up.
fn open() -> io::Result<(OwnedFd, OwnedFd)> {
    let flags = OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let master = posix_openpt(flags)?;
    grantpt(&master)?;
    unlockpt(&master)?;
    let master = OwnedFd::from(master);
    // SAFETY: TIOCGPTPEER takes flags of open(2) by value, and accesses no memory (ioctl_tty(2)).
    let slave = unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags.bits()) };
    if slave < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has just opened this descriptor, and no other code uses it.
    Ok((master, unsafe { OwnedFd::from_raw_fd(slave) }))
}

/// Sets the window size of the terminal.
pub fn resize(master: impl AsFd, size: Terminal) {
    let size = Winsize {
        ws_row: size.rows,
        ws_col: size.columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: TIOCSWINSZ reads one winsize, which outlives the call.
    let _ = unsafe { libc::ioctl(master.as_fd().as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
}
