//! Operations that involve several contexts: the core with its drivers and vCPUs, open events,
//! inheritance, output and overflow service. This module does not depend on event handles.

pub(crate) mod config;
pub(crate) mod core;
pub(crate) mod error;
pub(crate) mod inherit;
pub(crate) mod memory;
pub(crate) mod open_events;
pub(crate) mod output;
pub(crate) mod overflow;
pub(crate) mod placement;
pub(crate) mod sideband;
