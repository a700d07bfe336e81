//! Reader of rings, both those of this crate, in this process or another, and those of the kernel.
#![expect(unsafe_code, reason = "memory shared with other processes")]

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::fence;

use super::mapping::{self, Mapping, MappingAccess, PAGE_SIZE};
use super::page::{ControlPage, ControlPageCounter};
use super::protocol::RingGeometry;
use super::{DATA_PAGES_MAX, RECORD_SIZE_MAX, Ring, RingFullPolicy};

/// Size of `struct perf_event_header`, in bytes.
const HEADER_SIZE: usize = 8;

/// Error of mapping or reading a ring.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RingReadError {
    /// The file descriptor is not a ring of this crate.
    #[error("not a ring: {what}")]
    NotARing {
        /// Reason why the file descriptor is not a ring.
        what: &'static str,
    },
    /// The ring is inconsistent, because another process has written to it. Everything up to the
    /// current head was skipped, and reading may continue.
    #[error("corrupt ring at position {position}: {what}")]
    Corrupt {
        /// Position of the invalid record or head.
        position: u64,
        /// Description of the invalid content.
        what: &'static str,
    },
    /// The writer of an overwrite ring overwrote records before they were read. Reading continues
    /// in the newer half of the ring.
    #[error("{bytes} bytes were overwritten before they were read")]
    Overrun {
        /// Number of bytes that were skipped.
        bytes: u64,
    },
    /// A system call failed.
    #[error("{what} failed")]
    Os {
        /// Name of the system call that failed.
        what: &'static str,
        /// Error that the system call returned.
        #[source]
        source: std::io::Error,
    },
}

/// The undecoded bytes of one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawRecord<'a> {
    bytes: &'a [u8],
}

impl<'a> RawRecord<'a> {
    /// Creates a record from its bytes. Returns `None` if they are not exactly one record.
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        let record = Self { bytes };
        (bytes.len() >= HEADER_SIZE && record.size() == bytes.len()).then_some(record)
    }

    /// Returns the record type (`PERF_RECORD_*`).
    #[inline]
    pub fn ty(&self) -> u32 {
        u32::from_ne_bytes([self.bytes[0], self.bytes[1], self.bytes[2], self.bytes[3]])
    }

    /// Returns the `misc` flags (`PERF_RECORD_MISC_*`).
    #[inline]
    pub fn misc(&self) -> u16 {
        u16::from_ne_bytes([self.bytes[4], self.bytes[5]])
    }

    fn size(&self) -> usize {
        usize::from(u16::from_ne_bytes([self.bytes[6], self.bytes[7]]))
    }

    /// Returns the whole record, including its header.
    #[inline]
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns the bytes after the header.
    #[inline]
    pub fn body(&self) -> &'a [u8] {
        &self.bytes[HEADER_SIZE..]
    }
}

enum RingMapping {
    Own(Mapping),
    Ring(Arc<Ring>),
}

/// A reader of one ring. A [`RingFullPolicy::Writable`] ring supports one reader at a time.
///
/// Records are borrowed from the ring itself, even where they wrap. This crate's rings are mapped
/// so that wrapping records are contiguous, and wrapping records of the kernel's rings are copied
/// to a buffer. Space is returned to the writer when the ring was read to its end or by a quarter
/// of its size, and when the reader is dropped.
///
/// Neither the control page nor the records are trusted, so corruption causes an error and never a
/// panic. However, borrowed bytes are *bytes of a shared mapping*, which a malicious writer can
/// change at any time. The borrower must therefore read each length only once. The decoder in
/// [`crate::record`] does so.
pub struct RingReader {
    data: *const u8,
    mask: usize,
    /// Position of the next record to read.
    tail: u64,
    /// Value of `data_head` when this reader last read it.
    head: u64,
    /// Value of `data_tail` when this reader last wrote it.
    released: u64,
    /// Number of read but unreleased bytes at which `data_tail` is written.
    release_at: u64,
    mode: RingFullPolicy,
    mirrored: bool,
    /// Buffer for records that cannot be borrowed: all records of an overwrite ring, and wrapping
    /// records of a kernel ring.
    scratch: Box<[u8]>,
    memory: RingMapping,
}

