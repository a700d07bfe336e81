//! More events than counters, and an operator who counts what the guest counts.

use perf_core::SharePolicy;
use perf_core::estimate::Estimator;
use vpmu::ArchEvent;

use super::{BOTH, Builtin, CPU_TIME, Counter, judged, selector, settled};
use crate::child::ChildError;
use crate::guest::{Job, MeasuringGuest, Operator};
use crate::judge::{Evidence, Expected, Tolerance};
use crate::report::{Check, Row};
use control_api::request;

/// CPU time of a turn, and of a contended measurement, in ms. What programming all counters takes beside the
/// operator's events is in the measurement, and many times less.
const TURN_MS: u64 = 20;
const LENGTH_MS: u64 = 800;
/// More events than counters by so many.
const EXTRA: u64 = 3;
/// Turns in all.
const TURNS: u64 = 14;

impl Builtin<'_> {
    /// The guest takes turns as a kernel does: each event is on for a part of the time, and scaled.
    pub(super) fn multiplexing_rows(
        &self,
        guest: &mut MeasuringGuest,
        backing: &'static str,
    ) -> Result<Vec<Row>, ChildError> {
        let Some(select) = selector(ArchEvent::CoreCycles, guest.hello.amd) else {
            return Ok(Vec::new());
        };
        let n = self.amount(guest, "busy", 3, TURN_MS)?;
        let row = settled(|| self.rotate(guest, backing, select, n))?;
        Ok(vec![row])
    }

    fn rotate(
        &self,
        guest: &mut MeasuringGuest,
        backing: &'static str,
        select: u64,
        n: u64,
    ) -> Result<Row, ChildError> {
        let counters = u64::from(guest.hello.gp.min(8));
        let events = counters + EXTRA;
        let mut estimators = vec![Estimator::new(); events as usize];
        let mut running = vec![0u64; events as usize];
        let (mut now_ns, mut all) = (0, 0);
        let (mut least, mut most) = (u64::MAX, 0);
        for turn in 0..TURNS {
            // Alternating kinds of work, or every turn would be like every other.
            let work = if turn % 2 == 0 { "busy" } else { "chase" };
            let mut job = Job::new(work, n).at(3);
            let on: Vec<u64> = (0..counters).map(|i| (turn * counters + i) % events).collect();
            for _ in &on {
                job = job.counter(select | BOTH);
            }
            let outcome = guest.measure(&job, None)?;
            let Some(cpu) = outcome.cpus.first() else {
                return Ok(Row::new(Check::Multiplexing, "cycles", backing, "turns")
                    .failed("the guest did not count it"));
            };
            let length_ns =
                (u128::from(cpu.tsc) * 1_000_000_000 / u128::from(self.host.tsc_hz.max(1))) as u64;
            for (event, count) in on.iter().zip(&cpu.c) {
                estimators[*event as usize].slice(now_ns, now_ns + length_ns, *count);
                running[*event as usize] += length_ns;
            }
            now_ns += length_ns;
            // Any of the counters was on for the whole turn: together they are the count without turns.
            let counted = cpu.c.first().copied().unwrap_or(0);
            all += counted;
            (least, most) = (least.min(counted), most.max(counted));
        }
        // The worst of them stands for all.
        let worst = estimators
            .iter()
            .zip(&running)
            .filter_map(|(estimator, running)| {
                let estimate = estimator.estimate(now_ns, None)?;
                // So few slices have no standard error. What was not seen lies between the least and the most
                // that a turn counted.
                let unseen = TURNS as f64 * now_ns.saturating_sub(*running) as f64 / now_ns.max(1) as f64;
                let slack = unseen * most.saturating_sub(least) as f64
                    + all as f64 * self.options.tolerance_percent / 100.0;
                Some((
                    estimate.value.abs_diff(all) as f64 / slack.max(1.0),
                    estimate,
                    slack,
                    *running,
                ))
            })
            .max_by(|a, b| a.0.total_cmp(&b.0));
        let name = format!("{events} events, {counters} counters, worst");
        let row = Row::new(Check::Multiplexing, "cycles", backing, name);
        let Some((_, estimate, slack, running)) = worst else {
            return Ok(row.failed("no event had two turns"));
        };
        let seen = Evidence {
            guest: Some(estimate.value),
            host: None,
            expected: Some(Expected {
                value: all,
                tolerance: Tolerance::PercentAnd(0.0, slack as u64),
            }),
        };
        let basis = "the sum over all turns; tolerance: what turns differ by, for each that was not seen, and that of counting";
        Ok(row.judged(&seen, basis).running(running, now_ns))
    }

    /// The operator counts the same vCPU, under each policy.
    pub(super) fn contention_rows(
        &self,
        guest: &mut MeasuringGuest,
        backing: &'static str,
    ) -> Result<Vec<Row>, ChildError> {
        let Some(select) = selector(ArchEvent::CoreCycles, guest.hello.amd) else {
            return Ok(Vec::new());
        };
        let n = self.amount(guest, "busy", 3, LENGTH_MS)?;
        let mut rows = Vec::new();
        for policy in [
            SharePolicy::GuestFirst,
            SharePolicy::OperatorFirst,
            SharePolicy::Strict,
        ] {
            let name = policy.to_string();
            let () = guest.vm.client()?.call(request::Share { policy })?;
            rows.push(settled(|| self.contended(guest, backing, select, n, &name))?);
        }
        let policy = SharePolicy::GuestFirst;
        let () = guest.vm.client()?.call(request::Share { policy })?;
        Ok(rows)
    }

    fn contended(
        &self,
        guest: &mut MeasuringGuest,
        backing: &'static str,
        select: u64,
        n: u64,
        policy: &str,
    ) -> Result<Row, ChildError> {
        let row = Row::new(Check::Contention, "cycles", backing, format!("--share {policy}"));
        let counters = u64::from(guest.hello.gp.min(8));
        // As many as the guest has, so that on hosts with few they do not all fit.
        let mut job = Job::new("busy", n).at(3);
        for _ in 0..counters {
            job = job.counter(select | BOTH);
        }
        let operator = Operator {
            events: "cycles,ref-cycles,task-clock,kvm:exits",
            period: None,
        };
        let outcome = guest.measure(&job, Some(operator))?;
        let percent = self.options.tolerance_percent;
        let Some(saw) = &outcome.operator else {
            return Ok(row.failed("nobody counted"));
        };
        let ticks = self.cpu_ticks(&outcome, 0);
        let expected = Expected {
            value: ticks,
            tolerance: Tolerance::Percent(percent),
        };
        let index = Counter::General(0);
        if saw.opened.is_err() && policy == "strict" {
            // Refused, and said so: then the guest's count is all there is.
            return Ok(judged(row, &outcome, 0, index, expected, CPU_TIME));
        }
        let Some(reading) = saw.reading(0, 0) else {
            return Ok(row.failed("the operator's event was not opened"));
        };
        let seen = Evidence {
            guest: outcome.cpus.first().and_then(|cpu| cpu.c.first()).copied(),
            // The operator's event is on a little longer: the guest waits, mostly halted, at both ends.
            host: reading.estimate.map(|value| Expected {
                value,
                tolerance: Tolerance::Percent(2.0 * percent),
            }),
            expected: (backing == "clock").then_some(expected),
        };
        if seen.host.is_none() {
            return Ok(row.failed("the operator's event never got a turn"));
        }
        let row = row.judged(&seen, CPU_TIME);
        Ok(row.running(reading.running_ns, reading.enabled_ns))
    }
}
