//! Loads a guest kernel into memory and determines the boot processor's initial registers.
//!
//! The format is detected from the content, not from the file name. An x86-64 ELF `vmlinux` and a
//! `bzImage` (whose payload is decompressed here) use the Linux 64-bit protocol, a multiboot v1
//! image uses multiboot, and any other ELF image with a PVH entry point uses PVH. Files are
//! untrusted; [`BootError`] has a variant for each type of invalid file.

mod acpi;
mod aml;
mod elf_kernel;
mod error;
mod events;
pub mod layout;
mod linux;
mod mptable;
mod multiboot;
mod multiboot_kernel;
mod processors;
mod pvh;
mod regs;

use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flate2::read::GzDecoder;
use sandbox::paths;
use vm_memory::{Bytes, GuestAddress};

pub use acpi::SCI_IRQ;
use elf_kernel::ElfKernel;
pub use error::BootError;
pub(crate) use regs::configure_bsp;
pub use regs::{BootProcessorState, configure_local_apic};

use crate::kvm::vcpu_fd::VcpuFd;
use crate::memory::{EBDA_START, GuestRam, HIGH_RAM_START};
use crate::numbers::VcpuCountRange;
use guest_patching::finder::{InstructionBitness, KernelTextRange, RdpmcSite, find};
use guest_patching::{event_tables, rdpmc, topdown_events};
use kernel_images::elf::{self, CodeBytes, LoadSegment};
use kernel_images::packed::CompressedKernelSymbols;
use kernel_images::symbols::KernelSymbols;
use kernel_images::{ImageCorruption, KernelImageError, bzimage};

/// Maximum size of a kernel file in bytes.
const MAX_KERNEL_FILE_BYTES: u64 = 1 << 30;
const PAGE: u64 = 4096;

/// Source of the kernel image: a file, or an image that is embedded in the program.
#[derive(Clone, Debug)]
pub enum KernelSource {
    /// A kernel file in the host's file system.
    File(PathBuf),
    /// An image embedded in the program.
    Builtin(&'static [u8]),
    /// A gzip-compressed image embedded in the program.
    Packed(&'static [u8]),
}

impl KernelSource {
    fn name(&self) -> String {
        match self {
            KernelSource::File(path) => path.display().to_string(),
            KernelSource::Builtin(_) | KernelSource::Packed(_) => "(built-in guest)".into(),
        }
    }

    /// Returns the name of the kernel, which multiboot places before the arguments in the command
    /// line.
    fn program_name(&self) -> Option<String> {
        match self {
            KernelSource::File(path) => Some(path.file_name()?.to_string_lossy().into_owned()),
            KernelSource::Builtin(_) | KernelSource::Packed(_) => Some("perfvisor-guest".into()),
        }
    }
}

/// Protocol by which a kernel image is loaded and entered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BootProtocol {
    /// Protocol selected by the image: multiboot for a multiboot header, PVH for an image with a
    /// PVH entry point that is not Linux, and otherwise the Linux protocol.
    #[default]
    Auto,
    /// The PVH boot protocol, even if the kernel is Linux.
    Pvh,
}

/// Error when parsing a [`BootProtocol`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("must be auto (as the kernel file requests) or pvh (the PVH entry point)")]
pub struct ParseBootProtocolError;

impl std::str::FromStr for BootProtocol {
    type Err = ParseBootProtocolError;

    fn from_str(text: &str) -> Result<Self, ParseBootProtocolError> {
        match text {
            "auto" => Ok(BootProtocol::Auto),
            "pvh" => Ok(BootProtocol::Pvh),
            _ => Err(ParseBootProtocolError),
        }
    }
}

/// Inputs with which [`load`] loads a guest.
#[derive(Clone, Debug)]
pub struct GuestLoadParams<'a> {
    /// Source of the kernel image to load.
    pub kernel: &'a KernelSource,
    /// Protocol that the operator requested.
    pub protocol: BootProtocol,
    /// Path of the initrd. For a multiboot kernel, the file becomes the only module.
    pub initrd: Option<&'a Path>,
    /// Command line of the guest's kernel, in printable ASCII.
    pub cmdline: &'a str,
    /// Initial and maximum number of vCPUs.
    pub cpus: VcpuCountRange,
    /// `true` if the machine has PCI devices. The tables for Linux describe a PCI bus even if this
    /// is `false`, because Linux logs errors without one.
    pub pci: bool,
    /// `true` to replace each RDPMC instruction of the kernel with a write to
    /// [`TRAP_PORT`](guest_patching::finder::TRAP_PORT), which exits.
    pub patch_rdpmc: bool,
}

