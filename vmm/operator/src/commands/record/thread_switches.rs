//! Reads the context switches of the vCPUs' threads on the host (`--switch-events`).

use std::fmt;
use std::fs::File;
use std::time::Duration;

use control_api::client::Client;
use control_api::request;
use perf_core::pmu::host::{HostRingStats, ThreadSwitch, ThreadSwitchKind, ThreadSwitchRing};

use super::super::OperatorCommandError;

/// Size of a vCPU's ring, as the binary logarithm of the number of pages. The ring holds 4,096
/// switches of 32 bytes.
const RING_LOG2_PAGES: u32 = 5;

/// The context switches of one vCPU's thread.
pub(super) struct VcpuSwitches {
    pub vcpu: u32,
    ring: ThreadSwitchRing,
    /// Start of the current preemption, in nanoseconds of `CLOCK_MONOTONIC`.
    preempted_at_ns: Option<u64>,
    stolen: StolenTime,
}

impl VcpuSwitches {
    /// Maps the ring of a vCPU.
    ///
    /// # Errors
    /// Returns an error if the VM refuses the ring or the ring cannot be mapped.
    pub(super) fn open(client: &mut Client, vcpu: u32) -> Result<Self, OperatorCommandError> {
        let ((), fd): ((), File) = client.call_with_file(request::ThreadSwitches { vcpu })?;
        let ring = ThreadSwitchRing::map(fd.into(), RING_LOG2_PAGES)
            .map_err(|source| OperatorCommandError::SwitchRing { vcpu, source })?;
        Ok(Self {
            vcpu,
            ring,
            preempted_at_ns: None,
            stolen: StolenTime::default(),
        })
    }

    /// Passes each new context switch in the ring to `each`.
    pub(super) fn drain(&mut self, mut each: impl FnMut(ThreadSwitch)) -> HostRingStats {
        self.ring.drain(|switch| {
            match (switch.kind, self.preempted_at_ns.take()) {
                (ThreadSwitchKind::Preempted, _) => self.preempted_at_ns = Some(switch.time_ns),
                (ThreadSwitchKind::In, Some(since_ns)) => {
                    self.stolen.add(switch.time_ns.saturating_sub(since_ns));
                }
                (ThreadSwitchKind::In, None) | (ThreadSwitchKind::Blocked, _) => {}
            }
            each(switch);
        })
    }

    /// Returns the number and duration of the vCPU's preemptions that have ended.
    pub(super) fn stolen(&self) -> StolenTime {
        self.stolen
    }
}

/// Number and total duration of preemptions of vCPUs by the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct StolenTime {
    preemptions: u64,
    ns: u64,
}

impl StolenTime {
    fn add(&mut self, ns: u64) {
        self.preemptions += 1;
        self.ns = self.ns.saturating_add(ns);
    }

    /// Adds the preemptions of another vCPU.
    pub(super) fn merge(&mut self, other: Self) {
        self.preemptions += other.preemptions;
        self.ns = self.ns.saturating_add(other.ns);
    }
}

impl fmt::Display for StolenTime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = Duration::from_nanos(self.ns);
        write!(
            f,
            "the host preempted the vCPUs {} times, for {time:.1?}",
            self.preemptions
        )
    }
}
