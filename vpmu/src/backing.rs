//! Counting events made of perf-core events: one for each counter.
//!
//! Which driver counts for a request is decided elsewhere ([`Sources::choose`]). An event is opened when a
//! counter is first enabled for a request, pinned and stopped, and kept: enabling, disabling and re-arming
//! open nothing. Each time a counter is enabled the best way to count for it is tried first; where that one
//! has no place the next counts meanwhile, if there is one. A counter also keeps the last few events it no
//! longer counts, because guests that share their counters among more events than there are take turns
//! between the same few.

use perf_core::pmu::{PmuError, VcpuId};
use std::sync::Arc;

use perf_core::{
    Attr, Core, Handle, OpenError, OpenFlags, OpenTarget, Role, Scope, Session, VcpuContext, error_line,
};

use crate::events::{Backing, EventRequest, GuestEvent, ParavirtualEvent};
use crate::index::{CounterIndex, MAX_COUNTERS, counters_in};
use crate::source::{CounterEvents, CounterTimes, Enabled, Lack, Loss};
use crate::sources::Sources;

/// Events a counter keeps besides the one it counts.
const PARKED: usize = 3;
/// Events that a counter has open at most, the one it counts among them; one of the host's is a descriptor.
pub const EVENTS_OF_A_COUNTER: usize = PARKED + 1;

/// One way to count for a request.
#[derive(Debug)]
struct Way {
    backing: Backing,
    attr: Attr,
    /// Opened when first tried.
    handle: Option<Handle>,
}

/// Why a way does not count.
#[derive(Debug)]
enum No {
    /// It may another time.
    Now(Lack),
    /// The event cannot be counted in this form, ever.
    Never(OpenError),
}

impl No {
    fn of(error: OpenError) -> Self {
        match &error {
            OpenError::Driver(PmuError::Busy) => Self::Now(Lack::Busy),
            OpenError::Driver(PmuError::Mediated(_) | PmuError::Os { .. }) => {
                Self::Now(Lack::Refused(error.errno()))
            }
            OpenError::Overcommitted { .. } => Self::Now(Lack::NoSlot),
            _ => Self::Never(error),
        }
    }
}

/// The ways to count for a request, best first, without those that never can.
#[derive(Debug)]
struct Open {
    request: EventRequest,
    ways: [Option<Way>; 2],
    /// Which of them counts, or counted last.
    using: usize,
}

impl Open {
    /// The way in use.
    fn way(&self) -> Option<&Way> {
        self.ways[self.using].as_ref()
    }

    fn handle(&self) -> Option<&Handle> {
        self.way()?.handle.as_ref()
    }

    /// The levels at which the vCPU is stepped while this counts.
    fn stepped_levels(&self) -> SteppedLevels {
        let stepped = self.way().is_some_and(|way| way.backing == Backing::Exact)
            && matches!(self.request.event, GuestEvent::Architectural(_));
        SteppedLevels {
            user: stepped && self.request.user,
            kernel: stepped && self.request.kernel,
        }
    }

    /// The best way that may count.
    fn backing(&self) -> Backing {
        self.ways
            .iter()
            .flatten()
            .next()
            .map_or(Backing::None, |way| way.backing)
    }
}

#[derive(Debug, Default)]
struct Slot {
    current: Option<Box<Open>>,
    /// Stopped events, the one used last in front.
    parked: [Option<Box<Open>>; PARKED],
    /// A refusal of this counter's event was logged.
    warned: bool,
}

impl Slot {
    /// The way in use.
    fn way(&self) -> Option<&Way> {
        self.current.as_ref()?.way()
    }

    /// Puts the current event aside; the one that was unused for longest goes.
    fn park(&mut self) {
        if let Some(open) = self.current.take() {
            self.parked.rotate_right(1);
            self.parked[0] = Some(open);
        }
    }

