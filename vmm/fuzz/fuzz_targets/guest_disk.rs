//! Fuzzes the reader of a guest's disk (`--guest-disk`) with arbitrary partitions, file systems and
//! qcow2 images. Memory use must be bounded, and each read must finish in time.
//!
//! `make fuzz` runs this target with a separate memory limit. Panics in the crates that parse file
//! systems and images stop the reader and are not reported as failures.
//!
//! Input: one byte (bit 0: qcow2 instead of raw; bits 1 to 3: number of MiB of zeros appended to
//! the disk), followed by the image.
#![no_main]

use std::fs::OpenOptions;
use std::io;
use std::sync::Once;

use guest_profile::disk::{GuestDiskReader, GuestDisk};
use libfuzzer_sys::fuzz_target;
use virtio_devices::disk::config::{DiskConfig, DiskFormat};
use virtio_devices::disk::view::UnlockedDiskView;

/// Maximum file size that the target requests from the reader, in bytes.
const MOST: u64 = 16 << 20;
const FILES: [&str; 4] = ["/etc/hostname", "/usr/bin/prog", "/link", "/loop"];

struct FuzzedDisk(UnlockedDiskView);

impl GuestDiskReader for FuzzedDisk {
    fn len(&self) -> u64 {
        self.0.bytes()
    }

    fn read(&self, at: u64, to: &mut [u8]) -> io::Result<()> {
        self.0.read(at, to)
    }

    fn reload(&self) -> io::Result<()> {
        self.0.reload().map_err(io::Error::other)
    }
}

fuzz_target!(|data: &[u8]| {
    static QUIET: Once = Once::new();
    // Replace libFuzzer's panic hook, which terminates the process even if the panic is caught.
    QUIET.call_once(|| std::panic::set_hook(Box::new(|_| {})));
    let Some((how, image)) = data.split_first() else {
        return;
    };
    let path = std::env::temp_dir().join(format!("perfvisor-fuzz-guest-disk-{}", std::process::id()));
    std::fs::write(&path, image).expect("a file in the temporary directory");
    let config = if how & 1 != 0 {
        DiskConfig {
            format: DiskFormat::Qcow2,
            ..DiskConfig::raw(&path)
        }
    } else {
        // Append zeros, so that the disk consists of complete sectors and tables may refer to
        // addresses beyond the input.
        let bytes = (image.len() as u64).next_multiple_of(4096) + (u64::from(how >> 1 & 7) << 20);
        let file = OpenOptions::new()
            .write(true)
            .open(&path)
            .expect("the file just made");
        file.set_len(bytes.max(4096)).expect("a sparse file");
        DiskConfig::raw(&path)
    };
    if let Ok(view) = UnlockedDiskView::open(&config)
        && let Ok(mut disk) = GuestDisk::open(Box::new(FuzzedDisk(view)))
    {
        for file in FILES {
            if let Ok(bytes) = disk.read(file, MOST) {
                assert!(bytes.len() as u64 <= MOST);
            }
        }
        let _ = disk.reload();
        let _ = disk.read(FILES[0], MOST);
    }
    let _ = std::fs::remove_file(&path);
});
