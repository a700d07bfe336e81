//! Allocates guest memory from anonymous memory, a memfd that other processes can map, or huge
//! pages, and releases its pages.
#![expect(unsafe_code, reason = "memfd_create(2), madvise(2), fallocate(2), mmap(2)")]

use std::ffi::CStr;
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::str::FromStr;
use std::sync::Arc;

use thiserror::Error;
use vm_memory::mmap::{MmapRegionBuilder, MmapRegionError};
use vm_memory::{
    Bytes as _, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap, MemoryRegionAddress, MmapRegion,
};

/// Page size of `--hugepages 2M` in bytes.
pub const HUGE_PAGE_BYTES: u64 = HUGE as u64;
/// [`HUGE_PAGE_BYTES`] as a `usize`.
const HUGE: usize = 2 << 20;
/// Maximum number of attempts to create an aligned mapping. The second attempt succeeds, unless
/// another thread maps memory at the same time.
const MAPPING_TRIES: usize = 8;
/// Minimum length in bytes of a diff's range that is mapped into guest memory. A shorter range is
/// copied.
const MIN_MAPPED_BYTES: u64 = 64 << 10;
/// Maximum number of ranges that are mapped for all diffs of a VM together. Further ranges are
/// copied. A mapped range adds two mappings to the process, and the kernel allows 65,530 by default
/// (`vm.max_map_count`).
const MAX_MAPPED_RUNS: usize = 8 << 10;
/// sysfs file with the number of free huge pages.
const FREE_HUGE_PAGES: &str = "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
/// sysfs file with the policy for transparent huge pages.
const TRANSPARENT: &str = "/sys/kernel/mm/transparent_hugepage/enabled";

/// Allocation options of guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryBackingConfig {
    /// `true` to use a memfd, which another process can map. Required by vhost-user back ends.
    pub shared: bool,
    /// Use of huge pages for guest memory.
    pub huge_pages: HugePages,
    /// `true` to allocate all pages before the guest starts.
    pub prealloc: bool,
}

/// Use of huge pages for guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// No huge pages are requested; the host's policy applies.
    #[default]
    Off,
    /// Transparent huge pages, requested with madvise(2).
    Transparent,
    /// Pages of 2 MiB that the host's administrator has reserved (hugetlbfs).
    Reserved,
}

/// Error when parsing [`HugePages`] from `--hugepages`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("must be off, transparent (if the kernel can allocate them) or 2M (reserved on the host)")]
pub struct ParseHugePagesError;

impl FromStr for HugePages {
    type Err = ParseHugePagesError;

    fn from_str(text: &str) -> Result<Self, ParseHugePagesError> {
        match text {
            "off" => Ok(HugePages::Off),
            "transparent" => Ok(HugePages::Transparent),
            "2M" | "2m" => Ok(HugePages::Reserved),
            _ => Err(ParseHugePagesError),
        }
    }
}

