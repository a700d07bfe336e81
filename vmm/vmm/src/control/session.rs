//! The perf-core events of one connection: opening, reading, sampling and closing.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use perf_core::pmu::{PmuError, VcpuId, host};
use perf_core::ring::Ring;
use perf_core::{
    Attr, DetailedReading, EventHandle, EventOpenTarget, EventOrGroup, OpenFlags, PerfEventOpenError,
    Session, SessionRole, VcpuReading, error_line,
};

use super::events::{OperatorEvent, operator_event};
use super::rings::{RingLayout, shared_ring};
use super::sampling::{self, rate_for, sample_with};
use crate::devices::cpu_plug::VcpuSet;
use crate::pmu::backing;
use crate::pmu::{HostKernelSampling, HostKernelSamplingError, VmPmu};
use crate::vcpu::registry::{self, VcpuRegistry};
use control_api::events::list::{self, EventGroup, EventListEntry};
use control_api::protocol::{
    EventReading, HostRingInfo, MAX_EVENTS, MAX_RING_PAGES, OpenedEvent, PluggedVcpuEvents, RequestError,
    RequestErrorKind, RingLoss, SampleRingInfo, SamplingParams, VcpuReadingPart,
};

/// Returns an error with a new [`RequestError`].
pub(super) fn fail<T>(kind: RequestErrorKind, message: impl Into<String>) -> Result<T, RequestError> {
    Err(RequestError {
        kind,
        message: message.into(),
    })
}

/// The perf-core events of one connection.
#[derive(Debug)]
pub struct ControlClientEvents {
    // Fields are dropped in declaration order: the handles must close before their session.
    events: Vec<OpenEvent>,
    rings: BTreeMap<u32, Arc<Ring>>,
    session: Session,
    pmu: Arc<VmPmu>,
    registry: Arc<VcpuRegistry>,
    /// Events to open also on vCPUs that are plugged in later.
    hotplug_events: Vec<HotplugEvents>,
    /// Layout that the rings of all vCPUs share; `None` before the first ring is created.
    ring_layout: Option<RingLayout>,
    /// vCPUs that were plugged in and whose ring the client has not fetched yet.
    made: BTreeSet<u32>,
    /// `true` if the events are enabled, according to the last request of the client.
    enabled: bool,
    /// Events on vCPUs that were plugged in, not yet reported to the client.
    joined: Vec<PluggedVcpuEvents>,
}

/// Events that are open on every vCPU and are also opened on vCPUs that are plugged in later.
#[derive(Clone, Debug)]
struct HotplugEvents {
    groups: Vec<EventGroup>,
    sampling: Option<SamplingParams>,
}

#[derive(Debug)]
struct OpenEvent {
    handle: EventHandle,
    /// vCPU on which the event is open; `None` for an event of the whole VM.
    vcpu: Option<u32>,
    /// `true` if the vCPU was unplugged after the event was opened.
    gone: bool,
    ring: Option<HostRing>,
}

/// Targets on which events are opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VmEventTargets<'v> {
    /// One event on every present vCPU.
    EveryVcpu,
    /// One event on each listed vCPU.
    Listed(&'v [u32]),
    /// The whole VM: a single event for each name in the list, which counts on all vCPUs, including
    /// those that are plugged in later.
    WholeVm,
}

/// Ring into which the host kernel writes the samples of one event.
#[derive(Debug)]
struct HostRing {
    sampling: HostKernelSampling,
    /// Requested sampling period, or frequency in Hz. The VMM, which also samples the event, takes
    /// only some of these samples.
    rate: u64,
}

/// Reason why the host kernel does not sample an event.
#[derive(Debug, thiserror::Error)]
enum HostRingUnavailable {
    #[error(transparent)]
    Sampling(#[from] HostKernelSamplingError),
    /// The samples would reveal data of the host that this user may not see.
    #[error(transparent)]
    Denied(#[from] PerfEventOpenError),
}

/// Error for an event group that contains both events of the whole VM and events of vCPUs.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "kvm:vm:… counts for the whole VM and cannot be in a group with events of vCPUs; name it outside the braces"
)]
struct MixedGroupError;

