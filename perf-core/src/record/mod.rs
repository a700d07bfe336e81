//! Records: the content of rings. Layouts and type numbers are those of `linux/perf_event.h`, in
//! native byte order.
//!
//! The size of a record is known before it is written, so a record is reserved and encoded directly
//! into the ring without copying or allocating. Decoding borrows from the bytes and accepts
//! arbitrary input: inconsistent bytes cause a [`DecodeError`].

mod cursor;
mod id;
mod read;
mod sample;
mod side;
#[cfg(test)]
mod tests;

use crate::attr::{Attr, ReadFormat, SampleType};
use crate::ring::{LostTrailer, RawRecord, RecordReservation, Ring, RingError};
use cursor::Cursor;

pub use cursor::DecodeError;
pub use id::SampleId;
pub(crate) use read::read_size_of;
pub use read::{ReadFormatEntries, ReadFormatEntry, ReadFormatValues};
pub use sample::{Sample, SampleWords, UserRegsAndStack};
pub use side::{CommRecord, LostRecord, MmapRecord, ReadRecord, SwitchRecord, TaskRecord, ThrottleRecord};

/// Size of a record header, in bytes.
pub const HEADER_SIZE: usize = 8;

/// The type of a record in a ring (`perf_event_header.type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RecordType(pub u32);

impl RecordType {
    /// `PERF_RECORD_MMAP`: a mapping of guest memory.
    pub const MMAP: Self = Self(1);
    /// `PERF_RECORD_LOST`: number of records that were lost because the ring was full.
    pub const LOST: Self = Self(2);
    /// `PERF_RECORD_COMM`: the name of a vCPU or a VM.
    pub const COMM: Self = Self(3);
    /// `PERF_RECORD_EXIT`: a vCPU was removed.
    pub const EXIT: Self = Self(4);
    /// `PERF_RECORD_THROTTLE`: an event overflowed too frequently, and its overflows are
    /// suppressed.
    pub const THROTTLE: Self = Self(5);
    /// `PERF_RECORD_UNTHROTTLE`: the overflows of a throttled event are no longer suppressed.
    pub const UNTHROTTLE: Self = Self(6);
    /// `PERF_RECORD_FORK`: a vCPU was added.
    pub const FORK: Self = Self(7);
    /// `PERF_RECORD_READ`: final values of an inherited event on a vCPU that was removed.
    pub const READ: Self = Self(8);
    /// `PERF_RECORD_SAMPLE`: a sample.
    pub const SAMPLE: Self = Self(9);
    /// `PERF_RECORD_SWITCH`: a vCPU was scheduled in or out.
    pub const SWITCH: Self = Self(14);
}

/// The CPU mode of a sample: what was running. Stored in the low three bits of `misc`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum CpuMode {
    /// The CPU mode is not known.
    #[default]
    Unknown = 0,
    /// Code of the host kernel.
    Kernel = 1,
    /// Code in user space of the host.
    User = 2,
    /// A hypervisor below the host.
    Hypervisor = 3,
    /// Guest code at CPL 0.
    GuestKernel = 4,
    /// Guest code at CPL 3.
    GuestUser = 5,
}

/// Flags of a record header (`perf_event_header.misc`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RecordMisc(pub u16);

impl RecordMisc {
    /// `PERF_RECORD_MISC_EXACT_IP`: the instruction pointer has no skid.
    pub const EXACT_IP: Self = Self(1 << 14);
    /// `PERF_RECORD_MISC_SWITCH_OUT`: the vCPU of a SWITCH record was scheduled out.
    pub const SWITCH_OUT: Self = Self(1 << 13);
    const CPU_MODE_MASK: u16 = 7;

    /// Returns the CPU mode in these flags, or [`CpuMode::Unknown`] for undefined values.
    pub fn cpu_mode(self) -> CpuMode {
        match self.0 & Self::CPU_MODE_MASK {
            1 => CpuMode::Kernel,
            2 => CpuMode::User,
            3 => CpuMode::Hypervisor,
            4 => CpuMode::GuestKernel,
            5 => CpuMode::GuestUser,
            _ => CpuMode::Unknown,
        }
    }

    /// Returns `true` if the instruction pointer of the sample has no skid.
    pub fn exact_ip(self) -> bool {
        self.0 & Self::EXACT_IP.0 != 0
    }
}

impl From<CpuMode> for RecordMisc {
    fn from(mode: CpuMode) -> Self {
        Self(mode as u16)
    }
}

/// Format of the records of an event: the fields that samples, read values and trailers contain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct RecordFormat {
    /// Fields that SAMPLE records contain.
    pub sample_type: SampleType,
    /// Fields that read values contain, in SAMPLE and READ records.
    pub read_format: ReadFormat,
    /// `true` if records other than samples end with a [`SampleId`].
    pub sample_id_all: bool,
}

