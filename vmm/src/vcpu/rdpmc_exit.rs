//! The exits that stand for RDPMC: they are answered here. A PMI that is about to come right behind one comes
//! before it.

use std::time::Duration;

use kvm_bindings::{KVM_VCPUEVENT_VALID_NMI_PENDING, Msrs, kvm_msr_entry, kvm_regs};
use perf_core::guest_log;
use vpmu::MsrRead;
use vpmu::exact::GuestMemory;

use super::control::StopReason;
use super::gate::{Looked, Planted, RFLAGS_TF, Stopped, rdpmc_length};
use super::rdpmc::{CR4_PCE, Level, Read};
use super::running::{Completed, Running, Turn};
use super::step::state::{Linear, State};
use crate::kvm::call::CallError;
use crate::kvm::vcpu_fd::VcpuFd;
use crate::rdpmc::sites::Hit;
use guest_profile::GuestRegs;
use kernel_images::rdpmc::{LONGEST, is_out};

/// How long a guest that has executed RDPMC may be in what it does with the value: its next dozen of
/// instructions, and the way back into it.
const READ_SETTLES: Duration = Duration::from_micros(50);
/// How long a PMI waits then.
const ONE_READ: Duration = Duration::from_millis(1);
/// Where SYSCALL goes in 64-bit mode (SDM vol. 4, IA32_LSTAR).
const IA32_LSTAR: u32 = 0xC000_0082;
/// RFLAGS.RF: no breakpoint at the next instruction (SDM vol. 3 §2.3).
const RFLAGS_RF: u64 = 1 << 16;
/// DR6.BS: #DB is for a single step (SDM vol. 3 §17.2.3).
const DR6_BS: u64 = 1 << 14;

impl Running {
    /// The guest wrote `byte` to the port that stands for RDPMC: it is one where one was replaced, the exit
    /// in the handler of #GP, or the guest's own, which the bus gets.
    ///
    /// # Errors
    /// KVM's, which no guest can cause.
    pub(super) fn trap_port(&mut self, byte: u8) -> Result<Turn, CallError> {
        let regs = self.registers.general(&mut self.fd)?;
        let planted = self
            .rdpmc
            .as_ref()
            .and_then(|rdpmc| rdpmc.gate.as_ref()?.planted_at(regs.rip));
        match planted {
            Some(Planted::Here(at)) => {
                self.registers.forget();
                self.fd.complete_exit()?;
                return self.at_gate(at);
            }
            Some(Planted::Gone(at)) if !self.is_out(&[at, regs.rip])? => {
                self.fd.complete_exit()?;
                self.go_to(at)?;
                return Ok(Turn::Again);
            }
            _ => {}
        }
        let site = match &mut self.rdpmc {
            Some(rdpmc) => rdpmc.site_at(&regs, &self.fd)?,
            None => None,
        };
        // The stepper takes the end of a step for the end of the instruction: it must not be lost in finding
        // out.
        let site = site.map(|(hit, level)| {
            let ambiguous = hit.ambiguous && self.stepper.is_none();
            (Hit { ambiguous, ..hit }, level)
        });
        if let Some((hit, level)) = site
            && (!hit.ambiguous || self.is_of(hit, regs.rip)?)
        {
            self.answer(hit, level, regs)?;
            return Ok(Turn::Again);
        }
        Ok(self.own_port_write(byte))
    }

    /// Whether there is a port write of the guest's own at one of these addresses.
    fn is_out(&self, rips: &[u64]) -> Result<bool, CallError> {
        let Some(rdpmc) = &self.rdpmc else {
            return Ok(false);
        };
        let state = State::read(&self.fd)?;
        let mut memory = Linear::new(&rdpmc.memory, &state);
        Ok(rips.iter().any(|&rip| {
            let mut code = [0; LONGEST];
            let readable = memory.read(rip, &mut code);
            is_out(&code[..readable], 64)
        }))
    }

