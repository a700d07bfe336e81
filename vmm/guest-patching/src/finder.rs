//! Detection of RDPMC instructions (0F 33) in a kernel's text. The same byte pair may also occur
//! inside another instruction. Prefixes before the pair (operand and address size, REP, segments,
//! REX) belong to the instruction and do not change its meaning.
//!
//! The finder decides by the following evidence, strongest first:
//! 1. Instruction boundaries from the kernel's ORC unwind table, which has an entry for each change
//!    of the stack layout. Decoding from the nearest boundary before the pair is conclusive: the
//!    pair is an instruction only if decoding reaches it.
//! 2. Symbol addresses, used in the same way.
//! 3. Without boundaries and symbols, decoding from many start addresses before the pair. x86
//!    decoding synchronizes within a few instructions, so nearly all starts must reach the pair. In
//!    addition, the surrounding code must be plausible: ECX is set before the pair, and EAX or EDX
//!    is used after it.

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpAccess,
    Register,
};

use kernel_images::elf::CodeBytes;
use kernel_images::symbols::KernelSymbols;

/// I/O port that a patched RDPMC writes to. No PC device uses this port. The nearest device is the
/// interrupt controller, at ports 0x20 and 0x21.
///
/// The number is the second byte of [`RDPMC`], so the trap differs from RDPMC in its first byte
/// only. One byte is written atomically at any alignment.
pub const TRAP_PORT: u16 = 0x33;
/// Opcode bytes of RDPMC without prefixes.
pub const RDPMC: [u8; 2] = [0x0F, 0x33];
/// Machine code of the trap, `out TRAP_PORT, al`.
pub const TRAP: [u8; 2] = [0xE6, TRAP_PORT.to_le_bytes()[0]];
const _: () = assert!(TRAP[1] == RDPMC[1]);

/// Maximum instruction length, in bytes (SDM vol. 2 §2.3.11).
pub const MAX_INSTRUCTION_BYTES: usize = 15;

/// Address range of the kernel's executable text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelTextRange {
    /// Link-time address of the first byte of the text.
    pub virt: u64,
    /// Guest-physical address of the first byte of the text.
    pub phys: u64,
    /// Length of the text, in bytes.
    pub len_bytes: u64,
}

/// Code sizes (32 or 64 bits) in which a guest may execute the code of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionBitness {
    /// 64-bit code only, as in a Linux kernel.
    Only64,
    /// 32- or 64-bit code. A multiboot image starts in 32-bit mode and may switch to 64-bit mode.
    Either,
}

impl InstructionBitness {
    fn modes(self) -> &'static [u32] {
        match self {
            InstructionBitness::Only64 => &[64],
            InstructionBitness::Either => &[64, 32],
        }
    }
}

/// RDPMC instruction that can be patched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RdpmcSite {
    /// Link-time address of the first byte of the instruction, which may be a prefix.
    pub virt: u64,
    /// Guest-physical address of the first byte of the instruction, which may be a prefix.
    pub phys: u64,
    /// Length of the instruction in bytes: two opcode bytes and the prefixes.
    pub length: u8,
    /// Number of bytes directly before `virt` that are prefixes of the instruction in 64-bit code
    /// but separate instructions in 32-bit code.
    pub prefix_len: u8,
    /// `true` if a port write of the guest itself may directly precede or follow the instruction.
    /// An exit at this address may then be caused by either instruction.
    pub next_to_port_write: bool,
    /// Kernel symbol that contains the instruction, and the offset of the instruction from it, in
    /// bytes.
    pub symbol: Option<(String, u64)>,
}

impl RdpmcSite {
    /// Returns the guest-physical address of the two opcode bytes, which are the last bytes of the
    /// instruction and are replaced by the trap.
    pub fn opcode(&self) -> u64 {
        self.phys + u64::from(self.length) - RDPMC.len() as u64
    }

    /// Returns the location of the instruction as `symbol+offset`, or as an address if the symbol
    /// is unknown.
    pub fn location(&self) -> String {
        match &self.symbol {
            Some((name, offset)) => format!("{name}+{offset:#x}"),
            None => format!("{:#x}", self.virt),
        }
    }
}

