//! Tests with misbehaving VMs, which are simulated by shell scripts.

use std::os::unix::net::UnixStream;

use control_api::protocol::{
    Call, GuestCounter, ReplyLine, RequestError, RequestErrorKind, RequestLine, VmInfo,
};
use serde_json::{Value, json};

use super::*;

/// Returns a signal check that never requests a stop.
pub(crate) fn never_stop() -> StopRequestedCheck {
    Arc::new(|| false)
}

/// Starts a VM simulated by the shell script `script`. `$0` and the parameters are the arguments of
/// `perfvisor`.
pub(crate) fn scripted(script: &str) -> ChildVm {
    scripted_until(script, &never_stop())
}

fn scripted_until(script: &str, signals: &StopRequestedCheck) -> ChildVm {
    let mut shell = Command::new("/bin/sh");
    shell.args(["-c", script]);
    ChildVm::start_with(shell, &["--pmu".into(), "intel".into()], signals).unwrap()
}

impl ChildVm {
    /// Starts a simulated VM with a control socket. `answer` handles the requests.
    pub(crate) fn answered(
        mut self,
        mut answer: impl FnMut(Call) -> Result<Value, RequestError> + Send + 'static,
    ) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        thread::spawn(move || {
            for line in BufReader::new(&theirs).lines() {
                let RequestLine { id, call } = serde_json::from_str(&line.unwrap()).unwrap();
                let answered = match call {
                    Call::Hello { .. } => Ok(serde_json::to_value(VmInfo::default()).unwrap()),
                    call => answer(call),
                };
                let (ok, error) = match answered {
                    Ok(ok) => (Some(ok), None),
                    Err(failure) => (None, Some(failure)),
                };
                let mut line = serde_json::to_vec(&ReplyLine { id, ok, error }).unwrap();
                line.push(b'\n');
                if (&theirs).write_all(&line).is_err() {
                    return;
                }
            }
        });
        self.client = Some(Client::from_stream(ours).unwrap());
        self
    }
}

/// Returns the reply to a counter view request, with the values of the counters `gp0`, `gp1`... of
/// each vCPU.
pub(crate) fn views(vcpus: &[Vec<u64>]) -> Value {
    let counter = |(n, value): (usize, &u64)| GuestCounter {
        counter: format!("gp{n}"),
        backing: Some("clock".into()),
        value: *value,
        enabled_ns: Some(1000),
        running_ns: Some(1000),
        overflows: Some(0),
        ..GuestCounter::default()
    };
    let view = |(vcpu, values): (usize, &Vec<u64>)| VcpuView {
        vcpu: u32::try_from(vcpu).unwrap(),
        counters: values.iter().enumerate().map(counter).collect(),
        ..VcpuView::default()
    };
    let vcpus: Vec<VcpuView> = vcpus.iter().enumerate().map(view).collect();
    serde_json::to_value(VmGuestCounters {
        complete: true,
        vcpus,
    })
    .unwrap()
}

/// Returns an error like that with which a VM refuses a request under the strict sharing policy.
pub(crate) fn refusal(message: &str) -> RequestError {
    RequestError {
        kind: RequestErrorKind::Limit,
        message: message.into(),
    }
}

const LONG: Duration = Duration::from_secs(60);

/// An endless line is split and does not exhaust memory.
#[test]
fn long_console_line_is_split() {
    let (sender, lines) = sync_channel(8);
    let mut text = vec![b'x'; 2 * MAX_LINE as usize + 3];
    text.extend(b"\nlast\r\n");
    read_lines(text.as_slice(), &sender);
    drop(sender);
    let lengths: Vec<usize> = lines.iter().map(|line| line.len()).collect();
    assert_eq!(lengths, [MAX_LINE as usize, MAX_LINE as usize, 3, 4]);
}

/// The thread that reads a VM's console ends when the receiver of the lines is dropped.
#[test]
fn reader_ends_when_receiver_is_dropped() {
    let (sender, lines) = sync_channel(8);
    drop(lines);
    read_lines(std::io::repeat(b'\n'), &sender);
}

/// Only a limited number of the last messages of a VM is kept.
#[test]
fn last_messages_are_kept() {
    let kept = Mutex::new(VecDeque::new());
    let text: String = (0..MAX_MESSAGES + 7).map(|n| format!("message {n}\n")).collect();
    keep_messages(text.as_bytes(), &kept);
    let kept = kept.into_inner().unwrap();
    assert_eq!(kept.len(), MAX_MESSAGES);
    assert_eq!(kept.front().map(String::as_str), Some("message 7"));
}

