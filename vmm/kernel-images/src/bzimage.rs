//! Extraction of the ELF image from a bzImage.
//!
//! Linux's setup header contains the location of the compressed kernel (boot protocol 2.08 and
//! later). Decompressing the kernel in the VMM instead of the guest provides its text, which is
//! searched for RDPMC, and its symbols. See Linux, Documentation/arch/x86/boot.rst.

use std::io::Read;

use lzma_rust2::XzReader;

use crate::error::{ImageCorruption, KernelImageError, Lz4BlockError};
use crate::{elf, le};

/// Maximum size of an unpacked kernel, in bytes.
pub const MAX_UNPACKED_BYTES: u64 = 512 << 20;
/// Memory limit of the xz decoder, in KiB. The kernel itself limits the dictionary to 32 to 128
/// MiB.
const XZ_MEMORY_KIB: u32 = 192 << 10;
/// Uncompressed size of one block in the legacy lz4 format, in bytes.
const LZ4_LEGACY_BLOCK_BYTES: usize = 8 << 20;
const LZ4_LEGACY_MAGIC: [u8; 4] = [0x02, 0x21, 0x4C, 0x18];

/// Offset of the setup header, both in a bzImage file and in the `boot_params` structure.
pub const SETUP_HEADER_OFFSET: usize = 0x1F1;

/// Fields of a bzImage's setup header that the loader uses.
#[derive(Clone, Copy, Debug)]
pub struct SetupHeader {
    /// Maximum address of an initrd.
    pub initrd_addr_max: u32,
    /// Maximum length of the command line, without the terminating NUL.
    pub cmdline_bytes: u32,
    /// End of the setup header, as a byte offset in the file.
    pub end: usize,
    payload_start: usize,
    payload_end: usize,
}

/// Returns whether `data` starts with the headers of a bzImage.
pub fn is_bzimage(data: &[u8]) -> bool {
    data.get(0x1FE..0x200) == Some(&[0x55, 0xAA]) && data.get(0x202..0x206) == Some(b"HdrS")
}

/// Reads a 32-bit field of the setup header at offset `at`, or returns 0 if the field is beyond the
/// end of `data`.
fn u32_at(data: &[u8], at: usize) -> u32 {
    le::u32_at(data, at).unwrap_or(0)
}

/// Reads and validates the setup header.
///
/// # Errors
/// Returns a [`KernelImageError`] if the file is shorter than its header claims, or its boot
/// protocol is too old.
pub fn setup_header(name: &str, data: &[u8]) -> Result<SetupHeader, KernelImageError> {
    const FIELDS_END: usize = 0x250;
    if data.len() < FIELDS_END {
        return Err(KernelImageError::truncated(
            name,
            "the setup header",
            FIELDS_END as u64,
            data,
        ));
    }
    let version = le::u16_at(data, 0x206).unwrap_or(0);
    let [minor, major] = version.to_le_bytes();
    if version < 0x0208 {
        return Err(KernelImageError::OldProtocol {
            name: name.into(),
            major,
            minor,
        });
    }
    // The displacement of the jump instruction at 0x200 gives the end of the header.
    let end = 0x202 + usize::from(data[0x201]);
    // A value of 0 means 4 sectors (boot protocol, "setup_sects").
    let sectors = match data[SETUP_HEADER_OFFSET] {
        0 => 4,
        n => usize::from(n),
    };
    let payload_start = (sectors + 1) * 512 + u32_at(data, 0x248) as usize;
    let payload_bytes = u32_at(data, 0x24C) as usize;
    let payload_end = payload_start.saturating_add(payload_bytes);
    if payload_bytes < 16 {
        // The file is a valid image of a different type. Programs with this header, such as
        // memtest86+, are loaded at 1 MiB and start in 32-bit mode, which is not supported.
        return Err(KernelImageError::NotAKernel {
            name: name.into(),
            found: "it boots by the Linux protocol but has no Linux kernel inside (memtest86+ is made so)",
        });
    }
    if payload_end > data.len() {
        return Err(KernelImageError::truncated(
            name,
            "the compressed kernel",
            payload_end as u64,
            data,
        ));
    }
    if end > data.len() {
        return Err(KernelImageError::truncated(
            name,
            "the setup header",
            end as u64,
            data,
        ));
    }
    let cmdline_bytes = match u32_at(data, 0x238) {
        0 => 255,
        n => n,
    };
    Ok(SetupHeader {
        initrd_addr_max: u32_at(data, 0x22C),
        cmdline_bytes,
        end,
        payload_start,
        payload_end,
    })
}

