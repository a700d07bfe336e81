//! Saves a paused vCPU to a snapshot, and restores the state that the VMM keeps for it.
//!
//! The control server pauses the VM and sends two requests to each vCPU thread:
//!
//! 1. *Settle*: complete the last exit in KVM, which hides the pending half of an instruction, and
//!    count its instruction. Afterwards no vCPU accesses a device.
//! 2. *Save*, after the devices have stopped: read the state. All interrupts that the devices have
//!    raised are then in the local APIC.

use std::sync::Arc;

use perf_core::error_line;
use snapshot::Base64Bytes;
use snapshot::state::{SavedVcpu, SavedVcpuPmu};
use vpmu::VpmuStateError;

use super::control::VmRunState;
use super::debugctl::DebugControl;
use super::failure::VcpuFailure;
use super::rdpmc::{LastRdpmc, PendingNmi};
use super::running::{ExitCompletion, LoopAction, Running, Vcpu};
use super::step::Stepper;
use super::step::state::VcpuState;
use crate::kvm::call::KvmIoctlError;
use crate::kvm::saved_vcpu::VcpuStateLayout;

/// Progress of a vCPU with its part of a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum SavePhase {
    /// No snapshot is being taken, or this vCPU has not handled a request for it.
    #[default]
    None,
    /// The vCPU must still complete the last exit.
    Settling,
    /// KVM has completed the last exit, and its instruction is counted.
    Settled,
}

/// Error when saving a vCPU.
#[derive(Debug, thiserror::Error)]
pub enum SaveVcpuError {
    /// The VM was resumed before the vCPU was saved.
    #[error("vCPU {0} is not paused")]
    NotPaused(u8),
    /// KVM cannot read a part of the state.
    #[error("vCPU {0} cannot be saved")]
    Kvm(u8, #[source] KvmIoctlError),
}

impl Running {
    /// Completes the last exit in KVM for a snapshot. If the exit also ends a single step, the
    /// register write of the instruction takes effect before the step is counted, as it does
    /// without a snapshot.
    pub(super) fn complete_exit_for_snapshot(&mut self) -> Result<LoopAction, VcpuFailure> {
        if self.stepper.is_some() {
            self.settle_step()?;
            if let Some(pmu) = &mut self.pmu {
                pmu.reconcile();
            }
        }
        self.complete_open_exit()
    }

    /// Counts the single step that the last exit has completed. Ends a straight-line run in
    /// progress at the current position of the vCPU.
    pub(super) fn settle_step(&mut self) -> Result<(), VcpuFailure> {
        if let (Some(stepper), Some(pmu)) = (&mut self.stepper, &mut self.pmu)
            && let Some(step) = stepper.settle(&self.fd)?
        {
            pmu.feed_step(&step);
        }
        Ok(())
    }

    /// Counts the instruction of the completed exit, and reports that the vCPU can be saved.
    pub(super) fn finish_settling(&mut self) -> Result<(), VcpuFailure> {
        self.settle_step()?;
        if let Some(pmu) = &mut self.pmu {
            pmu.reconcile();
        }
        self.count_completed_instruction();
        if let Some(rdpmc) = &mut self.rdpmc {
            rdpmc.check_kernel_now();
        }
        self.save_phase = SavePhase::Settled;
        self.slot.request_queue().answer_settled();
        Ok(())
    }

    /// Counts the instruction that an exit has completed.
    pub(super) fn count_completed_instruction(&mut self) {
        let Some(pmu) = &mut self.pmu else { return };
        match std::mem::take(&mut self.completed) {
            ExitCompletion::None => {}
            ExitCompletion::AtCpl0 => pmu.count_emulated_instruction(|| 0),
            ExitCompletion::AtAnyCpl => {
                let fd = &self.fd;
                pmu.count_emulated_instruction(|| fd.get_sregs().map_or(0, |sregs| sregs.ss.dpl));
            }
        }
    }

