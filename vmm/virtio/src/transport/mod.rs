//! Virtio over PCI (virtio 1.2, 4.1): how a driver in the guest finds a device, sets it up, kicks its queues
//! and is interrupted.
//!
//! | module | story |
//! |---|---|
//! | [`machine`] | what the transport asks of the machine: doorbells and messages, with eventfds for both |
//! | [`bus`] | the PCI bus: the configuration ports, and the memory the functions decode |
//! | `function` | a device as a PCI function: its capabilities and the regions of its BAR |
//! | `common` | the registers by which the driver sets a device up: features, status, queues |
//! | `msix` | the table of interrupts |
//! | `space` | a type 0 configuration space |
//!
//! Everything here runs on vCPU threads, on exits for registers only. The data path has none: kicks go from
//! KVM to the device's eventfd, interrupts from the device's eventfd to KVM. Each function has a lock of its
//! own, held for one access; the device's thread never takes it.
//!
//! The guest is hostile: any access of any width at any offset is safe, and registers that are set up in the
//! wrong order are not taken. What the device cannot work with (queues outside of RAM) ends in
//! DEVICE_NEEDS_RESET.

pub mod bus;
mod common;
mod function;
pub mod machine;
mod msix;
mod space;

#[cfg(test)]
mod testing;
