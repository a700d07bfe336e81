//! Symbol table of a kernel, independent of its source (ELF file, kallsyms or text).

#[derive(Debug, Clone, Copy)]
struct SymbolEntry {
    address: u64,
    /// Size of the symbol in bytes, or 0 if unknown.
    size_bytes: u32,
    name_at: u32,
    name_len: u16,
    kind: u8,
}

/// Symbols of one kernel, sorted by address.
#[derive(Debug, Clone, Default)]
pub struct KernelSymbols {
    names: Vec<u8>,
    entries: Vec<SymbolEntry>,
}

/// A symbol of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelSymbol<'s> {
    /// Address of the symbol as given by its source. Depending on the source, this is a link-time
    /// address, or a run-time address as in a guest's `/proc/kallsyms`.
    pub address: u64,
    /// Type letter of the symbol, as printed by `nm`.
    pub kind: u8,
    /// Name of the symbol.
    pub name: &'s str,
}

fn is_text(kind: u8) -> bool {
    matches!(kind, b't' | b'T' | b'w' | b'W')
}

/// Start of the upper half of the address space, which contains all kernel addresses. Smaller
/// symbol values are per-CPU offsets or constants.
const UPPER_HALF: u64 = 1 << 63;
/// Maximum length of a symbol name, in bytes. Longer names are truncated. Linux's own limit
/// (KSYM_NAME_LEN) is 512.
const MAX_NAME: usize = 1024;

/// Maximum number of symbols. Distribution kernels have 150,000 to 250,000.
pub const MAX_SYMBOLS: usize = 4_000_000;
/// Maximum total size of symbol names, in bytes. Distribution kernels have 5,000,000 to 10,000,000.
const MAX_NAMES_BYTES: usize = 128 << 20;
/// Maximum number of entries that a lookup examines: preceding entries to find a text symbol, or
/// further names of the same address.
const NEIGHBOURS: usize = 64;

/// Builds a [`KernelSymbols`] table from symbols in any order.
#[derive(Debug, Default)]
pub struct SymbolsBuilder {
    names: Vec<u8>,
    entries: Vec<SymbolEntry>,
}

impl SymbolsBuilder {
    /// Adds a symbol of unknown size. Ignores names that are not ASCII, and all symbols beyond
    /// [`MAX_SYMBOLS`] or 128 MiB of names, because a guest can create tables of any size.
    pub fn add(&mut self, address: u64, kind: u8, name: &[u8]) {
        self.add_sized(address, 0, kind, name);
    }

    /// Adds a symbol of `size_bytes` bytes, or of unknown size if 0. See [`Self::add`].
    #[expect(clippy::cast_possible_truncation, reason = "at most MAX_NAME")]
    pub fn add_sized(&mut self, address: u64, size_bytes: u32, kind: u8, name: &[u8]) {
        let name = &name[..name.len().min(MAX_NAME)];
        if self.entries.len() >= MAX_SYMBOLS || self.names.len() + name.len() > MAX_NAMES_BYTES {
            return;
        }
        let Ok(name_at) = u32::try_from(self.names.len()) else {
            return;
        };
        if name.is_empty() || !name.iter().all(u8::is_ascii_graphic) {
            return;
        }
        self.names.extend_from_slice(name);
        self.entries.push(SymbolEntry {
            address,
            size_bytes,
            name_at,
            name_len: name.len() as u16,
            kind,
        });
    }

    /// Builds the table, or returns `None` if no symbol was added.
    pub fn finish(mut self) -> Option<KernelSymbols> {
        if self.entries.is_empty() {
            return None;
        }
        let names = &self.names;
        // If several symbols have the same address, the last in this order is used: text before
        // data, global before local, fewer leading underscores.
        self.entries.sort_by_key(|e| {
            let name = &names[e.name_at as usize..][..usize::from(e.name_len)];
            let underscores = name.iter().take_while(|&&b| b == b'_').count();
            (
                e.address,
                is_text(e.kind),
                e.kind.is_ascii_uppercase(),
                std::cmp::Reverse(underscores),
            )
        });
        Some(KernelSymbols {
            names: self.names,
            entries: self.entries,
        })
    }
}

/// Error returned for a text in the format of `/proc/kallsyms` that contains no usable symbols.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KallsymsTextError {
    /// No line has the form "address type name".
    #[error("no line has the form \"address type name\"")]
    NoSymbols,
    /// All addresses are zero, because the text was read without the permission to see addresses.
    #[error("all addresses are zero; read /proc/kallsyms as root with kernel.kptr_restrict=0")]
    AllZero,
}

