//! Builds the bare-metal guests of `bare-metal/` as ELF64 multiboot kernels in `OUT_DIR`. Each
//! kernel of [`guests::KERNELS`] is either compiled from its directory and `bare-metal/lib` with
//! the host's C compiler and linker, or copied from a directory of prebuilt kernels. The kernels
//! come from the first of these sources that applies:
//!
//! 1. the directory that `GUEST_ELF_DIR` names;
//! 2. compilation, if `GUEST_CC` or `GUEST_LD` names a tool;
//! 3. `prebuilt/`, which `make source` adds to the source archive, if the kernels' sources have not
//!    changed since;
//! 4. compilation.
//!
//! Each kernel is also stored compressed, which reduces its size in the program to less than half.

#[path = "build/guests.rs"]
mod guests;

use std::fs;
use std::io::Write;
use std::path::Path;

use flate2::Compression;
use flate2::write::GzEncoder;

fn main() {
    let out_dir = guests::out_dir();
    guests::make(&out_dir);
    for kernel in guests::KERNELS {
        pack(&out_dir.join(format!("{kernel}.elf")));
    }
}

/// Writes a compressed copy `FILE.gz` of a file.
fn pack(file: &Path) {
    let image =
        fs::read(file).unwrap_or_else(|e| guests::fail(&format!("cannot read {}: {e}", file.display())));
    let packed = file.with_extension("elf.gz");
    let mut gzip = GzEncoder::new(Vec::new(), Compression::best());
    let written = gzip.write_all(&image).and_then(|()| gzip.finish());
    written
        .and_then(|bytes| fs::write(&packed, bytes))
        .unwrap_or_else(|e| guests::fail(&format!("cannot write {}: {e}", packed.display())));
}
