use super::*;
use crate::modules::tests::{libc_of_process, process_memory};
use proptest::prelude::*;

const CODE: u64 = 0x5555_0000_0000;
const STACK: u64 = 0x7fff_0000_0000;

/// Builds a CIE or FDE of `.eh_frame` or `.debug_frame` with the given ID and contents.
fn entry(id: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = id.to_le_bytes().to_vec();
    bytes.extend(body);
    bytes.resize(bytes.len().next_multiple_of(8) + 4, 0);
    [&(bytes.len() as u32).to_le_bytes()[..], &bytes].concat()
}

/// Returns a map in which `module` is mapped at `start` with the load bias `bias`.
fn mapped(start: u64, len: u64, bias: u64, module: LoadedModule) -> ProcessModuleMap {
    ProcessModuleMap::new(vec![MappedModule {
        start,
        end: start + len,
        code: Some((bias, Arc::new(module))),
    }])
}

/// Builds `.eh_frame` and its index for functions given as `(start, len, instructions)` in
/// ascending order. Initially the CFA is rsp+8 and the return address is at CFA-8.
fn tables(functions: &[(u64, u32, &[u8])]) -> UnwindTables {
    const INDEX_AT: u64 = 0x1000;
    const FRAMES_AT: u64 = 0x2000;
    // Version 1, "zR", code 1, data -8, return address 16; pointers of 8 bytes; CFA = rsp+8, ra at
    // CFA-8.
    let mut frames = entry(0, &[1, b'z', b'R', 0, 1, 0x78, 16, 1, 0, 0x0c, 7, 8, 0x90, 1]);
    let mut rows = Vec::new();
    for (start, len, instructions) in functions {
        let at = frames.len() as u64;
        rows.push((*start, FRAMES_AT + at));
        let mut body = start.to_le_bytes().to_vec();
        body.extend(u64::from(*len).to_le_bytes());
        body.push(0);
        body.extend(*instructions);
        frames.extend(entry(at as u32 + 4, &body));
    }
    // Version 1; eh_frame_ptr, count and table as absolute 8, 4 and 8 bytes.
    let mut index = vec![1, 0, 3, 4];
    index.extend(FRAMES_AT.to_le_bytes());
    index.extend((rows.len() as u32).to_le_bytes());
    for (start, at) in rows {
        index.extend(start.to_le_bytes());
        index.extend(at.to_le_bytes());
    }
    frames.extend([0; 4]);
    UnwindTables {
        index,
        index_at: INDEX_AT,
        frames,
        frames_at: FRAMES_AT,
    }
}

fn code(tables: UnwindTables) -> ProcessModuleMap {
    mapped(CODE, 0x10_0000, CODE, LoadedModule::of_tables(tables))
}

fn state(ip: u64, stack: &[u8]) -> UserThreadState<'_> {
    let mut registers = [None; REGISTERS];
    registers[RA] = Some(ip);
    registers[RSP] = Some(STACK);
    registers[RBP] = Some(0x1234_5678);
    registers[3] = Some(7);
    UserThreadState {
        registers,
        exact_ip: true,
        stack,
        stack_truncated: false,
    }
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn unwind(code: &ProcessModuleMap, state: &UserThreadState<'_>) -> (Vec<u64>, UnwindResult) {
    let mut out = Vec::new();
    let unwound = Unwinder::default().unwind(code, state, 127, &mut out);
    (out, unwound)
}

/// Four functions: a leaf function, a function that saves rbp and uses it as a general-purpose
/// register, a function whose CFA is based on rbx, and the entry point, whose return address is
/// undefined.
const FUNCTIONS: &[(u64, u32, &[u8])] = &[
    (0x100, 0x20, &[]),
    // At +1: CFA = rsp+16, rbp at CFA-16; at +5 CFA = rsp+32.
    (0x200, 0x40, &[0x41, 0x0e, 16, 0x86, 2, 0x44, 0x0e, 32]),
    // CFA = rbx+16, ra at CFA-8, rbx at CFA-16.
    (0x300, 0x20, &[0x0c, 3, 16, 0x83, 2]),
    (0x400, 0x20, &[0x07, 16]),
];

