//! Exact counts from single steps: what one step of a vCPU retired.
//!
//! A VMM that steps a vCPU tells a [`StepMeter`] the state before and after each step. The meter decodes the
//! instruction, works out where it must lead, and from where the vCPU is after the step concludes what was
//! retired. The rules:
//!
//! - An instruction counts when it completes (Intel SDM vol. 3, "Instructions Retired": the last
//!   micro-operation retires), at the privilege level at which it began. One that faults does not count; when
//!   it is executed again after the handler, it does. Traps and software interrupts (INT n, INT3, INTO)
//!   complete, so they count.
//! - An interrupt, NMI or exception is not an instruction. What its handler executes counts like any other
//!   code.
//! - A repeated string instruction is one instruction, however often it iterates, and also when it iterates
//!   zero times. An interrupt between two iterations does not make it two.
//! - Instructions whose shadow hides the next step (MOV SS, POP SS; where KVM emulates them also the fences
//!   and SWAPGS) are stepped together with their successor: two, or more where that is another of them.
//! - HLT counts when it halts. SYSCALL, SYSRET, SYSENTER, SYSEXIT and IRET count one each.
//! - The WRMSR that enables counting counts and the one that disables it does not, because what a step
//!   retired is fed after the write took effect. The VMM need do nothing but feed after
//!   [`crate::Vpmu::reconcile`].
//! - A branch is anything that can change RIP other than to the next instruction: conditional or not, direct
//!   or not, near or far, calls, returns, software interrupts, SYSCALL and its kin, IRET. Taken branches: on
//!   an Intel model near ones that were taken (BR_INST_RETIRED.NEAR_TAKEN); on an AMD model also far ones,
//!   and interrupts and exceptions count as branches and as taken ones (PPR, PMCx0C2 and PMCx0C4: "all types
//!   of architectural control flow changes").
//! - Loads and stores are *instructions* that read or write memory at least once, stack included, address
//!   computation (LEA), prefetches and multi-byte NOPs excluded. A repeated string instruction that iterates
//!   zero times does neither.
//!
//! # Use
//!
//! Before each entry, after [`crate::Vpmu::reconcile`]: if [`crate::PerfCoreEvents::needs_stepping`], switch
//! single steps on and, unless [`StepMeter::in_step`], call [`StepMeter::begin`]; else switch them off and
//! call [`StepMeter::abandon`]. At a debug exit call [`StepMeter::end`] and [`Step::feed`]. Other exits (I/O,
//! MSR) come in the middle of an instruction: serve them and enter again, the step goes on. So the WRMSR that
//! enables counting, whose exit comes first, begins its step after it took effect, and is counted when it
//! completes.
//!
//! A processor clears the trap flag when it enters a handler or the kernel, and shows it to a guest that
//! saves its flags. [`StepMeter::begin`] says when that is ahead, so that the VMM can set a breakpoint where
//! the step will be lost. Wherever the next stop is, at a handler's first instruction or behind it, the meter
//! knows it from the guest's interrupt descriptor table; a stop further on is reported as [`Step::lost`].

mod cpu;
mod flow;
mod run;

use iced_x86::{FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess, Register};
use perf_core::pmu::fed::FedCounts;

use crate::events::ArchEvent;
use crate::fed;
use crate::names::Vendor;

pub use cpu::{Ahead, CodeSize, CpuState, GateFormat, GuestMemory, gate_in_table};
pub use run::{LONGEST_RUN, MOST_RUN_BYTES, StraightRun};

use flow::{Leads, ahead, decode, element_count, is_branch, is_near, is_repeated, leads, software_interrupt};

/// Most instructions in a row that one step passes because each hides its stop.
const MOST_SHADOWS: usize = 16;

/// What is counted at one privilege level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Instructions retired.
    pub instructions: u32,
    /// Branches retired.
    pub branches: u32,
    /// Branches retired that were taken.
    pub taken_branches: u32,
    /// Branches retired that go by a condition, taken or not.
    pub conditional_branches: u32,
    /// Instructions retired that load.
    pub loads: u32,
    /// Instructions retired that store.
    pub stores: u32,
}

impl Counts {
    /// The count that serves an event, `None` when no exact count does.
    pub const fn of(&self, event: ArchEvent) -> Option<u32> {
        match event {
            ArchEvent::Instructions | ArchEvent::CoreCycles | ArchEvent::RefCycles | ArchEvent::BusCycles => {
                Some(self.instructions)
            }
            ArchEvent::Branches => Some(self.branches),
            ArchEvent::TakenBranches => Some(self.taken_branches),
            ArchEvent::ConditionalBranches => Some(self.conditional_branches),
            ArchEvent::Loads => Some(self.loads),
            ArchEvent::Stores => Some(self.stores),
            _ => None,
        }
    }

