//! TCP/IP for the frames between a guest's network device and the metadata service.
//!
//! smoltcp provides IPv4 and TCP. This module answers ARP requests, and sends responses to the MAC
//! address of the guest's latest frame, which makes a neighbour table unnecessary. The checksums of
//! received frames are ignored, because guests leave their computation to the network device
//! (checksum offload). A received TCP segment may be as large as a frame.

mod connection;
mod device;

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use smoltcp::iface::{Config, Interface, SocketSet};
use smoltcp::socket::tcp;
use smoltcp::time::Instant as StackInstant;
use smoltcp::wire::{
    ArpOperation, ArpPacket, ArpRepr, EthernetAddress, EthernetFrame, EthernetProtocol, HardwareAddress,
    IpCidr, Ipv4Packet,
};

use crate::service::MetadataService;
use connection::Connection;
use device::FrameBuffer;

/// Maximum number of concurrent TCP connections of a network device, as in Firecracker.
pub const MAX_CONNECTIONS: usize = 30;
/// Number of bytes at the beginning of a frame that [`MetadataStack::wants`] examines.
pub const FRAME_PREFIX_BYTES: usize = ETHERNET_BYTES + 28;
/// Size of an Ethernet header, in bytes.
const ETHERNET_BYTES: usize = 14;
/// MAC address of the service, the same as in Firecracker.
const SERVICE_MAC: EthernetAddress = EthernetAddress([0x06, 0x01, 0x23, 0x45, 0x67, 0x01]);

/// TCP/IP stack of the service for one network device.
pub struct MetadataStack {
    service: Arc<MetadataService>,
    address: Ipv4Addr,
    interface: Interface,
    sockets: SocketSet<'static>,
    connections: Vec<Connection>,
    frames: FrameBuffer,
    start: Instant,
}

impl MetadataStack {
    /// Creates a stack without connections at time `now`.
    pub fn new(service: Arc<MetadataService>, now: Instant) -> Self {
        let address = service.config().address;
        let mut frames = FrameBuffer::new(SERVICE_MAC);
        let mut config = Config::new(HardwareAddress::Ip);
        // Take the random seed from the random keys of the standard library's hasher.
        config.random_seed = RandomState::new().hash_one(0);
        let mut interface = Interface::new(config, &mut frames, StackInstant::ZERO);
        interface.update_ip_addrs(|all| {
            // The push cannot fail, because the list has capacity for at least two addresses.
            let _ = all.push(IpCidr::new(address.into(), 32));
        });
        let mut sockets = SocketSet::new(Vec::new());
        // The additional socket accepts a connection beyond the maximum, which replaces the oldest
        // one.
        let connections = (0..=MAX_CONNECTIONS)
            .map(|_| Connection::new(&mut sockets, now))
            .collect();
        let mut stack = Self {
            service,
            address,
            interface,
            sockets,
            connections,
            frames,
            start: now,
        };
        stack.listen(now);
        stack
    }

    /// Returns whether a frame is addressed to the service. `prefix` is the beginning of the frame,
    /// with at least [`FRAME_PREFIX_BYTES`] bytes if the frame is long enough.
    pub fn wants(&self, prefix: &[u8]) -> bool {
        let Ok(frame) = EthernetFrame::new_checked(prefix) else {
            return false;
        };
        match frame.ethertype() {
            EthernetProtocol::Arp => self.arp_request(frame.payload()).is_some(),
            // The length field of the IPv4 header is not checked, because it covers the whole
            // packet and `prefix` is only its beginning.
            EthernetProtocol::Ipv4 => frame
                .payload()
                .get(16..20)
                .is_some_and(|destination| destination == self.address.octets()),
            _ => false,
        }
    }

    /// Processes a frame that the service [wants](Self::wants). Invalid frames are dropped.
    pub fn receive(&mut self, frame: &[u8], now: Instant) {
        let Ok(ethernet) = EthernetFrame::new_checked(frame) else {
            return;
        };
        self.frames.set_peer(ethernet.src_addr());
        match ethernet.ethertype() {
            EthernetProtocol::Arp => self.answer_arp(ethernet.payload()),
            EthernetProtocol::Ipv4 if Ipv4Packet::new_checked(ethernet.payload()).is_ok() => {
                self.frames.put(ethernet.payload());
                let time = self.stack_time(now);
                let Self {
                    interface,
                    frames,
                    sockets,
                    ..
                } = self;
                interface.poll_ingress_single(time, frames, sockets);
                frames.clear_received();
                self.poll(now);
            }
            _ => {}
        }
    }

