//! Looks up pages of files in the guest kernel's page cache.
//!
//! Unwind tables and symbol tables of a program are mapped but rarely accessed by the program
//! itself, so its page tables lack many of these pages. The kernel still has them in memory if it
//! has read the file. The page cache is a tree indexed by page number (`include/linux/xarray.h`).
//! An entry is a `struct page` or, for several contiguous pages, a `struct folio`. Its index in the
//! kernel's array of page structures determines the physical page.
//!
//! The guest controls all of this data. A wrong value leads to other bytes of the guest's own
//! memory, or to no data.

use std::num::NonZeroU64;

use kernel_images::btf::Btf;
use serde::{Deserialize, Serialize};

/// Offsets of the structure members (in bytes) and other properties of the guest kernel that a page
/// cache lookup needs.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct CacheLayout {
    /// Offset in `struct file` of the pointer to its `struct address_space`.
    mapping: u64,
    /// Offset in `struct address_space` of the root of the page cache tree. Each file has one
    /// `struct address_space`.
    root: u64,
    node_shift: u64,
    #[serde(deserialize_with = "super::offset")]
    node_slots: u64,
    /// Offset of the page index in `struct folio`, or in `struct page` for kernels without folios.
    index: u64,
    page_struct_bytes: NonZeroU64,
    /// Address of the kernel variable that holds the address of the array of page structures;
    /// `None` for a kernel in which the array has a fixed address.
    vmemmap_base: Option<u64>,
}

/// Binary logarithm of the number of slots in a node of the page cache tree.
const CHUNK_SHIFT: u32 = 6;
/// Maximum number of levels of the page cache tree. The tree of a file with 2^52 pages has nine.
const MAX_LEVELS: u32 = 11;
/// Lowest value of a tree entry that points to a node or to a page structure. A lower value of an
/// internal entry (low bits 10) refers to another slot of the same node.
const FIRST_POINTER: u64 = 4096;
/// Maximum number of pages in a folio.
const MAX_FOLIO_PAGES: u64 = 1 << 18;
/// Address of the array of page structures in a kernel with 4-level page tables and without memory
/// layout randomization.
const FIXED_VMEMMAP: u64 = 0xffff_ea00_0000_0000;

impl CacheLayout {
    /// Reads the layout from type information. `vmemmap_base` is the run-time address of the
    /// variable with that name.
    pub(super) fn new(btf: &Btf, vmemmap_base: Option<u64>) -> Option<Self> {
        Some(Self {
            mapping: btf.offset_of("file", "f_mapping")?,
            root: btf.offset_of("address_space", "i_pages.xa_head")?,
            node_shift: btf.offset_of("xa_node", "shift")?,
            node_slots: btf.offset_of("xa_node", "slots")?,
            index: btf
                .offset_of("folio", "index")
                .or_else(|| btf.offset_of("page", "index"))?,
            page_struct_bytes: NonZeroU64::new(btf.size_of("page")?)?,
            vmemmap_base,
        })
    }

    /// Returns a layout for tests with small synthetic structures: `f_mapping` and `i_pages` are
    /// the second words, and the first slot of a node is its third word.
    #[cfg(test)]
    pub(super) fn fixed(vmemmap_base: u64) -> Self {
        Self {
            mapping: 8,
            root: 8,
            node_shift: 0,
            node_slots: 16,
            index: 0x20,
            page_struct_bytes: NonZeroU64::new(64).unwrap(),
            vmemmap_base: Some(vmemmap_base),
        }
    }

    /// Returns the guest-physical address of page `index` of an open file. `file` is the address of
    /// its `struct file`, and `word` reads a word of kernel memory. Returns `None` if the page is
    /// not in the page cache.
    pub(super) fn page(
        &self,
        file: u64,
        index: u64,
        word: &mut impl FnMut(u64) -> Option<u64>,
    ) -> Option<u64> {
        let mapping = word(file.wrapping_add(self.mapping))?;
        let root = word(mapping.wrapping_add(self.root))?;
        let folio = self.lookup(root, index, word)?;
        let first = word(folio.wrapping_add(self.index))?;
        let within = index.checked_sub(first).filter(|&n| n < MAX_FOLIO_PAGES)?;
        let pages = match self.vmemmap_base {
            Some(at) => word(at)?,
            None => FIXED_VMEMMAP,
        };
        let offset = folio.checked_sub(pages)?;
        let number = (offset / self.page_struct_bytes).checked_add(within)?;
        (offset.is_multiple_of(self.page_struct_bytes.get()))
            .then(|| number.checked_mul(4096))
            .flatten()
    }

