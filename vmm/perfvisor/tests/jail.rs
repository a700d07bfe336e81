//! A VM in a jail (`--jail`) runs, counts and is operated as any other, and sees nothing of its host.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use common::skip::skipped;
use common::vm::{PROGRAM, SpinningVm, eventually};

mod common;

/// A user without rights.
const NOBODY: u32 = 65534;

fn is_root() -> bool {
    let own = fs::metadata("/proc/self").is_ok_and(|meta| meta.uid() == 0);
    if !own {
        skipped("only root has a jail without a user namespace", false);
    }
    own
}

fn said(command: &mut Command) -> (Option<i32>, String) {
    let out = command.stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    (out.status.code(), text)
}

fn names(dir: &str) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap_or_else(|e| panic!("{dir}: {e}"));
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// What an operator does to a VM, from outside.
fn is_operated(vm: &SpinningVm, name: &str) {
    let (status, text) = said(&mut vm.operator(&["ctl", name, "status"]));
    assert_eq!(status, Some(0), "{text}");
    let events = "cycles,task-clock,steal-ns";
    let (status, text) = said(&mut vm.operator(&["stat", name, "-x,", "-e", events, "-d", "0.3"]));
    assert_eq!(status, Some(0), "{text}");
    for event in ["cycles", "task-clock"] {
        let line = text.lines().find(|line| line.contains(event));
        let count = line.and_then(|line| line.split(',').next()?.parse::<f64>().ok());
        assert!(count.is_some_and(|count| count > 0.0), "{event}: {text}");
    }
    let file = vm.runtime.path().join("perf.data");
    let file = file.to_str().unwrap();
    let (status, text) = said(&mut vm.operator(&["record", name, "-F", "500", "-d", "1", "-q", "-o", file]));
    assert_eq!(status, Some(0), "{text}");
    let (status, text) = said(&mut vm.operator(&["report", "-i", file]));
    assert!(text.contains("spin_hot"), "{status:?}: {text}");
}

/// What the threads of a process see of the host.
fn is_jailed(pid: u32, socket_dir: &Path) {
    for kind in ["mnt", "net", "ipc", "uts"] {
        let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap();
        assert_ne!(of(&pid.to_string()), of("self"), "{kind}");
    }
    for task in names(&format!("/proc/{pid}/task")) {
        let root = format!("/proc/{task}/root");
        let comm = fs::read_to_string(format!("/proc/{task}/comm")).unwrap_or_default();
        assert!(!Path::new(&root).join("etc").exists(), "{comm}");
        assert_eq!(
            names(&format!("{root}/proc")),
            [pid.to_string(), "self".into()],
            "{comm}"
        );
        let sockets = Path::new(&root).join(socket_dir.strip_prefix("/").unwrap());
        assert!(sockets.is_dir(), "{comm}: {}", sockets.display());
    }
}

#[test]
fn a_jailed_vm_is_operated_and_sees_no_host() {
    if !is_root() {
        return;
    }
    let Some(mut vm) = SpinningVm::start("jailed", &["--jail", "--cpus", "2"]) else {
        return;
    };
    is_operated(&vm, "jailed");
    let sockets = vm.runtime.path().join("perfvisor");
    is_jailed(vm.child.id(), &sockets);
    let (status, text) = said(&mut vm.operator(&["ctl", "jailed", "stop"]));
    assert_eq!(status, Some(0), "{text}");
    assert_eq!(vm.child.wait().unwrap().code(), Some(0), "{:?}", vm.said());
    assert!(!sockets.join("jailed.sock").exists(), "its socket goes with it");
}

/// Landlock and filters leave out what the jail could do without: each is switched off by itself.
#[test]
fn a_jail_needs_neither_filters_nor_landlock() {
    if !is_root() {
        return;
    }
    let off = ["--jail", "--seccomp", "off", "--landlock", "off"];
    let Some(vm) = SpinningVm::start("jailed", &off) else {
        return;
    };
    is_jailed(vm.child.id(), &vm.runtime.path().join("perfvisor"));
}

