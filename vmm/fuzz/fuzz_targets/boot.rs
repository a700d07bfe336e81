//! Fuzzes the loading of an untrusted kernel into guest memory and the initial register state, for
//! multiboot, bzImage, Linux ELF and PVH. A file must either be rejected or lie entirely within
//! guest memory.
//!
//! Input: one byte (bit 0: PVH; bit 1: initrd; bit 2: PCI functions), followed by the file.
#![no_main]

use std::path::PathBuf;

use libfuzzer_sys::fuzz_target;
use vmm::boot::{BootProtocol, GuestLoadParams, KernelSource, load};
use vmm::memory::GuestRam;
use vmm::numbers::VcpuCountRange;

const MEMORY: u64 = 32 << 20;

fn file(what: &str) -> PathBuf {
    std::env::temp_dir().join(format!("perfvisor-fuzz-boot-{what}-{}", std::process::id()))
}

fuzz_target!(|data: &[u8]| {
    thread_local!(static RAM: GuestRam = GuestRam::new(MEMORY).expect("memory"));
    let Some((how, kernel)) = data.split_first() else {
        return;
    };
    let (path, initrd) = (file("kernel"), file("initrd"));
    std::fs::write(&path, kernel).expect("a file in the temporary directory");
    let with_initrd = how & 2 != 0;
    if with_initrd {
        std::fs::write(&initrd, [0x69; 5000]).expect("a file in the temporary directory");
    }
    let request = GuestLoadParams {
        kernel: &KernelSource::File(path.clone()),
        protocol: if how & 1 != 0 {
            BootProtocol::Pvh
        } else {
            BootProtocol::Auto
        },
        initrd: with_initrd.then_some(initrd.as_path()),
        cmdline: "console=ttyS0",
        cpus: VcpuCountRange::new(1, 2).expect("two processors"),
        pci: how & 4 != 0,
        patch_rdpmc: true,
    };
    RAM.with(|ram| match load(ram, &request) {
        Ok(loaded) => {
            assert!(loaded.kernel.start <= loaded.kernel.end && loaded.kernel.end <= ram.low_end());
            if let Some(initrd) = loaded.initrd {
                assert!(initrd.start >= loaded.kernel.end && initrd.end <= ram.low_end());
            }
        }
        Err(e) => assert!(!e.to_string().contains('\n'), "{e}"),
    });
    let _ = std::fs::remove_file(&path);
    let _ = std::fs::remove_file(&initrd);
});
