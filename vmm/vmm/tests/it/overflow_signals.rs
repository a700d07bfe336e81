//! Tests that overflow signals end KVM_RUN exactly once and without loss in both delivery modes:
//! handled by a signal handler, and held, which means blocked except during KVM_RUN.
#![expect(unsafe_code, reason = "signals to a thread")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use test_support::skip;
use vm_memory::{Bytes, GuestAddress};
use vmm::kvm::host;
use vmm::kvm::kickable_vcpu::KickableVcpu;
use vmm::kvm::memslot::MemorySlots;
use vmm::kvm::vm_fd::VmFd;
use vmm::memory::GuestRam;
use vmm::pmu::overflow_signal;
use vmm::vcpu::kick::{OverflowSignalDelivery, install_handlers, kick_signal, take_overflow};

const CODE: u64 = 0x1000;
const COUNTER: u64 = 0x2000;
/// Real-mode code: `inc dword [0x2000]` and a jump back to it, forever.
const LOOP: [u8; 7] = [0x66, 0xff, 0x06, 0x00, 0x20, 0xeb, 0xf9];

/// A vCPU that counts the iterations of an endless loop, run by this thread.
struct LoopingVcpu {
    vcpu: KickableVcpu,
    signals: OverflowSignalDelivery,
    ram: GuestRam,
    _slots: MemorySlots,
}

impl LoopingVcpu {
    fn new() -> Option<Self> {
        let Ok(kvm) = host::open() else {
            skip::skipped("no usable /dev/kvm here", false);
            return None;
        };
        install_handlers().unwrap();
        let ram = GuestRam::new(32 << 20).unwrap();
        ram.memory().write_slice(&LOOP, GuestAddress(CODE)).unwrap();
        let vm = Arc::new(VmFd::new(&kvm).unwrap());
        let slots = ram.register(&vm).unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        let mut sregs = vcpu.get_sregs().unwrap();
        (sregs.cs.base, sregs.cs.selector) = (0, 0);
        vcpu.set_sregs(&sregs).unwrap();
        let mut regs = vcpu.get_regs().unwrap();
        (regs.rip, regs.rflags) = (CODE, 2);
        vcpu.set_regs(&regs).unwrap();
        Some(Self {
            vcpu: KickableVcpu::new(vcpu),
            signals: OverflowSignalDelivery::default(),
            ram,
            _slots: slots,
        })
    }

    /// Performs the signal checks of the run loop before an entry. Returns `true` if an overflow
    /// was signaled.
    fn look(&mut self) -> bool {
        self.vcpu.clear_exit_request();
        let announced = take_overflow();
        self.signals.before_entry(&self.vcpu, announced);
        announced
    }

    /// Enters the guest until a signal ends KVM_RUN. Returns `true` if the guest executed code.
    fn enter(&mut self) -> bool {
        let turns = |ram: &GuestRam| -> u32 { ram.memory().read_obj(GuestAddress(COUNTER)).unwrap() };
        let before = turns(&self.ram);
        let ended = self.vcpu.run().exit.map(|exit| format!("{exit:?}"));
        assert_eq!(ended.map_err(|e| e.errno()), Err(libc::EINTR));
        self.signals.after_exit(true);
        turns(&self.ram) != before
    }

    /// Enters the guest and sends `signal` once the guest is running.
    fn enter_until(&mut self, signal: i32) {
        let memory = self.ram.memory().clone();
        let turns = move || -> u32 { memory.read_obj(GuestAddress(COUNTER)).unwrap() };
        let before = turns();
        // SAFETY: `pthread_self` has no arguments and cannot fail.
        let thread = unsafe { libc::pthread_self() };
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let began = Instant::now();
                // The time limit prevents a hang if the guest never runs: the signal ends KVM_RUN,
                // and the assertion below fails.
                while turns() == before && began.elapsed() < Duration::from_secs(300) {
                    std::thread::sleep(Duration::from_millis(1));
                }
                // SAFETY: the thread lives until this scope ends, and the signal has a handler.
                assert_eq!(unsafe { libc::pthread_kill(thread, signal) }, 0);
            });
            assert!(self.enter(), "the guest ran, and the signal took it out");
        });
    }

    /// Sends overflow signals in quick succession, which makes the vCPU switch them to held mode.
    fn hold(&mut self) {
        for _ in 0..2 {
            raise(overflow_signal());
            assert!(self.look(), "it was handled");
            self.signals.after_exit(false);
        }
        raise(overflow_signal());
        assert!(!take_overflow(), "it is held");
        assert!(!self.enter());
        assert!(self.look());
    }
}

fn raise(signal: i32) {
    // SAFETY: the signal has a handler.
    assert_eq!(unsafe { libc::raise(signal) }, 0);
}

/// A signal that arrives between the check for signals and KVM_RUN is not lost: KVM_RUN returns
/// before the guest executes anything.
#[test]
fn handled_signal_after_check_ends_kvm_run() {
    let Some(mut guest) = LoopingVcpu::new() else {
        return;
    };
    assert!(!guest.look());
    raise(overflow_signal());
    assert!(!guest.enter());
    assert!(guest.look());
    assert!(!guest.look());
}

#[test]
fn held_signal_ends_kvm_run_once() {
    let Some(mut guest) = LoopingVcpu::new() else {
        return;
    };
    guest.hold();
    for _ in 0..3 {
        raise(overflow_signal());
        assert!(!guest.look(), "nobody has fetched it yet");
        assert!(!guest.enter(), "it came before the entry");
        assert!(guest.look());
        assert!(!guest.look());
        guest.enter_until(overflow_signal());
        assert!(guest.look());
        assert!(!guest.look());
    }
}

/// A kick ends KVM_RUN while overflow signals are in held mode, and is not mistaken for an
/// overflow.
#[test]
fn kick_ends_kvm_run_while_overflow_is_held() {
    let Some(mut guest) = LoopingVcpu::new() else {
        return;
    };
    guest.hold();
    guest.enter_until(kick_signal());
    assert!(!guest.look());
    raise(kick_signal());
    assert!(!guest.enter(), "immediate_exit was set");
    assert!(!guest.look());
}

/// An overflow signal that is pending when the mode changes from held to handled is neither lost
/// nor delayed.
#[test]
fn overflow_signals_return_to_handled_mode() {
    let Some(mut guest) = LoopingVcpu::new() else {
        return;
    };
    guest.hold();
    raise(overflow_signal());
    for exit in 0..33 {
        guest.signals.after_exit(false);
        assert!(!guest.look(), "exit {exit}");
    }
    assert!(!guest.enter(), "its handler has set immediate_exit");
    assert!(guest.look());
    raise(overflow_signal());
    assert!(take_overflow(), "handled");
}
