//! The `clock` driver: cycles from run time, for hosts with no PMU.
//!
//! | config | counts |
//! |---|---|
//! | 0 | cycles: guest run time times the TSC frequency |
//! | 1 | reference cycles: the same |
//! | 2 | guest run time in nanoseconds |
//!
//! The vCPU's thread brackets `KVM_RUN` with [`VcpuClock::guest_enter`] and [`VcpuClock::guest_exit`]; see
//! [`VcpuClock`] for what that includes. Host execution is never counted, so `exclude_guest` is refused, and
//! `exclude_host` changes nothing.
//!
//! # One privilege level
//! An event with `exclude_user` or `exclude_kernel` counts an estimate: see [`ClockPmu::is_estimate`] and
//! [`LevelSource`]. With both it counts nothing.
//!
//! # Overflow
//! One timer of the vCPU is set for the earliest overflow when the guest is entered (see `alarm.rs`). Its
//! signal takes the vCPU out of the guest. Time on the wall passes at least as fast as guest time, so a
//! signal after the time that is wanted can only be early. [`PmuEvent::take_overflows`] then asks for the
//! rest, no sooner than [`MIN_TIMER_NS`] ahead, and later, up to ten milliseconds, while the guest makes no
//! headway (it is halted, or waits for a host CPU). By itself the timer repeats only now and then, so nothing
//! can be kept busy by rings alone. Since an early ring costs an exit for nothing, an event waits for up to a
//! sixteenth longer than it must where the rings before were early by less than that.

mod alarm;
mod cpl;
mod event;
mod timer;
mod vcpu;

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

pub use cpl::LevelSource;
pub use timer::MIN_TIMER_NS;
pub use vcpu::VcpuClock;

use crate::attr::{Attr, EventType};
use crate::pmu::{Capacity, Pmu, PmuError, PmuEvent, Target, VcpuId};

use cpl::Level;
use event::{ClockEvent, Share, Unit};

/// Cycles (`config` 0).
pub const CYCLES: u64 = 0;
/// Reference cycles (`config` 1).
pub const REF_CYCLES: u64 = 1;
/// Guest run time in nanoseconds (`config` 2).
pub const GUEST_NS: u64 = 2;

/// The `clock` driver of one VM.
#[derive(Debug)]
pub struct ClockPmu {
    signal: Option<i32>,
    interprets_kernel: bool,
    clocks: Mutex<BTreeMap<VcpuId, Arc<VcpuClock>>>,
}

impl ClockPmu {
    /// A driver whose overflows send `signal` to the vCPU's thread. Its handler must be installed without
    /// `SA_RESTART`, so that it ends `KVM_RUN`. See [`super::host`] for which signal to choose. `None`:
    /// events count, but cannot be armed.
    #[must_use]
    pub fn new(signal: Option<i32>) -> Self {
        Self {
            signal,
            interprets_kernel: false,
            clocks: Mutex::new(BTreeMap::new()),
        }
    }

    /// The same for a KVM that interprets the guest's kernel (`true`), as software-only ones do. The host's
    /// kernel then takes such time for its own: see [`LevelSource::KernelRingInterpreted`]. The caller, who
    /// knows the KVM, finds that out.
    #[must_use]
    pub fn interpreting_kernel(self, interprets_kernel: bool) -> Self {
        Self {
            interprets_kernel,
            ..self
        }
    }

    /// Whether this KVM interprets the guest's kernel.
    #[must_use]
    pub fn interprets_kernel(&self) -> bool {
        self.interprets_kernel
    }

    /// Makes `clock` the clock of `vcpu`. Events opened from now on use it; a former one keeps its events.
    /// Its overflows send the signal of the driver whose event is armed first.
    pub fn add_vcpu(&self, vcpu: VcpuId, clock: Arc<VcpuClock>) {
        if self.interprets_kernel {
            clock.cpl_split().kernel_is_interpreted();
        }
        self.lock().insert(vcpu, clock);
    }

    /// Forgets the clock of `vcpu`, whose thread is about to end. Its open events keep their counts; nothing
    /// announces their overflows any more.
    pub fn remove_vcpu(&self, vcpu: VcpuId) {
        let clock = self.lock().remove(&vcpu);
        if let Some(clock) = clock {
            clock.end();
        }
    }

    /// The clock of `vcpu`, if it has one.
    #[must_use]
    pub fn clock_of(&self, vcpu: VcpuId) -> Option<Arc<VcpuClock>> {
        self.lock().get(&vcpu).cloned()
    }

    /// Whether what an event with `attr` counts is an estimate, because it wants one privilege level only.
    #[must_use]
    pub fn is_estimate(attr: &Attr) -> bool {
        attr.ty == EventType::CLOCK && attr.exclude_user != attr.exclude_kernel
    }

    /// How privilege levels are learnt for `vcpu`; `None` if it has no clock.
    #[must_use]
    pub fn level_source(&self, vcpu: VcpuId) -> Option<LevelSource> {
        let clock = self.lock().get(&vcpu).cloned()?;
        Some(clock.cpl_split().source())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<VcpuId, Arc<VcpuClock>>> {
        self.clocks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pmu for ClockPmu {
    fn name(&self) -> &'static str {
        "clock"
    }

    fn serves(&self, ty: EventType) -> bool {
        ty == EventType::CLOCK
    }

    fn capacity(&self) -> Capacity {
        Capacity::Unlimited
    }

    fn open(&self, attr: &Attr, target: Target) -> Result<Box<dyn PmuEvent>, PmuError> {
        let unit = match attr.config {
            CYCLES | REF_CYCLES => Unit::Cycles,
            GUEST_NS => Unit::Nanoseconds,
            _ => return Err(PmuError::NoSuchEvent),
        };
        let Target::Vcpu { vcpu, .. } = target else {
            return Err(PmuError::Unsupported("the clock counts one vCPU, not a VM"));
        };
        if attr.exclude_guest {
            return Err(PmuError::Unsupported("the clock counts the guest only"));
        }
        let share = match (attr.exclude_user, attr.exclude_kernel) {
            (false, false) => Share::All,
            (false, true) => Share::One(Level::User),
            (true, false) => Share::One(Level::Kernel),
            (true, true) => Share::Nothing,
        };
        let clock = self.lock().get(&vcpu).cloned().ok_or_else(|| PmuError::Os {
            what: "finding the vCPU's clock",
            source: io::Error::from_raw_os_error(libc::ESRCH),
        })?;
        Ok(Box::new(ClockEvent::new(clock, self.signal, share, unit)))
    }
}
