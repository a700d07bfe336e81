//! The judge: what was seen against what must be, with no knowledge of where either came from.

use serde::Serialize;

/// How far a count may be from what is expected.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Tolerance {
    /// Not at all.
    Exact,
    /// So many percent of the expectation.
    Percent(f64),
    /// So many percent of the expectation and so many counts.
    PercentAnd(f64, u64),
    /// The expectation is the least that is right.
    AtLeast,
    /// The expectation is the most that is right.
    AtMost,
    /// Anything from here to there.
    Range(u64, u64),
}

impl Tolerance {
    /// Whether `seen` is right when `expected` is.
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

/// What a row comes to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum Verdict {
    /// Everything that was seen is right.
    #[serde(rename = "PASS")]
    Pass,
    /// Something that was seen is wrong, or nothing was seen.
    #[serde(rename = "FAIL")]
    Fail,
    /// This host cannot count it, and nothing pretended to.
    #[serde(rename = "not supported here")]
    NotSupported,
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Pass => "PASS",
            Self::Fail => "FAIL",
            Self::NotSupported => "not supported here",
        })
    }
}

/// A number something must be, and how far from it is still right.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Expected {
    /// The number.
    pub value: u64,
    /// How far from it is right.
    pub tolerance: Tolerance,
}

/// Everything that is known of one count.
#[derive(Clone, Copy, Debug, Default)]
pub struct Evidence {
    /// What the guest read; `None`: it did not count.
    pub guest: Option<u64>,
    /// What the host says, and how far the guest may be from it.
    pub host: Option<Expected>,
    /// What it must be, as far as that is known apart from the two.
    pub expected: Option<Expected>,
}

/// The verdict, and for a failure the reason.
pub fn judge(seen: &Evidence) -> (Verdict, Option<String>) {
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

/// The verdict on a counter that is said not to be backed here: it must not have moved, and the host must say
/// that nobody counts for it. `enumerated`: the guest's CPUID says it is there.
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

/// The whole part of a number of something; 0 for what is negative or none.
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

    fn evidence(guest: u64, host: u64, expected: u64, tolerance: Tolerance) -> Evidence {
        Evidence {
            guest: Some(guest),
            host: Some(Expected {
                value: host,
                tolerance: Tolerance::Exact,
            }),
            expected: Some(Expected {
                value: expected,
                tolerance,
            }),
        }
    }

    /// The command is worth nothing if it cannot fail: a count that was tampered with by one is found.
    #[test]
    fn an_exact_count_off_by_one_fails() {
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

    /// Nothing seen, or nothing to hold it against, is no success.
    #[test]
    fn missing_evidence_fails() {
        assert_eq!(judge(&Evidence::default()).0, Verdict::Fail);
        let alone = Evidence {
            guest: Some(5),
            ..Evidence::default()
        };
        assert_eq!(judge(&alone).0, Verdict::Fail);
    }

    /// "not supported here" has to be true.
    #[test]
    fn an_event_that_moves_is_not_unsupported() {
        assert_eq!(
            judge_unbacked(Some(0), Some("none"), "no PMU").0,
            Verdict::NotSupported
        );
        assert_eq!(judge_unbacked(None, None, "no PMU").0, Verdict::NotSupported);
        assert_eq!(judge_unbacked(Some(7), Some("none"), "no PMU").0, Verdict::Fail);
        assert_eq!(judge_unbacked(Some(0), Some("clock"), "no PMU").0, Verdict::Fail);
    }

    proptest! {
        /// Whatever the numbers, a pass means that both comparisons hold.
        #[test]
        fn a_pass_is_within_tolerance(guest: u32, host: u32, expected: u32, percent in 0.0..10.0f64) {
            let (guest, host, expected) = (u64::from(guest), u64::from(host), u64::from(expected));
            let seen = evidence(guest, host, expected, Tolerance::Percent(percent));
            let right = guest == host && guest.abs_diff(expected) as f64 <= expected as f64 * percent / 100.0;
            prop_assert_eq!(judge(&seen).0 == Verdict::Pass, right);
        }
    }
}
