use super::*;
use std::sync::Arc;

/// Writes a record of `size` bytes to a ring. Every word after the header is `tag`.
fn write(ring: &Ring, size: usize, tag: u64) -> Result<(), RingError> {
    let mut record = ring.begin(size, true)?;
    record.put_u64(9);
    for _ in 1..size / 8 {
        record.put_u64(tag);
    }
    Ok(())
}

/// Returns the sizes and tags of all available records, and the number of lost records.
fn drain(reader: &mut RingReader) -> (Vec<(usize, u64)>, u64) {
    let (mut records, mut lost) = (Vec::new(), 0);
    while let Some(record) = reader.next_record().expect("the ring is sound") {
        let word = |n: usize| u64::from_ne_bytes(record.bytes()[8 * n..][..8].try_into().expect("8 bytes"));
        if record.ty() == LOST_TYPE {
            lost += word(2);
        } else {
            assert_eq!(record.ty(), 9);
            let tag = if record.bytes().len() > 8 { word(1) } else { 0 };
            // All words of a record were written by the same writer.
            assert!((1..record.bytes().len() / 8).all(|n| word(n) == tag));
            records.push((record.bytes().len(), tag));
        }
    }
    (records, lost)
}

fn ring(pages: usize, mode: RingFullPolicy) -> Arc<Ring> {
    Arc::new(Ring::new(pages, mode).expect("a ring"))
}

fn ring_and_reader(pages: usize, mode: RingFullPolicy) -> (Arc<Ring>, RingReader) {
    let ring = ring(pages, mode);
    let reader = RingReader::of(Arc::clone(&ring));
    (ring, reader)
}

#[test]
fn head_wider_than_state_word_is_extended() {
    // Starts just below 2^47 units of 8 bytes, where the head in the state word wraps.
    let ring = Arc::new(Ring::starting_at(1, RingFullPolicy::Writable, (1 << 50) - 4096).expect("a ring"));
    let mut reader = RingReader::of(Arc::clone(&ring));
    for n in 0..1000 {
        write(&ring, 40, n).expect("room");
        assert_eq!(drain(&mut reader), (vec![(40, n)], 0));
    }
    assert_eq!(ring.published(), (1 << 50) - 4096 + 40 * 1000);
}

#[test]
fn nested_writers_are_published_by_the_outermost() {
    let (ring, mut reader) = ring_and_reader(1, RingFullPolicy::Writable);
    let mut outer = ring.begin(16, true).expect("room");
    outer.put_u64(9);
    write(&ring, 24, 2).expect("room");
    {
        let mut inner = ring.begin(16, true).expect("room");
        inner.put_u64(9);
        write(&ring, 32, 4).expect("room");
        inner.put_u64(3);
    }
    // No nested record is published before the outermost record ends.
    assert!(drain(&mut reader).0.is_empty());
    outer.put_u64(1);
    drop(outer);
    assert_eq!(drain(&mut reader).0, [(16, 1), (24, 2), (16, 3), (32, 4)]);
}

#[test]
fn generation_is_closed_so_that_overlapping_writers_cannot_starve_the_reader() {
    let (ring, mut reader) = ring_and_reader(1, RingFullPolicy::Writable);
    // Each record begins before the previous one ends, so at least one is always in flight.
    let mut flying = ring.begin(64, true).expect("room");
    let mut seen = 0;
    for _ in 0..1000 {
        let next = ring
            .begin(64, true)
            .expect("the reader keeps up, so there is room");
        drop(std::mem::replace(&mut flying, next));
        while reader.next_record().expect("sound").is_some() {
            seen += 1;
        }
    }
    assert!(
        seen >= 1000 - 64,
        "{seen} of 1000 records were seen although one was always in flight"
    );
}

