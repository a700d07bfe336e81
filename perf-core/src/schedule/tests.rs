//! Tests that compare plans with the results of an exhaustive search.

use proptest::prelude::*;

use super::counter_assignments::CounterRequest;
use super::*;
use crate::model::keys::EventKey;

/// Input of a planning test: the counters of a host, and groups of events.
#[derive(Clone, Debug)]
struct Asked {
    counters: u64,
    reserved: usize,
    groups: Vec<AskedGroup>,
    policy: SharePolicy,
    turns: Vec<bool>,
}

#[derive(Clone, Debug)]
struct AskedGroup {
    class: GroupClass,
    exclusive: bool,
    /// For each event of the group, the mask of counters that can hold it.
    fits: Vec<u64>,
}

fn asked() -> impl Strategy<Value = Asked> {
    let class = prop_oneof![
        Just(GroupClass::Guest),
        Just(GroupClass::PinnedVm),
        Just(GroupClass::PinnedVcpu),
        Just(GroupClass::FlexibleVm),
        Just(GroupClass::FlexibleVcpu),
    ];
    // Most events fit contiguous ranges of counters, like real events. Some fit arbitrary sets.
    let fits = prop_oneof![
        3 => Just(0b00_1111u64),
        2 => (0usize..6).prop_map(|n| 0b00_1111 | 1 << n),
        1 => (0usize..6).prop_map(|n| 1 << n),
        2 => 0u64..64,
    ];
    let group = (
        class,
        prop::bool::weighted(0.1),
        prop::collection::vec(fits, 0..4),
    )
        .prop_map(|(class, exclusive, fits)| AskedGroup {
            class,
            exclusive,
            fits,
        });
    let policy = prop_oneof![Just(SharePolicy::GuestFirst), Just(SharePolicy::OperatorFirst)];
    (
        0u64..64,
        prop_oneof![2 => Just(0usize), 1 => 0usize..4],
        prop::collection::vec(group, 0..9),
        policy,
        prop::collection::vec(any::<bool>(), 0..12),
    )
        .prop_map(|(counters, reserved, groups, policy, turns)| Asked {
            counters,
            reserved,
            groups,
            policy,
            turns,
        })
}

/// Result of a plan in a test: indices of the active groups and of the failed groups.
struct Planned {
    on: Vec<usize>,
    failed: Vec<usize>,
}

struct World {
    pool: SlotPool,
    groups: Table<MuxGroupKey, Group>,
    asked: Asked,
}

/// Returns a request of an event that fits the counters `bits`.
fn request(bits: u64) -> CounterRequest {
    CounterRequest {
        event: EventKey::new(0),
        suitable: CounterMask::from_bits(bits),
        previous_counter: None,
    }
}

/// Returns `true` if each event can be assigned its own counter. `masks` contains the suitable
/// counters of each event. Tries all assignments.
fn possible(masks: &[u64], free: u64) -> bool {
    match masks.split_first() {
        None => true,
        Some((&mask, rest)) => CounterMask::from_bits(mask & free)
            .iter()
            .any(|c| possible(rest, free & !(1 << c))),
    }
}

impl World {
    fn new(asked: Asked) -> Self {
        let mux = MuxConfig {
            policy: MuxPolicy::Rotate,
            turn_ns: 1,
        };
        let counters = CounterMask::from_bits(asked.counters);
        let mut pool = SlotPool::new(0, counters, asked.reserved, mux);
        let mut groups = Table::default();
        for group in &asked.groups {
            let mut new = Group::new(Some(PoolId::new(0)), group.class, group.exclusive);
            new.counter_requests = group.fits.iter().map(|&bits| request(bits)).collect();
            new.queued = true;
            let key = groups.insert(new);
            match pool.queue(group.class) {
                ClassQueue::Pinned(queue) => queue.push_back(&mut groups, key),
                ClassQueue::Flexible(queue) => queue.insert(key),
            }
        }
        Self { pool, groups, asked }
    }

    /// Returns the suitable counters of each event in group `key`, without reserved counters that
    /// the group may not use.
    fn masks(&self, key: usize) -> Vec<u64> {
        let vcpu = CounterMask::from_bits(self.asked.counters)
            .skip(self.asked.reserved)
            .bits();
        let group = &self.asked.groups[key];
        let allowed = if group.class.is_vcpu() { vcpu } else { u64::MAX };
        group.fits.iter().map(|bits| bits & allowed).collect()
    }

