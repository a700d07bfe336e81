//! Reads `.debug_frame`, the unwind tables of programs that have no `.eh_frame` in memory, such as
//! Go programs and programs built with `-fno-asynchronous-unwind-tables -g`.
//!
//! The section is not loaded into memory when the program runs, so it is read from the program's
//! file. The section has no index, so [`DebugFrames`] builds one.
//!
//! **A hostile guest controls the file.** The compressed and decompressed size of the section and
//! the number of its entries are bounded.

use std::io::Read as _;

use flate2::read::ZlibDecoder;
use gimli::{
    BaseAddresses, CieOrFde, DebugFrame, DebugFrameOffset, EndianSlice, LittleEndian, UnwindSection,
};
use kernel_images::le::u32_at;
use object::{CompressionFormat, Object, ObjectSection};

/// Maximum size of a `.debug_frame` section, in bytes. The limit for unwind tables in memory is the
/// same.
const MAX_SECTION: u64 = 24 << 20;
/// Maximum number of functions in the `.debug_frame` section of one file.
const MAX_FUNCTIONS: usize = 1 << 19;
/// Maximum length of one CIE (common information entry), and maximum total length of the CIEs that
/// are parsed, in bytes. The total is limited because a CIE is parsed again for each function that
/// uses it.
const MAX_COMMON: u64 = 64 << 10;
const MAX_COMMON_READ: u64 = 256 << 20;
/// Size of an address in `.debug_frame`, in bytes.
const ADDRESS: u8 = 8;

/// A `.debug_frame` section with an index of its functions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DebugFrames {
    bytes: Vec<u8>,
    /// Functions with unwind information, sorted by start address: start address, end address
    /// (exclusive) and offset of the FDE.
    functions: Vec<(u64, u64, u32)>,
}

impl DebugFrames {
    /// Reads the `.debug_frame` section of an ELF file. Returns `None` if the section is missing or
    /// damaged.
    pub fn of_file(file: &[u8]) -> Option<Self> {
        let file = object::File::parse(file).ok()?;
        let section = file.section_by_name(".debug_frame")?;
        let data = section.compressed_data().ok()?;
        if data.uncompressed_size > MAX_SECTION {
            return None;
        }
        let bytes = match data.format {
            CompressionFormat::None => data.data.to_vec(),
            CompressionFormat::Zlib => {
                let mut bytes = Vec::new();
                let mut unpacked = ZlibDecoder::new(data.data).take(MAX_SECTION);
                unpacked.read_to_end(&mut bytes).ok()?;
                bytes
            }
            _ => return None,
        };
        Self::parse(bytes)
    }

    /// Builds the index of functions from the contents of a `.debug_frame` section.
    pub(crate) fn parse(bytes: Vec<u8>) -> Option<Self> {
        let bases = BaseAddresses::default();
        let (mut functions, mut left) = (Vec::new(), MAX_COMMON_READ);
        let section = section(&bytes);
        let mut entries = section.entries(&bases);
        while let Ok(Some(entry)) = entries.next() {
            let CieOrFde::Fde(partial) = entry else { continue };
            let common = u32_at(&bytes, partial.cie_offset().0).map_or(u64::MAX, u64::from);
            left = match left.checked_sub(common) {
                Some(left) if common <= MAX_COMMON => left,
                Some(_) | None => continue,
            };
            // A damaged entry is skipped.
            let Ok(entry) = partial.parse(DebugFrame::cie_from_offset) else {
                continue;
            };
            let (start, len) = (entry.initial_address(), entry.len());
            let (Some(end), Ok(at)) = (start.checked_add(len), u32::try_from(entry.offset())) else {
                continue;
            };
            // The linker leaves FDEs of discarded functions, whose address is then 0.
            if start == 0 || len == 0 {
                continue;
            }
            if functions.len() == MAX_FUNCTIONS {
                break;
            }
            functions.push((start, end, at));
        }
        functions.sort_unstable();
        (!functions.is_empty()).then_some(Self { bytes, functions })
    }

    /// Returns the section as a `gimli` section.
    pub(crate) fn section(&self) -> DebugFrame<EndianSlice<'_, LittleEndian>> {
        section(&self.bytes)
    }

    /// Returns the offset of the FDE that covers the link-time address `address`.
    pub(crate) fn find(&self, address: u64) -> Option<DebugFrameOffset<usize>> {
        let after = self.functions.partition_point(|(start, ..)| *start <= address);
        let (_, end, at) = self.functions[..after].last()?;
        (address < *end).then_some(DebugFrameOffset(usize::try_from(*at).ok()?))
    }

    /// Returns the memory used by the section and its index, in bytes.
    pub(crate) fn size(&self) -> usize {
        self.bytes.len() + size_of_val(&*self.functions)
    }
}

fn section(bytes: &[u8]) -> DebugFrame<EndianSlice<'_, LittleEndian>> {
    let mut section = DebugFrame::new(bytes, LittleEndian);
    section.set_address_size(ADDRESS);
    section
}
