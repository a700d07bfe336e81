//! Virtio block device (virtio-blk; virtio 1.2, 5.2), backed by an image file or a host block
//! device.
//!
//! | module | contents |
//! |---|---|
//! | [`config`] | configuration (`--disk`) |
//! | [`image`] | disk image, independent of its format |
//! | [`open`] | opening and locking of image files |
//! | [`raw`] | raw images, with direct transfers from and to guest memory |
//! | [`qcow2`] | qcow2 images and their backing files |
//! | [`view`] | read-only access to an image that a VM may be using |
//! | `prefetch` | look-ahead in the queue |
//! | [`request`] | request parsing and execution |
//!
//! The disk's thread processes requests sequentially, at the pace of its rate limiter. Data of a
//! raw disk is not copied by the VMM: the kernel transfers it directly from and to guest memory. If
//! reads miss the host's page cache, the thread prefetches the data of the reads in the queue.

pub mod config;
pub mod image;
pub mod open;
mod prefetch;
pub mod qcow2;
pub mod raw;
pub mod request;
pub mod view;

#[cfg(test)]
mod tests;

use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use diagnostics::{error_line, guest_log};
use event_manager::{EventOps, Events, MutEventSubscriber};
use sandbox::SandboxedThreadKind;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use vm_memory::GuestMemoryMmap;

use self::config::{DiskConfig, MAX_SERIAL};
use self::image::{DiskImage, DiskImageError};
use self::open::{FileLock, SECTOR_BYTES};
use self::prefetch::ReadPrefetcher;
use self::request::{
    BlockRequestError, DiskBackend, MAX_RANGE_SECTORS, MAX_RANGES, MAX_SEGMENT_BYTES, MAX_SEGMENTS,
};
use crate::device::{
    ActivateError, ActiveQueue, ConfigChangeNotifier, DeviceActivation, VirtioDevice, read_config_bytes,
};
use crate::rate_limiter::RateLimiter;
use crate::serve::{request_reset_if_broken, serve_queue_while};
use crate::worker::{DeviceWorker, watch_readable};

/// Maximum size of the queue, in entries. Even a request with the maximum number of segments does
/// not need indirect descriptors.
const QUEUE_SIZE: u16 = 256;
/// Size of the device configuration (virtio 1.2, 5.2.4), in bytes. Trailing fields of unsupported
/// features are omitted.
const CONFIG_BYTES: usize = 60;
/// Minimum interval between two log messages about failed requests of the same disk.
const MIN_MESSAGE_INTERVAL: Duration = Duration::from_secs(60);

/// A virtio block device.
#[derive(Debug)]
pub struct BlockDevice {
    name: String,
    image: Arc<DiskImage>,
    serial: [u8; MAX_SERIAL],
    config: [u8; CONFIG_BYTES],
    limiter: Option<Arc<RateLimiter>>,
    worker: Option<DeviceWorker>,
    said: LastFailureMessage,
}

/// Time of the last log message about a failed request. Kept across device resets.
type LastFailureMessage = Arc<Mutex<Option<Instant>>>;

impl BlockDevice {
    /// Opens and locks the image of `config` as disk `name`.
    ///
    /// # Errors
    /// Returns a [`DiskImageError`] if the image cannot be used.
    pub fn open(name: String, config: &DiskConfig) -> Result<Self, DiskImageError> {
        let image = DiskImage::open(config)?;
        let mut serial = [0; MAX_SERIAL];
        let text = config.serial.as_ref().unwrap_or(&name).as_bytes();
        let count = text.len().min(MAX_SERIAL);
        serial[..count].copy_from_slice(&text[..count]);
        Ok(Self {
            name,
            config: configuration(&image),
            image: Arc::new(image),
            serial,
            limiter: None,
            worker: None,
            said: LastFailureMessage::default(),
        })
    }

    /// Sets the rate limiter of the device's requests and data.
    #[must_use]
    pub fn with_limiter(mut self, limiter: RateLimiter) -> Self {
        self.limiter = Some(Arc::new(limiter));
        self
    }
}

/// Returns the virtio-blk device configuration for `image`.
#[expect(
    clippy::cast_possible_truncation,
    reason = "small constants, and clusters of 2 MiB at most"
)]
fn configuration(image: &DiskImage) -> [u8; CONFIG_BYTES] {
    let mut config = [0; CONFIG_BYTES];
    let mut put = |at: usize, bytes: &[u8]| config[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &image.sectors().to_le_bytes());
    put(8, &MAX_SEGMENT_BYTES.to_le_bytes());
    put(12, &(MAX_SEGMENTS as u32).to_le_bytes());
    put(20, &image.block_bytes().to_le_bytes());
    for at in [36, 48] {
        put(at, &MAX_RANGE_SECTORS.to_le_bytes());
        put(at + 4, &(MAX_RANGES as u32).to_le_bytes());
    }
    // Report the size below which a discard deallocates no space. Write-zeroes requests may still
    // deallocate space below this size.
    let discard = image.discard_bytes().unwrap_or(SECTOR_BYTES) / SECTOR_BYTES;
    put(44, &(discard as u32).to_le_bytes());
    put(56, &[1]);
    config
}

