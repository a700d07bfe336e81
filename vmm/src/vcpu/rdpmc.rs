//! RDPMC while the guest runs: what stands for it exits here, and a PMI must not come at a bad moment behind
//! it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvm_bindings::{KVM_VCPUEVENT_VALID_NMI_PENDING, Msrs, kvm_msr_entry, kvm_regs};
use kvm_ioctls::VcpuFd;
use vm_memory::GuestMemoryMmap;
use vpmu::MsrRead;
use vpmu::exact::GuestMemory;

use super::control::StopReason;
use super::exit::Completed;
use super::gate::{Gate, Looked, Planted, RFLAGS_TF, Stopped, rdpmc_length};
use super::step::state::{Linear, State};
use super::{Running, Turn};
use crate::kernels::running::RunningKernels;
use crate::rdpmc::sites::{Hit, SitesOfVcpu};
use guest_profile::GuestRegs;
use kernel_images::rdpmc::{LONGEST, is_out};

/// How long a guest that has executed RDPMC may be in what it does with the value: its next dozen of
/// instructions, and the way back into it.
const READ_SETTLES: Duration = Duration::from_micros(50);
/// PMIs in a row before which an RDPMC is executed again: a guest whose counters overflow all the time must
/// get on.
const MOST_READS_AGAIN: u32 = 16;
/// How long a PMI waits then.
const ONE_READ: Duration = Duration::from_millis(1);
/// Where SYSCALL goes in 64-bit mode (SDM vol. 4, IA32_LSTAR).
const IA32_LSTAR: u32 = 0xC000_0082;
/// Time between looks at the guest's kernel while it writes PMU registers. One takes a microsecond or two.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// CR4.PCE: RDPMC at CPL 3 is allowed (SDM vol. 3 §2.5).
const CR4_PCE: u64 = 1 << 8;
/// RFLAGS.RF: no breakpoint at the next instruction (SDM vol. 3 §2.3).
const RFLAGS_RF: u64 = 1 << 16;
/// DR6.BS: #DB is for a single step (SDM vol. 3 §17.2.3).
const DR6_BS: u64 = 1 << 14;

/// An RDPMC that was answered.
#[derive(Clone, Copy, Debug)]
struct Read {
    /// Where it is.
    at: u64,
    /// Where the next instruction is.
    behind: u64,
    when: Instant,
}

/// The RDPMC that the guest executed last.
#[derive(Debug, Default)]
pub(super) struct LastRead {
    /// `None` once the guest may have executed something else.
    read: Option<Read>,
    /// How many PMIs in a row had it done again.
    again: u32,
    /// The next one is this one again.
    redone: bool,
}

impl LastRead {
    fn now(&mut self, at: u64, behind: u64) {
        if !std::mem::take(&mut self.redone) {
            // It has gone on from the one before.
            self.again = 0;
        }
        self.read = Some(Read {
            at,
            behind,
            when: Instant::now(),
        });
    }

    /// Whether a PMI may have the read done again that the guest has not gone on from. If not, the guest goes
    /// on first, and the PMI comes before its next read.
    fn may_be_done_again(&mut self, in_a_row: u32) -> bool {
        self.redone = in_a_row < MOST_READS_AGAIN;
        self.again = in_a_row + u32::from(self.redone);
        self.redone
    }

    /// The guest has gone on.
    #[inline]
    pub(super) fn forget(&mut self) {
        self.read = None;
    }
}

/// How one vCPU's RDPMC is served.
pub struct Rdpmc {
    memory: GuestMemoryMmap,
    /// The kernel is Linux: nothing in the upper half of the address space is a program's.
    linux: bool,
    /// Where it was replaced, by exits or by breakpoints.
    sites: SitesOfVcpu,
    /// Where that is served which was not replaced.
    gate: Option<Gate>,
    /// Finds it in the kernels that the guest starts itself.
    running: Option<Arc<RunningKernels>>,
    looks: Looks,
}

impl Rdpmc {
    /// Of a vCPU that has yet to run. `linux`: the kernel is one, and nothing in the upper half of the
    /// address space is a program's.
    pub fn new(memory: GuestMemoryMmap, linux: bool, sites: SitesOfVcpu) -> Self {
        Self {
            memory,
            linux,
            sites,
            gate: None,
            running: None,
            looks: Looks::default(),
        }
    }

