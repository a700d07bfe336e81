//! Helpers of the integration tests. The other test programs include this file by its path.

#[cfg(feature = "host")]
pub mod guest;
#[cfg(feature = "sim")]
pub mod machine;
pub mod ring;
#[cfg(feature = "host")]
pub mod thread;
