//! Compressed storage for symbols and text that a VM keeps for its lifetime but rarely uses.
//! Compression reduces the size of symbols to about one fifth.

use std::fmt;

use crate::symbols::{KernelSymbols, SymbolsBuilder};

/// Compressed symbols of a kernel.
#[derive(Debug, Clone, Default)]
pub struct CompressedKernelSymbols {
    /// Compressed symbols: LZ4 data with the uncompressed length as a prefix; empty if there are no
    /// symbols.
    bytes: Box<[u8]>,
    count: usize,
}

impl CompressedKernelSymbols {
    /// Compresses `symbols`.
    pub fn new(symbols: &KernelSymbols) -> Self {
        if symbols.is_empty() {
            return Self::default();
        }
        let mut plain = Vec::new();
        let mut before = 0;
        for (symbol, size_bytes) in symbols.sized() {
            put(&mut plain, symbol.address.wrapping_sub(before));
            put(&mut plain, size_bytes.into());
            put(&mut plain, symbol.name.len() as u64);
            plain.push(symbol.kind);
            plain.extend_from_slice(symbol.name.as_bytes());
            before = symbol.address;
        }
        Self {
            bytes: lz4_flex::block::compress_prepend_size(&plain).into_boxed_slice(),
            count: symbols.len(),
        }
    }

    /// Decompresses the symbols.
    pub fn unpack(&self) -> KernelSymbols {
        let plain = lz4_flex::block::decompress_size_prepended(&self.bytes).unwrap_or_default();
        let mut builder = SymbolsBuilder::default();
        let (mut rest, mut address) = (&plain[..], 0u64);
        // `new` wrote the bytes, so the last symbol ends where they end.
        while let Some(symbol) = take(&mut rest) {
            address = address.wrapping_add(symbol.distance);
            builder.add_sized(address, symbol.size_bytes, symbol.kind, symbol.name);
        }
        builder.finish().unwrap_or_default()
    }

    /// Returns the number of symbols.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Returns whether there are no symbols.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the compressed size of the symbols, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }
}

/// Compressed text.
#[derive(Clone, Default)]
pub struct PackedText {
    /// Compressed text: LZ4 data with the uncompressed length as a prefix.
    bytes: Box<[u8]>,
}

impl PackedText {
    /// Compresses `text`.
    pub fn new(text: &[u8]) -> Self {
        Self {
            bytes: lz4_flex::block::compress_prepend_size(text).into_boxed_slice(),
        }
    }

    /// Decompresses the text.
    pub fn unpack(&self) -> Vec<u8> {
        // `new` wrote the bytes, so decompression cannot fail.
        lz4_flex::block::decompress_size_prepended(&self.bytes).unwrap_or_default()
    }
}

impl fmt::Debug for PackedText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PackedText({} bytes)", self.bytes.len())
    }
}

struct DecodedSymbol<'a> {
    /// Difference between the symbol's address and that of the previous symbol.
    distance: u64,
    size_bytes: u32,
    kind: u8,
    name: &'a [u8],
}

fn take<'a>(rest: &mut &'a [u8]) -> Option<DecodedSymbol<'a>> {
    let distance = number(rest)?;
    let size_bytes = u32::try_from(number(rest)?).ok()?;
    let length = usize::try_from(number(rest)?).ok()?;
    let (kind, name) = rest.split_first()?;
    let (name, after) = name.split_at_checked(length)?;
    *rest = after;
    Some(DecodedSymbol {
        distance,
        size_bytes,
        kind: *kind,
        name,
    })
}

/// Appends a number in LEB128 encoding: seven bits per byte, lowest bits first.
#[expect(clippy::cast_possible_truncation, reason = "seven bits")]
fn put(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn number(rest: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..u64::BITS).step_by(7) {
        let (byte, after) = rest.split_first()?;
        *rest = after;
        number |= u64::from(byte & 0x7F) << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(symbols: &KernelSymbols) -> String {
        let mut text = Vec::new();
        symbols.write_text(&mut text).unwrap();
        String::from_utf8(text).unwrap()
    }

    #[test]
    fn packed_symbols_round_trip() {
        let mut builder = SymbolsBuilder::default();
        let rows: [(u64, u32, u8, &str); 7] = [
            (0, 0, b'A', "fixed_percpu_data"),
            (0x1fdc0, 8, b'D', "current_task"),
            (0xffff_ffff_8100_0000, 0, b'T', "_text"),
            (0xffff_ffff_8100_0000, 0x40, b'T', "_stext"),
            (0xffff_ffff_8100_0100, 0x40, b't', "helper"),
            (0xffff_ffff_8100_0100, u32::MAX, b'T', "__x64_helper"),
            (u64::MAX, 1, b'W', "last"),
        ];
        for (address, size, kind, name) in rows {
            builder.add_sized(address, size, kind, name.as_bytes());
        }
        let long = "n".repeat(1024);
        builder.add_sized(0xffff_ffff_8200_0000, 300, b't', long.as_bytes());
        let symbols = builder.finish().unwrap();
        let packed = CompressedKernelSymbols::new(&symbols);
        let again = packed.unpack();
        assert_eq!(text(&again), text(&symbols));
        assert!(again.sized().eq(symbols.sized()), "and as long");
        assert_eq!((packed.len(), packed.is_empty()), (8, false));
        let none = CompressedKernelSymbols::new(&KernelSymbols::default());
        assert!(none.is_empty() && none.unpack().is_empty());
    }

    #[test]
    fn packed_text_round_trips() {
        for text in [
            "",
            "ffffffff81000000 T _text\n",
            &"the same again\n".repeat(10_000),
        ] {
            let packed = PackedText::new(text.as_bytes());
            assert_eq!(packed.unpack(), text.as_bytes());
            assert!(packed.bytes.len() < text.len() + 16);
        }
        assert!(PackedText::default().unpack().is_empty());
    }

    /// Packing reduces the memory for symbols. The test uses as many symbols, with similar names,
    /// as a distribution kernel has.
    #[test]
    fn packed_symbols_need_a_third_of_the_memory() {
        let words = ["sched", "alloc", "ext4", "tcp", "virtio", "page", "lock", "iter"];
        let mut builder = SymbolsBuilder::default();
        let mut names = 0;
        let mut random = 1u64;
        let mut next = || {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 40) as usize
        };
        for n in 0..50_000u64 {
            let name = format!(
                "{}_{}_{}_{:x}",
                words[next() % 8],
                words[next() % 8],
                words[next() % 8],
                next() % 4096
            );
            names += name.len();
            builder.add(
                0xffff_ffff_8100_0000 + n * 16 + (next() % 16) as u64,
                b't',
                name.as_bytes(),
            );
        }
        let symbols = builder.finish().unwrap();
        let entry = 24;
        let plain = names + symbols.len() * entry;
        let packed = CompressedKernelSymbols::new(&symbols).bytes();
        assert!(packed * 3 < plain, "{packed} of {plain}");
    }
}
