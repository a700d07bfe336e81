//! The lock-free protocol by which writers share a ring: reservation, publication, losses and
//! wakeups. This module uses only atomics and no memory mapping, so the model checker runs the same
//! code (`cfg(loom)`).
//!
//! # The protocol
//!
//! One private word, the *state*, holds the position of the next record and the number of records
//! being written:
//!
//! ```text
//!  63      56 55      48 47   46                                    0
//! ┌──────────┬──────────┬────┬───────────────────────────────────────┐
//! │ old      │ current  │ par│ head, in units of 8 bytes             │
//! └──────────┴──────────┴────┴───────────────────────────────────────┘
//! ```
//!
//! *Begin* advances the head and increments the writer count in one compare-and-swap. *End*
//! decrements the count in another. If an ending writer is the only one, everything below the head
//! is written. The writer then publishes the head and decrements the count. The decrement fails if
//! another writer began meanwhile, and the check is repeated. A reader therefore never sees a
//! partially written record, regardless of whether the writers are threads or nested signal
//! handlers, because the outermost writer publishes for all of them. No writer ever waits for
//! another.
//!
//! A writer that finds itself the only one remains counted until it has published, so there is
//! never more than one publisher. Each publisher sees the stores of its predecessor, and
//! `data_head` is written by a plain store that never moves backwards.
//!
//! If writers overlapped without a gap, the count would never reach zero and the reader would
//! starve. Therefore writers belong to a *generation* (the parity bit). When too many bytes are
//! unpublished, an ending writer closes the current generation: its count becomes `old`, no further
//! writer joins it, and the head position at that moment is its *boundary*. The last writer of the
//! old generation publishes the boundary before it decrements the count. At most two generations
//! exist, and while there are two, only a member of the old one publishes.
//!
//! # Cache line transfers
//!
//! The following cache lines move between processors: the line of the state at each access to it,
//! the line of `data_head` at each publication, and data lines shared by adjacent records. Begin
//! and end touch no other line that is written for every record, and several records can share one
//! begin and end.
//!
//! # Trust
//!
//! The control page is shared with other processes and may contain anything. The writer reads only
//! `data_tail` from it, which decides *whether* to write. The position of a write is derived from
//! the state word.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::word::AtomicWord;

/// Width of the head position in the state word, in bits (2^47 units of 8 bytes, or 1 PiB). Callers
/// see positions that are extended to 64 bits.
const HEAD_BITS: u32 = 47;
const HEAD_MASK: u64 = (1 << HEAD_BITS) - 1;
const PARITY: u64 = 1 << HEAD_BITS;
const CURRENT_SHIFT: u32 = 48;
const CURRENT_ONE: u64 = 1 << CURRENT_SHIFT;
const OLD_SHIFT: u32 = 56;
const OLD_ONE: u64 = 1 << OLD_SHIFT;
/// Maximum number of writers in one generation, that is, of records being written.
const WRITERS_MAX: u64 = 0xff;

#[derive(Clone, Copy)]
struct ProtocolState(u64);

impl ProtocolState {
    fn head(self) -> u64 {
        self.0 & HEAD_MASK
    }
    fn parity(self) -> u64 {
        self.0 & PARITY
    }
    fn current(self) -> u64 {
        (self.0 >> CURRENT_SHIFT) & WRITERS_MAX
    }
    fn old(self) -> u64 {
        self.0 >> OLD_SHIFT
    }
    /// Returns this state with one more writer, and with the head advanced by `units` units of 8
    /// bytes.
    fn with_writer(self, units: u64) -> u64 {
        ((self.0 & !HEAD_MASK) | ((self.head() + units) & HEAD_MASK)) + CURRENT_ONE
    }
    /// Returns this state after the current generation is closed: its writers become the old
    /// generation, and the new current generation has no writers.
    fn closed(self) -> u64 {
        (self.current() << OLD_SHIFT) | (self.parity() ^ PARITY) | self.head()
    }
}

