//! The Perfvisor VMM: KVM, boot, devices, vCPU threads and the virtual PMU's place among them.
//!
//! | module | story |
//! |---|---|
//! | [`cli`], [`run`], [`check`], [`commands`] | the commands |
//! | [`control`] | the socket through which operators reach a running VM |
//! | [`vm`] | a machine: made from a configuration, run until it ends |
//! | [`signals`], [`turns`] | the signals that end a VM, and the perf core's timers, for the main loop |
//! | [`vcpu`] | the thread around KVM_RUN, kicks, PMI delivery |
//! | [`pmu`] | the register file joined to the perf core |
//! | [`kvm`] | CPUID, the MSR filter, what the host's KVM can do |
//! | [`boot`], [`rdpmc`], [`memory`] | from a kernel file to a guest that can start |
//! | [`devices`], [`console`] | the rest of the machine |
//! | [`validate`] | guests with known counts, and the judge of what was counted |
// They panic when the reader has gone away; `commands::print` and `say` do not.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod boot;
pub mod check;
pub mod cli;
pub mod commands;
pub mod console;
pub mod control;
pub mod devices;
pub mod exit;
pub mod kvm;
pub mod memory;
pub mod metrics;
pub mod pmu;
pub mod rdpmc;
pub mod run;
pub mod signals;
pub mod turns;
pub mod validate;
pub mod vcpu;
pub mod vm;
