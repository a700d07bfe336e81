//! Cache of the vCPU registers that KVM copies to user space at each exit (`KVM_CAP_SYNC_REGS`),
//! which avoids separate KVM calls.

use kvm_bindings::{kvm_regs, kvm_vcpu_events__bindgen_ty_3 as NmiState};

use crate::kvm::call::KvmIoctlError;
use crate::kvm::kickable_vcpu::KickableVcpu;
use crate::kvm::kickable_vcpu::SyncReg;
use crate::pmu::ExitRegisters;

/// Sets of registers that KVM copies to user space at each exit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum RegisterSet {
    #[default]
    Nothing,
    /// General-purpose registers.
    General,
    /// General-purpose, segment and control registers.
    All,
}

/// Registers that KVM copied to user space at the last exit, and which of them are valid.
#[derive(Debug, Default)]
pub(super) struct RegisterCache {
    /// Registers that KVM copies at each exit.
    comes: RegisterSet,
    /// Registers that KVM copied at the last exit and that have not changed since.
    fresh: RegisterSet,
    /// `true` if a signal, and nothing else, caused the last exit.
    for_signal: bool,
    /// `true` if KVM copies the pending events (NMIs and interrupts) at each exit.
    events_come: bool,
    /// `true` if KVM copied the pending events at the last exit and they have not changed since.
    events_fresh: bool,
}

impl RegisterCache {
    /// Creates the cache for a vCPU whose thread has just started, and resets what an earlier
    /// thread has selected. If `general` is set, KVM copies the general-purpose registers at each
    /// exit.
    pub(super) fn new(fd: &mut KickableVcpu, general: bool) -> Self {
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

    /// Makes KVM copy no registers at exits. Must not be called before KVM has completed the last
    /// exit.
    pub(super) fn stop_sync(&mut self, fd: &mut KickableVcpu) {
        *self = Self::new(fd, false);
        fd.sync_at_exit(SyncReg::Register, false);
    }

    /// Records that KVM_RUN has returned, so the copied registers are valid.
    #[inline]
    pub(super) fn after_run(&mut self, for_signal: bool) {
        self.fresh = self.comes;
        self.events_fresh = self.events_come;
        self.for_signal = for_signal;
    }

    /// Marks the copied registers as invalid, because the registers have changed or are about to
    /// change.
    #[inline]
    pub(super) fn forget(&mut self) {
        self.fresh = RegisterSet::Nothing;
        self.events_fresh = false;
    }

    /// Returns the valid registers of the cache, for a sample.
    pub(super) fn synced(&self, fd: &mut KickableVcpu) -> ExitRegisters {
        let mut synced = ExitRegisters::default();
        if self.fresh != RegisterSet::Nothing {
            synced.set_general(&fd.sync_regs_mut().regs);
        }
        if self.fresh == RegisterSet::All {
            synced.set_system(&fd.sync_regs_mut().sregs);
        }
        synced
    }

    /// Returns `true` if KVM should also copy the segment and control registers at the next exit,
    /// because the last sample needed them and a signal caused the last exit. Copying them at other
    /// exits would cost time for nothing.
    #[inline]
    pub(super) fn needs_system_sync(&self) -> bool {
        self.comes == RegisterSet::All && self.for_signal
    }

    /// Selects whether KVM also copies the segment and control registers at each exit. Has no
    /// effect if KVM copies no registers.
    #[inline]
    pub(super) fn set_system_sync(&mut self, fd: &mut KickableVcpu, wanted: bool) {
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

    /// Selects whether KVM also copies the pending events, with the state of NMIs, at each exit.
    /// Has no effect if KVM copies no registers.
    #[inline]
    pub(super) fn set_nmi_sync(&mut self, fd: &mut KickableVcpu, wanted: bool) {
        let wanted = wanted && self.comes != RegisterSet::Nothing;
        if self.events_come != wanted {
            self.events_come = wanted;
            fd.sync_at_exit(SyncReg::VcpuEvents, wanted);
        }
    }

    /// Returns which NMIs are pending or being handled. Must be called directly after an exit.
    ///
    /// # Errors
    /// Returns an error if the KVM call fails.
    pub(super) fn nmi_state(&self, fd: &mut KickableVcpu) -> Result<NmiState, KvmIoctlError> {
        if self.events_fresh {
            return Ok(fd.sync_regs_mut().events.nmi);
        }
        Ok(fd.get_vcpu_events()?.nmi)
    }

    /// Returns the general-purpose registers. Must be called directly after an exit.
    ///
    /// # Errors
    /// Returns an error if the KVM call fails.
    pub(super) fn general(&self, fd: &mut KickableVcpu) -> Result<kvm_regs, KvmIoctlError> {
        match self.fresh {
            RegisterSet::Nothing => fd.get_regs(),
            RegisterSet::General | RegisterSet::All => Ok(fd.sync_regs_mut().regs),
        }
    }

    /// Sets the general-purpose registers. Must be called directly after an exit that KVM has not
    /// completed. The next KVM_RUN loads the registers and then completes the exit.
    ///
    /// # Errors
    /// Returns an error if the KVM call fails.
    pub(super) fn set_general(&self, fd: &mut KickableVcpu, regs: &kvm_regs) -> Result<(), KvmIoctlError> {
        match self.comes {
            RegisterSet::Nothing => fd.set_regs(regs),
            RegisterSet::General | RegisterSet::All => {
                fd.sync_regs_mut().regs = *regs;
                fd.sync_at_entry(SyncReg::Register, true);
                Ok(())
            }
        }
    }

    /// Discards the registers of a [`RegisterCache::set_general`], if no KVM_RUN has loaded them
    /// yet.
    pub(super) fn cancel_set_general(&self, fd: &mut KickableVcpu) {
        fd.sync_at_entry(SyncReg::Register, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The registers are reported as valid only if KVM copied them at the last exit and they have
    /// not changed since.
    #[test]
    fn register_cache_is_valid_only_after_exit() {
        let Ok(kvm) = crate::kvm::host::open() else {
            eprintln!("SKIP: there is no KVM here");
            return;
        };
        let vm = crate::kvm::vm_fd::VmFd::new(&kvm).unwrap();
        let mut fd = KickableVcpu::new(vm.create_vcpu(0).unwrap());
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
