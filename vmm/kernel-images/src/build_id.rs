//! Build-ids: what names one build of a kernel, a program or a library (`ld --build-id`).
//!
//! They are in ELF notes. `perf` and debuginfod look for symbols by them, so that those of another build are
//! not taken.

use std::fmt;

use crate::le::u32_at;

/// Most bytes of one; perf and the usual linkers have 20.
pub const MAX_BYTES: usize = 20;

/// A build-id: 1 to 20 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BuildId {
    bytes: [u8; MAX_BYTES],
    len: u8,
}

/// `NT_GNU_BUILD_ID`.
const GNU_BUILD_ID: u32 = 3;
/// Notes looked at before giving up.
const MOST_NOTES: usize = 64;

impl BuildId {
    /// Of its bytes. `None`: there are none, more than 20, or only zeros, which perf takes for no build-id.
    #[expect(clippy::cast_possible_truncation, reason = "at most MAX_BYTES")]
    pub fn new(id: &[u8]) -> Option<Self> {
        let mut bytes = [0; MAX_BYTES];
        bytes.get_mut(..id.len())?.copy_from_slice(id);
        let len = id.len() as u8;
        id.iter().any(|&b| b != 0).then_some(Self { bytes, len })
    }

    /// Of the hexadecimal digits that [`fmt::Display`] writes.
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

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// How many bytes it has.
    pub fn length(&self) -> u8 {
        self.len
    }

    /// The one in ELF notes, each aligned to 4 bytes.
    pub fn in_notes(notes: &[u8]) -> Option<Self> {
        let mut at = 0usize;
        for _ in 0..MOST_NOTES {
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
    fn the_build_id_is_found_among_other_notes() {
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
    fn what_are_no_digits_are_refused() {
        for bad in ["", "1", "0g", "+1", "é", &"11".repeat(21)] {
            assert_eq!(BuildId::from_hex(bad), None, "{bad}");
        }
    }

    proptest! {
        /// Notes come out of a guest's memory.
        #[test]
        fn no_notes_make_it_panic(notes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = BuildId::in_notes(&notes);
        }
    }
}
