//! Search for the kallsyms table in a kernel image or in the memory of a running kernel.
//!
//! During the kernel build, `scripts/kallsyms` compresses symbol names with a table of 256 tokens
//! and places several arrays into `.rodata`. In a stripped image, these arrays have no symbols, so
//! they are found by their structure:
//!
//! 1. Token table: 256 NUL-terminated strings that include the single characters `0` to `9` in
//!    order, followed by the token index, which consists of 256 16-bit offsets. All offsets must
//!    match the strings.
//! 2. Symbol names: the number of symbols, the names (each as `length, tokens…`), and one marker
//!    per 256 names. A candidate is accepted if all names can be parsed and all markers match.
//! 3. Addresses: 64-bit addresses, or 32-bit offsets with a base. In Linux up to 6.3 they precede
//!    the number of symbols; since 6.4 they follow the token index. In one encoding
//!    (`KALLSYMS_ABSOLUTE_PERCPU`), negative offsets count down from the base and other offsets are
//!    absolute. In the other encoding, all offsets count up from the base.
//!
//! The search tries all field widths that kernel versions have used (32- or 64-bit counts and
//! markers, two-byte lengths since 6.1).

use crate::le::{u32_at, u64_at};
use crate::symbols::{KernelSymbols, SymbolsBuilder};

/// Error returned when no valid kallsyms table was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KallsymsError {
    /// No token table was found whose index matches its strings.
    #[error("kallsyms token table not found")]
    NoTokens,
    /// No symbol names were found that match the tokens and markers.
    #[error("kallsyms names that match the token table not found")]
    NoNames,
    /// Symbol names were found, but no matching addresses.
    #[error("kallsyms addresses that match the names not found")]
    NoAddresses,
}

/// Numbers of symbols that are accepted in a kallsyms table.
const SYMBOLS: std::ops::RangeInclusive<u64> = 256..=4_000_000;
/// Maximum distance in bytes from the start of the symbol names to the token table after them.
const NAMES_REACH: usize = 32 << 20;
/// Maximum number of candidates for the token table that are examined. Several may exist, because
/// memory may contain copies of the table and similar data.
const MAX_CANDIDATES: usize = 16;
/// Maximum number of candidates for the table of symbol names that are parsed completely. Parsing
/// one candidate takes a pass over all of its names.
const MAX_VALIDATIONS: u32 = 64;
/// Maximum length of a symbol name after its tokens are expanded, in bytes.
const MAX_NAME: usize = 1024;
const UPPER_HALF: u64 = 1 << 63;
/// Start of the kernel mapping, which is the top 2 GiB of the address space.
const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;

struct TokenTable<'d> {
    data: &'d [u8],
    start: usize,
    index: [u16; 256],
    /// Offset of the end of the token index, which follows the token table.
    end: usize,
}

impl<'d> TokenTable<'d> {
    fn token(&self, i: u8) -> &'d [u8] {
        let from = self.start + usize::from(self.index[usize::from(i)]);
        let rest = &self.data[from.min(self.data.len())..];
        &rest[..memchr::memchr(0, rest).unwrap_or(0)]
    }

    /// Parses the token table that contains the digits at offset `digits`.
    fn around(data: &'d [u8], digits: usize) -> Option<Self> {
        // The string "0" is followed by the remainder of 256 - 48 strings, padding, and the index.
        let mut at = digits;
        for _ in usize::from(b'0')..256 {
            let rest = data.get(at..)?;
            at += memchr::memchr(0, &rest[..rest.len().min(MAX_NAME)])? + 1;
        }
        [2, 4, 8].into_iter().find_map(|align| {
            let from = at.next_multiple_of(align);
            let raw = data.get(from..from + 512)?;
            let mut index = [0; 256];
            for (slot, b) in index.iter_mut().zip(raw.chunks_exact(2)) {
                *slot = u16::from_le_bytes([b[0], b[1]]);
            }
            let start = digits.checked_sub(usize::from(index[usize::from(b'0')]))?;
            let tokens = Self {
                data,
                start,
                index,
                end: from + 512,
            };
            let mut expected = 0;
            for i in 0..=255u8 {
                if usize::from(tokens.index[usize::from(i)]) != expected {
                    return None;
                }
                expected += tokens.token(i).len() + 1;
            }
            (start + expected == at).then_some(tokens)
        })
    }
}

/// Location and encoding of the table of symbol names.
struct NameTable {
    count: usize,
    /// Offset of the number of symbols.
    count_at: usize,
    /// Offset of the first symbol name.
    start: usize,
    /// `true` if a name of 128 or more tokens has a length field of two bytes.
    big: bool,
}

