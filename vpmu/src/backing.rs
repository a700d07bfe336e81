//! Counting events made of perf-core events: one for each counter.
//!
//! Which driver counts for a request is decided here ([`Sources::choose`]), from the request, the policy and
//! what the host has. An event is opened when a counter is first enabled for a request, pinned and stopped,
//! and kept: enabling, disabling and re-arming open nothing. Each time a counter is enabled the best way to
//! count for it is tried first; where that one has no place the next counts meanwhile, if there is one. A
//! counter also keeps the last few events it no longer counts, because guests that share their counters among
//! more events than there are take turns between the same few.

use perf_core::pmu::clock;
use perf_core::pmu::{PmuError, VcpuId};
use std::sync::Arc;

use perf_core::{
    Attr, Core, EventType, Handle, OpenError, OpenFlags, OpenTarget, Role, Scope, Session, State,
    VcpuContext, error_line,
};

use crate::events::{ArchEvent, Backing, BackingPolicy, EventRequest, GuestEvent, ParavirtualEvent};
use crate::fed;
use crate::index::{CounterIndex, MAX_COUNTERS};
use crate::model::Vendor;
use crate::source::{CounterEvents, CounterTimes, Enabled, Lack, Loss};

/// Events a counter keeps besides the one it counts.
const PARKED: usize = 3;

/// `PERF_COUNT_SW_*` of the host's software events that serve paravirtual events.
mod software {
    pub const PAGE_FAULTS: u64 = 2;
    pub const CONTEXT_SWITCHES: u64 = 3;
    pub const CPU_MIGRATIONS: u64 = 4;
}

/// Who can count what on this host.
#[derive(Clone, Debug)]
pub struct Sources {
    policy: BackingPolicy,
    /// The single-stepper cannot step CPL 3.
    kernel_only: bool,
    /// Vendor of the host's PMU, `None` when it has none that we may use.
    hardware: Option<Vendor>,
    /// Driver and its selector for each paravirtual event, in the order of their unit masks.
    paravirtual: [Option<(EventType, u64)>; ParavirtualEvent::ALL.len()],
}

impl Sources {
    /// What `policy` allows on a host whose PMU, if it has one, is `hardware`'s. `kvm_statistic` gives the
    /// `config` of a vCPU's KVM statistic of that name, for the kvm driver.
    pub fn new(
        policy: BackingPolicy,
        hardware: Option<Vendor>,
        mut kvm_statistic: impl FnMut(&str) -> Option<u64>,
    ) -> Self {
        let mut kvm = |name| kvm_statistic(name).map(|config| (EventType::KVM, config));
        let paravirtual = ParavirtualEvent::ALL.map(|event| match event {
            ParavirtualEvent::VmExits => kvm("exits"),
            ParavirtualEvent::Halts => kvm("halt_exits"),
            ParavirtualEvent::HostPageFaults => Some((EventType::SOFTWARE, software::PAGE_FAULTS)),
            ParavirtualEvent::HostContextSwitches => Some((EventType::SOFTWARE, software::CONTEXT_SWITCHES)),
            ParavirtualEvent::HostMigrations => Some((EventType::SOFTWARE, software::CPU_MIGRATIONS)),
            ParavirtualEvent::IrqInjections => kvm("irq_injections"),
            ParavirtualEvent::NmiInjections => kvm("nmi_injections"),
            // KVM's own io_exits and mmio_exits miss the accesses of emulated code.
            ParavirtualEvent::IoExits
            | ParavirtualEvent::MmioExits
            | ParavirtualEvent::MsrExits
            | ParavirtualEvent::StealNs
            | ParavirtualEvent::UncountedNs => Some((EventType::FED, fed::paravirtual(event) as u64)),
        });
        Self {
            policy,
            kernel_only: false,
            hardware,
            paravirtual,
        }
    }

