//! Readers for kernel images, shared by the loader, which reads a kernel from a file, and the
//! profiler, which reads a kernel from guest memory.
//!
//! | module | contents |
//! |---|---|
//! | [`elf`] | segments, sections and symbol tables of an ELF file |
//! | [`bzimage`] | setup header of a bzImage, and its ELF payload |
//! | [`kallsyms`] | symbol table in a stripped kernel's own data |
//! | [`symbols`] | common symbol table type |
//! | [`packed`] | compressed symbol table, one fifth of the size, for long-term storage |
//! | [`orc`] | the kernel's unwind tables |
//! | [`btf`] | the kernel's types: offsets of structure members |
//! | [`build_id`] | build IDs of kernels and programs |
//! | [`image`] | all tables of one kernel, from a file or from memory |
//! | [`le`] | little-endian integers in untrusted bytes |
//!
//! Use [`elf::parse`] to load a kernel, and [`image::KernelImage`] to inspect one.
//!
//! **Untrusted input.** Files and guest memory may contain arbitrary bytes. Every offset is
//! checked, the size of every table is limited, and every search gives up after a limited number of
//! attempts. No input causes a panic; the fuzz target `kernel_tables` tests this.
//!
//! **Dependencies.** This crate depends on decoders (ELF, compression, instructions) and on no
//! other Perfvisor crate. It does not access KVM, guest memory or sockets.
//!
//! Addresses are *link-time* addresses if they come from a file, and *run-time* addresses if they
//! come from memory.
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
    )
)]
// A library does not print. Diagnostics are logged or returned to the caller.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod btf;
pub mod build_id;
pub mod bzimage;
pub mod elf;
mod error;
pub mod image;
pub mod kallsyms;
pub mod le;
pub mod orc;
pub mod packed;
pub mod symbols;

pub use error::{ImageCorruption, KernelImageError, Lz4BlockError};
