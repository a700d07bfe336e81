use super::*;
use proptest::prelude::*;
use std::collections::BTreeSet;

/// Fills `slots` slots of the queue with groups that need one slot each.
fn fill(queue: &mut MuxQueue, slots: usize) -> Vec<usize> {
    let mut on = Vec::new();
    queue.fill(|key| {
        if on.len() == slots {
            return SlotOfferOutcome::NoRoom;
        }
        on.push(usize::from(key));
        SlotOfferOutcome::Taken
    });
    on
}

fn queue(policy: MuxPolicy, groups: usize) -> MuxQueue {
    let mut queue = MuxQueue::new(policy, 1_000);
    (0..groups).for_each(|key| queue.insert(MuxGroupKey::from(key)));
    queue
}

/// Multiplexes the groups until `until_ns` and returns the active time of each group.
fn play(queue: &mut MuxQueue, slots: usize, until_ns: u64, groups: usize) -> Vec<u64> {
    let mut on_ns = vec![0; groups];
    let mut now = 0;
    let mut on = fill(queue, slots);
    while now < until_ns {
        let next = queue.next_turn_ns().unwrap().max(now + 1);
        on.iter().for_each(|&key| on_ns[key] += next - now);
        now = next;
        queue.rotate_if_due(now);
        on = fill(queue, slots);
    }
    on_ns
}

/// About a quarter of the slices of each group is read in the middle, if slices are longer than one
/// interval.
#[test]
fn mid_slice_reads_are_distributed_evenly() {
    for groups in 3..20 {
        let mut queue = queue(MuxPolicy::Rotate, groups);
        let mut looks = vec![0usize; groups];
        let mut now = 1;
        fill(&mut queue, 2);
        for _ in 0..400 * groups {
            now = queue.next_turn_ns().unwrap().max(now);
            if queue.rotate_if_due(now).is_some()
                && let Some(key) = queue.mid_slice()
            {
                looks[usize::from(key)] += 1;
            }
            fill(&mut queue, 2);
        }
        assert!(
            looks.iter().all(|n| (80..=120).contains(n)),
            "{groups} groups: {looks:?}"
        );
    }
    let mut alone = queue(MuxPolicy::Rotate, 3);
    fill(&mut alone, 1);
    for now in (1_000..1_000_000).step_by(1_000) {
        if alone.rotate_if_due(now).is_some() {
            assert_eq!(alone.mid_slice(), None, "a slice of one turn has no middle");
        }
        fill(&mut alone, 1);
    }
}

/// A recorded aliasing pattern is forgotten after some rotations.
#[test]
fn aliasing_expires() {
    let mut queue = queue(MuxPolicy::Rotate, 5);
    fill(&mut queue, 2);
    assert!(!queue.has_aliasing());
    queue.record_aliasing();
    assert!(queue.has_aliasing());
    let mut now = 1;
    for _ in 0..30 {
        now = queue.next_turn_ns().unwrap().max(now);
        let _ = queue.rotate_if_due(now);
        fill(&mut queue, 2);
    }
    assert!(!queue.has_aliasing());
}

/// Under round robin, equal groups are active for equal times, within one interval per slot
/// (behavior P8).
#[test]
fn p8_rotation_is_fair_within_one_interval() {
    for (groups, slots) in [(2, 1), (5, 2), (8, 3), (7, 6)] {
        let mut queue = queue(MuxPolicy::Rotate, groups);
        let total = 1_000 * 840;
        let shares = play(&mut queue, slots, total, groups);
        let fair = total * slots as u64 / groups as u64;
        for share in shares {
            assert!(share.abs_diff(fair) <= 1_000 * slots as u64, "{share} of {fair}");
        }
    }
}

/// Runs `turns` intervals on two slots and reports rate changes to the queue. `rate(key, from, to)`
/// returns the mean rate of group `key` over a slice. Returns the number of slices per group, and
/// the set of interval lengths.
fn live(
    queue: &mut MuxQueue,
    turns: usize,
    rate: impl Fn(usize, u64, u64) -> f64,
) -> (Vec<u32>, BTreeSet<u64>) {
    let groups = queue.len();
    let (mut visits, mut lengths) = (vec![0; groups], BTreeSet::new());
    let mut since = vec![0; groups];
    let mut last = vec![None; groups];
    let mut on = fill(queue, 2);
    let mut now = 0;
    queue.rotate_if_due(now);
    for _ in 0..turns {
        let next = queue.next_turn_ns().unwrap();
        lengths.insert(next - now);
        now = next;
        let key = queue.rotate_if_due(now).unwrap();
        let left = usize::from(key);
        let rate = rate(left, since[left], now);
        let step = last[left].replace(rate).map(|before: f64| rate - before);
        queue.slice_ended(key, step);
        let then = fill(queue, 2);
        for &key in then.iter().filter(|k| !on.contains(k)) {
            since[key] = now;
            visits[key] += 1;
        }
        on = then;
    }
    (visits, lengths)
}

/// Returns the mean rate of a square wave over a slice.
fn square(from: u64, to: u64, period: u64) -> f64 {
    let high = (from..to).filter(|t| t % period < period / 2).count();
    2.0 * high as f64 / (to - from) as f64
}

