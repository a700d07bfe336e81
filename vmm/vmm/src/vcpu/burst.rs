//! Collects the branch stacks of samples, and the branch records of the guest, by single-stepping
//! in short bursts.
//!
//! A sample with a branch stack starts a *burst*. The vCPU is single-stepped until it has taken the
//! requested number of branches, or until a limit on instructions or time is reached. The sample is
//! written at the end of the burst, with the instruction pointer after the last branch. Between
//! bursts, the guest runs at full speed.
//!
//! The start of a burst is delayed if bursts would otherwise take more than the requested share of
//! the thread's CPU time. A sample that waits for a delayed burst represents all counts since the
//! previous sample. The weights of samples therefore stay correct although there are fewer of them.
//!
//! A PMI also starts a burst if the guest has enabled its branch records. The PMI is delivered at
//! the end of the burst, and other interrupts are deferred until then. The time of such a burst
//! counts as time of the PMI handler ([`vpmu::PmiShare`]). A separate limit would only leave
//! records empty. The burst ends early if the guest halts or leaves the privilege levels that it
//! records, because a PMI after that could reach another task.

use std::time::{Duration, Instant};

use perf_core::branch::BranchStackConfig;
use vm_memory::GuestMemoryMmap;
use vpmu::{BranchCollectionRequest, PrivilegeLevels};

use super::factory::StepperConfig;
use super::kick::KickTimer;
use super::registers::RegisterCache;
use super::running::Running;
use super::step::{SingleStepError, Stepper};
use crate::pmu::branches;

/// Maximum number of single steps and straight-line runs in a burst, per requested branch.
const MAX_STEPS_PER_BRANCH: u64 = 128;
/// Maximum duration of a burst. The limit also ends a burst whose vCPU has halted.
const MAX_BURST: Duration = Duration::from_millis(100);

/// Purpose of a burst, which determines where the recorded branches go.
#[derive(Clone, Copy, Debug)]
enum BurstPurpose {
    /// An operator's sample with a branch stack.
    Sample {
        /// Maximum share of the thread's CPU time that bursts may take, in thousandths. `None` if
        /// the exact backing already single-steps these privilege levels.
        overhead_permille: Option<u16>,
    },
    /// Branch records of the guest, before a PMI. The value contains the privilege levels that the
    /// guest records.
    Pmi(PrivilegeLevels),
}

/// A burst of single steps that is in progress.
#[derive(Debug)]
struct ActiveBurst {
    purpose: BurstPurpose,
    began: Instant,
    began_cpu_ns: u64,
    /// Value of [`Stepper::position`] at the start of the burst.
    first_step: u64,
    /// Value of [`Stepper::position`] at which the burst ends.
    max_steps: u64,
}

/// State of the single-stepping bursts of a vCPU.
#[derive(Debug, Default)]
pub(super) struct Bursts {
    /// Configuration of steppers and guest memory; `None` if no burst is possible on this vCPU.
    config: Option<(StepperConfig, GuestMemoryMmap)>,
    active: Option<ActiveBurst>,
    /// Stepper of the previous burst, kept because its cache of decoded code speeds up the next
    /// burst.
    idle: Option<Stepper>,
    /// `true` if the vCPU is stepped only for bursts, and not for the exact backing.
    owns_stepper: bool,
    /// `true` if an overflow signal has arrived that is handled after the current burst.
    signal_waits: bool,
    /// CPU time of the thread before which no burst for a sample may start, in nanoseconds.
    not_before_cpu_ns: u64,
}

impl Bursts {
    /// Creates the state of a vCPU. Bursts use steppers with the configuration `config`.
    pub(super) fn new(config: StepperConfig, memory: GuestMemoryMmap) -> Self {
        Self {
            config: Some((config, memory)),
            ..Self::default()
        }
    }

    /// Returns `true` while a burst is in progress.
    #[inline]
    pub(super) fn has_active(&self) -> bool {
        self.active.is_some()
    }

    /// Returns `true` if an overflow signal must be handled now. `signalled` states whether one has
    /// arrived since the last call.
    ///
    /// During a burst for the guest's branch records, the handling of signals waits. The guest's
    /// clock does not advance during such a burst. A timer that fired a little early would be armed
    /// again and again for the same short remaining time.
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

