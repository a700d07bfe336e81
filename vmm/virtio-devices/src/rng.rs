//! Entropy device (virtio 1.2, 5.4), backed by the host kernel's random number generator.

use std::fs::File;
use std::io;

use diagnostics::{error_line, guest_log};
use event_manager::{EventOps, Events, MutEventSubscriber};
use sandbox::ThreadKind;
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
use vm_memory::{Bytes, GuestMemoryMmap};
use vmm_sys_util::epoll::EventSet;

use crate::device::{ActivateError, Activation, ActiveQueue, ConfigChangeNotifier, VirtioDevice};
use crate::serve::{GuestDescriptorChain, log_driver_error, serve_queue};
use crate::worker::DeviceWorker;

/// Source of the random bytes. Reads never block once the host has booted.
const SOURCE: &str = "/dev/urandom";
/// Queue size. Linux uses one entry at a time.
const QUEUE_SIZE: u16 = 16;
/// Maximum number of bytes written per chain. A driver requests more with further chains (5.4.6.1).
pub const MAX_CHAIN_BYTES: usize = 4096;

/// A virtio entropy device.
#[derive(Debug)]
pub struct EntropyDevice {
    source: File,
    worker: Option<DeviceWorker>,
}

impl EntropyDevice {
    /// Creates an entropy device that reads the host's `/dev/urandom`.
    ///
    /// # Errors
    /// Returns an error if `/dev/urandom` cannot be opened.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            source: File::open(SOURCE)?,
            worker: None,
        })
    }
}

impl VirtioDevice for EntropyDevice {
    fn id(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn name(&self) -> &str {
        "rng0"
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn read_config(&self, _: u64, data: &mut [u8]) {
        data.fill(0);
    }

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let [Some(queue)] = <[_; 1]>::try_from(activation.queues)
            .map_err(|_| ActivateError::Driver("another number of queues"))?
        else {
            return Err(ActivateError::Driver("entropy without its queue"));
        };
        let host = |what| move |source| ActivateError::Host { what, source };
        let server = EntropyHandler {
            source: self.source.try_clone().map_err(host("dup"))?,
            queue,
            memory: activation.memory,
            config_change: activation.config_change,
            broken: false,
        };
        let worker = DeviceWorker::spawn(
            ThreadKind::Device,
            self.name(),
            server,
            activation.fatal_error_callback,
        );
        self.worker = Some(worker.map_err(host("starting a thread"))?);
        Ok(())
    }

    fn reset(&mut self) {
        self.worker = None;
    }
}

struct EntropyHandler {
    source: File,
    queue: ActiveQueue,
    memory: GuestMemoryMmap,
    config_change: ConfigChangeNotifier,
    broken: bool,
}

impl EntropyHandler {
    fn serve(&mut self) {
        let (memory, source) = (&self.memory, &mut self.source);
        let served = serve_queue(&mut self.queue, memory, |chain| fill(source, memory, chain));
        if let Err(error) = served {
            log_driver_error("rng0", "it stops until it is reset", &error);
            self.broken = true;
            self.config_change.needs_reset();
        }
    }
}

/// Fills the buffers of a chain with random bytes and returns the number of bytes written.
#[expect(clippy::cast_possible_truncation, reason = "at most MAX_CHAIN_BYTES")]
pub fn fill(source: &mut File, memory: &GuestMemoryMmap, chain: GuestDescriptorChain<'_>) -> u32 {
    let mut left = MAX_CHAIN_BYTES;
    for buffer in chain.writable() {
        let count = left.min(buffer.len() as usize);
        match memory.read_volatile_from(buffer.addr(), source, count) {
            Ok(read) if read == count => left -= read,
            Ok(read) => {
                left -= read;
                break;
            }
            // The buffer is outside guest RAM, which is a driver error.
            Err(_) => break,
        }
        if left == 0 {
            break;
        }
    }
    (MAX_CHAIN_BYTES - left) as u32
}

impl MutEventSubscriber for EntropyHandler {
    fn process(&mut self, _: Events, _: &mut EventOps) {
        let _ = self.queue.kick.read();
        if !self.broken {
            self.serve();
        }
    }

