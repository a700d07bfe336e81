//! Tests of valid, damaged and malicious ELF images.

use kernel_images::KernelImageError;
use kernel_images::elf::{self, ElfImage};
use kernel_images::image::{KernelImage, find_banner};
use proptest::prelude::*;

const TEXT_VIRT: u64 = 0xFFFF_FFFF_8100_0000;
const TEXT_PHYS: u64 = 0x100_0000;
const TEXT_AT: usize = 0x200;
const RODATA_VIRT: u64 = TEXT_VIRT + 0x1000;
const BANNER: &[u8] = b"Linux version 6.1.0-56-cloud-amd64 (debian-kernel@lists.debian.org) #1 SMP\n\0";

/// Byte buffer to which the tests write an ELF file's little-endian fields.
#[derive(Default)]
struct LittleEndianWriter(Vec<u8>);

impl LittleEndianWriter {
    fn u8(&mut self, value: u8) -> &mut Self {
        self.0.push(value);
        self
    }

    fn u16(&mut self, value: u16) -> &mut Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u32(&mut self, value: u32) -> &mut Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn u64(&mut self, value: u64) -> &mut Self {
        self.0.extend(value.to_le_bytes());
        self
    }

    fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.0.extend(bytes);
        self
    }

    fn pad_to(&mut self, len: usize) -> &mut Self {
        assert!(self.0.len() <= len, "{} bytes already", self.0.len());
        self.0.resize(len, 0);
        self
    }
}

/// Symbol table entry, which consists of name, `st_info`, section index and address.
type Symbol = (&'static str, u8, u16, u64);

const FUNC: u8 = 2;
const GLOBAL: u8 = 1 << 4;
const SYMBOLS: [Symbol; 6] = [
    ("startup_64", GLOBAL, 1, TEXT_VIRT),
    ("do_one", GLOBAL | FUNC, 1, TEXT_VIRT + 0x10),
    ("helper", FUNC, 1, TEXT_VIRT + 0x20),
    ("linux_banner", GLOBAL | 1, 2, RODATA_VIRT),
    ("undefined", GLOBAL | FUNC, 0, 0),
    ("file.c", 4, 0xFFF1, 0),
];

/// Properties of the test image that a test can change.
struct ImageShape {
    machine: u16,
    symbols: &'static [Symbol],
    /// Address of the .text section (`sh_addr`).
    text_addr: u64,
    banner: &'static [u8],
}

impl Default for ImageShape {
    fn default() -> Self {
        Self {
            machine: 62,
            symbols: &SYMBOLS,
            text_addr: TEXT_VIRT,
            banner: BANNER,
        }
    }
}

/// Builds a minimal vmlinux with one loadable segment, .text, .rodata and a symbol table.
fn vmlinux(shape: &ImageShape) -> Vec<u8> {
    let mut names = vec![0];
    let mut symtab = LittleEndianWriter::default();
    symtab.pad_to(24);
    for (name, info, section, address) in shape.symbols {
        symtab.u32(u32::try_from(names.len()).unwrap());
        names.extend(name.bytes().chain([0]));
        symtab.u8(*info).u8(0).u16(*section).u64(*address).u64(0x10);
    }
    let section_names = b"\0.text\0.rodata\0.symtab\0.strtab\0.shstrtab\0";
    let rodata_at = TEXT_AT + 0x1000;
    let symtab_at = rodata_at + 0x200;
    let strtab_at = symtab_at + symtab.0.len();
    let shstrtab_at = strtab_at + names.len();
    let headers_at = (shstrtab_at + section_names.len()).next_multiple_of(8);
    let segment_bytes = (0x1000 + 0x200) as u64;

    let mut file = LittleEndianWriter::default();
    file.bytes(b"\x7FELF\x02\x01\x01").pad_to(16);
    file.u16(2).u16(shape.machine).u32(1);
    file.u64(TEXT_PHYS).u64(64).u64(headers_at as u64);
    file.u32(0).u16(64).u16(56).u16(1).u16(64).u16(6).u16(5);
    // PT_LOAD segment, readable and executable.
    file.u32(1)
        .u32(5)
        .u64(TEXT_AT as u64)
        .u64(TEXT_VIRT)
        .u64(TEXT_PHYS);
    file.u64(segment_bytes).u64(segment_bytes + 0x1000).u64(0x1000);
    file.pad_to(TEXT_AT).bytes(&[0x90; 0x1000]).bytes(shape.banner);
    file.pad_to(symtab_at)
        .bytes(&symtab.0)
        .bytes(&names)
        .bytes(section_names);
    file.pad_to(headers_at).pad_to(headers_at + 64);
    let mut section =
        |name: u32, kind: u32, flags: u64, addr: u64, at: usize, len: usize, link: u32, entry: u64| {
            file.u32(name)
                .u32(kind)
                .u64(flags)
                .u64(addr)
                .u64(at as u64)
                .u64(len as u64);
            file.u32(link).u32(1).u64(1).u64(entry);
        };
    section(1, 1, 6, shape.text_addr, TEXT_AT, 0x1000, 0, 0);
    section(7, 1, 2, RODATA_VIRT, rodata_at, 0x200, 0, 0);
    section(15, 2, 0, 0, symtab_at, symtab.0.len(), 4, 24);
    section(23, 3, 0, 0, strtab_at, names.len(), 0, 0);
    section(31, 3, 0, 0, shstrtab_at, section_names.len(), 0, 0);
    file.0
}

fn parsed(data: &[u8]) -> ElfImage<'_> {
    elf::parse("vmlinux", data).unwrap_or_else(|error| panic!("{error}"))
}

