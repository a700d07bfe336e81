//! The `clock` driver: cycles computed from guest run time, for hosts without a PMU.
//!
//! | config | counts |
//! |---|---|
//! | 0 | cycles: guest run time times the TSC frequency |
//! | 1 | reference cycles: the same |
//! | 2 | guest run time in nanoseconds |
//!
//! The vCPU's thread brackets `KVM_RUN` with [`VcpuRunTimeClock::guest_enter`] and
//! [`VcpuRunTimeClock::guest_exit`]; [`VcpuRunTimeClock`] defines the time that this includes. Host
//! execution is never counted, so `exclude_guest` is rejected and `exclude_host` has no effect.
//!
//! # One privilege level
//! An event with `exclude_user` or `exclude_kernel` counts an estimate ([`ClockPmu::is_estimate`]).
//! The estimate is based on the host kernel's samples of the guest or, on hosts without such
//! samples, on kicks of the vCPU. An event with both flags counts nothing.
//!
//! # Overflow
//! One timer per vCPU is armed for the earliest overflow when the guest is entered (see
//! `alarm.rs`). Its signal takes the vCPU out of the guest. Wall-clock time advances at least as
//! fast as guest time, so the signal may arrive early but not late. [`PmuEvent::take_overflows`]
//! then arms the timer for the remainder, at least [`MIN_TIMER_NS`] ahead, and up to ten
//! milliseconds ahead while the guest makes no progress (it is halted or waits for a host CPU). The
//! timer repeats only rarely on its own, so its expirations alone cannot keep a vCPU busy. Because
//! an early expiry costs a useless exit, an event waits up to a sixteenth longer than necessary if
//! its previous timers were early by less than that.

mod alarm;
mod cpl;
mod event;
mod vcpu;

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

pub use vcpu::VcpuRunTimeClock;

use crate::attr::{Attr, EventType};
use crate::pmu::{Pmu, PmuCounterCapacity, PmuError, PmuEvent, PmuEventTarget, VcpuId};

use cpl::PrivilegeLevel;
use event::{ClockEvent, ClockUnit, CountedTime};

/// Minimum duration of an overflow timer, in nanoseconds.
pub const MIN_TIMER_NS: u64 = 10_000;
/// Value of `config` for cycles.
pub const CYCLES: u64 = 0;
/// Value of `config` for reference cycles.
pub const REF_CYCLES: u64 = 1;
/// Value of `config` for guest run time, in nanoseconds.
pub const GUEST_NS: u64 = 2;

/// The `clock` driver of one VM.
#[derive(Debug)]
pub struct ClockPmu {
    signal: Option<i32>,
    interprets_kernel: bool,
    clocks: Mutex<BTreeMap<VcpuId, Arc<VcpuRunTimeClock>>>,
}

impl ClockPmu {
    /// Creates a driver that sends `signal` to the vCPU's thread on overflow. With `None`, its
    /// events cannot overflow.
    ///
    /// The signal handler must be installed without `SA_RESTART`, so that the signal ends
    /// `KVM_RUN`. See [`super::host`] for the choice of a signal.
    #[must_use]
    pub fn new(signal: Option<i32>) -> Self {
        Self {
            signal,
            interprets_kernel: false,
            clocks: Mutex::new(BTreeMap::new()),
        }
    }

    /// Sets whether KVM interprets the guest's kernel, as a software-only KVM does.
    ///
    /// The host kernel accounts for the time of the interpreted guest kernel as host kernel time.
    /// The driver cannot detect such a KVM, so the caller must determine this.
    #[must_use]
    pub fn interpreting_kernel(self, interprets_kernel: bool) -> Self {
        Self {
            interprets_kernel,
            ..self
        }
    }

    /// Returns `true` if the caller has declared that KVM interprets the guest's kernel.
    #[must_use]
    pub fn interprets_kernel(&self) -> bool {
        self.interprets_kernel
    }

    /// Registers `clock` as the clock of `vcpu`.
    ///
    /// Events that are opened afterwards use `clock`. Existing events keep their previous clock. If
    /// several drivers share a clock, the first event that is armed on it determines which driver's
    /// signal its overflows send.
    pub fn add_vcpu(&self, vcpu: VcpuId, clock: Arc<VcpuRunTimeClock>) {
        if self.interprets_kernel {
            clock.cpl_attribution().kernel_is_interpreted();
        }
        self.lock().insert(vcpu, clock);
    }

    /// Unregisters the clock of `vcpu`, whose thread is about to end. Its open events keep their
    /// counts, but their overflows are no longer signaled.
    pub fn remove_vcpu(&self, vcpu: VcpuId) {
        let clock = self.lock().remove(&vcpu);
        if let Some(clock) = clock {
            clock.end();
        }
    }

    /// Returns the clock of `vcpu`, or `None` if the vCPU has no clock.
    #[must_use]
    pub fn clock_of(&self, vcpu: VcpuId) -> Option<Arc<VcpuRunTimeClock>> {
        self.lock().get(&vcpu).cloned()
    }

    /// Returns `true` if the count of an event with attributes `attr` is an estimate, because the
    /// event counts only one privilege level.
    #[must_use]
    pub fn is_estimate(attr: &Attr) -> bool {
        attr.ty == EventType::CLOCK && attr.exclude_user != attr.exclude_kernel
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<VcpuId, Arc<VcpuRunTimeClock>>> {
        self.clocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pmu for ClockPmu {
    fn name(&self) -> &'static str {
        "clock"
    }

    fn supports_type(&self, ty: EventType) -> bool {
        ty == EventType::CLOCK
    }

    fn capacity(&self) -> PmuCounterCapacity {
        PmuCounterCapacity::Unlimited
    }

    fn open(&self, attr: &Attr, target: PmuEventTarget) -> Result<Box<dyn PmuEvent>, PmuError> {
        let unit = match attr.config {
            CYCLES | REF_CYCLES => ClockUnit::Cycles,
            GUEST_NS => ClockUnit::Nanoseconds,
            _ => return Err(PmuError::NoSuchEvent),
        };
        let PmuEventTarget::Vcpu { vcpu, .. } = target else {
            return Err(PmuError::Unsupported("the clock counts one vCPU, not a VM"));
        };
        if attr.exclude_guest {
            return Err(PmuError::Unsupported("the clock counts the guest only"));
        }
        let share = match (attr.exclude_user, attr.exclude_kernel) {
            (false, false) => CountedTime::All,
            (false, true) => CountedTime::One(PrivilegeLevel::User),
            (true, false) => CountedTime::One(PrivilegeLevel::Kernel),
            (true, true) => CountedTime::Nothing,
        };
        let clock = self.lock().get(&vcpu).cloned().ok_or_else(|| PmuError::Os {
            what: "finding the vCPU's clock",
            source: io::Error::from_raw_os_error(libc::ESRCH),
        })?;
        Ok(Box::new(ClockEvent::new(clock, self.signal, share, unit)))
    }
}
