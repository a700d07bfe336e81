//! State and statistics of a VM's memory balloon. [`BalloonInfo`] is part of
//! [`crate::protocol::VmSettings`] and the reply to [`crate::request::Balloon`].

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// State of the balloon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct BalloonInfo {
    /// Requested size, in bytes.
    pub target_bytes: u64,
    /// Current size of the balloon, as reported by the guest's driver, in bytes.
    pub actual_bytes: u64,
    /// Memory returned to the host since the VM started, in bytes. A page is counted each time it
    /// is returned.
    pub released_bytes: u64,
    /// `true` if the guest deflates the balloon before it kills a process for lack of memory.
    pub deflate_on_oom: bool,
    /// `true` if free pages of the guest are continuously returned to the host.
    pub free_page_reporting: bool,
    /// Interval of the guest's memory statistics, in seconds; 0 if they are disabled.
    pub statistics_interval_s: u16,
    /// Latest statistics; absent if the driver has sent none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub statistics: Option<BalloonStatistics>,
}

/// Memory statistics of a guest. All values are reported by its driver and not verified. A value
/// that the driver does not send is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct BalloonStatistics {
    /// Memory swapped in, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swap_in: Option<u64>,
    /// Memory swapped out, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub swap_out: Option<u64>,
    /// Number of major page faults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub major_faults: Option<u64>,
    /// Number of minor page faults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub minor_faults: Option<u64>,
    /// Unused memory, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub free_memory: Option<u64>,
    /// Total memory, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub total_memory: Option<u64>,
    /// Estimate of the memory that is available without swapping, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub available_memory: Option<u64>,
    /// Memory used by caches that can be dropped without I/O, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk_caches: Option<u64>,
    /// Number of successful huge page allocations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugetlb_allocations: Option<u64>,
    /// Number of failed huge page allocations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hugetlb_failures: Option<u64>,
    /// Number of processes killed because of lack of memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub oom_kill: Option<u64>,
    /// Number of allocations that stalled because of lack of memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alloc_stall: Option<u64>,
    /// Memory scanned by background reclaim, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub async_scan: Option<u64>,
    /// Memory scanned by direct reclaim, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub direct_scan: Option<u64>,
    /// Memory reclaimed by background reclaim, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub async_reclaim: Option<u64>,
    /// Memory reclaimed by direct reclaim, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub direct_reclaim: Option<u64>,
}
