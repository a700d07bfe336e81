//! Names for addresses: the kernel's, and those of user programs found through the guest's files.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Component, Path, PathBuf};

use object::{Object, ObjectSection, ObjectSegment, ObjectSymbol};

#[derive(Debug, Clone, Copy)]
struct Entry {
    address: u64,
    name_at: u32,
    name_len: u16,
    kind: u8,
}

/// Symbols of one kernel, sorted by address.
#[derive(Debug, Clone)]
pub struct KernelSymbols {
    names: Vec<u8>,
    entries: Vec<Entry>,
}

/// One symbol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KernelSymbol<'s> {
    /// Its address, as in its source (link-time, or running for a guest's `/proc/kallsyms`).
    pub address: u64,
    /// The letter `nm` gives it.
    pub kind: u8,
    /// Its name.
    pub name: &'s str,
}

impl KernelSymbol<'_> {
    fn is_text(&self) -> bool {
        is_text(self.kind)
    }
}

fn is_text(kind: u8) -> bool {
    matches!(kind, b't' | b'T' | b'w' | b'W')
}

/// Kernel addresses are in the upper half; smaller values in a table are per-CPU offsets and constants.
const UPPER_HALF: u64 = 1 << 63;
/// Names longer than this are cut: no kernel has them (KSYM_NAME_LEN is 512).
const MAX_NAME: usize = 1024;

/// Collects symbols in any order.
#[derive(Debug, Default)]
pub struct SymbolsBuilder {
    names: Vec<u8>,
    entries: Vec<Entry>,
}

impl SymbolsBuilder {
    /// Adds one symbol. Names that are no ASCII text are dropped, and so is everything past 4 GiB of names.
    pub fn add(&mut self, address: u64, kind: u8, name: &[u8]) {
        let name = &name[..name.len().min(MAX_NAME)];
        let Ok(name_at) = u32::try_from(self.names.len()) else {
            return;
        };
        if name.is_empty() || !name.iter().all(u8::is_ascii_graphic) {
            return;
        }
        self.names.extend_from_slice(name);
        self.entries.push(Entry {
            address,
            name_at,
            name_len: name.len() as u16,
            kind,
        });
    }

    /// The table, or `None` when nothing was added.
    pub fn finish(mut self) -> Option<KernelSymbols> {
        if self.entries.is_empty() {
            return None;
        }
        let names = &self.names;
        // Of several names for one address the last in this order is shown: text before data, global before
        // local, fewer leading underscores.
        self.entries.sort_by_key(|e| {
            let name = &names[e.name_at as usize..][..usize::from(e.name_len)];
            let underscores = name.iter().take_while(|&&b| b == b'_').count();
            (
                e.address,
                is_text(e.kind),
                e.kind.is_ascii_uppercase(),
                std::cmp::Reverse(underscores),
            )
        });
        Some(KernelSymbols {
            names: self.names,
            entries: self.entries,
        })
    }
}

/// Why a text file of symbols cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum KallsymsTextError {
    /// No line has the form "address type name".
    #[error("no line of the form \"address type name\"")]
    NoSymbols,
    /// All addresses are zero: it was read without the right to see them.
    #[error("all addresses are zero; read /proc/kallsyms as root with kernel.kptr_restrict=0")]
    AllZero,
}

impl KernelSymbols {
    /// Reads the text of `/proc/kallsyms` or of a `System.map`. Lines of another form are skipped.
    pub fn parse_text(text: &[u8]) -> Result<Self, KallsymsTextError> {
        let mut builder = SymbolsBuilder::default();
        let mut any_address = false;
        for line in text.split(|&b| b == b'\n') {
            let mut fields = line.split(|b| b.is_ascii_whitespace()).filter(|f| !f.is_empty());
            let (Some(address), Some(&[kind]), Some(name)) = (fields.next(), fields.next(), fields.next())
            else {
                continue;
            };
            let address = std::str::from_utf8(address)
                .ok()
                .and_then(|a| u64::from_str_radix(a, 16).ok());
            let Some(address) = address else { continue };
            any_address |= address != 0;
            builder.add(address, kind, name);
        }
        let symbols = builder.finish().ok_or(KallsymsTextError::NoSymbols)?;
        if any_address {
            Ok(symbols)
        } else {
            Err(KallsymsTextError::AllZero)
        }
    }

