//! Interoperability tests: qemu-img creates images, this module reads and writes them, and qemu-img
//! then checks them.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;

use diagnostics::error_line;
use tempfile::TempDir;
use vm_memory::GuestAddress;

use super::*;
use crate::disk::config::DiskConfig;
use crate::disk::image::{DiskImage, DiskImageError};
use crate::disk::view::UnlockedDiskView;
use crate::serve::testing::{BUFFERS, memory};

/// Size of the test disks, in bytes.
const DISK: usize = 1 << 20;

/// Creates a directory for test images. Returns `None` if qemu-img is not installed.
fn directory() -> Option<TempDir> {
    if Command::new("qemu-img").arg("--version").output().is_err() {
        eprintln!("SKIPPED: no qemu-img (Debian's package qemu-utils)");
        return None;
    }
    Some(tempfile::tempdir().unwrap())
}

/// Runs qemu-img with the arguments `words` in `dir`. Returns its exit status and output.
fn ask(dir: &Path, words: &str) -> (i32, String) {
    let mut command = Command::new("qemu-img");
    let output = command.args(words.split(' ')).current_dir(dir).output().unwrap();
    let said = [output.stdout, output.stderr].concat();
    (
        output.status.code().unwrap(),
        String::from_utf8_lossy(&said).into_owned(),
    )
}

fn qemu_img(dir: &Path, words: &str) {
    let (status, said) = ask(dir, words);
    assert_eq!(status, 0, "qemu-img {words}: {said}");
}

/// Checks with qemu-img that an image is consistent.
#[track_caller]
fn check(dir: &Path, name: &str) {
    let (status, said) = ask(dir, &format!("check -f qcow2 {name}"));
    assert_eq!(status, 0, "{name}: {said}");
}

fn config(dir: &Path, words: &str) -> DiskConfig {
    let (name, words) = words.split_once(',').unwrap_or((words, ""));
    let comma = if words.is_empty() { "" } else { "," };
    format!("{}/{name},format=qcow2{comma}{words}", dir.display())
        .parse()
        .unwrap()
}

fn open_image(dir: &Path, words: &str) -> DiskImage {
    DiskImage::open(&config(dir, words)).unwrap_or_else(|error| panic!("{words}: {}", error_line(&error)))
}

fn open_qcow2(dir: &Path) -> Qcow2 {
    let path = dir.join("a.qcow2");
    let LockedFile { file, bytes, .. } = open(&path, false).unwrap();
    Qcow2::open(&path, (file, bytes), false, &[]).unwrap()
}

fn refusal(dir: &Path, words: &str) -> String {
    let line = error_line(&DiskImage::open(&config(dir, words)).unwrap_err());
    assert!(!line.contains('\n'), "{line}");
    line
}

fn read(image: &DiskImage, at: u64, bytes: usize) -> io::Result<Vec<u8>> {
    let memory = memory();
    // Use two segments, the first of odd length.
    let pieces = [
        (GuestAddress(BUFFERS + 1), bytes / 3),
        (GuestAddress(BUFFERS + 0x20_0000), bytes - bytes / 3),
    ];
    image.read(&memory, &pieces, at)?;
    let mut data = vec![0; bytes];
    let (first, second) = data.split_at_mut(bytes / 3);
    memory.read_slice(first, pieces[0].0).unwrap();
    memory.read_slice(second, pieces[1].0).unwrap();
    Ok(data)
}

fn write(image: &DiskImage, at: u64, data: &[u8]) -> io::Result<()> {
    let memory = memory();
    memory.write_slice(data, GuestAddress(BUFFERS + 3)).unwrap();
    image.write(&memory, &[(GuestAddress(BUFFERS + 3), data.len())], at)
}

/// Returns test data for a disk. Half of it is zeros, and the other half does not repeat.
fn content(seed: u8) -> Vec<u8> {
    (0..DISK)
        .map(|at| match (at / 70_000) % 2 {
            0 => 0,
            _ => seed ^ u8::try_from((at * 31 + at / 512) % 251).unwrap(),
        })
        .collect()
}

/// Options of qemu-img, one set for each variant of test images.
const KINDS: [&str; 9] = [
    "-o compat=1.1",
    "-o compat=0.10",
    "-o cluster_size=512",
    "-o cluster_size=4k,refcount_bits=1",
    "-o cluster_size=2M,refcount_bits=64",
    "-o lazy_refcounts=on",
    "-o preallocation=metadata",
    "-c",
    "-c -o compat=0.10,cluster_size=16k",
];

