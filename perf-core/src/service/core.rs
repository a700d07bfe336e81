//! The core: drivers, contexts, and the calls that concern all of them.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, Weak};

use arc_swap::ArcSwap;

use crate::attr::{Attr, EventType};
use crate::context::{ContextCell, Whose};
use crate::lock::{Guard, Held, Lock, LockGuard, Rank};
use crate::model::event::Source;
use crate::model::keys::EventKey;
use crate::model::software::{Gates, SoftwareId};
use crate::model::wanted::Wanted;
use crate::pmu::{Capacity, CounterMask, Pmu, VcpuId};
use crate::record::SampleId;
use crate::service::config::{CoreConfig, Limits};
use crate::service::error::OpenError;
use crate::service::memory::Locked;
use crate::service::opened::OpenEvents;

/// Everything by id: drivers, the VM context and the vCPU contexts. Cheap to clone; all clones are the same
/// core.
#[derive(Clone)]
pub struct Core {
    pub(crate) inner: Arc<CoreInner>,
}

pub(crate) struct CoreInner {
    pub config: CoreConfig,
    pub limits: Limits,
    pub drivers: RwLock<Vec<Driver>>,
    /// The context of the machine as a whole; always in.
    pub vm: Arc<ContextCell>,
    /// Read by every tick without a lock.
    pub vcpus: ArcSwap<Vec<Arc<VcpuContext>>>,
    /// Held while events are opened and closed and vCPUs come and go, so that a VM-wide event and a new vCPU
    /// cannot miss each other. Never taken on a hot path. First in the lock order: topology, family,
    /// context.
    topology: Lock<Topology>,
    /// The events that are open.
    pub opened: OpenEvents,
    /// Which raised events anybody counts.
    pub gates: Arc<Gates>,
    /// Which side-band records anybody wants.
    pub wanted: Wanted,
    /// Ring memory by user.
    pub locked: Arc<Locked>,
}

#[derive(Debug, Default)]
pub(crate) struct Topology {
    /// Counts changes of the set of VM-wide events.
    pub generation: u64,
}

pub(crate) struct Driver {
    pub pmu: Arc<dyn Pmu>,
    pub capacity: Capacity,
}

/// What an event needs of a hardware driver.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hardware {
    /// Index of the driver in the registry.
    pub driver: usize,
    /// All of its counters.
    pub counters: CounterMask,
    /// Those that can hold the event.
    pub fits: CounterMask,
}

impl Hardware {
    /// `None` for a driver of the software class.
    pub fn of(driver: usize, pmu: &dyn Pmu, capacity: Capacity, attr: &Attr) -> Option<Self> {
        match capacity {
            Capacity::Unlimited => None,
            Capacity::Counters(counters) => Some(Self {
                driver,
                counters,
                fits: pmu.constraint(attr) & counters,
            }),
        }
    }
}

impl std::fmt::Debug for Core {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Core")
            .field("vcpus", &self.inner.vcpus.load().len())
            .finish_non_exhaustive()
    }
}

impl Core {
    /// The least number of contexts that [`Core::add_thread`] makes. vCPUs have lower ones.
    pub const FIRST_THREAD: VcpuId = VcpuId(1 << 31);

    /// The number of the context that [`Core::add_cpu`] makes for CPU 0; those of others follow.
    pub const FIRST_CPU: VcpuId = VcpuId(3 << 30);

