//! The virtual PMU of the machine.
//!
//! [`VmPmu`] owns the perf core of a VM and its drivers. [`VcpuPmu`] connects the register file
//! (`vpmu`) of a vCPU to its perf-core context.

pub mod backing;
pub mod branches;
mod config;
pub mod countable;
pub mod event_opener;
pub mod fit;
pub mod guest_view;
pub mod kernel_reader;
mod operator;
pub mod own;
mod pmi;
mod regs;
pub(crate) mod remote_open;
mod saved;
mod steal;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use kvm_bindings::{KVM_MP_STATE_HALTED, kvm_regs, kvm_sregs};
use perf_core::branch::BranchFilter;
use perf_core::mux::MuxPolicy;
use perf_core::pmu::VcpuId;
use perf_core::pmu::clock::{ClockPmu, VcpuRunTimeClock};
use perf_core::pmu::host::{HostPerfCapabilities, HostPmu};
use perf_core::pmu::kvm::{KvmPmu, KvmStatsFile};
use perf_core::pmu::sched::RunQueueWaitPmu;
use perf_core::pmu::vmm_pmu::{VmmPmu, VmmPmuCounts};
use perf_core::{OverflowReport, PerfCore, PerfCoreConfig, VcpuEventContext, error_line};
use smallvec::SmallVec;
use vpmu::exact::{RetiredCounts, SingleStepOutcome};
use vpmu::filter::EventFilterAction;
use vpmu::{
    ArchEventSet, CounterBackingPolicy, CounterBackingSelector, CounterIndex, Cpl, EventFilter,
    GuestCounterStatus, MsrAddress, MsrReadOutcome, MsrWriteOutcome, ParavirtualEvent, PerfCoreEvents,
    PrivilegeLevels, RdpmcIndex, Vendor, Vpmu, vmm_counts,
};

use crate::kvm::cpuid;
use crate::kvm::event_filter::KvmEventFilterError;
use crate::kvm::vcpu_fd::VcpuFd;
use crate::timers::TickRequests;
use branches::{BranchStackCollector, BranchStackError};
use steal::StealTimeClock;

pub use config::{OperatorResourceLimits, PmuConfig};
pub use operator::{HostKernelSampling, HostKernelSamplingError};
pub use own::KvmVpmu;
pub use regs::{ExitRegisters, GuestSamplingContext, KernelSearchProgress, VcpuSampleCache, VcpuSampleRegs};

