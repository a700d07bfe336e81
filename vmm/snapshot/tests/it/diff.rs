//! Diffs: comparison with a base, ranges, and checksums of both files together.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use snapshot::diff::{self, BaseSnapshot, DiffError, DiffWriter, MAX_RUNS, check_runs};
use snapshot::memory::{CHUNK_BYTES, MemoryFileError, checksum};
use snapshot::state::{SavedBase, SavedMachine, SavedMemory};
use snapshot::{decode, encode};

const CHUNK: usize = 2 << 20;
const PAGE: usize = 4096;
/// Two whole chunks and one page.
const BYTES: usize = 2 * CHUNK + PAGE;

/// Returns the state of a machine with this memory.
fn machine(memory: &[u8]) -> SavedMachine {
    SavedMachine {
        memory: SavedMemory {
            bytes: memory.len() as u64,
            crcs: memory.chunks(CHUNK).map(checksum).collect(),
            base: None,
        },
        ..SavedMachine::default()
    }
}

fn file_of(memory: &[u8]) -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(memory, 0).unwrap();
    file
}

fn base_of(memory: &[u8]) -> BaseSnapshot {
    BaseSnapshot::new(&encode(&machine(memory)).unwrap(), file_of(memory)).unwrap()
}

/// Writes a diff, and returns its state, its file and the size of its ranges.
fn diff_of(base: &[u8], memory: &[u8]) -> (SavedMachine, File, u64) {
    let mut writer = DiffWriter::new(base_of(base), memory.len() as u64).unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(memory.len() as u64).unwrap();
    for (n, chunk) in memory.chunks(CHUNK).enumerate() {
        let offset = n as u64 * CHUNK_BYTES;
        for range in writer.compare(offset, chunk).unwrap() {
            let at = offset + range.start as u64;
            file.write_all_at(&chunk[range], at).unwrap();
        }
    }
    let (state, changed) = writer.finish(&encode(&machine(memory)).unwrap()).unwrap();
    (decode(&state).unwrap(), file, changed)
}

/// A page that becomes zero is a change too. Ranges are merged over the end of a chunk.
#[test]
fn changed_pages_are_in_the_diff() {
    let base: Vec<u8> = (0..BYTES).map(|n| (n / PAGE % 251 + 1) as u8).collect();
    let (unchanged, _, bytes) = diff_of(&base, &base);
    assert_eq!((unchanged.memory.base.unwrap().runs, bytes), (vec![], 0));

    let mut memory = base.clone();
    memory[5 * PAGE..6 * PAGE].fill(0);
    memory[CHUNK - 1] ^= 1;
    memory[CHUNK] ^= 1;
    memory[BYTES - 1] ^= 1;
    let (state, file, bytes) = diff_of(&base, &memory);
    assert_eq!(bytes, 4 * PAGE as u64);
    let saved = state.memory.base.clone().unwrap();
    let page = PAGE as u64;
    assert_eq!(
        saved.runs,
        [
            (5 * page, page),
            (CHUNK_BYTES - page, 2 * page),
            (2 * CHUNK_BYTES, page)
        ]
    );
    check_runs(&saved, state.memory.bytes).unwrap();
    diff::verify(&file, &file_of(&base), &saved, &state.memory).unwrap();
    file.write_all_at(&[1], 5 * page).unwrap();
    let damaged = diff::verify(&file, &file_of(&base), &saved, &state.memory);
    assert!(matches!(damaged, Err(MemoryFileError::Damaged { start: 0, .. })));
}

