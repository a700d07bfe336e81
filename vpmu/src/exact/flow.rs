//! Control-flow analysis: branch targets and classification of instructions.

use iced_x86::{
    ConditionCode, Decoder, DecoderOptions, FlowControl, Instruction, Mnemonic, OpKind, Register,
};

use perf_core::branch::BranchKind;

use super::cpu::{CodeSegmentMode, InstructionClass, SteppedCpuState, SteppedGuestMemory};

/// Maximum instruction length, in bytes.
const MAX_INSTRUCTION_BYTES: usize = 15;

const CF: u64 = 1;
const PF: u64 = 1 << 2;
const ZF: u64 = 1 << 6;
const SF: u64 = 1 << 7;
const OF: u64 = 1 << 11;

/// Predicted address of the next instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NextAddress {
    /// The address of the next instruction. The flag is `true` if the current instruction is a
    /// branch that is taken.
    To(u64, bool),
    /// The address of the next instruction is unpredictable.
    Unpredictable,
}

pub(super) fn decode(
    cpu: &SteppedCpuState,
    rip: u64,
    memory: &mut dyn SteppedGuestMemory,
) -> Option<Instruction> {
    let mut bytes = [0; MAX_INSTRUCTION_BYTES];
    let read = memory
        .read(rip.wrapping_add(cpu.segment_bases[1]), &mut bytes)
        .min(MAX_INSTRUCTION_BYTES);
    let mut decoder = Decoder::with_ip(cpu.size.bits(), &bytes[..read], rip, DecoderOptions::NONE);
    let instruction = decoder.decode();
    (!instruction.is_invalid()).then_some(instruction)
}

/// Classifies an instruction for a VMM that is about to single-step it.
pub(super) fn classify(instruction: &Instruction) -> InstructionClass {
    match instruction.mnemonic() {
        Mnemonic::Mov | Mnemonic::Pop
            if instruction.op0_kind() == OpKind::Register && instruction.op0_register() == Register::SS =>
        {
            InstructionClass::Shadow
        }
        // KVM's software emulator does not stop after these instructions.
        Mnemonic::Lfence | Mnemonic::Mfence | Mnemonic::Sfence | Mnemonic::Swapgs => InstructionClass::Shadow,
        Mnemonic::Syscall | Mnemonic::Sysenter => InstructionClass::SystemCall,
        Mnemonic::Iret | Mnemonic::Iretd | Mnemonic::Iretq => InstructionClass::InterruptReturn,
        Mnemonic::Hlt => InstructionClass::Halt,
        Mnemonic::Popf
        | Mnemonic::Popfd
        | Mnemonic::Popfq
        | Mnemonic::Pushf
        | Mnemonic::Pushfd
        | Mnemonic::Pushfq => InstructionClass::Flags,
        _ => software_interrupt(instruction).map_or(InstructionClass::Plain, InstructionClass::Interrupt),
    }
}

/// Returns the interrupt vector of a software interrupt, or `None` for another instruction.
pub(super) fn software_interrupt(instruction: &Instruction) -> Option<u8> {
    match instruction.mnemonic() {
        Mnemonic::Int => Some(instruction.immediate8()),
        Mnemonic::Int1 => Some(1),
        Mnemonic::Int3 => Some(3),
        Mnemonic::Into => Some(4),
        _ => None,
    }
}

pub(super) fn is_repeated(instruction: &Instruction) -> bool {
    instruction.is_string_instruction() && (instruction.has_rep_prefix() || instruction.has_repne_prefix())
}

/// Returns the number of remaining iterations of a repeated string instruction: the value of its
/// count register.
pub(super) fn element_count(instruction: &Instruction, cpu: &SteppedCpuState) -> u64 {
    cpu.gpr[1] & address_mask(instruction)
}

/// Returns a mask as wide as the instruction's address size, which is also the size of its count
/// register.
fn address_mask(instruction: &Instruction) -> u64 {
    let code = instruction.code();
    // The address size is that of the operands of a string instruction, or of the counter of JrCXZ
    // and LOOP.
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

/// Predicts the address of the next instruction from the state `cpu`, assuming that `instruction`
/// completes.
pub(super) fn next_address(
    instruction: &Instruction,
    cpu: &SteppedCpuState,
    memory: &mut dyn SteppedGuestMemory,
) -> NextAddress {
    let next = instruction.next_ip();
    let known = |target: Option<u64>| {
        target.map_or(NextAddress::Unpredictable, |target| NextAddress::To(target, true))
    };
    match instruction.flow_control() {
        FlowControl::Next => NextAddress::To(next, false),
        FlowControl::ConditionalBranch => {
            let taken = is_taken(instruction, cpu);
            NextAddress::To(
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
                    NextAddress::To(instruction.near_branch_target(), true)
                }
                // The decoder classifies VMCALL and similar instructions as calls, but execution
                // continues at the next instruction.
                _ => NextAddress::To(next, false),
            }
        }
        FlowControl::IndirectBranch | FlowControl::IndirectCall if is_near(instruction) => {
            known(indirect_target(instruction, cpu, memory))
        }
        FlowControl::Return => match instruction.mnemonic() {
            Mnemonic::Ret => {
                let bytes = match instruction.code() {
                    iced_x86::Code::Retnw | iced_x86::Code::Retnw_imm16 => 2,
                    iced_x86::Code::Retnd | iced_x86::Code::Retnd_imm16 => 4,
                    _ => 8,
                };
                known(return_address(cpu, bytes, memory))
            }
            Mnemonic::Iretq => known(return_address(cpu, 8, memory)),
            Mnemonic::Iretd => known(return_address(cpu, 4, memory)),
            Mnemonic::Iret => known(return_address(cpu, 2, memory)),
            Mnemonic::Sysretq => known(Some(cpu.gpr[1])),
            Mnemonic::Sysret => known(Some(cpu.gpr[1] & 0xFFFF_FFFF)),
            _ => NextAddress::Unpredictable,
        },
        _ => NextAddress::Unpredictable,
    }
}

