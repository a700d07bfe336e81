//! Tests of restricted file access. Landlock rules apply to a thread and its descendants, so each
//! test uses a separate thread.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::thread::Builder;

use crate::common::memory_file::memory_file;
use sandbox::{AccessibleFiles, SandboxedThreadKind};

/// Runs `test` on a thread that can read files below `read` and remove files below `remove`.
/// Returns `false` if this host has no landlock.
fn with_files(read: &[&Path], remove: &[&Path], test: impl FnOnce() + Send + 'static) -> bool {
    static BEGUN: Once = Once::new();
    if !sandbox::has_landlock() {
        eprintln!("SKIP: this kernel has no landlock");
        return false;
    }
    BEGUN.call_once(|| sandbox::begin_files().unwrap());
    let owned = |paths: &[&Path]| paths.iter().map(|path| PathBuf::from(*path)).collect();
    let files = AccessibleFiles {
        read: owned(read),
        remove: owned(remove),
    };
    let thread = std::thread::spawn(move || {
        sandbox::only_files(&files).unwrap();
        test();
    });
    thread.join().unwrap();
    true
}

fn refused<T>(result: io::Result<T>) -> bool {
    matches!(result, Err(e) if e.kind() == ErrorKind::PermissionDenied)
}

#[test]
fn thread_opens_permitted_paths_only() {
    let dir = tempfile::tempdir().unwrap();
    let (within, beside) = (dir.path().join("within"), dir.path().join("beside"));
    for at in [&within, &beside] {
        fs::create_dir(at).unwrap();
        fs::write(at.join("file"), "text").unwrap();
    }
    let open_before = File::open(beside.join("file")).unwrap();
    let missing = dir.path().join("missing");
    let (named, other) = (within.clone(), beside.clone());
    let ran = with_files(&[&within, &missing], &[], move || {
        assert_eq!(fs::read_to_string(named.join("file")).unwrap(), "text");
        assert_eq!(fs::read_dir(&named).unwrap().count(), 1);
        assert!(refused(File::open(other.join("file"))));
        assert!(refused(fs::read_dir(&other)));
        assert!(refused(File::open("/etc/passwd")), "whoever the user is");
        for at in [&named, &other] {
            assert!(refused(OpenOptions::new().append(true).open(at.join("file"))));
            assert!(refused(File::create(at.join("new"))));
            assert!(refused(fs::remove_file(at.join("file"))));
        }
        assert_eq!(io::read_to_string(&open_before).unwrap(), "text", "as it was");
    });
    assert!(!ran || !beside.join("new").exists());
}

#[test]
fn files_are_removed_in_permitted_directories() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().to_owned();
    fs::write(at.join("socket"), "").unwrap();
    with_files(&[], &[dir.path()], move || {
        assert!(refused(File::open(at.join("socket"))));
        fs::remove_file(at.join("socket")).unwrap();
    });
}

/// With restricted file access, memory files can still be reopened through /proc. Rings and texts
/// sent by operators are such files.
#[test]
fn memory_files_are_opened_again() {
    with_files(&[], &[], || {
        let file = tempfile::tempfile_in("/dev/shm");
        assert!(file.is_err(), "no file is made");
        let memory = memory_file();
        let again = format!("/proc/self/fd/{}", memory.as_raw_fd());
        File::open(&again).unwrap();
        let writable = OpenOptions::new().read(true).write(true).open(&again).unwrap();
        writable.set_len(4096).unwrap();
    });
}

#[test]
fn tcp_ports_are_denied() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    // Port rights require Linux 6.7. The landlock version indicates whether they exist, but not
    // whether they are denied.
    const WITH_PORTS: i64 = 4;
    if version() < WITH_PORTS {
        return eprintln!("SKIP: this kernel's landlock knows no ports");
    }
    with_files(&[], &[], move || {
        assert!(refused(TcpListener::bind("127.0.0.1:0")));
        assert!(refused(TcpStream::connect(at)));
    });
}

#[test]
fn restricted_kinds_cannot_open_permitted_paths() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "text").unwrap();
    with_files(&[dir.path()], &[], move || {
        for kind in SandboxedThreadKind::ALL {
            let (file, (tell, told)) = (file.clone(), std::sync::mpsc::channel());
            let run = move || tell.send(File::open(&file).map(drop)).unwrap();
            let thread = sandbox::spawn(kind, Builder::new(), run).unwrap();
            let opened = told.recv().unwrap();
            thread.join().unwrap();
            match kind {
                SandboxedThreadKind::Main | SandboxedThreadKind::Starter | SandboxedThreadKind::Debugger => {
                    opened.unwrap()
                }
                _ => assert!(refused(opened), "{kind}"),
            }
        }
    });
}

/// Returns the landlock version of the kernel. The value is less than 1 if landlock is unavailable.
#[expect(unsafe_code, reason = "landlock_create_ruleset has no wrapper here")]
fn version() -> i64 {
    const LANDLOCK_CREATE_RULESET_VERSION: u32 = 1;
    let nothing = std::ptr::null::<libc::c_void>();
    // SAFETY: with this flag the call takes no structure and returns a number.
    unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            nothing,
            0,
            LANDLOCK_CREATE_RULESET_VERSION,
        )
    }
}
