//! A VM in a jail (`--jail`) runs, counts and can be operated like any other VM, and cannot see the
//! host.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, lchown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::common::console_vm::ConsoleVm;
use crate::common::process::is_root;
use crate::common::unprivileged::{NOBODY, UnprivilegedUser};
use crate::common::vm::{
    PROGRAM, SpinningVm, assert_contains, eventually, has_kvm, refusal, run_and_read_stderr, vm_pid,
};
use test_support::skip::skipped;

fn names(dir: &str) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap_or_else(|e| panic!("{dir}: {e}"));
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Checks that the operator commands work from outside the jail.
fn assert_operable(vm: &SpinningVm, name: &str) {
    let (status, text) = run_and_read_stderr(&mut vm.operator(&["ctl", name, "status"]));
    assert_eq!(status, Some(0), "{text}");
    vm.assert_counted_and_sampled(name, "cycles,task-clock,steal-ns");
}

/// Checks that all threads of a process are isolated from the host.
fn assert_jailed(pid: u32, socket_dir: &Path) {
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
            [pid.to_string(), "self".into(), "thread-self".into()],
            "{comm}"
        );
        // The directory of the control sockets is not visible in the jail.
        let sockets = Path::new(&root).join(socket_dir.strip_prefix("/").unwrap());
        assert!(!sockets.exists(), "{comm}: {}", sockets.display());
    }
}

#[test]
fn jailed_vm_is_operable_and_isolated() {
    if !is_root() {
        return;
    }
    let Some(mut vm) = SpinningVm::start("jailed", &["--jail", "--cpus", "2"]) else {
        return;
    };
    assert_operable(&vm, "jailed");
    let sockets = vm.runtime.path().join("perfvisor");
    assert_jailed(vm.pid(), &sockets);
    vm.stop("jailed");
    assert!(!sockets.join("jailed.sock").exists(), "its socket goes with it");
}

/// The jail confines the VM even without landlock or without seccomp filters. The test disables
/// each of them in turn.
#[test]
fn jail_works_without_filters_and_landlock() {
    if !is_root() {
        return;
    }
    let off = ["--jail", "--seccomp", "off", "--landlock", "off"];
    let Some(vm) = SpinningVm::start("jailed", &off) else {
        return;
    };
    assert_jailed(vm.pid(), &vm.runtime.path().join("perfvisor"));
}

#[test]
fn jailed_vm_changes_user_and_counts() {
    if !is_root() {
        return;
    }
    let user = format!("uid={NOBODY},gid=12345");
    let Some(mut vm) = SpinningVm::start("somebody", &["--jail", &user]) else {
        return;
    };
    let status = fs::read_to_string(format!("/proc/{}/status", vm.pid())).unwrap();
    assert!(status.contains("Uid:\t65534\t65534\t65534\t65534"), "{status}");
    assert!(status.contains("Gid:\t12345\t12345\t12345\t12345"), "{status}");
    assert!(
        status.contains("Groups:\t \n") || status.contains("Groups:\t\n"),
        "{status}"
    );
    assert_operable(&vm, "somebody");
    let sockets = vm.runtime.path().join("perfvisor");
    assert_jailed(vm.pid(), &sockets);
    assert_eq!(fs::metadata(&sockets).unwrap().uid(), NOBODY);
    vm.stop("somebody");
    assert!(!sockets.join("somebody.sock").exists(), "its socket goes with it");
}

/// Starts a jailed VM as `user`, and waits until `user` can control it. Root cannot, because it is
/// not mapped in the VM's user namespace.
fn start_as(user: &UnprivilegedUser, options: &[&str]) -> Child {
    let args = [
        "run",
        "--name",
        "mine",
        "--memory",
        "32M",
        "--cmdline",
        "loop",
        "--jail",
    ];
    let mut vm = user
        .perfvisor(&[&args, options].concat())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    eventually("the VM's user operates it", || {
        if let Some(status) = vm.try_wait().unwrap() {
            let said = std::io::read_to_string(vm.stderr.take().unwrap()).unwrap();
            panic!("the VM ended with {status}: {said}");
        }
        std::thread::sleep(Duration::from_millis(50));
        run_and_read_stderr(&mut user.perfvisor(&["ctl", "mine", "status"])).0 == Some(0)
    });
    vm
}

