//! One profile out of two streams of samples of the same event on the same vCPU.
//!
//! The host's kernel samples the guest's instruction pointer without leaving the guest: *light* samples. The
//! VM samples a fraction as often, taking the vCPU out of the guest each time: *full* samples, with
//! registers, task and call chain. The two are taken independently of each other.
//!
//! - A full sample takes the place of the light one that is nearest in time. So a profile has as many samples
//!   as it would have with full ones only.
//! - The VM counts what it samples: the full samples' periods add up to the event's count. What the light
//!   samples before a full one do not stand for is that one's weight: its own share, and what the host's
//!   kernel did not show, as KVM's work for the guest and light samples that were lost. So the weights add up
//!   to the count, too.
//! - A light sample knows no task. It gets the task of the full sample of its vCPU that is nearest in time; a
//!   program's address not that of one in a thread of the kernel, but of the nearest in a program.
//! - Where the light samples do not show the guest ([`Side::HostKernel`]), the VM is asked to take every
//!   sample, and only full ones count, until the guest shows again. Likewise where KVM's own work for the
//!   guest is so much that a few full samples would stand for most of the count.
//! - Unless the user says how many are to be full, there are fewer of them where each holds the vCPU for
//!   long.

use std::collections::VecDeque;

use perf_core::pmu::host::{GuestSample, Side};

/// Light samples between two decisions.
const WINDOW: u64 = 40;
/// Likewise, where the share of KVM's own work is decided on: one that is 10 % in truth is not taken for
/// twice that.
const WORK_WINDOW: u64 = 10 * WINDOW;
/// Full samples after which going back to light ones is considered.
const FULL_WINDOW: u32 = 100;
/// The share of time unseen from which on every sample is taken full. Where KVM interprets the guest's
/// kernel, below it the few full samples in the guest's kernel stand for all of the unseen time: how much
/// that was is known, and where, to a point or two after some seconds.
const UNSEEN_LIMIT: f64 = 0.20;
/// The share of full samples in the guest's kernel, or of KVM's own work, below which light ones are enough
/// again.
const KERNEL_LIMIT: f64 = 0.15;
/// How far the unseen share must be above one that turned out not to be the guest's.
const MARGIN: f64 = 0.05;
/// A light sample waits for the next full one at most for so long, ns.
const PATIENCE_NS: u64 = 500_000_000;
/// The share of its time that a vCPU may be held for full samples: among light ones, and where all are full.
const MOST_HELD: f64 = 0.005;
const MOST_HELD_INSTEAD: f64 = 0.03;
/// Full samples that tell what one costs: the middle one of so many.
const COSTS: usize = 15;
/// Most light samples that wait.
const MOST_PENDING: usize = 1 << 16;

/// A sample of the host's kernel in the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Light {
    /// Time of the VM's own samples, ns.
    pub time_ns: u64,
    /// Instruction pointer.
    pub ip: u64,
    /// At privilege level 3, as the host's kernel says.
    pub user: bool,
    /// Events it stands for.
    pub period: u64,
}

/// Whose a full sample was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Whose {
    /// Time, ns.
    pub time_ns: u64,
    /// Process, thread, address space.
    pub pid: u32,
    /// Thread.
    pub tid: u32,
    /// CR3.
    pub cr3: u64,
    /// It is a thread of the kernel, which never runs a program's code.
    pub kernel_thread: bool,
}

/// What became of the samples, for the user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Light samples in the profile.
    pub light: u64,
    /// Full samples in the profile.
    pub full: u64,
    /// Of these, taken because the light ones did not show the guest.
    pub instead: u64,
    /// Light samples that fell into the host's kernel or the VMM and show no guest code.
    pub host: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Light samples with a full one now and then.
    Light,
    /// Full samples only.
    Full,
}

/// How the host's ring is to be read.
#[derive(Clone, Copy, Debug)]
pub struct RingTerms {
    /// Events of each light sample; `None`: as the sample says.
    pub period: Option<u64>,
    /// What to take off its time, ns.
    pub clock_offset_ns: u64,
    /// KVM interprets the guest's kernel here.
    pub interpreted: bool,
    /// A full sample for so many.
    pub chain_every: u32,
    /// Time from one light sample to the next while the vCPU runs, ns, if full samples may be made rarer
    /// where they cost much.
    pub adapt_to_ns: Option<u64>,
}