/// Format of a kernel image, which determines how it is loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelFormat {
    /// An uncompressed ELF Linux kernel.
    Vmlinux,
    /// A compressed Linux kernel in the bzImage format.
    BzImage {
        /// Compression format of the kernel inside the bzImage, for example `gzip`.
        compression: &'static str,
    },
    /// A multiboot v1 image.
    Multiboot,
    /// An ELF image that has a PVH entry point and is not Linux.
    Pvh,
}

impl KernelFormat {
    /// Returns whether the kernel is Linux.
    pub fn is_linux(&self) -> bool {
        match self {
            KernelFormat::Vmlinux | KernelFormat::BzImage { .. } => true,
            KernelFormat::Multiboot | KernelFormat::Pvh => false,
        }
    }
}

impl std::fmt::Display for KernelFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            KernelFormat::Vmlinux => f.write_str("ELF vmlinux"),
            KernelFormat::BzImage { compression } => write!(f, "bzImage ({compression})"),
            KernelFormat::Multiboot => f.write_str("multiboot image"),
            KernelFormat::Pvh => f.write_str("PVH image"),
        }
    }
}

/// A guest that is loaded and ready to start.
#[derive(Clone, Debug)]
pub struct LoadedGuest {
    /// Format of the loaded kernel image.
    pub kind: KernelFormat,
    /// Processor mode and registers in which the boot processor enters the kernel.
    pub entry: BootProcessorState,
    /// Guest-physical range of the kernel's segments.
    pub kernel: Range<u64>,
    /// Guest-physical range of the initrd.
    pub initrd: Option<Range<u64>>,
    /// `true` if the guest's ACPI tables describe a PCI bus.
    pub pci: bool,
    /// Address ranges of the kernel's executable code.
    pub text: Vec<KernelTextRange>,
    /// Text symbols of the kernel, from its symbol table or from kallsyms. Empty if it has neither.
    pub symbols: Arc<CompressedKernelSymbols>,
    /// RDPMC instructions of the kernel. If `patch_rdpmc` was set, each of them was replaced with a
    /// write to [`TRAP_PORT`](guest_patching::finder::TRAP_PORT).
    pub rdpmc_sites: Vec<RdpmcSite>,
    /// Tables in a Linux kernel image that map perf's generic events to event selects.
    pub event_tables: Vec<event_tables::KernelEventTable>,
    /// Lists of top-down events in a Linux kernel file.
    pub topdown: Vec<topdown_events::TopdownList>,
    /// Guest-physical address of the instruction operand with which a Linux kernel permits RDPMC in
    /// user mode by default.
    pub user_rdpmc: Option<u64>,
}

impl LoadedGuest {
    /// Sets the boot processor's registers for the entry into the kernel. Must be called after
    /// KVM_SET_CPUID2 and before the first KVM_RUN.
    pub fn configure_bsp(&self, vcpu: &VcpuFd) -> Result<(), BootError> {
        regs::configure_bsp(&self.entry, vcpu)
    }

    /// Returns the guest-physical address of a virtual address in the kernel's text.
    pub fn phys_of(&self, virt: u64) -> Option<u64> {
        self.text.iter().find_map(|t| {
            let offset = virt.checked_sub(t.virt)?;
            (offset < t.len_bytes).then_some(t.phys + offset)
        })
    }
}

fn unpacked(packed: &[u8]) -> Result<Vec<u8>, BootError> {
    let mut image = Vec::new();
    let read = GzDecoder::new(packed).read_to_end(&mut image);
    read.map_err(|source| BootError::Read {
        what: "kernel",
        path: "(built-in guest)".into(),
        source,
    })?;
    Ok(image)
}

