//! Locates the directories of control sockets and the VMs in them.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use sandbox::paths::{self, PrivilegedDirectory};

use crate::peer;

/// Maximum length of a VM name, in bytes.
pub const MAX_NAME: usize = 64;
/// Suffix of a socket's file name.
const SUFFIX: &str = ".sock";
/// Maximum time to wait for space in a listener's backlog. The backlog of a stopped VM can stay
/// full, because the VM does not accept connections.
const BACKLOG_TIMEOUT: Duration = Duration::from_millis(500);

/// Error returned when a control socket is unavailable.
#[derive(Debug, thiserror::Error)]
pub enum ControlSocketError {
    /// The name is not a valid VM name.
    #[error(
        "invalid VM name '{0}'; use 1 to {MAX_NAME} letters, digits, dots, dashes and underscores, \
        without a leading dot"
    )]
    Name(String),
    /// The directory belongs to another user or is accessible to other users.
    #[error("{} must be a directory of user {owner} with mode 0700; remove it or set XDG_RUNTIME_DIR", .dir.display())]
    NotPrivate {
        /// Path of the directory.
        dir: PathBuf,
        /// User ID that must own the directory.
        owner: u32,
    },
    /// The parent of the socket directory does not exist.
    #[error("cannot create {}: {} not found{}", .dir.display(), .parent.display(), named(.parent))]
    NoParent {
        /// Path of the socket directory.
        dir: PathBuf,
        /// Path of the parent directory.
        parent: PathBuf,
    },
    /// Another running VM has this name.
    #[error("a VM named '{0}' is running; choose another --name")]
    Taken(String),
    /// A system call failed.
    #[error("{what} {}", .path.display())]
    Os {
        /// Operation that failed, for the error message.
        what: &'static str,
        /// Path of the affected file.
        path: PathBuf,
        /// Error of the operation.
        #[source]
        source: io::Error,
    },
}

fn os(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> ControlSocketError {
    let path = path.to_owned();
    move |source| ControlSocketError::Os { what, path, source }
}

/// Returns the end of an error message about the missing directory `parent`. The text explains how
/// to fix the environment variable `XDG_RUNTIME_DIR` if the variable names this directory, and is
/// empty otherwise.
fn named(parent: &Path) -> &'static str {
    if std::env::var_os("XDG_RUNTIME_DIR").is_some_and(|dir| Path::new(&dir) == parent) {
        ": XDG_RUNTIME_DIR names it; make it, or unset the variable"
    } else {
        ""
    }
}

/// Maximum number of directories in /tmp that are tried for one user.
const MAX_TMP_DIRS: u32 = 16;
/// Maximum number of directory entries that are examined. Any user can fill /tmp with entries.
const MAX_ENTRIES: usize = 1 << 16;
/// Maximum number of VMs in one socket directory.
const MAX_VMS: usize = 4096;

/// Returns the directory for control sockets: `$XDG_RUNTIME_DIR/perfvisor`, or `/run/perfvisor` for
/// root, or `/tmp/perfvisor-UID`.
///
/// If another user has created the directory in /tmp, tries `/tmp/perfvisor-UID.1` and so on. A
/// non-root user also skips the directory in `$XDG_RUNTIME_DIR` if it belongs to another user.
/// A process that dropped root privileges (`--jail uid=`) inherits root's environment, and a VM of
/// another user may have created the directory named there.
pub fn directory() -> PathBuf {
    directory_for(
        std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from),
        peer::own_uid(),
    )
}

fn directory_for(runtime: Option<PathBuf>, uid: u32) -> PathBuf {
    let runtime = runtime.filter(|dir| dir.is_absolute());
    let another_s = |dir: &PathBuf| uid != 0 && fs::symlink_metadata(dir).is_ok_and(|meta| meta.uid() != uid);
    match runtime
        .map(|dir| dir.join("perfvisor"))
        .filter(|dir| !another_s(dir))
    {
        Some(dir) => dir,
        // A minimal system may not have `/run`. In that case, use a directory in `/tmp`.
        None if uid == 0 && Path::new("/run").is_dir() => PathBuf::from("/run/perfvisor"),
        None => in_tmp(Path::new("/tmp"), uid),
    }
}

