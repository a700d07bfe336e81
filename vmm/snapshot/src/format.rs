//! Frame of the state file. All numbers are little-endian:
//!
//! | offset | bytes | contents |
//! |---|---|---|
//! | 0 | 4 | magic `PVSS` |
//! | 4 | 2 | format version |
//! | 6 | 2 | 0 |
//! | 8 | 4 | length of the body |
//! | 12 | length | body: a [`SavedMachine`] as JSON |
//! | 12 + length | 4 | CRC-32 of all preceding bytes |
//!
//! New fields are mandatory by default. A version that does not know such a field rejects the
//! snapshot and names the field. A field whose name begins with `_` is optional, and versions that
//! do not know it ignore it. The format version changes only if the frame or the meaning of an
//! existing field changes.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::state::SavedMachine;

/// Format version that [`encode`] writes.
pub const VERSION: u16 = 1;
/// Maximum size of a state file in bytes.
pub const MAX_STATE_BYTES: usize = 16 << 20;

const MAGIC: [u8; 4] = *b"PVSS";
const HEADER_BYTES: usize = 12;
const CRC_BYTES: usize = 4;

/// Reason for rejecting a state file.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotFormatError {
    /// The file does not begin with the magic.
    #[error("this is no state of a VM: it does not begin with PVSS")]
    Magic,
    /// The file is shorter or longer than its header states.
    #[error("the state has {have} bytes, expected {need}: it was truncated or extended")]
    Length {
        /// Size of the state file in bytes.
        have: usize,
        /// Size of the state file according to its header, in bytes.
        need: usize,
    },
    /// The state exceeds [`MAX_STATE_BYTES`].
    #[error("the state has more than {} MiB", MAX_STATE_BYTES >> 20)]
    TooLarge,
    /// The checksum of the state file does not match.
    #[error("the state is damaged: its checksum does not match")]
    Checksum,
    /// The format version of the state file is not supported.
    #[error("the state has format version {0}, this program reads version {VERSION}")]
    Version(u16),
    /// The body is not a valid state. The message names an unknown or missing field.
    #[error("the state cannot be used by this version of Perfvisor")]
    Body(#[source] serde_json::Error),
}

/// Encodes a saved machine as a state file.
///
/// # Errors
/// Returns [`SnapshotFormatError::TooLarge`] if the state exceeds [`MAX_STATE_BYTES`], and
/// [`SnapshotFormatError::Body`] if it cannot be serialized.
pub fn encode(machine: &SavedMachine) -> Result<Vec<u8>, SnapshotFormatError> {
    encode_body(machine)
}

fn encode_body(body: &impl Serialize) -> Result<Vec<u8>, SnapshotFormatError> {
    let body = serde_json::to_vec(body).map_err(SnapshotFormatError::Body)?;
    if body.len() > MAX_STATE_BYTES - HEADER_BYTES - CRC_BYTES {
        return Err(SnapshotFormatError::TooLarge);
    }
    Ok(frame(&body))
}

/// Adds the header and the checksum to a body of at most [`MAX_STATE_BYTES`].
#[doc(hidden)]
#[must_use]
pub fn frame(body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
    let mut bytes = Vec::with_capacity(HEADER_BYTES + body.len() + CRC_BYTES);
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend([0; 2]);
    bytes.extend(length.to_le_bytes());
    bytes.extend(body);
    bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
    bytes
}

/// Decodes a state file.
///
/// # Errors
/// Returns a [`SnapshotFormatError`] if the file is truncated, damaged, of a different version, or
/// not a valid state.
pub fn decode(bytes: &[u8]) -> Result<SavedMachine, SnapshotFormatError> {
    let mut body: Value = serde_json::from_slice(body_of(bytes)?).map_err(SnapshotFormatError::Body)?;
    remove_optional_fields(&mut body);
    serde_json::from_value(body).map_err(SnapshotFormatError::Body)
}

/// Adds the optional field `name`, which begins with `_`, to a state file.
///
/// # Errors
/// Returns an error if [`encode`] or [`decode`] fails.
pub fn with_optional_field(bytes: &[u8], name: &str, value: Value) -> Result<Vec<u8>, SnapshotFormatError> {
    let mut fields: Map<String, Value> =
        serde_json::from_slice(body_of(bytes)?).map_err(SnapshotFormatError::Body)?;
    fields.insert(name.to_owned(), value);
    encode_body(&fields)
}

/// Returns the optional field `name` of a state file.
///
/// # Errors
/// Returns a [`SnapshotFormatError`] if the file is truncated, damaged, or of a different version.
pub fn optional_field(bytes: &[u8], name: &str) -> Result<Option<Value>, SnapshotFormatError> {
    let mut fields: Map<String, Value> =
        serde_json::from_slice(body_of(bytes)?).map_err(SnapshotFormatError::Body)?;
    Ok(fields.remove(name))
}

/// Checks the frame of a state file, and returns its body.
fn body_of(bytes: &[u8]) -> Result<&[u8], SnapshotFormatError> {
    if !bytes.starts_with(&MAGIC) {
        return Err(SnapshotFormatError::Magic);
    }
    if bytes.len() > MAX_STATE_BYTES {
        return Err(SnapshotFormatError::TooLarge);
    }
    let Some((header, _)) = bytes.split_first_chunk::<HEADER_BYTES>() else {
        return Err(SnapshotFormatError::Length {
            have: bytes.len(),
            need: HEADER_BYTES + CRC_BYTES,
        });
    };
    let version = u16::from_le_bytes([header[4], header[5]]);
    if version != VERSION || header[6..8] != [0; 2] {
        return Err(SnapshotFormatError::Version(version));
    }
    let length = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
    let need = usize::try_from(length)
        .unwrap_or(usize::MAX)
        .saturating_add(HEADER_BYTES + CRC_BYTES);
    if bytes.len() != need {
        return Err(SnapshotFormatError::Length {
            have: bytes.len(),
            need,
        });
    }
    let (checked, crc) = bytes.split_at(bytes.len() - CRC_BYTES);
    if crc != crc32fast::hash(checked).to_le_bytes() {
        return Err(SnapshotFormatError::Checksum);
    }
    Ok(&checked[HEADER_BYTES..])
}

/// Removes optional fields from `value` and everything in it. serde_json limits the nesting depth
/// of a value, and therefore the depth of this recursion.
fn remove_optional_fields(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|name, _| !name.starts_with('_'));
            fields.values_mut().for_each(remove_optional_fields);
        }
        Value::Array(items) => items.iter_mut().for_each(remove_optional_fields),
        _ => {}
    }
}
