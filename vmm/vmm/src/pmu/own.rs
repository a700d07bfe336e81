//! PMU of a guest that uses KVM's own vPMU, whose registers are not trapped.
//!
//! The values of the registers are read with `KVM_GET_MSRS` and loaded into a register file of
//! Perfvisor that is not connected to events. The register file is then displayed and saved like
//! that of an emulated PMU.

use std::sync::Arc;

use kvm_bindings::{Msrs, kvm_msr_entry};
use vpmu::{
    CounterBacking, CounterEnableOutcome, CounterEventLoss, CounterEventRequest, CounterEvents, CounterIndex,
    CounterTimes, EventFilter, GuestCounterStatus, MsrAddress, PmuModel, Vpmu,
};

use crate::kvm::call::KvmIoctlError;
use crate::kvm::event_filter::{KvmEventFilter, KvmEventFilterError};
use crate::kvm::vcpu_fd::VcpuFd;
use crate::kvm::vm_fd::VmFd;
use crate::kvm::vpmu_probe::KvmPmuCapabilities;

/// KVM's own vPMU of one VM.
#[derive(Debug)]
pub struct KvmVpmu {
    vm: Arc<VmFd>,
    offered: KvmPmuCapabilities,
}

impl KvmVpmu {
    /// Creates KVM's own vPMU of `vm`, with the capabilities that KVM offers.
    pub fn new(vm: Arc<VmFd>, offered: KvmPmuCapabilities) -> Self {
        Self { vm, offered }
    }

    /// Installs the filter that lists the events that the guest may count.
    ///
    /// # Errors
    /// Returns [`KvmEventFilterError`] if KVM does not support the filter. The previous filter
    /// stays in effect.
    pub fn set_filter(&self, filter: &EventFilter) -> Result<(), KvmEventFilterError> {
        let translated = KvmEventFilter::new(
            filter,
            self.offered.pmu.generation.vendor(),
            self.offered.masked_filter,
        )?;
        if !self.offered.filter {
            return if *filter == EventFilter::allow_all() {
                Ok(())
            } else {
                Err(KvmEventFilterError::Unsupported)
            };
        }
        translated.install(&self.vm)
    }
}

/// Returns a register file with the current values of the PMU registers in KVM. Must be called on
/// the vCPU thread.
///
/// # Errors
/// Returns an error if the KVM call fails, and `EIO` if KVM lacks a register of the model.
pub fn registers(fd: &VcpuFd, model: PmuModel, filter: Arc<EventFilter>) -> Result<Vpmu, KvmIoctlError> {
    let wanted = model.state_msrs();
    let entries: Vec<_> = wanted
        .iter()
        .map(|msr| kvm_msr_entry {
            index: msr.0,
            ..Default::default()
        })
        .collect();
    let mut msrs = Msrs::from_entries(&entries)
        .map_err(|_| KvmIoctlError::with_errno("making an MSR list", libc::ENOMEM))?;
    if fd.get_msrs(&mut msrs)? != wanted.len() {
        return Err(KvmIoctlError::with_errno("KVM_GET_MSRS", libc::EIO));
    }
    let values = msrs.as_slice().iter().map(|e| (MsrAddress(e.index), e.data));
    Ok(mirror(model, filter, values))
}

fn mirror(
    model: PmuModel,
    filter: Arc<EventFilter>,
    values: impl Iterator<Item = (MsrAddress, u64)>,
) -> Vpmu {
    let mut vpmu = Vpmu::new(model);
    vpmu.set_filter(filter);
    for (msr, value) in values {
        vpmu.load_register(msr, value);
    }
    vpmu
}

/// Returns views of the counters in `mirror`, a register file with the values of KVM's registers.
/// Only the register values are valid.
pub fn view(mirror: &mut Vpmu) -> Vec<GuestCounterStatus> {
    mirror.counters_view(&mut KvmCounterEvents)
}

/// Counter events of a register file whose counters KVM maintains. All operations do nothing.
#[derive(Debug)]
pub struct KvmCounterEvents;

impl CounterEvents for KvmCounterEvents {
    fn program(&mut self, _: CounterIndex, _: Option<&CounterEventRequest>) -> CounterBacking {
        CounterBacking::Kvm
    }

    fn enable(&mut self, _: CounterIndex, _: Option<u64>) -> (CounterEnableOutcome, u64) {
        (CounterEnableOutcome::Counting(CounterBacking::Kvm), 0)
    }

    fn disable(&mut self, _: CounterIndex) -> u64 {
        0
    }

    fn pause(&mut self, _: u64, _: &mut dyn FnMut(CounterIndex, u64)) {}

    fn resume(&mut self, _: u64, _: &mut dyn FnMut(CounterIndex, u64) -> Option<u64>) -> u64 {
        0
    }

    fn count(&mut self, _: CounterIndex) -> u64 {
        0
    }

    fn arm(&mut self, _: CounterIndex, _: u64) -> u64 {
        0
    }

    fn may_have_lost(&mut self) -> bool {
        false
    }

    fn event_loss(&mut self, _: CounterIndex) -> Option<CounterEventLoss> {
        None
    }

    fn now_ns(&mut self) -> u64 {
        0
    }

    fn times(&mut self, _: CounterIndex) -> CounterTimes {
        CounterTimes::default()
    }
}

#[cfg(test)]
mod tests {
    use vpmu::registers::{IA32_FIXED_CTR_CTRL, IA32_PERF_GLOBAL_CTRL, IA32_PERFEVTSEL0};

    use super::*;

    fn with(model: PmuModel, registers: &[(u32, u64)]) -> Vpmu {
        let values = model.state_msrs().into_iter().map(|msr| {
            let found = registers.iter().find(|(index, _)| *index == msr.0);
            (msr, found.map_or(0, |(_, value)| *value))
        });
        mirror(model, Arc::new(EventFilter::allow_all()), values)
    }

    #[test]
    fn view_shows_enabled_counters() {
        let mut intel = with(
            PmuModel::INTEL,
            &[
                (IA32_PERFEVTSEL0, 0x0053_003C),
                (IA32_FIXED_CTR_CTRL, 0x30),
                (IA32_PERF_GLOBAL_CTRL, 1 << 33),
            ],
        );
        let counters = view(&mut intel);
        let named = |name: &str| counters.iter().find(|c| c.counter.to_string() == name).unwrap();
        assert!(!named("gp0").enabled && named("fixed1").enabled);
    }

    /// An emulated PMU accepts the register values that were read from KVM.
    #[test]
    fn kvm_registers_load_into_emulated_pmu() {
        for model in [PmuModel::AMD, PmuModel::INTEL] {
            let selector = model.state_msrs()[if model == PmuModel::AMD { 0 } else { 6 }];
            let mut from = with(model, &[(selector.0, 0x0053_00C0)]);
            let saved = from.save(&mut KvmCounterEvents);
            let mut to = Vpmu::new(model);
            to.restore(&saved, &mut KvmCounterEvents).unwrap();
            let read = to.read_msr(selector, &mut KvmCounterEvents);
            assert_eq!(read, vpmu::MsrReadOutcome::Value(0x0053_00C0), "{model}");
        }
    }
}