// SAFETY: `data` points into `memory`, which the reader owns or shares and which does not move;
// nothing in it is tied to a thread.
unsafe impl Send for RingReader {}

impl fmt::Debug for RingReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingReader")
            .field("mode", &self.mode)
            .field("tail", &self.tail)
            .field("head", &self.head)
            .finish_non_exhaustive()
    }
}

impl RingReader {
    /// Maps a ring from a memfd that another process sent.
    ///
    /// # Errors
    ///
    /// Returns [`RingReadError::NotARing`] if the file descriptor is not a memfd with the size of a
    /// ring, or if its size is not sealed. Returns [`RingReadError::Os`] if the memfd cannot be
    /// mapped.
    pub fn map(fd: BorrowedFd<'_>) -> Result<Self, RingReadError> {
        let seals = mapping::seals(fd).map_err(|_| RingReadError::NotARing {
            what: "the descriptor is not a memfd",
        })?;
        if seals & libc::F_SEAL_SHRINK == 0 {
            return Err(RingReadError::NotARing {
                what: "its size is not sealed",
            });
        }
        let len = mapping::file_size(fd).map_err(|source| RingReadError::Os {
            what: "fstat",
            source,
        })?;
        let data_size = usize::try_from(len)
            .ok()
            .and_then(|len| len.checked_sub(PAGE_SIZE))
            .filter(|&size| size.is_multiple_of(PAGE_SIZE) && size / PAGE_SIZE <= DATA_PAGES_MAX)
            .filter(|&size| size == 0 || size.is_power_of_two())
            .ok_or(RingReadError::NotARing {
                what: "its size is not that of 1 + 2^n pages",
            })?;
        let mode = if seals & (libc::F_SEAL_FUTURE_WRITE | libc::F_SEAL_WRITE) != 0 {
            RingFullPolicy::Overwrite
        } else {
            RingFullPolicy::Writable
        };
        let access = MappingAccess {
            control_writable: mode == RingFullPolicy::Writable,
            data_writable: false,
        };
        let mapping = Mapping::memfd(fd, data_size, access).map_err(|source| RingReadError::Os {
            what: "mapping the ring",
            source,
        })?;
        let page = mapping.control();
        if page.data_offset.load(Relaxed) != PAGE_SIZE as u64
            || page.data_size.load(Relaxed) != data_size as u64
        {
            return Err(RingReadError::NotARing {
                what: "the control page does not describe it",
            });
        }
        Ok(Self::new(RingMapping::Own(mapping), mode))
    }

    /// Maps the ring of a kernel perf event with `data_pages` data pages, which the kernel
    /// allocates.
    ///
    /// # Errors
    ///
    /// Returns [`RingReadError::NotARing`] if the number of pages is not a power of two and
    /// [`RingReadError::Os`] if mapping fails.
    pub fn map_perf(fd: BorrowedFd<'_>, data_pages: usize) -> Result<Self, RingReadError> {
        if !data_pages.is_power_of_two() || data_pages > DATA_PAGES_MAX {
            return Err(RingReadError::NotARing {
                what: "the number of data pages is not a power of two",
            });
        }
        let mapping = Mapping::perf(fd, data_pages * PAGE_SIZE).map_err(|source| RingReadError::Os {
            what: "mapping the perf event",
            source,
        })?;
        Ok(Self::new(RingMapping::Own(mapping), RingFullPolicy::Writable))
    }

    /// Creates a reader of a ring of this process, through its existing mapping.
    pub fn of(ring: Arc<Ring>) -> Self {
        let mode = ring.mode;
        Self::new(RingMapping::Ring(ring), mode)
    }