/// Error when setting up the PMU of a vCPU.
#[derive(Debug, thiserror::Error)]
pub enum PmuSetupError {
    /// The perf core rejected the vCPU.
    #[error("cannot create the vCPU's event context")]
    Context(#[source] perf_core::PerfEventOpenError),
    /// A system call failed.
    #[error("{0} failed")]
    Os(&'static str, #[source] io::Error),
}

/// Returns the signal that host perf events send to the vCPU thread on overflow.
pub fn overflow_signal() -> libc::c_int {
    libc::SIGUSR2
}

/// PMU of a VM: the perf core, its drivers, and the configuration of the vCPUs' PMUs. Operators use
/// the perf core even if the guest has no PMU (model off).
#[derive(Debug)]
pub struct VmPmu {
    config: PmuConfig,
    /// Current event filter, with which later vCPUs start.
    filter: ArcSwap<EventFilter>,
    core: PerfCore,
    tick_requests: Arc<TickRequests>,
    clock: Arc<ClockPmu>,
    vmm_pmu: Arc<VmmPmu>,
    kvm: Arc<KvmPmu>,
    /// Vendor of the host's PMU; `None` if the host has no PMU that can be used.
    hardware: Option<Vendor>,
    /// Generic events that the host's kernel can open.
    opens: ArchEventSet,
    /// Guest memory, and what is known about the guest's kernel, for samples.
    probe: GuestSamplingContext,
    /// KVM's own vPMU, if the guest uses it.
    own: Option<KvmVpmu>,
}

impl VmPmu {
    /// Creates the perf core with the drivers that this host supports. `vm_stats` is the descriptor
    /// of KVM's VM statistics. `interprets_kernel` states whether KVM interprets the guest's
    /// kernel. `guest` provides guest memory for samples.
    pub fn new(
        config: PmuConfig,
        probe: &HostPerfCapabilities,
        vm_stats: Option<OwnedFd>,
        interprets_kernel: bool,
        guest: GuestSamplingContext,
    ) -> Self {
        let tick_requests = Arc::new(TickRequests::default());
        let core = PerfCore::new(PerfCoreConfig {
            tick_timer: Some(tick_requests.clone()),
            ..config.core_config()
        });
        let signal = Some(overflow_signal());
        if probe.hardware_pmu {
            core.register(Arc::new(HostPmu::hardware(signal, probe)));
        }
        core.register(Arc::new(HostPmu::software(signal)));
        core.register(Arc::new(RunQueueWaitPmu));
        let clock = Arc::new(ClockPmu::new(signal).interpreting_kernel(interprets_kernel));
        core.register(clock.clone());
        let vmm_pmu = Arc::new(VmmPmu::new());
        core.register(vmm_pmu.clone());
        let kvm = Arc::new(KvmPmu::new(vm_stats.and_then(|fd| stats_file("the VM", fd))));
        core.register(kvm.clone());
        let hardware = probe
            .hardware_pmu
            .then(|| vpmu::HostPmuProperties::vendor(&mut cpuid::read_host));
        Self {
            filter: ArcSwap::new(config.filter.clone()),
            config,
            core,
            tick_requests,
            clock,
            vmm_pmu,
            kvm,
            hardware,
            opens: backing::generic_events(probe),
            probe: guest,
            own: None,
        }
    }

    /// Sets KVM's own vPMU as the guest's PMU.
    #[must_use]
    pub fn with_own(mut self, own: KvmVpmu) -> Self {
        self.own = Some(own);
        self
    }

    /// Returns the configured backing in the syntax of `--backing`; `none` without a guest PMU.
    pub fn backing_name(&self) -> &'static str {
        if self.config.model.is_off() {
            return "none";
        }
        match self.config.policy {
            CounterBackingPolicy::Auto => "auto",
            CounterBackingPolicy::Hardware => "hardware",
            CounterBackingPolicy::Clock => "clock",
            CounterBackingPolicy::Exact => "exact",
            CounterBackingPolicy::Kvm => "kvm",
            CounterBackingPolicy::None => "none",
        }
    }

    /// Returns the current event filter in one line.
    pub fn filter_summary(&self) -> String {
        let filter = self.filter.load();
        let entries = filter.entries().len();
        let fixed = filter.fixed_counters();
        match filter.action() {
            EventFilterAction::Deny if entries == 0 && fixed == 0 => "allows all events".to_owned(),
            EventFilterAction::Deny => format!("denies {entries} entries, fixed counters {fixed:#x}"),
            EventFilterAction::Allow => format!("allows only {entries} entries, fixed counters {fixed:#x}"),
        }
    }

    /// Returns the current event filter.
    pub fn filter(&self) -> Arc<EventFilter> {
        self.filter.load_full()
    }

    /// Returns `filter` without the events that the configuration never permits.
    #[must_use]
    pub fn within_limits(&self, filter: EventFilter) -> EventFilter {
        if self.config.paravirtual {
            filter
        } else {
            filter.without_paravirtual(self.config.model.vendor())
        }
    }

    /// Installs the filter in KVM if the guest uses KVM's own vPMU. Otherwise has no effect.
    ///
    /// # Errors
    /// Returns a [`KvmEventFilterError`] if KVM does not accept the filter. The previous filter
    /// stays in effect.
    pub fn set_kvm_filter(&self, filter: &EventFilter) -> Result<(), KvmEventFilterError> {
        self.own.as_ref().map_or(Ok(()), |own| own.set_filter(filter))
    }

    /// Returns `true` if the guest has a PMU.
    pub fn is_for_guest(&self) -> bool {
        !self.config.model.is_off()
    }

    /// Returns `true` if the guest has branch records.
    pub fn has_branch_records(&self) -> bool {
        self.config.model.has_branch_records()
    }

    /// Returns the sources that can count events under the configured policy.
    fn sources(&self) -> CounterBackingSelector {
        self.sources_under(self.config.policy)
    }

    fn sources_under(&self, policy: CounterBackingPolicy) -> CounterBackingSelector {
        let statistic = |name| self.kvm.config(name);
        backing::sources_of(policy, self.hardware, self.opens, statistic)
    }

    /// Returns the sources that can count a guest's events under `policy`, given what KVM can step.
    fn sources_of_guest(&self, policy: CounterBackingPolicy) -> CounterBackingSelector {
        let sources = self.sources_under(policy);
        if self.config.stepping.user {
            sources
        } else {
            sources.stepping_kernel_only()
        }
    }

    /// Returns guest memory, and what is known about the guest's kernel, for samples.
    pub fn probe(&self) -> &GuestSamplingContext {
        &self.probe
    }

    /// Returns the multiplexing policy.
    pub fn mux(&self) -> MuxPolicy {
        self.config.mux
    }

    /// Returns the perf core's requests for ticks.
    pub fn tick_requests(&self) -> Arc<TickRequests> {
        Arc::clone(&self.tick_requests)
    }

    /// Returns the perf core.
    pub fn core(&self) -> &PerfCore {
        &self.core
    }

    /// Adds KVM's statistics `stats` of vCPU `id`. They stay valid, as KVM does not delete vCPUs.
    pub fn add_statistics(&self, id: u8, stats: OwnedFd) {
        if let Some(stats) = stats_file("a vCPU", stats) {
            self.kvm.add_vcpu(VcpuId(id.into()), stats);
        }
    }

    /// Sets the event filter with which later vCPUs start. Existing vCPUs receive the filter
    /// through a request.
    pub fn set_filter(&self, filter: Arc<EventFilter>) {
        self.filter.store(filter);
    }

    /// Checks that samples can include stacks of the branches that `filter` selects.
    ///
    /// # Errors
    /// Returns [`BranchStackError`] with the reason.
    pub fn check_branches(&self, filter: BranchFilter) -> Result<(), BranchStackError> {
        if self.config.has_rdpmc_breakpoints {
            return Err(BranchStackError::Breakpoints);
        }
        branches::check_host(self.config.stepping, filter)
    }

    /// Creates the PMU of vCPU `id`, in its reset state, for a guest TSC of `tsc_khz`.
    pub fn vcpu(self: &Arc<Self>, id: u8, tsc_khz: u32) -> VcpuPmu {
        let filter = self.filter.load_full();
        let mut vpmu = Vpmu::new(self.config.model);
        vpmu.set_filter(filter.clone());
        vpmu.set_pmi_limit(self.config.pmi_limit);
        vpmu.set_pmi_share(self.config.pmi_share);
        VcpuPmu {
            vm: self.clone(),
            id,
            tsc_khz,
            vpmu,
            filter,
            attached: None,
            changed: false,
            added_uncounted_ns: 0,
            pending_changes: 0,
            step_began: None,
            count_overflow: false,
            samples: VcpuSampleCache::default(),
        }
    }
}

/// Opens the KVM statistics of `fd`. Returns `None` after a failure, which is logged.
fn stats_file(whose: &str, fd: OwnedFd) -> Option<KvmStatsFile> {
    KvmStatsFile::new(fd)
        .inspect_err(|e| log::warn!("cannot use KVM's statistics of {whose}: {}", error_line(e)))
        .ok()
}

/// Parts of a vCPU's PMU that exist only while a thread runs the vCPU.
#[derive(Debug)]
struct AttachedThread {
    context: Arc<VcpuEventContext>,
    clock: Arc<VcpuRunTimeClock>,
    events: PerfCoreEvents,
    vmm_counts: Arc<VmmPmuCounts>,
    /// Clock of the time that this thread waits for a host CPU. Off unless a guest counter needs
    /// it.
    steal: StealTimeClock,
}

/// PMU of one vCPU. All methods must be called on the vCPU thread.
#[derive(Debug)]
pub struct VcpuPmu {
    vm: Arc<VmPmu>,
    id: u8,
    tsc_khz: u32,
    /// Register file of the emulated PMU. Not used if the guest has KVM's own vPMU.
    vpmu: Vpmu,
    /// Filter that lists the events that the guest may count.
    filter: Arc<EventFilter>,
    attached: Option<AttachedThread>,
    /// `true` if a PMU register or the filter was changed since the last [`VcpuPmu::reconcile`].
    changed: bool,
    /// Part of the uncounted time that the guest's counters of it include, in nanoseconds.
    added_uncounted_ns: u64,
    /// Number of backing changes at a restore that the guest's counters of them do not include.
    pending_changes: u64,
    /// Time at which the current single step was prepared; `None` without stepping.
    step_began: Option<Instant>,
    /// `true` if an overflow, for example of a count that the VMM adds, is due without a signal.
    count_overflow: bool,
    /// Registers and buffers that the vCPU keeps between samples.
    samples: VcpuSampleCache,
}

impl VcpuPmu {
    /// Attaches the vCPU to the calling thread. From this call on, the vCPU's event time advances,
    /// and the time and events of the thread are counted.
    ///
    /// # Errors
    /// Returns [`PmuSetupError::Os`] if schedstat cannot be opened, and [`PmuSetupError::Context`]
    /// if the perf core rejects the vCPU.
    pub fn attach_to_current_thread(&mut self) -> Result<(), PmuSetupError> {
        let vm = &self.vm;
        let steal =
            StealTimeClock::for_current_thread().map_err(|e| PmuSetupError::Os("opening schedstat", e))?;
        let clock = Arc::new(VcpuRunTimeClock::for_current_thread(self.tsc_khz));
        let vcpu = VcpuId(self.id.into());
        vm.clock.add_vcpu(vcpu, clock.clone());
        let vmm_counts = Arc::new(VmmPmuCounts::new(vmm_counts::SELECTORS));
        vm.vmm_pmu.add_vcpu(vcpu, vmm_counts.clone());
        let added = vm
            .core
            .add_vcpu_recorded_as(vcpu, clock.tid(), sandbox::host_tid());
        let context = match added {
            Ok(context) => context,
            Err(e) => {
                self.forget();
                return Err(PmuSetupError::Context(e));
            }
        };
        let sources = vm.sources_of_guest(vm.config.policy);
        let events = PerfCoreEvents::new(vm.core.clone(), vcpu, sources);
        context.sched_in();
        self.attached = Some(AttachedThread {
            context,
            clock,
            events,
            vmm_counts,
            steal,
        });
        Ok(())
    }

