//! Model checking of the ring's protocol. Covers every interleaving, and every reordering that the
//! memory model allows, of a few writers, nested writers and a reader. Runs the code of
//! `protocol.rs` with loom's atomics.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test -p perf-core --release --lib ring::model`.

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::AtomicU64;
use loom::thread;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::protocol::{Claim, Protocol, RingGeometry, SharedWords};

/// Default size of the modelled ring's data area, in units of 8 bytes.
const UNITS: usize = 8;

struct Ring {
    protocol: Protocol<AtomicU64>,
    head: AtomicU64,
    tail: AtomicU64,
    /// Data area of the ring. The model fails if one thread may read a unit while another thread
    /// writes it.
    data: Vec<UnsafeCell<u64>>,
    /// Position of the head at the latest notification of the reader.
    notified: AtomicU64,
}

// SAFETY: the model checks the accesses to the cells.
unsafe impl Sync for Ring {}
// SAFETY: as above.
unsafe impl Send for Ring {}

impl Ring {
    fn new(overwrite: bool) -> Arc<Self> {
        Self::with_units(UNITS, overwrite)
    }

    fn with_units(units: usize, overwrite: bool) -> Arc<Self> {
        let shape = RingGeometry {
            size: 8 * units as u64,
            overwrite,
        };
        Arc::new(Self {
            protocol: Protocol::new(shape, 0),
            head: AtomicU64::new(0),
            tail: AtomicU64::new(0),
            data: (0..units).map(|_| UnsafeCell::new(0)).collect(),
            notified: AtomicU64::new(0),
        })
    }

    fn shared(&self) -> SharedWords<'_, AtomicU64> {
        SharedWords {
            data_head: &self.head,
            data_tail: &self.tail,
        }
    }

    fn begin(&self, units: u64) -> Option<Claim> {
        let claim = self.protocol.reserve(&self.shared(), units * 8, 1);
        if claim.is_none() {
            self.protocol.add_lost(1);
        }
        claim
    }

    /// Fills a claim (a reserved range) with one record. The first unit contains the record's
    /// length in units, and all other units contain `tag`.
    fn fill(&self, claim: &Claim, tag: u64) {
        self.fill_part(claim.start, (claim.end - claim.start) / 8, tag);
    }

    /// Fills a record of `units` units at position `start`, in a claim that contains several
    /// records.
    fn fill_part(&self, start: u64, units: u64, tag: u64) {
        let first = start / 8;
        for unit in first..first + units {
            let value = if unit == first { units } else { tag };
            // SAFETY: loom checks the exclusive access.
            self.data[unit as usize % self.data.len()].with_mut(|cell| unsafe { *cell = value });
        }
    }

    fn end(&self, claim: Claim) {
        if self.protocol.end(&self.shared(), claim) {
            let head = self.head.load(Relaxed);
            self.notified.fetch_max(head, Relaxed);
        }
    }

    fn write(&self, units: u64, tag: u64) -> bool {
        let Some(claim) = self.begin(units) else {
            return false;
        };
        self.fill(&claim, tag);
        self.end(claim);
        true
    }

    /// Reads whole records up to the head and returns their number.
    ///
    /// # Panics
    ///
    /// Panics if a record is incomplete.
    fn read(&self) -> usize {
        self.read_tagged(0).0
    }

    /// Reads whole records as `read` does and returns the number of all records and the number of
    /// records with tag `wanted`.
    fn read_tagged(&self, wanted: u64) -> (usize, usize) {
        let head = self.head.load(Acquire);
        let mut tail = self.tail.load(Relaxed);
        let (mut records, mut tagged) = (0, 0);
        // SAFETY: loom checks that there is no concurrent write.
        let unit = |at: u64| self.data[(at / 8) as usize % self.data.len()].with(|cell| unsafe { *cell });
        while tail < head {
            let units = unit(tail);
            assert!(units >= 2 && tail + 8 * units <= head, "whole records only");
            let tag = unit(tail + 8);
            // All words of a record were written by the same writer.
            assert!((1..units).all(|n| unit(tail + 8 * n) == tag));
            tail += 8 * units;
            records += 1;
            tagged += usize::from(tag == wanted);
        }
        self.tail.store(tail, Release);
        (records, tagged)
    }
}