/// Unwinds a stack through all of [`FUNCTIONS`] and checks the call chain.
fn check_unwinding_of_functions(code: &ProcessModuleMap) {
    let stack = words(&[CODE + 0x210, 1, 2, 0x99, CODE + 0x310, 3, 8, CODE + 0x410, 0]);
    let mut state = state(CODE + 0x110, &stack);
    state.registers[3] = Some(STACK + 8 * 6);
    let (chain, unwound) = unwind(code, &state);
    assert_eq!(chain, [CODE + 0x110, CODE + 0x210, CODE + 0x310, CODE + 0x410]);
    assert_eq!((unwound.end, unwound.guessed), (UnwindStop::Complete, false));
}

/// A stack is unwound completely although the CFA of the third frame depends on rbx, which
/// following rbp alone cannot restore.
#[test]
fn eh_frame_unwinds_stack_without_frame_pointers() {
    check_unwinding_of_functions(&code(tables(FUNCTIONS)));
}

/// If a process has no unwind tables in memory, its stack is unwound with `.debug_frame` from the
/// program's file.
#[test]
fn debug_frame_replaces_missing_eh_frame() {
    // Version 3, no augmentation, code 1, data -8, return address 16; CFA = rsp+8, ra at CFA-8.
    let mut section = entry(u32::MAX, &[3, 0, 1, 0x78, 16, 0x0c, 7, 8, 0x90, 1]);
    for (start, len, instructions) in FUNCTIONS {
        let mut body = start.to_le_bytes().to_vec();
        body.extend(u64::from(*len).to_le_bytes());
        body.extend(*instructions);
        section.extend(entry(0, &body));
    }
    let module = LoadedModule::of_debug_frames(DebugFrames::parse(section.clone()).unwrap());
    check_unwinding_of_functions(&mapped(CODE, 0x10_0000, CODE, module));
    // A section truncated at any byte must not cause a panic.
    for len in 0..section.len() {
        if let Some(frames) = DebugFrames::parse(section[..len].to_vec()) {
            assert!(frames.find(0x50).is_none());
        }
    }
}

/// The call chain is marked as incomplete if the copy of the stack is truncated, if the stack is
/// unmapped, or if a caller's frame is below the previous one.
#[test]
fn truncated_stack_is_incomplete() {
    let code = code(tables(FUNCTIONS));
    let stack = words(&[CODE + 0x210, 1, 2]);
    for (cut, end) in [(true, UnwindStop::Full), (false, UnwindStop::Unmapped)] {
        let state = UserThreadState {
            stack_truncated: cut,
            ..state(CODE + 0x110, &stack)
        };
        let (chain, unwound) = unwind(&code, &state);
        assert_eq!((chain.len(), unwound.end), (2, end));
    }
    let stack = words(&[CODE + 0x310; 4]);
    let (_, unwound) = unwind(&code, &state(CODE + 0x110, &stack));
    assert_eq!(unwound.end, UnwindStop::BadFrame, "rbx leads down");
    let stack = words(&[0; 4]);
    assert_eq!(
        unwind(&code, &state(CODE + 0x110, &stack)).1.end,
        UnwindStop::Complete,
        "0 ends a chain"
    );
}

/// Code without an unwind entry is unwound by its frame pointer, and the chain is marked as
/// guessed.
#[test]
fn code_without_tables_is_unwound_by_frame_pointer() {
    let code = code(tables(FUNCTIONS));
    let stack = words(&[5, 6, STACK + 64, CODE + 0x410]);
    let mut state = state(CODE + 0x8000, &stack);
    assert_eq!(unwind(&code, &state).1.end, UnwindStop::NoTable);
    state.registers[RBP] = Some(STACK + 16);
    let (chain, unwound) = unwind(&code, &state);
    assert_eq!(chain, [CODE + 0x8000, CODE + 0x410]);
    assert_eq!((unwound.end, unwound.guessed), (UnwindStop::Complete, true));
}

