//! Tests of the checksums of the memory file.

use std::os::unix::fs::FileExt as _;

use snapshot::memory::{CHUNK_BYTES, MemoryFileError, check_size, checksum, verify};
use snapshot::state::SavedMemoryFile;

#[test]
fn damage_is_found_by_its_chunk() {
    let file = tempfile::tempfile().unwrap();
    let bytes = 2 * CHUNK_BYTES + 4096;
    file.set_len(bytes).unwrap();
    file.write_all_at(b"guest", CHUNK_BYTES + 100).unwrap();
    let mut chunk = vec![0; usize::try_from(CHUNK_BYTES).unwrap()];
    let first = checksum(&chunk);
    let last = checksum(&chunk[..4096]);
    chunk[100..105].copy_from_slice(b"guest");
    let memory = SavedMemoryFile {
        bytes,
        crcs: vec![first, checksum(&chunk), last],
        base: None,
    };
    verify(&file, &memory).unwrap();
    file.write_all_at(&[1], 2 * CHUNK_BYTES - 1).unwrap();
    check_size(&file, &memory).unwrap();
    let error = verify(&file, &memory).unwrap_err();
    assert!(
        matches!(
            error,
            MemoryFileError::Damaged {
                start: CHUNK_BYTES,
                ..
            }
        ),
        "{error}"
    );
    file.set_len(bytes - 1).unwrap();
    assert!(matches!(
        verify(&file, &memory),
        Err(MemoryFileError::Length { .. })
    ));
    file.set_len(bytes).unwrap();
    let fewer = SavedMemoryFile {
        crcs: vec![first],
        ..memory
    };
    assert!(matches!(
        check_size(&file, &fewer),
        Err(MemoryFileError::Checksums { .. })
    ));
}
