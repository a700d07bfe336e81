//! The guest's link, which goes down when the tap device goes away.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use virtio_bindings::virtio_net::VIRTIO_NET_S_LINK_UP;

use crate::device::ConfigChange;

/// The link is up, in the device's status.
#[expect(clippy::cast_possible_truncation, reason = "it is 1")]
pub(super) const LINK_UP: u16 = VIRTIO_NET_S_LINK_UP as u16;

/// The guest's link: up until the tap device is gone.
pub struct Link {
    pub(super) name: String,
    pub(super) status: Arc<AtomicU16>,
    pub(super) config_change: ConfigChange,
}

impl Link {
    pub(super) fn is_up(&self) -> bool {
        self.status.load(Ordering::Relaxed) == LINK_UP
    }

    /// The driver has broken a queue, and nothing works before it resets the device.
    pub(super) fn needs_reset(&self) {
        self.config_change.needs_reset();
    }

    /// The tap device is gone, for good: the link goes down.
    pub(super) fn lose(&self, error: &io::Error) {
        if self.status.swap(0, Ordering::Relaxed) == LINK_UP {
            log::warn!(
                "{}: the tap device is gone, so the guest's link is down: {error}",
                self.name
            );
        }
        self.config_change.tell();
    }
}
