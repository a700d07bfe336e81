//! Where control sockets are, and which VMs they lead to.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use sandbox::paths::{self, Directory};

use crate::peer;

/// Longest name of a VM, in bytes.
pub const MAX_NAME: usize = 64;
/// Ending of a socket's file name.
const SUFFIX: &str = ".sock";
/// How long a connection waits for room among those that a VM has not taken in: one that is stopped takes
/// none in.
const ROOM: Duration = Duration::from_millis(500);

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// A name that would be no good file name.
    #[error(
        "'{0}' is no name for a VM: use 1 to {MAX_NAME} letters, digits, dots, dashes and underscores, a dot not first"
    )]
    Name(String),
    /// The directory is somebody else's, or open to others.
    #[error("{} must be a directory of user {owner} with mode 0700; remove it or set XDG_RUNTIME_DIR", .dir.display())]
    NotPrivate {
        /// The directory.
        dir: PathBuf,
        /// Whose it must be.
        owner: u32,
    },
    /// There is no directory to have one in.
    #[error("{} cannot be made, as there is no {}{}", .dir.display(), .parent.display(), named(.parent))]
    NoParent {
        /// The directory.
        dir: PathBuf,
        /// Where it was to be.
        parent: PathBuf,
    },
    /// A VM of that name runs.
    #[error("a VM named '{0}' is running; choose another --name")]
    Taken(String),
    /// A system call failed.
    #[error("{what} {}", .path.display())]
    Os {
        /// What was done.
        what: &'static str,
        /// To what.
        path: PathBuf,
        /// The error.
        #[source]
        source: io::Error,
    },
}

fn os(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> PlaceError {
    let path = path.to_owned();
    move |source| PlaceError::Os { what, path, source }
}

/// Who named this directory, and what to do about it.
fn named(parent: &Path) -> &'static str {
    if std::env::var_os("XDG_RUNTIME_DIR").is_some_and(|dir| Path::new(&dir) == parent) {
        ": XDG_RUNTIME_DIR names it; make it, or unset the variable"
    } else {
        ""
    }
}

/// Most directories in /tmp that are looked at.
const PLACES_IN_TMP: u32 = 16;
/// Most entries of a directory that are looked at for directories of users: anybody can fill /tmp.
const MOST_ENTRIES: usize = 1 << 16;
/// Most VMs of one directory.
const MOST_VMS: usize = 4096;

/// The directory for sockets: `$XDG_RUNTIME_DIR/perfvisor`, else `/run/perfvisor` for root, else
/// `/tmp/perfvisor-UID`. Where that is somebody else's, as anybody can make it, `/tmp/perfvisor-UID.1` is
/// looked at, and so on. So is the first, for who is not root: one whom root has become (`--jail uid=`) has
/// root's environment, and another user's VM may have been there before.
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
        // A minimal system may have no /run.
        None if uid == 0 && Path::new("/run").is_dir() => PathBuf::from("/run/perfvisor"),
        None => in_tmp(Path::new("/tmp"), uid),
    }
}

/// The first directory that is ours alone or can be; the first of all if none is, for the error.
fn in_tmp(tmp: &Path, uid: u32) -> PathBuf {
    let first = tmp.join(format!("perfvisor-{uid}"));
    let others = (1..PLACES_IN_TMP).map(|n| tmp.join(format!("perfvisor-{uid}.{n}")));
    let can_be = |dir: &PathBuf| match fs::symlink_metadata(dir) {
        Ok(meta) => is_private(&meta, uid),
        Err(e) => e.kind() == io::ErrorKind::NotFound,
    };
    let found = [first.clone()].into_iter().chain(others).find(can_be);
    found.unwrap_or(first)
}

/// A directory with control sockets, and whose they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The directory.
    pub dir: PathBuf,
    /// Its owner; who listens in it must be the same.
    pub owner: u32,
}

