//! Validation of qcow2 headers and top-level tables.
//!
//! Images are untrusted. Headers that refer to other files, require unbounded memory or lead to
//! unbounded table searches are rejected here, and unsupported features are reported with a remedy.
//! Offsets are defined in QEMU's docs/interop/qcow2.txt.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use thiserror::Error;

use crate::disk::open::SECTOR_BYTES;

const MAGIC: [u8; 4] = *b"QFI\xfb";
// Size of the version 2 header and minimum size of the version 3 header, in bytes.
const V2_BYTES: usize = 72;
const V3_BYTES: usize = 104;
/// Base-2 logarithms of the supported cluster sizes in bytes. QEMU supports the same sizes.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// Maximum length of a backing file name, in bytes.
const MAX_NAME: u32 = 1023;
// Maximum sizes of the L1 table and of the refcount table, in bytes. QEMU has the same limits.
const MAX_L1_BYTES: u64 = 32 << 20;
const MAX_REFCOUNT_BYTES: u64 = 8 << 20;
/// Bits of a table entry that contain a file offset.
pub const OFFSET: u64 = 0x00FF_FFFF_FFFF_FE00;

const DIRTY: u64 = 1 << 0;
const CORRUPT: u64 = 1 << 1;
const DATA_FILE: u64 = 1 << 2;
const COMPRESSION: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;

