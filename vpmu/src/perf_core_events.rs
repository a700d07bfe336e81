//! [`PerfCoreEvents`]: counter events implemented with perf-core events, one per counter.
//!
//! [`CounterBackingSelector::choose`] returns the candidates for a request: drivers and event
//! numbers, best first. When a counter is first enabled for a request, an event is opened as pinned
//! and stopped. The event is then kept, so enabling, disabling and re-arming the counter do not
//! open events. Each time the counter is enabled, the best candidate is tried first, and the next
//! one if no slot is available. A counter also keeps the events that it used most recently, because
//! guests that multiplex events over few counters rotate through a small set.

use std::sync::Arc;

use perf_core::pmu::{PmuError, VcpuId, thread_run_time_ns};
use perf_core::{
    Attr, EventHandle, EventOpenTarget, EventOrGroup, OpenFlags, PerfCore, PerfEventOpenError, Session,
    SessionRole, VcpuEventContext, error_line,
};

use crate::counter_events::{
    CounterEnableOutcome, CounterEventLoss, CounterEvents, CounterTimes, UnavailableReason, VcpuTime,
};
use crate::events::{CounterBacking, CounterEventRequest, DecodedCounterEvent, ParavirtualEvent};
use crate::index::{CounterIndex, MAX_COUNTERS, counters_in};
use crate::sources::CounterBackingSelector;

/// Number of stopped events that a counter keeps for reuse, in addition to its current event.
const PARKED: usize = 3;
/// Maximum number of open events per counter, including the current one. Each host event uses one
/// file descriptor.
pub const MAX_EVENTS_PER_COUNTER: usize = PARKED + 1;

/// A backing (source of counts) for a request: a driver with its event number, and the event opened
/// with them.
#[derive(Debug)]
struct BackingCandidate {
    backing: CounterBacking,
    attr: Attr,
    /// Perf-core event of this candidate; `None` until the candidate is first used.
    handle: Option<EventHandle>,
}

/// Reason why a candidate (a driver and event number for a request) does not count.
#[derive(Debug)]
enum CandidateFailure {
    /// The candidate cannot count at present, for the given reason.
    Temporary(UnavailableReason),
    /// The candidate can never count the request, because the driver cannot open the event.
    Permanent(PerfEventOpenError),
}

impl CandidateFailure {
    fn of(error: PerfEventOpenError) -> Self {
        match &error {
            PerfEventOpenError::Driver(PmuError::Busy) => Self::Temporary(UnavailableReason::Busy),
            PerfEventOpenError::Driver(PmuError::Mediated(_) | PmuError::Os { .. }) => {
                Self::Temporary(UnavailableReason::Refused(error.errno()))
            }
            PerfEventOpenError::Overcommitted { .. } => Self::Temporary(UnavailableReason::NoSlot),
            _ => Self::Permanent(error),
        }
    }
}

/// A request with which a counter is programmed, and the candidates for it: drivers that can count
/// it, best first. Candidates that failed permanently are not included.
#[derive(Debug)]
struct ProgrammedEvent {
    request: CounterEventRequest,
    candidates: [Option<BackingCandidate>; 2],
    /// Index of the candidate that is counting, or that counted last.
    using: usize,
}

impl ProgrammedEvent {
    fn candidate(&self) -> Option<&BackingCandidate> {
        self.candidates[self.using].as_ref()
    }

    fn handle(&self) -> Option<&EventHandle> {
        self.candidate()?.handle.as_ref()
    }

    /// Returns the privilege levels at which the vCPU must be single-stepped while the current
    /// candidate counts.
    fn stepped_levels(&self) -> PrivilegeLevels {
        let stepped = self
            .candidate()
            .is_some_and(|candidate| candidate.backing == CounterBacking::Exact)
            && matches!(self.request.event, DecodedCounterEvent::Architectural(_));
        PrivilegeLevels {
            user: stepped && self.request.user,
            kernel: stepped && self.request.kernel,
        }
    }

    /// Returns the backing of the best candidate that has not failed permanently.
    fn backing(&self) -> CounterBacking {
        self.candidates
            .iter()
            .flatten()
            .next()
            .map_or(CounterBacking::None, |candidate| candidate.backing)
    }
}

#[derive(Debug, Default)]
struct CounterSlot {
    current: Option<Box<ProgrammedEvent>>,
    /// Stopped events that are kept for reuse, most recently used first.
    parked: [Option<Box<ProgrammedEvent>>; PARKED],
    /// `true` once a failure of this counter's event has been logged.
    warned: bool,
}

