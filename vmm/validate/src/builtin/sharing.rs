//! Checks with more events than counters, and with an operator who counts the guest's events.

use perf_core::SharePolicy;
use perf_core::estimate::CountEstimator;
use vpmu::ArchEvent;

use super::{BOTH, Builtin, CPU_TIME, GuestCounterId, judged, selector};
use crate::child::{SHARE_POLICIES, VmMeasurementError};
use crate::guest::{MeasurementJob, MeasuringGuest, OperatorEventConfig};
use crate::judge::{CountComparison, ExpectedCount, Tolerance, whole};
use crate::measure::measure_row;
use crate::report::{ValidationCheckKind, ValidationRow, ValidationRowCollector};

/// CPU time of a multiplexing interval and of a contended measurement, in ms. A measurement
/// includes programming all counters, which takes far less time.
const TURN_MS: u64 = 20;
const LENGTH_MS: u64 = 800;
/// Number of multiplexed events in excess of the number of counters.
const EXTRA: usize = 3;
/// Maximum tolerance of a multiplexed row, in percent of the expected count. With a larger
/// tolerance, almost any count would pass.
const MAX_SLACK_PERCENT: u64 = 50;
/// Total number of multiplexing intervals in a measurement.
const TURNS: u64 = 14;

/// Identical events that are multiplexed on fewer counters in round-robin order.
struct MultiplexedEvents {
    counters: usize,
    estimators: Vec<CountEstimator>,
    running_ns: Vec<u64>,
    /// Number of multiplexing intervals so far.
    taken: usize,
    /// Total duration of the intervals so far, in nanoseconds.
    now_ns: u64,
    /// Count of the event summed over all intervals. Each counter runs for its whole interval, so
    /// the sum equals the count without multiplexing.
    all: u64,
    /// Lowest and highest rate of the event in any interval, in counts per nanosecond.
    rates: [f64; 2],
}

/// The multiplexed event whose estimate has the largest error in relation to its tolerance.
#[derive(Debug, PartialEq)]
struct WorstEstimate {
    estimate: u64,
    /// Tolerance of the estimate, in counts.
    slack: u64,
    running_ns: u64,
}

impl MultiplexedEvents {
    fn new(counters: usize, events: usize) -> Self {
        Self {
            counters,
            estimators: vec![CountEstimator::new(); events],
            running_ns: vec![0; events],
            taken: 0,
            now_ns: 0,
            all: 0,
            rates: [f64::INFINITY, 0.0],
        }
    }

    /// Adds a multiplexing interval with its length and the counts of its counters.
    fn take(&mut self, length_ns: u64, counts: &[u64]) {
        let events = self.estimators.len();
        for (counter, count) in counts.iter().take(self.counters).enumerate() {
            let event = (self.taken * self.counters + counter) % events;
            self.estimators[event].slice(self.now_ns, self.now_ns + length_ns, *count);
            self.running_ns[event] += length_ns;
        }
        self.taken += 1;
        self.now_ns += length_ns;
        let counted = counts.first().copied().unwrap_or(0);
        self.all += counted;
        let rate = counted as f64 / length_ns.max(1) as f64;
        self.rates = [self.rates[0].min(rate), self.rates[1].max(rate)];
    }

    /// Returns the event with the worst estimate, or `None` if no event ran in two intervals.
    fn worst(&self, tolerance_percent: f64) -> Option<WorstEstimate> {
        let events = self.estimators.iter().zip(&self.running_ns);
        let told = events.filter_map(|(estimator, running_ns)| {
            let estimate = estimator.estimate(self.now_ns, None)?;
            // Few intervals yield no standard error. The estimated rate and the rate of an
            // uncounted interval are both between the lowest and the highest rate.
            let unseen_ns = self.now_ns.saturating_sub(*running_ns) as f64;
            let slack =
                unseen_ns * (self.rates[1] - self.rates[0]) + self.all as f64 * tolerance_percent / 100.0;
            let off = estimate.value.abs_diff(self.all) as f64 / slack.max(1.0);
            let worst = WorstEstimate {
                estimate: estimate.value,
                slack: whole(slack),
                running_ns: *running_ns,
            };
            Some((off, worst))
        });
        told.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, worst)| worst)
    }
}

