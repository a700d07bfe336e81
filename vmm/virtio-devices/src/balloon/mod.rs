//! Balloon device (virtio 1.2, 5.5), with which a guest returns memory to the host.
//!
//! | module | contents |
//! |---|---|
//! | this module | the device and its thread |
//! | [`config`] | the option `--balloon` |
//! | [`control`] | target, actual size and statistics, for operators |
//! | [`pages`] | pages in descriptor chains |
//! | [`release`] | release of pages to the host |
//! | [`statistics`] | memory statistics of the guest |
//!
//! The driver inflates and deflates the balloon towards the target. Inflated pages are released to
//! the host. Deflated pages are allocated again when the guest accesses them, so the device only
//! acknowledges the entries of the deflate queue.
//!
//! The queue of a feature that the driver does not accept has no index. Queues 0 and 1 are
//! therefore inflate and deflate, and the statistics and reporting queues follow without gaps, as
//! in Linux, QEMU and Firecracker.

pub mod config;
pub mod control;
pub mod pages;
pub mod release;
pub mod statistics;

use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use diagnostics::{error_line, guest_log};
use event_manager::{EventOps, Events, MutEventSubscriber};
use sandbox::SandboxedThreadKind;
use virtio_bindings::virtio_ids::VIRTIO_ID_BALLOON;
use virtio_queue::{QueueOwnedT, QueueT};
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::timerfd::TimerFd;

use crate::device::{
    ActivateError, ActiveQueue, ConfigChangeNotifier, DeviceActivation, VirtioDevice, read_config_bytes,
};
use crate::serve::{GuestDescriptorChain, VirtqueueError, request_reset_if_broken, serve_queue};
use crate::worker::{DeviceWorker, watch_readable};
use config::BalloonConfig;
use control::BalloonControl;
use pages::{InflatedPages, PageRange, reported_ranges};
use release::{PageReleaser, RamOrigin};
use statistics::GuestMemoryStatistics;

/// Name of the balloon device in messages and snapshots.
pub const DEVICE_NAME: &str = "balloon0";
/// Number of balloon pages (4 KiB) per MiB.
pub const PAGES_PER_MIB: u32 = 256;

/// Feature bit: the device has a statistics queue (virtio 1.2, 5.5.3).
const VIRTIO_BALLOON_F_STATS_VQ: u32 = 1;
const VIRTIO_BALLOON_F_DEFLATE_ON_OOM: u32 = 2;
const VIRTIO_BALLOON_F_PAGE_REPORTING: u32 = 5;
/// Maximum size of each queue, in entries.
const QUEUE_SIZE: u16 = 128;
/// Maximum sizes of the inflate, deflate, statistics and reporting queues.
const QUEUE_SIZES: [u16; 4] = [QUEUE_SIZE; 4];
/// Delay of the first statistics update after a change of the interval.
const FIRST_UPDATE: Duration = Duration::from_millis(1);

/// A virtio balloon device, which returns guest memory to the host.
#[derive(Debug)]
pub struct BalloonDevice {
    config: BalloonConfig,
    control: Arc<BalloonControl>,
    /// Page releaser. The device's thread locks it while it processes the queues.
    releaser: Arc<Mutex<PageReleaser>>,
    worker: Option<DeviceWorker>,
}

impl BalloonDevice {
    /// Creates a balloon in a guest with `memory_bytes` bytes of memory. `origin` states whether
    /// this memory is new or a private mapping of a snapshot's memory file.
    ///
    /// # Errors
    /// Returns an error if the host has run out of file descriptors.
    pub fn new(config: BalloonConfig, memory_bytes: u64, origin: RamOrigin) -> io::Result<Self> {
        Ok(Self {
            config,
            control: Arc::new(BalloonControl::new(config, memory_bytes)?),
            releaser: Arc::new(Mutex::new(PageReleaser::new(origin))),
            worker: None,
        })
    }

    /// Returns the operator interface of the balloon.
    pub fn control(&self) -> &Arc<BalloonControl> {
        &self.control
    }
}

impl VirtioDevice for BalloonDevice {
    fn id(&self) -> u32 {
        VIRTIO_ID_BALLOON
    }

    fn name(&self) -> &str {
        DEVICE_NAME
    }

