//! Finds the pages of guest memory that were written since the last scan. A page may be written by
//! the guest, KVM, a device of the VMM, or the host kernel on behalf of the VMM.
//!
//! The host kernel write-protects pages and removes the protection at the first write without
//! notifying the VMM (`UFFD_FEATURE_WP_ASYNC` of userfaultfd(2) and `PAGEMAP_SCAN`, Linux 6.7).
//! KVM's own log (`KVM_GET_DIRTY_LOG`) would miss the writes of the VMM. On older kernels, the VMM
//! reads all pages and compares their hashes.
#![expect(unsafe_code, reason = "userfaultfd(2) and ioctl(2)")]

use std::fs::File;
use std::hash::{BuildHasher as _, RandomState};
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::fs::FileExt as _;
use std::sync::Arc;

use snapshot::memory::CHUNK_BYTES;
use vm_memory::{Bytes as _, GuestMemoryBackend as _, GuestMemoryError, GuestMemoryRegion as _};

use super::GuestRam;
use super::touched::{ENTRY_BYTES, EXISTS, PAGEMAP, TouchedPages};

/// Size of a page in bytes.
pub const PAGE_BYTES: u64 = 4096;
/// Maximum number of written ranges that a scan of one chunk returns. The maximum occurs if every
/// other page is written.
const MAX_REGIONS: usize = 256;

/// Protocol version of userfaultfd (include/uapi/linux/userfaultfd.h).
const UFFD_API: u64 = 0xAA;
/// Flag of userfaultfd(2) that excludes faults in kernel mode, so that no privilege is needed. The
/// VMM uses the descriptor only for write protection and receives no faults.
const UFFD_USER_MODE_ONLY: libc::c_int = 1;
/// Feature flag of userfaultfd: at a write to a protected page, the kernel removes the protection
/// without a notification.
const UFFD_FEATURE_WP_ASYNC: u64 = 1 << 15;
/// Number of the ioctl `UFFDIO_API`.
const UFFDIO_API: libc::c_ulong = 0xC018_AA3F;
/// Number of the ioctl `UFFDIO_REGISTER`.
const UFFDIO_REGISTER: libc::c_ulong = 0xC020_AA00;
/// Number of the ioctl `UFFDIO_UNREGISTER`.
const UFFDIO_UNREGISTER: libc::c_ulong = 0x8010_AA01;
/// Mode flag of `UFFDIO_REGISTER`: enables write protection.
const REGISTER_MODE_WP: u64 = 1 << 1;
/// Number of the ioctl `PAGEMAP_SCAN` (include/uapi/linux/fs.h).
const PAGEMAP_SCAN: libc::c_ulong = 0xC060_6610;
/// Page category of `PAGEMAP_SCAN`: pages that were written since they were write-protected.
const PAGE_IS_WRITTEN: u64 = 1 << 1;
/// Flags of `PAGEMAP_SCAN`: write-protect the pages that are found, and fail if this is impossible.
const SCAN_AND_PROTECT: u64 = 1 | 1 << 1;

/// `struct uffdio_api`, the argument of `UFFDIO_API`.
#[repr(C)]
struct UffdApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

/// `struct uffdio_register`, the argument of `UFFDIO_REGISTER`.
#[repr(C)]
struct UffdRegister {
    start: u64,
    len: u64,
    mode: u64,
    ioctls: u64,
}