#[test]
fn batch_is_published_at_once() {
    let (ring, mut reader) = ring_and_reader(1, RingFullPolicy::Writable);
    // Repeats often enough that the batch wraps at every possible offset.
    for n in 0..500 {
        let mut run = ring.begin_batch(24 + 40, 2).expect("room");
        let mut first = run.begin(24).expect("it is what was reserved");
        first.put_u64(9);
        first.put_u64(n);
        first.put_u64(n);
        drop(first);
        assert_eq!(run.remaining(), 40);
        // A record that interrupts a batch is published together with the batch.
        write(&ring, 16, 7).expect("room");
        let mut second = run.begin(40).expect("it is what was reserved");
        second.put_u64(9);
        (0..4).for_each(|_| second.put_u64(n + 1));
        drop(second);
        assert!(drain(&mut reader).0.is_empty(), "nothing before its end");
        drop(run);
        assert_eq!(drain(&mut reader), (vec![(24, n), (40, n + 1), (16, 7)], 0));
    }
}

#[test]
fn unused_batch_space_is_one_zero_record() {
    let (ring, mut reader) = ring_and_reader(1, RingFullPolicy::Writable);
    for _ in 0..100 {
        write(&ring, 400, u64::MAX).expect("room");
        drain(&mut reader);
    }
    let mut run = ring.begin_batch(400, 1).expect("room");
    assert_eq!(refused(run.begin(408)), ("too large", 400));
    assert_eq!(refused(run.begin(12)), ("size", 12));
    // A record whose reservation is leaked still has a valid header.
    std::mem::forget(run.begin(16).expect("room"));
    drop(run.begin(24).expect("room"));
    drop(run);
    let mut sizes = Vec::new();
    while let Some(record) = reader.next_record().expect("sound") {
        assert_eq!((record.ty(), record.misc()), (0, 0));
        if record.bytes().len() != 16 {
            // Unwritten bytes are zero and reveal no earlier contents.
            assert!(record.body().iter().all(|&byte| byte == 0));
        }
        sizes.push(record.bytes().len());
    }
    assert_eq!(sizes, [16, 24, 360]);
}

#[test]
fn failed_batch_counts_no_loss_and_keeps_pending_losses() {
    let (ring, mut reader) = ring_and_reader(1, RingFullPolicy::Writable);
    while write(&ring, 504, 1).is_ok() {}
    assert_eq!(ring.pending_lost(), 1);
    assert_eq!(refused(ring.begin_batch(512, 2)), ("full", 0));
    assert_eq!(ring.pending_lost(), 1, "the caller tries each record by itself");
    assert_eq!(refused(ring.begin_batch(520, 2)), ("too large", 512));
    assert_eq!(refused(ring.begin_batch(4, 2)), ("size", 4));
    drain(&mut reader);
    let mut run = ring.begin_batch(16, 2).expect("room again");
    run.begin(16).expect("all of it").put(&[9, 0, 0, 0]);
    drop(run);
    // A LOST record for the single record that was lost precedes the batch.
    assert_eq!(drain(&mut reader).1, 1);
    assert_eq!(ring.pending_lost(), 0);
    let control_only = Ring::new(0, RingFullPolicy::Writable).expect("a ring");
    assert_eq!(refused(control_only.begin_batch(64, 2)), ("no data", 0));
}

#[test]
fn largest_record_fits_an_empty_ring_after_a_loss_too() {
    for mode in [RingFullPolicy::Writable, RingFullPolicy::Overwrite] {
        let (ring, mut reader) = ring_and_reader(1, mode);
        let largest = ring.record_max();
        ring.protocol.add_lost(3);
        write(&ring, largest, 1).expect("room for it and for the LOST record");
        assert_eq!(ring.pending_lost(), 0);
        if mode == RingFullPolicy::Writable {
            assert_eq!(drain(&mut reader), (vec![(largest, 1)], 3));
        }
    }
}

