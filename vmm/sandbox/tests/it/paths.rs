//! Tests of files and sockets at paths that another user can influence. The process under test,
//! which changes its user and keeps root's capabilities, is a child process that runs this test
//! program again.

use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Output;

use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use sandbox::paths::{self, PrivilegedDirectory};
use sandbox::{PerfEventAccess, ProcessConfinement, SeccompMode, SeccompTerminationActions, SocketBroker};
use test_support::child::child_command;

/// User ID of the child process.
const NOBODY: u32 = 65534;
/// Environment variable that contains the task of the child process and the path on which it
/// operates.
const TASK: &str = "PATHS_TEST_TASK";
/// Capability sets without any capability.
const NONE: CapabilitySets = CapabilitySets {
    effective: CapabilitySet::empty(),
    permitted: CapabilitySet::empty(),
    inheritable: CapabilitySet::empty(),
};

fn is_root() -> bool {
    let own = fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0);
    if !own {
        eprintln!("SKIP: only root has files of several users");
    }
    own
}

/// Creates a directory of root to which no other user can write, and in it a directory of another
/// user.
fn directories() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let theirs = dir.path().join("theirs");
    fs::create_dir(&theirs).unwrap();
    chown(&theirs, Some(NOBODY), Some(NOBODY)).unwrap();
    (dir, theirs)
}

#[test]
#[ignore = "a child of the tests below"]
fn as_a_child() {
    let task = std::env::var(TASK).unwrap();
    let (what, path) = task.split_once(' ').unwrap();
    sandbox::become_user(NOBODY, NOBODY).unwrap();
    let path = Path::new(path);
    let done = match what {
        "read" => paths::open(path, libc::O_RDONLY).map(drop),
        "read-write" => paths::open(path, libc::O_RDWR).map(drop),
        "read-confined" => {
            confine();
            paths::open(path, libc::O_RDONLY | libc::O_NONBLOCK).map(drop)
        }
        "connect" => paths::connect(path).map(drop),
        "resolve" => {
            paths::resolve_directory(path).map(|resolved| println!("resolved {}", resolved.display()))
        }
        "connect-by-broker" => connect_by_broker(path),
        "append" => paths::append(path, 0o600).and_then(|mut file| file.write_all(b"appended")),
        _ => paths::bind(path, Some(0o666)).map(drop),
    };
    if let Err(e) = done {
        eprintln!("refused: {e}");
        std::process::exit(3);
    }
    // The file capabilities must be effective again after the operation.
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let set = |name: &str| {
        status
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .map(str::trim)
    };
    assert_eq!(set("CapEff:"), set("CapPrm:"));
}

/// Confines the calling thread like the main thread of a VM.
fn confine() {
    let will = SeccompTerminationActions {
        first: || {},
        log: None,
        status: 77,
    };
    sandbox::begin(SeccompMode::On, PerfEventAccess::Broker, will).unwrap();
    sandbox::confine().unwrap();
}

/// Connects to the socket at `path` through a socket broker without capabilities.
fn connect_by_broker(path: &Path) -> std::io::Result<()> {
    let confinement = ProcessConfinement {
        seccomp: SeccompMode::On,
        landlock: sandbox::has_landlock(),
    };
    let drop_all = || set_capabilities(None, NONE).is_ok();
    let broker = SocketBroker::start(confinement, drop_all).unwrap();
    let destination = broker.add(path)?;
    broker.seal()?;
    destination.connect(0).map(drop)
}

fn child(what: &str, path: &Path) -> Output {
    child_command(module_path!(), TASK, format!("{what} {}", path.display()))
        .output()
        .unwrap()
}

fn refused(out: &Output) -> bool {
    out.status.code() == Some(3)
}

#[test]
fn link_of_another_user_is_not_followed() {
    if !is_root() {
        return;
    }
    let (dir, theirs) = directories();
    let secret = dir.path().join("secret");
    fs::write(&secret, "root's").unwrap();
    fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
    let link = theirs.join("console.log");
    symlink(&secret, &link).unwrap();
    lchown(&link, Some(NOBODY), Some(NOBODY)).unwrap();

    // Append once as the other user with root's capabilities, and once as root.
    let out = child("append", &link);
    assert!(refused(&out), "{}", String::from_utf8_lossy(&out.stderr));
    let line = paths::append(&link, 0o600).unwrap_err().to_string();
    assert!(line.contains("symbolic link of user 65534"), "{line}");
    assert_eq!(fs::read_to_string(&secret).unwrap(), "root's");

    // Use a link in the middle of the path, below a directory that the user cannot access.
    fs::set_permissions(dir.path(), Permissions::from_mode(0o700)).unwrap();
    let inside = dir.path().join("closed");
    fs::create_dir(&inside).unwrap();
    fs::set_permissions(&inside, Permissions::from_mode(0o777)).unwrap();
    let middle = theirs.join("logs");
    symlink(&inside, &middle).unwrap();
    lchown(&middle, Some(NOBODY), Some(NOBODY)).unwrap();
    for what in ["append", "bind"] {
        let out = child(what, &middle.join("new"));
        assert!(refused(&out), "{what}: {}", String::from_utf8_lossy(&out.stderr));
    }
    paths::append(&middle.join("new"), 0o600).unwrap_err();
    paths::bind(&middle.join("new"), None).unwrap_err();
    assert_eq!(fs::read_dir(&inside).unwrap().count(), 0);
}

