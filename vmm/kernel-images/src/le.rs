//! Little-endian numbers at an offset of untrusted bytes. `None` beyond their end.

/// The 16-bit number at `at`.
#[inline]
pub fn u16_at(data: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(*data.get(at..)?.first_chunk()?))
}

/// The 32-bit number at `at`.
#[inline]
pub fn u32_at(data: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*data.get(at..)?.first_chunk()?))
}

/// The 64-bit number at `at`.
#[inline]
pub fn u64_at(data: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*data.get(at..)?.first_chunk()?))
}
