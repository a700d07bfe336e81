//! Saves the initial state of a vCPU and restores it when a removed vCPU is plugged in again.
//!
//! KVM can neither delete nor reset a vCPU. The state of each hot-pluggable vCPU is therefore read
//! once after creation and written before every hot-plug. The first hot-plug needs this too,
//! because an INIT, SIPI or NMI from the guest also reaches vCPUs that no thread runs. The time
//! stamp counter keeps running, as it does across an INIT.

use kvm_bindings::{
    Msrs, kvm_debugregs, kvm_fpu, kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs,
    kvm_vcpu_events, kvm_xcrs,
};
use kvm_ioctls::{Cap, Kvm, KvmNestedStateBuffer};

use super::call::KvmIoctlError;
use super::vcpu_fd::VcpuFd;

/// MSRs that are not part of a vCPU's initial state: the time stamp counter and its offset, the TSC
/// deadline (the local APIC state stops its timer), the local APIC base (part of the special
/// registers), and both numbers of kvmclock's wall clock (state of the VM).
const NOT_OF_A_VCPU: [u32; 6] = [0x10, 0x3b, 0x6e0, 0x1b, 0x11, 0x4b56_4d00];
/// Hyper-V MSRs, which guests do not see and some of which are state of the VM.
pub(super) const HYPER_V: std::ops::Range<u32> = 0x4000_0000..0x4000_0200;
/// Maximum number of MSRs in one KVM call (`KVM_MAX_MSR_ENTRIES`).
pub(super) const MAX_MSRS_PER_CALL: usize = 256;

/// Complete initial state of a vCPU.
pub struct InitialVcpuState {
    mp_state: kvm_mp_state,
    regs: kvm_regs,
    sregs: kvm_sregs,
    fpu: kvm_fpu,
    xcrs: Option<kvm_xcrs>,
    debug: kvm_debugregs,
    lapic: kvm_lapic_state,
    events: kvm_vcpu_events,
    msrs: Vec<kvm_msr_entry>,
    /// State for nested virtualisation; `None` if the host's KVM does not support it.
    nested: Option<Box<KvmNestedStateBuffer>>,
}

impl std::fmt::Debug for InitialVcpuState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FirstState")
            .field("mp_state", &self.mp_state.mp_state)
            .field("msrs", &self.msrs.len())
            .finish_non_exhaustive()
    }
}

impl InitialVcpuState {
    /// Reads the state of a vCPU that is configured but has not run yet.
    ///
    /// # Errors
    /// Returns a [`KvmIoctlError`] if KVM cannot read a part of the state.
    pub fn of(kvm: &Kvm, vcpu: &VcpuFd) -> Result<Self, KvmIoctlError> {
        let list = kvm
            .get_msr_index_list()
            .map_err(KvmIoctlError::of("KVM_GET_MSR_INDEX_LIST"))?;
        let nested = kvm.check_extension(Cap::NestedState).then(|| {
            let mut buffer = Box::new(KvmNestedStateBuffer::empty());
            match vcpu.raw().nested_state(&mut buffer) {
                Ok(_) => Ok(buffer),
                Err(e) => Err(KvmIoctlError::of("KVM_GET_NESTED_STATE")(e)),
            }
        });
        Ok(Self {
            mp_state: vcpu.get_mp_state()?,
            regs: vcpu.get_regs()?,
            sregs: vcpu.get_sregs()?,
            fpu: vcpu.get_fpu()?,
            xcrs: kvm
                .check_extension(Cap::Xcrs)
                .then(|| vcpu.raw().get_xcrs().map_err(KvmIoctlError::of("KVM_GET_XCRS")))
                .transpose()?,
            debug: vcpu.get_debug_regs()?,
            lapic: vcpu.get_lapic()?,
            events: vcpu.get_vcpu_events()?,
            msrs: read_msrs(vcpu, list.as_slice())?,
            nested: nested.transpose()?,
        })
    }

    /// Writes this state to KVM. No thread may run the vCPU.
    ///
    /// # Errors
    /// Returns a [`KvmIoctlError`] if KVM rejects a part of the state.
    pub fn restore(&self, vcpu: &VcpuFd) -> Result<(), KvmIoctlError> {
        if let Some(nested) = &self.nested {
            vcpu.raw()
                .set_nested_state(nested)
                .map_err(KvmIoctlError::of("KVM_SET_NESTED_STATE"))?;
        }
        vcpu.set_regs(&self.regs)?;
        vcpu.set_sregs(&self.sregs)?;
        vcpu.set_fpu(&self.fpu)?;
        if let Some(xcrs) = &self.xcrs {
            vcpu.raw()
                .set_xcrs(xcrs)
                .map_err(KvmIoctlError::of("KVM_SET_XCRS"))?;
        }
        vcpu.set_debug_regs(&self.debug)?;
        write_msrs(vcpu, &self.msrs)?;
        // The APIC base selects the mode that determines the register layout, so it must be set
        // first.
        vcpu.set_lapic(&self.lapic)?;
        vcpu.set_vcpu_events(&self.events)?;
        vcpu.set_mp_state(self.mp_state)
    }
}

