//! Collection of branch records before a PMI, and guest accesses to the branch record registers.

use perf_core::branch::BranchEntry;

use super::{MsrReadOutcome, MsrWriteOutcome, Vpmu};
use crate::PrivilegeLevels;
use crate::branches::{BranchPhase, BranchRegister};
use crate::counter_events::VcpuTime;
use crate::index::MsrAddress;
use crate::vendor::RegisterWriteEffect;

/// Branches that the VMM must collect by single-stepping before it delivers a PMI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BranchCollectionRequest {
    /// Privilege levels whose branches the guest records.
    pub levels: PrivilegeLevels,
    /// Number of branch records that the guest uses.
    pub depth: u16,
}

impl Vpmu {
    /// Returns which branches must be collected before the due PMI is delivered. Returns `None` if
    /// no PMI is due, if the branches for it have been collected or are being collected, or if the
    /// guest's branch records are disabled or frozen.
    #[inline]
    pub fn requested_branches(&self) -> Option<BranchCollectionRequest> {
        let branches = self.branches.as_ref()?;
        let requested = self.pmi_due
            && branches.phase == BranchPhase::Idle
            && self.vendor.records_branches(&self.registers);
        requested.then(|| self.branch_request())
    }

    #[expect(clippy::cast_possible_truncation, reason = "at most MAX_BRANCH_RECORDS")]
    fn branch_request(&self) -> BranchCollectionRequest {
        BranchCollectionRequest {
            levels: self.vendor.branch_levels(&self.registers),
            depth: self.registers.branches.records() as u16,
        }
    }

    /// Returns whether branches are being collected. The due PMI must then wait.
    #[inline]
    pub fn is_collecting_branches(&self) -> bool {
        let branches = self.branches.as_ref();
        branches.is_some_and(|branches| matches!(branches.phase, BranchPhase::Collecting { .. }))
    }

    /// Returns the privilege levels that the VMM must single-step to collect branches; none if no
    /// branches are being collected.
    #[inline]
    pub fn branch_levels(&self) -> PrivilegeLevels {
        if self.is_collecting_branches() {
            self.vendor.branch_levels(&self.registers)
        } else {
            PrivilegeLevels::default()
        }
    }

    /// Clears the branch records and starts to collect branches for the due PMI.
    pub fn begin_branches(&mut self, now: impl Into<VcpuTime>) {
        if let Some(branches) = &mut self.branches {
            branches.clear();
            let began_run_ns = now.into().run_ns;
            branches.phase = BranchPhase::Collecting { began_run_ns };
        }
    }

    /// Adds a taken branch to the records. Returns `true` if the collection can end, because the
    /// records are full or the guest no longer records branches.
    pub fn add_branch(&mut self, branch: &BranchEntry) -> bool {
        let depth = self.registers.branches.records();
        let Some(branches) = &mut self.branches else {
            return true;
        };
        if !matches!(branches.phase, BranchPhase::Collecting { .. })
            || !self.vendor.records_branches(&self.registers)
        {
            return true;
        }
        if !branches.is_full(depth) && self.vendor.selects_branch(&self.registers, branch) {
            branches.push(self.vendor.branch_record(branch), depth);
        }
        branches.is_full(depth)
    }

    /// Ends the collection of branch records for the due PMI, and freezes the records if the guest
    /// has requested this. The PMI can then be delivered.
    pub fn complete_branches(&mut self) {
        if let Some(branches) = &mut self.branches
            && let BranchPhase::Collecting { began_run_ns } = branches.phase
        {
            branches.phase = BranchPhase::Complete { began_run_ns };
            if self.vendor.records_branches(&self.registers) {
                self.vendor.freeze_branches(&self.model, &mut self.registers);
            }
        }
    }

    /// Returns the CPU time of the vCPU's thread at which the collection of branches started for
    /// the PMI that is being delivered at `now`, or the CPU time of `now` if there was no
    /// collection.
    pub(super) fn pmi_began_run_ns(&self, now: VcpuTime) -> u64 {
        match self.branches.as_ref().map(|branches| branches.phase) {
            Some(BranchPhase::Collecting { began_run_ns } | BranchPhase::Complete { began_run_ns }) => {
                began_run_ns
            }
            Some(BranchPhase::Idle) | None => now.run_ns,
        }
    }

    /// Discards the progress of a branch collection, because no PMI is due any more.
    pub(super) fn forget_branches(&mut self) {
        if let Some(branches) = &mut self.branches {
            branches.phase = BranchPhase::Idle;
        }
    }

    /// Returns the branch record register or control register at an MSR address, or `None` if an
    /// access to the address faults. The caller has already handled all other PMU registers.
    fn branch_register(&self, msr: MsrAddress) -> Option<BranchRegister> {
        let register = self.vendor.branch_register(&self.model, msr)?;
        let depth = self.registers.branches.records();
        let exists = register.record().is_none_or(|record| usize::from(record) < depth);
        exists.then_some(register)
    }

    /// Handles a guest RDMSR of a branch record register or control register. Faults for all other
    /// addresses, because the caller has already handled all other PMU registers.
    #[cold]
    pub(super) fn read_branch_register(&mut self, msr: MsrAddress) -> MsrReadOutcome {
        let stored = self
            .branch_register(msr)
            .and_then(|register| self.stored(register));
        stored.map_or(MsrReadOutcome::InjectGp, |value| MsrReadOutcome::Value(*value))
    }

    /// Handles a guest WRMSR to a branch record register or control register. Faults for all other
    /// addresses, because the caller has already handled the other PMU registers. A write to the
    /// depth register clears the records (SDM vol. 4, 14CFH).
    #[cold]
    pub(super) fn write_branch_register(&mut self, msr: MsrAddress, value: u64) -> MsrWriteOutcome {
        let Some(register) = self.branch_register(msr) else {
            return MsrWriteOutcome::InjectGp;
        };
        match self.vendor.write_branch_register(register, value) {
            RegisterWriteEffect::Store(value) => {
                if register == BranchRegister::Depth
                    && let Some(branches) = &mut self.branches
                {
                    branches.clear();
                }
                if let Some(stored) = self.stored(register) {
                    *stored = value;
                }
                MsrWriteOutcome::Done
            }
            RegisterWriteEffect::Dropped => MsrWriteOutcome::Done,
            RegisterWriteEffect::Fault => MsrWriteOutcome::InjectGp,
        }
    }

    fn stored(&mut self, register: BranchRegister) -> Option<&mut u64> {
        match register.record() {
            Some(_) => self.branches.as_mut()?.register(register),
            None => self.registers.branches.register(register),
        }
    }
}
