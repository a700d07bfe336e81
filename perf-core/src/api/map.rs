//! A handle's ring: mapping it, redirecting records, and waiting for them.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::api::handle::Handle;
use crate::model::output::Output;
use crate::notify::Poll;
use crate::ring::{PAGE_SIZE, Ring, RingMode};
use crate::service::core::Core;
use crate::service::error::{ControlError, MapError};

impl Core {
    /// Pages of ring memory charged to user `uid` now.
    #[must_use]
    pub fn ring_pages(&self, uid: u32) -> u64 {
        self.inner.locked.pages_of(uid)
    }
}

impl Handle {
    /// Attaches a ring of one control page and `data_pages` (0 or a power of two) data pages, and returns it;
    /// mapping again with the same size gives the same ring. `writable` says whether the reader moves
    /// `data_tail`: then what finds no room is lost and reported, otherwise the oldest records are
    /// overwritten. The first mapping decides.
    ///
    /// The ring's memory is charged to the session's user for as long as anybody has it, a client with its
    /// memfd included.
    ///
    /// # Errors
    /// [`MapError`]; nothing has changed then.
    pub fn map(&self, data_pages: usize, writable: bool) -> Result<Arc<Ring>, MapError> {
        let event = &self.inner.event;
        let core = &self.inner.core;
        let _topology = core.topology();
        if event.cell.lock().get(event.key, &event.shared).is_none() {
            return Err(MapError::Closed);
        }
        {
            let mut state = event.output_state();
            if state.redirect.is_some() {
                return Err(MapError::Redirected);
            }
            if let Some(own) = state.own.clone() {
                let mapped = own.ring.data_size() / PAGE_SIZE;
                if mapped != data_pages {
                    return Err(MapError::OtherSize {
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
            RingMode::Writable
        } else {
            RingMode::Overwrite
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
        ring.keep(Box::new(charge));
        {
            let mut state = event.output_state();
            state.own = Some(Arc::new(Output {
                ring: Arc::clone(&ring),
                owner: event.shared.id,
            }));
            state.mappings = 1;
        }
        event.spread_output();
        Ok(ring)
    }

    /// Undoes one [`Handle::map`]; the last one detaches the ring. Readers that still hold it see no more
    /// records. Whether there was one to undo.
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
        event.spread_output();
        true
    }

    /// Sends this event's records to the ring of `target`, or with `None` nowhere but to its own again. There
    /// are no chains: neither may the target be redirected itself, nor may others write to this event. An
    /// event with a ring of its own cannot be redirected.
    ///
    /// When the target is closed, the events that write to its ring go on, and count as redirected until they
    /// are sent elsewhere.
    ///
    /// # Errors
    /// [`ControlError::Invalid`], [`ControlError::Closed`].
    pub fn set_output(&self, target: Option<&Handle>) -> Result<(), ControlError> {
        let _topology = self.inner.core.topology();
        let event = &self.inner.event;
        event
            .cell
            .lock()
            .get(event.key, &event.shared)
            .ok_or(ControlError::Closed)?;
        event.set_output(target.map(|t| &t.inner.event))
    }

    /// Stops writing to the ring the event writes to, or goes on (`PERF_EVENT_IOC_PAUSE_OUTPUT`). It counts
    /// on meanwhile; its records are counted as lost, and so are those of every other event that writes
    /// there.
    ///
    #[cfg_attr(feature = "sim", doc = "```")]
    #[cfg_attr(not(feature = "sim"), doc = "```ignore")]
    /// # use std::sync::Arc;
    /// # use perf_core::{pmu::sim::SimPmu, *};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let core = Core::builder().driver(Arc::new(SimPmu::with_slots(4))).build()?;
    /// # core.add_vcpu(VcpuId(0), 1)?;
    /// # let session = core.session(0, Role::Admin);
    /// # let (target, flags) = (OpenTarget::Vcpu(VcpuId(0)), OpenFlags::default());
    /// let event = core.open(&session, Attr::sampling(EventType::SIM, 1, 100), target, None, flags)?;
    /// assert!(event.pause_output(true).is_err(), "it has no ring");
    /// let ring = event.map(4, false)?; // the oldest records are overwritten
    /// event.pause_output(true)?;
    /// // ... what is in the ring stays as it is while it is read ...
    /// event.pause_output(false)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`ControlError::Invalid`] if the event writes to no ring.
    pub fn pause_output(&self, on: bool) -> Result<(), ControlError> {
        let output = self
            .output()
            .ok_or(ControlError::Invalid("the event has no ring"))?;
        output.ring.pause(on);
        Ok(())
    }

    /// How many records of the event and its children found no room in their ring, those included that came
    /// while it was paused (`PERF_FORMAT_LOST`). No call takes it back to 0.
    #[must_use]
    pub fn lost_records(&self) -> u64 {
        self.inner.event.shared.lost.load(Ordering::Relaxed)
    }

    fn output(&self) -> Option<Arc<Output>> {
        let event = &self.inner.event;
        event.cell.lock().get(event.key, &event.shared)?.output.clone()
    }

    /// Takes what there is to look at; to be called after [`Handle::poll_fd`] became readable. [`Poll::HUP`]
    /// when the event has no ring to write to, or has disabled itself at its limit.
    #[must_use]
    pub fn poll(&self) -> Poll {
        let mut poll = self.inner.event.shared.notify.take();
        match self.output() {
            None => poll |= Poll::HUP,
            Some(output) => {
                let state = output.ring.take_poll();
                poll.set(Poll::IN, poll.contains(Poll::IN) || state.readable);
                poll.set(Poll::HUP, poll.contains(Poll::HUP) || state.hang_up);
            }
        }
        poll
    }

    /// A descriptor that becomes readable when there is something to look at: the ring's, or without one the
    /// event's own, which is signalled at every overflow. Ask again after mapping or redirecting: the
    /// descriptor is the caller's and stays open, but a ring that the event writes to no more makes it
    /// readable no more.
    ///
    /// # Errors
    /// The host's, when it has no more descriptors.
    pub fn poll_fd(&self) -> std::io::Result<OwnedFd> {
        match self.output() {
            Some(output) => output.ring.wakeup_fd().try_clone_to_owned(),
            None => self.inner.event.shared.notify.fd()?.try_clone_to_owned(),
        }
    }
}
