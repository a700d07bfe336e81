//! The bare-metal guests of `bare-metal/`, as one ELF64 multiboot kernel each in `OUT_DIR`: compiled with the
//! host's C compiler and linker, each directory of [`guests::KERNELS`] together with `bare-metal/lib`, or
//! taken as they were compiled before. They come from
//!
//! 1. the directory that `GUEST_ELF_DIR` names;
//! 2. the sources, if `GUEST_CC` or `GUEST_LD` names a tool for them;
//! 3. `prebuilt/`, which `make source` puts into the source archive, unless the sources have changed since;
//! 4. the sources.
//!
//! Each is there compressed, too: the program has them so, which are less than half as large then.

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

/// Writes `FILE.gz` beside a file.
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
