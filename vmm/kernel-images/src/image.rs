//! Unwind tables, symbols and type information of a vmlinux ([`KernelImage`]).
//!
//! The image is the ELF file from which the guest was booted (for a bzImage, its unpacked payload).
//! The operator provides the file, but its contents are treated as untrusted.

use crate::btf::Btf;
use crate::build_id::BuildId;
use crate::elf::{self, ParsedElf};
use crate::error::{ImageCorruption, KernelImageError};
use crate::kallsyms::{self, KallsymsError};
use crate::orc::OrcTable;
use crate::symbols::KernelSymbols;

/// Unwind tables, symbols, type information and version of one kernel image. Addresses are
/// link-time addresses, or run-time addresses if the image was read from memory.
#[derive(Debug)]
pub struct KernelImage {
    orc: Option<OrcTable>,
    btf: Option<Btf>,
    symbols: Option<KernelSymbols>,
    banner: Option<String>,
    build_id: Option<BuildId>,
    text: std::ops::Range<u64>,
    entry_text: std::ops::Range<u64>,
    notes: Vec<String>,
}

impl KernelImage {
    /// Parses an ELF vmlinux. `name` identifies the file in errors. Missing or damaged tables are
    /// omitted and recorded in [`Self::notes`], because the other tables are still useful. For
    /// example, stacks of a kernel without BTF can be unwound.
    ///
    /// # Errors
    /// Returns a [`KernelImageError`] if the file is not an ELF file or is for another processor.
    pub fn parse(name: &str, bytes: &[u8]) -> Result<Self, KernelImageError> {
        const EM_X86_64: u16 = 62;
        let tables = elf::tables(name, bytes)?;
        if tables.machine != EM_X86_64 {
            return Err(KernelImageError::malformed(name, ImageCorruption::Machine));
        }
        let mut notes = Vec::new();
        let section = |name: &str| tables.section(name).map(|s| (s.virt, s.data));
        let orc = match (section(".orc_unwind_ip"), section(".orc_unwind")) {
            (Some((at, ips)), Some((_, entries))) => match OrcTable::parse(ips, at, entries) {
                Ok(table) => Some(table),
                Err(e) => {
                    notes.push(format!("no kernel unwinding by ORC: {e}"));
                    None
                }
            },
            _ => {
                notes.push("no ORC tables in the image: kernel stacks are walked by frame pointers".into());
                None
            }
        };
        let btf = match section(".BTF").map(|(_, data)| Btf::parse(data)) {
            Some(Ok(btf)) => Some(btf),
            Some(Err(e)) => {
                notes.push(format!("tasks are not named: {e}"));
                None
            }
            None => {
                notes.push("tasks are not named: the image has no BTF".into());
                None
            }
        };
        let text = section(".text").map_or(0..0, |(at, data)| at..at.saturating_add(data.len() as u64));
        let mut symbols = (!tables.symbols.is_empty()).then(|| tables.symbols.clone());
        if symbols.is_none() {
            // A stripped image, such as the payload of a bzImage, still contains the kallsyms
            // table.
            let rodata = section(".rodata").map(|(_, data)| data).into_iter();
            let init = section(".init.data").map(|(_, data)| data).into_iter();
            symbols = rodata.chain(init).find_map(|data| kallsyms::find(data).ok());
        }
        if symbols.is_none() {
            notes.push("kernel symbols: neither a symbol table nor kallsyms in the image".into());
        }
        // Several strings in the image resemble the kernel banner. The symbol `linux_banner`
        // identifies the actual one.
        let symbol = symbols.as_ref().and_then(|s| s.by_name("linux_banner"));
        let banner = match symbol {
            Some(symbol) => data_at(&tables, symbol.address).and_then(find_banner),
            None => section(".rodata").and_then(|(_, data)| find_banner(data)),
        };
        Ok(Self {
            orc,
            btf,
            entry_text: symbols.as_ref().map_or(0..0, entry_text),
            symbols,
            banner,
            build_id: section(".notes").and_then(|(_, notes)| BuildId::in_notes(notes)),
            text,
            notes,
        })
    }