/// Error when allocating guest memory with the requested options.
#[derive(Debug, Error)]
pub enum MemoryBackingError {
    /// Transparent huge pages are disabled on the host.
    #[error(
        "--hugepages transparent: disabled on this host ({TRANSPARENT} is {0}); enable them there, \
        or omit --hugepages"
    )]
    NoTransparent(String),
    /// The size of guest memory is not a multiple of the huge page size.
    #[error("--hugepages 2M: the memory size of {0} bytes must be a multiple of 2 MiB; round --memory up")]
    NotWhole(u64),
    /// The host has too few free huge pages.
    #[error(
        "--hugepages 2M: {needed} pages are needed, but this host has {free} free; reserve more \
        (sysctl vm.nr_hugepages), or omit --hugepages"
    )]
    TooFew {
        /// Number of huge pages that the guest needs.
        needed: u64,
        /// Number of free huge pages.
        free: u64,
    },
    /// A system call of the allocation failed.
    #[error("{0} failed")]
    Os(&'static str, #[source] io::Error),
    /// The host rejected a mapping.
    #[error("the mapping was refused")]
    Map(#[source] MmapRegionError),
    /// The mappings are not a valid collection of regions.
    #[error("the mappings overlap")]
    Regions(#[source] vm_memory::GuestRegionCollectionError),
    /// Preallocating the pages failed.
    #[error("--prealloc: cannot allocate all guest memory (MADV_POPULATE_WRITE, Linux 5.14 and later)")]
    Populate(#[source] io::Error),
}

/// Maps `ranges`, which are guest-physical, to host memory without allocating pages.
///
/// # Errors
/// Returns a [`MemoryBackingError`] if the host rejects a mapping or an option.
pub fn map(
    ranges: &[(GuestAddress, usize)],
    kind: MemoryBackingConfig,
) -> Result<GuestMemoryMmap, MemoryBackingError> {
    check(ranges, kind.huge_pages)?;
    let regions = ranges
        .iter()
        .map(|&(start, len)| map_one(start, len, kind).map(Arc::new))
        .collect::<Result<Vec<_>, _>>()?;
    let memory = GuestMemoryMmap::from_arc_regions(regions).map_err(MemoryBackingError::Regions)?;
    for region in memory.iter() {
        // Guest memory is large and belongs to the guest, so core dumps exclude it.
        advise(region, libc::MADV_DONTDUMP)
            .map_err(|e| MemoryBackingError::Os("madvise(MADV_DONTDUMP)", e))?;
        if kind.huge_pages == HugePages::Transparent {
            advise(region, libc::MADV_HUGEPAGE)
                .map_err(|e| MemoryBackingError::Os("madvise(MADV_HUGEPAGE)", e))?;
        }
    }
    Ok(memory)
}

/// Replaces the contents of `memory` by a private mapping of `file`. Offsets in the file are
/// offsets in RAM. No other thread may access the memory.
///
/// # Errors
/// Returns [`MemoryBackingError::Os`] if mmap(2) or madvise(2) fails.
#[expect(clippy::cast_possible_truncation, reason = "x86-64 only: usize has 64 bits")]
pub fn map_file(memory: &GuestMemoryMmap, file: &File) -> Result<(), MemoryBackingError> {
    let mut offset = 0;
    for region in memory.iter() {
        map_range(region, 0..region.len() as usize, file, offset)?;
        offset += region.len();
    }
    Ok(())
}

/// Replaces ranges of `memory` by the contents of files. Each of `layers` is a file with its
/// ranges, and a later layer replaces an earlier one. A range is an offset in RAM, which is also
/// the offset in the file, and a length.
///
/// Long ranges are mapped, and short ranges are copied. After 8,192 mapped ranges, long ranges are
/// copied too, because a process has a limited number of mappings. No other thread may access the
/// memory.
///
/// # Errors
/// Returns [`MemoryBackingError::Os`] if mmap(2), madvise(2) or a read of a file fails.
pub fn map_layers<'a>(
    memory: &GuestMemoryMmap,
    layers: impl Iterator<Item = (&'a File, &'a [(u64, u64)])>,
) -> Result<(), MemoryBackingError> {
    let mut mapped = 0;
    for (file, ranges) in layers {
        for range in ranges {
            map_or_copy(memory, file, *range, &mut mapped)?;
        }
    }
    Ok(())
}

/// Replaces one range as described for [`map_layers`]. `mapped` is the number of mapped ranges so
/// far, and is incremented if this range is mapped.
#[expect(clippy::cast_possible_truncation, reason = "x86-64 only: usize has 64 bits")]
fn map_or_copy(
    memory: &GuestMemoryMmap,
    file: &File,
    (start, bytes): (u64, u64),
    mapped: &mut usize,
) -> Result<(), MemoryBackingError> {
    let failed = |e| MemoryBackingError::Os("read of the memory file", e);
    let mut buffer = [0; MIN_MAPPED_BYTES as usize];
    let mut offset = 0;
    for region in memory.iter() {
        // The part of the range in this region, as offsets in the file.
        let (first, last) = (start.max(offset), (start + bytes).min(offset + region.len()));
        if first < last && last - first >= MIN_MAPPED_BYTES && *mapped < MAX_MAPPED_RUNS {
            *mapped += 1;
            let range = (first - offset) as usize..(last - offset) as usize;
            map_range(region, range, file, first)?;
        } else {
            let mut at = first;
            while at < last {
                let piece = &mut buffer[..MIN_MAPPED_BYTES.min(last - at) as usize];
                file.read_exact_at(piece, at).map_err(failed)?;
                let written = region.write_slice(piece, MemoryRegionAddress(at - offset));
                written.map_err(|e| failed(io::Error::other(e)))?;
                at += piece.len() as u64;
            }
        }
        offset += region.len();
    }
    Ok(())
}

/// Replaces the bytes `range` of a region by a private mapping of `file`. The mapping begins at
/// `offset` in the file.
fn map_range(
    region: &GuestRegionMmap,
    range: Range<usize>,
    file: &File,
    offset: u64,
) -> Result<(), MemoryBackingError> {
    let failed = |e| MemoryBackingError::Os("mmap of the memory file", e);
    let offset =
        libc::off_t::try_from(offset).map_err(|_| failed(io::Error::from_raw_os_error(libc::EFBIG)))?;
    debug_assert!(range.start < range.end && range.end as u64 <= region.len());
    let address = region.as_ptr().wrapping_add(range.start).cast();
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the range is part of one mapping of guest memory, without Rust references, and the
    // new mapping replaces it. Its owner unmaps the range as before. A file that is truncated later
    // causes SIGBUS, which ends the VM.
    let mapped = unsafe { libc::mmap(address, range.len(), prot, flags, file.as_raw_fd(), offset) };
    if mapped == libc::MAP_FAILED {
        return Err(failed(io::Error::last_os_error()));
    }
    // Advice belongs to the mapping.
    // SAFETY: the range is the mapping made above, and the advice changes no contents.
    match unsafe { libc::madvise(address, range.len(), libc::MADV_DONTDUMP) } {
        0 => Ok(()),
        _ => Err(MemoryBackingError::Os(
            "madvise(MADV_DONTDUMP)",
            io::Error::last_os_error(),
        )),
    }
}

/// Zeroes all of `memory` and releases its pages to the host. No other thread may access the
/// memory.
///
/// # Errors
/// Returns a [`MemoryBackingError`] if a system call fails.
pub fn clear(memory: &GuestMemoryMmap, kind: MemoryBackingConfig) -> Result<(), MemoryBackingError> {
    for region in memory.iter() {
        match region.file_offset() {
            Some(at) => punch(at, region.len()).map_err(|e| MemoryBackingError::Os("fallocate", e))?,
            None => advise(region, libc::MADV_DONTNEED)
                .map_err(|e| MemoryBackingError::Os("madvise(MADV_DONTNEED)", e))?,
        }
    }
    populate(memory, kind)
}

fn check(ranges: &[(GuestAddress, usize)], huge_pages: HugePages) -> Result<(), MemoryBackingError> {
    match huge_pages {
        HugePages::Off => Ok(()),
        HugePages::Transparent => {
            let says = fs::read_to_string(TRANSPARENT).unwrap_or_default();
            match transparent(&says) {
                Some("always" | "madvise") => Ok(()),
                other => Err(MemoryBackingError::NoTransparent(
                    other.unwrap_or("nothing").to_owned(),
                )),
            }
        }
        HugePages::Reserved => {
            let all: u64 = ranges.iter().map(|&(_, len)| len as u64).sum();
            if !all.is_multiple_of(HUGE_PAGE_BYTES) {
                return Err(MemoryBackingError::NotWhole(all));
            }
            let (needed, free) = (all / HUGE_PAGE_BYTES, free_huge_pages());
            if needed > free {
                return Err(MemoryBackingError::TooFew { needed, free });
            }
            Ok(())
        }
    }
}

/// Returns the selected policy for transparent huge pages. `says` is the contents of the sysfs
/// file, in which brackets mark the selected policy.
fn transparent(says: &str) -> Option<&str> {
    Some(says.split_once('[')?.1.split_once(']')?.0)
}

fn free_huge_pages() -> u64 {
    fs::read_to_string(FREE_HUGE_PAGES)
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .unwrap_or(0)
}

fn map_one(
    start: GuestAddress,
    len: usize,
    kind: MemoryBackingConfig,
) -> Result<GuestRegionMmap, MemoryBackingError> {
    let region = at_a_boundary(|| map_anywhere(len, kind))?;
    GuestRegionMmap::new(region, start).ok_or(MemoryBackingError::Map(MmapRegionError::InvalidOffsetLength))
}

fn map_anywhere(len: usize, kind: MemoryBackingConfig) -> Result<MmapRegion, MemoryBackingError> {
    let huge = kind.huge_pages == HugePages::Reserved;
    let mut builder = MmapRegionBuilder::new(len).with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE);
    builder = if kind.shared || huge {
        let file = memfd(len as u64, huge).map_err(|e| MemoryBackingError::Os("memfd_create", e))?;
        // Reserve huge pages with the mapping. Otherwise a guest that finds none left would kill
        // the process with SIGBUS.
        let reserve = if huge { 0 } else { libc::MAP_NORESERVE };
        builder
            .with_file_offset(FileOffset::new(file, 0))
            .with_mmap_flags(libc::MAP_SHARED | reserve)
            .with_hugetlbfs(huge)
    } else {
        builder.with_mmap_flags(libc::MAP_ANONYMOUS | libc::MAP_PRIVATE | libc::MAP_NORESERVE)
    };
    builder.build().map_err(|e| match e {
        MmapRegionError::Mmap(e) if huge && e.raw_os_error() == Some(libc::ENOMEM) => {
            MemoryBackingError::TooFew {
                needed: len as u64 / HUGE_PAGE_BYTES,
                free: free_huge_pages(),
            }
        }
        other => MemoryBackingError::Map(other),
    })
}

/// Calls `map` until the mapping starts at a multiple of the huge page size, as guest addresses do.
/// KVM can map a huge page of the host as a huge page of the guest only if both are aligned. Linux
/// before 6.7 does not align mappings, and later versions align only mappings of some lengths.
/// After several attempts, returns an unaligned mapping, which also works.
fn at_a_boundary(
    map: impl Fn() -> Result<MmapRegion, MemoryBackingError>,
) -> Result<MmapRegion, MemoryBackingError> {
    let mut above = Vec::new();
    for _ in 0..MAPPING_TRIES {
        let region = map()?;
        let (address, len) = (region.as_ptr() as usize, region.size());
        let excess = address % HUGE;
        if excess == 0 || len < HUGE {
            return Ok(region);
        }
        drop(region);
        // The kernel allocates the highest free addresses. Reserving the excess at the end shifts
        // the next mapping down by the same amount.
        above.extend(Reserved::at(address + len - excess, excess));
    }
    map()
}

/// A reserved address range. No mapping is placed in it while this value exists.
struct Reserved {
    address: usize,
    len: usize,
}

impl Reserved {
    /// Reserves an address range. Returns `None` if something is already mapped there.
    fn at(address: usize, len: usize) -> Option<Self> {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED_NOREPLACE;
        let hint = std::ptr::without_provenance_mut(address);
        // SAFETY: the mapping replaces no other one and cannot be accessed. Kernels without the
        // flag treat the address as a hint and replace nothing either.
        let got = unsafe { libc::mmap(hint, len, libc::PROT_NONE, flags, -1, 0) };
        (got != libc::MAP_FAILED).then(|| Self {
            address: got as usize,
            len,
        })
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: this value owns the mapping, which is `len` bytes long and was never accessed.
        unsafe { libc::munmap(std::ptr::without_provenance_mut(self.address), self.len) };
    }
}

/// Creates a memfd of `len_bytes`, whose size is sealed. Without the seal, a back end could
/// truncate the memfd and cause accesses of the VMM to fail with SIGBUS.
fn memfd(len_bytes: u64, huge: bool) -> io::Result<File> {
    const NAME: &CStr = c"perfvisor-guest-memory";
    let huge = if huge {
        libc::MFD_HUGETLB | libc::MFD_HUGE_2MB
    } else {
        0
    };
    // SAFETY: NAME is a NUL-terminated string.
    let fd = unsafe { libc::memfd_create(NAME.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | huge) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is new and has no other owner.
    let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
    file.set_len(len_bytes)?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: the call takes an integer.
    if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_ADD_SEALS, seals) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(file)
}

/// Preallocates all pages of `memory` if this was requested, and preserves their contents.
///
/// # Errors
/// Returns [`MemoryBackingError::Populate`] if the host has too little memory.
pub fn populate(memory: &GuestMemoryMmap, kind: MemoryBackingConfig) -> Result<(), MemoryBackingError> {
    if kind.prealloc {
        for region in memory.iter() {
            advise(region, libc::MADV_POPULATE_WRITE).map_err(MemoryBackingError::Populate)?;
        }
    }
    Ok(())
}

/// Calls madvise(2) for all of `region`.
#[expect(clippy::cast_possible_truncation, reason = "x86-64 only: usize has 64 bits")]
fn advise(region: &GuestRegionMmap, advice: libc::c_int) -> io::Result<()> {
    loop {
        // SAFETY: the range is one whole mapping of guest memory without Rust references. The
        // advice values used here do not unmap it; MADV_DONTNEED makes it read as zeroes.
        let done = unsafe { libc::madvise(region.as_ptr().cast(), region.len() as usize, advice) };
        if done == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
}

/// Releases `len_bytes` of the file at `at`, which is guest memory. The range then reads as zeros.
fn punch(at: &FileOffset, len_bytes: u64) -> io::Result<()> {
    let out_of_range = |_| io::Error::from_raw_os_error(libc::EINVAL);
    let start = libc::off_t::try_from(at.start()).map_err(out_of_range)?;
    let len = libc::off_t::try_from(len_bytes).map_err(out_of_range)?;
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: the call takes integers. The punched range reads as zeroes in every mapping.
    if unsafe { libc::fallocate(at.file().as_raw_fd(), mode, start, len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use vm_memory::Bytes;

    use super::*;

    const RANGES: [(GuestAddress, usize); 2] = [(GuestAddress(0), 4 << 20), (GuestAddress(1 << 32), 2 << 20)];

    fn resident_pages(memory: &GuestMemoryMmap) -> usize {
        memory
            .iter()
            .map(|region| {
                let pages = usize::try_from(region.len()).unwrap() / 4096;
                let mut seen = vec![0u8; pages];
                // SAFETY: the mapping is whole, and `seen` has a byte for each of its pages.
                let done =
                    unsafe { libc::mincore(region.as_ptr().cast(), pages * 4096, seen.as_mut_ptr().cast()) };
                assert_eq!(done, 0);
                seen.iter().filter(|&&page| page & 1 != 0).count()
            })
            .sum()
    }

    /// The maximum number of mapped ranges applies to all diffs of a chain together. Otherwise a
    /// long chain would exceed `vm.max_map_count`, and the restore would fail.
    #[test]
    fn layers_share_the_limit_of_mappings() {
        const LEN: u64 = MIN_MAPPED_BYTES;
        const RUNS: u64 = 5000;
        let bytes = 2 * RUNS * LEN;
        let size = usize::try_from(bytes).unwrap();
        let memory = map(&[(GuestAddress(0), size)], MemoryBackingConfig::default()).unwrap();
        let file = tempfile::tempfile().unwrap();
        file.set_len(bytes).unwrap();
        let last = bytes - 2 * LEN;
        file.write_all_at(&[7], last).unwrap();
        let runs: Vec<_> = (0..RUNS).map(|n| (n * 2 * LEN, LEN)).collect();
        map_layers(&memory, [(&file, &*runs), (&file, &*runs)].into_iter()).unwrap();
        let first = memory.iter().next().unwrap().as_ptr().addr();
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        let starts = maps.lines().filter_map(|line| line.split('-').next());
        let starts = starts.map(|start| usize::from_str_radix(start, 16).unwrap());
        let mappings = starts
            .filter(|start| (first..first + size).contains(start))
            .count();
        assert!((8000..=2 * MAX_MAPPED_RUNS + 1).contains(&mappings), "{mappings}");
        assert_eq!(memory.read_obj::<u8>(GuestAddress(last)).unwrap(), 7);
    }

    /// Memory that maps a snapshot has the contents of the file. Writes to the memory do not change
    /// the file.
    #[test]
    fn snapshot_memory_is_private() {
        use std::os::unix::fs::FileExt as _;
        let file = tempfile::tempfile().unwrap();
        let bytes = 6 << 20;
        file.set_len(bytes).unwrap();
        file.write_all_at(b"low", 0x3000).unwrap();
        file.write_all_at(b"high", (4 << 20) + 0x1000).unwrap();
        let memory = map(&RANGES, MemoryBackingConfig::default()).unwrap();
        memory.write_slice(b"old", GuestAddress(0x3000)).unwrap();
        map_file(&memory, &file).unwrap();
        let mut there = [0; 3];
        memory.read_slice(&mut there, GuestAddress(0x3000)).unwrap();
        assert_eq!(&there, b"low");
        memory
            .read_slice(&mut there, GuestAddress((1 << 32) + 0x1001))
            .unwrap();
        assert_eq!(&there, b"igh");
        memory.write_slice(b"new", GuestAddress(0x3000)).unwrap();
        file.read_exact_at(&mut there, 0x3000).unwrap();
        assert_eq!(&there, b"low", "the file is not written");
        assert!(memory.iter().all(|region| region.file_offset().is_none()));
    }

    /// `clear` zeroes the memory. It also releases the pages, unless they were preallocated.
    #[test]
    fn clear_zeroes_memory_and_releases_pages() {
        for shared in [false, true] {
            for prealloc in [false, true] {
                let kind = MemoryBackingConfig {
                    shared,
                    prealloc,
                    ..MemoryBackingConfig::default()
                };
                let memory = map(&RANGES, kind).unwrap();
                let pages = (4 << 20 | 2 << 20) / 4096;
                assert_eq!(resident_pages(&memory), 0, "{kind:?}");
                memory.write_obj(0xdead_beef_u32, GuestAddress(0x2000)).unwrap();
                populate(&memory, kind).unwrap();
                assert_eq!(resident_pages(&memory) == pages, prealloc, "{kind:?}");
                let kept: u32 = memory.read_obj(GuestAddress(0x2000)).unwrap();
                assert_eq!(kept, 0xdead_beef);
                for at in [0x1000, (1 << 32) + 0x1000] {
                    memory.write_obj(0xdead_beef_u32, GuestAddress(at)).unwrap();
                }
                clear(&memory, kind).unwrap();
                for at in [0x1000, (1 << 32) + 0x1000] {
                    assert_eq!(memory.read_obj::<u32>(GuestAddress(at)).unwrap(), 0, "{kind:?}");
                }
                assert_eq!(resident_pages(&memory) == pages, prealloc, "{kind:?}");
            }
        }
    }

    /// Guest memory is aligned to huge pages in the VMM. This is tested with a length that is not a
    /// multiple of the huge page size, for which no kernel aligns mappings.
    #[test]
    fn memory_is_aligned_to_huge_pages() {
        for shared in [false, true] {
            let kind = MemoryBackingConfig {
                shared,
                ..MemoryBackingConfig::default()
            };
            let kept: Vec<_> = [5 << 20, (64 << 20) + 4096, (3 << 20) - 4096]
                .into_iter()
                .map(|len| map(&[(GuestAddress(0), len)], kind).unwrap())
                .collect();
            for memory in &kept {
                let at = memory.get_host_address(GuestAddress(0)).unwrap() as u64;
                assert!(at.is_multiple_of(HUGE_PAGE_BYTES), "{at:#x}");
                memory.write_obj(1_u8, GuestAddress((3 << 20) - 4097)).unwrap();
            }
        }
    }

    /// Another process can map shared guest memory, but cannot truncate it.
    #[test]
    fn shared_memory_uses_sealed_memfd() {
        let kind = MemoryBackingConfig {
            shared: true,
            ..MemoryBackingConfig::default()
        };
        let memory = map(&RANGES, kind).unwrap();
        for (region, (_, len)) in memory.iter().zip(RANGES) {
            let at = region.file_offset().expect("a file");
            assert_eq!((at.start(), at.file().metadata().unwrap().len()), (0, len as u64));
            let error = at.file().set_len(4096).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EPERM));
        }
        assert!(
            map(&RANGES, MemoryBackingConfig::default())
                .unwrap()
                .iter()
                .all(|r| r.file_offset().is_none())
        );
    }

    #[test]
    fn guest_memory_is_excluded_from_core_dumps() {
        let memory = map(&RANGES, MemoryBackingConfig::default()).unwrap();
        let at = memory.get_host_address(GuestAddress(0)).unwrap() as u64;
        let smaps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut flags = smaps
            .lines()
            .skip_while(|line| {
                let range = line.split(' ').next().and_then(|word| word.split_once('-'));
                !range.is_some_and(|(from, to)| {
                    let number = |text| u64::from_str_radix(text, 16).unwrap_or(0);
                    number(from) <= at && at < number(to)
                })
            })
            .filter_map(|line| line.strip_prefix("VmFlags:"));
        assert!(flags.next().unwrap().split(' ').any(|flag| flag == "dd"));
    }

    #[test]
    fn missing_huge_pages_error_is_one_line() {
        let kind = MemoryBackingConfig {
            huge_pages: HugePages::Reserved,
            ..MemoryBackingConfig::default()
        };
        let free = free_huge_pages();
        let ranges = [(
            GuestAddress(0),
            usize::try_from((free + 1) * HUGE_PAGE_BYTES).unwrap(),
        )];
        let line = map(&ranges, kind).unwrap_err().to_string();
        assert!(line.contains(&format!("{} pages are needed", free + 1)), "{line}");
        assert!(line.contains("vm.nr_hugepages"), "{line}");
        let line = map(&[(GuestAddress(0), 4096)], kind).unwrap_err().to_string();
        assert!(line.contains("multiple of 2 MiB"), "{line}");
        if free > 0 {
            let one = [(GuestAddress(0), usize::try_from(HUGE_PAGE_BYTES).unwrap())];
            let memory = map(&one, kind).unwrap();
            memory.write_obj(1u8, GuestAddress(0)).unwrap();
            clear(&memory, kind).unwrap();
            assert_eq!(memory.read_obj::<u8>(GuestAddress(0)).unwrap(), 0);
        } else {
            eprintln!("SKIP: this host has no huge pages to map");
        }
    }

    #[test]
    fn huge_pages_option_parses() {
        assert_eq!("2M".parse(), Ok(HugePages::Reserved));
        assert_eq!("transparent".parse(), Ok(HugePages::Transparent));
        assert_eq!("1G".parse::<HugePages>(), Err(ParseHugePagesError));
        assert_eq!(transparent("always [madvise] never\n"), Some("madvise"));
        assert_eq!(transparent(""), None);
    }
}