/// Under the adaptive policy, the only group with a varying rate is active most often, and each
/// steady group is active for at least half of an equal share.
#[test]
fn adaptive_favors_variable_groups_without_starvation() {
    let mut queue = queue(MuxPolicy::Adaptive, 8);
    // Longer than a rotation, so that the pattern does not alias.
    let (visits, _) = live(&mut queue, 4_000, |key, from, to| {
        if key == 3 { square(from, to, 3_001) } else { 1.0 }
    });
    let fair = 4_000 / 8;
    assert!(visits[3] > fair * 3 / 2, "{visits:?}");
    assert!(visits.iter().all(|&v| v > fair / 2), "{visits:?}");
    assert_eq!(queue.pace, IntervalIndex::default());
}

/// The intervals have the same length except during a phase shift, which verifies groups with
/// nearly constant rates.
#[test]
fn calm_groups_are_verified_by_shift() {
    let mut queue = queue(MuxPolicy::Adaptive, 4);
    let (_, lengths) = live(&mut queue, 1_000, |_, _, _| 1.0);
    assert_eq!(lengths, BTreeSet::from([146, 236]));
    assert_eq!((queue.pace, queue.suspects), (IntervalIndex::default(), 0));
}

/// The queue selects another interval if a guest pattern has the period of a rotation. All slices
/// of a group then see the same phase of the pattern, so the slices alone cannot reveal it.
#[test]
fn aliasing_pattern_changes_interval() {
    let mut queue = queue(MuxPolicy::Adaptive, 8);
    let turns = 8 * (FIRST_SHIFT.0 as usize + 6);
    live(&mut queue, turns, |key, from, to| {
        square(from + 200 * key as u64, to + 200 * key as u64, 8 * 146)
    });
    assert_eq!(queue.pace, IntervalIndex::default().next());
}

/// The phase of the intervals is not shifted for groups with varying rates, because a shift would
/// cost precision and no pattern can hide in such rates.
#[test]
fn variable_groups_are_not_shifted() {
    let mut queue = queue(MuxPolicy::Adaptive, 8);
    let (_, lengths) = live(&mut queue, 2_000, |_, from, to| square(from, to, 3_001));
    assert_eq!(lengths, BTreeSet::from([146]));
}

#[test]
fn no_interval_ends_while_all_groups_are_active() {
    let mut queue = queue(MuxPolicy::Adaptive, 3);
    assert_eq!(fill(&mut queue, 4).len(), 3);
    assert_eq!(queue.next_turn_ns(), None);
    assert_eq!(queue.rotate_if_due(u64::MAX), None);
    assert_eq!(fill(&mut queue, 4).len(), 3);
}

/// A group that is too large for the free slots is scheduled as soon as enough slots are free, and
/// cannot be overtaken.
#[test]
fn large_group_is_not_starved() {
    for policy in [MuxPolicy::Rotate, MuxPolicy::Adaptive] {
        let mut queue = queue(policy, 6);
        let large = MuxGroupKey::from(5);
        let need = |key: MuxGroupKey| if key == large { 3 } else { 1 };
        let mut turns_on = 0;
        let mut now = 0;
        for _ in 0..200 {
            let mut used = 0;
            queue.fill(|key| {
                if used + need(key) > 3 {
                    return SlotOfferOutcome::NoRoom;
                }
                used += need(key);
                turns_on += u32::from(key == large);
                SlotOfferOutcome::Taken
            });
            now = queue.next_turn_ns().unwrap().max(now);
            queue.rotate_if_due(now);
        }
        assert!(turns_on >= 10, "{policy:?}: on {turns_on} times in 200");
    }
}

proptest! {
    /// For any sequence of calls, the queue neither loses nor duplicates a group, and the active
    /// groups are exactly those that took an offered slot.
    #[test]
    fn groups_are_neither_lost_nor_duplicated(
        adaptive in any::<bool>(),
        ops in prop::collection::vec((0u8..6, 0usize..12, 0u64..4_000), 0..200),
    ) {
        let policy = if adaptive { MuxPolicy::Adaptive } else { MuxPolicy::Rotate };
        let mut queue = MuxQueue::new(policy, 1_000);
        let mut there = BTreeSet::new();
        let mut now = 0;
        for (op, key, n) in ops {
            match op {
                0 => {
                    queue.insert(key.into());
                    there.insert(key);
                }
                1 => {
                    queue.remove(key.into());
                    there.remove(&key);
                }
                2 => queue.slice_ended(key.into(), Some(n as f64 / 1_000.0)),
                3 => {
                    now += n;
                    if let Some(left) = queue.rotate_if_due(now) {
                        prop_assert!(there.contains(&usize::from(left)));
                    }
                }
                4 => {
                    // Rejects some groups as too large and others as conflicting.
                    let mut room = 3;
                    queue.fill(|key| {
                        if usize::from(key) % 5 == 4 {
                            SlotOfferOutcome::NotNow
                        } else if room == 0 {
                            SlotOfferOutcome::NoRoom
                        } else {
                            room -= 1;
                            SlotOfferOutcome::Taken
                        }
                    });
                }
                _ => {
                    let on = fill(&mut queue, 2);
                    let distinct: BTreeSet<_> = on.iter().copied().collect();
                    prop_assert_eq!(distinct.len(), on.len());
                    prop_assert!(distinct.is_subset(&there));
                    prop_assert_eq!(on.len(), there.len().min(2));
                }
            }
            prop_assert_eq!(queue.len(), there.len());
            let suspects = queue.entries.iter().filter(|e| e.trust == Confidence::Suspect && e.era == queue.era);
            prop_assert_eq!(suspects.count(), queue.suspects);
        }
    }
}
