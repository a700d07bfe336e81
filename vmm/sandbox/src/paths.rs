//! Access to files and sockets at paths that a user with other privileges can influence.
//!
//! Two kinds of processes have privileges that such a user lacks: a VM that changes its user
//! (`--jail uid=N`) keeps root's capabilities until all resources are open, and a VM of root may be
//! configured to log into a directory of another user. [`PrivilegedDirectory`] resolves the
//! directory of a path without following symbolic links of other users. It keeps the directory open
//! so that later operations apply to the same directory.
//! [`PrivilegedDirectory::without_file_capabilities`] performs an operation with the file
//! capabilities (those that override file permission checks) only if no other user can influence
//! the result. [`bind`], [`append`], [`open`] and [`connect`] are based on it. No function changes
//! permissions by path.
#![expect(unsafe_code, reason = "socket(2), bind(2) and listen(2)")]

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::mem::{offset_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, Stat, fchmod, fstat, fstatfs, openat, readlinkat, statat, unlinkat,
};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{geteuid, umask};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

use crate::start;

/// Maximum number of symbolic links in a path, as in the kernel (path_resolution(7)).
const MAX_LINKS: usize = 40;
/// File system type of /proc (statfs(2)).
const PROC_SUPER_MAGIC: u64 = 0x9fa0;
/// Permission bits that allow the group and others to write.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// Length of a listener's backlog, as in the standard library.
const BACKLOG: libc::c_int = 128;
/// Capabilities that override file permission checks.
const FILE_CAPABILITIES: CapabilitySet = CapabilitySet::DAC_OVERRIDE
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::CHOWN);

/// Guard that restores the effective capabilities of this thread on drop.
struct LoweredCapabilities(CapabilitySets);

impl LoweredCapabilities {
    /// Removes the file capabilities from the effective set of this thread. Returns `None` if there
    /// is nothing to remove. This is the case if the process has no file capability, or if it runs
    /// as root, which owns its files anyway.
    fn now() -> io::Result<Option<Self>> {
        let has = capabilities(None)?;
        if geteuid().is_root() || !has.effective.intersects(FILE_CAPABILITIES) {
            return Ok(None);
        }
        let less = CapabilitySets {
            effective: has.effective - FILE_CAPABILITIES,
            ..has
        };
        set_capabilities(None, less)?;
        Ok(Some(Self(has)))
    }
}

impl Drop for LoweredCapabilities {
    fn drop(&mut self) {
        // The permitted set is unchanged, so the call cannot be denied.
        let _ = set_capabilities(None, self.0);
    }
}

/// An open directory, with the privileges that apply to operations in it.
#[derive(Debug)]
pub struct PrivilegedDirectory {
    fd: OwnedFd,
    /// `true` if only root can replace this directory or change its contents.
    trusted: bool,
    /// `true` if this process can reach this directory by its path, and only root and this
    /// process's user can change to which directory the path leads.
    reached_by_path: bool,
}

/// Users whose symbolic links are followed, in addition to root.
#[derive(Clone, Copy, PartialEq)]
enum TrustedLinks {
    OfThisUser,
    OfRootOnly,
}

/// Progress of the resolution of a path.
struct PathWalk {
    at: OwnedFd,
    rest: VecDeque<OsString>,
    links: TrustedLinks,
    followed: usize,
    /// `true` if root controls every component of the path so far.
    of_root: bool,
    /// `true` if a user other than root and this process's user can change a component of the path
    /// so far.
    exposed: bool,
}

impl PathWalk {
    fn new(path: &Path, links: TrustedLinks) -> io::Result<Self> {
        // Start with the working directory itself, because the user may be unable to open it by
        // path.
        let start = if path.is_absolute() { "/" } else { "." };
        let mut walk = Self {
            at: directory_at(CWD, OsStr::new(start))?,
            rest: VecDeque::new(),
            links,
            followed: 0,
            of_root: true,
            exposed: false,
        };
        walk.push(path)?;
        Ok(walk)
    }

    /// Puts the components of `path` in front of the components that remain to be resolved.
    fn push(&mut self, path: &Path) -> io::Result<()> {
        let mut steps: VecDeque<OsString> = VecDeque::new();
        for step in path.components() {
            match step {
                Component::RootDir => self.at = directory_at(CWD, OsStr::new("/"))?,
                Component::Normal(name) => steps.push_back(name.to_owned()),
                Component::ParentDir => steps.push_back("..".into()),
                Component::CurDir | Component::Prefix(_) => {}
            }
        }
        steps.append(&mut self.rest);
        self.rest = steps;
        Ok(())
    }

