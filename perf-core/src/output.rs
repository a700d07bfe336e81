//! Where an event's records go: its ring, or another event's.
//!
//! All of this is the cold side and runs under the topology lock. The hot side is one pointer in the event's
//! working half, [`crate::event::Event::output`], kept right here whenever a ring comes or an output is
//! redirected.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use crate::control::ControlError;
use crate::core::{Core, CoreInner};
use crate::event::{Event, Totals};
use crate::handle::{EventRef, Handle};
use crate::lock::{Lock, LockGuard, Rank};
use crate::notify::Poll;
use crate::record::{Encode, Format, Written};
use crate::ring::{Counter, MemoryWatch, PAGE_SIZE, Ring, RingError, RingMode};

/// A ring in use by events.
#[derive(Debug)]
pub(crate) struct Output {
    pub ring: Arc<Ring>,
    /// The event that owns the ring.
    pub owner: u64,
}

/// The output side of an event that was opened.
#[derive(Debug, Default)]
pub(crate) struct OutputState {
    own: Option<Arc<Output>>,
    /// How often the ring is mapped.
    mappings: usize,
    /// The event whose ring is used instead.
    redirect: Option<EventRef>,
    /// Events that use this one's ring.
    sources: Vec<EventRef>,
}

/// Why a ring was not attached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The event is closed.
    #[error("the event is closed")]
    Closed,
    /// The event is mapped with another size.
    #[error("the event has a ring of {mapped} data pages, not {asked}")]
    OtherSize {
        /// Data pages of the ring there is.
        mapped: usize,
        /// Data pages asked for.
        asked: usize,
    },
    /// Its output goes to another event.
    #[error("the event writes to another event's ring")]
    Redirected,
    /// The operator's memory limit.
    #[error(
        "{pages} more pages of ring memory exceed the limit of {limit} for this user; unmap a ring, raise the limit, or use the admin role"
    )]
    MemoryLimit {
        /// Pages asked for, the control page included.
        pages: u64,
        /// Pages the user may have in all.
        limit: u64,
    },
    /// The ring could not be made.
    #[error(transparent)]
    Ring(#[from] RingError),
}

impl MapError {
    /// The error number `mmap(2)` of a kernel event gives in this case.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Closed => libc::EBADF,
            Self::OtherSize { .. } | Self::Redirected => libc::EINVAL,
            Self::MemoryLimit { .. } => libc::EPERM,
            Self::Ring(RingError::Os { .. }) => libc::ENOMEM,
            Self::Ring(_) => libc::EINVAL,
        }
    }
}

/// Ring memory in use, in pages, by user: charged until nobody has it any more, in this process or another.
#[derive(Debug)]
pub(crate) struct Locked {
    users: Lock<HashMap<u32, Used>>,
}

/// What one user has.
#[derive(Debug, Default)]
struct Used {
    pages: u64,
    /// Memory of rings that this process has let go while clients had it.
    held: Vec<Held>,
}

#[derive(Debug)]
struct Held {
    watch: MemoryWatch,
    pages: u64,
}

impl Used {
    /// Refunds what clients have let go in the meantime. A system call or two for each ring they had.
    fn sweep(&mut self) {
        let pages = &mut self.pages;
        self.held.retain(|held| {
            let in_use = held.watch.is_in_use();
            if !in_use {
                *pages -= held.pages;
            }
            in_use
        });
    }
}

impl Default for Locked {
    fn default() -> Self {
        Self {
            users: Lock::new(Rank::Memory, HashMap::new()),
        }
    }
}

impl Locked {
    fn lock(&self) -> LockGuard<'_, HashMap<u32, Used>> {
        self.users.lock()
    }

    pub fn pages_of(&self, uid: u32) -> u64 {
        self.lock().get_mut(&uid).map_or(0, |used| {
            used.sweep();
            used.pages
        })
    }

    /// Charges `pages` to `uid`, who is the one refunded whoever unmaps.
    fn charge(self: &Arc<Self>, uid: u32, pages: u64, limit: Option<u64>) -> Result<Charge, MapError> {
        let mut users = self.lock();
        let used = users.entry(uid).or_default();
        if let Some(limit) = limit
            && used.pages.saturating_add(pages) > limit
        {
            used.sweep();
            if used.pages.saturating_add(pages) > limit {
                return Err(MapError::MemoryLimit { pages, limit });
            }
        }
        used.pages = used.pages.saturating_add(pages);
        Ok(Charge {
            locked: Arc::clone(self),
            uid,
            pages,
            watch: None,
        })
    }
}

/// A charge for the memory of one ring, which keeps it ([`Ring::keep`]).
#[derive(Debug)]
struct Charge {
    locked: Arc<Locked>,
    uid: u32,
    pages: u64,
    /// Tells whether clients have the memory, if that matters: if there is a limit.
    watch: Option<MemoryWatch>,
}

impl Drop for Charge {
    fn drop(&mut self) {
        let watch = self.watch.take().filter(MemoryWatch::is_in_use);
        let mut users = self.locked.lock();
        let Some(used) = users.get_mut(&self.uid) else {
            return;
        };
        if let Some(watch) = watch {
            let pages = self.pages;
            used.held.push(Held { watch, pages });
            return;
        }
        used.pages -= self.pages;
        if used.pages == 0 {
            users.remove(&self.uid);
        }
    }
}

