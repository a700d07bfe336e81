//! A driver for benchmarks, in place of the host driver. Its events do nothing.

use perf_core::pmu::{PmuCounterCapacity, PmuError, PmuEventTarget};
use perf_core::{Attr, EventType, Pmu, PmuEvent};

/// A driver that has slots but does nothing, so that only the cost of the core is measured.
#[derive(Debug)]
pub struct NoopPmu {
    /// Number of slots of the driver.
    pub slots: usize,
}

#[derive(Debug)]
struct NoopEvent(u64);

impl Pmu for NoopPmu {
    fn name(&self) -> &'static str {
        "nothing"
    }
    fn supports_type(&self, ty: EventType) -> bool {
        ty == EventType::SIM || ty == EventType::HARDWARE
    }
    fn capacity(&self) -> PmuCounterCapacity {
        PmuCounterCapacity::counters(self.slots)
    }
    fn open(&self, _: &Attr, _: PmuEventTarget) -> Result<Box<dyn PmuEvent>, PmuError> {
        Ok(Box::new(NoopEvent(0)))
    }
}

impl PmuEvent for NoopEvent {
    fn start(&mut self, _: Option<u64>) -> Result<(), PmuError> {
        Ok(())
    }
    fn stop(&mut self) {}
    fn read(&mut self) -> u64 {
        self.0 += 1;
        self.0
    }
    fn arm(&mut self, _: u64) -> Result<(), PmuError> {
        Ok(())
    }
    fn take_overflows(&mut self) -> u32 {
        0
    }
}
