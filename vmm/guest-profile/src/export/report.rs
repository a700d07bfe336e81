//! Formats a table of the sampled functions, like `perf report --stdio`.

use std::collections::HashMap;
use std::fmt::Write as _;

use super::call_tree::{CallGraphOptions, CallTree};
use super::filter::SampleFilter;
use super::symbolize::{Symbolizer, task_label};
use super::{Profile, ProfileSample, SampledEventInfo, frames};

/// Property of a sample by which a report groups samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum SortKey {
    /// Name of the sampled task.
    Comm,
    /// Guest process ID of the sampled task.
    Pid,
    /// Number of the sampled vCPU.
    Vcpu,
    /// Object of the innermost frame: the name of its file, or the kernel.
    Object,
    /// Name of the function of the innermost frame.
    Symbol,
}

impl SortKey {
    /// Names of sort keys that `--sort` accepts, for messages.
    pub const NAMES: &'static str = "comm (or task), pid, vcpu (or cpu), dso, sym (or symbol)";

    /// Returns the sort key with the name `name`.
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

/// A column of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProfileReportColumn {
    /// Sum of the row's periods as a share of the event's total, in percent.
    Overhead,
    /// Number of samples in the row.
    Samples,
    /// Sum of the periods of the row's samples.
    Period,
    /// Value of the sort key in the row's samples.
    Key(SortKey),
}

impl ProfileReportColumn {
    /// Returns the column with the name `name`: `overhead`, `sample`, `period`, or a sort key.
    pub fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "overhead" => Self::Overhead,
            "sample" | "samples" => Self::Samples,
            "period" => Self::Period,
            name => Self::Key(SortKey::from_name(name)?),
        })
    }

    fn heading(self) -> &'static str {
        match self {
            Self::Overhead => "Overhead",
            Self::Samples => "Samples",
            Self::Period => "Period",
            Self::Key(key) => key.heading(),
        }
    }

    /// Returns the minimum width of a numeric column, in characters, or `None` for a text column.
    fn number_width(self) -> Option<usize> {
        match self {
            Self::Overhead => Some(8),
            Self::Samples => Some(12),
            Self::Period => Some(14),
            Self::Key(_) => None,
        }
    }
}

/// Options for a report.
#[derive(Debug, Clone)]
pub struct ProfileReportOptions {
    /// Columns by which samples are grouped, in the order of the output.
    pub sort: Vec<SortKey>,
    /// Columns to print, in order; `None` for the default: the share, the number of samples and the
    /// sort keys.
    pub columns: Option<Vec<ProfileReportColumn>>,
    /// Minimum share of a row, in percent. Rows below it are omitted.
    pub min_percent: f64,
    /// Filter for the displayed samples. The shares still refer to all samples.
    pub filter: SampleFilter,
    /// Call graph below each row, if any.
    pub call_graph: Option<CallGraphOptions>,
}

impl Default for ProfileReportOptions {
    fn default() -> Self {
        Self {
            sort: vec![SortKey::Comm, SortKey::Object, SortKey::Symbol],
            columns: None,
            min_percent: 0.0,
            filter: SampleFilter::default(),
            call_graph: None,
        }
    }
}

impl ProfileReportOptions {
    fn columns(&self) -> Vec<ProfileReportColumn> {
        self.columns.clone().unwrap_or_else(|| {
            let numbers = [ProfileReportColumn::Overhead, ProfileReportColumn::Samples];
            let keys = self.sort.iter().copied().map(ProfileReportColumn::Key);
            numbers.into_iter().chain(keys).collect()
        })
    }
}

/// One row of a report, which stands for the samples with equal values in the sort columns.
#[derive(Debug, Clone, PartialEq)]
pub struct ProfileReportRow {
    /// Share of the row in the event's total period, in percent.
    pub percent: f64,
    /// Number of samples in the row.
    pub samples: u64,
    /// Sum of the periods of the row's samples.
    pub period: u64,
    /// Text of the row in each sort column.
    pub keys: Vec<String>,
}

