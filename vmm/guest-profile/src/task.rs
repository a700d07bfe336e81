//! Reads the current task of a vCPU and its mappings from the guest kernel's data structures.
//!
//! The kernel's type information (BTF) provides the offsets of structure members. Beyond that, the
//! module only assumes that the kernel uses one of the known layouts: the current task is in
//! `current_task` or `pcpu_hot`, and mappings are in a maple tree (since Linux 6.1) or in a list.
//! All data may be inconsistent, because the guest is running, or malicious. Results are unverified
//! claims of the guest. They are suitable for display and for decisions that affect only this
//! guest.

pub mod areas;
mod cache;

use super::paging::AddressSpace;
use super::{GuestMemoryReadBudget, GuestPhys, GuestRegs};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use cache::CacheLayout;
use kernel_images::btf::Btf;
use kernel_images::build_id::BuildId;
use kernel_images::image::KernelImage;
use kernel_images::le::{u16_at, u32_at, u64_at};

/// Maximum accepted offset of a structure member, in bytes. No kernel structure is larger.
const MAX_OFFSET: u64 = 1 << 32;

/// Offsets, in bytes, of the members of the guest kernel's structures that this module reads.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TaskLayout {
    /// Offset from the per-CPU base to the pointer to the current task.
    current: u64,
    comm: u64,
    pid: u64,
    tgid: u64,
    mm: u64,
    maps: Option<MapsLayout>,
    list: Option<ListLayout>,
    single_step: Option<SingleStepLayout>,
}

/// Members that indicate whether a debugger in the guest single-steps a task.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct SingleStepLayout {
    /// Offset in `task_struct` of the flags that contain `TIF_SINGLESTEP`.
    flags: u64,
    /// Number of the bit `TIF_SINGLESTEP` in the flags.
    bit: u32,
    /// Offset in `task_struct` of the ptrace flags, which are 0 if the task is not traced.
    ptrace: u64,
}

impl SingleStepLayout {
    fn new(btf: &Btf, release: &str) -> Option<Self> {
        Some(Self {
            flags: btf.offset_of("task_struct", "thread_info.flags")?,
            bit: single_step_bit(release)?,
            ptrace: btf.offset_of("task_struct", "ptrace")?,
        })
    }
}

/// Returns the number of the bit `TIF_SINGLESTEP` in a kernel with the release string `release`, or
/// `None` if it is unknown. The kernel's type information lacks flag numbers
/// (`arch/x86/include/asm/thread_info.h`).
fn single_step_bit(release: &str) -> Option<u32> {
    let mut numbers = release
        .split(|c: char| !c.is_ascii_digit())
        .map(str::parse::<u32>);
    let version = (numbers.next()?.ok()?, numbers.next()?.ok()?);
    match version {
        // Kernels with real-time patches have another flag below this bit.
        _ if release.contains("rt") => None,
        (..=5, _) | (6, ..=12) => Some(4),
        (6, 13..=17) => Some(5),
        _ => None,
    }
}

/// Offsets of the members of the guest kernel's process list, and the address of its first entry.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct ListLayout {
    /// Run-time address of the first task in the list (`init_task`).
    first: u64,
    /// Offset in `task_struct` of the link to the next process.
    tasks: u64,
    /// Offset in `mm_struct` of the pointer to the root page table.
    pgd: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct MapsLayout {
    areas: AreaLayout,
    vm_start: u64,
    vm_end: u64,
    vm_pgoff: u64,
    vm_flags: u64,
    vm_file: u64,
    /// Offset in `mm_struct` of the member with the vDSO's address.
    vdso: Option<u64>,
    files: Option<FilesLayout>,
    cache: Option<CacheLayout>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
enum AreaLayout {
    Maple {
        root: u64,
        #[serde(deserialize_with = "offset")]
        range_pivot: u64,
        #[serde(deserialize_with = "offset")]
        range_slot: u64,
        #[serde(deserialize_with = "offset")]
        arange_pivot: u64,
        #[serde(deserialize_with = "offset")]
        arange_slot: u64,
    },
    List {
        first: u64,
        next: u64,
    },
}

#[derive(Debug, Clone, Serialize, Deserialize)]
struct FilesLayout {
    dentry: u64,
    mnt: u64,
    parent: u64,
    name: u64,
    name_len: u64,
    mount_mnt: u64,
    mount_parent: u64,
    mount_point: u64,
}

/// Deserializes a member offset that was received from another process and checks that it is below
/// `MAX_OFFSET`, because offsets are later added without overflow checks.
fn offset<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    let offset = u64::deserialize(from)?;
    if offset > MAX_OFFSET {
        return Err(D::Error::custom("an offset is too large"));
    }
    Ok(offset)
}

