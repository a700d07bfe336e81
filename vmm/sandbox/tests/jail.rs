//! What a thread in a jail can reach. Who may make namespaces gets them for one thread, so each test has a
//! thread of its own; others would need a process without threads.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;

use sandbox::{Inside, JailError};

/// Runs `test` on a thread that is in a jail with what is `inside`. `false`: this user may have none.
fn jailed(inside: Inside, test: impl FnOnce() + Send + 'static) -> bool {
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
fn a_thread_sees_no_file_but_what_was_named() {
    let dir = tempfile::tempdir().unwrap();
    let read = dir.path().join("read");
    fs::create_dir(&read).unwrap();
    fs::write(read.join("file"), "text").unwrap();
    fs::write(dir.path().join("beside"), "secret").unwrap();
    let open_before = File::open(dir.path().join("beside")).unwrap();
    let beside = dir.path().join("beside");
    let inside = Inside {
        read: vec![read.clone(), dir.path().join("missing")],
        change: Vec::new(),
    };
    jailed(inside, move || {
        assert_eq!(fs::read_to_string(read.join("file")).unwrap(), "text");
        assert!(missing(File::open("/etc/passwd")));
        assert!(missing(File::open(&beside)));
        // Nor by a way up, nor by a new file.
        assert!(missing(File::open(read.join("../../../../../../etc/passwd"))));
        for at in [read.join("new"), PathBuf::from("/new")] {
            let made = File::create(&at).unwrap_err();
            assert_eq!(made.kind(), ErrorKind::ReadOnlyFilesystem, "{}", at.display());
        }
        assert_eq!(io::read_to_string(&open_before).unwrap(), "secret", "as it was");
    });
}

#[test]
fn a_thread_sees_no_process_but_its_own() {
    jailed(Inside::default(), || {
        let own = std::process::id().to_string();
        assert_eq!(names("/proc"), [own, "self".into()]);
        assert!(fs::read_to_string("/proc/self/status").unwrap().contains("Name:"));
        let file = memory_file();
        File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap();
    });
}

/// As rings and texts for operators are.
#[expect(unsafe_code, reason = "a memory file")]
fn memory_file() -> File {
    // SAFETY: the name is a string that ends with 0.
    let fd = unsafe { libc::memfd_create(c"jail".as_ptr(), 0) };
    assert!(fd >= 0, "{}", io::Error::last_os_error());
    // SAFETY: the call made this descriptor, and nobody else owns it.
    unsafe { File::from_raw_fd(fd) }
}

#[test]
fn sockets_are_reached_where_that_was_named_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let _listener = UnixListener::bind(&path).unwrap();
    let (socket, inside) = (
        path.clone(),
        Inside {
            read: Vec::new(),
            change: vec![dir.path().to_owned()],
        },
    );
    let ran = jailed(inside, move || {
        UnixStream::connect(&socket).unwrap();
        fs::remove_file(&socket).unwrap();
    });
    assert!(!ran || !path.exists(), "it is the host's directory");
}

#[test]
fn no_network_is_reached() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    TcpStream::connect(at).unwrap();
    jailed(Inside::default(), move || {
        TcpStream::connect(at).unwrap_err();
    });
}

#[test]
fn nothing_in_a_jail_is_executed() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("program");
    fs::copy("/bin/true", &program).unwrap();
    let inside = Inside {
        read: Vec::new(),
        change: vec![dir.path().to_owned()],
    };
    jailed(inside, move || {
        let refused = std::process::Command::new(&program).status().unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied);
    });
}

#[test]
fn the_host_sees_nothing_of_a_jail() {
    let before = fs::read_to_string("/proc/self/mountinfo").unwrap();
    jailed(Inside::default(), || {});
    assert_eq!(fs::read_to_string("/proc/self/mountinfo").unwrap(), before);
}
