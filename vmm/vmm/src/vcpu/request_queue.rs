//! Requests to a vCPU thread, for PMU operations that only this thread may perform.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use snapshot::state::SavedVcpu;
use vpmu::EventFilter;

use super::saved::SaveVcpuError;
use crate::kvm::saved_vcpu::VcpuStateLayout;
use crate::pmu::guest_view::VcpuPmuView;

/// Pending requests to a vCPU thread.
#[derive(Debug, Default)]
pub struct VcpuRequests {
    /// Generation number of the view of the guest's counters that is requested, if any.
    pub view: Option<u64>,
    /// New event filter to apply.
    pub filter: Option<Arc<EventFilter>>,
    /// `true` to locate the guest's kernel with this vCPU's registers.
    pub find_kernel: bool,
    /// `true` if the vCPU is to complete its last exit for a snapshot.
    pub settle: bool,
    /// Layout of the vCPU state to save, if a snapshot requests the state. The vCPU must be paused,
    /// with its last exit completed.
    pub save: Option<Arc<VcpuStateLayout>>,
}

#[derive(Debug, Default)]
struct Inner {
    mail: VcpuRequests,
    /// Generation number of the last requested view of the guest's counters.
    asked: Option<u64>,
    /// Generation number and contents of the last view of the guest's counters that the vCPU
    /// stored.
    seen: Option<(u64, VcpuPmuView)>,
    /// `true` if the vCPU has completed its last exit since the last request to do so.
    settled: bool,
    /// State of the vCPU that was saved in response to the last request, or the error.
    saved: Option<Result<SavedVcpu, SaveVcpuError>>,
}

/// Request queue of one vCPU. After posting a request, the sender must kick the vCPU, and wake its
/// thread if it is blocked by a pause.
#[derive(Debug, Default)]
pub struct VcpuRequestQueue {
    waiting: AtomicBool,
    inner: Mutex<Inner>,
}

impl VcpuRequestQueue {
    /// Returns `true` if a request is pending. Costs one relaxed load, for use in the run loop.
    #[inline]
    pub fn has_requests(&self) -> bool {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Takes the pending requests. Called on the vCPU thread.
    pub fn take(&self) -> VcpuRequests {
        let mut inner = self.lock();
        self.waiting.store(false, Ordering::SeqCst);
        std::mem::take(&mut inner.mail)
    }

    /// Stores the view of the guest's counters that was requested with this `generation` number.
    /// Called on the vCPU thread.
    pub fn answer(&self, generation: u64, view: VcpuPmuView) {
        self.lock().seen = Some((generation, view));
    }

    /// Requests a view of the guest's counters and gives the request the number `generation`.
    pub fn request_view(&self, generation: u64) {
        let mut inner = self.lock();
        inner.mail.view = Some(generation);
        inner.asked = Some(generation);
        drop(inner);
        self.waiting.store(true, Ordering::SeqCst);
    }

    /// Requests a search for the guest's kernel.
    pub fn request_kernel_search(&self) {
        self.lock().mail.find_kernel = true;
        self.waiting.store(true, Ordering::SeqCst);
    }

    /// Posts a new event filter.
    pub fn post_filter(&self, filter: Arc<EventFilter>) {
        self.lock().mail.filter = Some(filter);
        self.waiting.store(true, Ordering::SeqCst);
    }

    /// Asks the vCPU to complete its last exit while it is paused.
    pub fn request_settling(&self) {
        let mut inner = self.lock();
        inner.mail.settle = true;
        (inner.settled, inner.saved) = (false, None);
        drop(inner);
        self.waiting.store(true, Ordering::SeqCst);
    }

    /// Records that the vCPU has completed its last exit. Called on the vCPU thread.
    pub(super) fn answer_settled(&self) {
        self.lock().settled = true;
    }

    /// Returns `true` if the vCPU has completed its last exit since the last request to do so.
    pub fn is_settled(&self) -> bool {
        self.lock().settled
    }

    /// Requests the state of the vCPU, which must have completed its last exit.
    pub fn request_save(&self, layout: Arc<VcpuStateLayout>) {
        self.lock().mail.save = Some(layout);
        self.waiting.store(true, Ordering::SeqCst);
    }

    /// Stores the state of the vCPU. Called on the vCPU thread.
    pub(super) fn answer_saved(&self, saved: Result<SavedVcpu, SaveVcpuError>) {
        self.lock().saved = Some(saved);
    }

    /// Returns `true` if the vCPU has answered the last request for its state.
    pub fn has_saved(&self) -> bool {
        self.lock().saved.is_some()
    }

    /// Takes the answer to the last request for the state.
    pub fn take_saved(&self) -> Option<Result<SavedVcpu, SaveVcpuError>> {
        self.lock().saved.take()
    }

    /// Returns `true` if the view with number `generation` was requested from this vCPU. For a vCPU
    /// that was added after the request, returns `false`.
    pub fn is_view_requested(&self, generation: u64) -> bool {
        self.lock().asked.is_some_and(|asked| asked >= generation)
    }

    /// Returns the stored view of the guest's counters if its number is `generation` or higher.
    pub fn view(&self, generation: u64) -> Option<VcpuPmuView> {
        let inner = self.lock();
        let (seen, view) = inner.seen.as_ref()?;
        (*seen >= generation).then(|| view.clone())
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A request for a view of the guest's counters is never answered with a view from before the
    /// request.
    #[test]
    fn view_is_not_older_than_request() {
        let request_queue = VcpuRequestQueue::default();
        assert!(!request_queue.has_requests());
        assert!(!request_queue.is_view_requested(2));
        request_queue.request_view(2);
        assert!(request_queue.is_view_requested(2) && !request_queue.is_view_requested(3));
        assert!(request_queue.has_requests());
        assert_eq!(request_queue.take().view, Some(2));
        assert!(!request_queue.has_requests());
        assert_eq!(request_queue.view(1), None);
        let view = VcpuPmuView {
            vcpu: 0,
            pmis: Some(0),
            uncounted_ns: Some(0),
            places_lost: Some(0),
            counters: Vec::new(),
            counted_by_kvm: false,
        };
        request_queue.answer(2, view.clone());
        assert_eq!(request_queue.view(1), Some(view.clone()));
        assert_eq!(request_queue.view(2), Some(view));
        assert_eq!(request_queue.view(3), None);
    }
}
