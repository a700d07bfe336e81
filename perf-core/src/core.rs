//! The core: drivers, contexts, and the calls that concern all of them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, Weak};

use arc_swap::ArcSwap;

use crate::attr::{Attr, EventType};
use crate::context::{ContextCell, ContextStats};
use crate::event::{Event, EventShared, Source, State};
use crate::inherit::Child;
use crate::limits::{CoreConfig, Limits, Role, Session, SessionInner};
use crate::lock::{Guard, Held, Lock, LockGuard, Rank};
use crate::notify::Poll;
use crate::open::OpenError;
use crate::output::Locked;
use crate::overflow::SampleRegs;
use crate::pmu::{Capacity, CounterMask, Pmu, VcpuId};
use crate::sample::{Overflowed, Rate};
use crate::schedule::SharePolicy;
use crate::sideband::Wanted;
use crate::software::{Gates, SoftwareId};

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

    /// A core with no drivers and no vCPUs. [`Core::builder`] checks its settings first.
    #[must_use]
    pub fn new(config: CoreConfig) -> Self {
        let vm = Arc::new(ContextCell::new(
            config.share,
            config.mux_config(),
            Arc::clone(&config.clock),
            None,
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
                gates: Arc::default(),
                wanted: Wanted::default(),
                locked: Arc::default(),
                config,
            }),
        }
    }

    /// Adds a driver. Of several that serve a type the first registered is asked.
    pub fn register(&self, pmu: Arc<dyn Pmu>) {
        let capacity = pmu.capacity();
        log::info!("driver {}: {capacity:?}", pmu.name());
        self.inner
            .drivers
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .push(Driver { pmu, capacity });
    }

    /// The time that records carry, now, in ns of the core's clock.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        self.inner.config.clock.now_ns()
    }

    /// Whether `session` may sample what `attr` asks for at its rate: what [`Core::open`] checks of it first.
    /// For samples that the host's kernel takes without an event of the core.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn may_sample(&self, session: &Session, attr: &Attr) -> Result<(), OpenError> {
        let limits = &self.inner.limits;
        limits.check_attr(attr, session.inner.is_admin())?;
        limits.check_rate(attr)
    }

    /// A session for user `uid`.
    #[must_use]
    pub fn session(&self, uid: u32, role: Role) -> Session {
        Session {
            inner: Arc::new(SessionInner {
                uid,
                role,
                owned: Lock::new(Rank::Session, Vec::new()),
            }),
        }
    }

    /// Adds a vCPU that host thread `tid` runs. It inherits the VM-wide events marked so; if one of them
    /// cannot be opened the vCPU is not added and nothing is left behind.
    ///
    /// # Errors
    /// [`OpenError::VcpuExists`], or why an inherited event could not be opened.
    pub fn add_vcpu(&self, vcpu: VcpuId, tid: i32) -> Result<Arc<VcpuContext>, OpenError> {
        let topology = self.inner.topology();
        let vcpus = self.inner.vcpus.load_full();
        if vcpus.iter().any(|v| v.id() == vcpu) {
            return Err(OpenError::VcpuExists(vcpu));
        }
        let cell = Arc::new(ContextCell::new(
            self.inner.limits.share(),
            self.inner.config.mux_config(),
            Arc::clone(&self.inner.config.clock),
            Some((vcpu, tid)),
        ));
        for members in self.inner.inherited_groups() {
            if let Err(error) = self.inner.inherit_group(&members, &cell) {
                self.inner.abandon(&cell);
                return Err(error);
            }
        }
        cell.lock().clone_of = self.inner.inherits_all().then_some(topology.generation);
        self.inner.task_record(&cell, true);
        self.inner
            .comm_record(&cell, format!("vcpu{}", vcpu.0).as_bytes());
        let context = Arc::new(VcpuContext {
            vcpu,
            tid,
            cell: ArcSwap::new(cell),
            core: Arc::downgrade(&self.inner),
            gates: Arc::clone(&self.inner.gates),
            gone: AtomicBool::new(false),
            seen_errors: AtomicU64::new(0),
        });
        let mut list = Vec::clone(&vcpus);
        list.push(Arc::clone(&context));
        list.sort_by_key(|v| v.id());
        self.inner.vcpus.store(Arc::new(list));
        Ok(context)
    }

    /// Adds a context for host thread `tid` (0: the calling one), which need not run a vCPU: its events count
    /// that thread between [`VcpuContext::sched_in`] and [`VcpuContext::sched_out`]. It has the first
    /// free number from [`Core::FIRST_THREAD`] on, by which events are opened on it and samples name it,
    /// and is removed like a vCPU.
    ///
    /// # Errors
    /// As [`Core::add_vcpu`].
    pub fn add_thread(&self, tid: i32) -> Result<Arc<VcpuContext>, OpenError> {
        let mut id = Self::FIRST_THREAD;
        loop {
            match self.add_vcpu(id, tid) {
                // Somebody else was first.
                Err(OpenError::VcpuExists(_)) => id.0 += 1,
                other => return other,
            }
        }
    }

    /// Removes a vCPU: everything is taken off, inherited events fold into their parents, and events opened
    /// on the vCPU itself keep their last value for their handles.
    ///
    /// # Errors
    /// [`OpenError::NoSuchVcpu`].
    pub fn remove_vcpu(&self, vcpu: VcpuId) -> Result<(), OpenError> {
        let _topology = self.inner.topology();
        let vcpus = self.inner.vcpus.load_full();
        let context = vcpus
            .iter()
            .find(|v| v.id() == vcpu)
            .ok_or(OpenError::NoSuchVcpu(vcpu))?;
        let list: Vec<_> = vcpus.iter().filter(|v| v.id() != vcpu).map(Arc::clone).collect();
        self.inner.vcpus.store(Arc::new(list));
        context.gone.store(true, Ordering::Relaxed);
        self.inner.exit(&context.cell.load_full());
        Ok(())
    }

    /// The context of a vCPU.
    #[must_use]
    pub fn vcpu(&self, vcpu: VcpuId) -> Option<Arc<VcpuContext>> {
        self.inner.vcpus.load().iter().find(|v| v.id() == vcpu).cloned()
    }

    /// To be called by the VM's timer, [`CoreConfig::tick_hz`] times a second while [`Core::needs_tick`]:
    /// rotates waiting groups, adjusts frequencies, lifts throttles, and looks now and then whether what
    /// is on counts. Takes each context's lock in turn and no other.
    pub fn tick(&self) {
        self.inner.tick(&self.inner.vm);
        for vcpu in self.inner.vcpus.load().iter() {
            self.inner.tick(&vcpu.cell.load());
        }
    }

    /// Whether an event of some vCPU went to the error state and its thread has not seen that yet: it may be
    /// in the guest for long, and wants to be interrupted.
    #[must_use]
    pub fn has_unseen_errors(&self) -> bool {
        let vcpus = self.inner.vcpus.load();
        vcpus
            .iter()
            .any(|v| v.errors() != v.seen_errors.load(Ordering::Relaxed))
    }

    /// Whether [`Core::tick`] has anything to do. While not, the VMM may stop its timer and ask again after
    /// each call that opens or enables.
    #[must_use]
    pub fn needs_tick(&self) -> bool {
        // Each lock is let go before the next is taken.
        let vm = self.inner.vm.lock().needs_tick();
        vm || self
            .inner
            .vcpus
            .load()
            .iter()
            .any(|v| v.cell.load().lock().needs_tick())
    }

    /// The time of [`CoreConfig::clock`] at which [`Core::rotate`] is due, if groups share slots. Under
    /// [`crate::mux::MuxPolicy::Adaptive`] that is an irregular one; under rotation it is the next tick.
    #[must_use]
    pub fn next_turn_ns(&self) -> Option<u64> {
        let vcpus = self.inner.vcpus.load();
        let turns = vcpus.iter().filter_map(|v| v.cell.load().lock().next_turn_ns());
        let first = turns.min();
        // Not in one expression: it would hold the VM's lock while it waits for those of vCPUs.
        let vm = self.inner.vm.lock().next_turn_ns();
        first.into_iter().chain(vm).min()
    }

    /// The rotation half of [`Core::tick`], for timers that follow [`Core::next_turn_ns`].
    pub fn rotate(&self) {
        for vcpu in self.inner.vcpus.load().iter() {
            let cell = vcpu.cell.load();
            let now_ns = cell.now_ns();
            cell.lock().rotate(now_ns);
        }
        let now_ns = self.inner.vm.now_ns();
        self.inner.vm.lock().rotate(now_ns);
    }

    /// Changes who gets slots, at once and for vCPUs added later. Under [`crate::SharePolicy::Strict`] what
    /// is open stays open; only new events are refused.
    pub fn set_share(&self, share: SharePolicy) {
        let _topology = self.inner.topology();
        self.inner.limits.set_share(share);
        for vcpu in self.inner.vcpus.load().iter() {
            let cell = vcpu.cell.load();
            let now_ns = cell.now_ns();
            cell.lock().set_policy(share, now_ns);
        }
        let now_ns = self.inner.vm.now_ns();
        self.inner.vm.lock().set_policy(share, now_ns);
    }

    /// Who gets slots now.
    #[must_use]
    pub fn share(&self) -> SharePolicy {
        self.inner.limits.share()
    }

    /// What a vCPU's context holds; `None` when there is no such vCPU.
    #[must_use]
    pub fn vcpu_stats(&self, vcpu: VcpuId) -> Option<ContextStats> {
        let vcpus = self.inner.vcpus.load();
        vcpus.iter().find(|v| v.id() == vcpu).map(|v| v.stats())
    }

    /// What the VM context holds.
    #[must_use]
    pub fn vm_stats(&self) -> ContextStats {
        self.inner.vm.lock().stats()
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

    /// Whether a new vCPU inherits every VM-wide event.
    fn inherits_all(&self) -> bool {
        let vm = self.vm.lock();
        vm.groups.iter().all(|(_, g)| {
            let leader = &vm.events[g.leader()];
            leader.shared.attr.inherit || !matches!(leader.source, Source::Family)
        })
    }

    /// The driver for `ty`: its index, itself, and its capacity.
    pub fn driver(&self, ty: EventType) -> Option<(usize, Arc<dyn Pmu>, Capacity)> {
        let drivers = self.drivers();
        let at = drivers.iter().position(|d| d.pmu.serves(ty))?;
        Some((at, Arc::clone(&drivers[at].pmu), drivers[at].capacity))
    }

    fn tick(&self, cell: &ContextCell) {
        let now_ns = cell.now_ns();
        let mut context = cell.lock();
        let (tick_hz, limit_hz) = (self.config.tick_hz, self.limits.sample_rate_hz());
        context.tick_sampling(now_ns, tick_hz, limit_hz, self.written_by(cell, now_ns));
        context.look_now_and_then(now_ns);
        context.try_refused_again(now_ns);
        context.rotate(now_ns);
    }

    /// The groups a new vCPU inherits: each a leader, which is marked so, and its siblings whatever their own
    /// mark.
    fn inherited_groups(&self) -> Vec<Vec<(usize, Arc<EventShared>)>> {
        let vm = self.vm.lock();
        let mut groups: Vec<Vec<(usize, Arc<EventShared>)>> = vm
            .groups
            .iter()
            .filter(|(_, g)| {
                let leader = &vm.events[g.leader()];
                leader.shared.attr.inherit && matches!(leader.source, Source::Family)
            })
            .map(|(_, g)| {
                g.members
                    .iter()
                    .map(|m| (*m, Arc::clone(&vm.events[*m].shared)))
                    .collect()
            })
            .collect();
        // The order of opening, so that contexts with the same history are laid out alike.
        groups.sort_by_key(|members| members[0].1.id);
        groups
    }

    /// Makes the children of a group in `cell`.
    fn inherit_group(
        &self,
        members: &[(usize, Arc<EventShared>)],
        cell: &Arc<ContextCell>,
    ) -> Result<(), OpenError> {
        let mut leader = None;
        for (parent_key, parent) in members {
            self.check_child(&parent.attr, cell, leader)?;
            let key = self.inherit(*parent_key, parent, cell, leader)?;
            leader.get_or_insert(key);
        }
        Ok(())
    }

    /// Makes one child of `parent` in `cell`, in the parent's present state, and links it.
    pub fn inherit(
        &self,
        parent_key: usize,
        parent: &Arc<EventShared>,
        cell: &Arc<ContextCell>,
        leader: Option<usize>,
    ) -> Result<usize, OpenError> {
        let shared = Arc::new(EventShared::new(
            parent.attr.clone(),
            parent.owner,
            parent.cookie,
            false,
        ));
        let (source, hardware) = self.source(&parent.attr, cell, leader)?;
        let family = parent.family.as_ref().expect("only families are inherited");
        // Under the family's lock, so that an enable or disable of the family comes wholly before or after.
        let mut family = family.lock();
        let (enabled, mut rate, output, enable_on_exec) = {
            let mut vm = self.vm.lock();
            let found = vm.get(parent_key, parent);
            found.map_or((false, Rate::default(), None, false), |e| {
                (
                    e.state >= State::Inactive,
                    e.sampling.rate(),
                    e.output.clone(),
                    e.enable_on_exec,
                )
            })
        };
        if rate.freq != 0
            && let Some(sibling) = family.live().first()
        {
            // The family counts nothing itself. What its children have found is better than the 1 it began
            // with.
            rate.period = sibling.cell.lock().events[sibling.key].sampling.period;
        }
        let now_ns = cell.now_ns();
        let mut context = cell.lock();
        let reserved = self.limits.reserved_slots.load(Ordering::Relaxed);
        let place = hardware.map(|h| (context.pool(h.driver, h.counters, reserved), h.fits));
        let mut event = Event::new(shared, Some(Arc::clone(parent)), place, source, enabled);
        event.sampling.inherit_rate(rate);
        event.output = output;
        event.enable_on_exec = enable_on_exec;
        let key = context.add(event, leader, now_ns);
        cell.publish_raised(&context);
        drop(context);
        family.add(Child {
            cell: Arc::clone(cell),
            key,
        });
        Ok(key)
    }

    /// Where the counts of `attr` in `cell`, in the group of `leader`, come from, and what it needs of the
    /// hardware if that is a hardware driver.
    pub fn source(
        &self,
        attr: &crate::attr::Attr,
        cell: &ContextCell,
        leader: Option<usize>,
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

    /// Takes back a hot-add that failed: children are unlinked and nothing is folded.
    fn abandon(&self, cell: &Arc<ContextCell>) {
        for (key, parent) in self.children_in(cell) {
            if let Some(family) = &parent.family {
                let mut family = family.lock();
                let _ = family.unlink(|child| child.is(cell, key));
            }
        }
    }

    fn children_in(&self, cell: &ContextCell) -> Vec<(usize, Arc<EventShared>)> {
        let context = cell.lock();
        context
            .events
            .iter()
            .filter_map(|(key, e)| Some((key, Arc::clone(e.parent.as_ref()?))))
            .collect()
    }

    /// The exit of a vCPU.
    fn exit(&self, cell: &Arc<ContextCell>) {
        let now_ns = cell.now_ns();
        {
            let mut context = cell.lock();
            context.sched_out(now_ns);
            context.dead = true;
            context.forget_pending();
        }
        // No sample follows it: everything is off, and nothing is left to serve. READ records may.
        self.task_record(cell, false);
        let children = self.children_in(cell);
        for (key, _) in &children {
            self.read_record(cell, *key);
        }
        for (key, parent) in children {
            let Some(family) = &parent.family else { continue };
            let mut family = family.lock();
            if family.fold(&parent.folded, |child| child.is(cell, key)).is_some() {
                let mut context = cell.lock();
                let event = context.remove(key, now_ns);
                cell.publish_raised(&context);
                // Descriptors are not closed under the lock.
                drop(context);
                drop(event);
            }
        }
        // What was opened on the vCPU itself lingers for its handles, and never counts again.
        for (_, event) in &cell.lock().events {
            event.shared.notify.signal(Poll::HUP);
            if let Some(output) = event.output.as_ref().filter(|o| o.owner == event.shared.id) {
                output.ring.hang_up();
            }
        }
    }
}

/// The context of one vCPU.
///
/// Its thread brackets guest execution with [`VcpuContext::sched_in`] and [`VcpuContext::sched_out`] (around
/// the run loop, not around each entry) and calls [`VcpuContext::service_overflows`] when an overflow's
/// signal interrupted it. All methods may be called from any thread.
#[derive(Debug)]
pub struct VcpuContext {
    vcpu: VcpuId,
    tid: i32,
    /// Its context. Threads that run several vCPUs may exchange those of two: see
    /// [`VcpuContext::switch_to`].
    pub(crate) cell: ArcSwap<ContextCell>,
    pub(crate) core: Weak<CoreInner>,
    pub(crate) gates: Arc<Gates>,
    /// It was removed: nothing happens to it any more, whoever still holds it.
    pub(crate) gone: AtomicBool,
    /// [`VcpuContext::errors`] as its thread has seen them.
    pub(crate) seen_errors: AtomicU64,
}

impl VcpuContext {
    /// Which vCPU.
    #[must_use]
    pub fn id(&self) -> VcpuId {
        self.vcpu
    }

    /// The host thread that runs it.
    #[must_use]
    pub fn tid(&self) -> i32 {
        self.tid
    }

    /// The vCPU starts or resumes: its time goes on and its events go on the PMU. Nothing if it is in
    /// already.
    pub fn sched_in(&self) {
        let cell = self.cell.load();
        let now_ns = cell.now_ns();
        cell.lock().sched_in(now_ns);
    }

    /// The vCPU pauses: its events go off and its time stands still.
    ///
    /// Raises [`SoftwareId::ContextSwitches`] first, so that events see it while they are on.
    pub fn sched_out(&self) {
        self.software_event(SoftwareId::ContextSwitches, 1, None, &mut |_| {});
        self.go_out();
    }

    pub(crate) fn go_out(&self) {
        let cell = self.cell.load();
        let now_ns = cell.now_ns();
        cell.lock().sched_out(now_ns);
    }

    /// [`Core::tick`] for this context alone.
    pub fn tick(&self) {
        if let Some(core) = self.core.upgrade() {
            core.tick(&self.cell.load());
        }
    }

    /// What the context holds.
    #[must_use]
    pub fn stats(&self) -> ContextStats {
        self.cell.load().lock().stats()
    }

    /// Counts up whenever an event of this context goes to the error state. The VMM compares it at entry to
    /// learn that a guest counter has lost its place ([`VcpuContext::see_errors`]); one load.
    #[must_use]
    pub fn errors(&self) -> u64 {
        self.cell.load().errors.load(Ordering::Acquire)
    }

    /// Whether an event went to the error state since the last call. For the vCPU's thread, at each entry and
    /// after it enabled something itself.
    pub fn see_errors(&self) -> bool {
        let errors = self.errors();
        let unseen = self.seen_errors.load(Ordering::Relaxed) != errors;
        if unseen {
            self.seen_errors.store(errors, Ordering::Relaxed);
        }
        unseen
    }

    /// The context's time: nanoseconds for which it was in. Times of events are of it.
    #[must_use]
    pub fn time_ns(&self) -> u64 {
        let cell = self.cell.load();
        let now_ns = cell.now_ns();
        cell.lock().clock.advance(now_ns)
    }

    /// Asks the drivers whether the events that are on have their counters still: a system call for each
    /// hardware event at most. Those that have not go to the error state, or wait for their next turn.
    /// [`Core::tick`] does it now and then.
    pub fn look(&self) {
        let cell = self.cell.load();
        let now_ns = cell.now_ns();
        cell.lock().look(now_ns);
    }

    /// Serves the overflows of this context: accounts them, writes SAMPLE records, and reports those of
    /// events that were opened with a cookie. To be called when an overflow's signal was seen; calling it
    /// without one costs one driver call per armed event. Allocates nothing.
    ///
    /// `sink` is called with no lock held and may use handles.
    ///
    /// Returns how many events had overflowed. 0 says that the signal was not for us, and someone else may
    /// want it.
    pub fn service_overflows(&self, regs: &mut dyn SampleRegs, sink: &mut dyn FnMut(Overflowed)) -> u32 {
        let Some(core) = self.core.upgrade() else { return 0 };
        crate::overflow::service(&core, &self.cell.load(), regs, sink)
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;
    use crate::open::{OpenFlags, OpenTarget};
    use crate::pmu::sim::SimPmu;
    use crate::record::CpuMode;

    struct Regs;

    impl SampleRegs for Regs {
        fn mode(&mut self) -> CpuMode {
            CpuMode::GuestUser
        }
        fn ip(&mut self) -> u64 {
            0
        }
    }

    /// Tick, read, overflow, ring write and switching of one vCPU go on while somebody else holds every lock
    /// that vCPUs share, and those of all other contexts.
    #[test]
    fn hot_paths_take_no_shared_lock() {
        let core = Core::new(CoreConfig::default());
        let pmu = Arc::new(SimPmu::with_slots(2));
        core.register(Arc::clone(&pmu) as Arc<dyn Pmu>);
        let [hot, other] = [0, 1].map(|id| core.add_vcpu(VcpuId(id), 1 + id as i32).unwrap());
        let session = core.session(0, Role::Admin);
        let open = |attr| {
            let flags = OpenFlags {
                cookie: Some(7),
                ..OpenFlags::default()
            };
            core.open(&session, attr, OpenTarget::Vcpu(VcpuId(0)), None, flags)
                .unwrap()
        };
        let sampled = open(Attr::sampling(EventType::SIM, 1, 10));
        let _ring = sampled.map(1, false).unwrap();
        // More than there are slots, so that a tick rotates.
        let _others: Vec<_> = (2..6).map(|n| open(Attr::counting(EventType::SIM, n))).collect();
        let (done, finished) = mpsc::channel();
        let shared = (
            core.inner.topology(),
            core.inner.drivers.write().unwrap(),
            core.inner.vm.lock(),
        );
        let cell = other.cell.load_full();
        // Tried for, as the order of contexts is that of their addresses.
        let neighbour = cell.try_lock().unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut overflows = 0;
                for _ in 0..20 {
                    hot.sched_in();
                    hot.tick();
                    pmu.advance(VcpuId(0), |_| 25);
                    hot.service_overflows(&mut Regs, &mut |o| overflows += o.times);
                    sampled.read().unwrap();
                    sampled.count().unwrap();
                    hot.sched_out();
                }
                done.send(overflows).unwrap();
            });
            let overflows = finished.recv_timeout(std::time::Duration::from_secs(60));
            // Before the assertion, which would leave the scope waiting for the thread for ever.
            drop((shared, neighbour));
            assert!(
                overflows.is_ok_and(|n| n > 0),
                "a hot path waits for a shared lock"
            );
        });
        assert!(hot.stats().samples > 0, "rings were written to");
    }
}