    /// Returns `true` if the vCPU is attached to a thread.
    pub fn is_attached(&self) -> bool {
        self.attached.is_some()
    }

    /// Resets the PMU registers and closes the guest's events. The vCPU and the events of operators
    /// stay attached to the perf core.
    pub fn reset(&mut self) {
        if let Some(attached) = &mut self.attached {
            self.vpmu.detach(&mut attached.events);
        }
        let mut fresh = self.vm.vcpu(self.id, self.tsc_khz);
        fresh.vpmu.inherit_warnings(&self.vpmu);
        fresh.attached = self.attached.take();
        *self = fresh;
    }

    /// Detaches the vCPU from the perf core before its thread ends. Pending samples are lost.
    pub fn detach(&mut self) {
        if let Some(mut attached) = self.attached.take() {
            self.vpmu.detach(&mut attached.events);
            drop(attached.events);
            let vcpu = VcpuId(u32::from(self.id));
            if let Err(e) = self.vm.core.remove_vcpu(vcpu) {
                log::warn!(
                    "vcpu{}: cannot detach from the perf core: {}",
                    self.id,
                    error_line(&e)
                );
            }
            self.forget();
        }
    }

    /// Removes the vCPU from the drivers for clock events and for counts of the VMM.
    fn forget(&self) {
        let vcpu = VcpuId(u32::from(self.id));
        self.vm.clock.remove_vcpu(vcpu);
        self.vm.vmm_pmu.remove_vcpu(vcpu);
    }

