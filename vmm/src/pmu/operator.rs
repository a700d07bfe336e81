//! An operator's events: from what was written after `-e` to what perf-core opens.

use perf_core::Attr;
use perf_core::EventType;
use perf_core::pmu::clock::ClockPmu;
use perf_core::pmu::host::GuestSampler;
use perf_core::pmu::{PmuError, VcpuId};
use vpmu::{ArchEvent, Backing, CounterView, EventRequest, GuestEvent, ParavirtualEvent, Way};

use super::VmPmu;
use control_api::events::list::{EventKind, EventSpec, HardwareEvent, SoftwareEvent};
use control_api::protocol::GuestCounter;

/// An operator's event as perf-core takes it, counting.
#[derive(Clone, Debug)]
pub struct OperatorEvent {
    /// The attributes, disabled.
    pub attr: Attr,
    /// Who counts.
    pub backing: &'static str,
    /// Its counts are nanoseconds.
    pub nanoseconds: bool,
    /// Its counts are estimates even when it is on all the time.
    pub estimate: bool,
}

/// Samples that the host's kernel takes for an operator's event.
#[derive(Debug)]
pub struct HostSampling {
    /// The host's event, stopped.
    pub sampler: GuestSampler,
    /// Events each sample stands for; `None`: as the sample says.
    pub period: Option<u64>,
    /// The samples show where the host's kernel was, too.
    pub sees_host: bool,
    /// KVM interprets the guest's kernel here, which the samples do not show.
    pub interpreted: bool,
}

/// Why the host's kernel does not sample an event.
#[derive(Debug, thiserror::Error)]
pub enum NoHostSamples {
    /// There is no thread to sample.
    #[error("vCPU {0} does not run yet")]
    NotRunning(u32),
    /// The host's clock knows no privilege levels of the guest.
    #[error("the vCPU's clock is of one privilege level only")]
    OneLevel,
    /// No hardware event can be opened.
    #[error("no hardware PMU of this host can be used; perfvisor check says why")]
    NoPmu,
    /// A driver that is not the host kernel's.
    #[error("only the host's PMU and the vCPU's clock are sampled in the host's kernel")]
    OtherDriver,
    /// The host refused.
    #[error(transparent)]
    Refused(#[from] PmuError),
}

/// Why nothing counts an operator's event here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotCountable {
    /// Modifier `h` without `G`.
    #[error("events count the guest; for the host's side use perf on the VMM's threads")]
    HostOnly,
    /// Modifiers `p` and `P`.
    #[error("there is no precise sampling of a guest")]
    Precise,
    /// Nothing but the host's PMU could count it.
    #[error("this host has no hardware PMU")]
    NoPmu,
    /// The host's PMU has no such event, and nothing else could count it.
    #[error("this host's PMU does not count '{0}'")]
    NotOnHost(String),
    /// No such statistic.
    #[error("this host's KVM keeps no statistic '{0}'")]
    NoStatistic(String),
    /// A paravirtual event for which this host has no source.
    #[error("this host cannot count '{0}' for an operator")]
    NoParavirtual(String),
}

impl VmPmu {
    /// The vCPU clock runs at a known rate: a frequency becomes the period it means, as it does in Linux.
    pub fn clock_period(&self, vcpu: VcpuId, attr: &mut Attr) {
        if attr.ty == EventType::CLOCK
            && attr.freq
            && let Some(clock) = self.clock.clock_of(vcpu)
        {
            let hz = attr.sample_period.max(1);
            attr.sample_period = (u64::from(clock.tsc_khz()) * 1000 / hz).max(1);
            attr.freq = false;
        }
    }

