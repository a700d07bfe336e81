//! Opening of host events, alone or in the kernel group of another event.

use std::io;
use std::sync::Arc;

use crate::pmu::PmuError;

use perf_event_open_sys::bindings::perf_event_attr;

use super::fd::{self, PerfFd, PerfMap};
use super::group::{GroupMember, KernelGroup, READ_GROUP};
use super::{HostEventTarget, HostPmu, OverflowSignal};

/// Parameters with which an event was opened, kept to reopen the event when it leaves its group.
#[derive(Debug)]
pub(super) struct OpenParams {
    pub(super) raw: perf_event_attr,
    pub(super) counted: HostEventTarget,
    /// ID of the thread that receives the overflow signal.
    pub(super) signal_tid: i32,
    pub(super) signal: Option<i32>,
    pub(super) hardware: bool,
    /// Set if the event counts a guest on the hardware PMU.
    pub(super) guest: bool,
    pub(super) user_read: bool,
}

/// The membership of an event in a kernel group that another event leads.
#[derive(Debug)]
pub(super) struct GroupMembership {
    pub(super) group: Arc<KernelGroup>,
    pub(super) member: Arc<GroupMember>,
}

/// Returns the error of opening an event on a CPU that does not exist or is offline.
pub(super) fn missing_cpu_error(errno: i32) -> PmuError {
    PmuError::Os {
        what: "counting a CPU that the host does not have, or that is offline,",
        source: io::Error::from_raw_os_error(errno),
    }
}

impl OpenParams {
    /// Converts an error of opening an event with these parameters.
    fn open_error(&self, source: io::Error) -> PmuError {
        let HostEventTarget::Cpu(cpu) = self.counted else {
            return HostPmu::open_error(source, self.guest);
        };
        match source.raw_os_error() {
            Some(libc::EACCES | libc::EPERM) => PmuError::Os {
                what: "counting a whole CPU, which takes CAP_PERFMON or a kernel.perf_event_paranoid of 0 or less,",
                source,
            },
            Some(libc::ENODEV) => missing_cpu_error(libc::ENODEV),
            // For a CPU number out of range, the kernel returns only `EINVAL`.
            Some(libc::EINVAL) if cpu >= fd::cpus() => missing_cpu_error(libc::EINVAL),
            _ => HostPmu::open_error(source, self.guest),
        }
    }

    pub(super) fn open(
        &self,
        raw: &mut perf_event_attr,
        leader: Option<&PerfFd>,
    ) -> Result<(Arc<PerfFd>, Option<PerfMap>), PmuError> {
        let tid = self.signal_tid;
        let overflow = self.signal.map(|signal| OverflowSignal { tid, signal });
        let fd =
            PerfFd::open_in_group(raw, self.counted, leader, overflow).map_err(|e| self.open_error(e))?;
        let map = self.map(&fd);
        Ok((Arc::new(fd), map))
    }

    /// Opens the event in `group`. Returns `None` if the event cannot join the group or would count
    /// differently in the group. `counts` is set for an event that does not sample.
    pub(super) fn join(
        &self,
        group: Arc<KernelGroup>,
        counts: bool,
    ) -> Option<(GroupMembership, Arc<PerfFd>, Option<PerfMap>)> {
        // The kernel may silently take the counters of a group away if its leader is not pinned.
        if group.counted != self.counted || self.hardware && !group.pinned || group.is_full() {
            return None;
        }
        let mut raw = self.raw;
        raw.set_pinned(0);
        let reads = counts && group.needs_reader();
        if reads {
            raw.read_format = READ_GROUP;
        }
        let joined = self.open(&mut raw, Some(group.leader())).and_then(|(fd, map)| {
            let member = group
                .join(Arc::clone(&fd), reads, !self.hardware)
                .map_err(|source| PmuError::Os {
                    what: "asking for the id of a host event",
                    source,
                })?;
            Ok((member, fd, map))
        });
        match joined {
            Ok((member, fd, map)) => Some((GroupMembership { group, member }, fd, map)),
            Err(e) => {
                log::debug!(
                    "a host event goes on and off apart from its group: {}",
                    crate::error_line(&e)
                );
                None
            }
        }
    }

    /// Maps pages of the event that save system calls: a ring, to which the kernel writes the count
    /// at each overflow, if the event sends a signal, or else the control page, if the count is
    /// read with `rdpmc`. The event also works without these pages.
    fn map(&self, fd: &PerfFd) -> Option<PerfMap> {
        let ring = || {
            fd.map(Some(0))
                .inspect_err(|e| {
                    log::debug!(
                        "overflows of a host event need a system call more: {}",
                        crate::error_line(e)
                    )
                })
                .ok()
        };
        let page = || {
            fd.map(None)
                .inspect_err(|e| {
                    log::debug!(
                        "reads of a host event need a system call: {}",
                        crate::error_line(e)
                    )
                })
                .ok()
        };
        let map = if self.signal.is_some() { ring() } else { None };
        map.or_else(|| if self.user_read { page() } else { None })
    }
}
