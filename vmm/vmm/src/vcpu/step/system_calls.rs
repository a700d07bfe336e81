//! Emulation of SYSCALL and SYSRET during stepping, so that the saved and loaded flags do not
//! contain the stepper's trap flag.

use vpmu::exact::{InstructionClass, SingleStepMeter, SingleStepOutcome, SteppedCpuState};

use super::debug::{EntryDebugState, GuestDebug};
use super::state::{UnreadableMemory, VcpuState};
use super::stepper::{CurrentStep, RFLAGS_RF, RFLAGS_TF, RedecodeReason, SingleStepError, Stepper, apply};
use crate::kvm::call::KvmIoctlError;
use crate::kvm::vcpu_fd::VcpuFd;
use guest_patching::linear_memory::LinearMemory;

/// EFER.SCE: enables SYSCALL and SYSRET.
const EFER_SCE: u64 = 1;
const IA32_STAR: u32 = 0xc000_0081;
const IA32_LSTAR: u32 = 0xc000_0082;
const IA32_FMASK: u32 = 0xc000_0084;
/// Flags that SYSRET loads from R11.
const SYSRET_FLAGS: u64 = 0x3c_7fd7;

impl Stepper {
    /// Emulates a SYSRET to 64-bit code. Some processors do not stop after SYSRET if the flags that
    /// it loads lack the trap flag. Returns `false` if SYSRET would fault.
    pub(super) fn emulate_sysret(&self, fd: &VcpuFd, mut state: VcpuState) -> Result<bool, SingleStepError> {
        let target = state.regs.rcx;
        let user_half = target >> 47 == 0;
        if !state.is_64bit() || state.sregs.efer & EFER_SCE == 0 || !user_half {
            return Ok(false);
        }
        let [star, ..] = system_call_registers(fd)?;
        let selector = (star >> 48) as u16;
        state.regs.rip = target;
        state.regs.rflags = state.regs.r11 & SYSRET_FLAGS & !RFLAGS_TF | 2;
        state.sregs.cs = flat_segment(selector.wrapping_add(16) | 3, 0xb, 3);
        state.sregs.ss = flat_segment(selector.wrapping_add(8) | 3, 3, 3);
        fd.set_sregs(&state.sregs)?;
        fd.set_regs(&state.regs)?;
        Ok(true)
    }

    /// Emulates and counts a SYSCALL of user code if only user code is counted. The instruction
    /// cannot be counted when the system call returns, because the kernel may switch to another
    /// task, for which counting is off, or end the task. The flags that the kernel saves contain
    /// the trap flag. Returns `None` if the processor must execute the SYSCALL.
    pub(super) fn emulate_user_syscall(
        &mut self,
        fd: &VcpuFd,
        debug: &mut GuestDebug,
        state: &VcpuState,
    ) -> Result<Option<SingleStepOutcome>, SingleStepError> {
        let events = fd.get_vcpu_events()?;
        let before_it = events.exception.injected | events.exception.pending | events.nmi.injected;
        if before_it | events.interrupt.injected != 0 {
            return Ok(None);
        }
        // KVM ties the trap flag to the current RIP, which the vCPU is about to leave.
        let want = EntryDebugState {
            step: true,
            ..EntryDebugState::default()
        };
        apply(fd, debug, want)?;
        self.strays = true;
        let mut traced = *state;
        traced.regs.rflags |= RFLAGS_TF;
        if !self.emulate_syscall(fd, traced)? {
            return Ok(None);
        }
        let called = state.cpu();
        let in_kernel = SteppedCpuState {
            rip: 0,
            cpl: 0,
            ..called
        };
        let step = self.meter.end(&in_kernel, &mut UnreadableMemory);
        self.tally.steps += 1;
        let mut behind = called;
        behind.rip = called.rip.wrapping_add(2);
        behind.gpr[1] = behind.rip;
        behind.gpr[11] = called.rflags;
        let ahead = self
            .meter
            .begin(&behind, &mut LinearMemory::new(&self.memory, state));
        self.present = Some(CurrentStep {
            initial_state: behind,
            class: ahead,
            after_kernel: Some(RedecodeReason::Called),
        });
        Ok(Some(step))
    }

