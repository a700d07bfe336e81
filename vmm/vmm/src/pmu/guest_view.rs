//! The guest's PMU on one vCPU, as the guest programmed it.

use vpmu::CounterView;

/// The guest's PMU on one vCPU. Values are `None` where KVM's own vPMU does not report them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VcpuPmuView {
    /// vCPU number.
    pub vcpu: u32,
    /// Number of PMIs delivered.
    pub pmis: Option<u64>,
    /// Time in nanoseconds in which at least one enabled counter of the guest did not count.
    pub uncounted_ns: Option<u64>,
    /// Number of times that a guest counter lost its host counter, or was enabled without finding a
    /// free one.
    pub places_lost: Option<u64>,
    /// Counters of the guest's PMU.
    pub counters: Vec<CounterView>,
    /// `true` if the guest uses KVM's own vPMU. Only the register values in `counters` are then
    /// meaningful.
    pub counted_by_kvm: bool,
}
