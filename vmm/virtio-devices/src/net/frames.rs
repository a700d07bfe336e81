//! Transfers frames between a tap device and the guest's receive and transmit queues. One system
//! call per frame reads or writes guest memory directly.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use diagnostics::guest_log;
use smallvec::SmallVec;
use thiserror::Error;
use virtio_bindings::virtio_ring::VRING_AVAIL_F_NO_INTERRUPT;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

use super::metadata::MetadataNetPort;
use super::tap::{HEADER_BYTES, IoVecList, MAX_FRAME_BYTES, Tap};
use crate::rate_limiter::RateLimiter;

/// Maximum number of segments in a descriptor chain. Linux uses at most 19.
const MAX_PIECES: usize = 64;
/// Maximum number of frames that are transferred in one direction before the thread serves the
/// other direction.
const MAX_BATCH: usize = 64;
/// Offset of the number of buffers in the virtio-net header, in bytes (virtio 1.2, 5.1.6).
const NUM_BUFFERS_OFFSET: usize = 10;
/// Size of the flags and index that precede the entries of a ring, in bytes.
const RING_HEADER_BYTES: u64 = 4;
/// Size of a used ring entry, in bytes.
const USED_ENTRY_BYTES: u64 = 8;

/// A violation of the virtqueue rules by the driver. The queue is unusable until the device is
/// reset.
#[derive(Debug, Error)]
pub enum FrameQueueError {
    /// The rings of the queue are invalid.
    #[error("the driver's rings are broken")]
    Queue(#[from] virtio_queue::Error),
    /// A ring of the queue is outside guest memory.
    #[error("the driver's rings are not in memory")]
    Memory(#[from] vm_memory::GuestMemoryError),
    /// The head index of a descriptor chain is not less than the queue size.
    #[error("descriptor {0} is beyond the end of the table")]
    Head(u16),
}

/// Reason why a batch of frame transfers ended.
#[derive(Debug)]
pub enum FrameBatchEnd {
    /// More frames may be available for transfer.
    More,
    /// No more frames are available: from the tap device when receiving, from the driver when
    /// sending.
    Idle,
    /// The driver has provided no buffer for the next frame.
    NoBuffer,
    /// The rate limiter admits no frame until its timer fires.
    Throttled,
    /// The tap device was removed.
    Gone(io::Error),
}

/// A descriptor chain of a frame, with its memory segments.
struct FrameChain {
    head: u16,
    bytes: usize,
    pieces: SmallVec<[(GuestAddress, u32); 2]>,
}

/// Returns the next descriptor chain of `queue`, or `None` if the queue is empty. `writable`
/// selects whether all of its buffers must be device-writable or all device-readable. A malformed
/// chain is returned with a length of zero.
fn next_chain(
    queue: &mut Queue,
    memory: &GuestMemoryMmap,
    writable: bool,
) -> Result<Option<FrameChain>, FrameQueueError> {
    let size = queue.size();
    let Some(descriptors) = queue.iter(memory)?.next() else {
        return Ok(None);
    };
    let mut chain = FrameChain {
        head: descriptors.head_index(),
        bytes: 0,
        pieces: SmallVec::new(),
    };
    if chain.head >= size {
        return Err(FrameQueueError::Head(chain.head));
    }
    for descriptor in descriptors {
        if descriptor.is_write_only() != writable || chain.pieces.len() == MAX_PIECES {
            chain.bytes = 0;
            chain.pieces.clear();
            break;
        }
        chain.bytes = chain.bytes.saturating_add(descriptor.len() as usize);
        chain.pieces.push((descriptor.addr(), descriptor.len()));
    }
    Ok(Some(chain))
}

/// Returns whether the driver requested an interrupt for the chains used since `before` (virtio
/// 1.2, 2.7.7.2).
fn wants_interrupt(queue: &Queue, memory: &GuestMemoryMmap, before: u16) -> Result<bool, FrameQueueError> {
    let now = queue.next_used();
    if now == before {
        return Ok(false);
    }
    // The used index must be visible before the driver's event index is read.
    fence(Ordering::SeqCst);
    let avail = GuestAddress(queue.avail_ring());
    if !queue.event_idx_enabled() {
        let flags: u16 = memory.load(avail, Ordering::Relaxed)?;
        return Ok(u32::from(u16::from_le(flags)) & VRING_AVAIL_F_NO_INTERRUPT == 0);
    }
    let event = avail.0 + RING_HEADER_BYTES + 2 * u64::from(queue.size());
    let event = u16::from_le(memory.load(GuestAddress(event), Ordering::Relaxed)?);
    Ok(now.wrapping_sub(event).wrapping_sub(1) < now.wrapping_sub(before))
}

/// Returns whether `limiter` admits the next frame. Without a limiter, every frame is admitted.
fn admits(limiter: Option<&Arc<RateLimiter>>) -> bool {
    limiter.is_none_or(|limiter| limiter.admit())
}

/// Charges a frame of `bytes` bytes to the rate limiter. The virtio-net header in these bytes is
/// not charged.
fn charge(limiter: Option<&Arc<RateLimiter>>, bytes: usize) {
    if let Some(limiter) = limiter {
        limiter.charge(bytes.saturating_sub(HEADER_BYTES) as u64);
    }
}

/// Moves frames from the guest's transmit queue to the tap device.
pub struct NetFrameTransmitter {
    queue: Queue,
    limiter: Option<Arc<RateLimiter>>,
}

impl NetFrameTransmitter {
    /// Creates a sender for the frames in the guest's transmit queue.
    pub fn new(queue: Queue) -> Self {
        Self { queue, limiter: None }
    }

    /// Sets the rate limiter of sent frames.
    #[must_use]
    pub fn with_limiter(mut self, limiter: Option<Arc<RateLimiter>>) -> Self {
        self.limiter = limiter;
        self
    }

    /// Sends the frames in the transmit queue until it is empty or a limit is reached. Returns why
    /// the batch ended, and whether the driver requested an interrupt.
    ///
    /// Frames for the metadata service go to `metadata`. Malformed frames are dropped, and so are
    /// frames that the tap device rejects or for which there is no tap device.
    ///
    /// # Errors
    /// Returns a [`FrameQueueError`] if the queue is unusable.
    pub fn run(
        &mut self,
        memory: &GuestMemoryMmap,
        tap: Option<&Tap>,
        mut metadata: Option<&mut MetadataNetPort>,
    ) -> Result<(FrameBatchEnd, bool), FrameQueueError> {
        let before = self.queue.next_used();
        let mut pause = FrameBatchEnd::More;
        for _ in 0..MAX_BATCH {
            if !admits(self.limiter.as_ref()) {
                pause = FrameBatchEnd::Throttled;
                break;
            }
            let Some(chain) = next_chain(&mut self.queue, memory, false)? else {
                if self.queue.enable_notification(memory)? {
                    continue;
                }
                pause = FrameBatchEnd::Idle;
                break;
            };
            let mut scatter = IoVecList::new(memory);
            let sound = chain
                .pieces
                .iter()
                .all(|(address, length)| scatter.push(*address, *length));
            let is_frame = sound && (HEADER_BYTES..=MAX_FRAME_BYTES).contains(&scatter.bytes());
            let is_for_tap = is_frame
                && !metadata
                    .as_deref_mut()
                    .is_some_and(|port| port.take(memory, &chain.pieces));
            if is_for_tap
                && let Some(tap) = tap
                && let Err(e) = tap.write(&scatter)
            {
                guest_log!(Debug, "a frame is lost: {e}");
            }
            charge(self.limiter.as_ref(), if is_frame { scatter.bytes() } else { 0 });
            self.queue.add_used(memory, chain.head, 0)?;
        }
        Ok((pause, wants_interrupt(&self.queue, memory, before)?))
    }
}

/// Moves frames from the tap device to the guest's receive queue.
pub struct NetFrameReceiver {
    queue: Queue,
    /// `true` if a frame may span several buffers (VIRTIO_NET_F_MRG_RXBUF).
    mergeable: bool,
    /// Buffers that have been taken from the queue and do not contain a frame yet.
    waiting: VecDeque<FrameChain>,
    waiting_bytes: usize,
    /// A frame that has been taken from its source but not copied to the driver's buffers yet.
    /// Empty if there is none.
    held: Vec<u8>,
    limiter: Option<Arc<RateLimiter>>,
}

impl NetFrameReceiver {
    /// Creates a receiver that delivers frames to the guest's receive queue. `mergeable` is `true`
    /// if the driver accepts frames that span several buffers.
    pub fn new(queue: Queue, mergeable: bool) -> Self {
        Self {
            queue,
            mergeable,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            held: Vec::new(),
            limiter: None,
        }
    }

    /// Sets the rate limiter of received frames.
    #[must_use]
    pub fn with_limiter(mut self, limiter: Option<Arc<RateLimiter>>) -> Self {
        self.limiter = limiter;
        self
    }

    /// Takes buffers from the queue until they can hold the longest possible frame. If a frame
    /// cannot span several buffers, takes only one. Returns `false` if the driver has not provided
    /// enough buffers.
    fn fill(&mut self, memory: &GuestMemoryMmap) -> Result<bool, FrameQueueError> {
        let enough = if self.mergeable { MAX_FRAME_BYTES } else { 1 };
        // The queue size limits the loop, because a driver may add invalid buffers indefinitely.
        for _ in 0..=self.queue.size() {
            if self.waiting_bytes >= enough {
                return Ok(true);
            }
            let Some(chain) = next_chain(&mut self.queue, memory, true)? else {
                if self.queue.enable_notification(memory)? {
                    continue;
                }
                return Ok(false);
            };
            let mut probe = IoVecList::new(memory);
            let sound = chain
                .pieces
                .iter()
                .all(|(address, length)| probe.push(*address, *length));
            if !sound || chain.bytes < HEADER_BYTES || self.waiting.len() >= usize::from(self.queue.size()) {
                self.queue.add_used(memory, chain.head, 0)?;
                continue;
            }
            self.waiting_bytes += chain.bytes;
            self.waiting.push_back(chain);
        }
        Ok(false)
    }

    /// Delivers the available frames to the guest, first those of `metadata` and then those of the
    /// tap device. Returns why the batch ended, and whether the driver requested an interrupt.
    ///
    /// # Errors
    /// Returns a [`FrameQueueError`] if the queue is unusable.
    pub fn run(
        &mut self,
        memory: &GuestMemoryMmap,
        tap: &Tap,
        mut metadata: Option<&mut MetadataNetPort>,
    ) -> Result<(FrameBatchEnd, bool), FrameQueueError> {
        let before = self.queue.next_used();
        let mut pause = FrameBatchEnd::More;
        for _ in 0..MAX_BATCH {
            if !admits(self.limiter.as_ref()) {
                pause = FrameBatchEnd::Throttled;
                break;
            }
            let enough = self.fill(memory)?;
            if self.waiting.is_empty() || !self.held.is_empty() && self.waiting_bytes < self.held.len() {
                if self.waiting.len() < usize::from(self.queue.size()) {
                    pause = FrameBatchEnd::NoBuffer;
                    break;
                }
                // Drop the frame: the queue is full, so the driver cannot add the buffers that the
                // frame needs.
                self.held.clear();
                continue;
            }
            if !self.held.is_empty() {
                self.return_held_frame(memory)?;
                continue;
            }
            if self.hold_metadata_frame(metadata.as_deref_mut()) {
                continue;
            }
            if !enough {
                // The next frame may be longer than the available buffers, and a frame cannot be
                // put back.
                self.held.resize(MAX_FRAME_BYTES, 0);
                let read = tap.read_bytes(&mut self.held);
                self.held.truncate(*read.as_ref().unwrap_or(&0));
                match read {
                    Ok(_) => continue,
                    Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => pause = FrameBatchEnd::Idle,
                    Err(e) => pause = FrameBatchEnd::Gone(e),
                }
                break;
            }
            let mut scatter = IoVecList::new(memory);
            'buffers: for chain in &self.waiting {
                for (address, length) in &chain.pieces {
                    if !scatter.push(*address, *length) {
                        break 'buffers;
                    }
                }
                if !self.mergeable || scatter.bytes() >= MAX_FRAME_BYTES {
                    break;
                }
            }
            match tap.read(&scatter) {
                Ok(count) => self.return_frame(memory, count)?,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    pause = FrameBatchEnd::Idle;
                    break;
                }
                Err(e) => {
                    pause = FrameBatchEnd::Gone(e);
                    break;
                }
            }
        }
        Ok((pause, wants_interrupt(&self.queue, memory, before)?))
    }

