//! A disk (virtio-blk; virtio 1.2, 5.2): an image file or a block device of the host.
//!
//! | module | story |
//! |---|---|
//! | [`config`] | what a user writes behind `--disk` |
//! | [`image`] | the image, whatever its format |
//! | [`open`] | its file: opened, and locked against others |
//! | [`raw`] | a raw image: read and written with guest memory in place |
//! | [`qcow2`] | a qcow2 image and those behind it |
//! | [`view`] | a look at an image that a VM may be using |
//! | [`request`] | a request, from its chain of descriptors to its status |
//!
//! Requests are served one after the other on the disk's thread. Of a raw disk nothing of a request's data is
//! copied or kept by us: the kernel reads and writes guest memory.

pub mod config;
pub mod image;
pub mod open;
pub mod qcow2;
pub mod raw;
pub mod request;
pub mod view;

#[cfg(test)]
mod tests;

use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use event_manager::{EventOps, Events, MutEventSubscriber};
use perf_core::{error_line, guest_log};
use sandbox::ThreadKind;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_RO, VIRTIO_BLK_F_SEG_MAX,
    VIRTIO_BLK_F_SIZE_MAX, VIRTIO_BLK_F_WRITE_ZEROES,
};
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::epoll::EventSet;

use self::config::{DiskConfig, MAX_SERIAL};
use self::image::{Image, ImageError};
use self::open::SECTOR_BYTES;
use self::request::{Disk, Failure, MAX_RANGE_SECTORS, MAX_RANGES, MAX_SEGMENT_BYTES, MAX_SEGMENTS};
use crate::device::{ActivateError, Activation, ActiveQueue, ConfigChange, VirtioDevice, read_config_bytes};
use crate::serve::{serve_queue, tell_of_driver};
use crate::worker::Worker;

/// Entries of the queue: one request of the most pieces needs so many without indirect descriptors.
const QUEUE_SIZE: u16 = 256;
/// Bytes of the configuration (5.2.4), up to the fields of features that we do not have.
const CONFIG_BYTES: usize = 60;
/// A disk that fails is told of once in so long a time.
const SILENCE: Duration = Duration::from_secs(60);

/// The device.
#[derive(Debug)]
pub struct Block {
    name: String,
    image: Arc<Image>,
    serial: [u8; MAX_SERIAL],
    config: [u8; CONFIG_BYTES],
    worker: Option<Worker>,
    said: Said,
}

/// When a failure of the host was told last: kept when the guest resets the device.
type Said = Arc<Mutex<Option<Instant>>>;

impl Block {
    /// The disk `name` of `config`, opened and locked.
    ///
    /// # Errors
    /// [`ImageError`].
    pub fn open(name: String, config: &DiskConfig) -> Result<Self, ImageError> {
        let image = Image::open(config)?;
        let mut serial = [0; MAX_SERIAL];
        let text = config.serial.as_ref().unwrap_or(&name).as_bytes();
        let count = text.len().min(MAX_SERIAL);
        serial[..count].copy_from_slice(&text[..count]);
        Ok(Self {
            name,
            config: configuration(&image),
            image: Arc::new(image),
            serial,
            worker: None,
            said: Said::default(),
        })
    }
}

/// What the driver reads of the disk.
#[expect(
    clippy::cast_possible_truncation,
    reason = "small constants, and clusters of 2 MiB at most"
)]
fn configuration(image: &Image) -> [u8; CONFIG_BYTES] {
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
    // What is smaller keeps its space. Zeros may give it back.
    let discard = image.discard_bytes().unwrap_or(SECTOR_BYTES) / SECTOR_BYTES;
    put(44, &(discard as u32).to_le_bytes());
    put(56, &[1]);
    config
}

impl VirtioDevice for Block {
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

    fn activate(&mut self, activation: Activation) -> Result<(), ActivateError> {
        let [Some(queue)] = <[_; 1]>::try_from(activation.queues)
            .map_err(|_| ActivateError::Driver("another number of queues"))?
        else {
            return Err(ActivateError::Driver("a disk without its queue"));
        };
        let server = Server {
            name: self.name.clone(),
            disk: Disk {
                image: self.image.clone(),
                serial: self.serial,
                write_through: activation.features & 1 << VIRTIO_BLK_F_FLUSH == 0,
            },
            queue,
            memory: activation.memory,
            config_change: activation.config_change,
            broken: false,
            said: self.said.clone(),
        };
        let worker = Worker::spawn(ThreadKind::Device, &self.name, server, activation.last_resort).map_err(
            |source| ActivateError::Host {
                what: "starting a thread",
                source,
            },
        )?;
        self.worker = Some(worker);
        Ok(())
    }

    fn reset(&mut self) {
        self.worker = None;
        if let Err(error) = self.image.write_back()
            && is_due(&self.said)
        {
            let why = error_line(&error);
            guest_log!(
                Warn,
                "{}: its image may lack what was written last: {why}",
                self.name
            );
        }
    }
}

/// What runs on the disk's thread.
struct Server {
    name: String,
    disk: Disk,
    queue: ActiveQueue,
    memory: GuestMemoryMmap,
    config_change: ConfigChange,
    broken: bool,
    said: Said,
}

impl Server {
    fn serve(&mut self) {
        let mut failed: Option<io::Error> = None;
        let (disk, memory) = (&self.disk, &self.memory);
        let served = serve_queue(&mut self.queue, memory, |chain| {
            let (written, outcome) = disk.serve(memory, chain);
            if let Err(Failure::Host(error)) = outcome {
                failed.get_or_insert(error);
            }
            written
        });
        if let Some(error) = failed
            && is_due(&self.said)
        {
            let why = error_line(&error);
            guest_log!(Warn, "{}: the guest gets I/O errors: {why}", self.name);
        }
        if let Err(error) = served {
            tell_of_driver(&self.name, "it stops until it is reset", &error);
            self.broken = true;
            self.config_change.needs_reset();
        }
    }
}

/// Whether enough time has passed to tell again; it has begun anew then.
fn is_due(said: &Mutex<Option<Instant>>) -> bool {
    let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
    let due = said.is_none_or(|said| said.elapsed() >= SILENCE);
    if due {
        *said = Some(Instant::now());
    }
    due
}

impl MutEventSubscriber for Server {
    fn process(&mut self, _: Events, _: &mut EventOps) {
        let _ = self.queue.kick.read();
        if !self.broken {
            self.serve();
        }
    }

    fn init(&mut self, ops: &mut EventOps) {
        if let Err(error) = ops.add(Events::new(&*self.queue.kick, EventSet::IN)) {
            guest_log!(Error, "{} hears no kicks: {}", self.name, error_line(&error));
        }
    }
}
