//! One connection's events: opened, read and sampled through perf-core, closed with the connection.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use perf_core::attr::STACK_USER_MAX;
use perf_core::pmu::{PmuError, VcpuId, host};
use perf_core::ring::Ring;
use perf_core::{
    Attr, Handle, MapError, OpenError, OpenFlags, OpenTarget, Role, SampleType, Scope, Session, VcpuReading,
    error_line,
};

use crate::devices::cpu_plug::VcpuSet;
use crate::pmu::{HostSampling, NoHostSamples, OperatorEvent, VmPmu};
use crate::vcpu::roster::{self, Roster};
use control_api::events::list::{self, EventGroup, EventSpec};
use control_api::protocol::{
    EventReading, Failure, FailureKind, HostRingInfo, Joined, MAX_EVENTS, MAX_RING_PAGES, Opened, RingInfo,
    RingLoss, Sampling, VcpuPart,
};

/// What samples hold, the call chain apart.
const SAMPLE: SampleType = SampleType::IP
    .union(SampleType::TID)
    .union(SampleType::TIME)
    .union(SampleType::CPU)
    .union(SampleType::PERIOD)
    .union(SampleType::STREAM_ID)
    .union(SampleType::RAW);

/// A refusal.
pub(super) fn fail<T>(kind: FailureKind, message: impl Into<String>) -> Result<T, Failure> {
    Err(Failure {
        kind,
        message: message.into(),
    })
}

/// The events of one connection.
#[derive(Debug)]
pub struct EventSession {
    // Field order is drop order: the handles close before their session.
    events: Vec<OpenEvent>,
    rings: BTreeMap<u32, Arc<Ring>>,
    session: Session,
    pmu: Arc<VmPmu>,
    roster: Arc<Roster>,
    /// What vCPUs that come later get too.
    followed: Vec<Followed>,
    /// Data pages of the rings, once there is one.
    ring_pages: Option<u32>,
    /// Rings that were made for vCPUs that came, and not fetched.
    made: BTreeSet<u32>,
    /// The last word was to enable.
    enabled: bool,
    /// What came, and was not told.
    joined: Vec<Joined>,
}

/// Events that were asked for on each vCPU.
#[derive(Clone, Debug)]
struct Followed {
    groups: Vec<EventGroup>,
    sampling: Option<Sampling>,
}

#[derive(Debug)]
struct OpenEvent {
    handle: Handle,
    /// `None`: the whole VM.
    vcpu: Option<u32>,
    /// Of a vCPU of that number that has left since.
    gone: bool,
    ring: Option<HostRing>,
}

/// Where events are opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum On<'v> {
    /// On each vCPU there is.
    Each,
    /// On these.
    These(&'v [u32]),
    /// One event for each name, which every vCPU inherits that comes later.
    Whole,
}

/// The samples of an event that the host's kernel takes.
#[derive(Debug)]
struct HostRing {
    sampling: HostSampling,
    /// Of the event itself, were it to take every sample: its period, or its frequency in Hz.
    rate: u64,
}

/// Why the host's kernel takes no samples for an event.
#[derive(Debug, thiserror::Error)]
enum NoHostRing {
    #[error(transparent)]
    Sampling(#[from] NoHostSamples),
    /// The samples would show the host, which this user may not see.
    #[error(transparent)]
    Denied(#[from] OpenError),
}

/// A count of the whole VM among those of vCPUs.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "kvm:vm:… counts for the whole VM and cannot be in a group with events of vCPUs; name it outside the braces"
)]
struct MixedGroup;

/// Why an event is not open: it is not possible here, or it was refused.
enum NotOpened {
    Unsupported(String),
    Refused(Failure),
}

impl EventSession {
    /// For user `uid` in this role, of a VM with these vCPUs.
    pub fn new(pmu: Arc<VmPmu>, uid: u32, role: Role, roster: Arc<Roster>) -> Self {
        Self {
            session: pmu.core().session(uid, role),
            events: Vec::new(),
            rings: BTreeMap::new(),
            pmu,
            roster,
            followed: Vec::new(),
            ring_pages: None,
            made: BTreeSet::new(),
            enabled: false,
            joined: Vec::new(),
        }
    }

