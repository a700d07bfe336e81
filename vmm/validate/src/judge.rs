//! Compares measured counts with expected ones, independent of their origin.

use serde::Serialize;

/// Permitted deviation of a count from the expected value.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Tolerance {
    /// The count must equal the expected value.
    Exact,
    /// The count may deviate by this percentage of the expected value.
    Percent(f64),
    /// The count may deviate by this percentage of the expected value plus this number of counts.
    PercentAnd(f64, u64),
    /// The count must be at least the expected value.
    AtLeast,
    /// The count must be at most the expected value.
    AtMost,
    /// The count must be in this inclusive range.
    Range(u64, u64),
}

impl Tolerance {
    /// Returns whether the tolerance permits `seen` if `expected` is the expected value.
    pub fn allows(self, seen: u64, expected: u64) -> bool {
        let off = seen.abs_diff(expected) as f64;
        match self {
            Self::Exact => seen == expected,
            Self::Percent(percent) => off <= expected as f64 * percent / 100.0,
            Self::PercentAnd(percent, counts) => off <= expected as f64 * percent / 100.0 + counts as f64,
            Self::AtLeast => seen >= expected,
            Self::AtMost => seen <= expected,
            Self::Range(low, high) => (low..=high).contains(&seen),
        }
    }
}

impl std::fmt::Display for Tolerance {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exact => f.write_str("exact"),
            Self::Percent(percent) => write!(f, "{percent}%"),
            Self::PercentAnd(percent, counts) if *percent == 0.0 => write!(f, "+-{counts}"),
            Self::PercentAnd(percent, counts) => write!(f, "{percent}%+{counts}"),
            Self::AtLeast => f.write_str("or more"),
            Self::AtMost => f.write_str("or less"),
            Self::Range(low, high) => write!(f, "{low}-{high}"),
        }
    }
}

/// Verdict on a row of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Verdict {
    /// All counts of the row are correct.
    #[serde(rename = "PASS")]
    Pass,
    /// A count of the row is wrong or missing.
    #[serde(rename = "FAIL")]
    Fail,
    /// The host cannot count the event, and no counter changed.
    #[serde(rename = "not supported here")]
    NotSupported,
    /// Other load of the host prevents a verdict, because almost any count would pass.
    #[serde(rename = "too busy to tell")]
    TooBusy,
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Pass => "PASS",
            Self::Fail => "FAIL",
            Self::NotSupported => "not supported here",
            Self::TooBusy => "too busy to tell",
        })
    }
}

/// An expected value and its tolerance.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpectedCount {
    /// The expected value.
    pub value: u64,
    /// Permitted deviation of a count from the expected value.
    pub tolerance: Tolerance,
}

impl ExpectedCount {
    /// Creates an expectation.
    pub fn new(value: u64, tolerance: Tolerance) -> Self {
        Self { value, tolerance }
    }
}

/// The counts of one event in the guest and on the host, and the expected count.
#[derive(Clone, Copy, Debug, Default)]
pub struct CountComparison {
    /// Count in the guest, or `None` if the guest did not count.
    pub guest: Option<u64>,
    /// Count on the host, and the permitted deviation of the guest from it.
    pub host: Option<ExpectedCount>,
    /// Expected count from an independent source, if any.
    pub expected: Option<ExpectedCount>,
}

impl CountComparison {
    /// Creates a comparison of a count in the guest with an expected count, without a count on the
    /// host.
    pub fn of_guest(guest: Option<u64>, expected: ExpectedCount) -> Self {
        Self {
            guest,
            host: None,
            expected: Some(expected),
        }
    }
}

/// Judges the guest's count in `seen`. Returns the verdict and, for a failure, the reason.
pub fn judge(seen: &CountComparison) -> (Verdict, Option<String>) {
    let fail = |why: String| (Verdict::Fail, Some(why));
    let Some(guest) = seen.guest else {
        return fail("the guest did not count it".into());
    };
    if seen.host.is_none() && seen.expected.is_none() {
        return fail("there is nothing to compare it with".into());
    }
    if let Some(expected) = seen.expected
        && !expected.tolerance.allows(guest, expected.value)
    {
        return fail("off the expectation".into());
    }
    if let Some(host) = seen.host
        && !host.tolerance.allows(guest, host.value)
    {
        return fail("guest and host differ".into());
    }
    (Verdict::Pass, None)
}