fn make(dir: &Path, name: &str, kind: &str, content: &[u8]) {
    std::fs::write(dir.join("raw"), content).unwrap();
    qemu_img(dir, &format!("convert -f raw -O qcow2 {kind} raw {name}"));
}

fn open_file(dir: &Path) -> File {
    let mut options = File::options();
    options.read(true).write(true).open(dir.join("a.qcow2")).unwrap()
}

/// Creates an image of the variant `kind`, applies `change`, and checks that the image is rejected.
#[track_caller]
fn assert_damage_is_refused(dir: &Path, kind: &str, change: impl Fn(&File), expected: &str) {
    make(dir, "a.qcow2", kind, &content(0x55));
    change(&open_file(dir));
    let line = refusal(dir, "a.qcow2");
    assert!(line.contains(expected), "{kind}: {expected}: {line}");
}

/// Bits of a table entry that contain a file offset.
const OFFSET: u64 = 0x00FF_FFFF_FFFF_FE00;

fn word(file: &File, at: u64) -> u64 {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, at).unwrap();
    u64::from_be_bytes(bytes)
}

#[test]
fn image_variants_interoperate_with_qemu() {
    let Some(dir) = directory() else { return };
    let dir = dir.path();
    for kind in KINDS {
        let mut model = content(0x11);
        make(dir, "a.qcow2", kind, &model);
        let image = open_image(dir, "a.qcow2");
        assert_eq!(image.sectors() * 512, DISK as u64);
        assert!(read(&image, 0, DISK).unwrap() == model, "{kind}");

        // Write to allocated and unallocated areas, within and across clusters.
        for (at, bytes) in [(512, 512), (69_632, 1024), (130_048, 90_112), (DISK - 512, 512)] {
            let data: Vec<u8> = (0..bytes).map(|n| u8::try_from(n % 253).unwrap()).collect();
            write(&image, at as u64, &data).unwrap();
            model[at..at + bytes].copy_from_slice(&data);
        }
        for (at, bytes, unmap) in [
            (4096, 140_288, true),
            (300_032, 140_800, false),
            // Zero ranges within a cluster, up to its end, and from the middle of the last cluster
            // to the end of the disk.
            (460_800, 512, true),
            (461_824, 512, false),
            (523_776, 512, true),
            (DISK - 66_048, 66_048, false),
        ] {
            image.write_zeros(at as u64, bytes as u64, unmap).unwrap();
            model[at..at + bytes].fill(0);
        }
        assert!(read(&image, 0, DISK).unwrap() == model, "{kind}");
        image.flush().unwrap();
        assert!(read(&image, 512, 512 * 3).unwrap() == model[512..2048], "{kind}");
        drop(image);

        check(dir, "a.qcow2");
        qemu_img(dir, "convert -f qcow2 -O raw a.qcow2 back");
        assert!(std::fs::read(dir.join("back")).unwrap() == model, "{kind}");
    }
}

/// Flushed data survives if the VM is killed, while unflushed data may be lost. Leaked clusters are
/// the only inconsistency of the image.
#[test]
fn flushed_data_survives_kill() {
    let Some(dir) = directory() else { return };
    let dir = dir.path();
    qemu_img(dir, &format!("create -f qcow2 a.qcow2 {DISK}"));
    let image = open_image(dir, "a.qcow2");
    write(&image, 65_536, &[0x5A; 70_144]).unwrap();
    image.flush().unwrap();
    write(&image, 300_032, &[0xA5; 512]).unwrap();
    std::fs::copy(dir.join("a.qcow2"), dir.join("b.qcow2")).unwrap();
    drop(image);

    let (status, said) = ask(dir, "check -f qcow2 b.qcow2");
    assert!(matches!(status, 0 | 3), "no damage: {said}");
    let image = open_image(dir, "b.qcow2,ro");
    assert!(read(&image, 65_536, 70_144).unwrap().iter().all(|b| *b == 0x5A));
    let unflushed = read(&image, 300_032, 512).unwrap();
    assert!(unflushed.iter().all(|b| *b == 0 || *b == 0xA5));

    // A clean shutdown leaks no clusters.
    check(dir, "a.qcow2");
}

