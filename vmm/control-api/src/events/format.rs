//! Formats event counts as `perf stat` does.

/// The result of counting one event.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum CountResult {
    /// The event is unsupported.
    NotSupported,
    /// The event never ran on a counter.
    NotCounted,
    /// Count of the event, with the times for which the event was enabled and running.
    Value {
        /// Count, scaled to the enabled time if `running_ns < enabled_ns`.
        count: u64,
        /// Time for which the event was enabled, in nanoseconds.
        enabled_ns: u64,
        /// Time for which the event was running, in nanoseconds.
        running_ns: u64,
    },
}

/// Width of the value column in the output of `perf stat`, in characters.
const VALUE_WIDTH: usize = 18;
/// Width of the event column in the output of `perf stat`, in characters.
const EVENT_WIDTH: usize = 32;
/// Width of the comment after `#` in the output of `perf stat`, in characters.
const NOTE_WIDTH: usize = 32;

/// Rounds to the nearest integer. Returns 0 for negative values and NaN.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "floating-point numbers saturate, and no count is beyond 2^64"
)]
#[must_use]
pub fn rounded(n: f64) -> u64 {
    n.round() as u64
}

/// Formats a number with thousands separators, such as `1,234,567`.
pub fn thousands(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() + digits.len() / 3);
    for (i, d) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(d);
    }
    out
}

/// Formats nanoseconds as milliseconds with two decimals and thousands separators, like perf's
/// clock events: `1,234.50`.
pub fn milliseconds(ns: u64) -> String {
    // Round half up to two decimals.
    let hundredths = ns / 10_000 + u64::from(ns % 10_000 >= 5_000);
    format!("{}.{:02}", thousands(hundredths / 100), hundredths % 100)
}

/// The unit of a count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CountUnit {
    /// A number of events.
    Count,
    /// A time in nanoseconds, displayed in milliseconds (`msec`).
    Nanoseconds,
}

/// Uncertainty of a count, in percent of the count.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum CountUncertainty {
    /// No uncertainty is displayed.
    Silent,
    /// Standard error of the count, in percent.
    Error(f64),
    /// Approximate maximum error of the count, in percent.
    Within(f64),
    /// The count is an estimate with unknown error.
    Unknown,
}

impl CountUncertainty {
    /// Returns the standard error in percent, if known.
    pub fn error(self) -> Option<f64> {
        match self {
            Self::Error(percent) => Some(percent),
            _ => None,
        }
    }
}

/// Formats a line of a table with the columns of `perf stat`: value, unit, event, comment after
/// `#`, uncertainty, and share of time running.
///
/// The uncertainty `doubt` is printed as `( +-  x.xx% )` for a standard error (of repeated runs or
/// of a scaled count), as `( within  x.xx% )` for a bound, and as `( +- unknown )` for an unknown
/// error. The share of time running is printed only if the event was not running all the time.
pub fn stat_line(
    event: &str,
    counted: &CountResult,
    unit: CountUnit,
    note: Option<&str>,
    doubt: CountUncertainty,
) -> String {
    let value = match counted {
        CountResult::NotSupported => "<not supported>".to_owned(),
        CountResult::NotCounted => "<not counted>".to_owned(),
        CountResult::Value { count, .. } => match unit {
            CountUnit::Count => thousands(*count),
            CountUnit::Nanoseconds => milliseconds(*count),
        },
    };
    let unit_text = match unit {
        CountUnit::Nanoseconds => "msec ",
        CountUnit::Count => "     ",
    };
    let mut line = format!("{value:>VALUE_WIDTH$} {unit_text}{event:<EVENT_WIDTH$}");
    if let CountResult::Value {
        enabled_ns,
        running_ns,
        ..
    } = counted
    {
        match note {
            Some(note) => line.push_str(&format!(" # {note:<NOTE_WIDTH$}")),
            None => line.push_str(&" ".repeat(NOTE_WIDTH + 3)),
        }
        match doubt {
            CountUncertainty::Silent => {}
            CountUncertainty::Error(percent) => line.push_str(&format!("  ( +-{percent:6.2}% )")),
            CountUncertainty::Within(percent) => line.push_str(&format!("  ( within{percent:6.2}% )")),
            CountUncertainty::Unknown => line.push_str("  ( +- unknown )"),
        }
        if let Some(percent) = running_percent(*enabled_ns, *running_ns) {
            line.push_str(&format!("  ({percent:.2}%)"));
        }
    }
    line.truncate(line.trim_end().len());
    line
}

