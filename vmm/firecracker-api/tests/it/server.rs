//! Tests of the API server's connections with hostile clients, slow clients, and many clients.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;

use firecracker_api::http::{Request, Response};
use firecracker_api::server::{ApiServer, MAX_CONNECTIONS};

const MAX_BODY: usize = 1000;

/// Server on a separate thread that answers every request with its path and the size of its body.
struct TestServer {
    path: PathBuf,
    _dir: tempfile::TempDir,
    stop: Arc<AtomicBool>,
    /// Highest number of connections that were open at the same time so far.
    most: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl TestServer {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("api");
        let listener = UnixListener::bind(&path).unwrap();
        let mut server = ApiServer::new(Some(listener), MAX_BODY).unwrap();
        let (stop, most) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let (stopped, seen) = (stop.clone(), most.clone());
        let thread = std::thread::spawn(move || {
            let mut answer = |request: &Request| {
                let body = format!("\"{} {}\"", request.path, request.body.len());
                Response {
                    status: 200,
                    body: Some(body),
                }
            };
            while !stopped.load(Ordering::SeqCst) {
                server.turn(&[], &mut answer).unwrap();
                seen.fetch_max(server.connections(), Ordering::SeqCst);
            }
        });
        Self {
            path,
            _dir: dir,
            stop,
            most,
            thread: Some(thread),
        }
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect(&self.path).unwrap()
    }

    /// Sends bytes to the server, and returns all data received until the connection is closed.
    fn exchange(&self, bytes: &[u8]) -> String {
        let mut stream = self.connect();
        // Ignore the error, because the server may close a rejected connection before it has read
        // all data.
        let _ = stream.write_all(bytes);
        let mut text = Vec::new();
        let _ = stream.read_to_end(&mut text);
        String::from_utf8_lossy(&text).into_owned()
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        // Wake the server with a connection.
        let _ = UnixStream::connect(&self.path);
        let ended = self.thread.take().unwrap().join();
        assert!(ended.is_ok() || std::thread::panicking(), "the server panicked");
    }
}

const CLOSE: &str = "Connection: close\r\n";

#[test]
fn pipelined_requests_are_answered_in_order() {
    let server = TestServer::start();
    let requests = "GET /a HTTP/1.1\r\n\r\nPUT /b HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc".repeat(50)
        + &format!("GET /c HTTP/1.1\r\n{CLOSE}\r\n");
    let text = server.exchange(requests.as_bytes());
    assert_eq!(text.matches("HTTP/1.1 200 OK").count(), 101);
    assert!(text.contains("\"/b 3\"") && text.ends_with("\"/c 0\""), "{text}");
    assert!(text.find("\"/a 0\"") < text.find("\"/b 3\""));
}

#[test]
fn malformed_and_large_requests_are_refused_with_a_message() {
    let server = TestServer::start();
    let large = format!("PUT / HTTP/1.1\r\nContent-Length: {}\r\n\r\n", MAX_BODY + 1);
    for (bytes, status) in [
        (&b"\0\0\0\0"[..], 400),
        (b"FLY / HTTP/1.1\r\n\r\n", 400),
        (b"PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (large.as_bytes(), 413),
        (
            &[b"GET / HTTP/1.1\r\na: ", vec![b'a'; 10_000].as_slice()].concat(),
            431,
        ),
    ] {
        let text = server.exchange(bytes);
        assert!(text.starts_with(&format!("HTTP/1.1 {status} ")), "{text}");
        assert!(text.contains("fault_message"), "{text}");
    }
}

#[test]
fn client_that_expects_continue_gets_it() {
    let server = TestServer::start();
    let mut stream = server.connect();
    let head = format!("PUT /x HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 2\r\n{CLOSE}\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    let mut interim = [0; 25];
    stream.read_exact(&mut interim).unwrap();
    assert_eq!(&interim, b"HTTP/1.1 100 Continue\r\n\r\n");
    stream.write_all(b"{}").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert!(text.ends_with("\"/x 2\""), "{text}");
}

/// Clients that send single bytes, or nothing, do not delay another client.
#[test]
fn slow_clients_delay_nobody() {
    let server = TestServer::start();
    let mut slow: Vec<UnixStream> = (0..MAX_CONNECTIONS / 2).map(|_| server.connect()).collect();
    let request = format!("GET /fast HTTP/1.1\r\n{CLOSE}\r\n");
    for byte in "GET /slow HTTP/1.1\r\n".bytes() {
        for stream in &mut slow {
            stream.write_all(&[byte]).unwrap();
        }
        assert!(server.exchange(request.as_bytes()).ends_with("\"/fast 0\""));
    }
    for mut stream in slow {
        stream.write_all(format!("{CLOSE}\r\n").as_bytes()).unwrap();
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        assert!(text.ends_with("\"/slow 0\""), "{text}");
    }
}

/// When a thousand idle connections are opened, new connections replace old ones. The number of
/// open connections is therefore bounded, and a client that sends a request receives its response.
#[test]
fn thousand_connections_are_bounded() {
    let server = TestServer::start();
    let mut idle = Vec::new();
    for _ in 0..1000 {
        idle.push(server.connect());
    }
    let text = server.exchange(format!("GET /last HTTP/1.1\r\n{CLOSE}\r\n").as_bytes());
    assert!(text.ends_with("\"/last 0\""), "{text}");
    assert!(server.most.load(Ordering::SeqCst) <= MAX_CONNECTIONS);
}

/// For a client that does not read its responses, the server buffers only one response.
#[test]
fn client_that_never_reads_is_not_served_further() {
    let server = TestServer::start();
    let mut silent = server.connect();
    silent.set_nonblocking(true).unwrap();
    let requests = "GET /x HTTP/1.1\r\n\r\n".repeat(200);
    let mut sent = 0;
    // The socket buffers of both directions fill up, and the server stops reading.
    for _ in 0..5000 {
        match silent.write(requests.as_bytes()) {
            Ok(count) => sent += count,
            Err(e) => {
                assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock);
                break;
            }
        }
    }
    assert!(sent < 5000 * requests.len(), "the server reads without end");
    let text = server.exchange(format!("GET /other HTTP/1.1\r\n{CLOSE}\r\n").as_bytes());
    assert!(text.ends_with("\"/other 0\""), "{text}");
}
