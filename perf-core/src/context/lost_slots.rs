//! Detection of active events that have lost their hardware counter.
//!
//! A pinned event fails if no slot is available, if its driver cannot start it, or if the host
//! takes its counter away. The kernel reports a counter that was taken away only as an end of file
//! on the next read. Active events are therefore checked whenever they are read, and periodically
//! with a rate limit ([`crate::VcpuEventContext::check_lost_counters`] and
//! [`crate::PerfCore::tick`]). A multiplexed event waits for the next rotation instead of failing.
//!
//! The owner of an event detects a failure with [`crate::VcpuEventContext::errors`], which costs
//! one load, and reads the cause with [`crate::EventHandle::failure`].

use smallvec::SmallVec;

use crate::context::Context;
use crate::model::event::Source;
use crate::model::failure::PinnedEventFailureCause;
use crate::model::keys::EventKey;
use crate::model::state::EventState;

/// Minimum time between two periodic checks of a context for lost counters, in nanoseconds. A check
/// costs one system call per active hardware event.
const LOOK_INTERVAL_NS: u64 = 20_000_000;

impl Context {
    /// Checks whether the active hardware events still hold their counters. Takes at most one
    /// system call per event.
    pub fn check_lost_slots(&mut self, now_ns: u64) {
        if !self.clock.is_active() {
            return;
        }
        self.looked_ns = now_ns;
        let mut gone: SmallVec<[EventKey; 4]> = SmallVec::new();
        for pool in self.pools.iter() {
            for &group in &pool.active {
                for &key in &self.groups[group].members {
                    let event = &mut self.events[key];
                    if event.state == EventState::Active
                        && let Source::Driver(driver) = &mut event.source
                    {
                        driver.check_counter();
                        if driver.lost_ns().is_some() {
                            gone.push(key);
                        }
                    }
                }
            }
        }
        for key in gone {
            self.handle_lost_slot(key, now_ns);
        }
    }

    /// Performs [`Context::check_lost_slots`], unless the last check was less than
    /// [`LOOK_INTERVAL_NS`] ago.
    pub fn look_periodically(&mut self, now_ns: u64) {
        if now_ns.saturating_sub(self.looked_ns) >= LOOK_INTERVAL_NS {
            self.check_lost_slots(now_ns);
        }
    }

    /// Schedules out the group of an active event if the driver has detected that the host took the
    /// event's counter away. Call this method after a read of the event. Cheap if the event still
    /// has its counter.
    #[inline]
    pub fn handle_lost_slot(&mut self, key: EventKey, now_ns: u64) {
        let event = &self.events[key];
        let Source::Driver(driver) = &event.source else {
            return;
        };
        let Some(lost_ns) = driver.lost_ns().filter(|_| event.state == EventState::Active) else {
            return;
        };
        let time = self.clock.advance(now_ns);
        let event = &self.events[key];
        let since_ns = time.saturating_sub(lost_ns).max(event.on_since_ns);
        let group = event.group;
        self.sched_out_group(group, now_ns);
        // The event has not counted since `since_ns`, although its state was active.
        self.events[key].times.sched_out(since_ns);
        self.handle_unschedulable(group, PinnedEventFailureCause::Taken, since_ns, now_ns);
    }
}