/// Returns the first candidate directory in `tmp` that is private to user `uid` or does not exist.
/// If there is none, returns the first candidate, for the error message.
fn in_tmp(tmp: &Path, uid: u32) -> PathBuf {
    let first = tmp.join(format!("perfvisor-{uid}"));
    let others = (1..MAX_TMP_DIRS).map(|n| tmp.join(format!("perfvisor-{uid}.{n}")));
    let can_be = |dir: &PathBuf| match fs::symlink_metadata(dir) {
        Ok(meta) => is_private(&meta, uid),
        Err(e) => e.kind() == io::ErrorKind::NotFound,
    };
    let found = [first.clone()].into_iter().chain(others).find(can_be);
    found.unwrap_or(first)
}

/// A directory of control sockets and its owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SocketDir {
    /// Path of the directory.
    pub dir: PathBuf,
    /// User ID of the directory's owner, as whom the listening processes must also run.
    pub owner: u32,
}

impl SocketDir {
    /// Returns the name and path of each socket in the directory, sorted, without checking for
    /// listeners.
    ///
    /// # Errors
    /// Returns [`ControlSocketError::Os`] if the directory cannot be read.
    pub fn listed(&self) -> Result<Vec<(String, PathBuf)>, ControlSocketError> {
        let mut names = listed(&self.dir)?;
        names.sort();
        let path = |name: &str| socket_path(&self.dir, name);
        Ok(names
            .into_iter()
            .map(|name| (name.clone(), path(&name)))
            .collect())
    }

    /// Returns the name and socket path of each running VM in the directory, sorted.
    ///
    /// # Errors
    /// Returns [`ControlSocketError::Os`] if the directory cannot be read.
    pub fn sockets(&self) -> Result<Vec<(String, PathBuf)>, ControlSocketError> {
        let names = names_in(&self.dir, self.owner == peer::own_uid())?;
        let path = |name: &str| socket_path(&self.dir, name);
        Ok(names
            .into_iter()
            .map(|name| (name.clone(), path(&name)))
            .collect())
    }
}

/// The socket directories of this host.
#[derive(Debug, Default)]
pub struct SocketDirs {
    /// Valid socket directories without duplicates, this user's first, then sorted by path.
    pub directories: Vec<SocketDir>,
    /// Directories that this user may not read and that may contain VMs.
    pub closed: Vec<PathBuf>,
    /// Directories that have the name of a socket directory but belong to another user or are
    /// writable by other users.
    pub squatted: Vec<PathBuf>,
}

impl SocketDirs {
    /// Finds the directories of all users, regardless of the environment: `/run/perfvisor`,
    /// `/run/perfvisor-NAME/perfvisor` of services, `/run/user/UID/perfvisor`,
    /// `/tmp/perfvisor-UID`, and this user's [`directory`].
    pub fn all_users() -> Self {
        let mut places = Self::default();
        let (usual, own) = (directory(), peer::own_uid());
        // Root's environment may name another user's directory.
        if let Ok(meta) = fs::symlink_metadata(&usual)
            && (own == 0 || meta.uid() == own)
        {
            places.add_if_owned(&usual, Some(meta.uid()));
        }
        places.find_all(Path::new("/run"), Path::new("/tmp"));
        places.directories.sort_by_key(|place| place.owner != own);
        places
    }

    /// Finds the directories of this user.
    pub fn of_this_user() -> Self {
        let mut places = Self::all_users();
        places.directories.retain(|place| place.owner == peer::own_uid());
        places
    }

    fn find_all(&mut self, run: &Path, tmp: &Path) {
        self.add_if_owned(&run.join("perfvisor"), Some(0));
        for (name, dir) in entries(run) {
            if name.starts_with("perfvisor-") {
                // Only root can create directories in /run. Root assigns them to the user of the
                // service.
                self.add_if_owned(&dir.join("perfvisor"), None);
            }
        }
        for (name, dir) in entries(&run.join("user")) {
            if let Ok(uid) = name.parse() {
                self.add_if_owned(&dir.join("perfvisor"), Some(uid));
            }
        }
        for (name, dir) in entries(tmp) {
            if let Some(uid) = name.strip_prefix("perfvisor-")
                && let Ok(uid) = uid.split_once('.').map_or(uid, |(uid, _)| uid).parse()
            {
                self.add_if_owned(&dir, Some(uid));
            }
        }
    }

