//! The virtual PMU in the machine: one [`VmPmu`] per VM that owns the perf core and its drivers, one
//! [`VcpuPmu`] per vCPU that joins the register file (`vpmu`) to the vCPU's perf-core context.

pub mod backing;
mod config;
pub mod countable;
pub mod event_opener;
pub mod fit;
pub mod kernel_reader;
mod operator;
pub mod own;
mod regs;
pub(crate) mod remote_open;
mod shown;
mod steal;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use kvm_bindings::KVM_MP_STATE_HALTED;
use perf_core::mux::MuxPolicy;
use perf_core::pmu::VcpuId;
use perf_core::pmu::clock::{ClockPmu, VcpuClock};
use perf_core::pmu::fed::{FedCounts, FedPmu};
use perf_core::pmu::host::{HostPmu, HostProbe};
use perf_core::pmu::kvm::{KvmPmu, StatsFile};
use perf_core::pmu::sched::SchedPmu;
use perf_core::{Core, Overflowed, VcpuContext, error_line};
use smallvec::SmallVec;
use vpmu::exact::{Counts, Step};
use vpmu::{
    Backability, CounterIndex, Cpl, EventFilter, MsrAddress, MsrRead, MsrWrite, ParavirtualEvent,
    PerfCoreEvents, PmiCounts, PmiReady, RdpmcIndex, Sources, SteppedLevels, Vendor, Vpmu,
};

use crate::kvm::cpuid;
use crate::kvm::event_filter::KvmFilterError;
use crate::kvm::vcpu_fd::VcpuFd;
use control_api::protocol::GuestCounter;
use steal::StealClock;

pub use config::{OperatorLimits, PmuConfig};
pub use operator::{HostSampling, NoHostSamples, NotCountable, OperatorEvent};
pub use own::OwnVmPmu;
pub use regs::{GuestProbe, SampleMemory, Synced, VcpuRegs};

