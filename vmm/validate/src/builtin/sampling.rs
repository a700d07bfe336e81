//! Checks of the number and distribution of overflow interrupts in the guest and of the operator's
//! samples.

use control_api::request;
use vpmu::ArchEvent;

use super::{BOTH, Builtin, CPU_TIME, selector};
use crate::child::VmMeasurementError;
use crate::guest::{Measurement, MeasurementJob, MeasuringGuest, OperatorEventConfig};
use crate::judge::{CountComparison, ExpectedCount, Tolerance, whole};
use crate::measure::measure_rows;
use crate::report::{ValidationCheckKind, ValidationRow, ValidationRowCollector};

/// CPU time of the profiled work, in ms.
const LENGTH_MS: u64 = 2500;
/// Samples per second of CPU time. Hosts that check timers only at their 4 ms tick do not support a
/// much higher rate.
const SAMPLES_PER_SECOND: u64 = 60;
/// Tolerance of the number of samples, which is 5 % plus one sample at the end.
const NUMBER: Tolerance = Tolerance::PercentAnd(5.0, 1);
/// The profiled functions and their shares of the work, in percent.
const SHARES: [(&str, u64); 3] = [("spin_hot", 60), ("spin_warm", 30), ("spin_cool", 10)];

/// Returns the expected number of samples of a function with `percent` of the work, from `all`
/// samples. The tolerance is five percentage points plus the statistical variation.
fn expected_samples(all: u64, percent: u64) -> (ExpectedCount, &'static str) {
    let (all, share) = (all as f64, percent as f64 / 100.0);
    let slack = (0.05 * all).max(3.0 * (all * share * (1.0 - share)).sqrt());
    let expected = all * share;
    let range = Tolerance::Range(whole(expected - slack), whole((expected + slack).ceil()));
    (
        ExpectedCount::new(whole(expected.round()), range),
        "the function's share of the work, within 5 points or three standard deviations",
    )
}

impl Builtin<'_> {
    pub(super) fn sampling_rows(
        &self,
        guest: &mut MeasuringGuest,
        backing: &'static str,
        rows: &mut ValidationRowCollector<'_>,
    ) -> Result<(), VmMeasurementError> {
        let Some(select) = selector(ArchEvent::CoreCycles, guest.hello.amd) else {
            return Ok(());
        };
        let n = self.amount(guest, "spin", 3, LENGTH_MS)?;
        let period = self.host.tsc_hz / SAMPLES_PER_SECOND;
        let before = held_pmis(guest)?;
        rows.extend(measure_rows(|| {
            Self::interrupt_rows(guest, backing, select, n, period)
        })?);
        let after = held_pmis(guest)?;
        rows.extend(held_rows(backing, before, after));
        let (_, text) = guest.vm.client()?.symbols()?;
        let symbols = Symbols::parse(&String::from_utf8_lossy(&text));
        rows.extend(measure_rows(|| {
            self.operator_rows(guest, backing, select, n, period, &symbols)
        })?);
        Ok(())
    }

    /// Compares the samples that the guest takes by PMIs with the expected number and distribution.
    fn interrupt_rows(
        guest: &mut MeasuringGuest,
        backing: &'static str,
        select: u64,
        n: u64,
        period: u64,
    ) -> Result<Vec<ValidationRow>, VmMeasurementError> {
        let job = MeasurementJob {
            period,
            ..MeasurementJob::new("spin", n)
                .at_cpl(3)
                .counter(select | BOTH)
                .counter(select | BOTH)
        };
        let outcome = guest.measure(&job, None)?;
        let row = ValidationRow::new(
            ValidationCheckKind::Sampling,
            "cycles",
            backing,
            "PMIs, one a period",
        );
        let mut rows = vec![interrupts(row, &outcome, period)];
        if let Some(cpu) = outcome.cpus.first() {
            let row = ValidationRow::new(
                ValidationCheckKind::Sampling,
                "cycles",
                backing,
                "PMIs without an overflow",
            );
            rows.push(check_no_spurious(row, cpu.spurious));
            let all: u64 = cpu.struck.iter().take(SHARES.len()).sum();
            for ((name, percent), struck) in SHARES.iter().zip(&cpu.struck) {
                let row = ValidationRow::new(
                    ValidationCheckKind::Sampling,
                    "cycles",
                    backing,
                    format!("PMIs in {name}"),
                );
                rows.push(share(row, *struck, all, *percent));
            }
        }
        Ok(rows)
    }

    /// Compares the samples that an operator takes, while the guest only counts, with the expected
    /// number and distribution.
    fn operator_rows(
        &self,
        guest: &mut MeasuringGuest,
        backing: &'static str,
        select: u64,
        n: u64,
        period: u64,
        symbols: &Symbols,
    ) -> Result<Vec<ValidationRow>, VmMeasurementError> {
        let row = ValidationRow::new(
            ValidationCheckKind::Sampling,
            "cycles",
            backing,
            "operator's samples",
        );
        let job = MeasurementJob::new("spin", n).at_cpl(3).counter(select | BOTH);
        let operator = OperatorEventConfig {
            events: "cycles",
            period: Some(period),
        };
        let outcome = guest.measure(&job, Some(operator))?;
        let counted = outcome.cpus.first().and_then(|cpu| cpu.c.first()).copied();
        let ticks = self.cpu_ticks(&outcome, 0);
        let Some(saw) = outcome.operator else {
            return Ok(vec![row.failed("nobody sampled")]);
        };
        if let Err(why) = &saw.opened {
            return Ok(vec![
                row.failed(format!("the operator's event was refused: {why}")),
            ]);
        }
        let number = Tolerance::PercentAnd(5.0, 2);
        let seen = CountComparison {
            guest: counted.map(|counted| counted / period),
            host: Some(ExpectedCount::new(saw.samples.len() as u64 + saw.lost, number)),
            expected: (backing == "clock").then_some(ExpectedCount::new(ticks / period, number)),
        };
        let mut rows = vec![row.with_verdict(&seen, CPU_TIME)];
        let hits = |name| {
            saw.samples
                .iter()
                .filter(|ip| symbols.find(**ip) == Some(name))
                .count() as u64
        };
        let hits = SHARES.map(|(name, _)| hits(name));
        let all = hits.iter().sum();
        for ((name, percent), hits) in SHARES.iter().zip(hits) {
            let row = ValidationRow::new(
                ValidationCheckKind::Sampling,
                "cycles",
                backing,
                format!("operator's, in {name}"),
            );
            rows.push(share(row, hits, all, *percent));
        }
        Ok(rows)
    }
}