fn check(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(model);
}

#[test]
fn p28_a_reader_beside_two_writers_sees_whole_records_and_in_the_end_all() {
    check(2, || {
        let ring = Ring::new(false);
        let writers = [1, 2].map(|tag| {
            let ring = Arc::clone(&ring);
            thread::spawn(move || assert!(ring.write(2, tag)))
        });
        let mut seen = ring.read();
        for writer in writers {
            writer.join().expect("no panic");
        }
        seen += ring.read();
        assert_eq!(seen, 2);
        assert_eq!(ring.head.load(Relaxed), 32);
    });
}

#[test]
fn p28_nested_writers_are_published_whole_by_the_outermost() {
    check(2, || {
        let ring = Ring::new(false);
        let other = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || assert!(ring.write(2, 3)))
        };
        let reader = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || ring.read())
        };
        // A signal handler that interrupts a writer is modeled by a second record that is begun and
        // ended inside the first.
        let outer = ring.begin(3).expect("room");
        let inner = ring.begin(2).expect("room");
        ring.fill(&inner, 2);
        ring.end(inner);
        ring.fill(&outer, 1);
        ring.end(outer);
        other.join().expect("no panic");
        let seen = reader.join().expect("no panic") + ring.read();
        assert_eq!(seen, 3);
        assert_eq!(ring.head.load(Relaxed), 56, "no publication takes the head back");
    });
}

#[test]
fn p28_batch_is_published_at_once_beside_another_writer() {
    check(3, || {
        let ring = Ring::new(false);
        ring.protocol.set_wakeup(1 << 20, 3);
        let writer = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || {
                let claim = ring.protocol.reserve(&ring.shared(), 32, 2).expect("room");
                ring.fill_part(claim.start, 2, 1);
                ring.fill_part(claim.start + 16, 2, 1);
                ring.end(claim);
            })
        };
        let other = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || assert!(ring.write(2, 2)))
        };
        let (all, of_run) = ring.read_tagged(1);
        assert!(of_run != 1, "both records of the run or none");
        writer.join().expect("no panic");
        other.join().expect("no panic");
        assert_eq!(all + ring.read(), 3);
        assert_eq!(ring.head.load(Relaxed), 48);
        // The record with the third sample wakes the reader after all three records are readable.
        assert_eq!(ring.notified.load(Relaxed), 48);
    });
}

#[test]
fn p29_alternating_publishers_never_move_head_back() {
    // Two writer threads publish concurrently. Each may publish first or leave the publication to
    // the other. The reader checks the head twice.
    check(3, || {
        let ring = Ring::new(false);
        let writer = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || assert!(ring.write(2, 1) && ring.write(2, 2)))
        };
        let reader = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || {
                let first = ring.head.load(Acquire);
                let second = ring.head.load(Acquire);
                assert!(first <= second, "from {first} back to {second}");
            })
        };
        assert!(ring.write(2, 3));
        writer.join().expect("no panic");
        reader.join().expect("no panic");
        assert_eq!(ring.head.load(Relaxed), 48);
        assert_eq!(ring.protocol.published(), 48);
        assert_eq!(ring.read(), 3);
    });
}

#[test]
fn p29_space_is_reused_only_after_the_reader_gave_it_back_and_the_head_never_goes_back() {
    check(3, || {
        let ring = Ring::new(false);
        assert!(ring.write(4, 1));
        let writer = {
            let ring = Arc::clone(&ring);
            // The first record always fits. The second fits only if the reader has released enough
            // space.
            thread::spawn(move || usize::from(ring.write(3, 2)) + usize::from(ring.write(3, 3)))
        };
        let before = ring.head.load(Relaxed);
        let mut seen = ring.read();
        assert!(ring.head.load(Relaxed) >= before);
        let written = 1 + writer.join().expect("no panic");
        seen += ring.read();
        assert_eq!(seen, written);
    });
}

/// Writes a record as `Ring::begin` does, together with the pending losses. If the ring is full,
/// counts the record as lost and keeps the pending losses. Returns the number of written records
/// and the number of losses reported.
fn attempt(ring: &Ring, tag: u64) -> (u64, u64) {
    let lost = ring.protocol.take_lost();
    match ring.protocol.reserve(&ring.shared(), 32, 0) {
        Some(claim) => {
            ring.fill(&claim, tag);
            ring.end(claim);
            (1, lost)
        }
        None => {
            ring.protocol.add_lost(lost + 1);
            (0, 0)
        }
    }
}

