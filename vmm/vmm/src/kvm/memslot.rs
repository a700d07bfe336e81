//! Registers guest memory with KVM.
#![expect(unsafe_code, reason = "KVM maps memory that it is told the address of")]

use std::sync::Arc;

use kvm_bindings::kvm_userspace_memory_region;
use vm_memory::{Address, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use super::vm_fd::VmFd;

/// Error returned when KVM cannot register a memory slot.
#[derive(Debug, thiserror::Error)]
#[error("KVM rejected memory slot {slot} at {guest_address:#x}")]
pub struct MemorySlotError {
    /// Number of the memory slot.
    pub slot: u32,
    /// Guest-physical start address of the memory slot.
    pub guest_address: u64,
    /// Error of KVM_SET_USER_MEMORY_REGION.
    #[source]
    pub source: kvm_ioctls::Error,
}

/// Memory slots of a VM, which keep guest memory mapped while KVM uses it. On drop, the slots are
/// removed from KVM before the memory is unmapped.
pub struct MemorySlots {
    vm: Arc<VmFd>,
    memory: GuestMemoryMmap,
    /// Guest-physical start addresses of the registered slots, indexed by slot number.
    starts: Vec<u64>,
}

impl MemorySlots {
    /// Registers each mapping of `memory` with `vm`, which has no slots yet. Slot numbers start at
    /// 0.
    ///
    /// # Errors
    /// Returns a [`MemorySlotError`] if KVM rejects a slot. No slot remains registered.
    pub fn new(vm: Arc<VmFd>, memory: GuestMemoryMmap) -> Result<Self, MemorySlotError> {
        let mut slots = Self {
            vm,
            memory,
            starts: Vec::new(),
        };
        for (slot, region) in (0u32..).zip(slots.memory.iter()) {
            let guest_address = region.start_addr().raw_value();
            let slot_of_region = kvm_userspace_memory_region {
                slot,
                flags: 0,
                guest_phys_addr: guest_address,
                memory_size: region.len(),
                userspace_addr: region.as_ptr() as u64,
            };
            // SAFETY: the range is one whole mapping of `slots.memory`, which stays mapped until
            // `drop` has removed the slot from KVM. The mapping is shared memory without Rust
            // references: guest accesses race only with volatile accesses of vm-memory.
            unsafe { slots.vm.raw().set_user_memory_region(slot_of_region) }.map_err(|source| {
                MemorySlotError {
                    slot,
                    guest_address,
                    source,
                }
            })?;
            slots.starts.push(guest_address);
        }
        Ok(slots)
    }
}

impl Drop for MemorySlots {
    fn drop(&mut self) {
        for (slot, &guest_phys_addr) in (0u32..).zip(&self.starts) {
            let none = kvm_userspace_memory_region {
                slot,
                guest_phys_addr,
                ..Default::default()
            };
            // SAFETY: a size of zero removes the slot and passes no memory to KVM.
            if let Err(e) = unsafe { self.vm.raw().set_user_memory_region(none) } {
                log::error!("cannot remove memory slot {slot} from KVM; its memory is not freed: {e}");
                // The guest may still write to this memory. Leak the mapping so that the address
                // range is not reused.
                std::mem::forget(self.memory.clone());
            }
        }
    }
}

impl std::fmt::Debug for MemorySlots {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemorySlots")
            .field("starts", &self.starts)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::GuestAddress;

    use super::*;

    fn is_mapped(address: *const u8) -> bool {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().any(|line| {
            let (start, end) = line.split(' ').next().unwrap().split_once('-').unwrap();
            let address = address as u64;
            u64::from_str_radix(start, 16).unwrap() <= address
                && address < u64::from_str_radix(end, 16).unwrap()
        })
    }

    /// KVM never uses unmapped memory, whatever the order in which the VM, its memory and its slots
    /// are dropped. Afterwards KVM accepts new memory at the same guest address.
    #[test]
    fn memory_outlives_its_slots() {
        let Ok(kvm) = crate::kvm::host::open() else {
            eprintln!("SKIP: there is no KVM here");
            return;
        };
        let vm = Arc::new(VmFd::new(&kvm).unwrap());
        let ranges = [(GuestAddress(0), 0x10000), (GuestAddress(1 << 32), 0x5000)];
        let mut hosts = Vec::new();
        for _ in 0..2 {
            let memory = GuestMemoryMmap::<()>::from_ranges(&ranges).unwrap();
            let host = memory.get_host_address(GuestAddress(0)).unwrap();
            let slots = MemorySlots::new(vm.clone(), memory).unwrap();
            assert!(is_mapped(host));
            let again = GuestMemoryMmap::<()>::from_ranges(&ranges).unwrap();
            assert!(
                MemorySlots::new(vm.clone(), again).is_err(),
                "the VM has its memory"
            );
            assert!(is_mapped(host));
            drop(slots);
            hosts.push(host);
        }
        assert_eq!(hosts.len(), 2);
    }
}
