//! Counters of a VM's run loops since its start, the part of its metrics that no other request
//! provides.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Counters of one vCPU's run loop.
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
    /// PMIs that were held back because PMI handlers had taken their share of the vCPU's time.
    pub pmi_held: u64,
    /// Total delay of the held PMIs that were delivered, in ns.
    pub pmi_held_ns: u64,
    /// Entries at which a due PMI had to wait because the guest had masked LVTPC.
    pub pmi_masked_waits: u64,
    /// PMIs that were withdrawn because the guest had cleared their cause before delivery.
    pub pmi_withdrawn: u64,
    /// Instructions that were single-stepped for the exact backing.
    pub steps: u64,
    /// Single steps whose outcome is not known.
    pub steps_lost: u64,
    /// Stretches of user code that could not be stepped.
    pub unstepped: u64,
    /// State of the vCPU's perf-core context; `None` without a PMU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<ContextCounts>,
}

/// State and counters of one vCPU's perf-core context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ContextCounts {
    /// Events that are open, the guest's and all operators'.
    pub events: u64,
    /// Number of open events that are counting now.
    pub active: u64,
    /// Number of groups waiting for a counter of the host's PMU.
    pub waiting_groups: u64,
    /// Samples written for operators.
    pub samples: u64,
    /// Samples lost because their ring was full.
    pub lost_samples: u64,
    /// Number of times an event was throttled until the next tick because it sampled too fast.
    pub throttles: u64,
}
