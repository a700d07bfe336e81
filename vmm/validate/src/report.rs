//! The report of `perfvisor validate`: rows, host description and score.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use super::judge::{CountComparison, Tolerance, Verdict, judge};
use crate::host::KvmSummary;
use control_api::events::format::thousands;

/// Origin, for the report, of an expected count that does not depend on time.
pub const KNOWN: &str = "counted by hand";

/// A measurement, or an event that cannot be measured on this host.
#[derive(Clone, Debug, Serialize)]
pub struct ValidationRow {
    /// Type of check.
    pub check: ValidationCheckKind,
    /// Name of the event.
    pub event: String,
    /// Mechanism that counts the event (backing): hardware, clock, exact or paravirtual.
    pub backing: &'static str,
    /// Work that the guest did.
    pub workload: String,
    /// Guest in which the row was measured (built-in or Linux).
    pub guest_kind: ValidationGuestKind,
    /// Count of the event in the guest.
    pub guest: Option<u64>,
    /// Count of the event on the host.
    pub host: Option<u64>,
    /// Expected count of the event.
    pub expected: Option<u64>,
    /// Description of how the expected count was obtained.
    pub basis: &'static str,
    /// Ratio of the guest's count to the expected one.
    pub ratio: Option<f64>,
    /// Permitted deviation of the guest's count from the expected one.
    pub tolerance: Option<Tolerance>,
    /// Share of the enabled time that the event ran, in percent.
    pub running_percent: Option<f64>,
    /// `true` if the count depends on time and other load on the host can disturb it. Only such a
    /// row is measured several times.
    pub of_time: bool,
    /// Number of measurements of this row. The row shows their median.
    pub measurements: u32,
    /// Lowest and highest ratio of the guest's count to the expected one among several
    /// measurements.
    pub spread: Option<[f64; 2]>,
    /// Verdict on the row.
    pub verdict: Verdict,
    /// Reason for a failure or for missing support.
    pub reason: Option<String>,
}

/// Type of a check. Each type is a section of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ValidationCheckKind {
    /// Counting of events for which the PMU has enough counters.
    Counting,
    /// Multiplexing of more events than counters.
    Multiplexing,
    /// Contention with an operator who counts the same vCPU.
    Contention,
    /// Overflow interrupts in the guest, and samples that an operator takes.
    Sampling,
}

/// Guest in which a row was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ValidationGuestKind {
    /// The guest embedded in the program.
    BuiltIn,
    /// A Linux guest with perf.
    Linux,
}

impl ValidationRow {
    /// Creates a row without counts. The row counts as failed until it is judged.
    pub fn new(
        check: ValidationCheckKind,
        event: impl Into<String>,
        backing: &'static str,
        workload: impl Into<String>,
    ) -> Self {
        Self {
            check,
            event: event.into(),
            backing,
            workload: workload.into(),
            guest_kind: ValidationGuestKind::BuiltIn,
            guest: None,
            host: None,
            expected: None,
            basis: "",
            ratio: None,
            tolerance: None,
            running_percent: None,
            of_time: false,
            measurements: 1,
            spread: None,
            verdict: Verdict::Fail,
            reason: Some("it was not measured".into()),
        }
    }

