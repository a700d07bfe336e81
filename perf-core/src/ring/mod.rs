//! Ring buffers for samples and side-band records.
//!
//! A [`Ring`] has the layout of the kernel's perf ring buffer: a control page (`struct
//! perf_event_mmap_page`) and 2^n data pages in a memfd. Another process may map the memfd and read
//! it with any reader of that ABI, such as [`RingReader`].
//!
//! ```text
//!  writer threads and signal handlers           reader, here or in another process
//!      │ begin, put, drop                             ▲ next_record
//!      ▼                                              │
//!  ┌───────────────┬───────────────────────────┬──────┴─────┐
//!  │ control page  │ data_tail … data_head     │ being      │
//!  │ head, tail …  │ whole records, readable   │ written    │
//!  └───────────────┴───────────────────────────┴────────────┘
//! ```
//!
//! Properties, each covered by a test:
//!
//! - Writers never wait for each other or for the reader. A signal handler may interrupt a writer
//!   and write to the same ring (an overflow inside an overflow).
//! - A reader never sees a partially written record: the head advances only when everything below
//!   it is written (see `protocol.rs`).
//! - A record that does not fit is counted, and the next record that fits is preceded by that count
//!   (LOST).
//! - Writing does not allocate. A wakeup takes one system call, a record without a wakeup none.
//! - Another process may write anything to the memfd: the writer still writes only inside the ring,
//!   and [`RingReader`] reports corruption as an error.
//!
//! Sizes are in bytes. Positions are in bytes since the creation of the ring; they increase
//! monotonically and are reduced modulo the size only to address memory.
#![expect(unsafe_code, reason = "memory shared with other processes")]

mod mapping;
mod page;
mod protocol;
mod reader;
mod wake;
mod word;

#[cfg(all(test, loom))]
mod model;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::fmt;
use std::marker::PhantomData;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed};

use crate::attr::WakeupCondition;
use mapping::{Mapping, MappingAccess};
use protocol::{Claim, Protocol, RingGeometry, SharedWords};

pub use mapping::PAGE_SIZE;
pub use page::{ControlPageBusy, ControlPageCounter, ControlPageWriter};
pub use reader::{RawRecord, RingReadError, RingReader, RingRecordBatch};
pub use wake::PollState;
pub(crate) use wake::borrowed;

/// Maximum number of data pages of a ring (256 MiB of data).
pub const DATA_PAGES_MAX: usize = 1 << 16;
/// Maximum size of a record in bytes, which is the largest multiple of 8 that fits a `u16`.
pub const RECORD_SIZE_MAX: usize = u16::MAX as usize & !7;
/// Size of a LOST record without its trailer, in bytes: header, ID and count.
const LOST_SIZE: usize = 24;
/// Maximum size of a LOST record's trailer, in bytes: six words.
const TRAILER_MAX: usize = 48;
const LOST_TYPE: u32 = 2;

/// The behavior of a ring that is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RingFullPolicy {
    /// The reader maps the control page writable and advances `data_tail`. Unread bytes are never
    /// overwritten; records that do not fit are counted and reported by LOST records.
    Writable,
    /// New records overwrite the oldest ones, and the memfd can only be mapped read-only. A reader
    /// may trust the newest three quarters of the data area. Once records have been overwritten,
    /// [`RingReader`] begins at the oldest record that the control page locates, so it returns at
    /// least the last half of the area (unless single records exceed a sixteenth of it).
    Overwrite,
}

/// The trailer of a LOST record, for events that append a trailer to all records (`sample_id_all`).
///
/// The ring writes LOST records itself, with the trailer that the next writer passes with its own
/// record.
#[derive(Clone, Copy, Debug)]
pub struct LostTrailer {
    bytes: [u8; TRAILER_MAX],
    len: usize,
}

impl LostTrailer {
    /// A trailer without words, for events without `sample_id_all`.
    pub const NONE: Self = Self {
        bytes: [0; TRAILER_MAX],
        len: 0,
    };

    /// Appends an 8-byte word to the trailer. Words after the sixth are discarded.
    #[inline]
    pub fn put_u64(&mut self, value: u64) {
        if let Some(room) = self.bytes.get_mut(self.len..self.len + 8) {
            room.copy_from_slice(&value.to_ne_bytes());
            self.len += 8;
        }
    }

