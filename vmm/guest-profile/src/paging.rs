//! Page-table walks in a hostile guest.
//!
//! Supports the 4-level and 5-level (CR4.LA57) tables of long mode (Intel SDM vol. 3 ch. "Paging",
//! AMD APM vol. 2 ch. 5). 32-bit and PAE paging are unsupported. A walk makes at most five reads
//! regardless of the tables, so tables that refer to each other in a cycle are harmless. Each read
//! is charged to the caller's [`GuestMemoryReadBudget`].
//!
//! The walk reads memory like a debugger, not like the CPU, so access rights are not checked. The
//! walk only checks the bits that determine a translation: the present bit, the page-size bit, and
//! reserved bits that change the meaning of an entry.

use super::{GuestMemoryReadBudget, GuestPhys, GuestRegs, MappedGuestPage};

const PRESENT: u64 = 1 << 0;
const PAGE_SIZE_BIT: u64 = 1 << 7;
/// Bits 51:12 of a page-table entry or of CR3, which contain a physical address.
const ADDRESS: u64 = 0x000F_FFFF_FFFF_F000;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const CR4_LA57: u64 = 1 << 12;
const EFER_LMA: u64 = 1 << 10;
const PAGE: u64 = 4096;

/// A paging mode of a vCPU that the walk does not support.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnsupportedPaging {
    /// CR0.PG is clear, so addresses are physical.
    #[error("paging is off")]
    PagingOff,
    /// The vCPU uses 32-bit paging with two levels.
    #[error("the guest uses 32-bit paging")]
    Legacy,
    /// The vCPU uses PAE paging outside long mode.
    #[error("the guest uses PAE paging outside long mode")]
    Pae,
}

/// Reason an address has no translation. The guest causes all of these faults, and none is an
/// internal error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TranslationFault {
    /// The virtual address is not canonical.
    NonCanonical,
    /// A page-table entry is not present. The value is its level: 5 (PML5) or 4 (PML4) down to 1
    /// (page table).
    NotPresent(u8),
    /// A page-table entry has a reserved bit set. The value is the level of the entry, 5 to 1.
    Reserved(u8),
    /// A page table, or the page itself, is outside RAM.
    OutsideMemory,
    /// The budget of memory reads or time is exhausted.
    Spent,
}

/// Result of translating a guest-virtual address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageTranslation {
    /// Guest-physical address to which the virtual address is mapped.
    pub gpa: u64,
    /// Size of the page in bytes: 4 KiB, 2 MiB or 1 GiB.
    pub page_size: u64,
    /// `true` if the entries of all levels permit user access to the page.
    pub user: bool,
}

/// Translation of one 4-KiB page in the cache of an [`AddressSpace`].
struct CachedPage<P> {
    /// Virtual page number: the virtual address divided by the page size.
    number: u64,
    /// Guest-physical address of the page.
    base: u64,
    /// The page in guest memory; `None` if it is outside RAM.
    ram: Option<P>,
}

/// Number of entries of the translation cache. A few are sufficient, because unwinding a call chain
/// mostly accesses the kernel stack and the user stack.
const CACHE_SLOTS: usize = 8;

/// Last-level page table that the previous walk used. The next walk can skip the other levels,
/// because neighboring pages are usually in the same table. The CPU has paging-structure caches for
/// the same purpose (SDM vol. 3 §5.10.3).
#[derive(Clone, Copy)]
struct LastTable {
    /// Upper bits that all virtual addresses covered by the table share, and number of bits below
    /// them.
    prefix: u64,
    prefix_shift: u32,
    level: u8,
    table: u64,
    /// `true` if the entries of all levels above the table permit user access.
    user: bool,
}

/// Returns whether the vCPU uses 5-level page tables.
pub fn has_five_levels(regs: &GuestRegs) -> bool {
    regs.cr4 & CR4_LA57 != 0
}

/// Address space of the guest, given by the root of its page tables and the number of levels.
/// Caches a few translations. Create a new value for each sample, because the guest may change its
/// page tables at any time.
pub struct AddressSpace<'m, M: GuestPhys + ?Sized> {
    phys: &'m M,
    root: u64,
    levels: u8,
    cache: [Option<CachedPage<M::Page<'m>>>; CACHE_SLOTS],
    last_table: LastTable,
}

