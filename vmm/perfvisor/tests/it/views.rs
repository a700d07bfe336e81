//! Recordings in several files and formats, and VMs that are selected by their process or control
//! group.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::common::operator::{TestVm, value_of};
use crate::common::vm::{PROGRAM, eventually};

use guest_profile::export::reader;

/// Returns the completed files of a recording with `--switch-output`, the oldest first.
fn completed(vm: &TestVm) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(vm.vm.runtime.path()).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let mut paths: Vec<PathBuf> = paths
        .filter(|path| {
            let name = path.file_name().unwrap().to_str().unwrap();
            let number = name.strip_prefix("perf.data.");
            number.is_some_and(|number| number.bytes().all(|b| b.is_ascii_digit()))
        })
        .collect();
    paths.sort();
    paths
}

fn recorder(vm: &TestVm, args: &[&str]) -> Child {
    Command::new(PROGRAM)
        .args(["record", "test", "-q", "-F", "500", "-o"])
        .arg(vm.vm.runtime.path().join("perf.data"))
        .args(args)
        .env("XDG_RUNTIME_DIR", vm.vm.runtime.path())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn send(child: &Child, signal: &str) {
    let pid = child.id().to_string();
    assert!(
        Command::new("kill")
            .args([signal, &pid])
            .status()
            .unwrap()
            .success()
    );
}

/// SIGUSR2 completes the current file of a recording and starts a new one. Each file contains the
/// symbols of its samples.
#[test]
fn recording_continues_in_new_file_on_signal() {
    let Some(vm) = TestVm::spinning(1) else { return };
    let mut child = recorder(&vm, &["--switch-output"]);
    let output = vm.vm.runtime.path().join("perf.data");
    let grown = || std::fs::metadata(&output).is_ok_and(|file| file.len() > 16 << 10);
    for files in 1..=2 {
        eventually("samples are written", grown);
        send(&child, "-USR2");
        eventually("the file is completed", || completed(&vm).len() == files);
    }
    eventually("samples are written", grown);
    send(&child, "-INT");
    assert!(child.wait().unwrap().success());
    let mut last_ns = 0;
    for file in completed(&vm).iter().chain([&output]) {
        let profile = reader::read_file(file).unwrap();
        let first_ns = profile.samples().map(|s| s.time_ns).min().unwrap();
        assert!(first_ns >= last_ns, "{}", file.display());
        last_ns = profile.samples().map(|s| s.time_ns).max().unwrap();
        let text = vm.run_for_stderr(&["report", "-i", file.to_str().unwrap()]);
        assert!(text.contains("spin_hot"), "{}: {text}", file.display());
    }
}

/// With `--overwrite`, nothing is written before a signal, and each file contains only the newest
/// samples since the previous file.
#[test]
fn overwrite_recording_writes_newest_samples_on_signal() {
    const RING_BYTES: usize = 8 << 12;
    const SAMPLE_MIN_BYTES: usize = 100;
    let Some(vm) = TestVm::spinning(1) else { return };
    let mut child = recorder(&vm, &["--overwrite", "--switch-output", "-m", "8"]);
    let output = vm.vm.runtime.path().join("perf.data");
    eventually("the file is created", || output.exists());
    let length = || std::fs::metadata(&output).unwrap().len();
    for files in 1..=2 {
        // Sleep long enough for the samples to fill the ring more than once.
        std::thread::sleep(Duration::from_secs(2));
        assert!(length() < 16 << 10, "{} bytes before the signal", length());
        send(&child, "-USR2");
        eventually("the file is completed", || completed(&vm).len() == files);
    }
    std::thread::sleep(Duration::from_secs(1));
    send(&child, "-INT");
    assert!(child.wait().unwrap().success());
    let mut last_ns = 0;
    for file in completed(&vm).iter().chain([&output]) {
        let profile = reader::read_file(file).unwrap();
        let times: Vec<u64> = profile.samples().map(|s| s.time_ns).collect();
        assert!(
            times.first().is_some_and(|first_ns| *first_ns > last_ns),
            "{times:?}"
        );
        assert!(times.is_sorted(), "{times:?}");
        assert!(
            times.len() <= RING_BYTES / SAMPLE_MIN_BYTES,
            "{} samples",
            times.len()
        );
        last_ns = times[times.len() - 1];
        let text = vm.run_for_stderr(&["report", "-i", file.to_str().unwrap()]);
        assert!(text.contains("spin_hot"), "{}: {text}", file.display());
    }
    for (args, message) in [
        (&["--overwrite", "--switch-output=1M"][..], "cannot be a size"),
        (&["--overwrite", "--chain-every", "2"], "--chain-every"),
    ] {
        let refused = vm.run(&[&["record", "test"], args].concat());
        let said = String::from_utf8_lossy(&refused.stderr);
        assert!(
            refused.status.code() == Some(2) && said.contains(message),
            "{said}"
        );
    }
}

#[test]
fn recording_keeps_newest_files() {
    let Some(vm) = TestVm::spinning(1) else { return };
    let mut child = recorder(&vm, &["--switch-output=16K", "--switch-max-files", "2"]);
    let mut first = None;
    eventually("the first file is removed", || {
        let files = completed(&vm);
        assert!(files.len() <= 3, "{files:?}");
        first = first.clone().or_else(|| files.first().cloned());
        first.as_ref().is_some_and(|first| !files.contains(first))
    });
    send(&child, "-INT");
    assert!(child.wait().unwrap().success());
    assert_eq!(completed(&vm).len(), 2);
}

/// A VM can be selected by its process ID and by the control group of its process.
#[test]
fn process_and_cgroup_name_vm() {
    let Some(vm) = TestVm::spinning(1) else { return };
    let pid = vm.vm.child.id().to_string();
    let count = |args: &[&str]| {
        let all = [&["stat", "-j", "-e", "task-clock", "-d", "0.2"], args].concat();
        let text = vm.run_for_stderr(&all);
        let line = value_of(text.lines().next().unwrap());
        line["counter-value"].as_str().unwrap().parse::<f64>().unwrap()
    };
    assert!(count(&["-p", &pid]) > 0.0);
    assert!(count(&[&format!("pid:{pid}")]) > 0.0);
    assert!(
        vm.run_for_stderr(&["ctl", &format!("pid:{pid}"), "status"])
            .contains("running")
    );
    let none = vm.run(&["stat", "-p", "1"]);
    let said = String::from_utf8_lossy(&none.stderr);
    assert_eq!(none.status.code(), Some(2), "{said}");
    assert!(said.contains("pid:1") && said.contains("test"), "{said}");
    let groups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    let group = groups.lines().next().and_then(|line| line.splitn(3, ':').nth(2));
    if let Some(group) = group.filter(|group| PathBuf::from(format!("/sys/fs/cgroup{group}")).is_dir()) {
        // The VMs of other tests are also in this group, and may not answer.
        let out = vm.run(&["stat", "-j", "-e", "task-clock", "-d", "0.2", "-G", group]);
        let text = String::from_utf8_lossy(&out.stdout);
        assert!(text.lines().any(|line| value_of(line)["vm"] == "test"), "{out:?}");
    }
    let none = vm.run(&["stat", "-d", "0.2", "-G", "/nowhere"]);
    assert_eq!(none.status.code(), Some(2), "{none:?}");
    assert!(String::from_utf8_lossy(&none.stderr).contains("/nowhere"));
    assert_eq!(vm.run_for_stderr(&["ps", "--names"]), "test\n");
}

/// The program can produce every output format of a recording.
#[test]
fn recording_is_shown_in_every_format() {
    let Some(vm) = TestVm::spinning(1) else { return };
    let place = |name: &str| vm.vm.runtime.path().join(name).to_str().unwrap().to_owned();
    let file = place("perf.data");
    let record = [
        "record",
        "test",
        "-q",
        "-F",
        "500",
        "--chain-every",
        "1",
        "-o",
        &file,
    ];
    vm.run_for_stderr(&[&record[..], &["-d", "3"]].concat());
    let text = vm.run_for_stderr(&[
        "report",
        "-i",
        &file,
        "-F",
        "overhead,sym",
        "-S",
        "spin_hot",
        "-g",
        "caller",
    ]);
    assert!(text.contains("---") && text.contains("spin_chunk"), "{text}");
    assert!(
        !text.contains("[u] spin_warm") && !text.contains("Samples  "),
        "{text}"
    );
    let text = vm.run_for_stderr(&[
        "script",
        "-i",
        &file,
        "--json",
        "-F",
        "sym,period",
        "-S",
        "spin_hot",
    ]);
    let sample = value_of(text.lines().next().unwrap());
    assert_eq!(sample["frames"][0]["sym"], "spin_hot");
    assert!(sample["comm"].is_null() && sample["period"].is_u64());
    for (format, key) in [("firefox", "threads"), ("speedscope", "profiles")] {
        let out = place(format);
        vm.run_for_stderr(&["convert", "-i", &file, "--to", format, "-o", &out]);
        let written = value_of(&std::fs::read_to_string(&out).unwrap());
        assert!(!written[key].as_array().unwrap().is_empty(), "{format}");
    }
    let none = vm.run(&["convert", "-i", &file, "--to", "firefox", "-e", "branches"]);
    let said = String::from_utf8_lossy(&none.stderr);
    assert!(none.status.code() == Some(2) && said.contains("cycles"), "{said}");
    let svg = vm.run_for_stderr(&["flamegraph", "-i", &file, "--diff", &file, "-o", "-"]);
    assert!(svg.contains("<svg") && svg.contains("spin_hot"));
}
