//! `run --gdb`: Debian's gdb debugs the built-in guest, and clients that are not debuggers do not
//! disturb the VM.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::common::test_lock::{self, SharedLock};
use crate::common::vm::{PROGRAM, SpinningVm, assert_contains, eventually};
use guest_images::bare_metal::BUILTIN;
use tempfile::TempDir;
use test_support::skip;

/// A VM with a guest that waits for a debugger.
struct WaitingVm {
    child: Child,
    dir: TempDir,
    _lock: SharedLock,
}

impl WaitingVm {
    fn start() -> Option<Self> {
        let gdb = Command::new("gdb").arg("--version").output();
        if !Path::new("/dev/kvm").exists() || !gdb.is_ok_and(|out| out.status.success()) {
            skip::skipped("no /dev/kvm or no gdb here", false);
            return None;
        }
        let lock = test_lock::shared();
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("gdb");
        let child = Command::new(PROGRAM)
            .args([
                "run",
                "--name",
                "g",
                "--memory",
                "32M",
                "--cpus",
                "2",
                "--cmdline",
                "loop",
            ])
            .arg("--gdb")
            .arg(format!("{},wait", socket.display()))
            .env("XDG_RUNTIME_DIR", dir.path())
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        // Wait until the socket's mode is set, the last step of its creation. A trial connection
        // would be treated as the debugger.
        eventually("the socket is there", || {
            fs::metadata(&socket).is_ok_and(|file| file.permissions().mode() & 0o777 == 0o600)
        });
        Some(Self {
            child,
            dir,
            _lock: lock,
        })
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("gdb")
    }

    /// Runs `script` in gdb and returns its output and its error messages.
    fn gdb(&self, script: &str) -> String {
        gdb(self.dir.path(), &self.socket(), script)
    }

    fn operator(&self, args: &[&str]) -> String {
        let mut command = Command::new(PROGRAM);
        let out = command.args(args).env("XDG_RUNTIME_DIR", self.dir.path());
        String::from_utf8(out.output().unwrap().stdout).unwrap()
    }
}

impl Drop for WaitingVm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Prepares the guest's image and a script that first attaches to the guest.
fn prepare(dir: &Path, socket: &Path, script: &str) -> (PathBuf, PathBuf) {
    let (image, commands) = (dir.join("guest.elf"), dir.join("script"));
    fs::write(&image, BUILTIN).unwrap();
    let attach = format!(
        "set pagination off\nset confirm off\ntarget remote {}\n",
        socket.display()
    );
    fs::write(&commands, attach + script).unwrap();
    (image, commands)
}

fn gdb(dir: &Path, socket: &Path, script: &str) -> String {
    let (image, commands) = prepare(dir, socket, script);
    // `timeout` ends gdb only if the test fails.
    let out = Command::new("timeout")
        .args(["300", "gdb", "-nx", "-batch", "-x"])
        .args([&commands, &image])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr)
}

/// Returns the value that a script has printed with `printf "WORD=%#lx\n"`.
#[track_caller]
fn value(said: &str, word: &str) -> u64 {
    let text = said
        .lines()
        .find_map(|line| line.strip_prefix(&format!("{word}=")))
        .unwrap_or_else(|| panic!("no {word} in {said}"));
    u64::from_str_radix(text.trim().trim_start_matches("0x"), 16).unwrap()
}

