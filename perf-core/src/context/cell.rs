//! An event context together with its lock, clock and owner.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::Context;
use crate::lock::{Lock, LockGuard, LockRank};
use crate::model::software::DeferredEvents;
use crate::model::state::TickTimer;
use crate::pmu::{PmuEventTarget, VcpuId};
use crate::schedule::{MuxConfig, SharePolicy};
use crate::time::Clock;

/// Value of [`ContextCell::owner`] for the VM context. No other context has this value, because
/// none has both the highest number and the thread ID -1.
const VM: u64 = u64::MAX;

/// Owner of a context: the VM, vCPU, thread or CPU that the events of the context count.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ContextOwner {
    Vm,
    /// A vCPU: its number, the ID of its host thread, and the thread ID that records contain.
    Vcpu(VcpuId, i32, u32),
    /// A host thread that need not run a vCPU: the context number and the thread ID.
    Thread(VcpuId, i32),
    /// A host CPU: the context number and the CPU number.
    Cpu(VcpuId, u32),
}

/// An event context with its lock, clock and owner.
///
/// Any thread may lock the context, not only the vCPU's thread. The lock is usually free when the
/// vCPU's thread takes it, because readers and the timer hold it only for the duration of a driver
/// call.
pub(crate) struct ContextCell {
    inner: Lock<Context>,
    cpu: Option<u32>,
    /// Thread ID of the vCPU or thread in records, or 0 for a VM or CPU context.
    record_tid: u32,
    /// `true` for the context of a vCPU, in which VM-wide events have children.
    is_vcpu: bool,
    clock: Arc<dyn Clock>,
    /// Owner of the context: [`VM`], or the vCPU number in the upper half and the thread ID in the
    /// lower half.
    pub owner: AtomicU64,
    /// Reference to [`Context::to_serve`], which can be read without the lock.
    pub to_serve: Arc<AtomicBool>,
    /// Number of events in the context that count software events raised by the VMM. Can be read
    /// without the lock.
    pub raised_events: AtomicUsize,
    /// Software events that were raised while the lock of the context was held.
    pub deferred: DeferredEvents,
}

impl ContextCell {
    pub fn new(
        policy: SharePolicy,
        mux: MuxConfig,
        clock: Arc<dyn Clock>,
        tick_timer: Option<Arc<dyn TickTimer>>,
        whose: ContextOwner,
    ) -> Self {
        let (vcpu, cpu, record_tid) = match whose {
            ContextOwner::Vm => (None, None, 0),
            ContextOwner::Vcpu(vcpu, tid, record_tid) => (Some((vcpu, tid)), None, record_tid),
            ContextOwner::Thread(vcpu, tid) => (Some((vcpu, tid)), None, tid.cast_unsigned()),
            ContextOwner::Cpu(vcpu, cpu) => (Some((vcpu, -1)), Some(cpu), 0),
        };
        let context = Context::new(policy, mux, tick_timer);
        Self {
            to_serve: Arc::clone(&context.to_serve),
            inner: Lock::new(LockRank::Context, context),
            cpu,
            record_tid,
            is_vcpu: matches!(whose, ContextOwner::Vcpu(..)),
            clock,
            owner: AtomicU64::new(vcpu.map_or(VM, |(vcpu, tid)| {
                u64::from(vcpu.0) << 32 | u64::from(tid.cast_unsigned())
            })),
            raised_events: AtomicUsize::new(0),
            deferred: DeferredEvents::default(),
        }
    }

    /// Returns the number of the context and the host thread ID of its owner (-1 for a host CPU),
    /// or `None` for the VM context.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the halves of the word are taken apart"
    )]
    pub fn vcpu(&self) -> Option<(VcpuId, i32)> {
        match self.owner.load(Ordering::Relaxed) {
            VM => None,
            who => Some((VcpuId((who >> 32) as u32), (who as u32).cast_signed())),
        }
    }

    #[inline]
    pub fn now_ns(&self) -> u64 {
        self.clock.now_ns()
    }

    #[inline]
    pub fn lock(&self) -> LockGuard<'_, Context> {
        let mut context = self.inner.lock();
        context.take_deferred(&self.deferred);
        context
    }

    /// Returns `true` if this context must be locked before `other`.
    pub fn is_before(&self, other: &Self) -> bool {
        std::ptr::from_ref(&self.inner) < std::ptr::from_ref(&other.inner)
    }

    /// Locks the context if the lock is free, without blocking.
    pub fn try_lock(&self) -> Option<LockGuard<'_, Context>> {
        self.inner.try_lock()
    }

    /// Updates [`ContextCell::raised_events`] from `context`. Call this method after adding or
    /// removing events.
    pub fn publish_raised(&self, context: &Context) {
        let n = context.raised.iter().map(Vec::len).sum();
        self.raised_events.store(n, Ordering::Relaxed);
    }

    /// Returns the thread ID of the vCPU or thread in records, or 0 for a VM or CPU context.
    pub fn record_tid(&self) -> u32 {
        self.record_tid
    }

    /// Returns `true` for the context of a vCPU, in which VM-wide events have children. Returns
    /// `false` for the context of another thread, of a host CPU or of the VM.
    pub fn is_vcpu(&self) -> bool {
        self.is_vcpu
    }

    /// Returns the host CPU of this context, or `None` if the context does not belong to a CPU.
    pub fn cpu(&self) -> Option<u32> {
        self.cpu
    }

    pub fn target(&self) -> PmuEventTarget {
        match (self.cpu, self.vcpu()) {
            (Some(cpu), _) => PmuEventTarget::Cpu { cpu },
            (None, Some((vcpu, tid))) => PmuEventTarget::Vcpu { vcpu, tid },
            (None, None) => PmuEventTarget::Vm,
        }
    }
}

impl std::fmt::Debug for ContextCell {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ContextCell")
            .field("vcpu", &self.vcpu())
            .finish_non_exhaustive()
    }
}
