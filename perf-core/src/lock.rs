//! Mutexes with a lock order.
//!
//! A thread acquires locks only in the order of their [`LockRank`], which prevents deadlocks.
//! Builds with debug assertions check the order on every blocking acquisition and panic with the
//! names of both ranks on a violation, so every test of this crate and of its users also tests the
//! lock order. Release builds do not check.
//!
//! Rings are lock-free; see [`crate::ring`].

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// Rank of a lock in the lock order: the data that the lock protects. A thread acquires locks in
/// the order of the variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum LockRank {
    /// The set of events and vCPUs. Locked while an event or a vCPU is added or removed.
    Topology,
    /// The output ring of an event. A thread that holds the topology lock may lock the outputs of
    /// two events: an event and the event to whose ring it is redirected.
    Output,
    /// The children of a VM-wide event.
    Family,
    /// An event context. A thread that holds the topology lock may lock two contexts to swap them,
    /// in the order of their addresses.
    Context,
    /// The list of registered drivers.
    Drivers,
    /// The registry of open events by ID.
    Opened,
    /// The ring memory that is charged to each user.
    Memory,
    /// The events that a session has opened.
    Session,
}

/// A mutex with a rank. Ignores poisoning: a panic of a thread that holds the lock does not affect
/// other threads.
#[derive(Debug)]
pub(crate) struct Lock<T> {
    rank: LockRank,
    inner: Mutex<T>,
}

/// RAII guard of a [`Lock`].
pub(crate) type LockGuard<'a, T> = Guard<MutexGuard<'a, T>>;

/// The guard of a [`Lock`]: the mutex guard, and the lock's entry in the list of held locks.
#[derive(Debug)]
pub(crate) struct Guard<G> {
    guard: G,
    _held: LockRecord,
}

impl<T> Lock<T> {
    pub fn new(rank: LockRank, value: T) -> Self {
        Self {
            rank,
            inner: Mutex::new(value),
        }
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    pub fn lock(&self) -> LockGuard<'_, T> {
        let held = LockRecord::wait(self.rank, self.address());
        Guard::new(self.inner.lock().unwrap_or_else(PoisonError::into_inner), held)
    }

    /// Acquires the lock if it is free. The lock order does not apply, because this method never
    /// blocks.
    pub fn try_lock(&self) -> Option<LockGuard<'_, T>> {
        let guard = match self.inner.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(Guard::new(guard, LockRecord::got(self.rank, self.address())))
    }
}

impl<G> Guard<G> {
    pub fn new(guard: G, held: LockRecord) -> Self {
        Self { guard, _held: held }
    }
}

impl<G: Deref> Deref for Guard<G> {
    type Target = G::Target;

    fn deref(&self) -> &G::Target {
        &self.guard
    }
}

impl<G: DerefMut> DerefMut for Guard<G> {
    fn deref_mut(&mut self) -> &mut G::Target {
        &mut self.guard
    }
}

#[cfg(debug_assertions)]
pub(crate) use checked::LockRecord;
#[cfg(not(debug_assertions))]
pub(crate) use unchecked::LockRecord;

#[cfg(debug_assertions)]
mod checked {
    use std::cell::Cell;

    use crate::lock::LockRank;

    /// Maximum number of locks that a thread may hold simultaneously.
    const MAX_HELD_LOCKS: usize = 8;

    thread_local! {
        /// Locks held by this thread. The list is constant-initialized and uses no `RefCell`,
        /// because a signal handler may interrupt any access. Handlers only try to lock contexts,
        /// and restore the list before they return.
        static HELD: [Cell<Option<(LockRank, usize)>>; MAX_HELD_LOCKS] = const { [const { Cell::new(None) }; MAX_HELD_LOCKS] };
    }

    /// The entry of a held lock in this thread's list, which the check of the lock order uses.
    #[derive(Debug)]
    pub(crate) struct LockRecord(Option<(LockRank, usize)>);

