//! Branch stacks of samples, and branch records of the guest, by burst stepping.
//!
//! A sample with a branch stack starts a *burst*: the vCPU is single-stepped until the requested
//! number of branches was taken, or until a limit on instructions or time is reached. The sample is
//! written at the end of the burst, with the instruction pointer after the last branch. Between
//! bursts the guest runs at full speed.
//!
//! After a burst, the next one is delayed so that bursts take no more than the requested share of
//! the thread's CPU time. A sample that waits for a delayed burst represents all counts since the
//! previous sample, so a lower sample rate does not change the weights of samples.
//!
//! A PMI of a guest that has enabled its branch records also starts a burst, and is delivered at
//! the end of it. Interrupts are deferred until then. The time of such a burst counts as time of
//! the PMI handler ([`vpmu::PmiShare`]), so a separate share would only leave records empty. The
//! burst ends early if the guest halts or leaves the privilege levels that it records, because a
//! later PMI could reach another task.

use std::time::{Duration, Instant};

use perf_core::branch::BranchSampling;
use vm_memory::GuestMemoryMmap;
use vpmu::{BranchRequest, PrivilegeLevels};

use super::factory::StepperConfig;
use super::kick::KickTimer;
use super::registers::RegisterCache;
use super::running::Running;
use super::step::{StepError, Stepper};
use crate::pmu::branches;

/// Maximum number of single steps and straight-line runs in a burst, for each requested branch.
const MAX_STEPS_PER_BRANCH: u64 = 128;
/// Maximum duration of a burst of single steps. Also ends a burst whose vCPU has halted.
const MAX_BURST: Duration = Duration::from_millis(100);

/// Purpose of a burst of single steps, which determines who receives the branches that it records.
#[derive(Clone, Copy, Debug)]
enum BurstPurpose {
    /// An operator's sample.
    Sample {
        /// Maximum share of the thread's CPU time for bursts, in thousandths; `None` if the exact
        /// backing single-steps these privilege levels anyway.
        overhead_permille: Option<u16>,
    },
    /// The guest's branch records, before a PMI. Contains the privilege levels that are recorded.
    Pmi(PrivilegeLevels),
}

/// Burst in progress.
#[derive(Debug)]
struct ActiveBurst {
    purpose: BurstPurpose,
    began: Instant,
    began_cpu_ns: u64,
    /// Number of single steps and straight-line runs of the stepper at the beginning of the burst,
    /// and the number at which the burst must end.
    first_step: u64,
    max_steps: u64,
}

/// State of the bursts of a vCPU.
#[derive(Debug, Default)]
pub(super) struct Bursts {
    /// Configuration of the stepper; `None` if this vCPU cannot take branch stacks.
    config: Option<(StepperConfig, GuestMemoryMmap)>,
    active: Option<ActiveBurst>,
    /// Stepper of the previous burst, kept for the next one because it caches decoded code.
    idle: Option<Stepper>,
    /// `true` if the vCPU's stepper was installed only for bursts, not for the exact backing.
    owns_stepper: bool,
    /// `true` if an overflow signal waits for the end of the burst.
    signal_waits: bool,
    /// CPU time of the thread before which no burst of single steps may start, in nanoseconds.
    not_before_cpu_ns: u64,
}

impl Bursts {
    /// Creates the state of a vCPU whose bursts use this stepper configuration.
    pub(super) fn new(config: StepperConfig, memory: GuestMemoryMmap) -> Self {
        Self {
            config: Some((config, memory)),
            ..Self::default()
        }
    }

    /// Returns `true` during a burst.
    #[inline]
    pub(super) fn has_active(&self) -> bool {
        self.active.is_some()
    }

    /// Returns `true` if an overflow signal must be handled now. `signalled` states whether one has
    /// arrived. During a burst for the guest's branch records, the signal waits. The guest's clock
    /// does not advance in such a burst, so a timer that fired early would repeatedly be armed for
    /// the same short remaining time.
    #[inline]
    pub(super) fn defer_signal(&mut self, signalled: bool) -> bool {
        let waits = std::mem::take(&mut self.signal_waits) || signalled;
        self.signal_waits = waits && self.is_for_pmi();
        waits && !self.signal_waits
    }

    /// Returns `true` during a burst for the guest's branch records.
    #[inline]
    pub(super) fn is_for_pmi(&self) -> bool {
        let active = self.active.as_ref();
        active.is_some_and(|burst| matches!(burst.purpose, BurstPurpose::Pmi(_)))
    }

    /// Returns `true` if RFLAGS values that the guest has saved in its memory may contain the trap
    /// flag of the idle stepper.
    pub(super) fn has_strays(&self) -> bool {
        self.idle.as_ref().is_some_and(Stepper::has_strays)
    }

    /// Returns a stepper that removes the trap flags that bursts before a snapshot have left in guest
    /// memory. Returns `None` if this vCPU cannot be stepped.
    pub(super) fn stepper_for_strays(&mut self) -> Option<Stepper> {
        let stepper = self.stepper()?.with_strays();
        self.owns_stepper = true;
        Some(stepper)
    }

