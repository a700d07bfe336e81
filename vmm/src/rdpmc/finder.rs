//! Telling an RDPMC instruction from the byte pair 0F 33 inside another one.
//!
//! Evidence, strongest first:
//! 1. An instruction boundary the kernel itself names: its ORC unwind table has one for each place
//!    where the stack layout changes. Decoding from the nearest boundary before the pair either lands on
//!    it or not, and that decides.
//! 2. A symbol's start, likewise.
//! 3. Without either, decoding from each of many starts before the pair. x86 decoding falls in step
//!    within a few instructions, so nearly all starts must land on the pair, and the neighbourhood
//!    must make sense: ECX set before, EAX or EDX used after.

use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, OpAccess, Register,
};

use super::{CodeBits, PatchedSite, RDPMC, Text};
use crate::boot::SymbolTable;

/// Farthest a boundary may lie before the pair, in bytes.
const MAX_ANCHOR_DISTANCE: u64 = 16 * 1024;
/// Starts tried without boundaries: from this far before the pair …
const SWEEP_FAR: usize = 160;
/// … to this far, so that each has room to fall in step.
const SWEEP_NEAR: usize = 48;
/// Share of the usable starts that must land on the pair, in percent.
const SWEEP_AGREE_PERCENT: usize = 90;
/// Fewest usable starts.
const SWEEP_MIN_STARTS: usize = 16;
/// Instructions looked at on each side of the pair.
const NEIGHBOURS: usize = 10;
/// Instructions after the pair that must decode.
const MUST_DECODE_AFTER: usize = 4;

/// What one piece of evidence says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Instruction,
    NotInstruction,
    /// The boundary led into bytes that do not decode.
    Unknown,
}

/// All RDPMC instructions in `texts`, by address.
pub fn find(
    texts: &[Text<'_>],
    symbols: &SymbolTable,
    boundaries: &[u64],
    bits: CodeBits,
) -> Vec<PatchedSite> {
    let mut sites = Vec::new();
    let mut pairs = 0usize;
    for text in texts {
        for offset in memchr::memmem::find_iter(text.bytes, &RDPMC) {
            pairs += 1;
            if !is_instruction(text, offset, symbols, boundaries, bits) {
                continue;
            }
            let virt = text.virt + offset as u64;
            sites.push(PatchedSite {
                virt,
                phys: text.phys + offset as u64,
                symbol: symbols.lookup(virt).map(|(name, at)| (name.to_owned(), at)),
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

fn is_instruction(
    text: &Text<'_>,
    offset: usize,
    symbols: &SymbolTable,
    boundaries: &[u64],
    bits: CodeBits,
) -> bool {
    let modes: &[u32] = match bits {
        CodeBits::Only64 => &[64],
        CodeBits::Either => &[64, 32],
    };
    let virt = text.virt + offset as u64;
    let orc = boundaries
        .partition_point(|b| *b <= virt)
        .checked_sub(1)
        .map(|i| boundaries[i]);
    // A symbol may label data in the text, so its word alone needs a sensible neighbourhood.
    for (anchor, needs_neighbours) in [
        (orc, false),
        (symbols.start_before(virt), bits == CodeBits::Either),
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
                Verdict::Instruction if !needs_neighbours || sensible(text, start as usize, offset, mode) => {
                    return true;
                }
                Verdict::Instruction | Verdict::NotInstruction => known = true,
                Verdict::Unknown => {}
            }
        }
        if known {
            return false;
        }
    }
    modes.iter().any(|mode| by_agreement(text, offset, *mode))
}

fn decoder<'a>(text: &Text<'a>, start: usize, mode: u32) -> Decoder<'a> {
    Decoder::with_ip(
        mode,
        &text.bytes[start..],
        text.virt + start as u64,
        DecoderOptions::NONE,
    )
}

/// Decodes from `start`, a known boundary, up to `offset`.
fn from_boundary(text: &Text<'_>, start: usize, offset: usize, mode: u32) -> Verdict {
    let mut decoder = decoder(text, start, mode);
    let mut instruction = Instruction::default();
    while start + decoder.position() <= offset {
        let at = start + decoder.position();
        decoder.decode_out(&mut instruction);
        if instruction.is_invalid() {
            return Verdict::Unknown;
        }
        if at == offset {
            return if is_rdpmc(&instruction) {
                Verdict::Instruction
            } else {
                Verdict::NotInstruction
            };
        }
    }
    Verdict::NotInstruction
}

fn is_rdpmc(instruction: &Instruction) -> bool {
    instruction.code() == Code::Rdpmc && instruction.len() == 2
}

/// Whether nearly all starts before `offset` land on it, with a sensible neighbourhood.
fn by_agreement(text: &Text<'_>, offset: usize, mode: u32) -> bool {
    let far = offset.saturating_sub(SWEEP_FAR);
    let near = offset.saturating_sub(SWEEP_NEAR);
    let mut landed = Vec::new();
    let mut usable = 0usize;
    for start in far..=near {
        match from_boundary(text, start, offset, mode) {
            Verdict::Unknown => {}
            Verdict::NotInstruction => usable += 1,
            Verdict::Instruction => {
                usable += 1;
                landed.push(start);
            }
        }
    }
    // At the very start of a text there is no room for many starts; its first byte is a boundary.
    if far == 0 && near < SWEEP_MIN_STARTS {
        return from_boundary(text, 0, offset, mode) == Verdict::Instruction
            && sensible(text, 0, offset, mode);
    }
    usable >= SWEEP_MIN_STARTS
        && landed.len() * 100 >= usable * SWEEP_AGREE_PERCENT
        && landed
            .first()
            .is_some_and(|start| sensible(text, *start, offset, mode))
}

/// Whether the instructions around `offset`, decoded from `start`, set ECX before and use EAX or EDX
/// after it, and go on decoding.
fn sensible(text: &Text<'_>, start: usize, offset: usize, mode: u32) -> bool {
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
    // The instruction itself.
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
            return leaves || decoded >= MUST_DECODE_AFTER || decodes_on(&mut decoder, decoded);
        }
    }
    false
}