    /// Opens a list of events on some vCPUs, or all; disabled.
    ///
    /// # Errors
    /// The list does not parse, a vCPU does not exist, a limit is reached, or this user may not open an
    /// event. Then no event of the list stays open. An event that cannot be counted here is no error: its
    /// entry says so.
    #[expect(clippy::cast_possible_truncation, reason = "at most MAX_EVENTS")]
    pub fn open(
        &mut self,
        text: &str,
        on: On<'_>,
        sampling: Option<Sampling>,
    ) -> Result<Vec<Opened>, Failure> {
        let groups = list::parse(text).or_else(|e| fail(FailureKind::Invalid, error_line(&e)))?;
        let vcpus = match on {
            On::Each => self.chosen(None)?,
            On::These(vcpus) => self.chosen(Some(vcpus))?,
            On::Whole => Vec::new(),
        };
        let count: usize = groups.iter().map(|g| g.events.len()).sum();
        // One for the whole VM is one on each vCPU.
        let more = match on {
            On::Whole => count * usize::from(self.roster.max()),
            On::Each | On::These(_) => count * vcpus.len(),
        };
        if self.open_events() + more > MAX_EVENTS {
            return fail(
                FailureKind::Limit,
                format!("a connection may have {MAX_EVENTS} events; ask for fewer events or vCPUs"),
            );
        }
        if let Some(sampling) = sampling
            && (sampling.stack_bytes > STACK_USER_MAX || sampling.stack_bytes % 8 != 0)
        {
            return fail(
                FailureKind::Invalid,
                format!(
                    "a sample has at most {STACK_USER_MAX} bytes of stack, a multiple of 8; not {}",
                    sampling.stack_bytes
                ),
            );
        }
        if sampling.is_some() && vcpus.iter().any(|v| self.rings.contains_key(v)) {
            return fail(FailureKind::Invalid, "open sampling events before their ring");
        }
        let before = self.events.len();
        let places: Vec<Option<u32>> = match on {
            On::Whole => vec![None],
            On::Each | On::These(_) => vcpus.into_iter().map(Some).collect(),
        };
        let mut opened = Vec::with_capacity(count * places.len());
        for (nth, place) in places.into_iter().enumerate() {
            let mut index = 0;
            for group in &groups {
                let whole = is_whole(group).or_else(|e| fail(FailureKind::Invalid, error_line(&e)))?;
                // A count of the VM is one count, however many vCPUs are asked for.
                let place = if whole { None } else { place };
                if whole && nth > 0 {
                    index += group.events.len() as u32;
                    continue;
                }
                if let Err(refused) = self.open_group(group, place, sampling, &mut index, &mut opened) {
                    self.events.truncate(before);
                    return Err(refused);
                }
            }
        }
        if on == On::Each {
            self.followed.push(Followed { groups, sampling });
        }
        Ok(opened)
    }

    /// How many events are open, one of the whole VM on each vCPU there can be.
    fn open_events(&self) -> usize {
        let whole = usize::from(self.roster.max());
        let weight = |e: &OpenEvent| if e.vcpu.is_some() { 1 } else { whole };
        self.events.iter().map(weight).sum()
    }

    /// A vCPU has entered the perf core and the guest does not know of it yet: what was asked for on each
    /// vCPU is opened on it, with its ring, and enabled if the others are.
    pub fn vcpu_came(&mut self, vcpu: u32) {
        for event in self.events.iter_mut().filter(|e| e.vcpu == Some(vcpu)) {
            event.gone = true;
        }
        if self.followed.is_empty() {
            return;
        }
        let before = self.events.len();
        let mut events = Vec::new();
        let refused = self.follow(vcpu, &mut events).err().map(|failure| {
            self.events.truncate(before);
            self.rings.remove(&vcpu);
            self.made.remove(&vcpu);
            events.clear();
            failure.message
        });
        // One entry for a vCPU, so that a client that never asks has no long list.
        self.joined.retain(|joined| joined.vcpu != vcpu);
        self.joined.push(Joined {
            vcpu,
            events,
            refused,
        });
    }

