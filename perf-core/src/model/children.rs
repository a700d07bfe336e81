//! Inheritance: events that fan out over vCPUs.
//!
//! A VM-wide event is opened once and has a child in each vCPU's context. Reading it sums the live children
//! and what the exited ones left behind. Families are flat: a child's parent is always the event that was
//! opened.
//!
//! The one delicate moment is a child's exit. Its totals are folded into the parent and it is unlinked in one
//! critical section under the family's lock, and every reader sums under that lock. So a count is in the fold
//! or in the list, never in both and never in neither.

#[cfg(all(test, loom))]
mod model;

use std::sync::atomic::Ordering;

use crate::model::slices::EstimateSum;
use crate::model::totals::{Folded, Totals};
use crate::pmu::VcpuId;

/// Something whose totals count towards a family.
pub(crate) trait Member {
    /// Its totals now, or, once it stopped, its last.
    fn totals(&self) -> Totals;

    /// What it would have counted had it always been on.
    fn estimate(&self) -> EstimateSum;

    /// The vCPU it counts on.
    fn vcpu(&self) -> Option<VcpuId> {
        None
    }
}

/// The live children of an event.
#[derive(Debug)]
pub(crate) struct Children<M> {
    live: Vec<M>,
    /// Estimates of exited children.
    estimates: EstimateSum,
    /// What the exited children of each vCPU counted, added up: at most one entry for a vCPU, however often
    /// it came and went.
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

impl<M: Member> Children<M> {
    pub fn live(&self) -> &[M] {
        &self.live
    }

    pub fn add(&mut self, child: M) {
        self.live.push(child);
    }

    /// Exited and live children together.
    pub fn totals(&self, folded: &Folded) -> Totals {
        let mut totals = folded.load();
        for child in &self.live {
            totals.add(child.totals());
        }
        totals
    }

    /// Estimates of exited and live children together.
    pub fn estimate(&self) -> EstimateSum {
        let mut sum = self.estimates;
        for child in &self.live {
            sum.add(child.estimate());
        }
        sum
    }

    /// Forgets what exited children left behind.
    pub fn reset(&mut self, folded: &Folded) {
        folded.count.store(0, Ordering::Relaxed);
        self.estimates = EstimateSum::default();
        self.gone.clear();
    }

    /// What each vCPU contributes, exited and live children together, by number. The parts add up to
    /// [`Children::totals`] and [`Children::estimate`].
    pub fn by_vcpu(&self) -> Vec<(VcpuId, Totals, EstimateSum)> {
        let mut parts = self.gone.clone();
        for child in &self.live {
            if let Some(vcpu) = child.vcpu() {
                add_part(&mut parts, vcpu, child.totals(), child.estimate());
            }
        }
        parts.sort_by_key(|(vcpu, ..)| *vcpu);
        parts
    }

    /// A child that stopped for good leaves: its last totals stay with the parent. `None` if it left before.
    pub fn fold(&mut self, folded: &Folded, is_it: impl Fn(&M) -> bool) -> Option<(M, Totals)> {
        let child = self.unlink(is_it)?;
        let last = child.totals();
        let mut totals = folded.load();
        totals.add(last);
        folded.store(totals);
        let estimate = child.estimate();
        self.estimates.add(estimate);
        if let Some(vcpu) = child.vcpu() {
            add_part(&mut self.gone, vcpu, last, estimate);
        }
        Some((child, last))
    }

    /// A child leaves and nothing stays: a hot-add that failed, or a family that is being closed.
    pub fn unlink(&mut self, is_it: impl Fn(&M) -> bool) -> Option<M> {
        let at = self.live.iter().position(is_it)?;
        Some(self.live.swap_remove(at))
    }

    pub fn drain(&mut self) -> Vec<M> {
        std::mem::take(&mut self.live)
    }
}

/// Adds what a child counted to its vCPU's part.
fn add_part(
    parts: &mut Vec<(VcpuId, Totals, EstimateSum)>,
    vcpu: VcpuId,
    totals: Totals,
    estimate: EstimateSum,
) {
    match parts.iter_mut().find(|(of, ..)| *of == vcpu) {
        Some((_, sum, estimates)) => {
            sum.add(totals);
            estimates.add(estimate);
        }
        None => parts.push((vcpu, totals, estimate)),
    }
}
