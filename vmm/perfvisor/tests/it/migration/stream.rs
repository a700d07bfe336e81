//! A VM that is sent as a byte stream, with `ctl migrate --stream` and with `fd:N` at both ends.

use std::io::Write as _;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use snapshot::stream::{MigrationHello, MigrationMessageReader, MigrationStreamMessage, PREAMBLE, send};

use super::*;
use crate::common::vm::{assert_contains, cpu_time, refusal};

/// Guest code that uses the 1024 pages starting at 4 MiB. Each pass increments the first word of
/// each page if it equals the number of preceding passes. Otherwise the guest terminates the VM
/// with status 85.
const WRITER: [u8; 38] = [
    0xBB, 0x00, 0x00, 0x00, 0x00, // mov ebx, 0
    0xBF, 0x00, 0x00, 0x40, 0x00, // pass: mov edi, 0x400000
    0x39, 0x1F, // page: cmp [edi], ebx
    0x75, 0x13, // jne fail
    0xFF, 0x07, // inc dword [edi]
    0x81, 0xC7, 0x00, 0x10, 0x00, 0x00, // add edi, 4096
    0x81, 0xFF, 0x00, 0x00, 0x80, 0x00, // cmp edi, 0x800000
    0x72, 0xEC, // jb page
    0x43, // inc ebx
    0xEB, 0xE4, // jmp pass
    0xB0, 0x2A, // fail: mov al, 42
    0xE6, 0xF4, // out 0xf4, al
    0xF4, // hlt
];

/// Returns a multiboot kernel that contains `code`.
fn kernel(code: &[u8]) -> Vec<u8> {
    let load = 0x10_0000u32;
    let (magic, flags) = (0x1BAD_B002u32, 0x1_0003u32);
    let sum = 0u32.wrapping_sub(magic).wrapping_sub(flags);
    let header = [magic, flags, sum, load, load, 0, load + 0x1000, load + 32];
    let header = header.iter().flat_map(|word| word.to_le_bytes());
    header.chain(code.iter().copied()).collect()
}

/// Starts a VM named `one` with a guest that continuously writes memory.
fn writer(files: &tempfile::TempDir) -> Option<VmProcess> {
    let path = files.path().join("kernel");
    fs::write(&path, kernel(&WRITER)).unwrap();
    let args = ["--kernel", path.to_str().unwrap(), "--console", "none"];
    let vm = VmProcess::spawn(Command::new(PROGRAM), "one", &args, Stdio::null())?;
    vm.await_state("one: running");
    Some(vm)
}

/// Starts VM `name`, which waits for a VM at `address`.
fn waiting(name: &str, address: &str, stdin: Stdio) -> VmProcess {
    let args = ["--incoming", address, "--console", "none"];
    let vm = VmProcess::spawn(Command::new(PROGRAM), name, &args, stdin).unwrap();
    eventually("it waits", || vm.count_log_lines("waiting for a VM") > 0);
    vm
}

/// The received memory is that of the time at which the guest was paused, although the guest
/// continuously writes 4 MiB. A page from any other time would make the guest terminate the VM.
#[test]
fn memory_is_consistent_under_a_guest_that_writes_it() {
    let files = tempfile::tempdir().unwrap();
    let Some(mut vm) = writer(&files) else { return };
    let path = |name: &str| files.path().join(name).to_str().unwrap().to_owned();
    let (inner, outer) = (format!("unix:{}", path("in")), format!("unix:{}", path("out")));
    let mut name = "one".to_owned();
    for round in 0..3 {
        let next = format!("vm{round}");
        let receiver = waiting(&next, &inner, Stdio::null());
        // Let the guest run for a while after the first round, so that it writes memory between the
        // rounds.
        let (vcpu, is_first) = (vm.vcpu_schedstat(), AtomicBool::new(true));
        let wait = move |kind| {
            if kind == RECEIVED && is_first.swap(false, Ordering::Relaxed) {
                let until = cpu_time(&vcpu) + Duration::from_millis(30);
                eventually("the guest runs", || cpu_time(&vcpu) >= until);
            }
        };
        let proxy = proxy(&path("out"), &path("in"), Cut::NEVER, wait);
        let args = [
            "ctl",
            &name,
            "migrate",
            "--stream",
            &outer,
            "--downtime",
            "100000",
        ];
        let text = stdout_of(&mut vm.command(&args));
        proxy.join().unwrap();
        let expected = format!(
            "{name}: runs as {next} in process {} of its host; ",
            receiver.pid()
        );
        assert!(text.starts_with(&expected), "{text}");
        assert_eq!(vm.wait(), Some(0), "the source ends");
        (vm, name) = (receiver, next);
        let vcpu = vm.vcpu_schedstat();
        let until = cpu_time(&vcpu) + Duration::from_millis(100);
        eventually("the guest checks its memory", || {
            vm.child.try_wait().unwrap().is_some() || cpu_time(&vcpu) >= until
        });
        let status = vm.state_of(&name);
        assert!(status.starts_with(&format!("{name}: running")), "{status}");
    }
    assert!(
        vm.child.try_wait().unwrap().is_none(),
        "the guest has found an old page"
    );
}

