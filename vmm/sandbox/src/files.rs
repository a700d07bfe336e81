//! Which files of the host the process can still open once its VM runs, by landlock(7).
//!
//! Descriptors that are open stay as they are. A path that is not below what was named is refused
//! with `EACCES`, whoever the user is; so are TCP sockets. A filter of system calls cannot do this:
//! paths are behind pointers. Since Linux 6.12 the same rules keep the process from signalling
//! others, and from connecting to their abstract Unix sockets.
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

use crate::kind::ThreadKind;

/// The newest version of landlock whose rights are known here (Linux 6.15). Of an older kernel those are used
/// that it has.
const KNOWN: ABI = ABI::V7;

/// What may be opened. What does not exist is left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Files {
    /// Files, and directories with all that is below them, which may be read.
    pub read: Vec<PathBuf>,
    /// Directories with all that is below them, whose files may be removed, and not read.
    pub remove: Vec<PathBuf>,
}

/// Files cannot be shut off.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// The kernel refuses one of the calls.
    #[error("landlock does not take the files that may be opened")]
    Landlock(#[from] RulesetError),
    /// A thread does not get its rules.
    #[error("landlock does not take the rules of a thread that opens no files")]
    Thread(#[source] io::Error),
}

/// For threads that open nothing: rules that allow no file. Unset: files are not shut off.
static NOTHING: OnceLock<OwnedFd> = OnceLock::new();

/// Whether this kernel has landlock, and it is on.
#[must_use]
pub fn has_landlock() -> bool {
    // Without it rules are made too, of nothing.
    no_files(scopes()).is_ok_and(|rules| Option::<OwnedFd>::from(rules).is_some())
}

/// From now on threads that take on a kind which opens nothing cannot open anything. To be called once,
/// before there are threads, where there is landlock ([`has_landlock`]).
///
/// # Errors
/// [`FilesError`].
pub fn begin_files() -> Result<(), FilesError> {
    if let Some(nothing) = no_files(scopes())?.into() {
        let _ = NOTHING.set(nothing);
    }
    Ok(())
}

/// This thread, and those that it starts from now on, can open `files` and nothing else. There is no way
/// back. Without [`begin_files`] nothing changes.
///
/// # Errors
/// [`FilesError`]; nothing has changed.
pub fn only_files(files: &Files) -> Result<(), FilesError> {
    if NOTHING.get().is_none() {
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

/// What is done to a thread that takes on `kind`: no file, unless the kind opens or removes some.
pub(crate) fn enter(kind: ThreadKind) -> Result<(), FilesError> {
    if matches!(
        kind,
        ThreadKind::Main | ThreadKind::Starter | ThreadKind::Debugger
    ) {
        return Ok(());
    }
    let Some(nothing) = NOTHING.get() else {
        return Ok(());
    };
    // By calls of our own: the crate's would give the descriptor away, and another one may not be had.
    // SAFETY: both calls take numbers and a descriptor that is open for as long as the process lives.
    let taken = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::syscall(libc::SYS_landlock_restrict_self, nothing.as_raw_fd(), 0) == 0
    };
    if taken {
        Ok(())
    } else {
        Err(FilesError::Thread(io::Error::last_os_error()))
    }
}

/// The calling thread can open nothing any more, where the kernel has landlock. `signals`: events that it
/// opens may signal processes outside.
pub(crate) fn nothing(signals: bool) -> Result<(), FilesError> {
    let scopes = if signals {
        Scope::AbstractUnixSocket.into()
    } else {
        scopes()
    };
    no_files(scopes)?.restrict_self()?;
    Ok(())
}

/// The calling thread can remove files in `directories` and open nothing any more, where the kernel has
/// landlock.
pub(crate) fn only_removal<Fd: std::os::fd::AsFd>(directories: &[Fd]) -> Result<(), FilesError> {
    let mut rules = no_files(scopes())?;
    for directory in directories {
        rules = rules.add_rule(PathBeneath::new(directory, AccessFs::RemoveFile))?;
    }
    rules.restrict_self()?;
    Ok(())
}

/// What a thread cannot reach outside (Linux 6.12): abstract Unix sockets, and processes by signals. Each
/// thread has rules of its own, and kernels without the fix of this erratum kept threads of one process from
/// signalling each other: there signals are not restricted.
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
    // What cannot even be named now cannot be opened later.
    match PathFd::new(path) {
        Ok(place) => rules.add_rule(PathBeneath::new(place, rights)),
        Err(_) => Ok(rules),
    }
}
