//! The PVH boot protocol. EBX holds the address of `hvm_start_info`, which refers to the command
//! line, the memory map, the initrd and the RSDP (Xen, docs/misc/pvh.pandoc and
//! public/arch-x86/hvm/start_info.h).

use std::ops::Range;

use linux_loader::configurator::pvh::PvhBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::loader::elf::start_info::{hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info};
use linux_loader::loader::{Cmdline, load_cmdline};
use vm_memory::GuestAddress;

use super::error::BootError;
use super::layout;
use crate::memory::GuestRam;

/// Magic number of start_info: the characters "xEn3", with the highest bit set.
const MAGIC: u32 = 0x336E_C578;
/// Version of start_info: 1, the first version with a memory map.
const VERSION: u32 = 1;
/// Offset in bytes of the module list from the start of start_info's page.
const MODULES: u64 = 0x100;
/// Offset in bytes of the memory map from the start of start_info's page.
const MEMORY_MAP: u64 = 0x200;

/// Writes start_info, the module list and the memory map to one page, and the command line to
/// [`layout::CMDLINE`]. The page is that of Linux's boot_params, which PVH does not use.
#[expect(clippy::cast_possible_truncation, reason = "a handful of ranges")]
pub(crate) fn write_start_info(
    ram: &GuestRam,
    cmdline: &str,
    initrd: Option<&Range<u64>>,
) -> Result<(), BootError> {
    let page = layout::PVH_START_INFO;
    let map: Vec<hvm_memmap_table_entry> = ram
        .map()
        .iter()
        .map(|range| hvm_memmap_table_entry {
            addr: range.start,
            size: range.len_bytes,
            type_: range.kind as u32,
            reserved: 0,
        })
        .collect();
    let modules: Vec<hvm_modlist_entry> = initrd
        .map(|range| hvm_modlist_entry {
            paddr: range.start,
            size: range.end - range.start,
            cmdline_paddr: 0,
            reserved: 0,
        })
        .into_iter()
        .collect();
    let info = hvm_start_info {
        magic: MAGIC,
        version: VERSION,
        flags: 0,
        nr_modules: modules.len() as u32,
        modlist_paddr: if modules.is_empty() { 0 } else { page + MODULES },
        cmdline_paddr: layout::CMDLINE,
        rsdp_paddr: layout::RSDP,
        memmap_paddr: page + MEMORY_MAP,
        memmap_entries: map.len() as u32,
        reserved: 0,
    };
    let mut params = BootParams::new(&info, GuestAddress(page));
    params.set_sections(&map, GuestAddress(page + MEMORY_MAP));
    params.set_modules(&modules, GuestAddress(page + MODULES));
    PvhBootConfigurator::write_bootparams(&params, ram.memory())
        .map_err(|e| BootError::memory("hvm_start_info", page, e))?;
    const WHAT: &str = "the command line";
    let address = layout::CMDLINE;
    let failed = |e| BootError::memory(WHAT, address, e);
    let mut line = Cmdline::new(layout::CMDLINE_MAX_BYTES).map_err(failed)?;
    line.insert_str(cmdline).map_err(failed)?;
    load_cmdline(ram.memory(), GuestAddress(address), &line).map_err(|e| BootError::memory(WHAT, address, e))
}
