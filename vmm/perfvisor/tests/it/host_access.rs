//! Access of a VM to its host: inherited descriptors, environment, symbolic links of other users,
//! sockets of other VMs, and the amount of data that it may write.

use std::fs;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::common::process::is_root;
use crate::common::unprivileged::NOBODY;
use crate::common::vm::{PROGRAM, SpinningVm, children, eventually};
use test_support::skip::skipped;

/// Returns the processes of the VM, with their names.
fn processes(vm: &SpinningVm) -> Vec<(u32, String)> {
    let started = vm.child.id();
    let mut found = vec![(started, "the started process".to_owned())];
    found.extend(children(started));
    if vm.pid() != started {
        found.extend(children(vm.pid()));
    }
    found
}

/// Returns the descriptors of a process and their targets.
fn descriptors(pid: u32) -> Vec<(u32, PathBuf)> {
    let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let one = |entry: fs::DirEntry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        Some((number, fs::read_link(entry.path()).ok()?))
    };
    open.filter_map(one).collect()
}

/// Starts a VM from a shell with descriptor 77 open and a secret in the environment.
fn vm_with_inherited_state(args: &[&str]) -> Option<SpinningVm> {
    let mut shell = Command::new("/bin/bash");
    shell
        .args(["-c", "exec 77</etc/passwd; exec \"$0\" \"$@\"", PROGRAM])
        .env("SECRET_TOKEN", "correct-horse");
    SpinningVm::start_by(shell, "careless", args)
}

#[test]
fn jailed_vm_closes_inherited_descriptors() {
    if !is_root() {
        return;
    }
    let Some(vm) = vm_with_inherited_state(&["--jail"]) else {
        return;
    };
    let processes = processes(&vm);
    assert!(
        processes.len() >= 5,
        "supervisor, VM, keeper and brokers: {processes:?}"
    );
    for (pid, name) in processes {
        let open = descriptors(pid);
        let leaked = open.iter().find(|(_, to)| to == Path::new("/etc/passwd"));
        assert!(leaked.is_none(), "{name}: {open:?}");
    }
}

/// Child processes of the VM do not inherit the descriptor that the VM has inherited.
#[test]
fn inherited_descriptor_is_close_on_exec() {
    let Some(vm) = vm_with_inherited_state(&[]) else {
        return;
    };
    let info = fs::read_to_string(format!("/proc/{}/fdinfo/77", vm.child.id())).unwrap();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = i32::from_str_radix(flags.unwrap().trim(), 8).unwrap();
    assert_ne!(flags & libc::O_CLOEXEC, 0, "{info}");
}

#[test]
fn environment_is_cleared_in_all_processes() {
    for args in [&[][..], &["--jail"]] {
        if !args.is_empty() && !is_root() {
            return;
        }
        let Some(vm) = vm_with_inherited_state(args) else {
            return;
        };
        for (pid, name) in processes(&vm) {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap();
            let text = String::from_utf8_lossy(&environment);
            assert!(!text.contains("correct-horse"), "{name}: {text}");
            assert!(!text.contains("PATH="), "{name}: the first copy is overwritten");
        }
    }
}