/// `struct pm_scan_arg`, the argument of `PAGEMAP_SCAN`.
#[repr(C)]
struct ScanArgs {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region`, a range of pages that `PAGEMAP_SCAN` has found.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct PageRegion {
    start: u64,
    end: u64,
    categories: u64,
}

/// Kernel interfaces that write-protect memory of this process and report the pages that were
/// written. Must be opened before the process enters its sandbox.
#[derive(Debug)]
pub struct WriteProtector {
    userfaultfd: OwnedFd,
    pagemap: File,
}

impl WriteProtector {
    /// Opens the kernel interfaces. Returns `None` if the kernel is older than Linux 6.7 or was
    /// built without them.
    #[must_use]
    pub fn open() -> Option<Self> {
        let pagemap = File::open(PAGEMAP).ok()?;
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | UFFD_USER_MODE_ONLY;
        // SAFETY: the call takes integers.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0)?;
        // SAFETY: the descriptor was just created and has no other owner.
        let userfaultfd = unsafe { OwnedFd::from_raw_fd(fd) };
        let mut api = UffdApi {
            api: UFFD_API,
            features: UFFD_FEATURE_WP_ASYNC,
            ioctls: 0,
        };
        // SAFETY: the call reads and writes one `struct uffdio_api`, which outlives it.
        let done = unsafe { libc::ioctl(userfaultfd.as_raw_fd(), UFFDIO_API, &raw mut api) };
        (done == 0).then_some(Self { userfaultfd, pagemap })
    }

    /// Registers all memory of `ram` for write protection.
    fn register(&self, ram: &GuestRam) -> io::Result<()> {
        for region in ram.memory().iter() {
            let mut range = UffdRegister {
                start: region.as_ptr() as u64,
                len: region.len(),
                mode: REGISTER_MODE_WP,
                ioctls: 0,
            };
            // SAFETY: the call reads and writes one `struct uffdio_register`, which outlives it.
            // The range is guest memory, whose contents do not change. Accesses go on as before,
            // because the kernel lifts each protection itself.
            if unsafe { libc::ioctl(self.userfaultfd.as_raw_fd(), UFFDIO_REGISTER, &raw mut range) } != 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }

    /// Removes all memory of `ram` from write protection.
    fn unregister(&self, ram: &GuestRam) {
        for region in ram.memory().iter() {
            let mut range = [region.as_ptr() as u64, region.len()];
            // SAFETY: the call reads one `struct uffdio_range`, which has two 64-bit fields.
            if unsafe {
                libc::ioctl(
                    self.userfaultfd.as_raw_fd(),
                    UFFDIO_UNREGISTER,
                    range.as_mut_ptr(),
                )
            } != 0
            {
                log::debug!("UFFDIO_UNREGISTER: {}", io::Error::last_os_error());
            }
        }
    }
}

/// Method by which written pages are found.
#[derive(Debug)]
enum Method {
    Protection(Arc<WriteProtector>),
    /// Comparison of a hash of each page with the previous hash. The hashes are keyed, so a guest
    /// cannot construct pages with equal hashes.
    Hashes {
        keys: RandomState,
        hashes: Vec<u64>,
        buffer: Vec<u8>,
    },
}

/// Knowledge about the pages of a chunk of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChunkState {
    /// [`DirtyPages::take`] has not returned pages of the chunk yet. All its pages count as dirty,
    /// unless the chunk was never touched.
    New,
    /// Writes to the chunk are tracked since the last [`DirtyPages::take`].
    Observed,
    /// Writes to the chunk since the last [`DirtyPages::take`] may have been missed, so all its
    /// pages count as dirty.
    Unknown,
}

/// Tracker of guest memory pages that were written since the last [`DirtyPages::take`] of their
/// chunk.
#[derive(Debug)]
pub struct DirtyPages {
    ram: GuestRam,
    method: Method,
    touched: TouchedPages,
    chunks: Vec<ChunkState>,
}

/// Ranges of dirty pages in a chunk of guest memory.
#[derive(Debug, Default)]
pub struct DirtyRanges {
    /// Dirty ranges, as offsets in RAM in ascending order.
    pub ranges: Vec<Range<u64>>,
    /// `true` if [`DirtyPages::take`] returns pages of the chunk for the first time.
    pub is_first: bool,
}

impl DirtyPages {
    /// Starts tracking the writes to all of `ram`. No other [`WriteProtector`] may track the same
    /// memory.
    #[must_use]
    pub fn observe(ram: &GuestRam, protector: Option<&Arc<WriteProtector>>) -> Self {
        let chunks = usize::try_from(ram.size_bytes().div_ceil(CHUNK_BYTES)).unwrap_or(0);
        let protector = protector.filter(|protector| protector.register(ram).is_ok());
        let pagemap = protector.and_then(|protector| protector.pagemap.try_clone().ok());
        let protection = protector.cloned().map(Method::Protection);
        let pages = usize::try_from(ram.size_bytes() / PAGE_BYTES).unwrap_or(0);
        Self {
            ram: ram.clone(),
            method: protection.unwrap_or_else(|| Method::Hashes {
                keys: RandomState::new(),
                hashes: vec![0; pages],
                buffer: Vec::new(),
            }),
            touched: pagemap.map_or_else(|| TouchedPages::of(ram), |file| TouchedPages::in_file(ram, file)),
            chunks: vec![ChunkState::New; chunks],
        }
    }

    /// Returns `true` if all memory is read to find the written pages, because the kernel does not
    /// report them.
    #[must_use]
    pub fn reads_all(&self) -> bool {
        matches!(self.method, Method::Hashes { .. })
    }

    /// Returns the dirty pages of the chunk at `offset` and marks them as clean. The caller must
    /// read the contents of the pages after this call, so that later writes are found again.
    ///
    /// # Errors
    /// Returns an error if guest memory cannot be read.
    pub fn take(&mut self, offset: u64) -> Result<DirtyRanges, GuestMemoryError> {
        let bytes = CHUNK_BYTES.min(self.ram.size_bytes().saturating_sub(offset));
        let chunk = usize::try_from(offset / CHUNK_BYTES).unwrap_or(usize::MAX);
        let Some(&state) = self.chunks.get(chunk) else {
            return Ok(DirtyRanges::default());
        };
        let is_first = state == ChunkState::New;
        if is_first && self.touched.is_untouched(&self.ram, offset, bytes) {
            return Ok(DirtyRanges::default());
        }
        let pages = usize::try_from(bytes / PAGE_BYTES).unwrap_or(0);
        let mut dirty = vec![state != ChunkState::Observed; pages];
        self.chunks[chunk] = ChunkState::Observed;
        match &mut self.method {
            Method::Protection(protector) => {
                let pagemap = &protector.pagemap;
                let address = self.ram.memory().get_host_address(self.ram.address_of(offset))?;
                if protect(pagemap, address as u64, &mut dirty).is_err() {
                    // The pages can no longer be scanned: the balloon has replaced memory of a
                    // snapshot by new mappings. Treat all pages as dirty and register the memory
                    // again.
                    dirty.fill(true);
                    let taken = self.chunks.iter_mut().filter(|state| **state != ChunkState::New);
                    taken.for_each(|state| *state = ChunkState::Unknown);
                    let again = protector.register(&self.ram);
                    if again
                        .and_then(|()| protect(pagemap, address as u64, &mut dirty))
                        .is_ok()
                    {
                        self.chunks[chunk] = ChunkState::Observed;
                    }
                }
            }
            Method::Hashes { keys, hashes, buffer } => {
                buffer.resize(usize::try_from(bytes).unwrap_or(0), 0);
                self.ram
                    .memory()
                    .read_slice(buffer, self.ram.address_of(offset))?;
                let first = usize::try_from(offset / PAGE_BYTES).unwrap_or(usize::MAX);
                compare(
                    keys,
                    buffer,
                    hashes.get_mut(first..).unwrap_or_default(),
                    &mut dirty,
                );
            }
        }
        let ranges = ranges_of(&dirty, offset);
        Ok(DirtyRanges { ranges, is_first })
    }
}

impl Drop for DirtyPages {
    fn drop(&mut self) {
        if let Method::Protection(protector) = &self.method {
            protector.unregister(&self.ram);
        }
    }
}

/// Returns the ranges of dirty pages of the chunk at `offset`.
fn ranges_of(dirty: &[bool], offset: u64) -> Vec<Range<u64>> {
    let mut ranges: Vec<Range<u64>> = Vec::new();
    let pages = (0u64..).zip(dirty).filter(|(_, is_dirty)| **is_dirty);
    for (page, _) in pages {
        let start = offset + page * PAGE_BYTES;
        match ranges.last_mut() {
            Some(last) if last.end == start => last.end += PAGE_BYTES,
            _ => ranges.push(start..start + PAGE_BYTES),
        }
    }
    ranges
}

/// Write-protects the written pages among those at `address` and marks them in `dirty`. Also marks
/// pages without a page table entry, because not all kernels report a released page as written if
/// its page table is gone.
fn protect(pagemap: &File, address: u64, dirty: &mut [bool]) -> io::Result<()> {
    let mut entries = vec![0; dirty.len() * ENTRY_BYTES];
    let entry_bytes = ENTRY_BYTES as u64;
    pagemap.read_exact_at(&mut entries, address / PAGE_BYTES * entry_bytes)?;
    let (entries, _) = entries.as_chunks();
    for (is_dirty, entry) in dirty.iter_mut().zip(entries) {
        *is_dirty |= u64::from_le_bytes(*entry) & EXISTS == 0;
    }
    let mut regions = [PageRegion::default(); MAX_REGIONS];
    let mut args = ScanArgs {
        size: size_of::<ScanArgs>() as u64,
        flags: SCAN_AND_PROTECT,
        start: address,
        end: address + dirty.len() as u64 * PAGE_BYTES,
        walk_end: 0,
        vec: regions.as_mut_ptr() as u64,
        vec_len: regions.len() as u64,
        max_pages: 0,
        category_inverted: 0,
        category_mask: PAGE_IS_WRITTEN,
        category_anyof_mask: 0,
        return_mask: PAGE_IS_WRITTEN,
    };
    // SAFETY: the call reads and writes `args`, and writes at most `vec_len` entries of `regions`.
    // Both outlive it. The protected range is guest memory, whose contents do not change.
    let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut args) };
    let found = usize::try_from(found).map_err(|_| io::Error::last_os_error())?;
    // The array can hold all ranges of a chunk. If the scan ended early, the rest counts as
    // written, so no write is lost.
    let rest = PageRegion {
        start: args.walk_end,
        end: args.end,
        categories: PAGE_IS_WRITTEN,
    };
    for region in regions.iter().take(found).chain([&rest]) {
        let page = |at: u64| usize::try_from(at.saturating_sub(address) / PAGE_BYTES).unwrap_or(0);
        let range = page(region.start)..page(region.end);
        dirty.get_mut(range).unwrap_or_default().fill(true);
    }
    Ok(())
}

/// Updates `known`, the hashes of the pages in `data`. Marks the pages whose hash has changed in
/// `dirty`.
fn compare(keys: &RandomState, data: &[u8], known: &mut [u64], dirty: &mut [bool]) {
    let pages = data.chunks(usize::try_from(PAGE_BYTES).unwrap_or(1));
    for ((page, known), is_dirty) in pages.zip(known).zip(dirty) {
        let hash = keys.hash_one(page);
        *is_dirty |= std::mem::replace(known, hash) != hash;
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use vm_memory::GuestAddress;

    use super::*;
    use crate::memory::MIN_RAM_BYTES;

    const CHUNK: u64 = CHUNK_BYTES;

    fn protectors() -> Vec<Option<Arc<WriteProtector>>> {
        let protector = WriteProtector::open().map(Arc::new);
        if protector.is_none() {
            eprintln!("SKIP: this kernel cannot observe writes");
        }
        protector.into_iter().map(Some).chain([None]).collect()
    }

    fn all(dirty: &mut DirtyPages) -> Vec<Range<u64>> {
        let chunks = (0..MIN_RAM_BYTES / CHUNK).map(|i| i * CHUNK);
        let found = chunks.flat_map(|at| dirty.take(at).unwrap().ranges);
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for range in found {
            match ranges.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => ranges.push(range),
            }
        }
        ranges
    }

    fn page(n: u64) -> Range<u64> {
        n * PAGE_BYTES..(n + 1) * PAGE_BYTES
    }

    fn chunk(n: u64) -> Range<u64> {
        n * CHUNK..(n + 1) * CHUNK
    }

    /// Pages that the VMM has written, that the kernel has written on behalf of the VMM, or that
    /// were released are in the dirty set. A missed page would be lost when the VM moves.
    #[test]
    fn writes_of_ours_are_in_the_dirty_set() {
        for protector in protectors() {
            let ram = GuestRam::new(MIN_RAM_BYTES).unwrap();
            let memory = ram.memory();
            memory.write_slice(&[1; 3 * 4096], GuestAddress(0x5000)).unwrap();
            let mut dirty = DirtyPages::observe(&ram, protector.as_ref());
            assert_eq!(dirty.reads_all(), protector.is_none());
            // The other chunks are untouched.
            assert_eq!(all(&mut dirty), [chunk(0)]);
            assert_eq!(all(&mut dirty), []);
            memory.write_obj(2u8, GuestAddress(0x6fff)).unwrap();
            memory.write_obj(2u8, GuestAddress(3 * CHUNK)).unwrap();
            assert_eq!(all(&mut dirty), [page(6), chunk(3)]);
            assert_eq!(all(&mut dirty), []);
            let file = tempfile::tempfile().unwrap();
            file.set_len(4096).unwrap();
            ram.read_from(0x7000, &file, 4096).unwrap();
            let mut random = File::open("/dev/urandom").unwrap().take(4096);
            let read = memory.read_exact_volatile_from(GuestAddress(0x9000), random.get_mut(), 4096);
            read.unwrap();
            assert_eq!(all(&mut dirty), [page(7), page(9)]);
            assert_eq!(all(&mut dirty), []);
            memory.write_slice(&[1; 4096], GuestAddress(5 * CHUNK)).unwrap();
            assert_eq!(all(&mut dirty), [chunk(5)]);
            ram.clear().unwrap();
            let found = all(&mut dirty);
            for lost in [page(5), page(6), page(9), page(5 * CHUNK / PAGE_BYTES)] {
                let is_in = |range: &Range<u64>| range.start <= lost.start && lost.end <= range.end;
                assert!(found.iter().any(is_in), "{lost:?} {found:?}");
            }
        }
    }

    /// After a move of the VM was cancelled, memory has its contents and can be tracked again.
    #[test]
    fn memory_can_be_observed_again() {
        let Some(protector) = WriteProtector::open().map(Arc::new) else {
            return;
        };
        let ram = GuestRam::new(MIN_RAM_BYTES).unwrap();
        for byte in [1u8, 2] {
            let mut dirty = DirtyPages::observe(&ram, Some(&protector));
            ram.memory().write_obj(byte, GuestAddress(0)).unwrap();
            assert_eq!(all(&mut dirty), [chunk(0)]);
            ram.memory().write_obj(byte, GuestAddress(0x8000)).unwrap();
            assert_eq!(all(&mut dirty), [page(8)]);
            drop(dirty);
        }
        assert!(!TouchedPages::of(&ram).is_untouched(&ram, 0, CHUNK));
        assert!(TouchedPages::of(&ram).is_untouched(&ram, CHUNK, CHUNK));
    }

    /// Pages that are replaced by new mappings are in the dirty set. The balloon of a restored VM
    /// replaces pages of the memory file by new mappings.
    #[test]
    fn new_mappings_are_in_the_dirty_set() {
        for protector in protectors() {
            let file = tempfile::tempfile().unwrap();
            file.set_len(MIN_RAM_BYTES).unwrap();
            let mut ram = GuestRam::new(MIN_RAM_BYTES).unwrap();
            ram.map_snapshot(&file).unwrap();
            ram.memory().write_slice(&[1; 4096], GuestAddress(CHUNK)).unwrap();
            let mut dirty = DirtyPages::observe(&ram, protector.as_ref());
            all(&mut dirty);
            assert_eq!(all(&mut dirty), []);
            ram.map_snapshot(&file).unwrap();
            let found = all(&mut dirty);
            assert!(found.iter().any(|range| range.contains(&CHUNK)), "{found:?}");
            all(&mut dirty);
            assert_eq!(all(&mut dirty), []);
        }
    }

    /// All memory of a restored VM is dirty at first, because the pages that were not read yet
    /// exist only in the memory file.
    #[test]
    fn memory_of_a_snapshot_is_dirty_at_first() {
        for protector in protectors() {
            let file = tempfile::tempfile().unwrap();
            file.set_len(MIN_RAM_BYTES).unwrap();
            let mut ram = GuestRam::new(MIN_RAM_BYTES).unwrap();
            ram.map_snapshot(&file).unwrap();
            let mut dirty = DirtyPages::observe(&ram, protector.as_ref());
            let first = all(&mut dirty);
            assert!(first.len() == 1 && first[0] == (0..MIN_RAM_BYTES), "{first:?}");
            assert_eq!(all(&mut dirty), []);
            ram.memory().write_obj(1u8, GuestAddress(0x3000)).unwrap();
            let _: u8 = ram.memory().read_obj(GuestAddress(0x4000)).unwrap();
            assert_eq!(all(&mut dirty), [page(3)]);
        }
    }
}
