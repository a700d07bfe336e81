//! Pseudo-terminals.
#![expect(unsafe_code, reason = "ioctl(2), and a child that leads a session")]

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};

/// Returns the master and the slave of a new pseudo-terminal. In contrast to openpty(3),
/// concurrently started children do not inherit the descriptors, which would keep the terminal
/// open.
pub fn pseudo_terminal() -> (OwnedFd, OwnedFd) {
    let master = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NOCTTY)
        .open("/dev/ptmx")
        .unwrap();
    let unlocked: libc::c_int = 0;
    // SAFETY: the argument points to a live integer, which the call reads.
    let result = unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCSPTLCK, &raw const unlocked) };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
    let flags = libc::O_RDWR | libc::O_NOCTTY | libc::O_CLOEXEC;
    // SAFETY: the argument is an integer.
    let slave = unsafe { libc::ioctl(master.as_raw_fd(), libc::TIOCGPTPEER, flags) };
    assert!(slave >= 0, "{}", io::Error::last_os_error());
    // SAFETY: the call returned a new descriptor, which nothing else owns.
    (master.into(), unsafe { OwnedFd::from_raw_fd(slave) })
}

/// Runs a shell script as the leader of a session on a new terminal. Returns the shell and the
/// master.
pub fn shell_on_terminal(script: &str, runtime: &Path) -> (Child, File) {
    let (master, slave) = pseudo_terminal();
    let mut shell = Command::new("/bin/sh");
    shell
        .args(["-c", script])
        .env("XDG_RUNTIME_DIR", runtime)
        .stdin(slave.try_clone().unwrap())
        .stdout(slave.try_clone().unwrap())
        .stderr(slave);
    let own_terminal = || {
        // SAFETY: both calls take integers. The process leads no group, so it can lead a session.
        if unsafe { libc::setsid() < 0 || libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 } {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    };
    // SAFETY: between fork and exec, the closure only makes system calls and allocates nothing.
    unsafe { shell.pre_exec(own_terminal) };
    (shell.spawn().unwrap(), File::from(master))
}

/// Sets the size of the terminal's window, in characters.
pub fn set_window_size(terminal: &OwnedFd, rows: u16, columns: u16) {
    let size = libc::winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    // SAFETY: the argument points to a live structure, which the call reads.
    let result = unsafe { libc::ioctl(terminal.as_raw_fd(), libc::TIOCSWINSZ, &raw const size) };
    assert_eq!(result, 0, "{}", io::Error::last_os_error());
}

/// The terminal settings that raw mode changes: input, output, control and local flags.
pub type Settings = (u32, u32, u32, u32);

/// Returns the settings of the terminal.
pub fn settings(terminal: &OwnedFd) -> Settings {
    // SAFETY: termios is a plain C struct for which all zeroes is a valid value.
    let mut t: libc::termios = unsafe { std::mem::zeroed() };
    // SAFETY: `t` is a valid, writable termios during the call.
    assert_eq!(unsafe { libc::tcgetattr(terminal.as_raw_fd(), &mut t) }, 0);
    (t.c_iflag, t.c_oflag, t.c_cflag, t.c_lflag)
}
