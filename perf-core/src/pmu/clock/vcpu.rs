//! [`VcpuRunTimeClock`]: the guest run time of a vCPU.
//!
//! The clock advances with the CPU time of the vCPU's thread, but only between
//! [`VcpuRunTimeClock::guest_enter`] and [`VcpuRunTimeClock::guest_exit`]. Time in the VMM's own
//! code is outside this interval. Time in which the vCPU is halted or descheduled is inside it but
//! consumes no CPU time. The remainder is guest time plus the kernel's work for the guest in
//! `KVM_RUN`.
//!
//! # Writers and readers
//! Only the vCPU's thread writes `epoch`, `base` and `closed`. Any thread may read the clock while
//! the guest runs and retries when the sequence lock indicates a concurrent change. If the first
//! user of an unused clock arrives on another thread while the guest runs, that thread supplies the
//! missing start of the interval itself (`late`).
#![expect(unsafe_code, reason = "system calls, and memory shared with the kernel")]

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, compiler_fence, fence};
use std::sync::{Mutex, Once};

use super::alarm::{Alarm, AlarmSlot, ClockTimes};
use super::cpl::{CplAttribution, PrivilegeLevel};
use crate::pmu::host::fd::current_tid;
use crate::pmu::timer::{clock_ns, wall_ns};

/// Maximum number of attempts to read the clock consistently. After these attempts, a reader
/// returns the guest time of the finished intervals only.
const READ_TRIES: usize = 64;

/// Maximum length of an exit without a second reading of the thread time, in nanoseconds. After
/// such a short exit, the thread time at the next entry is computed as the thread time at the exit
/// plus the elapsed monotonic time. Reading the thread time is a system call, and two of them per
/// exit would be too many.
///
/// If another task uses the thread's CPU during such an exit, that task's time counts as VMM time.
/// A count may therefore be too low by less than this value per exit, but is never too high. Taking
/// a sample with a call chain needs less than this time, even on emulated hosts.
const MAX_SHORT_EXIT_NS: u64 = 100_000;

/// The clock of one vCPU, which advances with the vCPU's guest run time.
///
/// Created once per vCPU with the ID of the vCPU's thread. The thread advances the clock, and the
/// events of the [`super::ClockPmu`] read it, so both share it (`Arc`).
#[derive(Debug)]
pub struct VcpuRunTimeClock {
    tid: i32,
    tsc_khz: u32,
    /// Number of started events that read this clock. While it is 0, entries and exits only advance
    /// `epoch`.
    users: AtomicU32,
    /// Number of guest entries and exits so far. The number is odd while the vCPU is in the guest.
    epoch: AtomicU64,
    /// Sequence lock for `base_*`, `closed_ns` and the changes of `epoch` at counted exits; the
    /// value is odd during a change.
    seq: AtomicU32,
    /// Guest time of all finished intervals, in nanoseconds.
    closed_ns: AtomicU64,
    /// CPU time of the thread at the start of the interval `base_epoch`, in nanoseconds.
    base_ns: AtomicU64,
    base_epoch: AtomicU64,
    /// `left_ns`: thread time at the last counted exit, in nanoseconds. `left_at_ns`: monotonic
    /// time right after the thread time was read, in nanoseconds. Only the vCPU's thread uses these
    /// two fields.
    left_ns: AtomicU64,
    left_at_ns: AtomicU64,
    /// Same as `base_*`, but supplied by another thread, because no started event used the clock
    /// when the interval began.
    late_ns: AtomicU64,
    late_epoch: AtomicU64,
    /// Lock of the threads that supply `late_*`.
    late_lock: Mutex<()>,
    /// Attribution of guest time to privilege levels. Used only while an event counts a single
    /// level.
    cpl: Mutex<CplAttribution>,
    /// Set if the vCPU thread must report the guest's privilege level after kicks.
    wants_ticks: AtomicBool,
    /// Timer for the overflows of all clock events of the vCPU.
    alarm: Mutex<Alarm>,
    /// Set if the alarm's timer must be updated to the earliest deadline at the next guest entry.
    alarm_is_stale: AtomicBool,
    /// Set if the alarm's timer is armed.
    alarm_is_set: AtomicBool,
}

