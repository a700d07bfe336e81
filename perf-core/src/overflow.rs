//! Overflows: from "the driver's signal was seen" to accounts, records and reports.

use std::sync::atomic::Ordering;

use smallvec::SmallVec;

use crate::attr::{ReadFormat, SampleType};
use crate::context::{Context, ContextCell, List};
use crate::core::CoreInner;
use crate::event::{Event, Owner, Source, State};
use crate::notify::Poll;
use crate::pmu::VcpuId;
use crate::record::{
    CpuMode, Encode, Entries, Format, ReadEntry, ReadValues, Sample, SampleId, Throttle, Words,
};
use crate::sample::{Moment, Overflowed};
use crate::software::{Level, LevelGuard};
use crate::time::Times;

/// Most entries of a call chain, as the kernel's default.
pub const CALLCHAIN_MAX: usize = 127;

/// Where the vCPU was when an event overflowed. Asked only for what a sample needs.
pub trait SampleRegs {
    /// The mode.
    fn mode(&mut self) -> CpuMode;
    /// The instruction pointer.
    fn ip(&mut self) -> u64;
    /// The call chain, innermost first, with the context markers of the kernel's ABI; fills `out` from its
    /// start and returns how many entries there are.
    fn callchain(&mut self, _out: &mut [u64]) -> usize {
        0
    }
    /// The address the event is about.
    fn addr(&mut self) -> u64 {
        0
    }
    /// Raw data for `RAW` samples (Perfvisor: CR3 and what else the VMM wants to tell).
    fn raw(&mut self) -> &[u8] {
        &[]
    }
}

/// Reports taken out of a context in one go.
pub(crate) type Batch = SmallVec<[Overflowed; 16]>;
const BATCH: usize = 16;
/// Events by frequency whose periods a tick adjusts.
const FREQUENCIES_PER_TICK: usize = 64;
/// Periods of an event's samples that are due at one moment and not written yet.
type Due = SmallVec<[u64; 16]>;

pub(crate) fn service(
    core: &CoreInner,
    cell: &ContextCell,
    regs: &mut dyn SampleRegs,
    sink: &mut dyn FnMut(Overflowed),
) -> u32 {
    let mut served = serve(core, cell, cell, regs, sink);
    // Looked at without its lock: the VM context must not be a lock that all vCPUs share.
    if core.vm.to_serve.swap(false, Ordering::Acquire) || core.vm.deferred.is_waiting() {
        served += serve(core, &core.vm, cell, regs, sink);
        core.vm.lock().look_again_if_armed();
    }
    served
}

/// Serves what overflowed in the context of `cell` and was noticed by the vCPU of `origin`.
fn serve(
    core: &CoreInner,
    cell: &ContextCell,
    origin: &ContextCell,
    regs: &mut dyn SampleRegs,
    sink: &mut dyn FnMut(Overflowed),
) -> u32 {
    let (mut unseen, mut served) = (usize::MAX, 0);
    loop {
        let mut batch = Batch::new();
        let more = {
            // What the registers raise while the lock is held is dropped, as it is while a raised event is
            // served: it would wait for the lock of this very thread.
            let Some(_level) = LevelGuard::enter(Level::Thread) else {
                return served;
            };
            let now_ns = cell.now_ns();
            let mut context = cell.lock();
            context.take_overflows(core, origin, now_ns, regs, &mut unseen, &mut served, &mut batch)
        };
        batch.drain(..).for_each(&mut *sink);
        if !more {
            return served;
        }
    }
}

impl Context {
    /// Serves pending events and those of the first `unseen` armed ones that overflowed, until `batch` is
    /// full. Returns whether there may be more.
    ///
    /// Armed events are gone through from the last to the first: whoever leaves the list is replaced by its
    /// last, which has been looked at by then, so none is missed when a group goes off meanwhile.
    #[allow(clippy::too_many_arguments)]
    fn take_overflows(
        &mut self,
        core: &CoreInner,
        cell: &ContextCell,
        now_ns: u64,
        regs: &mut dyn SampleRegs,
        unseen: &mut usize,
        served: &mut u32,
        batch: &mut Batch,
    ) -> bool {
        loop {
            // An event that goes off while another is served may have overflowed, too.
            while let Some(key) = self.pending.pop() {
                let times = std::mem::take(&mut self.events[key].sampling.pending);
                *served += u32::from(times > 0);
                self.overflow(core, cell, key, times, now_ns, regs, batch);
                if batch.len() == BATCH {
                    return true;
                }
            }
            let armed = self.lists.of(List::Armed);
            let Some(at) = armed.len().min(*unseen).checked_sub(1) else {
                return false;
            };
            *unseen = at;
            let key = armed[at];
            let event = &mut self.events[key];
            let mut times = std::mem::take(&mut event.sampling.pending);
            if let Source::Driver(driver) = &mut event.source
                && let Some(raw) = driver.overflowed()
                && !event.sampling.throttled
            {
                times = times.saturating_add(event.sampling.passed(raw));
                if event.sampling.is_on()
                    && let Err(error) = driver.rearm(raw, event.sampling.remaining(raw))
                {
                    log::warn!("event {} could not be armed again: {error}", event.shared.id);
                }
            }
            *served += u32::from(times > 0);
            self.overflow(core, cell, key, times, now_ns, regs, batch);
            if batch.len() == BATCH {
                return true;
            }
        }
    }

