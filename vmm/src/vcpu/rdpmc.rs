//! RDPMC while the guest runs: what stands for it exits here, and a PMI must not come at a bad moment behind it.

use std::time::{Duration, Instant};

use kvm_bindings::KVM_VCPUEVENT_VALID_NMI_PENDING;
use kvm_ioctls::SyncReg;

use super::control::StopReason;
use super::gate::Stopped;
use super::step::state::State;
use super::{Completed, Fresh, Vcpu};
use crate::rdpmc::{TRAP, complete_port_write, hwbp};

/// How long a guest that has executed RDPMC may be in what it does with the value: its next dozen of instructions, and the way
/// back into it.
const READ_SETTLES: Duration = Duration::from_micros(50);
/// PMIs in a row before which an RDPMC is executed again: a guest whose counters overflow all the time must get on.
const MOST_READS_AGAIN: u32 = 16;
/// How long a PMI waits then.
const ONE_READ: Duration = Duration::from_millis(1);

/// An RDPMC that was answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Read {
    /// Where it is.
    at: u64,
    when: Instant,
}

impl Read {
    pub(super) fn now(at: u64) -> Option<Self> {
        Some(Self {
            at,
            when: Instant::now(),
        })
    }
}

/// CR4.PCE: RDPMC at CPL 3 is allowed (SDM vol. 3 §2.5).
const CR4_PCE: u64 = 1 << 8;

impl Vcpu {
    /// Answers the instruction that stands for RDPMC: ECX selects, EDX:EAX take the count.
    pub(super) fn rdpmc(&mut self) {
        let regs = if self.syncs_registers {
            Ok(self.fd.sync_regs_mut().regs)
        } else {
            self.fd.get_regs()
        };
        let mut regs = match regs {
            Ok(regs) => regs,
            Err(e) => return self.fail_rdpmc("KVM_GET_REGS", &e),
        };
        if self.gate.as_ref().is_some_and(|gate| gate.is_at(regs.rip)) {
            if let Err(e) = complete_port_write(&mut self.fd).and_then(|()| self.at_gate()) {
                self.fail_rdpmc("serving the handler of #GP", &e);
            }
            return;
        }
        self.stats.rdpmc.inc();
        let Some(pmu) = &mut self.pmu else { return };
        match pmu.rdpmc(regs.rcx as u32) {
            Some(value) => {
                self.completed = Completed::AtAnyCpl;
                self.just_read = Read::now(regs.rip);
                regs.rax = value & 0xffff_ffff;
                regs.rdx = value >> 32;
                if self.syncs_registers {
                    // Before it completes the port write, the next KVM_RUN takes them.
                    self.fd.sync_regs_mut().regs = regs;
                    self.fd.set_sync_dirty_reg(SyncReg::Register);
                } else if let Err(e) = self.fd.set_regs(&regs) {
                    self.fail_rdpmc("KVM_SET_REGS", &e);
                }
            }
            None => {
                self.stats.gp_injected.inc();
                if let Err(e) = self.fault_at_port_write() {
                    self.fail_rdpmc("injecting #GP for RDPMC", &e);
                }
            }
        }
    }

    /// A call failed that no guest can make fail.
    fn fail_rdpmc(&self, what: &str, e: &kvm_ioctls::Error) {
        log::error!("vcpu{}: {what}: {e}", self.id);
        self.control.stop(StopReason::Failed);
    }

    /// Raises #GP(0) *at* the two-byte instruction whose port write is being handled.
    fn fault_at_port_write(&mut self) -> Result<(), kvm_ioctls::Error> {
        self.synced = Fresh::default();
        complete_port_write(&mut self.fd)?;
        let mut regs = self.fd.get_regs()?;
        regs.rip = regs.rip.wrapping_sub(2);
        self.fd.set_regs(&regs)?;
        self.raise_general_protection()
    }

    /// After a write of a PMU register, now and then: looks where the guest's handler of #GP is.
    pub(super) fn look_for_gate(&mut self) -> Result<(), kvm_ioctls::Error> {
        let Some(gate) = self.gate.as_mut().filter(|gate| gate.is_due()) else {
            return Ok(());
        };
        if let Some(breakpoint) = gate.look(&State::read(&self.fd)?) {
            self.debug.set_last_site(breakpoint);
        }
        Ok(())
    }

