//! Exact counts from single steps: what one step of a vCPU retired.
//!
//! A VMM that steps a vCPU tells a [`StepMeter`] the state before and after each step. The meter decodes the instruction,
//! works out where it must lead, and from where the vCPU is after the step concludes what was retired. The rules:
//!
//! - An instruction counts when it completes (Intel SDM vol. 3, "Instructions Retired": the last micro-operation
//!   retires), at the privilege level at which it began. One that faults does not count; when it is executed again after
//!   the handler, it does. Traps and software interrupts (INT n, INT3, INTO) complete, so they count.
//! - An interrupt, NMI or exception is not an instruction. What its handler executes counts like any other code.
//! - A repeated string instruction is one instruction, however often it iterates, and also when it iterates zero times. An
//!   interrupt between two iterations does not make it two.
//! - Instructions whose shadow hides the next step (MOV SS, POP SS) are stepped together with their successor: two.
//! - HLT counts when it halts. SYSCALL, SYSRET, SYSENTER, SYSEXIT and IRET count one each.
//! - The WRMSR that enables counting counts and the one that disables it does not, because what a step retired is fed
//!   after the write took effect. The VMM need do nothing but feed after [`crate::Vpmu::reconcile`].
//! - A branch is anything that can change RIP other than to the next instruction: conditional or not, direct or not, near
//!   or far, calls, returns, software interrupts, SYSCALL and its kin, IRET. Taken branches: on an Intel model near ones that
//!   were taken (BR_INST_RETIRED.NEAR_TAKEN); on an AMD model also far ones, and interrupts and exceptions count as
//!   branches and as taken ones (PPR, PMCx0C2 and PMCx0C4: "all types of architectural control flow changes").
//! - Loads and stores are *instructions* that read or write memory at least once, stack included, address computation
//!   (LEA), prefetches and multi-byte NOPs excluded. A repeated string instruction that iterates zero times does neither.

use iced_x86::{
    ConditionCode, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic,
    OpAccess, OpKind, Register,
};

use perf_core::pmu::fed::FedCounts;

use crate::events::ArchEvent;
use crate::fed;
use crate::model::Vendor;

/// Longest instruction, in bytes.
const LONGEST: usize = 15;

const CF: u64 = 1;
const PF: u64 = 1 << 2;
const ZF: u64 = 1 << 6;
const SF: u64 = 1 << 7;
const OF: u64 = 1 << 11;

/// Size of the code that runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeSize {
    /// CS.L = 0, CS.D = 0.
    Bits16,
    /// CS.L = 0, CS.D = 1.
    Bits32,
    /// CS.L = 1.
    Bits64,
}

impl CodeSize {
    const fn bits(self) -> u32 {
        match self {
            Self::Bits16 => 16,
            Self::Bits32 => 32,
            Self::Bits64 => 64,
        }
    }
}

/// The part of a vCPU's state that decides where an instruction leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuState {
    /// Instruction pointer, relative to the code segment.
    pub rip: u64,
    /// Flags.
    pub rflags: u64,
    /// Current privilege level.
    pub cpl: u8,
    /// Size of the code.
    pub size: CodeSize,
    /// RAX, RCX, RDX, RBX, RSP, RBP, RSI, RDI, R8 to R15.
    pub gpr: [u64; 16],
    /// Bases of ES, CS, SS, DS, FS, GS.
    pub segment_bases: [u64; 6],
}

/// What the meter must see of the guest's memory.
pub trait GuestMemory {
    /// Reads at a linear address, through the guest's page tables, as the code that runs now could. Returns how many bytes
    /// at the front of `buffer` were read.
    fn read(&mut self, linear: u64, buffer: &mut [u8]) -> usize;

    /// Where the interrupt descriptor table sends `vector` (RIP, relative to the gate's code segment); `None` for a vector
    /// without a gate.
    fn gate(&mut self, vector: u8) -> Option<u64>;
}

/// What is counted at one privilege level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Instructions retired.
    pub instructions: u32,
    /// Branches retired.
    pub branches: u32,
    /// Branches retired that were taken.
    pub taken_branches: u32,
    /// Instructions retired that load.
    pub loads: u32,
    /// Instructions retired that store.
    pub stores: u32,
}

