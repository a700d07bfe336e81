//! The exporter with the real Prometheus and `go tool pprof`, if installed.

use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::common::host::{Host, get};
use crate::common::test_lock;
use crate::common::vm::{PROGRAM, eventually};
use serde_json::Value;

/// Number of VMs that Prometheus scrapes.
const VMS: usize = 20;

fn is_installed(program: &str, argument: &str) -> bool {
    let found = Command::new(program)
        .arg(argument)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    let found = found.is_ok_and(|status| status.success());
    if !found {
        test_support::skip::skipped(&format!("{program} is not installed"), false);
    }
    found
}

/// A Prometheus server; killed on drop.
struct Prometheus {
    process: Child,
    port: u16,
}

impl Prometheus {
    fn query(&self, query: &str) -> Vec<Value> {
        let encoded: String = query.bytes().map(|b| format!("%{b:02x}")).collect();
        let Ok(stream) = TcpStream::connect(("127.0.0.1", self.port)) else {
            return Vec::new();
        };
        stream.set_read_timeout(Some(Duration::from_secs(300))).unwrap();
        let (_, body) = get_lax(stream, &format!("/api/v1/query?query={encoded}"));
        let answer: Value = serde_json::from_slice(&body).unwrap_or_default();
        answer["data"]["result"].as_array().cloned().unwrap_or_default()
    }