    /// Judges the counts `seen` and stores them in the row. `basis` describes the origin of the
    /// expected count.
    #[must_use]
    pub fn with_verdict(mut self, seen: &CountComparison, basis: &'static str) -> Self {
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
        // If guest and host must have equal counts, a difference is a failure that does not depend
        // on time.
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

    /// Sets the share of time that the event ran.
    #[must_use]
    pub fn running(mut self, running_ns: u64, enabled_ns: u64) -> Self {
        self.running_percent = (enabled_ns > 0).then(|| 100.0 * running_ns as f64 / enabled_ns as f64);
        self
    }

    /// Sets the share of time that the event ran, if the host reports it.
    #[must_use]
    pub fn running_if_known(self, running_ns: Option<u64>, enabled_ns: Option<u64>) -> Self {
        match (running_ns, enabled_ns) {
            (Some(running_ns), Some(enabled_ns)) => self.running(running_ns, enabled_ns),
            _ => self,
        }
    }

    /// Marks the row as not supported because of `why`. The caller must have checked that the host
    /// does not support the event.
    #[must_use]
    pub fn unsupported(mut self, why: impl Into<String>) -> Self {
        self.verdict = Verdict::NotSupported;
        self.reason = Some(why.into());
        self
    }

    /// Marks a row that passed or failed as undecided because of `why`.
    #[must_use]
    pub fn too_busy(mut self, why: impl Into<String>) -> Self {
        self.verdict = Verdict::TooBusy;
        self.reason = Some(why.into());
        self
    }

    /// Marks the row as failed because of `why`.
    #[must_use]
    pub fn failed(mut self, why: impl Into<String>) -> Self {
        self.verdict = Verdict::Fail;
        self.reason = Some(why.into());
        self
    }
}

/// The rows measured so far. Each row is shown when it is added.
pub struct ValidationRowCollector<'a> {
    rows: Vec<ValidationRow>,
    guest_kind: ValidationGuestKind,
    on_row: &'a mut dyn FnMut(&ValidationRow),
}

impl<'a> ValidationRowCollector<'a> {
    /// Creates an empty collector, which calls `on_row` with each added row.
    pub fn new(on_row: &'a mut dyn FnMut(&ValidationRow)) -> Self {
        Self {
            rows: Vec::new(),
            guest_kind: ValidationGuestKind::BuiltIn,
            on_row,
        }
    }

    /// Sets the guest of the rows added from now on.
    pub fn set_guest(&mut self, kind: ValidationGuestKind) {
        self.guest_kind = kind;
    }

    /// Adds a final row.
    pub fn push(&mut self, row: ValidationRow) {
        let row = ValidationRow {
            guest_kind: self.guest_kind,
            ..row
        };
        (self.on_row)(&row);
        self.rows.push(row);
    }

    /// Adds final rows.
    pub fn extend(&mut self, rows: impl IntoIterator<Item = ValidationRow>) {
        rows.into_iter().for_each(|row| self.push(row));
    }

    /// Returns all rows.
    pub fn into_vec(self) -> Vec<ValidationRow> {
        self.rows
    }
}

/// Description of the host and the guests. Contains the information needed for a bug report and no
/// sensitive data.
#[derive(Clone, Debug, Default, Serialize)]
pub struct ValidationSummary {
    /// Version of Perfvisor.
    pub perfvisor: String,
    /// Kernel release of the host.
    pub host_kernel: String,
    /// Processor name of the host, as reported by the kernel.
    pub host_cpu: String,
    /// Number of CPUs of the host.
    pub host_cpus: usize,
    /// `true` if the host is a virtual machine.
    pub host_is_virtual: bool,
    /// Properties of the host's KVM.
    pub kvm: Option<KvmSummary>,
    /// Number of host counters available to a vCPU, or the reason there are none.
    pub host_pmu: String,
    /// Value of `perf_event_paranoid` on the host.
    pub perf_event_paranoid: Option<i32>,
    /// Description of the guest's PMU.
    pub pmu: String,
    /// TSC frequency of the guests in Hz, as reported by KVM.
    pub guest_tsc_hz: u64,
    /// Kernel release of the Linux guest, or `None` if no Linux guest was run.
    pub guest_kernel: Option<String>,
    /// Version of perf in the Linux guest.
    pub guest_perf: Option<String>,
    /// Reason for skipping the Linux guest.
    pub linux_guest_skipped: Option<String>,
    /// Total duration of the validation in seconds.
    pub seconds: f64,
}

/// The complete report of `perfvisor validate`.
#[derive(Clone, Debug, Serialize)]
pub struct ValidationReport {
    /// Version of the report format.
    pub format: u32,
    /// The measured rows.
    pub rows: Vec<ValidationRow>,
    /// Number of passed rows.
    pub passed: usize,
    /// Number of failed rows.
    pub failed: usize,
    /// Number of rows that are not supported on this host.
    pub not_supported: usize,
    /// Number of rows left undecided because of the host's load.
    pub too_busy: usize,
    /// Description of the host and the guests.
    pub summary: ValidationSummary,
}

