//! The KVM_SET_GUEST_DEBUG state of a vCPU. KVM keeps one state per vCPU for all purposes, so one
//! type owns it.

use kvm_bindings::{
    KVM_GUESTDBG_BLOCKIRQ, KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP, KVM_GUESTDBG_USE_HW_BP,
    KVM_GUESTDBG_USE_SW_BP, KVM_VCPUEVENT_VALID_NMI_PENDING, kvm_debug_exit_arch, kvm_guest_debug, kvm_regs,
};

use super::super::debugger::HardwareBreakpoint;
use crate::kvm::call::KvmIoctlError;
use crate::kvm::stepping::BREAKPOINTS;
use crate::kvm::vcpu_fd::VcpuFd;

/// DR6.B0 to B3: breakpoints that were hit (SDM vol. 3 §19.2.3). Each #DB overwrites these bits.
const DR6_BREAKPOINTS: u64 = 0xf;
/// DR6.BD (bit 13), BS (14) and BT (15): other causes of a #DB. A #DB sets these bits, and only
/// software clears them.
const DR6_CAUSES: u64 = 0b111 << 13;
/// DR6 bits that always read 1.
const DR6_ONES: u64 = 0xffff_0ff0;
/// DR7.GD (bit 13): general detect. A #DB clears this bit.
const DR7_GENERAL_DETECT: u64 = 1 << 13;
const DB: u8 = 1;
const BP: u8 = 3;

/// Returns the value of DR6 after a #DB, given its value `dr6` before and the causes of the #DB.
fn dr6_after(dr6: u64, causes: u64) -> u64 {
    dr6 & !DR6_BREAKPOINTS | DR6_ONES | causes & (DR6_BREAKPOINTS | DR6_CAUSES)
}

/// Injects the exception of a debug exit that belongs to the guest: #BP, or #DB with its causes in
/// DR6. KVM does not update the guest's DR6 if the exception causes an exit.
///
/// # Errors
/// Returns an error if a KVM call fails. A guest cannot cause such a failure.
pub fn inject_guest_exception(fd: &VcpuFd, stop: &kvm_debug_exit_arch) -> Result<(), KvmIoctlError> {
    let vector = if stop.exception == u32::from(BP) { BP } else { DB };
    if vector == DB {
        let mut registers = fd.get_debug_regs()?;
        registers.dr6 = dr6_after(registers.dr6, stop.dr6);
        registers.dr7 &= !DR7_GENERAL_DETECT;
        fd.set_debug_regs(&registers)?;
    }
    let mut events = fd.get_vcpu_events()?;
    events.flags &= !KVM_VCPUEVENT_VALID_NMI_PENDING;
    events.exception.injected = 1;
    events.exception.nr = vector;
    events.exception.has_error_code = 0;
    fd.set_vcpu_events(&events)
}

/// Returns the R/W and LEN fields of DR7 for a breakpoint (SDM vol. 3 §19.2.4), shifted right by 16
/// bits.
fn condition(point: &HardwareBreakpoint) -> u64 {
    let length = match point.length {
        2 => 1,
        8 => 2,
        4 => 3,
        _ => 0,
    };
    point.access as u64 | length << 2
}

/// Requirements on KVM_SET_GUEST_DEBUG for the next entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EntryDebugState {
    /// `true` to stop after one instruction.
    pub step: bool,
    /// `true` if KVM steps the code at the current RIP without the trap flag.
    pub without_flag: bool,
    /// `true` to block interrupts during the step.
    pub block_interrupts: bool,
    /// `true` to exit at debug exceptions even if no step or breakpoint is requested.
    pub watch: bool,
    /// Linear addresses of breakpoints for this entry only.
    pub entry_breakpoints: [Option<u64>; BREAKPOINTS],
}