#[test]
fn p30_written_and_lost_records_add_up() {
    check(3, || {
        let ring = Ring::new(false);
        let writer = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || attempt(&ring, 1))
        };
        let (first, lost_first) = attempt(&ring, 2);
        ring.read();
        let (second, lost_second) = attempt(&ring, 3);
        let (third, lost_third) = writer.join().expect("no panic");
        let reported = lost_first + lost_second + lost_third;
        assert_eq!(
            first + second + third + reported + ring.protocol.pending_lost(),
            3
        );
    });
}

#[test]
fn p30_losses_are_reported_once_when_two_writers_find_them_pending() {
    check(3, || {
        let ring = Ring::new(false);
        // The ring has space for one record. The second attempt is lost, and its loss is pending.
        assert_eq!(attempt(&ring, 1), (1, 0));
        assert_eq!(attempt(&ring, 2), (0, 0));
        let writer = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || attempt(&ring, 3))
        };
        ring.read();
        let (first, lost_first) = attempt(&ring, 4);
        let (second, lost_second) = writer.join().expect("no panic");
        assert_eq!(
            1 + first + second + lost_first + lost_second + ring.protocol.pending_lost(),
            4
        );
    });
}

#[test]
fn p31_last_due_record_wakes_reader_after_publication() {
    check(3, || {
        let ring = Ring::new(false);
        ring.protocol.set_wakeup(1 << 20, 1);
        let writers = [1, 2].map(|tag| {
            let ring = Arc::clone(&ring);
            thread::spawn(move || assert!(ring.write(2, tag)))
        });
        for writer in writers {
            writer.join().expect("no panic");
        }
        // The reader is notified after the last publication.
        assert_eq!(ring.notified.load(Relaxed), 32);
    });
}

#[test]
fn p31_a_count_of_samples_gives_exactly_its_share_of_wakeups() {
    check(3, || {
        let ring = Ring::new(false);
        ring.protocol.set_wakeup(1 << 20, 2);
        let writer = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || assert!(ring.write(2, 1)))
        };
        assert!(ring.write(2, 2));
        writer.join().expect("no panic");
        assert_eq!(ring.notified.load(Relaxed), 32, "the second of two samples wakes");
    });
}

#[test]
fn p28_a_generation_that_is_closed_while_others_write_loses_nothing() {
    // Each record is at least an eighth of the ring, so each writer that ends while another is in
    // flight closes a generation.
    check(3, || {
        let ring = Ring::new(false);
        let other = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || assert!(ring.write(2, 1)))
        };
        let first = ring.begin(2).expect("room");
        let second = ring.begin(2).expect("room");
        ring.fill(&first, 2);
        // If the other writer ended in between, `first` is the last record of the old generation.
        // Ending it must publish exactly up to the boundary of that generation, because `second` is
        // not written yet.
        ring.end(first);
        let mut seen = ring.read();
        ring.fill(&second, 3);
        ring.end(second);
        seen += ring.read();
        other.join().expect("no panic");
        seen += ring.read();
        assert_eq!(seen, 3);
        assert_eq!(ring.head.load(Relaxed), 48);
    });
}

#[test]
fn p29_writer_joining_during_publication_does_not_move_head_back() {
    // In the critical interleaving, the second of four records closes the generation of the first,
    // and the third extends beyond its boundary. The fourth begins just when the first, as the only
    // writer, has published the head and is about to decrement the writer count. In tests the
    // protocol asserts that no publication is behind the previous one.
    check(3, || {
        let ring = Ring::with_units(16, false);
        let first = ring.begin(2).expect("room");
        let ender = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || {
                ring.fill(&first, 9);
                ring.end(first);
            })
        };
        (1..4).for_each(|tag| assert!(ring.write(2, tag)));
        ender.join().expect("no panic");
        assert_eq!(ring.head.load(Relaxed), 64);
        assert_eq!(ring.protocol.published(), 64);
        assert_eq!(ring.read(), 4);
    });
}
