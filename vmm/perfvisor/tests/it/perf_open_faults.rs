//! Tests of a running VM while the host kernel rejects `perf_event_open(2)`, with each possible
//! errno. Operator requests are refused with one line, guest counters lose their host events, and
//! everything recovers afterwards.

use std::path::PathBuf;

use crate::common::operator::TestVm;
use crate::common::vm::{SpinningVm, eventually};
use control_api::client::Client;
use control_api::protocol::{EventReading, OpenedEvent, VmState};
use control_api::request;

/// Errors of `perf_event_open(2)`, and the expected messages.
const REFUSALS: [(i32, &str, &str); 7] = [
    (libc::EMFILE, "EMFILE", "open files"),
    (libc::EACCES, "EACCES", "set kernel.perf_event_paranoid"),
    (libc::ENOSPC, "ENOSPC", "no counter is available"),
    (libc::EBUSY, "EBUSY", "no counter is available"),
    (libc::EOPNOTSUPP, "EOPNOTSUPP", "refuses this event"),
    (libc::ENODEV, "ENODEV", "event not found"),
    (libc::EINTR, "EINTR", "Interrupted"),
];

/// A VM with fault injection, and the file that selects the injected error.
struct FaultyVm {
    vm: TestVm,
    file: PathBuf,
    _dir: tempfile::TempDir,
}

impl FaultyVm {
    /// Starts a VM. Returns `None` if KVM is unavailable, or for a release build, which has no
    /// fault injection.
    fn start(args: &[&str]) -> Option<Self> {
        if !cfg!(debug_assertions) {
            eprintln!("SKIP: a release has no faults for tests");
            return None;
        }
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("error");
        std::fs::write(&file, "").unwrap();
        let vm = SpinningVm::start_with("test", args, ("PERFVISOR_TEST_PERF_OPEN", &file))?;
        let vm = TestVm { vm, vcpus: 1 };
        Some(Self { vm, file, _dir: dir })
    }

    /// Makes `perf_event_open(2)` fail from now on, as specified by `what`: an errno, and
    /// optionally the calls that succeed.
    fn fail_with(&self, what: &str) {
        std::fs::write(&self.file, what).unwrap();
    }

    /// Returns how often the VM has logged that it begins to inject `error`, an errno.
    fn failed(&self, error: i32) -> usize {
        let line = format!("fail with error {error}");
        self.vm
            .vm
            .log_lines()
            .iter()
            .filter(|said| said.ends_with(&line))
            .count()
    }
}

/// Opens host events, with one descriptor each, or returns the reason they were refused.
fn open(client: &mut Client) -> Result<u32, String> {
    let opened: Vec<OpenedEvent> = client
        .call(request::Open {
            events: "page-faults".into(),
            ..Default::default()
        })
        .map_err(|e| e.to_string())?;
    match &opened[0].unsupported {
        Some(why) => Err(why.clone()),
        None => Ok(opened[0].handle.unwrap()),
    }
}

fn counts(client: &mut Client, handle: u32) -> bool {
    let readings: Vec<EventReading> = client.call(request::Read).unwrap();
    let reading = readings.iter().find(|reading| reading.handle == handle).unwrap();
    reading.running_ns > 0
}

#[test]
fn refused_operator_event_can_be_opened_later() {
    let Some(refused) = FaultyVm::start(&[]) else {
        return;
    };
    let vm = &refused.vm;
    let mut client = vm.client();
    let before = open(&mut client).unwrap();
    let () = client.call(request::Enable).unwrap();
    for (error, name, says) in REFUSALS {
        refused.fail_with(&error.to_string());
        let why = open(&mut client).expect_err(name);
        assert!(why.contains(says) && why.lines().count() == 1, "{name}: {why}");
        let out = vm.run(&["stat", "test", "-d", "0.05", "-e", "page-faults,task-clock"]);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert!(matches!(out.status.code(), Some(0..=2)), "{name}: {said}");
        assert!(!said.contains("panicked"), "{name}: {said}");
        assert_eq!(vm.ps()[0].state, VmState::Running, "{name}");
        eventually("what was open goes on", || counts(&mut client, before));
        refused.fail_with("");
        let again = open(&mut client).unwrap_or_else(|why| panic!("{name}: later too: {why}"));
        let () = client.call(request::Enable).unwrap();
        eventually("it counts", || counts(&mut client, again));
    }
}

/// A `perf_event_open(2)` that a signal interrupts is retried, because the kernel takes locks
/// interruptibly and a vCPU continuously receives signals.
#[test]
fn interrupted_open_is_retried() {
    let Some(refused) = FaultyVm::start(&[]) else {
        return;
    };
    let mut client = refused.vm.client();
    refused.fail_with(&format!("{} 3", libc::EINTR));
    for n in 0..20 {
        open(&mut client).unwrap_or_else(|why| panic!("event {n}: {why}"));
    }
    // The log line may arrive after the replies, because it uses another channel.
    eventually("the fault is said", || refused.failed(libc::EINTR) > 0);
    assert_eq!(refused.failed(libc::EINTR), 1);
}

/// The guest continues to run if its counters have no host events. It reprograms its counters
/// repeatedly, so that opening events fails at random times.
#[test]
fn guest_survives_counters_without_backing() {
    if !cfg!(debug_assertions) {
        return eprintln!("SKIP: a release has no faults for tests");
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("error");
    std::fs::write(&file, "").unwrap();
    for pmu in ["intel", "amd"] {
        let args = ["--cmdline", "hostile=7", "--pmu", pmu];
        let machine =
            crate::common::console_vm::ConsoleVm::start_with(&args, ("PERFVISOR_TEST_PERF_OPEN", &file));
        let Some(mut vm) = machine else { return };
        vm.new_line_with("hostile: round");
        for (error, name, _) in REFUSALS {
            let line = format!("fail with error {error}");
            // Every call fails, or every second call.
            for what in [format!("{error}"), format!("{error} 2")] {
                std::fs::write(&file, what).unwrap();
                eventually(name, || vm.log_lines().iter().any(|said| said.ends_with(&line)));
                vm.new_line_with("hostile: round");
                let seen: Vec<String> = vm.operator(&["ps"]).lines().map(Into::into).collect();
                assert_eq!(seen.len(), 2, "{name}: {seen:?}");
                vm.operator(&["stat", "machine", "--guest-view"]);
            }
            std::fs::write(&file, "").unwrap();
            vm.new_line_with("hostile: round");
        }
        assert_eq!(vm.count_log_lines("panicked"), 0, "{:?}", vm.log_lines());
        assert!(vm.log_lines().len() < 100, "{:?}", vm.log_lines());
        vm.stop("machine");
    }
}
