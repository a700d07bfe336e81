//! Rings: the way samples and side-band records leave the core.
//!
//! A [`Ring`] has the layout of the kernel's perf ring: a control page (`struct perf_event_mmap_page`) and
//! 2^n data pages, in a memfd that another process may map and read with any reader of that ABI, ours being
//! [`RingReader`].
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
//! Properties, each with its test:
//!
//! - Writers never wait, not for each other and not for the reader. A writer may be interrupted by a signal
//!   handler that writes to the same ring (an overflow inside an overflow).
//! - A reader never sees a half-written record: the head moves only when everything below it is written (see
//!   `protocol.rs`).
//! - A record that finds no room is counted, and the count precedes the next record that does (LOST).
//! - Nothing on the way allocates. A wakeup costs one system call, a record without one none.
//! - Another process may write anything anywhere into the memfd: the writer still writes inside the ring
//!   only, and our reader reports corruption as an error.
//!
//! Units: sizes are bytes, positions are bytes since the ring was made; they grow for ever and are reduced
//! modulo the size only to address memory.
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

use crate::attr::Wakeup;
use mapping::{Access, Mapping};
use protocol::{Claim, Protocol, Shape, Shared};

pub use mapping::PAGE_SIZE;
pub use page::{Control, ControlBusy, Counter};
pub use reader::{Batch, RawRecord, ReadError, RingReader};
pub use wake::PollState;
pub(crate) use wake::borrowed;

/// Most data pages of a ring: 256 MiB.
pub const DATA_PAGES_MAX: usize = 1 << 16;
/// Most bytes of a record: its size is a `u16` and a multiple of 8.
pub const RECORD_SIZE_MAX: usize = u16::MAX as usize & !7;
/// Bytes of a LOST record without a trailer: header, id, count.
const LOST_SIZE: usize = 24;
/// Most bytes of a LOST record's trailer: six words.
const TRAILER_MAX: usize = 48;
/// `PERF_RECORD_LOST`.
const LOST_TYPE: u32 = 2;

/// What happens when a ring is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RingMode {
    /// The reader maps the control page writable and moves `data_tail`; unread bytes are never overwritten,
    /// records without room are counted and reported by LOST records.
    Writable,
    /// The memfd can be mapped read-only and no other way. The newest records overwrite the oldest. The
    /// reader may trust the last three quarters of the data area.
    Overwrite,
}

/// What a LOST record ends with if the event that finds room again wants all its records to have a trailer
/// (`sample_id_all`). The ring writes LOST records itself, so their writer hands it over with each record.
#[derive(Clone, Copy, Debug)]
pub struct Trailer {
    bytes: [u8; TRAILER_MAX],
    len: usize,
}

impl Trailer {
    /// No trailer.
    pub const NONE: Self = Self {
        bytes: [0; TRAILER_MAX],
        len: 0,
    };

    /// Appends a word. What exceeds six is dropped.
    #[inline]
    pub fn put_u64(&mut self, value: u64) {
        if let Some(room) = self.bytes.get_mut(self.len..self.len + 8) {
            room.copy_from_slice(&value.to_ne_bytes());
            self.len += 8;
        }
    }

    /// The words so far.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// Why there is no ring, or no room in it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RingError {
    /// The number of data pages is not a power of two (or 0), or is above [`DATA_PAGES_MAX`] (`EINVAL`).
    #[error("{pages} data pages: a ring has 0 or a power of two up to {DATA_PAGES_MAX}")]
    Pages {
        /// The number asked for.
        pages: usize,
    },
    /// The ring has a control page only; records cannot be written.
    #[error("the ring has no data pages")]
    NoData,
    /// A record is at least a header (8 bytes) and a multiple of 8 long.
    #[error("record of {size} bytes: must be a multiple of 8 and at least 8")]
    Size {
        /// The size asked for.
        size: usize,
    },
    /// The record could never fit.
    #[error("record of {size} bytes: this ring takes at most {limit}")]
    TooLarge {
        /// The size asked for.
        size: usize,
        /// The most that fits.
        limit: usize,
    },
    /// No room now (`ENOSPC`). The attempt has been counted and will be reported by a LOST record.
    #[error("no room in the ring")]
    Full,
    /// A system call failed.
    #[error("{what} failed")]
    Os {
        /// The call.
        what: &'static str,
        /// Its error.
        #[source]
        source: std::io::Error,
    },
}