    #[expect(clippy::cast_possible_truncation, reason = "at most MAX_EVENTS")]
    fn follow(&mut self, vcpu: u32, opened: &mut Vec<Opened>) -> Result<(), Failure> {
        let before = self.events.len();
        let followed = self.followed.clone();
        let samples = followed.iter().any(|f| f.sampling.is_some());
        if samples {
            // That of one before it; who read it has a mapping of its own.
            self.rings.remove(&vcpu);
            self.made.remove(&vcpu);
        }
        for Followed { groups, sampling } in &followed {
            let mut index = 0;
            for group in groups {
                if is_whole(group).unwrap_or(false) {
                    index += group.events.len() as u32;
                    continue;
                }
                if self.open_events() + group.events.len() > MAX_EVENTS {
                    return fail(
                        FailureKind::Limit,
                        format!("a connection may have {MAX_EVENTS} events"),
                    );
                }
                self.open_group(group, Some(vcpu), *sampling, &mut index, opened)?;
            }
        }
        let sampled = |e: &OpenEvent| e.handle.attr().is_sampling();
        if let Some(pages) = self.ring_pages
            && samples
            && self.events[before..].iter().any(sampled)
        {
            self.ring(vcpu, pages)?;
            self.made.insert(vcpu);
        }
        if self.enabled {
            for event in &self.events[before..] {
                event
                    .handle
                    .enable(Scope::Event)
                    .or_else(|e| fail(FailureKind::Internal, error_line(&e)))?;
                if let Some(ring) = &event.ring
                    && let Err(e) = ring.sampling.sampler.set_enabled(true)
                {
                    log::warn!("the host kernel's ring: {e}");
                }
            }
        }
        Ok(())
    }

    /// What was opened on vCPUs that came since the last call.
    pub fn joined(&mut self) -> Vec<Joined> {
        std::mem::take(&mut self.joined)
    }

    fn chosen(&self, vcpus: Option<&[u32]>) -> Result<Vec<u32>, Failure> {
        let mut chosen = match vcpus {
            None => self.roster.present().numbers().map(u32::from).collect(),
            Some(list) => list.to_vec(),
        };
        chosen.sort_unstable();
        chosen.dedup();
        let present = self.roster.present();
        if let Some(no) = chosen.iter().find(|v| !has(present, **v)) {
            return fail(
                FailureKind::Invalid,
                format!("no vCPU {no}: the VM has {}", roster::named(present)),
            );
        }
        Ok(chosen)
    }

    fn open_group(
        &mut self,
        group: &EventGroup,
        vcpu: Option<u32>,
        sampling: Option<Sampling>,
        index: &mut u32,
        opened: &mut Vec<Opened>,
    ) -> Result<(), Failure> {
        let mut leader = None;
        for (i, spec) in group.events.iter().enumerate() {
            let result = if i > 0 && leader.is_none() {
                let why = "the leader of its group cannot be counted".to_owned();
                Err(NotOpened::Unsupported(why))
            } else {
                self.open_one(spec, vcpu, sampling, leader)
            };
            let mut said = Opened {
                handle: None,
                unsupported: None,
                name: spec.name.clone(),
                index: *index,
                vcpu,
                backing: "none".into(),
                nanoseconds: false,
                estimate: false,
                id: 0,
                kind: 0,
                config: 0,
                ring: false,
                no_ring: None,
            };
            *index += 1;
            match result {
                Ok((at, event, no_ring)) => {
                    said.ring = self.events[at].ring.is_some();
                    said.no_ring = no_ring;
                    leader = leader.or(Some(at));
                    said.handle = u32::try_from(at).ok();
                    said.backing = event.backing.into();
                    said.nanoseconds = event.nanoseconds;
                    said.estimate = event.estimate;
                    said.id = self.events[at].handle.id();
                    said.kind = event.attr.ty.0;
                    said.config = event.attr.config;
                }
                Err(NotOpened::Unsupported(why)) => said.unsupported = Some(why),
                Err(NotOpened::Refused(failure)) => return Err(failure),
            }
            opened.push(said);
        }
        Ok(())
    }

