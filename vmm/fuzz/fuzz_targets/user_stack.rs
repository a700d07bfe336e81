//! Fuzzes unwinding of a user-space program with arbitrary ELF headers, symbols, unwind tables and
//! stack. Parsing and unwinding must respect their limits.
#![no_main]

use std::sync::Arc;

use guest_profile::cfi::{ProcessModuleMap, MappedModule, REGISTERS, Unwinder, UserThreadState};
use guest_profile::modules::LoadedModule;
use libfuzzer_sys::fuzz_target;

const BASE: u64 = 0x5555_0000_0000;
const STACK: u64 = 0x7fff_0000_0000;
const MAX_FRAMES: usize = 127;
/// Number of input bytes used as the stack.
const STACK_BYTES: usize = 256;

fuzz_target!(|data: &[u8]| {
    let Some((stack, file)) = data.split_at_checked(STACK_BYTES) else {
        return;
    };
    let (mut reads, mut bytes) = (0u32, 0u64);
    let mut memory = |at: u64, len: u64| {
        reads += 1;
        bytes += len;
        let mut part = vec![0; usize::try_from(len).ok()?];
        let from = usize::try_from(at.wrapping_sub(BASE)).ok()?;
        let there = file.get(from..)?;
        let len = there.len().min(part.len());
        part[..len].copy_from_slice(&there[..len]);
        Some(part)
    };
    let Some(module) = LoadedModule::read(&mut memory, BASE, true) else {
        return;
    };
    assert!(reads < 400 && bytes < 128 << 20);
    let module = Arc::new(module);
    let code = ProcessModuleMap::new(vec![MappedModule {
        start: BASE,
        end: BASE + (1 << 20),
        code: Some((module.bias(BASE), module)),
    }]);
    let word = |n: usize| u64::from_le_bytes(stack[8 * n..8 * n + 8].try_into().expect("eight bytes"));
    let mut registers = [None; REGISTERS];
    for (n, register) in registers.iter_mut().enumerate() {
        *register = Some(word(n));
    }
    registers[7] = Some(STACK);
    registers[REGISTERS - 1] = Some(BASE + word(0) % (1 << 20));
    let state = UserThreadState {
        registers,
        exact_ip: true,
        stack,
        stack_truncated: false,
    };
    let mut out = Vec::new();
    Unwinder::default().unwind(&code, &state, MAX_FRAMES, &mut out);
    assert!(out.len() <= MAX_FRAMES);
});
