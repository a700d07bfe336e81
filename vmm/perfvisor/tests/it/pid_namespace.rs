//! A jailed VM in its PID namespace, as seen from outside. The started process represents the VM,
//! and IDs shown to operators are valid on the host.
#![expect(unsafe_code, reason = "sends signals")]

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::common::console_vm::ConsoleVm;
use crate::common::process::is_root;
use crate::common::pty::shell_on_terminal;
use crate::common::test_lock;
use crate::common::vm::{
    PROGRAM, SpinningVm, VmProcess, children, eventually, has_kvm, ps_until_all_answer, run_and_read_stderr,
};

fn send(pid: u32, signal: libc::c_int) {
    // SAFETY: the process is the supervisor, which has not been waited for, or its child.
    assert_eq!(unsafe { libc::kill(pid.cast_signed(), signal) }, 0);
}

/// Returns the state of a process in the notation of proc_pid_stat(5), or `None` if the process
/// does not exist.
fn state(pid: u32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

fn is_gone(pid: u32) -> bool {
    state(pid).is_none_or(|state| state == 'Z')
}

/// Signals to the started process, to the VM's process, or to both press the power button once. A
/// second signal would terminate the VM with status 10.
#[test]
fn stop_signals_reach_jailed_vm_once() {
    if !is_root() {
        return;
    }
    for (to_started, to_vm) in [(true, false), (false, true), (true, true)] {
        let Some(mut vm) = ConsoleVm::start(&["--cmdline", "button", "--jail"]) else {
            return;
        };
        vm.line_with("waiting for the button");
        let (started, pid) = (vm.child.id(), vm.pid());
        assert_ne!(started, pid);
        if to_vm {
            send(pid, libc::SIGTERM);
        }
        if to_started {
            send(started, libc::SIGTERM);
        }
        assert_eq!(vm.line_with("pressed"), "the button was pressed; status 0");
        assert_eq!(vm.status(), Some(0), "{:?}", vm.log_lines());
    }
}

/// The started process of a jailed VM exits with the status of the VM, after a signal, an exit of
/// the guest, or an error at startup.
#[test]
fn jailed_vm_ends_with_status_of_its_process() {
    if !is_root() || !has_kvm() {
        return;
    }
    let Some(mut vm) = SpinningVm::start("stopped", &["--jail"]) else {
        return;
    };
    send(vm.child.id(), libc::SIGINT);
    assert_eq!(vm.wait(), Some(10), "{:?}", vm.log_lines());
    for (args, status) in [
        (&["--cmdline", "reset=cf9"][..], 4),
        (&["--kernel", "/nonexistent"], 2),
    ] {
        let mut run = Command::new(PROGRAM);
        run.args(["run", "--memory", "32M", "--jail", "uid=1500"])
            .args(args);
        let (code, text) = run_and_read_stderr(&mut run);
        assert_eq!(code, Some(status), "{args:?}: {text}");
    }
}

/// If the process of a jailed VM exits for any reason, its supervisor also exits, and vice versa.
/// The sockets are removed.
#[test]
fn jailed_vm_and_supervisor_end_together() {
    if !is_root() {
        return;
    }
    for (kills_started, options) in [
        (true, &["--jail"][..]),
        (true, &["--jail", "uid=1500"]),
        (false, &["--jail", "uid=1500"]),
        (true, &["--jail", "--seccomp", "off", "--landlock", "off"]),
    ] {
        let Some(mut vm) = SpinningVm::start("bound", options) else {
            return;
        };
        let (started, pid) = (vm.child.id(), vm.pid());
        let processes: Vec<u32> = [started, pid]
            .into_iter()
            .flat_map(children)
            .map(|(child, _)| child)
            .collect();
        assert_eq!(processes.len(), 4, "VM, keeper and brokers: {processes:?}");
        send(if kills_started { started } else { pid }, libc::SIGKILL);
        let status = vm.child.wait().unwrap();
        assert_eq!(status.signal(), Some(libc::SIGKILL), "{status}");
        eventually("all processes end", || processes.iter().all(|pid| is_gone(*pid)));
        let socket = vm.runtime.path().join("perfvisor/bound.sock");
        eventually("its socket is removed", || !socket.exists());
    }
}

/// The supervisor keeps no privilege, file or connection of the VM.
#[test]
fn supervisor_is_confined() {
    if !is_root() {
        return;
    }
    let Some(vm) = SpinningVm::start("confined", &["--jail", "uid=1500"]) else {
        return;
    };
    let pid = vm.child.id();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    for line in [
        "Name:\tvm-supervisor\n",
        "Uid:\t1500\t1500\t1500\t1500\n",
        "CapPrm:\t0000000000000000\n",
        "CapEff:\t0000000000000000\n",
        "NoNewPrivs:\t1\n",
        "Seccomp:\t2\n",
        "Threads:\t1\n",
    ] {
        assert!(status.contains(line), "{line}: {status}");
    }
    let files = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let targets = files.map(|file| fs::read_link(file.path()).unwrap());
    let mut kinds: Vec<String> = targets
        .map(|to| to.display().to_string().split(':').next().unwrap().to_owned())
        .collect();
    kinds.sort();
    assert_eq!(kinds, ["anon_inode", "pipe", "pipe", "pipe", "socket"]);
}

/// `ps` shows the IDs that the VM's process and threads have on the host, and the default name
/// contains the ID of the started process.
#[test]
fn jailed_vm_has_host_ids_for_operators() {
    if !is_root() {
        return;
    }
    let options = ["--jail", "--cpus", "2"];
    let Some(vm) = SpinningVm::start("shown", &options) else {
        return;
    };
    let text = ps_until_all_answer(|| run_and_read_stderr(&mut vm.operator(&["ps", "--json"])).1);
    let info: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    assert_eq!(info["pid"].as_u64(), Some(vm.pid().into()), "{text}");
    let threads = info["threads"].as_array().unwrap();
    assert_eq!(threads.len(), 2);
    for (vcpu, thread) in threads.iter().enumerate() {
        let name = fs::read_to_string(format!("/proc/{}/task/{thread}/comm", vm.pid())).unwrap();
        assert_eq!(name.trim(), format!("vcpu{vcpu}"));
    }
    // Stolen time is read from the thread's file in /proc, found by its host ID.
    vm.assert_counted_and_sampled("shown", "cycles,task-clock,steal-ns");
}

#[test]
fn jailed_vm_without_name_is_named_after_started_process() {
    if !is_root() || !has_kvm() {
        return;
    }
    let _lock = test_lock::shared();
    let runtime = tempfile::tempdir().unwrap();
    let mut child = Command::new(PROGRAM)
        .args(["run", "--memory", "32M", "--cmdline", "loop", "--jail"])
        .env("XDG_RUNTIME_DIR", runtime.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let socket = runtime.path().join(format!("perfvisor/vm-{}.sock", child.id()));
    eventually("it has its name", || {
        socket.exists() || child.try_wait().unwrap().is_some()
    });
    assert!(socket.exists());
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Runs `perfvisor run` with `args` as a foreground job of a new session on a terminal.
fn job_on_terminal(runtime: &Path, args: &str) -> (std::process::Child, File) {
    let script = format!("{PROGRAM} run --memory 32M {args}; echo status=$?; read -r line; echo got=$line");
    shell_on_terminal(&script, runtime)
}

/// Reads from the terminal until `part` has appeared.
fn read_until(terminal: &mut File, part: &str) {
    let mut text = String::new();
    let mut bytes = [0; 512];
    while !text.contains(part) {
        let count = terminal.read(&mut bytes).unwrap_or(0);
        assert!(count > 0, "no {part:?}: {text}");
        text += &String::from_utf8_lossy(&bytes[..count]);
    }
}

/// The VM's own process group is the terminal's foreground group while the VM runs, and the shell's
/// process group is restored afterwards.
#[test]
fn jailed_vm_reads_terminal() {
    if !is_root() || !has_kvm() {
        return;
    }
    let _lock = test_lock::shared();
    let runtime = tempfile::tempdir().unwrap();
    let (mut shell, mut terminal) = job_on_terminal(runtime.path(), "--cmdline loop --jail");
    read_until(&mut terminal, "spinning");
    // Ctrl-A x terminates the VM.
    terminal.write_all(b"\x01x").unwrap();
    read_until(&mut terminal, "status=0");
    terminal.write_all(b"word\n").unwrap();
    read_until(&mut terminal, "got=word");
    assert!(shell.wait().unwrap().success());
}

/// If the shell stops or continues the job of a jailed VM, the VM stops or continues with it.
#[test]
fn jailed_vm_stops_and_continues_with_its_job() {
    if !is_root() || !has_kvm() {
        return;
    }
    let mut program = Command::new(PROGRAM);
    // Otherwise the process group may be orphaned, and the kernel ignores the signal in orphaned
    // groups.
    program.process_group(0);
    let Some(vm) = SpinningVm::start_by(program, "job", &["--jail"]) else {
        return;
    };
    let both = [vm.child.id(), vm.pid()];
    send(vm.child.id(), libc::SIGTSTP);
    eventually("both stop", || both.iter().all(|pid| state(*pid) == Some('T')));
    send(vm.child.id(), libc::SIGCONT);
    eventually("it runs again", || {
        run_and_read_stderr(&mut vm.operator(&["ctl", "job", "status"])).0 == Some(0)
    });
}

/// With `--jail` and `--daemonize`, the VM terminates when its supervising daemon receives a stop
/// signal.
#[test]
fn jailed_daemon_stops_by_signal() {
    if !is_root() || !has_kvm() {
        return;
    }
    let args = ["--jail", "--daemonize", "--cmdline", "loop", "--console", "none"];
    let Some(mut vm) = VmProcess::spawn(Command::new(PROGRAM), "daemon", &args, Stdio::null()) else {
        return;
    };
    assert_eq!(vm.wait(), Some(0), "{:?}", vm.log_lines());
    let text = ps_until_all_answer(|| run_and_read_stderr(&mut vm.command(&["ps", "--json"])).1);
    let info: Value = serde_json::from_str(text.lines().next().unwrap()).unwrap();
    let pid = u32::try_from(info["pid"].as_u64().unwrap()).unwrap();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let daemon = status.lines().find_map(|line| line.strip_prefix("PPid:"));
    let daemon: u32 = daemon.unwrap().trim().parse().unwrap();
    send(daemon, libc::SIGINT);
    eventually("both end", || is_gone(pid) && is_gone(daemon));
    assert!(!vm.runtime.path().join("perfvisor/daemon.sock").exists());
}
