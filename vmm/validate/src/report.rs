//! What `perfvisor validate` says: rows, the host they are from, and the score.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use super::judge::{Evidence, Tolerance, Verdict, judge};
use crate::host::KvmSeen;
use control_api::events::format::thousands;

/// Where a count is from that does not depend on time.
pub const KNOWN: &str = "counted by hand";

/// One measurement, or one thing that cannot be measured here.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What kind of check it is.
    pub check: Check,
    /// The event.
    pub event: String,
    /// Who counts: hardware, clock, exact, paravirtual.
    pub backing: &'static str,
    /// What the guest did.
    pub workload: String,
    /// Which guest: built-in or Linux.
    pub guest_kind: GuestKind,
    /// What the guest read.
    pub guest: Option<u64>,
    /// What the host says.
    pub host: Option<u64>,
    /// What it must be.
    pub expected: Option<u64>,
    /// Where the expectation comes from.
    pub basis: &'static str,
    /// Guest over expected.
    pub ratio: Option<f64>,
    /// How far the guest may be from the expectation.
    pub tolerance: Option<Tolerance>,
    /// Share of its enabled time the event was on, in percent.
    pub running_percent: Option<f64>,
    /// It goes with time, which a host that does other things may spoil: such a row, and no other, is
    /// measured again if it is off.
    pub of_time: bool,
    /// How often it was measured until it was right; the last one is shown.
    pub tries: u32,
    /// What it comes to.
    pub verdict: Verdict,
    /// Why it failed, or why it is not supported.
    pub reason: Option<String>,
}

/// Kinds of checks: the parts of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Check {
    /// Events that are counted.
    Counting,
    /// More events than counters.
    Multiplexing,
    /// An operator counts at the same time.
    Contention,
    /// Overflows and samples.
    Sampling,
}

/// Which guest measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestKind {
    /// The one that ships in the binary.
    BuiltIn,
    /// Linux, with its perf.
    Linux,
}

impl Row {
    /// A row with nothing in it yet, failed until judged.
    pub fn new(
        check: Check,
        event: impl Into<String>,
        backing: &'static str,
        workload: impl Into<String>,
    ) -> Self {
        Self {
            check,
            event: event.into(),
            backing,
            workload: workload.into(),
            guest_kind: GuestKind::BuiltIn,
            guest: None,
            host: None,
            expected: None,
            basis: "",
            ratio: None,
            tolerance: None,
            running_percent: None,
            of_time: false,
            tries: 1,
            verdict: Verdict::Fail,
            reason: Some("it was not measured".into()),
        }
    }

    /// Judges `seen` and keeps it. `basis` says where the expectation comes from.
    #[must_use]
    pub fn judged(mut self, seen: &Evidence, basis: &'static str) -> Self {
        (self.verdict, self.reason) = judge(seen);
        self.guest = seen.guest;
        self.host = seen.host.map(|host| host.value);
        self.expected = seen.expected.map(|expected| expected.value);
        self.tolerance = seen
            .expected
            .map(|e| e.tolerance)
            .or(seen.host.map(|h| h.tolerance));
        self.ratio = self
            .guest
            .zip(self.expected.or(self.host))
            .filter(|(_, expected)| *expected > 0)
            .map(|(guest, expected)| guest as f64 / expected as f64);
        self.basis = basis;
        // Guest and host differ, where they must be one number: no other measurement makes that right.
        let apart = seen
            .guest
            .zip(seen.host)
            .is_some_and(|(guest, host)| host.tolerance == Tolerance::Exact && guest != host.value);
        let exact = self
            .tolerance
            .is_none_or(|tolerance| tolerance == Tolerance::Exact);
        self.of_time = !exact && !apart && basis != KNOWN;
        self
    }

    /// Whether it may be measured once more.
    pub fn is_off_in_time(&self) -> bool {
        self.of_time && self.verdict == Verdict::Fail
    }

    /// With the share of its time it was on.
    #[must_use]
    pub fn running(mut self, running_ns: u64, enabled_ns: u64) -> Self {
        self.running_percent = (enabled_ns > 0).then(|| 100.0 * running_ns as f64 / enabled_ns as f64);
        self
    }

    /// The same, where the host tells.
    #[must_use]
    pub fn running_if_known(self, running_ns: Option<u64>, enabled_ns: Option<u64>) -> Self {
        match (running_ns, enabled_ns) {
            (Some(running_ns), Some(enabled_ns)) => self.running(running_ns, enabled_ns),
            _ => self,
        }
    }

