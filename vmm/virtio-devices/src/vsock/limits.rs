//! Tests of the vsock device at its limits: no free file descriptors, concurrent VMs, and broken
//! rings.

use std::io::{Read, Write};
use std::sync::Barrier;

use event_manager::{EventManager, SubscriberOps};
use nix::sys::resource::{Resource, getrlimit, setrlimit};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::rings::assert_invalid_request_is_disconnected;
use super::*;
use crate::device::ActiveQueue;
use crate::serve::testing::{Driver, activation, memory};

/// Returns the device's side of the same queue, with a separate kick eventfd.
fn other(driver: &Driver<'_>) -> ActiveQueue {
    ActiveQueue {
        kick: Arc::new(EventFd::new(EFD_NONBLOCK).unwrap()),
        ..driver.active()
    }
}

#[test]
fn broken_ring_requests_reset() {
    let directory = tempfile::tempdir().unwrap();
    let mut device = VsockDevice::new(3, &directory.path().join("v")).unwrap();
    let memory = memory();
    let driver = Driver::new(&memory, 16);
    let queues = vec![Some(other(&driver)), Some(driver.active()), None];
    let (activation, seen) = activation(&memory, queues);
    device.activate(activation).unwrap();
    assert_invalid_request_is_disconnected(&directory.path().join("v"));
    assert!(!seen.needs_reset());
    // Break the ring: the available index exceeds the queue size.
    driver.mock.avail().idx().store(100u16.to_le());
    driver.kick();
    seen.changed.read().unwrap();
    assert!(seen.needs_reset());
    driver.kick();
    device.reset();
}

/// If two VMs start with the same vsock path, where a terminated VM has left its socket, exactly
/// one of them gets the path.
#[test]
fn stale_socket_path_is_taken_by_one_vm() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("v");
    for round in 0..200 {
        drop(UnixListener::bind(&path).unwrap());
        let start = Barrier::new(3);
        let devices: Vec<_> = std::thread::scope(|scope| {
            let wants = [(); 3].map(|()| {
                scope.spawn(|| {
                    start.wait();
                    VsockDevice::new(3, &path)
                })
            });
            wants.map(|want| want.join().unwrap()).into()
        });
        let got = devices.iter().filter(|device| device.is_ok()).count();
        assert_eq!(got, 1, "round {round}");
        assert!(
            devices
                .iter()
                .all(|device| matches!(device, Ok(_) | Err(VsockError::Taken(_)))),
            "{devices:?}"
        );
        UnixStream::connect(&path).expect("the socket is that of the one who got it");
        drop(devices);
        assert!(!path.exists());
    }
}

#[test]
fn locked_directory_is_reported() {
    let directory = tempfile::tempdir().unwrap();
    let other = File::open(directory.path()).unwrap();
    let _other = Flock::lock(other, FlockArg::LockExclusive).unwrap();
    let error = VsockDevice::new(3, &directory.path().join("v")).unwrap_err();
    assert!(matches!(error, VsockError::Locked(_)), "{error}");
}

/// The device's thread does not spin if no file descriptors are free. The test runs in a separate
/// process, because the limit on file descriptors is per process.
#[test]
fn descriptor_exhaustion_does_not_spin() {
    let test = "vsock::limits::without_descriptors";
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    let output = command
        .args(["--exact", test, "--ignored", "--nocapture"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "run by the test above, in a process of its own"]
fn without_descriptors() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("v");
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let memory = memory();
    let driver = Driver::new(&memory, 16);
    let timer = TimerFd::new().unwrap();
    let muxer = ConnectionMuxer::new(3, path.clone(), FIRST_TOKEN);
    let queues = VsockQueues::new(
        memory.clone(),
        other(&driver),
        driver.active(),
        Arc::new(listener),
        muxer,
        timer,
    );
    let mut manager = EventManager::new().unwrap();
    manager.add_subscriber(queues);
    let mut program = UnixStream::connect(&path).unwrap();
    program.write_all(b"nonsense\n").unwrap();

    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    // Set the limit to the lowest free descriptor number, so that no descriptor can be opened.
    let lowest = File::open("/dev/null").unwrap();
    let limit = u64::try_from(std::os::fd::AsRawFd::as_raw_fd(&lowest)).unwrap();
    drop(lowest);
    setrlimit(Resource::RLIMIT_NOFILE, limit, hard).unwrap();
    let events: usize = (0..1000).map(|_| manager.run_with_timeout(0).unwrap()).sum();
    assert!(
        (1..20).contains(&events),
        "{events} events for one program that waits"
    );

    // The pending connection is accepted once descriptors are available.
    setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
    program.set_nonblocking(true).unwrap();
    loop {
        manager.run_with_timeout(100).unwrap();
        match program.read(&mut [0]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            // The request is invalid, so the connection is closed.
            Ok(0) | Err(_) => break,
            Ok(_) => panic!("an answer to nonsense"),
        }
    }
}
