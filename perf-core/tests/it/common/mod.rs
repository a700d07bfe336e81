//! Helpers of the integration tests. The other test programs include this file by its path.

#[cfg(feature = "host")]
pub mod guest;
pub mod memory;
pub mod ring;
#[cfg(feature = "sim")]
pub mod test_core;
#[cfg(feature = "host")]
pub mod thread;
