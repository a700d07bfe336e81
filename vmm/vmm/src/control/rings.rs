//! The rings to which the sampling events of a vCPU write.

use std::sync::Arc;

use perf_core::ring::Ring;
use perf_core::{EventHandle, RingMapError, error_line};

use super::session::fail;
use control_api::protocol::{RequestError, RequestErrorKind};

/// Size and mode of the rings of a vCPU's sampling events.
#[derive(Clone, Copy, Debug)]
pub struct RingLayout {
    /// Number of data pages of the ring.
    pub pages: u32,
    /// `true` if new records overwrite the oldest ones.
    pub overwrite: bool,
}

/// Creates one ring for the events `first` and `others`. If an event cannot use the ring, all
/// events are detached from it.
pub(super) fn shared_ring(
    first: &EventHandle,
    others: &[&EventHandle],
    layout: RingLayout,
) -> Result<Arc<Ring>, RequestError> {
    let ring = first.map(layout.pages as usize, !layout.overwrite).map_err(|e| RequestError {
        kind: match e {
            RingMapError::MemoryLimit { .. } => RequestErrorKind::Limit,
            _ => RequestErrorKind::Internal,
        },
        message: match &e {
            RingMapError::MemoryLimit { pages, limit } => format!(
                "{pages} more pages of ring memory exceed the limit of {limit} for this user; use smaller rings (-m), \
                 or start the VM with more --ring-memory"
            ),
            _ => error_line(&e),
        },
    })?;
    for (at, other) in others.iter().enumerate() {
        if let Err(e) = other.set_output(Some(first)) {
            for redirected in others.iter().take(at) {
                if let Err(e) = redirected.set_output(None) {
                    log::debug!("an event without a ring: {e}");
                }
            }
            first.unmap();
            return fail(RequestErrorKind::Internal, error_line(&e));
        }
    }
    Ok(ring)
}

#[cfg(test)]
mod tests {
    use perf_core::pmu::VcpuId;
    use perf_core::pmu::sim::SimPmu;
    use perf_core::{Attr, EventOpenTarget, EventType, OpenFlags, PerfCore, SessionRole};

    use super::*;

    /// If one event cannot use a shared ring, the ring is detached from all events, and a ring can
    /// be requested again.
    #[test]
    fn failed_shared_ring_is_detached() {
        let core = PerfCore::builder()
            .driver(Arc::new(SimPmu::with_slots(4)))
            .build()
            .unwrap();
        let _context = core.add_vcpu(VcpuId(0), 1).unwrap();
        let session = core.session(0, SessionRole::Admin);
        let open = || {
            let attr = Attr::sampling(EventType::SIM, 1, 100);
            core.open(
                &session,
                attr,
                EventOpenTarget::Vcpu(VcpuId(0)),
                None,
                OpenFlags::default(),
            )
            .unwrap()
        };
        let (first, second, third) = (open(), open(), open());
        let layout = |pages| RingLayout {
            pages,
            overwrite: false,
        };
        let before = core.ring_pages(0);
        third.map(1, true).unwrap();
        assert!(shared_ring(&first, &[&second, &third], layout(4)).is_err());
        assert!(!first.unmap(), "it is mapped no more");
        third.unmap();
        assert_eq!(core.ring_pages(0), before, "its pages are not charged any more");
        // A ring of a different size can be created, because the first ring was removed. An event
        // that already writes to a ring accepts no other ring.
        shared_ring(&second, &[&first, &third], layout(8)).unwrap();
        assert!(first.map(8, true).is_err() && third.map(8, true).is_err());
    }
}
