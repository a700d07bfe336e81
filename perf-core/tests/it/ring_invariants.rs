//! Tests that perform random sequences of operations on a ring and compare the results with a
//! simple model.

use std::collections::VecDeque;
use std::sync::Arc;

use perf_core::attr::WakeupCondition;
use perf_core::record::{EncodeRecord, LostRecord, RecordFormat, RecordWriteOutcome};
use perf_core::ring::{PAGE_SIZE, RecordReservation, Ring, RingError, RingFullPolicy, RingReader};
use proptest::prelude::*;

use crate::common::ring::{
    CheckedRecord, DATA_HEAD, DATA_TAIL, NumberedRecord, check, fill, foreign, next, peek, poke,
    ring_and_reader, write,
};

#[derive(Clone, Debug)]
enum Step {
    /// Begins a record of this number of 8-byte words.
    Begin(usize),
    /// Ends the n-th open record, modulo the number of open records. Nested writers end the last
    /// record, and threads end any record.
    End(usize),
    /// Reads this number of records.
    Read(usize),
    /// Reads all available records as one batch.
    Batch,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => (3usize..60).prop_map(Step::Begin),
        1 => (60usize..=508).prop_map(Step::Begin),
        3 => any::<usize>().prop_map(Step::End),
        2 => (0usize..20).prop_map(Step::Read),
        1 => Just(Step::Batch),
    ]
}

/// A ring of one data page, and the records that the test expects to read from it.
struct Model {
    ring: Arc<Ring>,
    reader: RingReader,
    page: std::fs::File,
    head: u64,
    /// Numbers of the records that the ring accepted, in order.
    accepted: VecDeque<u64>,
    attempts: u64,
    seen: u64,
    reported: u64,
}

impl Model {
    fn new(mode: RingFullPolicy) -> Self {
        let (ring, reader) = ring_and_reader(1, mode);
        Self {
            page: foreign(&ring),
            ring,
            reader,
            head: 0,
            accepted: VecDeque::new(),
            attempts: 0,
            seen: 0,
            reported: 0,
        }
    }

    fn saw(&mut self, seen: CheckedRecord) {
        match seen {
            CheckedRecord::Lost(n) => self.reported += n,
            CheckedRecord::Tagged(_, number) => {
                // Records are read in the order in which they were reserved.
                assert_eq!(Some(number), self.accepted.pop_front());
                self.seen += 1;
            }
        }
    }

    fn read(&mut self, most: usize) {
        for _ in 0..most {
            let Some(raw) = self.reader.next_record().expect("p28: sound at every moment") else {
                return;
            };
            let seen = check(raw);
            self.saw(seen);
        }
    }

    fn batch(&mut self) {
        let batch = self.reader.batch().expect("p28: sound at every moment");
        let seen: Vec<CheckedRecord> = batch.map(check).collect();
        seen.into_iter().for_each(|seen| self.saw(seen));
    }

