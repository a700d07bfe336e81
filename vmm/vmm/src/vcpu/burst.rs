//! Branch stacks of samples by burst stepping.
//!
//! A sample with a branch stack starts a *burst*: the vCPU is single-stepped until the requested
//! number of branches was taken, or until a limit on instructions or time is reached. The sample is
//! written at the end of the burst, with the instruction pointer after the last branch. Between
//! bursts the guest runs at full speed.
//!
//! After a burst, the next one is delayed so that bursts take no more than the requested share of the
//! thread's CPU time. A sample that waits meanwhile represents all counts since the previous sample,
//! so a lower rate of samples does not change their weights.

use std::time::{Duration, Instant};

use perf_core::branch::BranchSampling;
use vm_memory::GuestMemoryMmap;

use super::factory::StepperConfig;
use super::kick::KickTimer;
use super::registers::RegisterCache;
use super::running::Running;
use super::step::Stepper;
use crate::pmu::branches;

/// Maximum number of steps and straight-line runs of a burst, for each requested branch.
const MAX_STEPS_PER_BRANCH: u64 = 128;
/// Maximum duration of a burst. Ends a burst whose vCPU has halted.
const MAX_BURST: Duration = Duration::from_millis(100);

/// Burst in progress.
#[derive(Debug)]
struct ActiveBurst {
    request: BranchSampling,
    began: Instant,
    began_cpu_ns: u64,
    /// The exact backing does not step these levels anyway.
    costs: bool,
    /// Number of steps and runs of the stepper at the end of the burst.
    max_steps: u64,
}

/// Bursts of a vCPU.
#[derive(Debug, Default)]
pub(super) struct Bursts {
    /// Configuration of the stepper; `None` if this vCPU cannot take branch stacks.
    config: Option<(StepperConfig, GuestMemoryMmap)>,
    active: Option<ActiveBurst>,
    /// Stepper between two bursts, kept for its decoded code.
    idle: Option<Stepper>,
    /// The vCPU's stepper was installed for bursts.
    owns_stepper: bool,
    /// CPU time of the thread before which no burst may start, in nanoseconds.
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

    /// Returns `true` if flags in guest memory may contain the trap flag of the idle stepper.
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

    /// Returns a stepper for a burst.
    fn stepper(&mut self) -> Option<Stepper> {
        let (config, memory) = self.config.as_ref()?;
        let idle = self.idle.take();
        Some(idle.unwrap_or_else(|| config.stepper(memory.clone())))
    }
}

/// Returns the CPU time that must pass after a burst, so that bursts take `permille` of the CPU time.
fn pause_after(cost_ns: u64, permille: u16) -> u64 {
    let permille = u64::from(permille).clamp(1, 1000);
    cost_ns.saturating_mul(1000 - permille) / permille
}

impl Running {
    /// Collects the branches of the last step and ends the burst at its limits. Called before
    /// overflows are handled.
    #[inline]
    pub(super) fn collect_branches(&mut self) {
        if self.bursts.active.is_some() {
            self.continue_burst();
        }
    }

    fn continue_burst(&mut self) {
        let debugged = self.is_debugger_attached();
        let (Some(pmu), Some(stepper), Some(burst)) = (&mut self.pmu, &mut self.stepper, &self.bursts.active)
        else {
            return;
        };
        let mut full = false;
        for branch in stepper.take_branches() {
            full = pmu.branches().add(branch);
        }
        let tally = stepper.tally();
        let spent = tally.steps + tally.runs >= burst.max_steps || burst.began.elapsed() >= MAX_BURST;
        if full || spent || debugged {
            self.end_burst();
        }
    }

    /// Ends the burst, if any. Waiting samples get the branches so far.
    pub(super) fn end_burst(&mut self) {
        let Some(pmu) = &mut self.pmu else { return };
        pmu.complete_branches();
        if let Some(stepper) = &mut self.stepper {
            stepper.set_branch_recording(false);
        }
        let Some(burst) = self.bursts.active.take() else {
            return;
        };
        let now = pmu.thread_ns();
        let cost = now.saturating_sub(burst.began_cpu_ns);
        pmu.set_burst_time(cost);
        if burst.costs {
            let pause = pause_after(cost, burst.request.overhead_permille);
            self.bursts.not_before_cpu_ns = now.saturating_add(pause);
        }
    }

    /// Starts a burst if a sample waits for one and the overhead limit allows it. A burst starts
    /// only at a privilege level whose branches are requested, and only if KVM has no exit to
    /// complete.
    #[inline]
    pub(super) fn begin_burst_if_due(&mut self, timer: &KickTimer) {
        if let Some(pmu) = &mut self.pmu
            && let Some(request) = pmu.branches().requested()
        {
            let now_cpu_ns = pmu.thread_ns();
            self.begin_burst(request, now_cpu_ns, timer);
        }
    }

    fn begin_burst(&mut self, request: BranchSampling, now: u64, timer: &KickTimer) {
        if self.exit_is_open || now < self.bursts.not_before_cpu_ns {
            return;
        }
        if self.is_debugger_attached() || self.stepper.is_none() && self.bursts.config.is_none() {
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
        if self.stepper.is_none() {
            // The stepper changes registers between two entries, which synchronized registers would
            // override.
            self.registers.stop_sync(&mut self.fd);
            self.stepper = self.bursts.stepper();
            self.bursts.owns_stepper = true;
        }
        let (Some(stepper), Some(pmu)) = (&mut self.stepper, &mut self.pmu) else {
            return;
        };
        stepper.set_branch_recording(true);
        let exact = pmu.exact_levels();
        pmu.branches().begin();
        let tally = stepper.tally();
        self.bursts.active = Some(ActiveBurst {
            request,
            began: Instant::now(),
            began_cpu_ns: now,
            costs: levels.user && !exact.user || levels.kernel && !exact.kernel,
            max_steps: tally.steps + tally.runs + MAX_STEPS_PER_BRANCH * u64::from(request.depth),
        });
        timer.kick_in(MAX_BURST);
    }

    /// Removes the stepper of the last burst after stepping was disabled, unless a flag that it set
    /// may still be in guest memory. Returns `true` if it was removed.
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

    #[test]
    fn pause_bounds_the_share_of_bursts() {
        assert_eq!(pause_after(100, 50), 1900);
        assert_eq!(pause_after(100, 500), 100);
        assert_eq!(pause_after(100, 1000), 0);
        assert_eq!(pause_after(u64::MAX, 1), u64::MAX);
        assert_eq!(pause_after(1, 0), 999);
    }
}