impl RecordFormat {
    /// Returns the format of an event whose samples have the fields `sample_type`.
    #[must_use]
    pub fn of_samples(sample_type: SampleType) -> Self {
        Self {
            sample_type,
            ..Self::default()
        }
    }
}

impl From<&Attr> for RecordFormat {
    fn from(attr: &Attr) -> Self {
        Self {
            sample_type: attr.sample_type,
            read_format: attr.read_format,
            sample_id_all: attr.sample_id_all,
        }
    }
}

/// A destination to which the bytes of a record are written.
pub trait RecordSink {
    /// Appends `bytes` to the record.
    fn put(&mut self, bytes: &[u8]);

    /// Appends a `u64` in native byte order to the record.
    #[inline]
    fn put_u64(&mut self, value: u64) {
        self.put(&value.to_ne_bytes());
    }
}

impl RecordSink for RecordReservation<'_> {
    #[inline]
    fn put(&mut self, bytes: &[u8]) {
        RecordReservation::put(self, bytes);
    }

    #[inline]
    fn put_u64(&mut self, value: u64) {
        RecordReservation::put_u64(self, value);
    }
}

/// Writes to the front of the slice. Bytes that exceed the slice are discarded.
impl RecordSink for &mut [u8] {
    fn put(&mut self, bytes: &[u8]) {
        let len = bytes.len().min(self.len());
        let (now, later) = std::mem::take(self).split_at_mut(len);
        now.copy_from_slice(&bytes[..len]);
        *self = later;
    }
}

impl RecordSink for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}

#[inline]
fn put_u64(out: &mut impl RecordSink, value: u64) {
    out.put_u64(value);
}

/// Appends two 32-bit fields to a record, with `first` at the lower address.
#[inline]
fn put_u32s(out: &mut impl RecordSink, first: u32, second: u32) {
    // The first field is the lower half, because x86-64, the only supported architecture, is
    // little-endian.
    put_u64(out, u64::from(first) | u64::from(second) << 32);
}

/// Appends a record header. `size` must be at most 65535, which rings check before anything is
/// written.
#[inline]
fn put_header(out: &mut impl RecordSink, ty: RecordType, misc: RecordMisc, size: usize) {
    let size = u16::try_from(size).unwrap_or(u16::MAX);
    put_u64(
        out,
        u64::from(ty.0) | u64::from(misc.0) << 32 | u64::from(size) << 48,
    );
}

/// A record that can be encoded and written to a ring.
pub trait EncodeRecord {
    /// Returns the size of the whole record in bytes, a multiple of 8.
    fn size(&self, format: RecordFormat) -> usize;

    /// Appends the encoded record to `out`, exactly [`size`](Self::size) bytes.
    fn encode(&self, format: RecordFormat, out: &mut impl RecordSink);

    /// `true` if the record is a sample, which counts for `wakeup_events`.
    const IS_SAMPLE: bool = false;

    /// Returns the trailer of the record. A LOST record that the ring writes before this record has
    /// the same trailer.
    fn sample_id(&self) -> SampleId {
        SampleId::default()
    }

    /// Writes the record to a ring.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`Ring::begin`].
    #[inline]
    fn write(&self, format: RecordFormat, ring: &Ring) -> Result<(), RingError> {
        let trailer = self.sample_id().trailer(format);
        let mut record = ring.begin_with(self.size(format), Self::IS_SAMPLE, &trailer)?;
        self.encode(format, &mut record);
        debug_assert_eq!(record.remaining(), 0, "size and encoding disagree");
        Ok(())
    }

    /// Writes several records in order, in as few reservations as possible. One reservation for
    /// several records is cheaper than a reservation for each, in particular while another thread
    /// writes to the same ring.
    ///
    /// If there is not enough space for all records, each is written separately, so no more records
    /// are lost than with separate writes.
    #[inline]
    fn write_all<I>(records: I, format: RecordFormat, ring: &Ring) -> RecordWriteOutcome
    where
        Self: Sized,
        I: IntoIterator<Item = Self>,
        I::IntoIter: Clone,
    {
        let mut written = RecordWriteOutcome::default();
        let mut rest = records.into_iter();
        loop {
            let (mut sizes, mut n, mut bytes) = (rest.clone(), 0, 0);
            while let Some(record) = sizes.next()
                && let size = record.size(format)
                && (n == 0 || bytes + size <= ring.batch_max())
            {
                n += 1;
                bytes += size;
            }
            if n == 0 {
                return written;
            }
            let samples = if Self::IS_SAMPLE { n } else { 0 };
            let run = if n == 1 {
                None
            } else {
                let first = rest.clone().next();
                let trailer = first.map_or(LostTrailer::NONE, |record| record.sample_id().trailer(format));
                ring.begin_batch_with(bytes, samples, &trailer).ok()
            };
            if let Some(mut run) = run {
                for record in rest.by_ref().take(usize::try_from(n).unwrap_or(usize::MAX)) {
                    // The batch was reserved for the total of these sizes, so this fails only if
                    // `size` returned a different value before.
                    match run.begin(record.size(format)) {
                        Ok(mut reservation) => {
                            record.encode(format, &mut reservation);
                            debug_assert_eq!(reservation.remaining(), 0, "size and encoding disagree");
                            written.written += 1;
                        }
                        Err(_) => written.oversized += 1,
                    }
                }
            } else {
                for record in rest.by_ref().take(usize::try_from(n).unwrap_or(usize::MAX)) {
                    let one = RecordWriteOutcome::from(record.write(format, ring));
                    written.written += one.written;
                    written.lost += one.lost;
                    written.oversized += one.oversized;
                }
            }
        }
    }
}