    /// The text symbol that `address` is in, and the offset into it.
    pub fn resolve(&self, address: u64) -> Option<(KernelSymbol<'_>, u64)> {
        let (symbol, offset) = self.resolve_flat(address)?;
        (symbol.address >= UPPER_HALF).then_some((symbol, offset))
    }

    /// As [`Self::resolve`], in the lower half too: for guests with one address space for everything.
    pub fn resolve_flat(&self, address: u64) -> Option<(KernelSymbol<'_>, u64)> {
        let after = self.entries.partition_point(|e| e.address <= address);
        let symbol = self.symbol(self.entries.get(after.checked_sub(1)?)?);
        // Past the last symbol anything may follow: modules, the next kernel's. One page is granted.
        let reaches = self
            .entries
            .get(after)
            .map_or(symbol.address.saturating_add(4096), |next| next.address);
        (symbol.is_text() && address < reaches).then(|| (symbol, address - symbol.address))
    }

    /// The end of the symbol that starts at `address`: where the next one starts.
    pub fn end_of(&self, address: u64) -> u64 {
        let after = self.entries.partition_point(|e| e.address <= address);
        self.entries
            .get(after)
            .map_or(address.saturating_add(4096), |e| e.address)
    }

    /// The first symbol of that name. Searches the whole table.
    pub fn by_name(&self, name: &str) -> Option<KernelSymbol<'_>> {
        self.iter().find(|s| s.name == name)
    }

    /// All symbols by ascending address.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = KernelSymbol<'_>> {
        self.entries.iter().map(|e| self.symbol(e))
    }

    /// Number of symbols.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Never true: an empty table is not made.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The same symbols `slide` higher (wrapping). Per-CPU offsets and constants stay.
    pub fn slid(&self, slide: u64) -> Self {
        let mut moved = self.clone();
        for e in &mut moved.entries {
            if e.address >= UPPER_HALF {
                e.address = e.address.wrapping_add(slide);
            }
        }
        moved.entries.sort_by_key(|e| e.address);
        moved
    }

    /// As the text of a `/proc/kallsyms`, which `perf`'s `--guestkallsyms` reads.
    pub fn write_text(&self, mut out: impl std::io::Write) -> std::io::Result<()> {
        for s in self.iter() {
            writeln!(out, "{:016x} {} {}", s.address, s.kind as char, s.name)?;
        }
        Ok(())
    }

    fn symbol(&self, e: &Entry) -> KernelSymbol<'_> {
        let name = &self.names[e.name_at as usize..][..usize::from(e.name_len)];
        // Only ASCII is let in.
        KernelSymbol {
            address: e.address,
            kind: e.kind,
            name: std::str::from_utf8(name).unwrap_or_default(),
        }
    }
}

/// A name for a user address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserSymbol {
    /// Function name, demangled.
    pub name: String,
    /// Offset into the function.
    pub offset: u64,
}

/// Why a guest file gives no symbols.
#[derive(Debug, thiserror::Error)]
pub enum GuestFileError {
    /// It cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file under the guest mount.
        path: PathBuf,
        /// What the host said.
        #[source]
        source: std::io::Error,
    },
    /// It is larger than is read for symbols.
    #[error("{path} is larger than {} MiB", MAX_FILE >> 20)]
    TooLarge {
        /// The file under the guest mount.
        path: PathBuf,
    },
    /// It is no ELF file.
    #[error("{path} is no ELF file")]
    Elf {
        /// The file under the guest mount.
        path: PathBuf,
        /// What is wrong with it.
        #[source]
        source: object::Error,
    },
}

const MAX_FILE: u64 = 1 << 30;
/// Symbolic links followed for one path.
const MAX_LINKS: u32 = 16;

struct Function {
    start: u64,
    end: u64,
    name: String,
}

/// The functions of one user program or library.
pub struct UserObject {
    functions: Vec<Function>,
    /// (file offset, size, address) of the loaded segments.
    segments: Vec<(u64, u64, u64)>,
    lines: Option<addr2line::Context<gimli::EndianArcSlice<gimli::RunTimeEndian>>>,
}

