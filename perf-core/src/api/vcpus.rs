//! Addition and removal of contexts for vCPUs, other host threads and host CPUs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::ArcSwap;

use crate::context::{ContextCell, ContextOwner};
use crate::pmu::VcpuId;
use crate::service::core::{PerfCore, Topology, VcpuEventContext};
use crate::service::error::PerfEventOpenError;

impl PerfCore {
    /// Adds a vCPU that runs on host thread `tid`. The vCPU inherits all VM-wide events with
    /// [`crate::Attr::inherit`]. If one of these events cannot be opened on the vCPU, the vCPU is
    /// not added and the call has no effect.
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventOpenError::VcpuExists`] if the vCPU already exists, or the error of an
    /// inherited event that could not be opened.
    pub fn add_vcpu(&self, vcpu: VcpuId, tid: i32) -> Result<Arc<VcpuEventContext>, PerfEventOpenError> {
        self.add_vcpu_recorded_as(vcpu, tid, tid.cast_unsigned())
    }

    /// Adds a vCPU like [`PerfCore::add_vcpu`], but with `record_tid` as the thread ID in records.
    /// Use this method for a VMM in a PID namespace, because a thread has a different ID outside
    /// the namespace, where the readers of the records run.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`PerfCore::add_vcpu`].
    pub fn add_vcpu_recorded_as(
        &self,
        vcpu: VcpuId,
        tid: i32,
        record_tid: u32,
    ) -> Result<Arc<VcpuEventContext>, PerfEventOpenError> {
        let topology = self.inner.topology();
        self.add(&topology, vcpu, tid, ContextOwner::Vcpu(vcpu, tid, record_tid))
    }

    fn add(
        &self,
        topology: &Topology,
        vcpu: VcpuId,
        tid: i32,
        whose: ContextOwner,
    ) -> Result<Arc<VcpuEventContext>, PerfEventOpenError> {
        let vcpus = self.inner.vcpus.load_full();
        let Err(at) = vcpus.binary_search_by_key(&vcpu, |v| v.id()) else {
            return Err(PerfEventOpenError::VcpuExists(vcpu));
        };
        let config = &self.inner.config;
        let cell = Arc::new(ContextCell::new(
            self.inner.limits.share(),
            config.mux_config(),
            Arc::clone(&config.clock),
            config.tick_timer.clone(),
            whose,
        ));
        // Only vCPUs inherit VM-wide events. Other threads and host CPUs are not part of the VM.
        if cell.is_vcpu() {
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
        let context = Arc::new(VcpuEventContext {
            vcpu,
            tid,
            cell: ArcSwap::new(cell),
            core: Arc::downgrade(&self.inner),
            gates: Arc::clone(&self.inner.gates),
            removed: AtomicBool::new(false),
            errors,
            handled_errors: AtomicU64::new(0),
        });
        let mut list = Vec::clone(&vcpus);
        list.insert(at, Arc::clone(&context));
        self.inner.vcpus.store(Arc::new(list));
        Ok(context)
    }

    /// Adds a context for host thread `tid` (0 for the calling thread), which need not run a vCPU.
    /// Its events count that thread between [`VcpuEventContext::sched_in`] and
    /// [`VcpuEventContext::sched_out`]. VM-wide events do not count on it.
    ///
    /// The context number is the first free number from [`PerfCore::FIRST_THREAD`] on. It
    /// identifies the context in [`crate::EventOpenTarget::Vcpu`] and in samples. Remove the
    /// context with [`PerfCore::remove_vcpu`].
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventOpenError::VcpuExists`] if all numbers are taken.
    pub fn add_thread(&self, tid: i32) -> Result<Arc<VcpuEventContext>, PerfEventOpenError> {
        let topology = self.inner.topology();
        let id = {
            let vcpus = self.inner.vcpus.load();
            let threads = &vcpus[vcpus.partition_point(|v| v.id() < Self::FIRST_THREAD)..];
            let (mut from, mut to) = (0, threads.len());
            // Binary search for the first free number. The numbers are sorted, so each number
            // before the first free one equals its index.
            while from < to {
                let middle = from.midpoint(to);
                if threads[middle].id().0 as usize - Self::FIRST_THREAD.0 as usize == middle {
                    from = middle + 1;
                } else {
                    to = middle;
                }
            }
            VcpuId(Self::FIRST_THREAD.0 + u32::try_from(from).unwrap_or(u32::MAX >> 1))
        };
        self.add(&topology, id, tid, ContextOwner::Thread(id, tid))
    }

    /// Adds a context for host CPU `cpu`. Its events count all code on that CPU, if the driver
    /// supports CPU targets (`host`).
    ///
    /// The context number is [`PerfCore::FIRST_CPU`] plus `cpu`. Remove the context with
    /// [`PerfCore::remove_vcpu`]. The context is always scheduled in, so its time never stops.
    /// VM-wide events do not count on it. Its samples contain the CPU number, and -1 as process and
    /// thread ID, because the core does not know which thread was running.
    ///
    /// Opening an event on the context requires the admin role if paranoid is greater than 0. The
    /// host kernel requires `CAP_PERFMON`, or a `kernel.perf_event_paranoid` of 0 or less. The
    /// overflow signal of the driver is sent to the thread that opens the event.
    ///
    #[cfg_attr(feature = "host", doc = "```")]
    #[cfg_attr(not(feature = "host"), doc = "```ignore")]
    /// # use std::sync::Arc;
    /// # use perf_core::{pmu::host::HostPmu, *};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let core = PerfCore::builder().driver(Arc::new(HostPmu::software(None))).build()?;
    /// let cpu = core.add_cpu(0)?;
    /// let session = core.session(0, SessionRole::Admin);
    /// // PERF_COUNT_SW_CONTEXT_SWITCHES
    /// let attr = Attr::counting(EventType::SOFTWARE, 3);
    /// let target = EventOpenTarget::Vcpu(cpu.id());
    /// match core.open(&session, attr, target, None, OpenFlags::default()) {
    ///     Ok(switches) => println!("{} context switches on CPU 0", switches.read()?.value),
    ///     Err(error) => println!("CPU 0 cannot be counted: {error}"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventOpenError::VcpuExists`] if the context already exists, and
    /// [`PerfEventOpenError::NoSuchCpu`] if the number is out of range for a CPU.
    pub fn add_cpu(&self, cpu: u32) -> Result<Arc<VcpuEventContext>, PerfEventOpenError> {
        let id = Self::FIRST_CPU
            .0
            .checked_add(cpu)
            .filter(|id| *id != u32::MAX)
            .map(VcpuId)
            .ok_or(PerfEventOpenError::NoSuchCpu(cpu))?;
        let topology = self.inner.topology();
        let context = self.add(&topology, id, -1, ContextOwner::Cpu(id, cpu))?;
        drop(topology);
        context.sched_in();
        Ok(context)
    }

    /// Removes a vCPU. Schedules out all events of the vCPU. Adds the counts of inherited events to
    /// their parents. The handles of events that were opened on this vCPU keep returning the last
    /// value.
    ///
    /// Overflows that were not serviced before the removal are reported as lost, with one LOST
    /// record per event. To write their samples instead, call [`VcpuEventContext::sched_out`] and
    /// [`VcpuEventContext::service_overflows`] first.
    ///
    /// # Errors
    ///
    /// Returns [`PerfEventOpenError::NoSuchVcpu`] if there is no such vCPU.
    pub fn remove_vcpu(&self, vcpu: VcpuId) -> Result<(), PerfEventOpenError> {
        let _topology = self.inner.topology();
        let vcpus = self.inner.vcpus.load_full();
        let context = vcpus
            .iter()
            .find(|v| v.id() == vcpu)
            .ok_or(PerfEventOpenError::NoSuchVcpu(vcpu))?;
        let list: Vec<_> = vcpus.iter().filter(|v| v.id() != vcpu).map(Arc::clone).collect();
        self.inner.vcpus.store(Arc::new(list));
        context.removed.store(true, Ordering::Relaxed);
        self.inner.exit(&context.cell.load_full());
        Ok(())
    }
}