impl Builtin<'_> {
    /// Multiplexes events in the guest as a kernel does. Each event runs for a part of the time,
    /// and its count is scaled.
    pub(super) fn multiplexing_rows(
        &self,
        guest: &mut MeasuringGuest,
        backing: &'static str,
        rows: &mut ValidationRowCollector<'_>,
    ) -> Result<(), VmMeasurementError> {
        let Some(select) = selector(ArchEvent::CoreCycles, guest.hello.amd) else {
            return Ok(());
        };
        let n = self.amount(guest, "busy", 3, TURN_MS)?;
        rows.push(measure_row(|| self.rotate(guest, backing, select, n))?);
        Ok(())
    }

    fn rotate(
        &self,
        guest: &mut MeasuringGuest,
        backing: &'static str,
        select: u64,
        n: u64,
    ) -> Result<ValidationRow, VmMeasurementError> {
        let counters = usize::from(u8::try_from(guest.hello.gp.min(8)).unwrap_or(8));
        let mut turns = MultiplexedEvents::new(counters, counters + EXTRA);
        for turn in 0..TURNS {
            // Alternate two types of work, because otherwise all intervals would have equal counts.
            let work = if turn % 2 == 0 { "busy" } else { "chase" };
            let mut job = MeasurementJob::new(work, n).at_cpl(3);
            for _ in 0..counters {
                job = job.counter(select | BOTH);
            }
            let outcome = guest.measure(&job, None)?;
            let Some(cpu) = outcome.cpus.first() else {
                return Ok(
                    ValidationRow::new(ValidationCheckKind::Multiplexing, "cycles", backing, "turns")
                        .failed("the guest did not count it"),
                );
            };
            let length_ns = u128::from(cpu.tsc) * 1_000_000_000 / u128::from(self.host.tsc_hz.max(1));
            turns.take(u64::try_from(length_ns).unwrap_or(u64::MAX), &cpu.c);
        }
        let name = format!("{} events, {counters} counters, worst", counters + EXTRA);
        let row = ValidationRow::new(ValidationCheckKind::Multiplexing, "cycles", backing, name);
        let Some(worst) = turns.worst(self.options.tolerance_percent) else {
            return Ok(row.failed("no event had two turns"));
        };
        let seen = CountComparison::of_guest(
            Some(worst.estimate),
            ExpectedCount::new(turns.all, Tolerance::PercentAnd(0.0, worst.slack)),
        );
        let basis = "the sum over all turns; tolerance: the time not seen by what the turns' rates differ by, and that of counting";
        let row = row
            .with_verdict(&seen, basis)
            .running(worst.running_ns, turns.now_ns);
        Ok(undecided_if_wide(row, worst.slack, turns.all))
    }

    /// Counts events of the guest's vCPU as an operator while the guest counts, under each sharing
    /// policy.
    pub(super) fn contention_rows(
        &self,
        guest: &mut MeasuringGuest,
        backing: &'static str,
        rows: &mut ValidationRowCollector<'_>,
    ) -> Result<(), VmMeasurementError> {
        let Some(select) = selector(ArchEvent::CoreCycles, guest.hello.amd) else {
            return Ok(());
        };
        let n = self.amount(guest, "busy", 3, LENGTH_MS)?;
        for policy in SHARE_POLICIES {
            guest.vm.share(policy)?;
            let name = policy.to_string();
            rows.push(measure_row(|| self.contended(guest, backing, select, n, &name))?);
        }
        guest.vm.share(SharePolicy::GuestFirst)
    }

    fn contended(
        &self,
        guest: &mut MeasuringGuest,
        backing: &'static str,
        select: u64,
        n: u64,
        policy: &str,
    ) -> Result<ValidationRow, VmMeasurementError> {
        let name = format!("--share {policy}");
        let row = ValidationRow::new(ValidationCheckKind::Contention, "cycles", backing, name);
        let counters = u64::from(guest.hello.gp.min(8));
        // Use as many counters as the guest has, so that the operator's event does not fit on hosts
        // with few counters.
        let mut job = MeasurementJob::new("busy", n).at_cpl(3);
        for _ in 0..counters {
            job = job.counter(select | BOTH);
        }
        let outcome = guest.measure(
            &job,
            Some(OperatorEventConfig::counting(
                "cycles,ref-cycles,task-clock,kvm:exits",
            )),
        )?;
        let percent = self.options.tolerance_percent;
        let Some(saw) = &outcome.operator else {
            return Ok(row.failed("nobody counted"));
        };
        let ticks = self.cpu_ticks(&outcome, 0);
        let expected = ExpectedCount::new(ticks, Tolerance::Percent(percent));
        let index = GuestCounterId::General(0);
        if saw.opened.is_err() && policy == "strict" {
            // Under the strict policy, the operator may be refused. In that case, only the guest's
            // count is judged.
            return Ok(judged(row, &outcome, 0, index, expected, CPU_TIME));
        }
        let Some(reading) = saw.reading(0, 0) else {
            return Ok(row.failed("the operator's event was not opened"));
        };
        let seen = CountComparison {
            guest: outcome.cpus.first().and_then(|cpu| cpu.c.first()).copied(),
            // The operator's event is enabled slightly longer than the guest's counter, because it
            // includes the mostly halted waits before and after the work.
            host: reading
                .estimate
                .map(|value| ExpectedCount::new(value, Tolerance::Percent(2.0 * percent))),
            expected: (backing == "clock").then_some(expected),
        };
        if seen.host.is_none() {
            return Ok(row.failed("the operator's event never got a turn"));
        }
        let row = row.with_verdict(&seen, CPU_TIME);
        Ok(row.running(reading.running_ns, reading.enabled_ns))
    }
}