    fn open_one(
        &mut self,
        spec: &EventSpec,
        vcpu: Option<u32>,
        sampling: Option<Sampling>,
        leader: Option<usize>,
    ) -> Result<(usize, OperatorEvent, Option<String>), NotOpened> {
        let mut event = self
            .pmu
            .operator_event(spec)
            .map_err(|e| NotOpened::Unsupported(error_line(&e)))?;
        let (mut ring, mut no_ring) = (None, None);
        if let (Some(_), None) = (sampling, vcpu) {
            let why = "a count of the whole VM has no samples".to_owned();
            return Err(NotOpened::Unsupported(why));
        }
        if let (Some(sampling), Some(vcpu)) = (sampling, vcpu) {
            sample_with(&mut event.attr, sampling, spec);
            let allowed = self.pmu.core().may_sample(&self.session, &event.attr);
            allowed.map_err(not_opened)?;
            self.pmu.clock_period(VcpuId(vcpu), &mut event.attr);
            if sampling.chain_every > 1 {
                match self.host_ring(VcpuId(vcpu), &event.attr) {
                    Ok(found) => {
                        event.attr.sample_period = rate_for(&event.attr, found.rate, sampling.chain_every);
                        ring = Some(found);
                    }
                    Err(e) => no_ring = Some(error_line(&e)),
                }
            }
        }
        if leader.is_some() {
            // A group is pinned, and switched on, by its leader.
            event.attr.pinned = false;
            event.attr.exclusive = false;
        }
        let group = leader.and_then(|at| self.events.get(at)).map(|e| &e.handle);
        let target = vcpu.map_or(OpenTarget::Vm, |vcpu| OpenTarget::Vcpu(VcpuId(vcpu)));
        event.attr.inherit = vcpu.is_none();
        let handle = self
            .pmu
            .core()
            .open(
                &self.session,
                event.attr.clone(),
                target,
                group,
                OpenFlags::default(),
            )
            .map_err(not_opened)?;
        self.events.push(OpenEvent {
            handle,
            vcpu,
            gone: false,
            ring,
        });
        Ok((self.events.len() - 1, event, no_ring))
    }

    /// Lets the host's kernel sample what `attr` describes, if it can and the user may.
    fn host_ring(&self, vcpu: VcpuId, attr: &Attr) -> Result<HostRing, NoHostRing> {
        let sampling = self.pmu.host_sampling(vcpu, attr)?;
        if sampling.sees_host {
            let host = Attr {
                exclude_host: false,
                exclude_kernel: false,
                ..attr.clone()
            };
            self.pmu.core().may_sample(&self.session, &host)?;
        }
        Ok(HostRing {
            sampling,
            rate: attr.sample_period,
        })
    }

    fn ring_of(&self, handle: u32) -> Result<(&OpenEvent, &HostRing), Failure> {
        let event = usize::try_from(handle).ok().and_then(|at| self.events.get(at));
        match event.and_then(|event| Some((event, event.ring.as_ref()?))) {
            Some(found) => Ok(found),
            None => fail(
                FailureKind::Invalid,
                format!("event {handle} has no ring of the host's kernel"),
            ),
        }
    }

