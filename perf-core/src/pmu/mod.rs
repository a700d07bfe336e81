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

/// Index of a vCPU in its VM, from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VcpuId(pub u32);

/// The scope in which an event counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PmuTarget {
    /// One vCPU.
    Vcpu {
        /// Index of the vCPU.
        vcpu: VcpuId,
        /// Host thread ID of the vCPU thread, or 0 in simulations.
        tid: i32,
    },
    /// The VM as a whole.
    Vm,
    /// One CPU of the host, including all code that runs on it.
    Cpu {
        /// Number of the host CPU.
        cpu: u32,
    },
}

/// The number of events of a driver that can be active simultaneously.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PmuCapacity {
    /// Capacity of a software driver, which supports any number of events and uses no slots.
    Unlimited,
    /// Capacity of a hardware driver: each vCPU thread has these counters, each of which holds one
    /// event at a time. [`Pmu::constraint`] restricts an event to some of them.
    Counters(CounterMask),
}

impl PmuCapacity {
    /// Returns the capacity of a hardware driver with `n` counters, at most 64.
    #[must_use]
    pub const fn counters(n: usize) -> Self {
        Self::Counters(CounterMask::first(n))
    }
}

/// Reason why no event can count a guest while a VM with a mediated vPMU exists, and the remedy.
/// The kernel rejects such events with `EOPNOTSUPP` (`mediated_pmu_account_event`, Linux 7.0).
pub const MEDIATED_NEIGHBOUR: &str = "a VM with KVM's mediated vPMU holds the host's PMU; end that VM, or load \
    kvm_intel or kvm_amd with enable_mediated_pmu=0";

