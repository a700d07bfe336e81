//! `run --console` and `--virtio-console`: the built-in guest's output reaches each console, and
//! the operator can find the console.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use crate::common::test_lock::{self, SharedLock};
use crate::common::vm::{PROGRAM, eventually, has_kvm, ps_until_all_answer};
use tempfile::TempDir;

/// One of the last lines printed by a spinning guest.
const SPINNING: &str = "spinning";

struct ConsoleVm {
    child: Child,
    dir: TempDir,
    _lock: SharedLock,
}

impl ConsoleVm {
    /// Starts a spinning VM with its console at `place`. Returns `None` if KVM is unavailable.
    fn start(dir: TempDir, place: &str) -> Option<Self> {
        Self::start_with(dir, place, &[])
    }

    fn start_with(dir: TempDir, place: &str, more: &[&str]) -> Option<Self> {
        if !has_kvm() {
            return None;
        }
        let lock = test_lock::shared();
        let child = Command::new(PROGRAM)
            .args(["run", "--name", "c", "--memory", "32M", "--cmdline", "loop"])
            .args(["--console", place])
            .args(more)
            .env("XDG_RUNTIME_DIR", dir.path())
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Some(Self {
            child,
            dir,
            _lock: lock,
        })
    }

    /// Returns the output of `ps`, once the VM has answered.
    fn ps(&self) -> String {
        ps_until_all_answer(|| self.say(&["ps"]))
    }

    fn say(&self, args: &[&str]) -> String {
        let mut command = Command::new(PROGRAM);
        let out = command
            .args(args)
            .env("XDG_RUNTIME_DIR", self.dir.path())
            .output()
            .unwrap();
        String::from_utf8(out.stdout).unwrap()
    }

    /// Stops the VM, and returns its standard output.
    fn stop(mut self) -> String {
        eventually("the VM can be controlled", || {
            self.say(&["ctl", "c", "stop"]).contains('c')
        });
        let mut text = String::new();
        self.child
            .stdout
            .take()
            .unwrap()
            .read_to_string(&mut text)
            .unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(0));
        text
    }
}

impl Drop for ConsoleVm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn console_file_receives_all_output() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let Some(vm) = ConsoleVm::start(dir, &format!("file={}", path.display())) else {
        return;
    };
    let text = || std::fs::read_to_string(&path).unwrap_or_default();
    eventually("the guest spins", || text().contains(SPINNING));
    assert!(vm.ps().contains(&format!("file={}", path.display())));
    assert_eq!(vm.stop(), "");
}

#[test]
fn console_socket_replays_earlier_output() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("console");
    let Some(vm) = ConsoleVm::start(dir, &format!("socket={}", path.display())) else {
        return;
    };
    let mut client = None;
    eventually("the socket is there", || {
        client = UnixStream::connect(&path).ok();
        client.is_some()
    });
    let client = BufReader::new(client.unwrap());
    assert!(
        client
            .lines()
            .map_while(Result::ok)
            .any(|line| line.contains(SPINNING))
    );
    assert_eq!(vm.stop(), "");
    assert!(!path.exists());
}

#[test]
fn console_pty_path_is_reported() {
    let Some(mut vm) = ConsoleVm::start(tempfile::tempdir().unwrap(), "pty") else {
        return;
    };
    let mut lines = BufReader::new(vm.child.stderr.take().unwrap())
        .lines()
        .map_while(Result::ok);
    let said = lines.find(|line| line.contains("/dev/pts/")).unwrap();
    let path = said.rsplit('=').next().unwrap();
    let terminal = BufReader::new(File::open(path).unwrap());
    assert!(
        terminal
            .lines()
            .map_while(Result::ok)
            .any(|line| line.contains(SPINNING))
    );
    assert!(
        vm.say(&["ctl", "c", "status"])
            .contains(&format!("ttyS0 at pty={path}"))
    );
    assert_eq!(vm.stop(), "");
}

#[test]
fn invalid_console_is_rejected_in_one_line() {
    let Some(vm) = ConsoleVm::start(tempfile::tempdir().unwrap(), "none") else {
        return;
    };
    assert_eq!(vm.stop(), "");
    for place in ["file=/nonexistent/log", "socket=/nonexistent/s", "screen"] {
        let out = Command::new(PROGRAM)
            .args(["run", "--console", place])
            .output()
            .unwrap();
        let line = String::from_utf8_lossy(&out.stderr);
        assert_eq!((out.status.code(), line.lines().count()), (Some(2), 1), "{line}");
        assert!(line.contains("--console"), "{line}");
    }
}

/// The serial port and the virtio console cannot share one location. Invalid values of `--console`
/// and `--virtio-console` cause errors of the same form.
#[test]
fn virtio_console_needs_its_own_location() {
    let dir = tempfile::tempdir().unwrap();
    let both = format!("socket={}", dir.path().join("both").display());
    for (args, says) in [
        (&["--virtio-console", "tty"][..], "--console none"),
        (&["--console", &both, "--virtio-console", &both], "already used"),
        (&["--virtio-console", "file=/nonexistent/log"], "--virtio-console"),
        (&["--virtio-console", "screen"], "--virtio-console"),
    ] {
        let out = Command::new(PROGRAM).arg("run").args(args).output().unwrap();
        let line = String::from_utf8_lossy(&out.stderr);
        assert_eq!((out.status.code(), line.lines().count()), (Some(2), 1), "{line}");
        assert!(line.contains(says), "{line}");
    }
}

#[test]
fn status_reports_virtio_console_location() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("log");
    let place = format!("file={}", path.display());
    let Some(vm) = ConsoleVm::start_with(dir, "none", &["--virtio-console", &place]) else {
        return;
    };
    eventually("the VM can be controlled", || {
        vm.say(&["ctl", "c", "status"])
            .contains(&format!("hvc0 at {place}"))
    });
    assert!(vm.ps().contains(&format!("none,hvc0:{place}")));
    assert_eq!(vm.stop(), "");
}
