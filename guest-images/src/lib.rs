//! Builds guests for Perfvisor.
//!
//! - Bare-metal test guests, small enough to be embedded in the `perfvisor` binary.
//! - The Linux guest and the lab host, built from Debian packages (feature `builder`): `linux`.
//!
//! The *Linux guest* is Debian's kernel with busybox and perf in an initrd. The *lab host* is the
//! same kernel with KVM, running in QEMU without hardware virtualization. The lab host runs
//! Perfvisor and the Linux guest on machines whose own KVM is not sufficient.

pub mod bare_metal;
#[cfg(feature = "builder")]
pub mod closure;
#[cfg(feature = "builder")]
pub mod cpio;
#[cfg(feature = "builder")]
pub mod deb;
#[cfg(feature = "builder")]
pub mod kexec;
#[cfg(feature = "builder")]
pub mod linux;
#[cfg(feature = "builder")]
pub mod modules;
#[cfg(feature = "builder")]
pub mod progress;
#[cfg(feature = "builder")]
pub mod qemu;
#[cfg(feature = "builder")]
pub mod rr;