    /// Answers the requests on all connections, and handles expired timers.
    pub fn poll(&mut self, now: Instant) {
        let mut listens = false;
        for connection in &mut self.connections {
            let socket = self.sockets.get_mut::<tcp::Socket<'_>>(connection.handle());
            connection.serve(socket, &self.service, now);
            listens |= socket.is_listening();
        }
        if !listens && let Some(oldest) = self.connections.iter().min_by_key(|one| one.last_active()) {
            // A new connection replaces the connection that has been inactive for the longest time.
            self.sockets.get_mut::<tcp::Socket<'_>>(oldest.handle()).abort();
        }
        let time = self.stack_time(now);
        self.interface
            .poll_egress(time, &mut self.frames, &mut self.sockets);
        self.listen(now);
    }

    /// Puts the sockets of closed connections back into the listening state.
    fn listen(&mut self, now: Instant) {
        for connection in &mut self.connections {
            let socket = self.sockets.get_mut::<tcp::Socket<'_>>(connection.handle());
            connection.listen(socket, now);
        }
    }

    /// Returns the next frame to send to the guest, if any.
    pub fn next_frame(&mut self, now: Instant) -> Option<Vec<u8>> {
        if self.frames.is_empty() {
            self.poll(now);
        }
        self.frames.pop()
    }

    /// Returns the time after which [`MetadataStack::poll`] must be called, or `None` if no call is
    /// needed before the next frame arrives.
    pub fn poll_delay(&mut self, now: Instant) -> Option<Duration> {
        let time = self.stack_time(now);
        // While the frame queue is full, the stack cannot send, so its timers are ignored until the
        // guest has fetched frames.
        let delay = (!self.frames.is_full())
            .then(|| self.interface.poll_delay(time, &self.sockets))
            .flatten();
        let delay = delay.map(Duration::from);
        let deadlines = self.connections.iter().filter_map(|connection| {
            let socket = self.sockets.get::<tcp::Socket<'_>>(connection.handle());
            connection.deadline(socket)
        });
        let idle = deadlines
            .min()
            .map(|deadline| deadline.saturating_duration_since(now));
        delay.into_iter().chain(idle).min()
    }

    fn stack_time(&self, now: Instant) -> StackInstant {
        let micros = now.saturating_duration_since(self.start).as_micros();
        StackInstant::from_micros(i64::try_from(micros).unwrap_or(i64::MAX))
    }

    /// Returns the ARP request in `packet` if it is for the service's address.
    fn arp_request(&self, packet: &[u8]) -> Option<ArpRepr> {
        let packet = ArpPacket::new_checked(packet).ok()?;
        let request = ArpRepr::parse(&packet).ok()?;
        let ArpRepr::EthernetIpv4 {
            operation,
            target_protocol_addr,
            ..
        } = request
        else {
            return None;
        };
        let is_ours = operation == ArpOperation::Request && target_protocol_addr == self.address;
        is_ours.then_some(request)
    }

    fn answer_arp(&mut self, packet: &[u8]) {
        let Some(ArpRepr::EthernetIpv4 {
            source_hardware_addr,
            source_protocol_addr,
            ..
        }) = self.arp_request(packet)
        else {
            return;
        };
        let reply = ArpRepr::EthernetIpv4 {
            operation: ArpOperation::Reply,
            source_hardware_addr: SERVICE_MAC,
            source_protocol_addr: self.address,
            target_hardware_addr: source_hardware_addr,
            target_protocol_addr: source_protocol_addr,
        };
        self.frames
            .push(EthernetProtocol::Arp, reply.buffer_len(), |payload| {
                reply.emit(&mut ArpPacket::new_unchecked(payload));
            });
    }
}

#[cfg(test)]
mod tests;