/// Error returned when the layout of a kernel's task structures cannot be determined.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TaskLayoutError {
    /// The kernel has no type information.
    #[error("the kernel has no type information (CONFIG_DEBUG_INFO_BTF)")]
    NoBtf,
    /// The type information lacks the named member.
    #[error("the kernel's type information lacks {0}")]
    Missing(&'static str),
}

impl TaskLayout {
    /// Determines the layout of the task structures from the kernel image. `slide` is the run-time
    /// address of a kernel symbol minus its link-time address.
    pub fn new(image: &KernelImage, slide: u64) -> Result<Self, TaskLayoutError> {
        let btf = image.btf().ok_or(TaskLayoutError::NoBtf)?;
        let member = |path: &'static str| {
            btf.offset_of("task_struct", path)
                .ok_or(TaskLayoutError::Missing(path))
        };
        let variable = |name: &str| {
            // Per-CPU symbols are offsets from a per-CPU area linked at 0. Since Linux 6.15, they
            // are addresses in the kernel image instead, which move with the slide. In both cases,
            // the address of a variable is its symbol plus the per-CPU base.
            let symbol = image
                .symbols()
                .and_then(|s| s.by_name(name))
                .map(|s| match s.address >> 63 {
                    0 => s.address,
                    _ => s.address.wrapping_add(slide),
                });
            symbol.or_else(|| btf.variable(".data..percpu", name))
        };
        let address = |name: &str| {
            let symbol = image.symbols()?.by_name(name)?;
            Some(symbol.address.wrapping_add(slide))
        };
        let list = || {
            Some(ListLayout {
                first: address("init_task")?,
                tasks: btf.offset_of("task_struct", "tasks")?,
                pgd: btf.offset_of("mm_struct", "pgd")?,
            })
        };
        let hot = || Some(variable("pcpu_hot")?.wrapping_add(btf.offset_of("pcpu_hot", "current_task")?));
        Ok(Self {
            current: variable("current_task")
                .or_else(hot)
                .ok_or(TaskLayoutError::Missing("current_task"))?,
            comm: member("comm")?,
            pid: member("pid")?,
            tgid: member("tgid")?,
            mm: member("mm")?,
            maps: MapsLayout::new(btf, address("vmemmap_base")),
            list: list(),
            single_step: image
                .release()
                .and_then(|release| SingleStepLayout::new(btf, release)),
        })
    }

    /// Returns whether the layout is sufficient to look up mappings of processes, in addition to
    /// tasks.
    pub fn has_maps(&self) -> bool {
        self.maps.is_some()
    }
}

impl MapsLayout {
    fn new(btf: &Btf, vmemmap_base: Option<u64>) -> Option<Self> {
        let vma = |m| btf.offset_of("vm_area_struct", m);
        let maple = || {
            Some(AreaLayout::Maple {
                root: btf.offset_of("mm_struct", "mm_mt.ma_root")?,
                range_pivot: btf.offset_of("maple_range_64", "pivot")?,
                range_slot: btf.offset_of("maple_range_64", "slot")?,
                arange_pivot: btf.offset_of("maple_arange_64", "pivot")?,
                arange_slot: btf.offset_of("maple_arange_64", "slot")?,
            })
        };
        let list = || {
            Some(AreaLayout::List {
                first: btf.offset_of("mm_struct", "mmap")?,
                next: vma("vm_next")?,
            })
        };
        let files = || {
            Some(FilesLayout {
                dentry: btf.offset_of("file", "f_path.dentry")?,
                mnt: btf.offset_of("file", "f_path.mnt")?,
                parent: btf.offset_of("dentry", "d_parent")?,
                name: btf.offset_of("dentry", "d_name.name")?,
                name_len: btf.offset_of("dentry", "d_name.len")?,
                mount_mnt: btf.offset_of("mount", "mnt")?,
                mount_parent: btf.offset_of("mount", "mnt_parent")?,
                mount_point: btf.offset_of("mount", "mnt_mountpoint")?,
            })
        };
        Some(Self {
            areas: maple().or_else(list)?,
            vm_start: vma("vm_start")?,
            vm_end: vma("vm_end")?,
            vm_pgoff: vma("vm_pgoff")?,
            vm_flags: vma("vm_flags")?,
            vm_file: vma("vm_file")?,
            vdso: btf.offset_of("mm_struct", "context.vdso"),
            files: files(),
            cache: CacheLayout::new(btf, vmemmap_base),
        })
    }
}