/// Returns the target address of an indirect branch, or `None` if it cannot be read.
fn indirect_target(
    instruction: &Instruction,
    cpu: &SteppedCpuState,
    memory: &mut dyn SteppedGuestMemory,
) -> Option<u64> {
    if instruction.op0_kind() == OpKind::Register {
        return register(cpu, instruction.op0_register());
    }
    let size = instruction.memory_size().size();
    let address = instruction.virtual_address(0, 0, |name, _, _| register(cpu, name))?;
    read_number(address, size, memory)
}

/// Returns the return address on the stack for a return that pops `bytes`.
fn return_address(cpu: &SteppedCpuState, bytes: usize, memory: &mut dyn SteppedGuestMemory) -> Option<u64> {
    // Mixed 16-bit code and 32-bit stacks (or the reverse) only occur in rare compatibility code.
    let mask = match cpu.size {
        CodeSegmentMode::Bits16 => 0xFFFF,
        CodeSegmentMode::Bits32 => 0xFFFF_FFFF,
        CodeSegmentMode::Bits64 => u64::MAX,
    };
    read_number(
        cpu.segment_bases[2].wrapping_add(cpu.gpr[4] & mask),
        bytes,
        memory,
    )
}

fn read_number(linear: u64, bytes: usize, memory: &mut dyn SteppedGuestMemory) -> Option<u64> {
    let mut buffer = [0; 8];
    let wanted = buffer.get_mut(..bytes)?;
    (memory.read(linear, wanted) == bytes).then(|| u64::from_le_bytes(buffer))
}

/// Returns the value of the general-purpose register `name`, or the base of the segment register
/// `name`.
fn register(cpu: &SteppedCpuState, name: Register) -> Option<u64> {
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

/// Returns whether a conditional branch is taken with the flags and registers in `cpu`.
fn is_taken(instruction: &Instruction, cpu: &SteppedCpuState) -> bool {
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

/// Returns the branch type of `instruction`, which must be a branch.
pub(super) fn branch_kind(instruction: &Instruction) -> BranchKind {
    match instruction.mnemonic() {
        Mnemonic::Syscall | Mnemonic::Sysenter => return BranchKind::SystemCall,
        Mnemonic::Sysret | Mnemonic::Sysretq | Mnemonic::Sysexit | Mnemonic::Sysexitq => {
            return BranchKind::SystemReturn;
        }
        Mnemonic::Iret | Mnemonic::Iretd | Mnemonic::Iretq => return BranchKind::InterruptReturn,
        _ => {}
    }
    match instruction.flow_control() {
        FlowControl::ConditionalBranch => BranchKind::Conditional,
        FlowControl::UnconditionalBranch => BranchKind::Unconditional,
        FlowControl::IndirectBranch => BranchKind::Indirect,
        FlowControl::Call => BranchKind::Call,
        FlowControl::IndirectCall => BranchKind::IndirectCall,
        FlowControl::Return => BranchKind::Return,
        FlowControl::Interrupt | FlowControl::Exception => BranchKind::Interrupt,
        FlowControl::Next | FlowControl::XbeginXabortXend => BranchKind::Unknown,
    }
}

pub(super) fn is_branch(instruction: &Instruction) -> bool {
    match instruction.flow_control() {
        FlowControl::Next | FlowControl::Exception | FlowControl::XbeginXabortXend => false,
        FlowControl::Call => {
            // VMCALL, VMLAUNCH and other hypervisor calls are not branches.
            matches!(
                instruction.mnemonic(),
                Mnemonic::Call | Mnemonic::Syscall | Mnemonic::Sysenter
            )
        }
        FlowControl::Interrupt => software_interrupt(instruction).is_some(),
        _ => true,
    }
}

/// Returns whether the target of a branch is in the same code segment.
pub(super) fn is_near(instruction: &Instruction) -> bool {
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
