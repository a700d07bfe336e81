use super::*;
use crate::http::Method;

/// A backend that records calls and refuses what it is told to.
#[derive(Default)]
struct TestBackend {
    calls: Vec<&'static str>,
    options: Vec<String>,
    refuses_start: bool,
}

impl VmBackend for TestBackend {
    fn check_options(&mut self, options: &[String]) -> Result<(), String> {
        let bad = options.iter().find(|option| option.contains("wrong"));
        bad.map_or(Ok(()), |option| Err(format!("invalid {option}")))
    }

    fn check_file(&mut self, path: &str) -> Result<(), String> {
        if path == "/missing" {
            Err("not found".into())
        } else {
            Ok(())
        }
    }

    fn set_logger(&mut self, _: &Logger) -> Result<(), String> {
        Ok(())
    }

    fn set_metrics(&mut self, _: &Metrics) -> Result<(), String> {
        Ok(())
    }

    fn start(&mut self, options: &[String]) -> Result<(), String> {
        if self.refuses_start {
            return Err("no KVM".into());
        }
        self.calls.push("start");
        self.options = options.to_vec();
        Ok(())
    }

    fn pause(&mut self) -> Result<(), String> {
        self.calls.push("pause");
        Ok(())
    }

    fn resume(&mut self) -> Result<(), String> {
        self.calls.push("resume");
        Ok(())
    }

    fn press_power_button(&mut self) -> Result<(), String> {
        Err("the guest handles no power button".into())
    }

    fn flush_metrics(&mut self) -> Result<(), String> {
        self.calls.push("flush");
        Ok(())
    }
}

type TestSession = Session<TestBackend>;

fn session() -> TestSession {
    Session::new(TestBackend::default(), "web".into(), "0.2.0".into())
}

/// Sends a request. Returns status and body.
fn send(session: &mut TestSession, method: Method, path: &str, body: &str) -> (u16, String) {
    let response = session.answer(&Request {
        method,
        path: path.into(),
        body: body.as_bytes().to_vec(),
        keep_alive: true,
    });
    (response.status, response.body.unwrap_or_default())
}

const KERNEL: &str = r#"{"kernel_image_path":"/k"}"#;
const START: &str = r#"{"action_type":"InstanceStart"}"#;

fn state(session: &mut TestSession) -> String {
    let (status, body) = send(session, Method::Get, "/", "");
    assert_eq!(status, 200);
    let value: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(value["id"], "web");
    value["state"].as_str().unwrap().to_owned()
}

#[test]
fn life_cycle_passes_through_all_states() {
    let mut session = session();
    assert_eq!(state(&mut session), "Not started");
    let (status, fault) = send(&mut session, Method::Put, "/actions", START);
    assert!(status == 400 && fault.contains("boot-source"), "{fault}");
    assert_eq!(send(&mut session, Method::Put, "/boot-source", KERNEL).0, 204);
    let metrics = r#"{"metrics_path":"/m"}"#;
    assert_eq!(send(&mut session, Method::Put, "/metrics", metrics).0, 204);
    assert_eq!(send(&mut session, Method::Put, "/metrics", metrics).0, 400);
    assert_eq!(send(&mut session, Method::Put, "/actions", START).0, 204);
    assert_eq!(state(&mut session), "Running");
    for wanted in ["Paused", "Resumed"] {
        let body = format!("{{\"state\":\"{wanted}\"}}");
        assert_eq!(send(&mut session, Method::Patch, "/vm", &body).0, 204);
    }
    let flush = r#"{"action_type":"FlushMetrics"}"#;
    assert_eq!(send(&mut session, Method::Put, "/actions", flush).0, 204);
    let (status, fault) = send(
        &mut session,
        Method::Put,
        "/actions",
        r#"{"action_type":"SendCtrlAltDel"}"#,
    );
    assert!(
        status == 400 && fault.contains("SendCtrlAltDel: the guest handles no"),
        "{fault}"
    );
    assert_eq!(session.backend().calls, ["start", "pause", "resume", "flush"]);
    assert!(session.backend().options.contains(&"--pmu=auto".to_owned()));
}

#[test]
fn calls_are_refused_in_the_wrong_state() {
    let mut session = session();
    let after = [
        (Method::Patch, "/vm", r#"{"state":"Paused"}"#),
        (Method::Put, "/actions", r#"{"action_type":"FlushMetrics"}"#),
        (Method::Put, "/actions", r#"{"action_type":"SendCtrlAltDel"}"#),
        (Method::Patch, "/drives/a", r#"{"drive_id":"a"}"#),
        (Method::Patch, "/network-interfaces/a", r#"{"iface_id":"a"}"#),
    ];
    for (method, path, body) in after {
        let (status, fault) = send(&mut session, method, path, body);
        assert!(
            status == 400 && fault.contains("not supported before"),
            "{path}: {fault}"
        );
    }
    send(&mut session, Method::Put, "/boot-source", KERNEL);
    send(&mut session, Method::Put, "/actions", START);
    for (method, path, body) in [
        (Method::Put, "/boot-source", KERNEL),
        (Method::Put, "/actions", START),
        (
            Method::Put,
            "/machine-config",
            r#"{"vcpu_count":1,"mem_size_mib":64}"#,
        ),
        (Method::Patch, "/machine-config", r#"{"vcpu_count":1}"#),
        (Method::Put, "/pmu", "{}"),
        (Method::Put, "/entropy", "{}"),
        (Method::Put, "/logger", "{}"),
    ] {
        let (status, fault) = send(&mut session, method, path, body);
        assert!(
            status == 400 && fault.contains("not supported after"),
            "{path}: {fault}"
        );
    }
    assert_eq!(state(&mut session), "Running");
}

#[test]
fn failed_calls_change_nothing() {
    let mut session = session();
    let (status, fault) = send(
        &mut session,
        Method::Put,
        "/boot-source",
        r#"{"kernel_image_path":"/missing"}"#,
    );
    assert!(
        status == 400 && fault.contains("kernel_image_path: /missing: not found"),
        "{fault}"
    );
    let (status, fault) = send(&mut session, Method::Put, "/pmu", r#"{"model":"wrong"}"#);
    assert!(status == 400 && fault.contains("--pmu=wrong"), "{fault}");
    assert_eq!(
        send(&mut session, Method::Get, "/pmu", "")
            .1
            .matches("auto")
            .count(),
        1
    );
    send(&mut session, Method::Put, "/boot-source", KERNEL);
    session.backend().refuses_start = true;
    let (status, fault) = send(&mut session, Method::Put, "/actions", START);
    assert!(
        status == 400 && fault.contains("InstanceStart: no KVM"),
        "{fault}"
    );
    assert_eq!(state(&mut session), "Not started");
    session.backend().refuses_start = false;
    assert_eq!(send(&mut session, Method::Put, "/actions", START).0, 204);
}
