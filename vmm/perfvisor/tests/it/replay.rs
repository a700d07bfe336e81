//! `stat --replay`, which restores a snapshot repeatedly and counts the same time window after each
//! restore.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use test_support::{kernels, skip};
use vmm::boot::layout;
use vmm::kvm::execution;

use crate::common::vm::{PROGRAM, SpinningVm, VmProcess, run_and_read_stderr, stdout_of};

/// Takes a snapshot of a VM with a spinning guest. The VM then terminates.
fn snapshot() -> Option<(SpinningVm, PathBuf)> {
    let mut vm = SpinningVm::start("one", &["--cpus", "2"])?;
    let dir = vm.runtime.path().join("saved");
    stdout_of(&mut vm.operator(&["ctl", "one", "snapshot", dir.to_str().unwrap(), "--stop"]));
    assert_eq!(vm.wait(), Some(0));
    Some((vm, dir))
}

fn replay(runtime: &Path, dir: &Path, options: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command
        .args(["stat", "--replay", dir.to_str().unwrap()])
        .args(options)
        .env("XDG_RUNTIME_DIR", runtime);
    command
}

/// Number of rounds of [`counted_guest`]. Each round has two instructions, one of which is a
/// branch.
const ROUNDS: u32 = 500;

/// Returns a guest that writes a line, waits until the generation ID changes, which happens at each
/// restore, executes [`ROUNDS`] rounds and halts.
fn counted_guest() -> Vec<u8> {
    const LOAD: u32 = 0x10_0000;
    let mut code = vec![0xBE]; // mov esi, GENERATION_ID
    code.extend((layout::GENERATION_ID as u32).to_le_bytes());
    code.extend([0x8B, 0x1E]); // mov ebx, [esi]
    code.extend([0x66, 0xBA, 0xF8, 0x03, 0xB0, b'w', 0xEE, 0xB0, b'\n', 0xEE]); // mov dx, 0x3f8; out
    code.extend([0x3B, 0x1E, 0x74, 0xFC]); // cmp ebx, [esi]; je to cmp
    code.push(0xB9); // mov ecx, ROUNDS
    code.extend(ROUNDS.to_le_bytes());
    code.extend([0x49, 0x75, 0xFD]); // dec ecx; jnz to dec
    code.extend([0xFA, 0xF4, 0xEB, 0xFD]); // cli; hlt; jmp to hlt
    let addresses = [LOAD, LOAD, 0, LOAD + 0x1000, LOAD + 32];
    [kernels::multiboot_header(0x1_0003, Some(addresses)), code].concat()
}

/// Takes a snapshot of a VM with [`counted_guest`] while the guest waits.
fn counted_snapshot(options: &[&str]) -> Option<(VmProcess, PathBuf)> {
    let files = tempfile::tempdir().unwrap();
    let kernel = files.path().join("kernel");
    std::fs::write(&kernel, counted_guest()).unwrap();
    let options = [&["--kernel", kernel.to_str().unwrap()], options].concat();
    let mut vm = VmProcess::spawn(Command::new(PROGRAM), "one", &options, Stdio::null())?;
    let mut lines = BufReader::new(vm.child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "w"), "{:?}", vm.log_lines());
    let dir = vm.runtime.path().join("saved");
    stdout_of(&mut vm.command(&["ctl", "one", "snapshot", dir.to_str().unwrap()]));
    Some((vm, dir))
}

/// Returns the single-stepping capabilities of the host, or `None` if it has none.
fn stepping() -> Option<vmm::kvm::stepping::SteppingSupport> {
    let kvm = vmm::kvm::host::open().ok()?;
    let host = execution::probe(&kvm).unwrap().stepping;
    if !host.kernel {
        skip::skipped("this KVM does not step", false);
        return None;
    }
    Some(host)
}

/// Two passes over the same window count the same numbers of instructions and branches, without
/// multiplexing. The counts include the guest's work, and the few instructions before and after it.
#[test]
fn exact_counts_of_a_window_are_equal_in_each_pass() {
    if stepping().is_none() {
        return;
    }
    let Some((vm, dir)) = counted_snapshot(&[]) else {
        return;
    };
    let exact = ["-d", "1.5", "-r", "1", "-j", "--backing", "exact"];
    let events = ["-e", "instructions:k,branches:k"];
    let pass = || {
        let text = stdout_of(&mut replay(
            vm.runtime.path(),
            &dir,
            &[&exact[..], &events].concat(),
        ));
        let rows = text.lines().map(|line| serde_json::from_str(line).unwrap());
        let rows: Vec<serde_json::Value> = rows.collect();
        assert_eq!(rows.len(), 2, "{text}");
        assert!(rows.iter().all(|row| row["pcnt-running"] == 100.0), "{text}");
        let value = |row: &serde_json::Value| row["counter-value"].as_str().unwrap().parse::<f64>().unwrap();
        [value(&rows[0]), value(&rows[1])]
    };
    let first = pass();
    let rounds = f64::from(ROUNDS);
    assert!(
        (2.0 * rounds..2.0 * rounds + 10.0).contains(&first[0]),
        "{first:?}"
    );
    assert!((rounds..rounds + 5.0).contains(&first[1]), "{first:?}");
    assert_eq!(pass(), first);
}