    /// Runs a query and returns its only value.
    fn value(&self, query: &str) -> Option<f64> {
        self.query(query).first()?["value"][1].as_str()?.parse().ok()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Sends a request like [`get`], but with HTTP/1.0, in which the end of the connection ends the
/// reply.
fn get_lax(mut stream: TcpStream, target: &str) -> (String, Vec<u8>) {
    use std::io::{Read, Write};
    write!(stream, "GET {target} HTTP/1.0\r\nHost: p\r\n\r\n").unwrap();
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    let end = bytes
        .windows(4)
        .position(|w| w == b"\r\n\r\n")
        .map_or(bytes.len(), |at| at + 4);
    let body = bytes.split_off(end);
    (String::from_utf8_lossy(&bytes).into_owned(), body)
}

/// Prometheus scrapes 20 VMs concurrently, discovers the VMs over HTTP, and detects a stopped VM.
#[test]
fn prometheus_scrapes_20_vms() {
    if !is_installed("prometheus", "--version") {
        return;
    }
    // Run alone, because Prometheus limits a scrape to five seconds.
    let _lock = test_lock::exclusive();
    let Some(mut host) = Host::start(&[]) else { return };
    for n in 0..VMS {
        let name = format!("vm{n}");
        host.add(&name, &[]);
        // Twenty spinning guests would saturate the host.
        let paused = Command::new(PROGRAM)
            .args(["ctl", &name, "pause"])
            .env("XDG_RUNTIME_DIR", host.runtime.path())
            .output()
            .unwrap();
        assert!(paused.status.success(), "{paused:?}");
    }
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("prometheus.yml");
    let exporter = format!("127.0.0.1:{}", host.port);
    std::fs::write(
        &config,
        format!(
            "global: {{scrape_interval: 1s, scrape_timeout: 1s}}\n\
             scrape_configs:\n\
             - job_name: hosts\n  scrape_interval: 5s\n  scrape_timeout: 5s\n  static_configs: [{{targets: ['{exporter}']}}]\n\
             - job_name: vms\n  scrape_interval: 5s\n  scrape_timeout: 5s\n\
             \x20 http_sd_configs: [{{url: 'http://{exporter}/sd', refresh_interval: 1s}}]\n\
             \x20 relabel_configs: [{{source_labels: [__meta_perfvisor_vm], target_label: instance}}]\n"
        ),
    )
    .unwrap();
    let port = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let prometheus = Prometheus {
        process: Command::new("prometheus")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!(
                "--storage.tsdb.path={}",
                dir.path().join("data").display()
            ))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
        port,
    };
    let of_ours = "vm=~\"vm[0-9]+\"";
    let count = |query: &str| prometheus.value(query).unwrap_or_default();
    eventually("all VMs are up", || {
        count(&format!(
            "sum(perfvisor_exporter_vm_up{{job=\"hosts\",{of_ours}}})"
        )) == VMS as f64
    });
    eventually("each is a target of its own", || {
        count("count(up{job=\"vms\",instance=~\"vm[0-9]+\"} == 1)") == VMS as f64
    });
    assert_eq!(
        count(&format!(
            "count(perfvisor_vcpu_exits_total{{job=\"hosts\",{of_ours}}} > 0)"
        )),
        VMS as f64
    );
    assert_eq!(
        count(&format!("sum(perfvisor_vm_paused{{job=\"hosts\",{of_ours}}})")),
        VMS as f64
    );
    // The number of series on which docs/guide/fleet.md bases its estimate.
    let series = count(&format!(
        "count({{__name__=~\"perfvisor_.+\",job=\"hosts\",{of_ours}}})"
    ));
    println!("series of a VM of 1 vCPU: {}", series / VMS as f64);
    println!(
        "a scrape of {VMS} VMs: {} s",
        count("scrape_duration_seconds{job=\"hosts\"}")
    );

    assert_dashboard(&prometheus, &host.text("/metrics"));

    host.signal("vm7", "-STOP");
    eventually("the one that is stopped is down, and the others are not", || {
        let down = prometheus.query(&format!(
            "perfvisor_exporter_vm_up{{job=\"hosts\",{of_ours}}} == 0"
        ));
        down.len() == 1 && down[0]["metric"]["vm"] == "vm7"
    });
    assert_eq!(count("up{job=\"hosts\"}"), 1.0);
}

/// Checks that each query of the dashboard is valid and refers to existing metrics.
fn assert_dashboard(prometheus: &Prometheus, metrics: &str) {
    const DASHBOARD: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/grafana/perfvisor-fleet.json"
    );
    let dashboard: Value = serde_json::from_str(&std::fs::read_to_string(DASHBOARD).unwrap()).unwrap();
    let mut queries = 0;
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().unwrap() {
            let query = target["expr"].as_str().unwrap();
            let filled = query
                .replace("$vm", ".*")
                .replace("$instance", ".*")
                .replace("$__rate_interval", "1m");
            let encoded: String = filled.bytes().map(|b| format!("%{b:02x}")).collect();
            let stream = TcpStream::connect(("127.0.0.1", prometheus.port)).unwrap();
            let (_, body) = get_lax(stream, &format!("/api/v1/query?query={encoded}"));
            let answer: Value = serde_json::from_slice(&body).unwrap();
            assert_eq!(answer["status"], "success", "{query}: {answer}");
            for name in query.split(|c: char| !c.is_ascii_alphanumeric() && c != '_') {
                let of_ours = name.starts_with("perfvisor_");
                // A guest whose counters are unused lacks the metric of guest counters.
                let missing_here = name == "perfvisor_guest_counter_events_total";
                let there = metrics.contains(&format!("{name}{{")) || metrics.contains(&format!("{name} "));
                assert!(!of_ours || missing_here || there, "{name} is no metric");
            }
            queries += 1;
        }
    }
    assert!(queries > 10);
}

/// Go's pprof reads a profile of the exporter that contains the functions of the guest.
#[test]
fn go_pprof_reads_exporter_profile() {
    if !is_installed("go", "version") {
        return;
    }
    let Some(host) = Host::start(&[("a", &[])]) else {
        return;
    };
    let file = host.runtime.path().join("profile.pb.gz");
    // On a busy host, the guest may hardly run during a profile.
    eventually("the guest's function is in a profile", || {
        let (status, body) = get(host.connect(), "/debug/pprof/profile?vm=a&seconds=2&hz=200");
        assert_eq!(status, 200, "{}", String::from_utf8_lossy(&body));
        std::fs::write(&file, body).unwrap();
        let out = Command::new("go")
            .args(["tool", "pprof", "-top", "-sample_index=samples"])
            .arg(&file)
            .env("HOME", host.runtime.path())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success(), "{said}");
        let text = String::from_utf8_lossy(&out.stdout);
        assert!(text.contains("Type: samples"), "{text}");
        text.contains("Time: ") && text.contains("spin_hot")
    });
}
