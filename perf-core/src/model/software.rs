//! Software events that the VMM observes on a vCPU.
//!
//! The VMM raises them with [`crate::VcpuEventContext::software_event`]. An event that is not
//! counted costs one atomic load. Events are delivered to the VM context first and to the vCPU
//! context second.
//!
//! # Levels
//!
//! Events can nest: the handling of one event may raise another, and a signal handler may raise one
//! at any time. There are four levels, like task, softirq, interrupt and NMI in the kernel. An
//! event is dropped if the same thread is already handling an event of the same level, which
//! prevents endless recursion. An event of another level is delivered if the context lock is free.
//! Otherwise it is added to an atomic counter, and the next thread that locks the context accounts
//! for it.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::attr::{Attr, EventType};

macro_rules! software_ids {
    ($($(#[$doc:meta])* $name:ident = $value:expr, $text:expr;)*) => {
        /// A software event that the VMM can raise. The value of a variant is the `config` of the
        /// event with type [`crate::EventType::VMM`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u64)]
        pub enum SoftwareEventId { $($(#[$doc])* $name = $value,)* }

        impl SoftwareEventId {
            /// All software events that the VMM can raise.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Returns the name by which command lines select the event.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text,)* }
            }
        }
    };
}

software_ids! {
    /// Exits from `KVM_RUN` to user space.
    Exits = 0, "vm-exits";
    /// Port I/O exits.
    IoExits = 1, "io-exits";
    /// MMIO exits.
    MmioExits = 2, "mmio-exits";
    /// Accesses to MSRs that user space handles.
    MsrExits = 3, "msr-exits";
    /// HLT exits of the vCPU.
    Halts = 4, "halts";
    /// PMIs delivered to the guest.
    Pmis = 5, "pmis";
    /// Migrations of the vCPU thread to another host CPU.
    Migrations = 6, "vcpu-migrations";
    /// Context switches: the host scheduled out the vCPU's thread, or the VMM paused the vCPU.
    ContextSwitches = 7, "context-switches";
    /// Page faults on guest memory.
    PageFaults = 8, "page-faults";
    /// Interrupts that the VMM injected.
    IrqInjections = 9, "irq-injections";
    /// NMIs that the VMM injected.
    NmiInjections = 10, "nmi-injections";
    /// Resets of the guest.
    Resets = 11, "resets";
}

pub(crate) const IDS: usize = 12;

impl SoftwareEventId {
    /// Returns the event with number `config`, or `None` if there is no such event (`EINVAL` on
    /// open).
    #[must_use]
    pub fn from_config(config: u64) -> Option<Self> {
        Self::ALL.get(usize::try_from(config).ok()?).copied()
    }
}

/// Execution level of the code that raises a software event. Each level can interrupt the previous
/// ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum RecursionContext {
    /// The run loop and exit handlers of the vCPU.
    #[default]
    Thread,
    /// Deferred work of the vCPU's run loop.
    Deferred,
    /// A signal handler.
    Signal,
    /// A handler that can interrupt signal handlers.
    Nmi,
}

/// Software events that were raised while the context lock was held. The next thread that locks the
/// context accounts for them.
#[derive(Debug, Default)]
pub(crate) struct DeferredEvents {
    counts: [AtomicU64; IDS],
    any: AtomicBool,
}

impl DeferredEvents {
    pub fn add(&self, id: SoftwareEventId, n: u64) {
        self.counts[id as usize].fetch_add(n, Ordering::Relaxed);
        self.any.store(true, Ordering::Release);
    }

    /// Returns `true` if there are deferred events that have not been accounted for.
    pub fn is_waiting(&self) -> bool {
        self.any.load(Ordering::Relaxed)
    }

    /// Removes all deferred events and passes the number of each to `each`.
    pub fn take(&self, mut each: impl FnMut(SoftwareEventId, u64)) {
        if !self.any.load(Ordering::Relaxed) || !self.any.swap(false, Ordering::Acquire) {
            return;
        }
        for &id in SoftwareEventId::ALL {
            let n = self.counts[id as usize].swap(0, Ordering::Relaxed);
            if n != 0 {
                each(id, n);
            }
        }
    }
}

thread_local! {
    /// Levels ([`RecursionContext`]) at which this thread is handling software events, one bit
    /// per level. Constant-initialized, so that signal handlers can access it.
    static BUSY: Cell<u8> = const { Cell::new(0) };
}

/// A guard that marks a level as being handled by this thread until dropped.
pub(crate) struct LevelGuard {
    bit: u8,
    outermost: bool,
}

impl LevelGuard {
    pub fn enter(level: RecursionContext) -> Option<Self> {
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

impl LevelGuard {
    /// Returns `true` if the thread was not handling a software event of any level before.
    pub fn is_outermost(&self) -> bool {
        self.outermost
    }
}

impl Drop for LevelGuard {
    fn drop(&mut self) {
        BUSY.with(|busy| busy.set(busy.get() & !self.bit));
    }
}

/// Number of open events per software event ID, and number of open events that request SWITCH
/// records. A raise checks these numbers first, so raising an event that no open event counts costs
/// one load.
#[derive(Debug, Default)]
pub(crate) struct OpenEventCounts {
    counts: [AtomicU32; IDS],
    context_switch: AtomicU32,
}

impl OpenEventCounts {
    pub fn add(&self, attr: &Attr) {
        for gate in self.gates(attr) {
            gate.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub fn remove(&self, attr: &Attr) {
        for gate in self.gates(attr) {
            gate.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn gates(&self, attr: &Attr) -> impl Iterator<Item = &AtomicU32> {
        let raised = (attr.ty == EventType::VMM)
            .then(|| self.counts.get(usize::try_from(attr.config).ok()?))
            .flatten();
        let switch = attr.context_switch.then_some(&self.context_switch);
        raised.into_iter().chain(switch)
    }

    /// Returns `true` if an open event requests SWITCH records.
    pub fn wants_switches(&self) -> bool {
        self.context_switch.load(Ordering::Relaxed) != 0
    }

    pub fn is_open(&self, id: SoftwareEventId) -> bool {
        self.open(id) != 0
    }

    /// Returns the number of open events that count software event `id`.
    pub fn open(&self, id: SoftwareEventId) -> u32 {
        self.counts[id as usize].load(Ordering::Relaxed)
    }
}
