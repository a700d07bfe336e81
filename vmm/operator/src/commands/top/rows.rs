//! Data that `perfvisor top` displays about the VMs.

use control_api::protocol::{VcpuView, VmInfo};

/// A VM in the list of `perfvisor top`.
#[derive(Clone, Debug)]
pub struct TopVmEntry {
    /// Name of the VM, followed by `@` and the user if the owner is another user.
    pub label: String,
    /// Observed state of the VM.
    pub state: ObservedVmState,
}

/// Observed state of a VM.
#[derive(Clone, Debug)]
pub enum ObservedVmState {
    /// The VM has not sent data yet.
    Waiting,
    /// The VM has sent data. The value is the data of the last update.
    Shown(Box<TopVmData>),
    /// The VM has terminated.
    Ended,
    /// The VM cannot be observed. The value is the reason.
    Failed(String),
}

/// Data of one VM for display.
#[derive(Clone, Debug)]
pub struct TopVmData {
    /// Description of the VM.
    pub vm: VmInfo,
    /// Number of samples of the VM so far.
    pub samples: u64,
    /// Number of samples of the VM that were lost so far.
    pub lost: u64,
    /// Functions in which the VM was sampled, unsorted.
    pub symbols: Vec<TopSymbolRow>,
    /// Rows of the vCPUs, in index order.
    pub vcpus: Vec<TopVcpuRow>,
    /// Exits by reason, unsorted.
    pub exits: Vec<TopExitRow>,
    /// Counters that the guest has programmed.
    pub views: Vec<VcpuView>,
}

/// A sampled function of a process.
#[derive(Clone, Debug, PartialEq)]
pub struct TopSymbolRow {
    /// Sum of the decayed weights of the function's samples. The initial weight of a sample is the
    /// event count since the previous sample. Each update reduces the weights.
    pub weight: f64,
    /// Number of samples since the function was added to the list.
    pub samples: u64,
    /// Process ID in the guest, if known.
    pub pid: Option<u32>,
    /// Process name.
    pub process: String,
    /// Name of the module that contains the function.
    pub object: String,
    /// Name of the function.
    pub symbol: String,
    /// `true` for a function of the guest kernel.
    pub kernel: bool,
}

/// Samples and event rates of one vCPU since the last update.
#[derive(Clone, Debug, PartialEq)]
pub struct TopVcpuRow {
    /// Index of the vCPU.
    pub vcpu: u32,
    /// Number of samples since the last update.
    pub samples: u64,
    /// Rates of task-clock, steal-ns, cycles and KVM exits per second.
    pub cells: Vec<EventRateCell>,
}

/// A row of the exit table: the exits of all vCPUs with one reason, or one KVM statistic.
#[derive(Clone, Debug, PartialEq)]
pub struct TopExitRow {
    /// `true` for a KVM statistic, `false` for an exit to user space.
    pub kvm: bool,
    /// Name of the exit reason or of the KVM statistic.
    pub what: String,
    /// Number of exits per second.
    pub per_second: f64,
    /// Share of the vCPUs' time that is spent on exits with this reason, from 0 to 1; `None` for a
    /// KVM statistic.
    pub time_share: Option<f64>,
    /// Mean duration of the exits, in nanoseconds; `None` if no exit was timed.
    pub mean_ns: Option<u64>,
    /// Maximum duration of an exit, in nanoseconds, if known.
    pub longest_ns: Option<u64>,
}

/// The rate of an event on a vCPU, or the reason the rate is missing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum EventRateCell {
    /// The event is unsupported on this host.
    NotSupported,
    /// The event was not running.
    NotCounted,
    /// Rate of an event that was counted.
    Rate {
        /// Number of events per second.
        per_second: f64,
        /// Ratio of the event's running time to its enabled time.
        share: f64,
    },
}

impl EventRateCell {
    /// Returns the sum of the rates on several vCPUs. If a vCPU has no rate, returns the reason
    /// instead.
    pub fn sum(cells: impl Iterator<Item = Self>) -> Self {
        let add = |sum: Option<Self>, cell: Self| match (sum, cell) {
            (None, cell) => Some(cell),
            (
                Some(Self::Rate {
                    per_second: a,
                    share: s,
                }),
                Self::Rate {
                    per_second: b,
                    share: t,
                },
            ) => {
                let (per_second, share) = (a + b, s.min(t));
                Some(Self::Rate { per_second, share })
            }
            (Some(Self::NotSupported), _) | (_, Self::NotSupported) => Some(Self::NotSupported),
            _ => Some(Self::NotCounted),
        };
        cells.fold(None, add).unwrap_or(Self::NotCounted)
    }
}
