//! [`VcpuClock`]: how long a vCPU has run its guest.
//!
//! The clock advances with the CPU time of the vCPU's thread, but only between [`VcpuClock::guest_enter`] and
//! [`VcpuClock::guest_exit`]. Time the VMM spends in its own code is outside that bracket. Time the vCPU is
//! halted or descheduled is inside it, but uses no CPU time. What is left is guest time, plus the kernel's
//! work for it in `KVM_RUN`.
//!
//! # Who writes what
//! The vCPU's thread is the only writer of `epoch`, `base` and `closed`. Any thread may read the clock while
//! the guest runs: a sequence lock tells it when it must look again. The first user of a clock that was
//! unused may come while the guest runs already, on another thread. It then supplies the missing start of
//! that interval itself (`late`).
#![expect(unsafe_code, reason = "system calls, and memory shared with the kernel")]

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, compiler_fence, fence};
use std::sync::{Mutex, Once};

use super::alarm::{Alarm, Now, Place};
use super::cpl::{CplSplit, Level};
use super::timer::{clock_ns, wall_ns};
use crate::pmu::host::fd::current_tid;

/// How often a reader looks again before it settles for the closed intervals.
const READ_TRIES: usize = 64;

/// Up to this long after an exit, ns, the thread's time at the next entry is that at the exit and the time on
/// the wall since: reading the thread's time is a system call, and both at every exit were two. Whoever takes
/// the thread's CPU for a moment in between is then counted as the VMM, so a count is never too high by it,
/// and too low by less than this each time. A sample with a call chain is taken in this time, also where the
/// host is emulated.
const SHORT_EXIT_NS: u64 = 100_000;

/// The run time of one vCPU's guest.
///
/// Made once per vCPU, with the id of the thread that runs it, and shared (`Arc`) between that thread, which
/// brackets `KVM_RUN`, and the [`super::ClockPmu`], whose events read it.
#[derive(Debug)]
pub struct VcpuClock {
    tid: i32,
    tsc_khz: u32,
    /// Started events that read this clock. While 0, the bracket does nothing but move `epoch`.
    users: AtomicU32,
    /// Odd: in the guest. One step at every enter and exit.
    epoch: AtomicU64,
    /// Sequence lock of `base_*`, `closed_ns` and the exits that change them; odd while they change.
    seq: AtomicU32,
    /// Guest time of all finished intervals, ns.
    closed_ns: AtomicU64,
    /// Thread time at the start of the interval `base_epoch`.
    base_ns: AtomicU64,
    base_epoch: AtomicU64,
    /// Thread time at the last counted exit, and the time on the wall right after it was read. Only the
    /// vCPU's thread looks at them.
    left_ns: AtomicU64,
    left_at_ns: AtomicU64,
    /// As `base_*`, supplied by another thread for an interval that began while the clock had no user.
    late_ns: AtomicU64,
    late_epoch: AtomicU64,
    /// Serialises those other threads.
    late_lock: Mutex<()>,
    /// Attribution of guest time to privilege levels. Only touched while an event asks for one level.
    cpl: Mutex<CplSplit>,
    /// Whether the vCPU thread is to report its privilege level at kicks.
    wants_ticks: AtomicBool,
    /// Announces overflows of all events.
    alarm: Mutex<Alarm>,
    /// The alarm is to be brought in line with what is armed before the guest is entered.
    alarm_is_stale: AtomicBool,
    /// The alarm's timer may ring.
    alarm_is_set: AtomicBool,
}

impl VcpuClock {
    /// A clock for the vCPU that thread `tid` of this process runs, on a guest whose TSC runs at `tsc_khz`.
    #[must_use]
    pub fn new(tid: i32, tsc_khz: u32) -> Self {
        Self {
            tid,
            tsc_khz,
            users: AtomicU32::new(0),
            epoch: AtomicU64::new(0),
            seq: AtomicU32::new(0),
            closed_ns: AtomicU64::new(0),
            base_ns: AtomicU64::new(0),
            base_epoch: AtomicU64::new(0),
            left_ns: AtomicU64::new(0),
            left_at_ns: AtomicU64::new(0),
            late_ns: AtomicU64::new(0),
            late_epoch: AtomicU64::new(0),
            late_lock: Mutex::new(()),
            cpl: Mutex::new(CplSplit::new(tid)),
            wants_ticks: AtomicBool::new(false),
            alarm: Mutex::new(Alarm::default()),
            alarm_is_stale: AtomicBool::new(false),
            alarm_is_set: AtomicBool::new(false),
        }
    }

