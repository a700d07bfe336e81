//! What one vCPU's RDPMC is served with: where it was replaced, the gate, the kernels that the guest starts
//! itself, and the reads and NMIs between which the order matters. `rdpmc_exit.rs` serves it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvm_bindings::kvm_regs;
use vm_memory::GuestMemoryMmap;

use super::gate::Gate;
use super::step::state::{Linear, State};
use crate::kernels::running::RunningKernels;
use crate::kvm::call::CallError;
use crate::kvm::vcpu_fd::VcpuFd;
use crate::rdpmc::sites::{Hit, SitesOfVcpu};

/// PMIs in a row before which an RDPMC is executed again: a guest whose counters overflow all the time must
/// get on.
pub(super) const MOST_READS_AGAIN: u32 = 16;
/// Time between looks at the guest's kernel while it writes PMU registers, right after it was found to be
/// another one. One takes three calls of KVM.
const SOONEST_LOOK: Duration = Duration::from_millis(1);
/// The same once many looks have found nothing new.
const LATEST_LOOK: Duration = Duration::from_millis(64);
/// Writes of PMU registers from one look to the next, however fast they follow each other.
const MOST_WRITES: u32 = 1024;
/// CR4.PCE: RDPMC at CPL 3 is allowed (SDM vol. 3 §2.5).
pub(super) const CR4_PCE: u64 = 1 << 8;

/// An RDPMC that was answered.
#[derive(Clone, Copy, Debug)]
pub(super) struct Read {
    /// Where it is.
    pub(super) at: u64,
    /// Where the next instruction is.
    pub(super) behind: u64,
    pub(super) when: Instant,
}

/// The RDPMC that the guest executed last.
#[derive(Debug, Default)]
pub(super) struct LastRead {
    /// `None` once the guest may have executed something else.
    pub(super) read: Option<Read>,
    /// How many PMIs in a row had it done again.
    pub(super) again: u32,
    /// The next one is this one again.
    redone: bool,
}