    /// Reads the tables of a running kernel from its memory. `bytes` is a copy of the kernel's
    /// memory from the address `start`, with zeros for unmapped parts. All addresses in the result
    /// are run-time addresses, so callers must use a slide of 0.
    #[expect(clippy::cast_possible_truncation, reason = "x86-64 only: usize has 64 bits")]
    pub fn from_memory(start: u64, bytes: &[u8]) -> Result<Self, KallsymsError> {
        let symbols = kallsyms::find(bytes)?;
        let mut notes = Vec::new();
        let span = |from: &str, to: &str| {
            let from = symbols.by_name(from)?.address;
            let to = symbols.by_name(to)?.address;
            let range = usize::try_from(from.checked_sub(start)?).ok()?
                ..usize::try_from(to.checked_sub(start)?).ok()?;
            Some((from, bytes.get(range)?))
        };
        let orc = span("__start_orc_unwind_ip", "__stop_orc_unwind_ip")
            .zip(span("__start_orc_unwind", "__stop_orc_unwind"))
            .and_then(|((at, ips), (_, entries))| OrcTable::parse(ips, at, entries).ok());
        if orc.is_none() {
            notes
                .push("no ORC tables in the kernel's memory: its stacks are walked by frame pointers".into());
        }
        let btf = span("__start_BTF", "__stop_BTF").and_then(|(_, data)| Btf::parse(data).ok());
        if btf.is_none() {
            notes.push("tasks are not named: no BTF in the kernel's memory".into());
        }
        let text = match (symbols.by_name("_stext"), symbols.by_name("_etext")) {
            (Some(from), Some(to)) => from.address..to.address,
            _ => 0..0,
        };
        let banner = match symbols
            .by_name("linux_banner")
            .and_then(|s| s.address.checked_sub(start))
        {
            Some(at) => bytes.get(at as usize..).and_then(find_banner),
            None => find_banner(bytes),
        };
        let build_id = span("__start_notes", "__stop_notes").and_then(|(_, notes)| BuildId::in_notes(notes));
        Ok(Self {
            orc,
            btf,
            entry_text: entry_text(&symbols),
            symbols: Some(symbols),
            banner,
            build_id,
            text,
            notes,
        })
    }

    /// Returns the ORC unwind tables, if the kernel has them.
    pub fn orc(&self) -> Option<&OrcTable> {
        self.orc.as_ref()
    }

    /// Returns the BTF type information, if the image has it.
    pub fn btf(&self) -> Option<&Btf> {
        self.btf.as_ref()
    }

    /// Returns the symbols from the image's symbol table or from its kallsyms tables.
    pub fn symbols(&self) -> Option<&KernelSymbols> {
        self.symbols.as_ref()
    }

    /// Returns the kernel banner "Linux version …", the first line of the kernel log.
    pub fn banner(&self) -> Option<&str> {
        self.banner.as_deref()
    }

    /// Returns the kernel release, for example `6.1.0-56-cloud-amd64`.
    pub fn release(&self) -> Option<&str> {
        self.banner()?.split(' ').nth(2)
    }

    /// Returns the build ID of the kernel, if its notes contain one.
    pub fn build_id(&self) -> Option<BuildId> {
        self.build_id
    }

    /// Returns the address range of the kernel's `.text` section.
    pub fn text(&self) -> std::ops::Range<u64> {
        self.text.clone()
    }

    /// Returns the address range of the kernel's entry and exit assembly, or an empty range if the
    /// symbols do not define it.
    pub fn entry_text(&self) -> std::ops::Range<u64> {
        self.entry_text.clone()
    }

    /// Returns one message for each table that the image lacks, to be shown to the operator.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }
}

fn entry_text(symbols: &KernelSymbols) -> std::ops::Range<u64> {
    match (
        symbols.by_name("__entry_text_start"),
        symbols.by_name("__entry_text_end"),
    ) {
        (Some(from), Some(to)) => from.address..to.address,
        _ => 0..0,
    }
}

/// Maximum length of the kernel banner, in bytes.
const BANNER_MAX: usize = 512;

/// Returns the rest of the section at the virtual address `address`, from this address on.
#[expect(clippy::cast_possible_truncation, reason = "x86-64 only: usize has 64 bits")]
fn data_at<'a>(tables: &ParsedElf<'a>, address: u64) -> Option<&'a [u8]> {
    tables.sections.iter().find_map(|s| {
        let offset = address.checked_sub(s.virt)?;
        (offset < s.data.len() as u64).then(|| &s.data[offset as usize..])
    })
}

/// Finds the kernel banner, the first line of the kernel log, in `data`.
pub fn find_banner(data: &[u8]) -> Option<String> {
    // The format string for /proc/version starts with the same words, followed by "%s".
    memchr::memmem::find_iter(data, b"Linux version ").find_map(|at| {
        let rest = &data[at..data.len().min(at + BANNER_MAX)];
        let end = rest.iter().position(|&b| b == b'\n' || b == 0)?;
        let line = std::str::from_utf8(&rest[..end]).ok()?;
        (line.as_bytes().get(14).is_some_and(u8::is_ascii_digit)).then(|| line.to_owned())
    })
}