/// The error for a VM that has ended shows the VM's last message without the program name, and the
/// guest's last lines.
#[test]
fn end_error_shows_last_messages_and_lines() {
    let ended = VmMeasurementError::Ended {
        status: 2,
        doing: "it was started".into(),
        messages: vec!["perfvisor: warn: x".into(), "perfvisor: error: no KVM".into()],
        console: vec!["booting".into()],
    };
    assert_eq!(
        ended.to_string(),
        "the VM exited while it was started (status 2): no KVM\nthe guest's last lines:\n  booting"
    );
}

/// The VM is started with `run`, a unique name and the given arguments.
#[test]
fn each_vm_has_unique_name() {
    let mut told = [0, 1].map(|_| {
        let mut vm = scripted("echo $0 $*");
        let line = vm
            .wait_for(LONG, "started", |line| Some(line.to_owned()))
            .unwrap();
        assert_eq!(line, format!("run --name {} --pmu intel", vm.name));
        line
    });
    told.sort();
    assert_ne!(told[0], told[1]);
}

/// The error for an early exit of the VM shows the exit status, the last message and the last
/// console lines.
#[test]
fn early_end_error_shows_reason() {
    let mut vm = scripted("echo booting; echo 'perfvisor: error: no /dev/kvm' >&2; exit 2");
    // The messages are not checked, because another thread reads them and may not have finished.
    let error = vm.wait_for(LONG, "it was booted", |_| None::<()>).unwrap_err();
    let VmMeasurementError::Ended {
        status,
        doing,
        console,
        ..
    } = error
    else {
        panic!("{error}");
    };
    assert_eq!(
        (status, doing.as_str(), console),
        (2, "it was booted", vec!["booting".to_owned()])
    );
}

/// A killed VM has no exit status and counts as failed.
#[test]
fn killed_vm_is_not_successful() {
    let mut vm = scripted("kill -9 $$");
    assert_eq!(vm.wait(LONG), Some(-1));
    let vm = scripted("read line; kill -9 $$");
    let error = vm.end(LONG).unwrap_err();
    assert!(
        matches!(error, VmMeasurementError::Ended { status: -1, .. }),
        "{error}"
    );
}

/// [`ChildVm::end`] returns an error for any exit status of the VM other than 0.
#[test]
fn nonzero_exit_status_is_error() {
    let ends = |status: u32| {
        scripted(&format!(
            "read line; [ \"$line\" = end ] && exit {status}; exit 9"
        ))
        .end(LONG)
    };
    ends(0).unwrap();
    let error = ends(3).unwrap_err();
    assert!(
        matches!(error, VmMeasurementError::Ended { status: 3, .. }),
        "{error}"
    );
}

/// A VM that does not exit in time is killed and reported as an error.
#[test]
fn vm_is_killed_after_end_timeout() {
    let vm = scripted("read line; echo staying; exec sleep 600");
    let pid = vm.child.id();
    let error = vm.end(Duration::from_millis(50)).unwrap_err();
    assert!(
        matches!(error, VmMeasurementError::Silent(_, ref doing) if doing == "it was told to end"),
        "{error}"
    );
    assert!(
        !std::path::Path::new(&format!("/proc/{pid}")).exists(),
        "it still runs, or nobody waited for it"
    );
}

/// The error of a timeout names the operation.
#[test]
fn silent_guest_times_out() {
    let mut vm = scripted("echo one; exec sleep 600");
    let error = vm.wait_for(Duration::from_millis(300), "it was to say two", |line| {
        (line == "two").then_some(())
    });
    let Err(VmMeasurementError::Silent(_, doing)) = error else {
        panic!("{error:?}");
    };
    assert_eq!(doing, "it was to say two");
}

/// Ctrl-C ends the wait, even if the same Ctrl-C has terminated the VM.
#[test]
fn interrupt_is_not_a_vm_error() {
    let stop: StopRequestedCheck = Arc::new(|| true);
    let mut vm = scripted_until("exec sleep 600", &stop);
    let error = vm.wait_for(LONG, "it was booted", |_| None::<()>).unwrap_err();
    assert!(matches!(error, VmMeasurementError::Interrupted), "{error}");
    let mut vm = scripted_until("exit 1", &stop);
    let error = vm.ended("it was booted");
    assert!(matches!(error, VmMeasurementError::Interrupted), "{error}");
}