#[test]
fn a_jailed_vm_is_the_user_that_was_named_and_still_counts() {
    if !is_root() {
        return;
    }
    let user = format!("uid={NOBODY},gid=12345");
    let Some(mut vm) = SpinningVm::start("somebody", &["--jail", &user]) else {
        return;
    };
    let status = fs::read_to_string(format!("/proc/{}/status", vm.child.id())).unwrap();
    assert!(status.contains("Uid:\t65534\t65534\t65534\t65534"), "{status}");
    assert!(status.contains("Gid:\t12345\t12345\t12345\t12345"), "{status}");
    assert!(
        status.contains("Groups:\t \n") || status.contains("Groups:\t\n"),
        "{status}"
    );
    is_operated(&vm, "somebody");
    let sockets = vm.runtime.path().join("perfvisor");
    is_jailed(vm.child.id(), &sockets);
    assert_eq!(fs::metadata(&sockets).unwrap().uid(), NOBODY);
    let (status, text) = said(&mut vm.operator(&["ctl", "somebody", "stop"]));
    assert_eq!(status, Some(0), "{text}");
    assert_eq!(vm.child.wait().unwrap().code(), Some(0), "{:?}", vm.said());
    assert!(!sockets.join("somebody.sock").exists(), "its socket goes with it");
}

/// A command in a mount namespace where everybody may open /dev/kvm, as [`NOBODY`], without capabilities.
const AS_NOBODY: &str = r#"
    test -e "$0/kvm" || { mknod "$0/kvm" c "$1" "$2" && chmod 666 "$0/kvm"; } || exit 99
    mount --bind "$0/kvm" /dev/kvm || exit 99
    shift 2
    exec setpriv --reuid 65534 --regid 65534 --clear-groups --bounding-set=-all "$@"
"#;

#[test]
fn a_user_without_rights_has_a_jail_by_a_user_namespace() {
    let Ok(kvm) = fs::metadata("/dev/kvm") else {
        return skipped("no /dev/kvm here", false);
    };
    let (major, minor) = (kvm.rdev() >> 8 & 0xfff, kvm.rdev() & 0xff);
    let scratch = tempfile::tempdir().unwrap();
    let as_nobody = |args: &[&str]| {
        let mut command = Command::new("unshare");
        command.args(["-m", "sh", "-c", AS_NOBODY]).arg(scratch.path());
        command.arg(major.to_string()).arg(minor.to_string()).args(args);
        command
            .env("XDG_RUNTIME_DIR", scratch.path())
            .stdin(Stdio::null());
        command
    };
    // Not in the tree, where that user need not be able to go.
    chown(scratch.path(), Some(NOBODY), Some(NOBODY)).unwrap_or_default();
    if !as_nobody(&["unshare", "-U", "true"])
        .output()
        .is_ok_and(|able| able.status.success())
    {
        return skipped(
            "only root can start a VM as another user, where users have namespaces",
            false,
        );
    }
    let program = scratch.path().join("program");
    fs::copy(PROGRAM, &program).unwrap();
    let program = program.to_str().unwrap();
    let run = |args: &[&str]| as_nobody(&[&[program, "run"], args].concat());

    let (status, text) = said(&mut run(&["--pmu", "off", "--jail", "uid=1"]));
    assert_eq!(status, Some(2), "{text}");
    assert!(text.contains("CAP_SETUID") && text.lines().count() == 1, "{text}");

    let mut vm = run(&[
        "--name",
        "mine",
        "--memory",
        "32M",
        "--cmdline",
        "loop",
        "--pmu",
        "off",
        "--jail",
    ])
    .stdout(Stdio::null())
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    // The user operates it. Root is nobody whom the namespace knows.
    eventually("the VM's user operates it", || {
        if let Some(status) = vm.try_wait().unwrap() {
            let said = std::io::read_to_string(vm.stderr.take().unwrap()).unwrap();
            panic!("the VM ended with {status}: {said}");
        }
        std::thread::sleep(Duration::from_millis(50));
        said(&mut as_nobody(&[program, "ctl", "mine", "status"])).0 == Some(0)
    });
    let user = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/user")).unwrap();
    assert_ne!(user(&vm.id().to_string()), user("self"));
    is_jailed(vm.id(), &scratch.path().join("perfvisor"));
    let (status, text) = said(&mut as_nobody(&[program, "ctl", "mine", "stop"]));
    assert_eq!(status, Some(0), "{text}");
    vm.wait().unwrap();
    assert!(!scratch.path().join("perfvisor/mine.sock").exists());
}

/// By then nothing that the guest could have reached had been there.
#[test]
fn a_wrong_jail_is_refused_in_a_line() {
    for (words, why) in [
        ("uid=", "--jail"),
        ("uid=4294967295", "4294967294"),
        ("uid=1,uid=2", "twice"),
        ("gid=1", "uid="),
        ("dir=/tmp", "known are uid=N and gid=N"),
    ] {
        let (status, text) = said(Command::new(PROGRAM).args(["run", "--jail", words]));
        assert_eq!(status, Some(2), "{words}: {text}");
        assert!(text.contains(why) && text.lines().count() == 1, "{words}: {text}");
    }
}
