//! Aggregation of event readings: sums over vCPUs, differences between readings, and means of
//! repeated runs.

use std::collections::BTreeMap;

use control_api::events::format::{CountResult, CountUncertainty, CountUnit, mean_and_error, rounded};
use control_api::protocol::{EventReading, OpenedEvent};

/// Count of an event for one line of output, on one vCPU or summed over all vCPUs.
#[derive(Clone, Debug)]
pub(super) struct Total {
    pub(super) name: String,
    pub(super) vcpu: Option<u32>,
    pub(super) unit: CountUnit,
    pub(super) counted: CountResult,
    /// Uncertainty of a scaled count or of repeated runs.
    pub(super) uncertainty: CountUncertainty,
    pub(super) backing: String,
    pub(super) estimate: bool,
}

/// Key of a [`Total`]: the position of the event in the list, and the vCPU (`None` for the sum over
/// all vCPUs).
type TotalKey = (u32, Option<u32>);
/// Counts that are summed in one row of output, each with its event.
type Parts<'o> = Vec<(&'o OpenedEvent, VcpuCount)>;

/// Returns the counts of the events `opened` in the readings `now`. If earlier readings `before`
/// are given, returns the counts since then. The counts are per vCPU or summed over all vCPUs.
pub(super) fn totals(
    opened: &[OpenedEvent],
    now: &[EventReading],
    before: &[EventReading],
    per_vcpu: bool,
) -> Vec<Total> {
    let find = |list: &[EventReading], handle| list.iter().find(|r| Some(r.handle) == handle).cloned();
    let mut sums: BTreeMap<TotalKey, Parts<'_>> = BTreeMap::new();
    for o in opened {
        let part = match (o.handle, find(now, o.handle)) {
            (None, _) => VcpuCount::NotSupported,
            (Some(_), None) => VcpuCount::NotCounted,
            (Some(_), Some(now)) => VcpuCount::of(&now, find(before, o.handle).as_ref()),
        };
        let key = (o.index, o.vcpu.filter(|_| per_vcpu));
        sums.entry(key).or_default().push((o, part));
    }
    let total = |((_, vcpu), parts): (TotalKey, Parts<'_>)| {
        let first = parts.first()?.0;
        let (counted, doubt) = sum(parts.iter().map(|(_, p)| p));
        let unit = if first.nanoseconds && !names_nanoseconds(&first.name) {
            CountUnit::Nanoseconds
        } else {
            CountUnit::Count
        };
        Some(Total {
            name: first.name.clone(),
            vcpu,
            unit,
            counted,
            uncertainty: doubt,
            backing: first.backing.clone(),
            estimate: first.estimate,
        })
    };
    sums.into_iter().filter_map(total).collect()
}

/// The count of an event on one vCPU.
#[derive(Clone, Copy, Debug)]
enum VcpuCount {
    NotSupported,
    NotCounted,
    Value {
        count: u64,
        enabled_ns: u64,
        running_ns: u64,
        standard_error: Option<f64>,
        bound: Option<f64>,
        /// `true` if the count covers one interval only. Its uncertainty is then not displayed,
        /// because the VM reports only the uncertainty of the whole measurement.
        interval: bool,
    },
}

impl VcpuCount {
    fn of(now: &EventReading, before: Option<&EventReading>) -> Self {
        now.since(before).map_or(Self::NotCounted, |growth| Self::Value {
            count: growth.count,
            enabled_ns: growth.enabled_ns,
            running_ns: growth.running_ns,
            standard_error: now.standard_error,
            bound: now.bound,
            interval: before.is_some(),
        })
    }
}

/// Returns the sum of the counts of several vCPUs and its uncertainty. If a vCPU has no count,
/// returns the reason instead.
fn sum<'p>(parts: impl Iterator<Item = &'p VcpuCount>) -> (CountResult, CountUncertainty) {
    let (mut count, mut enabled, mut running) = (0u64, 0u64, 0u64);
    let (mut variance, mut within, mut intervals) = (Some(0.0), Some(0.0), false);
    for part in parts {
        match *part {
            VcpuCount::NotSupported => return (CountResult::NotSupported, CountUncertainty::Silent),
            VcpuCount::NotCounted => return (CountResult::NotCounted, CountUncertainty::Silent),
            VcpuCount::Value {
                count: n,
                enabled_ns,
                running_ns,
                standard_error,
                bound,
                interval,
            } => {
                count = count.saturating_add(n);
                enabled = enabled.saturating_add(enabled_ns);
                running = running.saturating_add(running_ns);
                variance = variance
                    .zip(standard_error)
                    .map(|(sum, error): (f64, f64)| sum + error * error);
                within = within.zip(bound).map(|(sum, bound): (f64, f64)| sum + bound);
                intervals |= interval;
            }
        }
    }
    let percent = |off: f64| 100.0 * off / count as f64;
    let doubt = match (variance, within) {
        _ if running >= enabled || count == 0 || intervals => CountUncertainty::Silent,
        (Some(variance), _) if variance > 0.0 => CountUncertainty::Error(percent(variance.sqrt())),
        (Some(_), _) => CountUncertainty::Silent,
        (None, Some(within)) => CountUncertainty::Within(percent(within)),
        (None, None) => CountUncertainty::Unknown,
    };
    let counted = CountResult::Value {
        count,
        enabled_ns: enabled,
        running_ns: running,
    };
    (counted, doubt)
}

