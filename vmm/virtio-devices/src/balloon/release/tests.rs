use std::fs::File;
use std::os::unix::fs::FileExt as _;

use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{Bytes, FileOffset, GuestAddress};

use super::super::pages::PAGE_BYTES;
use super::*;

/// Number of pages of each test's memory.
const PAGES: u64 = 64;
const BASE: u64 = 0x10_0000;

/// Maps [`PAGES`] pages of guest memory at [`BASE`]: pages of `file`, or anonymous memory.
fn memory(flags: libc::c_int, file: Option<&File>) -> GuestMemoryMmap {
    let len = usize::try_from(PAGES * PAGE_BYTES).unwrap();
    let mut builder = MmapRegionBuilder::new(len)
        .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
        .with_mmap_flags(flags);
    if let Some(file) = file {
        builder = builder.with_file_offset(FileOffset::new(file.try_clone().unwrap(), 0));
    }
    let region = GuestRegionMmap::new(builder.build().unwrap(), GuestAddress(BASE)).unwrap();
    GuestMemoryMmap::from_regions(vec![region]).unwrap()
}

/// Creates a file in which each page is filled with its number, starting at 1.
fn filled_file() -> File {
    let file = tempfile::tempfile().unwrap();
    for page in 0..PAGES {
        let number = u8::try_from(page + 1).unwrap();
        file.write_all_at(&[number; 4096], page * PAGE_BYTES).unwrap();
    }
    file
}

fn range(page: u64, pages: u64) -> PageRange {
    PageRange {
        start: GuestAddress(BASE + page * PAGE_BYTES),
        bytes: pages * PAGE_BYTES,
    }
}

fn first_byte(memory: &GuestMemoryMmap, page: u64) -> u8 {
    memory.read_obj(range(page, 1).start).unwrap()
}

/// Returns the size of the guest memory's private dirty pages, which only this process occupies, in
/// KiB.
fn dirty_kib(memory: &GuestMemoryMmap) -> u64 {
    let start = memory.iter().next().unwrap().as_ptr() as u64;
    let end = start + PAGES * PAGE_BYTES;
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut inside, mut sum) = (false, 0);
    for line in maps.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        if let Some((low, high)) = words[0].split_once('-')
            && let (Ok(low), Ok(high)) = (u64::from_str_radix(low, 16), u64::from_str_radix(high, 16))
        {
            inside = low >= start && high <= end;
        } else if inside && words[0] == "Private_Dirty:" {
            sum += words[1].parse::<u64>().unwrap();
        }
    }
    sum
}

/// Returns the number of mappings of this process that the guest's memory consists of.
fn mapping_count(memory: &GuestMemoryMmap) -> usize {
    let start = memory.iter().next().unwrap().as_ptr() as u64;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let starts = maps.lines().filter_map(|line| {
        let (low, _) = line.split_once('-')?;
        u64::from_str_radix(low, 16).ok()
    });
    starts
        .filter(|low| (start..start + PAGES * PAGE_BYTES).contains(low))
        .count()
}

const ANONYMOUS: libc::c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

#[test]
fn released_anonymous_pages_are_free_and_read_as_zeros() {
    let memory = memory(ANONYMOUS, None);
    for page in 0..PAGES {
        memory.write_slice(&[7; 4096], range(page, 1).start).unwrap();
    }
    let before = dirty_kib(&memory);
    let mut releaser = PageReleaser::new(RamOrigin::Empty);
    let released = releaser.release(&memory, range(8, 16)).unwrap();
    assert_eq!(released, 16 * PAGE_BYTES);
    assert_eq!(before - dirty_kib(&memory), 64);
    assert_eq!([7, 8, 23, 24].map(|page| first_byte(&memory, page)), [7, 0, 0, 7]);
    memory.write_slice(&[9; 4096], range(8, 1).start).unwrap();
    assert_eq!(first_byte(&memory, 8), 9, "the page can be used again");
}

