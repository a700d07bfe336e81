//! What a qcow2 image says of itself, looked at before anything is believed.
//!
//! Images come from strangers. What would lead to other files, take memory without bound, or search tables
//! without end is refused here, and what we cannot read is told with a remedy. Offsets are those of QEMU's
//! docs/interop/qcow2.txt.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use thiserror::Error;

use crate::disk::open::SECTOR_BYTES;

const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Bytes of a header of version 2, and of what version 3 adds at least.
const V2_BYTES: usize = 72;
const V3_BYTES: usize = 104;
/// log2 of the bytes of a cluster: from QEMU's least to its most.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// Longest name of a backing file.
const MAX_NAME: u32 = 1023;
/// Most bytes of the L1 table and of the refcount table: QEMU's limits.
const MAX_L1_BYTES: u64 = 32 << 20;
const MAX_REFCOUNT_BYTES: u64 = 8 << 20;
/// The bits of an entry of either table that are an offset.
pub const OFFSET: u64 = 0x00FF_FFFF_FFFF_FE00;

const DIRTY: u64 = 1 << 0;
const CORRUPT: u64 = 1 << 1;
const DATA_FILE: u64 = 1 << 2;
const COMPRESSION: u64 = 1 << 3;
const EXTENDED_L2: u64 = 1 << 4;