    /// Resolves the path component `name`.
    fn step(&mut self, name: &OsStr) -> io::Result<()> {
        let next = openat(
            &self.at,
            name,
            OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        let meta = fstat(&next)?;
        match FileType::from_raw_mode(meta.st_mode) {
            FileType::Directory => {
                self.record_writers(&meta);
                self.at = next;
                Ok(())
            }
            FileType::Symlink => self.follow(name),
            _ => Err(Errno::NOTDIR.into()),
        }
    }

    /// Records which users can change the contents of a directory on the path. In a directory with
    /// the sticky bit, users cannot replace files of other users.
    fn record_writers(&mut self, meta: &Stat) {
        let sticky = meta.st_mode & 0o1000 != 0;
        let open = meta.st_mode & WRITABLE_BY_OTHERS != 0 && !sticky;
        self.of_root &= is_own(meta.st_uid, TrustedLinks::OfRootOnly) && !open;
        self.exposed |= open || !is_own(meta.st_uid, TrustedLinks::OfThisUser);
    }

    /// Follows the symbolic link `name` in the current directory.
    fn follow(&mut self, name: &OsStr) -> io::Result<()> {
        // Let the kernel follow magic links in /proc, because they do not contain paths.
        if is_proc(&self.at) {
            self.at = directory_at(self.at.as_fd(), name)?;
            return self.enter();
        }
        let owner = statat(&self.at, name, AtFlags::SYMLINK_NOFOLLOW)?.st_uid;
        if !is_own(owner, self.links) {
            return Err(io::Error::other(format!(
                "'{}' is a symbolic link of user {owner}; name the file that it leads to",
                name.display()
            )));
        }
        self.of_root &= is_own(owner, TrustedLinks::OfRootOnly);
        self.followed += 1;
        if self.followed > MAX_LINKS {
            return Err(Errno::LOOP.into());
        }
        let target = readlinkat(&self.at, name, Vec::new())?;
        self.push(Path::new(&OsString::from_vec(target.into_bytes())))
    }

    fn enter(&mut self) -> io::Result<()> {
        let meta = fstat(&self.at)?;
        self.record_writers(&meta);
        Ok(())
    }

    /// Resolves path components until `keep` remain.
    fn run(&mut self, keep: usize) -> io::Result<()> {
        self.enter()?;
        while self.rest.len() > keep
            && let Some(name) = self.rest.pop_front()
        {
            self.step(&name)?;
        }
        Ok(())
    }

    fn into_directory(self, reached: bool) -> io::Result<PrivilegedDirectory> {
        let meta = fstat(&self.at)?;
        let closed = meta.st_mode & WRITABLE_BY_OTHERS == 0;
        Ok(PrivilegedDirectory {
            trusted: self.of_root && closed,
            reached_by_path: reached && !self.exposed,
            fd: self.at,
        })
    }
}

/// Returns whether `owner`, the owner of a link or directory, is trusted. Root is always trusted,
/// and the user of this process only with [`TrustedLinks::OfThisUser`].
fn is_own(owner: u32, links: TrustedLinks) -> bool {
    owner == root() || (links == TrustedLinks::OfThisUser && owner == geteuid().as_raw())
}

/// Returns root's user ID as seen by this process, which is the owner of /proc. In a user namespace
/// that does not map root, the ID is not 0.
fn root() -> u32 {
    statat(CWD, "/proc", AtFlags::empty()).map_or(0, |meta| meta.st_uid)
}

fn is_proc(directory: &OwnedFd) -> bool {
    fstatfs(directory).is_ok_and(|system| u64::try_from(system.f_type) == Ok(PROC_SUPER_MAGIC))
}

fn directory_at(at: BorrowedFd<'_>, name: &OsStr) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat(at, name, flags, Mode::empty())?)
}

impl PrivilegedDirectory {
    /// Resolves the parent directory of `path` and returns it with the file name. A symbolic link
    /// at `path` itself is not followed.
    ///
    /// # Errors
    /// Returns an error if `openat(2)` fails or a link belongs to a user other than root and this
    /// process's user.
    pub fn of(path: &Path) -> io::Result<(Self, OsString)> {
        Self::reach(path, |walk| walk.run(1))
            .and_then(|(directory, rest)| Ok((directory, rest.ok_or(Errno::ISDIR)?)))
    }

    /// Opens the directory at `path`.
    ///
    /// # Errors
    /// Returns the same errors as [`PrivilegedDirectory::of`].
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::reach(path, |walk| walk.run(0)).map(|(directory, _)| directory)
    }