/// A ring: the writers' side, to be shared (`Arc`) by every event that writes to it.
pub struct Ring {
    protocol: Protocol<AtomicU64>,
    mapping: Mapping,
    record_max: usize,
    lost_id: AtomicU64,
    paused: AtomicBool,
    control_busy: AtomicBool,
    control_sequence: AtomicU32,
    wake: wake::Wake,
    mode: RingMode,
    memfd: OwnedFd,
    /// The account to which the memory was charged. Declared last, so it is dropped after the memory.
    charge: OnceLock<Box<dyn Any + Send + Sync>>,
}

/// Tells whether the memory of a ring is still in use, by whichever process, after the [`Ring`] itself is
/// gone.
#[derive(Debug)]
pub(crate) struct MemoryWatch {
    own: OwnedFd,
}

impl MemoryWatch {
    /// Whether anybody has the memory open or mapped. Asks the kernel.
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
    /// Makes a ring of one control page and `data_pages` data pages (0 or a power of two).
    ///
    /// # Errors
    ///
    /// [`RingError::Pages`] for a bad number of pages, [`RingError::Os`] if memory or descriptors run out.
    pub fn new(data_pages: usize, mode: RingMode) -> Result<Self, RingError> {
        Self::starting_at(data_pages, mode, 0)
    }

