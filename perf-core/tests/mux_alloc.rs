//! Turns, slices and estimates allocate nothing.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use perf_core::estimate::Estimator;
use perf_core::mux::{MuxPolicy, MuxQueue, Turn};

thread_local!(static ALLOCATIONS: Cell<u64> = const { Cell::new(0) });

struct Counting;

// SAFETY: every call is passed on to the system allocator unchanged; counting touches a constant-initialised thread local.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|n| n.set(n.get() + 1));
        // SAFETY: the caller keeps `alloc`'s contract, which is the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn turns_slices_and_estimates_allocate_nothing() {
    for policy in [MuxPolicy::Rotate, MuxPolicy::Adaptive] {
        let mut queue = MuxQueue::new(policy, 1_000);
        (0..1_000).for_each(|key| queue.insert(key));
        let mut estimator = Estimator::new();
        let before = ALLOCATIONS.with(Cell::get);
        let mut now = 0;
        for i in 0..10_000u64 {
            let mut used = 0;
            queue.fill(|_| {
                used += 1;
                if used <= 4 { Turn::Taken } else { Turn::NoRoom }
            });
            now = queue.next_turn_ns().unwrap().max(now);
            if let Some(left) = queue.turn(now) {
                // Steps of all sizes, so that groups move through all classes.
                queue.slice_ended(left, Some((i % 97) as f64 / 20.0));
            }
            estimator.slice(now, now + 10, i % 13);
            assert!(estimator.estimate(now + 100, None).is_some());
        }
        assert_eq!(ALLOCATIONS.with(Cell::get), before, "{policy:?}");
    }
}
