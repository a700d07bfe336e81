//! Metrics derived from two counts, as in perf: instructions per cycle, miss ratios, frequency and
//! rates.

use serde_json::{Map, Value, json};

use super::totals::Total;
use control_api::events::format::{CountResult, CountUnit};

/// Miss ratios: a miss event, its reference event, and perf's description of the ratio.
const SHARES: [(&str, &str, &str); 7] = [
    ("branch-misses", "branches", "of all branches"),
    ("cache-misses", "cache-references", "of all cache refs"),
    (
        "L1-dcache-load-misses",
        "L1-dcache-loads",
        "of all L1-dcache accesses",
    ),
    (
        "L1-icache-load-misses",
        "L1-icache-loads",
        "of all L1-icache accesses",
    ),
    ("LLC-load-misses", "LLC-loads", "of all LL-cache accesses"),
    ("dTLB-load-misses", "dTLB-loads", "of all dTLB cache accesses"),
    ("iTLB-load-misses", "iTLB-loads", "of all iTLB cache accesses"),
];

/// A metric derived from two counts.
#[derive(Debug)]
pub(super) struct Metric {
    pub(super) value: f64,
    pub(super) unit: String,
    /// Text of the metric, printed after `#` in the line of the event.
    pub(super) text: String,
    /// `true` if one of the counts is an estimate, because the event was multiplexed or backed by a
    /// clock.
    pub(super) estimate: bool,
}

impl Metric {
    /// Returns the heading of the metric in a row of metrics: the unit of the metric, preceded by
    /// `event` if the unit does not name the event. Returns `None` for rates, which perf omits from
    /// rows of metrics.
    fn heading(&self, event: &str) -> Option<String> {
        match self.unit.as_str() {
            unit if unit.ends_with("/sec") => None,
            unit if unit.starts_with("of all ") => Some(format!("{event} {unit}")),
            unit => Some(unit.to_owned()),
        }
    }

    fn places(&self) -> usize {
        if matches!(self.unit.as_str(), "GHz" | "CPUs utilized") {
            3
        } else {
            2
        }
    }
}

/// Splits an event name into the name that perf prints and the modifiers, which start with a colon.
fn split_modifiers(name: &str) -> (&str, &str) {
    let (plain, modifiers) = name.split_at(name.find(':').unwrap_or(name.len()));
    let plain = match plain {
        "cpu-cycles" => "cycles",
        "branch-instructions" => "branches",
        other => other,
    };
    (plain, modifiers)
}

/// Returns a count per second of vCPU run time, and the unit of this rate in perf's output.
fn rate(count: f64, task_clock_ns: f64) -> (f64, String) {
    let mut value = count / (task_clock_ns / 1e9);
    let mut prefix = "";
    for larger in ["K", "M", "G"] {
        if value < 1000.0 {
            break;
        }
        value /= 1000.0;
        prefix = larger;
    }
    (value, format!("{prefix}/sec"))
}

/// One of the two counts from which a metric is derived.
struct MetricOperand {
    count: f64,
    estimate: bool,
}

impl MetricOperand {
    fn of(total: &Total) -> Option<Self> {
        let CountResult::Value {
            count,
            enabled_ns,
            running_ns,
        } = total.counted
        else {
            return None;
        };
        Some(Self {
            count: count as f64,
            estimate: total.estimate || total.backing == "clock" || running_ns < enabled_ns,
        })
    }
}