/// A jailed VM notifies a service manager that listens on an abstract socket. Such a socket belongs
/// to the host's network namespace, so the VM must connect before it enters the jail.
#[test]
fn jailed_vm_notifies_abstract_socket() {
    if !is_root() {
        return;
    }
    let name = format!("perfvisor-test-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(&name).unwrap();
    let manager = UnixDatagram::bind_addr(&address).unwrap();
    let variable = PathBuf::from(format!("@{name}"));
    let Some(mut vm) = SpinningVm::start_with("told", &["--jail"], ("NOTIFY_SOCKET", &variable)) else {
        return;
    };
    let heard = || {
        let mut bytes = [0; 256];
        let count = manager.recv(&mut bytes).unwrap();
        String::from_utf8_lossy(&bytes[..count]).into_owned()
    };
    let ready = format!("READY=1\nMAINPID={}\n", vm.child.id());
    assert_eq!(heard(), ready);
    let stopped = vm.operator(&["ctl", "told", "stop"]).status().unwrap();
    assert!(stopped.success());
    assert_eq!(heard(), "STOPPING=1\n");
    assert_eq!(vm.child.wait().unwrap().code(), Some(0), "{:?}", vm.log_lines());
}

/// Creates a directory of user NOBODY with a symbolic link to a file of root.
fn directory_with_link() -> (tempfile::TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (secret, theirs) = (dir.path().join("secret"), dir.path().join("theirs"));
    fs::write(&secret, "root's").unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    fs::create_dir(&theirs).unwrap();
    chown(&theirs, Some(NOBODY), Some(NOBODY)).unwrap();
    let link = theirs.join("log");
    symlink(&secret, &link).unwrap();
    lchown(&link, Some(NOBODY), Some(NOBODY)).unwrap();
    (dir, secret, link)
}

#[test]
fn links_of_jail_user_do_not_reach_root_files() {
    if !is_root() {
        return;
    }
    let (_dir, secret, link) = directory_with_link();
    let user = format!("uid={NOBODY}");
    let link = link.display();
    for option in [format!("--console=file={link}"), format!("--log-file={link}")] {
        for jail in [&["--jail", &user][..], &[]] {
            let out = Command::new(PROGRAM)
                .args(["run", "--memory", "32M"])
                .arg(&option)
                .args(jail)
                .stdin(Stdio::null())
                .output()
                .unwrap();
            let text = String::from_utf8_lossy(&out.stderr);
            if text.contains("/dev/kvm") {
                return skipped("no /dev/kvm here", false);
            }
            assert_eq!(out.status.code(), Some(2), "{option} {jail:?}: {text}");
            assert_eq!(
                fs::read_to_string(&secret).unwrap(),
                "root's",
                "{option} {jail:?}"
            );
            let last = text.lines().last().unwrap_or_default();
            assert!(last.contains("theirs/log"), "{option} {jail:?}: {text}");
        }
    }
}

#[test]
fn jail_limits_descriptors_and_file_sizes() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let console = format!("file={}", dir.path().join("console").display());
    let args = ["--jail", "fsize=1M,no-file=300", "--virtio-console", &console];
    let Some(vm) = SpinningVm::start("limited", &args) else {
        return;
    };
    let limits = fs::read_to_string(format!("/proc/{}/limits", vm.pid())).unwrap();
    let of = |name: &str| {
        let line = limits.lines().find_map(|line| line.strip_prefix(name));
        let words = line.unwrap().split_whitespace().take(2).map(str::to_owned);
        words.collect::<Vec<_>>()
    };
    assert_eq!(of("Max open files"), ["300", "300"]);
    assert_eq!(of("Max file size"), ["1048576", "1048576"]);
    for (words, why) in [
        ("fsize=x", "fsize="),
        ("no-file=63", "64"),
        ("no-file=100,no-file=100", "twice"),
    ] {
        let out = Command::new(PROGRAM)
            .args(["run", "--jail", words])
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{words}: {text}");
        assert!(text.contains(why) && text.lines().count() == 1, "{words}: {text}");
    }
}

#[test]
fn sockets_of_a_killed_vm_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let observers = dir.path().join("look");
    let args = [
        "--observers".to_owned(),
        observers.display().to_string(),
        "--vsock".to_owned(),
    ];
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let Some(mut vm) = SpinningVm::start("killed", &args) else {
        return;
    };
    let sockets = vm.runtime.path().join("perfvisor");
    let all = [
        observers,
        sockets.join("killed.sock"),
        sockets.join("killed.vsock"),
    ];
    for path in &all {
        assert!(path.exists(), "{}", path.display());
    }
    vm.child.kill().unwrap();
    vm.child.wait().unwrap();
    eventually("its sockets are gone", || {
        std::thread::sleep(std::time::Duration::from_millis(10));
        all.iter().all(|path| !path.exists())
    });
}