    /// Not supported here, because of `why`. What that is said on must have been looked at.
    #[must_use]
    pub fn unsupported(mut self, why: impl Into<String>) -> Self {
        self.verdict = Verdict::NotSupported;
        self.reason = Some(why.into());
        self
    }

    /// Failed, because of `why`.
    #[must_use]
    pub fn failed(mut self, why: impl Into<String>) -> Self {
        self.verdict = Verdict::Fail;
        self.reason = Some(why.into());
        self
    }
}

/// The rows measured so far. Each one is shown when it is added.
pub struct Rows<'a> {
    rows: Vec<Row>,
    guest_kind: GuestKind,
    on_row: &'a mut dyn FnMut(&Row),
}

impl<'a> Rows<'a> {
    /// No rows yet. `on_row` is called with each row that is added.
    pub fn new(on_row: &'a mut dyn FnMut(&Row)) -> Self {
        Self {
            rows: Vec::new(),
            guest_kind: GuestKind::BuiltIn,
            on_row,
        }
    }

    /// Sets the guest that rows are of from now on.
    pub fn set_guest(&mut self, kind: GuestKind) {
        self.guest_kind = kind;
    }

    /// Adds a row that will not change any more.
    pub fn push(&mut self, row: Row) {
        let row = Row {
            guest_kind: self.guest_kind,
            ..row
        };
        (self.on_row)(&row);
        self.rows.push(row);
    }

    /// Adds rows that will not change any more.
    pub fn extend(&mut self, rows: impl IntoIterator<Item = Row>) {
        rows.into_iter().for_each(|row| self.push(row));
    }

    /// All rows.
    pub fn into_vec(self) -> Vec<Row> {
        self.rows
    }
}

/// Where the numbers are from; all a bug report needs and no secrets.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Summary {
    /// Version of Perfvisor.
    pub perfvisor: String,
    /// Kernel release of the host.
    pub host_kernel: String,
    /// The host's processor, as the kernel names it.
    pub host_cpu: String,
    /// CPUs of the host.
    pub host_cpus: usize,
    /// The host is a virtual machine itself.
    pub host_is_virtual: bool,
    /// KVM.
    pub kvm: Option<KvmSeen>,
    /// Counters of the host's PMU that a vCPU can have, or why there are none.
    pub host_pmu: String,
    /// `perf_event_paranoid`.
    pub perf_event_paranoid: Option<i32>,
    /// The guest's PMU.
    pub pmu: String,
    /// The guest's TSC in Hz, as it measured it.
    pub guest_tsc_hz: u64,
    /// Release of the Linux guest's kernel, or why none ran.
    pub guest_kernel: Option<String>,
    /// Version of its perf.
    pub guest_perf: Option<String>,
    /// Why the Linux guest did not run.
    pub linux_guest_skipped: Option<String>,
    /// How long it all took, in seconds.
    pub seconds: f64,
}

/// The whole report.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// Version of this format.
    pub format: u32,
    /// What was measured.
    pub rows: Vec<Row>,
    /// How many passed.
    pub passed: usize,
    /// How many failed.
    pub failed: usize,
    /// How many are not supported here.
    pub not_supported: usize,
    /// Where.
    pub summary: Summary,
}

impl Report {
    /// Of these rows.
    pub fn new(rows: Vec<Row>, summary: Summary) -> Self {
        let count = |verdict| rows.iter().filter(|row| row.verdict == verdict).count();
        Self {
            format: 1,
            passed: count(Verdict::Pass),
            failed: count(Verdict::Fail),
            not_supported: count(Verdict::NotSupported),
            rows,
            summary,
        }
    }

    /// Nothing failed, and something was measured.
    pub fn is_good(&self) -> bool {
        self.failed == 0 && self.passed > 0
    }

    /// The whole report as text.
    pub fn text(&self) -> String {
        let mut text = ReportText::default();
        let mut out: String = self.rows.iter().map(|row| text.row(row)).collect();
        out.push_str(&text.end(self));
        out
    }

