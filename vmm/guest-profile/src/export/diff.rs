//! Compares two profiles, in the format of `perf diff`.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::Profile;
use super::report::{ProfileReportOptions, ProfileReportTable, SortKey, columns, tables, widths};
use super::symbolize::Symbolizer;

/// One row of a comparison: a function or another group of samples, with its share of the event's
/// total period in each profile. A share is `None` if the profile has no sample for this row.
#[derive(Debug, Clone, PartialEq)]
pub struct ProfileDiffRow {
    /// Share of this row in the older profile, in percent.
    pub before: Option<f64>,
    /// Share of this row in the newer profile, in percent.
    pub after: Option<f64>,
    /// Text of the row in each column by which samples are grouped.
    pub keys: Vec<String>,
}

impl ProfileDiffRow {
    /// Returns the change of the row's share, in percentage points.
    pub fn delta(&self) -> f64 {
        self.after.unwrap_or(0.0) - self.before.unwrap_or(0.0)
    }
}

/// Comparison of one event in two profiles.
#[derive(Debug, Clone, PartialEq)]
pub struct EventProfileDiff {
    /// Name of the compared event.
    pub event: String,
    /// Number of samples of the event in the older profile, and in the newer one.
    pub samples: (u64, u64),
    /// Rows of the comparison, sorted by descending absolute change of the share.
    pub rows: Vec<ProfileDiffRow>,
}

/// Compares the tables of two profiles event by event. Both profiles' tables must have the same
/// columns. Returns the comparisons, and the names of the events that only one profile contains.
fn compare(
    before: Vec<ProfileReportTable>,
    after: Vec<ProfileReportTable>,
    min_percent: f64,
) -> (Vec<EventProfileDiff>, Vec<String>) {
    let mut after: Vec<Option<ProfileReportTable>> = after.into_iter().map(Some).collect();
    let (mut diffs, mut alone) = (Vec::new(), Vec::new());
    for old in before {
        // If several events have the same name, they are compared in order.
        let same =
            |table: &&mut Option<ProfileReportTable>| table.as_ref().is_some_and(|t| t.event == old.event);
        let Some(new) = after.iter_mut().find(same).and_then(Option::take) else {
            alone.push(old.event);
            continue;
        };
        let mut rows: BTreeMap<Vec<String>, (Option<f64>, Option<f64>)> = BTreeMap::new();
        for row in old.rows {
            rows.entry(row.keys).or_default().0 = Some(row.percent);
        }
        for row in new.rows {
            rows.entry(row.keys).or_default().1 = Some(row.percent);
        }
        let rows = rows
            .into_iter()
            .map(|(keys, (before, after))| ProfileDiffRow { before, after, keys });
        let larger = |row: &ProfileDiffRow| row.before.unwrap_or(0.0).max(row.after.unwrap_or(0.0));
        let shown = |row: &ProfileDiffRow| larger(row) >= min_percent;
        let mut rows: Vec<ProfileDiffRow> = rows.filter(shown).collect();
        rows.sort_by(|a, b| {
            let by_change = b.delta().abs().total_cmp(&a.delta().abs());
            by_change.then_with(|| a.keys.cmp(&b.keys))
        });
        diffs.push(EventProfileDiff {
            event: old.event,
            samples: (old.samples, new.samples),
            rows,
        });
    }
    alone.extend(after.into_iter().flatten().map(|table| table.event));
    (diffs, alone)
}

