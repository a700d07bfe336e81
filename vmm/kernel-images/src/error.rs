//! Errors of the kernel image readers.

/// Error returned when a kernel image cannot be read. Each message is one line and names the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum KernelImageError {
    /// The file is not a kernel image of a supported format.
    #[error(
        "{name} is not a kernel: {found}; accepted are an x86-64 ELF vmlinux, a bzImage, a multiboot v1 image and an \
         ELF image with a PVH entry point"
    )]
    NotAKernel {
        /// Name of the file, or `the built-in guest`.
        name: String,
        /// Detected format of the file.
        found: &'static str,
    },
    /// A header field points past the end of the file.
    #[error(
        "kernel {name} is truncated: {part} needs bytes up to {need_bytes} but the file has {have_bytes}"
    )]
    Truncated {
        /// Name of the file, or `the built-in guest`.
        name: String,
        /// Name of the part that is truncated, such as a header table.
        part: String,
        /// Offset at which the part should end, in bytes.
        need_bytes: u64,
        /// Actual size of the file, in bytes.
        have_bytes: u64,
    },
    /// A header field of the file is invalid.
    #[error("kernel {name} is damaged")]
    Malformed {
        /// Name of the file, or `the built-in guest`.
        name: String,
        /// Type of the damage.
        #[source]
        damage: ImageCorruption,
    },
    /// The bzImage uses a boot protocol older than 2.08.
    #[error("kernel {name} uses boot protocol {major}.{minor:02}; must be 2.08 (Linux 2.6.26) or later")]
    OldProtocol {
        /// Name of the file, or `the built-in guest`.
        name: String,
        /// Major version of the boot protocol.
        major: u8,
        /// Minor version of the boot protocol.
        minor: u8,
    },
    /// The payload uses an unsupported compression method.
    #[error(
        "kernel {name} is compressed with {method}, which is not supported; supported are gzip, xz, lz4 and zstd: rebuild it, or pass the unpacked vmlinux"
    )]
    UnsupportedCompression {
        /// Name of the file, or `the built-in guest`.
        name: String,
        /// Compression method of the payload: bzip2, lzma, lzo or `an unknown method`.
        method: &'static str,
    },
    /// Decompression of the payload failed.
    #[error("kernel {name}: its {method} payload is damaged")]
    Unpack {
        /// Name of the file, or `the built-in guest`.
        name: String,
        /// Compression method of the payload: gzip, xz, lz4 or zstd.
        method: &'static str,
        /// Error of the decoder.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The unpacked payload is larger than the limit.
    #[error("kernel {name}: its {method} payload unpacks to more than {limit_bytes} bytes")]
    UnpackedTooLarge {
        /// Name of the file, or `the built-in guest`.
        name: String,
        /// Compression method of the payload: gzip, xz, lz4 or zstd.
        method: &'static str,
        /// Maximum size of the unpacked payload, in bytes.
        limit_bytes: u64,
    },
    /// The image has no loadable segment.
    #[error("kernel {name} has no loadable segment")]
    NoSegments {
        /// Name of the file, or `the built-in guest`.
        name: String,
    },
}

/// Type of damage in a kernel image.
#[derive(Debug, thiserror::Error)]
pub enum ImageCorruption {
    /// Image for another processor than x86-64.
    #[error("not an x86-64 file")]
    Machine,
    /// File without the ELF magic number.
    #[error("not an ELF file")]
    NoElf,
    /// bzImage payload that is not an ELF image.
    #[error("the payload is not an ELF image")]
    NoElfPayload,
    /// Invalid ELF class (`EI_CLASS`). The value is the class.
    #[error("invalid ELF class {0}")]
    Class(u8),
    /// Big-endian ELF file (`EI_DATA`).
    #[error("unsupported byte order: big-endian")]
    BigEndian,
    /// Damaged header or header table.
    #[error("{part}")]
    Headers {
        /// Name of the damaged header or header table.
        part: &'static str,
        /// Error of the ELF reader.
        source: object::read::Error,
    },
    /// More program headers than permitted.
    #[error("{count} program headers; must be at most {most}")]
    Segments {
        /// Number of program headers in the image.
        count: usize,
        /// Maximum number of program headers of an image.
        most: usize,
    },
    /// Segment that is larger in the file than in memory.
    #[error("segment {index} has {file_bytes:#x} bytes in the file but {mem_bytes:#x} in memory")]
    SegmentSize {
        /// Index of the segment's program header.
        index: usize,
        /// Size of the segment in the file (`p_filesz`), in bytes.
        file_bytes: u64,
        /// Size of the segment in memory (`p_memsz`), in bytes.
        mem_bytes: u64,
    },
    /// Invalid address field in a multiboot header.
    #[error("its multiboot {field} lies {place}")]
    Multiboot {
        /// Name of the invalid header field.
        field: &'static str,
        /// Description of the invalid location to which the header field refers.
        place: &'static str,
    },
}

/// Error in the blocks of an lz4 payload.
#[derive(Debug, thiserror::Error)]
pub enum Lz4BlockError {
    /// A block ends beyond the end of the payload. The value is the size of the block, in bytes.
    #[error("a block of {0} bytes exceeds the payload")]
    PastEnd(usize),
    /// The blocks unpack to more bytes than the size stored at the end of the payload.
    #[error("larger than the {0} bytes that its header declares")]
    Larger(u64),
    /// The blocks unpack to fewer bytes than the size stored at the end of the payload.
    #[error("{found} bytes, but its header declares {claimed}")]
    Smaller {
        /// Actual unpacked size of the blocks, in bytes.
        found: usize,
        /// Unpacked size that the kernel build has stored at the end of the payload, in bytes.
        claimed: u64,
    },
}

impl KernelImageError {
    /// Creates a [`KernelImageError::Malformed`] for the file `name`.
    pub fn malformed(name: &str, damage: ImageCorruption) -> Self {
        Self::Malformed {
            name: name.into(),
            damage,
        }
    }

    /// Creates a [`KernelImageError::Truncated`] for `data` that ends before the end of `part` at
    /// `need_bytes`.
    pub fn truncated(name: &str, part: &str, need_bytes: u64, data: &[u8]) -> Self {
        Self::Truncated {
            name: name.into(),
            part: part.into(),
            need_bytes,
            have_bytes: data.len() as u64,
        }
    }
}