    /// A ring whose first record has position `start`, to test what happens when positions wrap.
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a number of records that fits the ring"
    )]
    fn starting_at(data_pages: usize, mode: RingMode, start: u64) -> Result<Self, RingError> {
        if data_pages > DATA_PAGES_MAX || (data_pages != 0 && !data_pages.is_power_of_two()) {
            return Err(RingError::Pages { pages: data_pages });
        }
        let os = |what| move |source| RingError::Os { what, source };
        let data_size = data_pages * PAGE_SIZE;
        let memfd =
            mapping::sealed_memfd(PAGE_SIZE + data_size).map_err(os("creating a memfd for the ring"))?;
        // Clients get a descriptor that the kernel counts, so that it can be told when the last of them is
        // gone.
        let memfd = match mapping::reopened(memfd.as_fd()) {
            Ok(counted) => counted,
            Err(e) => {
                log::debug!("it cannot be told how long a client keeps this ring: {e}");
                memfd
            }
        };
        let access = Access {
            control_writable: true,
            data_writable: true,
        };
        let mapping = Mapping::memfd(memfd.as_fd(), data_size, access).map_err(os("mapping the ring"))?;
        // Our own mapping stays writable; nobody makes another.
        let read_only = if mode == RingMode::Overwrite {
            libc::F_SEAL_FUTURE_WRITE
        } else {
            0
        };
        mapping::add_seals(&memfd, read_only | libc::F_SEAL_SEAL).map_err(os("sealing the ring"))?;
        mapping.control().init(PAGE_SIZE as u64, data_size as u64, start);

        let shape = Shape {
            size: data_size as u64,
            overwrite: mode == RingMode::Overwrite,
        };
        // In a writable ring at least 8 bytes stay free; see `Protocol::reserve`.
        let room = if shape.overwrite {
            shape.in_flight_max() as usize
        } else {
            data_size.saturating_sub(8)
        };
        let ring = Self {
            protocol: Protocol::new(shape, start),
            mapping,
            // After a loss the next record has a LOST record before it. The largest must fit behind one, or
            // it would not be written any more, even to an empty ring.
            record_max: room.saturating_sub(LOST_SIZE).min(RECORD_SIZE_MAX),
            lost_id: AtomicU64::new(0),
            paused: AtomicBool::new(false),
            control_busy: AtomicBool::new(false),
            control_sequence: AtomicU32::new(0),
            wake: wake::Wake::new().map_err(os("creating an eventfd for the ring"))?,
            mode,
            memfd,
            charge: OnceLock::new(),
        };
        ring.set_wakeup(Wakeup::default());
        Ok(ring)
    }

    /// When the reader is notified.
    ///
    /// A watermark is the number of bytes written since the last time it was reached; it is limited to half
    /// the data area, so that a reader that waits for it is woken before records are lost. 0 is a quarter of
    /// the area, at least a page (but no more than half). The default watermark stays in force beside a
    /// number of samples.
    pub fn set_wakeup(&self, wakeup: Wakeup) {
        let size = self.data_size() as u64;
        let default = (size / 4).max(PAGE_SIZE as u64);
        let (watermark, events) = match wakeup {
            Wakeup::Events(n) => (default, u64::from(n)),
            Wakeup::Watermark(0) => (default, 0),
            Wakeup::Watermark(bytes) => (u64::from(bytes), 0),
        };
        self.protocol.set_wakeup(watermark.min(size / 2).max(1), events);
    }

    /// The event id that LOST records carry.
    pub fn set_lost_id(&self, id: u64) {
        self.lost_id.store(id, Relaxed);
    }

    /// What happens when the ring is full.
    pub fn mode(&self) -> RingMode {
        self.mode
    }

    /// Bytes of the data area.
    pub fn data_size(&self) -> usize {
        self.mapping.data_size()
    }

    /// Most bytes of a record that this ring takes.
    pub fn record_max(&self) -> usize {
        self.record_max
    }

    /// Pages of memory the ring holds, the control page included: what a memory budget is charged with.
    pub fn pages(&self) -> usize {
        1 + self.data_size() / PAGE_SIZE
    }

    /// Attempts that found no room since the last LOST record.
    pub fn pending_lost(&self) -> u64 {
        self.protocol.pending_lost()
    }

    /// A position up to which records have been published. May lag behind while several writers publish.
    pub fn published(&self) -> u64 {
        self.protocol.published()
    }

    /// Keeps `charge` for as long as this process has the ring. The first one stays.
    pub(crate) fn keep(&self, charge: Box<dyn Any + Send + Sync>) {
        let _ = self.charge.set(charge);
    }

    /// Tells whether somebody has the memory when the ring itself is gone.
    ///
    /// # Errors
    ///
    /// The host's, where the memfd cannot be opened again: without `/proc`, or without descriptors.
    pub(crate) fn watch(&self) -> std::io::Result<MemoryWatch> {
        let own = mapping::reopened(self.memfd.as_fd())?;
        Ok(MemoryWatch { own })
    }

    /// The memory of the ring, for another process to map. Its size is sealed.
    ///
    /// Whoever gets the memfd of a [`RingMode::Writable`] ring can write to all of it. That cannot harm the
    /// writer, but it can spoil the ring for other readers: give each client a ring of its own.
    pub fn memfd(&self) -> BorrowedFd<'_> {
        self.memfd.as_fd()
    }

    /// The eventfd that becomes readable when the reader is to look. Its count is a [`PollState`].
    ///
    /// It must stay nonblocking. The flag belongs to the open file, so a process it is sent to could clear
    /// it; send it only to a client that may hold up the VM anyway, and relay notifications to others.
    pub fn wakeup_fd(&self) -> BorrowedFd<'_> {
        self.wake.fd()
    }

    /// Takes the poll state: each notification is seen once, and one that comes after is not lost.
    pub fn take_poll(&self) -> PollState {
        self.wake.take()
    }

    /// Notifies the reader without a record, for an overflow whose event has no room or no data pages.
    pub fn notify(&self) {
        self.wake.notify();
    }

    /// Tells the reader that nothing more will come. Kept until it is read.
    pub fn hang_up(&self) {
        self.wake.hang_up();
    }

    /// The owner's side of the control page.
    pub fn control(&self) -> Control<'_> {
        Control {
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
    fn shared(&self) -> Shared<'_, AtomicU64> {
        let page = self.mapping.control();
        Shared {
            data_head: &page.data_head,
            data_tail: &page.data_tail,
        }
    }

    /// Takes no more records, or takes them again. What comes meanwhile is counted as lost. So a reader can
    /// go through a ring that is overwritten without being overtaken.
    pub fn pause(&self, on: bool) {
        // Relaxed: a writer that is between its look and its reservation is as one that came before.
        self.paused.store(on, Relaxed);
    }

    /// Reserves a record of `size` bytes, header included. Samples count for `wakeup_events`.
    ///
    /// The record is published after the returned guard is dropped, together with those that were begun
    /// before. Safe to call in a signal handler (which must preserve `errno`, because a wakeup is a system
    /// call).
    ///
    /// # Errors
    ///
    /// [`RingError::Full`] if there is no room now or the ring is paused, which is counted for the next LOST
    /// record.
    /// [`RingError::Size`], [`RingError::TooLarge`] and [`RingError::NoData`] if the record could never be
    /// written; these are not counted.
    #[inline]
    pub fn begin(&self, size: usize, is_sample: bool) -> Result<Reservation<'_>, RingError> {
        self.begin_with(size, is_sample, &Trailer::NONE)
    }

    /// [`begin`](Self::begin) for a writer whose LOST records end with `trailer`. It takes that much less of
    /// a record.
    ///
    /// # Errors
    ///
    /// As [`begin`](Self::begin).
    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "records have at most 65,535 bytes, which was checked"
    )]
    pub fn begin_with(
        &self,
        size: usize,
        is_sample: bool,
        trailer: &Trailer,
    ) -> Result<Reservation<'_>, RingError> {
        let limit = self.record_max.saturating_sub(trailer.len);
        if size < 8 || !size.is_multiple_of(8) || size > limit {
            return Err(self.bad_size(size, limit));
        }
        let (claim, at) = self.claim(size, u64::from(is_sample), 1, trailer)?;
        Ok(Reservation {
            ring: self,
            claim: Some(claim),
            at,
            left: size,
            size: size as u16,
            _not_send: PhantomData,
        })
    }

    /// Reserves `bytes` for several records that are at hand, `samples` of them samples. They are reserved
    /// and published together, so two threads that write to one ring get in each other's way once for all of
    /// them.
    ///
    /// What is said of [`begin`](Self::begin) holds for the run as a whole: it nests, and holds back what is
    /// begun later.
    ///
    /// # Errors
    ///
    /// [`RingError::Full`] if there is no room for all of them now. This is *not* counted as a loss, because
    /// some may fit by themselves: try each with `begin`, which counts. [`RingError::Size`],
    /// [`RingError::TooLarge`] (above [`run_max`](Self::run_max)) and [`RingError::NoData`] as for a record.
    pub fn begin_run(&self, bytes: usize, samples: u64) -> Result<Run<'_>, RingError> {
        self.begin_run_with(bytes, samples, &Trailer::NONE)
    }

    /// [`begin_run`](Self::begin_run) for a writer whose LOST records end with `trailer`.
    ///
    /// # Errors
    ///
    /// As [`begin_run`](Self::begin_run).
    pub fn begin_run_with(
        &self,
        bytes: usize,
        samples: u64,
        trailer: &Trailer,
    ) -> Result<Run<'_>, RingError> {
        if bytes < 8 || !bytes.is_multiple_of(8) || bytes > self.run_max() {
            return Err(self.bad_size(bytes, self.run_max()));
        }
        let (claim, at) = self.claim(bytes, samples, 0, trailer)?;
        Ok(Run {
            ring: self,
            claim: Some(claim),
            at,
            left: bytes,
            _not_send: PhantomData,
        })
    }

    /// Most bytes of a run: an eighth of the data area, so that it holds back the records of others for a
    /// short while only; no more than a record may have.
    pub fn run_max(&self) -> usize {
        (self.data_size() / 8).min(RECORD_SIZE_MAX)
    }

    /// Reserves `size` bytes and puts a LOST record before them if losses are pending. Returns where they
    /// are. A refusal counts `records` losses.
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
        trailer: &Trailer,
    ) -> Result<(Claim, *mut u8), RingError> {
        if self.paused.load(Relaxed) {
            return Err(self.refused(records));
        }
        let lost = self.protocol.take_lost();
        let extra = if lost == 0 { 0 } else { LOST_SIZE + trailer.len };
        let Some(claim) = self
            .protocol
            .reserve(&self.shared(), (extra + size) as u64, samples)
        else {
            return Err(self.refused(lost + records));
        };
        let offset = claim.start as usize & (self.data_size() - 1);
        // SAFETY: offset is below the size of the data area, which is mapped twice in a row.
        let mut at = unsafe { self.mapping.data().add(offset) };
        if lost != 0 {
            let mut record = [0; LOST_SIZE + TRAILER_MAX];
            record[..4].copy_from_slice(&LOST_TYPE.to_ne_bytes());
            record[6..8].copy_from_slice(&(extra as u16).to_ne_bytes());
            record[8..16].copy_from_slice(&self.lost_id.load(Relaxed).to_ne_bytes());
            record[16..24].copy_from_slice(&lost.to_ne_bytes());
            record[24..].copy_from_slice(&trailer.bytes);
            // SAFETY: the claim gives this writer the bytes [start, start + extra + size), which are at most
            // the size of the data area and therefore inside the doubled mapping. `extra` is at most
            // `record`'s length, because a trailer has no more than `TRAILER_MAX` bytes.
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

    /// Counts what is lost: what was taken for a LOST record that is not written now, and what is refused.
    #[cold]
    fn refused(&self, lost: u64) -> RingError {
        if lost != 0 {
            self.protocol.add_lost(lost);
        }
        RingError::Full
    }
}

/// A reserved record. Fill it with [`put`](Self::put); dropping it ends the record.
///
/// It stays on the thread that began it. Begin and drop must nest: a signal handler drops what it begins.
/// While one is alive, records begun later are not published, so do nothing slow in between. Leaking one
/// (`std::mem::forget`) stops publication for ever, without further harm.
#[must_use = "dropping a reservation ends its record"]
pub struct Reservation<'a> {
    ring: &'a Ring,
    /// What its end ends; `None` inside a run, which does it for all.
    claim: Option<Claim>,
    at: *mut u8,
    left: usize,
    size: u16,
    _not_send: PhantomData<*mut ()>,
}

