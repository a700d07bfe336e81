//! Guests that Perfvisor builds.
//!
//! - Bare-metal test guests, small enough to ship inside the `perfvisor` binary.
//! - The Linux guest and the lab host, built from Debian packages (feature `builder`): `linux`.
//!
//! Words: the *Linux guest* is Debian's kernel with busybox and perf in an initrd. The *lab host*
//! is the same kernel in QEMU without hardware help, with a real KVM inside: it runs Perfvisor and
//! the Linux guest on machines whose own KVM cannot.

pub mod bare_metal;
#[cfg(feature = "builder")]
pub mod closure;
#[cfg(feature = "builder")]
pub mod cpio;
#[cfg(feature = "builder")]
pub mod deb;
#[cfg(feature = "builder")]
pub mod kernel;
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