#[test]
fn unprivileged_jail_has_user_and_pid_namespaces() {
    // The user has no capabilities, but may create a user namespace.
    let Some(nobody) = UnprivilegedUser::with(&["--bounding-set=-all"], &["unshare", "-U", "true"]) else {
        return;
    };
    let text = refusal(&mut nobody.perfvisor(&["run", "--pmu", "off", "--jail", "uid=1"]));
    assert_contains(&text, "CAP_SETUID");

    let mut vm = start_as(&nobody, &[]);
    let pid = vm_pid(vm.id());
    assert_ne!(pid, vm.id(), "a PID namespace");
    for kind in ["user", "pid"] {
        let namespace = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/{kind}")).unwrap();
        assert_ne!(namespace(&pid.to_string()), namespace("self"), "{kind}");
    }
    for pid in [pid, vm.id()] {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        assert!(status.contains("CapPrm:\t0000000000000000\n"), "{status}");
    }
    assert_jailed(pid, &nobody.dir().join("perfvisor"));
    let (status, text) = run_and_read_stderr(&mut nobody.perfvisor(&[
        "stat",
        "mine",
        "-d",
        "0.2",
        "-e",
        "task-clock,steal-ns",
    ]));
    assert_eq!(status, Some(0), "{text}");
    let (status, text) = run_and_read_stderr(&mut nobody.perfvisor(&["ctl", "mine", "stop"]));
    assert_eq!(status, Some(0), "{text}");
    vm.wait().unwrap();
    assert!(!nobody.dir().join("perfvisor/mine.sock").exists());
}

/// In a jail without a PID namespace, the VM of a user with CAP_PERFMON can count. The perf event
/// broker must keep the capability, which has no effect in a user namespace. The VM therefore has
/// no PID namespace, which would require a user namespace.
#[test]
fn jailed_vm_of_user_with_perfmon_counts_without_pid_namespace() {
    let rights = &[
        "--inh-caps=+perfmon",
        "--ambient-caps=+perfmon",
        "--bounding-set=-all,+perfmon",
    ];
    let Some(nobody) = UnprivilegedUser::with(rights, &["unshare", "-U", "true"]) else {
        return;
    };
    let mut vm = start_as(&nobody, &[]);
    assert_eq!(vm_pid(vm.id()), vm.id());
    assert_jailed(vm.id(), &nobody.dir().join("perfvisor"));
    let (status, text) = run_and_read_stderr(&mut nobody.perfvisor(&["ctl", "mine", "stop"]));
    assert_eq!(status, Some(0), "{text}");
    vm.wait().unwrap();
}

/// After a reset, the kernel and the devices in the jail are accessible to the VM's user.
#[test]
fn jailed_vm_restarts_in_place() {
    if !is_root() {
        return;
    }
    let user = format!("uid={NOBODY}");
    for jail in [&["--jail"][..], &["--jail", &user]] {
        let args = ["--on-reset", "restart", "--cmdline", "reset=cf9", "--cpus", "2"];
        let Some(mut vm) = ConsoleVm::start(&[&args, jail].concat()) else {
            return;
        };
        for _ in 0..5 {
            vm.line_with("boot cpus=2 memory=0");
        }
        vm.stop("machine");
    }
}