/// Maximum distance from a known instruction boundary to a byte pair 0F 33 after it, in bytes.
/// Decoding starts only at a boundary within this distance.
const MAX_ANCHOR_DISTANCE: u64 = 16 * 1024;
/// Distance in bytes from the first start address of a decoding sweep to the byte pair 0F 33. A
/// sweep decodes from many addresses before the pair.
const SWEEP_FAR: usize = 160;
/// Distance in bytes from the last start address of a decoding sweep to the byte pair 0F 33.
/// Decoding synchronizes with the instruction boundaries within this distance.
const SWEEP_NEAR: usize = 48;
/// Minimum percentage of the usable start addresses from which a decoding sweep must reach the byte
/// pair 0F 33 as an RDPMC instruction.
const SWEEP_AGREE_PERCENT: usize = 90;
/// Minimum number of usable start addresses of a decoding sweep.
const SWEEP_MIN_STARTS: usize = 16;
/// Number of instructions before the byte pair 0F 33, and number of instructions after it, in which
/// uses of RDPMC's registers are searched for.
const NEIGHBOURS: usize = 10;
/// Number of instructions after the byte pair 0F 33 that must decode.
const MUST_DECODE_AFTER: usize = 4;

/// Result of decoding from one start address up to a byte pair 0F 33.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// The byte pair 0F 33 ends an RDPMC instruction that starts at this offset: at the pair
    /// itself, or at a prefix before it.
    Instruction(usize),
    NotInstruction,
    /// Decoding reached invalid bytes before the pair, so this start address proves nothing.
    Unknown,
}

/// Returns all RDPMC instructions in `texts`, sorted by address.
#[expect(
    clippy::cast_possible_truncation,
    reason = "an instruction has at most 15 bytes"
)]
pub fn find(
    texts: &[CodeBytes<'_>],
    symbols: &KernelSymbols,
    boundaries: &[u64],
    bits: InstructionBitness,
) -> Vec<RdpmcSite> {
    let mut sites = Vec::new();
    let mut pairs = 0usize;
    for text in texts {
        for offset in memchr::memmem::find_iter(text.bytes, &RDPMC) {
            pairs += 1;
            let Some(start) = instruction(text, offset, symbols, boundaries, bits) else {
                continue;
            };
            // In 32-bit code a REX prefix is a separate INC or DEC instruction.
            let rex = text.bytes[start..offset].last().is_some_and(|b| b & 0xF0 == 0x40);
            let (start, lead) = match bits {
                InstructionBitness::Either if rex => (offset, offset - start),
                _ => (start, 0),
            };
            let virt = text.virt + start as u64;
            let length = offset + RDPMC.len() - start;
            sites.push(RdpmcSite {
                virt,
                phys: text.phys + start as u64,
                length: length as u8,
                prefix_len: lead as u8,
                next_to_port_write: next_to_port_write(text.bytes, start, length, bits.modes()),
                symbol: symbols
                    .resolve_flat(virt)
                    .map(|(symbol, at)| (symbol.name.to_owned(), at)),
            });
        }
    }
    sites.sort_by_key(|s| s.virt);
    sites.dedup_by_key(|s| s.phys);
    log::debug!(
        "{} RDPMC instructions among {pairs} byte pairs 0f 33",
        sites.len()
    );
    sites
}

/// Returns whether `code`, decoded for `mode` bits, starts with a port write that may target
/// [`TRAP_PORT`].
pub fn is_out(code: &[u8], mode: u32) -> bool {
    let instruction = Decoder::new(mode, code, DecoderOptions::NONE).decode();
    match instruction.code() {
        Code::Out_imm8_AL | Code::Out_imm8_AX | Code::Out_imm8_EAX => {
            u16::from(instruction.immediate8()) == TRAP_PORT
        }
        _ => matches!(
            instruction.mnemonic(),
            Mnemonic::Out | Mnemonic::Outsb | Mnemonic::Outsw | Mnemonic::Outsd
        ),
    }
}

/// Returns whether the bytes before or after an instruction may be an OUT instruction of the guest
/// itself, which would cause the same exit as the trap that replaces an RDPMC.
fn next_to_port_write(bytes: &[u8], start: usize, length: usize, modes: &[u32]) -> bool {
    let (before, behind) = (&bytes[..start], &bytes[start + length..]);
    let ends_in_out = match *before {
        // OUT to DX, including the string variants.
        [.., 0xEE | 0xEF | 0x6E | 0x6F] => true,
        [.., 0xE6 | 0xE7, port] => u16::from(port) == TRAP_PORT,
        _ => false,
    };
    ends_in_out || modes.iter().any(|mode| is_out(behind, *mode))
}

/// Returns the offset of the first byte of the RDPMC instruction that ends with the byte pair 0F 33
/// at `offset` in `text`. Returns `None` if the pair is not the end of an RDPMC instruction.
#[expect(clippy::cast_possible_truncation, reason = "x86-64 only: usize has 64 bits")]
fn instruction(
    text: &CodeBytes<'_>,
    offset: usize,
    symbols: &KernelSymbols,
    boundaries: &[u64],
    bits: InstructionBitness,
) -> Option<usize> {
    let modes = bits.modes();
    let virt = text.virt + offset as u64;
    let orc = boundaries
        .partition_point(|b| *b <= virt)
        .checked_sub(1)
        .map(|i| boundaries[i]);
    // In a multiboot image, a symbol may label data in the text. The code around an RDPMC that is
    // found from a symbol must then also be plausible.
    for (anchor, needs_neighbours) in [
        (orc, false),
        (symbols.text_before(virt), bits == InstructionBitness::Either),
    ] {
        let Some(start) = anchor
            .filter(|a| virt - a <= MAX_ANCHOR_DISTANCE)
            .and_then(|a| a.checked_sub(text.virt))
        else {
            continue;
        };
        let verdicts = modes
            .iter()
            .map(|m| (*m, from_boundary(text, start as usize, offset, *m)));
        let mut known = false;
        for (mode, verdict) in verdicts {
            match verdict {
                Verdict::Instruction(at)
                    if !needs_neighbours || has_plausible_context(text, start as usize, at, mode) =>
                {
                    return Some(at);
                }
                Verdict::Instruction(_) | Verdict::NotInstruction => known = true,
                Verdict::Unknown => {}
            }
        }
        if known {
            return None;
        }
    }
    modes.iter().find_map(|mode| by_sweep(text, offset, *mode))
}

fn decoder<'a>(text: &CodeBytes<'a>, start: usize, mode: u32) -> Decoder<'a> {
    Decoder::with_ip(
        mode,
        &text.bytes[start..],
        text.virt + start as u64,
        DecoderOptions::NONE,
    )
}

