//! Operator interface of the balloon: target, actual size, and statistics.

use std::io;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vmm_sys_util::eventfd::{EFD_CLOEXEC, EFD_NONBLOCK, EventFd};

use super::PAGES_PER_MIB;
use super::config::BalloonConfig;
use super::statistics::GuestMemoryStatistics;
use crate::device::ConfigChangeNotifier;

/// Length of the device configuration in bytes: target and actual size in pages (virtio 1.2,
/// 5.5.4).
pub(super) const CONFIG_BYTES: usize = 8;
/// Offset of the actual size in the device configuration. The driver writes this field.
const ACTUAL: usize = 4;
/// Length of the balloon's state in a snapshot, in bytes.
const STATE_BYTES: usize = 10;

/// Error returned when an operator's request to the balloon is rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BalloonRequestError {
    /// The requested size exceeds the guest's memory.
    #[error(
        "a balloon of {size_mib} MiB is larger than the guest's memory of {memory_mib} MiB; use a smaller size"
    )]
    Size {
        /// Requested size of the balloon, in MiB.
        size_mib: u32,
        /// Size of the guest's memory in MiB.
        memory_mib: u64,
    },
    /// The request would enable or disable statistics. Only the initial configuration can do so,
    /// because the driver negotiates statistics when it starts.
    #[error("statistics cannot be enabled or disabled after the start of the VM")]
    StatisticsStateChange,
}

/// State of a balloon, as reported to an operator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BalloonState {
    /// Target size in pages of 4 KiB.
    pub target_pages: u32,
    /// Actual size in pages of 4 KiB, as reported by the driver.
    pub actual_pages: u32,
    /// Configuration of the balloon, with the current target size and statistics interval.
    pub config: BalloonConfig,
    /// Number of bytes released to the host so far. A page that is released several times is
    /// counted each time.
    pub released_bytes: u64,
    /// Memory statistics of the guest, or `None` if the driver has not sent any.
    pub statistics: Option<GuestMemoryStatistics>,
}

