//! The [`PerfCore`] itself, with its drivers and contexts.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, Weak};

use arc_swap::ArcSwap;

use crate::attr::{Attr, EventType};
use crate::context::{ContextCell, ContextOwner};
use crate::lock::{Guard, Lock, LockGuard, LockRank, LockRecord};
use crate::model::event::Source;
use crate::model::keys::EventKey;
use crate::model::software::{OpenEventCounts, SoftwareEventId};
use crate::model::wanted::RecordDemand;
use crate::pmu::{CounterMask, Pmu, PmuCounterCapacity, VcpuId};
use crate::record::SampleId;
use crate::service::config::{CoreLimits, PerfCoreConfig};
use crate::service::error::PerfEventOpenError;
use crate::service::memory::RingMemory;
use crate::service::open_events::OpenEvents;

/// The perf core of one VM, with its drivers, its VM context and its vCPU contexts. Clones are
/// cheap and share the same state.
#[derive(Clone)]
pub struct PerfCore {
    pub(crate) inner: Arc<CoreInner>,
}

pub(crate) struct CoreInner {
    pub config: PerfCoreConfig,
    pub limits: CoreLimits,
    pub drivers: RwLock<Vec<Driver>>,
    /// Context of the whole VM, which is always scheduled in.
    pub vm: Arc<ContextCell>,
    /// vCPU contexts. Every tick reads them without a lock.
    pub vcpus: ArcSwap<Vec<Arc<VcpuEventContext>>>,
    /// Lock that is held while events are opened and closed and vCPUs are added and removed, so
    /// that a new vCPU inherits every VM-wide event. Never acquired on a hot path. First in the
    /// lock order: topology, family, context.
    topology: Lock<Topology>,
    pub opened: OpenEvents,
    /// Numbers of open events for each software event ID.
    pub gates: Arc<OpenEventCounts>,
    /// Numbers of open events that request each type of side-band record.
    pub record_demand: RecordDemand,
    /// Ring memory charged to each user.
    pub locked: Arc<RingMemory>,
}

#[derive(Debug, Default)]
pub(crate) struct Topology {
    /// Number of VM-wide families opened so far. Contexts that were created at the same value
    /// contain children of the same families.
    pub generation: u64,
}

pub(crate) struct Driver {
    pub pmu: Arc<dyn Pmu>,
    pub capacity: PmuCounterCapacity,
}

/// The counters that an event needs, on the hardware driver that counts it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HardwareNeeds {
    /// Index of the driver in the core's list of drivers.
    pub driver: usize,
    /// All counters of the driver.
    pub counters: CounterMask,
    /// Counters that can hold the event.
    pub suitable_counters: CounterMask,
}

impl HardwareNeeds {
    /// Returns the requirements of an event with `attr` on driver `pmu`, or `None` for a software
    /// driver, whose events need no slot.
    pub fn of(driver: usize, pmu: &dyn Pmu, capacity: PmuCounterCapacity, attr: &Attr) -> Option<Self> {
        match capacity {
            PmuCounterCapacity::Unlimited => None,
            PmuCounterCapacity::Counters(counters) => Some(Self {
                driver,
                counters,
                suitable_counters: pmu.constraint(attr) & counters,
            }),
        }
    }
}

impl std::fmt::Debug for PerfCore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PerfCore")
            .field("vcpus", &self.inner.vcpus.load().len())
            .finish_non_exhaustive()
    }
}

impl PerfCore {
    /// Lowest context ID that [`PerfCore::add_thread`] assigns. Lower IDs belong to vCPUs.
    pub const FIRST_THREAD: VcpuId = VcpuId(1 << 31);

    /// ID of the context that [`PerfCore::add_cpu`] creates for CPU 0. The IDs for other CPUs
    /// follow in order.
    pub const FIRST_CPU: VcpuId = VcpuId(3 << 30);

    /// Creates a core without drivers and vCPUs. Does not validate `config`; use
    /// [`PerfCore::builder`] for validation.
    #[must_use]
    pub fn new(config: PerfCoreConfig) -> Self {
        let vm = Arc::new(ContextCell::new(
            config.share,
            config.mux_config(),
            Arc::clone(&config.clock),
            config.tick_timer.clone(),
            ContextOwner::Vm,
        ));
        let now_ns = config.clock.now_ns();
        vm.lock().sched_in(now_ns);
        Self {
            inner: Arc::new(CoreInner {
                limits: CoreLimits::new(&config),
                drivers: RwLock::new(Vec::new()),
                vm,
                vcpus: ArcSwap::default(),
                topology: Lock::new(LockRank::Topology, Topology::default()),
                opened: OpenEvents::default(),
                gates: Arc::default(),
                record_demand: RecordDemand::default(),
                locked: Arc::default(),
                config,
            }),
        }
    }
}

