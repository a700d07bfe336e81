//! The `host` driver: perf events of the host kernel on a vCPU's thread, any other thread, or a
//! CPU.
//!
//! Two drivers share this code because their resources differ. [`HostPmu::hardware`] serves
//! [`EventType::HARDWARE`], [`EventType::HW_CACHE`] and [`EventType::RAW`]. Its slots are the
//! available host counters, both general-purpose and fixed-function. [`HostPmu::software`] serves
//! [`EventType::SOFTWARE`] without a limit.
//!
//! Events are opened pinned and never exceed the number of slots, so the kernel does not multiplex
//! them. If the kernel multiplexes an event nevertheless, the driver logs a message, because the
//! kernel's time enabled and time running of the event then differ. Events are opened once, and
//! then enabled, disabled and given periods.
//!
//! # Filters
//! Hardware events obey `exclude_host`, `exclude_guest`, `exclude_user` and `exclude_kernel`. The
//! last two refer to the guest's privilege level if `exclude_host` is set. Software events (page
//! faults, context switches, migrations) belong to the vCPU's thread on the host and have no guest
//! privilege level. For them, `exclude_user` and `exclude_kernel` are rejected, and `exclude_host`
//! and `exclude_guest` have no effect.
//!
//! # Overflow
//! The signal is sent to the vCPU's thread only. Its handler must be installed without
//! `SA_RESTART`, so that it interrupts `KVM_RUN`. A standard signal (below `SIGRTMIN`, such as
//! `SIGUSR2`) is preferable to a real-time signal. While a standard signal is pending, the signals
//! of further overflows are coalesced with it. No overflow is lost, because
//! [`PmuEvent::take_overflows`] checks the counts. Real-time signals are queued. All processes of a
//! user share the queue. If it is full, the kernel sends `SIGIO` instead. The default action of
//! `SIGIO` terminates the process (see [`ignore_sigio`]). If `SIGIO` is ignored, the overflow is
//! not noticed until the next exit.

mod counters;
mod fault;
pub(crate) mod fd;
mod group;
mod guest_ring;
mod hybrid;
mod late;
mod open_params;
mod opener;
mod probe;
mod rate;
mod thread_switches;
mod tracepoint;

use std::io;
use std::sync::Arc;

use crate::attr::{Attr, EventType};
use crate::pmu::period_floor::PeriodFloor;
use crate::pmu::{CounterMask, Pmu, PmuCounterCapacity, PmuError, PmuEvent, PmuEventTarget, PmuGroup};

use perf_event_open_sys::bindings::{PERF_RECORD_SAMPLE, PERF_SAMPLE_READ, perf_event_attr};

pub use counters::{FixedCounter, HostCounters};
pub use fd::monotonic_ns;
use fd::{PARKED_PERIOD, PerfFd, PerfMap, READ_TIMES, TimedCount, current_tid, new_attr};
use group::KernelGroup;
pub use guest_ring::{
    GuestSample, GuestSampleRing, GuestSamplingEvent, HostRing, HostRingRecord, HostRingStats, SampledCpuMode,
};
use late::LateOverflowPoll;
use open_params::{GroupMembership, OpenParams, missing_cpu_error};
pub use opener::{
    EventOpenRequest, HostEventOpener, HostEventTarget, OverflowSignal, SyscallOpener, set_event_opener,
};
pub use probe::{
    GenericEvent, HostPerfCapabilities, cache_event_opens, counting_is_denied, counting_is_denied_to,
    ignore_sigio,
};
pub use rate::MIN_CLOCK_PERIOD_NS;
use rate::{ClockRate, ClockRates};
pub use thread_switches::{ThreadSwitch, ThreadSwitchKind, ThreadSwitchRing, ThreadSwitches};
pub use tracepoint::Tracepoint;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HostEventClass {
    Hardware,
    Software,
}

/// A driver for perf events of the host kernel, either hardware events or software events.
#[derive(Debug)]
pub struct HostPmu {
    class: HostEventClass,
    signal: Option<i32>,
    counters: HostCounters,
    user_read: bool,
    clocks: ClockRates,
}

impl HostPmu {
    /// Creates the driver of the host's hardware PMU as described by `probe`.
    ///
    /// Overflows send `signal` to the vCPU's thread. With `None`, events count but cannot be armed.
    #[must_use]
    pub fn hardware(signal: Option<i32>, probe: &HostPerfCapabilities) -> Self {
        Self {
            class: HostEventClass::Hardware,
            signal,
            counters: probe.counters.clone(),
            user_read: probe.user_read,
            clocks: ClockRates::default(),
        }
    }

