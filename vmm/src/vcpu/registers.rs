//! Which of a vCPU's registers come with an exit, without asking KVM for them (`KVM_CAP_SYNC_REGS`).

use kvm_bindings::{kvm_regs, kvm_vcpu_events__bindgen_ty_3 as NmiState};

use crate::kvm::armed::ArmedVcpu;
use crate::kvm::armed::SyncReg;
use crate::kvm::call::CallError;
use crate::pmu::Synced;

/// A set of registers that KVM copies at each exit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Set {
    #[default]
    Nothing,
    /// General registers.
    General,
    /// Segment and control registers, too.
    All,
}

/// The registers that came with the last exit.
#[derive(Debug, Default)]
pub(super) struct RegisterCache {
    /// What KVM copies at each exit.
    comes: Set,
    /// What came with the last exit and is still the vCPU's state.
    fresh: Set,
    /// The last exit was for a signal's sake only.
    for_signal: bool,
    /// KVM copies what waits to be delivered at each exit.
    events_come: bool,
    /// It came with the last exit, and is still so.
    events_fresh: bool,
}

impl RegisterCache {
    /// As a new thread of a vCPU finds it. Another thread of the same vCPU may have asked KVM for more.
    /// `general`: KVM is to copy the general registers.
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

    /// KVM_RUN has returned.
    #[inline]
    pub(super) fn after_run(&mut self, for_signal: bool) {
        self.fresh = self.comes;
        self.events_fresh = self.events_come;
        self.for_signal = for_signal;
    }

    /// What came is not the vCPU's state any more, or is about to change.
    #[inline]
    pub(super) fn forget(&mut self) {
        self.fresh = Set::Nothing;
        self.events_fresh = false;
    }

    /// What of it is still the vCPU's state, for samples.
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

    /// Segment and control registers come, because the last sample used them, and nothing but samples made
    /// the vCPU leave the guest since. Other exits do not pay for what samples need.
    #[inline]
    pub(super) fn keeps_system(&self) -> bool {
        self.comes == Set::All && self.for_signal
    }

    /// Whether segment and control registers are to come from now on, if any come at all.
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

    /// Whether the state of NMIs is to come from now on, if anything comes at all.
    #[inline]
    pub(super) fn want_nmi_state(&mut self, fd: &mut ArmedVcpu, wanted: bool) {
        let wanted = wanted && self.comes != Set::Nothing;
        if self.events_come != wanted {
            self.events_come = wanted;
            fd.sync_at_exit(SyncReg::VcpuEvents, wanted);
        }
    }

    /// Whether an NMI waits or is handled, right after an exit.
    ///
    /// # Errors
    /// KVM's.
    pub(super) fn nmi_state(&self, fd: &mut ArmedVcpu) -> Result<NmiState, CallError> {
        if self.events_fresh {
            return Ok(fd.sync_regs_mut().events.nmi);
        }
        Ok(fd.get_vcpu_events()?.nmi)
    }

    /// The general registers, right after an exit.
    ///
    /// # Errors
    /// KVM's.
    pub(super) fn general(&self, fd: &mut ArmedVcpu) -> Result<kvm_regs, CallError> {
        match self.fresh {
            Set::Nothing => fd.get_regs(),
            Set::General | Set::All => Ok(fd.sync_regs_mut().regs),
        }
    }

    /// Sets the general registers, right after an exit that KVM has yet to complete: before it does, the next
    /// KVM_RUN takes them.
    ///
    /// # Errors
    /// KVM's.
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

    /// What [`RegisterCache::set_general`] set and no KVM_RUN has taken is not taken any more.
    pub(super) fn take_back_general(&self, fd: &mut ArmedVcpu) {
        fd.sync_at_entry(SyncReg::Register, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nothing is taken for the vCPU's state that did not come, or that was changed since.
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