/// Returns the share of the enabled time that an event was running, in percent, or `None` if it ran
/// all the time.
pub fn running_percent(enabled_ns: u64, running_ns: u64) -> Option<f64> {
    (running_ns < enabled_ns).then(|| 100.0 * running_ns as f64 / enabled_ns as f64)
}

/// The fields of a count in perf's CSV and JSON output.
#[derive(Clone, Debug, PartialEq)]
pub struct StatFields {
    /// Formatted count, or `<not supported>` or `<not counted>`.
    pub value: String,
    /// Name of the unit; empty for a number of events.
    pub unit: &'static str,
    /// Time for which the event was running, in nanoseconds.
    pub running_ns: u64,
    /// Share of the enabled time during which the event was running, in percent.
    pub share: f64,
}

impl StatFields {
    /// Formats the count `counted`. A time is formatted in milliseconds with `digits` decimals.
    pub fn of(counted: &CountResult, unit: CountUnit, digits: usize) -> Self {
        let (value, running_ns, share) = match counted {
            CountResult::NotSupported => ("<not supported>".to_owned(), 0, 100.0),
            CountResult::NotCounted => ("<not counted>".to_owned(), 0, 0.0),
            CountResult::Value {
                count,
                enabled_ns,
                running_ns,
            } => {
                let value = match unit {
                    CountUnit::Count => count.to_string(),
                    CountUnit::Nanoseconds => format!("{:.digits$}", *count as f64 / 1e6),
                };
                let share = running_percent(*enabled_ns, *running_ns).unwrap_or(100.0);
                (value, *running_ns, share)
            }
        };
        let unit = match unit {
            CountUnit::Count => "",
            CountUnit::Nanoseconds => "msec",
        };
        Self {
            value,
            unit,
            running_ns,
            share,
        }
    }
}

/// Formats a CSV line with the fields of `perf stat -x`: value, unit, event, error (of repeated
/// runs), time running, share running, and the derived metric with its unit. A field that contains
/// `separator` is quoted.
pub fn csv_line(
    event: &str,
    counted: &CountResult,
    unit: CountUnit,
    stderr_percent: Option<f64>,
    derived: Option<(f64, &str)>,
    separator: &str,
) -> String {
    let field = |text: &str| {
        if !separator.is_empty() && text.contains(separator) || text.contains('"') {
            format!("\"{}\"", text.replace('"', "\"\""))
        } else {
            text.to_owned()
        }
    };
    let StatFields {
        value,
        unit,
        running_ns,
        share,
    } = StatFields::of(counted, unit, 2);
    let mut fields = vec![field(&value), unit.to_owned(), field(event)];
    fields.extend(stderr_percent.map(|p| format!("{p:.2}%")));
    fields.push(running_ns.to_string());
    fields.push(format!("{share:.2}"));
    match derived {
        Some((value, unit)) => fields.extend([format!("{value:.3}"), field(unit)]),
        None => fields.extend([String::new(), String::new()]),
    }
    fields.join(separator)
}