/// An error of a driver. The core maps each variant to an error number of `perf_event_open(2)`.
#[derive(Debug, thiserror::Error)]
pub enum PmuError {
    /// The driver has no such event (`ENOENT`).
    #[error("event not found in the driver")]
    NoSuchEvent,
    /// The driver can never count the event in this combination (`EINVAL`).
    #[error("unsupported combination: {0}")]
    Unsupported(&'static str),
    /// No counter is available at present (`EAGAIN`).
    #[error("no counter is available")]
    Busy,
    /// The host reserves the PMU for mediated guests (`EOPNOTSUPP` or `EBUSY`).
    #[error("{}", MEDIATED_NEIGHBOUR)]
    Mediated(#[source] std::io::Error),
    /// A system call failed.
    #[error("{what} failed")]
    Os {
        /// Name of the system call.
        what: &'static str,
        /// Error of the system call.
        #[source]
        source: std::io::Error,
    },
}

impl PmuError {
    /// Returns the error number that corresponds to the error.
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

/// A driver, which is a source of counts.
pub trait Pmu: Send + Sync + Debug {
    /// Returns the short name of the driver, such as `host`, `clock`, `kvm` or `sim`.
    fn name(&self) -> &'static str;

    /// Returns `true` if this driver serves events of type `ty`.
    fn serves(&self, ty: EventType) -> bool;

    /// Returns the number of events per vCPU that can be active simultaneously.
    fn capacity(&self) -> PmuCapacity;

    /// Returns the counters that can hold `attr`, by default all of them.
    ///
    /// Called once per event, at open.
    fn constraint(&self, attr: &Attr) -> CounterMask {
        let _ = attr;
        CounterMask::ALL
    }

    /// Validates `attr` and opens the driver's part of an event in the stopped state.
    ///
    /// # Errors
    /// Returns a [`PmuError`] if this driver cannot count the event.
    fn open(&self, attr: &Attr, target: PmuTarget) -> Result<Box<dyn PmuEvent>, PmuError>;

    /// Opens an event that will be active only together with another event, the group leader.
    /// `group` is the handle that [`PmuEvent::group`] of the leader returned. The leader may belong
    /// to another driver.
    ///
    /// A driver with native groups on the host saves system calls and starts all members at the
    /// same time. The default implementation calls [`Pmu::open`].
    ///
    /// # Errors
    /// Returns the same errors as [`Pmu::open`].
    fn open_in_group(
        &self,
        attr: &Attr,
        target: PmuTarget,
        group: &PmuGroup,
    ) -> Result<Box<dyn PmuEvent>, PmuError> {
        let _ = group;
        self.open(attr, target)
    }
}

/// Driver-specific handle of a group leader, with which other members are opened.
pub type PmuGroup = Arc<dyn Any + Send + Sync>;

/// The driver's part of one event.
///
/// All calls are made under the lock of the event's context, from the vCPU's own thread on the hot
/// path and otherwise from any thread. The leader of a group is started last and stopped first.
pub trait PmuEvent: Send {
    /// Starts counting. `overflow_in` arms an overflow after that many further counts; `None` arms
    /// nothing.
    ///
    /// # Errors
    /// Returns [`PmuError::Busy`] if no counter is available at present; the event stays stopped.
    fn start(&mut self, overflow_in: Option<u64>) -> Result<(), PmuError>;

    /// Stops counting and keeps the count.
    fn stop(&mut self);

    /// Returns the handle with which [`Pmu::open_in_group`] opens events that will be active only
    /// together with this event.
    ///
    /// Returns `None` if the driver has no native groups.
    fn group(&mut self) -> Option<PmuGroup> {
        None
    }

    /// Detaches the stopped event from the group in which it was opened. It is started and stopped
    /// on its own afterwards.
    fn leave_group(&mut self) {}

    /// Returns the counts collected while started, since [`Pmu::open`].
    ///
    /// Never decreases or resets. On the vCPU's own thread this takes at most one system call.
    fn read(&mut self) -> u64;

    /// Checks whether a started event still has its counter on the host. [`PmuEvent::lost_ns`]
    /// returns the result.
    ///
    /// Takes at most one system call, and none in drivers with counters that cannot be taken away.
    fn check_counter(&mut self) {}

    /// Returns how long ago, in nanoseconds, the host took the counter of a started event away, or
    /// `None` while the event counts.
    ///
    /// The result reflects the last call of [`PmuEvent::check_counter`] or [`PmuEvent::read`]. If
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

    /// Returns the number of armed overflows that were signaled since the last call.
    ///
    /// A driver that cannot determine this number returns 1 if `read()` has reached the armed
    /// count. If the signal was early, such a driver returns 0 and re-arms for the remaining counts
    /// itself.
    fn take_overflows(&mut self) -> u32;

    /// Discards armed overflows that were not reported, because the event is about to be re-armed
    /// or was stopped.
    ///
    /// Does nothing in a driver whose [`PmuEvent::rearm`] and [`PmuEvent::stop`] discard them.
    fn forget_overflows(&mut self) {
        let _ = self.take_overflows();
    }

    /// Combines [`PmuEvent::take_overflows`] and [`PmuEvent::read`]. Returns the count at which an
    /// armed overflow was noticed, or `None` if there was no overflow.
    ///
    /// This is the hot path. A driver that receives the count together with the overflow needs no
    /// system call.
    fn overflowed(&mut self) -> Option<u64> {
        (self.take_overflows() > 0).then(|| self.read())
    }

    /// Arms a started event to overflow `overflow_in` counts after `count`, which is the count that
    /// the driver just returned.
    ///
    /// If the host re-arms the event periodically by itself, the driver does nothing while
    /// `overflow_in` stays the same.
    ///
    /// # Errors
    /// Returns the same errors as [`PmuEvent::arm`].
    fn rearm(&mut self, count: u64, overflow_in: u64) -> Result<(), PmuError> {
        let _ = count;
        self.arm(overflow_in)
    }

    /// Returns the total of a package count (one count for the whole VM), which *replaces* the
    /// count of the event and of its children in every reading.
    ///
    /// Returns `None` for ordinary events.
    fn count(&mut self) -> Option<u64> {
        None
    }

    /// Returns the age of the value of [`PmuEvent::count`], in nanoseconds, or 0 if the value is
    /// read on request.
    ///
    /// A driver that cannot access the package counter from every thread updates the total when a
    /// vCPU of the package is scheduled, and returns that value until the next update. The core
    /// returns the total unmodified. The total grows in steps, never decreases, and may lag behind
    /// the package counter by the returned age.
    fn count_age_ns(&mut self) -> u64 {
        0
    }

    /// Returns the index for user-space reads, as in the `index` field of the control page, or 0 if
    /// user-space reads are not available.
    fn user_index(&self) -> u32 {
        0
    }
}
