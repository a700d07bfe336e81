use mmds::config::MAX_SIZE_LIMIT;

use super::*;
use crate::http::Method::{self, Get, Patch, Put};

/// Backend that records calls and fails as configured by the test.
#[derive(Default)]
struct TestBackend {
    calls: Vec<&'static str>,
    options: Vec<String>,
    limited: Vec<RateLimiterChange>,
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

    fn put_metadata(&mut self, data: Value) -> Result<(), ApiFault> {
        self.calls.push("mmds_put");
        self.metadata = Some(data);
        Ok(())
    }

    fn patch_metadata(&mut self, _: Value) -> Result<(), ApiFault> {
        self.calls.push("mmds_patch");
        Err(ApiFault::bad("the VM does not respond"))
    }

    fn metadata(&mut self) -> Result<Value, ApiFault> {
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

    fn change_limiter(&mut self, change: &RateLimiterChange) -> Result<(), String> {
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

type TestSession = ApiSession<TestBackend>;

fn session() -> TestSession {
    ApiSession::new(TestBackend::default(), "web".into(), "0.2.0".into())
}

impl TestSession {
    /// Sends a request to the API. Returns the status and the body of the response.
    fn send(&mut self, method: Method, path: &str, body: &str) -> (u16, String) {
        let response = self.answer(&Request {
            method,
            path: path.into(),
            body: body.as_bytes().to_vec(),
            keep_alive: true,
        });
        (response.status, response.body.unwrap_or_default())
    }

    /// Sends PUT requests and asserts that each succeeds.
    #[track_caller]
    fn put(&mut self, calls: &[(&str, &str)]) {
        for (path, body) in calls {
            assert_eq!(self.send(Put, path, body).0, 204, "{path}");
        }
    }

    /// Sends PATCH requests and asserts that each succeeds.
    #[track_caller]
    fn patch(&mut self, calls: &[(&str, &str)]) {
        for (path, body) in calls {
            assert_eq!(self.send(Patch, path, body).0, 204, "{path}");
        }
    }

    /// Sends a request and asserts that it is rejected with `reason` in the error message.
    #[track_caller]
    fn refuse(&mut self, method: Method, path: &str, body: &str, reason: &str) {
        let (status, fault) = self.send(method, path, body);
        assert!(status == 400 && fault.contains(reason), "{path} {body}: {fault}");
    }
}

const KERNEL: &str = r#"{"kernel_image_path":"/k"}"#;
const START: &str = r#"{"action_type":"InstanceStart"}"#;

fn state(session: &mut TestSession) -> String {
    let (status, body) = session.send(Get, "/", "");
    assert_eq!(status, 200);
    let value: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(value["id"], "web");
    value["state"].as_str().unwrap().to_owned()
}

#[test]
fn life_cycle_passes_through_all_states() {
    let mut session = session();
    assert_eq!(state(&mut session), "Not started");
    session.refuse(Put, "/actions", START, "boot-source");
    session.put(&[("/boot-source", KERNEL)]);
    let metrics = r#"{"metrics_path":"/m"}"#;
    session.put(&[("/metrics", metrics)]);
    assert_eq!(session.send(Put, "/metrics", metrics).0, 400);
    session.put(&[("/actions", START)]);
    assert_eq!(state(&mut session), "Running");
    for wanted in ["Paused", "Resumed"] {
        let body = format!("{{\"state\":\"{wanted}\"}}");
        session.patch(&[("/vm", &body)]);
    }
    let flush = r#"{"action_type":"FlushMetrics"}"#;
    session.put(&[("/actions", flush)]);
    session.refuse(
        Put,
        "/actions",
        r#"{"action_type":"SendCtrlAltDel"}"#,
        "SendCtrlAltDel: the guest handles no",
    );
    assert_eq!(session.backend().calls, ["start", "pause", "resume", "flush"]);
    assert!(session.backend().options.contains(&"--pmu=auto".to_owned()));
}

#[test]
fn calls_are_refused_in_the_wrong_state() {
    let mut session = session();
    let after = [
        (Patch, "/vm", r#"{"state":"Paused"}"#),
        (Put, "/actions", r#"{"action_type":"FlushMetrics"}"#),
        (Put, "/actions", r#"{"action_type":"SendCtrlAltDel"}"#),
        (Patch, "/drives/a", r#"{"drive_id":"a"}"#),
        (Patch, "/balloon", r#"{"amount_mib":1}"#),
        (Get, "/balloon/statistics", ""),
        (Patch, "/balloon/statistics", r#"{"stats_polling_interval_s":1}"#),
        (Patch, "/network-interfaces/a", r#"{"iface_id":"a"}"#),
    ];
    for (method, path, body) in after {
        session.refuse(method, path, body, "not supported before");
    }
    session.send(Put, "/boot-source", KERNEL);
    session.send(Put, "/actions", START);
    for (method, path, body) in [
        (Put, "/boot-source", KERNEL),
        (Put, "/actions", START),
        (Put, "/machine-config", r#"{"vcpu_count":1,"mem_size_mib":64}"#),
        (Patch, "/machine-config", r#"{"vcpu_count":1}"#),
        (Put, "/pmu", "{}"),
        (Put, "/entropy", "{}"),
        (Put, "/balloon", r#"{"amount_mib":1,"deflate_on_oom":true}"#),
        (Put, "/logger", "{}"),
    ] {
        session.refuse(method, path, body, "not supported after");
    }
    assert_eq!(state(&mut session), "Running");
}

#[test]
fn failed_calls_change_nothing() {
    let mut session = session();
    session.refuse(
        Put,
        "/boot-source",
        r#"{"kernel_image_path":"/missing"}"#,
        "kernel_image_path: /missing: not found",
    );
    session.refuse(Put, "/pmu", r#"{"model":"wrong"}"#, "--pmu=wrong");
    assert_eq!(session.send(Get, "/pmu", "").1.matches("auto").count(), 1);
    session.send(Put, "/boot-source", KERNEL);
    session.backend().refuses_start = true;
    session.refuse(Put, "/actions", START, "InstanceStart: no KVM");
    assert_eq!(state(&mut session), "Not started");
    session.backend().refuses_start = false;
    session.put(&[("/actions", START)]);
}

/// If a change of rate limiters succeeds, the limits of the running VM and the configuration change
/// together. If it fails, neither changes.
#[test]
fn limiters_of_a_running_vm_are_changed() {
    let mut session = session();
    session.put(&[
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
    ]);
    let limiter = r#"{"ops":{"size":5,"refill_time":100}}"#;
    let drive = |id: &str| format!(r#"{{"drive_id":"{id}","rate_limiter":{limiter}}}"#);
    let interface = format!(r#"{{"iface_id":"e","tx_rate_limiter":{limiter},"rx_rate_limiter":{limiter}}}"#);
    session.patch(&[("/drives/a", &drive("a"))]);
    let path = "/network-interfaces/e";
    session.patch(&[(path, &interface)]);
    let names = session.backend().limited.iter().map(|change| change.name.clone());
    assert_eq!(names.collect::<Vec<_>>(), ["disk0", "net0-rx", "net0-tx"]);
    session.refuse(
        Patch,
        "/drives/b",
        &drive("b"),
        "rate_limiter: the VM does not respond",
    );
    let config: VmConfig = serde_json::from_str(&session.send(Get, "/vm/config", "").1).unwrap();
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

/// A restored VM has the devices of the VM that was saved, but uses other tap devices if the client
/// specifies them.
#[test]
fn snapshot_is_created_while_paused_and_loaded_with_its_devices() {
    let mut source = session();
    source.refuse(Put, "/snapshot/create", SAVE, "not supported before");
    let drive = r#"{"drive_id":"a","is_root_device":false,"path_on_host":"/d","is_read_only":true}"#;
    let tap = r#"{"iface_id":"e0","host_dev_name":"tap0","guest_mac":"02:00:00:00:00:01"}"#;
    source.put(&[
        ("/boot-source", KERNEL),
        ("/drives/a", drive),
        ("/network-interfaces/e0", tap),
        ("/vsock", r#"{"guest_cid":7,"uds_path":"/v"}"#),
        ("/logger", r#"{"level":"Warning"}"#),
        ("/actions", START),
    ]);
    source.refuse(Put, "/snapshot/create", SAVE, "must be paused");
    source.send(Patch, "/vm", r#"{"state":"Paused"}"#);
    let diff = SAVE.replace("Full", "Diff");
    source.refuse(Put, "/snapshot/create", &diff, "snapshot_type: unsupported");
    let full = SAVE.replace("/s", "/full");
    source.refuse(Put, "/snapshot/create", &full, "No space left");
    source.put(&[("/snapshot/create", SAVE)]);
    assert_eq!(source.backend().options, ["/s", "/m"]);
    assert_eq!(state(&mut source), "Paused");
    source.refuse(Put, "/snapshot/load", LOAD, "not supported after");

    let mut target = session();
    target.backend().saved = source.backend().saved.clone();
    let with = |fields: &str| format!("{},{fields}}}", LOAD.strip_suffix('}').unwrap());
    let unknown = with(r#""network_overrides":[{"iface_id":"e1","host_dev_name":"tap7"}]"#);
    target.refuse(Put, "/snapshot/load", &unknown, "no interface 'e1'");
    let load = with(
        r#""network_overrides":[{"iface_id":"e0","host_dev_name":"tap7"}],"vsock_override":{"uds_path":"/w"}"#,
    );
    target.put(&[("/snapshot/load", &load)]);
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
    let config = target.send(Get, "/vm/config", "").1;
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
        session.refuse(Put, "/snapshot/load", &body, reason);
    }
    session.backend().refuses_start = true;
    session.refuse(Put, "/snapshot/load", LOAD, "snapshot/load: no KVM");
    session.backend().refuses_start = false;
    session.send(Put, "/boot-source", KERNEL);
    session.refuse(Put, "/snapshot/load", LOAD, "was configured");
    assert_eq!(state(&mut session), "Not started");
    assert!(session.backend().calls.is_empty());
}

const BALLOON: &str = r#"{"amount_mib":2,"deflate_on_oom":true,"stats_polling_interval_s":5}"#;

/// The balloon is configured before the VM starts and changed after the start. `GET` returns the
/// current values.
#[test]
fn balloon_is_configured_and_changed() {
    let mut session = session();
    session.refuse(Get, "/balloon", "", "no balloon");
    let hinting = BALLOON.replace('}', r#","free_page_hinting":true}"#);
    session.refuse(Put, "/balloon", &hinting, "free_page_hinting: unsupported");
    session.refuse(Put, "/balloon", r#"{"amount_mib":2}"#, "deflate_on_oom");
    session.refuse(Put, "/balloon", &BALLOON.replace("2,", "-2,"), "invalid value");
    session.put(&[
        ("/boot-source", KERNEL),
        ("/balloon", BALLOON),
        ("/actions", START),
    ]);
    let option = "--balloon=size=2,deflate-on-oom=on,stats=5,free-page-reporting=off";
    assert!(session.backend().options.contains(&option.to_owned()));
    session.patch(&[("/balloon", r#"{"amount_mib":64}"#)]);
    session.refuse(
        Patch,
        "/balloon",
        r#"{"amount_mib":129}"#,
        "amount_mib: larger than",
    );
    let interval = r#"{"stats_polling_interval_s":1}"#;
    session.patch(&[("/balloon/statistics", interval)]);
    session.refuse(
        Patch,
        "/balloon/statistics",
        r#"{"stats_polling_interval_s":0}"#,
        "cannot be enabled or disabled",
    );
    assert_eq!(session.backend().calls, ["start", "balloon", "interval"]);
    let (status, body) = session.send(Get, "/balloon", "");
    let expected = r#"{"amount_mib":64,"deflate_on_oom":true,"stats_polling_interval_s":1,"free_page_hinting":false,"free_page_reporting":false}"#;
    assert_eq!((status, body.as_str()), (200, expected));
    let (status, body) = session.send(Get, "/balloon/statistics", "");
    let expected =
        r#"{"target_pages":512,"actual_pages":256,"target_mib":2,"actual_mib":1,"free_memory":4096}"#;
    assert_eq!((status, body.as_str()), (200, expected));
    session.refuse(Patch, "/balloon/hinting/start", "{}", "unsupported");
}

/// If the balloon's statistics are disabled when the VM starts, they are never available.
#[test]
fn statistics_of_the_balloon_must_be_enabled_before_the_start() {
    let mut session = session();
    let without = BALLOON.replace(r#","stats_polling_interval_s":5"#, "");
    session.put(&[
        ("/boot-source", KERNEL),
        ("/balloon", without.as_str()),
        ("/actions", START),
    ]);
    session.refuse(Get, "/balloon/statistics", "", "were not enabled");
    let change = |seconds: u16| format!("{{\"stats_polling_interval_s\":{seconds}}}");
    session.refuse(Patch, "/balloon/statistics", &change(1), "cannot be enabled");
    let path = "/balloon/statistics";
    session.patch(&[(path, &change(0))]);
}

/// A restored VM has the balloon that the saved VM had, with its size at the time of the snapshot.
#[test]
fn balloon_survives_a_snapshot() {
    let mut source = session();
    source.put(&[
        ("/boot-source", KERNEL),
        ("/balloon", BALLOON),
        ("/actions", START),
    ]);
    source.patch(&[
        ("/balloon", r#"{"amount_mib":64}"#),
        ("/vm", r#"{"state":"Paused"}"#),
    ]);
    source.put(&[("/snapshot/create", SAVE)]);
    let mut target = session();
    target.backend().saved = source.backend().saved.clone();
    target.put(&[("/snapshot/load", LOAD)]);
    // The balloon is restored from the state file and not requested by an option.
    assert!(
        !target
            .backend()
            .options
            .iter()
            .any(|option| option.contains("balloon"))
    );
    let (status, body) = target.send(Get, "/balloon", "");
    assert!(status == 200 && body.contains(r#""amount_mib":64"#), "{body}");
    target.patch(&[("/balloon", r#"{"amount_mib":1}"#)]);
}

#[test]
fn metadata_is_passed_to_the_vm_at_its_start() {
    let mut session = session().with_metadata_limit(20);
    assert_eq!(session.send(Get, "/mmds", ""), (200, "null".into()));
    session.refuse(
        Patch,
        "/mmds",
        r#"{"a":"b"}"#,
        "The MMDS data store is not initialized.",
    );
    let long = format!("\"{}\"", "x".repeat(20));
    assert_eq!(session.send(Put, "/mmds", &long).0, 413);
    session.put(&[("/mmds", r#"{"a":"b","c":1}"#)]);
    session.patch(&[("/mmds", r#"{"c":null}"#)]);
    let config = r#"{"network_interfaces":["eth0"]}"#;
    session.refuse(Put, "/mmds/config", config, "eth0");
    let interface = r#"{"iface_id":"eth0","host_dev_name":"tap0"}"#;
    session.put(&[
        ("/network-interfaces/eth0", interface),
        ("/mmds/config", config),
        ("/boot-source", KERNEL),
        ("/actions", START),
    ]);
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
    assert_eq!(session.send(Put, "/mmds/config", config).0, 400);
    session.put(&[("/mmds", "7")]);
    assert_eq!(session.send(Get, "/mmds", ""), (200, "7".into()));
    assert_eq!(session.send(Patch, "/mmds", "{}").0, 400);
    // A patch that the VM could not parse is refused without being sent to the VM.
    let asked = session.backend().calls.len();
    let deep = format!("{}{}", "[".repeat(101), "]".repeat(101));
    let large = format!("\"{}\"", "x".repeat(MAX_SIZE_LIMIT));
    for (method, body, status) in [
        (Put, &deep, 413),
        (Put, &large, 413),
        (Patch, &deep, 400),
        (Patch, &large, 413),
    ] {
        assert_eq!(session.send(method, "/mmds", body).0, status);
    }
    assert_eq!(session.backend().calls.len(), asked);
    let (_, config) = session.send(Get, "/vm/config", "");
    assert!(
        config.contains(r#""mmds-config":{"network_interfaces":["eth0"]"#),
        "{config}"
    );
}

/// As in Firecracker, API clients may set and read metadata even if the VM's guest cannot reach the
/// metadata service. The document then stays in the API process.
#[test]
fn metadata_without_a_service_stays_in_the_api() {
    let mut session = session();
    session.put(&[("/boot-source", KERNEL), ("/mmds", "{}"), ("/actions", START)]);
    assert_eq!(session.backend().metadata, None);
    session.patch(&[("/mmds", r#"{"a":1}"#)]);
    assert_eq!(session.send(Get, "/mmds", ""), (200, r#"{"a":1}"#.into()));
}
