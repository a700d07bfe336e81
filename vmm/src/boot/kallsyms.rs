//! The symbol table a Linux kernel carries in its own read-only data (CONFIG_KALLSYMS).
//!
//! A distribution's kernel is stripped, but its kallsyms data is loaded with it. Names are
//! compressed with a table of 256 tokens. The data has no header and its parts moved between
//! versions, so it is recognised by its structure: the token table by the digits, whose tokens are
//! always themselves; the names by a count whose walk ends exactly where the markers confirm it.
//! Linux, scripts/kallsyms.c and kernel/kallsyms.c.

use super::elf::Segment;
use super::symbols::{MAX_SYMBOLS, SymbolTable};

/// Fewest symbols taken for a real table.
const MIN_SYMBOLS: u32 = 1000;
/// How far before the token table the names may start, in bytes.
const MAX_NAMES_BYTES: usize = 64 << 20;
/// Index of the token "0".
const TOKEN_ZERO: usize = 0x30;
/// A kernel's lowest text address.
const KERNEL_TEXT: u64 = 0xFFFF_FFFF_8000_0000;

/// Reads the text symbols; none when the image has no kallsyms data or it is not understood.
pub(crate) fn read(segments: &[Segment<'_>]) -> SymbolTable {
    segments
        .iter()
        .find_map(|s| read_segment(s.data))
        .unwrap_or_default()
}

fn u32_at(data: &[u8], at: usize) -> Option<u32> {
    let b = data.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}

fn u64_at(data: &[u8], at: usize) -> Option<u64> {
    Some(u64::from(u32_at(data, at)?) | u64::from(u32_at(data, at.checked_add(4)?)?) << 32)
}

/// The 256 tokens.
struct Tokens<'a> {
    table_start: usize,
    index_end: usize,
    tokens: Vec<&'a [u8]>,
}

impl<'a> Tokens<'a> {
    /// Finds the token table by the run of the ten digits.
    fn find(data: &'a [u8]) -> Option<Self> {
        const DIGITS: &[u8] = b"0\x001\x002\x003\x004\x005\x006\x007\x008\x009\x00";
        memchr::memmem::find_iter(data, DIGITS).find_map(|digits| Self::at(data, digits))
    }

    /// The table whose token "0" is at `digits`, if the index after it agrees.
    fn at(data: &'a [u8], digits: usize) -> Option<Self> {
        let mut end = digits;
        for _ in TOKEN_ZERO..256 {
            let token = data.get(end..data.len().min(end + 256))?;
            end += token.iter().position(|b| *b == 0)? + 1;
        }
        let index = end.next_multiple_of(8);
        let offset_of = |token: usize| {
            let b = data.get(index + 2 * token..index + 2 * token + 2)?;
            Some(usize::from(u16::from_le_bytes([b[0], b[1]])))
        };
        let table_start = digits.checked_sub(offset_of(TOKEN_ZERO)?)?;
        let mut tokens = Vec::with_capacity(256);
        let mut expected = 0;
        for token in 0..256 {
            if offset_of(token)? != expected {
                return None;
            }
            let rest = &data[table_start + expected..end];
            let len = rest.iter().position(|b| *b == 0)?;
            tokens.push(&rest[..len]);
            expected += len + 1;
        }
        Some(Tokens {
            table_start,
            index_end: index + 512,
            tokens,
        })
    }
}

/// Length of the compressed name at `at` and where its first byte is.
fn name_at(data: &[u8], at: usize) -> Option<(usize, usize)> {
    let first = usize::from(*data.get(at)?);
    if first & 0x80 == 0 {
        return Some((first, at + 1));
    }
    // Since Linux 6.1 a length above 127 takes a second byte.
    let second = usize::from(*data.get(at + 1)?);
    Some(((first & 0x7F) | (second << 7), at + 2))
}

/// Walks `count` names from `start`; the end, if the markers behind it confirm every 256th name.
fn walk_names(data: &[u8], start: usize, count: u32, limit: usize) -> Option<usize> {
    let mut at = start;
    let mut markers = Vec::new();
    for i in 0..count {
        if i % 256 == 0 {
            markers.push((at - start) as u32);
        }
        let (len, bytes) = name_at(data, at)?;
        at = bytes + len;
        if len == 0 || at > limit {
            return None;
        }
    }
    let table = at.next_multiple_of(8);
    markers
        .iter()
        .enumerate()
        .all(|(i, m)| u32_at(data, table + 4 * i) == Some(*m))
        .then_some(at)
}

