//! Branch stacks of samples. The vCPU is single-stepped after an overflow ([`crate::vcpu`]), and
//! its taken branches are collected here until the sample is written.

use perf_core::branch::{BranchEntry, BranchFilter, BranchStackConfig};
use vpmu::{PmuGeneration, PmuModel, PrivilegeLevels};

use crate::kvm::stepping::SteppingSupport;

/// Reason why samples of a VM cannot have branch stacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BranchStackError {
    /// KVM cannot single-step guests.
    #[error("branch stacks: this host's KVM does not single-step guests")]
    NoSteps,
    /// KVM cannot block interrupts during a single step.
    #[error(
        "branch stacks: this host's KVM cannot block interrupts during a step (Linux 5.14 and later can)"
    )]
    NoBlocking,
    /// KVM cannot single-step user code.
    #[error(
        "branch stacks: this host's KVM does not single-step user code; record the kernel's branches with -j any,k"
    )]
    KernelOnly,
    /// The VM emulates RDPMC with hardware breakpoints, which single-stepping would miss.
    #[error("branch stacks: unsupported with --rdpmc hwbp, whose breakpoints the steps would miss")]
    Breakpoints,
}

/// Checks that a host with these stepping features can record the branches that `filter` selects.
///
/// # Errors
/// Returns [`BranchStackError::NoSteps`], [`BranchStackError::NoBlocking`] or
/// [`BranchStackError::KernelOnly`] if KVM lacks the required feature.
pub fn check_host(host: SteppingSupport, filter: BranchFilter) -> Result<(), BranchStackError> {
    if !host.kernel {
        return Err(BranchStackError::NoSteps);
    }
    if filter.contains(BranchFilter::USER) && !host.user {
        return Err(BranchStackError::KernelOnly);
    }
    // A KVM that emulates CPL 0 needs no trap flag, and interrupts do not disturb its steps.
    if host.user && !host.blocks_interrupts {
        return Err(BranchStackError::NoBlocking);
    }
    Ok(())
}

/// Reason why a guest cannot have branch records of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BranchRecordsError {
    /// The PMU model has no branch records.
    #[error(
        "--lbr on: {0} has no branch records; use --pmu intel-v2 or later or --pmu amd-v2, and another \
        --backing than kvm"
    )]
    Model(PmuGeneration),
    /// The guest cannot be single-stepped.
    #[error("--lbr on: {0}; use --lbr off")]
    Host(BranchStackError),
}

/// Checks that a guest with the PMU model `model` can have branch records, at least of its kernel.
///
/// # Errors
/// Returns a [`BranchRecordsError`] if it cannot.
pub fn check_records(
    model: PmuModel,
    host: SteppingSupport,
    has_rdpmc_breakpoints: bool,
) -> Result<(), BranchRecordsError> {
    if !model.has_branch_records() {
        return Err(BranchRecordsError::Model(model.generation()));
    }
    if has_rdpmc_breakpoints {
        return Err(BranchRecordsError::Host(BranchStackError::Breakpoints));
    }
    check_host(host, BranchFilter::KERNEL).map_err(BranchRecordsError::Host)
}

/// State of the branch stack for the next sample of a vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum StackState {
    /// No sample waits for a branch stack.
    #[default]
    Idle,
    /// A sample waits for a branch stack, and the collection of branches has not begun.
    Requested(BranchStackConfig),
    /// Branches are being collected for the waiting samples.
    Collecting(BranchStackConfig),
    /// The stack has its full depth, or its collection ended early or was impossible.
    Complete,
}

/// Collector of the branch stack for the next sample of a vCPU.
#[derive(Debug, Default)]
pub struct BranchStackCollector {
    state: StackState,
    /// Collected branches, oldest first.
    branches: Vec<BranchEntry>,
}

impl BranchStackCollector {
    /// Appends the branches of a complete stack to `out`, newest first. If there is no complete
    /// stack, requests one and returns `false`.
    pub fn take(&mut self, request: BranchStackConfig, out: &mut Vec<BranchEntry>) -> bool {
        match &mut self.state {
            StackState::Complete => {
                out.extend(self.branches.iter().rev());
                return true;
            }
            StackState::Idle => self.state = StackState::Requested(request),
            StackState::Requested(known) => *known = known.join(request),
            StackState::Collecting(_) => {}
        }
        false
    }

    /// Returns the parameters of a requested stack whose collection has not begun, or `None`.
    #[inline]
    pub fn requested(&self) -> Option<BranchStackConfig> {
        match self.state {
            StackState::Requested(request) => Some(request),
            _ => None,
        }
    }

    /// Starts collecting branches for the waiting sample.
    pub fn begin(&mut self) {
        if let StackState::Requested(request) = self.state {
            self.branches.clear();
            self.state = StackState::Collecting(request);
        }
    }