/// A device reset writes cached qcow2 metadata to the file.
#[test]
fn write_back_updates_file() {
    let Some(dir) = directory() else { return };
    let dir = dir.path();
    qemu_img(dir, &format!("create -f qcow2 a.qcow2 {DISK}"));
    let image = open_image(dir, "a.qcow2");
    write(&image, 0, &[0x5A; 512]).unwrap();
    image.write_back().unwrap();
    std::fs::copy(dir.join("a.qcow2"), dir.join("b.qcow2")).unwrap();
    check(dir, "b.qcow2");
    assert_eq!(read(&open_image(dir, "b.qcow2"), 0, 512).unwrap(), [0x5A; 512]);
}

#[test]
fn discarded_clusters_are_freed() {
    let Some(dir) = directory() else { return };
    let dir = dir.path();
    qemu_img(dir, &format!("create -f qcow2 a.qcow2 {DISK}"));
    let image = open_image(dir, "a.qcow2");
    assert_eq!(image.discard_bytes(), Some(65_536));
    let size = || std::fs::metadata(dir.join("a.qcow2")).unwrap().len();
    for round in 0..8u8 {
        write(&image, 0, &vec![round + 1; 524_288]).unwrap();
        image.discard(0, 524_288).unwrap();
        image.flush().unwrap();
        assert!(read(&image, 0, 524_288).unwrap().iter().all(|b| *b == 0));
    }
    // Eight copies of the data would take 4 MiB.
    assert!(size() < 2 << 20, "{}", size());
    drop(image);
    check(dir, "a.qcow2");

    qemu_img(dir, &format!("create -f qcow2 -o compat=0.10 old.qcow2 {DISK}"));
    assert_eq!(open_image(dir, "old.qcow2").discard_bytes(), None);
    assert_eq!(open_image(dir, "a.qcow2,ro").discard_bytes(), None);
}

#[test]
fn internal_snapshots_are_preserved() {
    let Some(dir) = directory() else { return };
    let dir = dir.path();
    let model = content(0x22);
    make(dir, "a.qcow2", "-o compat=1.1", &model);
    qemu_img(dir, "snapshot -c before a.qcow2");
    let image = open_image(dir, "a.qcow2");
    write(&image, 65_536, &[0x77; 131_072]).unwrap();
    drop(image);
    check(dir, "a.qcow2");
    qemu_img(
        dir,
        "convert -f qcow2 -l snapshot.name=before -O raw a.qcow2 back",
    );
    assert!(std::fs::read(dir.join("back")).unwrap() == model);
}

#[test]
fn backing_files_are_never_written() {
    let Some(dir) = directory() else { return };
    let dir = dir.path();
    let base = content(0x33);
    std::fs::write(dir.join("base"), &base[..DISK / 2]).unwrap();
    qemu_img(dir, &format!("create -f qcow2 -b base -F raw middle {DISK}"));
    qemu_img(dir, &format!("create -f qcow2 -b middle -F qcow2 top {DISK}"));
    let middle_before = std::fs::read(dir.join("middle")).unwrap();
    let at = |name: &str| dir.join(name).display().to_string();
    let words = format!(
        "top,backing={},backing-format=qcow2,backing={}",
        at("middle"),
        at("base")
    );
    let image = open_image(dir, &words);
    let mut model = base.clone();
    model[DISK / 2..].fill(0);
    assert!(read(&image, 0, DISK).unwrap() == model);
    for place in [70_144, DISK / 2 - 512, DISK - 1024] {
        write(&image, place as u64, &[0x44; 1024]).unwrap();
        model[place..place + 1024].fill(0x44);
    }
    image.write_zeros(73_728, 66_048, true).unwrap();
    model[73_728..73_728 + 66_048].fill(0);
    assert!(read(&image, 0, DISK).unwrap() == model);

    // Each backing file is locked against writers.
    for behind in ["middle", "base"] {
        let line = error_line(&DiskImage::open(&DiskConfig::raw(dir.join(behind))).unwrap_err());
        assert!(line.contains("in use by"), "{line}");
    }
    drop(image);
    check(dir, "top");
    qemu_img(dir, "convert -f qcow2 -O raw top back");
    assert!(std::fs::read(dir.join("back")).unwrap() == model);
    assert!(std::fs::read(dir.join("base")).unwrap() == base[..DISK / 2]);
    assert!(std::fs::read(dir.join("middle")).unwrap() == middle_before);
}

