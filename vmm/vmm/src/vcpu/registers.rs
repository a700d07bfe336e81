//! Cache of the vCPU registers that KVM copies to user space at each exit (`KVM_CAP_SYNC_REGS`),
//! which avoids separate KVM calls.

use kvm_bindings::{kvm_regs, kvm_vcpu_events__bindgen_ty_3 as NmiState};

use crate::kvm::armed_vcpu::ArmedVcpu;
use crate::kvm::armed_vcpu::SyncReg;
use crate::kvm::call::KvmIoctlError;
use crate::pmu::ExitRegisters;

/// Register sets that KVM copies at each exit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum RegisterSet {
    #[default]
    Nothing,
    /// General-purpose registers.
    General,
    /// General-purpose, segment and control registers.
    All,
}

/// Registers that KVM copied to user space at the last exit.
#[derive(Debug, Default)]
pub(super) struct RegisterCache {
    /// Register sets that KVM is configured to copy at each exit.
    comes: RegisterSet,
    /// Register sets that were copied at the last exit and are still valid.
    fresh: RegisterSet,
    /// `true` if the last exit was caused only by a signal.
    for_signal: bool,
    /// `true` if KVM copies the pending events at each exit.
    events_come: bool,
    /// `true` if the pending events were copied at the last exit and are still valid.
    events_fresh: bool,
}

impl RegisterCache {
    /// Creates the cache for a new thread of a vCPU and resets the synchronization settings of any
    /// previous thread. If `general` is set, KVM copies the general-purpose registers.
    pub(super) fn new(fd: &mut ArmedVcpu, general: bool) -> Self {
        fd.sync_at_exit(SyncReg::SystemRegister, false);
        fd.sync_at_exit(SyncReg::VcpuEvents, false);
        if general {
            fd.sync_at_exit(SyncReg::Register, true);
        }
        Self {
            comes: if general {
                RegisterSet::General
            } else {
                RegisterSet::Nothing
            },
            ..Self::default()
        }
    }

    /// Disables all synchronization. Must not be called while KVM has an exit to complete.
    pub(super) fn stop_sync(&mut self, fd: &mut ArmedVcpu) {
        *self = Self::new(fd, false);
        fd.sync_at_exit(SyncReg::Register, false);
    }

    /// Records the return of KVM_RUN, after which the copied registers are valid.
    #[inline]
    pub(super) fn after_run(&mut self, for_signal: bool) {
        self.fresh = self.comes;
        self.events_fresh = self.events_come;
        self.for_signal = for_signal;
    }

    /// Invalidates the copied registers, which no longer match or are about to change.
    #[inline]
    pub(super) fn forget(&mut self) {
        self.fresh = RegisterSet::Nothing;
        self.events_fresh = false;
    }

    /// Returns the copied registers that are still valid, for use in samples.
    pub(super) fn synced(&self, fd: &mut ArmedVcpu) -> ExitRegisters {
        let mut synced = ExitRegisters::default();
        if self.fresh != RegisterSet::Nothing {
            synced.set_general(&fd.sync_regs_mut().regs);
        }
        if self.fresh == RegisterSet::All {
            synced.set_system(&fd.sync_regs_mut().sregs);
        }
        synced
    }

    /// Returns `true` if segment and control registers should continue to be copied, because the
    /// last sample used them and a signal caused the last exit. Other exits must not incur the cost
    /// of the copy.
    #[inline]
    pub(super) fn needs_system_sync(&self) -> bool {
        self.comes == RegisterSet::All && self.for_signal
    }

    /// Enables or disables copying of segment and control registers. Has no effect if no registers
    /// are copied.
    #[inline]
    pub(super) fn set_system_sync(&mut self, fd: &mut ArmedVcpu, wanted: bool) {
        match (self.comes, wanted) {
            (RegisterSet::General, true) => {
                self.comes = RegisterSet::All;
                fd.sync_at_exit(SyncReg::SystemRegister, true);
            }
            (RegisterSet::All, false) => {
                self.comes = RegisterSet::General;
                fd.sync_at_exit(SyncReg::SystemRegister, false);
            }
            _ => {}
        }
    }

