//! The seat of a vCPU: what outlives its thread.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::exit_times::ExitTable;
use super::kvm_vcpu::KvmVcpu;
use super::mailbox::Mailbox;
use super::stats::VcpuStats;
use crate::kvm::call::CallError;

/// Triple faults of a vCPU that are told of.
const MOST_SHUTDOWNS_TOLD: u64 = 16;

/// What a vCPU shares with those who want something of it. It outlives the vCPU.
#[derive(Debug)]
pub struct Seat {
    id: u8,
    /// A vCPU's thread runs, or is to run from the start.
    taken: AtomicBool,
    /// That thread is to end.
    leave: AtomicBool,
    mailbox: Mailbox,
    stats: VcpuStats,
    exits: Arc<ExitTable>,
    parked: Mutex<Option<KvmVcpu>>,
    /// The number of its thread.
    thread: AtomicU32,
    /// Triple faults so far.
    shutdowns: AtomicU64,
}

impl Seat {
    /// The free seat of a vCPU that has yet to run.
    pub(super) fn new(vcpu: KvmVcpu) -> Self {
        Self {
            id: vcpu.id(),
            taken: AtomicBool::new(false),
            leave: AtomicBool::new(false),
            mailbox: Mailbox::default(),
            stats: VcpuStats::default(),
            exits: Arc::default(),
            parked: Mutex::new(Some(vcpu)),
            thread: AtomicU32::new(0),
            shutdowns: AtomicU64::new(0),
        }
    }

    /// The vCPU's number.
    pub fn id(&self) -> u8 {
        self.id
    }

    /// Where requests for its thread are put.
    pub fn mailbox(&self) -> &Mailbox {
        &self.mailbox
    }

    /// What its loop counted, over all the times that it was there.
    pub fn stats(&self) -> &VcpuStats {
        &self.stats
    }

    /// Its exits, counted and timed while somebody watches.
    pub fn exits(&self) -> &Arc<ExitTable> {
        &self.exits
    }

    /// Whether the vCPU's thread is to end; one relaxed load.
    #[inline]
    pub fn is_to_leave(&self) -> bool {
        self.leave.load(Ordering::Relaxed)
    }

    /// The thread of a vCPU begins.
    pub(super) fn begins_on(&self, thread: u32) {
        self.thread.store(thread, Ordering::Relaxed);
    }

    /// The thread of the vCPU that is there, or was last; 0 before any began.
    pub fn thread(&self) -> u32 {
        self.thread.load(Ordering::Relaxed)
    }

    /// Whether one more triple fault is told of. Where it resets the machine, a guest may do nothing else.
    pub(super) fn may_tell_shutdown(&self) -> bool {
        self.shutdowns.fetch_add(1, Ordering::Relaxed) < MOST_SHUTDOWNS_TOLD
    }

    /// The thread has nothing more to do with the vCPU: the seat is free.
    pub(super) fn park(&self, vcpu: KvmVcpu) {
        *self.lock() = Some(vcpu);
        self.taken.store(false, Ordering::Release);
    }

    /// A vCPU's thread is about to run, which frees the seat.
    pub(super) fn take(&self) {
        self.taken.store(true, Ordering::Release);
    }

    /// Whether a vCPU's thread runs.
    pub(super) fn is_taken(&self) -> bool {
        self.taken.load(Ordering::Acquire)
    }

    /// Asks the thread to end.
    pub(super) fn dismiss(&self) {
        self.leave.store(true, Ordering::SeqCst);
    }

    /// What is parked here, to be made to run. What was asked of a vCPU that has left is not for this one.
    pub(super) fn unpark(&self) -> Option<KvmVcpu> {
        let parked = self.lock().take()?;
        let _ = self.mailbox.take();
        self.leave.store(false, Ordering::SeqCst);
        Some(parked)
    }

    /// What is parked here could not be made to run.
    pub(super) fn park_again(&self, vcpu: KvmVcpu) {
        *self.lock() = Some(vcpu);
    }

    /// Puts what is parked here into its first state.
    pub(super) fn restore_parked(&self) -> Result<(), CallError> {
        self.lock().as_ref().map_or(Ok(()), KvmVcpu::restore)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<KvmVcpu>> {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