/// State of the balloon that the device and its operators share. No method waits for the guest.
#[derive(Debug)]
pub struct BalloonControl {
    config: BalloonConfig,
    memory_mib: u64,
    target_pages: AtomicU32,
    actual_pages: AtomicU32,
    interval_s: AtomicU16,
    released_bytes: AtomicU64,
    statistics: Mutex<Option<GuestMemoryStatistics>>,
    change: Mutex<Option<ConfigChangeNotifier>>,
    /// Eventfd that notifies the device's thread of a new statistics interval.
    interval_event: EventFd,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl BalloonControl {
    /// Creates the state of a balloon in a guest with `memory_bytes` bytes of memory.
    ///
    /// # Errors
    /// Returns an error if the host has run out of file descriptors.
    pub(super) fn new(config: BalloonConfig, memory_bytes: u64) -> io::Result<Self> {
        Ok(Self {
            config,
            memory_mib: memory_bytes >> 20,
            target_pages: AtomicU32::new(config.size_mib.saturating_mul(PAGES_PER_MIB)),
            actual_pages: AtomicU32::new(0),
            interval_s: AtomicU16::new(config.statistics_interval_s),
            released_bytes: AtomicU64::new(0),
            statistics: Mutex::new(None),
            change: Mutex::new(None),
            interval_event: EventFd::new(EFD_NONBLOCK | EFD_CLOEXEC)?,
        })
    }

    /// Returns the current state of the balloon, as reported to an operator.
    pub fn state(&self) -> BalloonState {
        let target_pages = self.target_pages.load(Ordering::Acquire);
        BalloonState {
            target_pages,
            actual_pages: self.actual_pages.load(Ordering::Acquire),
            config: BalloonConfig {
                size_mib: target_pages / PAGES_PER_MIB,
                statistics_interval_s: self.interval_s(),
                ..self.config
            },
            released_bytes: self.released_bytes.load(Ordering::Relaxed),
            statistics: *lock(&self.statistics),
        }
    }

    /// Sets the target size and notifies the driver, which adjusts the balloon as far and as fast
    /// as it can.
    ///
    /// # Errors
    /// Returns [`BalloonRequestError::Size`] if the size exceeds the guest's memory.
    pub fn set_size_mib(&self, size_mib: u32) -> Result<(), BalloonRequestError> {
        if u64::from(size_mib) > self.memory_mib {
            return Err(BalloonRequestError::Size {
                size_mib,
                memory_mib: self.memory_mib,
            });
        }
        let pages = size_mib.saturating_mul(PAGES_PER_MIB);
        if self.target_pages.swap(pages, Ordering::AcqRel) != pages
            && let Some(change) = &*lock(&self.change)
        {
            change.notify();
        }
        Ok(())
    }

    /// Sets the interval between two updates of the statistics. The first update follows
    /// immediately.
    ///
    /// # Errors
    /// Returns [`BalloonRequestError::StatisticsStateChange`] if this enables or disables
    /// statistics.
    pub fn set_statistics_interval(&self, seconds: u16) -> Result<(), BalloonRequestError> {
        if (seconds > 0) != self.config.has_statistics() {
            return Err(BalloonRequestError::StatisticsStateChange);
        }
        if self.interval_s.swap(seconds, Ordering::AcqRel) != seconds {
            // The write fails only if the counter is full, in which case a wake-up is already
            // pending.
            let _ = self.interval_event.write(1);
        }
        Ok(())
    }

    pub(super) fn interval_s(&self) -> u16 {
        self.interval_s.load(Ordering::Acquire)
    }

    pub(super) fn interval_event(&self) -> &EventFd {
        &self.interval_event
    }

    pub(super) fn set_config_notifier(&self, change: Option<ConfigChangeNotifier>) {
        *lock(&self.change) = change;
    }

    pub(super) fn set_statistics(&self, statistics: GuestMemoryStatistics) {
        *lock(&self.statistics) = Some(statistics);
    }

    pub(super) fn add_released(&self, bytes: u64) {
        self.released_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Discards the actual size and the statistics that the driver has reported, because a new
    /// driver starts with an empty balloon.
    pub(super) fn reset(&self) {
        self.actual_pages.store(0, Ordering::Release);
        *lock(&self.statistics) = None;
    }

    /// Returns the device configuration: target and actual size in pages.
    pub(super) fn config_bytes(&self) -> [u8; CONFIG_BYTES] {
        let target = u64::from(self.target_pages.load(Ordering::Acquire));
        let actual = u64::from(self.actual_pages.load(Ordering::Acquire));
        (target | actual << 32).to_le_bytes()
    }

    /// Handles a configuration write by the driver, of any length at any offset. Only the actual
    /// size is writable.
    pub(super) fn write_config(&self, offset: u64, data: &[u8]) {
        let mut config = self.config_bytes();
        for (at, byte) in data.iter().enumerate() {
            let at = usize::try_from(offset)
                .ok()
                .and_then(|offset| offset.checked_add(at));
            if let Some(at) = at.filter(|at| (ACTUAL..CONFIG_BYTES).contains(at)) {
                config[at] = *byte;
            }
        }
        let [.., a, b, c, d] = config;
        self.actual_pages
            .store(u32::from_le_bytes([a, b, c, d]), Ordering::Release);
    }

    /// Returns the state of the balloon for a snapshot.
    pub(super) fn save(&self) -> Vec<u8> {
        let mut state = self.config_bytes().to_vec();
        state.extend_from_slice(&self.interval_s().to_le_bytes());
        state
    }

    /// Restores a state from a snapshot. Returns `false` if the state is invalid for this
    /// configuration.
    pub(super) fn restore(&self, state: &[u8]) -> bool {
        let Ok([t0, t1, t2, t3, a0, a1, a2, a3, i0, i1]) = <[u8; STATE_BYTES]>::try_from(state) else {
            return false;
        };
        let target = u32::from_le_bytes([t0, t1, t2, t3]);
        let interval_s = u16::from_le_bytes([i0, i1]);
        if u64::from(target.div_ceil(PAGES_PER_MIB)) > self.memory_mib
            || (interval_s > 0) != self.config.has_statistics()
        {
            return false;
        }
        self.target_pages.store(target, Ordering::Release);
        self.actual_pages
            .store(u32::from_le_bytes([a0, a1, a2, a3]), Ordering::Release);
        self.interval_s.store(interval_s, Ordering::Release);
        true
    }
}