/// If the user has replaced a kernel or disk image with a symbolic or hard link to a file of root,
/// the VM does not open it. Such a check is necessary because a guest reset opens the kernel and
/// the initrd again.
#[test]
fn file_of_root_is_not_opened_for_another_user() {
    if !is_root() {
        return;
    }
    let (dir, theirs) = directories();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let secret = dir.path().join("secret");
    fs::write(&secret, "root's").unwrap();
    fs::set_permissions(&secret, Permissions::from_mode(0o600)).unwrap();
    let [link, hard, middle] = ["link", "hard", "middle"].map(|name| theirs.join(name));
    symlink(&secret, &link).unwrap();
    fs::hard_link(&secret, &hard).unwrap();
    symlink(dir.path(), &middle).unwrap();
    for link in [&link, &middle] {
        lchown(link, Some(NOBODY), Some(NOBODY)).unwrap();
    }
    for path in [&link, &hard, &middle.join("secret")] {
        for what in ["read", "read-write"] {
            let out = child(what, path);
            assert!(
                refused(&out),
                "{what} {path:?}: {}",
                String::from_utf8_lossy(&out.stderr)
            );
        }
    }
    // A file that the user may read, also through a link, and a file that root specified, can be
    // opened.
    let own = theirs.join("own");
    fs::write(&own, "theirs").unwrap();
    chown(&own, Some(NOBODY), Some(NOBODY)).unwrap();
    fs::remove_file(&link).unwrap();
    symlink("own", &link).unwrap();
    lchown(&link, Some(NOBODY), Some(NOBODY)).unwrap();
    for path in [&own, &link, &secret] {
        for what in ["read", "read-write"] {
            let out = child(what, path);
            assert!(
                out.status.success(),
                "{what} {path:?}: {}",
                String::from_utf8_lossy(&out.stderr)
            );
        }
    }
    // Root itself follows the links of other users, in the same way as without a jail.
    paths::open(&link, libc::O_RDONLY).unwrap();
}

/// A shared directory is resolved with the access rights of the user who will read it, so a
/// directory of root that this user cannot access is rejected.
#[test]
fn directory_of_root_is_not_resolved_for_another_user() {
    if !is_root() {
        return;
    }
    let (dir, theirs) = directories();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let (public, secret) = (dir.path().join("public"), dir.path().join("secret"));
    for directory in [&public, &secret] {
        fs::create_dir_all(directory.join("inner")).unwrap();
    }
    fs::set_permissions(&secret, Permissions::from_mode(0o700)).unwrap();
    let link = |name: &str, to: &Path, owner: u32| {
        let link = theirs.join(name);
        symlink(to, &link).unwrap();
        lchown(&link, Some(owner), Some(owner)).unwrap();
        link
    };
    for hidden in [
        secret.clone(),
        secret.join("inner"),
        link("secret", &secret.join("inner"), NOBODY),
        link("other", &public, NOBODY - 1),
    ] {
        let out = child("resolve", &hidden);
        assert!(refused(&out), "{}: {out:?}", hidden.display());
    }
    let own = link("public", &public.join("inner"), NOBODY);
    for (path, target) in [(own, public.join("inner")), (theirs.clone(), theirs.clone())] {
        let out = child("resolve", &path);
        let said = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success(), "{out:?}");
        assert!(
            said.contains(&format!("resolved {}\n", target.display())),
            "{said}"
        );
    }
}

#[test]
fn confined_thread_opens_files() {
    if !is_root() {
        return;
    }
    let (dir, _) = directories();
    let file = dir.path().join("kernel");
    fs::write(&file, "text").unwrap();
    let out = child("read-confined", &file);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
}

/// A VM does not connect to a backend socket that the user has replaced with a link to a socket of
/// root.
#[test]
fn socket_of_root_is_not_connected_for_another_user() {
    if !is_root() {
        return;
    }
    let (dir, theirs) = directories();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let socket = dir.path().join("socket");
    let _listener = paths::bind(&socket, Some(0o600)).unwrap();
    let link = theirs.join("link");
    symlink(&socket, &link).unwrap();
    lchown(&link, Some(NOBODY), Some(NOBODY)).unwrap();
    let out = child("connect", &link);
    assert!(refused(&out), "{}", String::from_utf8_lossy(&out.stderr));
    // Connections to a socket that root specified, and to a socket that everybody may access,
    // succeed.
    for (mode, path) in [(0o600, &socket), (0o666, &link)] {
        fs::set_permissions(&socket, Permissions::from_mode(mode)).unwrap();
        let out = child("connect", path);
        assert!(
            out.status.success(),
            "{path:?}: {}",
            String::from_utf8_lossy(&out.stderr)
        );
    }
    // Repeat the attempt in a directory that the user cannot access. The broker receives a
    // descriptor of the directory, so the path must not be resolved with root's capabilities.
    let out = child("connect-by-broker", &link);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let private = dir.path().join("private");
    fs::create_dir_all(private.join("open")).unwrap();
    fs::set_permissions(&private, Permissions::from_mode(0o700)).unwrap();
    let socket = private.join("open/socket");
    let _listener = paths::bind(&socket, Some(0o666)).unwrap();
    fs::remove_file(&link).unwrap();
    symlink(&socket, &link).unwrap();
    lchown(&link, Some(NOBODY), Some(NOBODY)).unwrap();
    for what in ["connect", "connect-by-broker"] {
        let out = child(what, &link);
        assert!(refused(&out), "{what}: {}", String::from_utf8_lossy(&out.stderr));
    }
}

