//! The part of the model that predicts times and counts: elapsed time, raised events, overflows and
//! their samples.

use super::{EventState, Model, OracleEventInContext, OracleKind, OverflowCounts, PendingOverflows, VM};

/// An expected record in an event's ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingRecord {
    Sample {
        period: u64,
    },
    Throttle,
    Unthrottle,
    /// One lost sample, for an overflow that was not serviced before its vCPU was removed.
    Lost,
    /// Final count and times of a child whose vCPU was removed.
    Read {
        value: u64,
        enabled: u64,
        running: u64,
    },
}

impl Model {
    /// Lets `ns` nanoseconds pass, in which thread `tid` performs `ns` units of work.
    pub fn run(&mut self, tid: i32, ns: u64) {
        self.now += ns;
        for p in 0..self.parts.len() {
            let leader = self.parts[self.leader(p)].state;
            let rate = self.spec(p).rate;
            let ctx = &self.contexts[self.parts[p].ctx];
            let part = &mut self.parts[p];
            if ctx.inside && part.state >= EventState::Waiting && leader >= EventState::Waiting {
                part.totals.enabled += ns;
                if part.state == EventState::On {
                    part.totals.running += ns;
                }
            }
            if part.counter.is_some() && part.state == EventState::On && ctx.tid == tid {
                part.count(ns * rate);
            }
        }
    }

    /// Raises software event `id` `n` times on vCPU `vcpu`.
    pub fn raise(&mut self, vcpu: u32, id: u64, n: u64, with_regs: bool) -> OverflowCounts {
        let mut reports = OverflowCounts::default();
        let own = self.at[&vcpu];
        for p in 0..self.parts.len() {
            let (ctx, state) = (self.parts[p].ctx, self.parts[p].state);
            let spec = self.spec(p).clone();
            if spec.kind != OracleKind::Raised(id)
                || (ctx != VM && ctx != own)
                || (with_regs && spec.not_kernel)
            {
                continue;
            }
            let leader = self.parts[self.leader(p)].state;
            let waits_with_its_vcpu =
                state == EventState::Waiting && !self.contexts[ctx].inside && leader >= EventState::Waiting;
            if state != EventState::On && !waits_with_its_vcpu {
                continue;
            }
            let part = &mut self.parts[p];
            part.totals.value += n;
            if part.period == 0 {
                continue;
            }
            if !with_regs && !spec.cookie {
                part.position += n;
                continue;
            }
            // Counts the raised events one by one.
            let mut points = Vec::new();
            for _ in 0..n {
                part.position += 1;
                part.to_go -= 1;
                if part.to_go == 0 {
                    points.push(part.position);
                    part.to_go = part.period;
                }
            }
            let has_samples = with_regs && !part.throttled;
            let name = part.event;
            let mut reported = 0;
            let mut last = false;
            for (i, at) in points.iter().enumerate().filter(|_| has_samples) {
                let outcome = self.one_overflow(p, *at, 1, i > 0);
                reported += 1;
                last = outcome == OverflowOutcome::Last;
                if outcome.ends() {
                    break;
                }
            }
            if spec.cookie && !points.is_empty() {
                if !last {
                    reported += self.count_rest(p, points.len() as u64 - reported);
                }
                *reports.0.entry(name).or_default() += reported;
            }
        }
        reports
    }

    /// Subtracts `times` overflows, which have no samples, from the overflow limit of part `p`.
    /// Returns the number of overflows that the limit allows.
    fn count_rest(&mut self, p: usize, times: u64) -> u64 {
        let part = &mut self.parts[p];
        if part.limit == 0 {
            return times;
        }
        let counted = times.min(part.limit);
        part.limit -= counted;
        if part.limit == 0 {
            self.disable(p);
        }
        counted
    }

    /// Services all pending overflows of vCPU `n`. Returns the overflow reports.
    pub fn service(&mut self, n: u32) -> OverflowCounts {
        let ctx = self.at[&n];
        let mut reports = OverflowCounts::default();
        loop {
            let here = |p: &usize| self.parts[*p].ctx == ctx;
            let parts = || (0..self.parts.len()).filter(here);
            let apart = parts().find(|p| self.parts[*p].apart);
            let due = parts().find(|p| {
                let part = &self.parts[*p];
                part.state == EventState::On && part.kept.times + part.fresh.times > 0
            });
            let Some(p) = apart.or(due) else {
                return reports;
            };
            let part = &mut self.parts[p];
            if !part.apart {
                part.keep();
            }
            part.apart = false;
            let PendingOverflows { times, at } = std::mem::take(&mut part.kept);
            let counted = match part.limit {
                0 => times,
                limit => times.min(limit),
            };
            let name = part.event;
            let _ = self.one_overflow(p, at, times, true);
            if self.spec(p).cookie {
                *reports.0.entry(name).or_default() += counted;
            }
        }
    }

    /// Adds the expected sample of part `p` for `times` overflows, of which the last one is at
    /// position `at`.
    fn one_overflow(&mut self, p: usize, at: u64, times: u64, may_throttle: bool) -> OverflowOutcome {
        let tick = self.contexts[self.parts[p].ctx].ticks;
        let (now, setup, guest) = (self.now, self.setup, self.spec(p).guest);
        let part = &mut self.parts[p];
        let period = at - part.covered;
        part.covered = at;
        let last = part.limit > 0 && part.limit <= times;
        part.limit = part.limit.saturating_sub(times);
        let mut over = part.throttled;
        if !over {
            if now - part.window_ns >= setup.tick_ns || part.window_tick != tick {
                (part.window_ns, part.window_tick, part.interrupts) = (now, tick, 0);
            }
            part.interrupts += 1;
            over = part.interrupts > setup.per_tick;
        }
        let throttle = over && may_throttle && !guest;
        let begins = throttle && !part.throttled;
        let name = part.event;
        let records = &mut self.events.get_mut(&name).expect("it is open").records;
        if begins {
            records.push(RingRecord::Throttle);
        }
        records.push(RingRecord::Sample { period });
        if last {
            self.disable(p);
            // Drops overflows beyond the limit.
            let part = &mut self.parts[p];
            (part.kept, part.fresh, part.apart) =
                (PendingOverflows::default(), PendingOverflows::default(), false);
            part.throttled |= throttle;
            return OverflowOutcome::Last;
        }
        if throttle {
            self.parts[p].keep();
            self.parts[p].throttled = true;
            return OverflowOutcome::Throttled;
        }
        OverflowOutcome::GoesOn
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum OverflowOutcome {
    GoesOn,
    Throttled,
    Last,
}

impl OverflowOutcome {
    fn ends(self) -> bool {
        self != Self::GoesOn
    }
}

impl OracleEventInContext {
    fn count(&mut self, n: u64) {
        self.totals.value += n;
        let end = self.position + n;
        if self.period > 0 && !self.throttled {
            while self.position + self.to_go <= end {
                self.position += self.to_go;
                self.to_go = self.period;
                self.fresh.times += 1;
                self.fresh.at = self.position;
            }
            self.to_go -= end - self.position;
        }
        self.position = end;
    }

    /// Adds the overflows in `fresh` to the older overflows in `kept`.
    pub(super) fn keep(&mut self) {
        let fresh = std::mem::take(&mut self.fresh);
        if fresh.times > 0 {
            self.kept.times += fresh.times;
            self.kept.at = fresh.at;
        }
    }
}
