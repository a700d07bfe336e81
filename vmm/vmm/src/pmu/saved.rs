//! Saved state of a vCPU's PMU, and its restoration.

use vpmu::{CounterBackingChange, VpmuStateError};

use super::VcpuPmu;

impl VcpuPmu {
    /// Returns the state of the register file for a snapshot. Empty if the PMU is not emulated. The
    /// vCPU must be paused.
    pub fn save(&mut self) -> Vec<u8> {
        if !self.has_pmis() {
            return Vec::new();
        }
        let attached = self.attached.as_mut();
        attached.map_or_else(Vec::new, |attached| self.vpmu.save(&mut attached.events))
    }

    /// Restores the register file from a snapshot, before the vCPU is attached to a thread.
    ///
    /// # Errors
    /// Returns a [`VpmuStateError`] if the bytes are not a valid state of this PMU.
    pub fn restore(&mut self, bytes: &[u8]) -> Result<(), VpmuStateError> {
        self.changed = true;
        if self.has_pmis() {
            self.vpmu.restore_before_use(bytes)?;
            self.pending_changes = self.backing_changes().len() as u64;
        } else if !bytes.is_empty() {
            return Err(VpmuStateError::Magic);
        }
        Ok(())
    }

    /// Returns the enabled counters whose backing (source of the counts) differs from that at the
    /// time of the snapshot.
    pub fn backing_changes(&self) -> Vec<CounterBackingChange> {
        let policy = self.vm.config.policy;
        let Some(before) = self.vm.config.saved_policy.filter(|saved| *saved != policy) else {
            return Vec::new();
        };
        let sources = |policy| self.vm.sources_of_guest(policy);
        let (before, after) = (sources(before), sources(policy));
        self.vpmu.backing_changes(&before, &after).collect()
    }
}
