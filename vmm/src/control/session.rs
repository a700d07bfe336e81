//! One connection's events: opened, read and sampled through perf-core, closed with the connection.

use std::collections::BTreeMap;
use std::sync::Arc;

use perf_core::pmu::{PmuError, VcpuId};
use perf_core::ring::Ring;
use perf_core::{Attr, Handle, MapError, OpenError, OpenFlags, OpenTarget, Role, SampleType, Session, State};

use super::protocol::{
    EventReading, Failure, FailureKind, MAX_EVENTS, MAX_RING_PAGES, Opened, RingInfo, RingLoss, Sampling,
};
use crate::events::list::{self, EventGroup, EventSpec};
use crate::pmu::VmPmu;

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
    vcpus: u32,
}

#[derive(Debug)]
struct OpenEvent {
    handle: Handle,
    vcpu: u32,
}

/// How an event that is not opened is told of: not possible here, or refused.
enum NotOpened {
    Unsupported(String),
    Refused(Failure),
}

impl EventSession {
    /// For user `uid` of a VM with `vcpus` vCPUs.
    pub fn new(pmu: Arc<VmPmu>, uid: u32, vcpus: u32) -> Self {
        Self {
            session: pmu.core().session(uid, role(uid)),
            events: Vec::new(),
            rings: BTreeMap::new(),
            pmu,
            vcpus,
        }
    }

    /// Opens a list of events on some vCPUs, or all; disabled.
    ///
    /// # Errors
    /// A list or a vCPU that is none, a limit, or what this user may not do: then nothing of the list stays open. What
    /// cannot be counted here is no error, and is said of each event.
    pub fn open(
        &mut self,
        text: &str,
        vcpus: Option<&[u32]>,
        sampling: Option<Sampling>,
    ) -> Result<Vec<Opened>, Failure> {
        let groups = list::parse(text).or_else(|e| fail(FailureKind::Invalid, e.to_string()))?;
        let vcpus = self.chosen(vcpus)?;
        let count: usize = groups.iter().map(|g| g.events.len()).sum();
        if self.events.len() + count * vcpus.len() > MAX_EVENTS {
            return fail(
                FailureKind::Limit,
                format!("a connection may have {MAX_EVENTS} events; ask for fewer events or vCPUs"),
            );
        }
        if sampling.is_some() && vcpus.iter().any(|v| self.rings.contains_key(v)) {
            return fail(FailureKind::Invalid, "open sampling events before their ring");
        }
        let before = self.events.len();
        let mut opened = Vec::with_capacity(count * vcpus.len());
        for vcpu in vcpus {
            let mut index = 0;
            for group in &groups {
                if let Err(refused) = self.open_group(group, vcpu, sampling, &mut index, &mut opened) {
                    self.events.truncate(before);
                    return Err(refused);
                }
            }
        }
        Ok(opened)
    }

    fn chosen(&self, vcpus: Option<&[u32]>) -> Result<Vec<u32>, Failure> {
        let mut chosen = match vcpus {
            None => (0..self.vcpus).collect(),
            Some(list) => list.to_vec(),
        };
        chosen.sort_unstable();
        chosen.dedup();
        if let Some(no) = chosen.iter().find(|v| **v >= self.vcpus) {
            return fail(
                FailureKind::Invalid,
                format!("no vCPU {no}: the VM has 0 to {}", self.vcpus.saturating_sub(1)),
            );
        }
        Ok(chosen)
    }

    fn open_group(
        &mut self,
        group: &EventGroup,
        vcpu: u32,
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
            };
            *index += 1;
            match result {
                Ok((at, event)) => {
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
        vcpu: u32,
        sampling: Option<Sampling>,
        leader: Option<usize>,
    ) -> Result<(usize, crate::pmu::OperatorEvent), NotOpened> {
        let mut event = self.pmu.operator_event(spec).map_err(NotOpened::Unsupported)?;
        if let Some(sampling) = sampling {
            sample_with(&mut event.attr, sampling, spec);
        }
        if leader.is_some() {
            // A group is pinned, and switched on, by its leader.
            event.attr.pinned = false;
            event.attr.exclusive = false;
        }
        let group = leader.and_then(|at| self.events.get(at)).map(|e| &e.handle);
        let target = OpenTarget::Vcpu(VcpuId(vcpu));
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
        self.events.push(OpenEvent { handle, vcpu });
        Ok((self.events.len() - 1, event))
    }

    /// Enables or disables all events.
    pub fn set_enabled(&self, on: bool) {
        if on {
            self.session.enable_all();
        } else {
            self.session.disable_all();
        }
    }

    /// Reads all events.
    pub fn read(&self) -> Vec<EventReading> {
        let read = |(at, event): (usize, &OpenEvent)| {
            let reading = event.handle.read().ok()?;
            let estimate = event.handle.estimate().ok().flatten();
            Some(EventReading {
                handle: at as u32,
                value: reading.value,
                enabled_ns: reading.time_enabled_ns,
                running_ns: reading.time_running_ns,
                estimate: estimate.map(|e| e.value),
                standard_error: estimate.and_then(|e| if e.exact { Some(0.0) } else { e.standard_error }),
                failed: event.handle.state() == State::Error,
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
    /// A size that is none, a vCPU without a sampling event or with a ring, the memory limit.
    pub fn ring(&mut self, vcpu: u32, pages: u32) -> Result<(RingInfo, Arc<Ring>), Failure> {
        if pages == 0 || pages > MAX_RING_PAGES || !pages.is_power_of_two() {
            return fail(
                FailureKind::Invalid,
                format!("a ring has 1 to {MAX_RING_PAGES} data pages, a power of two; not {pages}"),
            );
        }
        if self.rings.contains_key(&vcpu) {
            return fail(FailureKind::Invalid, format!("vCPU {vcpu} has a ring already"));
        }
        let mut of_vcpu = self
            .events
            .iter()
            .filter(|e| e.vcpu == vcpu && e.handle.attr().is_sampling())
            .map(|e| &e.handle);
        let Some(first) = of_vcpu.next() else {
            return fail(
                FailureKind::Invalid,
                format!("no sampling event is open on vCPU {vcpu}"),
            );
        };
        let ring = first.map(pages as usize, true).map_err(|e| Failure {
            kind: match e {
                MapError::MemoryLimit { .. } => FailureKind::Limit,
                _ => FailureKind::Internal,
            },
            message: e.to_string(),
        })?;
        let sample_type = first.attr().sample_type.bits();
        for other in of_vcpu {
            if let Err(e) = other.set_output(Some(first)) {
                return fail(FailureKind::Internal, e.to_string());
            }
        }
        self.rings.insert(vcpu, ring.clone());
        Ok((RingInfo { vcpu, sample_type }, ring))
    }
}

/// What user `uid` may do.
pub(super) fn role(uid: u32) -> Role {
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
}

fn not_opened(error: OpenError) -> NotOpened {
    let message = error.to_string();
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
        OpenError::FrequencyTooHigh { .. }
        | OpenError::GroupTooLarge { .. }
        | OpenError::Overcommitted { .. } => FailureKind::Limit,
        OpenError::Driver(PmuError::Busy | PmuError::Mediated(_)) => FailureKind::Unsupported,
        OpenError::Driver(_) => FailureKind::Internal,
        _ => FailureKind::Invalid,
    };
    NotOpened::Refused(Failure { kind, message })
}
