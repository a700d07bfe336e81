//! Tests of the control server of a real VM. The tests run the main loop step by step, so the order
//! of requests is deterministic and no clock is involved.

use std::cell::RefCell;
use std::time::Duration;

use control_api::protocol::{BranchStacks, SamplingParams};
use event_manager::{EventManager, SubscriberId, SubscriberOps};
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::testing;
use crate::vm::RunningVm;

/// A VM and its control server, with a socket for each access class.
struct ServedVm {
    manager: EventManager<ControlServer>,
    server: SubscriberId,
    dir: tempfile::TempDir,
    vm: RunningVm,
}

impl ServedVm {
    fn new() -> Option<Self> {
        let vm = testing::halted_vm()?;
        let control_target = testing::control_target(&vm);
        let dir = tempfile::tempdir().unwrap();
        let socket = |name: &str| ControlSocket::bind_at(&dir.path().join(name), 0o600).unwrap();
        let sockets = vec![
            (ControlSocketAccess::Operators, socket("operators")),
            (ControlSocketAccess::Observers, socket("observers")),
        ];
        let mut manager = EventManager::new().unwrap();
        let server = manager.add_subscriber(ControlServer::new(Arc::new(control_target), sockets));
        Some(Self {
            manager,
            server,
            dir,
            vm,
        })
    }

    /// Runs the main loop until no event is pending.
    fn run_loop_once(&mut self) {
        while self.manager.run_with_timeout(0).unwrap() > 0 {}
    }

    fn server(&mut self) -> &mut ControlServer {
        self.manager.subscriber_mut(self.server).unwrap()
    }

    /// Returns the only connection of the server.
    fn only(&mut self) -> &mut Connection {
        let connections = &mut self.server().connections;
        assert_eq!(connections.len(), 1);
        connections.values_mut().next().unwrap()
    }

    fn connect(&mut self, access: ControlSocketAccess) -> TestClient {
        let name = match access {
            ControlSocketAccess::Operators => "operators",
            ControlSocketAccess::Observers => "observers",
        };
        let stream = UnixStream::connect(self.dir.path().join(name)).unwrap();
        stream.set_nonblocking(true).unwrap();
        let peer = TestClient {
            stream,
            seen: Vec::new(),
        };
        self.run_loop_once();
        peer
    }

    /// Connects a client and sends its hello.
    fn greeted(&mut self, access: ControlSocketAccess) -> TestClient {
        let mut peer = self.connect(access);
        let reply = self.call(&mut peer, &Call::Hello { protocol: PROTOCOL }).unwrap();
        assert_eq!(reply["protocol"], PROTOCOL);
        peer
    }

    /// Sends raw bytes to the server, and returns the replies that the client receives.
    fn send(&mut self, peer: &mut TestClient, bytes: &[u8]) -> Vec<ReplyLine> {
        // A write may accept only a part of the input, or fail because the server has closed the
        // socket.
        let mut rest = bytes;
        let mut replies = Vec::new();
        while !rest.is_empty() {
            match peer.stream.write(rest) {
                Ok(n) => rest = &rest[n..],
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => break,
            }
            self.run_loop_once();
            replies.extend(peer.replies());
        }
        replies
    }

    /// Sends one request, to which the rate limit does not apply, and returns the reply.
    fn call(&mut self, peer: &mut TestClient, call: &Call) -> Result<Value, RequestError> {
        for connection in self.server().connections.values_mut() {
            connection.tokens = REQUEST_BURST;
        }
        let mut line = serde_json::to_value(call).unwrap();
        line["id"] = 7.into();
        let mut replies = self.send(peer, format!("{line}\n").as_bytes());
        assert_eq!(replies.len(), 1, "{call:?}: {replies:?}");
        let reply = replies.pop().unwrap();
        assert_eq!(reply.id, 7, "{call:?}");
        match (reply.ok, reply.error) {
            (ok, None) => Ok(ok.unwrap_or_default()),
            (None, Some(failure)) => Err(failure),
            both => panic!("{call:?}: {both:?}"),
        }
    }
}

struct TestClient {
    stream: UnixStream,
    seen: Vec<u8>,
}

impl TestClient {
    /// Returns the replies received since the previous call.
    fn replies(&mut self) -> Vec<ReplyLine> {
        let mut chunk = [0; 4096];
        while let Ok(n @ 1..) = self.stream.read(&mut chunk) {
            self.seen.extend_from_slice(&chunk[..n]);
        }
        let Some(end) = memchr::memrchr(b'\n', &self.seen) else {
            return Vec::new();
        };
        let rest = self.seen.split_off(end + 1);
        let whole = std::mem::replace(&mut self.seen, rest);
        let lines = whole.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        lines.map(|line| serde_json::from_slice(line).unwrap()).collect()
    }

