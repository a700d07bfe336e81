//! Tests of rows from perf's sample reports.

use super::*;
use crate::host::tests::clock_host;
use crate::judge::Verdict;
use crate::linux::tests::ScriptedValues;

#[test]
fn report_is_read() {
    let text = "# Samples: 7\n#\n     5  [.] heavy\n     1  [k] native_write_msr\n     1  [.] 0x00000000004015a5\n\n";
    let read = samples(text);
    assert_eq!(read.len(), 3);
    assert_eq!(read[0], (5, "heavy".to_owned()));
    assert_eq!(read.iter().map(|(n, _)| n).sum::<u64>(), 7);
}

/// Returns the rows for a profile with `hits` samples in the three functions, an operator count of
/// `counted` periods, and `overflows` overflows on the host.
fn rows(hits: [u64; 3], counted: u64, overflows: Option<u64>) -> Vec<ValidationRow> {
    let host = clock_host();
    let period = host.tsc_hz / SAMPLES_PER_SECOND;
    let line = |((name, _), hits): (&(&str, u64), u64)| format!("{hits:>6}  [.] {name}\n");
    let report: String = SHARES.iter().zip(hits).map(line).collect();
    let told = ScriptedValues {
        cpu_ns: 3_000_000_000,
        moved: vec![0],
        overflows,
        operator: Some(vec![counted * period]),
        ..ScriptedValues::default()
    };
    let told = told.prints("*perf\\ report*", format!("# Samples: 1\n#\n{report}"));
    told.rows(&host, |linux, guest, rows| linux.sampling(guest, "clock", rows))
}

/// A profile passes if the number of samples matches the periods and the overflows, and their
/// distribution matches the work.
#[test]
fn matching_profile_passes() {
    for overflows in [Some(240), None] {
        let rows = rows([144, 72, 24], 240, overflows);
        assert!(
            rows.iter()
                .all(|row| row.verdict == Verdict::Pass && row.measurements == 3),
            "{rows:?}"
        );
        assert_eq!(rows.len(), 4, "their number, and each function");
    }
}

/// A wrong distribution fails, as do too few samples to judge the distribution.
#[test]
fn deviating_profile_fails() {
    let skewed = rows([72, 144, 24], 240, Some(240));
    let verdicts: Vec<Verdict> = skewed.iter().map(|row| row.verdict).collect();
    assert_eq!(
        verdicts,
        [Verdict::Pass, Verdict::Fail, Verdict::Fail, Verdict::Pass],
        "{skewed:?}"
    );
    let few = rows([24, 12, 4], 40, Some(40));
    assert_eq!(few[0].verdict, Verdict::Pass, "their number is right");
    assert!(
        few[1..]
            .iter()
            .all(|row| row.reason.as_deref() == Some("too few samples to tell")),
        "{few:?}"
    );
}

/// Lost or duplicate samples fail the row for the number of samples even if their distribution is
/// correct. The number must match both the operator's count and the overflows that the host has
/// seen.
#[test]
fn lost_and_doubled_samples_are_found() {
    let number = |counted, overflows| {
        let row = rows([144, 72, 24], counted, overflows).swap_remove(0);
        (row.verdict, row.reason.unwrap_or_default(), row.measurements)
    };
    let off = |why: &str| (Verdict::Fail, why.to_owned(), 3);
    assert_eq!(number(480, Some(480)), off("off the expectation"));
    assert_eq!(number(120, Some(120)), off("off the expectation"));
    assert_eq!(number(240, Some(120)), off("guest and host differ"));
    assert_eq!(
        number(225, Some(225)).0,
        Verdict::Fail,
        "5 % and 3 are allowed, and no more"
    );
    assert_eq!(number(226, Some(226)).0, Verdict::Pass);
}
