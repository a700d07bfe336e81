//! Merges two sample streams of the same event on the same vCPU into one profile.
//!
//! The host's kernel samples the guest's instruction pointer without an exit. These are *light*
//! samples. The VM takes samples at a fraction of that rate and forces an exit for each one. These
//! are *full* samples with registers, task and call chain. The two streams are independent.
//!
//! - A full sample replaces the light sample that is nearest in time. A profile therefore has as
//!   many samples as if all of them were full.
//! - The VM counts the event that it samples, so the periods of the full samples add up to the
//!   event's count. The weight of a full sample is the part of its period that the preceding light
//!   samples do not represent: the period of the light sample that it replaces, KVM's work for the
//!   guest, and lost light samples. The weights of light and full samples therefore also add up to
//!   the count.
//! - A light sample has no task. It is assigned the task of the full sample of the same vCPU that
//!   is nearest in time. A light sample at a user address is never assigned to a kernel thread, but
//!   to the user task whose full sample is nearest.
//! - If the light samples do not show the guest ([`SampledCpuMode::HostKernel`]), the VM is
//!   requested to make every sample a full one. Only full samples are used until the guest is
//!   visible in light samples again. The same applies if KVM's own work is so large that a few full
//!   samples would represent most of the count.
//! - Unless the user sets the ratio of full samples, the ratio decreases if full samples stop the
//!   vCPU for too long.

use std::collections::VecDeque;

use perf_core::pmu::host::{GuestSample, SampledCpuMode};

/// Minimum number of light samples between two decisions about the mode: light mode (mostly light
/// samples) or full mode (full samples only).
const WINDOW: u64 = 40;
/// Minimum number of light samples from which the share of KVM's own work is computed. With fewer
/// samples, a true share of 10 % might be measured as 20 %.
const WORK_WINDOW: u64 = 10 * WINDOW;
/// Number of full samples that are evaluated in full mode before a return to light mode is
/// considered.
const FULL_WINDOW: u32 = 100;
/// Maximum share of unseen time in light mode. Full mode starts above it. Unseen time is the time
/// in which light samples show the host's kernel instead of the guest.
///
/// If KVM emulates the guest's kernel, the few full samples in that kernel represent all unseen
/// time. Up to this limit, the result is accurate to one or two percentage points per function
/// after several seconds.
const UNSEEN_LIMIT: f64 = 0.20;
/// Share of full samples in the guest's kernel, or of KVM's own work, below which light mode starts
/// again.
const KERNEL_LIMIT: f64 = 0.15;
/// Margin that is added to the share of unseen time that caused the last switch to full mode. If
/// that time turns out not to be guest code, the sum becomes the limit of unseen time, so that full
/// mode does not start again.
const MARGIN: f64 = 0.05;
/// Maximum time in nanoseconds that a light sample waits for the next full sample. The light sample
/// may get the task of that full sample.
const MAX_WAIT_NS: u64 = 500_000_000;
/// Maximum share of a vCPU's time for which full samples may stop it, in light mode and in full
/// mode.
const MAX_STOPPED_SHARE: f64 = 0.005;
const MAX_STOPPED_SHARE_FULL: f64 = 0.03;
/// Number of full samples from which the median cost of a full sample is computed. The cost is the
/// time for which the sample stopped the vCPU.
const COSTS: usize = 15;
/// Maximum number of light samples that wait for the next full sample. Others are dropped.
const MAX_PENDING: usize = 1 << 16;

/// A light sample: a sample of the guest that the host's kernel took without stopping the vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LightSample {
    /// Time of the sample, in nanoseconds on the clock that the VM's own samples use.
    pub time_ns: u64,
    /// Guest instruction pointer at the sample.
    pub ip: u64,
    /// `true` if the guest ran at privilege level 3, according to the host's kernel.
    pub user: bool,
    /// Number of events that the light sample represents.
    pub period: u64,
}