impl Place {
    /// The names and sockets that are there, sorted, without a look whether anybody listens.
    ///
    /// # Errors
    /// [`PlaceError::Os`] if the directory cannot be read.
    pub fn listed(&self) -> Result<Vec<(String, PathBuf)>, PlaceError> {
        let mut names = listed(&self.dir)?;
        names.sort();
        let path = |name: &str| socket_path(&self.dir, name);
        Ok(names
            .into_iter()
            .map(|name| (name.clone(), path(&name)))
            .collect())
    }

    /// The VMs there, sorted: the name of each and the path of its socket.
    ///
    /// # Errors
    /// [`PlaceError::Os`] if the directory cannot be read.
    pub fn sockets(&self) -> Result<Vec<(String, PathBuf)>, PlaceError> {
        let names = names_in(&self.dir, self.owner == peer::own_uid())?;
        let path = |name: &str| socket_path(&self.dir, name);
        Ok(names
            .into_iter()
            .map(|name| (name.clone(), path(&name)))
            .collect())
    }
}

/// Where VMs of this host have their sockets.
#[derive(Debug, Default)]
pub struct Places {
    /// Directories that are what their names say, each once; first this user's, then in the order of their
    /// paths.
    pub found: Vec<Place>,
    /// What this user may not look into: there may be VMs.
    pub closed: Vec<PathBuf>,
    /// What has the name of such a directory and is somebody else's, or is open to the writes of others.
    pub squatted: Vec<PathBuf>,
}

impl Places {
    /// The directories of all users, whatever the environment says: `/run/perfvisor`,
    /// `/run/perfvisor-NAME/perfvisor` of services, `/run/user/UID/perfvisor`, `/tmp/perfvisor-UID`, and this
    /// user's [`directory`].
    pub fn everywhere() -> Self {
        let mut places = Self::default();
        let (usual, own) = (directory(), peer::own_uid());
        // Root may have named that of another user.
        if let Ok(meta) = fs::symlink_metadata(&usual)
            && (own == 0 || meta.uid() == own)
        {
            places.look(&usual, Some(meta.uid()));
        }
        places.look_below(Path::new("/run"), Path::new("/tmp"));
        places.found.sort_by_key(|place| place.owner != own);
        places
    }

    /// Those of this user.
    pub fn of_this_user() -> Self {
        let mut places = Self::everywhere();
        places.found.retain(|place| place.owner == peer::own_uid());
        places
    }

    fn look_below(&mut self, run: &Path, tmp: &Path) {
        self.look(&run.join("perfvisor"), Some(0));
        for (name, dir) in entries(run) {
            if name.starts_with("perfvisor-") {
                // Only root makes directories there, and gives them away to the service's user.
                self.look(&dir.join("perfvisor"), None);
            }
        }
        for (name, dir) in entries(&run.join("user")) {
            if let Ok(uid) = name.parse() {
                self.look(&dir.join("perfvisor"), Some(uid));
            }
        }
        for (name, dir) in entries(tmp) {
            if let Some(uid) = name.strip_prefix("perfvisor-")
                && let Ok(uid) = uid.split_once('.').map_or(uid, |(uid, _)| uid).parse()
            {
                self.look(&dir, Some(uid));
            }
        }
    }

    /// Takes `dir` in if it is a directory of `owner` that nobody else can write; without `owner`, of whom it
    /// and its parent belong to.
    fn look(&mut self, dir: &Path, owner: Option<u32>) {
        if self.found.iter().any(|place| place.dir == dir) {
            return;
        }
        // No link is followed.
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
            self.found.push(Place {
                dir: dir.to_owned(),
                owner: meta.uid(),
            });
        }
    }
}

/// A socket that a VM has put for observers (`--observers`) into a directory of several users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    /// The name of its file, without what is behind the last dot.
    pub name: String,
    /// The socket.
    pub path: PathBuf,
    /// Whose the file is; who listens must be the same ([`connect_at`]).
    pub owner: u32,
}

