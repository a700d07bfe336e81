//! ELF images: segments, sections, symbols and unwind anchors.
//!
//! The file is untrusted: every offset is checked by the `object` crate's readers or here, and a
//! damaged section or symbol table only costs the symbols, never the boot.

use object::Endianness;
use object::elf;
use object::read::elf::{FileHeader, ProgramHeader, SectionHeader, Sym};

use crate::error::{Damage, ImageError};
use crate::orc;
use crate::rdpmc::Text;
use crate::symbols::{KernelSymbols, SymbolsBuilder};

/// Program headers looked at; Linux has five.
const MAX_SEGMENTS: usize = 64;
/// Notes looked at in one segment of them; Linux has a dozen.
const MAX_NOTES: usize = 256;
/// Type of the note that has the 32-bit entry point of PVH, by the name "Xen" (Xen, public/elfnote.h).
const XEN_ELFNOTE_PHYS32_ENTRY: u32 = 18;

/// One PT_LOAD segment.
#[derive(Clone, Debug)]
pub struct Segment<'a> {
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

/// A parsed image.
#[derive(Debug)]
pub struct ElfImage<'a> {
    /// ELFCLASS64.
    pub is_64: bool,
    /// Machine, `EM_*`.
    pub machine: u16,
    /// Entry point as the header has it.
    pub entry: u64,
    /// Entry point of the PVH boot protocol, a guest-physical address, if a note names one.
    pub pvh_entry: Option<u32>,
    /// A note is by the name "Linux": every Linux kernel since 4.19 has one.
    pub is_linux: bool,
    /// PT_LOAD segments with bytes in memory.
    pub segments: Vec<Segment<'a>>,
    /// Executable bytes: the sections where the image has section headers, else the segments.
    pub code: Vec<Text<'a>>,
    /// What its symbol table names.
    pub symbols: KernelSymbols,
    /// Addresses of instruction boundaries from the kernel's ORC unwind table, sorted.
    pub orc_ips: Vec<u64>,
}

/// Whether `data` starts with the ELF magic.
pub fn is_elf(data: &[u8]) -> bool {
    data.starts_with(&elf::ELFMAG)
}

/// Parses a 32- or 64-bit little-endian image that is to be loaded.
///
/// # Errors
/// [`ImageError`], when a header or a segment is damaged. Damaged sections cost the symbols only.
pub fn parse<'a>(name: &str, data: &'a [u8]) -> Result<ElfImage<'a>, ImageError> {
    match data.get(4) {
        Some(1) => parse_class::<elf::FileHeader32<Endianness>>(name, data, false),
        Some(2) => parse_class::<elf::FileHeader64<Endianness>>(name, data, true),
        Some(class) => Err(ImageError::malformed(name, Damage::Class(*class))),
        None => Err(ImageError::truncated(name, "the ELF header", 52, data)),
    }
}

fn parse_class<'a, H: FileHeader<Endian = Endianness>>(
    name: &str,
    data: &'a [u8],
    is_64: bool,
) -> Result<ElfImage<'a>, ImageError> {
    let header_bytes = size_of::<H>() as u64;
    if (data.len() as u64) < header_bytes {
        return Err(ImageError::truncated(name, "the ELF header", header_bytes, data));
    }
    let header = H::parse(data).map_err(|e| unreadable(name, "ELF header", e))?;
    let endian = header.endian().map_err(|e| unreadable(name, "ELF header", e))?;
    if endian != Endianness::Little {
        return Err(ImageError::malformed(name, Damage::BigEndian));
    }
    let headers = program_headers(name, data, header, endian)?;
    let mut notes = Notes::default();
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
        Ok(tables) => use_tables(&mut image, tables),
        Err(e) => log::warn!("{name}: section headers are unusable ({e}); symbols are not read"),
    }
    if image.code.is_empty() {
        image.code = image
            .segments
            .iter()
            .filter(|s| s.executable && !s.data.is_empty())
            .map(|s| Text {
                virt: s.virt,
                phys: s.phys,
                bytes: s.data,
            })
            .collect();
    }
    Ok(image)
}

/// The table of program headers, whole and of a size that an image to be loaded can have.
fn program_headers<'a, H: FileHeader<Endian = Endianness>>(
    name: &str,
    data: &'a [u8],
    header: &H,
    endian: Endianness,
) -> Result<&'a [H::ProgramHeader], ImageError> {
    let phoff: u64 = header.e_phoff(endian).into();
    let phnum = u64::from(header.e_phnum(endian));
    let phend = phoff.saturating_add(phnum.saturating_mul(u64::from(header.e_phentsize(endian))));
    if phend > data.len() as u64 {
        return Err(ImageError::truncated(
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
        return Err(ImageError::malformed(
            name,
            Damage::Segments {
                count: headers.len(),
                most: MAX_SEGMENTS,
            },
        ));
    }
    Ok(headers)
}

/// The PT_LOAD segments with bytes in memory; at least one.
#[expect(clippy::cast_possible_truncation, reason = "x86-64 only: usize has 64 bits")]
fn loaded_segments<'a, P: ProgramHeader<Endian = Endianness>>(
    name: &str,
    data: &'a [u8],
    headers: &[P],
    endian: Endianness,
) -> Result<Vec<Segment<'a>>, ImageError> {
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
            return Err(ImageError::malformed(
                name,
                Damage::SegmentSize {
                    index,
                    file_bytes,
                    mem_bytes,
                },
            ));
        }
        let end = offset.saturating_add(file_bytes);
        if end > data.len() as u64 {
            return Err(ImageError::truncated(
                name,
                &format!("segment {index}"),
                end,
                data,
            ));
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
        return Err(ImageError::NoSegments { name: name.into() });
    }
    Ok(segments)
}

