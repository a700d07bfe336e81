//! Builds small kernel images for tests of the boot loader.

use std::path::{Path, PathBuf};

pub const EM_386: u16 = 3;
pub const EM_X86_64: u16 = 62;

/// A loadable segment of an ELF image.
pub struct ElfSegment<'a> {
    pub phys: u64,
    pub bytes: &'a [u8],
    pub mem_bytes: u64,
}

/// Builds an ELF64 image whose segments are executable and page-aligned in the file.
pub fn elf64(machine: u16, entry: u64, segments: &[ElfSegment<'_>]) -> Vec<u8> {
    let mut file = vec![0x7F, b'E', b'L', b'F', 2, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    file.extend_from_slice(&2u16.to_le_bytes());
    file.extend_from_slice(&machine.to_le_bytes());
    file.extend_from_slice(&1u32.to_le_bytes());
    for v in [entry, 64, 0] {
        file.extend_from_slice(&v.to_le_bytes());
    }
    file.extend_from_slice(&0u32.to_le_bytes());
    for v in [64u16, 56, segments.len() as u16, 0, 0, 0] {
        file.extend_from_slice(&v.to_le_bytes());
    }
    let mut offset = 0x1000u64;
    for s in segments {
        file.extend_from_slice(&1u32.to_le_bytes());
        file.extend_from_slice(&5u32.to_le_bytes());
        for v in [offset, s.phys, s.phys, s.bytes.len() as u64, s.mem_bytes, 0x1000] {
            file.extend_from_slice(&v.to_le_bytes());
        }
        offset += (s.bytes.len() as u64).next_multiple_of(0x1000);
    }
    append_segments(file, segments)
}

/// Builds an ELF32 image whose segments are executable and page-aligned in the file.
pub fn elf32(machine: u16, entry: u32, segments: &[ElfSegment<'_>]) -> Vec<u8> {
    let mut file = vec![0x7F, b'E', b'L', b'F', 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    file.extend_from_slice(&2u16.to_le_bytes());
    file.extend_from_slice(&machine.to_le_bytes());
    for v in [1u32, entry, 52, 0, 0] {
        file.extend_from_slice(&v.to_le_bytes());
    }
    for v in [52u16, 32, segments.len() as u16, 0, 0, 0] {
        file.extend_from_slice(&v.to_le_bytes());
    }
    let mut offset = 0x1000u32;
    for s in segments {
        let phys = s.phys as u32;
        for v in [
            1,
            offset,
            phys,
            phys,
            s.bytes.len() as u32,
            s.mem_bytes as u32,
            5,
            0x1000,
        ] {
            file.extend_from_slice(&v.to_le_bytes());
        }
        offset += (s.bytes.len() as u32).next_multiple_of(0x1000);
    }
    append_segments(file, segments)
}

fn append_segments(mut file: Vec<u8>, segments: &[ElfSegment<'_>]) -> Vec<u8> {
    for s in segments {
        file.resize(file.len().next_multiple_of(0x1000), 0);
        file.extend_from_slice(s.bytes);
    }
    file
}

/// Builds an ELF note.
pub fn note(name: &[u8], kind: u32, desc: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for word in [name.len() as u32, desc.len() as u32, kind] {
        bytes.extend_from_slice(&word.to_le_bytes());
    }
    for part in [name, desc] {
        bytes.extend_from_slice(part);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}

/// Adds a program header for `notes` to an image built by [`elf32`] or [`elf64`].
pub fn with_notes(mut elf: Vec<u8>, notes: &[u8]) -> Vec<u8> {
    let is_64 = elf[4] == 2;
    // Offset of the program headers, size of one header, and offset of their number.
    let (headers, size, number) = if is_64 { (64, 56, 56) } else { (52, 32, 44) };
    let count = u16::from_le_bytes([elf[number], elf[number + 1]]);
    elf.resize(elf.len().next_multiple_of(0x1000), 0);
    let (offset, length) = (elf.len() as u64, notes.len() as u64);
    elf.extend_from_slice(notes);
    elf[number..number + 2].copy_from_slice(&(count + 1).to_le_bytes());
    let header: Vec<u8> = if is_64 {
        let words = [4 | 4 << 32, offset, 0, 0, length, length, 4];
        words.iter().flat_map(|w: &u64| w.to_le_bytes()).collect()
    } else {
        let words = [4, offset as u32, 0, 0, length as u32, length as u32, 4, 4];
        words.iter().flat_map(|w| w.to_le_bytes()).collect()
    };
    let at = headers + size * usize::from(count);
    elf[at..at + size].copy_from_slice(&header);
    elf
}

/// Builds a multiboot v1 header: magic, flags, checksum and, if given, the address fields.
pub fn multiboot_header(flags: u32, addresses: Option<[u32; 5]>) -> Vec<u8> {
    let magic = 0x1BAD_B002u32;
    let mut words = vec![magic, flags, 0u32.wrapping_sub(magic).wrapping_sub(flags)];
    words.extend(addresses.into_iter().flatten());
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// Builds a bzImage whose payload is an ELF image, compressed with gzip.
pub fn bzimage(elf: &[u8]) -> Vec<u8> {
    use std::io::Write;
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    gz.write_all(elf).unwrap();
    bzimage_of(&gz.finish().unwrap())
}

/// Builds a bzImage with boot protocol 2.15 and the given payload, which is not compressed.
pub fn bzimage_of(payload: &[u8]) -> Vec<u8> {
    let mut f = vec![0u8; 1024];
    f[0x1F1] = 1;
    f[0x1FE..0x202].copy_from_slice(&[0x55, 0xAA, 0xEB, 0x6A]);
    f[0x202..0x206].copy_from_slice(b"HdrS");
    f[0x206..0x208].copy_from_slice(&0x020Fu16.to_le_bytes());
    f[0x22C..0x230].copy_from_slice(&0x7FFF_FFFFu32.to_le_bytes());
    f[0x238..0x23C].copy_from_slice(&2047u32.to_le_bytes());
    f[0x24C..0x250].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    f.extend_from_slice(payload);
    f
}

/// Writes `bytes` to the file `name` in `dir` and returns the file's path.
pub fn file(dir: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// 64-bit code of a Linux kernel: checks boot_params, prints the command line on COM1, and writes
/// the first byte of the initrd to the debug-exit port.
pub const LINUX_CODE: &[u8] = &[
    0x81, 0xBE, 0x02, 0x02, 0x00, 0x00, 0x48, 0x64, 0x72, 0x53, // cmp dword [rsi+0x202], "HdrS"
    0x75, 0x22, // jne fail
    0x44, 0x8B, 0x86, 0x18, 0x02, 0x00, 0x00, // mov r8d, [rsi+0x218]
    0x8B, 0xB6, 0x28, 0x02, 0x00, 0x00, // mov esi, [rsi+0x228]
    0xBA, 0xF8, 0x03, 0x00, 0x00, // mov edx, 0x3f8
    0xAC, // next: lodsb
    0x84, 0xC0, // test al, al
    0x74, 0x03, // jz done
    0xEE, // out dx, al
    0xEB, 0xF8, // jmp next
    0x41, 0x8A, 0x00, // done: mov al, [r8]
    0xE6, 0xF4, // out 0xf4, al
    0xF4, 0xEB, 0xFD, // hlt; jmp back
    0xB0, 0x7F, // fail: mov al, 0x7f
    0xE6, 0xF4, // out 0xf4, al
    0xF4, 0xEB, 0xFD, // hlt; jmp back
];

/// 32-bit code of a multiboot kernel: checks the magic number, prints the command line on COM1,
/// reads counter 7 with RDPMC, and writes its low byte to the debug-exit port.
pub const MULTIBOOT_CODE: &[u8] = &[
    0x3D, 0x02, 0xB0, 0xAD, 0x2B, // cmp eax, 0x2badb002
    0x75, 0x1E, // jne fail
    0x8B, 0x73, 0x10, // mov esi, [ebx+16]
    0xBA, 0xF8, 0x03, 0x00, 0x00, // mov edx, 0x3f8
    0xAC, // next: lodsb
    0x84, 0xC0, // test al, al
    0x74, 0x03, // jz done
    0xEE, // out dx, al
    0xEB, 0xF8, // jmp next
    0xB9, 0x07, 0x00, 0x00, 0x00, // done: mov ecx, 7
    0x0F, 0x33, // rdpmc
    0xE6, 0xF4, // out 0xf4, al
    0xF4, // hlt
    0xEB, 0xFD, // jmp back
    0x90, 0x90, // nop
    0xB0, 0x7F, // fail: mov al, 0x7f
    0xE6, 0xF4, // out 0xf4, al
    0xF4, 0xEB, 0xFD, // hlt; jmp back
];
/// Offset of the RDPMC instruction in [`MULTIBOOT_CODE`].
pub const MULTIBOOT_RDPMC: u64 = 28;

/// 32-bit code of a PVH kernel.
///
/// The PVH entry point is at [`PVH_ENTRY`]. From there, the code checks the magic number, prints
/// the command line on COM1, and writes the first byte of the first module to the debug-exit port.
/// The code before it is the entry point of other boot protocols and exits with a different status.
pub const PVH_CODE: &[u8] = &[
    0xB0, 0x7E, // mov al, 0x7e
    0xE6, 0xF4, // out 0xf4, al
    0xF4, 0xEB, 0xFD, // hlt; jmp back
    0x90, // nop
    0x81, 0x3B, 0x78, 0xC5, 0x6E, 0x33, // cmp dword [ebx], 0x336ec578
    0x75, 0x1D, // jne fail
    0x8B, 0x73, 0x18, // mov esi, [ebx+24]
    0xBA, 0xF8, 0x03, 0x00, 0x00, // mov edx, 0x3f8
    0xAC, // next: lodsb
    0x84, 0xC0, // test al, al
    0x74, 0x03, // jz done
    0xEE, // out dx, al
    0xEB, 0xF8, // jmp next
    0x8B, 0x7B, 0x10, // done: mov edi, [ebx+16]
    0x8B, 0x3F, // mov edi, [edi]
    0x8A, 0x07, // mov al, [edi]
    0xE6, 0xF4, // out 0xf4, al
    0xF4, 0xEB, 0xFD, // hlt; jmp back
    0x90, // nop
    0xB0, 0x7F, // fail: mov al, 0x7f
    0xE6, 0xF4, // out 0xf4, al
    0xF4, 0xEB, 0xFD, // hlt; jmp back
];
/// Offset of the PVH entry point in [`PVH_CODE`].
pub const PVH_ENTRY: u32 = 8;

/// Encodes symbols in the format of a kernel's kallsyms: addresses, count, names, markers, tokens
/// and token index.
pub fn kallsyms(symbols: &[(u64, &str)]) -> Vec<u8> {
    fn pad(out: &mut Vec<u8>) {
        out.resize(out.len().next_multiple_of(8), 0);
    }
    let mut out = Vec::new();
    for (address, _) in symbols {
        out.extend(address.to_le_bytes());
    }
    out.extend((symbols.len() as u64).to_le_bytes());
    let names_at = out.len();
    let mut markers = Vec::new();
    for (n, (_, name)) in symbols.iter().enumerate() {
        if n % 256 == 0 {
            markers.push((out.len() - names_at) as u64);
        }
        out.push(name.len() as u8 + 1);
        out.push(b'T');
        out.extend(name.as_bytes());
    }
    pad(&mut out);
    out.extend(markers.into_iter().flat_map(u64::to_le_bytes));
    let mut index = Vec::new();
    let tokens_at = out.len();
    for token in 0..=255u8 {
        index.extend(((out.len() - tokens_at) as u16).to_le_bytes());
        match token {
            b'!'..=b'~' => out.push(token),
            _ => out.extend(b"zz"),
        }
        out.push(0);
    }
    pad(&mut out);
    out.extend(index);
    out
}
