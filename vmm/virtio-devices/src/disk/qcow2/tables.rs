//! Consistency check of a qcow2 image's clusters: each referenced cluster must be in the file, have
//! a reference count, and be referenced only once.
//!
//! `imago` trusts the tables of an image. If a used cluster has no reference count, `imago`
//! searches for a free cluster forever (0.2.6). If a cluster holds both data and a table, a guest
//! can write to the table. The tables are therefore checked before `imago` uses them, like by
//! `qemu-img check`, in bounded time and memory.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use super::claims::{OFFSET, Qcow2FormatError, Qcow2Layout};

/// Maximum number of clusters in an image file. The bitmaps of the consistency check have one bit
/// per cluster.
const MAX_CLUSTERS: u64 = 1 << 30;
/// Maximum total size of an image's L2 tables, in bytes. Sufficient for a disk of 8 TiB with
/// clusters of 64 KiB.
const MAX_L2_BYTES: u64 = 1 << 30;
/// Flag of an L2 entry that refers to compressed data.
const COMPRESSED: u64 = 1 << 62;

/// Set of clusters of a file, as a bitmap.
struct ClusterSet(Vec<u64>);

impl ClusterSet {
    fn new(count: u64) -> Self {
        Self(vec![0; usize::try_from(count.div_ceil(64)).unwrap_or(0)])
    }

    fn word(cluster: u64) -> (usize, u64) {
        (
            usize::try_from(cluster / 64).unwrap_or(usize::MAX),
            1 << (cluster % 64),
        )
    }

    fn has(&self, cluster: u64) -> bool {
        let (word, bit) = Self::word(cluster);
        self.0.get(word).is_some_and(|bits| bits & bit != 0)
    }

    /// Returns the union of this set and `other`, in ascending order.
    fn with<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = u64> + 'a {
        let words = (0u64..).zip(self.0.iter().zip(&other.0));
        let taken = words
            .map(|(n, (one, other))| (n, one | other))
            .filter(|(_, bits)| *bits != 0);
        taken.flat_map(|(n, bits)| {
            (0..64)
                .filter(move |bit| bits & (1 << bit) != 0)
                .map(move |bit| n * 64 + bit)
        })
    }

    /// Adds a cluster. Returns `false` if the cluster is outside the file or already in the set.
    fn add(&mut self, cluster: u64) -> bool {
        let (word, bit) = Self::word(cluster);
        let Some(bits) = self.0.get_mut(word) else {
            return false;
        };
        let fresh = *bits & bit == 0;
        *bits |= bit;
        fresh
    }
}

/// State of the consistency check of a qcow2 image.
struct ConsistencyCheck<'f> {
    file: &'f File,
    layout: &'f Qcow2Layout,
    /// Number of clusters in the image file. The last one may be incomplete.
    count: u64,
    /// Clusters that may be referenced only once.
    whole: ClusterSet,
    /// Clusters with compressed data, which may be referenced several times.
    shared: ClusterSet,
}

/// Checks the tables of an image. `layout` contains its top-level tables, and `file_bytes` is the
/// size of its file. If `written` is `true`, also sets missing reference counts and returns their
/// number.
///
/// A killed VM or a power loss can leave clusters without reference counts, because counts and
/// references are not written atomically.
///
/// # Errors
/// Returns a [`Qcow2FormatError`] if the tables are inconsistent or too large.
pub fn check(
    file: &File,
    file_bytes: u64,
    layout: &Qcow2Layout,
    written: bool,
) -> Result<u64, Qcow2FormatError> {
    let count = file_bytes.div_ceil(1 << layout.cluster_bits);
    let l2_bytes = (layout.l1.1.iter().filter(|at| **at != 0).count() as u64) << layout.cluster_bits;
    if count > MAX_CLUSTERS || l2_bytes > MAX_L2_BYTES {
        return Err(Qcow2FormatError::Large);
    }
    let mut walk = ConsistencyCheck {
        file,
        layout,
        count,
        whole: ClusterSet::new(count),
        shared: ClusterSet::new(count),
    };
    walk.run()?;
    // A read-only image needs no repair, because no cluster is allocated in it.
    if written { walk.count() } else { Ok(0) }
}