/// Receives rounds of memory at `listener`, each of which takes at least 10 ms, and refuses the VM
/// after the last round. Returns the number of rounds.
fn receive_slowly(listener: &UnixListener) -> u32 {
    let (stream, _) = listener.accept().unwrap();
    let mut preamble = [0; PREAMBLE.len()];
    (&stream).read_exact(&mut preamble).unwrap();
    let mut reader = MigrationMessageReader::new(&stream);
    reader.set_memory_bytes(1 << 40);
    let mut rounds = 0;
    loop {
        let answer = match reader.receive() {
            Ok(MigrationStreamMessage::Machine(_)) => MigrationStreamMessage::Accepted,
            Ok(MigrationStreamMessage::RoundEnd) => {
                std::thread::sleep(Duration::from_millis(10));
                rounds += 1;
                MigrationStreamMessage::Received
            }
            Ok(MigrationStreamMessage::State(_)) => {
                MigrationStreamMessage::Failed("it is too slow".to_owned())
            }
            Ok(_) => continue,
            Err(_) => return rounds,
        };
        send(&mut &stream, &answer).unwrap();
    }
}

/// The VM continues if the guest writes memory too fast for a short final pause, and one message
/// reports this. With `--force`, the VM is paused nevertheless.
#[test]
fn non_converging_migration_resumes_vm() {
    let files = tempfile::tempdir().unwrap();
    let Some(vm) = writer(&files) else { return };
    let path = files.path().join("in");
    let listener = UnixListener::bind(&path).unwrap();
    let address = format!("unix:{}", path.display());
    let args = ["ctl", "one", "migrate", "--stream", &address, "--downtime", "5"];
    let migrate = |options: &[&str]| {
        std::thread::scope(|scope| {
            let rounds = scope.spawn(|| receive_slowly(&listener));
            let text = refusal(&mut vm.command(&[&args[..], options].concat()));
            assert!(vm.state_of("one").starts_with("one: running"));
            (rounds.join().unwrap(), text)
        })
    };
    let (rounds, text) = migrate(&[]);
    let why = "one has not moved and goes on: the guest writes memory faster than it can be sent: round 30 still took ";
    assert!(rounds == 30 && text.contains(why), "{rounds} {text}");
    let (rounds, text) = migrate(&["--force"]);
    let why = "one has not moved and goes on: it is too slow";
    // One more round is sent while the VM is paused.
    assert!(rounds == 31 && text.contains(why), "{rounds} {text}");
}

/// Migration works over sockets that the source and the destination inherit, for example from a
/// service manager or ssh.
#[test]
fn vm_moves_over_inherited_sockets() {
    let files = tempfile::tempdir().unwrap();
    let Some(mut vm) = writer(&files) else { return };
    let (ours, theirs) = UnixStream::pair().unwrap();
    let socket = |end: UnixStream| Stdio::from(OwnedFd::from(end));
    let receiver = waiting("two", "fd:0", socket(theirs));
    let mut command = vm.command(&["ctl", "one", "migrate", "fd:0", "--downtime", "2000"]);
    let out = command.stdin(socket(ours)).output().unwrap();
    assert_eq!(out.status.code(), Some(0), "{out:?}");
    assert_eq!(vm.wait(), Some(0));
    assert!(receiver.state_of("two").starts_with("two: running"));

    let (status, text) = run_and_read_stderr(&mut receiver.command(&["ctl", "two", "migrate", "fd:0"]));
    assert!(
        status == Some(2) && text.contains("fd:0: it must be an inherited descriptor"),
        "{text}"
    );
    let (status, text) =
        run_and_read_stderr(&mut receiver.command(&["run", "--name", "x", "--incoming", "fd:77"]));
    assert!(
        status == Some(2) && text.contains("fd:77: it must be an inherited descriptor"),
        "{text}"
    );
}

