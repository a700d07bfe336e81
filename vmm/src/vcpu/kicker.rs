//! How others get a vCPU's thread out of KVM_RUN, and wait for its end.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use vmm_sys_util::signal::Killable;

use super::kick;

/// The running vCPU threads of a VM, to be kicked from anywhere.
#[derive(Clone, Debug, Default)]
pub struct Kicker(Arc<Mutex<Vec<VcpuThread>>>);

impl Kicker {
    /// Adds a thread, instead of one of the same vCPU that has ended.
    pub fn add(&self, thread: VcpuThread) {
        let mut threads = self.threads();
        threads.retain(|other| other.id != thread.id);
        threads.push(thread);
    }

    /// Makes every vCPU leave KVM_RUN and look at what is asked of it.
    pub fn kick(&self) {
        self.threads().iter().for_each(VcpuThread::kick);
    }

    /// Waits for the end of all threads, which have been told to end.
    pub fn join(&self) {
        let threads = std::mem::take(&mut *self.threads());
        threads.into_iter().for_each(VcpuThread::join);
    }

    /// Whether all threads were joined.
    pub fn is_empty(&self) -> bool {
        self.threads().is_empty()
    }

    fn threads(&self) -> std::sync::MutexGuard<'_, Vec<VcpuThread>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A running vCPU thread.
#[derive(Debug)]
pub struct VcpuThread {
    id: u8,
    handle: JoinHandle<()>,
}

impl VcpuThread {
    /// The thread that runs vCPU `id`.
    pub(super) fn new(id: u8, handle: JoinHandle<()>) -> Self {
        Self { id, handle }
    }

    /// Makes the vCPU leave KVM_RUN and look at its run state.
    pub fn kick(&self) {
        if !self.handle.is_finished()
            && let Err(e) = self.handle.kill(kick::kick_signal())
        {
            log::debug!("vcpu{}: kick: {e}", self.id);
        }
    }

    /// Waits for the end of the thread, kicking it until it has gone.
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