    /// Returns the bytes of the trailer.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Error of creating a ring or of reserving space in it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// The number of data pages is neither 0 nor a power of two, or exceeds [`DATA_PAGES_MAX`]
    /// (`EINVAL`).
    #[error("{pages} data pages: must be 0 or a power of two up to {DATA_PAGES_MAX}")]
    Pages {
        /// Requested number of data pages.
        pages: usize,
    },
    /// The ring has no data pages, so records cannot be written to it.
    #[error("the ring has no data pages")]
    NoData,
    /// The size of a record is less than a header (8 bytes) or not a multiple of 8.
    #[error("record of {size} bytes: must be a multiple of 8 and at least 8")]
    Size {
        /// Requested size of the record, in bytes.
        size: usize,
    },
    /// The record is too large for the ring and can never fit.
    #[error("record of {size} bytes: must be at most {limit} bytes in this ring")]
    TooLarge {
        /// Requested size of the record, in bytes.
        size: usize,
        /// Maximum size of a record in this ring, in bytes.
        limit: usize,
    },
    /// The ring is full (`ENOSPC`). The lost record was counted and will be reported by a LOST
    /// record.
    #[error("the ring is full")]
    Full,
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

/// The writers' view of a ring. All events that write to the ring share it (`Arc`).
pub struct Ring {
    protocol: Protocol<AtomicU64>,
    mapping: Mapping,
    record_max: usize,
    lost_id: AtomicU64,
    paused: AtomicBool,
    control_busy: AtomicBool,
    control_sequence: AtomicU32,
    wake: wake::ReaderNotifier,
    mode: RingFullPolicy,
    memfd: OwnedFd,
    /// Charge for the memory of the ring. The last field, so that the charge is dropped after the
    /// memory.
    charge: OnceLock<Box<dyn Any + Send + Sync>>,
}

/// A handle with which to check, after the [`Ring`] was dropped, whether another process still uses
/// the ring's memory.
#[derive(Debug)]
pub(crate) struct MemoryWatch {
    own: OwnedFd,
}

impl MemoryWatch {
    /// Returns `true` if any process has the ring's memory open or mapped. Takes system calls.
    pub(crate) fn is_in_use(&self) -> bool {
        mapping::is_open_elsewhere(self.own.as_fd()).unwrap_or_else(|e| {
            log::debug!("cannot tell whether a ring's memory is in use: {e}");
            false
        })
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring")
            .field("mode", &self.mode)
            .field("data_size", &self.data_size())
            .field("published", &self.protocol.published())
            .field("pending_lost", &self.protocol.pending_lost())
            .finish_non_exhaustive()
    }
}

impl Ring {
    /// Creates a ring of one control page and `data_pages` data pages (0 or a power of two).
    ///
    /// # Errors
    ///
    /// Returns [`RingError::Pages`] for an invalid number of pages and [`RingError::Os`] if memory
    /// or file descriptors are exhausted.
    pub fn new(data_pages: usize, mode: RingFullPolicy) -> Result<Self, RingError> {
        Self::starting_at(data_pages, mode, 0)
    }

