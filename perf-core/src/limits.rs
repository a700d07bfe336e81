//! Who may do what: configuration, operator sessions and their limits.

use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::attr::{Attr, EventType, SampleType};
use crate::handle::HandleInner;
use crate::open::OpenError;
use crate::ring::PAGE_SIZE;
use crate::schedule::SharePolicy;
use crate::time::{Clock, MonotonicClock};

/// How a [`Core`] is set up.
#[derive(Clone)]
pub struct CoreConfig {
    /// The clock of all times; a manual one in tests.
    pub clock: Arc<dyn Clock>,
    /// Who gets slots when there are not enough.
    pub share: SharePolicy,
    /// How many ticks per second the VMM's timer makes; the unit of throttling.
    pub tick_hz: u64,
    /// -1: anyone may do anything; 0: raw samples need the admin role; 1: VM-wide events too; 2: counting the host
    /// kernel too.
    pub paranoid: i32,
    /// Most overflows per second of one event, and the highest sampling frequency.
    pub sample_rate_hz: u64,
    /// Ring memory an operator may have without it counting as locked memory, in KiB per host CPU.
    pub mlock_kb: u64,
    /// Ring memory an operator may have beyond that, in KiB: its locked memory limit.
    pub memlock_kb: u64,
    /// Host CPUs online, the factor of `mlock_kb`.
    pub host_cpus: usize,
    /// Slots of each vCPU that only VM-wide events may use.
    pub reserved_slots: usize,
    /// Whether more hardware events may be open on a vCPU than it has slots.
    pub overcommit: bool,
    /// The user the VM belongs to; others need the admin role to attach to its vCPUs.
    pub owner_uid: u32,
    /// Process id of the VMM, for records.
    pub pid: u32,
}

impl Default for CoreConfig {
    fn default() -> Self {
        Self {
            clock: Arc::new(MonotonicClock::new()),
            share: SharePolicy::default(),
            tick_hz: 250,
            paranoid: 1,
            sample_rate_hz: 100_000,
            mlock_kb: 512,
            memlock_kb: 8192,
            host_cpus: std::thread::available_parallelism().map_or(1, usize::from),
            reserved_slots: 0,
            overcommit: true,
            owner_uid: 0,
            pid: std::process::id(),
        }
    }
}

impl std::fmt::Debug for CoreConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CoreConfig")
            .field("share", &self.share)
            .field("tick_hz", &self.tick_hz)
            .field("paranoid", &self.paranoid)
            .finish_non_exhaustive()
    }
}

/// The limits that can change while the core runs.
#[derive(Debug)]
pub(crate) struct Limits {
    pub paranoid: AtomicI32,
    pub sample_rate_hz: AtomicU64,
    pub mlock_kb: AtomicU64,
    pub reserved_slots: AtomicUsize,
    pub overcommit: AtomicBool,
}

impl Limits {
    pub fn new(config: &CoreConfig) -> Self {
        Self {
            paranoid: AtomicI32::new(config.paranoid),
            sample_rate_hz: AtomicU64::new(config.sample_rate_hz),
            mlock_kb: AtomicU64::new(config.mlock_kb),
            reserved_slots: AtomicUsize::new(config.reserved_slots),
            overcommit: AtomicBool::new(config.overcommit),
        }
    }

    pub fn paranoid(&self) -> i32 {
        self.paranoid.load(Ordering::Relaxed)
    }

    pub fn sample_rate_hz(&self) -> u64 {
        self.sample_rate_hz.load(Ordering::Relaxed)
    }

    /// Whether `who` may count what `attr` asks for, wherever that is.
    pub fn check_attr(&self, attr: &Attr, admin: bool) -> Result<(), OpenError> {
        let host_kernel = !attr.exclude_host && !attr.exclude_kernel;
        if host_kernel && self.paranoid() > 1 && !admin {
            return Err(OpenError::HostKernelDenied);
        }
        Ok(())
    }

    /// Whether raw samples may be taken.
    pub fn check_raw(&self, attr: &Attr, admin: bool) -> Result<(), OpenError> {
        let raw = attr.sample_type.contains(SampleType::RAW)
            && matches!(attr.ty, EventType::TRACEPOINT | EventType::VMM);
        if raw && self.paranoid() > -1 && !admin {
            return Err(OpenError::RawDenied);
        }
        Ok(())
    }

    /// Pages of rings, control pages included, that a user without the admin role may have; `None`: any number.
    pub fn ring_pages_limit(&self, config: &CoreConfig) -> Option<u64> {
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

    /// Whether VM-wide events may be opened.
    pub fn check_vm(&self, admin: bool) -> Result<(), OpenError> {
        if self.paranoid() > 0 && !admin {
            Err(OpenError::VmWideDenied)
        } else {
            Ok(())
        }
    }
}

/// What a session may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// An ordinary operator: the paranoid level and the memory limits apply.
    Operator,
    /// May do everything.
    Admin,
    /// The VMM on behalf of its guest: as admin, its pinned events are the guest's counters, and they are never
    /// throttled.
    Guest,
}

/// An operator, or the guest: owns the events it opens and closes them when dropped.
pub struct Session {
    pub(crate) inner: Arc<SessionInner>,
}

pub(crate) struct SessionInner {
    pub uid: u32,
    pub role: Role,
    /// The events it opened, in the order of opening.
    pub owned: Mutex<Vec<Weak<HandleInner>>>,
}

impl SessionInner {
    pub fn is_admin(&self) -> bool {
        self.role != Role::Operator
    }

    pub fn owned(&self) -> Vec<Arc<HandleInner>> {
        self.owned
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .filter_map(Weak::upgrade)
            .collect()
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("uid", &self.inner.uid)
            .field("role", &self.inner.role)
            .finish()
    }
}

impl Session {
    /// Enables every event this session opened, with their children, but not other members of their groups.
    pub fn enable_all(&self) {
        for handle in self.inner.owned() {
            let _ = handle.event.set_enabled(true);
        }
    }

    /// Disables every event this session opened.
    pub fn disable_all(&self) {
        for handle in self.inner.owned() {
            let _ = handle.event.set_enabled(false);
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        for handle in self.inner.owned() {
            handle.close();
        }
    }
}
