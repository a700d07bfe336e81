//! Exact counting by single-stepping: determines which instructions each step of a vCPU retires.
//!
//! The VMM passes the vCPU state before and after each step to a [`SingleStepMeter`]. The meter
//! decodes the instruction, predicts the address of the next instruction, and compares the
//! prediction with the actual state to determine the retired instructions. The counting rules are:
//!
//! - An instruction counts when it completes (Intel SDM vol. 3, "Instructions Retired": the last
//!   micro-operation retires), at the privilege level at which it started. A faulting instruction
//!   does not count until it is re-executed and completes. Traps and software interrupts (INT n,
//!   INT3, INTO) complete, so they count.
//! - An interrupt, NMI or exception is not an instruction. Instructions of its handler count
//!   normally.
//! - A repeated string instruction is one instruction for any number of iterations, including zero.
//!   An interrupt between two iterations does not split it.
//! - An instruction with an interrupt shadow (MOV SS, POP SS; fences and SWAPGS if KVM emulates
//!   them) is stepped together with its successor, and with further successors if those also have a
//!   shadow.
//! - HLT counts when it halts. SYSCALL, SYSRET, SYSENTER, SYSEXIT and IRET count one each.
//! - The WRMSR that enables counting is counted, and the WRMSR that disables counting is not,
//!   because the counts of a step are added after the write took effect. The VMM only has to add
//!   them ([`SingleStepOutcome::feed`]) after [`crate::Vpmu::reconcile`].
//! - A branch is any instruction that can set RIP to an address other than that of the next
//!   instruction in memory: conditional or unconditional, direct or indirect, near or far, calls,
//!   returns, software interrupts, SYSCALL and similar instructions, and IRET. Taken branches on an
//!   Intel model are taken near branches (BR_INST_RETIRED.NEAR_TAKEN). On an AMD model, far
//!   branches are included, and interrupts and exceptions count as branches and as taken branches
//!   (PPR, PMCx0C2 and PMCx0C4: "all types of architectural control flow changes").
//! - Loads and stores are *instructions* that read or write memory at least once, including the
//!   stack and excluding address computation (LEA), prefetches and multi-byte NOPs. A repeated
//!   string instruction with zero iterations is neither a load nor a store.
//!
//! # Use
//!
//! Before each entry and after [`crate::Vpmu::reconcile`], if
//! [`crate::PerfCoreEvents::needs_stepping`] returns `true`, enable single-stepping and, unless
//! [`SingleStepMeter::in_step`] returns `true`, call [`SingleStepMeter::begin`]. Otherwise disable
//! single-stepping and call [`SingleStepMeter::abandon`]. On a debug exit, call
//! [`SingleStepMeter::end`] and [`SingleStepOutcome::feed`]. Other exits (I/O, MSR) occur in the
//! middle of an instruction. Handle them and re-enter, and the step continues. The WRMSR that
//! enables counting exits first, so its step begins after the write took effect, and the
//! instruction counts when it completes.
//!
//! The processor clears the trap flag when it enters a handler or the kernel, and exposes the flag
//! to a guest that saves its flags. [`SingleStepMeter::begin`] reports an instruction that causes
//! this, so that the VMM can set a breakpoint where the step would otherwise be lost. If the vCPU
//! stops before or after the first instruction of a handler, the meter recognizes the handler from
//! the guest's interrupt descriptor table. If the vCPU stops later in a handler, this is reported
//! as [`SingleStepOutcome::lost`].

mod cpu;
mod flow;
mod run;

use iced_x86::{FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, Register};
use perf_core::branch::{BranchEntry, BranchKind};
use perf_core::pmu::vmm_pmu::VmmPmuCounts;

use crate::events::ArchEvent;
use crate::model_name::Vendor;
use crate::vmm_counts;

pub use cpu::{
    CodeSegmentMode, IdtGateFormat, InstructionClass, SteppedCpuState, SteppedGuestMemory, gate_in_table,
};
pub use run::{MAX_RUN_BYTES, MAX_RUN_INSTRUCTIONS, StraightLineCode};

use flow::{
    NextAddress, branch_kind, classify, decode, element_count, is_branch, is_near, is_repeated, next_address,
    software_interrupt,
};

