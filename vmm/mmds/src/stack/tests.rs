//! Tests the stack against a second smoltcp instance, which acts as the guest's stack.

use std::collections::VecDeque;

use serde_json::json;
use smoltcp::iface::SocketHandle;
use smoltcp::phy::{Device, Loopback, Medium, RxToken, TxToken};

use super::connection::IDLE_TIME;
use super::*;
use crate::config::MmdsConfig;

const GUEST: Ipv4Addr = Ipv4Addr::new(172, 16, 0, 2);
const GUEST_MAC: [u8; 6] = [2, 0, 0, 0, 0, 9];

/// A simulated guest's TCP/IP stack, and the stack of the service under test.
struct Guest {
    device: Loopback,
    interface: Interface,
    sockets: SocketSet<'static>,
    stack: MetadataStack,
    now: Instant,
}

impl Guest {
    fn new(config: &str) -> Self {
        let now = Instant::now();
        let config: MmdsConfig = config.parse().unwrap();
        let service = MetadataService::new(config);
        service
            .put(json!({"a": {"b": "c"}, "long": "x".repeat(40_000)}))
            .unwrap();
        let stack = MetadataStack::new(Arc::new(service), now);
        let mut device = Loopback::new(Medium::Ethernet);
        let config = Config::new(EthernetAddress(GUEST_MAC).into());
        let mut interface = Interface::new(config, &mut device, StackInstant::ZERO);
        // On-link route to the service, as `ip route add 169.254.169.254 dev eth0` adds.
        interface.update_ip_addrs(|all| all.push(IpCidr::new(GUEST.into(), 0)).unwrap());
        Self {
            device,
            interface,
            sockets: SocketSet::new(Vec::new()),
            stack,
            now,
        }
    }

    fn time(&self) -> StackInstant {
        self.stack.stack_time(self.now)
    }

    /// Takes the frames that the guest has sent.
    fn sent(&mut self) -> VecDeque<Vec<u8>> {
        let time = self.time();
        let mut frames = VecDeque::new();
        while let Some((token, _)) = self.device.receive(time) {
            frames.push_back(token.consume(<[u8]>::to_vec));
        }
        frames
    }

    /// Exchanges frames between the stacks of the guest and of the service until both are idle.
    fn transfer(&mut self) {
        for _ in 0..200 {
            let time = self.time();
            self.interface
                .poll_egress(time, &mut self.device, &mut self.sockets);
            let sent = self.sent();
            for frame in &sent {
                assert!(self.stack.wants(&frame[..frame.len().min(FRAME_PREFIX_BYTES)]));
                self.stack.receive(frame, self.now);
            }
            let mut is_idle = sent.is_empty();
            while let Some(frame) = self.stack.next_frame(self.now) {
                assert_eq!(frame[..6], GUEST_MAC);
                let token = self.device.transmit(time).unwrap();
                token.consume(frame.len(), |into| into.copy_from_slice(&frame));
                self.interface
                    .poll_ingress_single(time, &mut self.device, &mut self.sockets);
                is_idle = false;
            }
            if is_idle {
                return;
            }
            self.now += Duration::from_millis(20);
        }
        panic!("the frames have no end");
    }

    fn connect(&mut self, port: u16) -> SocketHandle {
        let buffer = || tcp::SocketBuffer::new(vec![0; 60_000]);
        let handle = self.sockets.add(tcp::Socket::new(buffer(), buffer()));
        let address = self.stack.address;
        let socket = self.sockets.get_mut::<tcp::Socket<'_>>(handle);
        socket
            .connect(self.interface.context(), (address, 80), port)
            .unwrap();
        self.transfer();
        handle
    }

    fn socket(&mut self, handle: SocketHandle) -> &mut tcp::Socket<'static> {
        self.sockets.get_mut(handle)
    }

    fn ask(&mut self, handle: SocketHandle, request: &str) -> String {
        let sent = self.socket(handle).send_slice(request.as_bytes()).unwrap();
        assert_eq!(sent, request.len());
        self.transfer();
        let mut bytes = vec![0; 60_000];
        let count = self.socket(handle).recv_slice(&mut bytes).unwrap_or(0);
        String::from_utf8(bytes[..count].to_vec()).unwrap()
    }
}

#[test]
fn guest_resolves_connects_and_reads() {
    let mut guest = Guest::new("version=v1");
    let connection = guest.connect(1000);
    let answer = guest.ask(connection, "GET /a/b HTTP/1.1\r\n\r\n");
    assert!(
        answer.starts_with("HTTP/1.1 200 OK\r\n") && answer.ends_with("\r\n\r\nc"),
        "{answer}"
    );
    let pipelined =
        "GET /a HTTP/1.1\r\nAccept: application/json\r\n\r\nPOST / HTTP/1.1\r\n\r\nGET /a/b HTTP/1.0\r\n\r\n";
    let answers = guest.ask(connection, pipelined);
    assert!(
        answers.contains("{\"b\":\"c\"}HTTP/1.1 405 ") && answers.ends_with("\r\n\r\nc"),
        "{answers}"
    );
    assert!(
        !guest.socket(connection).may_recv(),
        "HTTP/1.0 ends the connection"
    );
}

