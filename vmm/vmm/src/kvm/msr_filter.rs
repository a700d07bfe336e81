//! Installs the MSR filter that makes every guest access to a PMU register exit to user space.
//!
//! While KVM's own vPMU is disabled, KVM *returns* 0 when the guest reads an architectural PMU
//! register. A register that the filter misses would therefore give the guest a misleading zero.
//! The filter covers the registers of both vendors for every PMU model, and Perfvisor's vPMU
//! decides which accesses raise #GP.

use std::ops::RangeInclusive;

use kvm_bindings::{KVM_CAP_X86_USER_SPACE_MSR, kvm_enable_cap};
use kvm_ioctls::{Cap, MsrExitReason, MsrFilterDefaultAction, MsrFilterRange, MsrFilterRangeFlags};

use super::call::KvmIoctlError;
use super::vm_fd::VmFd;

/// Maximum number of ranges of a filter (`KVM_MSR_FILTER_MAX_RANGES`, KVM API 4.97).
const MAX_RANGES: usize = 16;
/// Maximum number of registers in one range of a filter. `KVM_MSR_FILTER_MAX_BITMAP_SIZE` is 0x600
/// bytes.
const MAX_SPAN: u32 = 0x600 * 8;

/// Error when installing the MSR filter.
#[derive(Debug, thiserror::Error)]
pub enum MsrFilterError {
    /// KVM cannot forward MSR accesses to user space.
    #[error(
        "this host's KVM lacks {0}, so PMU registers cannot be trapped; use Linux 5.10 or later, or --pmu off"
    )]
    Unsupported(&'static str),
    /// The filter needs more ranges than KVM accepts.
    #[error("{0} MSR ranges must be trapped, but KVM supports at most {MAX_RANGES}")]
    TooManyRanges(usize),
    /// A KVM call that installs the filter failed.
    #[error(transparent)]
    Kvm(#[from] KvmIoctlError),
}

/// Makes every guest access to an MSR in `ranges` exit to user space. KVM handles all other MSRs.
///
/// # Errors
/// Returns an [`MsrFilterError`] if KVM lacks a capability, if there are too many ranges, or if a
/// call fails.
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
        .map_err(KvmIoctlError::of("KVM_ENABLE_CAP(KVM_CAP_X86_USER_SPACE_MSR)"))?;

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
    Ok(set.map_err(KvmIoctlError::of("KVM_X86_SET_MSR_FILTER"))?)
}

/// A range of KVM's MSR filter with a bit for each register. May cover several of the requested
/// ranges.
#[derive(Debug, PartialEq, Eq)]
struct FilterRange {
    base: u32,
    count: u32,
    /// Bitmap that tells KVM which registers to handle itself: bit n stands for register `base +
    /// n`. Accesses to a register whose bit is clear exit to user space.
    allowed: Vec<u8>,
}

/// Combines `ranges` into as few filter ranges as the maximum size of a bitmap permits.
fn spans(ranges: &[RangeInclusive<u32>]) -> Vec<FilterRange> {
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
            FilterRange { base, count, allowed }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The filter ranges trap exactly the requested MSRs. KVM accepts the number of ranges that the
    /// PMU registers of both vendors need.
    #[test]
    fn filter_ranges_trap_exactly_requested_msrs() {
        let ranges = vpmu::PmuModel::INTEL.trapped_msrs();
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