/// Reason why an event of a list was not opened.
enum EventOpenError {
    Unsupported(String),
    Refused(RequestError),
}

impl ControlClientEvents {
    /// Creates a session without events for user `uid` with role `role`. `registry` contains the
    /// vCPUs.
    pub fn new(pmu: Arc<VmPmu>, uid: u32, role: SessionRole, registry: Arc<VcpuRegistry>) -> Self {
        Self {
            session: pmu.core().session(uid, role),
            events: Vec::new(),
            rings: BTreeMap::new(),
            pmu,
            registry,
            hotplug_events: Vec::new(),
            ring_layout: None,
            made: BTreeSet::new(),
            enabled: false,
            joined: Vec::new(),
        }
    }

    /// Opens the events in a list on some or all vCPUs. The events are initially disabled.
    ///
    /// # Errors
    /// Returns a [`RequestError`] if the list cannot be parsed, a vCPU does not exist, a limit is
    /// reached, or this user may not open an event. In this case, no event of the list remains
    /// open. An event that cannot be counted on this host is not an error; its entry gives the
    /// reason.
    #[expect(clippy::cast_possible_truncation, reason = "at most MAX_EVENTS")]
    pub fn open(
        &mut self,
        text: &str,
        on: VmEventTargets<'_>,
        sampling: Option<SamplingParams>,
    ) -> Result<Vec<OpenedEvent>, RequestError> {
        let groups = list::parse(text).or_else(|e| fail(RequestErrorKind::Invalid, error_line(&e)))?;
        let vcpus = match on {
            VmEventTargets::EveryVcpu => self.chosen(None)?,
            VmEventTargets::Listed(vcpus) => self.chosen(Some(vcpus))?,
            VmEventTargets::WholeVm => Vec::new(),
        };
        let count: usize = groups.iter().map(|g| g.events.len()).sum();
        // For the limit, an event of the whole VM counts as one event on each possible vCPU.
        let more = match on {
            VmEventTargets::WholeVm => count * usize::from(self.registry.max()),
            VmEventTargets::EveryVcpu | VmEventTargets::Listed(_) => count * vcpus.len(),
        };
        if self.open_events() + more > MAX_EVENTS {
            return fail(
                RequestErrorKind::Limit,
                format!("a connection may have {MAX_EVENTS} events; ask for fewer events or vCPUs"),
            );
        }
        if let Some(sampling) = sampling {
            sampling::check(&self.pmu, sampling)?;
        }
        if sampling.is_some() && vcpus.iter().any(|v| self.rings.contains_key(v)) {
            return fail(
                RequestErrorKind::Invalid,
                "open sampling events before their ring",
            );
        }
        let before = self.events.len();
        let places: Vec<Option<u32>> = match on {
            VmEventTargets::WholeVm => vec![None],
            VmEventTargets::EveryVcpu | VmEventTargets::Listed(_) => vcpus.into_iter().map(Some).collect(),
        };
        let mut opened = Vec::with_capacity(count * places.len());
        for (nth, place) in places.into_iter().enumerate() {
            let mut index = 0;
            for group in &groups {
                let whole = is_whole(group).or_else(|e| fail(RequestErrorKind::Invalid, error_line(&e)))?;
                // A VM-wide event is opened once, regardless of the number of requested vCPUs.
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
        if on == VmEventTargets::EveryVcpu {
            self.hotplug_events.push(HotplugEvents { groups, sampling });
        }
        Ok(opened)
    }

    /// Returns the number of open events that counts towards the limit. An event of the whole VM
    /// counts as one event per possible vCPU.
    fn open_events(&self) -> usize {
        let whole = usize::from(self.registry.max());
        let weight = |e: &OpenEvent| if e.vcpu.is_some() { 1 } else { whole };
        self.events.iter().map(weight).sum()
    }

    /// Opens the events that were requested for every vCPU on the new vCPU `vcpu`, which has
    /// entered perf-core but which the guest does not see yet. Also creates a ring for the vCPU if
    /// the client has created rings, and enables the events if the client has enabled the others.
    pub fn open_on_new_vcpu(&mut self, vcpu: u32) {
        for event in self.events.iter_mut().filter(|e| e.vcpu == Some(vcpu)) {
            event.gone = true;
        }
        if self.hotplug_events.is_empty() {
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
        // Keep one entry per vCPU, so that the list is bounded even if the client never requests
        // it.
        self.joined.retain(|joined| joined.vcpu != vcpu);
        self.joined.push(PluggedVcpuEvents {
            vcpu,
            events,
            refused,
        });
    }

    #[expect(clippy::cast_possible_truncation, reason = "at most MAX_EVENTS")]
    fn follow(&mut self, vcpu: u32, opened: &mut Vec<OpenedEvent>) -> Result<(), RequestError> {
        let before = self.events.len();
        let hotplug_events = self.hotplug_events.clone();
        let samples = hotplug_events.iter().any(|f| f.sampling.is_some());
        if samples {
            // Removes the ring of a previous vCPU with this number. A reader keeps its own mapping.
            self.rings.remove(&vcpu);
            self.made.remove(&vcpu);
        }
        for HotplugEvents { groups, sampling } in &hotplug_events {
            let mut index = 0;
            for group in groups {
                if is_whole(group).unwrap_or(false) {
                    index += group.events.len() as u32;
                    continue;
                }
                if self.open_events() + group.events.len() > MAX_EVENTS {
                    return fail(
                        RequestErrorKind::Limit,
                        format!("a connection may have {MAX_EVENTS} events"),
                    );
                }
                self.open_group(group, Some(vcpu), *sampling, &mut index, opened)?;
            }
        }
        let sampled = |e: &OpenEvent| e.handle.attr().is_sampling();
        if let Some(layout) = self.ring_layout
            && samples
            && self.events[before..].iter().any(sampled)
        {
            self.ring(vcpu, layout)?;
            self.made.insert(vcpu);
        }
        if self.enabled {
            for event in &self.events[before..] {
                event
                    .handle
                    .enable(EventOrGroup::Event)
                    .or_else(|e| fail(RequestErrorKind::Internal, error_line(&e)))?;
                if let Some(ring) = &event.ring
                    && let Err(e) = ring.sampling.sampler.set_enabled(true)
                {
                    log::warn!("the host kernel's ring: {e}");
                }
            }
        }
        Ok(())
    }

    /// Returns the events that were opened on hot-plugged vCPUs since the last call.
    pub fn joined(&mut self) -> Vec<PluggedVcpuEvents> {
        std::mem::take(&mut self.joined)
    }

    fn chosen(&self, vcpus: Option<&[u32]>) -> Result<Vec<u32>, RequestError> {
        let mut chosen = match vcpus {
            None => self.registry.present().numbers().map(u32::from).collect(),
            Some(list) => list.to_vec(),
        };
        chosen.sort_unstable();
        chosen.dedup();
        let present = self.registry.present();
        if let Some(no) = chosen.iter().find(|v| !has(present, **v)) {
            return fail(
                RequestErrorKind::Invalid,
                format!("vCPU {no} not found: the VM has {}", registry::named(present)),
            );
        }
        Ok(chosen)
    }

    fn open_group(
        &mut self,
        group: &EventGroup,
        vcpu: Option<u32>,
        sampling: Option<SamplingParams>,
        index: &mut u32,
        opened: &mut Vec<OpenedEvent>,
    ) -> Result<(), RequestError> {
        let mut leader = None;
        for (i, spec) in group.events.iter().enumerate() {
            let result = if i > 0 && leader.is_none() {
                let why = "the leader of its group cannot be counted".to_owned();
                Err(EventOpenError::Unsupported(why))
            } else {
                self.open_one(spec, vcpu, sampling, leader)
            };
            let mut said = OpenedEvent {
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
                Err(EventOpenError::Unsupported(why)) => said.unsupported = Some(why),
                Err(EventOpenError::Refused(failure)) => return Err(failure),
            }
            opened.push(said);
        }
        Ok(())
    }

    fn open_one(
        &mut self,
        spec: &EventListEntry,
        vcpu: Option<u32>,
        sampling: Option<SamplingParams>,
        leader: Option<usize>,
    ) -> Result<(usize, OperatorEvent, Option<String>), EventOpenError> {
        let mut event =
            operator_event(&self.pmu, spec).map_err(|e| EventOpenError::Unsupported(error_line(&e)))?;
        let (mut ring, mut no_ring) = (None, None);
        if let (Some(_), None) = (sampling, vcpu) {
            let why = "a count of the whole VM has no samples".to_owned();
            return Err(EventOpenError::Unsupported(why));
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
            // The group leader determines whether the group is pinned and enabled.
            event.attr.pinned = false;
            event.attr.exclusive = false;
        }
        let group = leader.and_then(|at| self.events.get(at)).map(|e| &e.handle);
        let target = vcpu.map_or(EventOpenTarget::Vm, |vcpu| EventOpenTarget::Vcpu(VcpuId(vcpu)));
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

    /// Configures the host kernel to sample the event that `attr` describes, if the kernel supports
    /// this and the user is permitted to sample.
    fn host_ring(&self, vcpu: VcpuId, attr: &Attr) -> Result<HostRing, HostRingUnavailable> {
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

    fn ring_of(&self, handle: u32) -> Result<(&OpenEvent, &HostRing), RequestError> {
        let event = usize::try_from(handle).ok().and_then(|at| self.events.get(at));
        match event.and_then(|event| Some((event, event.ring.as_ref()?))) {
            Some(found) => Ok(found),
            None => fail(
                RequestErrorKind::Invalid,
                format!("event {handle} has no ring of the host's kernel"),
            ),
        }
    }

    /// Returns a description of the ring into which the host kernel samples the event `handle`, and
    /// a duplicate of the ring's file descriptor.
    ///
    /// # Errors
    /// Returns a [`RequestError`] if the event does not exist, it has no such ring, or no
    /// descriptor is free.
    pub fn share_host_ring(&self, handle: u32) -> Result<(HostRingInfo, OwnedFd), RequestError> {
        let (_, ring) = self.ring_of(handle)?;
        let internal = |e: std::io::Error| RequestError {
            kind: RequestErrorKind::Internal,
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

    /// Returns a descriptor of a host perf event that records the context switches of the thread of
    /// `vcpu`.
    ///
    /// # Errors
    /// Returns a [`RequestError`] if the vCPU is not running or the host rejects the event.
    pub fn share_thread_switches(&self, vcpu: u32) -> Result<OwnedFd, RequestError> {
        let unsupported = |e: &dyn std::error::Error| RequestError {
            kind: RequestErrorKind::Unsupported,
            message: format!("context switches of vCPU {vcpu}: {}", error_line(e)),
        };
        let switches = self
            .pmu
            .thread_switches(VcpuId(vcpu))
            .map_err(|e| unsupported(&e))?;
        switches.as_fd().try_clone_to_owned().map_err(|e| unsupported(&e))
    }

    /// Makes the VMM take one of every `every` samples of the event `handle`, which the host kernel
    /// also samples into its own ring.
    ///
    /// # Errors
    /// Returns a [`RequestError`] if the event does not exist, it has no ring of the host kernel,
    /// or `every` is 0.
    pub fn sample_in_vmm(&self, handle: u32, every: u32) -> Result<(), RequestError> {
        let (event, ring) = self.ring_of(handle)?;
        if every == 0 {
            return fail(RequestErrorKind::Invalid, "chains on every 0th sample");
        }
        let rate = rate_for(event.handle.attr(), ring.rate, every);
        event
            .handle
            .set_period(rate)
            .or_else(|e| fail(RequestErrorKind::Invalid, error_line(&e)))
    }

    /// Enables all events of the session, or disables them.
    pub fn set_enabled(&mut self, on: bool) {
        self.enabled = on;
        if on {
            self.session.enable_all();
            if self.pmu.steps_for_operators() {
                // Single-stepping starts at a VM entry, so running vCPUs must leave the guest
                // first.
                self.registry.kicker().kick();
            }
        } else {
            self.session.disable_all();
        }
        for ring in self.events.iter().filter_map(|e| e.ring.as_ref()) {
            if let Err(e) = ring.sampling.sampler.set_enabled(on) {
                log::warn!("the host kernel's ring: {e}");
            }
        }
    }

    /// Reads the counts of all open events.
    #[expect(clippy::cast_possible_truncation, reason = "at most MAX_EVENTS")]
    pub fn read(&self) -> Vec<EventReading> {
        let present = self.registry.present();
        let read = |(at, event): (usize, &OpenEvent)| {
            let DetailedReading {
                reading,
                estimate,
                vcpus,
            } = event.handle.read_in_detail().ok()?;
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
                vcpus: vcpus.iter().map(part).collect(),
            })
        };
        self.events.iter().enumerate().filter_map(read).collect()
    }

    /// Returns, for each vCPU, the number of lost records that its ring does not report yet.
    pub fn losses(&self) -> Vec<RingLoss> {
        let loss = |(vcpu, ring): (&u32, &Arc<Ring>)| RingLoss {
            vcpu: *vcpu,
            lost: ring.pending_lost(),
        };
        self.rings.iter().map(loss).collect()
    }

    /// Closes all events of the session and their rings.
    pub fn close(&mut self) {
        self.events.clear();
        self.rings.clear();
        self.made.clear();
        self.hotplug_events.clear();
        self.joined.clear();
        self.ring_layout = None;
        self.enabled = false;
    }

    /// Returns the number of open events of the session.
    pub fn len(&self) -> usize {
        self.events.len()
    }

    /// Returns whether no event is open.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Creates one ring for all sampling events of `vcpu`.
    ///
    /// # Errors
    /// Returns a [`RequestError`] if the size is too large or not a power of two, the vCPU has no
    /// sampling event or already has a ring, or the memory limit is reached.
    pub fn ring(
        &mut self,
        vcpu: u32,
        layout: RingLayout,
    ) -> Result<(SampleRingInfo, Arc<Ring>), RequestError> {
        let pages = layout.pages;
        if pages == 0 || pages > MAX_RING_PAGES || !pages.is_power_of_two() {
            return fail(
                RequestErrorKind::Invalid,
                format!("a ring has 1 to {MAX_RING_PAGES} data pages, a power of two; not {pages}"),
            );
        }
        if self.rings.contains_key(&vcpu) && !self.made.remove(&vcpu) {
            return fail(
                RequestErrorKind::Invalid,
                format!("vCPU {vcpu} has a ring already"),
            );
        }
        let mut of_vcpu = self
            .events
            .iter()
            .filter(|e| e.vcpu == Some(vcpu) && !e.gone && e.handle.attr().is_sampling())
            .map(|e| &e.handle);
        let Some(first) = of_vcpu.next() else {
            return fail(
                RequestErrorKind::Invalid,
                format!("no sampling event is open on vCPU {vcpu}"),
            );
        };
        if let Some(ring) = self.rings.get(&vcpu) {
            // The ring was already created when the vCPU was hot-plugged.
            return Ok((self.ring_info(vcpu, first.attr()), ring.clone()));
        }
        let others: Vec<&EventHandle> = of_vcpu.collect();
        let ring = shared_ring(first, &others, layout)?;
        let info = self.ring_info(vcpu, first.attr());
        self.rings.insert(vcpu, ring.clone());
        self.ring_layout = Some(layout);
        self.pmu.probe().add_listener();
        Ok((info, ring))
    }

    fn ring_info(&self, vcpu: u32, attr: &Attr) -> SampleRingInfo {
        SampleRingInfo {
            vcpu,
            sample_type: attr.sample_type.bits(),
            clock_offset_ns: Some(self.clock_offset_ns()),
        }
    }

    /// Returns the difference, in nanoseconds, between the host's `CLOCK_MONOTONIC` and the clock
    /// that gives the times of samples.
    fn clock_offset_ns(&self) -> u64 {
        host::monotonic_ns().saturating_sub(self.pmu.core().now_ns())
    }
}

fn has(vcpus: VcpuSet, vcpu: u32) -> bool {
    u8::try_from(vcpu).is_ok_and(|vcpu| vcpus.contains(vcpu))
}

/// Converts what an event counted on one vCPU to the form that clients receive.
fn part(of: &VcpuReading) -> VcpuReadingPart {
    VcpuReadingPart {
        vcpu: of.vcpu.0,
        value: of.reading.value,
        enabled_ns: of.reading.time_enabled_ns,
        running_ns: of.reading.time_running_ns,
        estimate: of.estimate.map(|e| e.value),
        standard_error: of.estimate.and_then(|e| e.standard_error),
        bound: of.estimate.and_then(|e| e.bound),
    }
}

/// Returns whether the events of a group count for the whole VM, or an error if only some of them
/// do.
fn is_whole(group: &EventGroup) -> Result<bool, MixedGroupError> {
    let mut whole = group.events.iter().map(EventListEntry::is_of_vm);
    let first = whole.next().unwrap_or(false);
    if whole.any(|other| other != first) {
        return Err(MixedGroupError);
    }
    Ok(first)
}

/// Returns the session role of user `uid`, which determines permissions and limits in perf-core.
pub(crate) fn role(uid: u32) -> SessionRole {
    if uid == 0 {
        SessionRole::Admin
    } else {
        SessionRole::Operator
    }
}

fn not_opened(error: PerfEventOpenError) -> EventOpenError {
    let message = error_line(&error);
    let kind = match &error {
        PerfEventOpenError::NoDriver(_)
        | PerfEventOpenError::NoSuchSoftwareEvent(_)
        | PerfEventOpenError::Driver(PmuError::NoSuchEvent | PmuError::Unsupported(_)) => {
            return EventOpenError::Unsupported(message);
        }
        PerfEventOpenError::HostKernelDenied
        | PerfEventOpenError::VmWideDenied
        | PerfEventOpenError::NotOwner
        | PerfEventOpenError::RawDenied => RequestErrorKind::Denied,
        PerfEventOpenError::FrequencyTooHigh { .. } => {
            return EventOpenError::Refused(RequestError {
                kind: RequestErrorKind::Limit,
                message: format!("{message}; ask for less, or start the VM with a higher --sample-limit"),
            });
        }
        PerfEventOpenError::GroupTooLarge { .. } | PerfEventOpenError::Overcommitted { .. } => {
            RequestErrorKind::Limit
        }
        PerfEventOpenError::Driver(PmuError::Busy | PmuError::Mediated(_)) => RequestErrorKind::Unsupported,
        PerfEventOpenError::Driver(PmuError::Os { what, source })
            if matches!(source.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) =>
        {
            let message = format!(
                "{what}: {source}: close some events, or start the VM with a larger limit (ulimit -n)"
            );
            return EventOpenError::Refused(RequestError {
                kind: RequestErrorKind::Limit,
                message,
            });
        }
        // A denied event does not fail the request, because its other events may be countable.
        PerfEventOpenError::Driver(PmuError::Os { source, .. })
            if matches!(source.raw_os_error(), Some(libc::EACCES | libc::EPERM)) =>
        {
            return EventOpenError::Unsupported(backing::EVENT_DENIED.to_owned());
        }
        PerfEventOpenError::Driver(PmuError::Os { what, source }) => {
            return EventOpenError::Refused(RequestError {
                kind: RequestErrorKind::Internal,
                message: format!("{what}: {source}"),
            });
        }
        _ => RequestErrorKind::Invalid,
    };
    EventOpenError::Refused(RequestError { kind, message })
}