    /// Creates the driver of the host kernel's software events. Overflows send `signal` to the
    /// vCPU's thread.
    #[must_use]
    pub fn software(signal: Option<i32>) -> Self {
        Self {
            class: HostEventClass::Software,
            signal,
            counters: HostCounters::default(),
            user_read: false,
            clocks: ClockRates::default(),
        }
    }

    /// Converts an error of `perf_event_open(2)` to a [`PmuError`]. `guest` is set if the event
    /// counts a guest on the hardware PMU.
    fn open_error(source: io::Error, guest: bool) -> PmuError {
        match source.raw_os_error() {
            Some(libc::EOPNOTSUPP | libc::EBUSY) if guest => PmuError::Mediated(source),
            Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => PmuError::NoSuchEvent,
            Some(libc::EINVAL | libc::EOPNOTSUPP) => {
                PmuError::Unsupported("the host's kernel refuses this event in this form")
            }
            Some(libc::EAGAIN | libc::EBUSY | libc::ENOSPC) => PmuError::Busy,
            _ => PmuError::Os {
                what: "perf_event_open",
                source,
            },
        }
    }
}

impl Pmu for HostPmu {
    fn name(&self) -> &'static str {
        match self.class {
            HostEventClass::Hardware => "host",
            HostEventClass::Software => "host-software",
        }
    }

    fn supports_type(&self, ty: EventType) -> bool {
        match self.class {
            HostEventClass::Hardware => {
                [EventType::HARDWARE, EventType::HW_CACHE, EventType::RAW].contains(&ty)
            }
            HostEventClass::Software => ty == EventType::SOFTWARE,
        }
    }

    fn capacity(&self) -> PmuCounterCapacity {
        match self.class {
            HostEventClass::Hardware => PmuCounterCapacity::Counters(self.counters.mask()),
            HostEventClass::Software => PmuCounterCapacity::Unlimited,
        }
    }

    fn constraint(&self, attr: &Attr) -> CounterMask {
        match self.class {
            HostEventClass::Hardware => self.counters.constraint(attr),
            HostEventClass::Software => CounterMask::ALL,
        }
    }

    fn open(&self, attr: &Attr, target: PmuEventTarget) -> Result<Box<dyn PmuEvent>, PmuError> {
        self.open_beside(attr, target, None)
    }

    fn open_in_group(
        &self,
        attr: &Attr,
        target: PmuEventTarget,
        group: &PmuGroup,
    ) -> Result<Box<dyn PmuEvent>, PmuError> {
        self.open_beside(attr, target, Arc::clone(group).downcast().ok())
    }
}

/// Returns what a host event for `target` counts, and the thread that receives its signals.
fn counted_thread(target: PmuEventTarget) -> Result<(HostEventTarget, i32), PmuError> {
    match target {
        PmuEventTarget::Vcpu { tid, .. } => Ok((HostEventTarget::Thread(tid), tid)),
        PmuEventTarget::Cpu { cpu } => {
            let cpu = i32::try_from(cpu).map_err(|_| missing_cpu_error(libc::EINVAL))?;
            // CPU events are not armed by a vCPU, so the opening thread receives the signal.
            Ok((HostEventTarget::Cpu(cpu), current_tid()))
        }
        PmuEventTarget::Vm => Err(PmuError::Unsupported(
            "a host event counts one vCPU's thread, not a VM",
        )),
    }
}

impl HostPmu {
    /// Returns the attributes with which the host's kernel opens the event `attr`.
    fn raw_attr(&self, attr: &Attr) -> Result<perf_event_attr, PmuError> {
        let mut raw = new_attr(attr.ty.0, attr.config);
        // Opened as a sampling event, because the kernel rejects a later period for a counting
        // event.
        raw.__bindgen_anon_1.sample_period = PARKED_PERIOD;
        raw.sample_type = u64::from(PERF_SAMPLE_READ);
        raw.read_format = READ_TIMES;
        raw.set_disabled(1);
        if self.class == HostEventClass::Hardware {
            raw.set_pinned(1);
            raw.__bindgen_anon_3.config1 = attr.config1;
            raw.__bindgen_anon_4.config2 = attr.config2;
            Self::set_exclusions(&mut raw, attr);
        } else if attr.exclude_user || attr.exclude_kernel {
            return Err(PmuError::Unsupported(
                "a host software event has no guest privilege level",
            ));
        }
        Ok(raw)
    }

