//! Exit counts by vCPU and reason, in total and per interval.

use std::collections::BTreeMap;

use control_api::protocol::{EventReading, VcpuExits};

/// The value of a KVM statistic on one vCPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct KvmStatistic {
    name: String,
    vcpu: u32,
    count: u64,
}

impl KvmStatistic {
    /// Splits the reading of a VM-wide event into values per vCPU.
    pub(super) fn of(name: &str, reading: &EventReading) -> Vec<Self> {
        let name = name.strip_prefix("kvm:").unwrap_or(name);
        let each = reading.vcpus.iter().filter(|_| !reading.failed);
        each.map(|part| Self {
            name: name.to_owned(),
            vcpu: part.vcpu,
            count: part.value,
        })
        .collect()
    }
}

/// Count and times of the exits with one reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct ExitTotal {
    pub(in super::super) count: u64,
    pub(in super::super) timed: u64,
    pub(in super::super) time_ns: u64,
    pub(in super::super) max_ns: u64,
}

/// Key of an exit count: the vCPU, or `None` for all vCPUs, and the name of a reason or statistic.
pub(in super::super) type ExitKey = (Option<u32>, String);

/// Timed exits by vCPU and reason.
pub(in super::super) type TimedExits = BTreeMap<ExitKey, ExitTotal>;

/// Adds the exits `other`, from another process of the same VM, to `sum`.
fn add(sum: &mut TimedExits, other: &TimedExits) {
    for (key, exits) in other {
        let sum = sum.entry(key.clone()).or_default();
        sum.count = sum.count.saturating_add(exits.count);
        sum.timed = sum.timed.saturating_add(exits.timed);
        sum.time_ns = sum.time_ns.saturating_add(exits.time_ns);
        sum.max_ns = sum.max_ns.max(exits.max_ns);
    }
}

/// Exits of a VM from all sources, read at the same time.
#[derive(Debug, Default)]
pub(in super::super) struct ExitReading {
    /// Exits to user space: counts and times since the start of the observation, and maximum times
    /// since the previous reading.
    pub(in super::super) user_exits: Vec<VcpuExits>,
    /// KVM's statistics since the start of the observation.
    pub(in super::super) kvms: Vec<KvmStatistic>,
    /// Exits timed by KVM's tracepoints, for the same periods as `ours`. Empty without tracepoints.
    pub(in super::super) traced: Vec<VcpuExits>,
}

/// Maximum durations of the exits in an interval, in nanoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct ExitMaxima {
    ours: BTreeMap<ExitKey, u64>,
    traced: BTreeMap<ExitKey, u64>,
}

/// Exits by vCPU and reason, or only by reason after [`ExitTotals::summed`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct ExitTotals {
    pub(in super::super) ours: TimedExits,
    pub(in super::super) kvms: BTreeMap<ExitKey, u64>,
    /// Exits timed by KVM's tracepoints.
    pub(in super::super) traced: TimedExits,
}

impl ExitTotals {
    /// Updates the totals from the reading `seen`. Raises each maximum of the current interval in
    /// `longest` to the maximum in the reading.
    pub(in super::super) fn update_from(&mut self, seen: ExitReading, longest: &mut ExitMaxima) {
        now(&mut self.ours, seen.user_exits, &mut longest.ours);
        now(&mut self.traced, seen.traced, &mut longest.traced);
        let kvms = seen.kvms.into_iter();
        self.kvms = kvms.map(|of| ((Some(of.vcpu), of.name), of.count)).collect();
    }

    /// Returns the exits since the earlier totals `before`, with the maximum durations in
    /// `longest`.
    pub(in super::super) fn difference_since(&self, before: &Self, longest: &ExitMaxima) -> Self {
        let kvms = self.kvms.iter().map(|(key, now)| {
            let before = before.kvms.get(key).copied().unwrap_or_default();
            (key.clone(), now.saturating_sub(before))
        });
        Self {
            ours: grown(&self.ours, &before.ours, &longest.ours),
            kvms: kvms.collect(),
            traced: grown(&self.traced, &before.traced, &longest.traced),
        }
    }

    /// Returns the sum of `self` and `other`, the exits in another process of the same VM.
    pub(super) fn plus(&self, other: &Self) -> Self {
        let mut sum = self.clone();
        for (key, count) in &other.kvms {
            let sum = sum.kvms.entry(key.clone()).or_default();
            *sum = sum.saturating_add(*count);
        }
        add(&mut sum.ours, &other.ours);
        add(&mut sum.traced, &other.traced);
        sum
    }

    /// Returns the exits summed over all vCPUs.
    pub(in super::super) fn summed(&self) -> Self {
        let mut kvms = BTreeMap::new();
        for ((_, name), count) in &self.kvms {
            *kvms.entry((None, name.clone())).or_default() += count;
        }
        Self {
            ours: summed(&self.ours),
            kvms,
            traced: summed(&self.traced),
        }
    }

    /// Returns the number of exits to user space that were not timed.
    pub(super) fn untimed(&self) -> u64 {
        self.ours
            .values()
            .map(|of| of.count.saturating_sub(of.timed))
            .sum()
    }
}

