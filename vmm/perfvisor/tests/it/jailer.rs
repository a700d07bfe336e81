//! `perfvisor jailer`: a jailed program serves the API and runs a VM as another user.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::json;
use test_support::skip;

use crate::common::test_lock::{self, SharedLock};
use crate::common::vm::{PROGRAM, eventually, has_kvm, run_and_read_stderr, stdout_of};
use crate::firecracker::{request, terminate};

/// User and group of the jailed program.
const USER: &str = "54321";

/// Temporary directories in which a test builds a jail.
struct JailerTest {
    base: tempfile::TempDir,
    _lock: SharedLock,
}

impl JailerTest {
    /// Creates the directories. Returns `None` if this user cannot build a jail, or KVM is
    /// unavailable.
    fn new() -> Option<Self> {
        if !has_kvm() {
            return None;
        }
        let base = tempfile::tempdir().unwrap();
        let probe = base.path().join("null");
        let make = Command::new("unshare")
            .args(["-m", "mknod", probe.to_str().unwrap(), "c", "1", "3"])
            .stderr(Stdio::null())
            .status();
        if !make.is_ok_and(|status| status.success()) {
            skip::skipped("mounts and devices cannot be created here", false);
            return None;
        }
        std::os::unix::fs::symlink(PROGRAM, base.path().join("firecracker")).unwrap();
        Some(Self {
            base,
            _lock: test_lock::shared(),
        })
    }

    /// Returns the root directory of the jail.
    fn root(&self) -> PathBuf {
        self.base.path().join("jails/firecracker/web/root")
    }

    fn jailer(&self, options: &[&str]) -> Command {
        let link = self.base.path().join("jailer");
        if !link.exists() {
            // The name under which the program is started selects the command `jailer`.
            std::os::unix::fs::symlink(PROGRAM, &link).unwrap();
        }
        let mut command = Command::new(link);
        command
            .args(["--id", "web", "--uid", USER, "--gid", USER])
            .arg("--exec-file")
            .arg(self.base.path().join("firecracker"))
            .arg("--chroot-base-dir")
            .arg(self.base.path().join("jails"))
            .args(options)
            .args(["--", "--api-sock", "/run/api"])
            .stdin(Stdio::null());
        command
    }

    /// Starts a VM through the API in the jail, and counts its cycles from outside the jail.
    fn assert_runs_vm(&self) {
        let root = self.root();
        let api = root.join("run/api");
        eventually("the API is served", || {
            std::os::unix::net::UnixStream::connect(&api).is_ok()
        });
        fs::write(root.join("kernel"), guest_images::bare_metal::BUILTIN).unwrap();
        for (path, body) in [
            (
                "/boot-source",
                json!({"kernel_image_path": "/kernel", "boot_args": "loop"}),
            ),
            ("/serial", json!({"serial_out_path": "/run/serial"})),
            ("/actions", json!({"action_type": "InstanceStart"})),
        ] {
            let (status, fault) = request(&api, "PUT", path, &body);
            assert_eq!(status, 204, "{path}: {fault}");
        }
        let count = stdout_of(
            Command::new(PROGRAM)
                .args(["stat", "web", "-x,", "-e", "cycles", "-d", "0.5"])
                .env("XDG_RUNTIME_DIR", root.join("run")),
        );
        let cycles = count
            .split(',')
            .next()
            .and_then(|count| count.parse::<f64>().ok());
        assert!(cycles.is_some_and(|cycles| cycles > 0.0), "{count}");
    }
}

/// A control group, removed on drop together with the VM's group.
struct TestGroup {
    name: String,
    path: PathBuf,
}

impl TestGroup {
    /// Creates the group. Returns `None` if this user cannot create control groups.
    fn new() -> Option<Self> {
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        let mount = mounts.lines().find(|line| line.contains(" cgroup2 "));
        let mount = mount.and_then(|line| line.split(' ').nth(1));
        let name = format!("perfvisor-jailer-{}", std::process::id());
        let path = mount.map(|mount| Path::new(mount).join(&name));
        match path.filter(|path| fs::create_dir(path).is_ok()) {
            Some(path) => Some(Self { name, path }),
            None => {
                skip::skipped("in part: control groups cannot be created here", false);
                None
            }
        }
    }
}

impl Drop for TestGroup {
    fn drop(&mut self) {
        let _ = fs::remove_dir(self.path.join("web"));
        let _ = fs::remove_dir(&self.path);
    }
}

/// Returns the words after `key` in a file of `/proc`.
fn proc_field(pid: u32, file: &str, key: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{pid}/{file}")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(key));
    line.unwrap_or_default()
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
}

fn wait(mut child: Child) -> Option<i32> {
    child.wait().unwrap().code()
}

