//! Drivers: the sources of counts.
//!
//! A driver implements [`Pmu`], and each of its events implements [`PmuEvent`]. Nothing outside
//! this module calls `perf_event_open(2)`. The core decides *when* an event is active
//! (multiplexing, pinned and exclusive groups). A driver only starts, stops, reads and arms events.

#[cfg(feature = "clock")]
pub mod clock;
mod counters;
#[cfg(feature = "host")]
pub mod host;
#[cfg(feature = "kvm")]
pub mod kvm;
#[cfg(any(feature = "host", feature = "sim"))]
mod period_floor;
pub mod sched;
#[cfg(feature = "sim")]
pub mod sim;
mod spans;
#[cfg(feature = "host")]
mod timer;
pub mod vmm_pmu;

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use crate::attr::{Attr, EventType};

pub use counters::CounterMask;
#[cfg(feature = "host")]
pub use timer::thread_run_time_ns;

/// Number of a vCPU in its VM, starting at 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VcpuId(pub u32);

/// The vCPU, VM or host CPU whose events a driver event counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PmuEventTarget {
    /// One vCPU.
    Vcpu {
        /// Number of the vCPU.
        vcpu: VcpuId,
        /// Thread ID of the vCPU on the host, or 0 in simulations.
        tid: i32,
    },
    /// The VM as a whole, for a driver that counts it directly.
    Vm,
    /// One CPU of the host, including all code that runs on it.
    Cpu {
        /// Number of the host CPU.
        cpu: u32,
    },
}

/// The capacity of a driver: how many of its events can be active simultaneously.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PmuCounterCapacity {
    /// No limit: a software driver, which uses no slots.
    Unlimited,
    /// The counters that each vCPU's thread has, each for one event at a time: a hardware driver.
    /// [`Pmu::constraint`] restricts an event to some of them.
    Counters(CounterMask),
}

impl PmuCounterCapacity {
    /// Returns the capacity of a hardware driver with `n` counters, at most 64.
    #[must_use]
    pub const fn counters(n: usize) -> Self {
        Self::Counters(CounterMask::first(n))
    }
}

/// Error text for an event that counts a guest while the host runs a VM with a mediated vPMU. The
/// kernel rejects such events with `EOPNOTSUPP` (`mediated_pmu_account_event`, Linux 7.0).
pub const MEDIATED_NEIGHBOUR: &str = "a VM with KVM's mediated vPMU holds the host's PMU; end that VM, or load \
    kvm_intel or kvm_amd with enable_mediated_pmu=0";

/// An error of a driver. The core maps each variant to an error number of `perf_event_open(2)`.
#[derive(Debug, thiserror::Error)]
pub enum PmuError {
    /// The driver has no such event (`ENOENT`).
    #[error("event not found in the driver")]
    NoSuchEvent,
    /// The driver can never count an event with this combination of attributes (`EINVAL`).
    #[error("unsupported combination: {0}")]
    Unsupported(&'static str),
    /// No counter is available for the event at present (`EAGAIN`).
    #[error("no counter is available")]
    Busy,
    /// The host reserves its PMU for guests with a mediated vPMU (`EOPNOTSUPP` or `EBUSY`).
    #[error("{}", MEDIATED_NEIGHBOUR)]
    Mediated(#[source] std::io::Error),
    /// A system call failed.
    #[error("{what} failed")]
    Os {
        /// Name of the system call that failed.
        what: &'static str,
        /// Error that the system call returned.
        #[source]
        source: std::io::Error,
    },
}

impl PmuError {
    /// Returns the error number of `perf_event_open(2)` that corresponds to this error.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::NoSuchEvent => libc::ENOENT,
            Self::Unsupported(_) => libc::EINVAL,
            Self::Busy => libc::EAGAIN,
            Self::Mediated(source) | Self::Os { source, .. } => source.raw_os_error().unwrap_or(libc::EIO),
        }
    }
}

/// A driver, which opens events and supplies their counts.
pub trait Pmu: Send + Sync + Debug {
    /// Returns the short name of the driver, such as `host`, `clock`, `kvm` or `sim`.
    fn name(&self) -> &'static str;

    /// Returns `true` if this driver counts events of type `ty`.
    fn supports_type(&self, ty: EventType) -> bool;

    /// Returns the driver's capacity per vCPU: how many events can be active simultaneously.
    fn capacity(&self) -> PmuCounterCapacity;

    /// Returns the counters that can hold an event with attributes `attr`, by default all counters.
    ///
    /// Called once per event, at open.
    fn constraint(&self, attr: &Attr) -> CounterMask {
        let _ = attr;
        CounterMask::ALL
    }

    /// Opens a driver event with attributes `attr` in the stopped state.
    ///
    /// # Errors
    /// Returns a [`PmuError`] if this driver cannot count the event.
    fn open(&self, attr: &Attr, target: PmuEventTarget) -> Result<Box<dyn PmuEvent>, PmuError>;

