//! Integration tests of the guest images in one program, with one module per subject.

mod bare_metal_qemu;
#[path = "../../../perf-core/tests/common/skip.rs"]
mod skip;