#[test]
fn jailed_program_runs_as_another_user_with_limits() {
    let Some(test) = JailerTest::new() else { return };
    let mut limits = vec!["--netns", "/proc/self/ns/net", "--resource-limit", "no-file=1024"];
    let group = TestGroup::new();
    if let Some(group) = &group {
        limits.extend(["--cgroup-version", "2", "--parent-cgroup", &group.name]);
        limits.extend(["--cgroup", "cgroup.max.depth=3"]);
    }
    let child = test.jailer(&limits).spawn().unwrap();
    test.assert_runs_vm();
    let pid = child.id();
    assert_eq!(proc_field(pid, "status", "Uid:"), [USER; 4].join(" "));
    assert_eq!(proc_field(pid, "status", "Gid:"), [USER; 4].join(" "));
    assert_eq!(proc_field(pid, "status", "Groups:"), "");
    assert_eq!(proc_field(pid, "status", "CapEff:"), "0000000000000000");
    assert_eq!(proc_field(pid, "limits", "Max open files"), "1024 1024 files");
    if let Some(group) = &group {
        let expected = format!("/{}/web", group.name);
        assert_eq!(proc_field(pid, "cgroup", "0::"), expected);
        let depth = fs::read_to_string(group.path.join("web/cgroup.max.depth")).unwrap();
        assert_eq!(depth.trim(), "3");
    }
    let environment = fs::read_to_string(format!("/proc/{pid}/environ")).unwrap();
    assert_eq!(environment, "XDG_RUNTIME_DIR=/run\0");
    let mounts = fs::read_to_string(format!("/proc/{pid}/mounts")).unwrap();
    assert!(mounts.lines().count() <= 3, "{mounts}");
    terminate(pid);
    assert_eq!(wait(child), Some(10));
}

/// With `--daemonize` and `--new-pid-ns`, the jailed program is process 1 of a PID namespace, in
/// its own session, and its process ID is written to a file.
#[test]
fn daemon_has_a_pid_namespace() {
    let Some(test) = JailerTest::new() else { return };
    let mut jailer = test.jailer(&["--daemonize", "--new-pid-ns"]);
    assert_eq!(wait(jailer.spawn().unwrap()), Some(0));
    let pid = fs::read_to_string(test.root().join("firecracker.pid")).unwrap();
    let pid: u32 = pid.parse().unwrap();
    test.assert_runs_vm();
    assert!(proc_field(pid, "status", "NSpid:").ends_with(" 1"));
    let input = fs::read_link(format!("/proc/{pid}/fd/0")).unwrap();
    assert_eq!(input, Path::new("/dev/null"));
    terminate(pid);
    eventually("the VM ends", || !Path::new(&format!("/proc/{pid}")).exists());
    // Another VM with the same ID replaces the files.
    let again = test.jailer(&[]).spawn().unwrap();
    test.assert_runs_vm();
    terminate(again.id());
    assert_eq!(wait(again), Some(10));
}

#[test]
fn unsupported_and_invalid_options_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let exec = dir.path().join("firecracker");
    std::os::unix::fs::symlink(PROGRAM, &exec).unwrap();
    let base = dir.path().join("jails");
    let base = base.to_str().unwrap();
    for (options, reason) in [
        (
            &["--cgroup", "cpu.shares=2"][..],
            "--cgroup-version 1: unsupported",
        ),
        (&["--cgroup", "cpu"], "FILE=VALUE"),
        (&["--parent-cgroup", "../x"], "relative path"),
        (&["--resource-limit", "core=1"], "fsize=BYTES or no-file=N"),
        (
            &["--netns", "/no/such/file"],
            "--netns /no/such/file: No such file",
        ),
        (&["--node", "0"], "--node"),
    ] {
        let mut command = Command::new(PROGRAM);
        command
            .args(["jailer", "--id", "web", "--uid", USER, "--gid", USER])
            .args(["--exec-file", exec.to_str().unwrap()])
            .args(["--chroot-base-dir", base])
            .args(options);
        let (status, text) = run_and_read_stderr(&mut command);
        assert_eq!(status, Some(2), "{options:?}: {text}");
        assert!(text.contains(reason), "{options:?}: {text}");
    }
    let named = [
        "jailer",
        "--id",
        "a",
        "--uid",
        "1",
        "--gid",
        "1",
        "--exec-file",
        "/bin/sh",
    ];
    let text = run_and_read_stderr(Command::new(PROGRAM).args(named)).1;
    assert!(text.contains("the name must contain 'firecracker'"), "{text}");
    let version = stdout_of(Command::new(PROGRAM).args(["jailer", "--version"]));
    assert_eq!(version, "Jailer v1.17.0\n");
}
