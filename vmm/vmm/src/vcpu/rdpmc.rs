//! State of RDPMC emulation on one vCPU: replaced instructions, the intercepted #GP handler of the
//! guest, kernels that the guest starts, and the order of counter reads and NMIs. `rdpmc_exit.rs`
//! handles the exits.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvm_bindings::kvm_regs;
use snapshot::state::SavedRdpmc;
use vm_memory::GuestMemoryMmap;

use super::step::state::VcpuState;
use crate::kvm::call::KvmIoctlError;
use crate::kvm::vcpu_fd::VcpuFd;
use guest_patching::gate::GpHandlerInterception;
use guest_patching::linear_memory::LinearMemory;
use guest_patching::running::RunningKernelPatcher;
use guest_patching::sites::{TriggeredRdpmcSite, VcpuRdpmcSites};

/// Maximum number of PMIs in a row after which the guest repeats the same RDPMC. The limit
/// guarantees that a guest whose counters overflow all the time makes progress.
pub(super) const MAX_REPEATED_READS: u32 = 16;
/// Interval between checks whether the guest's kernel has changed, directly after a change. A check
/// is made when the guest writes a PMU register, and takes three KVM calls.
const MIN_CHECK_INTERVAL: Duration = Duration::from_millis(1);
/// Interval between checks whether the guest's kernel has changed, after many checks without a
/// change.
const MAX_CHECK_INTERVAL: Duration = Duration::from_millis(64);
/// Maximum number of writes to PMU registers after which the guest's kernel is checked, even if the
/// interval has not elapsed.
const MAX_WRITES: u32 = 1024;
/// CR4.PCE: RDPMC is permitted at CPL 3 (SDM vol. 3 §2.5).
pub(super) const CR4_PCE: u64 = 1 << 8;

/// Addresses of an RDPMC instruction that was emulated, and the time.
#[derive(Clone, Copy, Debug)]
pub(super) struct EmulatedRdpmc {
    /// Address of the RDPMC instruction.
    pub(super) address: u64,
    /// Address of the instruction after the RDPMC.
    pub(super) next_address: u64,
    pub(super) when: Instant,
}

/// The RDPMC that was emulated last, and whether the guest repeats it.
#[derive(Debug, Default)]
pub(super) struct LastRdpmc {
    /// RDPMC that was emulated last. `None` if the guest may have executed another instruction
    /// since.
    pub(super) read: Option<EmulatedRdpmc>,
    /// Number of PMIs in a row after which the guest had to repeat the RDPMC.
    pub(super) repeat_count: u32,
    /// `true` if the next RDPMC of the guest is a repetition after a PMI.
    redone: bool,
}

impl LastRdpmc {
    pub(super) fn now(&mut self, at: u64, behind: u64) {
        if !std::mem::take(&mut self.redone) {
            // This RDPMC is not a repetition after a PMI, so the guest has made progress.
            self.repeat_count = 0;
        }
        self.read = Some(EmulatedRdpmc {
            address: at,
            next_address: behind,
            when: Instant::now(),
        });
    }

    /// Returns `true` if a PMI may be delivered before the last RDPMC, which the guest then
    /// repeats. `in_a_row` is the number of consecutive PMIs that were delivered in this way. If it
    /// has reached [`MAX_REPEATED_READS`], returns `false`: the guest first makes progress, and the
    /// PMI is delivered before its next RDPMC.
    pub(super) fn may_repeat(&mut self, in_a_row: u32) -> bool {
        self.redone = in_a_row < MAX_REPEATED_READS;
        self.repeat_count = in_a_row + u32::from(self.redone);
        self.redone
    }

    /// Returns the last RDPMC for a snapshot, or `None` if the guest may have executed another
    /// instruction since.
    pub(super) fn saved(&self) -> Option<SavedRdpmc> {
        self.read.map(|read| SavedRdpmc {
            at: read.address,
            behind: read.next_address,
            repetitions: self.repeat_count,
        })
    }

