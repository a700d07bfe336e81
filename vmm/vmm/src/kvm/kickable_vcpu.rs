//! Kicks a vCPU out of KVM_RUN from a signal handler of its own thread.
//!
//! The handler writes to `kvm_run.immediate_exit`. It finds the `kvm_run` page through a
//! thread-local pointer, so the page must stay mapped while the pointer is set. [`KickableVcpu`]
//! owns the file descriptor of the vCPU, which owns the mapping, and is not `Send`.
#![expect(
    unsafe_code,
    reason = "the kvm_run page is shared with the kernel and a signal handler"
)]

use std::cell::Cell;
use std::ops::Deref;
use std::ptr;
use std::sync::atomic::{Ordering, compiler_fence};

use kvm_bindings::{
    KVM_INTERNAL_ERROR_EMULATION, KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES, kvm_run, kvm_sync_regs,
};
pub use kvm_ioctls::{ReadMsrExit, SyncReg, VcpuExit, WriteMsrExit};

use super::call::KvmIoctlError;
use super::vcpu_fd::VcpuFd;

thread_local! {
    /// The `kvm_run` page of the vCPU that this thread runs, or null.
    static PAGE: Cell<*mut kvm_run> = const { Cell::new(ptr::null_mut()) };
}

/// Makes the vCPU that this thread runs leave KVM_RUN. If the thread is not in KVM_RUN, the next
/// KVM_RUN returns immediately. Has no effect if the thread runs no vCPU.
///
/// Async-signal-safe: accesses one const-initialised thread-local without a destructor and one byte
/// of shared memory.
pub fn request_exit_of_current_vcpu() {
    let page = PAGE.get();
    if !page.is_null() {
        write_immediate_exit(page, 1);
    }
}

/// Writes `value` to the field `immediate_exit` of `page`, which belongs to a [`KickableVcpu`] of
/// this thread.
fn write_immediate_exit(page: *mut kvm_run, value: u8) {
    // SAFETY: `page` points into the mapping that the descriptor of a `KickableVcpu` owns.
    // `ImmediateExitGuard` is dropped before the descriptor and clears `PAGE`. Neither can leave
    // this thread, because `ImmediateExitGuard` holds a raw pointer and is therefore not `Send`.
    // The write is volatile because the kernel reads the byte and a signal handler may write it.
    unsafe { (&raw mut (*page).immediate_exit).write_volatile(value) };
}

/// Guard that clears [`PAGE`] on drop, if it still points to the same page.
#[derive(Debug)]
struct ImmediateExitGuard(*mut kvm_run);

impl Drop for ImmediateExitGuard {
    fn drop(&mut self) {
        if PAGE.get() == self.0 {
            PAGE.set(ptr::null_mut());
        }
    }
}

/// Minimum number of data words (`ndata`) in an internal error that includes the instruction bytes:
/// a word of flags, and two words for the number of bytes and the bytes
/// (Documentation/virt/kvm/api.rst, `KVM_EXIT_INTERNAL_ERROR`).
const DATA_WITH_BYTES: u32 = 3;
/// Maximum length of an x86 instruction, in bytes.
const MAX_INSTRUCTION_BYTES: usize = 15;

/// Details of a KVM_EXIT_INTERNAL_ERROR exit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InternalErrorExit {
    /// Reason of the internal error (`KVM_INTERNAL_ERROR_*`).
    pub suberror: u32,
    bytes: [u8; MAX_INSTRUCTION_BYTES],
    count: usize,
}

impl InternalErrorExit {
    /// Creates an exit for an instruction with these bytes that KVM cannot emulate. Ignores bytes
    /// after the first 15.
    #[must_use]
    pub fn new(suberror: u32, bytes: &[u8]) -> Self {
        let count = bytes.len().min(MAX_INSTRUCTION_BYTES);
        let mut kept = [0; MAX_INSTRUCTION_BYTES];
        kept[..count].copy_from_slice(&bytes[..count]);
        Self {
            suberror,
            bytes: kept,
            count,
        }
    }

