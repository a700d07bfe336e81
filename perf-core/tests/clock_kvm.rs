//! The `clock` driver around a real `KVM_RUN`. Needs /dev/kvm; passes without it, saying so.
#![allow(unsafe_code)]

mod common;

use std::sync::Arc;

use common::{burn, catch_signals, clock_attr, signals_of_this_thread, this_tid, thread_cpu_ns};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use perf_core::pmu::clock::{ClockPmu, GUEST_NS, VcpuClock};
use perf_core::pmu::{Pmu, Target, VcpuId};

const PAGE: usize = 4096;

/// A guest in real mode whose only instruction jumps to itself.
struct SpinningGuest {
    vcpu: VcpuFd,
    _vm: VmFd,
    _kvm: Kvm,
    memory: *mut libc::c_void,
}

impl SpinningGuest {
    fn new() -> Option<Self> {
        let kvm = Kvm::new().ok()?;
        let vm = kvm.create_vm().unwrap();
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
        // SAFETY: the page is mapped and writable, and the code is two bytes long.
        unsafe { memory.cast::<[u8; 2]>().write([0xeb, 0xfe]) };
        // SAFETY: the region is the page mapped above, which outlives the VM's use of it.
        unsafe {
            vm.set_user_memory_region(kvm_userspace_memory_region {
                slot: 0,
                guest_phys_addr: 0x1000,
                memory_size: PAGE as u64,
                userspace_addr: memory as u64,
                flags: 0,
            })
            .unwrap();
        }
        let vcpu = vm.create_vcpu(0).unwrap();
        let mut sregs = vcpu.get_sregs().unwrap();
        sregs.cs.base = 0;
        sregs.cs.selector = 0;
        vcpu.set_sregs(&sregs).unwrap();
        let mut regs = vcpu.get_regs().unwrap();
        regs.rip = 0x1000;
        regs.rflags = 2;
        vcpu.set_regs(&regs).unwrap();
        Some(Self {
            vcpu,
            _vm: vm,
            _kvm: kvm,
            memory,
        })
    }
}

impl Drop for SpinningGuest {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length; nothing runs the guest any more.
        unsafe { libc::munmap(self.memory, PAGE) };
    }
}

/// A guest that never exits by itself is taken out of `KVM_RUN` by each overflow, with EINTR, and the clock counts the
/// time it ran and not what the VMM used in between.
#[test]
fn overflows_take_a_spinning_guest_out_of_kvm_run() {
    let Some(mut guest) = SpinningGuest::new() else {
        eprintln!("skipped: no usable /dev/kvm");
        return;
    };
    let signal = catch_signals();
    let clock = Arc::new(VcpuClock::for_current_thread(2_000_000));
    let pmu = ClockPmu::new(Some(signal));
    pmu.add_vcpu(VcpuId(0), Arc::clone(&clock));
    let target = Target::Vcpu {
        vcpu: VcpuId(0),
        tid: this_tid(),
    };
    let mut ev = pmu.open(&clock_attr(GUEST_NS), target).unwrap();
    const PERIOD: u64 = 1_000_000;
    let mut due = PERIOD;
    let (mut outer, mut overflows) = (0, 0);
    ev.start(Some(PERIOD)).unwrap();
    while overflows < 10 {
        let (before, signals) = (thread_cpu_ns(), signals_of_this_thread());
        clock.guest_enter();
        let exit = guest.vcpu.run().map(|exit| format!("{exit:?}"));
        clock.guest_exit();
        outer += thread_cpu_ns() - before;
        match exit {
            Err(e) => assert_eq!(e.errno(), libc::EINTR),
            Ok(exit) => panic!("the guest left by {exit}"),
        }
        assert!(signals_of_this_thread() > signals, "EINTR with no signal");
        burn(200_000);
        if ev.take_overflows() == 1 {
            assert!(ev.read() >= due);
            due = ev.read() + PERIOD;
            ev.arm(PERIOD).unwrap();
            overflows += 1;
        }
    }
    let counted = ev.read();
    assert!(counted >= 10 * PERIOD);
    assert!(counted <= outer, "{counted} ns counted, {outer} ns run");
}
