//! `ctl migrate` and `run --incoming`: a VM moves to another process, and exactly one process runs
//! it regardless of failures.

mod stream;

use std::fs;
use std::io::{BufRead as _, BufReader, Read};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use control_api::client::Client;
use control_api::migration::MigrationOffer;
use control_api::snapshot::SnapshotPiece;
use control_api::{migration, request};

use crate::common::vm::{
    PROGRAM, SpinningVm, VmProcess, assert_contains, eventually, refusal, run_and_read_stderr, stdout_of,
};

/// A VM named `one`, the socket path of its receiver, and a disk image.
struct Source {
    vm: SpinningVm,
    files: tempfile::TempDir,
}

impl Source {
    /// Starts a VM with a disk, a spinning guest and `options` of `perfvisor run`.
    fn start(options: &[&str]) -> Option<Self> {
        let files = tempfile::tempdir().unwrap();
        guest_images::bare_metal::write_all(files.path()).unwrap();
        let kernel = files.path().join("selftest.elf");
        let disk = files.path().join("disk");
        fs::File::create(&disk).unwrap().set_len(1 << 20).unwrap();
        let args = [
            "--kernel",
            kernel.to_str().unwrap(),
            "--disk",
            disk.to_str().unwrap(),
        ];
        let vm = SpinningVm::start("one", &[&args, options].concat())?;
        Some(Self { vm, files })
    }

    fn path(&self, name: &str) -> String {
        self.files.path().join(name).to_str().unwrap().to_owned()
    }

    fn address(&self) -> String {
        format!("unix:{}", self.path("in"))
    }

    /// Starts the process `two`, which waits for a VM.
    fn receiver(&self, options: &[&str]) -> VmProcess {
        let address = self.address();
        let args = [&["--incoming", &address], options].concat();
        let vm = VmProcess::spawn(Command::new(PROGRAM), "two", &args, Stdio::null()).unwrap();
        eventually("it waits", || vm.count_log_lines("waiting for a VM") > 0);
        vm
    }

