//! The exporter with several real VMs, queried as by Prometheus and Pyroscope, with misbehaving
//! clients and VMs.

use std::fs::File;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Command;
use std::time::Duration;

use crate::common::host::{Host, get, reply};
use crate::common::vm::{PROGRAM, eventually};

/// A scrape contains all VMs, with the series of each metric family next to each other. A VM that
/// stops, dies, appears or disappears does not affect the others.
#[test]
fn scrape_contains_all_vms_despite_failures() {
    let Some(mut host) = Host::start(&[("a", &["--cpus", "2"]), ("b", &[]), ("off", &["--pmu", "off"])])
    else {
        return;
    };
    let text = host.metrics_with(&["a", "b", "off"]);
    let mut families: Vec<&str> = text.lines().filter_map(|l| l.strip_prefix("# TYPE ")).collect();
    let all = families.len();
    families.sort_unstable();
    families.dedup();
    assert!(families.len() == all && all > 20, "{text}");
    assert!(text.ends_with("# EOF\n"));
    let value = |text: &str, series: &str| -> f64 {
        let line = text
            .lines()
            .find_map(|l| l.strip_prefix(series)?.strip_prefix(' '));
        line.unwrap_or_else(|| panic!("no {series} in\n{text}"))
            .parse()
            .unwrap()
    };
    for series in [
        "vm=\"a\",vcpu=\"0\"",
        "vm=\"a\",vcpu=\"1\"",
        "vm=\"b\",vcpu=\"0\"",
        "vm=\"off\",vcpu=\"0\"",
    ] {
        assert!(value(&text, &format!("perfvisor_vcpu_exits_total{{{series}}}")) > 0.0);
    }
    // The operator's events continue to count between scrapes.
    let busy =
        "perfvisor_event_time_seconds_total{vm=\"b\",vcpu=\"0\",event=\"task-clock\",backing=\"software\"}";
    let before = value(&text, busy);
    eventually("the vCPU's time grows", || {
        let text = host.text("/metrics?vm=b");
        host.up(&text)["b"] && value(&text, busy) > before
    });
    assert!(host.up(&host.text("/metrics?vm=b")).len() == 1);

    host.signal("a", "-STOP");
    eventually("a stopped VM is told of as down", || {
        host.is_up("a") == Some(false)
    });
    let text = host.metrics_with(&["b", "off"]);
    assert!(!host.up(&text)["a"], "{text}");
    assert!(!text.contains("perfvisor_vcpu_exits_total{vm=\"a\""));
    host.signal("a", "-CONT");
    eventually("it comes back", || host.is_up("a") == Some(true));

    // The socket broker of a killed VM removes its socket.
    host.vms.get_mut("b").unwrap().kill().unwrap();
    eventually("a killed VM is no longer listed", || host.is_up("b").is_none());
    // Simulate a VM that was killed together with its broker, so that its socket remains without a
    // listener.
    drop(UnixListener::bind(host.socket("b")).unwrap());
    eventually("a VM that left its socket is down", || {
        host.is_up("b") == Some(false)
    });
    std::fs::remove_file(host.socket("b")).unwrap();
    eventually("a VM without a socket is not listed", || {
        host.is_up("b").is_none()
    });
    // The exporter repeats its reply for half a second, so wait for the new VM and then for the
    // others.
    host.add("c", &[]);
    eventually("a VM that comes is there", || host.is_up("c") == Some(true));
    eventually("the others are too", || host.is_up("a") == Some(true));
}

