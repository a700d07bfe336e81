//! A readers-writer lock for the tests of this program, which run in parallel.
//!
//! Tests with a VM hold the lock shared. A test that loads the host, or that is sensitive to load,
//! holds the lock exclusively. `std::sync::RwLock` is unsuitable, because a test may start several
//! VMs, and may start them while it holds the lock exclusively.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;

/// The lock's holders, identified by the acquiring thread.
struct Owners {
    /// Threads that hold the lock shared, once for each [`SharedLock`].
    shared: Vec<ThreadId>,
    exclusive: Option<ThreadId>,
    /// Number of threads waiting for the exclusive lock.
    waiting: usize,
}

static OWNERS: Mutex<Owners> = Mutex::new(Owners {
    shared: Vec::new(),
    exclusive: None,
    waiting: 0,
});
static RELEASED: Condvar = Condvar::new();

fn owners() -> MutexGuard<'static, Owners> {
    OWNERS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A shared hold of the lock, released on drop.
#[must_use]
pub struct SharedLock(ThreadId);

/// The exclusive hold of the lock, released on drop.
#[must_use]
pub struct ExclusiveLock(());

/// Waits until no other test holds the lock exclusively or waits for exclusive access. Does not
/// wait if this thread already holds the lock.
pub fn shared() -> SharedLock {
    let this = std::thread::current().id();
    let must_wait = |owners: &mut Owners| match owners.exclusive {
        Some(owner) => owner != this,
        None => owners.waiting > 0 && !owners.shared.contains(&this),
    };
    let mut owners = RELEASED
        .wait_while(owners(), must_wait)
        .unwrap_or_else(PoisonError::into_inner);
    owners.shared.push(this);
    SharedLock(this)
}

/// Waits until no other test holds the lock.
///
/// # Panics
/// Panics if this thread already holds the lock.
pub fn exclusive() -> ExclusiveLock {
    let this = std::thread::current().id();
    let mut owners = owners();
    assert!(owners.exclusive != Some(this) && !owners.shared.contains(&this));
    owners.waiting += 1;
    let mut owners = RELEASED
        .wait_while(owners, |owners| {
            owners.exclusive.is_some() || !owners.shared.is_empty()
        })
        .unwrap_or_else(PoisonError::into_inner);
    owners.waiting -= 1;
    owners.exclusive = Some(this);
    ExclusiveLock(())
}

impl Drop for SharedLock {
    fn drop(&mut self) {
        let mut owners = owners();
        let at = owners.shared.iter().position(|owner| *owner == self.0);
        owners.shared.swap_remove(at.expect("the lock is held"));
        RELEASED.notify_all();
    }
}

impl Drop for ExclusiveLock {
    fn drop(&mut self) {
        owners().exclusive = None;
        RELEASED.notify_all();
    }
}
