//! Tests with file systems created by `mke2fs`, intact and maliciously modified.

use std::path::Path;
use std::process::Command;

use super::*;
use crate::modules::LoadedModule;
use crate::programs::{GuestFilesystemSource, GuestSymbols};
use kernel_images::build_id::BuildId;

struct InMemory(Vec<u8>);

impl GuestDiskReader for InMemory {
    fn len(&self) -> u64 {
        self.0.len() as u64
    }

    fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        let at = usize::try_from(at).map_err(io::Error::other)?;
        let from = self.0.get(at..at + to.len());
        to.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// Creates an ext4 file system of 8 MiB that contains `files`. Returns `None` if `mke2fs` is not
/// installed.
fn file_system(files: &[(&str, &[u8])]) -> Option<Vec<u8>> {
    file_system_of(&[], files)
}

/// Creates a file system like [`file_system`], with additional options for `mke2fs`. If `files`
/// contains no directory `etc`, a symbolic link named `etc` is created.
fn file_system_of(options: &[&str], files: &[(&str, &[u8])]) -> Option<Vec<u8>> {
    let program = ["/usr/sbin/mke2fs", "/sbin/mke2fs"]
        .into_iter()
        .find(|path| Path::new(path).exists())?;
    let temp = tempfile::tempdir().unwrap();
    let (root, image) = (temp.path().join("root"), temp.path().join("image"));
    for (path, contents) in files {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, contents).unwrap();
    }
    std::os::unix::fs::symlink("/usr/bin/prog", root.join("link")).unwrap();
    std::os::unix::fs::symlink("loop", root.join("loop")).unwrap();
    if !root.join("etc").exists() {
        std::os::unix::fs::symlink("/usr/bin/prog", root.join("etc")).unwrap();
    }
    let made = Command::new(program)
        .args(["-q", "-t", "ext4"])
        .args(options)
        .arg("-d")
        .arg(&root)
        .arg(&image)
        .arg("8M")
        .output()
        .unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    Some(std::fs::read(image).unwrap())
}

fn example() -> Option<Vec<u8>> {
    let large = vec![7; 300_000];
    let made = file_system(&[
        ("usr/bin/prog", &large),
        ("etc/hostname", b"guest\n"),
        ("tmp/perf-7.map", b"x"),
    ]);
    if made.is_none() {
        eprintln!("skipped: no mke2fs here");
    }
    made
}

fn open(bytes: Vec<u8>) -> Result<GuestDisk, DiskError> {
    GuestDisk::open(Box::new(InMemory(bytes)))
}

#[test]
fn disk_reads_files_and_follows_links() {
    let Some(bytes) = example() else { return };
    let mut disk = open(bytes).unwrap();
    assert_eq!(disk.read("/etc/hostname", 100).unwrap(), b"guest\n");
    for path in ["/usr/bin/prog", "/link", "/usr/../link", "/usr/bin/./prog"] {
        assert_eq!(disk.read(path, 1 << 20).unwrap(), vec![7; 300_000], "{path}");
    }
    disk.reload().unwrap();
    assert_eq!(disk.read("/tmp/perf-7.map", 100).unwrap(), b"x");
    assert!(matches!(
        disk.read("/usr/bin/prog", 299_999),
        Err(DiskError::TooLarge(299_999))
    ));
    for path in [
        "/none",
        "/loop",
        "/usr",
        "relative",
        "",
        "/a\0b",
        "/etc/hostname/x",
    ] {
        assert!(
            matches!(disk.read(path, 100), Err(DiskError::File(_))),
            "{path:?}"
        );
    }
}