    /// Moves the next frame of the metadata service to `held`. Returns `false` if there is none.
    fn hold_metadata_frame(&mut self, metadata: Option<&mut MetadataNetPort>) -> bool {
        let Some(frame) = metadata.and_then(MetadataNetPort::next_frame) else {
            return false;
        };
        self.held = frame;
        if !self.mergeable {
            // The remainder cannot be delivered in later buffers. The tap device also truncates
            // frames.
            self.held.truncate(self.waiting_bytes);
        }
        true
    }

    /// Copies the frame in `held` to the first waiting buffers and returns these buffers to the
    /// driver. The buffers must be large enough.
    fn return_held_frame(&mut self, memory: &GuestMemoryMmap) -> Result<(), FrameQueueError> {
        let mut rest = &self.held[..];
        for (address, length) in self.waiting.iter().flat_map(|chain| &chain.pieces) {
            let (now, later) = rest.split_at(rest.len().min(*length as usize));
            memory.write_slice(now, *address)?;
            rest = later;
        }
        let count = self.held.len();
        self.held.clear();
        self.return_frame(memory, count)
    }

    /// Returns the first waiting buffers, which contain a frame of `count` bytes, to the driver.
    /// The used index is updated only once, after all entries are written, because the driver must
    /// see all buffers of a frame at the same time.
    fn return_frame(&mut self, memory: &GuestMemoryMmap, count: usize) -> Result<(), FrameQueueError> {
        charge(self.limiter.as_ref(), count);
        let mut used: SmallVec<[(u16, u32); 8]> = SmallVec::new();
        let mut left = count;
        let first = self.waiting.front().map(|chain| chain.pieces.clone());
        while let Some(chain) = self.waiting.front().filter(|_| left > 0 || used.is_empty()) {
            let length = chain.bytes.min(left);
            left -= length;
            used.push((chain.head, u32::try_from(length).unwrap_or(u32::MAX)));
            self.waiting_bytes -= chain.bytes;
            self.waiting.pop_front();
        }
        let buffers = u16::try_from(used.len()).unwrap_or(u16::MAX).to_le_bytes();
        for (offset, byte) in (NUM_BUFFERS_OFFSET..).zip(buffers) {
            if let Some(address) = first.as_deref().and_then(|pieces| byte_at(pieces, offset)) {
                memory.write_obj(byte, address)?;
            }
        }
        let Some(((last, length), others)) = used.split_last() else {
            return Ok(());
        };
        let (ring, size) = (self.queue.used_ring(), self.queue.size());
        let mut next = self.queue.next_used();
        for (head, length) in others {
            let entry = ring + RING_HEADER_BYTES + USED_ENTRY_BYTES * u64::from(next % size);
            memory.write_obj([u32::from(*head).to_le(), length.to_le()], GuestAddress(entry))?;
            next = next.wrapping_add(1);
        }
        self.queue.set_next_used(next);
        self.queue.add_used(memory, *last, *length)?;
        Ok(())
    }
}

