//! Integration tests of the guest images in one program, with one module per subject.

mod bare_metal_qemu;