/// File systems are found on the whole disk and on partitions of both table types, and invalid
/// tables are ignored.
#[test]
fn disk_finds_file_systems_on_partitions() {
    let Some(system) = example() else { return };
    const START: usize = 2048;
    let sectors = system.len() / 512;
    let mut disk = vec![0; START * 512];
    disk.extend(&system);
    disk.extend([0; 34 * 512]);
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    let entry = |disk: &mut Vec<u8>, n: usize, kind: u8, first: usize, count: usize| {
        let at = 446 + 16 * n;
        disk[at + 4] = kind;
        disk[at + 8..at + 12].copy_from_slice(&u32::try_from(first).unwrap().to_le_bytes());
        disk[at + 12..at + 16].copy_from_slice(&u32::try_from(count).unwrap().to_le_bytes());
    };
    let mut mbr = disk.clone();
    entry(&mut mbr, 0, 0x83, 0xffff_ffff, 0xffff_ffff);
    entry(&mut mbr, 2, 0x83, START, sectors);
    assert_eq!(open(mbr).unwrap().read("/etc/hostname", 100).unwrap(), b"guest\n");

    let mut gpt = disk;
    entry(&mut gpt, 0, 0xee, 1, 0xffff_ffff);
    gpt[512..520].copy_from_slice(b"EFI PART");
    gpt[512 + 72..512 + 80].copy_from_slice(&2u64.to_le_bytes());
    gpt[512 + 80..512 + 84].copy_from_slice(&u32::MAX.to_le_bytes());
    gpt[512 + 84..512 + 88].copy_from_slice(&128u32.to_le_bytes());
    let at = 1024 + 3 * 128;
    gpt[at + 32..at + 40].copy_from_slice(&(START as u64).to_le_bytes());
    gpt[at + 40..at + 48].copy_from_slice(&((START + sectors - 1) as u64).to_le_bytes());
    assert_eq!(open(gpt).unwrap().read("/etc/hostname", 100).unwrap(), b"guest\n");
}

#[test]
fn disk_without_file_system_is_reported() {
    for bytes in [Vec::new(), vec![0; 512], vec![0xff; 1 << 20]] {
        assert!(matches!(open(bytes), Err(DiskError::NoFileSystem(None))));
    }
}

/// A superblock that claims an excessive number of block groups does not cause a large allocation.
#[test]
fn disk_rejects_implausible_superblock_sizes() {
    let Some(bytes) = example() else { return };
    for (at, value) in [(4, u32::MAX), (0x150, u32::MAX), (0x18, 7), (0x18, u32::MAX)] {
        let mut bytes = bytes.clone();
        bytes[1024 + at..1024 + at + 4].copy_from_slice(&value.to_le_bytes());
        assert!(
            matches!(open(bytes), Err(DiskError::NoFileSystem(Some(_)))),
            "{at:#x}"
        );
    }
}

/// For any corruption of a file system, a read terminates and returns at most the requested number
/// of bytes.
#[test]
fn damaged_file_system_never_hangs_reader() {
    let Some(whole) = example() else { return };
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    for _ in 0..60 {
        let mut bytes = whole.clone();
        for _ in 0..1 + next() % 64 {
            // Corrupts mostly the beginning of the file system, which contains metadata.
            let within = if next() % 4 == 0 { bytes.len() } else { 256 << 10 };
            let at = usize::try_from(next()).unwrap_or_default() % within;
            bytes[at] = next().to_le_bytes()[0];
        }
        let Ok(mut disk) = open(bytes) else { continue };
        for path in ["/etc/hostname", "/usr/bin/prog", "/link", "/none/none"] {
            if let Ok(read) = disk.read(path, 300_000) {
                assert!(read.len() <= 300_000);
            }
        }
    }
}

/// A symbolic link whose inode claims an implausible size is not followed, neither during path
/// resolution nor during the search for the root file system. The size would determine the size of
/// a buffer.
#[test]
fn disk_bounds_memory_for_link_target() {
    let Some(mut bytes) = file_system_of(&["-O", "^metadata_csum"], &[("file", b"here")]) else {
        return eprintln!("skipped: no mke2fs here");
    };
    let target = b"/usr/bin/prog";
    // The inode stores a short target at offset 0x28 and its length at offsets 4 and 0x6c.
    let places: Vec<usize> = (0..bytes.len() - target.len())
        .filter(|at| bytes[*at..].starts_with(target))
        .collect();
    assert_eq!(places.len(), 2, "the links `link` and `etc`");
    for at in places {
        let inode = at - 0x28;
        bytes[inode + 0x6c..inode + 0x70].copy_from_slice(&0xfffu32.to_le_bytes());
    }
    let mut disk = open(bytes).unwrap();
    for path in ["/link", "/link/x", "/etc/hostname", "/usr/../link"] {
        assert!(matches!(disk.read(path, 100), Err(DiskError::File(_))), "{path}");
    }
    assert_eq!(disk.read("/file", 100).unwrap(), b"here");
}

