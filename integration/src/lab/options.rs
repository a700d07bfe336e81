//! How a lab is set up.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use guest_images::linux::KernelChoice;

/// How a lab is set up.
#[derive(Debug, Clone)]
pub struct LabOptions {
    /// Virtual processors for what runs in it, each a thread of QEMU. There is one more, where no guest may
    /// run.
    pub cpus: u32,
    /// Memory in MiB. Files in the lab live in memory too.
    pub memory_mib: u32,
    /// Whether perf is put into the lab itself. The guest always has it.
    pub perf: bool,
    /// The kernel of the lab itself. Its guests have the default one.
    pub kernel: KernelChoice,
    /// More files: path in the lab and path here. Copied with their permissions.
    pub files: Vec<(String, PathBuf)>,
    /// Raw images that are `/dev/vda`, `/dev/vdb` and so on there; one may be there twice. What is written to
    /// them is lost with the lab.
    pub disks: Vec<PathBuf>,
    /// Set to true, it ends a boot that has not come to its end, which is then an error.
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
            cancelled: Arc::default(),
        }
    }
}
