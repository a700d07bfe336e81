//! Drivers: where counts come from.
//!
//! A driver implements [`Pmu`]; each event it serves is a [`PmuEvent`]. Nothing outside this module calls
//! `perf_event_open(2)`. The core decides *when* an event is on (multiplexing, pinned and exclusive groups);
//! a driver only knows how to start, stop, read and arm one.

#[cfg(feature = "clock")]
pub mod clock;
mod counters;
pub mod fed;
#[cfg(feature = "host")]
pub mod host;
#[cfg(feature = "kvm")]
pub mod kvm;
pub mod sched;
#[cfg(feature = "sim")]
pub mod sim;
mod spans;

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use crate::attr::{Attr, EventType};

pub use counters::CounterMask;

/// Index of a vCPU in its VM, as the operator sees it (0-based).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct VcpuId(pub u32);

/// Whose counts an event is to collect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// One vCPU; `tid` is the host thread that runs it (0 in simulations).
    Vcpu {
        /// The vCPU.
        vcpu: VcpuId,
        /// Host thread id of the vCPU thread.
        tid: i32,
    },
    /// The VM as a whole.
    Vm,
    /// One CPU of the host, whatever runs there.
    Cpu {
        /// Its number, as the host has it.
        cpu: u32,
    },
}

/// How many events of a driver can be on at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capacity {
    /// A software class driver: any number, no slot is used.
    Unlimited,
    /// A hardware class driver: each vCPU thread has these counters, one event on each at a time. Which
    /// events a counter can hold is said by [`Pmu::constraint`].
    Counters(CounterMask),
}

impl Capacity {
    /// A hardware class driver with `n` counters, at most 64.
    #[must_use]
    pub const fn counters(n: usize) -> Self {
        Self::Counters(CounterMask::first(n))
    }
}