/// Returns the metric that perf derives from `total` and another count in `all`, or `None` if the
/// other count is missing.
pub(super) fn derived(total: &Total, all: &[Total], seconds: f64) -> Option<Metric> {
    let (name, modifiers) = split_modifiers(&total.name);
    let own = MetricOperand::of(total)?;
    let with = |wanted: &str, wanted_modifiers: &str| {
        let same =
            |t: &&Total| split_modifiers(&t.name) == (wanted, wanted_modifiers) && t.vcpu == total.vcpu;
        let found = MetricOperand::of(all.iter().find(same)?)?;
        (found.count > 0.0).then_some(found)
    };
    let metric = |value: f64, unit: String, text: String, estimate: bool| {
        let doubt = if estimate { " (estimate)" } else { "" };
        Some(Metric {
            value,
            unit,
            text: text + doubt,
            estimate,
        })
    };
    let share = SHARES.iter().find(|(misses, ..)| *misses == name);
    if let Some((_, of, unit)) = share
        && let Some(all) = with(of, modifiers)
    {
        let percent = 100.0 * own.count / all.count;
        let text = format!("{percent:8.2}% {unit}");
        return metric(percent, (*unit).to_owned(), text, own.estimate || all.estimate);
    }
    match name {
        "task-clock" | "cpu-clock" if seconds > 0.0 => {
            let (value, unit) = (own.count / 1e9 / seconds, "CPUs utilized");
            metric(
                value,
                unit.to_owned(),
                format!("{value:8.3} {unit}"),
                own.estimate,
            )
        }
        "instructions" if let Some(cycles) = with("cycles", modifiers) => {
            let (value, unit) = (own.count / cycles.count, "insn per cycle");
            let text = format!("{value:8.2}  {unit}");
            metric(value, unit.to_owned(), text, own.estimate || cycles.estimate)
        }
        "cycles" => {
            let clock = with("task-clock", "")?;
            let value = own.count / clock.count;
            let text = format!("{value:8.3} GHz");
            metric(value, "GHz".to_owned(), text, own.estimate || clock.estimate)
        }
        _ if total.unit == CountUnit::Nanoseconds => None,
        _ => {
            let clock = with("task-clock", "")?;
            let (value, unit) = rate(own.count, clock.count);
            let text = format!("{value:8.3} {unit}");
            metric(value, unit, text, own.estimate || clock.estimate)
        }
    }
}

/// A row of `--metric-only` output: the metrics of one vCPU or of all vCPUs, with their headings.
pub(super) struct MetricRow {
    pub(super) vcpu: Option<u32>,
    metrics: Vec<(String, Metric)>,
}

/// Returns one row for each vCPU with metrics.
pub(super) fn rows(totals: &[Total], seconds: f64) -> Vec<MetricRow> {
    let mut rows: Vec<MetricRow> = Vec::new();
    for total in totals {
        let Some(metric) = derived(total, totals, seconds) else {
            continue;
        };
        let Some(heading) = metric.heading(split_modifiers(&total.name).0) else {
            continue;
        };
        match rows.iter_mut().find(|row| row.vcpu == total.vcpu) {
            Some(row) => row.metrics.push((heading, metric)),
            None => rows.push(MetricRow {
                vcpu: total.vcpu,
                metrics: vec![(heading, metric)],
            }),
        }
    }
    rows
}

/// Returns the width of a column, in characters, which suffices for the heading and for a signed
/// number.
fn width(heading: &str) -> usize {
    heading.len().max(12)
}

impl MetricRow {
    /// Formats the headings of the row's metrics.
    pub(super) fn headings(&self) -> String {
        let each = self.metrics.iter();
        each.map(|(heading, _)| format!("  {heading:>width$}", width = width(heading)))
            .collect()
    }

    /// Formats the values of the row's metrics, with `~` before estimates.
    pub(super) fn numbers(&self) -> String {
        let each = self.metrics.iter();
        each.map(|(heading, metric)| {
            let sign = if metric.estimate { "~" } else { "" };
            let number = format!("{sign}{:.places$}", metric.value, places = metric.places());
            format!("  {number:>width$}", width = width(heading))
        })
        .collect()
    }

    /// Returns whether any metric of the row is an estimate.
    pub(super) fn has_estimates(&self) -> bool {
        self.metrics.iter().any(|(_, metric)| metric.estimate)
    }

    /// Formats the row as CSV. Returns the headings and the values, separated by `separator`.
    pub(super) fn csv(&self, separator: &str) -> (String, String) {
        let headings: Vec<&str> = self.metrics.iter().map(|(heading, _)| heading.as_str()).collect();
        let numbers: Vec<String> = self
            .metrics
            .iter()
            .map(|(_, metric)| format!("{:.places$}", metric.value, places = metric.places()))
            .collect();
        (headings.join(separator), numbers.join(separator))
    }