/// Decodes instructions from the boundary `start` up to the byte pair at `offset`, and determines
/// whether the pair ends an RDPMC instruction.
fn from_boundary(text: &CodeBytes<'_>, start: usize, offset: usize, mode: u32) -> Verdict {
    let mut decoder = decoder(text, start, mode);
    let mut instruction = Instruction::default();
    while start + decoder.position() <= offset {
        let at = start + decoder.position();
        decoder.decode_out(&mut instruction);
        if instruction.is_invalid() {
            return Verdict::Unknown;
        }
        if instruction.code() == Code::Rdpmc && at + instruction.len() == offset + RDPMC.len() {
            return Verdict::Instruction(at);
        }
    }
    Verdict::NotInstruction
}

/// Returns the offset of the instruction that ends at the byte pair at `offset`, if decoding from
/// nearly all start addresses before the pair reaches it and the surrounding code is plausible.
fn by_sweep(text: &CodeBytes<'_>, offset: usize, mode: u32) -> Option<usize> {
    let far = offset.saturating_sub(SWEEP_FAR);
    let near = offset.saturating_sub(SWEEP_NEAR);
    // For each possible length of prefixes before the pair: the first start address from which
    // decoding finds this instruction, and the number of such start addresses.
    let mut landed = [(0usize, 0usize); MAX_INSTRUCTION_BYTES];
    let mut usable = 0usize;
    for start in far..=near {
        match from_boundary(text, start, offset, mode) {
            Verdict::Unknown => {}
            Verdict::NotInstruction => usable += 1,
            Verdict::Instruction(at) => {
                usable += 1;
                let (first, starts) = &mut landed[offset - at];
                if *starts == 0 {
                    *first = start;
                }
                *starts += 1;
            }
        }
    }
    // Near the beginning of the text, too few start addresses exist, but the first byte of the text
    // is itself an instruction boundary.
    if far == 0 && near < SWEEP_MIN_STARTS {
        return match from_boundary(text, 0, offset, mode) {
            Verdict::Instruction(at) => has_plausible_context(text, 0, at, mode).then_some(at),
            _ => None,
        };
    }
    let (prefixes, &(start, starts)) = landed.iter().enumerate().max_by_key(|(_, l)| l.1)?;
    let at = offset - prefixes;
    let agreed = usable >= SWEEP_MIN_STARTS && starts * 100 >= usable * SWEEP_AGREE_PERCENT;
    (agreed && has_plausible_context(text, start, at, mode)).then_some(at)
}

