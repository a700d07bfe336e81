//! Parser for ELF images: segments, sections, symbols, and the instruction addresses in the unwind
//! table.
//!
//! The file is untrusted. Every offset is checked, either by the `object` crate or here. A damaged
//! section or symbol table only makes the symbols unavailable and does not prevent booting.

use object::Endianness;
use object::elf;
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader, Sym};

use crate::error::{ImageCorruption, KernelImageError};
use crate::orc;
use crate::symbols::{KernelSymbols, SymbolsBuilder};

/// Maximum number of program headers of an image. Linux has five.
const MAX_SEGMENTS: usize = 64;
/// Maximum number of notes per PT_NOTE segment. Linux has about a dozen.
const MAX_NOTES: usize = 256;
/// Type of the "Xen" note that contains the 32-bit PVH entry point (Xen, public/elfnote.h).
const XEN_ELFNOTE_PHYS32_ENTRY: u32 = 18;

/// Executable code of an image, with its addresses.
#[derive(Clone, Copy, Debug)]
pub struct CodeBytes<'a> {
    /// Link-time address of the first byte of the code.
    pub virt: u64,
    /// Guest-physical address of the first byte of the code.
    pub phys: u64,
    /// Machine code bytes.
    pub bytes: &'a [u8],
}

/// Loadable segment (PT_LOAD) of an image.
#[derive(Clone, Debug)]
pub struct LoadSegment<'a> {
    /// Index of the segment's program header.
    pub index: usize,
    /// Link-time (virtual) address of the segment.
    pub virt: u64,
    /// Guest-physical address of the segment.
    pub phys: u64,
    /// Size of the segment in memory, in bytes.
    pub mem_bytes: u64,
    /// Contents of the segment in the file, which may be shorter than the segment in memory.
    pub data: &'a [u8],
    /// `true` if the segment is executable (PF_X).
    pub executable: bool,
}

impl LoadSegment<'_> {
    /// Returns the guest-physical address of the link-time address `virt`. Returns `None` if the
    /// address is not in the part of the segment that the file contains.
    fn phys_of(&self, virt: u64) -> Option<u64> {
        let offset = virt.checked_sub(self.virt)?;
        (offset < self.data.len() as u64).then(|| self.phys.wrapping_add(offset))
    }
}

/// ELF image of a kernel, parsed.
#[derive(Debug)]
pub struct ElfImage<'a> {
    /// `true` for 64-bit images (ELFCLASS64).
    pub is_64: bool,
    /// ELF machine number (`EM_*`) of the image.
    pub machine: u16,
    /// Address of the entry point, from the ELF header.
    pub entry: u64,
    /// Guest-physical address of the PVH entry point, if an ELF note specifies one.
    pub pvh_entry: Option<u32>,
    /// `true` if the image has a note named "Linux", as every Linux kernel has since 4.19.
    pub is_linux: bool,
    /// Loadable segments (PT_LOAD) with a nonzero size in memory.
    pub segments: Vec<LoadSegment<'a>>,
    /// Executable code of the image. Consists of the executable sections if the image has section
    /// headers, and of the executable segments otherwise.
    pub code: Vec<CodeBytes<'a>>,
    /// Symbols from the symbol table of the image.
    pub symbols: KernelSymbols,
    /// Sorted link-time addresses of instruction boundaries, from the kernel's ORC unwind table.
    pub orc_ips: Vec<u64>,
}

/// Returns whether `data` starts with the ELF magic number.
pub fn is_elf(data: &[u8]) -> bool {
    data.starts_with(&elf::ELFMAG)
}

/// Parses a 32- or 64-bit little-endian loadable image.
///
/// # Errors
/// Returns a [`KernelImageError`] if a header or a segment is damaged. Damaged sections only make
/// the symbols unavailable.
pub fn parse<'a>(name: &str, data: &'a [u8]) -> Result<ElfImage<'a>, KernelImageError> {
    match data.get(4) {
        Some(1) => parse_class::<elf::FileHeader32<Endianness>>(name, data, false),
        Some(2) => parse_class::<elf::FileHeader64<Endianness>>(name, data, true),
        Some(class) => Err(KernelImageError::malformed(name, ImageCorruption::Class(*class))),
        None => Err(KernelImageError::truncated(name, "the ELF header", 52, data)),
    }
}

