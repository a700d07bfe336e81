//! Multiboot version 1, the boot protocol of bare-metal test kernels.
//! Multiboot Specification 0.6.96, chapter 3.

use std::ops::Range;
use vm_memory::{Bytes, GuestAddress};

use super::elf::{Segment, malformed, truncated};
use super::error::BootError;
use super::layout;
use crate::memory::{EBDA_START, GuestRam, HIGH_RAM_START, RangeKind};

/// Magic number of the header in the file (3.1.1).
const HEADER_MAGIC: u32 = 0x1BAD_B002;
/// What EAX holds at the entry point (3.2).
pub(crate) const ENTRY_MAGIC: u32 = 0x2BAD_B002;
/// The header lies in the first 8 KiB.
const SEARCH_BYTES: usize = 8192;
/// Header flag 0: modules are page aligned. Ours always are.
const FLAG_ALIGN: u32 = 1 << 0;
/// Header flag 1: memory information is needed. Ours is always there.
const FLAG_MEMORY: u32 = 1 << 1;
/// Header flag 2: a video mode is wished for. Not offered, and kernels cope.
const FLAG_VIDEO: u32 = 1 << 2;
/// Header flag 16: the address fields are valid ("a.out kludge").
const FLAG_ADDRESSES: u32 = 1 << 16;
/// Header flags 0 to 15 that must be refused when unknown.
const REQUIRED: u32 = 0xFFFF;

/// Info flags (3.3): mem_*, cmdline, mods_*, mmap_*, boot_loader_name.
const INFO_MEMORY: u32 = 1 << 0;
const INFO_CMDLINE: u32 = 1 << 2;
const INFO_MODULES: u32 = 1 << 3;
const INFO_MMAP: u32 = 1 << 6;
const INFO_LOADER_NAME: u32 = 1 << 9;
const INFO_BYTES: u64 = 120;

/// Longest command line passed to a multiboot kernel.
pub(crate) const CMDLINE_MAX_BYTES: usize = 4095;
/// Longest module string.
const MODULE_STRING_MAX_BYTES: usize = 255;
/// Where the parts after the information structure lie.
const MODULE_LIST: u64 = layout::MULTIBOOT_INFO + 0x100;
const MMAP: u64 = layout::MULTIBOOT_INFO + 0x200;
const LOADER_NAME: u64 = layout::MULTIBOOT_INFO + 0x400;
const MODULE_STRING: u64 = layout::MULTIBOOT_INFO + 0x500;

/// The header found in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Its offset in the file.
    pub offset: usize,
    /// Its flags.
    pub flags: u32,
}

impl Header {
    /// Whether the address fields replace the ELF headers.
    pub fn has_addresses(&self) -> bool {
        self.flags & FLAG_ADDRESSES != 0
    }
}

fn u32_at(data: &[u8], at: usize) -> Option<u32> {
    let b = data.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
}

/// Finds the header: magic, flags and checksum that add up to zero, at a multiple of four.
pub(crate) fn find_header(data: &[u8]) -> Option<Header> {
    let window = &data[..data.len().min(SEARCH_BYTES)];
    (0..window.len().saturating_sub(11))
        .step_by(4)
        .find_map(|offset| {
            let magic = u32_at(window, offset)?;
            let flags = u32_at(window, offset + 4)?;
            let checksum = u32_at(window, offset + 8)?;
            (magic == HEADER_MAGIC && magic.wrapping_add(flags).wrapping_add(checksum) == 0)
                .then_some(Header { offset, flags })
        })
}

/// Refuses a header whose required features are not offered.
pub(crate) fn check_flags(name: &str, header: &Header) -> Result<(), BootError> {
    if header.flags & REQUIRED & !(FLAG_ALIGN | FLAG_MEMORY | FLAG_VIDEO) != 0 {
        return Err(BootError::MultibootFlags {
            name: name.into(),
            flags: header.flags,
        });
    }
    Ok(())
}