/// Returns whether the code around the instruction at `offset`, decoded from `start`, sets ECX
/// before it, uses EAX or EDX after it, and continues with valid instructions.
fn has_plausible_context(text: &CodeBytes<'_>, start: usize, offset: usize, mode: u32) -> bool {
    let mut info = InstructionInfoFactory::new();
    let mut decoder = decoder(text, start, mode);
    let mut before: Vec<Instruction> = Vec::new();
    while start + decoder.position() < offset {
        before.push(decoder.decode());
    }
    let touches = |info: &mut InstructionInfoFactory, i: &Instruction, full: &[Register], write: bool| {
        info.info(i).used_registers().iter().any(|u| {
            let kind = match u.access() {
                OpAccess::Write | OpAccess::CondWrite => write,
                OpAccess::Read | OpAccess::CondRead => !write,
                OpAccess::ReadWrite | OpAccess::ReadCondWrite => true,
                _ => false,
            };
            kind && full.contains(&u.register().full_register())
        })
    };
    let sets_ecx = before
        .iter()
        .rev()
        .take(NEIGHBOURS)
        .any(|i| touches(&mut info, i, &[Register::RCX], true));
    if !sets_ecx || !decoder.can_decode() {
        return false;
    }
    let mut decoded = 0;
    // Skips the RDPMC instruction.
    let _ = decoder.decode();
    for _ in 0..NEIGHBOURS {
        if !decoder.can_decode() {
            return false;
        }
        let i = decoder.decode();
        if i.is_invalid() {
            return false;
        }
        decoded += 1;
        let leaves = matches!(
            i.flow_control(),
            FlowControl::Return | FlowControl::UnconditionalBranch | FlowControl::IndirectBranch
        );
        if leaves || touches(&mut info, &i, &[Register::RAX, Register::RDX], false) {
            return leaves || decoded >= MUST_DECODE_AFTER || continues_validly(&mut decoder, decoded);
        }
    }
    false
}

