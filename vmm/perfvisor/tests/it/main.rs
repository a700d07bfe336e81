//! Integration tests of the program: one binary with a module per subject.
//!
//! Most tests start VMs with [`common::vm`], which lets them run in parallel. A test that loads the
//! host, or that is sensitive to load, calls [`common::test_lock::exclusive`] first.

mod all_vms;
mod annotate;
mod balloon;
mod branch_records;
mod branch_stacks;
mod broken_pipe;
mod common;
mod console;
mod control_connections;
mod control_stress;
mod control_vm;
mod exact;
mod exec;
mod exits;
mod exporter;
mod exporter_isolation;
mod firecracker;
mod gdb;
mod guest_isolation;
mod host_access;
mod hostile;
mod input_files;
mod jail;
mod jailer;
mod memory_overhead;
mod metrics;
mod migration;
mod net;
mod observers;
mod panics;
mod perf_open_faults;
mod pid_namespace;
mod pmi_share;
mod privileges;
mod prometheus;
mod record_faults;
mod recordings;
mod replay;
mod reset;
mod service;
mod sessions;
mod snapshots;
mod system_calls;
mod terminal;
mod top;
mod views;
mod vm_lookup;
mod without_pmu;
