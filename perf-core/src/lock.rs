//! Locks with ranks. A thread takes them in the order of [`Rank`] only, so threads cannot wait for each other
//! in a circle.
//!
//! Builds with debug assertions check that at each lock a thread waits for, and panic with both names where
//! the order is broken. So every test of the crate, and of what uses it, tests the order too. Release builds
//! check nothing.
//!
//! The rings have no locks: see [`crate::ring`].

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// What a lock guards, in the order in which locks are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Rank {
    /// Which events and vCPUs there are: held while they come and go.
    Topology,
    /// Where an event's records go. Two of them, of an event and of the one it writes to, are taken under the
    /// topology lock only.
    Output,
    /// The children of a VM-wide event.
    Family,
    /// A context. Two of them are taken when they are exchanged only: under the topology lock, in the order
    /// of their addresses.
    Context,
    /// The registered drivers.
    Drivers,
    /// What the open events hang together with, by id.
    Opened,
    /// Who has how much ring memory.
    Memory,
    /// The events a session has opened.
    Session,
}

/// A mutex with its rank. A panic of another thread under the lock must not take this one with it, so poison
/// is ignored.
#[derive(Debug)]
pub(crate) struct Lock<T> {
    rank: Rank,
    inner: Mutex<T>,
}

/// Gives the lock back when dropped.
pub(crate) type LockGuard<'a, T> = Guard<MutexGuard<'a, T>>;

/// A guard of some lock, and the note that this thread holds it.
#[derive(Debug)]
pub(crate) struct Guard<G> {
    guard: G,
    _held: Held,
}

impl<T> Lock<T> {
    pub fn new(rank: Rank, value: T) -> Self {
        Self {
            rank,
            inner: Mutex::new(value),
        }
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    pub fn lock(&self) -> LockGuard<'_, T> {
        let held = Held::wait(self.rank, self.address());
        Guard::new(self.inner.lock().unwrap_or_else(PoisonError::into_inner), held)
    }

    /// The lock if it is free. Nobody waits here, so it may be tried for in any order.
    pub fn try_lock(&self) -> Option<LockGuard<'_, T>> {
        let guard = match self.inner.try_lock() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(Guard::new(guard, Held::got(self.rank, self.address())))
    }
}

impl<G> Guard<G> {
    pub fn new(guard: G, held: Held) -> Self {
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
pub(crate) use checked::Held;
#[cfg(not(debug_assertions))]
pub(crate) use unchecked::Held;

#[cfg(debug_assertions)]
mod checked {
    use std::cell::Cell;

    use crate::lock::Rank;

    /// Most locks a thread may hold at once.
    const MOST: usize = 8;

    thread_local! {
        /// What this thread holds, in the order it was taken. Constant-initialised and without a borrow that
        /// a signal could meet: handlers try for contexts' locks, and leave this as they found it.
        static HELD: [Cell<Option<(Rank, usize)>>; MOST] = const { [const { Cell::new(None) }; MOST] };
    }

    /// The note that this thread holds a lock.
    #[derive(Debug)]
    pub(crate) struct Held(Option<(Rank, usize)>);

    impl Held {
        /// To be called before a lock is waited for.
        ///
        /// # Panics
        /// If this thread holds a lock that comes after it.
        pub fn wait(rank: Rank, address: usize) -> Self {
            HELD.with(|held| {
                let under_topology = held
                    .iter()
                    .any(|h| h.get().is_some_and(|(r, _)| r == Rank::Topology));
                for (other, at) in held.iter().filter_map(Cell::get) {
                    let fine = match rank {
                        _ if other != rank => other < rank,
                        Rank::Context => under_topology && at < address,
                        Rank::Output => under_topology && at != address,
                        _ => false,
                    };
                    assert!(fine, "lock order: {rank:?} is taken while {other:?} is held");
                }
            });
            Self::got(rank, address)
        }

        /// The lock was taken without waiting.
        pub fn got(rank: Rank, address: usize) -> Self {
            let note = (rank, address);
            let noted = HELD.with(|held| {
                let free = held.iter().find(|h| h.get().is_none());
                free.inspect(|h| h.set(Some(note))).is_some()
            });
            debug_assert!(noted, "more than {MOST} locks at once");
            Self(noted.then_some(note))
        }
    }

    impl Drop for Held {
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
    use crate::lock::Rank;

    /// Nothing: release builds do not check the order.
    #[derive(Debug)]
    pub(crate) struct Held;

    impl Held {
        pub fn wait(_rank: Rank, _address: usize) -> Self {
            Self
        }

        pub fn got(_rank: Rank, _address: usize) -> Self {
            Self
        }
    }
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    /// Whether taking `first` and then `second` is noticed.
    fn is_noticed(first: &Lock<()>, second: &Lock<()>) -> bool {
        catch_unwind(AssertUnwindSafe(|| {
            let _first = first.lock();
            let _second = second.lock();
        }))
        .is_err()
    }

    #[test]
    fn locks_out_of_their_order_are_noticed() {
        let all = [
            Rank::Topology,
            Rank::Output,
            Rank::Family,
            Rank::Context,
            Rank::Drivers,
            Rank::Opened,
            Rank::Memory,
            Rank::Session,
        ];
        for (a, first) in all.iter().enumerate() {
            for (b, second) in all.iter().enumerate() {
                let (low, high) = (Lock::new(*first, ()), Lock::new(*second, ()));
                if a != b {
                    assert_eq!(is_noticed(&low, &high), a > b, "{first:?}, {second:?}");
                }
            }
        }
    }

    #[test]
    fn two_of_a_kind_have_an_order_too() {
        let families = [Lock::new(Rank::Family, ()), Lock::new(Rank::Family, ())];
        assert!(is_noticed(&families[0], &families[1]));
        let contexts = [Lock::new(Rank::Context, ()), Lock::new(Rank::Context, ())];
        assert!(is_noticed(&contexts[0], &contexts[1]), "nobody else has two");
        let outputs = [Lock::new(Rank::Output, ()), Lock::new(Rank::Output, ())];
        assert!(is_noticed(&outputs[1], &outputs[0]));
        let topology = Lock::new(Rank::Topology, ());
        let _topology = topology.lock();
        assert!(!is_noticed(&outputs[1], &outputs[0]), "nobody else has two");
        assert!(!is_noticed(&contexts[0], &contexts[1]), "by address");
        assert!(is_noticed(&contexts[1], &contexts[0]));
        assert!(is_noticed(&contexts[0], &contexts[0]), "it would wait for itself");
    }

    /// What is not waited for may be tried for in any order, and what was given back is forgotten, in any
    /// order too.
    #[test]
    fn only_waiting_is_checked_and_only_for_what_is_held() {
        let (topology, context) = (Lock::new(Rank::Topology, ()), Lock::new(Rank::Context, ()));
        let held = context.lock();
        let tried = topology.try_lock().expect("nobody has it");
        drop(held);
        let again = context.lock();
        drop(tried);
        drop(again);
        assert!(!is_noticed(&topology, &context));
    }
}