    /// Emulates SYSCALL (SDM vol. 2B, APM vol. 3), which does not access memory in 64-bit mode.
    /// Sets the trap flag only in the flags that SYSCALL saves. Returns `false` if SYSCALL would
    /// fault.
    #[expect(clippy::cast_possible_truncation, reason = "bits 47:32")]
    pub(super) fn emulate_syscall(&self, fd: &VcpuFd, mut state: VcpuState) -> Result<bool, SingleStepError> {
        if !state.is_64bit() || state.sregs.efer & EFER_SCE == 0 {
            return Ok(false);
        }
        let [star, lstar, mask] = system_call_registers(fd)?;
        let flags = state.regs.rflags & !RFLAGS_RF;
        state.regs.rcx = state.regs.rip.wrapping_add(2);
        state.regs.r11 = flags;
        state.regs.rip = lstar;
        state.regs.rflags = flags & !mask & !RFLAGS_TF | 2;
        let selector = (star >> 32) as u16;
        state.sregs.cs = flat_segment(selector & 0xfffc, 0xb, 0);
        // SS is loaded from STAR including its lowest bits.
        state.sregs.ss = flat_segment(selector.wrapping_add(8), 3, 0);
        fd.set_sregs(&state.sregs)?;
        fd.set_regs(&state.regs)?;
        Ok(true)
    }
}

/// Ends the step `present`, which began in user code if `from_user` is set, with the vCPU in the
/// state `cpu`. If the guest's kernel ran before the instruction, the instruction is decoded again.
pub(super) fn end_step(
    meter: &mut SingleStepMeter,
    present: Option<&CurrentStep>,
    from_user: bool,
    cpu: &SteppedCpuState,
    memory: &mut LinearMemory<'_>,
) -> SingleStepOutcome {
    match present {
        Some(&CurrentStep {
            initial_state: mut before,
            after_kernel: Some(why),
            ..
        }) if cpu.cpl != 0 => {
            if why == RedecodeReason::Called {
                before.gpr[0] = cpu.gpr[0];
            }
            meter.begin(&before, memory);
            meter.end(cpu, memory)
        }
        Some(CurrentStep {
            initial_state: called,
            class: InstructionClass::SystemCall | InstructionClass::Interrupt(_),
            ..
        }) if from_user && cpu.cpl != 0 => end_system_call(meter, called, cpu, memory),
        _ => meter.end(cpu, memory),
    }
}

/// Accounts for the return to user code after SYSCALL or INT n. On return, the trap flag is loaded
/// together with the other flags. The vCPU therefore stops only after the instruction that follows
/// the system call, which is counted too.
fn end_system_call(
    meter: &mut SingleStepMeter,
    called: &SteppedCpuState,
    cpu: &SteppedCpuState,
    memory: &mut LinearMemory<'_>,
) -> SingleStepOutcome {
    let behind = meter.next_ip().unwrap_or(called.rip);
    let mut step = meter.end(
        &SteppedCpuState {
            rip: 0,
            cpl: 0,
            ..*cpu
        },
        &mut UnreadableMemory,
    );
    if cpu.rip != behind {
        let from = SteppedCpuState {
            rip: behind,
            rflags: cpu.rflags,
            ..*called
        };
        meter.begin(&from, memory);
        let next = meter.end(cpu, memory);
        if next.event || next.lost {
            step.lost = true;
        } else {
            step.user.add(next.user);
        }
    }
    step
}

/// Returns the values of IA32_STAR, IA32_LSTAR and IA32_FMASK.
fn system_call_registers(fd: &VcpuFd) -> Result<[u64; 3], SingleStepError> {
    let none = || KvmIoctlError::with_errno("KVM_GET_MSRS", libc::EINVAL);
    let entry = |index| kvm_bindings::kvm_msr_entry {
        index,
        ..Default::default()
    };
    let mut msrs =
        kvm_bindings::Msrs::from_entries(&[entry(IA32_STAR), entry(IA32_LSTAR), entry(IA32_FMASK)])
            .map_err(|_| none())?;
    match (fd.get_msrs(&mut msrs)?, msrs.as_slice()) {
        (3, [star, lstar, mask]) => Ok([star.data, lstar.data, mask.data]),
        _ => Err(none().into()),
    }
}

/// Returns the segment that SYSCALL and SYSRET load for 64-bit code (type 11) or data (type 3).
fn flat_segment(selector: u16, type_: u8, dpl: u8) -> kvm_bindings::kvm_segment {
    let l = u8::from(type_ == 0xb);
    kvm_bindings::kvm_segment {
        base: 0,
        limit: u32::MAX,
        selector,
        type_,
        present: 1,
        dpl,
        db: 1 - l,
        s: 1,
        l,
        g: 1,
        ..Default::default()
    }
}

#[cfg(test)]
mod tests {
    use kvm_bindings::{Msrs, kvm_msr_entry, kvm_regs, kvm_segment};
    use proptest::prelude::*;
    use vm_memory::{Bytes, GuestAddress};
    use vpmu::Vendor;

    use super::*;
    use crate::kvm::host::{self, Kvm};
    use crate::kvm::kickable_vcpu::{KickableVcpu, VcpuExit};
    use crate::kvm::stepping::SteppingSupport;
    use crate::kvm::tiny::{CODE, DATA, TinyGuest};

