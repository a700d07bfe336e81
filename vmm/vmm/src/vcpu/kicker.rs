//! Handles to the vCPU threads, with which other threads kick and join them.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use vmm_sys_util::signal::Killable;

use super::kick;

/// Handles of the vCPU threads of a VM, with which any thread can kick them.
#[derive(Clone, Debug, Default)]
pub struct Kicker(Arc<Mutex<Vec<VcpuThread>>>);

impl Kicker {
    /// Adds a vCPU thread. Replaces the handle of an earlier thread of the same vCPU.
    pub fn add(&self, thread: VcpuThread) {
        let mut threads = self.threads();
        threads.retain(|other| other.id != thread.id);
        threads.push(thread);
    }

    /// Kicks every vCPU out of KVM_RUN, so that it checks for requests.
    pub fn kick(&self) {
        self.threads().iter().for_each(VcpuThread::kick);
    }

    /// Waits until all threads, which must have been asked to stop, have ended.
    pub fn join(&self) {
        let threads = std::mem::take(&mut *self.threads());
        threads.into_iter().for_each(VcpuThread::join);
    }

    /// Returns `true` if there is no thread to wait for.
    pub fn is_empty(&self) -> bool {
        self.threads().is_empty()
    }

    fn threads(&self) -> std::sync::MutexGuard<'_, Vec<VcpuThread>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Handle to a running vCPU thread.
#[derive(Debug)]
pub struct VcpuThread {
    id: u8,
    handle: JoinHandle<()>,
}

impl VcpuThread {
    /// Creates the handle of the thread that runs vCPU `id`.
    pub(super) fn new(id: u8, handle: JoinHandle<()>) -> Self {
        Self { id, handle }
    }

    /// Kicks the vCPU out of KVM_RUN, so that it checks its run state.
    pub fn kick(&self) {
        if !self.handle.is_finished()
            && let Err(e) = self.handle.kill(kick::kick_signal())
        {
            log::debug!("vcpu{}: kick: {e}", self.id);
        }
    }

    /// Kicks the thread until it has ended.
    pub fn join(self) {
        while !self.handle.is_finished() {
            self.kick();
            std::thread::sleep(Duration::from_millis(1));
        }
        if self.handle.join().is_err() {
            log::error!("vcpu{}: its thread panicked", self.id);
        }
    }
}