fn now(totals: &mut TimedExits, seen: Vec<VcpuExits>, longest_ns: &mut BTreeMap<ExitKey, u64>) {
    for vcpu in seen {
        for exits in vcpu.exits {
            let key = (Some(vcpu.vcpu), exits.reason);
            let longest = longest_ns.entry(key.clone()).or_default();
            *longest = exits.max_ns.max(*longest);
            let total = totals.entry(key).or_default();
            *total = ExitTotal {
                count: exits.count,
                timed: exits.timed,
                time_ns: exits.time_ns,
                max_ns: exits.max_ns.max(total.max_ns),
            };
        }
    }
}

fn grown(now: &TimedExits, before: &TimedExits, longest_ns: &BTreeMap<ExitKey, u64>) -> TimedExits {
    let grown = now.iter().map(|(key, now)| {
        let before = before.get(key).copied().unwrap_or_default();
        let count = ExitTotal {
            count: now.count.saturating_sub(before.count),
            timed: now.timed.saturating_sub(before.timed),
            time_ns: now.time_ns.saturating_sub(before.time_ns),
            max_ns: longest_ns.get(key).copied().unwrap_or_default(),
        };
        (key.clone(), count)
    });
    grown
        .filter(|(_, count)| count.count > 0 || count.timed > 0)
        .collect()
}

fn summed(each: &TimedExits) -> TimedExits {
    let mut sum = TimedExits::new();
    for ((_, reason), count) in each {
        let all = sum.entry((None, reason.clone())).or_default();
        all.count += count.count;
        all.timed += count.timed;
        all.time_ns += count.time_ns;
        all.max_ns = all.max_ns.max(count.max_ns);
    }
    sum
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use control_api::protocol::ExitsOfReason;

    /// Creates the exit statistics of one vCPU with exits of one reason.
    pub(in super::super) fn seen(
        vcpu: u32,
        reason: &str,
        count: u64,
        time_ns: u64,
        max_ns: u64,
    ) -> VcpuExits {
        let reason = reason.to_owned();
        let exits = vec![ExitsOfReason {
            reason,
            count,
            timed: count,
            time_ns,
            max_ns,
        }];
        VcpuExits { vcpu, exits }
    }

    fn statistic(vcpu: u32, count: u64) -> KvmStatistic {
        let name = "exits".to_owned();
        KvmStatistic { name, vcpu, count }
    }

    /// Creates a reading with exits to user space only.
    pub(in super::super) fn from_user_exits(ours: Vec<VcpuExits>) -> ExitReading {
        both(ours, Vec::new())
    }

    fn both(ours: Vec<VcpuExits>, kvms: Vec<KvmStatistic>) -> ExitReading {
        let traced = Vec::new();
        ExitReading {
            user_exits: ours,
            kvms,
            traced,
        }
    }

    /// The totals of a VM that has moved include the exits in the source and destination processes.
    #[test]
    fn exits_of_both_processes_are_added() {
        let total = |count, time_ns, max_ns| {
            let mut total = ExitTotals::default();
            let reading = both(
                vec![seen(0, "kick", count, time_ns, max_ns)],
                vec![statistic(0, count)],
            );
            total.update_from(reading, &mut ExitMaxima::default());
            total
        };
        let sum = total(2, 900, 800).plus(&total(3, 100, 60));
        let exits = sum.ours[&(Some(0), "kick".to_owned())];
        assert_eq!(
            (exits.count, exits.timed, exits.time_ns, exits.max_ns),
            (5, 5, 1000, 800)
        );
        assert_eq!(sum.kvms[&(Some(0), "exits".to_owned())], 5);
        assert_eq!(ExitTotals::default().plus(&sum), sum);
    }

    /// An interval has the maximum duration of its own readings. The total has the maximum of the
    /// whole observation.
    #[test]
    fn interval_maxima_are_independent() {
        let (mut total, mut longest) = (ExitTotals::default(), ExitMaxima::default());
        total.update_from(
            both(vec![seen(0, "kick", 2, 900, 800)], vec![statistic(0, 10)]),
            &mut longest,
        );
        let first = total.difference_since(&ExitTotals::default(), &std::mem::take(&mut longest));
        let key = (Some(0), "kick".to_owned());
        assert_eq!((first.ours[&key].count, first.ours[&key].max_ns), (2, 800));
        let before = total.clone();
        total.update_from(
            both(vec![seen(0, "kick", 3, 950, 50)], vec![statistic(0, 15)]),
            &mut longest,
        );
        total.update_from(
            both(vec![seen(0, "kick", 4, 960, 10)], vec![statistic(0, 17)]),
            &mut longest,
        );
        let second = total.difference_since(&before, &longest);
        let expected = ExitTotal {
            count: 2,
            timed: 2,
            time_ns: 60,
            max_ns: 50,
        };
        assert_eq!(second.ours[&key], expected);
        assert_eq!(second.kvms[&(Some(0), "exits".to_owned())], 7);
        assert_eq!(total.ours[&key].max_ns, 800);
    }

    #[test]
    fn all_vcpus_are_summed() {
        let mut exits = ExitTotals::default();
        let ours = vec![seen(0, "kick", 2, 900, 800), seen(3, "kick", 1, 1000, 1000)];
        exits.update_from(
            both(ours, vec![statistic(0, 10), statistic(3, 5)]),
            &mut ExitMaxima::default(),
        );
        let sum = exits.summed();
        let kick = sum.ours[&(None, "kick".to_owned())];
        assert_eq!((kick.count, kick.time_ns, kick.max_ns), (3, 1900, 1000));
        assert_eq!(sum.kvms[&(None, "exits".to_owned())], 15);
    }
}