    /// Resolves `path`, including symbolic links at its end. Returns the parent directory and the
    /// name of the file. For `/` and `.`, returns the directory itself and no name.
    fn of_target(path: &Path) -> io::Result<(Self, Option<OsString>)> {
        Self::reach(path, |walk| {
            walk.run(1)?;
            while let Some(name) = walk.rest.front().cloned()
                && !is_proc(&walk.at)
                && statat(&walk.at, &name, AtFlags::SYMLINK_NOFOLLOW)
                    .is_ok_and(|meta| FileType::from_raw_mode(meta.st_mode) == FileType::Symlink)
            {
                walk.rest.clear();
                walk.follow(&name)?;
                walk.run(1)?;
            }
            Ok(())
        })
    }

    /// Adds to `flags` the flag that prevents following a symbolic link when a file in this
    /// directory is opened. In /proc, the flag is not added, so its magic links are followed.
    fn final_flags(&self, flags: OFlags) -> OFlags {
        if is_proc(&self.fd) {
            flags
        } else {
            flags | OFlags::NOFOLLOW
        }
    }

    fn reach(
        path: &Path,
        run: impl Fn(&mut PathWalk) -> io::Result<()>,
    ) -> io::Result<(Self, Option<OsString>)> {
        let walk = |links, reached| {
            let mut walk = PathWalk::new(path, links)?;
            run(&mut walk)?;
            let rest = walk.rest.pop_front();
            Ok((walk.into_directory(reached)?, rest))
        };
        let Some(lowered) = LoweredCapabilities::now()? else {
            return walk(TrustedLinks::OfThisUser, true);
        };
        let found = walk(TrustedLinks::OfThisUser, true);
        drop(lowered);
        match found {
            // The path may lead through a directory of root that this user cannot access. Resolve
            // it with the file capabilities, but follow only root's links.
            Err(e) if is_denied(&e) => walk(TrustedLinks::OfRootOnly, false),
            found => found,
        }
    }

    /// Returns a path to `name` in this directory that remains valid when the directory is moved.
    #[must_use]
    pub fn path(&self, name: &OsStr) -> PathBuf {
        let mut path = PathBuf::from(format!("/proc/self/fd/{}", self.fd.as_raw_fd()));
        path.push(name);
        path
    }

    /// Returns the directory's descriptor, which was opened with `O_PATH`.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Calls `what` without the file capabilities, or with them if only root can influence this
    /// directory.
    ///
    /// # Errors
    /// Returns an error if `capset(2)` fails.
    pub fn without_file_capabilities<T>(&self, what: impl FnOnce() -> T) -> io::Result<T> {
        let _lowered = if self.trusted {
            None
        } else {
            LoweredCapabilities::now()?
        };
        Ok(what())
    }

    /// Creates a listening socket named `name` in this directory. The file has the permissions
    /// `mode` from its creation, or those that the umask permits if `mode` is `None`. If `name` is
    /// a socket without a listener, it is replaced; other files are not replaced. `path` is the
    /// socket's path. It becomes the address that tools such as `ss` display, unless another user
    /// could redirect the path to a different file.
    ///
    /// # Errors
    /// Returns an error if `bind(2)` fails.
    pub fn bind(&self, name: &OsStr, mode: Option<u32>, path: &Path) -> io::Result<UnixListener> {
        let own = self.path(name);
        let path = if self.reached_by_path { path } else { &own };
        self.without_file_capabilities(|| match bind_at(path, mode) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && self.is_dead_socket(name) => {
                unlinkat(&self.fd, name, AtFlags::empty())?;
                bind_at(path, mode)
            }
            bound => bound,
        })?
    }

    /// Returns whether the file `name` is a socket without a listener, as left behind by a process
    /// that has exited. Returns `false` for other files.
    fn is_dead_socket(&self, name: &OsStr) -> bool {
        let meta = statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW);
        meta.is_ok_and(|meta| FileType::from_raw_mode(meta.st_mode) == FileType::Socket)
            && matches!(
                UnixStream::connect(self.path(name)),
                Err(e) if e.kind() == io::ErrorKind::ConnectionRefused
            )
    }

    fn identity(&self, name: &OsStr) -> io::Result<(u64, u64)> {
        let meta = statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW)?;
        Ok((meta.st_dev, meta.st_ino))
    }
}

fn is_denied(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EACCES | libc::EPERM))
}