    fn summarize(&self, out: &mut String) {
        let s = &self.summary;
        let mut line = |name: &str, value: &str| {
            let _ = writeln!(out, "{name:<16}{value}");
        };
        line("perfvisor", &s.perfvisor);
        line(
            "host",
            &format!(
                "Linux {}, {}, {} CPUs{}",
                s.host_kernel,
                s.host_cpu,
                s.host_cpus,
                if s.host_is_virtual { ", itself virtual" } else { "" }
            ),
        );
        if let Some(kvm) = &s.kvm {
            line("KVM", &kvm.flavour);
        }
        line("host PMU", &s.host_pmu);
        if let Some(level) = s.perf_event_paranoid {
            line("paranoid", &level.to_string());
        }
        line(
            "guest",
            &format!("PMU {}, TSC {:.3} GHz", s.pmu, s.guest_tsc_hz as f64 / 1e9),
        );
        if let Some(kernel) = &s.guest_kernel {
            line(
                "Linux guest",
                &format!(
                    "{kernel}, {}",
                    s.guest_perf.as_deref().unwrap_or("perf of unknown version")
                ),
            );
        }
        if let Some(why) = &s.linux_guest_skipped {
            line("Linux guest", &format!("not run: {why}"));
        }
        let _ = writeln!(
            out,
            "\n{} passed, {} failed, {} not supported here, in {:.1} s: {}",
            self.passed,
            self.failed,
            self.not_supported,
            s.seconds,
            if self.is_good() { "PASS" } else { "FAIL" }
        );
    }
}

/// The text of a report, row by row as they are measured.
#[derive(Default)]
pub struct ReportText {
    /// The section of the last row.
    section: Option<(GuestKind, Check)>,
    /// Number of each footnote.
    notes: BTreeMap<String, usize>,
}

impl ReportText {
    /// Returns the line of a row, after the head of its section if it is the first one there.
    pub fn row(&mut self, row: &Row) -> String {
        let mut out = String::new();
        let section = (row.guest_kind, row.check);
        if self.section != Some(section) {
            if self.section.is_some() {
                out.push('\n');
            }
            self.section = Some(section);
            head(&mut out, row.guest_kind, row.check);
        }
        let number = |n: Option<u64>| n.map_or_else(|| "-".to_owned(), thousands);
        let note = match &row.reason {
            Some(why) => {
                let next = self.notes.len() + 1;
                format!(" [{}]", self.notes.entry(why.clone()).or_insert(next))
            }
            None => String::new(),
        };
        let tries = if row.tries > 1 {
            format!(" ({} try)", ordinal(row.tries))
        } else {
            String::new()
        };
        let _ = writeln!(
            out,
            "  {:<22} {:<12} {:<30} {:>15} {:>15} {:>15} {:>6} {:>10} {:>5}  {}{note}{tries}",
            row.event,
            row.backing,
            row.workload,
            number(row.guest),
            number(row.host),
            number(row.expected),
            row.ratio.map_or_else(|| "-".into(), |r| format!("{r:.3}")),
            row.tolerance.map_or_else(|| "-".into(), |t| t.to_string()),
            row.running_percent
                .map_or_else(|| "-".into(), |p| format!("{p:.0}%")),
            row.verdict,
        );
        out
    }

    /// Returns what follows the last row: the footnotes, the host and the score.
    pub fn end(self, report: &Report) -> String {
        let mut out = String::new();
        if self.section.is_some() {
            out.push('\n');
        }
        let mut notes: Vec<_> = self.notes.into_iter().collect();
        notes.sort_by_key(|(_, number)| *number);
        for (note, number) in &notes {
            let _ = writeln!(out, "[{number}] {note}");
        }
        if !notes.is_empty() {
            out.push('\n');
        }
        report.summarize(&mut out);
        out
    }
}

/// Writes the head of a section.
fn head(out: &mut String, guest: GuestKind, check: Check) {
    let guest = match guest {
        GuestKind::BuiltIn => "built-in guest",
        GuestKind::Linux => "Linux guest",
    };
    let check = match check {
        Check::Counting => "counting",
        Check::Multiplexing => "more events than counters",
        Check::Contention => "an operator counts at the same time",
        Check::Sampling => "sampling",
    };
    let _ = writeln!(
        out,
        "{guest}: {check}\n  {:<22} {:<12} {:<30} {:>15} {:>15} {:>15} {:>6} {:>10} {:>5}  verdict",
        "event", "backing", "workload", "guest", "host", "expected", "ratio", "tolerance", "on"
    );
}

