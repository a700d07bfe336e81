//! A vCPU on the thread that runs it: what a signal handler may write into its `kvm_run` page, and who owns
//! the descriptor meanwhile.
//!
//! A signal makes a vCPU leave KVM_RUN by writing to `kvm_run.immediate_exit`. The handler finds the page
//! through a variable of its thread. So the page must be there as long as that variable names it:
//! [`ArmedVcpu`] owns the descriptor, which owns the page, and cannot leave the thread.
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

use super::call::CallError;
use super::vcpu_fd::VcpuFd;

thread_local! {
    /// The `kvm_run` page of the vCPU this thread runs; null while it runs none.
    static PAGE: Cell<*mut kvm_run> = const { Cell::new(ptr::null_mut()) };
}

/// Makes the vCPU that this thread runs leave KVM_RUN, or not enter it; does nothing if the thread runs none.
/// Async-signal-safe: it touches one const-initialised thread-local without a destructor and one byte of
/// shared memory.
pub fn request_exit_of_this_thread() {
    let page = PAGE.get();
    if !page.is_null() {
        write_immediate_exit(page, 1);
    }
}

/// `page` is that of an [`ArmedVcpu`] of this thread.
fn write_immediate_exit(page: *mut kvm_run, value: u8) {
    // SAFETY: `Armed` alone hands out pages. It lives in an `ArmedVcpu` whose descriptor owns the mapping and
    // is dropped after it, and dropping `Armed` clears `PAGE`. Neither leaves this thread: `Armed` holds a
    // raw pointer and so is not `Send`. Volatile, because the kernel reads the byte and a handler writes it.
    unsafe { (&raw mut (*page).immediate_exit).write_volatile(value) };
}

/// `PAGE` is set as long as this lives.
#[derive(Debug)]
struct Armed(*mut kvm_run);

impl Drop for Armed {
    fn drop(&mut self) {
        if PAGE.get() == self.0 {
            PAGE.set(ptr::null_mut());
        }
    }
}

/// Words of an internal error's data that there are when it has the instruction's bytes: the flags, and two
/// of size and bytes (Documentation/virt/kvm/api.rst, `KVM_EXIT_INTERNAL_ERROR`).
const DATA_WITH_BYTES: u32 = 3;
/// The longest instruction, in bytes.
const MOST_INSTRUCTION_BYTES: usize = 15;

/// An internal error of KVM's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InternalExit {
    /// Which (`KVM_INTERNAL_ERROR_*`).
    pub suberror: u32,
    bytes: [u8; MOST_INSTRUCTION_BYTES],
    count: usize,
}

impl InternalExit {
    /// `bytes`: those at the instruction that it cannot emulate; those behind the first 15 are left out.
    #[must_use]
    pub fn new(suberror: u32, bytes: &[u8]) -> Self {
        let count = bytes.len().min(MOST_INSTRUCTION_BYTES);
        let mut kept = [0; MOST_INSTRUCTION_BYTES];
        kept[..count].copy_from_slice(&bytes[..count]);
        Self {
            suberror,
            bytes: kept,
            count,
        }
    }

    /// The bytes at the instruction, as far as KVM tells them.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.count]
    }
}

/// Why KVM_RUN returned.
#[derive(Debug)]
pub struct Exit<'v> {
    /// What it returned.
    pub why: Result<VcpuExit<'v>, CallError>,
    /// At an exit for port I/O, bytes of one access: string instructions exit with several accesses in one
    /// buffer.
    pub io_width: usize,
}

/// A vCPU on the thread that runs it: signals to this thread make it leave KVM_RUN. At most one for a thread;
/// of several, the one made last.
///
/// What only reads and writes KVM's state goes through [`Deref`]. There is no `DerefMut`: who could exchange
/// the descriptor could end the page under the handler.
#[derive(Debug)]
pub struct ArmedVcpu {
    // Field order is drop order: no signal finds the page of a descriptor that is gone.
    armed: Armed,
    fd: VcpuFd,
}

impl ArmedVcpu {
    /// Arms the current thread for `fd`.
    pub fn new(mut fd: VcpuFd) -> Self {
        let page: *mut kvm_run = fd.raw_mut().get_kvm_run();
        PAGE.set(page);
        let armed = Armed(page);
        Self { armed, fd }
    }

    /// Signals do not reach it any more.
    pub fn disarm(self) -> VcpuFd {
        let Self { armed, fd } = self;
        drop(armed);
        fd
    }

    /// Clears the request to leave; to be called before looking at what a signal may have announced.
    #[inline]
    pub fn clear_exit_request(&mut self) {
        write_immediate_exit(self.armed.0, 0);
        // The handler runs on this thread, so program order is all that is needed.
        compiler_fence(Ordering::SeqCst);
    }

    /// Makes the next KVM_RUN end at once, after it has completed what the last exit left undone.
    pub fn request_exit(&mut self) {
        write_immediate_exit(self.armed.0, 1);
    }