    /// Schedules out the vCPU's events, because it stops running guest code. Overflows up to this
    /// point are then known without their signals, and must be handled with
    /// [`VcpuPmu::service_overflows`].
    pub fn pause(&mut self) {
        if let Some(attached) = &self.attached {
            attached.context.sched_out();
            attached.clock.quiesce();
        }
    }

    /// Schedules in the vCPU's events, because it is about to run guest code.
    pub fn resume(&mut self) {
        if let Some(attached) = &self.attached {
            attached.context.sched_in();
        }
    }

    /// Returns `true` if the guest's processor model sets the mask bit of LVTPC when it delivers a
    /// PMI.
    pub fn masks_lvtpc_on_delivery(&self) -> bool {
        self.vpmu.delivery_masks_lvtpc()
    }

    /// Records that KVM_RUN is about to be called.
    #[inline]
    pub fn guest_enter(&self) {
        if let Some(attached) = &self.attached {
            attached.clock.guest_enter();
        }
    }

    /// Records that KVM_RUN has returned.
    #[inline]
    pub fn guest_exit(&self) {
        if let Some(attached) = &self.attached {
            attached.clock.guest_exit();
        }
    }

    /// Handles RDMSR for a PMU register.
    pub fn read_msr(&mut self, msr: u32) -> MsrReadOutcome {
        self.count_msr_exit();
        match &mut self.attached {
            Some(attached) => self.vpmu.read_msr(MsrAddress(msr), &mut attached.events),
            None => MsrReadOutcome::InjectGp,
        }
    }