    /// A clock for a vCPU that the calling thread runs.
    #[must_use]
    pub fn for_current_thread(tsc_khz: u32) -> Self {
        Self::new(current_tid(), tsc_khz)
    }

    /// The thread whose CPU time this clock follows.
    #[must_use]
    pub fn tid(&self) -> i32 {
        self.tid
    }

    /// Frequency of the guest's TSC, kHz: cycles per millisecond of guest time.
    #[must_use]
    pub fn tsc_khz(&self) -> u32 {
        self.tsc_khz
    }

    /// The vCPU's thread is about to call `KVM_RUN`.
    ///
    /// With no clock event on this is a load and a store on a line of the thread's own and a load of a flag:
    /// no system call and no fence.
    #[inline]
    pub fn guest_enter(&self) {
        let epoch = self.epoch.load(Ordering::Relaxed) | 1;
        self.epoch.store(epoch, Ordering::Relaxed);
        // The other side of this (`add_user`) raises `users`, makes every thread of the process pass a
        // barrier and only then looks at `epoch`. So either it sees this store, or the load below sees its
        // user. The compiler must keep the two in order; the processor is made to by that barrier.
        compiler_fence(Ordering::SeqCst);
        if self.users.load(Ordering::Relaxed) != 0 {
            self.enter_counted(epoch);
        }
    }

    /// The vCPU's thread is back from `KVM_RUN`. Same cost as [`VcpuClock::guest_enter`]; with a clock event
    /// on, one system call, and another at the next entry if that is later than 100 µs.
    #[inline]
    pub fn guest_exit(&self) {
        let epoch = self.epoch.load(Ordering::Relaxed);
        if epoch & 1 == 0 {
            return;
        }
        if self.users.load(Ordering::Relaxed) != 0 {
            self.exit_counted(epoch);
        } else {
            self.epoch.store(epoch + 1, Ordering::Relaxed);
        }
    }

    #[cold]
    fn enter_counted(&self, epoch: u64) {
        let wall_ns = wall_ns();
        let out_ns = wall_ns.saturating_sub(self.left_at_ns.load(Ordering::Relaxed));
        let now = if out_ns < SHORT_EXIT_NS {
            self.left_ns.load(Ordering::Relaxed) + out_ns
        } else {
            self.thread_ns()
        };
        self.write(|| {
            self.base_ns.store(now, Ordering::Relaxed);
            self.base_epoch.store(epoch, Ordering::Relaxed);
        });
        if self.alarm_is_stale.load(Ordering::Relaxed) {
            self.set_alarm(Now {
                wall_ns,
                guest_ns: self.closed_ns.load(Ordering::Relaxed),
            });
        }
    }

    #[cold]
    fn exit_counted(&self, epoch: u64) {
        let now = self.thread_ns();
        self.left_ns.store(now, Ordering::Relaxed);
        self.left_at_ns.store(wall_ns(), Ordering::Relaxed);
        let ran = self
            .interval_start(epoch)
            .map_or(0, |start| now.saturating_sub(start));
        self.write(|| {
            let closed = self.closed_ns.load(Ordering::Relaxed);
            self.closed_ns.store(closed + ran, Ordering::Relaxed);
            // Inside the sequence lock, so that no reader adds the interval twice.
            self.epoch.store(epoch + 1, Ordering::Relaxed);
        });
    }

    /// Runs `change` as the writer of the sequence lock. Only the vCPU's thread does.
    fn write(&self, change: impl FnOnce()) {
        let seq = self.seq.load(Ordering::Relaxed);
        self.seq.store(seq.wrapping_add(1), Ordering::Relaxed);
        // Keeps the stores of `change` after the odd value; pairs with the acquire fence in `guest_ns`.
        fence(Ordering::Release);
        change();
        self.seq.store(seq.wrapping_add(2), Ordering::Release);
    }

    /// Thread time at which the interval `epoch` began, if anyone noted it.
    fn interval_start(&self, epoch: u64) -> Option<u64> {
        if self.base_epoch.load(Ordering::Relaxed) == epoch {
            Some(self.base_ns.load(Ordering::Relaxed))
        } else if self.late_epoch.load(Ordering::Acquire) == epoch {
            Some(self.late_ns.load(Ordering::Relaxed))
        } else {
            None
        }
    }