/// Size of a task name (`comm`) including the NUL terminator, in bytes.
pub const COMM_LEN: usize = 16;

/// A guest task, as described by the guest's kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GuestTask {
    /// Thread ID in the guest's initial PID namespace.
    pub tid: u32,
    /// Process ID (thread group ID) in the guest's initial PID namespace.
    pub pid: u32,
    /// Address of the task's memory descriptor (`mm_struct`); 0 for kernel threads.
    pub mm: u64,
    comm: [u8; COMM_LEN],
}

impl GuestTask {
    /// Returns the name of the task, with `?` for bytes that are not printable ASCII.
    pub fn comm(&self) -> impl std::fmt::Display + '_ {
        Printable(&self.comm)
    }

    /// Returns the task name as stored by the guest's kernel, padded with zeros.
    pub fn comm_padded(&self) -> [u8; COMM_LEN] {
        let mut comm = [0; COMM_LEN];
        let name = self.comm_bytes();
        comm[..name.len()].copy_from_slice(name);
        comm
    }

    /// Returns the task name as stored by the guest's kernel, without padding.
    pub fn comm_bytes(&self) -> &[u8] {
        until_nul(&self.comm)
    }
}

fn until_nul(bytes: &[u8]) -> &[u8] {
    &bytes[..memchr::memchr(0, bytes).unwrap_or(bytes.len())]
}

struct Printable<'b>(&'b [u8]);

impl std::fmt::Display for Printable<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        until_nul(self.0).iter().try_for_each(|&b| {
            std::fmt::Write::write_char(
                f,
                if b == b' ' || b.is_ascii_graphic() {
                    b as char
                } else {
                    '?'
                },
            )
        })
    }
}

/// A memory mapping of a guest process, as described by the guest's kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessMapping {
    /// Start address of the mapping.
    pub start: u64,
    /// End address of the mapping (exclusive).
    pub end: u64,
    /// Offset of `start` in the file, in bytes.
    pub file_offset: u64,
    /// `true` if the mapping is executable (VM_EXEC).
    pub executable: bool,
    /// Address of the mapped file's `struct file`; 0 for anonymous memory.
    pub file: u64,
}

/// Maximum number of steps that a lookup follows in each of the guest's structures: entries of a
/// list, levels of a tree, components of a path, and mounts. The guest controls these structures.
const MAX_AREAS: u32 = 1024;
const MAX_TREE_DEPTH: u32 = 12;
const MAX_COMPONENTS: u32 = 64;
const MAX_MOUNTS: u32 = 16;
const VM_EXEC: u64 = 4;
/// Number of slots in a node of a maple tree, for each of the two node types
/// (`include/linux/maple_tree.h`, 64-bit).
const RANGE_SLOTS: u64 = 16;
/// Limits of the search for a file's build ID: the number of mappings from the code to the first
/// page of the file, the number of program headers, and the size of a note segment in bytes.
const MAX_PARTS: u32 = 4;
const MAX_PROGRAM_HEADERS: u16 = 32;
const MAX_NOTES: usize = 512;
const ARANGE_SLOTS: u64 = 10;

/// Reader of the guest kernel's task structures. Uses the address space that the vCPU has when the
/// reader is created, so callers must create a new reader for each sample.
pub struct TaskReader<'l, 'm, M: GuestPhys + ?Sized> {
    layout: &'l TaskLayout,
    space: AddressSpace<'m, M>,
}

impl<'l, 'm, M: GuestPhys + ?Sized> TaskReader<'l, 'm, M> {
    /// Creates a reader for the guest kernel's data in the address space of the registers `regs`.
    /// Returns `None` if the paging mode is unsupported.
    pub fn new(layout: &'l TaskLayout, mem: &'m M, regs: &GuestRegs) -> Option<Self> {
        Some(Self {
            layout,
            space: AddressSpace::of(mem, regs).ok()?,
        })
    }