impl CoreInner {
    pub fn topology(&self) -> LockGuard<'_, Topology> {
        self.topology.lock()
    }

    fn drivers(&self) -> Guard<RwLockReadGuard<'_, Vec<Driver>>> {
        let held = LockRecord::wait(LockRank::Drivers, std::ptr::from_ref(&self.drivers).addr());
        Guard::new(self.drivers.read().unwrap_or_else(PoisonError::into_inner), held)
    }

    /// Acquires the topology lock if it is free, without blocking.
    pub fn try_topology(&self) -> Option<LockGuard<'_, Topology>> {
        self.topology.try_lock()
    }

    /// Returns the number of slots of the registered PMU with the fewest slots, or 0 without a PMU.
    pub fn min_slots(&self) -> usize {
        let drivers = self.drivers();
        let slots = |d: &Driver| match d.capacity {
            PmuCounterCapacity::Counters(counters) => Some(counters.len()),
            PmuCounterCapacity::Unlimited => None,
        };
        drivers.iter().filter_map(slots).min().unwrap_or(0)
    }

    /// Reserves slots for VM-wide events in all contexts except that of the VM, and replans these
    /// contexts.
    pub fn reserve_slots(&self, reserved: usize) {
        let _topology = self.topology();
        for vcpu in self.vcpus.load().iter() {
            let cell = vcpu.cell.load();
            let now_ns = cell.now_ns();
            cell.lock().reserve(reserved, now_ns);
        }
    }

    /// Returns the driver for events of type `ty`, with its index and capacity.
    pub fn driver(&self, ty: EventType) -> Option<(usize, Arc<dyn Pmu>, PmuCounterCapacity)> {
        let drivers = self.drivers();
        let at = drivers.iter().position(|d| d.pmu.supports_type(ty))?;
        Some((at, Arc::clone(&drivers[at].pmu), drivers[at].capacity))
    }

    /// Returns the trailer of a record that originates from context `origin` at time `time_ns`. For
    /// the context of a host CPU, the trailer does not identify a thread, because the running
    /// thread is unknown.
    pub fn record_origin(&self, origin: &ContextCell, time_ns: u64) -> SampleId {
        let (pid, tid, cpu) = match (origin.cpu(), origin.vcpu()) {
            (Some(cpu), _) => (u32::MAX, u32::MAX, cpu),
            (None, Some((vcpu, _))) => (self.config.pid, origin.record_tid(), vcpu.0),
            (None, None) => (self.config.pid, 0, u32::MAX),
        };
        SampleId {
            pid,
            tid,
            cpu,
            time_ns,
            ..SampleId::default()
        }
    }

    /// Performs a tick of one context, after the timer has expired `expirations` times.
    pub fn tick(&self, cell: &ContextCell, expirations: u64) {
        let now_ns = cell.now_ns();
        let mut context = cell.lock();
        context.ticks = context.ticks.saturating_add(expirations.max(1));
        context.tick_sampling(now_ns, self.config.tick_hz, self.record_origin(cell, now_ns));
        context.look_periodically(now_ns);
        context.retry_refused(now_ns);
        context.rotate(now_ns);
    }

    /// Creates the source of the counts of an event with attributes `attr` in context `cell`. A
    /// driver event is opened in the group of `leader`. Also returns the hardware requirements if
    /// the driver is a hardware driver.
    pub fn source(
        &self,
        attr: &Attr,
        cell: &ContextCell,
        leader: Option<EventKey>,
    ) -> Result<(Source, Option<HardwareNeeds>), PerfEventOpenError> {
        if attr.ty == EventType::VMM {
            if SoftwareEventId::from_config(attr.config).is_none() {
                return Err(PerfEventOpenError::NoSuchSoftwareEvent(attr.config));
            }
            return Ok((Source::Raised(0), None));
        }
        let (at, pmu, capacity) = self
            .driver(attr.ty)
            .ok_or(PerfEventOpenError::NoDriver(attr.ty))?;
        let group = leader.and_then(|leader| cell.lock().driver_group(leader));
        let event = match group {
            Some(group) => pmu.open_in_group(attr, cell.target(), &group)?,
            None => pmu.open(attr, cell.target())?,
        };
        Ok((
            Source::Driver(event),
            HardwareNeeds::of(at, &*pmu, capacity, attr),
        ))
    }
}

/// The context of one vCPU.
///
/// The vCPU thread brackets guest execution with [`VcpuEventContext::sched_in`] and
/// [`VcpuEventContext::sched_out`] (around the run loop rather than each VM entry), and calls
/// [`VcpuEventContext::service_overflows`] after an overflow signal. All methods are thread-safe.
#[derive(Debug)]
pub struct VcpuEventContext {
    pub(crate) vcpu: VcpuId,
    pub(crate) tid: i32,
    /// Current context of the vCPU. A thread that runs several vCPUs may swap their contexts (see
    /// [`VcpuEventContext::switch_to`]).
    pub(crate) cell: ArcSwap<ContextCell>,
    pub(crate) core: Weak<CoreInner>,
    pub(crate) gates: Arc<OpenEventCounts>,
    /// `true` after the vCPU was removed. Method calls through remaining references then have no
    /// effect.
    pub(crate) removed: AtomicBool,
    /// Reference to `Context::errors` of the current context. Separate from `cell`, because it is
    /// read at each VM entry.
    pub(crate) errors: Arc<AtomicU64>,
    /// Value of [`VcpuEventContext::errors`] at the last call of [`VcpuEventContext::take_errors`].
    pub(crate) handled_errors: AtomicU64,
}
