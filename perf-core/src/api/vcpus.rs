//! vCPUs and threads come and go.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::ArcSwap;

use crate::context::{ContextCell, Whose};
use crate::pmu::VcpuId;
use crate::service::core::{Core, VcpuContext};
use crate::service::error::OpenError;

impl Core {
    /// Adds a vCPU that host thread `tid` runs. It inherits the VM-wide events marked so; if one of them
    /// cannot be opened the vCPU is not added and nothing is left behind.
    ///
    /// # Errors
    /// [`OpenError::VcpuExists`], or why an inherited event could not be opened.
    pub fn add_vcpu(&self, vcpu: VcpuId, tid: i32) -> Result<Arc<VcpuContext>, OpenError> {
        self.add(vcpu, tid, Whose::Thread(vcpu, tid))
    }

    fn add(&self, vcpu: VcpuId, tid: i32, whose: Whose) -> Result<Arc<VcpuContext>, OpenError> {
        let topology = self.inner.topology();
        let vcpus = self.inner.vcpus.load_full();
        if vcpus.iter().any(|v| v.id() == vcpu) {
            return Err(OpenError::VcpuExists(vcpu));
        }
        let cell = Arc::new(ContextCell::new(
            self.inner.limits.share(),
            self.inner.config.mux_config(),
            Arc::clone(&self.inner.config.clock),
            whose,
        ));
        // A CPU of the host is no part of the VM.
        if cell.cpu().is_none() {
            for members in self.inner.inherited_groups() {
                if let Err(error) = self.inner.inherit_group(&members, &cell) {
                    self.inner.abandon(&cell);
                    return Err(error);
                }
            }
            cell.lock().clone_of = self.inner.inherits_all().then_some(topology.generation);
            self.inner.task_record(&cell, true);
            self.inner
                .comm_record(&cell, format!("vcpu{}", vcpu.0).as_bytes());
        }
        let errors = Arc::clone(&cell.lock().errors);
        let context = Arc::new(VcpuContext {
            vcpu,
            tid,
            cell: ArcSwap::new(cell),
            core: Arc::downgrade(&self.inner),
            gates: Arc::clone(&self.inner.gates),
            gone: AtomicBool::new(false),
            errors,
            seen_errors: AtomicU64::new(0),
        });
        let mut list = Vec::clone(&vcpus);
        list.push(Arc::clone(&context));
        list.sort_by_key(|v| v.id());
        self.inner.vcpus.store(Arc::new(list));
        Ok(context)
    }

    /// Adds a context for host thread `tid` (0: the calling one), which need not run a vCPU: its events count
    /// that thread between [`VcpuContext::sched_in`] and [`VcpuContext::sched_out`]. It has the first
    /// free number from [`Core::FIRST_THREAD`] on, by which events are opened on it and samples name it,
    /// and is removed like a vCPU.
    ///
    /// # Errors
    /// As [`Core::add_vcpu`].
    pub fn add_thread(&self, tid: i32) -> Result<Arc<VcpuContext>, OpenError> {
        let mut id = Self::FIRST_THREAD;
        loop {
            match self.add_vcpu(id, tid) {
                // Somebody else was first.
                Err(OpenError::VcpuExists(_)) => id.0 += 1,
                other => return other,
            }
        }
    }

    /// Adds a context for CPU `cpu` of the host: its events count whatever runs there, for drivers that can
    /// (`host`). Its number is [`Core::FIRST_CPU`] and `cpu`, by which events are opened on it; it is removed
    /// like a vCPU. It is in from the beginning, so its time is the clock's. VM-wide events do not count on
    /// it. Its samples carry the CPU's number, and -1 as process and thread, which are not known.
    ///
    /// Opening an event on it takes the admin role above paranoid 0, and of the host's kernel `CAP_PERFMON`,
    /// or a `kernel.perf_event_paranoid` of 0 or less. The driver's overflow signal goes to the thread that
    /// opens the event.
    ///
    #[cfg_attr(feature = "host", doc = "```")]
    #[cfg_attr(not(feature = "host"), doc = "```ignore")]
    /// # use std::sync::Arc;
    /// # use perf_core::{pmu::host::HostPmu, *};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let core = Core::builder().driver(Arc::new(HostPmu::software(None))).build()?;
    /// let cpu = core.add_cpu(0)?;
    /// let session = core.session(0, Role::Admin);
    /// // PERF_COUNT_SW_CONTEXT_SWITCHES
    /// let attr = Attr::counting(EventType::SOFTWARE, 3);
    /// match core.open(&session, attr, OpenTarget::Vcpu(cpu.id()), None, OpenFlags::default()) {
    ///     Ok(switches) => println!("{} context switches on CPU 0", switches.read()?.value),
    ///     Err(error) => println!("CPU 0 cannot be counted: {error}"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`OpenError::VcpuExists`] if it has been added, [`OpenError::NoSuchCpu`] for a number that no host
    /// has.
    pub fn add_cpu(&self, cpu: u32) -> Result<Arc<VcpuContext>, OpenError> {
        let id = Self::FIRST_CPU
            .0
            .checked_add(cpu)
            .filter(|id| *id != u32::MAX)
            .map(VcpuId)
            .ok_or(OpenError::NoSuchCpu(cpu))?;
        let context = self.add(id, -1, Whose::Cpu(id, cpu))?;
        context.sched_in();
        Ok(context)
    }