impl fmt::Debug for Reservation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reservation")
            .field("size", &self.size)
            .field("left", &self.left)
            .finish_non_exhaustive()
    }
}

impl Reservation<'_> {
    /// Appends bytes to the record. What exceeds the reserved size is dropped.
    #[inline]
    pub fn put(&mut self, bytes: &[u8]) {
        debug_assert!(bytes.len() <= self.left, "record larger than its reservation");
        let len = bytes.len().min(self.left);
        // SAFETY: [at, at + left) is what remains of this writer's claim, inside the doubled mapping, and
        // `len` is no more. No other writer has these bytes, and a reader does not look at them before they
        // are published.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at, len);
            self.at = self.at.add(len);
        }
        self.left -= len;
    }

    /// Appends a `u64` in native byte order.
    #[inline]
    pub fn put_u64(&mut self, value: u64) {
        if self.left < 8 {
            return self.put(&value.to_ne_bytes());
        }
        // SAFETY: as in `put`: 8 bytes are left of this writer's claim.
        unsafe {
            self.at.cast::<u64>().write_unaligned(value);
            self.at = self.at.add(8);
        }
        self.left -= 8;
    }

    /// Bytes still to be put.
    pub fn left(&self) -> usize {
        self.left
    }
}

impl Drop for Reservation<'_> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: as in `put`: the remaining bytes are this writer's, and so are the two bytes of the size
        // field 6 bytes after the record's beginning, which is `size` bytes before its end.
        unsafe {
            if self.left != 0 {
                // Nothing of earlier records may show through.
                std::ptr::write_bytes(self.at, 0, self.left);
            }
            // Whatever the caller put there: readers walk the ring by this field.
            let start = self.at.add(self.left).sub(usize::from(self.size));
            start.add(6).cast::<u16>().write_unaligned(self.size);
        }
        if let Some(claim) = self.claim.take() {
            self.ring.end(claim);
        }
    }
}

