//! Guest side-band records: vCPU names and guest memory mappings.

use crate::pmu::VcpuId;
use crate::record::{CpuMode, MmapRecord, RecordMisc, SampleId};
use crate::service::core::PerfCore;
use crate::service::sideband::write_to;

/// A named range of guest memory, for MMAP records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GuestMmapEvent<'a> {
    /// Guest address of the first byte of the mapping.
    pub start: u64,
    /// Length of the mapping, in bytes.
    pub len: u64,
    /// Offset of the mapping in the mapped file, in bytes.
    pub pgoff: u64,
    /// Name of the mapping, such as a file path or `[guest.kernel.kallsyms]`.
    pub name: &'a [u8],
    /// `true` if the mapping contains code that runs at CPL 0.
    pub kernel: bool,
}

impl PerfCore {
    /// Writes an MMAP record for `mapping` to the rings of the events that request MMAP records.
    pub fn mmap_record(&self, mapping: &GuestMmapEvent<'_>) {
        let core = &self.inner;
        if !core.record_demand.mmap() {
            return;
        }
        let mode = if mapping.kernel {
            CpuMode::GuestKernel
        } else {
            CpuMode::GuestUser
        };
        let by = SampleId {
            tid: core.config.pid,
            ..core.record_origin(&core.vm, core.vm.now_ns())
        };
        let record = |sample_id| MmapRecord {
            misc: RecordMisc::from(mode),
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

    /// Sets the name of vCPU `vcpu`, which COMM records contain. Returns `false` if there is no
    /// such vCPU.
    pub fn name_vcpu(&self, vcpu: VcpuId, name: &str) -> bool {
        let Some(context) = self.vcpu(vcpu) else {
            return false;
        };
        self.inner.comm_record(&context.cell.load_full(), name.as_bytes());
        true
    }
}
