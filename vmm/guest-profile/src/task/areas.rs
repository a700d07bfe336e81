//! Reads all mappings of a guest process, given its ID. Also reads memory that the process has
//! mapped but not yet accessed.

use super::{AreaLayout, MAX_AREAS, ProcessMapping, TaskLayout, TaskReader};
use crate::paging::AddressSpace;
use crate::{GuestMemoryReadBudget, GuestPhys, GuestRegs};
use kernel_images::image::KernelImage;
use serde::{Deserialize, Serialize};

/// Maximum number of entries of the guest's process list that are searched for a process ID.
const MAX_PROCESSES: u32 = 1 << 16;
/// End of the user address space (exclusive).
const USER_END: u64 = 1 << 56;
const PAGE: u64 = 4096;

/// Page tables that the kernel uses outside processes. They exist as long as the kernel runs,
/// unlike the page tables of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KernelPageTables {
    root: u64,
    la57: bool,
}

impl KernelPageTables {
    /// Finds the page tables of the kernel `image`. The kernel runs `slide` bytes above its
    /// link-time addresses, on a vCPU with the registers `regs`. Returns `None` if the image has no
    /// symbol for the tables.
    pub fn find<M: GuestPhys + ?Sized>(
        mem: &M,
        regs: &GuestRegs,
        image: &KernelImage,
        slide: u64,
    ) -> Option<Self> {
        const CR4_LA57: u64 = 1 << 12;
        let at = image
            .symbols()?
            .by_name("init_top_pgt")?
            .address
            .wrapping_add(slide);
        let space = AddressSpace::of(mem, regs).ok()?;
        let root = [space.kernel_sibling(), space]
            .into_iter()
            .find_map(|mut space| {
                space
                    .translate(at, &mut GuestMemoryReadBudget::new(16, None))
                    .ok()
            })?
            .gpa;
        Some(Self {
            root,
            la57: regs.cr4 & CR4_LA57 != 0,
        })
    }
}

/// A process that was found in the guest's process list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestProcess {
    /// ID of the process in the guest's initial PID namespace.
    pub pid: u32,
    /// Address of the process's memory descriptor (`mm_struct`).
    pub mm: u64,
    task: u64,
    /// Guest-physical address of the process's root page table.
    root: u64,
}

impl GuestProcess {
    /// Finds the process `pid`. Returns `None` if it does not exist or is a kernel thread, or if
    /// the location of the process list is unknown.
    pub fn find<M: GuestPhys + ?Sized>(
        layout: &TaskLayout,
        mem: &M,
        tables: KernelPageTables,
        pid: u32,
        budget: &mut GuestMemoryReadBudget,
    ) -> Option<Self> {
        let list = layout.list.as_ref()?;
        let mut reader = TaskReader::under(layout, mem, tables.root, tables.la57);
        let mut task = list.first;
        for _ in 0..MAX_PROCESSES {
            let next = reader.kernel_u64(task.wrapping_add(list.tasks), budget)?;
            task = next.wrapping_sub(list.tasks);
            if task == list.first {
                return None;
            }
            if reader.kernel_u32(task.wrapping_add(layout.tgid), budget)? == pid {
                return reader.process(list.pgd, task, pid, budget);
            }
        }
        None
    }

    /// Reads the process again from the guest's memory. Returns `None` if the process has exited or
    /// executed another program.
    pub fn reread<M: GuestPhys + ?Sized>(
        self,
        layout: &TaskLayout,
        mem: &M,
        tables: KernelPageTables,
        budget: &mut GuestMemoryReadBudget,
    ) -> Option<Self> {
        let list = layout.list.as_ref()?;
        let mut reader = TaskReader::under(layout, mem, tables.root, tables.la57);
        let pid = reader.kernel_u32(self.task.wrapping_add(layout.tgid), budget)?;
        reader
            .process(list.pgd, self.task, pid, budget)
            .filter(|now| *now == self)
    }

    /// Returns a reader that uses the page tables of the process.
    pub fn reader<'l, 'm, M: GuestPhys + ?Sized>(
        &self,
        layout: &'l TaskLayout,
        mem: &'m M,
        tables: KernelPageTables,
    ) -> TaskReader<'l, 'm, M> {
        TaskReader::under(layout, mem, self.root, tables.la57)
    }
}

/// An executable memory mapping of a guest process, with the start of its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExecutableMapping {
    /// Address range and file of the mapping.
    pub mapping: ProcessMapping,
    /// Address at which the first byte of the file is mapped. `None` if that byte is not mapped, or
    /// if there are too many other mappings of the file between that byte and this mapping.
    pub base: Option<u64>,
}

impl<'l, 'm, M: GuestPhys + ?Sized> TaskReader<'l, 'm, M> {
    fn under(layout: &'l TaskLayout, mem: &'m M, root: u64, la57: bool) -> Self {
        Self {
            layout,
            space: AddressSpace::with_root(mem, root, la57),
        }
    }

    fn process(
        &mut self,
        pgd: u64,
        task: u64,
        pid: u32,
        budget: &mut GuestMemoryReadBudget,
    ) -> Option<GuestProcess> {
        let mm = self.kernel_u64(task.wrapping_add(self.layout.mm), budget)?;
        let tables = self.kernel_u64(mm.wrapping_add(pgd), budget)?;
        if !self.space.is_kernel_half(tables) {
            return None;
        }
        let root = self.space.translate(tables, budget).ok()?.gpa;
        Some(GuestProcess { pid, mm, task, root })
    }

