//! The interface of the transport to the machine: doorbells and message-signalled interrupts.

use std::io;

use vmm_sys_util::eventfd::EventFd;

use crate::device::FatalErrorCallback;

/// A message-signalled interrupt: a write of `data` to `address`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MsiMessage {
    /// Address of the write, as programmed by the guest.
    pub address: u64,
    /// Value of the write.
    pub data: u32,
}

/// Interface for attaching eventfds to the guest. Methods are called on vCPU threads, at most one
/// at a time for each eventfd.
pub trait PciBackend: Send + Sync {
    /// Registers a doorbell, so that a guest write to `address`, of any length and value, signals
    /// `kick` without an exit.
    ///
    /// # Errors
    /// Returns an error if the machine cannot register the doorbell, for example because `address`
    /// already has a doorbell. Writes then cause exits.
    fn add_doorbell(&self, address: u64, kick: &EventFd) -> io::Result<()>;

    /// Removes a doorbell.
    ///
    /// # Errors
    /// Returns an error if the doorbell does not exist.
    fn remove_doorbell(&self, address: u64, kick: &EventFd) -> io::Result<()>;

    /// Routes signals of `vector` to `message`. `line` is the bus-wide number of the vector and is
    /// unique.
    ///
    /// # Errors
    /// Returns an error if the machine cannot create the route, in which case no message is sent.
    fn connect(&self, line: u32, message: MsiMessage, vector: &EventFd) -> io::Result<()>;

    /// Removes the route of `vector`. Later signals stay pending in the eventfd.
    ///
    /// # Errors
    /// Returns an error if `vector` is not connected.
    fn disconnect(&self, line: u32, vector: &EventFd) -> io::Result<()>;

    /// Returns the callback that terminates the machine if a device thread ends unexpectedly.
    fn fatal_error_callback(&self) -> FatalErrorCallback;
}