    /// Adds `dir` to the socket directories if `owner` owns it and no other user can write to it.
    /// Without `owner`, `dir` and its parent must have the same owner.
    fn add_if_owned(&mut self, dir: &Path, owner: Option<u32>) {
        if self.directories.iter().any(|place| place.dir == dir) {
            return;
        }
        // Do not follow symbolic links.
        let meta = match fs::symlink_metadata(dir) {
            Ok(meta) => meta,
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
                self.closed.push(dir.to_owned());
                return;
            }
            Err(_) => return,
        };
        let of_parent = || fs::symlink_metadata(dir.parent()?).ok().map(|meta| meta.uid());
        let owner = owner.or_else(of_parent);
        let safe = meta.is_dir() && Some(meta.uid()) == owner && meta.permissions().mode() & 0o022 == 0;
        if !safe {
            self.squatted.push(dir.to_owned());
        } else if fs::read_dir(dir).is_err() {
            self.closed.push(dir.to_owned());
        } else {
            self.directories.push(SocketDir {
                dir: dir.to_owned(),
                owner: meta.uid(),
            });
        }
    }
}

/// An observer socket (`--observers`) in a directory shared by several users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObserverSocket {
    /// Name of the VM, which is the file name of the socket without its extension.
    pub name: String,
    /// Path of the socket.
    pub path: PathBuf,
    /// User ID of the socket file's owner. The listening process must have the same user ID
    /// ([`connect_at`]).
    pub owner: u32,
}

/// Returns the observer sockets in `dir`, sorted by owner and name, without duplicates. Returns at
/// most `most` sockets per owner, because many users may have write access to `dir`. Symbolic links
/// are not followed.
///
/// # Errors
/// Returns [`ControlSocketError::Os`] if the directory cannot be read.
pub fn observed_in(dir: &Path, most: usize) -> Result<Vec<ObserverSocket>, ControlSocketError> {
    let seen = |entry: fs::DirEntry| {
        let path = entry.path();
        let name = path.file_stem()?.to_str()?.to_owned();
        check_name(&name).ok()?;
        let meta = fs::symlink_metadata(&path).ok()?;
        let owner = meta.uid();
        meta.file_type()
            .is_socket()
            .then_some(ObserverSocket { name, path, owner })
    };
    let entries = fs::read_dir(dir).map_err(os("cannot read", dir))?;
    let mut found: Vec<_> = entries.take(MAX_ENTRIES).flatten().filter_map(seen).collect();
    found.sort_by(|a, b| (a.owner, &a.path).cmp(&(b.owner, &b.path)));
    found.dedup_by(|b, a| (a.owner, &a.name) == (b.owner, &b.name));
    let mut of_owner = (None, 0);
    found.retain(|socket| {
        of_owner = match of_owner {
            (Some(owner), n) if owner == socket.owner => (Some(owner), n + 1),
            _ => (Some(socket.owner), 1),
        };
        of_owner.1 <= most
    });
    Ok(found)
}

/// Returns the names and paths of the entries of a directory, sorted. Returns an empty list if the
/// directory cannot be read.
fn entries(dir: &Path) -> Vec<(String, PathBuf)> {
    let mut entries: Vec<_> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .take(MAX_ENTRIES)
        .flatten()
        .filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())))
        .collect();
    entries.sort();
    entries
}

/// Returns the socket directory of this user's VM `name`. The result is [`directory`], unless only
/// another directory of this user contains a running VM of that name.
pub fn directory_of(name: &str) -> PathBuf {
    let usual = directory();
    let lives = |dir: &Path| peer::connect_within(&socket_path(dir, name), BACKLOG_TIMEOUT).is_ok();
    if check_name(name).is_err() || socket_path(&usual, name).exists() {
        return usual;
    }
    let places = SocketDirs::of_this_user().directories;
    let found = places.into_iter().map(|place| place.dir).find(|dir| lives(dir));
    found.unwrap_or(usual)
}

/// Returns the path of the control socket of VM `name` in `dir`.
pub fn socket_path(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}{SUFFIX}"))
}

fn is_private(meta: &fs::Metadata, uid: u32) -> bool {
    meta.is_dir() && meta.uid() == uid && meta.permissions().mode() & 0o077 == 0
}

/// Returns the default path of the vsock socket of VM `name`, next to its control socket.
pub fn vsock_path(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.vsock"))
}

