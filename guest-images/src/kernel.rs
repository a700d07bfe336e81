//! Extracts the ELF `vmlinux` from a distribution's `bzImage`.
//!
//! A bzImage consists of real-mode setup code and a protected-mode decompressor with the compressed
//! kernel as its payload. The setup header contains the location of the payload (boot protocol
//! 2.08+, `Documentation/arch/x86/boot.rst`).

use std::io::Read;

/// Maximum size of an unpacked kernel, in bytes. Distribution kernels have 30 to 120 MB.
const MAX_VMLINUX_BYTES: u64 = 1 << 30;

/// Offsets of setup header fields, from the start of the file.
mod header {
    /// Size of the setup code in 512-byte sectors. 0 means 4.
    pub const SETUP_SECTS: usize = 0x1F1;
    /// Magic "HdrS".
    pub const MAGIC: usize = 0x202;
    /// Boot protocol version, major in the high byte.
    pub const VERSION: usize = 0x206;
    /// Payload offset from the end of the setup code (protocol 2.08).
    pub const PAYLOAD_OFFSET: usize = 0x248;
    /// Payload length in bytes (protocol 2.08).
    pub const PAYLOAD_LENGTH: usize = 0x24C;
    /// End of the fields that are read.
    pub const END: usize = 0x250;
}

/// Error returned when a kernel image cannot be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The file has no Linux setup header.
    #[error("not a bzImage: no \"HdrS\" at offset 0x202")]
    NotBzImage,
    /// The boot protocol is too old to contain the payload location.
    #[error("boot protocol {0:#x} is older than 2.08, which tells where the payload is")]
    TooOld(u16),
    /// The payload extends beyond the end of the file.
    #[error("truncated: the payload ends at byte {end}, the file at {len}")]
    Truncated {
        /// End of the payload according to the header, in bytes.
        end: u64,
        /// Size of the file, in bytes.
        len: u64,
    },
    /// The payload uses an unknown compression method.
    #[error("unknown payload compression (first bytes {0:02x?})")]
    UnknownCompression([u8; 4]),
    /// The payload is damaged.
    #[error("cannot decompress the {format} payload")]
    Decompress {
        /// Name of the compression method.
        format: &'static str,
        /// Error of the decompressor.
        #[source]
        source: std::io::Error,
    },
    /// The unpacked payload is not an ELF file.
    #[error("the payload is not an ELF image")]
    NotElf,
}

/// Extracts the ELF kernel from `bz_image`.
pub fn extract_vmlinux(bz_image: &[u8]) -> Result<Vec<u8>, KernelError> {
    if bz_image.len() < header::END || &bz_image[header::MAGIC..header::MAGIC + 4] != b"HdrS" {
        return Err(KernelError::NotBzImage);
    }
    let version = u16::from_le_bytes([bz_image[header::VERSION], bz_image[header::VERSION + 1]]);
    if version < 0x208 {
        return Err(KernelError::TooOld(version));
    }
    let setup_sectors = match bz_image[header::SETUP_SECTS] {
        0 => 4,
        sectors => u64::from(sectors),
    };
    let start = (setup_sectors + 1) * 512 + u64::from(read_u32(bz_image, header::PAYLOAD_OFFSET));
    let end = start + u64::from(read_u32(bz_image, header::PAYLOAD_LENGTH));
    let len = bz_image.len() as u64;
    if end > len || end - start < 8 {
        return Err(KernelError::Truncated { end, len });
    }
    // Both bounds are within the slice and therefore fit in usize.
    let payload = &bz_image[start as usize..end as usize];
    let vmlinux = decompress(payload)?;
    if !vmlinux.starts_with(b"\x7fELF") {
        return Err(KernelError::NotElf);
    }
    Ok(vmlinux)
}

fn read_u32(bytes: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes([
        bytes[offset],
        bytes[offset + 1],
        bytes[offset + 2],
        bytes[offset + 3],
    ])
}

fn decompress(payload: &[u8]) -> Result<Vec<u8>, KernelError> {
    let wrap = |format| move |source| KernelError::Decompress { format, source };
    // The caller has checked that there are at least four bytes.
    match [payload[0], payload[1], payload[2], payload[3]] {
        // Legacy LZ4 frame, as written by `lz4 -l` in the kernel build.
        [0x02, 0x21, 0x4C, 0x18] => unlz4(&payload[4..]).map_err(wrap("lz4")),
        [0x28, 0xB5, 0x2F, 0xFD] => {
            let decoder = ruzstd::decoding::StreamingDecoder::new(payload)
                .map_err(|e| wrap("zstd")(std::io::Error::other(e.to_string())))?;
            read_bounded(decoder).map_err(wrap("zstd"))
        }
        [0xFD, b'7', b'z', b'X'] => {
            read_bounded(lzma_rust2::XzReader::new(payload, false)).map_err(wrap("xz"))
        }
        [0x1F, 0x8B, ..] => read_bounded(flate2::read::GzDecoder::new(payload)).map_err(wrap("gzip")),
        magic => Err(KernelError::UnknownCompression(magic)),
    }
}

