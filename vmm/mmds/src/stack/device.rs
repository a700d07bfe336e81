//! Network device that connects smoltcp to the guest. Holds one received packet and a bounded queue
//! of frames to the guest.

use std::collections::VecDeque;

use smoltcp::phy::{self, Checksum, DeviceCapabilities, Medium};
use smoltcp::time::Instant;
use smoltcp::wire::{EthernetAddress, EthernetFrame, EthernetProtocol, EthernetRepr};

use super::ETHERNET_BYTES;

/// Maximum number of queued frames to the guest.
const MAX_FRAMES: usize = 32;
/// Maximum size of an IP packet to the guest, in bytes. For TCP, the guest announces a smaller
/// maximum.
const MTU: usize = 1500;

/// Frames between the stack and the guest.
pub(super) struct FrameBuffer {
    /// IP packet from the guest that the stack processes next. Empty if there is none.
    received: Vec<u8>,
    /// Ethernet frames queued for the guest.
    frames: VecDeque<Vec<u8>>,
    own_mac: EthernetAddress,
    /// MAC address of the guest.
    peer_mac: EthernetAddress,
}

impl FrameBuffer {
    pub(super) fn new(own_mac: EthernetAddress) -> Self {
        Self {
            received: Vec::new(),
            frames: VecDeque::new(),
            own_mac,
            peer_mac: EthernetAddress::BROADCAST,
        }
    }

    /// Sets the MAC address of the guest.
    pub(super) fn set_peer(&mut self, mac: EthernetAddress) {
        self.peer_mac = mac;
    }

    /// Stores an IP packet from the guest for the stack to process.
    pub(super) fn put(&mut self, packet: &[u8]) {
        self.received.extend_from_slice(packet);
    }

    /// Drops the received packet if the stack has not processed it.
    pub(super) fn clear_received(&mut self) {
        self.received.clear();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    pub(super) fn is_full(&self) -> bool {
        self.frames.len() >= MAX_FRAMES
    }

    pub(super) fn pop(&mut self) -> Option<Vec<u8>> {
        self.frames.pop_front()
    }

    /// Adds a frame to the guest with a payload of `length` bytes, which `fill` writes. The frame
    /// is dropped if the queue is full.
    pub(super) fn push<R>(
        &mut self,
        ethertype: EthernetProtocol,
        length: usize,
        fill: impl FnOnce(&mut [u8]) -> R,
    ) -> R {
        let mut bytes = vec![0; ETHERNET_BYTES + length];
        let mut frame = EthernetFrame::new_unchecked(&mut bytes[..]);
        let header = EthernetRepr {
            src_addr: self.own_mac,
            dst_addr: self.peer_mac,
            ethertype,
        };
        header.emit(&mut frame);
        let result = fill(frame.payload_mut());
        if !self.is_full() {
            self.frames.push_back(bytes);
        }
        result
    }
}

impl phy::Device for FrameBuffer {
    type RxToken<'a> = Received;
    type TxToken<'a> = Transmission<'a>;

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = MTU;
        // Do not verify the checksums of received packets, because the guest leaves them to the
        // network device (checksum offload).
        capabilities.checksum.ipv4 = Checksum::Tx;
        capabilities.checksum.tcp = Checksum::Tx;
        capabilities
    }

    fn receive(&mut self, _: Instant) -> Option<(Received, Transmission<'_>)> {
        if self.received.is_empty() || self.is_full() {
            return None;
        }
        let packet = std::mem::take(&mut self.received);
        Some((Received(packet), Transmission(self)))
    }

    fn transmit(&mut self, _: Instant) -> Option<Transmission<'_>> {
        (!self.is_full()).then_some(Transmission(self))
    }
}

/// Token with which smoltcp takes the packet received from the guest.
pub(super) struct Received(Vec<u8>);

impl phy::RxToken for Received {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, f: F) -> R {
        f(&self.0)
    }
}

/// Token with which smoltcp sends one packet to the guest.
pub(super) struct Transmission<'a>(&'a mut FrameBuffer);

impl phy::TxToken for Transmission<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, length: usize, f: F) -> R {
        self.0.push(EthernetProtocol::Ipv4, length, f)
    }
}
