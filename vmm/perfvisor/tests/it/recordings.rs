//! Recordings of a running VM, with the real program and KVM.

use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::operator::TestVm;
use crate::common::vm::{PROGRAM, SpinningVm, eventually};

use guest_profile::export::symbolize::{Symbolizer, complete_chains};
use guest_profile::export::{Profile, folded, reader, report};

/// A recording attributes the correct shares and call chains to functions that take 60, 30 and 10 %
/// of the time, and every output format can be produced. This holds regardless of whether the vCPU
/// is stopped for every sample or only for some samples.
#[test]
fn recording_attributes_time_to_functions_and_chains() {
    let Some(vm) = TestVm::spinning(2) else { return };
    for chain_every in [1, 10] {
        profile_of_the_spinning_guest(&vm, chain_every);
    }
}

/// A recording without a duration ends when its file is large enough, and is complete.
#[test]
fn recording_ends_at_max_size() {
    let Some(vm) = TestVm::spinning(1) else { return };
    let data = vm.vm.runtime.path().join("perf.data");
    let file = data.to_str().unwrap();
    vm.run_for_stderr(&[
        "record",
        "test",
        "-F",
        "1000",
        "-q",
        "-o",
        file,
        "--max-size",
        "32K",
    ]);
    let size = std::fs::metadata(&data).unwrap().len();
    assert!((32 << 10..4 << 20).contains(&size), "{size}");
    assert!(!reader::read_file(&data).unwrap().is_empty());
}

/// With `--switch-events`, `record` reports how often another program preempts the vCPU.
#[test]
fn recording_shows_preemptions_of_a_vcpu() {
    let Some(vm) = SpinningVm::start("test", &["--pin", "0=0"]) else {
        return;
    };
    let vm = TestVm { vm, vcpus: 1 };
    let spin = "while :; do :; done";
    let mut rival = Command::new("taskset")
        .args(["-c", "0", "sh", "-c", spin])
        .spawn()
        .unwrap();
    let data = vm.vm.runtime.path().join("perf.data");
    let file = data.to_str().unwrap();
    let recorded = vm.run(&["-v", "record", "test", "--switch-events", "-d", "2", "-o", file]);
    rival.kill().unwrap();
    rival.wait().unwrap();
    let log = String::from_utf8_lossy(&recorded.stderr);
    let preemptions = log.split_once("preempted the vCPUs ").and_then(|(_, rest)| {
        let (count, _) = rest.split_once(" times")?;
        count.parse::<u64>().ok()
    });
    assert!(preemptions.is_some_and(|count| count >= 5), "{log}");
}

fn profile_of_the_spinning_guest(vm: &TestVm, chain_every: u32) {
    let data = vm.vm.runtime.path().join("perf.data");
    let file = data.to_str().unwrap();
    let chain_every_text = chain_every.to_string();
    let mut seconds = 3;
    // On a busy host, the guest has little CPU time to sample.
    let profile: Profile = loop {
        let duration = seconds.to_string();
        let every = ["--chain-every", &chain_every_text, "-d", &duration];
        vm.run_for_stderr(&[&["record", "test", "-F", "1000", "-q", "-o", file], &every[..]].concat());
        let profile = reader::read_file(&data).unwrap();
        if profile.len() >= 1000 {
            break profile;
        }
        seconds *= 2;
    };
    let samples = profile.len();
    // Samples are weighted by their periods, which vary while the frequency is adjusted. Kish's
    // effective sample size is the number of equally weighted samples with the same variance.
    let (sum, squares) = profile.samples().fold((0.0, 0.0), |(sum, squares), s| {
        let w = s.period as f64;
        (sum + w, squares + w * w)
    });
    let effective: f64 = sum * sum / squares;
    let mut symbols = Symbolizer::new(&profile, None, None);
    let table = report::tables(&profile, &mut symbols, &report::ProfileReportOptions::default()).remove(0);
    let share = |name: &str| -> f64 {
        let rows = table
            .rows
            .iter()
            .filter(|r| r.keys.iter().any(|k| k.ends_with(name)));
        rows.map(|r| r.percent).sum()
    };
    let program = share("spin_hot") + share("spin_warm") + share("spin_cool");
    for (name, percent) in [("spin_hot", 60.0), ("spin_warm", 30.0), ("spin_cool", 10.0f64)] {
        let p = percent / 100.0;
        // Three percentage points, or four standard errors for a small number of samples on a busy
        // host.
        let tolerance = f64::max(3.0, 400.0 * (p * (1.0 - p) / effective).sqrt());
        // Use shares of the program's time, because the emulated guest kernel also takes some time
        // on a busy host.
        let found = 100.0 * share(name) / program;
        assert!(
            (found - percent).abs() <= tolerance,
            "{name}: {found:.2} % of {samples} samples"
        );
    }
    let stacks = folded::stacks(&complete_chains(&profile, &mut symbols), &mut symbols, None);
    let weight = |part: &str| -> u64 {
        let found = stacks.iter().filter(|(stack, _)| stack.contains(part));
        found.map(|(_, n)| n).sum()
    };
    // The caller is in the chain of all samples except for those in a prologue or epilogue. With
    // few chains, each represents many samples.
    let percent = if chain_every == 1 { 97 } else { 80 };
    for (function, chain) in [
        ("spin_hot", "spin_chunk;spin_hot"),
        ("spin_warm", "spin_chunk;spin_rest;spin_warm"),
        ("spin_cool", "spin_chunk;spin_rest;spin_cool"),
    ] {
        let (all, with) = (weight(function), weight(chain));
        assert!(with * 100 >= all * percent, "{chain}: {with} of {all}");
    }

    let text = vm.run_for_stderr(&["report", "-i", file, "--sort", "vcpu,sym"]);
    assert!(text.contains("spin_hot") && text.contains("VCPU"), "{text}");
    assert!(
        vm.run_for_stderr(&["script", "-i", file])
            .lines()
            .any(|l| l.contains("spin_warm+"))
    );
    assert!(
        vm.run_for_stderr(&["flamegraph", "-i", file, "--folded"])
            .contains("spin_chunk;spin_hot ")
    );
    let svg = vm.run_for_stderr(&["flamegraph", "-i", file, "-o", "-"]);
    assert!(svg.contains("<svg") && svg.contains("spin_hot"));
    let packed = vm.vm.runtime.path().join("profile.pb.gz");
    vm.run_for_stderr(&["pprof", "-i", file, "-o", packed.to_str().unwrap()]);
    assert!(std::fs::read(&packed).unwrap().starts_with(&[0x1f, 0x8b]));
}

