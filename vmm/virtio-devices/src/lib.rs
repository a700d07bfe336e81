//! Virtio devices (virtio 1.2): console, disk, network, vsock, entropy, balloon and shared
//! directories.
//!
//! | module | contents |
//! |---|---|
//! | [`device`] | the interface between a device and its transport |
//! | [`balloon`] | balloon device, which returns guest memory to the host |
//! | [`console`] | console device (hvc0 in a Linux guest) |
//! | [`disk`] | block device backed by an image file or a host block device |
//! | [`net`] | network device backed by a tap device |
//! | [`vsock`] | sockets between the guest and host programs |
//! | [`transport`] | virtio over PCI: discovery, configuration and interrupts |
//! | [`serve`] | processing of a queue's descriptor chains, with interrupt coalescing |
//! | [`rng`] | entropy device |
//! | [`rate_limiter`] | rate limiters of disks, network devices and the entropy device |
//! | [`share`] | host directory shared through virtiofsd |
//! | [`worker`] | the thread that serves a device's queues |
//!
//! A device starts no thread before its driver sets DRIVER_OK. From then on, a dedicated thread
//! serves its queues and waits for queue notifications and backend events, and no device code runs
//! on a vCPU thread in the data path. All queue contents are guest-controlled. Every walk, length
//! and allocation must be bounded, and a malformed request must fail without affecting other
//! requests.
//!
//! **Dependencies.** This crate does not use KVM. Eventfds represent notifications and interrupts,
//! and the machine attaches them to KVM as ioeventfds and irqfds. Start with
//! [`device::VirtioDevice`].
#![cfg_attr(
    not(test),
    warn(
        clippy::cast_lossless,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
    )
)]
// A library must not print. Messages go to the log or to the caller.
#![cfg_attr(not(test), warn(clippy::print_stdout, clippy::print_stderr))]

pub mod balloon;
pub mod console;
pub mod device;
pub mod disk;
pub mod net;
pub mod rate_limiter;
pub mod rng;
pub mod serve;
pub mod share;
pub mod transport;
pub mod vsock;
pub mod worker;
