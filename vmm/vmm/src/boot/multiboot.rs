//! Multiboot version 1, the boot protocol of bare-metal test kernels (Multiboot Specification
//! 0.6.96, chapter 3).

use std::ops::Range;
use vm_memory::{Bytes, GuestAddress};

use super::error::BootError;
use super::layout;
use crate::memory::{EBDA_START, GuestRam, HIGH_RAM_START, MemoryRangeType};
use kernel_images::elf::LoadSegment;
use kernel_images::le::u32_at;
use kernel_images::{ImageCorruption, KernelImageError};

/// Magic number of the header in the file (3.1.1).
const HEADER_MAGIC: u32 = 0x1BAD_B002;
/// Value of EAX when the kernel is entered (3.2).
pub(crate) const ENTRY_MAGIC: u32 = 0x2BAD_B002;
/// Number of bytes from the start of the file that must contain the multiboot header.
const SEARCH_BYTES: usize = 8192;
/// Multiboot header flag 0: modules must be page aligned. The VMM aligns all modules.
const FLAG_ALIGN: u32 = 1 << 0;
/// Multiboot header flag 1: the kernel needs memory information. The VMM always provides it.
const FLAG_MEMORY: u32 = 1 << 1;
/// Multiboot header flag 2: the kernel requests a video mode. The VMM ignores the request, and
/// kernels continue without a video mode.
const FLAG_VIDEO: u32 = 1 << 2;
/// Multiboot header flag 16: the address fields are valid ("a.out kludge").
const FLAG_ADDRESSES: u32 = 1 << 16;
/// Multiboot header flags 0 to 15, which request required features. A loader rejects a kernel that
/// sets one of these flags and whose request it does not support.
const REQUIRED: u32 = 0xFFFF;

/// Flag of the multiboot information structure (3.3): the `mem_*` fields are valid.
const INFO_MEMORY: u32 = 1 << 0;
/// Flag of the multiboot information structure: `cmdline` is valid.
const INFO_CMDLINE: u32 = 1 << 2;
/// Flag of the multiboot information structure: the `mods_*` fields are valid.
const INFO_MODULES: u32 = 1 << 3;
/// Flag of the multiboot information structure: the `mmap_*` fields are valid.
const INFO_MMAP: u32 = 1 << 6;
/// Flag of the multiboot information structure: `boot_loader_name` is valid.
const INFO_LOADER_NAME: u32 = 1 << 9;
/// Size of the multiboot information structure in bytes, with room for all its fields.
const INFO_BYTES: u64 = 120;

/// Maximum command line length of a multiboot kernel, in bytes.
pub(crate) const CMDLINE_MAX_BYTES: usize = 4095;
/// Maximum length in bytes of the program name at the beginning of the command line.
const PROGRAM_NAME_MAX_BYTES: usize = 255;
/// Maximum length in bytes of the string that describes a module.
const MODULE_STRING_MAX_BYTES: usize = 255;
/// Offset of the module list from the start of the multiboot information structure.
const MODULE_LIST: u64 = 0x100;
/// Offset of the memory map from the start of the multiboot information structure.
const MMAP: u64 = 0x200;
/// Offset of the boot loader's name from the start of the multiboot information structure.
const LOADER_NAME: u64 = 0x400;
/// Offset of the module string from the start of the multiboot information structure.
const MODULE_STRING: u64 = 0x500;
/// Size in bytes of each of the two boot information areas: the information structure with the data
/// that follows it, and the command line.
const BOOT_INFO_BYTES: u64 = 0x1000;

/// Guest-physical addresses of the data that multiboot passes to the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BootInfoAddresses {
    /// Guest-physical address of the multiboot information structure.
    pub info: u64,
    /// Guest-physical address of the command line.
    pub cmdline: u64,
}

