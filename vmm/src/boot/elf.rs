//! ELF images: segments, executable sections, symbols and unwind anchors.
//!
//! The file is untrusted: every offset is checked by the `object` crate's readers or here, and a
//! damaged section or symbol table only costs the symbols, never the boot.

use object::Endianness;
use object::elf;
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader, Sym};

use super::error::BootError;
use super::symbols::SymbolTable;

/// Program headers looked at; Linux has five.
const MAX_SEGMENTS: usize = 64;

/// One PT_LOAD segment.
#[derive(Clone, Debug)]
pub(crate) struct Segment<'a> {
    /// Index of its program header.
    pub index: usize,
    /// Link-time (virtual) address.
    pub virt: u64,
    /// Guest-physical address.
    pub phys: u64,
    /// Bytes it occupies in memory.
    pub mem_bytes: u64,
    /// Bytes it has in the file.
    pub data: &'a [u8],
    /// PF_X is set.
    pub executable: bool,
}

impl Segment<'_> {
    /// Guest-physical address of a virtual address inside the segment's file bytes.
    fn phys_of(&self, virt: u64) -> Option<u64> {
        let offset = virt.checked_sub(self.virt)?;
        (offset < self.data.len() as u64).then(|| self.phys.wrapping_add(offset))
    }
}

/// Executable bytes: a section where the image has section headers, else a segment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Code<'a> {
    /// Virtual address of the first byte.
    pub virt: u64,
    /// Guest-physical address of the first byte.
    pub phys: u64,
    /// The bytes.
    pub bytes: &'a [u8],
}

/// A parsed image.
#[derive(Debug)]
pub(crate) struct ElfImage<'a> {
    /// ELFCLASS64.
    pub is_64: bool,
    /// Machine, `EM_*`.
    pub machine: u16,
    /// Entry point as the header has it.
    pub entry: u64,
    /// PT_LOAD segments with bytes in memory.
    pub segments: Vec<Segment<'a>>,
    /// Executable bytes.
    pub code: Vec<Code<'a>>,
    /// Functions and labels in executable sections.
    pub symbols: SymbolTable,
    /// Addresses of instruction boundaries from the kernel's ORC unwind table, sorted.
    pub orc_ips: Vec<u64>,
}

/// Whether `data` starts with the ELF magic.
pub(crate) fn is_elf(data: &[u8]) -> bool {
    data.starts_with(&elf::ELFMAG)
}

/// Parses a 32- or 64-bit little-endian image.
pub(crate) fn parse<'a>(name: &str, data: &'a [u8]) -> Result<ElfImage<'a>, BootError> {
    match data.get(4) {
        Some(1) => parse_class::<elf::FileHeader32<Endianness>>(name, data, false),
        Some(2) => parse_class::<elf::FileHeader64<Endianness>>(name, data, true),
        Some(class) => Err(malformed(
            name,
            format!("ELF class {class} is neither 32 nor 64 bits"),
        )),
        None => Err(truncated(name, "the ELF header", 52, data)),
    }
}

fn parse_class<'a, H: FileHeader<Endian = Endianness>>(
    name: &str,
    data: &'a [u8],
    is_64: bool,
) -> Result<ElfImage<'a>, BootError> {
    let header_bytes = size_of::<H>() as u64;
    if (data.len() as u64) < header_bytes {
        return Err(truncated(name, "the ELF header", header_bytes, data));
    }
    let header = H::parse(data).map_err(|e| malformed(name, format!("ELF header: {e}")))?;
    let endian = header
        .endian()
        .map_err(|e| malformed(name, format!("ELF header: {e}")))?;
    if endian != Endianness::Little {
        return Err(malformed(name, "it is big-endian".into()));
    }
    let phoff: u64 = header.e_phoff(endian).into();
    let phnum = u64::from(header.e_phnum(endian));
    let phend = phoff.saturating_add(phnum.saturating_mul(u64::from(header.e_phentsize(endian))));
    if phend > data.len() as u64 {
        return Err(truncated(name, "the program header table", phend, data));
    }
    let program_headers = header
        .program_headers(endian, data)
        .map_err(|e| malformed(name, format!("program header table: {e}")))?;
    if program_headers.len() > MAX_SEGMENTS {
        return Err(malformed(
            name,
            format!(
                "it has {} program headers, more than {MAX_SEGMENTS}",
                program_headers.len()
            ),
        ));
    }
    let mut segments = Vec::new();
    for (index, ph) in program_headers.iter().enumerate() {
        if ph.p_type(endian) != elf::PT_LOAD {
            continue;
        }
        let mem_bytes: u64 = ph.p_memsz(endian).into();
        let (offset, file_bytes) = ph.file_range(endian);
        if mem_bytes == 0 {
            continue;
        }
        if file_bytes > mem_bytes {
            return Err(malformed(
                name,
                format!("segment {index} has {file_bytes:#x} bytes in the file but {mem_bytes:#x} in memory"),
            ));
        }
        let end = offset.saturating_add(file_bytes);
        if end > data.len() as u64 {
            return Err(truncated(name, &format!("segment {index}"), end, data));
        }
        segments.push(Segment {
            index,
            virt: ph.p_vaddr(endian).into(),
            phys: ph.p_paddr(endian).into(),
            mem_bytes,
            data: &data[offset as usize..end as usize],
            executable: ph.p_flags(endian).contains(elf::PF_X),
        });
    }
    if segments.is_empty() {
        return Err(BootError::NoSegments { name: name.into() });
    }
    let mut image = ElfImage {
        is_64,
        machine: header.e_machine(endian).0,
        entry: header.e_entry(endian).into(),
        segments,
        code: Vec::new(),
        symbols: SymbolTable::default(),
        orc_ips: Vec::new(),
    };
    if let Err(e) = read_sections::<H>(header, endian, data, &mut image) {
        log::warn!("{name}: section headers are unusable ({e}); symbols are not read");
    }
    if image.code.is_empty() {
        image.code = image
            .segments
            .iter()
            .filter(|s| s.executable && !s.data.is_empty())
            .map(|s| Code {
                virt: s.virt,
                phys: s.phys,
                bytes: s.data,
            })
            .collect();
    }
    Ok(image)
}

