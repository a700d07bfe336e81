//! What the transport asks of the machine around it.

use std::io;

use vmm_sys_util::eventfd::EventFd;

use crate::device::LastResort;

/// A message-signalled interrupt: a write of `data` to `address`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Message {
    /// Where, as the guest wrote it.
    pub address: u64,
    /// What.
    pub data: u32,
}

/// Joins eventfds to the guest. The calls come from vCPU threads, one at a time for each eventfd.
pub trait Machine: Send + Sync {
    /// From now on a guest's write to `address`, of any length and value, signals `kick` without an exit.
    ///
    /// # Errors
    /// The machine cannot, for instance because `address` has a doorbell; writes there come as exits then.
    fn add_doorbell(&self, address: u64, kick: &EventFd) -> io::Result<()>;

    /// Takes such a doorbell away.
    ///
    /// # Errors
    /// There is none.
    fn remove_doorbell(&self, address: u64, kick: &EventFd) -> io::Result<()>;

    /// From now on a signal of `vector` sends `message`. `line` is the vector's number on the bus: each has
    /// one of its own.
    ///
    /// # Errors
    /// The machine cannot; nothing is sent.
    fn connect(&self, line: u32, message: Message, vector: &EventFd) -> io::Result<()>;

    /// From now on signals of `vector` stay in it.
    ///
    /// # Errors
    /// It was not connected.
    fn disconnect(&self, line: u32, vector: &EventFd) -> io::Result<()>;

    /// What ends the machine when a device's thread has ended that nobody has stopped.
    fn last_resort(&self) -> LastResort;
}