    fn features(&self) -> u64 {
        let offered = [
            (VIRTIO_BALLOON_F_STATS_VQ, self.config.has_statistics()),
            (VIRTIO_BALLOON_F_DEFLATE_ON_OOM, self.config.deflate_on_oom),
            (VIRTIO_BALLOON_F_PAGE_REPORTING, self.config.free_page_reporting),
        ];
        offered
            .into_iter()
            .fold(0, |bits, (bit, on)| bits | u64::from(on) << bit)
    }

    fn queue_max_sizes(&self) -> &[u16] {
        let optional = [self.config.has_statistics(), self.config.free_page_reporting];
        &QUEUE_SIZES[..2 + optional.into_iter().filter(|on| *on).count()]
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.control.config_bytes(), offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        self.control.write_config(offset, data);
    }

    fn unsupported_in_snapshot(&self) -> Option<&'static str> {
        None
    }

    fn activate(&mut self, activation: DeviceActivation) -> Result<(), ActivateError> {
        let host = |source| ActivateError::Host {
            what: "timerfd_create",
            source,
        };
        let accepted = |bit: u32| activation.features & 1 << bit != 0;
        let mut queues = activation.queues.into_iter();
        let (Some(inflate), Some(deflate)) = (queues.next().flatten(), queues.next().flatten()) else {
            return Err(ActivateError::Driver("a balloon without one of its queues"));
        };
        let statistics = match accepted(VIRTIO_BALLOON_F_STATS_VQ).then(|| queues.next().flatten()) {
            Some(Some(queue)) => Some(StatisticsQueue::new(queue).map_err(host)?),
            Some(None) => return Err(ActivateError::Driver("statistics without a queue")),
            None => None,
        };
        let reporting = match accepted(VIRTIO_BALLOON_F_PAGE_REPORTING).then(|| queues.next().flatten()) {
            Some(None) => return Err(ActivateError::Driver("free page reporting without a queue")),
            reporting => reporting.flatten(),
        };
        let handler = BalloonHandler {
            inflate,
            deflate,
            statistics,
            reporting,
            inflated: InflatedPages::default(),
            releaser: self.releaser.clone(),
            control: self.control.clone(),
            memory: activation.memory,
            config_change: activation.config_change.clone(),
            broken: false,
        };
        self.control.set_config_notifier(Some(activation.config_change));
        let callback = activation.fatal_error_callback;
        self.worker = Some(DeviceWorker::spawn(
            SandboxedThreadKind::Balloon,
            DEVICE_NAME,
            handler,
            callback,
        )?);
        Ok(())
    }

    fn reset(&mut self) {
        self.quiesce();
        self.control.reset();
    }

    fn quiesce(&mut self) {
        self.control.set_config_notifier(None);
        self.worker = None;
    }

    fn save_state(&self) -> Vec<u8> {
        self.control.save()
    }

    fn restore_state(&mut self, state: &[u8]) -> bool {
        self.control.restore(state)
    }
}

/// The statistics queue. The driver keeps one buffer in the queue. Each time the device returns the
/// buffer, the driver fills it with new statistics and adds it again.
///
/// The device reads the buffer as soon as it is available, but returns it only when the next update
/// is due. The device's position in the available ring therefore always equals its position in the
/// used ring, as a snapshot requires.
struct StatisticsQueue {
    active: ActiveQueue,
    timer: TimerFd,
}

impl StatisticsQueue {
    fn new(active: ActiveQueue) -> io::Result<Self> {
        Ok(Self {
            active,
            timer: TimerFd::new()?,
        })
    }

    /// Returns the statistics in the first buffer of the queue. The buffer remains in the queue.
    fn read(&mut self, memory: &GuestMemoryMmap) -> Result<Option<GuestMemoryStatistics>, VirtqueueError> {
        let Some(chain) = self.active.queue.iter(memory)?.next() else {
            return Ok(None);
        };
        let statistics = GuestMemoryStatistics::read(memory, chain);
        self.active.queue.go_to_previous_position();
        Ok(Some(statistics))
    }

    /// Requests new statistics by returning the buffer in the queue to the driver.
    fn update(&mut self, memory: &GuestMemoryMmap) -> Result<(), VirtqueueError> {
        let ActiveQueue { queue, interrupt, .. } = &mut self.active;
        let Some(chain) = queue.iter(memory)?.next() else {
            return Ok(());
        };
        let (head, size) = (chain.head_index(), queue.size());
        if head >= size {
            return Err(VirtqueueError::Head { head, size });
        }
        queue.add_used(memory, head, 0)?;
        // Enable notifications, so that the driver notifies the device of the next buffer.
        queue.enable_notification(memory)?;
        if queue.needs_notification(memory)? {
            interrupt.raise();
        }
        Ok(())
    }
}