/// Point at which a proxy cuts a connection: after the first `kept` bytes of frame number
/// `occurrence` among the frames of type `kind`.
#[derive(Clone, Copy, Debug)]
struct Cut {
    kind: u32,
    occurrence: u32,
    kept: usize,
}

impl Cut {
    /// A cut that never occurs, because no frame has type 0.
    const NEVER: Self = Self {
        kind: 0,
        occurrence: 1,
        kept: 0,
    };
}

/// Type of the frame with which the destination confirms a round.
const RECEIVED: u32 = 17;

/// Forwards frames up to the cut, and then closes both connections. Calls `before` with the type of
/// each frame before forwarding it.
fn forward(mut from: UnixStream, mut to: UnixStream, preamble: usize, cut: Cut, before: &dyn Fn(u32)) {
    let mut seen = 0;
    let copy = |from: &mut UnixStream, count: usize| -> Option<Vec<u8>> {
        let mut bytes = vec![0; count];
        from.read_exact(&mut bytes).ok()?;
        Some(bytes)
    };
    let mut forward_one = |head: usize| -> Option<()> {
        let mut frame = copy(&mut from, head)?;
        if head == 12 {
            let number = |at: usize| u32::from_le_bytes(*frame[at..].first_chunk().unwrap());
            let (kind, length) = (number(0), number(4));
            frame.extend(copy(&mut from, usize::try_from(length).unwrap())?);
            before(kind);
            if kind == cut.kind {
                seen += 1;
                if seen == cut.occurrence {
                    let _ = to.write_all(&frame[..cut.kept]);
                    return None;
                }
            }
        }
        to.write_all(&frame).ok()
    };
    let mut next = if preamble > 0 {
        forward_one(preamble)
    } else {
        Some(())
    };
    while next.is_some() {
        next = forward_one(12);
    }
    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
}

/// Forwards a connection to `path` to the socket `destination`.
fn proxy(
    path: &str,
    destination: &str,
    cut: Cut,
    before: impl Fn(u32) + Sync + Send + 'static,
) -> JoinHandle<()> {
    let _ = fs::remove_file(path);
    let listener = UnixListener::bind(path).unwrap();
    let destination = destination.to_owned();
    std::thread::spawn(move || {
        let (source, _) = listener.accept().unwrap();
        let destination = UnixStream::connect(destination).unwrap();
        let (back, there) = (source.try_clone().unwrap(), destination.try_clone().unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| forward(there, back, 0, cut, &before));
            forward(source, destination, PREAMBLE.len(), cut, &before);
        });
    })
}

impl Source {
    /// Moves the VM through a connection that is cut. Returns the exit status and the message of
    /// `ctl`.
    fn migrate_through(&self, cut: Cut) -> (Option<i32>, String) {
        let path = self.path("cut");
        let proxy = proxy(&path, &self.path("in"), cut, |_| ());
        let address = format!("unix:{path}");
        let args = [
            "ctl",
            "one",
            "migrate",
            "--stream",
            &address,
            "--downtime",
            "5000",
        ];
        let outcome = run_and_read_stderr(&mut self.vm.operator(&args));
        proxy.join().unwrap();
        outcome
    }

    fn assert_runs(&self) {
        assert!(self.vm.state_of("one").starts_with("one: running"));
        let before = self.vm.cpu_time();
        eventually("the guest goes on", || self.vm.cpu_time() > before);
    }
}

