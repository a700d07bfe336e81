//! Reads the state file of a snapshot.

use std::io::{self, Read};
use std::path::Path;

use operator::input;
use snapshot::format::MAX_STATE_BYTES;

/// Reads a state file of limited size. The file may be a pipe.
pub(crate) fn read_state(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let limit = MAX_STATE_BYTES as u64 + 1;
    input::open(path)?.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}