    /// What the host's kernel samples for the event `handle`, and a descriptor of it to give away.
    ///
    /// # Errors
    /// No such event, or it has none; no descriptor left.
    pub fn give_host_ring(&self, handle: u32) -> Result<(HostRingInfo, OwnedFd), Failure> {
        let (_, ring) = self.ring_of(handle)?;
        let internal = |e: std::io::Error| Failure {
            kind: FailureKind::Internal,
            message: format!("the host kernel's ring: {e}"),
        };
        let fd = ring.sampling.sampler.as_fd().try_clone_to_owned();
        let info = HostRingInfo {
            period: ring.sampling.period,
            clock_offset_ns: self.clock_offset_ns(),
            interpreted: ring.sampling.interpreted,
        };
        Ok((info, fd.map_err(internal)?))
    }

    /// Lets the event `handle` take every `every`-th sample itself.
    ///
    /// # Errors
    /// There is no such event, it has no ring of the host's kernel, or the number is 0.
    pub fn take_chains(&self, handle: u32, every: u32) -> Result<(), Failure> {
        let (event, ring) = self.ring_of(handle)?;
        if every == 0 {
            return fail(FailureKind::Invalid, "chains on every 0th sample");
        }
        let rate = rate_for(event.handle.attr(), ring.rate, every);
        event
            .handle
            .set_period(rate)
            .or_else(|e| fail(FailureKind::Invalid, error_line(&e)))
    }

    /// Enables or disables all events.
    pub fn set_enabled(&mut self, on: bool) {
        self.enabled = on;
        if on {
            self.session.enable_all();
        } else {
            self.session.disable_all();
        }
        for ring in self.events.iter().filter_map(|e| e.ring.as_ref()) {
            if let Err(e) = ring.sampling.sampler.set_enabled(on) {
                log::warn!("the host kernel's ring: {e}");
            }
        }
    }

    /// Reads all events.
    #[expect(clippy::cast_possible_truncation, reason = "at most MAX_EVENTS")]
    pub fn read(&self) -> Vec<EventReading> {
        let present = self.roster.present();
        let read = |(at, event): (usize, &OpenEvent)| {
            let reading = event.handle.read().ok()?;
            let estimate = event.handle.estimate().ok().flatten();
            Some(EventReading {
                handle: at as u32,
                value: reading.value,
                enabled_ns: reading.time_enabled_ns,
                running_ns: reading.time_running_ns,
                estimate: estimate.map(|e| e.value),
                standard_error: estimate.and_then(|e| e.standard_error),
                bound: estimate.and_then(|e| e.bound),
                failed: event.handle.has_failed(),
                gone: event.gone || event.vcpu.is_some_and(|vcpu| !has(present, vcpu)),
                vcpus: event.handle.read_by_vcpu().ok()?.iter().map(part).collect(),
            })
        };
        self.events.iter().enumerate().filter_map(read).collect()
    }

    /// Records that found no room and were not told of in the rings yet.
    pub fn losses(&self) -> Vec<RingLoss> {
        let loss = |(vcpu, ring): (&u32, &Arc<Ring>)| RingLoss {
            vcpu: *vcpu,
            lost: ring.pending_lost(),
        };
        self.rings.iter().map(loss).collect()
    }

    /// Closes all events and their rings.
    pub fn close(&mut self) {
        self.events.clear();
        self.rings.clear();
        self.made.clear();
        self.followed.clear();
        self.joined.clear();
        self.ring_pages = None;
        self.enabled = false;
    }

