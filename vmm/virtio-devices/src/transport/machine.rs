//! The interface between the transport and the machine: doorbells (queue notification registers)
//! and message-signalled interrupts.

use std::io;

use vmm_sys_util::eventfd::EventFd;

use crate::device::DeviceFailureCallback;

/// A message-signalled interrupt, which is a write of `data` to `address`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsiMessage {
    /// Address to which the message is written.
    pub address: u64,
    /// Value that is written to the address.
    pub data: u32,
}

/// Interface through which the transport attaches eventfds to the guest.
///
/// The methods are called on vCPU threads. There is at most one call at a time for each eventfd.
pub trait PciBackend: Send + Sync {
    /// Registers a doorbell (a queue notification register). A guest write to `address`, of any
    /// length and value, then signals `kick` without an exit to the VMM.
    ///
    /// # Errors
    /// Returns an error if the machine cannot register the doorbell, for example because `address`
    /// already has a doorbell. Guest writes to `address` then cause exits.
    fn add_doorbell(&self, address: u64, kick: &EventFd) -> io::Result<()>;

    /// Removes a doorbell registered with [`PciBackend::add_doorbell`].
    ///
    /// # Errors
    /// Returns an error if the doorbell does not exist.
    fn remove_doorbell(&self, address: u64, kick: &EventFd) -> io::Result<()>;

    /// Connects the eventfd `vector` to an interrupt. Each signal of the eventfd then sends
    /// `message` to the guest. `line` is the number of the interrupt, which is unique on the bus.
    ///
    /// # Errors
    /// Returns an error if the machine cannot create the route, in which case no message is sent.
    fn connect(&self, line: u32, message: MsiMessage, vector: &EventFd) -> io::Result<()>;

    /// Disconnects the eventfd `vector` from its interrupt. Later signals stay pending in the
    /// eventfd.
    ///
    /// # Errors
    /// Returns an error if `vector` is not connected.
    fn disconnect(&self, line: u32, vector: &EventFd) -> io::Result<()>;

    /// Returns the callback that terminates the machine if a device thread ends unexpectedly.
    fn fatal_error_callback(&self) -> DeviceFailureCallback;
}