    /// Guest time so far, ns, from any thread. Counts only while the clock has a user, so only differences
    /// between two readings taken while the same event was on mean anything.
    ///
    /// One system call when the guest runs now, none otherwise.
    pub(crate) fn guest_ns(&self) -> u64 {
        for _ in 0..READ_TRIES {
            let seq = self.seq.load(Ordering::Acquire);
            if seq & 1 == 1 {
                std::hint::spin_loop();
                continue;
            }
            let closed = self.closed_ns.load(Ordering::Relaxed);
            let epoch = self.epoch.load(Ordering::Relaxed);
            let start = if epoch & 1 == 1 {
                self.interval_start(epoch)
            } else {
                None
            };
            // The thread's time must be taken before the check: later, the interval may be over and the
            // thread be in the VMM's own code.
            let running = start.map_or(0, |start| self.thread_ns().saturating_sub(start));
            // Pairs with the release fence in `write`.
            fence(Ordering::Acquire);
            if self.seq.load(Ordering::Relaxed) == seq {
                return closed + running;
            }
        }
        // The vCPU keeps entering and leaving. Its finished intervals are a true lower bound.
        self.closed_ns.load(Ordering::Relaxed)
    }

    /// Announces an event that reads the clock from now on.
    pub(crate) fn add_user(&self) {
        // On the vCPU's own thread no interval can be open, and its own next load sees the new value.
        if current_tid() == self.tid {
            self.users.fetch_add(1, Ordering::SeqCst);
            return;
        }
        let _one = self
            .late_lock
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if self.users.fetch_add(1, Ordering::SeqCst) != 0 {
            return;
        }
        barrier_on_all_threads();
        let epoch = self.epoch.load(Ordering::SeqCst);
        if epoch & 1 == 1 && self.interval_start(epoch).is_none() {
            self.late_ns.store(self.thread_ns(), Ordering::Relaxed);
            self.late_epoch.store(epoch, Ordering::Release);
        }
    }

    /// Takes back [`VcpuClock::add_user`].
    pub(crate) fn remove_user(&self) {
        self.users.fetch_sub(1, Ordering::SeqCst);
    }

    /// CPU time of the vCPU's thread, ns; 0 once the thread is gone.
    pub(crate) fn thread_ns(&self) -> u64 {
        let id = if current_tid() == self.tid {
            libc::CLOCK_THREAD_CPUTIME_ID
        } else {
            // The kernel's encoding of "scheduler time of this thread": see clock_getcpuclockid(3) and
            // CPUCLOCK_PERTHREAD | CPUCLOCK_SCHED in the kernel's posix-timers.
            (!self.tid << 3) | 6
        };
        clock_ns(id)
    }

    /// An event that wants one privilege level starts.
    pub(super) fn start_levels(&self, signal: Option<i32>) -> std::io::Result<()> {
        self.add_user();
        let now = self.guest_ns();
        let mut split = self.cpl_split();
        let started = split.start(signal, now);
        self.set_wants_ticks(split.by_kicks());
        if started.is_err() {
            self.remove_user();
        }
        started
    }

    /// Takes back [`VcpuClock::start_levels`].
    pub(super) fn stop_levels(&self) {
        let now = self.guest_ns();
        let mut split = self.cpl_split();
        split.stop(now);
        self.set_wants_ticks(split.by_kicks());
        drop(split);
        self.remove_user();
    }

    /// Guest time attributed to `level`, ns.
    pub(super) fn level_ns(&self, level: Level) -> u64 {
        let now = self.guest_ns();
        let mut split = self.cpl_split();
        let ns = split.read(level, now);
        self.set_wants_ticks(split.by_kicks());
        ns
    }

    /// A place in the alarm, which sends `signal` to the vCPU's thread.
    pub(super) fn join_alarm(&self, signal: i32) -> std::io::Result<Place> {
        self.alarm().add(self.tid, signal)
    }

    /// Takes back [`VcpuClock::join_alarm`].
    pub(super) fn leave_alarm(&self, place: Place) {
        self.alarm().remove(place);
    }

    /// Has the alarm ring when the guest has run for `wait_ns` from now. On the vCPU's own thread, which is
    /// out of the guest, it is set when the guest is entered; another thread sets it at once.
    pub(super) fn arm_alarm(&self, place: Place, wait_ns: u64) -> std::io::Result<()> {
        let guest_ns = self.guest_ns();
        let mut alarm = self.alarm();
        alarm.arm(place, guest_ns.saturating_add(wait_ns));
        if current_tid() == self.tid && self.epoch.load(Ordering::Relaxed) & 1 == 0 {
            self.alarm_is_stale.store(true, Ordering::Relaxed);
            return Ok(());
        }
        let set = alarm.at_entry(Now {
            wall_ns: wall_ns(),
            guest_ns,
        });
        self.alarm_is_set.store(alarm.is_set(), Ordering::Relaxed);
        set
    }

