//! VM generation ID: 16 bytes in guest memory that change whenever the VM is restored from a
//! snapshot (Microsoft, "Virtual Machine Generation ID"). The change tells the guest that its state
//! may run more than once. Linux then reseeds its random number generator.
//!
//! The ID is at [`crate::boot::layout::GENERATION_ID`]. A reset of the guest does not change it.

use std::io;

use rustix::rand::{GetRandomFlags, getrandom};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// The VM generation ID, and the interrupt that tells the guest about a new one.
#[derive(Debug)]
pub struct GenerationId {
    id: [u8; 16],
    interrupt: EventFd,
}

impl GenerationId {
    /// Creates a VM generation ID with a random value.
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

    /// Raises the interrupt that tells the guest about a new VM generation ID.
    pub fn announce(&self) {
        if let Err(e) = self.interrupt.write(1) {
            log::error!("cannot raise the interrupt of the generation ID: {e}");
        }
    }
}