/// Whether the instructions up to the [`MUST_DECODE_AFTER`]th are valid, or one leaves the function.
fn decodes_on(decoder: &mut Decoder<'_>, decoded: usize) -> bool {
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
    use proptest::prelude::*;

    /// `native_read_pmc` as compilers write it.
    const FUNCTION: &[u8] = &[
        0x89, 0xF9, // mov ecx, edi
        0x0F, 0x33, // rdpmc
        0x48, 0xC1, 0xE2, 0x20, // shl rdx, 32
        0x48, 0x09, 0xD0, // or rax, rdx
        0xC3, // ret
    ];

    /// Plain code: nothing in it is or hides an RDPMC.
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

    fn search(bytes: &[u8], symbols: &SymbolTable, boundaries: &[u64], bits: CodeBits) -> Vec<u64> {
        let text = Text {
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
    fn an_instruction_is_found_without_any_symbol() {
        let mut code = filler(20);
        let at = code.len() as u64 + 2;
        code.extend_from_slice(FUNCTION);
        code.extend(filler(5));
        assert_eq!(
            search(&code, &SymbolTable::default(), &[], CodeBits::Only64),
            [at]
        );
    }

    #[test]
    fn a_pair_inside_an_immediate_or_displacement_is_left_alone() {
        for inside in [
            &[0xB8, 0x00, 0x0F, 0x33, 0x00][..],             // mov eax, 0x330f00
            &[0x48, 0x8B, 0x87, 0x0F, 0x33, 0x00, 0x00][..], // mov rax, [rdi+0x330f]
            &[0xE8, 0x0F, 0x33, 0x00, 0x00][..],             // call
            &[0x0F, 0x84, 0x0F, 0x33, 0x00, 0x00][..],       // je
        ] {
            let mut code = filler(20);
            // ECX is set and EAX used around it, so only decoding can tell.
            code.extend_from_slice(&[0x89, 0xF9]);
            code.extend_from_slice(inside);
            code.extend_from_slice(&[0x48, 0x09, 0xD0, 0xC3]);
            code.extend(filler(5));
            assert_eq!(
                search(&code, &SymbolTable::default(), &[], CodeBits::Only64),
                [] as [u64; 0],
                "{inside:x?}"
            );
            let mut symbols = SymbolTable::default();
            symbols.push(0x1000, 0, "f");
            symbols.finish();
            assert_eq!(search(&code, &symbols, &[], CodeBits::Only64), [] as [u64; 0]);
            assert_eq!(
                search(&code, &symbols, &[0x1000], CodeBits::Only64),
                [] as [u64; 0]
            );
        }
    }

    #[test]
    fn a_boundary_decides_against_misleading_bytes_before_the_pair() {
        // Data in the text before a function: only the boundary shows where code starts.
        let mut code = filler(20);
        code.extend_from_slice(&[0x48, 0xB8, 0xFF]); // looks like mov rax, imm64 swallowing what follows
        let function = code.len() as u64;
        code.extend_from_slice(FUNCTION);
        code.extend(filler(5));
        let found = search(
            &code,
            &SymbolTable::default(),
            &[0x1000 + function],
            CodeBits::Only64,
        );
        assert_eq!(found, [function + 2]);
    }

    #[test]
    fn thirty_two_bit_code_is_found_in_multiboot_images_only() {
        // inc ecx (41) is a REX prefix in 64-bit code.
        let code: Vec<u8> = filler(3)
            .into_iter()
            .chain([
                0xB9, 0, 0, 0, 0, 0x41, 0x0F, 0x33, 0x89, 0xC3, 0x89, 0xD6, 0x90, 0x90, 0xC3,
            ])
            .chain(filler(3))
            .collect();
        let at = filler(3).len() as u64;
        let mut symbols = SymbolTable::default();
        symbols.push(0x1000 + at, 0, "f");
        symbols.finish();
        assert_eq!(search(&code, &symbols, &[], CodeBits::Either), [at + 6]);
        assert_eq!(search(&code, &symbols, &[], CodeBits::Only64), [] as [u64; 0]);
    }

    #[test]
    fn the_site_names_its_symbol_and_physical_address() {
        let mut symbols = SymbolTable::default();
        symbols.push(0x1000, 12, "native_read_pmc");
        symbols.finish();
        let text = Text {
            virt: 0x1000,
            phys: 0x20_1000,
            bytes: FUNCTION,
        };
        let sites = find(&[text], &symbols, &[], CodeBits::Only64);
        assert_eq!(sites.len(), 1);
        assert_eq!(sites[0].phys, 0x20_1002);
        assert_eq!(sites[0].place(), "native_read_pmc+0x2");
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..600), b: u64) {
            let mut bytes = bytes;
            if bytes.len() > 300 { bytes[299] = 0x0F; bytes[300] = 0x33; }
            let text = Text { virt: 0x1000, phys: 0x1000, bytes: &bytes };
            for bits in [CodeBits::Only64, CodeBits::Either] {
                for site in find(&[text], &SymbolTable::default(), &[b % 0x1400], bits) {
                    let at = (site.virt - 0x1000) as usize;
                    prop_assert_eq!(&bytes[at..at + 2], &RDPMC[..]);
                }
            }
        }
    }
}