    /// KVM_RUN.
    #[inline]
    pub fn run(&mut self) -> Exit<'_> {
        let page = self.armed.0;
        let why = self.fd.raw_mut().run().map_err(CallError::of("KVM_RUN"));
        // SAFETY: the mapping is as long-lived as `self.fd`, see `write_immediate_exit`. Every bit pattern of
        // the union is a valid `io`, which is plain integers, and `why` borrows data of the exit, never this
        // byte.
        let io_width = unsafe { (&raw const (*page).__bindgen_anon_1.io.size).read() };
        Exit {
            why,
            io_width: io_width.into(),
        }
    }

    /// Makes KVM complete what the last exit left undone, a port write that is being handled, and go no
    /// further. KVM steps over the OUT when it is entered again, unless the vCPU has gone elsewhere. The
    /// request to leave stays with the next entry until it is cleared.
    ///
    /// # Errors
    /// KVM's, which no guest can cause.
    pub fn complete_exit(&mut self) -> Result<(), CallError> {
        self.request_exit();
        match self.fd.raw_mut().run() {
            Err(e) if e.errno() == libc::EINTR => {}
            Err(e) => return Err(CallError::of("KVM_RUN")(e)),
            Ok(exit) => log::debug!("unexpected exit while completing another: {exit:?}"),
        }
        Ok(())
    }

    /// IA32_APIC_BASE at the last exit.
    pub fn apic_base(&mut self) -> u64 {
        self.fd.raw_mut().get_kvm_run().apic_base
    }

    /// As if the last exit had come with this IA32_APIC_BASE.
    #[cfg(test)]
    pub fn set_apic_base(&mut self, apic_base: u64) {
        self.fd.raw_mut().get_kvm_run().apic_base = apic_base;
    }

    /// What KVM said at the last exit, if that was for an internal error of its own.
    pub fn internal_exit(&mut self) -> InternalExit {
        // SAFETY: any bytes are a value of this member, which is made of integers.
        let failure = unsafe { self.fd.raw_mut().get_kvm_run().__bindgen_anon_1.emulation_failure };
        let with_bytes = failure.suberror == KVM_INTERNAL_ERROR_EMULATION
            && failure.ndata >= DATA_WITH_BYTES
            && failure.flags & u64::from(KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES) != 0;
        if !with_bytes {
            return InternalExit::new(failure.suberror, &[]);
        }
        // SAFETY: as before, and KVM says that it has filled it.
        let instruction = unsafe { failure.__bindgen_anon_1.__bindgen_anon_1 };
        let count = usize::from(instruction.insn_size).min(instruction.insn_bytes.len());
        InternalExit::new(failure.suberror, &instruction.insn_bytes[..count])
    }

    /// The registers that came with the last exit, and those that go with the next entry.
    #[inline]
    pub fn sync_regs_mut(&mut self) -> &mut kvm_sync_regs {
        self.fd.raw_mut().sync_regs_mut()
    }

    /// `set` comes with each exit, or does not.
    pub fn sync_at_exit(&mut self, set: SyncReg, on: bool) {
        if on {
            self.fd.raw_mut().set_sync_valid_reg(set);
        } else {
            self.fd.raw_mut().clear_sync_valid_reg(set);
        }
    }

    /// The next entry takes `set` from [`ArmedVcpu::sync_regs_mut`], or does not.
    #[inline]
    pub fn sync_at_entry(&mut self, set: SyncReg, on: bool) {
        if on {
            self.fd.raw_mut().set_sync_dirty_reg(set);
        } else {
            self.fd.raw_mut().clear_sync_dirty_reg(set);
        }
    }
}

impl Deref for ArmedVcpu {
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

    /// A request reaches the vCPU of this thread while it is armed, and none that has been taken back.
    #[test]
    fn a_request_to_leave_reaches_the_armed_vcpu_only() {
        let Ok(kvm) = crate::kvm::host::open() else {
            eprintln!("SKIP: there is no KVM here");
            return;
        };
        let vm = VmFd::new(&kvm).unwrap();
        request_exit_of_this_thread();
        let mut first = ArmedVcpu::new(vm.create_vcpu(0).unwrap());
        request_exit_of_this_thread();
        assert_eq!(immediate_exit(&mut first.fd), 1);
        first.clear_exit_request();
        assert_eq!(immediate_exit(&mut first.fd), 0);
        let mut second = ArmedVcpu::new(vm.create_vcpu(1).unwrap());
        let mut first = first.disarm();
        request_exit_of_this_thread();
        assert_eq!(immediate_exit(&mut first), 0);
        assert_eq!(
            immediate_exit(&mut second.fd),
            1,
            "the other's end is not its own"
        );
        let mut second = second.disarm();
        second.raw_mut().get_kvm_run().immediate_exit = 0;
        request_exit_of_this_thread();
        assert_eq!(immediate_exit(&mut second), 0);
    }
}
