//! Side-band records: everything but samples.

use super::cursor::{Cursor, until_nul};
use super::id::{self, SampleId};
use super::read::ReadValues;
use super::{
    DecodeError, Encode, Format, HEADER_SIZE, Misc, RecordType, Sink, put_header, put_u32s, put_u64,
};

/// Most bytes of a name in COMM records, its terminating NUL included (`TASK_COMM_LEN`).
const COMM_MAX: usize = 16;
/// Most bytes of a path in MMAP records, its terminating NUL included (`PATH_MAX`).
const PATH_MAX: usize = 4096;

/// Bytes of `text` up to its first NUL, with a NUL, padded to a multiple of 8.
fn text_size(text: &[u8]) -> usize {
    (until_nul(text).len() + 1).next_multiple_of(8)
}

fn put_text(out: &mut impl Sink, text: &[u8]) {
    let text = until_nul(text);
    out.put(text);
    out.put(&[0; 8][..text_size(text) - text.len()]);
}

/// `PERF_RECORD_LOST`: attempts that found no room since the last record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lost {
    /// The event that owns the ring.
    pub id: u64,
    /// Number of records lost.
    pub lost: u64,
    /// The trailer.
    pub sample_id: SampleId,
}

impl Encode for Lost {
    fn size(&self, format: Format) -> usize {
        HEADER_SIZE + 16 + id::size_of(format)
    }

    fn encode(&self, format: Format, out: &mut impl Sink) {
        put_header(out, RecordType::LOST, Misc::default(), self.size(format));
        put_u64(out, self.id);
        put_u64(out, self.lost);
        self.sample_id.encode(format, out);
    }

    fn sample_id(&self) -> SampleId {
        self.sample_id
    }
}

impl Lost {
    pub(super) fn decode(body: &mut Cursor<'_>, sample_id: SampleId) -> Result<Self, DecodeError> {
        Ok(Self {
            id: body.u64("id")?,
            lost: body.u64("count")?,
            sample_id,
        })
    }
}

/// `PERF_RECORD_THROTTLE` and `PERF_RECORD_UNTHROTTLE`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Throttle {
    /// Stopped (THROTTLE) or started again (UNTHROTTLE).
    pub throttled: bool,
    /// When, in nanoseconds.
    pub time_ns: u64,
    /// Id of the event that was opened.
    pub id: u64,
    /// Id of the event itself.
    pub stream_id: u64,
    /// The trailer.
    pub sample_id: SampleId,
}

impl Encode for Throttle {
    fn size(&self, format: Format) -> usize {
        HEADER_SIZE + 24 + id::size_of(format)
    }

    fn encode(&self, format: Format, out: &mut impl Sink) {
        let ty = if self.throttled {
            RecordType::THROTTLE
        } else {
            RecordType::UNTHROTTLE
        };
        put_header(out, ty, Misc::default(), self.size(format));
        put_u64(out, self.time_ns);
        put_u64(out, self.id);
        put_u64(out, self.stream_id);
        self.sample_id.encode(format, out);
    }

    fn sample_id(&self) -> SampleId {
        self.sample_id
    }
}

impl Throttle {
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

/// `PERF_RECORD_FORK` and `PERF_RECORD_EXIT`: a vCPU comes or goes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Task {
    /// Comes (FORK) or goes (EXIT).
    pub fork: bool,
    /// Process (the VM) of the vCPU.
    pub pid: u32,
    /// Process of its parent.
    pub ppid: u32,
    /// Thread (the vCPU).
    pub tid: u32,
    /// Thread of its parent.
    pub ptid: u32,
    /// When, in nanoseconds.
    pub time_ns: u64,
    /// The trailer.
    pub sample_id: SampleId,
}

impl Encode for Task {
    fn size(&self, format: Format) -> usize {
        HEADER_SIZE + 24 + id::size_of(format)
    }

    fn encode(&self, format: Format, out: &mut impl Sink) {
        let ty = if self.fork {
            RecordType::FORK
        } else {
            RecordType::EXIT
        };
        put_header(out, ty, Misc::default(), self.size(format));
        put_u32s(out, self.pid, self.ppid);
        put_u32s(out, self.tid, self.ptid);
        put_u64(out, self.time_ns);
        self.sample_id.encode(format, out);
    }

    fn sample_id(&self) -> SampleId {
        self.sample_id
    }
}

impl Task {
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

/// `PERF_RECORD_READ`: final values of an inherited event whose vCPU exits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Read<'a> {
    /// Process (the VM).
    pub pid: u32,
    /// Thread (the vCPU).
    pub tid: u32,
    /// The values.
    pub values: ReadValues<'a>,
    /// The trailer.
    pub sample_id: SampleId,
}

impl Encode for Read<'_> {
    fn size(&self, format: Format) -> usize {
        HEADER_SIZE + 8 + self.values.size(format.read_format) + id::size_of(format)
    }

    fn encode(&self, format: Format, out: &mut impl Sink) {
        put_header(out, RecordType::READ, Misc::default(), self.size(format));
        put_u32s(out, self.pid, self.tid);
        self.values.encode(format.read_format, out);
        self.sample_id.encode(format, out);
    }

    fn sample_id(&self) -> SampleId {
        self.sample_id
    }
}

