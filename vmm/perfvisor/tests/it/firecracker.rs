//! `perfvisor firecracker`: life cycle of VMs controlled through the API.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::common::test_lock::{self, SharedLock};
use crate::common::vm::{
    PROGRAM, StderrLines, assert_contains, children, eventually, has_kvm, run_and_read_stderr, stdout_of,
};

/// Sends a request to the API at `socket`, like curl. Returns the status and the body.
pub fn request(socket: &Path, method: &str, path: &str, body: &Value) -> (u16, Value) {
    let body = if body.is_null() {
        String::new()
    } else {
        body.to_string()
    };
    let mut stream = UnixStream::connect(socket).unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8.0\r\nAccept: application/json\r\n\
         Content-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
    let body = text.split_once("\r\n\r\n").map_or("", |(_, body)| body);
    (
        status.unwrap_or(0),
        serde_json::from_str(body).unwrap_or(Value::Null),
    )
}

/// A process that serves the API; killed on drop.
struct ApiProcess {
    child: Child,
    dir: tempfile::TempDir,
    stderr: StderrLines,
    _lock: SharedLock,
}

impl ApiProcess {
    /// Starts the program with `args`, and waits until it serves the API. Returns `None` if KVM is
    /// unavailable.
    fn start(args: &[&str]) -> Option<Self> {
        if !has_kvm() {
            return None;
        }
        let lock = test_lock::shared();
        let dir = tempfile::tempdir().unwrap();
        let kernel = dir.path().join("kernel");
        std::fs::write(kernel, guest_images::bare_metal::BUILTIN).unwrap();
        // The name under which the program is started selects the command `firecracker`.
        let link = dir.path().join("firecracker");
        std::os::unix::fs::symlink(PROGRAM, &link).unwrap();
        let mut child = Command::new(link)
            .arg("--api-sock")
            .arg(dir.path().join("api"))
            .args(args)
            .current_dir(dir.path())
            .env("XDG_RUNTIME_DIR", dir.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = StderrLines::collect(&mut child);
        let mut api = Self {
            child,
            dir,
            stderr,
            _lock: lock,
        };
        let socket = api.path("api");
        eventually("the API is served", || {
            let ended = api.child.try_wait().unwrap();
            assert_eq!(ended, None, "{:?}", api.stderr.so_far());
            UnixStream::connect(&socket).is_ok()
        });
        Some(api)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn request(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        request(&self.path("api"), method, path, body)
    }

    fn get(&self, path: &str) -> Value {
        let (status, body) = self.request("GET", path, &Value::Null);
        assert_eq!(status, 200, "{path}: {body}");
        body
    }

    #[track_caller]
    fn put(&self, path: &str, body: Value) {
        let (status, fault) = self.request("PUT", path, &body);
        assert_eq!(status, 204, "{path}: {fault}");
    }

    /// Sends a request that must be refused, and returns the message.
    #[track_caller]
    fn refused(&self, method: &str, path: &str, body: Value) -> String {
        let (status, fault) = self.request(method, path, &body);
        assert_eq!(status, 400, "{path}: {fault}");
        fault["fault_message"].as_str().unwrap().to_owned()
    }

    /// Configures a VM whose guest runs until it is stopped.
    fn configure(&self) {
        self.put("/machine-config", json!({"vcpu_count": 2, "mem_size_mib": 64}));
        self.put(
            "/boot-source",
            json!({"kernel_image_path": "kernel", "boot_args": "loop"}),
        );
        self.put("/serial", json!({"serial_out_path": self.path("serial")}));
        self.put("/metrics", json!({"metrics_path": "metrics"}));
    }

    fn start_vm(&self) {
        self.put("/actions", json!({"action_type": "InstanceStart"}));
    }

    fn patch_vm(&self, state: &str) {
        let (status, fault) = self.request("PATCH", "/vm", &json!({"state": state}));
        assert_eq!(status, 204, "{fault}");
    }

    fn operator(&self, args: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(args).env("XDG_RUNTIME_DIR", self.dir.path());
        command
    }
}

impl Drop for ApiProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn vm_is_configured_started_paused_resumed_and_stopped() {
    let Some(mut api) = ApiProcess::start(&["--id", "web"]) else {
        return;
    };
    let info = api.get("/");
    assert_eq!(
        (&info["id"], &info["state"]),
        (&json!("web"), &json!("Not started"))
    );
    assert_eq!(api.get("/version")["firecracker_version"], "1.17.0");
    api.configure();
    api.put("/pmu", json!({"model": "intel-v2", "counters": "4+3"}));
    let config = api.get("/vm/config");
    assert_eq!(config["boot-source"]["boot_args"], "loop");
    assert_eq!(config["machine-config"]["vcpu_count"], 2);
    api.start_vm();
    assert_eq!(api.get("/")["state"], "Running");
    eventually("the guest spins", || {
        std::fs::read_to_string(api.path("serial"))
            .unwrap_or_default()
            .contains("spinning")
    });
    let status = stdout_of(&mut api.operator(&["ctl", "web", "status", "--json"]));
    let status: Value = serde_json::from_str(&status).unwrap();
    assert_eq!(
        (&status["vcpus"], &status["state"]),
        (&json!(2), &json!("running"))
    );
    assert!(status["pmu"].as_str().unwrap().contains('2'), "{status}");
    assert!(stdout_of(&mut api.operator(&["ps"])).contains("web"));
    api.patch_vm("Paused");
    assert_eq!(api.get("/")["state"], "Paused");
    let parked = stdout_of(&mut api.operator(&["ctl", "web", "status", "--json"]));
    assert!(parked.contains("\"parked\":2"), "{parked}");
    api.patch_vm("Resumed");
    api.put("/actions", json!({"action_type": "FlushMetrics"}));
    let metrics: Value =
        serde_json::from_str(&std::fs::read_to_string(api.path("metrics")).unwrap()).unwrap();
    assert_eq!(metrics["vm"]["name"], "web");
    assert_eq!(metrics["vcpus"].as_array().unwrap().len(), 2);
    let message = api.refused("PUT", "/boot-source", json!({"kernel_image_path": "kernel"}));
    assert!(message.contains("not supported after"), "{message}");
    let vm = status["pid"].as_u64().unwrap();
    terminate(api.child.id());
    assert_eq!(api.child.wait().unwrap().code(), Some(10));
    assert!(
        !std::path::Path::new(&format!("/proc/{vm}")).exists(),
        "the VM outlives its API"
    );
}

/// The guest continues in another process, with the devices of the source, which do not have to be
/// configured again. The source stays paused.
#[test]
fn snapshot_is_loaded_by_another_process() {
    let Some(source) = ApiProcess::start(&["--id", "one"]) else {
        return;
    };
    let disk = source.path("disk");
    std::fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
    source.configure();
    source.put("/entropy", json!({}));
    source.put(
        "/drives/data",
        json!({"drive_id": "data", "is_root_device": false, "path_on_host": disk, "is_read_only": true}),
    );
    source.put(
        "/balloon",
        json!({"amount_mib": 1, "deflate_on_oom": true, "stats_polling_interval_s": 60}),
    );
    source.start_vm();
    let (status, fault) = source.request("PATCH", "/balloon", &json!({"amount_mib": 2}));
    assert_eq!(status, 204, "{fault}");
    let message = source.refused("PATCH", "/balloon", json!({"amount_mib": 1 << 20}));
    assert_contains(&message, "amount_mib: a balloon of 1048576 MiB is larger");
    eventually("the guest spins", || {
        std::fs::read_to_string(source.path("serial"))
            .unwrap_or_default()
            .contains("spinning")
    });
    let files = json!({"snapshot_path": "state", "mem_file_path": source.path("memory")});
    let message = source.refused("PUT", "/snapshot/create", files.clone());
    assert!(message.contains("must be paused"), "{message}");
    source.patch_vm("Paused");
    let nowhere = json!({"snapshot_path": "state", "mem_file_path": "/no/such/dir/memory"});
    let message = source.refused("PUT", "/snapshot/create", nowhere);
    assert_contains(&message, "/no/such/dir/memory cannot be written: No such file");
    // The second snapshot replaces the first one.
    for _ in 0..2 {
        source.put("/snapshot/create", files.clone());
    }
    let status = stdout_of(&mut source.operator(&["ctl", "one", "status"]));
    assert!(status.contains("one: paused"), "{status}");
    let described = ["firecracker", "--describe-snapshot", "state"];
    let mut command = source.operator(&described);
    assert_eq!(stdout_of(command.current_dir(source.dir.path())), "v1.0.0\n");

    let target = ApiProcess::start(&["--id", "two"]).unwrap();
    target.put("/serial", json!({"serial_out_path": "serial"}));
    let load = |memory: &str| {
        json!({
            "snapshot_path": source.path("state"),
            "mem_backend": {"backend_type": "File", "backend_path": source.path(memory)},
        })
    };
    let message = target.refused("PUT", "/snapshot/load", load("kernel"));
    assert!(message.starts_with("snapshot/load: --restore"), "{message}");
    assert_eq!(target.get("/")["state"], "Not started");
    target.put("/snapshot/load", load("memory"));
    assert_eq!(target.get("/")["state"], "Paused");
    let config = target.get("/vm/config");
    assert_eq!(config["drives"][0]["path_on_host"], disk.to_str().unwrap());
    assert_eq!(config["machine-config"]["vcpu_count"], 2);
    let status = stdout_of(&mut target.operator(&["ctl", "two", "status"]));
    assert!(status.contains("two: paused"), "{status}");
    // The balloon keeps its size from the time of the snapshot.
    assert!(status.contains("balloon 0 MiB, target 2 MiB"), "{status}");
    assert_eq!(target.get("/balloon")["amount_mib"], 2);
    let statistics = target.get("/balloon/statistics");
    let expected = json!({"target_pages": 512, "actual_pages": 0, "target_mib": 2, "actual_mib": 0});
    assert_eq!(statistics, expected);
    let interval = json!({"stats_polling_interval_s": 1});
    let (status, fault) = target.request("PATCH", "/balloon/statistics", &interval);
    assert_eq!(status, 204, "{fault}");
    target.patch_vm("Resumed");
    let count = ["stat", "two", "-x,", "-e", "cycles", "-d", "0.5"];
    let count = stdout_of(&mut target.operator(&count));
    let cycles = count
        .split(',')
        .next()
        .and_then(|count| count.parse::<f64>().ok());
    assert!(cycles.is_some_and(|cycles| cycles > 0.0), "{count}");
    // The guest has not been started again, so the file contains at most the rest of its only line.
    let printed = std::fs::read_to_string(target.path("serial")).unwrap();
    assert!(!printed.contains("spinning"), "{printed}");

    // Save the restored VM again, and load the snapshot with `resume_vm`.
    target.patch_vm("Paused");
    target.put(
        "/snapshot/create",
        json!({"snapshot_path": "again", "mem_file_path": "memory", "snapshot_type": "Full"}),
    );
    let third = ApiProcess::start(&["--id", "three"]).unwrap();
    third.put(
        "/snapshot/load",
        json!({"snapshot_path": target.path("again"), "mem_file_path": target.path("memory"), "resume_vm": true}),
    );
    assert_eq!(third.get("/")["state"], "Running");
    let status = stdout_of(&mut third.operator(&["ctl", "three", "status"]));
    assert!(status.contains("three: running"), "{status}");
}

/// Sends SIGTERM, as orchestrators do.
pub fn terminate(pid: u32) {
    let sent = Command::new("kill").arg(pid.to_string()).status();
    assert!(sent.unwrap().success());
}

/// Rate limits set through the API reach the VM's devices, and can be changed while the VM runs.
#[test]
fn rate_limits_are_set_and_changed() {
    let Some(api) = ApiProcess::start(&["--id", "limited"]) else {
        return;
    };
    api.configure();
    std::fs::write(api.path("disk"), [0; 4096]).unwrap();
    let bucket = |size: u64| json!({"size": size, "one_time_burst": 7, "refill_time": 100});
    api.put(
        "/drives/data",
        json!({"drive_id": "data", "is_root_device": false, "path_on_host": api.path("disk"),
            "rate_limiter": {"bandwidth": bucket(1000)}}),
    );
    api.put("/entropy", json!({"rate_limiter": {"ops": bucket(5)}}));
    api.start_vm();
    let flushed = || -> Value {
        api.put("/actions", json!({"action_type": "FlushMetrics"}));
        let text = std::fs::read_to_string(api.path("metrics")).unwrap();
        let last: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
        last["rate_limiters"].clone()
    };
    let limit = |size: u64| json!({"size": size, "one_time_burst": 7, "refill_ms": 100});
    assert_eq!(
        flushed(),
        json!([
            {"name": "disk0", "bandwidth": limit(1000), "throttled": 0},
            {"name": "rng0", "ops": limit(5), "throttled": 0},
        ])
    );
    let update = json!({"drive_id": "data", "rate_limiter": {"bandwidth": {"size": 0, "refill_time": 0},
        "ops": bucket(3)}});
    let (status, fault) = api.request("PATCH", "/drives/data", &update);
    assert_eq!(status, 204, "{fault}");
    assert_eq!(
        flushed()[0],
        json!({"name": "disk0", "ops": limit(3), "throttled": 0})
    );
    let table = stdout_of(&mut api.operator(&["ctl", "limited", "limits"]));
    assert!(table.contains("3/100+7"), "{table}");
    let config = api.get("/vm/config");
    assert_eq!(config["drives"][0]["rate_limiter"]["ops"], bucket(3));
    let moved = json!({"drive_id": "data", "path_on_host": "other"});
    let message = api.refused("PATCH", "/drives/data", moved);
    assert!(message.starts_with("path_on_host: unsupported"), "{message}");
}

/// The data of the metadata service can be read and changed through the API. The VM has no network
/// device, so the data stays in the process that serves the API.
#[test]
fn metadata_is_read_and_changed_by_the_host() {
    let metadata = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(metadata.path(), r#"{"a": {"b": 1}}"#).unwrap();
    let path = metadata.path().to_str().unwrap();
    let Some(api) = ApiProcess::start(&["--metadata", path, "--mmds-size-limit", "30"]) else {
        return;
    };
    assert_eq!(api.get("/mmds"), json!({"a": {"b": 1}}));
    api.configure();
    let message = api.refused("PUT", "/mmds/config", json!({"network_interfaces": ["eth0"]}));
    assert_eq!(message, "network_interfaces: no interface \"eth0\"");
    api.start_vm();
    let (status, fault) = api.request("PATCH", "/mmds", &json!({"a": {"c": "x"}}));
    assert_eq!(status, 204, "{fault}");
    assert_eq!(api.get("/mmds"), json!({"a": {"b": 1, "c": "x"}}));
    let (status, _) = api.request("PUT", "/mmds", &json!("x".repeat(30)));
    assert_eq!(status, 413);
    api.put("/mmds", json!([]));
    assert_eq!(api.get("/mmds"), json!([]));
    assert_eq!(api.get("/vm/config")["mmds-config"], Value::Null);
}

/// The VM terminates with the process that serves the API, even if that process is killed.
#[test]
fn vm_ends_with_its_api_process() {
    let Some(mut api) = ApiProcess::start(&[]) else {
        return;
    };
    api.configure();
    api.start_vm();
    assert_eq!(api.get("/")["id"], "anonymous-instance");
    assert_eq!(api.get("/pmu")["model"], "auto");
    // The children are the VM and the process that writes snapshots.
    let ids: Vec<u32> = children(api.child.id()).into_iter().map(|(id, _)| id).collect();
    assert_eq!(ids.len(), 2, "{ids:?}");
    api.child.kill().unwrap();
    api.child.wait().unwrap();
    eventually("the VM ends", || {
        ids.iter().all(|id| {
            let stat = std::fs::read_to_string(format!("/proc/{id}/stat")).unwrap_or_default();
            stat.is_empty() || stat.contains(") Z ")
        })
    });
}

/// Refused requests change nothing. The VM starts afterwards and continues to run.
#[test]
fn refused_requests_leave_the_vm_unaffected() {
    let Some(api) = ApiProcess::start(&["--id", "web", "--http-api-max-payload-size", "1000"]) else {
        return;
    };
    let start = json!({"action_type": "InstanceStart"});
    assert!(
        api.refused("PUT", "/actions", start.clone())
            .contains("boot-source")
    );
    let missing = api.refused("PUT", "/boot-source", json!({"kernel_image_path": "nothing"}));
    assert!(missing.contains("kernel_image_path: nothing: "), "{missing}");
    assert!(
        api.refused("PUT", "/pmu", json!({"model": "vax"}))
            .contains("vax")
    );
    let tap = json!({"iface_id": "eth0", "host_dev_name": "a/b"});
    assert!(
        api.refused("PUT", "/network-interfaces/eth0", tap)
            .contains("--net")
    );
    assert!(
        api.refused("PATCH", "/balloon/hinting/start", json!({}))
            .contains("/balloon/hinting/start: unsupported")
    );
    assert_eq!(
        api.request("PUT", "/pmu", &json!({"model": "x".repeat(2000)})).0,
        413
    );
    let missing_tap = json!({"iface_id": "eth0", "host_dev_name": "no-such-tap"});
    api.put("/network-interfaces/eth0", missing_tap);
    api.configure();
    let message = api.refused("PUT", "/actions", start.clone());
    assert!(
        message.starts_with("InstanceStart: ") && message.contains("no-such-tap"),
        "{message}"
    );
    assert_eq!(api.get("/")["state"], "Not started");
}

#[test]
fn hostile_clients_leave_the_running_vm_unaffected() {
    let Some(api) = ApiProcess::start(&["--id", "web"]) else {
        return;
    };
    api.configure();
    api.start_vm();
    let mut idle = Vec::new();
    for n in 0..1000_u32 {
        let mut stream = UnixStream::connect(api.path("api")).unwrap();
        let bytes: &[u8] = match n % 4 {
            0 => b"",
            1 => b"PUT /actions HTTP/1.1\r\nContent-Length: 51200\r\n\r\n{",
            2 => b"\0\xff\x16",
            _ => b"GET / HTTP/1.1\r\n\r\nGET /vm/config HTTP/1.1\r\n",
        };
        let _ = stream.write_all(bytes);
        idle.push(stream);
    }
    assert_eq!(api.get("/")["state"], "Running");
    let files = std::fs::read_dir(format!("/proc/{}/fd", api.child.id()))
        .unwrap()
        .count();
    assert!(files < 64, "{files} descriptors");
    assert_eq!(
        api.request("PUT", "/actions", &json!({"action_type": "InstanceStart"}))
            .0,
        400
    );
    let status = stdout_of(&mut api.operator(&["ctl", "web", "status"]));
    assert!(status.contains("running"), "{status}");
}

/// `--config-file` accepts the contents of `GET /vm/config`.
#[test]
fn configuration_file_starts_the_vm() {
    let Some(api) = ApiProcess::start(&["--id", "first"]) else {
        return;
    };
    api.configure();
    std::fs::write(api.path("config.json"), api.get("/vm/config").to_string()).unwrap();
    let mut child = Command::new(PROGRAM)
        .args([
            "firecracker",
            "--no-api",
            "--id",
            "second",
            "--config-file",
            "config.json",
        ])
        .args(["--level", "Error", "--log-path", "log"])
        .current_dir(api.dir.path())
        .env("XDG_RUNTIME_DIR", api.dir.path())
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    eventually("the VM runs", || {
        assert_eq!(child.try_wait().unwrap(), None);
        run_and_read_stderr(&mut api.operator(&["ctl", "second", "status"])).0 == Some(0)
    });
    assert_eq!(
        run_and_read_stderr(&mut api.operator(&["ctl", "second", "stop"])).0,
        Some(0)
    );
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn invalid_options_are_refused() {
    for (args, word) in [
        (&["--id", "a_b"][..], "letters, digits and dashes"),
        (&["--no-api"], "--config-file"),
        (&["--boot-timer"], "--boot-timer: unsupported"),
        (&["--describe-snapshot", "/no/such/file"], "/no/such/file"),
        (&["--describe-snapshot", PROGRAM], "it does not begin with PVSS"),
        (&["--level", "Loud"], "Debug"),
        (&["--module", "vmm"], "module: unsupported"),
        (&["--config-file", "/no/such/file"], "/no/such/file"),
        (&["--api-sock", "/no/such/dir/api"], "/no/such/dir/api"),
        (&["--http-api-max-payload-size", "0"], "between 1 and"),
        (&["--mmds-size-limit", "61441"], "between 1 and 61440"),
        (&["--metadata", "/no/such/file"], "--metadata /no/such/file: "),
        (&["--metadata", PROGRAM], "--metadata"),
    ] {
        let (status, text) = run_and_read_stderr(Command::new(PROGRAM).arg("firecracker").args(args));
        assert_eq!(status, Some(2), "{args:?}: {text}");
        let last = text.lines().last().unwrap_or_default();
        assert!(last.contains(word), "{args:?}: {text}");
    }
    let version = stdout_of(Command::new(PROGRAM).args(["firecracker", "--snapshot-version"]));
    assert_eq!(version, "v1.0.0\n");
    let version = stdout_of(Command::new(PROGRAM).args(["firecracker", "--version"]));
    assert!(version.starts_with("Firecracker v1.17.0\n"), "{version}");
}