    /// Returns `true` if guest memory may contain RFLAGS values with the trap flag that the idle
    /// stepper has set.
    pub(super) fn has_stray_flags(&self) -> bool {
        self.idle.as_ref().is_some_and(Stepper::has_stray_flags)
    }

    /// Returns a stepper for a restored vCPU, which removes trap flags that bursts before the
    /// snapshot have left in guest memory. Returns `None` if this vCPU cannot be single-stepped.
    pub(super) fn stepper_for_strays(&mut self) -> Option<Stepper> {
        let stepper = self.stepper()?.with_strays();
        self.owns_stepper = true;
        Some(stepper)
    }

    /// Returns the idle stepper, or a new one if there is none. Returns `None` if this vCPU cannot
    /// be single-stepped.
    fn stepper(&mut self) -> Option<Stepper> {
        let (config, memory) = self.config.as_ref()?;
        let idle = self.idle.take();
        Some(idle.unwrap_or_else(|| config.stepper(memory.clone())))
    }
}

/// Returns the CPU time that must pass after a burst that took `cost_ns`, if bursts may take
/// `permille` thousandths of the CPU time.
fn pause_after(cost_ns: u64, permille: u16) -> u64 {
    let permille = u64::from(permille).clamp(1, 1000);
    cost_ns.saturating_mul(1000 - permille) / permille
}

impl Running {
    /// Passes the branches of the last step to the collector, and ends the burst if a limit is
    /// reached. Must be called before overflows are handled.
    ///
    /// # Errors
    /// Returns [`SingleStepError`] if a KVM call fails.
    #[inline]
    pub(super) fn collect_branches(&mut self) -> Result<(), SingleStepError> {
        if self.bursts.has_active() {
            self.continue_burst()?;
        }
        Ok(())
    }

    fn continue_burst(&mut self) -> Result<(), SingleStepError> {
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

    /// Ends the burst in progress, if any. Samples that wait for the burst receive the branches
    /// collected so far.
    pub(super) fn end_burst(&mut self) {
        self.finish_burst();
        if let Some(pmu) = &mut self.pmu {
            pmu.complete_branches();
        }
    }

    /// Ends the burst in progress, if any. The waiting sample or PMI receives the branches
    /// collected so far.
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

    /// Starts a burst if a sample waits for one. Does nothing if the overhead limit does not permit
    /// a burst yet, the vCPU is at a privilege level whose branches are not requested, or KVM has
    /// not completed the last exit.
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

    fn begin_burst(&mut self, request: BranchStackConfig, now: u64, timer: &KickTimer) {
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

    /// Returns `true` if the due PMI must wait, because the guest's branch records are being
    /// collected or a burst for a sample is in progress. Starts the burst for the branch records if
    /// necessary.
    ///
    /// # Errors
    /// Returns [`SingleStepError`] if a KVM call fails.
    pub(super) fn wait_for_branch_records(&mut self, timer: &KickTimer) -> Result<bool, SingleStepError> {
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

    /// Starts a burst for the guest's branch records. Returns `false` if no burst is possible in
    /// the current state of the vCPU. The guest then finds its branch records empty.
    fn begin_branch_records(
        &mut self,
        request: BranchCollectionRequest,
        timer: &KickTimer,
    ) -> Result<bool, SingleStepError> {
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

    /// Returns `true` if this vCPU may be single-stepped for bursts.
    fn can_step(&self) -> bool {
        !self.is_debugger_attached() && (self.stepper.is_some() || self.bursts.config.is_some())
    }

    /// Starts a burst that collects up to `depth` branches.
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

    /// Sets aside the stepper that was installed for bursts. Returns `false`, without an effect, if
    /// there is none, during a burst, and while guest memory may still contain a trap flag that the
    /// stepper has set.
    pub(super) fn retire_burst_stepper(&mut self) -> bool {
        if !self.bursts.owns_stepper || self.bursts.active.is_some() {
            return false;
        }
        let debugged = self.is_debugger_attached();
        if self
            .stepper
            .as_ref()
            .is_some_and(|s| s.has_stray_flags() && !debugged)
        {
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

    /// Overflow signals wait during a burst for the guest's branch records, and are handled after
    /// it. During a burst for another purpose, they are handled immediately.
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