    /// Sets the last RDPMC from a snapshot.
    pub(super) fn restored(saved: Option<SavedRdpmc>) -> Self {
        let mut last = Self::default();
        if let Some(SavedRdpmc {
            at,
            behind,
            repetitions,
        }) = saved
        {
            last.now(at, behind);
            last.repeat_count = repetitions;
        }
        last
    }

    /// Records that the guest may have executed another instruction since the last RDPMC.
    #[inline]
    pub(super) fn record_progress(&mut self) {
        self.read = None;
    }
}

/// State of RDPMC emulation on one vCPU.
pub struct RdpmcEmulator {
    pub(super) memory: GuestMemoryMmap,
    /// `true` if the kernel is Linux, whose addresses are in the upper half of the address space.
    linux: bool,
    /// Locations of the RDPMC instructions that were replaced by traps or have breakpoints.
    pub(super) sites: VcpuRdpmcSites,
    /// Interception of the guest's #GP handler, where RDPMC instructions that were not replaced are
    /// emulated.
    pub(super) gate: Option<GpHandlerInterception>,
    /// Replaces RDPMC in kernels that the guest itself starts. `None` if these kernels are left
    /// unchanged.
    pub(super) running: Option<Arc<RunningKernelPatcher>>,
    pub(super) kernel_check: KernelCheckBackoff,
}

impl RdpmcEmulator {
    /// Creates the state of a vCPU that has not run yet. `linux` states whether the kernel is
    /// Linux, whose addresses are in the upper half of the address space.
    pub fn new(memory: GuestMemoryMmap, linux: bool, sites: VcpuRdpmcSites) -> Self {
        Self {
            memory,
            linux,
            sites,
            gate: None,
            running: None,
            kernel_check: KernelCheckBackoff::default(),
        }
    }

    /// Emulates RDPMC instructions that were not replaced, by intercepting the guest's #GP handler.
    /// Not possible while the vCPU is single-stepped, because the stepper has its own traps at that
    /// handler.
    #[must_use]
    pub fn with_gate(mut self, gate: GpHandlerInterception) -> Self {
        self.gate = Some(gate);
        self
    }

    /// Replaces RDPMC also in kernels that the guest itself starts.
    #[must_use]
    pub fn with_running(mut self, running: Arc<RunningKernelPatcher>) -> Self {
        self.running = Some(running);
        self
    }

    /// Returns the replaced RDPMC that may have caused a write to the trap port, and the privilege
    /// state of the vCPU. Returns `None` if no replaced RDPMC matches.
    pub(super) fn site_at(
        &mut self,
        regs: &kvm_regs,
        fd: &VcpuFd,
    ) -> Result<Option<(TriggeredRdpmcSite, PrivilegeState)>, KvmIoctlError> {
        if self.linux
            && let Some(hit) = self.sites.in_kernel_half(regs.rip)
        {
            return Ok(Some((hit, PrivilegeState::KERNEL)));
        }
        if self.sites.is_empty() {
            return Ok(None);
        }
        let state = VcpuState {
            regs: *regs,
            sregs: fd.get_sregs()?,
        };
        let mut memory = LinearMemory::new(&self.memory, &state);
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
        Ok(hit.map(|hit| (hit, PrivilegeState::of(&state))))
    }

    /// Requests a check of the guest's kernel before the next entry, because the trap at the
    /// guest's #GP handler was removed.
    pub(super) fn check_kernel_now(&mut self) {
        self.kernel_check.due |= self.gate.is_some();
    }

    /// Records a write to a PMU register, after which a check of the guest's kernel may be due. A
    /// PMU driver writes such a register before it reads a counter, so the check comes in time.
    #[inline]
    pub(super) fn wrote(&mut self) {
        if self.gate.is_some() || self.running.is_some() {
            self.kernel_check.wrote();
            self.kernel_check.due |= self.gate.as_ref().is_some_and(GpHandlerInterception::has_changed);
        }
    }
}

/// Privilege level and CR4.PCE of the vCPU, which together decide whether RDPMC is permitted.
#[derive(Clone, Copy, Debug)]
pub(super) struct PrivilegeState {
    pub(super) cpl: u8,
    pub(super) pce: bool,
}

