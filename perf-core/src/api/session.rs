//! Sessions: operators and the guest, and the events they own.

use std::sync::{Arc, Weak};

use crate::api::handle::HandleInner;
use crate::attr::Attr;
use crate::lock::{Lock, Rank};
use crate::service::config::{Role, User};
use crate::service::core::Core;
use crate::service::error::OpenError;

/// An operator, or the guest: owns the events it opens and closes them when dropped.
pub struct Session {
    pub(crate) inner: Arc<SessionInner>,
}

pub(crate) struct SessionInner {
    pub user: User,
    /// The events it opened, in the order of opening.
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
    /// Enables every event this session opened, with their children, but not other members of their groups.
    pub fn enable_all(&self) {
        for handle in self.inner.owned() {
            let _ = handle.event.set_enabled(true);
        }
    }

    /// Disables every event this session opened.
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

impl Core {
    /// Whether `session` may sample what `attr` asks for at its rate: what [`Core::open`] checks of it first.
    /// For samples that the host's kernel takes without an event of the core.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn may_sample(&self, session: &Session, attr: &Attr) -> Result<(), OpenError> {
        let limits = &self.inner.limits;
        limits.check_attr(attr, session.inner.user.is_admin())?;
        limits.check_rate(attr)
    }

    /// A session for user `uid`.
    #[must_use]
    pub fn session(&self, uid: u32, role: Role) -> Session {
        Session {
            inner: Arc::new(SessionInner {
                user: User { uid, role },
                owned: Lock::new(Rank::Session, Vec::new()),
            }),
        }
    }
}