/// Checks that a VM name is valid.
///
/// # Errors
/// Returns [`ControlSocketError::Name`] if the name is invalid.
pub fn check_name(name: &str) -> Result<(), ControlSocketError> {
    let good = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    if (1..=MAX_NAME).contains(&name.len()) && !name.starts_with(['.', '-']) && name.bytes().all(good) {
        Ok(())
    } else {
        Err(ControlSocketError::Name(name.to_owned()))
    }
}

/// Creates the socket directory `dir` if it does not exist.
///
/// # Errors
/// Returns [`ControlSocketError::NotPrivate`] if other users have access to the directory, or
/// another [`ControlSocketError`] if the directory cannot be created.
pub fn make_directory(dir: &Path) -> Result<(), ControlSocketError> {
    let (inside, created) = match PrivilegedDirectory::of(dir) {
        Ok((parent, name)) => {
            let inside = parent.path(&name);
            let created = parent
                .without_file_capabilities(|| fs::DirBuilder::new().mode(0o700).create(&inside))
                .flatten();
            (Some((parent, inside)), created)
        }
        Err(e) => (None, Err(e)),
    };
    match created {
        Ok(()) => {}
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
        Err(e) => {
            return Err(match dir.parent() {
                Some(parent) if e.kind() == io::ErrorKind::NotFound => ControlSocketError::NoParent {
                    dir: dir.to_owned(),
                    parent: parent.to_owned(),
                },
                _ => os("cannot make", dir)(e),
            });
        }
    }
    // Do not follow symbolic links: in /tmp, anybody could have created one.
    let path = inside.as_ref().map_or(dir, |(_, path)| path.as_path());
    let meta = fs::symlink_metadata(path).map_err(os("cannot look at", dir))?;
    let owner = peer::own_uid();
    if !is_private(&meta, owner) {
        return Err(ControlSocketError::NotPrivate {
            dir: dir.to_owned(),
            owner,
        });
    }
    Ok(())
}

/// The listening control socket of a VM. Dropping it removes the file.
#[derive(Debug)]
pub struct ControlSocket {
    /// Nonblocking listener of the control socket.
    pub listener: UnixListener,
    path: PathBuf,
}

impl ControlSocket {
    /// Listens on the socket of VM `name` in `dir`. Replaces the socket of a dead VM of that name.
    ///
    /// # Errors
    /// Returns [`ControlSocketError::Taken`] if a running VM has this name, or another
    /// [`ControlSocketError`] if the socket cannot be created.
    pub fn bind(dir: &Path, name: &str) -> Result<Self, ControlSocketError> {
        check_name(name)?;
        make_directory(dir)?;
        let path = socket_path(dir, name);
        let directory = PrivilegedDirectory::open(dir).map_err(os("cannot look at", dir))?;
        // Bind under a temporary name and link the socket to its final name. The socket then
        // becomes visible only when it listens, and the link decides between two VMs of the same
        // name.
        let hidden: OsString = format!(".{}-{name}", sandbox::host_pid()).into();
        let shown = dir.join(&hidden);
        let (from, to) = (
            directory.path(&hidden),
            directory.path(path.file_name().unwrap_or_default()),
        );
        let _ = directory.without_file_capabilities(|| fs::remove_file(&from));
        let listener = directory
            .bind(&hidden, Some(0o600), &shown)
            .map_err(os("cannot listen at", &shown))?;
        let linked = directory.without_file_capabilities(|| {
            let linked = link(&from, &to, &path, name);
            let _ = fs::remove_file(&from);
            linked
        });
        linked.map_err(os("cannot make", &path))??;
        let socket = Self { listener, path };
        socket
            .listener
            .set_nonblocking(true)
            .map_err(os("cannot make nonblocking", &socket.path))?;
        Ok(socket)
    }

    /// Listens on the socket `path` with file permissions `mode`. Replaces the socket of a dead
    /// process, but no other file.
    ///
    /// # Errors
    /// Returns [`ControlSocketError::Os`] if the socket cannot be created.
    pub fn bind_at(path: &Path, mode: u32) -> Result<Self, ControlSocketError> {
        let socket = Self {
            listener: paths::bind(path, Some(mode)).map_err(os("cannot listen at", path))?,
            path: path.to_owned(),
        };
        socket
            .listener
            .set_nonblocking(true)
            .map_err(os("cannot make nonblocking", path))?;
        Ok(socket)
    }