/// The guest task that a full sample (a sample taken by the VM) found running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampledGuestTask {
    /// Time of the full sample, in nanoseconds.
    pub time_ns: u64,
    /// Guest process ID of the task.
    pub pid: u32,
    /// Guest thread ID of the task.
    pub tid: u32,
    /// CR3 of the vCPU while the task was running.
    pub cr3: u64,
    /// `true` if the task is a kernel thread, which never runs user code.
    pub kernel_thread: bool,
}

/// Number of samples in a merged profile by origin, as reported to the user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MergedSampleCounts {
    /// Number of light samples (taken by the host's kernel) in the profile.
    pub light: u64,
    /// Number of full samples (taken by the VM, with a call chain) in the profile.
    pub full: u64,
    /// Number of full samples that the VM took in full mode, because light samples did not show
    /// enough of the guest.
    pub in_full_mode: u64,
    /// Number of light samples that hit the host's kernel or the VMM instead of guest code.
    pub host: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum MergeMode {
    /// Light mode: mostly light samples, and full samples at a fraction of their rate.
    #[default]
    Light,
    /// Full mode: every sample is a full one.
    Full,
}

/// Parameters of merging light samples (taken by the host's kernel) with full samples (taken by the
/// VM).
#[derive(Clone, Copy, Debug, Default)]
pub struct SampleMergeConfig {
    /// Period of the light samples (taken by the host's kernel), in events. `None` to use the
    /// period that is stored in each sample.
    pub period: Option<u64>,
    /// Difference between the clocks of the two streams, in nanoseconds. Subtracted from the time
    /// of a light sample (taken by the host's kernel) to obtain the time on the VM's clock.
    pub clock_offset_ns: u64,
    /// `true` if KVM emulates the guest's kernel on this host. Samples taken by the host's kernel
    /// then cannot show the guest's kernel.
    pub interpreted: bool,
    /// Minimum number of sample periods per full sample (a sample taken by the VM) in light mode.
    /// The number is constant unless [`Self::adapt_to_ns`] is given.
    pub chain_every: u32,
    /// Interval at which the host's kernel samples a running vCPU, in nanoseconds. If given, the VM
    /// takes full samples less often when they stop the vCPU for too long. `None` for a fixed ratio
    /// of full samples.
    pub adapt_to_ns: Option<u64>,
}

/// Merges the light samples (taken by the host's kernel) and the full samples (taken by the VM) of
/// one event on one vCPU.
#[derive(Debug, Default)]
pub struct SampleMerger {
    terms: SampleMergeConfig,
    mode: MergeMode,
    /// Current number of sample periods per full sample.
    periods_per_sample: u32,
    /// Times for which the most recent full samples stopped the vCPU, in nanoseconds.
    costs: VecDeque<u32>,
    /// Time at which the current mode (light or full) started, on the clock of the samples.
    since_ns: u64,
    pending: VecDeque<LightSample>,
    whose: VecDeque<SampledGuestTask>,
    /// Most recent full sample of a user task that is older than all entries of `whose`.
    program: Option<SampledGuestTask>,
    /// Number of events for which light samples showed the host's kernel and which the next full
    /// sample in the guest's kernel will represent. Used only if KVM emulates the guest's kernel.
    unseen: u64,
    /// Number of events that the VM has counted minus number of events that samples represent.
    /// Negative if samples represent more events than the VM has counted so far.
    uncovered: i64,
    /// Time up to which the periods of light samples have been subtracted from `uncovered`, in
    /// nanoseconds.
    covered_until_ns: u64,
    /// `true` from the switch to full mode until its first full sample.
    first: bool,
    /// Number of samples of each type since the last decision about the mode: light samples of the
    /// guest, light samples of the host, full samples, and full samples in the guest's kernel.
    guest: u64,
    host: u64,
    full: u32,
    full_kernel: u32,
    /// `true` once a light sample has shown guest code instead of the host's kernel.
    ever_seen: bool,
    /// Share of unseen time above which full mode starts, and share of unseen time at the last
    /// decision in light mode. Unseen time is the time in which light samples show the host's
    /// kernel.
    limit: f64,
    share: f64,
    totals: MergedSampleCounts,
}