/// Compares the number of PMIs of the sampling counter with the number of periods that a second
/// counter counted at the same time.
fn interrupts(row: ValidationRow, outcome: &Measurement, period: u64) -> ValidationRow {
    let Some(cpu) = outcome.cpus.first() else {
        return row;
    };
    let counted = cpu.c.get(1).copied().unwrap_or(0);
    // Periods that elapsed before the handler ran have no PMI and are not added here. At sixty
    // samples per second, there are none.
    let seen = CountComparison {
        guest: Some(cpu.pmis),
        host: outcome
            .overflows(0, "gp0")
            .map(|overflows| ExpectedCount::new(overflows, NUMBER)),
        expected: Some(ExpectedCount::new(counted / period, NUMBER)),
    };
    row.with_verdict(&seen, "a second counter's count over the period")
}

/// Total number of PMIs of the VM, number of delayed PMIs, and their total delay in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
struct PmiTotals {
    all: u64,
    held: u64,
    held_ns: u64,
}

fn held_pmis(guest: &mut MeasuringGuest) -> Result<PmiTotals, VmMeasurementError> {
    let vcpus = guest.vm.client()?.call(request::Counts)?;
    Ok(vcpus.iter().fold(PmiTotals::default(), |sum, vcpu| PmiTotals {
        all: sum.all + vcpu.pmi_nmi + vcpu.pmi_vector + vcpu.pmi_withdrawn,
        held: sum.held + vcpu.pmi_held,
        held_ns: sum.held_ns + vcpu.pmi_held_ns,
    }))
}

/// Checks the number of delayed PMIs and their mean delay. A PMI is delayed at most once and for at
/// most one second.
fn held_rows(backing: &'static str, before: PmiTotals, after: PmiTotals) -> [ValidationRow; 2] {
    let held = after.held - before.held;
    let mean_us = (after.held_ns - before.held_ns) / held.max(1) / 1000;
    let row = |what: &str, seen, most, basis| {
        let row = ValidationRow::new(ValidationCheckKind::Sampling, "cycles", backing, what);
        let evidence = CountComparison::of_guest(Some(seen), ExpectedCount::new(most, Tolerance::AtMost));
        row.with_verdict(&evidence, basis)
    };
    [
        row(
            "PMIs held back",
            held,
            after.all - before.all,
            "the PMIs of these rows",
        ),
        row(
            "their mean delay, us",
            mean_us,
            1_000_000,
            "the longest delay of a PMI",
        ),
    ]
}

/// Marks the row as failed if the guest received an interrupt without an overflow, which would
/// cause an "unknown reason" NMI message in a Linux guest.
fn check_no_spurious(row: ValidationRow, spurious: u64) -> ValidationRow {
    let seen = CountComparison::of_guest(Some(spurious), ExpectedCount::new(0, Tolerance::Exact));
    row.with_verdict(&seen, "each PMI is for an overflow that its handler finds")
}