/// Combines repeated runs. Each resulting count is the mean of the runs, with its error.
pub(super) fn merge(runs: &[Vec<Total>]) -> Vec<Total> {
    let Some(first) = runs.first() else {
        return Vec::new();
    };
    if runs.len() == 1 {
        return first.clone();
    }
    let merged = |(at, total): (usize, &Total)| {
        // vCPUs that were hot-plugged or removed between runs have no mean.
        let same = |other: &&Total| (&other.name, other.vcpu) == (&total.name, total.vcpu);
        let value = |run: &Vec<Total>| match run.get(at).filter(same)?.counted {
            CountResult::Value {
                count,
                enabled_ns,
                running_ns,
            } => Some((count, enabled_ns, running_ns)),
            _ => None,
        };
        let values: Option<Vec<_>> = runs.iter().map(value).collect();
        let (counted, doubt) = match (values, total.counted) {
            (Some(values), _) => {
                let counts: Vec<f64> = values.iter().map(|v| v.0 as f64).collect();
                let (mean, error) = mean_and_error(&counts);
                let n = values.len() as u64;
                let counted = CountResult::Value {
                    count: rounded(mean),
                    enabled_ns: values.iter().map(|v| v.1).sum::<u64>() / n,
                    running_ns: values.iter().map(|v| v.2).sum::<u64>() / n,
                };
                (
                    counted,
                    error.map_or(CountUncertainty::Silent, CountUncertainty::Error),
                )
            }
            (None, CountResult::NotSupported) => (CountResult::NotSupported, CountUncertainty::Silent),
            // An event that was not counted in every run has no mean.
            (None, _) => (CountResult::NotCounted, CountUncertainty::Silent),
        };
        Total {
            counted,
            uncertainty: doubt,
            ..total.clone()
        }
    };
    first.iter().enumerate().map(merged).collect()
}

