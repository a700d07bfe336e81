//! A shared directory whose back end is somebody else's (`--share-dir socket=`) and dies, in a VM that has
//! shut itself in: namespaces and a root of its own, landlock, filters. Another back end at the same path is
//! found, and gets the queues where the first left them. The VM is a process of its own: this test program,
//! started again for one test. The back end is the test.

use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::child::child_command;
use sandbox::{Confinement, Counting, Files, Inside, JailError, LastWill, Mode, SocketBroker};
use virtio_devices::device::{Activation, ActiveQueue, ConfigChange, Interrupt, LastResort, VirtioDevice};
use virtio_devices::share::Share;
use virtio_devices::share::config::Source;
use virtio_devices::share::keeper::Program;
use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, FileOffset, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// Where the back end listens, for the child.
const SOCKET: &str = "SHARE_TEST_SOCKET";
/// Said by the child: the device runs, or the ring is as it was told.
const READY: &str = "the device has it";
/// Said by a child that may have no jail.
const NO_JAIL: &str = "no jail here";
const MEMORY: usize = 1 << 20;
const QUEUE_BYTES: u64 = 0x1_0000;
/// Of a queue's place.
const USED: u64 = 0x3000;

/// Requests of vhost-user, by their numbers in its specification.
const GET_FEATURES: u32 = 1;
const SET_VRING_BASE: u32 = 10;
const GET_PROTOCOL_FEATURES: u32 = 15;
const SET_VRING_ENABLE: u32 = 18;
/// VERSION_1, PROTOCOL_FEATURES, EVENT_IDX, INDIRECT_DESC.
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
        interrupt: Interrupt::default(),
    }
}

fn say(line: &str) {
    // The test program has begun a line.
    println!("\n{line}");
    io::stdout().flush().unwrap();
}

#[test]
#[ignore = "a child of the test below"]
fn as_a_child() {
    let socket = PathBuf::from(std::env::var_os(SOCKET).unwrap());
    // The threads of the VM may not connect.
    let confinement = Confinement {
        seccomp: Mode::On,
        landlock: sandbox::has_landlock(),
    };
    let broker = SocketBroker::start(confinement, || true).unwrap();
    let will = LastWill {
        first: || {},
        log: None,
        status: 8,
    };
    sandbox::begin(Mode::On, Counting::Broker, will).unwrap();
    if sandbox::has_landlock() {
        sandbox::begin_files().unwrap();
    }
    let source = Source::Socket(socket);
    // Nobody is started: the back end is there.
    let keeper = Program {
        words: Vec::new(),
        log: None,
    };
    let mut share = Share::new(
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

    // As perfvisor does it, before the guest runs.
    let jail = match sandbox::separate() {
        Err(JailError::NoUserNamespace(_)) => return say(NO_JAIL),
        jail => jail.unwrap(),
    };
    broker.seal().unwrap();
    jail.close(&Inside::default()).unwrap();
    assert!(!Path::new("/etc").exists());
    sandbox::only_files(&Files::default()).unwrap();
    sandbox::confine().unwrap();

    let activation = Activation {
        memory: memory.clone(),
        features: FEATURES,
        queues: vec![Some(queue(0)), Some(queue(1))],
        config_change: ConfigChange::default(),
        last_resort: LastResort::default(),
    };
    share.activate(activation).unwrap();
    say(READY);
    // How many requests of the second queue have an answer, as the back end would write it.
    for line in io::stdin().lines() {
        let answered: u16 = line.unwrap().parse().unwrap();
        let at = GuestAddress(QUEUE_BYTES + USED + 2);
        memory.write_obj(answered, at).unwrap();
        say(READY);
    }
    share.reset();
}

/// Waits for the VM to connect.
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

/// Answers as a back end does, until it has both queues: with which request each begins.
/// `None`: the VM is gone before.
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
        // Version 1, and that it is an answer.
        let header = [request, 0x5, 8].map(u32::to_le_bytes).concat();
        stream
            .write_all(&[header, answer.to_le_bytes().to_vec()].concat())
            .unwrap();
    }
    Some(bases)
}

#[test]
fn a_back_end_that_dies_and_comes_back_is_found_from_inside_a_jail() {
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

    // Seven requests have an answer. Then it dies, its socket too, and another is started at that path.
    stdin.write_all(b"7\n").unwrap();
    assert!(lines.any(|line| line == READY));
    drop((first, listener));
    std::fs::remove_file(&socket).unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    let mut second = connected(&listener, &mut vm);
    assert_eq!(takes_the_queues(&mut second), Some([0, 7]));

    // And once more, with nobody there for a try or two.
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
