//! The machine: KVM, memory, boot, devices, vCPU threads and the virtual PMU's place among them, and the
//! servers through which operators reach it.
//!
//! | module | story |
//! |---|---|
//! | [`vm`] | a machine: made from a configuration, run until it ends |
//! | [`vcpu`] | the thread around KVM_RUN, kicks, PMI delivery |
//! | [`pmu`] | the register file joined to the perf core |
//! | [`kvm`] | CPUID, the MSR filter, what the host's KVM can do |
//! | [`boot`], [`rdpmc`], [`memory`] | from a kernel file to a guest that can start |
//! | [`devices`], [`console`] | the rest of the machine |
//! | [`gdb`] | a debugger's end in a running VM |
//! | [`control`] | the control socket's end in a running VM |
//! | [`privileges`] | what the process keeps of its rights while the guest runs |
//! | [`turns`] | the perf core's timers, for the main loop |
//!
//! Start with [`vm::Vm::new`] and [`vcpu::running::Vcpu`]; docs/architecture.md walks from a WRMSR to
//! `perf_event_open(2)`.
//!
//! **Dependencies.** This is the only crate that depends on kvm-ioctls. Below it are `vpmu` (the guest's
//! registers), `perf-core` (counting), `guest-profile` (walks of guest memory), `kernel-images` and
//! `control-api` (what the control socket says). It knows nothing of the command line; `perfvisor`, the
//! program, is made on top of it.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
    )
)]
// They panic when the reader has gone away; `commands::print` and `say` do not.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod boot;
pub mod console;
pub mod control;
pub mod devices;
pub mod gdb;
pub mod kernels;
pub mod kvm;
pub mod memory;
pub mod numbers;
pub mod pmu;
pub mod privileges;
pub mod rdpmc;
#[cfg(test)]
mod testing;
pub mod turns;
pub mod vcpu;
pub mod vm;