/// Why an image is refused.
#[derive(Debug, Error)]
pub enum ClaimError {
    /// Shorter than a header.
    #[error("it has {0} bytes, and a header has {V2_BYTES} at least")]
    Short(u64),
    /// Something else.
    #[error("it does not begin as one does; leave format=qcow2 out if it is a raw image")]
    Magic,
    /// One that is not known.
    #[error("it has version {0}; 2 and 3 are known")]
    Version(u32),
    /// Clusters of a size that is not known.
    #[error("its clusters have 2^{0} bytes; 2^9 to 2^21 are possible")]
    Cluster(u32),
    /// Counts of references that have no known width.
    #[error("its refcounts have 2^{0} bits; 2^0 to 2^6 are possible")]
    Refcount(u32),
    /// No disk.
    #[error("it holds a disk of {0} bytes: a disk has a multiple of {SECTOR_BYTES}, at least one")]
    Size(u64),
    /// Only its owner can read it.
    #[error("it is encrypted; qemu-img convert makes an image that is not")]
    Encrypted,
    /// Its counts of references may be wrong.
    #[error("it was not closed as it should be (dirty); qemu-img check -r all repairs it")]
    Dirty,
    /// Somebody has found damage.
    #[error("it is marked as corrupt; qemu-img check -r all may repair it")]
    Corrupt,
    /// Its data is elsewhere.
    #[error(
        "its data is in another file, and an image cannot name files to us; qemu-img convert -O qcow2 \
         makes one file of both"
    )]
    DataFile,
    /// Not deflate.
    #[error("its compression is not zlib; qemu-img convert -O qcow2 makes one that we read")]
    Compression,
    /// Subclusters.
    #[error("it has extended L2 entries; qemu-img convert -O qcow2 makes one that we read")]
    ExtendedL2,
    /// What nobody knew when this was written.
    #[error("it has features that are not known ({0:#x})")]
    Unknown(u64),
    /// A table that is not in the file, or is where no table can be.
    #[error("its {what} is at byte {at} with {bytes} bytes, in a file of {file}: it is short or damaged")]
    Place {
        /// Which table.
        what: &'static str,
        /// Where it should be.
        at: u64,
        /// How long it should be.
        bytes: u64,
        /// The file's size.
        file: u64,
    },
    /// A table that is too small for the disk, or larger than any.
    #[error("its L1 table has {entries} entries, and the size of its disk asks for {wanted}")]
    L1 {
        /// How many there are.
        entries: u32,
        /// How many there should be.
        wanted: u64,
    },
    /// A table that leads out of the file, or twice to the same place.
    #[error("entry {index} of its {what} leads to byte {at}: it is damaged")]
    Entry {
        /// Which table.
        what: &'static str,
        /// Which entry.
        index: usize,
        /// Where it leads.
        at: u64,
    },
    /// What is looked through has a bound.
    #[error("its file or its tables are too large; qemu-img convert -o cluster_size=2M makes them smaller")]
    Large,
    /// Data that is not there.
    #[error("its tables lead to byte {0}, which is not in the file: it has lost its end, or is damaged")]
    Outside(u64),
    /// Data and something else in one place.
    #[error("its tables lead to byte {0} twice; qemu-img check says what is wrong")]
    Twice(u64),
    /// A cluster that would be taken for a free one.
    #[error("its cluster at byte {0} is in use and not counted; qemu-img check -r all repairs that")]
    Uncounted(u64),
    /// No name.
    #[error("the name of its backing file is damaged")]
    BackingName,
    /// The host cannot write it.
    #[error("its counts cannot be written")]
    Write(#[source] io::Error),
    /// The host cannot read it.
    #[error("it cannot be read")]
    Read(#[source] io::Error),
}

/// What is believed of an image.
#[derive(Debug, PartialEq, Eq)]
pub struct Claims {
    /// 2 or 3.
    pub version: u32,
    /// Bytes of the disk.
    pub bytes: u64,
    /// Bytes of a cluster.
    pub cluster_bytes: u64,
    /// The file that it says it is based on.
    pub backing: Option<String>,
}

/// Where an image's tables are.
#[derive(Debug)]
pub struct Layout {
    /// log2 of the bytes of a cluster.
    pub cluster_bits: u32,
    /// log2 of the bits of a count.
    pub count_order: u32,
    /// The L1 table and the refcount table: where each begins, and its entries' offsets.
    pub l1: (u64, Vec<u64>),
    /// Likewise.
    pub counts: (u64, Vec<u64>),
}

/// A table of offsets in the file.
struct Table {
    what: &'static str,
    at: u64,
    bytes: u64,
}

impl Claims {
    /// Reads and checks what the image in `file` of `bytes` bytes says; and its first tables, with which
    /// [`super::tables::check`] goes on.
    ///
    /// # Errors
    /// [`ClaimError`].
    pub fn read(file: &File, bytes: u64) -> Result<(Self, Layout), ClaimError> {
        let mut header = [0; V3_BYTES];
        let count = usize::try_from(bytes).map_or(V3_BYTES, |bytes| bytes.min(V3_BYTES));
        file.read_exact_at(&mut header[..count], 0)
            .map_err(ClaimError::Read)?;
        let small = |at: usize| u32::from_be_bytes(std::array::from_fn(|n| header[at + n]));
        let large = |at: usize| u64::from_be_bytes(std::array::from_fn(|n| header[at + n]));
        if count < V2_BYTES {
            return Err(ClaimError::Short(bytes));
        }
        if header[..4] != MAGIC {
            return Err(ClaimError::Magic);
        }
        let version = small(4);
        if !matches!(version, 2 | 3) {
            return Err(ClaimError::Version(version));
        }
        if version == 3 {
            if count < V3_BYTES {
                return Err(ClaimError::Short(bytes));
            }
            check_features(large(72))?;
            if small(96) > 6 {
                return Err(ClaimError::Refcount(small(96)));
            }
        }
        let cluster_bits = small(20);
        if !CLUSTER_BITS.contains(&cluster_bits) {
            return Err(ClaimError::Cluster(cluster_bits));
        }
        if small(32) != 0 {
            return Err(ClaimError::Encrypted);
        }
        let cluster_bytes = 1 << cluster_bits;
        let size = large(24);
        if size == 0 || !size.is_multiple_of(SECTOR_BYTES) || i64::try_from(size).is_err() {
            return Err(ClaimError::Size(size));
        }
        // An L2 table is a cluster of entries of eight bytes, each of which is for a cluster.
        let entries = small(36);
        let wanted = size.div_ceil(cluster_bytes * (cluster_bytes / 8));
        if u64::from(entries) < wanted || u64::from(entries) * 8 > MAX_L1_BYTES {
            return Err(ClaimError::L1 { entries, wanted });
        }
        let first = Table {
            what: "L1 table",
            at: large(40),
            bytes: u64::from(entries) * 8,
        };
        let l1 = first.check(file, bytes, cluster_bytes)?;
        let refcounts = Table {
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
        let layout = Layout {
            cluster_bits,
            // Two bytes in version 2.
            count_order: if version == 3 { small(96) } else { 4 },
            l1: (first.at, l1),
            counts: (refcounts.at, counts),
        };
        Ok((claims, layout))
    }
}

/// Whether a file begins as an image does: reason to ask whether somebody forgot to say so, and for no more.
/// A guest can write that to its raw disk.
pub fn begins_as_one(file: &File) -> bool {
    let mut first = [0; MAGIC.len()];
    file.read_exact_at(&mut first, 0).is_ok() && first == MAGIC
}

fn check_features(bits: u64) -> Result<(), ClaimError> {
    let has = |bit| bits & bit != 0;
    match bits {
        _ if has(CORRUPT) => Err(ClaimError::Corrupt),
        _ if has(DIRTY) => Err(ClaimError::Dirty),
        _ if has(DATA_FILE) => Err(ClaimError::DataFile),
        _ if has(COMPRESSION) => Err(ClaimError::Compression),
        _ if has(EXTENDED_L2) => Err(ClaimError::ExtendedL2),
        0 => Ok(()),
        unknown => Err(ClaimError::Unknown(unknown)),
    }
}

/// `None`: it says that it has none.
fn backing_name(file: &File, at: u64, bytes: u32) -> Result<Option<String>, ClaimError> {
    if at == 0 {
        return Ok(None);
    }
    if bytes == 0 || bytes > MAX_NAME {
        return Err(ClaimError::BackingName);
    }
    let mut name = vec![0; bytes as usize];
    file.read_exact_at(&mut name, at)
        .map_err(|_| ClaimError::BackingName)?;
    String::from_utf8(name)
        .map(Some)
        .map_err(|_| ClaimError::BackingName)
}

impl Table {
    fn misplaced(&self, file: u64) -> ClaimError {
        ClaimError::Place {
            what: self.what,
            at: self.at,
            bytes: self.bytes,
            file,
        }
    }

    /// It is in the file, and each of its entries leads to a cluster of its own in the file: so a search
    /// through all that it leads to ends with the file. Its entries.
    fn check(&self, file: &File, file_bytes: u64, cluster_bytes: u64) -> Result<Vec<u64>, ClaimError> {
        let end = self.at.checked_add(self.bytes);
        if self.at == 0 || !self.at.is_multiple_of(cluster_bytes) || end.is_none_or(|end| end > file_bytes) {
            return Err(self.misplaced(file_bytes));
        }
        let mut data = vec![0; usize::try_from(self.bytes).map_err(|_| self.misplaced(file_bytes))?];
        file.read_exact_at(&mut data, self.at).map_err(ClaimError::Read)?;
        let entries: Vec<u64> = data
            .chunks_exact(8)
            .map(|entry| u64::from_be_bytes(std::array::from_fn(|n| entry[n])) & OFFSET)
            .collect();
        let mut places: Vec<(u64, usize)> = Vec::new();
        for (index, at) in entries.iter().copied().enumerate().filter(|(_, at)| *at != 0) {
            // A table that is being extended may end with the file; it has begun in it.
            if !at.is_multiple_of(cluster_bytes) || at >= file_bytes {
                let what = self.what;
                return Err(ClaimError::Entry { what, index, at });
            }
            places.push((at, index));
        }
        places.sort_unstable();
        match places.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            Some(&[_, (at, index)]) => Err(ClaimError::Entry {
                what: self.what,
                index,
                at,
            }),
            _ => Ok(entries),
        }
    }
}