    /// Makes KVM fill the `kvm_run` page of a restored vCPU, without executing guest code. The page
    /// contains the state of the local APIC that is needed to deliver a PMI before the first entry.
    pub(super) fn read_run_page(&mut self) {
        if let Err(e) = self.fd.complete_exit() {
            // The error is only logged, because the first entry to the guest fails too and reports
            // it.
            log::debug!("vcpu{}: {}", self.id, error_line(&e));
        }
    }

    /// Responds to a pending request for the state of this vCPU.
    pub(super) fn answer_save(&mut self, layout: &Arc<VcpuStateLayout>) {
        let saved = self.save(layout);
        self.slot.request_queue().answer_saved(saved);
    }

    fn save(&mut self, layout: &VcpuStateLayout) -> Result<SavedVcpu, SaveVcpuError> {
        if self.save_phase != SavePhase::Settled || self.control.state() != VmRunState::Paused {
            return Err(SaveVcpuError::NotPaused(self.id));
        }
        let mut saved = layout
            .save(self.id, &self.fd)
            .map_err(|e| SaveVcpuError::Kvm(self.id, e))?;
        let unfinished_repeat = match &self.stepper {
            None => None,
            Some(stepper) => {
                let state = VcpuState::read(&self.fd).map_err(|e| SaveVcpuError::Kvm(self.id, e))?;
                stepper.unfinished_repeat(&state.cpu())
            }
        };
        saved.cpuid = cpuid_leaves(self.parts.cpuid());
        let (nmi_sent, nmi_repetitions) = self.sent_nmi.saved();
        saved.pmu = SavedVcpuPmu {
            registers: Base64Bytes(
                self.pmu
                    .as_mut()
                    .map(crate::pmu::VcpuPmu::save)
                    .unwrap_or_default(),
            ),
            debug_control: self.debug_control.as_ref().map_or(0, DebugControl::read),
            handled_pmi: self.lvtpc.handled(),
            last_rdpmc: self.last_read.saved(),
            nmi_sent,
            nmi_repetitions,
            stray_trap_flags: self.stepper.as_ref().is_some_and(Stepper::has_stray_flags)
                || self.bursts.has_stray_flags(),
            unfinished_repeat,
        };
        Ok(saved)
    }
}

/// Converts a CPUID table to its saved form.
pub(crate) fn cpuid_leaves(table: &kvm_bindings::CpuId) -> Vec<[u32; 7]> {
    let saved_leaf = |leaf: &kvm_bindings::kvm_cpuid_entry2| {
        [
            leaf.function,
            leaf.index,
            leaf.flags,
            leaf.eax,
            leaf.ebx,
            leaf.ecx,
            leaf.edx,
        ]
    };
    table.as_slice().iter().map(saved_leaf).collect()
}

impl Vcpu {
    /// Restores the virtual PMU, and what else the VMM keeps for the vCPU.
    ///
    /// # Errors
    /// Returns a [`VpmuStateError`] if the state does not belong to this PMU.
    pub fn restore(&mut self, saved: SavedVcpuPmu) -> Result<(), VpmuStateError> {
        if let Some(pmu) = &mut self.pmu {
            pmu.restore(&saved.registers.0)?;
        }
        if let Some(control) = &mut self.debug_control {
            control.restore(saved.debug_control);
        }
        if saved.stray_trap_flags {
            self.stepper = self.bursts.stepper_for_strays();
        }
        if let Some(stepper) = &mut self.stepper {
            stepper.restore_unfinished_repeat(saved.unfinished_repeat);
        }
        self.lvtpc.restore_handled(saved.handled_pmi);
        if let Some(rdpmc) = &mut self.rdpmc {
            rdpmc.check_kernel_now();
        }
        self.is_restored = true;
        self.last_read = LastRdpmc::restored(saved.last_rdpmc);
        self.sent_nmi = PendingNmi::restored(saved.nmi_sent, saved.nmi_repetitions);
        Ok(())
    }
}