/// Returns whether the name of an event states its unit, nanoseconds, as `pv/steal-ns/u` does. The
/// count of the event is then not converted to milliseconds.
fn names_nanoseconds(name: &str) -> bool {
    name.contains("-ns/") || name.ends_with("-ns")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn opened(index: u32, vcpu: u32, handle: Option<u32>) -> OpenedEvent {
        OpenedEvent {
            handle,
            unsupported: handle.is_none().then(|| "why".into()),
            name: format!("e{index}"),
            index,
            vcpu: Some(vcpu),
            ..OpenedEvent::default()
        }
    }

    fn reading(handle: u32, value: u64, enabled_ns: u64, running_ns: u64) -> EventReading {
        EventReading {
            handle,
            value,
            enabled_ns,
            running_ns,
            estimate: (running_ns > 0).then(|| value * enabled_ns / running_ns),
            standard_error: Some(if running_ns < enabled_ns { 3.0 } else { 0.0 }),
            bound: Some(if running_ns < enabled_ns { 12.0 } else { 0.0 }),
            ..EventReading::default()
        }
    }

    /// Counts of events that state their unit are not converted. Regression test: steal-ns was
    /// printed in msec.
    #[test]
    fn event_names_tell_their_unit() {
        for name in ["pv/steal-ns/", "pv/uncounted-ns/u", "steal-ns"] {
            assert!(names_nanoseconds(name), "{name}");
        }
        assert!(!names_nanoseconds("task-clock"));
    }

    /// A sum over vCPUs requires a count of every vCPU.
    #[test]
    fn sum_requires_every_vcpu() {
        let events = [
            opened(0, 0, Some(0)),
            opened(0, 1, Some(1)),
            opened(1, 0, None),
            opened(1, 1, None),
        ];
        let both = [reading(0, 5, 10, 10), reading(1, 7, 10, 10)];
        let sums = totals(&events, &both, &[], false);
        assert_eq!(sums.len(), 2);
        assert!(matches!(sums[0].counted, CountResult::Value { count: 12, .. }));
        assert_eq!(sums[1].counted, CountResult::NotSupported);
        let one = [reading(0, 5, 10, 10), reading(1, 0, 10, 0)];
        assert_eq!(
            totals(&events, &one, &[], false)[0].counted,
            CountResult::NotCounted
        );
        let each = totals(&events, &one, &[], true);
        assert!(matches!(each[0].counted, CountResult::Value { count: 5, .. }));
        assert_eq!(each[1].counted, CountResult::NotCounted);
    }

    #[test]
    fn scaled_sum_has_standard_error() {
        let events = [opened(0, 0, Some(0)), opened(0, 1, Some(1))];
        let readings = [reading(0, 50, 10, 5), reading(1, 100, 10, 10)];
        let sums = totals(&events, &readings, &[], false);
        let expected = CountResult::Value {
            count: 200,
            enabled_ns: 20,
            running_ns: 15,
        };
        assert_eq!(sums[0].counted, expected);
        assert!((sums[0].uncertainty.error().unwrap() - 1.5).abs() < 1e-9);
    }

    /// If the count of one vCPU has no standard error, the uncertainty of the sum is the sum of all
    /// bounds. If a bound is missing too, the uncertainty is unknown.
    #[test]
    fn sum_without_known_error_has_none() {
        let events = [opened(0, 0, Some(0)), opened(0, 1, Some(1))];
        let bounded = EventReading {
            standard_error: None,
            ..reading(0, 50, 10, 5)
        };
        let known = reading(1, 50, 10, 5);
        let doubt = |parts: &[EventReading]| totals(&events, parts, &[], false)[0].uncertainty;
        assert_eq!(
            doubt(&[bounded.clone(), known.clone()]),
            CountUncertainty::Within(12.0)
        );
        let unknown = EventReading {
            bound: None,
            ..bounded
        };
        assert_eq!(doubt(&[unknown, known]), CountUncertainty::Unknown);
    }

    #[test]
    fn interval_is_difference_to_previous_reading() {
        let events = [opened(0, 0, Some(0))];
        let before = [reading(0, 50, 100, 100)];
        // The count is the difference of the estimates, not 30 scaled by one half.
        let now = [EventReading {
            estimate: Some(200),
            ..reading(0, 80, 200, 150)
        }];
        let expected = CountResult::Value {
            count: 150,
            enabled_ns: 100,
            running_ns: 50,
        };
        assert_eq!(totals(&events, &now, &before, false)[0].counted, expected);
        let first = totals(&events, &before, &[], false)[0].counted;
        assert!(matches!(first, CountResult::Value { count: 50, .. }), "{first:?}");
        assert_eq!(
            totals(&events, &now, &now, false)[0].counted,
            CountResult::NotCounted
        );
    }

    /// A removed vCPU keeps its counts in its row when a vCPU with the same index is added again.
    #[test]
    fn hot_plugged_vcpu_has_one_row() {
        let events = [
            opened(0, 0, Some(0)),
            opened(0, 1, Some(1)),
            opened(0, 1, Some(2)),
        ];
        let left = EventReading {
            gone: true,
            ..reading(1, 70, 100, 100)
        };
        let before = [reading(0, 50, 100, 100), left.clone()];
        let now = [reading(0, 60, 200, 200), left, reading(2, 5, 10, 10)];
        let counts = |before: &[EventReading]| -> Vec<u64> {
            let count = |total: &Total| match total.counted {
                CountResult::Value { count, .. } => count,
                other => panic!("{other:?}"),
            };
            totals(&events, &now, before, true).iter().map(count).collect()
        };
        assert_eq!(counts(&[]), [60, 75]);
        assert_eq!(counts(&before), [10, 5]);
    }

    #[test]
    fn mean_requires_all_runs_counted() {
        let total = |counted| Total {
            name: "e".into(),
            vcpu: None,
            unit: CountUnit::Count,
            counted,
            uncertainty: CountUncertainty::Silent,
            backing: "hardware".into(),
            estimate: false,
        };
        let value = |count| CountResult::Value {
            count,
            enabled_ns: 1,
            running_ns: 1,
        };
        let merged = merge(&[vec![total(value(10))], vec![total(value(20))]]);
        assert!(matches!(merged[0].counted, CountResult::Value { count: 15, .. }));
        assert!((merged[0].uncertainty.error().unwrap() - 100.0 / 3.0).abs() < 1e-9);
        let merged = merge(&[vec![total(value(10))], vec![total(CountResult::NotCounted)]]);
        assert_eq!(merged[0].counted, CountResult::NotCounted);
    }
}