    /// Whether a port write with the vCPU at `rip` is of the instruction at `hit` and not of its neighbour:
    /// KVM completes it.
    fn is_of(&mut self, hit: Hit, rip: u64) -> Result<bool, CallError> {
        self.registers.forget();
        self.fd.complete_exit()?;
        let now = self.fd.get_regs()?.rip;
        Ok(now == hit.behind() && (rip == hit.start || rip == now))
    }

    /// Answers the instruction that stands for RDPMC: ECX selects, EDX:EAX take the count.
    #[expect(clippy::cast_possible_truncation, reason = "ECX")]
    fn answer(&mut self, hit: Hit, level: Level, mut regs: kvm_regs) -> Result<(), CallError> {
        if self.nmi_comes_first()? {
            self.fd.complete_exit()?;
            return self.go_to(hit.start);
        }
        self.seat.stats().rdpmc.inc();
        let Some(pmu) = &mut self.pmu else { return Ok(()) };
        let MsrRead::Value(value) = pmu.rdpmc_at(regs.rcx as u32, level.cpl, level.pce) else {
            self.seat.stats().gp_injected.inc();
            self.fd.complete_exit()?;
            self.go_to(hit.start)?;
            return self.raise_general_protection();
        };
        self.completed = Completed::AtAnyCpl;
        self.last_read.now(hit.start, hit.behind());
        regs.rax = value & 0xffff_ffff;
        regs.rdx = value >> 32;
        if hit.ambiguous {
            // It has been completed.
            regs.rip = hit.behind();
            return self.fd.set_regs(&regs);
        }
        self.registers.set_general(&mut self.fd, &regs)
    }

    /// The vCPU goes on at `rip`.
    fn go_to(&mut self, rip: u64) -> Result<(), CallError> {
        self.registers.forget();
        let mut regs = self.fd.get_regs()?;
        regs.rip = rip;
        self.fd.set_regs(&regs)
    }

    /// After a write of a PMU register, now and then: looks which kernel runs, and where its handler of #GP
    /// is.
    pub(super) fn look_at_kernel(&mut self) -> Result<(), CallError> {
        let Some(rdpmc) = self.rdpmc.as_mut().filter(|rdpmc| rdpmc.looks.due) else {
            return Ok(());
        };
        let state = State::read(&self.fd)?;
        let mut changed = false;
        if let Some(gate) = &mut rdpmc.gate
            && let Looked::Changed(breakpoint) = gate.look(&state)
        {
            changed = true;
            if let Some(breakpoint) = breakpoint {
                self.debug.set_last_site(breakpoint);
            }
        }
        if let Some(running) = &rdpmc.running
            && state.is_64bit()
            && let Some(lstar) = lstar(&self.fd)
        {
            let mut regs = GuestRegs::default();
            crate::kvm::registers::set_system(&mut regs, &state.sregs);
            changed |= running.look(&regs, lstar);
        }
        rdpmc.looks.looked(changed);
        Ok(())
    }

