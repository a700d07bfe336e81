//! Errors that occur when loading a guest: invalid files and sizes, and unsuitable hosts.

use std::path::PathBuf;

use crate::kvm::call::KvmIoctlError;
use thiserror::Error;

/// Error when loading a guest. A message is one line that names the problem, the limit and the
/// remedy.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BootError {
    /// The file is not a kernel, or is damaged.
    #[error(transparent)]
    Image(#[from] kernel_images::KernelImageError),
    /// Replacing an RDPMC instruction in the kernel failed.
    #[error(transparent)]
    Rdpmc(#[from] guest_patching::rdpmc::RdpmcPatchError),
    /// Opening the kernel or initrd file failed.
    #[error("cannot open {what} {}", path.display())]
    Open {
        /// Role of the file, `kernel` or `initrd`.
        what: &'static str,
        /// Path of the kernel or initrd file.
        path: PathBuf,
        /// Error of open(2).
        source: std::io::Error,
    },
    /// Reading the kernel or initrd file failed.
    #[error("cannot read {what} {}", path.display())]
    Read {
        /// Role of the file, `kernel` or `initrd`.
        what: &'static str,
        /// Path of the kernel or initrd file.
        path: PathBuf,
        /// Error of read(2).
        source: std::io::Error,
    },
    /// The path names a directory, device, pipe or socket instead of a regular file.
    #[error("{what} {} is {kind}, not a regular file", path.display())]
    NotAFile {
        /// Role of the file, `kernel` or `initrd`.
        what: &'static str,
        /// Path of the kernel or initrd file.
        path: PathBuf,
        /// Type of the file that the path names, for example `a directory`.
        kind: &'static str,
    },
    /// The file is empty.
    #[error("{what} {} is empty", path.display())]
    Empty {
        /// Role of the file, `kernel` or `initrd`.
        what: &'static str,
        /// Path of the kernel or initrd file.
        path: PathBuf,
    },
    /// The kernel file exceeds the size limit.
    #[error("kernel {} has {size_bytes} bytes; must be at most {limit_bytes}", path.display())]
    KernelFileTooLarge {
        /// Path of the kernel file.
        path: PathBuf,
        /// Size of the kernel file in bytes.
        size_bytes: u64,
        /// Maximum size of a kernel file in bytes.
        limit_bytes: u64,
    },
    /// A multiboot header requires an unsupported feature.
    #[error("multiboot kernel {name} requires unsupported features (header flags {flags:#x})")]
    MultibootFlags {
        /// Name of the kernel file.
        name: String,
        /// Flags in the multiboot header of the kernel file.
        flags: u32,
    },
    /// A segment of the kernel extends beyond guest RAM.
    #[error(
        "kernel {name}: segment {index} occupies {start:#x}..{end:#x} but usable guest RAM ends at {limit_end:#x}; use a larger --memory"
    )]
    SegmentOutsideRam {
        /// Name of the kernel file.
        name: String,
        /// Index of the segment's program header.
        index: usize,
        /// First guest-physical address of the segment.
        start: u64,
        /// Guest-physical end address of the segment, exclusive.
        end: u64,
        /// Guest-physical end address of usable guest RAM, exclusive.
        limit_end: u64,
    },
    /// A segment of the kernel lies outside the address ranges that kernels of this kind may use,
    /// whatever the size of RAM.
    #[error(
        "kernel {name}: segment {index} occupies {start:#x}..{end:#x}, which is not allowed for \
        {kind}; link it to load {room}"
    )]
    SegmentReserved {
        /// Name of the kernel file.
        name: String,
        /// Index of the segment's program header.
        index: usize,
        /// First guest-physical address of the segment.
        start: u64,
        /// Guest-physical end address of the segment, exclusive.
        end: u64,
        /// Kind of kernel, with its article for the message: `a multiboot kernel` or `a Linux
        /// kernel`.
        kind: &'static str,
        /// Address ranges where the kernel may load, in words, for the message.
        room: String,
    },
    /// The kernel leaves too little free memory below 1 MiB for the boot information.
    #[error(
        "kernel {name} leaves no two free pages below 0x9fc00 for boot data; link it to load at \
        0x100000 or above"
    )]
    LowMemoryFull {
        /// Name of the kernel file.
        name: String,
    },
    /// The entry point lies outside the kernel's segments.
    #[error("kernel {name}: the entry point {entry:#x} is outside the loaded segments")]
    EntryOutside {
        /// Name of the kernel file.
        name: String,
        /// Virtual or physical address of the entry point, as in the kernel file.
        entry: u64,
    },
    /// The kernel has no PVH entry point.
    #[error(
        "kernel {name} has no PVH entry point (an ELF note by the name Xen, of type 18); use --boot-protocol auto"
    )]
    NoPvhEntry {
        /// Name of the kernel file.
        name: String,
    },
    /// The initrd does not fit into the free memory.
    #[error(
        "initrd {} has {size_bytes} bytes but only {room_bytes} are free between the kernel (ends at {kernel_end:#x}) and {limit:#x}; use a larger --memory",
        path.display()
    )]
    InitrdTooLarge {
        /// Path of the initrd.
        path: PathBuf,
        /// Size of the initrd in bytes.
        size_bytes: u64,
        /// Size in bytes of the free memory in which the initrd may be placed.
        room_bytes: u64,
        /// First guest-physical address after the kernel.
        kernel_end: u64,
        /// Guest-physical end address of the memory in which the initrd may be placed, exclusive.
        limit: u64,
    },
    /// The command line is longer than the kernel's limit.
    #[error(
        "the command line has {len_bytes} bytes; must be at most {limit_bytes} for this kernel; \
        shorten --cmdline"
    )]
    CmdlineTooLong {
        /// Length of the command line in bytes.
        len_bytes: usize,
        /// Maximum length of the command line in bytes.
        limit_bytes: usize,
    },
    /// The command line contains a byte that is not printable ASCII.
    #[error("the command line has the byte {byte:#04x} at position {position}; must be printable ASCII")]
    CmdlineByte {
        /// The rejected byte.
        byte: u8,
        /// Position of the rejected byte in the command line, from 0.
        position: usize,
    },
    /// Writing to guest memory failed, although the range was checked before.
    #[error("cannot write {what} into guest memory at {address:#x}")]
    GuestMemory {
        /// Name of the object that could not be written, for example `a firmware table`.
        what: &'static str,
        /// Guest-physical address of the object.
        address: u64,
        /// Error of the write to guest memory.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// KVM rejected a vCPU's initial state.
    #[error("KVM rejected the boot processor's {what}")]
    VcpuState {
        /// Name of the rejected register set, for example `segment registers`.
        what: &'static str,
        /// Error of the KVM ioctl that rejected the registers.
        source: KvmIoctlError,
    },
    /// The host's KVM cannot run a Linux kernel.
    #[error(
        "this host's KVM ({flavour}) runs guest kernels in an instruction emulator and cannot run Linux; run this guest in the lab (`make demo` shows how) or on a host with VT-x or AMD-V; `perfvisor run` without --kernel works here"
    )]
    NeedsFullKvm {
        /// Method by which this host's KVM runs guest code, in words, for the message.
        flavour: String,
    },
}

impl BootError {
    /// Returns the error for a failed write of `what` at `address`.
    pub(super) fn memory(
        what: &'static str,
        address: u64,
        source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
    ) -> Self {
        Self::GuestMemory {
            what,
            address,
            source: source.into(),
        }
    }
}
