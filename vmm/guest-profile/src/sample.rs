//! Raw data of a sample: guest state for which perf events have no field.
//!
//! The vCPU thread writes a [`RingSampleHeader`] to a ring, from which a client reads it. The
//! layout is part of the control protocol (docs/reference/control.md). A `perf.data` file stores
//! only a part of this data ([`PerfDataRawSample`]). The fields of both structures are
//! little-endian and unaligned.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::mappings::{self, SampledProcessMapping};
use crate::task::COMM_LEN;
use crate::unwind::UnwindStopReasons;
use kernel_images::build_id::BuildId;

/// Header of a sample's raw data in the ring to which a vCPU thread writes. Mappings ([`mappings`])
/// may follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct RingSampleHeader {
    cr3: U64,
    cpl: u8,
    /// Flags of the sample: [`TASK_KNOWN`] and [`KERNEL_THREAD`].
    flags: u8,
    /// Reasons why unwinding ended, encoded by [`UnwindStopReasons::to_bytes`].
    ends: [u8; 2],
    pid: U32,
    tid: U32,
    comm: [u8; COMM_LEN],
    held_ns: U32,
    zero: [u8; 4],
}

/// Flag of [`RingSampleHeader`]: the process ID, the thread ID and the task name are valid.
const TASK_KNOWN: u8 = 1;
/// Flag of [`RingSampleHeader`]: the task is a kernel thread.
const KERNEL_THREAD: u8 = 2;

/// Size of a sample's raw data in a ring, without the mappings, in bytes. With the length word
/// before it, the size is a multiple of 8.
pub const RAW_BYTES: usize = size_of::<RingSampleHeader>();
const _: () = assert!(RAW_BYTES == 44);

/// Raw data of a `PERF_RECORD_SAMPLE` in a `perf.data` file.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct PerfDataRawSample {
    magic: [u8; 4],
    cr3: U64,
    cpl: u8,
    /// Reasons why unwinding ended, encoded by [`UnwindStopReasons::to_bytes`].
    ends: [u8; 2],
    zero: [u8; 5],
}

/// Magic number of [`PerfDataRawSample`].
const FILE_MAGIC: [u8; 4] = *b"PVS1";

impl PerfDataRawSample {
    /// Creates the raw data of a sample that is written to a `perf.data` file.
    pub fn new(cr3: u64, cpl: u8, ends: UnwindStopReasons) -> Self {
        Self {
            magic: FILE_MAGIC,
            cr3: cr3.into(),
            cpl,
            ends: ends.to_bytes(),
            zero: [0; 5],
        }
    }

    /// Returns the CR3, the privilege level, and the reasons why unwinding ended, from the raw data
    /// of a sample. Returns `None` if the raw data does not start with the magic number.
    pub fn read(raw: &[u8]) -> Option<(u64, u8, UnwindStopReasons)> {
        let (file, _) = Self::ref_from_prefix(raw).ok()?;
        (file.magic == FILE_MAGIC).then(|| {
            (
                file.cr3.get(),
                file.cpl & 3,
                UnwindStopReasons::from_bytes(file.ends),
            )
        })
    }
}

/// The decoded raw data of a sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SampleRawData {
    /// CR3 of the vCPU at the sample.
    pub cr3: u64,
    /// Privilege level of the vCPU at the sample, 0 to 3.
    pub cpl: u8,
    /// Reasons why unwinding of the sample's call chain ended.
    pub ends: UnwindStopReasons,
    /// Process ID, thread ID and name of the sampled guest task; `None` if the task was not found.
    pub task: Option<(u32, u32, [u8; COMM_LEN])>,
    /// Time for which the vCPU was stopped to take the previous sample, in nanoseconds; 0 if it was
    /// not measured.
    pub held_ns: u32,
    /// `true` if the task is a kernel thread, which has no user memory and never runs user code.
    pub kernel_thread: bool,
}