    /// Returns the path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Creates `to` as a hard link to the socket file `from`. Replaces the socket of a dead VM at `to`.
/// Error messages contain the path `path` or the VM name `name`.
fn link(from: &Path, to: &Path, path: &Path, name: &str) -> Result<(), ControlSocketError> {
    for _ in 0..2 {
        match fs::hard_link(from, to) {
            Ok(()) => return Ok(()),
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(os("cannot make", path)(e)),
            Err(_) if is_dead(to) => {
                let _ = fs::remove_file(to);
            }
            Err(_) => break,
        }
    }
    Err(ControlSocketError::Taken(name.to_owned()))
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        paths::remove_socket(&self.path, None);
    }
}

/// Returns whether no process listens on the socket because its VM was killed.
fn is_dead(path: &Path) -> bool {
    matches!(peer::connect_within(path, BACKLOG_TIMEOUT), Err(e) if e.kind() == io::ErrorKind::ConnectionRefused)
}

/// Returns the names of the VMs in `dir`, sorted, and removes the sockets of dead VMs. Returns an
/// empty list if `dir` does not exist.
///
/// # Errors
/// Returns [`ControlSocketError::Os`] if the directory cannot be read.
pub fn names(dir: &Path) -> Result<Vec<String>, ControlSocketError> {
    names_in(dir, true)
}

/// Returns the names of the sockets in `dir`.
fn listed(dir: &Path) -> Result<Vec<String>, ControlSocketError> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(os("cannot read", dir)(e)),
    };
    let name_of = |file: std::ffi::OsString| {
        let name = file.to_str()?.strip_suffix(SUFFIX)?;
        check_name(name).ok().map(|()| name.to_owned())
    };
    let names = entries.flatten().filter_map(|entry| name_of(entry.file_name()));
    Ok(names.take(MAX_VMS).collect())
}

/// Returns the names of the running VMs in `dir`, sorted. If `tidy` is set, removes the sockets of
/// dead VMs.
fn names_in(dir: &Path, tidy: bool) -> Result<Vec<String>, ControlSocketError> {
    let mut names = listed(dir)?;
    names.retain(|name| {
        let path = socket_path(dir, name);
        let dead = is_dead(&path);
        if dead && tidy {
            let _ = fs::remove_file(path);
        }
        !dead
    });
    names.sort();
    Ok(names)
}

/// Connects to the VM `name`. Removes the socket of a dead VM.
///
/// # Errors
/// Returns the error of `connect(2)`.
pub fn connect(dir: &Path, name: &str) -> io::Result<UnixStream> {
    let path = socket_path(dir, name);
    peer::connect_within(&path, BACKLOG_TIMEOUT).inspect_err(|e| {
        if e.kind() == io::ErrorKind::ConnectionRefused {
            let _ = fs::remove_file(&path);
        }
    })
}