    /// Returns a stepper for a burst of single steps.
    fn stepper(&mut self) -> Option<Stepper> {
        let (config, memory) = self.config.as_ref()?;
        let idle = self.idle.take();
        Some(idle.unwrap_or_else(|| config.stepper(memory.clone())))
    }
}

/// Returns the CPU time that must pass after a burst of `cost_ns`, so that bursts take `permille`
/// thousandths of the CPU time.
fn pause_after(cost_ns: u64, permille: u16) -> u64 {
    let permille = u64::from(permille).clamp(1, 1000);
    cost_ns.saturating_mul(1000 - permille) / permille
}

impl Running {
    /// Collects the branches of the last step, and ends the burst if one of its limits is reached.
    /// Called before overflows are handled.
    ///
    /// # Errors
    /// Returns [`StepError`] if a KVM call fails.
    #[inline]
    pub(super) fn collect_branches(&mut self) -> Result<(), StepError> {
        if self.bursts.has_active() {
            self.continue_burst()?;
        }
        Ok(())
    }

    fn continue_burst(&mut self) -> Result<(), StepError> {
        let debugged = self.is_debugger_attached();
        let (Some(pmu), Some(stepper), Some(burst)) = (&mut self.pmu, &mut self.stepper, &self.bursts.active)
        else {
            return Ok(());
        };
        let mut full = false;
        for branch in stepper.take_branches() {
            full = match burst.purpose {
                BurstPurpose::Sample { .. } => pmu.branches().add(branch),
                BurstPurpose::Pmi(_) => pmu.registers().add_branch(&branch),
            };
        }
        let leaves = match burst.purpose {
            BurstPurpose::Sample { .. } => false,
            BurstPurpose::Pmi(levels) => {
                !pmu.registers().is_collecting_branches() || stepper.leaves_levels(&self.fd, levels)?
            }
        };
        let spent = stepper.position() >= burst.max_steps || burst.began.elapsed() >= MAX_BURST;
        if full || spent || debugged || leaves {
            self.finish_burst();
        }
        Ok(())
    }

    /// Ends the burst, if any. Waiting samples receive the branches collected so far.
    pub(super) fn end_burst(&mut self) {
        self.finish_burst();
        if let Some(pmu) = &mut self.pmu {
            pmu.complete_branches();
        }
    }

    /// Ends the burst, if any. Its sample or PMI receives the branches collected so far.
    fn finish_burst(&mut self) {
        let (Some(pmu), Some(burst)) = (&mut self.pmu, self.bursts.active.take()) else {
            return;
        };
        let mut last_step = burst.first_step;
        if let Some(stepper) = &mut self.stepper {
            stepper.set_branch_recording(false);
            last_step = stepper.position();
        }
        match burst.purpose {
            BurstPurpose::Sample { overhead_permille } => {
                pmu.complete_branches();
                let now = pmu.thread_ns();
                let cost = now.saturating_sub(burst.began_cpu_ns);
                pmu.set_burst_time(cost);
                if let Some(permille) = overhead_permille {
                    let pause = pause_after(cost, permille);
                    self.bursts.not_before_cpu_ns = now.saturating_add(pause);
                }
            }
            BurstPurpose::Pmi(_) => {
                pmu.registers().complete_branches();
                let stats = self.slot.stats();
                stats.branch_pmis.inc();
                stats.branch_steps.add(last_step.saturating_sub(burst.first_step));
                let ns = u64::try_from(burst.began.elapsed().as_nanos()).unwrap_or(u64::MAX);
                stats.branch_ns.add(ns);
            }
        }
    }

    /// Starts a burst if a sample waits for one and the overhead limit allows it. A burst starts
    /// only at a privilege level whose branches are requested, and only if KVM has no exit to
    /// complete.
    #[inline]
    pub(super) fn begin_burst_if_due(&mut self, timer: &KickTimer) {
        if let Some(pmu) = &mut self.pmu
            && let Some(request) = pmu.branches().requested()
            && self.bursts.active.is_none()
        {
            let now_cpu_ns = pmu.thread_ns();
            self.begin_burst(request, now_cpu_ns, timer);
        }
    }

    fn begin_burst(&mut self, request: BranchSampling, now: u64, timer: &KickTimer) {
        if self.exit_is_open || now < self.bursts.not_before_cpu_ns {
            return;
        }
        if !self.can_step() {
            self.end_burst();
            return;
        }
        let levels = branches::levels(request.filter);
        let Ok(sregs) = self.fd.get_sregs() else { return };
        if !(if sregs.ss.dpl == 0 {
            levels.kernel
        } else {
            levels.user
        }) {
            return;
        }
        let Some(pmu) = &mut self.pmu else { return };
        let exact = pmu.exact_levels();
        pmu.branches().begin();
        let costs = levels.user && !exact.user || levels.kernel && !exact.kernel;
        let purpose = BurstPurpose::Sample {
            overhead_permille: costs.then_some(request.overhead_permille),
        };
        self.start_stepping(purpose, request.depth, timer);
    }