struct BalloonHandler {
    inflate: ActiveQueue,
    deflate: ActiveQueue,
    statistics: Option<StatisticsQueue>,
    reporting: Option<ActiveQueue>,
    inflated: InflatedPages,
    releaser: Arc<Mutex<PageReleaser>>,
    control: Arc<BalloonControl>,
    memory: GuestMemoryMmap,
    config_change: ConfigChangeNotifier,
    broken: bool,
}

impl BalloonHandler {
    /// Processes all requests in the queues of the balloon.
    fn serve(&mut self) -> Result<(), VirtqueueError> {
        let memory = &self.memory;
        let mut releaser = self.releaser.lock().unwrap_or_else(PoisonError::into_inner);
        serve_queue(&mut self.inflate, memory, |chain: GuestDescriptorChain<'_>| {
            let ranges = self.inflated.read(memory, chain);
            release_ranges(&mut releaser, memory, ranges, &self.control);
            0
        })?;
        serve_queue(&mut self.deflate, memory, |_| 0)?;
        if let Some(reporting) = &mut self.reporting {
            serve_queue(reporting, memory, |chain| {
                release_ranges(&mut releaser, memory, reported_ranges(chain), &self.control);
                0
            })?;
        }
        if let Some(queue) = &mut self.statistics
            && let Some(statistics) = queue.read(memory)?
        {
            self.control.set_statistics(statistics);
        }
        Ok(())
    }

    /// Handles an event of the file descriptor `fd`: the statistics timer has expired, or the
    /// statistics interval has changed.
    fn serve_timer(&mut self, fd: i32) -> Result<(), VirtqueueError> {
        let Some(queue) = &mut self.statistics else {
            return Ok(());
        };
        if fd == queue.timer.as_raw_fd() {
            let _ = queue.timer.wait();
            queue.update(&self.memory)?;
        } else if fd == self.control.interval_event().as_raw_fd() {
            let _ = self.control.interval_event().read();
            self.arm(FIRST_UPDATE);
        }
        Ok(())
    }

    /// Arms the statistics timer, which expires after `first` or the configured interval, whichever
    /// is shorter, and then at this interval.
    fn arm(&mut self, first: Duration) {
        let interval = Duration::from_secs(self.control.interval_s().into());
        if let Some(queue) = &mut self.statistics
            && let Err(e) = queue.timer.reset(first.min(interval), Some(interval))
        {
            guest_log!(Warn, "{DEVICE_NAME}: no statistics of the guest: {e}");
        }
    }
}

/// Releases page ranges to the host and adds their size to the number of released bytes.
fn release_ranges(
    releaser: &mut PageReleaser,
    memory: &GuestMemoryMmap,
    ranges: impl Iterator<Item = PageRange>,
    control: &BalloonControl,
) {
    for range in ranges {
        match releaser.release(memory, range) {
            Ok(released) => control.add_released(released),
            Err(error) => {
                let why = error_line(&error);
                guest_log!(Warn, "{DEVICE_NAME}: cannot release pages to the host: {why}");
            }
        }
    }
}

impl MutEventSubscriber for BalloonHandler {
    fn process(&mut self, events: Events, _: &mut EventOps) {
        let queues = [Some(&self.inflate), Some(&self.deflate), self.reporting.as_ref()];
        let statistics = self.statistics.as_ref().map(|queue| &queue.active);
        for queue in queues.into_iter().chain([statistics]).flatten() {
            let _ = queue.kick.read();
        }
        if self.broken {
            return;
        }
        let served = self.serve_timer(events.fd()).and_then(|()| self.serve());
        self.broken = request_reset_if_broken(DEVICE_NAME, served, &self.config_change);
    }

    fn init(&mut self, ops: &mut EventOps) {
        let queues = [Some(&self.inflate), Some(&self.deflate), self.reporting.as_ref()];
        let statistics = self.statistics.as_ref();
        let queues = queues.into_iter().chain([statistics.map(|queue| &queue.active)]);
        let kicks = queues.flatten().map(|queue| queue.kick.as_raw_fd());
        let timers = statistics
            .iter()
            .flat_map(|queue| [queue.timer.as_raw_fd(), self.control.interval_event().as_raw_fd()]);
        watch_readable(ops, DEVICE_NAME, kicks.chain(timers));
        self.arm(Duration::MAX);
    }
}

#[cfg(test)]
mod tests;