/// DWARF expressions in unwind tables are evaluated, including the one that linkers generate for
/// PLT stubs, and an expression with an endless loop is aborted.
#[test]
fn cfi_expressions_are_evaluated_and_bounded() {
    // DW_CFA_def_cfa_expression, 3 bytes: DW_OP_skip -3.
    let endless: &[(u64, u32, &[u8])] = &[(0x100, 0x20, &[0x0f, 3, 0x2f, 0xfd, 0xff])];
    let stack = words(&[CODE + 0x410; 8]);
    let (chain, unwound) = unwind(&code(tables(endless)), &state(CODE + 0x110, &stack));
    assert_eq!((chain.len(), unwound.end), (1, UnwindStop::BadFrame));
    // breg7 8, breg16 0, lit15, and, lit11, ge, lit3, shl, plus: rsp+8, and rsp+16 from the 11th
    // byte on.
    let stub: &[u8] = &[
        0x0f, 11, 0x77, 8, 0x80, 0, 0x3f, 0x1a, 0x3b, 0x2a, 0x33, 0x24, 0x22,
    ];
    let code = code(tables(&[(0x100, 0x20, stub), FUNCTIONS[3]]));
    for (at, stack) in [
        (0x105, words(&[CODE + 0x410, 1])),
        (0x10b, words(&[1, CODE + 0x410])),
    ] {
        let (chain, unwound) = unwind(&code, &state(CODE + at, &stack));
        assert_eq!(
            (chain, unwound.end),
            (vec![CODE + at, CODE + 0x410], UnwindStop::Complete)
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Unwinding terminates within the frame limit for randomly corrupted tables and any stack.
    #[test]
    fn hostile_cfi_tables_terminate(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..24),
        of_index in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        stack in prop::collection::vec(prop_oneof![
            any::<u64>(),
            (0u64..0x500).prop_map(|at| CODE + at),
            (0u64..512).prop_map(|at| STACK + at),
        ], 0..64),
        ip in 0u64..0x500,
        rbx: u64,
    ) {
        let stub: &[u8] = &[0x0f, 11, 0x77, 8, 0x80, 0, 0x3f, 0x1a, 0x3b, 0x2a, 0x33, 0x24, 0x22, 0x16, 3, 2, 0x76, 0];
        let mut functions = FUNCTIONS.to_vec();
        functions.push((0x480, 0x80, stub));
        let mut tables = tables(&functions);
        for (at, value) in &changes {
            let len = tables.frames.len();
            tables.frames[at.index(len)] = *value;
        }
        for (at, value) in &of_index {
            let len = tables.index.len();
            tables.index[at.index(len)] = *value;
        }
        let stack = words(&stack);
        let mut state = state(CODE + ip, &stack);
        state.registers[3] = Some(rbx);
        let (chain, _) = unwind(&code(tables), &state);
        prop_assert!(chain.len() <= 127);
    }
}

/// Unwinding from arbitrary addresses of a C library terminates if its unwind tables are randomly
/// corrupted.
#[test]
fn corrupted_libc_tables_terminate() {
    let (base, _) = libc_of_process();
    let module = LoadedModule::read(&mut process_memory(), base, true).unwrap();
    let real = module.tables().unwrap();
    let mut seed = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let mut unwinder = Unwinder::default();
    let stack: Vec<u8> = (0..1024)
        .flat_map(|_| (base + random() % (2 << 20)).to_le_bytes())
        .collect();
    let (mut frames, mut out) = (0, Vec::new());
    for round in 0..40 {
        let mut tables = real.clone();
        if round > 0 {
            for _ in 0..tables.frames.len() / 64 {
                let at = (random() % tables.frames.len() as u64) as usize;
                tables.frames[at] = random() as u8;
            }
        }
        let code = mapped(base, 4 << 20, module.bias(base), LoadedModule::of_tables(tables));
        for _ in 0..200 {
            out.clear();
            let state = state(base + random() % (2 << 20), &stack);
            unwinder.unwind(&code, &state, 127, &mut out);
            assert!(out.len() <= 127);
            frames += out.len();
        }
    }
    assert!(frames > 40 * 200, "some stacks go on: {frames}");
}

/// An index of `.eh_frame` with an excessive number of rows causes no arithmetic overflow. Fuzzing
/// found an unchecked multiplication, which panicked.
#[test]
fn eh_frame_index_rejects_excessive_row_count() {
    let mut tables = tables(FUNCTIONS);
    // Store the number of rows as 8 bytes.
    tables.index[2] = 4;
    drop(tables.index.splice(12..16, u64::MAX.to_le_bytes()));
    let code = code(tables);
    let stack = words(&[CODE + 0x210, 1, 2, 0x99]);
    let (chain, _) = unwind(&code, &state(CODE + 0x110, &stack));
    assert_eq!(chain.first(), Some(&(CODE + 0x110)));
}
