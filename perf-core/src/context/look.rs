//! Losing a place: an event that should count and does not.
//!
//! A pinned event fails when there is no slot for it, when its driver refuses to start it, or when the host
//! takes away the counter it was on, which the kernel tells nobody: the event reads as end of file from then
//! on. So what is on is looked at now and then ([`crate::VcpuContext::look`], and each [`crate::Core::tick`]
//! that comes long enough after the last look), and whenever it is read. An event that takes turns waits for
//! the next turn instead of failing.
//!
//! Who enabled the event learns of it by [`crate::VcpuContext::errors`], one load, and asks
//! [`crate::Handle::failure`].

use smallvec::SmallVec;

use crate::context::Context;
use crate::model::event::Source;
use crate::model::failure::FailureCause;
use crate::model::keys::EventKey;
use crate::model::state::State;

/// Least time between two looks of ticks: a look is a system call for each hardware event that is on.
const LOOK_EVERY_NS: u64 = 20_000_000;

impl Context {
    /// Asks the drivers whether what is on in the pools counts. One system call for each event at most.
    pub fn look(&mut self, now_ns: u64) {
        if !self.clock.is_active() {
            return;
        }
        self.looked_ns = now_ns;
        let mut gone: SmallVec<[EventKey; 4]> = SmallVec::new();
        for pool in self.pools.iter() {
            for &group in &pool.on {
                for &key in &self.groups[group].members {
                    let event = &mut self.events[key];
                    if event.state == State::Active
                        && let Source::Driver(driver) = &mut event.source
                    {
                        driver.look();
                        if driver.lost_ns().is_some() {
                            gone.push(key);
                        }
                    }
                }
            }
        }
        for key in gone {
            self.notice(key, now_ns);
        }
    }

    /// [`Context::look`], unless the last one was a moment ago.
    pub fn look_now_and_then(&mut self, now_ns: u64) {
        if now_ns.saturating_sub(self.looked_ns) >= LOOK_EVERY_NS {
            self.look(now_ns);
        }
    }

    /// Takes an event off whose driver has found that the host took its counter. To be called after a read;
    /// cheap when all is well.
    #[inline]
    pub fn notice(&mut self, key: EventKey, now_ns: u64) {
        let event = &self.events[key];
        let Source::Driver(driver) = &event.source else {
            return;
        };
        let Some(lost_ns) = driver.lost_ns().filter(|_| event.state == State::Active) else {
            return;
        };
        let time = self.clock.advance(now_ns);
        let event = &self.events[key];
        let since_ns = time.saturating_sub(lost_ns).max(event.on_since_ns);
        let group = event.group;
        self.take_off(group, now_ns);
        // It was on in name only since then.
        self.events[key].times.go_off(since_ns);
        self.cannot_be_on(group, FailureCause::Taken, since_ns, now_ns);
    }
}
