//! What was seen of the VMs.

use control_api::protocol::{VcpuView, VmInfo};

/// A VM on the list.
#[derive(Clone, Debug)]
pub struct Vm {
    /// Its name, and behind an at sign the user if that is another one.
    pub label: String,
    /// How it is.
    pub seen: Seen,
}

/// How a VM is.
#[derive(Clone, Debug)]
pub enum Seen {
    /// Nothing was seen yet.
    Waiting,
    /// So it was at the last look.
    Shown(Box<VmScreen>),
    /// It has ended.
    Ended,
    /// It cannot be looked at, and why.
    Failed(String),
}

/// What is shown of a VM at one moment.
#[derive(Clone, Debug)]
pub struct VmScreen {
    /// What it says of itself.
    pub vm: VmInfo,
    /// Samples taken so far.
    pub samples: u64,
    /// Samples that were lost.
    pub lost: u64,
    /// Where they fell, in no order.
    pub symbols: Vec<SymbolRow>,
    /// The vCPUs, in order.
    pub vcpus: Vec<VcpuRow>,
    /// What they left the guest for, in no order.
    pub exits: Vec<ExitRow>,
    /// What their guests count.
    pub views: Vec<VcpuView>,
}

/// A function of a process.
#[derive(Clone, Debug, PartialEq)]
pub struct SymbolRow {
    /// The weight of the samples in it: what its event counted between them, less for those of earlier
    /// screens.
    pub weight: f64,
    /// Samples in it, while it is on the list.
    pub samples: u64,
    /// The guest's process, if it is known.
    pub pid: Option<u32>,
    /// The name of the process.
    pub process: String,
    /// The file it is in.
    pub object: String,
    /// Its name.
    pub symbol: String,
    /// It is the guest kernel's.
    pub kernel: bool,
}

/// A vCPU.
#[derive(Clone, Debug, PartialEq)]
pub struct VcpuRow {
    /// Its number.
    pub vcpu: u32,
    /// Samples since the last screen.
    pub samples: u64,
    /// task-clock, steal-ns, cycles and KVM's exits, a second.
    pub cells: Vec<Cell>,
}

/// A kind of exits, of all vCPUs.
#[derive(Clone, Debug, PartialEq)]
pub struct ExitRow {
    /// One of KVM's statistics; else an exit to Perfvisor.
    pub kvm: bool,
    /// What it is for.
    pub what: String,
    /// How many there were a second.
    pub per_second: f64,
    /// Time of vCPUs that it took, of a second; KVM's statistics have none.
    pub time_share: Option<f64>,
    /// Mean time of one, ns, if any was timed.
    pub mean_ns: Option<u64>,
    /// The longest, ns.
    pub longest_ns: Option<u64>,
}

/// A rate, or why there is none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Cell {
    /// It cannot be counted here.
    NotSupported,
    /// It was not on.
    NotCounted,
    /// It was counted.
    Rate {
        /// Counts a second.
        per_second: f64,
        /// Share of the time it was on.
        share: f64,
    },
}

impl Cell {
    /// Of several vCPUs together: nothing, if one of them was not counted.
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