impl<'m, M: GuestPhys + ?Sized> AddressSpace<'m, M> {
    /// Returns the address space that the vCPU's control registers select.
    pub fn of(phys: &'m M, regs: &GuestRegs) -> Result<Self, UnsupportedPaging> {
        if regs.cr0 & CR0_PG == 0 {
            Err(UnsupportedPaging::PagingOff)
        } else if regs.cr4 & CR4_PAE == 0 {
            Err(UnsupportedPaging::Legacy)
        } else if regs.efer & EFER_LMA == 0 {
            Err(UnsupportedPaging::Pae)
        } else {
            Ok(Self::with_root(phys, regs.cr3, has_five_levels(regs)))
        }
    }

    /// Returns the long-mode address space with root `cr3`, whose PCID and flag bits are ignored.
    /// The address space has five levels if `la57` is `true`.
    pub fn with_root(phys: &'m M, cr3: u64, la57: bool) -> Self {
        let root = cr3 & ADDRESS;
        let levels = if la57 { 5 } else { 4 };
        Self {
            phys,
            root,
            levels,
            cache: [const { None }; CACHE_SLOTS],
            // Initially, the last table is the root table, which covers every address.
            last_table: LastTable {
                prefix: 0,
                prefix_shift: 63,
                level: levels,
                table: root,
                user: true,
            },
        }
    }

    /// Returns the kernel's counterpart of a user address space. With page-table isolation, a
    /// process has two root tables on consecutive pages. The kernel's table is the first one, at
    /// the address with bit 12 clear.
    pub fn kernel_sibling(&self) -> Self {
        Self::with_root(self.phys, self.root & !PAGE, self.levels == 5)
    }

