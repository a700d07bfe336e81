//! Side-band records: all records except samples.

use super::cursor::{Cursor, until_nul};
use super::id::{self, SampleId};
use super::read::ReadFormatValues;
use super::{
    DecodeError, EncodeRecord, HEADER_SIZE, RecordFormat, RecordMisc, RecordSink, RecordType, put_header,
    put_u32s, put_u64,
};

/// Maximum size of a name in COMM records in bytes, including its terminating NUL
/// (`TASK_COMM_LEN`).
const COMM_MAX: usize = 16;
/// Maximum size of a path in MMAP records in bytes, including its terminating NUL (`PATH_MAX`).
const PATH_MAX: usize = 4096;

/// Returns the encoded size of `text` in bytes: the text before the first NUL, a NUL, and padding
/// to a multiple of 8 bytes.
fn text_size(text: &[u8]) -> usize {
    (until_nul(text).len() + 1).next_multiple_of(8)
}

fn put_text(out: &mut impl RecordSink, text: &[u8]) {
    let text = until_nul(text);
    out.put(text);
    out.put(&[0; 8][..text_size(text) - text.len()]);
}

/// `PERF_RECORD_LOST`: the number of records that were lost before this one, since the previous
/// record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LostRecord {
    /// ID of the event that owns the ring.
    pub id: u64,
    /// Number of records that were lost.
    pub lost: u64,
    /// Trailer of the record.
    pub sample_id: SampleId,
}

impl EncodeRecord for LostRecord {
    fn size(&self, format: RecordFormat) -> usize {
        HEADER_SIZE + 16 + id::size_of(format)
    }

    fn encode(&self, format: RecordFormat, out: &mut impl RecordSink) {
        put_header(out, RecordType::LOST, RecordMisc::default(), self.size(format));
        put_u64(out, self.id);
        put_u64(out, self.lost);
        self.sample_id.encode(format, out);
    }

    fn sample_id(&self) -> SampleId {
        self.sample_id
    }
}

impl LostRecord {
    pub(super) fn decode(body: &mut Cursor<'_>, sample_id: SampleId) -> Result<Self, DecodeError> {
        Ok(Self {
            id: body.u64("id")?,
            lost: body.u64("count")?,
            sample_id,
        })
    }
}

/// `PERF_RECORD_THROTTLE` or `PERF_RECORD_UNTHROTTLE`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThrottleRecord {
    /// `true` for THROTTLE (overflows suppressed), `false` for UNTHROTTLE (overflows allowed
    /// again).
    pub throttled: bool,
    /// Time of the record, in nanoseconds.
    pub time_ns: u64,
    /// ID of the opened event. For an inherited event, the ID of the parent.
    pub id: u64,
    /// ID of the throttled event. For an inherited event, the ID of the child.
    pub stream_id: u64,
    /// Trailer of the record.
    pub sample_id: SampleId,
}

impl EncodeRecord for ThrottleRecord {
    fn size(&self, format: RecordFormat) -> usize {
        HEADER_SIZE + 24 + id::size_of(format)
    }

    fn encode(&self, format: RecordFormat, out: &mut impl RecordSink) {
        let ty = if self.throttled {
            RecordType::THROTTLE
        } else {
            RecordType::UNTHROTTLE
        };
        put_header(out, ty, RecordMisc::default(), self.size(format));
        put_u64(out, self.time_ns);
        put_u64(out, self.id);
        put_u64(out, self.stream_id);
        self.sample_id.encode(format, out);
    }

    fn sample_id(&self) -> SampleId {
        self.sample_id
    }
}

impl ThrottleRecord {
    pub(super) fn decode(
        body: &mut Cursor<'_>,
        throttled: bool,
        sample_id: SampleId,
    ) -> Result<Self, DecodeError> {
        Ok(Self {
            throttled,
            time_ns: body.u64("time")?,
            id: body.u64("id")?,
            stream_id: body.u64("stream id")?,
            sample_id,
        })
    }
}

