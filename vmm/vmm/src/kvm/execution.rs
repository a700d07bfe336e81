//! Probes how this host's KVM runs guest code, in one VM.

use std::sync::{Mutex, PoisonError};

use kvm_bindings::KVM_MAX_CPUID_ENTRIES;
use kvm_ioctls::{Kvm, VcpuExit};
use perf_core::error_line;

use super::cpuid;
use super::host::{HostError, LEAVE};
use super::stepping::{self, Stepping};
use super::tiny::TinyGuest;

/// How this host's KVM runs guest code.
#[derive(Clone, Copy, Debug)]
pub struct KvmExecution {
    /// `true` if KVM interprets the code of guest kernels.
    pub interprets_kernels: bool,
    /// `true` if guests see Intel TSX in CPUID although their table hides it. A KVM whose user code
    /// executes CPUID natively restores the processor's bits.
    pub shows_hidden_transactions: bool,
    /// Single-stepping features.
    pub stepping: Stepping,
}

/// Returns how KVM runs guest code. The result is cached, because destroying the VM of a probe waits
/// for several RCU grace periods. Concurrent callers wait for the same probe.
///
/// # Errors
/// Returns [`HostError::Probe`] if KVM refuses a call that every VM needs.
pub fn probe(kvm: &Kvm) -> Result<KvmExecution, HostError> {
    static FOUND: Mutex<Option<KvmExecution>> = Mutex::new(None);
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(execution) = *found {
        return Ok(execution);
    }
    let mut guest = TinyGuest::empty(kvm)?;
    let table = guest.vcpu.get_cpuid2(KVM_MAX_CPUID_ENTRIES)?;
    let interprets_kernels = interprets_x87(&mut guest)?;
    let stepping = probe_stepping(kvm, &mut guest).unwrap_or_else(|e| {
        log::debug!("this KVM does not step guests: {}", error_line(&e));
        Stepping::default()
    });
    let execution = KvmExecution {
        interprets_kernels,
        shows_hidden_transactions: cpuid::has_transactions(&table),
        stepping,
    };
    *found = Some(execution);
    // Other threads may wait for the result. KVM takes longer to remove the guest.
    drop(found);
    drop(guest);
    Ok(execution)
}

/// Returns whether KVM interprets CPL 0, by running `fld1` there. KVM's emulator lacks x87
/// arithmetic, so an interpreted `fld1` ends in `KVM_EXIT_INTERNAL_ERROR`. With hardware
/// virtualisation the next instruction follows.
fn interprets_x87(guest: &mut TinyGuest) -> Result<bool, HostError> {
    guest.load(0, &[0xd9, 0xe8, LEAVE[0], LEAVE[1]])?;
    Ok(!matches!(guest.vcpu.run()?, VcpuExit::IoOut(..)))
}

fn probe_stepping(kvm: &Kvm, guest: &mut TinyGuest) -> Result<Stepping, HostError> {
    let kernel = stepping::probe_kernel(kvm, guest)?;
    Ok(Stepping {
        user: stepping::probe_user(guest)?,
        ..kernel
    })
}
