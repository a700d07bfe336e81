//! Integration tests of the guests that Perfvisor builds: one program, with a module for each subject.

mod bare_metal_qemu;
#[path = "../../../perf-core/tests/common/skip.rs"]
mod skip;
