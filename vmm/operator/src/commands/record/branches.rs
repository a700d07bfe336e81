//! Branch stacks of a recording: options and statistics.

use std::str::FromStr;
use std::time::Duration;

use perf_core::branch::BranchFilter;

use super::args::RecordArgs;
use control_api::protocol::BranchStacks;

/// Words of option `-j`, named as in perf, with their branch filters.
const WORDS: [(&str, BranchFilter); 10] = [
    ("any", BranchFilter::ANY),
    ("any_call", BranchFilter::ANY_CALL),
    ("any_ret", BranchFilter::ANY_RETURN),
    ("ind_call", BranchFilter::IND_CALL),
    ("ind_jmp", BranchFilter::IND_JUMP),
    ("call", BranchFilter::CALL),
    ("cond", BranchFilter::COND),
    ("u", BranchFilter::USER),
    ("k", BranchFilter::KERNEL),
    ("save_type", BranchFilter::TYPE_SAVE),
];

/// Error returned when a branch filter is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseBranchFilterError {
    /// The filter contains an unsupported word.
    #[error(
        "'{0}' is unsupported; use any, any_call, any_ret, ind_call, ind_jmp, call, cond, u, k and save_type"
    )]
    Word(String),
}

/// Branches selected by `-j`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BranchFilterArg(pub(super) BranchFilter);

impl FromStr for BranchFilterArg {
    type Err = ParseBranchFilterError;

    fn from_str(text: &str) -> Result<Self, ParseBranchFilterError> {
        let mut filter = BranchFilter::empty();
        for word in text.split(',') {
            let known = WORDS.iter().find(|(name, _)| *name == word);
            filter |= known
                .ok_or_else(|| ParseBranchFilterError::Word(word.to_owned()))?
                .1;
        }
        // As in perf, levels alone select all branch types.
        if !filter.intersects(BranchFilter::KINDS) {
            filter |= BranchFilter::ANY;
        }
        Ok(Self(filter))
    }
}

/// Error returned when the overhead limit of branch stacks is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be a percentage between 0.1% and 100%")]
pub struct ParseBranchOverheadError;

/// Maximum share of the vCPUs' time that recording branch stacks may take, in thousandths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BranchOverhead(u32);

impl FromStr for BranchOverhead {
    type Err = ParseBranchOverheadError;

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 1 and 1000"
    )]
    fn from_str(text: &str) -> Result<Self, ParseBranchOverheadError> {
        let number = text.strip_suffix('%').unwrap_or(text);
        let percent: f64 = number.parse().map_err(|_| ParseBranchOverheadError)?;
        let permille = (percent * 10.0).round();
        if (1.0..=1000.0).contains(&permille) {
            Ok(Self(permille as u32))
        } else {
            Err(ParseBranchOverheadError)
        }
    }
}

/// Returns the parameters of the requested branch stacks, or `None` if none are requested.
pub(super) fn branch_stacks(args: &RecordArgs) -> Option<BranchStacks> {
    let any = args.branch_any.then_some(BranchFilter::ANY);
    let filter = args.branch_filter.map(|BranchFilterArg(filter)| filter).or(any)?;
    Some(BranchStacks {
        filter: filter.bits(),
        depth: u32::from(args.branch_depth),
        overhead_permille: args.branch_overhead.0,
    })
}

/// Statistics of the branch stacks of a recording.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BranchTotals {
    stacks: u64,
    branches: u64,
    /// Number of branch stacks with fewer branches than requested.
    truncated: u64,
    /// Total time for which samples stopped and single-stepped the vCPUs, in nanoseconds.
    stepped_ns: u64,
}

impl BranchTotals {
    /// Adds a sample with `branches` branches to the statistics. `held_ns` is the time for which
    /// the previous sample stopped the vCPU, in nanoseconds.
    pub(super) fn add(&mut self, stacks: BranchStacks, branches: usize, held_ns: u32) {
        self.stacks += 1;
        self.branches += branches as u64;
        self.truncated += u64::from((branches as u64) < u64::from(stacks.depth));
        self.stepped_ns += u64::from(held_ns);
    }

    /// Returns the summary of the branch stacks in a recording of `vcpus` vCPUs, or `None` if there
    /// are none.
    pub(super) fn summary(&self, elapsed: Duration, vcpus: usize) -> Option<String> {
        let Self {
            stacks,
            branches,
            truncated,
            stepped_ns,
        } = *self;
        let vcpu_seconds = elapsed.as_secs_f64() * vcpus.max(1) as f64;
        if stacks == 0 || vcpu_seconds <= 0.0 {
            return None;
        }
        Some(format!(
            "branch stacks: {:.1} per vCPU and second, {:.1} branches each, {truncated} of {stacks} truncated, \
             {:.2} % of the vCPUs' time",
            stacks as f64 / vcpu_seconds,
            branches as f64 / stacks as f64,
            stepped_ns as f64 / vcpu_seconds / 1e7
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn branch_filter_has_words_of_perf() {
        let filter = |text: &str| text.parse().map(|BranchFilterArg(filter)| filter);
        assert_eq!(filter("any,u"), Ok(BranchFilter::ANY | BranchFilter::USER));
        assert_eq!(filter("k"), Ok(BranchFilter::ANY | BranchFilter::KERNEL));
        let calls = BranchFilter::ANY_CALL | BranchFilter::TYPE_SAVE;
        assert_eq!(filter("any_call,save_type"), Ok(calls));
        for word in ["", "hv", "in_tx", "stack", "any,,u"] {
            let error = filter(word).unwrap_err();
            assert!(error.to_string().contains("unsupported; use any"), "{error}");
        }
    }

    #[test]
    fn branch_overhead_is_a_percentage() {
        for (text, permille) in [("5%", 50), ("5", 50), ("0.1%", 1), ("100%", 1000)] {
            assert_eq!(text.parse(), Ok(BranchOverhead(permille)), "{text}");
        }
        for text in ["", "0%", "101%", "-1%", "nan", "x"] {
            assert_eq!(
                text.parse::<BranchOverhead>(),
                Err(ParseBranchOverheadError),
                "{text}"
            );
        }
    }

    #[test]
    fn summary_has_rate_depth_and_overhead() {
        let stacks = BranchStacks {
            filter: 8,
            depth: 4,
            overhead_permille: 50,
        };
        let mut totals = BranchTotals::default();
        assert_eq!(totals.summary(Duration::from_secs(1), 1), None);
        totals.add(stacks, 4, 0);
        totals.add(stacks, 1, 20_000_000);
        assert_eq!(
            totals.summary(Duration::from_secs(2), 1).unwrap(),
            "branch stacks: 1.0 per vCPU and second, 2.5 branches each, 1 of 2 truncated, 1.00 % of the vCPUs' time"
        );
    }
}