/// Judges the counter of an event that this host cannot count because of `why`. The counter must
/// not have changed, and the host must report that nothing counts for it.
pub fn judge_unbacked(
    guest: Option<u64>,
    host_backing: Option<&str>,
    why: &str,
) -> (Verdict, Option<String>) {
    match (guest, host_backing) {
        (Some(count), _) if count != 0 => (
            Verdict::Fail,
            Some(format!("nothing can count it here ({why}), but it moved")),
        ),
        (_, Some(backing)) if backing != "none" => (
            Verdict::Fail,
            Some(format!(
                "nothing can count it here ({why}), but its backing is {backing}"
            )),
        ),
        _ => (Verdict::NotSupported, Some(why.to_owned())),
    }
}

/// Returns the integer part, or 0 for a negative number or NaN.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "floating-point numbers saturate, and no count is beyond 2^64"
)]
pub fn whole(number: f64) -> u64 {
    number as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn evidence(guest: u64, host: u64, expected: u64, tolerance: Tolerance) -> CountComparison {
        CountComparison {
            guest: Some(guest),
            host: Some(ExpectedCount {
                value: host,
                tolerance: Tolerance::Exact,
            }),
            expected: Some(ExpectedCount {
                value: expected,
                tolerance,
            }),
        }
    }

    /// If the tolerance is exact, a count that is off by one fails.
    #[test]
    fn exact_count_off_by_one_fails() {
        let ok = evidence(2010, 2010, 2010, Tolerance::Exact);
        assert_eq!(judge(&ok).0, Verdict::Pass);
        for tampered in [
            evidence(2011, 2011, 2010, Tolerance::Exact),
            evidence(2009, 2009, 2010, Tolerance::Exact),
            evidence(2010, 2009, 2010, Tolerance::Exact),
            evidence(2010, 2010, 2011, Tolerance::Exact),
        ] {
            let (verdict, why) = judge(&tampered);
            assert_eq!(verdict, Verdict::Fail, "{tampered:?}");
            assert!(why.is_some());
        }
    }

    #[test]
    fn two_percent_are_two_percent() {
        let at = |guest| judge(&evidence(guest, guest, 1000, Tolerance::Percent(2.0))).0;
        assert_eq!([at(980), at(1000), at(1020)], [Verdict::Pass; 3]);
        assert_eq!([at(979), at(1021), at(0)], [Verdict::Fail; 3]);
    }

    /// A missing count or expectation is a failure.
    #[test]
    fn missing_evidence_fails() {
        assert_eq!(judge(&CountComparison::default()).0, Verdict::Fail);
        let alone = CountComparison {
            guest: Some(5),
            ..CountComparison::default()
        };
        assert_eq!(judge(&alone).0, Verdict::Fail);
    }

    /// An event cannot be reported as not supported if its counter has changed.
    #[test]
    fn moving_event_is_not_unsupported() {
        assert_eq!(
            judge_unbacked(Some(0), Some("none"), "no PMU").0,
            Verdict::NotSupported
        );
        assert_eq!(judge_unbacked(None, None, "no PMU").0, Verdict::NotSupported);
        assert_eq!(judge_unbacked(Some(7), Some("none"), "no PMU").0, Verdict::Fail);
        assert_eq!(judge_unbacked(Some(0), Some("clock"), "no PMU").0, Verdict::Fail);
    }

    proptest! {
        /// A count passes only if it is within the tolerance of the expected count and equal to the
        /// host's count.
        #[test]
        fn pass_is_within_tolerance(guest: u32, host: u32, expected: u32, percent in 0.0..10.0f64) {
            let (guest, host, expected) = (u64::from(guest), u64::from(host), u64::from(expected));
            let seen = evidence(guest, host, expected, Tolerance::Percent(percent));
            let right = guest == host && guest.abs_diff(expected) as f64 <= expected as f64 * percent / 100.0;
            prop_assert_eq!(judge(&seen).0 == Verdict::Pass, right);
        }
    }
}
