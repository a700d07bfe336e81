//! The control page of a ring (`struct perf_event_mmap_page` of `linux/perf_event.h`).
//!
//! Every field is an atomic, because the page is shared with other processes. Values written by
//! these processes are never trusted (see the module documentation of [`super`]).

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU16, AtomicU32, AtomicU64, fence};

/// Bit `cap_bit0_is_deprecated` of the control page's `capabilities`, which tells readers that bit
/// 0 has no meaning.
const CAP_BIT0_IS_DEPRECATED: u64 = 1 << 1;
/// Value of the control page's `size` field: number of bytes before the reserved words.
const DEFINED_BYTES: u32 = 96;

/// Number of equal sections of an overwrite ring. The control page contains the position of a
/// record in each section.
pub(super) const PARTS: usize = 16;

/// The first page of a ring, which readers and writers share.
#[repr(C)]
pub(super) struct ControlPage {
    version: AtomicU32,
    compat_version: AtomicU32,
    lock: AtomicU32,
    index: AtomicU32,
    offset: AtomicI64,
    time_enabled: AtomicU64,
    time_running: AtomicU64,
    capabilities: AtomicU64,
    pmc_width: AtomicU16,
    time_shift: AtomicU16,
    time_mult: AtomicU32,
    time_offset: AtomicU64,
    time_zero: AtomicU64,
    size: AtomicU32,
    reserved_1: AtomicU32,
    time_cycles: AtomicU64,
    time_mask: AtomicU64,
    reserved: [AtomicU64; 116 - PARTS],
    /// For each of the [`PARTS`] sections of an overwrite ring, the first position in the section
    /// at which a record begins. Extends the kernel's layout in its reserved words. An entry is
    /// outdated if no record began in its section during the writers' last pass through the ring.
    record_starts: [AtomicU64; PARTS],
    pub(super) data_head: AtomicU64,
    pub(super) data_tail: AtomicU64,
    pub(super) data_offset: AtomicU64,
    pub(super) data_size: AtomicU64,
}

/// The counter fields of the control page: index, offset and times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ControlPageCounter {
    /// Index of the hardware counter for `rdpmc` plus one. 0 means that the counter cannot be read,
    /// and `offset` is the whole count.
    pub index: u32,
    /// Value to add to the hardware counter to obtain the count, or the whole count if `index` is
    /// 0.
    pub offset: i64,
    /// Time enabled of the event in nanoseconds, including exited and live children.
    pub time_enabled_ns: u64,
    /// Time running of the event in nanoseconds, including exited and live children.
    pub time_running_ns: u64,
}

/// Error of [`ControlPageWriter::update`] while another update is in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("another thread, or the code that this thread interrupted, is updating the control page")]
pub struct ControlPageBusy;

/// A writer for the counter fields of the control page, which are protected by the sequence lock of
/// the page.
pub struct ControlPageWriter<'a> {
    pub(super) page: &'a ControlPage,
    pub(super) busy: &'a AtomicBool,
    pub(super) sequence: &'a AtomicU32,
}

impl ControlPage {
    pub(super) fn init(&self, data_offset: u64, data_size: u64, start: u64) {
        // Linux still writes 0 to compat_version and version.
        self.version.store(0, Relaxed);
        self.compat_version.store(0, Relaxed);
        self.capabilities.store(CAP_BIT0_IS_DEPRECATED, Relaxed);
        self.size.store(DEFINED_BYTES, Relaxed);
        self.data_offset.store(data_offset, Relaxed);
        self.data_size.store(data_size, Relaxed);
        self.data_tail.store(start, Relaxed);
        for record in &self.record_starts {
            record.store(start, Relaxed);
        }
        self.data_head.store(start, Release);
    }

