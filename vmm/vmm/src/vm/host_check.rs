//! Checks that a VM can be restored on this host. The check is made before the source pauses the
//! VM.

use snapshot::state::SavedMachine;

use super::config::VmConfig;
use super::error::VmError;
use super::pending_setup::BackgroundKvmSetup;
use super::plan::VmPlan;
use super::restore::{RestoreError, check_cpuid, is_same_tsc};
use crate::kvm::cpuid;
use crate::kvm::host::Kvm;

/// Checks that this host provides the PMU, the TSC frequency and the CPUID table that `saved`
/// describes. The registers and memory in `saved` are not needed. `config` is the configuration
/// with which the VM will be restored.
///
/// # Errors
/// Returns the [`RestoreError`] that the restore would return, and an error if a KVM call fails.
pub fn check_host(kvm: &Kvm, config: &VmConfig, saved: &SavedMachine) -> Result<(), VmError> {
    let plan = VmPlan::new(kvm, config)?;
    let fd = plan.take_vm(kvm, &mut BackgroundKvmSetup::none())?;
    let (supported, model) = plan.processor(kvm)?;
    let differs = |what, saved: &dyn ToString, here: &dyn ToString| RestoreError::Shape {
        what,
        // The message is one line, so remove control characters from the string.
        saved: saved
            .to_string()
            .chars()
            .filter(|c| !c.is_control())
            .take(80)
            .collect(),
        here: here.to_string(),
    };
    if saved.shape.pmu != model.to_string() {
        return Err(differs("a PMU", &saved.shape.pmu, &model).into());
    }
    let Some(first) = saved.vcpus.first() else {
        return Err(RestoreError::Impossible("numbers of vCPUs").into());
    };
    let host_khz = fd.create_vcpu(0)?.get_tsc_khz()?;
    let saved_khz = saved.shape.tsc_khz;
    if !is_same_tsc(saved_khz, host_khz) {
        return Err(differs("a TSC frequency in kHz of", &saved_khz, &host_khz).into());
    }
    let cpu = plan.guest_cpuid(&model, &fd, saved_khz, saved.shape.gp_gate, true);
    let table = cpuid::for_vcpu(&supported, cpu, first.id)?;
    Ok(check_cpuid(&table, first)?)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::kvm::host;
    use crate::testing;
    use crate::vm::migrate::OutgoingMigration;

    /// Before the VM is paused, the check accepts a host with the properties of the saved machine,
    /// and rejects a host with others.
    #[test]
    fn other_hosts_are_refused_before_the_pause() {
        let Some(vm) = testing::halted_vm() else { return };
        let kvm = host::open().unwrap();
        let config = testing::config(&[0xF4]);
        let migration = OutgoingMigration::begin(vm.snapshots(), BTreeMap::new()).unwrap();
        let machine = snapshot::decode(&migration.machine().unwrap()).unwrap();
        check_host(&kvm, &config, &machine).unwrap();
        let line = |change: &dyn Fn(&mut SavedMachine)| {
            let mut other = machine.clone();
            change(&mut other);
            perf_core::error_line(&check_host(&kvm, &config, &other).unwrap_err())
        };
        let tsc = line(&|machine| machine.shape.tsc_khz += machine.shape.tsc_khz / 1000);
        assert!(tsc.contains("a TSC frequency in kHz of"), "{tsc}");
        let pmu = line(&|machine| machine.shape.pmu = "another\nline".to_owned());
        assert!(pmu.contains("a PMU anotherline, this machine "), "{pmu}");
        let cpuid = line(&|machine| machine.vcpus[0].cpuid[1][3] ^= 1);
        assert!(cpuid.contains("CPUID leaf 0x"), "{cpuid}");
        assert!(line(&|machine| machine.vcpus.clear()).contains("numbers of vCPUs"));
    }
}
