//! Side-band records: what happens to the VM beside the samples. FORK and EXIT for vCPUs that come and go,
//! COMM for their names, MMAP for what is where in guest memory, READ for the final values of inherited
//! events.
//!
//! They go to events that asked for them and are enabled: those of the VM context, and those opened on the
//! vCPU in question. Children write none of their own: their parent's ring would get each record many times
//! over.

use crate::attr::Attr;
use crate::context::ContextCell;
use crate::model::keys::EventKey;
use crate::model::state::State;
use crate::record::{Comm, Encode, Read, SampleId, Task};
use crate::service::core::CoreInner;

/// Writes what `record` makes of a trailer to each event of `cell` that `wants` it. `by`: who does what the
/// record tells.
pub(crate) fn write_to<R: Encode>(
    cell: &ContextCell,
    by: SampleId,
    record: impl Fn(SampleId) -> R,
    wants: impl Fn(&Attr) -> bool,
) {
    let context = cell.lock();
    for (_, event) in context.events.iter() {
        if event.parent.is_none() && event.state >= State::Inactive && wants(&event.shared.attr) {
            event.write_record(&record(event.sample_id(by)));
        }
    }
}

impl CoreInner {
    fn write_all<R: Encode>(
        &self,
        cell: &ContextCell,
        by: SampleId,
        record: impl Fn(SampleId) -> R + Copy,
        wants: impl Fn(&Attr) -> bool + Copy,
    ) {
        write_to(&self.vm, by, record, wants);
        write_to(cell, by, record, wants);
    }

    /// A vCPU has come (FORK) or gone (EXIT).
    pub fn task_record(&self, cell: &ContextCell, fork: bool) {
        if !self.wanted.task() {
            return;
        }
        let pid = self.config.pid;
        let by = self.written_by(cell, cell.now_ns());
        let record = |sample_id| Task {
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

    /// A vCPU has a name.
    pub fn comm_record(&self, cell: &ContextCell, name: &[u8]) {
        if !self.wanted.comm() {
            return;
        }
        let by = self.written_by(cell, cell.now_ns());
        // As the kernel: at most 15 bytes and their terminator.
        let name = &name[..name.len().min(15)];
        let record = |sample_id| Comm {
            pid: by.pid,
            tid: by.tid,
            name,
            sample_id,
        };
        self.write_all(cell, by, record, |attr| attr.comm);
    }

    /// The final reading of a child whose vCPU has gone, for its parent's reader.
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
        let by = self.written_by(cell, now_ns);
        let event = &context.events[key];
        event.write_record(&Read {
            pid: by.pid,
            tid: by.tid,
            values,
            sample_id: event.sample_id(by),
        });
        context.entries = entries;
    }
}