    fn init(&mut self, ops: &mut EventOps) {
        if let Err(error) = ops.add(Events::new(&*self.queue.kick, EventSet::IN)) {
            guest_log!(Error, "rng0 cannot receive notifications: {}", error_line(&error));
        }
    }
}

#[cfg(test)]
mod tests {
    use virtio_queue::desc::split::Descriptor;
    use vm_memory::GuestAddress;

    use super::*;
    use crate::serve::testing::{BUFFERS, Driver, HOSTILE, activation, memory};

    #[test]
    fn broken_ring_requests_reset() {
        let memory = memory();
        let mut driver = Driver::new(&memory, 16);
        // The head index is outside the descriptor table.
        driver.offer(16);
        let (activation, seen) = activation(&memory, vec![Some(driver.active())]);
        let mut rng = EntropyDevice::new().unwrap();
        rng.activate(activation).unwrap();
        driver.active.kick.write(1).unwrap();
        seen.changed.read().unwrap();
        assert!(seen.needs_reset.load(std::sync::atomic::Ordering::Acquire));
        rng.reset();
    }

    fn serve(memory: &GuestMemoryMmap, chain: &[Descriptor]) -> u32 {
        let mut driver = Driver::new(memory, 64);
        driver.write(0, chain);
        driver.offer(0);
        let mut source = File::open(SOURCE).unwrap();
        serve_queue(&mut driver.active, memory, |chain| {
            fill(&mut source, memory, chain)
        })
        .unwrap();
        let used = driver.used();
        assert_eq!((used.len(), used[0].0), (1, 0));
        used[0].1
    }

    #[test]
    fn buffers_are_filled_with_random_bytes() {
        let memory = memory();
        let chain = [
            Descriptor::new(BUFFERS, 32, 3, 1),
            Descriptor::new(BUFFERS + 64, 32, 2, 0),
        ];
        assert_eq!(serve(&memory, &chain), 64);
        let read = |at| memory.read_obj::<[u8; 32]>(GuestAddress(at)).unwrap();
        assert_ne!(read(BUFFERS), [0; 32]);
        assert_ne!(read(BUFFERS), read(BUFFERS + 64));
        assert_eq!(read(BUFFERS + 32), [0; 32]);
    }

    #[test]
    fn hostile_chains_are_filled_within_limit() {
        let memory = memory();
        // A descriptor loop, an oversized buffer, a buffer outside RAM and a read-only buffer.
        assert_eq!(serve(&memory, &[Descriptor::new(BUFFERS, 100, 3, 0)]), 4096);
        assert_eq!(serve(&memory, &[Descriptor::new(BUFFERS, u32::MAX, 2, 0)]), 4096);
        assert_eq!(serve(&memory, &[Descriptor::new(u64::MAX - 8, 100, 2, 0)]), 0);
        assert_eq!(serve(&memory, &[Descriptor::new(BUFFERS, 100, 0, 0)]), 0);
    }

    /// Hostile chains (loops, indirect tables of 65,535 entries, nested tables, buffers outside
    /// RAM) are returned as used, and the valid chain after them is filled.
    #[test]
    fn hostile_chains_do_not_block_entropy() {
        let memory = memory();
        let mut driver = Driver::new(&memory, 64);
        driver.offer_hostile(2);
        let mut source = File::open(SOURCE).unwrap();
        for _ in 0..HOSTILE {
            serve_queue(&mut driver.active, &memory, |chain| {
                fill(&mut source, &memory, chain)
            })
            .unwrap();
        }
        let used = driver.used();
        assert!(
            used.iter().map(|(head, _)| *head).eq(0..u32::from(HOSTILE)),
            "{used:?}"
        );
        assert!(
            used.iter().all(|(_, bytes)| *bytes as usize <= MAX_CHAIN_BYTES),
            "{used:?}"
        );
        // Nothing is written to read-only buffers or to addresses outside RAM.
        assert_eq!([used[2].1, used[4].1, used[5].1, used[12].1], [0; 4], "{used:?}");
        assert_eq!(used.last(), Some(&(13, 256)));
    }
}