impl EventRef {
    fn output_state(&self) -> LockGuard<'_, OutputState> {
        self.shared.output.lock()
    }

    /// Whether other events may write to this one's ring. Under the topology lock.
    pub fn can_be_output(&self) -> Result<(), ControlError> {
        if self.output_state().redirect.is_some() {
            return Err(ControlError::Invalid("the target writes to another event itself"));
        }
        if self.cell.lock().get(self.key, &self.shared).is_none() {
            return Err(ControlError::Closed);
        }
        Ok(())
    }

    /// The ring the event owns.
    pub fn own_output(&self) -> Option<Arc<Output>> {
        self.output_state().own.clone()
    }

    /// Notes that the event, which is new and has written to the ring of `target` since it is there, does so.
    pub fn begin_redirected(&self, target: &Self) {
        self.output_state().redirect = Some(target.clone());
        target.output_state().sources.push(self.clone());
    }

    /// Tells the event's working half, its children's, and those of events that write here where records go.
    fn spread_output(&self) {
        let (output, sources) = {
            let state = self.output_state();
            let redirected = state
                .redirect
                .as_ref()
                .and_then(|target| target.output_state().own.clone());
            (redirected.or_else(|| state.own.clone()), state.sources.clone())
        };
        for event in std::iter::once(self).chain(&sources) {
            let _ = event.for_each(|context, key, now_ns| {
                context.events[key].output = output.clone();
                context.update_page(key, now_ns);
            });
        }
    }

    /// Takes the event out of the web of redirections; its ring lives on while others write to it.
    pub fn release_output(&self) {
        let (redirect, sources) = {
            let mut state = self.output_state();
            state.own = None;
            (state.redirect.take(), std::mem::take(&mut state.sources))
        };
        if let Some(target) = redirect {
            target
                .output_state()
                .sources
                .retain(|s| !Arc::ptr_eq(&s.shared, &self.shared));
        }
        for source in sources {
            // They keep the ring they write to, as if they still held this event open.
            source.output_state().redirect = None;
        }
    }
}

impl Event {
    /// Writes a record that is no sample to the ring the event writes to, if it has one. Without room it is
    /// lost: the ring counts that, and so does the event that was opened.
    pub fn write_record(&self, record: &impl Encode) {
        if let Some(output) = &self.output {
            let format = Format::from(&self.shared.attr);
            self.count_lost(record.write(format, &output.ring).into());
        }
    }

    /// Accounts what became of records of this event.
    pub fn count_lost(&self, written: Written) {
        if written.lost > 0 {
            self.top().lost.fetch_add(written.lost, Relaxed);
        }
    }
}

impl CoreInner {
    /// Redirects `source`'s output to `target`'s ring, or back. Under the topology lock.
    pub fn set_output(&self, source: &EventRef, target: Option<&EventRef>) -> Result<(), ControlError> {
        if let Some(target) = target {
            if Arc::ptr_eq(&source.shared, &target.shared) {
                return Err(ControlError::Invalid("an event cannot be its own output"));
            }
            target.can_be_output()?;
            let state = source.output_state();
            if state.own.is_some() {
                return Err(ControlError::Invalid("the event has a ring of its own"));
            }
            if !state.sources.is_empty() {
                return Err(ControlError::Invalid("other events write to this one"));
            }
        }
        let old = std::mem::replace(&mut source.output_state().redirect, target.cloned());
        if let Some(old) = old {
            old.output_state()
                .sources
                .retain(|s| !Arc::ptr_eq(&s.shared, &source.shared));
        }
        if let Some(target) = target {
            target.output_state().sources.push(source.clone());
        }
        source.spread_output();
        Ok(())
    }
}

impl Core {
    /// Pages of ring memory charged to user `uid` now.
    #[must_use]
    pub fn ring_pages(&self, uid: u32) -> u64 {
        self.inner.locked.pages_of(uid)
    }
}

/// Brings the control page of an event that owns a ring up to date: count and times.
///
/// The index is always 0 (not directly readable): who maps the ring runs on another CPU than the vCPU, and a
/// counter read there would be another's.
pub(crate) fn write_page(output: &Output, totals: Totals) {
    let counter = Counter {
        index: 0,
        offset: totals.count as i64,
        time_enabled_ns: totals.times.enabled_ns,
        time_running_ns: totals.times.running_ns,
    };
    // A page that another thread is updating right now gets that thread's values, which are as fresh.
    let _ = output.ring.control().update(counter);
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
        let session = &self.inner.session;
        let limit = (!session.is_admin())
            .then(|| core.limits.ring_pages_limit(&core.config))
            .flatten();
        let pages = u64::try_from(data_pages).unwrap_or(u64::MAX).saturating_add(1);
        let mut charge = core.locked.charge(session.uid, pages, limit)?;
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
        self.inner.core.set_output(event, target.map(|t| &t.inner.event))
    }

    /// Stops writing to the ring the event writes to, or goes on (`PERF_EVENT_IOC_PAUSE_OUTPUT`). It counts
    /// on meanwhile; its records are counted as lost, and so are those of every other event that writes
    /// there.
    ///
    /// ```
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
        self.inner.event.shared.lost.load(Relaxed)
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
