//! Tests that a client does not trust its VM.
//!
//! The peer of a control socket may be another program, a VM that dies at any point, or a VM
//! compromised by its guest. For any data from the peer, the client returns one error, uses a
//! bounded amount of memory and descriptors, and does not wait indefinitely.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::thread;

use control_api::client::{Client, ClientError};
use control_api::protocol::{Call, ClientRole, MAX_PROCESS_MEMORY, RequestErrorKind, RequestLine, VmState};
use control_api::request;
use vmm_sys_util::sock_ctrl_msg::ScmSocket;

/// Handshake reply of a VM, with only the required fields.
const HELLO: &str = r#"{"protocol":1,"version":"1","name":"vm","pid":1,"vcpus":1,"pmu":"off","guest":"g","state":"running","parked":0,"uptime_ms":0,"role":"observer"}"#;

/// Receives one request and returns its ID.
fn heard(stream: &UnixStream) -> u64 {
    let mut line = String::new();
    BufReader::with_capacity(1, stream).read_line(&mut line).unwrap();
    serde_json::from_str::<RequestLine>(&line).unwrap().id
}

fn say(mut stream: &UnixStream, line: &str) {
    stream.write_all(format!("{line}\n").as_bytes()).unwrap();
}

/// Creates a client of a simulated VM, which answers the handshake and then runs `vm`.
fn client(vm: impl FnOnce(&UnixStream) + Send + 'static) -> Client {
    let (ours, theirs) = UnixStream::pair().unwrap();
    thread::spawn(move || {
        let id = heard(&theirs);
        say(&theirs, &format!(r#"{{"id":{id},"ok":{HELLO}}}"#));
        vm(&theirs);
    });
    Client::from_stream(ours).unwrap()
}

/// Returns the client's result if the VM answers `request` with `reply`. `ID` in `reply` is
/// replaced by the request's ID.
fn reply_to<R: request::Request>(request: R, reply: &str) -> Result<R::Reply, ClientError> {
    let reply = reply.to_owned();
    let mut client = client(move |stream| {
        let id = heard(stream);
        // The client closes the connection while receiving a reply that is too long.
        let reply = reply.replace("ID", &id.to_string());
        let _ = (&mut &*stream).write_all(format!("{reply}\n").as_bytes());
    });
    client.call(request)
}

fn status(reply: &str) -> Result<String, ClientError> {
    reply_to(request::Status, reply).map(|info| info.name)
}

/// The client accepts the replies of older VMs, which lack new fields. The client ignores
/// additional fields in the replies of newer VMs.
#[test]
fn client_accepts_missing_and_unknown_fields() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    thread::spawn(move || say(&theirs, &format!(r#"{{"id":1,"ok":{HELLO}}}"#)));
    let old = Client::from_stream(ours).unwrap();
    let info = old.info();
    assert_eq!((info.state, info.role), (VmState::Running, ClientRole::Observer));
    assert_eq!((info.max_vcpus, info.console.as_str()), (0, ""));
    assert!(info.threads.is_empty() && info.virtio_console.is_empty());

    let newer = HELLO.replace(r#""parked""#, r#""mood":{"a":[1]},"parked""#);
    let newer = status(&format!(r#"{{"id":ID,"since":"2.0","ok":{newer}}}"#));
    assert_eq!(newer.unwrap(), "vm");
}

/// The client rejects replies with numbers out of range, strings instead of numbers, unknown states
/// or duplicate keys.
#[test]
fn client_rejects_invalid_fields() {
    let with = |from: &str, to: &str| format!(r#"{{"id":ID,"ok":{}}}"#, HELLO.replace(from, to));
    for (from, to) in [
        (r#""vcpus":1"#, r#""vcpus":-1"#),
        (r#""vcpus":1"#, r#""vcpus":4294967296"#),
        (r#""vcpus":1"#, r#""vcpus":1.5"#),
        (r#""vcpus":1"#, r#""vcpus":"1""#),
        (r#""vcpus":1"#, r#""vcpus":null"#),
        (r#""state":"running""#, r#""state":"dancing""#),
        (r#""role":"observer""#, r#""role":"Admin""#),
        (r#""name":"vm""#, r#""name":["vm"]"#),
    ] {
        let error = status(&with(from, to)).unwrap_err();
        assert!(matches!(error, ClientError::Reply("fields")), "{to}: {error:?}");
    }
    for no_reply in [
        r#"{"id":-2,"ok":{}}"#,
        r#"{"id":18446744073709551616,"ok":{}}"#,
        r#"{"id":ID,"id":ID,"ok":{}}"#,
        r#"{"id":ID,"error":{"kind":"whim","message":"no"}}"#,
        r#"{"id":ID,"error":{"kind":"denied"}}"#,
        "[]",
        "",
    ] {
        let error = status(no_reply).unwrap_err();
        assert!(
            matches!(error, ClientError::Reply("not JSON")),
            "{no_reply}: {error:?}"
        );
    }
}

/// A deeply nested reply does not overflow the client's stack.
#[test]
fn client_rejects_deeply_nested_reply() {
    for (open, close) in [("[", "]"), (r#"{"a":"#, "}")] {
        let n = 200_000;
        let deep = format!("{}1{}", open.repeat(n), close.repeat(n));
        let error = reply_to(Call::Counts, &format!(r#"{{"id":ID,"ok":{deep}}}"#)).unwrap_err();
        assert!(matches!(error, ClientError::Reply("not JSON")), "{error:?}");
    }
}

/// An error takes precedence over a result, even if the reply contains no request ID.
#[test]
fn error_takes_precedence_over_result() {
    for id in ["ID", "0"] {
        let both = r#"{"id":#,"ok":{},"error":{"kind":"denied","message":"not yours"}}"#.replace('#', id);
        match status(&both) {
            Err(ClientError::Refused(why)) => {
                assert_eq!(
                    (why.kind, why.message.as_str()),
                    (RequestErrorKind::Denied, "not yours")
                );
            }
            other => panic!("{other:?}"),
        }
    }
}

/// A reply of several megabytes, such as the counts of many events, is accepted.
#[test]
fn long_reply_is_accepted() {
    let name = "n".repeat(8 << 20);
    let reply = reply_to(Call::Counts, &format!(r#"{{"id":ID,"ok":{name:?}}}"#)).unwrap();
    assert_eq!(reply.as_str().map(str::len), Some(name.len()));
}

/// A VM description of several megabytes is rejected before it has been received completely.
#[test]
fn long_vm_description_is_rejected() {
    let described = |length: usize| {
        let name = "n".repeat(length);
        let hello = HELLO.replace(r#""vm""#, &format!("{name:?}"));
        status(&format!(r#"{{"id":ID,"ok":{hello}}}"#))
    };
    assert_eq!(described(32 << 10).unwrap().len(), 32 << 10);
    let error = described(8 << 20).unwrap_err();
    assert!(matches!(error, ClientError::Reply("too long")), "{error:?}");
}

/// The client reports that a VM is gone if the VM dies before the handshake, during a reply or
/// between two replies. All later requests report the same.
#[test]
fn dead_vm_is_reported_as_gone() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let dies = thread::spawn(move || heard(&theirs));
    let error = Client::from_stream(ours).unwrap_err();
    dies.join().unwrap();
    assert!(error.is_gone() && !error.is_silence(), "{error:?}");

    for part in ["", "{", r#"{"id":2,"ok":{"protocol""#] {
        let mut client = client(move |mut stream| {
            heard(stream);
            stream.write_all(part.as_bytes()).unwrap();
        });
        for _ in 0..3 {
            let error = client.call(request::Status).unwrap_err();
            assert!(error.is_gone() && !error.is_silence(), "{part}: {error:?}");
        }
    }
}

/// The client keeps a few unexpected descriptors and closes all others. A request for a descriptor
/// closes the kept ones.
#[test]
fn unexpected_descriptors_are_bounded() {
    const SENT: usize = 200;
    let (ends, ours): (Vec<_>, Vec<_>) = (0..SENT).map(|_| UnixStream::pair().unwrap()).unzip();
    let mut client = client(move |stream| {
        let id = heard(stream);
        for end in ends {
            stream.send_with_fd(&b" "[..], end.as_raw_fd()).unwrap();
        }
        say(stream, &format!(r#"{{"id":{id},"ok":{HELLO}}}"#));
        let id = heard(stream);
        say(stream, &format!(r#"{{"id":{id},"ok":{HELLO}}}"#));
        heard(stream);
    });
    // A read from a socket whose peer is closed in all processes returns end of file.
    let open = || {
        let kept = ours.iter().filter(|end| {
            end.set_nonblocking(true).unwrap();
            (&mut &**end).read(&mut [0]).is_err()
        });
        kept.count()
    };
    client.call(request::Status).unwrap();
    let kept = open();
    assert!((1..=16).contains(&kept), "{kept} of {SENT} are open");
    let error = client.process_memory(1, 0, 16).unwrap_err();
    assert!(!error.is_gone(), "{error:?}");
    assert_eq!(open(), 0, "those of another reply");
}

/// If the VM sends an endless file as process memory, the client reads at most the requested number
/// of bytes, starting at the beginning of the file.
#[test]
fn memory_is_read_up_to_its_limit() {
    let mut client = client(|stream| {
        let mut file: File = tempfile::tempfile().unwrap();
        file.set_len(u64::from(MAX_PROCESS_MEMORY) << 10).unwrap();
        file.write_all(b"first").unwrap();
        file.seek(SeekFrom::End(0)).unwrap();
        let id = heard(stream);
        let reply = format!("{{\"id\":{id},\"ok\":{{\"bytes\":4294967295}}}}\n");
        stream.send_with_fd(reply.as_bytes(), file.as_raw_fd()).unwrap();
        heard(stream);
    });
    let (_, memory) = client.process_memory(1, 0, 64).unwrap();
    assert_eq!(memory.len(), MAX_PROCESS_MEMORY as usize);
    assert_eq!(&memory[..5], b"first");
}

/// A descriptor that is not a regular file, and could be read indefinitely, is rejected
/// immediately.
#[test]
fn non_file_descriptor_is_rejected() {
    let (never, _writes) = UnixStream::pair().unwrap();
    let mut client = client(move |stream| {
        for reply in [r#"{"bytes":1}"#, r#"{"bytes":1,"flat":true,"source":"s"}"#] {
            let id = heard(stream);
            let reply = format!("{{\"id\":{id},\"ok\":{reply}}}\n");
            stream.send_with_fd(reply.as_bytes(), never.as_raw_fd()).unwrap();
        }
        heard(stream);
    });
    let error = client.process_memory(1, 0, 1).unwrap_err();
    assert!(
        matches!(error, ClientError::Io(_)) && !error.is_gone(),
        "{error:?}"
    );
    let error = client.symbols().unwrap_err();
    assert!(
        matches!(error, ClientError::Io(_)) && !error.is_gone(),
        "{error:?}"
    );
}
