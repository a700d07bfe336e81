//! Guest-visible performance monitoring unit: registers, faults, CPUID, overflow, PMI, event filter
//! and saved state.
//!
//! This crate does not depend on KVM. A VMM creates one [`Vpmu`] per vCPU with a [`CounterEvents`],
//! which provides the counts, and passes guest register accesses to it.
//!
//! # Glossary
//!
//! Counters are numbered in three ways. Each numbering has its own type:
//!
//! - [`MsrAddress`]: the address of a register, in ECX of RDMSR and WRMSR. A counter may have
//!   several addresses (legacy and full-width on Intel, K7 and core extension on AMD). Its event
//!   selector has a separate address.
//! - [`RdpmcIndex`]: the operand of RDPMC, in ECX. Intel numbers general-purpose counters from 0
//!   and fixed counters from 1 << 30; AMD numbers all counters from 0.
//! - [`CounterIndex`]: the vendor-independent number used in this crate, which is the counter's bit
//!   in the global control and status registers. General-purpose counters start at 0, fixed
//!   counters at 32.
//!
//! Other terms:
//!
//! - *counter*: a guest-visible PMC. *selector*: the register (or field) that selects the counter's
//!   event.
//! - *event*: the object behind [`CounterEvents`] that counts for a counter. *backing*: the type of
//!   event ([`CounterBacking`]).
//! - *PMI*: performance monitoring interrupt. *due*: requested by an overflow and not yet
//!   delivered.
//! - *fold*: to add an event's new counts to the counter's value.
//! - *reconcile*: to apply register changes to the events.
//!
//! # Use
//!
//! On each exit for a PMU register, call [`Vpmu::read_msr`], [`Vpmu::write_msr`] or
//! [`Vpmu::rdpmc`]. When the host notifies an overflow, call [`Vpmu::overflowed`]. Before each
//! entry, call [`Vpmu::reconcile`]. If [`Vpmu::pmi_pending`] returns `true`, call
//! [`Vpmu::pmi_ready`], deliver the PMI through LVTPC, and then call [`Vpmu::pmi_delivered`].
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
    )
)]
// A library does not print. Diagnostics go to the log or to the caller.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod amd;
mod branches;
mod counter_events;
pub mod cpuid;
mod dialect;
pub mod events;
pub mod exact;
pub mod filter;
mod freeze;
mod host_pmu;
mod index;
mod intel;
mod limit;
mod lost;
mod model;
mod model_name;
pub mod perf_core_events;
pub mod registers;
mod share;
pub mod sim;
pub mod sources;
mod state;
mod vendor;
pub mod vmm_counts;
mod vpmu;
mod width;

pub use counter_events::{
    CounterEnableOutcome, CounterEventLoss, CounterEvents, CounterTimes, UnavailableReason, VcpuTime,
};
pub use events::{
    ArchEvent, ArchEventSet, CounterBacking, CounterBackingPolicy, CounterEventRequest, DecodedCounterEvent,
    EventSelect, EventSelection, ParavirtualEvent, UnitMask,
};
pub use filter::EventFilter;
pub use host_pmu::{CpuidReader, CpuidRegs, HostPmuProperties};
pub use index::{CounterIndex, MAX_COUNTERS, MAX_FIXED, MAX_GENERAL, MsrAddress, RdpmcIndex, counters_in};
pub use limit::DEFAULT_PMI_LIMIT;
pub use model::PmuModel;
pub use model_name::{PmuGeneration, PmuModelError, PmuModelName, RequestedCounters, Vendor};
pub use perf_core_events::{PerfCoreEvents, PrivilegeLevels};
pub use share::{PmiShare, PmiShareError};
pub use sources::{CounterBackingSelector, HostEventSource};
pub use state::{VpmuStateError, fix_checksum};
pub use vpmu::{
    BranchCollectionRequest, CounterBackingChange, Cpl, GuestCounterStatus, MsrReadOutcome, MsrWriteOutcome,
    PmiCounts, PmiReadiness, Vpmu,
};
pub use width::{CounterAdvance, CounterWidth};