    /// Enables or disables copying of the NMI state. Has no effect if no registers are copied.
    #[inline]
    pub(super) fn set_nmi_sync(&mut self, fd: &mut ArmedVcpu, wanted: bool) {
        let wanted = wanted && self.comes != RegisterSet::Nothing;
        if self.events_come != wanted {
            self.events_come = wanted;
            fd.sync_at_exit(SyncReg::VcpuEvents, wanted);
        }
    }

    /// Returns the state of NMIs. Must be called directly after an exit.
    ///
    /// # Errors
    /// Returns an error if the KVM call fails.
    pub(super) fn nmi_state(&self, fd: &mut ArmedVcpu) -> Result<NmiState, KvmIoctlError> {
        if self.events_fresh {
            return Ok(fd.sync_regs_mut().events.nmi);
        }
        Ok(fd.get_vcpu_events()?.nmi)
    }

    /// Returns the general-purpose registers. Must be called directly after an exit.
    ///
    /// # Errors
    /// Returns an error if the KVM call fails.
    pub(super) fn general(&self, fd: &mut ArmedVcpu) -> Result<kvm_regs, KvmIoctlError> {
        match self.fresh {
            RegisterSet::Nothing => fd.get_regs(),
            RegisterSet::General | RegisterSet::All => Ok(fd.sync_regs_mut().regs),
        }
    }

    /// Sets the general-purpose registers. Must be called directly after an exit that KVM has not
    /// completed yet. The next KVM_RUN loads the registers before it completes the exit.
    ///
    /// # Errors
    /// Returns an error if the KVM call fails.
    pub(super) fn set_general(&self, fd: &mut ArmedVcpu, regs: &kvm_regs) -> Result<(), KvmIoctlError> {
        match self.comes {
            RegisterSet::Nothing => fd.set_regs(regs),
            RegisterSet::General | RegisterSet::All => {
                fd.sync_regs_mut().regs = *regs;
                fd.sync_at_entry(SyncReg::Register, true);
                Ok(())
            }
        }
    }

    /// Cancels a [`RegisterCache::set_general`] that no KVM_RUN has consumed yet.
    pub(super) fn cancel_set_general(&self, fd: &mut ArmedVcpu) {
        fd.sync_at_entry(SyncReg::Register, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Registers are reported as valid only if they were copied at the last exit and not changed
    /// since.
    #[test]
    fn register_cache_is_valid_only_after_exit() {
        let Ok(kvm) = crate::kvm::host::open() else {
            eprintln!("SKIP: there is no KVM here");
            return;
        };
        let vm = crate::kvm::vm_fd::VmFd::new(&kvm).unwrap();
        let mut fd = ArmedVcpu::new(vm.create_vcpu(0).unwrap());
        let mut nothing = RegisterCache::new(&mut fd, false);
        nothing.after_run(true);
        nothing.set_system_sync(&mut fd, true);
        nothing.after_run(true);
        assert_eq!(nothing.fresh, RegisterSet::Nothing, "none come here");
        let mut cache = RegisterCache::new(&mut fd, true);
        assert_eq!(cache.fresh, RegisterSet::Nothing, "there was no exit yet");
        cache.after_run(false);
        assert_eq!(cache.fresh, RegisterSet::General);
        cache.set_system_sync(&mut fd, true);
        assert_eq!(cache.fresh, RegisterSet::General, "they come with the next exit");
        assert!(!cache.needs_system_sync(), "the last exit was not for a sample");
        cache.after_run(true);
        assert_eq!((cache.fresh, cache.needs_system_sync()), (RegisterSet::All, true));
        cache.forget();
        assert_eq!(cache.fresh, RegisterSet::Nothing);
        cache.set_nmi_sync(&mut fd, true);
        assert!(!cache.events_fresh, "it comes with the next exit");
        cache.after_run(true);
        assert!(cache.events_fresh);
        cache.forget();
        assert!(!cache.events_fresh);
        nothing.set_nmi_sync(&mut fd, true);
        assert!(!nothing.events_come, "nothing comes there");
        cache.set_system_sync(&mut fd, false);
        cache.after_run(true);
        assert_eq!(
            (cache.fresh, cache.needs_system_sync()),
            (RegisterSet::General, false)
        );
    }
}