    /// Handles WRMSR for a PMU register.
    pub fn write_msr(&mut self, msr: u32, value: u64) -> MsrWriteOutcome {
        // Counts up to this point belong to the previous register values, so they are added before
        // the write.
        self.count_msr_exit();
        self.changed = true;
        match &mut self.attached {
            Some(attached) => self.vpmu.write_msr(MsrAddress(msr), value, &mut attached.events),
            None => MsrWriteOutcome::InjectGp,
        }
    }

    /// Handles RDPMC executed at privilege level `cpl`. `pce` is the value of CR4.PCE.
    pub fn rdpmc_at(&mut self, ecx: u32, cpl: u8, pce: bool) -> MsrReadOutcome {
        self.feed_steal();
        self.feed_uncounted();
        match &mut self.attached {
            Some(attached) => self
                .vpmu
                .rdpmc(RdpmcIndex(ecx), Cpl(cpl), pce, &mut attached.events),
            None => MsrReadOutcome::InjectGp,
        }
    }

    /// Counts the instruction that caused the last exit and completes at the next entry. Must be
    /// called after [`VcpuPmu::reconcile`]. Calls `cpl` only if a counter counts a single privilege
    /// level.
    #[inline]
    pub fn count_emulated_instruction(&mut self, cpl: impl FnOnce() -> u8) {
        let (wanted, level) = self.vpmu.needs_emulated_instructions();
        if !wanted {
            return;
        }
        let Some(attached) = self.attached.as_mut() else {
            return;
        };
        let cpl = if level { cpl() } else { 0 };
        self.vpmu
            .count_emulated_instruction(Cpl(cpl), &mut attached.events);
        self.vpmu.reconcile(&mut attached.events);
    }

    /// Returns the privilege levels at which the vCPU must be single-stepped, as of the last
    /// [`VcpuPmu::reconcile`]. If there are any, the caller must pass the outcome of the next step
    /// to [`VcpuPmu::feed_step`].
    #[inline]
    pub fn stepped_levels(&mut self) -> PrivilegeLevels {
        let levels = self.exact_levels();
        let branches = self.samples.branches.levels();
        let records = self.vpmu.branch_levels();
        let levels = PrivilegeLevels {
            user: levels.user || branches.user || records.user,
            kernel: levels.kernel || branches.kernel || records.kernel,
        };
        self.step_began = levels.any().then(|| self.step_began.unwrap_or_else(Instant::now));
        levels
    }

    /// Returns the privilege levels at which the exact backing needs single-stepping.
    #[inline]
    pub fn exact_levels(&self) -> PrivilegeLevels {
        let attached = self.attached.as_ref();
        attached.map_or_else(PrivilegeLevels::default, |attached| {
            let mut levels = attached.events.stepping_levels();
            if self.vm.config.steps_for_operators {
                let (user, kernel) = attached.vmm_counts.counted_levels(vmm_counts::EXACT.len());
                levels.user |= user;
                levels.kernel |= kernel;
            }
            levels
        })
    }