    /// The single-stepper steps CPL 0 only: what counts user mode alone is not counted.
    #[must_use]
    pub fn stepping_kernel_only(self) -> Self {
        Self {
            kernel_only: true,
            ..self
        }
    }

    /// The ways to count a request, best first.
    pub fn choose(&self, request: &EventRequest) -> impl Iterator<Item = (Backing, Attr)> + use<> {
        let base = Attr {
            pinned: true,
            disabled: true,
            exclude_host: true,
            exclude_user: !request.user,
            exclude_kernel: !request.kernel,
            ..Attr::default()
        };
        let mut ways = [None, None];
        match request.event {
            GuestEvent::Paravirtual(event) => {
                // What the host does to a vCPU has no privilege level and no cycles to compare with a
                // threshold.
                let source =
                    self.paravirtual[usize::from(event.umask().0) - 1].filter(|_| !request.is_modified());
                ways[0] = source.map(|(ty, config)| {
                    let backing = match ty {
                        EventType::SOFTWARE => Backing::Software,
                        EventType::KVM => Backing::KvmStat,
                        _ => Backing::Exact,
                    };
                    (
                        backing,
                        Attr {
                            ty,
                            config,
                            exclude_user: false,
                            exclude_kernel: false,
                            ..base
                        },
                    )
                });
            }
            _ => {
                let hardware = matches!(self.policy, BackingPolicy::Auto | BackingPolicy::Hardware);
                let clock = matches!(self.policy, BackingPolicy::Auto | BackingPolicy::Clock);
                if let Some((ty, config)) = self.hardware_event(request).filter(|_| hardware) {
                    ways[0] = Some((
                        Backing::Hardware,
                        Attr {
                            ty,
                            config,
                            ..base.clone()
                        },
                    ));
                }
                // A clock of another frequency must not go on with what the host's own event counts.
                let own = hardware
                    && self.hardware == Some(request.vendor)
                    && request.event == GuestEvent::Architectural(ArchEvent::BusCycles);
                if let Some(config) = clock_event(request).filter(|_| clock && !own) {
                    ways[1] = Some((
                        Backing::Clock,
                        Attr {
                            ty: EventType::CLOCK,
                            config,
                            ..base.clone()
                        },
                    ));
                }
                if let Some(config) = exact_event(request)
                    .filter(|_| self.policy == BackingPolicy::Exact && (request.kernel || !self.kernel_only))
                {
                    ways[0] = Some((
                        Backing::Exact,
                        Attr {
                            ty: EventType::FED,
                            config,
                            ..base
                        },
                    ));
                }
            }
        }
        ways.into_iter().flatten()
    }

    /// The host's hardware event for a request: the generic one where there is one that means the same, else
    /// the guest's own numbers on a host of the same vendor.
    fn hardware_event(&self, request: &EventRequest) -> Option<(EventType, u64)> {
        let vendor = self.hardware?;
        if !request.is_modified()
            && let GuestEvent::Architectural(event) = request.event
            && (vendor == request.vendor || event.means_the_same_everywhere())
            && let Some(config) = generic_hardware(event)
        {
            return Some((EventType::HARDWARE, config));
        }
        let config = request.raw_config().filter(|_| vendor == request.vendor)?;
        Some((EventType::RAW, config))
    }
}

/// `PERF_COUNT_HW_*`, for the events the kernel knows on every host.
const fn generic_hardware(event: ArchEvent) -> Option<u64> {
    match event {
        ArchEvent::CoreCycles => Some(0),
        ArchEvent::Instructions => Some(1),
        ArchEvent::CacheReferences => Some(2),
        ArchEvent::CacheMisses => Some(3),
        ArchEvent::Branches => Some(4),
        ArchEvent::BranchMisses => Some(5),
        ArchEvent::RefCycles => Some(9),
        _ => None,
    }
}