/// When the VM exits, sockets at user-chosen paths are removed if the VM's user may remove them,
/// regardless of the owners of the parent directories. At startup, the VM warns about sockets that
/// will remain.
#[test]
fn jailed_vm_removes_sockets_or_warns() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (mine, root_s) = (dir.path().join("mine"), dir.path().join("root-s"));
    fs::create_dir(&mine).unwrap();
    fs::create_dir(&root_s).unwrap();
    fs::set_permissions(&root_s, fs::Permissions::from_mode(0o700)).unwrap();
    chown(&mine, Some(NOBODY), Some(NOBODY)).unwrap();
    let at = |dir: &Path, name: &str| dir.join(name).to_str().unwrap().to_owned();
    let args = [
        "--jail".to_owned(),
        format!("uid={NOBODY}"),
        "--observers".into(),
        at(&root_s, "look"),
        "--gdb".into(),
        at(&mine, "gdb"),
        "--virtio-console".into(),
        format!("socket={}", at(&mine, "console")),
    ];
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let Some(mut vm) = SpinningVm::start("sockets", &args) else {
        return;
    };
    assert_eq!(names(mine.to_str().unwrap()), ["console", "gdb"]);
    vm.stop("sockets");
    assert!(names(mine.to_str().unwrap()).is_empty());
    assert!(root_s.join("look").exists());
    let told: Vec<String> = vm
        .log_lines()
        .into_iter()
        .filter(|line| line.contains("will not be removed"))
        .collect();
    assert!(told.len() == 1 && told[0].contains("root-s/look"), "{told:?}");
}

/// A kernel that is entered through PVH and halts. The file is a fuzz seed with one leading byte.
const HALTS: &[u8] = include_bytes!("../../../fuzz/seeds/boot/pvh");

/// If the user of a jailed VM replaces a file of the VM with a symbolic link to a file of root, the
/// VM does not read root's file.
#[test]
fn jailed_vm_does_not_read_files_of_root_by_links() {
    if !is_root() || !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let theirs = dir.path().join("theirs");
    fs::create_dir(&theirs).unwrap();
    chown(&theirs, Some(NOBODY), Some(NOBODY)).unwrap();
    let kernel = theirs.join("kernel");
    fs::write(&kernel, &HALTS[1..]).unwrap();
    let (secret, link) = (dir.path().join("secret"), theirs.join("link"));
    let (secrets, directory_link) = (dir.path().join("secrets"), theirs.join("directory"));
    fs::create_dir_all(secrets.join("inner")).unwrap();
    fs::set_permissions(&secrets, fs::Permissions::from_mode(0o700)).unwrap();
    symlink(secrets.join("inner"), &directory_link).unwrap();
    lchown(&directory_link, Some(NOBODY), Some(NOBODY)).unwrap();
    fs::write(&secret, [b'x'; 4096]).unwrap();
    fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
    symlink(&secret, &link).unwrap();
    lchown(&link, Some(NOBODY), Some(NOBODY)).unwrap();
    let [kernel, link, directory] = [&kernel, &link, &directory_link].map(|path| path.to_str().unwrap());
    let user = format!("uid={NOBODY}");
    let read_only = format!("{link},ro");
    for (args, path) in [
        (&["--kernel", link][..], link),
        (&["--kernel", kernel, "--initrd", link], link),
        (&["--kernel", kernel, "--disk", link], link),
        (&["--kernel", kernel, "--disk", &read_only], link),
        (&["--pmu-filter", link], link),
        // If the directory is accepted by mistake, the built-in guest exits and the test does not
        // block.
        (&["--cmdline", "quiet", "--share-dir", directory], directory),
    ] {
        let mut run = Command::new(PROGRAM);
        run.args(["run", "--memory", "32M", "--jail", &user]).args(args);
        let (status, text) = run_and_read_stderr(&mut run);
        assert_eq!(status, Some(2), "{args:?}: {text}");
        // Warnings about the host may precede the error.
        let last = text.lines().last().unwrap_or_default();
        assert!(
            last.contains(path) && last.contains("Permission denied"),
            "{args:?}: {text}"
        );
    }
}

/// Returns the mount point of cgroup v2.
fn control_groups() -> Option<PathBuf> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let of_v2 = |line: &str| {
        let (mount, kind) = line.split_once(" - ")?;
        kind.starts_with("cgroup2 ")
            .then(|| mount.split(' ').nth(4).map(PathBuf::from))?
    };
    mounts.lines().find_map(of_v2)
}

/// A control group, removed on drop.
struct ControlGroup(PathBuf);

