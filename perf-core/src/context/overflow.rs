//! Overflows of the events in a context: accounting, records, and reports to the VMM.

use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use crate::attr::SampleType;
use crate::context::Context;
use crate::model::event::{Event, Source};
use crate::model::keys::EventKey;
use crate::model::lists::EventList;
use crate::model::regs::{RegsRequest, SampledRegs};
use crate::model::state::{EventState, Owner};
use crate::notify::PollState;
use crate::record::{
    EncodeRecord, LostRecord, RecordFormat, RecordWriteOutcome, Sample, SampleId, SampleWords, ThrottleRecord,
};
use crate::sample::{OverflowReport, TickTime};

/// Overflow reports that are taken from a context at once.
pub(crate) type ReportBatch = SmallVec<[OverflowReport; BATCH]>;
const BATCH: usize = 16;
/// Maximum number of frequency-based events whose periods one tick adjusts.
const FREQUENCIES_PER_TICK: usize = 64;
/// Periods of the samples of one event that are due at the same time and have not been written.
type DuePeriods = SmallVec<[u64; 16]>;

/// A search for the events of a context that have overflowed: its progress and its results.
#[derive(Debug)]
pub(crate) struct OverflowSearch {
    /// Keys of overflowed events in the order in which they are serviced. The key of an event that
    /// was removed meanwhile is unused or belongs to a new event without pending overflows.
    keys: SmallVec<[EventKey; BATCH]>,
    /// Keys of events whose samples cannot be written until their branch stacks are known.
    postponed: SmallVec<[EventKey; BATCH]>,
    /// Number of armed events that the search has not checked yet.
    unseen: usize,
    /// Number of events whose overflows have been serviced.
    pub served: u32,
    /// `true` if the search must continue because more events may have overflowed.
    pub more: bool,
}

impl Default for OverflowSearch {
    fn default() -> Self {
        Self {
            keys: SmallVec::new(),
            postponed: SmallVec::new(),
            unseen: usize::MAX,
            served: 0,
            more: false,
        }
    }
}

/// Parameters of one pass that services the overflows of a context: time, limits and the
/// destination of reports.
#[derive(Debug)]
pub(crate) struct ServicePass<'a> {
    /// vCPU and time of the overflow, for the trailers of records.
    pub by: SampleId,
    pub tick_hz: u64,
    pub sample_rate_hz: u64,
    /// Registers of the vCPU, or `None` if the registers are unknown and no sample can be taken.
    pub regs: Option<SampledRegs<'a>>,
    pub batch: &'a mut ReportBatch,
}