/// Software breakpoints, steps, registers, memory and threads work, and the guest continues
/// unaffected after the debugger has detached.
#[test]
fn gdb_session_leaves_guest_unchanged() {
    let Some(vm) = WaitingVm::start() else { return };
    let said = vm.gdb(
        r#"
printf "entry=%#lx\n", $rip
break kmain
continue
printf "kmain=%#lx\n", $rip
printf "there=%#lx\n", &kmain
stepi
stepi
printf "stepped=%#lx\n", $rip
set var $rax = 0x1234567887654321
printf "rax=%#lx\n", $rax
info threads
backtrace
thread 2
printf "other=%#lx\n", $rip
thread 1
set scheduler-locking on
stepi
printf "alone=%#lx\n", $rip
thread 2
printf "stayed=%#lx\n", $rip
set scheduler-locking off
thread 1
delete
compare-sections .text
print *(char *)0xffff900000000000
detach
"#,
    );
    assert_eq!(value(&said, "kmain"), value(&said, "there"), "{said}");
    assert_ne!(value(&said, "entry"), value(&said, "kmain"), "{said}");
    let stepped = value(&said, "stepped") - value(&said, "kmain");
    assert!((2..=30).contains(&stepped), "two instructions: {said}");
    assert_eq!(value(&said, "rax"), 0x1234_5678_8765_4321);
    assert!(said.contains("vCPU 0") && said.contains("vCPU 1"), "{said}");
    assert!(said.contains("in start64 ()"), "{said}");
    assert!(value(&said, "alone") > value(&said, "stepped"), "{said}");
    assert_eq!(value(&said, "other"), value(&said, "stayed"), "{said}");
    assert!(said.contains(": matched."), "{said}");
    assert_contains(&said, "Cannot access memory at address 0xffff900000000000");
    // The guest continues and passes its own test.
    let mut text = String::new();
    let mut vm = vm;
    let mut out = vm.child.stdout.take().unwrap();
    let mut bytes = [0; 4096];
    while !text.contains("spinning") {
        let count = out.read(&mut bytes).unwrap();
        assert!(count > 0, "{text}");
        text += &String::from_utf8_lossy(&bytes[..count]);
    }
    assert!(!text.contains("FAIL"), "{text}");
    assert!(vm.operator(&["ctl", "g", "status"]).contains("running"));
}

/// Ctrl-C in gdb stops a running guest, and the operators' events on the guest stop counting. If
/// the debugger kills the guest, the VM shuts down in order.
#[test]
fn gdb_interrupt_stops_guest_and_counters() {
    let Some(mut vm) = WaitingVm::start() else { return };
    let count = |name: &str| {
        let dir = vm.dir.path().display();
        format!("shell XDG_RUNTIME_DIR={dir} {PROGRAM} stat g -j -e cycles -d 0.2 >{dir}/{name}\n")
    };
    let script = format!(
        "continue\nprintf \"stopped=%#lx\\n\", $rip\ninfo threads\n{}kill\n",
        count("held")
    );
    let (image, commands) = prepare(vm.dir.path(), &vm.socket(), &script);
    let mut gdb = Command::new("gdb")
        .args(["-nx", "-batch", "-x"])
        .args([&commands, &image])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut guest = BufReader::new(vm.child.stdout.take().unwrap()).lines();
    assert!(guest.any(|line| line.is_ok_and(|line| line.contains("spinning"))));
    // Wait, because the vCPU may still be handling the exit of the message's last character.
    eventually("the guest executes user code", || {
        let stat = vm.operator(&["stat", "g", "-j", "-e", "cycles:u", "-d", "0.1"]);
        stat.contains("counter-value") && !stat.contains("<not") && !stat.contains("\"counter-value\":\"0.")
    });
    let interrupt = Command::new("kill")
        .args(["-INT", &gdb.id().to_string()])
        .status();
    assert!(interrupt.unwrap().success());
    eventually("gdb has ended", || gdb.try_wait().unwrap().is_some());
    let mut said = String::new();
    gdb.stdout.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("SIGINT"), "{said}");
    assert!(
        (0x10_0000..0x20_0000).contains(&value(&said, "stopped")),
        "{said}"
    );
    assert!(said.contains("in spin_") || said.contains("in user_"), "{said}");
    let counted = fs::read_to_string(vm.dir.path().join("held")).unwrap();
    // The events accumulate no time while the guest is stopped.
    assert_contains(&counted, "<not counted>");
    assert_contains(&counted, "\"event-runtime\":0");
    assert_eq!(vm.child.wait().unwrap().code(), Some(0), "{said}");
}

