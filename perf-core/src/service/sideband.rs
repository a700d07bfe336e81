//! Writing of side-band records, that is, of records other than samples. FORK and EXIT records
//! report that a vCPU was added or removed. COMM records contain the name of a vCPU. SWITCH records
//! report that a vCPU was scheduled in or out. MMAP records describe guest memory mappings, and
//! READ records contain the final values of inherited events.
//!
//! The core writes a record for each enabled event in the VM context, and for each enabled event
//! that was opened on the affected vCPU, if the event requests the record. Children write only READ
//! records, because the ring of their parent would receive all other records several times.

use std::sync::atomic::Ordering;

use crate::attr::Attr;
use crate::context::ContextCell;
use crate::model::keys::EventKey;
use crate::model::state::EventState;
use crate::record::{CommRecord, EncodeRecord, ReadRecord, SampleId, SwitchRecord, TaskRecord};
use crate::service::core::{CoreInner, VcpuEventContext};

/// Writes a record for each enabled event in context `cell` that `wants` selects. `record` creates
/// the record from a trailer. `by` contains the vCPU and the time of the record.
pub(crate) fn write_to<R: EncodeRecord>(
    cell: &ContextCell,
    by: SampleId,
    record: impl Fn(SampleId) -> R,
    wants: impl Fn(&Attr) -> bool,
) {
    let context = cell.lock();
    for (_, event) in context.events.iter() {
        if event.parent.is_none() && event.state >= EventState::Inactive && wants(&event.shared.attr) {
            event.write_record(&record(event.sample_id(by)));
        }
    }
}

impl CoreInner {
    fn write_all<R: EncodeRecord>(
        &self,
        cell: &ContextCell,
        by: SampleId,
        record: impl Fn(SampleId) -> R + Copy,
        wants: impl Fn(&Attr) -> bool + Copy,
    ) {
        write_to(&self.vm, by, record, wants);
        write_to(cell, by, record, wants);
    }

    /// Writes a FORK record for an added vCPU or an EXIT record for a removed one.
    pub fn task_record(&self, cell: &ContextCell, fork: bool) {
        if !self.record_demand.task() {
            return;
        }
        let pid = self.config.pid;
        let by = self.record_origin(cell, cell.now_ns());
        let record = |sample_id| TaskRecord {
            fork,
            pid,
            ppid: pid,
            tid: by.tid,
            ptid: pid,
            time_ns: by.time_ns,
            sample_id,
        };
        self.write_all(cell, by, record, |attr| attr.task || attr.comm || attr.mmap);
    }

    /// Writes a COMM record with the name of a vCPU.
    pub fn comm_record(&self, cell: &ContextCell, name: &[u8]) {
        if !self.record_demand.comm() {
            return;
        }
        let by = self.record_origin(cell, cell.now_ns());
        // At most 15 bytes and a terminator, like in the kernel.
        let name = &name[..name.len().min(15)];
        let record = |sample_id| CommRecord {
            pid: by.pid,
            tid: by.tid,
            name,
            sample_id,
        };
        self.write_all(cell, by, record, |attr| attr.comm);
    }

    /// Writes a SWITCH record for `vcpu` with context `cell`. Writes nothing after the vCPU was
    /// removed, because no SWITCH record may follow the EXIT record of the vCPU, which is written
    /// under the same locks.
    pub fn switch_record(&self, vcpu: &VcpuEventContext, cell: &ContextCell, out: bool) {
        let by = self.record_origin(cell, cell.now_ns());
        let record = |sample_id| SwitchRecord { out, sample_id };
        let wants = |attr: &Attr| attr.context_switch && !vcpu.removed.load(Ordering::Relaxed);
        if cell.is_vcpu() {
            write_to(&self.vm, by, record, wants);
        }
        write_to(cell, by, record, wants);
    }

    /// Writes a READ record with the final reading of a child whose vCPU was removed.
    pub fn read_record(&self, cell: &ContextCell, key: EventKey) {
        let now_ns = cell.now_ns();
        let mut context = cell.lock();
        let Some(event) = context.events.get(key) else {
            return;
        };
        if event.output.is_none() || !event.shared.attr.inherit_stat {
            return;
        }
        let mut entries = std::mem::take(&mut context.entries);
        entries.clear();
        let values = context.read_values(key, now_ns, &mut entries);
        let by = self.record_origin(cell, now_ns);
        let event = &context.events[key];
        event.write_record(&ReadRecord {
            pid: by.pid,
            tid: by.tid,
            values,
            sample_id: event.sample_id(by),
        });
        context.entries = entries;
    }
}
