//! Branch records of a guest: architectural LBRs of Intel models and LBR version 2 of AMD models.
//!
//! The records are not written while the guest runs normally. When a PMI is due and the guest has
//! enabled the records, the VMM single-steps the vCPU and adds the branches that the vCPU takes
//! ([`crate::Vpmu::requested_branches`]). Then the records are frozen, if the guest has requested
//! this, and the PMI is delivered. Record 0 is the most recent branch.
//!
//! References: Intel SDM vol. 3, chapter "Last Branch Records", and vol. 4 for the addresses; AMD
//! APM vol. 2, section "Last Branch Stack Registers".

/// Maximum number of branch records of any model.
pub(crate) const MAX_BRANCH_RECORDS: usize = 32;

/// A register of the branch records. The variants name its role, which is the same for both
/// vendors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BranchRegister {
    /// Control register that enables the records. On Intel models, it also selects the branches.
    Control,
    /// Filter register that selects the branches (AMD).
    Filter,
    /// Register that selects the number of records (Intel).
    Depth,
    /// Register with the index of the newest record (Intel, MSR_LASTBRANCH_TOS of processors with
    /// model-specific LBRs).
    Top,
    /// Register with the source address of the branch in this record.
    From(u8),
    /// Register with the target address of the branch in this record.
    To(u8),
    /// Register with the type of the branch in this record (Intel).
    Info(u8),
}

impl BranchRegister {
    /// Returns the number of the branch record that the register belongs to, or `None` for a
    /// control register.
    pub(crate) fn record(self) -> Option<u8> {
        match self {
            Self::From(n) | Self::To(n) | Self::Info(n) => Some(n),
            Self::Control | Self::Filter | Self::Depth | Self::Top => None,
        }
    }
}

/// Registers that control the branch records. All zero on models without branch records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BranchControls {
    /// Value of IA32_LBR_CTL (Intel) or DBG_EXTN_CFG (AMD).
    pub control: u64,
    /// Value of LBR_SELECT (AMD).
    pub filter: u64,
    /// Number of branch records that the guest uses.
    pub depth: u64,
    /// Value of MSR_LASTBRANCH_TOS (Intel). Has no effect.
    pub top: u64,
}

impl BranchControls {
    /// Returns the control register `register`, or `None` if `register` belongs to a branch record.
    pub(crate) fn register(&mut self, register: BranchRegister) -> Option<&mut u64> {
        match register {
            BranchRegister::Control => Some(&mut self.control),
            BranchRegister::Filter => Some(&mut self.filter),
            BranchRegister::Depth => Some(&mut self.depth),
            BranchRegister::Top => Some(&mut self.top),
            BranchRegister::From(_) | BranchRegister::To(_) | BranchRegister::Info(_) => None,
        }
    }

    /// Returns the number of branch records that the guest uses.
    pub(crate) fn records(&self) -> usize {
        usize::try_from(self.depth).map_or(MAX_BRANCH_RECORDS, |depth| depth.min(MAX_BRANCH_RECORDS))
    }
}

/// Register values of one branch record, in the vendor's format.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BranchRecord {
    /// Value of the register with the source address of the branch.
    pub from: u64,
    /// Value of the register with the target address of the branch.
    pub to: u64,
    /// Value of the register with the branch type (Intel).
    pub info: u64,
}

/// Progress of collecting branches for a due PMI. The guest's branch records must contain these
/// branches when the PMI is delivered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum BranchPhase {
    /// No branches are being collected, and none have been collected for a due PMI.
    #[default]
    Idle,
    /// The VMM single-steps the vCPU and adds branches to the records.
    Collecting {
        /// CPU time of the vCPU's thread at which the collection started, in nanoseconds.
        began_run_ns: u64,
    },
    /// The collection has ended, so the PMI can be delivered.
    Complete {
        /// CPU time of the vCPU's thread at which the collection started, in nanoseconds.
        began_run_ns: u64,
    },
}

/// Branch records of one vCPU, and the progress of their collection.
#[derive(Clone, Debug, Default)]
pub(crate) struct BranchRecords {
    pub(crate) records: [BranchRecord; MAX_BRANCH_RECORDS],
    pub(crate) phase: BranchPhase,
    /// Number of branches added since the records were last cleared.
    added: usize,
}

impl BranchRecords {
    /// Returns the value of a register that belongs to a branch record. Returns `None` for a
    /// control register, or if the record does not exist.
    pub(crate) fn register(&mut self, register: BranchRegister) -> Option<&mut u64> {
        let record = self.records.get_mut(usize::from(register.record()?))?;
        match register {
            BranchRegister::From(_) => Some(&mut record.from),
            BranchRegister::To(_) => Some(&mut record.to),
            BranchRegister::Info(_) => Some(&mut record.info),
            _ => None,
        }
    }

    /// Sets all branch records to zero.
    pub(crate) fn clear(&mut self) {
        self.records = [BranchRecord::default(); MAX_BRANCH_RECORDS];
        self.added = 0;
    }

    /// Adds the most recent branch as record 0. The model has `depth` records.
    pub(crate) fn push(&mut self, record: BranchRecord, depth: usize) {
        if let Some(records) = self.records.get_mut(..depth)
            && !records.is_empty()
        {
            records.rotate_right(1);
            records[0] = record;
            self.added += 1;
        }
    }

    /// Returns whether `depth` or more branches have been added since the records were last
    /// cleared.
    pub(crate) fn is_full(&self, depth: usize) -> bool {
        self.added >= depth
    }
}