    impl LockRecord {
        /// Checks the lock order before this thread waits for a lock.
        ///
        /// # Panics
        ///
        /// Panics if this thread holds a lock of the same or a later rank. Under the topology lock,
        /// a second output lock, or a second context lock with a higher address, is allowed.
        pub fn wait(rank: LockRank, address: usize) -> Self {
            HELD.with(|held| {
                let under_topology = held
                    .iter()
                    .any(|h| h.get().is_some_and(|(r, _)| r == LockRank::Topology));
                for (other, at) in held.iter().filter_map(Cell::get) {
                    let fine = match rank {
                        _ if other != rank => other < rank,
                        LockRank::Context => under_topology && at < address,
                        LockRank::Output => under_topology && at != address,
                        _ => false,
                    };
                    assert!(fine, "lock order: {rank:?} is taken while {other:?} is held");
                }
            });
            Self::got(rank, address)
        }

        /// Adds a lock that was just acquired to this thread's list, without a check of the lock
        /// order.
        pub fn got(rank: LockRank, address: usize) -> Self {
            let note = (rank, address);
            let noted = HELD.with(|held| {
                let free = held.iter().find(|h| h.get().is_none());
                free.inspect(|h| h.set(Some(note))).is_some()
            });
            debug_assert!(noted, "more than {MAX_HELD_LOCKS} locks at once");
            Self(noted.then_some(note))
        }
    }

    impl Drop for LockRecord {
        fn drop(&mut self) {
            HELD.with(|held| {
                if let Some(mine) = held.iter().find(|h| self.0.is_some() && h.get() == self.0) {
                    mine.set(None);
                }
            });
        }
    }
}

#[cfg(not(debug_assertions))]
mod unchecked {
    use crate::lock::LockRank;

    /// Empty replacement for the entry of a held lock, because release builds do not check the lock
    /// order.
    #[derive(Debug)]
    pub(crate) struct LockRecord;

    impl LockRecord {
        pub fn wait(_rank: LockRank, _address: usize) -> Self {
            Self
        }

        pub fn got(_rank: LockRank, _address: usize) -> Self {
            Self
        }
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    /// Returns `true` if acquiring `first` and then `second` violates the lock order.
    fn violates_order(first: &Lock<()>, second: &Lock<()>) -> bool {
        catch_unwind(AssertUnwindSafe(|| {
            let _first = first.lock();
            let _second = second.lock();
        }))
        .is_err()
    }

    #[test]
    fn lock_order_violation_panics() {
        let all = [
            LockRank::Topology,
            LockRank::Output,
            LockRank::Family,
            LockRank::Context,
            LockRank::Drivers,
            LockRank::Opened,
            LockRank::Memory,
            LockRank::Session,
        ];
        for (a, first) in all.iter().enumerate() {
            for (b, second) in all.iter().enumerate() {
                let (low, high) = (Lock::new(*first, ()), Lock::new(*second, ()));
                if a != b {
                    assert_eq!(violates_order(&low, &high), a > b, "{first:?}, {second:?}");
                }
            }
        }
    }

    #[test]
    fn locks_of_same_rank_are_ordered() {
        let families = [Lock::new(LockRank::Family, ()), Lock::new(LockRank::Family, ())];
        assert!(violates_order(&families[0], &families[1]));
        let contexts = [Lock::new(LockRank::Context, ()), Lock::new(LockRank::Context, ())];
        assert!(violates_order(&contexts[0], &contexts[1]), "nobody else has two");
        let outputs = [Lock::new(LockRank::Output, ()), Lock::new(LockRank::Output, ())];
        assert!(violates_order(&outputs[1], &outputs[0]));
        let topology = Lock::new(LockRank::Topology, ());
        let _topology = topology.lock();
        assert!(!violates_order(&outputs[1], &outputs[0]), "nobody else has two");
        assert!(!violates_order(&contexts[0], &contexts[1]), "by address");
        assert!(violates_order(&contexts[1], &contexts[0]));
        // A thread that holds a lock would wait for itself if it acquired the same lock again.
        assert!(violates_order(&contexts[0], &contexts[0]));
    }

    /// `try_lock` may acquire a lock of any rank. Locks may be released in any order, and released
    /// locks no longer restrict which locks may be acquired.
    #[test]
    fn try_lock_is_exempt_from_lock_order() {
        let (topology, context) = (
            Lock::new(LockRank::Topology, ()),
            Lock::new(LockRank::Context, ()),
        );
        let held = context.lock();
        let tried = topology.try_lock().expect("nobody has it");
        drop(held);
        let again = context.lock();
        drop(tried);
        drop(again);
        assert!(!violates_order(&topology, &context));
    }
}