/// A value aligned to two cache lines, because processors prefetch adjacent lines in pairs.
#[repr(align(128))]
pub(super) struct CacheAligned<T>(pub(super) T);

/// Words of the protocol that change twice per record: when it begins and when it ends.
struct HotWords<W> {
    state: W,
    /// Boundary of the old generation: the head position when the generation was closed. The writer
    /// that closes the generation sets this word before it leaves the generation.
    boundary: W,
    /// Value of `data_head` that was last published. Equals the head while no record is being
    /// written.
    published: W,
    /// Value of `data_tail` that was last read from the control page. Updated only when the free
    /// space computed from this value is exhausted, because each publication moves the cache line
    /// of `data_head` and `data_tail` between processors.
    tail: W,
}

/// Words of the protocol that rarely change.
struct ColdWords<W> {
    /// Number of failed reservations since the last LOST record.
    lost: W,
    /// Number of bytes between wakeups of the reader.
    watermark: W,
    /// Number of samples between wakeups of the reader. 0 disables wakeups by samples.
    wakeup_events: W,
    /// Position in the ring at which the watermark was last reached.
    last_crossing: W,
}

/// Words of the protocol that change only for samples, if wakeups are counted in samples, and for
/// records that wake the reader.
struct WakeWords<W> {
    samples: W,
    /// Highest end position of an unpublished record that must wake the reader, or 0 if there is
    /// none.
    due: W,
}

/// Size and mode of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RingGeometry {
    /// Size of the data area in bytes, a power of two.
    pub(super) size: u64,
    /// `true` for an overwrite ring, in which writers ignore `data_tail`.
    pub(super) overwrite: bool,
}

impl RingGeometry {
    /// Returns the maximum number of reserved but unpublished bytes.
    ///
    /// Writers are never ahead of the published head by more than this number of bytes. In
    /// overwrite mode, a reader may therefore trust the rest of the data area.
    pub(super) fn in_flight_max(self) -> u64 {
        if self.overwrite { self.size / 4 } else { self.size }
    }

    /// Returns the number of unpublished bytes from which on an ending writer closes its
    /// generation.
    fn close_at(self) -> u64 {
        self.size / 8
    }
}

/// A range of the ring that a writer has reserved.
#[derive(Debug)]
pub(super) struct Claim {
    /// Position of the first reserved byte.
    pub(super) start: u64,
    /// Position after the last reserved byte.
    pub(super) end: u64,
    parity: u64,
    /// Set if the reader must be woken when the range is published.
    wake: bool,
}

/// The two words of the control page that the protocol uses: `data_head` and `data_tail`.
pub(super) struct SharedWords<'a, W> {
    pub(super) data_head: &'a W,
    pub(super) data_tail: &'a W,
}

pub(super) struct Protocol<W> {
    shape: RingGeometry,
    hot: CacheAligned<HotWords<W>>,
    cold: CacheAligned<ColdWords<W>>,
    wake: CacheAligned<WakeWords<W>>,
}

impl<W: AtomicWord> Protocol<W> {
    /// Creates the protocol state of a ring with its first record at `start` (a multiple of 8;
    /// nonzero only in tests of wraparound).
    pub(super) fn new(shape: RingGeometry, start: u64) -> Self {
        Self {
            shape,
            hot: CacheAligned(HotWords {
                state: W::new((start >> 3) & HEAD_MASK),
                boundary: W::new(0),
                published: W::new(start),
                tail: W::new(start),
            }),
            cold: CacheAligned(ColdWords {
                lost: W::new(0),
                watermark: W::new(shape.size),
                wakeup_events: W::new(0),
                last_crossing: W::new(start),
            }),
            wake: CacheAligned(WakeWords {
                samples: W::new(0),
                due: W::new(0),
            }),
        }
    }

