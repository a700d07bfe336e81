//! What can be wrong with the files, the sizes and the host a guest is started with.

use std::path::PathBuf;

use crate::kvm::call::CallError;
use thiserror::Error;

/// Why a guest cannot be loaded. Each message is one line: what, the limit, the remedy.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BootError {
    /// The file is no kernel, or is damaged.
    #[error(transparent)]
    Image(#[from] kernel_images::ImageError),
    /// An RDPMC of the kernel was not replaced.
    #[error(transparent)]
    Rdpmc(#[from] crate::rdpmc::PatchError),
    /// A file cannot be opened.
    #[error("cannot open {what} {}", path.display())]
    Open {
        /// `kernel` or `initrd`.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What open(2) said.
        source: std::io::Error,
    },
    /// A file cannot be read.
    #[error("cannot read {what} {}", path.display())]
    Read {
        /// `kernel` or `initrd`.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What read(2) said.
        source: std::io::Error,
    },
    /// A directory, device, pipe or socket where a file is needed.
    #[error("{what} {} is {kind}, not a regular file", path.display())]
    NotAFile {
        /// `kernel` or `initrd`.
        what: &'static str,
        /// The path.
        path: PathBuf,
        /// What it is instead.
        kind: &'static str,
    },
    /// A file of no bytes.
    #[error("{what} {} is empty", path.display())]
    Empty {
        /// `kernel` or `initrd`.
        what: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// A kernel file larger than any kernel.
    #[error("kernel {} has {size_bytes} bytes, more than the limit of {limit_bytes}", path.display())]
    KernelFileTooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        size_bytes: u64,
        /// The limit.
        limit_bytes: u64,
    },
    /// A multiboot header asks for something we do not offer.
    #[error("multiboot kernel {name} requires features we do not offer (header flags {flags:#x})")]
    MultibootFlags {
        /// The file.
        name: String,
        /// Its header flags.
        flags: u32,
    },
    /// A segment reaches outside guest RAM.
    #[error(
        "kernel {name}: segment {index} occupies {start:#x}..{end:#x} but usable guest RAM ends at {limit_end:#x}; use a larger --memory"
    )]
    SegmentOutsideRam {
        /// The file.
        name: String,
        /// Program header index.
        index: usize,
        /// Guest-physical start.
        start: u64,
        /// Guest-physical end.
        end: u64,
        /// Where RAM ends.
        limit_end: u64,
    },
    /// A segment lies where the machine has something else, whatever the size of its memory.
    #[error(
        "kernel {name}: segment {index} occupies {start:#x}..{end:#x}, which {kind} cannot have; link it to load {room}"
    )]
    SegmentReserved {
        /// The file.
        name: String,
        /// Program header index.
        index: usize,
        /// Guest-physical start.
        start: u64,
        /// Guest-physical end.
        end: u64,
        /// What it is.
        kind: &'static str,
        /// Where it may load.
        room: String,
    },
    /// A kernel fills the memory below 1 MiB.
    #[error(
        "kernel {name} leaves no two free pages below 0x9fc00 for what it is handed; link it to load at 0x100000 or above"
    )]
    LowMemoryFull {
        /// The file.
        name: String,
    },
    /// The entry point is not in the kernel.
    #[error("kernel {name}: its entry point {entry:#x} lies in no loaded segment")]
    EntryOutside {
        /// The file.
        name: String,
        /// The entry point.
        entry: u64,
    },
    /// It cannot be entered as asked.
    #[error(
        "kernel {name} has no PVH entry point (an ELF note by the name Xen, of type 18); use --boot-protocol auto"
    )]
    NoPvhEntry {
        /// The file.
        name: String,
    },
    /// The initrd does not fit.
    #[error(
        "initrd {} has {size_bytes} bytes but only {room_bytes} are free between the kernel (ends at {kernel_end:#x}) and {limit:#x}; use a larger --memory",
        path.display()
    )]
    InitrdTooLarge {
        /// The file.
        path: PathBuf,
        /// Its size.
        size_bytes: u64,
        /// Room there is.
        room_bytes: u64,
        /// First address after the kernel.
        kernel_end: u64,
        /// First address the initrd may not reach.
        limit: u64,
    },
    /// The command line is longer than the kernel takes.
    #[error(
        "the command line has {len_bytes} bytes but this kernel takes at most {limit_bytes}; shorten --cmdline"
    )]
    CmdlineTooLong {
        /// Its length.
        len_bytes: usize,
        /// The limit.
        limit_bytes: usize,
    },
    /// A byte the kernel could not be given.
    #[error(
        "the command line has a byte {byte:#04x} at position {position}; only printable ASCII can be passed"
    )]
    CmdlineByte {
        /// The byte.
        byte: u8,
        /// Its position, from 0.
        position: usize,
    },
    /// Writing what was checked to fit failed.
    #[error("cannot write {what} into guest memory at {address:#x}")]
    GuestMemory {
        /// What was written.
        what: &'static str,
        /// Guest-physical address.
        address: u64,
        /// What the memory said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// KVM refused a vCPU's initial state.
    #[error("KVM refused the boot processor's {what}")]
    VcpuState {
        /// Which registers.
        what: &'static str,
        /// What the ioctl said.
        source: CallError,
    },
    /// The host's KVM cannot run a Linux kernel.
    #[error(
        "this host's KVM ({flavour}) runs guest kernels in an instruction emulator and cannot run Linux; run this guest in the lab (`make demo` shows how) or on a host with VT-x or AMD-V; `perfvisor run` without --kernel works here"
    )]
    NeedsFullKvm {
        /// The module.
        flavour: String,
    },
}

impl BootError {
    /// Writing `what` at `address` failed.
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