    /// Creates a ring whose first record has position `start`, for tests of position wraparound.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a number of records that fits the ring"
    )]
    fn starting_at(data_pages: usize, mode: RingFullPolicy, start: u64) -> Result<Self, RingError> {
        if data_pages > DATA_PAGES_MAX || (data_pages != 0 && !data_pages.is_power_of_two()) {
            return Err(RingError::Pages { pages: data_pages });
        }
        let os = |what| move |source| RingError::Os { what, source };
        let data_size = data_pages * PAGE_SIZE;
        let memfd =
            mapping::sealed_memfd(PAGE_SIZE + data_size).map_err(os("creating a memfd for the ring"))?;
        // The kernel counts users of a reopened file descriptor only, so clients receive that one.
        // The ring can then detect when the last client has released the memory.
        let memfd = match mapping::reopened(memfd.as_fd()) {
            Ok(counted) => counted,
            Err(e) => {
                log::debug!("it cannot be told how long a client keeps this ring: {e}");
                memfd
            }
        };
        let access = MappingAccess {
            control_writable: true,
            data_writable: true,
        };
        let mapping = Mapping::memfd(memfd.as_fd(), data_size, access).map_err(os("mapping the ring"))?;
        // The existing mapping stays writable; the seal prevents further writable mappings.
        let read_only = if mode == RingFullPolicy::Overwrite {
            libc::F_SEAL_FUTURE_WRITE
        } else {
            0
        };
        mapping::add_seals(&memfd, read_only | libc::F_SEAL_SEAL).map_err(os("sealing the ring"))?;
        mapping.control().init(PAGE_SIZE as u64, data_size as u64, start);

        let shape = RingGeometry {
            size: data_size as u64,
            overwrite: mode == RingFullPolicy::Overwrite,
        };
        // A writable ring keeps at least 8 bytes free; see `Protocol::reserve`.
        let room = if shape.overwrite {
            shape.in_flight_max() as usize
        } else {
            data_size.saturating_sub(8)
        };
        let ring = Self {
            protocol: Protocol::new(shape, start),
            mapping,
            // After a loss, a LOST record precedes the next record. The largest record must fit
            // after one, otherwise it could never be written, even to an empty ring.
            record_max: room.saturating_sub(LOST_SIZE).min(RECORD_SIZE_MAX),
            lost_id: AtomicU64::new(0),
            paused: AtomicBool::new(false),
            control_busy: AtomicBool::new(false),
            control_sequence: AtomicU32::new(0),
            wake: wake::ReaderNotifier::new().map_err(os("creating an eventfd for the ring"))?,
            mode,
            memfd,
            charge: OnceLock::new(),
        };
        ring.set_wakeup(WakeupCondition::default());
        Ok(ring)
    }

    /// Sets the condition under which the reader is notified.
    ///
    /// A watermark is a number of bytes written since the last notification by watermark. It is
    /// limited to half the data area, so that a waiting reader wakes before records are lost. 0
    /// selects a quarter of the data area, but at least one page and at most half the area. If the
    /// reader is notified after a number of samples, the default watermark applies as well.
    pub fn set_wakeup(&self, wakeup: WakeupCondition) {
        let size = self.data_size() as u64;
        let default = (size / 4).max(PAGE_SIZE as u64);
        let (watermark, events) = match wakeup {
            WakeupCondition::Events(n) => (default, u64::from(n)),
            WakeupCondition::Watermark(0) => (default, 0),
            WakeupCondition::Watermark(bytes) => (u64::from(bytes), 0),
        };
        self.protocol.set_wakeup(watermark.min(size / 2).max(1), events);
    }

    /// Sets the event ID that LOST records of this ring contain.
    pub fn set_lost_id(&self, id: u64) {
        self.lost_id.store(id, Relaxed);
    }

    /// Returns the mode of the ring: what happens when the ring is full.
    pub fn mode(&self) -> RingFullPolicy {
        self.mode
    }

    /// Returns the size of the data area, in bytes.
    pub fn data_size(&self) -> usize {
        self.mapping.data_size()
    }

    /// Returns the maximum size of a record in this ring, in bytes.
    pub fn record_max(&self) -> usize {
        self.record_max
    }

    /// Returns the number of pages of the ring, including the control page. The user is charged for
    /// this number of pages.
    pub fn pages(&self) -> usize {
        1 + self.data_size() / PAGE_SIZE
    }

    /// Returns the number of records lost since the last LOST record.
    pub fn pending_lost(&self) -> u64 {
        self.protocol.pending_lost()
    }

    /// Returns a position up to which all records are visible to readers. While several writers
    /// publish records, the result may lag behind.
    pub fn published(&self) -> u64 {
        self.protocol.published()
    }

    /// Keeps `charge` until the ring is dropped in this process. Only the first call has an effect.
    pub(crate) fn attach_charge(&self, charge: Box<dyn Any + Send + Sync>) {
        let _ = self.charge.set(charge);
    }

    /// Returns a handle that detects whether the memory is still in use after the ring is dropped.
    ///
    /// # Errors
    ///
    /// Returns the host's error if the memfd cannot be reopened, because `/proc` is missing or file
    /// descriptors are exhausted.
    pub(crate) fn watch(&self) -> std::io::Result<MemoryWatch> {
        let own = mapping::reopened(self.memfd.as_fd())?;
        Ok(MemoryWatch { own })
    }

    /// Returns the memfd of the ring, for another process to map. Its size is sealed.
    ///
    /// A process with the memfd of a [`RingFullPolicy::Writable`] ring can write to the whole ring.
    /// It cannot harm the writer but can corrupt the ring for other readers, so each client should
    /// have its own ring.
    pub fn memfd(&self) -> BorrowedFd<'_> {
        self.memfd.as_fd()
    }

    /// Returns the eventfd that becomes readable when the reader must be notified. Its count is a
    /// [`PollState`].
    ///
    /// The eventfd must stay nonblocking. The nonblocking flag belongs to the open file, so a
    /// process that receives the eventfd can clear the flag and block the writer. Send the eventfd
    /// only to a client that may delay the VM anyway, and relay notifications to all other clients.
    pub fn wakeup_fd(&self) -> BorrowedFd<'_> {
        self.wake.fd()
    }

    /// Returns and clears the poll state of the ring. Each notification is returned once.
    pub fn take_poll(&self) -> PollState {
        self.wake.take()
    }

    /// Notifies the reader without a record, for an overflow whose sample cannot be written because
    /// the ring has no data pages or no free space.
    pub fn notify(&self) {
        self.wake.notify();
    }

    /// Reports a hang-up to the reader: no more records will follow unless the event is refreshed.
    /// The report persists until it is read.
    pub fn hang_up(&self) {
        self.wake.hang_up();
    }

    /// Returns a writer for the counter fields of the ring's control page.
    pub fn control(&self) -> ControlPageWriter<'_> {
        ControlPageWriter {
            page: self.mapping.control(),
            busy: &self.control_busy,
            sequence: &self.control_sequence,
        }
    }

    #[inline]
    fn end(&self, claim: Claim) {
        if self.protocol.end(&self.shared(), claim) {
            self.wake.notify();
        }
    }

    #[inline]
    fn shared(&self) -> SharedWords<'_, AtomicU64> {
        let page = self.mapping.control();
        SharedWords {
            data_head: &page.data_head,
            data_tail: &page.data_tail,
        }
    }

    /// Pauses or resumes the ring. New records of a paused ring are counted as lost. A reader can
    /// thus read an overwrite ring without being overrun.
    pub fn pause(&self, on: bool) {
        // Relaxed, because a writer that passes the pause check just before this store may still
        // write its record, as if it had written earlier.
        self.paused.store(on, Relaxed);
    }

    /// Reserves space for a record of `size` bytes, including its header. `is_sample` is set for a
    /// sample, which counts for `wakeup_events`.
    ///
    /// The record is published after the returned guard is dropped, together with the records begun
    /// before it. A signal handler may call this method, but must preserve `errno`, because a
    /// wakeup is a system call.
    ///
    /// # Errors
    ///
    /// Returns [`RingError::Full`] if the ring is full or paused. The loss is counted for the next
    /// LOST record. Returns [`RingError::Size`], [`RingError::TooLarge`] or [`RingError::NoData`]
    /// if the record can never be written. These failures are not counted as losses.
    #[inline]
    pub fn begin(&self, size: usize, is_sample: bool) -> Result<RecordReservation<'_>, RingError> {
        self.begin_with(size, is_sample, &LostTrailer::NONE)
    }

    /// Reserves space for a record as [`begin`](Self::begin) does, for a writer whose LOST records
    /// end with `trailer`. The maximum record size is reduced by the size of the trailer.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`begin`](Self::begin).
    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "records have at most 65,535 bytes, which was checked"
    )]
    pub fn begin_with(
        &self,
        size: usize,
        is_sample: bool,
        trailer: &LostTrailer,
    ) -> Result<RecordReservation<'_>, RingError> {
        let limit = self.record_max.saturating_sub(trailer.len);
        if size < 8 || !size.is_multiple_of(8) || size > limit {
            return Err(self.bad_size(size, limit));
        }
        let (claim, at) = self.claim(size, u64::from(is_sample), 1, trailer)?;
        Ok(RecordReservation {
            ring: self,
            claim: Some(claim),
            at,
            remaining: size,
            size: size as u16,
            _not_send: PhantomData,
        })
    }

    /// Reserves `bytes` bytes for several records, of which `samples` are samples.
    ///
    /// The records are reserved and published together, so two threads that write to the same ring
    /// contend only once for all of them. As with [`begin`](Self::begin), reservations must nest,
    /// and later records are not published while the reservation exists.
    ///
    /// # Errors
    ///
    /// Returns [`RingError::Full`] if the records do not fit together. This is *not* counted as a
    /// loss, because some of the records may still fit: the caller retries each record with
    /// `begin`, which counts losses. Returns [`RingError::Size`], [`RingError::TooLarge`] (above
    /// [`batch_max`](Self::batch_max)) and [`RingError::NoData`] as for a single record.
    pub fn begin_batch(&self, bytes: usize, samples: u64) -> Result<BatchReservation<'_>, RingError> {
        self.begin_batch_with(bytes, samples, &LostTrailer::NONE)
    }

    /// Reserves space for several records as [`begin_batch`](Self::begin_batch) does, for a writer
    /// whose LOST records end with `trailer`.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`begin_batch`](Self::begin_batch).
    pub fn begin_batch_with(
        &self,
        bytes: usize,
        samples: u64,
        trailer: &LostTrailer,
    ) -> Result<BatchReservation<'_>, RingError> {
        if bytes < 8 || !bytes.is_multiple_of(8) || bytes > self.batch_max() {
            return Err(self.bad_size(bytes, self.batch_max()));
        }
        let (claim, at) = self.claim(bytes, samples, 0, trailer)?;
        Ok(BatchReservation {
            ring: self,
            claim: Some(claim),
            at,
            remaining: bytes,
            _not_send: PhantomData,
        })
    }

    /// Returns the maximum size of a reservation for several records, in bytes: an eighth of the
    /// data area, so that other writers' records are delayed only briefly, and at most the maximum
    /// record size.
    pub fn batch_max(&self) -> usize {
        (self.data_size() / 8).min(RECORD_SIZE_MAX)
    }

    /// Reserves `size` bytes for `records` records, preceded by a LOST record if losses are
    /// pending, and returns the reserved range. If the reservation fails, counts the `records`
    /// records as lost.
    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "an offset is taken modulo the size of the ring"
    )]
    fn claim(
        &self,
        size: usize,
        samples: u64,
        records: u64,
        trailer: &LostTrailer,
    ) -> Result<(Claim, *mut u8), RingError> {
        if self.paused.load(Relaxed) {
            return Err(self.count_refused(records));
        }
        let lost = self.protocol.take_lost();
        let extra = if lost == 0 { 0 } else { LOST_SIZE + trailer.len };
        let Some(claim) = self
            .protocol
            .reserve(&self.shared(), (extra + size) as u64, samples)
        else {
            return Err(self.count_refused(lost + records));
        };
        if self.mode == RingFullPolicy::Overwrite {
            let size = self.data_size() as u64;
            self.mapping.control().note_record(claim.start, claim.end, size);
        }
        let offset = claim.start as usize & (self.data_size() - 1);
        // SAFETY: `offset` is below the size of the data area, which is mapped twice in a row.
        let mut at = unsafe { self.mapping.data().add(offset) };
        if lost != 0 {
            let mut record = [0; LOST_SIZE + TRAILER_MAX];
            record[..4].copy_from_slice(&LOST_TYPE.to_ne_bytes());
            record[6..8].copy_from_slice(&(extra as u16).to_ne_bytes());
            record[8..16].copy_from_slice(&self.lost_id.load(Relaxed).to_ne_bytes());
            record[16..24].copy_from_slice(&lost.to_ne_bytes());
            record[24..].copy_from_slice(&trailer.bytes);
            // SAFETY: the claim gives this writer the bytes [start, start + extra + size), which
            // are at most the size of the data area and therefore inside the doubled mapping.
            // `extra` is at most the length of `record`, because a trailer has at most
            // `TRAILER_MAX` bytes.
            unsafe {
                std::ptr::copy_nonoverlapping(record.as_ptr(), at, extra);
                at = at.add(extra);
            }
        }
        Ok((claim, at))
    }

    #[cold]
    fn bad_size(&self, size: usize, limit: usize) -> RingError {
        if self.data_size() == 0 {
            RingError::NoData
        } else if size < 8 || !size.is_multiple_of(8) {
            RingError::Size { size }
        } else {
            RingError::TooLarge { size, limit }
        }
    }

    /// Counts `lost` records as lost after a failed reservation. `lost` includes earlier losses
    /// that the rejected LOST record would have reported.
    #[cold]
    fn count_refused(&self, lost: u64) -> RingError {
        if lost != 0 {
            self.protocol.add_lost(lost);
        }
        RingError::Full
    }
}