    /// Sets the number of bytes and the number of samples between wakeups of the reader. 0 samples
    /// disable wakeups by samples.
    pub(super) fn set_wakeup(&self, watermark: u64, events: u64) {
        self.cold.0.watermark.store(watermark, Relaxed);
        self.cold.0.wakeup_events.store(events, Relaxed);
    }

    /// Returns the number of failed reservations since the last LOST record.
    pub(super) fn pending_lost(&self) -> u64 {
        self.cold.0.lost.load(Relaxed)
    }

    /// Returns the number of losses that the next record must report, and resets it to 0.
    #[inline]
    pub(super) fn take_lost(&self) -> u64 {
        // A plain load first, so that writers can share the cache line as long as no record is
        // lost.
        if self.cold.0.lost.load(Relaxed) == 0 {
            0
        } else {
            self.cold.0.lost.swap(0, Relaxed)
        }
    }

    /// Adds `n` to the number of losses that the next record must report.
    pub(super) fn add_lost(&self, n: u64) {
        self.cold.0.lost.fetch_add(n, Relaxed);
    }

    /// Returns a position below which all records are visible to readers.
    pub(super) fn published(&self) -> u64 {
        self.hot.0.published.load(Acquire)
    }

    /// Reserves `len` bytes (a multiple of 8) for records that include `samples` samples. Returns
    /// `None` if the ring is full.
    #[inline]
    pub(super) fn reserve(&self, shared: &SharedWords<'_, W>, len: u64, samples: u64) -> Option<Claim> {
        let hot = &self.hot.0;
        let size = self.shape.size >> 3;
        let units = len >> 3;
        // Set once the tail is read from the control page instead of the cached value.
        let mut fresh = false;
        loop {
            // The order of these three loads matters. The tail and the published position only grow
            // and never pass the head. Values older than the state are therefore lower than its
            // head, which is conservative.
            //
            // Acquire: pairs with the reader's Release store of data_tail, or with the Release
            // store below by a writer that saw it. Bytes that the reader read before its store are
            // read before this writer overwrites them.
            let tail = if fresh { shared.data_tail } else { &hot.tail }.load(Acquire);
            // Acquire: pairs with the Release in `publish`.
            let published = hot.published.load(Acquire);
            // Acquire: pairs with the AcqRel of the writer that decremented the count; its bytes
            // are written before those of this writer.
            let seen = hot.state.load(Acquire);
            let state = ProtocolState(seen);
            let head = state.head();
            let ahead = (head.wrapping_sub(published >> 3)) & HEAD_MASK;

            let room = if self.shape.overwrite {
                ahead + units <= self.shape.in_flight_max() >> 3
            } else {
                // Without a writer, all bytes below the head are published, and the published
                // position that was loaded above is outdated.
                let in_flight = if state.current() == 0 && state.old() == 0 {
                    0
                } else {
                    ahead
                };
                let unread = (head.wrapping_sub(tail >> 3)) & HEAD_MASK;
                // A tail ahead of the head or a lap behind it does not come from a working reader
                // (`unread` then exceeds the ring), so the ring counts as full. A tail inside the
                // bytes in flight frees only published bytes. At least 8 bytes stay free, so that
                // full and empty differ modulo the size.
                tail & 7 == 0 && unread.max(in_flight) + units < size
            };
            if !room || state.current() == WRITERS_MAX {
                if !fresh && !self.shape.overwrite {
                    fresh = true;
                    continue;
                }
                // The three loads may belong to different states. Fails only if the state and the
                // published position have not changed since.
                if hot.state.load(Relaxed) == seen && hot.published.load(Relaxed) == published {
                    return None;
                }
                continue;
            }
            if hot.state.swap_if(seen, state.with_writer(units)).is_ok() {
                if fresh {
                    // Release: pairs with the Acquire load above. Another writer may store an older
                    // tail afterwards, which only makes the next read of the control page occur
                    // earlier.
                    hot.tail.store(tail, Release);
                }
                let start = published.wrapping_add(ahead << 3);
                let end = start.wrapping_add(len);
                return Some(Claim {
                    start,
                    end,
                    parity: state.parity(),
                    wake: self.wake_due(end, samples),
                });
            }
        }
    }