/// `PERF_RECORD_FORK` or `PERF_RECORD_EXIT`: the addition or removal of a vCPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TaskRecord {
    /// `true` for FORK (the vCPU was added), `false` for EXIT (the vCPU was removed).
    pub fork: bool,
    /// Process ID of the vCPU's VM.
    pub pid: u32,
    /// Process ID of the parent task.
    pub ppid: u32,
    /// Thread ID of the vCPU.
    pub tid: u32,
    /// Thread ID of the parent task.
    pub ptid: u32,
    /// Time of the record, in nanoseconds.
    pub time_ns: u64,
    /// Trailer of the record.
    pub sample_id: SampleId,
}

impl EncodeRecord for TaskRecord {
    fn size(&self, format: RecordFormat) -> usize {
        HEADER_SIZE + 24 + id::size_of(format)
    }

    fn encode(&self, format: RecordFormat, out: &mut impl RecordSink) {
        let ty = if self.fork {
            RecordType::FORK
        } else {
            RecordType::EXIT
        };
        put_header(out, ty, RecordMisc::default(), self.size(format));
        put_u32s(out, self.pid, self.ppid);
        put_u32s(out, self.tid, self.ptid);
        put_u64(out, self.time_ns);
        self.sample_id.encode(format, out);
    }

    fn sample_id(&self) -> SampleId {
        self.sample_id
    }
}

impl TaskRecord {
    pub(super) fn decode(
        body: &mut Cursor<'_>,
        fork: bool,
        sample_id: SampleId,
    ) -> Result<Self, DecodeError> {
        Ok(Self {
            fork,
            pid: body.u32("pid")?,
            ppid: body.u32("parent's pid")?,
            tid: body.u32("tid")?,
            ptid: body.u32("parent's tid")?,
            time_ns: body.u64("time")?,
            sample_id,
        })
    }
}

/// `PERF_RECORD_SWITCH`: a vCPU whose context was scheduled in or out. The trailer identifies the
/// vCPU and the time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwitchRecord {
    /// `true` if the context was scheduled out, `false` if it was scheduled in.
    pub out: bool,
    /// Trailer of the record.
    pub sample_id: SampleId,
}

impl EncodeRecord for SwitchRecord {
    fn size(&self, format: RecordFormat) -> usize {
        HEADER_SIZE + id::size_of(format)
    }

    fn encode(&self, format: RecordFormat, out: &mut impl RecordSink) {
        let misc = if self.out {
            RecordMisc::SWITCH_OUT
        } else {
            RecordMisc::default()
        };
        put_header(out, RecordType::SWITCH, misc, self.size(format));
        self.sample_id.encode(format, out);
    }

    fn sample_id(&self) -> SampleId {
        self.sample_id
    }
}

impl SwitchRecord {
    pub(super) fn new(misc: RecordMisc, sample_id: SampleId) -> Self {
        Self {
            out: misc.0 & RecordMisc::SWITCH_OUT.0 != 0,
            sample_id,
        }
    }
}

/// `PERF_RECORD_READ`: final values of an inherited event on a vCPU that was removed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ReadRecord<'a> {
    /// Process ID of the VM.
    pub pid: u32,
    /// Thread ID of the vCPU.
    pub tid: u32,
    /// Final count and times of the event on this vCPU.
    pub values: ReadFormatValues<'a>,
    /// Trailer of the record.
    pub sample_id: SampleId,
}

impl EncodeRecord for ReadRecord<'_> {
    fn size(&self, format: RecordFormat) -> usize {
        HEADER_SIZE + 8 + self.values.size(format.read_format) + id::size_of(format)
    }

    fn encode(&self, format: RecordFormat, out: &mut impl RecordSink) {
        put_header(out, RecordType::READ, RecordMisc::default(), self.size(format));
        put_u32s(out, self.pid, self.tid);
        self.values.encode(format.read_format, out);
        self.sample_id.encode(format, out);
    }

    fn sample_id(&self) -> SampleId {
        self.sample_id
    }
}

