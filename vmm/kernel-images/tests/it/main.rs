//! Integration tests of the kernel image readers in one program, with one module per subject.

mod elf_images;
