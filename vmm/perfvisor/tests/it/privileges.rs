//! Privileges of a running VM: capabilities of the process and its threads, and access by other
//! processes.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::console_vm::ConsoleVm;
use crate::common::unprivileged::UnprivilegedUser;
use crate::common::vm::{PROGRAM, SpinningVm, assert_contains, children, eventually};
use control_api::client::Client;
use control_api::protocol::{EventReading, KernelState, OpenedEvent};
use control_api::request;
use test_support::skip::skipped;

/// `CAP_PERFMON` (capabilities(7)).
const PERFMON: u64 = 1 << 38;

/// Returns a field of `/proc/PID/status`.
fn field(status: &str, name: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix(name));
    let value = line.unwrap_or_else(|| panic!("no {name} in {status}"));
    let value = value.trim_start_matches(':').trim();
    u64::from_str_radix(value, 16).unwrap()
}

#[test]
fn vm_threads_have_no_capability() {
    let Some(vm) = SpinningVm::start("rights", &["--cpus", "2"]) else {
        return;
    };
    let tasks = format!("/proc/{}/task", vm.child.id());
    let mut seen = Vec::new();
    for task in fs::read_dir(tasks).unwrap() {
        let task = task.unwrap().path();
        let name = fs::read_to_string(task.join("comm")).unwrap().trim().to_owned();
        // Skip the threads of KVM, which are kernel threads.
        if name.starts_with("kvm-") {
            continue;
        }
        let status = fs::read_to_string(task.join("status")).unwrap();
        for set in ["CapPrm", "CapEff"] {
            assert_eq!(field(&status, set), 0, "{set} of {name}");
        }
        assert_eq!(field(&status, "CapInh"), 0, "{name}");
        assert_eq!(field(&status, "CapAmb"), 0, "{name}");
        assert_eq!(field(&status, "NoNewPrivs"), 1, "{name}");
        // 2 is SECCOMP_MODE_FILTER.
        assert_eq!(field(&status, "Seccomp"), 2, "{name}");
        seen.push(name);
    }
    for name in ["perfvisor", "signals", "console", "starter", "vcpu0", "vcpu1"] {
        assert!(seen.iter().any(|seen| seen == name), "no {name} among {seen:?}");
    }
}

/// Returns the process ID of the helper process `comm` of VM `pid`.
fn service_process(pid: u32, comm: &str) -> u32 {
    let children = children(pid);
    let mut found = children.iter().filter(|(_, name)| name == comm);
    match (found.next(), found.next()) {
        (Some((number, _)), None) => *number,
        _ => panic!("{comm}: {children:?}"),
    }
}

/// The perf event broker has only the capability to count events and one socket, and exits with the
/// VM.
#[test]
fn perf_broker_has_one_capability_and_ends_with_vm() {
    let own = fs::read_to_string("/proc/self/status").unwrap();
    let cases: [(&str, &[&str], u64); 3] = [
        ("broker", &[], 2),
        ("broker-off", &["--seccomp", "off", "--landlock", "off"], 0),
        ("broker-jail", &["--jail", "uid=1500"], 2),
    ];
    for (name, args, filters) in cases {
        let Some(mut vm) = SpinningVm::start(name, args) else {
            return;
        };
        let broker = service_process(vm.pid(), "perf-broker");
        let status = fs::read_to_string(format!("/proc/{broker}/status")).unwrap();
        for set in ["CapPrm", "CapEff"] {
            let has = field(&own, "CapEff") & PERFMON;
            assert_eq!(field(&status, set), has, "{set}: {status}");
        }
        for set in ["CapInh", "CapAmb"] {
            assert_eq!(field(&status, set), 0, "{set}: {status}");
        }
        assert_eq!(field(&status, "NoNewPrivs"), 1);
        assert_eq!(field(&status, "Seccomp"), filters);
        assert_eq!(field(&status, "Threads"), 1);
        let fds = fs::read_dir(format!("/proc/{broker}/fd")).unwrap().flatten();
        let leads = fds.map(|fd| fs::read_link(fd.path()).unwrap().display().to_string());
        let leads: Vec<String> = leads.filter(|to| !to.starts_with("pipe:")).collect();
        assert!(leads.len() == 1 && leads[0].starts_with("socket:"), "{leads:?}");
        vm.child.kill().unwrap();
        vm.child.wait().unwrap();
        let there = || {
            let status = fs::read_to_string(format!("/proc/{broker}/status"));
            status.is_ok_and(|status| status.contains("perf-broker") && !status.contains("State:\tZ"))
        };
        eventually("it is gone", || !there());
    }
}