/// Unpacks the kernel. Returns the image and the name of the compression method.
///
/// # Errors
/// Returns a [`KernelImageError`] if the payload is damaged, too large or compressed with an
/// unsupported method.
pub fn payload(
    name: &str,
    data: &[u8],
    header: &SetupHeader,
) -> Result<(Vec<u8>, &'static str), KernelImageError> {
    unpack(name, &data[header.payload_start..header.payload_end])
}

/// Extracts the ELF `vmlinux` from the bzImage `data`.
///
/// # Errors
/// Returns [`KernelImageError::NotAKernel`] if `data` is not a bzImage,
/// [`KernelImageError::Malformed`] if its payload is not an ELF file, and the errors of
/// [`setup_header`] and [`payload`].
pub fn extract_vmlinux(name: &str, data: &[u8]) -> Result<Vec<u8>, KernelImageError> {
    if !is_bzimage(data) {
        return Err(KernelImageError::NotAKernel {
            name: name.into(),
            found: "it is not a bzImage",
        });
    }
    let (vmlinux, _) = payload(name, data, &setup_header(name, data)?)?;
    if !elf::is_elf(&vmlinux) {
        return Err(KernelImageError::malformed(name, ImageCorruption::NoElfPayload));
    }
    Ok(vmlinux)
}

/// Unpacks a kernel payload or a compressed kernel module. Returns the contents and the name of the
/// compression method, which is `none` for an uncompressed ELF file.
///
/// # Errors
/// Returns [`KernelImageError::UnsupportedCompression`] for an unsupported method,
/// [`KernelImageError::Unpack`] if the data is damaged, and [`KernelImageError::UnpackedTooLarge`]
/// if the unpacked data exceeds the limit.
pub fn unpack(name: &str, payload: &[u8]) -> Result<(Vec<u8>, &'static str), KernelImageError> {
    // The kernel build appends the unpacked size. A gzip stream already ends with its unpacked
    // size.
    let claimed = payload
        .last_chunk()
        .map_or(0, |size| u64::from(u32::from_le_bytes(*size)));
    let method = method_of(payload);
    let unsupported = |method| KernelImageError::UnsupportedCompression {
        name: name.into(),
        method,
    };
    let image = match method {
        "gzip" => bounded(name, method, claimed, flate2::read::GzDecoder::new(payload))?,
        // Decodes only one stream, because the data after it is the unpacked size.
        "xz" => {
            let decoder = XzReader::new_mem_limit(payload, false, XZ_MEMORY_KIB);
            bounded(name, method, claimed, decoder)?
        }
        "zstd" => {
            let decoder = ruzstd::decoding::StreamingDecoder::new(payload)
                .map_err(|e| unpack_error(name, method, e))?;
            bounded(name, method, claimed, decoder)?
        }
        "lz4" => lz4_legacy(name, payload, claimed)?,
        "none" => payload.to_vec(),
        other => return Err(unsupported(other)),
    };
    Ok((image, method))
}

/// Returns the name of the compression method, which the first bytes of `payload` identify.
fn method_of(payload: &[u8]) -> &'static str {
    match payload {
        [0x1F, 0x8B, ..] => "gzip",
        [0xFD, b'7', b'z', b'X', b'Z', 0, ..] => "xz",
        [0x28, 0xB5, 0x2F, 0xFD, ..] => "zstd",
        p if p.starts_with(&LZ4_LEGACY_MAGIC) => "lz4",
        [0x7F, b'E', b'L', b'F', ..] => "none",
        [b'B', b'Z', b'h', ..] => "bzip2",
        [0x89, b'L', b'Z', b'O', ..] => "lzo",
        [0x5D, 0, 0, ..] => "lzma",
        _ => "an unknown method",
    }
}

fn unpack_error(
    name: &str,
    method: &'static str,
    source: impl Into<Box<dyn std::error::Error + Send + Sync>>,
) -> KernelImageError {
    KernelImageError::Unpack {
        name: name.into(),
        method,
        source: source.into(),
    }
}

/// Reads the unpacked payload from `decoder` until end of file. Fails if it has more than
/// [`MAX_UNPACKED_BYTES`] bytes.
fn bounded(
    name: &str,
    method: &'static str,
    claimed: u64,
    decoder: impl Read,
) -> Result<Vec<u8>, KernelImageError> {
    // The claimed size is only an allocation hint, and a wrong value costs a reallocation.
    let mut out = Vec::with_capacity(claimed.min(MAX_UNPACKED_BYTES / 4) as usize);
    let read = decoder.take(MAX_UNPACKED_BYTES + 1).read_to_end(&mut out);
    if out.len() as u64 > MAX_UNPACKED_BYTES {
        return Err(KernelImageError::UnpackedTooLarge {
            name: name.into(),
            method,
            limit_bytes: MAX_UNPACKED_BYTES,
        });
    }
    read.map_err(|e| unpack_error(name, method, e))?;
    Ok(out)
}