/// Reason why a qcow2 image is rejected.
#[derive(Debug, Error)]
pub enum Qcow2FormatError {
    /// The file is shorter than a qcow2 header.
    #[error("{0} bytes; a header has at least {V2_BYTES}")]
    Short(u64),
    /// The file does not start with the qcow2 magic number.
    #[error("no qcow2 header; omit format=qcow2 for a raw image")]
    Magic,
    /// The version of the qcow2 format is unsupported.
    #[error("unsupported version {0}; must be 2 or 3")]
    Version(u32),
    /// The cluster size of the image is unsupported.
    #[error("clusters of 2^{0} bytes; must be between 2^9 and 2^21")]
    Cluster(u32),
    /// The width of the image's reference counts is unsupported.
    #[error("reference counts of 2^{0} bits; must be between 2^0 and 2^6")]
    Refcount(u32),
    /// The disk size in the header is invalid.
    #[error("disk size of {0} bytes; must be a positive multiple of {SECTOR_BYTES}")]
    Size(u64),
    /// The image is encrypted.
    #[error("unsupported encryption; decrypt the image with qemu-img convert")]
    Encrypted,
    /// The dirty bit of the image is set, so its reference counts may be wrong.
    #[error("the image was not closed properly (dirty); repair it with qemu-img check -r all")]
    Dirty,
    /// The corrupt bit of the image is set.
    #[error("the image is marked as corrupt; try to repair it with qemu-img check -r all")]
    Corrupt,
    /// The image stores its data in an external file.
    #[error("unsupported external data file; merge both files with qemu-img convert -O qcow2")]
    DataFile,
    /// The image uses a compression type other than deflate.
    #[error("unsupported compression other than zlib; convert with qemu-img convert -O qcow2")]
    Compression,
    /// The image uses extended L2 entries, which describe subclusters.
    #[error("unsupported extended L2 entries; convert with qemu-img convert -O qcow2")]
    ExtendedL2,
    /// The header sets unknown incompatible feature bits.
    #[error("unknown features ({0:#x})")]
    Unknown(u64),
    /// A table is misaligned or not completely within the file.
    #[error(
        "the {what} at byte {at} with {bytes} bytes exceeds the file of {file} bytes; the file \
         is truncated or damaged"
    )]
    Place {
        /// Name of the misplaced table.
        what: &'static str,
        /// File offset of the table, in bytes.
        at: u64,
        /// Size of the table, in bytes.
        bytes: u64,
        /// Size of the file, in bytes.
        file: u64,
    },
    /// The L1 table has fewer entries than the disk requires, or is larger than the limit.
    #[error("the L1 table has {entries} entries, but the disk size requires {wanted}")]
    L1 {
        /// Number of entries in the L1 table.
        entries: u32,
        /// Number of entries that the disk requires.
        wanted: u64,
    },
    /// A table entry is outside the file, or two entries have the same offset.
    #[error("entry {index} of the {what} has the invalid offset {at}; the image is damaged")]
    Entry {
        /// Name of the table that contains the entry.
        what: &'static str,
        /// Index of the entry in the table.
        index: usize,
        /// File offset that the table entry contains, in bytes.
        at: u64,
    },
    /// The metadata of the image exceeds the limits of the consistency check.
    #[error("the file or its tables are too large; reduce them with qemu-img convert -o cluster_size=2M")]
    Large,
    /// A referenced cluster is misaligned or starts beyond the end of the file.
    #[error("the tables refer to byte {0} beyond the end of the file; the file is truncated or damaged")]
    Outside(u64),
    /// A cluster of the image is referenced more than once.
    #[error("the tables refer to byte {0} twice; see qemu-img check")]
    Twice(u64),
    /// A cluster in use has a reference count of zero.
    #[error(
        "the cluster at byte {0} is in use but has no reference count; repair the image with \
         qemu-img check -r all"
    )]
    Uncounted(u64),
    /// The backing file name in the header is invalid.
    #[error("the name of the backing file is damaged")]
    BackingName,
    /// A write to the image file failed.
    #[error("cannot write the reference counts")]
    Write(#[source] io::Error),
    /// A read from the image file failed.
    #[error("cannot read the file")]
    Read(#[source] io::Error),
}

/// Validated header fields of a qcow2 image.
#[derive(Debug, PartialEq, Eq)]
pub struct Qcow2Header {
    /// Version of the qcow2 format, 2 or 3.
    pub version: u32,
    /// Size of the disk, in bytes.
    pub bytes: u64,
    /// Size of a cluster, in bytes.
    pub cluster_bytes: u64,
    /// Name of the backing file, if the image has one.
    pub backing: Option<String>,
}

/// Geometry of an image, with the locations and contents of its top-level tables.
#[derive(Debug)]
pub struct Qcow2Layout {
    /// Base-2 logarithm of the cluster size in bytes.
    pub cluster_bits: u32,
    /// Base-2 logarithm of the width of a reference count in bits.
    pub count_order: u32,
    /// File offset of the L1 table, and the file offsets in its entries.
    pub l1: (u64, Vec<u64>),
    /// File offset of the refcount table, and the file offsets in its entries.
    pub counts: (u64, Vec<u64>),
}

/// Location of a table of file offsets.
struct OffsetTable {
    what: &'static str,
    at: u64,
    bytes: u64,
}

impl Qcow2Header {
    /// Reads and validates the header and the top-level tables of the image in `file`, whose size
    /// is `bytes`. [`super::tables::check`] continues with the returned layout.
    ///
    /// # Errors
    /// Returns a [`Qcow2FormatError`] if the image is invalid or unsupported.
    pub fn read(file: &File, bytes: u64) -> Result<(Self, Qcow2Layout), Qcow2FormatError> {
        let mut header = [0; V3_BYTES];
        let count = usize::try_from(bytes).map_or(V3_BYTES, |bytes| bytes.min(V3_BYTES));
        file.read_exact_at(&mut header[..count], 0)
            .map_err(Qcow2FormatError::Read)?;
        let small = |at: usize| u32::from_be_bytes(std::array::from_fn(|n| header[at + n]));
        let large = |at: usize| u64::from_be_bytes(std::array::from_fn(|n| header[at + n]));
        if count < V2_BYTES {
            return Err(Qcow2FormatError::Short(bytes));
        }
        if header[..4] != MAGIC {
            return Err(Qcow2FormatError::Magic);
        }
        let version = small(4);
        if !matches!(version, 2 | 3) {
            return Err(Qcow2FormatError::Version(version));
        }
        if version == 3 {
            if count < V3_BYTES {
                return Err(Qcow2FormatError::Short(bytes));
            }
            check_features(large(72))?;
            if small(96) > 6 {
                return Err(Qcow2FormatError::Refcount(small(96)));
            }
        }
        let cluster_bits = small(20);
        if !CLUSTER_BITS.contains(&cluster_bits) {
            return Err(Qcow2FormatError::Cluster(cluster_bits));
        }
        if small(32) != 0 {
            return Err(Qcow2FormatError::Encrypted);
        }
        let cluster_bytes = 1 << cluster_bits;
        let size = large(24);
        if size == 0 || !size.is_multiple_of(SECTOR_BYTES) || i64::try_from(size).is_err() {
            return Err(Qcow2FormatError::Size(size));
        }
        // An L2 table is one cluster of eight-byte entries, one per data cluster.
        let entries = small(36);
        let wanted = size.div_ceil(cluster_bytes * (cluster_bytes / 8));
        if u64::from(entries) < wanted || u64::from(entries) * 8 > MAX_L1_BYTES {
            return Err(Qcow2FormatError::L1 { entries, wanted });
        }
        let first = OffsetTable {
            what: "L1 table",
            at: large(40),
            bytes: u64::from(entries) * 8,
        };
        let l1 = first.check(file, bytes, cluster_bytes)?;
        let refcounts = OffsetTable {
            what: "refcount table",
            at: large(48),
            bytes: u64::from(small(56)) * cluster_bytes,
        };
        if refcounts.bytes == 0 || refcounts.bytes > MAX_REFCOUNT_BYTES {
            return Err(refcounts.misplaced(bytes));
        }
        let counts = refcounts.check(file, bytes, cluster_bytes)?;
        let claims = Self {
            version,
            bytes: size,
            cluster_bytes,
            backing: backing_name(file, large(8), small(16))?,
        };
        let layout = Qcow2Layout {
            cluster_bits,
            // In version 2, the width of a reference count is always two bytes.
            count_order: if version == 3 { small(96) } else { 4 },
            l1: (first.at, l1),
            counts: (refcounts.at, counts),
        };
        Ok((claims, layout))
    }
}

/// Returns whether a file has the qcow2 magic number.
///
/// The result must be used only in messages that suggest `format=qcow2`. It is not
/// trustworthy, because a guest can write the magic number to its raw disk.
pub fn has_qcow2_magic(file: &File) -> bool {
    let mut first = [0; MAGIC.len()];
    file.read_exact_at(&mut first, 0).is_ok() && first == MAGIC
}

fn check_features(bits: u64) -> Result<(), Qcow2FormatError> {
    let has = |bit| bits & bit != 0;
    match bits {
        _ if has(CORRUPT) => Err(Qcow2FormatError::Corrupt),
        _ if has(DIRTY) => Err(Qcow2FormatError::Dirty),
        _ if has(DATA_FILE) => Err(Qcow2FormatError::DataFile),
        _ if has(COMPRESSION) => Err(Qcow2FormatError::Compression),
        _ if has(EXTENDED_L2) => Err(Qcow2FormatError::ExtendedL2),
        0 => Ok(()),
        unknown => Err(Qcow2FormatError::Unknown(unknown)),
    }
}

/// Returns the backing file name in the header, or `None` if the image has no backing file.
fn backing_name(file: &File, at: u64, bytes: u32) -> Result<Option<String>, Qcow2FormatError> {
    if at == 0 {
        return Ok(None);
    }
    if bytes == 0 || bytes > MAX_NAME {
        return Err(Qcow2FormatError::BackingName);
    }
    let mut name = vec![0; bytes as usize];
    file.read_exact_at(&mut name, at)
        .map_err(|_| Qcow2FormatError::BackingName)?;
    String::from_utf8(name)
        .map(Some)
        .map_err(|_| Qcow2FormatError::BackingName)
}

impl OffsetTable {
    fn misplaced(&self, file: u64) -> Qcow2FormatError {
        Qcow2FormatError::Place {
            what: self.what,
            at: self.at,
            bytes: self.bytes,
            file,
        }
    }

    /// Checks that the table is in the file and that its entries refer to distinct clusters in the
    /// file, so that a walk over all entries terminates. Returns the entries.
    fn check(&self, file: &File, file_bytes: u64, cluster_bytes: u64) -> Result<Vec<u64>, Qcow2FormatError> {
        let end = self.at.checked_add(self.bytes);
        if self.at == 0 || !self.at.is_multiple_of(cluster_bytes) || end.is_none_or(|end| end > file_bytes) {
            return Err(self.misplaced(file_bytes));
        }
        let mut data = vec![0; usize::try_from(self.bytes).map_err(|_| self.misplaced(file_bytes))?];
        file.read_exact_at(&mut data, self.at)
            .map_err(Qcow2FormatError::Read)?;
        let entries: Vec<u64> = data
            .chunks_exact(8)
            .map(|entry| u64::from_be_bytes(std::array::from_fn(|n| entry[n])) & OFFSET)
            .collect();
        let mut places: Vec<(u64, usize)> = Vec::new();
        for (index, at) in entries.iter().copied().enumerate().filter(|(_, at)| *at != 0) {
            // A table that is being extended may reach beyond the end of the file, but starts
            // within it.
            if !at.is_multiple_of(cluster_bytes) || at >= file_bytes {
                let what = self.what;
                return Err(Qcow2FormatError::Entry { what, index, at });
            }
            places.push((at, index));
        }
        places.sort_unstable();
        match places.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            Some(&[_, (at, index)]) => Err(Qcow2FormatError::Entry {
                what: self.what,
                index,
                at,
            }),
            _ => Ok(entries),
        }
    }
}