/// Owner of the KVM_SET_GUEST_DEBUG state of one vCPU, which combines permanent breakpoints, a
/// debugger's breakpoints, and single steps.
#[derive(Debug, Default)]
pub struct GuestDebug {
    /// Linear addresses of the permanent breakpoints.
    sites: Vec<u64>,
    /// `true` if the last of `sites` was set by [`GuestDebug::replace_last_site`].
    has_last: bool,
    /// Hardware breakpoints of the debugger; `None` if no debugger is attached.
    points: Option<Vec<HardwareBreakpoint>>,
    set: EntryDebugState,
    /// `true` if `sites` and `points` have not changed since they were passed to KVM.
    is_synced: bool,
}

impl GuestDebug {
    /// Sets the permanent breakpoints, which take effect at the next entry. Ignores addresses
    /// beyond the first [`BREAKPOINTS`].
    pub fn set_sites(&mut self, sites: &[u64]) {
        self.sites = sites.iter().copied().take(BREAKPOINTS).collect();
        self.has_last = false;
        self.is_synced = false;
    }

    /// Sets one permanent breakpoint in addition to those of [`GuestDebug::set_sites`]. Replaces
    /// the one that an earlier call has set. Has no effect if no breakpoint register is free.
    pub fn replace_last_site(&mut self, site: u64) {
        if self.has_last {
            self.sites.pop();
        }
        self.has_last = self.free() > 0;
        if self.has_last {
            self.sites.push(site);
            self.is_synced = false;
        }
    }

    /// Sets the debugger's breakpoints, in the registers after those of the permanent breakpoints.
    /// Breakpoints for which no register is left are ignored. While a debugger is attached, INT3
    /// causes an exit.
    pub fn set_debugger_breakpoints(&mut self, points: Option<Vec<HardwareBreakpoint>>) {
        self.points = points;
        self.is_synced = false;
    }

    /// Returns the number of permanent breakpoints.
    pub fn sites(&self) -> usize {
        self.sites.len()
    }

    /// Returns the number of free breakpoint registers.
    pub fn free(&self) -> usize {
        let points = self.points.as_ref().map_or(0, Vec::len);
        BREAKPOINTS.saturating_sub(self.sites.len() + points)
    }

    /// Returns `true` if there is a permanent breakpoint at `pc`.
    pub fn is_site(&self, pc: u64) -> bool {
        self.sites.contains(&pc)
    }

    /// Passes the debug state for the next entry to KVM, like [`GuestDebug::apply`], but without
    /// setting the trap flag. Used for a vCPU that is in code that KVM cannot step and must stop in
    /// other code. With the trap flag, the guest would receive a debug exception. KVM sets the flag
    /// only at the RIP at the time of the call, so the call is made while RIP differs from that in
    /// `regs`.
    ///
    /// # Errors
    /// Returns an error if a KVM call fails. A guest cannot cause such a failure.
    pub fn apply_without_flag(
        &mut self,
        fd: &VcpuFd,
        regs: &kvm_regs,
        want: EntryDebugState,
    ) -> Result<(), KvmIoctlError> {
        if self.is_synced && want == self.set {
            return Ok(());
        }
        // Save the events, because KVM_SET_REGS discards a pending exception.
        let mut events = fd.get_vcpu_events()?;
        events.flags &= !KVM_VCPUEVENT_VALID_NMI_PENDING;
        fd.set_regs(&kvm_regs {
            rip: regs.rip ^ 1,
            ..*regs
        })?;
        let applied = self.apply(fd, want);
        fd.set_regs(regs)?;
        fd.set_vcpu_events(&events)?;
        applied
    }

