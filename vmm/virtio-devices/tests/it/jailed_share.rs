//! Tests that a confined VM (namespaces, own root, landlock, seccomp) reconnects to an external
//! backend of a shared directory (`--share-dir socket=`).
//!
//! When the first backend exits, a new backend at the same path receives the queues at the position
//! where the first one stopped. The VM is a child process that runs this test program again, and
//! the test acts as the backend.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::Duration;

use sandbox::{
    AccessibleFiles, JailContents, JailError, PerfEventAccess, ProcessConfinement, SeccompMode,
    SeccompTerminationActions, SocketBroker,
};
use test_support::child::child_command;
use virtio_devices::device::{
    ActiveQueue, ConfigChangeNotifier, DeviceActivation, DeviceFailureCallback, DeviceInterrupt, VirtioDevice,
};
use virtio_devices::share::FsDevice;
use virtio_devices::share::config::ShareBackendSource;
use virtio_devices::share::keeper::BackendKeeperCommand;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Environment variable with the path of the backend's socket, for the child process.
const SOCKET: &str = "SHARE_TEST_SOCKET";
/// Line that the child process prints when the device is active, and after each update of the used
/// ring.
const READY: &str = "the device has it";
/// Line that the child process prints if it cannot create a jail.
const NO_JAIL: &str = "no jail here";
const MEMORY: usize = 1 << 20;
const QUEUE_BYTES: u64 = 0x1_0000;
/// Offset of the used ring from the start of a queue, in bytes.
const USED: u64 = 0x3000;

// Numbers of vhost-user requests.
const GET_FEATURES: u32 = 1;
const SET_VRING_BASE: u32 = 10;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_VRING_ENABLE: u32 = 18;
/// Feature bits that the test's backend offers: VERSION_1, PROTOCOL_FEATURES, EVENT_IDX,
/// INDIRECT_DESC.
const FEATURES: u64 = 1 << 32 | 1 << 30 | 1 << 29 | 1 << 28;

fn queue(number: u64) -> ActiveQueue {
    let mut queue = Queue::new(1024).unwrap();
    queue.set_size(16);
    let place = |at: u64| Some(u32::try_from(number * QUEUE_BYTES + at).unwrap());
    queue.set_desc_table_address(place(0x1000), Some(0));
    queue.set_avail_ring_address(place(0x2000), Some(0));
    queue.set_used_ring_address(place(USED), Some(0));
    queue.set_ready(true);
    ActiveQueue {
        queue,
        kick: Arc::new(EventFd::new(EFD_NONBLOCK).unwrap()),
        interrupt: DeviceInterrupt::default(),
    }
}

fn say(line: &str) {
    // The test harness has printed an incomplete line, so start a new one.
    println!("\n{line}");
    io::stdout().flush().unwrap();
}

#[test]
#[ignore = "a child of the test below"]
fn as_a_child() {
    let socket = PathBuf::from(std::env::var_os(SOCKET).unwrap());
    // VM threads may not connect to sockets.
    let confinement = ProcessConfinement {
        seccomp: SeccompMode::On,
        landlock: sandbox::has_landlock(),
    };
    let broker = SocketBroker::start(confinement, || true).unwrap();
    let will = SeccompTerminationActions {
        first: || {},
        log: None,
        status: 8,
    };
    sandbox::begin(SeccompMode::On, PerfEventAccess::Broker, will).unwrap();
    if sandbox::has_landlock() {
        sandbox::begin_files().unwrap();
    }
    let source = ShareBackendSource::Socket(socket);
    // The backend is external, so no program is started.
    let keeper = BackendKeeperCommand {
        words: Vec::new(),
        log: None,
    };
    let mut share = FsDevice::new(
        "share0".into(),
        "tag".into(),
        &source,
        Path::new("unused"),
        &keeper,
    )
    .unwrap()
    .with_broker(&broker)
    .unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(MEMORY as u64).unwrap();
    let region = (GuestAddress(0), MEMORY, Some(FileOffset::new(file, 0)));
    let memory = GuestMemoryMmap::<()>::from_ranges_with_files([region]).unwrap();

    // Confine the process in the same order as perfvisor does before the guest starts.
    let jail = match sandbox::separate() {
        Err(JailError::NoUserNamespace(_)) => return say(NO_JAIL),
        jail => jail.unwrap(),
    };
    broker.seal().unwrap();
    jail.close(&JailContents::default()).unwrap();
    assert!(!Path::new("/etc").exists());
    sandbox::only_files(&AccessibleFiles::default()).unwrap();
    sandbox::confine().unwrap();

    let activation = DeviceActivation {
        memory: memory.clone(),
        features: FEATURES,
        queues: vec![Some(queue(0)), Some(queue(1))],
        resumed: false,
        config_change: ConfigChangeNotifier::default(),
        fatal_error_callback: DeviceFailureCallback::default(),
    };
    share.activate(activation).unwrap();
    say(READY);
    // Each line is the number of answered requests of the second queue, as the backend would write
    // it.
    for line in io::stdin().lines() {
        let answered: u16 = line.unwrap().parse().unwrap();
        let at = GuestAddress(QUEUE_BYTES + USED + 2);
        memory.write_obj(answered, at).unwrap();
        say(READY);
    }
    share.reset();
}