/// Chooses addresses below 1 MiB at which the boot information does not overlap the kernel's
/// segments.
#[expect(clippy::cast_possible_truncation, reason = "x86-64 only: usize has 64 bits")]
pub(crate) fn places(name: &str, segments: &[LoadSegment<'_>]) -> Result<BootInfoAddresses, BootError> {
    let free = |preferred: u64, taken: Option<u64>| {
        let pages =
            (layout::LOW_KERNEL_START..=EBDA_START - BOOT_INFO_BYTES).step_by(BOOT_INFO_BYTES as usize);
        std::iter::once(preferred).chain(pages).find(|place| {
            let apart = |start: u64, bytes: u64| {
                place.saturating_add(BOOT_INFO_BYTES) <= start || start.saturating_add(bytes) <= *place
            };
            segments.iter().all(|s| apart(s.phys, s.mem_bytes))
                && taken.is_none_or(|other| apart(other, BOOT_INFO_BYTES))
        })
    };
    let full = || BootError::LowMemoryFull { name: name.into() };
    let info = free(layout::MULTIBOOT_INFO, None).ok_or_else(full)?;
    let cmdline = free(layout::CMDLINE, Some(info)).ok_or_else(full)?;
    Ok(BootInfoAddresses { info, cmdline })
}

/// Returns the multiboot command line: the name of the program, which kernels skip, followed by
/// `words`.
pub(crate) fn command_line(program: Option<&str>, words: &str) -> String {
    let Some(program) = program else {
        return words.to_owned();
    };
    // The kernel skips one word, so the name must contain only printable characters.
    let mut line: String = program
        .chars()
        .map(|c| if c.is_ascii_graphic() { c } else { '_' })
        .take(PROGRAM_NAME_MAX_BYTES)
        .collect();
    if !words.is_empty() {
        line.push(' ');
        line.push_str(words);
    }
    line
}

/// Returns whether `data` is GRUB's core image, which has a multiboot header but is not a kernel.
/// Recognizes the image by the messages in its first sector.
pub(crate) fn is_grub_core(data: &[u8]) -> bool {
    let sector = &data[..data.len().min(512)];
    let has = |text: &[u8]| memchr::memmem::find(sector, text).is_some();
    has(b"loading\0") && has(b"Geom\0") && has(b"Read\0") && has(b" Error\0")
}

/// A multiboot header found in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MultibootHeader {
    /// Offset of the multiboot header from the start of the file, in bytes.
    pub offset: usize,
    /// Flags of the multiboot header (3.1.2).
    pub flags: u32,
}

impl MultibootHeader {
    /// Returns whether the address fields of the header are valid. Valid address fields replace the
    /// ELF headers of the file.
    pub fn has_addresses(&self) -> bool {
        self.flags & FLAG_ADDRESSES != 0
    }
}

/// Returns the multiboot header in the first 8 KiB of the file, if there is one: three aligned
/// 32-bit words (magic, flags and checksum) whose sum is zero.
pub(crate) fn find_header(data: &[u8]) -> Option<MultibootHeader> {
    let window = &data[..data.len().min(SEARCH_BYTES)];
    (0..window.len().saturating_sub(11))
        .step_by(4)
        .find_map(|offset| {
            let magic = u32_at(window, offset)?;
            let flags = u32_at(window, offset + 4)?;
            let checksum = u32_at(window, offset + 8)?;
            (magic == HEADER_MAGIC && magic.wrapping_add(flags).wrapping_add(checksum) == 0)
                .then_some(MultibootHeader { offset, flags })
        })
}

/// Returns an error if the header requires an unsupported feature.
pub(crate) fn check_flags(name: &str, header: &MultibootHeader) -> Result<(), BootError> {
    if header.flags & REQUIRED & !(FLAG_ALIGN | FLAG_MEMORY | FLAG_VIDEO) != 0 {
        return Err(BootError::MultibootFlags {
            name: name.into(),
            flags: header.flags,
        });
    }
    Ok(())
}

/// Returns the segment and the entry point that the address fields of the header describe (3.1.3).
pub(crate) fn address_fields<'a>(
    name: &str,
    data: &'a [u8],
    header: &MultibootHeader,
) -> Result<(LoadSegment<'a>, u32), KernelImageError> {
    let field = |i: usize| {
        u32_at(data, header.offset + 12 + 4 * i).ok_or_else(|| {
            KernelImageError::truncated(
                name,
                "the multiboot address fields",
                (header.offset + 32) as u64,
                data,
            )
        })
    };
    let (header_addr, load_addr, load_end, bss_end, entry) =
        (field(0)?, field(1)?, field(2)?, field(3)?, field(4)?);
    let damaged =
        |field, place| KernelImageError::malformed(name, ImageCorruption::Multiboot { field, place });
    let before = header_addr
        .checked_sub(load_addr)
        .ok_or_else(|| damaged("load address", "after its header"))?;
    let start = header
        .offset
        .checked_sub(before as usize)
        .ok_or_else(|| damaged("load address", "before the file"))?;
    let file_bytes = match load_end {
        0 => data.len() - start,
        end => end
            .checked_sub(load_addr)
            .ok_or_else(|| damaged("load end", "before its start"))? as usize,
    };
    let end = start.saturating_add(file_bytes);
    let bytes = data
        .get(start..end)
        .ok_or_else(|| KernelImageError::truncated(name, "the multiboot image", end as u64, data))?;
    let mem_bytes = match bss_end {
        0 => file_bytes as u64,
        end => u64::from(end)
            .checked_sub(u64::from(load_addr))
            .filter(|m| *m >= file_bytes as u64)
            .ok_or_else(|| damaged("bss end", "before its data's end"))?,
    };
    if mem_bytes == 0 {
        return Err(KernelImageError::NoSegments { name: name.into() });
    }
    let segment = LoadSegment {
        index: 0,
        virt: u64::from(load_addr),
        phys: u64::from(load_addr),
        mem_bytes,
        data: bytes,
        executable: true,
    };
    Ok((segment, entry))
}

