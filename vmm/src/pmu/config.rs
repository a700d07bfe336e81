//! What the PMU of a VM is made with.

use std::sync::Arc;
use std::time::Duration;

use perf_core::mux::MuxPolicy;
use perf_core::{CoreConfig, SharePolicy};
use vpmu::{BackingPolicy, EventFilter, Model};

use crate::kvm::stepping::Stepping;

/// What the PMU of a VM is to be.
#[derive(Clone, Debug)]
pub struct PmuConfig {
    /// The model guests see.
    pub model: Model,
    /// What counts for its counters.
    pub policy: BackingPolicy,
    /// Which events may be counted.
    pub filter: Arc<EventFilter>,
    /// Whether the guest may ever count paravirtual events; else `filter` denies them, and so does any that
    /// comes later.
    pub paravirtual: bool,
    /// Whether a guest's tables of events are without what `filter` denies, too. They stay so if another
    /// filter comes.
    pub hides_denied: bool,
    /// Most PMIs per second and vCPU.
    pub pmi_limit: u32,
    /// What can be stepped on this host, for the exact backing.
    pub stepping: Stepping,
    /// Who gets the host's counters when they run out.
    pub share: SharePolicy,
    /// How events that have to share counters take turns.
    pub mux: MuxPolicy,
    /// How long turns are at first under the adaptive policy, if not as it has them by itself.
    pub turn: Option<Duration>,
    /// What operators may take.
    pub limits: OperatorLimits,
}

/// What operators of a VM may take. What is `None` is as in [`CoreConfig::default`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperatorLimits {
    /// Most samples a second of one event, and the highest frequency that may be asked for.
    pub sample_rate_hz: Option<u64>,
    /// Memory for rings that a user who is not root may have, in bytes.
    pub ring_bytes: Option<u64>,
    /// Host counters of each vCPU that only events of the whole VM may use.
    pub reserved_slots: usize,
}

impl PmuConfig {
    /// Whether the guest has KVM's own vPMU.
    pub fn is_kvms(&self) -> bool {
        self.policy == BackingPolicy::Kvm
    }

    /// How the perf core is set up for it.
    pub fn core_config(&self) -> CoreConfig {
        let mut core = CoreConfig {
            share: self.share,
            mux: self.mux,
            owner_uid: control_api::peer::own_uid(),
            turn_ns: self
                .turn
                .map(|turn| u64::try_from(turn.as_nanos()).unwrap_or(u64::MAX)),
            // The VM is its user's own: events of all its vCPUs at once tell no more than one on each does.
            paranoid: 0,
            reserved_slots: self.limits.reserved_slots,
            ..CoreConfig::default()
        };
        if let Some(hz) = self.limits.sample_rate_hz {
            core.sample_rate_hz = hz;
        }
        if let Some(bytes) = self.limits.ring_bytes {
            // One number for both parts of what the kernel allows: per CPU, and by the limit of locked
            // memory.
            (core.mlock_kb, core.memlock_kb) = (0, bytes >> 10);
        }
        core
    }
}