impl ControlGroup {
    fn new(name: &str) -> Option<Self> {
        let dir = control_groups()?.join(format!("perfvisor-{name}-{}", std::process::id()));
        fs::create_dir(&dir).ok().map(|()| Self(dir))
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        // Exiting processes leave the group with a delay.
        while fs::remove_dir(&self.0).is_err_and(|e| e.raw_os_error() == Some(libc::EBUSY)) {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// An invalid `--jail` option is reported before the VM creates anything.
#[test]
fn invalid_jail_is_rejected_in_one_line() {
    for (words, why) in [
        ("uid=", "--jail"),
        ("uid=4294967295", "4294967294"),
        ("uid=1,uid=2", "twice"),
        ("gid=1", "uid="),
        ("dir=/tmp", "known are uid=N, gid=N, cgroup=DIR"),
        ("cgroup=", "without a directory"),
        ("cgroup=/a,cgroup=/b", "twice"),
        ("cgroup=/nowhere", "/nowhere: not a cgroup v2 directory"),
    ] {
        let (status, text) = run_and_read_stderr(Command::new(PROGRAM).args(["run", "--jail", words]));
        assert_eq!(status, Some(2), "{words}: {text}");
        assert!(text.contains(why) && text.lines().count() == 1, "{words}: {text}");
    }
}

/// The kernel charges the whole VM to the control group of its jail, although the VM's user may not
/// join the group.
#[test]
fn jailed_vm_joins_control_group() {
    if !is_root() {
        return;
    }
    let Some(group) = ControlGroup::new("joined") else {
        return skipped("no cgroup v2 in which this user can make groups", false);
    };
    let jail = format!("uid={NOBODY},cgroup={}", group.0.display());
    let Some(mut vm) = SpinningVm::start("grouped", &["--jail", &jail, "--cpus", "2"]) else {
        return;
    };
    let name = group.0.file_name().unwrap().to_str().unwrap();
    for task in names(&format!("/proc/{}/task", vm.pid())) {
        let groups = fs::read_to_string(format!("/proc/{task}/cgroup")).unwrap();
        let own = groups.lines().find(|line| line.starts_with("0::")).unwrap();
        assert!(own.ends_with(&format!("/{name}")), "{groups}");
    }
    assert_operable(&vm, "grouped");
    assert_jailed(vm.pid(), &vm.runtime.path().join("perfvisor"));
    vm.stop("grouped");
}

/// `--jail cgroup=` rejects directories that are missing or not control groups, cgroup v1 groups,
/// and groups that no process can join.
#[test]
fn invalid_control_group_is_rejected_in_one_line() {
    let refused = |dir: &Path, why: &str| {
        let jail = format!("cgroup={}", dir.display());
        let text = refusal(Command::new(PROGRAM).args(["run", "--jail", &jail]));
        assert_contains(&text, why);
    };
    let dir = tempfile::tempdir().unwrap();
    refused(dir.path(), "create it first");
    fs::write(dir.path().join("cgroup.procs"), "untouched").unwrap();
    refused(dir.path(), "not a control group; use a cgroup v2 directory");
    let text = fs::read_to_string(dir.path().join("cgroup.procs")).unwrap();
    assert_eq!(text, "untouched");
    let first = Path::new("/sys/fs/cgroup/memory");
    if is_root()
        && first.join("cgroup.procs").exists()
        && !control_groups().is_some_and(|v2| first.starts_with(v2))
    {
        refused(first, "version 1");
    }
    let Some(group) = ControlGroup::new("shares") else {
        return skipped("no cgroup v2 in which this user can make groups", false);
    };
    // A sibling of a threaded group must itself be a threaded group.
    let [threads, other] = ["threads", "other"].map(|name| group.0.join(name));
    for dir in [&threads, &other] {
        fs::create_dir(dir).unwrap();
    }
    fs::write(threads.join("cgroup.type"), "threaded").unwrap();
    refused(&other, "cgroup.type there must be 'domain'");
    for dir in [&threads, &other] {
        fs::remove_dir(dir).unwrap();
    }
}