    /// Adds a branch to the stack that is being collected. Returns `true` if the stack has its full
    /// depth.
    pub fn add(&mut self, branch: BranchEntry) -> bool {
        let StackState::Collecting(request) = self.state else {
            return true;
        };
        let depth = usize::from(request.depth);
        if self.branches.len() < depth && request.filter.contains_branch(&branch) {
            self.branches.push(branch);
        }
        self.branches.len() >= depth
    }

    /// Ends the collection. The samples that wait for the stack receive the branches collected so
    /// far.
    pub fn complete(&mut self) {
        match self.state {
            StackState::Collecting(_) => {}
            StackState::Requested(_) | StackState::Idle => self.branches.clear(),
            StackState::Complete => return,
        }
        self.state = StackState::Complete;
    }

    /// Ends the use of a complete stack, after the samples that waited for it were written.
    #[inline]
    pub fn written(&mut self) {
        if self.state == StackState::Complete {
            self.state = StackState::Idle;
        }
    }

    /// Returns the privilege levels that must be single-stepped to collect the stack.
    #[inline]
    pub fn levels(&self) -> PrivilegeLevels {
        match self.state {
            StackState::Collecting(request) => levels(request.filter),
            _ => PrivilegeLevels::default(),
        }
    }
}

/// Returns the privilege levels whose branches `filter` selects.
pub fn levels(filter: BranchFilter) -> PrivilegeLevels {
    PrivilegeLevels {
        user: filter.contains(BranchFilter::USER),
        kernel: filter.contains(BranchFilter::KERNEL),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(filter: BranchFilter, depth: u16) -> BranchStackConfig {
        BranchStackConfig {
            filter: filter | BranchFilter::ANY,
            depth,
            overhead_permille: 50,
        }
    }

    #[test]
    fn host_without_user_steps_refuses_user_branches() {
        let mut host = SteppingSupport::default();
        let kernel = BranchFilter::KERNEL;
        assert_eq!(check_host(host, kernel), Err(BranchStackError::NoSteps));
        host.kernel = true;
        assert_eq!(check_host(host, kernel), Ok(()));
        let user = kernel | BranchFilter::USER;
        assert_eq!(check_host(host, user), Err(BranchStackError::KernelOnly));
        host.user = true;
        assert_eq!(check_host(host, user), Err(BranchStackError::NoBlocking));
        host.blocks_interrupts = true;
        assert_eq!(check_host(host, user), Ok(()));
    }

    #[test]
    fn branch_records_require_model_and_steps() {
        let steps = SteppingSupport {
            kernel: true,
            ..SteppingSupport::default()
        };
        let with = PmuModel::INTEL.with_branch_records();
        assert_eq!(check_records(with, steps, false), Ok(()));
        for (model, host, breakpoints, message) in [
            (
                PmuModel::AMD.with_branch_records(),
                steps,
                false,
                "--lbr on: amd has no branch records; use --pmu intel-v2 or later or --pmu amd-v2, and \
                another --backing than kvm",
            ),
            (
                with,
                SteppingSupport::default(),
                false,
                "--lbr on: branch stacks: this host's KVM does not single-step guests; use --lbr off",
            ),
            (
                with,
                steps,
                true,
                "--lbr on: branch stacks: unsupported with --rdpmc hwbp, whose breakpoints the steps would \
                miss; use --lbr off",
            ),
        ] {
            let error = check_records(model, host, breakpoints).unwrap_err();
            assert_eq!(error.to_string(), message);
        }
    }

    /// A stack begins with the newest branch and has at most its full depth. A stack that is
    /// completed early contains the branches collected so far.
    #[test]
    fn stack_has_newest_branch_first() {
        let mut collector = BranchStackCollector::default();
        let mut out = Vec::new();
        let asked = request(BranchFilter::KERNEL, 2);
        assert!(!collector.take(asked, &mut out));
        assert_eq!(collector.requested(), Some(asked));
        assert!(!collector.levels().any());
        collector.begin();
        assert!(collector.levels().kernel && !collector.levels().user);
        let branch = |from| BranchEntry {
            from,
            ..BranchEntry::default()
        };
        let user = BranchEntry {
            from_user: true,
            to_user: true,
            ..branch(9)
        };
        assert!(!collector.add(branch(1)) && !collector.add(user));
        assert!(!collector.take(asked, &mut out) && out.is_empty());
        assert!(collector.add(branch(2)));
        collector.complete();
        assert!(collector.take(asked, &mut out));
        assert_eq!(out.iter().map(|b| b.from).collect::<Vec<_>>(), [2, 1]);
        collector.written();
        out.clear();
        assert!(!collector.take(asked, &mut out));
        collector.complete();
        assert!(collector.take(asked, &mut out) && out.is_empty());
    }
}
