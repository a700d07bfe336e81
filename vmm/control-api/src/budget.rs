//! Limits on the memory and time that a client spends on untrusted VMs.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Limits on the replies that a client accepts from a potentially hostile VM on one connection.
#[derive(Clone, Debug)]
pub struct ControlReplyLimits {
    /// Maximum time to wait for one reply.
    pub timeout: Duration,
    /// Maximum length of a reply, in bytes. Replies that are always short, such as confirmations,
    /// have a lower limit.
    pub max_bytes: usize,
    /// Budget for reply bytes, which this connection shares with other connections.
    pub budget: Arc<ReplyMemoryBudget>,
}

/// Limit on the total number of reply bytes that several connections hold in memory.
#[derive(Debug)]
pub struct ReplyMemoryBudget {
    max_bytes: usize,
    used: AtomicUsize,
    /// Enclosing budget. Bytes taken from this budget are also taken from the enclosing one.
    parent: Option<Arc<ReplyMemoryBudget>>,
}

impl ReplyMemoryBudget {
    /// Creates a budget of `max_bytes` bytes. Bytes taken from this budget are also taken from
    /// `parent`.
    pub fn new(max_bytes: usize, parent: Option<Arc<ReplyMemoryBudget>>) -> Self {
        Self {
            max_bytes,
            used: AtomicUsize::new(0),
            parent,
        }
    }

    /// Returns the number of bytes taken from this budget.
    pub fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    fn take(&self, bytes: usize) -> bool {
        let fits = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= self.max_bytes);
        let taken = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits);
        if taken.is_err() {
            return false;
        }
        let fits_parent = self.parent.as_ref().is_none_or(|parent| parent.take(bytes));
        if !fits_parent {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
        }
        fits_parent
    }

    fn give_back(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(parent) = &self.parent {
            parent.give_back(bytes);
        }
    }
}

/// Reply bytes reserved in a [`ReplyMemoryBudget`]. Dropping the value releases them.
#[derive(Debug)]
pub struct ReservedReplyBytes {
    budget: Arc<ReplyMemoryBudget>,
    bytes: usize,
}

impl ReservedReplyBytes {
    pub(crate) fn none_of(budget: &Arc<ReplyMemoryBudget>) -> Self {
        Self {
            budget: budget.clone(),
            bytes: 0,
        }
    }

    /// Returns a reservation of 0 bytes from the same budget.
    pub(crate) fn same_budget(&self) -> Self {
        Self::none_of(&self.budget)
    }

    /// Takes `bytes` more bytes from the budget. Returns `false` if the budget is exhausted.
    pub(crate) fn grow(&mut self, bytes: usize) -> bool {
        let taken = self.budget.take(bytes);
        if taken {
            self.bytes += bytes;
        }
        taken
    }

    /// Returns the number of bytes taken from the budget.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for ReservedReplyBytes {
    fn drop(&mut self) {
        self.budget.give_back(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reply_budget_and_parent_limit_held_bytes() {
        let all = Arc::new(ReplyMemoryBudget::new(10, None));
        let [one, two] = [(); 2].map(|()| Arc::new(ReplyMemoryBudget::new(7, Some(all.clone()))));
        let (mut first, mut second) = (
            ReservedReplyBytes::none_of(&one),
            ReservedReplyBytes::none_of(&two),
        );
        assert!(first.grow(5) && !first.grow(3) && first.grow(2));
        assert!(!second.grow(4) && second.grow(3));
        assert_eq!((one.used(), two.used(), all.used()), (7, 3, 10));
        drop(first);
        assert_eq!((one.used(), all.used()), (0, 3));
        assert!(second.grow(4) && !second.grow(usize::MAX));
        assert_eq!((second.bytes(), all.used()), (7, 7));
    }
}
