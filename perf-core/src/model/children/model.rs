//! Loom model of child exits. Checks the code of [`super::Children`] under loom's mutex, with
//! loom's atomics in the children.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p perf-core --release --lib ::model::`.

use loom::sync::atomic::{AtomicU64, Ordering::Relaxed};
use loom::sync::{Arc, Mutex};
use loom::thread;

use super::{Children, FamilyMember};
use crate::model::slices::EstimateSum;
use crate::model::totals::{ExitedTotals, Totals};
use crate::time::EventTimeTotals;

/// A child event with an atomic count, which another thread increments.
#[derive(Clone)]
struct Child {
    id: usize,
    count: Arc<AtomicU64>,
}

impl FamilyMember for Child {
    fn totals(&self) -> Totals {
        let n = self.count.load(Relaxed);
        Totals {
            count: n,
            times: EventTimeTotals {
                enabled_ns: n,
                running_ns: n,
            },
        }
    }

    fn totals_and_estimate(&self) -> (Totals, EstimateSum) {
        let totals = self.totals();
        (totals, EstimateSum::of(totals, None))
    }
}

#[derive(Default)]
struct Parent {
    folded: ExitedTotals,
}

type Family = Arc<(Mutex<Children<Child>>, Parent)>;

fn family(n: usize) -> (Family, Vec<Child>) {
    let members: Vec<_> = (0..n)
        .map(|id| Child {
            id,
            count: Arc::new(AtomicU64::new(0)),
        })
        .collect();
    let mut children = Children::default();
    for child in &members {
        children.add(child.clone());
    }
    (Arc::new((Mutex::new(children), Parent::default())), members)
}

fn sum(family: &Family) -> u64 {
    let children = family.0.lock().unwrap();
    let totals = children.totals(&family.1.folded);
    // A child's count equals its time running. The sums must be equal too, unless only one of the
    // two was folded.
    assert_eq!(totals.count, totals.times.running_ns);
    totals.count
}

/// Counts `work` in `child`, and then removes the child from the family and adds its totals to the
/// parent, as when a vCPU exits.
fn work_and_exit(family: &Family, child: &Child, work: u64) {
    for _ in 0..work {
        child.count.fetch_add(1, Relaxed);
    }
    let folded = family
        .0
        .lock()
        .unwrap()
        .fold(&family.1.folded, |c| c.id == child.id);
    assert_eq!(folded.map(|(_, last)| last.count), Some(work));
}

#[test]
fn p14_child_exit_counts_exactly_once() {
    loom::model(|| {
        let (family, members) = family(2);
        let vcpus: Vec<_> = members
            .into_iter()
            .map(|child| {
                let family = Arc::clone(&family);
                thread::spawn(move || work_and_exit(&family, &child, 1))
            })
            .collect();
        let first = sum(&family);
        let second = sum(&family);
        assert!(first <= second && second <= 2, "{first} then {second}");
        for vcpu in vcpus {
            vcpu.join().unwrap();
        }
        assert_eq!(sum(&family), 2);
        assert!(family.0.lock().unwrap().live().is_empty());
    });
}

#[test]
fn close_and_exit_remove_child_once() {
    loom::model(|| {
        let (family, members) = family(1);
        let closer = {
            let family = Arc::clone(&family);
            thread::spawn(move || family.0.lock().unwrap().drain().len())
        };
        let folded = family
            .0
            .lock()
            .unwrap()
            .fold(&family.1.folded, |c| c.id == members[0].id)
            .is_some();
        assert_eq!(closer.join().unwrap() + usize::from(folded), 1);
    });
}