    /// Passes the debug state `want` for the next entry to KVM. Makes no KVM call if the state has
    /// not changed. A step with the trap flag is always passed, because KVM ties the flag to the
    /// current RIP.
    ///
    /// # Errors
    /// Returns an error if a KVM call fails. A guest cannot cause such a failure.
    pub fn apply(&mut self, fd: &VcpuFd, want: EntryDebugState) -> Result<(), KvmIoctlError> {
        let by_flag = want.step && !want.without_flag;
        if !by_flag && self.is_synced && want == self.set {
            return Ok(());
        }
        let mut debug = kvm_guest_debug::default();
        let mut control = 0;
        let execute = |address: &u64| (*address, 0);
        let points = self.points.iter().flatten().map(|p| (p.address, condition(p)));
        let transient = want
            .entry_breakpoints
            .iter()
            .flatten()
            .take(self.free())
            .map(execute);
        let all = self.sites.iter().map(execute).chain(points).chain(transient);
        for (n, (address, condition)) in all.take(BREAKPOINTS).enumerate() {
            debug.arch.debugreg[n] = address;
            // Global enable, condition and length (SDM vol. 3 §19.2.4).
            debug.arch.debugreg[7] |= 2 << (2 * n) | condition << (16 + 4 * n) | 0x400;
            control |= KVM_GUESTDBG_USE_HW_BP;
        }
        let flags = [
            (want.step, KVM_GUESTDBG_SINGLESTEP),
            (want.block_interrupts, KVM_GUESTDBG_BLOCKIRQ),
            (want.watch, KVM_GUESTDBG_USE_HW_BP),
            (self.points.is_some(), KVM_GUESTDBG_USE_SW_BP),
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
        self.is_synced = true;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::kickable_vcpu::KickableVcpu;

    /// A #DB replaces B0 to B3 of DR6. Other causes stay set until software clears them (SDM vol. 3
    /// §19.2.3).
    #[test]
    fn dr6_keeps_uncleared_causes() {
        const RESET: u64 = 0xffff_0ff0;
        assert_eq!(dr6_after(RESET, RESET | 1 << 14), RESET | 1 << 14);
        assert_eq!(dr6_after(RESET | 0b0001, RESET | 0b0100), RESET | 0b0100);
        assert_eq!(
            dr6_after(RESET | 1 << 14, RESET | 0b0001),
            RESET | 1 << 14 | 0b0001
        );
        // Bits that a #DB does not set are not taken from `causes`.
        assert_eq!(dr6_after(RESET, !0), RESET | 0xe00f);
    }

    /// If a #DB of the guest causes an exit, the guest still finds the cause in DR6. Runs on this
    /// host's KVM, if available.
    #[test]
    fn injected_debug_exception_sets_dr6() {
        use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

        const CODE: u16 = 0x1000;
        const HANDLER: u16 = 0x1100;
        const SEEN: u16 = 0x1300;
        let Ok(kvm) = crate::kvm::host::open() else {
            eprintln!("not tested: there is no KVM here");
            return;
        };
        let vm = std::sync::Arc::new(crate::kvm::vm_fd::VmFd::new(&kvm).unwrap());
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x3000)]).unwrap();
        let write = |at: u16, bytes: &[u8]| memory.write_slice(bytes, GuestAddress(at.into())).unwrap();
        // The #DB entry of the real-mode vector table, then the guest code and the handler: NOP,
        // HLT; MOV %dr6,%eax, MOV %eax,SEEN, HLT.
        write(4, &[HANDLER.to_le_bytes(), [0, 0]].concat());
        write(CODE, &[0x90, 0xf4]);
        write(
            HANDLER,
            &[0x0f, 0x21, 0xf0, 0x66, 0xa3, SEEN as u8, (SEEN >> 8) as u8, 0xf4],
        );
        let _slots = crate::kvm::memslot::MemorySlots::new(vm.clone(), memory.clone()).unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        let mut sregs = vcpu.get_sregs().unwrap();
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        vcpu.set_sregs(&sregs).unwrap();
        let mut regs = vcpu.get_regs().unwrap();
        (regs.rip, regs.rsp, regs.rflags) = (CODE.into(), 0x2000, 2);
        vcpu.set_regs(&regs).unwrap();
        let stop = kvm_debug_exit_arch {
            exception: DB.into(),
            dr6: DR6_ONES | 1 << 14,
            ..Default::default()
        };
        inject_guest_exception(&vcpu, &stop).unwrap();
        let exit = format!("{:?}", KickableVcpu::new(vcpu).run().exit.unwrap());
        assert_eq!(exit, "Hlt");
        let seen: u32 = memory.read_obj(GuestAddress(SEEN.into())).unwrap();
        assert_eq!(seen, 0xffff_4ff0, "{seen:#x}");
    }
}