    /// The vCPU is at the beginning of the guest's handler of #GP, at `at`: an RDPMC is done, with anything
    /// else the handler goes on.
    fn at_gate(&mut self, at: u64) -> Result<Turn, CallError> {
        let nmi_comes_first = self.nmi_comes_first()?;
        let (Some(rdpmc), Some(pmu)) = (&mut self.rdpmc, &mut self.pmu) else {
            return Ok(Turn::Again);
        };
        let Some(gate) = &rdpmc.gate else {
            return Ok(Turn::Again);
        };
        self.seat.stats().gp_looked_at.inc();
        self.registers.forget();
        let mut state = State::read(&self.fd)?;
        if let Stopped::Rdpmc(read) = gate.stopped(&state, |gpa| rdpmc.sites.length_at(gpa)) {
            if nmi_comes_first {
                read.execute_again(&mut state);
                if read.cpl != 0 {
                    self.fd.set_sregs(&state.sregs)?;
                }
                self.fd.set_regs(&state.regs)?;
                return Ok(Turn::Again);
            }
            let pce = state.sregs.cr4 & CR4_PCE != 0;
            if let MsrRead::Value(value) = pmu.rdpmc_at(read.index, read.cpl, pce || read.cpl == 0) {
                self.seat.stats().rdpmc.inc();
                self.completed = Completed::AtAnyCpl;
                read.give(value, &mut state);
                if read.cpl != 0 {
                    self.fd.set_sregs(&state.sregs)?;
                }
                self.fd.set_regs(&state.regs)?;
                if read.traps() {
                    self.raise_single_step()?;
                } else {
                    let (at, behind) = read.place();
                    self.last_read.now(at, behind);
                }
                return Ok(Turn::Again);
            }
            self.seat.stats().gp_injected.inc();
        }
        if gate.enter_handler(at, &mut state).is_none() {
            guest_log!(
                Error,
                "vcpu{}: the guest's handler of #GP cannot push at {:#x}",
                self.id,
                state.regs.rsp
            );
            return Ok(Turn::Stop(StopReason::TripleFault));
        }
        self.fd.set_regs(&state.regs)?;
        Ok(Turn::Again)
    }

    /// Executes the RDPMC that a breakpoint stopped at.
    #[expect(clippy::cast_possible_truncation, reason = "ECX")]
    pub(super) fn rdpmc_at_breakpoint(&mut self) -> Result<Turn, CallError> {
        let regs = self.fd.get_regs()?;
        let gate = self.rdpmc.as_ref().and_then(|rdpmc| rdpmc.gate.as_ref());
        if gate.is_some_and(|gate| gate.breaks_at(regs.rip)) {
            return self.at_gate(regs.rip);
        }
        // The breakpoint stops here again.
        if self.nmi_comes_first()? {
            return Ok(Turn::Again);
        }
        let Some(rdpmc) = &mut self.rdpmc else {
            return Ok(Turn::Again);
        };
        self.registers.forget();
        let mut state = State {
            regs,
            sregs: self.fd.get_sregs()?,
        };
        // The breakpoint is at a linear address; what is there now may be something else.
        let mut code = [0; LONGEST];
        let readable = Linear::new(&rdpmc.memory, &state).read(regs.rip, &mut code);
        let Some(length) = rdpmc_length(&code[..readable], &state.sregs.cs) else {
            state.regs.rflags |= RFLAGS_RF;
            self.fd.set_regs(&state.regs)?;
            return Ok(Turn::Again);
        };
        self.seat.stats().rdpmc.inc();
        let Some(pmu) = &mut self.pmu else {
            return Ok(Turn::Again);
        };
        let level = Level::of(&state);
        let regs = &mut state.regs;
        let MsrRead::Value(value) = pmu.rdpmc_at(regs.rcx as u32, level.cpl, level.pce) else {
            self.seat.stats().gp_injected.inc();
            self.raise_general_protection()?;
            return Ok(Turn::Again);
        };
        self.completed = Completed::AtAnyCpl;
        let behind = regs.rip.wrapping_add(length.into());
        let at = regs.rip;
        (regs.rax, regs.rdx, regs.rip) = (value & 0xffff_ffff, value >> 32, behind);
        self.fd.set_regs(regs)?;
        if regs.rflags & RFLAGS_TF != 0 {
            self.raise_single_step()?;
        } else {
            self.last_read.now(at, behind);
        }
        Ok(Turn::Again)
    }

    fn raise_general_protection(&self) -> Result<(), CallError> {
        self.raise(13, Some(0))
    }

    /// #DB behind an instruction that we have executed for a guest that single-steps.
    fn raise_single_step(&self) -> Result<(), CallError> {
        let mut debug = self.fd.get_debug_regs()?;
        debug.dr6 |= DR6_BS;
        self.fd.set_debug_regs(&debug)?;
        self.raise(1, None)
    }

