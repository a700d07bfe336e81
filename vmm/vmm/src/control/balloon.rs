//! Answers the requests of control clients about the memory balloon.

use std::sync::Arc;

use control_api::balloon::{BalloonInfo, BalloonStatistics};
use control_api::protocol::{RequestError, RequestErrorKind};
use virtio_devices::balloon::control::{BalloonControl, BalloonRequestError};
use virtio_devices::balloon::pages::PAGE_BYTES;
use virtio_devices::balloon::statistics::{BalloonStatisticTag, GuestMemoryStatistics};

use super::session::fail;

/// Applies `change` to the VM's memory balloon, and returns the new state of the balloon.
pub(super) fn change(
    balloon: Option<&Arc<BalloonControl>>,
    change: impl FnOnce(&BalloonControl) -> Result<(), BalloonRequestError>,
) -> Result<BalloonInfo, RequestError> {
    let Some(balloon) = balloon else {
        return fail(
            RequestErrorKind::Unsupported,
            "the VM has no balloon; start it with --balloon",
        );
    };
    match change(balloon) {
        Ok(()) => Ok(info(balloon)),
        Err(e) => fail(RequestErrorKind::Invalid, e.to_string()),
    }
}

/// Returns the state of the VM's memory balloon.
pub(super) fn info(balloon: &BalloonControl) -> BalloonInfo {
    let state = balloon.state();
    let config = state.config;
    BalloonInfo {
        target_bytes: u64::from(state.target_pages) * PAGE_BYTES,
        actual_bytes: u64::from(state.actual_pages) * PAGE_BYTES,
        released_bytes: state.released_bytes,
        deflate_on_oom: config.deflate_on_oom,
        free_page_reporting: config.free_page_reporting,
        statistics_interval_s: config.statistics_interval_s,
        statistics: state.statistics.as_ref().map(statistics),
    }
}

fn statistics(of: &GuestMemoryStatistics) -> BalloonStatistics {
    BalloonStatistics {
        swap_in: of.get(BalloonStatisticTag::SwapIn),
        swap_out: of.get(BalloonStatisticTag::SwapOut),
        major_faults: of.get(BalloonStatisticTag::MajorFaults),
        minor_faults: of.get(BalloonStatisticTag::MinorFaults),
        free_memory: of.get(BalloonStatisticTag::FreeMemory),
        total_memory: of.get(BalloonStatisticTag::TotalMemory),
        available_memory: of.get(BalloonStatisticTag::AvailableMemory),
        disk_caches: of.get(BalloonStatisticTag::DiskCaches),
        hugetlb_allocations: of.get(BalloonStatisticTag::HugetlbAllocations),
        hugetlb_failures: of.get(BalloonStatisticTag::HugetlbFailures),
        oom_kill: of.get(BalloonStatisticTag::OomKills),
        alloc_stall: of.get(BalloonStatisticTag::AllocationStalls),
        async_scan: of.get(BalloonStatisticTag::AsyncScan),
        direct_scan: of.get(BalloonStatisticTag::DirectScan),
        async_reclaim: of.get(BalloonStatisticTag::AsyncReclaim),
        direct_reclaim: of.get(BalloonStatisticTag::DirectReclaim),
    }
}