    /// Lowest linear address beyond guest memory. An access there exits to user space.
    const HOLE: u32 = 0x2_0000;
    const SYSCALL: [u8; 2] = [0x0f, 0x05];
    const SYSRET: [u8; 3] = [0x48, 0x0f, 0x07];
    /// Flags to which the tests give arbitrary values: the arithmetic flags, ID and IF.
    const ANY_FLAGS: u64 = 0x20_0ed5;

    /// Creates a vCPU that is about to execute `code`, with the given system call MSRs.
    fn guest(kvm: &Kvm, cpl: u8, code: &[u8], [star, lstar, mask]: [u64; 3]) -> TinyGuest {
        let guest = TinyGuest::new(kvm, cpl, code).unwrap();
        let mut sregs = guest.vcpu.get_sregs().unwrap();
        sregs.efer |= EFER_SCE;
        guest.vcpu.set_sregs(&sregs).unwrap();
        let entry = |(index, data)| kvm_msr_entry {
            index,
            data,
            ..Default::default()
        };
        let entries = [(IA32_STAR, star), (IA32_LSTAR, lstar), (IA32_FMASK, mask)].map(entry);
        assert_eq!(guest.vcpu.set_msrs(&Msrs::from_entries(&entries).unwrap()), Ok(3));
        guest
    }

    fn stepper(guest: &TinyGuest) -> Stepper {
        Stepper::new(
            Vendor::Intel,
            guest.memory.clone(),
            SteppingSupport::default(),
            true,
        )
    }

    /// Returns the fields of `segment` that guest code can observe.
    fn told(segment: &kvm_segment) -> [u64; 8] {
        let &kvm_segment {
            base,
            limit,
            selector,
            dpl,
            db,
            l,
            s,
            g,
            ..
        } = segment;
        [
            base,
            limit.into(),
            selector.into(),
            dpl.into(),
            db.into(),
            l.into(),
            s.into(),
            g.into(),
        ]
    }

    fn changes(state: &VcpuState) -> (kvm_regs, [[u64; 8]; 2]) {
        (state.regs, [told(&state.sregs.cs), told(&state.sregs.ss)])
    }

    /// Runs the guest until its next exit, so that the processor executes the instruction. Returns
    /// `None` if KVM emulates the code and does not support the instruction.
    fn by_the_processor(guest: TinyGuest) -> Option<(VcpuState, String)> {
        let (vcpu, _memory, _slots) = guest.into_parts();
        let mut vcpu = KickableVcpu::new(vcpu);
        let exit = match vcpu.run().exit {
            Ok(VcpuExit::IoOut(0x10, _)) => "leaves".into(),
            Ok(VcpuExit::MmioRead(at, _)) => format!("reads {at:#x}"),
            Ok(VcpuExit::InternalError) => return None,
            other => format!("{other:?}"),
        };
        Some((VcpuState::read(&vcpu).unwrap(), exit))
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        /// An emulated SYSCALL has the same effect as one that the processor executes, for any
        /// values of the MSRs. Compares RIP, flags, RCX, R11, CS and SS.
        #[test]
        fn emulated_syscall_matches_processor(flags: u64, mask: u64, selectors: u32, rax: u64, rsp: u64) {
            let Ok(kvm) = host::open() else { return Ok(()) };
            let registers = [u64::from(selectors) << 32, DATA, mask & 0xffff_ffff];
            let begin = || {
                let guest = guest(&kvm, 3, &SYSCALL, registers);
                // out 0x10, al
                guest.memory.write_slice(&[0xe6, 0x10], GuestAddress(DATA)).unwrap();
                let mut regs = guest.vcpu.get_regs().unwrap();
                (regs.rax, regs.rsp, regs.rflags) = (rax, rsp, flags & ANY_FLAGS | 2);
                guest.vcpu.set_regs(&regs).unwrap();
                guest
            };
            let ours = begin();
            let state = VcpuState::read(&ours.vcpu).unwrap();
            prop_assert!(stepper(&ours).emulate_syscall(&ours.vcpu, state).unwrap());
            let done = VcpuState::read(&ours.vcpu).unwrap();
            prop_assert_eq!((done.regs.rip, done.cpl()), (DATA, 0));
            let Some((mut theirs, exit)) = by_the_processor(begin()) else { return Ok(()) };
            prop_assert_eq!(exit, "leaves");
            // Some KVM versions advance RIP past the OUT before user space handles it.
            theirs.regs.rip -= if theirs.regs.rip == DATA + 2 { 2 } else { 0 };
            prop_assert_eq!(changes(&done), changes(&theirs));
        }

        /// An emulated SYSRET has the same effect as one that the processor executes, for any
        /// values of RCX and R11. Undefined flags and the trap flag are not loaded.
        #[test]
        fn emulated_sysret_matches_processor(flags: u64, selectors: u32, rax: u64) {
            let Ok(kvm) = host::open() else { return Ok(()) };
            let registers = [u64::from(selectors) << 32, 0, 0];
            let begin = || {
                let guest = guest(&kvm, 0, &SYSRET, registers);
                // mov al, [HOLE], at which the vCPU remains until the read is completed.
                let read = [&[0xa0][..], &u64::from(HOLE).to_le_bytes()].concat();
                guest.memory.write_slice(&read, GuestAddress(DATA)).unwrap();
                let mut regs = guest.vcpu.get_regs().unwrap();
                (regs.rax, regs.rcx, regs.r11) = (rax, DATA, flags & (ANY_FLAGS | RFLAGS_RF | 1 << 40));
                guest.vcpu.set_regs(&regs).unwrap();
                guest
            };
            let ours = begin();
            let state = VcpuState::read(&ours.vcpu).unwrap();
            prop_assert!(stepper(&ours).emulate_sysret(&ours.vcpu, state).unwrap());
            let done = VcpuState::read(&ours.vcpu).unwrap();
            prop_assert_eq!((done.regs.rip, done.cpl()), (DATA, 3));
            let Some((mut theirs, exit)) = by_the_processor(begin()) else { return Ok(()) };
            prop_assert_eq!(exit, format!("reads {HOLE:#x}"));
            // The read that exits has set RF in the saved state of the processor.
            theirs.regs.rflags &= !RFLAGS_RF;
            prop_assert_eq!(changes(&done), changes(&theirs));
        }
    }

