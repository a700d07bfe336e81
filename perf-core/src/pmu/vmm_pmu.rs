//! The `vmm_pmu` driver: events whose counts the VMM supplies.
//!
//! The VMM adds its observations, such as single-stepped instructions and handled exits, to a
//! [`VmmPmuCounts`] per vCPU, and events read their counts from there. The `config` of an event is
//! its selector: an index whose meaning the VMM defines.
//!
//! Every addition names the guest's privilege level, so `exclude_user` and `exclude_kernel` are
//! exact. Overflows are exact too if the VMM can stop at any count:
//! [`VmmPmuCounts::until_overflow`] returns the number of counts until the next overflow, and
//! [`VmmPmuCounts::add`] returns `true` when an event has overflowed.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::attr::{Attr, EventType};
use crate::pmu::{Pmu, PmuCounterCapacity, PmuError, PmuEvent, PmuEventTarget, VcpuId};

/// Value for the overflow point of a selector without an armed event.
const NEVER: u64 = u64::MAX;

/// The privilege levels of the guest at which an event counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CountedLevels {
    User,
    Kernel,
    Both,
    None,
}

impl CountedLevels {
    fn of(attr: &Attr) -> Self {
        match (attr.exclude_user, attr.exclude_kernel) {
            (false, false) => Self::Both,
            (false, true) => Self::User,
            (true, false) => Self::Kernel,
            (true, true) => Self::None,
        }
    }
}

/// Totals of one selector, and the next overflow point of the events of this selector for each
/// combination of privilege levels.
#[derive(Debug)]
struct SelectorTotals {
    user: AtomicU64,
    kernel: AtomicU64,
    /// Three fields: the next overflow point of the events that count user mode only, kernel mode
    /// only, or both modes. The unit is one count at these levels; [`NEVER`] if no such event is
    /// armed.
    next_user: AtomicU64,
    next_kernel: AtomicU64,
    next_both: AtomicU64,
    /// Two fields: number of started events that count user mode, and number that count kernel
    /// mode.
    started_user: AtomicU32,
    started_kernel: AtomicU32,
}

impl SelectorTotals {
    fn new() -> Self {
        Self {
            user: AtomicU64::new(0),
            kernel: AtomicU64::new(0),
            next_user: AtomicU64::new(NEVER),
            next_kernel: AtomicU64::new(NEVER),
            next_both: AtomicU64::new(NEVER),
            started_user: AtomicU32::new(0),
            started_kernel: AtomicU32::new(0),
        }
    }

    fn total(&self, levels: CountedLevels) -> u64 {
        let user = || self.user.load(Ordering::Relaxed);
        let kernel = || self.kernel.load(Ordering::Relaxed);
        match levels {
            CountedLevels::User => user(),
            CountedLevels::Kernel => kernel(),
            CountedLevels::Both => user().wrapping_add(kernel()),
            CountedLevels::None => 0,
        }
    }

    /// Applies `change` to the number of started events of each privilege level in `levels`.
    fn change_started(&self, levels: CountedLevels, change: fn(&AtomicU32) -> u32) {
        if matches!(levels, CountedLevels::User | CountedLevels::Both) {
            change(&self.started_user);
        }
        if matches!(levels, CountedLevels::Kernel | CountedLevels::Both) {
            change(&self.started_kernel);
        }
    }

    fn next(&self, levels: CountedLevels) -> Option<&AtomicU64> {
        match levels {
            CountedLevels::User => Some(&self.next_user),
            CountedLevels::Kernel => Some(&self.next_kernel),
            CountedLevels::Both => Some(&self.next_both),
            CountedLevels::None => None,
        }
    }
}

/// The overflow point of one event, with the event's selector and counted levels. The nearest
/// overflow point of a selector is recomputed from these values when an event is disarmed.
#[derive(Clone, Copy, Debug)]
struct OverflowPoint {
    selector: usize,
    levels: CountedLevels,
    /// Count at which the event overflows, or [`NEVER`] while the event is disarmed.
    at: u64,
}

/// The overflow points of all open events, armed and disarmed, so that arming an event does not
/// allocate.
#[derive(Debug, Default)]
struct OverflowPoints {
    list: Vec<OverflowPoint>,
    /// Indices in `list` that no event uses.
    free: Vec<usize>,
}

/// The counts of one vCPU, one per selector, which the VMM supplies.
///
/// The vCPU's thread adds the counts. Adding and querying take a few relaxed loads and stores on
/// memory that belongs to this vCPU alone.
#[derive(Debug)]
pub struct VmmPmuCounts {
    cells: Box<[SelectorTotals]>,
    armed: Mutex<OverflowPoints>,
}

