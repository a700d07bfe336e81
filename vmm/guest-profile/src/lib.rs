//! What a guest executes, seen from outside: from its memory and registers to call chains, tasks and names,
//! and from samples to `perf.data`, tables and flame graphs.
//!
//! In the VM, per sample, from a guest that is not trusted:
//!
//! | module | finds |
//! |---|---|
//! | [`memory`] | what a walk stands on: guest memory, registers, the budget |
//! | [`paging`] | guest-physical addresses, through 4- and 5-level page tables |
//! | [`unwind`] | the call chain of a sample: kernel part, then user part |
//! | [`task`] | the current task, its mappings and their files |
//! | [`mappings`] | mappings told with the samples that need them, once |
//! | [`sample`] | a sample's raw data, in the ring and in a file |
//! | [`locate`] | the running kernel: its slide, and its image when none was given |
//! | [`search`] | the same, by a process that has nothing to lose |
//!
//! In the operator's process:
//!
//! | module | does |
//! |---|---|
//! | [`merge`] | makes one profile of the VM's samples and the host kernel's |
//! | [`programs`] | names addresses of user programs, through a guest's files: in a directory or on its disk |
//! | [`disk`] | a guest's files, read out of its disk |
//! | [`jit`] | functions that programs made while they ran |
//! | [`modules`] | programs and libraries in a process's memory: exported names, unwind tables |
//! | [`debug_frame`] | unwind tables that only a program's file has |
//! | [`cfi`] | user stacks by these tables |
//! | [`demangle`] | names as people read them |
//! | [`export`] | perf.data, tables, scripts, flame graphs, pprof |
//!
//! Start with [`unwind::walk`] for a chain, with [`export::Profile`] for what is made of samples.
//!
//! **A guest is hostile.** It can put anything into its page tables, stacks and kernel data, so every walk is
//! bounded in memory reads and in time ([`Budget`]), every address is checked before it is used, and the
//! walks made per sample allocate nothing. A `perf.data` file is hostile, too. Fuzz targets: `guest_stack`,
//! `user_stack`, `perf_data`.
//!
//! **Dependencies.** `kernel-images` for the kernel's tables, `perf-core` for the host's samples. This crate
//! knows neither KVM nor sockets nor the command line.
//!
//! Words: a **gva** is a guest-virtual, a **gpa** a guest-physical address. The **slide** is what the running
//! kernel's addresses have over those it was linked at (KASLR); arithmetic with it wraps. A **frame** is one
//! address of a call chain.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
    )
)]
// A library prints nothing: what there is to say goes to the log or to the caller.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod cfi;
pub mod debug_frame;
pub mod demangle;
pub mod disk;
pub mod export;
pub mod jit;
pub mod locate;
pub mod mappings;
pub mod memory;
pub mod merge;
pub mod modules;
pub mod paging;
pub mod programs;
pub mod sample;
pub mod search;
pub mod task;
#[cfg(test)]
pub(crate) mod testing;
pub mod unwind;

pub use memory::{Budget, GuestPage, GuestPhys, GuestRegs};