impl ConsistencyCheck<'_> {
    fn run(&mut self) -> Result<(), Qcow2FormatError> {
        // The first cluster contains the header.
        self.take(0)?;
        for (at, entries) in [&self.layout.l1, &self.layout.counts] {
            let bytes = entries.len() as u64 * 8;
            let clusters = bytes.div_ceil(1 << self.layout.cluster_bits);
            for n in 0..clusters {
                self.take(at + (n << self.layout.cluster_bits))?;
            }
            for at in entries.iter().filter(|at| **at != 0) {
                self.take(*at)?;
            }
        }
        let mut table = vec![0; 1 << self.layout.cluster_bits];
        for at in self.layout.l1.1.iter().filter(|at| **at != 0) {
            self.read(&mut table, *at)?;
            for entry in table.chunks_exact(8) {
                let entry = u64::from_be_bytes(std::array::from_fn(|n| entry[n]));
                if entry & COMPRESSED != 0 {
                    self.take_compressed(entry)?;
                } else if entry & OFFSET != 0 {
                    self.take(entry & OFFSET)?;
                }
            }
        }
        Ok(())
    }

    /// Marks the cluster at byte offset `at` as referenced. Another reference to it is an error.
    fn take(&mut self, at: u64) -> Result<(), Qcow2FormatError> {
        let cluster = at >> self.layout.cluster_bits;
        let aligned = at.is_multiple_of(1 << self.layout.cluster_bits);
        if !aligned || cluster >= self.count {
            return Err(Qcow2FormatError::Outside(at));
        }
        if self.shared.has(cluster) || !self.whole.add(cluster) {
            return Err(Qcow2FormatError::Twice(at));
        }
        Ok(())
    }

    /// Marks the clusters of compressed data as referenced. The data may extend beyond the end of
    /// the file, because its size is given in sectors.
    fn take_compressed(&mut self, entry: u64) -> Result<(), Qcow2FormatError> {
        // Bits above 61 - (cluster_bits - 8) hold the number of additional sectors.
        let offset_bits = 62 - (self.layout.cluster_bits - 8);
        let at = entry & ((1 << offset_bits) - 1);
        let sectors = (entry & (COMPRESSED - 1)) >> offset_bits;
        let first = at >> self.layout.cluster_bits;
        if first >= self.count {
            return Err(Qcow2FormatError::Outside(at));
        }
        let end = (at & !511) + (sectors + 1) * 512;
        let last = ((end - 1) >> self.layout.cluster_bits).min(self.count - 1);
        for cluster in first..=last {
            if self.whole.has(cluster) {
                return Err(Qcow2FormatError::Twice(at));
            }
            self.shared.add(cluster);
        }
        Ok(())
    }

    /// Sets the missing reference counts of referenced clusters and returns their number. Rejects
    /// the image if a cluster with compressed data has no reference count.
    fn count(&self) -> Result<u64, Qcow2FormatError> {
        // A refcount block is one cluster.
        let per_block = 1u64 << (self.layout.cluster_bits + 3 - self.layout.count_order);
        let mut block = vec![0; 1 << self.layout.cluster_bits];
        let (mut read, mut missing) = (None, 0);
        for cluster in self.whole.with(&self.shared) {
            let index = usize::try_from(cluster / per_block).unwrap_or(usize::MAX);
            let at = self.layout.counts.1.get(index).copied().unwrap_or(0);
            if at == 0 {
                return Err(Qcow2FormatError::Uncounted(cluster << self.layout.cluster_bits));
            }
            if read != Some(index) {
                self.read(&mut block, at)?;
                read = Some(index);
            }
            let within = cluster % per_block;
            if is_zero(&block, within, self.layout.count_order) {
                // Reject the image: several runs of compressed data may share the cluster, so a
                // count of 1 may be wrong. An interrupted VM does not leave this state.
                if self.shared.has(cluster) {
                    return Err(Qcow2FormatError::Uncounted(cluster << self.layout.cluster_bits));
                }
                let changed = set_one(&mut block, within, self.layout.count_order);
                let place = at + changed.start as u64;
                self.file
                    .write_all_at(&block[changed], place)
                    .map_err(Qcow2FormatError::Write)?;
                missing += 1;
            }
        }
        Ok(missing)
    }

    /// Reads from the file at byte offset `at`. Bytes beyond the end of the file read as zeros.
    fn read(&self, data: &mut [u8], at: u64) -> Result<(), Qcow2FormatError> {
        let mut done = 0;
        while done < data.len() {
            match self.file.read_at(&mut data[done..], at + done as u64) {
                Ok(0) => {
                    data[done..].fill(0);
                    break;
                }
                Ok(count) => done += count,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(Qcow2FormatError::Read(error)),
            }
        }
        Ok(())
    }
}

