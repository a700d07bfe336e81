//! Tests of the measurement protocol with a scripted guest.

use control_api::protocol::Call;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::child::tests::{refusal, scripted, views};

/// Returns the greeting of a guest with `gp` general-purpose counters and no fixed counters, on an
/// Intel PMU.
pub(crate) fn hello(gp: u32) -> Value {
    json!({ "at": "hello", "cpus": 1, "amd": false, "gp": gp, "fixed": 0, "unavailable": 0 })
}

/// Returns the result of one CPU whose general-purpose counters have the values `counts`.
pub(crate) fn counted(counts: &[u64]) -> Value {
    json!({ "at": "result", "cpus": [{ "tsc": 3_000_000, "c": counts, "f": [] }] })
}

/// Returns a script of a guest that sends `hello` and answers each measurement with the result of
/// the first matching `case` pattern.
pub(crate) fn script(hello: &Value, results: &[(&str, Value)]) -> String {
    let arms: String = results
        .iter()
        .map(|(pattern, result)| format!("{pattern}) echo '{result}';;\n"))
        .collect();
    format!(
        "echo '{hello}'
         while read -r line; do
           [ \"$line\" = end ] && exit 0
           echo ready; read -r go
           echo done; read -r go
           case \"$line\" in
             {arms}
           esac
         done"
    )
}

/// Starts a VM simulated by `script`, in which the host's view of the counters is always `host`.
fn viewed(script: &str, host: Vec<u64>) -> Result<MeasuringGuest, VmMeasurementError> {
    let vm = scripted(script).answered(move |call| match call {
        Call::GuestView => Ok(json!({ "generation": 1 })),
        Call::GuestViewResult { .. } => Ok(views(std::slice::from_ref(&host))),
        other => Err(refusal(&format!("{other:?} was not expected"))),
    });
    MeasuringGuest::wait_for_greeting(vm)
}

/// Starts the scripted guest in a VM in which the host's view of the counters is `host`.
pub(crate) fn measuring(hello: &Value, results: &[(&str, Value)], host: Vec<u64>) -> MeasuringGuest {
    viewed(&script(hello, results), host).unwrap()
}

#[test]
fn job_is_one_line_of_words() {
    let job = MeasurementJob::new("busy", 5).at_cpl(3).counter(0x1003C);
    assert_eq!(
        job.line(),
        "measure work=busy n=5 cpl=3 c=0x1003c f=0x0 period=0 cpus=1"
    );
}

#[test]
fn answers_are_understood() {
    let line = r#"{"at":"result","cpus":[{"tsc":7,"c":[1,2],"f":[],"pmis":3,"late":0,"spurious":1,"struck":[1,1,0,1]}]}"#;
    let Some(GuestReply::Result { cpus }) = parse(line) else {
        panic!("{line}");
    };
    assert_eq!((cpus[0].c.as_slice(), cpus[0].pmis), ([1, 2].as_slice(), 3));
    assert!(matches!(parse("ready"), Some(GuestReply::Ready)));
    assert!(matches!(parse(r#"{"at":"gave up"}"#), Some(GuestReply::Other)));
    assert!(parse("text of the guest").is_none());
}

/// The greeting is found after the boot messages.
#[test]
fn greeting_is_found_after_boot_messages() {
    let vm = scripted(&format!(
        "echo SeaBIOS; echo '{{\"at\":\"gave up\"}}'; {}",
        script(&hello(6), &[])
    ));
    let guest = MeasuringGuest::wait_for_greeting(vm).unwrap();
    assert_eq!((guest.hello.gp, guest.hello.cpus, guest.hello.amd), (6, 1, false));
    guest.end().unwrap();
}

/// A greeting with an invalid or excessive number is ignored, so the error reports that the guest
/// has ended.
#[test]
fn malformed_greeting_is_ignored() {
    for wrong in [
        json!({ "at": "hello", "cpus": -1, "amd": false, "gp": 4, "fixed": 0, "unavailable": 0 }),
        json!({ "at": "hello", "cpus": 1u64 << 32, "amd": false, "gp": 4, "fixed": 0, "unavailable": 0 }),
        json!({ "at": "hello", "cpus": 1 }),
    ] {
        let error = MeasuringGuest::wait_for_greeting(scripted(&format!("echo '{wrong}'")))
            .err()
            .unwrap();
        assert!(
            matches!(error, VmMeasurementError::Ended { status: 0, .. }),
            "{wrong}: {error}"
        );
    }
}

/// A measurement contains the guest's counts, and the host's view of the counters before and after
/// the work.
#[test]
fn measurement_contains_guest_and_host_counts() {
    let mut guest = measuring(
        &hello(2),
        &[("*work=busy*c=0x1003c*", counted(&[41, 42]))],
        vec![41, 43],
    );
    let outcome = guest
        .measure(&MeasurementJob::new("busy", 5).counter(0x1003C), None)
        .unwrap();
    assert_eq!(outcome.cpus[0].c, [41, 42]);
    assert_eq!(outcome.host(0, "gp1").map(|counter| counter.value), Some(43));
    assert_eq!(outcome.overflows(0, "gp0"), Some(0));
    assert_eq!(
        (outcome.host(0, "gp2"), outcome.host(1, "gp0")),
        (None, None),
        "no such counter, no such CPU"
    );
    guest.end().unwrap();
}

/// A result with a different number of CPUs than requested is rejected.
#[test]
fn result_with_wrong_cpu_count_is_rejected() {
    for cpus in [
        json!([]),
        json!([{ "tsc": 1, "c": [], "f": [] }, { "tsc": 1, "c": [], "f": [] }]),
    ] {
        let result = json!({ "at": "result", "cpus": cpus });
        let mut guest = measuring(&hello(2), &[("*", result)], vec![0]);
        let error = guest.measure(&MeasurementJob::new("busy", 5), None).unwrap_err();
        assert!(
            matches!(error, VmMeasurementError::Answer(ref said) if said.contains("work=busy")),
            "{error}"
        );
    }
}

/// A guest that refuses a job or skips a step causes an error.
#[test]
fn skipped_step_is_error() {
    for steps in [
        "echo '{\"at\":\"refused\"}'",
        "echo done",
        "echo ready; read -r go; echo ready",
    ] {
        let script = format!("echo '{}'; read -r line; {steps}; read -r line", hello(2));
        let mut guest = viewed(&script, vec![0]).unwrap();
        let error = guest.measure(&MeasurementJob::new("busy", 5), None).unwrap_err();
        assert!(matches!(error, VmMeasurementError::Answer(_)), "{steps}: {error}");
    }
}

/// Other output of the guest does not disturb a measurement.
#[test]
fn other_lines_do_not_disturb_a_measurement() {
    let noisy = format!(
        "echo '{}'; read -r line; echo '{{\"at\":\"tick\"}}'; echo ready; read -r go; echo ' ready'; echo done; \
         read -r go; echo '{{\"at\":'; echo '{}'; read -r line",
        hello(2),
        counted(&[9])
    );
    let mut guest = viewed(&noisy, vec![9]).unwrap();
    let outcome = guest.measure(&MeasurementJob::new("busy", 5), None).unwrap();
    assert_eq!(outcome.cpus[0].c, [9]);
}

/// Returns an event in the format of the reply to an open request.
pub(crate) fn opened(handle: Option<u32>, index: u32, vcpu: u32) -> OpenedEvent {
    OpenedEvent {
        handle,
        unsupported: handle.is_none().then(|| "no slot".into()),
        index,
        vcpu: Some(vcpu),
        ..OpenedEvent::default()
    }
}

/// Returns the reading of an event that ran all the time.
pub(crate) fn reading(handle: u32, value: u64) -> EventReading {
    EventReading {
        handle,
        value,
        enabled_ns: 1000,
        running_ns: 1000,
        estimate: Some(value),
        ..EventReading::default()
    }
}

/// The operator's events are opened and enabled before the work, and disabled, read and closed
/// after it.
#[test]
fn operator_events_are_enabled_around_work() {
    let calls = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = calls.clone();
    let vm = scripted(&script(&hello(2), &[("*", counted(&[9]))])).answered(move |call| {
        let name = serde_json::to_value(&call).unwrap()["call"]
            .as_str()
            .unwrap()
            .to_owned();
        seen.lock().unwrap().push(name);
        Ok(match call {
            Call::GuestView => json!({ "generation": 1 }),
            Call::GuestViewResult { .. } => views(&[vec![9]]),
            Call::Open { .. } => serde_json::to_value([opened(Some(5), 0, 0), opened(None, 1, 0)]).unwrap(),
            Call::Read => serde_json::to_value([reading(5, 70)]).unwrap(),
            _ => Value::Null,
        })
    });
    let mut guest = MeasuringGuest::wait_for_greeting(vm).unwrap();
    let operator = OperatorEventConfig::counting("cycles,instructions");
    let saw = guest
        .measure(&MeasurementJob::new("busy", 5), Some(operator))
        .unwrap()
        .operator
        .unwrap();
    assert_eq!(saw.reading(0, 0).map(|r| r.value), Some(70));
    assert!(
        saw.reading(1, 0).is_none(),
        "an event without a slot has no count"
    );
    assert!(saw.reading(0, 1).is_none(), "nor has another vCPU");
    let look = ["guest_view", "guest_view_result"];
    let order = [
        &look[..],
        &["open", "enable", "disable", "read", "close"],
        &look[..],
    ]
    .concat();
    assert_eq!(*calls.lock().unwrap(), order);
}

/// If the VM refuses the operator's events, the result contains the refusal, and the guest is
/// measured without them.
#[test]
fn operator_refusal_is_kept() {
    let vm = scripted(&script(&hello(2), &[("*", counted(&[9]))])).answered(|call| match call {
        Call::GuestView => Ok(json!({ "generation": 1 })),
        Call::GuestViewResult { .. } => Ok(views(&[vec![9]])),
        Call::Open { .. } => Err(refusal("strict: the guest's counters take all slots")),
        other => panic!("{other:?} of events that were refused"),
    });
    let mut guest = MeasuringGuest::wait_for_greeting(vm).unwrap();
    let operator = OperatorEventConfig::counting("cycles");
    let saw = guest
        .measure(&MeasurementJob::new("busy", 5), Some(operator))
        .unwrap()
        .operator
        .unwrap();
    assert!(saw.opened.as_ref().unwrap_err().message.starts_with("strict"));
    assert!(saw.reading(0, 0).is_none());
}

/// A job without work or CPUs is sent as one unit of work on one CPU, because the guest divides by
/// the amount of work and by the number of CPUs.
#[test]
fn empty_job_is_sent_as_one_unit() {
    let line = MeasurementJob {
        cpus: 0,
        ..MeasurementJob::new("nothing", 0)
    }
    .line();
    assert_eq!(line, "measure work=nothing n=1 cpl=0 f=0x0 period=0 cpus=1");
}

proptest! {
    #[test]
    fn parser_survives_random_guest_lines(line in ".{0,200}") {
        let _ = parse(&line);
    }
}
