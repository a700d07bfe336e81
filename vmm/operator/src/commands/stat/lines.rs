//! Output formats of `perfvisor stat`: text as in perf, CSV and JSON.

use std::fmt::Write as _;
use std::time::Duration;

use serde_json::json;

use super::args::StatArgs;
use super::metrics::{self, derived};
use super::totals::{Total, merge};
use control_api::events::format::{
    CountResult, CountUncertainty, StatFields, csv_line, mean_and_error, stat_line,
};

/// Formats the counts of an interval of duration `length` that ended at `at`.
pub(super) fn interval_lines(at: Duration, length: Duration, totals: &[Total], args: &StatArgs) -> String {
    let mut out = String::new();
    let seconds = length.as_secs_f64();
    if args.metric_only {
        return interval_metrics(at, length, totals, args);
    }
    for total in totals {
        let time = format!("{}.{:09}", at.as_secs(), at.subsec_nanos());
        if args.json {
            let line = json_line(total, totals, seconds, Some(at.as_secs_f64()));
            let _ = writeln!(out, "{line}");
        } else if let Some(separator) = &args.field_separator {
            let line = csv_total(total, totals, seconds, args, separator);
            let _ = writeln!(out, "{time}{separator}{line}");
        } else {
            let line = plain(total, note(total, totals, seconds).as_deref());
            let _ = writeln!(out, "{time:>16} {}{line}", vcpu_column(total, args));
        }
    }
    out
}

/// Formats the metrics of an interval, preceded by headings in the first interval.
fn interval_metrics(at: Duration, length: Duration, totals: &[Total], args: &StatArgs) -> String {
    let mut out = String::new();
    let time = format!("{}.{:09}", at.as_secs(), at.subsec_nanos());
    for (n, row) in metrics::rows(totals, length.as_secs_f64()).iter().enumerate() {
        if args.json {
            let _ = writeln!(out, "{}", row.json(Some(at.as_secs_f64())));
        } else if let Some(separator) = &args.field_separator {
            let vcpu = row
                .vcpu
                .map_or_else(String::new, |vcpu| format!("VCPU{vcpu}{separator}"));
            let _ = writeln!(out, "{time}{separator}{vcpu}{}", row.csv(separator).1);
        } else {
            let column = |text: String| row.vcpu.map_or_else(String::new, |_| format!(" {text:<10}"));
            if at <= length && n == 0 {
                let _ = writeln!(
                    out,
                    "#{:>15}{}{}",
                    "time",
                    column("VCPU".to_owned()),
                    row.headings()
                );
            }
            let vcpu = column(row.vcpu.map_or_else(String::new, |vcpu| format!("VCPU{vcpu}")));
            let _ = writeln!(out, "{time:>16}{vcpu}{}", row.numbers());
        }
    }
    out
}

/// Returns the label of an output line: the vCPU of `total` or, with `--per-vcpu`, `VM` for an
/// event of the whole VM.
fn vcpu_label(total: &Total, args: &StatArgs) -> Option<String> {
    let whole = args.per_vcpu.then(|| "VM".to_owned());
    total.vcpu.map(|v| format!("VCPU{v}")).or(whole)
}

fn vcpu_column(total: &Total, args: &StatArgs) -> String {
    vcpu_label(total, args).map_or_else(String::new, |whose| format!("{whose:<10} "))
}

fn plain(total: &Total, note: Option<&str>) -> String {
    stat_line(&total.name, &total.counted, total.unit, note, total.uncertainty)
}

fn csv_total(total: &Total, all: &[Total], seconds: f64, args: &StatArgs, separator: &str) -> String {
    let vcpu = vcpu_label(total, args).map_or_else(String::new, |whose| whose + separator);
    // As in perf, the field is present in every line of a repeated measurement and absent
    // otherwise, because programs count fields.
    let error = (args.repeat > 1).then(|| total.uncertainty.error().unwrap_or(0.0));
    let derived = derived(total, all, seconds);
    let derived = derived.as_ref().map(|d| (d.value, d.unit.as_str()));
    vcpu + &csv_line(&total.name, &total.counted, total.unit, error, derived, separator)
}

