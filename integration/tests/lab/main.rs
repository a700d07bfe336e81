//! Tests with guests, most of them in the lab. All tests run in one process to share labs and
//! guests.
//!
//! A test leases a test host: [`TestHost::shared`](integration::test_host::TestHost::shared) if
//! other tests may run concurrently,
//! [`TestHost::exclusive`](integration::test_host::TestHost::exclusive) for time measurements. Use
//! a filter of the test harness to select modules: `cargo test --workspace --test lab nested::`. No
//! test in this program requires a separate process.

mod bare_metal;
mod bolt;
mod branch_records;
mod cli;
mod clock_jumps;
mod common;
mod debian;
mod devices;
mod disks;
mod exact;
mod hotplug;
mod kernels;
mod kexec;
mod lab;
mod late_ack;
mod linux_guest;
mod machine;
mod models;
mod nested;
mod network;
mod orchestrators;
mod profile_guest;
mod profile_unwound;
mod rr;
mod share;
mod shared_guests;
mod snapshots;
mod soak;
mod user_rdpmc;
mod validate;
mod vsock;

#[path = "../common/refusal.rs"]
mod refusal;
