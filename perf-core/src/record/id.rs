//! The trailer of records other than samples (`struct sample_id` of `perf_event_open(2)`).

use super::cursor::Cursor;
use super::{DecodeError, RecordFormat, RecordSink, put_u32s, put_u64};
use crate::attr::SampleType;
use crate::ring::LostTrailer;

/// Sample fields that a trailer may contain. Each field has 8 bytes.
const FIELDS: SampleType = SampleType::TID
    .union(SampleType::TIME)
    .union(SampleType::ID)
    .union(SampleType::STREAM_ID)
    .union(SampleType::CPU)
    .union(SampleType::IDENTIFIER);

/// The trailer of a record that is not a sample: the vCPU that the record refers to, the time of
/// the record, and the event's IDs. Records have a trailer if the event has `sample_id_all`.
///
/// A trailer contains only fields that the event's samples have. A decoder sets all other fields to
/// 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleId {
    /// Process ID of the VM as the operator sees it.
    pub pid: u32,
    /// Thread ID of the vCPU.
    pub tid: u32,
    /// Time of the record, in nanoseconds.
    pub time_ns: u64,
    /// ID of the opened event, which is encoded in the ID field and in the IDENTIFIER field.
    pub id: u64,
    /// ID of the event that the record belongs to. For an inherited event, this is the ID of the
    /// child, and `id` is the ID of its parent.
    pub stream_id: u64,
    /// Number of the vCPU, or `u32::MAX` for a record without a vCPU.
    pub cpu: u32,
}

/// Returns the size of the trailers of records in `format`, in bytes.
#[inline]
pub(super) fn size_of(format: RecordFormat) -> usize {
    if format.sample_id_all {
        8 * (format.sample_type & FIELDS).bits().count_ones() as usize
    } else {
        0
    }
}

impl SampleId {
    /// Appends the words of the trailer in the order of the ABI. Appends nothing if `format` lacks
    /// `sample_id_all`.
    #[inline]
    pub(super) fn encode(&self, format: RecordFormat, out: &mut impl RecordSink) {
        if !format.sample_id_all {
            return;
        }
        let fields = format.sample_type;
        if fields.contains(SampleType::TID) {
            put_u32s(out, self.pid, self.tid);
        }
        if fields.contains(SampleType::TIME) {
            put_u64(out, self.time_ns);
        }
        if fields.contains(SampleType::ID) {
            put_u64(out, self.id);
        }
        if fields.contains(SampleType::STREAM_ID) {
            put_u64(out, self.stream_id);
        }
        if fields.contains(SampleType::CPU) {
            put_u32s(out, self.cpu, 0);
        }
        if fields.contains(SampleType::IDENTIFIER) {
            put_u64(out, self.id);
        }
    }

    /// Removes the trailer from the end of a record's body and decodes it.
    pub(super) fn decode(body: &mut Cursor<'_>, format: RecordFormat) -> Result<Self, DecodeError> {
        let mut id = Self::default();
        let size = size_of(format);
        if size == 0 {
            return Ok(id);
        }
        let mut end = body.split_end(size, "trailer")?;
        let fields = format.sample_type;
        if fields.contains(SampleType::TID) {
            id.pid = end.u32("pid")?;
            id.tid = end.u32("tid")?;
        }
        if fields.contains(SampleType::TIME) {
            id.time_ns = end.u64("time")?;
        }
        if fields.contains(SampleType::ID) {
            id.id = end.u64("id")?;
        }
        if fields.contains(SampleType::STREAM_ID) {
            id.stream_id = end.u64("stream id")?;
        }
        if fields.contains(SampleType::CPU) {
            id.cpu = end.u32("cpu")?;
            end.u32("cpu")?;
        }
        if fields.contains(SampleType::IDENTIFIER) {
            id.id = end.u64("identifier")?;
        }
        Ok(id)
    }

    /// Returns this trailer in the form that a ring appends to LOST records.
    #[inline]
    pub(super) fn trailer(&self, format: RecordFormat) -> LostTrailer {
        let mut trailer = LostTrailer::NONE;
        self.encode(format, &mut trailer);
        trailer
    }
}

impl RecordSink for LostTrailer {
    /// Appends the 8-byte words in `bytes`, which contains whole words only.
    #[inline]
    fn put(&mut self, bytes: &[u8]) {
        for &word in bytes.as_chunks().0 {
            self.put_u64(u64::from_ne_bytes(word));
        }
    }

    #[inline]
    fn put_u64(&mut self, value: u64) {
        LostTrailer::put_u64(self, value);
    }
}