/// Maximum number of consecutive instructions with an interrupt shadow in one step. KVM's emulation
/// of these instructions costs more than decoding them.
const MAX_SHADOWS: usize = 4096;

/// Numbers of instructions, branches, loads and stores that a vCPU has retired at one privilege
/// level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetiredCounts {
    /// Number of instructions retired.
    pub instructions: u32,
    /// Number of branch instructions retired.
    pub branches: u32,
    /// Number of branch instructions retired that were taken.
    pub taken_branches: u32,
    /// Number of conditional branch instructions retired, taken or not.
    pub conditional_branches: u32,
    /// Number of instructions retired that load from memory.
    pub loads: u32,
    /// Number of instructions retired that store to memory.
    pub stores: u32,
}

impl RetiredCounts {
    /// Returns the count for an event, or `None` if the exact backing does not count the event.
    pub const fn of(&self, event: ArchEvent) -> Option<u32> {
        match event {
            ArchEvent::Instructions | ArchEvent::CoreCycles | ArchEvent::RefCycles | ArchEvent::BusCycles => {
                Some(self.instructions)
            }
            ArchEvent::Branches => Some(self.branches),
            ArchEvent::TakenBranches => Some(self.taken_branches),
            ArchEvent::ConditionalBranches => Some(self.conditional_branches),
            // Instructions are decoded one by one, so nothing depends on a speculative lock map.
            ArchEvent::SpeculativeLocks => Some(0),
            ArchEvent::Loads => Some(self.loads),
            ArchEvent::Stores => Some(self.stores),
            _ => None,
        }
    }

    /// Returns, for each event, the number of further counts until the event's armed overflow at
    /// privilege level `cpl`. The number is 0 if the overflow is already due, and [`u32::MAX`] if
    /// no overflow is armed.
    pub fn remaining(counts: &VmmPmuCounts, cpl: u8) -> Self {
        let [
            instructions,
            branches,
            taken_branches,
            conditional_branches,
            loads,
            stores,
        ] = [
            ArchEvent::Instructions,
            ArchEvent::Branches,
            ArchEvent::TakenBranches,
            ArchEvent::ConditionalBranches,
            ArchEvent::Loads,
            ArchEvent::Stores,
        ]
        .map(|event| {
            let left =
                vmm_counts::exact_selector(event).and_then(|selector| counts.until_overflow(selector, cpl));
            left.map_or(u32::MAX, |left| u32::try_from(left).unwrap_or(u32::MAX))
        });
        Self {
            instructions,
            branches,
            taken_branches,
            conditional_branches,
            loads,
            stores,
        }
    }

    /// Adds each count of `other` to the same count of this value.
    pub const fn add(&mut self, other: Self) {
        self.instructions += other.instructions;
        self.branches += other.branches;
        self.taken_branches += other.taken_branches;
        self.conditional_branches += other.conditional_branches;
        self.loads += other.loads;
        self.stores += other.stores;
    }
}

/// Result of one single step of a vCPU: what it retired, and what else happened during the step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SingleStepOutcome {
    /// Counts retired at CPL 1 to 3.
    pub user: RetiredCounts,
    /// Counts retired at CPL 0.
    pub kernel: RetiredCounts,
    /// `true` if an interrupt, NMI or exception was delivered to the vCPU during the step.
    pub event: bool,
    /// `true` if the step could not be analyzed, because the code was unreadable or the vCPU
    /// stopped at an unexpected address. The unknown part of the step is not counted.
    pub lost: bool,
}

impl SingleStepOutcome {
    /// Adds the retired counts to `counts`, the counts that the VMM supplies for the vCPU's events.
    /// Returns whether this caused an armed overflow.
    pub fn feed(&self, counts: &VmmPmuCounts) -> bool {
        let mut overflow = false;
        for (level, cpl) in [(&self.user, 3), (&self.kernel, 0)] {
            if *level == RetiredCounts::default() {
                continue;
            }
            for (selector, event) in vmm_counts::EXACT.into_iter().enumerate() {
                match level.of(event) {
                    Some(n) if n > 0 => overflow |= counts.add(selector, cpl, u64::from(n)),
                    _ => {}
                }
            }
        }
        overflow
    }

