use mmds::config::MAX_SIZE_LIMIT;

use super::*;
use crate::http::Method;

/// A backend that records calls and refuses what it is told to.
#[derive(Default)]
struct TestBackend {
    calls: Vec<&'static str>,
    options: Vec<String>,
    limited: Vec<LimiterChange>,
    refuses_start: bool,
    metadata: Option<Value>,
    saved: VmConfig,
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

    fn put_metadata(&mut self, data: Value) -> Result<(), Fault> {
        self.calls.push("mmds_put");
        self.metadata = Some(data);
        Ok(())
    }

    fn patch_metadata(&mut self, _: Value) -> Result<(), Fault> {
        self.calls.push("mmds_patch");
        Err(Fault::bad("the VM does not respond"))
    }

    fn metadata(&mut self) -> Result<Value, Fault> {
        Ok(self.metadata.clone().unwrap_or_default())
    }

    fn start(&mut self, options: &[String], metadata: Option<&Value>) -> Result<(), String> {
        if self.refuses_start {
            return Err("no KVM".into());
        }
        self.calls.push("start");
        self.options = options.to_vec();
        self.metadata = metadata.cloned();
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

    fn change_limiter(&mut self, change: &LimiterChange) -> Result<(), String> {
        if change.name == "disk1" {
            return Err("the VM does not respond".into());
        }
        self.calls.push("limit");
        self.limited.push(change.clone());
        Ok(())
    }

    fn save(&mut self, state: &str, memory: &str, config: &VmConfig) -> Result<(), String> {
        if state == "/full" {
            return Err(format!("{state}: No space left on device"));
        }
        self.calls.push("save");
        self.options = vec![state.into(), memory.into()];
        self.saved = config.clone();
        Ok(())
    }

    fn read_snapshot(&mut self, state: &str) -> Result<VmConfig, String> {
        if state == "/missing" {
            return Err("not found".into());
        }
        Ok(self.saved.clone())
    }

    fn set_balloon_size(&mut self, amount_mib: u32) -> Result<(), String> {
        if amount_mib > 128 {
            return Err("larger than the guest's memory".into());
        }
        self.calls.push("balloon");
        Ok(())
    }

    fn set_balloon_interval(&mut self, _: u16) -> Result<(), String> {
        self.calls.push("interval");
        Ok(())
    }

    fn balloon_stats(&mut self) -> Result<BalloonStats, String> {
        Ok(BalloonStats {
            target_pages: 512,
            actual_pages: 256,
            target_mib: 2,
            actual_mib: 1,
            free_memory: Some(4096),
            ..BalloonStats::default()
        })
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
        (Method::Patch, "/balloon", r#"{"amount_mib":1}"#),
        (Method::Get, "/balloon/statistics", ""),
        (
            Method::Patch,
            "/balloon/statistics",
            r#"{"stats_polling_interval_s":1}"#,
        ),
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
        (
            Method::Put,
            "/balloon",
            r#"{"amount_mib":1,"deflate_on_oom":true}"#,
        ),
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

/// The limits of a running VM change together with the configuration, or not at all.
#[test]
fn limiters_of_a_running_vm_are_changed() {
    let mut session = session();
    for (path, body) in [
        ("/boot-source", KERNEL),
        (
            "/drives/a",
            r#"{"drive_id":"a","is_root_device":false,"path_on_host":"/a"}"#,
        ),
        (
            "/drives/b",
            r#"{"drive_id":"b","is_root_device":false,"path_on_host":"/b"}"#,
        ),
        (
            "/network-interfaces/e",
            r#"{"iface_id":"e","host_dev_name":"tap0"}"#,
        ),
        ("/actions", START),
    ] {
        assert_eq!(send(&mut session, Method::Put, path, body).0, 204, "{path}");
    }
    let limiter = r#"{"ops":{"size":5,"refill_time":100}}"#;
    let drive = |id: &str| format!(r#"{{"drive_id":"{id}","rate_limiter":{limiter}}}"#);
    let interface = format!(r#"{{"iface_id":"e","tx_rate_limiter":{limiter},"rx_rate_limiter":{limiter}}}"#);
    assert_eq!(send(&mut session, Method::Patch, "/drives/a", &drive("a")).0, 204);
    let path = "/network-interfaces/e";
    assert_eq!(send(&mut session, Method::Patch, path, &interface).0, 204);
    let names = session.backend().limited.iter().map(|change| change.name.clone());
    assert_eq!(names.collect::<Vec<_>>(), ["disk0", "net0-rx", "net0-tx"]);
    let (status, fault) = send(&mut session, Method::Patch, "/drives/b", &drive("b"));
    assert!(
        status == 400 && fault.contains("rate_limiter: the VM does not respond"),
        "{fault}"
    );
    let config: VmConfig =
        serde_json::from_str(&send(&mut session, Method::Get, "/vm/config", "").1).unwrap();
    let limits = config
        .drives
        .iter()
        .map(|drive| drive.rate_limiter.and_then(|of| of.ops));
    assert_eq!(
        limits.map(|of| of.map_or(0, |of| of.size)).collect::<Vec<_>>(),
        [5, 0]
    );
    let tx = config.network_interfaces[0].tx_rate_limiter.unwrap();
    assert_eq!(tx.ops.unwrap().refill_time, 100);
}

const SAVE: &str = r#"{"snapshot_path":"/s","mem_file_path":"/m","snapshot_type":"Full"}"#;
const LOAD: &str = r#"{"snapshot_path":"/s","mem_backend":{"backend_type":"File","backend_path":"/m"}}"#;

/// Sends a request that is refused. Returns the body.
#[track_caller]
fn refused(session: &mut TestSession, path: &str, body: &str) -> String {
    let (status, fault) = send(session, Method::Put, path, body);
    assert_eq!(status, 400, "{body}: {fault}");
    fault
}

/// A snapshot has the devices of the source, with other tap devices if the client names them.
#[test]
fn snapshot_is_created_while_paused_and_loaded_with_its_devices() {
    let mut source = session();
    assert!(refused(&mut source, "/snapshot/create", SAVE).contains("not supported before"));
    let drive = r#"{"drive_id":"a","is_root_device":false,"path_on_host":"/d","is_read_only":true}"#;
    let tap = r#"{"iface_id":"e0","host_dev_name":"tap0","guest_mac":"02:00:00:00:00:01"}"#;
    for (path, body) in [
        ("/boot-source", KERNEL),
        ("/drives/a", drive),
        ("/network-interfaces/e0", tap),
        ("/vsock", r#"{"guest_cid":7,"uds_path":"/v"}"#),
        ("/logger", r#"{"level":"Warning"}"#),
        ("/actions", START),
    ] {
        assert_eq!(send(&mut source, Method::Put, path, body).0, 204, "{path}");
    }
    assert!(refused(&mut source, "/snapshot/create", SAVE).contains("must be paused"));
    send(&mut source, Method::Patch, "/vm", r#"{"state":"Paused"}"#);
    let diff = SAVE.replace("Full", "Diff");
    assert!(refused(&mut source, "/snapshot/create", &diff).contains("snapshot_type: unsupported"));
    let full = SAVE.replace("/s", "/full");
    assert!(refused(&mut source, "/snapshot/create", &full).contains("No space left"));
    assert_eq!(send(&mut source, Method::Put, "/snapshot/create", SAVE).0, 204);
    assert_eq!(source.backend().options, ["/s", "/m"]);
    assert_eq!(state(&mut source), "Paused");
    assert!(refused(&mut source, "/snapshot/load", LOAD).contains("not supported after"));

    let mut target = session();
    target.backend().saved = source.backend().saved.clone();
    let with = |fields: &str| format!("{},{fields}}}", LOAD.strip_suffix('}').unwrap());
    let unknown = with(r#""network_overrides":[{"iface_id":"e1","host_dev_name":"tap7"}]"#);
    assert!(refused(&mut target, "/snapshot/load", &unknown).contains("no interface 'e1'"));
    let load = with(
        r#""network_overrides":[{"iface_id":"e0","host_dev_name":"tap7"}],"vsock_override":{"uds_path":"/w"}"#,
    );
    assert_eq!(send(&mut target, Method::Put, "/snapshot/load", &load).0, 204);
    assert_eq!(state(&mut target), "Paused");
    let options = [
        "--disk=/d,ro",
        "--net=tap=tap7,mac=02:00:00:00:00:01,vhost=off",
        "--vsock=cid=7,socket=/w",
        "--restore=/s",
        "--restore-memory=/m",
        "--restore-paused",
    ];
    assert_eq!(target.backend().options, options);
    let config = send(&mut target, Method::Get, "/vm/config", "").1;
    assert!(config.contains("tap7") && !config.contains("Warning"), "{config}");
}

#[test]
fn load_is_refused_with_other_devices_and_unsupported_fields() {
    let with = |fields: &str| format!("{},{fields}}}", LOAD.strip_suffix('}').unwrap());
    let mut session = session();
    for (body, reason) in [
        (
            with(r#""track_dirty_pages":true"#),
            "track_dirty_pages: unsupported",
        ),
        (
            with(r#""enable_diff_snapshots":true"#),
            "enable_diff_snapshots: unsupported",
        ),
        (with(r#""clock_realtime":true"#), "clock_realtime: unsupported"),
        (with(r#""huge_pages":"2M""#), "huge_pages: unsupported"),
        (
            with(r#""mem_file_path":"/m""#),
            "either mem_backend or mem_file_path",
        ),
        (LOAD.replace("File", "Uffd"), "backend_type: unsupported"),
        (LOAD.replace("/m", "/s"), "backend_path: must differ"),
        (LOAD.replace("\"/s\"", "\"\""), "snapshot_path: must be the path"),
        (
            LOAD.replace("/s", "/missing"),
            "snapshot_path: /missing: not found",
        ),
        (
            r#"{"snapshot_path":"/s"}"#.into(),
            "either mem_backend or mem_file_path",
        ),
    ] {
        let fault = refused(&mut session, "/snapshot/load", &body);
        assert!(fault.contains(reason), "{body}: {fault}");
    }
    session.backend().refuses_start = true;
    assert!(refused(&mut session, "/snapshot/load", LOAD).contains("snapshot/load: no KVM"));
    session.backend().refuses_start = false;
    send(&mut session, Method::Put, "/boot-source", KERNEL);
    assert!(refused(&mut session, "/snapshot/load", LOAD).contains("was configured"));
    assert_eq!(state(&mut session), "Not started");
    assert!(session.backend().calls.is_empty());
}

const BALLOON: &str = r#"{"amount_mib":2,"deflate_on_oom":true,"stats_polling_interval_s":5}"#;

/// The balloon is configured before the start and changed after it. `GET` returns the current values.
#[test]
fn balloon_is_configured_and_changed() {
    let mut session = session();
    let (status, fault) = send(&mut session, Method::Get, "/balloon", "");
    assert!(status == 400 && fault.contains("no balloon"), "{fault}");
    let hinting = BALLOON.replace('}', r#","free_page_hinting":true}"#);
    assert!(refused(&mut session, "/balloon", &hinting).contains("free_page_hinting: unsupported"));
    assert!(refused(&mut session, "/balloon", r#"{"amount_mib":2}"#).contains("deflate_on_oom"));
    assert!(refused(&mut session, "/balloon", &BALLOON.replace("2,", "-2,")).contains("invalid value"));
    for (path, body) in [
        ("/boot-source", KERNEL),
        ("/balloon", BALLOON),
        ("/actions", START),
    ] {
        assert_eq!(send(&mut session, Method::Put, path, body).0, 204, "{path}");
    }
    let option = "--balloon=size=2,deflate-on-oom=on,stats=5,free-page-reporting=off";
    assert!(session.backend().options.contains(&option.to_owned()));
    let patch = |session: &mut TestSession, path: &str, body: &str| send(session, Method::Patch, path, body);
    assert_eq!(patch(&mut session, "/balloon", r#"{"amount_mib":64}"#).0, 204);
    let (status, fault) = patch(&mut session, "/balloon", r#"{"amount_mib":129}"#);
    assert!(
        status == 400 && fault.contains("amount_mib: larger than"),
        "{fault}"
    );
    let interval = r#"{"stats_polling_interval_s":1}"#;
    assert_eq!(patch(&mut session, "/balloon/statistics", interval).0, 204);
    let (status, fault) = patch(
        &mut session,
        "/balloon/statistics",
        r#"{"stats_polling_interval_s":0}"#,
    );
    assert!(
        status == 400 && fault.contains("cannot be enabled or disabled"),
        "{fault}"
    );
    assert_eq!(session.backend().calls, ["start", "balloon", "interval"]);
    let (status, body) = send(&mut session, Method::Get, "/balloon", "");
    let expected = r#"{"amount_mib":64,"deflate_on_oom":true,"stats_polling_interval_s":1,"free_page_hinting":false,"free_page_reporting":false}"#;
    assert_eq!((status, body.as_str()), (200, expected));
    let (status, body) = send(&mut session, Method::Get, "/balloon/statistics", "");
    let expected =
        r#"{"target_pages":512,"actual_pages":256,"target_mib":2,"actual_mib":1,"free_memory":4096}"#;
    assert_eq!((status, body.as_str()), (200, expected));
    let (status, fault) = patch(&mut session, "/balloon/hinting/start", "{}");
    assert!(status == 400 && fault.contains("unsupported"), "{fault}");
}

/// A VM whose statistics were disabled at the start never has any.
#[test]
fn statistics_of_the_balloon_must_be_enabled_before_the_start() {
    let mut session = session();
    let without = BALLOON.replace(r#","stats_polling_interval_s":5"#, "");
    for (path, body) in [
        ("/boot-source", KERNEL),
        ("/balloon", without.as_str()),
        ("/actions", START),
    ] {
        assert_eq!(send(&mut session, Method::Put, path, body).0, 204, "{path}");
    }
    let (status, fault) = send(&mut session, Method::Get, "/balloon/statistics", "");
    assert!(status == 400 && fault.contains("were not enabled"), "{fault}");
    let change = |seconds: u16| format!("{{\"stats_polling_interval_s\":{seconds}}}");
    let (status, fault) = send(&mut session, Method::Patch, "/balloon/statistics", &change(1));
    assert!(status == 400 && fault.contains("cannot be enabled"), "{fault}");
    let path = "/balloon/statistics";
    assert_eq!(send(&mut session, Method::Patch, path, &change(0)).0, 204);
}

/// A restored VM has the balloon of the snapshot, with the size it had then.
#[test]
fn balloon_survives_a_snapshot() {
    let mut source = session();
    for (path, body) in [
        ("/boot-source", KERNEL),
        ("/balloon", BALLOON),
        ("/actions", START),
    ] {
        assert_eq!(send(&mut source, Method::Put, path, body).0, 204, "{path}");
    }
    for (path, body) in [
        ("/balloon", r#"{"amount_mib":64}"#),
        ("/vm", r#"{"state":"Paused"}"#),
    ] {
        assert_eq!(send(&mut source, Method::Patch, path, body).0, 204, "{path}");
    }
    assert_eq!(send(&mut source, Method::Put, "/snapshot/create", SAVE).0, 204);
    let mut target = session();
    target.backend().saved = source.backend().saved.clone();
    assert_eq!(send(&mut target, Method::Put, "/snapshot/load", LOAD).0, 204);
    // The state file has the option.
    assert!(
        !target
            .backend()
            .options
            .iter()
            .any(|option| option.contains("balloon"))
    );
    let (status, body) = send(&mut target, Method::Get, "/balloon", "");
    assert!(status == 200 && body.contains(r#""amount_mib":64"#), "{body}");
    assert_eq!(
        send(&mut target, Method::Patch, "/balloon", r#"{"amount_mib":1}"#).0,
        204
    );
}

#[test]
fn metadata_is_passed_to_the_vm_at_its_start() {
    let mut session = session().with_metadata_limit(20);
    assert_eq!(send(&mut session, Method::Get, "/mmds", ""), (200, "null".into()));
    let (status, fault) = send(&mut session, Method::Patch, "/mmds", r#"{"a":"b"}"#);
    assert!(
        status == 400 && fault.contains("The MMDS data store is not initialized."),
        "{fault}"
    );
    let long = format!("\"{}\"", "x".repeat(20));
    assert_eq!(send(&mut session, Method::Put, "/mmds", &long).0, 413);
    assert_eq!(
        send(&mut session, Method::Put, "/mmds", r#"{"a":"b","c":1}"#).0,
        204
    );
    assert_eq!(send(&mut session, Method::Patch, "/mmds", r#"{"c":null}"#).0, 204);
    let config = r#"{"network_interfaces":["eth0"]}"#;
    let (status, fault) = send(&mut session, Method::Put, "/mmds/config", config);
    assert!(status == 400 && fault.contains("eth0"), "{fault}");
    let interface = r#"{"iface_id":"eth0","host_dev_name":"tap0"}"#;
    for (path, body) in [
        ("/network-interfaces/eth0", interface),
        ("/mmds/config", config),
        ("/boot-source", KERNEL),
        ("/actions", START),
    ] {
        assert_eq!(send(&mut session, Method::Put, path, body).0, 204, "{path}");
    }
    let backend = session.backend();
    assert_eq!(backend.metadata, Some(serde_json::json!({"a": "b"})));
    assert!(
        backend
            .options
            .iter()
            .any(|option| option.starts_with("--mmds=version=v1,") && option.ends_with("size-limit=20")),
        "{:?}",
        backend.options
    );
    assert!(
        !backend.options.concat().contains("\"a\""),
        "metadata is secret, and a command line is not"
    );
    assert_eq!(send(&mut session, Method::Put, "/mmds/config", config).0, 400);
    assert_eq!(send(&mut session, Method::Put, "/mmds", "7").0, 204);
    assert_eq!(send(&mut session, Method::Get, "/mmds", ""), (200, "7".into()));
    assert_eq!(send(&mut session, Method::Patch, "/mmds", "{}").0, 400);
    // Messages that the VM could not read are not sent to it.
    let asked = session.backend().calls.len();
    let deep = format!("{}{}", "[".repeat(101), "]".repeat(101));
    let large = format!("\"{}\"", "x".repeat(MAX_SIZE_LIMIT));
    for (method, body, status) in [
        (Method::Put, &deep, 413),
        (Method::Put, &large, 413),
        (Method::Patch, &deep, 400),
        (Method::Patch, &large, 413),
    ] {
        assert_eq!(send(&mut session, method, "/mmds", body).0, status);
    }
    assert_eq!(session.backend().calls.len(), asked);
    let (_, config) = send(&mut session, Method::Get, "/vm/config", "");
    assert!(
        config.contains(r#""mmds-config":{"network_interfaces":["eth0"]"#),
        "{config}"
    );
}

/// As in Firecracker, the host may use the store of a VM whose guest does not reach it.
#[test]
fn metadata_without_a_service_stays_in_the_api() {
    let mut session = session();
    for (path, body) in [("/boot-source", KERNEL), ("/mmds", "{}"), ("/actions", START)] {
        assert_eq!(send(&mut session, Method::Put, path, body).0, 204, "{path}");
    }
    assert_eq!(session.backend().metadata, None);
    assert_eq!(send(&mut session, Method::Patch, "/mmds", r#"{"a":1}"#).0, 204);
    assert_eq!(
        send(&mut session, Method::Get, "/mmds", ""),
        (200, r#"{"a":1}"#.into())
    );
}
