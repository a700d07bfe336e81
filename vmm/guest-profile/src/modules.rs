//! Reads programs and libraries from the memory of a process: their exported symbols and unwind
//! tables.
//!
//! No file is needed. The program headers of a loaded 64-bit ELF file contain the addresses of its
//! dynamic section and of `.eh_frame_hdr`, which refer to the other tables (System V ABI, "Dynamic
//! Section"; Linux Standard Base, ".eh_frame_hdr"). Only exported functions have names. For static
//! functions of a stripped file, only the start address is known, from the index of the unwind
//! tables.
//!
//! A hostile guest controls all bytes. The size of each table is bounded, address computations are
//! checked, and inconsistent entries are skipped.

use crate::debug_frame::DebugFrames;
use crate::demangle::{self, readable};
use kernel_images::le::{u16_at, u32_at, u64_at};

/// Callback that reads process memory. The parameters are an address and a number of bytes. Returns
/// the bytes, with zeros for unmapped parts, or `None` if nothing is mapped at the address.
pub type ReadProcessMemory<'r> = dyn FnMut(u64, u64) -> Option<Vec<u8>> + 'r;

/// Number of bytes at the start of a file that must contain the program headers.
const MAX_HEADERS: u64 = 4096;
const MAX_PROGRAM_HEADERS: usize = 64;
/// Maximum size of a dynamic section, in bytes, which is enough for a thousand entries.
const MAX_DYNAMIC: u64 = 16 << 10;
/// Maximum number of exported symbols of one file. libLLVM exports 40,000.
const MAX_SYMBOLS: u64 = 1 << 18;
/// Maximum size of all exported names of one file, in bytes.
const MAX_STRINGS: u64 = 16 << 20;
/// Maximum size of the unwind tables of one file, in bytes. Chromium's tables have 14 MiB.
const MAX_TABLES: u64 = 24 << 20;
/// Maximum size of the sorted index of the unwind tables, in bytes.
const MAX_INDEX: u64 = 8 << 20;
const PAGE: u64 = 4096;
const SYMBOL: u64 = 24;

/// A loadable segment of an ELF file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ModuleSegment {
    offset: u64,
    address: u64,
    file_len: u64,
}

/// Link-time addresses of an ELF file's segments and tables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ModuleLayout {
    loads: Vec<ModuleSegment>,
    /// Link-time address and length of the dynamic section.
    dynamic: Option<(u64, u64)>,
    eh_frame_hdr: Option<(u64, u64)>,
    /// Link-time address of the page to which the first byte of the file is mapped.
    first: u64,
}

impl ModuleLayout {
    /// Parses the ELF header and the program headers, which `beginning` contains. Returns `None` if
    /// the file is not a 64-bit ELF file for x86-64.
    pub fn parse(beginning: &[u8]) -> Option<Self> {
        const ELF_OF_64_BITS: &[u8] = b"\x7fELF\x02\x01";
        const X86_64: u16 = 62;
        const PROGRAM_HEADER: usize = 56;
        const PT_LOAD: u32 = 1;
        const PT_DYNAMIC: u32 = 2;
        const PT_GNU_EH_FRAME: u32 = 0x6474_e550;
        if !beginning.starts_with(ELF_OF_64_BITS)
            || u16_at(beginning, 18) != Some(X86_64)
            || u16_at(beginning, 54).map(usize::from) != Some(PROGRAM_HEADER)
        {
            return None;
        }
        let at = usize::try_from(u64_at(beginning, 32)?).ok()?;
        let count = usize::from(u16_at(beginning, 56)?).min(MAX_PROGRAM_HEADERS);
        let mut layout = Self::default();
        for n in 0..count {
            let header = beginning.get(at.checked_add(n * PROGRAM_HEADER)?..)?;
            let (kind, offset, address) = (u32_at(header, 0)?, u64_at(header, 8)?, u64_at(header, 16)?);
            let (file_len, len) = (u64_at(header, 32)?, u64_at(header, 40)?);
            match kind {
                PT_LOAD => layout.loads.push(ModuleSegment {
                    offset,
                    address,
                    file_len,
                }),
                PT_DYNAMIC => layout.dynamic = Some((address, len)),
                PT_GNU_EH_FRAME => layout.eh_frame_hdr = Some((address, len)),
                _ => {}
            }
        }
        let first = layout.loads.iter().min_by_key(|load| load.offset)?;
        layout.first = first.address.checked_sub(first.offset)? & !(PAGE - 1);
        Some(layout)
    }