/// Waits until the VM has connected to the backend's socket.
fn connected(listener: &UnixListener, vm: &mut Child) -> UnixStream {
    listener.set_nonblocking(true).unwrap();
    loop {
        match listener.accept() {
            Ok((stream, _)) => {
                stream.set_nonblocking(false).unwrap();
                return stream;
            }
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(e) => panic!("{e}"),
        }
        let ended = vm.try_wait().unwrap();
        assert!(ended.is_none(), "the VM has ended: {ended:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Acts as the backend until the VM has passed both queues, and returns the base index of each.
/// Returns `None` if the VM exits first.
fn takes_the_queues(stream: &mut UnixStream) -> Option<[u32; 2]> {
    let (mut bases, mut enabled) = ([u32::MAX; 2], 0);
    while enabled < 2 {
        let mut header = [0; 12];
        stream.read_exact(&mut header).ok()?;
        let word = |bytes: &[u8], n: usize| u32::from_le_bytes(bytes[4 * n..4 * n + 4].try_into().unwrap());
        let request = word(&header, 0);
        let mut body = vec![0; word(&header, 2) as usize];
        stream.read_exact(&mut body).ok()?;
        let answer: u64 = match request {
            GET_FEATURES => FEATURES,
            GET_PROTOCOL_FEATURES => 0,
            SET_VRING_BASE => {
                bases[word(&body, 0) as usize] = word(&body, 1);
                continue;
            }
            SET_VRING_ENABLE => {
                enabled += word(&body, 1);
                continue;
            }
            _ => continue,
        };
        // Header flags: protocol version 1 and the reply bit.
        let header = [request, 0x5, 8].map(u32::to_le_bytes).concat();
        stream
            .write_all(&[header, answer.to_le_bytes().to_vec()].concat())
            .unwrap();
    }
    Some(bases)
}

#[test]
fn restarted_backend_is_reached_from_jail() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("back-end.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let mut vm = child_command(module_path!(), SOCKET, &socket)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(vm.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap);
    let mut stdin = vm.stdin.take().unwrap();
    let mut first = connected(&listener, &mut vm);
    let served = std::thread::spawn(move || (takes_the_queues(&mut first), first));
    let said = lines.find(|line| line == READY || line == NO_JAIL);
    if said.as_deref() != Some(READY) {
        let status = vm.wait().unwrap();
        assert!(said.is_some(), "the VM has ended: {status}");
        return eprintln!("SKIP: this user may have no namespaces");
    }
    let (bases, first) = served.join().unwrap();
    assert_eq!(bases, Some([0, 0]), "at first all is before them");

    // Seven requests are answered. Then the backend exits and its socket is removed, and another
    // backend starts at the same path.
    stdin.write_all(b"7\n").unwrap();
    assert!(lines.any(|line| line == READY));
    drop((first, listener));
    std::fs::remove_file(&socket).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    let mut second = connected(&listener, &mut vm);
    assert_eq!(takes_the_queues(&mut second), Some([0, 7]));

    // Repeat with no backend available for one or two attempts.
    drop((second, listener));
    std::fs::remove_file(&socket).unwrap();
    std::thread::sleep(Duration::from_secs(3));
    let listener = UnixListener::bind(&socket).unwrap();
    let mut third = connected(&listener, &mut vm);
    assert_eq!(takes_the_queues(&mut third), Some([0, 7]));
    drop(stdin);
    let status = vm.wait().unwrap();
    assert!(status.success(), "{status}");
}
