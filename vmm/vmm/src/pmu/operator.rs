//! Operator events: translation of an event specification (`-e`) to a perf-core event.

use perf_core::Attr;
use perf_core::EventType;
use perf_core::pmu::clock::ClockPmu;
use perf_core::pmu::host::{GuestSampler, MIN_CLOCK_PERIOD_NS};
use perf_core::pmu::{PmuError, VcpuId};
use vpmu::{ArchEvent, Backing, EventSource, ParavirtualEvent};

use super::VmPmu;
use control_api::events::list::{EventKind, EventSpec, HardwareEvent, SoftwareEvent};

/// Perf-core description of an operator's event.
#[derive(Clone, Debug)]
pub struct OperatorEvent {
    /// Event attributes, initially disabled.
    pub attr: Attr,
    /// Name of the backing.
    pub backing: &'static str,
    /// Counts are in nanoseconds.
    pub nanoseconds: bool,
    /// Counts are estimates even without multiplexing.
    pub estimate: bool,
}

/// Sampling of an operator's event in the host's kernel.
#[derive(Debug)]
pub struct HostSampling {
    /// Stopped host event.
    pub sampler: GuestSampler,
    /// Sampling period in events; `None` if each sample carries its period.
    pub period: Option<u64>,
    /// Samples also include the host's kernel.
    pub sees_host: bool,
    /// KVM interprets the guest's kernel, so samples do not show guest kernel code.
    pub interpreted: bool,
}

/// Reason why the host's kernel cannot sample an event.
#[derive(Debug, thiserror::Error)]
pub enum HostSamplingError {
    /// The vCPU has no thread yet.
    #[error("vCPU {0} is not running yet")]
    NotRunning(u32),
    /// The host's clock cannot distinguish guest privilege levels.
    #[error("the vCPU's clock cannot distinguish privilege levels")]
    OneLevel,
    /// The host has no usable hardware PMU.
    #[error("this host has no usable hardware PMU; see perfvisor check")]
    NoPmu,
    /// The event's driver is not part of the host's kernel.
    #[error("only events of the host's PMU and the vCPU's clock can be sampled in the host's kernel")]
    OtherDriver,
    /// The host rejected the event.
    #[error(transparent)]
    Refused(#[from] PmuError),
}

/// Reason why an operator's event cannot be counted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnsupportedEventError {
    /// Modifier `h` without `G`.
    #[error("events count the guest only; for the host, use perf on the VMM's threads")]
    HostOnly,
    /// Modifiers `p` and `P`.
    #[error("precise sampling of a guest is unsupported")]
    Precise,
    /// The event requires a hardware PMU, which this host lacks.
    #[error("this host has no hardware PMU")]
    NoPmu,
    /// The host's PMU does not support the event, and no other backing counts it.
    #[error("this host's PMU does not support '{0}'")]
    NotOnHost(String),
    /// KVM has no statistic of this name.
    #[error("statistic '{0}' not found in this host's KVM")]
    NoStatistic(String),
    /// The host has no source for the paravirtual event.
    #[error("this host cannot count '{0}' for operators")]
    NoParavirtual(String),
}

impl VmPmu {
    /// Converts a sampling frequency of the vCPU clock to the equivalent period, because the clock
    /// has a known rate. Linux does the same.
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

    /// Samples the event `attr` in the host's kernel, on the thread of `vcpu`. The period of a
    /// clock event may be increased, see [`HostSampling::period`].
    ///
    /// # Errors
    /// Returns [`HostSamplingError`] with the reason.
    pub fn host_sampling(&self, vcpu: VcpuId, attr: &Attr) -> Result<HostSampling, HostSamplingError> {
        let clock = self
            .clock
            .clock_of(vcpu)
            .ok_or(HostSamplingError::NotRunning(vcpu.0))?;
        if attr.ty == EventType::CLOCK {
            if attr.exclude_user || attr.exclude_kernel {
                return Err(HostSamplingError::OneLevel);
            }
            let khz = u128::from(clock.tsc_khz().max(1));
            let shortest = u128::from(MIN_CLOCK_PERIOD_NS) * khz / 1_000_000;
            let period = attr
                .sample_period
                .max(u64::try_from(shortest).unwrap_or(u64::MAX));
            let period_ns = u128::from(period) * 1_000_000 / khz;
            let period_ns = u64::try_from(period_ns).unwrap_or(u64::MAX);
            return Ok(HostSampling {
                sampler: GuestSampler::clock(clock.tid(), period_ns)?,
                period: Some(period),
                sees_host: true,
                interpreted: self.clock.interprets_kernel(),
            });
        }
        if [EventType::HARDWARE, EventType::HW_CACHE, EventType::RAW].contains(&attr.ty) {
            if self.hardware.is_none() {
                return Err(HostSamplingError::NoPmu);
            }
            return Ok(HostSampling {
                sampler: GuestSampler::hardware(clock.tid(), attr)?,
                period: None,
                sees_host: !attr.exclude_host,
                interpreted: false,
            });
        }
        Err(HostSamplingError::OtherDriver)
    }

