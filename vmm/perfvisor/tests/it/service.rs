//! A VM as a service: power button, signals, background execution, service manager and CPU pinning.
#![expect(unsafe_code, reason = "sends signals")]

use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::console_vm::ConsoleVm;
use crate::common::pty::shell_on_terminal;
use crate::common::test_lock;
use crate::common::vm::{PROGRAM, assert_contains, eventually, has_kvm};

fn signal(vm: &ConsoleVm, signal: libc::c_int) {
    let pid = i32::try_from(vm.child.id()).unwrap();
    // SAFETY: the process is our child and has not been waited for.
    assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
}

/// A guest that handles its power button powers off with status 0, after the operator's command and
/// after SIGTERM.
#[test]
fn power_button_powers_off_guest() {
    for by_signal in [false, true] {
        let Some(mut vm) = ConsoleVm::start(&["--cmdline", "button"]) else {
            return;
        };
        vm.line_with("waiting for the button");
        if by_signal {
            signal(&vm, libc::SIGTERM);
        } else {
            let said = vm.operator(&["ctl", "machine", "powerdown"]);
            assert_eq!(said, "machine: power button pressed\n");
        }
        assert_eq!(vm.line_with("pressed"), "the button was pressed; status 0");
        assert_eq!(vm.status(), Some(0), "{:?}", vm.log_lines());
    }
}

/// A VM whose guest has not enabled the button event exits immediately, and the operator is
/// informed.
#[test]
fn power_button_without_handler_ends_vm_immediately() {
    let Some(mut vm) = ConsoleVm::start(&["--cmdline", "loop"]) else {
        return;
    };
    vm.line_with("spinning");
    let refused = vm.command(&["ctl", "machine", "powerdown"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(2));
    let line = String::from_utf8(refused.stderr).unwrap();
    assert!(
        line.contains("does not listen") && line.lines().count() == 1,
        "{line}"
    );
    signal(&vm, libc::SIGTERM);
    assert_eq!(vm.status(), Some(10), "{:?}", vm.log_lines());
    eventually("it says what ended it", || {
        vm.count_log_lines("the VM ended: SIGTERM") == 1
    });
}

/// A VM whose guest ignores the enabled button exits at the time limit, or at a second signal.
#[test]
fn ignored_power_button_ends_vm_at_timeout() {
    let Some(mut vm) = ConsoleVm::start(&["--cmdline", "button deaf", "--stop-timeout", "0.2"]) else {
        return;
    };
    vm.line_with("waiting for the button");
    signal(&vm, libc::SIGTERM);
    assert_eq!(vm.status(), Some(10));
    eventually("it says why", || {
        vm.count_log_lines("did not power off within 0.2 s") == 1
    });
    for second in [libc::SIGTERM, libc::SIGINT] {
        let args = ["--cmdline", "button deaf", "--stop-timeout", "86400"];
        let Some(mut vm) = ConsoleVm::start(&args) else {
            return;
        };
        vm.line_with("waiting for the button");
        signal(&vm, libc::SIGTERM);
        eventually("the button is pressed", || {
            vm.count_log_lines("the power button is pressed") == 1
        });
        assert!(vm.child.try_wait().unwrap().is_none());
        signal(&vm, second);
        assert_eq!(vm.status(), Some(10));
    }
}

/// `--daemonize` returns when the VM is running. Later messages are written to the log file.
#[test]
fn daemonize_detaches_or_reports_failure() {
    if !has_kvm() {
        return;
    }
    let _lock = test_lock::shared();
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let perfvisor = |args: &[&str]| {
        let mut command = Command::new(PROGRAM);
        command
            .args(args)
            .env("XDG_RUNTIME_DIR", dir.path())
            .env_remove("RUST_LOG");
        let out = command.output().unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        (out.status.code(), text(out.stdout), text(out.stderr))
    };
    let log = log.to_str().unwrap();
    let run = [
        "-v",
        "run",
        "--daemonize",
        "--name",
        "d",
        "--memory",
        "32M",
        "--cmdline",
        "loop",
        "--log-file",
        log,
    ];
    // output() has returned, so the daemon has closed its copies of the pipes.
    let (status, _, stderr) = perfvisor(&run);
    assert_eq!((status, stderr.as_str()), (Some(0), ""));
    let status = perfvisor(&["ctl", "d", "status"]).1;
    assert!(status.starts_with("d: running, 1 vCPU\n"), "{status}");
    let text = std::fs::read_to_string(log).unwrap();
    assert_contains(&text, "perfvisor: info: multiboot image at");
    assert!(!text.contains('\r'), "{text}");
    assert_eq!(perfvisor(&["ctl", "d", "stop"]).0, Some(0));

    let missing = [
        "run",
        "--daemonize",
        "--kernel",
        "/nonexistent/kernel",
        "--log-file",
        log,
    ];
    let (status, _, stderr) = perfvisor(&missing);
    assert_eq!(status, Some(2), "{stderr}");
    assert!(
        stderr.contains("/nonexistent/kernel") && stderr.lines().count() == 1,
        "{stderr}"
    );
    assert!(
        std::fs::read_to_string(log)
            .unwrap()
            .contains("/nonexistent/kernel")
    );
    let (status, _, stderr) = perfvisor(&["run", "--log-file", "/nonexistent/log"]);
    assert_eq!((status, stderr.lines().count()), (Some(2), 1), "{stderr}");
    assert!(stderr.contains("--log-file /nonexistent/log"), "{stderr}");
}

#[test]
fn service_manager_is_notified() {
    if !has_kvm() {
        return;
    }
    let _lock = test_lock::shared();
    let dir = tempfile::tempdir().unwrap();
    let place = dir.path().join("notify");
    let socket = UnixDatagram::bind(&place).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
    let mut child = Command::new(PROGRAM)
        .args(["run", "--memory", "32M", "--cmdline", "button"])
        .env("XDG_RUNTIME_DIR", dir.path())
        .env("NOTIFY_SOCKET", &place)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let next = || {
        let mut bytes = [0; 512];
        let count = socket.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..count].to_vec()).unwrap()
    };
    assert_eq!(next(), format!("READY=1\nMAINPID={}\n", child.id()));
    // SAFETY: the process is our child and has not been waited for.
    unsafe { libc::kill(i32::try_from(child.id()).unwrap(), libc::SIGTERM) };
    assert_eq!(next(), "STOPPING=1\n");
    child.wait().unwrap();
}

