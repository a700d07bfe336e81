//! Losing a place: an event that should count and does not.
//!
//! A pinned event fails when there is no slot for it, when its driver refuses to start it, or when the host
//! takes away the counter it was on, which the kernel tells nobody: the event reads as end of file from then
//! on. So what is on is looked at now and then ([`crate::VcpuContext::look`], and each [`crate::Core::tick`]
//! that comes long enough after the last look), and whenever it is read. An event that takes turns waits for
//! the next turn instead of failing.
//!
//! Who enabled the event learns of it by [`crate::VcpuContext::errors`], one load, and asks
//! [`Handle::failure`].

use std::fmt;
use std::io;

use smallvec::SmallVec;

use crate::context::Context;
use crate::event::{Source, State};
use crate::handle::Handle;
use crate::open::pmu_errno;
use crate::pmu::PmuError;

/// Least time between two looks of ticks: a look is a system call for each hardware event that is on.
const LOOK_EVERY_NS: u64 = 20_000_000;

/// Why a pinned event does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FailureCause {
    /// Others have the slots.
    NoSlot,
    /// The host has no counter for it now.
    Busy,
    /// The host took away the counter it was on.
    Taken,
    /// The driver refused to start it, with this error number.
    Refused(i32),
}

impl FailureCause {
    pub(crate) fn of(error: &PmuError) -> Self {
        match error {
            PmuError::Busy => Self::Busy,
            _ => Self::Refused(pmu_errno(error)),
        }
    }
}

impl fmt::Display for FailureCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSlot => {
                f.write_str("other events have all the host's counters that there are for this vCPU")
            }
            Self::Busy => f.write_str("the host has no counter free for it"),
            Self::Taken => f.write_str("the host took its counter away"),
            Self::Refused(errno) => write!(f, "{}", io::Error::from_raw_os_error(*errno)),
        }
    }
}

/// A pinned event in the error state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Since when it does not count, in the time of its context ([`crate::VcpuContext::time_ns`]).
    pub since_ns: u64,
    /// Why.
    pub cause: FailureCause,
}

impl Handle {
    /// Why the event is in the error state and since when; `None` while it is not.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        let event = &self.inner.event;
        let mut context = event.cell.lock();
        let event = context.get(event.key, &event.shared)?;
        event.failure.filter(|_| event.state == State::Error)
    }
}

impl Context {
    /// Asks the drivers whether what is on in the pools counts. One system call for each event at most.
    pub fn look(&mut self, now_ns: u64) {
        if !self.clock.is_active() {
            return;
        }
        self.looked_ns = now_ns;
        let mut gone: SmallVec<[usize; 4]> = SmallVec::new();
        for pool in &self.pools {
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
    pub fn notice(&mut self, key: usize, now_ns: u64) {
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
