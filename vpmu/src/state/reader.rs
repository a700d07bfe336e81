//! Bounds-checked reads of the integers in a saved state.

use super::VpmuStateError;

/// Unread bytes of a saved state, from which integers are read.
pub(super) struct Reader<'a> {
    pub(super) rest: &'a [u8],
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], VpmuStateError> {
        let Some((head, rest)) = self.rest.split_first_chunk::<N>() else {
            return Err(VpmuStateError::Length {
                have: self.rest.len(),
                need: N,
            });
        };
        self.rest = rest;
        Ok(*head)
    }

    pub(super) fn u8(&mut self) -> Result<u8, VpmuStateError> {
        Ok(u8::from_le_bytes(self.take()?))
    }

    pub(super) fn u16(&mut self) -> Result<u16, VpmuStateError> {
        Ok(u16::from_le_bytes(self.take()?))
    }

    pub(super) fn u32(&mut self) -> Result<u32, VpmuStateError> {
        Ok(u32::from_le_bytes(self.take()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64, VpmuStateError> {
        Ok(u64::from_le_bytes(self.take()?))
    }
}