    fn new(memory: RingMapping, mode: RingFullPolicy) -> Self {
        let mapping = match &memory {
            RingMapping::Own(mapping) => mapping,
            RingMapping::Ring(ring) => &ring.mapping,
        };
        let (data, size, mirrored) = (
            mapping.data().cast_const(),
            mapping.data_size(),
            mapping.mirrored(),
        );
        let scratch = if mode == RingFullPolicy::Overwrite || !mirrored {
            RECORD_SIZE_MAX
        } else {
            0
        };
        let mut reader = Self {
            data,
            mask: size.saturating_sub(1),
            tail: 0,
            head: 0,
            released: 0,
            release_at: size as u64 / 4,
            mode,
            mirrored,
            scratch: vec![0; scratch].into_boxed_slice(),
            memory,
        };
        // In a writable ring, reading starts at the tail of the last reader. An overwrite ring is
        // read from its first record while that is still intact, and later from the oldest one that
        // the writer has located.
        let (head, tail) = (
            reader.page().data_head.load(Acquire),
            reader.page().data_tail.load(Relaxed),
        );
        let start = match mode {
            RingFullPolicy::Writable => tail,
            RingFullPolicy::Overwrite if head.wrapping_sub(tail) <= reader.trusted_len() => tail,
            RingFullPolicy::Overwrite => reader.page().oldest_record(head & !7, reader.trusted_len()),
        } & !7;
        (reader.tail, reader.head, reader.released) = (start, start, start);
        reader
    }

    #[inline]
    fn mapping(&self) -> &Mapping {
        match &self.memory {
            RingMapping::Own(mapping) => mapping,
            RingMapping::Ring(ring) => &ring.mapping,
        }
    }

    #[inline]
    fn page(&self) -> &ControlPage {
        self.mapping().control()
    }

    fn size(&self) -> u64 {
        self.mapping().data_size() as u64
    }

    /// Returns the number of bytes below the head that no writer can currently overwrite.
    fn trusted_len(&self) -> u64 {
        let shape = RingGeometry {
            size: self.size(),
            overwrite: self.mode == RingFullPolicy::Overwrite,
        };
        if shape.overwrite {
            shape.size - shape.in_flight_max()
        } else {
            shape.size
        }
    }

    /// Returns the mode of the ring: what happens when the ring is full.
    pub fn mode(&self) -> RingFullPolicy {
        self.mode
    }

    /// Returns the counter fields of the control page, or `None` if an update by their owner is in
    /// progress. If the owner has died during an update, the result is always `None`.
    pub fn counter(&self) -> Option<ControlPageCounter> {
        self.page().counter(1000)
    }