/// The sockets in `dir`, which may be open to the writes of many: sorted by owner and name, each name of an
/// owner once, of each owner at most `most`. No link is followed.
///
/// # Errors
/// [`PlaceError::Os`] if the directory cannot be read.
pub fn observed_in(dir: &Path, most: usize) -> Result<Vec<Observed>, PlaceError> {
    let seen = |entry: fs::DirEntry| {
        let path = entry.path();
        let name = path.file_stem()?.to_str()?.to_owned();
        check_name(&name).ok()?;
        let meta = fs::symlink_metadata(&path).ok()?;
        let owner = meta.uid();
        meta.file_type()
            .is_socket()
            .then_some(Observed { name, path, owner })
    };
    let entries = fs::read_dir(dir).map_err(os("cannot read", dir))?;
    let mut found: Vec<_> = entries.take(MOST_ENTRIES).flatten().filter_map(seen).collect();
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

/// Entries of a directory with their paths, sorted; none if it cannot be read.
fn entries(dir: &Path) -> Vec<(String, PathBuf)> {
    let mut entries: Vec<_> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .take(MOST_ENTRIES)
        .flatten()
        .filter_map(|entry| Some((entry.file_name().into_string().ok()?, entry.path())))
        .collect();
    entries.sort();
    entries
}

/// The directory of the VM of this user that has this name: [`directory`], unless it has none of that name
/// and another of this user's directories has.
pub fn directory_of(name: &str) -> PathBuf {
    let usual = directory();
    let lives = |dir: &Path| peer::connect_within(&socket_path(dir, name), ROOM).is_ok();
    if check_name(name).is_err() || socket_path(&usual, name).exists() {
        return usual;
    }
    let places = Places::of_this_user().found;
    let found = places.into_iter().map(|place| place.dir).find(|dir| lives(dir));
    found.unwrap_or(usual)
}

/// The socket of VM `name` in `dir`.
pub fn socket_path(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}{SUFFIX}"))
}

fn is_private(meta: &fs::Metadata, uid: u32) -> bool {
    meta.is_dir() && meta.uid() == uid && meta.permissions().mode() & 0o077 == 0
}

/// Where the vsock device of VM `name` listens, if it was given no other path: beside its control socket.
pub fn vsock_path(dir: &Path, name: &str) -> PathBuf {
    dir.join(format!("{name}.vsock"))
}

/// Whether a VM can have this name.
///
/// # Errors
/// [`PlaceError::Name`].
pub fn check_name(name: &str) -> Result<(), PlaceError> {
    let good = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    if (1..=MAX_NAME).contains(&name.len()) && !name.starts_with(['.', '-']) && name.bytes().all(good) {
        Ok(())
    } else {
        Err(PlaceError::Name(name.to_owned()))
    }
}

/// Makes the directory if it is not there.
///
/// # Errors
/// [`PlaceError`]; [`PlaceError::NotPrivate`] if it is not ours alone.
pub fn make_directory(dir: &Path) -> Result<(), PlaceError> {
    let (inside, created) = match Directory::of(dir) {
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
                Some(parent) if e.kind() == io::ErrorKind::NotFound => PlaceError::NoParent {
                    dir: dir.to_owned(),
                    parent: parent.to_owned(),
                },
                _ => os("cannot make", dir)(e),
            });
        }
    }
    // No link is followed: in /tmp anybody could have put one there.
    let path = inside.as_ref().map_or(dir, |(_, path)| path.as_path());
    let meta = fs::symlink_metadata(path).map_err(os("cannot look at", dir))?;
    let owner = peer::own_uid();
    if !is_private(&meta, owner) {
        return Err(PlaceError::NotPrivate {
            dir: dir.to_owned(),
            owner,
        });
    }
    Ok(())
}

/// A VM's listening socket. Its file goes when this is dropped.
#[derive(Debug)]
pub struct Socket {
    /// The listener, nonblocking.
    pub listener: UnixListener,
    path: PathBuf,
}

