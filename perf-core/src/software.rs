//! Software events: what the VMM itself sees happen to a vCPU.
//!
//! The VMM raises them with [`VcpuContext::software_event`]. An event nobody counts costs one atomic load.
//! They are delivered to the VM context first, then to the vCPU's.
//!
//! # Levels
//! Raising can nest: serving one event may raise another, and a signal handler may raise one at any time.
//! There are four levels, as the kernel has task, softirq, interrupt and NMI. An event raised while its own
//! level is being served on the same thread is dropped, or a handler could call itself for ever. One of
//! another level is delivered if the context's lock is free; otherwise it is added to a counter without any
//! lock, and whoever locks the context next takes it in.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::attr::Attr;
use crate::context::{Context, ContextCell};
use crate::core::{CoreInner, VcpuContext};
use crate::event::{Event, Source, State};
use crate::overflow::{Batch, SampleRegs};
use crate::record::CpuMode;
use crate::sample::Overflowed;

macro_rules! software_ids {
    ($($(#[$doc:meta])* $name:ident = $value:expr, $text:expr;)*) => {
        /// What the VMM can raise: `config` of [`crate::EventType::VMM`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u64)]
        pub enum SoftwareId { $($(#[$doc])* $name = $value,)* }

        impl SoftwareId {
            /// All of them.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The event's name, as operators type it.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

software_ids! {
    /// The vCPU left the guest and user space handled it.
    Exits = 0, "vm-exits";
    /// Port I/O exits.
    IoExits = 1, "io-exits";
    /// MMIO exits.
    MmioExits = 2, "mmio-exits";
    /// Accesses to MSRs that user space handles.
    MsrExits = 3, "msr-exits";
    /// The guest halted.
    Halts = 4, "halts";
    /// A PMI was delivered to the guest.
    Pmis = 5, "pmis";
    /// The vCPU's thread moved to another host CPU.
    Migrations = 6, "vcpu-migrations";
    /// The vCPU's thread was switched out by the host, or paused by the VMM.
    ContextSwitches = 7, "context-switches";
    /// A page of guest memory was faulted in.
    PageFaults = 8, "page-faults";
    /// An interrupt was injected.
    IrqInjections = 9, "irq-injections";
    /// An NMI was injected.
    NmiInjections = 10, "nmi-injections";
    /// The guest was reset.
    Resets = 11, "resets";
}

pub(crate) const IDS: usize = 12;

impl SoftwareId {
    /// The event of this number; `None` (`EINVAL` when opened) for others.
    #[must_use]
    pub fn from_config(config: u64) -> Option<Self> {
        Self::ALL.get(usize::try_from(config).ok()?).copied()
    }
}

/// From where an event is raised; each level can interrupt the ones before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The run loop and exit handlers.
    #[default]
    Thread,
    /// Work the run loop defers.
    Deferred,
    /// A signal handler.
    Signal,
    /// A handler that can interrupt signal handlers.
    Nmi,
}

/// Events raised while the context's lock could not be waited for; taken in by whoever locks it next.
#[derive(Debug, Default)]
pub(crate) struct Deferred {
    counts: [AtomicU64; IDS],
    any: AtomicBool,
}

impl Deferred {
    fn add(&self, id: SoftwareId, n: u64) {
        self.counts[id as usize].fetch_add(n, Ordering::Relaxed);
        self.any.store(true, Ordering::Release);
    }

    /// Whether nobody has taken it in yet.
    pub fn is_waiting(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Takes what there is.
    pub fn take(&self, mut each: impl FnMut(SoftwareId, u64)) {
        if !self.any.load(Ordering::Relaxed) || !self.any.swap(false, Ordering::Acquire) {
            return;
        }
        for &id in SoftwareId::ALL {
            let n = self.counts[id as usize].swap(0, Ordering::Relaxed);
            if n != 0 {
                each(id, n);
            }
        }
    }
}

thread_local! {
    /// The levels this thread is serving, one bit each. Constant-initialised, so a signal handler may touch it.
    static BUSY: Cell<u8> = const { Cell::new(0) };
}

/// Holds a level of this thread.
pub(crate) struct LevelGuard {
    bit: u8,
    outermost: bool,
}

impl LevelGuard {
    pub fn enter(level: Level) -> Option<Self> {
        let bit = 1u8 << level as u8;
        BUSY.with(|busy| {
            let before = busy.get();
            (before & bit == 0).then(|| {
                busy.set(before | bit);
                Self {
                    bit,
                    outermost: before == 0,
                }
            })
        })
    }
}

impl Drop for LevelGuard {
    fn drop(&mut self) {
        BUSY.with(|busy| busy.set(busy.get() & !self.bit));
    }
}

/// How many events count each id: the gate that makes unused ones cost one load.
#[derive(Debug, Default)]
pub(crate) struct Gates {
    counts: [AtomicU32; IDS],
}

impl Gates {
    pub fn add(&self, attr: &Attr) {
        if let Some(gate) = self.gate(attr) {
            gate.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub fn remove(&self, attr: &Attr) {
        if let Some(gate) = self.gate(attr) {
            gate.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn gate(&self, attr: &Attr) -> Option<&AtomicU32> {
        (attr.ty == crate::attr::EventType::VMM)
            .then(|| self.counts.get(attr.config as usize))
            .flatten()
    }

    fn is_open(&self, id: SoftwareId) -> bool {
        self.counts[id as usize].load(Ordering::Relaxed) != 0
    }
}

impl VcpuContext {
    /// `n` events `id` happened to this vCPU. With `regs` they can sample; without they only count.
    ///
    /// Reports of events opened with a cookie go to `sink`, which is called with no lock held.
    pub fn software_event(
        &self,
        id: SoftwareId,
        n: u64,
        regs: Option<&mut dyn SampleRegs>,
        sink: &mut dyn FnMut(Overflowed),
    ) {
        self.software_event_at(Level::Thread, id, n, regs, sink);
    }

    /// [`VcpuContext::software_event`] raised at `level`. `false` when it was dropped because this thread is
    /// serving that level.
    pub fn software_event_at(
        &self,
        level: Level,
        id: SoftwareId,
        n: u64,
        mut regs: Option<&mut dyn SampleRegs>,
        sink: &mut dyn FnMut(Overflowed),
    ) -> bool {
        if !self.gates.is_open(id) || self.gone.load(Ordering::Relaxed) {
            return true;
        }
        let Some(core) = self.core.upgrade() else {
            return true;
        };
        let Some(guard) = LevelGuard::enter(level) else {
            return false;
        };
        // What was interrupted may hold the lock: only the run loop itself may wait for it.
        let may_wait = level == Level::Thread && guard.outermost;
        let mut batch = Batch::new();
        let own = self.cell.load();
        for target in [&*core.vm, &**own] {
            // Looked at without its lock: the VM context must not be a lock that all vCPUs share.
            if target.raised_events.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let now_ns = target.now_ns();
            let context = if may_wait {
                Some(target.lock())
            } else {
                target.try_lock()
            };
            match context {
                // Looked at again: the vCPU may have gone while the lock was waited for, and its EXIT record,
                // which is written under this lock, is the last that is said of it.
                Some(_) if self.gone.load(Ordering::Relaxed) => {}
                Some(mut context) => {
                    let regs = regs.as_deref_mut().map(|r| r as &mut dyn SampleRegs);
                    context.raise(&core, &own, id, n, now_ns, regs, &mut batch);
                }
                None => target.deferred.add(id, n),
            }
        }
        drop(guard);
        // The sink may raise events itself.
        for report in batch {
            sink(report);
        }
        true
    }
}

impl Event {
    /// Whether a raised event is counted. Off and in error: no. Waiting counts only while the whole context
    /// waits, which is what happens to a vCPU that is off its CPU, and only if the group would be on with
    /// it.
    fn takes(&self, leader: State, context_active: bool, mode: Option<CpuMode>) -> bool {
        let counting = match self.state {
            State::Active => true,
            State::Inactive => !context_active && leader >= State::Inactive,
            State::Off | State::Error => false,
        };
        let attr = &self.shared.attr;
        counting
            && match mode {
                None => true,
                Some(CpuMode::GuestUser | CpuMode::User) => !attr.exclude_user,
                Some(CpuMode::GuestKernel | CpuMode::Kernel) => !attr.exclude_kernel,
                Some(CpuMode::Hypervisor) => !attr.exclude_hv,
                Some(CpuMode::Unknown) => true,
            }
    }
}

impl Context {
    #[allow(clippy::too_many_arguments)]
    fn raise(
        &mut self,
        core: &CoreInner,
        origin: &ContextCell,
        id: SoftwareId,
        n: u64,
        now_ns: u64,
        mut regs: Option<&mut dyn SampleRegs>,
        batch: &mut Batch,
    ) {
        let mode = regs.as_mut().map(|r| r.mode());
        let active = self.clock.is_active();
        for at in 0..self.raised[id as usize].len() {
            let key = self.raised[id as usize][at];
            let leader = self.leader_state(key);
            let event = &mut self.events[key];
            if !event.takes(leader, active, mode) {
                continue;
            }
            let Source::Raised(count) = &mut event.source else {
                continue;
            };
            *count = count.wrapping_add(n);
            let count = *count;
            if !event.sampling.is_on() {
                continue;
            }
            // Without registers there is nothing to sample; a count for the guest overflows all the same.
            if regs.is_none() && event.shared.cookie.is_none() {
                event.sampling.skip(n);
                continue;
            }
            let passed = event.sampling.passed(count);
            if passed > 0 {
                let regs = regs.as_deref_mut().map(|r| r as &mut dyn SampleRegs);
                self.raised_overflow(core, origin, key, u64::from(passed), now_ns, regs, batch);
            }
        }
    }

    /// Counts what was raised while the lock was taken. The registers of that moment are gone, so nothing is
    /// sampled.
    pub fn take_deferred(&mut self, deferred: &Deferred) {
        deferred.take(|id, n| {
            let active = self.clock.is_active();
            for at in 0..self.raised[id as usize].len() {
                let key = self.raised[id as usize][at];
                let leader = self.leader_state(key);
                let event = &mut self.events[key];
                if !event.takes(leader, active, None) {
                    continue;
                }
                let Source::Raised(count) = &mut event.source else {
                    continue;
                };
                *count = count.wrapping_add(n);
                let count = *count;
                if event.shared.cookie.is_none() {
                    event.sampling.skip(n);
                } else if event.sampling.is_on() {
                    let passed = event.sampling.passed(count);
                    event.sampling.pending = event.sampling.pending.saturating_add(passed);
                    if passed > 0 {
                        self.put_by(key);
                    }
                }
            }
        });
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::attr::EventType;
    use crate::core::Core;
    use crate::limits::{CoreConfig, Role};
    use crate::open::{OpenFlags, OpenTarget};
    use crate::pmu::VcpuId;
    use crate::pmu::sim::SimPmu;

    struct Regs;

    impl SampleRegs for Regs {
        fn mode(&mut self) -> CpuMode {
            CpuMode::GuestKernel
        }
        fn ip(&mut self) -> u64 {
            0
        }
    }

    /// A signal handler raises an event while somebody has the VM context's lock. What overflowed there is
    /// reported by the vCPU that next serves overflows: the VM context has no thread of its own.
    #[test]
    fn what_waits_in_the_vm_context_is_served_by_a_vcpu() {
        let core = Core::new(CoreConfig::default());
        let vcpu = core.add_vcpu(VcpuId(0), 1).unwrap();
        vcpu.sched_in();
        let session = core.session(0, Role::Admin);
        let attr = Attr::sampling(EventType::VMM, SoftwareId::Halts as u64, 5);
        let flags = OpenFlags {
            cookie: Some(9),
            ..OpenFlags::default()
        };
        let halts = core.open(&session, attr, OpenTarget::Vm, None, flags).unwrap();
        {
            let _somebody = core.inner.vm.lock();
            vcpu.software_event_at(Level::Signal, SoftwareId::Halts, 10, None, &mut |_| {});
        }
        let mut seen = Vec::new();
        assert_eq!(vcpu.service_overflows(&mut Regs, &mut |o| seen.push(o)), 1);
        assert_eq!(seen, [Overflowed { cookie: 9, times: 2 }]);
        assert_eq!(vcpu.service_overflows(&mut Regs, &mut |_| {}), 0, "served once");
        assert_eq!(halts.read().unwrap().value, 10);
    }

    /// An event that is inherited is open once, however many children it has; and when it is closed nothing
    /// is left of it: not in the gates, not in the drivers.
    #[test]
    fn gates_count_what_is_open_and_close_with_it() {
        let core = Core::new(CoreConfig::default());
        let pmu = SimPmu::with_slots(2);
        core.register(Arc::new(pmu.clone()));
        for n in 0..3 {
            core.add_vcpu(VcpuId(n), 1).unwrap();
        }
        let session = core.session(0, Role::Admin);
        let open = |ty, config| {
            let attr = Attr {
                inherit: true,
                ..Attr::counting(ty, config)
            };
            core.open(&session, attr, OpenTarget::Vm, None, OpenFlags::default())
                .unwrap()
        };
        let halts = open(EventType::VMM, SoftwareId::Halts as u64);
        let counted = open(EventType::SIM, 1);
        let gate = || core.inner.gates.counts[SoftwareId::Halts as usize].load(Ordering::Relaxed);
        assert_eq!((halts.children(), gate(), pmu.open_events()), (3, 1, 3));
        core.add_vcpu(VcpuId(3), 1).unwrap();
        core.remove_vcpu(VcpuId(0)).unwrap();
        assert_eq!((halts.children(), gate(), pmu.open_events()), (3, 1, 3));
        drop((halts, counted));
        assert_eq!((gate(), pmu.open_events()), (0, 0));
    }
}
