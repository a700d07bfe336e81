//! Synchronizes the vCPU threads when the guest resets the machine.
//!
//! 1. A vCPU whose guest requests a reset sets the state to [`VmRunState::Resetting`]. Each thread
//!    leaves the guest, closes the guest's counters and waits at the barrier (`wait_for_restart`).
//!    The thread stays attached to the perf core, so events of operators continue.
//! 2. When all vCPUs have arrived, the main loop resets memory and devices and releases the barrier
//!    ([`VmRunControl::release_reset_barrier`]).
//! 3. Each thread restores the initial state of its KVM vCPU and waits for the others. No vCPU
//!    enters the guest before all are restored, because the boot processor may start the others
//!    with its first instructions.

use super::control::{VmRunControl, VmRunState};
use crate::devices::cpu_plug::VcpuSet;

impl VmRunControl {
    /// Blocks a vCPU thread outside the guest until the machine is reset. Returns early if
    /// `has_requests` returns `true`.
    pub(super) fn wait_for_restart(&self, vcpu: u8, has_requests: impl Fn() -> bool) -> ResetWait {
        let me = VcpuSet::of(vcpu);
        let mut ends = self.lock();
        if ends.reset_barrier.arrived.intersection(me).is_empty() {
            ends.reset_barrier.arrived = ends.reset_barrier.arrived.with(me);
            self.signal_reset();
        }
        loop {
            if self.state() != VmRunState::Resetting {
                ends.reset_barrier.arrived = ends.reset_barrier.arrived.difference(me);
                return ResetWait::Over;
            }
            if ends.reset_barrier.ready && ends.reset_barrier.missing.contains(vcpu) {
                return ResetWait::Restart;
            }
            if has_requests() {
                return ResetWait::RequestPending;
            }
            ends = self.wait(ends);
        }
    }

    /// Removes a vCPU from the barrier, because its thread ends.
    pub(super) fn leave_reset_barrier(&self, vcpu: u8) {
        let mut ends = self.lock();
        ends.reset_barrier.arrived = ends.reset_barrier.arrived.difference(VcpuSet::of(vcpu));
    }

    /// Tells a pending reset that a vCPU thread has ended and need not arrive.
    pub(super) fn notify_thread_ended(&self) {
        // Taking the lock ensures that a reset that begins later observes that the thread has
        // ended.
        let ends = self.lock();
        let resetting = self.state() == VmRunState::Resetting;
        drop(ends);
        if resetting {
            self.signal_reset();
        }
    }

    /// Returns the vCPUs that have left the guest and wait for a reset.
    pub fn arrived(&self) -> VcpuSet {
        self.lock().reset_barrier.arrived
    }

    /// Returns `true` from the release of the barrier until all vCPUs are restored.
    pub fn is_restoring(&self) -> bool {
        self.lock().reset_barrier.ready
    }

    /// Releases the barrier for `vcpus`, which must be all present vCPUs and must have arrived. The
    /// [`VcpuFactory`](super::factory::VcpuFactory) for their reconstruction must already be in
    /// place.
    pub fn release_reset_barrier(&self, vcpus: VcpuSet) {
        let mut ends = self.lock();
        ends.reset_barrier.missing = vcpus;
        ends.reset_barrier.ready = true;
        drop(ends);
        self.wake_waiters();
    }

    /// Records that a vCPU has returned to its initial state, and blocks until all vCPUs have or
    /// the VM has ended.
    pub(super) fn mark_restored_and_wait(&self, vcpu: u8) {
        let mut ends = self.lock();
        let me = VcpuSet::of(vcpu);
        ends.reset_barrier.missing = ends.reset_barrier.missing.difference(me);
        ends.reset_barrier.arrived = ends.reset_barrier.arrived.difference(me);
        if ends.reset_barrier.missing.is_empty() {
            ends.reset_barrier.ready = false;
            if self.state() == VmRunState::Resetting {
                self.apply_requested_state(&ends);
            }
            drop(ends);
            self.wake_waiters();
            return;
        }
        while ends.reset_barrier.missing != VcpuSet::default() && self.state() == VmRunState::Resetting {
            ends = self.wait(ends);
        }
    }
}

/// Reason why [`VmRunControl::wait_for_restart`] has returned.
#[derive(Debug)]
pub(super) enum ResetWait {
    /// The machine was reset, so the vCPU must be rebuilt.
    Restart,
    /// The vCPU has a request to handle, or was asked to stop.
    RequestPending,
    /// The reset was cancelled because the VM ended.
    Over,
}
