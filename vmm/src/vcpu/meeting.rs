//! Synchronization of the vCPU threads when the guest resets the machine.
//!
//! 1. A vCPU whose guest requests a reset sets the state to [`RunState::Resetting`]. Each thread
//!   exits the guest, closes the guest's counters and reaches the barrier (`wait_for_restart`). The
//!   thread stays attached to the perf core, so events of operators continue.
//! 2. When all vCPUs have arrived, the main loop resets memory and devices and releases the barrier
//!   ([`RunControl::go_on`]).
//! 3. Each thread restores the initial state of its KVM vCPU and waits for the others. No vCPU
//!   enters the guest before all are restored, because the boot processor may start the others with
//!   its first instructions.

use super::control::{RunControl, RunState};
use crate::devices::cpu_plug::VcpuSet;

impl RunControl {
    /// Waits outside the guest until the machine is reset. Returns [`Waited::Mail`] if `has_mail`
    /// returns `true`.
    pub(super) fn wait_for_restart(&self, vcpu: u8, has_mail: impl Fn() -> bool) -> Waited {
        let me = VcpuSet::of(vcpu);
        let mut ends = self.lock();
        if ends.meeting.arrived.within(me).is_empty() {
            ends.meeting.arrived = ends.meeting.arrived.with(me);
            self.look_at_reset();
        }
        loop {
            if self.state() != RunState::Resetting {
                ends.meeting.arrived = ends.meeting.arrived.without(me);
                return Waited::Over;
            }
            if ends.meeting.ready && ends.meeting.missing.has(vcpu) {
                return Waited::Restart;
            }
            if has_mail() {
                return Waited::Mail;
            }
            ends = self.wait(ends);
        }
    }

    /// Removes a vCPU from the barrier, because its thread ends.
    pub(super) fn leaves_meeting(&self, vcpu: u8) {
        let mut ends = self.lock();
        ends.meeting.arrived = ends.meeting.arrived.without(VcpuSet::of(vcpu));
    }

    /// Notifies a pending reset that a vCPU thread has ended.
    pub(super) fn has_left(&self) {
        // Taking the lock ensures that a reset that begins later observes the ended thread.
        let ends = self.lock();
        let resetting = self.state() == RunState::Resetting;
        drop(ends);
        if resetting {
            self.look_at_reset();
        }
    }

    /// Returns the vCPUs that wait outside the guest for a reset.
    pub fn arrived(&self) -> VcpuSet {
        self.lock().meeting.arrived
    }

    /// Returns `true` while the vCPUs are being restored after a reset.
    pub fn is_restoring(&self) -> bool {
        self.lock().meeting.ready
    }

    /// Releases the barrier for `vcpus`, which must be all present vCPUs and must have arrived.
    /// Their [`VcpuMaker`](super::maker::VcpuMaker) must already have been replaced.
    pub fn go_on(&self, vcpus: VcpuSet) {
        let mut ends = self.lock();
        ends.meeting.missing = vcpus;
        ends.meeting.ready = true;
        drop(ends);
        self.tell();
    }

    /// Marks a vCPU as restored. Blocks until all vCPUs are restored or the VM has ended.
    pub(super) fn is_restored(&self, vcpu: u8) {
        let mut ends = self.lock();
        let me = VcpuSet::of(vcpu);
        ends.meeting.missing = ends.meeting.missing.without(me);
        ends.meeting.arrived = ends.meeting.arrived.without(me);
        if ends.meeting.missing.is_empty() {
            ends.meeting.ready = false;
            if self.state() == RunState::Resetting {
                self.set_as_wanted(&ends);
            }
            drop(ends);
            self.tell();
            return;
        }
        while ends.meeting.missing != VcpuSet::default() && self.state() == RunState::Resetting {
            ends = self.wait(ends);
        }
    }
}

/// Result of waiting for the restart.
#[derive(Debug)]
pub(super) enum Waited {
    /// The vCPU must be rebuilt.
    Restart,
    /// A request is pending, or the vCPU was asked to stop.
    Mail,
    /// The reset was cancelled because the VM ended.
    Over,
}
