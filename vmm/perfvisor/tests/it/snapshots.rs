//! `ctl snapshot` and `run --restore`: a guest continues, failures leave nothing behind, and the
//! source VM continues.

use std::fs;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use control_api::client::Client;
use control_api::protocol::VmState;
use control_api::request;

use crate::common::vm::{
    PROGRAM, SpinningVm, VmProcess, assert_contains, eventually, run_and_read_stderr, stdout_of,
};

/// Starts a VM with a spinning guest.
fn spinning(args: &[&str]) -> Option<SpinningVm> {
    SpinningVm::start("one", args)
}

/// Takes a snapshot in a new directory, and returns the path of the directory.
fn take(vm: &SpinningVm, options: &[&str]) -> PathBuf {
    let dir = vm.runtime.path().join("saved");
    let args = [&["ctl", "one", "snapshot", dir.to_str().unwrap()], options].concat();
    let text = stdout_of(&mut vm.operator(&args));
    assert_eq!(
        text,
        format!("one: snapshot in {}, 32 MiB of memory\n", dir.display())
    );
    dir
}

/// Starts a restored VM named `two`.
fn restore(dir: &Path, options: &[&str]) -> VmProcess {
    let args = [&["--restore", dir.to_str().unwrap()], options].concat();
    VmProcess::spawn(Command::new(PROGRAM), "two", &args, Stdio::null()).unwrap()
}

/// Runs `perfvisor run --restore` for a snapshot that must be rejected, and returns the error line.
fn refused(dir: &Path, options: &[&str]) -> String {
    let runtime = tempfile::tempdir().unwrap();
    let mut command = Command::new(PROGRAM);
    command
        .args(["run", "--name", "refused", "--restore", dir.to_str().unwrap()])
        .args(options)
        .env("XDG_RUNTIME_DIR", runtime.path());
    let (status, text) = run_and_read_stderr(&mut command);
    assert_eq!(status, Some(2), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.starts_with("perfvisor: "), "{text}");
    text
}

/// After a restore, the restored guest can be counted and sampled, and the source VM continues.
/// Only the user can access the snapshot's files. The state file is small, and the memory file has
/// holes.
#[test]
fn restored_guest_and_source_both_run() {
    let Some(vm) = spinning(&["--cpus", "2"]) else {
        return;
    };
    let dir = take(&vm, &[]);
    assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
    let state = fs::metadata(dir.join("state")).unwrap();
    assert_eq!(state.permissions().mode() & 0o777, 0o600);
    assert!(state.len() <= (64 + 2 * 16) << 10, "{} bytes", state.len());
    let memory = fs::metadata(dir.join("memory")).unwrap();
    assert_eq!(memory.len(), 32 << 20);
    assert!(memory.blocks() * 512 <= 4 << 20, "{} blocks", memory.blocks());
    assert!(vm.state_of("one").starts_with("one: running, 2 vCPUs\n"));
    vm.assert_counted_and_sampled("one", "cycles,task-clock");

    let restored = restore(&dir, &["--restore-verify"]);
    restored.await_state("two: running, 2 vCPUs\n");
    restored.assert_counts_cycles("two");
    // A restored VM can be saved again.
    let again = restored.runtime.path().join("again");
    stdout_of(&mut restored.command(&["ctl", "two", "snapshot", again.to_str().unwrap()]));
    let mut other = restore(&again, &["--clone"]);
    other.await_state("two: running, 2 vCPUs\n");
    stdout_of(&mut other.command(&["ctl", "two", "stop"]));
    assert_eq!(other.wait(), Some(0));
}

#[test]
fn snapshot_can_end_the_vm() {
    let Some(mut vm) = spinning(&[]) else { return };
    let dir = take(&vm, &["--stop"]);
    assert_eq!(vm.wait(), Some(0));
    let restored = restore(&dir, &[]);
    restored.await_state("two: running, 1 vCPU\n");
}