    /// Returns `true` if a reservation that ends at `end` and contains `samples` samples must wake
    /// the reader.
    #[inline]
    fn wake_due(&self, end: u64, samples: u64) -> bool {
        let cold = &self.cold.0;
        let mut due = false;
        let events = cold.wakeup_events.load(Relaxed);
        if events != 0 && samples != 0 {
            // Continuous count of all samples, so that every n samples cause exactly one wakeup,
            // regardless of the order of writers.
            let before = self.wake.0.samples.fetch_add(samples, Relaxed);
            due = events == 1 || before % events + samples >= events;
        }
        let last = cold.last_crossing.load(Relaxed);
        if end.wrapping_sub(last).cast_signed() >= cold.watermark.load(Relaxed).cast_signed() {
            // If several writers cross the watermark concurrently, only one of them wakes the
            // reader.
            due |= cold.last_crossing.swap_if(last, end).is_ok();
        }
        due
    }

    /// Ends the claim `claim`, after all its bytes are written. Returns `true` if the reader must
    /// be notified.
    #[inline]
    pub(super) fn end(&self, shared: &SharedWords<'_, W>, claim: Claim) -> bool {
        let hot = &self.hot.0;
        if claim.wake {
            // Stored before the decrement, so the writer that publishes this record sees the
            // decrement and thus this store.
            self.wake.0.due.fetch_max(claim.end, Relaxed);
        }
        // Widens a position of the state word to 64 bits. The position is close to `claim.start`,
        // because this record is not published yet.
        let widen = |units: u64| {
            claim
                .start
                .wrapping_add((units.wrapping_sub(claim.start >> 3) & HEAD_MASK) << 3)
        };
        let mut done = None;
        // Acquire, as for every load of the state here: the bytes of all writers that decremented
        // the count are written, and the publication covers them. This writer is counted in every
        // state seen here.
        let mut seen = hot.state.load(Acquire);
        loop {
            let state = ProtocolState(seen);
            // At most one old generation exists, because a generation must be drained before the
            // next is closed. If this writer is not in the current generation, it is therefore in
            // the old one.
            let closed = state.parity() != claim.parity;
            let publish_to = match (closed, state.old(), state.current()) {
                // This is the only writer, or the last of the old generation while the current one
                // is empty.
                (false, 0, 1) | (true, 1, 0) => Some(widen(state.head())),
                // The boundary has been written, because the closing writer has decremented the
                // count or is this writer. No generation is closed again before this writer
                // decrements the count.
                (true, 1, _) => Some(hot.boundary.load(Acquire)),
                _ => None,
            };
            let without_us = if closed {
                seen - OLD_ONE
            } else {
                seen - CURRENT_ONE
            };
            match publish_to {
                // While this writer is counted, no other writer reaches this point, so publications
                // are sequential. This writer may already have published beyond the boundary, if it
                // was the only one and another then joined.
                Some(to) if done.is_none_or(|done| is_ahead(to, done)) => {
                    self.publish(shared, to);
                    done = Some(to);
                }
                None if !closed && state.old() == 0 && self.must_close_generation(state) => {
                    match hot.state.swap_if(seen, state.closed()) {
                        Ok(_) => {
                            // This writer is still counted, so the boundary is not read before this
                            // store.
                            hot.boundary.store(widen(state.head()), Release);
                            seen = hot.state.load(Acquire);
                        }
                        Err(now) => seen = now,
                    }
                    continue;
                }
                _ => {}
            }
            // AcqRel. Release: this writer's bytes and its publication are written before the
            // decrement.
            match hot.state.swap_if(seen, without_us) {
                // A due wakeup belongs to the publisher that leaves no writer behind. An earlier
                // wakeup could precede the publication of an older record.
                Ok(_) => return publish_to.is_some() && done.is_some_and(|to| self.take_due(to)),
                Err(now) => seen = now,
            }
        }
    }