/// A LOST record ends with the trailer that the next successful writer passes. The trailer has up
/// to six words and reduces the maximum record size.
#[test]
fn lost_record_has_trailer_of_next_successful_writer() {
    for words in 0..=7 {
        let (ring, mut reader) = ring_and_reader(1, RingFullPolicy::Writable);
        let mut trailer = LostTrailer::NONE;
        for word in 0..words {
            trailer.put_u64(100 + word);
        }
        let said: Vec<u64> = (0..words.min(6)).map(|word| 100 + word).collect();
        let bytes: Vec<u8> = said.iter().flat_map(|word| word.to_ne_bytes()).collect();
        assert_eq!(trailer.bytes(), bytes);
        ring.set_lost_id(7);
        ring.pause(true);
        assert!(ring.begin_with(16, true, &trailer).is_err());
        assert_eq!(refused(ring.begin_batch_with(16, 2, &trailer)), ("full", 0));
        ring.pause(false);
        let largest = 4096 - 8 - 24 - bytes.len();
        let longer = ring.begin_with(largest + 8, true, &trailer);
        assert_eq!(refused(longer), ("too large", largest));
        drop(ring.begin_with(largest, true, &trailer).expect("room for both"));
        let lost = reader.next_record().expect("sound").expect("LOST");
        assert_eq!((lost.ty(), lost.bytes().len()), (LOST_TYPE, 24 + bytes.len()));
        let (fixed, end) = lost.body().split_at(16);
        assert_eq!(
            fixed,
            [[7, 0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]].concat()
        );
        assert_eq!(end, bytes);
        let record = reader.next_record().expect("sound").expect("the record");
        assert_eq!(record.bytes().len(), largest);

        // The LOST record before a batch also ends with the trailer. `next_record` returns `None`
        // here and thereby releases the space.
        assert!(reader.next_record().expect("sound").is_none());
        ring.pause(true);
        assert!(ring.begin(16, true).is_err());
        ring.pause(false);
        drop(ring.begin_batch_with(64, 2, &trailer).expect("room for both"));
        let lost = reader.next_record().expect("sound").expect("LOST");
        assert_eq!(lost.body()[16..], bytes);
    }
}

/// No seal can be added to the memfd of a ring, and the memfd of a ring in overwrite mode cannot be
/// mapped writable.
#[test]
fn ring_seals_are_final() {
    for (mode, read_only) in [
        (RingFullPolicy::Writable, false),
        (RingFullPolicy::Overwrite, true),
    ] {
        let ring = ring(1, mode);
        let seals = mapping::seals(ring.memfd.as_fd()).expect("a memfd has seals");
        assert_ne!(seals & libc::F_SEAL_SEAL, 0, "{mode:?}");
        assert_ne!(seals & libc::F_SEAL_SHRINK, 0, "{mode:?}");
        assert_eq!(seals & libc::F_SEAL_FUTURE_WRITE != 0, read_only, "{mode:?}");
    }
}

#[test]
fn ring_page_count_is_limited() {
    assert_eq!(
        ring(DATA_PAGES_MAX, RingFullPolicy::Writable).data_size(),
        DATA_PAGES_MAX * PAGE_SIZE
    );
    for pages in [DATA_PAGES_MAX + 1, 2 * DATA_PAGES_MAX, 3, usize::MAX] {
        let result = Ring::new(pages, RingFullPolicy::Writable);
        assert!(
            matches!(result, Err(RingError::Pages { pages: p }) if p == pages),
            "{pages}"
        );
    }
}

/// The default watermark is a quarter of the data area. No watermark is zero or above half the data
/// area.
#[test]
fn watermarks_are_bounded_by_the_ring() {
    let woken_after = |pages, wakeup| {
        let ring = ring(pages, RingFullPolicy::Writable);
        ring.set_wakeup(wakeup);
        let mut bytes = 0u64;
        while !ring.take_poll().readable {
            write(&ring, 64, 0).expect("woken before records are lost");
            bytes += 64;
        }
        bytes
    };
    let page = PAGE_SIZE as u64;
    for (wakeup, bytes) in [
        (WakeupCondition::Watermark(0), 4 * page),
        (WakeupCondition::Watermark(1), 64),
        (WakeupCondition::Watermark(1000), 1024),
        (WakeupCondition::Watermark(u32::MAX), 8 * page),
        (WakeupCondition::Events(1), 64),
        (WakeupCondition::Events(u32::MAX), 4 * page),
    ] {
        assert_eq!(woken_after(16, wakeup), bytes, "{wakeup:?}");
    }
    assert_eq!(woken_after(1, WakeupCondition::default()), page / 2);
}