impl Counts {
    /// The count that serves an event, `None` when no exact count does.
    pub const fn of(&self, event: ArchEvent) -> Option<u32> {
        match event {
            ArchEvent::Instructions | ArchEvent::CoreCycles | ArchEvent::RefCycles => Some(self.instructions),
            ArchEvent::Branches => Some(self.branches),
            ArchEvent::TakenBranches => Some(self.taken_branches),
            ArchEvent::Loads => Some(self.loads),
            ArchEvent::Stores => Some(self.stores),
            _ => None,
        }
    }

    fn add(&mut self, other: Self) {
        self.instructions += other.instructions;
        self.branches += other.branches;
        self.taken_branches += other.taken_branches;
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
    /// The meter could not tell what happened: the code could not be read, or the vCPU is where nothing known leads.
    /// Nothing is counted for what it could not tell.
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

/// What the next instruction is, for a VMM that must prepare for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// Nothing special: a step stops after it.
    Plain,
    /// The step may stop only after the instruction behind it (MOV SS, POP SS).
    Shadow,
    /// It enters the kernel through a register (SYSCALL, SYSENTER), which may clear the trap flag.
    SystemCall,
    /// It enters the kernel through the gate of this vector, which clears the trap flag.
    Interrupt(u8),
    /// It returns from an interrupt and loads the flags.
    InterruptReturn,
    /// It halts until an interrupt.
    Halt,
    /// It writes the flags, the trap flag among them (POPF), or shows them to the guest (PUSHF).
    Flags,
    /// Its bytes cannot be read or are no instruction: it will fault.
    Unreadable,
}

/// Where an instruction may lead.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Leads {
    /// There, with the branch taken or not.
    To(u64, bool),
    /// Somewhere that cannot be known beforehand.
    Anywhere,
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

    /// Whether a step was begun and not ended: an exit in the middle of an instruction (I/O, MSR) does not end it.
    pub fn in_step(&self) -> bool {
        self.pending.is_some()
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
            counts.taken_branches = u32::from(taken && (self.vendor == Vendor::Amd || is_near(instruction)));
        }
        let idle = is_repeated(instruction) && !iterated && element_count(instruction, before) == 0;
        if !idle {
            let info = self.info.info(instruction);
            for memory in info.used_memory() {
                let (load, store) = match memory.access() {
                    OpAccess::Read | OpAccess::CondRead => (true, false),
                    OpAccess::Write | OpAccess::CondWrite => (false, true),
                    OpAccess::ReadWrite | OpAccess::ReadCondWrite => (true, true),
                    OpAccess::None | OpAccess::NoMemAccess => (false, false),
                };
                counts.loads |= u32::from(load);
                counts.stores |= u32::from(store);
            }
        }
        step.at(before.cpl).add(counts);
    }

    /// The step of an instruction with a shadow ended elsewhere than behind it: did its successor, at `next`, lead there?
    fn shadowed(
        &mut self,
        pending: &Pending,
        next: u64,
        cpu: &CpuState,
        memory: &mut dyn GuestMemory,
        step: &mut Step,
    ) -> bool {
        let Some(first) = pending.instruction else {
            return false;
        };
        let mut between = pending.before;
        between.rip = next;
        if first.mnemonic() == Mnemonic::Pop {
            between.gpr[4] = between.gpr[4].wrapping_add(first.stack_pointer_increment() as u64);
        }
        let Some(second) = decode(&between, next, memory) else {
            return false;
        };
        let taken = match leads(&second, &between, memory) {
            Leads::To(target, taken) if target == cpu.rip => taken,
            _ => return false,
        };
        self.retire(&first, &pending.before, false, false, step);
        self.retire(&second, &between, taken, false, step);
        true
    }

    /// An instruction that leads anywhere was stepped: did it complete? It did not if the vCPU is in the handler of an
    /// exception it can raise. Counts the handler's first instruction if a gate was entered and that ran too.
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
        // Invalid opcode, not present, stack fault, general protection, page fault, alignment. UD2 never completes.
        instruction.flow_control() != FlowControl::Exception
            && ![6, 11, 12, 13, 14, 17].into_iter().any(|vector| {
                memory.gate(vector).is_some_and(|handler| {
                    handler == cpu.rip || first_of_handler(handler, cpu, memory).is_some()
                })
            })
    }

    /// The vCPU was led away by an interrupt, NMI or exception and is in its handler, before its first instruction or
    /// behind it.
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

