//! Rings of events: mapping, output redirection and polling.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::api::handle::EventHandle;
use crate::model::output::Output;
use crate::notify::PollState;
use crate::ring::{PAGE_SIZE, Ring, RingFullPolicy};
use crate::service::core::PerfCore;
use crate::service::error::{PerfEventControlError, RingMapError};

impl PerfCore {
    /// Returns the number of pages of ring memory that are currently charged to user `uid`.
    #[must_use]
    pub fn ring_pages(&self, uid: u32) -> u64 {
        self.inner.locked.pages_of(uid)
    }
}

impl EventHandle {
    /// Attaches a ring with one control page and `data_pages` data pages (0 or a power of two) to
    /// the event, and returns the ring. Repeated calls with the same size return the same ring.
    ///
    /// With `writable`, the reader advances `data_tail`, and records that do not fit in the ring
    /// are dropped and reported as lost. Without `writable`, new records overwrite the oldest ones,
    /// as in a flight recorder. To read the newest records, pause the output
    /// ([`EventHandle::pause_output`]) and create a new [`crate::ring::RingReader`]. The first call
    /// determines the mode.
    ///
    /// The memory is charged to the session's user as long as the ring is referenced, for example
    /// by a client that holds its memfd.
    ///
    /// # Errors
    ///
    /// Returns a [`RingMapError`] if the ring cannot be attached. A failed call has no effect.
    pub fn map(&self, data_pages: usize, writable: bool) -> Result<Arc<Ring>, RingMapError> {
        let event = &self.inner.event;
        let core = &self.inner.core;
        let _topology = core.topology();
        if event.cell.lock().get(event.key, &event.shared).is_none() {
            return Err(RingMapError::Closed);
        }
        {
            let mut state = event.output_state();
            if state.redirect.is_some() {
                return Err(RingMapError::Redirected);
            }
            if let Some(own) = state.own.clone() {
                let mapped = own.ring.data_size() / PAGE_SIZE;
                if mapped != data_pages {
                    return Err(RingMapError::OtherSize {
                        mapped,
                        asked: data_pages,
                    });
                }
                state.mappings += 1;
                return Ok(Arc::clone(&own.ring));
            }
        }
        let user = self.inner.user;
        let limit = (!user.is_admin())
            .then(|| core.limits.ring_pages_limit(&core.config))
            .flatten();
        let pages = u64::try_from(data_pages).unwrap_or(u64::MAX).saturating_add(1);
        let mut charge = core.locked.charge(user.uid, pages, limit)?;
        let mode = if writable {
            RingFullPolicy::Writable
        } else {
            RingFullPolicy::Overwrite
        };
        let ring = Arc::new(Ring::new(data_pages, mode)?);
        ring.set_wakeup(event.shared.attr.wakeup);
        ring.set_lost_id(event.shared.id);
        if limit.is_some() {
            charge.watch = ring
                .watch()
                .inspect_err(|e| {
                    log::debug!("a client that keeps a ring's memory will not be charged for it: {e}")
                })
                .ok();
        }
        ring.attach_charge(Box::new(charge));
        {
            let mut state = event.output_state();
            state.own = Some(Arc::new(Output {
                ring: Arc::clone(&ring),
                owner: event.shared.id,
            }));
            state.mappings = 1;
        }
        event.propagate_output();
        Ok(ring)
    }

    /// Reverts one call of [`EventHandle::map`]. The ring is detached from the event when all calls
    /// are reverted. Readers of the ring then receive no further records. Returns `false` if there
    /// was no call to revert.
    pub fn unmap(&self) -> bool {
        let event = &self.inner.event;
        let _topology = self.inner.core.topology();
        {
            let mut state = event.output_state();
            if state.mappings == 0 {
                return false;
            }
            state.mappings -= 1;
            if state.mappings > 0 {
                return true;
            }
            state.own = None;
        }
        event.propagate_output();
        true
    }

