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
    #[error("kernel {name} is damaged: {reason}")]
    Malformed {
        /// The file.
        name: String,
        /// What is wrong.
        reason: String,
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
    #[error("kernel {name}: its {method} payload is damaged: {reason}")]
    Unpack {
        /// The file.
        name: String,
        /// gzip, xz, lz4 or zstd.
        method: &'static str,
        /// What the decoder said.
        reason: String,
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

impl ImageError {
    /// A header field that makes no sense.
    pub fn malformed(name: &str, reason: String) -> Self {
        Self::Malformed {
            name: name.into(),
            reason,
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