/// The first instruction of a handler, if executing it leads to where the vCPU is. The handler began with some other state
/// than the one there is now, but only its RIP matters here.
fn first_of_handler(
    handler: u64,
    cpu: &CpuState,
    memory: &mut dyn GuestMemory,
) -> Option<(Instruction, CpuState)> {
    // An instruction is at most fifteen bytes long, and a handler may begin with a direct jump; look no further where
    // neither can lead here.
    let at = CpuState { rip: handler, ..*cpu };
    let first = decode(&at, handler, memory)?;
    let target = match first.flow_control() {
        FlowControl::UnconditionalBranch | FlowControl::Call => first.near_branch_target(),
        FlowControl::Next => first.next_ip(),
        _ => return None,
    };
    (target == cpu.rip).then_some((first, at))
}

fn decode(cpu: &CpuState, rip: u64, memory: &mut dyn GuestMemory) -> Option<Instruction> {
    let mut bytes = [0; LONGEST];
    let read = memory
        .read(rip.wrapping_add(cpu.segment_bases[1]), &mut bytes)
        .min(LONGEST);
    let mut decoder = Decoder::with_ip(cpu.size.bits(), &bytes[..read], rip, DecoderOptions::NONE);
    let instruction = decoder.decode();
    (!instruction.is_invalid()).then_some(instruction)
}

/// What a VMM must know of an instruction before it is stepped.
fn ahead(instruction: &Instruction) -> Ahead {
    match instruction.mnemonic() {
        Mnemonic::Mov | Mnemonic::Pop
            if instruction.op0_kind() == OpKind::Register && instruction.op0_register() == Register::SS =>
        {
            Ahead::Shadow
        }
        Mnemonic::Syscall | Mnemonic::Sysenter => Ahead::SystemCall,
        Mnemonic::Iret | Mnemonic::Iretd | Mnemonic::Iretq => Ahead::InterruptReturn,
        Mnemonic::Hlt => Ahead::Halt,
        Mnemonic::Popf
        | Mnemonic::Popfd
        | Mnemonic::Popfq
        | Mnemonic::Pushf
        | Mnemonic::Pushfd
        | Mnemonic::Pushfq => Ahead::Flags,
        _ => software_interrupt(instruction).map_or(Ahead::Plain, Ahead::Interrupt),
    }
}

/// The vector of a software interrupt.
fn software_interrupt(instruction: &Instruction) -> Option<u8> {
    match instruction.mnemonic() {
        Mnemonic::Int => Some(instruction.immediate8()),
        Mnemonic::Int1 => Some(1),
        Mnemonic::Int3 => Some(3),
        Mnemonic::Into => Some(4),
        _ => None,
    }
}

fn is_repeated(instruction: &Instruction) -> bool {
    instruction.is_string_instruction() && (instruction.has_rep_prefix() || instruction.has_repne_prefix())
}

/// What is left in the count register of a repeated string instruction.
fn element_count(instruction: &Instruction, cpu: &CpuState) -> u64 {
    cpu.gpr[1] & address_mask(instruction)
}

/// Ones in the bits of the instruction's address size, which is also the size of its count register.
fn address_mask(instruction: &Instruction) -> u64 {
    let code = instruction.code();
    // The string operands and the counter of JrCXZ and LOOP name the size.
    let register = match code.mnemonic() {
        Mnemonic::Jcxz => Register::CX,
        Mnemonic::Jecxz => Register::ECX,
        Mnemonic::Jrcxz => Register::RCX,
        _ => {
            let kinds = [instruction.op0_kind(), instruction.op1_kind()];
            let string = |sizes: [OpKind; 3]| kinds.iter().any(|kind| sizes.contains(kind));
            if string([OpKind::MemorySegSI, OpKind::MemoryESDI, OpKind::MemorySegDI]) {
                Register::CX
            } else if string([OpKind::MemorySegESI, OpKind::MemoryESEDI, OpKind::MemorySegEDI]) {
                Register::ECX
            } else {
                loop_counter(instruction)
            }
        }
    };
    match register {
        Register::CX => 0xFFFF,
        Register::ECX => 0xFFFF_FFFF,
        _ => u64::MAX,
    }
}