/// The exporter's profile endpoint serves the requests of `go tool pprof` and Pyroscope.
#[test]
fn profile_endpoint_serves_pprof() {
    let Some(host) = Host::start(&[("a", &[]), ("b", &[])]) else {
        return;
    };
    let (status, body) = host.get("/debug/pprof/profile?vm=a&seconds=1&hz=500");
    assert_eq!(status, 200, "{}", String::from_utf8_lossy(&body));
    let mut profile = Vec::new();
    flate2::read::GzDecoder::new(&body[..])
        .read_to_end(&mut profile)
        .unwrap();
    let has = |text: &str| profile.windows(text.len()).any(|w| w == text.as_bytes());
    assert!(has("samples") && has("cycles") && has("task"), "{profile:?}");
    // vCPU and process IDs would create a separate series each.
    assert!(!has("vcpu") && !has("pid"));

    for (query, expected) in [
        ("vm=x", 404),
        ("vm=a&seconds=0", 400),
        ("vm=a&seconds=1000000", 400),
        ("vm=a&event=--output", 502),
        ("vm=a&event=nosuch&seconds=1", 502),
        ("seconds=1", 400),
    ] {
        let (status, body) = host.get(&format!("/debug/pprof/profile?{query}"));
        assert_eq!(status, expected, "{query}: {}", String::from_utf8_lossy(&body));
        assert_eq!(body.iter().filter(|b| **b == b'\n').count(), 1, "one line");
    }

    // Each VM is limited to one profile at a time. A client that disconnects releases the slot.
    let ask = || {
        let mut stream = host.connect();
        let head = b"GET /debug/pprof/profile?vm=a&seconds=100 HTTP/1.1\r\n\r\n";
        stream.write_all(head).unwrap();
        stream.set_nonblocking(true).unwrap();
        stream
    };
    let mut first = ask();
    eventually("a second profile of the VM is refused", || {
        // If the second request arrived before the first, the first one was refused.
        if first.peek(&mut [0]).is_ok() {
            first = ask();
        }
        host.get("/debug/pprof/profile?vm=a&seconds=1").0 == 503
    });
    assert_eq!(host.get("/debug/pprof/profile?vm=b&seconds=1").0, 200);
    drop(first);
    eventually("the client's place is given back", || {
        host.get("/debug/pprof/profile?vm=a&seconds=1").0 == 200
    });
}

#[test]
fn service_discovery_and_paths() {
    let Some(host) = Host::start(&[("a", &[])]) else {
        return;
    };
    let list: serde_json::Value = serde_json::from_str(&host.text("/sd")).unwrap();
    let found = list
        .as_array()
        .unwrap()
        .iter()
        .find(|t| t["labels"]["__param_vm"] == "a");
    let found = found.unwrap_or_else(|| panic!("not in {list}"));
    assert_eq!(found["targets"], serde_json::json!(["here.example:99"]));
    assert_eq!(found["labels"]["__meta_perfvisor_vm"], "a");
    assert_eq!(host.text("/healthz"), "ok\n");
    assert_eq!(host.get("/").0, 404);
    assert_eq!(host.get("/metrics?vm=x").0, 404);

    let mut stream = host.connect();
    write!(stream, "HEAD /metrics HTTP/1.1\r\n\r\n").unwrap();
    let mut head = String::new();
    stream.read_to_string(&mut head).unwrap();
    assert!(
        head.starts_with("HTTP/1.1 200 OK") && head.ends_with("\r\n\r\n"),
        "{head}"
    );
}