impl CounterSlot {
    fn candidate(&self) -> Option<&BackingCandidate> {
        self.current.as_ref()?.candidate()
    }

    /// Moves the current event to the stopped events that are kept for reuse (parked). If there are
    /// already [`PARKED`] parked events, the least recently used one is dropped.
    fn park(&mut self) {
        if let Some(open) = self.current.take() {
            self.parked.rotate_right(1);
            self.parked[0] = Some(open);
        }
    }

    /// Removes and returns the stopped event that is kept for `request`, if any.
    fn unpark(&mut self, request: &CounterEventRequest) -> Option<Box<ProgrammedEvent>> {
        let at = self
            .parked
            .iter()
            .position(|o| o.as_ref().is_some_and(|open| open.request == *request))?;
        self.parked[at].take()
    }

    fn warn(&mut self, counter: CounterIndex, what: std::fmt::Arguments<'_>) {
        if !std::mem::replace(&mut self.warned, true) {
            perf_core::guest_log!(Warn, "counter {counter}: {what}");
        }
    }
}

/// Set of privilege levels (CPL 1 to 3, and CPL 0): those at which a vCPU is single-stepped, or
/// those whose branches the guest records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrivilegeLevels {
    /// `true` if the set contains CPL 1 to 3.
    pub user: bool,
    /// `true` if the set contains CPL 0.
    pub kernel: bool,
}

impl PrivilegeLevels {
    /// Returns whether the set contains any privilege level.
    pub const fn any(self) -> bool {
        self.user || self.kernel
    }
}

/// Counter events of one vCPU, backed by perf-core.
#[derive(Debug)]
pub struct PerfCoreEvents {
    core: PerfCore,
    session: Session,
    vcpu: VcpuId,
    context: Option<Arc<VcpuEventContext>>,
    /// `true` if an event of the vCPU has failed and [`CounterEvents::may_have_lost`] has not yet
    /// reported the failure.
    unseen: bool,
    sources: CounterBackingSelector,
    slots: [CounterSlot; MAX_COUNTERS],
    /// Mask of the enabled counters that require single-stepping (exact backing) at CPL 1 to 3, and
    /// mask of those that require it at CPL 0.
    stepping_user: u64,
    stepping_kernel: u64,
}

impl PerfCoreEvents {
    /// Creates the counter events of `vcpu`, which must already exist in `core`.
    pub fn new(core: PerfCore, vcpu: VcpuId, sources: CounterBackingSelector) -> Self {
        let session = core.session(0, SessionRole::Guest);
        let context = core.vcpu(vcpu);
        Self {
            core,
            session,
            context,
            unseen: false,
            vcpu,
            sources,
            slots: Default::default(),
            stepping_user: 0,
            stepping_kernel: 0,
        }
    }

    /// Returns the counter that the perf-core event with the cookie `cookie` backs, or `None` if
    /// the event backs no counter.
    pub fn counter_of(cookie: u64) -> Option<CounterIndex> {
        CounterIndex::from_bit(u32::try_from(cookie).ok()?)
    }

    /// Returns whether any enabled counter uses the exact backing, so that the vCPU must be
    /// single-stepped.
    pub const fn needs_stepping(&self) -> bool {
        self.stepping_levels().any()
    }

    /// Returns the privilege levels at which enabled counters require single-stepping.
    #[inline]
    pub const fn stepping_levels(&self) -> PrivilegeLevels {
        PrivilegeLevels {
            user: self.stepping_user != 0,
            kernel: self.stepping_kernel != 0,
        }
    }

    /// Returns whether any counter, enabled or not, is programmed with `event`.
    pub fn counts(&self, event: ParavirtualEvent) -> bool {
        self.slots
            .iter()
            .filter_map(|slot| slot.current.as_ref())
            .any(|open| open.request.event == DecodedCounterEvent::Paravirtual(event))
    }

    /// Returns the perf-core event with which the counter currently counts, or `None` if the event
    /// has not been opened.
    #[inline]
    fn of(&self, counter: CounterIndex) -> Option<&EventHandle> {
        self.slots[counter.slot()].current.as_ref()?.handle()
    }

    /// Acknowledges an event failure that the vCPU thread itself observed when it enabled the
    /// event. The thread then need not be kicked because of this failure. Other events that failed
    /// at the same time are detected at the next entry.
    fn acknowledge_failure(&mut self) {
        if let Some(context) = &self.context {
            self.unseen |= context.take_errors();
        }
    }

