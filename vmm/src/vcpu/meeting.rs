//! Where the vCPUs' threads meet when the guest resets the machine.
//!
//! 1. A vCPU whose guest resets makes the state [`RunState::Resetting`]. Each thread leaves the guest,
//!    closes the counters of the guest and arrives (`wait_for_restart`). It stays in the perf core, so what
//!    operators count and sample goes on.
//! 2. When all have arrived, the main loop makes memory and devices anew and lets them go on
//!    ([`RunControl::go_on`]).
//! 3. Each puts its KVM vCPU into the first state and says so. Nobody enters the guest before all have: the
//!    boot processor may start the others with its first instructions.

use super::control::{RunControl, RunState};
use crate::devices::cpu_plug::VcpuSet;

impl RunControl {
    /// Waits outside the guest until the machine is made anew. `has_mail` gets a thread out to read it
    /// ([`Waited::Mail`]).
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

    /// A thread that waited leaves for good.
    pub(super) fn leaves_meeting(&self, vcpu: u8) {
        let mut ends = self.lock();
        ends.meeting.arrived = ends.meeting.arrived.without(VcpuSet::of(vcpu));
    }

    /// The thread of a vCPU has ended, which a reset may wait for.
    pub(super) fn has_left(&self) {
        // Under the lock: a reset that begins later sees that the thread has ended.
        let ends = self.lock();
        let resetting = self.state() == RunState::Resetting;
        drop(ends);
        if resetting {
            self.look_at_reset();
        }
    }

    /// The vCPUs that are outside the guest because of a reset.
    pub fn arrived(&self) -> VcpuSet {
        self.lock().meeting.arrived
    }

    /// Whether the vCPUs go on from a reset, and have not all.
    pub fn is_restoring(&self) -> bool {
        self.lock().meeting.ready
    }

    /// Lets `vcpus`, which are all there are and have arrived, start again. What they are made from is there.
    pub fn go_on(&self, vcpus: VcpuSet) {
        let mut ends = self.lock();
        ends.meeting.missing = vcpus;
        ends.meeting.ready = true;
        drop(ends);
        self.tell();
    }

    /// A vCPU is in its first state. Returns when all are, or the VM has ended.
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

/// How a wait for the restart ended.
#[derive(Debug)]
pub(super) enum Waited {
    /// The vCPU is to be made anew.
    Restart,
    /// There is mail, or the vCPU is to leave.
    Mail,
    /// There is no reset any more: the VM ends.
    Over,
}
