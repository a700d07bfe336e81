//! Statistics of the vCPU run loops since the VM started, for metrics. Only the call `counts`
//! reports these statistics.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Counters of one vCPU's run loop.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct VcpuCounts {
    /// The vCPU.
    pub vcpu: u32,
    /// Number of returns from KVM_RUN, for any reason.
    pub exits: u64,
    /// Number of exits by cause, such as `rdmsr` or `halt`.
    pub kinds: BTreeMap<String, u64>,
    /// Number of accesses to PMU registers that raised a general protection fault.
    pub register_faults: u64,
    /// Number of PMIs delivered as an NMI.
    pub pmi_nmi: u64,
    /// Number of PMIs delivered as an interrupt vector.
    pub pmi_vector: u64,
    /// Number of PMIs that raised no interrupt because of the delivery mode in the guest's LVTPC.
    pub pmi_none: u64,
    /// Number of PMIs delayed by the rate limit.
    pub pmi_throttled: u64,
    /// Number of PMIs delayed because the guest's PMI handlers had used up the share of the vCPU's
    /// time that they are allowed.
    pub pmi_held: u64,
    /// Total delay of all delayed PMIs that were eventually delivered, in nanoseconds.
    pub pmi_held_ns: u64,
    /// Number of VM entries at which a due PMI had to wait because the guest had masked LVTPC.
    pub pmi_masked_waits: u64,
    /// Number of PMIs withdrawn because the guest had served or stopped the counters that requested
    /// them before delivery.
    pub pmi_withdrawn: u64,
    /// Number of instructions that were single-stepped to count events exactly (exact backing).
    pub steps: u64,
    /// Number of single steps with an unknown outcome.
    pub steps_lost: u64,
    /// Number of stretches of user code that could not be single-stepped.
    pub unstepped: u64,
    /// State of the vCPU's perf-core context; `None` without a PMU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context: Option<ContextCounts>,
}

/// State and counters of one vCPU's perf-core context.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ContextCounts {
    /// Number of open events of the guest and all operators.
    pub events: u64,
    /// Number of open events that are counting.
    pub active: u64,
    /// Number of event groups waiting for a counter of the host's PMU.
    pub waiting_groups: u64,
    /// Number of samples written to the rings of operators.
    pub samples: u64,
    /// Number of samples lost because their ring was full.
    pub lost_samples: u64,
    /// Number of times an event was throttled until the next tick because it sampled too fast.
    pub throttles: u64,
}