/// Reserved room for several records. Begin them one after the other; dropping the run ends it.
///
/// What is not used of it becomes one record of zeros (type 0, which no reader knows and all pass over), so
/// reserve what the records have.
#[must_use = "dropping a run ends it"]
pub struct Run<'a> {
    ring: &'a Ring,
    claim: Option<Claim>,
    at: *mut u8,
    left: usize,
    _not_send: PhantomData<*mut ()>,
}

impl fmt::Debug for Run<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Run")
            .field("left", &self.left)
            .finish_non_exhaustive()
    }
}

impl Run<'_> {
    /// The next record, of `size` bytes with its header. Fill it and drop it; it is published with the run.
    ///
    /// # Errors
    ///
    /// [`RingError::Size`] as for a record by itself, [`RingError::TooLarge`] if it is more than what is
    /// left.
    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "records have at most 65,535 bytes, which was checked"
    )]
    pub fn begin(&mut self, size: usize) -> Result<Reservation<'_>, RingError> {
        if size < 8 || !size.is_multiple_of(8) || size > self.left {
            return Err(self.ring.bad_size(size, self.left));
        }
        let at = self.at;
        // SAFETY: [at, at + left) is what remains of the run's claim, inside the doubled mapping, and `size`
        // is no more. The header is written at once, so that a reservation that is leaked leaves a whole
        // record.
        unsafe {
            at.cast::<u64>().write_unaligned((size as u64) << 48);
            self.at = at.add(size);
        }
        self.left -= size;
        Ok(Reservation {
            ring: self.ring,
            claim: None,
            at,
            left: size,
            // No more than `run_max`, which a `u16` holds.
            size: size as u16,
            _not_send: PhantomData,
        })
    }

    /// Bytes still to be used.
    pub fn left(&self) -> usize {
        self.left
    }
}

impl Drop for Run<'_> {
    #[inline]
    fn drop(&mut self) {
        if let size @ 8.. = self.left {
            // One record of nothing.
            if let Ok(rest) = self.begin(size) {
                drop(rest);
            }
        }
        if let Some(claim) = self.claim.take() {
            self.ring.end(claim);
        }
    }
}