/// Why the PMU could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum PmuSetupError {
    /// perf-core refused the vCPU.
    #[error("the vCPU's event context could not be made")]
    Context(#[source] perf_core::OpenError),
    /// A system call failed.
    #[error("{0} failed")]
    Os(&'static str, #[source] io::Error),
}

/// The signal that host perf events send to the vCPU thread at an overflow.
pub fn overflow_signal() -> libc::c_int {
    libc::SIGUSR2
}

/// The PMU of a VM: the perf core, its drivers and what every vCPU's PMU is made from. A VM whose guest has
/// no PMU has this one too, for operators, with a model that is off.
#[derive(Debug)]
pub struct VmPmu {
    config: PmuConfig,
    /// Which events may be counted now.
    filter: ArcSwap<EventFilter>,
    core: Core,
    clock: Arc<ClockPmu>,
    fed: Arc<FedPmu>,
    kvm: Arc<KvmPmu>,
    /// The vendor of the host's PMU, if it can be used.
    hardware: Option<Vendor>,
    /// What the host's kernel opens of its generic events.
    opens: Backability,
    started: Instant,
    /// What samples of the operator look into.
    probe: GuestProbe,
    /// The guest has KVM's own vPMU.
    own: Option<OwnVmPmu>,
}

impl VmPmu {
    /// Sets up the perf core with the drivers this host has. `vm_stats`: KVM's statistics of the VM, if it
    /// keeps any; `interprets_kernel`: this KVM interprets the guest's kernel; `guest`: what samples look
    /// into.
    pub fn new(
        config: PmuConfig,
        probe: &HostProbe,
        vm_stats: Option<OwnedFd>,
        interprets_kernel: bool,
        guest: GuestProbe,
    ) -> Self {
        let core = Core::new(config.core_config());
        let signal = Some(overflow_signal());
        if probe.hardware_pmu {
            core.register(Arc::new(HostPmu::hardware(signal, probe)));
        }
        core.register(Arc::new(HostPmu::software(signal)));
        core.register(Arc::new(SchedPmu));
        let clock = Arc::new(ClockPmu::new(signal).interpreting_kernel(interprets_kernel));
        core.register(clock.clone());
        let fed = Arc::new(FedPmu::new());
        core.register(fed.clone());
        let kvm = Arc::new(KvmPmu::new(vm_stats.and_then(|fd| stats_file("the VM", fd))));
        core.register(kvm.clone());
        let hardware = probe
            .hardware_pmu
            .then(|| vpmu::HostPmu::vendor(&mut cpuid::read_host));
        Self {
            filter: ArcSwap::new(config.filter.clone()),
            config,
            core,
            clock,
            fed,
            kvm,
            hardware,
            opens: backing::opened(probe),
            started: Instant::now(),
            probe: guest,
            own: None,
        }
    }

    /// The same for a guest that has KVM's own vPMU.
    #[must_use]
    pub fn with_own(mut self, own: OwnVmPmu) -> Self {
        self.own = Some(own);
        self
    }

    /// What the guest may count by `filter`: never what the VM denies for good.
    #[must_use]
    pub fn within_limits(&self, filter: EventFilter) -> EventFilter {
        if self.config.paravirtual {
            filter
        } else {
            filter.without_paravirtual(self.config.model.vendor())
        }
    }

    /// Gives the filter to KVM where its own vPMU counts; else each vCPU's thread filters events.
    ///
    /// # Errors
    /// [`KvmFilterError`]; nothing has changed.
    pub fn set_kvms_filter(&self, filter: &EventFilter) -> Result<(), KvmFilterError> {
        self.own.as_ref().map_or(Ok(()), |own| own.set_filter(filter))
    }

    /// Whether the guest has a PMU.
    pub fn is_for_guest(&self) -> bool {
        !self.config.model.is_off()
    }

    /// Who counts what for the guest, for operators, and as CPUID says it.
    fn sources(&self) -> Sources {
        let statistic = |name| self.kvm.config(name);
        backing::sources_of(self.config.policy, self.hardware, self.opens, statistic)
    }

    /// What samples look into.
    pub fn probe(&self) -> &GuestProbe {
        &self.probe
    }

    /// How events that have to share counters take turns.
    pub fn mux(&self) -> MuxPolicy {
        self.config.mux
    }

    /// The perf core.
    pub fn core(&self) -> &Core {
        &self.core
    }

    /// Takes KVM's statistics of vCPU `id`. They are there as long as the VM, whether the vCPU is or not:
    /// KVM's vCPU stays.
    pub fn add_statistics(&self, id: u8, stats: OwnedFd) {
        if let Some(stats) = stats_file("a vCPU", stats) {
            self.kvm.add_vcpu(VcpuId(id.into()), stats);
        }
    }

    /// Which events vCPUs that come later may count; those that are there are told by their mailboxes.
    pub fn set_filter(&self, filter: Arc<EventFilter>) {
        self.filter.store(filter);
    }

    /// The PMU of vCPU `id`, in its reset state. `tsc_khz`: the guest's TSC frequency.
    pub fn vcpu(self: &Arc<Self>, id: u8, tsc_khz: u32) -> VcpuPmu {
        let filter = self.filter.load_full();
        let mut vpmu = Vpmu::new(self.config.model);
        vpmu.set_filter(filter.clone());
        vpmu.set_pmi_limit(self.config.pmi_limit);
        VcpuPmu {
            vm: self.clone(),
            id,
            tsc_khz,
            vpmu,
            filter,
            attached: None,
            changed: false,
            fed_uncounted_ns: 0,
            fed_overflow: false,
            samples: SampleMemory::default(),
        }
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// KVM's statistics behind `fd`; without them the events they back are not supported, which is said once.
fn stats_file(whose: &str, fd: OwnedFd) -> Option<StatsFile> {
    StatsFile::new(fd)
        .inspect_err(|e| log::warn!("KVM's statistics of {whose} cannot be used: {}", error_line(e)))
        .ok()
}

/// What ties a vCPU's PMU to the thread that runs it.
#[derive(Debug)]
struct Attached {
    context: Arc<VcpuContext>,
    clock: Arc<VcpuClock>,
    events: PerfCoreEvents,
    fed: Arc<FedCounts>,
    /// Time this thread waits for a CPU; only looked at while a counter counts it.
    steal: StealClock,
}

/// What came of serving overflow signals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Serviced {
    /// Counters of the guest that overflowed.
    pub overflows: u32,
    /// Segment and control registers were looked at.
    pub used_system: bool,
}

/// The PMU of one vCPU. All methods are for the vCPU's own thread.
#[derive(Debug)]
pub struct VcpuPmu {
    vm: Arc<VmPmu>,
    id: u8,
    tsc_khz: u32,
    /// The register file; stays in its reset state where the guest has KVM's own vPMU.
    vpmu: Vpmu,
    /// Which events the guest may count.
    filter: Arc<EventFilter>,
    attached: Option<Attached>,
    /// A register was written since the last reconcile.
    changed: bool,
    /// What of [`Vpmu::uncounted_ns`] was fed to the guest's event.
    fed_uncounted_ns: u64,
    /// A count we feed ourselves has reached an armed overflow.
    fed_overflow: bool,
    /// What samples keep for the next.
    samples: SampleMemory,
}

impl VcpuPmu {
    /// Makes the calling thread the one whose time and events count for this vCPU, and starts the vCPU's
    /// event time.
    ///
    /// # Errors
    /// [`PmuSetupError`].
    pub fn attach_to_current_thread(&mut self) -> Result<(), PmuSetupError> {
        let vm = &self.vm;
        let steal =
            StealClock::for_current_thread().map_err(|e| PmuSetupError::Os("opening schedstat", e))?;
        let clock = Arc::new(VcpuClock::for_current_thread(self.tsc_khz));
        let vcpu = VcpuId(self.id.into());
        vm.clock.add_vcpu(vcpu, clock.clone());
        let fed = Arc::new(FedCounts::new(vpmu::fed::SELECTORS));
        vm.fed.add_vcpu(vcpu, fed.clone());
        let context = match vm.core.add_vcpu(vcpu, clock.tid()) {
            Ok(context) => context,
            Err(e) => {
                self.forget();
                return Err(PmuSetupError::Context(e));
            }
        };
        let mut sources = vm.sources();
        if !vm.config.stepping.user {
            sources = sources.stepping_kernel_only();
        }
        let events = PerfCoreEvents::new(vm.core.clone(), vcpu, sources);
        context.sched_in();
        self.attached = Some(Attached {
            context,
            clock,
            events,
            fed,
            steal,
        });
        Ok(())
    }

    /// Whether a thread counts for this vCPU.
    pub fn is_attached(&self) -> bool {
        self.attached.is_some()
    }

    /// The registers are in their reset state again, and nothing of what they counted goes on. The vCPU
    /// stays in the perf core, with the events of operators.
    pub fn reset(&mut self) {
        if let Some(attached) = &mut self.attached {
            self.vpmu.detach(&mut attached.events);
        }
        let mut fresh = self.vm.vcpu(self.id, self.tsc_khz);
        fresh.vpmu.said_before(&self.vpmu);
        fresh.attached = self.attached.take();
        *self = fresh;
    }

    /// The thread is about to end: the vCPU leaves the perf core. Samples that it still owes are
    /// lost.
    pub fn detach(&mut self) {
        if let Some(mut attached) = self.attached.take() {
            self.vpmu.detach(&mut attached.events);
            drop(attached.events);
            let vcpu = VcpuId(u32::from(self.id));
            if let Err(e) = self.vm.core.remove_vcpu(vcpu) {
                log::warn!("vcpu{}: leaving the perf core: {}", self.id, error_line(&e));
            }
            self.forget();
        }
    }

    /// Nobody counts for this vCPU any more.
    fn forget(&self) {
        let vcpu = VcpuId(u32::from(self.id));
        self.vm.clock.remove_vcpu(vcpu);
        self.vm.fed.remove_vcpu(vcpu);
    }

    /// The vCPU stops running guest code for a while, or for good. Overflows that have passed are
    /// known exactly from now on, whether their signals have come or not:
    /// [`VcpuPmu::service_overflows`] is to follow.
    pub fn pause(&mut self) {
        if let Some(attached) = &self.attached {
            attached.context.sched_out();
            attached.clock.rest();
        }
    }

    /// The vCPU goes on.
    pub fn resume(&mut self) {
        if let Some(attached) = &self.attached {
            attached.context.sched_in();
        }
    }

    /// Whether a delivered PMI sets LVTPC's mask bit.
    pub fn masks_lvtpc_on_delivery(&self) -> bool {
        self.vpmu.delivery_masks_lvtpc()
    }

    /// KVM_RUN is next.
    #[inline]
    pub fn guest_enter(&self) {
        if let Some(attached) = &self.attached {
            attached.clock.guest_enter();
        }
    }

    /// KVM_RUN is over.
    #[inline]
    pub fn guest_exit(&self) {
        if let Some(attached) = &self.attached {
            attached.clock.guest_exit();
        }
    }

    /// RDMSR.
    pub fn read_msr(&mut self, msr: u32) -> MsrRead {
        self.count_msr_exit();
        match &mut self.attached {
            Some(attached) => self.vpmu.read_msr(MsrAddress(msr), &mut attached.events),
            None => MsrRead::InjectGp,
        }
    }

    /// WRMSR.
    pub fn write_msr(&mut self, msr: u32, value: u64) -> MsrWrite {
        // Before the write: what was counted until now belongs to the registers as they were.
        self.count_msr_exit();
        self.changed = true;
        match &mut self.attached {
            Some(attached) => self.vpmu.write_msr(MsrAddress(msr), value, &mut attached.events),
            None => MsrWrite::InjectGp,
        }
    }

    /// RDPMC at `cpl`, with CR4.PCE set or not.
    pub fn rdpmc_at(&mut self, ecx: u32, cpl: u8, pce: bool) -> MsrRead {
        self.feed_steal();
        self.feed_uncounted();
        match &mut self.attached {
            Some(attached) => self
                .vpmu
                .rdpmc(RdpmcIndex(ecx), Cpl(cpl), pce, &mut attached.events),
            None => MsrRead::InjectGp,
        }
    }

    /// The guest's last instruction left guest mode and is complete with the next entry; call it after
    /// [`VcpuPmu::reconcile`]. `cpl` is asked only if some counter wants to know the level.
    #[inline]
    pub fn retired_outside(&mut self, cpl: impl FnOnce() -> u8) {
        let (wanted, level) = self.vpmu.wants_retired_outside();
        if !wanted {
            return;
        }
        let Some(attached) = self.attached.as_mut() else {
            return;
        };
        let cpl = if level { cpl() } else { 0 };
        self.vpmu.retired_outside(Cpl(cpl), &mut attached.events);
        self.vpmu.reconcile(&mut attached.events);
    }

    /// The privilege levels that the vCPU must be stepped for; as of the last reconcile.
    #[inline]
    pub fn stepped_levels(&self) -> SteppedLevels {
        self.attached
            .as_ref()
            .map_or_else(SteppedLevels::default, |attached| {
                attached.events.stepping_levels()
            })
    }

    /// How much may be fed at CPL 0 until an overflow is due.
    pub fn room_at_cpl0(&self) -> Counts {
        let fed = self.attached.as_ref().map(|attached| &attached.fed);
        fed.map_or_else(Counts::default, |fed| Counts::room(fed, 0))
    }

    /// What a step retired. Overflows are due before the next instruction: see
    /// [`VcpuPmu::take_fed_overflow`].
    pub fn feed_step(&mut self, step: &Step) {
        if let Some(attached) = &self.attached {
            self.fed_overflow |= step.feed(&attached.fed);
        }
    }

    /// Serves overflow signals. Says how many counters overflowed, and whether segment and control registers
    /// were looked at, so that they had better come with the next exit.
    pub fn service_overflows(&mut self, fd: &VcpuFd, synced: Synced) -> Serviced {
        let Some(attached) = self.attached.as_mut() else {
            return Serviced::default();
        };
        attached.clock.after_signal();
        let began = self.samples.begin();
        let mut regs = VcpuRegs::new(fd, &self.vm.probe, &mut self.samples, synced);
        if attached.clock.tick_is_due() {
            let halted = fd
                .get_mp_state()
                .is_ok_and(|state| state.mp_state == KVM_MP_STATE_HALTED);
            attached.clock.tick(if halted { None } else { regs.cpl() });
        }
        let mut counters: SmallVec<[CounterIndex; vpmu::MAX_COUNTERS]> = SmallVec::new();
        attached
            .context
            .service_overflows(&mut regs, &mut |overflowed: Overflowed| {
                if let Some(counter) = PerfCoreEvents::counter_of(overflowed.cookie) {
                    // At most one report for each counter, so this never grows onto the heap.
                    counters.push(counter);
                }
            });
        let used_system = regs.used_system();
        let mut overflows = 0;
        for counter in counters {
            overflows += u32::from(self.vpmu.overflowed(counter, &mut attached.events));
        }
        self.samples.held(began);
        Serviced {
            overflows,
            used_system,
        }
    }

    /// Something the guest's paravirtual events count has happened once. It has no privilege level of its
    /// own.
    #[inline]
    pub fn count_event(&mut self, event: ParavirtualEvent) {
        if let Some(attached) = &self.attached {
            self.fed_overflow |= attached.fed.add(vpmu::fed::paravirtual(event), 0, 1);
        }
    }

    /// An access to a PMU register left guest mode.
    fn count_msr_exit(&mut self) {
        self.count_event(ParavirtualEvent::MsrExits);
        self.feed_steal();
        self.feed_uncounted();
    }

    /// Brings the count of stolen time up to date, if a counter counts it.
    fn feed_steal(&mut self) {
        if let Some(attached) = self.attached.as_mut()
            && let Some(ns) = attached.steal.advance()
        {
            let selector = vpmu::fed::paravirtual(ParavirtualEvent::StealNs);
            self.fed_overflow |= attached.fed.add(selector, 0, ns);
        }
    }

    /// Brings the count of uncounted time up to date. While every counter counts this is two loads.
    #[inline]
    fn feed_uncounted(&mut self) {
        if let Some(attached) = self.attached.as_mut() {
            let total_ns = self.vpmu.uncounted_ns(&mut attached.events);
            let more = total_ns - self.fed_uncounted_ns;
            if more > 0 {
                self.fed_uncounted_ns = total_ns;
                let selector = vpmu::fed::paravirtual(ParavirtualEvent::UncountedNs);
                self.fed_overflow |= attached.fed.add(selector, 0, more);
            }
        }
    }

    /// How soon the vCPU is to leave the guest, because a counter that has no place waits for one; `None`
    /// while none does.
    #[inline]
    pub fn retry_in(&mut self) -> Option<Duration> {
        let attached = self.attached.as_mut()?;
        let ns = self.vpmu.retry_in_ns(&mut attached.events)?;
        Some(Duration::from_nanos(ns))
    }

    /// Whether PMIs are ours to deliver.
    pub fn has_pmis(&self) -> bool {
        self.vm.is_for_guest() && !self.is_kvms()
    }

    /// Nanoseconds in which at least one enabled counter was not counted, and how often one lost its place or
    /// found none. `None` where KVM's own vPMU counts, or the guest has no counters.
    pub fn uncounted(&mut self) -> Option<(u64, u64)> {
        if !self.has_pmis() {
            return None;
        }
        let attached = self.attached.as_mut()?;
        let ns = self.vpmu.uncounted_ns(&mut attached.events);
        Some((ns, self.vpmu.places_lost()))
    }

    /// Whether overflows are to be served although no signal came.
    #[inline]
    pub fn take_fed_overflow(&mut self) -> bool {
        std::mem::take(&mut self.fed_overflow)
    }

    /// Brings the events in line with the registers; nothing to do is one test.
    #[inline]
    pub fn reconcile(&mut self) {
        let Some(attached) = self.attached.as_mut() else {
            return;
        };
        self.vpmu.reconcile(&mut attached.events);
        if self.vpmu.has_uncounted() {
            self.feed_uncounted();
        }
        let Some(attached) = self.attached.as_mut() else {
            return;
        };
        if std::mem::take(&mut self.changed) {
            attached
                .steal
                .set_on(attached.events.counts(ParavirtualEvent::StealNs));
        }
    }

    /// Whether a PMI is due and not delivered yet.
    #[inline]
    pub fn pmi_pending(&self) -> bool {
        self.vpmu.pmi_pending()
    }

    /// Whether the due PMI may go now, or how long the rate limit holds it back.
    pub fn pmi_ready(&mut self) -> PmiReady {
        let now_ns = self.vm.now_ns();
        self.vpmu.pmi_ready(now_ns)
    }

    /// The due PMI cannot be delivered now. Returns whether it still waits: what the guest has served is
    /// forgotten.
    pub fn pmi_must_wait(&mut self) -> bool {
        self.vpmu.pmi_must_wait()
    }

    /// What became of PMIs so far.
    pub fn pmi_counts(&self) -> PmiCounts {
        self.vpmu.pmi_counts()
    }

    /// The due PMI went to the guest.
    pub fn pmi_delivered(&mut self) {
        let now_ns = self.vm.now_ns();
        self.vpmu.pmi_delivered(now_ns);
    }

    /// Nanoseconds from now until `time_ns` of the clock that [`VcpuPmu::pmi_ready`] speaks of.
    pub fn nanoseconds_until(&self, time_ns: u64) -> u64 {
        time_ns.saturating_sub(self.vm.now_ns())
    }

    /// Which events the guest may count from now on.
    pub fn set_filter(&mut self, filter: Arc<EventFilter>) {
        self.filter = filter.clone();
        self.vpmu.set_filter(filter);
        self.changed = true;
    }

    /// Whether the guest has KVM's own vPMU: its registers do not come here.
    pub fn is_kvms(&self) -> bool {
        self.vm.own.is_some()
    }

    /// Starts a search for the guest's kernel; [`GuestProbe::begin_search`] said so.
    pub fn find_kernel(&mut self, fd: &VcpuFd) {
        VcpuRegs::new(fd, &self.vm.probe, &mut self.samples, Synced::default()).find_kernel();
    }

    /// What the guest has programmed, for the operator.
    pub fn view(&mut self, fd: &VcpuFd) -> Vec<GuestCounter> {
        if self.is_kvms() {
            return own::registers(fd, self.vm.config.model, self.filter.clone()).map_or_else(
                |e| {
                    log::warn!("vcpu{}: KVM_GET_MSRS: {e}", self.id);
                    Vec::new()
                },
                |mut registers| own::view(&mut registers),
            );
        }
        let Some(attached) = self.attached.as_mut() else {
            return Vec::new();
        };
        let views = self.vpmu.counters_view(&mut attached.events);
        views.iter().map(shown::guest_counter).collect()
    }

    /// The register file.
    pub fn registers(&mut self) -> &mut Vpmu {
        &mut self.vpmu
    }
}

#[cfg(test)]
mod tests {
    use perf_core::SharePolicy;
    use vm_memory::{GuestAddress, GuestMemoryMmap};
    use vpmu::registers::{IA32_PERF_GLOBAL_CTRL, IA32_PERFEVTSEL0, IA32_PMC0};
    use vpmu::{BackingPolicy, Model};

    use super::*;
    use crate::kvm::stepping::Stepping;

    /// Select 0xFF with ENABLE, OS and USR.
    fn selector(event: ParavirtualEvent) -> u64 {
        const SELECT: u64 = 0xff | 1 << 16 | 1 << 17 | 1 << 22;
        SELECT | u64::from(event.umask().0) << 8
    }

    /// A vCPU's PMU on this thread, with nothing behind it but what the VMM counts itself.
    fn pmu() -> VcpuPmu {
        let name = "intel-v2".parse().unwrap();
        let config = PmuConfig {
            model: Model::resolve(name, None, None, &mut cpuid::read_host).unwrap(),
            policy: BackingPolicy::Auto,
            filter: Arc::new(EventFilter::allow_all()),
            paravirtual: true,
            hides_denied: false,
            pmi_limit: vpmu::DEFAULT_PMI_LIMIT,
            stepping: Stepping::default(),
            share: SharePolicy::default(),
            mux: MuxPolicy::default(),
            turn: None,
            limits: OperatorLimits::default(),
        };
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        let vm = VmPmu::new(
            config,
            &HostProbe::run(),
            None,
            false,
            GuestProbe::new(memory, None),
        );
        let mut pmu = Arc::new(vm).vcpu(0, 1_000_000);
        pmu.attach_to_current_thread().unwrap();
        pmu
    }

    fn write(pmu: &mut VcpuPmu, msr: u32, value: u64) {
        assert_eq!(pmu.write_msr(msr, value), MsrWrite::Done);
    }

    /// RDPMC of counter 0 at CPL 0.
    fn read(pmu: &mut VcpuPmu) -> Option<u64> {
        match pmu.rdpmc_at(0, 0, true) {
            MsrRead::Value(value) => Some(value),
            MsrRead::InjectGp => None,
        }
    }

    /// Programs counter 0 for `event` and reconciles, as before an entry.
    fn program(pmu: &mut VcpuPmu, event: ParavirtualEvent) {
        write(pmu, IA32_PERFEVTSEL0, selector(event));
        write(pmu, IA32_PERF_GLOBAL_CTRL, 1);
        pmu.reconcile();
    }

    #[test]
    fn reads_and_writes_of_pmu_registers_are_both_msr_exits() {
        let mut pmu = pmu();
        program(&mut pmu, ParavirtualEvent::MsrExits);
        assert_eq!(read(&mut pmu), Some(0));
        for _ in 0..5 {
            write(&mut pmu, IA32_PERF_GLOBAL_CTRL, 1);
            pmu.reconcile();
        }
        assert_eq!(read(&mut pmu), Some(5));
        // The exit of the RDMSR itself is counted, and one that faults is an exit too.
        assert_eq!(pmu.read_msr(IA32_PMC0), MsrRead::Value(6));
        assert_eq!(pmu.write_msr(IA32_PERF_GLOBAL_CTRL, 1 << 63), MsrWrite::InjectGp);
        assert_eq!(read(&mut pmu), Some(7));
        pmu.detach();
    }

    /// A guest that counts what nobody here can count reads for how long: never less than passed between two
    /// reads of its, never more than passed around them, and nothing when that counter is off.
    #[test]
    fn a_guest_reads_how_long_its_counters_were_not_counted() {
        let mut pmu = pmu();
        let raw = 0xd1 | 1 << 8 | 1 << 16 | 1 << 17 | 1 << 22;
        program(&mut pmu, ParavirtualEvent::UncountedNs);
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(read(&mut pmu), Some(0), "its own counter is counted");
        let outer = Instant::now();
        write(&mut pmu, IA32_PERFEVTSEL0 + 1, raw);
        write(&mut pmu, IA32_PERF_GLOBAL_CTRL, 3);
        pmu.reconcile();
        let inner = Instant::now();
        std::thread::sleep(Duration::from_millis(20));
        let inner_ns = inner.elapsed().as_nanos() as u64;
        let lasted = read(&mut pmu).unwrap();
        let outer_ns = outer.elapsed().as_nanos() as u64;
        assert!(
            (inner_ns..=outer_ns).contains(&lasted),
            "{inner_ns} <= {lasted} <= {outer_ns}"
        );
        write(&mut pmu, IA32_PERF_GLOBAL_CTRL, 1);
        pmu.reconcile();
        let stopped = read(&mut pmu).unwrap();
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(read(&mut pmu), Some(stopped));
        assert_eq!(pmu.uncounted().map(|(_, times)| times), Some(1));
        assert_eq!(pmu.retry_in(), None, "there is nobody to try again");
        let views = pmu.vpmu.counters_view(&mut pmu.attached.as_mut().unwrap().events);
        assert!(views[0].counting && views[0].uncounted_ns == 0);
        assert!(!views[1].counting && views[1].uncounted_ns >= inner_ns);
        pmu.detach();
    }

    /// A thread that shares one CPU with a busy one waits; the guest's counter of that must not stand still,
    /// and must stop when the guest asks for something else.
    #[test]
    fn a_guest_that_programs_stolen_time_by_wrmsr_has_it_counted() {
        let mut pmu = pmu();
        assert!(pmu.attached.as_mut().unwrap().steal.advance().is_none());
        program(&mut pmu, ParavirtualEvent::StealNs);
        assert!(pmu.attached.as_mut().unwrap().steal.advance().is_some());
        program(&mut pmu, ParavirtualEvent::MsrExits);
        assert!(pmu.attached.as_mut().unwrap().steal.advance().is_none());
        pmu.detach();
    }
}