impl Socket {
    /// Listens for VM `name` in `dir`. A file that a dead VM of that name left behind is replaced.
    ///
    /// # Errors
    /// [`PlaceError`].
    pub fn bind(dir: &Path, name: &str) -> Result<Self, PlaceError> {
        check_name(name)?;
        make_directory(dir)?;
        let path = socket_path(dir, name);
        let directory = Directory::open(dir).map_err(os("cannot look at", dir))?;
        // Bound under another name and linked in place: at its own name it is never seen before it listens,
        // and of two VMs that want one name the link decides.
        let hidden: OsString = format!(".{}-{name}", std::process::id()).into();
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

    /// Listens at `path`, for those who may write a file with the permissions `mode`. A socket that a dead
    /// process left behind is replaced, any other file is not.
    ///
    /// # Errors
    /// [`PlaceError::Os`].
    pub fn bind_at(path: &Path, mode: u32) -> Result<Self, PlaceError> {
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

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Links `from` to `to`, which errors show as `path`.
fn link(from: &Path, to: &Path, path: &Path, name: &str) -> Result<(), PlaceError> {
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
    Err(PlaceError::Taken(name.to_owned()))
}

impl Drop for Socket {
    fn drop(&mut self) {
        paths::remove_socket(&self.path, None);
    }
}

/// Whether nobody listens any more: the VM was killed.
fn is_dead(path: &Path) -> bool {
    matches!(peer::connect_within(path, ROOM), Err(e) if e.kind() == io::ErrorKind::ConnectionRefused)
}

/// Names of the VMs in `dir`, sorted. Sockets of dead ones are removed. A missing directory has none.
///
/// # Errors
/// [`PlaceError::Os`] if the directory cannot be read.
pub fn names(dir: &Path) -> Result<Vec<String>, PlaceError> {
    names_in(dir, true)
}

/// Names of the sockets in `dir`.
fn listed(dir: &Path) -> Result<Vec<String>, PlaceError> {
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
    Ok(names.take(MOST_VMS).collect())
}

/// Names of the VMs in `dir`, sorted. `tidy`: remove the sockets of dead ones; else they are left out.
fn names_in(dir: &Path, tidy: bool) -> Result<Vec<String>, PlaceError> {
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

/// Connects to VM `name`.
///
/// # Errors
/// That of `connect(2)`; a socket nobody listens at is removed.
pub fn connect(dir: &Path, name: &str) -> io::Result<UnixStream> {
    let path = socket_path(dir, name);
    peer::connect_within(&path, ROOM).inspect_err(|e| {
        if e.kind() == io::ErrorKind::ConnectionRefused {
            let _ = fs::remove_file(&path);
        }
    })
}

/// Connects to the VM whose socket is at `path`. With `owner`, who listens must be that user: what is there
/// may be a link to another's socket.
///
/// # Errors
/// That of `connect(2)`; [`io::ErrorKind::PermissionDenied`] if another user listens.
pub fn connect_at(path: &Path, owner: Option<u32>) -> io::Result<UnixStream> {
    let stream = peer::connect_within(path, ROOM)?;
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
    fn a_socket_at_a_path_has_its_permissions_and_replaces_only_a_dead_one() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("look");
        let socket = Socket::bind_at(&path, 0o660).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o660);
        assert!(Socket::bind_at(&path, 0o660).is_err(), "somebody listens");
        assert!(UnixStream::connect(&path).is_ok());
        drop(socket);
        assert!(!path.exists());
        drop(UnixListener::bind(&path).unwrap());
        drop(Socket::bind_at(&path, 0o600).unwrap());
        fs::write(&path, "data").unwrap();
        assert!(Socket::bind_at(&path, 0o600).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"data");
    }

    #[test]
    fn the_directory_follows_the_environment() {
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

    /// VMs of one root are different users, each with root's environment.
    #[test]
    fn a_user_whom_root_becomes_passes_by_what_another_has_there() {
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

    /// Anybody can make a directory in /tmp, or a link. Who finds one there takes the next place, and so does
    /// who looks for VMs.
    #[test]
    fn a_directory_that_is_not_ours_is_passed_by() {
        let tmp = tempfile::tempdir().unwrap();
        let uid = peer::own_uid();
        let place = |ending: &str| tmp.path().join(format!("perfvisor-{uid}{ending}"));
        assert_eq!(in_tmp(tmp.path(), uid), place(""));
        // One that others may look into, a link, a file.
        fs::DirBuilder::new().mode(0o755).create(place("")).unwrap();
        assert_eq!(in_tmp(tmp.path(), uid), place(".1"));
        std::os::unix::fs::symlink(tmp.path(), place(".1")).unwrap();
        fs::write(place(".2"), "").unwrap();
        let found = in_tmp(tmp.path(), uid);
        assert_eq!(found, place(".3"));
        let _socket = Socket::bind(&found, "a").unwrap();
        assert_eq!(in_tmp(tmp.path(), uid), found, "it stays there");
        // Nothing is left: the error names the first.
        for n in 3..PLACES_IN_TMP {
            let _ = fs::remove_dir_all(place(&format!(".{n}")));
            fs::write(place(&format!(".{n}")), "").unwrap();
        }
        let none = in_tmp(tmp.path(), uid);
        assert_eq!(none, place(""));
        assert!(matches!(
            make_directory(&none),
            Err(PlaceError::NotPrivate { .. })
        ));
    }

    /// In a directory of several users a name is its owner's: the file says whose it is, not its name. What
    /// is no socket, a link say, is passed by, and nobody fills the list.
    #[test]
    fn sockets_of_observers_are_told_apart_by_their_owners() {
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

    /// Every user's directory is found; one that somebody else has put in a place is told apart, and nothing
    /// in it is touched.
    #[test]
    fn places_are_found_and_squatted_ones_passed_by() {
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
        let mut places = Places::default();
        places.look_below(&run, &tmp);
        let found: Vec<&PathBuf> = places.found.iter().map(|place| &place.dir).collect();
        assert_eq!(found, [&service, &mine, &in_tmp]);
        assert!(places.found.iter().all(|place| place.owner == uid));
        assert_eq!(places.squatted, [open, link, of_other]);
        assert!(places.closed.is_empty(), "{:?}", places.closed);
    }

    /// What has ended in another user's directory is his to remove.
    #[test]
    fn only_the_owner_removes_the_sockets_of_dead_vms() {
        let temp = tempfile::tempdir().unwrap();
        let _alive = UnixListener::bind(temp.path().join("a.sock")).unwrap();
        let dead = temp.path().join("b.sock");
        drop(UnixListener::bind(&dead).unwrap());
        let place = |owner| Place {
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

    /// A user could put a link to root's socket into his directory, and have root stop the wrong VM.
    #[test]
    fn who_listens_must_be_the_directory_s_owner() {
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("a.sock");
        let _listener = UnixListener::bind(&path).unwrap();
        let uid = peer::own_uid();
        assert!(connect_at(&path, Some(uid)).is_ok() && connect_at(&path, None).is_ok());
        let refused = connect_at(&path, Some(uid + 1)).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::PermissionDenied);
    }

    #[test]
    fn names_that_are_no_file_names_are_refused() {
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

    /// A live socket keeps its name, a dead one's is taken over and leaves the list.
    #[test]
    fn a_name_belongs_to_who_listens() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("perfvisor");
        let first = Socket::bind(&dir, "a").unwrap();
        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        assert!(matches!(Socket::bind(&dir, "a"), Err(PlaceError::Taken(_))));
        assert_eq!(names(&dir).unwrap(), ["a"]);
        // A VM that is killed closes its listener and leaves its file.
        let dead = UnixListener::bind(dir.join("b.sock")).unwrap();
        drop(dead);
        let second = Socket::bind(&dir, "b").unwrap();
        assert_eq!(names(&dir).unwrap(), ["a", "b"]);
        drop(second);
        drop(UnixListener::bind(dir.join("c.sock")).unwrap());
        assert_eq!(names(&dir).unwrap(), ["a"]);
        assert!(!dir.join("c.sock").exists());
        drop(first);
        assert_eq!(names(&dir).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn a_directory_open_to_others_is_refused() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path().join("perfvisor");
        fs::create_dir(&dir).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o755)).unwrap();
        assert!(matches!(
            Socket::bind(&dir, "a"),
            Err(PlaceError::NotPrivate { .. })
        ));
    }
}