/// A backing file named in an untrusted image is never opened. Only files named by the operator are
/// used.
#[test]
fn qcow2_rejects_unnamed_backing_file() {
    let Some(dir) = directory() else { return };
    let dir = dir.path();
    std::fs::write(dir.join("secret"), [0x53; 4096]).unwrap();
    std::fs::write(dir.join("named"), [0x4E; 4096]).unwrap();
    qemu_img(dir, "create -f qcow2 -b secret -F raw evil.qcow2 4096");
    let line = refusal(dir, "evil.qcow2");
    assert!(
        line.contains("the backing file 'secret'") && line.contains("add backing=FILE"),
        "{line}"
    );
    // The operator's backing file takes precedence over the one in the image.
    let named = dir.join("named").display().to_string();
    let image = open_image(dir, &format!("evil.qcow2,backing={named}"));
    assert_eq!(read(&image, 0, 4096).unwrap(), [0x4E; 4096]);
    drop(image);

    // Use a chain of two backing files.
    qemu_img(dir, "create -f qcow2 -b evil.qcow2 -F qcow2 top.qcow2 4096");
    let evil = dir.join("evil.qcow2").display().to_string();
    let line = refusal(dir, &format!("top.qcow2,backing={evil},backing-format=qcow2"));
    assert!(line.contains("the backing file 'secret'"), "{line}");
    // A backing file opened as raw cannot refer to further files, even if it has a qcow2 header.
    let image = open_image(dir, &format!("top.qcow2,backing={evil}"));
    assert_eq!(read(&image, 0, 4).unwrap(), b"QFI\xfb");
    drop(image);

    qemu_img(
        dir,
        "create -f qcow2 -o data_file=secret,data_file_raw=on data.qcow2 4096",
    );
    assert!(refusal(dir, "data.qcow2").contains("unsupported external data file"));
    qemu_img(dir, "create -f qcow2 plain.qcow2 4096");
    let line = refusal(dir, &format!("plain.qcow2,backing={named}"));
    assert!(line.contains("no backing file; omit backing="), "{line}");

    // The format defaults to raw, so a guest that writes a header to its raw disk gains nothing.
    let file = File::options().write(true).open(dir.join("evil.qcow2"));
    file.unwrap().set_len(262_144).unwrap();
    let image = DiskImage::open(&DiskConfig::raw(dir.join("evil.qcow2"))).unwrap();
    assert_eq!(read(&image, 0, 4).unwrap(), b"QFI\xfb");
}

#[test]
fn unsupported_features_are_reported_with_remedy() {
    let Some(dir) = directory() else { return };
    let dir = dir.path();
    let made = |options: &str, expected: &str| {
        qemu_img(dir, &format!("create -q -f qcow2 {options} a.qcow2 1M"));
        let line = refusal(dir, "a.qcow2");
        assert!(line.contains(expected), "{options}: {line}");
        assert!(line.contains("qemu-img"), "{options}: {line}");
    };
    made("-o compression_type=zstd", "unsupported compression");
    made("-o extended_l2=on", "extended L2 entries");
    let taken = refusal(dir, "nowhere/a.qcow2");
    assert!(taken.contains("cannot open"), "{taken}");
}