    /// Returns the candidates (drivers and event numbers) for `request`. Opens the best candidate
    /// that does not fail permanently, and drops better candidates that do.
    fn open(&mut self, counter: CounterIndex, request: &CounterEventRequest) -> ProgrammedEvent {
        let mut candidates = [None, None];
        for (candidate, (backing, attr)) in candidates.iter_mut().zip(self.sources.choose(request)) {
            *candidate = Some(BackingCandidate {
                backing,
                attr,
                handle: None,
            });
        }
        let mut refusal = None;
        for candidate in &mut candidates {
            let Some(open) = candidate else { continue };
            match open_candidate(&self.core, &self.session, self.vcpu, counter, open) {
                Err(CandidateFailure::Permanent(error)) => {
                    refusal = Some((open.backing, error));
                    *candidate = None;
                }
                Ok(_) | Err(CandidateFailure::Temporary(_)) => {
                    refusal = None;
                    break;
                }
            }
        }
        if let Some((backing, error)) = refusal {
            self.slots[counter.slot()].warn(
                counter,
                format_args!(
                    "the {backing} backing refuses {}: {}",
                    request.event,
                    error_line(&error)
                ),
            );
        }
        ProgrammedEvent {
            request: *request,
            candidates,
            using: 0,
        }
    }
}

/// Returns the handle of a candidate, and opens its event on first use.
fn open_candidate<'w>(
    core: &PerfCore,
    session: &Session,
    vcpu: VcpuId,
    counter: CounterIndex,
    candidate: &'w mut BackingCandidate,
) -> Result<&'w EventHandle, CandidateFailure> {
    if candidate.handle.is_none() {
        let flags = OpenFlags::with_cookie(u64::from(counter.bit()));
        let handle = core
            .open(
                session,
                candidate.attr.clone(),
                EventOpenTarget::Vcpu(vcpu),
                None,
                flags,
            )
            .map_err(CandidateFailure::of)?;
        candidate.handle = Some(handle);
    }
    candidate
        .handle
        .as_ref()
        .ok_or(CandidateFailure::Temporary(UnavailableReason::Busy))
}

/// Starts the event `handle` and returns its current count. If starting fails, the event stays
/// disabled. `overflow_in` is the number of further counts until an overflow is notified.
fn start(handle: &EventHandle, overflow_in: Option<u64>) -> Result<u64, UnavailableReason> {
    let lack = match handle.start(overflow_in) {
        Ok(Ok(count)) => return Ok(count),
        Ok(Err(cause)) => cause,
        Err(error) => UnavailableReason::Refused(error.errno()),
    };
    let _ = handle.disable(EventOrGroup::Event);
    Err(lack)
}

impl CounterEvents for PerfCoreEvents {
    fn program(&mut self, counter: CounterIndex, request: Option<&CounterEventRequest>) -> CounterBacking {
        self.stepping_user &= !counter.mask();
        self.stepping_kernel &= !counter.mask();
        let Some(request) = request else {
            self.slots[counter.slot()] = CounterSlot::default();
            return CounterBacking::None;
        };
        let slot = &mut self.slots[counter.slot()];
        if slot.current.as_ref().is_none_or(|open| open.request != *request) {
            let found = slot.unpark(request);
            slot.park();
            let open = match found {
                Some(open) => open,
                None => Box::new(self.open(counter, request)),
            };
            self.slots[counter.slot()].current = Some(open);
        }
        let Some(open) = &mut self.slots[counter.slot()].current else {
            return CounterBacking::None;
        };
        open.using = open.candidates.iter().position(Option::is_some).unwrap_or(0);
        open.backing()
    }

    fn enable(&mut self, counter: CounterIndex, overflow_in: Option<u64>) -> (CounterEnableOutcome, u64) {
        let Some(open) = &mut self.slots[counter.slot()].current else {
            return (CounterEnableOutcome::Refused(UnavailableReason::NoSlot), 0);
        };
        let mut lack = None;
        for at in 0..open.candidates.len() {
            let Some(candidate) = &mut open.candidates[at] else {
                continue;
            };
            let backing = candidate.backing;
            let started = open_candidate(&self.core, &self.session, self.vcpu, counter, candidate)
                .and_then(|handle| start(handle, overflow_in).map_err(CandidateFailure::Temporary));
            match started {
                Ok(count) => {
                    open.using = at;
                    let levels = open.stepped_levels();
                    self.stepping_user |= if levels.user { counter.mask() } else { 0 };
                    self.stepping_kernel |= if levels.kernel { counter.mask() } else { 0 };
                    let Some(lack) = lack else {
                        return (CounterEnableOutcome::Counting(backing), count);
                    };
                    self.acknowledge_failure();
                    return (CounterEnableOutcome::Fallback(backing, lack), count);
                }
                Err(CandidateFailure::Temporary(why)) => lack = lack.or(Some(why)),
                Err(CandidateFailure::Permanent(error)) => {
                    lack = lack.or(Some(UnavailableReason::Refused(error.errno())));
                    open.candidates[at] = None;
                }
            }
        }
        self.acknowledge_failure();
        (
            CounterEnableOutcome::Refused(lack.unwrap_or(UnavailableReason::NoSlot)),
            0,
        )
    }

