//! Helpers of the integration tests. The other test programs include this file by its path.

use perf_core::{CpuMode, SampleRegs};

#[cfg(feature = "host")]
pub mod guest;
pub mod memory;
pub mod ring;
#[cfg(feature = "sim")]
pub mod test_core;
#[cfg(feature = "host")]
pub mod thread;

/// Registers without values.
pub struct UnavailableRegs;

impl SampleRegs for UnavailableRegs {
    fn mode(&mut self) -> CpuMode {
        CpuMode::GuestKernel
    }
    fn ip(&mut self) -> u64 {
        0x1000
    }
}