impl UserObject {
    /// Reads an ELF file: its symbol tables, dynamic ones included, and its line table if there is one.
    pub fn parse(data: &[u8]) -> Result<Self, object::Error> {
        let file = object::File::parse(data)?;
        let mut functions: Vec<Function> = file
            .symbols()
            .chain(file.dynamic_symbols())
            .filter(|s| s.kind() == object::SymbolKind::Text && s.is_definition())
            .filter_map(|s| {
                // The file is the guest's, and a terminal may show the name.
                let name = addr2line::demangle_auto(Cow::Borrowed(s.name().ok()?), None)
                    .replace(char::is_control, "?");
                (!name.is_empty()).then(|| Function {
                    start: s.address(),
                    end: s.address().saturating_add(s.size().max(1)),
                    name,
                })
            })
            .collect();
        functions.sort_by_key(|f| (f.start, f.end));
        functions.dedup_by(|a, b| a.start == b.start && a.end == b.end);
        let segments = file
            .segments()
            .map(|s| (s.file_range().0, s.file_range().1, s.address()))
            .collect();
        let has_lines = file.section_by_name(".debug_info").is_some();
        let lines = gimli::Dwarf::load(|id| -> Result<_, gimli::Error> {
            let data = file
                .section_by_name(id.name())
                .and_then(|s| s.uncompressed_data().ok())
                .unwrap_or_default();
            Ok(gimli::EndianArcSlice::new(
                data.into_owned().into(),
                gimli::RunTimeEndian::Little,
            ))
        })
        .ok()
        .filter(|_| has_lines)
        .and_then(|dwarf| addr2line::Context::from_dwarf(dwarf).ok());
        Ok(Self {
            functions,
            segments,
            lines,
        })
    }

    /// The link-time address of a byte of the file, as mapped by its loaded segments.
    pub fn address_of_file_offset(&self, offset: u64) -> Option<u64> {
        let (from, _, address) = self
            .segments
            .iter()
            .find(|(from, size, _)| offset >= *from && offset - from < *size)?;
        address.checked_add(offset - from)
    }

    /// The function that link-time address `address` is in.
    pub fn resolve(&self, address: u64) -> Option<UserSymbol> {
        let after = self.functions.partition_point(|f| f.start <= address);
        let f = self.functions[..after]
            .iter()
            .rev()
            .take(8)
            .find(|f| address < f.end)?;
        Some(UserSymbol {
            name: f.name.clone(),
            offset: address - f.start,
        })
    }

    /// "file:line" of link-time address `address`, where the file has line tables.
    pub fn line(&self, address: u64) -> Option<String> {
        let location = self.lines.as_ref()?.find_location(address).ok()??;
        Some(format!("{}:{}", location.file?, location.line?))
    }
}

/// The guest's files, mounted or unpacked in a directory of the host.
pub struct GuestMount {
    root: PathBuf,
    objects: HashMap<String, Option<UserObject>>,
    problems: Vec<String>,
}

impl GuestMount {
    /// Files under `root`, which is the guest's `/`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            objects: HashMap::new(),
            problems: Vec::new(),
        }
    }

    /// The object a guest path names, read at first use. `None` if there is none or it is not usable; why is in
    /// [`Self::problems`].
    pub fn object(&mut self, guest_path: &str) -> Option<&UserObject> {
        if !self.objects.contains_key(guest_path) {
            let object = match self.load(guest_path) {
                Ok(object) => Some(object),
                Err(e) => {
                    let why = std::error::Error::source(&e)
                        .map(|s| format!(": {s}"))
                        .unwrap_or_default();
                    self.problems.push(format!("{e}{why}"));
                    None
                }
            };
            self.objects.insert(guest_path.to_owned(), object);
        }
        self.objects.get(guest_path)?.as_ref()
    }

    /// Files that could not be used so far, a line each.
    pub fn problems(&self) -> &[String] {
        &self.problems
    }

    fn load(&self, guest_path: &str) -> Result<UserObject, GuestFileError> {
        let path = self.inside(guest_path);
        let read_error = |source| GuestFileError::Read {
            path: path.clone(),
            source,
        };
        let meta = std::fs::metadata(&path).map_err(read_error)?;
        // The paths are the guest's words: nothing but plain files is opened, for a FIFO would hold us.
        if !meta.is_file() {
            return Err(read_error(std::io::Error::other("not a regular file")));
        }
        if meta.len() > MAX_FILE {
            return Err(GuestFileError::TooLarge { path });
        }
        let data = std::fs::read(&path).map_err(read_error)?;
        UserObject::parse(&data).map_err(|source| GuestFileError::Elf { path, source })
    }

    /// The host path of a guest path. Links are followed as inside the guest: `..` and absolute targets stay
    /// under the root.
    fn inside(&self, guest_path: &str) -> PathBuf {
        let mut links = 0;
        let mut todo: Vec<std::ffi::OsString> = parts(Path::new(guest_path));
        let mut done: Vec<std::ffi::OsString> = Vec::new();
        while let Some(part) = todo.pop() {
            if part == ".." {
                done.pop();
                continue;
            }
            done.push(part);
            let here = self.root.join(done.iter().collect::<PathBuf>());
            if let Ok(target) = std::fs::read_link(&here) {
                links += 1;
                if links > MAX_LINKS {
                    break;
                }
                done.pop();
                if target.is_absolute() {
                    done.clear();
                }
                todo.extend(parts(&target));
            }
        }
        self.root.join(done.iter().collect::<PathBuf>())
    }
}