    fn at(&mut self, cpl: u8) -> &mut RetiredCounts {
        if cpl == 0 {
            &mut self.kernel
        } else {
            &mut self.user
        }
    }
}

/// Types of memory accesses that an instruction makes.
#[derive(Clone, Copy, Debug, Default)]
struct Accesses {
    loads: bool,
    stores: bool,
    /// `true` if the instruction accesses memory through the stack segment.
    stack: bool,
}

#[derive(Clone, Copy, Debug)]
struct PendingStep {
    before: SteppedCpuState,
    /// Decoded instruction, or `None` if its bytes could not be read.
    instruction: Option<Instruction>,
    next_address: NextAddress,
    /// `true` for a repeated string instruction of which iterations were executed before this step.
    iterated: bool,
}

/// Counter of the instructions that each step of one vCPU retires.
#[derive(Debug)]
pub struct SingleStepMeter {
    vendor: Vendor,
    info: InstructionInfoFactory,
    pending: Option<PendingStep>,
    /// Address and privilege level of a repeated string instruction that an earlier step has
    /// executed partially.
    unfinished: Option<(u64, u8)>,
    /// Branches taken since the last [`SingleStepMeter::take_branches`]; `None` if they are not
    /// recorded.
    branches: Option<Vec<BranchEntry>>,
}

impl SingleStepMeter {
    /// Creates a step meter for a PMU model of `vendor`.
    pub fn new(vendor: Vendor) -> Self {
        Self {
            vendor,
            info: InstructionInfoFactory::new(),
            pending: None,
            unfinished: None,
            branches: None,
        }
    }

    /// Starts or stops recording taken branches. An interrupt or exception is recorded as a branch
    /// from the interrupted instruction to its handler.
    pub fn set_branch_recording(&mut self, on: bool) {
        self.branches = on.then(Vec::new);
    }