/// Hardware breakpoints and watchpoints work on hosts that support them.
#[test]
fn gdb_uses_hardware_breakpoints() {
    let Some(vm) = WaitingVm::start() else { return };
    let check = Command::new(PROGRAM).args(["check", "--json"]).output().unwrap();
    let check = String::from_utf8(check.stdout).unwrap();
    if !check.replace(' ', "").contains("\"breakpoints\":true") {
        skip::skipped("hardware breakpoints do not fire in guests of this KVM", false);
        return;
    }
    let said = vm.gdb(
        r#"
hbreak kmain
continue
printf "kmain=%#lx\n", $rip
printf "there=%#lx\n", &kmain
hbreak *1
hbreak *2
hbreak *3
hbreak *4
continue
"#,
    );
    assert_eq!(value(&said, "kmain"), value(&said, "there"), "{said}");
    assert!(
        said.contains("Could not insert hardware breakpoint") || said.contains("too many"),
        "{said}"
    );
}

/// Each misbehaving client is disconnected while the guest continues to run, and a debugger can
/// connect afterwards.
#[test]
fn invalid_gdb_clients_leave_guest_running() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("gdb");
    let place = socket.display().to_string();
    let Some(vm) = SpinningVm::start("lies", &["--cpus", "2", "--gdb", &place]) else {
        return;
    };
    let packet = |body: &str| {
        let sum = body.bytes().fold(0u8, u8::wrapping_add);
        format!("+${body}#{sum:02x}").into_bytes()
    };
    let mut garbage: Vec<Vec<u8>> = vec![
        Vec::new(),
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        (0..=255).cycle().take(100_000).collect(),
        [b"$".to_vec(), vec![b'x'; 200_000]].concat(),
        b"$g#00$g#00$g#00\x03\x03\x03".to_vec(),
        packet("m0,ffffffffffffffff"),
        packet("mffffffffffffffff,10"),
        packet("M0,ffffffff:00"),
        packet("X0,fffffff0:"),
        packet("P10="),
        packet("G00"),
        packet("Hgffffffff"),
        packet("vCont;s:ffffffff"),
        packet("Z2,1001,8"),
        packet("Z9,0,0"),
        packet("qXfer:features:read:target.xml:ffffffffffffffff,ffffffffffffffff"),
    ];
    // The client sets more breakpoints than supported, and dies with all of them set.
    garbage.push(
        (0..3000)
            .flat_map(|n| packet(&format!("Z0,{:x},1", 0x10_0000 + n)))
            .collect(),
    );
    for bytes in garbage {
        let mut client = UnixStream::connect(&socket).unwrap();
        // The server may close the connection before all bytes are sent.
        let _ = client.write_all(&bytes);
        let _ = client.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let _ = client.read_to_end(&mut answer);
        eventually("the guest runs on", || {
            let status = vm.operator(&["ctl", "lies", "status"]).output().unwrap();
            String::from_utf8_lossy(&status.stdout).contains("running")
        });
    }
    if Command::new("gdb").arg("--version").output().is_err() {
        skip::skipped("no gdb here", false);
        return;
    }
    let said = gdb(
        dir.path(),
        &socket,
        "compare-sections .text\ninfo threads\ndetach\n",
    );
    assert!(said.contains(": matched."), "{said}");
    assert!(said.contains("vCPU 1"), "{said}");
}

#[test]
fn invalid_gdb_options_print_one_line() {
    for (args, says) in [
        (&["--gdb", "/nonexistent/s"][..], "--gdb /nonexistent/s"),
        (&["--gdb", ""], "--gdb"),
        (&["--gdb", "s,now"], "PATH,wait"),
        (&["--gdb", "/tmp", "--memory", "16M"], "--gdb /tmp"),
        (
            &["--gdb", "s", "--backing", "exact", "--pmu", "amd"],
            "--backing exact",
        ),
    ] {
        let out = Command::new(PROGRAM).arg("run").args(args).output().unwrap();
        let line = String::from_utf8_lossy(&out.stderr);
        assert_eq!((out.status.code(), line.lines().count()), (Some(2), 1), "{line}");
        assert!(line.contains(says), "{line}");
    }
}