/// Reads what needs section headers. On an error `image` keeps what was read before it.
fn read_sections<'a, H: FileHeader<Endian = Endianness>>(
    header: &'a H,
    endian: Endianness,
    data: &'a [u8],
    image: &mut ElfImage<'a>,
) -> object::read::Result<()> {
    let sections = header.sections(endian, data)?;
    let mut code = Vec::new();
    for section in sections.iter() {
        if section.sh_type(endian) == elf::SHT_NOBITS {
            continue;
        }
        let virt: u64 = section.sh_addr(endian).into();
        if section
            .sh_flags(endian)
            .contains(elf::SHF_ALLOC | elf::SHF_EXECINSTR)
        {
            let bytes = section.data(endian, data)?;
            // Only what a segment really loads at that place is code the guest runs.
            let loaded = image.segments.iter().find_map(|s| {
                let offset = virt.checked_sub(s.virt)? as usize;
                let end = offset.checked_add(bytes.len())?;
                (s.data.get(offset..end)?.as_ptr() == bytes.as_ptr()).then(|| s.phys_of(virt))?
            });
            if let Some(phys) = loaded
                && !bytes.is_empty()
            {
                code.push(Code { virt, phys, bytes });
            }
        } else if sections.section_name(endian, section) == Ok(b".orc_unwind_ip") {
            image.orc_ips = orc_addresses(virt, section.data(endian, data)?);
        }
    }
    image.code = code;
    let symbols = sections.symbols(endian, data, elf::SHT_SYMTAB)?;
    let mut table = SymbolTable::default();
    for symbol in symbols.iter() {
        let kind = symbol.st_type();
        let value: u64 = symbol.st_value(endian).into();
        if (kind != elf::STT_FUNC && kind != elf::STT_NOTYPE)
            || !image
                .code
                .iter()
                .any(|c| value.wrapping_sub(c.virt) < c.bytes.len() as u64)
        {
            continue;
        }
        if let Ok(name) = symbols.symbol_name(endian, symbol)
            && !name.is_empty()
        {
            table.push(
                value,
                symbol.st_size(endian).into(),
                &String::from_utf8_lossy(name),
            );
        }
    }
    table.finish();
    image.symbols = table;
    Ok(())
}

/// The addresses an `.orc_unwind_ip` section at `virt` describes: each entry is the distance from
/// itself to an instruction, as a signed 32-bit number.
pub(crate) fn orc_addresses(virt: u64, data: &[u8]) -> Vec<u64> {
    let mut ips: Vec<u64> = data
        .chunks_exact(4)
        .enumerate()
        .map(|(i, b)| {
            let distance = i32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            virt.wrapping_add(4 * i as u64)
                .wrapping_add_signed(i64::from(distance))
        })
        .collect();
    ips.sort_unstable();
    ips.dedup();
    ips
}

pub(crate) fn malformed(name: &str, reason: String) -> BootError {
    BootError::Malformed {
        name: name.into(),
        reason,
    }
}

pub(crate) fn truncated(name: &str, part: &str, need_bytes: u64, data: &[u8]) -> BootError {
    BootError::Truncated {
        name: name.into(),
        part: part.into(),
        need_bytes,
        have_bytes: data.len() as u64,
    }
}
