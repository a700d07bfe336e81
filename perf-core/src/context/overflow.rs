//! Overflows: accounts, records and reports of what was noticed.

use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use crate::attr::SampleType;
use crate::context::Context;
use crate::model::event::{Event, Source};
use crate::model::keys::EventKey;
use crate::model::lists::List;
use crate::model::regs::{Seen, Wants};
use crate::model::state::{Owner, State};
use crate::notify::Poll;
use crate::record::{Encode, Format, Lost, Sample, SampleId, Throttle, Words, Written};
use crate::sample::{Moment, Overflowed};

/// Reports taken out of a context in one go.
pub(crate) type Batch = SmallVec<[Overflowed; BATCH]>;
const BATCH: usize = 16;
/// Events by frequency whose periods a tick adjusts.
const FREQUENCIES_PER_TICK: usize = 64;
/// Periods of an event's samples that are due at one moment and not written yet.
type Due = SmallVec<[u64; 16]>;

/// Events whose overflows were noticed, and how far the search for them has come.
#[derive(Debug)]
pub(crate) struct Noticed {
    /// In the order they are to be served. A key whose event is gone by then, or another's, has nothing
    /// pending.
    keys: SmallVec<[EventKey; BATCH]>,
    /// The first so many armed events were not looked at yet.
    unseen: usize,
    /// Events that were served.
    pub served: u32,
    /// There may be others.
    pub more: bool,
}

impl Default for Noticed {
    fn default() -> Self {
        Self {
            keys: SmallVec::new(),
            unseen: usize::MAX,
            served: 0,
            more: false,
        }
    }
}

/// One go at serving events of a context: the moment, the limits in force, and where reports go.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    /// The vCPU on which it was noticed, and when, as trailers of records say them.
    pub by: SampleId,
    pub tick_hz: u64,
    pub sample_rate_hz: u64,
    /// Where that vCPU was; without it nothing is sampled.
    pub seen: Option<Seen<'a>>,
    pub batch: &'a mut Batch,
}

impl Context {
    /// Looks for events that overflowed, until there is a batch of them. Their overflows are pending from
    /// now on, and their drivers armed again.
    ///
    /// Armed events are gone through from the last to the first: whoever leaves the list is replaced by its
    /// last, which has been looked at by then, so none is missed when a group goes off meanwhile.
    pub fn notice_overflows(&mut self, noticed: &mut Noticed) {
        if !noticed.keys.is_empty() {
            return;
        }
        noticed.more = true;
        // First what is left from before, by itself: an event that is on again may have overflowed anew.
        while noticed.keys.len() < BATCH
            && let Some(key) = self.pending.pop()
        {
            noticed.keys.push(key);
        }
        if !noticed.keys.is_empty() {
            return;
        }
        while noticed.keys.len() < BATCH {
            let armed = self.lists.of(List::Armed);
            let Some(at) = armed.len().min(noticed.unseen).checked_sub(1) else {
                noticed.more = false;
                return;
            };
            noticed.unseen = at;
            let key = armed[at];
            let event = &mut self.events[key];
            if let Source::Driver(driver) = &mut event.source
                && let Some(raw) = driver.overflowed()
                && !event.sampling.throttled
            {
                let passed = event.sampling.passed(raw);
                event.sampling.pending = event.sampling.pending.saturating_add(passed);
                if event.sampling.is_on()
                    && let Err(error) = driver.rearm(raw, event.sampling.remaining(raw))
                {
                    log::warn!("event {} could not be armed again: {error}", event.shared.id);
                }
            }
            if event.sampling.pending > 0 {
                noticed.keys.push(key);
            }
        }
    }

    /// What samples of those that were noticed want of the registers.
    pub fn wants_of(&self, noticed: &Noticed) -> Wants {
        let mut wants = Wants::default();
        for &key in &noticed.keys {
            if let Some(event) = self.events.get(key)
                && event.sampling.pending > 0
                && event.output.is_some()
            {
                wants.add(&event.shared.attr);
            }
        }
        wants
    }

    /// Accounts what was noticed.
    pub fn account_overflows(&mut self, noticed: &mut Noticed, pass: &mut Pass<'_>) {
        for key in noticed.keys.drain(..) {
            let Some(event) = self.events.get_mut(key) else {
                continue;
            };
            let times = std::mem::take(&mut event.sampling.pending);
            // No sample follows the EXIT record of its vCPU.
            if times > 0 && !self.dead {
                noticed.served += 1;
                self.overflow(pass, key, times);
            }
        }
        // An event that went off while another was served may have overflowed, too.
        noticed.more |= !self.pending.is_empty();
    }

