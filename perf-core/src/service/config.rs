//! Configuration and limits of the core, and roles of its users.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crate::attr::{Attr, EventType, SampleType};
use crate::model::state::TickTimer;
use crate::mux::MuxPolicy;
use crate::ring::PAGE_SIZE;
use crate::schedule::{MuxConfig, SharePolicy};
use crate::service::error::PerfEventOpenError;
use crate::time::{Clock, MonotonicClock};

/// Configuration of a [`crate::PerfCore`].
#[derive(Clone)]
pub struct PerfCoreConfig {
    /// Clock from which the core computes all times. Tests use a manual clock.
    pub clock: Arc<dyn Clock>,
    /// Policy by which slots are assigned if there are not enough for all events.
    pub share: SharePolicy,
    /// Policy by which groups that wait for slots are multiplexed.
    pub mux: MuxPolicy,
    /// Initial multiplexing interval under [`MuxPolicy::Adaptive`], in nanoseconds of `clock`. The
    /// interval may grow. `None` selects 0.146 of a tick. Choose a longer interval on hosts where a
    /// rotation is expensive (the cost differs between hosts by a factor of 20).
    pub turn_ns: Option<u64>,
    /// Frequency of the VMM timer, in ticks per second. Throttling is based on ticks.
    pub tick_hz: u64,
    /// The VMM timer, which the core notifies when it begins to need ticks. With `None`, the VMM
    /// must poll [`crate::PerfCore::tick_need`].
    pub tick_timer: Option<Arc<dyn TickTimer>>,
    /// Paranoid level. At -1 there are no restrictions. At 0, raw samples require the admin role.
    /// At 1, VM-wide events require this role too, and at 2 events that count the host kernel.
    pub paranoid: i32,
    /// Maximum number of overflows per second of an event, which is also the maximum sampling
    /// frequency.
    pub sample_rate_hz: u64,
    /// Amount of ring memory per operator that does not count towards the locked memory limit, in
    /// KiB per host CPU.
    pub mlock_kb: u64,
    /// Locked memory limit of an operator, in KiB. Ring memory in excess of `mlock_kb` counts
    /// towards this limit.
    pub memlock_kb: u64,
    /// Number of online CPUs of the host, by which `mlock_kb` is multiplied.
    pub host_cpus: usize,
    /// Number of slots of each vCPU that only VM-wide events may use.
    pub reserved_slots: usize,
    /// `true` if more hardware events may be open on a vCPU than the vCPU has slots. The events
    /// then share the slots.
    pub overcommit: bool,
    /// ID of the user that owns the VM. Other users need the admin role to attach to its vCPUs.
    pub owner_uid: u32,
    /// Process ID of the VMM, which records contain.
    pub pid: u32,
}

impl Default for PerfCoreConfig {
    fn default() -> Self {
        Self {
            clock: Arc::new(MonotonicClock::new()),
            share: SharePolicy::default(),
            mux: MuxPolicy::default(),
            turn_ns: None,
            tick_hz: 250,
            tick_timer: None,
            paranoid: 1,
            sample_rate_hz: 100_000,
            mlock_kb: 512,
            memlock_kb: 8192,
            host_cpus: host_cpus(),
            reserved_slots: 0,
            overcommit: true,
            owner_uid: 0,
            pid: std::process::id(),
        }
    }
}

/// Returns the number of CPUs that this process may use. The result is cached, because determining
/// it takes a dozen system calls (`/proc/self/cgroup` and quotas).
fn host_cpus() -> usize {
    static CPUS: OnceLock<usize> = OnceLock::new();
    *CPUS.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

impl PerfCoreConfig {
    pub(crate) fn mux_config(&self) -> MuxConfig {
        let tick_ns = 1_000_000_000 / self.tick_hz.max(1);
        let turn_ns = self.turn_ns.map_or(tick_ns, crate::mux::base_interval_ns);
        MuxConfig {
            policy: self.mux,
            turn_ns,
        }
    }
}

impl std::fmt::Debug for PerfCoreConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PerfCoreConfig")
            .field("share", &self.share)
            .field("tick_hz", &self.tick_hz)
            .field("paranoid", &self.paranoid)
            .finish_non_exhaustive()
    }
}

