//! MSR addresses of both vendors, the MSRs that a VMM must trap, and the MSRs of the saved state.
//!
//! The vendor-specific definitions are in `intel.rs` and `amd.rs`. Only this module depends on
//! both.

use crate::index::MsrAddress;
use crate::model::PmuModel;
use crate::model_name::Vendor;
use crate::vendor::VendorOps;

pub use crate::amd::{
    DBG_EXTN_CFG, LBR_FROM0, LBR_SELECT, PERF_CNTR_GLOBAL_CTL, PERF_CNTR_GLOBAL_STATUS,
    PERF_CNTR_GLOBAL_STATUS_CLR, PERF_CNTR_GLOBAL_STATUS_SET, PERF_CTL0, PERF_CTR0, PERF_LEGACY_CTL0,
    PERF_LEGACY_CTR0,
};
pub use crate::freeze::{
    DEBUGCTL_FREEZE_BRANCHES_ON_PMI, DEBUGCTL_FREEZE_ON_PMI, STATUS_CTR_FRZ, STATUS_LBR_FRZ,
};
pub use crate::intel::{
    IA32_A_PMC0, IA32_DEBUGCTL, IA32_FIXED_CTR_CTRL, IA32_FIXED_CTR0, IA32_LBR_CTL, IA32_LBR_DEPTH,
    IA32_LBR_FROM_IP0, IA32_LBR_INFO0, IA32_LBR_TO_IP0, IA32_PERF_CAPABILITIES, IA32_PERF_GLOBAL_CTRL,
    IA32_PERF_GLOBAL_INUSE, IA32_PERF_GLOBAL_STATUS, IA32_PERF_GLOBAL_STATUS_RESET,
    IA32_PERF_GLOBAL_STATUS_SET, IA32_PERFEVTSEL0, IA32_PMC0, MSR_LASTBRANCH_TOS,
};

/// Returns the PMU definition of `vendor`.
pub(crate) const fn of(vendor: Vendor) -> &'static dyn VendorOps {
    match vendor {
        Vendor::Intel => &crate::intel::Intel,
        Vendor::Amd => &crate::amd::Amd,
    }
}

impl PmuModel {
    /// Returns the MSRs that make up the saved state of the model: control and status registers,
    /// selectors, then counters. Empty if the PMU is off.
    pub fn state_msrs(&self) -> Vec<MsrAddress> {
        of(self.vendor()).state_msrs(self)
    }

    /// Returns all MSRs that the VMM must trap to [`crate::Vpmu::read_msr`] and
    /// [`crate::Vpmu::write_msr`], sorted.
    ///
    /// The list contains the PMU registers of *both* vendors, including registers that the model
    /// lacks, because the hypervisor may handle untrapped ones itself. IA32_DEBUGCTL is included
    /// for models with [`PmuModel::debug_control_bits`].
    pub fn trapped_msrs(&self) -> Vec<std::ops::RangeInclusive<u32>> {
        let mut ranges = [Vendor::Intel, Vendor::Amd]
            .map(|vendor| of(vendor).addresses())
            .concat();
        if self.debug_control_bits() != 0 {
            ranges.push(IA32_DEBUGCTL..=IA32_DEBUGCTL);
        }
        ranges.sort_by_key(|range| *range.start());
        ranges
    }
}
