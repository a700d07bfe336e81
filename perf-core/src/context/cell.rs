//! A context with its lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::Context;
use crate::lock::{Lock, LockGuard, Rank};
use crate::model::software::Deferred;
use crate::pmu::{Target, VcpuId};
use crate::schedule::{MuxConfig, SharePolicy};
use crate::time::Clock;

/// [`ContextCell::who`] of the VM context; no vCPU has the highest number and thread -1.
const VM: u64 = u64::MAX;

/// Whose context it is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Whose {
    Vm,
    /// A vCPU's, or another thread's.
    Thread(VcpuId, i32),
    /// A CPU's of the host.
    Cpu(VcpuId, u32),
}

/// A context with its lock, its clock and whom it belongs to.
///
/// There is no message to an owning thread: whoever wants something of a context takes its lock. A vCPU's
/// thread finds it free on its hot path; readers and the timer hold it for as long as a driver call takes.
pub(crate) struct ContextCell {
    inner: Lock<Context>,
    /// The CPU of the host that it is of, if it is of one.
    cpu: Option<u32>,
    clock: Arc<dyn Clock>,
    /// Whose context it is: [`VM`], or the vCPU in the upper and its thread in the lower half.
    pub who: AtomicU64,
    /// [`Context::to_serve`].
    pub to_serve: Arc<AtomicBool>,
    /// How many raised events the context holds, readable without its lock.
    pub raised_events: AtomicUsize,
    /// What was raised while the lock was taken.
    pub deferred: Deferred,
}

impl ContextCell {
    pub fn new(policy: SharePolicy, mux: MuxConfig, clock: Arc<dyn Clock>, whose: Whose) -> Self {
        let (vcpu, cpu) = match whose {
            Whose::Vm => (None, None),
            Whose::Thread(vcpu, tid) => (Some((vcpu, tid)), None),
            Whose::Cpu(vcpu, cpu) => (Some((vcpu, -1)), Some(cpu)),
        };
        let context = Context::new(policy, mux);
        Self {
            to_serve: Arc::clone(&context.to_serve),
            inner: Lock::new(Rank::Context, context),
            cpu,
            clock,
            who: AtomicU64::new(vcpu.map_or(VM, |(vcpu, tid)| {
                u64::from(vcpu.0) << 32 | u64::from(tid.cast_unsigned())
            })),
            raised_events: AtomicUsize::new(0),
            deferred: Deferred::default(),
        }
    }

    /// The vCPU and the host thread that runs it; `None` for the VM.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the halves of the word are taken apart"
    )]
    pub fn vcpu(&self) -> Option<(VcpuId, i32)> {
        match self.who.load(Ordering::Relaxed) {
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

    /// Whether this context's lock comes before that of `other` when both are taken.
    pub fn is_before(&self, other: &Self) -> bool {
        std::ptr::from_ref(&self.inner) < std::ptr::from_ref(&other.inner)
    }

    /// The lock if it is free.
    pub fn try_lock(&self) -> Option<LockGuard<'_, Context>> {
        self.inner.try_lock()
    }

    /// To be called after events were added or removed.
    pub fn publish_raised(&self, context: &Context) {
        let n = context.raised.iter().map(Vec::len).sum();
        self.raised_events.store(n, Ordering::Relaxed);
    }

    /// The CPU of the host that it is of, if it is of one.
    pub fn cpu(&self) -> Option<u32> {
        self.cpu
    }

    pub fn target(&self) -> Target {
        match (self.cpu, self.vcpu()) {
            (Some(cpu), _) => Target::Cpu { cpu },
            (None, Some((vcpu, tid))) => Target::Vcpu { vcpu, tid },
            (None, None) => Target::Vm,
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
