//! Bare-metal guests: small multiboot kernels in C and assembly, compiled by the build script.
//!
//! The guests run on every KVM, including a software-only KVM, and under plain QEMU.
//! `guest-images/bare-metal/` contains the sources and explains how to write a new test;
//! `docs/guide/bare-metal-guests.md` describes their use.

use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Image of the first guest in [`GUESTS`], which `perfvisor run` boots if no kernel is given.
pub static BUILTIN: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/selftest.elf"));

/// A bare-metal guest that is embedded in this crate.
#[derive(Debug, Clone, Copy)]
pub struct BareMetalGuest {
    /// Name of the guest and of its file, without `.elf`.
    pub name: &'static str,
    /// One-line description of the guest's purpose.
    pub purpose: &'static str,
    /// Contents of the guest's ELF image, compressed with gzip. [`BareMetalGuest::image`]
    /// decompresses them.
    pub packed: &'static [u8],
}

impl BareMetalGuest {
    /// Returns the ELF64 image, which has a multiboot 1 header in its first 8 KiB.
    ///
    /// # Panics
    /// Panics if the embedded data is not valid gzip data.
    #[must_use]
    pub fn image(&self) -> Vec<u8> {
        let mut image = Vec::new();
        flate2::read::GzDecoder::new(self.packed)
            .read_to_end(&mut image)
            .expect("the build script packs it");
        image
    }
}

/// Expands to the compressed image of the bare-metal guest `$name`.
macro_rules! packed {
    ($name:literal) => {
        include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".elf.gz"))
    };
}

/// Test kernel that checks the virtual PMU from within the guest and prints TAP.
pub static VPMU_TESTS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/vpmu.elf"));

/// Test kernel that runs code blocks with known instruction counts, checks that they are counted
/// exactly, and prints TAP.
pub static EXACT_TESTS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/exact.elf"));

/// Test kernel that executes RDPMC in generated code and in user programs and prints TAP.
pub static RDPMC_TESTS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/rdpmc.elf"));

/// Guest that performs measurements for `perfvisor validate`, controlled through its console.
pub static VALIDATE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/validate.elf"));

/// All bare-metal guests.
pub static GUESTS: [BareMetalGuest; 5] = [
    BareMetalGuest {
        name: "selftest",
        purpose: "the built-in guest: counts known work and shows it",
        packed: packed!("selftest"),
    },
    BareMetalGuest {
        name: "vpmu",
        purpose: "tests of the virtual PMU from inside, in TAP",
        packed: packed!("vpmu"),
    },
    BareMetalGuest {
        name: "exact",
        purpose: "hand-counted code for exact counting, in TAP",
        packed: packed!("exact"),
    },
    BareMetalGuest {
        name: "rdpmc",
        purpose: "RDPMC that no search of the file finds, in TAP",
        packed: packed!("rdpmc"),
    },
    BareMetalGuest {
        name: "validate",
        purpose: "measures what perfvisor validate asks for",
        packed: packed!("validate"),
    },
];

/// Writes every guest as `NAME.elf` into `dir`, creating the directory if needed, and returns the
/// paths.
///
/// # Errors
///
/// Returns an error if the directory cannot be created or a file cannot be written. The message
/// contains the path.
pub fn write_all(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let named = |path: &Path, e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", path.display()));
    std::fs::create_dir_all(dir).map_err(|e| named(dir, e))?;
    let write = |guest: &BareMetalGuest| {
        let path = dir.join(format!("{}.elf", guest.name));
        std::fs::write(&path, guest.image()).map_err(|e| named(&path, e))?;
        Ok(path)
    };
    GUESTS.iter().map(write).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn u16_at(image: &[u8], at: usize) -> u16 {
        u16::from_le_bytes(image[at..at + 2].try_into().unwrap())
    }

    fn u32_at(image: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(image[at..at + 4].try_into().unwrap())
    }

    fn u64_at(image: &[u8], at: usize) -> u64 {
        u64::from_le_bytes(image[at..at + 8].try_into().unwrap())
    }

    /// Returns the offset of the multiboot header, which is 4-byte aligned within the first 8 KiB.
    fn multiboot_header(image: &[u8]) -> usize {
        (0..8192 - 12)
            .step_by(4)
            .find(|&at| {
                let sum = (0..3).fold(0u32, |sum, i| sum.wrapping_add(u32_at(image, at + 4 * i)));
                u32_at(image, at) == 0x1BAD_B002 && sum == 0
            })
            .expect("no multiboot header in the first 8 KiB")
    }

    #[test]
    fn every_guest_is_an_elf64_executable_for_x86_64() {
        for guest in &GUESTS {
            assert_eq!(&guest.image()[..6], b"\x7fELF\x02\x01", "{}", guest.name);
            assert_eq!(
                (u16_at(&guest.image(), 16), u16_at(&guest.image(), 18)),
                (2, 62),
                "{}",
                guest.name
            );
        }
    }

    #[test]
    fn address_fields_and_program_headers_load_the_same_bytes() {
        for guest in &GUESTS {
            let image = &guest.image();
            let header = multiboot_header(image);
            let field = |i: usize| u64::from(u32_at(image, header + 4 * i));
            assert_ne!(
                field(1) & 0x1_0000,
                0,
                "{}: address fields are announced",
                guest.name
            );
            let (header_addr, load, load_end, bss_end, entry) =
                (field(3), field(4), field(5), field(6), field(7));
            assert_eq!(
                entry,
                u64_at(image, 24),
                "{}: both name one entry point",
                guest.name
            );
            let (ph, ph_size, ph_count) = (u64_at(image, 32), u16_at(image, 54), u16_at(image, 56));
            for i in 0..usize::from(ph_count) {
                let at = ph as usize + i * usize::from(ph_size);
                let (offset, paddr) = (u64_at(image, at + 8), u64_at(image, at + 24));
                let (file_size, mem_size) = (u64_at(image, at + 32), u64_at(image, at + 40));
                assert_eq!(u32_at(image, at), 1, "{}: PT_LOAD", guest.name);
                assert!(
                    paddr + mem_size <= bss_end,
                    "{}: segment {i} ends inside",
                    guest.name
                );
                if file_size > 0 {
                    assert_eq!(
                        offset + header_addr,
                        paddr + header as u64,
                        "{}: segment {i}",
                        guest.name
                    );
                    assert!(
                        paddr >= load && paddr + file_size <= load_end,
                        "{}: segment {i}",
                        guest.name
                    );
                }
            }
        }
    }

    #[test]
    fn guest_fits_into_minimum_memory() {
        for guest in &GUESTS {
            let bss_end = u32_at(&guest.image(), multiboot_header(&guest.image()) + 24);
            assert!(bss_end < 8 << 20, "{} ends at {bss_end:#x}", guest.name);
        }
    }

    #[test]
    fn write_all_writes_one_file_per_guest() {
        let dir = std::env::temp_dir().join(format!("bare-metal-guests-{}", std::process::id()));
        let paths = write_all(&dir).unwrap();
        for (guest, path) in GUESTS.iter().zip(&paths) {
            assert_eq!(std::fs::read(path).unwrap(), guest.image());
        }
        std::fs::remove_dir_all(&dir).unwrap();
        let file = dir.with_extension("file");
        std::fs::write(&file, "in the way").unwrap();
        let error = write_all(&file).unwrap_err();
        assert!(error.to_string().contains(&file.display().to_string()), "{error}");
        std::fs::remove_file(&file).unwrap();
    }
}