    /// Returns `true` if an ending writer must close the generation because too many bytes are
    /// unpublished.
    #[inline]
    fn must_close_generation(&self, state: ProtocolState) -> bool {
        let unpublished =
            (state.head().wrapping_sub(self.hot.0.published.load(Relaxed) >> 3) & HEAD_MASK) << 3;
        unpublished >= self.shape.close_at()
    }

    /// Makes all records below position `to` visible to readers.
    #[inline]
    fn publish(&self, shared: &SharedWords<'_, W>, to: u64) {
        // Checked at every store, because a reader may miss a store between two others of the same
        // publisher.
        #[cfg(test)]
        assert!(
            !is_ahead(self.hot.0.published.load(Relaxed), to),
            "data_head is taken back to {to}"
        );
        // Release: pairs with the reader's Acquire load of data_head, so a reader that sees the
        // head sees the records. Also corrects values that another process has written there.
        shared.data_head.store(to, Release);
        // Stored after data_head, so that a writer that sees this position knows that readers can
        // see it too. Release: pairs with the Acquire load in `reserve`.
        self.hot.0.published.store(to, Release);
    }

    /// Returns `true` if the reader must be woken for one of the records below position `to`.
    #[inline]
    fn take_due(&self, to: u64) -> bool {
        let due = self.wake.0.due.load(Relaxed);
        if due == 0 {
            return false;
        }
        // If a record after `to` is also due, `due` is kept for the writer that publishes that
        // record. The reader is notified of the earlier records now.
        if due <= to {
            let _ = self.wake.0.due.swap_if(due, 0);
        }
        true
    }
}