/// The one segment and the entry point the address fields describe (3.1.3).
pub(crate) fn address_fields<'a>(
    name: &str,
    data: &'a [u8],
    header: &Header,
) -> Result<(Segment<'a>, u32), BootError> {
    let field = |i: usize| {
        u32_at(data, header.offset + 12 + 4 * i).ok_or_else(|| {
            truncated(
                name,
                "the multiboot address fields",
                (header.offset + 32) as u64,
                data,
            )
        })
    };
    let (header_addr, load_addr, load_end, bss_end, entry) =
        (field(0)?, field(1)?, field(2)?, field(3)?, field(4)?);
    let before = header_addr
        .checked_sub(load_addr)
        .ok_or_else(|| malformed(name, "its multiboot load address lies after its header".into()))?;
    let start = header
        .offset
        .checked_sub(before as usize)
        .ok_or_else(|| malformed(name, "its multiboot load address lies before the file".into()))?;
    let file_bytes = match load_end {
        0 => data.len() - start,
        end => end
            .checked_sub(load_addr)
            .ok_or_else(|| malformed(name, "its multiboot load end lies before its start".into()))?
            as usize,
    };
    let end = start.saturating_add(file_bytes);
    let bytes = data
        .get(start..end)
        .ok_or_else(|| truncated(name, "the multiboot image", end as u64, data))?;
    let mem_bytes = match bss_end {
        0 => file_bytes as u64,
        end => u64::from(end)
            .checked_sub(u64::from(load_addr))
            .filter(|m| *m >= file_bytes as u64)
            .ok_or_else(|| malformed(name, "its multiboot bss end lies before its data's end".into()))?,
    };
    if mem_bytes == 0 {
        return Err(BootError::NoSegments { name: name.into() });
    }
    let segment = Segment {
        index: 0,
        virt: u64::from(load_addr),
        phys: u64::from(load_addr),
        mem_bytes,
        data: bytes,
        executable: true,
    };
    Ok((segment, entry))
}

/// Writes the information structure and what it points to.
pub(crate) fn write_info(
    ram: &GuestRam,
    cmdline: &str,
    module: Option<(&Range<u64>, &str)>,
) -> Result<(), BootError> {
    let write = |what: &'static str, address: u64, bytes: &[u8]| {
        ram.memory()
            .write_slice(bytes, GuestAddress(address))
            .map_err(|e| BootError::GuestMemory {
                what,
                address,
                reason: e.to_string(),
            })
    };
    let mut info = [0u8; INFO_BYTES as usize];
    let mut set = |offset: usize, value: u64| {
        info[offset..offset + 4].copy_from_slice(&(value as u32).to_le_bytes());
    };
    let mut flags = INFO_MEMORY | INFO_CMDLINE | INFO_MMAP | INFO_LOADER_NAME;
    set(4, EBDA_START >> 10);
    set(8, (ram.low_end() - HIGH_RAM_START) >> 10);
    set(16, layout::CMDLINE);
    let mut mmap = Vec::new();
    for entry in ram.map() {
        mmap.extend_from_slice(&20u32.to_le_bytes());
        mmap.extend_from_slice(&entry.start.to_le_bytes());
        mmap.extend_from_slice(&entry.len_bytes.to_le_bytes());
        let kind: u32 = match entry.kind {
            RangeKind::Ram => 1,
            RangeKind::Reserved => 2,
        };
        mmap.extend_from_slice(&kind.to_le_bytes());
    }
    set(44, mmap.len() as u64);
    set(48, MMAP);
    set(64, LOADER_NAME);
    if let Some((range, string)) = module {
        flags |= INFO_MODULES;
        set(20, 1);
        set(24, MODULE_LIST);
        let mut text: Vec<u8> = string
            .bytes()
            .filter(|b| *b != 0)
            .take(MODULE_STRING_MAX_BYTES)
            .collect();
        text.push(0);
        write("the module string", MODULE_STRING, &text)?;
        let mut list = Vec::with_capacity(16);
        for value in [range.start, range.end, MODULE_STRING, 0] {
            list.extend_from_slice(&(value as u32).to_le_bytes());
        }
        write("the module list", MODULE_LIST, &list)?;
    }
    set(0, u64::from(flags));
    write("the memory map", MMAP, &mmap)?;
    write("the loader name", LOADER_NAME, b"perfvisor\0")?;
    write("the multiboot information", layout::MULTIBOOT_INFO, &info)?;
    let mut line = cmdline.as_bytes().to_vec();
    line.push(0);
    write("the command line", layout::CMDLINE, &line)
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
    fn a_header_is_found_only_in_the_first_8_kib_and_with_its_checksum() {
        let h = header(3, [0; 5]);
        let mut file = vec![0u8; 8192 - 12];
        file.extend_from_slice(&h);
        assert_eq!(
            find_header(&file),
            Some(Header {
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
    fn unknown_required_features_are_refused() {
        assert!(
            check_flags(
                "k",
                &Header {
                    offset: 0,
                    flags: 0x1_0007
                }
            )
            .is_ok()
        );
        assert!(check_flags("k", &Header { offset: 0, flags: 8 }).is_err());
        assert!(
            check_flags(
                "k",
                &Header {
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
        fn hostile_address_fields_never_panic(fields: [u32; 5], tail in 0usize..200) {
            let mut file = header(0x1_0000, fields);
            file.resize(file.len() + tail, 0);
            let h = find_header(&file).unwrap();
            if let Ok((segment, _)) = address_fields("k", &file, &h) {
                prop_assert!(segment.data.len() as u64 <= segment.mem_bytes);
            }
        }
    }

    #[test]
    fn the_information_structure_reads_back() {
        let ram = GuestRam::new(32 << 20).unwrap();
        write_info(&ram, "a b", Some((&(0x40_0000..0x40_0123), "file"))).unwrap();
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