fn parse_class<'a, H: FileHeader<Endian = Endianness>>(
    name: &str,
    data: &'a [u8],
    is_64: bool,
) -> Result<ElfImage<'a>, KernelImageError> {
    let header_bytes = size_of::<H>() as u64;
    if (data.len() as u64) < header_bytes {
        return Err(KernelImageError::truncated(
            name,
            "the ELF header",
            header_bytes,
            data,
        ));
    }
    let header = H::parse(data).map_err(|e| unreadable(name, "ELF header", e))?;
    let endian = header.endian().map_err(|e| unreadable(name, "ELF header", e))?;
    if endian != Endianness::Little {
        return Err(KernelImageError::malformed(name, ImageCorruption::BigEndian));
    }
    let headers = program_headers(name, data, header, endian)?;
    if headers.iter().any(|ph| ph.p_type(endian) == elf::PT_INTERP) {
        return Err(KernelImageError::NotAKernel {
            name: name.to_owned(),
            found: "it is a program that an operating system loads",
        });
    }
    let mut notes = ElfNotes::default();
    for ph in headers {
        notes.read(ph, endian, data);
    }
    let segments = loaded_segments(name, data, headers, endian)?;
    let mut image = ElfImage {
        is_64,
        machine: header.e_machine(endian).0,
        entry: header.e_entry(endian).into(),
        pvh_entry: notes.pvh_entry,
        is_linux: notes.is_linux,
        segments,
        code: Vec::new(),
        symbols: KernelSymbols::default(),
        orc_ips: Vec::new(),
    };
    match read_tables(header, endian, data) {
        Ok(tables) => add_tables(&mut image, tables),
        Err(e) => log::warn!("{name}: section headers are unusable ({e}); symbols are not read"),
    }
    if image.code.is_empty() {
        image.code = image
            .segments
            .iter()
            .filter(|s| s.executable && !s.data.is_empty())
            .map(|s| CodeBytes {
                virt: s.virt,
                phys: s.phys,
                bytes: s.data,
            })
            .collect();
    }
    Ok(image)
}

/// Returns the program headers of an image. Fails if their table is truncated or has an implausible
/// size.
fn program_headers<'a, H: FileHeader<Endian = Endianness>>(
    name: &str,
    data: &'a [u8],
    header: &H,
    endian: Endianness,
) -> Result<&'a [H::ProgramHeader], KernelImageError> {
    let phoff: u64 = header.e_phoff(endian).into();
    let phnum = u64::from(header.e_phnum(endian));
    let phend = phoff.saturating_add(phnum.saturating_mul(u64::from(header.e_phentsize(endian))));
    if phend > data.len() as u64 {
        return Err(KernelImageError::truncated(
            name,
            "the program header table",
            phend,
            data,
        ));
    }
    let headers = header
        .program_headers(endian, data)
        .map_err(|e| unreadable(name, "program header table", e))?;
    if headers.len() > MAX_SEGMENTS {
        return Err(KernelImageError::malformed(
            name,
            ImageCorruption::Segments {
                count: headers.len(),
                most: MAX_SEGMENTS,
            },
        ));
    }
    Ok(headers)
}

