//! Guest memory handed to KVM.
#![allow(unsafe_code)]

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::VmFd;
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

/// Maps one region of `memory` into the VM.
///
/// The caller keeps `memory` alive for as long as the VM has a vCPU; `perfvisor` holds both in the same
/// struct and drops the vCPUs first.
///
/// # Errors
/// KVM's error.
pub fn set(
    vm: &VmFd,
    region: kvm_userspace_memory_region,
    memory: &GuestMemoryMmap,
) -> Result<(), kvm_ioctls::Error> {
    let inside = memory.iter().any(|r| {
        let host = memory.get_host_address(r.start_addr()).map_or(0, |p| p as u64);
        region.userspace_addr >= host
            && region
                .userspace_addr
                .checked_add(region.memory_size)
                .is_some_and(|end| end <= host + r.len())
    });
    if !inside {
        return Err(kvm_ioctls::Error::new(libc::EINVAL));
    }
    // SAFETY: the range was just checked to lie inside a live mapping of `memory`, which is ordinary shared
    // memory that no Rust reference points into: guest accesses only race with vm-memory's volatile ones.
    unsafe { vm.set_user_memory_region(region) }
}