impl VmmPmuCounts {
    /// Creates counts of zero for the selectors 0 to `selectors - 1`.
    #[must_use]
    pub fn new(selectors: usize) -> Self {
        Self {
            cells: (0..selectors).map(|_| SelectorTotals::new()).collect(),
            armed: Mutex::new(OverflowPoints::default()),
        }
    }

    /// Returns the number of selectors.
    #[must_use]
    pub fn selectors(&self) -> usize {
        self.cells.len()
    }

    /// Adds `n` to `selector`, with the guest at privilege level `cpl` (3 is user, any other value
    /// is kernel).
    ///
    /// Returns `true` if an armed event has reached its overflow point in this call or an earlier
    /// one. The caller must then service overflows. A selector that does not exist is ignored.
    ///
    /// Several threads may add concurrently without losing counts.
    pub fn add(&self, selector: usize, cpl: u8, n: u64) -> bool {
        let Some(cell) = self.cells.get(selector) else {
            return false;
        };
        let level = if cpl == 3 { &cell.user } else { &cell.kernel };
        level.fetch_add(n, Ordering::Relaxed);
        self.until_overflow(selector, cpl) == Some(0)
    }

    /// Returns the number of further counts of `selector` at privilege level `cpl` until the next
    /// armed event overflows.
    ///
    /// Returns 0 if an overflow is already due, and `None` if no armed event counts `selector` at
    /// this level.
    #[must_use]
    pub fn until_overflow(&self, selector: usize, cpl: u8) -> Option<u64> {
        let cell = self.cells.get(selector)?;
        let own = if cpl == 3 {
            CountedLevels::User
        } else {
            CountedLevels::Kernel
        };
        [own, CountedLevels::Both]
            .into_iter()
            .filter_map(|levels| {
                let next = cell.next(levels)?.load(Ordering::Relaxed);
                (next != NEVER).then(|| next.saturating_sub(cell.total(levels)))
            })
            .min()
    }

    /// Returns the total count of `selector` at all privilege levels.
    #[must_use]
    pub fn total(&self, selector: usize) -> u64 {
        self.cells
            .get(selector)
            .map_or(0, |cell| cell.total(CountedLevels::Both))
    }

    /// Returns two flags: whether a started event counts one of the first `selectors` selectors in
    /// user mode, and whether a started event counts one of them in kernel mode.
    #[must_use]
    pub fn counted_levels(&self, selectors: usize) -> (bool, bool) {
        let cells = || self.cells.iter().take(selectors);
        let is_started = |events: &AtomicU32| events.load(Ordering::Relaxed) > 0;
        (
            cells().any(|cell| is_started(&cell.started_user)),
            cells().any(|cell| is_started(&cell.started_kernel)),
        )
    }

    fn armed(&self) -> MutexGuard<'_, OverflowPoints> {
        self.armed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets, moves or (with [`NEVER`]) removes the overflow point of the event with index `place`.
    #[inline]
    fn set_armed(&self, place: usize, at: u64) {
        let mut armed = self.armed();
        let OverflowPoint { selector, levels, .. } = armed.list[place];
        let before = std::mem::replace(&mut armed.list[place].at, at);
        let Some(next) = self.cells[selector].next(levels) else {
            return;
        };
        let nearest = next.load(Ordering::Relaxed);
        if at <= nearest {
            next.store(at, Ordering::Relaxed);
        } else if before == nearest {
            // The nearest overflow point was removed or moved, so the next one is searched.
            let same = armed
                .list
                .iter()
                .filter(|a| a.selector == selector && a.levels == levels);
            let nearest = same.map(|a| a.at).min().unwrap_or(NEVER);
            next.store(nearest, Ordering::Relaxed);
        }
    }
}

/// The `vmm_pmu` driver of one VM.
#[derive(Debug, Default)]
pub struct VmmPmu {
    vcpus: Mutex<BTreeMap<VcpuId, Arc<VmmPmuCounts>>>,
}

impl VmmPmu {
    /// Creates a driver in which no vCPU is registered.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Registers `counts` as the counts of `vcpu`. Events that are opened on the vCPU afterwards
    /// read these counts.
    pub fn add_vcpu(&self, vcpu: VcpuId, counts: Arc<VmmPmuCounts>) {
        self.lock().insert(vcpu, counts);
    }

