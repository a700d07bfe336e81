//! Parses TAP, the Test Anything Protocol, which the bare-metal test guests print.

/// The parsed TAP output of a test guest.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TapReport {
    /// Number of planned tests, or `None` if the output contains no plan.
    pub planned: Option<usize>,
    /// Reason for skipping all tests, if the plan contains one.
    pub skipped_all: Option<String>,
    /// Descriptions of passed tests.
    pub passed: Vec<String>,
    /// Descriptions of skipped tests, with the reasons.
    pub skipped: Vec<String>,
    /// Descriptions of failed tests.
    pub failed: Vec<String>,
}

impl TapReport {
    /// Returns whether all planned tests ran and none failed.
    pub fn all_passed(&self) -> bool {
        self.failed.is_empty() && self.planned == Some(self.passed.len() + self.skipped.len())
    }
}

/// Parses TAP 13. Skips other lines.
pub fn parse_tap(text: &str) -> TapReport {
    let mut tap = TapReport::default();
    for line in text.lines() {
        let line = line.trim_end();
        if let Some(plan) = line.strip_prefix("1..") {
            let (count, reason) = plan.split_once('#').unwrap_or((plan, ""));
            tap.planned = count.trim().parse().ok();
            let reason = reason
                .trim()
                .strip_prefix("SKIP")
                .map(|text| text.trim().to_owned());
            tap.skipped_all = reason.filter(|_| tap.planned == Some(0));
        } else if let Some(test) = line.strip_prefix("not ok ") {
            tap.failed.push(description(test));
        } else if let Some(test) = line.strip_prefix("ok ") {
            let list = if test.contains("# SKIP") {
                &mut tap.skipped
            } else {
                &mut tap.passed
            };
            list.push(description(test));
        }
    }
    tap
}

/// Returns the description in a TAP test line, for example "reset values" for "3 - reset values".
fn description(test: &str) -> String {
    test.trim_start_matches(|c: char| c.is_ascii_digit())
        .trim_start_matches([' ', '-'])
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_sorted_by_outcome() {
        let tap = parse_tap(
            "TAP version 13\n1..3\nok 1 - widths\n# a remark\nok 2 - rate # SKIP no clock\n\
             not ok 3 - wrap\n",
        );
        assert_eq!(tap.planned, Some(3));
        assert_eq!(tap.passed, ["widths"]);
        assert_eq!(tap.skipped, ["rate # SKIP no clock"]);
        assert_eq!(tap.failed, ["wrap"]);
        assert!(!tap.all_passed());
    }

    #[test]
    fn truncated_tap_run_fails() {
        assert!(!parse_tap("1..2\nok 1 - a\n").all_passed());
        assert!(!parse_tap("").all_passed());
        assert!(parse_tap("1..1\nok 1 - a\n").all_passed());
        let skipped = parse_tap("1..0 # SKIP no PMU\n");
        assert!(skipped.all_passed());
        assert_eq!(skipped.skipped_all.as_deref(), Some("no PMU"));
    }
}