    /// Accounts `times` overflows of a driver's event that were noticed together: one interrupt, one sample
    /// that stands for all of them by its period. A sample's period is what the event counted since the
    /// one before, and not what was set: the two differ after a change, a throttle, or where several
    /// overflows are noticed at once.
    #[allow(clippy::too_many_arguments)]
    fn overflow(
        &mut self,
        core: &CoreInner,
        cell: &ContextCell,
        key: usize,
        times: u32,
        now_ns: u64,
        regs: &mut dyn SampleRegs,
        batch: &mut Batch,
    ) {
        if times == 0 {
            return;
        }
        let period = self.events[key].sampling.account(0);
        let countdown = self.events[key].sampling.count_down(times);
        let mut due = Due::new();
        let throttle = self.one_overflow(
            core,
            cell,
            key,
            (true, times),
            period,
            now_ns,
            Some(regs),
            &mut due,
        );
        self.write_samples(core, cell, key, &mut due, now_ns, Some(regs));
        self.report(key, countdown.counted, batch);
        if countdown.last {
            self.limit_reached(key, now_ns);
            // As many as were asked for, and no more: what passed beyond the last is dropped.
            self.events[key].sampling.pending = 0;
            // Its next start is still in the tick that throttled it, as the record says.
            if throttle {
                self.mark_throttled(key);
            }
        } else if throttle {
            self.throttle(key, now_ns);
        }
    }