/// Loads the kernel and the initrd that `request` names into `ram`.
pub fn load(ram: &GuestRam, request: &GuestLoadParams<'_>) -> Result<LoadedGuest, BootError> {
    let name = request.kernel.name();
    let file;
    let data: &[u8] = match request.kernel {
        KernelSource::File(path) => {
            file = read_kernel(path)?;
            &file
        }
        KernelSource::Builtin(data) => data,
        KernelSource::Packed(data) => {
            file = unpacked(data)?;
            &file
        }
    };
    if request.protocol != BootProtocol::Pvh
        && let Some(header) = multiboot::find_header(data)
        && (elf::is_elf(data) || header.has_addresses())
    {
        return multiboot_kernel::load(ram, request, &name, data, &header);
    }
    if elf::is_elf(data) {
        let image = elf::parse(&name, data)?;
        let by_pvh = match request.protocol {
            BootProtocol::Auto => image.pvh_entry.is_some() && !image.is_linux,
            BootProtocol::Pvh => true,
        };
        let kind = if by_pvh && !image.is_linux {
            KernelFormat::Pvh
        } else {
            KernelFormat::Vmlinux
        };
        let kernel = ElfKernel {
            name: &name,
            image,
            kind,
            by_pvh,
            bzimage: None,
        };
        return kernel.load(ram, request);
    }
    if bzimage::is_bzimage(data) {
        let header = bzimage::setup_header(&name, data)?;
        let (payload, compression) = bzimage::payload(&name, data, &header)?;
        if !elf::is_elf(&payload) {
            return Err(KernelImageError::malformed(&name, ImageCorruption::NoElfPayload).into());
        }
        let kernel = ElfKernel {
            name: &name,
            image: elf::parse(&name, &payload)?,
            kind: KernelFormat::BzImage { compression },
            by_pvh: request.protocol == BootProtocol::Pvh,
            bzimage: Some((data, &header)),
        };
        return kernel.load(ram, request);
    }
    Err(KernelImageError::NotAKernel {
        name,
        found: describe_content(data),
    }
    .into())
}

/// Returns what kind of file `data` is, in words, for an error message about a file that is not a
/// kernel.
fn describe_content(data: &[u8]) -> &'static str {
    match data {
        [0x1F, 0x8B, ..] => "it is a gzip file (unpack it first)",
        [0xFD, b'7', b'z', b'X', b'Z', ..] => "it is an xz file (unpack it first)",
        [0x28, 0xB5, 0x2F, 0xFD, ..] => "it is a zstd file (unpack it first)",
        [b'!', b'<', b'a', b'r', ..] => "it is an archive or a Debian package",
        [b'0', b'7', b'0', b'7', ..] => "it is a cpio archive (an initrd?)",
        [b'M', b'Z', ..] => "it is a PE image without a Linux setup header",
        [b'#', b'!', ..] => "it is a script",
        [b'Q', b'F', b'I', 0xFB, ..] => {
            "it is a qcow2 image; a disk is for --disk, and its kernel is a file of its own"
        }
        _ if is_disk(data) => "it is a disk; a disk is for --disk, and its kernel is a file of its own",
        _ => "its first bytes match no kernel format",
    }
}

/// Returns whether `data` begins with an MBR, which also precedes a GPT, or with an ext4 file
/// system.
fn is_disk(data: &[u8]) -> bool {
    let at = |offset: usize| data.get(offset..offset + 2);
    at(510) == Some(&[0x55, 0xAA]) || at(0x438) == Some(&[0x53, 0xEF])
}