    fn disable(&mut self, counter: CounterIndex) -> u64 {
        self.stepping_user &= !counter.mask();
        self.stepping_kernel &= !counter.mask();
        self.of(counter)
            .and_then(|handle| handle.stop().ok())
            .unwrap_or(0)
    }

    fn pause(&mut self, counters: u64, each: &mut dyn FnMut(CounterIndex, u64)) {
        self.stepping_user &= !counters;
        self.stepping_kernel &= !counters;
        let mut held = None;
        for counter in counters_in(counters) {
            let candidate = self.slots[counter.slot()].candidate();
            let count = candidate.and_then(|candidate| {
                let handle = candidate.handle.as_ref()?;
                let held = held.get_or_insert_with(|| handle.lock_context());
                if candidate.backing.counts_through_pauses() {
                    held.count(handle).ok()
                } else {
                    held.pause(handle).ok()
                }
            });
            each(counter, count.unwrap_or(0));
        }
    }

    fn resume(&mut self, counters: u64, each: &mut dyn FnMut(CounterIndex, u64) -> Option<u64>) -> u64 {
        let mut held = None;
        let mut stopped = 0;
        for counter in counters_in(counters) {
            let Some(open) = &self.slots[counter.slot()].current else {
                continue;
            };
            let goes_on = open.candidate().and_then(|candidate| {
                let handle = candidate.handle.as_ref()?;
                let held = held.get_or_insert_with(|| handle.lock_context());
                if candidate.backing.counts_through_pauses() {
                    each(counter, held.count(handle).ok()?);
                    Some(())
                } else {
                    held.resume(handle, |count| each(counter, count)).ok()?.ok()
                }
            });
            if goes_on.is_none() {
                stopped |= counter.mask();
                continue;
            }
            let levels = open.stepped_levels();
            self.stepping_user |= if levels.user { counter.mask() } else { 0 };
            self.stepping_kernel |= if levels.kernel { counter.mask() } else { 0 };
        }
        stopped
    }

    fn count(&mut self, counter: CounterIndex) -> u64 {
        self.of(counter)
            .and_then(|handle| handle.count().ok())
            .unwrap_or(0)
    }

    fn arm(&mut self, counter: CounterIndex, overflow_in: u64) -> u64 {
        let slot = &mut self.slots[counter.slot()];
        let Some(handle) = slot.current.as_ref().and_then(|open| open.handle()) else {
            return 0;
        };
        match handle.arm(overflow_in) {
            Ok(count) => count,
            Err(error) => {
                let count = handle.count().unwrap_or(0);
                slot.warn(
                    counter,
                    format_args!(
                        "its overflow cannot be armed and will be found late: {}",
                        error_line(&error)
                    ),
                );
                count
            }
        }
    }

    fn may_have_lost(&mut self) -> bool {
        let seen = self.context.as_ref().is_some_and(|context| context.take_errors());
        std::mem::take(&mut self.unseen) | seen
    }

    fn event_loss(&mut self, counter: CounterIndex) -> Option<CounterEventLoss> {
        let failure = self.of(counter)?.failure()?;
        Some(CounterEventLoss {
            since_ns: failure.since_ns,
            cause: failure.cause,
        })
    }

    fn now_ns(&mut self) -> u64 {
        self.context.as_ref().map_or(0, |context| context.time_ns())
    }

    fn time(&mut self) -> VcpuTime {
        VcpuTime {
            event_ns: self.now_ns(),
            run_ns: thread_run_time_ns(),
        }
    }

    fn times(&mut self, counter: CounterIndex) -> CounterTimes {
        let open = self.slots[counter.slot()].current.as_ref();
        let candidates = open.into_iter().flat_map(|open| open.candidates.iter().flatten());
        candidates
            .filter_map(|candidate| candidate.handle.as_ref()?.read().ok())
            .fold(CounterTimes::default(), |sum, reading| CounterTimes {
                time_enabled_ns: sum.time_enabled_ns + reading.time_enabled_ns,
                time_running_ns: sum.time_running_ns + reading.time_running_ns,
            })
    }
}
