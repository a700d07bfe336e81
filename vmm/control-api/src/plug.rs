//! State of vCPU hot-plug: the present vCPUs, and those being added or removed.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// State of vCPU hot-plug.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VcpuPlugStatus {
    /// Present vCPUs.
    pub present: Vec<u32>,
    /// Maximum number of vCPUs.
    pub max: u32,
    /// Plugged-in vCPUs that the guest has not acknowledged yet.
    pub unnoticed: Vec<u32>,
    /// vCPUs that the guest was asked to eject and has not ejected yet.
    pub asked_for: Vec<u32>,
    /// vCPUs that the guest has ejected and that are about to stop.
    pub leaving: Vec<u32>,
    /// vCPUs that the guest refused to accept or to eject at the last request.
    pub refused: Vec<VcpuRefusal>,
}

/// A guest's refusal to accept or eject a vCPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VcpuRefusal {
    /// The vCPU.
    pub vcpu: u32,
    /// Status argument of the _OST method (ACPI 6.5, tables 6.74 and 6.75).
    pub status: u32,
}