/// Counting starts while the guest runs in user mode, where the guest runs at full speed if KVM
/// cannot single-step user mode. The guest's kernel is counted, and the guest receives no debug
/// exception. The same applies if an operator starts counting a running guest.
#[test]
fn exact_counts_of_a_kernel_begin_in_user_code() {
    if stepping().is_none() {
        return;
    }
    let Some(vm) = SpinningVm::start("one", &[]) else {
        return;
    };
    let dir = vm.runtime.path().join("saved");
    stdout_of(&mut vm.operator(&["ctl", "one", "snapshot", dir.to_str().unwrap()]));
    let counted = |text: String| {
        let value = text.split(',').next().and_then(|value| value.parse::<f64>().ok());
        assert!(value.is_some_and(|value| value > 0.0), "{text}");
    };
    let options = ["-d", "0.5", "-r", "1", "-x,", "-e", "instructions:k"];
    let exact = [&options[..], &["--backing", "exact"]].concat();
    counted(stdout_of(&mut replay(vm.runtime.path(), &dir, &exact)));
    drop(vm);

    let Some(vm) = SpinningVm::start("one", &["--backing", "exact", "--operator-steps"]) else {
        return;
    };
    let stat = [&["stat", "one"], &options[..]].concat();
    counted(stdout_of(&mut vm.operator(&stat)));
    // The guest continues to run after it has been single-stepped.
    vm.assert_counted_and_sampled("one", "cycles,task-clock");
}

/// A time window that cannot be counted exactly is rejected with one line that contains the remedy.
#[test]
fn inexact_windows_are_refused() {
    let Some(host) = stepping() else { return };
    let exact = ["-d", "0.1", "--backing", "exact"];
    let line = |runtime: &Path, dir: &Path, options: &[&str]| {
        let (status, text) = run_and_read_stderr(&mut replay(runtime, dir, &[&exact, options].concat()));
        assert_eq!(status, Some(2), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        text
    };
    let Some((vm, dir)) = counted_snapshot(&[]) else {
        return;
    };
    let runtime = vm.runtime.path();
    let misses = line(runtime, &dir, &["-e", "branch-misses:k"]);
    assert!(
        misses.starts_with("perfvisor: error: --backing exact: cannot count branch-misses:k: "),
        "{misses}"
    );
    if !host.user {
        let user = line(runtime, &dir, &["-e", "instructions:u"]);
        assert!(user.contains("cannot single-step user code"), "{user}");
        assert!(user.contains("use 'instructions:k'"), "{user}");
        assert!(line(runtime, &dir, &[]).contains("use 'instructions:k'"));
    }
    let Some((vm, dir)) = counted_snapshot(&["--cpus", "2"]) else {
        return;
    };
    let several = line(vm.runtime.path(), &dir, &["-e", "instructions:k"]);
    assert!(several.contains("the snapshot has 2 vCPUs"), "{several}");
    for vm in [&["one"][..], &[]] {
        let mut alone = Command::new(PROGRAM);
        let (status, text) = run_and_read_stderr(alone.args(["stat", "--backing", "exact"]).args(vm));
        assert_eq!(status, Some(2), "{text}");
        assert!(
            text.contains("--replay") || text.contains("cannot be used with"),
            "{text}"
        );
    }
}

/// For each event, the output has one line with the mean over all passes and the spread, and the
/// event was counted all the time. No VM remains after the measurement.
#[test]
fn replayed_events_are_counted_all_the_time() {
    let Some((vm, dir)) = snapshot() else { return };
    let runtime = vm.runtime.path();
    let options = [
        "-d",
        "0.3",
        "-r",
        "2",
        "-j",
        "-e",
        "cycles,{task-clock,cycles:u},pv/vm-exits/,instructions:k",
    ];
    let text = stdout_of(&mut replay(runtime, &dir, &options));
    let rows: Vec<serde_json::Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let names: Vec<&str> = rows.iter().map(|row| row["event"].as_str().unwrap()).collect();
    assert_eq!(
        names,
        [
            "cycles",
            "task-clock",
            "cycles:u",
            "pv/vm-exits/",
            "instructions:k"
        ],
        "{text}"
    );
    for row in &rows[..3] {
        assert!(
            row["counter-value"].as_str().unwrap().parse::<f64>().unwrap() > 0.0,
            "{text}"
        );
        assert_eq!(row["pcnt-running"], 100.0, "{text}");
        assert!(row["variance"].is_f64(), "{text}");
    }
    assert_eq!(stdout_of(&mut vm.operator(&["ps", "--names"])), "");

    // One line for each vCPU, and three runs by default.
    let text = stdout_of(&mut replay(runtime, &dir, &["-d", "0.1", "-A", "-e", "cycles"]));
    assert!(text.contains(" (3 runs)"), "{text}");
    assert!(text.contains("VCPU0 ") && text.contains("VCPU1 "), "{text}");
}

#[test]
fn bad_replays_are_refused() {
    let Some((vm, dir)) = snapshot() else { return };
    let runtime = vm.runtime.path();
    let line = |dir: &Path, options: &[&str]| {
        let (status, text) = run_and_read_stderr(&mut replay(runtime, dir, options));
        assert_eq!(status, Some(2), "{text}");
        assert_eq!(text.lines().count(), 1, "{text}");
        text
    };
    assert_eq!(
        line(&dir, &[]),
        "perfvisor: error: --replay requires --duration\n"
    );
    let missing = line(&dir.join("none"), &["-d", "1"]);
    assert!(
        missing.starts_with("perfvisor: error: --replay: ") && missing.contains("none/state"),
        "{missing}"
    );
    assert!(line(&dir, &["-d", "1", "-e", "nonsense"]).contains("'nonsense'"));
    std::fs::write(dir.join("state"), "damaged").unwrap();
    assert!(line(&dir, &["-d", "1"]).starts_with("perfvisor: error: --replay: "));
}
