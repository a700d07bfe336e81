//! The link of the guest's network device, which goes down when the tap device is removed.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU16, Ordering};

use virtio_bindings::virtio_net::VIRTIO_NET_S_LINK_UP;

use crate::device::ConfigChangeNotifier;

/// Bit of the link status that is set while the link is up.
#[expect(clippy::cast_possible_truncation, reason = "it is 1")]
pub(super) const LINK_UP: u16 = VIRTIO_NET_S_LINK_UP as u16;

/// The link status of the guest's network device. The link is up until the tap device is removed.
pub struct LinkStatus {
    pub(super) name: String,
    pub(super) status: Arc<AtomicU16>,
    pub(super) config_change: ConfigChangeNotifier,
}

impl LinkStatus {
    pub(super) fn is_up(&self) -> bool {
        self.status.load(Ordering::Relaxed) == LINK_UP
    }

    /// Requests a device reset after the driver has broken a queue.
    pub(super) fn needs_reset(&self) {
        self.config_change.needs_reset();
    }

    /// Takes the link down permanently after the removal of the tap device.
    pub(super) fn lose(&self, error: &io::Error) {
        if self.status.swap(0, Ordering::Relaxed) == LINK_UP {
            log::warn!(
                "{}: the tap device was removed; the guest's link is down: {error}",
                self.name
            );
        }
        self.config_change.notify();
    }
}