impl PrivilegeState {
    const KERNEL: Self = Self { cpl: 0, pce: true };

    pub(super) fn of(state: &VcpuState) -> Self {
        let cpl = state.cpl();
        Self {
            cpl,
            pce: cpl == 0 || state.sregs.cr4 & CR4_PCE != 0,
        }
    }
}

/// Schedule of the checks whether the guest's kernel has changed. Checks become less frequent while
/// it does not.
#[derive(Debug, Default)]
pub(super) struct KernelCheckBackoff {
    /// Number of writes to PMU registers since the kernel has changed. A check is due at each power
    /// of two.
    writes: u32,
    /// Number of writes to PMU registers since the last check.
    unseen: u32,
    /// Time of the last check, and the interval until the next one.
    last: Option<(Instant, Duration)>,
    pub(super) due: bool,
}

impl KernelCheckBackoff {
    #[inline]
    fn wrote(&mut self) {
        self.wrote_at(Instant::now());
    }

    fn wrote_at(&mut self, now: Instant) {
        self.writes = self.writes.saturating_add(1);
        self.unseen = self.unseen.saturating_add(1);
        self.due |= self.writes.is_power_of_two()
            || self.unseen >= MAX_WRITES
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
            Some((_, pause)) if !changed => (pause * 2).min(MAX_CHECK_INTERVAL),
            _ => MIN_CHECK_INTERVAL,
        };
        self.last = Some((now, pause));
        if changed {
            self.writes = 0;
        }
    }
}

/// The last NMI that was sent for a PMI, which may still be pending.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PendingNmi {
    /// `true` if an NMI was sent and the guest has not executed an RDPMC since.
    sent: bool,
    /// Number of NMIs in a row for which the guest had to repeat an RDPMC.
    in_a_row: u32,
}

impl PendingNmi {
    /// Records that an NMI is sent. Returns `true` if the guest has executed an RDPMC since the
    /// previous NMI.
    pub(super) fn now(&mut self) -> bool {
        !std::mem::replace(&mut self.sent, true)
    }

    /// Returns the fields `sent` and `in_a_row` for a snapshot.
    pub(super) fn saved(self) -> (bool, u32) {
        (self.sent, self.in_a_row)
    }

    /// Sets the fields that [`Self::saved`] has returned.
    pub(super) fn restored(sent: bool, in_a_row: u32) -> Self {
        Self { sent, in_a_row }
    }

    /// Called at an RDPMC. Returns the number of NMIs in a row for which an RDPMC was repeated, if
    /// the caller must check whether an NMI is still pending. Returns `None` if no NMI was sent
    /// since the last RDPMC, or if the number has reached its limit.
    pub(super) fn take_unseen(&mut self) -> Option<u32> {
        let Self { sent, in_a_row } = std::mem::take(self);
        (sent && in_a_row < MAX_REPEATED_READS).then_some(in_a_row)
    }

