//! Integration tests of profiles: one program, with a module for each subject.

mod export_formats;
mod export_perfdata;
mod profile_linux;
#[path = "../../../../perf-core/tests/common/skip.rs"]
mod skip;
