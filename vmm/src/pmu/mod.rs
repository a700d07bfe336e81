//! The virtual PMU in the machine: one [`VmPmu`] per VM that owns the perf core and its drivers, one [`VcpuPmu`] per
//! vCPU that joins the register file (`vpmu`) to the vCPU's perf-core context.

pub mod backing;
mod clock_events;
use clock_events::PerfCoreEvents;
mod regs;

use std::io;
use std::sync::Arc;
use std::time::Instant;

use kvm_ioctls::VcpuFd;
use perf_core::pmu::VcpuId;
use perf_core::pmu::clock::{ClockPmu, VcpuClock};
use perf_core::pmu::host::{HostPmu, HostProbe};
use perf_core::{Core, CoreConfig, Overflowed, VcpuContext};
use smallvec::SmallVec;
use vpmu::{
    BackingPolicy, CounterIndex, Cpl, EventFilter, Model, MsrAddress, MsrRead, MsrWrite, PmiReady,
    RdpmcIndex, Vpmu,
};

use crate::vcpu::kick;

pub use regs::VcpuRegs;

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

/// What the PMU of a VM is to be.
#[derive(Clone, Debug)]
pub struct PmuConfig {
    /// The model guests see.
    pub model: Model,
    /// What counts for its counters.
    pub policy: BackingPolicy,
    /// Which events may be counted.
    pub filter: Arc<EventFilter>,
    /// Most PMIs per second and vCPU.
    pub pmi_limit: u32,
}

/// The PMU of a VM: the perf core, its drivers and what every vCPU's PMU is made from.
#[derive(Debug)]
pub struct VmPmu {
    config: PmuConfig,
    core: Core,
    clock: Arc<ClockPmu>,
    started: Instant,
}

impl VmPmu {
    /// Sets up the perf core with the drivers this host has.
    pub fn new(config: PmuConfig, probe: &HostProbe) -> Self {
        let core = Core::new(CoreConfig::default());
        let signal = Some(kick::overflow_signal());
        if probe.hardware_pmu {
            core.register(Arc::new(HostPmu::hardware(signal, probe)));
        }
        core.register(Arc::new(HostPmu::software(signal)));
        let clock =
            Arc::new(ClockPmu::new(Some(kick::timer_signal())).with_tick_signal(kick::overflow_signal()));
        core.register(clock.clone());
        Self {
            config,
            core,
            clock,
            started: Instant::now(),
        }
    }

    /// The perf core.
    pub fn core(&self) -> &Core {
        &self.core
    }

    /// The PMU of vCPU `id`, in its reset state. `tsc_khz`: the guest's TSC frequency.
    pub fn vcpu(self: &Arc<Self>, id: u8, tsc_khz: u32) -> VcpuPmu {
        let mut vpmu = Vpmu::new(self.config.model);
        vpmu.set_filter(self.config.filter.clone());
        vpmu.set_pmi_limit(self.config.pmi_limit);
        VcpuPmu {
            vm: self.clone(),
            id,
            tsc_khz,
            vpmu,
            attached: None,
        }
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// What ties a vCPU's PMU to the thread that runs it.
#[derive(Debug)]
struct Attached {
    context: Arc<VcpuContext>,
    clock: Arc<VcpuClock>,
    events: PerfCoreEvents,
}

/// The PMU of one vCPU. All methods are for the vCPU's own thread.
#[derive(Debug)]
pub struct VcpuPmu {
    vm: Arc<VmPmu>,
    id: u8,
    tsc_khz: u32,
    vpmu: Vpmu,
    attached: Option<Attached>,
}

impl VcpuPmu {
    /// Makes the calling thread the one whose time and events count for this vCPU, and starts the vCPU's event time.
    ///
    /// # Errors
    /// [`PmuSetupError`].
    pub fn attach_to_current_thread(&mut self) -> Result<(), PmuSetupError> {
        let clock = Arc::new(VcpuClock::for_current_thread(self.tsc_khz));
        let vcpu = VcpuId(u32::from(self.id));
        self.vm.clock.add_vcpu(vcpu, clock.clone());
        let context = self
            .vm
            .core
            .add_vcpu(vcpu, clock.tid())
            .map_err(PmuSetupError::Context)?;
        let events = PerfCoreEvents::new(
            self.vm.core.clone(),
            vcpu,
            self.vm.config.model,
            self.vm.config.policy,
        );
        context.sched_in();
        self.attached = Some(Attached {
            context,
            clock,
            events,
        });
        Ok(())
    }

    /// The thread is about to end: the vCPU leaves the perf core.
    pub fn detach(&mut self) {
        if let Some(attached) = self.attached.take() {
            attached.context.sched_out();
            drop(attached.events);
            let vcpu = VcpuId(u32::from(self.id));
            if let Err(e) = self.vm.core.remove_vcpu(vcpu) {
                log::warn!("vcpu{}: leaving the perf core: {e}", self.id);
            }
            self.vm.clock.remove_vcpu(vcpu);
        }
    }

    /// The vCPU stops running guest code for a while.
    pub fn pause(&mut self) {
        if let Some(attached) = &self.attached {
            attached.context.sched_out();
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

    /// RDMSR; `None`: #GP.
    pub fn read_msr(&mut self, msr: u32) -> Option<u64> {
        let attached = self.attached.as_mut()?;
        match self.vpmu.read_msr(MsrAddress(msr), &mut attached.events) {
            MsrRead::Value(value) => Some(value),
            MsrRead::InjectGp => None,
        }
    }

    /// WRMSR; false: #GP.
    pub fn write_msr(&mut self, msr: u32, value: u64) -> bool {
        let Some(attached) = self.attached.as_mut() else {
            return false;
        };
        self.vpmu.write_msr(MsrAddress(msr), value, &mut attached.events) == MsrWrite::Done
    }

    /// RDPMC by guest kernel code (only CPL 0 text is patched); `None`: #GP.
    pub fn rdpmc(&mut self, ecx: u32) -> Option<u64> {
        let attached = self.attached.as_mut()?;
        match self
            .vpmu
            .rdpmc(RdpmcIndex(ecx), Cpl(0), true, &mut attached.events)
        {
            MsrRead::Value(value) => Some(value),
            MsrRead::InjectGp => None,
        }
    }

    /// Serves overflow signals; returns how many counters overflowed.
    pub fn service_overflows(&mut self, fd: &VcpuFd) -> u32 {
        let Some(attached) = self.attached.as_mut() else {
            return 0;
        };
        let mut regs = VcpuRegs::new(fd);
        if attached.clock.wants_ticks()
            && let Some(cpl) = regs.cpl()
        {
            attached.clock.tick(cpl);
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
        let mut overflows = 0;
        for counter in counters {
            overflows += u32::from(self.vpmu.overflowed(counter, &mut attached.events));
        }
        overflows
    }

    /// Brings the events in line with the registers; nothing to do is one test.
    #[inline]
    pub fn reconcile(&mut self) {
        if let Some(attached) = self.attached.as_mut() {
            self.vpmu.reconcile(&mut attached.events);
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

    /// The due PMI went to the guest.
    pub fn pmi_delivered(&mut self) {
        let now_ns = self.vm.now_ns();
        self.vpmu.pmi_delivered(now_ns);
    }

    /// Nanoseconds from now until `time_ns` of the clock that [`VcpuPmu::pmi_ready`] speaks of.
    pub fn nanoseconds_until(&self, time_ns: u64) -> u64 {
        time_ns.saturating_sub(self.vm.now_ns())
    }

    /// The register file.
    pub fn registers(&mut self) -> &mut Vpmu {
        &mut self.vpmu
    }
}
