//! Integration tests of the readers of kernel images: one program, with a module for each subject.

mod elf_images;
