//! One event: the identity that its handle and its children share, and its working half, which lives in a
//! context.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::attr::Attr;
use crate::model::failure::Failure;
use crate::model::keys::{GroupKey, Key, PoolId};
use crate::model::lists::Places;
use crate::model::output::Output;
use crate::model::slices::Slices;
use crate::model::state::{Owner, State};
use crate::model::times::EventTimes;
use crate::model::totals::Folded;
use crate::notify::Notify;
use crate::pmu::{CounterMask, PmuError, PmuEvent};
use crate::record::{Encode, Format, SampleId, Written};
use crate::sample::Sampling;

/// The half of an event that its handle, its children and its context share. Immutable or atomic.
pub(crate) struct EventShared {
    /// Unique in the process, from 1.
    pub id: u64,
    /// As opened. The period in force is in [`Sampling`].
    pub attr: Attr,
    pub owner: Owner,
    /// What [`crate::Overflowed`] reports, for events that back something of the VMM's.
    pub cookie: Option<u64>,
    /// It fans out over vCPUs.
    pub is_family: bool,
    /// Totals of exited children. Written under the family's lock only; atomics, so that a record or a
    /// control page can add them without it.
    pub folded: Folded,
    /// Records of it and its children that found no room in their ring.
    pub lost: AtomicU64,
    pub notify: Notify,
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
            folded: Folded::default(),
            lost: AtomicU64::new(0),
            notify: Notify::default(),
        }
    }
}

/// The next event id: from 1, never reused.
fn next_id() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    LAST.fetch_add(1, Ordering::Relaxed) + 1
}

/// Where an event's counts come from.
pub(crate) enum Source {
    /// A driver.
    Driver(Box<dyn PmuEvent>),
    /// The core itself: the VMM raises it.
    Raised(u64),
    /// Nowhere: it stands for its children in the vCPU contexts.
    Family,
}

/// An event in its context.
pub(crate) struct Event {
    pub shared: Arc<EventShared>,
    /// The event that was opened, when this is an inherited one. Never a child itself: families are flat.
    pub parent: Option<Arc<EventShared>>,
    /// Its group in the context.
    pub group: GroupKey,
    /// The pool of slots it uses one of, if it is a hardware event.
    pub pool: Option<PoolId>,
    /// The counters of that pool it may sit on.
    pub fits: CounterMask,
    pub source: Source,
    pub state: State,
    pub times: EventTimes,
    pub sampling: Sampling,
    /// To be enabled at the next guest reset.
    pub enable_on_exec: bool,
    /// The ring its records go to, if any.
    pub output: Option<Arc<Output>>,
    /// What it counted in each slice it was on, if it takes turns.
    pub slices: Option<Slices>,
    /// The driver's count at the last reset.
    base: u64,
    /// The driver's count when last looked at.
    raw: u64,
    /// Why it is in the error state.
    pub failure: Option<Failure>,
    /// Its context's time when it last went on.
    pub on_since_ns: u64,
    /// `raw` is the truth: the event is stopped and has been read since.
    settled: bool,
    /// Where it stands in its context's lists.
    pub places: Places,
}

