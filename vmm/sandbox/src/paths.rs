//! Files and sockets at paths that a user with other rights than this process can influence.
//!
//! A VM that becomes another user (`--jail uid=N`) keeps root's capabilities until everything is open, and a
//! VM of root may be told to log into a directory of another user. [`Directory`] finds the directory of a
//! path without following a link of a stranger, and holds it, so that what happens next happens in that
//! directory. [`Directory::act`] runs an operation there with the file capabilities only where no other user
//! can influence the result. [`bind`] and [`append`] are built on it. No permissions are changed by path.
#![expect(unsafe_code, reason = "socket(2), bind(2) and listen(2)")]

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::mem::{offset_of, zeroed};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, Stat, fchmod, fstat, fstatfs, openat, readlinkat, statat, unlinkat,
};
use rustix::io::Errno;
use rustix::process::{geteuid, umask};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

use crate::start;

/// Maximum number of symbolic links in a path, as in the kernel (path_resolution(7)).
const MAX_LINKS: usize = 40;
/// File system type of /proc (statfs(2)).
const PROC_SUPER_MAGIC: u64 = 0x9fa0;
/// Permission bits that let others than the owner write.
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// Connections that wait to be accepted, as in the standard library.
const BACKLOG: libc::c_int = 128;
/// Capabilities that lift the permission checks on files.
const FILE_CAPABILITIES: CapabilitySet = CapabilitySet::DAC_OVERRIDE
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    .union(CapabilitySet::CHOWN);

/// Puts the effective capabilities of this thread back when it is dropped.
struct Lowered(CapabilitySets);

impl Lowered {
    /// Takes the file capabilities out of effect. Returns `None` if this process is root's, whose files are
    /// its own, or has none of these capabilities.
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

impl Drop for Lowered {
    fn drop(&mut self) {
        // The permitted set has not changed, so the kernel has no reason to refuse.
        let _ = set_capabilities(None, self.0);
    }
}

/// A directory that is held open, with the rights that operations in it have.
#[derive(Debug)]
pub struct Directory {
    fd: OwnedFd,
    /// Whether only root, and this process if it is root's, can influence which directory this is and what
    /// is in it.
    trusted: bool,
    /// Whether the path leads here for this process and nobody else can change that.
    reached_by_path: bool,
}

/// Whose symbolic links are followed, besides root's.
#[derive(Clone, Copy, PartialEq)]
enum Links {
    OfThisUser,
    OfRootOnly,
}

/// A path on its way to a directory.
struct Walk {
    at: OwnedFd,
    rest: VecDeque<OsString>,
    links: Links,
    followed: usize,
    /// Whether every step so far was root's doing.
    of_root: bool,
    /// Whether a user other than root and this process's could change a step.
    exposed: bool,
}

impl Walk {
    fn new(path: &Path, links: Links) -> io::Result<Self> {
        // The present directory may be closed to the user.
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

    /// Puts the steps of `path` before those that are left.
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

    /// Takes one step.
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
                self.judge(&meta);
                self.at = next;
                Ok(())
            }
            FileType::Symlink => self.follow(name),
            _ => Err(Errno::NOTDIR.into()),
        }
    }

    /// Notes who can change what is in a directory on the way. In a sticky one nobody can replace the files
    /// of others.
    fn judge(&mut self, meta: &Stat) {
        let sticky = meta.st_mode & 0o1000 != 0;
        let open = meta.st_mode & WRITABLE_BY_OTHERS != 0 && !sticky;
        self.of_root &= is_own(meta.st_uid, Links::OfRootOnly) && !open;
        self.exposed |= open || !is_own(meta.st_uid, Links::OfThisUser);
    }

    /// Follows the symbolic link `name` of the present directory.
    fn follow(&mut self, name: &OsStr) -> io::Result<()> {
        // Links in /proc are the kernel's and lead to no path.
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
        self.of_root &= is_own(owner, Links::OfRootOnly);
        self.followed += 1;
        if self.followed > MAX_LINKS {
            return Err(Errno::LOOP.into());
        }
        let target = readlinkat(&self.at, name, Vec::new())?;
        self.push(Path::new(&OsString::from_vec(target.into_bytes())))
    }

    fn enter(&mut self) -> io::Result<()> {
        let meta = fstat(&self.at)?;
        self.judge(&meta);
        Ok(())
    }

    /// Walks until `keep` steps are left.
    fn run(&mut self, keep: usize) -> io::Result<()> {
        self.enter()?;
        while self.rest.len() > keep
            && let Some(name) = self.rest.pop_front()
        {
            self.step(&name)?;
        }
        Ok(())
    }

    fn into_directory(self, reached: bool) -> io::Result<Directory> {
        let meta = fstat(&self.at)?;
        let closed = meta.st_mode & WRITABLE_BY_OTHERS == 0;
        Ok(Directory {
            trusted: self.of_root && closed,
            reached_by_path: reached && !self.exposed,
            fd: self.at,
        })
    }
}

