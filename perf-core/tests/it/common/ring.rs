//! Helpers of the ring tests: records that identify their writers, and access to the shared memory
//! as another process has it.

use std::fs::File;
use std::os::unix::fs::FileExt;

use std::os::fd::AsRawFd;
use std::sync::Arc;

use perf_core::record::{DecodedRecord, EncodeRecord, RecordFormat, RecordSink};
use perf_core::ring::{RawRecord, RecordReservation, Ring, RingError, RingFullPolicy, RingReader};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};

/// Byte offset of `data_head` in the control page.
pub const DATA_HEAD: u64 = 1024;
/// Byte offset of `data_tail` in the control page.
pub const DATA_TAIL: u64 = 1032;
/// Type of the tagged test records, which the kernel does not use.
pub const TAGGED: u32 = 77;

/// Writes a tagged record of `size` bytes (at least 24): the writer, the number of the record, and
/// a pattern derived from these two.
pub fn write(ring: &Ring, size: usize, writer: u64, number: u64) -> Result<(), RingError> {
    fill(ring.begin(size, true)?, writer, number);
    Ok(())
}

/// Fills a reserved record with the contents that [`write`] writes, and ends the record.
pub fn fill(mut record: RecordReservation<'_>, writer: u64, number: u64) {
    let words = record.remaining() as u64 / 8;
    for word in [u64::from(TAGGED), writer, number] {
        record.put_u64(word);
    }
    (3..words).for_each(|n| record.put_u64(pattern(writer, number, n)));
}

fn pattern(writer: u64, number: u64, n: u64) -> u64 {
    (writer << 48 ^ number << 16 ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// A record with the contents that [`write`] writes, for tests that write several records together.
#[derive(Clone, Copy, Debug)]
pub struct NumberedRecord {
    words: usize,
    writer: u64,
    number: u64,
}

impl NumberedRecord {
    /// Creates a record of `words` words, at least 3.
    pub fn new(words: usize, writer: u64, number: u64) -> Self {
        Self {
            words,
            writer,
            number,
        }
    }
}

impl EncodeRecord for NumberedRecord {
    const IS_SAMPLE: bool = true;

    fn size(&self, _: RecordFormat) -> usize {
        8 * self.words
    }

    fn encode(&self, _: RecordFormat, out: &mut impl RecordSink) {
        let Self {
            words,
            writer,
            number,
        } = *self;
        let begin = [u64::from(TAGGED) | (8 * words as u64) << 48, writer, number];
        let rest = (3..words as u64).map(|n| pattern(writer, number, n));
        begin
            .into_iter()
            .chain(rest)
            .for_each(|word| out.put(&word.to_ne_bytes()));
    }
}

/// The content of a record that was read and checked.
#[derive(Debug, PartialEq, Eq)]
pub enum CheckedRecord {
    /// Writer and number of a tagged record.
    Tagged(u64, u64),
    /// Number of lost records in a LOST record.
    Lost(u64),
}

/// Checks every byte of a record and returns the record's content.
pub fn check(raw: RawRecord<'_>) -> CheckedRecord {
    if let Ok(DecodedRecord::Lost(lost)) = DecodedRecord::decode(raw, RecordFormat::default()) {
        return CheckedRecord::Lost(lost.lost);
    }
    assert_eq!(raw.ty(), TAGGED);
    let (words, rest) = raw.body().as_chunks();
    assert!(rest.is_empty());
    let word = |n: usize| u64::from_ne_bytes(words[n]);
    let (writer, number) = (word(0), word(1));
    for n in 2..words.len() {
        assert_eq!(
            word(n),
            pattern(writer, number, n as u64 + 1),
            "writer {writer}, record {number}, word {n}"
        );
    }
    CheckedRecord::Tagged(writer, number)
}

/// Creates a ring and a reader of this ring.
pub fn ring_and_reader(pages: usize, mode: RingFullPolicy) -> (Arc<Ring>, RingReader) {
    let ring = Arc::new(Ring::new(pages, mode).expect("a ring"));
    let reader = RingReader::of(Arc::clone(&ring));
    (ring, reader)
}

/// Reads the next record, which must exist, and checks its content.
pub fn next(reader: &mut RingReader) -> CheckedRecord {
    check(reader.next_record().expect("sound").expect("one"))
}

/// Passes all unread records of the ring to `each`.
pub fn drain(reader: &mut RingReader, mut each: impl FnMut(RawRecord<'_>)) {
    while let Some(record) = reader.next_record().expect("sound") {
        each(record);
    }
}

/// Opens the memory of the ring as another process does.
pub fn foreign(ring: &Ring) -> File {
    File::from(ring.memfd().try_clone_to_owned().expect("descriptors are left"))
}

/// Writes a word of the shared memory as another process may.
pub fn poke(file: &File, offset: u64, value: u64) {
    file.write_all_at(&value.to_ne_bytes(), offset)
        .expect("the memfd can be written");
}

/// Reads a word of the shared memory.
pub fn peek(file: &File, offset: u64) -> u64 {
    let mut word = [0; 8];
    file.read_exact_at(&mut word, offset)
        .expect("the memfd can be read");
    u64::from_ne_bytes(word)
}

/// Waits until the ring notifies its reader. Returns `false` after one minute without a
/// notification.
pub fn wait(ring: &Ring) -> bool {
    let epoll = Epoll::new().expect("descriptors are left");
    let fd = ring.wakeup_fd().as_raw_fd();
    epoll
        .ctl(ControlOperation::Add, fd, EpollEvent::new(EventSet::IN, 0))
        .expect("an eventfd can be polled");
    loop {
        match epoll.wait(60_000, &mut [EpollEvent::default()]) {
            Ok(events) => return events == 1,
            Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::Interrupted),
        }
    }
}
