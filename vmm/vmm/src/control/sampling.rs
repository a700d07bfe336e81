//! Sampling parameters of an operator's events.

use control_api::events::list::EventListEntry;
use control_api::protocol::{BranchStacks, RequestError, RequestErrorKind, SamplingParams};
use perf_core::attr::STACK_USER_MAX;
use perf_core::branch::{BranchFilter, BranchStackConfig, MAX_BRANCH_DEPTH};
use perf_core::{Attr, SampleType, error_line};

use super::session::fail;
use crate::pmu::VmPmu;

/// Fields of each sample except the call chain.
const SAMPLE: SampleType = SampleType::IP
    .union(SampleType::TID)
    .union(SampleType::TIME)
    .union(SampleType::CPU)
    .union(SampleType::PERIOD)
    .union(SampleType::STREAM_ID)
    .union(SampleType::RAW);

/// Returns an error if the sampling parameters exceed a limit or this host does not support them.
///
/// # Errors
/// Returns a [`RequestError`] of kind [`RequestErrorKind::Invalid`] or
/// [`RequestErrorKind::Unsupported`].
pub(super) fn check(pmu: &VmPmu, sampling: SamplingParams) -> Result<(), RequestError> {
    if sampling.stack_bytes > STACK_USER_MAX || !sampling.stack_bytes.is_multiple_of(8) {
        return fail(
            RequestErrorKind::Invalid,
            format!(
                "a sample has at most {STACK_USER_MAX} bytes of stack, a multiple of 8; not {}",
                sampling.stack_bytes
            ),
        );
    }
    let Some(stacks) = sampling.branches else {
        return Ok(());
    };
    let filter = BranchFilter::from_bits(stacks.filter);
    let Some(filter) = filter.filter(|filter| filter.intersects(BranchFilter::KINDS)) else {
        return fail(
            RequestErrorKind::Invalid,
            format!("unsupported branch filter {:#x}", stacks.filter),
        );
    };
    if !(1..=u32::from(MAX_BRANCH_DEPTH)).contains(&stacks.depth) {
        return fail(
            RequestErrorKind::Invalid,
            format!("the depth of a branch stack must be between 1 and {MAX_BRANCH_DEPTH}"),
        );
    }
    if !(1..=1000).contains(&stacks.overhead_permille) {
        return fail(
            RequestErrorKind::Invalid,
            "the overhead of branch stacks must be between 1 and 1000 thousandths",
        );
    }
    if sampling.chain_every > 1 {
        return fail(
            RequestErrorKind::Invalid,
            "samples with branch stacks are taken by the VMM; chain_every must be 1",
        );
    }
    let levels = match filter & BranchFilter::LEVELS {
        none if none.is_empty() => BranchFilter::LEVELS,
        levels => levels,
    };
    pmu.check_branches(levels)
        .or_else(|e| fail(RequestErrorKind::Unsupported, error_line(&e)))
}

/// Returns the parameters of an event's branch stacks. If the filter names no privilege level, the
/// stacks contain branches at the levels at which the event counts.
fn branch_sampling(stacks: BranchStacks, attr: &Attr) -> BranchStackConfig {
    let mut filter = BranchFilter::from_bits_truncate(stacks.filter);
    if !filter.intersects(BranchFilter::LEVELS) {
        filter.set(BranchFilter::USER, !attr.exclude_user);
        filter.set(BranchFilter::KERNEL, !attr.exclude_kernel);
    }
    let number = |n| u16::try_from(n).unwrap_or(u16::MAX);
    BranchStackConfig {
        filter,
        depth: number(stacks.depth),
        overhead_permille: number(stacks.overhead_permille),
    }
}

/// Sets the sampling parameters of `attr` to those of the operator. A period or frequency in
/// `spec`, the event specification, has priority over the operator's sampling rate.
pub(super) fn sample_with(attr: &mut Attr, sampling: SamplingParams, spec: &EventListEntry) {
    let (rate, frequency) = match (spec.period, spec.frequency_hz) {
        (Some(period), _) => (period, false),
        (None, Some(hz)) => (hz, true),
        (None, None) => (sampling.rate.max(1), sampling.frequency),
    };
    attr.sample_period = rate;
    attr.freq = frequency;
    attr.sample_type = SAMPLE;
    if sampling.callchain {
        attr.sample_type |= SampleType::CALLCHAIN;
    }
    if sampling.stack_bytes > 0 {
        attr.sample_type |= SampleType::REGS_USER | SampleType::STACK_USER;
        attr.sample_stack_user = sampling.stack_bytes;
    }
    if let Some(stacks) = sampling.branches {
        attr.sample_type |= SampleType::BRANCH_STACK;
        attr.branches = branch_sampling(stacks, attr);
    }
}

/// Returns the sampling period or frequency at which the event takes one of every `every` samples
/// that it would take at `rate`. `rate` is a frequency if `attr` samples by frequency, and a period
/// otherwise.
pub(super) fn rate_for(attr: &Attr, rate: u64, every: u32) -> u64 {
    if attr.freq {
        (rate / u64::from(every)).max(1)
    } else {
        rate.saturating_mul(every.into()).min(i64::MAX as u64)
    }
}
