//! Accounting of ring memory by user.

use std::collections::HashMap;
use std::sync::Arc;

use crate::lock::{Lock, LockGuard, LockRank};
use crate::ring::MemoryWatch;
use crate::service::error::RingMapError;

/// The ring memory that each user has in use, in pages. Memory is charged as long as any process
/// references it.
#[derive(Debug)]
pub(crate) struct RingMemory {
    users: Lock<HashMap<u32, UserMemory>>,
}

/// Ring memory charged to one user.
#[derive(Debug, Default)]
struct UserMemory {
    pages: u64,
    /// Rings that were dropped in this process and whose memory clients still map.
    held: Vec<ClientMemory>,
}

#[derive(Debug)]
struct ClientMemory {
    watch: MemoryWatch,
    pages: u64,
}

impl UserMemory {
    /// Ends the charge for ring memory that clients have released since the last call. Takes one or
    /// two system calls per ring.
    fn sweep(&mut self) {
        let pages = &mut self.pages;
        self.held.retain(|held| {
            let in_use = held.watch.is_in_use();
            if !in_use {
                *pages -= held.pages;
            }
            in_use
        });
    }
}

impl Default for RingMemory {
    fn default() -> Self {
        Self {
            users: Lock::new(LockRank::Memory, HashMap::new()),
        }
    }
}

impl RingMemory {
    fn lock(&self) -> LockGuard<'_, HashMap<u32, UserMemory>> {
        self.users.lock()
    }

    pub fn pages_of(&self, uid: u32) -> u64 {
        self.lock().get_mut(&uid).map_or(0, |used| {
            used.sweep();
            used.pages
        })
    }

    /// Charges `pages` pages of ring memory to user `uid`. The charge ends when the memory is
    /// released, regardless of which user unmaps the ring.
    pub fn charge(
        self: &Arc<Self>,
        uid: u32,
        pages: u64,
        limit: Option<u64>,
    ) -> Result<RingCharge, RingMapError> {
        let mut users = self.lock();
        let used = users.entry(uid).or_default();
        if let Some(limit) = limit
            && used.pages.saturating_add(pages) > limit
        {
            used.sweep();
            if used.pages.saturating_add(pages) > limit {
                return Err(RingMapError::MemoryLimit { pages, limit });
            }
        }
        used.pages = used.pages.saturating_add(pages);
        Ok(RingCharge {
            locked: Arc::clone(self),
            uid,
            pages,
            watch: None,
        })
    }
}

/// The charge for the memory of one ring. Owned by the ring (`Ring::attach_charge`).
#[derive(Debug)]
pub(crate) struct RingCharge {
    locked: Arc<RingMemory>,
    uid: u32,
    pages: u64,
    /// Detects whether clients still map the memory. `None` for a user without a memory limit.
    pub watch: Option<MemoryWatch>,
}

impl Drop for RingCharge {
    fn drop(&mut self) {
        let watch = self.watch.take().filter(MemoryWatch::is_in_use);
        let mut users = self.locked.lock();
        let Some(used) = users.get_mut(&self.uid) else {
            return;
        };
        if let Some(watch) = watch {
            let pages = self.pages;
            used.held.push(ClientMemory { watch, pages });
            return;
        }
        used.pages -= self.pages;
        if used.pages == 0 {
            users.remove(&self.uid);
        }
    }
}