/// A restored guest keeps its branch records, regardless of this host's default, and a guest
/// without branch records gets none.
#[test]
fn branch_records_follow_the_guest() {
    for (given, expected) in [("on", true), ("off", false)] {
        let Some(mut vm) = spinning(&["--pmu", "amd-v2", "--lbr", given]) else {
            return;
        };
        let dir = take(&vm, &["--stop"]);
        assert_eq!(vm.wait(), Some(0));
        let restored = restore(&dir, &[]);
        restored.await_state("two: running, 1 vCPU\n");
        let again = restored.runtime.path().join("again");
        stdout_of(&mut restored.command(&["ctl", "two", "snapshot", again.to_str().unwrap()]));
        let state = fs::read(again.join("state")).unwrap();
        let model = b" counters of 48 bits and branch records";
        let has_records = state.windows(model.len()).any(|bytes| bytes == model);
        assert_eq!(has_records, expected, "--lbr {given}");
    }
}

/// A failed snapshot leaves no directory, and the VM continues.
#[test]
fn failed_snapshot_leaves_nothing_behind() {
    let Some(vm) = spinning(&[]) else { return };
    let dir = take(&vm, &[]);
    let path = dir.to_str().unwrap();
    let line = run_and_read_stderr(&mut vm.operator(&["ctl", "one", "snapshot", path])).1;
    assert_eq!(
        line,
        format!("perfvisor: error: {path}: it exists already; name a new directory\n")
    );
    let line = run_and_read_stderr(&mut vm.operator(&["ctl", "one", "snapshot", "/proc/new"])).1;
    assert!(
        line.contains("cannot be written to /proc/new; the VM goes on: "),
        "{line}"
    );

    // A file size limit simulates a full disk.
    let full = vm.runtime.path().join("full");
    let mut shell = Command::new("/bin/sh");
    shell
        .arg("-c")
        .arg("trap '' XFSZ; ulimit -f 100; exec \"$0\" \"$@\"")
        .arg(PROGRAM)
        .args(["ctl", "one", "snapshot", full.to_str().unwrap()])
        .env("XDG_RUNTIME_DIR", vm.runtime.path());
    let (status, line) = run_and_read_stderr(&mut shell);
    assert_eq!(status, Some(2), "{line}");
    assert!(line.contains("the VM goes on: File too large"), "{line}");
    let left = fs::read_dir(vm.runtime.path()).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name()).collect();
    assert!(
        left.iter().all(|name| name == "saved" || name == "perfvisor"),
        "{left:?}"
    );
    assert!(vm.state_of("one").starts_with("one: running"));
}

/// A client that disappears in the middle of a snapshot leaves a running VM. While the snapshot is
/// in progress, no other client can take a snapshot or resume the VM.
#[test]
fn killed_client_leaves_a_running_vm() {
    let Some(vm) = spinning(&[]) else { return };
    let connect = || Client::connect_in(&vm.runtime.path().join("perfvisor"), Some("one")).unwrap();
    let (mut client, mut other) = (connect(), connect());
    eventually("it is ready", || client.call(request::Snapshot).unwrap().ready);
    let (piece, _) = client
        .call_with_file(request::SnapshotMemory { offset: 0 })
        .unwrap();
    assert!(piece.next > 0);
    assert_eq!(other.call(request::Status).unwrap().state, VmState::Paused);
    let line = other.call(request::Resume).unwrap_err().to_string();
    assert!(line.contains("a snapshot of the VM is being taken"), "{line}");
    let line = other.call(request::Snapshot).unwrap_err().to_string();
    assert!(line.contains("another snapshot"), "{line}");
    let line = other
        .call(request::SnapshotEnd { stop: true })
        .unwrap_err()
        .to_string();
    assert!(line.contains("not ready"), "{line}");
    drop(client);
    eventually("it runs", || {
        other.call(request::Status).unwrap().state == VmState::Running
    });
}

/// Files that are missing, truncated, damaged or not snapshots are rejected with one line.
#[test]
fn unusable_snapshots_are_refused() {
    let Some(vm) = spinning(&[]) else { return };
    let dir = take(&vm, &[]);
    let (state, memory) = (dir.join("state"), dir.join("memory"));
    let good = fs::read(&state).unwrap();

    assert!(refused(vm.runtime.path(), &[]).contains("No such file"));
    fs::write(&state, &good[..good.len() - 1]).unwrap();
    assert!(refused(&dir, &[]).contains("it was truncated or extended"));
    let mut damaged = good.clone();
    damaged[good.len() / 2] ^= 1;
    fs::write(&state, damaged).unwrap();
    assert!(refused(&dir, &[]).contains("its checksum does not match"));
    fs::write(&state, "[kernel]\n").unwrap();
    assert!(refused(&dir, &[]).contains("it does not begin with PVSS"));
    fs::write(&state, &good).unwrap();

    let file = fs::OpenOptions::new().write(true).open(&memory).unwrap();
    file.write_all_at(&[0x55; 8], 0x70_0000).unwrap();
    assert!(refused(&dir, &["--restore-verify"]).contains("damaged between bytes 0x600000 and 0x800000"));
    file.set_len(16 << 20).unwrap();
    assert!(refused(&dir, &[]).contains("16777216 bytes, expected 33554432"));
    fs::remove_file(&memory).unwrap();
    fs::create_dir(&memory).unwrap();
    assert!(refused(&dir, &[]).contains("it is not a regular file"));
}

