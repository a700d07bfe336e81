//! Tests of the rows for `--backing exact`, with a scripted guest.

use serde_json::Value;

use super::*;
use crate::child::tests::never_stop;
use crate::guest::tests::{counted, hello, measuring};
use crate::host::HostProperties;
use crate::host::tests::{clock_host, options};
use crate::judge::Verdict;

/// Returns the shell pattern that matches the request to measure `event` over `work` at the
/// privilege levels `levels`.
fn pattern(event: ArchEvent, work: &str, levels: u64) -> String {
    format!(
        "*work={work}\\ *c={:#x}\\ *",
        selector(event, false).unwrap() | levels
    )
}

/// Returns the rows for a scripted guest. At CPL 0, its count of each event is the result of
/// `answer` for the event, the type of work and the known count (`None` if no count is known). At
/// CPL 3, the count is that of the loop alone.
fn rows(host: &HostProperties, answer: impl Fn(ArchEvent, &str, Option<u64>) -> u64) -> Vec<ValidationRow> {
    let mut results: Vec<(String, Value)> = Vec::new();
    let mut add = |pattern, count| results.push((pattern, counted(&[count])));
    add(pattern(ArchEvent::Instructions, "busy", USR), 2 * ROUNDS + 5);
    add(pattern(ArchEvent::Branches, "busy", USR), ROUNDS + 1);
    for event in ArchEvent::ALL
        .into_iter()
        .filter(|event| selector(*event, false).is_some())
    {
        let counted_as = match event {
            ArchEvent::CoreCycles | ArchEvent::RefCycles | ArchEvent::BusCycles => ArchEvent::Instructions,
            other => other,
        };
        for work in ["busy", "chase"] {
            let known = known(counted_as, work, ROUNDS);
            add(pattern(event, work, OS), answer(event, work, known));
        }
    }
    let results: Vec<(&str, Value)> = results
        .iter()
        .map(|(pattern, v)| (pattern.as_str(), v.clone()))
        .collect();
    let (options, signals) = (options(), never_stop());
    let builtin = Builtin {
        options: &options,
        host,
        signals: &signals,
    };
    // The host's view has no counters, so only the guest's counts are judged.
    let mut guest = measuring(&hello(2), &results, Vec::new());
    let mut on_row = |_: &ValidationRow| ();
    let mut rows = ValidationRowCollector::new(&mut on_row);
    builtin.exact_rows(&mut guest, &mut rows).unwrap();
    rows.into_vec()
}

fn honest(_: ArchEvent, _: &str, known: Option<u64>) -> u64 {
    known.unwrap_or(0)
}

/// Correct counts pass in each row. An event that stepping cannot count is reported as not
/// supported.
#[test]
fn correct_counts_pass() {
    let rows = rows(&clock_host(), honest);
    for row in &rows {
        let known =
            !["cache-references", "cache-misses", "branch-misses", "slots"].contains(&row.event.as_str());
        let right = if known {
            Verdict::Pass
        } else {
            Verdict::NotSupported
        };
        assert_eq!(row.verdict, right, "{row:?}");
        assert!(!row.of_time, "stepping does not go with time: {row:?}");
    }
    let user: Vec<&ValidationRow> = rows.iter().filter(|row| row.event.ends_with(":u")).collect();
    assert_eq!(user.len(), 2, "instructions and branches at CPL 3");
}

/// A count that is off by one instruction, branch, load or store fails the row of its event and no
/// other row.
#[test]
fn count_off_by_one_fails_its_row() {
    for event in ArchEvent::ALL {
        let Some(_) = selector(event, false).filter(|_| known(event, "busy", ROUNDS).is_some()) else {
            continue;
        };
        for off in [-1, 1] {
            let rows = rows(&clock_host(), |asked, work, known| {
                let right = honest(asked, work, known);
                if asked == event && work == "chase" {
                    right.wrapping_add_signed(off)
                } else {
                    right
                }
            });
            let failed: Vec<(&str, &str)> = rows
                .iter()
                .filter(|row| row.verdict == Verdict::Fail)
                .map(|row| (row.event.as_str(), row.workload.as_str()))
                .collect();
            assert_eq!(failed, [(event.name(), "chase, CPL0")], "off by {off}");
        }
    }
}

/// The row of an event that single-stepping cannot count fails if the event's counter changes.
#[test]
fn unsupported_event_must_not_move_when_stepped() {
    let rows = rows(&clock_host(), |_, _, known| known.unwrap_or(1));
    let moved = rows.iter().filter(|row| row.verdict == Verdict::Fail);
    let moved: Vec<&ValidationRow> = moved.collect();
    assert!(!moved.is_empty());
    for row in moved {
        assert!(row.reason.as_ref().unwrap().contains("but it moved"), "{row:?}");
        assert_eq!(row.guest, Some(1), "the number that gives it away is shown");
    }
}

/// If KVM cannot single-step code at CPL 3, counts at CPL 3 must be 0.
#[test]
fn user_counts_are_zero_without_user_stepping() {
    let host = HostProperties {
        steps_user: false,
        ..clock_host()
    };
    let rows = rows(&host, honest);
    let user: Vec<&ValidationRow> = rows.iter().filter(|row| row.event.ends_with(":u")).collect();
    assert_eq!(user.len(), 2);
    for row in user {
        assert_eq!(row.verdict, Verdict::Fail, "{row:?}");
        assert!(
            row.reason.as_ref().unwrap().contains("cannot single-step CPL 3"),
            "{row:?}"
        );
    }
}

/// A host without single-stepping has one row with the reason and starts no guest.
#[test]
fn host_without_stepping_has_one_row() {
    let host = HostProperties {
        no_exact: Some("no single-stepping".into()),
        ..clock_host()
    };
    let (options, signals) = (options(), never_stop());
    let builtin = Builtin {
        options: &options,
        host: &host,
        signals: &signals,
    };
    let mut on_row = |_: &ValidationRow| ();
    let mut rows = ValidationRowCollector::new(&mut on_row);
    builtin.exact(&mut rows).unwrap();
    let rows = rows.into_vec();
    assert_eq!(rows.len(), 1);
    assert_eq!(
        (rows[0].verdict, rows[0].reason.as_deref()),
        (Verdict::NotSupported, Some("no single-stepping"))
    );
}