/// An image with modified bytes in the header or in a table is rejected, and so is a truncated
/// image.
#[test]
fn damaged_or_truncated_image_is_rejected() {
    let Some(dir) = directory() else { return };
    let dir = dir.path();
    let refused = |change: &dyn Fn(&File), expected: &str| {
        assert_damage_is_refused(dir, "-o compat=1.1", change, expected);
    };
    for bytes in [0, 71, 72] {
        let expected = format!(": {bytes} bytes; a header");
        refused(&|file| file.set_len(bytes).unwrap(), &expected);
    }
    refused(&|file| file.set_len(65_536).unwrap(), "truncated or damaged");
    let put = |at: u64, data: &[u8], expected: &str| {
        refused(&|file| file.write_all_at(data, at).unwrap(), expected);
    };
    let put32 = |at: u64, value: u32, expected: &str| put(at, &value.to_be_bytes(), expected);
    let put64 = |at: u64, value: u64, expected: &str| put(at, &value.to_be_bytes(), expected);
    put(0, b"KDMV", "no qcow2 header");
    put32(4, 4, "version 4");
    // Invalid cluster sizes.
    put32(20, 63, "2^63 bytes");
    put32(20, 8, "2^8 bytes");
    // Invalid disk sizes.
    put64(24, 0, "disk size of 0 bytes");
    put(31, &[1], "disk size of 1048577 bytes");
    put64(24, u64::MAX, "disk size of 18446744073709551615");
    put64(24, 1 << 60, "requires 2147483648");
    // Invalid sizes and offsets of the L1 table.
    put32(36, u32::MAX, "has 4294967295 entries");
    put32(36, 0, "has 0 entries");
    put64(40, u64::MAX, "L1 table at byte 18446744073709551615");
    put64(40, 0, "L1 table at byte 0");
    // Invalid offsets and sizes of the refcount table.
    put64(48, 1 << 50, "refcount table at byte");
    put32(56, u32::MAX, "refcount table at byte");
    put32(56, 0, "refcount table at byte");
    put(35, &[2], "unsupported encryption; decrypt the image");
    // Unsupported feature bits and header fields.
    put(79, &[1], "qemu-img check -r all");
    put(79, &[2], "marked as corrupt");
    put(72, &[0x80], "0x8000000000000000");
    put32(96, 7, "2^7 bits");
    put32(100, 8, "damaged; see qemu-img check");
    // Unexpected backing file, and invalid length and offset of its name.
    put(8, &[0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 9], "the backing file");
    put(
        8,
        &[0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 4, 0],
        "name of the backing file",
    );
    put(
        8,
        &[0x7F, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 9],
        "name of the backing file",
    );
    // Layout of this image: refcount table in cluster 1, L1 table in cluster 3.
    put64(65_536, 1 << 40, "entry 0 of the refcount table");
    let twice = [131_072u64.to_be_bytes(), 131_072u64.to_be_bytes()].concat();
    put(65_536, &twice, "entry 1 of the refcount table");
    put64(196_608, 1 << 40, "entry 0 of the L1 table");
}

/// Inconsistencies that `imago` does not detect are rejected: clusters without a reference count
/// (the search of `imago` for a free cluster would not terminate), data that overlaps tables or
/// other data, and data beyond the end of the file.
#[test]
fn inconsistent_tables_are_rejected() {
    let Some(dir) = directory() else { return };
    let dir = dir.path();
    let set = |file: &File, at: u64, value: u64| file.write_all_at(&value.to_be_bytes(), at).unwrap();
    let l2 = |file: &File| word(file, word(file, 40)) & OFFSET;
    let block = |file: &File| word(file, word(file, 48)) & OFFSET;
    let entry = |file: &File, is_wanted: fn(u64) -> bool| {
        let mut entries = (l2(file)..).step_by(8);
        entries.find(|at| is_wanted(word(file, *at))).unwrap()
    };
    for kind in [
        "-o compat=1.1",
        "-o cluster_size=4k,refcount_bits=1",
        "-o compat=0.10",
    ] {
        // Entry of the first data cluster, and the following entry.
        let first = |file: &File| entry(file, |word| word & OFFSET != 0);
        let refused = |change: &dyn Fn(&File), expected: &str| {
            assert_damage_is_refused(dir, kind, change, expected);
        };
        let (beyond, twice) = ("beyond the end of the file", "twice");
        refused(&|f| set(f, first(f), 1 << 63 | 1 << 40), beyond);
        refused(&|f| set(f, first(f), word(f, first(f)) | 512), beyond);
        refused(&|f| set(f, first(f), 1 << 63 | l2(f)), twice);
        refused(&|f| set(f, first(f) + 8, word(f, first(f))), twice);
        refused(&|f| set(f, first(f), 1 << 63 | block(f)), twice);
        refused(&|f| set(f, word(f, 48), 0), "in use but has no reference count");
        refused(&|f| f.set_len(f.metadata().unwrap().len() / 2).unwrap(), beyond);
    }
    // Compressed data that overlaps the table that refers to it.
    let compressed = |f: &File| set(f, entry(f, |word| word >> 62 == 1), 1 << 62 | l2(f));
    assert_damage_is_refused(dir, "-c", compressed, "twice");
    let uncounted = |f: &File| f.write_all_at(&[0; 64], block(f)).unwrap();
    assert_damage_is_refused(dir, "-c", uncounted, "in use but has no reference count");
}