impl Context {
    /// Searches for overflowed events until a batch is full. Marks their overflows as pending and
    /// rearms their drivers.
    ///
    /// The armed events are visited from last to first. An event that leaves the list is replaced
    /// by the last one, which has already been checked, so no event is missed if a group is
    /// scheduled out meanwhile.
    pub fn notice_overflows(&mut self, noticed: &mut OverflowSearch) {
        if !noticed.keys.is_empty() {
            return;
        }
        noticed.more = true;
        // Returns the pending overflows of earlier passes in a batch of their own, because an event
        // in it may be active again and have a new overflow.
        while noticed.keys.len() < BATCH
            && let Some(key) = self.pending.pop()
        {
            noticed.keys.push(key);
        }
        if !noticed.keys.is_empty() {
            return;
        }
        while noticed.keys.len() < BATCH {
            let armed = self.lists.of(EventList::Armed);
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
                if event.sampling.can_overflow()
                    && let Err(error) = driver.rearm(raw, event.sampling.remaining(raw))
                {
                    log::warn!("cannot re-arm event {}: {error}", event.shared.id);
                }
            }
            if event.sampling.pending > 0 {
                noticed.keys.push(key);
            }
        }
    }

    /// Returns the register data that the samples of the overflowed events need.
    pub fn regs_request(&self, noticed: &OverflowSearch) -> RegsRequest {
        let mut wants = RegsRequest::default();
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

    /// Accounts for the overflows that were found in a search, and writes their records. Postpones
    /// events whose branch stacks are not known yet.
    pub fn account_overflows(&mut self, noticed: &mut OverflowSearch, pass: &mut ServicePass<'_>) {
        for key in noticed.keys.drain(..) {
            let Some(event) = self.events.get_mut(key) else {
                continue;
            };
            if event.needs_branches() && pass.regs.is_some_and(|seen| seen.branches.is_none()) {
                noticed.postponed.push(key);
                continue;
            }
            let times = std::mem::take(&mut event.sampling.pending);
            // The EXIT record must be the last record of a vCPU, so no sample may follow it.
            if times > 0 && !self.dead {
                noticed.served += 1;
                self.overflow(pass, key, times);
            }
        }
        // Servicing an overflow may schedule other events out. Their overflows are then pending.
        noticed.more |= !self.pending.is_empty();
        if !noticed.more {
            for key in noticed.postponed.drain(..) {
                self.queue_pending(key);
            }
        }
    }

    /// Accounts for `times` overflows of a driver event that were found together, as one interrupt
    /// and one sample with a period that covers all of them.
    ///
    /// The period of a sample is the number of counts since the previous sample, rather than the
    /// configured period. The two differ after a change of the period, after throttling, and if
    /// several overflows are found together.
    fn overflow(&mut self, pass: &mut ServicePass<'_>, key: EventKey, times: u32) {
        let mut due = DuePeriods::new();
        let sampling = &mut self.events[key].sampling;
        let period = sampling.account(0);
        let countdown = sampling.count_down(times);
        let throttle = self.one_overflow(pass, key, true, period, &mut due);
        self.write_samples(pass, key, &mut due);
        self.report(key, countdown.counted, pass.batch);
        if countdown.last {
            self.limit_reached(key, pass.by.time_ns);
            // Drops further overflows of an event that has reached its limit.
            self.events[key].sampling.pending = 0;
            // A THROTTLE record was written, so the event must stay throttled until the next tick.
            if throttle {
                self.mark_throttled(key);
            }
        } else if throttle {
            self.throttle(key, pass.by.time_ns);
        }
    }

    /// Accounts for `times` overflows of a software event that the VMM raised.
    ///
    /// If the registers are known, each overflow yields a sample until the event is throttled or
    /// reaches its overflow limit. Further overflows have no samples of their own: their counts are
    /// included in the next sample. If the event has a cookie, they are still reported to the VMM,
    /// up to the event's overflow limit.
    pub(super) fn raised_overflow(&mut self, pass: &mut ServicePass<'_>, key: EventKey, times: u64) {
        let event = &self.events[key];
        let (done, ended) = if pass.regs.is_none() || event.sampling.throttled {
            (0, false)
        } else if event.output.is_none() && event.shared.owner == Owner::Guest {
            // The overflows of a guest counter need neither samples nor throttling and are
            // accounted for together.
            let mut due = DuePeriods::new();
            let _ = self.events[key].sampling.account(0);
            let _ = self.one_overflow(pass, key, false, 0, &mut due);
            (0, false)
        } else {
            self.raised_samples(pass, key, times)
        };
        let event = &mut self.events[key];
        if event.shared.cookie.is_none() {
            return;
        }
        let mut reported = done;
        if !ended {
            let rest = u32::try_from(times - u64::from(done)).unwrap_or(u32::MAX);
            let countdown = event.sampling.count_down(rest);
            reported = done.saturating_add(countdown.counted);
            if countdown.last {
                self.limit_reached(key, pass.by.time_ns);
            }
        }
        self.report(key, reported, pass.batch);
    }

    /// Writes samples for up to `times` overflows of a raised event, until the event is throttled
    /// or reaches its overflow limit. Returns the number of overflows that were accounted for, and
    /// `true` if the limit was reached.
    fn raised_samples(&mut self, pass: &ServicePass<'_>, key: EventKey, times: u64) -> (u32, bool) {
        // Saved, because the loop may change the period.
        let apart = self.events[key].sampling.period;
        let mut due = DuePeriods::new();
        let (mut done, mut ended) = (0u32, false);
        for i in 0..times {
            let sampling = &mut self.events[key].sampling;
            let period = sampling.account((times - 1 - i) * apart);
            ended = sampling.count_down(1).last;
            let throttle = self.one_overflow(pass, key, i > 0, period, &mut due);
            done = done.saturating_add(1);
            if ended {
                self.write_samples(pass, key, &mut due);
                self.limit_reached(key, pass.by.time_ns);
            }
            if throttle {
                self.mark_throttled(key);
            }
            if ended || throttle {
                break;
            }
        }
        self.write_samples(pass, key, &mut due);
        (done, ended)
    }

    /// Discards the pending overflows of all events after the vCPU was removed, because its
    /// registers are no longer available for samples. Each of these events that has a ring counts
    /// one lost sample and writes a LOST record, or counts it in the ring if the ring is full.
    pub fn discard_pending(&mut self, by: SampleId) {
        while let Some(key) = self.pending.pop() {
            let event = &mut self.events[key];
            let times = std::mem::take(&mut event.sampling.pending);
            let Some(output) = event.output.as_ref().filter(|_| times > 0) else {
                continue;
            };
            let lost = LostRecord {
                id: output.owner,
                lost: 1,
                sample_id: event.sample_id(by),
            };
            let written =
                RecordWriteOutcome::from(lost.write(RecordFormat::from(&event.shared.attr), &output.ring));
            event.top().lost.fetch_add(1, Ordering::Relaxed);
            log::debug!(
                "event {} owes a sample for {times} periods of a vCPU that is gone: {written:?}",
                event.shared.id
            );
            self.lost_samples += 1;
        }
    }

    fn report(&self, key: EventKey, times: u32, batch: &mut ReportBatch) {
        if let Some(cookie) = self.events[key].shared.cookie
            && times > 0
        {
            batch.push(OverflowReport { cookie, times });
        }
    }

    /// Accounts for one interrupt and writes its records, except the sample, whose period is added
    /// to `due`. The caller writes the samples in `due`. Returns `true` if the event must be
    /// throttled now.
    fn one_overflow(
        &mut self,
        pass: &ServicePass<'_>,
        key: EventKey,
        may_throttle: bool,
        period: u64,
        due: &mut DuePeriods,
    ) -> bool {
        let now = TickTime {
            ns: pass.by.time_ns,
            tick: self.ticks,
        };
        if self.events[key].sampling.is_adaptive() {
            let running_ns = self.running_ns(key, self.clock.time_at(now.ns));
            let tick_ns = 1_000_000_000 / pass.tick_hz;
            self.events[key]
                .sampling
                .note_overflow(now.ns, running_ns, tick_ns);
        }
        let event = &mut self.events[key];
        let over = event.sampling.interrupt(now, pass.tick_hz, pass.sample_rate_hz);
        // Guest counters are never throttled here, because the VMM limits their rate at PMI
        // delivery.
        let throttle = over && may_throttle && event.shared.owner != Owner::Guest;
        let begins = throttle && !event.sampling.throttled;
        self.throttles += u64::from(begins);
        if event.output.is_none() {
            // Pollers hold a handle of the parent event rather than of the child that counts on
            // this vCPU.
            event.top().notify.signal(PollState::IN);
            return throttle;
        }
        if begins || due.len() == due.inline_size() {
            self.write_samples(pass, key, due);
        }
        let event = &self.events[key];
        if begins {
            write_throttle(event, true, pass.by);
        }
        if pass.regs.is_some() {
            due.push(period);
        }
        throttle
    }

    /// Disables an event that has reached its overflow limit. Signals a hang-up to the event's
    /// pollers and to the reader of the event's own ring.
    fn limit_reached(&mut self, key: EventKey, now_ns: u64) {
        let event = &self.events[key];
        event.shared.notify.signal(PollState::HUP);
        if let Some(output) = &event.output {
            if output.owner == event.shared.id {
                output.ring.hang_up();
            } else {
                output.ring.notify();
            }
        }
        self.disable(key, now_ns);
    }

    /// Writes one sample for each period in `due`. The samples are taken at the same time and
    /// differ only in their periods.
    fn write_samples(&mut self, pass: &ServicePass<'_>, key: EventKey, due: &mut DuePeriods) {
        if due.is_empty() {
            return;
        }
        let event = &self.events[key];
        let (Some(output), Some(seen)) = (event.output.clone(), pass.regs) else {
            return;
        };
        let attr = &event.shared.attr;
        let format = RecordFormat::from(attr);
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
            callchain: SampleWords::List(seen.callchain),
            raw: seen.raw,
            user: seen.user_for(attr),
            ..Sample::default()
        };
        let mut branches = std::mem::take(&mut self.branch_words);
        if format.sample_type.contains(SampleType::BRANCH_STACK) {
            branches.clear();
            seen.branches_for(attr, &mut branches);
            sample.branches = SampleWords::List(&branches);
        }
        let mut entries = std::mem::take(&mut self.entries);
        entries.clear();
        if format.sample_type.contains(SampleType::READ) {
            sample.read = self.read_values(key, pass.by.time_ns, &mut entries);
        }
        // Records that do not fit a full ring are counted as lost. Records that are too large for
        // the ring are not counted.
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
        if written.oversized > 0 {
            log::debug!(
                "{} samples of event {} do not fit its ring, which takes records of up to {} bytes",
                written.oversized,
                sample.stream_id,
                output.ring.record_max()
            );
        }
        due.clear();
        self.entries = entries;
        self.branch_words = branches;
    }

    /// Throttles an event: suppresses its overflows until the next tick. The event continues to
    /// count.
    fn throttle(&mut self, key: EventKey, now_ns: u64) {
        let event = &mut self.events[key];
        if event.state != EventState::Active {
            event.sampling.throttled = true;
            return;
        }
        let raw = event.raw();
        event.sampling.disarm_at(raw);
        self.mark_throttled(key);
        let event = &mut self.events[key];
        if let Err(error) = event.restart() {
            self.handle_restart_failure(key, &error, now_ns);
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
            self.handle_restart_failure(key, &error, now_ns);
        }
    }

    /// Performs the sampling part of a tick: unthrottles events, and adjusts the periods of active
    /// frequency-based events.
    ///
    /// The work per tick is bounded. Unthrottling costs less than the overflows that caused the
    /// throttling. Besides the periods of throttled events, a tick adjusts at most
    /// [`FREQUENCIES_PER_TICK`] periods, and the next tick continues with the following events.
    ///
    /// `by` identifies the source of the tick in records.
    pub fn tick_sampling(&mut self, now_ns: u64, tick_hz: u64, by: SampleId) {
        let time = self.clock.advance(now_ns);
        let tick_ns = 1_000_000_000 / tick_hz.max(1);
        while let Some(&key) = self.lists.of(EventList::Throttled).last() {
            self.remove_from_list(EventList::Throttled, key);
            // Adjusts the period first, because overflows were not accounted for while the event
            // was throttled.
            self.adjust_period(key, time, 0);
            self.unthrottle(key, now_ns, by);
        }
        let many = self.lists.of(EventList::Frequency).len();
        for _ in 0..many.min(FREQUENCIES_PER_TICK) {
            let keys = self.lists.of(EventList::Frequency);
            self.next_frequency = if self.next_frequency < keys.len() {
                self.next_frequency
            } else {
                0
            };
            let Some(&key) = keys.get(self.next_frequency) else {
                break;
            };
            self.next_frequency += 1;
            if self.adjust_period(key, time, tick_ns) {
                self.restart_stalled(key);
            }
        }
    }

    /// Adjusts the period of an active frequency-based event if the event has run for the target
    /// interval, and for at least `min_ns`, without an adjustment. Returns `true` if the rest of
    /// the current period is so long that the event would not overflow for a long time.
    ///
    /// Costs one driver read. The read of a host event on another thread interrupts that thread's
    /// guest.
    fn adjust_period(&mut self, key: EventKey, time: u64, min_ns: u64) -> bool {
        let running_ns = self.running_ns(key, time);
        let event = &mut self.events[key];
        if !event.sampling.needs_measurement(running_ns, min_ns) {
            return false;
        }
        let raw = event.raw();
        event.sampling.measure(raw, running_ns)
    }

    /// Returns the time running of an event at context time `time`, in nanoseconds.
    fn running_ns(&self, key: EventKey, time: u64) -> u64 {
        let event = &self.events[key];
        event
            .times
            .at(event.state, self.leader_state(key), time)
            .running_ns
    }

    /// Starts a new period for an event whose current period is so long that the event would not
    /// overflow for a long time.
    fn restart_stalled(&mut self, key: EventKey) {
        let event = &mut self.events[key];
        let raw = event.raw();
        // An overflow that waits for service is not a stall.
        let passed = event.sampling.passed(raw);
        if passed > 0 {
            event.sampling.pending = event.sampling.pending.saturating_add(passed);
            self.queue_pending(key);
        } else {
            event.sampling.restart(raw);
        }
        let event = &mut self.events[key];
        if let Source::Driver(driver) = &mut event.source
            && let Err(error) = driver.arm(event.sampling.remaining(raw))
        {
            log::warn!("cannot re-arm event {}: {error}", event.shared.id);
        }
    }
}

/// Writes a THROTTLE or UNTHROTTLE record to the ring of an event.
fn write_throttle(event: &Event, throttled: bool, by: SampleId) {
    event.write_record(&ThrottleRecord {
        throttled,
        time_ns: by.time_ns,
        id: event.top().id,
        stream_id: event.shared.id,
        sample_id: event.sample_id(by),
    });
}