/// Reserved space for one record, which is filled with [`put`](Self::put) and completed when this
/// guard is dropped.
///
/// Reservations cannot move to another thread and must nest: a signal handler drops the
/// reservations that it begins. While a reservation exists, later records are not published, so the
/// owner must not perform slow work before it drops the reservation. If a reservation is leaked
/// (`std::mem::forget`), no more records are published.
#[must_use = "dropping a reservation ends its record"]
#[derive(Debug)]
pub struct RecordReservation<'a> {
    ring: &'a Ring,
    /// Reserved range that this reservation completes when dropped. `None` for a record of a batch,
    /// because the batch completes one range for all its records.
    claim: Option<Claim>,
    at: *mut u8,
    remaining: usize,
    size: u16,
    _not_send: PhantomData<*mut ()>,
}

impl RecordReservation<'_> {
    /// Appends bytes to the record. Bytes that exceed the reserved size are discarded.
    #[inline]
    pub fn put(&mut self, bytes: &[u8]) {
        debug_assert!(
            bytes.len() <= self.remaining,
            "record larger than its reservation"
        );
        let len = bytes.len().min(self.remaining);
        // SAFETY: [at, at + remaining) is the remainder of this writer's claim, inside the doubled
        // mapping, and `len` does not exceed it. No other writer has these bytes, and readers do
        // not access them before publication.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at, len);
            self.at = self.at.add(len);
        }
        self.remaining -= len;
    }

    /// Appends a `u64` in native byte order to the record.
    #[inline]
    pub fn put_u64(&mut self, value: u64) {
        if self.remaining < 8 {
            return self.put(&value.to_ne_bytes());
        }
        // SAFETY: as in `put`; 8 bytes are left of this writer's claim.
        unsafe {
            self.at.cast::<u64>().write_unaligned(value);
            self.at = self.at.add(8);
        }
        self.remaining -= 8;
    }

    /// Returns the number of reserved bytes that have not been written yet.
    pub fn remaining(&self) -> usize {
        self.remaining
    }
}

