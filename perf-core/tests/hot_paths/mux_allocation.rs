//! Tests that multiplexing intervals, time slices and estimates do not allocate memory.

use perf_core::estimate::CountEstimator;
use perf_core::mux::{MuxGroupKey, MuxPolicy, MuxQueue, SlotOfferOutcome};

#[test]
fn turns_slices_and_estimates_do_not_allocate() {
    for policy in [MuxPolicy::Rotate, MuxPolicy::Adaptive] {
        let mut queue = MuxQueue::new(policy, 1_000);
        (0..1_000_usize).for_each(|key| queue.insert(MuxGroupKey::from(key)));
        let mut estimator = CountEstimator::new();
        let mut now = 0;
        let made = crate::allocations(|| {
            for i in 0..10_000u64 {
                let mut used = 0;
                queue.fill(|_| {
                    used += 1;
                    if used <= 4 {
                        SlotOfferOutcome::Taken
                    } else {
                        SlotOfferOutcome::NoRoom
                    }
                });
                now = queue.next_turn_ns().unwrap().max(now);
                if let Some(left) = queue.rotate_if_due(now) {
                    // Reports rate changes of all sizes, so that the queue treats groups as steady,
                    // calm and varying in turn.
                    queue.slice_ended(left, Some((i % 97) as f64 / 20.0));
                }
                estimator.slice(now, now + 10, i % 13);
                assert!(estimator.estimate(now + 100, None).is_some());
            }
        });
        assert_eq!(made, 0, "{policy:?}");
    }
}