/// Returns whether reference count number `index` in the refcount block `block` is zero. Each count
/// has 2^`order` bits. Counts narrower than a byte start at the least significant bits.
fn is_zero(block: &[u8], index: u64, order: u32) -> bool {
    let bit = usize::try_from(index << order).unwrap_or(usize::MAX);
    let bits = 1usize << order;
    if bits >= 8 {
        let bytes = block.get(bit / 8..(bit + bits) / 8);
        bytes.is_none_or(|bytes| bytes.iter().all(|byte| *byte == 0))
    } else {
        let mask = ((1u16 << bits) - 1) << (bit % 8);
        block.get(bit / 8).is_none_or(|byte| u16::from(*byte) & mask == 0)
    }
}

/// Changes reference count number `index` in the refcount block `block` from 0 to 1. Returns the
/// range of modified bytes.
fn set_one(block: &mut [u8], index: u64, order: u32) -> Range<usize> {
    let bit = usize::try_from(index << order).unwrap_or(usize::MAX);
    let bits = 1usize << order;
    // Counts of one byte or more are big-endian, so the last byte is set. For a narrower count, its
    // lowest bit is set.
    let (byte, one) = if bits >= 8 {
        ((bit + bits) / 8 - 1, 1)
    } else {
        (bit / 8, 1 << (bit % 8))
    };
    match block.get_mut(byte) {
        Some(value) => {
            *value |= one;
            byte..byte + 1
        }
        None => 0..0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reference_counts_of_all_widths_are_read() {
        for order in 0..=6 {
            for index in [0u64, 1, 7, 8, 63] {
                let mut block = vec![0; 512];
                assert!(is_zero(&block, index, order));
                let bit = usize::try_from(index << order).unwrap();
                // Most significant bit of the count.
                if order < 3 {
                    let highest = bit + (1 << order) - 1;
                    block[highest / 8] |= 1 << (highest % 8);
                } else {
                    block[bit / 8] = 0x80;
                }
                assert!(!is_zero(&block, index, order), "{order} {index}");
                assert!(is_zero(&block, index + 1, order), "{order} {index}");
                assert!(index == 0 || is_zero(&block, index - 1, order), "{order} {index}");
                let mut block = vec![0; 512];
                let changed = set_one(&mut block, index, order);
                assert_eq!(changed.len(), 1);
                assert!(!is_zero(&block, index, order), "{order} {index}");
                assert_eq!(block.iter().map(|byte| byte.count_ones()).sum::<u32>(), 1);
                if order >= 3 {
                    assert_eq!(block[changed.start], 1, "big-endian");
                    assert_eq!((changed.start + 1) % (1 << (order - 3)), 0);
                }
            }
        }
    }
}
