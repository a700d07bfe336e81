//! Branch stacks of samples: the taken branches, newest first, as in `struct perf_branch_entry` of
//! `perf_event_open(2)`.

use bitflags::bitflags;

/// Maximum number of branches in a branch stack.
pub const MAX_BRANCH_DEPTH: u16 = 64;

bitflags! {
    /// `perf_event_attr.branch_sample_type`: selects the branches that a branch stack contains.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct BranchFilter: u64 {
        /// Selects branches at CPL 1 to 3.
        const USER = 1;
        /// Selects branches at CPL 0.
        const KERNEL = 1 << 1;
        /// Selects branches of all types.
        const ANY = 1 << 3;
        /// Selects calls, including system calls.
        const ANY_CALL = 1 << 4;
        /// Selects returns, including returns from system calls and interrupts.
        const ANY_RETURN = 1 << 5;
        /// Selects indirect calls.
        const IND_CALL = 1 << 6;
        /// Selects conditional branches.
        const COND = 1 << 10;
        /// Selects indirect jumps.
        const IND_JUMP = 1 << 12;
        /// Selects direct calls.
        const CALL = 1 << 13;
        /// Requests the type of each branch in the branch stack.
        const TYPE_SAVE = 1 << 16;
    }
}

impl BranchFilter {
    /// All bits that select branches by their type.
    pub const KINDS: Self = Self::ANY
        .union(Self::ANY_CALL)
        .union(Self::ANY_RETURN)
        .union(Self::IND_CALL)
        .union(Self::COND)
        .union(Self::IND_JUMP)
        .union(Self::CALL);
    /// All bits that select branches by their privilege level.
    pub const LEVELS: Self = Self::USER.union(Self::KERNEL);

    /// Returns `true` if this filter selects `branch`. A branch between two privilege levels is
    /// selected only if the filter selects both levels.
    #[must_use]
    pub fn contains_branch(self, branch: &BranchEntry) -> bool {
        use BranchKind as Kind;
        let level = |user| if user { Self::USER } else { Self::KERNEL };
        let by_kind = match branch.kind {
            Kind::Conditional => Self::COND,
            Kind::Call => Self::ANY_CALL | Self::CALL,
            Kind::IndirectCall => Self::ANY_CALL | Self::IND_CALL,
            Kind::SystemCall => Self::ANY_CALL,
            Kind::Return | Kind::SystemReturn | Kind::InterruptReturn => Self::ANY_RETURN,
            Kind::Indirect => Self::IND_JUMP,
            Kind::Unknown | Kind::Unconditional | Kind::Interrupt => Self::empty(),
        };
        self.contains(level(branch.from_user) | level(branch.to_user)) && self.intersects(by_kind | Self::ANY)
    }
}

/// Type of a branch, with the values of `PERF_BR_*`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BranchKind {
    /// Branch of unknown type.
    #[default]
    Unknown = 0,
    /// Conditional branch.
    Conditional = 1,
    /// Direct unconditional jump.
    Unconditional = 2,
    /// Indirect jump.
    Indirect = 3,
    /// Direct call.
    Call = 4,
    /// Indirect call.
    IndirectCall = 5,
    /// Return.
    Return = 6,
    /// System call.
    SystemCall = 7,
    /// Return from a system call.
    SystemReturn = 8,
    /// Return from an interrupt or exception.
    InterruptReturn = 11,
    /// Interrupt or exception.
    Interrupt = 12,
}

/// Bit offset of the branch type in the third word of `struct perf_branch_entry`.
const KIND_SHIFT: u32 = 20;

/// A taken branch in a branch stack.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BranchEntry {
    /// Address of the branch instruction.
    pub from: u64,
    /// Address of the branch target.
    pub to: u64,
    /// Type of the branch.
    pub kind: BranchKind,
    /// `true` if the branch instruction was executed at CPL 1 to 3.
    pub from_user: bool,
    /// `true` if the branch target is executed at CPL 1 to 3.
    pub to_user: bool,
}

