//! Requests to a vCPU's own thread: what only it may do with its PMU.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vpmu::EventFilter;

use control_api::protocol::VcpuView;

/// What is asked of a vCPU.
#[derive(Debug, Default)]
pub struct Mail {
    /// Look at the guest's counters.
    pub view: Option<u64>,
    /// Use this filter from now on.
    pub filter: Option<Arc<EventFilter>>,
    /// Look for the guest's kernel, from this vCPU's registers.
    pub find_kernel: bool,
}

#[derive(Debug, Default)]
struct Inner {
    mail: Mail,
    /// The last look that was asked for.
    asked: Option<u64>,
    /// The last look and its number.
    seen: Option<(u64, VcpuView)>,
}

/// One vCPU's mailbox. Who posts must then kick the vCPU, and wake it if it is parked.
#[derive(Debug, Default)]
pub struct Mailbox {
    waiting: AtomicBool,
    inner: Mutex<Inner>,
}

impl Mailbox {
    /// Whether there is mail: one relaxed load, for the vCPU's loop.
    #[inline]
    pub fn has_mail(&self) -> bool {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Takes the mail. On the vCPU's thread.
    pub fn take(&self) -> Mail {
        let mut inner = self.lock();
        self.waiting.store(false, Ordering::SeqCst);
        std::mem::take(&mut inner.mail)
    }

    /// Answers a request for a look. On the vCPU's thread.
    pub fn answer(&self, generation: u64, view: VcpuView) {
        self.lock().seen = Some((generation, view));
    }

    /// Asks for a look.
    pub fn ask_view(&self, generation: u64) {
        let mut inner = self.lock();
        inner.mail.view = Some(generation);
        inner.asked = Some(generation);
        drop(inner);
        self.waiting.store(true, Ordering::SeqCst);
    }

    /// Asks for a search for the guest's kernel.
    pub fn ask_kernel(&self) {
        self.lock().mail.find_kernel = true;
        self.waiting.store(true, Ordering::SeqCst);
    }

    /// Sends a filter.
    pub fn send_filter(&self, filter: Arc<EventFilter>) {
        self.lock().mail.filter = Some(filter);
        self.waiting.store(true, Ordering::SeqCst);
    }

    /// Whether the look `generation` was asked for here: not of a vCPU that came later.
    pub fn was_asked(&self, generation: u64) -> bool {
        self.lock().asked.is_some_and(|asked| asked >= generation)
    }

    /// The look `generation` or a later one.
    pub fn view(&self, generation: u64) -> Option<VcpuView> {
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

    /// An older look never passes for a newer one.
    #[test]
    fn a_view_is_that_of_its_request_or_later() {
        let mailbox = Mailbox::default();
        assert!(!mailbox.has_mail());
        assert!(!mailbox.was_asked(2));
        mailbox.ask_view(2);
        assert!(mailbox.was_asked(2) && !mailbox.was_asked(3));
        assert!(mailbox.has_mail());
        assert_eq!(mailbox.take().view, Some(2));
        assert!(!mailbox.has_mail());
        assert_eq!(mailbox.view(1), None);
        let view = VcpuView {
            vcpu: 0,
            pmis: Some(0),
            uncounted_ns: Some(0),
            places_lost: Some(0),
            counters: Vec::new(),
        };
        mailbox.answer(2, view.clone());
        assert_eq!(mailbox.view(1), Some(view.clone()));
        assert_eq!(mailbox.view(2), Some(view));
        assert_eq!(mailbox.view(3), None);
    }
}
