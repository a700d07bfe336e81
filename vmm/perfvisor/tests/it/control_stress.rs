//! One thousand concurrent clients of the control socket that connect, stall, stop reading and die.
//! The VM continues, serves its operator, and releases all resources of the clients.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::operator::{TestVm, value_of};
use crate::common::test_lock;
use crate::common::vm::eventually;
use control_api::client::Client;
use control_api::protocol::{OpenedEvent, VmState};
use control_api::request;

/// Number of concurrent clients.
const CLIENTS: usize = 1000;
/// Number of threads that connect the clients.
const CONNECTORS: usize = 10;
const HELLO: &[u8] = b"{\"id\":1,\"call\":\"hello\",\"protocol\":1}\n";

/// Sends the invalid or incomplete data of client number `n`. Errors due to a closed connection are
/// ignored.
fn misbehave(n: usize, stream: &mut UnixStream) {
    let wait = Some(Duration::from_millis(20));
    stream.set_write_timeout(wait).unwrap();
    let _ = match n % 5 {
        // Client that sends nothing.
        0 => Ok(()),
        // Client that stalls within a request.
        1 => stream.write_all(&HELLO[..20]),
        // Client that sends a greeting and stalls.
        2 => stream.write_all(HELLO),
        // Client that sends requests and does not read the replies.
        3 => stream
            .write_all(HELLO)
            .and_then(|()| stream.write_all("{\"id\":2,\"call\":\"status\"}\n".repeat(500).as_bytes())),
        // Client that sends invalid data.
        _ => stream.write_all(&[0xff; 3000]),
    };
}

#[test]
fn thousand_clients_block_nobody_and_leak_nothing() {
    // A thousand clients load all CPUs.
    let _lock = test_lock::exclusive();
    let Some(vm) = TestVm::spinning(2) else { return };
    let most = sandbox::privileges::raise_descriptor_limit();
    if most.is_some_and(|most| most < 2 * CLIENTS as u64) {
        return eprintln!("SKIP: this test may have {most:?} descriptors only");
    }
    let path = vm.sockets().join("test.sock");
    // The first client causes allocations that remain.
    vm.ps();
    let (before, ran) = (vm.descriptors(), vm.cpu_time());
    let clients: Mutex<Vec<UnixStream>> = Mutex::default();
    let (here, done) = (AtomicBool::new(false), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let connectors: Vec<_> = (0..CONNECTORS)
            .map(|connector| {
                let (path, clients) = (&path, &clients);
                scope.spawn(move || {
                    for n in (connector..CLIENTS).step_by(CONNECTORS) {
                        let mut stream = UnixStream::connect(path).unwrap();
                        misbehave(n / CONNECTORS, &mut stream);
                        clients.lock().unwrap().push(stream);
                    }
                })
            })
            .collect();
        // Clients that count events and die at the same time.
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let Ok(mut client) = Client::connect_in(&vm.sockets(), Some("test")) else {
                    continue;
                };
                let opened: Result<Vec<OpenedEvent>, _> = client.call(request::Open {
                    events: "cycles,page-faults".into(),
                    ..Default::default()
                });
                drop((opened, client));
            }
        });
        scope.spawn(|| {
            for connector in connectors {
                connector.join().unwrap();
            }
            here.store(true, Ordering::Relaxed);
        });
        // The operator connects at least once while all clients are connected.
        loop {
            let all = here.load(Ordering::Relaxed);
            eventually("ps shows that it runs", || {
                let out = vm.run(&["ps", "--json"]);
                let text = String::from_utf8(out.stdout).unwrap();
                out.status.success() && text.lines().count() == 1 && {
                    let state = &value_of(text.lines().next().unwrap())["state"];
                    *state == serde_json::to_value(VmState::Running).unwrap()
                }
            });
            eventually("stat counts", || {
                let out = vm.run(&["stat", "test", "-d", "0.05", "-j", "-e", "task-clock"]);
                let text = String::from_utf8(out.stdout).unwrap();
                out.status.success()
                    && text.lines().next().is_some_and(|line| {
                        let value = value_of(line)["counter-value"].clone();
                        value
                            .as_str()
                            .is_some_and(|value| value.parse::<f64>().is_ok_and(|ms| ms > 0.0))
                    })
            });
            if all {
                break;
            }
        }
        done.store(true, Ordering::Relaxed);
    });
    assert_eq!(clients.lock().unwrap().len(), CLIENTS);
    clients.lock().unwrap().clear();
    eventually("nothing is left of them", || vm.descriptors() <= before);
    assert!(vm.cpu_time() > ran, "the guest ran");
    let said = vm.vm.log_lines();
    assert!(said.len() < 200, "{} lines: {:?}", said.len(), &said[..20]);
    assert!(!said.iter().any(|line| line.contains("panicked")), "{said:?}");
}