    /// Serves what was not replaced at the guest's handler of #GP. Not together with stepping, which has
    /// exits of its own there.
    #[must_use]
    pub fn with_gate(mut self, gate: Gate) -> Self {
        self.gate = Some(gate);
        self
    }

    /// Replaces RDPMC in the kernels that the guest starts itself.
    #[must_use]
    pub fn with_running(mut self, running: Arc<RunningKernels>) -> Self {
        self.running = Some(running);
        self
    }

    /// The replaced RDPMC that a port write is of, and the level that it is executed at.
    fn site_at(&mut self, regs: &kvm_regs, fd: &VcpuFd) -> Result<Option<(Hit, Level)>, kvm_ioctls::Error> {
        if self.linux
            && let Some(hit) = self.sites.in_kernel_half(regs.rip)
        {
            return Ok(Some((hit, Level::KERNEL)));
        }
        if self.sites.is_empty() {
            return Ok(None);
        }
        let state = State {
            regs: *regs,
            sregs: fd.get_sregs()?,
        };
        let mut memory = Linear::new(&self.memory, &state);
        let linear = |back: u64| {
            let rip = state.regs.rip.wrapping_sub(back);
            if state.is_64bit() {
                rip
            } else {
                state.sregs.cs.base.wrapping_add(rip) & 0xffff_ffff
            }
        };
        let hit = self
            .sites
            .in_memory(regs.rip, state.is_64bit(), |back| memory.physical(linear(back)));
        Ok(hit.map(|hit| (hit, Level::of(&state))))
    }

    /// The guest has written a PMU register, as it does before it reads a counter.
    #[inline]
    pub(super) fn wrote(&mut self) {
        if self.gate.is_some() || self.running.is_some() {
            self.looks.wrote();
            self.looks.due |= self.gate.as_ref().is_some_and(Gate::has_changed);
        }
    }
}

/// What decides whether RDPMC is allowed.
#[derive(Clone, Copy, Debug)]
struct Level {
    cpl: u8,
    pce: bool,
}

impl Level {
    const KERNEL: Self = Self { cpl: 0, pce: true };

    fn of(state: &State) -> Self {
        let cpl = state.cpl();
        Self {
            cpl,
            pce: cpl == 0 || state.sregs.cr4 & CR4_PCE != 0,
        }
    }
}

/// When the guest's kernel is looked at.
#[derive(Debug, Default)]
struct Looks {
    /// Since it was found to be another one.
    writes: u32,
    last: Option<Instant>,
    due: bool,
}

impl Looks {
    #[inline]
    fn wrote(&mut self) {
        self.writes = self.writes.saturating_add(1);
        self.due |=
            self.writes.is_power_of_two() || self.last.is_none_or(|last| last.elapsed() >= LOOK_AGAIN);
    }

    fn looked(&mut self, changed: bool) {
        self.due = false;
        self.last = Some(Instant::now());
        if changed {
            self.writes = 0;
        }
    }
}

