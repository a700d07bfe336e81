//! Events. An event consists of a shared struct, which its handle and children reference, and a
//! struct that its context owns.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::attr::{Attr, SampleType};
use crate::model::failure::EventFailure;
use crate::model::keys::{GroupKey, Key, PoolId};
use crate::model::lists::ListPositions;
use crate::model::output::Output;
use crate::model::slices::Slices;
use crate::model::state::{EventState, Owner};
use crate::model::times::EventTimes;
use crate::model::totals::ExitedTotals;
use crate::notify::PollNotifier;
use crate::pmu::{CounterMask, PmuError, PmuEvent};
use crate::record::{EncodeRecord, RecordFormat, RecordWriteOutcome, SampleId};
use crate::sample::Sampling;

/// State of an event that its handle, its children and its context share. Immutable or atomic.
pub(crate) struct EventShared {
    /// Event ID, unique in the process and starting at 1.
    pub id: u64,
    /// Attributes that the event was opened with. [`Sampling`] contains the current period.
    pub attr: Attr,
    pub owner: Owner,
    /// Cookie under which the event's overflows are reported to the VMM
    /// ([`crate::OverflowReport`]), or `None` for no reports.
    pub cookie: Option<u64>,
    /// `true` if the event has a child per vCPU.
    pub is_family: bool,
    /// Totals of exited children. Written only under the family lock. Atomic, so that records and
    /// control pages can include them without that lock.
    pub folded: ExitedTotals,
    /// Number of lost records of the event and its children.
    pub lost: AtomicU64,
    pub notify: PollNotifier,
}

impl fmt::Debug for EventShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EventShared")
            .field("id", &self.id)
            .field("attr", &self.attr)
            .finish_non_exhaustive()
    }
}

impl EventShared {
    pub fn new(attr: Attr, owner: Owner, cookie: Option<u64>, is_family: bool) -> Self {
        Self {
            id: next_id(),
            attr,
            owner,
            cookie,
            is_family,
            folded: ExitedTotals::default(),
            lost: AtomicU64::new(0),
            notify: PollNotifier::default(),
        }
    }
}

/// Returns the next event ID. IDs start at 1 and are never reused.
fn next_id() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

/// Source of the counts of an event.
pub(crate) enum Source {
    /// Driver event.
    Driver(Box<dyn PmuEvent>),
    /// Count of a software event raised by the VMM, kept by the core itself.
    Raised(u64),
    /// No source of its own: the event is the parent of a family, and its children in the vCPU
    /// contexts count.
    Family,
}

/// State of an event that its context owns.
pub(crate) struct Event {
    pub shared: Arc<EventShared>,
    /// Parent of an inherited event. Never a child itself, because families are flat.
    pub parent: Option<Arc<EventShared>>,
    /// Group of the event in its context.
    pub group: GroupKey,
    /// Slot pool of a hardware event.
    pub pool: Option<PoolId>,
    /// Counters of the pool on which the event can be scheduled.
    pub fits: CounterMask,
    pub source: Source,
    pub state: EventState,
    pub times: EventTimes,
    pub sampling: Sampling,
    /// `true` if the next guest reset enables the event.
    pub enable_on_exec: bool,
    /// Ring that receives the records of the event, if any.
    pub output: Option<Arc<Output>>,
    /// Counts in the time slices of a multiplexed event.
    pub slices: Option<Slices>,
    /// Driver count at the last reset, subtracted from `raw` to obtain the event count.
    base: u64,
    /// Driver count when it was last read.
    raw: u64,
    /// Description of the error state, if the event is in that state.
    pub failure: Option<EventFailure>,
    /// Context time at which the event was last scheduled in, in nanoseconds.
    pub on_since_ns: u64,
    /// `true` if the driver event is stopped and `raw` is its final count, so that it need not be
    /// read again.
    settled: bool,
    /// Position of the event in the lists of its context.
    pub places: ListPositions,
    /// Position of an event that the VMM raises in the context's list of events with the same
    /// software event ID.
    pub raised_at: usize,
}

impl Event {
    /// Creates an event. For a hardware event, `place` contains the pool and the counters of the
    /// pool that can hold the event.
    pub fn new(
        shared: Arc<EventShared>,
        parent: Option<Arc<EventShared>>,
        place: Option<(PoolId, CounterMask)>,
        source: Source,
        enabled: bool,
    ) -> Self {
        let (pool, fits) = place.unzip();
        let slices = (pool.is_some() && !shared.attr.pinned).then(Slices::default);
        let sampling = Sampling::new(&shared.attr);
        let enable_on_exec = shared.attr.enable_on_exec;
        Self {
            shared,
            parent,
            group: GroupKey::new(usize::MAX),
            pool,
            fits: fits.unwrap_or_default(),
            source,
            state: if enabled {
                EventState::Inactive
            } else {
                EventState::Off
            },
            times: EventTimes::default(),
            sampling,
            output: None,
            enable_on_exec,
            base: 0,
            raw: 0,
            failure: None,
            on_since_ns: 0,
            settled: true,
            places: ListPositions::default(),
            raised_at: 0,
            slices,
        }
    }

