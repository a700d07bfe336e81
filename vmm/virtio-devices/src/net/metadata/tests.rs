//! Tests the metadata service with a TCP/IP stack on the guest's side of a network device.

use std::net::Ipv4Addr;
use std::os::unix::net::UnixDatagram;
use std::sync::atomic::AtomicU16;

use mmds::config::MmdsConfig;
use sandbox::SandboxedThreadKind;
use smoltcp::iface::{Config, Interface, SocketSet};
use smoltcp::phy::{Device, Loopback, Medium, RxToken, TxToken};
use smoltcp::socket::tcp;
use smoltcp::time::Instant as StackInstant;
use smoltcp::wire::{EthernetAddress, IpCidr};
use virtio_queue::desc::split::Descriptor;

use super::*;
use crate::net::link::{LINK_UP, LinkStatus};
use crate::net::tap::Tap;
use crate::net::{DirectionLimiters, FrameHandler, MetadataAccess};
use crate::serve::testing::{BUFFERS, Driver, activation, memory};
use crate::worker::DeviceWorker;

/// Number of buffers that a test places in each queue. Each buffer is used once.
const CHAINS: u16 = 32;
/// Size of a queue, in entries. Tests can use only a part of the entries, because the used ring of
/// the mock begins halfway through the available ring.
const ENTRIES: u16 = 128;
const BUFFER_BYTES: u64 = 0x1000;
const WRITE: u16 = 2;
const SERVICE: Ipv4Addr = Ipv4Addr::new(169, 254, 169, 254);

/// A guest: the driver of the network device and a TCP/IP stack.
struct Guest<'m> {
    memory: &'m GuestMemoryMmap,
    receive: Driver<'m>,
    transmit: Driver<'m>,
    sent: u16,
    received: usize,
    device: Loopback,
    interface: Interface,
    sockets: SocketSet<'static>,
}

impl<'m> Guest<'m> {
    fn new(memory: &'m GuestMemoryMmap) -> Self {
        let mut receive = Driver::at(memory, ENTRIES, 0x1000);
        for head in 0..CHAINS {
            let buffer = Descriptor::new(Self::receive_buffer(head.into()), 2048, WRITE, 0);
            receive.offer_chain(head, &[buffer]);
        }
        let mut device = Loopback::new(Medium::Ethernet);
        let mac = EthernetAddress([2, 0, 0, 0, 0, 9]);
        let mut interface = Interface::new(Config::new(mac.into()), &mut device, StackInstant::now());
        let address = Ipv4Addr::new(172, 16, 0, 2);
        interface.update_ip_addrs(|all| all.push(IpCidr::new(address.into(), 0)).unwrap());
        Self {
            memory,
            receive,
            transmit: Driver::at(memory, ENTRIES, 0x10_000),
            sent: 0,
            received: 0,
            device,
            interface,
            sockets: SocketSet::new(Vec::new()),
        }
    }

    fn receive_buffer(head: u64) -> u64 {
        BUFFERS + BUFFER_BYTES * (u64::from(CHAINS) + head)
    }

    /// Sends a frame through the device, with an empty virtio-net header.
    fn send(&mut self, frame: &[u8]) {
        let head = self.sent;
        assert!(head < CHAINS, "too many frames");
        let address = BUFFERS + BUFFER_BYTES * u64::from(head);
        let bytes = [&[0; HEADER_BYTES][..], frame].concat();
        self.memory.write_slice(&bytes, GuestAddress(address)).unwrap();
        let length = u32::try_from(bytes.len()).unwrap();
        self.transmit
            .offer_chain(head, &[Descriptor::new(address, length, 0, 0)]);
        self.transmit.kick();
        self.sent += 1;
    }

    /// Returns the next frame that the device has delivered to the guest.
    fn arrived(&mut self) -> Option<Vec<u8>> {
        let (head, length) = self.receive.used().get(self.received).copied()?;
        self.received += 1;
        let mut bytes = vec![0; length.try_into().unwrap()];
        let address = Self::receive_buffer(head.into());
        self.memory.read_slice(&mut bytes, GuestAddress(address)).unwrap();
        assert_eq!(bytes[..10], [0; 10], "no offload is requested");
        Some(bytes.split_off(HEADER_BYTES))
    }

    /// Runs the TCP/IP stack once: sends the frames that it produces and processes the delivered
    /// frames.
    fn turn(&mut self) {
        let now = StackInstant::now();
        self.interface
            .poll_egress(now, &mut self.device, &mut self.sockets);
        while let Some((token, _)) = self.device.receive(now) {
            let frame = token.consume(<[u8]>::to_vec);
            self.send(&frame);
        }
        while let Some(frame) = self.arrived() {
            let token = self.device.transmit(now).unwrap();
            token.consume(frame.len(), |into| into.copy_from_slice(&frame));
            self.interface
                .poll_ingress_single(now, &mut self.device, &mut self.sockets);
        }
        std::thread::sleep(Duration::from_millis(1));
    }

