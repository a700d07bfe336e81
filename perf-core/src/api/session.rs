//! Sessions, which own the events that an operator or the guest opens.

use std::sync::{Arc, Weak};

use crate::api::handle::HandleInner;
use crate::attr::Attr;
use crate::lock::{Lock, LockRank};
use crate::service::config::{SessionRole, User};
use crate::service::core::PerfCore;
use crate::service::error::PerfEventOpenError;

/// The owner of a set of events: an operator or the guest. Dropping a session closes its events.
pub struct Session {
    pub(crate) inner: Arc<SessionInner>,
}

pub(crate) struct SessionInner {
    pub user: User,
    /// Handles of the events that this session opened, in the order of opening.
    pub owned: Lock<Vec<Weak<HandleInner>>>,
}

impl SessionInner {
    pub fn owned(&self) -> Vec<Arc<HandleInner>> {
        self.owned.lock().iter().filter_map(Weak::upgrade).collect()
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("uid", &self.inner.user.uid)
            .field("role", &self.inner.user.role)
            .finish()
    }
}

impl Session {
    /// Enables all events of this session, including their children. Does not enable members of
    /// their groups that belong to other sessions.
    pub fn enable_all(&self) {
        for handle in self.inner.owned() {
            let _ = handle.event.set_enabled(true);
        }
    }

    /// Disables all events of this session, including their children.
    pub fn disable_all(&self) {
        for handle in self.inner.owned() {
            let _ = handle.event.set_enabled(false);
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        for handle in self.inner.owned() {
            handle.close();
        }
    }
}

impl PerfCore {
    /// Checks whether `session` may sample with the settings of `attr`. [`PerfCore::open`] performs
    /// the same check. Call this method before the host kernel takes samples without an event of
    /// the core.
    ///
    /// # Errors
    ///
    /// Returns the [`PerfEventOpenError`] that [`PerfCore::open`] would return.
    pub fn may_sample(&self, session: &Session, attr: &Attr) -> Result<(), PerfEventOpenError> {
        let limits = &self.inner.limits;
        limits.check_attr(attr, session.inner.user.is_admin())?;
        limits.check_rate(attr)
    }

    /// Creates a session for user `uid`.
    #[must_use]
    pub fn session(&self, uid: u32, role: SessionRole) -> Session {
        Session {
            inner: Arc::new(SessionInner {
                user: User { uid, role },
                owned: Lock::new(LockRank::Session, Vec::new()),
            }),
        }
    }
}