/// Decompresses `data` if it uses one of the kernel's compression methods, and returns other data
/// unchanged. Used for kernel modules, which newer releases compress.
pub fn decompress_if_packed(data: Vec<u8>) -> std::io::Result<Vec<u8>> {
    if data.len() < 4 || data.starts_with(b"\x7fELF") {
        return Ok(data);
    }
    decompress(&data).map_err(std::io::Error::other)
}

/// Reads up to the size limit. The kernel build appends the unpacked size as four bytes after the
/// stream; the decoders stop before it.
fn read_bounded(reader: impl Read) -> std::io::Result<Vec<u8>> {
    let mut out = Vec::new();
    reader.take(MAX_VMLINUX_BYTES).read_to_end(&mut out)?;
    Ok(out)
}

/// Unpacks a legacy LZ4 frame: blocks of up to 8 MiB, each preceded by its compressed size.
fn unlz4(mut blocks: &[u8]) -> std::io::Result<Vec<u8>> {
    const BLOCK_BYTES: usize = 8 << 20;
    let mut out: Vec<u8> = Vec::new();
    while blocks.len() > 4 {
        let packed = read_u32(blocks, 0) as usize;
        let Some(block) = blocks.get(4..4 + packed) else {
            return Err(std::io::Error::new(
                std::io::ErrorKind::UnexpectedEof,
                format!("block of {packed} bytes, {} left", blocks.len() - 4),
            ));
        };
        let start = out.len();
        if (start + BLOCK_BYTES) as u64 > MAX_VMLINUX_BYTES {
            return Err(std::io::Error::other("larger than 1 GiB unpacked"));
        }
        out.resize(start + BLOCK_BYTES, 0);
        let unpacked =
            lz4_flex::block::decompress_into(block, &mut out[start..]).map_err(std::io::Error::other)?;
        out.truncate(start + unpacked);
        blocks = &blocks[4 + packed..];
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Builds a file in bzImage format around `payload`.
    fn bz_image(payload: &[u8]) -> Vec<u8> {
        let mut image = vec![0; 5 * 512];
        image[header::MAGIC..header::MAGIC + 4].copy_from_slice(b"HdrS");
        image[header::VERSION..header::VERSION + 2].copy_from_slice(&0x20Fu16.to_le_bytes());
        image[header::PAYLOAD_OFFSET..header::PAYLOAD_OFFSET + 4].copy_from_slice(&16u32.to_le_bytes());
        image[header::PAYLOAD_LENGTH..header::PAYLOAD_LENGTH + 4]
            .copy_from_slice(&(payload.len() as u32).to_le_bytes());
        image.extend([0x90; 16]);
        image.extend(payload);
        image
    }

    fn elf() -> Vec<u8> {
        let mut elf = b"\x7fELF".to_vec();
        elf.extend((0..100_000u32).flat_map(|i| (i % 251).to_le_bytes()));
        elf
    }

    fn lz4_legacy(data: &[u8]) -> Vec<u8> {
        let mut out = vec![0x02, 0x21, 0x4C, 0x18];
        for block in data.chunks(8 << 20) {
            let packed = lz4_flex::block::compress(block);
            out.extend((packed.len() as u32).to_le_bytes());
            out.extend(packed);
        }
        out.extend((data.len() as u32).to_le_bytes());
        out
    }

    #[test]
    fn lz4_and_gzip_payloads_are_unpacked() {
        assert_eq!(extract_vmlinux(&bz_image(&lz4_legacy(&elf()))).unwrap(), elf());
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&elf()).unwrap();
        assert_eq!(
            extract_vmlinux(&bz_image(&gzip.finish().unwrap())).unwrap(),
            elf()
        );
    }

    #[test]
    fn damaged_images_are_rejected_with_reason() {
        assert!(matches!(extract_vmlinux(&[0; 100]), Err(KernelError::NotBzImage)));
        let mut truncated = bz_image(&lz4_legacy(&elf()));
        truncated.truncate(truncated.len() - 1000);
        assert!(matches!(
            extract_vmlinux(&truncated),
            Err(KernelError::Truncated { .. })
        ));
        let unknown = bz_image(b"what is this");
        assert!(matches!(
            extract_vmlinux(&unknown),
            Err(KernelError::UnknownCompression(_))
        ));
        let not_elf = bz_image(&lz4_legacy(b"plain text, no kernel"));
        assert!(matches!(extract_vmlinux(&not_elf), Err(KernelError::NotElf)));
        let mut bad_block = lz4_legacy(&elf());
        bad_block[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(
            extract_vmlinux(&bz_image(&bad_block)),
            Err(KernelError::Decompress { .. })
        ));
    }
}
