//! Bounds-checked reads of little-endian integers from untrusted bytes. All functions return `None`
//! beyond the end.

/// Reads the 16-bit integer at offset `at` in `data`.
#[inline]
pub fn u16_at(data: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*data.get(at..)?.first_chunk()?))
}

/// Reads the 32-bit integer at offset `at` in `data`.
#[inline]
pub fn u32_at(data: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*data.get(at..)?.first_chunk()?))
}

/// Reads the 64-bit integer at offset `at` in `data`.
#[inline]
pub fn u64_at(data: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*data.get(at..)?.first_chunk()?))
}