    /// Opens the event `attr`, in the kernel group `group` if possible.
    fn open_beside(
        &self,
        attr: &Attr,
        target: PmuEventTarget,
        group: Option<Arc<KernelGroup>>,
    ) -> Result<Box<dyn PmuEvent>, PmuError> {
        let (counted, signal_tid) = counted_thread(target)?;
        if !self.supports_type(attr.ty) {
            return Err(PmuError::NoSuchEvent);
        }
        let hardware = self.class == HostEventClass::Hardware;
        let opener = OpenParams {
            raw: self.raw_attr(attr)?,
            counted,
            signal_tid,
            signal: self.signal,
            hardware,
            guest: hardware && !attr.exclude_guest,
            user_read: hardware && self.user_read,
        };
        let counts = attr.sample_period == 0 && !attr.freq;
        let joined = group.and_then(|group| opener.join(group, counts));
        let (member, fd, map) = match joined {
            Some((member, fd, map)) => (Some(member), fd, map),
            None => {
                let (fd, map) = opener.open(&mut opener.raw.clone(), None)?;
                (None, fd, map)
            }
        };
        let ringing = match attr.is_host_clock() {
            true => self.clocks.register(counted),
            false => ClockRate::default(),
        };
        Ok(Box::new(HostEvent {
            fd,
            map,
            ringing,
            opener,
            member,
            group: None,
            base: 0,
            can_arm: self.signal.is_some(),
            hardware,
            user_read: hardware && self.user_read,
            one_by_one: !hardware && !attr.is_host_clock(),
            on: false,
            kernel_period: PARKED_PERIOD,
            kernel_due: PARKED_PERIOD,
            loss_logged: false,
            last_count: 0,
            stale: false,
            good: LastOnCounter::default(),
            lost_at_ns: None,
            armed_at: None,
            floor: PeriodFloor::default(),
            late: LateOverflowPoll::default(),
        }))
    }
}

#[derive(Debug)]
struct HostEvent {
    fd: Arc<PerfFd>,
    opener: OpenParams,
    member: Option<GroupMembership>,
    /// Kernel group that this event leads, or `None` if no other event was opened in the group.
    group: Option<Arc<KernelGroup>>,
    /// Count of the event when it was last reopened. The total count is this value plus the
    /// kernel's count.
    base: u64,
    /// Mapped control page of the event, with a ring if the event can be armed.
    map: Option<PerfMap>,
    can_arm: bool,
    hardware: bool,
    /// Set if reads with `rdpmc` were tested and are correct. The capability bit in the control
    /// page alone does not prove this.
    user_read: bool,
    /// Registration of this clock event for the limit on overflow rates. Each overflow of a clock
    /// event takes a kernel timer interrupt.
    ringing: ClockRate,
    /// Set for a software event that the kernel counts one by one, such as a page fault, rather
    /// than a hardware counter or a clock.
    one_by_one: bool,
    on: bool,
    /// Period that is set in the kernel, or [`PARKED_PERIOD`] if the event must not overflow.
    kernel_period: u64,
    /// Count at which one of the kernel's periods ends. The following periods end at multiples of
    /// `kernel_period` after this count.
    kernel_due: u64,
    /// Set once a message about the temporary loss of the counter has been logged.
    loss_logged: bool,
    last_count: u64,
    /// Set if the event may have counted since `last_count` was updated.
    stale: bool,
    armed_at: Option<u64>,
    /// Minimum period that the kernel accepts for the event, as far as known.
    floor: PeriodFloor,
    /// Polling for an overflow that is closer than the minimum period.
    late: LateOverflowPoll,
    /// Last known moment at which the event held its counter.
    good: LastOnCounter,
    /// Earliest time at which the host may have taken the event's counter away, in nanoseconds, or
    /// `None` if the event holds its counter. Valid only while the event is started.
    lost_at_ns: Option<u64>,
}

/// A moment at which an event is known to have held its counter.
#[derive(Clone, Copy, Debug, Default)]
struct LastOnCounter {
    /// Time of that moment on [`monotonic_ns`], in nanoseconds.
    at_ns: u64,
    /// The kernel's time enabled of the event at that moment, in nanoseconds.
    enabled_ns: u64,
}