impl Running {
    /// The guest wrote `byte` to the port that stands for RDPMC: it is one where one was replaced, the exit
    /// in the handler of #GP, or the guest's own, which the bus gets.
    ///
    /// # Errors
    /// KVM's, which no guest can cause.
    pub(super) fn trap_port(&mut self, byte: u8) -> Result<Turn, kvm_ioctls::Error> {
        let regs = self.registers.general(&mut self.fd)?;
        let planted = self
            .rdpmc
            .as_ref()
            .and_then(|rdpmc| rdpmc.gate.as_ref()?.planted_at(regs.rip));
        match planted {
            Some(Planted::Here(at)) => {
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
    fn is_out(&self, rips: &[u64]) -> Result<bool, kvm_ioctls::Error> {
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
    fn is_of(&mut self, hit: Hit, rip: u64) -> Result<bool, kvm_ioctls::Error> {
        self.registers.forget();
        self.fd.complete_exit()?;
        let now = self.fd.get_regs()?.rip;
        Ok(now == hit.behind() && (rip == hit.start || rip == now))
    }

    /// Answers the instruction that stands for RDPMC: ECX selects, EDX:EAX take the count.
    #[expect(clippy::cast_possible_truncation, reason = "ECX")]
    fn answer(&mut self, hit: Hit, level: Level, mut regs: kvm_regs) -> Result<(), kvm_ioctls::Error> {
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
    fn go_to(&mut self, rip: u64) -> Result<(), kvm_ioctls::Error> {
        self.registers.forget();
        let mut regs = self.fd.get_regs()?;
        regs.rip = rip;
        self.fd.set_regs(&regs)
    }

    /// After a write of a PMU register, now and then: looks which kernel runs, and where its handler of #GP
    /// is.
    pub(super) fn look_at_kernel(&mut self) -> Result<(), kvm_ioctls::Error> {
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
    fn at_gate(&mut self, at: u64) -> Result<Turn, kvm_ioctls::Error> {
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
            log::error!(
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
    pub(super) fn rdpmc_at_breakpoint(&mut self) -> Result<Turn, kvm_ioctls::Error> {
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

    fn raise_general_protection(&self) -> Result<(), kvm_ioctls::Error> {
        self.raise(13, Some(0))
    }

    /// #DB behind an instruction that we have executed for a guest that single-steps.
    fn raise_single_step(&self) -> Result<(), kvm_ioctls::Error> {
        let mut debug = self.fd.get_debug_regs()?;
        debug.dr6 |= DR6_BS;
        self.fd.set_debug_regs(&debug)?;
        self.raise(1, None)
    }

    fn raise(&self, vector: u8, error_code: Option<u32>) -> Result<(), kvm_ioctls::Error> {
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
    fn nmi_comes_first(&mut self) -> Result<bool, kvm_ioctls::Error> {
        let sent = std::mem::take(&mut self.nmi_sent);
        let in_a_row = std::mem::take(&mut self.nmis_in_a_row);
        if !sent || self.stepper.is_some() || in_a_row == MOST_READS_AGAIN {
            return Ok(false);
        }
        let nmi = self.fd.get_vcpu_events()?.nmi;
        let waits = nmi.masked == 0 && nmi.pending | nmi.injected != 0;
        self.nmis_in_a_row = if waits { in_a_row + 1 } else { 0 };
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
    pub(super) fn interrupt_before_read(&mut self) -> Result<Option<Duration>, kvm_ioctls::Error> {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest that does nothing but read counters, all its exits reads, and a counter that has overflowed at
    /// each: it gets on, and the PMIs come all the same.
    #[test]
    fn reads_and_pmis_both_get_on_where_every_exit_is_a_read() {
        let mut last = LastRead::default();
        let (mut done, mut pmis) = (0, 0);
        for _ in 0..1000 {
            last.now(0x1000, 0x1002);
            let in_a_row = std::mem::take(&mut last.again);
            if last.may_be_done_again(in_a_row) {
                pmis += 1;
                last.forget();
            } else {
                done += 1;
            }
        }
        assert!(done >= 50 && pmis >= 900, "{done} reads, {pmis} PMIs");
    }

    /// PMIs with reads between them that were done once are not in a row.
    #[test]
    fn each_pmi_comes_before_a_read_where_they_are_far_apart() {
        let mut last = LastRead::default();
        for _ in 0..4 * MOST_READS_AGAIN {
            for _ in 0..3 {
                last.now(0x1000, 0x1002);
            }
            let in_a_row = std::mem::take(&mut last.again);
            assert!(last.may_be_done_again(in_a_row));
            last.forget();
            last.now(0x1000, 0x1002);
        }
    }

    /// While the guest has not gone on, a wait is not over with the next look.
    #[test]
    fn a_read_that_is_let_go_is_not_done_again_before_the_guest_has_gone_on() {
        let mut last = LastRead::default();
        last.now(0x1000, 0x1002);
        assert!(!last.may_be_done_again(MOST_READS_AGAIN));
        for _ in 0..3 {
            let in_a_row = std::mem::take(&mut last.again);
            assert!(!last.may_be_done_again(in_a_row));
        }
        last.now(0x1000, 0x1002);
        let in_a_row = std::mem::take(&mut last.again);
        assert!(last.may_be_done_again(in_a_row));
    }
}