/// Why a driver refused. The core maps these to the error numbers of `perf_event_open(2)`.
#[derive(Debug, thiserror::Error)]
pub enum PmuError {
    /// The driver has no such event (`ENOENT`).
    #[error("the driver has no such event")]
    NoSuchEvent,
    /// The event cannot be counted in this combination, ever (`EINVAL`).
    #[error("unsupported combination: {0}")]
    Unsupported(&'static str),
    /// No room now; it may work at another time (`EAGAIN`).
    #[error("no counter is free now")]
    Busy,
    /// The host holds the PMU for mediated guests (`EOPNOTSUPP`/`EBUSY`).
    #[error("the host's PMU is held by a mediated virtual PMU")]
    Mediated(#[source] std::io::Error),
    /// A system call failed.
    #[error("{what} failed")]
    Os {
        /// The call that failed.
        what: &'static str,
        /// Its error.
        #[source]
        source: std::io::Error,
    },
}

impl PmuError {
    /// The error number of the refusal.
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

/// A source of counts.
pub trait Pmu: Send + Sync + Debug {
    /// Short name, e.g. `host`, `clock`, `kvm`, `sim`.
    fn name(&self) -> &'static str;

    /// Whether this driver serves events of `ty`.
    fn serves(&self, ty: EventType) -> bool;

    /// How many events can be on at once, per vCPU.
    fn capacity(&self) -> Capacity;

    /// The counters that can hold `attr`. Asked once, when the event is opened. All of them unless the driver
    /// says otherwise.
    fn constraint(&self, attr: &Attr) -> CounterMask {
        let _ = attr;
        CounterMask::ALL
    }

    /// Checks `attr` and makes the driver's half of an event, stopped.
    ///
    /// # Errors
    /// [`PmuError`] when the event cannot be counted here.
    fn open(&self, attr: &Attr, target: Target) -> Result<Box<dyn PmuEvent>, PmuError>;

    /// [`Pmu::open`] of an event that will be on only together with the one that gave `group`
    /// ([`PmuEvent::group`]), perhaps of another driver. Where the driver's host has groups of its own
    /// this spares calls and puts all on at one moment; by default it changes nothing.
    ///
    /// # Errors
    /// As [`Pmu::open`].
    fn open_in_group(
        &self,
        attr: &Attr,
        target: Target,
        group: &Group,
    ) -> Result<Box<dyn PmuEvent>, PmuError> {
        let _ = group;
        self.open(attr, target)
    }
}

/// What a driver needs to know of a group's leader to open other members beside it.
pub type Group = Arc<dyn Any + Send + Sync>;

/// The driver's half of one event.
///
/// All calls come under the lock of the event's context; from the vCPU's own thread on the hot path, from any
/// thread otherwise. Of a group's members the leader is started last and stopped first.
pub trait PmuEvent: Send {
    /// Starts counting. `overflow_in` arms an overflow after that many further counts (`None`: not armed).
    ///
    /// # Errors
    /// [`PmuError::Busy`] when it does not fit now; it stays stopped.
    fn start(&mut self, overflow_in: Option<u64>) -> Result<(), PmuError>;

    /// Stops counting; the count is kept.
    fn stop(&mut self);

    /// For [`Pmu::open_in_group`] of others that will be on only together with this event. `None` for drivers
    /// without groups of their own.
    fn group(&mut self) -> Option<Group> {
        None
    }

    /// The event, which is stopped, is no longer of the group it was opened in: from now on it goes on by
    /// itself.
    fn leave_group(&mut self) {}

    /// Counts collected while started, since [`Pmu::open`]; never decreases, never resets. Cheap on the
    /// vCPU's own thread: at most one system call.
    fn read(&mut self) -> u64;

    /// Asks the host whether a started event still has its counter, for [`PmuEvent::lost_ns`]. At most one
    /// system call, and none for drivers from whom nobody takes anything.
    fn look(&mut self) {}

    /// How long ago, in nanoseconds, the host took away the counter of a started event; `None` while it
    /// counts, as far as the last [`PmuEvent::look`] or [`PmuEvent::read`] knows. Where the moment is not
    /// known this is the longest it may have been. The count stands still from then on; to count again the
    /// event is stopped and started. No system call.
    fn lost_ns(&self) -> Option<u64> {
        None
    }

    /// Re-arms a started event: the next overflow comes after `overflow_in` further counts from now.
    ///
    /// # Errors
    /// [`PmuError`] when the host refuses; the event then stays armed as it was.
    fn arm(&mut self, overflow_in: u64) -> Result<(), PmuError>;

    /// How many times this event notified an overflow that was armed since the last call. Drivers that cannot
    /// tell return 1 when `read()` has reached the armed point and 0 when the notification was early (they
    /// then re-arm for the rest themselves).
    fn take_overflows(&mut self) -> u32;

    /// What was armed before and has overflowed unnoticed is not to be reported: it is armed anew next, or
    /// was stopped. A driver whose [`PmuEvent::rearm`] and [`PmuEvent::stop`] leave nothing of it has nothing
    /// to do.
    fn forget_overflows(&mut self) {
        let _ = self.take_overflows();
    }

    /// [`PmuEvent::take_overflows`] and, if there was one, [`PmuEvent::read`] in one go: the count when the
    /// armed overflow was noticed, `None` if there was none. This is the hot path; a driver that learns the
    /// count together with the overflow answers both without a system call.
    fn overflowed(&mut self) -> Option<u64> {
        (self.take_overflows() > 0).then(|| self.read())
    }

    /// [`PmuEvent::arm`] for a caller that knows the count, because it was just told `count`: the next
    /// overflow comes when `overflow_in` more have been counted than that. A driver whose host goes on from
    /// overflow to overflow by itself has nothing to do while the distance stays the same.
    ///
    /// # Errors
    /// As [`PmuEvent::arm`].
    fn rearm(&mut self, count: u64, overflow_in: u64) -> Result<(), PmuError> {
        let _ = count;
        self.arm(overflow_in)
    }

    /// For counts that belong to a package (the whole VM): the total, which *replaces* the event's own count
    /// and its children's in every reading. `None` for ordinary events.
    fn count(&mut self) -> Option<u64> {
        None
    }

    /// How old, in nanoseconds, what [`PmuEvent::count`] gives is; 0 when it is taken at the moment of
    /// asking.
    ///
    /// A driver that cannot reach its package from every thread refreshes the total when one of the package's
    /// vCPUs is scheduled, and gives that one until the next time. The core passes it on unmodified either
    /// way: such a total grows in steps, never shrinks, and may lag by this much.
    fn count_age_ns(&mut self) -> u64 {
        0
    }

    /// Index for a user-space read through the control page (`index` field), 0 when not offered.
    fn user_index(&self) -> u32 {
        0
    }
}
