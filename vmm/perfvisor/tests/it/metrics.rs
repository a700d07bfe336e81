//! Metrics of the exporter: valid OpenMetrics, monotonic counters, and all guest counters.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::{Command, Stdio};

use crate::common::host::Host;
use crate::common::vm::{PROGRAM, assert_contains, eventually, has_kvm};

/// Starts a VM and an exporter that counts `events`.
fn exported(events: &str, path: Option<&Path>, vm_args: &[&str]) -> Option<Host> {
    if !has_kvm() {
        return None;
    }
    let mut program = Command::new(PROGRAM);
    if let Some(path) = path {
        program.env("PATH", path);
    }
    let mut host = Host::with_exporter(program, &["--events", events]);
    host.add("scraped", vm_args);
    Some(host)
}

fn scrape(host: &Host) -> Metrics {
    Metrics::parse(&host.metrics_with(&["scraped"]))
}

/// Strict parser of a scrape with counters, gauges and infos of OpenMetrics 1.0.
struct Metrics {
    kinds: BTreeMap<String, String>,
    /// Values of the metrics, by series name and labels.
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
            let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
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
            for label in labels.split("\",").filter(|label| !label.is_empty()) {
                let (key, text) = label.split_once("=\"").expect(line);
                assert!(names.insert(key), "{line}");
                assert!(!text.trim_end_matches('"').contains(['"', '\\']), "{line}");
            }
            if !family.starts_with("perfvisor_exporter_") {
                assert!(names.contains("vm"), "{line}");
            }
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

/// No counter decreases between scrapes. The count of cycles increases on each vCPU, and the
/// enabled and running times of each event are exported.
#[test]
fn counters_are_well_formed_and_monotonic() {
    let events = "cycles,task-clock,cycles,kvm:no_such_one";
    let Some(host) = exported(events, None, &["--cpus", "2"]) else {
        return;
    };
    let cycles = |vcpu| {
        format!(
            "perfvisor_event_count_total{{vm=\"scraped\",vcpu=\"{vcpu}\",event=\"cycles\",backing=\"clock\"}}"
        )
    };
    let hardware = || {
        scrape(&host)
            .values
            .keys()
            .any(|k| k.contains("backing=\"hardware\""))
    };
    let mut last = scrape(&host);
    let mut scrapes = 0;
    eventually("both vCPUs count cycles", || {
        let now = scrape(&host);
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

#[test]
fn every_guest_counter_has_series() {
    let Some(host) = exported("task-clock", None, &["--pmu", "intel-v2"]) else {
        return;
    };
    let metrics = scrape(&host);
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

/// `--events` accepts vendor event names, which the installed perf resolves. In this test, perf is
/// a script with two events.
#[test]
fn vendor_event_names_are_resolved_by_perf() {
    let dir = tempfile::tempdir().unwrap();
    let perf = dir.path().join("perf");
    // Write the script with another process, for the reason given at `put_program`.
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
        ("made.hard", dir.path(), "requires the unsupported term 'any'"),
        ("made.up", Path::new("/nowhere"), "linux-perf"),
    ] {
        let out = Command::new(PROGRAM)
            .args(["exporter", "--listen", "127.0.0.1:0", "--events", events])
            .env("XDG_RUNTIME_DIR", dir.path())
            .env("PATH", path)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{stderr}");
        assert_contains(&stderr, "--events: ");
        assert_contains(&stderr, words);
        assert_eq!(stderr.trim_end().lines().count(), 1, "{stderr}");
    }
    let Some(host) = exported("task-clock,made.up:u", Some(dir.path()), &[]) else {
        return;
    };
    eventually("the event is counted or reported as unsupported", || {
        let labels = "event=\"made.up:u\"";
        scrape(&host).values.keys().any(|series| series.contains(labels))
            || host
                .stderr()
                .iter()
                .any(|line| line.contains("cannot count") && line.contains("made.up:u"))
    });
}
