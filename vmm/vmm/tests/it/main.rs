//! Integration tests of the machine, built as one program with a module for each subject.

mod boot_kvm;
mod kvm;
mod negative_boot;
mod overflow_signals;
mod real_kernel;
mod snapshots;