    /// Records that the guest must repeat an RDPMC, because an NMI was still pending. `before` is
    /// the number that [`Self::take_unseen`] has returned.
    pub(super) fn record_repetition(&mut self, before: u32) {
        self.in_a_row = before + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A guest that only reads counters and has an overflow at each exit makes progress and
    /// receives its PMIs.
    #[test]
    fn continuous_rdpmc_and_pmis_make_progress() {
        let mut last = LastRdpmc::default();
        let (mut done, mut pmis) = (0, 0);
        for _ in 0..1000 {
            last.now(0x1000, 0x1002);
            let in_a_row = std::mem::take(&mut last.repeat_count);
            if last.may_repeat(in_a_row) {
                pmis += 1;
                last.record_progress();
            } else {
                done += 1;
            }
        }
        assert!(done >= 50 && pmis >= 900, "{done} reads, {pmis} PMIs");
    }

    /// Returns how often the kernel is checked if the guest writes a PMU register every 100 µs for
    /// `time`.
    fn looks_in(looks: &mut KernelCheckBackoff, from: Instant, time: Duration) -> u32 {
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

    /// Checks become less frequent while the kernel does not change. A guest that is being profiled
    /// writes PMU registers all the time without changing its kernel.
    #[test]
    fn unchanged_kernel_check_backs_off() {
        let mut looks = KernelCheckBackoff::default();
        let start = Instant::now();
        let second = Duration::from_secs(1);
        // The interval between checks doubles up to 64 ms, which is about sixteen checks per
        // second.
        assert!(looks_in(&mut looks, start, 10 * second) < 200);
        let later = start + 20 * second;
        let many = looks_in(&mut looks, later, 10 * second);
        assert!((150..165).contains(&many), "{many} in 10 s");
    }

    /// A relocated IDT is found even if the guest writes PMU registers at a very high rate.
    #[test]
    fn kernel_is_checked_after_max_writes() {
        let mut looks = KernelCheckBackoff::default();
        let start = Instant::now();
        looks_in(&mut looks, start, Duration::from_secs(5));
        let now = start + Duration::from_secs(5);
        looks.looked_at(now, false);
        let written = (1..=MAX_WRITES).find(|_| {
            looks.wrote_at(now);
            looks.due
        });
        assert!(written.is_some());
    }

    /// After a change of the kernel, checks are frequent again, because the handler may change
    /// again.
    #[test]
    fn kernel_change_resets_back_off() {
        let mut looks = KernelCheckBackoff::default();
        let start = Instant::now();
        looks_in(&mut looks, start, Duration::from_secs(5));
        let now = start + Duration::from_secs(6);
        looks.wrote_at(now);
        assert!(looks.due);
        looks.looked_at(now, true);
        assert_eq!(looks.last, Some((now, MIN_CHECK_INTERVAL)));
        looks.wrote_at(now);
        assert!(looks.due, "the first write");
    }

    /// PMIs between which the guest completes an RDPMC do not count as being in a row, so each of
    /// them may cause a repetition.
    #[test]
    fn separated_pmis_each_repeat_rdpmc() {
        let mut last = LastRdpmc::default();
        for _ in 0..4 * MAX_REPEATED_READS {
            for _ in 0..3 {
                last.now(0x1000, 0x1002);
            }
            let in_a_row = std::mem::take(&mut last.repeat_count);
            assert!(last.may_repeat(in_a_row));
            last.record_progress();
            last.now(0x1000, 0x1002);
        }
    }

    /// After the maximum number of repetitions, [`LastRdpmc::may_repeat`] returns `false` until the
    /// guest has made progress, however often it is called.
    #[test]
    fn rdpmc_is_not_repeated_before_progress() {
        let mut last = LastRdpmc::default();
        last.now(0x1000, 0x1002);
        assert!(!last.may_repeat(MAX_REPEATED_READS));
        for _ in 0..3 {
            let in_a_row = std::mem::take(&mut last.repeat_count);
            assert!(!last.may_repeat(in_a_row));
        }
        last.now(0x1000, 0x1002);
        let in_a_row = std::mem::take(&mut last.repeat_count);
        assert!(last.may_repeat(in_a_row));
    }

    /// Only one RDPMC per NMI checks whether the NMI is pending. A guest with a continuous stream
    /// of NMIs makes progress.
    #[test]
    fn pending_nmi_is_checked_once() {
        let mut nmi = PendingNmi::default();
        assert_eq!(nmi.take_unseen(), None, "none was sent");
        assert!(nmi.now());
        assert!(!nmi.now(), "no RDPMC came between");
        assert_eq!(nmi.take_unseen(), Some(0));
        assert_eq!(nmi.take_unseen(), None, "it was looked for");
        for before in 0..MAX_REPEATED_READS {
            nmi.now();
            assert_eq!(nmi.take_unseen(), Some(before));
            nmi.record_repetition(before);
        }
        nmi.now();
        assert_eq!(nmi.take_unseen(), None, "the guest goes on");
        nmi.now();
        assert_eq!(nmi.take_unseen(), Some(0));
    }
}
