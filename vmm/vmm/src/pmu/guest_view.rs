//! The guest's PMU on one vCPU, as the guest programmed it.

use vpmu::GuestCounterStatus;

/// PMU of the guest on one vCPU, as the guest programmed it. KVM's own vPMU does not report some of
/// the values, which are then `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VcpuPmuStatus {
    /// Number of the vCPU.
    pub vcpu: u32,
    /// Number of PMIs delivered to the guest.
    pub pmis: Option<u64>,
    /// Total time during which at least one enabled counter of the guest was not counted, in
    /// nanoseconds.
    pub uncounted_ns: Option<u64>,
    /// Number of times that an enabled guest counter had no host counter, because it lost it or
    /// found none free.
    pub places_lost: Option<u64>,
    /// Counters of the guest's PMU.
    pub counters: Vec<GuestCounterStatus>,
    /// `true` if the guest uses KVM's own vPMU. In this case, only the register values in
    /// `counters` are valid.
    pub counted_by_kvm: bool,
}