    /// How much more of each may be fed to `counts` at privilege level `cpl` until an armed overflow is due:
    /// 0 of what is due already, [`u32::MAX`] where none is armed.
    pub fn room(counts: &FedCounts, cpl: u8) -> Self {
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
            let left = fed::exact(event).and_then(|selector| counts.until_overflow(selector, cpl));
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

    /// Adds what `other` has.
    pub const fn add(&mut self, other: Self) {
        self.instructions += other.instructions;
        self.branches += other.branches;
        self.taken_branches += other.taken_branches;
        self.conditional_branches += other.conditional_branches;
        self.loads += other.loads;
        self.stores += other.stores;
    }
}

/// What happened in a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Retired at CPL 1 to 3.
    pub user: Counts,
    /// Retired at CPL 0.
    pub kernel: Counts,
    /// An interrupt, NMI or exception came in between.
    pub event: bool,
    /// The meter could not tell what happened: the code could not be read, or the vCPU is where nothing
    /// known leads. Nothing is counted for what it could not tell.
    pub lost: bool,
}

impl Step {
    /// Feeds what was retired to a vCPU's counts. Returns whether an armed overflow has come.
    pub fn feed(&self, counts: &FedCounts) -> bool {
        let mut overflow = false;
        for (level, cpl) in [(&self.user, 3), (&self.kernel, 0)] {
            if *level == Counts::default() {
                continue;
            }
            for (selector, event) in fed::EXACT.into_iter().enumerate() {
                match level.of(event) {
                    Some(n) if n > 0 => overflow |= counts.add(selector, cpl, u64::from(n)),
                    _ => {}
                }
            }
        }
        overflow
    }

    fn at(&mut self, cpl: u8) -> &mut Counts {
        if cpl == 0 {
            &mut self.kernel
        } else {
            &mut self.user
        }
    }
}

/// How an instruction uses memory.
#[derive(Clone, Copy, Debug, Default)]
struct Accesses {
    loads: bool,
    stores: bool,
    /// By the stack segment.
    stack: bool,
}

#[derive(Clone, Copy, Debug)]
struct Pending {
    before: CpuState,
    /// `None`: its bytes could not be read.
    instruction: Option<Instruction>,
    leads: Leads,
    /// A repeated string instruction that began earlier than this step.
    iterated: bool,
}

/// Tells what each step of one vCPU retired.
pub struct StepMeter {
    vendor: Vendor,
    info: InstructionInfoFactory,
    pending: Option<Pending>,
    /// The repeated string instruction that a step left unfinished: where it is, and at which level.
    unfinished: Option<(u64, u8)>,
}

impl std::fmt::Debug for StepMeter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StepMeter")
            .field("pending", &self.pending)
            .finish_non_exhaustive()
    }
}

impl StepMeter {
    /// A meter for a model of `vendor`.
    pub fn new(vendor: Vendor) -> Self {
        Self {
            vendor,
            info: InstructionInfoFactory::new(),
            pending: None,
            unfinished: None,
        }
    }

    /// Whether a step was begun and not ended: an exit in the middle of an instruction (I/O, MSR) does not
    /// end it.
    pub fn in_step(&self) -> bool {
        self.pending.is_some()
    }

    /// Where the instruction that is being stepped leads if it completes; `None` when that is not known.
    pub fn known_target(&self) -> Option<u64> {
        match self.pending?.leads {
            Leads::To(target, _) => Some(target),
            Leads::Anywhere => None,
        }
    }

    /// Address behind the instruction that is being stepped; `None` when none is or it could not be read.
    pub fn next_ip(&self) -> Option<u64> {
        Some(self.pending.as_ref()?.instruction?.next_ip())
    }

    /// Forgets a step that was begun, because stepping ends here or the vCPU's state was replaced.
    pub fn abandon(&mut self) {
        self.pending = None;
    }

    /// The vCPU is about to be stepped from `cpu`.
    pub fn begin(&mut self, cpu: &CpuState, memory: &mut dyn GuestMemory) -> Ahead {
        let instruction = decode(cpu, cpu.rip, memory);
        let iterated = self.unfinished == Some((cpu.rip, cpu.cpl));
        let leads = instruction
            .as_ref()
            .map_or(Leads::Anywhere, |i| leads(i, cpu, memory));
        self.pending = Some(Pending {
            before: *cpu,
            instruction,
            leads,
            iterated,
        });
        instruction.as_ref().map_or(Ahead::Unreadable, ahead)
    }

