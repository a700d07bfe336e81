//! Raised events: what the VMM itself sees happen to a vCPU.

use crate::context::{Context, Pass};
use crate::model::event::{Event, Source};
use crate::model::regs::Wants;
use crate::model::software::{Deferred, SoftwareId};
use crate::model::state::State;
use crate::record::CpuMode;

impl Event {
    /// Whether a raised event is counted. Off and in error: no. Waiting counts only while the whole context
    /// waits, which is what happens to a vCPU that is off its CPU, and only if the group would be on with
    /// it.
    fn takes(&self, leader: State, context_active: bool, mode: Option<CpuMode>) -> bool {
        let counting = match self.state {
            State::Active => true,
            State::Inactive => !context_active && leader >= State::Inactive,
            State::Off | State::Error => false,
        };
        let attr = &self.shared.attr;
        counting
            && match mode {
                None => true,
                Some(CpuMode::GuestUser | CpuMode::User) => !attr.exclude_user,
                Some(CpuMode::GuestKernel | CpuMode::Kernel) => !attr.exclude_kernel,
                Some(CpuMode::Hypervisor) => !attr.exclude_hv,
                Some(CpuMode::Unknown) => true,
            }
    }
}

impl Context {
    /// What samples want of the registers if `n` events `id` are raised now.
    pub fn wants_of_raise(&self, id: SoftwareId, n: u64, mode: CpuMode) -> Wants {
        let mut wants = Wants::default();
        let active = self.clock.is_active();
        for &key in &self.raised[id as usize] {
            let event = &self.events[key];
            if let Source::Raised(count) = event.source
                && event.output.is_some()
                && event.takes(self.leader_state(key), active, Some(mode))
                && event.sampling.is_due(count.wrapping_add(n))
            {
                wants.add(&event.shared.attr);
            }
        }
        wants
    }

    /// `n` events `id` were raised in `mode`, which is known if there are registers.
    pub fn raise(&mut self, pass: &mut Pass<'_>, id: SoftwareId, n: u64, mode: Option<CpuMode>) {
        let active = self.clock.is_active();
        for at in 0..self.raised[id as usize].len() {
            let key = self.raised[id as usize][at];
            let leader = self.leader_state(key);
            let event = &mut self.events[key];
            if !event.takes(leader, active, mode) {
                continue;
            }
            let Source::Raised(count) = &mut event.source else {
                continue;
            };
            *count = count.wrapping_add(n);
            let count = *count;
            if !event.sampling.is_on() {
                continue;
            }
            // Without registers there is nothing to sample; a count for the guest overflows all the same.
            if pass.seen.is_none() && event.shared.cookie.is_none() {
                event.sampling.skip(n);
                continue;
            }
            let passed = event.sampling.passed(count);
            if passed > 0 {
                self.raised_overflow(pass, key, u64::from(passed));
            }
        }
    }

    /// Counts what was raised while the lock was taken. The registers of that moment are gone, so nothing is
    /// sampled.
    pub fn take_deferred(&mut self, deferred: &Deferred) {
        deferred.take(|id, n| {
            let active = self.clock.is_active();
            for at in 0..self.raised[id as usize].len() {
                let key = self.raised[id as usize][at];
                let leader = self.leader_state(key);
                let event = &mut self.events[key];
                if !event.takes(leader, active, None) {
                    continue;
                }
                let Source::Raised(count) = &mut event.source else {
                    continue;
                };
                *count = count.wrapping_add(n);
                let count = *count;
                if event.shared.cookie.is_none() {
                    event.sampling.skip(n);
                } else if event.sampling.is_on() {
                    let passed = event.sampling.passed(count);
                    event.sampling.pending = event.sampling.pending.saturating_add(passed);
                    if passed > 0 {
                        self.put_by(key);
                    }
                }
            }
        });
    }
}
