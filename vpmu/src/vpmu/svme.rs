//! EFER.SVME, on which the host-only and guest-only bits of AMD selectors depend.
//!
//! The register belongs to the processor and not to the PMU. The caller therefore sets its value
//! when [`Vpmu::needs_svme`] requests it. Linux rewrites its selectors after it has changed SVME
//! (`amd_pmu_enable_virt`, `amd_pmu_disable_virt`), so writes to EFER do not have to exit.

use super::Vpmu;
use crate::index::counters_in;
use crate::vendor::selector;

impl Vpmu {
    /// Returns whether [`Self::set_svme`] must be called before the next [`Self::reconcile`],
    /// because the guest has enabled a counter with exactly one of AMD's host-only and guest-only
    /// bits.
    #[inline]
    pub fn needs_svme(&self) -> bool {
        self.needs_svme
    }

    /// Sets the current value of EFER.SVME. The change applies at the next [`Self::reconcile`].
    pub fn set_svme(&mut self, svme: bool) {
        self.needs_svme = false;
        if self.registers.svme != svme {
            self.registers.svme = svme;
            let dependent = counters_in(self.model.counters_mask() & u64::from(u32::MAX))
                .filter(|&counter| {
                    self.vendor
                        .depends_on_svme(self.registers.selectors[counter.slot()])
                })
                .fold(0, |mask, counter| mask | counter.mask());
            self.mark_stale(dependent);
        }
    }

    /// Requests the value of EFER.SVME if the selector value `value` enables a counter whose count
    /// depends on it.
    #[inline]
    pub(super) fn note_svme(&mut self, value: u64) {
        if value & selector::EN != 0 && self.vendor.depends_on_svme(value) {
            self.needs_svme = true;
        }
    }

    /// Requests the value of EFER.SVME if the count of any enabled counter depends on it.
    pub(crate) fn note_all_svme(&mut self) {
        for value in self.registers.selectors {
            self.note_svme(value);
        }
    }
}