/// What the notes of an image say. Those that are damaged say nothing.
#[derive(Debug, Default)]
struct Notes {
    pvh_entry: Option<u32>,
    is_linux: bool,
}

impl Notes {
    fn read<P: ProgramHeader<Endian = Endianness>>(&mut self, header: &P, endian: Endianness, data: &[u8]) {
        let Ok(Some(mut notes)) = header.notes(endian, data) else {
            return;
        };
        for _ in 0..MAX_NOTES {
            let Ok(Some(note)) = notes.next() else { return };
            match note.name() {
                b"Linux" => self.is_linux = true,
                b"Xen" if note.n_type(endian).0 == XEN_ELFNOTE_PHYS32_ENTRY => {
                    // Four bytes, or eight of which the upper are zero.
                    let low = note.desc().first_chunk();
                    self.pvh_entry = self.pvh_entry.or(low.map(|bytes| u32::from_le_bytes(*bytes)));
                }
                _ => {}
            }
        }
    }
}

/// A section with bytes in the file.
#[derive(Clone, Copy, Debug)]
pub struct Section<'a> {
    /// Its name; empty when it is no text.
    pub name: &'a str,
    /// Link-time address.
    pub virt: u64,
    /// Its bytes.
    pub data: &'a [u8],
    /// The guest executes it.
    pub executable: bool,
}

/// What section headers lead to. A section or a symbol table that is damaged is left out.
#[derive(Debug, Default)]
pub struct Tables<'a> {
    /// Machine, `EM_*`.
    pub machine: u16,
    /// The sections that have bytes in the file.
    pub sections: Vec<Section<'a>>,
    /// What the symbol table names: functions and labels in code as text, all else as data.
    pub symbols: KernelSymbols,
}

impl<'a> Tables<'a> {
    /// The section of that name.
    pub fn section(&self, name: &str) -> Option<&Section<'a>> {
        self.sections.iter().find(|section| section.name == name)
    }
}

/// Reads sections and symbols only, of a file that need not have anything to load.
///
/// # Errors
/// [`ImageError::Malformed`] when it is no ELF file or has no usable section headers.
pub fn tables<'a>(name: &str, data: &'a [u8]) -> Result<Tables<'a>, ImageError> {
    let read = match data.get(4) {
        Some(1) if is_elf(data) => tables_of_class::<elf::FileHeader32<Endianness>>(data),
        Some(2) if is_elf(data) => tables_of_class::<elf::FileHeader64<Endianness>>(data),
        _ => return Err(ImageError::malformed(name, Damage::NoElf)),
    };
    read.map_err(|e| unreadable(name, "section headers", e))
}

fn unreadable(name: &str, part: &'static str, source: object::read::Error) -> ImageError {
    ImageError::malformed(name, Damage::Headers { part, source })
}

fn tables_of_class<H: FileHeader<Endian = Endianness>>(data: &[u8]) -> object::read::Result<Tables<'_>> {
    let header = H::parse(data)?;
    read_tables(header, header.endian()?, data)
}

fn read_tables<'a, H: FileHeader<Endian = Endianness>>(
    header: &'a H,
    endian: Endianness,
    data: &'a [u8],
) -> object::read::Result<Tables<'a>> {
    let sections = header.sections(endian, data)?;
    // By index, as symbols refer to them.
    let executable: Vec<bool> = sections
        .iter()
        .map(|section| {
            section
                .sh_flags(endian)
                .contains(elf::SHF_ALLOC | elf::SHF_EXECINSTR)
        })
        .collect();
    let mut tables = Tables {
        machine: header.e_machine(endian).0,
        ..Tables::default()
    };
    for (section, &executable) in sections.iter().zip(&executable) {
        if section.sh_type(endian) == elf::SHT_NOBITS {
            continue;
        }
        let Ok(bytes) = section.data(endian, data) else {
            continue;
        };
        let name = sections.section_name(endian, section).unwrap_or_default();
        tables.sections.push(Section {
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
        // The letters of nm(1).
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

/// Takes over what section headers say of an image that is loaded.
fn use_tables<'a>(image: &mut ElfImage<'a>, tables: Tables<'a>) {
    for section in tables
        .sections
        .iter()
        .filter(|s| s.executable && !s.data.is_empty())
    {
        // Only what a segment really loads at that place is code the guest runs.
        let loaded = image.segments.iter().find_map(|s| {
            let offset = usize::try_from(section.virt.checked_sub(s.virt)?).ok()?;
            let end = offset.checked_add(section.data.len())?;
            (s.data.get(offset..end)?.as_ptr() == section.data.as_ptr()).then(|| s.phys_of(section.virt))?
        });
        if let Some(phys) = loaded {
            image.code.push(Text {
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