    /// Records in the control page that a record occupies the positions `start` to `end` of a ring
    /// of `size` bytes. The next record begins at `end`.
    #[inline(never)]
    pub(super) fn note_record(&self, start: u64, end: u64, size: u64) {
        let part = |position: u64| position / (size / PARTS as u64);
        if part(start) != part(end) {
            // Relaxed: the head that makes the position valid is published later, with Release.
            let at = usize::try_from(part(end) % PARTS as u64).unwrap_or(0);
            self.record_starts[at].store(end, Relaxed);
        }
    }

    /// Returns the position of the oldest known record that begins at most `distance` bytes below
    /// `head`, or `head` if there is no such record.
    pub(super) fn oldest_record(&self, head: u64, distance: u64) -> u64 {
        let starts = self.record_starts.iter().map(|start| start.load(Relaxed));
        starts
            .filter(|start| start & 7 == 0 && head.wrapping_sub(*start) <= distance)
            .max_by_key(|start| head.wrapping_sub(*start))
            .unwrap_or(head)
    }

    /// Reads the counter fields consistently. Returns `None` if an update was in progress in all
    /// `tries` attempts, for example because a process died during the update.
    pub(super) fn counter(&self, tries: usize) -> Option<ControlPageCounter> {
        for _ in 0..tries {
            // Acquire: pairs with the Release store that ends an update, so the fields are read
            // after it.
            let before = self.lock.load(Acquire);
            if before & 1 != 0 {
                std::hint::spin_loop();
                continue;
            }
            let counter = ControlPageCounter {
                index: self.index.load(Relaxed),
                offset: self.offset.load(Relaxed),
                time_enabled_ns: self.time_enabled.load(Relaxed),
                time_running_ns: self.time_running.load(Relaxed),
            };
            // Acquire: pairs with the Release fence that begins an update. If one of the fields
            // above was written by that update, the second load of the lock differs from the first.
            fence(Acquire);
            if self.lock.load(Relaxed) == before {
                return Some(counter);
            }
        }
        None
    }
}

impl ControlPageWriter<'_> {
    /// Writes `counter` to the page. Readers see either the whole update or none of it.
    ///
    /// # Errors
    ///
    /// Returns [`ControlPageBusy`] if an update is in progress. All updates for an event are made
    /// under the lock of its context, so this error only occurs in a signal handler that
    /// interrupted an update. The interrupted update then writes older values, so the handler must
    /// request another update.
    pub fn update(&self, counter: ControlPageCounter) -> Result<(), ControlPageBusy> {
        // Acquire: pairs with the Release store below, so updates are sequential.
        if self.busy.swap(true, Acquire) {
            return Err(ControlPageBusy);
        }
        // The sequence number is kept outside the page, because another process may have written
        // any value to the page.
        let sequence = self.sequence.load(Relaxed);
        self.page.lock.store(sequence.wrapping_add(1), Relaxed);
        // Release: pairs with the reader's Acquire fence, so the odd lock is visible before any
        // field.
        fence(Release);
        self.page.index.store(counter.index, Relaxed);
        self.page.offset.store(counter.offset, Relaxed);
        self.page.time_enabled.store(counter.time_enabled_ns, Relaxed);
        self.page.time_running.store(counter.time_running_ns, Relaxed);
        // Release: pairs with the reader's first Acquire load, so the fields are visible before the
        // even lock.
        self.page.lock.store(sequence.wrapping_add(2), Release);
        self.sequence.store(sequence.wrapping_add(2), Relaxed);
        self.busy.store(false, Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use perf_event_open_sys::bindings::perf_event_mmap_page as kernel;
    use std::mem::offset_of;

    #[test]
    fn layout_is_the_kernels() {
        macro_rules! same_offsets {
            ($($field:ident)*) => {
                $(assert_eq!(offset_of!(ControlPage, $field), offset_of!(kernel, $field));)*
            };
        }
        same_offsets!(version compat_version lock index offset time_enabled time_running pmc_width);
        same_offsets!(time_mult time_zero size time_mask data_head data_tail data_offset data_size);
        assert_eq!(offset_of!(ControlPage, reserved), DEFINED_BYTES as usize);
        assert_eq!(offset_of!(ControlPage, data_head), 1024);
    }
}
