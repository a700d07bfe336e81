//! Exits to user space by what they are for: how many, and how long Perfvisor took over them.
//!
//! Counted only while somebody watches ([`ExitTable::watch`]): then an exit costs two readings of the clock,
//! else one look at a flag. The time of an exit is that from the return of KVM_RUN to the next KVM_RUN. What
//! the host's kernel does on both ways is not in it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::kick;
use crate::kvm::armed::VcpuExit;
use crate::kvm::call::CallError;
use kernel_images::rdpmc::TRAP_PORT;

/// Defines what exits are for: variant, and its name in the control protocol.
macro_rules! reasons {
    ($($(#[$doc:meta])* $reason:ident: $name:literal,)+) => {
        /// What an exit to user space is for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum ExitReason {
            $($(#[$doc])* $reason,)+
        }

        impl ExitReason {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$reason,)+];

            /// Its name in the control protocol.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$reason => $name,)+
                }
            }
        }
    };
}

reasons! {
    /// The guest read a PMU register.
    Rdmsr: "rdmsr",
    /// The guest wrote a PMU register.
    Wrmsr: "wrmsr",
    /// The guest wrote to the port that stands for RDPMC.
    Rdpmc: "rdpmc",
    /// The guest read a port of a device.
    PortRead: "port_read",
    /// The guest wrote a port of a device.
    PortWrite: "port_write",
    /// The guest read memory of a device.
    MmioRead: "mmio_read",
    /// The guest wrote memory of a device.
    MmioWrite: "mmio_write",
    /// A breakpoint or a single step: RDPMC, exact counting or a debugger.
    Debug: "debug",
    /// A halt that KVM does not wait for itself.
    Halt: "halt",
    /// An event overflowed: a sample is taken, or the guest's counter has to interrupt it.
    Overflow: "overflow",
    /// Perfvisor asked for the vCPU, or another signal came.
    Kick: "kick",
    /// KVM's emulator lacks an instruction.
    Emulation: "emulation",
    /// Anything else: the end of the guest, and failures.
    Other: "other",
}

