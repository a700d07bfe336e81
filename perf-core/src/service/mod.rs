//! What concerns several contexts: the core with its drivers and vCPUs, events that are open, inheritance,
//! where records go, and the way of an overflow. Nothing here knows a handle.

pub(crate) mod config;
pub(crate) mod core;
pub(crate) mod error;
pub(crate) mod inherit;
pub(crate) mod memory;
pub(crate) mod opened;
pub(crate) mod output;
pub(crate) mod overflow;
pub(crate) mod place;
pub(crate) mod sideband;