/// Returns the PT_LOAD segments with a nonzero size in memory. Fails if there are none.
#[expect(clippy::cast_possible_truncation, reason = "x86-64 only: usize has 64 bits")]
fn loaded_segments<'a, P: ProgramHeader<Endian = Endianness>>(
    name: &str,
    data: &'a [u8],
    headers: &[P],
    endian: Endianness,
) -> Result<Vec<LoadSegment<'a>>, KernelImageError> {
    let mut segments = Vec::new();
    for (index, ph) in headers.iter().enumerate() {
        if ph.p_type(endian) != elf::PT_LOAD {
            continue;
        }
        let mem_bytes: u64 = ph.p_memsz(endian).into();
        let (offset, file_bytes) = ph.file_range(endian);
        if mem_bytes == 0 {
            continue;
        }
        if file_bytes > mem_bytes {
            return Err(KernelImageError::malformed(
                name,
                ImageCorruption::SegmentSize {
                    index,
                    file_bytes,
                    mem_bytes,
                },
            ));
        }
        let end = offset.saturating_add(file_bytes);
        if end > data.len() as u64 {
            return Err(KernelImageError::truncated(
                name,
                &format!("segment {index}"),
                end,
                data,
            ));
        }
        segments.push(LoadSegment {
            index,
            virt: ph.p_vaddr(endian).into(),
            phys: ph.p_paddr(endian).into(),
            mem_bytes,
            data: &data[offset as usize..end as usize],
            executable: ph.p_flags(endian).contains(elf::PF_X),
        });
    }
    if segments.is_empty() {
        return Err(KernelImageError::NoSegments { name: name.into() });
    }
    Ok(segments)
}

/// PVH entry point and Linux marker from the ELF notes of an image. Damaged notes are ignored.
#[derive(Debug, Default)]
struct ElfNotes {
    pvh_entry: Option<u32>,
    is_linux: bool,
}

impl ElfNotes {
    fn read<P: ProgramHeader<Endian = Endianness>>(&mut self, header: &P, endian: Endianness, data: &[u8]) {
        let Ok(Some(mut notes)) = header.notes(endian, data) else {
            return;
        };
        for _ in 0..MAX_NOTES {
            let Ok(Some(note)) = notes.next() else { return };
            match note.name() {
                b"Linux" => self.is_linux = true,
                b"Xen" if note.n_type(endian).0 == XEN_ELFNOTE_PHYS32_ENTRY => {
                    // The entry point has four bytes, or eight bytes of which the upper four are
                    // zero.
                    let low = note.desc().first_chunk();
                    self.pvh_entry = self.pvh_entry.or(low.map(|bytes| u32::from_le_bytes(*bytes)));
                }
                _ => {}
            }
        }
    }
}

/// An ELF section with contents in the file.
#[derive(Clone, Copy, Debug)]
pub struct ElfSection<'a> {
    /// Name of the section; empty if the name is not UTF-8.
    pub name: &'a str,
    /// Link-time address of the section.
    pub virt: u64,
    /// Contents of the section in the file.
    pub data: &'a [u8],
    /// `true` if the section contains executable code.
    pub executable: bool,
}

/// Sections and symbols of an ELF file. Damaged sections and symbol tables are omitted.
#[derive(Debug, Default)]
pub struct ParsedElf<'a> {
    /// ELF machine number (`EM_*`) of the file.
    pub machine: u16,
    /// Sections that have contents in the file.
    pub sections: Vec<ElfSection<'a>>,
    /// Symbols of the symbol table. Functions and labels in code have type text, all other symbols
    /// have type data.
    pub symbols: KernelSymbols,
}

impl<'a> ParsedElf<'a> {
    /// Returns the section `name`, or `None` if the file has no such section.
    pub fn section(&self, name: &str) -> Option<&ElfSection<'a>> {
        self.sections.iter().find(|section| section.name == name)
    }
}

/// Reads only the sections and symbols of a file, which need not be loadable.
///
/// # Errors
/// Returns [`KernelImageError::Malformed`] if the file is not an ELF file or has no usable section
/// headers.
pub fn tables<'a>(name: &str, data: &'a [u8]) -> Result<ParsedElf<'a>, KernelImageError> {
    let read = match data.get(4) {
        Some(1) if is_elf(data) => tables_of_class::<elf::FileHeader32<Endianness>>(data),
        Some(2) if is_elf(data) => tables_of_class::<elf::FileHeader64<Endianness>>(data),
        _ => return Err(KernelImageError::malformed(name, ImageCorruption::NoElf)),
    };
    read.map_err(|e| unreadable(name, "section headers", e))
}

