//! The metrics of a running VM, scraped as Prometheus would, and by clients that mean no good.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::common::vm::{PROGRAM, SpinningVm, eventually};

/// Metrics at a port that is free.
const SERVED: [&str; 2] = ["--metrics", "127.0.0.1:0"];

/// A VM that serves metrics.
struct TestVm {
    port: u16,
    vm: SpinningVm,
}

impl TestVm {
    /// The built-in guest, spinning. `None` where there is no KVM.
    fn spinning(more: &[&str]) -> Option<Self> {
        Self::of(SpinningVm::start("scraped", &[&SERVED, more].concat())?)
    }

    fn of(vm: SpinningVm) -> Option<Self> {
        let port = |line: &String| line.split_once("metrics at 127.0.0.1:")?.1.trim().parse().ok();
        let mut found = None;
        eventually("the VM says where its metrics are", || {
            found = vm.said().iter().find_map(port);
            found.is_some()
        });
        Some(Self { port: found?, vm })
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(300))).unwrap();
        stream
    }

    /// The reply to a request: status line and body.
    fn ask(&self, request: &str) -> (String, String) {
        reply(self.connect(), request)
    }

    fn scrape(&self) -> Metrics {
        let (status, body) = self.ask("GET /metrics HTTP/1.1\r\nHost: vm\r\n\r\n");
        assert_eq!(status, "HTTP/1.1 200 OK");
        Metrics::parse(&body)
    }
}

fn reply(mut stream: impl Read + Write, request: &str) -> (String, String) {
    stream.write_all(request.as_bytes()).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").expect("a head and a body");
    let length: usize = head
        .lines()
        .find_map(|l| l.strip_prefix("Content-Length: ")?.parse().ok())
        .expect("the reply says its length");
    if !request.starts_with("HEAD") {
        assert_eq!(body.len(), length);
    }
    (head.lines().next().unwrap().to_owned(), body.to_owned())
}

/// A scrape, read as strictly as OpenMetrics 1.0 has it for counters, gauges and infos.
struct Metrics {
    kinds: BTreeMap<String, String>,
    /// By the series' name and labels.
    values: BTreeMap<String, f64>,
}

impl Metrics {
    fn parse(text: &str) -> Self {
        let body = text.strip_suffix("# EOF\n").expect("it ends with EOF");
        let (mut kinds, mut values) = (BTreeMap::new(), BTreeMap::new());
        let (mut family, mut kind, mut unit) = (String::new(), String::new(), String::new());
        let mut helped = BTreeSet::new();
        for line in body.lines() {
            if let Some(rest) = line.strip_prefix("# ") {
                let (what, rest) = rest.split_once(' ').unwrap();
                let (name, text) = rest.split_once(' ').expect(line);
                if name != family {
                    assert!(!kinds.contains_key(name), "{name} comes in two pieces");
                    (family, kind, unit) = (name.to_owned(), String::new(), String::new());
                }
                match what {
                    "HELP" => assert!(helped.insert(name.to_owned()) && text.ends_with('.'), "{line}"),
                    "TYPE" => {
                        kind = text.to_owned();
                        assert!(["counter", "gauge", "info"].contains(&text), "{line}");
                        assert_eq!(kinds.insert(name.to_owned(), kind.clone()), None, "{line}");
                    }
                    "UNIT" => {
                        unit = text.to_owned();
                        assert!(name.ends_with(&format!("_{text}")), "{line}");
                    }
                    _ => panic!("{line}"),
                }
                continue;
            }
            let (series, value) = line.rsplit_once(' ').expect(line);
            let (name, labels) = series.split_once('{').expect(line);
            let suffix = match kind.as_str() {
                "counter" => "_total",
                "info" => "_info",
                _ => "",
            };
            assert_eq!(name, format!("{family}{suffix}"), "{line}");
            assert!(
                family.starts_with("perfvisor_") && helped.contains(&family),
                "{line}"
            );
            if name.contains("_seconds") {
                assert_eq!(unit, "seconds", "{line}");
            }
            let labels = labels.strip_suffix('}').expect(line);
            let mut names = BTreeSet::new();
            for label in labels.split("\",") {
                let (key, text) = label.split_once("=\"").expect(line);
                assert!(names.insert(key), "{line}");
                assert!(!text.trim_end_matches('"').contains(['"', '\\']), "{line}");
            }
            assert!(names.contains("vm"), "{line}");
            let number: f64 = value.parse().expect(line);
            assert!(number.is_finite() && number >= 0.0, "{line}");
            assert_eq!(values.insert(series.to_owned(), number), None, "twice: {line}");
        }
        Self { kinds, values }
    }

    fn value(&self, series: &str) -> f64 {
        let found = self.values.get(series);
        *found.unwrap_or_else(|| panic!("{series} is not among {:#?}", self.values.keys()))
    }
}