impl BranchEntry {
    /// Returns the three words of `struct perf_branch_entry`. The branch type is 0 unless `filter`
    /// requests it. Prediction and cycle count are always 0, because they are unknown.
    #[must_use]
    pub fn words(&self, filter: BranchFilter) -> [u64; 3] {
        let kind = if filter.contains(BranchFilter::TYPE_SAVE) {
            self.kind as u64
        } else {
            0
        };
        [self.from, self.to, kind << KIND_SHIFT]
    }
}

/// Parameters of the branch stacks in the samples of an event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BranchStackConfig {
    /// Selects the branches that a stack contains.
    pub filter: BranchFilter,
    /// Maximum number of branches in a branch stack, from 1 to [`MAX_BRANCH_DEPTH`].
    pub depth: u16,
    /// Maximum fraction of the vCPU's run time that may be spent on recording branch stacks, in
    /// thousandths.
    pub overhead_permille: u16,
}

impl BranchStackConfig {
    /// Returns parameters with the maximum depth and without an overhead limit.
    #[must_use]
    pub fn unlimited(filter: BranchFilter) -> Self {
        Self {
            filter,
            depth: MAX_BRANCH_DEPTH,
            overhead_permille: 1000,
        }
    }

    /// Combines the parameters of two events that share a branch stack: all branches that either
    /// filter selects, the larger depth, and the lower overhead limit.
    #[must_use]
    pub fn join(self, other: Self) -> Self {
        Self {
            filter: self.filter | other.filter,
            depth: self.depth.max(other.depth),
            overhead_permille: self.overhead_permille.min(other.overhead_permille),
        }
    }

    /// Returns `true` if a stack recorded with these parameters contains all branches that `other`
    /// requests.
    #[must_use]
    pub fn covers(self, other: Self) -> bool {
        self.filter.contains(other.filter) && self.depth >= other.depth
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A filter selects branches by type and by privilege level. Filter bits and branch types have
    /// the values of include/uapi/linux/perf_event.h.
    #[test]
    fn filter_selects_branches_by_kind_and_level() {
        let branch = |kind, from_user, to_user| BranchEntry {
            kind,
            from_user,
            to_user,
            ..BranchEntry::default()
        };
        let call = branch(BranchKind::Call, true, true);
        let system_call = branch(BranchKind::SystemCall, true, false);
        let jump = branch(BranchKind::Unconditional, false, false);
        for (filter, expected) in [
            (BranchFilter::ANY | BranchFilter::USER, [true, false, false]),
            (BranchFilter::ANY | BranchFilter::KERNEL, [false, false, true]),
            (BranchFilter::ANY | BranchFilter::LEVELS, [true; 3]),
            (BranchFilter::ANY_CALL | BranchFilter::LEVELS, [true, true, false]),
            (BranchFilter::CALL | BranchFilter::LEVELS, [true, false, false]),
            (BranchFilter::COND | BranchFilter::LEVELS, [false; 3]),
            (BranchFilter::ANY, [false; 3]),
        ] {
            let found = [call, system_call, jump].map(|branch| filter.contains_branch(&branch));
            assert_eq!(found, expected, "{filter:?}");
        }
        assert_eq!(call.words(BranchFilter::ANY), [0, 0, 0]);
        assert_eq!(call.words(BranchFilter::TYPE_SAVE), [0, 0, 4 << 20]);
    }

    #[test]
    fn joined_request_covers_both() {
        let request = |filter, depth, overhead_permille| BranchStackConfig {
            filter,
            depth,
            overhead_permille,
        };
        let (a, b) = (
            request(BranchFilter::CALL, 8, 50),
            request(BranchFilter::COND, 32, 10),
        );
        let both = a.join(b);
        assert!(both.covers(a) && both.covers(b) && !a.covers(b));
        assert_eq!((both.depth, both.overhead_permille), (32, 10));
    }
}