    /// Returns the task that runs on a vCPU. `per_cpu_base` is the base of the kernel's per-CPU
    /// data for this vCPU ([`GuestRegs::kernel_per_cpu_base`]).
    pub fn current(&mut self, per_cpu_base: u64, budget: &mut GuestMemoryReadBudget) -> Option<GuestTask> {
        let task = self.current_address(per_cpu_base, budget)?;
        let mut comm = [0; COMM_LEN];
        self.kernel_bytes(task.wrapping_add(self.layout.comm), &mut comm, budget)?;
        Some(GuestTask {
            tid: self.kernel_u32(task.wrapping_add(self.layout.pid), budget)?,
            pid: self.kernel_u32(task.wrapping_add(self.layout.tgid), budget)?,
            mm: self.kernel_u64(task.wrapping_add(self.layout.mm), budget)?,
            comm,
        })
    }

    /// Returns the address of the task that runs on the vCPU with the given per-CPU base.
    fn current_address(&mut self, per_cpu_base: u64, budget: &mut GuestMemoryReadBudget) -> Option<u64> {
        let slot = per_cpu_base.wrapping_add(self.layout.current);
        match self.space.read_u64(slot, budget) {
            Ok(task) => Some(task),
            Err(_) => {
                // With page-table isolation, a process's user page tables do not map the task.
                // Continue with the kernel's page tables.
                self.space = self.space.kernel_sibling();
                self.space.read_u64(slot, budget).ok()
            }
        }
    }

    /// Returns whether a debugger in the guest single-steps the current task (`PTRACE_SINGLESTEP`).
    /// Returns `None` if the kernel's flags are unknown or cannot be read.
    pub fn is_single_stepped(
        &mut self,
        per_cpu_base: u64,
        budget: &mut GuestMemoryReadBudget,
    ) -> Option<bool> {
        let step = self.layout.single_step?;
        let task = self.current_address(per_cpu_base, budget)?;
        let flags = self.kernel_u64(task.wrapping_add(step.flags), budget)?;
        let stepped = flags & 1u64.checked_shl(step.bit)? != 0;
        Some(stepped && self.kernel_u32(task.wrapping_add(step.ptrace), budget)? != 0)
    }

    /// Returns the address of the vDSO in the process whose memory descriptor is at `mm`.
    pub fn vdso(&mut self, mm: u64, budget: &mut GuestMemoryReadBudget) -> Option<u64> {
        let at = self.layout.maps.as_ref()?.vdso?;
        self.kernel_u64(mm.wrapping_add(at), budget)
    }

    /// Returns the mapping that contains `address` in the process whose memory descriptor is at
    /// `mm`.
    pub fn mapping(
        &mut self,
        mm: u64,
        address: u64,
        budget: &mut GuestMemoryReadBudget,
    ) -> Option<ProcessMapping> {
        let maps = self.layout.maps.as_ref()?;
        let area = match maps.areas {
            AreaLayout::List { first, next } => {
                let mut area = self.kernel_u64(mm.wrapping_add(first), budget)?;
                let mut left = MAX_AREAS;
                while self.kernel_u64(area.wrapping_add(maps.vm_end), budget)? <= address {
                    left = left.checked_sub(1)?;
                    area = self.kernel_u64(area.wrapping_add(next), budget)?;
                }
                area
            }
            AreaLayout::Maple { root, .. } => {
                let root = self.kernel_u64(mm.wrapping_add(root), budget)?;
                self.maple_lookup(&maps.areas, root, address, budget)?.0?
            }
        };
        self.area(area, budget)
            .filter(|mapping| (mapping.start..mapping.end).contains(&address))
    }

