//! What the guest is made of: names of vCPUs and what is where in its memory.

use crate::pmu::VcpuId;
use crate::record::{CpuMode, MapName, Misc, Mmap, SampleId};
use crate::service::core::Core;
use crate::service::sideband::write_to;

/// A range of guest memory with a name, for MMAP records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestMapping<'a> {
    /// Guest address of its first byte.
    pub start: u64,
    /// Bytes.
    pub len: u64,
    /// Offset of its first byte in the file it comes from.
    pub pgoff: u64,
    /// Name, such as a file's path or `[guest.kernel.kallsyms]`.
    pub name: MapName<'a>,
    /// It is code that runs at CPL0.
    pub kernel: bool,
}

impl Core {
    /// Tells readers that `mapping` is in guest memory now.
    pub fn mmap_record(&self, mapping: &GuestMapping<'_>) {
        let core = &self.inner;
        if !core.wanted.mmap() {
            return;
        }
        let mode = if mapping.kernel {
            CpuMode::GuestKernel
        } else {
            CpuMode::GuestUser
        };
        let by = SampleId {
            tid: core.config.pid,
            ..core.written_by(&core.vm, core.vm.now_ns())
        };
        let record = |sample_id| Mmap {
            misc: Misc::from(mode),
            pid: core.config.pid,
            tid: core.config.pid,
            start: mapping.start,
            len: mapping.len,
            pgoff: mapping.pgoff,
            name: mapping.name,
            sample_id,
        };
        write_to(&core.vm, by, record, |attr| attr.mmap);
        for vcpu in core.vcpus.load().iter() {
            write_to(&vcpu.cell.load(), by, record, |attr| attr.mmap);
        }
    }

    /// Names a vCPU. Whether there is such a vCPU.
    pub fn name_vcpu(&self, vcpu: VcpuId, name: &str) -> bool {
        let Some(context) = self.vcpu(vcpu) else {
            return false;
        };
        self.inner.comm_record(&context.cell.load_full(), name.as_bytes());
        true
    }
}