/// The settings of the core that can change at run time.
#[derive(Debug)]
pub(crate) struct CoreLimits {
    pub paranoid: AtomicI32,
    pub sample_rate_hz: AtomicU64,
    pub mlock_kb: AtomicU64,
    pub reserved_slots: AtomicUsize,
    pub overcommit: AtomicBool,
    /// [`SharePolicy`] as an integer.
    share: AtomicU8,
}

impl CoreLimits {
    pub fn new(config: &PerfCoreConfig) -> Self {
        Self {
            paranoid: AtomicI32::new(config.paranoid),
            sample_rate_hz: AtomicU64::new(config.sample_rate_hz),
            mlock_kb: AtomicU64::new(config.mlock_kb),
            reserved_slots: AtomicUsize::new(config.reserved_slots),
            overcommit: AtomicBool::new(config.overcommit),
            share: AtomicU8::new(config.share as u8),
        }
    }

    pub fn share(&self) -> SharePolicy {
        match self.share.load(Ordering::Relaxed) {
            n if n == SharePolicy::OperatorFirst as u8 => SharePolicy::OperatorFirst,
            n if n == SharePolicy::Strict as u8 => SharePolicy::Strict,
            _ => SharePolicy::GuestFirst,
        }
    }

    pub fn set_share(&self, share: SharePolicy) {
        self.share.store(share as u8, Ordering::Relaxed);
    }

    pub fn paranoid(&self) -> i32 {
        self.paranoid.load(Ordering::Relaxed)
    }

    pub fn sample_rate_hz(&self) -> u64 {
        self.sample_rate_hz.load(Ordering::Relaxed)
    }

    /// Checks that a user may count events with `attr`, on any target.
    pub fn check_attr(&self, attr: &Attr, admin: bool) -> Result<(), PerfEventOpenError> {
        let host_kernel = !attr.exclude_host && !attr.exclude_kernel;
        if host_kernel && self.paranoid() > 1 && !admin {
            return Err(PerfEventOpenError::HostKernelDenied);
        }
        Ok(())
    }

    /// Checks that the sampling frequency of `attr` does not exceed the limit.
    pub fn check_rate(&self, attr: &Attr) -> Result<(), PerfEventOpenError> {
        let limit = self.sample_rate_hz();
        if attr.freq && attr.sample_period > limit {
            return Err(PerfEventOpenError::FrequencyTooHigh {
                asked: attr.sample_period,
                limit,
            });
        }
        Ok(())
    }

    /// Checks that a user may take raw samples.
    pub fn check_raw(&self, attr: &Attr, admin: bool) -> Result<(), PerfEventOpenError> {
        let raw = attr.sample_type.contains(SampleType::RAW)
            && matches!(attr.ty, EventType::TRACEPOINT | EventType::VMM);
        if raw && self.paranoid() > -1 && !admin {
            return Err(PerfEventOpenError::RawDenied);
        }
        Ok(())
    }

    /// Returns the maximum number of ring pages, including control pages, of a user without the
    /// admin role. `None` means no limit.
    pub fn ring_pages_limit(&self, config: &PerfCoreConfig) -> Option<u64> {
        if self.paranoid() <= -1 {
            return None;
        }
        let page_kb = PAGE_SIZE as u64 / 1024;
        let free = self.mlock_kb.load(Ordering::Relaxed) / page_kb;
        Some(
            free.saturating_mul(config.host_cpus as u64)
                .saturating_add(config.memlock_kb / page_kb),
        )
    }

    /// Checks that a user may open VM-wide events.
    pub fn check_vm(&self, admin: bool) -> Result<(), PerfEventOpenError> {
        if self.paranoid() > 0 && !admin {
            Err(PerfEventOpenError::VmWideDenied)
        } else {
            Ok(())
        }
    }
}

/// Role of a session, which determines its permissions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionRole {
    /// An ordinary operator, who is subject to the paranoid level and the memory limits.
    Operator,
    /// An administrator without restrictions.
    Admin,
    /// The VMM on behalf of its guest. The session has admin permissions. Its pinned events back
    /// the guest's counters and are never throttled.
    Guest,
}

/// The user of a session, with a role.
#[derive(Clone, Copy, Debug)]
pub(crate) struct User {
    pub uid: u32,
    pub role: SessionRole,
}

impl User {
    pub fn is_admin(self) -> bool {
        self.role != SessionRole::Operator
    }
}