/// Typing to a VM that has exited returns the error for its exit and not EPIPE.
#[test]
fn typing_to_ended_vm_reports_end() {
    let mut vm = scripted("exit 4");
    assert_eq!(vm.wait(LONG), Some(4));
    // Retry, because a process that another test has just forked keeps the pipe open until it calls
    // execve(2).
    let error = loop {
        match vm.type_line("measure") {
            Ok(()) => thread::sleep(Duration::from_millis(1)),
            Err(error) => break error,
        }
    };
    assert!(
        matches!(error, VmMeasurementError::Ended { status: 4, .. }),
        "{error}"
    );
}

/// The error shows only the last console lines of a guest, truncated.
#[test]
fn end_error_truncates_console_lines() {
    let mut vm = scripted("for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do printf \"$i%0999d\\n\" 0; done");
    let error = vm.wait_for(LONG, "it was booted", |_| None::<()>).unwrap_err();
    let VmMeasurementError::Ended { console, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(console.len(), MAX_LAST_LINES);
    assert!(console.iter().all(|line| line.chars().count() == MAX_SHOWN));
    assert!(
        console[0].starts_with("40") && console[11].starts_with("150"),
        "{console:?}"
    );
}

/// The accounting data is that of the vCPU threads, simulated here by a script whose process has
/// the name of a vCPU thread.
#[test]
fn facts_are_of_vcpu_threads() {
    let mut vm = scripted("printf vcpu0 >/proc/$$/comm; echo named; exec <&-; while :; do :; done");
    vm.wait_for(LONG, "it was named", |line| (line == "named").then_some(()))
        .unwrap();
    let before = vm.facts().unwrap();
    let grown = loop {
        let grown = vm.facts().unwrap()[0] - before[0];
        if grown.cpu_ns > 1_000_000 {
            break grown;
        }
        thread::sleep(Duration::from_millis(1));
    };
    assert_eq!(before.len(), 1);
    assert_eq!(grown.migrations.is_some(), before[0].migrations.is_some());
}

/// A thread that has exited causes an error instead of zeros.
#[test]
fn thread_that_has_gone_has_no_facts() {
    let mut vm = scripted("exit 0");
    vm.threads = vec![vm.child.id()];
    assert_eq!(vm.wait(LONG), Some(0));
    let error = vm.facts().unwrap_err();
    assert!(
        matches!(error, VmMeasurementError::Io("reading /proc", _)),
        "{error}"
    );
}

/// The host's view of the counters is requested once and polled until it is complete. vCPUs are
/// returned in numeric order.
#[test]
fn views_are_complete_and_ordered() {
    let mut asked = Vec::new();
    let mut vm = scripted("exec sleep 600").answered(move |call| {
        asked.push(call.clone());
        Ok(match call {
            Call::GuestView => json!({ "generation": 7 }),
            Call::GuestViewResult { generation: 7 } if asked.len() < 4 => {
                json!({ "complete": false, "vcpus": [{ "vcpu": 1, "pmis": 0, "counters": [] }] })
            }
            Call::GuestViewResult { generation: 7 } => json!({ "complete": true, "vcpus": [
                { "vcpu": 1, "pmis": 0, "counters": [] },
                { "vcpu": 0, "pmis": asked.len(), "counters": [] },
            ] }),
            other => return Err(refusal(&format!("{other:?} was not expected"))),
        })
    });
    let seen = vm.views().unwrap();
    assert_eq!(seen.iter().map(|view| view.vcpu).collect::<Vec<_>>(), [0, 1]);
    assert_eq!(seen[0].pmis, Some(4), "one question and three for its result");
}

/// A refused or malformed view is an error and does not cause a panic.
#[test]
fn refused_or_malformed_view_is_error() {
    let mut vm = scripted("exec sleep 600").answered(|_| Err(refusal("no")));
    let error = vm.views().unwrap_err();
    assert_eq!(error.to_string(), "no");
    let mut vm = scripted("exec sleep 600").answered(|_| Ok(json!({ "generation": "seven" })));
    assert!(matches!(
        vm.views().unwrap_err(),
        VmMeasurementError::Client(ClientError::Reply("fields"))
    ));
}