    /// Unregisters the counts of `vcpu`. Open events of the vCPU remain usable.
    pub fn remove_vcpu(&self, vcpu: VcpuId) {
        self.lock().remove(&vcpu);
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<VcpuId, Arc<VmmPmuCounts>>> {
        self.vcpus.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pmu for VmmPmu {
    fn name(&self) -> &'static str {
        "vmm_pmu"
    }

    fn supports_type(&self, ty: EventType) -> bool {
        ty == EventType::VMM_PMU
    }

    fn capacity(&self) -> PmuCounterCapacity {
        PmuCounterCapacity::Unlimited
    }

    fn open(&self, attr: &Attr, target: PmuEventTarget) -> Result<Box<dyn PmuEvent>, PmuError> {
        let PmuEventTarget::Vcpu { vcpu, .. } = target else {
            return Err(PmuError::Unsupported("counts of the VMM belong to one vCPU"));
        };
        if attr.exclude_guest {
            return Err(PmuError::Unsupported("counts of the VMM are the guest's"));
        }
        let counts = self.lock().get(&vcpu).cloned().ok_or_else(|| PmuError::Os {
            what: "finding the VMM's counts of the vCPU",
            source: io::Error::from_raw_os_error(libc::ESRCH),
        })?;
        let selector = usize::try_from(attr.config)
            .ok()
            .filter(|&s| s < counts.selectors())
            .ok_or(PmuError::NoSuchEvent)?;
        let levels = CountedLevels::of(attr);
        let place = {
            let mut guard = counts.armed();
            let armed = &mut *guard;
            let new = OverflowPoint {
                selector,
                levels,
                at: NEVER,
            };
            if let Some(place) = armed.free.pop() {
                armed.list[place] = new;
                place
            } else {
                armed.list.push(new);
                armed.free.reserve(armed.list.len());
                armed.list.len() - 1
            }
        };
        Ok(Box::new(FedEvent {
            counts,
            place,
            selector,
            levels,
            span_start: None,
            spans: 0,
            armed_at: None,
        }))
    }
}

#[derive(Debug)]
struct FedEvent {
    counts: Arc<VmmPmuCounts>,
    place: usize,
    selector: usize,
    levels: CountedLevels,
    /// Total of the selector when the event was last started, or `None` while the event is stopped.
    span_start: Option<u64>,
    spans: u64,
    /// Count of this event at which it overflows, or `None` if the event is not armed.
    armed_at: Option<u64>,
}

impl FedEvent {
    fn supplied(&self) -> u64 {
        self.counts.cells[self.selector].total(self.levels)
    }

    fn counted(&self) -> u64 {
        let span = self
            .span_start
            .map_or(0, |start| self.supplied().wrapping_sub(start));
        self.spans.wrapping_add(span)
    }

    fn disarm(&mut self) {
        if self.armed_at.take().is_some() {
            self.counts.set_armed(self.place, NEVER);
        }
    }
}

impl PmuEvent for FedEvent {
    fn start(&mut self, overflow_in: Option<u64>) -> Result<(), PmuError> {
        if self.span_start.is_none() {
            self.span_start = Some(self.supplied());
            let cell = &self.counts.cells[self.selector];
            cell.change_started(self.levels, |events| events.fetch_add(1, Ordering::Relaxed));
        }
        match overflow_in {
            Some(n) => self.arm(n),
            None => {
                self.disarm();
                Ok(())
            }
        }
    }

    fn stop(&mut self) {
        self.disarm();
        self.spans = self.counted();
        if self.span_start.take().is_some() {
            let cell = &self.counts.cells[self.selector];
            cell.change_started(self.levels, |events| events.fetch_sub(1, Ordering::Relaxed));
        }
    }

    fn read(&mut self) -> u64 {
        self.counted()
    }

    fn arm(&mut self, overflow_in: u64) -> Result<(), PmuError> {
        let count = self.counted();
        self.rearm(count, overflow_in)
    }

    fn take_overflows(&mut self) -> u32 {
        match self.armed_at {
            Some(at) if self.counted() >= at => {
                self.disarm();
                1
            }
            _ => 0,
        }
    }

    fn forget_overflows(&mut self) {}

    #[inline]
    fn rearm(&mut self, count: u64, overflow_in: u64) -> Result<(), PmuError> {
        let n = overflow_in.max(1);
        self.armed_at = Some(count.saturating_add(n));
        let count_at = self.supplied().saturating_add(n).min(NEVER - 1);
        self.counts.set_armed(self.place, count_at);
        Ok(())
    }
}

impl Drop for FedEvent {
    fn drop(&mut self) {
        self.stop();
        self.counts.armed().free.push(self.place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TARGET: PmuEventTarget = PmuEventTarget::Vcpu {
        vcpu: VcpuId(0),
        tid: 0,
    };

    fn setup(selectors: usize) -> (Arc<VmmPmuCounts>, VmmPmu) {
        let counts = Arc::new(VmmPmuCounts::new(selectors));
        let pmu = VmmPmu::new();
        pmu.add_vcpu(VcpuId(0), Arc::clone(&counts));
        (counts, pmu)
    }

    fn open(pmu: &VmmPmu, config: u64, exclude_user: bool, exclude_kernel: bool) -> Box<dyn PmuEvent> {
        let attr = Attr {
            exclude_user,
            exclude_kernel,
            ..Attr::counting(EventType::VMM_PMU, config)
        };
        pmu.open(&attr, TARGET).unwrap()
    }

    /// `counted_levels` reports only the levels that started events count. A VMM can therefore
    /// produce an expensive count, for example by single-stepping, only while an event needs it.
    #[test]
    fn counted_levels_are_those_of_started_events() {
        let (counts, pmu) = setup(2);
        let mut both = open(&pmu, 0, false, false);
        let mut user = open(&pmu, 1, false, true);
        assert_eq!(counts.counted_levels(2), (false, false));
        user.start(None).unwrap();
        user.start(Some(5)).unwrap();
        assert_eq!(counts.counted_levels(2), (true, false));
        assert_eq!(counts.counted_levels(1), (false, false));
        both.start(None).unwrap();
        assert_eq!(counts.counted_levels(1), (true, true));
        both.stop();
        both.stop();
        assert_eq!(counts.counted_levels(2), (true, false));
        drop(user);
        assert_eq!(counts.counted_levels(2), (false, false));
    }

    #[test]
    fn levels_are_counted_exactly() {
        let (counts, pmu) = setup(2);
        let excluded = [(false, false), (false, true), (true, false), (true, true)];
        let mut events = excluded.map(|(user, kernel)| open(&pmu, 1, user, kernel));
        counts.add(1, 0, 1_000);
        events.iter_mut().for_each(|ev| ev.start(None).unwrap());
        counts.add(1, 3, 7);
        counts.add(1, 0, 5);
        counts.add(0, 3, 100);
        assert_eq!(events.each_mut().map(|ev| ev.read()), [12, 7, 5, 0]);
    }

    #[test]
    fn unknown_selector_is_rejected_by_open_and_ignored_by_add() {
        let (counts, pmu) = setup(1);
        assert!(!counts.add(1, 3, 5));
        assert_eq!(counts.until_overflow(1, 3), None);
        let attr = Attr::counting(EventType::VMM_PMU, 1);
        assert!(matches!(pmu.open(&attr, TARGET), Err(PmuError::NoSuchEvent)));
        let of_vm = pmu.open(&attr, PmuEventTarget::Vm);
        assert!(matches!(of_vm, Err(PmuError::Unsupported(_))));
    }

    #[test]
    fn nearest_overflow_is_reported_first() {
        let (counts, pmu) = setup(1);
        let mut user = open(&pmu, 0, false, true);
        let mut both = open(&pmu, 0, false, false);
        user.start(Some(10)).unwrap();
        both.start(Some(6)).unwrap();
        assert_eq!(counts.until_overflow(0, 3), Some(6));
        assert_eq!(counts.until_overflow(0, 0), Some(6));
        assert!(!counts.add(0, 0, 5));
        assert!(counts.add(0, 3, 1));
        assert_eq!((user.take_overflows(), both.take_overflows()), (0, 1));
        assert_eq!(counts.until_overflow(0, 3), Some(9));
        assert_eq!(counts.until_overflow(0, 0), None);
        drop(user);
        assert_eq!(counts.until_overflow(0, 3), None);
    }

    proptest! {
        /// A caller that always stops after the number of counts that `until_overflow` returns
        /// reaches each overflow at its exact count.
        #[test]
        fn stepping_stops_exactly_at_each_overflow(periods in prop::collection::vec(1u64..50, 1..20), cpls in prop::collection::vec(0u8..4, 1..10)) {
            let (counts, pmu) = setup(1);
            let mut ev = open(&pmu, 0, false, false);
            let mut expected = 0;
            ev.start(None).unwrap();
            for (i, &period) in periods.iter().enumerate() {
                ev.arm(period).unwrap();
                expected += period;
                loop {
                    let cpl = cpls[i % cpls.len()];
                    let room = counts.until_overflow(0, cpl).unwrap();
                    prop_assert!(room > 0);
                    let due = counts.add(0, cpl, room.min(7));
                    if due {
                        break;
                    }
                    prop_assert_eq!(ev.take_overflows(), 0);
                }
                prop_assert_eq!(ev.take_overflows(), 1);
                prop_assert_eq!(ev.read(), expected);
            }
        }

        /// Behavior P38: a stopped event reports no overflow.
        #[test]
        fn p38_stopped_event_reports_no_overflow(n in 1u64..1000, fed in 0u64..10_000) {
            let (counts, pmu) = setup(1);
            let mut ev = open(&pmu, 0, false, false);
            ev.start(Some(n)).unwrap();
            ev.stop();
            prop_assert!(!counts.add(0, 3, fed));
            prop_assert_eq!(ev.take_overflows(), 0);
        }
    }
}
