//! Integration tests of vpmu in one program, with one module per subject.
//!
//! `cargo test --workspace --test it pmi::` runs one module. `allocation` is a separate program for
//! the reason given in its header.

mod common;
#[path = "../../testing/mod.rs"]
mod testing;

mod amd;
mod backing_loss;
mod branch_records;
mod documentation;
mod exact_on_kvm;
mod exact_steps;
mod examples;
mod intel;
mod linux_driver;
mod linux_update;
mod pauses;
mod perf_core_backing;
mod pmi;
mod pmi_share;
mod reference_model;
mod reference_model_on_perf_core;
mod short_periods;
