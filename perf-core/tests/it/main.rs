//! Integration tests of perf-core in one program, with one module per subject.
//!
//! `cargo test --workspace --test it scheduling::` runs one module. `host_pmu`, `hot_paths` and
//! `ring` are separate programs. Their module comments give the reasons.

mod common;
#[cfg(feature = "sim")]
#[path = "../../benches/nothing/mod.rs"]
mod nothing;

#[cfg(feature = "clock")]
mod branch_stacks;
mod clock_driver;
#[cfg(feature = "clock")]
mod clock_kvm;
#[cfg(feature = "sim")]
mod context_switches;
#[cfg(feature = "sim")]
mod counter_constraints;
#[cfg(feature = "sim")]
mod driver_refusals;
#[cfg(feature = "sim")]
mod error_numbers;
#[cfg(feature = "host")]
mod examples;
#[cfg(all(feature = "host", feature = "sim"))]
mod host_cpu;
#[cfg(feature = "sim")]
mod inheritance;
mod inventory;
#[cfg(feature = "host")]
mod kernel_parity;
#[cfg(all(feature = "host", feature = "kvm"))]
mod kvm_driver;
#[cfg(feature = "sim")]
mod mux_quality;
#[cfg(feature = "sim")]
mod oracle;
#[cfg(feature = "sim")]
mod output;
#[cfg(feature = "sim")]
mod periods;
#[cfg(feature = "sim")]
mod races;
#[cfg(feature = "sim")]
mod read_formats;
#[cfg(feature = "sim")]
mod record_formats;
mod ring_hostile;
mod ring_invariants;
mod ring_kernel;
mod ring_threads;
#[cfg(feature = "sim")]
mod sample_registers;
#[cfg(feature = "sim")]
mod sampling;
#[cfg(feature = "sim")]
mod scheduling;
#[cfg(feature = "sim")]
mod slot_loss;
#[cfg(feature = "sim")]
mod software;
#[cfg(feature = "sim")]
mod stress;