    /// Redirects the records of this event to the ring of `target`. With `None`, the event writes
    /// to its own ring again.
    ///
    /// Redirections cannot be chained: the target must not be redirected, and no other event may
    /// write to this event's ring. An event with its own ring cannot be redirected. If `target` is
    /// closed, the events that write to its ring continue to write there, and count as redirected
    /// until they are redirected elsewhere.
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventControlError::Invalid`] if the redirection is not allowed, and
    /// [`PerfEventControlError::Closed`] if an event is closed.
    pub fn set_output(&self, target: Option<&EventHandle>) -> Result<(), PerfEventControlError> {
        let _topology = self.inner.core.topology();
        let event = &self.inner.event;
        event
            .cell
            .lock()
            .get(event.key, &event.shared)
            .ok_or(PerfEventControlError::Closed)?;
        event.set_output(target.map(|t| &t.inner.event))
    }

    /// Pauses or resumes output to the ring of the event (`PERF_EVENT_IOC_PAUSE_OUTPUT`). The event
    /// continues to count. While the ring is paused, the records of all events that write to it are
    /// counted as lost.
    ///
    #[cfg_attr(feature = "sim", doc = "```")]
    #[cfg_attr(not(feature = "sim"), doc = "```ignore")]
    /// # use std::sync::Arc;
    /// # use perf_core::{pmu::sim::SimPmu, *};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let core = PerfCore::builder().driver(Arc::new(SimPmu::with_slots(4))).build()?;
    /// # core.add_vcpu(VcpuId(0), 1)?;
    /// # let session = core.session(0, SessionRole::Admin);
    /// # let (target, flags) = (EventOpenTarget::Vcpu(VcpuId(0)), OpenFlags::default());
    /// let attr = Attr::sampling(EventType::SIM, 1, 100);
    /// let event = core.open(&session, attr, target, None, flags)?;
    /// assert!(event.pause_output(true).is_err(), "it has no ring");
    /// let ring = event.map(4, false)?; // the oldest records are overwritten
    /// event.pause_output(true)?;
    /// // ... the content of the ring does not change while it is read ...
    /// event.pause_output(false)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventControlError::Invalid`] if the event writes to no ring.
    pub fn pause_output(&self, on: bool) -> Result<(), PerfEventControlError> {
        let output = self
            .output()
            .ok_or(PerfEventControlError::Invalid("the event has no ring"))?;
        output.ring.pause(on);
        Ok(())
    }

    /// Returns the number of records of the event and its children that were lost because the ring
    /// was full or paused (`PERF_FORMAT_LOST`). No call resets this number.
    #[must_use]
    pub fn lost_records(&self) -> u64 {
        self.inner.event.shared.lost.load(Ordering::Relaxed)
    }

    fn output(&self) -> Option<Arc<Output>> {
        let event = &self.inner.event;
        event.cell.lock().get(event.key, &event.shared)?.output.clone()
    }

    /// Returns and clears the poll state. Call this method when [`EventHandle::poll_fd`] becomes
    /// readable. The result contains [`PollState::HUP`] if the event has no ring to write to, or if
    /// the event reached its overflow limit and was disabled.
    #[must_use]
    pub fn poll(&self) -> PollState {
        let mut poll = self.inner.event.shared.notify.take();
        match self.output() {
            None => poll |= PollState::HUP,
            Some(output) => {
                let state = output.ring.take_poll();
                poll.set(PollState::IN, poll.contains(PollState::IN) || state.readable);
                poll.set(PollState::HUP, poll.contains(PollState::HUP) || state.hang_up);
            }
        }
        poll
    }

    /// Returns a descriptor that becomes readable when the poll state is set: the descriptor of the
    /// ring, or of the event itself if it has no ring. Without a ring, the descriptor becomes
    /// readable at every overflow.
    ///
    /// The caller owns the descriptor. Call this method again after mapping a ring or redirecting
    /// the output, because the descriptor of the previous ring no longer becomes readable.
    ///
    /// # Errors
    ///
    /// Returns the error of the host if no more descriptors are available.
    pub fn poll_fd(&self) -> std::io::Result<OwnedFd> {
        match self.output() {
            Some(output) => output.ring.wakeup_fd().try_clone_to_owned(),
            None => self.inner.event.shared.notify.fd()?.try_clone_to_owned(),
        }
    }
}
