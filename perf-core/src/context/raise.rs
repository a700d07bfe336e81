//! Software events that the VMM raises in a context.

use crate::context::{Context, ServicePass};
use crate::model::event::{Event, Source};
use crate::model::regs::RegsRequest;
use crate::model::software::{DeferredEvents, SoftwareEventId};
use crate::model::state::EventState;
use crate::record::CpuMode;

/// Maximum number of counts that one step of a raise adds to an event: a quarter of 2^63, so that
/// signed differences of counts do not overflow.
const RAISED_MAX: u64 = 1 << 61;

impl Event {
    /// Returns `true` if this event counts a software event that is raised in CPU mode `mode`.
    ///
    /// An active event counts. While the context is scheduled out, as for a vCPU thread that is off
    /// its CPU, an inactive event counts too, unless its leader is off or in the error state. All
    /// other events, and events that exclude `mode`, do not count.
    fn takes(&self, leader: EventState, context_active: bool, mode: Option<CpuMode>) -> bool {
        let counting = match self.state {
            EventState::Active => true,
            EventState::Inactive => !context_active && leader >= EventState::Inactive,
            EventState::Off | EventState::Error => false,
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
    /// Returns the register data that the samples need if event `id` is now raised `n` times.
    pub fn raise_regs_request(&self, id: SoftwareEventId, n: u64, mode: CpuMode) -> RegsRequest {
        let mut wants = RegsRequest::default();
        let active = self.clock.is_active();
        for &key in &self.raised[id as usize] {
            let event = &self.events[key];
            if let Source::Raised(count) = event.source
                && event.output.is_some()
                && event.takes(self.leader_state(key), active, Some(mode))
                && event.sampling.is_due(count.wrapping_add(n.min(RAISED_MAX)))
            {
                wants.add(&event.shared.attr);
                // Samples of raised events do not wait for their branch stacks.
                wants.without_branches = true;
            }
        }
        wants
    }

    /// Raises software event `id` `n` times in CPU mode `mode`. `None` means that the mode is
    /// unknown.
    pub fn raise(&mut self, pass: &mut ServicePass<'_>, id: SoftwareEventId, n: u64, mode: Option<CpuMode>) {
        if n > RAISED_MAX {
            self.raise(pass, id, RAISED_MAX, mode);
            return self.raise(pass, id, n - RAISED_MAX, mode);
        }
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
            if !event.sampling.can_overflow() {
                continue;
            }
            // Without registers no sample can be taken, so the next overflow is delayed. The
            // exception is an event with a cookie, whose overflows are reported to the VMM without
            // a sample.
            if pass.regs.is_none() && event.shared.cookie.is_none() {
                event.sampling.skip(n);
                continue;
            }
            let passed = event.sampling.passed(count);
            if passed > 0 {
                self.raised_overflow(pass, key, u64::from(passed));
            }
        }
    }

    /// Counts the software events that were raised while the context lock was held. Writes no
    /// samples of these events, because the registers at that time are no longer available.
    pub fn take_deferred(&mut self, deferred: &DeferredEvents) {
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
                } else if event.sampling.can_overflow() {
                    let passed = event.sampling.passed(count);
                    event.sampling.pending = event.sampling.pending.saturating_add(passed);
                    if passed > 0 {
                        self.queue_pending(key);
                    }
                }
            }
        });
    }
}
