//! Finds the instruction with which a Linux kernel permits its programs to use RDPMC by default.
//!
//! When the kernel's PMU driver starts (`init_hw_perf_events`), it sets `x86_pmu.attr_rdpmc` to 1.
//! The kernel then announces `cap_user_rdpmc` in the control pages of perf events. The address of
//! the variable is found in the function `get_attr_rdpmc`, which shows the variable in sysfs.

use iced_x86::{Code, Decoder, DecoderOptions, Instruction, OpKind};

use kernel_images::elf::CodeBytes;
use kernel_images::symbols::KernelSymbols;

/// Kernel function that shows `attr_rdpmc` in sysfs, and therefore loads the variable.
const SHOW_FUNCTION: &str = "get_attr_rdpmc";
/// Kernel function that starts the PMU driver, and therefore sets `attr_rdpmc`.
const INIT_FUNCTION: &str = "init_hw_perf_events";
/// Maximum number of bytes of a kernel function that are decoded.
const MAX_FUNCTION_BYTES: usize = 16 << 10;
/// Size in bytes of the immediate operand that the kernel writes to `attr_rdpmc`.
const IMMEDIATE_BYTES: usize = 4;

/// Returns the guest-physical address of the 32-bit immediate operand 1 that the kernel writes to
/// `attr_rdpmc` to permit RDPMC, or `None` if the operand is not found or not unique.
pub fn find(code: &[CodeBytes<'_>], symbols: &KernelSymbols) -> Option<u64> {
    let mut shown =
        function(code, symbols, SHOW_FUNCTION)?.filter_map(|(_, instruction)| loaded(&instruction));
    let variable = shown.next()?;
    let mut stores = function(code, symbols, INIT_FUNCTION)?.filter(|(_, instruction)| {
        instruction.code() == Code::Mov_rm32_imm32
            && instruction.is_ip_rel_memory_operand()
            && instruction.ip_rel_memory_address() == variable
            && instruction.immediate32() == 1
    });
    let (phys, store) = stores.next()?;
    if stores.next().is_some() {
        return None;
    }
    // The immediate operand is at the end of the instruction.
    Some(phys + (store.len() - IMMEDIATE_BYTES) as u64)
}

/// Returns the instructions of the kernel function `name`, each with its guest-physical address.
/// Returns `None` if the function is not found.
fn function<'a>(
    code: &[CodeBytes<'a>],
    symbols: &KernelSymbols,
    name: &str,
) -> Option<impl Iterator<Item = (u64, Instruction)> + use<'a>> {
    let start = symbols.by_name(name)?.address;
    code.iter().find_map(|text| {
        let offset = usize::try_from(start.checked_sub(text.virt)?).ok()?;
        let size = usize::try_from(symbols.end_of(start).saturating_sub(start)).ok()?;
        let bytes = text.bytes.get(offset..)?;
        let bytes = &bytes[..size.min(MAX_FUNCTION_BYTES).min(bytes.len())];
        let phys = text.phys + offset as u64;
        let instructions = Decoder::with_ip(64, bytes, start, DecoderOptions::NONE).into_iter();
        let valid = instructions.take_while(|instruction| !instruction.is_invalid());
        Some(valid.map(move |instruction| (phys + (instruction.ip() - start), instruction)))
    })
}

/// Returns the address of the 32-bit variable that `instruction` loads into a register. Returns
/// `None` if it is not such a load.
fn loaded(instruction: &Instruction) -> Option<u64> {
    let loads = matches!(instruction.code(), Code::Mov_r32_rm32 | Code::Movsxd_r64_rm32)
        && instruction.op1_kind() == OpKind::Memory
        && instruction.is_ip_rel_memory_operand();
    loads.then(|| instruction.ip_rel_memory_address())
}

#[cfg(test)]
mod tests {
    use super::*;
    use kernel_images::symbols::SymbolsBuilder;

    const VIRT: u64 = 0xFFFF_FFFF_8100_0000;
    const PHYS: u64 = 0x100_0000;
    const VARIABLE: u64 = VIRT + 0x1000;
    const START_AT: usize = 0x40;

    /// Returns the machine code of `mov dword [address], value` at offset `at`.
    fn store(at: usize, address: u64, value: u32) -> Vec<u8> {
        let displacement = address.wrapping_sub(VIRT + at as u64 + 10) as u32;
        let operands = [displacement, value].into_iter().flat_map(u32::to_le_bytes);
        [0xC7, 0x05].into_iter().chain(operands).collect()
    }

    /// Returns kernel code with the functions `get_attr_rdpmc` and `init_hw_perf_events`. The
    /// latter consists of the instructions `start` and a return.
    fn code(start: &[Vec<u8>]) -> Vec<u8> {
        // mov ecx, [VARIABLE]; ret
        let mut code = vec![0x8B, 0x0D];
        code.extend((VARIABLE.wrapping_sub(VIRT + 6) as u32).to_le_bytes());
        code.push(0xC3);
        code.resize(START_AT, 0xCC);
        code.extend(start.concat());
        code.push(0xC3);
        code
    }

    fn found(bytes: &[u8], names: [&str; 2]) -> Option<u64> {
        let mut symbols = SymbolsBuilder::default();
        let end = VIRT + bytes.len() as u64;
        for (address, name) in [
            (VIRT, names[0]),
            (VIRT + START_AT as u64, names[1]),
            (end, "_etext"),
        ] {
            symbols.add(address, b't', name.as_bytes());
        }
        let text = CodeBytes {
            virt: VIRT,
            phys: PHYS,
            bytes,
        };
        find(&[text], &symbols.finish().unwrap())
    }

    #[test]
    fn default_permission_is_the_store_of_one_to_the_shown_variable() {
        let zero = store(START_AT, VARIABLE, 0);
        let other = store(START_AT + 10, VARIABLE + 4, 1);
        let one = store(START_AT + 20, VARIABLE, 1);
        let at = PHYS + START_AT as u64 + 26;
        let bytes = code(&[zero.clone(), other.clone(), one.clone()]);
        assert_eq!(found(&bytes, [SHOW_FUNCTION, INIT_FUNCTION]), Some(at));
        assert_eq!(&bytes[START_AT + 26..START_AT + 30], 1u32.to_le_bytes());
        // Finds nothing without the symbols, without the store, or with two stores.
        assert_eq!(found(&bytes, ["show", INIT_FUNCTION]), None);
        assert_eq!(found(&bytes, [SHOW_FUNCTION, "start"]), None);
        assert_eq!(found(&code(&[zero, other]), [SHOW_FUNCTION, INIT_FUNCTION]), None);
        let twice = [store(START_AT, VARIABLE, 1), store(START_AT + 10, VARIABLE, 1)];
        assert_eq!(found(&code(&twice), [SHOW_FUNCTION, INIT_FUNCTION]), None);
        assert_eq!(found(&bytes[..START_AT], [SHOW_FUNCTION, INIT_FUNCTION]), None);
    }
}