/// Selector of the clock driver. With a threshold, an edge or an inversion the clock has nothing to count.
const fn clock_event(request: &EventRequest) -> Option<u64> {
    match request.event {
        _ if request.is_modified() => None,
        GuestEvent::Architectural(ArchEvent::CoreCycles) => Some(clock::CYCLES),
        // The SDM leaves the clock of the bus cycles open and names the TSC's among those in use.
        GuestEvent::Architectural(ArchEvent::RefCycles | ArchEvent::BusCycles) => Some(clock::REF_CYCLES),
        _ => None,
    }
}

/// Selector of the single-stepper's counts.
fn exact_event(request: &EventRequest) -> Option<u64> {
    match request.event {
        GuestEvent::Architectural(event) if !request.is_modified() => fed::exact(event).map(|s| s as u64),
        _ => None,
    }
}

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
    current: Option<Open>,
    /// Stopped events, the one used last in front.
    parked: [Option<Open>; PARKED],
    /// A refusal of this counter's event was logged.
    warned: bool,
}

impl Slot {
    /// Puts the current event aside; the one that was unused for longest goes.
    fn park(&mut self) {
        if let Some(open) = self.current.take() {
            self.parked.rotate_right(1);
            self.parked[0] = Some(open);
        }
    }

    /// Takes an event for `request` out of those put aside.
    fn unpark(&mut self, request: &EventRequest) -> Option<Open> {
        let at = self
            .parked
            .iter()
            .position(|o| o.as_ref().is_some_and(|open| open.request == *request))?;
        self.parked[at].take()
    }