    /// Returns the load bias (run-time address minus link-time address, wrapping) of a file whose
    /// first byte is mapped at `base`.
    pub fn bias(&self, base: u64) -> u64 {
        base.wrapping_sub(self.first)
    }

    /// Returns the link-time address at which the file contents of a segment end. `address` is a
    /// link-time address in this segment.
    fn end_of_segment(&self, address: u64) -> Option<u64> {
        let load = self.loads.iter().find(|load| {
            address
                .checked_sub(load.address)
                .is_some_and(|off| off < load.file_len)
        })?;
        load.address.checked_add(load.file_len)
    }

    /// Returns the `len` bytes that are loaded at the link-time address `address`, from the
    /// contents `bytes` of the file. Bytes that the file does not contain are zeros.
    fn in_file(&self, bytes: &[u8], address: u64, len: u64) -> Option<Vec<u8>> {
        let loaded = self.loads.iter().find_map(|load| {
            let at = address
                .checked_sub(load.address)
                .filter(|at| *at < load.file_len)?;
            Some((load.offset.checked_add(at)?, load.file_len - at))
        });
        // The first page may be outside all segments, although it contains the headers.
        let (offset, most) = loaded.or((address == self.first).then_some((0, MAX_HEADERS)))?;
        let from = bytes.get(usize::try_from(offset).ok()?..)?;
        // A table may extend into the next segment. The caller and the file size bound its size.
        let wanted = usize::try_from(len)
            .ok()
            .filter(|_| len <= bytes.len() as u64 + MAX_HEADERS)?;
        let there = from.len().min(wanted).min(usize::try_from(most).ok()?);
        let mut found = from[..there].to_vec();
        found.resize(wanted, 0);
        Some(found)
    }

    /// Converts a pointer in the dynamic section to a link-time address. The dynamic linkers of
    /// some C libraries add the load bias to these pointers in memory, which this function undoes.
    fn linked(&self, pointer: u64, bias: u64) -> Option<u64> {
        [pointer, pointer.wrapping_sub(bias)]
            .into_iter()
            .find(|&address| self.end_of_segment(address).is_some())
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct ModuleFunction {
    start: u64,
    end: u64,
    name: String,
}

/// A function that a program or library exports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExportedFunction<'m> {
    /// Demangled function name without control characters.
    pub name: &'m str,
    /// Link-time address of the first byte of the function.
    pub start: u64,
    /// Link-time address of the first byte after the function.
    pub end: u64,
}

/// Contents of the sections `.eh_frame_hdr` and `.eh_frame`, with their link-time addresses.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnwindTables {
    /// Contents of `.eh_frame_hdr`, which is an index of `.eh_frame` sorted by address.
    pub index: Vec<u8>,
    /// Link-time address of `.eh_frame_hdr`.
    pub index_at: u64,
    /// Contents of `.eh_frame`.
    pub frames: Vec<u8>,
    /// Link-time address of `.eh_frame`.
    pub frames_at: u64,
}

/// A program or library with its symbols and unwind tables.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct LoadedModule {
    functions: Vec<ModuleFunction>,
    /// Link-time start addresses of the functions with unwind tables, sorted; empty if unknown.
    starts: Vec<u64>,
    tables: Option<UnwindTables>,
    debug_frames: Option<DebugFrames>,
    layout: ModuleLayout,
}