    /// Calls `each` with the executable mappings of the process whose memory descriptor is at `mm`,
    /// in ascending order, until `each` returns `false`. Returns `true` if `each` was called with
    /// all executable mappings, and `false` if `each`, the budget or another limit ended the
    /// iteration early.
    pub fn code(
        &mut self,
        mm: u64,
        budget: &mut GuestMemoryReadBudget,
        mut each: impl FnMut(&mut Self, ExecutableMapping, &mut GuestMemoryReadBudget) -> bool,
    ) -> bool {
        let mut at = 0;
        for _ in 0..2 * MAX_AREAS {
            let Some((mapping, last)) = self.area_from(mm, at, budget) else {
                return false;
            };
            if let Some(mapping) = mapping.filter(|m| m.executable) {
                let base = self.first_part(mm, &mapping, budget).map(|first| first.start);
                if !each(self, ExecutableMapping { mapping, base }, budget) {
                    return false;
                }
            }
            match last.checked_add(1) {
                Some(next) if next > at && next < USER_END => at = next,
                Some(next) if next >= USER_END => return true,
                Some(_) => return false,
                None => return true,
            }
        }
        false
    }

    /// Returns the mapping that contains `address` (if any), and the last address with the same
    /// result. If the kernel keeps mappings in a list, the mapping may be the next one above
    /// `address` instead.
    fn area_from(
        &mut self,
        mm: u64,
        address: u64,
        budget: &mut GuestMemoryReadBudget,
    ) -> Option<(Option<ProcessMapping>, u64)> {
        let maps = self.layout.maps.as_ref()?;
        match maps.areas {
            AreaLayout::List { first, next } => {
                let mut area = self.kernel_u64(mm.wrapping_add(first), budget)?;
                for _ in 0..MAX_AREAS {
                    if area == 0 {
                        return Some((None, u64::MAX));
                    }
                    let mapping = self.area(area, budget)?;
                    if mapping.end > address {
                        return Some((Some(mapping), mapping.end - 1));
                    }
                    area = self.kernel_u64(area.wrapping_add(next), budget)?;
                }
                None
            }
            AreaLayout::Maple { root, .. } => {
                let root = self.kernel_u64(mm.wrapping_add(root), budget)?;
                let (area, last) = self.maple_lookup(&maps.areas, root, address, budget)?;
                match area {
                    Some(area) => {
                        let mapping = self.area(area, budget)?;
                        Some((Some(mapping), last.max(mapping.end - 1)))
                    }
                    None => Some((None, last)),
                }
            }
        }
    }

    /// Fills `bytes` from `address` in the process whose memory descriptor is at `mm`. The reader
    /// must use the page tables of this process.
    ///
    /// A page of a file that the process has not accessed yet is read from the kernel's page cache.
    /// A page that is in neither the page tables nor the page cache reads as zeros, and `missing`
    /// is called with its offset in `bytes` and its length.
    pub fn memory(
        &mut self,
        mm: u64,
        address: u64,
        bytes: &mut [u8],
        budget: &mut GuestMemoryReadBudget,
        mut missing: impl FnMut(usize, usize),
    ) {
        let mut mapping: Option<ProcessMapping> = None;
        let mut done = 0;
        while done < bytes.len() {
            let Some(at) = address.checked_add(done as u64) else {
                bytes[done..].fill(0);
                missing(done, bytes.len() - done);
                return;
            };
            let in_page = PAGE - at % PAGE;
            let len = usize::try_from(in_page).map_or(bytes.len() - done, |n| n.min(bytes.len() - done));
            let part = &mut bytes[done..done + len];
            if !self.page_of(mm, at, &mut mapping, part, budget) {
                part.fill(0);
                missing(done, len);
            }
            done += len;
        }
    }

    /// Fills `part` from the address `at`. The memory must lie within one page. `mapping` is the
    /// mapping found by the previous call, which is used again if it contains `at`. Returns `false`
    /// if the page is not in memory.
    fn page_of(
        &mut self,
        mm: u64,
        at: u64,
        mapping: &mut Option<ProcessMapping>,
        part: &mut [u8],
        budget: &mut GuestMemoryReadBudget,
    ) -> bool {
        if !self.space.is_user_half(at) {
            return false;
        }
        if self.space.read(at, part, budget).is_ok() {
            return true;
        }
        if !mapping.is_some_and(|m| (m.start..m.end).contains(&at)) {
            *mapping = self.mapping(mm, at, budget);
        }
        mapping
            .filter(|m| m.file != 0)
            .and_then(|m| self.cached_page(&m, at, budget))
            .is_some_and(|page| self.space.phys().read(page + at % PAGE, part))
    }

    fn cached_page(
        &mut self,
        mapping: &ProcessMapping,
        at: u64,
        budget: &mut GuestMemoryReadBudget,
    ) -> Option<u64> {
        let cache = self.layout.maps.as_ref()?.cache.as_ref()?;
        let offset = (at - mapping.start).checked_add(mapping.file_offset)?;
        cache.page(mapping.file, offset / PAGE, &mut |at| self.kernel_u64(at, budget))
    }
}

#[cfg(test)]
mod tests;