/// Released pages of a shared memory file become a hole in the file, and another process that maps
/// the file also reads zeros.
#[test]
fn released_shared_pages_are_holes_in_the_file() {
    use std::os::unix::fs::MetadataExt as _;
    let name = c"balloon-test";
    let fd = nix::sys::memfd::memfd_create(name, nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
    let file = File::from(fd);
    file.set_len(PAGES * PAGE_BYTES).unwrap();
    let memory = memory(libc::MAP_SHARED | libc::MAP_NORESERVE, Some(&file));
    for page in 0..PAGES {
        memory.write_slice(&[7; 4096], range(page, 1).start).unwrap();
    }
    let before = file.metadata().unwrap().blocks();
    let mut releaser = PageReleaser::new(RamOrigin::Empty);
    releaser.release(&memory, range(0, 32)).unwrap();
    assert_eq!(before - file.metadata().unwrap().blocks(), 32 * PAGE_BYTES / 512);
    let mut byte = [1];
    file.read_exact_at(&mut byte, 31 * PAGE_BYTES).unwrap();
    assert_eq!(byte, [0]);
    assert_eq!(first_byte(&memory, 32), 7);
}

/// Released pages of a snapshot's memory read as zeros. With `MADV_DONTNEED` alone, they would
/// contain the data of the memory file again.
#[test]
fn released_pages_of_a_snapshot_do_not_come_back() {
    let file = filled_file();
    let memory = memory(libc::MAP_PRIVATE | libc::MAP_NORESERVE, Some(&file));
    for page in 0..32 {
        memory.write_slice(&[77; 4096], range(page, 1).start).unwrap();
    }
    assert_eq!(dirty_kib(&memory), 128);
    let mut releaser = PageReleaser::new(RamOrigin::Snapshot);
    releaser.release(&memory, range(8, 40)).unwrap();
    assert_eq!(dirty_kib(&memory), 32);
    let bytes = [0, 7, 8, 31, 47, 48, 63].map(|page| first_byte(&memory, page));
    assert_eq!(bytes, [77, 77, 0, 0, 0, 49, 64]);
    // A reused page and overlapping ranges can be released again.
    memory.write_slice(&[78; 4096], range(9, 1).start).unwrap();
    releaser.release(&memory, range(9, 1)).unwrap();
    releaser.release(&memory, range(4, 8)).unwrap();
    assert_eq!([3, 4, 9, 11].map(|page| first_byte(&memory, page)), [77, 0, 0, 0]);
    assert_eq!(mapping_count(&memory), 3);
    let mut byte = [0];
    file.read_exact_at(&mut byte, 8 * PAGE_BYTES).unwrap();
    assert_eq!(byte, [9], "the file is unchanged");
}

/// Adjacent released ranges of a snapshot's memory are merged into one mapping.
#[test]
fn adjacent_ranges_of_a_snapshot_share_mappings() {
    let memory = memory(libc::MAP_PRIVATE | libc::MAP_NORESERVE, Some(&filled_file()));
    let mut releaser = PageReleaser::new(RamOrigin::Snapshot);
    for page in (0..PAGES).rev() {
        releaser.release(&memory, range(page, 1)).unwrap();
    }
    assert_eq!(mapping_count(&memory), 1);
    assert_eq!(releaser.replaced.ranges.len(), 1);
    assert_eq!(releaser.replaced.mappings, 2);
}

/// The releaser never underestimates the number of mappings that it has added. The worst case is a
/// guest that releases every second page, uses these pages, and then releases the others.
#[test]
fn count_of_mappings_is_an_upper_bound() {
    let memory = memory(libc::MAP_PRIVATE | libc::MAP_NORESERVE, Some(&filled_file()));
    let mut releaser = PageReleaser::new(RamOrigin::Snapshot);
    let mut check = |page: u64| {
        releaser.release(&memory, range(page, 1)).unwrap();
        memory.write_slice(&[1; 4096], range(page, 1).start).unwrap();
        let bound = releaser.replaced.mappings + 1;
        let count = mapping_count(&memory);
        assert!(count <= bound, "{count} mappings, bound {bound}");
    };
    (0..PAGES).step_by(2).for_each(&mut check);
    (1..PAGES).step_by(2).for_each(&mut check);
}

/// Pages of a snapshot's memory are released even if no more mappings can be added to the process.
/// They then contain the data of the memory file again.
#[test]
fn mappings_of_a_snapshot_are_bounded() {
    let memory = memory(libc::MAP_PRIVATE | libc::MAP_NORESERVE, Some(&filled_file()));
    let mut releaser = PageReleaser::new(RamOrigin::Snapshot);
    releaser.release(&memory, range(0, 1)).unwrap();
    releaser.replaced.mappings = MAX_MAPPINGS;
    memory.write_slice(&[77; 4096], range(8, 1).start).unwrap();
    let dirty = dirty_kib(&memory);
    releaser.release(&memory, range(8, 1)).unwrap();
    assert_eq!(dirty - dirty_kib(&memory), 4);
    assert_eq!(first_byte(&memory, 8), 9);
    // An adjacent range needs no further mapping.
    releaser.release(&memory, range(1, 1)).unwrap();
    assert_eq!(first_byte(&memory, 1), 0);
    assert_eq!(mapping_count(&memory), 2);
}

#[test]
fn ranges_outside_ram_are_ignored() {
    let memory = memory(ANONYMOUS, None);
    memory.write_slice(&[7; 4096], GuestAddress(BASE)).unwrap();
    let mut releaser = PageReleaser::new(RamOrigin::Empty);
    let mut release = |start: u64, bytes: u64| {
        let start = GuestAddress(start);
        releaser.release(&memory, PageRange { start, bytes }).unwrap()
    };
    assert_eq!(release(0, BASE), 0);
    assert_eq!(release(u64::from(u32::MAX) * PAGE_BYTES, PAGE_BYTES), 0);
    assert_eq!(release(u64::MAX - 4095, u64::MAX), 0);
    assert_eq!(first_byte(&memory, 0), 7);
    // A range that exceeds RAM is released as far as it is RAM.
    assert_eq!(release(0, u64::MAX), PAGES * PAGE_BYTES);
    assert_eq!(first_byte(&memory, 0), 0);
}