impl<'a> ReadRecord<'a> {
    pub(super) fn decode(
        body: &mut Cursor<'a>,
        format: RecordFormat,
        sample_id: SampleId,
    ) -> Result<Self, DecodeError> {
        Ok(Self {
            pid: body.u32("pid")?,
            tid: body.u32("tid")?,
            values: ReadFormatValues::decode(body, format.read_format)?,
            sample_id,
        })
    }
}

/// `PERF_RECORD_COMM`: the name of a vCPU or a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommRecord<'a> {
    /// Process ID of the VM.
    pub pid: u32,
    /// Thread ID of the vCPU.
    pub tid: u32,
    /// Name of the vCPU or VM. At most 15 bytes, up to the first NUL, are encoded.
    pub name: &'a [u8],
    /// Trailer of the record.
    pub sample_id: SampleId,
}

impl CommRecord<'_> {
    fn cut(&self) -> &[u8] {
        &self.name[..self.name.len().min(COMM_MAX - 1)]
    }
}

impl EncodeRecord for CommRecord<'_> {
    fn size(&self, format: RecordFormat) -> usize {
        HEADER_SIZE + 8 + text_size(self.cut()) + id::size_of(format)
    }

    fn encode(&self, format: RecordFormat, out: &mut impl RecordSink) {
        put_header(out, RecordType::COMM, RecordMisc::default(), self.size(format));
        put_u32s(out, self.pid, self.tid);
        put_text(out, self.cut());
        self.sample_id.encode(format, out);
    }

    fn sample_id(&self) -> SampleId {
        self.sample_id
    }
}

impl<'a> CommRecord<'a> {
    pub(super) fn decode(body: &mut Cursor<'a>, sample_id: SampleId) -> Result<Self, DecodeError> {
        Ok(Self {
            pid: body.u32("pid")?,
            tid: body.u32("tid")?,
            name: until_nul(body.rest()),
            sample_id,
        })
    }
}

/// Returns the part of a mapping's name that an MMAP record contains, without padding.
fn mapping_name(name: &[u8]) -> &[u8] {
    match until_nul(name) {
        name if name.len() < PATH_MAX => name,
        _ => b"//toolong",
    }
}

/// `PERF_RECORD_MMAP`: a mapping, such as guest memory or firmware.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MmapRecord<'a> {
    /// [`CpuMode`](super::CpuMode) of the code in the mapping.
    pub misc: RecordMisc,
    /// Process ID of the VM.
    pub pid: u32,
    /// Thread ID of the record. This crate writes the process ID of the VM.
    pub tid: u32,
    /// Start address of the mapping.
    pub start: u64,
    /// Length of the mapping, in bytes.
    pub len: u64,
    /// Offset of the mapping in its file, in bytes.
    pub pgoff: u64,
    /// Path of the mapped file, or a name such as `//anon` for memory without a file. A path of
    /// 4096 bytes or more is written as `//toolong`.
    pub name: &'a [u8],
    /// Trailer of the record.
    pub sample_id: SampleId,
}

impl EncodeRecord for MmapRecord<'_> {
    fn size(&self, format: RecordFormat) -> usize {
        HEADER_SIZE + 32 + text_size(mapping_name(self.name)) + id::size_of(format)
    }

    fn encode(&self, format: RecordFormat, out: &mut impl RecordSink) {
        put_header(out, RecordType::MMAP, self.misc, self.size(format));
        put_u32s(out, self.pid, self.tid);
        put_u64(out, self.start);
        put_u64(out, self.len);
        put_u64(out, self.pgoff);
        put_text(out, mapping_name(self.name));
        self.sample_id.encode(format, out);
    }

    fn sample_id(&self) -> SampleId {
        self.sample_id
    }
}

impl<'a> MmapRecord<'a> {
    pub(super) fn decode(
        body: &mut Cursor<'a>,
        misc: RecordMisc,
        sample_id: SampleId,
    ) -> Result<Self, DecodeError> {
        Ok(Self {
            misc,
            pid: body.u32("pid")?,
            tid: body.u32("tid")?,
            start: body.u64("start")?,
            len: body.u64("length")?,
            pgoff: body.u64("offset")?,
            name: until_nul(body.rest()),
            sample_id,
        })
    }
}