fn loop_counter(instruction: &Instruction) -> Register {
    use iced_x86::Code::*;
    match instruction.code() {
        Loop_rel8_16_CX | Loop_rel8_32_CX | Loope_rel8_16_CX | Loope_rel8_32_CX | Loopne_rel8_16_CX
        | Loopne_rel8_32_CX => Register::CX,
        Loop_rel8_16_ECX | Loop_rel8_32_ECX | Loop_rel8_64_ECX | Loope_rel8_16_ECX | Loope_rel8_32_ECX
        | Loope_rel8_64_ECX | Loopne_rel8_16_ECX | Loopne_rel8_32_ECX | Loopne_rel8_64_ECX => Register::ECX,
        _ => Register::RCX,
    }
}

/// Where the instruction leads from `cpu` when it completes.
fn leads(instruction: &Instruction, cpu: &CpuState, memory: &mut dyn GuestMemory) -> Leads {
    let next = instruction.next_ip();
    let known = |target: Option<u64>| target.map_or(Leads::Anywhere, |target| Leads::To(target, true));
    match instruction.flow_control() {
        FlowControl::Next => Leads::To(next, false),
        FlowControl::ConditionalBranch => {
            let taken = is_taken(instruction, cpu);
            Leads::To(
                if taken {
                    instruction.near_branch_target()
                } else {
                    next
                },
                taken,
            )
        }
        FlowControl::UnconditionalBranch | FlowControl::Call if is_near(instruction) => {
            match instruction.op0_kind() {
                OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64 => {
                    Leads::To(instruction.near_branch_target(), true)
                }
                // VMCALL and the like are calls to the decoder, but go on behind themselves.
                _ => Leads::To(next, false),
            }
        }
        FlowControl::IndirectBranch | FlowControl::IndirectCall if is_near(instruction) => {
            known(operand(instruction, cpu, memory))
        }
        FlowControl::Return => match instruction.mnemonic() {
            Mnemonic::Ret => {
                let bytes = match instruction.code() {
                    iced_x86::Code::Retnw | iced_x86::Code::Retnw_imm16 => 2,
                    iced_x86::Code::Retnd | iced_x86::Code::Retnd_imm16 => 4,
                    _ => 8,
                };
                known(on_stack(cpu, bytes, memory))
            }
            Mnemonic::Iretq => known(on_stack(cpu, 8, memory)),
            Mnemonic::Iretd => known(on_stack(cpu, 4, memory)),
            Mnemonic::Sysretq => known(Some(cpu.gpr[1])),
            Mnemonic::Sysret => known(Some(cpu.gpr[1] & 0xFFFF_FFFF)),
            _ => Leads::Anywhere,
        },
        _ => Leads::Anywhere,
    }
}

/// The target of an indirect branch.
fn operand(instruction: &Instruction, cpu: &CpuState, memory: &mut dyn GuestMemory) -> Option<u64> {
    if instruction.op0_kind() == OpKind::Register {
        return register(cpu, instruction.op0_register());
    }
    let size = instruction.memory_size().size();
    let address = instruction.virtual_address(0, 0, |name, _, _| register(cpu, name))?;
    read_number(address, size, memory)
}

/// What a return of `bytes` finds on the stack.
fn on_stack(cpu: &CpuState, bytes: usize, memory: &mut dyn GuestMemory) -> Option<u64> {
    let mask = if cpu.size == CodeSize::Bits64 {
        u64::MAX
    } else {
        0xFFFF_FFFF
    };
    read_number(
        cpu.segment_bases[2].wrapping_add(cpu.gpr[4] & mask),
        bytes,
        memory,
    )
}

