//! Symbols of the guest kernel: address to name.

/// One symbol; its name is a range of the table's string.
#[derive(Clone, Copy, Debug)]
struct Entry {
    address: u64,
    size_bytes: u64,
    name_start: u32,
    name_len: u32,
}

/// Most symbols kept. A distribution kernel has about 150,000.
pub const MAX_SYMBOLS: usize = 2_000_000;
/// Longest name kept (Linux's own limit is 512).
const MAX_NAME_BYTES: usize = 1024;

/// The text symbols of a guest kernel, sorted by address. Addresses are the link-time ones.
#[derive(Clone, Debug, Default)]
pub struct SymbolTable {
    entries: Vec<Entry>,
    names: String,
}

impl SymbolTable {
    /// Adds a symbol. Call [`SymbolTable::finish`] after the last one.
    pub(crate) fn push(&mut self, address: u64, size_bytes: u64, name: &str) {
        if self.entries.len() >= MAX_SYMBOLS || name.len() > MAX_NAME_BYTES {
            return;
        }
        let Ok(name_start) = u32::try_from(self.names.len()) else {
            return;
        };
        self.names.push_str(name);
        self.entries.push(Entry {
            address,
            size_bytes,
            name_start,
            name_len: name.len() as u32,
        });
    }

    /// Sorts by address; of several symbols at one address the first pushed comes first.
    pub(crate) fn finish(&mut self) {
        self.entries.sort_by_key(|e| e.address);
    }

    /// Number of symbols.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The symbol that contains `address` and the offset into it. A symbol without a size reaches
    /// to the next one.
    pub fn lookup(&self, address: u64) -> Option<(&str, u64)> {
        let at = self
            .entries
            .partition_point(|e| e.address <= address)
            .checked_sub(1)?;
        let found = self.entries[at].address;
        let first = self.entries.partition_point(|e| e.address < found);
        let offset = address - found;
        self.entries[first..=at]
            .iter()
            .find(|e| e.size_bytes == 0 || offset < e.size_bytes)
            .map(|e| (self.name(e), offset))
    }

    /// Start of the symbol at or before `address`.
    pub fn start_before(&self, address: u64) -> Option<u64> {
        let at = self
            .entries
            .partition_point(|e| e.address <= address)
            .checked_sub(1)?;
        Some(self.entries[at].address)
    }

    /// Address of the first symbol called `name`.
    pub fn address_of(&self, name: &str) -> Option<u64> {
        self.entries
            .iter()
            .find(|e| self.name(e) == name)
            .map(|e| e.address)
    }

    /// All symbols by address: address, size in bytes (0: unknown), name.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64, &str)> {
        self.entries
            .iter()
            .map(|e| (e.address, e.size_bytes, self.name(e)))
    }

    fn name(&self, entry: &Entry) -> &str {
        &self.names[entry.name_start as usize..(entry.name_start + entry.name_len) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_belongs_to_the_symbol_that_contains_it() {
        let mut t = SymbolTable::default();
        t.push(0x2000, 0x10, "b");
        t.push(0x1000, 0, "a");
        t.push(0x2000, 0x40, "b_alias");
        t.finish();
        assert_eq!(t.lookup(0xfff), None);
        assert_eq!(t.lookup(0x1fff), Some(("a", 0xfff)));
        assert_eq!(t.lookup(0x2008), Some(("b", 8)));
        assert_eq!(t.lookup(0x2020), Some(("b_alias", 0x20)));
        assert_eq!(t.lookup(0x2040), None);
        assert_eq!(t.address_of("b_alias"), Some(0x2000));
        assert_eq!(t.len(), 3);
    }
}