/// Every family is well formed and none of its counters ever falls; an event that counts all the time grows,
/// and says how long it was enabled and counted.
#[test]
fn counters_are_well_formed_and_never_fall() {
    let more = [
        "--cpus",
        "2",
        "--metrics-events",
        "cycles,task-clock,cycles,kvm:no_such_one",
    ];
    let Some(vm) = TestVm::spinning(&more) else { return };
    let cycles = |vcpu| {
        format!(
            "perfvisor_event_count_total{{vm=\"scraped\",vcpu=\"{vcpu}\",event=\"cycles\",backing=\"clock\"}}"
        )
    };
    let hardware = || {
        vm.scrape()
            .values
            .keys()
            .any(|k| k.contains("backing=\"hardware\""))
    };
    let mut last = vm.scrape();
    let mut scrapes = 0;
    eventually("both vCPUs count cycles", || {
        let now = vm.scrape();
        scrapes += 1;
        for (series, value) in &last.values {
            let name = series.split('{').next().unwrap();
            if name.ends_with("_total") {
                assert!(
                    now.values.get(series).is_some_and(|n| n >= value),
                    "{series} fell from {value}"
                );
            }
        }
        let grew = |vcpu| match (last.values.get(&cycles(vcpu)), now.values.get(&cycles(vcpu))) {
            (Some(before), Some(after)) => after > before,
            _ => false,
        };
        let done = scrapes > 5 && (grew(0) && grew(1) || hardware());
        last = now;
        done
    });
    assert_eq!(last.kinds["perfvisor_vm"], "info");
    assert_eq!(last.value("perfvisor_vm_vcpus{vm=\"scraped\"}"), 2.0);
    for vcpu in ["0", "1"] {
        let of = |name: &str| {
            let wanted = |k: &&String| {
                k.starts_with(&format!(
                    "{name}{{vm=\"scraped\",vcpu=\"{vcpu}\",event=\"cycles\","
                ))
            };
            let found: Vec<_> = last.values.iter().filter(|(k, _)| wanted(k)).collect();
            assert_eq!(found.len(), 1, "{name} of vCPU {vcpu}: {found:?}");
            *found[0].1
        };
        let (enabled, running) = (
            of("perfvisor_event_enabled_seconds_total"),
            of("perfvisor_event_running_seconds_total"),
        );
        assert!(running <= enabled && enabled > 0.0, "{running} of {enabled}");
        assert!((0.0..=1.0).contains(&of("perfvisor_event_running_ratio")));
        let exits = format!("perfvisor_vcpu_exits_total{{vm=\"scraped\",vcpu=\"{vcpu}\"}}");
        assert!(last.value(&exits) > 0.0);
        let steal = format!("perfvisor_vcpu_steal_seconds_total{{vm=\"scraped\",vcpu=\"{vcpu}\"}}");
        assert!(last.values.contains_key(&steal));
    }
    assert!(!last.values.keys().any(|k| k.contains("no_such_one")));
}

/// Every counter the guest has is told of, programmed or not.
#[test]
fn a_guest_s_counters_are_all_there() {
    let Some(vm) = TestVm::spinning(&["--pmu", "intel-v2"]) else {
        return;
    };
    let metrics = vm.scrape();
    let on = metrics
        .values
        .keys()
        .filter(|k| k.starts_with("perfvisor_guest_counter_on{"))
        .count();
    assert_eq!(on, 7, "four general counters and three fixed ones");
    assert!(metrics.values.contains_key(
        "perfvisor_guest_counter_overflows_total{vm=\"scraped\",vcpu=\"0\",counter=\"fixed2\"}"
    ));
}

/// The vendor's names were unknown to `--metrics-events`. perf is asked for them, here one that knows two.
#[test]
fn a_vendors_event_is_taken_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let perf = dir.path().join("perf");
    // Written by another process: a program that this one has open for writing could not be executed.
    let write = r#"cat >"$0" <<'END'
#!/bin/sh
echo '[{"EventName": "made.up", "Encoding": "cpu/event=0xC4/"}, {"EventName": "made.hard", "Encoding": "cpu/event=0xC4,any=1/"}]'
END
chmod +x "$0""#;
    assert!(
        Command::new("sh")
            .args(["-c", write])
            .arg(&perf)
            .status()
            .unwrap()
            .success()
    );
    for (events, path, words) in [
        ("made.upp", dir.path(), "did you mean 'made.up'"),
        ("made.hard", dir.path(), "needs 'any'"),
        ("made.up", Path::new("/nowhere"), "linux-perf"),
    ] {
        let out = Command::new(PROGRAM)
            .arg("run")
            .args(SERVED)
            .args(["--metrics-events", events])
            .env("XDG_RUNTIME_DIR", dir.path())
            .env("PATH", path)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{stderr}");
        assert!(
            stderr.contains("--metrics-events: ") && stderr.contains(words),
            "{stderr}"
        );
        assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
    }
    let more = ["--metrics-events", "task-clock,made.up:u"];
    let vm = SpinningVm::start_with("scraped", &[&SERVED[..], &more].concat(), ("PATH", dir.path()));
    let Some(vm) = vm.and_then(TestVm::of) else { return };
    eventually("it is counted, or left out by its name", || {
        let labels = "event=\"made.up:u\"";
        vm.scrape().values.keys().any(|series| series.contains(labels))
            || vm
                .vm
                .said()
                .iter()
                .any(|line| line.contains("warn") && line.contains("made.up:u"))
    });
}