/// The charge is dropped with the ring. Only the first charge is kept.
#[test]
fn charge_lives_as_long_as_ring() {
    struct Charge(Arc<AtomicU64>);
    impl Drop for Charge {
        fn drop(&mut self) {
            self.0.fetch_add(1, Relaxed);
        }
    }
    let [first, second] = [(); 2].map(|()| Arc::new(AtomicU64::new(0)));
    let ring = ring(1, RingFullPolicy::Writable);
    ring.attach_charge(Box::new(Charge(first.clone())));
    ring.attach_charge(Box::new(Charge(second.clone())));
    let gone = || (first.load(Relaxed), second.load(Relaxed));
    assert_eq!(gone(), (0, 1));
    drop(ring);
    assert_eq!(gone(), (1, 1));
}

/// The size of a batch must be a multiple of 8 bytes, at least 8 bytes, and at most an eighth of
/// the ring or the largest record.
#[test]
fn batches_of_invalid_size_are_rejected() {
    for (pages, most) in [(1, 512), (16, 8192), (1024, RECORD_SIZE_MAX)] {
        let ring = ring(pages, RingFullPolicy::Writable);
        assert_eq!(ring.batch_max(), most);
        for bytes in [0, 4, 7, 12, most - 4, most + 8] {
            assert!(ring.begin_batch(bytes, 1).is_err(), "{bytes} of {most}");
        }
        assert_eq!(ring.pending_lost(), 0, "that is no loss");
        for bytes in [8, 16, most] {
            assert!(ring.begin_batch(bytes, 1).is_ok(), "{bytes} of {most}");
        }
    }
}

/// Returns the name of a reservation's error, and the limit or size that the error contains.
fn refused<T>(result: Result<T, RingError>) -> (&'static str, usize) {
    match result {
        Err(RingError::TooLarge { limit, .. }) => ("too large", limit),
        Err(RingError::Size { size }) => ("size", size),
        Err(RingError::Full) => ("full", 0),
        Err(RingError::NoData) => ("no data", 0),
        Err(error) => panic!("{error}"),
        Ok(_) => ("accepted", 0),
    }
}

/// A record cannot be filled beyond its size. Builds with debug assertions panic, and other builds
/// discard the excess bytes.
#[test]
fn record_writes_never_exceed_its_size() {
    let (ring, mut reader) = ring_and_reader(1, RingFullPolicy::Writable);
    let mut record = ring.begin(24, true).expect("room");
    record.put_u64(9);
    assert_eq!(record.remaining(), 16);
    record.put(&[1; 12]);
    assert_eq!(record.remaining(), 4);
    let more = std::panic::AssertUnwindSafe(|| record.put_u64(u64::MAX));
    assert_eq!(std::panic::catch_unwind(more).is_err(), cfg!(debug_assertions));
    assert!(record.remaining() <= 4);
    drop(record);
    assert_eq!(ring.published(), 24);
    let whole = reader.next_record().expect("sound").expect("one");
    assert_eq!(whole.bytes()[8..20], [1; 12]);
    write(&ring, 16, 7).expect("room");
    assert_eq!(drain(&mut reader), (vec![(16, 7)], 0));
}

/// A batch rejects records of invalid size.
#[test]
fn batch_records_of_invalid_size_are_rejected() {
    let ring = ring(1, RingFullPolicy::Writable);
    let mut run = ring.begin_batch(32, 1).expect("room");
    for size in [0, 4, 7] {
        assert_eq!(refused(run.begin(size)), ("size", size));
    }
    assert_eq!(refused(run.begin(40)), ("too large", 32));
    assert_eq!(run.begin(8).expect("room").remaining(), 8);
    assert_eq!(run.remaining(), 24);
    assert_eq!(run.begin(24).expect("room").remaining(), 24);
    assert_eq!(refused(run.begin(8)), ("too large", 0));
}
