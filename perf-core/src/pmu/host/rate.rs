//! How often the clocks of the host may overflow.
//!
//! The kernel rings `cpu-clock` and `task-clock` by a timer, and lets a period of theirs be as short as
//! 10 µs. Where an interrupt and its signal take as long as that, as on a virtual machine whose timers are
//! trapped, the CPU does nothing else: the thread that is sampled gets no further, it cannot even be killed.
//! So they ring no more often than a thread, or a CPU, can bear, all clocks of it together. An overflow that
//! was due before is noticed when the timer rings; its sample stands for what was counted until then.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use super::opener::Counted;

/// The shortest period of `cpu-clock` and `task-clock`, ns. Several that overflow on one thread share it: of
/// two, each has twice this.
pub const MIN_CLOCK_PERIOD_NS: u64 = 100_000;

/// How many clocks ring for each thread or CPU, of those that have any.
#[derive(Debug, Default)]
pub(super) struct Clocks(Mutex<HashMap<Counted, Weak<AtomicU64>>>);

impl Clocks {
    /// Another clock of `counted`, which does not ring yet.
    pub(super) fn one_of(&self, counted: Counted) -> Ringing {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let together = all.get(&counted).and_then(Weak::upgrade).unwrap_or_else(|| {
            all.retain(|_, together| together.strong_count() > 0);
            let together = Arc::default();
            all.insert(counted, Arc::downgrade(&together));
            together
        });
        Ringing {
            together: Some(together),
            rings: false,
        }
    }
}

/// Whether a clock rings. Of an event that is none: nothing.
#[derive(Debug, Default)]
pub(super) struct Ringing {
    together: Option<Arc<AtomicU64>>,
    rings: bool,
}

impl Ringing {
    /// It rings from now on.
    pub(super) fn begin(&mut self) {
        if let Some(together) = &self.together
            && !std::mem::replace(&mut self.rings, true)
        {
            together.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// It rings no more.
    pub(super) fn end(&mut self) {
        if let Some(together) = &self.together
            && std::mem::take(&mut self.rings)
        {
            together.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// The period to give to the kernel for `asked`.
    pub(super) fn period_for(&self, asked: u64) -> u64 {
        let Some(together) = &self.together else {
            return asked;
        };
        let together = together.load(Ordering::Relaxed).max(1);
        asked.max(MIN_CLOCK_PERIOD_NS.saturating_mul(together))
    }
}

impl Drop for Ringing {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_of_one_thread_share_the_shortest_period() {
        let clocks = Clocks::default();
        let of = |tid| clocks.one_of(Counted::Thread(tid));
        let (mut first, mut second, mut other) = (of(1), of(1), of(2));
        let shortest = |clock: &Ringing| clock.period_for(1) / MIN_CLOCK_PERIOD_NS;
        assert_eq!(shortest(&first), 1, "none rings");
        first.begin();
        first.begin();
        other.begin();
        assert_eq!((shortest(&first), shortest(&other)), (1, 1));
        second.begin();
        assert_eq!((shortest(&first), shortest(&second), shortest(&other)), (2, 2, 1));
        assert_eq!(
            second.period_for(5 * MIN_CLOCK_PERIOD_NS),
            5 * MIN_CLOCK_PERIOD_NS
        );
        first.end();
        first.end();
        assert_eq!(shortest(&second), 1);
        drop(second);
        assert_eq!(first.together.as_ref().unwrap().load(Ordering::Relaxed), 0);
        assert_eq!(Ringing::default().period_for(1), 1, "no clock");
        drop((first, other));
        drop(of(3));
        assert_eq!(
            clocks.0.lock().unwrap().len(),
            1,
            "threads that have none are forgotten"
        );
    }
}