    /// Returns the entry for page `index` in the page cache tree with the root entry `root`, if the
    /// entry is a pointer to a page structure.
    fn lookup(&self, root: u64, index: u64, word: &mut impl FnMut(u64) -> Option<u64>) -> Option<u64> {
        let mut entry = root;
        for level in 0..MAX_LEVELS {
            if entry & 3 != 2 || entry < FIRST_POINTER {
                // Entries with bit 0 set are no pointers, for example shadow entries of evicted
                // pages.
                let is_pointer = entry & 3 == 0 && entry >= FIRST_POINTER;
                return is_pointer.then_some(entry);
            }
            let node = entry - 2;
            // The shift of a node is one byte, which is the lowest one of this little-endian word.
            let shift = u32::try_from(word(node.wrapping_add(self.node_shift))? & 0xff).ok()?;
            if shift + CHUNK_SHIFT >= 64 || (level == 0 && index >> (shift + CHUNK_SHIFT) != 0) {
                return None;
            }
            let slot = |n: u64| node.wrapping_add(self.node_slots + 8 * n);
            entry = word(slot(index >> shift & ((1 << CHUNK_SHIFT) - 1)))?;
            if entry & 3 == 2 && entry < FIRST_POINTER {
                entry = word(slot(entry >> 2 & ((1 << CHUNK_SHIFT) - 1)))?;
            }
            if shift == 0 && entry & 3 == 2 {
                return None;
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use proptest::prelude::*;

    const FILE: u64 = 0xffff_8880_0000_1000;
    const MAPPING: u64 = 0xffff_8880_0000_2000;
    const NODE: u64 = 0xffff_8880_0000_3000;
    const PAGES: u64 = 0xffff_ea00_0000_0000;
    const VMEMMAP: u64 = 0xffff_ffff_8200_0000;

    fn layout() -> CacheLayout {
        CacheLayout {
            mapping: 0x18,
            root: 0x10,
            node_shift: 0,
            node_slots: 0x28,
            ..CacheLayout::fixed(VMEMMAP)
        }
    }

    /// Returns kernel memory with a file whose page cache tree has the root entry `root`.
    fn memory(root: u64) -> HashMap<u64, u64> {
        HashMap::from([(FILE + 0x18, MAPPING), (MAPPING + 0x10, root), (VMEMMAP, PAGES)])
    }

    fn folio(memory: &mut HashMap<u64, u64>, number: u64, index: u64) -> u64 {
        let at = PAGES + 64 * number;
        memory.insert(at + 0x20, index);
        at
    }

    fn page(memory: &HashMap<u64, u64>, index: u64) -> Option<u64> {
        layout().page(FILE, index, &mut |at| memory.get(&at).copied())
    }

    #[test]
    fn single_page_file_has_no_xarray_node() {
        let mut memory = memory(0);
        let only = folio(&mut memory, 7, 0);
        memory.insert(MAPPING + 0x10, only);
        assert_eq!(page(&memory, 0), Some(7 << 12));
    }

    /// Lookups in a page cache tree with two levels find a single page and each page of a four-page
    /// folio, but neither an evicted page nor a hole. Only the first slot of the folio contains its
    /// address.
    #[test]
    fn page_cache_lookup_walks_xarray() {
        let mut memory = memory(NODE + 2);
        let (one, four) = (folio(&mut memory, 9, 64), folio(&mut memory, 16, 68));
        let below = NODE + 0x1000;
        memory.extend([(NODE, 6), (NODE + 0x28 + 8, below + 2), (NODE + 0x28, 0)]);
        memory.extend([(below, 0), (below + 0x28, one), (below + 0x28 + 8, 0x1234_5671)]);
        memory.insert(below + 0x28 + 8 * 4, four);
        memory.extend((5..8).map(|n| (below + 0x28 + 8 * n, 4 << 2 | 2)));
        assert_eq!(page(&memory, 64), Some(9 << 12));
        assert_eq!(page(&memory, 65), None, "evicted");
        assert_eq!(page(&memory, 3), None, "a hole");
        for n in 0..4 {
            assert_eq!(page(&memory, 68 + n), Some((16 + n) << 12));
        }
        assert_eq!(page(&memory, 64 * 64), None, "above the tree");
    }

    /// A lookup finds a folio of 64 pages in an inner node of the page cache tree. Such a folio
    /// takes the place of a whole leaf.
    #[test]
    fn large_folio_is_found_in_inner_node() {
        let mut memory = memory(NODE + 2);
        let large = folio(&mut memory, 128, 64);
        memory.extend([(NODE, 6), (NODE + 0x28 + 8, large)]);
        assert_eq!(page(&memory, 64 + 63), Some((128 + 63) << 12));
    }

    #[test]
    fn cyclic_xarray_lookup_terminates() {
        let mut memory = memory(NODE + 2);
        memory.insert(NODE, 6);
        memory.extend((0..64).map(|n| (NODE + 0x28 + 8 * n, NODE + 2)));
        assert_eq!(page(&memory, 1), None);
    }

    proptest! {
        #[test]
        fn arbitrary_xarray_never_panics(
            words in prop::collection::vec(prop_oneof![any::<u64>(), 0..5000u64, Just(NODE + 2), Just(PAGES + 64)], 1..200),
            index: u64,
        ) {
            let mut reads = 0;
            let mut word = |_| {
                reads += 1;
                words.get(reads % words.len()).copied()
            };
            let _ = layout().page(FILE, index, &mut word);
            prop_assert!(reads < 50);
        }
    }
}
