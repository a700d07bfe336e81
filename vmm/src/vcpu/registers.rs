//! Cache of the vCPU registers that KVM copies to user space at each exit (`KVM_CAP_SYNC_REGS`),
//! which avoids separate KVM calls.

use kvm_bindings::{kvm_regs, kvm_vcpu_events__bindgen_ty_3 as NmiState};

use crate::kvm::armed::ArmedVcpu;
use crate::kvm::armed::SyncReg;
use crate::kvm::call::CallError;
use crate::pmu::Synced;

/// Register sets that KVM copies at each exit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Set {
    #[default]
    Nothing,
    /// General-purpose registers.
    General,
    /// General-purpose, segment and control registers.
    All,
}

/// Registers that were synchronized at the last exit.
#[derive(Debug, Default)]
pub(super) struct RegisterCache {
    /// Register sets that KVM copies at each exit.
    comes: Set,
    /// Register sets that were copied at the last exit and are still valid.
    fresh: Set,
    /// The last exit was caused only by a signal.
    for_signal: bool,
    /// KVM copies the pending events at each exit.
    events_come: bool,
    /// The pending events were copied at the last exit and are still valid.
    events_fresh: bool,
}

impl RegisterCache {
    /// Creates the cache for a new thread of a vCPU and resets the synchronization settings of any
    /// previous thread. With `general`, KVM copies the general-purpose registers.
    pub(super) fn new(fd: &mut ArmedVcpu, general: bool) -> Self {
        fd.sync_at_exit(SyncReg::SystemRegister, false);
        fd.sync_at_exit(SyncReg::VcpuEvents, false);
        if general {
            fd.sync_at_exit(SyncReg::Register, true);
        }
        Self {
            comes: if general { Set::General } else { Set::Nothing },
            ..Self::default()
        }
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
        self.fresh = Set::Nothing;
        self.events_fresh = false;
    }

    /// Returns the copied registers that are still valid, for use in samples.
    pub(super) fn synced(&self, fd: &mut ArmedVcpu) -> Synced {
        let mut synced = Synced::default();
        if self.fresh != Set::Nothing {
            synced.set_general(&fd.sync_regs_mut().regs);
        }
        if self.fresh == Set::All {
            synced.set_system(&fd.sync_regs_mut().sregs);
        }
        synced
    }

    /// Returns `true` if segment and control registers should continue to be copied: the last
    /// sample used them, and a signal caused the last exit. Other exits must not pay for the copy.
    #[inline]
    pub(super) fn keeps_system(&self) -> bool {
        self.comes == Set::All && self.for_signal
    }

    /// Enables or disables copying of segment and control registers. Has no effect if no registers
    /// are copied.
    #[inline]
    pub(super) fn want_system(&mut self, fd: &mut ArmedVcpu, wanted: bool) {
        match (self.comes, wanted) {
            (Set::General, true) => {
                self.comes = Set::All;
                fd.sync_at_exit(SyncReg::SystemRegister, true);
            }
            (Set::All, false) => {
                self.comes = Set::General;
                fd.sync_at_exit(SyncReg::SystemRegister, false);
            }
            _ => {}
        }
    }

    /// Enables or disables copying of the NMI state. Has no effect if no registers are copied.
    #[inline]
    pub(super) fn want_nmi_state(&mut self, fd: &mut ArmedVcpu, wanted: bool) {
        let wanted = wanted && self.comes != Set::Nothing;
        if self.events_come != wanted {
            self.events_come = wanted;
            fd.sync_at_exit(SyncReg::VcpuEvents, wanted);
        }
    }

    /// Returns the state of NMIs, directly after an exit.
    ///
    /// # Errors
    /// Returns the error of the KVM call.
    pub(super) fn nmi_state(&self, fd: &mut ArmedVcpu) -> Result<NmiState, CallError> {
        if self.events_fresh {
            return Ok(fd.sync_regs_mut().events.nmi);
        }
        Ok(fd.get_vcpu_events()?.nmi)
    }

    /// Returns the general-purpose registers, directly after an exit.
    ///
    /// # Errors
    /// Returns the error of the KVM call.
    pub(super) fn general(&self, fd: &mut ArmedVcpu) -> Result<kvm_regs, CallError> {
        match self.fresh {
            Set::Nothing => fd.get_regs(),
            Set::General | Set::All => Ok(fd.sync_regs_mut().regs),
        }
    }

    /// Sets the general-purpose registers, directly after an exit that KVM has not completed yet.
    /// The next KVM_RUN loads them before it completes the exit.
    ///
    /// # Errors
    /// Returns the error of the KVM call.
    pub(super) fn set_general(&self, fd: &mut ArmedVcpu, regs: &kvm_regs) -> Result<(), CallError> {
        match self.comes {
            Set::Nothing => fd.set_regs(regs),
            Set::General | Set::All => {
                fd.sync_regs_mut().regs = *regs;
                fd.sync_at_entry(SyncReg::Register, true);
                Ok(())
            }
        }
    }

    /// Cancels a [`RegisterCache::set_general`] that no KVM_RUN has consumed yet.
    pub(super) fn take_back_general(&self, fd: &mut ArmedVcpu) {
        fd.sync_at_entry(SyncReg::Register, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Registers are reported as valid only if they were copied at the last exit and not changed
    /// since.
    #[test]
    fn only_what_came_with_the_last_exit_is_fresh() {
        let Ok(kvm) = crate::kvm::host::open() else {
            eprintln!("SKIP: there is no KVM here");
            return;
        };
        let vm = crate::kvm::vm_fd::VmFd::new(&kvm).unwrap();
        let mut fd = ArmedVcpu::new(vm.create_vcpu(0).unwrap());
        let mut nothing = RegisterCache::new(&mut fd, false);
        nothing.after_run(true);
        nothing.want_system(&mut fd, true);
        nothing.after_run(true);
        assert_eq!(nothing.fresh, Set::Nothing, "none come here");
        let mut cache = RegisterCache::new(&mut fd, true);
        assert_eq!(cache.fresh, Set::Nothing, "there was no exit yet");
        cache.after_run(false);
        assert_eq!(cache.fresh, Set::General);
        cache.want_system(&mut fd, true);
        assert_eq!(cache.fresh, Set::General, "they come with the next exit");
        assert!(!cache.keeps_system(), "the last exit was not for a sample");
        cache.after_run(true);
        assert_eq!((cache.fresh, cache.keeps_system()), (Set::All, true));
        cache.forget();
        assert_eq!(cache.fresh, Set::Nothing);
        cache.want_nmi_state(&mut fd, true);
        assert!(!cache.events_fresh, "it comes with the next exit");
        cache.after_run(true);
        assert!(cache.events_fresh);
        cache.forget();
        assert!(!cache.events_fresh);
        nothing.want_nmi_state(&mut fd, true);
        assert!(!nothing.events_come, "nothing comes there");
        cache.want_system(&mut fd, false);
        cache.after_run(true);
        assert_eq!((cache.fresh, cache.keeps_system()), (Set::General, false));
    }
}
