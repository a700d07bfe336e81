//! A cursor over the bytes of a record, which removes fields from the front.

/// Error of decoding a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DecodeError {
    /// The record ends before the end of a field.
    #[error("the record ends before its {field}")]
    Short {
        /// Name of the field that is missing or truncated.
        field: &'static str,
    },
    /// The sample is longer than its format requires.
    #[error("{bytes} bytes after the last field")]
    Trailing {
        /// Number of bytes after the last field.
        bytes: usize,
    },
}

pub(super) struct Cursor<'a> {
    rest: &'a [u8],
}

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    #[inline]
    pub(super) fn bytes(&mut self, len: usize, field: &'static str) -> Result<&'a [u8], DecodeError> {
        let (bytes, rest) = self
            .rest
            .split_at_checked(len)
            .ok_or(DecodeError::Short { field })?;
        self.rest = rest;
        Ok(bytes)
    }

    #[inline]
    fn array<const N: usize>(&mut self, field: &'static str) -> Result<[u8; N], DecodeError> {
        let (bytes, rest) = self
            .rest
            .split_first_chunk()
            .ok_or(DecodeError::Short { field })?;
        self.rest = rest;
        Ok(*bytes)
    }

    #[inline]
    pub(super) fn u64(&mut self, field: &'static str) -> Result<u64, DecodeError> {
        self.array(field).map(u64::from_ne_bytes)
    }

    #[inline]
    pub(super) fn u32(&mut self, field: &'static str) -> Result<u32, DecodeError> {
        self.array(field).map(u32::from_ne_bytes)
    }

    /// Removes `count` fields of `len` bytes each from the front and returns them. `count` may come
    /// from an untrusted record.
    #[inline]
    pub(super) fn many(
        &mut self,
        count: u64,
        len: usize,
        field: &'static str,
    ) -> Result<&'a [u8], DecodeError> {
        let bytes = usize::try_from(count)
            .ok()
            .and_then(|count| count.checked_mul(len));
        self.bytes(bytes.ok_or(DecodeError::Short { field })?, field)
    }

    /// Removes the last `len` bytes of the record and returns them.
    pub(super) fn split_end(&mut self, len: usize, field: &'static str) -> Result<Self, DecodeError> {
        let at = self
            .rest
            .len()
            .checked_sub(len)
            .ok_or(DecodeError::Short { field })?;
        let (rest, end) = self.rest.split_at(at);
        self.rest = rest;
        Ok(Self { rest: end })
    }

    /// Removes and returns all remaining bytes.
    pub(super) fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.rest)
    }
}

/// Returns the bytes before the first NUL, or all bytes if there is none.
pub(super) fn until_nul(bytes: &[u8]) -> &[u8] {
    bytes
        .iter()
        .position(|&byte| byte == 0)
        .map_or(bytes, |end| &bytes[..end])
}
