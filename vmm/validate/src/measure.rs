//! Repeated measurements and their common verdict.
//!
//! Other load on the host disturbs time-dependent measurements. Such a row is measured a fixed
//! number of times, regardless of the results, and all measurements are judged together.

use crate::child::VmMeasurementError;
use crate::judge::Verdict;
use crate::report::ValidationRow;

/// Number of measurements of a time-dependent row.
pub const MEASUREMENTS: u32 = 3;

/// Measures a single row. See [`measure_rows`].
pub(crate) fn measure_row(
    mut measure: impl FnMut() -> Result<ValidationRow, VmMeasurementError>,
) -> Result<ValidationRow, VmMeasurementError> {
    measure_rows(|| Ok(vec![measure()?])).map(|mut rows| rows.swap_remove(0))
}

/// Calls `measure`, which measures one or more rows, and judges each row. If a row depends on time,
/// calls `measure` [`MEASUREMENTS`] times and judges each row by all of its measurements.
///
/// A failure that is independent of time is final. Otherwise the verdict of the majority of
/// measurements is used. Without a majority, the verdict is `Verdict::TooBusy`. The median is shown
/// with the spread.
pub(crate) fn measure_rows(
    mut measure: impl FnMut() -> Result<Vec<ValidationRow>, VmMeasurementError>,
) -> Result<Vec<ValidationRow>, VmMeasurementError> {
    let mut all = vec![measure()?];
    let depends_on_time = |row: &ValidationRow| row.of_time && row.verdict != Verdict::NotSupported;
    if all[0].iter().any(depends_on_time) {
        for _ in 1..MEASUREMENTS {
            all.push(measure()?);
        }
    }
    // If a measurement was not possible, it has fewer rows. One of them gives the reason.
    let fewest = all.iter().map(Vec::len).min().unwrap_or_default();
    if all.iter().any(|rows| rows.len() > fewest) {
        all.retain(|rows| rows.len() == fewest);
        return Ok(all.swap_remove(0));
    }
    let row = |at: usize| combine(all.iter().map(|rows| rows[at].clone()).collect());
    Ok((0..fewest).map(row).collect())
}

