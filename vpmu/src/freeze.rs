//! Register bits that freeze counters and branch records on a PMI, for Intel and AMD.

/// DebugCtl bit 11: a PMI freezes the branch records.
pub const DEBUGCTL_FREEZE_BRANCHES_ON_PMI: u64 = 1 << 11;
/// DebugCtl bit 12: a PMI freezes the counters.
pub const DEBUGCTL_FREEZE_ON_PMI: u64 = 1 << 12;
/// Global status bit 58: a PMI has frozen the branch records.
pub const STATUS_LBR_FRZ: u64 = 1 << 58;
/// Global status bit 59: a PMI has frozen the counters.
pub const STATUS_CTR_FRZ: u64 = 1 << 59;
