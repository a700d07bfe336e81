//! What a VM inherits from the process that starts it and does not need: descriptors and environment
//! variables. Firecracker's jailer closes and clears them, too.
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
/// Variables that Perfvisor or a program that it starts (virtiofsd, perf) reads.
const KEPT: [&str; 8] = [
    "LLVM_PROFILE_FILE",
    "NOTIFY_SOCKET",
    "PATH",
    "RUST_BACKTRACE",
    "RUST_LOG",
    "TERM",
    "TMPDIR",
    "XDG_RUNTIME_DIR",
];
/// Prefix of Perfvisor's own variables.
const OWN_PREFIX: &[u8] = b"PERFVISOR_";

/// The descriptors that this process was started with, besides the standard streams.
#[derive(Debug)]
pub(super) struct Inherited(Vec<RawFd>);

impl Inherited {
    /// Finds the inherited descriptors and marks them close-on-exec, so that no child has them. Everything
    /// that Perfvisor opens is marked from the start, so the mark tells the two apart.
    pub(super) fn mark() -> Self {
        let open = fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
        let numbers = open.filter_map(|entry| entry.file_name().to_str()?.parse::<RawFd>().ok());
        let mut inherited: Vec<RawFd> = numbers.filter(|fd| *fd >= FIRST).collect();
        inherited.retain(|fd| {
            // SAFETY: the descriptor was open a moment ago; this process has one thread.
            let fd = unsafe { BorrowedFd::borrow_raw(*fd) };
            fcntl_getfd(fd).is_ok_and(|flags| !flags.contains(FdFlags::CLOEXEC))
                && fcntl_setfd(fd, FdFlags::CLOEXEC).is_ok()
        });
        Self(inherited)
    }

    /// Closes them. A path of the command line may name one (`/dev/fd/3`), so everything has to be open by
    /// then.
    pub(super) fn close(self) {
        for fd in self.0 {
            // SAFETY: no value of this process owns a descriptor that it did not open.
            unsafe { libc::close(fd) };
        }
    }
}

/// Clears the environment except for [`KEPT`] and Perfvisor's own variables, and overwrites the copy that
/// `/proc/PID/environ` shows. No other thread may exist.
pub(super) fn clear_environment() {
    let all: Vec<(OsString, OsString)> = env::vars_os().collect();
    for (name, value) in &all {
        // SAFETY: this process has one thread, so nobody reads the environment meanwhile. Variables that are
        // kept are set again, which moves them out of the memory that is overwritten below.
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
    // SAFETY: the kernel gives the bounds of the strings that execve(2) put on this process's stack, which
    // are writable for as long as it lives. The C library's environment points to none of them any more, and
    // Rust's standard library hands out copies only.
    unsafe { std::ptr::with_exposed_provenance_mut::<u8>(start).write_bytes(0, length) };
}

fn is_kept(name: &OsStr) -> bool {
    name.as_bytes().starts_with(OWN_PREFIX) || KEPT.iter().any(|kept| name == *kept)
}

/// Address and length of the environment that execve(2) made, by `env_start` and `env_end` of
/// `/proc/self/stat` (proc_pid_stat(5), fields 50 and 51).
fn first_environment() -> Option<(usize, usize)> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The name of the program, field 2, ends with the last parenthesis.
    let (_, fields) = stat.rsplit_once(") ")?;
    let mut fields = fields.split_ascii_whitespace().skip(47);
    let start: usize = fields.next()?.parse().ok()?;
    let end: usize = fields.next()?.parse().ok()?;
    // Both are 0 for a reader that may not trace the process.
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