    /// Takes an event for `request` out of those put aside.
    fn unpark(&mut self, request: &EventRequest) -> Option<Box<Open>> {
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

/// Privilege levels that are counted by single steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SteppedLevels {
    /// CPL 1 to 3.
    pub user: bool,
    /// CPL 0.
    pub kernel: bool,
}

impl SteppedLevels {
    /// Whether there is anything to step.
    pub const fn any(self) -> bool {
        self.user || self.kernel
    }
}

/// The counting events of one vCPU, on perf-core.
#[derive(Debug)]
pub struct PerfCoreEvents {
    core: Core,
    session: Session,
    vcpu: VcpuId,
    context: Option<Arc<VcpuContext>>,
    /// An event of the context failed, and it was not looked which.
    unseen: bool,
    sources: Sources,
    slots: [Slot; MAX_COUNTERS],
    /// Enabled counters that the single-stepper counts for, of CPL 1 to 3 and of CPL 0.
    stepping_user: u64,
    stepping_kernel: u64,
}

impl PerfCoreEvents {
    /// Events for `vcpu`, which must have been added to `core`.
    pub fn new(core: Core, vcpu: VcpuId, sources: Sources) -> Self {
        let session = core.session(0, Role::Guest);
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

    /// The counter whose overflow perf-core reports with `cookie`; `None` for an event that is not a
    /// counter's.
    pub fn counter_of(cookie: u64) -> Option<CounterIndex> {
        CounterIndex::from_bit(u32::try_from(cookie).ok()?)
    }

    /// Whether some counter that the single-stepper counts for is enabled: then the vCPU must be stepped.
    pub const fn needs_stepping(&self) -> bool {
        self.stepping_levels().any()
    }

    /// The privilege levels at which enabled counters count by single steps.
    #[inline]
    pub const fn stepping_levels(&self) -> SteppedLevels {
        SteppedLevels {
            user: self.stepping_user != 0,
            kernel: self.stepping_kernel != 0,
        }
    }

    /// Whether some counter's present event is `event`, enabled or not.
    pub fn counts(&self, event: ParavirtualEvent) -> bool {
        self.slots
            .iter()
            .filter_map(|slot| slot.current.as_ref())
            .any(|open| open.request.event == GuestEvent::Paravirtual(event))
    }

    /// The counter's present event. One that could not be opened yet has counted nothing; and handles are
    /// closed only with their slot.
    #[inline]
    fn of(&self, counter: CounterIndex) -> Option<&Handle> {
        self.slots[counter.slot()].current.as_ref()?.handle()
    }

    /// An event failed while this thread enabled it: nobody need tell it. Others that may have failed at the
    /// same time are looked for at the next entry.
    fn seen_here(&mut self) {
        if let Some(context) = &self.context {
            self.unseen |= context.see_errors();
        }
    }

    /// The ways to count for `request`. The best one that can is opened, so that those that never can are
    /// known.
    fn open(&mut self, counter: CounterIndex, request: &EventRequest) -> Open {
        let mut ways = [None, None];
        for (way, (backing, attr)) in ways.iter_mut().zip(self.sources.choose(request)) {
            *way = Some(Way {
                backing,
                attr,
                handle: None,
            });
        }
        let mut refusal = None;
        for way in &mut ways {
            let Some(open) = way else { continue };
            match open_way(&self.core, &self.session, self.vcpu, counter, open) {
                Err(No::Never(error)) => {
                    refusal = Some((open.backing, error));
                    *way = None;
                }
                Ok(_) | Err(No::Now(_)) => {
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
        Open {
            request: *request,
            ways,
            using: 0,
        }
    }
}

/// The way's event, opened now if it is not yet.
fn open_way<'w>(
    core: &Core,
    session: &Session,
    vcpu: VcpuId,
    counter: CounterIndex,
    way: &'w mut Way,
) -> Result<&'w Handle, No> {
    if way.handle.is_none() {
        let flags = OpenFlags {
            cookie: Some(u64::from(counter.bit())),
            ..OpenFlags::default()
        };
        let handle = core
            .open(session, way.attr.clone(), OpenTarget::Vcpu(vcpu), None, flags)
            .map_err(No::of)?;
        way.handle = Some(handle);
    }
    way.handle.as_ref().ok_or(No::Now(Lack::Busy))
}

/// Starts an event, and says from which count; or leaves it stopped and says why.
fn start(handle: &Handle, overflow_in: Option<u64>) -> Result<u64, Lack> {
    let lack = match handle.start(overflow_in) {
        Ok(Ok(count)) => return Ok(count),
        Ok(Err(cause)) => cause,
        Err(error) => Lack::Refused(error.errno()),
    };
    let _ = handle.disable(Scope::Event);
    Err(lack)
}

impl CounterEvents for PerfCoreEvents {
    fn program(&mut self, counter: CounterIndex, request: Option<&EventRequest>) -> Backing {
        self.stepping_user &= !counter.mask();
        self.stepping_kernel &= !counter.mask();
        let Some(request) = request else {
            self.slots[counter.slot()] = Slot::default();
            return Backing::None;
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
            return Backing::None;
        };
        open.using = open.ways.iter().position(Option::is_some).unwrap_or(0);
        open.backing()
    }

    fn enable(&mut self, counter: CounterIndex, overflow_in: Option<u64>) -> (Enabled, u64) {
        let Some(open) = &mut self.slots[counter.slot()].current else {
            return (Enabled::Refused(Lack::NoSlot), 0);
        };
        let mut lack = None;
        for at in 0..open.ways.len() {
            let Some(way) = &mut open.ways[at] else { continue };
            let backing = way.backing;
            let started = open_way(&self.core, &self.session, self.vcpu, counter, way)
                .and_then(|handle| start(handle, overflow_in).map_err(No::Now));
            match started {
                Ok(count) => {
                    open.using = at;
                    let levels = open.stepped_levels();
                    self.stepping_user |= if levels.user { counter.mask() } else { 0 };
                    self.stepping_kernel |= if levels.kernel { counter.mask() } else { 0 };
                    let Some(lack) = lack else {
                        return (Enabled::Counting(backing), count);
                    };
                    self.seen_here();
                    return (Enabled::Fallback(backing, lack), count);
                }
                Err(No::Now(why)) => lack = lack.or(Some(why)),
                Err(No::Never(error)) => {
                    lack = lack.or(Some(Lack::Refused(error.errno())));
                    open.ways[at] = None;
                }
            }
        }
        self.seen_here();
        (Enabled::Refused(lack.unwrap_or(Lack::NoSlot)), 0)
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
            let way = self.slots[counter.slot()].way();
            let count = way.and_then(|way| {
                let handle = way.handle.as_ref()?;
                let held = held.get_or_insert_with(|| handle.hold());
                if way.backing.counts_through_pauses() {
                    held.count(handle).ok()
                } else {
                    held.pause(handle).ok()
                }
            });
            each(counter, count.unwrap_or(0));
        }
    }

    fn go_on(&mut self, counters: u64, each: &mut dyn FnMut(CounterIndex, u64) -> Option<u64>) -> u64 {
        let mut held = None;
        let mut stopped = 0;
        for counter in counters_in(counters) {
            let Some(open) = &self.slots[counter.slot()].current else {
                continue;
            };
            let goes_on = open.way().and_then(|way| {
                let handle = way.handle.as_ref()?;
                let held = held.get_or_insert_with(|| handle.hold());
                if way.backing.counts_through_pauses() {
                    each(counter, held.count(handle).ok()?);
                    Some(())
                } else {
                    held.go_on(handle, |count| each(counter, count)).ok()?.ok()
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
        let seen = self.context.as_ref().is_some_and(|context| context.see_errors());
        std::mem::take(&mut self.unseen) | seen
    }

    fn lost(&mut self, counter: CounterIndex) -> Option<Loss> {
        let failure = self.of(counter)?.failure()?;
        Some(Loss {
            since_ns: failure.since_ns,
            cause: failure.cause,
        })
    }

    fn now_ns(&mut self) -> u64 {
        self.context.as_ref().map_or(0, |context| context.time_ns())
    }

    fn times(&mut self, counter: CounterIndex) -> CounterTimes {
        let open = self.slots[counter.slot()].current.as_ref();
        let ways = open.into_iter().flat_map(|open| open.ways.iter().flatten());
        ways.filter_map(|way| way.handle.as_ref()?.read().ok()).fold(
            CounterTimes::default(),
            |sum, reading| CounterTimes {
                time_enabled_ns: sum.time_enabled_ns + reading.time_enabled_ns,
                time_running_ns: sum.time_running_ns + reading.time_running_ns,
            },
        )
    }
}
