//! `KVM_GET_STATS_FD` (KVM API 4.133): the descriptor behind KVM's binary statistics.
#![expect(unsafe_code, reason = "an ioctl that kvm-ioctls lacks")]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use kvm_bindings::KVMIO;
use vmm_sys_util::ioctl::ioctl;
use vmm_sys_util::ioctl_io_nr;

mod request {
    use super::{KVMIO, ioctl_io_nr};
    ioctl_io_nr!(KVM_GET_STATS_FD, KVMIO, 0xce);
}
use request::KVM_GET_STATS_FD;

/// The binary statistics of a VM or a vCPU, as a descriptor to `pread(2)` from.
///
/// # Errors
/// The system call's error; `ENOTTY` on kernels before 5.14.
pub fn stats_fd(fd: &impl AsRawFd) -> io::Result<OwnedFd> {
    // SAFETY: the ioctl takes no argument and only makes a new descriptor; `fd` is open for the whole call
    // because the caller's reference keeps it so.
    let raw = unsafe { ioctl(fd, KVM_GET_STATS_FD()) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned `raw` as a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}