/// Marks a row as undecided if its tolerance is too wide for a verdict.
fn undecided_if_wide(row: ValidationRow, slack: u64, expected: u64) -> ValidationRow {
    let limit = u128::from(expected) * u128::from(MAX_SLACK_PERCENT) / 100;
    if u128::from(slack) <= limit {
        return row;
    }
    row.too_busy(format!(
        "the host's load varied so much between the turns that the tolerance is above {MAX_SLACK_PERCENT} %"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::judge::Verdict;
    use proptest::prelude::*;

    const TURN_NS: u64 = 20_000_000;

    fn within(turns: &MultiplexedEvents, percent: f64) -> bool {
        let worst = turns.worst(percent).unwrap();
        worst.estimate.abs_diff(turns.all) <= worst.slack
    }

    /// A tolerance of 80 % leaves the row undecided.
    #[test]
    fn wide_tolerance_leaves_row_undecided() {
        let row = |slack| {
            let seen = CountComparison::of_guest(
                Some(1100),
                ExpectedCount::new(1000, Tolerance::PercentAnd(0.0, slack)),
            );
            let row = ValidationRow::new(ValidationCheckKind::Multiplexing, "cycles", "clock", "turns");
            undecided_if_wide(row.with_verdict(&seen, "time"), slack, 1000)
        };
        assert_eq!(row(500).verdict, Verdict::Pass);
        assert_eq!(row(99).verdict, Verdict::Fail);
        assert_eq!((row(800).verdict, row(800).of_time), (Verdict::TooBusy, true));
    }

    /// A constant rate is estimated exactly.
    #[test]
    fn steady_turns_are_estimated_exactly() {
        let mut turns = MultiplexedEvents::new(4, 7);
        (0..14).for_each(|_| turns.take(TURN_NS, &[1000; 4]));
        assert_eq!(turns.all, 14_000);
        assert_eq!(turns.running_ns, [8 * TURN_NS; 7]);
        let worst = turns.worst(2.0).unwrap();
        assert_eq!((worst.estimate, worst.slack), (14_000, 280));
    }

    /// If a slow host prolongs an interval without changing its rate, the tolerance stays the same.
    #[test]
    fn long_interval_of_the_same_rate_keeps_the_tolerance() {
        let mut turns = MultiplexedEvents::new(4, 7);
        for turn in 0..14 {
            let times = if turn == 3 { 10 } else { 1 };
            turns.take(times * TURN_NS, &[times * 1000; 4]);
        }
        assert_eq!(turns.worst(2.0).unwrap().slack, turns.all / 50);
    }

    /// A counter that counts only half of the events is detected even if the other counters are
    /// correct.
    #[test]
    fn half_counting_counter_is_detected() {
        let mut turns = MultiplexedEvents::new(4, 7);
        (0..14).for_each(|_| turns.take(TURN_NS, &[1000, 1000, 1000, 500]));
        assert!(!within(&turns, 2.0), "{:?}", turns.worst(2.0));
    }

    #[test]
    fn without_a_turn_there_is_no_estimate() {
        assert_eq!(MultiplexedEvents::new(4, 7).worst(2.0), None);
    }

    proptest! {
        /// For any interval lengths and counts, the estimate with the largest error is within the
        /// tolerance that follows from the time in which its event was not counted, and that event
        /// ran no longer than the total duration.
        #[test]
        fn estimates_are_within_their_slack(turns in prop::collection::vec((1u64..100, 0u64..1_000_000), 14..40)) {
            let mut taken = MultiplexedEvents::new(4, 7);
            for (ms, count) in turns {
                taken.take(ms * 1_000_000, &[count; 4]);
            }
            prop_assert!(taken.worst(2.0).unwrap().running_ns <= taken.now_ns);
            prop_assert!(within(&taken, 2.0), "{:?} of {}", taken.worst(2.0), taken.all);
        }
    }
}
