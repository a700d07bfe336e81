//! Guest resets, which enable the events with [`crate::Attr::enable_on_exec`].

use crate::context::ContextCell;
use crate::model::keys::EventKey;
use crate::service::core::{PerfCore, VcpuEventContext};

impl VcpuEventContext {
    /// Handles a reset of this vCPU. Enables the events with [`crate::Attr::enable_on_exec`] that
    /// are off or in the error state, whether they are group leaders or siblings. Later resets do
    /// not enable these events again. Use [`PerfCore::vm_reset`] for a reset of the whole machine.
    pub fn exec(&self) {
        exec(&self.cell.load());
    }
}

impl PerfCore {
    /// Handles a reset of the machine. Enables the events with [`crate::Attr::enable_on_exec`] in
    /// the VM context and on all vCPUs. Later resets do not enable these events again. A VM-wide
    /// event is enabled as a whole and therefore also counts on vCPUs that are added later.
    ///
    #[cfg_attr(feature = "sim", doc = "```")]
    #[cfg_attr(not(feature = "sim"), doc = "```ignore")]
    /// # use std::sync::Arc;
    /// # use perf_core::{pmu::sim::SimPmu, *};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let pmu = SimPmu::with_slots(4);
    /// # let core = PerfCore::builder().driver(Arc::new(pmu.clone())).build()?;
    /// # core.add_vcpu(VcpuId(0), 1)?.sched_in();
    /// # let session = core.session(0, SessionRole::Admin);
    /// // Counts the next boot only, not the code that runs before it.
    /// let attr = Attr {
    ///     disabled: true,
    ///     enable_on_exec: true,
    ///     inherit: true,
    ///     ..Attr::counting(EventType::SIM, 1)
    /// };
    /// let boot = core.open(&session, attr, EventOpenTarget::Vm, None, OpenFlags::default())?;
    /// pmu.advance(VcpuId(0), |_| 100);
    /// core.vm_reset();
    /// pmu.advance(VcpuId(0), |_| 7);
    /// assert_eq!(boot.read()?.value, 7);
    /// # Ok(())
    /// # }
    /// ```
    pub fn vm_reset(&self) {
        // Prevents vCPUs from being added during the reset, because it would be undefined whether
        // the reset applies to their events.
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
    // The reset may enable events in this context alone, so the context is no longer a clone and
    // must not be swapped.
    context.clone_of = None;
    let due: Vec<EventKey> = context
        .events
        .iter_mut()
        .filter_map(|(key, event)| std::mem::take(&mut event.enable_on_exec).then_some(key))
        .collect();
    for key in due {
        context.enable(key, now_ns);
    }
}
