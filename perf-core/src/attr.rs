//! Event attributes: what an event counts and how. Mirrors `struct perf_event_attr` of `perf_event_open(2)`.

/// `perf_event_attr.type`: which driver serves the event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EventType(pub u32);

impl EventType {
    /// `PERF_TYPE_HARDWARE`: generalised hardware events.
    pub const HARDWARE: Self = Self(0);
    /// `PERF_TYPE_SOFTWARE`: events the host kernel counts in software.
    pub const SOFTWARE: Self = Self(1);
    /// `PERF_TYPE_RAW`: an event select of the host's PMU.
    pub const RAW: Self = Self(4);
    /// Perfvisor: the vCPU clock (cycles and ref-cycles from guest run time). Outside the kernel's static range.
    pub const CLOCK: Self = Self(0x100);
    /// Perfvisor: KVM binary statistics.
    pub const KVM: Self = Self(0x101);
    /// Perfvisor: simulated counters, for tests only.
    pub const SIM: Self = Self(0x102);
    /// Perfvisor: counts fed by the VMM (exact backing, paravirtual events).
    pub const FED: Self = Self(0x103);
}

/// Attributes of an event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attr {
    /// Which driver.
    pub ty: EventType,
    /// Driver-specific event selector.
    pub config: u64,
    /// Counts between overflows (`freq == false`) or overflows per second; 0: a counting event.
    pub sample_period: u64,
    /// `sample_period` is a frequency in Hz.
    pub freq: bool,
    /// Created disabled.
    pub disabled: bool,
    /// Covers vCPUs added later.
    pub inherit: bool,
    /// Always on, or in the error state.
    pub pinned: bool,
    /// Alone on the PMU.
    pub exclusive: bool,
    /// Do not count guest CPL3.
    pub exclude_user: bool,
    /// Do not count guest CPL0.
    pub exclude_kernel: bool,
    /// Do not count the host. Always set for a guest's own counters.
    pub exclude_host: bool,
    /// Do not count the guest.
    pub exclude_guest: bool,
}