impl ExitReason {
    /// Of an exit with this result. After a signal, [`kick::overflow_waits`] must know of it.
    fn of(why: &Result<VcpuExit<'_>, CallError>, has_pmu: bool) -> Self {
        let signal = || {
            if kick::overflow_waits() {
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

/// Exits of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExitCount {
    /// How many there were.
    pub count: u64,
    /// How many of them were timed: not one within which the VM was paused, nor one that is being served.
    pub timed: u64,
    /// How long those took together, in ns.
    pub time_ns: u64,
    /// The longest of them, in ns.
    pub longest_ns: u64,
}

#[derive(Debug, Default)]
struct Cell {
    count: AtomicU64,
    timed: AtomicU64,
    time_ns: AtomicU64,
    longest_ns: AtomicU64,
}

/// The exits of one vCPU while somebody watched. Its thread alone adds to it, any may read.
#[derive(Debug)]
pub struct ExitTable {
    watchers: AtomicU32,
    cells: Vec<Cell>,
}

impl Default for ExitTable {
    fn default() -> Self {
        Self {
            watchers: AtomicU32::new(0),
            cells: ExitReason::ALL.iter().map(|_| Cell::default()).collect(),
        }
    }
}

impl ExitTable {
    /// One more watches: exits are counted from now on.
    pub fn watch(&self) {
        self.watchers.fetch_add(1, Ordering::Relaxed);
    }

    /// One that [`ExitTable::watch`] was called for does not watch any more.
    pub fn unwatch(&self) {
        self.watchers.fetch_sub(1, Ordering::Relaxed);
    }

    /// Whether anybody watches.
    #[inline]
    pub fn is_watched(&self) -> bool {
        self.watchers.load(Ordering::Relaxed) > 0
    }

    /// What was counted so far, in the order of [`ExitReason::ALL`]; the longest of each since this was
    /// called last.
    pub fn take(&self) -> Vec<ExitCount> {
        let taken = |cell: &Cell| {
            // Timed exits first: each of them is in the count that is read behind it.
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

    fn left(&self, reason: ExitReason) {
        add(&self.cells[reason as usize].count, 1, Ordering::Relaxed);
    }

    fn served(&self, reason: ExitReason, took: Duration) {
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
impl ExitTable {
    /// An exit that took so long.
    pub(crate) fn exit_for_tests(&self, reason: ExitReason, took_ns: u64) {
        self.left(reason);
        self.served(reason, Duration::from_nanos(took_ns));
    }
}

/// Adds to a number with one writer: no locked instruction.
fn add(number: &AtomicU64, n: u64, order: Ordering) {
    number.store(number.load(Ordering::Relaxed).wrapping_add(n), order);
}

/// The exit that a vCPU's thread serves, if it is watched.
#[derive(Debug)]
pub(super) struct ExitClock {
    table: Arc<ExitTable>,
    open: Option<(ExitReason, Instant)>,
}

impl ExitClock {
    /// For the thread that alone adds to `table`.
    pub(super) fn new(table: Arc<ExitTable>) -> Self {
        Self { table, open: None }
    }

    /// KVM_RUN has returned.
    #[inline]
    pub(super) fn left(&mut self, why: &Result<VcpuExit<'_>, CallError>, has_pmu: bool) {
        if self.table.is_watched() {
            let now = Instant::now();
            let reason = ExitReason::of(why, has_pmu);
            self.table.left(reason);
            self.open = Some((reason, now));
        }
    }

    /// KVM_RUN is about to be called again.
    #[inline]
    pub(super) fn goes_on(&mut self) {
        if let Some((reason, since)) = self.open.take() {
            self.table.served(reason, since.elapsed());
        }
    }

    /// The vCPU waits for something else than its exit, which is not timed.
    pub(super) fn forget(&mut self) {
        self.open = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    type Why<'a> = Result<VcpuExit<'a>, CallError>;

    fn count(table: &ExitTable, reason: ExitReason) -> ExitCount {
        table.take()[reason as usize]
    }

    /// What nobody watches is not counted, and an exit is timed when the guest goes on.
    #[test]
    fn exits_are_counted_and_timed_while_watched() {
        let table = Arc::new(ExitTable::default());
        let mut clock = ExitClock::new(table.clone());
        let read: Why<'_> = Ok(VcpuExit::MmioRead(0, &mut []));
        clock.left(&read, true);
        clock.goes_on();
        assert_eq!(count(&table, ExitReason::MmioRead), ExitCount::default());
        table.watch();
        clock.left(&read, true);
        let open = count(&table, ExitReason::MmioRead);
        assert_eq!((open.count, open.timed), (1, 0));
        std::thread::sleep(Duration::from_millis(2));
        clock.goes_on();
        let served = count(&table, ExitReason::MmioRead);
        assert_eq!((served.count, served.timed), (1, 1));
        assert!(served.time_ns >= 2_000_000 && served.longest_ns == served.time_ns);
        // The longest is that since the last look.
        assert_eq!(count(&table, ExitReason::MmioRead).longest_ns, 0);
        clock.left(&read, true);
        clock.forget();
        clock.goes_on();
        let paused = count(&table, ExitReason::MmioRead);
        assert_eq!((paused.count, paused.timed), (2, 1));
        table.unwatch();
        clock.left(&read, true);
        assert_eq!(count(&table, ExitReason::MmioRead).count, 2);
    }

    #[test]
    fn exits_are_told_apart() {
        let of = |why: Why<'_>, has_pmu| ExitReason::of(&why, has_pmu);
        assert_eq!(of(Ok(VcpuExit::IoOut(TRAP_PORT, &[0])), true), ExitReason::Rdpmc);
        assert_eq!(
            of(Ok(VcpuExit::IoOut(TRAP_PORT, &[0])), false),
            ExitReason::PortWrite
        );
        assert_eq!(
            of(Ok(VcpuExit::IoOut(TRAP_PORT, &[0, 0])), true),
            ExitReason::PortWrite
        );
        assert_eq!(of(Ok(VcpuExit::IoIn(1, &mut [])), true), ExitReason::PortRead);
        assert_eq!(of(Ok(VcpuExit::Shutdown), true), ExitReason::Other);
        let error = |number| Err(CallError::with_errno("KVM_RUN", number));
        assert_eq!(of(error(libc::EINTR), true), ExitReason::Kick);
        assert_eq!(of(error(libc::EAGAIN), true), ExitReason::Other);
        let names: std::collections::BTreeSet<_> = ExitReason::ALL.iter().map(|r| r.name()).collect();
        assert_eq!(names.len(), ExitReason::ALL.len());
    }
}