/// Returns the mean of `values`, which are the results of repeated runs, and the standard error of
/// the mean in percent of the mean. The error is `None` for fewer than two runs or a mean of 0.
/// Both are computed with Welford's method.
pub fn mean_and_error(values: &[f64]) -> (f64, Option<f64>) {
    let (mut mean, mut m2) = (0.0, 0.0);
    for (i, v) in values.iter().enumerate() {
        let delta = v - mean;
        mean += delta / (i + 1) as f64;
        m2 += delta * (v - mean);
    }
    let n = values.len() as f64;
    let error = (values.len() > 1 && mean != 0.0).then(|| 100.0 * (m2 / (n - 1.0) / n).sqrt() / mean.abs());
    (mean, error)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn counted(count: u64, enabled_ns: u64, running_ns: u64) -> CountResult {
        CountResult::Value {
            count,
            enabled_ns,
            running_ns,
        }
    }

    const FULL: CountResult = counted(1_234_567_890, 1000, 1000);

    /// Calls [`stat_line`] with the unit [`CountUnit::Count`].
    fn line(event: &str, counted: CountResult, note: Option<&str>, doubt: CountUncertainty) -> String {
        stat_line(event, &counted, CountUnit::Count, note, doubt)
    }

    #[test]
    fn numbers_are_grouped_by_thousands() {
        for (n, text) in [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (123_456, "123,456"),
            (u64::MAX, "18,446,744,073,709,551,615"),
        ] {
            assert_eq!(thousands(n), text);
        }
        assert_eq!(milliseconds(1_234_500_000), "1,234.50");
        assert_eq!(milliseconds(4_999), "0.00");
        assert_eq!(milliseconds(5_000), "0.01");
        assert_eq!(milliseconds(u64::MAX), "18,446,744,073,709.55");
    }

    #[test]
    fn lines_have_perf_stats_columns() {
        let silent = CountUncertainty::Silent;
        assert_eq!(
            line("cycles", FULL, None, silent),
            "     1,234,567,890      cycles"
        );
        let (note, unit) = (Some("0.5 CPUs utilized"), CountUnit::Nanoseconds);
        assert_eq!(
            stat_line("task-clock", &counted(2_000_000, 1, 1), unit, note, silent),
            "              2.00 msec task-clock                       # 0.5 CPUs utilized"
        );
        // An unknown uncertainty is not shown as a number.
        for (doubt, text) in [
            (CountUncertainty::Error(1.5), "( +-  1.50% )"),
            (CountUncertainty::Within(12.5), "( within 12.50% )"),
            (CountUncertainty::Unknown, "( +- unknown )"),
        ] {
            assert_eq!(
                line("branches", counted(500, 1000, 250), None, doubt),
                format!("               500      {:<67}  {text}  (25.00%)", "branches")
            );
        }
    }

    #[test]
    fn uncounted_event_shows_no_number() {
        for c in [CountResult::NotSupported, CountResult::NotCounted] {
            let line = line("cycles", c, Some("3.0 GHz"), CountUncertainty::Error(1.0));
            assert!(!line.chars().any(|c| c.is_ascii_digit()), "{line}");
        }
        let line = line(
            "cycles",
            CountResult::NotSupported,
            None,
            CountUncertainty::Silent,
        );
        assert_eq!(line, "   <not supported>      cycles");
    }

    #[test]
    fn csv_quotes_names_that_contain_separator() {
        let csv = |event, counted, error, derived, separator| {
            csv_line(event, &counted, CountUnit::Count, error, derived, separator)
        };
        assert_eq!(
            csv("cycles", FULL, None, None, ","),
            "1234567890,,cycles,1000,100.00,,"
        );
        assert_eq!(
            csv("cpu/event=1,umask=2/", CountResult::NotCounted, None, None, ","),
            "<not counted>,,\"cpu/event=1,umask=2/\",0,0.00,,"
        );
        assert_eq!(
            csv("cycles", FULL, Some(2.0), Some((2.5, "GHz")), ";"),
            "1234567890;;cycles;2.00%;1000;100.00;2.500;GHz"
        );
    }

    #[test]
    fn repeated_runs_have_a_mean_and_its_error() {
        let (mean, error) = mean_and_error(&[90.0, 110.0, 100.0, 100.0]);
        assert!((mean - 100.0).abs() < 1e-9);
        assert!((error.unwrap() - 4.082_482_904).abs() < 1e-6);
        assert_eq!(mean_and_error(&[5.0]), (5.0, None));
        assert_eq!(mean_and_error(&[0.0, 0.0]), (0.0, None));
    }
}