impl HostEvent {
    /// Sets the period in the kernel so that the event overflows `period` counts after its current
    /// count `count`, and then at each further period. Has no effect if this is already set. The
    /// period in the kernel is longer if `period` is below the minimum of the kernel or of clock
    /// events.
    fn set_period(&mut self, count: u64, period: u64) -> Result<(), PmuError> {
        let asked = count.saturating_add(period);
        let period = self.floor.period_for(self.ringing.period_for(period));
        let due = count.saturating_add(period);
        let next = self.next_due(count);
        if next == due || next >= asked && self.kernel_period == period {
            return Ok(());
        }
        if let Some(map) = &mut self.map {
            // Discards the overflows of the old period.
            map.drain(|_| {});
        }
        // Hardware events and clocks adopt a new period immediately. An event that the kernel
        // counts one by one overflows at the next count and then completes the old period once
        // more, so it is disabled and enabled again.
        let restart = self.on && self.one_by_one;
        let floor = &mut self.floor;
        let mut set = || {
            if restart {
                self.fd.disable()?;
            }
            let set = floor.set(period, |period| self.fd.set_period(period));
            match &self.member {
                Some(GroupMembership { group, member }) if restart => group.enable(member)?,
                None if restart => self.fd.enable()?,
                _ => {}
            }
            set
        };
        let period = set().map_err(|source| PmuError::Os {
            what: "setting the period of a host event",
            source,
        })?;
        (self.kernel_period, self.kernel_due) = (period, count.saturating_add(period));
        Ok(())
    }

    /// Returns the count at which the kernel's current period ends.
    fn next_due(&self, count: u64) -> u64 {
        match count.checked_sub(self.kernel_due) {
            None => self.kernel_due,
            Some(past) => count - past % self.kernel_period + self.kernel_period,
        }
    }

    /// Starts or continues polling for the overflow at count `at` if the overflow is closer than
    /// the kernel's minimum period. Otherwise stops polling.
    fn poll_if_late(&mut self, count: u64, at: u64) {
        if self.floor.period_for(1) <= at.saturating_sub(count) {
            self.late.end();
            return;
        }
        let begun = match self.opener.signal {
            _ if self.late.is_on() => self.late.continue_after_signal(),
            Some(signal) => self.late.begin(self.opener.signal_tid, signal),
            None => Ok(()),
        };
        if let Err(e) = begun {
            log::debug!("a host event's overflow may be late: {}", crate::error_line(&e));
        }
    }

    /// Prevents the kernel event from overflowing. Costs nothing if the event is already parked.
    fn park(&mut self) {
        self.ringing.end();
        self.late.end();
        if self.kernel_period != PARKED_PERIOD {
            self.kernel_due = u64::MAX;
            if let Err(e) = self.set_period(0, PARKED_PERIOD) {
                log::debug!("cannot park a host event: {}", crate::error_line(&e));
            }
        }
    }

    /// Reads the counts that the kernel has written to the event's ring, one per overflow. Returns
    /// `Some` with the count at the most recent overflow, `Some(None)` if there was no overflow, or
    /// `None` if the event has no such ring.
    fn overflow_in_ring(&mut self) -> Option<Option<u64>> {
        if self
            .member
            .as_ref()
            .is_some_and(|place| !place.member.has_single_count_samples())
        {
            return None;
        }
        let base = self.base;
        let map = self.map.as_mut().filter(|map| map.has_ring())?;
        let mut newest = None;
        map.drain_words(|record, words| {
            if record.type_ == PERF_RECORD_SAMPLE {
                newest = words.first().map(|count| base + count);
            }
        });
        Some(newest)
    }

    /// Reads the count. Returns `None` if the event is in the kernel's error state.
    fn read_current(&mut self) -> io::Result<Option<u64>> {
        if self.on
            && self.opener.counted == HostEventTarget::Thread(current_tid())
            && self.user_read
            && let Some(count) = self.map.as_ref().and_then(PerfMap::user_read)
        {
            return Ok(Some(self.base + count));
        }
        let Some(read) = self.read_timed()? else {
            self.handle_lost_counter();
            return Ok(None);
        };
        self.good = LastOnCounter {
            at_ns: monotonic_ns(),
            enabled_ns: read.enabled_ns,
        };
        if read.running_ns < read.enabled_ns && !std::mem::replace(&mut self.loss_logged, true) {
            log::warn!(
                "the host's kernel took the counter of a pinned event, which counted for {} of {} \
                ns; its count is too low",
                read.running_ns,
                read.enabled_ns
            );
        }
        Ok(Some(self.base + read.count))
    }

    fn read_timed(&self) -> io::Result<Option<TimedCount>> {
        match &self.member {
            Some(place) => place.member.read_timed(),
            None => self.fd.read_timed(),
        }
    }