impl SampleMerger {
    /// Creates a merger without samples, in light mode.
    pub fn new(terms: SampleMergeConfig) -> Self {
        Self {
            terms,
            periods_per_sample: terms.chain_every,
            costs: VecDeque::with_capacity(COSTS),
            limit: UNSEEN_LIMIT,
            ..Self::default()
        }
    }

    /// Returns the numbers of samples merged so far.
    pub fn totals(&self) -> MergedSampleCounts {
        self.totals
    }

    /// Returns whether full mode is active because no light sample has ever shown the guest.
    pub fn is_blind(&self) -> bool {
        !self.terms.interpreted && !self.ever_seen && self.mode == MergeMode::Full
    }

    fn mode_at(&self, time_ns: u64) -> MergeMode {
        match (self.mode, time_ns >= self.since_ns) {
            (mode, true) => mode,
            (MergeMode::Light, false) => MergeMode::Full,
            (MergeMode::Full, false) => MergeMode::Light,
        }
    }

    /// Adds a light sample (a sample taken by the host's kernel). When both rings are drained,
    /// light samples must be added before full samples of the same time.
    pub fn add_light(&mut self, sample: GuestSample) {
        let time_ns = sample.time_ns.saturating_sub(self.terms.clock_offset_ns);
        let period = self.terms.period.unwrap_or(sample.period);
        match sample.side {
            SampledCpuMode::GuestUser | SampledCpuMode::GuestKernel => {
                self.guest += 1;
                self.ever_seen = true;
                if self.mode_at(time_ns) == MergeMode::Light && self.pending.len() < MAX_PENDING {
                    if time_ns <= self.covered_until_ns {
                        // The sample arrived after a full sample with a later time.
                        self.uncovered = self.uncovered.saturating_sub_unsigned(period);
                    }
                    self.pending.push_back(LightSample {
                        time_ns,
                        ip: sample.ip,
                        user: sample.side == SampledCpuMode::GuestUser,
                        period,
                    });
                }
            }
            SampledCpuMode::HostKernel => {
                self.host += 1;
                if self.mode_at(time_ns) == MergeMode::Light {
                    if self.terms.interpreted {
                        self.unseen = self.unseen.saturating_add(period);
                    }
                    self.totals.host += 1;
                }
            }
            SampledCpuMode::HostUser => {
                self.totals.host += u64::from(self.mode_at(time_ns) == MergeMode::Light)
            }
        }
    }

    /// Adds a full sample (a sample taken by the VM), and returns its weight in the profile, in
    /// events. The VM counted `period` events since the previous full sample. The vCPU was running
    /// the task `whose` at privilege level `cpl`.
    pub fn full(&mut self, whose: SampledGuestTask, cpl: u8, period: u64) -> u64 {
        self.full = self.full.saturating_add(1);
        self.full_kernel = self.full_kernel.saturating_add(u32::from(cpl != 3));
        // Rings are ordered by time. Ignore samples that violate this order, for example because of
        // an unstable clock.
        if self.whose.back().is_none_or(|last| last.time_ns <= whose.time_ns) {
            self.whose.push_back(whose);
        }
        self.totals.full += 1;
        let hidden = self.terms.interpreted && cpl != 3;
        if self.mode_at(whose.time_ns) == MergeMode::Full {
            self.totals.in_full_mode += 1;
            // The switch to full mode interrupted a long period. The first full sample includes the
            // part of it before the switch, which light samples have already represented.
            let period = match (std::mem::take(&mut self.first), self.terms.period) {
                (true, Some(short)) => period.min(short.saturating_mul(u64::from(self.periods_per_sample))),
                _ => period,
            };
            let unseen = if hidden {
                std::mem::take(&mut self.unseen)
            } else {
                0
            };
            return period.saturating_add(unseen);
        }
        if hidden {
            let light = self.terms.period.unwrap_or(period);
            return std::mem::take(&mut self.unseen).max(light);
        }
        self.cover_until(whose.time_ns);
        let replaced = self.take_nearest(whose.time_ns);
        if self.terms.interpreted {
            // Unseen time is time of the guest's kernel, but this sample is in a user program.
            return replaced.map(|l| l.period).or(self.terms.period).unwrap_or(period);
        }
        self.uncovered = self.uncovered.saturating_add_unsigned(period);
        if let Some(light) = replaced
            && light.time_ns <= self.covered_until_ns
        {
            self.uncovered = self.uncovered.saturating_add_unsigned(light.period);
        }
        // The streams have independent timers, so the number of light samples between two full
        // samples varies by one.
        let share = replaced.map(|l| l.period).or(self.terms.period).unwrap_or(period);
        let weight = u64::try_from(self.uncovered).unwrap_or(0).max(share / 2).max(1);
        // `uncovered` has a lower bound, so that full samples that were lost in a full ring do not
        // reduce the weights of all later samples.
        let least = 0i64.saturating_sub_unsigned(period.saturating_mul(2));
        self.uncovered = self.uncovered.saturating_sub_unsigned(weight).max(least);
        weight
    }