/// Creates a listening socket at `path` with [`PrivilegedDirectory::bind`].
///
/// # Errors
/// Returns the same errors as [`PrivilegedDirectory::of`] and [`PrivilegedDirectory::bind`].
pub fn bind(path: &Path, mode: Option<u32>) -> io::Result<UnixListener> {
    let (directory, name) = PrivilegedDirectory::of(path)?;
    directory.bind(&name, mode, path)
}

/// Guard that restores the saved umask on drop. The umask applies to the whole process, so it is
/// changed only for sockets with explicit permissions and only for the duration of one call.
struct UmaskGuard(Mode);

impl Drop for UmaskGuard {
    fn drop(&mut self) {
        umask(self.0);
    }
}

fn bind_at(path: &Path, mode: Option<u32>) -> io::Result<UnixListener> {
    let flags = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    // SAFETY: the call passes only integers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, flags, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so the descriptor is open and not owned elsewhere.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let (address, length) = address(path)?;
    if let Some(mode) = mode {
        // Set the permissions of the socket: the file that bind(2) creates has them, restricted by
        // the umask.
        fchmod(&socket, Mode::from_bits_truncate(mode))?;
    }
    let _no_umask = mode
        .filter(|mode| mode & 0o077 != 0)
        .map(|_| UmaskGuard(umask(Mode::empty())));
    // SAFETY: the address outlives the call and is at least as long as its length argument, and the
    // descriptor is open.
    let done =
        unsafe { libc::bind(fd, (&raw const address).cast(), length) == 0 && libc::listen(fd, BACKLOG) == 0 };
    if !done {
        return Err(io::Error::last_os_error());
    }
    Ok(UnixListener::from(socket))
}

/// Returns the address of a Unix socket at `path` and its length (unix(7)).
///
/// # Errors
/// Returns [`io::ErrorKind::InvalidInput`] if the path is too long or contains a zero byte.
pub(crate) fn address(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: a zeroed sockaddr_un is valid.
    let mut address: libc::sockaddr_un = unsafe { zeroed() };
    let bytes = path.as_os_str().as_bytes();
    if bytes.len() >= address.sun_path.len() || bytes.contains(&0) {
        let why = "a path of a Unix socket has at most 107 bytes, none of them zero";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    }
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    for (to, from) in address.sun_path.iter_mut().zip(bytes) {
        *to = from.cast_signed();
    }
    let length = offset_of!(libc::sockaddr_un, sun_path) + bytes.len() + 1;
    let length = libc::socklen_t::try_from(length).map_err(io::Error::other)?;
    Ok((address, length))
}

/// Opens the existing file or directory at `path` with the `open(2)` flags `flags`.
///
/// A process that has changed its user and still has file capabilities follows only symbolic links
/// of root and of its own user. It uses the capabilities only if no user other than root can
/// redirect `path` to another file. In other processes, the call is equivalent to `open(2)`.
///
/// # Errors
/// Returns an error if `open(2)` fails or a symbolic link belongs to another user.
pub fn open(path: &Path, flags: libc::c_int) -> io::Result<File> {
    if !keeps_file_capabilities()? {
        // The filters allow the flags that the standard library passes. rustix adds O_LARGEFILE.
        let access = flags & libc::O_ACCMODE;
        return File::options()
            .read(access != libc::O_WRONLY)
            .write(access != libc::O_RDONLY)
            .custom_flags(flags)
            .open(path);
    }
    let flags = OFlags::from_bits_retain(flags.unsigned_abs()) | OFlags::CLOEXEC;
    let (directory, name) = PrivilegedDirectory::of_target(path)?;
    let name = name.unwrap_or_else(|| ".".into());
    let flags = directory.final_flags(flags);
    let open = || openat(&directory.fd, &name, flags, Mode::empty());
    let file = directory.without_file_capabilities(|| retry_on_intr(open))??;
    Ok(File::from(file))
}

/// Resolves the symbolic links in `path` and returns the path of the directory to which it leads.
/// The user of this process must be able to list the directory. A process that has changed its user
/// and still has file capabilities does not use them, and follows only symbolic links of root and
/// of its own user.
///
/// # Errors
/// Returns an error if `open(2)` fails or a symbolic link belongs to another user.
pub fn resolve_directory(path: &Path) -> io::Result<PathBuf> {
    if !keeps_file_capabilities()? {
        let resolved = std::fs::canonicalize(path)?;
        return std::fs::read_dir(&resolved).map(|_| resolved);
    }
    let _lowered = LoweredCapabilities::now()?;
    let directory = PrivilegedDirectory::open(path)?;
    std::fs::read_dir(directory.path(OsStr::new(".")))?;
    std::fs::read_link(format!("/proc/self/fd/{}", directory.fd.as_raw_fd()))
}