/// Returns the median of the measurements of a row with their common verdict and spread.
fn combine(mut rows: Vec<ValidationRow>) -> ValidationRow {
    let measurements = u32::try_from(rows.len()).unwrap_or(u32::MAX);
    let is_final = |row: &ValidationRow| row.verdict == Verdict::Fail && !row.of_time;
    if let Some(at) = rows.iter().position(is_final) {
        return ValidationRow {
            measurements,
            ..rows.swap_remove(at)
        };
    }
    let most = |verdict| 2 * rows.iter().filter(|row| row.verdict == verdict).count() > rows.len();
    let (verdict, off) = if most(Verdict::Pass) {
        (Verdict::Pass, None)
    } else if most(Verdict::TooBusy) || !most(Verdict::Fail) {
        (Verdict::TooBusy, Some("the measurements do not agree"))
    } else {
        (Verdict::Fail, Some("most measurements are off"))
    };
    let order = |row: &ValidationRow| row.ratio.unwrap_or_else(|| row.guest.unwrap_or(0) as f64);
    rows.sort_by(|a, b| order(a).total_cmp(&order(b)));
    let ends = rows.first().zip(rows.last()).filter(|_| measurements > 1);
    let spread = ends.and_then(|(low, high)| Some([low.ratio?, high.ratio?]));
    let median = rows.swap_remove(rows.len() / 2);
    if median.verdict == Verdict::NotSupported {
        return median;
    }
    ValidationRow {
        measurements,
        spread,
        verdict,
        reason: off.map(|off| median.reason.clone().unwrap_or_else(|| off.into())),
        ..median
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::ValidationCheckKind;
    use Verdict::{Fail, Pass, TooBusy};

    fn row(of_time: bool, verdict: Verdict, ratio: f64) -> ValidationRow {
        ValidationRow {
            of_time,
            verdict,
            ratio: Some(ratio),
            reason: (verdict == Fail).then(|| format!("off by {ratio}")),
            ..ValidationRow::new(ValidationCheckKind::Sampling, "cycles", "clock", "x")
        }
    }

    /// Passes the elements of `measurements` to `measure_rows` one after another. Panics if there
    /// are too few or too many.
    fn measured(measurements: &[Vec<ValidationRow>]) -> Vec<ValidationRow> {
        let mut left = measurements.iter();
        let rows = measure_rows(|| Ok(left.next().expect("measured too often").clone())).unwrap();
        assert_eq!(left.len(), 0, "measured too rarely");
        rows
    }

    /// The number of measurements does not depend on their results.
    #[test]
    fn all_measurements_are_taken_and_judged() {
        let of_time = |verdicts: [(Verdict, f64); 3]| {
            let rows = verdicts.map(|(verdict, ratio)| vec![row(true, verdict, ratio)]);
            let row = measured(&rows).remove(0);
            assert_eq!(row.measurements, 3);
            (row.verdict, row.ratio.unwrap(), row.spread.unwrap(), row.reason)
        };
        assert_eq!(
            of_time([(Pass, 1.01), (Pass, 1.0), (Pass, 0.99)]),
            (Pass, 1.0, [0.99, 1.01], None)
        );
        assert_eq!(
            of_time([(Fail, 0.9), (Pass, 1.01), (Pass, 1.0)]),
            (Pass, 1.0, [0.9, 1.01], None)
        );
        let off = |ratio| Some(format!("off by {ratio}"));
        assert_eq!(
            of_time([(Pass, 1.0), (Fail, 0.8), (Fail, 0.9)]),
            (Fail, 0.9, [0.8, 1.0], off(0.9))
        );
        // The median is correct, but the spread exceeds the tolerance on both sides.
        let (verdict, _, spread, reason) = of_time([(Fail, 0.8), (Pass, 1.0), (Fail, 1.2)]);
        assert_eq!((verdict, spread), (Fail, [0.8, 1.2]));
        assert_eq!(reason.as_deref(), Some("most measurements are off"));
        // No verdict has a majority.
        let (verdict, ..) = of_time([(Fail, 0.8), (Pass, 1.0), (TooBusy, 1.2)]);
        assert_eq!(verdict, TooBusy);
    }

    /// A row with a known count is measured once, unless another row of the same measurement
    /// depends on time. One failure of such a row is final.
    #[test]
    fn failure_independent_of_time_is_final() {
        for verdict in [Pass, Fail] {
            let known = &measured(&[vec![row(false, verdict, 1.0)]])[0];
            assert_eq!(
                (known.verdict, known.measurements, known.spread),
                (verdict, 1, None)
            );
        }
        let both = |time, known| vec![row(true, time, 1.0), row(false, known, 1.0)];
        let rows = measured(&[both(Pass, Pass), both(Fail, Fail), both(Pass, Pass)]);
        assert_eq!((rows[0].verdict, rows[1].verdict), (Pass, Fail));
        let rows = measured(&[both(Pass, Fail), both(Pass, Pass), both(Pass, Pass)]);
        assert_eq!((rows[0].verdict, rows[1].verdict), (Pass, Fail));
    }

    #[test]
    fn measurement_without_its_rows_gives_the_reason() {
        let whole = || vec![row(true, Pass, 1.0), row(true, Pass, 1.0)];
        let refused = row(false, Fail, 2.0);
        let rows = measured(&[whole(), vec![refused], whole()]);
        assert_eq!((rows.len(), rows[0].reason.as_deref()), (1, Some("off by 2")));
        let unsupported = row(true, Pass, 1.0).unsupported("no PMU");
        assert_eq!(measured(&[vec![unsupported]])[0].verdict, Verdict::NotSupported);
    }
}
