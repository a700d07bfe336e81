//! Creation of namespaces, in particular of a user namespace that contains one user.
#![expect(unsafe_code, reason = "unshare(2), geteuid(2) and prctl(2)")]

use std::fs;
use std::io;

/// Error returned when a user namespace cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum UserNamespaceError {
    /// The kernel or its administrator does not permit user namespaces.
    #[error("this user may not create a user namespace")]
    Denied(#[source] io::Error),
    /// A file that maps the users of the namespace cannot be written.
    #[error("{0}")]
    Map(&'static str, #[source] io::Error),
}

pub(crate) fn unshare(what: libc::c_int) -> io::Result<()> {
    // SAFETY: the call passes only an integer.
    match unsafe { libc::unshare(what) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Creates a user namespace that maps the process's own user and group to themselves. Also creates
/// the namespaces that the `unshare(2)` flags `wanted` select.
pub(crate) fn own_users(wanted: libc::c_int) -> Result<(), UserNamespaceError> {
    // SAFETY: these calls take no arguments and cannot fail.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    unshare(wanted | libc::CLONE_NEWUSER).map_err(UserNamespaceError::Denied)?;
    // A process with file capabilities does not own its files in /proc unless it is dumpable.
    // SAFETY: the call passes only integers.
    unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1, 0, 0, 0) };
    let write =
        |path, text: String| fs::write(path, text).map_err(|source| UserNamespaceError::Map(path, source));
    write("/proc/self/uid_map", format!("{uid} {uid} 1"))?;
    write("/proc/self/setgroups", "deny".into())?;
    write("/proc/self/gid_map", format!("{gid} {gid} 1"))
}