impl VirtioDevice for BlockDevice {
    fn id(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn name(&self) -> &str {
        &self.name
    }

    fn features(&self) -> u64 {
        let always = 1 << VIRTIO_BLK_F_SIZE_MAX
            | 1 << VIRTIO_BLK_F_SEG_MAX
            | 1 << VIRTIO_BLK_F_BLK_SIZE
            | 1 << VIRTIO_BLK_F_FLUSH;
        let discard = self
            .image
            .discard_bytes()
            .map_or(0, |_| 1 << VIRTIO_BLK_F_DISCARD);
        always
            | discard
            | if self.image.read_only() {
                1 << VIRTIO_BLK_F_RO
            } else {
                1 << VIRTIO_BLK_F_WRITE_ZEROES
            }
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &[QUEUE_SIZE]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.config, offset, data);
    }

    fn unsupported_in_snapshot(&self) -> Option<&'static str> {
        None
    }

    /// Returns the device configuration, which contains the size of the disk, and the serial
    /// number.
    fn identity(&self) -> Vec<u8> {
        [&self.config[..], &self.serial].concat()
    }

    fn rate_limiters(&self) -> Vec<(String, Arc<RateLimiter>)> {
        let limiter = self.limiter.iter();
        limiter
            .map(|limiter| (self.name.clone(), limiter.clone()))
            .collect()
    }

    fn activate(&mut self, activation: DeviceActivation) -> Result<(), ActivateError> {
        let [Some(queue)] = <[_; 1]>::try_from(activation.queues)
            .map_err(|_| ActivateError::Driver("another number of queues"))?
        else {
            return Err(ActivateError::Driver("a disk without its queue"));
        };
        let server = BlockHandler {
            name: self.name.clone(),
            disk: DiskBackend {
                image: self.image.clone(),
                serial: self.serial,
                write_through: activation.features & 1 << VIRTIO_BLK_F_FLUSH == 0,
            },
            // Prefetching would exceed a rate limit.
            prefetcher: match self.limiter {
                None => ReadPrefetcher::new(&queue.queue),
                Some(_) => None,
            },
            queue,
            memory: activation.memory,
            config_change: activation.config_change,
            limiter: self.limiter.clone(),
            broken: false,
            said: self.said.clone(),
        };
        let callback = activation.fatal_error_callback;
        self.worker = Some(DeviceWorker::spawn(
            SandboxedThreadKind::Device,
            &self.name,
            server,
            callback,
        )?);
        Ok(())
    }

    fn share(&mut self) -> io::Result<()> {
        self.image.writer_lock().map_or(Ok(()), FileLock::share)
    }

    fn claim(&mut self) -> io::Result<bool> {
        self.image.writer_lock().map_or(Ok(true), FileLock::claim)
    }

    fn release(&mut self) -> io::Result<()> {
        self.image.writer_lock().map_or(Ok(()), FileLock::release)
    }

    fn reset(&mut self) {
        self.worker = None;
        if let Err(error) = self.image.write_back()
            && is_due(&self.said)
        {
            let why = error_line(&error);
            guest_log!(
                Warn,
                "{}: the last writes may not be in the image: {why}",
                self.name
            );
        }
    }
}

struct BlockHandler {
    name: String,
    disk: DiskBackend,
    queue: ActiveQueue,
    prefetcher: Option<ReadPrefetcher>,
    memory: GuestMemoryMmap,
    config_change: ConfigChangeNotifier,
    limiter: Option<Arc<RateLimiter>>,
    broken: bool,
    said: LastFailureMessage,
}

impl BlockHandler {
    fn serve(&mut self) {
        let mut failed: Option<io::Error> = None;
        let (disk, memory, limiter) = (&self.disk, &self.memory, self.limiter.as_deref());
        let prefetcher = &mut self.prefetcher;
        let admits = || limiter.is_none_or(RateLimiter::admit);
        let served = serve_queue_while(&mut self.queue, memory, admits, |chain| {
            if let Some(prefetcher) = prefetcher {
                prefetcher.before_request(disk, memory, |at, bytes| disk.image.prefetch(at, bytes));
            }
            let request = disk.serve(memory, chain);
            if let Some(prefetcher) = prefetcher {
                prefetcher.after_request(request.missed);
            }
            if let Some(limiter) = limiter {
                limiter.charge(request.transferred);
            }
            if let Err(BlockRequestError::Host(error)) = request.outcome {
                failed.get_or_insert(error);
            }
            request.written
        });
        if let Some(error) = failed
            && is_due(&self.said)
        {
            let why = error_line(&error);
            guest_log!(Warn, "{}: the guest gets I/O errors: {why}", self.name);
        }
        self.broken = request_reset_if_broken(&self.name, served, &self.config_change);
    }
}

/// Returns whether [`MIN_MESSAGE_INTERVAL`] has elapsed since the last message at `said`. If so,
/// sets `said` to the current time.
fn is_due(said: &Mutex<Option<Instant>>) -> bool {
    let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
    let due = said.is_none_or(|said| said.elapsed() >= MIN_MESSAGE_INTERVAL);
    if due {
        *said = Some(Instant::now());
    }
    due
}

impl MutEventSubscriber for BlockHandler {
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
        watch_readable(ops, &self.name, timer.chain([self.queue.kick.as_raw_fd()]));
    }
}
