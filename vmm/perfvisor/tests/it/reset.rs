//! Guests that reset the machine. The VM then exits, or restarts with a clean state.

use std::io::BufRead;

use crate::common::console_vm::ConsoleVm;
use crate::common::vm::{assert_contains, eventually};

/// Message that the guest prints if the machine is in its initial state.
const NEW: &str = "boot cpus=2 memory=0 selector=0 pm=0";

fn booting(way: &str, args: &[&str]) -> Option<ConsoleVm> {
    let cmdline = format!("reset={way}");
    ConsoleVm::start(&[&["--cmdline", &cmdline, "--cpus", "2"], args].concat())
}

#[test]
fn reset_without_restart_ends_vm() {
    for (way, status) in [("keyboard", 4), ("cf9", 4), ("a20", 4), ("triple", 6)] {
        let Some(mut vm) = booting(way, &[]) else { return };
        assert_eq!(vm.line_with("boot"), NEW);
        assert_eq!(vm.status(), Some(status), "{way}: {:?}", vm.log_lines());
        let cause = if status == 6 {
            "shut down after a triple fault"
        } else {
            "the VM ended: the guest reset the machine"
        };
        assert_eq!(vm.count_log_lines(cause), 1, "{way}: {:?}", vm.log_lines());
    }
}

/// After every type of reset, the guest finds zeroed memory, PMU and devices, and its two vCPUs.
/// After 50 resets, the VM holds no more descriptors and threads than after 10.
#[test]
fn repeated_resets_leak_nothing() {
    for (pmu, way) in [
        ("intel", "keyboard"),
        ("amd", "cf9"),
        ("intel", "a20"),
        ("amd", "triple"),
    ] {
        let Some(mut vm) = booting(way, &["--on-reset", "restart", "--pmu", pmu]) else {
            return;
        };
        for _ in 0..10 {
            assert_eq!(vm.line_with("boot"), NEW, "{way}: {:?}", vm.log_lines());
        }
        vm.operator(&["ctl", "machine", "pause"]);
        let before = vm.resource_counts();
        vm.operator(&["ctl", "machine", "resume"]);
        for _ in 0..if way == "cf9" { 50 } else { 10 } {
            assert_eq!(vm.line_with("boot"), NEW, "{way}: {:?}", vm.log_lines());
        }
        vm.operator(&["ctl", "machine", "pause"]);
        // Wait, because the VM closes the operator's connection asynchronously.
        eventually(&format!("{way}: no more than {before:?}"), || {
            let now = vm.resource_counts();
            now.0 <= before.0 && now.1 <= before.1
        });
        vm.stop("machine");
        assert!(vm.count_log_lines("restarting") <= 16, "{:?}", vm.log_lines());
        assert!(
            vm.count_log_lines("triple fault") <= 2 * 16,
            "{:?}",
            vm.log_lines()
        );
        assert!(
            vm.count_log_lines("no backing supports") <= 2,
            "{:?}",
            vm.log_lines()
        );
    }
}

/// The operator's events continue to count and sample across resets, on the same vCPUs.
#[test]
fn operator_events_survive_reset() {
    let Some(mut vm) = booting("cf9 key", &["--on-reset", "restart"]) else {
        return;
    };
    vm.line_with("boot");
    let data = vm.runtime.path().join("perf.data");
    let mut stat = vm.command(&["-v", "stat", "machine", "-A", "-j", "-e", "cycles"]);
    let piped = std::process::Stdio::piped;
    let mut stat = stat.stdout(piped()).stderr(piped()).spawn().unwrap();
    let mut says = std::io::BufReader::new(stat.stderr.take().unwrap()).lines();
    let counts = says.find(|line| line.as_ref().unwrap().contains("has started"));
    assert!(counts.is_some(), "stat has ended");
    let mut record = vm.command(&["record", "machine", "-c", "10000000", "-e", "cycles", "-o"]);
    let mut record = record.arg(&data).spawn().unwrap();
    eventually("the recording runs", || {
        vm.operator(&["ctl", "machine", "status"]);
        std::fs::metadata(&data).is_ok_and(|file| file.len() > 0)
    });
    for _ in 0..5 {
        vm.key();
        assert_eq!(vm.line_with("boot"), NEW);
    }
    let interrupt = |id: u32| {
        let id = id.to_string();
        let sent = std::process::Command::new("/bin/kill")
            .args(["-INT", &id])
            .status();
        assert!(sent.unwrap().success());
    };
    interrupt(stat.id());
    interrupt(record.id());
    assert!(record.wait().unwrap().success());
    let counted = stat.wait_with_output().unwrap();
    let text = String::from_utf8(counted.stdout).unwrap();
    let mut vcpus = 0;
    for line in text.lines() {
        let value: serde_json::Value = serde_json::from_str(line).unwrap();
        let cycles: u64 = value["counter-value"].as_str().unwrap().parse().unwrap();
        assert!(cycles > 0, "{line}");
        vcpus += 1;
    }
    assert_eq!(vcpus, 2, "{text}");
    let report = vm.operator(&["script", "-i", data.to_str().unwrap()]);
    assert!(report.lines().count() > 0, "no samples");
    vm.stop("machine");
}

