//! Connections to the control socket at the start of a VM and at the connection limit.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};

use crate::common::operator::{TestVm, value_of};
use crate::common::test_lock;
use crate::common::vm::{PROGRAM, eventually, has_kvm};
use control_api::client::Client;
use control_api::protocol::OpenedEvent;
use control_api::request;

/// Maximum number of client connections that a VM accepts.
const ROOM: usize = 32;

/// A client that connects before the VM is complete can count all vCPUs with its first request,
/// even if the threads of the vCPUs have not started.
#[test]
fn first_client_counts_every_vcpu() {
    if !has_kvm() {
        return;
    }
    let _lock = test_lock::shared();
    let runtime = tempfile::tempdir().unwrap();
    let mut vm = Command::new(PROGRAM)
        .args([
            "run",
            "--name",
            "first",
            "--memory",
            "32M",
            "--cpus",
            "64",
            "--cmdline",
            "loop",
        ])
        .env("XDG_RUNTIME_DIR", runtime.path())
        .env_remove("RUST_LOG")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let socket = runtime.path().join("perfvisor/first.sock");
    let stream = loop {
        if let Ok(stream) = UnixStream::connect(&socket) {
            break stream;
        }
        assert!(vm.try_wait().unwrap().is_none(), "the VM has exited");
        std::thread::yield_now();
    };
    let mut client = Client::from_stream(stream).unwrap();
    let opened: Result<Vec<OpenedEvent>, _> = client.call(request::Open {
        events: "cycles".into(),
        ..Default::default()
    });
    vm.kill().unwrap();
    vm.wait().unwrap();
    assert_eq!(opened.unwrap().len(), 64);
}

/// A client above the connection limit receives an error, which the commands report. A client that
/// has sent no greeting is disconnected in favor of a new one, and receives an error, too.
#[test]
fn client_above_connection_limit_is_refused() {
    let Some(vm) = TestVm::spinning(1) else { return };
    let line_of = |stream: UnixStream| {
        let mut line = String::new();
        // Ignore a reset of the connection after the line.
        let _ = BufReader::new(stream).read_line(&mut line);
        assert!(line.ends_with('\n'), "{line:?}");
        value_of(&line)["error"].clone()
    };
    let silent = vm.raw();
    let clients: Vec<Client> = (0..ROOM).map(|_| vm.client()).collect();
    let told = line_of(silent);
    assert_eq!(told["kind"], "limit", "{told}");
    assert!(
        told["message"].as_str().unwrap().contains("sent no hello"),
        "{told}"
    );

    for says_hello in [false, true] {
        let mut stream = vm.raw();
        if says_hello {
            // Ignore the error if the VM has already closed the connection.
            let _ = stream.write_all(b"{\"id\":1,\"call\":\"hello\",\"protocol\":1}\n");
        }
        let told = line_of(stream);
        assert_eq!(told["kind"], "limit", "{told}");
        assert!(
            told["message"]
                .as_str()
                .unwrap()
                .contains("the limit of 32 connections is reached"),
            "{told}"
        );
    }
    for args in [
        &["stat", "test", "-d", "0.1"][..],
        &["ctl", "test", "status"],
        &["record", "test"],
    ] {
        let out = vm.run(args);
        let said = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(2), "{args:?}: {said}");
        assert!(
            said.contains("the limit of 32 connections is reached") && said.lines().count() == 1,
            "{args:?}: {said}"
        );
    }
    drop(clients);
    eventually("there is room again", || {
        let out = vm.run(&["stat", "test", "-d", "0.1", "-e", "task-clock"]);
        out.status.success()
    });
}
