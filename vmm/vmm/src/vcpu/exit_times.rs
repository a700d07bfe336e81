//! Counts the exits to user space and measures their duration, by exit reason.
//!
//! Exits are counted only while somebody watches them ([`VcpuExitStatistics::watch`]). A watched
//! exit costs two clock reads, an unwatched one a check of a flag. The duration is the time from
//! the return of KVM_RUN to the next call of KVM_RUN. Time in the host kernel before and after is
//! not included.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::kick;
use crate::kvm::call::KvmIoctlError;
use crate::kvm::kickable_vcpu::VcpuExit;
use guest_patching::finder::TRAP_PORT;

/// Defines [`VcpuExitReason`] from a list of variants, each with its name in the control protocol.
macro_rules! reasons {
    ($($(#[$doc:meta])* $reason:ident: $name:literal,)+) => {
        /// Reason for an exit to user space.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum VcpuExitReason {
            $($(#[$doc])* $reason,)+
        }

        impl VcpuExitReason {
            /// All exit reasons, in the order in which they are reported.
            pub const ALL: &'static [Self] = &[$(Self::$reason,)+];

            /// Returns the name in the control protocol.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$reason => $name,)+
                }
            }
        }
    };
}

reasons! {
    /// Read from a PMU register.
    Rdmsr: "rdmsr",
    /// Write to a PMU register.
    Wrmsr: "wrmsr",
    /// Write to the trap port, usually by a replaced RDPMC.
    Rdpmc: "rdpmc",
    /// Read from a device port.
    PortRead: "port_read",
    /// Write to a device port.
    PortWrite: "port_write",
    /// MMIO read from a device.
    MmioRead: "mmio_read",
    /// MMIO write to a device.
    MmioWrite: "mmio_write",
    /// Debug exit at a breakpoint or after a single step, for RDPMC emulation, the exact backing or
    /// a debugger.
    Debug: "debug",
    /// Halt that KVM does not handle itself.
    Halt: "halt",
    /// Overflow signal of a host event, for a sample or a PMI.
    Overflow: "overflow",
    /// Kick by Perfvisor, or another signal.
    Kick: "kick",
    /// Instruction that KVM's emulator does not support.
    Emulation: "emulation",
    /// Any other exit, including shutdown and failures.
    Other: "other",
}

impl VcpuExitReason {
    /// Returns the reason for an exit, given the result `why` of KVM_RUN. If a signal ended
    /// KVM_RUN, the caller must have updated [`kick::is_overflow_pending`].
    fn of(why: &Result<VcpuExit<'_>, KvmIoctlError>, has_pmu: bool) -> Self {
        let signal = || {
            if kick::is_overflow_pending() {
                Self::Overflow
            } else {
                Self::Kick
            }
        };
        match why {
            Ok(VcpuExit::X86Rdmsr(_)) => Self::Rdmsr,
            Ok(VcpuExit::X86Wrmsr(_)) => Self::Wrmsr,
            Ok(VcpuExit::IoOut(TRAP_PORT, [_])) if has_pmu => Self::Rdpmc,
            Ok(VcpuExit::IoOut(..)) => Self::PortWrite,
            Ok(VcpuExit::IoIn(..)) => Self::PortRead,
            Ok(VcpuExit::MmioRead(..)) => Self::MmioRead,
            Ok(VcpuExit::MmioWrite(..)) => Self::MmioWrite,
            Ok(VcpuExit::Debug(_)) => Self::Debug,
            Ok(VcpuExit::Hlt) => Self::Halt,
            Ok(VcpuExit::Intr) => signal(),
            Ok(VcpuExit::InternalError) => Self::Emulation,
            Err(e) if e.errno() == libc::EINTR => signal(),
            _ => Self::Other,
        }
    }
}

/// Number and duration of the exits for one reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExitCount {
    /// Number of exits for this reason.
    pub count: u64,
    /// Number of exits whose duration is known. Exits that a pause interrupted and the exit in
    /// progress are not included.
    pub timed: u64,
    /// Total duration of the `timed` exits, in nanoseconds.
    pub time_ns: u64,
    /// Longest duration of a `timed` exit, in nanoseconds.
    pub longest_ns: u64,
}

#[derive(Debug, Default)]
struct ExitCell {
    count: AtomicU64,
    timed: AtomicU64,
    time_ns: AtomicU64,
    longest_ns: AtomicU64,
}

/// Exit statistics of one vCPU. Written only by the vCPU thread, readable by any thread.
#[derive(Debug)]
pub struct VcpuExitStatistics {
    watchers: AtomicU32,
    cells: Vec<ExitCell>,
}

impl Default for VcpuExitStatistics {
    fn default() -> Self {
        Self {
            watchers: AtomicU32::new(0),
            cells: VcpuExitReason::ALL.iter().map(|_| ExitCell::default()).collect(),
        }
    }
}