    /// A core with no drivers and no vCPUs. [`Core::builder`] checks its settings first.
    #[must_use]
    pub fn new(config: CoreConfig) -> Self {
        let vm = Arc::new(ContextCell::new(
            config.share,
            config.mux_config(),
            Arc::clone(&config.clock),
            Whose::Vm,
        ));
        let now_ns = config.clock.now_ns();
        vm.lock().sched_in(now_ns);
        Self {
            inner: Arc::new(CoreInner {
                limits: Limits::new(&config),
                drivers: RwLock::new(Vec::new()),
                vm,
                vcpus: ArcSwap::default(),
                topology: Lock::new(Rank::Topology, Topology::default()),
                opened: OpenEvents::default(),
                gates: Arc::default(),
                wanted: Wanted::default(),
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
        let held = Held::wait(Rank::Drivers, std::ptr::from_ref(&self.drivers).addr());
        Guard::new(self.drivers.read().unwrap_or_else(PoisonError::into_inner), held)
    }

    /// The topology lock if it is free.
    pub fn try_topology(&self) -> Option<LockGuard<'_, Topology>> {
        self.topology.try_lock()
    }

    /// The slots of the smallest PMU; 0 without one.
    pub fn fewest_slots(&self) -> usize {
        let drivers = self.drivers();
        let slots = |d: &Driver| match d.capacity {
            Capacity::Counters(counters) => Some(counters.len()),
            Capacity::Unlimited => None,
        };
        drivers.iter().filter_map(slots).min().unwrap_or(0)
    }

    /// Reserves slots in the contexts there are, and plans them anew.
    pub fn reserve_slots(&self, reserved: usize) {
        let _topology = self.topology();
        for vcpu in self.vcpus.load().iter() {
            let cell = vcpu.cell.load();
            let now_ns = cell.now_ns();
            cell.lock().reserve(reserved, now_ns);
        }
    }

    /// The driver for `ty`: its index, itself, and its capacity.
    pub fn driver(&self, ty: EventType) -> Option<(usize, Arc<dyn Pmu>, Capacity)> {
        let drivers = self.drivers();
        let at = drivers.iter().position(|d| d.pmu.serves(ty))?;
        Some((at, Arc::clone(&drivers[at].pmu), drivers[at].capacity))
    }

    /// The vCPU of `origin` and the time, as trailers of records say them. What runs on a CPU of the host is
    /// not known.
    pub fn written_by(&self, origin: &ContextCell, time_ns: u64) -> SampleId {
        let (pid, tid, cpu) = match (origin.cpu(), origin.vcpu()) {
            (Some(cpu), _) => (u32::MAX, u32::MAX, cpu),
            (None, Some((vcpu, tid))) => (self.config.pid, tid.cast_unsigned(), vcpu.0),
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

    /// A tick of one context, after `expirations` of the timer.
    pub fn tick(&self, cell: &ContextCell, expirations: u64) {
        let now_ns = cell.now_ns();
        let mut context = cell.lock();
        context.ticks = context.ticks.saturating_add(expirations.max(1));
        let (tick_hz, limit_hz) = (self.config.tick_hz, self.limits.sample_rate_hz());
        context.tick_sampling(now_ns, tick_hz, limit_hz, self.written_by(cell, now_ns));
        context.look_now_and_then(now_ns);
        context.try_refused_again(now_ns);
        context.rotate(now_ns);
    }

    /// Where the counts of `attr` in `cell`, in the group of `leader`, come from, and what it needs of the
    /// hardware if that is a hardware driver.
    pub fn source(
        &self,
        attr: &Attr,
        cell: &ContextCell,
        leader: Option<EventKey>,
    ) -> Result<(Source, Option<Hardware>), OpenError> {
        if attr.ty == EventType::VMM {
            if SoftwareId::from_config(attr.config).is_none() {
                return Err(OpenError::NoSuchSoftwareEvent(attr.config));
            }
            return Ok((Source::Raised(0), None));
        }
        let (at, pmu, capacity) = self.driver(attr.ty).ok_or(OpenError::NoDriver(attr.ty))?;
        let group = leader.and_then(|leader| cell.lock().driver_group(leader));
        let event = match group {
            Some(group) => pmu.open_in_group(attr, cell.target(), &group)?,
            None => pmu.open(attr, cell.target())?,
        };
        Ok((Source::Driver(event), Hardware::of(at, &*pmu, capacity, attr)))
    }
}

/// The context of one vCPU.
///
/// Its thread brackets guest execution with [`VcpuContext::sched_in`] and [`VcpuContext::sched_out`] (around
/// the run loop, not around each entry) and calls [`VcpuContext::service_overflows`] when an overflow's
/// signal interrupted it. All methods may be called from any thread.
#[derive(Debug)]
pub struct VcpuContext {
    pub(crate) vcpu: VcpuId,
    pub(crate) tid: i32,
    /// Its context. Threads that run several vCPUs may exchange those of two: see
    /// [`VcpuContext::switch_to`].
    pub(crate) cell: ArcSwap<ContextCell>,
    pub(crate) core: Weak<CoreInner>,
    pub(crate) gates: Arc<Gates>,
    /// It was removed: nothing happens to it any more, whoever still holds it.
    pub(crate) gone: AtomicBool,
    /// [`Context::errors`] of its context, whichever that is: read at each entry, so not by way of `cell`.
    pub(crate) errors: Arc<AtomicU64>,
    /// [`VcpuContext::errors`] as its thread has seen them.
    pub(crate) seen_errors: AtomicU64,
}