    /// Accounts `times` overflows of a raised event: each an overflow of its own, until a throttle or its
    /// limit breaks the burst. The samples of what remains are lost, as the interrupts of a throttled
    /// counter are; the next sample stands for their counts.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn raised_overflow(
        &mut self,
        core: &CoreInner,
        origin: &ContextCell,
        key: usize,
        times: u64,
        now_ns: u64,
        mut regs: Option<&mut dyn SampleRegs>,
        batch: &mut Batch,
    ) {
        let cookie = self.events[key].shared.cookie.is_some();
        if regs.is_none() || self.events[key].sampling.throttled {
            if cookie {
                self.report(key, u32::try_from(times).unwrap_or(u32::MAX), batch);
            }
            return;
        }
        // One of them may change it.
        let apart = self.events[key].sampling.period;
        let mut done = 0u32;
        let mut due = Due::new();
        for i in 0..times {
            let period = self.events[key].sampling.account((times - 1 - i) * apart);
            let countdown = self.events[key].sampling.count_down(1);
            let now = regs.as_deref_mut().map(|r| r as &mut dyn SampleRegs);
            let throttle = self.one_overflow(core, origin, key, (i > 0, 1), period, now_ns, now, &mut due);
            done = done.saturating_add(1);
            if countdown.last {
                self.write_samples(
                    core,
                    origin,
                    key,
                    &mut due,
                    now_ns,
                    regs.as_deref_mut().map(|r| r as _),
                );
                self.limit_reached(key, now_ns);
                if throttle {
                    self.mark_throttled(key);
                }
                break;
            }
            if throttle {
                self.mark_throttled(key);
                break;
            }
        }
        self.write_samples(core, origin, key, &mut due, now_ns, regs);
        let reported = if cookie {
            u32::try_from(times).unwrap_or(u32::MAX)
        } else {
            done
        };
        self.report(key, reported, batch);
    }

    /// Overflows that passed and were not served never will be: with their vCPU gone there is nothing to
    /// sample.
    pub fn forget_pending(&mut self) {
        while let Some(key) = self.pending.pop() {
            self.events[key].sampling.pending = 0;
        }
    }

    fn report(&self, key: usize, times: u32, batch: &mut Batch) {
        if let Some(cookie) = self.events[key].shared.cookie
            && times > 0
        {
            batch.push(Overflowed { cookie, times });
        }
    }

    /// One interrupt for `times` overflows: its accounts and its records, of which the sample may be left in
    /// `due` to be written with others. Whether the event is to be throttled now.
    #[allow(clippy::too_many_arguments)]
    fn one_overflow(
        &mut self,
        core: &CoreInner,
        origin: &ContextCell,
        key: usize,
        (may_throttle, times): (bool, u32),
        period: u64,
        now_ns: u64,
        regs: Option<&mut dyn SampleRegs>,
        due: &mut Due,
    ) -> bool {
        let now = Moment {
            ns: now_ns,
            tick: self.ticks,
        };
        let event = &mut self.events[key];
        let tick_hz = core.config.tick_hz.max(1);
        event
            .sampling
            .note_overflow_time(times, now_ns, 1_000_000_000 / tick_hz);
        let over = event
            .sampling
            .interrupt(times, now, tick_hz, core.limits.sample_rate_hz());
        // The guest's own rate is limited where its PMIs are.
        let throttle = over && may_throttle && event.shared.owner != Owner::Guest;
        self.throttles += u64::from(throttle && !event.sampling.throttled);
        if event.output.is_none() {
            // Who polls has the event that was opened, not the child of it that counts on this vCPU.
            event.top().notify.signal(Poll::IN);
            return throttle;
        }
        let begins = throttle && !event.sampling.throttled;
        let samples = regs.is_some();
        if begins || due.len() == due.inline_size() {
            self.write_samples(core, origin, key, due, now_ns, regs);
        }
        let event = &self.events[key];
        if begins {
            write_throttle(event, true, core.written_by(origin, now_ns));
        }
        if samples {
            due.push(period);
        }
        throttle
    }

    /// The event has had all the overflows it was allowed.
    fn limit_reached(&mut self, key: usize, now_ns: u64) {
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
    fn write_samples(
        &mut self,
        core: &CoreInner,
        origin: &ContextCell,
        key: usize,
        due: &mut Due,
        now_ns: u64,
        regs: Option<&mut dyn SampleRegs>,
    ) {
        let (Some(output), Some(regs), false) = (self.events[key].output.clone(), regs, due.is_empty())
        else {
            return;
        };
        let attr = &self.events[key].shared.attr;
        let format = Format::from(attr);
        let wants = |field| format.sample_type.contains(field);
        let (vcpu, tid) = origin.vcpu().unwrap_or((VcpuId(0), 0));
        let mut sample = Sample {
            misc: regs.mode().into(),
            pid: core.config.pid,
            tid: tid as u32,
            time_ns: now_ns,
            id: self.events[key].top().id,
            stream_id: self.events[key].shared.id,
            cpu: vcpu.0,
            ..Sample::default()
        };
        if wants(SampleType::IP) {
            sample.ip = regs.ip();
        }
        if wants(SampleType::ADDR) {
            sample.addr = regs.addr();
        }
        let mut entries = std::mem::take(&mut self.entries);
        entries.clear();
        if wants(SampleType::READ) {
            sample.read = self.read_values(key, now_ns, &mut entries);
        }
        let mut chain = [0; CALLCHAIN_MAX];
        if wants(SampleType::CALLCHAIN) {
            let n = regs.callchain(&mut chain).min(CALLCHAIN_MAX);
            sample.callchain = Words::List(&chain[..n]);
        }
        if wants(SampleType::RAW) {
            sample.raw = regs.raw();
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

    /// The reading a record carries: own and exited children's totals, not those of live ones, whose contexts
    /// have locks of their own.
    pub(crate) fn read_values<'a>(
        &mut self,
        key: usize,
        now_ns: u64,
        entries: &'a mut Vec<ReadEntry>,
    ) -> ReadValues<'a> {
        let group = self.events[key].group;
        let is_group = self.events[key]
            .shared
            .attr
            .read_format
            .contains(ReadFormat::GROUP);
        let n = if is_group {
            self.groups[group].members.len()
        } else {
            1
        };
        let mut times = Times::default();
        for i in 0..n.min(entries.capacity()) {
            let member = if is_group {
                self.groups[group].members[i]
            } else {
                key
            };
            let mut totals = self.totals(member, now_ns);
            let event = &self.events[member];
            if event.parent.is_none() {
                totals.add(event.shared.folded.load());
            }
            if i == 0 {
                times = totals.times;
            }
            entries.push(ReadEntry {
                value: totals.count,
                id: event.top().id,
                lost: event.top().lost.load(Ordering::Relaxed),
            });
        }
        ReadValues {
            time_enabled_ns: times.enabled_ns,
            time_running_ns: times.running_ns,
            entries: Entries::List(entries),
        }
    }

    /// Switches an event's overflows off until the next tick. It goes on counting.
    fn throttle(&mut self, key: usize, now_ns: u64) {
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

    fn unthrottle(&mut self, key: usize, now_ns: u64, by: SampleId) {
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
    /// `by` is whose tick it is, for records that it writes.
    pub fn tick_sampling(&mut self, now_ns: u64, tick_hz: u64, sample_rate_hz: u64, by: SampleId) {
        self.ticks += 1;
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
    fn restart_stalled(&mut self, key: usize) {
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
