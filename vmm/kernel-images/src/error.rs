//! What can be wrong with a kernel's file.

/// Why a kernel cannot be read. Each message is one line that names the file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// None of the formats we load.
    #[error(
        "{name} is not a kernel: {found}; accepted are an x86-64 ELF vmlinux, a bzImage and a multiboot v1 image"
    )]
    NotAKernel {
        /// The file or `the built-in guest`.
        name: String,
        /// What it looks like instead.
        found: &'static str,
    },
    /// A header field points past the end of the file.
    #[error(
        "kernel {name} is truncated: {part} needs bytes up to {need_bytes} but the file has {have_bytes}"
    )]
    Truncated {
        /// The file.
        name: String,
        /// Which part is cut off.
        part: String,
        /// First byte after that part.
        need_bytes: u64,
        /// Bytes there are.
        have_bytes: u64,
    },
    /// A header field that makes no sense.
    #[error("kernel {name} is damaged")]
    Malformed {
        /// The file.
        name: String,
        /// What is wrong.
        #[source]
        damage: Damage,
    },
    /// The bzImage is older than boot protocol 2.08.
    #[error("kernel {name} uses boot protocol {major}.{minor:02}; 2.08 (Linux 2.6.26) or later is needed")]
    OldProtocol {
        /// The file.
        name: String,
        /// Protocol major version.
        major: u8,
        /// Protocol minor version.
        minor: u8,
    },
    /// The payload is compressed in a way we do not unpack.
    #[error(
        "kernel {name} is compressed with {method}, which is not supported; supported are gzip, xz, lz4 and zstd: rebuild it, or pass the unpacked vmlinux"
    )]
    UnsupportedCompression {
        /// The file.
        name: String,
        /// bzip2, lzma, lzo or `an unknown method`.
        method: &'static str,
    },
    /// Unpacking failed.
    #[error("kernel {name}: its {method} payload is damaged")]
    Unpack {
        /// The file.
        name: String,
        /// gzip, xz, lz4 or zstd.
        method: &'static str,
        /// What the decoder said.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The payload grows past the limit.
    #[error("kernel {name}: its {method} payload unpacks to more than {limit_bytes} bytes")]
    UnpackedTooLarge {
        /// The file.
        name: String,
        /// gzip, xz, lz4 or zstd.
        method: &'static str,
        /// The limit.
        limit_bytes: u64,
    },
    /// Nothing to load.
    #[error("kernel {name} has no loadable segment")]
    NoSegments {
        /// The file.
        name: String,
    },
}

/// What in a kernel's file makes no sense.
#[derive(Debug, thiserror::Error)]
pub enum Damage {
    /// Its machine is another.
    #[error("it is not for x86-64")]
    Machine,
    /// It has another magic number.
    #[error("it is no ELF file")]
    NoElf,
    /// What a bzImage unpacks to is something else.
    #[error("its payload is not an ELF image")]
    NoElfPayload,
    /// `EI_CLASS`.
    #[error("ELF class {0} is neither 32 nor 64 bits")]
    Class(u8),
    /// `EI_DATA`.
    #[error("it is big-endian")]
    BigEndian,
    /// A header or a table of headers.
    #[error("{part}")]
    Headers {
        /// Which.
        part: &'static str,
        /// What its reader said.
        source: object::read::Error,
    },
    /// More segments than a kernel has.
    #[error("it has {count} program headers, more than {most}")]
    Segments {
        /// So many.
        count: usize,
        /// The most that are read.
        most: usize,
    },
    /// More in the file than in memory.
    #[error("segment {index} has {file_bytes:#x} bytes in the file but {mem_bytes:#x} in memory")]
    SegmentSize {
        /// Index of its program header.
        index: usize,
        /// `p_filesz`.
        file_bytes: u64,
        /// `p_memsz`.
        mem_bytes: u64,
    },
    /// An address field of a multiboot header.
    #[error("its multiboot {field} lies {place}")]
    Multiboot {
        /// Which.
        field: &'static str,
        /// Where it cannot be.
        place: &'static str,
    },
}

/// What is wrong with the blocks of an lz4 payload.
#[derive(Debug, thiserror::Error)]
pub enum BlockError {
    /// A block's size.
    #[error("a block of {0} bytes reaches past the payload's end")]
    PastEnd(usize),
    /// More than what was claimed.
    #[error("it is larger than the {0} bytes it claims")]
    Larger(u64),
    /// Less than that.
    #[error("it has {found} bytes but claims {claimed}")]
    Smaller {
        /// What was unpacked.
        found: usize,
        /// What the build has appended.
        claimed: u64,
    },
}

impl ImageError {
    /// A header field that makes no sense.
    pub fn malformed(name: &str, damage: Damage) -> Self {
        Self::Malformed {
            name: name.into(),
            damage,
        }
    }

    /// `data` ends before `part`, which needs bytes up to `need_bytes`.
    pub fn truncated(name: &str, part: &str, need_bytes: u64, data: &[u8]) -> Self {
        Self::Truncated {
            name: name.into(),
            part: part.into(),
            need_bytes,
            have_bytes: data.len() as u64,
        }
    }
}
