//! A disk as a guest may have left it, under `--guest-disk`: whatever its partitions, its file system or its
//! qcow2 image say, memory is bounded and each answer comes in time.
//!
//! `make fuzz` runs it with a limit of memory of its own. The crates that read the file system and the image
//! may panic; that ends the reading and is not what is looked for here.
//!
//! Input: one byte (bit 0: the image is qcow2, else raw; bits 1 to 3: the disk goes on with so many MiB of
//! zeros), then the image.
#![no_main]

use std::fs::OpenOptions;
use std::io;
use std::sync::Once;

use guest_profile::disk::{DiskBytes, GuestDisk};
use libfuzzer_sys::fuzz_target;
use virtio_devices::disk::config::{DiskConfig, Format};
use virtio_devices::disk::view::View;

/// Most of a file that is asked for, as of a map of code made at run time.
const MOST: u64 = 16 << 20;
const FILES: [&str; 4] = ["/etc/hostname", "/usr/bin/prog", "/link", "/loop"];

struct Looked(View);

impl DiskBytes for Looked {
    fn len(&self) -> u64 {
        self.0.bytes()
    }

    fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        self.0.read(at, to)
    }

    fn look_again(&self) -> io::Result<()> {
        self.0.look_again().map_err(io::Error::other)
    }
}

fuzz_target!(|data: &[u8]| {
    static QUIET: Once = Once::new();
    // libFuzzer's own hook ends the process at each panic, also at one that is caught.
    QUIET.call_once(|| std::panic::set_hook(Box::new(|_| {})));
    let Some((how, image)) = data.split_first() else {
        return;
    };
    let path = std::env::temp_dir().join(format!("perfvisor-fuzz-guest-disk-{}", std::process::id()));
    std::fs::write(&path, image).expect("a file in the temporary directory");
    let config = if how & 1 != 0 {
        DiskConfig {
            format: Format::Qcow2,
            ..DiskConfig::raw(&path)
        }
    } else {
        // Sectors are whole, and tables may speak of what lies behind the input.
        let bytes = (image.len() as u64).next_multiple_of(4096) + (u64::from(how >> 1 & 7) << 20);
        let file = OpenOptions::new()
            .write(true)
            .open(&path)
            .expect("the file just made");
        file.set_len(bytes.max(4096)).expect("a sparse file");
        DiskConfig::raw(&path)
    };
    if let Ok(view) = View::open(&config)
        && let Ok(mut disk) = GuestDisk::open(Box::new(Looked(view)))
    {
        for file in FILES {
            if let Ok(bytes) = disk.read(file, MOST) {
                assert!(bytes.len() as u64 <= MOST);
            }
        }
        let _ = disk.look_again();
        let _ = disk.read(FILES[0], MOST);
    }
    let _ = std::fs::remove_file(&path);
});