    /// Returns `true` if the due PMI must wait for the guest's branch records, or for the end of a
    /// burst of a sample. Starts the burst for the records.
    ///
    /// # Errors
    /// Returns [`StepError`] if a KVM call fails.
    pub(super) fn wait_for_branch_records(&mut self, timer: &KickTimer) -> Result<bool, StepError> {
        let Some(pmu) = &mut self.pmu else {
            return Ok(false);
        };
        if pmu.registers().is_collecting_branches() {
            return Ok(true);
        }
        let Some(request) = pmu.registers().requested_branches() else {
            return Ok(false);
        };
        if self.bursts.active.is_some() {
            return Ok(true);
        }
        if self.exit_is_open {
            // The next KVM_RUN completes the exit and returns without executing guest code.
            self.fd.request_exit();
            return Ok(true);
        }
        self.begin_branch_records(request, timer)
    }

    /// Starts the burst for the guest's branch records. Returns `false` if no burst is possible in
    /// the vCPU's current state. In this case, the records are empty.
    fn begin_branch_records(&mut self, request: BranchRequest, timer: &KickTimer) -> Result<bool, StepError> {
        let can_step = self.can_step();
        let Some(pmu) = &mut self.pmu else {
            return Ok(false);
        };
        pmu.begin_branch_records();
        if can_step {
            let purpose = BurstPurpose::Pmi(request.levels);
            self.start_stepping(purpose, request.depth, timer);
            if let Some(stepper) = &mut self.stepper
                && !stepper.leaves_levels(&self.fd, request.levels)?
            {
                return Ok(true);
            }
            self.finish_burst();
        }
        if let Some(pmu) = &mut self.pmu {
            pmu.registers().complete_branches();
        }
        Ok(false)
    }

    /// Returns `true` if this vCPU may be single-stepped for a burst.
    fn can_step(&self) -> bool {
        !self.is_debugger_attached() && (self.stepper.is_some() || self.bursts.config.is_some())
    }

    /// Starts a burst of single steps that records up to `depth` branches.
    fn start_stepping(&mut self, purpose: BurstPurpose, depth: u16, timer: &KickTimer) {
        if self.stepper.is_none() {
            // The stepper changes registers between two entries, which synchronized registers would
            // override.
            self.registers.stop_sync(&mut self.fd);
            self.stepper = self.bursts.stepper();
            self.bursts.owns_stepper = true;
        }
        let (Some(stepper), Some(pmu)) = (&mut self.stepper, &self.pmu) else {
            return;
        };
        stepper.set_branch_recording(true);
        stepper.hold_interrupts(matches!(purpose, BurstPurpose::Pmi(_)));
        let first_step = stepper.position();
        self.bursts.active = Some(ActiveBurst {
            purpose,
            began: Instant::now(),
            began_cpu_ns: pmu.thread_ns(),
            first_step,
            max_steps: first_step + MAX_STEPS_PER_BRANCH * u64::from(depth),
        });
        timer.kick_in(MAX_BURST);
    }

    /// Removes the stepper of the last burst after stepping was disabled, unless a trap flag that
    /// the stepper set may still be in guest memory. Returns `true` if it was removed.
    pub(super) fn retire_burst_stepper(&mut self) -> bool {
        if !self.bursts.owns_stepper || self.bursts.active.is_some() {
            return false;
        }
        let debugged = self.is_debugger_attached();
        if self.stepper.as_ref().is_some_and(|s| s.has_strays() && !debugged) {
            return false;
        }
        self.bursts.idle = self.stepper.take();
        self.bursts.owns_stepper = false;
        self.registers = RegisterCache::new(&mut self.fd, self.vm.syncs_registers());
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Overflow signals wait only during a burst for the guest's branch records: a signal during a
    /// burst for another purpose is handled immediately, and a signal that has waited is handled
    /// after the burst.
    #[test]
    fn signal_waits_for_end_of_branch_records() {
        let burst = |purpose| ActiveBurst {
            purpose,
            began: Instant::now(),
            began_cpu_ns: 0,
            first_step: 0,
            max_steps: 0,
        };
        let mut bursts = Bursts::default();
        assert!(bursts.defer_signal(true) && !bursts.defer_signal(false));
        let overhead_permille = None;
        bursts.active = Some(burst(BurstPurpose::Sample { overhead_permille }));
        assert!(bursts.defer_signal(true) && !bursts.is_for_pmi());
        bursts.active = Some(burst(BurstPurpose::Pmi(PrivilegeLevels::default())));
        assert!(!bursts.defer_signal(true) && !bursts.defer_signal(false));
        bursts.active = None;
        assert!(bursts.defer_signal(false) && !bursts.defer_signal(false));
    }

    #[test]
    fn pause_bounds_the_share_of_bursts() {
        assert_eq!(pause_after(100, 50), 1900);
        assert_eq!(pause_after(100, 500), 100);
        assert_eq!(pause_after(100, 1000), 0);
        assert_eq!(pause_after(u64::MAX, 1), u64::MAX);
        assert_eq!(pause_after(1, 0), 999);
    }
}