/// Compares the events that both profiles contain. Also returns the names of events that only one
/// profile contains.
pub fn diffs(
    (old, old_symbols): (&Profile, &mut Symbolizer<'_>),
    (new, new_symbols): (&Profile, &mut Symbolizer<'_>),
    options: &ProfileReportOptions,
) -> (Vec<EventProfileDiff>, Vec<String>) {
    // The limit is applied after the comparison, because a row may be below it in only one profile.
    let all = ProfileReportOptions {
        min_percent: 0.0,
        ..options.clone()
    };
    let (before, after) = (tables(old, old_symbols, &all), tables(new, new_symbols, &all));
    compare(before, after, options.min_percent)
}

/// Formats the comparison of two profiles as text.
pub fn render(diffs: &[EventProfileDiff], sort: &[SortKey]) -> String {
    let mut out = String::new();
    for diff in diffs {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "# Event '{}'", diff.event);
        let _ = writeln!(
            out,
            "# Samples: {} before, {} after",
            diff.samples.0, diff.samples.1
        );
        let _ = writeln!(out, "#");
        let headings: Vec<&str> = sort.iter().map(|key| key.heading()).collect();
        let widths = widths(&headings, diff.rows.iter().map(|row| row.keys.as_slice()));
        let dots: Vec<String> = widths.iter().map(|w| ".".repeat(*w)).collect();
        let _ = writeln!(
            out,
            "# {:>8}  {:>8}  {:>9}{}",
            "Before",
            "After",
            "Delta",
            columns(&headings, &widths)
        );
        let _ = writeln!(
            out,
            "# {0}  {0}  .{0}{1}",
            ".".repeat(8),
            columns(&dots.iter().map(String::as_str).collect::<Vec<_>>(), &widths)
        );
        let _ = writeln!(out, "#");
        for row in &diff.rows {
            let share = |share: Option<f64>| share.map_or_else(String::new, |share| format!("{share:.2}%"));
            let keys: Vec<&str> = row.keys.iter().map(String::as_str).collect();
            let _ = writeln!(
                out,
                "{:>10}  {:>8}  {:>+8.2}%{}",
                share(row.before),
                share(row.after),
                row.delta(),
                columns(&keys, &widths)
            );
        }
        out.push('\n');
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::report::ProfileReportRow;
    use super::*;

    fn table(event: &str, rows: &[(f64, &str)]) -> ProfileReportTable {
        let row = |&(percent, name): &(f64, &str)| ProfileReportRow {
            percent,
            samples: 1,
            period: 1,
            keys: vec![name.to_owned()],
        };
        ProfileReportTable {
            event: event.to_owned(),
            samples: rows.len() as u64,
            period: 100,
            weighted: false,
            rows: rows.iter().map(row).collect(),
        }
    }

    /// Rows are sorted by absolute change, including rows that occur in only one profile.
    #[test]
    fn diff_rows_are_sorted_by_change() {
        let before = vec![table("cycles", &[(60.0, "a"), (30.0, "b"), (10.0, "gone")])];
        let after = vec![table("cycles", &[(55.0, "a"), (44.5, "b"), (0.5, "new")])];
        let (diffs, alone) = compare(before, after, 0.0);
        assert!(alone.is_empty());
        let names: Vec<&str> = diffs[0].rows.iter().map(|row| row.keys[0].as_str()).collect();
        assert_eq!(names, ["b", "gone", "a", "new"]);
        assert_eq!(diffs[0].rows[1].after, None);
        let text = render(&diffs, &[SortKey::Symbol]);
        let line = |name: &str| {
            let line = text
                .lines()
                .find(|line| line.split_whitespace().last() == Some(name));
            line.unwrap_or_else(|| panic!("{text}"))
                .split_whitespace()
                .collect::<Vec<_>>()
        };
        assert_eq!(line("b"), ["30.00%", "44.50%", "+14.50%", "b"]);
        assert_eq!(line("gone"), ["10.00%", "-10.00%", "gone"]);
        assert_eq!(line("new"), ["0.50%", "+0.50%", "new"]);
    }

    /// A minimum share hides a row only if the row is below it in both profiles.
    #[test]
    fn diff_limit_applies_to_both_profiles() {
        let before = vec![table("cycles", &[(99.0, "a"), (1.0, "b")])];
        let after = vec![table("cycles", &[(1.0, "a"), (1.5, "b"), (97.5, "c")])];
        let (diffs, _) = compare(before, after, 2.0);
        let names: Vec<&str> = diffs[0].rows.iter().map(|row| row.keys[0].as_str()).collect();
        assert_eq!(names, ["a", "c"]);
    }

    #[test]
    fn diff_names_unmatched_events() {
        let before = vec![table("cycles", &[]), table("x", &[])];
        let after = vec![table("y", &[]), table("cycles", &[])];
        let (diffs, alone) = compare(before, after, 0.0);
        assert_eq!(diffs.len(), 1);
        assert_eq!(alone, ["x", "y"]);
    }
}