/// The parser reads the segments, code and symbols of a valid vmlinux correctly.
#[test]
fn vmlinux_is_parsed() {
    let data = vmlinux(&ImageShape::default());
    let image = parsed(&data);
    assert!(image.is_64);
    assert_eq!((image.machine, image.entry), (62, TEXT_PHYS));
    let [segment] = &image.segments[..] else {
        panic!("{:?}", image.segments);
    };
    assert_eq!((segment.virt, segment.phys), (TEXT_VIRT, TEXT_PHYS));
    assert_eq!((segment.data.len(), segment.mem_bytes), (0x1200, 0x2200));
    let [code] = &image.code[..] else {
        panic!("{} pieces of code", image.code.len());
    };
    assert_eq!(
        (code.virt, code.phys, code.bytes.len()),
        (TEXT_VIRT, TEXT_PHYS, 0x1000)
    );
    let address = |name: &str| image.symbols.by_name(name).map(|symbol| symbol.address);
    assert_eq!(address("do_one"), Some(TEXT_VIRT + 0x10));
    assert_eq!(address("helper"), Some(TEXT_VIRT + 0x20));
    assert_eq!(address("linux_banner"), Some(RODATA_VIRT));
    assert_eq!(address("undefined"), None, "it is elsewhere");
    assert_eq!(address("file.c"), None, "it is no address");
}

/// A code section is reported as code only if a segment loads it at the section's address. A
/// section header may claim any address, but the guest executes (and the VMM may patch) only loaded
/// code.
#[test]
fn code_must_be_loaded_by_a_segment() {
    let data = vmlinux(&ImageShape {
        text_addr: TEXT_VIRT + 0x100,
        ..ImageShape::default()
    });
    let image = parsed(&data);
    let [code] = &image.code[..] else {
        panic!("{} pieces of code", image.code.len());
    };
    // The invalid section is ignored, and the whole executable segment is used.
    assert_eq!((code.virt, code.bytes.len()), (TEXT_VIRT, 0x1200));
}

/// Formats an error with its causes, as printed to the user.
fn line(error: &KernelImageError) -> String {
    let mut line = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(next) = cause {
        line.push_str(&format!(": {next}"));
        cause = next.source();
    }
    line
}

/// Damaged section headers make symbols unavailable but do not prevent booting.
#[test]
fn damaged_section_headers_do_not_prevent_boot() {
    let mut data = vmlinux(&ImageShape::default());
    // Damages e_shoff, the offset of the section headers.
    data[0x28..0x30].copy_from_slice(&u64::MAX.to_le_bytes());
    let image = parsed(&data);
    assert_eq!(image.code.len(), 1);
    assert!(image.symbols.is_empty());
    let error = line(&elf::tables("vmlinux", &data).unwrap_err());
    assert!(
        error.contains("vmlinux") && error.contains("section headers"),
        "{error}"
    );
}

/// If a header is damaged, the error consists of one line that names the file and the damaged part.
#[test]
fn damaged_headers_are_rejected_by_name() {
    let whole = vmlinux(&ImageShape::default());
    let with = |at: usize, bytes: &[u8]| {
        let mut data = whole.clone();
        data[at..at + bytes.len()].copy_from_slice(bytes);
        let error = elf::parse("broken", &data).expect_err("it is broken");
        let line = line(&error);
        assert!(line.contains("broken") && line.lines().count() == 1, "{line}");
        line
    };
    assert!(with(4, &[9]).contains("class 9"), "ELFCLASS");
    assert!(with(5, &[2]).contains("endian"), "ELFDATA");
    // Damages e_phoff, e_phnum and p_offset, and makes p_filesz larger than p_memsz.
    assert!(with(0x20, &u64::MAX.to_le_bytes()).contains("program header"));
    assert!(with(0x38, &500u16.to_le_bytes()).contains("program header"));
    assert!(with(64 + 8, &u64::MAX.to_le_bytes()).contains("segment 0"));
    assert!(with(64 + 32, &0x5000u64.to_le_bytes()).contains("segment 0"));
    // Replaces PT_LOAD with PT_NOTE.
    let mut nothing = whole.clone();
    nothing[64] = 4;
    assert!(matches!(
        elf::parse("x", &nothing),
        Err(KernelImageError::NoSegments { .. })
    ));
    assert!(matches!(
        elf::parse("x", b"\x7FELF"),
        Err(KernelImageError::Truncated { .. })
    ));
}

