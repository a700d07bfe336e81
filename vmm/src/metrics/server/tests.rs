//! A server of a real VM, whose loop the test turns itself. Where a bound of time is met, the test says that
//! it is over; it never waits for one.

use std::cell::RefCell;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use event_manager::{EventManager, SubscriberId, SubscriberOps};
use proptest::prelude::*;

use super::*;
use crate::testing;
use crate::vm::RunningVm;

/// The VM and its server.
struct Scraped {
    manager: EventManager<MetricsServer>,
    server: SubscriberId,
    path: PathBuf,
    _dir: tempfile::TempDir,
    _vm: RunningVm,
}

impl Scraped {
    fn new() -> Option<Self> {
        let vm = testing::halted_vm()?;
        let controlled = testing::controlled(&vm);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("metrics");
        let address = MetricsAddress::Unix {
            path: path.clone(),
            mode: None,
        };
        let listener = Listener::bind(&address).unwrap();
        let server = MetricsServer::new(Arc::new(controlled), listener, "task-clock".into(), true).unwrap();
        let mut manager = EventManager::new().unwrap();
        let server = manager.add_subscriber(server);
        Some(Self {
            manager,
            server,
            path,
            _dir: dir,
            _vm: vm,
        })
    }

    /// Lets the server do all that it can do now.
    fn turn(&mut self) {
        while self.manager.run_with_timeout(0).unwrap() > 0 {}
    }

    fn server(&mut self) -> &mut MetricsServer {
        self.manager.subscriber_mut(self.server).unwrap()
    }

    fn connect(&mut self) -> Peer {
        let stream = UnixStream::connect(&self.path).unwrap();
        stream.set_nonblocking(true).unwrap();
        self.turn();
        // It has all the time that there is, until the test says otherwise.
        let server = self.server();
        if let Some(connection) = server.connections.get_mut(&(server.next - 1)) {
            connection.until = far();
        }
        Peer {
            stream,
            got: Vec::new(),
        }
    }

    /// Sends bytes, as far as the server takes them.
    fn say(&mut self, peer: &mut Peer, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            match peer.stream.write(rest) {
                Ok(n) => rest = &rest[n..],
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return,
            }
            self.turn();
        }
    }

    /// All that the server says until it closes.
    fn reply(&mut self, peer: &mut Peer) -> String {
        while !peer.is_at_end() {
            // vCPUs answer, and the timer looks whether they have.
            std::thread::sleep(Duration::from_millis(1));
            self.turn();
        }
        String::from_utf8(std::mem::take(&mut peer.got)).unwrap()
    }

    fn ask(&mut self, request: &[u8]) -> String {
        let mut peer = self.connect();
        self.say(&mut peer, request);
        self.reply(&mut peer)
    }

    /// The vCPUs do not answer what they were asked for.
    fn have_vcpus_silent(&mut self) {
        let server = self.server();
        for seat in server.vm.roster.taken() {
            // They look into their mailboxes when they are kicked, and nobody does.
            seat.mailbox().ask_view(u64::MAX);
        }
        (server.text, server.look) = (None, Some((u64::MAX, far())));
    }

    /// What is under way has no more time.
    fn have_time_over(&mut self) {
        for connection in self.server().connections.values_mut() {
            connection.until = Instant::now();
        }
    }
}

/// Later than any test.
fn far() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

struct Peer {
    stream: UnixStream,
    got: Vec<u8>,
}

impl Peer {
    /// Fetches what has come. Whether nothing more will.
    fn is_at_end(&mut self) -> bool {
        let mut chunk = [0; 4096];
        loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => return true,
                Ok(n) => self.got.extend_from_slice(&chunk[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return false,
                // The server closed while it had not read all.
                Err(_) => return true,
            }
        }
    }
}

const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n";

fn body(reply: &str) -> &str {
    let (head, body) = reply.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    assert!(
        head.contains(&format!("Content-Length: {}\r\n", body.len())),
        "{head}"
    );
    body
}

/// A request may come in any pieces, and is answered when its last byte is there: with the counts of both
/// vCPUs. HEAD has the same head and no more.
#[test]
fn a_scrape_may_come_in_any_pieces() {
    let Some(mut served) = Scraped::new() else { return };
    let mut peer = served.connect();
    for byte in &GET[..GET.len() - 1] {
        served.say(&mut peer, &[*byte]);
    }
    assert!(
        !peer.is_at_end() && peer.got.is_empty(),
        "the last byte is not there"
    );
    assert!(served.server().look.is_none(), "nor is a vCPU asked before");
    served.say(&mut peer, &GET[GET.len() - 1..]);
    let reply = served.reply(&mut peer);
    let text = body(&reply);
    assert!(text.ends_with("# EOF\n"), "{text}");
    for vcpu in 0..2 {
        assert!(text.contains(&format!("vcpu=\"{vcpu}\"")), "{text}");
    }
    let head_only = served.ask(b"HEAD /metrics HTTP/1.1\r\n\r\n");
    assert!(head_only.starts_with("HTTP/1.1 200 OK\r\n") && head_only.ends_with("\r\n\r\n"));
}