    /// Returns the next record, or `None` if the ring is empty.
    ///
    /// The record is borrowed until the next call, after which its space may be released.
    ///
    /// # Errors
    ///
    /// Returns [`RingReadError::Corrupt`] after skipping to the head, or [`RingReadError::Overrun`]
    /// after skipping to a record that is still intact. Reading may continue after either error.
    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "an offset is taken modulo the size of the ring"
    )]
    pub fn next_record(&mut self) -> Result<Option<RawRecord<'_>>, RingReadError> {
        if self.tail.wrapping_sub(self.released) >= self.release_at {
            self.release();
        }
        if self.tail == self.head && !self.refill()? {
            return Ok(None);
        }
        if self.mode == RingFullPolicy::Overwrite {
            return self.next_copied().map(Some);
        }
        let size = self.size_at(self.tail)?;
        let offset = self.tail as usize & self.mask;
        self.tail = self.tail.wrapping_add(size as u64);
        if !self.mirrored && offset + size > self.mask + 1 {
            self.copy_wrapped(offset, size);
            return Ok(Some(RawRecord {
                bytes: &self.scratch[..size],
            }));
        }
        // SAFETY: [offset, offset + size) is inside the data area, or inside both copies if it is
        // mapped twice: the offset is below the size of the area, and `size_at` has checked that
        // the record does not exceed that size. The bytes are published and not released while the
        // record is borrowed, so a correct writer does not change them. Bytes have no invalid
        // values.
        let bytes = unsafe { std::slice::from_raw_parts(self.data.add(offset), size) };
        Ok(Some(RawRecord { bytes }))
    }

    /// Returns all available records as a batch. All records of a batch can be borrowed at the same
    /// time.
    ///
    /// An overwrite ring yields no records, because such records can only be trusted one at a time
    /// (see [`next_record`](Self::next_record)). Space is released by the next call of any method,
    /// so a writer may meanwhile find the ring full.
    ///
    /// # Errors
    ///
    /// Returns the errors of [`next_record`](Self::next_record) that concern the head. A corrupt
    /// record ends the batch, and the next call reports it.
    pub fn batch(&mut self) -> Result<RingRecordBatch<'_>, RingReadError> {
        self.release();
        if self.tail == self.head {
            self.refill()?;
        } else if self.mode == RingFullPolicy::Writable {
            // The last batch ended early. If it ended at a corrupt record, returns the error of
            // that record.
            self.size_at(self.tail)?;
        }
        Ok(RingRecordBatch { reader: self })
    }

    /// Releases the space of the records that were read, and reads `data_head`. Returns `true` if
    /// there are new records.
    #[inline]
    fn refill(&mut self) -> Result<bool, RingReadError> {
        self.release();
        // Acquire: pairs with the writer's Release in `Protocol::publish` (the kernel's smp_wmb
        // before it stores data_head), so the records below the head are read after it. A valid
        // head is a multiple of 8; an invalid one is rounded down.
        let head = self.page().data_head.load(Acquire) & !7;
        if head == self.tail {
            return Ok(false);
        }
        let unread = head.wrapping_sub(self.tail);
        if (self.mode == RingFullPolicy::Writable && unread > self.size())
            || unread > i64::MAX as u64
            || self.size() == 0
        {
            let position = self.tail;
            self.skip_to(head);
            return Err(RingReadError::Corrupt {
                position,
                what: "the head is behind the tail or beyond the ring",
            });
        }
        self.head = head;
        Ok(true)
    }

    /// Returns the size of the record at `position`, which must be below the head, in bytes.
    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "an offset is taken modulo the size of the ring"
    )]
    fn size_at(&mut self, position: u64) -> Result<usize, RingReadError> {
        let offset = position as usize & self.mask;
        // SAFETY: positions are multiples of 8 (ensured by `new`, `refill` and every size), so the
        // 8 bytes of the header are aligned and inside the data area. Volatile, so that the checked
        // size is the size that is used.
        let header = unsafe { self.data.add(offset).cast::<u64>().read_volatile() };
        let size = (header.to_le() >> 48) as usize;
        if size < HEADER_SIZE || !size.is_multiple_of(8) || size as u64 > self.head.wrapping_sub(position) {
            return Err(self.corrupt(position, size));
        }
        Ok(size)
    }

    #[cold]
    fn corrupt(&mut self, position: u64, size: usize) -> RingReadError {
        self.skip_to(self.head);
        let what = if size < HEADER_SIZE {
            "the record is smaller than its header"
        } else if !size.is_multiple_of(8) {
            "the size of the record is not a multiple of 8"
        } else {
            "the record ends beyond the head"
        };
        RingReadError::Corrupt { position, what }
    }

    fn skip_to(&mut self, position: u64) {
        self.tail = position;
        self.head = position;
        self.release();
    }

    #[expect(
        clippy::cast_possible_truncation,
        reason = "records have at most 65,535 bytes, which was checked"
    )]
    #[inline]
    fn copy_wrapped(&mut self, offset: usize, size: usize) {
        // The parts of the scratch buffer for the bytes before and after the wrap.
        let (first, rest) = self.scratch[..size].split_at_mut(self.mask + 1 - offset);
        // SAFETY: the record is [offset, end of the area) and the first `rest.len()` bytes of the
        // area. Both are inside it, because `size_at` has checked that the record does not exceed
        // the area.
        unsafe {
            std::ptr::copy_nonoverlapping(self.data.add(offset), first.as_mut_ptr(), first.len());
            std::ptr::copy_nonoverlapping(self.data, rest.as_mut_ptr(), rest.len());
        }
        self.scratch[6..8].copy_from_slice(&(size as u16).to_ne_bytes());
    }

    /// Copies the next record of an overwrite ring, and then checks that it was not overwritten
    /// meanwhile.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "an offset is taken modulo the size of the ring"
    )]
    #[inline]
    fn next_copied(&mut self) -> Result<RawRecord<'_>, RingReadError> {
        let position = self.tail;
        let size = match self.size_at(position) {
            Ok(size) => size,
            Err(corrupt) => {
                // If the writer has overtaken the reader, the record was overwritten and is not
                // corrupt.
                let head = self.head;
                self.tail = position;
                self.check_not_overwritten()?;
                self.skip_to(head);
                return Err(corrupt);
            }
        };
        if size > self.mask + 1 {
            // `size_at` limits the size only to the distance to the head, which may be several
            // times the ring size after an overrun.
            self.check_not_overwritten()?;
            return Err(self.corrupt(position, size));
        }
        let offset = position as usize & self.mask;
        // SAFETY: as in `next_record`; the scratch buffer holds the largest record. A writer may be
        // overwriting these bytes; they are used only if the check below proves otherwise.
        unsafe { std::ptr::copy_nonoverlapping(self.data.add(offset), self.scratch.as_mut_ptr(), size) };
        self.check_not_overwritten()?;
        self.tail = position.wrapping_add(size as u64);
        Ok(RawRecord {
            bytes: &self.scratch[..size],
        })
    }

    /// Checks that no writer has overwritten, or may currently overwrite, the bytes from the tail
    /// on.
    fn check_not_overwritten(&mut self) -> Result<(), RingReadError> {
        // Acquire: the bytes are read before the head. A writer overwrites them only after it has
        // seen a published head that makes them old (`Protocol::reserve`). That head is then
        // visible here too.
        fence(Acquire);
        let head = self.page().data_head.load(Acquire) & !7;
        let behind = head.wrapping_sub(self.tail);
        if behind <= self.trusted_len() {
            return Ok(());
        }
        // Skips half of the ring, because a record close to the limit would be overwritten before
        // it is read.
        let start = self.page().oldest_record(head, self.size() / 2);
        let bytes = start.wrapping_sub(self.tail);
        (self.tail, self.head) = (start, head);
        Err(RingReadError::Overrun { bytes })
    }

    /// Releases the space of the records read so far, so that the writer can reuse it.
    #[inline]
    pub fn release(&mut self) {
        if self.mode == RingFullPolicy::Writable && self.released != self.tail {
            // Release: pairs with the writer's Acquire load of data_tail in `Protocol::reserve`
            // (the kernel's control dependency), so all reads precede the writer's reuse of the
            // bytes.
            self.page().data_tail.store(self.tail, Release);
            self.released = self.tail;
        }
    }
}