/// Connects to the socket `path`. If `owner` is given, the listening process must belong to that
/// user, because the path may be a link to another user's socket.
///
/// # Errors
/// Returns the error of `connect(2)`, or [`io::ErrorKind::PermissionDenied`] if another user
/// listens.
pub fn connect_at(path: &Path, owner: Option<u32>) -> io::Result<UnixStream> {
    let stream = peer::connect_within(path, BACKLOG_TIMEOUT)?;
    let uid = peer::peer_uid(&stream)?;
    match owner {
        Some(owner) if owner != uid => Err(io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("user {uid} listens there and not user {owner}, whose directory it is"),
        )),
        _ => Ok(stream),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn socket_at_a_path_has_its_permissions_and_replaces_only_a_dead_one() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("look");
        let socket = ControlSocket::bind_at(&path, 0o660).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
        assert!(ControlSocket::bind_at(&path, 0o660).is_err(), "somebody listens");
        assert!(UnixStream::connect(&path).is_ok());
        drop(socket);
        assert!(!path.exists());
        drop(UnixListener::bind(&path).unwrap());
        drop(ControlSocket::bind_at(&path, 0o600).unwrap());
        fs::write(&path, "data").unwrap();
        assert!(ControlSocket::bind_at(&path, 0o600).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"data");
    }

    #[test]
    fn directory_follows_the_environment() {
        assert_eq!(
            directory_for(Some("/run/user/7".into()), 7),
            Path::new("/run/user/7/perfvisor")
        );
        assert_eq!(directory_for(None, 0), Path::new("/run/perfvisor"));
        assert_eq!(directory_for(None, 7), Path::new("/tmp/perfvisor-7"));
        assert_eq!(
            directory_for(Some("relative".into()), 7),
            Path::new("/tmp/perfvisor-7")
        );
    }

    /// A VM skips the socket directory in root's environment if another user owns it. VMs started
    /// by root run as different users, all with root's environment.
    #[test]
    fn dropped_privileges_skip_foreign_socket_directory() {
        let runtime = tempfile::tempdir().unwrap();
        let (own, other) = (peer::own_uid().max(1), peer::own_uid() + 7);
        let place = |uid| directory_for(Some(runtime.path().to_owned()), uid);
        assert_eq!(place(other), runtime.path().join("perfvisor"));
        fs::create_dir(runtime.path().join("perfvisor")).unwrap();
        assert_eq!(place(other), PathBuf::from(format!("/tmp/perfvisor-{other}")));
        assert_eq!(place(0), runtime.path().join("perfvisor"), "root operates both");
        if own == peer::own_uid() {
            assert_eq!(place(own), runtime.path().join("perfvisor"));
        }
    }

    /// A directory or link in /tmp that another user created is skipped, and the next directory is
    /// used instead. This applies to VMs that create a socket directory and to searches for VMs.
    #[test]
    fn foreign_socket_directory_is_skipped() {
        let tmp = tempfile::tempdir().unwrap();
        let uid = peer::own_uid();
        let place = |ending: &str| tmp.path().join(format!("perfvisor-{uid}{ending}"));
        assert_eq!(in_tmp(tmp.path(), uid), place(""));
        // Occupy the first names with a directory that other users can read, a link, and a file.
        fs::DirBuilder::new().mode(0o755).create(place("")).unwrap();
        assert_eq!(in_tmp(tmp.path(), uid), place(".1"));
        std::os::unix::fs::symlink(tmp.path(), place(".1")).unwrap();
        fs::write(place(".2"), "").unwrap();
        let found = in_tmp(tmp.path(), uid);
        assert_eq!(found, place(".3"));
        let _socket = ControlSocket::bind(&found, "a").unwrap();
        assert_eq!(in_tmp(tmp.path(), uid), found, "it stays there");
        // If no directory is usable, the error names the first one.
        for n in 3..MAX_TMP_DIRS {
            let _ = fs::remove_dir_all(place(&format!(".{n}")));
            fs::write(place(&format!(".{n}")), "").unwrap();
        }
        let none = in_tmp(tmp.path(), uid);
        assert_eq!(none, place(""));
        assert!(matches!(
            make_directory(&none),
            Err(ControlSocketError::NotPrivate { .. })
        ));
    }

    /// In a shared directory, a VM is identified by the owner of its socket file, not by the name
    /// of the file. Links and other files that are not sockets are skipped. The number of sockets
    /// per owner is limited.
    #[test]
    fn observer_sockets_are_distinguished_by_owner() {
        let temp = tempfile::tempdir().unwrap();
        let at = |name: &str| temp.path().join(name);
        let listening: Vec<_> = ["web.look", "web.sock", "db", "a.look", "b.look", ".x", "a b"]
            .map(|name| UnixListener::bind(at(name)).unwrap())
            .into();
        fs::write(at("file.look"), "").unwrap();
        fs::create_dir(at("dir.look")).unwrap();
        std::os::unix::fs::symlink(at("db"), at("link.look")).unwrap();
        let owner = peer::own_uid();
        let found = observed_in(temp.path(), 100).unwrap();
        assert!(found.iter().all(|socket| socket.owner == owner));
        let names: Vec<&str> = found.iter().map(|socket| socket.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "db", "web"]);
        assert_eq!(found[3].path, at("web.look"));
        assert_eq!(observed_in(temp.path(), 2).unwrap(), found[..2]);
        assert!(observed_in(&at("none"), 100).is_err());
        drop(listening);
    }

    /// The directories of all users are found. Directories created by another user are reported
    /// separately and not accessed.
    #[test]
    fn socket_directories_are_found_and_squatted_ones_reported() {
        let temp = tempfile::tempdir().unwrap();
        let (run, tmp) = (temp.path().join("run"), temp.path().join("tmp"));
        let uid = peer::own_uid();
        let make = |dir: PathBuf, mode| {
            fs::create_dir_all(&dir).unwrap();
            fs::set_permissions(&dir, fs::Permissions::from_mode(mode)).unwrap();
            dir
        };
        let mine = make(run.join(format!("user/{uid}/perfvisor")), 0o700);
        let service = make(run.join("perfvisor-web/perfvisor"), 0o750);
        let in_tmp = make(tmp.join(format!("perfvisor-{uid}.1")), 0o700);
        let open = make(tmp.join(format!("perfvisor-{uid}")), 0o777);
        let of_other = make(tmp.join(format!("perfvisor-{}", uid + 1)), 0o700);
        let link = tmp.join(format!("perfvisor-{uid}.2"));
        std::os::unix::fs::symlink(&mine, &link).unwrap();
        make(tmp.join("perfvisor-x"), 0o700);
        let mut places = SocketDirs::default();
        places.find_all(&run, &tmp);
        let found: Vec<&PathBuf> = places.directories.iter().map(|place| &place.dir).collect();
        assert_eq!(found, [&service, &mine, &in_tmp]);
        assert!(places.directories.iter().all(|place| place.owner == uid));
        assert_eq!(places.squatted, [open, link, of_other]);
        assert!(places.closed.is_empty(), "{:?}", places.closed);
    }

    /// A dead VM's socket in another user's directory is not removed.
    #[test]
    fn only_owner_removes_dead_sockets() {
        let temp = tempfile::tempdir().unwrap();
        let _alive = UnixListener::bind(temp.path().join("a.sock")).unwrap();
        let dead = temp.path().join("b.sock");
        drop(UnixListener::bind(&dead).unwrap());
        let place = |owner| SocketDir {
            dir: temp.path().to_owned(),
            owner,
        };
        let uid = peer::own_uid();
        let alive = [("a".to_owned(), temp.path().join("a.sock"))];
        assert_eq!(place(uid + 1).sockets().unwrap(), alive);
        assert!(dead.exists());
        assert_eq!(place(uid).sockets().unwrap(), alive);
        assert!(!dead.exists());
    }

    /// A connection is rejected if the listener is not the owner of the socket directory.
    /// Otherwise, a user could create a link to root's socket and make root stop the wrong VM.
    #[test]
    fn listener_must_own_socket_directory() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("a.sock");
        let _listener = UnixListener::bind(&path).unwrap();
        let uid = peer::own_uid();
        assert!(connect_at(&path, Some(uid)).is_ok() && connect_at(&path, None).is_ok());
        let refused = connect_at(&path, Some(uid + 1)).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn invalid_vm_names_are_rejected() {
        for bad in [
            "",
            ".",
            "..",
            ".x",
            "-x",
            "a/b",
            "a b",
            "ü",
            "a\0",
            &"x".repeat(65),
        ] {
            assert!(check_name(bad).is_err(), "{bad:?}");
        }
        for good in ["vm-12", "a", "A.b_c-9", &"x".repeat(64)] {
            assert!(check_name(good).is_ok(), "{good:?}");
        }
    }

    /// The name of a running VM cannot be taken by another VM. The socket of a dead VM is replaced
    /// and not listed.
    #[test]
    fn live_socket_keeps_its_name() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("perfvisor");
        let first = ControlSocket::bind(&dir, "a").unwrap();
        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(matches!(
            ControlSocket::bind(&dir, "a"),
            Err(ControlSocketError::Taken(_))
        ));
        assert_eq!(names(&dir).unwrap(), ["a"]);
        // Killing a VM closes its listener and leaves the file.
        let dead = UnixListener::bind(dir.join("b.sock")).unwrap();
        drop(dead);
        let second = ControlSocket::bind(&dir, "b").unwrap();
        assert_eq!(names(&dir).unwrap(), ["a", "b"]);
        drop(second);
        drop(UnixListener::bind(dir.join("c.sock")).unwrap());
        assert_eq!(names(&dir).unwrap(), ["a"]);
        assert!(!dir.join("c.sock").exists());
        drop(first);
        assert_eq!(names(&dir).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn socket_directory_open_to_others_is_rejected() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("perfvisor");
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(matches!(
            ControlSocket::bind(&dir, "a"),
            Err(ControlSocketError::NotPrivate { .. })
        ));
    }
}