    /// Returns the opened event: the parent of an inherited event, or the event itself.
    pub fn top(&self) -> &Arc<EventShared> {
        self.parent.as_ref().unwrap_or(&self.shared)
    }

    /// Returns the driver count, which resets do not change. Costs at most one driver read, or none
    /// for a stopped event whose count is known.
    pub fn raw(&mut self) -> u64 {
        match &mut self.source {
            Source::Raised(count) => self.raw = *count,
            Source::Family => {}
            Source::Driver(driver) => {
                if self.state == EventState::Active || !self.settled {
                    self.raw = driver.read();
                    self.settled = self.state != EventState::Active;
                }
            }
        }
        self.raw
    }

    /// Returns the driver count at the time when the event was last scheduled in.
    fn raw_at_start(&self) -> u64 {
        match &self.source {
            Source::Raised(count) => *count,
            Source::Driver(_) | Source::Family => self.raw,
        }
    }

    /// Returns the count since the last reset. A package count (a driver's single count for the
    /// whole VM) is returned unmodified.
    pub fn count(&mut self) -> u64 {
        if let Source::Driver(driver) = &mut self.source
            && let Some(total) = driver.count()
        {
            return total;
        }
        self.raw().wrapping_sub(self.base)
    }

    /// Returns `true` if the driver has detected that the host took the event's counter away.
    pub fn is_lost(&self) -> bool {
        self.state == EventState::Active
            && matches!(&self.source, Source::Driver(driver) if driver.lost_ns().is_some())
    }

    /// Returns the age of the last value of a package count in nanoseconds, or `None` for all other
    /// events.
    pub fn count_age_ns(&mut self) -> Option<u64> {
        match &mut self.source {
            Source::Driver(driver) => driver.count().map(|_| driver.count_age_ns()),
            Source::Raised(_) | Source::Family => None,
        }
    }

    /// Sets the count to `value`.
    pub fn set_count(&mut self, value: u64) {
        self.base = self.raw().wrapping_sub(value);
    }

    /// Starts the event. Requires that `raw` is the count at which the event was last stopped,
    /// which [`Event::stop`] ensures for events that overflow.
    pub fn start(&mut self, time: u64) -> Result<(), PmuError> {
        let overflow_in = self.sampling.overflow_in();
        if let Source::Driver(driver) = &mut self.source {
            if overflow_in.is_some() {
                if !self.settled {
                    self.raw = driver.read();
                }
                self.sampling.arm_at(self.raw);
            }
            // The count at the start of a multiplexed event's time slice must be known. `raw`
            // already is that count if the event was read after it stopped.
            if self.slices.is_some() && !self.settled {
                self.raw = driver.read();
            }
            driver.start(overflow_in)?;
            self.settled = false;
        }
        self.times.go_on(time);
        self.on_since_ns = time;
        self.state = EventState::Active;
        Ok(())
    }

    /// Stops the event. Elapsed overflows that were not serviced remain pending.
    pub fn stop(&mut self, time: u64) {
        if let Source::Driver(driver) = &mut self.source {
            driver.stop();
        }
        self.stopped(time);
    }

    /// Completes [`Event::stop`] for an event whose driver event is already stopped.
    pub fn stopped(&mut self, time: u64) {
        if let Source::Driver(driver) = &mut self.source {
            self.settled = false;
            if self.sampling.is_on() {
                self.raw = driver.read();
                self.settled = true;
                let _ = driver.take_overflows();
                self.sampling.disarm_at(self.raw);
            }
        }
        self.times.sched_out(time);
        self.state = EventState::Inactive;
    }

    /// Restarts the driver event of an active event, armed with the overflow point of the event's
    /// sampling state. After an error the driver event is stopped, although the state of the event
    /// is still active.
    pub fn restart(&mut self) -> Result<(), PmuError> {
        let overflow_in = self.sampling.overflow_in();
        let Source::Driver(driver) = &mut self.source else {
            return Ok(());
        };
        driver.stop();
        driver.start(overflow_in)
    }

    /// Pauses the driver event of an active event and returns the count. The event remains active
    /// and its times advance. The caller must then call [`Event::go_on`] or [`Event::stop`].
    pub fn pause(&mut self) -> u64 {
        if let Source::Driver(driver) = &mut self.source {
            driver.stop();
        }
        let count = self.count();
        if let Source::Driver(driver) = &mut self.source
            && self.sampling.is_on()
        {
            driver.forget_overflows();
            self.sampling.disarm_at(self.raw);
        }
        count
    }

