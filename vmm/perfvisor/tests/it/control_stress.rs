//! A thousand clients at once at the control socket, who connect, stall, stop reading and die: the VM runs
//! on, its operator is served, and nothing is left of them.

use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::operator::{TestVm, value_of};
use crate::common::test_lock;
use crate::common::vm::eventually;
use control_api::client::Client;
use control_api::protocol::{Opened, VmState};
use control_api::request;

/// Clients that are there at the same time.
const CLIENTS: usize = 1000;
/// Threads that bring them.
const CONNECTORS: usize = 10;
const HELLO: &[u8] = b"{\"id\":1,\"call\":\"hello\",\"protocol\":1}\n";

/// What client `n` does before it stands there. Whatever the VM closes in its face is no fault.
fn behave(n: usize, stream: &mut UnixStream) {
    let wait = Some(Duration::from_millis(20));
    stream.set_write_timeout(wait).unwrap();
    let _ = match n % 5 {
        // Says nothing.
        0 => Ok(()),
        // Stalls in the middle of a request.
        1 => stream.write_all(&HELLO[..20]),
        // Greets, and stalls.
        2 => stream.write_all(HELLO),
        // Asks, and does not read.
        3 => stream
            .write_all(HELLO)
            .and_then(|()| stream.write_all("{\"id\":2,\"call\":\"status\"}\n".repeat(500).as_bytes())),
        // Speaks of something else.
        _ => stream.write_all(&[0xff; 3000]),
    };
}

#[test]
fn a_thousand_clients_at_once_keep_nobody_out_and_leave_nothing() {
    // A thousand clients load all CPUs.
    let _lock = test_lock::exclusive();
    let Some(vm) = TestVm::spinning(2) else { return };
    let most = perfvisor_vmm::privileges::raise_descriptor_limit();
    if most.is_some_and(|most| most < 2 * CLIENTS as u64) {
        return eprintln!("SKIP: this test may have {most:?} descriptors only");
    }
    let path = vm.sockets().join("test.sock");
    // Its first buffers come with its first clients.
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
                        behave(n / CONNECTORS, &mut stream);
                        clients.lock().unwrap().push(stream);
                    }
                })
            })
            .collect();
        // Those who count something and die meanwhile.
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let Ok(mut client) = Client::connect_in(&vm.sockets(), Some("test")) else {
                    continue;
                };
                let opened: Result<Vec<Opened>, _> = client.call(request::Open {
                    events: "cycles,page-faults".into(),
                    vcpus: None,
                    whole: false,
                    sampling: None,
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
        // The operator comes once at least while all of them stand there.
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
    let said = vm.vm.said();
    assert!(said.len() < 200, "{} lines: {:?}", said.len(), &said[..20]);
    assert!(!said.iter().any(|line| line.contains("panicked")), "{said:?}");
}
