//! Processes the descriptor chains in a virtqueue. Each available chain is handled once, and chains
//! that complete within a short time share an interrupt.

use std::error::Error;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use diagnostics::{error_line, guest_log};
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::GuestMemoryMmap;

use crate::device::{ActiveQueue, ConfigChangeNotifier};

/// A descriptor chain in guest memory. The guest may modify the memory at any time.
pub type GuestDescriptorChain<'m> = DescriptorChain<&'m GuestMemoryMmap>;

/// A violation of the virtqueue rules by the driver. The queue is unusable until the device is
/// reset.
#[derive(Debug, thiserror::Error)]
pub enum VirtqueueError {
    /// The rings of the virtqueue are invalid.
    #[error("the driver's queue is unusable")]
    Rings(#[from] virtio_queue::Error),
    /// The head index of a descriptor chain is not less than the queue size.
    #[error("the driver offers descriptor {head} in a queue of size {size}")]
    Head {
        /// Index of the first descriptor of the chain.
        head: u16,
        /// Size of the queue, in entries.
        size: u16,
    },
}

/// Logs a virtqueue violation by the driver, subject to the rate limit of
/// [`mod@diagnostics::guest_log`].
pub fn log_driver_error(device: &str, what: &str, error: &dyn Error) {
    guest_log!(Warn, "{device}: {what}: {}", error_line(error));
}

/// If `served`, the result of processing a queue, is an error, logs it and requests a device reset.
/// Returns whether it is an error.
pub(crate) fn request_reset_if_broken(
    device: &str,
    served: Result<(), VirtqueueError>,
    config_change: &ConfigChangeNotifier,
) -> bool {
    if let Err(error) = &served {
        log_driver_error(device, "it stops until it is reset", error);
        config_change.needs_reset();
    }
    served.is_err()
}

/// Maximum time during which one pass over a queue starts processing chains. A chain in progress is
/// always completed.
const MAX_ROUND: Duration = Duration::from_millis(50);

/// Maximum time between the completion of a chain and its interrupt, while further chains are
/// processed.
///
/// Chains that complete within this time share an interrupt, because an interrupt costs more than a
/// chain of a few microseconds. A chain that takes longer than this time causes an interrupt of its
/// own.
const MAX_INTERRUPT_DELAY: Duration = Duration::from_micros(50);

/// Processes the available chains of a queue.
///
/// `serve` handles one chain and returns the number of bytes that it wrote. The driver is
/// interrupted at the end of the call and at least every `MAX_INTERRUPT_DELAY`, unless it
/// suppresses notifications.
///
/// The call returns after one pass over the queue or after `MAX_ROUND`, even if the driver keeps
/// adding chains. If chains may remain, it signals the queue's kick eventfd again. Meanwhile, the
/// event loop can check its other descriptors, including the stop event.
///
/// # Errors
/// Returns a [`VirtqueueError`] if the driver violates the virtqueue rules. The driver has been
/// notified of the chains processed before the error.
pub fn serve_queue(
    active: &mut ActiveQueue,
    memory: &GuestMemoryMmap,
    serve: impl FnMut(GuestDescriptorChain<'_>) -> u32,
) -> Result<(), VirtqueueError> {
    serve_queue_while(active, memory, || true, serve)
}

/// Processes the available chains of a queue, like [`serve_queue`], as long as `wants` returns
/// `true`.
///
/// `wants` is called before each chain. The remaining chains stay in the queue, and the driver's
/// notifications may stay disabled until the next call.
///
/// # Errors
/// Returns a [`VirtqueueError`] if the driver violates the virtqueue rules. The driver has been
/// notified of the chains processed before the error.
pub fn serve_queue_while(
    active: &mut ActiveQueue,
    memory: &GuestMemoryMmap,
    wants: impl Fn() -> bool,
    serve: impl FnMut(GuestDescriptorChain<'_>) -> u32,
) -> Result<(), VirtqueueError> {
    serve_with_clock(active, memory, wants, serve, Instant::now)
}

/// Makes a queue continue at its used ring, after the device's thread has ended.
///
/// Sets the next available index to the index of the used ring. The device must return chains in
/// the order in which it takes them. A chain that the thread had taken but not returned is then
/// taken again.
///
/// # Errors
/// Returns [`VirtqueueError::Rings`] if the used ring cannot be read.
pub fn continue_at_used_ring(queue: &mut Queue, memory: &GuestMemoryMmap) -> Result<(), VirtqueueError> {
    let position = queue.used_idx(memory, Ordering::Acquire)?;
    queue.set_next_avail(position.0);
    queue.set_next_used(position.0);
    Ok(())
}

/// Progress of a call of [`serve_queue_while`].
struct RoundProgress {
    /// Number of further descriptor chains that this call may serve.
    left: u16,
    /// Time after which this call serves no further descriptor chain.
    end: Instant,
    /// Time of the last interrupt, or a later time at which no completed chain was without
    /// interrupt.
    signalled: Instant,
    /// `true` if a chain has completed since the last interrupt.
    unsignalled: bool,
}

/// Implements [`serve_queue_while`] with `now` as the clock.
fn serve_with_clock(
    active: &mut ActiveQueue,
    memory: &GuestMemoryMmap,
    wants: impl Fn() -> bool,
    mut serve: impl FnMut(GuestDescriptorChain<'_>) -> u32,
    mut now: impl FnMut() -> Instant,
) -> Result<(), VirtqueueError> {
    let start = now();
    let mut progress = RoundProgress {
        left: active.queue.size(),
        end: start + MAX_ROUND,
        signalled: start,
        unsignalled: false,
    };
    let outcome = loop {
        active.queue.disable_notification(memory)?;
        match serve_round(active, memory, &mut progress, &wants, &mut serve, &mut now) {
            // The handler accepts no more chains for now and resumes the queue later.
            Ok(()) if !wants() => break Ok(()),
            Ok(()) if progress.left == 0 || now() >= progress.end => {
                // The write fails only if the counter is full, in which case a notification is
                // already pending.
                let _ = active.kick.write(1);
                break Ok(());
            }
            Ok(()) => {}
            Err(error) => break Err(error),
        }
        if !active.queue.enable_notification(memory)? {
            break Ok(());
        }
    };
    if progress.unsignalled {
        signal_used(active, memory)?;
    }
    outcome
}

/// Sends the queue's interrupt to the driver, unless the driver suppresses notifications.
fn signal_used(active: &mut ActiveQueue, memory: &GuestMemoryMmap) -> Result<(), VirtqueueError> {
    if active.queue.needs_notification(memory)? {
        active.interrupt.raise();
    }
    Ok(())
}

/// Processes the chains that are available now, within the limits of `progress`.
fn serve_round(
    active: &mut ActiveQueue,
    memory: &GuestMemoryMmap,
    progress: &mut RoundProgress,
    wants: &impl Fn() -> bool,
    serve: &mut impl FnMut(GuestDescriptorChain<'_>) -> u32,
    now: &mut impl FnMut() -> Instant,
) -> Result<(), VirtqueueError> {
    let size = active.queue.size();
    while progress.left > 0
        && wants()
        && let Some(chain) = active.queue.iter(memory)?.next()
    {
        let head = chain.head_index();
        if head >= size {
            return Err(VirtqueueError::Head { head, size });
        }
        let written = serve(chain);
        active.queue.add_used(memory, head, written)?;
        progress.left -= 1;
        let at = now();
        progress.unsignalled = at.duration_since(progress.signalled) < MAX_INTERRUPT_DELAY;
        if !progress.unsignalled {
            progress.signalled = at;
            signal_used(active, memory)?;
        }
        if at >= progress.end {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod testing {
    //! Mock of a virtio driver with a virtqueue in guest memory.

    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU8};

    use virtio_queue::Queue;
    use virtio_queue::desc::RawDescriptor;
    use virtio_queue::desc::split::Descriptor;
    use virtio_queue::mock::MockSplitQueue;
    use vm_memory::{Bytes, GuestAddress};
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

    use super::*;
    use crate::device::{DeviceActivation, DeviceFailureCallback, DeviceInterrupt, VirtioDevice};

    /// Size of the guest memory, in bytes. The queue is at its start.
    pub(crate) const MEMORY_BYTES: usize = 4 << 20;
    /// Guest address after the queue, from which tests place buffers.
    pub(crate) const BUFFERS: u64 = 0x10_0000;

    /// Number of chains that [`Driver::offer_hostile`] adds. Only the last one is valid.
    pub(crate) const HOSTILE: u16 = 14;
    pub(crate) const GOOD: u64 = BUFFERS + 0x4000;

    pub(crate) fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).unwrap()
    }

    /// What the driver sees of a device, apart from the queues.
    pub(crate) struct DriverView {
        /// Eventfd of the configuration-change interrupt.
        pub changed: Arc<EventFd>,
        /// State of the DEVICE_NEEDS_RESET status bit.
        needs_reset: Arc<AtomicBool>,
    }

    impl DriverView {
        pub(crate) fn needs_reset(&self) -> bool {
            self.needs_reset.load(Ordering::Acquire)
        }
    }

    /// Polls until `holds` returns `true`. Panics after a timeout.
    #[track_caller]
    pub(crate) fn wait_until(holds: impl Fn() -> bool) {
        let start = Instant::now();
        while !holds() {
            assert!(start.elapsed() < Duration::from_secs(30), "timed out");
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// Returns the resources to activate a device with `queues`, and the driver's view of this
    /// device.
    pub(crate) fn activation(
        memory: &GuestMemoryMmap,
        queues: Vec<Option<ActiveQueue>>,
    ) -> (DeviceActivation, DriverView) {
        let seen = DriverView {
            changed: Arc::new(EventFd::new(0).unwrap()),
            needs_reset: Arc::default(),
        };
        let interrupt = DeviceInterrupt::new(Some(seen.changed.clone()));
        let generation = Arc::new(AtomicU8::new(0));
        let activation = DeviceActivation {
            memory: memory.clone(),
            features: 0,
            queues,
            resumed: false,
            config_change: ConfigChangeNotifier::new(generation, seen.needs_reset.clone(), interrupt),
            fatal_error_callback: DeviceFailureCallback::default(),
        };
        (activation, seen)
    }

    /// Activates a device whose only queue belongs to `driver`. The queue continues at its used
    /// ring.
    pub(crate) fn activate(device: &mut impl VirtioDevice, driver: &Driver<'_>) -> DriverView {
        let mut active = driver.active();
        continue_at_used_ring(&mut active.queue, driver.memory).unwrap();
        let (activation, view) = activation(driver.memory, vec![Some(active)]);
        device.activate(activation).unwrap();
        view
    }

    /// A mock driver and its virtqueue.
    pub(crate) struct Driver<'m> {
        pub mock: MockSplitQueue<'m, GuestMemoryMmap>,
        pub active: ActiveQueue,
        pub vector: Arc<EventFd>,
        memory: &'m GuestMemoryMmap,
        offered: u16,
    }

    impl<'m> Driver<'m> {
        /// Returns the device's side of the queue.
        pub(crate) fn active(&self) -> ActiveQueue {
            ActiveQueue {
                queue: self.mock.create_queue().unwrap(),
                kick: self.active.kick.clone(),
                interrupt: self.active.interrupt.clone(),
            }
        }

        pub(crate) fn new(memory: &'m GuestMemoryMmap, size: u16) -> Self {
            Self::at(memory, size, 0x1000)
        }

        /// Creates a driver whose queue of `size` entries begins at guest address `start`.
        pub(crate) fn at(memory: &'m GuestMemoryMmap, size: u16, start: u64) -> Self {
            let mock = MockSplitQueue::create(memory, GuestAddress(start), size);
            let queue: Queue = mock.create_queue().unwrap();
            let vector = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
            let active = ActiveQueue {
                queue,
                kick: Arc::new(EventFd::new(EFD_NONBLOCK).unwrap()),
                interrupt: DeviceInterrupt::new(Some(vector.clone())),
            };
            Self {
                mock,
                active,
                vector,
                memory,
                offered: 0,
            }
        }

        /// Writes consecutive descriptors to the descriptor table, starting at index `head`.
        pub(crate) fn write(&self, head: u16, descriptors: &[Descriptor]) {
            for (at, descriptor) in (head..).zip(descriptors) {
                let table = self.mock.desc_table();
                table.store(at, RawDescriptor::from(*descriptor)).unwrap();
            }
        }

        /// Writes a chain to the descriptor table, starting at index `head`, and adds it to the
        /// available ring.
        pub(crate) fn offer_chain(&mut self, head: u16, chain: &[Descriptor]) {
            self.write(head, chain);
            self.offer(head);
        }

        /// Notifies the device that chains are available.
        pub(crate) fn kick(&self) {
            self.active.kick.write(1).unwrap();
        }

        /// Waits until the device has returned `count` chains.
        #[track_caller]
        pub(crate) fn wait_until_used(&self, count: usize) {
            wait_until(|| self.used().len() >= count);
        }

        /// Checks that the device has returned the chains of [`Driver::offer_hostile`] in order. It
        /// must have written at most `limit` bytes to a chain, `good` bytes to the valid chain, and
        /// nothing to read-only buffers or outside RAM.
        #[track_caller]
        pub(crate) fn assert_hostile_used(&self, limit: usize, good: u32) {
            let used = self.used();
            let heads = used.iter().map(|(head, _)| *head);
            assert!(heads.eq(0..u32::from(HOSTILE)), "{used:?}");
            assert!(used.iter().all(|(_, bytes)| *bytes as usize <= limit), "{used:?}");
            assert_eq!([used[2].1, used[4].1, used[5].1, used[12].1], [0; 4], "{used:?}");
            assert_eq!(used.last(), Some(&(u32::from(HOSTILE) - 1, good)));
        }

        /// Adds the chain that starts at index `head` to the available ring.
        pub(crate) fn offer(&mut self, head: u16) {
            let avail = self.mock.avail();
            let size = self.active.queue.size();
            avail
                .ring()
                .ref_at(usize::from(self.offered % size))
                .unwrap()
                .store(head.to_le());
            self.offered += 1;
            avail.idx().store(self.offered.to_le());
        }

        /// Adds [`HOSTILE`] chains, all of which are malformed except the last one, which has 256
        /// bytes at [`GOOD`].
        ///
        /// Uses descriptors from index 0. `direction` is WRITE for device-writable buffers. The
        /// queue must have at least 32 entries, because its used ring begins halfway through the
        /// available ring.
        pub(crate) fn offer_hostile(&mut self, direction: u16) {
            const NEXT: u16 = 1;
            const WRITE: u16 = 2;
            const INDIRECT: u16 = 4;
            let long = BUFFERS + 0x10_0000;
            for n in 0..65_535_u16 {
                let piece = Descriptor::new(BUFFERS, 1, direction | NEXT, n + 1);
                let at = GuestAddress(long + u64::from(n) * 16);
                self.memory.write_obj(RawDescriptor::from(piece), at).unwrap();
            }
            let outer = BUFFERS + 0x20_0000;
            let inner = Descriptor::new(long, 160, INDIRECT, 0);
            let at = GuestAddress(outer);
            self.memory.write_obj(RawDescriptor::from(inner), at).unwrap();
            let chains = [
                // Chain with a descriptor loop.
                Descriptor::new(BUFFERS, 64, direction | NEXT, 0),
                // Chains with buffers that cross the end of memory, begin at it, or reach the end
                // of the address space.
                Descriptor::new(MEMORY_BYTES as u64 - 8, 64, direction, 0),
                Descriptor::new(u64::MAX - 8, 64, direction, 0),
                // Chains with a buffer larger than memory, and with an empty one.
                Descriptor::new(BUFFERS, u32::MAX, direction, 0),
                Descriptor::new(BUFFERS, 0, direction, 0),
                // Chain with a buffer of the opposite direction.
                Descriptor::new(BUFFERS, 64, direction ^ WRITE, 0),
                // Chain with a next index outside the descriptor table.
                Descriptor::new(BUFFERS, 0, direction | NEXT, 999),
                // Chains with an indirect table of 65,535 descriptors, a nested table, and tables
                // that are too long, not a multiple of the descriptor size, empty, or outside
                // memory.
                Descriptor::new(long, 65_535 * 16, INDIRECT, 0),
                Descriptor::new(outer, 16, INDIRECT, 0),
                Descriptor::new(long, 65_536 * 16, INDIRECT, 0),
                Descriptor::new(long, 17, INDIRECT, 0),
                Descriptor::new(long, 0, INDIRECT, 0),
                Descriptor::new(u64::MAX - 15, 32, INDIRECT, 0),
                Descriptor::new(GOOD, 256, direction, 0),
            ];
            assert_eq!(chains.len(), usize::from(HOSTILE));
            for (head, chain) in (0..).zip(chains) {
                self.offer_chain(head, &[chain]);
            }
        }

        /// Returns the used ring entries as pairs of head index and bytes written.
        pub(crate) fn used(&self) -> Vec<(u32, u32)> {
            let used = self.mock.used();
            (0..usize::from(u16::from_le(used.idx().load())))
                .map(|n| {
                    let at = self.mock.used_addr().0 + 4 + n as u64 * 8;
                    let pair: [u32; 2] = self.memory.read_obj(GuestAddress(at)).unwrap();
                    (pair[0], pair[1])
                })
                .collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use virtio_queue::desc::split::Descriptor;

    use super::testing::{BUFFERS, Driver, memory};
    use super::*;

    /// Chains that complete within the maximum interrupt delay share an interrupt. A slower chain
    /// has an interrupt of its own.
    #[test]
    fn fast_chains_are_coalesced_and_slow_ones_are_not() {
        for (step, interrupts) in [
            (Duration::ZERO, 1),
            (MAX_INTERRUPT_DELAY / 2, 3),
            (MAX_INTERRUPT_DELAY, 5),
        ] {
            let memory = memory();
            let mut driver = Driver::new(&memory, 16);
            for head in 0..5 {
                driver.offer_chain(head, &[Descriptor::new(BUFFERS, 8, 2, 0)]);
            }
            let (mut written, mut clock) = (10, Instant::now());
            let serve = |chain: GuestDescriptorChain<'_>| {
                assert_eq!(chain.count(), 1);
                written += 1;
                written
            };
            let now = || {
                clock += step;
                clock
            };
            serve_with_clock(&mut driver.active, &memory, || true, serve, now).unwrap();
            assert_eq!(driver.used(), [(0, 11), (1, 12), (2, 13), (3, 14), (4, 15)]);
            assert_eq!(driver.vector.read().unwrap(), interrupts, "{step:?}");
            assert!(driver.active.kick.read().is_err());
        }
    }

    #[test]
    fn empty_queue_raises_no_interrupt() {
        let memory = memory();
        let mut driver = Driver::new(&memory, 16);
        serve_queue(&mut driver.active, &memory, |_| panic!("there is no chain")).unwrap();
        assert!(driver.vector.read().is_err());
    }

    /// Runs [`serve_queue`] with a stopped clock. On a busy host, the call could otherwise time out
    /// between two chains.
    fn serve_with_stopped_clock(
        active: &mut ActiveQueue,
        memory: &GuestMemoryMmap,
        serve: impl FnMut(GuestDescriptorChain<'_>) -> u32,
    ) -> Result<(), VirtqueueError> {
        let start = Instant::now();
        serve_with_clock(active, memory, || true, serve, || start)
    }

    #[test]
    fn full_queue_ends_round_and_kicks_again() {
        let memory = memory();
        let mut driver = Driver::new(&memory, 4);
        for head in 0..4 {
            driver.offer_chain(head, &[Descriptor::new(BUFFERS, 8, 2, 0)]);
        }
        serve_with_stopped_clock(&mut driver.active, &memory, |_| 0).unwrap();
        assert_eq!(driver.active.kick.read().unwrap(), 1);
    }

    /// A device's worker can be stopped as soon as the chain in progress is completed, because a
    /// call processes a queue for a limited time.
    #[test]
    fn long_round_is_interrupted_and_continued() {
        let memory = memory();
        let mut driver = Driver::new(&memory, 16);
        for head in 0..5 {
            driver.offer_chain(head, &[Descriptor::new(BUFFERS, 8, 2, 0)]);
        }
        let mut served = 0;
        serve_queue(&mut driver.active, &memory, |_| {
            served += 1;
            std::thread::sleep(MAX_ROUND);
            0
        })
        .unwrap();
        assert_eq!((served, driver.used().len()), (1, 1));
        assert_eq!(driver.active.kick.read().unwrap(), 1, "the rest comes next");
        assert_eq!(driver.vector.read().unwrap(), 1, "and the first is told");
        serve_with_stopped_clock(&mut driver.active, &memory, |_| 0).unwrap();
        assert_eq!(driver.used().len(), 5);
    }

    #[test]
    fn invalid_ring_is_an_error_after_signalling() {
        let memory = memory();
        let mut driver = Driver::new(&memory, 4);
        driver.offer_chain(0, &[Descriptor::new(BUFFERS, 8, 2, 0)]);
        driver.offer(4);
        let error = serve_with_stopped_clock(&mut driver.active, &memory, |_| 8).unwrap_err();
        assert!(
            matches!(error, VirtqueueError::Head { head: 4, size: 4 }),
            "{error}"
        );
        assert_eq!((driver.used(), driver.vector.read().unwrap()), (vec![(0, 8)], 1));
        // Break the ring: the available index exceeds the queue size.
        driver.mock.avail().idx().store(100u16.to_le());
        let error = serve_with_stopped_clock(&mut driver.active, &memory, |_| 8).unwrap_err();
        assert!(matches!(error, VirtqueueError::Rings(_)), "{error}");
    }
}