    /// Reverts [`Event::pause`], and arms the event for `overflow_in` further counts if given.
    /// After an error the driver event remains stopped.
    pub fn go_on(&mut self, overflow_in: Option<u64>) -> Result<(), PmuError> {
        if let Some(overflow_in) = overflow_in {
            self.sampling.set_left(overflow_in, self.raw);
        }
        let overflow_in = self.sampling.overflow_in();
        if let Source::Driver(driver) = &mut self.source {
            if overflow_in.is_some() {
                self.sampling.arm_at(self.raw);
            }
            driver.start(overflow_in)?;
        }
        Ok(())
    }

    /// Records that the event was scheduled in at context time `time`. Returns `true` if this ends
    /// its previous time slice, whose count is then known.
    pub fn record_sched_in(&mut self, leader: EventState, time: u64) -> bool {
        let enabled_ns = self.times.at(self.state, leader, time).enabled_ns;
        let count = self.raw_at_start().wrapping_sub(self.base);
        self.slices
            .as_mut()
            .is_some_and(|slices| slices.on(enabled_ns, count))
    }

    /// Records that the event is scheduled out at context time `time`. The count at that time may
    /// be read later.
    pub fn record_sched_out(&mut self, leader: EventState, time: u64) {
        let enabled_ns = self.times.at(self.state, leader, time).enabled_ns;
        if let Some(slices) = &mut self.slices {
            slices.off(enabled_ns);
        }
    }

    /// Reads an active event about halfway through its time slice. Costs one driver read.
    pub fn record_mid_slice(&mut self, leader: EventState, time: u64) {
        if self.slices.is_none() || self.state != EventState::Active {
            return;
        }
        let enabled_ns = self.times.at(self.state, leader, time).enabled_ns;
        let count = self.raw().wrapping_sub(self.base);
        if let Some(slices) = &mut self.slices {
            slices.mid_slice(enabled_ns, count);
        }
    }

    /// Ends the time slice of a scheduled-out event whose slot was given to another event. Reads
    /// the count, once per time slice. Returns `true` if this call ended a slice, whose count is
    /// then known.
    pub fn end_slice(&mut self) -> bool {
        if self.slices.is_none() || self.state == EventState::Active {
            return false;
        }
        let count = self.raw().wrapping_sub(self.base);
        self.slices.as_mut().is_some_and(|slices| slices.end(count))
    }

    /// Arms the event to overflow after `overflow_in` further counts, and returns the count.
    pub fn arm(&mut self, overflow_in: u64) -> Result<u64, PmuError> {
        let raw = self.raw();
        if let Source::Driver(driver) = &mut self.source
            && self.state == EventState::Active
        {
            driver.forget_overflows();
            driver.rearm(raw, overflow_in)?;
            self.sampling.disarm_at(raw);
        }
        self.sampling.set_left(overflow_in, raw);
        Ok(raw.wrapping_sub(self.base))
    }

    /// Changes the period or the frequency. A new period starts immediately. Pending overflows are
    /// still serviced, and the counts after them are attributed to the next overflow.
    pub fn set_period(&mut self, value: u64) -> Result<(), PmuError> {
        let raw = self.raw();
        let mut changed = self.sampling;
        changed.set_rate(value);
        if let Source::Driver(driver) = &mut self.source
            && self.state == EventState::Active
            && !self.sampling.throttled
        {
            let _ = driver.take_overflows();
            driver.rearm(raw, changed.period)?;
            self.sampling.disarm_at(raw);
        }
        self.sampling.set_rate(value);
        self.sampling.restart(raw);
        Ok(())
    }
}

impl Event {
    /// Returns `true` if a sample of this event has a branch stack.
    pub fn needs_branches(&self) -> bool {
        self.output.is_some() && self.shared.attr.sample_type.contains(SampleType::BRANCH_STACK)
    }

    /// Writes a non-sample record to the ring of the event, if any. If the ring is full, the record
    /// is counted as lost in the ring and in the opened event.
    pub fn write_record(&self, record: &impl EncodeRecord) {
        if let Some(output) = &self.output {
            let format = RecordFormat::from(&self.shared.attr);
            self.count_lost(record.write(format, &output.ring).into());
        }
    }

    /// Accounts for the result of writing records of this event.
    pub fn count_lost(&self, written: RecordWriteOutcome) {
        if written.lost > 0 {
            self.top().lost.fetch_add(written.lost, Ordering::Relaxed);
        }
    }

    /// Returns `by` (the vCPU and time of a record) completed with the IDs of this event, as the
    /// trailer of a record.
    pub fn sample_id(&self, by: SampleId) -> SampleId {
        SampleId {
            id: self.top().id,
            stream_id: self.shared.id,
            ..by
        }
    }
}
