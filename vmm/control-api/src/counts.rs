//! What a VM's loops have counted since it was started: the part of its metrics that no other request tells.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the loop of one vCPU counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct VcpuCounts {
    /// The vCPU.
    pub vcpu: u32,
    /// Returns of KVM_RUN to Perfvisor, for whatever reason.
    pub exits: u64,
    /// Exits by what caused them, such as `rdmsr` or `halt`.
    pub kinds: BTreeMap<String, u64>,
    /// Accesses to PMU registers that were answered with a general protection fault.
    pub register_faults: u64,
    /// PMIs that were delivered as an NMI.
    pub pmi_nmi: u64,
    /// PMIs that were delivered as a vector.
    pub pmi_vector: u64,
    /// PMIs for which the guest's LVTPC named no mode that delivers.
    pub pmi_none: u64,
    /// PMIs that the rate limit held back before they were delivered.
    pub pmi_throttled: u64,
    /// Entries at which a due PMI had to wait because the guest had masked LVTPC.
    pub pmi_masked_waits: u64,
    /// PMIs that were forgotten because the guest had served what asked for them while they waited.
    pub pmi_withdrawn: u64,
    /// Instructions that were single-stepped for the exact backing.
    pub steps: u64,
    /// Single steps whose outcome is not known.
    pub steps_lost: u64,
    /// Stretches of user code that could not be stepped.
    pub unstepped: u64,
    /// What its perf-core context holds; `None` without a PMU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<ContextCounts>,
}

/// What the perf-core context of one vCPU holds and has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ContextCounts {
    /// Events that are open, the guest's and all operators'.
    pub events: u64,
    /// Those of them that count now.
    pub active: u64,
    /// Groups that wait for a counter of the host's PMU.
    pub waiting_groups: u64,
    /// Samples written for operators.
    pub samples: u64,
    /// Samples that found no room in their ring.
    pub lost_samples: u64,
    /// How often an event that sampled too fast was held back until the next tick.
    pub throttles: u64,
}