/// Parses the compressed symbol name at offset `at`. Returns the offset of the next name, and the
/// range of this name's tokens in `data`. `big` is `true` if a length field may have two bytes.
fn name_at(data: &[u8], at: usize, big: bool) -> Option<(usize, std::ops::Range<usize>)> {
    let first = usize::from(*data.get(at)?);
    let (len, from) = if big && first & 0x80 != 0 {
        ((first & 0x7F) | (usize::from(*data.get(at + 1)?) << 7), at + 2)
    } else {
        (first, at + 1)
    };
    (len != 0 && from + len <= data.len()).then_some((from + len, from..from + len))
}

fn expand<'b>(tokens: &TokenTable<'_>, packed: &[u8], buf: &'b mut [u8; MAX_NAME]) -> Option<&'b [u8]> {
    let mut len = 0;
    for &t in packed {
        let piece = tokens.token(t);
        buf.get_mut(len..len + piece.len())?.copy_from_slice(piece);
        len += piece.len();
    }
    Some(&buf[..len])
}

/// Returns whether the expanded name `text` consists of a type letter followed by a symbol name.
fn is_symbol(text: &[u8]) -> bool {
    text.len() >= 2
        && (text[0].is_ascii_alphabetic() || matches!(text[0], b'?' | b'-'))
        && text[1..].iter().all(u8::is_ascii_graphic)
}

/// Number of symbol names that are checked before a candidate for the table of symbol names is
/// parsed completely.
const PROBED_NAMES: usize = 64;

impl NameTable {
    fn before(tokens: &TokenTable<'_>) -> Option<Self> {
        let data = tokens.data;
        let lowest = tokens.start.saturating_sub(NAMES_REACH);
        // Searches downwards from the token table for a plausible symbol count. The first match may
        // be wrong, so each candidate is verified by parsing its names completely.
        let mut at = (tokens.start & !7).checked_sub(8)?;
        let mut proofs = 0;
        while at >= lowest {
            if let Some(n) = u32_at(data, at)
                && SYMBOLS.contains(&u64::from(n))
                && u32_at(data, at + 4) == Some(0)
            {
                let names = Self {
                    count: n as usize,
                    count_at: at,
                    start: at + 8,
                    big: true,
                };
                for big in [true, false] {
                    let names = Self { big, ..names };
                    if !names.taste(tokens) {
                        continue;
                    }
                    if names.is_valid(tokens) {
                        return Some(names);
                    }
                    proofs += 1;
                    if proofs >= MAX_VALIDATIONS {
                        return None;
                    }
                }
            }
            at = at.checked_sub(8)?;
        }
        None
    }

    fn taste(&self, tokens: &TokenTable<'_>) -> bool {
        let (mut at, mut buf) = (self.start, [0; MAX_NAME]);
        (0..PROBED_NAMES).all(|_| {
            let Some((next, packed)) = name_at(tokens.data, at, self.big) else {
                return false;
            };
            at = next;
            expand(tokens, &tokens.data[packed], &mut buf).is_some_and(is_symbol)
        })
    }

    /// Returns whether all names can be parsed and the markers after them match.
    fn is_valid(&self, tokens: &TokenTable<'_>) -> bool {
        let data = tokens.data;
        let mut markers = Vec::with_capacity(self.count / 256 + 1);
        let mut at = self.start;
        for i in 0..self.count {
            if i % 256 == 0 {
                markers.push((at - self.start) as u64);
            }
            match name_at(data, at, self.big) {
                Some((next, _)) => at = next,
                None => return false,
            }
        }
        [4usize, 8].into_iter().any(|width| {
            let from = at.next_multiple_of(8);
            markers.iter().enumerate().all(|(i, &want)| {
                let slot = from + i * width;
                let got = if width == 4 {
                    u32_at(data, slot).map(u64::from)
                } else {
                    u64_at(data, slot)
                };
                got == Some(want)
            })
        })
    }
}

/// Decodes the addresses of the symbols. Tries the possible locations of the addresses, the most
/// likely one first.
fn addresses(tokens: &TokenTable<'_>, names: &NameTable) -> Option<Vec<u64>> {
    let data = tokens.data;
    let n = names.count;
    let offsets_len = (n * 4).next_multiple_of(8);
    // Layout since 6.4: token index, offsets, base.
    let after = tokens.end.next_multiple_of(8);
    if let Some(base) = u64_at(data, after + offsets_len)
        && let Some(found) = relative(data, after, n, base)
    {
        return Some(found);
    }
    // Layout up to 6.3: offsets, base, count.
    if let Some(base_at) = names.count_at.checked_sub(8)
        && let Some(base) = u64_at(data, base_at)
        && let Some(from) = base_at.checked_sub(offsets_len)
        && let Some(found) = relative(data, from, n, base)
    {
        return Some(found);
    }
    // Layout without a base: addresses, count; or, since 6.4: token index, addresses.
    [names.count_at.checked_sub(n * 8), Some(after)]
        .into_iter()
        .flatten()
        .find_map(|from| {
            let list: Vec<u64> = (0..n)
                .map(|i| u64_at(data, from + i * 8))
                .collect::<Option<_>>()?;
            (is_plausible(&list) && list.is_sorted()).then_some(list)
        })
}