impl LoadedModule {
    /// Reads the exported symbols of the file mapped at `base` and, if `unwinds` is `true`, its
    /// unwind tables. Returns `None` if the file is not a 64-bit ELF file or its headers cannot be
    /// read.
    pub fn read(read: &mut ReadProcessMemory<'_>, base: u64, unwinds: bool) -> Option<Self> {
        let layout = ModuleLayout::parse(&read(base, MAX_HEADERS)?)?;
        let bias = layout.bias(base);
        let functions = functions(read, &layout, bias).unwrap_or_default();
        let index = index(read, &layout, bias);
        let starts = index
            .as_ref()
            .map_or_else(Vec::new, |(index, at)| function_starts(index, *at));
        let tables = index
            .filter(|_| unwinds)
            .and_then(|(index, at)| tables(read, &layout, bias, (index, at)));
        Some(Self {
            functions,
            starts,
            tables,
            debug_frames: None,
            layout,
        })
    }

    /// Reads a module from the contents of its file. Unlike process memory, the file also contains
    /// pages that no process has accessed, and `.debug_frame`, which is never loaded.
    pub fn of_file(bytes: &[u8], unwinds: bool) -> Option<Self> {
        let beginning = &bytes[..bytes.len().min(usize::try_from(MAX_HEADERS).ok()?)];
        let layout = ModuleLayout::parse(beginning)?;
        let base = layout.first;
        let mut read = |at: u64, len: u64| layout.in_file(bytes, at, len);
        let mut module = Self::read(&mut read, base, unwinds)?;
        if unwinds {
            module.debug_frames = DebugFrames::of_file(bytes);
        }
        Some(module)
    }

    /// Creates a module that has the unwind tables `tables` and no symbols.
    #[cfg(test)]
    pub(crate) fn of_tables(tables: UnwindTables) -> Self {
        Self {
            tables: Some(tables),
            ..Self::default()
        }
    }

    /// Creates a module that has the `.debug_frame` tables `frames` and no symbols.
    #[cfg(test)]
    pub(crate) fn of_debug_frames(frames: DebugFrames) -> Self {
        Self {
            debug_frames: Some(frames),
            ..Self::default()
        }
    }

    /// Returns the load bias of the module ([`ModuleLayout::bias`]).
    pub fn bias(&self, base: u64) -> u64 {
        self.layout.bias(base)
    }

    /// Returns the exported function that contains the link-time address `address`.
    pub fn function(&self, address: u64) -> Option<ExportedFunction<'_>> {
        let after = self.functions.partition_point(|f| f.start <= address);
        // If functions are nested, the innermost one is returned.
        let near = self.functions[..after].iter().rev().take(8);
        let function = near.into_iter().find(|f| address < f.end)?;
        Some(ExportedFunction {
            name: &function.name,
            start: function.start,
            end: function.end,
        })
    }

    /// Returns the link-time start and end (exclusive) of the function that contains the link-time
    /// address `address`, for a function without a name. The start addresses in the index of the
    /// unwind tables determine the bounds, so code without an unwind entry belongs to the preceding
    /// function.
    pub fn unnamed_function(&self, address: u64) -> Option<(u64, u64)> {
        let after = self.starts.partition_point(|start| *start <= address);
        let start = *self.starts.get(after.checked_sub(1)?)?;
        let segment_end = self.layout.end_of_segment(start)?;
        let next = self.starts.get(after).copied().unwrap_or(segment_end);
        let end = next.min(segment_end);
        (address < end).then_some((start, end))
    }

    /// Returns the number of exported functions.
    pub fn len(&self) -> usize {
        self.functions.len()
    }

    /// Returns `true` if the module exports no functions.
    pub fn is_empty(&self) -> bool {
        self.functions.is_empty()
    }

    /// Returns the module's unwind tables, or `None` if they were not read.
    pub fn tables(&self) -> Option<&UnwindTables> {
        self.tables.as_ref()
    }

    /// Returns the `.debug_frame` tables, which only the file contains.
    pub fn debug_frames(&self) -> Option<&DebugFrames> {
        self.debug_frames.as_ref()
    }

    /// Returns the approximate memory used by the module, in bytes.
    pub fn bytes(&self) -> usize {
        let names: usize = self
            .functions
            .iter()
            .map(|f| f.name.len() + size_of::<ModuleFunction>())
            .sum();
        let tables = self.tables.as_ref().map_or(0, |t| t.index.len() + t.frames.len());
        let starts = size_of_val(self.starts.as_slice());
        names + starts + tables + self.debug_frames.as_ref().map_or(0, DebugFrames::size)
    }
}

