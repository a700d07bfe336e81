//! Virtio devices: disks, network, sockets and the like, as a driver in the guest sees them (virtio 1.2).
//!
//! | module | story |
//! |---|---|
//! | [`device`] | what every device offers to its transport, and what it gets when its driver is ready |
//! | [`console`] | a console: Linux's hvc0 |
//! | [`disk`] | a disk: an image file or a block device |
//! | [`net`] | a network device on a tap device |
//! | [`vsock`] | sockets between the guest and programs of the host |
//! | [`transport`] | virtio over PCI: how a driver finds a device, sets it up and is interrupted |
//! | [`serve`] | serving a queue: each chain once, one interrupt for all |
//! | [`rng`] | entropy |
//! | [`share`] | a directory of the host, served by virtiofsd |
//! | [`worker`] | the thread that serves a device's queues |
//!
//! A device starts nothing before its driver is ready. From then on a thread of its own serves its queues: it
//! waits for the queues' kicks and for what it is the back end of, and never runs on a vCPU's thread.
//! Everything in a queue comes from the guest: bound each walk, length and allocation, and let a bad
//! request fail alone.
//!
//! **Dependencies.** No KVM: eventfds stand for kicks and interrupts, and the machine joins them to KVM's
//! ioeventfd and irqfd. Start with [`device::VirtioDevice`].
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

pub mod console;
pub mod device;
pub mod disk;
pub mod net;
pub mod rng;
pub mod serve;
pub mod share;
pub mod transport;
pub mod vsock;
pub mod worker;