/// A VM whose perf event broker is killed keeps its open counters, logs one line and refuses new
/// counters.
#[test]
fn killed_perf_broker_is_reported_once() {
    let Some(vm) = SpinningVm::start("brokerless", &[]) else {
        return;
    };
    let sockets = vm.runtime.path().join("perfvisor");
    let mut client = Client::connect_in(&sockets, Some("brokerless")).unwrap();
    let open = |client: &mut Client| -> Result<Vec<OpenedEvent>, _> {
        client.call(request::Open {
            events: "page-faults".into(),
            ..Default::default()
        })
    };
    let before = open(&mut client).unwrap()[0].handle.expect("a counter");
    let () = client.call(request::Enable).unwrap();
    let broker = service_process(vm.pid(), "perf-broker");
    let killed = Command::new("kill").args(["-9", &broker.to_string()]).status();
    assert!(killed.unwrap().success());
    let running_ns = |client: &mut Client| {
        let readings: Vec<EventReading> = client.call(request::Read).unwrap();
        let reading = readings.iter().find(|reading| reading.handle == before);
        reading.unwrap().running_ns
    };
    for _ in 0..2 {
        let refused = open(&mut client).expect_err("no broker").to_string();
        assert_contains(&refused, "the process that opens perf events has ended");
        let then = running_ns(&mut client);
        eventually("what was open goes on", || running_ns(&mut client) > then);
    }
    let told = || {
        vm.log_lines()
            .iter()
            .filter(|line| line.contains("(perf-broker) has exited"))
            .count()
    };
    eventually("it says so", || told() > 0);
    assert_eq!(told(), 1, "{:?}", vm.log_lines());
}

/// The helper processes that start kernel readers and connect to sockets have no capability, no
/// file and no access to the VM's descriptors. The helper processes exit with the VM, even if the
/// VM is killed.
#[test]
fn reader_supervisor_has_no_privileges_and_ends_with_vm() {
    let cases: [(&str, &[&str], u64); 3] = [
        ("kept", &[], 2),
        ("kept-off", &["--seccomp", "off", "--landlock", "off"], 0),
        ("kept-log", &["--seccomp", "log"], 2),
    ];
    for (name, args, filters) in cases {
        let Some(mut vm) = SpinningVm::start(name, args) else {
            return;
        };
        let children = children(vm.child.id());
        let helpers = ["worker-keeper", "socket-broker"].map(|comm| {
            let found = children.iter().find(|(_, name)| name == comm);
            (comm, found.unwrap_or_else(|| panic!("no {comm}: {children:?}")).0)
        });
        for (comm, helper) in helpers {
            has_no_rights(comm, helper, filters);
        }
        vm.child.kill().unwrap();
        vm.child.wait().unwrap();
        for (comm, helper) in helpers {
            let there = || {
                let status = fs::read_to_string(format!("/proc/{helper}/status"));
                status.is_ok_and(|status| status.contains(comm) && !status.contains("State:\tZ"))
            };
            eventually("it is gone", || !there());
        }
    }
}

