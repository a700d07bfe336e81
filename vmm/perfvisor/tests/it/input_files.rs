//! Unusable files on the command line. Each file is rejected with a one-line error and exit status
//! 2, without waiting for a peer that may never appear.

use std::fs::File;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use crate::common::operator::TestVm;
use crate::common::test_lock;
use crate::common::vm::{PROGRAM, has_kvm};
use test_support::skip::skipped;

/// Creates a pipe in `dir` that is not open in any process.
fn pipe(dir: &Path) -> PathBuf {
    let path = dir.join("pipe");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    path
}

fn perfvisor(args: &[&str]) -> Command {
    let mut command = Command::new(PROGRAM);
    command.args(args).env_remove("RUST_LOG").stdin(Stdio::null());
    command
}

/// Checks that the command was rejected with a one-line error that contains `parts`.
fn refused(args: &[&str], out: &Output, parts: &[&str]) {
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{args:?}: {said}");
    assert!(
        said.lines().count() == 1 && parts.iter().all(|part| said.contains(part)),
        "{args:?}: {said}"
    );
}

/// Pipes without a peer are rejected, because opening such a pipe would block until a writer or
/// reader appears.
#[test]
fn pipes_without_peer_are_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let path = pipe(dir.path());
    let pipe = path.to_str().unwrap();
    let nobody_writes = "no writer";
    for (args, what) in [
        (&["run", "--config", pipe][..], nobody_writes),
        (&["ctl", "web", "filter", pipe], nobody_writes),
        (&["run", "--log-file", pipe], "nobody reads"),
    ] {
        refused(args, &perfvisor(args).output().unwrap(), &[what]);
    }
    // For this command, messages about the host precede the error.
    let validate = ["validate", "--kernel", pipe, "--initrd", "/dev/null"];
    assert_eq!(perfvisor(&validate).output().unwrap().status.code(), Some(2));
    let Some(vm) = TestVm::spinning(1) else { return };
    let data = dir.path().join("data");
    let data = data.to_str().unwrap();
    vm.vm.observe_while_running(0.2, |seconds| {
        vm.run_for_stderr(&["record", "test", "-d", seconds, "-o", data]);
    });
    let annotate = |option| ["annotate", "-i", data, option, pipe, "spin_hot"];
    for args in [
        &["run", "--pmu-filter", pipe][..],
        &["report", "-i", data, "--kallsyms", pipe],
        &["report", "-i", data, "--vmlinux", pipe],
        &annotate("--program"),
        &annotate("--vmlinux"),
        &["top", "test", "--once", "--kallsyms", pipe],
        &["record", "test", "-d", "0.2", "-o", data, "--kallsyms", pipe],
    ] {
        refused(args, &vm.run(args), &[pipe, nobody_writes]);
    }
    for option in ["--kernel", "--disk"] {
        let args = ["run", "--kernel", pipe, option, pipe];
        let args = if option == "--kernel" { &args[..3] } else { &args };
        refused(args, &vm.run(args), &["a pipe"]);
    }
}

/// The error names the unwritable output. Regression test: for an unwritable directory, the message
/// was `perf.data: No such file or directory`.
#[test]
fn unwritable_output_is_reported() {
    let Some(vm) = TestVm::spinning(1) else { return };
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data");
    let data = data.to_str().unwrap();
    vm.run_for_stderr(&["record", "test", "-d", "0.2", "-o", data]);
    let directory = dir.path().to_str().unwrap();
    for output in ["/nowhere/x", directory, "/dev/full"] {
        for args in [
            &["record", "test", "-d", "0.2", "-o", output][..],
            &["flamegraph", "-i", data, "-o", output],
            &["pprof", "-i", data, "-o", output],
        ] {
            refused(args, &vm.run(args), &[output]);
        }
    }
    let record = ["record", "test", "-d", "0.2", "-o", "/nowhere/x"];
    refused(&record, &vm.run(&record), &["cannot write", "-o"]);
}