    /// Subtracts the periods of the light samples up to `time_ns` from `uncovered`, because the
    /// profile contains these samples.
    fn cover_until(&mut self, time_ns: u64) {
        let from = self
            .pending
            .partition_point(|l| l.time_ns <= self.covered_until_ns);
        let to = self.pending.partition_point(|l| l.time_ns <= time_ns);
        for light in self.pending.range(from..to.max(from)) {
            self.uncovered = self.uncovered.saturating_sub_unsigned(light.period);
        }
        self.covered_until_ns = self.covered_until_ns.max(time_ns);
    }

    fn take_nearest(&mut self, time_ns: u64) -> Option<LightSample> {
        let after = self.pending.partition_point(|l| l.time_ns < time_ns);
        let distance = |at: usize| self.pending.get(at).map(|l| l.time_ns.abs_diff(time_ns));
        let before = after.checked_sub(1);
        let nearest = match (before.and_then(distance), distance(after)) {
            (Some(b), Some(a)) if b < a => before,
            (_, Some(_)) => Some(after),
            (_, None) => before,
        };
        self.pending.remove(nearest?)
    }

    /// Passes to `emit` each light sample that no later full sample can be nearer to in time. The
    /// sample is passed with the task assigned to it, or with `None` if no task is known.
    pub fn settle(&mut self, now_ns: u64, mut emit: impl FnMut(LightSample, Option<SampledGuestTask>)) {
        let newest_ns = self.whose.back().map_or(0, |w| w.time_ns);
        let due = newest_ns.max(now_ns.saturating_sub(MAX_WAIT_NS));
        let passed_on = self.pending.partition_point(|l| l.time_ns <= due);
        if let Some(last) = passed_on.checked_sub(1).and_then(|at| self.pending.get(at)) {
            self.cover_until(last.time_ns);
        }
        while let Some(light) = self.pending.front().copied()
            && light.time_ns <= due
        {
            self.pending.pop_front();
            // Keeps only the last full sample before the light sample, and all later ones.
            while self.whose.len() > 1 && self.whose[1].time_ns <= light.time_ns {
                self.drop_first_task();
            }
            let mut before = self.whose.front().copied();
            let mut after = self.whose.get(1).copied();
            if light.ip >> 63 == 0 {
                // A user address (lower half) belongs to a user task, unless only kernel threads
                // are known.
                let program = |w: &SampledGuestTask| !w.kernel_thread;
                let earlier = before.filter(program).or(self.program);
                let later = self.whose.iter().skip(1).copied().find(program);
                if earlier.or(later).is_some() {
                    (before, after) = (earlier, later);
                }
            }
            let nearest = match (before, after) {
                (Some(b), Some(a)) => {
                    let late = a.time_ns.abs_diff(light.time_ns) < b.time_ns.abs_diff(light.time_ns);
                    Some(if late { a } else { b })
                }
                (before, after) => before.or(after),
            };
            self.totals.light += 1;
            emit(light, nearest);
        }
        if self.pending.is_empty() {
            while self.whose.len() > 1 {
                self.drop_first_task();
            }
        }
    }

