//! Determines how events of operators are counted, and samples them in the host's kernel.

use perf_core::pmu::host::{GuestSamplingEvent, MIN_CLOCK_PERIOD_NS, ThreadSwitches};
use perf_core::pmu::{PmuError, VcpuId};
use perf_core::{Attr, EventType};
use vpmu::{ArchEvent, CounterBacking, HostEventSource, ParavirtualEvent};

use super::VmPmu;

/// Sampling of an operator's event by the host's kernel.
#[derive(Debug)]
pub struct HostKernelSampling {
    /// Host perf event that takes the samples. Initially stopped.
    pub sampler: GuestSamplingEvent,
    /// Sampling period in events; `None` if each sample carries its period.
    pub period: Option<u64>,
    /// `true` if the samples also include code of the host's kernel.
    pub sees_host: bool,
    /// `true` if KVM interprets the guest's kernel, whose code therefore does not occur in samples.
    pub interpreted: bool,
}

/// Reason why the host's kernel cannot sample an event.
#[derive(Debug, thiserror::Error)]
pub enum HostKernelSamplingError {
    /// The vCPU has no thread yet, so it has no clock to sample.
    #[error("vCPU {0} is not running yet")]
    NotRunning(u32),
    /// The event counts a single privilege level, which the host's clock cannot do for a guest.
    #[error("the vCPU's clock cannot distinguish privilege levels")]
    OneLevel,
    /// The host has no hardware PMU that can be used.
    #[error("this host has no usable hardware PMU; see perfvisor check")]
    NoPmu,
    /// Only events of the host's PMU and of the vCPU's clock can be sampled in the host's kernel.
    #[error("only events of the host's PMU and the vCPU's clock can be sampled in the host's kernel")]
    OtherDriver,
    /// The host rejected the perf event.
    #[error(transparent)]
    Refused(#[from] PmuError),
}

impl VmPmu {
    /// Replaces the sampling frequency of a vCPU clock event by the equivalent period. The clock
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

    /// Opens a host event that samples `attr` in the host's kernel, on the thread of `vcpu`. For a
    /// clock event, the period may be longer than requested (see [`HostKernelSampling::period`]).
    ///
    /// # Errors
    /// Returns [`HostKernelSamplingError`] with the reason.
    pub fn host_sampling(
        &self,
        vcpu: VcpuId,
        attr: &Attr,
    ) -> Result<HostKernelSampling, HostKernelSamplingError> {
        let clock = self
            .clock
            .clock_of(vcpu)
            .ok_or(HostKernelSamplingError::NotRunning(vcpu.0))?;
        if attr.ty == EventType::CLOCK {
            if attr.exclude_user || attr.exclude_kernel {
                return Err(HostKernelSamplingError::OneLevel);
            }
            let khz = u128::from(clock.tsc_khz().max(1));
            let shortest = u128::from(MIN_CLOCK_PERIOD_NS) * khz / 1_000_000;
            let period = attr
                .sample_period
                .max(u64::try_from(shortest).unwrap_or(u64::MAX));
            let period_ns = u128::from(period) * 1_000_000 / khz;
            let period_ns = u64::try_from(period_ns).unwrap_or(u64::MAX);
            return Ok(HostKernelSampling {
                sampler: GuestSamplingEvent::clock(clock.tid(), period_ns)?,
                period: Some(period),
                sees_host: true,
                interpreted: self.clock.interprets_kernel(),
            });
        }
        if [EventType::HARDWARE, EventType::HW_CACHE, EventType::RAW].contains(&attr.ty) {
            if self.hardware.is_none() {
                return Err(HostKernelSamplingError::NoPmu);
            }
            return Ok(HostKernelSampling {
                sampler: GuestSamplingEvent::hardware(clock.tid(), attr)?,
                period: None,
                sees_host: !attr.exclude_host,
                interpreted: false,
            });
        }
        Err(HostKernelSamplingError::OtherDriver)
    }

    /// Opens a host event that records the context switches of the thread of `vcpu`.
    ///
    /// # Errors
    /// Returns [`HostKernelSamplingError`] with the reason.
    pub fn thread_switches(&self, vcpu: VcpuId) -> Result<ThreadSwitches, HostKernelSamplingError> {
        let clock = self
            .clock
            .clock_of(vcpu)
            .ok_or(HostKernelSamplingError::NotRunning(vcpu.0))?;
        Ok(ThreadSwitches::open(clock.tid())?)
    }

    /// Returns whether operators' events are counted by single-stepping.
    pub fn steps_for_operators(&self) -> bool {
        self.config.steps_for_operators
    }