impl VcpuExitStatistics {
    /// Registers a watcher. Exits are counted while there is at least one.
    pub fn watch(&self) {
        self.watchers.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes a watcher registered by [`VcpuExitStatistics::watch`].
    pub fn unwatch(&self) {
        self.watchers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Returns `true` if any watcher is registered.
    #[inline]
    pub fn is_watched(&self) -> bool {
        self.watchers.load(Ordering::Relaxed) > 0
    }

    /// Returns the counts for each reason of [`VcpuExitReason::ALL`], and resets the longest
    /// durations.
    pub fn take(&self) -> Vec<ExitCount> {
        let taken = |cell: &ExitCell| {
            // Timed exits are read first, so that each of them is included in the total read
            // afterwards.
            let timed = cell.timed.load(Ordering::Acquire);
            ExitCount {
                timed,
                time_ns: cell.time_ns.load(Ordering::Relaxed),
                longest_ns: cell.longest_ns.swap(0, Ordering::Relaxed),
                count: cell.count.load(Ordering::Relaxed),
            }
        };
        self.cells.iter().map(taken).collect()
    }

    fn left(&self, reason: VcpuExitReason) {
        add(&self.cells[reason as usize].count, 1, Ordering::Relaxed);
    }

    fn served(&self, reason: VcpuExitReason, took: Duration) {
        let ns = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let cell = &self.cells[reason as usize];
        add(&cell.time_ns, ns, Ordering::Relaxed);
        if ns > cell.longest_ns.load(Ordering::Relaxed) {
            cell.longest_ns.store(ns, Ordering::Relaxed);
        }
        add(&cell.timed, 1, Ordering::Release);
    }
}

#[cfg(test)]
impl VcpuExitStatistics {
    /// Records an exit of duration `took_ns`, for tests.
    pub(crate) fn exit_for_tests(&self, reason: VcpuExitReason, took_ns: u64) {
        self.left(reason);
        self.served(reason, Duration::from_nanos(took_ns));
    }
}

/// Adds `n` to `number`, which only one thread writes, with a load and a store instead of a locked
/// instruction.
fn add(number: &AtomicU64, n: u64, order: Ordering) {
    number.store(number.load(Ordering::Relaxed).wrapping_add(n), order);
}

/// Timer for the current exit of a vCPU. Does nothing while exits are not watched.
#[derive(Debug)]
pub(super) struct ExitClock {
    table: Arc<VcpuExitStatistics>,
    open: Option<(VcpuExitReason, Instant)>,
}

impl ExitClock {
    /// Creates the timer of a vCPU thread. Only this thread may write to `table`.
    pub(super) fn new(table: Arc<VcpuExitStatistics>) -> Self {
        Self { table, open: None }
    }

    /// Starts the timer, because KVM_RUN has returned.
    #[inline]
    pub(super) fn record_exit(&mut self, why: &Result<VcpuExit<'_>, KvmIoctlError>, has_pmu: bool) {
        if self.table.is_watched() {
            let now = Instant::now();
            let reason = VcpuExitReason::of(why, has_pmu);
            self.table.left(reason);
            self.open = Some((reason, now));
        }
    }

    /// Stops the timer and records the exit, because KVM_RUN is about to be called.
    #[inline]
    pub(super) fn end_exit(&mut self) {
        if let Some((reason, since)) = self.open.take() {
            self.table.served(reason, since.elapsed());
        }
    }

    /// Stops the timer without recording a duration. Called when the vCPU begins to wait for
    /// something that is not part of the exit, such as the end of a pause.
    pub(super) fn discard_exit(&mut self) {
        self.open = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Why<'a> = Result<VcpuExit<'a>, KvmIoctlError>;

    fn count(table: &VcpuExitStatistics, reason: VcpuExitReason) -> ExitCount {
        table.take()[reason as usize]
    }

    /// Exits are not counted while nobody watches them. The duration of a watched exit is known
    /// when the guest is entered again.
    #[test]
    fn exits_are_counted_and_timed_while_watched() {
        let table = Arc::new(VcpuExitStatistics::default());
        let mut clock = ExitClock::new(table.clone());
        let read: Why<'_> = Ok(VcpuExit::MmioRead(0, &mut []));
        clock.record_exit(&read, true);
        clock.end_exit();
        assert_eq!(count(&table, VcpuExitReason::MmioRead), ExitCount::default());
        table.watch();
        clock.record_exit(&read, true);
        let open = count(&table, VcpuExitReason::MmioRead);
        assert_eq!((open.count, open.timed), (1, 0));
        std::thread::sleep(Duration::from_millis(2));
        clock.end_exit();
        let served = count(&table, VcpuExitReason::MmioRead);
        assert_eq!((served.count, served.timed), (1, 1));
        assert!(served.time_ns >= 2_000_000 && served.longest_ns == served.time_ns);
        // The longest duration covers only the time since the previous `take`.
        assert_eq!(count(&table, VcpuExitReason::MmioRead).longest_ns, 0);
        clock.record_exit(&read, true);
        clock.discard_exit();
        clock.end_exit();
        let paused = count(&table, VcpuExitReason::MmioRead);
        assert_eq!((paused.count, paused.timed), (2, 1));
        table.unwatch();
        clock.record_exit(&read, true);
        assert_eq!(count(&table, VcpuExitReason::MmioRead).count, 2);
    }

    #[test]
    fn exit_reasons_are_distinguished() {
        let of = |why: Why<'_>, has_pmu| VcpuExitReason::of(&why, has_pmu);
        assert_eq!(
            of(Ok(VcpuExit::IoOut(TRAP_PORT, &[0])), true),
            VcpuExitReason::Rdpmc
        );
        assert_eq!(
            of(Ok(VcpuExit::IoOut(TRAP_PORT, &[0])), false),
            VcpuExitReason::PortWrite
        );
        assert_eq!(
            of(Ok(VcpuExit::IoOut(TRAP_PORT, &[0, 0])), true),
            VcpuExitReason::PortWrite
        );
        assert_eq!(of(Ok(VcpuExit::IoIn(1, &mut [])), true), VcpuExitReason::PortRead);
        assert_eq!(of(Ok(VcpuExit::Shutdown), true), VcpuExitReason::Other);
        let error = |number| Err(KvmIoctlError::with_errno("KVM_RUN", number));
        assert_eq!(of(error(libc::EINTR), true), VcpuExitReason::Kick);
        assert_eq!(of(error(libc::EAGAIN), true), VcpuExitReason::Other);
        let names: std::collections::BTreeSet<_> = VcpuExitReason::ALL.iter().map(|r| r.name()).collect();
        assert_eq!(names.len(), VcpuExitReason::ALL.len());
    }
}