    /// Returns how many events can be counted at CPL 0 before a counter overflows.
    pub fn room_at_cpl0(&self) -> RetiredCounts {
        let attached = self.attached.as_ref();
        attached.map_or_else(RetiredCounts::default, |a| {
            RetiredCounts::remaining(&a.vmm_counts, 0)
        })
    }

    /// Adds the events of a single step to the counters. If a part of the step is unknown, also
    /// adds its duration to the uncounted time. The caller must check
    /// [`VcpuPmu::take_count_overflow`] before the next instruction.
    pub fn feed_step(&mut self, step: &SingleStepOutcome) {
        let began = self.step_began.take();
        if let Some(attached) = &mut self.attached {
            self.count_overflow |= step.feed(&attached.vmm_counts);
            // Bursts for branch stacks also step code that no event counts.
            if step.lost && attached.events.needs_stepping() {
                let lasted = began.map_or(Duration::ZERO, |began| began.elapsed());
                let ns = u64::try_from(lasted.as_nanos()).unwrap_or(u64::MAX);
                self.vpmu.lose_time(ns, &mut attached.events);
                self.feed_uncounted();
            }
        }
    }

    /// Handles overflows and takes the samples that are due. Returns `true` if segment and control
    /// registers were needed.
    pub fn service_overflows(&mut self, fd: &VcpuFd, synced: ExitRegisters) -> bool {
        let Some(attached) = self.attached.as_mut() else {
            return false;
        };
        attached.clock.after_signal();
        let began = self.samples.begin();
        let mut regs = VcpuSampleRegs::new(fd, &self.vm.probe, &mut self.samples, synced);
        if attached.clock.tick_is_due() {
            let halted = fd
                .get_mp_state()
                .is_ok_and(|state| state.mp_state == KVM_MP_STATE_HALTED);
            attached.clock.tick(if halted { None } else { regs.cpl() });
        }
        let mut counters: SmallVec<[CounterIndex; vpmu::MAX_COUNTERS]> = SmallVec::new();
        attached
            .context
            .service_overflows(&mut regs, &mut |overflowed: OverflowReport| {
                if let Some(counter) = PerfCoreEvents::counter_of(overflowed.cookie) {
                    // Each counter is reported at most once, so the vector never spills to the
                    // heap.
                    counters.push(counter);
                }
            });
        let used_system = regs.used_system();
        self.samples.branches.written();
        for counter in counters {
            self.vpmu.overflowed(counter, &mut attached.events);
        }
        self.samples.end_overflow(began);
        used_system
    }

    /// Returns the collector of the branch stack for the next sample.
    #[inline]
    pub fn branches(&mut self) -> &mut BranchStackCollector {
        &mut self.samples.branches
    }

    /// Ends the collection of branches. [`VcpuPmu::service_overflows`] then writes the samples.
    pub fn complete_branches(&mut self) {
        self.samples.branches.complete();
        self.count_overflow = true;
    }

    /// Sets the time that single-stepping took for the branches of the next sample, in nanoseconds.
    pub fn set_burst_time(&mut self, ns: u64) {
        self.samples.set_burst_time(ns);
    }

    /// Returns the CPU time of the vCPU's thread, in nanoseconds.
    pub fn thread_ns(&self) -> u64 {
        self.attached
            .as_ref()
            .map_or(0, |attached| attached.clock.thread_ns())
    }

    /// Counts `event`, a paravirtual event, once. Privilege levels do not apply to such events.
    #[inline]
    pub fn count_event(&mut self, event: ParavirtualEvent) {
        if let Some(attached) = &self.attached {
            self.count_overflow |= attached.vmm_counts.add(vmm_counts::paravirtual(event), 0, 1);
        }
    }

    /// Counts an exit for a PMU register access.
    fn count_msr_exit(&mut self) {
        self.count_event(ParavirtualEvent::MsrExits);
        self.feed_steal();
        self.feed_uncounted();
    }

    /// Adds the time for which the thread has waited for a host CPU since the last call ("stolen
    /// time") to the guest counters that count stolen time, if any.
    fn feed_steal(&mut self) {
        if let Some(attached) = self.attached.as_mut()
            && let Some(ns) = attached.steal.advance()
        {
            let selector = vmm_counts::paravirtual(ParavirtualEvent::StealNs);
            self.count_overflow |= attached.vmm_counts.add(selector, 0, ns);
        }
    }

