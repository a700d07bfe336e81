//! A tiny guest for driver tests that need a real `KVM_RUN`.

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};

const PAGE: usize = 4096;
const CODE_AT: u64 = 0x1000;

/// A VM whose vCPUs all run the same few bytes in real mode.
pub struct Guest {
    pub vcpus: Vec<VcpuFd>,
    pub vm: VmFd,
    memory: *mut libc::c_void,
}

impl Guest {
    /// `None` where there is no usable KVM.
    pub fn new(vcpus: u64, code: &[u8]) -> Option<Self> {
        assert!(code.len() <= PAGE);
        let vm = Kvm::new().ok()?.create_vm().unwrap();
        // SAFETY: a fresh anonymous mapping that lives until drop, after the VM is no longer run.
        let memory = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(memory, libc::MAP_FAILED);
        // SAFETY: the page is mapped and writable, and the code is no longer than a page.
        unsafe {
            memory
                .cast::<u8>()
                .copy_from_nonoverlapping(code.as_ptr(), code.len())
        };
        // SAFETY: the region is the page mapped above, which outlives the VM's use of it.
        unsafe {
            vm.set_user_memory_region(kvm_userspace_memory_region {
                slot: 0,
                guest_phys_addr: CODE_AT,
                memory_size: PAGE as u64,
                userspace_addr: memory as u64,
                flags: 0,
            })
            .unwrap();
        }
        let vcpus = (0..vcpus)
            .map(|id| {
                let vcpu = vm.create_vcpu(id).unwrap();
                let mut sregs = vcpu.get_sregs().unwrap();
                sregs.cs.base = 0;
                sregs.cs.selector = 0;
                vcpu.set_sregs(&sregs).unwrap();
                let mut regs = vcpu.get_regs().unwrap();
                regs.rip = CODE_AT;
                regs.rflags = 2;
                vcpu.set_regs(&regs).unwrap();
                vcpu
            })
            .collect();
        Some(Self { vcpus, vm, memory })
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length; nothing runs the guest any more.
        unsafe { libc::munmap(self.memory, PAGE) };
    }
}