    fn is_closed(&mut self) -> bool {
        matches!(self.stream.read(&mut [0]), Ok(0))
    }
}

/// An invalid request is answered with the reason, and the connection is closed. Later requests are
/// not executed.
#[test]
fn invalid_request_closes_connection() {
    let Some(mut served) = ServedVm::new() else { return };
    let deep = [b"[".repeat(10_000), b"\n".to_vec()].concat();
    for said in [
        b"\n".as_slice(),
        b"{}\n",
        b"null\n",
        b"[]\n",
        b"{\"id\":1}\n",
        b"{\"id\":-1,\"call\":\"status\"}\n",
        b"{\"id\":1,\"call\":\"format_disk\"}\n",
        b"{\"id\":1,\"call\":\"share\",\"policy\":7}\n",
        b"{\"id\":1,\"call\":\"ring\",\"vcpu\":4294967296,\"pages\":1}\n",
        b"{\"id\":1,\"call\":\"status\"} {\"id\":2,\"call\":\"status\"}\n",
        b"\xFF\xFE\n",
        &deep,
    ] {
        let mut peer = served.greeted(ControlSocketAccess::Operators);
        let stop = b"{\"id\":9,\"call\":\"stop\"}\n";
        let replies = served.send(&mut peer, &[said, stop].concat());
        let text = String::from_utf8_lossy(&said[..said.len().min(60)]).into_owned();
        let [reply] = &replies[..] else {
            panic!("{text}: {replies:?}");
        };
        let failure = reply.error.as_ref().unwrap();
        assert_eq!(
            (reply.id, failure.kind),
            (0, RequestErrorKind::Protocol),
            "{text}"
        );
        assert!(peer.is_closed(), "{text}");
        assert_eq!(served.server().connections.len(), 0, "{text}");
    }
    assert_eq!(
        served.vm.control().reason(),
        None,
        "the VM was stopped by what came behind"
    );
}

/// Requests before the hello are rejected, and only this protocol version is accepted.
#[test]
fn first_request_must_be_hello_of_this_version() {
    let Some(mut served) = ServedVm::new() else { return };
    for (call, said) in [
        (Call::Status, "the first request must be hello"),
        (Call::Stop, "the first request must be hello"),
        (Call::Hello { protocol: 0 }, "version 0 of the protocol"),
        (
            Call::Hello { protocol: u32::MAX },
            "version 4294967295 of the protocol",
        ),
    ] {
        let mut peer = served.connect(ControlSocketAccess::Operators);
        let failure = served.call(&mut peer, &call).unwrap_err();
        assert_eq!(failure.kind, RequestErrorKind::Protocol);
        assert!(failure.message.contains(said), "{call:?}: {failure}");
        assert!(peer.is_closed());
    }
    assert_eq!(served.vm.control().reason(), None);
}

/// A request may arrive in several pieces. A request that reaches the maximum size without a
/// newline is rejected.
#[test]
fn fragmented_request_is_accepted_up_to_limit() {
    let Some(mut served) = ServedVm::new() else { return };
    let mut peer = served.greeted(ControlSocketAccess::Operators);
    let line = b"{\"id\":5,\"call\":\"status\"}\n";
    for byte in &line[..line.len() - 1] {
        assert!(served.send(&mut peer, &[*byte]).is_empty());
    }
    assert_eq!(served.send(&mut peer, b"\n")[0].id, 5);
    let longest = [b" ".repeat(MAX_REQUEST - line.len()), line.to_vec()].concat();
    assert_eq!(served.send(&mut peer, &longest)[0].id, 5, "as long as may be");
    let replies = served.send(&mut peer, &b" ".repeat(MAX_REQUEST));
    let failure = replies[0].error.as_ref().unwrap();
    assert_eq!(failure.message, "a request is longer than 65536 bytes");
    assert!(peer.is_closed());
}

