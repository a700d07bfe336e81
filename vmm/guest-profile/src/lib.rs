//! Profiles a guest from outside: reads call chains, tasks and symbols from its memory and
//! registers, and converts samples to `perf.data`, tables and flame graphs.
//!
//! Modules that run in the VM for each sample and read an untrusted guest:
//!
//! | module | purpose |
//! |---|---|
//! | [`memory`] | guest memory, vCPU registers and the budget of a walk |
//! | [`paging`] | guest-virtual to guest-physical translation through 4- and 5-level page tables |
//! | [`unwind`] | call chain of a sample: kernel part, then user part |
//! | [`task`] | current task, its mappings and their files |
//! | [`mappings`] | reports mappings once, with the first sample that needs them |
//! | [`sample`] | raw data of a sample, in the ring and in a file |
//! | [`locate`] | the running kernel: its slide, and its image if none was given |
//! | [`search`] | kernel search in an unprivileged process |
//!
//! Modules that run in the operator's process:
//!
//! | module | purpose |
//! |---|---|
//! | [`merge`] | merges the samples of the VM and of the host kernel into one profile |
//! | [`programs`] | symbolizes user addresses with the guest's files, in a directory or on its disk |
//! | [`disk`] | reads files of the guest from its disk |
//! | [`jit`] | JIT-compiled functions |
//! | [`modules`] | programs and libraries in the memory of a process: exported symbols, unwind tables |
//! | [`debug_frame`] | unwind tables that only a program's file contains |
//! | [`cfi`] | unwinds user stacks with these tables |
//! | [`demangle`] | demangles names |
//! | [`export`] | perf.data, tables, scripts, flame graphs, pprof |
//!
//! Start with [`unwind::walk`] for call chains and with [`export::Profile`] for the output formats.
//!
//! **A guest is hostile.** It controls its page tables, stacks and kernel data. Every walk is
//! therefore bounded in memory reads and in time ([`GuestMemoryReadBudget`]), every address is
//! checked before use, and walks made per sample do not allocate. A `perf.data` file is also
//! hostile. Fuzz targets: `guest_stack`, `user_stack`, `perf_data`.
//!
//! **Dependencies.** `kernel-images` for the kernel's tables, `perf-core` for the host's samples.
//! This crate does not depend on KVM, sockets or the command line.
//!
//! Terms: a **gva** is a guest-virtual address, and a **gpa** a guest-physical address. The
//! **slide** is the offset of the running kernel from its link-time addresses (KASLR), and
//! arithmetic with it wraps. A **frame** is one address of a call chain.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
    )
)]
// Libraries do not print. Messages are logged or returned to the caller.
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

pub use memory::{GuestMemoryReadBudget, GuestPhys, GuestRegs, MappedGuestPage};
