//! Invalid kernels, initrds, command lines and sizes are reported in one line that names the
//! object, without a panic.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use test_support::kernels::{self, EM_386, EM_X86_64, ElfSegment, LINUX_CODE};
use vmm::boot::{self, BootError, BootProtocol, GuestLoadParams, KernelSource, layout};
use vmm::memory::GuestRam;
use vmm::numbers::VcpuCountRange;

const RAM_BYTES: u64 = 32 << 20;

fn attempt(kernel: &Path, initrd: Option<&Path>, cmdline: &str, cpus: u8) -> Result<(), BootError> {
    attempt_by(BootProtocol::Auto, kernel, initrd, cmdline, cpus)
}

fn attempt_by(
    protocol: BootProtocol,
    kernel: &Path,
    initrd: Option<&Path>,
    cmdline: &str,
    cpus: u8,
) -> Result<(), BootError> {
    let ram = GuestRam::new(RAM_BYTES).unwrap();
    let kernel = KernelSource::File(kernel.into());
    boot::load(
        &ram,
        &GuestLoadParams {
            kernel: &kernel,
            protocol,
            initrd,
            cmdline,
            cpus: VcpuCountRange::fixed(cpus).unwrap(),
            pci: false,
            patch_rdpmc: true,
        },
    )
    .map(drop)
}

/// Returns the error message, which must be a single line.
fn line(error: BootError) -> String {
    let text = perf_core::error_line(&error);
    assert!(!text.contains('\n') && !text.is_empty(), "{text:?}");
    text
}

fn kernel_error(bytes: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    line(attempt(&kernels::file(dir.path(), "k", bytes), None, "", 1).unwrap_err())
}

fn linux(phys: u64, mem_bytes: u64) -> Vec<u8> {
    kernels::elf64(
        EM_X86_64,
        phys,
        &[ElfSegment {
            phys,
            bytes: LINUX_CODE,
            mem_bytes,
        }],
    )
}

fn good_kernel(dir: &Path) -> PathBuf {
    kernels::file(dir, "good", &linux(0x10_0000, 0x10_0000))
}

#[test]
fn unreadable_boot_file_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("missing");
    let text = line(attempt(&missing, None, "", 1).unwrap_err());
    assert!(
        text.contains("missing") && text.contains("No such file"),
        "{text}"
    );
    let text = line(attempt(dir.path(), None, "", 1).unwrap_err());
    assert!(text.contains("directory"), "{text}");
    let text = line(attempt(Path::new("/dev/zero"), None, "", 1).unwrap_err());
    assert!(text.contains("device"), "{text}");
    let good = good_kernel(dir.path());
    let text = line(attempt(&good, Some(&missing), "", 1).unwrap_err());
    assert!(text.contains("initrd") && text.contains("No such file"), "{text}");
    let text = line(attempt(&good, Some(dir.path()), "", 1).unwrap_err());
    assert!(text.contains("directory"), "{text}");
    let empty = kernels::file(dir.path(), "empty", b"");
    assert!(line(attempt(&empty, None, "", 1).unwrap_err()).contains("empty"));
    assert!(line(attempt(&good, Some(&empty), "", 1).unwrap_err()).contains("initrd"));
}

#[test]
fn non_kernel_file_is_identified() {
    for (bytes, word) in [
        (&b"#!/bin/sh\n"[..], "script"),
        (b"\x1f\x8b\x08\0\0\0\0\0", "gzip"),
        (b"070701000000", "cpio"),
        (b"!<arch>\ndebian-binary", "Debian"),
        (b"MZ\x90\0\x03\0", "PE"),
        (&[0u8; 100_000], "accepted are"),
        (b"x", "accepted are"),
    ] {
        let text = kernel_error(bytes);
        assert!(text.contains("not a kernel") && text.contains(word), "{text}");
    }
    let arm = kernels::elf64(
        183,
        0x10_0000,
        &[ElfSegment {
            phys: 0x10_0000,
            bytes: &[0; 16],
            mem_bytes: 16,
        }],
    );
    assert!(kernel_error(&arm).contains("another processor"));
    let plain32 = kernels::elf32(
        EM_386,
        0x10_0000,
        &[ElfSegment {
            phys: 0x10_0000,
            bytes: &[0; 16],
            mem_bytes: 16,
        }],
    );
    assert!(kernel_error(&plain32).contains("multiboot"));
}

#[test]
fn segment_outside_ram_reports_limit_and_remedy() {
    for (phys, mem_bytes, limit, remedy) in [
        (RAM_BYTES, 0x1000, "0x2000000", "--memory"),
        (0x10_0000, RAM_BYTES, "0x2000000", "--memory"),
        (u64::MAX - 0xFFF, 0x1000, "0x2000000", "--memory"), // wraps
        (0x1_0000_0000, 0x1000, "0x2000000", "--memory"),    // above 4 GiB
        (0x10_0000, u64::MAX - 0x1000, "0x2000000", "--memory"),
        // No memory size is sufficient for these segments.
        (0x9000, 0x1000, "0x100000", "link it"), // over our page tables
        (0xF_F000, 0x2000, "0x100000", "link it"), // reaches into the firmware tables
    ] {
        let text = kernel_error(&linux(phys, mem_bytes));
        assert!(
            text.contains("segment 0") && text.contains(limit) && text.contains(remedy),
            "{phys:#x}: {text}"
        );
    }
}