/// The total timeout ends a command early even if each single read from the guest's file system
/// stays below the request timeout.
#[test]
fn disk_enforces_total_timeout() {
    let Some(bytes) = example() else { return };
    let mut disk = open(bytes).unwrap();
    disk.waited = TOTAL_TIMEOUT;
    // A request that only exceeds the total timeout when it completes still returns its result.
    disk.read("/etc/hostname", 100).unwrap();
    assert!(matches!(
        disk.read("/etc/hostname", 100),
        Err(DiskError::TimedOut)
    ));
    assert!(matches!(disk.reload(), Err(DiskError::TimedOut)));
}

/// Path resolution reads each sector only once, so a concurrent write by the guest cannot change
/// blocks that have already been checked.
#[test]
fn path_resolution_reads_each_sector_once() {
    struct Changing(Vec<u8>, std::sync::atomic::AtomicUsize);
    impl GuestDiskReader for Changing {
        fn len(&self) -> u64 {
            self.0.len() as u64
        }
        fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
            let at = usize::try_from(at).map_err(io::Error::other)?;
            let by = self.1.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            for (n, byte) in to.iter_mut().enumerate() {
                *byte = self.0[at + n].wrapping_add(by.to_le_bytes()[0]);
            }
            Ok(())
        }
    }
    let disk: Rc<dyn GuestDiskReader> = Rc::new(Changing(vec![0; 1 << 16], Default::default()));
    let budget = ReadBudget::default();
    budget.allow(1 << 20);
    let mut part = DiskRange {
        disk,
        start: 512,
        len: 1 << 15,
        budget: budget.clone(),
    };
    let mut first = |at: u64| {
        let mut block = [0; 2048];
        part.read(at, &mut block).unwrap();
        block
    };
    budget.keep(true);
    let (a, b) = (first(0), first(1024));
    assert_eq!(a[1024..], b[..1024], "read before, in part");
    assert_ne!(b[..1024], b[1024..]);
    assert_eq!(first(0), a);
    budget.keep(false);
    assert_ne!(first(0), a);
}

#[test]
fn failed_disk_reader_is_an_immediate_error() {
    struct Failing;
    impl GuestDiskReader for Failing {
        fn len(&self) -> u64 {
            1 << 30
        }
        fn read(&self, _: u64, _: &mut [u8]) -> io::Result<()> {
            Err(io::ErrorKind::NotFound.into())
        }
    }
    assert!(matches!(
        GuestDisk::open(Box::new(Failing)),
        Err(DiskError::NoFileSystem(None))
    ));
}

/// A library on the disk provides symbols, unwind tables and a build ID for a profile, and the perf
/// map of a process can be read.
#[test]
fn library_on_disk_has_symbols_tables_and_build_id() {
    const LIBC: &str = "/usr/lib/x86_64-linux-gnu/libc.so.6";
    let Ok(libc) = std::fs::read(LIBC) else {
        return eprintln!("skipped: no libc.so.6 here");
    };
    let Some(bytes) = file_system(&[("lib/libc.so.6", &libc), ("tmp/perf-7.map", b"7f00 10 made\n")]) else {
        return eprintln!("skipped: no mke2fs here");
    };
    let mut mount = GuestSymbols::of(GuestFilesystemSource::Disk(open(bytes).unwrap()));
    let object = mount.object("/lib/libc.so.6").expect("it is there");
    let malloc = (0..libc.len() as u64).step_by(16).find(|address| {
        let found = object.resolve(*address);
        found.is_some_and(|found| found.name == "malloc")
    });
    let malloc = malloc.expect("libc has it");
    let id = mount.build_id("/lib/libc.so.6").unwrap();
    let other = BuildId::new(&[1; 20]);
    for (running, usable) in [(None, true), (Some(id), true), (other, false)] {
        assert_eq!(mount.object_of("/lib/libc.so.6", running).is_some(), usable);
    }
    assert_eq!(mount.jit(7, 0x7f08), Some((0x7f00, 0x7f10, "made")));
    assert_eq!(mount.jit(8, 0x7f08), None);
    let read = mount.files().program("/lib/libc.so.6").unwrap();
    let module = LoadedModule::of_file(&read, true).expect("a library of this processor");
    assert_eq!(
        module.function(malloc).map(|function| function.name),
        Some("malloc")
    );
    assert!(module.tables().is_some());
    assert!(LoadedModule::of_file(&read[..4096], true).is_none_or(|part| part.tables().is_none()));
    assert!(LoadedModule::of_file(b"", true).is_none());
}