    /// Returns the count of this event from one read of its whole group. Returns `None` if the
    /// event or the group is enabled, if the event is in no group, or if the read fails.
    fn count_with_group(&self) -> Option<u64> {
        if self.on {
            return None;
        }
        let count = match (&self.member, &self.group) {
            (Some(GroupMembership { group, member }), _) => group.read_member(member),
            (None, Some(group)) => group.read_leader(),
            (None, None) => None,
        };
        Some(self.base + count?)
    }

    fn enable(&self) -> io::Result<()> {
        match (&self.member, &self.group) {
            (Some(GroupMembership { group, member }), _) => group.start_member(member),
            (None, Some(group)) => group.start(),
            (None, None) => self.fd.enable(),
        }
    }

    fn disable(&self) -> io::Result<()> {
        match (&self.member, &self.group) {
            (Some(GroupMembership { group, member }), _) => group.stop_member(member),
            (None, Some(group)) => group.stop(),
            (None, None) => self.fd.disable(),
        }
    }
}

impl HostEvent {
    /// Handles the loss of the event's counter, which puts the event into the kernel's error state.
    /// The final count and times are read from the control page.
    fn handle_lost_counter(&mut self) {
        if !self.on || self.lost_at_ns.is_some() {
            return;
        }
        let mut at_ns = self.good.at_ns;
        if let Some(left) = self.map.as_ref().and_then(PerfMap::last_sched_out) {
            self.last_count = self.last_count.max(self.base + left.count);
            // The enabled time since then is a lower bound of the elapsed time, because it advances
            // only while the thread is on a CPU.
            at_ns = at_ns
                .saturating_add(left.enabled_ns.saturating_sub(self.good.enabled_ns))
                .min(monotonic_ns());
        }
        self.lost_at_ns = Some(at_ns);
        // Without a counter, the count no longer changes.
        self.stale = false;
    }
}

impl PmuEvent for HostEvent {
    fn start(&mut self, overflow_in: Option<u64>) -> Result<(), PmuError> {
        match overflow_in {
            Some(n) => self.arm(n)?,
            None => {
                self.armed_at = None;
                self.park();
            }
        }
        if self.on {
            return Ok(());
        }
        self.enable().map_err(|source| PmuError::Os {
            what: "enabling a host event",
            source,
        })?;
        self.on = true;
        self.stale = true;
        self.lost_at_ns = None;
        if self.hardware {
            self.good = LastOnCounter {
                at_ns: monotonic_ns(),
                enabled_ns: self.map.as_ref().map_or(0, PerfMap::enabled_ns),
            };
        }
        // Detects an event that received no counter. The kernel moves a pinned event without a
        // counter to the error state immediately, and the event then reads as end of file. In a
        // group, the leader is checked.
        if self.hardware && self.member.is_none() && matches!(self.read_current(), Ok(None)) {
            self.stop();
            return Err(PmuError::Busy);
        }
        Ok(())
    }

    fn stop(&mut self) {
        self.ringing.end();
        self.late.end();
        if !self.on {
            return;
        }
        if let Err(e) = self.disable() {
            log::debug!("cannot disable a host event: {}", crate::error_line(&e));
        }
        self.on = false;
        self.armed_at = None;
        // The core reads an event before it stops it, so a loss has already been reported.
        self.lost_at_ns = None;
    }

    fn group(&mut self) -> Option<PmuGroup> {
        if self.member.is_some() {
            return None;
        }
        if self.group.is_none() {
            let made = KernelGroup::new(Arc::clone(&self.fd), self.opener.counted, self.hardware, self.on)
                .inspect_err(|e| {
                    log::debug!(
                        "the members of a group go on and off one by one: {}",
                        crate::error_line(e)
                    )
                })
                .ok()?;
            self.group = Some(Arc::new(made));
        }
        self.group.clone().map(|group| group as PmuGroup)
    }

    fn leave_group(&mut self) {
        self.stop();
        let count = self.read();
        let Some(GroupMembership { group, member }) = self.member.take() else {
            return;
        };
        group.remove(&member);
        match self.opener.open(&mut self.opener.raw.clone(), None) {
            Ok((fd, map)) => {
                (self.fd, self.map) = (fd, map);
                self.base = count;
                (self.kernel_period, self.kernel_due) = (PARKED_PERIOD, count + PARKED_PERIOD);
                self.good = LastOnCounter::default();
                self.loss_logged = false;
            }
            // If the event cannot be reopened, it stays disabled in the kernel. The next start
            // detects that it does not count.
            Err(e) => {
                let _ = self.fd.disable();
                log::warn!(
                    "cannot reopen a host event after its group leader was closed: {}",
                    crate::error_line(&e)
                );
            }
        }
    }

