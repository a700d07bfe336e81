//! Tests of the `host` driver on real perf events. The tests also run in a Linux guest with
//! Perfvisor's virtual PMU (`integration/tests/nested.rs`), so this program is small.
//!
//! The tests are a separate program, because `host_hardware` lists the perf events among the file
//! descriptors of the process, installs a global logger, and temporarily takes all counters of a
//! CPU.

#[allow(dead_code, reason = "each program uses its part")]
#[path = "../it/common/mod.rs"]
mod common;

mod host_driver;
mod host_hardware;
