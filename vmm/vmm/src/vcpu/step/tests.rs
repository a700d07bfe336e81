//! Tests of a stepper with a KVM vCPU of this host, without the run loop. A program retires exactly
//! the events of its instructions, regardless of the exits in between.

use proptest::prelude::*;
use vm_memory::GuestAddress;
use vpmu::Vendor;
use vpmu::exact::RetiredCounts;

use super::*;
use crate::kvm::execution;
use crate::kvm::host;
use crate::kvm::kickable_vcpu::VcpuExit;
use crate::kvm::memslot::MemorySlots;
use crate::kvm::tiny::{CODE, DATA, TinyGuest};

mod straight;

const KERNEL: PrivilegeLevels = PrivilegeLevels {
    user: false,
    kernel: true,
};
const NOTHING: PrivilegeLevels = PrivilegeLevels {
    user: false,
    kernel: false,
};
const HLT: u8 = 0xf4;
/// Maximum number of iterations of the vCPU loop for one test program.
const MAX_ITERATIONS: usize = 20_000;

/// A code sequence and the events that it retires: instructions, branches, taken branches,
/// conditional branches, loads and stores.
type CodeSequence = (&'static [u8], [u32; 6]);

/// Code sequences from which test programs are composed. Memory accesses go to `DATA` (0x9000), or
/// to 0x2_0000, where there is no memory and an access exits.
const PIECES: [CodeSequence; 18] = [
    (&[0x90], [1, 0, 0, 0, 0, 0]),                                     // nop
    (&[0xb8, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0]),                         // mov eax, 1
    (&[0x50], [1, 0, 0, 0, 0, 1]),                                     // push rax
    (&[0x50, 0x58], [2, 0, 0, 0, 1, 1]),                               // push rax; pop rax
    (&[0xeb, 0], [1, 1, 1, 0, 0, 0]),                                  // jmp
    (&[0x31, 0xc0, 0x74, 0], [2, 1, 1, 1, 0, 0]),                      // xor eax, eax; jz
    (&[0x31, 0xc0, 0x75, 0], [2, 1, 0, 1, 0, 0]),                      // xor eax, eax; jnz
    (&[0xe8, 0, 0, 0, 0], [1, 1, 1, 0, 0, 1]),                         // call
    (&[0x88, 0x04, 0x25, 0, 0x90, 0, 0], [1, 0, 0, 0, 0, 1]),          // mov [DATA], al
    (&[0x8a, 0x04, 0x25, 0, 0x90, 0, 0], [1, 0, 0, 0, 1, 0]),          // mov al, [DATA]
    (&[0x00, 0x04, 0x25, 0, 0x90, 0, 0], [1, 0, 0, 0, 1, 1]),          // add [DATA], al
    (&[0x88, 0x04, 0x25, 0, 0, 2, 0], [1, 0, 0, 0, 0, 1]),             // mov [hole], al
    (&[0x8a, 0x04, 0x25, 0, 0, 2, 0], [1, 0, 0, 0, 1, 0]),             // mov al, [hole]
    (&[0xe6, 0x10], [1, 0, 0, 0, 0, 0]),                               // out 0x10, al
    (&[0xe4, 0x11], [1, 0, 0, 0, 0, 0]),                               // in al, 0x11
    (&[0x9c, 0x9d], [2, 0, 0, 0, 1, 1]),                               // pushf; popf
    (&[0x0f, 0xa2], [1, 0, 0, 0, 0, 0]),                               // cpuid
    (&[0xb9, 3, 0, 0, 0, 0xff, 0xc9, 0x75, 0xfc], [7, 3, 2, 3, 0, 0]), // mov ecx, 3; dec ecx; jnz
];

fn counts(
    [
        instructions,
        branches,
        taken_branches,
        conditional_branches,
        loads,
        stores,
    ]: [u32; 6],
) -> RetiredCounts {
    RetiredCounts {
        instructions,
        branches,
        taken_branches,
        conditional_branches,
        loads,
        stores,
    }
}

/// A vCPU at CPL 0 that is single-stepped without the run loop.
struct SteppedVcpu {
    vcpu: KickableVcpu,
    _slots: MemorySlots,
    memory: vm_memory::GuestMemoryMmap,
    stepper: Stepper,
    debug: GuestDebug,
    retired: RetiredCounts,
    /// Number of retired instructions after which a counter overflows.
    overflow: u32,
    /// RIP at the overflow of the counter; `None` before the overflow.
    overflowed_at: Option<u64>,
    /// Number of calls of KVM_RUN.
    entries: u64,
    /// `true` if the test expects steps or straight-line runs with an unknown outcome.
    may_lose: bool,
    /// I/O port or address of each exit that was handled.
    exits: Vec<u64>,
}

impl SteppedVcpu {
    fn new(code: &[u8]) -> Option<Self> {
        Self::with(code, true)
    }

    /// Creates the guest, or returns `None` if this KVM cannot single-step it. Uses straight-line
    /// runs if `runs` is set and this KVM supports them.
    fn with(code: &[u8], runs: bool) -> Option<Self> {
        let Ok(kvm) = host::open() else {
            eprintln!("SKIP: there is no KVM here");
            return None;
        };
        let mut host = execution::probe(&kvm).unwrap().stepping;
        host.breakpoints &= runs;
        if !host.kernel {
            eprintln!("SKIP: this KVM cannot step code at CPL 0");
            return None;
        }
        let (vcpu, memory, slots) = TinyGuest::new(&kvm, 0, code).unwrap().into_parts();
        let mut stepper = Stepper::new(Vendor::Intel, memory.clone(), host, true);
        if host::syncs_registers(&kvm) {
            stepper = stepper.with_synced_registers();
        }
        Some(Self {
            vcpu: KickableVcpu::new(vcpu),
            _slots: slots,
            stepper,
            memory,
            debug: GuestDebug::default(),
            retired: RetiredCounts::default(),
            overflow: u32::MAX,
            overflowed_at: None,
            entries: 0,
            may_lose: false,
            exits: Vec::new(),
        })
    }

    fn count(&mut self, step: SingleStepOutcome) {
        assert!(!step.lost || self.may_lose, "{step:?} after {:?}", self.exits);
        assert_eq!(step.user, RetiredCounts::default());
        self.retired.add(step.kernel);
        if self.retired.instructions >= self.overflow && self.overflowed_at.is_none() {
            assert_eq!(self.retired.instructions, self.overflow);
            self.overflowed_at = Some(self.vcpu.get_regs().unwrap().rip);
        }
    }

    fn prepare(&mut self, levels: PrivilegeLevels) -> VcpuStepAction {
        let left = self.overflow - self.retired.instructions.min(self.overflow);
        let room = || RetiredCounts {
            instructions: if left == 0 { u32::MAX } else { left },
            ..counts([u32::MAX; 6])
        };
        let (fd, debug) = (&mut self.vcpu, &mut self.debug);
        self.stepper.prepare(fd, debug, levels, &room).unwrap()
    }

    /// Returns `true` if straight-line runs are used.
    fn has_runs(&self) -> bool {
        if !self.stepper.has_runs {
            eprintln!("SKIP: this KVM has no hardware breakpoints at CPL 0, or does not emulate it");
        }
        self.stepper.has_runs
    }

    /// Runs the vCPU until it reaches `end` or halts.
    fn run(&mut self, levels: PrivilegeLevels, end: u64) {
        for _ in 0..MAX_ITERATIONS {
            if let Some(step) = self.stepper.settle(&self.vcpu).unwrap() {
                self.count(step);
            }
            if self.vcpu.get_regs().unwrap().rip == end || is_halted(&self.vcpu).unwrap() {
                return;
            }
            let prepared = self.prepare(levels);
            if let VcpuStepAction::Executed(step) = prepared {
                self.count(step);
                continue;
            }
            self.entries += 1;
            let why = self.vcpu.run().exit;
            self.stepper.after_run();
            match why {
                Ok(VcpuExit::Debug(stop)) => {
                    let step = self.stepper.handle_debug_exit(&mut self.vcpu, &stop).unwrap();
                    self.count(step.expect("a stop that is ours"));
                    if let Some(VcpuState { regs, sregs }) = self.stepper.cached_state {
                        let asked = VcpuState::read(&self.vcpu).unwrap();
                        assert_eq!(regs, asked.regs, "what came is what KVM gives when asked");
                        assert_eq!(sregs, asked.sregs);
                    }
                }
                Ok(VcpuExit::IoOut(port, _)) => self.exits.push(port.into()),
                Ok(VcpuExit::IoIn(port, data)) => {
                    data.fill(0);
                    self.exits.push(port.into());
                }
                Ok(VcpuExit::MmioWrite(at, _)) => self.exits.push(at),
                Ok(VcpuExit::MmioRead(at, data)) => {
                    data.fill(0);
                    self.exits.push(at);
                }
                Ok(VcpuExit::Hlt) => return,
                other => panic!("{other:?}"),
            }
        }
        panic!("no end after {MAX_ITERATIONS} turns");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Each instruction of a program is counted once and in its class, even if it exits to user
    /// space halfway. Tested with and without straight-line runs.
    #[test]
    fn program_retires_events_of_its_instructions(
        pieces in prop::collection::vec(prop::sample::select(&PIECES[..]), 0..30),
        runs: bool,
    ) {
        let mut code: Vec<u8> = pieces.iter().flat_map(|(code, _)| code.iter().copied()).collect();
        code.push(HLT);
        let Some(mut stepped) = SteppedVcpu::with(&code, runs) else { return Ok(()) };
        stepped.run(KERNEL, u64::MAX);
        let mut right = counts([1, 0, 0, 0, 0, 0]);
        for (_, retires) in &pieces {
            right.add(counts(*retires));
        }
        prop_assert_eq!(stepped.retired, right);
        prop_assert_eq!(stepped.stepper.tally().lost, 0);
        let leave = |code: &[u8]| match code {
            [0xe6, port] | [0xe4, port] => Some(u64::from(*port)),
            [0x88 | 0x8a, .., 2, 0] => Some(0x2_0000),
            _ => None,
        };
        let exits: Vec<u64> = pieces.iter().filter_map(|(code, _)| leave(code)).collect();
        prop_assert_eq!(&stepped.exits, &exits, "none is lost, none comes twice");
    }

    /// If counters are disabled and enabled again in the middle of a program, exactly the
    /// instructions in between are not counted.
    #[test]
    fn disabled_counting_excludes_instructions(
        parts in prop::collection::vec(prop::sample::select(&PIECES[..]), 3),
        first_counts: bool,
    ) {
        let mut ends = Vec::new();
        let mut code = Vec::new();
        for (part, _) in &parts {
            // Each part ends with a jump, so that no straight-line run extends beyond the part.
            code.extend_from_slice(part);
            code.extend_from_slice(&[0xeb, 0]);
            ends.push(CODE + code.len() as u64);
        }
        code.push(HLT);
        let Some(mut stepped) = SteppedVcpu::new(&code) else { return Ok(()) };
        let mut right = RetiredCounts::default();
        for (n, (end, (_, retires))) in ends.iter().zip(&parts).enumerate() {
            let is_counted = (n % 2 == 0) == first_counts;
            if is_counted {
                right.add(counts(*retires));
                right.add(counts([1, 1, 1, 0, 0, 0]));
                stepped.run(KERNEL, *end);
            } else {
                // The stepper does not handle breakpoints of other users, such as RDPMC.
                stepped.debug.set_sites(&[*end]);
                prop_assert_eq!(stepped.prepare(NOTHING), VcpuStepAction::Enter);
                loop {
                    let why = stepped.vcpu.run().exit;
                    match why {
                        Ok(VcpuExit::Debug(stop)) => {
                            let taken = stepped.stepper.handle_debug_exit(&mut stepped.vcpu, &stop).unwrap();
                            prop_assert_eq!(taken, None);
                            break;
                        }
                        Ok(VcpuExit::IoIn(_, data) | VcpuExit::MmioRead(_, data)) => data.fill(0),
                        Ok(VcpuExit::IoOut(..) | VcpuExit::MmioWrite(..)) => {}
                        other => panic!("{other:?}"),
                    }
                }
                stepped.debug.set_sites(&[]);
            }
        }
        prop_assert_eq!(stepped.retired, right);
    }
}

/// A guest that saves its flags never sees the trap flag of the stepper. A guest that sets the trap
/// flag itself keeps it.
#[test]
fn guest_never_sees_stepper_trap_flag() {
    // pushf; pop rbx; hlt
    let Some(mut stepped) = SteppedVcpu::new(&[0x9c, 0x5b, HLT]) else {
        return;
    };
    stepped.run(KERNEL, u64::MAX);
    let regs = stepped.vcpu.get_regs().unwrap();
    assert_eq!((regs.rbx, regs.rflags), (2, 2));
    let saved: u64 = stepped.memory.read_obj(GuestAddress(0x8000 - 8)).unwrap();
    assert_eq!(saved, 2);
}

/// A string instruction counts as one instruction, however often it exits.
#[test]
fn string_instruction_counts_once() {
    // mov esi, DATA; mov ecx, 4; mov edx, 0x10; rep outsb; hlt
    let mut code = vec![0xbe];
    code.extend_from_slice(&(DATA as u32).to_le_bytes());
    code.extend_from_slice(&[0xb9, 4, 0, 0, 0, 0xba, 0x10, 0, 0, 0, 0xf3, 0x6e, HLT]);
    let Some(mut stepped) = SteppedVcpu::new(&code) else {
        return;
    };
    stepped.run(KERNEL, u64::MAX);
    assert_eq!(stepped.retired.instructions, 5);
    assert!(stepped.exits.iter().all(|port| *port == 0x10) && !stepped.exits.is_empty());
    assert_eq!(stepped.vcpu.get_regs().unwrap().rcx, 0, "all of it was done");
}