/// Zeros over a hole of the base are not read, and zeros over its data are a change. A hole where the
/// base had data is damage.
#[test]
fn holes_of_the_base_are_skipped() {
    let mut base = vec![0; 3 * CHUNK];
    base[CHUNK + PAGE] = 1;
    let file = || {
        let file = tempfile::tempfile().unwrap();
        file.set_len(base.len() as u64).unwrap();
        file
    };
    let sparse = file();
    sparse.write_all_at(&[1], (CHUNK + PAGE) as u64).unwrap();
    let state = encode(&machine(&base)).unwrap();
    let opened = BaseSnapshot::new(&state, sparse).unwrap();
    let mut writer = DiffWriter::new(opened, base.len() as u64).unwrap();
    let zeros = vec![0; CHUNK];
    assert!(
        !writer.skip_hole(CHUNK_BYTES).unwrap(),
        "it is not the next chunk"
    );
    assert!(writer.skip_hole(0).unwrap());
    assert!(!writer.skip_hole(CHUNK_BYTES).unwrap());
    let changed = writer.compare(CHUNK_BYTES, &zeros).unwrap();
    assert!(changed.len() == 1 && changed[0] == (PAGE..2 * PAGE));
    assert!(writer.skip_hole(2 * CHUNK_BYTES).unwrap());
    let (state, bytes) = writer
        .finish(&encode(&machine(&vec![0; base.len()])).unwrap())
        .unwrap();
    let runs = decode(&state).unwrap().memory.base.unwrap().runs;
    assert_eq!(
        (runs, bytes),
        (vec![((CHUNK + PAGE) as u64, PAGE as u64)], PAGE as u64)
    );

    let emptied = BaseSnapshot::new(&encode(&machine(&base)).unwrap(), file()).unwrap();
    let mut writer = DiffWriter::new(emptied, base.len() as u64).unwrap();
    assert!(writer.skip_hole(0).unwrap());
    let damaged = writer.skip_hole(CHUNK_BYTES);
    assert!(matches!(
        damaged,
        Err(DiffError::Memory(MemoryFileError::Damaged {
            start: CHUNK_BYTES,
            ..
        }))
    ));
}

#[test]
fn impossible_ranges_are_refused() {
    let check = |runs: Vec<(u64, u64)>| check_runs(&SavedBase { state_crc: 0, runs }, 1 << 20).is_ok();
    assert!(check(vec![]));
    assert!(check(vec![(0, 4096), (8192, (1 << 20) - 8192)]));
    for runs in [
        vec![(0, 0)],
        vec![(1, 4096)],
        vec![(0, 4095)],
        vec![(8192, 4096), (0, 4096)],
        vec![(0, 8192), (4096, 4096)],
        vec![(0, (1 << 20) + 4096)],
        vec![(1 << 20, 4096)],
        vec![(u64::MAX - 4095, 4096)],
        vec![(4096, u64::MAX - 4095)],
    ] {
        assert!(!check(runs.clone()), "{runs:?}");
    }
    let runs = (0..=MAX_RUNS as u64).map(|n| (n * 8192, 4096)).collect();
    let many = SavedBase { state_crc: 0, runs };
    assert!(matches!(check_runs(&many, u64::MAX), Err(DiffError::Runs)));
}

#[test]
fn other_base_is_refused() {
    let (one, two) = (vec![1; BYTES], vec![2; BYTES]);
    let (diff, ..) = diff_of(&one, &two);
    let need = diff.memory.base.as_ref().unwrap().state_crc;
    base_of(&one).memory_of(&diff.memory, need, true).unwrap();
    let other = base_of(&two).memory_of(&diff.memory, need, false);
    assert!(matches!(other, Err(DiffError::OtherBase { .. })));
    let nested = BaseSnapshot::new(&encode(&diff).unwrap(), file_of(&two));
    assert!(matches!(nested, Err(DiffError::BaseIsDiff)));
    let smaller = DiffWriter::new(base_of(&one), CHUNK_BYTES);
    assert!(matches!(smaller, Err(DiffError::OtherMachine)));
}

/// A VM that is not trusted may send any pieces.
#[test]
fn memory_out_of_order_is_refused() {
    let memory = vec![1; BYTES];
    let mut writer = DiffWriter::new(base_of(&memory), BYTES as u64).unwrap();
    for (offset, len) in [(CHUNK_BYTES, CHUNK), (0, PAGE), (u64::MAX, 1), (0, 0)] {
        let refused = writer.compare(offset, &vec![1; len]);
        assert!(matches!(refused, Err(DiffError::Order)), "{offset} {len}");
    }
    let state = encode(&machine(&memory)).unwrap();
    assert!(matches!(writer.finish(&state), Err(DiffError::Order)));
}
