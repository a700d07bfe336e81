//! Measurements with `perf record` in the Linux guest.

use super::{Linux, LinuxGuest};
use crate::builtin::share;
use crate::child::VmMeasurementError;
use crate::guest::OperatorEventConfig;
use crate::judge::{CountComparison, ExpectedCount, Tolerance};
use crate::measure::measure_rows;
use crate::report::{ValidationCheckKind, ValidationRow, ValidationRowCollector};
use control_api::protocol::VcpuView;

/// Samples per second of CPU time. Hosts that check timers only at their 4 ms tick do not support a
/// much higher rate.
const SAMPLES_PER_SECOND: u64 = 80;
/// The functions of the guest program `three`, and their shares of its time, in percent.
const SHARES: [(&str, u64); 3] = [("heavy", 60), ("middle", 30), ("light", 10)];
impl Linux<'_> {
    pub(super) fn sampling(
        &self,
        guest: &mut LinuxGuest,
        backing: &'static str,
        rows: &mut ValidationRowCollector<'_>,
    ) -> Result<(), VmMeasurementError> {
        let period = self.host.tsc_hz / SAMPLES_PER_SECOND;
        rows.extend(measure_rows(|| Self::recorded(guest, backing, period))?);
        Ok(())
    }

    /// Measures the number of perf's samples and their distribution.
    fn recorded(
        guest: &mut LinuxGuest,
        backing: &'static str,
        period: u64,
    ) -> Result<Vec<ValidationRow>, VmMeasurementError> {
        let row = ValidationRow::new(
            ValidationCheckKind::Sampling,
            "cycles",
            backing,
            "perf record -c: samples",
        );
        let record = format!("perf record -q -B -N -c {period} -e cycles -o /tmp/period gate three 3");
        let done = guest.run("record", &record, Some(OperatorEventConfig::counting("cycles")))?;
        let Some(gate) = &done.gate else {
            return Ok(vec![
                row.failed(format!("perf did not run: status {}", done.status)),
            ]);
        };
        let report =
            "perf report -i /tmp/period --stdio --stdio-color=never --no-children -F sample,sym 2>/dev/null";
        let functions = samples(&guest.run("report", report, None)?.text);
        // KVM's own vPMU does not report overflows.
        let overflows = |views: &[VcpuView]| -> Option<u64> {
            let counters = views.iter().flat_map(|view| &view.counters);
            counters.map(|counter| counter.overflows).sum()
        };
        let overflows = overflows(&gate.after)
            .zip(overflows(&gate.before))
            .map(|(after, before)| after.saturating_sub(before));
        // perf's own work before the program starts is also sampled.
        let tolerance = Tolerance::PercentAnd(5.0, 3);
        // The program's CPU time is unsuitable because it includes the exits of each interrupt.
        let cycles = gate.operator.as_ref().and_then(|saw| saw.reading(0, 0)?.estimate);
        let seen = CountComparison {
            guest: Some(functions.iter().map(|(n, _)| n).sum()),
            host: overflows.map(|value| ExpectedCount::new(value, tolerance)),
            expected: cycles.map(|cycles| ExpectedCount::new(cycles / period, tolerance)),
        };
        let mut rows = vec![row.with_verdict(
            &seen,
            "the operator's count of the vCPU's cycles, over the period",
        )];
        let hits = SHARES.map(|(name, _)| {
            let of_name = functions.iter().filter(|(_, f)| f == name);
            of_name.map(|(n, _)| n).sum::<u64>()
        });
        let all = hits.iter().sum();
        for ((name, percent), hits) in SHARES.iter().zip(hits) {
            let name = format!("perf record: {name}");
            let row = ValidationRow::new(ValidationCheckKind::Sampling, "cycles", backing, name);
            rows.push(share(row, hits, all, *percent));
        }
        Ok(rows)
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
