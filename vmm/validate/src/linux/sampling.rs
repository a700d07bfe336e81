//! Measurements with `perf record` in the Linux guest.

use super::counting::measure_with_retries;
use super::{Linux, LinuxGuest};
use crate::child::ChildError;
use crate::guest::OperatorEvents;
use crate::judge::{Evidence, Expectation, Tolerance, whole};
use crate::report::{CheckKind, ReportRows, ValidationRow};
use control_api::protocol::VcpuView;

/// Samples per second of CPU time. Hosts that check timers only at their 4 ms tick do not support a
/// much higher rate.
const SAMPLES_PER_SECOND: u64 = 80;
/// The functions of `three` and their share of its time, in percent.
const SHARES: [(&str, u64); 3] = [("heavy", 60), ("middle", 30), ("light", 10)];
/// Tolerance of a function's share in percentage points, in addition to the statistical variation.
const POINTS: f64 = 5.0;

impl Linux<'_> {
    pub(super) fn sampling(
        &self,
        guest: &mut LinuxGuest,
        backing: &'static str,
        rows: &mut ReportRows<'_>,
    ) -> Result<(), ChildError> {
        let period = self.host.tsc_hz / SAMPLES_PER_SECOND;
        let mut functions: Vec<(u64, String)> = Vec::new();
        rows.push(measure_with_retries(|| {
            let row = ValidationRow::new(CheckKind::Sampling, "cycles", backing, "perf record -c: samples");
            let record = format!("perf record -q -B -N -c {period} -e cycles -o /tmp/period gate three 3");
            let operator = OperatorEvents {
                events: "cycles",
                period: None,
            };
            let done = guest.run("record", &record, Some(operator))?;
            let Some(gate) = &done.gate else {
                return Ok(row.failed(format!("perf did not run: status {}", done.status)));
            };
            let report = "perf report -i /tmp/period --stdio --stdio-color=never --no-children -F sample,sym 2>/dev/null";
            functions = samples(&guest.run("report", report, None)?.text);
            // KVM's own vPMU does not report overflows.
            let overflows = |views: &[VcpuView]| -> Option<u64> {
                let counters = views.iter().flat_map(|view| &view.counters);
                counters.map(|counter| counter.overflows).sum()
            };
            let overflows = overflows(&gate.after)
                .zip(overflows(&gate.before))
                .map(|(after, before)| after.saturating_sub(before));
            // perf's own work before the program starts is sampled too.
            let tolerance = Tolerance::PercentAnd(5.0, 3);
            let seen = Evidence {
                guest: Some(functions.iter().map(|(n, _)| n).sum()),
                host: overflows.map(|value| Expectation { value, tolerance }),
                // The program's CPU time is unsuitable because it includes the exits of each
                // interrupt.
                expected: gate
                    .operator
                    .as_ref()
                    .and_then(|saw| saw.reading(0, 0)?.estimate)
                    .map(|cycles| Expectation {
                        value: cycles / period,
                        tolerance,
                    }),
            };
            Ok(row.judged(
                &seen,
                "the operator's count of the vCPU's cycles, over the period",
            ))
        })?);
        let hits = SHARES.map(|(name, _)| {
            functions
                .iter()
                .filter(|(_, f)| f == name)
                .map(|(n, _)| n)
                .sum::<u64>()
        });
        let all: u64 = hits.iter().sum();
        for ((name, percent), hits) in SHARES.iter().zip(hits) {
            let row = ValidationRow::new(
                CheckKind::Sampling,
                "cycles",
                backing,
                format!("perf record: {name}"),
            );
            let (of, share) = (all as f64, *percent as f64 / 100.0);
            let slack = (POINTS / 100.0 * of).max(3.0 * (of * share * (1.0 - share)).sqrt());
            let seen = Evidence {
                guest: Some(hits),
                host: None,
                expected: Some(Expectation {
                    value: whole((of * share).round()),
                    tolerance: Tolerance::PercentAnd(0.0, whole(slack)),
                }),
            };
            let row = row.judged(
                &seen,
                "the function's share of the work, within 5 points or three standard deviations",
            );
            rows.push(if all < 50 {
                row.failed("too few samples to tell")
            } else {
                row
            });
        }
        Ok(())
    }
}

/// Returns the number of samples and the function of each line of the report.
fn samples(report: &str) -> Vec<(u64, String)> {
    let line = |line: &str| {
        let (count, symbol) = line.trim().split_once(char::is_whitespace)?;
        let (_, name) = symbol.trim().split_once(']')?;
        Some((count.parse().ok()?, name.trim().to_owned()))
    };
    report
        .lines()
        .filter(|text| !text.starts_with('#'))
        .filter_map(line)
        .collect()
}

#[cfg(test)]
mod tests;