/// What is not served is answered with why, is counted, and ends its connection.
#[test]
fn each_refusal_is_an_answer_and_is_counted() {
    let Some(mut served) = Scraped::new() else { return };
    let endless = [b"GET /metrics HTTP/1.1\r\na: ".to_vec(), vec![b'b'; 2 * MAX_HEAD]].concat();
    let fields = [
        b"GET /metrics HTTP/1.1\r\n".to_vec(),
        b"a: b\r\n".repeat(65),
        b"\r\n".to_vec(),
    ]
    .concat();
    let refused: [(&[u8], &str); 7] = [
        (b"GET / HTTP/1.1\r\n\r\n", "404 "),
        (b"GET /metrics/ HTTP/1.1\r\n\r\n", "404 "),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", "405 "),
        (b"\x16\x03\x01\x02\x00", "400 "),
        (b"GET\r\n\r\n", "400 "),
        (&endless, "431 "),
        (&fields, "431 "),
    ];
    for (n, (request, status)) in (1..).zip(refused) {
        let text = String::from_utf8_lossy(&request[..request.len().min(40)]).into_owned();
        let reply = served.ask(request);
        assert!(
            reply.starts_with(&format!("HTTP/1.1 {status}")),
            "{text}: {reply}"
        );
        assert!(reply.contains("Connection: close\r\n"), "{text}: {reply}");
        assert_eq!(served.server().refused, n, "{text}");
    }
    // They say nothing more, and so are not kept.
    served.turn();
    assert_eq!(served.server().connections.len(), 0);
    let reply = served.ask(GET);
    assert!(body(&reply).contains("refused"), "{reply}");
    assert_eq!(served.server().scrapes, 1, "no refusal is a scrape");
}

/// Of a request's head no more is kept than the bound, whatever comes at once.
#[test]
fn of_a_head_no_more_is_kept_than_its_bound() {
    let Some(mut served) = Scraped::new() else { return };
    let mut peer = served.connect();
    let begin = b"GET /metrics HTTP/1.1\r\na: ";
    served.say(&mut peer, begin);
    served.say(&mut peer, &vec![b'b'; MAX_HEAD - begin.len() - 1]);
    let connection = served.server().connections.values().next().unwrap();
    let State::Head(head) = &connection.state else {
        panic!("{connection:?}");
    };
    assert_eq!(head.len(), MAX_HEAD - 1, "one byte is left");
    // The request would end there, and that is too late.
    served.say(&mut peer, b"b\r\n\r\n");
    assert!(served.reply(&mut peer).starts_with("HTTP/1.1 431 "));
}

/// Who says nothing makes room for who comes, the one that has been there longest first.
#[test]
fn the_oldest_that_has_not_asked_makes_room() {
    let Some(mut served) = Scraped::new() else { return };
    let mut silent: Vec<Peer> = (0..MAX_CONNECTIONS).map(|_| served.connect()).collect();
    // Each was there before the next.
    for (id, connection) in &mut served.server().connections {
        connection.until = far() + Duration::from_secs(u64::from(*id));
    }
    for n in 0..3 {
        let mut peer = served.connect();
        let gone: Vec<bool> = silent.iter_mut().map(Peer::is_at_end).collect();
        assert!(
            gone[..=n].iter().all(|gone| *gone) && !gone[n + 1..].contains(&true),
            "{gone:?}"
        );
        served.say(&mut peer, GET);
        assert!(body(&served.reply(&mut peer)).ends_with("# EOF\n"));
        // Its place is free now; another takes it.
        drop(peer);
        served.turn();
        silent.push(served.connect());
        let newest = served.server().next - 1;
        served.server().connections.get_mut(&newest).unwrap().until = far() + Duration::from_secs(7200);
        assert_eq!(served.server().connections.len(), MAX_CONNECTIONS);
    }
}

/// Those that wait for the vCPUs' answer are not pushed out: a flood of connections does not keep a scrape
/// from its reply.
#[test]
fn who_waits_for_its_reply_is_not_pushed_out() {
    let Some(mut served) = Scraped::new() else { return };
    served.have_vcpus_silent();
    let mut waiting = Vec::new();
    for _ in 0..MAX_CONNECTIONS {
        let mut peer = served.connect();
        served.say(&mut peer, GET);
        waiting.push(peer);
    }
    for connection in served.server().connections.values_mut() {
        assert!(matches!(connection.state, State::Waits { .. }), "{connection:?}");
        connection.until = far();
    }
    let mut late = served.connect();
    assert!(late.is_at_end() && late.got.is_empty());
    assert!(!waiting.iter_mut().any(Peer::is_at_end));
    // One that goes makes room, although nothing is read of those that wait.
    drop(waiting.pop());
    served.turn();
    let mut next = served.connect();
    assert!(!next.is_at_end());
    assert_eq!(served.server().connections.len(), MAX_CONNECTIONS);
    // vCPUs that do not answer are waited for no longer than that: all get what there is.
    served.server().look = Some((u64::MAX, Instant::now()));
    for peer in &mut waiting {
        assert!(body(&served.reply(peer)).ends_with("# EOF\n"));
    }
}

