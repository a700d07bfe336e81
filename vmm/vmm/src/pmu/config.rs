//! Configuration of a VM's virtual PMU.

use std::sync::Arc;
use std::time::Duration;

use perf_core::mux::MuxPolicy;
use perf_core::{PerfCoreConfig, SharePolicy};
use vpmu::{CounterBackingPolicy, EventFilter, PmiShare, PmuModel};

use crate::kvm::stepping::SteppingSupport;

/// Configuration of a VM's virtual PMU and of the events of operators.
#[derive(Clone, Debug)]
pub struct PmuConfig {
    /// PMU model presented to the guest.
    pub model: PmuModel,
    /// Policy that selects the backing (source of the counts) of the guest's counters.
    pub policy: CounterBackingPolicy,
    /// For a restored guest, the policy under which its counters were backed when it was saved.
    pub saved_policy: Option<CounterBackingPolicy>,
    /// Filter that lists the events that the guest may count.
    pub filter: Arc<EventFilter>,
    /// `true` if the guest may count paravirtual events. Otherwise `filter`, and every filter that
    /// replaces it, denies paravirtual events.
    pub paravirtual: bool,
    /// `true` if the events that `filter` denies are also removed from the event tables of the
    /// guest's kernel. A filter that is set later does not change these tables.
    pub hides_denied: bool,
    /// Maximum number of PMIs per second and vCPU.
    pub pmi_limit: u32,
    /// Maximum share of a vCPU's time that the guest's PMI handlers may take.
    pub pmi_share: PmiShare,
    /// Single-stepping features of the host's KVM, for the exact backing and for branch stacks.
    pub stepping: SteppingSupport,
    /// `true` if instruction and branch events of operators are counted by single-stepping, which
    /// requires [`CounterBackingPolicy::Exact`].
    pub steps_for_operators: bool,
    /// `true` if RDPMC is emulated with hardware breakpoints.
    pub has_rdpmc_breakpoints: bool,
    /// Policy that decides whether the guest or the operators have priority when host counters are
    /// scarce.
    pub share: SharePolicy,
    /// Multiplexing policy of events that share host counters.
    pub mux: MuxPolicy,
    /// Initial multiplexing interval for [`MuxPolicy::Adaptive`]; `None` for the default.
    pub turn: Option<Duration>,
    /// Resource limits of operators.
    pub limits: OperatorResourceLimits,
}

/// Resource limits of the operators of a VM. `None` selects the default of
/// [`PerfCoreConfig::default`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OperatorResourceLimits {
    /// Maximum sampling frequency of one event, in samples per second.
    pub sample_rate_hz: Option<u64>,
    /// Maximum ring buffer memory of a user other than root, in bytes.
    pub ring_bytes: Option<u64>,
    /// Number of host counters per vCPU that only VM-wide events may use.
    pub reserved_slots: usize,
}

impl PmuConfig {
    /// Creates a configuration that allows all events and has the default limits.
    pub fn new(model: PmuModel, policy: CounterBackingPolicy) -> Self {
        Self {
            model,
            policy,
            saved_policy: None,
            filter: Arc::new(EventFilter::allow_all()),
            paravirtual: true,
            hides_denied: false,
            pmi_limit: vpmu::DEFAULT_PMI_LIMIT,
            pmi_share: PmiShare::default_of(model.vendor()),
            stepping: SteppingSupport::default(),
            steps_for_operators: false,
            has_rdpmc_breakpoints: false,
            share: SharePolicy::default(),
            mux: MuxPolicy::default(),
            turn: None,
            limits: OperatorResourceLimits::default(),
        }
    }

    /// Returns `true` if the guest uses KVM's own vPMU.
    pub fn uses_kvm_vpmu(&self) -> bool {
        self.policy == CounterBackingPolicy::Kvm
    }

    /// Returns the configuration of perf-core that corresponds to this configuration.
    pub fn core_config(&self) -> PerfCoreConfig {
        let mut core = PerfCoreConfig {
            share: self.share,
            mux: self.mux,
            owner_uid: rustix::process::geteuid().as_raw(),
            turn_ns: self
                .turn
                .map(|turn| u64::try_from(turn.as_nanos()).unwrap_or(u64::MAX)),
            // The VM belongs to its user, so VM-wide events reveal no more than per-vCPU events.
            paranoid: 0,
            reserved_slots: self.limits.reserved_slots,
            pid: sandbox::host_pid(),
            ..PerfCoreConfig::default()
        };
        if let Some(hz) = self.limits.sample_rate_hz {
            core.sample_rate_hz = hz;
        }
        if let Some(bytes) = self.limits.ring_bytes {
            // The configured size replaces both kernel limits: the per-CPU allowance and the
            // locked-memory limit.
            (core.mlock_kb, core.memlock_kb) = (0, bytes >> 10);
        }
        core
    }
}