    /// Returns the instruction bytes that KVM reported, which may be empty.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.count]
    }
}

/// Result of one KVM_RUN call.
#[derive(Debug)]
pub struct RunResult<'v> {
    /// Exit reason of the vCPU, or the error of KVM_RUN.
    pub exit: Result<VcpuExit<'v>, KvmIoctlError>,
    /// Size in bytes of one access, at a port I/O exit. An exit for a string instruction has
    /// several accesses in one buffer.
    pub io_width: usize,
}

/// A vCPU that leaves KVM_RUN when the current thread receives a kick signal. If a thread has armed
/// several vCPUs, signals kick only the one that was armed last.
///
/// [`Deref`] gives access to the calls that read and write KVM's state. There is no `DerefMut`,
/// because replacing the descriptor would unmap the page to which the signal handler writes.
#[derive(Debug)]
pub struct KickableVcpu {
    // Fields are dropped in declaration order: `armed` clears the pointer before `fd` unmaps the
    // page.
    armed: ImmediateExitGuard,
    fd: VcpuFd,
}

impl KickableVcpu {
    /// Arms the vCPU `fd`, so that signals to the current thread kick it out of KVM_RUN.
    pub fn new(mut fd: VcpuFd) -> Self {
        let page: *mut kvm_run = fd.raw_mut().get_kvm_run();
        PAGE.set(page);
        let armed = ImmediateExitGuard(page);
        Self { armed, fd }
    }

    /// Disarms the vCPU and returns its file descriptor. Later signals do not affect the vCPU.
    pub fn disarm(self) -> VcpuFd {
        let Self { armed, fd } = self;
        drop(armed);
        fd
    }

    /// Clears the request to leave KVM_RUN. Must be called before the caller checks the state that
    /// signals announce. A signal after the check then makes the next KVM_RUN return.
    #[inline]
    pub fn clear_exit_request(&mut self) {
        write_immediate_exit(self.armed.0, 0);
        // The signal handler runs on this thread, so a compiler fence is sufficient.
        compiler_fence(Ordering::SeqCst);
    }

    /// Requests that the next KVM_RUN return without entering the guest. KVM first completes the
    /// pending I/O of the last exit.
    pub fn request_exit(&mut self) {
        write_immediate_exit(self.armed.0, 1);
    }