    fn drop_first_task(&mut self) {
        if let Some(first) = self.whose.pop_front()
            && !first.kernel_thread
        {
            self.program = Some(first);
        }
    }

    /// Records the time for which a full sample stopped the vCPU.
    pub fn cost(&mut self, held_ns: u32) {
        if held_ns > 0 {
            if self.costs.len() == COSTS {
                self.costs.pop_front();
            }
            self.costs.push_back(held_ns);
        }
    }

    /// Returns the minimum number of sample periods per full sample that the limit on the vCPU's
    /// stopped time permits.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the cast saturates, and the result is clamped"
    )]
    fn affordable(&self) -> u32 {
        let (least, most_held) = match self.mode {
            MergeMode::Light => (self.terms.chain_every, MAX_STOPPED_SHARE),
            MergeMode::Full => (1, MAX_STOPPED_SHARE_FULL),
        };
        let Some(period_ns) = self.terms.adapt_to_ns else {
            return least;
        };
        let mut costs: Vec<u32> = self.costs.iter().copied().collect();
        costs.sort_unstable();
        let cost_ns = costs.get(costs.len() / 2).copied().unwrap_or(0);
        let every = f64::from(cost_ns) / (most_held * period_ns.max(1) as f64);
        // The maximum is 2000, because even a mostly idle vCPU should have a few full samples in
        // ten seconds.
        (every.ceil() as u32).clamp(least, least.max(2000))
    }

    /// Decides about the mode (light or full) and the ratio of full samples. Returns the new number
    /// of sample periods per full sample, or `None` if the number remains the same.
    pub fn decide(&mut self, now_ns: u64) -> Option<u32> {
        let to = match self.mode {
            MergeMode::Light => self
                .shows_too_little()
                .map(|little| little.then_some(MergeMode::Full)),
            MergeMode::Full => self
                .shows_enough()
                .map(|enough| enough.then_some(MergeMode::Light)),
        };
        if to.is_some() {
            (self.guest, self.host, self.full, self.full_kernel) = (0, 0, 0, 0);
        }
        if let Some(mode) = to.flatten() {
            self.mode = mode;
            self.first = mode == MergeMode::Full;
            self.since_ns = now_ns;
            self.periods_per_sample = self.affordable();
            return Some(self.periods_per_sample);
        }
        let every = self.affordable();
        // Small changes are not worth a reconfiguration of the VM.
        let differs = every.abs_diff(self.periods_per_sample) > self.periods_per_sample / 4;
        if self.costs.len() < COSTS || !differs {
            return None;
        }
        self.periods_per_sample = every;
        self.costs.clear();
        Some(every)
    }

    /// Returns whether the light samples show so little of the guest that full mode is needed.
    /// Returns `None` if there are too few samples for a decision.
    fn shows_too_little(&mut self) -> Option<bool> {
        let seen = self.guest + self.host;
        if seen < WINDOW {
            return None;
        }
        if !self.terms.interpreted && !self.ever_seen {
            return Some(true);
        }
        if !self.terms.interpreted && seen < WORK_WINDOW {
            return None;
        }
        self.share = self.host as f64 / seen as f64;
        Some(self.share > self.limit)
    }

    fn shows_enough(&mut self) -> Option<bool> {
        if !self.terms.interpreted {
            // In full mode, light samples are counted but not used in the profile.
            let seen = self.guest + self.host;
            if self.share == 0.0 {
                return (self.guest > 0).then_some(true);
            }
            return (seen >= WORK_WINDOW).then_some((self.host as f64) < KERNEL_LIMIT * seen as f64);
        }
        if self.full < FULL_WINDOW {
            return None;
        }
        let enough = f64::from(self.full_kernel) < KERNEL_LIMIT * f64::from(self.full);
        if enough {
            // In full mode, few samples were in the guest's kernel, so the unseen time was not
            // guest code. The limit is raised to avoid another switch.
            self.limit = self.limit.max(self.share + MARGIN);
        }
        Some(enough)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PERIOD: u64 = 1000;

    fn merge(interpreted: bool) -> SampleMerger {
        SampleMerger::new(SampleMergeConfig {
            period: Some(PERIOD),
            clock_offset_ns: 0,
            interpreted,
            chain_every: 20,
            adapt_to_ns: None,
        })
    }

    fn sample(time_ns: u64, side: SampledCpuMode) -> GuestSample {
        GuestSample {
            time_ns,
            side,
            ip: time_ns,
            period: 7,
        }
    }

    /// Returns the origin of a light sample for tests: the host's kernel if `host` is `true`,
    /// otherwise the guest.
    fn origin(host: bool) -> SampledCpuMode {
        if host {
            SampledCpuMode::HostKernel
        } else {
            SampledCpuMode::GuestUser
        }
    }

    fn whose(time_ns: u64, pid: u32) -> SampledGuestTask {
        SampledGuestTask {
            time_ns,
            pid,
            tid: pid,
            cr3: 0,
            kernel_thread: false,
        }
    }

    fn settled(merge: &mut SampleMerger, now_ns: u64) -> Vec<(u64, Option<u32>)> {
        let mut out = Vec::new();
        merge.settle(now_ns, |light, whose| {
            out.push((light.time_ns, whose.map(|w| w.pid)))
        });
        out
    }

    #[test]
    fn light_sample_gets_nearest_task() {
        let mut m = merge(false);
        for t in [10, 40, 60, 90, 130] {
            m.add_light(sample(t, SampledCpuMode::GuestUser));
        }
        // Each full sample replaces one light sample and represents the remaining events before it.
        assert_eq!(m.full(whose(39, 1), 3, 20 * PERIOD), 19 * PERIOD);
        assert_eq!(m.full(whose(91, 2), 3, 20 * PERIOD), 19 * PERIOD);
        assert_eq!(settled(&mut m, 100), [(10, Some(1)), (60, Some(1))]);
        // The last light sample waits for the next full sample.
        assert_eq!(m.full(whose(140, 3), 3, 20 * PERIOD), 20 * PERIOD);
        assert_eq!(settled(&mut m, 141), []);
        m.add_light(sample(150, SampledCpuMode::GuestUser));
        assert_eq!(settled(&mut m, 150 + MAX_WAIT_NS), [(150, Some(3))]);
    }

    /// A light sample at a user address is assigned to a user task, even if the full samples that
    /// are nearest in time belong to a kernel thread.
    #[test]
    fn user_address_is_not_assigned_to_kernel_thread() {
        let thread = |time_ns| SampledGuestTask {
            kernel_thread: true,
            ..whose(time_ns, 9)
        };
        let mut m = merge(false);
        m.full(whose(5, 1), 3, PERIOD);
        m.full(thread(20), 0, PERIOD);
        m.full(thread(100), 0, PERIOD);
        m.full(whose(200, 2), 3, PERIOD);
        let kernel = |time_ns| GuestSample {
            ip: u64::MAX,
            ..sample(time_ns, SampledCpuMode::GuestKernel)
        };
        for t in [22, 90, 110] {
            m.add_light(sample(t, SampledCpuMode::GuestUser));
            m.add_light(kernel(t + 1));
        }
        let expected = [(22, 1), (23, 9), (90, 1), (91, 9), (110, 2), (111, 9)];
        assert_eq!(settled(&mut m, 201), expected.map(|(t, pid)| (t, Some(pid))));
        // If only a kernel thread is known, the light sample is assigned to it.
        let mut m = merge(false);
        m.full(thread(5), 0, PERIOD);
        m.add_light(sample(10, SampledCpuMode::GuestUser));
        assert_eq!(settled(&mut m, u64::MAX), [(10, Some(9))]);
    }

    #[test]
    fn light_sample_without_full_sample_has_no_task() {
        let mut m = merge(false);
        m.add_light(sample(10, SampledCpuMode::GuestKernel));
        assert_eq!(settled(&mut m, 20), []);
        assert_eq!(settled(&mut m, u64::MAX), [(10, None)]);
    }

    /// If the light samples never show the guest, every sample is a full one and represents its own
    /// period.
    #[test]
    fn blind_ring_switches_to_full_mode() {
        let mut m = merge(false);
        for t in 0..WINDOW {
            m.add_light(sample(t, SampledCpuMode::HostKernel));
        }
        assert_eq!(m.decide(100), Some(1));
        assert!(m.is_blind());
        // The switch to full mode interrupted a long period. The first full sample represents only
        // the part after the switch.
        assert_eq!(m.full(whose(101, 1), 0, 13 * PERIOD), PERIOD);
        assert_eq!(m.full(whose(102, 1), 0, 2 * PERIOD), 2 * PERIOD);
        assert_eq!(m.decide(102), None);
        // A light sample shows the guest, so light mode starts.
        m.add_light(sample(200, SampledCpuMode::GuestUser));
        assert_eq!(m.decide(201), Some(20));
        assert!(!m.is_blind());
        // A small share of KVM's own work does not cause a switch to full mode.
        for t in 300..300 + WORK_WINDOW {
            m.add_light(sample(t, origin(t % 8 == 0)));
        }
        assert_eq!(m.decide(1000), None);
    }

    /// If KVM's own work takes most of the time, all samples are full ones until its share
    /// decreases.
    #[test]
    fn dominant_kvm_work_switches_to_full_mode() {
        let mut m = merge(false);
        let mut now = 0;
        let mut pass = |m: &mut SampleMerger, one_in: u64| {
            for _ in 0..WORK_WINDOW {
                now += 1;
                m.add_light(sample(now, origin(now % one_in == 0)));
            }
            (m.decide(now), now)
        };
        assert_eq!(pass(&mut m, 10).0, None);
        let (decision, at) = pass(&mut m, 3);
        assert_eq!(decision, Some(1));
        assert!(!m.is_blind());
        assert_eq!(m.full(whose(at + 1, 1), 0, PERIOD), PERIOD);
        assert_eq!(pass(&mut m, 6).0, None);
        assert_eq!(pass(&mut m, 10).0, Some(20));
    }

    /// While a full sample stops the vCPU for a long time, the ratio of full samples decreases. It
    /// increases again when full samples become cheaper.
    #[test]
    fn expensive_full_samples_are_taken_less_often() {
        let terms = SampleMergeConfig {
            adapt_to_ns: Some(1_000_000),
            ..merge(false).terms
        };
        let mut m = SampleMerger::new(terms);
        m.add_light(sample(1, SampledCpuMode::GuestUser));
        let mut pass = |costs: [u32; COSTS]| {
            costs.into_iter().for_each(|ns| m.cost(ns));
            m.decide(2)
        };
        assert_eq!(pass([65_000; COSTS]), None, "20 of 65 µs a second are 0.3 %");
        assert_eq!(pass([250_000; COSTS]), Some(50));
        // A single outlier caused by preemption has no effect.
        let mut waited = [250_000; COSTS];
        waited[3] = 50_000_000;
        assert_eq!(pass(waited), None);
        assert_eq!(pass([240_000; COSTS]), None);
        assert_eq!(pass([10_000; COSTS]), Some(20));
        assert_eq!(pass([u32::MAX; COSTS]), Some(2000));
        // In full mode, the rate is limited so that the vCPU is stopped for 3 % of the time.
        let mut m = SampleMerger::new(terms);
        (0..COSTS).for_each(|_| m.cost(250_000));
        (0..WINDOW).for_each(|t| m.add_light(sample(t, SampledCpuMode::HostKernel)));
        assert_eq!(m.decide(100), Some(9));
        // With a fixed ratio of full samples, their cost has no effect.
        let mut m = merge(false);
        (0..COSTS).for_each(|_| m.cost(250_000));
        assert_eq!(m.decide(2), None);
    }

    /// If KVM emulates the guest's kernel, light samples of the host's kernel count as time in the
    /// guest's kernel, and the next full sample in that kernel represents them.
    #[test]
    fn unseen_time_is_assigned_to_next_kernel_sample() {
        let mut m = merge(true);
        for t in 0..WINDOW {
            m.add_light(sample(t, origin(t % 2 == 0)));
        }
        // Light samples showed the host's kernel half of the time, which this full sample
        // represents.
        assert_eq!(m.full(whose(WINDOW, 1), 0, 20 * PERIOD), WINDOW / 2 * PERIOD);
        assert_eq!(m.decide(WINDOW + 1), Some(1));
        for t in 0..u64::from(FULL_WINDOW) {
            assert_eq!(m.full(whose(100 + t, 1), 0, PERIOD), PERIOD);
        }
        assert_eq!(m.decide(1000), None, "the kernel still runs");
        for t in 0..u64::from(FULL_WINDOW) {
            m.full(whose(2000 + t, 1), 3, PERIOD);
        }
        assert_eq!(m.decide(3000), Some(20), "only programs run");
    }

    /// If no sample is lost, all samples have the same weight. Each 20th sample in this test is a
    /// full one, and the others are light ones.
    #[test]
    fn samples_have_equal_weight_without_loss() {
        let mut m = merge(false);
        for t in 1..=2000u64 {
            m.add_light(sample(10 * t, SampledCpuMode::GuestUser));
            if t % 20 == 0 {
                assert_eq!(m.full(whose(10 * t + 1, 1), 3, 20 * PERIOD), PERIOD);
            }
        }
    }

    proptest! {
        /// The weights of all samples add up to the VM's count of the event, regardless of lost
        /// samples, of samples in the host's kernel, and of the order in which the rings are
        /// drained.
        #[test]
        fn sample_weights_add_up_to_count(seen in prop::collection::vec(prop::bool::weighted(0.6), 400..2000), drain in 1usize..100) {
            let mut m = merge(false);
            let (mut count, mut weights) = (0u64, 0u64);
            for (at, batch) in seen.chunks(drain).enumerate() {
                let first = at * drain + 1;
                let times = first..first + batch.len();
                for (t, &guest) in times.clone().zip(batch) {
                    m.add_light(sample(10 * t as u64, if guest { SampledCpuMode::GuestKernel } else { SampledCpuMode::HostKernel }));
                }
                for t in times.filter(|t| t % 20 == 0) {
                    count += 20 * PERIOD;
                    weights += m.full(whose(10 * t as u64 + 1, 1), 3, 20 * PERIOD);
                }
                m.settle(10 * (first + batch.len()) as u64, |l, _| weights += l.period);
            }
            m.settle(u64::MAX, |l, _| weights += l.period);
            prop_assert!(weights.abs_diff(count) <= 20 * PERIOD, "{weights} of {count}");
        }

        /// For any input, every light sample of the guest is either emitted once, in the order of
        /// time, or replaced by a full sample.
        #[test]
        fn light_samples_are_emitted_or_replaced_once(steps in prop::collection::vec((0u64..2000, 0u8..6), 0..300)) {
            let mut m = merge(false);
            m.ever_seen = true;
            let (mut now, mut guest, mut full, mut out) = (0, 0u64, 0u64, Vec::new());
            for (step, what) in steps {
                now += step;
                match what {
                    0..=2 => { m.add_light(sample(now, SampledCpuMode::GuestUser)); guest += 1; }
                    3 => m.add_light(sample(now, SampledCpuMode::HostKernel)),
                    4 => {
                        full += u64::from(!m.pending.is_empty());
                        m.full(whose(now, 1), 3, 1);
                    }
                    _ => m.settle(now, |l, _| out.push(l.time_ns)),
                }
                let _ = m.decide(now);
            }
            m.settle(u64::MAX, |l, _| out.push(l.time_ns));
            prop_assert!(out.is_sorted());
            prop_assert_eq!(out.len() as u64 + full, guest);
            prop_assert_eq!(m.totals().light, out.len() as u64);
        }
    }
}