/// A reset removes hot-plugged vCPUs, which can be added again.
#[test]
fn reset_removes_hot_plugged_vcpus() {
    let args = [
        "--cmdline",
        "reset=cf9 key",
        "--cpus",
        "1,max=3",
        "--on-reset",
        "restart",
    ];
    let Some(mut vm) = ConsoleVm::start(&args) else {
        return;
    };
    for _ in 0..3 {
        assert_eq!(vm.line_with("boot"), NEW.replace("cpus=2", "cpus=1"));
        vm.operator(&["ctl", "machine", "vcpus", "3", "--wait", "0.1"]);
        assert_eq!(vcpus(&vm), 3);
        vm.key();
        eventually("one vCPU is left", || vcpus(&vm) == 1);
    }
    vm.stop("machine");
}

fn vcpus(vm: &ConsoleVm) -> u64 {
    let text = vm.ps(&["--json"]);
    let value: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    value["vcpus"].as_u64().unwrap()
}

/// A VM that is paused during a restart stays paused afterwards.
#[test]
fn pause_survives_reset() {
    let Some(mut vm) = booting("cf9", &["--on-reset", "restart"]) else {
        return;
    };
    for _ in 0..20 {
        vm.line_with("boot");
        assert_eq!(vm.operator(&["ctl", "machine", "pause"]), "machine: paused\n");
        eventually("its vCPUs are parked", || {
            let text = vm.ps(&["--json"]);
            let value: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
            value["state"] == "paused" && value["parked"] == 2
        });
        assert_eq!(vm.operator(&["ctl", "machine", "resume"]), "machine: running\n");
    }
    vm.stop("machine");
}

/// The kernel file is read again from the same directory at each restart. A link that now points
/// elsewhere is not followed, unless the operator gives the VM access to all files of its user.
#[test]
fn reset_reads_kernel_from_same_directory() {
    let dir = tempfile::tempdir().unwrap();
    let (here, elsewhere) = (dir.path().join("here"), dir.path().join("elsewhere"));
    for at in [&here, &elsewhere] {
        std::fs::create_dir(at).unwrap();
        std::fs::write(at.join("kernel"), guest_images::bare_metal::BUILTIN).unwrap();
        std::fs::write(at.join("new"), guest_images::bare_metal::BUILTIN).unwrap();
    }
    let kernel = here.join("kernel");
    let lead_elsewhere = || {
        std::fs::remove_file(&kernel).unwrap();
        std::os::unix::fs::symlink(elsewhere.join("kernel"), &kernel).unwrap();
    };
    for landlock in ["on", "off"] {
        let _ = std::fs::remove_file(&kernel);
        std::fs::copy(here.join("new"), &kernel).unwrap();
        let path = kernel.to_str().unwrap();
        let args = ["--kernel", path, "--on-reset", "restart", "--landlock", landlock];
        let Some(mut vm) = booting("cf9 key", &args) else {
            return;
        };
        vm.line_with("boot");
        std::fs::rename(here.join("new"), &kernel).unwrap();
        std::fs::copy(&kernel, here.join("new")).unwrap();
        vm.key();
        vm.line_with("boot");
        lead_elsewhere();
        vm.key();
        if landlock == "off" || !sandbox::has_landlock() {
            vm.line_with("boot");
            continue;
        }
        assert_eq!(vm.status(), Some(2), "{:?}", vm.log_lines());
        let said = vm.log_lines().join("\n");
        assert_contains(&said, "cannot restart the VM");
        assert_contains(&said, "Permission denied");
    }
}

#[test]
fn missing_kernel_at_reset_is_bad_input() {
    let dir = tempfile::tempdir().unwrap();
    let kernel = dir.path().join("kernel");
    std::fs::write(&kernel, guest_images::bare_metal::BUILTIN).unwrap();
    let args = ["--kernel", kernel.to_str().unwrap(), "--on-reset", "restart"];
    let Some(mut vm) = booting("cf9 key", &args) else {
        return;
    };
    vm.line_with("boot");
    vm.key();
    vm.line_with("boot");
    std::fs::remove_file(&kernel).unwrap();
    vm.key();
    assert_eq!(vm.status(), Some(2), "{:?}", vm.log_lines());
    let name = kernel.display().to_string();
    let about: Vec<String> = vm
        .log_lines()
        .into_iter()
        .filter(|line| line.contains(&name))
        .collect();
    assert_eq!(about.len(), 1, "{about:?}");
    assert!(about[0].contains("cannot restart the VM"), "{about:?}");
}