/// Formats a line with the fields of `perf stat -j` and the backing of the event.
fn json_line(total: &Total, all: &[Total], seconds: f64, at_s: Option<f64>) -> String {
    let mut object = serde_json::Map::new();
    let mut put = |key: &str, value| {
        object.insert(key.into(), value);
    };
    if let Some(at) = at_s {
        put("interval", json!(at));
    }
    if let Some(vcpu) = total.vcpu {
        put("vcpu", json!(vcpu));
    }
    let fields = StatFields::of(&total.counted, total.unit, 6);
    put("counter-value", json!(fields.value));
    put("unit", json!(fields.unit));
    put("event", json!(total.name));
    match total.uncertainty {
        CountUncertainty::Silent => {}
        CountUncertainty::Error(percent) => put("variance", json!(percent)),
        CountUncertainty::Within(percent) => put("error-within", json!(percent)),
        CountUncertainty::Unknown => put("error-unknown", json!(true)),
    }
    put("event-runtime", json!(fields.running_ns));
    put("pcnt-running", json!(fields.share));
    if let Some(derived) = derived(total, all, seconds) {
        put("metric-value", json!(derived.value));
        put("metric-unit", json!(derived.unit));
        if derived.estimate {
            put("metric-estimate", json!(true));
        }
    }
    put("backing", json!(total.backing));
    serde_json::Value::Object(object).to_string()
}

/// Formats the final table of all runs.
pub(super) fn final_table(vm: &str, runs: &[Vec<Total>], elapsed: &[f64], args: &StatArgs) -> String {
    let totals = merge(runs);
    let mut out = String::new();
    let (seconds, error) = mean_and_error(elapsed);
    if args.metric_only {
        return final_metrics(vm, &totals, (seconds, error), args);
    }
    if args.json {
        for total in &totals {
            let _ = writeln!(out, "{}", json_line(total, &totals, seconds, None));
        }
        return out;
    }
    if let Some(separator) = &args.field_separator {
        for total in &totals {
            let _ = writeln!(out, "{}", csv_total(total, &totals, seconds, args, separator));
        }
        return out;
    }
    let repeated = match runs.len() {
        0 | 1 => String::new(),
        n => format!(" ({n} runs)"),
    };
    let _ = writeln!(out, "\n Performance counter stats for VM '{vm}'{repeated}:\n");
    for total in &totals {
        let note = note(total, &totals, seconds);
        let _ = writeln!(
            out,
            "{}{}",
            vcpu_column(total, args),
            plain(total, note.as_deref())
        );
    }
    let _ = writeln!(out, "\n{}\n", elapsed_line(seconds, error));
    out
}

/// Formats the metrics of all runs, as printed at the end.
fn final_metrics(
    vm: &str,
    totals: &[Total],
    (seconds, error): (f64, Option<f64>),
    args: &StatArgs,
) -> String {
    let mut out = String::new();
    let rows = metrics::rows(totals, seconds);
    let people = !args.json && args.field_separator.is_none();
    if people {
        let _ = writeln!(out, "\n Performance counter stats for VM '{vm}':\n");
    }
    for (at, row) in rows.iter().enumerate() {
        if args.json {
            let _ = writeln!(out, "{}", row.json(None));
        } else if let Some(separator) = &args.field_separator {
            let vcpu = row
                .vcpu
                .map_or_else(String::new, |vcpu| format!("VCPU{vcpu}{separator}"));
            let (headings, numbers) = row.csv(separator);
            let column = row.vcpu.map_or_else(String::new, |_| format!("vcpu{separator}"));
            if at == 0 {
                let _ = writeln!(out, "{column}{headings}");
            }
            let _ = writeln!(out, "{vcpu}{numbers}");
        } else {
            let vcpu = |text: String| row.vcpu.map_or_else(String::new, |_| format!("{text:<10}"));
            let name = row.vcpu.map_or_else(String::new, |vcpu| format!("VCPU{vcpu}"));
            let _ = writeln!(out, "{}{}", vcpu(String::new()), row.headings());
            let _ = writeln!(out, "{}{}", vcpu(name), row.numbers());
        }
    }
    if people {
        if rows.is_empty() {
            let _ = writeln!(out, "  {}", metrics::NONE);
        }
        if rows.iter().any(metrics::MetricRow::has_estimates) {
            let _ = writeln!(out, "\n  {}", metrics::ESTIMATES);
        }
        let _ = writeln!(out, "\n{}\n", elapsed_line(seconds, error));
    }
    out
}