    /// Reads the mapping described by the `vm_area_struct` at `area`.
    fn area(&mut self, area: u64, budget: &mut GuestMemoryReadBudget) -> Option<ProcessMapping> {
        let maps = self.layout.maps.as_ref()?;
        let start = self.kernel_u64(area.wrapping_add(maps.vm_start), budget)?;
        let end = self.kernel_u64(area.wrapping_add(maps.vm_end), budget)?;
        if start >= end {
            return None;
        }
        let pages = self.kernel_u64(area.wrapping_add(maps.vm_pgoff), budget)?;
        Some(ProcessMapping {
            start,
            end,
            file_offset: pages.checked_mul(4096)?,
            executable: self.kernel_u64(area.wrapping_add(maps.vm_flags), budget)? & VM_EXEC != 0,
            file: self.kernel_u64(area.wrapping_add(maps.vm_file), budget)?,
        })
    }

    /// Looks up `address` in the maple tree with the root pointer `root`. Returns the address of
    /// the `vm_area_struct` that covers `address` (if any), and the last address with the same
    /// result.
    ///
    /// Bits 3 to 6 of an encoded node pointer contain the node type. Bit 1 of the root pointer
    /// indicates whether it points to a node.
    fn maple_lookup(
        &mut self,
        areas: &AreaLayout,
        root: u64,
        address: u64,
        budget: &mut GuestMemoryReadBudget,
    ) -> Option<(Option<u64>, u64)> {
        let &AreaLayout::Maple {
            range_pivot,
            range_slot,
            arange_pivot,
            arange_slot,
            ..
        } = areas
        else {
            return None;
        };
        let (mut entry, mut last) = (root, u64::MAX);
        let area = |entry: u64| (entry >> 63 == 1).then_some(entry);
        if entry & 3 != 2 {
            // If the tree contains a single range, its root is the entry for that range.
            return Some((area(entry), last));
        }
        for _ in 0..MAX_TREE_DEPTH {
            let node = entry & !0xFF;
            let (leaf, pivots, slots, count) = match (entry >> 3) & 0xF {
                1 => (true, range_pivot, range_slot, RANGE_SLOTS),
                2 => (false, range_pivot, range_slot, RANGE_SLOTS),
                3 => (false, arange_pivot, arange_slot, ARANGE_SLOTS),
                _ => return None,
            };
            // The last slot has no pivot (upper address of the slot). In a node that is not full,
            // pivot 0 marks the last slot in use.
            let mut slot = count - 1;
            for i in 0..count - 1 {
                let pivot = self.kernel_u64(node.wrapping_add(pivots + 8 * i), budget)?;
                if pivot == 0 && i > 0 {
                    slot = i;
                    break;
                }
                if address <= pivot {
                    (slot, last) = (i, last.min(pivot));
                    break;
                }
            }
            entry = self.kernel_u64(node.wrapping_add(slots + 8 * slot), budget)?;
            if leaf {
                return Some((area(entry), last));
            }
        }
        None
    }