/// A client may send a limited burst of requests. A client that exceeds its rate is disconnected,
/// and other clients are not affected.
#[test]
fn client_above_request_rate_is_disconnected() {
    let Some(mut served) = ServedVm::new() else { return };
    let mut peer = served.greeted(ControlSocketAccess::Operators);
    let long_ago = Instant::now().checked_sub(Duration::from_secs(60));
    if let Some(long_ago) = long_ago {
        let connection = served.only();
        (connection.tokens, connection.refilled) = (0.0, long_ago);
        assert!(connection.take_request_token());
        assert_eq!(
            connection.tokens,
            REQUEST_BURST - 1.0,
            "a minute's silence saves up no more than a burst"
        );
    }
    let mut other = served.greeted(ControlSocketAccess::Observers);
    // Disables the refill of the rate limit.
    let mut connections = served.server().connections.values_mut();
    let connection = connections
        .find(|c| c.access == ControlSocketAccess::Operators)
        .unwrap();
    (connection.tokens, connection.refilled) = (0.5, Instant::now() + Duration::from_secs(3600));
    let replies = served.send(&mut peer, b"{\"id\":5,\"call\":\"status\"}\n");
    let failure = replies[0].error.as_ref().unwrap();
    assert_eq!(
        (failure.kind, failure.message.as_str()),
        (RequestErrorKind::Rate, "more than 1000 requests a second")
    );
    assert!(peer.is_closed());
    served.call(&mut other, &Call::Status).unwrap();
}

/// The server reads no requests of a client that does not read its replies, so the unsent replies
/// do not grow. When the client reads again, it receives all replies, including those to its
/// waiting requests.
#[test]
fn requests_wait_while_replies_are_unsent() {
    /// Number of requests that the test sends. Less than the burst limit.
    const MORE: u64 = 150;
    let Some(mut served) = ServedVm::new() else { return };
    let mut peer = served.greeted(ControlSocketAccess::Operators);
    let ask = |served: &mut ServedVm, peer: &mut TestClient, id: u64| {
        served.only().tokens = REQUEST_BURST;
        let line = format!("{{\"id\":{id},\"call\":\"counts\"}}\n");
        peer.stream.write_all(line.as_bytes()).unwrap();
        served.run_loop_once();
    };
    let mut asked = 0;
    while served.only().outgoing.is_empty() {
        ask(&mut served, &mut peer, asked);
        asked += 1;
    }
    let waits = served.only().outgoing.clone();
    assert!(waits.len() <= MAX_UNSENT, "{} bytes", waits.len());
    for _ in 0..MORE {
        ask(&mut served, &mut peer, asked);
        asked += 1;
    }
    assert_eq!(served.only().outgoing, waits, "nothing more was answered");
    assert!(served.only().incoming.is_empty(), "nor kept");
    let mut next = 0;
    while next < asked {
        for reply in peer.replies() {
            assert_eq!((reply.id, reply.error), (next, None));
            next += 1;
        }
        served.only().tokens = REQUEST_BURST;
        served.run_loop_once();
    }
}

/// Returns one request of each type. The arguments of the requests are `a`, `b` and `words`.
fn requests(a: u32, b: u64, words: &str) -> Vec<Call> {
    let sampling = SamplingParams {
        rate: b,
        frequency: a.is_multiple_of(2),
        callchain: true,
        chain_every: a,
        stack_bytes: a,
        branches: a.is_multiple_of(3).then_some(BranchStacks {
            filter: b,
            depth: a,
            overhead_permille: a,
        }),
    };
    let open = |vcpus: Option<Vec<u32>>, whole, sampling| Call::Open {
        events: words.into(),
        vcpus,
        whole,
        sampling,
    };
    vec![
        Call::Hello { protocol: PROTOCOL },
        Call::Status,
        Call::Pause,
        Call::Resume,
        Call::Powerdown,
        Call::Vcpus { count: a },
        Call::VcpuPlug,
        Call::VcpusWithdraw,
        Call::Share { policy: words.into() },
        Call::Filter { toml: words.into() },
        open(None, false, None),
        open(Some(vec![a, 0, 0]), a.is_multiple_of(2), None),
        open(None, true, None),
        open(None, false, Some(sampling)),
        Call::Enable,
        Call::Disable,
        Call::Joined,
        Call::Read,
        Call::Ring {
            vcpu: a % 4,
            pages: b as u32,
            overwrite: false,
        },
        Call::HostRing { handle: a },
        Call::ThreadSwitches { vcpu: a % 4 },
        Call::Chains {
            handle: a,
            every: b as u32,
        },
        Call::RingLosses,
        Call::Counts,
        Call::Kernel,
        Call::Symbols,
        Call::ProcessCode { pid: a },
        Call::ProcessMemory {
            pid: a,
            address: b,
            bytes: a,
        },
        Call::GuestView,
        Call::GuestViewResult { generation: b },
        Call::Exits,
        Call::Code {
            cr3: b,
            address: !b,
            length: a,
        },
        Call::Close,
    ]
}