/// A control pipe enables and disables sampling, and each command is acknowledged after its
/// execution.
#[test]
fn control_pipes_switch_recording() {
    let Some(vm) = TestVm::spinning(1) else { return };
    let place = |name: &str| vm.vm.runtime.path().join(name);
    let (ctl, ack, data) = (place("ctl"), place("ack"), place("perf.data"));
    for path in [&ctl, &ack] {
        assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
    }
    let pipes = format!("fifo:{},{}", ctl.display(), ack.display());
    let recorder = Command::new(PROGRAM)
        .args([
            "record",
            "test",
            "-q",
            "-F",
            "500",
            "-D",
            "-1",
            "--control",
            &pipes,
        ])
        .args(["-o", data.to_str().unwrap()])
        .env("XDG_RUNTIME_DIR", vm.vm.runtime.path())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let both = |path| {
        std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .unwrap()
    };
    let (mut ctl, mut ack) = (both(&ctl), both(&ack));
    let mut say = |word: &str| {
        ctl.write_all(word.as_bytes()).unwrap();
        let mut answer = [0; 4];
        ack.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"ack\n", "{word}");
        perf_core::pmu::host::monotonic_ns()
    };
    let mut on = Vec::new();
    for _ in 0..2 {
        say("ping\n");
        std::thread::sleep(Duration::from_millis(200));
        let from = perf_core::pmu::host::monotonic_ns();
        let used = vm.cpu_time();
        say("enable\n");
        // Samples are taken by vCPU run time, which is scarce on a busy host.
        while vm.cpu_time() - used < Duration::from_millis(300) {
            std::thread::sleep(Duration::from_millis(50));
        }
        on.push((from, say("disable\n")));
    }
    say("stop\n");
    let out = recorder.wait_with_output().unwrap();
    assert_eq!(
        out.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    let profile: Profile = reader::read_file(&data).unwrap();
    let times: Vec<u64> = profile.samples().map(|sample| sample.time_ns).collect();
    // The clock of the file started with the VM, so the test compares differences of sample times.
    let first = *times.iter().min().unwrap();
    let gap = on[1].0 - on[0].1;
    let mut sorted = times.clone();
    sorted.sort_unstable();
    let widest = sorted.windows(2).map(|two| two[1] - two[0]).max().unwrap();
    assert!(times.len() > 50, "{} samples", times.len());
    assert!(widest >= gap, "{widest} ns without a sample, off for {gap}");
    assert!(sorted[sorted.len() - 1] - first <= on[1].1 - on[0].0);
    for (arguments, part) in [
        (&["-D", "-1"][..], "--control"),
        (&["--control", "fifo:/nowhere/x"], "/nowhere/x"),
        (&["--control", "x"], "mkfifo"),
        (&["-D", "-2"], "-2"),
    ] {
        let run = Command::new(PROGRAM)
            .args(["record", "test"])
            .args(arguments)
            .env("XDG_RUNTIME_DIR", vm.vm.runtime.path())
            .output()
            .unwrap();
        let err = String::from_utf8_lossy(&run.stderr);
        assert_eq!(run.status.code(), Some(2), "{arguments:?}: {err}");
        assert!(err.contains(part), "{err}");
    }
}