    /// Accounts `times` overflows of a driver's event that were noticed together: one interrupt, one sample
    /// that stands for all of them by its period. A sample's period is what the event counted since the
    /// one before, and not what was set: the two differ after a change, a throttle, or where several
    /// overflows are noticed at once.
    fn overflow(&mut self, pass: &mut Pass<'_>, key: EventKey, times: u32) {
        let mut due = Due::new();
        let sampling = &mut self.events[key].sampling;
        let period = sampling.account(0);
        let countdown = sampling.count_down(times);
        let throttle = self.one_overflow(pass, key, (true, times), period, &mut due);
        self.write_samples(pass, key, &mut due);
        self.report(key, countdown.counted, pass.batch);
        if countdown.last {
            self.limit_reached(key, pass.by.time_ns);
            // As many as were asked for, and no more: what passed beyond the last is dropped.
            self.events[key].sampling.pending = 0;
            // Its next start is still in the tick that throttled it, as the record says.
            if throttle {
                self.mark_throttled(key);
            }
        } else if throttle {
            self.throttle(key, pass.by.time_ns);
        }
    }

    /// Accounts `times` overflows of a raised event: each an overflow of its own, until a throttle or its
    /// limit breaks the burst. The samples of what remains are lost, as the interrupts of a throttled
    /// counter are; the next sample stands for their counts.
    pub(super) fn raised_overflow(&mut self, pass: &mut Pass<'_>, key: EventKey, times: u64) {
        let all = u32::try_from(times).unwrap_or(u32::MAX);
        let cookie = self.events[key].shared.cookie.is_some();
        if pass.seen.is_none() || self.events[key].sampling.throttled {
            if cookie {
                self.report(key, all, pass.batch);
            }
            return;
        }
        // One of them may change it.
        let apart = self.events[key].sampling.period;
        let mut done = 0u32;
        let mut due = Due::new();
        for i in 0..times {
            let sampling = &mut self.events[key].sampling;
            let period = sampling.account((times - 1 - i) * apart);
            let countdown = sampling.count_down(1);
            let throttle = self.one_overflow(pass, key, (i > 0, 1), period, &mut due);
            done = done.saturating_add(1);
            if countdown.last {
                self.write_samples(pass, key, &mut due);
                self.limit_reached(key, pass.by.time_ns);
            }
            if throttle {
                self.mark_throttled(key);
            }
            if countdown.last || throttle {
                break;
            }
        }
        self.write_samples(pass, key, &mut due);
        self.report(key, if cookie { all } else { done }, pass.batch);
    }

    /// Overflows that passed and were not served never will be: with their vCPU gone there is
    /// nothing to sample. Each event that owes a sample for them writes a LOST record in its place,
    /// or counts it as one that found no room.
    pub fn lose_pending(&mut self, by: SampleId) {
        while let Some(key) = self.pending.pop() {
            let event = &mut self.events[key];
            let times = std::mem::take(&mut event.sampling.pending);
            let Some(output) = event.output.as_ref().filter(|_| times > 0) else {
                continue;
            };
            let lost = Lost {
                id: output.owner,
                lost: 1,
                sample_id: event.sample_id(by),
            };
            let written = Written::from(lost.write(Format::from(&event.shared.attr), &output.ring));
            event.top().lost.fetch_add(1, Ordering::Relaxed);
            log::debug!(
                "event {} owes a sample for {times} periods of a vCPU that is gone: {written:?}",
                event.shared.id
            );
            self.lost_samples += 1;
        }
    }

    fn report(&self, key: EventKey, times: u32, batch: &mut Batch) {
        if let Some(cookie) = self.events[key].shared.cookie
            && times > 0
        {
            batch.push(Overflowed { cookie, times });
        }
    }

    /// One interrupt for `times` overflows: its accounts and its records, of which the sample may be left in
    /// `due` to be written with others. Whether the event is to be throttled now.
    fn one_overflow(
        &mut self,
        pass: &Pass<'_>,
        key: EventKey,
        (may_throttle, times): (bool, u32),
        period: u64,
        due: &mut Due,
    ) -> bool {
        let now = Moment {
            ns: pass.by.time_ns,
            tick: self.ticks,
        };
        let event = &mut self.events[key];
        event
            .sampling
            .note_overflow_time(times, now.ns, 1_000_000_000 / pass.tick_hz);
        let over = event
            .sampling
            .interrupt(times, now, pass.tick_hz, pass.sample_rate_hz);
        // The guest's own rate is limited where its PMIs are.
        let throttle = over && may_throttle && event.shared.owner != Owner::Guest;
        let begins = throttle && !event.sampling.throttled;
        self.throttles += u64::from(begins);
        if event.output.is_none() {
            // Who polls has the event that was opened, not the child of it that counts on this vCPU.
            event.top().notify.signal(Poll::IN);
            return throttle;
        }
        if begins || due.len() == due.inline_size() {
            self.write_samples(pass, key, due);
        }
        let event = &self.events[key];
        if begins {
            write_throttle(event, true, pass.by);
        }
        if pass.seen.is_some() {
            due.push(period);
        }
        throttle
    }

    /// The event has had all the overflows it was allowed.
    fn limit_reached(&mut self, key: EventKey, now_ns: u64) {
        let event = &self.events[key];
        event.shared.notify.signal(Poll::HUP);
        if let Some(output) = &event.output {
            if output.owner == event.shared.id {
                output.ring.hang_up();
            } else {
                output.ring.notify();
            }
        }
        self.disable(key, now_ns);
    }