pub(super) fn msrs_of(entries: &[kvm_msr_entry]) -> Result<Msrs, KvmIoctlError> {
    Msrs::from_entries(entries).map_err(|_| KvmIoctlError::with_errno("making an MSR list", libc::ENOMEM))
}

/// Reads the MSRs of `indices` that belong to the initial state. Skips MSRs that cannot be read.
fn read_msrs(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<kvm_msr_entry>, KvmIoctlError> {
    let wanted = |index: &u32| !NOT_OF_A_VCPU.contains(index) && !HYPER_V.contains(index);
    read_entries(vcpu, indices.iter().copied().filter(wanted))
}

/// Reads the MSRs of `indices`. Skips MSRs that cannot be read.
pub(super) fn read_entries(
    vcpu: &VcpuFd,
    indices: impl Iterator<Item = u32>,
) -> Result<Vec<kvm_msr_entry>, KvmIoctlError> {
    let mut wanted: Vec<kvm_msr_entry> = indices
        .map(|index| kvm_msr_entry {
            index,
            ..Default::default()
        })
        .collect();
    let mut read = Vec::with_capacity(wanted.len());
    while !wanted.is_empty() {
        let mut msrs = msrs_of(&wanted[..wanted.len().min(MAX_MSRS_PER_CALL)])?;
        let done = vcpu.get_msrs(&mut msrs)?;
        read.extend_from_slice(&msrs.as_slice()[..done.min(msrs.as_slice().len())]);
        // KVM stops at an MSR that it lists but cannot read. Skip this MSR.
        let over = done + usize::from(done < msrs.as_slice().len());
        wanted.drain(..over);
    }
    Ok(read)
}

/// Writes the MSRs of `entries`. Skips MSRs that cannot be written.
fn write_msrs(vcpu: &VcpuFd, entries: &[kvm_msr_entry]) -> Result<(), KvmIoctlError> {
    let mut rest = entries;
    while !rest.is_empty() {
        let now = &rest[..rest.len().min(MAX_MSRS_PER_CALL)];
        let done = vcpu.set_msrs(&msrs_of(now)?)?;
        if let Some(kept) = now.get(done) {
            // KVM stops at a read-only MSR, whose value cannot have changed. Skip this MSR.
            log::trace!("MSR {:#x} stays as it is", kept.index);
        }
        rest = &rest[(done + usize::from(done < now.len())).min(rest.len())..];
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::vm_fd::VmFd;

    const KVM_MP_STATE_UNINITIALIZED: u32 = 1;

    /// Restoring returns a modified vCPU to its initial state.
    #[test]
    fn restore_returns_vcpu_to_initial_state() {
        let Ok(kvm) = Kvm::new() else {
            eprintln!("SKIP: no /dev/kvm here");
            return;
        };
        let vm = VmFd::new(&kvm).unwrap();
        vm.add_irqchip().unwrap();
        let _first = vm.create_vcpu(0).unwrap();
        let vcpu = vm.create_vcpu(1).unwrap();
        let first = InitialVcpuState::of(&kvm, &vcpu).unwrap();
        assert_eq!(first.mp_state.mp_state, KVM_MP_STATE_UNINITIALIZED);

        let mut regs = first.regs;
        (regs.rip, regs.rsp) = (0x1234, 0x5678);
        vcpu.set_regs(&regs).unwrap();
        let mut sregs = first.sregs;
        sregs.cr2 = 0xdead_0000;
        vcpu.set_sregs(&sregs).unwrap();
        let mut debug = first.debug;
        debug.db[0] = 0x1000;
        vcpu.set_debug_regs(&debug).unwrap();
        // SYSENTER_EIP, STAR and the kvmclock page of this vCPU.
        for (index, data) in [(0x176, 0x1111), (0xc000_0081, 0x2222), (0x4b56_4d01, 0x3001)] {
            let entry = kvm_msr_entry {
                index,
                data,
                ..Default::default()
            };
            vcpu.set_msrs(&Msrs::from_entries(&[entry]).unwrap()).unwrap();
        }
        let mut lapic = first.lapic;
        lapic.regs[0x80] = 0x20;
        vcpu.set_lapic(&lapic).unwrap();
        vcpu.set_mp_state(kvm_mp_state { mp_state: 0 }).unwrap();
        vcpu.nmi().unwrap();
        let changed = InitialVcpuState::of(&kvm, &vcpu).unwrap();
        assert_ne!(values(&changed), values(&first));

        first.restore(&vcpu).unwrap();
        let again = InitialVcpuState::of(&kvm, &vcpu).unwrap();
        assert_eq!(values(&again), values(&first));
    }

    type Values = (
        u32,
        kvm_regs,
        kvm_sregs,
        [u64; 4],
        Vec<std::ffi::c_char>,
        [u8; 2],
        Vec<(u32, u64)>,
    );

    fn values(state: &InitialVcpuState) -> Values {
        (
            state.mp_state.mp_state,
            state.regs,
            state.sregs,
            state.debug.db,
            state.lapic.regs.to_vec(),
            [state.events.nmi.injected, state.events.nmi.pending],
            state.msrs.iter().map(|msr| (msr.index, msr.data)).collect(),
        )
    }
}
