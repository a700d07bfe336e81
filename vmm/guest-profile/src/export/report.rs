//! Formats a table of the sampled functions, like `perf report --stdio`.

use std::collections::HashMap;
use std::fmt::Write as _;

use super::symbolize::{Symbolizer, task_label};
use super::{Profile, frames};

/// A column by which samples are grouped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SortKey {
    /// Task name.
    Comm,
    /// Guest process ID.
    Pid,
    /// vCPU number.
    Vcpu,
    /// File name, or the kernel.
    Object,
    /// Function name.
    Symbol,
}

impl SortKey {
    /// Names that `--sort` accepts.
    pub const NAMES: &'static str = "comm (or task), pid, vcpu (or cpu), dso, sym (or symbol)";

    /// Returns the key with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "comm" | "task" => Self::Comm,
            "pid" => Self::Pid,
            "vcpu" | "cpu" => Self::Vcpu,
            "dso" => Self::Object,
            "sym" | "symbol" => Self::Symbol,
            _ => return None,
        })
    }

    pub(super) fn heading(self) -> &'static str {
        match self {
            Self::Comm => "Command",
            Self::Pid => "Pid",
            Self::Vcpu => "VCPU",
            Self::Object => "Shared Object",
            Self::Symbol => "Symbol",
        }
    }
}

/// Options of a report.
#[derive(Debug, Clone)]
pub struct ReportOptions {
    /// Columns, in order.
    pub sort: Vec<SortKey>,
    /// Minimum share of a row, in percent. Rows below it are omitted.
    pub min_percent: f64,
}

impl Default for ReportOptions {
    fn default() -> Self {
        Self {
            sort: vec![SortKey::Comm, SortKey::Object, SortKey::Symbol],
            min_percent: 0.0,
        }
    }
}

/// One row of a report.
#[derive(Debug, Clone, PartialEq)]
pub struct ReportRow {
    /// Share of the event's periods, in percent.
    pub percent: f64,
    /// Number of samples.
    pub samples: u64,
    /// Sum of the periods of these samples.
    pub period: u64,
    /// Texts of the columns.
    pub keys: Vec<String>,
}

/// The rows of one event, sorted by descending share.
#[derive(Debug, Clone, PartialEq)]
pub struct ReportTable {
    /// Name of the event.
    pub event: String,
    /// Number of samples of the event, including those of omitted rows.
    pub samples: u64,
    /// Sum of the periods of these samples.
    pub period: u64,
    /// Rows, sorted by descending share.
    pub rows: Vec<ReportRow>,
}

/// Groups the samples of each event by the sort columns.
pub fn tables(profile: &Profile, symbols: &mut Symbolizer<'_>, options: &ReportOptions) -> Vec<ReportTable> {
    profile
        .events
        .iter()
        .map(|event| {
            let mut groups: HashMap<Vec<String>, (u64, u64)> = HashMap::new();
            let (mut samples, mut period) = (0u64, 0u64);
            for s in profile.samples().filter(|s| s.event_id == event.id) {
                let top = frames(&s).next().map(|f| symbols.name(f, s.pid));
                let keys = options
                    .sort
                    .iter()
                    .map(|key| match key {
                        SortKey::Comm => task_label(profile, s.tid, s.cr3, s.time_ns),
                        SortKey::Pid => s.pid.cast_signed().to_string(),
                        SortKey::Vcpu => format!("{:03}", s.vcpu),
                        SortKey::Object => top.as_ref().map_or_else(String::new, |n| n.object.to_string()),
                        SortKey::Symbol => top.as_ref().map_or_else(String::new, |n| {
                            // perf marks guest frames with g (kernel) and u (user space).
                            format!("[{}] {}", if n.kernel { 'g' } else { 'u' }, n.name)
                        }),
                    })
                    .collect();
                let group = groups.entry(keys).or_default();
                group.0 += 1;
                group.1 = group.1.saturating_add(s.period);
                samples += 1;
                period = period.saturating_add(s.period);
            }
            let mut rows: Vec<ReportRow> = groups
                .into_iter()
                .map(|(keys, (n, p))| ReportRow {
                    percent: if period == 0 {
                        0.0
                    } else {
                        100.0 * p as f64 / period as f64
                    },
                    samples: n,
                    period: p,
                    keys,
                })
                .filter(|r| r.percent >= options.min_percent)
                .collect();
            rows.sort_by(|a, b| b.period.cmp(&a.period).then_with(|| a.keys.cmp(&b.keys)));
            ReportTable {
                event: event.name.clone(),
                samples,
                period,
                rows,
            }
        })
        .collect()
}

/// Abbreviates a number like perf: 1234 as `1K`.
fn short(n: u64) -> String {
    match n {
        0..=9_999 => n.to_string(),
        10_000..=9_999_999 => format!("{}K", n / 1000),
        _ => format!("{}M", n / 1_000_000),
    }
}

/// Returns the width of each column, including its heading.
pub(super) fn widths<'r>(headings: &[&str], rows: impl Iterator<Item = &'r [String]>) -> Vec<usize> {
    let mut widths: Vec<usize> = headings.iter().map(|heading| heading.len()).collect();
    for keys in rows {
        for (width, key) in widths.iter_mut().zip(keys) {
            *width = key.chars().count().max(*width);
        }
    }
    widths
}

/// Formats the texts in columns of these widths.
pub(super) fn columns(texts: &[&str], widths: &[usize]) -> String {
    let mut line = String::new();
    for (text, width) in texts.iter().zip(widths) {
        // Writing to a String cannot fail.
        let _ = write!(line, "  {text:<width$}");
    }
    line.truncate(line.trim_end().len());
    line
}

/// Formats the tables as text.
pub fn render(profile: &Profile, symbols: &mut Symbolizer<'_>, options: &ReportOptions) -> String {
    let mut out = String::new();
    for table in tables(profile, symbols, options) {
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "# Samples: {}  of event '{}'",
            short(table.samples),
            table.event
        );
        let _ = writeln!(out, "# Event count (approx.): {}", table.period);
        if profile.lost > 0 {
            let _ = writeln!(out, "# Lost samples: {}", profile.lost);
        }
        let _ = writeln!(out, "#");
        let headings: Vec<&str> = options.sort.iter().map(|k| k.heading()).collect();
        let widths = widths(&headings, table.rows.iter().map(|row| row.keys.as_slice()));
        let columns = |texts: &[&str]| columns(texts, &widths);
        let _ = writeln!(
            out,
            "# {:>8}  {:>12}{}",
            "Overhead",
            "Samples",
            columns(&headings)
        );
        let dots: Vec<String> = widths.iter().map(|w| ".".repeat(*w)).collect();
        let dots: Vec<&str> = dots.iter().map(String::as_str).collect();
        let _ = writeln!(out, "# {}  {}{}", ".".repeat(8), ".".repeat(12), columns(&dots));
        let _ = writeln!(out, "#");
        for r in &table.rows {
            let keys: Vec<&str> = r.keys.iter().map(String::as_str).collect();
            let _ = writeln!(out, "{:>9.2}%  {:>12}{}", r.percent, r.samples, columns(&keys));
        }
        out.push('\n');
    }
    out
}
