//! The Linux 64-bit boot protocol: boot_params, command line, memory map, initrd, ACPI pointer
//! (Linux, Documentation/arch/x86/boot.rst, "64-bit Boot Protocol").

use linux_loader::cmdline::Cmdline;
use linux_loader::configurator::linux::LinuxBootConfigurator;
use linux_loader::configurator::{BootConfigurator, BootParams};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use linux_loader::loader::load_cmdline;
use std::ops::Range;
use vm_memory::{ByteValued, GuestAddress};

use super::error::BootError;
use super::layout;
use crate::memory::GuestRam;
use kernel_images::bzimage::{SETUP_HEADER_OFFSET, SetupHeader};

/// Maximum command line length in bytes, without the NUL, of an ELF kernel, which has no setup
/// header (x86 COMMAND_LINE_SIZE less the NUL).
pub(crate) const DEFAULT_CMDLINE_BYTES: usize = 2047;
/// Highest address that the initrd of an ELF kernel, which has no setup header, may occupy.
pub(crate) const DEFAULT_INITRD_MAX: u32 = 0x7FFF_FFFF;
/// Size of the setup header in boot_params, in bytes, as linux-loader defines it.
const HEADER_MAX_BYTES: usize = 0x26C - SETUP_HEADER_OFFSET;
const BOOT_FLAG: u16 = 0xAA55;
const HEADER_MAGIC: u32 = u32::from_le_bytes(*b"HdrS");
/// Value of the setup header's boot loader type: an unregistered boot loader.
const LOADER_UNDEFINED: u8 = 0xFF;
/// Bit 0 of the setup header's `loadflags`: the kernel is loaded at or above 1 MiB.
const LOADED_HIGH: u8 = 1;
/// Boot protocol version that boot_params reports for an ELF image, which has no setup header:
/// 2.15.
const PROTOCOL_VERSION: u16 = 0x020F;

/// Writes boot_params ("zero page") and the command line to `ram`. `bzimage` contains the file and
/// its setup header, or is `None` for a vmlinux.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the layout is below 4 GiB and has fewer than 256 ranges"
)]
pub(crate) fn write_boot_params(
    ram: &GuestRam,
    cmdline: &str,
    initrd: Option<&Range<u64>>,
    bzimage: Option<(&[u8], &SetupHeader)>,
) -> Result<(), BootError> {
    let mut params = boot_params::default();
    if let Some((file, header)) = bzimage {
        let end = header.end.min(SETUP_HEADER_OFFSET + HEADER_MAX_BYTES);
        if let Some(source) = file.get(SETUP_HEADER_OFFSET..end) {
            params.as_mut_slice()[SETUP_HEADER_OFFSET..end].copy_from_slice(source);
        }
    } else {
        params.hdr.version = PROTOCOL_VERSION;
        params.hdr.boot_flag = BOOT_FLAG;
        params.hdr.header = HEADER_MAGIC;
        params.hdr.initrd_addr_max = DEFAULT_INITRD_MAX;
        params.hdr.cmdline_size = DEFAULT_CMDLINE_BYTES as u32;
        params.hdr.kernel_alignment = 0x20_0000;
    }
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.loadflags |= LOADED_HIGH;
    params.hdr.cmd_line_ptr = layout::CMDLINE as u32;
    params.hdr.setup_data = 0;
    params.acpi_rsdp_addr = layout::RSDP;
    if let Some(initrd) = initrd {
        params.hdr.ramdisk_image = initrd.start as u32;
        params.hdr.ramdisk_size = (initrd.end - initrd.start) as u32;
    } else {
        params.hdr.ramdisk_image = 0;
        params.hdr.ramdisk_size = 0;
    }
    let map = ram.map();
    for (slot, entry) in params.e820_table.iter_mut().zip(&map) {
        *slot = boot_e820_entry {
            addr: entry.start,
            size: entry.len_bytes,
            r#type: entry.kind as u32,
        };
    }
    params.e820_entries = map.len() as u8;
    let zero_page = BootParams::new(&params, GuestAddress(layout::ZERO_PAGE));
    LinuxBootConfigurator::write_bootparams(&zero_page, ram.memory())
        .map_err(|e| BootError::memory("boot_params", layout::ZERO_PAGE, e))?;
    const WHAT: &str = "the command line";
    let address = layout::CMDLINE;
    let mut line =
        Cmdline::new(layout::CMDLINE_MAX_BYTES).map_err(|e| BootError::memory(WHAT, address, e))?;
    line.insert_str(cmdline)
        .map_err(|e| BootError::memory(WHAT, address, e))?;
    load_cmdline(ram.memory(), GuestAddress(address), &line).map_err(|e| BootError::memory(WHAT, address, e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    #[test]
    fn zero_page_matches_linux_layout() {
        let ram = GuestRam::new(64 << 20).unwrap();
        write_boot_params(&ram, "console=ttyS0 a=b", Some(&(0x300_0000..0x300_1234)), None).unwrap();
        let mut page = [0u8; 4096];
        ram.memory()
            .read_slice(&mut page, GuestAddress(layout::ZERO_PAGE))
            .unwrap();
        let u32_at = |o: usize| u32::from_le_bytes(page[o..o + 4].try_into().unwrap());
        assert_eq!(page[0x1E8], 3);
        assert_eq!(u32_at(0x218), 0x300_0000);
        assert_eq!(u32_at(0x21C), 0x1234);
        assert_eq!(u32_at(0x228), layout::CMDLINE as u32);
        assert_eq!(u32_at(0x070), layout::RSDP as u32);
        assert_eq!(
            page[0x1EF], 0,
            "a sentinel other than 0 makes Linux discard the page"
        );
        let mut line = [0u8; 18];
        ram.memory()
            .read_slice(&mut line, GuestAddress(layout::CMDLINE))
            .unwrap();
        assert_eq!(&line, b"console=ttyS0 a=b\0");
    }
}
