//! What a kernel's image says: one reader for the loader, which has a file, and for the profiler, which has a
//! guest's memory.
//!
//! | module | reads |
//! |---|---|
//! | [`elf`] | segments, sections, symbol tables of an ELF file |
//! | [`bzimage`] | the setup header of a bzImage, and the ELF file inside it |
//! | [`kallsyms`] | the symbols that a stripped kernel carries in its own data |
//! | [`symbols`] | the table that all symbols end in |
//! | [`packed`] | the same table, in a fifth of the memory, to be kept |
//! | [`orc`] | the kernel's unwind tables |
//! | [`btf`] | the kernel's types: where members of its structures are |
//! | [`build_id`] | what names the build of a kernel or a program |
//! | [`image`] | all tables of one kernel together, from a file or from memory |
//! | [`rdpmc`] | the RDPMC instructions in a kernel's text |
//! | [`le`] | little-endian numbers at an offset, for all of these |
//!
//! Start with [`elf::parse`] to load a kernel, and with [`image::KernelImage`] to look into one.
//!
//! **Input is hostile.** A file may be anything, and memory is the guest's. Every offset is checked, every
//! table has a limit on its size, and a search that could go on for long has a limit on its attempts. Nothing
//! here panics on any input; the fuzz target `kernel_tables` looks for the contrary.
//!
//! **Dependencies.** This crate reads bytes. It depends on decoders (ELF, compression, instructions) and on
//! no other crate of Perfvisor: it knows neither KVM nor guest memory nor sockets.
//!
//! Addresses are *link-time* addresses where they come from a file and *running* addresses where they come
//! from memory.
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
pub mod rdpmc;
pub mod symbols;

pub use error::{BlockError, Damage, ImageError};