/// A request that does not come in its time is told so, and one that has not begun is dropped; neither is
/// kept. A reply that nobody fetches is dropped with its connection.
#[test]
fn what_takes_too_long_is_ended() {
    let Some(mut served) = Scraped::new() else { return };
    let (mut begun, mut silent, mut deaf) = (served.connect(), served.connect(), served.connect());
    served.say(&mut begun, b"GET /met");
    served.say(&mut deaf, b"GET /metrics");
    let id = served.server().next - 1;
    let state = State::Reply {
        bytes: vec![b'x'; 8 << 20],
        sent: 0,
    };
    served.server().connections.get_mut(&id).unwrap().state = state;
    served.say(&mut deaf, b" ");
    let there = |served: &mut Scraped| served.server().connections.len();
    assert_eq!(there(&mut served), 3, "all have time");
    served.have_time_over();
    assert!(served.reply(&mut begun).starts_with("HTTP/1.1 408 "));
    assert_eq!(served.reply(&mut silent), "");
    let part = served.reply(&mut deaf);
    assert!(!part.is_empty() && part.len() < 8 << 20, "{} bytes", part.len());
    drop((begun, silent, deaf));
    served.turn();
    assert_eq!(there(&mut served), 0);
}

/// A client that goes on sending behind its request is read, so that its reply is not lost to a reset, and
/// not for ever.
#[test]
fn what_is_sent_behind_a_request_is_read_up_to_a_bound() {
    let Some(mut served) = Scraped::new() else { return };
    let mut peer = served.connect();
    served.say(&mut peer, GET);
    let reply = served.reply(&mut peer);
    assert!(body(&reply).ends_with("# EOF\n"));
    for connection in served.server().connections.values_mut() {
        connection.until = far();
    }
    served.say(&mut peer, &vec![b'x'; LINGER_BYTES]);
    assert_eq!(served.server().connections.len(), 1, "as much as may be");
    served.say(&mut peer, b"x");
    assert_eq!(served.server().connections.len(), 0);
}

/// Scrapes within a moment get one text, and the vCPUs are asked once; an old text is made anew.
#[test]
fn scrapes_within_a_moment_share_what_the_vcpus_said() {
    let Some(mut served) = Scraped::new() else { return };
    served.server().text = Some((far(), "shared 1\n# EOF\n".into()));
    for _ in 0..3 {
        assert_eq!(body(&served.ask(GET)), "shared 1\n# EOF\n");
    }
    assert_eq!(served.server().scrapes, 3);
    assert_eq!(
        served
            .server()
            .vm
            .looks
            .load(std::sync::atomic::Ordering::Relaxed),
        1,
        "the test's own"
    );
    let Some(old) = Instant::now().checked_sub(FRESH) else {
        return;
    };
    served.server().text = Some((old, "shared 1\n# EOF\n".into()));
    assert!(!served.ask(GET).contains("shared 1"));
}

/// Whatever several clients send, in whatever order, and whoever goes, a scrape is served behind it.
#[test]
fn no_bytes_of_clients_keep_a_scrape_from_its_reply() {
    let Some(served) = Scraped::new() else { return };
    let piece = prop_oneof![
        Just(GET.to_vec()),
        Just(b"\r\n\r\n".to_vec()),
        Just(b"HEAD /metrics HTTP/1.1\r\n".to_vec()),
        Just(vec![b'a'; 5000]),
        Just(vec![0]),
        prop::collection::vec(any::<u8>(), 0..40),
    ];
    // Which client, what it sends, whether it goes then.
    let steps = prop::collection::vec((0usize..4, piece, prop::bool::weighted(0.1)), 1..40);
    let served = RefCell::new(served);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(32));
    let ran = runner.run(&steps, |steps| {
        let served = &mut *served.borrow_mut();
        let mut clients: [Option<Peer>; 4] = Default::default();
        for (n, bytes, goes) in steps {
            let mut peer = clients[n].take().unwrap_or_else(|| served.connect());
            served.say(&mut peer, &bytes);
            clients[n] = Some(peer).filter(|_| !goes);
            for connection in served.server().connections.values() {
                if let State::Head(head) = &connection.state {
                    prop_assert!(head.len() <= MAX_HEAD);
                }
            }
        }
        prop_assert!(body(&served.ask(GET)).ends_with("# EOF\n"));
        drop(clients);
        while !served.server().connections.is_empty() {
            served.turn();
        }
        Ok(())
    });
    ran.unwrap();
}
