//! Effects of guest actions and external signals on a VM and its child processes.

use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use crate::common::console_vm::ConsoleVm;
use crate::common::vm::{PROGRAM, SpinningVm, children, eventually};

/// Fuzz seed that consists of one byte and a PVH kernel, whose code begins at [`CODE`].
const KERNEL: &[u8] = include_bytes!("../../../fuzz/seeds/boot/pvh");
const CODE: usize = 0xb1;
/// Code that writes the interrupt command register of the local APIC to send INIT to APIC ID 0,
/// which is the executing processor, and then halts.
const SENDS_INIT: [u8; 23] = [
    0xc7, 0x05, 0x10, 0x03, 0xe0, 0xfe, 0, 0, 0, 0, // movl $0, 0xfee00310
    0xc7, 0x05, 0x00, 0x03, 0xe0, 0xfe, 0, 0x45, 0, 0, // movl $0x4500, 0xfee00300
    0xf4, 0xeb, 0xfd, // hlt; jmp
];

/// An INIT to the first vCPU resets the machine. The vCPU starts at the reset vector, where the
/// firmware of a PC would reset the machine.
#[test]
fn init_to_first_vcpu_resets_machine() {
    let dir = tempfile::tempdir().unwrap();
    let kernel = dir.path().join("kernel");
    let mut image = KERNEL.to_vec();
    image[CODE..CODE + SENDS_INIT.len()].copy_from_slice(&SENDS_INIT);
    fs::write(&kernel, &image[1..]).unwrap();
    let Some(mut vm) = ConsoleVm::start(&["--kernel", kernel.to_str().unwrap()]) else {
        return;
    };
    assert_eq!(vm.status(), Some(4), "{:?}", vm.log_lines());
    assert_eq!(
        vm.count_log_lines("the guest sent it an INIT"),
        1,
        "{:?}",
        vm.log_lines()
    );
    assert_eq!(vm.count_log_lines("internal error"), 0, "{:?}", vm.log_lines());
}

/// Killed helper processes of a VM do not remain zombies. The helpers are the supervisor of kernel
/// readers, the perf event broker and the socket broker.
#[test]
fn killed_child_is_reaped() {
    let Some(vm) = SpinningVm::start("reaper", &[]) else {
        return;
    };
    let before = children(vm.child.id());
    assert_eq!(before.len(), 3, "{before:?}");
    let killed = Command::new("kill")
        .arg("-9")
        .args(before.iter().map(|(pid, _)| pid.to_string()))
        .status();
    assert!(killed.unwrap().success());
    eventually("it is gone", || children(vm.child.id()).is_empty());
    // The VM still answers after its helpers were killed.
    assert!(
        vm.operator(&["ctl", "reaper", "status"])
            .output()
            .unwrap()
            .status
            .success()
    );
}

/// virtiofsd, which a guest may be able to crash, writes no core dump, because it maps the guest's
/// memory.
#[test]
fn virtiofsd_writes_no_core_dump() {
    let dir = tempfile::tempdir().unwrap();
    let limits = dir.path().join("limits");
    let (ours, its) = UnixStream::pair().unwrap();
    let script = format!(
        "grep core /proc/self/limits >{0}.part; mv {0}.part {0}; exec sleep 1000",
        limits.display()
    );
    let mut keeper = Command::new("sh")
        .args(["-c", "ulimit -S -c unlimited 2>/dev/null; exec \"$0\" \"$@\""])
        .args([PROGRAM, "keep-share", "--", "sh", "-c", &script])
        .stdin(Stdio::null())
        .stdout(Stdio::from(OwnedFd::from(its)))
        .spawn()
        .unwrap();
    eventually("the back end has begun", || limits.exists());
    let text = fs::read_to_string(&limits).unwrap();
    let words: Vec<&str> = text.split_whitespace().collect();
    // Check the soft and hard limits of "Max core file size". A limit of one byte also prevents the
    // kernel from using a pipe.
    assert!(
        ["0", "1"].contains(&words[4]) && words[4] == words[5] && words[6] == "bytes",
        "{text}"
    );
    drop(ours);
    assert!(keeper.wait().unwrap().success());
}

/// Files written by `record` are readable by their owner only, for any umask.
#[test]
fn recording_is_readable_by_owner_only() {
    let Some(vm) = SpinningVm::start("private", &[]) else {
        return;
    };
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let at = |name: &str| dir.path().join(name);
    let script = format!(
        "umask 022; exec {PROGRAM} record private -q --duration 0.5 --buildid-dir {} --save-kallsyms {} -o {}",
        at("debug").display(),
        at("kallsyms").display(),
        at("perf.data").display()
    );
    let recorded = Command::new("sh")
        .args(["-c", &script])
        .env("XDG_RUNTIME_DIR", vm.runtime.path())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&recorded.stderr);
    assert!(recorded.status.success(), "{said}");
    for name in ["perf.data", "kallsyms"] {
        let mode = fs::metadata(at(name)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    if let Ok(debug) = fs::metadata(at("debug")) {
        assert_eq!(debug.permissions().mode() & 0o077, 0);
    }
    // An existing file keeps its permissions.
    let shared = at("shared.data");
    fs::write(&shared, "").unwrap();
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o640)).unwrap();
    let mut again = vm.operator(&["record", "private", "-q", "--duration", "0.2", "-o"]);
    assert!(again.arg(&shared).status().unwrap().success());
    assert_eq!(fs::metadata(&shared).unwrap().permissions().mode() & 0o777, 0o640);
    let mut bytes = Vec::new();
    fs::File::open(&shared).unwrap().read_to_end(&mut bytes).unwrap();
    assert!(bytes.starts_with(b"PERFILE2"));
}
