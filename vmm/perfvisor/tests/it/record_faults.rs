//! Recordings that are interrupted because the recorder is killed or its disk is full.

use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::console_vm::ConsoleVm;
use crate::common::vm::{PROGRAM, assert_contains, eventually};
use guest_profile::export::reader;

/// Arguments of a guest that computes until it is stopped.
const BUSY: [&str; 2] = ["--cmdline", "reset=cf9 key"];

/// Returns the number of samples in a file, according to `perfvisor script`.
fn samples(vm: &ConsoleVm, data: &Path) -> usize {
    let text = vm.operator(&["script", "-i", data.to_str().unwrap()]);
    text.split("\n\n")
        .filter(|sample| sample.contains("cycles"))
        .count()
}

/// A killed recorder leaves a readable file with its samples.
#[test]
fn killed_recorder_leaves_its_samples() {
    let Some(mut vm) = ConsoleVm::start(&BUSY) else {
        return;
    };
    vm.line_with("boot");
    let data = vm.runtime.path().join("perf.data");
    let mut record = vm.command(&["record", "machine", "-q", "-c", "10000000", "-o"]);
    let mut record = record.arg(&data).spawn().unwrap();
    eventually("some samples are kept", || {
        let out = vm.command(&["script", "-i"]).arg(&data).output().unwrap();
        out.status.success() && out.stdout.len() > 1000
    });
    record.kill().unwrap();
    record.wait().unwrap();
    assert!(samples(&vm, &data) > 0);
    let report = vm.operator(&["report", "-i", data.to_str().unwrap()]);
    assert!(report.contains("cycles"), "{report}");
    vm.stop("machine");
}

/// Samples are kept as soon as the recorder has read them from the rings, even in the first second
/// of a recording.
#[test]
fn recorder_killed_in_first_second_leaves_samples() {
    let Some(mut vm) = ConsoleVm::start(&BUSY) else {
        return;
    };
    vm.line_with("boot");
    let data = vm.runtime.path().join("perf.data");
    // On a busy host, the first samples may be seen late, so there are several attempts.
    eventually("samples of less than half a second are kept", || {
        let _ = std::fs::remove_file(&data);
        let mut record = vm.command(&["record", "machine", "-q", "-c", "1000000", "-o"]);
        let mut record = record.arg(&data).spawn().unwrap();
        eventually("some samples are kept", || {
            reader::read_file(&data).is_ok_and(|profile| !profile.is_empty())
        });
        record.kill().unwrap();
        record.wait().unwrap();
        let profile = reader::read_file(&data).unwrap();
        let times = || profile.samples().map(|sample| sample.time_ns);
        times().max().unwrap() - times().min().unwrap() < 500_000_000
    });
    vm.stop("machine");
}

/// A full disk ends the recording with a one-line message that names the file, status 1 and a
/// readable file. The guest continues.
#[test]
fn full_disk_leaves_readable_recording() {
    let Some(mut vm) = ConsoleVm::start(&BUSY) else {
        return;
    };
    vm.line_with("boot");
    let disk = vm.runtime.path().join("disk");
    std::fs::create_dir(&disk).unwrap();
    let kept = vm.runtime.path().join("kept.data");
    // The small file system belongs to a mount namespace and disappears with its process.
    let script = format!(
        "mount -t tmpfs -o size=64k none {disk} && {PROGRAM} record machine -q -c 1000000 --chain-every 1 -o {disk}/perf.data; \
         status=$?; cp {disk}/perf.data {kept}; exit $status",
        disk = disk.display(),
        kept = kept.display(),
    );
    let out = Command::new("unshare")
        .args(["--mount", "sh", "-c", &script])
        .env("XDG_RUNTIME_DIR", vm.runtime.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr).into_owned();
    if said.contains("permission denied") || said.contains("Operation not permitted") {
        return test_support::skip::skipped("mounting a small disk takes root", false);
    }
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert_eq!(said.trim().lines().count(), 1, "{said}");
    assert_contains(&said, "disk/perf.data: the recording was stopped after ");
    assert_contains(&said, "No space left");
    assert!(samples(&vm, &kept) > 0, "{said}");
    vm.stop("machine");
}

/// A recording without samples logs a warning and leaves a readable file.
#[test]
fn recording_without_samples_warns() {
    let Some(vm) = ConsoleVm::start(&BUSY) else {
        return;
    };
    vm.line_with("boot");
    let data = vm.runtime.path().join("perf.data");
    // A period that a guest does not reach within a day, so that no sample is taken.
    let period = 1u64 << 50;
    let mut record = vm.command(&["record", "machine", "-q", "-d", "0.5", "-e", "cycles"]);
    let out = record
        .args(["-c", &period.to_string(), "-o"])
        .arg(&data)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(0), "{said}");
    assert!(said.contains("warn: no sample was taken: "), "{said}");
    assert_eq!(samples(&vm, &data), 0);
}