/// Wherever the connection of a migration is cut, at most one process runs the VM, and the other
/// process reports that it does not run the VM. If the source cannot know whether the destination
/// has received the run request, the source stays paused until the user decides.
#[test]
fn exactly_one_process_runs_the_vm_wherever_the_stream_is_cut() {
    let Some(mut source) = Source::start(&[]) else {
        return;
    };
    let disk = source.path("disk");
    let before_commit = [
        (1, 1),
        (2, 1),
        (16, 1),
        (3, 1),
        (5, 1),
        (17, 1),
        (5, 2),
        (17, 2),
        (6, 1),
        (18, 1),
    ];
    for (kind, occurrence) in before_commit {
        for kept in [0, 7] {
            let cut = Cut {
                kind,
                occurrence,
                kept,
            };
            let mut receiver = source.receiver(&["--disk", &disk]);
            let (status, text) = source.migrate_through(cut);
            assert_eq!((status, text.lines().count()), (Some(2), 1), "{cut:?} {text}");
            assert!(text.contains("one has not moved and goes on: "), "{cut:?} {text}");
            if kind == 1 {
                // The source has not sent its greeting, so the receiver still waits.
                assert!(receiver.child.try_wait().unwrap().is_none());
                drop(receiver);
                let _ = fs::remove_file(source.path("in"));
            } else {
                assert_eq!(receiver.wait(), Some(2), "{cut:?}");
                assert_eq!(receiver.count_log_lines("perfvisor: error: "), 1, "{cut:?}");
            }
            source.assert_runs();
        }
    }
    source.assert_still_runs();

    // Cut the connection so that the destination does not receive the run request.
    for kept in [0, 12] {
        let mut receiver = source.receiver(&["--disk", &disk]);
        let (status, text) = source.migrate_through(Cut {
            kind: 7,
            occurrence: 1,
            kept,
        });
        assert_eq!((status, text.lines().count()), (Some(2), 1), "{text}");
        assert_contains(&text, "one may run at its destination, and is paused here: ");
        assert_eq!(receiver.wait(), Some(2));
        assert!(source.vm.state_of("one").starts_with("one: paused"));
        assert!(
            source
                .vm
                .count_log_lines("the VM may run where it was to move; it stays paused here")
                > 0
        );
        let (status, text) =
            run_and_read_stderr(&mut source.vm.operator(&["ctl", "one", "snapshot", "/no/such"]));
        assert!(status == Some(2), "{text}");
        stdout_of(&mut source.vm.operator(&["ctl", "one", "resume"]));
        source.assert_runs();
    }
    source.assert_still_runs();

    // Cut the connection so that the source does not receive the destination's answer.
    let receiver = source.receiver(&["--disk", &disk]);
    let (status, text) = source.migrate_through(Cut {
        kind: 19,
        occurrence: 1,
        kept: 0,
    });
    assert!(
        status == Some(2) && text.contains("one may run at its destination, and is paused here: "),
        "{text}"
    );
    assert!(receiver.state_of("two").starts_with("two: running"));
    assert!(source.vm.state_of("one").starts_with("one: paused"));
    let (status, text) = run_and_read_stderr(&mut source.vm.operator(&["ctl", "one", "resume"]));
    assert!(
        status == Some(2)
            && text.contains("the image of disk0 is used by another process, where the VM may run"),
        "{text}"
    );
    assert!(source.vm.state_of("one").starts_with("one: paused"));
    stdout_of(&mut source.vm.operator(&["ctl", "one", "stop"]));
    assert_eq!(source.vm.wait(), Some(0));
    source.assert_disk_is_locked();
    assert!(receiver.state_of("two").starts_with("two: running"));
}

/// If the destination can detect in advance that it must refuse the VM, it reports the reason
/// before the VM is paused.
#[test]
fn destination_reports_missing_features() {
    let Some(source) = Source::start(&[]) else { return };
    let mut receiver = source.receiver(&[]);
    let args = ["ctl", "one", "migrate", "--stream", &source.address()];
    let text = refusal(&mut source.vm.operator(&args));
    let why =
        "one has not moved and goes on: --incoming: 0 disks are given, the VM has 1; give a --disk for each";
    assert!(text.contains(why), "{text}");
    assert_eq!(receiver.wait(), Some(2));
    assert_eq!(receiver.count_log_lines("received one"), 0);
    source.assert_runs();

    // Errors that the destination detects while the VM is paused.
    let mut receiver = source.receiver(&["--disk", "/no/such/image"]);
    let text = refusal(&mut source.vm.operator(&args));
    assert!(text.contains("/no/such/image"), "{text}");
    assert_eq!(receiver.wait(), Some(2));
    source.assert_still_runs();

    let line = run_and_read_stderr(
        &mut source
            .vm
            .operator(&["ctl", "one", "migrate", "unix:/a", "--force"]),
    );
    assert!(line.0 == Some(2) && line.1.contains("add --stream"), "{}", line.1);
}

