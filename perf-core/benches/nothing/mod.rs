//! A driver whose events cost nothing, in place of the host's.

use perf_core::pmu::{Capacity, PmuError, Target};
use perf_core::{Attr, EventType, Pmu, PmuEvent};

/// A driver of some slots that does nothing, so that what is counted is the core's alone.
#[derive(Debug)]
pub struct Nothing {
    /// How many events it has room for.
    pub slots: usize,
}

#[derive(Debug)]
struct NoEvent(u64);

impl Pmu for Nothing {
    fn name(&self) -> &'static str {
        "nothing"
    }
    fn serves(&self, ty: EventType) -> bool {
        ty == EventType::SIM || ty == EventType::HARDWARE
    }
    fn capacity(&self) -> Capacity {
        Capacity::counters(self.slots)
    }
    fn open(&self, _: &Attr, _: Target) -> Result<Box<dyn PmuEvent>, PmuError> {
        Ok(Box::new(NoEvent(0)))
    }
}

impl PmuEvent for NoEvent {
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