    /// Takes back [`VcpuClock::arm_alarm`]. No system call.
    pub(super) fn disarm_alarm(&self, place: Place) {
        self.alarm().disarm(place);
    }

    /// Whether the alarm has rung for `place`, which has not overflowed yet.
    pub(super) fn alarm_rang_for(&self, place: Place) -> bool {
        let alarm = self.alarm();
        if !alarm.has_rung(wall_ns()) {
            return false;
        }
        // It rings for the others from now on.
        self.alarm_is_stale.store(true, Ordering::Relaxed);
        alarm.was_for(place)
    }

    /// The guest is entered next.
    fn set_alarm(&self, now: Now) {
        self.alarm_is_stale.store(false, Ordering::Relaxed);
        let mut alarm = self.alarm();
        if let Err(e) = alarm.at_entry(now) {
            log::warn!("an overflow timer could not be set: {}", crate::error_line(&e));
        }
        self.alarm_is_set.store(alarm.is_set(), Ordering::Relaxed);
    }

    /// The vCPU's thread had an overflow signal: if it was the alarm's and no event waits for one any more,
    /// the alarm is stopped. To be called at each overflow signal; who does not is sent sixteen signals a
    /// second in vain once the last armed event has gone.
    #[inline]
    pub fn after_signal(&self) {
        if self.alarm_is_set.load(Ordering::Relaxed) {
            let mut alarm = self.alarm();
            alarm.after_signal();
            self.alarm_is_set.store(alarm.is_set(), Ordering::Relaxed);
        }
    }

    /// The vCPU does not run for a while, and no event is on: the alarm does not ring meanwhile.
    pub fn rest(&self) {
        if self.alarm_is_set.swap(false, Ordering::Relaxed) {
            self.alarm_is_stale.store(true, Ordering::Relaxed);
            self.alarm().stop();
        }
    }

    /// The vCPU's thread is about to end: nothing of this clock rings any more.
    pub(super) fn end(&self) {
        self.alarm_is_set.store(false, Ordering::Relaxed);
        self.alarm().end();
    }

    fn alarm(&self) -> std::sync::MutexGuard<'_, Alarm> {
        self.alarm
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(super) fn cpl_split(&self) -> std::sync::MutexGuard<'_, CplSplit> {
        self.cpl.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Whether the vCPU's thread should call [`VcpuClock::tick`] after each kick: some event wants one
    /// privilege level, and the host's kernel does not report it by itself.
    #[inline]
    #[must_use]
    pub fn wants_ticks(&self) -> bool {
        self.wants_ticks.load(Ordering::Relaxed)
    }

    /// Whether [`VcpuClock::tick`] would look at the level now: its timer has rung. No system call.
    #[inline]
    #[must_use]
    pub fn tick_is_due(&self) -> bool {
        self.wants_ticks() && self.cpl_split().tick_is_due()
    }

    fn set_wants_ticks(&self, wanted: bool) {
        self.wants_ticks.store(wanted, Ordering::Relaxed);
    }

    /// The vCPU's thread was kicked out of the guest and saw it at privilege level `cpl` (0 to 3), or halted:
    /// `None`.
    ///
    /// To be called at every overflow signal while [`VcpuClock::wants_ticks`]; whether it was the tick's is
    /// found out here, and one system call sets the next. Cheap when no event needs it.
    pub fn tick(&self, cpl: Option<u8>) {
        if self.wants_ticks() {
            let now = self.guest_ns();
            self.cpl_split().tick(cpl, now);
        }
    }
}

/// Makes every running thread of this process execute a full memory barrier (`membarrier(2)`).
///
/// Kernels before 4.14 lack it. Then the reader may miss that the guest is running, and the clock starts to
/// count at its next entry: late by one stay in the guest, never wrong.
fn barrier_on_all_threads() {
    static REGISTER: Once = Once::new();
    const PRIVATE_EXPEDITED: libc::c_long = 1 << 3;
    const REGISTER_PRIVATE_EXPEDITED: libc::c_long = 1 << 4;
    REGISTER.call_once(|| {
        // SAFETY: membarrier takes its arguments by value and touches no memory of ours.
        unsafe { libc::syscall(libc::SYS_membarrier, REGISTER_PRIVATE_EXPEDITED, 0, 0) };
    });
    // SAFETY: as above.
    unsafe { libc::syscall(libc::SYS_membarrier, PRIVATE_EXPEDITED, 0, 0) };
}
