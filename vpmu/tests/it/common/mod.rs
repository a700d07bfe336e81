//! Test guest on simulated events, in which every access is an exit followed by an entry.

use vpmu::sim::SimEvents;
use vpmu::*;

pub struct Guest {
    pub vpmu: Vpmu,
    pub events: SimEvents,
}

impl Guest {
    pub fn new(model: PmuModel) -> Self {
        Self {
            vpmu: Vpmu::new(model),
            events: SimEvents::default(),
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

    /// Executes WRMSR. Returns whether the instruction completes.
    pub fn try_write(&mut self, msr: u32, value: u64) -> bool {
        let outcome = self.vpmu.write_msr(MsrAddress(msr), value, &mut self.events);
        self.vpmu.reconcile(&mut self.events);
        outcome == MsrWriteOutcome::Done
    }

    pub fn write(&mut self, msr: u32, value: u64) {
        assert!(self.try_write(msr, value), "WRMSR {msr:#x} = {value:#x} faults");
    }

    /// Executes RDMSR. Returns `None` if the instruction faults.
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

    /// Executes RDPMC at CPL 0.
    pub fn rdpmc(&mut self, ecx: u32) -> Option<u64> {
        match self.vpmu.rdpmc(RdpmcIndex(ecx), Cpl(0), false, &mut self.events) {
            MsrReadOutcome::Value(value) => Some(value),
            MsrReadOutcome::InjectGp => None,
        }
    }

    /// Runs for `ticks` and handles each overflow immediately.
    pub fn run(&mut self, ticks: u64) {
        let mut left = ticks;
        while left > 0 {
            left -= self.events.run(left);
            self.notice();
        }
    }

    /// Delivers pending overflow notifications.
    pub fn notice(&mut self) {
        for counter in self.events.take_notified() {
            self.vpmu.overflowed(counter, &mut self.events);
        }
        self.vpmu.reconcile(&mut self.events);
    }
}
