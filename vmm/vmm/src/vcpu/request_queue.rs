//! Requests to a vCPU thread, for operations that only this thread may perform.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use snapshot::state::SavedVcpu;
use vpmu::EventFilter;

use super::saved::SaveVcpuError;
use crate::kvm::saved_vcpu::VcpuStateLayout;
use crate::pmu::guest_view::VcpuPmuStatus;

/// Requests that a vCPU thread has not handled yet.
#[derive(Debug, Default)]
pub struct VcpuRequests {
    /// Generation number with which the vCPU must store a view of the guest's counters, if
    /// requested.
    pub view: Option<u64>,
    /// Event filter that the vCPU must apply to the guest's counters, if requested.
    pub filter: Option<Arc<EventFilter>>,
    /// `true` to start a search for the guest's kernel, which begins at addresses in the registers
    /// of this vCPU.
    pub find_kernel: bool,
    /// `true` to complete the last exit in KVM, for a snapshot.
    pub settle: bool,
    /// Parts of the vCPU's state that must be saved for a snapshot, if requested. The vCPU must be
    /// paused and must have completed its last exit.
    pub save: Option<Arc<VcpuStateLayout>>,
}

#[derive(Debug, Default)]
struct Inner {
    mail: VcpuRequests,
    /// Generation number of the last request for a view of the guest's counters.
    asked: Option<u64>,
    /// View of the guest's counters that the vCPU has stored last, and its generation number.
    seen: Option<(u64, VcpuPmuStatus)>,
    /// `true` if the vCPU has completed its last exit since the last request to do so.
    settled: bool,
    /// Response to the last request for the state of the vCPU: the state or an error; `None` before
    /// it.
    saved: Option<Result<SavedVcpu, SaveVcpuError>>,
}

/// Requests to one vCPU, and its responses. After adding a request, the sender must kick the vCPU,
/// and must wake its thread if a pause blocks it.
#[derive(Debug, Default)]
pub struct VcpuRequestQueue {
    waiting: AtomicBool,
    inner: Mutex<Inner>,
}

impl VcpuRequestQueue {
    /// Returns `true` if there is a request. Costs one relaxed load, for use in the run loop.
    #[inline]
    pub fn has_requests(&self) -> bool {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Removes and returns all requests. Called on the vCPU thread.
    pub fn take(&self) -> VcpuRequests {
        let mut inner = self.lock();
        self.waiting.store(false, Ordering::SeqCst);
        std::mem::take(&mut inner.mail)
    }

    /// Stores the view of the guest's counters with generation number `generation`. Called on the
    /// vCPU thread.
    pub fn answer(&self, generation: u64, view: VcpuPmuStatus) {
        self.lock().seen = Some((generation, view));
    }

    /// Requests a view of the guest's counters from the vCPU, with the generation number
    /// `generation`.
    pub fn request_view(&self, generation: u64) {
        let mut inner = self.lock();
        inner.mail.view = Some(generation);
        inner.asked = Some(generation);
        drop(inner);
        self.waiting.store(true, Ordering::SeqCst);
    }

    /// Requests that the vCPU start a search for the guest's kernel.
    pub fn request_kernel_search(&self) {
        self.lock().mail.find_kernel = true;
        self.waiting.store(true, Ordering::SeqCst);
    }

    /// Requests that the vCPU apply a new event filter.
    pub fn post_filter(&self, filter: Arc<EventFilter>) {
        self.lock().mail.filter = Some(filter);
        self.waiting.store(true, Ordering::SeqCst);
    }

    /// Requests that the vCPU complete its last exit in KVM, for a snapshot. The vCPU must be
    /// paused.
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

    /// Stores the state of the vCPU, or the error. Called on the vCPU thread.
    pub(super) fn answer_saved(&self, saved: Result<SavedVcpu, SaveVcpuError>) {
        self.lock().saved = Some(saved);
    }

    /// Returns `true` if the vCPU has responded to the last request for its state.
    pub fn has_saved(&self) -> bool {
        self.lock().saved.is_some()
    }

    /// Removes and returns the response to the last request for the state of the vCPU.
    pub fn take_saved(&self) -> Option<Result<SavedVcpu, SaveVcpuError>> {
        self.lock().saved.take()
    }

    /// Returns `true` if this vCPU was asked for the view with generation number `generation`. A
    /// vCPU that was added later was not.
    pub fn is_view_requested(&self, generation: u64) -> bool {
        self.lock().asked.is_some_and(|asked| asked >= generation)
    }

    /// Returns the stored view of the guest's counters, or `None` if it is older than `generation`.
    pub fn view(&self, generation: u64) -> Option<VcpuPmuStatus> {
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

    /// The response to a request for a view of the guest's counters is never an older view.
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
        let view = VcpuPmuStatus {
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
