//! Tests with several writer threads and a reader on one ring. The tests also run under the thread
//! and address sanitizers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use perf_core::attr::WakeupCondition;
use perf_core::record::{EncodeRecord, RecordFormat};
use perf_core::ring::{ControlPageCounter, Ring, RingError, RingFullPolicy, RingReader};

use crate::common::ring::{
    CheckedRecord, DATA_HEAD, DATA_TAIL, NumberedRecord, check, drain, foreign, peek, ring_and_reader, wait,
    write,
};

const WRITERS: u64 = 3;
const EACH: u64 = if cfg!(debug_assertions) { 20_000 } else { 100_000 };

/// Reads all available records and checks the order of each writer's records. Returns the number of
/// records and the number of losses that LOST records report.
fn drain_in_order(reader: &mut RingReader, last: &mut [u64]) -> (u64, u64) {
    let (mut records, mut lost) = (0, 0);
    drain(reader, |record| match check(record) {
        CheckedRecord::Lost(n) => {
            assert!(n > 0, "no report of nothing");
            lost += n;
        }
        CheckedRecord::Tagged(writer, number) => {
            assert!(number > last[writer as usize], "order of writer {writer}");
            last[writer as usize] = number;
            records += 1;
        }
    });
    (records, lost)
}

#[test]
fn p28_p29_p30_threads_write_whole_records_in_order_and_losses_add_up() {
    let (ring, mut reader) = ring_and_reader(1, RingFullPolicy::Writable);
    let (done, refused) = (AtomicU64::new(0), AtomicU64::new(0));
    let page = foreign(&ring);
    let mut last = [0; WRITERS as usize];
    let (mut records, mut lost, mut head) = (0, 0, 0);
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (ring, done, refused) = (&ring, &done, &refused);
            scope.spawn(move || {
                // The last writer writes its records in batches of five.
                if writer == WRITERS - 1 {
                    for first in (1..=EACH).step_by(5) {
                        let records = (first..first + 5)
                            .map(|n| NumberedRecord::new(3 + (n * 7 % 15) as usize, writer, n));
                        let written = NumberedRecord::write_all(records, RecordFormat::default(), ring);
                        assert_eq!((written.written + written.lost, written.oversized), (5, 0));
                        refused.fetch_add(written.lost, Ordering::Relaxed);
                    }
                    done.fetch_add(1, Ordering::Release);
                    return;
                }
                for number in 1..=EACH {
                    let size = 24 + 8 * ((number * 7 + writer) % 40) as usize;
                    match write(ring, size, writer, number) {
                        Ok(()) => {}
                        Err(RingError::Full) => {
                            refused.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(error) => panic!("{error}"),
                    }
                }
                done.fetch_add(1, Ordering::Release);
            });
        }
        loop {
            let finished = done.load(Ordering::Acquire) == WRITERS;
            let published = peek(&page, DATA_HEAD);
            assert!(published >= head, "the head only grows");
            head = published;
            let unread = published - peek(&page, DATA_TAIL);
            assert!(
                unread <= ring.data_size() as u64,
                "{unread} unread bytes in a ring of one page"
            );
            let (more, more_lost) = drain_in_order(&mut reader, &mut last);
            records += more;
            lost += more_lost;
            if finished {
                break;
            }
            std::thread::yield_now();
        }
    });
    // Each rejected record is counted in a LOST record or still pending.
    assert_eq!(lost + ring.pending_lost(), refused.into_inner());
    // Each record was either read or counted as lost.
    assert_eq!(records + lost + ring.pending_lost(), WRITERS * EACH);
}

#[test]
fn p31_reader_sleeping_on_eventfd_misses_no_record() {
    let ring = Arc::new(Ring::new(16, RingFullPolicy::Writable).expect("a ring"));
    ring.set_wakeup(WakeupCondition::Events(1));
    let mut reader = RingReader::of(Arc::clone(&ring));
    let mut last = [0; WRITERS as usize];
    std::thread::scope(|scope| {
        for writer in 0..WRITERS {
            let ring = &ring;
            scope.spawn(move || {
                for number in 1..=EACH / 10 {
                    while write(ring, 40, writer, number).is_err() {
                        std::thread::yield_now();
                    }
                }
            });
        }
        let mut records = 0;
        while records < WRITERS * (EACH / 10) {
            // The wait ends only with a notification, so the test fails if one is lost.
            assert!(wait(&ring), "woken; {records} records seen");
            assert!(ring.take_poll().readable);
            records += drain_in_order(&mut reader, &mut last).0;
        }
    });
}

#[test]
fn p34_the_counter_on_the_control_page_is_never_torn() {
    let ring = Arc::new(Ring::new(0, RingFullPolicy::Writable).expect("a control page"));
    let reader = RingReader::map(ring.memfd()).expect("maps");
    let stop = AtomicBool::new(false);
    let counter = |n: u64| ControlPageCounter {
        index: n as u32 % 8,
        offset: n as i64 * -3,
        time_enabled_ns: n * 5,
        time_running_ns: n * 4,
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0..EACH {
                ring.control().update(counter(n)).expect("the only updater");
            }
            stop.store(true, Ordering::Release);
        });
        let mut seen = 0;
        while !stop.load(Ordering::Acquire) {
            if let Some(now) = reader.counter() {
                let n = now.time_enabled_ns / 5;
                assert_eq!(now, counter(n), "all fields of one update");
                assert!(n >= seen, "updates are seen in order");
                seen = n;
            }
        }
    });
    assert_eq!(reader.counter(), Some(counter(EACH - 1)));
}
