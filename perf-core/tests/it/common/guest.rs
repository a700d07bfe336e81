//! A minimal guest for driver tests that need a real `KVM_RUN`.
#![expect(unsafe_code, reason = "guest memory")]

use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};

use super::thread::{raise_on_signals, signals_of_this_thread};

const PAGE: usize = 4096;
const CODE_AT: u64 = 0x1000;

/// A VM whose vCPUs all run the same few bytes of code in real mode.
pub struct RealModeVm {
    pub vcpus: Vec<VcpuFd>,
    pub vm: VmFd,
    memory: *mut libc::c_void,
}

impl RealModeVm {
    /// Creates the VM. Returns `None` if KVM cannot be used.
    pub fn new(vcpus: u64, code: &[u8]) -> Option<Self> {
        assert!(code.len() <= PAGE);
        let vm = Kvm::new().ok()?.create_vm().unwrap();
        // SAFETY: a fresh anonymous mapping that lives until drop, when the VM no longer runs.
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
        // SAFETY: the page is mapped and writable, and the code fits in a page.
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

impl RealModeVm {
    /// Runs vCPU 0 until it exits or until this thread has received more than `signals` signals.
    pub fn run_until_signal(&mut self, signals: u64) -> Result<VcpuExit<'_>, kvm_ioctls::Error> {
        let vcpu = &mut self.vcpus[0];
        let flag = &raw mut vcpu.get_kvm_run().immediate_exit;
        vcpu.set_kvm_immediate_exit(0);
        // SAFETY: the run page is mapped as long as the vCPU exists, and the flag is reset below.
        unsafe { raise_on_signals(flag) };
        if signals_of_this_thread() > signals {
            vcpu.set_kvm_immediate_exit(1);
        }
        let exit = vcpu.run();
        // SAFETY: nothing is written through a null pointer.
        unsafe { raise_on_signals(std::ptr::null_mut()) };
        exit
    }
}

impl Drop for RealModeVm {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, and the guest no longer runs.
        unsafe { libc::munmap(self.memory, PAGE) };
    }
}