/// Writes the multiboot information structure and the data to which its fields point.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a multiboot guest is loaded below 4 GiB"
)]
pub(crate) fn write_info(
    ram: &GuestRam,
    places: BootInfoAddresses,
    cmdline: &str,
    module: Option<(&Range<u64>, &str)>,
) -> Result<(), BootError> {
    let write = |what: &'static str, address: u64, bytes: &[u8]| {
        ram.memory()
            .write_slice(bytes, GuestAddress(address))
            .map_err(|e| BootError::memory(what, address, e))
    };
    let mut info = [0u8; INFO_BYTES as usize];
    let mut set = |offset: usize, value: u64| {
        info[offset..offset + 4].copy_from_slice(&(value as u32).to_le_bytes());
    };
    let mut flags = INFO_MEMORY | INFO_CMDLINE | INFO_MMAP | INFO_LOADER_NAME;
    set(4, EBDA_START >> 10);
    set(8, (ram.low_end() - HIGH_RAM_START) >> 10);
    set(16, places.cmdline);
    let mut mmap = Vec::new();
    for entry in ram.map() {
        mmap.extend_from_slice(&20u32.to_le_bytes());
        mmap.extend_from_slice(&entry.start.to_le_bytes());
        mmap.extend_from_slice(&entry.len_bytes.to_le_bytes());
        let kind: u32 = match entry.kind {
            MemoryRangeType::Ram => 1,
            MemoryRangeType::Reserved => 2,
        };
        mmap.extend_from_slice(&kind.to_le_bytes());
    }
    set(44, mmap.len() as u64);
    set(48, places.info + MMAP);
    set(64, places.info + LOADER_NAME);
    if let Some((range, string)) = module {
        flags |= INFO_MODULES;
        let string_at = places.info + MODULE_STRING;
        set(20, 1);
        set(24, places.info + MODULE_LIST);
        let mut text: Vec<u8> = string
            .bytes()
            .filter(|b| *b != 0)
            .take(MODULE_STRING_MAX_BYTES)
            .collect();
        text.push(0);
        write("the module string", string_at, &text)?;
        let mut list = Vec::with_capacity(16);
        for value in [range.start, range.end, string_at, 0] {
            list.extend_from_slice(&(value as u32).to_le_bytes());
        }
        write("the module list", places.info + MODULE_LIST, &list)?;
    }
    set(0, u64::from(flags));
    write("the memory map", places.info + MMAP, &mmap)?;
    write("the loader name", places.info + LOADER_NAME, b"perfvisor\0")?;
    write("the multiboot information", places.info, &info)?;
    let mut line = cmdline.as_bytes().to_vec();
    line.push(0);
    write("the command line", places.cmdline, &line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header(flags: u32, fields: [u32; 5]) -> Vec<u8> {
        let mut h = Vec::new();
        for v in [
            HEADER_MAGIC,
            flags,
            0u32.wrapping_sub(HEADER_MAGIC).wrapping_sub(flags),
        ] {
            h.extend_from_slice(&v.to_le_bytes());
        }
        for v in fields {
            h.extend_from_slice(&v.to_le_bytes());
        }
        h
    }

    #[test]
    fn multiboot_header_requires_first_8_kib_and_checksum() {
        let h = header(3, [0; 5]);
        let mut file = vec![0u8; 8192 - 12];
        file.extend_from_slice(&h);
        assert_eq!(
            find_header(&file),
            Some(MultibootHeader {
                offset: 8192 - 12,
                flags: 3
            })
        );
        let mut late = vec![0u8; 8192 - 8];
        late.extend_from_slice(&h);
        assert_eq!(find_header(&late), None);
        file[8192 - 4] ^= 1;
        assert_eq!(find_header(&file), None);
    }

    #[test]
    fn multiboot_rejects_unknown_required_flags() {
        assert!(
            check_flags(
                "k",
                &MultibootHeader {
                    offset: 0,
                    flags: 0x1_0007
                }
            )
            .is_ok()
        );
        assert!(check_flags("k", &MultibootHeader { offset: 0, flags: 8 }).is_err());
        assert!(
            check_flags(
                "k",
                &MultibootHeader {
                    offset: 0,
                    flags: 1 << 17
                }
            )
            .is_ok(),
            "optional features are"
        );
    }

    #[test]
    fn address_fields_describe_one_segment() {
        let mut file = header(0x1_0000, [0x10_0000, 0x10_0000, 0x10_0040, 0x10_0100, 0x10_0020]);
        file.resize(0x40, 0x90);
        let h = find_header(&file).unwrap();
        let (segment, entry) = address_fields("k", &file, &h).unwrap();
        assert_eq!(
            (segment.phys, segment.mem_bytes, segment.data.len(), entry),
            (0x10_0000, 0x100, 0x40, 0x10_0020)
        );
    }

    proptest! {
        #[test]
        fn multiboot_address_fields_never_panic(fields: [u32; 5], tail in 0usize..200) {
            let mut file = header(0x1_0000, fields);
            file.resize(file.len() + tail, 0);
            let h = find_header(&file).unwrap();
            if let Ok((segment, _)) = address_fields("k", &file, &h) {
                prop_assert!(segment.data.len() as u64 <= segment.mem_bytes);
            }
        }
    }

    fn segment(phys: u64, mem_bytes: u64) -> LoadSegment<'static> {
        LoadSegment {
            index: 0,
            virt: phys,
            phys,
            mem_bytes,
            data: &[],
            executable: true,
        }
    }

    /// Boot information does not overlap a kernel below 1 MiB.
    #[test]
    fn boot_info_does_not_overlap_low_kernel() {
        let usual = BootInfoAddresses {
            info: layout::MULTIBOOT_INFO,
            cmdline: layout::CMDLINE,
        };
        assert_eq!(places("k", &[segment(0x10_0000, 0x1000)]).unwrap(), usual);
        let beside = places("k", &[segment(0x1000, 0x8_0000)]).unwrap();
        assert_eq!((beside.info, beside.cmdline), (0x8_1000, 0x8_2000));
        let between = places("k", &[segment(0x2000, 0x4001), segment(0x2_0FFF, 1)]).unwrap();
        assert_eq!((between.info, between.cmdline), (0x1000, 0x7000));
        // One free page is not enough.
        let full = [segment(0x1000, 0x7000), segment(0x9000, EBDA_START - 0x9000)];
        assert!(matches!(places("k", &full), Err(BootError::LowMemoryFull { .. })));
    }

    proptest! {
        #[test]
        fn boot_info_addresses_are_free_and_disjoint(parts in proptest::collection::vec((0u64..0x12_0000, 1u64..0x3_0000), 0..6)) {
            let segments: Vec<_> = parts.iter().map(|&(phys, len)| segment(phys, len)).collect();
            if let Ok(BootInfoAddresses { info, cmdline }) = places("k", &segments) {
                prop_assert!(info.abs_diff(cmdline) >= BOOT_INFO_BYTES);
                for place in [info, cmdline] {
                    prop_assert!(place >= layout::LOW_KERNEL_START && place + BOOT_INFO_BYTES <= EBDA_START);
                    prop_assert!(parts.iter().all(|&(p, len)| place + BOOT_INFO_BYTES <= p || p + len <= place));
                }
            }
        }
    }

    #[test]
    fn command_line_starts_with_program_name() {
        assert_eq!(command_line(Some("k.elf"), "a b=c"), "k.elf a b=c");
        assert_eq!(command_line(Some("k.elf"), ""), "k.elf");
        assert_eq!(command_line(Some("my kernel\u{e4}"), "a"), "my_kernel_ a");
        assert_eq!(command_line(None, "a"), "a");
    }

    #[test]
    fn multiboot_info_reads_back() {
        let ram = GuestRam::new(32 << 20).unwrap();
        let places = places("k", &[]).unwrap();
        write_info(&ram, places, "a b", Some((&(0x40_0000..0x40_0123), "file"))).unwrap();
        let at = |a: u64| ram.memory().read_obj::<u32>(GuestAddress(a)).unwrap();
        let info = layout::MULTIBOOT_INFO;
        assert_eq!(at(info), 0x24D);
        assert_eq!(at(info + 4), 639);
        assert_eq!(at(info + 8), 31 * 1024);
        assert_eq!(at(info + 20), 1);
        let list = u64::from(at(info + 24));
        assert_eq!((at(list), at(list + 4)), (0x40_0000, 0x40_0123));
        assert_eq!(at(info + 44), 3 * 24);
        let mut line = [0u8; 4];
        ram.memory()
            .read_slice(&mut line, GuestAddress(u64::from(at(info + 16))))
            .unwrap();
        assert_eq!(&line, b"a b\0");
    }
}
