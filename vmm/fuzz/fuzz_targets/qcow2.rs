//! Fuzzes guest requests to a disk with an untrusted qcow2 image. Only the image file may be
//! accessed, memory use must be bounded, and each request must complete.
//!
//! Panics in the crate that reads images disable the disk and are not reported as failures.
//!
//! Input: sixteen requests of eight bytes each (operation, sectors, first sector), followed by the
//! image.
#![no_main]

use std::sync::Once;

use libfuzzer_sys::fuzz_target;
use virtio_devices::disk::config::{DiskConfig, DiskFormat};
use virtio_devices::disk::image::DiskImage;
use vm_memory::{GuestAddress, GuestMemoryMmap};

const REQUESTS: usize = 16;
const REQUEST_BYTES: usize = 8;
const MEMORY_BYTES: usize = 1 << 18;

fuzz_target!(|data: &[u8]| {
    static QUIET: Once = Once::new();
    // Replace libFuzzer's panic hook, which terminates the process even if the panic is caught.
    QUIET.call_once(|| std::panic::set_hook(Box::new(|_| {})));
    let Some((requests, bytes)) = data.split_at_checked(REQUESTS * REQUEST_BYTES) else {
        return;
    };
    let path = std::env::temp_dir().join(format!("perfvisor-fuzz-qcow2-{}", std::process::id()));
    std::fs::write(&path, bytes).expect("a file in the temporary directory");
    let config = DiskConfig {
        format: DiskFormat::Qcow2,
        ..DiskConfig::raw(&path)
    };
    if let Ok(image) = DiskImage::open(&config) {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)]).expect("memory");
        for request in requests.chunks_exact(REQUEST_BYTES) {
            let first = u32::from_le_bytes([request[4], request[5], request[6], request[7]]);
            let first = u64::from(first) % image.sectors();
            let sectors = u64::from(request[2]).min(image.sectors() - first);
            let (at, bytes) = (first * 512, sectors * 512);
            let pieces = [(GuestAddress(0x1000), usize::try_from(bytes).expect("few"))];
            let _ = match request[0] % 6 {
                0 => image.read(&memory, &pieces, at).map(drop),
                1 => image.write(&memory, &pieces, at),
                2 => image.discard(at, bytes),
                3 => image.write_zeros(at, bytes, request[1] & 1 != 0),
                4 => image.flush(),
                _ => image.write_back(),
            };
        }
    }
    let _ = std::fs::remove_file(&path);
});