#[cfg(all(test, feature = "sim"))]
mod tests {
    use super::*;
    use crate::api::handle::EventHandle;
    use crate::api::open::{EventOpenTarget, OpenFlags};
    use crate::api::session::Session;
    use crate::attr::{Attr, EventType, SampleType};
    use crate::model::regs::UnavailableRegs;
    use crate::pmu::sim::SimPmu;
    use crate::record::{DecodedRecord, RecordFormat};
    use crate::ring::RingReader;
    use crate::service::config::{PerfCoreConfig, SessionRole};

    const VCPU: VcpuId = VcpuId(0);

    fn attr() -> Attr {
        Attr::sampling(EventType::SIM, 1, 100).with_sample_type(SampleType::PERIOD)
    }

    struct Sampled {
        core: PerfCore,
        vcpu: Arc<VcpuEventContext>,
        event: EventHandle,
        reader: RingReader,
        _session: Session,
    }

    /// Creates a vCPU with a sampling event of period 100 that has 350 counts, so that three
    /// overflows are not serviced yet.
    fn sampled() -> Sampled {
        let core = PerfCore::new(PerfCoreConfig::default());
        let pmu = Arc::new(SimPmu::with_slots(2));
        core.register(Arc::clone(&pmu) as Arc<dyn crate::pmu::Pmu>);
        let vcpu = core.add_vcpu(VCPU, 1).unwrap();
        let session = core.session(0, SessionRole::Admin);
        let event = core
            .open(
                &session,
                attr(),
                EventOpenTarget::Vcpu(VCPU),
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

    /// Returns the periods of the samples in a ring, and the sum of the lost counts in LOST
    /// records.
    fn samples_and_lost(reader: &mut RingReader) -> (Vec<u64>, u64) {
        let (mut periods, mut lost) = (Vec::new(), 0);
        while let Some(raw) = reader.next_record().unwrap() {
            match DecodedRecord::decode(raw, RecordFormat::from(&attr())).unwrap() {
                DecodedRecord::Sample(sample) => periods.push(sample.period),
                DecodedRecord::Lost(record) => lost += record.lost,
                _ => {}
            }
        }
        (periods, lost)
    }

    /// After `sched_out`, each elapsed period yields a sample, even if no overflow signal arrived.
    #[test]
    fn elapsed_periods_are_sampled_after_sched_out() {
        let mut s = sampled();
        s.vcpu.sched_out();
        assert_eq!(s.vcpu.service_overflows(&mut UnavailableRegs, &mut |_| {}), 1);
        s.core.remove_vcpu(VCPU).unwrap();
        assert_eq!(samples_and_lost(&mut s.reader), (vec![300], 0));
        assert_eq!((s.event.count().unwrap(), s.event.lost_records()), (350, 0));
    }

    #[test]
    fn unsampled_periods_are_lost_when_vcpu_is_removed() {
        let mut s = sampled();
        s.core.remove_vcpu(VCPU).unwrap();
        assert_eq!(samples_and_lost(&mut s.reader), (vec![], 1));
        assert_eq!((s.event.lost_records(), s.vcpu.stats().lost_samples), (1, 1));
    }

    /// If a full ring has no space for a LOST record, the next LOST record includes the number of
    /// samples lost before. Each lost sample is counted once.
    #[test]
    fn lost_sample_counts_once_in_full_ring() {
        let mut s = sampled();
        s.event.pause_output(true).unwrap();
        s.core.remove_vcpu(VCPU).unwrap();
        assert_eq!(samples_and_lost(&mut s.reader), (vec![], 0));
        assert_eq!((s.event.lost_records(), s.vcpu.stats().lost_samples), (1, 1));
    }
}
