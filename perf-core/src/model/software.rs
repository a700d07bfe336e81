//! Software events: what the VMM itself sees happen to a vCPU.
//!
//! The VMM raises them with [`crate::VcpuContext::software_event`]. An event nobody counts costs one atomic
//! load. They are delivered to the VM context first, then to the vCPU's.
//!
//! # Levels
//! Raising can nest: serving one event may raise another, and a signal handler may raise one at any time.
//! There are four levels, as the kernel has task, softirq, interrupt and NMI. An event raised while its own
//! level is being served on the same thread is dropped, or a handler could call itself for ever. One of
//! another level is delivered if the context's lock is free; otherwise it is added to a counter without any
//! lock, and whoever locks the context next takes it in.

use std::cell::Cell;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crate::attr::{Attr, EventType};

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
    pub fn add(&self, id: SoftwareId, n: u64) {
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
    /// The levels this thread is serving, one bit each. Constant-initialised, so a signal handler may touch
    /// it.
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

impl LevelGuard {
    /// Whether the thread was serving nothing before.
    pub fn is_outermost(&self) -> bool {
        self.outermost
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
        (attr.ty == EventType::VMM)
            .then(|| self.counts.get(usize::try_from(attr.config).ok()?))
            .flatten()
    }

    pub fn is_open(&self, id: SoftwareId) -> bool {
        self.open(id) != 0
    }

    /// Events that are open and count `id`.
    pub fn open(&self, id: SoftwareId) -> u32 {
        self.counts[id as usize].load(Ordering::Relaxed)
    }
}