/// Clients that are silent, slow, send invalid requests or read nothing do not exclude other
/// clients.
#[test]
fn hostile_clients_do_not_exclude_others() {
    let Some(host) = Host::start(&[("a", &[])]) else {
        return;
    };
    let silent: Vec<TcpStream> = (0..200).map(|_| host.connect()).collect();
    assert_eq!(host.text("/healthz"), "ok\n");
    drop(silent);
    for (request, expected) in [
        ("\x16\x03\x01\x02\r\n\r\n".to_owned(), 400),
        ("POST /metrics HTTP/1.1\r\n\r\n".to_owned(), 405),
        (format!("GET / HTTP/1.1\r\nA: {}", "b".repeat(9000)), 431),
        (format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(70)), 431),
    ] {
        let mut stream = host.connect();
        stream.write_all(request.as_bytes()).unwrap();
        assert_eq!(reply(stream).0, expected, "{request:?}");
    }
    // The connection is closed although the client keeps sending.
    let mut drips = host.connect();
    let mut writer = drips.try_clone().unwrap();
    std::thread::spawn(move || {
        let head = b"GET /healthz HTTP/1.1\r\nA: "
            .iter()
            .chain(std::iter::repeat(&b'x'));
        for byte in head {
            if writer.write_all(&[*byte]).is_err() {
                break;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    let mut said = String::new();
    let _ = drips.read_to_string(&mut said);
    assert!(said.starts_with("HTTP/1.1 408"), "{said}");
    // Clients that never read their replies.
    let lazy: Vec<TcpStream> = (0..80)
        .map(|_| {
            let mut stream = host.connect();
            let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n");
            stream
        })
        .collect();
    let served = |target: &str, part: &str| {
        let mut stream = host.connect();
        let _ = write!(stream, "GET {target} HTTP/1.1\r\n\r\n");
        let mut text = String::new();
        let _ = stream.read_to_string(&mut text);
        text.contains(part)
    };
    eventually("others are served", || served("/healthz", "ok\n"));
    drop(lazy);
    eventually("and metrics, too", || {
        served("/metrics", "perfvisor_exporter_vm_up{vm=\"a\"} 1")
    });
}

/// Fake VM sockets that do not answer, send invalid or endless data, or send slowly affect only
/// their own metrics.
#[test]
fn hostile_vms_affect_only_their_metrics() {
    let Some(host) = Host::start(&[("good", &[])]) else {
        return;
    };
    let fake = |name: &str, says: fn(UnixStream)| {
        let listener = UnixListener::bind(host.socket(name)).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || says(stream));
            }
        });
    };
    fake("silent", |mut stream| _ = stream.read_to_end(&mut Vec::new()));
    fake("nonsense", |mut stream| _ = stream.write_all(b"hello\n"));
    fake(
        "endless",
        |mut stream| while stream.write_all(&[b'x'; 65536]).is_ok() {},
    );
    fake("drips", |mut stream| {
        while stream.write_all(b" ").is_ok() {
            std::thread::sleep(Duration::from_millis(100));
        }
    });
    fake("gone", drop);
    // A listener that accepts no connection.
    let _full = UnixListener::bind(host.socket("full")).unwrap();
    for _ in 0..3 {
        let text = host.metrics_with(&["good"]);
        let up = host.up(&text);
        for name in ["silent", "nonsense", "endless", "drips", "gone", "full"] {
            assert!(!up[name], "{name}: {text}");
        }
    }
    let (status, _) = host.get("/debug/pprof/profile?vm=nonsense&seconds=1");
    assert_eq!(status, 502);
    assert_eq!(host.get("/debug/pprof/profile?vm=good&seconds=1").0, 200);
}

/// The exporter has no capability, also listens on a Unix socket, and exits on a signal.
#[test]
fn exporter_has_no_capabilities_and_exits_on_signal() {
    let runtime = tempfile::tempdir().unwrap();
    let socket = runtime.path().join("exporter.sock");
    let mut exporter = Command::new(PROGRAM)
        .args(["exporter", "--listen", &format!("unix:{}", socket.display())])
        .env("XDG_RUNTIME_DIR", runtime.path())
        .stderr(File::create(runtime.path().join("said")).unwrap())
        .spawn()
        .unwrap();
    let said = || std::fs::read_to_string(runtime.path().join("said")).unwrap();
    let mut stream = None;
    eventually("it listens", || {
        stream = UnixStream::connect(&socket).ok();
        stream.is_some() || exporter.try_wait().unwrap().is_some()
    });
    let (status, body) = get(stream.unwrap_or_else(|| panic!("{}", said())), "/metrics");
    let text = String::from_utf8(body).unwrap();
    assert!(
        status == 200 && text.contains("perfvisor_exporter_scrapes_total 1\n"),
        "{text}"
    );
    let tasks = std::fs::read_dir(format!("/proc/{}/task", exporter.id())).unwrap();
    for task in tasks.flatten() {
        // A thread that served a connection may have exited.
        let Ok(status) = std::fs::read_to_string(task.path().join("status")) else {
            continue;
        };
        for set in ["CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            // Only root can reduce the bounding set, and other users do not need to.
            let root = status.lines().any(|line| line.starts_with("Uid:\t0\t"));
            let none = status
                .lines()
                .any(|line| line == format!("{set}:\t0000000000000000"));
            assert!(none || (set == "CapBnd" && !root), "{set}: {status}");
        }
    }
    // A second exporter does not replace the first.
    let second = Command::new(PROGRAM)
        .args(["exporter", "--listen", &format!("unix:{}", socket.display())])
        .output()
        .unwrap();
    let line = String::from_utf8(second.stderr).unwrap();
    assert_eq!(
        (second.status.code(), line.lines().count()),
        (Some(2), 1),
        "{line}"
    );
    assert!(line.contains("choose another"), "{line}");

    let pid = exporter.id().to_string();
    assert!(
        Command::new("kill")
            .args(["-TERM", &pid])
            .status()
            .unwrap()
            .success()
    );
    assert!(exporter.wait().unwrap().success(), "{}", said());
    assert!(!socket.exists());
}