impl Drop for RingReader {
    fn drop(&mut self) {
        self.release();
    }
}

/// An iterator over the records that were available when the batch was taken; see
/// [`RingReader::batch`].
pub struct RingRecordBatch<'a> {
    reader: &'a mut RingReader,
}

impl<'a> Iterator for RingRecordBatch<'a> {
    type Item = RawRecord<'a>;

    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "an offset is taken modulo the size of the ring"
    )]
    fn next(&mut self) -> Option<RawRecord<'a>> {
        let reader = &mut *self.reader;
        if reader.tail == reader.head || reader.mode == RingFullPolicy::Overwrite {
            return None;
        }
        let offset = reader.tail as usize & reader.mask;
        // SAFETY: as in `size_at`.
        let header = unsafe { reader.data.add(offset).cast::<u64>().read_volatile() };
        let size = (header.to_le() >> 48) as usize;
        if size < HEADER_SIZE
            || !size.is_multiple_of(8)
            || size as u64 > reader.head.wrapping_sub(reader.tail)
        {
            return None;
        }
        reader.tail = reader.tail.wrapping_add(size as u64);
        if !reader.mirrored && offset + size > reader.mask + 1 {
            reader.copy_wrapped(offset, size);
            // SAFETY: the buffer holds `size` bytes and lives as long as the reader. A batch does
            // not exceed the ring, so only one of its records wraps, and the buffer is not
            // rewritten while the batch exists.
            let bytes = unsafe { std::slice::from_raw_parts(reader.scratch.as_ptr(), size) };
            return Some(RawRecord { bytes });
        }
        // SAFETY: as in `next_record`. The space is not released while the batch exists, because it
        // borrows the reader exclusively.
        let bytes = unsafe { std::slice::from_raw_parts(reader.data.add(offset), size) };
        Some(RawRecord { bytes })
    }
}