    /// Removes and returns the recorded branches, oldest first.
    pub fn take_branches(&mut self) -> impl Iterator<Item = BranchEntry> + '_ {
        self.branches.iter_mut().flat_map(|branches| branches.drain(..))
    }

    fn record_branch(&mut self, from: &SteppedCpuState, to: &SteppedCpuState, kind: BranchKind) {
        if let Some(branches) = &mut self.branches {
            branches.push(BranchEntry {
                from: from.rip,
                to: to.rip,
                kind,
                from_user: from.cpl != 0,
                to_user: to.cpl != 0,
            });
        }
    }

    /// Returns whether a step is in progress. An exit in the middle of an instruction (I/O, MSR)
    /// does not end the step.
    pub fn in_step(&self) -> bool {
        self.pending.is_some()
    }

    /// Returns the address at which execution continues when the current instruction completes,
    /// such as the target of a taken branch. Returns `None` if no step is in progress or the
    /// address is unknown.
    pub fn known_target(&self) -> Option<u64> {
        match self.pending?.next_address {
            NextAddress::To(target, _) => Some(target),
            NextAddress::Unpredictable => None,
        }
    }

    /// Returns the address of the byte after the current instruction, whether or not the
    /// instruction is a branch. Returns `None` if no step is in progress or the current instruction
    /// could not be read.
    pub fn next_ip(&self) -> Option<u64> {
        Some(self.pending.as_ref()?.instruction?.next_ip())
    }

    /// Abandons the current step because stepping is disabled or the vCPU state was replaced.
    pub fn abandon(&mut self) {
        self.pending = None;
    }

    /// Returns the address and the privilege level of the repeated string instruction that a vCPU
    /// in the state `cpu` has executed partially. Returns `None` if there is no such instruction.
    /// Used for a snapshot.
    pub fn unfinished_at(&self, cpu: &SteppedCpuState) -> Option<(u64, u8)> {
        let here = (cpu.rip, cpu.cpl);
        let iterated_in_step = self.pending.as_ref().is_some_and(|pending| {
            let before = &pending.before;
            pending.instruction.is_some_and(|instruction| {
                (before.rip, before.cpl) == here
                    && is_repeated(&instruction)
                    && element_count(&instruction, before) != element_count(&instruction, cpu)
            })
        });
        if iterated_in_step {
            return Some(here);
        }
        self.unfinished
    }

    /// Restores the unfinished instruction of [`SingleStepMeter::unfinished_at`].
    pub fn restore_unfinished(&mut self, unfinished: Option<(u64, u8)>) {
        self.unfinished = unfinished;
    }

    /// Begins a step of a vCPU that has the state `cpu`.
    pub fn begin(&mut self, cpu: &SteppedCpuState, memory: &mut dyn SteppedGuestMemory) -> InstructionClass {
        let instruction = decode(cpu, cpu.rip, memory);
        let iterated = self.unfinished == Some((cpu.rip, cpu.cpl));
        let next_address = instruction
            .as_ref()
            .map_or(NextAddress::Unpredictable, |i| next_address(i, cpu, memory));
        self.pending = Some(PendingStep {
            before: *cpu,
            instruction,
            next_address,
            iterated,
        });
        instruction
            .as_ref()
            .map_or(InstructionClass::Unreadable, classify)
    }

    /// Ends the step in progress, after which the vCPU has the state `cpu`. Returns what the vCPU
    /// retired in the step, or no counts if no step was in progress.
    pub fn end(&mut self, cpu: &SteppedCpuState, memory: &mut dyn SteppedGuestMemory) -> SingleStepOutcome {
        let mut step = SingleStepOutcome::default();
        let Some(pending) = self.pending.take() else {
            return step;
        };
        let before = &pending.before;
        let Some(instruction) = pending.instruction else {
            // An unreadable instruction cannot execute, so it faulted.
            self.enter_handler(before, cpu, memory, &mut step);
            return step;
        };
        if is_repeated(&instruction) && cpu.rip == before.rip && cpu.cpl == before.cpl {
            // Iterations remain, or the instruction faulted and the handler has already returned to
            // it.
            self.note_completed_iterations(&instruction, before, cpu);
            return step;
        }
        let taken = match pending.next_address {
            NextAddress::To(target, taken) if target == cpu.rip => Some(taken),
            NextAddress::To(next, _) if classify(&instruction) == InstructionClass::Shadow => {
                // The step also executed instructions in the interrupt shadow of this one.
                if self.retire_shadow(&pending, next, cpu.rip, memory, &mut step) {
                    return step;
                }
                // An instruction in the shadow may have faulted, or an event may have occurred
                // before the stop.
                let interrupted = interrupted_address(cpu, memory);
                if let Some(at) = interrupted.filter(|at| *at != before.rip)
                    && self.retire_shadow(&pending, next, at, memory, &mut step)
                {
                    self.enter_handler(before, cpu, memory, &mut step);
                    return step;
                }
                None
            }
            // HLT at CPL 0 cannot fault. If RIP has moved, the vCPU halted and was woken.
            NextAddress::To(..) if instruction.mnemonic() == Mnemonic::Hlt && before.cpl == 0 => {
                self.retire(&instruction, before, false, false, &mut step);
                self.enter_handler(before, cpu, memory, &mut step);
                return step;
            }
            NextAddress::To(..) => None,
            NextAddress::Unpredictable => self
                .resolve_unpredictable(&instruction, cpu, memory, &mut step)
                .then_some(true),
        };
        match taken {
            Some(taken) => {
                if pending.iterated {
                    self.unfinished = None;
                }
                self.retire(&instruction, before, taken, pending.iterated, &mut step);
                if taken && is_branch(&instruction) {
                    self.record_branch(before, cpu, branch_kind(&instruction));
                }
            }
            None if cpu.rip == before.rip && cpu.cpl == before.cpl => {
                // The vCPU stopped before it executed the instruction.
            }
            None => {
                // The instruction did not complete. If an iteration completed, the remaining
                // iterations follow after the handler.
                if is_repeated(&instruction) {
                    self.note_completed_iterations(&instruction, before, cpu);
                }
                self.enter_handler(before, cpu, memory, &mut step);
            }
        }
        step
    }

    /// Notes that a repeated instruction is unfinished, if the step completed an iteration of it.
    fn note_completed_iterations(
        &mut self,
        instruction: &Instruction,
        before: &SteppedCpuState,
        cpu: &SteppedCpuState,
    ) {
        if element_count(instruction, before) != element_count(instruction, cpu) {
            self.unfinished = Some((before.rip, before.cpl));
        }
    }

    /// Adds a completed instruction to the counts of `step`.
    fn retire(
        &mut self,
        instruction: &Instruction,
        before: &SteppedCpuState,
        taken: bool,
        iterated: bool,
        step: &mut SingleStepOutcome,
    ) {
        let mut counts = RetiredCounts {
            instructions: 1,
            ..RetiredCounts::default()
        };
        if is_branch(instruction) {
            counts.branches = 1;
            counts.conditional_branches =
                u32::from(instruction.flow_control() == FlowControl::ConditionalBranch);
            counts.taken_branches = u32::from(taken && (self.vendor == Vendor::Amd || is_near(instruction)));
        }
        let idle = is_repeated(instruction) && !iterated && element_count(instruction, before) == 0;
        if !idle {
            let accesses = self.accesses(instruction);
            counts.loads = accesses.loads.into();
            counts.stores = accesses.stores.into();
        }
        step.at(before.cpl).add(counts);
    }

    /// Returns the types of memory accesses that `instruction` makes.
    fn accesses(&mut self, instruction: &Instruction) -> Accesses {
        let mut accesses = Accesses::default();
        for memory in self.info.info(instruction).used_memory() {
            let (load, store) = match memory.access() {
                OpAccess::Read | OpAccess::CondRead => (true, false),
                OpAccess::Write | OpAccess::CondWrite => (false, true),
                OpAccess::ReadWrite | OpAccess::ReadCondWrite => (true, true),
                OpAccess::None | OpAccess::NoMemAccess => (false, false),
            };
            accesses.loads |= load;
            accesses.stores |= store;
            accesses.stack |= memory.segment() == Register::SS;
        }
        accesses
    }

    /// Adds the instruction of `pending` and the instructions from `next` to `end` to the counts of
    /// `step`, and returns `true`. Each of the latter must follow an instruction with an interrupt
    /// shadow. Returns `false` if decoding does not reach `end`.
    fn retire_shadow(
        &mut self,
        pending: &PendingStep,
        next: u64,
        end: u64,
        memory: &mut dyn SteppedGuestMemory,
        step: &mut SingleStepOutcome,
    ) -> bool {
        let Some(mut last) = pending.instruction else {
            return false;
        };
        // A copy of the counts, which is discarded unless the predicted addresses lead to `end`.
        let mut passed = *step;
        let (mut at, mut next) = (pending.before, next);
        for _ in 0..MAX_SHADOWS {
            self.retire(&last, &at, false, false, &mut passed);
            if last.mnemonic() == Mnemonic::Pop {
                at.gpr[4] = at.gpr[4].wrapping_add(i64::from(last.stack_pointer_increment()).cast_unsigned());
            }
            at.rip = next;
            if next == end {
                *step = passed;
                return true;
            }
            let Some(successor) = decode(&at, next, memory) else {
                return false;
            };
            match next_address(&successor, &at, memory) {
                NextAddress::To(target, taken) if target == end => {
                    self.retire(&successor, &at, taken, false, &mut passed);
                    if taken && is_branch(&successor) {
                        let (from, to) = (
                            SteppedCpuState { rip: next, ..at },
                            SteppedCpuState { rip: end, ..at },
                        );
                        self.record_branch(&from, &to, branch_kind(&successor));
                    }
                    *step = passed;
                    return true;
                }
                NextAddress::To(behind, _) if classify(&successor) == InstructionClass::Shadow => {
                    (last, next) = (successor, behind);
                }
                _ => return false,
            }
        }
        false
    }

    /// Handles a step over an instruction whose target could not be predicted. Returns whether the
    /// instruction completed. The instruction did not complete if the vCPU is in the handler of an
    /// exception that it can raise.
    ///
    /// If the instruction is a software interrupt and the vCPU has already executed the first
    /// instruction of the handler, that instruction is also counted.
    fn resolve_unpredictable(
        &mut self,
        instruction: &Instruction,
        cpu: &SteppedCpuState,
        memory: &mut dyn SteppedGuestMemory,
        step: &mut SingleStepOutcome,
    ) -> bool {
        if let Some(vector) = software_interrupt(instruction)
            && let Some(handler) = memory.gate(vector)
        {
            if cpu.rip == handler {
                return true;
            }
            if let Some((first, at)) = first_of_handler(handler, cpu, memory) {
                self.retire(&first, &at, false, false, step);
                return true;
            }
        }
        // Vectors of #UD, #NP, #SS, #GP, #PF and #AC. UD2 never completes.
        instruction.flow_control() != FlowControl::Exception
            && ![6, 11, 12, 13, 14, 17].into_iter().any(|vector| {
                memory.gate(vector).is_some_and(|handler| {
                    handler == cpu.rip || first_of_handler(handler, cpu, memory).is_some()
                })
            })
    }

    /// Handles a step in which an interrupt, NMI or exception diverted the vCPU to a handler. Marks
    /// the step as lost if the vCPU is neither before nor after the first instruction of a handler.
    fn enter_handler(
        &mut self,
        before: &SteppedCpuState,
        cpu: &SteppedCpuState,
        memory: &mut dyn SteppedGuestMemory,
        step: &mut SingleStepOutcome,
    ) {
        step.event = true;
        if self.vendor == Vendor::Amd {
            step.at(cpu.cpl).add(RetiredCounts {
                branches: 1,
                taken_branches: 1,
                ..RetiredCounts::default()
            });
        }
        if (0..=255).any(|vector| memory.gate(vector) == Some(cpu.rip)) {
            self.record_branch(before, cpu, BranchKind::Interrupt);
            return;
        }
        for vector in 0..=255 {
            if let Some(handler) = memory.gate(vector)
                && let Some((first, at)) = first_of_handler(handler, cpu, memory)
            {
                let taken = first.next_ip() != cpu.rip;
                self.retire(&first, &at, taken, false, step);
                self.record_branch(before, &at, BranchKind::Interrupt);
                if taken {
                    self.record_branch(&at, cpu, branch_kind(&first));
                }
                return;
            }
        }
        step.lost = true;
    }
}