/// 2 as "2nd".
fn ordinal(n: u32) -> String {
    match n {
        1 => "1st".into(),
        2 => "2nd".into(),
        3 => "3rd".into(),
        n => format!("{n}th"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::Expected;

    /// What is counted is right or wrong; only what goes with time may be measured again, and the table and
    /// the JSON say that it was.
    #[test]
    fn only_time_is_measured_again_and_that_is_said() {
        assert!(!row(5, 6).is_off_in_time());
        let timed = |guest, host: Option<u64>, basis| {
            let exactly = |value| Expected {
                value,
                tolerance: Tolerance::Exact,
            };
            let seen = Evidence {
                guest: Some(guest),
                host: host.map(exactly),
                expected: Some(Expected {
                    value: 100,
                    tolerance: Tolerance::Percent(5.0),
                }),
            };
            Row::new(Check::Counting, "cycles", "clock", "busy").judged(&seen, basis)
        };
        assert!(timed(80, Some(80), "CPU time").is_off_in_time());
        assert!(!timed(99, Some(99), "CPU time").is_off_in_time(), "it is right");
        assert!(
            !timed(80, Some(81), "CPU time").is_off_in_time(),
            "guest and host differ"
        );
        assert!(!timed(80, None, KNOWN).is_off_in_time());
        let again = Row {
            tries: 2,
            ..timed(99, None, "CPU time")
        };
        let report = Report::new(vec![again], Summary::default());
        assert!(report.text().contains("PASS (2nd try)"), "{}", report.text());
        let json = serde_json::to_value(&report).unwrap();
        assert_eq!(
            (&json["rows"][0]["tries"], &json["rows"][0]["of_time"]),
            (&2.into(), &true.into())
        );
    }

    fn row(guest: u64, expected: u64) -> Row {
        let seen = Evidence {
            guest: Some(guest),
            host: None,
            expected: Some(Expected {
                value: expected,
                tolerance: Tolerance::Exact,
            }),
        };
        Row::new(Check::Counting, "instructions", "exact", "busy").judged(&seen, "known")
    }

    /// One wrong number makes the whole report fail, in words and for programs.
    #[test]
    fn one_failure_fails_the_report() {
        let good = Report::new(vec![row(5, 5), row(7, 7)], Summary::default());
        assert!(good.is_good() && good.text().contains("2 passed, 0 failed"));
        let bad = Report::new(vec![row(5, 5), row(7, 8)], Summary::default());
        assert!(!bad.is_good());
        assert!(bad.text().contains("FAIL [1]") && bad.text().contains("[1] off the expectation"));
        let json: serde_json::Value = serde_json::to_value(&bad).unwrap();
        assert_eq!(json["failed"], 1);
        assert_eq!(json["rows"][1]["verdict"], "FAIL");
        assert_eq!(json["rows"][1]["guest"], 7);
    }

    /// A run that measured nothing proved nothing.
    #[test]
    fn nothing_measured_is_no_success() {
        assert!(!Report::new(vec![], Summary::default()).is_good());
        let only = Row::new(Check::Counting, "cycles", "hardware", "-").unsupported("no PMU");
        assert!(!Report::new(vec![only], Summary::default()).is_good());
    }

    /// What is printed row by row is the whole report, and each row is a line at once.
    #[test]
    fn rows_are_shown_as_they_are_added() {
        let mut text = ReportText::default();
        let mut shown = String::new();
        let mut lines = Vec::new();
        let mut on_row = |row: &Row| {
            shown.push_str(&text.row(row));
            lines.push(shown.lines().count());
        };
        let mut rows = Rows::new(&mut on_row);
        rows.push(row(5, 5));
        rows.extend([
            row(7, 7),
            Row {
                check: Check::Sampling,
                ..row(8, 9)
            },
        ]);
        rows.set_guest(GuestKind::Linux);
        rows.push(Row {
            check: Check::Sampling,
            ..row(1, 1)
        });
        let report = Report::new(rows.into_vec(), Summary::default());
        // A head of two lines before the first row of each section, and a blank line between them.
        assert_eq!(lines, [3, 4, 8, 12]);
        shown.push_str(&text.end(&report));
        assert_eq!(shown, report.text());
        assert!(shown.contains("Linux guest: sampling"), "{shown}");
    }

    #[test]
    fn reasons_are_footnotes_said_once() {
        let why = "no PMU";
        let rows = ["cycles", "branches"]
            .map(|event| Row::new(Check::Counting, event, "hardware", "-").unsupported(why));
        let text = Report::new(rows.to_vec(), Summary::default()).text();
        assert_eq!(text.matches("not supported here [1]").count(), 2, "{text}");
        assert_eq!(text.matches("[1] no PMU").count(), 1, "{text}");
    }
}