#[test]
fn links_of_root_are_followed() {
    if !is_root() {
        return;
    }
    let (dir, theirs) = directories();
    let link = dir.path().join("log");
    symlink(theirs.join("real"), &link).unwrap();
    let out = child("append", &link);
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let real = theirs.join("real");
    assert_eq!(fs::read_to_string(&real).unwrap(), "appended");
    assert_eq!(fs::metadata(&real).unwrap().uid(), NOBODY);
    // Magic links of the kernel, such as the target of /dev/stderr, are followed.
    let file = fs::File::create(dir.path().join("by-descriptor")).unwrap();
    let own = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    paths::append(Path::new(&own), 0o600)
        .unwrap()
        .write_all(b"x")
        .unwrap();
    assert_eq!(file.metadata().unwrap().len(), 1);
}

/// A VM may create a socket in a directory of root that its user cannot access, as long as it still
/// has file capabilities.
#[test]
fn root_directory_is_usable_with_capabilities() {
    if !is_root() {
        return;
    }
    let (dir, _) = directories();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o700)).unwrap();
    for what in ["append", "bind"] {
        let path = dir.path().join(what);
        let out = child(what, &path);
        assert!(
            out.status.success(),
            "{what}: {}",
            String::from_utf8_lossy(&out.stderr)
        );
        assert_eq!(fs::metadata(&path).unwrap().uid(), NOBODY, "{what}");
    }
    // A file that other users may have created in the directory is rejected.
    fs::set_permissions(dir.path(), Permissions::from_mode(0o770)).unwrap();
    assert!(refused(&child("append", &dir.path().join("new"))));
}

#[test]
fn user_directory_below_inaccessible_one_is_reached() {
    if !is_root() {
        return;
    }
    let (dir, theirs) = directories();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o700)).unwrap();
    let out = child("bind", &theirs.join("m.sock"));
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let meta = fs::metadata(theirs.join("m.sock")).unwrap();
    assert_eq!((meta.uid(), meta.mode() & 0o777), (NOBODY, 0o666));
}

/// A socket file has its permissions from its creation. Otherwise, another user could replace the
/// file before they are set.
#[test]
fn socket_has_its_permissions_when_it_appears() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    for mode in [0o600, 0o660, 0o666, 0o777] {
        let watched = path.clone();
        let watcher = std::thread::spawn(move || {
            loop {
                if let Ok(meta) = fs::symlink_metadata(&watched) {
                    return meta.mode() & 0o777;
                }
            }
        });
        let listener = paths::bind(&path, Some(mode)).unwrap();
        assert_eq!(watcher.join().unwrap(), mode);
        drop(listener);
        paths::remove_socket(&path, None);
        assert!(!path.exists());
    }
}

#[test]
fn only_stale_socket_is_replaced() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    drop(UnixListener::bind(&path).unwrap());
    let live = paths::bind(&path, Some(0o600)).unwrap();
    let taken = paths::bind(&path, Some(0o600)).unwrap_err();
    assert_eq!(taken.kind(), std::io::ErrorKind::AddrInUse);
    drop(live);
    fs::remove_file(&path).unwrap();
    fs::write(&path, "data").unwrap();
    paths::bind(&path, None).unwrap_err();
    assert_eq!(fs::read_to_string(&path).unwrap(), "data");
    // A symbolic link is not a socket, regardless of its target.
    fs::remove_file(&path).unwrap();
    symlink(dir.path().join("elsewhere"), &path).unwrap();
    paths::bind(&path, None).unwrap_err();
    assert!(!dir.path().join("elsewhere").exists());
}

#[test]
fn open_directory_survives_path_replacement() {
    let dir = tempfile::tempdir().unwrap();
    let (first, second) = (dir.path().join("first"), dir.path().join("second"));
    fs::create_dir(&first).unwrap();
    let held = PrivilegedDirectory::open(&first).unwrap();
    fs::rename(&first, &second).unwrap();
    fs::create_dir(&first).unwrap();
    fs::write(held.path("file".as_ref()), "").unwrap();
    assert!(second.join("file").exists() && !first.join("file").exists());
}