/// Reference counts that are missing after a VM was killed are repaired before the image is
/// written.
#[test]
fn missing_reference_counts_are_repaired() {
    let Some(dir) = directory() else { return };
    let dir = dir.path();
    for kind in &KINDS[..7] {
        let model = content(0x79);
        make(dir, "a.qcow2", kind, &model);
        let file = open_file(dir);
        // Reference counts of the first clusters. At least three exist for any width.
        let block = word(&file, word(&file, 48)) & OFFSET;
        file.write_all_at(&[0; 32], block).unwrap();
        let (status, _) = ask(dir, "check -f qcow2 a.qcow2");
        assert_eq!(status, 2, "{kind}: qemu-img calls it corrupt");
        // An image opened for reading is not modified.
        assert!(read(&open_image(dir, "a.qcow2,ro"), 0, DISK).unwrap() == model);
        assert_eq!(ask(dir, "check -f qcow2 a.qcow2").0, 2, "{kind}");
        let image = open_image(dir, "a.qcow2");
        assert!(read(&image, 0, DISK).unwrap() == model, "{kind}");
        drop(image);
        check(dir, "a.qcow2");
    }
}

/// qcow2 images are accepted after writes, with snapshots, and with leaked clusters.
#[test]
fn consistent_tables_are_accepted() {
    let Some(dir) = directory() else { return };
    let dir = dir.path();
    for kind in KINDS {
        make(dir, "a.qcow2", kind, &content(0x78));
        let image = open_image(dir, "a.qcow2");
        write(&image, 8192, &[0x31; 131_072]).unwrap();
        image.write_zeros(262_144, 262_144, true).unwrap();
        image.flush().unwrap();
        // Leave the image in the state of a killed VM.
        write(&image, 700_416, &[0x32; 65_536]).unwrap();
        std::fs::copy(dir.join("a.qcow2"), dir.join("b.qcow2")).unwrap();
        drop(image);
        for name in ["a.qcow2", "b.qcow2"] {
            drop(open_image(dir, name));
            // One-bit reference counts cannot represent 2.
            if kind.contains("refcount_bits=1") {
                continue;
            }
            qemu_img(dir, &format!("snapshot -c s {name}"));
            let image = open_image(dir, name);
            write(&image, 8192, &[0x33; 4096]).unwrap();
            drop(image);
            drop(open_image(dir, name));
        }
    }
}

/// Corrupt table entries that are detected at run time cause I/O errors. No other file is accessed.
#[test]
fn corrupt_tables_fail_requests_only() {
    let Some(dir) = directory() else { return };
    let dir = dir.path();
    make(dir, "good", "-o cluster_size=512", &content(0x66));
    let good = std::fs::read(dir.join("good")).unwrap();
    let mut random = 0x9E37_79B9_7F4A_7C15u64;
    let mut next = move || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        usize::try_from(random >> 8).unwrap()
    };
    let (mut opened, mut failed) = (0, 0);
    for _ in 0..150 {
        let mut bad = good.clone();
        for _ in 0..1 + next() % 40 {
            // Corrupt the beginning of the file, which contains the tables.
            let at = 104 + next() % 40_000;
            bad[at] = [0, 0xFF, 0x80, 1, u8::try_from(next() % 256).unwrap()][next() % 5];
        }
        std::fs::write(dir.join("bad"), &bad).unwrap();
        let Ok(image) = DiskImage::open(&config(dir, "bad")) else {
            continue;
        };
        opened += 1;
        for _ in 0..20 {
            let (at, bytes) = ((next() % 2000) as u64 * 512, (1 + next() % 40) * 512);
            let done = match next() % 5 {
                0 => write(&image, at, &vec![7; bytes]),
                1 => image.discard(at, bytes as u64),
                2 => image.write_zeros(at, bytes as u64, true),
                3 => image.flush(),
                _ => read(&image, at, bytes).map(|_| ()),
            };
            failed += u32::from(done.is_err());
        }
    }
    assert!(opened > 20 && failed > 0, "{opened} opened, {failed} failed");
}