/// Pipes with a writer are accepted, such as the shell's `<(COMMAND)`.
#[test]
fn pipes_with_writer_are_accepted() {
    let dir = tempfile::tempdir().unwrap();
    let path = pipe(dir.path());
    // Open both ends with one descriptor, so that opening the pipe for writing does not block.
    let both = File::options().read(true).write(true).open(&path).unwrap();
    let mut writer = File::options().write(true).open(&path).unwrap();
    let child = perfvisor(&["run", "--dump-config", "--config", path.to_str().unwrap()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    writer.write_all(b"memory = \"48M\"\n").unwrap();
    // The reader must have opened the pipe before the writer exits.
    while rustix::io::ioctl_fionread(&both).unwrap() > 0 {
        std::thread::yield_now();
    }
    drop((both, writer));
    let out = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{out:?}");
    assert!(text.lines().any(|line| line == "memory = \"48M\""), "{text}");
}

/// A daemon with a shared directory releases the caller's streams. Regression test: the supervisor
/// of virtiofsd kept the standard error of the caller, so `$(perfvisor run --daemonize … 2>&1)`
/// blocked until the VM exited.
#[test]
fn daemon_with_shared_directory_releases_streams() {
    let places = [
        "/usr/libexec/virtiofsd",
        "/usr/lib/virtiofsd",
        "/usr/lib/qemu/virtiofsd",
    ];
    if !places.iter().any(|place| Path::new(place).exists()) {
        return skipped("virtiofsd is not installed", false);
    }
    if !has_kvm() {
        return;
    }
    let _lock = test_lock::shared();
    let dir = tempfile::tempdir().unwrap();
    let (shared, log) = (dir.path().join("shared"), dir.path().join("log"));
    std::fs::create_dir(&shared).unwrap();
    let shared = shared.to_str().unwrap();
    let with = |more: &[&str]| {
        let common = ["run", "--name", "d", "--memory", "32M", "--share-dir", shared];
        let mut command = perfvisor(&[&common, more].concat());
        command.env("XDG_RUNTIME_DIR", dir.path());
        command.output().unwrap()
    };
    let operator = |args: &[&str]| {
        let mut command = perfvisor(args);
        command.env("XDG_RUNTIME_DIR", dir.path()).output().unwrap()
    };
    for logs in [&["--log-file", log.to_str().unwrap()][..], &[]] {
        // output() would block if a process that outlives the command kept the pipes open.
        let started = with(&[&["--daemonize", "--cmdline", "loop"], logs].concat());
        assert!(
            started.status.success() && started.stderr.is_empty(),
            "{started:?}: a container may need sandbox=chroot"
        );
        let status = operator(&["ctl", "d", "status"]);
        let status = String::from_utf8_lossy(&status.stdout);
        assert!(status.starts_with("d: running, 1 vCPU\n"), "{status}");
        assert!(operator(&["ctl", "d", "stop"]).status.success());
    }
    // In the foreground, messages of virtiofsd are printed like all others, except for those
    // printed when the VM exits.
    let ended = with(&["--cmdline", "spin=1"]);
    let said = String::from_utf8_lossy(&ended.stderr);
    assert!(said.lines().all(|line| line.starts_with("perfvisor: ")), "{said}");
    let mut text = String::new();
    File::open(&log).unwrap().read_to_string(&mut text).unwrap();
    assert!(text.lines().all(|line| line.starts_with("perfvisor: ")), "{text}");
}

/// A signal ends the wait of a VM for a silent pipe. The VM waits with its stop signals blocked, so
/// the wait itself must poll for signals.
#[test]
fn wait_for_pipe_ends_on_signal() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let path = pipe(dir.path());
    let writer = File::options().read(true).write(true).open(&path).unwrap();
    let args = ["run", "--memory", "32M", "--pmu-filter", path.to_str().unwrap()];
    let child = perfvisor(&args)
        .env("XDG_RUNTIME_DIR", dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // From now on, the signal stays pending until it is polled.
    while !blocks_interrupt(child.id()) {
        std::thread::yield_now();
    }
    let kill = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status();
    assert!(kill.unwrap().success());
    refused(
        &args,
        &child.wait_with_output().unwrap(),
        &["--pmu-filter", "interrupted"],
    );
    drop(writer);
}

/// The error message for an unusable filter file names the file only once. Regression test: the
/// message named the file twice.
#[test]
fn unusable_filter_is_named_once() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let bad = dir.path().join("bad.toml");
    std::fs::write(&bad, "nonsense").unwrap();
    for (file, what) in [
        ("/nonexistent/filter.toml", "No such file"),
        (dir.path().to_str().unwrap(), "Is a directory"),
        ("/dev/zero", "at most 1048576"),
        (bad.to_str().unwrap(), "line 1"),
    ] {
        let args = ["run", "--memory", "32M", "--pmu-filter", file];
        let out = perfvisor(&args)
            .env("XDG_RUNTIME_DIR", dir.path())
            .output()
            .unwrap();
        refused(&args, &out, &["--pmu-filter", what]);
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(said.matches(file).count(), 1, "{said}");
    }
}

/// Returns whether a process blocks SIGINT.
fn blocks_interrupt(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigBlk:"))
        .unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() >> 1 & 1 == 1
}

#[test]
fn missing_socket_directory_names_variable() {
    if !has_kvm() {
        return;
    }
    let args = ["run", "--name", "x", "--memory", "32M"];
    let out = perfvisor(&args)
        .env("XDG_RUNTIME_DIR", "/no/such/dir")
        .output()
        .unwrap();
    refused(
        &args,
        &out,
        &["/no/such/dir/perfvisor", "XDG_RUNTIME_DIR names it"],
    );
}