impl ValidationReport {
    /// Creates a report of `rows`.
    pub fn new(rows: Vec<ValidationRow>, summary: ValidationSummary) -> Self {
        let count = |verdict| rows.iter().filter(|row| row.verdict == verdict).count();
        Self {
            format: 2,
            passed: count(Verdict::Pass),
            failed: count(Verdict::Fail),
            not_supported: count(Verdict::NotSupported),
            too_busy: count(Verdict::TooBusy),
            rows,
            summary,
        }
    }

    /// Returns whether at least one row was measured and none failed.
    pub fn is_good(&self) -> bool {
        self.failed == 0 && self.passed > 0
    }

    /// Returns the report as text.
    pub fn text(&self) -> String {
        let mut text = ValidationReportFormatter::default();
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
        let too_busy = match self.too_busy {
            0 => String::new(),
            rows => format!(", {rows} too busy to tell"),
        };
        let _ = writeln!(
            out,
            "\n{} passed, {} failed, {} not supported here{too_busy}, in {:.1} s: {}",
            self.passed,
            self.failed,
            self.not_supported,
            s.seconds,
            if self.is_good() { "PASS" } else { "FAIL" }
        );
    }
}

/// Formatter that outputs a report row by row during the measurements.
#[derive(Default)]
pub struct ValidationReportFormatter {
    /// Section of the most recently formatted row.
    section: Option<(ValidationGuestKind, ValidationCheckKind)>,
    /// Number of each footnote, by its text.
    notes: BTreeMap<String, usize>,
}

impl ValidationReportFormatter {
    /// Returns the line of a row, preceded by the section header for the first row of a section.
    pub fn row(&mut self, row: &ValidationRow) -> String {
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
        let spread = |[low, high]: [f64; 2]| format!("{low:.3}-{high:.3}");
        let _ = writeln!(
            out,
            "  {:<22} {:<12} {:<30} {:>15} {:>15} {:>15} {:>6} {:>11} {:>10} {:>5}  {}{note}",
            row.event,
            row.backing,
            row.workload,
            number(row.guest),
            number(row.host),
            number(row.expected),
            row.ratio.map_or_else(|| "-".into(), |r| format!("{r:.3}")),
            row.spread.map_or_else(|| "-".into(), spread),
            row.tolerance.map_or_else(|| "-".into(), |t| t.to_string()),
            row.running_percent
                .map_or_else(|| "-".into(), |p| format!("{p:.0}%")),
            row.verdict,
        );
        out
    }