    fn check_positions(&mut self) {
        let (head, tail) = (peek(&self.page, DATA_HEAD), peek(&self.page, DATA_TAIL));
        assert!(head >= self.head, "p29: the head only grows");
        // p29: the writer never overwrites unread bytes.
        assert!(head - tail <= self.ring.data_size() as u64);
        self.head = head;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn p28_p29_p30_any_order_of_begin_end_and_read(steps in prop::collection::vec(step(), 0..200)) {
        let mut model = Model::new(RingFullPolicy::Writable);
        let ring = Arc::clone(&model.ring);
                let mut open: Vec<(RecordReservation<'_>, u64)> = Vec::new();
        for step in steps {
            match step {
                Step::Begin(words) => {
                    model.attempts += 1;
                    match ring.begin(8 * words, true) {
                        Ok(reservation) => {
                            model.accepted.push_back(model.attempts);
                                                        open.push((reservation, model.attempts));
                        }
                        Err(RingError::Full) => {}
                        Err(error) => prop_assert!(false, "{error}"),
                    }
                }
                Step::End(n) if !open.is_empty() => {
                                        let n = n % open.len();
                    let (record, number) = open.remove(n);
                    fill(record, 1, number);
                }
                Step::End(_) => {}
                Step::Read(most) => model.read(most),
                Step::Batch => model.batch(),
            }
            model.check_positions();
        }
                let unfinished = open.len() as u64;
        for (record, number) in open {
            fill(record, 1, number);
        }
        model.read(usize::MAX);
        prop_assert!(model.accepted.is_empty(), "once nobody writes, all is published ({} were open)", unfinished);
        prop_assert_eq!(model.seen + model.reported + ring.pending_lost(), model.attempts, "p30");
    }

    #[test]
    fn p30_records_written_together_are_those_written_one_by_one(
        steps in prop::collection::vec((prop::collection::vec(prop_oneof![8 => 3usize..30, 1 => 30usize..600], 0..30), 0usize..60), 1..40),
    ) {
        let rings = [(); 2].map(|()| Arc::new(Ring::new(1, RingFullPolicy::Writable).expect("a ring")));
        let mut readers = rings.each_ref().map(|ring| RingReader::of(Arc::clone(ring)));
        let (mut number, mut seen) = (0, RecordWriteOutcome::default());
        for (sizes, reads) in steps {
            let records: Vec<_> = sizes.into_iter().zip(number..).map(|(words, n)| NumberedRecord::new(words, 1, n)).collect();
            number += records.len() as u64;
            let written = NumberedRecord::write_all(records.iter().copied(), RecordFormat::default(), &rings[0]);
            let mut apart = RecordWriteOutcome::default();
            for record in records {
                match record.write(RecordFormat::default(), &rings[1]) {
                    Ok(()) => apart.written += 1,
                    Err(RingError::Full) => apart.lost += 1,
                    Err(_) => apart.oversized += 1,
                }
            }
            prop_assert_eq!(written, apart);
            prop_assert_eq!(rings[0].published(), rings[1].published());
            seen.written += written.written;
            seen.lost += written.lost;
            seen.oversized += written.oversized;
            for _ in 0..reads {
                let [together, apart] = readers.each_mut().map(|reader| reader.next_record().expect("sound").map(|raw| raw.bytes().to_vec()));
                prop_assert_eq!(together, apart);
            }
        }
        prop_assert_eq!(seen.written + seen.lost + seen.oversized, number);
        prop_assert_eq!(rings[0].pending_lost(), rings[1].pending_lost());
    }

    #[test]
    fn p28_a_record_that_is_not_filled_is_still_whole(sizes in prop::collection::vec((1usize..100, 0usize..100), 1..50)) {
        let (ring, mut reader) = ring_and_reader(8, RingFullPolicy::Writable);
        for (words, filled) in sizes {
            let mut record = ring.begin(8 * words, false).expect("the reader keeps up");
            for _ in 0..filled.min(words) {
                record.put_u64(u64::MAX);
            }
            drop(record);
            let read = reader.next_record().expect("sound").expect("published").bytes().to_vec();
            prop_assert_eq!(read.len(), 8 * words);
            let filled = 8 * filled.min(words);
            prop_assert!(read[filled.max(8)..].iter().all(|&byte| byte == 0), "nothing old shows through");
        }
    }

    #[test]
    fn p31_wakeup_count_is_samples_divided_by_wakeup_events(n in 1u32..20, samples in 0u64..200) {
        let ring = Ring::new(16, RingFullPolicy::Writable).expect("a ring");
        ring.set_wakeup(WakeupCondition::Events(n));
        let mut wakeups = 0;
        for number in 0..samples {
            write(&ring, 24, 0, number).expect("room");
            // A record that is not a sample does not count towards the wakeup.
            LostRecord { lost: 1, ..LostRecord::default() }.write(RecordFormat::default(), &ring).expect("room");
            wakeups += u64::from(ring.take_poll().readable);
        }
        prop_assert_eq!(wakeups, samples / u64::from(n));
    }

    #[test]
    fn p31_samples_written_together_wake_once_if_the_last_of_a_number_is_among_them(
        n in 1u32..20, together in prop::collection::vec(0u64..30, 0..10),
    ) {
        let ring = Ring::new(64, RingFullPolicy::Writable).expect("a ring");
        ring.set_wakeup(WakeupCondition::Events(n));
        let mut samples = 0;
        for some in together {
            let before = samples / u64::from(n);
            let written = NumberedRecord::write_all((0..some).map(|number| NumberedRecord::new(3, 1, number)), RecordFormat::default(), &ring);
            prop_assert_eq!(written, RecordWriteOutcome { written: some, ..RecordWriteOutcome::default() });
            samples += some;
            prop_assert_eq!(ring.take_poll().readable, samples / u64::from(n) != before);
        }
    }

    #[test]
    fn p31_a_watermark_wakes_once_for_that_many_bytes(watermark in 24u32..3000, records in 0u64..100) {
        let ring = Ring::new(2, RingFullPolicy::Writable).expect("a ring");
        ring.set_wakeup(WakeupCondition::Watermark(watermark));
        let (mut wakeups, mut since) = (0, 0);
        for number in 0..records {
            write(&ring, 48, 0, number).expect("room");
            since += 48;
            let woken = ring.take_poll().readable;
            prop_assert_eq!(woken, since >= watermark);
            if woken {
                since = 0;
                wakeups += 1;
            }
        }
        prop_assert!(wakeups <= records * 48 / u64::from(watermark));
    }

    #[test]
    fn reader_in_another_process_may_write_any_tail(
        tails in prop::collection::vec(
            prop_oneof![any::<u64>(), 0u64..20_000, Just(u64::MAX), Just(1 << 50), (0u64..3000).prop_map(|n| n * 8)],
            1..60,
        ),
        words in 3usize..500,
    ) {
        let ring = Ring::new(1, RingFullPolicy::Writable).expect("a ring");
        let page = foreign(&ring);
        let (mut written, mut attempts) = (0u64, 0);
        for tail in tails {
            poke(&page, DATA_TAIL, tail);
            for _ in 0..5 {
                // Keeps a record in flight, whose bytes an invalid tail must not free.
                let outer = ring.begin(64, true);
                written += u64::from(write(&ring, 8 * words, 1, attempts).is_ok());
                written += u64::from(outer.is_ok());
                attempts += 2;
                drop(outer);
            }
        }
        // No reader counts the losses that LOST records have reported. They are no longer pending,
        // so the sum may be less than `attempts`.
        prop_assert!(written + ring.pending_lost() <= attempts);
        poke(&page, DATA_TAIL, peek(&page, DATA_HEAD));
        prop_assert!(write(&ring, 24, 1, 0).is_ok(), "a sound tail puts everything right");
    }

    #[test]
    fn reader_survives_any_bytes(
        bytes in prop::collection::vec(prop_oneof![any::<u8>(), Just(0), Just(8), Just(0xff)], 0..4096),
        head in prop_oneof![any::<u64>(), 0u64..5000, (0u64..600).prop_map(|n| n * 8), Just(u64::MAX)],
        tail in prop_oneof![any::<u64>(), Just(0), Just(u64::MAX), (0u64..600).prop_map(|n| n * 8)],
        batches: bool,
    ) {
        use std::os::unix::fs::FileExt;
        let ring = Ring::new(1, RingFullPolicy::Writable).expect("a ring");
        let page = foreign(&ring);
        page.write_all_at(&bytes, PAGE_SIZE as u64).expect("writable");
        poke(&page, DATA_HEAD, head);
        poke(&page, DATA_TAIL, tail);
        let mut reader = RingReader::map(ring.memfd()).expect("maps");
        let (mut records, mut errors, mut calls) = (0, 0, 0);
        loop {
            calls += 1;
            prop_assert!(calls < 2 * 4096 / 8, "no endless loop");
                        if batches {
                match reader.batch().map(Iterator::count) {
                    Ok(0) => {}
                    Ok(n) => {
                        records += n;
                        continue;
                    }
                    Err(_) => {
                        errors += 1;
                        continue;
                    }
                }
            }
            match reader.next_record() {
                Ok(None) => break,
                Ok(Some(record)) => {
                    prop_assert!(record.bytes().len() >= 8);
                    records += 1;
                }
                Err(error) => {
                    prop_assert!(!error.to_string().is_empty());
                    errors += 1;
                }
            }
        }
        prop_assert!(records <= 4096 / 8);
        prop_assert!(errors <= 2, "an error skips to the head");
        drop(reader);
    }
}

#[test]
fn p29_a_full_ring_refuses_and_reports_the_loss_first() {
    let (ring, mut reader) = ring_and_reader(1, RingFullPolicy::Writable);
    let written = (0..).take_while(|&n| write(&ring, 40, 0, n).is_ok()).count() as u64;
    // At least 8 bytes stay free. Otherwise the positions of a full ring would equal those of an
    // empty one, modulo the size.
    assert_eq!(written, (4096 - 8) / 40);
    for _ in 0..9 {
        assert!(matches!(write(&ring, 40, 0, 0), Err(RingError::Full)));
    }
    assert_eq!(ring.pending_lost(), 10);
    // The freed space holds the record but not the LOST record that must precede it, so the record
    // is rejected.
    assert_eq!(next(&mut reader), CheckedRecord::Tagged(0, 0));
    reader.release();
    assert!(matches!(write(&ring, 40, 0, 0), Err(RingError::Full)));
    assert_eq!(ring.pending_lost(), 11);
    assert_eq!(next(&mut reader), CheckedRecord::Tagged(0, 1));
    reader.release();
    ring.set_lost_id(42);
    write(&ring, 40, 1, 99).expect("room for both now");
    assert_eq!(ring.pending_lost(), 0);
    for n in 2..written {
        assert_eq!(next(&mut reader), CheckedRecord::Tagged(0, n));
    }
    let lost = reader
        .next_record()
        .expect("sound")
        .expect("the report precedes the record");
    assert_eq!(lost.bytes().len(), 24);
    assert_eq!(lost.body()[..8], 42u64.to_ne_bytes());
    assert_eq!(check(lost), CheckedRecord::Lost(11));
    assert_eq!(next(&mut reader), CheckedRecord::Tagged(1, 99));
}

#[test]
fn records_of_impossible_sizes_are_refused_and_not_counted_as_lost() {
    let ring = Ring::new(1, RingFullPolicy::Writable).expect("a ring");
    for size in [0, 7, 9, 12, 4095] {
        let refused = ring.begin(size, false);
        assert!(matches!(refused, Err(RingError::Size { .. })), "{size}");
    }
    for size in [4096, 4104, 65_536, 1 << 20, usize::MAX & !7] {
        let refused = ring.begin(size, false);
        assert!(
            matches!(refused, Err(RingError::TooLarge { limit: 4064, .. })),
            "{size}"
        );
    }
    assert!(ring.begin(4064, false).is_ok(), "the largest that leaves a gap");
    assert_eq!(ring.pending_lost(), 0);

    let large = Ring::new(64, RingFullPolicy::Writable).expect("a ring");
    // The size field of a record is a `u16`, which limits the size to 65,528 bytes.
    let refused = large.begin(65_536, false);
    assert!(matches!(refused, Err(RingError::TooLarge { limit: 65_528, .. })));
    assert!(large.begin(65_528, false).is_ok());
}

#[test]
fn ring_without_data_pages_takes_no_records_but_notifies() {
    let ring = Ring::new(0, RingFullPolicy::Writable).expect("a control page");
    assert!(matches!(ring.begin(24, true), Err(RingError::NoData)));
    assert_eq!(ring.pending_lost(), 0);
    assert!(!ring.take_poll().readable);
    ring.notify();
    assert!(ring.take_poll().readable);
    assert_eq!(ring.pages(), 1);
    let mut reader = RingReader::map(ring.memfd()).expect("maps");
    assert!(reader.next_record().expect("sound").is_none());
}

#[test]
fn poll_state_is_taken_once_and_a_hang_up_survives_later_notifications() {
    let ring = Ring::new(1, RingFullPolicy::Writable).expect("a ring");
    ring.set_wakeup(WakeupCondition::Events(1));
    write(&ring, 24, 0, 0).expect("room");
    ring.hang_up();
    write(&ring, 24, 0, 1).expect("room");
    let state = ring.take_poll();
    assert!(state.readable && state.hang_up);
    let state = ring.take_poll();
    assert!(!state.readable && !state.hang_up, "taken");
    // After a refresh, the event reaches its limit again.
    ring.hang_up();
    ring.hang_up();
    assert!(ring.take_poll().hang_up);
    assert!(!ring.take_poll().hang_up, "taken");
}

#[test]
fn wakeup_waits_until_the_record_can_be_read() {
    let ring = Ring::new(1, RingFullPolicy::Writable).expect("a ring");
    ring.set_wakeup(WakeupCondition::Events(2));
    let outer = ring.begin(24, true).expect("room");
    write(&ring, 24, 0, 1).expect("the second sample, which is due to wake");
    assert!(!ring.take_poll().readable, "nothing can be read yet");
    drop(outer);
    assert!(ring.take_poll().readable);
}

#[test]
fn overwrite_ring_keeps_newest_and_reports_overrun() {
    let (ring, mut slow) = ring_and_reader(1, RingFullPolicy::Overwrite);
    let mut fast = RingReader::of(Arc::clone(&ring));
    for n in 0..1000 {
        write(&ring, 40, 0, n).expect("always room");
        assert_eq!(next(&mut fast), CheckedRecord::Tagged(0, n));
    }
    assert_eq!(ring.pending_lost(), 0);
    let Err(perf_core::ring::RingReadError::Overrun { bytes }) = slow.next_record() else {
        panic!("the first record was overwritten")
    };
    assert!(
        (40_000 - 2048..=40_000 - 2048 + 256 + 40).contains(&bytes),
        "{bytes} bytes skipped"
    );
    for n in bytes / 40..1000 {
        assert_eq!(next(&mut slow), CheckedRecord::Tagged(0, n));
    }
    assert!(slow.next_record().expect("sound").is_none());
    // A reader that lags by three quarters of the ring is not overrun.
    for n in 0..3072 / 40 {
        write(&ring, 40, 1, n).expect("always room");
    }
    for n in 0..3072 / 40 {
        assert_eq!(next(&mut slow), CheckedRecord::Tagged(1, n));
    }
    // Writers may reserve at most a quarter of the ring in advance, so that the rest remains valid
    // for readers.
    assert!(matches!(
        ring.begin(1008, false),
        Err(RingError::TooLarge { limit: 1000, .. })
    ));
    let open = ring
        .begin(1000, false)
        .expect("the quarter, but for a LOST record");
    // The reservation of `open` uses the whole quarter, so no other record can be reserved.
    assert!(matches!(ring.begin(32, false), Err(RingError::Full)));
    drop(open);
    assert!(ring.begin(8, false).is_ok());
}

#[test]
fn too_many_writers_at_once_are_refused() {
    let ring = Ring::new(16, RingFullPolicy::Writable).expect("a ring");
    let open: Vec<_> = (0..255).map(|_| ring.begin(8, false).expect("room")).collect();
    assert!(matches!(ring.begin(8, false), Err(RingError::Full)));
    assert_eq!(ring.pending_lost(), 1);
    drop(open);
    assert!(ring.begin(8, false).is_ok());
}

#[test]
fn new_reader_continues_at_last_tail() {
    let ring = Arc::new(Ring::new(1, RingFullPolicy::Writable).expect("a ring"));
    for n in 0..10 {
        write(&ring, 40, 0, n).expect("room");
    }
    let mut first = RingReader::of(Arc::clone(&ring));
    for n in 0..4 {
        assert_eq!(next(&mut first), CheckedRecord::Tagged(0, n));
    }
    drop(first);
    let mut second = RingReader::map(ring.memfd()).expect("maps");
    for n in 4..10 {
        assert_eq!(next(&mut second), CheckedRecord::Tagged(0, n));
    }
    assert!(second.next_record().expect("sound").is_none());
}