/// Formats the elapsed time. For repeated runs, adds the error and limits the number of decimals to
/// the significant ones.
fn elapsed_line(seconds: f64, error_percent: Option<f64>) -> String {
    match error_percent {
        None => format!("{seconds:>18.9} seconds time elapsed"),
        Some(percent) => {
            let error = seconds * percent / 100.0;
            let places = (2..9)
                .find(|&places| error * 10f64.powi(places) >= 100.0)
                .unwrap_or(9);
            let places = usize::try_from(places).unwrap_or(9);
            format!("{seconds:>18.places$} +- {error:.places$} seconds time elapsed  ( +-{percent:6.2}% )")
        }
    }
}

/// Returns the comment that follows `#` in the line of an event: a note if the count is an estimate
/// or derived from a clock, and otherwise the metric that perf would print.
fn note(total: &Total, all: &[Total], seconds: f64) -> Option<String> {
    if !matches!(total.counted, CountResult::Value { .. }) {
        return None;
    }
    if total.estimate {
        return Some("  estimate, from samples".into());
    }
    if total.backing == "clock" {
        return Some("  guest time x TSC frequency".into());
    }
    derived(total, all, seconds).map(|d| d.text)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use control_api::events::format::CountUnit;

    pub(in super::super) fn count_of(name: &str, count: u64, unit: CountUnit) -> Total {
        Total {
            name: name.into(),
            vcpu: None,
            unit,
            counted: CountResult::Value {
                count,
                enabled_ns: 1,
                running_ns: 1,
            },
            uncertainty: CountUncertainty::Silent,
            backing: "software".into(),
            estimate: false,
        }
    }

    /// The expected lines are the output of perf 6.1 for the same counts.
    #[test]
    fn notes_match_perf() {
        let all = [
            count_of("task-clock", 720_000, CountUnit::Nanoseconds),
            count_of("context-switches", 1, CountUnit::Count),
            count_of("page-faults", 75, CountUnit::Count),
            count_of("cycles", 2_160_000, CountUnit::Count),
        ];
        let line = |at: usize| plain(&all[at], note(&all[at], &all, 0.24).as_deref());
        assert_eq!(
            line(0),
            "              0.72 msec task-clock                       #    0.003 CPUs utilized"
        );
        assert_eq!(
            line(1),
            "                 1      context-switches                 #    1.389 K/sec"
        );
        assert_eq!(
            line(2),
            "                75      page-faults                      #  104.167 K/sec"
        );
        assert_eq!(
            line(3),
            "         2,160,000      cycles                           #    3.000 GHz"
        );
        // For an event with the clock backing, the line names the backing instead of a metric.
        let clock = Total {
            backing: "clock".into(),
            ..all[3].clone()
        };
        assert!(plain(&clock, note(&clock, &all, 0.24).as_deref()).contains("TSC frequency"));
    }

    /// Headings of the metrics are printed before the first interval only.
    #[test]
    fn metric_intervals_print_headings_once() {
        use clap::Parser;
        #[derive(Parser)]
        struct Only {
            #[command(flatten)]
            stat: StatArgs,
        }
        let args = Only::parse_from(["stat", "--metric-only"]).stat;
        let all = [count_of("task-clock", 500_000_000, CountUnit::Nanoseconds)];
        let second = Duration::from_secs(1);
        let lines = |at: u32| interval_lines(second * at, second, &all, &args);
        assert_eq!(lines(1).lines().count(), 2);
        assert!(lines(1).contains("CPUs utilized"));
        assert_eq!(lines(2).trim(), "2.000000000          0.500");
        let table = final_table("one", &[Vec::new()], &[1.0], &args);
        assert!(table.contains("nothing can be derived"), "{table}");
    }

    #[test]
    fn elapsed_time_precision_matches_error() {
        assert_eq!(
            elapsed_line(0.207_887_829, None),
            "       0.207887829 seconds time elapsed"
        );
        assert_eq!(
            elapsed_line(0.109_24, Some(1.318)),
            "           0.10924 +- 0.00144 seconds time elapsed  ( +-  1.32% )"
        );
    }
}
