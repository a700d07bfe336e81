//! Closes inherited descriptors and clears inherited environment variables, as Firecracker's jailer
//! does.
#![expect(
    unsafe_code,
    reason = "close(2) of inherited descriptors, and changes of the environment and of its first copy"
)]

use std::env;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::fd::{BorrowedFd, RawFd};
use std::os::unix::ffi::OsStrExt;

use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

/// First descriptor after the standard streams.
const FIRST: RawFd = 3;
/// Names of the environment variables to keep, which Perfvisor or its child programs (virtiofsd,
/// perf) read.
const KEPT_VARIABLES: [&str; 8] = [
    "LLVM_PROFILE_FILE",
    "NOTIFY_SOCKET",
    "PATH",
    "RUST_BACKTRACE",
    "RUST_LOG",
    "TERM",
    "TMPDIR",
    "XDG_RUNTIME_DIR",
];
/// Name prefix of Perfvisor's own environment variables.
const OWN_PREFIX: &[u8] = b"PERFVISOR_";

/// File descriptors that this process has inherited, except for the standard streams.
#[derive(Debug)]
pub(crate) struct InheritedDescriptors(Vec<RawFd>);

impl InheritedDescriptors {
    /// Finds the inherited descriptors and marks them close-on-exec, so that no child inherits
    /// them.
    ///
    /// Perfvisor opens all descriptors with this flag, which distinguishes its own descriptors from
    /// inherited ones.
    pub(crate) fn mark() -> Self {
        let open = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
        let numbers = open.filter_map(|entry| entry.file_name().to_str()?.parse::<RawFd>().ok());
        let mut inherited: Vec<RawFd> = numbers.filter(|fd| *fd >= FIRST).collect();
        inherited.retain(|fd| {
            // SAFETY: the descriptor was open a moment ago, and this process has one thread.
            let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
            fcntl_getfd(fd).is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC))
                && fcntl_setfd(fd, FdFlags::CLOEXEC).is_ok()
        });
        Self(inherited)
    }

    /// Closes the inherited descriptors. Every file of the command line must have been opened
    /// before, because a path may refer to one of the descriptors (`/dev/fd/3`).
    pub(super) fn close(self) {
        for fd in self.0 {
            // SAFETY: no value in this process owns an inherited descriptor.
            unsafe { libc::close(fd) };
        }
    }
}

/// Clears the environment except for [`KEPT_VARIABLES`] and Perfvisor's own variables, and
/// overwrites the copy shown by `/proc/PID/environ`. No other thread may exist.
pub(super) fn clear_environment() {
    let all: Vec<(OsString, OsString)> = env::vars_os().collect();
    for (name, value) in &all {
        // SAFETY: this process has one thread, so no concurrent access to the environment exists.
        // The variables to keep are set again, which moves them out of the memory that is
        // overwritten below.
        unsafe {
            env::remove_var(name);
            if is_kept(name) {
                env::set_var(name, value);
            }
        }
    }
    let Some((start, length)) = first_environment() else {
        log::debug!("/proc/self/stat does not tell where the environment is");
        return;
    };
    // SAFETY: the kernel reports the bounds of the strings that execve(2) placed on the stack,
    // which are writable for the lifetime of the process. The C library's environment no longer
    // points to them, and Rust's standard library returns copies only.
    unsafe { std::ptr::with_exposed_provenance_mut::<u8>(start).write_bytes(0, length) };
}

fn is_kept(name: &OsStr) -> bool {
    name.as_bytes().starts_with(OWN_PREFIX) || KEPT_VARIABLES.iter().any(|kept| name == *kept)
}

/// Returns the address and length of the environment block of execve(2): `env_start` and `env_end`
/// in `/proc/self/stat` (proc_pid_stat(5), fields 50 and 51).
fn first_environment() -> Option<(usize, usize)> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The program name (field 2) may contain parentheses, so search for the last one.
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split_ascii_whitespace().skip(47);
    let start: usize = fields.next()?.parse().ok()?;
    let end: usize = fields.next()?.parse().ok()?;
    // The kernel reports 0 to readers without ptrace access to the process.
    (start != 0)
        .then(|| end.checked_sub(start))?
        .map(|length| (start, length))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_environment_is_in_the_stack() {
        let (start, length) = first_environment().unwrap();
        assert!(start > 1 << 20 && length < 1 << 24, "{start:#x}, {length}");
    }

    #[test]
    fn only_variables_that_are_read_are_kept() {
        for (name, kept) in [
            ("PATH", true),
            ("PERFVISOR_QEMU", true),
            ("SECRET_TOKEN", false),
            ("PATHS", false),
            ("LD_PRELOAD", false),
        ] {
            assert_eq!(is_kept(OsStr::new(name)), kept, "{name}");
        }
    }
}