    /// An emulated SYSCALL sets the trap flag only in the flags that it saves, so the flag is never
    /// set while the kernel runs. RF is not saved.
    #[test]
    fn syscall_sets_trap_flag_only_in_saved_flags() {
        let Ok(kvm) = host::open() else {
            eprintln!("SKIP: there is no KVM here");
            return;
        };
        let guest = guest(&kvm, 3, &SYSCALL, [0x10 << 32, DATA, 0]);
        let mut state = VcpuState::read(&guest.vcpu).unwrap();
        state.regs.rflags |= RFLAGS_TF | RFLAGS_RF;
        let mut stepper = stepper(&guest);
        assert!(stepper.emulate_syscall(&guest.vcpu, state).unwrap());
        let done = VcpuState::read(&guest.vcpu).unwrap();
        assert_eq!((done.regs.r11, done.regs.rflags), (2 | RFLAGS_TF, 2));
        assert_eq!((done.regs.rcx, done.regs.rip), (CODE + 2, DATA));
        assert!(!stepper.strays, "who traces says so");
        // A pending interrupt or exception is delivered first, by the processor.
        let mut events = guest.vcpu.get_vcpu_events().unwrap();
        (events.exception.injected, events.exception.nr) = (1, 13);
        guest.vcpu.set_vcpu_events(&events).unwrap();
        let mut debug = GuestDebug::default();
        let step = stepper
            .emulate_user_syscall(&guest.vcpu, &mut debug, &state)
            .unwrap();
        assert_eq!(step, None);
        assert_eq!(
            VcpuState::read(&guest.vcpu).unwrap().regs,
            done.regs,
            "nothing was done"
        );
    }

    /// An instruction that would fault is not emulated, and no register changes. Faults occur if
    /// system calls are disabled, the code is not 64-bit, or the return address is outside user
    /// space.
    #[test]
    fn faulting_system_call_is_not_emulated() {
        let Ok(kvm) = host::open() else {
            eprintln!("SKIP: there is no KVM here");
            return;
        };
        let guest = guest(&kvm, 0, &SYSRET, [0x10 << 32, DATA, 0]);
        let stepper = stepper(&guest);
        let right = VcpuState::read(&guest.vcpu).unwrap();
        type Change = fn(&mut VcpuState);
        let wrong: [(&str, Change); 4] = [
            ("switched off", |state| state.sregs.efer &= !EFER_SCE),
            ("32-bit code", |state| state.sregs.cs.l = 0),
            ("a kernel's address", |state| {
                state.regs.rcx = 0xffff_8000_0000_0000
            }),
            ("an address that is none", |state| state.regs.rcx = 1 << 47),
        ];
        for (n, (what, change)) in wrong.into_iter().enumerate() {
            let mut state = right;
            change(&mut state);
            assert!(!stepper.emulate_sysret(&guest.vcpu, state).unwrap(), "{what}");
            if n < 2 {
                assert!(!stepper.emulate_syscall(&guest.vcpu, state).unwrap(), "{what}");
            }
            let now = VcpuState::read(&guest.vcpu).unwrap();
            assert_eq!((now.regs, now.sregs), (right.regs, right.sregs), "{what}");
        }
        let mut last = right;
        last.regs.rcx = (1 << 47) - 1;
        assert!(
            stepper.emulate_sysret(&guest.vcpu, last).unwrap(),
            "the last one of user code"
        );
    }
}