impl LastRead {
    pub(super) fn now(&mut self, at: u64, behind: u64) {
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
    pub(super) fn may_be_done_again(&mut self, in_a_row: u32) -> bool {
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
    pub(super) memory: GuestMemoryMmap,
    /// The kernel is Linux: nothing in the upper half of the address space is a program's.
    linux: bool,
    /// Where it was replaced, by exits or by breakpoints.
    pub(super) sites: SitesOfVcpu,
    /// Where that is served which was not replaced.
    pub(super) gate: Option<Gate>,
    /// Finds it in the kernels that the guest starts itself.
    pub(super) running: Option<Arc<RunningKernels>>,
    pub(super) looks: Looks,
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
    pub(super) fn site_at(
        &mut self,
        regs: &kvm_regs,
        fd: &VcpuFd,
    ) -> Result<Option<(Hit, Level)>, CallError> {
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
pub(super) struct Level {
    pub(super) cpl: u8,
    pub(super) pce: bool,
}

impl Level {
    const KERNEL: Self = Self { cpl: 0, pce: true };

    pub(super) fn of(state: &State) -> Self {
        let cpl = state.cpl();
        Self {
            cpl,
            pce: cpl == 0 || state.sregs.cr4 & CR4_PCE != 0,
        }
    }
}

/// When the guest's kernel is looked at: ever more seldom while it stays the same.
#[derive(Debug, Default)]
pub(super) struct Looks {
    /// Since it was found to be another one.
    writes: u32,
    /// Since the last look.
    unseen: u32,
    /// When the last one was, and how long after it the next may be.
    last: Option<(Instant, Duration)>,
    pub(super) due: bool,
}

impl Looks {
    #[inline]
    fn wrote(&mut self) {
        self.wrote_at(Instant::now());
    }

    fn wrote_at(&mut self, now: Instant) {
        self.writes = self.writes.saturating_add(1);
        self.unseen = self.unseen.saturating_add(1);
        self.due |= self.writes.is_power_of_two()
            || self.unseen >= MOST_WRITES
            || self
                .last
                .is_none_or(|(last, pause)| now.saturating_duration_since(last) >= pause);
    }

    pub(super) fn looked(&mut self, changed: bool) {
        self.looked_at(Instant::now(), changed);
    }

    fn looked_at(&mut self, now: Instant, changed: bool) {
        self.due = false;
        self.unseen = 0;
        let pause = match self.last {
            Some((_, pause)) if !changed => (pause * 2).min(LATEST_LOOK),
            _ => SOONEST_LOOK,
        };
        self.last = Some((now, pause));
        if changed {
            self.writes = 0;
        }
    }
}

/// An NMI that was sent for a PMI, and that the guest may not have taken yet.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct SentNmi {
    /// One was sent since the last look.
    sent: bool,
    /// How many in a row had an RDPMC executed again.
    in_a_row: u32,
}

impl SentNmi {
    /// One is sent. Whether the guest has executed RDPMC since the one before.
    pub(super) fn now(&mut self) -> bool {
        !std::mem::replace(&mut self.sent, true)
    }

    /// An RDPMC is about to be answered. How many NMIs in a row had one executed again, if this is to look
    /// whether the one that was sent still waits: once for an NMI, and not for ever.
    pub(super) fn take_unseen(&mut self) -> Option<u32> {
        let Self { sent, in_a_row } = std::mem::take(self);
        (sent && in_a_row < MOST_READS_AGAIN).then_some(in_a_row)
    }

    /// It waits: the RDPMC is executed again behind it, after `before` others.
    pub(super) fn had_read_again(&mut self, before: u32) {
        self.in_a_row = before + 1;
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

    /// How many looks a guest costs that writes a register every 100 µs for `time`.
    fn looks_in(looks: &mut Looks, from: Instant, time: Duration) -> u32 {
        let (mut now, mut n) = (from, 0);
        while now < from + time {
            now += Duration::from_micros(100);
            looks.wrote_at(now);
            if looks.due {
                looks.looked_at(now, false);
                n += 1;
            }
        }
        n
    }

    /// A guest that is profiled writes registers all the time, and its kernel stays what it is.
    #[test]
    fn a_kernel_that_stays_is_looked_at_ever_more_seldom() {
        let mut looks = Looks::default();
        let start = Instant::now();
        let second = Duration::from_secs(1);
        // The powers of two, and sixteen a second.
        assert!(looks_in(&mut looks, start, 10 * second) < 200);
        let later = start + 20 * second;
        let many = looks_in(&mut looks, later, 10 * second);
        assert!((150..165).contains(&many), "{many} in 10 s");
    }

    /// However fast it writes: a table that has moved is found.
    #[test]
    fn so_many_writes_have_the_kernel_looked_at() {
        let mut looks = Looks::default();
        let start = Instant::now();
        looks_in(&mut looks, start, Duration::from_secs(5));
        let now = start + Duration::from_secs(5);
        looks.looked_at(now, false);
        let written = (1..=MOST_WRITES).find(|_| {
            looks.wrote_at(now);
            looks.due
        });
        assert!(written.is_some());
    }

    /// Another kernel is looked at as often as the first was: its handler may change once more.
    #[test]
    fn another_kernel_is_looked_at_soon_again() {
        let mut looks = Looks::default();
        let start = Instant::now();
        looks_in(&mut looks, start, Duration::from_secs(5));
        let now = start + Duration::from_secs(6);
        looks.wrote_at(now);
        assert!(looks.due);
        looks.looked_at(now, true);
        assert_eq!(looks.last, Some((now, SOONEST_LOOK)));
        looks.wrote_at(now);
        assert!(looks.due, "the first write");
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

    /// Each NMI is looked for once. A guest whose next NMI always comes before its RDPMC gets on.
    #[test]
    fn an_nmi_is_looked_for_once_and_not_for_ever() {
        let mut nmi = SentNmi::default();
        assert_eq!(nmi.take_unseen(), None, "none was sent");
        assert!(nmi.now());
        assert!(!nmi.now(), "no RDPMC came between");
        assert_eq!(nmi.take_unseen(), Some(0));
        assert_eq!(nmi.take_unseen(), None, "it was looked for");
        for before in 0..MOST_READS_AGAIN {
            nmi.now();
            assert_eq!(nmi.take_unseen(), Some(before));
            nmi.had_read_again(before);
        }
        nmi.now();
        assert_eq!(nmi.take_unseen(), None, "the guest goes on");
        nmi.now();
        assert_eq!(nmi.take_unseen(), Some(0));
    }
}