/// Opens a regular file that is not empty, and returns its size.
fn open_regular(what: &'static str, path: &Path) -> Result<(File, u64), BootError> {
    use std::os::unix::fs::FileTypeExt;
    // O_NONBLOCK: opening a FIFO must not wait for a writer before its type is checked.
    let file = paths::open(path, libc::O_RDONLY | libc::O_NONBLOCK).map_err(|source| BootError::Open {
        what,
        path: path.into(),
        source,
    })?;
    let meta = file.metadata().map_err(|source| BootError::Read {
        what,
        path: path.into(),
        source,
    })?;
    let kind = meta.file_type();
    if !kind.is_file() {
        let kind = if kind.is_dir() {
            "a directory"
        } else if kind.is_fifo() {
            "a pipe"
        } else if kind.is_socket() {
            "a socket"
        } else {
            "a device"
        };
        return Err(BootError::NotAFile {
            what,
            path: path.into(),
            kind,
        });
    }
    if meta.len() == 0 {
        return Err(BootError::Empty {
            what,
            path: path.into(),
        });
    }
    Ok((file, meta.len()))
}

#[expect(clippy::cast_possible_truncation, reason = "x86-64 only: usize has 64 bits")]
fn read_kernel(path: &Path) -> Result<Vec<u8>, BootError> {
    let (file, size_bytes) = open_regular("kernel", path)?;
    let too_large = |size_bytes| BootError::KernelFileTooLarge {
        path: path.into(),
        size_bytes,
        limit_bytes: MAX_KERNEL_FILE_BYTES,
    };
    if size_bytes > MAX_KERNEL_FILE_BYTES {
        return Err(too_large(size_bytes));
    }
    let mut data = Vec::with_capacity(size_bytes as usize);
    // Read one byte more than the limit to detect a larger file. The file may grow while it is
    // read.
    let read = file.take(MAX_KERNEL_FILE_BYTES + 1).read_to_end(&mut data);
    read.map_err(|source| BootError::Read {
        what: "kernel",
        path: path.into(),
        source,
    })?;
    if data.len() as u64 > MAX_KERNEL_FILE_BYTES {
        return Err(too_large(data.len() as u64));
    }
    Ok(data)
}

/// Returns an error if the command line contains a byte that is not printable ASCII or exceeds the
/// kernel's limit.
fn check_cmdline(cmdline: &str, limit_bytes: usize) -> Result<(), BootError> {
    if let Some((position, byte)) = cmdline
        .bytes()
        .enumerate()
        .find(|(_, b)| !(b.is_ascii_graphic() || *b == b' '))
    {
        return Err(BootError::CmdlineByte { byte, position });
    }
    if cmdline.len() > limit_bytes {
        return Err(BootError::CmdlineTooLong {
            len_bytes: cmdline.len(),
            limit_bytes,
        });
    }
    Ok(())
}