/// Whether a link or directory of `owner` is root's or, unless only root's count, this user's.
fn is_own(owner: u32, links: Links) -> bool {
    owner == root() || (links == Links::OfThisUser && owner == geteuid().as_raw())
}

/// Root, as this process sees it: /proc is root's. A user namespace without root shows another number.
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

impl Directory {
    /// The directory of `path`, and the name of `path` in it. A symbolic link at `path` itself is not
    /// followed.
    ///
    /// # Errors
    /// Those of `openat(2)`; a link of a user other than root and this process's.
    pub fn of(path: &Path) -> io::Result<(Self, OsString)> {
        Self::reach(path, |walk| walk.run(1))
            .and_then(|(directory, rest)| Ok((directory, rest.ok_or(Errno::ISDIR)?)))
    }

    /// The directory at `path`.
    ///
    /// # Errors
    /// As [`Directory::of`].
    pub fn open(path: &Path) -> io::Result<Self> {
        Self::reach(path, |walk| walk.run(0)).map(|(directory, _)| directory)
    }

    fn reach(path: &Path, run: impl Fn(&mut Walk) -> io::Result<()>) -> io::Result<(Self, Option<OsString>)> {
        let walk = |links, reached| {
            let mut walk = Walk::new(path, links)?;
            run(&mut walk)?;
            let rest = walk.rest.pop_front();
            Ok((walk.into_directory(reached)?, rest))
        };
        let Some(lowered) = Lowered::now()? else {
            return walk(Links::OfThisUser, true);
        };
        let found = walk(Links::OfThisUser, true);
        drop(lowered);
        match found {
            // Root's directories above may be closed to the user. There only root's links count.
            Err(e) if is_denied(&e) => walk(Links::OfRootOnly, false),
            found => found,
        }
    }

    /// A path to `name` in this directory, whatever the directory's own path leads to by now.
    #[must_use]
    pub fn path(&self, name: &OsStr) -> PathBuf {
        let mut path = PathBuf::from(format!("/proc/self/fd/{}", self.fd.as_raw_fd()));
        path.push(name);
        path
    }

    /// The descriptor, which was opened with `O_PATH`.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Does `what` without the file capabilities, unless only root can influence this directory.
    ///
    /// # Errors
    /// Those of `capset(2)`.
    pub fn act<T>(&self, what: impl FnOnce() -> T) -> io::Result<T> {
        let _lowered = if self.trusted { None } else { Lowered::now()? };
        Ok(what())
    }

    /// Listens at `name`. The socket's file has the permissions `mode` from its first moment; without a mode
    /// those that the umask leaves. Replaces a socket at which nobody listens any more, and no other file.
    /// `path` is how the socket is shown (`ss`), if nobody else can change where that leads.
    ///
    /// # Errors
    /// Those of `bind(2)`.
    pub fn bind(&self, name: &OsStr, mode: Option<u32>, path: &Path) -> io::Result<UnixListener> {
        let own = self.path(name);
        let path = if self.reached_by_path { path } else { &own };
        self.act(|| match bind_at(path, mode) {
            Err(e) if e.kind() == io::ErrorKind::AddrInUse && self.is_dead_socket(name) => {
                unlinkat(&self.fd, name, AtFlags::empty())?;
                bind_at(path, mode)
            }
            bound => bound,
        })?
    }

