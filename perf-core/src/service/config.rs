//! Who may do what: configuration, roles and limits.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU64, AtomicUsize, Ordering};

use crate::attr::{Attr, EventType, SampleType};
use crate::mux::MuxPolicy;
use crate::ring::PAGE_SIZE;
use crate::schedule::{MuxConfig, SharePolicy};
use crate::service::error::OpenError;
use crate::time::{Clock, MonotonicClock};

/// How a [`crate::Core`] is set up.
#[derive(Clone)]
pub struct CoreConfig {
    /// The clock of all times; a manual one in tests.
    pub clock: Arc<dyn Clock>,
    /// Who gets slots when there are not enough.
    pub share: SharePolicy,
    /// How events that wait for slots take turns.
    pub mux: MuxPolicy,
    /// How long turns are at first under [`MuxPolicy::Adaptive`], in ns of its clock; they may become
    /// longer. `None`: 0.146 of a tick. What a turn costs differs from host to host by a factor of 20.
    pub turn_ns: Option<u64>,
    /// How many ticks per second the VMM's timer makes; the unit of throttling.
    pub tick_hz: u64,
    /// -1: anyone may do anything; 0: raw samples need the admin role; 1: VM-wide events too; 2: counting
    /// the host kernel too.
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
            mux: MuxPolicy::default(),
            turn_ns: None,
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

impl CoreConfig {
    pub(crate) fn mux_config(&self) -> MuxConfig {
        let tick_ns = 1_000_000_000 / self.tick_hz.max(1);
        let turn_ns = self.turn_ns.map_or(tick_ns, crate::mux::measure_of);
        MuxConfig {
            policy: self.mux,
            turn_ns,
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
    /// A [`SharePolicy`] as its number.
    share: AtomicU8,
}

impl Limits {
    pub fn new(config: &CoreConfig) -> Self {
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

    /// Whether `who` may count what `attr` asks for, wherever that is.
    pub fn check_attr(&self, attr: &Attr, admin: bool) -> Result<(), OpenError> {
        let host_kernel = !attr.exclude_host && !attr.exclude_kernel;
        if host_kernel && self.paranoid() > 1 && !admin {
            return Err(OpenError::HostKernelDenied);
        }
        Ok(())
    }

    /// Whether events may be sampled at the frequency `attr` asks for.
    pub fn check_rate(&self, attr: &Attr) -> Result<(), OpenError> {
        let limit = self.sample_rate_hz();
        if attr.freq && attr.sample_period > limit {
            return Err(OpenError::FrequencyTooHigh {
                asked: attr.sample_period,
                limit,
            });
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

    /// Pages of rings, control pages included, that a user without the admin role may have; `None`: any
    /// number.
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
    /// The VMM on behalf of its guest: as admin, its pinned events are the guest's counters, and they are
    /// never throttled.
    Guest,
}

/// A user with a role.
#[derive(Clone, Copy, Debug)]
pub(crate) struct User {
    pub uid: u32,
    pub role: Role,
}

impl User {
    pub fn is_admin(self) -> bool {
        self.role != Role::Operator
    }
}