    /// Number of open events.
    pub fn len(&self) -> usize {
        self.events.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// A ring for all sampling events of `vcpu`.
    ///
    /// # Errors
    /// The size is no power of two or too large, the vCPU has no sampling event or already a ring, or the
    /// memory limit is reached.
    pub fn ring(&mut self, vcpu: u32, pages: u32) -> Result<(RingInfo, Arc<Ring>), Failure> {
        if pages == 0 || pages > MAX_RING_PAGES || !pages.is_power_of_two() {
            return fail(
                FailureKind::Invalid,
                format!("a ring has 1 to {MAX_RING_PAGES} data pages, a power of two; not {pages}"),
            );
        }
        if self.rings.contains_key(&vcpu) && !self.made.remove(&vcpu) {
            return fail(FailureKind::Invalid, format!("vCPU {vcpu} has a ring already"));
        }
        let mut of_vcpu = self
            .events
            .iter()
            .filter(|e| e.vcpu == Some(vcpu) && !e.gone && e.handle.attr().is_sampling())
            .map(|e| &e.handle);
        let Some(first) = of_vcpu.next() else {
            return fail(
                FailureKind::Invalid,
                format!("no sampling event is open on vCPU {vcpu}"),
            );
        };
        if let Some(ring) = self.rings.get(&vcpu) {
            // It was made when the vCPU came.
            return Ok((self.ring_info(vcpu, first.attr()), ring.clone()));
        }
        let others: Vec<&Handle> = of_vcpu.collect();
        let ring = shared_ring(first, &others, pages as usize)?;
        let info = self.ring_info(vcpu, first.attr());
        self.rings.insert(vcpu, ring.clone());
        self.ring_pages = Some(pages);
        self.pmu.probe().add_listener();
        Ok((info, ring))
    }

    fn ring_info(&self, vcpu: u32, attr: &Attr) -> RingInfo {
        RingInfo {
            vcpu,
            sample_type: attr.sample_type.bits(),
            clock_offset_ns: Some(self.clock_offset_ns()),
        }
    }

    /// What the host's `CLOCK_MONOTONIC` has over the time that samples carry, ns.
    fn clock_offset_ns(&self) -> u64 {
        host::monotonic_ns().saturating_sub(self.pmu.core().now_ns())
    }
}

/// One ring for `first` and `others`. If one of them cannot have it, none has.
fn shared_ring(first: &Handle, others: &[&Handle], pages: usize) -> Result<Arc<Ring>, Failure> {
    let ring = first.map(pages, true).map_err(|e| Failure {
        kind: match e {
            MapError::MemoryLimit { .. } => FailureKind::Limit,
            _ => FailureKind::Internal,
        },
        message: match &e {
            MapError::MemoryLimit { pages, limit } => format!(
                "{pages} more pages of ring memory exceed the limit of {limit} for this user; use smaller rings (-m), \
                 or start the VM with more --ring-memory"
            ),
            _ => error_line(&e),
        },
    })?;
    for (at, other) in others.iter().enumerate() {
        if let Err(e) = other.set_output(Some(first)) {
            for redirected in others.iter().take(at) {
                if let Err(e) = redirected.set_output(None) {
                    log::debug!("an event without a ring: {e}");
                }
            }
            first.unmap();
            return fail(FailureKind::Internal, error_line(&e));
        }
    }
    Ok(ring)
}

fn has(vcpus: VcpuSet, vcpu: u32) -> bool {
    u8::try_from(vcpu).is_ok_and(|vcpu| vcpus.has(vcpu))
}

/// What one vCPU counted.
fn part(of: &VcpuReading) -> VcpuPart {
    VcpuPart {
        vcpu: of.vcpu.0,
        value: of.reading.value,
        enabled_ns: of.reading.time_enabled_ns,
        running_ns: of.reading.time_running_ns,
        estimate: of.estimate.map(|e| e.value),
        standard_error: of.estimate.and_then(|e| e.standard_error),
        bound: of.estimate.and_then(|e| e.bound),
    }
}

/// Whether the events of a group count for the whole VM, wherever they are opened.
fn is_whole(group: &EventGroup) -> Result<bool, MixedGroup> {
    let mut whole = group.events.iter().map(EventSpec::is_of_vm);
    let first = whole.next().unwrap_or(false);
    if whole.any(|other| other != first) {
        return Err(MixedGroup);
    }
    Ok(first)
}

/// What user `uid` may do.
pub(crate) fn role(uid: u32) -> Role {
    if uid == 0 { Role::Admin } else { Role::Operator }
}

/// The operator's rate, unless the event's own terms say another.
fn sample_with(attr: &mut Attr, sampling: Sampling, spec: &EventSpec) {
    let (rate, frequency) = match (spec.period, spec.frequency_hz) {
        (Some(period), _) => (period, false),
        (None, Some(hz)) => (hz, true),
        (None, None) => (sampling.rate.max(1), sampling.frequency),
    };
    attr.sample_period = rate;
    attr.freq = frequency;
    attr.sample_type = SAMPLE;
    if sampling.callchain {
        attr.sample_type |= SampleType::CALLCHAIN;
    }
    if sampling.stack_bytes > 0 {
        attr.sample_type |= SampleType::REGS_USER | SampleType::STACK_USER;
        attr.sample_stack_user = sampling.stack_bytes;
    }
}

/// The period or frequency of an event that is to take every `every`-th sample of those that `rate` means.
fn rate_for(attr: &Attr, rate: u64, every: u32) -> u64 {
    if attr.freq {
        (rate / u64::from(every)).max(1)
    } else {
        rate.saturating_mul(every.into()).min(i64::MAX as u64)
    }
}

fn not_opened(error: OpenError) -> NotOpened {
    let message = error_line(&error);
    let kind = match &error {
        OpenError::NoDriver(_)
        | OpenError::NoSuchSoftwareEvent(_)
        | OpenError::Driver(PmuError::NoSuchEvent | PmuError::Unsupported(_)) => {
            return NotOpened::Unsupported(message);
        }
        OpenError::HostKernelDenied
        | OpenError::VmWideDenied
        | OpenError::NotOwner
        | OpenError::RawDenied => FailureKind::Denied,
        OpenError::FrequencyTooHigh { .. } => {
            return NotOpened::Refused(Failure {
                kind: FailureKind::Limit,
                message: format!("{message}; ask for less, or start the VM with a higher --sample-limit"),
            });
        }
        OpenError::GroupTooLarge { .. } | OpenError::Overcommitted { .. } => FailureKind::Limit,
        OpenError::Driver(PmuError::Busy | PmuError::Mediated(_)) => FailureKind::Unsupported,
        OpenError::Driver(PmuError::Os { what, source })
            if matches!(source.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) =>
        {
            let message = format!(
                "{what}: {source}: close some events, or start the VM with a larger limit (ulimit -n)"
            );
            return NotOpened::Refused(Failure {
                kind: FailureKind::Limit,
                message,
            });
        }
        OpenError::Driver(PmuError::Os { what, source }) => {
            return NotOpened::Refused(Failure {
                kind: FailureKind::Internal,
                message: format!("{what}: {source}"),
            });
        }
        _ => FailureKind::Invalid,
    };
    NotOpened::Refused(Failure { kind, message })
}

#[cfg(test)]
mod tests {
    use perf_core::pmu::sim::SimPmu;
    use perf_core::{Core, EventType};

