//! Overflows: from "the driver's signal was seen" to accounts, records and reports.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::context::{Context, ContextCell};
use crate::core::CoreInner;
use crate::event::{Owner, Source, State};
use crate::notify::Poll;
use crate::sample::Overflowed;

/// Which mode the CPU was in; the `misc` field of records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpuMode {
    /// The host's kernel (`PERF_RECORD_MISC_KERNEL`).
    Kernel,
    /// The host's user space (`PERF_RECORD_MISC_USER`).
    User,
    /// The guest at CPL0 (`PERF_RECORD_MISC_GUEST_KERNEL`).
    GuestKernel,
    /// The guest at CPL3 (`PERF_RECORD_MISC_GUEST_USER`).
    GuestUser,
}

/// Where the vCPU was when an event overflowed. Asked only for what a sample needs.
pub trait SampleRegs {
    /// The mode.
    fn mode(&mut self) -> CpuMode;
    /// The instruction pointer.
    fn ip(&mut self) -> u64;
    /// The call chain, innermost first, with the context markers of the kernel's ABI; fills `out` from its start and
    /// returns how many entries there are.
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
type Batch = SmallVec<[Overflowed; 16]>;
const BATCH: usize = 16;

pub(crate) fn service(
    core: &CoreInner,
    cell: &Arc<ContextCell>,
    regs: &mut dyn SampleRegs,
    sink: &mut dyn FnMut(Overflowed),
) {
    let mut at = 0;
    loop {
        let mut batch = Batch::new();
        let more = {
            let now_ns = cell.now_ns();
            let mut context = cell.lock();
            context.take_overflows(core, now_ns, regs, &mut at, &mut batch)
        };
        for report in batch {
            sink(report);
        }
        if !more {
            return;
        }
    }
}

impl Context {
    /// Serves pending and armed events from position `at` on, until `batch` is full. Returns whether there are more.
    fn take_overflows(
        &mut self,
        core: &CoreInner,
        now_ns: u64,
        regs: &mut dyn SampleRegs,
        at: &mut usize,
        batch: &mut Batch,
    ) -> bool {
        while let Some(key) = self.pending.pop() {
            let times = std::mem::take(&mut self.events[key].sampling.pending);
            self.overflow(core, key, times, now_ns, regs, batch);
            if batch.len() == BATCH {
                return true;
            }
        }
        while let Some(&key) = self.armed.get(*at) {
            *at += 1;
            let event = &mut self.events[key];
            let mut times = std::mem::take(&mut event.sampling.pending);
            let Source::Driver(driver) = &mut event.source else {
                continue;
            };
            let told = driver.take_overflows();
            if told > 0 && !event.sampling.throttled {
                let raw = driver.read();
                let passed = event.sampling.passed(raw, told);
                if passed > 0 && event.sampling.is_on() {
                    times = times.saturating_add(passed);
                    if let Err(error) = driver.arm(event.sampling.remaining(raw)) {
                        log::warn!("event {} could not be armed again: {error}", event.shared.id);
                    }
                } else {
                    times = times.saturating_add(passed);
                }
            }
            if times > 0 {
                self.overflow(core, key, times, now_ns, regs, batch);
                // The event may have left the list, and another taken its place.
                if self.armed.get(*at - 1) != Some(&key) {
                    *at -= 1;
                }
            }
            if batch.len() == BATCH {
                return *at < self.armed.len();
            }
        }
        false
    }

    /// Accounts `times` overflows of an event.
    fn overflow(
        &mut self,
        core: &CoreInner,
        key: usize,
        times: u32,
        now_ns: u64,
        regs: &mut dyn SampleRegs,
        batch: &mut Batch,
    ) {
        if times == 0 {
            return;
        }
        let _ = regs.mode();
        let event = &mut self.events[key];
        let shared = Arc::clone(&event.shared);
        let tick_ns = 1_000_000_000 / core.config.tick_hz.max(1);
        event.sampling.note_overflow_time(now_ns, tick_ns);
        let throttle = shared.owner != Owner::Guest
            && event
                .sampling
                .interrupt(core.config.tick_hz, core.limits.sample_rate_hz());
        let last = event.sampling.count_down(times);
        if let Some(cookie) = shared.cookie {
            batch.push(Overflowed { cookie, times });
        }
        if last {
            shared.notify.signal(Poll::HUP);
            self.disable(key, now_ns);
        } else if throttle {
            self.throttle(key);
        }
    }

    /// Switches an event's overflows off until the next tick. It goes on counting.
    fn throttle(&mut self, key: usize) {
        let event = &mut self.events[key];
        if event.state != State::Active {
            event.sampling.throttled = true;
            return;
        }
        let raw = event.raw();
        event.sampling.disarm_at(raw, 0);
        event.sampling.throttled = true;
        if let Source::Driver(driver) = &mut event.source {
            driver.stop();
            if let Err(error) = driver.start(None) {
                log::warn!(
                    "event {} could not go on while throttled: {error}",
                    event.shared.id
                );
            }
        }
    }

    fn unthrottle(&mut self, key: usize) {
        let event = &mut self.events[key];
        event.sampling.throttled = false;
        let raw = event.raw();
        if let Source::Driver(driver) = &mut event.source {
            driver.stop();
            event.sampling.arm_at(raw);
            if let Err(error) = driver.start(event.sampling.overflow_in()) {
                log::warn!(
                    "event {} could not be armed after a throttle: {error}",
                    event.shared.id
                );
            }
        }
    }

    /// The sampling half of a tick: lifts throttles and adjusts frequencies of what is on.
    pub fn tick_sampling(&mut self, _now_ns: u64, tick_hz: u64, sample_rate_hz: u64) {
        for at in 0..self.armed.len() {
            let key = self.armed[at];
            let was_throttled = self.events[key].sampling.throttled;
            let stalled = self.events[key].sampling.tick(tick_hz, sample_rate_hz);
            if was_throttled {
                self.unthrottle(key);
            } else if stalled {
                // A period that became huge by accident must not stall the event: begin a new one.
                let event = &mut self.events[key];
                let raw = event.raw();
                event.sampling.restart(raw);
                if let Source::Driver(driver) = &mut event.source
                    && let Err(error) = driver.arm(event.sampling.remaining(raw))
                {
                    log::warn!("event {} could not be armed again: {error}", event.shared.id);
                }
            }
        }
    }
}