/// Returns the guest-physical address of byte `offset` of a buffer.
fn byte_at(pieces: &[(GuestAddress, u32)], offset: usize) -> Option<GuestAddress> {
    let mut left = u64::try_from(offset).ok()?;
    for (address, length) in pieces {
        if left < u64::from(*length) {
            return address.0.checked_add(left).map(GuestAddress);
        }
        left -= u64::from(*length);
    }
    None
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use virtio_queue::desc::split::Descriptor;

    use super::*;
    use crate::serve::testing::{BUFFERS, Driver, HOSTILE, memory};

    const NEXT: u16 = 1;
    const WRITE: u16 = 2;
    const SIZE: u16 = 256;

    /// The driver's side of a queue, and a socket pair that replaces the tap device.
    struct FrameTest<'m> {
        memory: &'m GuestMemoryMmap,
        driver: Driver<'m>,
        tap: Tap,
        far: UnixDatagram,
    }

    impl<'m> FrameTest<'m> {
        fn new(memory: &'m GuestMemoryMmap) -> Self {
            let (near, far) = UnixDatagram::pair().unwrap();
            near.set_nonblocking(true).unwrap();
            far.set_nonblocking(true).unwrap();
            Self {
                memory,
                driver: Driver::new(memory, SIZE),
                tap: Tap::on(near.into()),
                far,
            }
        }

        fn sender(&self) -> NetFrameTransmitter {
            NetFrameTransmitter::new(self.driver.active().queue)
        }

        fn receiver(&self, mergeable: bool) -> NetFrameReceiver {
            NetFrameReceiver::new(self.driver.active().queue, mergeable)
        }

        fn send(&self, sender: &mut NetFrameTransmitter) -> (FrameBatchEnd, bool) {
            sender.run(self.memory, Some(&self.tap), None).unwrap()
        }

        fn receive(&self, receiver: &mut NetFrameReceiver) -> (FrameBatchEnd, bool) {
            receiver.run(self.memory, &self.tap, None).unwrap()
        }

        /// Makes a buffer available to the device.
        fn offer(&mut self, head: u16, address: u64, length: u32, flags: u16) {
            let buffer = Descriptor::new(address, length, flags, 0);
            self.driver.offer_chain(head, &[buffer]);
        }

        fn arrived(&self) -> Vec<Vec<u8>> {
            let mut all = Vec::new();
            let mut bytes = vec![0; 100_000];
            while let Ok(count) = self.far.recv(&mut bytes) {
                all.push(bytes[..count].to_vec());
            }
            all
        }
    }

    fn frame(length: usize) -> Vec<u8> {
        (0..length).map(|i| (i % 251) as u8).collect()
    }

    #[test]
    fn segmented_frame_is_sent_as_one() {
        let memory = memory();
        let mut rig = FrameTest::new(&memory);
        let mut sender = rig.sender();
        let sent = frame(5000);
        memory.write_slice(&sent, GuestAddress(BUFFERS)).unwrap();
        rig.driver.write(1, &[Descriptor::new(BUFFERS + 4012, 988, 0, 0)]);
        rig.driver
            .write(7, &[Descriptor::new(BUFFERS + 12, 4000, NEXT, 1)]);
        rig.driver
            .offer_chain(3, &[Descriptor::new(BUFFERS, 12, NEXT, 7)]);
        let (pause, wanted) = rig.send(&mut sender);
        assert!(matches!(pause, FrameBatchEnd::Idle) && wanted);
        assert_eq!(rig.arrived(), [sent]);
        assert_eq!(rig.driver.used(), [(3, 0)]);
        // No new chain was used, so the driver does not need an interrupt.
        assert!(!rig.send(&mut sender).1);
    }

    /// With mergeable buffers, a frame that needs more buffers than available is delivered after
    /// the driver has added them. Each buffer may be smaller than the longest frame.
    #[test]
    fn long_frame_waits_for_buffers() {
        const BUFFER: u64 = 1536;
        let memory = memory();
        let mut rig = FrameTest::new(&memory);
        let mut receiver = rig.receiver(true);
        let offer = |rig: &mut FrameTest<'_>, heads: std::ops::Range<u16>| {
            for head in heads {
                rig.offer(head, BUFFERS + u64::from(head) * BUFFER, BUFFER as u32, WRITE);
            }
        };
        offer(&mut rig, 0..4);
        rig.far.send(&frame(1000)).unwrap();
        rig.far.send(&frame(4000)).unwrap();
        rig.far.send(&frame(9000)).unwrap();
        let (pause, wanted) = rig.receive(&mut receiver);
        assert!(matches!(pause, FrameBatchEnd::NoBuffer) && wanted);
        assert_eq!(rig.driver.used(), [(0, 1000), (1, 1536), (2, 1536), (3, 928)]);
        let in_guest = |length: usize, at: u64| {
            let mut bytes = vec![0; length];
            memory.read_slice(&mut bytes, GuestAddress(at)).unwrap();
            // Return the number of buffers, which the device has written to the header, and the
            // frame.
            (u16::from_le_bytes([bytes[10], bytes[11]]), bytes[12..].to_vec())
        };
        assert_eq!(in_guest(4000, BUFFERS + BUFFER), (3, frame(4000)[12..].to_vec()));
        // Offer too few buffers for the third frame first, and then enough.
        offer(&mut rig, 4..8);
        let (pause, wanted) = rig.receive(&mut receiver);
        assert!(matches!(pause, FrameBatchEnd::NoBuffer) && !wanted);
        offer(&mut rig, 8..10);
        let (pause, wanted) = rig.receive(&mut receiver);
        assert!(matches!(pause, FrameBatchEnd::NoBuffer) && wanted);
        assert_eq!(rig.driver.used().len(), 10);
        assert_eq!(
            in_guest(9000, BUFFERS + 4 * BUFFER),
            (6, frame(9000)[12..].to_vec())
        );
    }

    #[test]
    fn frame_longer_than_ring_is_dropped() {
        let memory = memory();
        let mut rig = FrameTest::new(&memory);
        let mut receiver = rig.receiver(true);
        for head in 0..SIZE {
            rig.offer(head, BUFFERS + u64::from(head) * 16, 16, WRITE);
        }
        rig.far.send(&frame(5000)).unwrap();
        rig.far.send(&frame(40)).unwrap();
        let (pause, wanted) = rig.receive(&mut receiver);
        assert!(matches!(pause, FrameBatchEnd::Idle) && wanted, "{pause:?}");
        assert_eq!(rig.driver.used(), [(0, 16), (1, 16), (2, 8)]);
    }

    #[test]
    fn frames_without_tap_are_dropped() {
        let memory = memory();
        let mut rig = FrameTest::new(&memory);
        let mut sender = rig.sender();
        for head in 0..100 {
            rig.offer(head, BUFFERS, 64, 0);
        }
        let mut end = || sender.run(&memory, None, None).unwrap().0;
        assert!(matches!(
            (end(), end()),
            (FrameBatchEnd::More, FrameBatchEnd::Idle)
        ));
        assert_eq!(rig.driver.used().len(), 100);
        assert!(rig.arrived().is_empty());
    }

    /// A malformed chain in the transmit queue is returned without sending a frame. The valid
    /// frames after it are sent.
    #[test]
    fn malformed_chains_send_no_frames() {
        let memory = memory();
        let mut rig = FrameTest::new(&memory);
        let mut sender = rig.sender();
        rig.driver.offer_hostile(0);
        rig.offer(HOSTILE, BUFFERS, 11, 0); // incomplete header
        rig.offer(HOSTILE + 1, BUFFERS, 0x10_0000, 0); // longer than any frame
        rig.offer(HOSTILE + 2, BUFFERS, 60, 0);
        assert!(matches!(rig.send(&mut sender).0, FrameBatchEnd::Idle));
        let heads = 0..u32::from(HOSTILE) + 3;
        assert_eq!(rig.driver.used(), heads.map(|head| (head, 0)).collect::<Vec<_>>());
        assert_eq!(rig.arrived().iter().map(Vec::len).collect::<Vec<_>>(), [256, 60]);
    }

    #[test]
    fn invalid_rings_break_the_queue() {
        let memory = memory();
        let mut rig = FrameTest::new(&memory);
        rig.driver.offer(SIZE);
        let error = rig.sender().run(&memory, Some(&rig.tap), None).err().unwrap();
        assert!(matches!(error, FrameQueueError::Head(SIZE)), "{error:?}");
        rig.driver.mock.avail().idx().store(SIZE + 1);
        for mergeable in [false, true] {
            let error = rig.receiver(mergeable).run(&memory, &rig.tap, None).unwrap_err();
            assert!(matches!(error, FrameQueueError::Queue(_)), "{error:?}");
        }
    }

    /// With mergeable buffers, a frame spans as many buffers of 1,500 bytes as required, and its
    /// header contains their number.
    #[test]
    fn long_frame_spans_several_buffers() {
        let memory = memory();
        let mut rig = FrameTest::new(&memory);
        let mut receiver = rig.receiver(true);
        for head in 0..60 {
            rig.offer(head, BUFFERS + 1500 * u64::from(head), 1500, WRITE);
        }
        for length in [60, 4000] {
            rig.far.send(&frame(length)).unwrap();
        }
        let (pause, wanted) = rig.receive(&mut receiver);
        assert!(
            wanted && matches!(pause, FrameBatchEnd::Idle | FrameBatchEnd::NoBuffer),
            "{pause:?}"
        );
        assert_eq!(rig.driver.used(), [(0, 60), (1, 1500), (2, 1500), (3, 1000)]);
        let buffers = |at: u64| memory.read_obj::<u16>(GuestAddress(at + 10)).unwrap();
        assert_eq!((buffers(BUFFERS), buffers(BUFFERS + 1500)), (1, 3));
        let mut got = vec![0; 4000];
        memory.read_slice(&mut got, GuestAddress(BUFFERS + 1500)).unwrap();
        assert_eq!(got[12..], frame(4000)[12..]);
    }

    /// Without mergeable buffers, a received frame uses one chain. In the test, header and frame
    /// are in separate segments, as in Linux.
    #[test]
    fn unmerged_frame_uses_one_chain() {
        let memory = memory();
        let mut rig = FrameTest::new(&memory);
        let mut receiver = rig.receiver(false);
        for chain in 0..2_u16 {
            let at = BUFFERS + 0x1000 * u64::from(chain);
            let header = Descriptor::new(at, 11, NEXT | WRITE, 2 * chain + 1);
            let data = Descriptor::new(at + 0x800, 1515, WRITE, 0);
            rig.driver.offer_chain(2 * chain, &[header, data]);
        }
        // The second frame is longer than its chain and is truncated.
        rig.far.send(&frame(1000)).unwrap();
        rig.far.send(&frame(9000)).unwrap();
        rig.receive(&mut receiver);
        assert_eq!(rig.driver.used(), [(0, 1000), (2, 1526)]);
        let byte = |at| memory.read_obj::<u8>(GuestAddress(at)).unwrap();
        assert_eq!((byte(BUFFERS + 10), byte(BUFFERS + 0x800)), (1, 0));
    }

    #[test]
    fn unwritable_buffers_are_returned() {
        let memory = memory();
        let mut rig = FrameTest::new(&memory);
        let mut receiver = rig.receiver(false);
        rig.offer(0, BUFFERS, 2000, 0); // device-readable
        rig.offer(1, u64::MAX - 4, 2000, WRITE); // outside guest RAM
        rig.offer(2, BUFFERS, 4, WRITE); // too short for a header
        rig.offer(3, BUFFERS, 2000, WRITE);
        rig.far.send(&frame(99)).unwrap();
        rig.receive(&mut receiver);
        assert_eq!(rig.driver.used(), [(0, 0), (1, 0), (2, 0), (3, 99)]);
    }

    #[test]
    fn removed_tap_is_detected() {
        let memory = memory();
        let mut rig = FrameTest::new(&memory);
        let mut receiver = rig.receiver(false);
        rig.offer(0, BUFFERS, 2000, WRITE);
        let gone = Tap::on(std::fs::File::create("/dev/null").unwrap().into());
        assert!(matches!(
            receiver.run(&memory, &gone, None).unwrap(),
            (FrameBatchEnd::Gone(_), false)
        ));
    }
}