/// Judges the share of one function in a profile. The function does `percent` percent of the work
/// and has `hits` of the `all` samples.
pub(crate) fn share(row: ValidationRow, hits: u64, all: u64, percent: u64) -> ValidationRow {
    if all < 50 {
        return row.failed("too few samples to tell");
    }
    let (expected, basis) = expected_samples(all, percent);
    let seen = CountComparison::of_guest(Some(hits), expected);
    row.with_verdict(&seen, basis)
}

/// Guest functions by start address.
struct Symbols(Vec<(u64, String)>);

impl Symbols {
    fn parse(text: &str) -> Self {
        let line = |line: &str| {
            let mut words = line.split_ascii_whitespace();
            let address = u64::from_str_radix(words.next()?, 16).ok()?;
            Some((address, words.nth(1)?.to_owned()))
        };
        let mut list: Vec<_> = text.lines().filter_map(line).collect();
        list.sort();
        Self(list)
    }

    fn find(&self, address: u64) -> Option<&str> {
        let after = self.0.partition_point(|(start, _)| *start <= address);
        Some(&self.0.get(after.checked_sub(1)?)?.1)
    }
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{counter, outcome};
    use super::*;
    use crate::judge::Verdict;

    #[test]
    fn held_pmis_are_reported_with_mean_delay() {
        let before = PmiTotals {
            all: 10,
            held: 2,
            held_ns: 1_000,
        };
        let after = PmiTotals {
            all: 110,
            held: 6,
            held_ns: 2_001_000,
        };
        let [held, delay] = held_rows("clock", before, after);
        assert_eq!(
            (held.guest, held.expected, held.verdict),
            (Some(4), Some(100), Verdict::Pass)
        );
        assert_eq!((delay.guest, delay.verdict), (Some(500), Verdict::Pass));
        let [held, delay] = held_rows("clock", before, before);
        assert_eq!(
            (held.guest, held.verdict, delay.guest),
            (Some(0), Verdict::Pass, Some(0))
        );
    }

    /// The number of PMIs in the guest must match both the number of elapsed periods and the number
    /// of overflows that the host has seen.
    #[test]
    fn pmi_count_must_match_periods_and_overflows() {
        let row = |pmis: u64, overflows: u64| {
            let mut seen = outcome(&[0, 150_000]);
            seen.cpus[0].pmis = pmis;
            seen.before[0].counters = vec![counter("gp0", 0)];
            seen.after[0].counters = vec![control_api::protocol::GuestCounter {
                overflows: Some(overflows),
                ..counter("gp0", 0)
            }];
            let row = ValidationRow::new(ValidationCheckKind::Sampling, "cycles", "clock", "PMIs");
            interrupts(row, &seen, 1000)
        };
        assert_eq!(row(150, 150).verdict, Verdict::Pass);
        assert_eq!(row(143, 143).verdict, Verdict::Pass, "5 % are allowed");
        assert_eq!(row(130, 130).verdict, Verdict::Fail, "lost");
        assert_eq!(row(170, 170).verdict, Verdict::Fail, "too many");
        assert_eq!(
            row(150, 100).verdict,
            Verdict::Fail,
            "the host saw fewer overflows"
        );
    }

    /// A profile that deviates by more than the statistical variation fails.
    #[test]
    fn skewed_profile_fails() {
        let row = || ValidationRow::new(ValidationCheckKind::Sampling, "cycles", "clock", "x");
        assert_eq!(share(row(), 600, 1000, 60).verdict, Verdict::Pass);
        assert_eq!(share(row(), 645, 1000, 60).verdict, Verdict::Pass);
        assert_eq!(share(row(), 700, 1000, 60).verdict, Verdict::Fail);
        assert_eq!(share(row(), 500, 1000, 60).verdict, Verdict::Fail);
        assert_eq!(share(row(), 6, 10, 60).verdict, Verdict::Fail);
    }

    /// One spurious interrupt is a failure, independent of time.
    #[test]
    fn spurious_interrupt_fails() {
        let row = |spurious| {
            let row = ValidationRow::new(ValidationCheckKind::Sampling, "cycles", "clock", "x");
            check_no_spurious(row, spurious)
        };
        assert_eq!(row(0).verdict, Verdict::Pass);
        assert_eq!((row(1).verdict, row(1).of_time), (Verdict::Fail, false));
    }

    #[test]
    fn address_resolves_to_preceding_symbol() {
        let symbols = Symbols::parse("0000000000100010 T b\n0000000000100000 T a\nnonsense\n");
        assert_eq!(symbols.find(0x10_000F), Some("a"));
        assert_eq!(symbols.find(0x10_0010), Some("b"));
        assert_eq!(symbols.find(0xF_FFFF), None);
    }
}
