//! Why a call failed.

use crate::attr::{AttrError, EventType};
use crate::pmu::{PmuError, VcpuId};
use crate::ring::RingError;

/// Why a control call failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The event is closed.
    #[error("the event is closed")]
    Closed,
    /// The buffer is too short for the reading.
    #[error("a reading takes {needed} bytes, the buffer has {available}")]
    NoSpace {
        /// Bytes needed.
        needed: usize,
        /// Bytes there are.
        available: usize,
    },
    /// The call does not fit the event.
    #[error("{0}")]
    Invalid(&'static str),
    /// The driver refused.
    #[error(transparent)]
    Driver(#[from] PmuError),
}

impl ControlError {
    /// The error number `ioctl(2)` or `read(2)` on a kernel event gives in this case.
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

/// Why an event was not opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// The attributes are malformed.
    #[error(transparent)]
    Attr(#[from] AttrError),
    /// Counting the host's kernel needs the admin role at this paranoid level.
    #[error(
        "counting the host kernel is denied at this paranoid level; exclude the host or the kernel, or use the admin role"
    )]
    HostKernelDenied,
    /// VM-wide events need the admin role at this paranoid level.
    #[error("VM-wide events are denied at this paranoid level; open one vCPU, or use the admin role")]
    VmWideDenied,
    /// Raw samples need the admin role at this paranoid level.
    #[error("raw samples are denied at this paranoid level; drop RAW, or use the admin role")]
    RawDenied,
    /// Events of a whole CPU need the admin role at this paranoid level.
    #[error("events of a whole CPU are denied at this paranoid level; open a thread, or use the admin role")]
    CpuDenied,
    /// The number is too high for a CPU.
    #[error("no host has a CPU {0}")]
    NoSuchCpu(u32),
    /// The VM belongs to someone else.
    #[error("the VM belongs to another user; use the admin role")]
    NotOwner,
    /// The sampling frequency is above the limit.
    #[error("sampling frequency {asked} Hz is above the limit of {limit} Hz")]
    FrequencyTooHigh {
        /// Asked for, in Hz.
        asked: u64,
        /// The limit, in Hz.
        limit: u64,
    },
    /// Attributes that do not go together.
    #[error("{0}")]
    Combination(&'static str),
    /// No such vCPU, or it is being removed.
    #[error("no vCPU {}", .0.0)]
    NoSuchVcpu(VcpuId),
    /// The vCPU is there already.
    #[error("vCPU {} exists already", .0.0)]
    VcpuExists(VcpuId),
    /// The group handle cannot be joined.
    #[error("cannot join the group: {0}")]
    Group(&'static str),
    /// The group needs more slots than there are for its events.
    #[error("{needed} events of the group need a slot of a kind of which the PMU has {slots}")]
    GroupTooLarge {
        /// Events that can share these slots only.
        needed: usize,
        /// Slots there are for them.
        slots: usize,
    },
    /// Sharing is off and the slots are taken.
    #[error(
        "all {slots} slots of vCPU {} that could hold it are taken and sharing is off; close an event or allow sharing",
        .vcpu.0
    )]
    Overcommitted {
        /// Where.
        vcpu: VcpuId,
        /// Slots there are for such an event.
        slots: usize,
    },
    /// Sharing is off and VM-wide events would take more slots than a vCPU has.
    #[error(
        "VM-wide events have taken all {slots} slots of each vCPU that could hold it and sharing is off; close one or allow sharing"
    )]
    OvercommittedVm {
        /// Slots there are for such an event.
        slots: usize,
    },
    /// The VMM raises no such event.
    #[error("the VMM raises no event {0}")]
    NoSuchSoftwareEvent(u64),
    /// Records cannot be redirected to the given handle.
    #[error("cannot redirect the output")]
    Output(#[source] ControlError),
    /// No driver serves the type.
    #[error("no driver serves event type {:#x}", .0.0)]
    NoDriver(EventType),
    /// The driver refused.
    #[error(transparent)]
    Driver(#[from] PmuError),
}

impl OpenError {
    /// The error number `perf_event_open(2)` gives in this case.
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

/// Why a ring was not attached.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MapError {
    /// The event is closed.
    #[error("the event is closed")]
    Closed,
    /// The event is mapped with another size.
    #[error("the event has a ring of {mapped} data pages, not {asked}")]
    OtherSize {
        /// Data pages of the ring there is.
        mapped: usize,
        /// Data pages asked for.
        asked: usize,
    },
    /// Its output goes to another event.
    #[error("the event writes to another event's ring")]
    Redirected,
    /// The operator's memory limit.
    #[error(
        "{pages} more pages of ring memory exceed the limit of {limit} for this user; unmap a ring, raise the limit, or use the admin role"
    )]
    MemoryLimit {
        /// Pages asked for, the control page included.
        pages: u64,
        /// Pages the user may have in all.
        limit: u64,
    },
    /// The ring could not be made.
    #[error(transparent)]
    Ring(#[from] RingError),
}

impl MapError {
    /// The error number `mmap(2)` of a kernel event gives in this case.
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
