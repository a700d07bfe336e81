//! Build IDs, which identify one build of a kernel, program or library (`ld --build-id`).
//!
//! Build IDs are stored in ELF notes. `perf` and debuginfod use them to find the symbols of exactly
//! this build.

use std::fmt;

use crate::le::u32_at;

/// Maximum length of a build ID, in bytes. perf and common linkers use 20 bytes.
pub const MAX_BYTES: usize = 20;

/// Build ID of 1 to 20 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BuildId {
    bytes: [u8; MAX_BYTES],
    len: u8,
}

/// Type of the ELF note that contains a build ID (`NT_GNU_BUILD_ID`).
const GNU_BUILD_ID: u32 = 3;
/// Maximum number of ELF notes in which a build ID is searched for.
const MAX_NOTES: usize = 64;

impl BuildId {
    /// Creates a build ID. Returns `None` if `id` is empty, longer than 20 bytes, or all zeros,
    /// which perf treats as no build ID.
    #[expect(clippy::cast_possible_truncation, reason = "at most MAX_BYTES")]
    pub fn new(id: &[u8]) -> Option<Self> {
        let mut bytes = [0; MAX_BYTES];
        bytes.get_mut(..id.len())?.copy_from_slice(id);
        let len = id.len() as u8;
        id.iter().any(|&b| b != 0).then_some(Self { bytes, len })
    }

    /// Parses a build ID from hexadecimal digits, the format that [`fmt::Display`] writes.
    pub fn from_hex(text: &str) -> Option<Self> {
        let digits = text.as_bytes();
        if !digits.len().is_multiple_of(2) || digits.len() > 2 * MAX_BYTES {
            return None;
        }
        let nibble = |digit: u8| char::from(digit).to_digit(16).and_then(|n| u8::try_from(n).ok());
        let byte = |two: &[u8]| Some(nibble(two[0])? << 4 | nibble(two[1])?);
        let bytes: Option<Vec<u8>> = digits.chunks_exact(2).map(byte).collect();
        Self::new(&bytes?)
    }

    /// Returns the bytes of the build ID.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// Returns the length of the build ID, in bytes.
    pub fn length(&self) -> u8 {
        self.len
    }

    /// Finds the build ID in ELF notes, which are 4-byte aligned.
    pub fn in_notes(notes: &[u8]) -> Option<Self> {
        let mut at = 0usize;
        for _ in 0..MAX_NOTES {
            let (name_len, len) = (u32_at(notes, at)? as usize, u32_at(notes, at + 4)? as usize);
            let kind = u32_at(notes, at + 8)?;
            let name = at + 12;
            let description = name.checked_add(name_len.checked_next_multiple_of(4)?)?;
            let end = description.checked_add(len)?;
            if kind == GNU_BUILD_ID && notes.get(name..name.checked_add(name_len)?)? == b"GNU\0" {
                return Self::new(notes.get(description..end)?);
            }
            at = end.checked_next_multiple_of(4)?;
        }
        None
    }
}

impl fmt::Display for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_bytes()
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for BuildId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn note(name: &[u8], kind: u32, description: &[u8]) -> Vec<u8> {
        let mut note = Vec::new();
        for word in [name.len() as u32, description.len() as u32, kind] {
            note.extend(word.to_le_bytes());
        }
        for part in [name, description] {
            note.extend(part);
            note.resize(note.len().next_multiple_of(4), 0);
        }
        note
    }

    #[test]
    fn build_id_is_found_among_notes() {
        let id: Vec<u8> = (1..=20).collect();
        let notes = [
            note(b"GNU\0", 5, &[1; 16]),
            note(b"Xen\0", 3, &[9; 20]),
            note(b"Linux\0", 0, &[7; 3]),
            note(b"GNU\0", 3, &id),
        ]
        .concat();
        let found = BuildId::in_notes(&notes).unwrap();
        assert_eq!(found.as_bytes(), id);
        assert_eq!(found.to_string(), "0102030405060708090a0b0c0d0e0f1011121314");
        assert_eq!(BuildId::from_hex(&found.to_string()), Some(found));
        assert_eq!(BuildId::in_notes(&notes[..notes.len() - 1]), None);
        assert_eq!(BuildId::in_notes(&note(b"GNU\0", 3, &[0; 20])), None);
        assert_eq!(BuildId::in_notes(&note(b"GNU\0", 3, &[1; 21])), None);
    }

    #[test]
    fn build_id_rejects_invalid_hex() {
        for bad in ["", "1", "0g", "+1", "é", &"11".repeat(21)] {
            assert_eq!(BuildId::from_hex(bad), None, "{bad}");
        }
    }

    proptest! {
        /// The search for a build ID does not panic on arbitrary notes, which may come from guest
        /// memory.
        #[test]
        fn build_id_search_never_panics(notes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = BuildId::in_notes(&notes);
        }
    }
}