    /// Checks whether a process that ended left this socket behind. Other files are never taken for one.
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

/// Listens at `path`: [`Directory::bind`] in its directory.
///
/// # Errors
/// Those of [`Directory::of`] and [`Directory::bind`].
pub fn bind(path: &Path, mode: Option<u32>) -> io::Result<UnixListener> {
    let (directory, name) = Directory::of(path)?;
    directory.bind(&name, mode, path)
}

/// The umask that leaves all permissions. The umask is the process's: only sockets that others may use have
/// it set, for the time of one call.
struct NoUmask(Mode);

impl Drop for NoUmask {
    fn drop(&mut self) {
        umask(self.0);
    }
}

fn bind_at(path: &Path, mode: Option<u32>) -> io::Result<UnixListener> {
    let flags = libc::SOCK_STREAM | libc::SOCK_CLOEXEC;
    // SAFETY: the call takes numbers.
    let fd = unsafe { libc::socket(libc::AF_UNIX, flags, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so this is a descriptor that nobody else owns.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let (address, length) = address(path)?;
    if let Some(mode) = mode {
        // The file that bind(2) makes has the permissions of the socket, without what the umask takes.
        fchmod(&socket, Mode::from_bits_truncate(mode))?;
    }
    let _no_umask = mode
        .filter(|mode| mode & 0o077 != 0)
        .map(|_| NoUmask(umask(Mode::empty())));
    // SAFETY: the address lives for the call and is at least as long as is said; the descriptor is open.
    let done =
        unsafe { libc::bind(fd, (&raw const address).cast(), length) == 0 && libc::listen(fd, BACKLOG) == 0 };
    if !done {
        return Err(io::Error::last_os_error());
    }
    Ok(UnixListener::from(socket))
}

/// The address of a Unix socket at `path` and its length (unix(7)).
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`]: the path is too long or has a zero byte.
pub(crate) fn address(path: &Path) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: a zeroed sockaddr_un is a valid one.
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

/// Opens `path` for appending, and creates it with the permissions `mode` if it does not exist. Does not
/// wait: a pipe without a reader is an error. A symbolic link at `path` is followed if it is root's or this
/// user's.
///
/// # Errors
/// Those of `open(2)`; a link of another user, or a hard link in a directory of another user.
pub fn append(path: &Path, mode: u32) -> io::Result<File> {
    let (directory, name) = Directory::reach(path, |walk| {
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
    })?;
    let name = name.ok_or(Errno::ISDIR)?;
    let mut flags = OFlags::WRONLY
        | OFlags::APPEND
        | OFlags::CREATE
        | OFlags::NONBLOCK
        | OFlags::NOCTTY
        | OFlags::CLOEXEC;
    if !is_proc(&directory.fd) {
        flags |= OFlags::NOFOLLOW;
    }
    let mode = Mode::from_bits_truncate(mode);
    let file = directory.act(|| openat(&directory.fd, &name, flags, mode))??;
    let (meta, around) = (fstat(&file)?, fstat(&directory.fd)?);
    let regular = FileType::from_raw_mode(meta.st_mode) == FileType::RegularFile;
    let stranger = !is_own(around.st_uid, Links::OfThisUser) || around.st_mode & WRITABLE_BY_OTHERS != 0;
    if regular && meta.st_nlink > 1 && stranger && !is_proc(&directory.fd) {
        return Err(io::Error::other(
            "a file with more than one name in a directory that other users may write; choose another directory",
        ));
    }
    Ok(File::from(file))
}

/// Removes a socket's file, if it is still the one that `identity` tells. Does nothing in a VM whose threads
/// have their filters ([`crate::confine`]): there a process of its own removes the files
/// ([`crate::SocketBroker`]).
pub fn remove_socket(path: &Path, identity: Option<FileIdentity>) {
    if start::is_confined() {
        return;
    }
    let Ok((directory, name)) = Directory::of(path) else {
        return;
    };
    // Nobody listens there, so the next VM replaces what stays.
    let _ = directory.act(|| {
        if identity.is_none_or(|file| directory.identity(&name).is_ok_and(|now| now == file.0)) {
            let _ = unlinkat(&directory.fd, &name, AtFlags::empty());
        }
    });
}

/// Which file a path leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileIdentity((u64, u64));

impl FileIdentity {
    /// The file at `path`; a symbolic link there is not followed.
    ///
    /// # Errors
    /// Those of [`Directory::of`] and `fstatat(2)`.
    pub fn of(path: &Path) -> io::Result<Self> {
        let (directory, name) = Directory::of(path)?;
        directory.act(|| directory.identity(&name))?.map(Self)
    }
}
