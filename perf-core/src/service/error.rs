//! Error types of calls to the core.

use crate::attr::{AttrError, EventType};
use crate::pmu::{PmuError, VcpuId};
use crate::ring::RingError;

/// Error of a control call, such as enabling or reading an event.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PerfEventControlError {
    /// The event is closed.
    #[error("the event is closed")]
    Closed,
    /// The buffer is too short for the reading.
    #[error("a reading needs {needed} bytes, but the buffer has {available}")]
    NoSpace {
        /// Required size of the buffer, in bytes.
        needed: usize,
        /// Size of the caller's buffer, in bytes.
        available: usize,
    },
    /// The event does not support the operation.
    #[error("{0}")]
    Invalid(&'static str),
    /// The driver returned an error.
    #[error(transparent)]
    Driver(#[from] PmuError),
}

impl PerfEventControlError {
    /// Returns the errno that `ioctl(2)` or `read(2)` on a kernel event returns for this error.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Closed => libc::EBADF,
            Self::NoSpace { .. } => libc::ENOSPC,
            Self::Invalid(_) => libc::EINVAL,
            Self::Driver(error) => error.errno(),
        }
    }
}

/// Error returned when an event cannot be opened ([`crate::PerfCore::open`]) or a vCPU cannot be
/// added or removed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PerfEventOpenError {
    /// The attributes are malformed.
    #[error(transparent)]
    Attr(#[from] AttrError),
    /// The event counts the host kernel, which requires the admin role at this paranoid level.
    #[error(
        "counting the host kernel is denied at this paranoid level; exclude the host or the kernel, or use the admin role"
    )]
    HostKernelDenied,
    /// The event is VM-wide, which requires the admin role at this paranoid level.
    #[error("VM-wide events are denied at this paranoid level; open one vCPU, or use the admin role")]
    VmWideDenied,
    /// The event takes raw samples, which require the admin role at this paranoid level.
    #[error("raw samples are denied at this paranoid level; drop RAW, or use the admin role")]
    RawDenied,
    /// The event counts a whole host CPU, which requires the admin role at this paranoid level.
    #[error("events of a whole CPU are denied at this paranoid level; open a thread, or use the admin role")]
    CpuDenied,
    /// The number of the host CPU is out of range.
    #[error("CPU {0} is out of range")]
    NoSuchCpu(u32),
    /// The VM belongs to another user.
    #[error("the VM belongs to another user; use the admin role")]
    NotOwner,
    /// The sampling frequency is above the limit.
    #[error("sampling frequency of {asked} Hz exceeds the limit of {limit} Hz")]
    FrequencyTooHigh {
        /// Requested sampling frequency, in hertz.
        asked: u64,
        /// Maximum sampling frequency, in hertz.
        limit: u64,
    },
    /// The combination of attributes is invalid.
    #[error("{0}")]
    Combination(&'static str),
    /// The vCPU does not exist or is being removed.
    #[error("vCPU {} not found", .0.0)]
    NoSuchVcpu(VcpuId),
    /// The vCPU already exists.
    #[error("vCPU {} already exists", .0.0)]
    VcpuExists(VcpuId),
    /// The event cannot join the group.
    #[error("cannot join the group: {0}")]
    Group(&'static str),
    /// The group needs more slots than the PMU has for its events.
    #[error("{needed} events of the group need counters of a kind of which the PMU has {slots}")]
    GroupTooLarge {
        /// Number of events in the group that compete for the suitable slots.
        needed: usize,
        /// Number of slots that can hold these events.
        slots: usize,
    },
    /// All suitable slots of a vCPU are in use, and slots may not be shared.
    #[error(
        "all {slots} suitable counters of vCPU {} are in use and sharing is off; close an event or \
        allow sharing",
        .vcpu.0
    )]
    Overcommitted {
        /// ID of the vCPU whose slots are in use.
        vcpu: VcpuId,
        /// Number of slots that can hold the event.
        slots: usize,
    },
    /// VM-wide events use all suitable slots of each vCPU, and slots may not be shared.
    #[error(
        "VM-wide events use all {slots} suitable counters of each vCPU and sharing is off; close \
        one or allow sharing"
    )]
    OvercommittedVm {
        /// Number of slots that can hold the event.
        slots: usize,
    },
    /// The VMM does not raise a software event with this ID.
    #[error("unknown software event {0}")]
    NoSuchSoftwareEvent(u64),
    /// The output cannot be redirected to the ring of the given event.
    #[error("cannot redirect the output")]
    Output(#[source] PerfEventControlError),
    /// No driver serves this event type.
    #[error("no driver supports event type {:#x}", .0.0)]
    NoDriver(EventType),
    /// The driver returned an error.
    #[error(transparent)]
    Driver(#[from] PmuError),
}

impl PerfEventOpenError {
    /// Returns the errno that `perf_event_open(2)` returns for this error.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Attr(error) => error.errno(),
            Self::HostKernelDenied | Self::VmWideDenied | Self::CpuDenied | Self::NotOwner => libc::EACCES,
            Self::RawDenied => libc::EPERM,
            Self::FrequencyTooHigh { .. }
            | Self::Combination(_)
            | Self::Group(_)
            | Self::GroupTooLarge { .. }
            | Self::NoSuchSoftwareEvent(_)
            | Self::NoSuchCpu(_)
            | Self::NoDriver(_) => libc::EINVAL,
            Self::Output(error) => error.errno(),
            Self::NoSuchVcpu(_) => libc::ESRCH,
            Self::VcpuExists(_) => libc::EEXIST,
            Self::Overcommitted { .. } | Self::OvercommittedVm { .. } => libc::EBUSY,
            Self::Driver(error) => error.errno(),
        }
    }
}

/// Error of mapping a ring ([`crate::EventHandle::map`]).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RingMapError {
    /// The event is closed.
    #[error("the event is closed")]
    Closed,
    /// The event is already mapped with a different size.
    #[error("the event has a ring of {mapped} data pages, but {asked} were requested")]
    OtherSize {
        /// Number of data pages of the existing ring.
        mapped: usize,
        /// Requested number of data pages.
        asked: usize,
    },
    /// The output of the event is redirected to another event.
    #[error("the event writes to another event's ring")]
    Redirected,
    /// The ring would exceed the memory limit of the user.
    #[error(
        "{pages} more pages of ring memory exceed the limit of {limit} for this user; unmap a ring, raise the limit, or use the admin role"
    )]
    MemoryLimit {
        /// Requested number of pages, including the control page.
        pages: u64,
        /// Maximum number of ring pages of the user.
        limit: u64,
    },
    /// The ring cannot be created.
    #[error(transparent)]
    Ring(#[from] RingError),
}

impl RingMapError {
    /// Returns the errno that `mmap(2)` on a kernel event returns for this error.
    #[must_use]
    pub fn errno(&self) -> i32 {
        match self {
            Self::Closed => libc::EBADF,
            Self::OtherSize { .. } | Self::Redirected => libc::EINVAL,
            Self::MemoryLimit { .. } => libc::EPERM,
            Self::Ring(RingError::Os { .. }) => libc::ENOMEM,
            Self::Ring(_) => libc::EINVAL,
        }
    }
}