/// Addresses of the symbol, string and hash tables, from the dynamic section of a file.
#[derive(Default)]
struct Dynamic {
    symbols: Option<u64>,
    strings: Option<u64>,
    strings_len: u64,
    hash: Option<u64>,
    gnu_hash: Option<u64>,
}

impl Dynamic {
    fn parse(section: &[u8], layout: &ModuleLayout, bias: u64) -> Self {
        const DT_NULL: u64 = 0;
        const DT_HASH: u64 = 4;
        const DT_STRTAB: u64 = 5;
        const DT_SYMTAB: u64 = 6;
        const DT_STRSZ: u64 = 10;
        const DT_GNU_HASH: u64 = 0x6fff_fef5;
        let mut found = Self::default();
        let (entries, _) = section.as_chunks::<16>();
        for entry in entries {
            let (Some(tag), Some(value)) = (u64_at(entry, 0), u64_at(entry, 8)) else {
                break;
            };
            let address = layout.linked(value, bias);
            match tag {
                DT_NULL => break,
                DT_HASH => found.hash = address,
                DT_STRTAB => found.strings = address,
                DT_SYMTAB => found.symbols = address,
                DT_STRSZ => found.strings_len = value,
                DT_GNU_HASH => found.gnu_hash = address,
                _ => {}
            }
        }
        found
    }

    /// Returns the number of symbols, which the dynamic section does not contain. The number is
    /// derived from the System V or GNU hash table.
    fn count(&self, read: &mut ReadProcessMemory<'_>, bias: u64) -> Option<u64> {
        if let Some(at) = self.gnu_hash {
            return gnu_count(read, at.wrapping_add(bias));
        }
        // The header consists of nbucket and nchain. There is one chain entry per symbol.
        let head = read(self.hash?.wrapping_add(bias), 8)?;
        u32_at(&head, 4).map(u64::from)
    }
}

/// Returns the number of symbols according to the GNU hash table at the run-time address `at`. The
/// chain that starts at the highest symbol index ends with the last symbol.
fn gnu_count(read: &mut ReadProcessMemory<'_>, at: u64) -> Option<u64> {
    const HEAD: u64 = 16;
    const CHUNK: u64 = 4096;
    let head = read(at, HEAD)?;
    let (buckets, first, bloom) = (u32_at(&head, 0)?, u32_at(&head, 4)?, u32_at(&head, 8)?);
    if u64::from(buckets) > MAX_SYMBOLS || u64::from(bloom) > MAX_SYMBOLS {
        return None;
    }
    let buckets_at = at.checked_add(HEAD + 8 * u64::from(bloom))?;
    let table = read(buckets_at, 4 * u64::from(buckets))?;
    let (heads, _) = table.as_chunks::<4>();
    let highest = heads.iter().map(|&head| u32::from_le_bytes(head)).max()?;
    if highest < first {
        // The GNU hash table is empty, which means that the file exports no symbols.
        return Some(first.into());
    }
    let chains_at = buckets_at.checked_add(4 * u64::from(buckets))?;
    let mut symbol = u64::from(highest);
    while symbol < MAX_SYMBOLS {
        let chunk = read(chains_at.checked_add(4 * (symbol - u64::from(first)))?, CHUNK)?;
        let (hashes, _) = chunk.as_chunks::<4>();
        for hash in hashes {
            symbol += 1;
            if u32::from_le_bytes(*hash) & 1 == 1 {
                return Some(symbol);
            }
        }
    }
    None
}

