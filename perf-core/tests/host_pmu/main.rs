//! Tests of the `host` driver on real perf events. Besides on the host, they run in a Linux guest
//! whose PMU is our virtual one (`integration/tests/nested.rs`), so this program is small.
//!
//! A program of its own, because `host_hardware` lists the perf events among the descriptors of the
//! process, installs a global logger, and takes all counters of a CPU for a while.

#[allow(dead_code, reason = "each program uses its part")]
#[path = "../it/common/mod.rs"]
mod common;

mod host_driver;
mod host_hardware;
