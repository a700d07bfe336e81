//! The machine: KVM, memory, boot protocols, devices, vCPU threads with the virtual PMU, and the
//! servers for operators.
//!
//! | module | contents |
//! |---|---|
//! | [`vm`] | a machine: created from a configuration and run until it ends |
//! | [`vcpu`] | the thread around KVM_RUN, kicks, PMI delivery |
//! | [`pmu`] | the connection of the PMU registers to perf-core |
//! | [`kvm`] | CPUID, the MSR filter, capabilities of the host's KVM |
//! | [`boot`], [`memory`] | from a kernel file to a guest that can start |
//! | [`devices`], [`console`] | the other devices of the machine |
//! | [`gdb`] | the gdb server |
//! | [`control`] | the control socket server |
//! | [`timers`] | perf-core's timers in the main loop |
//!
//! Start with [`vm::Vm::new`] and [`vcpu::running::Vcpu`]. docs/architecture.md follows a WRMSR to
//! `perf_event_open(2)`.
//!
//! **Dependencies.** This is the only crate that depends on kvm-ioctls. It uses `vpmu` (PMU
//! registers), `perf-core` (counting), `guest-profile` (guest memory walks), `guest-patching`
//! (changes to the guest's kernel), `kernel-images` and `control-api` (the control protocol), and
//! is independent of the command line in `perfvisor`.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
    )
)]
// `print!` and `eprintln!` panic when the reader has closed the pipe. The functions
// `commands::print` and `say` do not.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod boot;
pub mod console;
pub mod control;
pub mod devices;
pub mod gdb;
pub mod kvm;
pub mod memory;
pub mod numbers;
pub mod pmu;
#[cfg(test)]
mod testing;
pub mod timers;
pub mod vcpu;
pub mod vm;