    /// Adds the uncounted time since the last call to the guest counters that count it.
    #[inline]
    fn feed_uncounted(&mut self) {
        if let Some(attached) = self.attached.as_mut() {
            let total_ns = self.vpmu.uncounted_ns(&mut attached.events);
            let more = total_ns - self.added_uncounted_ns;
            if more > 0 {
                self.added_uncounted_ns = total_ns;
                let selector = vmm_counts::paravirtual(ParavirtualEvent::UncountedNs);
                self.count_overflow |= attached.vmm_counts.add(selector, 0, more);
            }
        }
    }

    /// Returns the time until the vCPU must exit to retry finding a host counter, or `None` if no
    /// guest counter waits for one.
    #[inline]
    pub fn retry_in(&mut self) -> Option<Duration> {
        let attached = self.attached.as_mut()?;
        let ns = self.vpmu.retry_in_ns(&mut attached.events)?;
        Some(Duration::from_nanos(ns))
    }

    /// Returns `true` if the VMM emulates the guest's PMU and delivers its PMIs.
    pub fn has_pmis(&self) -> bool {
        self.vm.is_for_guest() && !self.uses_kvm_vpmu()
    }

    /// Returns the uncounted time of the guest's counters in nanoseconds, and the number of times
    /// that an enabled counter had no host counter. Returns `None` if the PMU is not emulated.
    pub fn uncounted(&mut self) -> Option<(u64, u64)> {
        if !self.has_pmis() {
            return None;
        }
        let attached = self.attached.as_mut()?;
        let ns = self.vpmu.uncounted_ns(&mut attached.events);
        Some((ns, self.vpmu.slot_losses()))
    }

    /// Returns `true` if an overflow must be handled without a signal. Resets this state.
    #[inline]
    pub fn take_count_overflow(&mut self) -> bool {
        std::mem::take(&mut self.count_overflow)
    }

    /// Updates the guest's events to match the PMU registers. Cheap if no register has changed.
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
            let changes = std::mem::take(&mut self.pending_changes);
            let selector = vmm_counts::paravirtual(ParavirtualEvent::BackingChanges);
            self.count_overflow |= changes > 0 && attached.vmm_counts.add(selector, 0, changes);
        }
    }

    /// Sets the filter that lists the events that the guest may count.
    pub fn set_filter(&mut self, filter: Arc<EventFilter>) {
        self.filter = filter.clone();
        self.vpmu.set_filter(filter);
        self.changed = true;
    }

    /// Returns `true` if the guest uses KVM's own vPMU, whose registers are not trapped.
    pub fn uses_kvm_vpmu(&self) -> bool {
        self.vm.own.is_some()
    }

    /// Starts a search for the guest's kernel. Must be called only after
    /// [`GuestSamplingContext::begin_search`] has returned `true`.
    pub fn find_kernel(&mut self, fd: &VcpuFd) {
        VcpuSampleRegs::new(fd, &self.vm.probe, &mut self.samples, ExitRegisters::default()).find_kernel();
    }

    /// Returns whether a debugger in the guest is single-stepping the current task, given the
    /// registers at the exit. The first call starts the search for the guest's kernel, unless a
    /// search has already been started.
    pub fn is_task_single_stepped(&mut self, fd: &VcpuFd, regs: &kvm_regs, sregs: &kvm_sregs) -> bool {
        if self.vm.probe.begin_first_search() {
            self.find_kernel(fd);
        }
        let mut known = ExitRegisters::default();
        known.set_general(regs);
        known.set_system(sregs);
        VcpuSampleRegs::new(fd, &self.vm.probe, &mut self.samples, known).is_single_stepped()
    }

    /// Returns the counters of the guest's PMU, as the guest programmed them.
    pub fn view(&mut self, fd: &VcpuFd) -> Vec<GuestCounterStatus> {
        if self.uses_kvm_vpmu() {
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
        self.vpmu.counters_view(&mut attached.events)
    }

    /// Returns the register file of the emulated PMU.
    pub fn registers(&mut self) -> &mut Vpmu {
        &mut self.vpmu
    }
}

#[cfg(test)]
mod tests;