/// Checks that the helper process has no capability and only one socket as a descriptor. The socket
/// broker may also hold directories.
fn has_no_rights(comm: &str, helper: u32, filters: u64) {
    let status = fs::read_to_string(format!("/proc/{helper}/status")).unwrap();
    for set in ["CapPrm", "CapEff", "CapInh", "CapAmb"] {
        assert_eq!(field(&status, set), 0, "{set}: {status}");
    }
    assert_eq!(field(&status, "NoNewPrivs"), 1);
    assert_eq!(field(&status, "Seccomp"), filters);
    assert_eq!(field(&status, "Threads"), 1);
    let fds = fs::read_dir(format!("/proc/{helper}/fd")).unwrap().flatten();
    let leads = fds.map(|fd| fs::read_link(fd.path()).unwrap());
    // The supervisor holds its oom_score_adj open, so that the kernel kills readers before the VM
    // when memory is short.
    let turn = format!("/proc/{helper}/oom_score_adj");
    let leads: Vec<String> = leads
        .filter(|to| comm != "socket-broker" || !to.is_dir())
        .map(|to| to.display().to_string())
        .filter(|to| !to.starts_with("pipe:") && *to != turn)
        .collect();
    assert!(
        leads.len() == 1 && leads[0].starts_with("socket:"),
        "{comm}: {leads:?}"
    );
}

/// A kernel that is entered through PVH and halts. `record` searches it for symbols, which it does
/// not do for the built-in guest. The file is a fuzz seed with one leading byte.
const HALTS: &[u8] = include_bytes!("../../../fuzz/seeds/boot/pvh");

/// A running VM cannot restart the supervisor of its kernel readers. The VM continues, logs one
/// line, and reports the reason to clients.
#[test]
fn killed_reader_supervisor_is_reported_once() {
    let dir = tempfile::tempdir().unwrap();
    let kernel = dir.path().join("kernel");
    fs::write(&kernel, &HALTS[1..]).unwrap();
    let Some(vm) = ConsoleVm::start(&["--kernel", kernel.to_str().unwrap()]) else {
        return;
    };
    let sockets = vm.runtime.path().join("perfvisor");
    let connect = || Client::connect_in(&sockets, Some("machine"));
    eventually("it runs", || connect().is_ok());
    let children = children(vm.child.id());
    let keeper = children.iter().find(|(_, name)| name == "worker-keeper");
    let keeper = keeper.expect("it has a keeper").0;
    let killed = Command::new("kill").args(["-9", &keeper.to_string()]).status();
    assert!(killed.unwrap().success());
    let mut client = connect().unwrap();
    let lost = "is no longer read";
    for _ in 0..2 {
        eventually("it says so", || {
            let info = client.call(request::Kernel).unwrap();
            info.state == KernelState::NotFound && info.detail.contains(lost)
        });
    }
    let told = || vm.log_lines().iter().filter(|line| line.contains(lost)).count();
    eventually("it warns", || told() > 0);
    assert_eq!(told(), 1, "{:?}", vm.log_lines());
}

/// `--seccomp off` installs no filters and changes no thread.
#[test]
fn seccomp_off_installs_no_filters() {
    let Some(vm) = SpinningVm::start("unfiltered", &["--seccomp", "off"]) else {
        return;
    };
    let status = fs::read_to_string(format!("/proc/{}/status", vm.child.id())).unwrap();
    assert_eq!(field(&status, "Seccomp"), 0);
    assert_eq!(field(&status, "NoNewPrivs"), 1);
}

/// Returns whether the host lets only privileged users count.
fn denies_unprivileged_counting() -> bool {
    let paranoid = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").unwrap_or_default();
    paranoid.trim().parse::<i32>().is_ok_and(|paranoid| paranoid > 1)
}

