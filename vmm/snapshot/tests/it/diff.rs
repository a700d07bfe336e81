//! Tests of diffs: comparison with a base, ranges, and checksums of a diff and its base together.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use snapshot::diff::{
    BaseSnapshot, BaseSnapshotError, MAX_DIFFS, MAX_RUNS, SnapshotBaseChain, SnapshotDiffError,
    SnapshotDiffWriter, check_runs,
};
use snapshot::memory::{CHUNK_BYTES, MemoryFileError, checksum};
use snapshot::state::{SavedDiffBase, SavedMachine, SavedMemoryFile};
use snapshot::{decode, encode};

const CHUNK: usize = 2 << 20;
const PAGE: usize = 4096;
/// Size of guest memory in these tests: two whole chunks and one page.
const BYTES: usize = 2 * CHUNK + PAGE;

/// Returns the state of a machine whose memory is `memory`.
fn machine(memory: &[u8]) -> SavedMachine {
    SavedMachine {
        memory: SavedMemoryFile {
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

fn snapshot_of(name: &str, machine: &SavedMachine, file: File) -> BaseSnapshot {
    BaseSnapshot::new(Path::new(name), &encode(machine).unwrap(), file).unwrap()
}

/// Returns the base chain of a diff at the path `diff`, whose direct base is the last of `given`.
fn chain(given: Vec<BaseSnapshot>) -> Result<SnapshotBaseChain, BaseSnapshotError> {
    let need = given.last().unwrap().state_crc();
    SnapshotBaseChain::new(Path::new("diff"), need, given)
}

fn base_of(memory: &[u8]) -> SnapshotBaseChain {
    chain(vec![snapshot_of("full", &machine(memory), file_of(memory))]).unwrap()
}

/// Writes the diff between `base` and `memory`. Returns the saved machine, the file of the diff
/// and the total size of the differing ranges in bytes.
fn diff_above(base: SnapshotBaseChain, memory: &[u8]) -> (SavedMachine, File, u64) {
    let mut writer = SnapshotDiffWriter::new(base, memory.len() as u64).unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(memory.len() as u64).unwrap();
    for (n, chunk) in memory.chunks(CHUNK).enumerate() {
        let offset = n as u64 * CHUNK_BYTES;
        if chunk.iter().all(|byte| *byte == 0) && writer.skip_hole(offset).unwrap() {
            continue;
        }
        for range in writer.compare(offset, chunk).unwrap() {
            let at = offset + range.start as u64;
            file.write_all_at(&chunk[range], at).unwrap();
        }
    }
    let (state, changed) = writer.finish(&encode(&machine(memory)).unwrap()).unwrap();
    (decode(&state).unwrap(), file, changed)
}

fn diff_of(base: &[u8], memory: &[u8]) -> (SavedMachine, File, u64) {
    diff_above(base_of(base), memory)
}

/// A page that becomes zero is included in the diff, and ranges are merged across chunk boundaries.
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
    let verify = || base_of(&base).verify_diff(&file, &saved, &state.memory);
    verify().unwrap();
    file.write_all_at(&[1], 5 * page).unwrap();
    let damaged = verify();
    assert!(matches!(damaged, Err(MemoryFileError::Damaged { start: 0, .. })));
}

/// A chunk of zeros is skipped without reading the base if the base has a hole there, and is a
/// change if the base has data there. A hole in the base's memory file where the base had data is
/// reported as damage.
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
    let opened = |file| chain(vec![BaseSnapshot::new(Path::new("full"), &state, file).unwrap()]).unwrap();
    let mut writer = SnapshotDiffWriter::new(opened(sparse), base.len() as u64).unwrap();
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
    let (diff, bytes) = writer
        .finish(&encode(&machine(&vec![0; base.len()])).unwrap())
        .unwrap();
    let runs = decode(&diff).unwrap().memory.base.unwrap().runs;
    assert_eq!(
        (runs, bytes),
        (vec![((CHUNK + PAGE) as u64, PAGE as u64)], PAGE as u64)
    );

    let mut writer = SnapshotDiffWriter::new(opened(file()), base.len() as u64).unwrap();
    assert!(writer.skip_hole(0).unwrap());
    let damaged = writer.skip_hole(CHUNK_BYTES);
    assert!(matches!(
        damaged,
        Err(SnapshotDiffError::Memory(MemoryFileError::Damaged {
            start: CHUNK_BYTES,
            ..
        }))
    ));
}

#[test]
fn impossible_ranges_are_refused() {
    let check = |runs: Vec<(u64, u64)>| check_runs(&SavedDiffBase { state_crc: 0, runs }, 1 << 20).is_ok();
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
    let many = SavedDiffBase { state_crc: 0, runs };
    assert!(matches!(
        check_runs(&many, u64::MAX),
        Err(SnapshotDiffError::Runs)
    ));
}

/// Returns the error with which a base chain was rejected, and the directory that the error names.
fn refused(chain: Result<SnapshotBaseChain, BaseSnapshotError>) -> (String, SnapshotDiffError) {
    let error = chain.unwrap_err();
    (error.path.to_str().unwrap().to_owned(), error.source)
}

#[test]
fn other_base_is_refused() {
    let (one, two) = (vec![1; BYTES], vec![2; BYTES]);
    let (diff, file, _) = diff_of(&one, &two);
    let need = diff.memory.base.as_ref().unwrap().state_crc;
    let full = |memory: &[u8]| snapshot_of("full", &machine(memory), file_of(memory));
    let find = |given| SnapshotBaseChain::new(Path::new("diff"), need, given);
    find(vec![full(&one)]).unwrap();
    assert!(matches!(
        refused(find(vec![full(&two)])),
        (name, SnapshotDiffError::OtherBase { .. }) if name == "full"
    ));
    assert!(matches!(
        refused(find(Vec::new())),
        (name, SnapshotDiffError::MissingBase(crc)) if name == "diff" && crc == need
    ));
    assert!(matches!(
        refused(find(vec![full(&two), full(&one)])),
        (name, SnapshotDiffError::Unneeded) if name == "full"
    ));
    let alone = chain(vec![snapshot_of("upper", &diff, file)]);
    assert!(matches!(
        refused(alone),
        (name, SnapshotDiffError::MissingBase(crc)) if name == "upper" && crc == need
    ));
    let smaller = SnapshotDiffWriter::new(base_of(&one), CHUNK_BYTES);
    assert!(matches!(smaller, Err(SnapshotDiffError::OtherMachine)));
}

/// Each page is read from the highest diff that contains it. The bases of a diff are found in any
/// order, and an error names the damaged base.
#[test]
fn diff_of_a_diff_contains_what_differs_from_it() {
    let mut memory: Vec<u8> = (0..BYTES).map(|n| (n / PAGE % 251 + 1) as u8).collect();
    memory[CHUNK..2 * CHUNK].fill(0);
    let full = (machine(&memory), file_of(&memory));
    let open_full = || snapshot_of("full", &full.0, full.1.try_clone().unwrap());
    memory[PAGE..3 * PAGE].fill(0xAA);
    memory[CHUNK + PAGE] = 7;
    let lower = diff_above(chain(vec![open_full()]).unwrap(), &memory);
    let open_lower = || snapshot_of("lower", &lower.0, lower.1.try_clone().unwrap());
    memory[2 * PAGE] = 0xBB;
    // The page is a hole in the full snapshot, but not in the memory on which this diff is based.
    memory[CHUNK + PAGE] = 0;
    let upper = diff_above(chain(vec![open_full(), open_lower()]).unwrap(), &memory);
    let saved = upper.0.memory.base.clone().unwrap();
    let page = PAGE as u64;
    assert_eq!(saved.runs, [(2 * page, page), (CHUNK_BYTES + page, page)]);

    let open = || {
        SnapshotBaseChain::new(
            Path::new("upper"),
            saved.state_crc,
            vec![open_full(), open_lower()],
        )
    };
    let base = open().unwrap();
    let layers: Vec<u64> = base.layers().map(|(_, runs)| runs.len() as u64).collect();
    assert_eq!(layers, [2]);
    base.verify().unwrap();
    base.verify_diff(&upper.1, &saved, &upper.0.memory).unwrap();
    // The upper diff covers this page.
    lower.1.write_all_at(&[1], 2 * page).unwrap();
    base.verify_diff(&upper.1, &saved, &upper.0.memory).unwrap();
    let damaged = base.verify().unwrap_err();
    assert_eq!(damaged.path, Path::new("lower"));
    assert!(matches!(
        damaged.source,
        SnapshotDiffError::Memory(MemoryFileError::Damaged { start: 0, .. })
    ));
}

#[test]
fn number_of_diffs_is_limited() {
    let given = |number| {
        let memory = [1; PAGE];
        let mut states = vec![machine(&memory)];
        for _ in 0..number {
            let state = encode(states.last().unwrap()).unwrap();
            let crc = u32::from_le_bytes(*state.last_chunk().unwrap());
            let mut diff = machine(&memory);
            diff.memory.base = Some(SavedDiffBase {
                state_crc: crc,
                runs: Vec::new(),
            });
            states.push(diff);
        }
        let opened = states
            .iter()
            .map(|state| snapshot_of("base", state, file_of(&memory)));
        chain(opened.collect())
    };
    given(MAX_DIFFS - 1).unwrap();
    assert!(matches!(
        refused(given(MAX_DIFFS)),
        (_, SnapshotDiffError::TooManyDiffs)
    ));
}

/// [`SnapshotDiffWriter`] rejects chunks in the wrong order or of the wrong size, which an
/// untrusted VM may send.
#[test]
fn memory_out_of_order_is_refused() {
    let memory = vec![1; BYTES];
    let mut writer = SnapshotDiffWriter::new(base_of(&memory), BYTES as u64).unwrap();
    for (offset, len) in [(CHUNK_BYTES, CHUNK), (0, PAGE), (u64::MAX, 1), (0, 0)] {
        let refused = writer.compare(offset, &vec![1; len]);
        assert!(matches!(refused, Err(SnapshotDiffError::Order)), "{offset} {len}");
    }
    let state = encode(&machine(&memory)).unwrap();
    assert!(matches!(writer.finish(&state), Err(SnapshotDiffError::Order)));
}