/// Connects to the Unix socket at `path`, with the same rules as [`open`].
///
/// # Errors
/// Returns an error if `connect(2)` fails or a symbolic link belongs to another user.
pub fn connect(path: &Path) -> io::Result<UnixStream> {
    if !keeps_file_capabilities()? {
        return UnixStream::connect(path);
    }
    let (directory, name) = PrivilegedDirectory::of_target(path)?;
    let path = directory.path(&name.ok_or(Errno::ISDIR)?);
    directory.without_file_capabilities(|| UnixStream::connect(path))?
}

/// Returns the directory and the name of the socket at `path` after symbolic links have been
/// resolved, with the same rules as [`open`]. The socket need not exist.
///
/// # Errors
/// Returns the same errors as [`PrivilegedDirectory::of`].
pub(crate) fn resolve_socket(path: &Path) -> io::Result<(PrivilegedDirectory, OsString)> {
    if !keeps_file_capabilities()? {
        let resolved = std::fs::canonicalize(path);
        return PrivilegedDirectory::of(resolved.as_deref().unwrap_or(path));
    }
    let (directory, name) = PrivilegedDirectory::of_target(path)?;
    Ok((directory, name.ok_or(Errno::ISDIR)?))
}

/// Returns whether this process has changed its user and still has file capabilities. Does not call
/// `capget(2)` in a confined process, which has no capabilities and whose filters forbid the call.
fn keeps_file_capabilities() -> io::Result<bool> {
    Ok(!start::is_confined() && LoweredCapabilities::now()?.is_some())
}

/// Opens `path` for appending, and creates it with permissions `mode` if it does not exist. The
/// call does not block, so a pipe without a reader is an error. A symbolic link at `path` is
/// followed if its owner is root or this user.
///
/// # Errors
/// Returns an error if `open(2)` fails, or for a symbolic link of another user or a hard link in a
/// directory of another user.
pub fn append(path: &Path, mode: u32) -> io::Result<File> {
    let (directory, name) = PrivilegedDirectory::of_target(path)?;
    let name = name.ok_or(Errno::ISDIR)?;
    let flags = directory.final_flags(
        OFlags::WRONLY
            | OFlags::APPEND
            | OFlags::CREATE
            | OFlags::NONBLOCK
            | OFlags::NOCTTY
            | OFlags::CLOEXEC,
    );
    let mode = Mode::from_bits_truncate(mode);
    let file = directory.without_file_capabilities(|| openat(&directory.fd, &name, flags, mode))??;
    let (meta, around) = (fstat(&file)?, fstat(&directory.fd)?);
    let regular = FileType::from_raw_mode(meta.st_mode) == FileType::RegularFile;
    let stranger =
        !is_own(around.st_uid, TrustedLinks::OfThisUser) || around.st_mode & WRITABLE_BY_OTHERS != 0;
    if regular && meta.st_nlink > 1 && stranger && !is_proc(&directory.fd) {
        return Err(io::Error::other(
            "a file with more than one name in a directory that other users may write; choose another directory",
        ));
    }
    Ok(File::from(file))
}

/// Removes the socket file at `path` if its identity is still `identity`. A file that has replaced
/// the socket is kept. Has no effect after [`crate::confine`], because the socket broker then
/// removes the files ([`crate::SocketBroker`]).
pub fn remove_socket(path: &Path, identity: Option<FileIdentity>) {
    if start::is_confined() {
        return;
    }
    let Ok((directory, name)) = PrivilegedDirectory::of(path) else {
        return;
    };
    // If the removal fails, the next VM replaces the socket without a listener.
    let _ = directory.without_file_capabilities(|| {
        if identity.is_none_or(|file| directory.identity(&name).is_ok_and(|now| now == file.0)) {
            let _ = unlinkat(&directory.fd, &name, AtFlags::empty());
        }
    });
}

/// Identity of a file, which consists of its device and inode number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIdentity((u64, u64));

impl FileIdentity {
    /// Returns the identity of the file at `path`. A symbolic link at `path` is not followed.
    ///
    /// # Errors
    /// Returns the same errors as [`PrivilegedDirectory::of`], or an error if `fstatat(2)` fails.
    pub fn of(path: &Path) -> io::Result<Self> {
        let (directory, name) = PrivilegedDirectory::of(path)?;
        directory
            .without_file_capabilities(|| directory.identity(&name))?
            .map(Self)
    }
}