/// Result of writing one or several records to a ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecordWriteOutcome {
    /// Number of records that were written to the ring.
    pub written: u64,
    /// Number of records that were lost because the ring was full. A LOST record will report this
    /// number.
    pub lost: u64,
    /// Number of records that the ring can never hold, because they are too large or the ring has
    /// no data pages. LOST records do not include this number.
    pub oversized: u64,
}

impl From<Result<(), RingError>> for RecordWriteOutcome {
    /// Converts the result of writing a single record.
    #[inline]
    fn from(result: Result<(), RingError>) -> Self {
        let (written, lost, unfit) = match result {
            Ok(()) => (1, 0, 0),
            Err(RingError::Full) => (0, 1, 0),
            Err(_) => (0, 0, 1),
        };
        Self {
            written,
            lost,
            oversized: unfit,
        }
    }
}

/// A decoded record that borrows its contents from the encoded bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum DecodedRecord<'a> {
    /// A mapping of guest memory.
    Mmap(MmapRecord<'a>),
    /// Number of records that were lost.
    Lost(LostRecord),
    /// Name of a vCPU or a VM.
    Comm(CommRecord<'a>),
    /// Removal of a vCPU.
    Exit(TaskRecord),
    /// Throttling of an event that overflowed too frequently.
    Throttle(ThrottleRecord),
    /// End of the throttling of an event.
    Unthrottle(ThrottleRecord),
    /// Addition of a vCPU.
    Fork(TaskRecord),
    /// Final values of an inherited event on a vCPU that was removed.
    Read(ReadRecord<'a>),
    /// A sample.
    Sample(Sample<'a>),
    /// A vCPU was scheduled in or out.
    Switch(SwitchRecord),
    /// A record of a type that this version does not decode.
    Other(RawRecord<'a>),
}

impl<'a> DecodedRecord<'a> {
    /// Decodes a record from a ring. `format` must be the format of the event that wrote the
    /// record.
    ///
    /// # Errors
    ///
    /// Returns a [`DecodeError`] if the record is too short for its type, or if a sample is too
    /// long for its format.
    #[inline]
    pub fn decode(raw: RawRecord<'a>, format: RecordFormat) -> Result<Self, DecodeError> {
        let mut body = Cursor::new(raw.body());
        let misc = RecordMisc(raw.misc());
        let ty = RecordType(raw.ty());
        if ty == RecordType::SAMPLE {
            return Ok(Self::Sample(Sample::decode(&mut body, misc, format)?));
        }
        // These layouts contain no length, so the trailer is located from the end. Records of
        // unsupported types may have no trailer.
        let id = match ty.0 {
            1..=9 | 14 => SampleId::decode(&mut body, format)?,
            _ => return Ok(Self::Other(raw)),
        };
        Ok(match ty {
            RecordType::MMAP => Self::Mmap(MmapRecord::decode(&mut body, misc, id)?),
            RecordType::LOST => Self::Lost(LostRecord::decode(&mut body, id)?),
            RecordType::COMM => Self::Comm(CommRecord::decode(&mut body, id)?),
            RecordType::EXIT => Self::Exit(TaskRecord::decode(&mut body, false, id)?),
            RecordType::FORK => Self::Fork(TaskRecord::decode(&mut body, true, id)?),
            RecordType::THROTTLE => Self::Throttle(ThrottleRecord::decode(&mut body, true, id)?),
            RecordType::UNTHROTTLE => Self::Unthrottle(ThrottleRecord::decode(&mut body, false, id)?),
            RecordType::READ => Self::Read(ReadRecord::decode(&mut body, format, id)?),
            RecordType::SWITCH => Self::Switch(SwitchRecord::new(misc, id)),
            _ => Self::Other(raw),
        })
    }
}