impl KernelSymbols {
    /// Parses the text of `/proc/kallsyms` or `System.map`. Skips malformed lines.
    pub fn parse_text(text: &[u8]) -> Result<Self, KallsymsTextError> {
        let mut builder = SymbolsBuilder::default();
        let mut any_address = false;
        for line in text.split(|&b| b == b'\n') {
            let mut fields = line.split(|b| b.is_ascii_whitespace()).filter(|f| !f.is_empty());
            let (Some(address), Some(&[kind]), Some(name)) = (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            let address = std::str::from_utf8(address)
                .ok()
                .and_then(|a| u64::from_str_radix(a, 16).ok());
            let Some(address) = address else { continue };
            any_address |= address != 0;
            builder.add(address, kind, name);
        }
        let symbols = builder.finish().ok_or(KallsymsTextError::NoSymbols)?;
        if any_address {
            Ok(symbols)
        } else {
            Err(KallsymsTextError::AllZero)
        }
    }

    /// Returns the text symbol that contains `address`, and the offset into it.
    pub fn resolve(&self, address: u64) -> Option<(KernelSymbol<'_>, u64)> {
        let (symbol, offset) = self.resolve_flat(address)?;
        (symbol.address >= UPPER_HALF).then_some((symbol, offset))
    }

    /// Resolves an address like [`Self::resolve`], but also accepts addresses in the lower half of
    /// the address space, for kernels that are linked at low addresses.
    pub fn resolve_flat(&self, address: u64) -> Option<(KernelSymbol<'_>, u64)> {
        let after = self.entries.partition_point(|e| e.address <= address);
        let at = self.entries.get(after.checked_sub(1)?)?.address;
        let offset = address - at;
        // Memory after the last symbol may belong to modules or another kernel, so the last symbol
        // covers at most one page.
        let reaches = self
            .entries
            .get(after)
            .map_or(at.saturating_add(4096), |next| next.address);
        let (best, others) = self.entries[..after].split_last()?;
        // If the symbol that is preferred at this address is a data symbol, none of its aliases is
        // returned.
        if !is_text(best.kind) || address >= reaches {
            return None;
        }
        let covers = |e: &&SymbolEntry| e.size_bytes == 0 || offset < u64::from(e.size_bytes);
        let others = others
            .iter()
            .rev()
            .take(NEIGHBOURS)
            .take_while(|e| e.address == at && is_text(e.kind));
        std::iter::once(best)
            .chain(others)
            .find(covers)
            .map(|e| (self.symbol(e), offset))
    }

    /// Returns the address of the last text symbol at or before `address`. Examines only a limited
    /// number of preceding symbols.
    pub fn text_before(&self, address: u64) -> Option<u64> {
        let after = self.entries.partition_point(|e| e.address <= address);
        let nearest = self.entries[..after].iter().rev().take(NEIGHBOURS);
        nearest
            .map(|e| (e.kind, e.address))
            .find_map(|(kind, at)| is_text(kind).then_some(at))
    }

    /// Returns the end of the symbol that starts at `address`: the start of the next symbol, or
    /// `address` plus 4 KiB if there is none.
    pub fn end_of(&self, address: u64) -> u64 {
        let after = self.entries.partition_point(|e| e.address <= address);
        self.entries
            .get(after)
            .map_or(address.saturating_add(4096), |e| e.address)
    }

    /// Returns the first symbol with the name `name`. Searches the whole table.
    pub fn by_name(&self, name: &str) -> Option<KernelSymbol<'_>> {
        self.iter().find(|s| s.name == name)
    }

