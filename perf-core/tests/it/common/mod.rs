//! Helpers of the integration tests. Other test programs include files of this module by path.

#[cfg(feature = "host")]
pub mod guest;
pub mod memory;
pub mod ring;
#[cfg(feature = "sim")]
pub mod test_core;
#[cfg(feature = "host")]
pub mod thread;
