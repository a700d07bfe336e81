//! Entropy device (virtio 1.2, 5.4), backed by the host kernel's random number generator.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use event_manager::{EventOps, Events, MutEventSubscriber};
use sandbox::SandboxedThreadKind;
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;
use vm_memory::{Bytes, GuestMemoryMmap};

use crate::device::{ActivateError, ActiveQueue, ConfigChangeNotifier, DeviceActivation, VirtioDevice};
use crate::rate_limiter::RateLimiter;
use crate::serve::{GuestDescriptorChain, request_reset_if_broken, serve_queue_while};
use crate::worker::{DeviceWorker, watch_readable};

/// Source of the random bytes. Reading it never blocks after the host has booted.
const SOURCE: &str = "/dev/urandom";
/// Maximum size of the queue, in entries. Linux uses one entry at a time.
const QUEUE_SIZE: u16 = 16;
/// Maximum number of bytes written to a descriptor chain. A driver can request more with further
/// chains (virtio 1.2, 5.4.6.1).
pub const MAX_CHAIN_BYTES: usize = 4096;

/// A virtio entropy device.
#[derive(Debug)]
pub struct EntropyDevice {
    source: File,
    limiter: Option<Arc<RateLimiter>>,
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
            limiter: None,
            worker: None,
        })
    }

    /// Sets the rate limiter of requests and bytes.
    #[must_use]
    pub fn with_limiter(mut self, limiter: RateLimiter) -> Self {
        self.limiter = Some(Arc::new(limiter));
        self
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

    fn unsupported_in_snapshot(&self) -> Option<&'static str> {
        None
    }

    fn rate_limiters(&self) -> Vec<(String, Arc<RateLimiter>)> {
        let limiter = self.limiter.iter();
        limiter
            .map(|limiter| (self.name().to_owned(), limiter.clone()))
            .collect()
    }

    fn activate(&mut self, activation: DeviceActivation) -> Result<(), ActivateError> {
        let [Some(queue)] = <[_; 1]>::try_from(activation.queues)
            .map_err(|_| ActivateError::Driver("another number of queues"))?
        else {
            return Err(ActivateError::Driver("entropy without its queue"));
        };
        let server = EntropyHandler {
            source: (self.source.try_clone())
                .map_err(|source| ActivateError::Host { what: "dup", source })?,
            queue,
            memory: activation.memory,
            config_change: activation.config_change,
            limiter: self.limiter.clone(),
            broken: false,
        };
        let callback = activation.fatal_error_callback;
        self.worker = Some(DeviceWorker::spawn(
            SandboxedThreadKind::Device,
            "rng0",
            server,
            callback,
        )?);
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
    limiter: Option<Arc<RateLimiter>>,
    broken: bool,
}

impl EntropyHandler {
    fn serve(&mut self) {
        let (memory, source, limiter) = (&self.memory, &mut self.source, self.limiter.as_deref());
        let admits = || limiter.is_none_or(RateLimiter::admit);
        let served = serve_queue_while(&mut self.queue, memory, admits, |chain| {
            let written = fill(source, memory, chain);
            if let Some(limiter) = limiter {
                limiter.charge(written.into());
            }
            written
        });
        self.broken = request_reset_if_broken("rng0", served, &self.config_change);
    }
}

/// Fills the buffers of a descriptor chain with random bytes and returns the number of bytes
/// written.
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
    fn process(&mut self, events: Events, _: &mut EventOps) {
        match &self.limiter {
            Some(limiter) if events.fd() == limiter.as_raw_fd() => limiter.handle_timer(),
            _ => drop(self.queue.kick.read()),
        }
        if !self.broken {
            self.serve();
        }
    }

    fn init(&mut self, ops: &mut EventOps) {
        let timer = self.limiter.iter().map(AsRawFd::as_raw_fd);
        watch_readable(ops, "rng0", timer.chain([self.queue.kick.as_raw_fd()]));
    }
}

#[cfg(test)]
mod tests {
    use virtio_queue::desc::split::Descriptor;
    use vm_memory::GuestAddress;

    use super::*;
    use crate::serve::serve_queue;
    use crate::serve::testing::{BUFFERS, Driver, HOSTILE, activate, memory};

    #[test]
    fn broken_ring_requests_reset() {
        let memory = memory();
        let mut driver = Driver::new(&memory, 16);
        // Break the queue: the head index is outside the descriptor table.
        driver.offer(16);
        let mut rng = EntropyDevice::new().unwrap();
        let seen = activate(&mut rng, &driver);
        driver.kick();
        seen.changed.read().unwrap();
        assert!(seen.needs_reset());
        rng.reset();
    }

    /// An entropy device that was stopped for a snapshot continues with the first chain that it has
    /// not returned to the driver.
    #[test]
    fn stopped_device_continues_at_the_used_ring() {
        let memory = memory();
        let mut driver = Driver::new(&memory, 64);
        let mut rng = EntropyDevice::new().unwrap();
        let mut offered = 0;
        for _ in 0..5 {
            let _seen = activate(&mut rng, &driver);
            for _ in 0..3 {
                driver.offer_chain(offered, &[Descriptor::new(BUFFERS, 16, 2, 0)]);
                offered += 1;
            }
            driver.kick();
            // The device may be stopped before, between and after chains.
            if offered % 2 == 0 {
                driver.vector.read().ok();
            } else {
                driver.wait_until_used(offered.into());
            }
            rng.reset();
        }
        let _seen = activate(&mut rng, &driver);
        driver.kick();
        driver.wait_until_used(offered.into());
        rng.reset();
        let heads = driver.used().into_iter().map(|(head, _)| head);
        assert!(heads.eq(0..u32::from(offered)), "each chain once and in order");
    }

    #[test]
    fn limited_entropy_is_provided_by_the_timer() {
        let memory = memory();
        let mut driver = Driver::new(&memory, 64);
        let limiter = RateLimiter::new("bandwidth=64/20".parse().unwrap()).unwrap();
        let mut rng = EntropyDevice::new().unwrap().with_limiter(limiter);
        let _seen = activate(&mut rng, &driver);
        let start = std::time::Instant::now();
        for head in 0..8 {
            driver.offer_chain(head, &[Descriptor::new(BUFFERS, 64, 2, 0)]);
        }
        driver.kick();
        driver.wait_until_used(8);
        assert!(start.elapsed() >= std::time::Duration::from_millis(120));
        assert!(rng.rate_limiters()[0].1.throttled() >= 6);
        rng.reset();
    }

    fn serve(memory: &GuestMemoryMmap, chain: &[Descriptor]) -> u32 {
        let mut driver = Driver::new(memory, 64);
        driver.offer_chain(0, chain);
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
        // Malformed chains: a descriptor loop, an oversized buffer, a buffer outside RAM, and a
        // read-only buffer.
        assert_eq!(serve(&memory, &[Descriptor::new(BUFFERS, 100, 3, 0)]), 4096);
        assert_eq!(serve(&memory, &[Descriptor::new(BUFFERS, u32::MAX, 2, 0)]), 4096);
        assert_eq!(serve(&memory, &[Descriptor::new(u64::MAX - 8, 100, 2, 0)]), 0);
        assert_eq!(serve(&memory, &[Descriptor::new(BUFFERS, 100, 0, 0)]), 0);
    }

    /// Malformed entropy requests (loops, indirect tables of 65,535 entries, nested tables, buffers
    /// outside RAM) are returned to the driver, and the valid chain after them is filled.
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
        driver.assert_hostile_used(MAX_CHAIN_BYTES, 256);
    }
}