    /// Iterates over all symbols by ascending address.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = KernelSymbol<'_>> {
        self.entries.iter().map(|e| self.symbol(e))
    }

    /// Iterates over all symbols with their sizes in bytes, 0 if unknown.
    pub fn sized(&self) -> impl Iterator<Item = (KernelSymbol<'_>, u32)> {
        self.entries.iter().map(|e| (self.symbol(e), e.size_bytes))
    }

    /// Returns the number of symbols.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Returns whether there are no symbols.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns the symbols with all kernel addresses increased by `slide` (wrapping). Per-CPU
    /// offsets and constants do not change.
    pub fn relocated(&self, slide: u64) -> Self {
        let mut moved = self.clone();
        for e in &mut moved.entries {
            if e.address >= UPPER_HALF {
                e.address = e.address.wrapping_add(slide);
            }
        }
        moved.entries.sort_by_key(|e| e.address);
        moved
    }

    /// Writes the symbols in the format of `/proc/kallsyms`, for `perf`'s `--guestkallsyms` option.
    pub fn write_text(&self, mut out: impl std::io::Write) -> std::io::Result<()> {
        for s in self.iter() {
            writeln!(out, "{:016x} {} {}", s.address, s.kind as char, s.name)?;
        }
        Ok(())
    }

    fn symbol(&self, e: &SymbolEntry) -> KernelSymbol<'_> {
        let name = &self.names[e.name_at as usize..][..usize::from(e.name_len)];
        // The builder accepts only ASCII.
        KernelSymbol {
            address: e.address,
            kind: e.kind,
            name: std::str::from_utf8(name).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The memory for symbol names is bounded. Without a limit, 4,000,000 symbols with names of
    /// 1,024 bytes would require 4 GiB.
    #[test]
    fn symbol_names_use_bounded_memory() {
        let mut builder = SymbolsBuilder::default();
        let name = [b'x'; MAX_NAME];
        let fits = MAX_NAMES_BYTES / MAX_NAME;
        for address in 0..fits as u64 + 1000 {
            builder.add(UPPER_HALF + address, b'T', &name);
        }
        assert_eq!(builder.names.len(), MAX_NAMES_BYTES);
        assert_eq!(builder.entries.len(), fits);
    }

    const TEXT: &str = "\
0000000000000000 A fixed_percpu_data
000000000001fdc0 D current_task
ffffffff81000000 T _text
ffffffff81000000 T _stext
ffffffff81000100 t helper
ffffffff81000100 T __x64_helper
ffffffff81000180 D data_here
ffffffff81000200 W weak
ffffffffc0001000 t in_module	[nf]
";

    #[test]
    fn text_symbols_resolve_and_data_does_not() {
        let s = KernelSymbols::parse_text(TEXT.as_bytes()).unwrap();
        let name = |a| s.resolve(a).map(|(s, o)| (s.name.to_owned(), o));
        assert_eq!(name(0xffff_ffff_8100_0104), Some(("__x64_helper".into(), 4)));
        assert_eq!(name(0xffff_ffff_8100_0190), None);
        assert_eq!(name(0xffff_ffff_8100_0201), Some(("weak".into(), 1)));
        assert_eq!(name(0xffff_ffff_c000_1fff), Some(("in_module".into(), 0xfff)));
        assert_eq!(name(0xffff_ffff_c000_2000), None);
        assert_eq!(name(0x1fdc4), None);
        assert_eq!(s.by_name("current_task").unwrap().address, 0x1fdc0);
    }

    #[test]
    fn relocation_skips_per_cpu_offsets() {
        let s = KernelSymbols::parse_text(TEXT.as_bytes())
            .unwrap()
            .relocated(0x1400_0000);
        assert_eq!(s.by_name("_text").unwrap().address, 0xffff_ffff_9500_0000);
        assert_eq!(s.by_name("current_task").unwrap().address, 0x1fdc0);
        let mut text = Vec::new();
        s.write_text(&mut text).unwrap();
        assert_eq!(KernelSymbols::parse_text(&text).unwrap().len(), s.len());
    }

    #[test]
    fn unusable_symbol_text_is_distinguished() {
        assert_eq!(
            KernelSymbols::parse_text(b"hello\n").unwrap_err(),
            KallsymsTextError::NoSymbols
        );
        let zero = b"0000000000000000 T _text\n0000000000000000 T start_kernel\n";
        assert_eq!(
            KernelSymbols::parse_text(zero).unwrap_err(),
            KallsymsTextError::AllZero
        );
    }

    fn sized(rows: &[(u64, u32, u8, &str)]) -> KernelSymbols {
        let mut builder = SymbolsBuilder::default();
        for (address, size, kind, name) in rows {
            builder.add_sized(*address, *size, *kind, name.as_bytes());
        }
        builder.finish().unwrap()
    }

    /// An address is resolved to the symbol that contains it, according to the sizes of the
    /// symbols. This also holds for kernels linked at low addresses (multiboot kernels and the
    /// built-in guest).
    #[test]
    fn address_resolves_to_containing_symbol() {
        let s = sized(&[
            (0x2000, 0x10, b't', "b"),
            (0x1000, 0, b't', "a"),
            (0x2000, 0x40, b't', "b_alias"),
        ]);
        let name = |a| s.resolve_flat(a).map(|(s, o)| (s.name.to_owned(), o));
        assert_eq!(name(0xfff), None);
        assert_eq!(name(0x1fff), Some(("a".into(), 0xfff)));
        assert_eq!(name(0x2008), Some(("b_alias".into(), 8)));
        assert_eq!(name(0x2020), Some(("b_alias".into(), 0x20)));
        assert_eq!(name(0x2040), None);
        assert_eq!(s.by_name("b").map(|s| s.address), Some(0x2000));
        assert_eq!(s.len(), 3);
        let s = sized(&[(0x2000, 0x10, b'T', "b"), (0x2000, 0x40, b't', "b_alias")]);
        assert_eq!(s.resolve_flat(0x2020).map(|(s, _)| s.name), Some("b_alias"));
        assert_eq!(s.resolve_flat(0x2008).map(|(s, _)| s.name), Some("b"));
    }

    #[test]
    fn text_before_skips_data_symbols() {
        let s = sized(&[
            (0x1000, 0, b't', "f"),
            (0x1010, 0, b'd', "table"),
            (0x1020, 0, b't', "g"),
        ]);
        assert_eq!(s.text_before(0x1018), Some(0x1000));
        assert_eq!(s.text_before(0x1020), Some(0x1020));
        assert_eq!(s.text_before(0xfff), None);
        assert_eq!(KernelSymbols::default().text_before(0x1000), None);
    }
}