#[test]
fn long_document_arrives_whole_at_another_address() {
    let mut guest = Guest::new("version=v2,address=169.254.170.2");
    let connection = guest.connect(1000);
    let token = guest.ask(
        connection,
        "PUT /latest/api/token HTTP/1.1\r\nX-metadata-token-ttl-seconds: 60\r\n\r\n",
    );
    let token = token.rsplit("\r\n").next().unwrap();
    let answer = guest.ask(
        connection,
        &format!("GET /long HTTP/1.1\r\nX-metadata-token: {token}\r\n\r\n"),
    );
    assert_eq!(answer.split("\r\n\r\n").nth(1).unwrap().len(), 40_000);
}

#[test]
fn idle_connection_gives_way_and_ends() {
    let mut guest = Guest::new("version=v1");
    let first = guest.connect(1000);
    for port in 1..MAX_CONNECTIONS {
        guest.now += Duration::from_millis(10);
        guest.connect(1000 + u16::try_from(port).unwrap());
    }
    assert!(guest.socket(first).is_active(), "there is room for all");
    guest.now += Duration::from_millis(10);
    guest.connect(1999);
    assert!(
        !guest.socket(first).is_active(),
        "the oldest connection is replaced"
    );
    let last = guest.connect(2000);
    assert!(
        guest
            .ask(last, "GET /a/b HTTP/1.1\r\n\r\n")
            .starts_with("HTTP/1.1 200")
    );
    let delay = guest.stack.poll_delay(guest.now).unwrap();
    assert!(delay <= IDLE_TIME, "{delay:?}");
    guest.now += IDLE_TIME;
    guest.transfer();
    assert!(!guest.socket(last).is_active());
    assert_eq!(guest.stack.poll_delay(guest.now), None);
}

#[test]
fn other_frames_are_not_wanted() {
    let guest = Guest::new("version=v1");
    let mut frame = [0; FRAME_PREFIX_BYTES];
    frame[12..14].copy_from_slice(&[8, 0]);
    assert!(!guest.stack.wants(&frame));
    frame[30..34].copy_from_slice(&[169, 254, 169, 254]);
    assert!(guest.stack.wants(&frame));
    assert!(!guest.stack.wants(&frame[..33]));
    frame[12..14].copy_from_slice(&[0x86, 0xdd]);
    assert!(!guest.stack.wants(&frame));
}

/// The number of frames that the stack queues for a guest that fetches none is bounded.
#[test]
fn frames_to_the_guest_are_bounded() {
    let mut guest = Guest::new("version=v1");
    let service: EthernetAddress = SERVICE_MAC;
    let request = ArpRepr::EthernetIpv4 {
        operation: ArpOperation::Request,
        source_hardware_addr: EthernetAddress(GUEST_MAC),
        source_protocol_addr: GUEST,
        target_hardware_addr: EthernetAddress::BROADCAST,
        target_protocol_addr: guest.stack.address,
    };
    let mut frame = vec![0; ETHERNET_BYTES + request.buffer_len()];
    let mut ethernet = EthernetFrame::new_unchecked(&mut frame[..]);
    ethernet.set_ethertype(EthernetProtocol::Arp);
    ethernet.set_src_addr(EthernetAddress(GUEST_MAC));
    request.emit(&mut ArpPacket::new_unchecked(ethernet.payload_mut()));
    for _ in 0..1000 {
        guest.stack.receive(&frame, guest.now);
    }
    let mut count = 0;
    while let Some(reply) = guest.stack.next_frame(guest.now) {
        assert_eq!(reply[6..12], service.0);
        count += 1;
    }
    assert_eq!(count, 32);
}

mod hostile {
    use proptest::prelude::*;

    use super::*;

    fn payloads() -> impl Strategy<Value = Vec<Vec<u8>>> {
        let payload = prop::collection::vec(any::<u8>(), 0..120);
        prop::collection::vec(payload, 0..20)
    }

    proptest! {
        #[test]
        fn no_frames_make_the_stack_panic(payloads in payloads()) {
            let mut guest = Guest::new("version=v1");
            for payload in payloads {
                let mut frame = vec![0; ETHERNET_BYTES];
                let kind = if payload.len() % 2 == 0 { 0 } else { 6 };
                frame[12..14].copy_from_slice(&[8, kind]);
                frame.extend(&payload);
                guest.stack.receive(&frame, guest.now);
                guest.now += Duration::from_secs(1);
                let _ = guest.stack.poll_delay(guest.now);
            }
        }
    }
}
