//! Restriction of a running VM's access to files, with landlock(7).
//!
//! Open descriptors are unaffected. Access to a path that is not permitted fails with `EACCES` for
//! every user, and TCP sockets are also denied. A seccomp filter cannot provide this because system
//! calls receive paths by pointer. Since Linux 6.12, the same rules also prevent the VM from
//! sending signals to other processes and from connecting to their abstract Unix sockets.
#![expect(
    unsafe_code,
    reason = "two system calls of a thread that may have no descriptor left"
)]

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, Erratum, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetError, Scope,
};

use crate::kind::SandboxedThreadKind;

/// Newest landlock version whose access rights this module uses (Linux 6.15). Older kernels apply
/// the access rights that they support.
const KNOWN: ABI = ABI::V7;

/// Paths that a thread restricted by [`only_files`] can still access. Paths that do not exist are
/// ignored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AccessibleFiles {
    /// Paths of files and directory trees that may be read.
    pub read: Vec<PathBuf>,
    /// Directory trees in which files may be removed, but not read.
    pub remove: Vec<PathBuf>,
}

/// Error returned when file access cannot be restricted.
#[derive(Debug, thiserror::Error)]
pub enum FileAccessError {
    /// The kernel denied a landlock call.
    #[error("landlock rejected the list of allowed files")]
    Landlock(#[from] RulesetError),
    /// The rules could not be applied to a thread.
    #[error("landlock rejected the rules of a thread that opens no files")]
    Thread(#[source] io::Error),
}

/// Ruleset that denies access to all files, for threads that open no files. Unset if file access is
/// not restricted.
static DENY_ALL: OnceLock<OwnedFd> = OnceLock::new();

/// Returns whether the kernel supports landlock and it is enabled.
#[must_use]
pub fn has_landlock() -> bool {
    // If landlock is unavailable, the crate returns a ruleset without a descriptor.
    no_files(scopes()).is_ok_and(|rules| Option::<OwnedFd>::from(rules).is_some())
}

/// Prepares the ruleset that denies access to all files. From then on, [`crate::enter`] applies it
/// to threads that open no files. Call this once while the process is single-threaded, if the
/// kernel has landlock ([`has_landlock`]).
///
/// # Errors
/// Returns a [`FileAccessError`] if the ruleset cannot be created.
pub fn begin_files() -> Result<(), FileAccessError> {
    if let Some(nothing) = no_files(scopes())?.into() {
        let _ = DENY_ALL.set(nothing);
    }
    Ok(())
}

/// Permanently restricts the calling thread, and threads that it starts later, to `files`. Has no
/// effect without [`begin_files`].
///
/// # Errors
/// Returns a [`FileAccessError`] on failure, in which case the thread is not restricted.
pub fn only_files(files: &AccessibleFiles) -> Result<(), FileAccessError> {
    if DENY_ALL.get().is_none() {
        return Ok(());
    }
    let mut rules = no_files(scopes())?;
    for path in &files.read {
        let mut rights = AccessFs::ReadFile.into();
        if path.is_dir() {
            rights |= AccessFs::ReadDir;
        }
        rules = allow(rules, path, rights)?;
    }
    for path in &files.remove {
        rules = allow(rules, path, AccessFs::RemoveFile.into())?;
    }
    rules.restrict_self()?;
    Ok(())
}

/// Denies access to all files to a thread of `kind`, unless threads of this kind open or remove
/// files. Has no effect if file access is not restricted.
pub(crate) fn enter(kind: SandboxedThreadKind) -> Result<(), FileAccessError> {
    if matches!(
        kind,
        SandboxedThreadKind::Main | SandboxedThreadKind::Starter | SandboxedThreadKind::Debugger
    ) {
        return Ok(());
    }
    let Some(nothing) = DENY_ALL.get() else {
        return Ok(());
    };
    // Make the system calls directly, because the crate would consume the descriptor, and creating
    // another one may be denied. SAFETY: both calls pass only integers and a descriptor that is
    // never closed.
    let taken = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::syscall(libc::SYS_landlock_restrict_self, nothing.as_raw_fd(), 0) == 0
    };
    if taken {
        Ok(())
    } else {
        Err(FileAccessError::Thread(io::Error::last_os_error()))
    }
}

/// Denies file access to the calling thread, if the kernel has landlock. Unless `signals` is
/// `true`, also prevents perf events of this thread from sending signals to unrestricted processes,
/// such as the VM.
pub(crate) fn deny_all(signals: bool) -> Result<(), FileAccessError> {
    let scopes = if signals {
        Scope::AbstractUnixSocket.into()
    } else {
        scopes()
    };
    no_files(scopes)?.restrict_self()?;
    Ok(())
}

/// Denies the calling thread all file access except the removal of files in `directories`, if the
/// kernel has landlock.
pub(crate) fn only_removal<Fd: std::os::fd::AsFd>(directories: &[Fd]) -> Result<(), FileAccessError> {
    let mut rules = no_files(scopes())?;
    for directory in directories {
        rules = rules.add_rule(PathBeneath::new(directory, AccessFs::RemoveFile))?;
    }
    rules.restrict_self()?;
    Ok(())
}

/// Returns the landlock scopes to restrict (since Linux 6.12): connections to abstract Unix
/// sockets, and signals to other processes. Omits signals on kernels with an erratum: each thread
/// has its own rules, and such kernels would also block signals between the threads of one process.
fn scopes() -> BitFlags<Scope> {
    if Erratum::current().contains(Erratum::ScopedSignalHandling) {
        Scope::from_all(KNOWN)
    } else {
        Scope::AbstractUnixSocket.into()
    }
}

fn no_files(scopes: BitFlags<Scope>) -> Result<RulesetCreated, RulesetError> {
    Ruleset::default()
        .handle_access(AccessFs::from_all(KNOWN))?
        .handle_access(AccessNet::from_all(KNOWN))?
        .scope(scopes)?
        .create()
}

fn allow(
    rules: RulesetCreated,
    path: &Path,
    rights: BitFlags<AccessFs>,
) -> Result<RulesetCreated, RulesetError> {
    // Skip a path that cannot be resolved now, because it cannot be opened later either.
    match PathFd::new(path) {
        Ok(place) => rules.add_rule(PathBeneath::new(place, rights)),
        Err(_) => Ok(rules),
    }
}