    /// Opens a driver event that is active only together with another event, the group leader.
    /// `group` is the handle that [`PmuEvent::group`] of the leader returned. The leader may belong
    /// to another driver.
    ///
    /// A driver that implements this method with groups of the host kernel saves system calls and
    /// starts all members at the same time. The default implementation calls [`Pmu::open`].
    ///
    /// # Errors
    /// Returns the same errors as [`Pmu::open`].
    fn open_in_group(
        &self,
        attr: &Attr,
        target: PmuEventTarget,
        group: &PmuGroup,
    ) -> Result<Box<dyn PmuEvent>, PmuError> {
        let _ = group;
        self.open(attr, target)
    }
}

/// Handle of a group leader with which a driver opens the other members of the group.
pub type PmuGroup = Arc<dyn Any + Send + Sync>;

/// A driver event: the part of an event that the driver implements.
///
/// All calls are made under the lock of the event's context, from the vCPU's own thread on the hot
/// path and otherwise from any thread. The leader of a group is started last and stopped first.
pub trait PmuEvent: Send {
    /// Starts counting. With `overflow_in`, also arms the event to overflow after that many further
    /// counts.
    ///
    /// # Errors
    /// Returns [`PmuError::Busy`] if no counter is available at present; the event stays stopped.
    fn start(&mut self, overflow_in: Option<u64>) -> Result<(), PmuError>;

    /// Stops counting. The count does not change.
    fn stop(&mut self);

    /// Returns the handle of this event as a group leader, for [`Pmu::open_in_group`].
    ///
    /// Returns `None` if the driver does not use groups of the host kernel.
    fn group(&mut self) -> Option<PmuGroup> {
        None
    }

    /// Detaches the stopped event from the group in which it was opened. Afterwards the event is
    /// started and stopped alone.
    fn leave_group(&mut self) {}

    /// Returns the number of counts since [`Pmu::open`] while the event was started.
    ///
    /// Never decreases or resets. On the vCPU's own thread this takes at most one system call.
    fn read(&mut self) -> u64;

    /// Checks whether a started event still holds its hardware counter. [`PmuEvent::lost_ns`]
    /// returns the result of the check.
    ///
    /// Takes at most one system call, and none in drivers with counters that cannot be taken away.
    fn check_counter(&mut self) {}

    /// Returns how long ago, in nanoseconds, the host took the counter of a started event away, or
    /// `None` while the event counts.
    ///
    /// The result is that of the last call of [`PmuEvent::check_counter`] or [`PmuEvent::read`]. If
    /// the exact moment of the loss is unknown, the result is the longest time that may have passed
    /// since then. The count does not advance after the loss until the event is stopped and started
    /// again. Takes no system call.
    fn lost_ns(&self) -> Option<u64> {
        None
    }

    /// Arms a started event to overflow after `overflow_in` further counts.
    ///
    /// # Errors
    /// Returns a [`PmuError`] if the host rejects the request. The event then stays armed as
    /// before.
    fn arm(&mut self, overflow_in: u64) -> Result<(), PmuError>;

    /// Returns the number of overflows since the last call.
    ///
    /// A driver that cannot determine this number returns 1 if `read()` has reached the armed
    /// count. If the signal was early, such a driver returns 0 and arms the event for the remaining
    /// counts itself.
    fn take_overflows(&mut self) -> u32;

    /// Discards overflows that [`PmuEvent::take_overflows`] has not returned yet. The core calls
    /// this method after it stops the event and before it re-arms the event.
    ///
    /// Has no effect in a driver whose [`PmuEvent::rearm`] and [`PmuEvent::stop`] discard these
    /// overflows.
    fn forget_overflows(&mut self) {
        let _ = self.take_overflows();
    }

    /// Combines [`PmuEvent::take_overflows`] and [`PmuEvent::read`]. Returns the count if the event
    /// has overflowed, otherwise `None`.
    ///
    /// The core calls this method on its hot path. A driver that receives the count together with
    /// the overflow needs no system call.
    fn overflowed(&mut self) -> Option<u64> {
        (self.take_overflows() > 0).then(|| self.read())
    }

    /// Arms a started event to overflow `overflow_in` counts after `count`, which is the count that
    /// the driver just returned.
    ///
    /// If the host re-arms the event periodically, the driver need not do anything while
    /// `overflow_in` stays the same.
    ///
    /// # Errors
    /// Returns the same errors as [`PmuEvent::arm`].
    fn rearm(&mut self, count: u64, overflow_in: u64) -> Result<(), PmuError> {
        let _ = count;
        self.arm(overflow_in)
    }

    /// Returns the total of a package count (one count for the whole VM). In every reading, this
    /// total *replaces* the counts of the event and of its children.
    ///
    /// Returns `None` for ordinary events.
    fn count(&mut self) -> Option<u64> {
        None
    }

    /// Returns the age of the value of [`PmuEvent::count`], in nanoseconds, or 0 if the value is
    /// read at each call.
    ///
    /// A driver that cannot access the package counter from every thread updates the total when a
    /// vCPU of the package is scheduled, and returns that value until the next update. The core
    /// returns the total unmodified. The total grows in steps, never decreases, and may lag behind
    /// the package counter by the returned age.
    fn count_age_ns(&mut self) -> u64 {
        0
    }

    /// Returns the value of the control page's `index` field for user-space reads of this event, or
    /// 0 if such reads are not available.
    fn user_index(&self) -> u32 {
        0
    }
}
