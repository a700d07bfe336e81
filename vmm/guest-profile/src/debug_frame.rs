//! `.debug_frame` of a program's file: unwind tables of programs that have no `.eh_frame` in memory, as Go's
//! and those built with `-fno-asynchronous-unwind-tables -g`.
//!
//! The section is not loaded, so only the file has it, and it has no index: one is made here.
//!
//! **The file is a hostile guest's.** The section is bounded, decompressed or not, and so are its entries.

use std::io::Read as _;

use flate2::read::ZlibDecoder;
use gimli::{
    BaseAddresses, CieOrFde, DebugFrame, DebugFrameOffset, EndianSlice, LittleEndian, UnwindSection,
};
use kernel_images::le::u32_at;
use object::{CompressionFormat, Object, ObjectSection};

/// Most bytes of the section, as of tables in memory.
const MAX_SECTION: u64 = 24 << 20;
/// Most functions of one file.
const MAX_FUNCTIONS: usize = 1 << 19;
/// Most bytes of what several entries have in common, and of all that is read of it: it is read again for
/// each entry.
const MAX_COMMON: u64 = 64 << 10;
const MAX_COMMON_READ: u64 = 256 << 20;
/// Bytes of an address.
const ADDRESS: u8 = 8;

/// The section, and where in it functions have their entries.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DebugFrames {
    bytes: Vec<u8>,
    /// First address, the one behind the last, and the entry's offset; ascending.
    functions: Vec<(u64, u64, u32)>,
}

impl DebugFrames {
    /// Of an ELF file. `None`: it has no such section, or a damaged one.
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

    /// Of what is in the section.
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
            // One that is damaged covers nothing.
            let Ok(entry) = partial.parse(DebugFrame::cie_from_offset) else {
                continue;
            };
            let (start, len) = (entry.initial_address(), entry.len());
            let (Some(end), Ok(at)) = (start.checked_add(len), u32::try_from(entry.offset())) else {
                continue;
            };
            // What the linker has thrown away is at 0.
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

    /// The section.
    pub(crate) fn section(&self) -> DebugFrame<EndianSlice<'_, LittleEndian>> {
        section(&self.bytes)
    }

    /// Where the entry that covers linked address `address` is.
    pub(crate) fn find(&self, address: u64) -> Option<DebugFrameOffset<usize>> {
        let after = self.functions.partition_point(|(start, ..)| *start <= address);
        let (_, end, at) = self.functions[..after].last()?;
        (address < *end).then_some(DebugFrameOffset(usize::try_from(*at).ok()?))
    }

    /// How much memory it takes, in bytes.
    pub(crate) fn size(&self) -> usize {
        self.bytes.len() + size_of_val(&*self.functions)
    }
}

fn section(bytes: &[u8]) -> DebugFrame<EndianSlice<'_, LittleEndian>> {
    let mut section = DebugFrame::new(bytes, LittleEndian);
    section.set_address_size(ADDRESS);
    section
}