/// A multiboot image in conventional memory is accepted only if it does not overlap memory that the
/// machine uses.
#[test]
fn low_multiboot_image_is_rejected_on_overlap() {
    let image = |load: u32, bytes: u32| {
        let mut image = kernels::multiboot_header(0x1_0003, Some([load, load, 0, load + bytes, load]));
        image.resize(bytes as usize, 0x90);
        image
    };
    let dir = tempfile::tempdir().unwrap();
    let fits = kernels::file(dir.path(), "fits", &image(0x1000, 0x9_0000));
    attempt(&fits, None, "", 1).unwrap();
    for (load, bytes) in [
        (0x500, 0x1000),
        (0x9_F000, 0x1000),
        (0xF_0000, 0x100),
        (0x9_0000, 0x8_0000),
    ] {
        let text = kernel_error(&image(load, bytes));
        assert!(
            text.contains("a multiboot kernel")
                && text.contains("0x1000..0x9fc00")
                && !text.contains("--memory"),
            "{load:#x}: {text}"
        );
    }
    let text = kernel_error(&image(0x1000, 0x9_EC00));
    assert!(text.contains("no two free pages"), "{text}");
}

/// Valid multiboot or bzImage files that require a BIOS are identified and rejected.
#[test]
fn bios_program_is_identified() {
    let mut memtest = kernels::bzimage(&linux(0x10_0000, 0x1000));
    memtest[0x248..0x250].fill(0);
    let text = kernel_error(&memtest);
    assert!(
        text.contains("memtest86+") && text.contains("accepted are"),
        "{text}"
    );
    assert!(!text.contains("damaged"), "{text}");
    let mut core = vec![0u8; 512];
    // The messages are at this offset in the first sector of Debian's GRUB core image.
    let messages = b"loading\0.\0\r\n\0Geom\0Read\0 Error\0";
    core[283..][..messages.len()].copy_from_slice(messages);
    core.extend(kernels::multiboot_header(
        0x1_0000,
        Some([0x10_0200, 0x10_0000, 0, 0, 0x10_0200]),
    ));
    core.resize(4096, 0);
    let text = kernel_error(&core);
    assert!(text.contains("GRUB") && text.contains("BIOS"), "{text}");
}

#[test]
fn truncated_image_is_rejected() {
    let good = linux(0x10_0000, 0x1000);
    assert!(kernel_error(&good[..20]).contains("truncated"));
    assert!(kernel_error(&good[..80]).contains("program header table"));
    assert!(kernel_error(&good[..good.len() - 1]).contains("segment 0"));
    let mut bad = good.clone();
    bad[64 + 40..64 + 48].copy_from_slice(&1u64.to_le_bytes()); // p_memsz below p_filesz
    assert!(kernel_error(&bad).contains("damaged"));
    let mut bad = good.clone();
    bad[5] = 2;
    assert!(kernel_error(&bad).contains("big-endian"));
    let mut bad = good.clone();
    bad[24..32].copy_from_slice(&0x7000_0000u64.to_le_bytes());
    assert!(kernel_error(&bad).contains("entry point"));
    let none = kernels::elf64(EM_X86_64, 0x10_0000, &[]);
    assert!(kernel_error(&none).contains("no loadable segment"));

    let image = kernels::bzimage(&good);
    assert!(kernel_error(&image[..0x240]).contains("truncated"));
    assert!(kernel_error(&image[..image.len() - 1]).contains("compressed kernel"));
    let mut bad = image.clone();
    bad[1024 + 20] ^= 0xFF;
    assert!(kernel_error(&bad).contains("damaged"));
    let mut old = image.clone();
    old[0x206..0x208].copy_from_slice(&0x0203u16.to_le_bytes());
    assert!(kernel_error(&old).contains("2.08"));
    assert!(kernel_error(&kernels::bzimage_of(b"BZh91AY&SY and more")).contains("bzip2"));
    assert!(kernel_error(&kernels::bzimage(b"no ELF at all in here")).contains("not an ELF"));
}

#[test]
fn payload_decompression_is_bounded() {
    use std::io::Write;
    // Zeroes compress by a factor of a thousand, so a small file must not exhaust the host's
    // memory.
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    for _ in 0..513 {
        gz.write_all(&[0; 1 << 20]).unwrap();
    }
    let text = kernel_error(&kernels::bzimage_of(&gz.finish().unwrap()));
    assert!(text.contains("more than"), "{text}");
}