    /// Returns whether the host's KVM can single-step the guest's user code.
    pub fn can_step_user_code(&self) -> bool {
        self.config.stepping.user
    }

    /// Returns whether a hardware PMU of the host can be used.
    pub fn has_hardware(&self) -> bool {
        self.hardware.is_some()
    }

    /// Returns the event config with which the KVM driver counts a KVM statistic; `None` if KVM has
    /// no such statistic.
    pub fn statistic(&self, name: &str) -> Option<u64> {
        self.kvm.config(name)
    }

    /// Returns the source that counts a paravirtual event for an operator.
    pub fn paravirtual_source(&self, event: ParavirtualEvent) -> Option<HostEventSource> {
        self.sources().paravirtual_for_operator(event)
    }

    /// Returns the source that counts one of perf's generic events for an operator. `number` is the
    /// `PERF_COUNT_HW_*` number of the event.
    pub fn generic_source(&self, number: u64) -> Option<HostEventSource> {
        match ArchEvent::ALL
            .into_iter()
            .find(|arch| arch.generic_number() == Some(number))
        {
            Some(arch) => {
                let exact = || self.sources().exact_for_operator(arch);
                let exact = self.config.steps_for_operators.then(exact).flatten();
                exact.or_else(|| self.sources().for_operator(arch))
            }
            // Other perf event numbers have a processor-specific meaning.
            None => self.hardware.map(|_| HostEventSource {
                backing: CounterBacking::Hardware,
                ty: EventType::HARDWARE,
                config: number,
                is_known: false,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use perf_core::pmu::clock::VcpuRunTimeClock;

    use super::*;
    use crate::testing::pmu;

    fn clock_event() -> Attr {
        Attr {
            ty: EventType::CLOCK,
            exclude_host: true,
            ..Attr::default()
        }
    }

    #[test]
    fn clock_frequency_becomes_period() {
        let vm = pmu(None, false);
        let at_1000_hz = || {
            let mut attr = clock_event();
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
        vm.clock.add_vcpu(
            VcpuId(0),
            Arc::new(VcpuRunTimeClock::for_current_thread(2_000_000)),
        );
        vm.clock_period(VcpuId(0), &mut attr);
        assert_eq!((attr.freq, attr.sample_period), (false, 2_000_000));
        let mut never = at_1000_hz();
        never.sample_period = 0;
        vm.clock_period(VcpuId(0), &mut never);
        assert!(never.sample_period > 0);
    }

    /// Host sampling reports whether KVM interprets the guest's kernel. If so, samples contain no
    /// code of that kernel, and the host's kernel cannot detect this.
    #[test]
    fn host_samples_report_interpreted_kernel() {
        for interprets in [false, true] {
            let vm = pmu(None, interprets);
            let clock = clock_event();
            let refused = |attr: &Attr| vm.host_sampling(VcpuId(0), attr).unwrap_err();
            assert!(matches!(refused(&clock), HostKernelSamplingError::NotRunning(0)));
            vm.clock.add_vcpu(
                VcpuId(0),
                Arc::new(VcpuRunTimeClock::for_current_thread(2_000_000)),
            );
            let of = |ty, exclude_user| Attr {
                ty,
                exclude_user,
                sample_period: 2_000_000,
                ..clock.clone()
            };
            assert!(matches!(
                refused(&of(EventType::CLOCK, true)),
                HostKernelSamplingError::OneLevel
            ));
            assert!(matches!(
                refused(&of(EventType::HARDWARE, false)),
                HostKernelSamplingError::NoPmu
            ));
            assert!(matches!(
                refused(&of(EventType::KVM, false)),
                HostKernelSamplingError::OtherDriver
            ));
            match vm.host_sampling(VcpuId(0), &of(EventType::CLOCK, false)) {
                Ok(sampling) => {
                    assert_eq!(sampling.interpreted, interprets);
                    assert_eq!((sampling.period, sampling.sees_host), (Some(2_000_000), true));
                    let short = Attr {
                        sample_period: 1,
                        ..of(EventType::CLOCK, false)
                    };
                    // The period is raised to the minimum, given here in cycles at 2 GHz.
                    let real = Some(2 * MIN_CLOCK_PERIOD_NS);
                    assert_eq!(vm.host_sampling(VcpuId(0), &short).unwrap().period, real);
                }
                Err(e) => eprintln!("SKIP: this user may not sample: {}", perf_core::error_line(&e)),
            }
        }
    }
}