impl SampleRawData {
    /// Encodes the sample as the header of raw data in a ring.
    #[inline]
    pub fn head(&self) -> RingSampleHeader {
        let (pid, tid, comm) = self.task.unwrap_or_default();
        let flags = match (self.task, self.kernel_thread) {
            (None, _) => 0,
            (Some(_), false) => TASK_KNOWN,
            (Some(_), true) => TASK_KNOWN | KERNEL_THREAD,
        };
        RingSampleHeader {
            cr3: self.cr3.into(),
            cpl: self.cpl,
            flags,
            ends: self.ends.to_bytes(),
            pid: pid.into(),
            tid: tid.into(),
            comm,
            held_ns: self.held_ns.into(),
            zero: [0; 4],
        }
    }

    /// Decodes raw data from a ring. Returns `None` if the data has a different format.
    pub fn decode(raw: &[u8]) -> Option<Self> {
        let (head, _) = RingSampleHeader::ref_from_prefix(raw).ok()?;
        let known = head.flags & TASK_KNOWN != 0;
        Some(Self {
            cr3: head.cr3.get(),
            cpl: head.cpl & 3,
            ends: UnwindStopReasons::from_bytes(head.ends),
            task: known.then_some((head.pid.get(), head.tid.get(), head.comm)),
            held_ns: head.held_ns.get(),
            kernel_thread: known && head.flags & KERNEL_THREAD != 0,
        })
    }

    /// Parses the mappings that were reported with the sample, from its raw data `raw`.
    pub fn mappings(raw: &[u8]) -> impl Iterator<Item = SampledProcessMapping<'_>> {
        mappings::read(raw.get(RAW_BYTES..).unwrap_or(&[]))
    }

    /// Returns the build ID of the file whose mapping starts at `start`, if it was reported.
    pub fn build_id(raw: &[u8], start: u64) -> Option<BuildId> {
        mappings::build_id(raw.get(RAW_BYTES..)?, start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unwind;

    /// The layout of raw sample data in a ring matches the protocol in docs/reference/control.md.
    #[test]
    fn ring_layout_matches_protocol() {
        let raw = SampleRawData {
            cr3: 0x1122_3344_5566_7788,
            cpl: 3,
            ends: UnwindStopReasons::default(),
            task: Some((7, 9, *b"name............")),
            held_ns: 0x0102_0304,
            kernel_thread: true,
        };
        let mut golden = vec![0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11, 3, 3];
        golden.extend(UnwindStopReasons::default().to_bytes());
        golden.extend([7, 0, 0, 0, 9, 0, 0, 0]);
        golden.extend(b"name............");
        golden.extend([4, 3, 2, 1, 0, 0, 0, 0]);
        assert_eq!(raw.head().as_bytes(), golden);
    }

    #[test]
    fn file_raw_data_round_trips() {
        let ends = UnwindStopReasons {
            kernel: Some(unwind::UnwindStop::Complete),
            user: None,
            guessed: true,
        };
        let file = PerfDataRawSample::new(0x1234_5678_9abc_def0, 3, ends);
        assert_eq!(file.as_bytes().len(), 20);
        assert_eq!(
            PerfDataRawSample::read(file.as_bytes()),
            Some((0x1234_5678_9abc_def0, 3, ends))
        );
        assert_eq!(PerfDataRawSample::read(&file.as_bytes()[..19]), None);
        assert_eq!(PerfDataRawSample::read(&[0; 20]), None);
    }

    #[test]
    fn ring_raw_data_round_trips() {
        for task in [None, Some((7, 8, *b"0123456789abcdef"))] {
            let raw = SampleRawData {
                cr3: 0x1234_5678_9abc_def0,
                cpl: 3,
                ends: UnwindStopReasons {
                    kernel: Some(unwind::UnwindStop::Complete),
                    user: Some(unwind::UnwindStop::Spent),
                    guessed: true,
                },
                task,
                held_ns: 123_456,
                kernel_thread: task.is_some(),
            };
            assert_eq!(SampleRawData::decode(raw.head().as_bytes()), Some(raw));
        }
        assert_eq!(SampleRawData::decode(&[0; RAW_BYTES - 1]), None);
    }
}