/// The components of a path, last first, without root and dots.
fn parts(path: &Path) -> Vec<std::ffi::OsString> {
    let mut parts: Vec<_> = path
        .components()
        .filter_map(|c| match c {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
            _ => None,
        })
        .collect();
    parts.reverse();
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
0000000000000000 A fixed_percpu_data
000000000001fdc0 D current_task
ffffffff81000000 T _text
ffffffff81000000 T _stext
ffffffff81000100 t helper
ffffffff81000100 T __x64_helper
ffffffff81000180 D data_here
ffffffff81000200 W weak
ffffffffc0001000 t in_module	[nf]
";

    #[test]
    fn text_symbols_resolve_and_data_does_not() {
        let s = KernelSymbols::parse_text(TEXT.as_bytes()).unwrap();
        let name = |a| s.resolve(a).map(|(s, o)| (s.name.to_owned(), o));
        assert_eq!(name(0xffff_ffff_8100_0104), Some(("__x64_helper".into(), 4)));
        assert_eq!(name(0xffff_ffff_8100_0190), None);
        assert_eq!(name(0xffff_ffff_8100_0201), Some(("weak".into(), 1)));
        assert_eq!(name(0xffff_ffff_c000_1fff), Some(("in_module".into(), 0xfff)));
        assert_eq!(name(0xffff_ffff_c000_2000), None);
        assert_eq!(name(0x1fdc4), None);
        assert_eq!(s.by_name("current_task").unwrap().address, 0x1fdc0);
    }

    #[test]
    fn sliding_moves_addresses_and_not_per_cpu_offsets() {
        let s = KernelSymbols::parse_text(TEXT.as_bytes())
            .unwrap()
            .slid(0x1400_0000);
        assert_eq!(s.by_name("_text").unwrap().address, 0xffff_ffff_9500_0000);
        assert_eq!(s.by_name("current_task").unwrap().address, 0x1fdc0);
        let mut text = Vec::new();
        s.write_text(&mut text).unwrap();
        assert_eq!(KernelSymbols::parse_text(&text).unwrap().len(), s.len());
    }

    #[test]
    fn unusable_text_is_told_apart() {
        assert_eq!(
            KernelSymbols::parse_text(b"hello\n").unwrap_err(),
            KallsymsTextError::NoSymbols
        );
        let zero = b"0000000000000000 T _text\n0000000000000000 T start_kernel\n";
        assert_eq!(
            KernelSymbols::parse_text(zero).unwrap_err(),
            KallsymsTextError::AllZero
        );
    }

    #[test]
    fn a_guest_path_cannot_leave_the_mount() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("lib")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("lib/evil")).unwrap();
        std::os::unix::fs::symlink("loop", dir.path().join("loop")).unwrap();
        let mount = GuestMount::new(dir.path());
        assert_eq!(mount.inside("/lib/../../../x"), dir.path().join("x"));
        assert_eq!(mount.inside("/lib/evil"), dir.path().join("etc/passwd"));
        assert!(mount.inside("/loop").starts_with(dir.path()));
    }

    #[test]
    fn functions_of_a_real_program_resolve() {
        let exe = std::fs::read(std::env::current_exe().unwrap()).unwrap();
        let object = UserObject::parse(&exe).unwrap();
        let f = object
            .functions
            .iter()
            .find(|f| f.name.contains("functions_of_a_real_program_resolve"))
            .unwrap();
        assert_eq!(object.resolve(f.start).unwrap().offset, 0);
    }
}