fn read_number(linear: u64, bytes: usize, memory: &mut dyn GuestMemory) -> Option<u64> {
    let mut buffer = [0; 8];
    let wanted = buffer.get_mut(..bytes)?;
    (memory.read(linear, wanted) == bytes).then(|| u64::from_le_bytes(buffer))
}

/// A general-purpose register's value, or a segment's base.
fn register(cpu: &CpuState, name: Register) -> Option<u64> {
    let full = name.full_register();
    if full.is_gpr64() {
        let value = cpu.gpr[full as usize - Register::RAX as usize];
        return Some(match name.size() {
            8 => value,
            4 => value & 0xFFFF_FFFF,
            _ => value & 0xFFFF,
        });
    }
    match name {
        Register::ES => Some(cpu.segment_bases[0]),
        Register::CS => Some(cpu.segment_bases[1]),
        Register::SS => Some(cpu.segment_bases[2]),
        Register::DS => Some(cpu.segment_bases[3]),
        Register::FS => Some(cpu.segment_bases[4]),
        Register::GS => Some(cpu.segment_bases[5]),
        _ => None,
    }
}

/// Whether a conditional branch is taken.
fn is_taken(instruction: &Instruction, cpu: &CpuState) -> bool {
    let flag = |bit: u64| cpu.rflags & bit != 0;
    let count = cpu.gpr[1] & address_mask(instruction);
    match instruction.mnemonic() {
        Mnemonic::Jcxz | Mnemonic::Jecxz | Mnemonic::Jrcxz => return count == 0,
        Mnemonic::Loop => return count != 1,
        Mnemonic::Loope => return count != 1 && flag(ZF),
        Mnemonic::Loopne => return count != 1 && !flag(ZF),
        _ => {}
    }
    match instruction.condition_code() {
        ConditionCode::o => flag(OF),
        ConditionCode::no => !flag(OF),
        ConditionCode::b => flag(CF),
        ConditionCode::ae => !flag(CF),
        ConditionCode::e => flag(ZF),
        ConditionCode::ne => !flag(ZF),
        ConditionCode::be => flag(CF) || flag(ZF),
        ConditionCode::a => !flag(CF) && !flag(ZF),
        ConditionCode::s => flag(SF),
        ConditionCode::ns => !flag(SF),
        ConditionCode::p => flag(PF),
        ConditionCode::np => !flag(PF),
        ConditionCode::l => flag(SF) != flag(OF),
        ConditionCode::ge => flag(SF) == flag(OF),
        ConditionCode::le => flag(ZF) || flag(SF) != flag(OF),
        ConditionCode::g => !flag(ZF) && flag(SF) == flag(OF),
        ConditionCode::None => false,
    }
}

fn is_branch(instruction: &Instruction) -> bool {
    match instruction.flow_control() {
        FlowControl::Next | FlowControl::Exception | FlowControl::XbeginXabortXend => false,
        FlowControl::Call => {
            // VMCALL, VMLAUNCH and other ways into a monitor are none.
            matches!(
                instruction.mnemonic(),
                Mnemonic::Call | Mnemonic::Syscall | Mnemonic::Sysenter
            )
        }
        FlowControl::Interrupt => software_interrupt(instruction).is_some(),
        _ => true,
    }
}