    /// Removes a vCPU: everything is taken off, inherited events fold into their parents, and events opened
    /// on the vCPU itself keep their last value for their handles.
    ///
    /// Periods that have passed and were not sampled are reported lost, one LOST record for each
    /// event. To have their samples, call [`VcpuContext::sched_out`] and
    /// [`VcpuContext::service_overflows`] before.
    ///
    /// # Errors
    /// [`OpenError::NoSuchVcpu`].
    pub fn remove_vcpu(&self, vcpu: VcpuId) -> Result<(), OpenError> {
        let _topology = self.inner.topology();
        let vcpus = self.inner.vcpus.load_full();
        let context = vcpus
            .iter()
            .find(|v| v.id() == vcpu)
            .ok_or(OpenError::NoSuchVcpu(vcpu))?;
        let list: Vec<_> = vcpus.iter().filter(|v| v.id() != vcpu).map(Arc::clone).collect();
        self.inner.vcpus.store(Arc::new(list));
        context.gone.store(true, Ordering::Relaxed);
        self.inner.exit(&context.cell.load_full());
        Ok(())
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::api::handle::Handle;
    use crate::api::open::{OpenFlags, OpenTarget};
    use crate::api::session::Session;
    use crate::attr::{Attr, EventType, SampleType};
    use crate::model::regs::SampleRegs;
    use crate::pmu::sim::SimPmu;
    use crate::record::{CpuMode, Format, Record};
    use crate::ring::RingReader;
    use crate::service::config::{CoreConfig, Role};

    const VCPU: VcpuId = VcpuId(0);

    struct Regs;

    impl SampleRegs for Regs {
        fn mode(&mut self) -> CpuMode {
            CpuMode::GuestUser
        }
        fn ip(&mut self) -> u64 {
            0
        }
    }

    fn attr() -> Attr {
        Attr {
            sample_type: SampleType::PERIOD,
            ..Attr::sampling(EventType::SIM, 1, 100)
        }
    }

    struct Sampled {
        core: Core,
        vcpu: Arc<VcpuContext>,
        event: Handle,
        reader: RingReader,
        _session: Session,
    }

    /// A vCPU with an event that samples each 100 counts, after 350 counts of which no overflow was
    /// served.
    fn sampled() -> Sampled {
        let core = Core::new(CoreConfig::default());
        let pmu = Arc::new(SimPmu::with_slots(2));
        core.register(Arc::clone(&pmu) as Arc<dyn crate::pmu::Pmu>);
        let vcpu = core.add_vcpu(VCPU, 1).unwrap();
        let session = core.session(0, Role::Admin);
        let event = core
            .open(
                &session,
                attr(),
                OpenTarget::Vcpu(VCPU),
                None,
                OpenFlags::default(),
            )
            .unwrap();
        let reader = RingReader::of(event.map(1, true).unwrap());
        vcpu.sched_in();
        pmu.advance(VCPU, |_| 350);
        Sampled {
            core,
            vcpu,
            event,
            reader,
            _session: session,
        }
    }

    /// The periods of the samples in a ring, and the sum of its LOST records.
    fn samples_and_lost(reader: &mut RingReader) -> (Vec<u64>, u64) {
        let (mut periods, mut lost) = (Vec::new(), 0);
        while let Some(raw) = reader.next_record().unwrap() {
            match Record::decode(raw, Format::from(&attr())).unwrap() {
                Record::Sample(sample) => periods.push(sample.period),
                Record::Lost(record) => lost += record.lost,
                _ => {}
            }
        }
        (periods, lost)
    }

    /// The count is final once the vCPU is out, so no period that has passed waits for a
    /// notification.
    #[test]
    fn periods_that_passed_before_the_end_are_sampled_after_sched_out() {
        let mut s = sampled();
        s.vcpu.sched_out();
        assert_eq!(s.vcpu.service_overflows(&mut Regs, &mut |_| {}), 1);
        s.core.remove_vcpu(VCPU).unwrap();
        assert_eq!(samples_and_lost(&mut s.reader), (vec![300], 0));
        assert_eq!((s.event.count().unwrap(), s.event.lost_records()), (350, 0));
    }

    #[test]
    fn periods_that_nobody_sampled_are_reported_lost_when_the_vcpu_goes() {
        let mut s = sampled();
        s.core.remove_vcpu(VCPU).unwrap();
        assert_eq!(samples_and_lost(&mut s.reader), (vec![], 1));
        assert_eq!((s.event.lost_records(), s.vcpu.stats().lost_samples), (1, 1));
    }

    /// Without room for the LOST record the ring counts it, for the next one: it stands for the
    /// same sample.
    #[test]
    fn a_lost_sample_counts_once_in_a_full_ring() {
        let mut s = sampled();
        s.event.pause_output(true).unwrap();
        s.core.remove_vcpu(VCPU).unwrap();
        assert_eq!(samples_and_lost(&mut s.reader), (vec![], 0));
        assert_eq!((s.event.lost_records(), s.vcpu.stats().lost_samples), (1, 1));
    }
}