    /// Runs the vCPU until its next exit (KVM_RUN).
    #[inline]
    pub fn run(&mut self) -> RunResult<'_> {
        let page = self.armed.0;
        let why = self.fd.raw_mut().run().map_err(KvmIoctlError::of("KVM_RUN"));
        // SAFETY: the mapping lives as long as `self.fd`, see `write_immediate_exit`. Every bit
        // pattern of the union is a valid `io`, which consists of integers. `why` borrows the data
        // of the exit and never this byte.
        let io_width = unsafe { (&raw const (*page).__bindgen_anon_1.io.size).read() };
        RunResult {
            exit: why,
            io_width: io_width.into(),
        }
    }

    /// Makes KVM complete the last exit, which must be a port write, without entering the guest.
    ///
    /// KVM advances RIP past the OUT at the next entry, unless RIP has changed. Afterwards an exit
    /// is still requested, until the caller calls [`KickableVcpu::clear_exit_request`].
    ///
    /// # Errors
    /// Returns an error if KVM_RUN fails. A guest cannot cause such a failure.
    pub fn complete_exit(&mut self) -> Result<(), KvmIoctlError> {
        self.request_exit();
        match self.fd.raw_mut().run() {
            Err(e) if e.errno() == libc::EINTR => {}
            Err(e) => return Err(KvmIoctlError::of("KVM_RUN")(e)),
            Ok(exit) => log::debug!("unexpected exit while completing another: {exit:?}"),
        }
        Ok(())
    }

    /// Returns IA32_APIC_BASE as of the last exit.
    pub fn apic_base(&mut self) -> u64 {
        self.fd.raw_mut().get_kvm_run().apic_base
    }

    /// Replaces the value of IA32_APIC_BASE that KVM reported at the last exit.
    #[cfg(test)]
    pub fn set_apic_base(&mut self, apic_base: u64) {
        self.fd.raw_mut().get_kvm_run().apic_base = apic_base;
    }

    /// Returns the details of the last exit, which must be KVM_EXIT_INTERNAL_ERROR.
    pub fn internal_exit(&mut self) -> InternalErrorExit {
        // SAFETY: this union member consists of integers, so every bit pattern is valid.
        let failure = unsafe { self.fd.raw_mut().get_kvm_run().__bindgen_anon_1.emulation_failure };
        let with_bytes = failure.suberror == KVM_INTERNAL_ERROR_EMULATION
            && failure.ndata >= DATA_WITH_BYTES
            && failure.flags & u64::from(KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES) != 0;
        if !with_bytes {
            return InternalErrorExit::new(failure.suberror, &[]);
        }
        // SAFETY: this union member consists of integers, and KVM's flag says that KVM has filled
        // it.
        let instruction = unsafe { failure.__bindgen_anon_1.__bindgen_anon_1 };
        let count = usize::from(instruction.insn_size).min(instruction.insn_bytes.len());
        InternalErrorExit::new(failure.suberror, &instruction.insn_bytes[..count])
    }

    /// Returns the registers that KVM stored at the last exit. The caller may change them for the
    /// next entry; see [`KickableVcpu::sync_at_entry`].
    #[inline]
    pub fn sync_regs_mut(&mut self) -> &mut kvm_sync_regs {
        self.fd.raw_mut().sync_regs_mut()
    }

    /// Selects whether KVM stores the registers of `set` at each exit.
    pub fn sync_at_exit(&mut self, set: SyncReg, on: bool) {
        if on {
            self.fd.raw_mut().set_sync_valid_reg(set);
        } else {
            self.fd.raw_mut().clear_sync_valid_reg(set);
        }
    }

    /// Selects whether KVM loads the registers of `set` from [`KickableVcpu::sync_regs_mut`] at the
    /// next entry.
    #[inline]
    pub fn sync_at_entry(&mut self, set: SyncReg, on: bool) {
        if on {
            self.fd.raw_mut().set_sync_dirty_reg(set);
        } else {
            self.fd.raw_mut().clear_sync_dirty_reg(set);
        }
    }
}

impl Deref for KickableVcpu {
    type Target = VcpuFd;

    #[inline]
    fn deref(&self) -> &VcpuFd {
        &self.fd
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kvm::vm_fd::VmFd;

    fn immediate_exit(vcpu: &mut VcpuFd) -> u8 {
        vcpu.raw_mut().get_kvm_run().immediate_exit
    }

    /// A signal kicks only an armed vCPU, and a cleared request has no effect.
    #[test]
    fn exit_request_reaches_only_armed_vcpu() {
        let Ok(kvm) = crate::kvm::host::open() else {
            eprintln!("SKIP: there is no KVM here");
            return;
        };
        let vm = VmFd::new(&kvm).unwrap();
        request_exit_of_current_vcpu();
        let mut first = KickableVcpu::new(vm.create_vcpu(0).unwrap());
        request_exit_of_current_vcpu();
        assert_eq!(immediate_exit(&mut first.fd), 1);
        first.clear_exit_request();
        assert_eq!(immediate_exit(&mut first.fd), 0);
        let mut second = KickableVcpu::new(vm.create_vcpu(1).unwrap());
        let mut first = first.disarm();
        request_exit_of_current_vcpu();
        assert_eq!(immediate_exit(&mut first), 0);
        assert_eq!(
            immediate_exit(&mut second.fd),
            1,
            "the other's end is not its own"
        );
        let mut second = second.disarm();
        second.raw_mut().get_kvm_run().immediate_exit = 0;
        request_exit_of_current_vcpu();
        assert_eq!(immediate_exit(&mut second), 0);
    }
}