    /// Formats the row as a JSON object with the values of the metrics and the names of those that
    /// are estimates.
    pub(super) fn json(&self, at_s: Option<f64>) -> Value {
        let mut object = Map::new();
        if let Some(at) = at_s {
            object.insert("interval".into(), json!(at));
        }
        if let Some(vcpu) = self.vcpu {
            object.insert("vcpu".into(), json!(vcpu));
        }
        let metrics: Map<String, Value> = self
            .metrics
            .iter()
            .map(|(heading, metric)| (heading.clone(), json!(metric.value)))
            .collect();
        object.insert("metrics".into(), Value::Object(metrics));
        let estimates: Vec<&str> = self
            .metrics
            .iter()
            .filter(|(_, metric)| metric.estimate)
            .map(|(heading, _)| heading.as_str())
            .collect();
        object.insert("estimates".into(), json!(estimates));
        Value::Object(object)
    }
}

/// Footnote of a table that contains estimates.
pub(super) const ESTIMATES: &str =
    "~ an estimate: an event was not on all the time, or guest time x TSC frequency stands for cycles";

/// Message printed if no metric can be derived.
pub(super) const NONE: &str = "nothing can be derived: it takes task-clock, cycles and instructions, or misses and what they are a share of";

#[cfg(test)]
mod tests {
    use super::super::lines::tests::count_of;
    use super::*;

    fn totals() -> Vec<Total> {
        vec![
            count_of("task-clock", 1_000_000_000, CountUnit::Nanoseconds),
            count_of("cpu-cycles", 3_000_000_000, CountUnit::Count),
            count_of("instructions", 1_500_000_000, CountUnit::Count),
            count_of("branch-instructions", 200_000_000, CountUnit::Count),
            count_of("branch-misses", 5_000_000, CountUnit::Count),
            count_of("cache-references", 1_000_000, CountUnit::Count),
            count_of("cache-misses", 250_000, CountUnit::Count),
        ]
    }

    #[test]
    fn metrics_match_perf() {
        let all = totals();
        let text = |at: usize| derived(&all[at], &all, 2.0).unwrap().text;
        assert_eq!(text(0), "   0.500 CPUs utilized");
        assert_eq!(text(1), "   3.000 GHz");
        assert_eq!(text(2), "    0.50  insn per cycle");
        assert_eq!(text(3), " 200.000 M/sec");
        assert_eq!(text(4), "    2.50% of all branches");
        assert_eq!(text(6), "   25.00% of all cache refs");
    }

    /// A metric derived from an estimate is marked as an estimate.
    #[test]
    fn metric_of_estimate_is_marked() {
        let mut all = totals();
        all[1].backing = "clock".into();
        let ipc = derived(&all[2], &all, 2.0).unwrap();
        assert!(
            ipc.estimate && ipc.text.ends_with("insn per cycle (estimate)"),
            "{ipc:?}"
        );
        assert!(!derived(&all[4], &all, 2.0).unwrap().estimate);
        all[3].counted = CountResult::Value {
            count: 200_000_000,
            enabled_ns: 2,
            running_ns: 1,
        };
        assert!(derived(&all[4], &all, 2.0).unwrap().estimate);
        let row = &rows(&all, 2.0)[0];
        assert!(row.has_estimates());
        assert!(
            row.numbers().contains("~0.50") && row.numbers().contains(" 25.00"),
            "{}",
            row.numbers()
        );
        let json = row.json(None);
        assert_eq!(json["metrics"]["insn per cycle"], 0.5);
        let estimates = json["estimates"].to_string();
        assert!(
            estimates.contains("insn per cycle") && !estimates.contains("cache"),
            "{estimates}"
        );
    }

    /// Counts of events with different modifiers are not combined to a metric, such as user
    /// instructions with all cycles.
    #[test]
    fn metrics_require_equal_modifiers() {
        let mut all = totals();
        all[2].name = "instructions:u".into();
        assert_eq!(derived(&all[2], &all, 2.0).unwrap().unit, "G/sec");
        all[1].name = "cycles:u".into();
        assert_eq!(derived(&all[2], &all, 2.0).unwrap().unit, "insn per cycle");
    }

    /// A row of metrics omits rates. The heading of a metric contains the event name unless perf's
    /// unit contains it.
    #[test]
    fn metric_row_matches_perf() {
        let rows = rows(&totals(), 2.0);
        let (headings, numbers) = rows[0].csv(",");
        assert_eq!(
            headings,
            "CPUs utilized,GHz,insn per cycle,branch-misses of all branches,cache-misses of all cache refs"
        );
        assert_eq!(numbers, "0.500,3.000,0.50,2.50,25.00");
        assert_eq!(rows[0].headings().len(), rows[0].numbers().len());
    }
}