fn read_segment(data: &[u8]) -> Option<SymbolTable> {
    let tokens = Tokens::find(data)?;
    let lowest = tokens.table_start.saturating_sub(MAX_NAMES_BYTES);
    let mut at = tokens.table_start & !7;
    let (count_at, count) = loop {
        at = at.checked_sub(8).filter(|a| *a >= lowest)?;
        // The count is a u32 aligned to 8 bytes, with zeroes up to the names.
        let Some(word) = u64_at(data, at) else { continue };
        if word < u64::from(MIN_SYMBOLS) || word > MAX_SYMBOLS as u64 {
            continue;
        }
        if walk_names(data, at + 8, word as u32, tokens.table_start).is_some() {
            break (at, word as u32);
        }
    };
    let offsets_bytes = (4 * count as usize).next_multiple_of(8);
    // Linux before 6.4 has offsets and base before the count, later ones after the tokens.
    let before = count_at.checked_sub(8 + offsets_bytes).map(|o| (o, count_at - 8));
    let after_start = tokens.index_end.next_multiple_of(8);
    let after = Some((after_start, after_start + offsets_bytes));
    let (offsets, base) = [before, after].into_iter().flatten().find_map(|(o, b)| {
        u64_at(data, b)
            .filter(|base| *base >= KERNEL_TEXT)
            .map(|base| (o, base))
    })?;
    // Until 6.14 an SMP kernel stores kernel addresses as negative distances and per-CPU ones as
    // they are; later ones store plain distances.
    let negative = (0..count as usize)
        .filter(|i| u32_at(data, offsets + 4 * i).is_some_and(|o| o & 0x8000_0000 != 0))
        .count();
    let signed = negative > count as usize / 2;
    let mut table = SymbolTable::default();
    let mut name = Vec::new();
    let mut at = count_at + 8;
    for i in 0..count as usize {
        let (len, bytes) = name_at(data, at)?;
        at = bytes + len;
        name.clear();
        for token in data.get(bytes..at)? {
            name.extend_from_slice(tokens.tokens[usize::from(*token)]);
        }
        let offset = u32_at(data, offsets + 4 * i)?;
        let address = match (signed, offset as i32) {
            (true, o) if o < 0 => base.wrapping_sub(1).wrapping_add_signed(-i64::from(o)),
            (true, _) => continue,
            (false, _) => base.wrapping_add(u64::from(offset)),
        };
        // The first character is the kind, as nm(1) prints it.
        if let [b't' | b'T' | b'w' | b'W', rest @ ..] = name.as_slice() {
            table.push(address, 0, &String::from_utf8_lossy(rest));
        }
    }
    table.finish();
    Some(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table as Linux 6.1 writes it, with every character its own token.
    fn synthetic(names: &[(u64, &str)]) -> Vec<u8> {
        let base = 0xFFFF_FFFF_8100_0000u64;
        let mut d = vec![0xAA; 64];
        let pad = |d: &mut Vec<u8>| d.resize(d.len().next_multiple_of(8), 0);
        for (address, _) in names {
            let o = -((address - base) as i64) - 1;
            d.extend_from_slice(&(o as i32).to_le_bytes());
        }
        pad(&mut d);
        d.extend_from_slice(&base.to_le_bytes());
        d.extend_from_slice(&(names.len() as u64).to_le_bytes());
        let start = d.len();
        let mut markers = Vec::new();
        for (i, (_, name)) in names.iter().enumerate() {
            if i % 256 == 0 {
                markers.push((d.len() - start) as u32);
            }
            d.push(name.len() as u8);
            d.extend_from_slice(name.as_bytes());
        }
        pad(&mut d);
        for m in markers {
            d.extend_from_slice(&m.to_le_bytes());
        }
        pad(&mut d);
        let mut index = Vec::new();
        let table = d.len();
        for c in 0..=255u8 {
            index.push((d.len() - table) as u16);
            d.extend_from_slice(&[c.max(1), 0]);
        }
        pad(&mut d);
        for i in index {
            d.extend_from_slice(&i.to_le_bytes());
        }
        d
    }

    fn many() -> Vec<(u64, String)> {
        (0..1500)
            .map(|i| (0xFFFF_FFFF_8100_0000 + 32 * i, format!("tfunction_{i}")))
            .collect()
    }

    #[test]
    fn a_table_reads_back_and_only_text_is_kept() {
        let owned = many();
        let mut names: Vec<(u64, &str)> = owned.iter().map(|(a, n)| (*a, n.as_str())).collect();
        names[7].1 = "Dsome_data";
        let table = read_segment(&synthetic(&names)).unwrap();
        assert_eq!(table.len(), 1499);
        assert_eq!(
            table.address_of("function_1200"),
            Some(0xFFFF_FFFF_8100_0000 + 32 * 1200)
        );
        assert_eq!(table.address_of("some_data"), None);
    }

    #[test]
    fn damaged_tables_give_no_symbols_and_no_panic() {
        let owned = many();
        let names: Vec<(u64, &str)> = owned.iter().map(|(a, n)| (*a, n.as_str())).collect();
        let good = synthetic(&names);
        for cut in (0..good.len()).step_by(997) {
            let _ = read_segment(&good[..cut]);
        }
        for at in (0..good.len()).step_by(613) {
            let mut bad = good.clone();
            bad[at] ^= 0xFF;
            let _ = read_segment(&bad);
        }
    }
}
