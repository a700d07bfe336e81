//! Tests of the resources that are accessible in a jail. A privileged user can create namespaces
//! for a single thread, so each test uses a separate thread. For other users, the process would
//! have to be single-threaded.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::memory_file::memory_file;
use sandbox::{JailContents, JailError};

/// Runs `test` on a thread in a jail that contains `inside`. Returns `false` if this user cannot
/// create a jail.
fn jailed(inside: JailContents, test: impl FnOnce() + Send + 'static) -> bool {
    let thread = std::thread::spawn(move || {
        let jail = match sandbox::separate() {
            Ok(jail) => jail,
            Err(JailError::NoUserNamespace(e)) => {
                eprintln!("SKIP: only who may make namespaces can have them for one thread: {e}");
                return false;
            }
            Err(e) => panic!("{e}: {:?}", std::error::Error::source(&e)),
        };
        assert!(!jail.has_user_namespace());
        jail.close(&inside)
            .unwrap_or_else(|e| panic!("{e}: {:?}", std::error::Error::source(&e)));
        test();
        true
    });
    thread.join().unwrap()
}

fn mount(args: &[&str], path: &Path) {
    let mounted = Command::new("mount").args(args).arg(path).status();
    assert!(mounted.unwrap().success(), "{args:?} {}", path.display());
}

/// Mounts `/proc` below `root` and makes `root` the root directory of this thread, like chroot(1).
/// If `bound` is `true`, `root` becomes a mount point first.
fn in_a_chroot(root: &Path, bound: bool) {
    // Give this thread its own mount namespace, which the mounts below affect.
    unshare_mounts();
    if bound {
        mount(&["--bind", root.to_str().unwrap()], root);
    }
    let proc = root.join("proc");
    fs::create_dir_all(&proc).unwrap();
    mount(&["--rbind", "/proc"], &proc);
    std::os::unix::fs::chroot(root).unwrap();
    std::env::set_current_dir("/").unwrap();
}

#[expect(unsafe_code, reason = "unshare(2)")]
fn unshare_mounts() {
    // SAFETY: the call passes only an integer.
    assert_eq!(unsafe { libc::unshare(libc::CLONE_FS | libc::CLONE_NEWNS) }, 0);
    mount(&["--make-rprivate"], Path::new("/"));
}

/// A jail cannot be created if the root directory is not a mount point, as after chroot. The case
/// of an initramfs root, which cannot be detached, is tested in the lab
/// (`integration/tests/lab/machine.rs`).
#[test]
fn chroot_must_be_a_mount() {
    if !jailed(JailContents::default(), || {}) {
        return;
    }
    let outside = tempfile::tempdir().unwrap();
    fs::write(outside.path().join("file"), "text").unwrap();
    for bound in [true, false] {
        let root = outside.path().to_owned();
        let thread = std::thread::spawn(move || {
            in_a_chroot(&root, bound);
            assert_eq!(names("/"), ["file", "proc"]);
            if !bound {
                let refused = sandbox::separate().unwrap_err();
                return assert!(matches!(refused, JailError::Chroot), "{refused}");
            }
            let jail = sandbox::separate().unwrap_or_else(|e| panic!("{e}"));
            jail.close(&JailContents::default())
                .unwrap_or_else(|e| panic!("{e}: {:?}", std::error::Error::source(&e)));
            for root in ["/", "/.."] {
                assert_eq!(names(root), ["proc"], "{root}");
            }
        });
        thread.join().unwrap();
    }
}

fn missing<T>(result: io::Result<T>) -> bool {
    matches!(result, Err(e) if e.kind() == ErrorKind::NotFound)
}

fn names(dir: &str) -> Vec<String> {
    let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
    let mut names: Vec<String> = fs::read_dir(dir).unwrap().map(name).collect();
    names.sort();
    names
}

#[test]
fn jail_contains_named_files_only() {
    let dir = tempfile::tempdir().unwrap();
    let read = dir.path().join("read");
    fs::create_dir(&read).unwrap();
    fs::write(read.join("file"), "text").unwrap();
    fs::write(dir.path().join("beside"), "secret").unwrap();
    let open_before = File::open(dir.path().join("beside")).unwrap();
    let beside = dir.path().join("beside");
    let inside = JailContents {
        read: vec![read.clone(), dir.path().join("missing")],
        change: Vec::new(),
    };
    jailed(inside, move || {
        assert_eq!(fs::read_to_string(read.join("file")).unwrap(), "text");
        assert!(missing(File::open("/etc/passwd")));
        assert!(missing(File::open(&beside)));
        // Neither parent directories nor new files provide a path out of the jail.
        assert!(missing(File::open(read.join("../../../../../../etc/passwd"))));
        for at in [read.join("new"), PathBuf::from("/new")] {
            let made = File::create(&at).unwrap_err();
            assert_eq!(made.kind(), ErrorKind::ReadOnlyFilesystem, "{}", at.display());
        }
        assert_eq!(io::read_to_string(&open_before).unwrap(), "secret", "as it was");
    });
}

#[test]
fn jail_shows_own_process_only() {
    jailed(JailContents::default(), || {
        let own = std::process::id().to_string();
        assert_eq!(names("/proc"), [own.clone(), "self".into(), "thread-self".into()]);
        let link = fs::read_link("/proc/thread-self").unwrap();
        let thread = link.strip_prefix(Path::new(&own).join("task")).unwrap();
        let thread: u32 = thread.to_str().unwrap().parse().unwrap();
        assert_eq!(thread, sandbox::host_tid());
        let stat = fs::read_to_string("/proc/thread-self/stat").unwrap();
        assert!(stat.starts_with(&format!("{thread} (")), "{stat}");
        assert!(fs::read_to_string("/proc/self/status").unwrap().contains("Name:"));
        let file = memory_file();
        File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    });
}

#[test]
fn jail_sockets_can_be_reached_and_removed() {
    let [changed, read] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [path, kept] = [&changed, &read].map(|dir| dir.path().join("socket"));
    let _listeners = [&path, &kept].map(|path| UnixListener::bind(path).unwrap());
    let inside = JailContents {
        read: vec![read.path().to_owned()],
        change: vec![changed.path().to_owned()],
    };
    let (socket, other) = (path.clone(), kept.clone());
    let ran = jailed(inside, move || {
        UnixStream::connect(&socket).unwrap();
        fs::remove_file(&socket).unwrap();
        UnixStream::connect(&other).unwrap();
        fs::remove_file(&other).unwrap_err();
    });
    assert!(!ran || !path.exists(), "it is the host's directory");
    assert!(kept.exists());
}

#[test]
fn jail_has_no_network() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    TcpStream::connect(at).unwrap();
    jailed(JailContents::default(), move || {
        TcpStream::connect(at).unwrap_err();
    });
}

#[test]
fn jail_has_no_executable_files() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("program");
    fs::copy("/bin/true", &program).unwrap();
    let inside = JailContents {
        read: Vec::new(),
        change: vec![dir.path().to_owned()],
    };
    jailed(inside, move || {
        let refused = Command::new(&program).status().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
    });
}

#[test]
fn jail_mounts_do_not_propagate() {
    let before = fs::read_to_string("/proc/self/mountinfo").unwrap();
    jailed(JailContents::default(), || {});
    assert_eq!(fs::read_to_string("/proc/self/mountinfo").unwrap(), before);
}
