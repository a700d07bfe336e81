//! Inheritance of events across vCPUs.
//!
//! A VM-wide event is opened once and has a child in the context of each vCPU. A read sums the live
//! children and the saved totals of exited children. Families are flat: the parent of a child is
//! always the opened event.
//!
//! When a child exits, its totals are added to those of the parent and the child is removed from
//! the list of live children, in one critical section under the family lock. Readers sum under the
//! same lock, so they include each count exactly once.

#[cfg(all(test, loom))]
mod model;

use std::sync::atomic::Ordering;

use crate::model::slices::EstimateSum;
use crate::model::totals::{ExitedTotals, Totals};
use crate::pmu::VcpuId;

/// A member of a family (a VM-wide event and its children). The totals of all members add up to
/// those of the family.
pub(crate) trait FamilyMember {
    /// Returns the current totals of the member, or its final totals if it has stopped.
    fn totals(&self) -> Totals;

    /// Returns [`FamilyMember::totals`], and an estimate of the count over the whole time enabled,
    /// from one reading of the member.
    fn totals_and_estimate(&self) -> (Totals, EstimateSum);

    /// Returns the number of the vCPU on which the member counts.
    fn vcpu(&self) -> Option<VcpuId> {
        None
    }
}

/// A reading of all members of a family.
#[derive(Debug, Default)]
pub(crate) struct FamilyReading {
    pub totals: Totals,
    pub estimate: EstimateSum,
    /// Contribution of each vCPU, including exited children, in order of vCPU number.
    pub by_vcpu: Vec<(VcpuId, Totals, EstimateSum)>,
}

/// The children of a VM-wide event: the live children, and the totals of exited ones.
#[derive(Debug)]
pub(crate) struct Children<M> {
    live: Vec<M>,
    /// Sum of the estimates of exited children.
    estimates: EstimateSum,
    /// Totals and estimates of exited children, summed for each vCPU, in order of vCPU number. A
    /// vCPU that was added and removed several times has one entry.
    gone: Vec<(VcpuId, Totals, EstimateSum)>,
}

impl<M> Default for Children<M> {
    fn default() -> Self {
        Self {
            live: Vec::new(),
            estimates: EstimateSum::default(),
            gone: Vec::new(),
        }
    }
}

impl<M: FamilyMember> Children<M> {
    pub fn live(&self) -> &[M] {
        &self.live
    }

    pub fn add(&mut self, child: M) {
        self.live.push(child);
    }

    /// Returns the sum of the totals of exited and live children.
    pub fn totals(&self, folded: &ExitedTotals) -> Totals {
        let mut totals = folded.load();
        for child in &self.live {
            totals.add(child.totals());
        }
        totals
    }

    /// Sets the counts of exited children to 0, but not their times.
    pub fn reset(&mut self, folded: &ExitedTotals) {
        folded.count.store(0, Ordering::Relaxed);
        self.estimates = EstimateSum::default();
        for (_, totals, estimate) in &mut self.gone {
            totals.count = 0;
            // After a reset, the count of an exited child is exactly 0, so its estimate has no
            // error.
            *estimate = EstimateSum::zero(totals.times.running_ns > 0);
            self.estimates.add(*estimate);
        }
    }

    /// Reads each live child once, and adds the exited children.
    pub fn read(&self, folded: &ExitedTotals) -> FamilyReading {
        let mut all = FamilyReading {
            totals: folded.load(),
            estimate: self.estimates,
            by_vcpu: self.gone.clone(),
        };
        for child in &self.live {
            let (totals, estimate) = child.totals_and_estimate();
            all.totals.add(totals);
            all.estimate.add(estimate);
            if let Some(vcpu) = child.vcpu() {
                all.by_vcpu.push((vcpu, totals, estimate));
            }
        }
        all.by_vcpu.sort_by_key(|(vcpu, ..)| *vcpu);
        all.by_vcpu
            .dedup_by(|(later, totals, estimate), (vcpu, sum, estimates)| {
                let same = later == vcpu;
                if same {
                    sum.add(*totals);
                    estimates.add(*estimate);
                }
                same
            });
        all
    }

    /// Removes a child that has stopped permanently, and adds its final totals to those of the
    /// parent. Returns `None` if the child was already removed.
    pub fn fold(&mut self, folded: &ExitedTotals, is_it: impl Fn(&M) -> bool) -> Option<(M, Totals)> {
        let child = self.unlink(is_it)?;
        let (last, estimate) = child.totals_and_estimate();
        let mut totals = folded.load();
        totals.add(last);
        folded.store(totals);
        self.estimates.add(estimate);
        if let Some(vcpu) = child.vcpu() {
            self.add_gone(vcpu, last, estimate);
        }
        Some((child, last))
    }

    /// Adds the totals of an exited child to the sums of its vCPU.
    fn add_gone(&mut self, vcpu: VcpuId, totals: Totals, estimate: EstimateSum) {
        match self.gone.binary_search_by_key(&vcpu, |(of, ..)| *of) {
            Ok(at) => {
                let (_, sum, estimates) = &mut self.gone[at];
                sum.add(totals);
                estimates.add(estimate);
            }
            Err(at) => self.gone.insert(at, (vcpu, totals, estimate)),
        }
    }

    /// Removes a child without adding its totals to the parent, after a failed hot-add or when the
    /// family is closed.
    pub fn unlink(&mut self, is_it: impl Fn(&M) -> bool) -> Option<M> {
        let at = self.live.iter().position(is_it)?;
        Some(self.live.swap_remove(at))
    }

    pub fn drain(&mut self) -> Vec<M> {
        std::mem::take(&mut self.live)
    }
}