    /// The step is over and the vCPU is at `cpu`. A step that was not begun retired nothing.
    pub fn end(&mut self, cpu: &CpuState, memory: &mut dyn GuestMemory) -> Step {
        let mut step = Step::default();
        let Some(pending) = self.pending.take() else {
            return step;
        };
        let before = &pending.before;
        let Some(instruction) = pending.instruction else {
            // What cannot be read cannot be executed: it faulted.
            self.entered(cpu, memory, &mut step);
            return step;
        };
        if is_repeated(&instruction) && cpu.rip == before.rip && cpu.cpl == before.cpl {
            // Iterations are left, or a fault led back here at once.
            if element_count(&instruction, before) != element_count(&instruction, cpu) {
                self.unfinished = Some((before.rip, before.cpl));
            }
            return step;
        }
        let taken = match pending.leads {
            Leads::To(target, taken) if target == cpu.rip => Some(taken),
            Leads::To(next, _) if ahead(&instruction) == Ahead::Shadow => {
                // The step hid the instruction behind it.
                if self.shadowed(&pending, next, cpu, memory, &mut step) {
                    return step;
                }
                None
            }
            // HLT at CPL 0 cannot fault: if the vCPU is elsewhere it has halted and been woken.
            Leads::To(..) if instruction.mnemonic() == Mnemonic::Hlt && before.cpl == 0 => {
                self.retire(&instruction, before, false, false, &mut step);
                self.entered(cpu, memory, &mut step);
                return step;
            }
            Leads::To(..) => None,
            Leads::Anywhere => self.arrived(&instruction, cpu, memory, &mut step).then_some(true),
        };
        match taken {
            Some(taken) => {
                if pending.iterated {
                    self.unfinished = None;
                }
                self.retire(&instruction, before, taken, pending.iterated, &mut step);
            }
            None if cpu.rip == before.rip && cpu.cpl == before.cpl => {
                // Stopped before it did anything.
            }
            None => {
                // The instruction did not complete. If an iteration did, the rest follows after the handler.
                if is_repeated(&instruction)
                    && element_count(&instruction, before) != element_count(&instruction, cpu)
                {
                    self.unfinished = Some((before.rip, before.cpl));
                }
                self.entered(cpu, memory, &mut step);
            }
        }
        step
    }

    /// Counts an instruction that completed.
    fn retire(
        &mut self,
        instruction: &Instruction,
        before: &CpuState,
        taken: bool,
        iterated: bool,
        step: &mut Step,
    ) {
        let mut counts = Counts {
            instructions: 1,
            ..Counts::default()
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

    /// How the instruction uses memory.
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

    /// The step of an instruction with a shadow ended elsewhere than behind it: did its successor, at `next`,
    /// lead there, or that one's where it has a shadow too?
    fn shadowed(
        &mut self,
        pending: &Pending,
        next: u64,
        cpu: &CpuState,
        memory: &mut dyn GuestMemory,
        step: &mut Step,
    ) -> bool {
        let Some(mut last) = pending.instruction else {
            return false;
        };
        // Counts for nothing unless it ends where the vCPU is.
        let mut passed = *step;
        let (mut at, mut next) = (pending.before, next);
        for _ in 0..MOST_SHADOWS {
            self.retire(&last, &at, false, false, &mut passed);
            if last.mnemonic() == Mnemonic::Pop {
                at.gpr[4] = at.gpr[4].wrapping_add(i64::from(last.stack_pointer_increment()).cast_unsigned());
            }
            at.rip = next;
            let Some(successor) = decode(&at, next, memory) else {
                return false;
            };
            match leads(&successor, &at, memory) {
                Leads::To(target, taken) if target == cpu.rip => {
                    self.retire(&successor, &at, taken, false, &mut passed);
                    *step = passed;
                    return true;
                }
                Leads::To(behind, _) if ahead(&successor) == Ahead::Shadow => {
                    (last, next) = (successor, behind);
                }
                _ => return false,
            }
        }
        false
    }

    /// An instruction that leads anywhere was stepped: did it complete? It did not if the vCPU is in the
    /// handler of an exception it can raise. Counts the handler's first instruction if a gate was entered and
    /// that ran too.
    fn arrived(
        &mut self,
        instruction: &Instruction,
        cpu: &CpuState,
        memory: &mut dyn GuestMemory,
        step: &mut Step,
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
        // Invalid opcode, not present, stack fault, general protection, page fault, alignment. UD2 never
        // completes.
        instruction.flow_control() != FlowControl::Exception
            && ![6, 11, 12, 13, 14, 17].into_iter().any(|vector| {
                memory.gate(vector).is_some_and(|handler| {
                    handler == cpu.rip || first_of_handler(handler, cpu, memory).is_some()
                })
            })
    }

    /// The vCPU was led away by an interrupt, NMI or exception and is in its handler, before its first
    /// instruction or behind it.
    fn entered(&mut self, cpu: &CpuState, memory: &mut dyn GuestMemory, step: &mut Step) {
        step.event = true;
        if self.vendor == Vendor::Amd {
            step.at(cpu.cpl).add(Counts {
                branches: 1,
                taken_branches: 1,
                ..Counts::default()
            });
        }
        if (0..=255).any(|vector| memory.gate(vector) == Some(cpu.rip)) {
            return;
        }
        for vector in 0..=255 {
            if let Some(handler) = memory.gate(vector)
                && let Some((first, at)) = first_of_handler(handler, cpu, memory)
            {
                let taken = first.next_ip() != cpu.rip;
                self.retire(&first, &at, taken, false, step);
                return;
            }
        }
        step.lost = true;
    }
}

/// The first instruction of a handler, if executing it leads to where the vCPU is. The handler began with
/// some other state than the one there is now, but only its RIP matters here.
fn first_of_handler(
    handler: u64,
    cpu: &CpuState,
    memory: &mut dyn GuestMemory,
) -> Option<(Instruction, CpuState)> {
    // An instruction is at most fifteen bytes long, and a handler may begin with a direct jump; look no
    // further where neither can lead here.
    let at = CpuState { rip: handler, ..*cpu };
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
