//! What this host's KVM can do for single-stepping a guest, found out by doing it.
//!
//! Two instructions of a tiny 64-bit guest are run at either privilege level. No module's name is looked at: a KVM that
//! runs code natively at one level and emulates it at the other steps at one of them only.

use kvm_bindings::{
    KVM_CAP_SET_GUEST_DEBUG2, KVM_GUESTDBG_BLOCKIRQ, KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP,
    KVM_GUESTDBG_USE_HW_BP, kvm_guest_debug, kvm_segment, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap};

use super::host::HostError;

/// How many hardware breakpoints a processor has.
pub const BREAKPOINTS: usize = 4;

/// What works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Stepping {
    /// Single steps at CPL 0.
    pub kernel: bool,
    /// Single steps at CPL 3.
    pub user: bool,
    /// Hardware breakpoints (`KVM_GUESTDBG_USE_HW_BP`) at CPL 0.
    pub breakpoints: bool,
    /// Interrupts can be held back during a step (`KVM_GUESTDBG_BLOCKIRQ`, Linux 5.14 and later).
    pub blocks_interrupts: bool,
}

const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const PD: u64 = 0x3000;
const CODE: u64 = 0x5000;
const SIZE: usize = 0x10000;
/// Present, writable, user.
const TABLE: u64 = 7;
const LARGE: u64 = 1 << 7;

/// Probes; takes a few milliseconds.
///
/// # Errors
/// [`HostError::Probe`] when KVM refuses what every VM needs.
pub fn probe(kvm: &Kvm) -> Result<Stepping, HostError> {
    let controls = kvm.check_extension_raw(u64::from(KVM_CAP_SET_GUEST_DEBUG2));
    let mut step = kvm_guest_debug {
        control: KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP,
        ..Default::default()
    };
    let kernel = stops_behind_first(kvm, 0, &step)?;
    let user = stops_behind_first(kvm, 3, &step)?;
    step.control = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_USE_HW_BP;
    step.arch.debugreg[0] = CODE + 1;
    step.arch.debugreg[7] = 0x402;
    Ok(Stepping {
        kernel,
        user,
        breakpoints: stops_behind_first(kvm, 0, &step)?,
        blocks_interrupts: controls & KVM_GUESTDBG_BLOCKIRQ as i32 != 0,
    })
}

/// Runs `nop; nop; hlt` in 64-bit mode at `cpl` under `debug`. Whether it stops behind the first instruction.
fn stops_behind_first(kvm: &Kvm, cpl: u8, debug: &kvm_guest_debug) -> Result<bool, HostError> {
    let probe = |what| move |source| HostError::Probe { what, source };
    let memory =
        GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), SIZE)]).map_err(|_| HostError::Memory)?;
    let tables = [(PML4, PDPT | TABLE), (PDPT, PD | TABLE), (PD, TABLE | LARGE)];
    for (at, entry) in tables {
        memory
            .write_obj(entry, GuestAddress(at))
            .map_err(|_| HostError::Memory)?;
    }
    // HLT at CPL 3 faults; without an interrupt table that is the end.
    memory
        .write_slice(&[0x90, 0x90, 0xf4], GuestAddress(CODE))
        .map_err(|_| HostError::Memory)?;
    let host = memory
        .get_host_address(GuestAddress(0))
        .map_err(|_| HostError::Memory)?;
    let vm = kvm.create_vm().map_err(probe("KVM_CREATE_VM"))?;
    let _ = vm.set_tss_address(0xfffb_d000);
    super::memslot::set(
        &vm,
        kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: SIZE as u64,
            userspace_addr: host as u64,
        },
        &memory,
    )
    .map_err(probe("KVM_SET_USER_MEMORY_REGION"))?;
    let mut vcpu = vm.create_vcpu(0).map_err(probe("KVM_CREATE_VCPU"))?;
    let supported = super::cpuid::supported(kvm).map_err(|_| HostError::Memory)?;
    vcpu.set_cpuid2(&supported).map_err(probe("KVM_SET_CPUID2"))?;
    let mut sregs = vcpu.get_sregs().map_err(probe("KVM_GET_SREGS"))?;
    let segment = |selector: u16, type_: u8, l: u8| kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector: selector | u16::from(cpl),
        type_,
        present: 1,
        dpl: cpl,
        db: 1 - l,
        s: 1,
        l,
        g: 1,
        ..Default::default()
    };
    sregs.cs = segment(8, 0xb, 1);
    sregs.ss = segment(16, 3, 0);
    (sregs.ds, sregs.es) = (sregs.ss, sregs.ss);
    sregs.idt.limit = 0;
    sregs.cr3 = PML4;
    sregs.cr4 = 1 << 5; // PAE
    sregs.cr0 = 1 << 31 | 1 << 5 | 1 << 4 | 1; // PG, NE, ET, PE
    sregs.efer = 1 << 10 | 1 << 8; // LMA, LME
    vcpu.set_sregs(&sregs).map_err(probe("KVM_SET_SREGS"))?;
    let mut regs = vcpu.get_regs().map_err(probe("KVM_GET_REGS"))?;
    (regs.rip, regs.rsp, regs.rflags) = (CODE, 0x8000, 2);
    vcpu.set_regs(&regs).map_err(probe("KVM_SET_REGS"))?;
    if vcpu.set_guest_debug(debug).is_err() {
        return Ok(false);
    }
    match vcpu.run() {
        Ok(VcpuExit::Debug(stop)) => Ok(stop.pc == CODE + 1),
        Ok(_) => Ok(false),
        Err(source) => Err(HostError::Probe {
            what: "KVM_RUN",
            source,
        }),
    }
}