/// A VM started as a background job of a shell is not stopped by SIGTTOU.
#[test]
fn background_vm_is_not_stopped_by_sigttou() {
    if !has_kvm() {
        return;
    }
    let _lock = test_lock::shared();
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let script = format!(
        "set -m; stty tostop; {PROGRAM} run --memory 32M --cmdline 'reset=cf9' & wait $!; echo status=$? >{}",
        out.display()
    );
    let (mut shell, mut terminal) = shell_on_terminal(&script, dir.path());
    // The terminal must be read, because otherwise its buffer fills.
    std::thread::spawn(move || std::io::copy(&mut terminal, &mut std::io::sink()));
    eventually("the VM has ended and was not stopped", || {
        shell.try_wait().unwrap().is_some()
    });
    assert_eq!(std::fs::read_to_string(out).unwrap(), "status=4\n");
}

/// vCPU threads are pinned to the given CPUs, and `ps` lists their thread IDs.
#[test]
fn pinned_vcpus_are_listed_by_ps() {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let list = status
        .lines()
        .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
    let last = list.unwrap().trim().rsplit([',', '-']).next().unwrap().to_owned();
    let pin = format!("1={last}");
    let args = ["--cmdline", "loop", "--cpus", "2", "--pin", &pin];
    let Some(vm) = ConsoleVm::start(&args) else { return };
    vm.line_with("spinning");
    let text = vm.ps(&["--json"]);
    let info: serde_json::Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    let threads: Vec<u64> = info["threads"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t.as_u64().unwrap())
        .collect();
    assert_eq!(threads.len(), 2);
    for (vcpu, thread) in threads.iter().enumerate() {
        let dir = format!("/proc/{}/task/{thread}", vm.child.id());
        let name = std::fs::read_to_string(format!("{dir}/comm")).unwrap();
        assert_eq!(name.trim(), format!("vcpu{vcpu}"));
        let status = std::fs::read_to_string(format!("{dir}/status")).unwrap();
        let on = status
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"));
        if vcpu == 1 {
            assert_eq!(on.unwrap().trim(), last);
        }
    }
    assert!(vm.ps(&[]).contains(&threads[0].to_string()));
}

#[test]
fn invalid_pinning_and_memory_print_one_line() {
    if !has_kvm() {
        return;
    }
    for (args, parts) in [
        (&["--pin", "0=99999"][..], ["CPU 99999", "may run on"]),
        (&["--pin", "3=0"], ["vCPU 3 not found", "between 0 and 0"]),
        (&["--memory", "64T", "--prealloc"], ["64", "--memory"]),
    ] {
        let out = Command::new(PROGRAM).arg("run").args(args).output().unwrap();
        let line = String::from_utf8(out.stderr).unwrap();
        assert_eq!((out.status.code(), line.lines().count()), (Some(2), 1), "{line}");
        assert!(parts.iter().all(|part| line.contains(part)), "{line}");
    }
}

/// A VM whose process is stopped is listed as not responding, whereas a VM that has exited is not
/// listed. `ps` does not wait for the whole client timeout, and the VM runs normally after SIGCONT.
#[test]
fn stopped_vm_is_listed_as_not_responding() {
    let Some(mut vm) = ConsoleVm::start(&["--cmdline", "loop"]) else {
        return;
    };
    vm.line_with("spinning");
    signal(&vm, libc::SIGSTOP);
    let pid = vm.child.id();
    eventually("it is stopped", || {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        stat.contains(") T ")
    });
    let list = vm.operator(&["ps"]);
    let row = list.lines().find(|row| row.starts_with("machine"));
    assert!(row.is_some_and(|row| row.contains("not responding")), "{list}");
    let json = vm.operator(&["ps", "--json"]);
    assert_eq!(json, "{\"name\":\"machine\",\"state\":\"not_responding\"}\n");
    for command in [
        &["stat", "machine", "-d", "0.1"][..],
        &["ctl", "machine", "status"],
    ] {
        let out = vm.command(command).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        let why = format!("its process {pid} is stopped; resume it with `kill -CONT {pid}`");
        assert!(said.contains("does not respond") && said.contains(&why), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
        assert_ne!(out.status.code(), Some(0));
    }
    signal(&vm, libc::SIGCONT);
    let status = vm.operator(&["ctl", "machine", "status"]);
    assert!(status.starts_with("machine: running, 1 vCPU\n"), "{status}");
    vm.stop("machine");
}