/// Returns the address to which a 64-bit handler will return (SDM vol. 3 §6.14.2, "64-Bit Mode
/// Stack Frame"). Returns `None` unless the vCPU is before or after the first instruction of a
/// handler.
fn interrupted_address(cpu: &SteppedCpuState, memory: &mut dyn SteppedGuestMemory) -> Option<u64> {
    if cpu.size != CodeSegmentMode::Bits64 {
        return None;
    }
    let at_handler = (0..=255u8).find(|vector| memory.gate(*vector) == Some(cpu.rip));
    let (vector, pushed) = match at_handler {
        Some(vector) => (vector, 0),
        None => (0..=255).find_map(|vector| {
            let (first, _) = first_of_handler(memory.gate(vector)?, cpu, memory)?;
            Some((vector, first.stack_pointer_increment()))
        })?,
    };
    let error_code = matches!(vector, 8 | 10..=14 | 17 | 21 | 29 | 30);
    let frame = cpu.gpr[4].wrapping_sub(i64::from(pushed).cast_unsigned());
    let mut address = [0; 8];
    let read = memory.read(frame.wrapping_add(8 * u64::from(error_code)), &mut address);
    (read == address.len()).then(|| u64::from_le_bytes(address))
}

/// Returns the first instruction of the handler at `handler` if its execution leads to the vCPU's
/// current address. The result includes the vCPU state before the instruction, in which only RIP is
/// exact.
fn first_of_handler(
    handler: u64,
    cpu: &SteppedCpuState,
    memory: &mut dyn SteppedGuestMemory,
) -> Option<(Instruction, SteppedCpuState)> {
    // An instruction is at most fifteen bytes long, and a handler may start with a direct jump.
    // Other handlers cannot lead to the current address.
    let at = SteppedCpuState { rip: handler, ..*cpu };
    let first = decode(&at, handler, memory)?;
    let target = match first.flow_control() {
        FlowControl::UnconditionalBranch | FlowControl::Call => first.near_branch_target(),
        FlowControl::Next => first.next_ip(),
        _ => return None,
    };
    (target == cpu.rip).then_some((first, at))
}

#[cfg(test)]
mod tests;