fn relative(data: &[u8], from: usize, n: usize, base: u64) -> Option<Vec<u64>> {
    if base < KERNEL_MAP {
        return None;
    }
    let offsets: Vec<u32> = (0..n)
        .map(|i| u32_at(data, from + i * 4))
        .collect::<Option<_>>()?;
    let per_cpu = |o: u32| {
        let signed = i64::from(o.cast_signed());
        if signed >= 0 {
            signed.cast_unsigned()
        } else {
            base.wrapping_sub(1).wrapping_sub(signed.cast_unsigned())
        }
    };
    let plain = |o: u32| base.wrapping_add(u64::from(o));
    let both: [&dyn Fn(u32) -> u64; 2] = [&per_cpu, &plain];
    both.into_iter().find_map(|decode| {
        let list: Vec<u64> = offsets.iter().map(|&o| decode(o)).collect();
        (is_plausible(&list) && list.is_sorted()).then_some(list)
    })
}

/// Returns whether most addresses in `list` are in the kernel's address range.
fn is_plausible(list: &[u64]) -> bool {
    list.iter().filter(|&&a| a >= UPPER_HALF).count() * 2 > list.len()
}

/// Finds the kallsyms tables in `data` and returns their symbols. `data` contains `.rodata`, a
/// whole image, or a kernel's memory in virtual address order. An offset in `data` must be aligned
/// to 8 bytes if the address of the same byte is.
pub fn find(data: &[u8]) -> Result<KernelSymbols, KallsymsError> {
    const DIGITS: &[u8] = b"0\x001\x002\x003\x004\x005\x006\x007\x008\x009\x00";
    let mut worst = KallsymsError::NoTokens;
    let candidates = memchr::memmem::find_iter(data, DIGITS)
        .filter_map(|at| TokenTable::around(data, at))
        .take(MAX_CANDIDATES);
    for tokens in candidates {
        let Some(names) = NameTable::before(&tokens) else {
            if worst == KallsymsError::NoTokens {
                worst = KallsymsError::NoNames;
            }
            continue;
        };
        let Some(list) = addresses(&tokens, &names) else {
            worst = KallsymsError::NoAddresses;
            continue;
        };
        let mut builder = SymbolsBuilder::default();
        let (mut at, mut buf) = (names.start, [0; MAX_NAME]);
        for address in list {
            let Some((next, packed)) = name_at(data, at, names.big) else {
                break;
            };
            at = next;
            if let Some(text) = expand(&tokens, &data[packed], &mut buf)
                && is_symbol(text)
            {
                builder.add(address, text[0], &text[1..]);
            }
        }
        if let Some(symbols) = builder.finish() {
            return Ok(symbols);
        }
    }
    Err(worst)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[derive(Clone, Copy, Debug)]
    enum Layout {
        /// Linux 4.5 layout: addresses, counts and markers have 64 bits.
        V4_5,
        /// Linux 4.20 layout: offsets precede the names, and per-CPU symbols are absolute.
        V4_20,
        /// Linux 6.2 layout: like `V4_20`, with a permutation table between markers and tokens.
        V6_2,
        /// Linux 6.4 layout: offsets follow the tokens.
        V6_4,
        /// Linux 6.15 layout: like `V6_4`, but all offsets count up from the base.
        V6_15,
    }

    const BASE: u64 = 0xffff_ffff_8100_0000;

    /// Builds kallsyms tables in the given layout. The token table consists of the printable
    /// characters, `sys_`, and unused tokens.
    fn build(layout: Layout, symbols: &[(u64, String)]) -> Vec<u8> {
        let n = symbols.len();
        let mut tokens = Vec::new();
        let mut index = Vec::new();
        for i in 0..256u32 {
            index.extend_from_slice(&(tokens.len() as u16).to_le_bytes());
            match i {
                0x21..=0x7e => tokens.push(i as u8),
                0x80 => tokens.extend_from_slice(b"sys_"),
                _ => tokens.extend_from_slice(b"zz"),
            }
            tokens.push(0);
        }
        let mut names = Vec::new();
        let mut markers = Vec::new();
        for (i, (_, name)) in symbols.iter().enumerate() {
            if i % 256 == 0 {
                markers.push(names.len());
            }
            let mut packed = vec![b'T'];
            match name.strip_prefix("sys_") {
                Some(rest) => {
                    packed.push(0x80);
                    packed.extend_from_slice(rest.as_bytes());
                }
                None => packed.extend_from_slice(name.as_bytes()),
            }
            let big = !matches!(layout, Layout::V4_5 | Layout::V4_20);
            if big && packed.len() > 127 {
                names.push((packed.len() & 0x7F) as u8 | 0x80);
                names.push((packed.len() >> 7) as u8);
            } else {
                names.push(packed.len() as u8);
            }
            names.extend_from_slice(&packed);
        }
        let mut out = vec![0xEE; 40];
        let pad = |out: &mut Vec<u8>| out.resize(out.len().next_multiple_of(8), 0);
        let offsets = |out: &mut Vec<u8>| {
            for &(a, _) in symbols {
                let o = match layout {
                    Layout::V6_15 => a.wrapping_sub(BASE) as u32,
                    _ if a < UPPER_HALF => a as u32,
                    _ => (BASE.wrapping_sub(1).wrapping_sub(a)) as u32,
                };
                out.extend_from_slice(&o.to_le_bytes());
            }
            pad(out);
            out.extend_from_slice(&BASE.to_le_bytes());
        };
        match layout {
            Layout::V4_5 => symbols
                .iter()
                .for_each(|(a, _)| out.extend_from_slice(&a.to_le_bytes())),
            Layout::V4_20 | Layout::V6_2 => offsets(&mut out),
            _ => {}
        }
        out.extend_from_slice(&(n as u64).to_le_bytes());
        out.extend_from_slice(&names);
        pad(&mut out);
        for m in markers {
            match layout {
                Layout::V4_5 => out.extend_from_slice(&(m as u64).to_le_bytes()),
                _ => out.extend_from_slice(&(m as u32).to_le_bytes()),
            }
        }
        pad(&mut out);
        if let Layout::V6_2 = layout {
            out.extend((0..n * 3).map(|i| i as u8 | 1));
            pad(&mut out);
        }
        out.extend_from_slice(&tokens);
        pad(&mut out);
        out.extend_from_slice(&index);
        pad(&mut out);
        if let Layout::V6_4 | Layout::V6_15 = layout {
            offsets(&mut out);
        }
        out.extend_from_slice(&[0xEE; 64]);
        out
    }

    fn symbols(per_cpu: bool, long: bool) -> Vec<(u64, String)> {
        let mut v: Vec<(u64, String)> = (0..700u64)
            .map(|i| {
                let a = if per_cpu && i < 20 { i * 64 } else { BASE + i * 48 };
                (a, format!("{}fn_{i}", if i % 3 == 0 { "sys_" } else { "" }))
            })
            .collect();
        if long {
            v[300].1 = format!("long_{}", "x".repeat(300));
        }
        v
    }

    #[test]
    fn kallsyms_reads_every_layout_since_4_5() {
        for layout in [
            Layout::V4_5,
            Layout::V4_20,
            Layout::V6_2,
            Layout::V6_4,
            Layout::V6_15,
        ] {
            let absolute = matches!(layout, Layout::V4_20 | Layout::V6_2 | Layout::V6_4);
            let big = !matches!(layout, Layout::V4_5 | Layout::V4_20);
            let want = symbols(absolute, big);
            let got = find(&build(layout, &want)).unwrap_or_else(|e| panic!("{layout:?}: {e}"));
            let got: Vec<_> = got.iter().map(|s| (s.address, s.name.to_owned())).collect();
            assert_eq!(got, want, "{layout:?}");
        }
    }

    #[test]
    fn kallsyms_rejects_table_with_wrong_marker() {
        let mut data = build(Layout::V4_20, &symbols(true, false));
        let tokens = memchr::memmem::find(&data, b"zz\0zz\0").unwrap();
        data[tokens - 5] ^= 1;
        assert!(matches!(find(&data), Err(KallsymsError::NoNames)));
    }

    #[test]
    fn kallsyms_reports_missing_table() {
        assert_eq!(find(&[0; 4096]).unwrap_err(), KallsymsError::NoTokens);
    }

    proptest! {
        #[test]
        fn kallsyms_search_never_panics_on_damage(at in 0usize..20000, with: u8, cut in 0usize..20000) {
            let mut data = build(Layout::V6_4, &symbols(true, true));
            let len = data.len();
            data[at % len] = with;
            let _ = find(&data);
            data.truncate(cut % len);
            let _ = find(&data);
        }
    }
}