/// An observer can count events and read statistics. Its requests to change the VM, to take samples
/// or to read guest memory are denied.
#[test]
fn observer_may_only_count() {
    let Some(mut served) = ServedVm::new() else { return };
    let mut observer = served.greeted(ControlSocketAccess::Observers);
    let mut calls = requests(0, 64, "cycles");
    calls.push(Call::Stop);
    let mut denied = Vec::new();
    for call in &calls {
        if let Err(failure) = served.call(&mut observer, call)
            && failure.kind == RequestErrorKind::Denied
        {
            let name = serde_json::to_value(call).unwrap()["call"]
                .as_str()
                .unwrap()
                .to_owned();
            denied.push(name);
        }
    }
    let right = [
        "pause",
        "resume",
        "powerdown",
        "vcpus",
        "vcpus_withdraw",
        "share",
        "filter",
        "open",
        "ring",
        "host_ring",
        "thread_switches",
        "chains",
        "ring_losses",
        "kernel",
        "symbols",
        "process_code",
        "process_memory",
        "code",
        "stop",
    ];
    assert_eq!(denied, right, "open: that which samples");
    assert_eq!(served.vm.control().reason(), None);
    assert!(!served.vm.control().is_pause_requested());
    assert_eq!(
        served.call(&mut observer, &Call::Status).unwrap()["role"],
        "observer"
    );
}

/// A request that cannot be fulfilled is rejected with its failure kind, and the connection stays
/// open.
#[test]
fn refused_request_keeps_connection_open() {
    use RequestErrorKind::{Invalid, Unsupported};
    let Some(mut served) = ServedVm::new() else { return };
    let mut peer = served.greeted(ControlSocketAccess::Operators);
    let open = |events: &str, vcpus: Option<Vec<u32>>, whole| Call::Open {
        events: events.into(),
        vcpus,
        whole,
        sampling: None,
    };
    let many = vec!["task-clock"; 257].join(",");
    for (call, kind, said) in [
        (
            Call::Ring {
                vcpu: 0,
                pages: 1,
                overwrite: false,
            },
            Invalid,
            "no event is open",
        ),
        (Call::Chains { handle: 0, every: 1 }, Invalid, "no event is open"),
        (open("", None, false), Invalid, ""),
        (open("no-such-event", None, false), Invalid, "no-such-event"),
        (
            open("task-clock", Some(vec![2]), false),
            Invalid,
            "vCPU 2 not found",
        ),
        (
            open("task-clock", Some(vec![u32::MAX]), false),
            Invalid,
            "vCPU 4294967295 not found",
        ),
        (
            open("task-clock", Some(vec![0]), true),
            Invalid,
            "neither vCPUs nor sampling",
        ),
        (open(&many, None, false), Invalid, "256 events"),
        (
            Call::Share {
                policy: "mine".into(),
            },
            Invalid,
            "share: ",
        ),
        (
            Call::Filter {
                toml: "deny = 7".into(),
            },
            Invalid,
            "",
        ),
        (Call::Vcpus { count: 3 }, Unsupported, ""),
    ] {
        let failure = served.call(&mut peer, &call).unwrap_err();
        assert_eq!(failure.kind, kind, "{call:?}: {failure}");
        assert!(
            failure.message.contains(said) && !failure.message.is_empty(),
            "{call:?}: {failure}"
        );
        assert!(!failure.message.contains('\n'), "{failure}");
    }
    served.call(&mut peer, &Call::Status).unwrap();
}

/// If one event of a list cannot be opened, all events of the list are closed again.
#[test]
fn failed_event_list_leaves_no_event_open() {
    let Some(mut served) = ServedVm::new() else { return };
    let mut peer = served.greeted(ControlSocketAccess::Operators);
    let open = |events: &str, stack_bytes: u32| Call::Open {
        events: events.into(),
        vcpus: None,
        whole: false,
        sampling: Some(SamplingParams {
            rate: 1_000_000,
            frequency: false,
            callchain: false,
            chain_every: 1,
            stack_bytes,
            branches: None,
        }),
    };
    let failure = served.call(&mut peer, &open("task-clock", 12)).unwrap_err();
    assert!(failure.message.contains("a multiple of 8; not 12"), "{failure}");
    let opened = served.call(&mut peer, &open("task-clock", 0)).unwrap();
    assert_eq!(
        opened.as_array().map(Vec::len),
        Some(2),
        "one on each vCPU: {opened}"
    );
    for pages in [0, 3, u32::MAX] {
        let failure = served
            .call(
                &mut peer,
                &Call::Ring {
                    vcpu: 0,
                    pages,
                    overwrite: false,
                },
            )
            .unwrap_err();
        assert_eq!(
            failure.kind,
            RequestErrorKind::Invalid,
            "{pages} pages: {failure}"
        );
    }
    let failure = served
        .call(
            &mut peer,
            &Call::Ring {
                vcpu: 7,
                pages: 8,
                overwrite: false,
            },
        )
        .unwrap_err();
    assert_eq!(failure.kind, RequestErrorKind::Invalid, "{failure}");
    served
        .call(
            &mut peer,
            &Call::Ring {
                vcpu: 0,
                pages: 8,
                overwrite: false,
            },
        )
        .unwrap();
    let failure = served.call(&mut peer, &open("task-clock", 0)).unwrap_err();
    assert_eq!(failure.message, "open sampling events before their ring");
    let read = served.call(&mut peer, &Call::Read).unwrap();
    assert_eq!(
        read.as_array().map(Vec::len),
        Some(2),
        "those from before are all there are"
    );
    served.call(&mut peer, &Call::Close).unwrap();
    assert_eq!(served.call(&mut peer, &Call::Read).unwrap(), json!([]));
}