#[test]
fn segment_outside_ram_is_a_guest_error() {
    let Some(dir) = directory() else { return };
    let dir = dir.path();
    qemu_img(dir, &format!("create -f qcow2 a.qcow2 {DISK}"));
    let image = open_image(dir, "a.qcow2");
    let memory = memory();
    for at in [crate::serve::testing::MEMORY_BYTES as u64 - 256, u64::MAX - 100] {
        let piece = [(GuestAddress(at), 512)];
        for done in [
            image.read(&memory, &piece, 0).map(drop),
            image.write(&memory, &piece, 0),
        ] {
            let error = done.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
            assert_eq!(error.raw_os_error(), None);
        }
    }
    // The image is still usable.
    write(&image, 0, &[1; 512]).unwrap();
}

#[test]
fn one_writer_or_many_readers() {
    let Some(dir) = directory() else { return };
    let dir = dir.path();
    qemu_img(dir, "create -f qcow2 a.qcow2 1M");
    let writer = open_image(dir, "a.qcow2");
    assert!(refusal(dir, "a.qcow2,ro").contains("in use by"));
    drop(writer);
    let _readers = [(); 2].map(|()| open_image(dir, "a.qcow2,ro"));
    assert!(matches!(
        DiskImage::open(&config(dir, "a.qcow2")),
        Err(DiskImageError::Open(DiskOpenError::Locked { .. }))
    ));
}

/// After a panic in the qcow2 implementation, the disk's thread continues and each later request
/// fails.
#[test]
fn qcow2_panic_disables_disk() {
    let Some(dir) = directory() else { return };
    let dir = dir.path();
    qemu_img(dir, "create -f qcow2 a.qcow2 1M");
    let image = open_qcow2(dir);
    let error = image.with(|_, _| -> io::Result<()> { panic!("as a test wants it") });
    assert!(error.unwrap_err().to_string().contains("its reader panicked"));
    let error = image.flush().unwrap_err();
    assert!(error.to_string().contains("before"), "{error}");
}

#[test]
fn whole_clusters_are_within_range() {
    let Some(dir) = directory() else { return };
    qemu_img(dir.path(), "create -f qcow2 a.qcow2 200704");
    let image = open_qcow2(dir.path());
    assert_eq!(image.whole_clusters(512, 1024), 1536..1536);
    assert_eq!(image.whole_clusters(512, 65_024), 65_536..65_536);
    assert_eq!(image.whole_clusters(512, 131_072), 65_536..131_072);
    assert_eq!(image.whole_clusters(0, 196_608), 0..196_608);
    assert_eq!(image.whole_clusters(196_608, 512), 196_608..196_608);
    assert_eq!(image.whole_clusters(196_608, 4096), 196_608..200_704);
    assert_eq!(image.whole_clusters(197_120, 3584), 200_704..200_704);
}

#[test]
fn split_ranges_are_buffer_aligned() {
    let all = |at, bytes| split_range(at, bytes).collect::<Vec<_>>();
    assert_eq!(all(512, 1024), [(512, 1024)]);
    assert_eq!(all(0, 0), []);
    let most = BUFFER_BYTES as u64;
    assert_eq!(
        all(most - 512, most + 1024),
        [(most - 512, 512), (most, BUFFER_BYTES), (2 * most, 512)]
    );
}

/// A reloaded view of a qcow2 image shows data that a VM wrote after the view had cached the
/// tables.
#[test]
fn reloaded_view_sees_new_writes() {
    let Some(dir) = directory() else { return };
    let dir = dir.path();
    for kind in ["-o compat=1.1", "-o lazy_refcounts=on", "-c"] {
        let mut model = content(0x33);
        make(dir, "a.qcow2", kind, &model);
        let image = open_image(dir, "a.qcow2");
        let view = UnlockedDiskView::open(&config(dir, "a.qcow2"))
            .unwrap_or_else(|error| panic!("{kind}: {error:?}"));
        let seen = || {
            let mut data = vec![0; DISK];
            view.read(0, &mut data).map(|()| data).unwrap()
        };
        assert!(seen() == model, "{kind}");
        // Write once to an unallocated cluster and once to an allocated cluster.
        for at in [1024, 71_680] {
            write(&image, at as u64, &[0x5a; 512]).unwrap();
            model[at..at + 512].fill(0x5a);
        }
        image.flush().unwrap();
        view.reload().unwrap_or_else(|error| panic!("{kind}: {error:?}"));
        assert!(seen() == model, "{kind}");
    }
}