fn unreadable(name: &str, part: &'static str, source: object::read::Error) -> KernelImageError {
    KernelImageError::malformed(name, ImageCorruption::Headers { part, source })
}

fn tables_of_class<H: FileHeader<Endian = Endianness>>(data: &[u8]) -> object::read::Result<ParsedElf<'_>> {
    let header = H::parse(data)?;
    read_tables(header, header.endian()?, data)
}

fn read_tables<'a, H: FileHeader<Endian = Endianness>>(
    header: &'a H,
    endian: Endianness,
    data: &'a [u8],
) -> object::read::Result<ParsedElf<'a>> {
    let sections = header.sections(endian, data)?;
    // Whether each section is executable, indexed by the section number that symbols refer to.
    let executable: Vec<bool> = sections
        .iter()
        .map(|section| {
            section
                .sh_flags(endian)
                .contains(elf::SHF_ALLOC | elf::SHF_EXECINSTR)
        })
        .collect();
    let mut tables = ParsedElf {
        machine: header.e_machine(endian).0,
        ..ParsedElf::default()
    };
    for (section, &executable) in sections.iter().zip(&executable) {
        if section.sh_type(endian) == elf::SHT_NOBITS {
            continue;
        }
        let Ok(bytes) = section.data(endian, data) else {
            continue;
        };
        let name = sections.section_name(endian, section).unwrap_or_default();
        tables.sections.push(ElfSection {
            name: std::str::from_utf8(name).unwrap_or_default(),
            virt: section.sh_addr(endian).into(),
            data: bytes,
            executable,
        });
    }
    let Ok(symbols) = sections.symbols(endian, data, elf::SHT_SYMTAB) else {
        return Ok(tables);
    };
    let mut builder = SymbolsBuilder::default();
    for symbol in symbols.iter() {
        let (kind, section) = (symbol.st_type(), symbol.st_shndx(endian));
        if section == elf::SHN_UNDEF || matches!(kind, elf::STT_SECTION | elf::STT_FILE) {
            continue;
        }
        let in_code = executable.get(usize::from(section.0)).copied().unwrap_or(false);
        // Symbol types are stored as the letters that nm(1) prints.
        let letter = match kind {
            elf::STT_FUNC => b't',
            elf::STT_NOTYPE if in_code => b't',
            _ => b'd',
        };
        let letter = match symbol.st_bind() {
            elf::STB_LOCAL => letter,
            _ => letter.to_ascii_uppercase(),
        };
        if let Ok(name) = symbols.symbol_name(endian, symbol) {
            let size = u32::try_from(symbol.st_size(endian).into()).unwrap_or(0);
            builder.add_sized(symbol.st_value(endian).into(), size, letter, name);
        }
    }
    tables.symbols = builder.finish().unwrap_or_default();
    Ok(tables)
}

/// Adds sections and symbols to an image whose program headers have already been parsed.
fn add_tables<'a>(image: &mut ElfImage<'a>, tables: ParsedElf<'a>) {
    for section in tables
        .sections
        .iter()
        .filter(|s| s.executable && !s.data.is_empty())
    {
        // A section counts as code only if a segment loads it at this address.
        let loaded = image.segments.iter().find_map(|s| {
            let offset = usize::try_from(section.virt.checked_sub(s.virt)?).ok()?;
            let end = offset.checked_add(section.data.len())?;
            (s.data.get(offset..end)?.as_ptr() == section.data.as_ptr()).then(|| s.phys_of(section.virt))?
        });
        if let Some(phys) = loaded {
            image.code.push(CodeBytes {
                virt: section.virt,
                phys,
                bytes: section.data,
            });
        }
    }
    if let Some(ips) = tables.section(".orc_unwind_ip") {
        image.orc_ips = orc::addresses(ips.virt, ips.data);
    }
    image.symbols = tables.symbols;
}