/// Returns `true` if position `a` is after `b`. Positions may wrap around, so `a` and `b` must be
/// less than half the range apart.
fn is_ahead(a: u64, b: u64) -> bool {
    a.wrapping_sub(b).cast_signed() > 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::sync::atomic::{AtomicU64, Ordering};

    const SIZE: u64 = 4096;

    /// The ring protocol without a data area, for tests.
    struct TestRing<W> {
        protocol: Protocol<W>,
        head: W,
        tail: W,
    }

    impl<W: AtomicWord> TestRing<W> {
        fn new(overwrite: bool) -> Self {
            let shape = RingGeometry {
                size: SIZE,
                overwrite,
            };
            Self {
                protocol: Protocol::new(shape, 0),
                head: W::new(0),
                tail: W::new(0),
            }
        }

        fn shared(&self) -> SharedWords<'_, W> {
            SharedWords {
                data_head: &self.head,
                data_tail: &self.tail,
            }
        }

        fn begin(&self, len: u64) -> Option<Claim> {
            self.protocol.reserve(&self.shared(), len, 0)
        }

        fn end(&self, claim: Claim) {
            self.protocol.end(&self.shared(), claim);
        }

        fn published(&self) -> u64 {
            self.head.load(Acquire)
        }

        /// Writes and reads a record of `len` bytes.
        fn pass(&self, len: u64) {
            self.end(self.begin(len).expect("the reader keeps up"));
            self.tail.store(self.published(), Release);
        }
    }

    #[test]
    fn p29_only_one_writer_publishes_at_a_time() {
        for overwrite in [false, true] {
            let ring = TestRing::<AtomicU64>::new(overwrite);
            ring.pass(64);
            // The first writer is preempted before it decrements the writer count. Other writers
            // fill the ring and close its generation.
            let preempted = ring.begin(64).expect("room");
            let mut end = preempted.end;
            while let Some(claim) = ring.begin(64) {
                end = claim.end;
                ring.end(claim);
                assert_eq!(ring.published(), 64, "nobody takes the head on, or back later");
                assert_eq!(ring.protocol.published(), 64);
            }
            assert!(end >= SIZE / 4, "many have written: up to {end}");
            ring.end(preempted);
            assert_eq!(ring.published(), end, "the last one publishes for all");
            ring.tail.store(end, Release);
            for lap in 1..=5 * SIZE / 512 {
                ring.pass(512);
                assert_eq!(ring.published(), end + lap * 512);
            }
        }
    }

    #[test]
    fn foreign_write_to_head_is_corrected_by_next_record() {
        for scribbled in [1 << 40, u64::MAX, 3, 1 << 62, 1 << 63] {
            let ring = TestRing::<AtomicU64>::new(false);
            ring.pass(64);
            ring.head.store(scribbled, Release);
            let claim = ring.begin(32).expect("room");
            ring.end(claim);
            assert_eq!(ring.published(), 96, "after {scribbled:#x}");
        }
    }

    /// While a first writer is in flight, other writers begin and end. Once an eighth of the data
    /// area is unpublished, an ending writer closes the generation of these writers. The first
    /// writer then publishes their records when it ends, even though another writer has begun
    /// meanwhile. Below that threshold, records are published only when a single writer remains,
    /// which is cheaper.
    #[test]
    fn generation_is_closed_when_an_eighth_of_the_ring_is_unpublished() {
        for (len, published) in [(SIZE / 8 - 64 - 8, 96), (SIZE / 8 - 64, 96 + SIZE / 8)] {
            let ring = TestRing::<AtomicU64>::new(false);
            ring.pass(96);
            let first = ring.begin(64).expect("room");
            let second = ring.begin(len).expect("room");
            ring.end(second);
            assert_eq!(ring.published(), 96, "the first is not written");
            let third = ring.begin(64).expect("room");
            ring.end(first);
            assert_eq!(ring.published(), published, "{len} bytes");
            let end = third.end;
            ring.end(third);
            assert_eq!(ring.published(), end);
        }
    }

    #[test]
    fn p29_tail_beyond_head_does_not_free_old_generation() {
        let ring = TestRing::<AtomicU64>::new(false);
        let first = ring.begin(2048).expect("room");
        let second = ring.begin(512).expect("room");
        // Closes the generation. Only `first` is then in flight, in the old generation.
        ring.end(second);
        ring.tail.store(2560, Release);
        assert!(ring.begin(2048).is_none(), "it would run into the first");
        ring.end(first);
        assert_eq!(ring.published(), 2560);
    }

    #[test]
    fn p29_tail_beyond_head_does_not_free_records_in_flight() {
        let ring = TestRing::<AtomicU64>::new(false);
        let first = ring.begin(2048).expect("room");
        // An invalid tail: it covers bytes that are still being written.
        ring.tail.store(2048, Release);
        assert!(ring.begin(2048).is_none(), "it would run into the first");
        let second = ring.begin(2040).expect("room up to the first");
        assert_eq!((second.start, second.end), (2048, 4088));
        ring.end(first);
        ring.end(second);
        assert_eq!(ring.published(), 4088);
    }

    /// An action that simulates another thread, and the access of this thread at which the action
    /// runs.
    type AccessHook = (AccessPoint, Box<dyn FnOnce()>);

    thread_local! {
        static MEANWHILE: RefCell<Option<AccessHook>> = const { RefCell::new(None) };
    }

    #[derive(Clone, Copy, PartialEq)]
    enum AccessPoint {
        /// Immediately before a compare-and-swap of this thread.
        Swap,
        /// After this many loads by this thread.
        Loads(u32),
    }

    impl AccessPoint {
        fn run_hook_at(self) {
            let due = MEANWHILE.with_borrow_mut(|meanwhile| {
                let (at, _) = meanwhile.as_mut()?;
                match (&mut *at, self) {
                    (Self::Loads(n @ 2..), Self::Loads(_)) => *n -= 1,
                    (Self::Loads(_), Self::Loads(_)) | (Self::Swap, Self::Swap) => return meanwhile.take(),
                    _ => {}
                }
                None
            });
            if let Some((_, act)) = due {
                act();
            }
        }
    }

    /// An atomic word that lets a test run another thread's action between two accesses.
    struct SteppedWord(AtomicU64);

    impl AtomicWord for SteppedWord {
        fn new(value: u64) -> Self {
            Self(AtomicU64::new(value))
        }
        fn load(&self, order: Ordering) -> u64 {
            let value = self.0.load(order);
            AccessPoint::Loads(1).run_hook_at();
            value
        }
        fn store(&self, value: u64, order: Ordering) {
            self.0.store(value, order);
        }
        fn swap_if(&self, current: u64, new: u64) -> Result<u64, u64> {
            AccessPoint::Swap.run_hook_at();
            AtomicWord::swap_if(&self.0, current, new)
        }
        fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
            self.0.fetch_add(value, order)
        }
        fn fetch_max(&self, value: u64, order: Ordering) -> u64 {
            self.0.fetch_max(value, order)
        }
        fn swap(&self, value: u64, order: Ordering) -> u64 {
            self.0.swap(value, order)
        }
    }

    fn stepped_ring(overwrite: bool) -> &'static TestRing<SteppedWord> {
        Box::leak(Box::new(TestRing::new(overwrite)))
    }

    fn meanwhile(at: AccessPoint, act: impl FnOnce() + 'static) {
        MEANWHILE.set(Some((at, Box::new(act))));
    }

    #[test]
    fn p28_writer_ending_during_publication_is_published() {
        let ring = stepped_ring(false);
        let first = ring.begin(64).expect("room");
        meanwhile(AccessPoint::Swap, || {
            assert_eq!(ring.published(), 64);
            let second = ring.begin(64).expect("room");
            ring.end(second);
            assert_eq!(ring.published(), 64, "it is not alone");
        });
        ring.end(first);
        assert_eq!(ring.published(), 128);
    }

    /// The last writer of an old generation has published everything, and another writer joins
    /// before the last writer decrements the writer count. The last writer then finds that the
    /// boundary of its generation is behind the published position, and does not publish the
    /// boundary.
    #[test]
    fn p29_outdated_boundary_is_not_published() {
        for others in [0, 64] {
            let ring = stepped_ring(false);
            let first = ring.begin(64).expect("room");
            let second = ring.begin(512).expect("room");
            ring.end(second);
            if others > 0 {
                let third = ring.begin(others).expect("room");
                ring.end(third);
            }
            let all = 576 + others;
            meanwhile(AccessPoint::Swap, move || {
                assert_eq!(ring.published(), all);
                let joiner = ring.begin(64).expect("room");
                // The joining writer ends before the preempted writer's compare-and-swap.
                meanwhile(AccessPoint::Swap, move || {
                    assert_eq!(ring.published(), all, "data_head is never taken back");
                    ring.end(joiner);
                });
            });
            ring.end(first);
            assert_eq!(ring.published(), all + 64);
        }
    }

    /// A reservation does not fail because of space that is freed between its loads of the
    /// published position and of the head. A reservation fails only if the ring was full at one
    /// moment.
    #[test]
    fn space_freed_between_two_loads_is_found() {
        let ring = stepped_ring(true);
        let first = ring.begin(SIZE / 4).expect("as much as may be in flight");
        assert!(ring.begin(8).is_none());
        // `reserve` loads the tail, then the published position, then the state. The first record
        // ends before the load of the state.
        meanwhile(AccessPoint::Loads(2), move || ring.end(first));
        assert!(ring.begin(8).is_some());
        assert_eq!(ring.published(), SIZE / 4);
    }
}