/// The streams of one event on one vCPU.
#[derive(Debug)]
pub struct Merge {
    terms: RingTerms,
    mode: Mode,
    /// A full sample for so many, as was last decided.
    every: u32,
    /// How long the last full samples held the vCPU, ns.
    costs: VecDeque<u32>,
    /// Since when, in the samples' time.
    since_ns: u64,
    pending: VecDeque<Light>,
    whose: VecDeque<Whose>,
    /// The last one before the first of these that was no kernel thread.
    program: Option<Whose>,
    /// KVM interprets the guest's kernel: events of time that was not seen, for the next full sample in that
    /// kernel.
    unseen: u64,
    /// Events that the VM counted and no sample stands for yet; below 0, more than it counted so far.
    owed: i64,
    /// Up to here light samples have been taken off what is owed.
    paid_to_ns: u64,
    /// The first full sample since every one is taken full is still to come.
    first: bool,
    /// Since the last decision.
    guest: u64,
    host: u64,
    full: u32,
    full_kernel: u32,
    /// The guest was seen at least once.
    ever_seen: bool,
    /// The unseen share beyond which to change over, and the one that led to the last change.
    limit: f64,
    share: f64,
    totals: Totals,
}

impl Merge {
    /// Nothing sampled yet.
    pub fn new(terms: RingTerms) -> Self {
        Self {
            terms,
            mode: Mode::Light,
            every: terms.chain_every,
            costs: VecDeque::with_capacity(COSTS),
            since_ns: 0,
            pending: VecDeque::new(),
            whose: VecDeque::new(),
            program: None,
            unseen: 0,
            owed: 0,
            paid_to_ns: 0,
            first: false,
            guest: 0,
            host: 0,
            full: 0,
            full_kernel: 0,
            ever_seen: false,
            limit: UNSEEN_LIMIT,
            share: 0.0,
            totals: Totals::default(),
        }
    }

    /// What became of the samples so far.
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Whether the host's ring has never shown the guest.
    pub fn is_blind(&self) -> bool {
        !self.terms.interpreted && !self.ever_seen && self.mode == Mode::Full
    }

    fn mode_at(&self, time_ns: u64) -> Mode {
        match (self.mode, time_ns >= self.since_ns) {
            (mode, true) => mode,
            (Mode::Light, false) => Mode::Full,
            (Mode::Full, false) => Mode::Light,
        }
    }

    /// A sample of the host's kernel. To be called for all of a drain before the full samples of the same
    /// time.
    pub fn light(&mut self, sample: GuestSample) {
        let time_ns = sample.time_ns.saturating_sub(self.terms.clock_offset_ns);
        let period = self.terms.period.unwrap_or(sample.period);
        match sample.side {
            Side::GuestUser | Side::GuestKernel => {
                self.guest += 1;
                self.ever_seen = true;
                if self.mode_at(time_ns) == Mode::Light && self.pending.len() < MOST_PENDING {
                    if time_ns <= self.paid_to_ns {
                        // It came after a full sample that is later.
                        self.owed = self.owed.saturating_sub_unsigned(period);
                    }
                    self.pending.push_back(Light {
                        time_ns,
                        ip: sample.ip,
                        user: sample.side == Side::GuestUser,
                        period,
                    });
                }
            }
            Side::HostKernel => {
                self.host += 1;
                if self.mode_at(time_ns) == Mode::Light {
                    if self.terms.interpreted {
                        self.unseen = self.unseen.saturating_add(period);
                    }
                    self.totals.host += 1;
                }
            }
            Side::HostUser => self.totals.host += u64::from(self.mode_at(time_ns) == Mode::Light),
        }
    }