    /// Writes the path of a mapping's file to the end of `buf` and returns it, with `?` for bytes
    /// that are not printable ASCII. A path that is too long is truncated at its beginning. Returns
    /// `None` if the path cannot be read.
    pub fn file_path<'b>(
        &mut self,
        file: u64,
        buf: &'b mut [u8],
        budget: &mut GuestMemoryReadBudget,
    ) -> Option<&'b str> {
        let f = self.layout.maps.as_ref()?.files.as_ref()?;
        let mut dentry = self.kernel_u64(file.wrapping_add(f.dentry), budget)?;
        let mut mount = self
            .kernel_u64(file.wrapping_add(f.mnt), budget)?
            .wrapping_sub(f.mount_mnt);
        let mut at = buf.len();
        let mut mounts_left = MAX_MOUNTS;
        for _ in 0..MAX_COMPONENTS {
            let parent = self.kernel_u64(dentry.wrapping_add(f.parent), budget)?;
            if parent == dentry {
                // `dentry` is the root of its file system. Continue at the directory on which the
                // file system is mounted. The root mount is its own parent.
                let above = self.kernel_u64(mount.wrapping_add(f.mount_parent), budget);
                let point = self.kernel_u64(mount.wrapping_add(f.mount_point), budget);
                match (above, point) {
                    (Some(above), Some(point)) if above != mount && mounts_left > 0 => {
                        mounts_left -= 1;
                        mount = above;
                        dentry = point;
                        continue;
                    }
                    _ => break,
                }
            }
            let name = self.kernel_u64(dentry.wrapping_add(f.name), budget)?;
            let len = self.kernel_u32(dentry.wrapping_add(f.name_len), budget)? as usize;
            if len == 0 || len > 255 || len + 1 > at {
                break;
            }
            at -= len;
            self.kernel_bytes(name, &mut buf[at..at + len], budget)?;
            at -= 1;
            buf[at] = b'/';
            dentry = parent;
        }
        let path = &mut buf[at..];
        path.iter_mut()
            .filter(|b| !(b.is_ascii_graphic() || **b == b' '))
            .for_each(|b| *b = b'?');
        let path: &'b str = std::str::from_utf8(path).ok()?;
        (!path.is_empty()).then_some(path)
    }

    /// Returns the build ID of the file of `mapping`, which is read from the file headers. The
    /// headers are mapped below the code. Returns `None` if the file has no build ID, is a 32-bit
    /// program, or its headers are not in memory.
    pub fn build_id(
        &mut self,
        mm: u64,
        mapping: &ProcessMapping,
        budget: &mut GuestMemoryReadBudget,
    ) -> Option<BuildId> {
        let first = self.first_part(mm, mapping, budget)?;
        let mut header = [0; 64];
        self.file_bytes(&first, 0, &mut header, budget)?;
        const ELF_OF_64_BITS: &[u8] = b"\x7fELF\x02\x01";
        const PROGRAM_HEADER: u16 = 56;
        if !header.starts_with(ELF_OF_64_BITS) || u16_at(&header, 54) != Some(PROGRAM_HEADER) {
            return None;
        }
        let (at, count) = (u64_at(&header, 32)?, u16_at(&header, 56)?);
        (0..count.min(MAX_PROGRAM_HEADERS)).find_map(|i| {
            const PT_NOTE: u32 = 4;
            let mut segment = [0; PROGRAM_HEADER as usize];
            let at = at.checked_add(u64::from(i * PROGRAM_HEADER))?;
            self.file_bytes(&first, at, &mut segment, budget)?;
            if u32_at(&segment, 0) != Some(PT_NOTE) {
                return None;
            }
            let mut notes = [0; MAX_NOTES];
            let len = usize::try_from(u64_at(&segment, 32)?).ok()?;
            let notes = notes.get_mut(..len)?;
            self.file_bytes(&first, u64_at(&segment, 8)?, notes, budget)?;
            BuildId::in_notes(notes)
        })
    }

    /// Returns the mapping of the first page of the file that `mapping` maps. Searches the mappings
    /// below `mapping`.
    fn first_part(
        &mut self,
        mm: u64,
        mapping: &ProcessMapping,
        budget: &mut GuestMemoryReadBudget,
    ) -> Option<ProcessMapping> {
        let mut first = *mapping;
        let mut left = MAX_PARTS;
        while first.file_offset != 0 {
            left = left.checked_sub(1)?;
            first = self.mapping(mm, first.start.checked_sub(1)?, budget)?;
            if first.file != mapping.file {
                return None;
            }
        }
        Some(first)
    }

    /// Reads the bytes at file offset `offset` from the mapping `first` of the file's beginning.
    /// Returns `None` if they are outside this mapping or not in memory.
    fn file_bytes(
        &mut self,
        first: &ProcessMapping,
        offset: u64,
        bytes: &mut [u8],
        budget: &mut GuestMemoryReadBudget,
    ) -> Option<()> {
        let mapped = first.end.checked_sub(first.start)?;
        let inside = offset.checked_add(bytes.len() as u64)? <= mapped;
        let at = first.start.checked_add(offset).filter(|_| inside)?;
        self.space.read(at, bytes, budget).ok()
    }

    fn kernel_bytes(&mut self, at: u64, buf: &mut [u8], budget: &mut GuestMemoryReadBudget) -> Option<()> {
        if !self.space.is_kernel_half(at) {
            return None;
        }
        self.space.read(at, buf, budget).ok()
    }

    fn kernel_u64(&mut self, at: u64, budget: &mut GuestMemoryReadBudget) -> Option<u64> {
        let mut raw = [0; 8];
        self.kernel_bytes(at, &mut raw, budget)?;
        Some(u64::from_le_bytes(raw))
    }

    fn kernel_u32(&mut self, at: u64, budget: &mut GuestMemoryReadBudget) -> Option<u32> {
        let mut raw = [0; 4];
        self.kernel_bytes(at, &mut raw, budget)?;
        Some(u32::from_le_bytes(raw))
    }
}
