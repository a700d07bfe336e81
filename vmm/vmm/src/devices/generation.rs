//! VM generation ID, 16 bytes in guest memory that change at each restore of a snapshot, because a
//! guest state may then run a second time (Microsoft, "Virtual Machine Generation ID"). Linux
//! reseeds its random number generator when it is notified.
//!
//! The ID is at [`crate::boot::layout::GENERATION_ID`]. Guest resets do not change it.

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// The generation ID of this VM, and the interrupt that announces a new one.
#[derive(Debug)]
pub struct GenerationId {
    id: [u8; 16],
    interrupt: EventFd,
}

impl GenerationId {
    /// Creates a random ID.
    ///
    /// # Errors
    /// Returns an error if `getrandom(2)` or `eventfd(2)` fails.
    pub fn new() -> io::Result<Self> {
        let mut id = [0; 16];
        // Reads of up to 256 bytes are complete: random(4).
        getrandom(&mut id, GetRandomFlags::empty())?;
        Ok(Self {
            id,
            interrupt: EventFd::new(EFD_NONBLOCK)?,
        })
    }

    /// Returns the VM generation ID.
    #[must_use]
    pub fn id(&self) -> [u8; 16] {
        self.id
    }

    /// Returns the eventfd to register with KVM as an irqfd for [`super::ports::GENERATION_IRQ`].
    #[must_use]
    pub fn interrupt(&self) -> &EventFd {
        &self.interrupt
    }

    /// Notifies the guest of a new ID.
    pub fn announce(&self) {
        if let Err(e) = self.interrupt.write(1) {
            log::error!("cannot raise the interrupt of the generation ID: {e}");
        }
    }
}