/// Only GET and HEAD of /metrics are served, and every refusal is an answer.
#[test]
fn other_requests_are_refused() {
    let Some(vm) = TestVm::spinning(&[]) else { return };
    for (request, status) in [
        ("GET / HTTP/1.1\r\n\r\n".to_owned(), "404"),
        (
            "POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc".to_owned(),
            "405",
        ),
        ("nonsense\r\n\r\n".to_owned(), "400"),
        (
            format!("GET /metrics HTTP/1.1\r\nX: {}\r\n\r\n", "y".repeat(20_000)),
            "431",
        ),
        ("HEAD /metrics HTTP/1.1\r\n\r\n".to_owned(), "200"),
        ("GET /metrics?x=1 HTTP/1.1\r\n\r\n".to_owned(), "200"),
    ] {
        let (line, body) = vm.ask(&request);
        assert!(line.starts_with(&format!("HTTP/1.1 {status} ")), "{line}");
        assert_eq!(body.is_empty(), request.starts_with("HEAD"), "{line}");
    }
}

/// Clients that send garbage, nothing, too much, or never read cost others nothing.
#[test]
fn hostile_clients_do_not_keep_others_out() {
    let Some(vm) = TestVm::spinning(&[]) else { return };
    let before = vm.scrape();
    // More silent connections than there may be, held open, some with half a request.
    let silent: Vec<TcpStream> = (0..80)
        .map(|i| {
            let mut stream = vm.connect();
            if i % 2 == 0 {
                let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nX: ");
            }
            stream
        })
        .collect();
    // Requests whose replies nobody reads.
    let deaf: Vec<TcpStream> = (0..20)
        .map(|_| {
            let mut stream = vm.connect();
            let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n");
            stream
        })
        .collect();
    let mut garbage = vm.connect();
    let _ = garbage.write_all(&[0xff; 100_000]);
    let mut half = vm.connect();
    let _ = half.write_all(b"GET /metr");
    half.shutdown(Shutdown::Both).unwrap();
    eventually("an honest scrape is served", || {
        // The connection may be the one that has to make room while others are opened.
        let mut stream = vm.connect();
        let mut text = String::new();
        let asked = stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n");
        asked.is_ok() && stream.read_to_string(&mut text).is_ok() && text.ends_with("# EOF\n")
    });
    drop((silent, deaf, garbage));
    let refused = "perfvisor_metrics_refused_total{vm=\"scraped\"}";
    eventually("those that were refused are counted", || {
        vm.scrape().value(refused) > before.value(refused)
    });
}

/// A Unix socket serves the same and goes with the VM; wrong and taken addresses are one line and status 2.
#[test]
fn addresses_are_checked_before_anything_runs() {
    let Some(vm) = TestVm::spinning(&[]) else { return };
    let dir = tempfile::tempdir().unwrap();
    let taken = format!("127.0.0.1:{}", vm.port);
    for (args, word) in [
        (vec!["--metrics", taken.as_str()], "choose another"),
        (vec!["--metrics", "0.0.0.0:0"], "loopback"),
        (vec!["--metrics", "9464"], "127.0.0.1:PORT"),
        (vec!["--metrics", "unix:/nowhere/at/all"], "/nowhere/at/all"),
        (
            vec!["--metrics", "127.0.0.1:0", "--metrics-events", "cyclez"],
            "cyclez",
        ),
        (vec!["--metrics-events", "cycles"], "--metrics"),
    ] {
        let out = Command::new(PROGRAM)
            .arg("run")
            .args(&args)
            .env("XDG_RUNTIME_DIR", dir.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(
            stderr.contains(word) && stderr.trim_end().lines().count() == 1,
            "{args:?}: {stderr}"
        );
    }
    let path = dir.path().join("m.sock");
    let mut child = Command::new(PROGRAM)
        .args(["run", "--memory", "32M", "--cmdline", "loop", "--pmu", "off"])
        .args([
            "--name",
            "scraped",
            "--metrics",
            &format!("unix:{}", path.display()),
        ])
        .env("XDG_RUNTIME_DIR", dir.path())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    eventually("it listens", || UnixStream::connect(&path).is_ok());
    let stream = UnixStream::connect(&path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
    let (status, body) = reply(stream, "GET /metrics HTTP/1.1\r\n\r\n");
    assert_eq!(status, "HTTP/1.1 200 OK");
    let metrics = Metrics::parse(&body);
    assert!(
        metrics
            .values
            .keys()
            .any(|k| k.starts_with("perfvisor_vm_info{") && k.contains("pmu=\"off\""))
    );
    assert!(!metrics.kinds.contains_key("perfvisor_guest_counter_on"));
    let stop = Command::new(PROGRAM)
        .args(["ctl", "scraped", "stop"])
        .env("XDG_RUNTIME_DIR", dir.path())
        .output()
        .unwrap();
    assert_eq!(stop.status.code(), Some(0));
    child.wait().unwrap();
    assert!(!path.exists());
}
