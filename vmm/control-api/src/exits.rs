//! Numbers and durations of vCPU exits to user space, by exit reason.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Exits of one vCPU to user space.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VcpuExits {
    /// The vCPU.
    pub vcpu: u32,
    /// Exits by reason; reasons without exits are omitted.
    pub exits: Vec<ExitsOfReason>,
}

/// Exits of one vCPU for one reason. Times are measured from the return of KVM_RUN to its next
/// call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ExitsOfReason {
    /// Exit reason: rdmsr, wrmsr, rdpmc, port_read, port_write, mmio_read, mmio_write, debug, halt,
    /// overflow, kick, emulation or other.
    pub reason: String,
    /// Number of exits.
    pub count: u64,
    /// Number of timed exits. An exit that is still being handled, or in which the VM was paused,
    /// is not timed.
    pub timed: u64,
    /// Total time of the timed exits, in nanoseconds.
    pub time_ns: u64,
    /// Maximum time of one exit since the previous request for exits on this connection, in
    /// nanoseconds.
    pub max_ns: u64,
}