    /// Writes the samples that are due: one for each period, of the same moment and therefore equal in all
    /// else.
    fn write_samples(&mut self, pass: &Pass<'_>, key: EventKey, due: &mut Due) {
        if due.is_empty() {
            return;
        }
        let event = &self.events[key];
        let (Some(output), Some(seen)) = (event.output.clone(), pass.seen) else {
            return;
        };
        let attr = &event.shared.attr;
        let format = Format::from(attr);
        let mut sample = Sample {
            misc: seen.mode.into(),
            pid: pass.by.pid,
            tid: pass.by.tid,
            time_ns: pass.by.time_ns,
            id: event.top().id,
            stream_id: event.shared.id,
            cpu: pass.by.cpu,
            ip: seen.ip,
            addr: seen.addr,
            callchain: Words::List(seen.callchain),
            raw: seen.raw,
            user: seen.user_for(attr),
            ..Sample::default()
        };
        let mut entries = std::mem::take(&mut self.entries);
        entries.clear();
        if format.sample_type.contains(SampleType::READ) {
            sample.read = self.read_values(key, pass.by.time_ns, &mut entries);
        }
        // A ring without room counts what it lost; one that can never take the record has none for it.
        let written = if let [period] = due[..] {
            sample.period = period;
            sample.write(format, &output.ring).into()
        } else {
            let samples = due.iter().map(|&period| Sample { period, ..sample });
            Sample::write_all(samples, format, &output.ring)
        };
        self.samples += written.written;
        self.lost_samples += written.lost;
        self.events[key].count_lost(written);
        if written.unfit > 0 {
            log::debug!(
                "{} samples of event {} do not fit its ring, which takes records of up to {} bytes",
                written.unfit,
                sample.stream_id,
                output.ring.record_max()
            );
        }
        due.clear();
        self.entries = entries;
    }

    /// Switches an event's overflows off until the next tick. It goes on counting.
    fn throttle(&mut self, key: EventKey, now_ns: u64) {
        let event = &mut self.events[key];
        if event.state != State::Active {
            event.sampling.throttled = true;
            return;
        }
        let raw = event.raw();
        event.sampling.disarm_at(raw);
        self.mark_throttled(key);
        let event = &mut self.events[key];
        if let Err(error) = event.restart() {
            self.fell_off(key, &error, now_ns);
        }
    }

    fn unthrottle(&mut self, key: EventKey, now_ns: u64, by: SampleId) {
        let event = &mut self.events[key];
        event.sampling.throttled = false;
        write_throttle(event, false, by);
        let raw = event.raw();
        if matches!(event.source, Source::Driver(_)) {
            event.sampling.arm_at(raw);
        }
        if let Err(error) = event.restart() {
            self.fell_off(key, &error, now_ns);
        }
    }

    /// The sampling half of a tick: lifts throttles, and adjusts frequencies of what is on. The work has a
    /// bound: lifting a throttle costs less than the overflows that led to it, and where many events
    /// follow frequencies each tick looks at some of them.
    ///
    /// `by` is whose tick it is, for records that it writes. [`Context::ticks`] has been advanced.
    pub fn tick_sampling(&mut self, now_ns: u64, tick_hz: u64, sample_rate_hz: u64, by: SampleId) {
        let tick = self.ticks;
        while let Some(&key) = self.lists.of(List::Throttled).last() {
            self.unlist(List::Throttled, key);
            let _ = self.events[key].sampling.tick(tick, tick_hz, sample_rate_hz);
            self.unthrottle(key, now_ns, by);
        }
        let many = self.lists.of(List::Frequency).len();
        for _ in 0..many.min(FREQUENCIES_PER_TICK) {
            let keys = self.lists.of(List::Frequency);
            self.next_frequency = if self.next_frequency < keys.len() {
                self.next_frequency
            } else {
                0
            };
            let Some(&key) = keys.get(self.next_frequency) else {
                break;
            };
            self.next_frequency += 1;
            if self.events[key].sampling.tick(tick, tick_hz, sample_rate_hz) {
                self.restart_stalled(key);
            }
        }
    }

    /// A period that became huge by accident must not stall the event: begin a new one.
    fn restart_stalled(&mut self, key: EventKey) {
        let event = &mut self.events[key];
        let raw = event.raw();
        // An overflow that passed and waits to be served is no stall.
        let passed = event.sampling.passed(raw);
        if passed > 0 {
            event.sampling.pending = event.sampling.pending.saturating_add(passed);
            self.put_by(key);
        } else {
            event.sampling.restart(raw);
        }
        let event = &mut self.events[key];
        if let Source::Driver(driver) = &mut event.source
            && let Err(error) = driver.arm(event.sampling.remaining(raw))
        {
            log::warn!("event {} could not be armed again: {error}", event.shared.id);
        }
    }
}

/// THROTTLE or UNTHROTTLE.
fn write_throttle(event: &Event, throttled: bool, by: SampleId) {
    event.write_record(&Throttle {
        throttled,
        time_ns: by.time_ns,
        id: event.top().id,
        stream_id: event.shared.id,
        sample_id: event.sample_id(by),
    });
}
