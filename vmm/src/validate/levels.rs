//! Counts of one privilege level, on hosts that hide it.
//!
//! A clock learns levels from the host kernel's samples of the guest. Where those never show the guest, kicks replace them; the
//! driver finds that out itself and the VM says so in its guest view.

use super::judge::Verdict;
use super::report::Row;

/// What a source of privilege levels means for their counts.
pub(super) fn hidden_levels(source: Option<&str>) -> Option<String> {
    (source == Some("kicks")).then(|| {
        "the host's kernel never showed the guest in its samples; kicks replace them, and come too late here".to_owned()
    })
}

/// Rows of one level that are wrong are not supported where the host was found to hide the level; the numbers stay.
pub(super) fn excused(rows: Vec<Row>, why: Option<String>) -> Vec<Row> {
    let Some(why) = why else {
        return rows;
    };
    rows.into_iter()
        .map(|row| match (row.verdict, row.ratio) {
            (Verdict::Fail, ratio) => {
                let measured = ratio
                    .map(|r| format!(" (measured: {r:.2} of it)"))
                    .unwrap_or_default();
                row.unsupported(format!("{why}{measured}"))
            }
            _ => row,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::super::judge::{Evidence, Expected, Tolerance};
    use super::super::report::Check;
    use super::*;

    /// What is wrong for a reason that was found out is no success either.
    #[test]
    fn a_wrong_level_is_never_a_pass() {
        let seen = Evidence {
            guest: Some(50),
            host: None,
            expected: Some(Expected {
                value: 100,
                tolerance: Tolerance::Percent(5.0),
            }),
        };
        let row = || Row::new(Check::Counting, "cycles:u", "clock", "busy").judged(&seen, "");
        assert_eq!(excused(vec![row()], None)[0].verdict, Verdict::Fail);
        assert_eq!(
            excused(vec![row()], hidden_levels(Some("kernel ring")))[0].verdict,
            Verdict::Fail
        );
        let excused = excused(vec![row()], hidden_levels(Some("kicks")));
        assert_eq!(excused[0].verdict, Verdict::NotSupported);
        assert!(
            excused[0].reason.as_ref().unwrap().contains("0.50"),
            "{excused:?}"
        );
        assert_eq!(excused[0].guest, Some(50));
    }
}
