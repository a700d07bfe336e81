//! Virtio over PCI (virtio 1.2, 4.1): device discovery, configuration, queue notifications and
//! interrupts.
//!
//! | module | contents |
//! |---|---|
//! | [`machine`] | interface to the machine: doorbells and messages, both based on eventfds |
//! | [`bus`] | the PCI bus: configuration ports and routing of memory accesses |
//! | `function` | a device as a PCI function: its capabilities and the regions of its BAR |
//! | `common` | common configuration registers: features, status, queues |
//! | `msix` | the MSI-X table |
//! | [`saved`] | a function in a snapshot |
//! | `space` | a type 0 configuration space |
//!
//! This code runs on vCPU threads and handles only exits caused by register accesses. The data path
//! causes no exits: KVM signals the device's eventfd for notifications, and the device signals
//! KVM's irqfd for interrupts. Each function has a lock, which a vCPU thread holds for one access
//! and which the device's thread never takes.
//!
//! The guest is untrusted. Accesses of any width at any offset are safe, and register writes in the
//! wrong order are ignored. An unusable configuration, such as queues outside RAM, results in
//! DEVICE_NEEDS_RESET.

pub mod bus;
mod common;
mod function;
pub mod machine;
mod msix;
pub mod saved;
mod space;

#[cfg(test)]
mod testing;