    /// Lets the host's kernel sample what `attr` describes, on the thread of `vcpu`.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn host_sampling(&self, vcpu: VcpuId, attr: &Attr) -> Result<HostSampling, NoHostSamples> {
        let clock = self
            .clock
            .clock_of(vcpu)
            .ok_or(NoHostSamples::NotRunning(vcpu.0))?;
        if attr.ty == EventType::CLOCK {
            if attr.exclude_user || attr.exclude_kernel {
                return Err(NoHostSamples::OneLevel);
            }
            let cycles = u128::from(attr.sample_period);
            let period_ns = cycles * 1_000_000 / u128::from(clock.tsc_khz().max(1));
            let period_ns = u64::try_from(period_ns).unwrap_or(u64::MAX);
            return Ok(HostSampling {
                sampler: GuestSampler::clock(clock.tid(), period_ns)?,
                period: Some(attr.sample_period),
                sees_host: true,
                interpreted: self.clock.interprets_kernel(),
            });
        }
        if [EventType::HARDWARE, EventType::HW_CACHE, EventType::RAW].contains(&attr.ty) {
            if self.hardware.is_none() {
                return Err(NoHostSamples::NoPmu);
            }
            return Ok(HostSampling {
                sampler: GuestSampler::hardware(clock.tid(), attr)?,
                period: None,
                sees_host: !attr.exclude_host,
                interpreted: false,
            });
        }
        Err(NoHostSamples::OtherDriver)
    }

    /// What counts `spec` here.
    ///
    /// # Errors
    /// Why nothing does.
    pub fn operator_event(&self, spec: &EventSpec) -> Result<OperatorEvent, NotCountable> {
        let m = &spec.modifiers;
        if m.host && !m.guest {
            return Err(NotCountable::HostOnly);
        }
        if m.precise > 0 || m.precise_max {
            return Err(NotCountable::Precise);
        }
        let (ty, config, config1, config2, backing, nanoseconds) = match &spec.kind {
            EventKind::Hardware(event) => {
                let way = self.generic(*event).ok_or_else(|| match self.hardware {
                    Some(_) => NotCountable::NotOnHost(spec.name.clone()),
                    None => NotCountable::NoPmu,
                })?;
                (way.ty, way.config, 0, 0, way.backing.name(), false)
            }
            EventKind::Cache(config) if self.hardware.is_some() => {
                (EventType::HW_CACHE, *config, 0, 0, "hardware", false)
            }
            EventKind::Raw {
                config,
                config1,
                config2,
            } if self.hardware.is_some() => (EventType::RAW, *config, *config1, *config2, "hardware", false),
            EventKind::Cache(_) | EventKind::Raw { .. } => {
                return Err(NotCountable::NoPmu);
            }
            EventKind::Software(event) => {
                let time = matches!(event, SoftwareEvent::CpuClock | SoftwareEvent::TaskClock);
                (EventType::SOFTWARE, *event as u64, 0, 0, "software", time)
            }
            EventKind::Kvm(name) => {
                let config = self
                    .kvm
                    .config(name)
                    .ok_or_else(|| NotCountable::NoStatistic(name.clone()))?;
                (EventType::KVM, config, 0, 0, "kvm-stat", false)
            }
            EventKind::Paravirtual(name) => {
                let event = ParavirtualEvent::ALL.into_iter().find(|e| e.name() == *name);
                let way = event.and_then(|event| self.sources().paravirtual_for_operator(event));
                let way = way.ok_or_else(|| NotCountable::NoParavirtual((*name).to_owned()))?;
                let backing = match way.ty {
                    EventType::FED => "vmm",
                    _ => way.backing.name(),
                };
                (way.ty, way.config, 0, 0, backing, name.ends_with("-ns"))
            }
        };
        let attr = Attr {
            ty,
            config,
            config1,
            config2,
            disabled: true,
            pinned: m.pinned,
            exclusive: m.exclusive,
            exclude_user: m.exclude_user(),
            exclude_kernel: m.exclude_kernel(),
            exclude_idle: m.exclude_idle,
            // The side of the host's own events (page faults, switches) is the host; all others are the
            // guest's.
            exclude_host: ty != EventType::SOFTWARE,
            ..Attr::default()
        };
        Ok(OperatorEvent {
            estimate: ClockPmu::is_estimate(&attr),
            attr,
            backing,
            nanoseconds,
        })
    }

    /// Who counts one of perf's generic events.
    fn generic(&self, event: HardwareEvent) -> Option<Way> {
        let number = event as u64;
        match ArchEvent::ALL
            .into_iter()
            .find(|arch| arch.generic_number() == Some(number))
        {
            Some(arch) => self.sources().for_operator(arch),
            // perf has numbers for events that differ from one processor to the next.
            None => self.hardware.map(|_| Way {
                backing: Backing::Hardware,
                ty: EventType::HARDWARE,
                config: number,
                known: false,
            }),
        }
    }
}

/// A counter of the guest as it is shown.
pub(super) fn guest_counter(view: &CounterView) -> GuestCounter {
    GuestCounter {
        counter: view.counter.to_string(),
        enabled: view.enabled,
        event: view.request.as_ref().map(request_name),
        allowed: view.allowed,
        backing: view.backing.map(|b| b.name().to_owned()),
        value: view.value,
        counted: Some(view.counted),
        enabled_ns: Some(view.times.time_enabled_ns),
        running_ns: Some(view.times.time_running_ns),
        overflows: Some(view.overflows),
        pmi_requests: Some(view.pmi_requests),
        counting: Some(view.counting),
        fallback: view.fallback,
        uncounted_ns: Some(view.uncounted_ns),
    }
}

/// An event with the levels it counts, as perf writes them.
fn request_name(request: &EventRequest) -> String {
    let name = match (request.event, request.raw_config()) {
        (GuestEvent::Raw, Some(config)) => format!("r{config:x}"),
        (event, _) => event.to_string(),
    };
    match (request.user, request.kernel) {
        (true, false) => name + ":u",
        (false, true) => name + ":k",
        _ => name,
    }
}