impl Drop for RecordReservation<'_> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: as in `put`: the remaining bytes belong to this writer, and so do the two bytes
        // of the size field, 6 bytes after the start of the record, which is `size` bytes before
        // its end.
        unsafe {
            if self.remaining != 0 {
                // Clears the rest, so that no bytes of earlier records remain visible.
                std::ptr::write_bytes(self.at, 0, self.remaining);
            }
            // Readers walk the ring by this field, so it is set regardless of the bytes that the
            // caller wrote.
            let start = self.at.add(self.remaining).sub(usize::from(self.size));
            start.add(6).cast::<u16>().write_unaligned(self.size);
        }
        if let Some(claim) = self.claim.take() {
            self.ring.end(claim);
        }
    }
}

/// Reserved space for several records, which are begun one after the other and published when the
/// batch is dropped.
///
/// Unused space becomes one record of zeros (type 0, which readers skip), so the reserved size
/// should match the total size of the records.
#[must_use = "dropping a run ends it"]
#[derive(Debug)]
pub struct BatchReservation<'a> {
    ring: &'a Ring,
    claim: Option<Claim>,
    at: *mut u8,
    remaining: usize,
    _not_send: PhantomData<*mut ()>,
}

impl BatchReservation<'_> {
    /// Begins the next record, of `size` bytes including its header. The record is published with
    /// the batch.
    ///
    /// # Errors
    ///
    /// Returns [`RingError::Size`] as for a single record, and [`RingError::TooLarge`] if `size`
    /// exceeds the remaining space.
    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "records have at most 65,535 bytes, which was checked"
    )]
    pub fn begin(&mut self, size: usize) -> Result<RecordReservation<'_>, RingError> {
        if size < 8 || !size.is_multiple_of(8) || size > self.remaining {
            return Err(self.ring.bad_size(size, self.remaining));
        }
        let at = self.at;
        // SAFETY: [at, at + remaining) is the remainder of the batch's claim, inside the doubled
        // mapping, and `size` does not exceed it. The header is written immediately, so a leaked
        // reservation leaves a whole record.
        unsafe {
            at.cast::<u64>().write_unaligned((size as u64) << 48);
            self.at = at.add(size);
        }
        self.remaining -= size;
        Ok(RecordReservation {
            ring: self.ring,
            claim: None,
            at,
            remaining: size,
            // At most `batch_max`, which fits a `u16`.
            size: size as u16,
            _not_send: PhantomData,
        })
    }

    /// Returns the number of reserved bytes that no record uses yet.
    pub fn remaining(&self) -> usize {
        self.remaining
    }
}

impl Drop for BatchReservation<'_> {
    #[inline]
    fn drop(&mut self) {
        if let size @ 8.. = self.remaining {
            // Fills the unused space with one empty record.
            if let Ok(rest) = self.begin(size) {
                drop(rest);
            }
        }
        if let Some(claim) = self.claim.take() {
            self.ring.end(claim);
        }
    }
}