    fn fit_together(&self, keys: &[usize]) -> bool {
        let others = |key: &usize| keys.iter().any(|k| k != key && self.needs_counters(*k));
        let masks: Vec<u64> = keys.iter().flat_map(|&key| self.masks(key)).collect();
        keys.iter().all(|key| !self.excludes_others(*key) || !others(key))
            && possible(&masks, self.asked.counters)
    }

    fn needs_counters(&self, key: usize) -> bool {
        !self.asked.groups[key].fits.is_empty()
    }

    fn excludes_others(&self, key: usize) -> bool {
        self.asked.groups[key].exclusive && self.needs_counters(key)
    }

    /// Computes a plan and activates its groups. Returns the plan.
    fn plan(&mut self) -> Planned {
        let plan = plan(&mut self.pool, &mut self.groups, self.asked.policy);
        for (key, group) in self.groups.iter_mut() {
            group.active = plan.active.contains(&key);
        }
        self.pool.active = plan.active.iter().copied().collect();
        let numbers = |keys: &[MuxGroupKey]| keys.iter().map(|key| key.index()).collect();
        Planned {
            on: numbers(&plan.active),
            failed: numbers(&plan.failed),
        }
    }

    fn seats(&self) -> Vec<(usize, usize, Option<u8>)> {
        let on = self.pool.active.iter();
        on.flat_map(|&key| {
            let wants = self.groups[key].counter_requests.iter().enumerate();
            wants.map(move |(n, want)| (key.index(), n, want.previous_counter))
        })
        .collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// An exhaustive search confirms that all groups of a plan fit together, that no failed pinned
    /// group would have fit together with the groups before it, that the first waiting flexible
    /// group does not fit, and that each event has its own suitable counter.
    #[test]
    fn plans_match_brute_force(asked in asked()) {
        let mut world = World::new(asked);
        let mut now_ns = 0;
        for turn in world.asked.turns.clone() {
            let plan = world.plan();
            prop_assert!(world.fit_together(&plan.on));
            let mut before: Vec<usize> = Vec::new();
            for class in world.asked.policy.order(world.pool.flexible_order()) {
                let taken = |key: &&usize| world.asked.groups[**key].class == class;
                if class.is_pinned() {
                    // The test queues groups in the order of their indices.
                    for (key, group) in world.asked.groups.iter().enumerate() {
                        if group.class == class {
                            let with: Vec<usize> = before.iter().copied().chain([key]).collect();
                            // An exclusive group at the head of the queue excludes all others, even
                            // groups that need no counter.
                            let alone = before.iter().any(|k| world.excludes_others(*k));
                            let first = !group.exclusive || !before.iter().any(|k| world.needs_counters(*k));
                            let fits = !alone && first && world.fit_together(&with);
                            prop_assert_eq!(plan.on.contains(&key), fits, "group {}", key);
                            prop_assert_eq!(plan.failed.contains(&key), !fits);
                            if fits {
                                before.push(key);
                            }
                        }
                    }
                } else {
                    before.extend(plan.on.iter().filter(taken));
                }
            }
            // If the plan has no active flexible group, none of them fits together with the pinned
            // groups.
            let flexible = |key: usize| !world.asked.groups[key].class.is_pinned();
            if !plan.on.iter().any(|&key| flexible(key)) {
                let pinned: Vec<usize> = plan.on.clone();
                let no_pinned_event = !pinned.iter().any(|k| world.needs_counters(*k));
                for (key, group) in world.asked.groups.iter().enumerate().filter(|(k, _)| flexible(*k)) {
                    let with: Vec<usize> = pinned.iter().copied().chain([key]).collect();
                    let alone = pinned.iter().any(|k| world.excludes_others(*k));
                    prop_assert!(
                        alone || (group.exclusive && !no_pinned_event) || !world.fit_together(&with),
                        "group {} waits beside {:?}", key, pinned
                    );
                }
            }
            let mut used = CounterMask::NONE;
            for (key, n, seat) in world.seats() {
                let seat = CounterMask::one(usize::from(seat.unwrap()));
                let fits = CounterMask::from_bits(world.masks(key)[n] & world.asked.counters);
                prop_assert!(fits & seat == seat && (used & seat).is_empty());
                used = used | seat;
            }
            // Planning again changes neither the active groups nor their counters.
            let seats = world.seats();
            let again = world.plan();
            prop_assert_eq!(again.on, plan.on);
            prop_assert_eq!(world.seats(), seats);
            if turn {
                now_ns += 10;
                world.pool.rotate(now_ns);
            }
        }
    }

    /// When groups are switched, a group that remains active changes its counters only if the new
    /// groups cannot be assigned otherwise, or if the new groups have precedence. A group whose
    /// slice ends and that is scheduled again immediately does not count as remaining active.
    #[test]
    fn active_groups_keep_their_counters(asked in asked()) {
        let mut world = World::new(asked);
        world.plan();
        let mut now_ns = 0;
        for _ in 0..6 {
            let before = world.seats();
            let order = world.pool.flexible_order();
            now_ns += 10;
            world.pool.rotate(now_ns);
            let is_active = |key: usize| world.pool.flexible.iter().any(|queue| queue.is_active(key.into()));
            let remains = |key: usize| world.asked.groups[key].class.is_pinned() || is_active(key);
            let before: Vec<_> = before.into_iter().filter(|(key, ..)| remains(*key)).collect();
            let same_order = world.pool.flexible_order() == order;
            let plan = world.plan();
            let after = world.seats();
            let stay: Vec<_> = before.iter().filter(|(key, ..)| plan.on.contains(key)).collect();
            let moved = stay.iter().any(|s| !after.contains(s));
            let held = stay.iter().fold(0u64, |all, (.., seat)| all | 1 << seat.unwrap());
            let new: Vec<u64> = plan
                .on
                .iter()
                .filter(|key| !before.iter().any(|(b, ..)| b == *key))
                .flat_map(|&key| world.masks(key))
                .collect();
            if same_order && new.len() == 1 && possible(&new, world.asked.counters & !held) {
                prop_assert!(!moved, "{:?} became {:?}", before, after);
            }
        }
    }
}

/// Groups that do not fit together with the pinned groups are parked. They return to the queue when
/// the pinned groups are replaced by different ones, even if their number stays the same.
#[test]
fn parked_groups_return_when_pinned_events_change() {
    let groups = [GroupClass::Guest, GroupClass::FlexibleVcpu].map(|class| asked_group(class, 0b01));
    let mut world = world(0b11, 0, groups.to_vec());
    assert_eq!(world.plan().on[..], [0]);
    assert!(world.groups[MuxGroupKey::new(1)].parked, "it can not go on");
    // The pinned event is replaced by one that fits a different counter.
    world.groups[MuxGroupKey::new(0)].counter_requests[0].suitable = CounterMask::from_bits(0b10);
    assert_eq!(world.plan().on[..], [0, 1]);
    assert!(!world.groups[MuxGroupKey::new(1)].parked);
}

/// Creates a group with one event that fits the counters `bits`.
fn asked_group(class: GroupClass, bits: u64) -> AskedGroup {
    AskedGroup {
        class,
        exclusive: false,
        fits: vec![bits],
    }
}

fn world(counters: u64, reserved: usize, groups: Vec<AskedGroup>) -> World {
    World::new(Asked {
        counters,
        reserved,
        groups,
        policy: SharePolicy::GuestFirst,
        turns: vec![],
    })
}

/// Groups that were parked because of reserved counters return when fewer counters are reserved.
#[test]
fn parked_groups_return_when_reservation_shrinks() {
    let mut world = world(0b11, 2, vec![asked_group(GroupClass::FlexibleVcpu, 0b11)]);
    assert!(world.plan().on.is_empty());
    assert!(world.groups[MuxGroupKey::new(0)].parked);
    world.pool.reserve(1);
    assert_eq!(world.plan().on[..], [0]);
    world.pool.reserve(2);
    assert!(world.plan().on.is_empty());
}

/// Parked groups return to their queues only after a change of the remaining capacity through which
/// they may fit.
#[test]
fn capacity_change_is_detected() {
    let mut world = world(0b1111, 1, vec![]);
    let mut left = RemainingCapacity::default();
    let always = AlwaysActive {
        events: 2,
        exclusive: false,
    };
    let room = |world: &World, fits: [u64; 2]| {
        let mut room = FreeCapacity::new(&world.pool, &world.groups);
        for bits in fits {
            let key = MuxGroupKey::new(0);
            assert!(
                room.seats
                    .take(key, &[request(bits)], CounterMask::ALL, false)
                    .is_ok()
            );
        }
        room
    };
    let first = room(&world, [0b11, 0b11]);
    assert!(left.update(&first, always), "nothing was known");
    assert!(!left.update(&first, always), "nothing changed");
    let exclusive = AlwaysActive {
        exclusive: true,
        ..always
    };
    assert!(left.update(&first, exclusive));
    assert!(!left.update(&first, exclusive));
    let fewer = AlwaysActive {
        events: 1,
        ..exclusive
    };
    assert!(left.update(&first, fewer));
    assert!(left.update(&first, exclusive));
    let second = room(&world, [0b11, 0b1100]);
    assert!(left.update(&second, exclusive), "another kind of event");
    assert!(!left.update(&second, exclusive));
    world.pool.reserve(0);
    let third = room(&world, [0b11, 0b1100]);
    assert!(left.update(&third, exclusive), "other counters");
    assert!(!left.update(&third, exclusive));
    assert!(left.update(&third, always), "all of it changed");
    assert!(!left.update(&third, always));
}

#[test]
fn each_driver_has_its_own_pool() {
    let mux = MuxConfig {
        policy: MuxPolicy::Rotate,
        turn_ns: 1,
    };
    let mut pools = SlotPools::default();
    for driver in 0..3 {
        let id = pools.push(SlotPool::new(driver, CounterMask::NONE, 0, mux));
        assert_eq!(pools[id].driver, driver);
    }
    let drivers: Vec<_> = pools.ids().map(|id| pools[id].driver).collect();
    assert_eq!(drivers, [0, 1, 2]);
}

#[test]
fn share_policy_round_trips_as_text() {
    for (policy, name) in [
        (SharePolicy::GuestFirst, "guest-first"),
        (SharePolicy::OperatorFirst, "operator-first"),
        (SharePolicy::Strict, "strict"),
    ] {
        assert_eq!(policy.to_string(), name);
        assert_eq!(name.parse(), Ok(policy));
    }
    assert_eq!("guest".parse::<SharePolicy>(), Err(UnknownSharePolicy));
    assert_eq!("".parse::<SharePolicy>(), Err(UnknownSharePolicy));
}

/// VM-wide groups and single-vCPU groups share the multiplexing intervals. Each group is active as
/// often as every other group of the same size, and none starves.
#[test]
fn vm_wide_groups_do_not_starve_groups_of_a_vcpu() {
    const TURNS: u64 = 1200;
    for (counters, vm, vcpu) in [
        (1, 1, 1),
        (1, 2, 1),
        (1, 1, 3),
        (2, 2, 1),
        (2, 1, 5),
        (4, 5, 5),
        (4, 2, 6),
    ] {
        let groups = std::iter::repeat_n(GroupClass::FlexibleVm, vm)
            .chain(std::iter::repeat_n(GroupClass::FlexibleVcpu, vcpu))
            .map(|class| asked_group(class, u64::MAX))
            .collect();
        let mut world = world((1 << counters) - 1, 0, groups);
        let mut active = vec![0; vm + vcpu];
        for turn in 0..TURNS {
            let plan = world.plan();
            assert_eq!(plan.on.len(), counters);
            plan.on.iter().for_each(|&key| active[key] += 1);
            world.pool.rotate(10 * (turn + 1));
        }
        let fair = TURNS * counters as u64 / (vm + vcpu) as u64;
        assert!(
            active
                .iter()
                .all(|&turns: &u64| turns.abs_diff(fair) <= TURNS / 20),
            "{counters} counters, {vm} and {vcpu} groups: {active:?} turns, {fair} are fair"
        );
    }
}

/// If all groups fit, VM-wide groups precede single-vCPU groups in the plan, and no group is
/// multiplexed.
#[test]
fn uncontended_groups_of_both_classes_stay_active() {
    let groups = [GroupClass::FlexibleVcpu, GroupClass::FlexibleVm];
    let mut world = world(0b11, 0, groups.map(|class| asked_group(class, 0b11)).to_vec());
    for turn in 0..4 {
        assert_eq!(world.plan().on[..], [1, 0]);
        assert!(!world.pool.is_contended());
        world.pool.rotate(10 * (turn + 1));
    }
}