    /// Returns the guest memory in which the page tables are.
    pub fn phys(&self) -> &'m M {
        self.phys
    }

    /// Returns whether `gva` is canonical for the number of levels of this address space.
    pub fn is_canonical(&self, gva: u64) -> bool {
        let unused = 64 - self.address_bits();
        ((gva << unused).cast_signed() >> unused).cast_unsigned() == gva
    }

    /// Returns whether `gva` is canonical and in the lower half, where Linux maps user space.
    pub fn is_user_half(&self, gva: u64) -> bool {
        gva >> (self.address_bits() - 1) == 0
    }

    /// Returns whether `gva` is canonical and in the upper half, where Linux maps the kernel.
    pub fn is_kernel_half(&self, gva: u64) -> bool {
        gva >> 63 == 1 && self.is_canonical(gva)
    }

    fn address_bits(&self) -> u32 {
        12 + 9 * u32::from(self.levels)
    }

    /// Translates `gva`. If the last-level table of the previous walk covers `gva`, only this table
    /// is read; otherwise, all levels are walked.
    pub fn translate(
        &mut self,
        gva: u64,
        budget: &mut GuestMemoryReadBudget,
    ) -> Result<PageTranslation, TranslationFault> {
        if !self.is_canonical(gva) {
            return Err(TranslationFault::NonCanonical);
        }
        let last = self.last_table;
        let (top, mut table, mut user) = if gva >> last.prefix_shift == last.prefix {
            (last.level, last.table, last.user)
        } else {
            (self.levels, self.root, true)
        };
        for level in (1..=top).rev() {
            let shift = 12 + 9 * u32::from(level - 1);
            let index = (gva >> shift) & 0x1FF;
            if !budget.take() {
                return Err(TranslationFault::Spent);
            }
            let entry = self
                .phys
                .read_u64(table + 8 * index)
                .ok_or(TranslationFault::OutsideMemory)?;
            if entry & PRESENT == 0 {
                return Err(TranslationFault::NotPresent(level));
            }
            let above = user;
            user &= entry & 4 != 0;
            let size = 1u64 << shift;
            let leaf = level == 1 || entry & PAGE_SIZE_BIT != 0;
            if !leaf {
                table = entry & ADDRESS;
                continue;
            }
            if level > 3 {
                // PS is reserved in PML4 and PML5 entries.
                return Err(TranslationFault::Reserved(level));
            }
            // In a large-page entry, the address bits between PAT (bit 12) and the page size are
            // reserved.
            if level > 1 && entry & (size - 1) & ADDRESS & !PAGE != 0 {
                return Err(TranslationFault::Reserved(level));
            }
            self.last_table = LastTable {
                prefix: gva >> (shift + 9),
                prefix_shift: shift + 9,
                level,
                table,
                user: above,
            };
            let base = entry & ADDRESS & !(size - 1);
            return Ok(PageTranslation {
                gpa: base + (gva & (size - 1)),
                page_size: size,
                user,
            });
        }
        unreachable!("level 1 always returns")
    }

    /// Fills `buf` from the guest-virtual address `gva`. The memory may cross page boundaries.
    #[expect(clippy::cast_possible_truncation, reason = "a page's size")]
    pub fn read(
        &mut self,
        gva: u64,
        buf: &mut [u8],
        budget: &mut GuestMemoryReadBudget,
    ) -> Result<(), TranslationFault> {
        let mut at = gva;
        let mut rest = buf;
        while !rest.is_empty() {
            let offset = (at % PAGE) as usize;
            let (now, later) = rest.split_at_mut((PAGE as usize - offset).min(rest.len()));
            let page = self.page(at, budget)?;
            if !budget.take() {
                return Err(TranslationFault::Spent);
            }
            if !page.ram.as_ref().is_some_and(|ram| ram.read(offset, now)) {
                return Err(TranslationFault::OutsideMemory);
            }
            // Stops at the top of the address space instead of wrapping around.
            match at.checked_add(now.len() as u64) {
                Some(next) => at = next,
                None if later.is_empty() => break,
                None => return Err(TranslationFault::NonCanonical),
            }
            rest = later;
        }
        Ok(())
    }

    /// Returns the guest-physical address of `gva`, from the cache if possible.
    pub fn physical(
        &mut self,
        gva: u64,
        budget: &mut GuestMemoryReadBudget,
    ) -> Result<u64, TranslationFault> {
        Ok(self.page(gva, budget)?.base + gva % PAGE)
    }

    /// Returns the page of guest memory that contains the guest-virtual address `gva`.
    #[inline]
    fn page(
        &mut self,
        gva: u64,
        budget: &mut GuestMemoryReadBudget,
    ) -> Result<&CachedPage<M::Page<'m>>, TranslationFault> {
        let number = gva / PAGE;
        let slot = number as usize % CACHE_SLOTS;
        if !matches!(&self.cache[slot], Some(cached) if cached.number == number) {
            let base = self.translate(gva & !(PAGE - 1), budget)?.gpa;
            self.cache[slot] = Some(CachedPage {
                number,
                base,
                ram: self.phys.page(base),
            });
        }
        // The code above has filled this cache entry.
        self.cache[slot].as_ref().ok_or(TranslationFault::OutsideMemory)
    }

    /// Reads the 8 bytes at the guest-virtual address `gva` in little-endian order.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "a page's size")]
    pub fn read_u64(
        &mut self,
        gva: u64,
        budget: &mut GuestMemoryReadBudget,
    ) -> Result<u64, TranslationFault> {
        let offset = (gva % PAGE) as usize;
        if offset <= PAGE as usize - 8 {
            let page = self.page(gva, budget)?;
            if !budget.take() {
                return Err(TranslationFault::Spent);
            }
            return page
                .ram
                .as_ref()
                .and_then(|ram| ram.read_u64(offset))
                .ok_or(TranslationFault::OutsideMemory);
        }
        let mut raw = [0; 8];
        self.read(gva, &mut raw, budget)?;
        Ok(u64::from_le_bytes(raw))
    }

    /// Reads the two consecutive 8-byte words at `gva`.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "a page's size")]
    pub fn read_pair(
        &mut self,
        gva: u64,
        budget: &mut GuestMemoryReadBudget,
    ) -> Result<(u64, u64), TranslationFault> {
        let offset = (gva % PAGE) as usize;
        if offset <= PAGE as usize - 16 {
            let page = self.page(gva, budget)?;
            if !budget.take() || !budget.take() {
                return Err(TranslationFault::Spent);
            }
            let ram = page.ram.as_ref().ok_or(TranslationFault::OutsideMemory)?;
            let first = ram.read_u64(offset).ok_or(TranslationFault::OutsideMemory)?;
            let second = ram.read_u64(offset + 8).ok_or(TranslationFault::OutsideMemory)?;
            return Ok((first, second));
        }
        let first = self.read_u64(gva, budget)?;
        let second = gva.checked_add(8).ok_or(TranslationFault::NonCanonical)?;
        Ok((first, self.read_u64(second, budget)?))
    }

    /// Reads `N` bytes (at most 8) at `gva`. Faster than [`Self::read`] within one page.
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "a page's size")]
    pub fn read_few<const N: usize>(
        &mut self,
        gva: u64,
        budget: &mut GuestMemoryReadBudget,
    ) -> Result<[u8; N], TranslationFault> {
        let mut few = [0; N];
        if N <= 8 && (gva % PAGE) as usize <= PAGE as usize - 8 {
            let word = self.read_u64(gva, budget)?.to_le_bytes();
            few.copy_from_slice(&word[..N]);
        } else {
            self.read(gva, &mut few, budget)?;
        }
        Ok(few)
    }

    /// Reads the 4 bytes at the guest-virtual address `gva` in little-endian order.
    pub fn read_u32(
        &mut self,
        gva: u64,
        budget: &mut GuestMemoryReadBudget,
    ) -> Result<u32, TranslationFault> {
        self.read_few(gva, budget).map(u32::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TestGuest;
    use proptest::prelude::*;

    fn budget() -> GuestMemoryReadBudget {
        GuestMemoryReadBudget::new(100, None)
    }

    #[test]
    fn four_and_five_level_tables_translate_each_page_size() {
        for la57 in [false, true] {
            let mut g = TestGuest::new(1 << 20, la57);
            g.map(0x40_0000, 0x5000, 1);
            g.map(0x7fff_c020_0000, 0, 2);
            g.map(0xffff_8000_4000_0000, 0, 3);
            let mut space = AddressSpace::with_root(&g.ram[..], g.root, la57);
            let mut b = budget();
            assert_eq!(space.translate(0x40_0123, &mut b).unwrap().gpa, 0x5123);
            assert_eq!(b.reads_used(), if la57 { 5 } else { 4 });
            let t = space.translate(0x7fff_c020_0000 + 0x12345, &mut b).unwrap();
            assert_eq!((t.gpa, t.page_size), (0x12345, 2 << 20));
            let t = space.translate(0xffff_8000_4000_0000 + 0x54321, &mut b).unwrap();
            assert_eq!((t.gpa, t.page_size), (0x54321, 1 << 30));
            assert_eq!(
                space.translate(0x40_1000, &mut b),
                Err(TranslationFault::NotPresent(1))
            );
        }
    }

    #[test]
    fn walk_reuses_last_level_table() {
        for la57 in [false, true] {
            let mut g = TestGuest::new(1 << 20, la57);
            g.map(0x40_0000, 0x5000, 1);
            g.map(0x41_0000, 0x7000, 1);
            g.map(0x60_0000, 0x6000, 1);
            g.map(0xffff_8000_0040_0000, 0x8000, 1);
            let mut space = AddressSpace::with_root(&g.ram[..], g.root, la57);
            let levels = if la57 { 5 } else { 4 };
            // The first three addresses use the same last-level table, and the third one is not
            // mapped. The others use another table, the first table again, and a table of the upper
            // half.
            for (gva, found, reads) in [
                (0x40_0010, Ok(0x5010), levels),
                (0x41_0020, Ok(0x7020), 1),
                (0x42_0000, Err(TranslationFault::NotPresent(1)), 1),
                (0x60_0030, Ok(0x6030), levels),
                (0x40_0040, Ok(0x5040), levels),
                (0xffff_8000_0040_0050, Ok(0x8050), levels),
            ] {
                let mut b = budget();
                let gpa = space.translate(gva, &mut b).map(|t| t.gpa);
                assert_eq!((gpa, b.reads_used()), (found, reads), "{gva:#x}");
            }
        }
    }

    #[test]
    fn non_canonical_address_is_not_translated() {
        let g = TestGuest::new(1 << 16, false);
        let mut space = AddressSpace::with_root(&g.ram[..], g.root, false);
        assert_eq!(
            space.translate(0x8000_0000_0000, &mut budget()),
            Err(TranslationFault::NonCanonical)
        );
        let mut deep = AddressSpace::with_root(&g.ram[..], g.root, true);
        assert_ne!(
            deep.translate(0x8000_0000_0000, &mut budget()),
            Err(TranslationFault::NonCanonical)
        );
        assert_eq!(
            deep.translate(1 << 56, &mut budget()),
            Err(TranslationFault::NonCanonical)
        );
    }

    #[test]
    fn reserved_bits_end_the_walk() {
        let mut g = TestGuest::new(1 << 16, false);
        g.map(0x40_0000, 0x5000, 1);
        g.ram[g.root as usize] |= 0x80; // PS in a PML4 entry
        let mut space = AddressSpace::with_root(&g.ram[..], g.root, false);
        assert_eq!(
            space.translate(0x40_0000, &mut budget()),
            Err(TranslationFault::Reserved(4))
        );
        let mut g = TestGuest::new(1 << 16, false);
        g.map(0x20_0000, 0x4000, 2); // a 2 MiB page at an address that is no multiple of 2 MiB
        let mut space = AddressSpace::with_root(&g.ram[..], g.root, false);
        assert_eq!(
            space.translate(0x20_0000, &mut budget()),
            Err(TranslationFault::Reserved(2))
        );
    }

    #[test]
    fn recursive_page_tables_need_one_read_per_level() {
        let mut ram = vec![0u8; 4096];
        for entry in ram.chunks_exact_mut(8) {
            entry.copy_from_slice(&3u64.to_le_bytes()); // present, table at 0: itself
        }
        let mut space = AddressSpace::with_root(&ram[..], 0, true);
        let mut b = budget();
        assert_eq!(space.translate(0x1234, &mut b).unwrap().gpa, 0x234);
        assert_eq!(b.reads_used(), 5);
    }

    #[test]
    fn paging_modes_outside_long_mode_are_rejected() {
        let ram = [0u8; 16];
        let long = GuestRegs {
            cr0: CR0_PG,
            cr4: CR4_PAE,
            efer: EFER_LMA,
            ..Default::default()
        };
        let of = |regs: GuestRegs| AddressSpace::of(&ram[..], &regs).map(|_| ()).unwrap_err();
        assert!(AddressSpace::of(&ram[..], &long).is_ok());
        assert_eq!(of(GuestRegs { cr0: 0, ..long }), UnsupportedPaging::PagingOff);
        assert_eq!(of(GuestRegs { cr4: 0, ..long }), UnsupportedPaging::Legacy);
        assert_eq!(of(GuestRegs { efer: 0, ..long }), UnsupportedPaging::Pae);
    }

    #[test]
    fn read_crosses_pages_and_stops_at_the_top_of_the_address_space() {
        let mut g = TestGuest::new(1 << 16, false);
        g.map(0x1000, 0x6000, 1);
        g.map(0x2000, 0x5000, 1);
        g.map(u64::MAX - 4095, 0x6000, 1);
        g.ram[0x6ffc..0x7000].copy_from_slice(&[1, 2, 3, 4]);
        g.ram[0x5000..0x5004].copy_from_slice(&[5, 6, 7, 8]);
        let mut space = AddressSpace::with_root(&g.ram[..], g.root, false);
        assert_eq!(
            space.read_u64(0x1ffc, &mut budget()),
            Ok(u64::from_le_bytes([1, 2, 3, 4, 5, 6, 7, 8]))
        );
        assert!(space.read_u64(u64::MAX - 7, &mut budget()).is_ok());
        assert_eq!(
            space.read_u64(u64::MAX - 3, &mut budget()),
            Err(TranslationFault::NonCanonical)
        );
    }

    /// `read_pair` and `read_few` return the same data as reads of single words and bytes: within a
    /// page, across pages, before an unmapped page, and at the end of RAM.
    #[test]
    fn pairs_and_few_bytes_agree_with_single_reads() {
        let mut g = TestGuest::new((1 << 16) + 20, false);
        g.map(0x1000, 0x6000, 1);
        g.map(0x2000, 0x5000, 1);
        g.map(0x4000, 1 << 16, 1);
        for (i, byte) in g.ram[0x5000..0x7000].iter_mut().enumerate() {
            *byte = (i * 13 + i / 256) as u8;
        }
        for gva in (0x1fe0..0x2010).chain(0x2fe0..0x3010).chain(0x4000..0x4020) {
            // Addresses up to the end of RAM are readable, even if it is within a word.
            let mut space = AddressSpace::with_root(&g.ram[..], g.root, false);
            let mut b = GuestMemoryReadBudget::new(1000, None);
            let mut word = |at| space.read_u64(at, &mut b);
            let single = word(gva).and_then(|first| Ok((first, word(gva + 8)?)));
            assert_eq!(space.read_pair(gva, &mut b), single, "{gva:#x}");
            let mut bytes = [0; 5];
            let read = space.read(gva, &mut bytes, &mut b);
            let few = space.read_few::<5>(gva, &mut b);
            // A word that extends past the end of RAM may have five readable bytes.
            assert!(
                few == read.map(|()| bytes) || few == Err(TranslationFault::OutsideMemory),
                "{gva:#x}"
            );
        }
    }

    #[test]
    fn exhausted_budget_stops_read() {
        let mut g = TestGuest::new(1 << 16, false);
        g.map(0x1000, 0x6000, 1);
        let mut space = AddressSpace::with_root(&g.ram[..], g.root, false);
        let mut b = GuestMemoryReadBudget::new(3, None);
        assert_eq!(space.read_u64(0x1000, &mut b), Err(TranslationFault::Spent));
        assert!(b.is_spent());
    }

    proptest! {
        #[test]
        fn arbitrary_page_tables_are_bounded(
            ram in proptest::collection::vec(any::<u8>(), 0..16384), cr3: u64, gva: u64, la57: bool, len in 0usize..9000,
        ) {
            let mut space = AddressSpace::with_root(&ram[..], cr3, la57);
            let mut b = GuestMemoryReadBudget::new(40, None);
            let mut buf = vec![0; len];
            let _ = space.read(gva, &mut buf, &mut b);
            prop_assert!(b.reads_used() <= 40);
        }
    }
}
