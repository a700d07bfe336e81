//! Sets the signal mask that applies while a thread is in KVM_RUN (`KVM_SET_SIGNAL_MASK`, KVM API
//! 4.17).
#![expect(unsafe_code, reason = "an ioctl that kvm-ioctls lacks")]

use std::io;
use std::ptr;

use request::KVM_SET_SIGNAL_MASK;
use vmm_sys_util::ioctl::{ioctl_with_ptr, ioctl_with_ref};

use super::vcpu_fd::VcpuFd;

mod request {
    use kvm_bindings::{KVMIO, kvm_signal_mask};

    vmm_sys_util::ioctl_iow_nr!(KVM_SET_SIGNAL_MASK, KVMIO, 0x8b, kvm_signal_mask);
}

/// Size in bytes of the kernel's signal set on x86. The C library's `sigset_t` begins with it.
const KERNEL_SIGSET_BYTES: usize = 8;

/// Argument of KVM_SET_SIGNAL_MASK: `struct kvm_signal_mask`, followed by a signal set of the
/// kernel.
#[repr(C)]
struct KvmSignalMask {
    len: u32,
    set: [u8; KERNEL_SIGSET_BYTES],
}

/// Makes KVM block exactly the signals in `blocked` while the vCPU's thread is in KVM_RUN.
///
/// # Errors
/// Returns an error if the ioctl fails.
#[expect(clippy::cast_possible_truncation, reason = "eight")]
pub fn set(vcpu: &VcpuFd, blocked: &libc::sigset_t) -> io::Result<()> {
    let mut mask = KvmSignalMask {
        len: KERNEL_SIGSET_BYTES as u32,
        set: [0; KERNEL_SIGSET_BYTES],
    };
    // SAFETY: a sigset_t is initialised plain data and larger than the number of bytes copied from
    // it.
    unsafe {
        ptr::copy_nonoverlapping(
            (&raw const *blocked).cast(),
            mask.set.as_mut_ptr(),
            KERNEL_SIGSET_BYTES,
        )
    };
    // SAFETY: the ioctl reads a struct kvm_signal_mask and the `len` bytes after it, both of which
    // `mask` contains. `KVM_SET_SIGNAL_MASK` is a vCPU ioctl.
    match unsafe { ioctl_with_ref(vcpu, KVM_SET_SIGNAL_MASK(), &mask) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Removes the signal mask for KVM_RUN, so that the ordinary mask of the thread applies there too.
///
/// # Errors
/// Returns an error if the ioctl fails.
pub fn clear(vcpu: &VcpuFd) -> io::Result<()> {
    // SAFETY: with a null pointer the ioctl reads nothing and removes the mask.
    match unsafe { ioctl_with_ptr(vcpu, KVM_SET_SIGNAL_MASK(), ptr::null::<KvmSignalMask>()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::mem::{offset_of, size_of};

    use vmm_sys_util::signal::create_sigset;

    use super::*;
    use crate::kvm::vm_fd::VmFd;

    /// In [`KvmSignalMask`], the signal set directly follows the field `len`, because the kernel
    /// reads `len` bytes after that field.
    #[test]
    fn signal_set_follows_its_length() {
        assert_eq!(offset_of!(KvmSignalMask, set), 4);
        assert_eq!(size_of::<KvmSignalMask>(), 4 + KERNEL_SIGSET_BYTES);
        assert_eq!(
            KVM_SET_SIGNAL_MASK(),
            0x4004_AE8B,
            "the flexible part is not in the number"
        );
    }

    /// KVM accepts a mask, its replacement and its removal. Removing a mask that is not set is not
    /// an error.
    #[test]
    fn signal_mask_can_be_set_and_cleared() {
        let Ok(kvm) = crate::kvm::host::open() else {
            eprintln!("SKIP: there is no KVM here");
            return;
        };
        let vcpu = VmFd::new(&kvm).unwrap().create_vcpu(0).unwrap();
        clear(&vcpu).unwrap();
        for signals in [&[libc::SIGUSR2][..], &[]] {
            set(&vcpu, &create_sigset(signals).unwrap()).unwrap();
        }
        clear(&vcpu).unwrap();
        clear(&vcpu).unwrap();
    }
}