/// Only one restored VM can use a disk, because it locks the disk. A restore without the disk is
/// also rejected.
#[test]
fn second_restore_with_the_same_disk_is_refused() {
    let files = tempfile::tempdir().unwrap();
    guest_images::bare_metal::write_all(files.path()).unwrap();
    let path = |name| files.path().join(name).to_str().unwrap().to_owned();
    let (kernel, disk) = (path("selftest.elf"), path("disk"));
    fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    let Some(mut vm) = spinning(&["--kernel", &kernel, "--disk", &disk]) else {
        return;
    };
    let dir = take(&vm, &["--stop"]);
    assert_eq!(vm.wait(), Some(0));
    let first = restore(&dir, &["--disk", &disk]);
    let runs = || first.state_of("two").starts_with("two: running");
    eventually("it runs", runs);
    assert!(refused(&dir, &["--disk", &disk]).contains("disk: in use by "));
    assert!(refused(&dir, &[]).contains("2 virtio devices, this machine has 1"));
    assert!(runs());
}

/// If the VM has devices or settings that a snapshot cannot include, the error names them, and the
/// VM continues.
#[test]
fn unsupported_parts_are_named() {
    let sockets = tempfile::tempdir().unwrap();
    guest_images::bare_metal::write_all(sockets.path()).unwrap();
    let path = |name| sockets.path().join(name).to_str().unwrap().to_owned();
    let (kernel, gdb) = (path("selftest.elf"), path("gdb"));
    let options = ["--kernel", &kernel, "--gdb", &gdb];
    let Some(vm) = spinning(&options) else { return };
    let dir = vm.runtime.path().join("saved");
    let (status, line) =
        run_and_read_stderr(&mut vm.operator(&["ctl", "one", "snapshot", dir.to_str().unwrap()]));
    assert_eq!(status, Some(2), "{line}");
    assert!(
        line.contains("a snapshot cannot include --gdb; start the VM without"),
        "{line}"
    );
    assert!(!dir.exists());
    assert!(vm.state_of("one").starts_with("one: running"));
}

/// A diff contains only pages that changed since its base, and is restored on top of the base.
#[test]
fn diff_restores_above_its_base() {
    let Some(vm) = spinning(&[]) else { return };
    let base = take(&vm, &[]);
    let diff = vm.runtime.path().join("diff");
    let (base_path, diff_path) = (base.to_str().unwrap(), diff.to_str().unwrap());
    let args = ["ctl", "one", "snapshot", diff_path, "--diff", base_path];
    let text = stdout_of(&mut vm.operator(&args));
    assert!(text.contains(" KiB changed of 32 MiB of memory\n"), "{text}");
    let [full, changed] = [&base, &diff].map(|dir| fs::metadata(dir.join("memory")).unwrap().blocks() * 512);
    assert!(changed <= 64 << 10 && changed < full, "{changed} of {full} bytes");

    let restored = restore(&diff, &["--restore-base", base_path, "--restore-verify"]);
    restored.await_state("two: running, 1 vCPU\n");
    // A VM that was restored from a diff can be saved as a diff of the same base.
    let again = restored.runtime.path().join("again");
    let args = [
        "ctl",
        "two",
        "snapshot",
        again.to_str().unwrap(),
        "--diff",
        base_path,
    ];
    stdout_of(&mut restored.command(&args));
    restore(&again, &["--restore-base", base_path, "--restore-verify"]);
}