impl<'a> Read<'a> {
    pub(super) fn decode(
        body: &mut Cursor<'a>,
        format: Format,
        sample_id: SampleId,
    ) -> Result<Self, DecodeError> {
        Ok(Self {
            pid: body.u32("pid")?,
            tid: body.u32("tid")?,
            values: ReadValues::decode(body, format.read_format)?,
            sample_id,
        })
    }
}

/// `PERF_RECORD_COMM`: name of a vCPU or a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Comm<'a> {
    /// Process (the VM).
    pub pid: u32,
    /// Thread (the vCPU).
    pub tid: u32,
    /// The name. At most 15 bytes up to the first NUL are written.
    pub name: &'a [u8],
    /// The trailer.
    pub sample_id: SampleId,
}

impl Comm<'_> {
    fn cut(&self) -> &[u8] {
        &self.name[..self.name.len().min(COMM_MAX - 1)]
    }
}

impl Encode for Comm<'_> {
    fn size(&self, format: Format) -> usize {
        HEADER_SIZE + 8 + text_size(self.cut()) + id::size_of(format)
    }

    fn encode(&self, format: Format, out: &mut impl Sink) {
        put_header(out, RecordType::COMM, Misc::default(), self.size(format));
        put_u32s(out, self.pid, self.tid);
        put_text(out, self.cut());
        self.sample_id.encode(format, out);
    }

    fn sample_id(&self) -> SampleId {
        self.sample_id
    }
}

impl<'a> Comm<'a> {
    pub(super) fn decode(body: &mut Cursor<'a>, sample_id: SampleId) -> Result<Self, DecodeError> {
        Ok(Self {
            pid: body.u32("pid")?,
            tid: body.u32("tid")?,
            name: until_nul(body.rest()),
            sample_id,
        })
    }
}

/// Name of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MapName<'a> {
    /// A file, or the name of a region of guest memory. One of 4096 bytes or more is written as `TooLong`.
    Path(&'a [u8]),
    /// Memory without a name: `//anon`.
    Anonymous,
    /// A path that does not fit: `//toolong`.
    TooLong,
    /// There was no memory to find out: `//enomem`.
    NoMemory,
    /// The kernel's page of system calls: `[vdso]`.
    Vdso,
}

impl<'a> MapName<'a> {
    /// The name as it is written, without padding.
    pub fn bytes(&self) -> &'a [u8] {
        match self {
            Self::Path(path) if until_nul(path).len() < PATH_MAX => until_nul(path),
            Self::Path(_) | Self::TooLong => b"//toolong",
            Self::Anonymous => b"//anon",
            Self::NoMemory => b"//enomem",
            Self::Vdso => b"[vdso]",
        }
    }
}

impl<'a> From<&'a [u8]> for MapName<'a> {
    fn from(bytes: &'a [u8]) -> Self {
        match bytes {
            b"//anon" => Self::Anonymous,
            b"//toolong" => Self::TooLong,
            b"//enomem" => Self::NoMemory,
            b"[vdso]" => Self::Vdso,
            path => Self::Path(path),
        }
    }
}

/// `PERF_RECORD_MMAP`: a mapping, such as guest memory or firmware.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mmap<'a> {
    /// Whose: [`CpuMode`](super::CpuMode) of code that runs there.
    pub misc: Misc,
    /// Process (the VM).
    pub pid: u32,
    /// Thread (the vCPU).
    pub tid: u32,
    /// First address.
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// Where in the file it begins, in bytes.
    pub pgoff: u64,
    /// What is mapped.
    pub name: MapName<'a>,
    /// The trailer.
    pub sample_id: SampleId,
}

impl Encode for Mmap<'_> {
    fn size(&self, format: Format) -> usize {
        HEADER_SIZE + 32 + text_size(self.name.bytes()) + id::size_of(format)
    }

    fn encode(&self, format: Format, out: &mut impl Sink) {
        put_header(out, RecordType::MMAP, self.misc, self.size(format));
        put_u32s(out, self.pid, self.tid);
        put_u64(out, self.start);
        put_u64(out, self.len);
        put_u64(out, self.pgoff);
        put_text(out, self.name.bytes());
        self.sample_id.encode(format, out);
    }

    fn sample_id(&self) -> SampleId {
        self.sample_id
    }
}

impl<'a> Mmap<'a> {
    pub(super) fn decode(
        body: &mut Cursor<'a>,
        misc: Misc,
        sample_id: SampleId,
    ) -> Result<Self, DecodeError> {
        Ok(Self {
            misc,
            pid: body.u32("pid")?,
            tid: body.u32("tid")?,
            start: body.u64("start")?,
            len: body.u64("length")?,
            pgoff: body.u64("offset")?,
            name: MapName::from(until_nul(body.rest())),
            sample_id,
        })
    }
}