/// The table of one event in a report.
#[derive(Debug, Clone, PartialEq)]
pub struct ProfileReportTable {
    /// Name of the event.
    pub event: String,
    /// Number of samples of the event, including those whose rows are omitted.
    pub samples: u64,
    /// Sum of the periods of all samples of the event, including those whose rows are omitted.
    pub period: u64,
    /// `true` if the event's samples have different periods.
    pub weighted: bool,
    /// Rows, sorted by descending share.
    pub rows: Vec<ProfileReportRow>,
}

/// Returns the tables of a report, one per event. Samples are grouped by the sort columns.
pub fn tables(
    profile: &Profile,
    symbols: &mut Symbolizer<'_>,
    options: &ProfileReportOptions,
) -> Vec<ProfileReportTable> {
    let events = profile.events.iter();
    events
        .map(|event| table(event, profile, symbols, options))
        .collect()
}

fn table(
    event: &SampledEventInfo,
    profile: &Profile,
    symbols: &mut Symbolizer<'_>,
    options: &ProfileReportOptions,
) -> ProfileReportTable {
    let mut groups: HashMap<Vec<String>, (u64, u64)> = HashMap::new();
    let (mut samples, mut period) = (0u64, 0u64);
    let (mut least, mut most) = (u64::MAX, 0);
    for s in profile.samples().filter(|s| s.event_id == event.id) {
        samples += 1;
        period = period.saturating_add(s.period);
        (least, most) = (least.min(s.period), most.max(s.period));
        if options.filter.matches(profile, symbols, &s) {
            let group = groups.entry(keys(&s, profile, symbols, options)).or_default();
            group.0 += 1;
            group.1 = group.1.saturating_add(s.period);
        }
    }
    let mut rows: Vec<ProfileReportRow> = groups
        .into_iter()
        .map(|(keys, (n, p))| ProfileReportRow {
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
    ProfileReportTable {
        event: event.name.clone(),
        samples,
        period,
        weighted: least < most,
        rows,
    }
}

/// Returns the text of a sample in each sort column.
fn keys(
    s: &ProfileSample<'_>,
    profile: &Profile,
    symbols: &mut Symbolizer<'_>,
    options: &ProfileReportOptions,
) -> Vec<String> {
    let top = frames(s).next().map(|f| symbols.name(f, s.pid));
    let key = |key: &SortKey| match key {
        SortKey::Comm => task_label(profile, s.tid, s.cr3, s.time_ns),
        SortKey::Pid => s.pid.cast_signed().to_string(),
        SortKey::Vcpu => format!("{:03}", s.vcpu),
        SortKey::Object => top.as_ref().map_or_else(String::new, |n| n.object.to_string()),
        SortKey::Symbol => top.as_ref().map_or_else(String::new, |n| {
            // perf marks guest frames with g (kernel) or u (user space).
            format!("[{}] {}", if n.kernel { 'g' } else { 'u' }, n.name)
        }),
    };
    options.sort.iter().map(key).collect()
}

/// Returns the call trees of one event, one per row of its table.
fn call_trees(
    event: &SampledEventInfo,
    profile: &Profile,
    symbols: &mut Symbolizer<'_>,
    options: &ProfileReportOptions,
) -> HashMap<Vec<String>, CallTree> {
    let mut trees = HashMap::new();
    let Some(graph) = options.call_graph else {
        return trees;
    };
    for s in profile.samples().filter(|s| s.event_id == event.id) {
        if options.filter.matches(profile, symbols, &s) {
            let tree = trees
                .entry(keys(&s, profile, symbols, options))
                .or_insert_with(CallTree::new);
            tree.add(&s, symbols, graph.order);
        }
    }
    trees
}

/// Returns the number `n` as abbreviated by perf, for example `12K` for 12345.
fn short(n: u64) -> String {
    match n {
        0..=9_999 => n.to_string(),
        10_000..=9_999_999 => format!("{}K", n / 1000),
        _ => format!("{}M", n / 1_000_000),
    }
}

/// Returns the width of each column: the width of its widest cell or of its heading.
pub(super) fn widths<'r>(headings: &[&str], rows: impl Iterator<Item = &'r [String]>) -> Vec<usize> {
    let mut widths: Vec<usize> = headings.iter().map(|heading| heading.len()).collect();
    for keys in rows {
        for (width, key) in widths.iter_mut().zip(keys) {
            *width = key.chars().count().max(*width);
        }
    }
    widths
}

/// Formats one line of a table: each text is padded to the width of its column.
pub(super) fn columns(texts: &[&str], widths: &[usize]) -> String {
    let mut line = String::new();
    for (text, width) in texts.iter().zip(widths) {
        // Writing to a String cannot fail.
        let _ = write!(line, "  {text:<width$}");
    }
    line.truncate(line.trim_end().len());
    line
}

/// Returns the text of a row in each column.
fn cells(
    row: &ProfileReportRow,
    options: &ProfileReportOptions,
    shown: &[ProfileReportColumn],
) -> Vec<String> {
    let cell = |column: &ProfileReportColumn| match column {
        ProfileReportColumn::Overhead => format!("{:.2}%", row.percent),
        ProfileReportColumn::Samples => row.samples.to_string(),
        ProfileReportColumn::Period => row.period.to_string(),
        ProfileReportColumn::Key(key) => {
            let at = options.sort.iter().position(|sort| sort == key);
            at.and_then(|at| row.keys.get(at)).cloned().unwrap_or_default()
        }
    };
    shown.iter().map(cell).collect()
}

/// Formats one row of a table. The line starts with the text `lead`, and each cell is padded to the
/// width of its column.
fn line(lead: &str, cells: &[String], shown: &[ProfileReportColumn], widths: &[usize]) -> String {
    let mut line = lead.to_owned();
    for ((cell, column), width) in cells.iter().zip(shown).zip(widths) {
        if line.len() > lead.len() {
            line += "  ";
        }
        // Writing to a String cannot fail.
        let _ = match column.number_width() {
            Some(_) => write!(line, "{cell:>width$}"),
            None => write!(line, "{cell:<width$}"),
        };
    }
    line.truncate(line.trim_end().len());
    line
}

/// Formats the header of a report table.
fn header(table: &ProfileReportTable, lost: u64) -> String {
    let mut out = format!(
        "# Samples: {}  of event '{}'\n",
        short(table.samples),
        table.event
    );
    // Writing to a String cannot fail.
    let _ = writeln!(out, "# Event count (approx.): {}", table.period);
    if table.weighted {
        out += "# The samples have different weights: Overhead is a share of the event count.\n";
    }
    if lost > 0 {
        let _ = writeln!(out, "# Lost samples: {lost}");
    }
    out + "#\n"
}

/// Formats the tables of a report as text.
pub fn render(profile: &Profile, symbols: &mut Symbolizer<'_>, options: &ProfileReportOptions) -> String {
    let shown = options.columns();
    let headings: Vec<&str> = shown.iter().map(|column| column.heading()).collect();
    let mut out = String::new();
    for event in &profile.events {
        let table = table(event, profile, symbols, options);
        let trees = call_trees(event, profile, symbols, options);
        out += &header(&table, profile.lost);
        let rows: Vec<Vec<String>> = table.rows.iter().map(|row| cells(row, options, &shown)).collect();
        let mut widths = widths(&headings, rows.iter().map(Vec::as_slice));
        for (width, column) in widths.iter_mut().zip(&shown) {
            *width = column.number_width().unwrap_or(0).max(*width);
        }
        let texts: Vec<String> = headings.iter().map(|text| (*text).to_owned()).collect();
        let dots: Vec<String> = widths.iter().map(|width| ".".repeat(*width)).collect();
        // Writing to a String cannot fail.
        let _ = writeln!(out, "{}", line("# ", &texts, &shown, &widths));
        let _ = writeln!(out, "{}\n#", line("# ", &dots, &shown, &widths));
        for (row, cells) in table.rows.iter().zip(&rows) {
            let _ = writeln!(out, "{}", line("  ", cells, &shown, &widths));
            if let (Some(tree), Some(graph)) = (trees.get(&row.keys), options.call_graph) {
                tree.write(table.period, graph.min_percent, &mut out);
            }
        }
        out.push('\n');
    }
    out
}
