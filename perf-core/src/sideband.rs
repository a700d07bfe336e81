//! Side-band records: what happens to the VM beside the samples. FORK and EXIT for vCPUs that come and go,
//! COMM for their names, MMAP for what is where in guest memory, READ for the final values of inherited
//! events.
//!
//! They go to events that asked for them and are enabled: those of the VM context, and those opened on the
//! vCPU in question. Children write none of their own: their parent's ring would get each record many times
//! over.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::attr::Attr;
use crate::context::ContextCell;
use crate::core::{Core, CoreInner, VcpuContext};
use crate::event::{Event, State};
use crate::pmu::VcpuId;
use crate::record::{Comm, Encode, MapName, Misc, Mmap, Read, SampleId, Task};

/// How many open events ask for which records: nobody asks, nothing is done.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    comm: AtomicU32,
    mmap: AtomicU32,
    task: AtomicU32,
}

impl Wanted {
    pub fn add(&self, attr: &Attr) {
        self.each(attr, |n| {
            n.fetch_add(1, Ordering::Relaxed);
        });
    }

    pub fn remove(&self, attr: &Attr) {
        self.each(attr, |n| {
            n.fetch_sub(1, Ordering::Relaxed);
        });
    }

    fn each(&self, attr: &Attr, change: impl Fn(&AtomicU32)) {
        for (on, n) in [
            (attr.comm, &self.comm),
            (attr.mmap, &self.mmap),
            (attr.task, &self.task),
        ] {
            if on {
                change(n);
            }
        }
    }

    fn comm(&self) -> bool {
        self.comm.load(Ordering::Relaxed) != 0
    }

    fn mmap(&self) -> bool {
        self.mmap.load(Ordering::Relaxed) != 0
    }

    fn task(&self) -> bool {
        self.comm() || self.mmap() || self.task.load(Ordering::Relaxed) != 0
    }
}

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

/// Writes what `record` makes of a trailer to each event of `cell` that `wants` it. `by`: who does what the
/// record tells.
fn write_to<R: Encode>(
    cell: &ContextCell,
    by: SampleId,
    record: impl Fn(SampleId) -> R,
    wants: impl Fn(&Attr) -> bool,
) {
    let context = cell.lock();
    for (_, event) in &context.events {
        if event.parent.is_none() && event.state >= State::Inactive && wants(&event.shared.attr) {
            event.write_record(&record(event.sample_id(by)));
        }
    }
}

impl Event {
    /// The trailer of what is written for this event `by` somebody.
    pub fn sample_id(&self, by: SampleId) -> SampleId {
        SampleId {
            id: self.top().id,
            stream_id: self.shared.id,
            ..by
        }
    }
}

impl CoreInner {
    /// The vCPU of `origin` and the time, as trailers of records say them.
    pub fn written_by(&self, origin: &ContextCell, time_ns: u64) -> SampleId {
        let (cpu, tid) = origin
            .vcpu()
            .map_or((u32::MAX, 0), |(vcpu, tid)| (vcpu.0, tid as u32));
        SampleId {
            pid: self.config.pid,
            tid,
            cpu,
            time_ns,
            ..SampleId::default()
        }
    }

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
    pub fn read_record(&self, cell: &ContextCell, key: usize) {
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

impl Core {
    /// Tells readers that `mapping` is in guest memory now.
    pub fn mmap_record(&self, mapping: &GuestMapping<'_>) {
        let core = &self.inner;
        if !core.wanted.mmap() {
            return;
        }
        let mode = if mapping.kernel {
            crate::record::CpuMode::GuestKernel
        } else {
            crate::record::CpuMode::GuestUser
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

impl VcpuContext {
    /// This vCPU was reset: its events opened with [`Attr::enable_on_exec`] that are off or in error are
    /// enabled, once. Members of groups too, not only leaders. [`Core::vm_reset`] is the same for all of
    /// the machine.
    pub fn exec(&self) {
        exec(&self.cell.load());
    }
}

impl Core {
    /// The machine was reset: what waits for that ([`Attr::enable_on_exec`]) is enabled, once, in the VM
    /// context and on every vCPU. A VM-wide event is enabled as a whole, so vCPUs added later count too.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use perf_core::{pmu::sim::SimPmu, *};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pmu = SimPmu::with_slots(4);
    /// # let core = Core::builder().driver(Arc::new(pmu.clone())).build()?;
    /// # core.add_vcpu(VcpuId(0), 1)?.sched_in();
    /// # let session = core.session(0, Role::Admin);
    /// // Counts the next boot, and nothing of what runs until then.
    /// let attr = Attr {
    ///     disabled: true,
    ///     enable_on_exec: true,
    ///     inherit: true,
    ///     ..Attr::counting(EventType::SIM, 1)
    /// };
    /// let boot = core.open(&session, attr, OpenTarget::Vm, None, OpenFlags::default())?;
    /// pmu.advance(VcpuId(0), |_| 100);
    /// core.vm_reset();
    /// pmu.advance(VcpuId(0), |_| 7);
    /// assert_eq!(boot.read()?.value, 7);
    /// # Ok(())
    /// # }
    /// ```
    pub fn vm_reset(&self) {
        // No vCPU comes meanwhile, whose events would be neither those of before nor those of after.
        let _topology = self.inner.topology();
        exec(&self.inner.vm);
        for vcpu in self.inner.vcpus.load().iter() {
            vcpu.exec();
        }
    }
}

fn exec(cell: &ContextCell) {
    let now_ns = cell.now_ns();
    let mut context = cell.lock();
    // It holds more than what it inherited from now on.
    context.clone_of = None;
    let due: Vec<usize> = context
        .events
        .iter_mut()
        .filter_map(|(key, event)| std::mem::take(&mut event.enable_on_exec).then_some(key))
        .collect();
    for key in due {
        context.enable(key, now_ns);
    }
}