    /// A full sample at privilege level `cpl` that stands for `period` events by itself. The events it is to
    /// stand for in the profile.
    pub fn full(&mut self, whose: Whose, cpl: u8, period: u64) -> u64 {
        self.full = self.full.saturating_add(1);
        self.full_kernel = self.full_kernel.saturating_add(u32::from(cpl != 3));
        // Rings are in order of time; a doubtful clock must not make a mess of it.
        if self.whose.back().is_none_or(|last| last.time_ns <= whose.time_ns) {
            self.whose.push_back(whose);
        }
        self.totals.full += 1;
        let hidden = self.terms.interpreted && cpl != 3;
        if self.mode_at(whose.time_ns) == Mode::Full {
            self.totals.instead += 1;
            // The change began a new period. The first sample stands for what was left of the long one too,
            // which light samples stand for already.
            let period = match (std::mem::take(&mut self.first), self.terms.period) {
                (true, Some(short)) => period.min(short.saturating_mul(u64::from(self.every))),
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
        self.pay_to(whose.time_ns);
        let replaced = self.take_nearest(whose.time_ns);
        if self.terms.interpreted {
            // What is not seen is the kernel's, and this is no sample of it.
            return replaced.map(|l| l.period).or(self.terms.period).unwrap_or(period);
        }
        self.owed = self.owed.saturating_add_unsigned(period);
        if let Some(light) = replaced
            && light.time_ns <= self.paid_to_ns
        {
            self.owed = self.owed.saturating_add_unsigned(light.period);
        }
        // The two kinds have timers of their own, so that a light sample more or less may lie between two
        // full ones.
        let share = replaced.map(|l| l.period).or(self.terms.period).unwrap_or(period);
        let weight = u64::try_from(self.owed).unwrap_or(0).max(share / 2).max(1);
        // Full samples that were lost for want of room must not make all later ones light.
        let least = 0i64.saturating_sub_unsigned(period.saturating_mul(2));
        self.owed = self.owed.saturating_sub_unsigned(weight).max(least);
        weight
    }

    /// Takes the light samples up to `time_ns` off what is owed.
    fn pay_to(&mut self, time_ns: u64) {
        let from = self.pending.partition_point(|l| l.time_ns <= self.paid_to_ns);
        let to = self.pending.partition_point(|l| l.time_ns <= time_ns);
        for light in self.pending.range(from..to.max(from)) {
            self.owed = self.owed.saturating_sub_unsigned(light.period);
        }
        self.paid_to_ns = self.paid_to_ns.max(time_ns);
    }

    fn take_nearest(&mut self, time_ns: u64) -> Option<Light> {
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

    /// Passes on the light samples whose task is known by now, with it.
    pub fn settle(&mut self, now_ns: u64, mut emit: impl FnMut(Light, Option<Whose>)) {
        let newest_ns = self.whose.back().map_or(0, |w| w.time_ns);
        let due = newest_ns.max(now_ns.saturating_sub(PATIENCE_NS));
        let passed_on = self.pending.partition_point(|l| l.time_ns <= due);
        if let Some(last) = passed_on.checked_sub(1).and_then(|at| self.pending.get(at)) {
            self.pay_to(last.time_ns);
        }
        while let Some(light) = self.pending.front().copied()
            && light.time_ns <= due
        {
            self.pending.pop_front();
            // The list ends with the first one after the sample, or with the last there is.
            while self.whose.len() > 1 && self.whose[1].time_ns <= light.time_ns {
                self.forget_first();
            }
            let mut before = self.whose.front().copied();
            let mut after = self.whose.get(1).copied();
            if light.ip >> 63 == 0 {
                // The upper half is the kernel's. If only threads of the kernel are known, it is one of them.
                let program = |w: &Whose| !w.kernel_thread;
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
                self.forget_first();
            }
        }
    }

    fn forget_first(&mut self) {
        if let Some(first) = self.whose.pop_front()
            && !first.kernel_thread
        {
            self.program = Some(first);
        }
    }

    /// A full sample held the vCPU for so long.
    pub fn cost(&mut self, held_ns: u32) {
        if held_ns > 0 {
            if self.costs.len() == COSTS {
                self.costs.pop_front();
            }
            self.costs.push_back(held_ns);
        }
    }

    /// One full sample for how many periods, so that they do not hold the vCPU for too much of its time.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the cast saturates, and the result is clamped"
    )]
    fn affordable(&self) -> u32 {
        let (least, most_held) = match self.mode {
            Mode::Light => (self.terms.chain_every, MOST_HELD),
            Mode::Full => (1, MOST_HELD_INSTEAD),
        };
        let Some(period_ns) = self.terms.adapt_to_ns else {
            return least;
        };
        let mut costs: Vec<u32> = self.costs.iter().copied().collect();
        costs.sort_unstable();
        let cost_ns = costs.get(costs.len() / 2).copied().unwrap_or(0);
        let every = f64::from(cost_ns) / (most_held * period_ns.max(1) as f64);
        // As much as a vCPU that is to have a few in ten seconds can do with.
        (every.ceil() as u32).clamp(least, least.max(2000))
    }

    /// Whether the VM is to take full samples at another rate from now on: one for so many.
    pub fn decide(&mut self, now_ns: u64) -> Option<u32> {
        let to = match self.mode {
            Mode::Light => self.shows_too_little().map(|little| little.then_some(Mode::Full)),
            Mode::Full => self.shows_enough().map(|enough| enough.then_some(Mode::Light)),
        };
        if to.is_some() {
            (self.guest, self.host, self.full, self.full_kernel) = (0, 0, 0, 0);
        }
        if let Some(mode) = to.flatten() {
            self.mode = mode;
            self.first = mode == Mode::Full;
            self.since_ns = now_ns;
            self.every = self.affordable();
            return Some(self.every);
        }
        let every = self.affordable();
        // Small changes are not worth a word to the VM.
        let differs = every.abs_diff(self.every) > self.every / 4;
        if self.costs.len() < COSTS || !differs {
            return None;
        }
        self.every = every;
        self.costs.clear();
        Some(every)
    }

    /// `None`: not enough seen to tell.
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
            // The light ones go on, only to be counted.
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
            // What was not seen then was no guest code.
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

    fn merge(interpreted: bool) -> Merge {
        Merge::new(RingTerms {
            period: Some(PERIOD),
            clock_offset_ns: 0,
            interpreted,
            chain_every: 20,
            adapt_to_ns: None,
        })
    }

    fn sample(time_ns: u64, side: Side) -> GuestSample {
        GuestSample {
            time_ns,
            side,
            ip: time_ns,
            period: 7,
        }
    }

    fn whose(time_ns: u64, pid: u32) -> Whose {
        Whose {
            time_ns,
            pid,
            tid: pid,
            cr3: 0,
            kernel_thread: false,
        }
    }

    fn settled(merge: &mut Merge, now_ns: u64) -> Vec<(u64, Option<u32>)> {
        let mut out = Vec::new();
        merge.settle(now_ns, |light, whose| {
            out.push((light.time_ns, whose.map(|w| w.pid)))
        });
        out
    }

    #[test]
    fn light_samples_get_the_task_that_is_nearest_in_time() {
        let mut m = merge(false);
        for t in [10, 40, 60, 90, 130] {
            m.light(sample(t, Side::GuestUser));
        }
        // Each takes the place of one light sample, and stands for what the others before it do not.
        assert_eq!(m.full(whose(39, 1), 3, 20 * PERIOD), 19 * PERIOD);
        assert_eq!(m.full(whose(91, 2), 3, 20 * PERIOD), 19 * PERIOD);
        assert_eq!(settled(&mut m, 100), [(10, Some(1)), (60, Some(1))]);
        // The last one waits for what comes after it.
        assert_eq!(m.full(whose(140, 3), 3, 20 * PERIOD), 20 * PERIOD);
        assert_eq!(settled(&mut m, 141), []);
        m.light(sample(150, Side::GuestUser));
        assert_eq!(settled(&mut m, 150 + PATIENCE_NS), [(150, Some(3))]);
    }

    /// A kernel thread was sampled nearest to them, but programs' addresses are a program's.
    #[test]
    fn programs_code_is_not_charged_to_a_thread_of_the_kernel() {
        let thread = |time_ns| Whose {
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
            ..sample(time_ns, Side::GuestKernel)
        };
        for t in [22, 90, 110] {
            m.light(sample(t, Side::GuestUser));
            m.light(kernel(t + 1));
        }
        let expected = [(22, 1), (23, 9), (90, 1), (91, 9), (110, 2), (111, 9)];
        assert_eq!(settled(&mut m, 201), expected.map(|(t, pid)| (t, Some(pid))));
        // Nothing but a thread of the kernel is known.
        let mut m = merge(false);
        m.full(thread(5), 0, PERIOD);
        m.light(sample(10, Side::GuestUser));
        assert_eq!(settled(&mut m, u64::MAX), [(10, Some(9))]);
    }

    #[test]
    fn without_any_full_sample_there_is_no_task() {
        let mut m = merge(false);
        m.light(sample(10, Side::GuestKernel));
        assert_eq!(settled(&mut m, 20), []);
        assert_eq!(settled(&mut m, u64::MAX), [(10, None)]);
    }

    /// A host that never shows the guest: every sample is taken full, and counts by itself.
    #[test]
    fn a_blind_ring_is_noticed_and_a_seeing_one_is_not() {
        let mut m = merge(false);
        for t in 0..WINDOW {
            m.light(sample(t, Side::HostKernel));
        }
        assert_eq!(m.decide(100), Some(1));
        assert!(m.is_blind());
        // Of the long period that the change cut short, the first one stands for its own part only.
        assert_eq!(m.full(whose(101, 1), 0, 13 * PERIOD), PERIOD);
        assert_eq!(m.full(whose(102, 1), 0, 2 * PERIOD), 2 * PERIOD);
        assert_eq!(m.decide(102), None);
        // It shows after all.
        m.light(sample(200, Side::GuestUser));
        assert_eq!(m.decide(201), Some(20));
        assert!(!m.is_blind());
        // A host that works for its guest now and then is no such host.
        for t in 300..300 + WORK_WINDOW {
            let work = t % 8 == 0;
            m.light(sample(t, if work { Side::HostKernel } else { Side::GuestUser }));
        }
        assert_eq!(m.decide(1000), None);
    }

    /// Where most of the time is KVM's work, a few full samples would stand for it: all are, until there is
    /// less of it.
    #[test]
    fn much_work_of_kvm_has_all_samples_taken_full() {
        let mut m = merge(false);
        let mut now = 0;
        let mut pass = |m: &mut Merge, one_in: u64| {
            for _ in 0..WORK_WINDOW {
                now += 1;
                let side = if now % one_in == 0 {
                    Side::HostKernel
                } else {
                    Side::GuestUser
                };
                m.light(sample(now, side));
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

    /// Full samples that hold the vCPU for long are taken less often, and more often again when they do not.
    #[test]
    fn dear_full_samples_become_rare() {
        let terms = RingTerms {
            adapt_to_ns: Some(1_000_000),
            ..merge(false).terms
        };
        let mut m = Merge::new(terms);
        m.light(sample(1, Side::GuestUser));
        let mut pass = |costs: [u32; COSTS]| {
            costs.into_iter().for_each(|ns| m.cost(ns));
            m.decide(2)
        };
        assert_eq!(pass([65_000; COSTS]), None, "20 of 65 µs a second are 0.3 %");
        assert_eq!(pass([250_000; COSTS]), Some(50));
        // One that had to wait for a processor is no reason.
        let mut waited = [250_000; COSTS];
        waited[3] = 50_000_000;
        assert_eq!(pass(waited), None);
        assert_eq!(pass([240_000; COSTS]), None);
        assert_eq!(pass([10_000; COSTS]), Some(20));
        assert_eq!(pass([u32::MAX; COSTS]), Some(2000));
        // Where the guest is not seen, all are full: one in so many as 3 % allow.
        let mut m = Merge::new(terms);
        (0..COSTS).for_each(|_| m.cost(250_000));
        (0..WINDOW).for_each(|t| m.light(sample(t, Side::HostKernel)));
        assert_eq!(m.decide(100), Some(9));
        // The user has said how many.
        let mut m = merge(false);
        (0..COSTS).for_each(|_| m.cost(250_000));
        assert_eq!(m.decide(2), None);
    }

    /// Where the guest's kernel is interpreted, time that is not seen is the kernel's.
    #[test]
    fn hidden_kernel_time_is_kept_and_then_sampled() {
        let mut m = merge(true);
        for t in 0..WINDOW {
            let side = if t % 2 == 0 {
                Side::HostKernel
            } else {
                Side::GuestUser
            };
            m.light(sample(t, side));
        }
        // Half of it was hidden, and the next sample of the kernel stands for it.
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

    /// A full sample for each 20 periods, and as many light ones as those leave: all weigh the same.
    #[test]
    fn samples_weigh_the_same_where_all_is_seen() {
        let mut m = merge(false);
        for t in 1..=2000u64 {
            m.light(sample(10 * t, Side::GuestUser));
            if t % 20 == 0 {
                assert_eq!(m.full(whose(10 * t + 1, 1), 3, 20 * PERIOD), PERIOD);
            }
        }
    }

    proptest! {
        /// However many light samples fall into the host's kernel or get lost, and in whatever order the
        /// rings are read: the weights add up to what the VM counted.
        #[test]
        fn weights_add_up_to_the_count(seen in prop::collection::vec(prop::bool::weighted(0.6), 400..2000), drain in 1usize..100) {
            let mut m = merge(false);
            let (mut count, mut weights) = (0u64, 0u64);
            for (at, batch) in seen.chunks(drain).enumerate() {
                let first = at * drain + 1;
                let times = first..first + batch.len();
                for (t, &guest) in times.clone().zip(batch) {
                    m.light(sample(10 * t as u64, if guest { Side::GuestKernel } else { Side::HostKernel }));
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

        /// Whatever comes: every light sample of the guest is passed on once or replaced by a full one, in
        /// order.
        #[test]
        fn nothing_is_lost_or_doubled(steps in prop::collection::vec((0u64..2000, 0u8..6), 0..300)) {
            let mut m = merge(false);
            m.ever_seen = true;
            let (mut now, mut guest, mut full, mut out) = (0, 0u64, 0u64, Vec::new());
            for (step, what) in steps {
                now += step;
                match what {
                    0..=2 => { m.light(sample(now, Side::GuestUser)); guest += 1; }
                    3 => m.light(sample(now, Side::HostKernel)),
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