fn functions(
    read: &mut ReadProcessMemory<'_>,
    layout: &ModuleLayout,
    bias: u64,
) -> Option<Vec<ModuleFunction>> {
    let (at, len) = layout.dynamic?;
    let section = read(at.wrapping_add(bias), len.min(MAX_DYNAMIC))?;
    let dynamic = Dynamic::parse(&section, layout, bias);
    let (symbols_at, strings_at) = (dynamic.symbols?, dynamic.strings?);
    let count = dynamic.count(read, bias)?.min(MAX_SYMBOLS);
    let symbols = read(symbols_at.wrapping_add(bias), count * SYMBOL)?;
    let strings = read(
        strings_at.wrapping_add(bias),
        dynamic.strings_len.min(MAX_STRINGS),
    )?;
    let mut functions: Vec<ModuleFunction> = Vec::new();
    let mut names_left = usize::try_from(MAX_STRINGS).ok()?;
    for symbol in symbols.as_chunks::<24>().0 {
        let Some(function) = function(symbol, &strings, layout) else {
            continue;
        };
        // The size of all names is limited, because many symbols may share one long name.
        let Some(left) = names_left.checked_sub(function.name.len()) else {
            break;
        };
        names_left = left;
        functions.push(function);
    }
    functions.sort_by(|a, b| (a.start, a.end, &a.name).cmp(&(b.start, b.end, &b.name)));
    // If a function has several names, keeps the one with the fewest leading underscores, and the
    // shortest of these, which is usually the familiar one.
    functions.dedup_by(|next, kept| {
        let same = next.start == kept.start && next.end == kept.end;
        if same && rank(&next.name) < rank(&kept.name) {
            std::mem::swap(&mut next.name, &mut kept.name);
        }
        same
    });
    Some(functions)
}

/// Returns a key for sorting the names of one function. The preferred name has the smallest key.
fn rank(name: &str) -> (usize, usize) {
    (name.bytes().take_while(|&b| b == b'_').count(), name.len())
}

fn function(symbol: &[u8; 24], strings: &[u8], layout: &ModuleLayout) -> Option<ModuleFunction> {
    const FUNC: u8 = 2;
    const GNU_IFUNC: u8 = 10;
    let kind = symbol[4] & 15;
    let defined = u16_at(symbol, 6)? != 0;
    if !defined || (kind != FUNC && kind != GNU_IFUNC) {
        return None;
    }
    let (start, len) = (u64_at(symbol, 8)?, u64_at(symbol, 16)?);
    let segment_end = layout.end_of_segment(start)?;
    let end = start.checked_add(len.max(1))?.min(segment_end);
    let name = strings.get(usize::try_from(u32_at(symbol, 0)?).ok()?..)?;
    let name = &name[..name.iter().take(demangle::MAX_NAME).position(|&b| b == 0)?];
    let name = std::str::from_utf8(name).ok().filter(|name| !name.is_empty())?;
    Some(ModuleFunction {
        start,
        end,
        name: readable(name),
    })
}

/// Returns the contents and the link-time address of `.eh_frame_hdr`, the index of the unwind
/// tables.
fn index(read: &mut ReadProcessMemory<'_>, layout: &ModuleLayout, bias: u64) -> Option<(Vec<u8>, u64)> {
    let (index_at, len) = layout.eh_frame_hdr?;
    let index = read(index_at.wrapping_add(bias), len.min(MAX_INDEX))?;
    Some((index, index_at))
}