/// Returns whether the next instructions, up to [`MUST_DECODE_AFTER`], are valid or leave the
/// function.
fn continues_validly(decoder: &mut Decoder<'_>, decoded: usize) -> bool {
    for _ in decoded..MUST_DECODE_AFTER {
        if !decoder.can_decode() {
            return false;
        }
        let i = decoder.decode();
        if i.is_invalid() {
            return false;
        }
        if matches!(
            i.flow_control(),
            FlowControl::Return | FlowControl::UnconditionalBranch
        ) {
            return true;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernel_images::symbols::SymbolsBuilder;
    use proptest::prelude::*;

    /// Machine code of the Linux function `native_read_pmc`, as emitted by compilers.
    const FUNCTION: &[u8] = &[
        0x89, 0xF9, // mov ecx, edi
        0x0F, 0x33, // rdpmc
        0x48, 0xC1, 0xE2, 0x20, // shl rdx, 32
        0x48, 0x09, 0xD0, // or rax, rdx
        0xC3, // ret
    ];

    /// Returns plain code without an RDPMC instruction or its byte pair.
    fn filler(n: usize) -> Vec<u8> {
        let block = [
            0x55, 0x48, 0x89, 0xE5, // push rbp; mov rbp, rsp
            0x48, 0x83, 0xEC, 0x10, // sub rsp, 16
            0x8B, 0x47, 0x08, // mov eax, [rdi+8]
            0x85, 0xC0, // test eax, eax
            0x74, 0x02, // je +2
            0x31, 0xC0, // xor eax, eax
            0xC9, 0xC3, // leave; ret
        ];
        block.iter().copied().cycle().take(n * block.len()).collect()
    }

    fn one_symbol(address: u64, size_bytes: u32, name: &str) -> KernelSymbols {
        let mut builder = SymbolsBuilder::default();
        builder.add_sized(address, size_bytes, b't', name.as_bytes());
        builder.finish().unwrap()
    }

    fn search(
        bytes: &[u8],
        symbols: &KernelSymbols,
        boundaries: &[u64],
        bits: InstructionBitness,
    ) -> Vec<u64> {
        let text = CodeBytes {
            virt: 0x1000,
            phys: 0x20_1000,
            bytes,
        };
        find(&[text], symbols, boundaries, bits)
            .iter()
            .map(|s| s.virt - 0x1000)
            .collect()
    }

    #[test]
    fn rdpmc_is_found_without_symbols() {
        let mut code = filler(20);
        let at = code.len() as u64 + 2;
        code.extend_from_slice(FUNCTION);
        code.extend(filler(5));
        assert_eq!(
            search(&code, &KernelSymbols::default(), &[], InstructionBitness::Only64),
            [at]
        );
    }

    /// An RDPMC instruction starts at its first prefix, regardless of the evidence by which it is
    /// found.
    #[test]
    fn rdpmc_includes_its_prefixes() {
        for prefixes in [
            &[0x66][..],
            &[0x67],
            &[0xF2],
            &[0xF3],
            &[0x48],
            &[0x4F],
            &[0x2E],
            &[0x65],
            &[0x66, 0x67, 0xF3, 0x41],
        ] {
            let mut code = filler(20);
            let function = code.len() as u64;
            code.extend_from_slice(&FUNCTION[..2]);
            code.extend_from_slice(prefixes);
            code.extend_from_slice(&FUNCTION[2..]);
            code.extend(filler(5));
            let text = CodeBytes {
                virt: 0x1000,
                phys: 0x20_1000,
                bytes: &code,
            };
            for boundaries in [&[][..], &[0x1000 + function]] {
                let found = find(
                    &[text],
                    &KernelSymbols::default(),
                    boundaries,
                    InstructionBitness::Only64,
                );
                assert_eq!(found.len(), 1, "{prefixes:x?}");
                let site = &found[0];
                assert_eq!(
                    (site.virt, site.phys),
                    (0x1002 + function, 0x20_1002 + function),
                    "{prefixes:x?}"
                );
                assert_eq!(usize::from(site.length), prefixes.len() + 2);
            }
        }
        // LOCK is not a valid prefix and raises #UD.
        let mut code = filler(20);
        code.extend_from_slice(&[0x89, 0xF9, 0xF0, 0x0F, 0x33]);
        code.extend_from_slice(&FUNCTION[4..]);
        code.extend(filler(5));
        let at = 0x1000 + filler(20).len() as u64;
        assert_eq!(
            search(
                &code,
                &KernelSymbols::default(),
                &[at],
                InstructionBitness::Only64
            ),
            [] as [u64; 0]
        );
    }

    /// An OUT instruction of the guest itself next to an RDPMC is detected, because an exit there
    /// may have been caused by either instruction.
    #[test]
    fn adjacent_port_writes_are_detected() {
        for (before, behind, expected) in [
            (&[][..], &[][..], false),
            (&[0xEE], &[], true),
            (&[0xE6, 0x33], &[], true),
            (&[0xE6, 0x80], &[], false),
            (&[], &[0x66, 0xEF], true),
            (&[], &[0xE6, 0x33], true),
            (&[], &[0xE6, 0xF4], false),
            // No OUT instructions: shl rdx, 32, and a jump whose displacement contains the byte EE.
            (&[0x89, 0xF9], &[0x48, 0xC1, 0xE2, 0x20], false),
            (&[], &[0xE9, 0xEE, 0xEE, 0xEE, 0xEE], false),
        ] {
            let code = [before, &RDPMC, behind].concat();
            assert_eq!(
                next_to_port_write(&code, before.len(), 2, &[64]),
                expected,
                "{before:x?} {behind:x?}"
            );
        }
    }

    #[test]
    fn byte_pair_inside_operand_is_ignored() {
        for inside in [
            &[0xB8, 0x00, 0x0F, 0x33, 0x00][..],             // mov eax, 0x330f00
            &[0x48, 0x8B, 0x87, 0x0F, 0x33, 0x00, 0x00][..], // mov rax, [rdi+0x330f]
            &[0xE8, 0x0F, 0x33, 0x00, 0x00][..],             // call
            &[0x0F, 0x84, 0x0F, 0x33, 0x00, 0x00][..],       // je
        ] {
            let mut code = filler(20);
            // The surrounding code sets ECX and uses EAX, as around a real RDPMC, so only decoding
            // shows that this pair is part of another instruction.
            code.extend_from_slice(&[0x89, 0xF9]);
            code.extend_from_slice(inside);
            code.extend_from_slice(&[0x48, 0x09, 0xD0, 0xC3]);
            code.extend(filler(5));
            assert_eq!(
                search(&code, &KernelSymbols::default(), &[], InstructionBitness::Only64),
                [] as [u64; 0],
                "{inside:x?}"
            );
            let symbols = one_symbol(0x1000, 0, "f");
            assert_eq!(
                search(&code, &symbols, &[], InstructionBitness::Only64),
                [] as [u64; 0]
            );
            assert_eq!(
                search(&code, &symbols, &[0x1000], InstructionBitness::Only64),
                [] as [u64; 0]
            );
        }
    }

    #[test]
    fn boundary_overrides_misleading_bytes() {
        // Data precedes a function in the text. Only the function's boundary shows where code
        // starts.
        let mut code = filler(20);
        code.extend_from_slice(&[0x48, 0xB8, 0xFF]); // data that decodes as the start of mov rax, imm64
        let function = code.len() as u64;
        code.extend_from_slice(FUNCTION);
        code.extend(filler(5));
        let found = search(
            &code,
            &KernelSymbols::default(),
            &[0x1000 + function],
            InstructionBitness::Only64,
        );
        assert_eq!(found, [function + 2]);
    }

    /// In 32-bit code, INC ECX before RDPMC is a separate instruction. In 64-bit code, the same
    /// byte is a REX prefix of the RDPMC. In both cases, only the last two bytes are replaced.
    #[test]
    fn rex_prefix_is_an_instruction_in_32_bit_code() {
        // inc ecx (41) is a REX prefix in 64-bit code.
        let code: Vec<u8> = filler(3)
            .into_iter()
            .chain([
                0xB9, 0, 0, 0, 0, 0x41, 0x0F, 0x33, 0x89, 0xC3, 0x89, 0xD6, 0x90, 0x90, 0xC3,
            ])
            .chain(filler(3))
            .collect();
        let at = filler(3).len() as u64;
        let symbols = one_symbol(0x1000 + at, 0, "f");
        assert_eq!(search(&code, &symbols, &[], InstructionBitness::Either), [at + 6]);
        assert_eq!(search(&code, &symbols, &[], InstructionBitness::Only64), [at + 5]);
    }

    #[test]
    fn site_has_symbol_and_physical_address() {
        let symbols = one_symbol(0x1000, 12, "native_read_pmc");
        let text = CodeBytes {
            virt: 0x1000,
            phys: 0x20_1000,
            bytes: FUNCTION,
        };
        let sites = find(&[text], &symbols, &[], InstructionBitness::Only64);
        assert_eq!(sites.len(), 1);
        assert_eq!(sites[0].phys, 0x20_1002);
        assert_eq!(sites[0].location(), "native_read_pmc+0x2");
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600), b: u64) {
            let mut bytes = bytes;
            if bytes.len() > 300 { bytes[299] = 0x0F; bytes[300] = 0x33; }
            let text = CodeBytes { virt: 0x1000, phys: 0x1000, bytes: &bytes };
            for bits in [InstructionBitness::Only64, InstructionBitness::Either] {
                for site in find(&[text], &KernelSymbols::default(), &[b % 0x1400], bits) {
                    let end = (site.virt - 0x1000) as usize + usize::from(site.length);
                    prop_assert_eq!(&bytes[end - 2..end], &RDPMC[..]);
                }
            }
        }
    }
}