/// Copies the kernel's segments into RAM and returns their guest-physical range. Segments must lie
/// between 1 MiB and 4 GiB or, if `low` is set, in conventional memory.
fn load_segments(
    ram: &GuestRam,
    name: &str,
    segments: &[LoadSegment<'_>],
    low: bool,
) -> Result<Range<u64>, BootError> {
    let limit_end = ram.low_end();
    let conventional = layout::LOW_KERNEL_START..EBDA_START;
    let (mut first, mut last) = (u64::MAX, 0);
    for segment in segments {
        let (index, start) = (segment.index, segment.phys);
        let end = start.saturating_add(segment.mem_bytes);
        let in_low = low && start >= conventional.start && end <= conventional.end;
        if start < HIGH_RAM_START && !in_low {
            let high = format!("at {HIGH_RAM_START:#x} or above");
            return Err(BootError::SegmentReserved {
                name: name.into(),
                index,
                start,
                end,
                kind: if low {
                    "a multiboot kernel"
                } else {
                    "a Linux kernel"
                },
                room: match low {
                    true => format!("{high}, or in {:#x}..{:#x}", conventional.start, conventional.end),
                    false => high,
                },
            });
        }
        if end > limit_end {
            return Err(BootError::SegmentOutsideRam {
                name: name.into(),
                index,
                start,
                end,
                limit_end,
            });
        }
        (first, last) = (first.min(start), last.max(end));
    }
    for segment in segments {
        ram.memory()
            .write_slice(segment.data, GuestAddress(segment.phys))
            .map_err(|e| BootError::memory("a kernel segment", segment.phys, e))?;
    }
    Ok(first..last)
}

/// Reads the initrd into RAM within `room`: as high as possible or, if `low` is set, as low as
/// possible. `low` is set for multiboot kernels, because they often map only their first megabytes.
#[expect(clippy::cast_possible_truncation, reason = "x86-64 only: usize has 64 bits")]
fn load_initrd(ram: &GuestRam, path: &Path, room: Range<u64>, low: bool) -> Result<Range<u64>, BootError> {
    let (mut file, size_bytes) = open_regular("initrd", path)?;
    let first = room.start.next_multiple_of(PAGE);
    let room_bytes = room.end.saturating_sub(first);
    // Aligning the start down to a page boundary needs up to one additional page.
    let start = if low {
        first
    } else {
        room.end.saturating_sub(size_bytes) & !(PAGE - 1)
    };
    if size_bytes > room_bytes || start < first {
        return Err(BootError::InitrdTooLarge {
            path: path.into(),
            size_bytes,
            room_bytes,
            kernel_end: room.start,
            limit: room.end,
        });
    }
    ram.memory()
        .read_exact_volatile_from(GuestAddress(start), &mut file, size_bytes as usize)
        .map_err(|e| BootError::Read {
            what: "initrd",
            path: path.into(),
            source: std::io::Error::other(e.to_string()),
        })?;
    Ok(start..start + size_bytes)
}

/// Writes the VM generation ID to guest memory. The ID is written separately from the ACPI tables,
/// because it changes when a snapshot is restored.
///
/// # Errors
/// Returns [`BootError`] if guest memory cannot be written.
pub(crate) fn write_generation_id(ram: &GuestRam, id: [u8; 16]) -> Result<(), BootError> {
    let address = layout::GENERATION_ID;
    ram.memory()
        .write_slice(&id, GuestAddress(address))
        .map_err(|e| BootError::memory("the generation ID", address, e))
}

/// Writes the ACPI tables and the MP table to guest memory.
fn write_firmware_tables(ram: &GuestRam, cpus: VcpuCountRange, pci: bool) -> Result<(), BootError> {
    let mut tables = acpi::tables(cpus, pci);
    tables.push((layout::MP_TABLE, mptable::table(cpus)));
    for (address, bytes) in tables {
        ram.memory()
            .write_slice(&bytes, GuestAddress(address))
            .map_err(|e| BootError::memory("a firmware table", address, e))?;
    }
    Ok(())
}

/// Returns the guest-physical address of the entry point `entry`, which is given either as a
/// physical or as a virtual address within a segment.
fn entry_point(name: &str, entry: u64, segments: &[LoadSegment<'_>]) -> Result<u64, BootError> {
    let inside = |base: u64, s: &LoadSegment<'_>| entry.wrapping_sub(base) < s.mem_bytes;
    if segments.iter().any(|s| inside(s.phys, s)) {
        return Ok(entry);
    }
    segments
        .iter()
        .find(|s| inside(s.virt, s))
        .map(|s| s.phys + (entry - s.virt))
        .ok_or_else(|| BootError::EntryOutside {
            name: name.into(),
            entry,
        })
}

fn text_ranges(code: &[CodeBytes<'_>]) -> Vec<KernelTextRange> {
    code.iter()
        .map(|c| KernelTextRange {
            virt: c.virt,
            phys: c.phys,
            len_bytes: c.bytes.len() as u64,
        })
        .collect()
}

/// Finds the kernel's RDPMC instructions and, if `request` says so, replaces them in guest memory.
fn trap_rdpmc(
    ram: &GuestRam,
    request: &GuestLoadParams<'_>,
    code: &[CodeBytes<'_>],
    symbols: &KernelSymbols,
    orc_ips: &[u64],
    bits: InstructionBitness,
) -> Result<Vec<RdpmcSite>, BootError> {
    let sites = find(code, symbols, orc_ips, bits);
    if request.patch_rdpmc {
        for site in &sites {
            rdpmc::patch(ram.memory(), site)?;
        }
    }
    Ok(sites)
}