    use super::*;

    /// A ring that one event of several cannot have costs its user nothing, and can be asked for again.
    #[test]
    fn a_ring_that_one_event_cannot_share_is_taken_back() {
        let core = Core::builder()
            .driver(Arc::new(SimPmu::with_slots(4)))
            .build()
            .unwrap();
        let _context = core.add_vcpu(VcpuId(0), 1).unwrap();
        let session = core.session(0, Role::Admin);
        let open = || {
            let attr = Attr::sampling(EventType::SIM, 1, 100);
            core.open(
                &session,
                attr,
                OpenTarget::Vcpu(VcpuId(0)),
                None,
                OpenFlags::default(),
            )
            .unwrap()
        };
        let (first, second, third) = (open(), open(), open());
        let before = core.ring_pages(0);
        third.map(1, true).unwrap();
        assert!(shared_ring(&first, &[&second, &third], 4).is_err());
        assert!(!first.unmap(), "it is mapped no more");
        third.unmap();
        assert_eq!(core.ring_pages(0), before, "its pages are not charged any more");
        // Another size shows that nothing is left of the first; an event that writes to a ring has none.
        shared_ring(&second, &[&first, &third], 8).unwrap();
        assert!(first.map(8, true).is_err() && third.map(8, true).is_err());
    }
}
