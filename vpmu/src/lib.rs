//! The guest-visible performance monitoring unit: registers, faults, CPUID, overflow, PMI, event filter,
//! saved state.
//!
//! Nothing here knows KVM. A VMM hands guest accesses to a [`Vpmu`], one per vCPU, and gives it a
//! [`CounterEvents`], which counts.
//!
//! # Glossary
//!
//! Three numberings of the same counters must not be mixed up, so each is a type:
//!
//! - [`MsrAddress`]: the address of a register, in ECX of RDMSR and WRMSR. One counter may have several
//!   (Intel's legacy and full-width address, AMD's K7 and core address), and its selector has another.
//! - [`RdpmcIndex`]: the operand of RDPMC, in ECX. Intel numbers general-purpose counters from 0 and fixed
//!   counters from 1 << 30; AMD numbers all from 0.
//! - [`CounterIndex`]: our own, for both vendors: the counter's bit in the global control and status
//!   registers. General-purpose counters from 0, fixed counters from 32.
//!
//! Other words:
//!
//! - *counter*: a register that counts. *selector*: the register (or field) that says what a counter counts.
//! - *event*: what counts for a counter, behind [`CounterEvents`]. *backing*: which kind of event
//!   ([`Backing`]).
//! - *PMI*: performance monitoring interrupt. *due*: an overflow asked for one and it has not been delivered.
//! - *fold*: to bring a counter's value up to date from its event.
//! - *reconcile*: to bring the events in line with the registers.
//!
//! # Use
//!
//! At each exit for a PMU register call [`Vpmu::read_msr`], [`Vpmu::write_msr`] or [`Vpmu::rdpmc`]. When the
//! host notifies an overflow call [`Vpmu::overflowed`]. Before each entry call [`Vpmu::reconcile`], then, if
//! [`Vpmu::pmi_pending`], ask [`Vpmu::pmi_ready`] and deliver through LVTPC; [`Vpmu::pmi_delivered`] when it
//! was.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
    )
)]
// A library prints nothing: what there is to say goes to the log or to the caller.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

mod amd;
pub mod backing;
pub mod cpuid;
pub mod events;
pub mod exact;
pub mod fed;
pub mod filter;
mod host_pmu;
mod index;
mod intel;
mod limit;
mod lost;
mod model;
mod names;
pub mod registers;
pub mod sim;
mod source;
pub mod sources;
mod state;
mod vendor;
mod vpmu;
mod width;

pub use backing::{PerfCoreEvents, SteppedLevels};
pub use events::{
    ArchEvent, Backability, Backing, BackingPolicy, EventRequest, EventSelect, GuestEvent, ParavirtualEvent,
    Selection, UnitMask,
};
pub use filter::EventFilter;
pub use host_pmu::{CpuidReader, CpuidRegs, HostPmu};
pub use index::{CounterIndex, MAX_COUNTERS, MAX_FIXED, MAX_GENERAL, MsrAddress, RdpmcIndex, counters_in};
pub use limit::DEFAULT_PMI_LIMIT;
pub use model::Model;
pub use names::{CounterNumbers, Generation, ModelError, ModelName, Vendor};
pub use source::{CounterEvents, CounterTimes, Enabled, Lack, Loss};
pub use sources::{Sources, Way};
pub use state::{StateError, fix_checksum};
pub use vpmu::{CounterView, Cpl, MsrRead, MsrWrite, PmiCounts, PmiReady, Vpmu};
pub use width::{Advanced, CounterWidth};
