//! Events. An event consists of an [`EventShared`], which its handle and children reference, and an
//! [`Event`], which its context owns.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::attr::{Attr, SampleType};
use crate::model::failure::PinnedEventFailure;
use crate::model::keys::{Key, MuxGroupKey, PoolId};
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

/// The part of an event that its handle, its children and its context share. All fields are
/// immutable or atomic.
pub(crate) struct EventShared {
    /// ID of the event, unique in the process and starting at 1.
    pub id: u64,
    /// Attributes with which the event was opened. [`Sampling`] contains the period, which may
    /// change.
    pub attr: Attr,
    pub owner: Owner,
    /// Number by which the VMM identifies the event in overflow reports
    /// ([`crate::OverflowReport`]), or `None` for no reports.
    pub cookie: Option<u64>,
    /// `true` for a VM-wide event with one child per vCPU.
    pub is_family: bool,
    /// Totals of exited children. Written only under the family lock. Atomic, so that records and
    /// control pages can include the totals without the family lock.
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

/// What counts an event.
pub(crate) enum Source {
    /// An event of a driver.
    Driver(Box<dyn PmuEvent>),
    /// The core itself: the count of a software event that the VMM raises.
    Raised(u64),
    /// The children in the vCPU contexts: the event is the parent of a family.
    Family,
}

/// The part of an event that its context owns.
pub(crate) struct Event {
    pub shared: Arc<EventShared>,
    /// Parent of an inherited event. The parent has no parent of its own.
    pub parent: Option<Arc<EventShared>>,
    /// Group that contains the event.
    pub group: MuxGroupKey,
    /// Slot pool of a hardware event, or `None` for an event that needs no slot.
    pub pool: Option<PoolId>,
    /// Counters of the slot pool that can hold the event.
    pub suitable_counters: CounterMask,
    pub source: Source,
    pub state: EventState,
    pub times: EventTimes,
    pub sampling: Sampling,
    /// `true` if the next guest reset enables the event.
    pub enable_on_exec: bool,
    /// Ring that receives the records of the event, or `None` if the event has no output.
    pub output: Option<Arc<Output>>,
    /// Counts and lengths of the time slices of a multiplexed event.
    pub slices: Option<Slices>,
    /// Driver count at the last reset. The event count is `raw` minus this value.
    base: u64,
    /// Driver count at the last read of the driver event.
    raw: u64,
    /// Reason and time of the last failure. Valid while the event is in the error state.
    pub failure: Option<PinnedEventFailure>,
    /// Context time at which the event was last scheduled in, in nanoseconds.
    pub on_since_ns: u64,
    /// `true` if the driver event is stopped and `raw` is its final count, so that the driver need
    /// not be read again.
    settled: bool,
    /// Positions of the event in the lists of its context.
    pub list_positions: ListPositions,
    /// Position of a raised event in the context's list of events with the same software event ID.
    pub raised_at: usize,
}

impl Event {
    /// Creates an event. For a hardware event, `place` contains the slot pool, and the counters of
    /// this pool that can hold the event.
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
            group: MuxGroupKey::new(usize::MAX),
            pool,
            suitable_counters: fits.unwrap_or_default(),
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
            list_positions: ListPositions::default(),
            raised_at: 0,
            slices,
        }
    }

    /// Returns the opened event: the parent if this event is inherited, otherwise the event itself.
    pub fn top(&self) -> &Arc<EventShared> {
        self.parent.as_ref().unwrap_or(&self.shared)
    }

    /// Returns the driver count, which resets do not change. Takes one driver read, or none for a
    /// stopped event whose count is known.
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
    /// whole VM) is not affected by resets.
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

    /// Returns the age of the current value of a package count (a driver's single count for the
    /// whole VM), in nanoseconds, or `None` for all other events.
    pub fn count_age_ns(&mut self) -> Option<u64> {
        match &mut self.source {
            Source::Driver(driver) => driver.count().map(|_| driver.count_age_ns()),
            Source::Raised(_) | Source::Family => None,
        }
    }

    /// Sets the event's count to `value`.
    pub fn set_count(&mut self, value: u64) {
        self.base = self.raw().wrapping_sub(value);
    }

    /// Starts the event.
    ///
    /// `raw` must be the count at which the event was last stopped. For events that can overflow,
    /// [`Event::stop`] ensures this.
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
        self.times.resume(time);
        self.on_since_ns = time;
        self.state = EventState::Active;
        Ok(())
    }

    /// Stops the event. Overflows that were not serviced remain pending.
    pub fn stop(&mut self, time: u64) {
        if let Source::Driver(driver) = &mut self.source {
            driver.stop();
        }
        self.complete_stop(time);
    }

    /// Performs the rest of [`Event::stop`] for an event whose driver event is already stopped.
    pub fn complete_stop(&mut self, time: u64) {
        if let Source::Driver(driver) = &mut self.source {
            self.settled = false;
            if self.sampling.can_overflow() {
                self.raw = driver.read();
                self.settled = true;
                let _ = driver.take_overflows();
                self.sampling.disarm_at(self.raw);
            }
        }
        self.times.sched_out(time);
        self.state = EventState::Inactive;
    }

    /// Stops the driver event of an active event and starts it again, armed for the next overflow
    /// unless the event is throttled. On an error, the driver event stays stopped and the event
    /// must be scheduled out.
    pub fn restart(&mut self) -> Result<(), PmuError> {
        let overflow_in = self.sampling.overflow_in();
        let Source::Driver(driver) = &mut self.source else {
            return Ok(());
        };
        driver.stop();
        driver.start(overflow_in)
    }

    /// Pauses the driver event of an active event and returns the count. The event remains active
    /// and its times advance. The caller must then call [`Event::resume`] or [`Event::stop`].
    pub fn pause(&mut self) -> u64 {
        if let Source::Driver(driver) = &mut self.source {
            driver.stop();
        }
        let count = self.count();
        if let Source::Driver(driver) = &mut self.source
            && self.sampling.can_overflow()
        {
            driver.forget_overflows();
            self.sampling.disarm_at(self.raw);
        }
        count
    }

    /// Resumes an event that [`Event::pause`] paused. Arms the event for `overflow_in` further
    /// counts, if given. On an error, the driver event stays stopped.
    pub fn resume(&mut self, overflow_in: Option<u64>) -> Result<(), PmuError> {
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
    /// the previous time slice of a multiplexed event.
    pub fn record_sched_in(&mut self, leader: EventState, time: u64) -> bool {
        let enabled_ns = self.times.at(self.state, leader, time).enabled_ns;
        let count = self.raw_at_start().wrapping_sub(self.base);
        self.slices
            .as_mut()
            .is_some_and(|slices| slices.sched_in(enabled_ns, count))
    }

    /// Records that the event is scheduled out at context time `time`. The driver count is not read
    /// yet.
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

    /// Ends the time slice of a multiplexed event that was scheduled out and whose slot was given
    /// to another event. Reads the count, at most once per slice. Returns `true` if there was a
    /// slice to end.
    pub fn end_slice(&mut self) -> bool {
        if self.slices.is_none() || self.state == EventState::Active {
            return false;
        }
        let count = self.raw().wrapping_sub(self.base);
        self.slices.as_mut().is_some_and(|slices| slices.end(count))
    }

    /// Arms the event to overflow after `overflow_in` further counts, and returns the event's
    /// count.
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

    /// Changes the period, or the frequency of an event with a target frequency. A new period
    /// starts immediately. Overflows of the old period remain pending, and the counts since the
    /// last of them are included in the next sample.
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

    /// Writes a record other than a sample to the ring of the event, if it has one. If the ring is
    /// full, the record is counted as lost in the ring and in the opened event.
    pub fn write_record(&self, record: &impl EncodeRecord) {
        if let Some(output) = &self.output {
            let format = RecordFormat::from(&self.shared.attr);
            self.count_lost(record.write(format, &output.ring).into());
        }
    }

    /// Adds the number of records that were lost in a write to the lost count of the opened event.
    pub fn count_lost(&self, written: RecordWriteOutcome) {
        if written.lost > 0 {
            self.top().lost.fetch_add(written.lost, Ordering::Relaxed);
        }
    }

    /// Returns the trailer of a record of this event: `by`, which contains the vCPU and the time,
    /// completed with the event's IDs.
    pub fn sample_id(&self, by: SampleId) -> SampleId {
        SampleId {
            id: self.top().id,
            stream_id: self.shared.id,
            ..by
        }
    }
}