    fn raise(&self, vector: u8, error_code: Option<u32>) -> Result<(), CallError> {
        let mut events = self.fd.get_vcpu_events()?;
        // What others send meanwhile stays as it is.
        events.flags &= !KVM_VCPUEVENT_VALID_NMI_PENDING;
        events.exception.injected = 1;
        events.exception.nr = vector;
        events.exception.has_error_code = error_code.is_some().into();
        events.exception.error_code = error_code.unwrap_or(0);
        self.fd.set_vcpu_events(&events)
    }

    /// Whether the guest has executed RDPMC while an NMI that a PMI is waits for it. KVM has let the guest
    /// execute something first, as the fault of this RDPMC or what an interrupt begins with. The NMI would
    /// come right behind it; so the RDPMC is to be executed again behind the NMI. See
    /// [`Self::interrupt_before_read`]. Once for an NMI, and not for ever where the next one always comes
    /// before the RDPMC, so that the guest gets on.
    fn nmi_comes_first(&mut self) -> Result<bool, CallError> {
        let Some(in_a_row) = self.sent_nmi.take_unseen() else {
            return Ok(false);
        };
        if self.stepper.is_some() {
            return Ok(false);
        }
        let nmi = self.registers.nmi_state(&mut self.fd)?;
        self.registers.want_nmi_state(&mut self.fd, false);
        let waits = nmi.masked == 0 && nmi.pending | nmi.injected != 0;
        if waits {
            self.sent_nmi.had_read_again(in_a_row);
        }
        Ok(waits)
    }

    /// A PMI is about to interrupt a guest that has executed RDPMC. If it has not gone on from there, the PMI
    /// comes before it: it is executed again after the handler. Returns how long the PMI must wait
    /// instead.
    ///
    /// Linux brings an event up to date by reading its last value, RDPMC, and a compare-and-exchange of that
    /// last value. A handler in between restarts the period, after which the last value can be what it
    /// was before: the exchange succeeds, and the count is off by 2^48. Between a processor's RDPMC and
    /// the exchange that is a matter of nanoseconds; here the exit for RDPMC is where overflows are
    /// found, and timers ring on the way back from it, so PMIs would come behind it as a rule.
    pub(super) fn interrupt_before_read(&mut self) -> Result<Option<Duration>, CallError> {
        let in_a_row = std::mem::take(&mut self.last_read.again);
        let Some(Read { at, behind, when }) = self.last_read.read else {
            return Ok(None);
        };
        // While it is stepped, overflows are found before the instruction. In a handler an NMI waits for its
        // end.
        if self.stepper.is_some() || self.fd.get_vcpu_events()?.nmi.masked != 0 {
            return Ok(None);
        }
        let mut regs = self.fd.get_regs()?;
        if regs.rip != at && regs.rip != behind {
            // It has gone on, and may still have the value in hand.
            return Ok((when.elapsed() < READ_SETTLES).then_some(READ_SETTLES));
        }
        if !self.last_read.may_be_done_again(in_a_row) {
            // Its counters overflow again each time it gets here.
            return Ok(Some(ONE_READ));
        }
        self.registers.forget();
        if regs.rip == at {
            // KVM has yet to step over the OUT that stands for RDPMC. The request to leave stays: the next
            // entry is made twice.
            self.fd.complete_exit()?;
            regs = self.fd.get_regs()?;
        }
        if regs.rip == behind {
            regs.rip = at;
            // Some KVMs have stepped over the OUT before its answer was taken, which must not come behind
            // this.
            self.registers.take_back_general(&mut self.fd);
            self.fd.set_regs(&regs)?;
        }
        self.last_read.forget();
        Ok(None)
    }
}

/// Where SYSCALL goes: into the kernel.
fn lstar(fd: &VcpuFd) -> Option<u64> {
    let mut msrs = Msrs::from_entries(&[kvm_msr_entry {
        index: IA32_LSTAR,
        ..Default::default()
    }])
    .ok()?;
    match fd.get_msrs(&mut msrs) {
        Ok(1) => msrs.as_slice().first().map(|msr| msr.data),
        _ => None,
    }
}