/// If `ctl` is killed while memory is sent, the VM continues to run, and the receiver exits.
#[test]
fn killed_ctl_leaves_a_running_vm() {
    let Some(source) = Source::start(&[]) else { return };
    let listener = UnixListener::bind(source.path("in")).unwrap();
    let args = ["ctl", "one", "migrate", "--stream", &source.address()];
    let mut command = source.vm.operator(&args);
    let ctl = Killed(
        command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap(),
    );
    let (stream, _) = listener.accept().unwrap();
    let mut reader = MigrationMessageReader::new(&stream);
    let mut preamble = [0; PREAMBLE.len()];
    (&stream).read_exact(&mut preamble).unwrap();
    assert!(matches!(
        reader.receive().unwrap(),
        MigrationStreamMessage::Hello(_)
    ));
    assert!(matches!(
        reader.receive().unwrap(),
        MigrationStreamMessage::Machine(_)
    ));
    // Another client cannot move the VM at the same time.
    let (status, text) = run_and_read_stderr(&mut source.vm.operator(&[
        "ctl",
        "one",
        "migrate",
        "--stream",
        &source.address(),
    ]));
    assert!(
        status == Some(2) && text.contains("the VM is being moved already"),
        "{text}"
    );
    send(&mut &stream, &MigrationStreamMessage::Accepted).unwrap();
    reader.set_memory_bytes(1 << 40);
    assert!(matches!(
        reader.receive().unwrap(),
        MigrationStreamMessage::Pages { .. }
    ));
    drop(ctl);
    source.assert_still_runs();
    drop((stream, listener));
    fs::remove_file(source.path("in")).unwrap();
    let receiver = source.receiver(&["--disk", &source.path("disk")]);
    stdout_of(&mut source.vm.operator(&args));
    assert!(receiver.state_of("two").starts_with("two: running"));
}

/// A hostile source receives a one-line error, and the receiver neither starts a VM nor allocates
/// memory.
#[test]
fn hostile_stream_is_refused_in_one_line() {
    let files = tempfile::tempdir().unwrap();
    if !crate::common::vm::has_kvm() {
        return;
    }
    let path = files.path().join("in");
    let address = format!("unix:{}", path.display());
    let mut receiver = waiting("two", &address, Stdio::null());
    for garbage in [&b"GET / HTTP/1.1\r\n"[..], b"PVMX", b"PVMG\x09\0\0\0", b""] {
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.write_all(garbage).unwrap();
        drop(stream);
    }
    eventually("all are refused", || {
        receiver.count_log_lines("an offer is refused") == 4
    });
    assert_eq!(receiver.count_log_lines("speaks version 9"), 1);
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.write_all(&PREAMBLE).unwrap();
    let hello = MigrationHello {
        name: "a\nb".to_owned(),
        pid: 1,
        boot_id: String::new(),
        memory_bytes: 1 << 60,
    };
    send(&mut stream, &MigrationStreamMessage::Hello(hello)).unwrap();
    let machine = snapshot::SavedMachine::default();
    send(
        &mut stream,
        &MigrationStreamMessage::Machine(&snapshot::encode(&machine).unwrap()),
    )
    .unwrap();
    let mut reader = MigrationMessageReader::new(stream);
    let MigrationStreamMessage::Failed(why) = reader.receive().unwrap() else {
        panic!("it is accepted");
    };
    assert!(why.contains("the source sends something else than a VM"), "{why}");
    assert_eq!(receiver.wait(), Some(2));
    assert_eq!(receiver.count_log_lines("perfvisor: error: "), 1);
}

/// On the same host, `stat` and `exits` continue in the process that has received the VM.
#[test]
fn observers_follow_a_vm_that_moves_as_bytes() {
    let Some(source) = Source::start(&[]) else { return };
    let observe = |args: &[&str]| {
        let mut command = source.vm.operator(args);
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut observer = Killed(command.spawn().unwrap());
        let lines = BufReader::new(observer.0.stderr.take().unwrap()).lines();
        (observer, lines.map(Result::unwrap))
    };
    let (_stat, mut of_stat) = observe(&["stat", "one", "-e", "task-clock", "-I", "300"]);
    let (mut exits, mut of_exits) = observe(&["exits", "one", "--json", "--no-trace"]);
    // Both commands must connect to the VM before it moves.
    std::thread::sleep(Duration::from_secs(1));
    let receiver = source.start_local_receiver();
    let args = ["ctl", "one", "migrate", "--stream", &source.address()];
    stdout_of(&mut source.vm.operator(&args));
    let moved = format!("one has moved to process {} as two; its ", receiver.0.id());
    assert!(of_stat.any(|line| line.contains(&moved)));
    assert!(of_exits.any(|line| line.contains(&moved)));
    interrupt(&exits);
    assert!(exits.0.wait().unwrap().success());
    let mut text = String::new();
    exits
        .0
        .stdout
        .as_mut()
        .unwrap()
        .read_to_string(&mut text)
        .unwrap();
    assert!(text.contains("\"total\":true"), "{text}");
}