/// Every prefix of a file is either rejected or parsed, without a panic.
#[test]
fn truncated_file_never_panics() {
    let whole = vmlinux(&ImageShape::default());
    for len in 0..whole.len() {
        let data = &whole[..len];
        let read = elf::parse("x", data).is_ok();
        // The image must not be accepted unless it contains the whole segment.
        assert!(
            !read || len >= TEXT_AT + 0x1200,
            "{len} bytes were taken for a kernel"
        );
        let _ = KernelImage::parse("x", data);
    }
}

#[test]
fn kernel_version_comes_from_banner_symbol() {
    let image = KernelImage::parse("vmlinux", &vmlinux(&ImageShape::default())).unwrap();
    assert_eq!(image.release(), Some("6.1.0-56-cloud-amd64"));
    assert_eq!(image.text(), TEXT_VIRT..TEXT_VIRT + 0x1000);
    assert!(image.orc().is_none() && image.btf().is_none());
    let notes = image.notes().join("\n");
    assert!(notes.contains("no ORC") && notes.contains("no BTF"), "{notes}");
    assert!(!notes.contains("kernel symbols"), "{notes}");
}

/// For a stripped image without kallsyms, the version is found by searching for the kernel banner,
/// and the missing parts are reported.
#[test]
fn stripped_kernel_reports_missing_symbols() {
    let image = KernelImage::parse(
        "vmlinux",
        &vmlinux(&ImageShape {
            symbols: &[],
            ..ImageShape::default()
        }),
    )
    .unwrap();
    assert!(image.symbols().is_none());
    assert_eq!(image.release(), Some("6.1.0-56-cloud-amd64"));
    assert!(
        image
            .notes()
            .join("\n")
            .contains("neither a symbol table nor kallsyms")
    );
}

/// A kernel banner is ignored if it is a format string, unterminated or not valid text.
#[test]
fn banner_is_a_line_with_a_version() {
    assert_eq!(find_banner(b"Linux version %s (%s)\n"), None, "a format string");
    assert_eq!(
        find_banner(b"Linux version %s\n\0Linux version 7.3.4 x\n").as_deref(),
        Some("Linux version 7.3.4 x")
    );
    assert_eq!(find_banner(b"Linux version 6.1"), None, "it does not end");
    assert_eq!(find_banner(b"Linux version 6\xFF\n"), None);
    let mut long = b"Linux version 6".to_vec();
    long.resize(100_000, b'x');
    assert_eq!(find_banner(&long), None);
    let image = KernelImage::parse(
        "vmlinux",
        &vmlinux(&ImageShape {
            banner: b"none",
            ..ImageShape::default()
        }),
    );
    assert_eq!(image.unwrap().release(), None);
}

#[test]
fn kernel_for_other_machine_is_rejected() {
    let data = vmlinux(&ImageShape {
        machine: 183,
        ..ImageShape::default()
    });
    let error = line(&KernelImage::parse("Image", &data).unwrap_err());
    assert!(error.contains("Image") && error.contains("x86-64"), "{error}");
    assert!(KernelImage::parse("x", b"#!/bin/sh\n").is_err());
}

proptest! {
    /// A damaged image is either parsed or rejected. The parsed contents lie within the file, and
    /// code addresses lie within the segment that loads them.
    #[test]
    fn damaged_image_never_panics(
        damage in prop::collection::vec((0usize..0x1800, any::<u8>()), 1..20),
        headers in prop::collection::vec((0usize..0x78, any::<u8>()), 0..6),
    ) {
        let mut data = vmlinux(&ImageShape::default());
        for (at, byte) in damage.into_iter().chain(headers) {
            if let Some(place) = data.get_mut(at) {
                *place = byte;
            }
        }
        if let Ok(image) = elf::parse("x", &data) {
            for segment in &image.segments {
                prop_assert!(segment.data.len() as u64 <= segment.mem_bytes);
            }
            for code in &image.code {
                let inside = image.segments.iter().any(|s| {
                    code.virt.checked_sub(s.virt).is_some_and(|offset| {
                        offset + code.bytes.len() as u64 <= s.data.len() as u64
                            && s.phys.wrapping_add(offset) == code.phys
                    })
                });
                prop_assert!(inside, "{:#x}", code.virt);
            }
        }
        let _ = KernelImage::parse("x", &data);
    }

    /// Random bytes after the first bytes of an ELF header do not cause a panic.
    #[test]
    fn random_image_bytes_never_panic(class in 0u8..4, rest in prop::collection::vec(any::<u8>(), 0..300)) {
        let mut data = b"\x7FELF".to_vec();
        data.extend([class, 1, 1]);
        data.extend(rest);
        let _ = (elf::parse("x", &data), elf::tables("x", &data), KernelImage::parse("x", &data));
        let _ = KernelImage::from_memory(0xFFFF_FFFF_8100_0000, &data);
    }
}

/// An ELF program that needs an interpreter is rejected as a kernel, regardless of the locations of
/// its segments. Only an operating system loads such a program.
#[test]
fn program_with_interpreter_is_no_kernel() {
    let error = elf::parse("cat", &std::fs::read("/bin/cat").unwrap()).map(|_| ());
    let said = error.unwrap_err().to_string();
    assert!(said.contains("an operating system loads"), "{said}");
}