/// Returns the sorted start addresses of the functions in the index of the unwind tables. If a part
/// of the index is unmapped (and reads as zeros), functions would be missing, so the result is
/// empty.
fn function_starts(index: &[u8], index_at: u64) -> Vec<u64> {
    let bases = gimli::BaseAddresses::default().set_eh_frame_hdr(index_at);
    let header = gimli::EhFrameHdr::new(index, gimli::LittleEndian).parse(&bases, 8);
    let Some(header) = header.ok() else {
        return Vec::new();
    };
    let Some(table) = header.table() else {
        return Vec::new();
    };
    let (mut entries, mut starts) = (table.iter(&bases), Vec::new());
    while let Ok(Some((start, _))) = entries.next() {
        match start {
            // Unmapped memory reads as zeros, and offset zero refers to the index itself. This part
            // of the index is therefore not mapped.
            gimli::Pointer::Direct(start) if start == index_at => return Vec::new(),
            gimli::Pointer::Direct(start) => starts.push(start),
            gimli::Pointer::Indirect(_) => return Vec::new(),
        }
    }
    starts.sort_unstable();
    starts.dedup();
    starts
}

fn tables(
    read: &mut ReadProcessMemory<'_>,
    layout: &ModuleLayout,
    bias: u64,
    (index, index_at): (Vec<u8>, u64),
) -> Option<UnwindTables> {
    let frames_at = frames_address(&index, index_at)?;
    let len = layout.end_of_segment(frames_at)?.checked_sub(frames_at)?;
    let frames = read(frames_at.wrapping_add(bias), len.min(MAX_TABLES))?;
    Some(UnwindTables {
        index,
        index_at,
        frames,
        frames_at,
    })
}

