//! Test guest in which every access is an exit followed by an entry.

use perf_core::{UnavailableRegs, VcpuEventContext};
use vpmu::sim::SimCounterEvents;
use vpmu::*;

/// A guest with a PMU and its counter events, which are simulated by default.
pub struct Guest<E = SimCounterEvents> {
    pub vpmu: Vpmu,
    pub events: E,
}

/// Handles the overflows of a vCPU's perf-core events. Returns the guest counters that overflowed.
pub fn overflowed_counters(context: &VcpuEventContext) -> Vec<CounterIndex> {
    let mut counters = Vec::new();
    context.service_overflows(&mut UnavailableRegs, &mut |report| {
        counters.extend(PerfCoreEvents::counter_of(report.cookie));
    });
    counters
}

impl Guest {
    pub fn new(model: PmuModel) -> Self {
        Self {
            vpmu: Vpmu::new(model),
            events: SimCounterEvents::default(),
        }
    }

    /// Creates a guest from the values of `--pmu` and `--pmu-counters`.
    pub fn of(name: &str, counters: Option<&str>) -> Self {
        let counters = counters.map(|text| text.parse().unwrap());
        Self::new(
            PmuModel::resolve(name.parse().unwrap(), counters, None, &mut |_, _| {
                CpuidRegs::default()
            })
            .unwrap(),
        )
    }

    /// Runs the guest for `ticks` ticks and handles each overflow immediately.
    pub fn run(&mut self, ticks: u64) {
        let mut left = ticks;
        while left > 0 {
            left -= self.events.run(left);
            self.notice();
        }
    }

    /// Passes pending overflow notifications of the simulated events to the PMU.
    pub fn notice(&mut self) {
        let counters: Vec<_> = self.events.take_notified().collect();
        self.overflowed(counters);
    }
}

impl<E: CounterEvents> Guest<E> {
    /// Executes WRMSR in the guest. Returns `false` if the instruction faults.
    pub fn try_write(&mut self, msr: u32, value: u64) -> bool {
        let outcome = self.vpmu.write_msr(MsrAddress(msr), value, &mut self.events);
        self.vpmu.reconcile(&mut self.events);
        outcome == MsrWriteOutcome::Done
    }

    pub fn write(&mut self, msr: u32, value: u64) {
        assert!(self.try_write(msr, value), "WRMSR {msr:#x} = {value:#x} faults");
    }

    /// Executes RDMSR in the guest. Returns the value read, or `None` if the instruction faults.
    pub fn try_read(&mut self, msr: u32) -> Option<u64> {
        let outcome = self.vpmu.read_msr(MsrAddress(msr), &mut self.events);
        self.vpmu.reconcile(&mut self.events);
        match outcome {
            MsrReadOutcome::Value(value) => Some(value),
            MsrReadOutcome::InjectGp => None,
        }
    }

    pub fn read(&mut self, msr: u32) -> u64 {
        self.try_read(msr)
            .unwrap_or_else(|| panic!("RDMSR {msr:#x} faults"))
    }

    /// Executes RDPMC in the guest at CPL 0. Returns the value read, or `None` if the instruction
    /// faults.
    pub fn rdpmc(&mut self, ecx: u32) -> Option<u64> {
        match self.vpmu.rdpmc(RdpmcIndex(ecx), Cpl(0), false, &mut self.events) {
            MsrReadOutcome::Value(value) => Some(value),
            MsrReadOutcome::InjectGp => None,
        }
    }

    /// Notifies the PMU of overflows of `counters`.
    pub fn overflowed(&mut self, counters: Vec<CounterIndex>) {
        for counter in counters {
            self.vpmu.overflowed(counter, &mut self.events);
        }
        self.vpmu.reconcile(&mut self.events);
    }

    pub fn uncounted_ns(&mut self) -> u64 {
        self.vpmu.uncounted_ns(&mut self.events)
    }

    pub fn view(&mut self, n: usize) -> GuestCounterStatus {
        self.vpmu.counters_view(&mut self.events).swap_remove(n)
    }
}
