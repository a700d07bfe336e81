//! Serving a queue: every chain in it once, and one interrupt for all that were served in a short time.

use std::error::Error;
use std::time::{Duration, Instant};

use perf_core::{error_line, guest_log};
use virtio_queue::{DescriptorChain, QueueOwnedT, QueueT};
use vm_memory::GuestMemoryMmap;

use crate::device::ActiveQueue;

/// A chain of descriptors in the guest's memory, which may change at any time.
pub type Chain<'m> = DescriptorChain<&'m GuestMemoryMmap>;

/// The driver broke the rules of queues: nothing more can be had from this one until the device is reset.
#[derive(Debug, thiserror::Error)]
pub enum QueueError {
    /// Its rings make no sense.
    #[error("the driver's queue cannot be worked with")]
    Rings(#[from] virtio_queue::Error),
    /// It offers a chain that the queue cannot have.
    #[error("the driver offers descriptor {head} of a queue of {size}")]
    Head {
        /// The chain's first descriptor.
        head: u16,
        /// The queue's size.
        size: u16,
    },
}

/// Logs how a driver broke its queues, within the limit of [`mod@perf_core::guest_log`].
pub fn tell_of_driver(device: &str, what: &str, error: &dyn Error) {
    guest_log!(Warn, "{device}: {what}: {}", error_line(error));
}

/// How long chains are served one after the other; one that has begun is finished.
const LONGEST_ROUND: Duration = Duration::from_millis(50);

/// How long the driver may be left without an interrupt for what was served, while the rest is. Where a chain
/// takes a few microseconds, an interrupt for each would cost more than the chain; where it takes longer,
/// whoever waits for it does not wait for all others too.
const LONGEST_SILENCE: Duration = Duration::from_micros(50);

/// Serves what is in the queue: `serve` gets each chain and returns how many bytes it wrote to it. The driver
/// is interrupted at the end, and before it if that takes longer than `LONGEST_SILENCE`, if it wants to be.
///
/// It ends after one round of the queue, or after `LONGEST_ROUND`, even if the driver goes on to fill it;
/// then the queue has kicked itself, and the caller's loop comes back after it has looked at its other
/// descriptors: it may be asked to stop.
///
/// # Errors
/// [`QueueError`]; the driver knows of all chains that were served before.
pub fn serve_queue(
    active: &mut ActiveQueue,
    memory: &GuestMemoryMmap,
    serve: impl FnMut(Chain<'_>) -> u32,
) -> Result<(), QueueError> {
    serve_queue_while(active, memory, || true, serve)
}

/// As [`serve_queue`], as long as the device has a use for chains: `wants` is asked before each. Those it has
/// no use for stay in the queue. The driver's kicks may be off afterwards, until the next call.
///
/// # Errors
/// [`QueueError`]; the driver knows of all chains that were served before.
pub fn serve_queue_while(
    active: &mut ActiveQueue,
    memory: &GuestMemoryMmap,
    wants: impl Fn() -> bool,
    serve: impl FnMut(Chain<'_>) -> u32,
) -> Result<(), QueueError> {
    serve_by(active, memory, wants, serve, Instant::now)
}

/// Where a call of [`serve_queue_while`] is.
struct Progress {
    /// Chains that it may still begin.
    left: u16,
    /// When it begins no more.
    end: Instant,
    /// When the driver was last told, or had nothing to be told.
    told: Instant,
    /// Something was served since.
    untold: bool,
}

/// [`serve_queue_while`] by the clock `now`.
fn serve_by(
    active: &mut ActiveQueue,
    memory: &GuestMemoryMmap,
    wants: impl Fn() -> bool,
    mut serve: impl FnMut(Chain<'_>) -> u32,
    mut now: impl FnMut() -> Instant,
) -> Result<(), QueueError> {
    let start = now();
    let mut progress = Progress {
        left: active.queue.size(),
        end: start + LONGEST_ROUND,
        told: start,
        untold: false,
    };
    let outcome = loop {
        active.queue.disable_notification(memory)?;
        match serve_round(active, memory, &mut progress, &wants, &mut serve, &mut now) {
            // It comes back when it has a use for more.
            Ok(()) if !wants() => break Ok(()),
            Ok(()) if progress.left == 0 || now() >= progress.end => {
                // A full counter is a kick too.
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
    if progress.untold {
        tell(active, memory)?;
    }
    outcome
}

/// Interrupts the driver if it wants to be.
fn tell(active: &mut ActiveQueue, memory: &GuestMemoryMmap) -> Result<(), QueueError> {
    if active.queue.needs_notification(memory)? {
        active.interrupt.raise();
    }
    Ok(())
}

/// Serves the chains that are there, as many as may be begun.
fn serve_round(
    active: &mut ActiveQueue,
    memory: &GuestMemoryMmap,
    progress: &mut Progress,
    wants: &impl Fn() -> bool,
    serve: &mut impl FnMut(Chain<'_>) -> u32,
    now: &mut impl FnMut() -> Instant,
) -> Result<(), QueueError> {
    let size = active.queue.size();
    while progress.left > 0
        && wants()
        && let Some(chain) = active.queue.iter(memory)?.next()
    {
        let head = chain.head_index();
        if head >= size {
            return Err(QueueError::Head { head, size });
        }
        let written = serve(chain);
        active.queue.add_used(memory, head, written)?;
        progress.left -= 1;
        let at = now();
        progress.untold = at.duration_since(progress.told) < LONGEST_SILENCE;
        if !progress.untold {
            progress.told = at;
            tell(active, memory)?;
        }
        if at >= progress.end {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod testing {
    //! A queue as a driver makes it, in memory of its own.

    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, AtomicU8};

    use virtio_queue::Queue;
    use virtio_queue::desc::RawDescriptor;
    use virtio_queue::desc::split::Descriptor;
    use virtio_queue::mock::MockSplitQueue;
    use vm_memory::{Bytes, GuestAddress};
    use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

    use super::*;
    use crate::device::{Activation, ConfigChange, Interrupt, LastResort};

    /// Bytes of guest memory; the queue lies at its beginning.
    pub(crate) const MEMORY_BYTES: usize = 4 << 20;
    /// First address that the queue does not use.
    pub(crate) const BUFFERS: u64 = 0x10_0000;

    /// How many chains [`Driver::offer_hostile`] offers, and the address of its last one's buffer.
    pub(crate) const HOSTILE: u16 = 14;
    pub(crate) const GOOD: u64 = BUFFERS + 0x4000;

    pub(crate) fn memory() -> GuestMemoryMmap {
        GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).unwrap()
    }

    /// What a driver sees of a device beside its queues.
    pub(crate) struct Seen {
        /// The interrupt for changes, whose reader waits.
        pub changed: Arc<EventFd>,
        /// DEVICE_NEEDS_RESET.
        pub needs_reset: Arc<AtomicBool>,
    }

    /// What a device gets when a driver with these queues is ready.
    pub(crate) fn activation(
        memory: &GuestMemoryMmap,
        queues: Vec<Option<ActiveQueue>>,
    ) -> (Activation, Seen) {
        let seen = Seen {
            changed: Arc::new(EventFd::new(0).unwrap()),
            needs_reset: Arc::default(),
        };
        let interrupt = Interrupt::new(Some(seen.changed.clone()));
        let generation = Arc::new(AtomicU8::new(0));
        let activation = Activation {
            memory: memory.clone(),
            features: 0,
            queues,
            config_change: ConfigChange::new(generation, seen.needs_reset.clone(), interrupt),
            last_resort: LastResort::default(),
        };
        (activation, seen)
    }

    /// The driver's side of a queue, and the device's.
    pub(crate) struct Driver<'m> {
        pub mock: MockSplitQueue<'m, GuestMemoryMmap>,
        pub active: ActiveQueue,
        pub vector: Arc<EventFd>,
        memory: &'m GuestMemoryMmap,
        offered: u16,
    }

    impl<'m> Driver<'m> {
        /// The device's side, for a device that takes it.
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

        /// With its rings from address `start` on.
        pub(crate) fn at(memory: &'m GuestMemoryMmap, size: u16, start: u64) -> Self {
            let mock = MockSplitQueue::create(memory, GuestAddress(start), size);
            let queue: Queue = mock.create_queue().unwrap();
            let vector = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
            let active = ActiveQueue {
                queue,
                kick: Arc::new(EventFd::new(EFD_NONBLOCK).unwrap()),
                interrupt: Interrupt::new(Some(vector.clone())),
            };
            Self {
                mock,
                active,
                vector,
                memory,
                offered: 0,
            }
        }

        /// Writes descriptors, the first at `head`.
        pub(crate) fn write(&self, head: u16, descriptors: &[Descriptor]) {
            for (at, descriptor) in (head..).zip(descriptors) {
                let table = self.mock.desc_table();
                table.store(at, RawDescriptor::from(*descriptor)).unwrap();
            }
        }

        /// Offers the chain at `head`.
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

        /// Offers chains as no driver makes them, from head 0 on, and a good one of 256 bytes at [`GOOD`]
        /// behind them: [`HOSTILE`] chains in all. `direction` is WRITE for buffers of the device. The queue
        /// has 32 entries or more: in the crate's mock the used ring begins halfway through the available
        /// one.
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
                // Round and round.
                Descriptor::new(BUFFERS, 64, direction | NEXT, 0),
                // Out of memory, at its end and at that of the address space.
                Descriptor::new(MEMORY_BYTES as u64 - 8, 64, direction, 0),
                Descriptor::new(u64::MAX - 8, 64, direction, 0),
                // Longer than memory, and with nothing in it.
                Descriptor::new(BUFFERS, u32::MAX, direction, 0),
                Descriptor::new(BUFFERS, 0, direction, 0),
                // For the other side.
                Descriptor::new(BUFFERS, 64, direction ^ WRITE, 0),
                // On behind the table.
                Descriptor::new(BUFFERS, 0, direction | NEXT, 999),
                // A table of 65,535 pieces, each of which leads to the next; a table in a table; tables that
                // are too long, of a piece and a bit, of nothing, and out of memory.
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
                self.write(head, &[chain]);
                self.offer(head);
            }
        }

        /// What was used so far: heads and bytes written.
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

    /// Whoever waits for a chain waits for that one: a flush behind a long write told of neither before both
    /// were done.
    #[test]
    fn quick_chains_are_one_interrupt_and_slow_ones_are_told_at_once() {
        for (step, interrupts) in [
            (Duration::ZERO, 1),
            (LONGEST_SILENCE / 2, 3),
            (LONGEST_SILENCE, 5),
        ] {
            let memory = memory();
            let mut driver = Driver::new(&memory, 16);
            for head in 0..5 {
                driver.write(head, &[Descriptor::new(BUFFERS, 8, 2, 0)]);
                driver.offer(head);
            }
            let (mut written, mut clock) = (10, Instant::now());
            let serve = |chain: Chain<'_>| {
                assert_eq!(chain.count(), 1);
                written += 1;
                written
            };
            let now = || {
                clock += step;
                clock
            };
            serve_by(&mut driver.active, &memory, || true, serve, now).unwrap();
            assert_eq!(driver.used(), [(0, 11), (1, 12), (2, 13), (3, 14), (4, 15)]);
            assert_eq!(driver.vector.read().unwrap(), interrupts, "{step:?}");
            assert!(driver.active.kick.read().is_err());
        }
    }

    #[test]
    fn nothing_served_is_nothing_told() {
        let memory = memory();
        let mut driver = Driver::new(&memory, 16);
        // Nothing to do, nothing to tell.
        serve_queue(&mut driver.active, &memory, |_| panic!("there is no chain")).unwrap();
        assert!(driver.vector.read().is_err());
    }

    /// [`serve_queue`] by a clock that stands: on a machine that does other work its time could be over
    /// between two chains.
    fn in_no_time(
        active: &mut ActiveQueue,
        memory: &GuestMemoryMmap,
        serve: impl FnMut(Chain<'_>) -> u32,
    ) -> Result<(), QueueError> {
        let start = Instant::now();
        serve_by(active, memory, || true, serve, || start)
    }

    #[test]
    fn a_full_queue_ends_the_round_and_kicks_itself() {
        let memory = memory();
        let mut driver = Driver::new(&memory, 4);
        for head in 0..4 {
            driver.write(head, &[Descriptor::new(BUFFERS, 8, 2, 0)]);
            driver.offer(head);
        }
        in_no_time(&mut driver.active, &memory, |_| 0).unwrap();
        assert_eq!(driver.active.kick.read().unwrap(), 1);
    }

    /// Whoever waits for the thread to stop waits for the chain that is served, not for all that are there.
    #[test]
    fn a_long_round_ends_before_the_queue_does_and_is_gone_on_with() {
        let memory = memory();
        let mut driver = Driver::new(&memory, 16);
        for head in 0..5 {
            driver.write(head, &[Descriptor::new(BUFFERS, 8, 2, 0)]);
            driver.offer(head);
        }
        let mut served = 0;
        serve_queue(&mut driver.active, &memory, |_| {
            served += 1;
            std::thread::sleep(LONGEST_ROUND);
            0
        })
        .unwrap();
        assert_eq!((served, driver.used().len()), (1, 1));
        assert_eq!(driver.active.kick.read().unwrap(), 1, "the rest comes next");
        assert_eq!(driver.vector.read().unwrap(), 1, "and the first is told");
        in_no_time(&mut driver.active, &memory, |_| 0).unwrap();
        assert_eq!(driver.used().len(), 5);
    }

    #[test]
    fn rings_that_make_no_sense_are_an_error_and_what_was_served_is_told() {
        let memory = memory();
        let mut driver = Driver::new(&memory, 4);
        driver.write(0, &[Descriptor::new(BUFFERS, 8, 2, 0)]);
        driver.offer(0);
        driver.offer(4);
        let error = in_no_time(&mut driver.active, &memory, |_| 8).unwrap_err();
        assert!(matches!(error, QueueError::Head { head: 4, size: 4 }), "{error}");
        assert_eq!((driver.used(), driver.vector.read().unwrap()), (vec![(0, 8)], 1));
        // More chains than the queue has entries.
        driver.mock.avail().idx().store(100u16.to_le());
        let error = in_no_time(&mut driver.active, &memory, |_| 8).unwrap_err();
        assert!(matches!(error, QueueError::Rings(_)), "{error}");
    }
}