/// Returns the address of `.eh_frame`, as stored in the header of `.eh_frame_hdr` (`index`).
fn frames_address(index: &[u8], index_at: u64) -> Option<u64> {
    let bases = gimli::BaseAddresses::default().set_eh_frame_hdr(index_at);
    let header = gimli::EhFrameHdr::new(index, gimli::LittleEndian)
        .parse(&bases, 8)
        .ok()?;
    match header.eh_frame_ptr() {
        gimli::Pointer::Direct(address) => Some(address),
        gimli::Pointer::Indirect(_) => None,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::FileExt;
    use std::process::{Child, Command, Stdio};
    use std::sync::OnceLock;

    use object::{Object, ObjectSymbol};

    use super::*;
    use proptest::prelude::*;

    /// Starts a process with a dynamically linked C library, which this static test program lacks,
    /// and returns its ID. The process exits together with this one.
    fn dynamic_process() -> u32 {
        static PROCESS: OnceLock<Child> = OnceLock::new();
        let process = PROCESS.get_or_init(|| {
            let mut cat = Command::new("/bin/cat");
            let cat = cat.stdin(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
            let maps = format!("/proc/{}/maps", cat.id());
            while !std::fs::read_to_string(&maps).unwrap().contains("libc.so") {
                std::thread::yield_now();
            }
            cat
        });
        process.id()
    }

    /// Returns a function that reads the memory of the process started by `dynamic_process`.
    pub(crate) fn process_memory() -> impl FnMut(u64, u64) -> Option<Vec<u8>> {
        let memory = std::fs::File::open(format!("/proc/{}/mem", dynamic_process())).unwrap();
        move |at, len| {
            let mut bytes = vec![0; usize::try_from(len).ok()?];
            // Reads page by page, because the next page may be unmapped.
            let mut done = 0;
            while done < bytes.len() {
                let in_page = usize::try_from(PAGE - (at + done as u64) % PAGE).ok()?;
                let end = bytes.len().min(done + in_page);
                if memory
                    .read_exact_at(&mut bytes[done..end], at + done as u64)
                    .is_err()
                {
                    return (done > 0).then_some(bytes);
                }
                done = end;
            }
            Some(bytes)
        }
    }

    /// Returns the address and the path of the C library in the process started by
    /// `dynamic_process`.
    pub(crate) fn libc_of_process() -> (u64, String) {
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", dynamic_process())).unwrap();
        let line = maps.lines().find(|line| line.contains("libc.so")).unwrap();
        let base = u64::from_str_radix(line.split('-').next().unwrap(), 16).unwrap();
        (base, line.split_whitespace().next_back().unwrap().to_owned())
    }

    /// Functions exported by a process's C library are found in the process memory, without the
    /// file.
    #[test]
    fn exported_functions_are_found_in_memory() {
        let (base, path) = libc_of_process();
        let module = LoadedModule::read(&mut process_memory(), base, true).unwrap();
        assert!(module.len() > 1500, "{}", module.len());
        let file = std::fs::read(path).unwrap();
        let file = object::File::parse(&*file).unwrap();
        for name in ["qsort", "strtoul", "getenv"] {
            let symbol = file.dynamic_symbols().find(|symbol| symbol.name() == Ok(name));
            let linked = symbol.unwrap().address();
            let found = module.function(linked + 1).unwrap();
            assert!(
                found.name.contains(name) && found.start == linked,
                "{name}: {found:?}"
            );
        }
        let tables = module.tables().unwrap();
        assert!(tables.index.len() > 10_000 && tables.frames.len() > 50_000);
    }

    /// For a function without a name, all of its addresses yield the same start and end. For an
    /// exported function, the index of the unwind tables contains the same start address as the
    /// symbol.
    #[test]
    fn unnamed_functions_have_the_extent_of_their_unwind_entry() {
        let (base, path) = libc_of_process();
        let module = LoadedModule::read(&mut process_memory(), base, false).unwrap();
        let file = std::fs::read(path).unwrap();
        let file = object::File::parse(&*file).unwrap();
        let symbol = file.dynamic_symbols().find(|symbol| symbol.name() == Ok("qsort"));
        let symbol = symbol.unwrap();
        let (start, end) = module.unnamed_function(symbol.address() + 1).unwrap();
        assert_eq!(start, symbol.address());
        assert!(end >= start + symbol.size(), "{start:#x} to {end:#x}");
        assert_eq!(module.unnamed_function(end - 1), Some((start, end)));
        assert_ne!(module.unnamed_function(end), Some((start, end)));
        assert_eq!(module.unnamed_function(0), None);
        assert_eq!(module.unnamed_function(u64::MAX), None);
        assert!(module.tables().is_none());
    }

    #[test]
    fn module_rejects_non_elf_memory() {
        assert_eq!(LoadedModule::read(&mut |_, _| None, 0, true), None);
        assert_eq!(
            LoadedModule::read(&mut |_, len| Some(vec![0; len as usize]), 0, true),
            None
        );
        // All header bits are set, so every table claims to cover all addresses.
        let mut file = vec![0xff; 4096];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[18..20].copy_from_slice(&62u16.to_le_bytes());
        file[54..56].copy_from_slice(&56u16.to_le_bytes());
        assert_eq!(ModuleLayout::parse(&file), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(200))]

        /// The memory reads of the module parser stay within its limits if the headers, the dynamic
        /// section and the tables of a C library are randomly corrupted.
        #[test]
        fn hostile_module_reads_stay_bounded(
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u64>(), 0u8..4), 1..12),
        ) {
            let (base, _) = libc_of_process();
            let mut memory = process_memory();
            let (mut reads, mut bytes) = (0u64, 0u64);
            let mut hostile = |at: u64, len: u64| {
                reads += 1;
                bytes += len;
                let mut part = memory(at, len).unwrap_or_else(|| vec![0; len as usize]);
                for (where_to, value, kind) in &changes {
                    if part.len() < 8 {
                        continue;
                    }
                    let at = where_to.index(part.len() - 7);
                    let value = match kind {
                        0 => *value,
                        1 => value % 4096,
                        2 => base.wrapping_add(value % (2 << 20)),
                        _ => u64::MAX - value % 64,
                    };
                    part[at..at + 8].copy_from_slice(&value.to_le_bytes());
                }
                Some(part)
            };
            if let Some(module) = LoadedModule::read(&mut hostile, base, true) {
                prop_assert!(module.bytes() < 128 << 20);
                let _ = module.function(base);
            }
            prop_assert!(reads < 400 && bytes < 128 << 20, "{reads} reads, {bytes} bytes");
        }
    }
}