/// The recording of a VM is complete even if the VM terminates.
#[test]
fn recording_survives_end_of_vm() {
    let Some(mut vm) = TestVm::spinning(1) else { return };
    let data = vm.vm.runtime.path().join("perf.data");
    let recorder = Command::new(PROGRAM)
        .args(["record", "test", "-q", "-o", data.to_str().unwrap()])
        .env("XDG_RUNTIME_DIR", vm.vm.runtime.path())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    eventually("samples arrive", || {
        std::fs::metadata(&data).is_ok_and(|m| m.len() > 8192)
    });
    vm.vm.child.kill().unwrap();
    vm.vm.child.wait().unwrap();
    let out = recorder.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(0));
    assert!(String::from_utf8_lossy(&out.stderr).contains("the VM has exited"));
    assert!(!reader::read_file(&data).unwrap().is_empty());
}

/// An empty file is accepted, and a damaged one is rejected without a panic.
#[test]
fn empty_and_damaged_recordings_differ() {
    let temp = tempfile::tempdir().unwrap();
    let empty = temp.path().join("empty");
    let broken = temp.path().join("broken");
    std::fs::write(&empty, "").unwrap();
    std::fs::write(&broken, "PERFILE2 and then nothing").unwrap();
    for command in ["report", "script", "flamegraph", "pprof"] {
        for (file, status) in [(&empty, 0), (&broken, 2)] {
            let out = Command::new(PROGRAM)
                .args([command, "-i", file.to_str().unwrap()])
                .current_dir(temp.path())
                .output()
                .unwrap();
            let stderr = String::from_utf8_lossy(&out.stderr);
            assert_eq!(out.status.code(), Some(status), "{command}: {stderr}");
            assert_eq!(stderr.trim_end().lines().count(), 1, "{command}: {stderr}");
        }
    }
}

/// Devices, which are endless, and pipes without a writer, which never deliver data, are rejected.
#[test]
fn devices_and_silent_pipes_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let (pipe, directory) = (pipe.to_str().unwrap(), dir.path().to_str().unwrap());
    for (path, what) in [
        ("/dev/zero", "a device"),
        (pipe, "a pipe"),
        (directory, "a directory"),
    ] {
        for command in [
            &["report", "-i", path][..],
            &["script", "-i", path],
            &["annotate", "f", "-i", path],
            &["flamegraph", "-i", path, "--folded"],
            &["pprof", "-i", path, "-o", "-"],
            &["diff", path, path],
        ] {
            let out = Command::new(PROGRAM)
                .args(command)
                .stdin(Stdio::null())
                .output()
                .unwrap();
            let said = String::from_utf8_lossy(&out.stderr);
            assert_eq!(out.status.code(), Some(2), "{command:?}: {said}");
            assert!(
                said.contains(path) && said.contains(what) && said.trim_end().lines().count() == 1,
                "{command:?}: {said}"
            );
        }
    }
}

/// An invalid file and an oversized recording are rejected without being read into memory. Each
/// file is sparse with 1 TiB, and the address space is limited to 1 GiB.
#[test]
fn large_files_are_rejected_before_reading() {
    let dir = tempfile::tempdir().unwrap();
    for (begin, what) in [("", "not a perf.data file"), ("PERFILE2", "larger than 4096 MiB")] {
        let path = dir.path().join("large");
        std::fs::write(&path, begin).unwrap();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        if file.set_len(1 << 40).is_err() {
            return eprintln!("SKIP: no file of 1 TiB here");
        }
        let out = Command::new("sh")
            .args(["-c", "ulimit -v 1048576 && exec \"$0\" report -i \"$1\"", PROGRAM])
            .arg(&path)
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{said}");
        assert!(
            said.contains(what) && said.trim_end().lines().count() == 1,
            "{said}"
        );
    }
}

/// An unreadable guest disk is reported before the first sample is taken. A disk that is in use is
/// accepted.
#[test]
fn unreadable_guest_disk_is_reported_in_one_line() {
    let Some(vm) = TestVm::spinning(1) else { return };
    let dir = tempfile::tempdir().unwrap();
    let empty = dir.path().join("empty");
    std::fs::write(&empty, vec![0; 1 << 20]).unwrap();
    let (empty, out) = (empty.to_str().unwrap(), dir.path().join("perf.data"));
    let directory = dir.path().to_str().unwrap();
    for (disk, what) in [
        ("/nowhere/at/all", "cannot open"),
        ("/dev/zero", "a character device"),
        (directory, "a directory"),
        (empty, "no readable ext4 file system"),
        (&format!("{empty},format=vmdk"), "unknown format"),
        (&format!("{empty},format=qcow2"), "qcow2"),
    ] {
        let args = [
            "record",
            "test",
            "-d",
            "0.1",
            "--guest-disk",
            disk,
            "-o",
            out.to_str().unwrap(),
        ];
        let ended = vm.run(&args);
        let said = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.code(), Some(2), "{disk}: {said}");
        assert!(
            said.contains("--guest-disk") && said.contains(what) && said.trim_end().lines().count() == 1,
            "{disk}: {said}"
        );
        assert!(!out.exists(), "{disk}");
    }
}
