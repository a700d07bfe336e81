//! `--metrics ADDR`: what a VM counts, as OpenMetrics over HTTP.
//!
//! | module | story |
//! |---|---|
//! | [`address`] | where to listen |
//! | [`http`] | a request's head, and what is answered to it |
//! | [`server`] | connections and their bounds, a subscriber of the main loop |
//! | [`snapshot`] | the values of one scrape, and their names |
//!
//! Only counts are served, never estimates: an event that was not on all the time comes with how long it was
//! enabled and how long it counted, and who scrapes can see the share. `docs/reference/metrics.md` lists the
//! names.

pub mod address;
pub mod http;
pub mod server;
pub mod snapshot;

/// Events that are counted for the metrics when none are named. None of them takes a counter of the host's
/// PMU.
pub const DEFAULT_EVENTS: &str =
    "task-clock,context-switches,cpu-migrations,page-faults,kvm:exits,kvm:halt_exits,kvm:irq_injections";
