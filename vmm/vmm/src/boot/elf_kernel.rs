//! Loads a kernel from an ELF image, which is booted with the Linux 64-bit protocol or PVH.

use std::ops::Range;
use std::sync::Arc;

use guest_patching::finder::InstructionBitness;
use guest_patching::{event_tables, topdown_events, user_rdpmc};
use kernel_images::elf::{ElfImage, LoadSegment};
use kernel_images::packed::CompressedKernelSymbols;
use kernel_images::symbols::KernelSymbols;
use kernel_images::{KernelImageError, bzimage, kallsyms};

use super::error::BootError;
use super::regs::{self, BootProcessorState};
use super::{
    GuestLoadParams, KernelFormat, LoadedGuest, check_cmdline, entry_point, layout, linux, load_initrd,
    load_segments, pvh, text_ranges, trap_rdpmc, write_firmware_tables,
};
use crate::memory::GuestRam;

/// A kernel in an ELF image, and how it is booted.
pub(super) struct ElfKernel<'a> {
    /// Name of the file, for error messages.
    pub(super) name: &'a str,
    pub(super) image: ElfImage<'a>,
    pub(super) kind: KernelFormat,
    /// `true` to boot with PVH, `false` to boot with the Linux 64-bit protocol.
    pub(super) by_pvh: bool,
    /// The bzImage whose payload the image is, and its setup header.
    pub(super) bzimage: Option<(&'a [u8], &'a bzimage::SetupHeader)>,
}

impl ElfKernel<'_> {
    /// Loads the kernel and the initrd that `request` names into `ram`.
    pub(super) fn load(
        self,
        ram: &GuestRam,
        request: &GuestLoadParams<'_>,
    ) -> Result<LoadedGuest, BootError> {
        self.check_machine()?;
        let linux = self.kind.is_linux();
        check_cmdline(request.cmdline, self.cmdline_max_bytes())?;
        let kernel = load_segments(ram, self.name, &self.image.segments, false)?;
        let pvh_entry = self.by_pvh.then(|| pvh_entry(self.name, &self.image));
        let pvh_entry = pvh_entry.transpose()?;
        let initrd = request
            .initrd
            .map(|path| {
                let limit = ram.low_end().min(u64::from(self.initrd_max()) + 1);
                load_initrd(ram, path, kernel.end..limit, false)
            })
            .transpose()?;
        let pci = linux || request.pci;
        write_firmware_tables(ram, request.cpus, pci)?;
        let entry = match pvh_entry {
            Some(eip) => enter_by_pvh(ram, request.cmdline, initrd.as_ref(), eip)?,
            None => self.enter_by_linux_protocol(ram, request.cmdline, initrd.as_ref())?,
        };
        regs::write_tables(ram, &entry)?;
        let Self { mut image, kind, .. } = self;
        let symbols = kernel_symbols(&mut image, linux);
        let bits = if linux {
            InstructionBitness::Only64
        } else {
            InstructionBitness::Either
        };
        let rdpmc_sites = trap_rdpmc(ram, request, &image.code, &symbols, &image.orc_ips, bits)?;
        let in_linux = linux.then_some(&image.segments[..]);
        Ok(LoadedGuest {
            kind,
            entry,
            kernel,
            initrd,
            pci,
            text: text_ranges(&image.code),
            symbols: Arc::new(CompressedKernelSymbols::new(&symbols)),
            rdpmc_sites,
            event_tables: in_linux.map(event_tables::find).unwrap_or_default(),
            topdown: in_linux.map(topdown_events::find).unwrap_or_default(),
            user_rdpmc: in_linux.and_then(|_| user_rdpmc::find(&image.code, &symbols)),
        })
    }

    /// Checks that the image is for this processor and, with Linux, for its 64-bit mode.
    fn check_machine(&self) -> Result<(), BootError> {
        const EM_386: u16 = 3;
        const EM_X86_64: u16 = 62;
        let fits = match self.image.machine {
            EM_X86_64 => self.image.is_64,
            EM_386 => !self.kind.is_linux(),
            _ => false,
        };
        if fits {
            return Ok(());
        }
        Err(KernelImageError::NotAKernel {
            name: self.name.into(),
            found: "it is an ELF image for another processor, or a 32-bit one without a multiboot header",
        }
        .into())
    }

    /// Returns the maximum length of the kernel's command line in bytes.
    fn cmdline_max_bytes(&self) -> usize {
        self.bzimage.map_or(linux::DEFAULT_CMDLINE_BYTES, |(_, header)| {
            (header.cmdline_bytes as usize).min(layout::CMDLINE_MAX_BYTES)
        })
    }

    /// Returns the highest guest-physical address that the initrd may occupy.
    fn initrd_max(&self) -> u32 {
        self.bzimage
            .map_or(linux::DEFAULT_INITRD_MAX, |(_, header)| header.initrd_addr_max)
    }

    /// Writes the boot parameters of the Linux 64-bit protocol, and returns the boot processor's
    /// state at the entry.
    fn enter_by_linux_protocol(
        &self,
        ram: &GuestRam,
        cmdline: &str,
        initrd: Option<&Range<u64>>,
    ) -> Result<BootProcessorState, BootError> {
        linux::write_boot_params(ram, cmdline, initrd, self.bzimage)?;
        Ok(BootProcessorState::Long64 {
            rip: entry_point(self.name, self.image.entry, &self.image.segments)?,
            rsi: layout::ZERO_PAGE,
            cr3: layout::PML4,
        })
    }
}

/// Writes the start information of PVH, and returns the boot processor's state at the entry point
/// `eip`.
#[expect(clippy::cast_possible_truncation, reason = "the layout is below 1 MiB")]
fn enter_by_pvh(
    ram: &GuestRam,
    cmdline: &str,
    initrd: Option<&Range<u64>>,
    eip: u32,
) -> Result<BootProcessorState, BootError> {
    pvh::write_start_info(ram, cmdline, initrd)?;
    Ok(BootProcessorState::Protected32 {
        eip,
        eax: 0,
        ebx: layout::PVH_START_INFO as u32,
    })
}

/// Takes the symbols out of `image`. A stripped Linux image, such as the payload of a bzImage,
/// still contains kallsyms.
fn kernel_symbols(image: &mut ElfImage<'_>, linux: bool) -> KernelSymbols {
    if !image.symbols.is_empty() || !linux {
        return std::mem::take(&mut image.symbols);
    }
    let mut segments = image.segments.iter();
    segments
        .find_map(|segment| kallsyms::find(segment.data).ok())
        .unwrap_or_default()
}

/// Returns the guest-physical PVH entry point of `image`, as given by an ELF note.
fn pvh_entry(name: &str, image: &ElfImage<'_>) -> Result<u32, BootError> {
    let Some(eip) = image.pvh_entry else {
        return Err(BootError::NoPvhEntry { name: name.into() });
    };
    let inside = |s: &LoadSegment<'_>| u64::from(eip).wrapping_sub(s.phys) < s.mem_bytes;
    if image.segments.iter().any(inside) {
        return Ok(eip);
    }
    Err(BootError::EntryOutside {
        name: name.into(),
        entry: eip.into(),
    })
}