/// Unpacks the legacy lz4 format, which consists of a magic number and a sequence of blocks. Each
/// block consists of its compressed size and the compressed bytes. Each block except the last
/// unpacks to 8 MiB. The stream ends with the unpacked size, which the kernel build appends.
fn lz4_legacy(name: &str, payload: &[u8], claimed: u64) -> Result<Vec<u8>, KernelImageError> {
    let method = "lz4";
    if claimed > MAX_UNPACKED_BYTES {
        return Err(KernelImageError::UnpackedTooLarge {
            name: name.into(),
            method,
            limit_bytes: MAX_UNPACKED_BYTES,
        });
    }
    let mut rest = payload.get(4..payload.len() - 4).unwrap_or_default();
    let mut out = Vec::with_capacity(claimed.min(MAX_UNPACKED_BYTES / 4) as usize);
    let mut block_out = vec![0; LZ4_LEGACY_BLOCK_BYTES];
    while rest.len() >= 4 {
        if rest.starts_with(&LZ4_LEGACY_MAGIC) {
            rest = &rest[4..];
            continue;
        }
        let len = u32_at(rest, 0) as usize;
        let block = rest
            .get(4..4 + len)
            .ok_or_else(|| unpack_error(name, method, Lz4BlockError::PastEnd(len)))?;
        let produced = lz4_flex::block::decompress_into(block, &mut block_out)
            .map_err(|e| unpack_error(name, method, e))?;
        out.extend_from_slice(&block_out[..produced]);
        if out.len() as u64 > claimed {
            return Err(unpack_error(name, method, Lz4BlockError::Larger(claimed)));
        }
        rest = &rest[4 + len..];
    }
    if out.len() as u64 != claimed {
        return Err(unpack_error(
            name,
            method,
            Lz4BlockError::Smaller {
                found: out.len(),
                claimed,
            },
        ));
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Returns a bzImage with the compressed kernel `payload` (boot protocol 2.15, one setup
    /// sector).
    fn bzimage(payload: &[u8], unpacked_bytes: u32) -> Vec<u8> {
        let mut f = vec![0u8; 1024];
        f[SETUP_HEADER_OFFSET] = 1;
        f[0x1FE..0x200].copy_from_slice(&[0x55, 0xAA]);
        f[0x200..0x202].copy_from_slice(&[0xEB, 0x6A]);
        f[0x202..0x206].copy_from_slice(b"HdrS");
        f[0x206..0x208].copy_from_slice(&0x020Fu16.to_le_bytes());
        f[0x22C..0x230].copy_from_slice(&0x7FFF_FFFFu32.to_le_bytes());
        f[0x238..0x23C].copy_from_slice(&2047u32.to_le_bytes());
        f[0x24C..0x250].copy_from_slice(&(payload.len() as u32 + 4).to_le_bytes());
        f.extend_from_slice(payload);
        f.extend_from_slice(&unpacked_bytes.to_le_bytes());
        f
    }

    fn unpack_file(file: &[u8]) -> Result<(Vec<u8>, &'static str), KernelImageError> {
        let header = setup_header("k", file)?;
        payload("k", file, &header)
    }

    /// [`sample`], compressed in the same way as by a kernel build:
    /// `xz --check=crc32 --x86 --lzma2=preset=1` (xz 5.4.1).
    const XZ: &[u8] = include_bytes!("../tests/fixtures/as-the-kernels-build.xz");

    fn sample() -> Vec<u8> {
        (0..300_000u32).map(|i| (i / 7) as u8).collect()
    }

    #[test]
    fn gzip_xz_with_bcj_and_lz4_payloads_unpack_to_the_same_bytes() {
        let plain = sample();
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(&plain).unwrap();
        let gz = gz.finish().unwrap();
        assert_eq!(
            unpack_file(&bzimage(&gz, plain.len() as u32)).unwrap(),
            (plain.clone(), "gzip")
        );

        assert_eq!(
            unpack_file(&bzimage(XZ, plain.len() as u32)).unwrap(),
            (plain.clone(), "xz")
        );

        let mut lz4 = LZ4_LEGACY_MAGIC.to_vec();
        let block = lz4_flex::block::compress(&plain);
        lz4.extend_from_slice(&(block.len() as u32).to_le_bytes());
        lz4.extend_from_slice(&block);
        assert_eq!(
            unpack_file(&bzimage(&lz4, plain.len() as u32)).unwrap(),
            (plain.clone(), "lz4")
        );

        let zst =
            ruzstd::encoding::compress_to_vec(plain.as_slice(), ruzstd::encoding::CompressionLevel::Fastest);
        assert_eq!(
            unpack_file(&bzimage(&zst, plain.len() as u32)).unwrap(),
            (plain, "zstd")
        );
    }

    #[test]
    fn truncated_payload_is_an_error() {
        let plain = sample();
        let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gz.write_all(&plain).unwrap();
        let file = bzimage(&gz.finish().unwrap(), plain.len() as u32);
        for len in (0..file.len()).step_by(37) {
            assert!(setup_header("k", &file[..len]).is_err(), "cut at {len}");
        }
    }

    /// A damaged xz payload is either rejected or unpacked to the original contents, because its
    /// checksums cover every byte.
    #[test]
    fn damaged_xz_payload_fails_or_unpacks_unchanged() {
        let plain = sample();
        for len in (1..XZ.len()).step_by(7) {
            let cut = bzimage(&XZ[..len], plain.len() as u32);
            assert!(unpack_file(&cut).is_err(), "cut at {len}");
        }
        for bit in (0..XZ.len() * 8).step_by(29) {
            let mut damaged = XZ.to_vec();
            damaged[bit / 8] ^= 1 << (bit % 8);
            if let Ok((unpacked, _)) = unpack_file(&bzimage(&damaged, plain.len() as u32)) {
                assert!(unpacked == plain, "bit {bit}");
            }
        }
    }

    /// A payload with the header of `xz --lzma2=preset=0,dict=256MiB` must not make the decoder
    /// allocate that much memory.
    #[test]
    fn xz_memory_is_limited() {
        let large = include_bytes!("../tests/fixtures/large-dictionary.xz");
        let error = unpack_file(&bzimage(large, 300_000)).unwrap_err();
        let why = std::error::Error::source(&error).unwrap().to_string();
        assert!(why.contains("memory"), "{error}: {why}");
    }

    #[test]
    fn unsupported_compression_is_named() {
        for (magic, method) in [
            (&b"BZh91AY&SY______"[..], "bzip2"),
            (
                &[0x5D, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0][..],
                "lzma",
            ),
            (&b"\x89LZO\0\r\n\x1a\n_______"[..], "lzo"),
            (&b"????????????????"[..], "unknown"),
        ] {
            let err = unpack_file(&bzimage(magic, 100)).unwrap_err();
            assert!(err.to_string().contains(method), "{err}");
        }
    }

    #[test]
    fn lz4_payload_with_wrong_size_is_rejected() {
        let plain = sample();
        let mut lz4 = LZ4_LEGACY_MAGIC.to_vec();
        let block = lz4_flex::block::compress(&plain);
        lz4.extend_from_slice(&(block.len() as u32).to_le_bytes());
        lz4.extend_from_slice(&block);
        for claim in [plain.len() as u32 - 1, plain.len() as u32 + 1, u32::MAX] {
            assert!(unpack_file(&bzimage(&lz4, claim)).is_err());
        }
    }

    #[test]
    fn extracted_vmlinux_is_an_elf_file_from_a_bzimage() {
        let gzip = |contents: &[u8]| {
            let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            gz.write_all(contents).unwrap();
            bzimage(&gz.finish().unwrap(), contents.len() as u32)
        };
        let elf = [&b"\x7fELF"[..], &sample()].concat();
        assert_eq!(extract_vmlinux("k", &gzip(&elf)).unwrap(), elf);
        let no_elf = extract_vmlinux("k", &gzip(&sample()));
        assert!(
            matches!(no_elf, Err(KernelImageError::Malformed { .. })),
            "{no_elf:?}"
        );
        let no_image = extract_vmlinux("k", &elf);
        assert!(
            matches!(no_image, Err(KernelImageError::NotAKernel { .. })),
            "{no_image:?}"
        );
        // A kernel module is compressed without a size after the stream.
        assert_eq!(unpack("module", XZ).unwrap(), (sample(), "xz"));
        for short in [&b""[..], &LZ4_LEGACY_MAGIC, b"\x1F\x8B"] {
            assert!(unpack("module", short).is_err());
        }
    }
}
