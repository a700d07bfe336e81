//! Opens the file descriptors of KVM's binary statistics (`KVM_GET_STATS_FD`, KVM API 4.133).
#![expect(unsafe_code, reason = "an ioctl that kvm-ioctls lacks")]

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use kvm_bindings::KVMIO;
use kvm_ioctls::Kvm;
use vmm_sys_util::ioctl::ioctl;
use vmm_sys_util::ioctl_io_nr;

mod request {
    use super::{KVMIO, ioctl_io_nr};
    ioctl_io_nr!(KVM_GET_STATS_FD, KVMIO, 0xce);
}
use request::KVM_GET_STATS_FD;

use super::call::KvmIoctlError;
use super::host::probe_vm;

/// Calls `read` with the statistics descriptors of a new VM and its vCPU. All VMs of a host have
/// the same set of statistics.
///
/// # Errors
/// Returns an error if a system call fails. On kernels before 5.14, this is `ENOTTY`.
pub fn of_probe<T>(kvm: &Kvm, read: impl FnOnce(OwnedFd, OwnedFd) -> T) -> io::Result<T> {
    let failed = |e: KvmIoctlError| io::Error::from_raw_os_error(e.errno());
    let vm = probe_vm(kvm).map_err(failed)?;
    let vcpu = vm.create_vcpu(0).map_err(failed)?;
    // Keep the VM and the vCPU open while reading: before Linux 6.5 a statistics descriptor did not
    // hold a reference to them.
    Ok(read(stats_fd(&vm)?, stats_fd(&vcpu)?))
}

/// Returns a file descriptor from which the binary statistics of a VM or a vCPU can be read with
/// `pread(2)`.
///
/// # Errors
/// Returns an error if the ioctl fails. On kernels before 5.14, this is `ENOTTY`.
pub fn stats_fd(fd: &impl AsRawFd) -> io::Result<OwnedFd> {
    // SAFETY: the ioctl takes no argument and only creates a descriptor. The reference keeps `fd`
    // open during the call.
    let raw = unsafe { ioctl(fd, KVM_GET_STATS_FD()) };
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just returned `raw` as a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::kvm::vm_fd::VmFd;

    /// A VM and each of its vCPUs have separate statistics, each with a header. The descriptors are
    /// close-on-exec.
    #[test]
    fn vm_and_vcpus_have_separate_statistics() {
        let Ok(kvm) = crate::kvm::host::open() else {
            eprintln!("SKIP: there is no KVM here");
            return;
        };
        let vm = VmFd::new(&kvm).unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        let (Ok(of_vm), Ok(of_vcpu)) = (stats_fd(&vm), stats_fd(&vcpu)) else {
            eprintln!("SKIP: this KVM has no binary statistics");
            return;
        };
        let mut ids = Vec::new();
        for fd in [of_vm, of_vcpu] {
            let file = File::from(fd);
            let (mut header, mut id) = ([0; 24], [0; 48]);
            file.read_exact_at(&mut header, 0).unwrap();
            let word = |n: usize| u32::from_le_bytes(header[4 * n..4 * n + 4].try_into().unwrap());
            assert!((1..=64).contains(&word(1)), "the size of a name: {}", word(1));
            assert!(word(2) > 0, "no descriptors");
            file.read_exact_at(&mut id, u64::from(word(3))).unwrap();
            let id = String::from_utf8_lossy(&id).into_owned();
            assert!(id.starts_with("kvm-"), "{id:?}");
            ids.push(id.trim_end_matches('\0').to_owned());
        }
        assert_ne!(ids[0], ids[1]);
    }

    #[test]
    fn stats_fd_rejects_other_descriptor() {
        let file = File::open("/dev/null").unwrap();
        assert_eq!(stats_fd(&file).unwrap_err().raw_os_error(), Some(libc::ENOTTY));
    }
}