    /// Translates `spec` to an event that can be counted on this host.
    ///
    /// # Errors
    /// Returns [`UnsupportedEventError`] with the reason.
    pub fn operator_event(&self, spec: &EventSpec) -> Result<OperatorEvent, UnsupportedEventError> {
        let m = &spec.modifiers;
        if m.host && !m.guest {
            return Err(UnsupportedEventError::HostOnly);
        }
        if m.precise > 0 || m.precise_max {
            return Err(UnsupportedEventError::Precise);
        }
        let (ty, config, config1, config2, backing, nanoseconds) = match &spec.kind {
            EventKind::Hardware(event) => {
                let way = self.generic(*event).ok_or_else(|| match self.hardware {
                    Some(_) => UnsupportedEventError::NotOnHost(spec.name.clone()),
                    None => UnsupportedEventError::NoPmu,
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
                return Err(UnsupportedEventError::NoPmu);
            }
            EventKind::Software(event) => {
                let time = matches!(event, SoftwareEvent::CpuClock | SoftwareEvent::TaskClock);
                (EventType::SOFTWARE, *event as u64, 0, 0, "software", time)
            }
            EventKind::Kvm(name) => {
                let config = self
                    .kvm
                    .config(name)
                    .ok_or_else(|| UnsupportedEventError::NoStatistic(name.clone()))?;
                (EventType::KVM, config, 0, 0, "kvm-stat", false)
            }
            EventKind::Paravirtual(name) => {
                let event = ParavirtualEvent::ALL.into_iter().find(|e| e.name() == *name);
                let way = event.and_then(|event| self.sources().paravirtual_for_operator(event));
                let way = way.ok_or_else(|| UnsupportedEventError::NoParavirtual((*name).to_owned()))?;
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
            // Software events of the host (page faults, context switches) occur on the host; all
            // other events count the guest.
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

    /// Returns the source that counts one of perf's generic events.
    fn generic(&self, event: HardwareEvent) -> Option<EventSource> {
        let number = event as u64;
        match ArchEvent::ALL
            .into_iter()
            .find(|arch| arch.generic_number() == Some(number))
        {
            Some(arch) => self.sources().for_operator(arch),
            // Other perf event numbers have a processor-specific meaning.
            None => self.hardware.map(|_| EventSource {
                backing: Backing::Hardware,
                ty: EventType::HARDWARE,
                config: number,
                known: false,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use control_api::events::list;
    use perf_core::pmu::clock::VcpuClock;
    use perf_core::pmu::host::{GenericEvent, HostProbe};
    use vm_memory::{GuestAddress, GuestMemoryMmap};
    use vpmu::{BackingPolicy, PmuModel};

    use super::*;
    use crate::pmu::{GuestSamplingContext, PmuConfig};

    /// Returns the PMU of a VM on a host that opens these generic events, or that has no PMU if
    /// `None`.
    fn vm(opens: Option<&[&str]>, interprets_kernel: bool) -> VmPmu {
        let mut probe = HostProbe::run();
        probe.hardware_pmu = opens.is_some();
        for GenericEvent {
            name, opens: opened, ..
        } in &mut probe.generic
        {
            *opened = opens.is_some_and(|opens| opens.contains(&name.as_str()));
        }
        let config = PmuConfig::new(PmuModel::INTEL, BackingPolicy::None);
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        VmPmu::new(
            config,
            &probe,
            None,
            interprets_kernel,
            GuestSamplingContext::new(memory, None),
        )
    }

    fn event(vm: &VmPmu, text: &str) -> Result<OperatorEvent, UnsupportedEventError> {
        let groups = list::parse(text).unwrap_or_else(|e| panic!("{text}: {e}"));
        vm.operator_event(&groups[0].events[0])
    }

    /// An operator can count everything that the host supports, independent of the guest's PMU, and
    /// receives the name of the backing.
    #[test]
    fn operator_events_without_pmu_use_clock_and_software() {
        let vm = vm(None, false);
        for (text, backing, nanoseconds) in [
            ("cycles", "clock", false),
            ("ref-cycles", "clock", false),
            ("task-clock", "software", true),
            ("page-faults", "software", false),
            ("io-exits", "vmm", false),
            ("steal-ns", "software", true),
        ] {
            let event = event(&vm, text).unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!(
                (event.backing, event.nanoseconds),
                (backing, nanoseconds),
                "{text}"
            );
            assert!(event.attr.disabled && !event.estimate, "{text}");
        }
        for (text, why) in [
            ("instructions", UnsupportedEventError::NoPmu),
            ("stalled-cycles-frontend", UnsupportedEventError::NoPmu),
            ("r1a8", UnsupportedEventError::NoPmu),
            ("L1-dcache-load-misses", UnsupportedEventError::NoPmu),
            ("kvm:exits", UnsupportedEventError::NoStatistic("exits".into())),
            (
                "vm-exits",
                UnsupportedEventError::NoParavirtual("vm-exits".into()),
            ),
        ] {
            assert_eq!(event(&vm, text).unwrap_err(), why, "{text}");
        }
    }

    #[test]
    fn operator_event_not_on_host_is_named() {
        let vm = vm(Some(&["cycles", "instructions"]), false);
        for (text, ty, config) in [
            ("cycles", EventType::HARDWARE, 0),
            ("instructions", EventType::HARDWARE, 1),
            ("r1a8", EventType::RAW, 0x1A8),
            ("L1-dcache-load-misses", EventType::HW_CACHE, 0x1_0000),
        ] {
            let event = event(&vm, text).unwrap_or_else(|e| panic!("{text}: {e}"));
            assert_eq!((event.attr.ty, event.attr.config), (ty, config), "{text}");
            assert_eq!(event.backing, "hardware");
        }
        assert_eq!(
            event(&vm, "branch-misses").unwrap_err(),
            UnsupportedEventError::NotOnHost("branch-misses".into())
        );
    }

    /// An event of the guest never counts the host.
    #[test]
    fn modifiers_select_levels_and_exclude_host() {
        let vm = vm(None, false);
        let user = event(&vm, "cycles:uD").unwrap();
        assert!(user.attr.exclude_kernel && !user.attr.exclude_user && user.attr.exclude_host);
        assert!(user.attr.pinned && user.estimate, "the clock does not see levels");
        assert!(!event(&vm, "page-faults").unwrap().attr.exclude_host);
        assert_eq!(
            event(&vm, "cycles:H").unwrap_err(),
            UnsupportedEventError::HostOnly
        );
        assert_eq!(
            event(&vm, "cycles:pp").unwrap_err(),
            UnsupportedEventError::Precise
        );
    }

    #[test]
    fn clock_frequency_becomes_period() {
        let vm = vm(None, false);
        let at_1000_hz = || {
            let mut attr = event(&vm, "cycles").unwrap().attr;
            (attr.freq, attr.sample_period) = (true, 1000);
            attr
        };
        let mut attr = at_1000_hz();
        vm.clock_period(VcpuId(0), &mut attr);
        assert_eq!(
            (attr.freq, attr.sample_period),
            (true, 1000),
            "its clock is not known"
        );
        vm.clock
            .add_vcpu(VcpuId(0), Arc::new(VcpuClock::for_current_thread(2_000_000)));
        vm.clock_period(VcpuId(0), &mut attr);
        assert_eq!((attr.freq, attr.sample_period), (false, 2_000_000));
        let mut never = at_1000_hz();
        never.sample_period = 0;
        vm.clock_period(VcpuId(0), &mut never);
        assert!(never.sample_period > 0);
    }

    /// Host samples state whether they show the guest's kernel, which only the VM can determine.
    #[test]
    fn host_samples_report_interpreted_kernel() {
        for interprets in [false, true] {
            let vm = vm(None, interprets);
            let clock = event(&vm, "cycles").unwrap().attr;
            let refused = |attr: &Attr| vm.host_sampling(VcpuId(0), attr).unwrap_err();
            assert!(matches!(refused(&clock), HostSamplingError::NotRunning(0)));
            vm.clock
                .add_vcpu(VcpuId(0), Arc::new(VcpuClock::for_current_thread(2_000_000)));
            let of = |ty, exclude_user| Attr {
                ty,
                exclude_user,
                sample_period: 2_000_000,
                ..clock.clone()
            };
            assert!(matches!(
                refused(&of(EventType::CLOCK, true)),
                HostSamplingError::OneLevel
            ));
            assert!(matches!(
                refused(&of(EventType::HARDWARE, false)),
                HostSamplingError::NoPmu
            ));
            assert!(matches!(
                refused(&of(EventType::KVM, false)),
                HostSamplingError::OtherDriver
            ));
            match vm.host_sampling(VcpuId(0), &of(EventType::CLOCK, false)) {
                Ok(sampling) => {
                    assert_eq!(sampling.interpreted, interprets);
                    assert_eq!((sampling.period, sampling.sees_host), (Some(2_000_000), true));
                    let short = Attr {
                        sample_period: 1,
                        ..of(EventType::CLOCK, false)
                    };
                    // Period of the host event at 2 GHz.
                    let real = Some(2 * MIN_CLOCK_PERIOD_NS);
                    assert_eq!(vm.host_sampling(VcpuId(0), &short).unwrap().period, real);
                }
                Err(e) => eprintln!("SKIP: this user may not sample: {}", perf_core::error_line(&e)),
            }
        }
    }
}