    fn check_counter(&mut self) {
        // Checks only group leaders and events without a group, because the kernel takes the
        // counters of a whole group away.
        if self.on && self.hardware && self.member.is_none() && self.lost_at_ns.is_none() {
            match self.fd.read_timed() {
                Ok(Some(read)) => {
                    self.good = LastOnCounter {
                        at_ns: monotonic_ns(),
                        enabled_ns: read.enabled_ns,
                    };
                }
                Ok(None) => self.handle_lost_counter(),
                Err(e) => log::debug!("looking at a host event failed: {}", crate::error_line(&e)),
            }
        }
    }

    fn lost_ns(&self) -> Option<u64> {
        self.lost_at_ns.map(|at_ns| monotonic_ns().saturating_sub(at_ns))
    }

    fn read(&mut self) -> u64 {
        if !self.stale {
            return self.last_count;
        }
        if let Some(count) = self.count_with_group() {
            self.last_count = self.last_count.max(count);
            self.stale = false;
            return self.last_count;
        }
        match self.read_current() {
            Ok(Some(count)) => {
                self.last_count = self.last_count.max(count);
                self.stale = self.on;
            }
            // The event lost its counter. The core detects this with [`PmuEvent::lost_ns`].
            Ok(None) => {}
            Err(e) => log::debug!("reading a host event failed: {}", crate::error_line(&e)),
        }
        self.last_count
    }

    fn arm(&mut self, overflow_in: u64) -> Result<(), PmuError> {
        // Reads the count before the kernel restarts the period, so that the overflow never occurs
        // before the armed count.
        let count = self.read();
        self.rearm(count, overflow_in)
    }

    fn rearm(&mut self, count: u64, overflow_in: u64) -> Result<(), PmuError> {
        if !self.can_arm {
            return Err(PmuError::Unsupported(
                "the host driver was made without an overflow signal",
            ));
        }
        self.ringing.begin();
        self.set_period(count, overflow_in.clamp(1, PARKED_PERIOD - 1))?;
        let at = count.saturating_add(overflow_in.max(1));
        self.armed_at = Some(at);
        self.late.end();
        self.poll_if_late(count, at);
        Ok(())
    }

    fn overflowed(&mut self) -> Option<u64> {
        let Some(at) = self.armed_at else {
            // Parks an event that overflowed and was not re-armed, because the kernel reloads its
            // period.
            if self.on {
                self.park();
            }
            return None;
        };
        let count = match self.overflow_in_ring() {
            Some(None) if self.late.is_on() => self.read(),
            Some(in_ring) => in_ring?,
            None => self.read(),
        };
        self.last_count = self.last_count.max(count);
        if count >= at {
            self.armed_at = None;
            self.late.end();
            return Some(count);
        }
        // The kernel's timer of a clock event can run slightly ahead of its count, and the kernel
        // may have a period shorter than requested.
        if self.next_due(count) != at
            && let Err(e) = self.set_period(count, (at - count).min(PARKED_PERIOD - 1))
        {
            log::warn!(
                "cannot re-arm a host event that overflowed early: {}",
                crate::error_line(&e)
            );
        }
        self.poll_if_late(count, at);
        None
    }

    fn take_overflows(&mut self) -> u32 {
        u32::from(self.overflowed().is_some())
    }

    fn user_index(&self) -> u32 {
        match &self.map {
            Some(map) if self.on && self.user_read && map.user_read_offered() => map.index(),
            _ => 0,
        }
    }
}

impl Drop for HostEvent {
    fn drop(&mut self) {
        if let Some(GroupMembership { group, member }) = &self.member {
            group.remove(member);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mediated_host_error_is_reported() {
        for errno in [libc::EOPNOTSUPP, libc::EBUSY] {
            let e = || io::Error::from_raw_os_error(errno);
            assert!(matches!(HostPmu::open_error(e(), true), PmuError::Mediated(_)));
            assert!(!matches!(HostPmu::open_error(e(), false), PmuError::Mediated(_)));
        }
    }

    #[test]
    fn missing_host_event_is_reported() {
        let e = io::Error::from_raw_os_error(libc::ENOENT);
        assert!(matches!(HostPmu::open_error(e, true), PmuError::NoSuchEvent));
    }
}