/// A request to pause a VM that has ended fails.
#[test]
fn ended_vm_rejects_pause() {
    let Some(mut served) = ServedVm::new() else { return };
    let mut peer = served.greeted(ControlSocketAccess::Operators);
    assert_eq!(served.call(&mut peer, &Call::Pause).unwrap()["state"], "paused");
    assert_eq!(served.call(&mut peer, &Call::Resume).unwrap()["state"], "running");
    assert_eq!(served.call(&mut peer, &Call::Stop).unwrap()["state"], "stopped");
    for call in [Call::Pause, Call::Resume] {
        let failure = served.call(&mut peer, &call).unwrap_err();
        assert_eq!(
            (failure.kind, failure.message.as_str()),
            (RequestErrorKind::Invalid, "the VM has ended")
        );
    }
}

/// A connection beyond the limit receives the reason and is closed, unless it can replace a client
/// that has not sent its hello. Other clients stay connected, and observers do not displace
/// operators. A closed connection frees its slot.
#[test]
fn full_server_refuses_new_connections() {
    let Some(mut served) = ServedVm::new() else { return };
    let mut observers: Vec<TestClient> = (0..MAX_OBSERVERS)
        .map(|_| served.greeted(ControlSocketAccess::Observers))
        .collect();
    let refused = |peer: &mut TestClient| {
        let replies = peer.replies();
        let failure = replies.first().and_then(|reply| reply.error.clone());
        (peer.is_closed(), failure.map(|failure| failure.kind))
    };
    let mut late = served.connect(ControlSocketAccess::Observers);
    assert_eq!(refused(&mut late), (true, Some(RequestErrorKind::Limit)));
    let mut operator = served.greeted(ControlSocketAccess::Operators);
    served.call(&mut operator, &Call::Status).unwrap();
    drop(observers.pop());
    served.run_loop_once();
    let mut silent = served.connect(ControlSocketAccess::Observers);
    assert!(silent.replies().is_empty(), "there is room for it");
    let mut next = served.greeted(ControlSocketAccess::Observers);
    assert_eq!(refused(&mut silent), (true, Some(RequestErrorKind::Limit)));
    for peer in observers.iter_mut().chain([&mut next, &mut operator]) {
        served.call(peer, &Call::Status).unwrap();
    }
}

/// The server answers each request of any sequence with its number, and still serves other clients.
#[test]
fn server_answers_any_request_sequence() {
    let Some(mut served) = ServedVm::new() else { return };
    let other = served.greeted(ControlSocketAccess::Observers);
    let words = prop::sample::select(vec![
        "cycles",
        "task-clock,cycles",
        "{cycles,instructions}",
        "kvm:exits",
        "pv/halts/",
        "strict",
        "",
        ",",
        "{",
        "r-1",
        "cycles:uuk",
        "deny = []",
    ]);
    let number = prop_oneof![0u32..9, Just(u32::MAX), any::<u32>()];
    let wide = prop_oneof![0u64..9, Just(u64::MAX), Just(1 << 47), any::<u64>()];
    let nth = prop::collection::vec((any::<prop::sample::Index>(), number, wide, words), 1..40);
    let both = RefCell::new((served, other));
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(24));
    let ran = runner.run(&nth, |sequence| {
        let (served, other) = &mut *both.borrow_mut();
        let mut peer = served.greeted(ControlSocketAccess::Operators);
        for (nth, a, b, words) in sequence {
            let calls = requests(a, b, words);
            // Any reply is valid if it has the request's number and the connection stays open.
            let _ = served.call(&mut peer, nth.get(&calls));
            served.call(other, &Call::Status).unwrap();
        }
        drop(peer);
        served.run_loop_once();
        prop_assert_eq!(served.server().connections.len(), 1, "the other alone");
        Ok(())
    });
    ran.unwrap();
}
