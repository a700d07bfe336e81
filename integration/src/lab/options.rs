//! Configuration of a lab host.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use guest_images::linux::KernelChoice;
use guest_images::qemu::QemuCpuRequirement;

/// The configuration of a lab host.
#[derive(Debug, Clone)]
pub struct LabOptions {
    /// Number of virtual processors that run guests. QEMU uses a thread for each. The lab has one
    /// more processor, which is reserved for the lab itself.
    pub cpus: u32,
    /// Memory of the lab in MiB. The lab's files also occupy this memory.
    pub memory_mib: u32,
    /// `true` to install perf in the lab itself. Guests in the lab always contain perf.
    pub perf: bool,
    /// Kernel of the lab itself. Guests in the lab use the default kernel.
    pub kernel: KernelChoice,
    /// Additional files, each with its path in the lab and its local path. Permissions are copied.
    pub files: Vec<(String, PathBuf)>,
    /// Raw images for `/dev/vda`, `/dev/vdb` and so on; an image may occur twice. Writes are
    /// discarded with the lab.
    pub disks: Vec<PathBuf>,
    /// Features that the lab's QEMU must emulate. A different QEMU is fetched if the default one
    /// lacks them.
    pub qemu_needs: QemuCpuRequirement,
    /// Set to `true` to abort a boot in progress with an error.
    pub cancelled: Arc<AtomicBool>,
}

impl Default for LabOptions {
    fn default() -> Self {
        Self {
            cpus: 2,
            memory_mib: 3072,
            perf: false,
            kernel: KernelChoice::default(),
            files: Vec::new(),
            disks: Vec::new(),
            qemu_needs: QemuCpuRequirement::default(),
            cancelled: Arc::default(),
        }
    }
}
