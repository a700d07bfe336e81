//! The guest-debug state of a vCPU. KVM has one for all purposes, so one struct owns it.

use kvm_bindings::{
    KVM_GUESTDBG_BLOCKIRQ, KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP, KVM_GUESTDBG_USE_HW_BP,
    kvm_guest_debug,
};
use kvm_ioctls::VcpuFd;

/// How many hardware breakpoints a processor has.
pub const BREAKPOINTS: usize = 4;

/// What the next entry is to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Want {
    /// Stop after one instruction.
    pub step: bool,
    /// Hold interrupts back.
    pub block_interrupts: bool,
    /// Any debug exception leaves to us.
    pub watch: bool,
    /// Stop at these addresses, for this entry only.
    pub at: [Option<u64>; BREAKPOINTS],
}

/// Owner of KVM_SET_GUEST_DEBUG of one vCPU.
#[derive(Debug, Default)]
pub struct GuestDebug {
    /// Breakpoints that stay.
    sites: Vec<u64>,
    /// The last of them is of [`GuestDebug::set_last_site`].
    has_last: bool,
    set: Want,
    /// KVM knows `sites`.
    told: bool,
}

impl GuestDebug {
    /// Breakpoints at `sites` from the next entry on, at most [`BREAKPOINTS`]; more are not set.
    pub fn set_sites(&mut self, sites: &[u64]) {
        self.sites = sites.iter().copied().take(BREAKPOINTS).collect();
        self.has_last = false;
        self.told = false;
    }

    /// Another breakpoint that stays, instead of the one this set before. Without room for it nothing changes.
    pub fn set_last_site(&mut self, site: u64) {
        if self.has_last {
            self.sites.pop();
        }
        self.has_last = self.free() > 0;
        if self.has_last {
            self.sites.push(site);
            self.told = false;
        }
    }

    /// How many breakpoints are free for one entry.
    pub fn free(&self) -> usize {
        BREAKPOINTS - self.sites.len()
    }

    /// Whether `pc` is one of the breakpoints that stay.
    pub fn is_site(&self, pc: u64) -> bool {
        self.sites.contains(&pc)
    }

    /// Makes KVM do what is wanted. Without a step and without a change this is a comparison; with a step KVM is told each
    /// time, because it ties the trap flag to the RIP it sees at that moment.
    ///
    /// # Errors
    /// KVM's, which no guest can cause.
    pub fn apply(&mut self, fd: &VcpuFd, want: Want) -> Result<(), kvm_ioctls::Error> {
        if !want.step && self.told && want == self.set {
            return Ok(());
        }
        let mut debug = kvm_guest_debug::default();
        let mut control = 0;
        let transient = want.at.iter().flatten().take(self.free());
        for (n, &address) in self.sites.iter().chain(transient).enumerate() {
            debug.arch.debugreg[n] = address;
            // Global enable; instruction execution, one byte (SDM vol. 3 §19.2.4).
            debug.arch.debugreg[7] |= 2 << (2 * n) | 0x400;
            control |= KVM_GUESTDBG_USE_HW_BP;
        }
        let flags = [
            (want.step, KVM_GUESTDBG_SINGLESTEP),
            (want.block_interrupts, KVM_GUESTDBG_BLOCKIRQ),
            (want.watch, KVM_GUESTDBG_USE_HW_BP),
        ];
        for (on, flag) in flags {
            control |= if on { flag } else { 0 };
        }
        debug.control = if control == 0 {
            0
        } else {
            control | KVM_GUESTDBG_ENABLE
        };
        fd.set_guest_debug(&debug)?;
        self.set = want;
        self.told = true;
        Ok(())
    }
}