    fn warn(&mut self, counter: CounterIndex, what: std::fmt::Arguments<'_>) {
        if !std::mem::replace(&mut self.warned, true) {
            log::warn!("counter {counter}: {what}");
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

/// Starts an event, or leaves it stopped and says why.
fn start(handle: &Handle, overflow_in: Option<u64>) -> Result<(), Lack> {
    let armed = overflow_in.map_or(Ok(()), |counts| handle.arm(counts));
    let enabled = armed.and_then(|()| handle.enable(Scope::Event));
    let lack = match enabled {
        Ok(()) if handle.state() == State::Active => return Ok(()),
        Ok(()) => handle.failure().map_or(Lack::NoSlot, |failure| failure.cause),
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
                None => self.open(counter, request),
            };
            self.slots[counter.slot()].current = Some(open);
        }
        let Some(open) = &mut self.slots[counter.slot()].current else {
            return Backing::None;
        };
        open.using = open.ways.iter().position(Option::is_some).unwrap_or(0);
        open.backing()
    }

    fn enable(&mut self, counter: CounterIndex, overflow_in: Option<u64>) -> Enabled {
        let Some(open) = &mut self.slots[counter.slot()].current else {
            return Enabled::Refused(Lack::NoSlot);
        };
        let mut lack = None;
        for at in 0..open.ways.len() {
            let Some(way) = &mut open.ways[at] else { continue };
            let backing = way.backing;
            let started = open_way(&self.core, &self.session, self.vcpu, counter, way)
                .and_then(|handle| start(handle, overflow_in).map_err(No::Now));
            match started {
                Ok(()) => {
                    open.using = at;
                    if backing == Backing::Exact && matches!(open.request.event, GuestEvent::Architectural(_))
                    {
                        self.stepping_user |= if open.request.user { counter.mask() } else { 0 };
                        self.stepping_kernel |= if open.request.kernel { counter.mask() } else { 0 };
                    }
                    let Some(lack) = lack else {
                        return Enabled::Counting(backing);
                    };
                    self.seen_here();
                    return Enabled::Fallback(backing, lack);
                }
                Err(No::Now(why)) => lack = lack.or(Some(why)),
                Err(No::Never(error)) => {
                    lack = lack.or(Some(Lack::Refused(error.errno())));
                    open.ways[at] = None;
                }
            }
        }
        self.seen_here();
        Enabled::Refused(lack.unwrap_or(Lack::NoSlot))
    }

    fn disable(&mut self, counter: CounterIndex) {
        self.stepping_user &= !counter.mask();
        self.stepping_kernel &= !counter.mask();
        if let Some(open) = &self.slots[counter.slot()].current
            && let Some(handle) = open.handle()
        {
            // An event that is closed is stopped.
            let _ = handle.disable(Scope::Event);
        }
    }

    fn count(&mut self, counter: CounterIndex) -> u64 {
        // An event that could not be opened yet has counted nothing, and handles are closed only with their
        // slot.
        self.slots[counter.slot()]
            .current
            .as_ref()
            .and_then(|open| open.handle()?.count().ok())
            .unwrap_or(0)
    }

    fn arm(&mut self, counter: CounterIndex, overflow_in: u64) {
        let slot = &mut self.slots[counter.slot()];
        if let Some(open) = &slot.current
            && let Some(handle) = open.handle()
            && let Err(error) = handle.arm(overflow_in)
        {
            slot.warn(
                counter,
                format_args!(
                    "its overflow cannot be armed and will be found late: {}",
                    error_line(&error)
                ),
            );
        }
    }

    fn may_have_lost(&mut self) -> bool {
        let seen = self.context.as_ref().is_some_and(|context| context.see_errors());
        std::mem::take(&mut self.unseen) | seen
    }

    fn lost(&mut self, counter: CounterIndex) -> Option<Loss> {
        let failure = self.slots[counter.slot()].current.as_ref()?.handle()?.failure()?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{EventSelect, Selection, UnitMask, decode};

    fn request(vendor: Vendor, select: u16, umask: u8) -> EventRequest {
        let (select, umask) = (EventSelect(select), UnitMask(umask));
        EventRequest {
            vendor,
            selection: Selection::General(select, umask),
            event: decode(vendor, select, umask),
            user: true,
            kernel: false,
            edge: false,
            invert: false,
            cmask: 0,
            in_transaction: false,
            checkpointed: false,
        }
    }

    fn chosen(
        policy: BackingPolicy,
        hardware: Option<Vendor>,
        request: &EventRequest,
    ) -> Vec<(Backing, u32, u64)> {
        Sources::new(policy, hardware, |name| (name == "exits").then_some(42))
            .choose(request)
            .map(|(backing, attr)| (backing, attr.ty.0, attr.config))
            .collect()
    }

    #[test]
    fn auto_prefers_the_hosts_pmu_and_falls_back_to_the_clock() {
        let cycles = request(Vendor::Intel, 0x3C, 0);
        let hardware = (Backing::Hardware, EventType::HARDWARE.0, 0);
        let clock = (Backing::Clock, EventType::CLOCK.0, 0);
        assert_eq!(
            chosen(BackingPolicy::Auto, Some(Vendor::Amd), &cycles),
            [hardware, clock]
        );
        assert_eq!(chosen(BackingPolicy::Auto, None, &cycles), [clock]);
        assert_eq!(
            chosen(BackingPolicy::Hardware, Some(Vendor::Amd), &cycles),
            [hardware]
        );
        assert_eq!(chosen(BackingPolicy::Clock, Some(Vendor::Amd), &cycles), [clock]);
        assert_eq!(chosen(BackingPolicy::None, Some(Vendor::Amd), &cycles), []);
    }

    #[test]
    fn raw_numbers_go_to_a_host_of_the_same_vendor_only() {
        let raw = request(Vendor::Intel, 0xD1, 0x20);
        assert_eq!(
            chosen(BackingPolicy::Auto, Some(Vendor::Intel), &raw),
            [(Backing::Hardware, EventType::RAW.0, 0x20D1)]
        );
        assert_eq!(chosen(BackingPolicy::Auto, Some(Vendor::Amd), &raw), []);
        let modified = EventRequest {
            cmask: 16,
            invert: true,
            ..request(Vendor::Intel, 0xC0, 0)
        };
        assert_eq!(
            chosen(BackingPolicy::Auto, Some(Vendor::Intel), &modified),
            [(Backing::Hardware, EventType::RAW.0, 0x1080_00C0)]
        );
        assert_eq!(chosen(BackingPolicy::Exact, None, &modified), []);
    }

    /// The bus cycles of a host of the same vendor run at that host's clock, which is not the TSC's; with
    /// anything else they are the TSC's.
    #[test]
    fn bus_cycles_have_one_clock_for_all_their_time() {
        let bus = request(Vendor::Intel, 0x3C, 1);
        let clock = (Backing::Clock, EventType::CLOCK.0, clock::REF_CYCLES);
        assert_eq!(
            chosen(BackingPolicy::Auto, Some(Vendor::Intel), &bus),
            [(Backing::Hardware, EventType::RAW.0, 0x013C)]
        );
        assert_eq!(chosen(BackingPolicy::Auto, Some(Vendor::Amd), &bus), [clock]);
        assert_eq!(chosen(BackingPolicy::Auto, None, &bus), [clock]);
        assert_eq!(chosen(BackingPolicy::Clock, Some(Vendor::Intel), &bus), [clock]);
        assert_eq!(chosen(BackingPolicy::Hardware, Some(Vendor::Amd), &bus), []);
    }

    /// Linux's generic cache events are the second level's on AMD.
    #[test]
    fn the_last_level_cache_is_not_counted_by_another_vendors_events() {
        for umask in [0x4F, 0x41] {
            let cache = request(Vendor::Intel, 0x2E, umask);
            assert_eq!(chosen(BackingPolicy::Auto, Some(Vendor::Amd), &cache), []);
            assert_eq!(chosen(BackingPolicy::Auto, Some(Vendor::Intel), &cache).len(), 1);
        }
        let misses = request(Vendor::Intel, 0xC5, 0);
        assert_eq!(
            chosen(BackingPolicy::Auto, Some(Vendor::Amd), &misses),
            [(Backing::Hardware, EventType::HARDWARE.0, 5)]
        );
    }

    #[test]
    fn transactions_are_counted_by_the_hosts_own_numbers_or_not_at_all() {
        let in_transaction = EventRequest {
            in_transaction: true,
            checkpointed: true,
            ..request(Vendor::Intel, 0x3C, 0)
        };
        assert_eq!(
            chosen(BackingPolicy::Auto, Some(Vendor::Intel), &in_transaction),
            [(Backing::Hardware, EventType::RAW.0, 0x3_0000_003C)]
        );
        assert_eq!(chosen(BackingPolicy::Auto, None, &in_transaction), []);
    }

    #[test]
    fn a_guests_own_events_never_count_the_host_and_keep_to_its_levels() {
        for policy in [BackingPolicy::Auto, BackingPolicy::Clock, BackingPolicy::Exact] {
            for (_, attr) in
                Sources::new(policy, Some(Vendor::Intel), |_| None).choose(&request(Vendor::Intel, 0x3C, 0))
            {
                assert!(attr.exclude_host && attr.pinned && attr.disabled);
                assert!(attr.exclude_kernel && !attr.exclude_user);
            }
        }
    }

    #[test]
    fn paravirtual_events_need_no_pmu_and_take_no_threshold() {
        let exits = request(Vendor::Amd, 0xFFF, 1);
        assert_eq!(
            chosen(BackingPolicy::None, None, &exits),
            [(Backing::KvmStat, EventType::KVM.0, 42)]
        );
        assert_eq!(
            chosen(
                BackingPolicy::Auto,
                Some(Vendor::Amd),
                &EventRequest { cmask: 1, ..exits }
            ),
            []
        );
        // This host's KVM has no such statistic.
        assert_eq!(
            chosen(BackingPolicy::Auto, None, &request(Vendor::Amd, 0xFFF, 4)),
            []
        );
    }
}