/// A user without privileges can start the default guest, whose events are estimated from CPU time
/// (`--backing clock`), and `stat` counts the events that need no privilege.
#[test]
fn vm_without_right_to_count_starts_with_what_is_allowed() {
    let rights = &["--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all"];
    let Some(nobody) = UnprivilegedUser::with(rights, &["true"]) else {
        return;
    };
    if !denies_unprivileged_counting() {
        skipped("this host lets every user count", false);
        return;
    }
    let plain = nobody.perfvisor(&["run"]).output().unwrap();
    let (out, err) = (
        String::from_utf8_lossy(&plain.stdout),
        String::from_utf8_lossy(&plain.stderr),
    );
    // A busy host may make a check of the guest fail (status 3).
    assert!(matches!(plain.status.code(), Some(0 | 3)), "{out}{err}");
    assert!(
        err.contains("set it to 1 or less") && err.lines().count() == 1,
        "{err}"
    );
    assert_contains(&out, "PMIs");
    assert!(!out.contains("no cycles were counted"), "{out}");

    let mut vm = nobody
        .perfvisor(&["run", "--name", "plain", "--memory", "32M", "--cmdline", "loop"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let events = "kvm:exits,task-clock,cycles";
    let mut counted = String::new();
    eventually("stat counts what it may", || {
        let args = ["stat", "plain", "-x,", "-d", "0.2", "-e", events];
        let out = nobody.perfvisor(&args).output().unwrap();
        counted = String::from_utf8_lossy(&out.stdout).into_owned();
        out.status.success()
    });
    let line = |event: &str| {
        counted
            .lines()
            .find(|line| line.contains(event))
            .unwrap_or_default()
    };
    assert!(line("task-clock").starts_with("<not supported>"), "{counted}");
    for event in ["kvm:exits", "cycles"] {
        assert!(
            line(event).starts_with(|c: char| c.is_ascii_digit()),
            "{event}: {counted}"
        );
    }
    assert!(
        nobody
            .perfvisor(&["ctl", "plain", "stop"])
            .output()
            .unwrap()
            .status
            .success()
    );
    vm.wait().unwrap();
}

#[test]
fn unprivileged_vm_protects_its_memory() {
    let rights = &["--inh-caps", "+perfmon", "--ambient-caps", "+perfmon"];
    let Some(nobody) = UnprivilegedUser::with(rights, &["true"]) else {
        return;
    };

    let mut vm = nobody
        .perfvisor(&["run", "--name", "no-root", "--memory", "32M", "--cmdline", "loop"])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The operator is root, who may use the socket in addition to its owner.
    let operator = |args: &[&str]| {
        Command::new(PROGRAM)
            .args(args)
            .env("XDG_RUNTIME_DIR", nobody.dir())
            .output()
            .unwrap()
    };
    // The socket exists before the guest runs and produces counts.
    let counts = || {
        let out = operator(&["stat", "no-root", "-x,", "-e", "cycles", "-d", "0.2"]);
        let text = String::from_utf8_lossy(&out.stdout);
        let count = text.split(',').next().unwrap_or_default();
        out.status.success() && count.parse::<u64>().is_ok_and(|count| count > 0)
    };
    while !counts() {
        if let Some(status) = vm.try_wait().unwrap() {
            let said = std::io::read_to_string(vm.stderr.take().unwrap()).unwrap();
            panic!("the VM ended with {status}: {said}");
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let proc = format!("/proc/{}", vm.id());
    let status = fs::read_to_string(format!("{proc}/status")).unwrap();
    assert!(status.contains("Uid:\t65534\t65534\t65534\t65534"), "{status}");
    assert_eq!(field(&status, "CapEff"), 0);
    assert_eq!(field(&status, "CapAmb"), 0);
    // The broker has the capability that the user granted.
    let broker = service_process(vm.id(), "perf-broker");
    let status = fs::read_to_string(format!("/proc/{broker}/status")).unwrap();
    assert_eq!(field(&status, "CapEff"), PERFMON);
    // The kernel assigns the /proc files of a non-dumpable process to root (proc(5)).
    assert_eq!(
        fs::metadata(format!("{proc}/mem")).unwrap().uid(),
        0,
        "the process is dumpable"
    );
    let stopped = operator(&["ctl", "no-root", "stop"]);
    assert!(
        stopped.status.success(),
        "{}",
        String::from_utf8_lossy(&stopped.stderr)
    );
    vm.wait().unwrap();
}
