//! Loads a kernel from a multiboot image.

use std::path::Path;
use std::sync::Arc;

use guest_patching::finder::InstructionBitness;
use kernel_images::KernelImageError;
use kernel_images::elf::{self, CodeBytes, ElfImage, LoadSegment};
use kernel_images::packed::CompressedKernelSymbols;
use kernel_images::symbols::KernelSymbols;

use super::error::BootError;
use super::multiboot::{self, MultibootHeader};
use super::regs::{self, BootProcessorState};
use super::{
    GuestLoadParams, KernelFormat, LoadedGuest, check_cmdline, entry_point, load_initrd, load_segments,
    text_ranges, trap_rdpmc, write_firmware_tables,
};
use crate::memory::{GuestRam, HIGH_RAM_START};

/// The contents of a multiboot image.
struct MultibootImage<'a> {
    segments: Vec<LoadSegment<'a>>,
    /// Entry point, as a physical or virtual address.
    entry: u64,
    code: Vec<CodeBytes<'a>>,
    symbols: KernelSymbols,
}

impl<'a> MultibootImage<'a> {
    /// Parses the image `data` with the multiboot header `header`.
    fn parse(name: &str, data: &'a [u8], header: &MultibootHeader) -> Result<Self, BootError> {
        let elf = elf::is_elf(data).then(|| elf::parse(name, data));
        // The address fields take precedence over the ELF headers (3.1.2). Symbols are read in both
        // cases.
        if header.has_addresses() {
            let elf = elf.and_then(Result::ok);
            let (segment, entry) = multiboot::address_fields(name, data, header)?;
            return Ok(Self {
                code: code_of_segment(&segment, elf.as_ref()),
                segments: vec![segment],
                entry: entry.into(),
                symbols: elf.map(|image| image.symbols).unwrap_or_default(),
            });
        }
        let Some(image) = elf.transpose()? else {
            return Err(KernelImageError::NoSegments { name: name.into() }.into());
        };
        Ok(Self {
            segments: image.segments,
            entry: image.entry,
            code: image.code,
            symbols: image.symbols,
        })
    }

    /// Returns the guest-physical address of the entry point.
    fn entry_point(&self, name: &str) -> Result<u32, BootError> {
        let eip = entry_point(name, self.entry, &self.segments)?;
        u32::try_from(eip).map_err(|_| BootError::EntryOutside {
            name: name.into(),
            entry: self.entry,
        })
    }
}

/// Loads the multiboot kernel `data` and the initrd that `request` names into `ram`.
#[expect(clippy::cast_possible_truncation, reason = "the layout puts it below 4 GiB")]
pub(super) fn load(
    ram: &GuestRam,
    request: &GuestLoadParams<'_>,
    name: &str,
    data: &[u8],
    header: &MultibootHeader,
) -> Result<LoadedGuest, BootError> {
    multiboot::check_flags(name, header)?;
    if multiboot::is_grub_core(data) {
        return Err(KernelImageError::NotAKernel {
            name: name.into(),
            found: "it is GRUB's core image, which needs a BIOS, and this machine has none (pass the kernel that \
                    it would load)",
        }.into());
    }
    let cmdline = multiboot::command_line(request.kernel.program_name().as_deref(), request.cmdline);
    check_cmdline(&cmdline, multiboot::CMDLINE_MAX_BYTES)?;
    let image = MultibootImage::parse(name, data, header)?;
    let kernel = load_segments(ram, name, &image.segments, true)?;
    let places = multiboot::places(name, &image.segments)?;
    let eip = image.entry_point(name)?;
    let initrd = request
        .initrd
        .map(|path| {
            let room = kernel.end.max(HIGH_RAM_START)..ram.low_end();
            load_initrd(ram, path, room, true)
        })
        .transpose()?;
    write_firmware_tables(ram, request.cpus, request.pci)?;
    let module_name = request.initrd.and_then(Path::file_name);
    let module_name = module_name.map(|name| name.to_string_lossy()).unwrap_or_default();
    let module = initrd.as_ref().map(|range| (range, &*module_name));
    multiboot::write_info(ram, places, &cmdline, module)?;
    let entry = BootProcessorState::Protected32 {
        eip,
        eax: multiboot::ENTRY_MAGIC,
        ebx: places.info as u32,
    };
    regs::write_tables(ram, &entry)?;
    let bits = InstructionBitness::Either;
    let rdpmc_sites = trap_rdpmc(ram, request, &image.code, &image.symbols, &[], bits)?;
    Ok(LoadedGuest {
        kind: KernelFormat::Multiboot,
        entry,
        kernel,
        initrd,
        pci: request.pci,
        text: text_ranges(&image.code),
        symbols: Arc::new(CompressedKernelSymbols::new(&image.symbols)),
        rdpmc_sites,
        event_tables: Vec::new(),
        topdown: Vec::new(),
        user_rdpmc: None,
    })
}

/// Returns the executable code in `segment`, a segment that the multiboot address fields describe:
/// the code that the ELF headers list, or the whole segment unless all of this code lies in it.
fn code_of_segment<'a>(segment: &LoadSegment<'a>, elf: Option<&ElfImage<'a>>) -> Vec<CodeBytes<'a>> {
    let same_bytes = |code: &CodeBytes<'a>| {
        let at = code
            .phys
            .checked_sub(segment.phys)
            .and_then(|o| usize::try_from(o).ok());
        at.and_then(|o| segment.data.get(o..o.checked_add(code.bytes.len())?))
            .is_some_and(|loaded| loaded.as_ptr() == code.bytes.as_ptr())
    };
    match elf {
        Some(image) if !image.code.is_empty() && image.code.iter().all(same_bytes) => image.code.clone(),
        _ => vec![CodeBytes {
            virt: segment.virt,
            phys: segment.phys,
            bytes: segment.data,
        }],
    }
}