    /// The vCPU is at the beginning of the guest's handler of #GP: an RDPMC is done, with anything else the handler goes on.
    fn at_gate(&mut self) -> Result<(), kvm_ioctls::Error> {
        let (Some(gate), Some(pmu)) = (&self.gate, &mut self.pmu) else {
            return Ok(());
        };
        self.stats.gp_looked_at.inc();
        self.synced = Fresh::default();
        let mut state = State::read(&self.fd)?;
        if let Stopped::Rdpmc(read) = gate.stopped(&state) {
            let pce = state.sregs.cr4 & CR4_PCE != 0;
            if let Some(value) = pmu.rdpmc_at(read.index, read.cpl, pce || read.cpl == 0) {
                self.stats.rdpmc.inc();
                self.completed = Completed::AtAnyCpl;
                read.give(value, &mut state);
                if read.cpl != 0 {
                    self.fd.set_sregs(&state.sregs)?;
                }
                return self.fd.set_regs(&state.regs);
            }
            self.stats.gp_injected.inc();
        }
        if gate.enter_handler(&mut state).is_none() {
            log::error!(
                "vcpu{}: the guest's handler of #GP cannot push at {:#x}",
                self.id,
                state.regs.rsp
            );
            self.control.stop(StopReason::TripleFault);
            return Ok(());
        }
        self.fd.set_regs(&state.regs)
    }

    /// Executes the RDPMC that a breakpoint stopped at.
    pub(super) fn rdpmc_at_breakpoint(&mut self) -> Result<(), kvm_ioctls::Error> {
        let mut regs = self.fd.get_regs()?;
        if self.gate.as_ref().is_some_and(|gate| gate.is_at(regs.rip)) {
            return self.at_gate();
        }
        self.stats.rdpmc.inc();
        self.synced = Fresh::default();
        let Some(pmu) = &mut self.pmu else { return Ok(()) };
        let sregs = self.fd.get_sregs()?;
        let pce = sregs.cr4 & CR4_PCE != 0;
        let cpl = sregs.ss.dpl & 3;
        match pmu.rdpmc_at(regs.rcx as u32, cpl, pce || cpl == 0) {
            Some(value) => {
                regs.rax = value & 0xffff_ffff;
                regs.rdx = value >> 32;
                self.completed = Completed::AtAnyCpl;
                self.just_read = Read::now(regs.rip);
                regs.rip = regs.rip.wrapping_add(hwbp::LENGTH);
                self.fd.set_regs(&regs)
            }
            None => {
                self.stats.gp_injected.inc();
                self.raise_general_protection()
            }
        }
    }

    fn raise_general_protection(&self) -> Result<(), kvm_ioctls::Error> {
        let mut events = self.fd.get_vcpu_events()?;
        // What others send meanwhile stays as it is.
        events.flags &= !KVM_VCPUEVENT_VALID_NMI_PENDING;
        events.exception.injected = 1;
        events.exception.nr = 13;
        events.exception.has_error_code = 1;
        events.exception.error_code = 0;
        self.fd.set_vcpu_events(&events)
    }

    /// A PMI is about to interrupt a guest that has executed RDPMC. If it has not gone on from there, the PMI comes before
    /// it: it is executed again after the handler. Returns how long the PMI must wait instead.
    ///
    /// Linux brings an event up to date by reading its last value, RDPMC, and a compare-and-exchange of that last
    /// value. A handler in between restarts the period, after which the last value can be what it was
    /// before: the exchange succeeds, and the count is off by 2^48. Between a processor's RDPMC and the exchange that is a
    /// matter of nanoseconds; here the exit for RDPMC is where overflows are found, and timers ring on the way back from it, so
    /// PMIs would come behind it as a rule.
    pub(super) fn interrupt_before_read(&mut self) -> Result<Option<Duration>, kvm_ioctls::Error> {
        let in_a_row = std::mem::take(&mut self.reads_again);
        let Some(Read { at, when }) = self.just_read else {
            return Ok(None);
        };
        // While it is stepped, overflows are found before the instruction. In a handler an NMI waits for its end.
        if self.stepper.is_some() || self.fd.get_vcpu_events()?.nmi.masked != 0 {
            return Ok(None);
        }
        let mut regs = self.fd.get_regs()?;
        let behind = at.wrapping_add(TRAP.len() as u64);
        if regs.rip != at && regs.rip != behind {
            // It has gone on, and may still have the value in hand.
            return Ok((when.elapsed() < READ_SETTLES).then_some(READ_SETTLES));
        }
        if in_a_row == MOST_READS_AGAIN {
            // Its counters overflow again each time it gets here: this time it goes on first.
            self.reads_again = in_a_row;
            return Ok(Some(ONE_READ));
        }
        self.synced = Fresh::default();
        if regs.rip == at {
            // KVM has yet to step over the OUT that stands for RDPMC. The request to leave stays: the next entry is made twice.
            complete_port_write(&mut self.fd)?;
            regs = self.fd.get_regs()?;
        }
        if regs.rip == behind {
            regs.rip = at;
            self.fd.set_regs(&regs)?;
            self.reads_again = in_a_row + 1;
        }
        self.just_read = None;
        Ok(None)
    }
}