    /// Starts the process `two` in the socket directory of the source.
    fn start_local_receiver(&self) -> Killed {
        let receiver = Command::new(PROGRAM)
            .args(["run", "--name", "two", "--incoming", &self.address()])
            .args(["--disk", &self.path("disk")])
            .env("XDG_RUNTIME_DIR", self.vm.runtime.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .map(Killed);
        eventually("it waits", || fs::metadata(self.path("in")).is_ok());
        receiver.unwrap()
    }

    /// Moves the VM to the socket of the receiver. Returns the exit status and the message of
    /// `ctl`.
    fn migrate(&self) -> (Option<i32>, String) {
        run_and_read_stderr(&mut self.vm.operator(&["ctl", "one", "migrate", &self.address()]))
    }

    /// Checks that the guest of the source runs and that its disk is locked.
    fn assert_still_runs(&self) {
        assert!(self.vm.state_of("one").starts_with("one: running"));
        self.vm.assert_counted_and_sampled("one", "cycles,task-clock");
        self.assert_disk_is_locked();
    }

    fn assert_disk_is_locked(&self) {
        let (kernel, disk) = (self.path("selftest.elf"), self.path("disk"));
        let mut third = self
            .vm
            .command(&["run", "--name", "three", "--kernel", &kernel, "--disk", &disk]);
        let (status, text) = run_and_read_stderr(&mut third);
        assert!(status == Some(2) && text.contains("disk: in use by "), "{text}");
    }
}

/// A process that is killed on drop.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends SIGINT to `process`.
fn interrupt(process: &Killed) {
    let pid = process.0.id().to_string();
    let status = Command::new("kill").args(["-INT", &pid]).status();
    assert!(status.unwrap().success());
}

/// After a move, the guest runs in the destination process with its disk and can be counted there.
/// The source process has exited. The VM can be moved again.
#[test]
fn guest_moves_with_its_disk() {
    let Some(mut source) = Source::start(&["--cpus", "2"]) else {
        return;
    };
    let disk = source.path("disk");
    let mut receiver = source.receiver(&["--disk", &disk]);
    let mode = fs::metadata(source.path("in")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let (status, text) = source.migrate();
    let expected = format!(
        "one: runs as two in process {}; it was paused for ",
        receiver.pid()
    );
    assert!(status == Some(0) && text.starts_with(&expected), "{text}");
    assert_eq!(source.vm.wait(), Some(0));
    assert!(fs::metadata(source.path("in")).is_err(), "the socket is removed");
    let text = receiver.state_of("two");
    assert!(text.starts_with("two: running, 2 vCPUs\n"), "{text}");
    source.assert_disk_is_locked();

    let again = source.receiver(&["--disk", &disk]);
    let address = source.address();
    stdout_of(&mut receiver.command(&["ctl", "two", "migrate", &address]));
    assert_eq!(receiver.wait(), Some(0));
    again.assert_counts_cycles("two");
}

/// If the VM moves, `stat` prints intervals of the source and the destination process, reports the
/// move, and adds the counts of both processes.
#[test]
fn stat_follows_the_vm() {
    let Some(source) = Source::start(&[]) else { return };
    let stat = |options: &[&str]| {
        let args = ["stat", "one", "-x,", "-e", "task-clock"];
        let mut command = source.vm.operator(&[&args, options].concat());
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        Killed(command.spawn().unwrap())
    };
    let enabled_ns =
        |line: &str, field: usize| -> f64 { line.split(',').nth(field).unwrap().parse().unwrap() };
    let (mut table, mut intervals) = (stat(&[]), stat(&["-I", "500"]));
    let mut lines = BufReader::new(intervals.0.stdout.take().unwrap()).lines();
    let mut sum = |count| -> f64 {
        let lines = lines.by_ref().take(count).map(Result::unwrap);
        lines.map(|line| enabled_ns(&line, 4)).sum()
    };
    let before_ns = sum(3);
    let receiver = source.start_local_receiver();
    assert_eq!(source.migrate().0, Some(0));
    let after_ns = sum(4);
    for stat in [&intervals, &table] {
        interrupt(stat);
    }
    let text_of = |stream: &mut dyn Read| {
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    };
    let text = text_of(table.0.stdout.as_mut().unwrap());
    let said = text_of(table.0.stderr.as_mut().unwrap());
    let moved = format!("one has moved to process {} as two; its last ", receiver.0.id());
    assert!(said.contains(&moved), "{said}");
    // The sum may miss only the short time of the move, and the time between the starts of the two
    // commands.
    let (both_ns, short_ns) = (enabled_ns(&text, 3), before_ns.min(after_ns) / 2.0);
    assert!(
        both_ns > before_ns + after_ns - short_ns,
        "{before_ns} {after_ns} {text}"
    );
}

/// A recording of a VM that moves contains samples of the source and the destination process.
#[test]
fn record_follows_the_vm() {
    let Some(source) = Source::start(&[]) else { return };
    let file = source.path("data");
    let mut command = source
        .vm
        .operator(&["-v", "record", "one", "-F", "200", "-o", &file]);
    let command = command.stdout(Stdio::null()).stderr(Stdio::piped());
    let mut record = Killed(command.spawn().unwrap());
    let mut lines = BufReader::new(record.0.stderr.take().unwrap()).lines();
    let mut wait_for = |part: &str| {
        let found = lines.by_ref().map(Result::unwrap).any(|line| line.contains(part));
        assert!(found, "{part}");
    };
    wait_for("sampling of one has started");
    source.vm.observe_while_running(0.5, |seconds| {
        std::thread::sleep(Duration::from_secs_f64(seconds.parse().unwrap()));
    });
    let receiver = source.start_local_receiver();
    assert_eq!(source.migrate().0, Some(0));
    wait_for(&format!("one has moved to process {} as two", receiver.0.id()));
    // Current time of the clock that the samples use.
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let moved_at = now.tv_sec as f64 + now.tv_nsec as f64 / 1e9;
    let cpu_ms = |vm: &Source| -> f64 {
        let args = ["stat", "two", "-x,", "-e", "task-clock", "-d", "0.5"];
        let text = stdout_of(&mut vm.vm.operator(&args));
        text.split(',').next().unwrap().parse().unwrap()
    };
    let mut ran_ms = 0.0;
    while ran_ms < 300.0 {
        ran_ms += cpu_ms(&source);
    }
    interrupt(&record);
    assert!(record.0.wait().unwrap().success());
    let text = stdout_of(&mut source.vm.operator(&["script", "-i", &file, "-F", "time"]));
    let times = text
        .lines()
        .filter_map(|line| line.trim().trim_end_matches(':').parse::<f64>().ok());
    let (after, before): (Vec<f64>, Vec<f64>) = times.partition(|time| *time > moved_at);
    assert!(
        before.len() > 10 && after.len() > 10,
        "{} {}",
        before.len(),
        after.len()
    );
}

#[test]
fn paused_vm_stays_paused() {
    let Some(source) = Source::start(&[]) else { return };
    stdout_of(&mut source.vm.operator(&["ctl", "one", "pause"]));
    let receiver = source.receiver(&["--disk", &source.path("disk")]);
    assert_eq!(source.migrate().0, Some(0));
    assert!(receiver.state_of("two").starts_with("two: paused, 1 vCPU\n"));
    stdout_of(&mut receiver.command(&["ctl", "two", "resume"]));
    assert!(receiver.state_of("two").starts_with("two: running, 1 vCPU\n"));
}

/// If a VM cannot move, both `ctl` and the destination process report the reason in one line, and
/// the VM continues in the source process.
#[test]
fn failed_migration_resumes_vm() {
    let Some(source) = Source::start(&[]) else { return };
    let (status, text) = source.migrate();
    assert!(
        status == Some(2) && text.contains("no process waits for a VM; start one"),
        "{text}"
    );

    // The VM cannot move to a receiver without a disk.
    let mut receiver = source.receiver(&[]);
    let (status, text) = source.migrate();
    assert_eq!(status, Some(2), "{text}");
    assert!(
        text.starts_with("perfvisor: error: one has not moved and goes on: "),
        "{text}"
    );
    assert!(text.contains("0 disks are given, the VM has 1"), "{text}");
    assert_eq!(text.lines().count(), 1);
    assert_eq!(receiver.wait(), Some(2));
    assert!(receiver.count_log_lines("0 disks are given, the VM has 1") > 0);
    source.assert_still_runs();

    let mut receiver = source.receiver(&["--net", "tap=none0", "--disk", &source.path("disk")]);
    let (_, text) = source.migrate();
    assert_contains(&text, "1 network devices are given, the VM has 0");
    assert_eq!(receiver.wait(), Some(2));
    source.assert_still_runs();
}

/// A tap device, removed on drop.
struct Tap(String);

impl Tap {
    /// Creates a tap device. On failure, prints why the test is skipped.
    fn create(name: &str) -> Option<Self> {
        let name = format!("{name}{}", std::process::id());
        let created = Command::new("ip")
            .args(["tuntap", "add", "dev", &name, "mode", "tap"])
            .stderr(Stdio::null())
            .status();
        if !created.is_ok_and(|status| status.success()) {
            test_support::skip::skipped("no tap device can be created here", false);
            return None;
        }
        Some(Self(name))
    }

    fn option(&self) -> String {
        format!("tap={},vhost=off,mmds=on", self.0)
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["link", "del", &self.0]).status();
    }
}

/// The data of the metadata service moves with the VM, within this host and in a byte stream.
#[test]
fn metadata_moves_with_the_vm() {
    let taps = [Tap::create("pvm"), Tap::create("pvn")];
    let [Some(first), Some(second)] = &taps else {
        return;
    };
    let (first, second) = (first.option(), second.option());
    let Some(source) = Source::start(&["--mmds", "--net", &first]) else {
        return;
    };
    let control = |vm: &VmProcess, name: &str| {
        let path = vm.runtime.path().join(format!("perfvisor/{name}.sock"));
        Client::connect_at(&path, None, Duration::from_secs(10)).unwrap()
    };
    let data = serde_json::json!({"a": {"b": 1}});
    let mut client = control(&source.vm, "one");
    client.call(request::MmdsPut { data: data.clone() }).unwrap();
    drop(client);
    let disk = source.path("disk");
    let two = source.receiver(&["--disk", &disk, "--mmds", "--net", &second]);
    stdout_of(&mut source.vm.operator(&["ctl", "one", "migrate", &source.address()]));
    assert_eq!(control(&two, "two").call(request::MmdsGet).unwrap(), data);

    drop(source.vm);
    let address = format!("unix:{}", source.files.path().join("in").display());
    let args = ["--incoming", &address, "--disk", &disk, "--mmds", "--net", &first];
    let three = VmProcess::spawn(Command::new(PROGRAM), "three", &args, Stdio::null()).unwrap();
    eventually("it waits", || three.count_log_lines("waiting for a VM") > 0);
    stdout_of(&mut two.command(&["ctl", "two", "migrate", "--stream", &address]));
    assert_eq!(control(&three, "three").call(request::MmdsGet).unwrap(), data);
}

/// If the receiver exits after it has received everything but before it terminates the VM in the
/// source process, the VM continues in the source process with its disk locked.
#[test]
fn receiver_that_disappears_leaves_a_running_vm() {
    let Some(source) = Source::start(&[]) else { return };
    let listener = UnixListener::bind(source.path("in")).unwrap();
    let mut command = source.vm.operator(&["ctl", "one", "migrate", &source.address()]);
    let ctl = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let (stream, _) = listener.accept().unwrap();
    let MigrationOffer::Connection(vm) = migration::receive_offer(&stream).unwrap() else {
        panic!("no connection");
    };
    let mut client = Client::from_stream(vm).unwrap();
    eventually("it is ready", || client.call(request::Snapshot).unwrap().ready);
    client.call(request::SnapshotEnd { stop: false }).unwrap();
    let refused = client.call(request::SnapshotShareDisks).unwrap_err().to_string();
    assert!(refused.contains("not ready for this step"), "{refused}");
    eventually("it is ready", || client.call(request::Snapshot).unwrap().ready);
    let mut offset = 0;
    while offset < 32 << 20 {
        let (piece, _): (SnapshotPiece, _) =
            client.call_with_file(request::SnapshotMemory { offset }).unwrap();
        offset = piece.next;
    }
    client.call_with_file(request::SnapshotState).unwrap();
    client.call(request::SnapshotShareDisks).unwrap();
    source.assert_disk_is_locked();
    assert!(source.vm.state_of("one").starts_with("one: paused"));
    drop((client, stream));
    let out = ctl.wait_with_output().unwrap();
    let text = String::from_utf8(out.stderr).unwrap();
    assert_contains(&text, "the process that received one has ended without an answer");
    source.vm.await_state("one: running");
    source.assert_still_runs();
}

/// If the source process is killed after it has sent everything, the VM runs in the receiver,
/// regardless of whether the source has read the request to terminate.
#[test]
fn source_that_dies_leaves_the_vm_to_the_receiver() {
    let Some(mut source) = Source::start(&[]) else {
        return;
    };
    let receiver = source.receiver(&["--disk", &source.path("disk")]);
    let mut command = source.vm.operator(&["ctl", "one", "migrate", &source.address()]);
    let ctl = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    eventually("it has the VM", || {
        receiver.count_log_lines("received one from process") > 0
    });
    source.vm.child.kill().unwrap();
    let out = ctl.wait_with_output().unwrap();
    assert_eq!(
        out.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    assert!(receiver.state_of("two").starts_with("two: running, 1 vCPU\n"));
    source.assert_disk_is_locked();
}

#[test]
fn other_addresses_and_machine_options_are_refused() {
    let line = |args: &[&str]| refusal(Command::new(PROGRAM).args(args));
    let text = line(&["run", "--incoming", "tcp:1.2.3.4:5"]);
    assert!(text.contains("must be unix:PATH"), "{text}");
    let text = line(&["run", "--incoming", "unix:/a", "--memory", "1G"]);
    assert!(text.contains("cannot be used with"), "{text}");
    let text = line(&["run", "--incoming", "unix:/a", "--restore", "b"]);
    assert!(text.contains("cannot be used with"), "{text}");
    let text = line(&[
        "run",
        "--incoming",
        "unix:/no/directory/x",
        "--name",
        "incoming-nowhere",
    ]);
    assert_contains(&text, "--incoming: cannot listen at /no/directory/x");
}