/// Whether a branch stays in its code segment.
fn is_near(instruction: &Instruction) -> bool {
    let far = instruction.is_jmp_far()
        || instruction.is_call_far()
        || instruction.is_jmp_far_indirect()
        || instruction.is_call_far_indirect();
    !far && matches!(
        instruction.flow_control(),
        FlowControl::ConditionalBranch
            | FlowControl::UnconditionalBranch
            | FlowControl::IndirectBranch
            | FlowControl::IndirectCall
            | FlowControl::Call
            | FlowControl::Return
    ) && !matches!(
        instruction.mnemonic(),
        Mnemonic::Syscall
            | Mnemonic::Sysenter
            | Mnemonic::Sysret
            | Mnemonic::Sysretq
            | Mnemonic::Sysexit
            | Mnemonic::Sysexitq
            | Mnemonic::Iret
            | Mnemonic::Iretd
            | Mnemonic::Iretq
            | Mnemonic::Retf
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Code at fixed places, a table with gates for a fault, an NMI and a vector of a device.
    const CODE: u64 = 0x1000;
    const GP_HANDLER: u64 = 0x2000;
    const NMI_HANDLER: u64 = 0x2100;
    const DEVICE_HANDLER: u64 = 0x2200;
    const SYSTEM_CALL: u64 = 0x3000;

    struct Memory(Vec<(u64, Vec<u8>)>);

    impl Memory {
        fn new(code: &[u8]) -> Self {
            Self(vec![
                (CODE, code.to_vec()),
                (GP_HANDLER, vec![0x50, 0x90]),              // push rax; nop
                (NMI_HANDLER, vec![0x48, 0xFF, 0xC0, 0x90]), // inc rax; nop
                (DEVICE_HANDLER, vec![0xEB, 0x10]),          // jmp +0x10
            ])
        }
    }

    impl GuestMemory for Memory {
        fn read(&mut self, linear: u64, buffer: &mut [u8]) -> usize {
            for (start, bytes) in &self.0 {
                if let Some(rest) = linear.checked_sub(*start).and_then(|at| bytes.get(at as usize..)) {
                    let n = rest.len().min(buffer.len());
                    buffer[..n].copy_from_slice(&rest[..n]);
                    return n;
                }
            }
            0
        }

        fn gate(&mut self, vector: u8) -> Option<u64> {
            match vector {
                13 => Some(GP_HANDLER),
                2 => Some(NMI_HANDLER),
                0x40 => Some(DEVICE_HANDLER),
                _ => None,
            }
        }
    }

    fn at(rip: u64, cpl: u8) -> CpuState {
        CpuState {
            rip,
            rflags: 2,
            cpl,
            size: CodeSize::Bits64,
            gpr: [0; 16],
            segment_bases: [0; 6],
        }
    }

    /// One step of `code` at CPL 0, to `to`.
    fn step(code: &[u8], to: u64) -> Step {
        step_from(&mut StepMeter::new(Vendor::Intel), code, at(CODE, 0), at(to, 0))
    }

    fn step_from(meter: &mut StepMeter, code: &[u8], from: CpuState, to: CpuState) -> Step {
        let mut memory = Memory::new(code);
        meter.begin(&from, &mut memory);
        assert!(meter.in_step());
        let step = meter.end(&to, &mut memory);
        assert!(!meter.in_step());
        step
    }

    fn kernel(instructions: u32) -> Counts {
        Counts {
            instructions,
            ..Counts::default()
        }
    }

    const NOP: &[u8] = &[0x90];
    const RDMSR: &[u8] = &[0x0F, 0x32];
    const UD2: &[u8] = &[0x0F, 0x0B];
    const HLT: &[u8] = &[0xF4];
    const SYSCALL: &[u8] = &[0x0F, 0x05];
    const MOV_SS_EAX_NOP: &[u8] = &[0x8E, 0xD0, 0x90];
    const REP_MOVSB: &[u8] = &[0xF3, 0xA4];

    #[test]
    fn an_instruction_that_completes_counts_once() {
        assert_eq!(
            step(NOP, CODE + 1),
            Step {
                kernel: kernel(1),
                ..Step::default()
            }
        );
        let user = step_from(
            &mut StepMeter::new(Vendor::Intel),
            NOP,
            at(CODE, 3),
            at(CODE + 1, 3),
        );
        assert_eq!(
            user,
            Step {
                user: kernel(1),
                ..Step::default()
            }
        );
    }

    #[test]
    fn an_instruction_that_faults_does_not_count_and_its_handler_does() {
        // Stopped at the handler's first instruction, or behind it.
        assert_eq!(
            step(RDMSR, GP_HANDLER),
            Step {
                event: true,
                ..Step::default()
            }
        );
        let behind = step(RDMSR, GP_HANDLER + 1);
        assert_eq!(
            behind.kernel,
            Counts {
                instructions: 1,
                stores: 1,
                ..Counts::default()
            }
        );
        assert!(behind.event && !behind.lost);
        // UD2 never completes, not even where no gate tells.
        assert_eq!(
            step(UD2, 0x9000),
            Step {
                event: true,
                lost: true,
                ..Step::default()
            }
        );
    }

    #[test]
    fn an_interrupt_before_the_instruction_leaves_it_for_later() {
        let mut meter = StepMeter::new(Vendor::Intel);
        let interrupted = step_from(&mut meter, NOP, at(CODE, 3), at(NMI_HANDLER + 3, 0));
        assert_eq!(
            interrupted,
            Step {
                kernel: kernel(1),
                event: true,
                ..Step::default()
            }
        );
        // The handler has returned.
        let later = step_from(&mut meter, NOP, at(CODE, 3), at(CODE + 1, 3));
        assert_eq!(
            later,
            Step {
                user: kernel(1),
                ..Step::default()
            }
        );
    }

    #[test]
    fn a_handler_that_begins_with_a_jump_is_recognised_behind_it() {
        let behind = step(NOP, DEVICE_HANDLER + 0x12);
        let jump = Counts {
            instructions: 1,
            branches: 1,
            taken_branches: 1,
            ..Counts::default()
        };
        assert_eq!(
            behind,
            Step {
                kernel: jump,
                event: true,
                ..Step::default()
            }
        );
    }

    #[test]
    fn on_amd_an_interrupt_is_a_taken_branch() {
        let interrupted = step_from(
            &mut StepMeter::new(Vendor::Amd),
            NOP,
            at(CODE, 3),
            at(NMI_HANDLER, 0),
        );
        let branch = Counts {
            branches: 1,
            taken_branches: 1,
            ..Counts::default()
        };
        assert_eq!(
            interrupted,
            Step {
                kernel: branch,
                event: true,
                ..Step::default()
            }
        );
    }

    #[test]
    fn a_shadow_hides_one_stop() {
        assert_eq!(step(MOV_SS_EAX_NOP, CODE + 3).kernel.instructions, 2);
        assert_eq!(step(MOV_SS_EAX_NOP, CODE + 2).kernel.instructions, 1);
        let mut meter = StepMeter::new(Vendor::Intel);
        assert_eq!(
            meter.begin(&at(CODE, 0), &mut Memory::new(MOV_SS_EAX_NOP)),
            Ahead::Shadow
        );
    }

    #[test]
    fn hlt_counts_when_it_halts_and_not_when_it_faults() {
        assert_eq!(step(HLT, CODE + 1).kernel.instructions, 1);
        // Woken by an interrupt whose handler's first instruction ran as well.
        let woken = step(HLT, NMI_HANDLER + 3);
        assert_eq!(
            woken,
            Step {
                kernel: kernel(2),
                event: true,
                ..Step::default()
            }
        );
        let denied = step_from(
            &mut StepMeter::new(Vendor::Intel),
            HLT,
            at(CODE, 3),
            at(GP_HANDLER, 0),
        );
        assert_eq!(
            denied,
            Step {
                event: true,
                ..Step::default()
            }
        );
    }

    #[test]
    fn ways_into_the_kernel_count_where_they_began() {
        let call = step_from(
            &mut StepMeter::new(Vendor::Intel),
            SYSCALL,
            at(CODE, 3),
            at(SYSTEM_CALL, 0),
        );
        assert_eq!(
            call.user,
            Counts {
                instructions: 1,
                branches: 1,
                ..Counts::default()
            }
        );
        assert_eq!(call.kernel, Counts::default());
        let int = step_from(
            &mut StepMeter::new(Vendor::Amd),
            &[0xCD, 0x02],
            at(CODE, 3),
            at(NMI_HANDLER + 3, 0),
        );
        assert_eq!(
            (int.user.instructions, int.user.branches, int.user.taken_branches),
            (1, 1, 1)
        );
        assert_eq!(int.kernel, kernel(1), "and the handler's first instruction");
        // INT n through a gate that is not for CPL 3.
        let denied = step_from(
            &mut StepMeter::new(Vendor::Intel),
            &[0xCD, 0x02],
            at(CODE, 3),
            at(GP_HANDLER, 0),
        );
        assert_eq!(
            denied,
            Step {
                event: true,
                ..Step::default()
            }
        );
    }

    #[test]
    fn iret_leads_where_the_stack_says_or_faults() {
        let iretq = &[0x48, 0xCF];
        let mut stack = [0; 40];
        stack[..8].copy_from_slice(&0x7777u64.to_le_bytes());
        let mut from = at(CODE, 0);
        from.gpr[4] = 0x8000;
        for (to, counted) in [(0x7777, 1), (GP_HANDLER, 0)] {
            let mut memory = Memory::new(iretq);
            memory.0.push((0x8000, stack.to_vec()));
            let mut meter = StepMeter::new(Vendor::Intel);
            assert_eq!(meter.begin(&from, &mut memory), Ahead::InterruptReturn);
            assert_eq!(meter.end(&at(to, 3), &mut memory).kernel.instructions, counted);
        }
    }

    #[test]
    fn a_repeated_instruction_counts_at_its_end_with_any_interrupts_between() {
        let count = |rip, rcx| {
            let mut state = at(rip, 0);
            state.gpr[1] = rcx;
            state
        };
        let mut meter = StepMeter::new(Vendor::Intel);
        let mut step = |from, to| step_from(&mut meter, REP_MOVSB, from, to);
        assert_eq!(step(count(CODE, 3), count(CODE, 2)), Step::default());
        let interrupted = step(count(CODE, 2), count(NMI_HANDLER, 1));
        assert_eq!(
            interrupted,
            Step {
                event: true,
                ..Step::default()
            }
        );
        assert_eq!(
            step(count(NMI_HANDLER, 1), count(NMI_HANDLER + 3, 1)).kernel,
            kernel(1)
        );
        // Resumed with one iteration left, which leaves RIP at the instruction; the last step only finds RCX at 0.
        assert_eq!(step(count(CODE, 1), count(CODE, 0)), Step::default());
        let end = step(count(CODE, 0), count(CODE + 2, 0));
        assert_eq!(
            end.kernel,
            Counts {
                instructions: 1,
                loads: 1,
                stores: 1,
                ..Counts::default()
            }
        );
        // The same with nothing to do from the beginning.
        let idle = step(count(CODE, 0), count(CODE + 2, 0));
        assert_eq!(idle.kernel, kernel(1));
    }

    #[test]
    fn what_cannot_be_explained_is_said_and_not_counted() {
        assert_eq!(
            step(NOP, 0x5555),
            Step {
                event: true,
                lost: true,
                ..Step::default()
            }
        );
        // Code that cannot be read faults.
        let mut meter = StepMeter::new(Vendor::Intel);
        let unreadable = step_from(&mut meter, NOP, at(0x9999_0000, 0), at(GP_HANDLER, 0));
        assert_eq!(
            unreadable,
            Step {
                event: true,
                ..Step::default()
            }
        );
        // Nothing moved.
        assert_eq!(step(NOP, CODE), Step::default());
    }

    #[test]
    fn a_step_that_was_not_begun_or_was_abandoned_counts_nothing() {
        let mut meter = StepMeter::new(Vendor::Intel);
        let mut memory = Memory::new(NOP);
        assert_eq!(meter.end(&at(CODE + 1, 0), &mut memory), Step::default());
        meter.begin(&at(CODE, 0), &mut memory);
        meter.abandon();
        assert_eq!(meter.end(&at(CODE + 1, 0), &mut memory), Step::default());
    }

    #[test]
    fn what_was_retired_is_fed_at_its_level() {
        let counts = FedCounts::new(fed::SELECTORS);
        let step = Step {
            user: Counts {
                instructions: 2,
                branches: 1,
                taken_branches: 0,
                loads: 1,
                stores: 2,
            },
            kernel: kernel(1),
            ..Step::default()
        };
        assert!(!step.feed(&counts));
        for (event, total) in [
            (ArchEvent::Instructions, 3),
            (ArchEvent::Branches, 1),
            (ArchEvent::TakenBranches, 0),
            (ArchEvent::Loads, 1),
            (ArchEvent::Stores, 2),
        ] {
            assert_eq!(counts.total(fed::exact(event).unwrap()), total, "{event:?}");
        }
    }
}