impl VcpuRunTimeClock {
    /// Creates a clock for the vCPU that thread `tid` of this process runs. `tsc_khz` is the
    /// frequency of the guest's TSC.
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
            cpl: Mutex::new(CplAttribution::new(tid)),
            wants_ticks: AtomicBool::new(false),
            alarm: Mutex::new(Alarm::default()),
            alarm_is_stale: AtomicBool::new(false),
            alarm_is_set: AtomicBool::new(false),
        }
    }

    /// Creates a clock for a vCPU that runs on the calling thread.
    #[must_use]
    pub fn for_current_thread(tsc_khz: u32) -> Self {
        Self::new(current_tid(), tsc_khz)
    }

    /// Returns the ID of the thread whose CPU time this clock follows.
    #[must_use]
    pub fn tid(&self) -> i32 {
        self.tid
    }

    /// Returns the frequency of the guest's TSC in kHz, that is, cycles per millisecond of guest
    /// time.
    #[must_use]
    pub fn tsc_khz(&self) -> u32 {
        self.tsc_khz
    }

    /// Records that the vCPU's thread is about to call `KVM_RUN`.
    ///
    /// Without a started clock event, this takes two loads and one store, without a system call or
    /// a fence.
    #[inline]
    pub fn guest_enter(&self) {
        let epoch = self.epoch.load(Ordering::Relaxed) | 1;
        self.epoch.store(epoch, Ordering::Relaxed);
        // Store-load ordering with `add_user`, which increments `users`, makes every thread of the
        // process execute a barrier, and then reads `epoch`. Either `add_user` sees this store to
        // `epoch`, or the load below sees the new user. The compiler fence keeps the two accesses
        // in program order, and the barrier of `add_user` keeps them in order on the processor.
        compiler_fence(Ordering::SeqCst);
        if self.users.load(Ordering::Relaxed) != 0 {
            self.enter_counted(epoch);
        }
    }

    /// Records that the vCPU's thread has returned from `KVM_RUN`.
    ///
    /// Without a started clock event, costs as much as [`VcpuRunTimeClock::guest_enter`]. With a
    /// started clock event, takes one system call, and the next [`VcpuRunTimeClock::guest_enter`]
    /// takes another one if it is called more than 100 µs later.
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
        let now = if out_ns < MAX_SHORT_EXIT_NS {
            self.left_ns.load(Ordering::Relaxed) + out_ns
        } else {
            self.thread_ns()
        };
        self.write(|| {
            self.base_ns.store(now, Ordering::Relaxed);
            self.base_epoch.store(epoch, Ordering::Relaxed);
        });
        if self.alarm_is_stale.load(Ordering::Relaxed) {
            self.update_alarm(ClockTimes {
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
            // Advances the epoch inside the sequence lock, so that no reader counts the interval
            // twice.
            self.epoch.store(epoch + 1, Ordering::Relaxed);
        });
    }

    /// Runs `change`, which modifies the fields that the sequence lock protects. Called by the
    /// vCPU's thread only.
    fn write(&self, change: impl FnOnce()) {
        let seq = self.seq.load(Ordering::Relaxed);
        self.seq.store(seq.wrapping_add(1), Ordering::Relaxed);
        // Orders the stores of `change` after the odd value; pairs with the acquire fence in
        // `guest_ns`.
        fence(Ordering::Release);
        change();
        self.seq.store(seq.wrapping_add(2), Ordering::Release);
    }

    /// Returns the CPU time of the thread at the start of the interval `epoch`, or `None` if it is
    /// unknown.
    fn interval_start(&self, epoch: u64) -> Option<u64> {
        if self.base_epoch.load(Ordering::Relaxed) == epoch {
            Some(self.base_ns.load(Ordering::Relaxed))
        } else if self.late_epoch.load(Ordering::Acquire) == epoch {
            Some(self.late_ns.load(Ordering::Relaxed))
        } else {
            None
        }
    }

    /// Returns the guest time so far, in nanoseconds. Any thread may call this method.
    ///
    /// The clock advances only while a started event uses it, so only compare readings between a
    /// start and a stop of the same event. Takes one system call while the guest runs, and none
    /// otherwise.
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
            // The thread time must be read before the check. After the check the interval may have
            // ended, with the thread in the VMM's own code.
            let running = start.map_or(0, |start| self.thread_ns().saturating_sub(start));
            // Pairs with the release fence in `write`.
            fence(Ordering::Acquire);
            if self.seq.load(Ordering::Relaxed) == seq {
                return closed + running;
            }
        }
        // Returns a correct lower bound if the vCPU entered or exited the guest during every
        // attempt.
        self.closed_ns.load(Ordering::Relaxed)
    }

    /// Registers an event that was started and reads the clock from now on.
    pub(crate) fn add_user(&self) {
        // The vCPU's own thread is outside the guest here, and its next `guest_enter` sees the new
        // user.
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

    /// Unregisters an event that was registered with [`VcpuRunTimeClock::add_user`].
    pub(crate) fn remove_user(&self) {
        self.users.fetch_sub(1, Ordering::SeqCst);
    }

    /// Returns the CPU time of the vCPU's thread in nanoseconds, or 0 after the thread has ended.
    pub fn thread_ns(&self) -> u64 {
        let id = if current_tid() == self.tid {
            libc::CLOCK_THREAD_CPUTIME_ID
        } else {
            // Kernel encoding of the per-thread scheduler clock: see clock_getcpuclockid(3) and
            // CPUCLOCK_PERTHREAD | CPUCLOCK_SCHED in the kernel's posix-timers.
            (!self.tid << 3) | 6
        };
        clock_ns(id)
    }

    /// Starts the attribution of guest time to privilege levels for an event that counts a single
    /// level.
    pub(super) fn start_levels(&self, signal: Option<i32>) -> std::io::Result<()> {
        self.add_user();
        let now = self.guest_ns();
        let mut split = self.cpl_attribution();
        let started = split.start(signal, now);
        self.set_wants_ticks(split.uses_kicks());
        if started.is_err() {
            self.remove_user();
        }
        started
    }

    /// Ends the attribution that [`VcpuRunTimeClock::start_levels`] started for an event.
    pub(super) fn stop_levels(&self) {
        let now = self.guest_ns();
        let mut split = self.cpl_attribution();
        split.stop(now);
        self.set_wants_ticks(split.uses_kicks());
        drop(split);
        self.remove_user();
    }

    /// Returns the guest time attributed to privilege level `level`, in nanoseconds.
    pub(super) fn level_ns(&self, level: PrivilegeLevel) -> u64 {
        let now = self.guest_ns();
        let mut split = self.cpl_attribution();
        let ns = split.read(level, now);
        self.set_wants_ticks(split.uses_kicks());
        ns
    }

    /// Reserves a slot in the alarm for an event whose overflows send `signal` to the vCPU's
    /// thread.
    pub(super) fn join_alarm(&self, signal: i32) -> std::io::Result<AlarmSlot> {
        self.alarm().add(self.tid, signal)
    }

    /// Releases a slot that was reserved with [`VcpuRunTimeClock::join_alarm`].
    pub(super) fn leave_alarm(&self, place: AlarmSlot) {
        self.alarm().remove(place);
    }

    /// Arms the alarm for the time when the guest has run for `wait_ns` from now.
    ///
    /// If the vCPU's own thread calls this method, it is outside the guest, and the timer is set at
    /// the next guest entry. Any other thread sets the timer immediately.
    pub(super) fn arm_alarm(&self, place: AlarmSlot, wait_ns: u64) -> std::io::Result<()> {
        let guest_ns = self.guest_ns();
        let mut alarm = self.alarm();
        alarm.arm(place, guest_ns.saturating_add(wait_ns));
        if current_tid() == self.tid && self.epoch.load(Ordering::Relaxed) & 1 == 0 {
            self.alarm_is_stale.store(true, Ordering::Relaxed);
            return Ok(());
        }
        let set = alarm.update_at_entry(ClockTimes {
            wall_ns: wall_ns(),
            guest_ns,
        });
        self.alarm_is_set.store(alarm.is_set(), Ordering::Relaxed);
        set
    }

    /// Disarms the alarm for one event. Takes no system call.
    pub(super) fn disarm_alarm(&self, place: AlarmSlot) {
        self.alarm().disarm(place);
    }

    /// Returns `true` if the alarm has expired for the deadline of the event with slot `place`.
    /// After an expiry, the timer is updated at the next guest entry.
    pub(super) fn alarm_expired_for(&self, place: AlarmSlot) -> bool {
        let alarm = self.alarm();
        if !alarm.has_expired(wall_ns()) {
            return false;
        }
        // After this expiry, the timer must be armed for the remaining deadlines at the next guest
        // entry.
        self.alarm_is_stale.store(true, Ordering::Relaxed);
        alarm.expired_for(place)
    }

    /// Updates the alarm's timer to the earliest deadline before a guest entry.
    fn update_alarm(&self, now: ClockTimes) {
        self.alarm_is_stale.store(false, Ordering::Relaxed);
        let mut alarm = self.alarm();
        if let Err(e) = alarm.update_at_entry(now) {
            log::warn!("cannot arm an overflow timer: {}", crate::error_line(&e));
        }
        self.alarm_is_set.store(alarm.is_set(), Ordering::Relaxed);
    }

    /// Handles an overflow signal of the vCPU's thread. Disarms the alarm if its timer has repeated
    /// and no event is armed.
    ///
    /// The VMM must call this method after each overflow signal. Without the call, the thread
    /// receives sixteen useless signals per second after the last armed event is stopped.
    #[inline]
    pub fn after_signal(&self) {
        if self.alarm_is_set.load(Ordering::Relaxed) {
            let mut alarm = self.alarm();
            alarm.after_signal();
            self.alarm_is_set.store(alarm.is_set(), Ordering::Relaxed);
        }
    }

    /// Disarms the alarm of a vCPU that does not run and has no active event.
    pub fn quiesce(&self) {
        if self.alarm_is_set.swap(false, Ordering::Relaxed) {
            self.alarm_is_stale.store(true, Ordering::Relaxed);
            self.alarm().stop();
        }
    }

    /// Deletes the overflow timer of this clock because the vCPU's thread is about to end.
    pub(super) fn end(&self) {
        self.alarm_is_set.store(false, Ordering::Relaxed);
        self.alarm().end();
    }

    fn alarm(&self) -> std::sync::MutexGuard<'_, Alarm> {
        self.alarm
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(super) fn cpl_attribution(&self) -> std::sync::MutexGuard<'_, CplAttribution> {
        self.cpl.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Returns `true` if the vCPU's thread should call [`VcpuRunTimeClock::tick`] after each kick,
    /// because an event counts one privilege level and the host kernel's samples do not show it.
    #[inline]
    #[must_use]
    pub fn wants_ticks(&self) -> bool {
        self.wants_ticks.load(Ordering::Relaxed)
    }

    /// Returns `true` if the timer for level samples has expired, in which case
    /// [`VcpuRunTimeClock::tick`] takes a sample. Takes no system call.
    #[inline]
    #[must_use]
    pub fn tick_is_due(&self) -> bool {
        self.wants_ticks() && self.cpl_attribution().tick_is_due()
    }

    fn set_wants_ticks(&self, wanted: bool) {
        self.wants_ticks.store(wanted, Ordering::Relaxed);
    }

    /// Reports the privilege level `cpl` (0 to 3) at which a kick found the guest, or `None` if it
    /// was halted.
    ///
    /// Must be called after every overflow signal while [`VcpuRunTimeClock::wants_ticks`] returns
    /// `true`. Has no effect if the signal came from another timer. Re-arming the kick timer takes
    /// one system call. The call is cheap if no event counts a single level.
    pub fn tick(&self, cpl: Option<u8>) {
        if self.wants_ticks() {
            let now = self.guest_ns();
            self.cpl_attribution().tick(cpl, now);
        }
    }
}

/// Makes every running thread of this process execute a full memory barrier (`membarrier(2)`).
///
/// Has no effect on kernels before 4.14. A reader may then not notice that the guest is running,
/// and the clock starts to count only at the next guest entry.
fn barrier_on_all_threads() {
    static REGISTER: Once = Once::new();
    const PRIVATE_EXPEDITED: libc::c_long = 1 << 3;
    const REGISTER_PRIVATE_EXPEDITED: libc::c_long = 1 << 4;
    REGISTER.call_once(|| {
        // SAFETY: membarrier takes its arguments by value and does not access our memory.
        unsafe { libc::syscall(libc::SYS_membarrier, REGISTER_PRIVATE_EXPEDITED, 0, 0) };
    });
    // SAFETY: as above.
    unsafe { libc::syscall(libc::SYS_membarrier, PRIVATE_EXPEDITED, 0, 0) };
}