#[test]
fn oversized_initrd_reports_available_memory() {
    let dir = tempfile::tempdir().unwrap();
    let good = good_kernel(dir.path());
    let big = dir.path().join("big");
    std::fs::File::create(&big).unwrap().set_len(RAM_BYTES).unwrap();
    let text = line(attempt(&good, Some(&big), "", 1).unwrap_err());
    assert!(
        text.contains("33554432 bytes") && text.contains("--memory"),
        "{text}"
    );
    // The largest initrd that fits is accepted.
    let room = RAM_BYTES - 0x20_0000;
    std::fs::File::options()
        .write(true)
        .open(&big)
        .unwrap()
        .set_len(room)
        .unwrap();
    attempt(&good, Some(&big), "", 1).unwrap();
    std::fs::File::options()
        .write(true)
        .open(&big)
        .unwrap()
        .set_len(room + 1)
        .unwrap();
    attempt(&good, Some(&big), "", 1).unwrap_err();
}

#[test]
fn command_line_and_vcpu_count_are_limited() {
    let dir = tempfile::tempdir().unwrap();
    let good = good_kernel(dir.path());
    attempt(&good, None, &"x".repeat(2047), 1).unwrap();
    let text = line(attempt(&good, None, &"x".repeat(2048), 1).unwrap_err());
    assert!(text.contains("2048") && text.contains("2047"), "{text}");
    for bad in ["a\nb", "a\0b", "ä"] {
        assert!(line(attempt(&good, None, bad, 1).unwrap_err()).contains("position"));
    }
    attempt(&good, None, "", layout::MAX_CPUS).unwrap();
    for cpus in [0, layout::MAX_CPUS + 1, 255] {
        assert!(
            VcpuCountRange::fixed(cpus)
                .unwrap_err()
                .to_string()
                .contains("between 1 and 64")
        );
    }
}

#[test]
fn invalid_multiboot_header_is_rejected() {
    let flat = |flags, fields| {
        let mut f = kernels::multiboot_header(flags, Some(fields));
        f.resize(256, 0x90);
        f
    };
    let load = 0x10_0000;
    assert!(kernel_error(&flat(0x1_0008, [load, load, 0, 0, load + 32])).contains("features"));
    assert!(kernel_error(&flat(0x1_0000, [load, load + 4, 0, 0, load + 32])).contains("after its header"));
    assert!(kernel_error(&flat(0x1_0000, [load + 64, load, 0, 0, load])).contains("before the file"));
    assert!(kernel_error(&flat(0x1_0000, [load, load, load + 1000, 0, load])).contains("truncated"));
    assert!(kernel_error(&flat(0x1_0000, [load, load, 0, load + 8, load])).contains("bss"));
    assert!(kernel_error(&flat(0x1_0000, [load, load, 0, 0, load - 1])).contains("entry point"));
    assert!(kernel_error(&flat(0x1_0000, [0xF_7000, 0xF_7000, 0, 0, 0xF_7020])).contains("segment 0"));
    assert!(kernel_error(&flat(0x1_0000, [load, load, 0, u32::MAX, load])).contains("segment 0"));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// A damaged image either loads or is rejected with a one-line error.
    #[test]
    fn damaged_headers_never_panic(at in 0usize..0x100, value: u64, width in 1usize..9, which in 0usize..3) {
        let elf = linux(0x10_0000, 0x1000);
        let mut image = match which {
            0 => elf,
            1 => kernels::bzimage(&elf),
            _ => {
                let mut code = kernels::multiboot_header(0x1_0000, Some([0x10_0000, 0x10_0000, 0, 0, 0x10_0020]));
                code.extend_from_slice(LINUX_CODE);
                code
            }
        };
        let at = if which == 1 { 0x1E0 + at } else { at };
        for (slot, byte) in image.iter_mut().skip(at).zip(&value.to_le_bytes()[..width]) {
            *slot = *byte;
        }
        let dir = tempfile::tempdir().unwrap();
        if let Err(e) = attempt(&kernels::file(dir.path(), "k", &image), None, "a", 2) {
            line(e);
        }
    }
}

#[test]
fn invalid_pvh_entry_is_rejected() {
    let dir = tempfile::tempdir().unwrap();
    let image = |notes: &[u8]| {
        let segment = ElfSegment {
            phys: 0x10_0000,
            bytes: kernels::PVH_CODE,
            mem_bytes: 0x1000,
        };
        let elf = kernels::elf64(EM_X86_64, 0x10_0000, &[segment]);
        kernels::file(dir.path(), "k", &kernels::with_notes(elf, notes))
    };
    let entry = |at: u32| kernels::note(b"Xen\0", 18, &at.to_le_bytes());
    let refused = |notes: &[u8]| line(attempt_by(BootProtocol::Pvh, &image(notes), None, "", 1).unwrap_err());
    // Images without a PVH entry point: no note, a note without an address, a note with a different
    // name, and a truncated note.
    for notes in [
        vec![],
        kernels::note(b"Xen\0", 18, &[]),
        kernels::note(b"Xem\0", 18, &[0; 4]),
        entry(0x10_0008)[..15].to_vec(),
    ] {
        let said = refused(&notes);
        assert!(said.contains("no PVH entry"), "{said}");
    }
    for outside in [0, 0xF_FFFF, 0x10_1000, u32::MAX] {
        let said = refused(&entry(outside));
        assert!(said.contains("is outside the loaded segments"), "{said}");
    }
    attempt_by(BootProtocol::Pvh, &image(&entry(0x10_0008)), None, "", 1).unwrap();
}