    /// Returns the text after the last row, which consists of the footnotes, the host and the
    /// score.
    pub fn end(self, report: &ValidationReport) -> String {
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

/// Writes a section header.
fn head(out: &mut String, guest: ValidationGuestKind, check: ValidationCheckKind) {
    let guest = match guest {
        ValidationGuestKind::BuiltIn => "built-in guest",
        ValidationGuestKind::Linux => "Linux guest",
    };
    let check = match check {
        ValidationCheckKind::Counting => "counting",
        ValidationCheckKind::Multiplexing => "more events than counters",
        ValidationCheckKind::Contention => "an operator counts at the same time",
        ValidationCheckKind::Sampling => "sampling",
    };
    let _ = writeln!(
        out,
        "{guest}: {check}\n  {:<22} {:<12} {:<30} {:>15} {:>15} {:>15} {:>6} {:>11} {:>10} {:>5}  verdict",
        "event", "backing", "workload", "guest", "host", "expected", "ratio", "spread", "tolerance", "on"
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::ExpectedCount;

    /// A row does not depend on time if its expected count is known or if the guest and the host
    /// disagree. The table and the JSON show the number of measurements and the spread of a
    /// time-dependent row.
    #[test]
    fn time_dependent_rows_show_their_spread() {
        assert!(!row(5, 6).of_time);
        let timed = |guest, host: Option<u64>, basis| {
            let exactly = |value| ExpectedCount::new(value, Tolerance::Exact);
            let seen = CountComparison {
                guest: Some(guest),
                host: host.map(exactly),
                expected: Some(ExpectedCount::new(100, Tolerance::Percent(5.0))),
            };
            ValidationRow::new(ValidationCheckKind::Counting, "cycles", "clock", "busy")
                .with_verdict(&seen, basis)
        };
        assert!(timed(80, Some(80), "CPU time").of_time);
        assert!(!timed(80, Some(81), "CPU time").of_time, "guest and host differ");
        assert!(!timed(80, None, KNOWN).of_time);
        let three = ValidationRow {
            measurements: 3,
            spread: Some([0.98, 1.0]),
            ..timed(99, None, "CPU time")
        };
        let report = ValidationReport::new(vec![three], ValidationSummary::default());
        assert!(
            report.text().contains("0.990 0.980-1.000         5%"),
            "{}",
            report.text()
        );
        let json = serde_json::to_value(&report).unwrap();
        let row = &json["rows"][0];
        assert_eq!((&row["measurements"], &row["of_time"]), (&3.into(), &true.into()));
    }

    fn row(guest: u64, expected: u64) -> ValidationRow {
        let seen = CountComparison::of_guest(Some(guest), ExpectedCount::new(expected, Tolerance::Exact));
        ValidationRow::new(ValidationCheckKind::Counting, "instructions", "exact", "busy")
            .with_verdict(&seen, "known")
    }

    /// One wrong count fails the whole report.
    #[test]
    fn one_failure_fails_the_report() {
        let good = ValidationReport::new(vec![row(5, 5), row(7, 7)], ValidationSummary::default());
        assert!(good.is_good() && good.text().contains("2 passed, 0 failed"));
        let bad = ValidationReport::new(vec![row(5, 5), row(7, 8)], ValidationSummary::default());
        assert!(!bad.is_good());
        assert!(bad.text().contains("FAIL [1]") && bad.text().contains("[1] off the expectation"));
        let json: serde_json::Value = serde_json::to_value(&bad).unwrap();
        assert_eq!(json["failed"], 1);
        assert_eq!(json["rows"][1]["verdict"], "FAIL");
        assert_eq!(json["rows"][1]["guest"], 7);
    }

    /// A report without measurements is a failure.
    #[test]
    fn empty_report_fails() {
        assert!(!ValidationReport::new(vec![], ValidationSummary::default()).is_good());
        let only = ValidationRow::new(ValidationCheckKind::Counting, "cycles", "hardware", "-")
            .unsupported("no PMU");
        assert!(!ValidationReport::new(vec![only], ValidationSummary::default()).is_good());
    }

    /// The row-by-row output equals the complete report, and each row appears immediately.
    #[test]
    fn rows_are_shown_as_they_are_added() {
        let mut text = ValidationReportFormatter::default();
        let mut shown = String::new();
        let mut lines = Vec::new();
        let mut on_row = |row: &ValidationRow| {
            shown.push_str(&text.row(row));
            lines.push(shown.lines().count());
        };
        let mut rows = ValidationRowCollector::new(&mut on_row);
        rows.push(row(5, 5));
        rows.extend([
            row(7, 7),
            ValidationRow {
                check: ValidationCheckKind::Sampling,
                ..row(8, 9)
            },
        ]);
        rows.set_guest(ValidationGuestKind::Linux);
        rows.push(ValidationRow {
            check: ValidationCheckKind::Sampling,
            ..row(1, 1)
        });
        let report = ValidationReport::new(rows.into_vec(), ValidationSummary::default());
        // Two header lines before the first row of each section, and a blank line between sections.
        assert_eq!(lines, [3, 4, 8, 12]);
        shown.push_str(&text.end(&report));
        assert_eq!(shown, report.text());
        assert!(shown.contains("Linux guest: sampling"), "{shown}");
    }

    #[test]
    fn reasons_are_footnotes_said_once() {
        let why = "no PMU";
        let rows = ["cycles", "branches"].map(|event| {
            ValidationRow::new(ValidationCheckKind::Counting, event, "hardware", "-").unsupported(why)
        });
        let text = ValidationReport::new(rows.to_vec(), ValidationSummary::default()).text();
        assert_eq!(text.matches("not supported here [1]").count(), 2, "{text}");
        assert_eq!(text.matches("[1] no PMU").count(), 1, "{text}");
    }
}
