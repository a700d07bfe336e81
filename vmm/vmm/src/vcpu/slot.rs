//! State of a vCPU that persists when its thread ends.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::exit_times::VcpuExitStatistics;
use super::kvm_vcpu::KvmVcpu;
use super::request_queue::VcpuRequestQueue;
use super::stats::VcpuStats;
use crate::kvm::call::KvmIoctlError;

/// Maximum number of triple faults per vCPU that are logged.
const MAX_LOGGED_TRIPLE_FAULTS: u64 = 16;

/// State of one vCPU that other threads can access. Kept when the vCPU is removed.
#[derive(Debug)]
pub struct VcpuSlot {
    id: u8,
    /// `true` if a thread runs the vCPU or is about to.
    taken: AtomicBool,
    /// `true` if the vCPU thread was asked to stop.
    leave: AtomicBool,
    request_queue: VcpuRequestQueue,
    stats: VcpuStats,
    exits: Arc<VcpuExitStatistics>,
    parked: Mutex<Option<KvmVcpu>>,
    /// ID, in the PID namespace of the host, of the current or last vCPU thread; 0 before the
    /// first.
    thread: AtomicU32,
    /// Number of triple faults of the vCPU.
    shutdowns: AtomicU64,
}

impl VcpuSlot {
    /// Creates a free slot for a vCPU that has not run yet.
    pub(super) fn new(vcpu: KvmVcpu) -> Self {
        Self {
            id: vcpu.id(),
            taken: AtomicBool::new(false),
            leave: AtomicBool::new(false),
            request_queue: VcpuRequestQueue::default(),
            stats: VcpuStats::default(),
            exits: Arc::default(),
            parked: Mutex::new(Some(vcpu)),
            thread: AtomicU32::new(0),
            shutdowns: AtomicU64::new(0),
        }
    }

    /// Returns the vCPU number.
    pub fn id(&self) -> u8 {
        self.id
    }

    /// Returns the queue of requests to the vCPU thread.
    pub fn request_queue(&self) -> &VcpuRequestQueue {
        &self.request_queue
    }

    /// Returns the run-loop statistics, accumulated over all threads of this vCPU.
    pub fn stats(&self) -> &VcpuStats {
        &self.stats
    }

    /// Returns the exit statistics of this vCPU, which are updated only while they are watched.
    pub fn exits(&self) -> &Arc<VcpuExitStatistics> {
        &self.exits
    }

    /// Returns `true` if the vCPU thread was requested to stop. Costs one relaxed load.
    #[inline]
    pub fn is_stop_requested(&self) -> bool {
        self.leave.load(Ordering::Relaxed)
    }

    /// Stores the host thread ID of the vCPU thread that has just started.
    pub(super) fn set_thread_id(&self, thread: u32) {
        self.thread.store(thread, Ordering::Relaxed);
    }

    /// Returns the host thread ID of the current or last vCPU thread, or 0 if none has started.
    pub fn thread(&self) -> u32 {
        self.thread.load(Ordering::Relaxed)
    }

    /// Counts a triple fault of the vCPU, and returns `true` if it should be logged. Only the first
    /// few are, because a guest may reset the machine by triple faults again and again.
    pub(super) fn should_log_triple_fault(&self) -> bool {
        self.shutdowns.fetch_add(1, Ordering::Relaxed) < MAX_LOGGED_TRIPLE_FAULTS
    }

    /// Parks the KVM vCPU in this slot and marks the slot as free. Called when the vCPU thread
    /// ends.
    pub(super) fn park(&self, vcpu: KvmVcpu) {
        *self.lock() = Some(vcpu);
        self.taken.store(false, Ordering::Release);
    }

    /// Marks the slot as taken by a vCPU thread. The thread marks it as free when it ends.
    pub(super) fn take(&self) {
        self.taken.store(true, Ordering::Release);
    }

    /// Returns `true` if a thread runs the vCPU or is about to.
    pub(super) fn is_taken(&self) -> bool {
        self.taken.load(Ordering::Acquire)
    }

    /// Requests that the vCPU thread stop.
    pub(super) fn request_stop(&self) {
        self.leave.store(true, Ordering::SeqCst);
    }

    /// Removes and returns the parked KVM vCPU, so that a thread can run it. Discards all requests
    /// to the vCPU, because they were sent before it was removed.
    pub(super) fn unpark(&self) -> Option<KvmVcpu> {
        let parked = self.lock().take()?;
        let _ = self.request_queue.take();
        self.leave.store(false, Ordering::SeqCst);
        Some(parked)
    }

    /// Parks a KVM vCPU in this slot again, because it could not be started.
    pub(super) fn park_again(&self, vcpu: KvmVcpu) {
        *self.lock() = Some(vcpu);
    }

    /// Restores the initial state of the KVM vCPU that is parked in this slot.
    pub(super) fn restore_parked(&self) -> Result<(), KvmIoctlError> {
        self.lock().as_ref().map_or(Ok(()), KvmVcpu::restore)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<KvmVcpu>> {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
