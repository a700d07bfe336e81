//! The part of the model that checks slot assignments: the model adopts the assignment that it
//! observes in the core, and checks it against the scheduling rules.

use super::{EventState, Model};

impl Model {
    /// Ends the multiplexing interval in all contexts.
    pub fn rotate(&mut self) {
        for ctx in 1..self.contexts.len() {
            if self.contexts[ctx].inside && self.contexts[ctx].turned_ns < self.now {
                self.contexts[ctx].turned_ns = self.now;
                self.turned.push(ctx);
            }
        }
    }

    /// Adopts the set of active flexible hardware groups that the core reports. Returns an error if
    /// this set is impossible.
    pub fn observe(&mut self, is_on: &dyn Fn(&Self, usize) -> bool) -> Result<(), String> {
        for ctx in 1..self.contexts.len() {
            let had: Vec<(usize, u64)> = self
                .lines(ctx, 3..5)
                .into_iter()
                .filter(|l| self.is_on(*l))
                .map(|l| (l, self.parts[l].on_since))
                .collect();
            let hopeless_before = self.hopeless(ctx);
            let (mut went, mut came) = (had.clone(), Vec::new());
            for leader in self.lines(ctx, 3..5) {
                let group = self.group(leader);
                let may: Vec<usize> = group
                    .iter()
                    .copied()
                    .filter(|p| self.parts[*p].state >= EventState::Waiting)
                    .collect();
                let on = may.iter().filter(|p| is_on(self, **p)).count();
                if on != 0 && on != may.len() {
                    return Err(format!("part of group {} is on", self.parts[leader].event));
                }
                if on == 0 {
                    continue;
                }
                if !self.contexts[ctx].inside {
                    return Err(format!(
                        "group {} is on while its vCPU is out",
                        self.parts[leader].event
                    ));
                }
                went.retain(|(l, _)| *l != leader);
                if !self.is_on(leader) {
                    came.push(leader);
                }
                self.group_on(leader);
            }
            went.sort_by_key(|(_, since)| *since);
            // Notes the queue positions of the newly started groups before the stopped groups are
            // queued again.
            let line = |l: &usize| (*l, (self.parts[*l].line, self.parts[*l].excused));
            let came_from: Vec<_> = came.iter().map(line).collect();
            for (leader, _) in &went {
                self.group_off(*leader);
                self.in_line(*leader);
            }
            self.contexts[ctx].stalled = match (went.is_empty(), self.turned.contains(&ctx), came.is_empty())
            {
                (false, false, _) => true,
                (true, false, true) => self.contexts[ctx].stalled,
                _ => false,
            };
            came.sort_by_key(|l| self.parts[*l].line);
            for leader in came {
                self.parts[leader].on_since = self.stamp();
            }
            for leader in hopeless_before.into_iter().chain(self.hopeless(ctx)) {
                self.parts[leader].excused = true;
            }
            if self.contexts[ctx].inside {
                self.judge(ctx, &had, &came_from)?;
            }
        }
        self.turned.clear();
        Ok(())
    }

    /// Returns the flexible groups that do not fit together with the pinned groups alone.
    fn hopeless(&self, ctx: usize) -> Vec<usize> {
        let mut always = SlotUsage::default();
        for leader in self.lines(ctx, 0..3) {
            let _ = always.take(self, leader);
        }
        let mut flexible = self.lines(ctx, 3..5);
        flexible.retain(|l| {
            let exclusive = self.spec(*l).exclusive && always.used > 0;
            exclusive || (self.needs(*l) > 0 && !always.clone().take(self, *l))
        });
        flexible
    }

    /// Checks the scheduling rules: the active groups fit together, no group waits that could be
    /// active, no group is overtaken, and the end of an interval stops the group that was active
    /// longest.
    fn judge(&self, ctx: usize, had: &[(usize, u64)], came: &[(usize, (u64, bool))]) -> Result<(), String> {
        let name = |l: usize| self.parts[l].event;
        let hopeless = self.hopeless(ctx);
        let mut room = SlotUsage::default();
        for leader in self.lines(ctx, 0..5) {
            if self.is_on(leader) && self.needs(leader) > 0 && !room.take(self, leader) {
                return Err(format!("group {} is on and has no room", name(leader)));
            }
        }
        let mut room = SlotUsage::default();
        for leader in self.lines(ctx, 0..3) {
            let _ = room.take(self, leader);
        }
        // Starts with all active flexible groups, because either flexible class may precede the
        // other.
        for leader in self.lines(ctx, 3..5).into_iter().filter(|l| self.is_on(*l)) {
            let _ = room.take(self, leader);
        }
        for class in 3..5 {
            let line = self.lines(ctx, class..class + 1);
            let waits: Vec<usize> = line.iter().copied().filter(|l| !self.is_on(*l)).collect();
            let waits: Vec<usize> = waits.into_iter().filter(|l| !hopeless.contains(l)).collect();
            let stalled = self.contexts[ctx].stalled;
            if !stalled && !waits.is_empty() && waits.iter().all(|l| room.clone().take(self, *l)) {
                return Err(format!("group {} waits and there is room", name(waits[0])));
            }
            let first = waits.iter().copied().find(|l| !self.parts[*l].excused);
            let certain = waits.iter().all(|l| !self.parts[*l].excused);
            if let Some(first) = first.filter(|_| certain && !stalled)
                && room.clone().take(self, first)
            {
                return Err(format!(
                    "group {} is first in line and there is room",
                    name(first)
                ));
            }
            for (leader, (line, excused)) in came {
                if self.class(*leader) == class && !excused {
                    let overtaken = waits
                        .iter()
                        .find(|w| !self.parts[**w].excused && self.parts[**w].line < *line);
                    if let Some(overtaken) = overtaken {
                        return Err(format!("group {} overtook {}", name(*leader), name(*overtaken)));
                    }
                }
            }
            let oldest = had
                .iter()
                .filter(|(l, _)| line.contains(l))
                .min_by_key(|(_, since)| *since);
            if self.turned.contains(&ctx)
                && let Some((oldest, since)) = oldest
                && self.is_on(*oldest)
                && self.parts[*oldest].on_since == *since
                && waits
                    .iter()
                    .filter(|l| !had.iter().any(|(h, _)| h == *l))
                    .any(|l| !self.parts[*l].excused && !came.iter().any(|(c, _)| c == l))
            {
                return Err(format!(
                    "group {} keeps its slot when its turn is over",
                    name(*oldest)
                ));
            }
        }
        Ok(())
    }
}

/// The slots that are used by the groups considered so far.
#[derive(Clone, Default)]
pub(super) struct SlotUsage {
    used: usize,
    of_vcpus: usize,
    exclusive: bool,
}

impl SlotUsage {
    pub(super) fn take(&mut self, model: &Model, leader: usize) -> bool {
        let (needs, spec) = (model.needs(leader), model.spec(leader));
        let of_vcpu = if spec.vcpu.is_some() { needs } else { 0 };
        let alone = self.exclusive || (spec.exclusive && self.used > 0);
        let fits = !alone
            && self.used + needs <= model.setup.slots
            && self.of_vcpus + of_vcpu <= model.setup.slots - model.setup.reserved;
        if fits {
            self.used += needs;
            self.of_vcpus += of_vcpu;
            self.exclusive |= spec.exclusive && needs > 0;
        }
        fits
    }
}