/// A diff of a diff is restored on top of both bases, which are given in any order, and can be the
/// base of other diffs.
#[test]
fn diff_of_a_diff_restores_above_all_its_bases() {
    let Some(vm) = spinning(&[]) else { return };
    let full = take(&vm, &[]);
    let dir = |name: &str| vm.runtime.path().join(name).to_str().unwrap().to_owned();
    let (full, first, second) = (full.to_str().unwrap(), dir("first"), dir("second"));
    let save = |new: &str, bases: &[&str]| {
        let bases = bases.iter().flat_map(|base| ["--diff", base]);
        let args: Vec<&str> = ["ctl", "one", "snapshot", new].into_iter().chain(bases).collect();
        run_and_read_stderr(&mut vm.operator(&args))
    };
    assert_eq!(save(&first, &[full]).0, Some(0));
    let (status, line) = save(&second, &[&first, full]);
    assert_eq!(status, Some(0), "{line}");
    let third = dir("third");
    assert_eq!(save(&third, &[&second, full, &first]).0, Some(0));

    let third = Path::new(&third);
    let bases = [full, &second, &first]
        .into_iter()
        .flat_map(|base| ["--restore-base", base]);
    let restored = restore(third, &bases.chain(["--restore-verify"]).collect::<Vec<_>>());
    restored.await_state("two: running, 1 vCPU\n");

    let refused = |bases: [&str; 2]| {
        let bases = bases.iter().flat_map(|base| ["--restore-base", base]);
        refused(third, &bases.collect::<Vec<_>>())
    };
    let line = refused([&second, &first]);
    let missing = format!("the snapshot {first}: it is a diff, and its base, of checksum ");
    assert!(line.contains(&missing), "{line}");
    let line = refused([&second, full]);
    let other = format!("the snapshot {full}: it is not the base of this diff");
    assert!(line.contains(&other), "{line}");
    let (status, line) = save(&dir("never"), &[&first]);
    assert_eq!(status, Some(2), "{line}");
    assert!(line.contains(&missing), "{line}");
    assert!(!Path::new(&dir("never")).exists());

    let file = fs::OpenOptions::new()
        .write(true)
        .open(Path::new(&first).join("memory"));
    file.unwrap().set_len(16 << 20).unwrap();
    let line = refused([&second, &first]);
    let short = format!("the snapshot {first}: its memory file cannot be used: it has 16777216 bytes");
    assert!(line.contains(&short), "{line}");
}

/// A missing, damaged or wrong base is rejected when a diff is saved and restored, and the source
/// continues.
#[test]
fn unusable_bases_are_refused() {
    let Some(vm) = spinning(&[]) else { return };
    let base = take(&vm, &[]);
    let at = |name: &str| vm.runtime.path().join(name).to_str().unwrap().to_owned();
    let (base_path, diff, other) = (base.to_str().unwrap(), at("diff"), at("other"));
    stdout_of(&mut vm.operator(&["ctl", "one", "snapshot", &diff, "--diff", base_path]));
    stdout_of(&mut vm.operator(&["ctl", "one", "snapshot", &other]));
    let diff = Path::new(&diff);

    assert!(refused(diff, &[]).contains("give the directory of its base with --restore-base"));
    assert!(refused(diff, &["--restore-base", &at("none")]).contains("No such file"));
    assert!(refused(diff, &["--restore-base", &other]).contains("it is not the base of this diff"));
    assert!(refused(&base, &["--restore-base", &other]).contains("is not a diff; omit the option"));

    let file = fs::OpenOptions::new()
        .write(true)
        .open(base.join("memory"))
        .unwrap();
    file.write_all_at(&[0x55; 8], 0x70_0000).unwrap();
    let line = refused(diff, &["--restore-base", base_path, "--restore-verify"]);
    assert_contains(&line, "damaged between bytes 0x600000 and 0x800000");
    let new = at("new");
    let save =
        |base: &str| run_and_read_stderr(&mut vm.operator(&["ctl", "one", "snapshot", &new, "--diff", base]));
    let (status, line) = save(base_path);
    assert_eq!(status, Some(2), "{line}");
    assert_contains(&line, "damaged between bytes 0x600000 and 0x800000");
    file.set_len(16 << 20).unwrap();
    assert!(save(base_path).1.contains("16777216 bytes, expected 33554432"));
    assert!(save(&at("none")).1.contains("No such file"));
    assert!(!Path::new(&new).exists());
    assert!(vm.state_of("one").starts_with("one: running"));
}