impl Event {
    /// `place`: its pool and the counters there it may sit on, if it is a hardware event.
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
            state: if enabled { State::Inactive } else { State::Off },
            times: EventTimes::default(),
            sampling,
            output: None,
            enable_on_exec,
            base: 0,
            raw: 0,
            failure: None,
            on_since_ns: 0,
            settled: true,
            places: Places::default(),
            slices,
        }
    }

    /// The event that was opened: itself, or its parent.
    pub fn top(&self) -> &Arc<EventShared> {
        self.parent.as_ref().unwrap_or(&self.shared)
    }

    /// The driver's count, which no reset changes. At most one driver read, none when it is stopped and
    /// known.
    pub fn raw(&mut self) -> u64 {
        match &mut self.source {
            Source::Raised(count) => self.raw = *count,
            Source::Family => {}
            Source::Driver(driver) => {
                if self.state == State::Active || !self.settled {
                    self.raw = driver.read();
                    self.settled = self.state != State::Active;
                }
            }
        }
        self.raw
    }

    /// The driver's count when it last went on.
    fn raw_at_start(&self) -> u64 {
        match &self.source {
            Source::Raised(count) => *count,
            Source::Driver(_) | Source::Family => self.raw,
        }
    }

    /// The count since the last reset. A driver that counts for a whole package answers itself, unmodified.
    pub fn count(&mut self) -> u64 {
        if let Source::Driver(driver) = &mut self.source
            && let Some(total) = driver.count()
        {
            return total;
        }
        self.raw().wrapping_sub(self.base)
    }

    /// Whether its driver knows that the host took its counter away.
    pub fn is_lost(&self) -> bool {
        self.state == State::Active
            && matches!(&self.source, Source::Driver(driver) if driver.lost_ns().is_some())
    }

    /// How old a package count is; `None` for ordinary events.
    pub fn count_age_ns(&mut self) -> Option<u64> {
        match &mut self.source {
            Source::Driver(driver) => driver.count().map(|_| driver.count_age_ns()),
            Source::Raised(_) | Source::Family => None,
        }
    }

    /// Makes the count `value` from now on.
    pub fn set_count(&mut self, value: u64) {
        self.base = self.raw().wrapping_sub(value);
    }

    /// Puts it on. `raw` must be settled, which [`Event::stop`] sees to for events that overflow.
    pub fn start(&mut self, time: u64) -> Result<(), PmuError> {
        let overflow_in = self.sampling.overflow_in();
        if let Source::Driver(driver) = &mut self.source {
            if overflow_in.is_some() {
                if !self.settled {
                    self.raw = driver.read();
                }
                self.sampling.arm_at(self.raw);
            }
            // An event that takes turns was read when its turn was over, unless something else took it off.
            if self.slices.is_some() && !self.settled {
                self.raw = driver.read();
            }
            driver.start(overflow_in)?;
            self.settled = false;
        }
        self.times.go_on(time);
        self.on_since_ns = time;
        self.state = State::Active;
        Ok(())
    }

    /// Takes it off; overflows that passed but were not served yet are kept.
    pub fn stop(&mut self, time: u64) {
        if let Source::Driver(driver) = &mut self.source {
            driver.stop();
        }
        self.stopped(time);
    }

    /// [`Event::stop`] of an event whose driver's half is stopped already.
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
        self.times.go_off(time);
        self.state = State::Inactive;
    }

    /// Stops the driver's half of an event that is on and starts it again, armed as its sampling says now.
    /// After an error it is stopped, and the event on in name only.
    pub fn restart(&mut self) -> Result<(), PmuError> {
        let overflow_in = self.sampling.overflow_in();
        let Source::Driver(driver) = &mut self.source else {
            return Ok(());
        };
        driver.stop();
        driver.start(overflow_in)
    }

    /// Stops the driver's half of an event that is on, for a moment: it stays on in name, and its times go
    /// on. Returns its count. [`Event::go_on`] or [`Event::stop`] is to follow.
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

    /// Takes back [`Event::pause`], armed for `overflow_in` further counts if that is given. After an error
    /// it is still stopped.
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

    /// It went on at `time` of its context. Returns whether what it counted in its last slice is known now.
    pub fn note_on(&mut self, leader: State, time: u64) -> bool {
        let enabled_ns = self.times.at(self.state, leader, time).enabled_ns;
        let count = self.raw_at_start().wrapping_sub(self.base);
        self.slices
            .as_mut()
            .is_some_and(|slices| slices.on(enabled_ns, count))
    }

    /// It goes off at `time` of its context. Its count need not be known yet.
    pub fn note_off(&mut self, leader: State, time: u64) {
        let enabled_ns = self.times.at(self.state, leader, time).enabled_ns;
        if let Some(slices) = &mut self.slices {
            slices.off(enabled_ns);
        }
    }

    /// It is on and about halfway through its slice. One driver read.
    pub fn note_amid(&mut self, leader: State, time: u64) {
        if self.slices.is_none() || self.state != State::Active {
            return;
        }
        let enabled_ns = self.times.at(self.state, leader, time).enabled_ns;
        let count = self.raw().wrapping_sub(self.base);
        if let Some(slices) = &mut self.slices {
            slices.amid(enabled_ns, count);
        }
    }

    /// It went off for another event, and is read here, once for each turn. Returns whether what it counted
    /// in its last slice is known now.
    pub fn end_slice(&mut self) -> bool {
        if self.slices.is_none() || self.state == State::Active {
            return false;
        }
        let count = self.raw().wrapping_sub(self.base);
        self.slices.as_mut().is_some_and(|slices| slices.end(count))
    }

    /// Lets the next overflow come after `overflow_in` further counts. Returns the count.
    pub fn arm(&mut self, overflow_in: u64) -> Result<u64, PmuError> {
        let raw = self.raw();
        if let Source::Driver(driver) = &mut self.source
            && self.state == State::Active
        {
            driver.forget_overflows();
            driver.rearm(raw, overflow_in)?;
            self.sampling.disarm_at(raw);
        }
        self.sampling.set_left(overflow_in, raw);
        Ok(raw.wrapping_sub(self.base))
    }

    /// Changes the period, or the frequency. A new period begins at once; of the old one nothing is lost: an
    /// overflow that passed is still served, and what was counted since is the next one's.
    pub fn set_period(&mut self, value: u64) -> Result<(), PmuError> {
        let raw = self.raw();
        let mut changed = self.sampling;
        changed.set_rate(value);
        if let Source::Driver(driver) = &mut self.source
            && self.state == State::Active
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
            self.top().lost.fetch_add(written.lost, Ordering::Relaxed);
        }
    }

    /// The trailer of what is written for this event `by` somebody.
    pub fn sample_id(&self, by: SampleId) -> SampleId {
        SampleId {
            id: self.top().id,
            stream_id: self.shared.id,
            ..by
        }
    }
}
