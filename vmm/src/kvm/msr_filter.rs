//! The MSR filter: every access of a guest to a PMU register becomes an exit.
//!
//! With KVM's own PMU off, KVM *answers* reads of the architectural PMU registers with 0 instead of failing
//! them, so leaving one out of the filter would hand the guest a number nobody counted. The filter therefore
//! covers the registers of both vendors, present in the guest's model or not; the vPMU decides which of them
//! fault.

use std::ops::RangeInclusive;

use kvm_bindings::{KVM_CAP_X86_USER_SPACE_MSR, kvm_enable_cap};
use kvm_ioctls::{Cap, MsrExitReason, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags};

use super::call::CallError;
use super::vm_fd::VmFd;

/// Most ranges one filter can have (`KVM_MSR_FILTER_MAX_RANGES`, KVM API 4.97).
const MAX_RANGES: usize = 16;
/// Most registers one range can span: `KVM_MSR_FILTER_MAX_BITMAP_SIZE` is 0x600 bytes.
const MAX_SPAN: u32 = 0x600 * 8;

/// Why the MSR filter could not be set.
#[derive(Debug, thiserror::Error)]
pub enum MsrFilterError {
    /// The host's KVM cannot hand MSR accesses to user space.
    #[error(
        "this host's KVM lacks {0}, so PMU registers cannot be trapped; use Linux 5.10 or later, or --pmu off"
    )]
    Unsupported(&'static str),
    /// More ranges than KVM takes.
    #[error("{0} MSR ranges are to be trapped but KVM takes at most {MAX_RANGES}")]
    TooManyRanges(usize),
    /// A KVM call failed.
    #[error(transparent)]
    Kvm(#[from] CallError),
}

/// Makes every guest access to `ranges` exit to user space; all other MSRs stay with KVM.
///
/// # Errors
/// [`MsrFilterError`] when this KVM cannot do it.
pub fn install(vm: &VmFd, ranges: &[RangeInclusive<u32>]) -> Result<(), MsrFilterError> {
    let vm = vm.raw();
    if !vm.check_extension(Cap::X86UserSpaceMsr) {
        return Err(MsrFilterError::Unsupported("KVM_CAP_X86_USER_SPACE_MSR"));
    }
    if !vm.check_extension(Cap::X86MsrFilter) {
        return Err(MsrFilterError::Unsupported("KVM_CAP_X86_MSR_FILTER"));
    }
    let spans = spans(ranges);
    if spans.len() > MAX_RANGES {
        return Err(MsrFilterError::TooManyRanges(spans.len()));
    }
    let mut cap = kvm_enable_cap {
        cap: KVM_CAP_X86_USER_SPACE_MSR,
        ..Default::default()
    };
    cap.args[0] = u64::from(MsrExitReason::Filter.bits());
    vm.enable_cap(&cap)
        .map_err(CallError::of("KVM_ENABLE_CAP(KVM_CAP_X86_USER_SPACE_MSR)"))?;

    let filter: Vec<MsrFilterRange<'_>> = spans
        .iter()
        .map(|span| MsrFilterRange {
            flags: MsrFilterRangeFlags::READ | MsrFilterRangeFlags::WRITE,
            base: span.base,
            msr_count: span.count,
            bitmap: &span.allowed,
        })
        .collect();
    let set = vm.set_msr_filter(MsrFilterDefaultAction::ALLOW, &filter);
    Ok(set.map_err(CallError::of("KVM_X86_SET_MSR_FILTER"))?)
}

/// Neighbouring ranges as one range of the filter, with a bit for each register.
#[derive(Debug, PartialEq, Eq)]
struct Span {
    base: u32,
    count: u32,
    /// Bit n: the access to register `base + n` stays with KVM. A zero bit denies it, which means an exit
    /// here.
    allowed: Vec<u8>,
}

/// Covers `ranges` with as few spans as the size of a bitmap lets.
fn spans(ranges: &[RangeInclusive<u32>]) -> Vec<Span> {
    let mut sorted: Vec<_> = ranges.iter().filter(|r| !r.is_empty()).collect();
    sorted.sort_by_key(|r| *r.start());
    let mut groups: Vec<Vec<&RangeInclusive<u32>>> = Vec::new();
    for range in sorted {
        match groups.last_mut() {
            Some(group) if range.end() - group[0].start() < MAX_SPAN => group.push(range),
            _ => groups.push(vec![range]),
        }
    }
    groups
        .into_iter()
        .map(|group| {
            let base = *group[0].start();
            let last = group.iter().map(|r| *r.end()).max().unwrap_or(base);
            let count = last - base + 1;
            let mut allowed = vec![0xffu8; count.div_ceil(8) as usize];
            for msr in group.into_iter().cloned().flatten() {
                let bit = (msr - base) as usize;
                allowed[bit / 8] &= !(1 << (bit % 8));
            }
            Span { base, count, allowed }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every register asked for is trapped, nothing between is, and both vendors' PMUs fit KVM's limit.
    #[test]
    fn spans_trap_exactly_what_is_asked() {
        let ranges = vpmu::Model::INTEL.trapped_msrs();
        let spans = spans(&ranges);
        assert!(spans.len() <= MAX_RANGES, "{} spans", spans.len());
        let trapped = |msr: u32| {
            spans.iter().any(|s| {
                msr.checked_sub(s.base)
                    .filter(|n| *n < s.count)
                    .is_some_and(|n| s.allowed[n as usize / 8] & (1 << (n % 8)) == 0)
            })
        };
        for msr in (0..0x2000)
            .chain(0xc000_0000..0xc000_1000)
            .chain(0xc001_0000..0xc001_1000)
        {
            assert_eq!(
                trapped(msr),
                ranges.iter().any(|r| r.contains(&msr)),
                "MSR {msr:#x}"
            );
        }
    }
}