    /// Requests `path` from the metadata service over HTTP and returns the response.
    fn get(&mut self, path: &str) -> String {
        let buffer = || tcp::SocketBuffer::new(vec![0; 4096]);
        let mut socket = tcp::Socket::new(buffer(), buffer());
        socket
            .connect(self.interface.context(), (SERVICE, 80), 1000)
            .unwrap();
        let handle = self.sockets.add(socket);
        let start = Instant::now();
        let mut request = Some(format!("GET {path} HTTP/1.0\r\n\r\n"));
        let mut answer = Vec::new();
        loop {
            assert!(start.elapsed() < Duration::from_secs(30), "no answer");
            self.turn();
            let socket = self.sockets.get_mut::<tcp::Socket<'_>>(handle);
            if socket.can_send()
                && let Some(request) = request.take()
            {
                socket.send_slice(request.as_bytes()).unwrap();
            }
            if socket.can_recv() {
                let _ = socket.recv(|bytes| (bytes.len(), answer.extend_from_slice(bytes)));
            }
            if request.is_none() && !socket.may_recv() {
                return String::from_utf8(answer).unwrap();
            }
        }
    }
}

/// Starts the thread of a network device with a metadata service. Also returns the other end of the
/// socket pair that replaces the tap device.
fn start(guest: &Guest<'_>) -> (DeviceWorker, UnixDatagram) {
    let service = MetadataService::new(MmdsConfig::default());
    service.put(serde_json::json!({"a": {"b": "c"}})).unwrap();
    let access = MetadataAccess {
        service: Arc::new(service),
        timer: Arc::new(MetadataTimer::new().unwrap()),
    };
    let (near, far) = UnixDatagram::pair().unwrap();
    near.set_nonblocking(true).unwrap();
    far.set_nonblocking(true).unwrap();
    let (activation, _seen) = activation(guest.memory, vec![]);
    let link = LinkStatus {
        name: "net0".into(),
        status: Arc::new(AtomicU16::new(LINK_UP)),
        config_change: activation.config_change,
    };
    let queues = [guest.receive.active(), guest.transmit.active()];
    let tap = Some(Arc::new(Tap::on(near.into())));
    let limiters = DirectionLimiters::default();
    let handler = FrameHandler::new(guest.memory.clone(), tap, link, queues, false, &limiters);
    let handler = handler.with_metadata(Some(&access));
    let callback = activation.fatal_error_callback;
    let worker = DeviceWorker::spawn(SandboxedThreadKind::Device, "net0", handler, callback).unwrap();
    (worker, far)
}

/// The guest can read metadata through the network device. No tap event is needed to wake the
/// thread, and the tap device receives no metadata frames.
#[test]
fn guest_reads_metadata_and_the_tap_sees_no_frame_of_it() {
    let memory = memory();
    let mut guest = Guest::new(&memory);
    let (mut worker, far) = start(&guest);
    let answer = guest.get("/a/b");
    assert!(
        answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\nc"),
        "{answer}"
    );
    assert!(
        far.recv(&mut [0; 100]).is_err(),
        "a frame for the service reached the tap device"
    );
    guest.send(&[0xff; 60]);
    let start = Instant::now();
    while far.recv(&mut [0; 100]).is_err() {
        assert!(
            start.elapsed() < Duration::from_secs(30),
            "another frame did not reach it"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    worker.stop();
}

#[test]
fn frame_is_copied_without_its_header() {
    let memory = memory();
    let bytes: Vec<u8> = (0..40).collect();
    memory.write_slice(&bytes, GuestAddress(BUFFERS)).unwrap();
    let pieces = [
        (GuestAddress(BUFFERS), 10),
        (GuestAddress(BUFFERS + 10), 10),
        (GuestAddress(BUFFERS + 20), 20),
    ];
    let copy = |limit| copy_frame(&memory, &pieces, limit).unwrap();
    assert_eq!(copy(usize::MAX), bytes[HEADER_BYTES..]);
    assert_eq!(copy(25), bytes[HEADER_BYTES..25]);
    assert_eq!(copy_frame(&memory, &pieces[..1], 100), None);
    assert_eq!(
        copy_frame(&memory, &[(GuestAddress(u64::MAX - 4), 40)], 100),
        None
    );
}
