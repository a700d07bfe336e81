//! The exporter against malicious users of its host, acting as clients and as owners of VM sockets,
//! and with files left behind by a killed exporter.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

use crate::common::host::reply;
use crate::common::unprivileged::NOBODY;
use crate::common::vm::{PROGRAM, SpinningVm, eventually};

/// Time limit of a wait, reached only by failing tests.
const PATIENCE: Duration = Duration::from_secs(300);

/// An exporter, killed on drop.
struct Exporter {
    process: Child,
    port: u16,
    log: PathBuf,
    _dir: tempfile::TempDir,
}

impl Exporter {
    fn start(args: &[&str], runtime: &Path, temporary: &Path) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let process = Command::new(PROGRAM)
            .args(["-v", "exporter", "--listen", "127.0.0.1:0"])
            .args(args)
            .env("XDG_RUNTIME_DIR", runtime)
            .env("TMPDIR", temporary)
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(File::create(&log).unwrap())
            .spawn()
            .unwrap();
        let mut exporter = Self {
            process,
            port: 0,
            log,
            _dir: dir,
        };
        eventually("the exporter says where it serves", || {
            let said = exporter.said();
            let port = |line: &str| line.split_once("serving at 127.0.0.1:")?.1.trim().parse().ok();
            exporter.port = said.lines().find_map(port).unwrap_or(0);
            exporter.port != 0
        });
        exporter
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap()
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    /// Returns the status and the body of the reply to a GET request with the header fields
    /// `fields`.
    fn get(&self, path: &str, fields: &str) -> (u16, String) {
        let mut stream = self.connect();
        write!(stream, "GET {path} HTTP/1.1\r\n{fields}\r\n").unwrap();
        let (status, body) = reply(stream);
        (status, String::from_utf8(body).unwrap())
    }

    fn metrics(&self) -> String {
        let (status, text) = self.get("/metrics", "");
        assert_eq!(status, 200, "{text}");
        text
    }

    /// Returns the peak resident memory of the exporter, in KiB.
    fn peak_kib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id())).unwrap();
        let peak = status
            .lines()
            .find_map(|line| line.strip_prefix("VmHWM:"))
            .unwrap();
        peak.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

impl Drop for Exporter {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Returns whether the test can run commands as another user. Prints a message if not.
fn can_be_nobody() -> bool {
    let works = as_nobody(&["true"])
        .output()
        .is_ok_and(|out| out.status.success());
    if !works {
        test_support::skip::skipped("commands cannot be run as another user here", false);
    }
    works
}

fn as_nobody(command: &[&str]) -> Command {
    let mut nobody = Command::new("setpriv");
    nobody
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
        .args(command)
        .current_dir("/");
    nobody
}

/// Returns the exporter's reply to a request for `path` at `port` from a process of the user
/// nobody.
fn get_as_nobody(port: u16, path: &str) -> String {
    let script =
        format!("exec 3<>/dev/tcp/127.0.0.1/{port}; printf 'GET {path} HTTP/1.1\\r\\n\\r\\n' >&3; cat <&3");
    let out = as_nobody(&["bash", "-c", &script]).output().unwrap();
    String::from_utf8_lossy(&out.stdout).into_owned()
}

/// The exporter does not serve requests of other users over a loopback address, unless the operator
/// allows the user.
#[test]
fn other_user_needs_permission() {
    if !can_be_nobody() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let exporter = Exporter::start(&[], dir.path(), dir.path());
    for path in ["/metrics", "/debug/pprof/profile", "/sd", "/healthz"] {
        let got = get_as_nobody(exporter.port, path);
        assert!(
            got.starts_with("HTTP/1.1 403 ") && got.contains("--allow-user"),
            "{path}: {got}"
        );
    }
    assert_eq!(exporter.get("/healthz", "").0, 200);
    let exporter = Exporter::start(&["--allow-user", "65534"], dir.path(), dir.path());
    let got = get_as_nobody(exporter.port, "/healthz");
    assert!(got.starts_with("HTTP/1.1 200 "), "{got}");
}

/// A foreign `Host` field is refused. In DNS rebinding, a page with a name that resolves to this
/// host sends that name.
#[test]
fn foreign_host_field_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let exporter = Exporter::start(&["--allow-host", "vms.example"], dir.path(), dir.path());
    for (host, expected) in [
        ("attacker.example", 421),
        ("attacker.example:9465", 421),
        ("127.0.0.1.attacker.example", 421),
        ("a\"b", 421),
        ("127.0.0.1:9465", 200),
        ("[::1]:9465", 200),
        ("localhost", 200),
        ("VMs.example:80", 200),
    ] {
        let (status, body) = exporter.get("/metrics", &format!("Host: {host}\r\n"));
        assert_eq!(status, expected, "{host}: {body}");
    }
    let twice = "Host: localhost\r\nHost: attacker.example\r\n";
    assert_eq!(exporter.get("/metrics", twice).0, 421);
}

/// A client of another user that sends the token is served, and a token file that contains no token
/// is rejected.
#[test]
fn token_admits_other_user() {
    if !can_be_nobody() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("token");
    fs::write(&file, "0123456789abcdef0123\n").unwrap();
    let exporter = Exporter::start(&["--token-file", file.to_str().unwrap()], dir.path(), dir.path());
    let ask = |token: &str| {
        let script = format!(
            "exec 3<>/dev/tcp/127.0.0.1/{}; printf 'GET /healthz HTTP/1.1\\r\\nAuthorization: Bearer {token}\\r\\n\\r\\n' >&3; cat <&3",
            exporter.port
        );
        let out = as_nobody(&["bash", "-c", &script]).output().unwrap();
        String::from_utf8_lossy(&out.stdout).into_owned()
    };
    assert!(ask("0123456789abcdef0123").starts_with("HTTP/1.1 200 "));
    assert!(ask("0123456789abcdef0124").starts_with("HTTP/1.1 403 "));
    fs::write(&file, "short\n").unwrap();
    let refused = Command::new(PROGRAM)
        .args(["exporter", "--listen", "127.0.0.1:0", "--token-file"])
        .arg(&file)
        .output()
        .unwrap();
    let line = String::from_utf8(refused.stderr).unwrap();
    assert_eq!(
        (refused.status.code(), line.lines().count()),
        (Some(2), 1),
        "{line}"
    );
    assert!(line.contains("--token-file"), "{line}");
}

/// Environment variable with the directory and behaviour of the sockets offered by
/// [`as_a_hostile_user`].
const SOCKETS: &str = "EXPORTER_TEST_SOCKETS";

/// An error reply of 17 MB.
static LONG_ANSWER: LazyLock<String> = LazyLock::new(|| {
    let words = "\\u001b[31m long ".repeat(1 << 20);
    format!("{{\"id\":1,\"error\":{{\"kind\":\"limit\",\"message\":\"{words}\"}}}}\n")
});

/// Run as a child process by the tests: offers 60 sockets with one type of malicious behaviour.
#[test]
#[ignore = "run by the tests below, as another user"]
fn as_a_hostile_user() {
    let Ok(dir) = std::env::var(SOCKETS) else { return };
    let answers: fn(UnixStream) = match dir.rsplit_once('=').map(|(_, how)| how) {
        Some("stall") => |mut stream| _ = stream.read_to_end(&mut Vec::new()),
        _ => |stream| {
            let mut line = String::new();
            let _ = BufReader::new(&stream).read_line(&mut line);
            let _ = (&stream).write_all(LONG_ANSWER.as_bytes());
        },
    };
    // Building the answer takes time and must be complete before a client connects.
    assert!(LONG_ANSWER.len() > 15_000_000);
    let dir = dir.rsplit_once('=').map_or(dir.as_str(), |(dir, _)| dir);
    for n in 0..60 {
        // The sockets have hidden names until they accept connections from all users.
        let path = format!("{dir}/.{n:02}");
        let listener = UnixListener::bind(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        fs::rename(&path, format!("{dir}/{n:02}.look")).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || answers(stream));
            }
        });
    }
    // The test kills this process.
    std::thread::sleep(PATIENCE);
}

/// A user with 60 sockets in a directory for observers; killed on drop.
struct HostileUser {
    process: Child,
    /// Directory with a copy of the program that the user can access.
    _dir: tempfile::TempDir,
    sockets: tempfile::TempDir,
}

impl HostileUser {
    fn start(how: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let program = dir.path().join("program");
        // Copy the test program with another process, for the reason given at `put_program`.
        let own = std::env::current_exe().unwrap();
        assert!(
            Command::new("cp")
                .args([&own, &program])
                .status()
                .unwrap()
                .success()
        );
        let sockets = tempfile::tempdir().unwrap();
        fs::set_permissions(sockets.path(), fs::Permissions::from_mode(0o755)).unwrap();
        chown(sockets.path(), Some(NOBODY), Some(NOBODY)).unwrap();
        let arguments = ["--exact", "exporter_isolation::as_a_hostile_user", "--ignored"];
        let process = as_nobody(&[&[program.to_str().unwrap()], &arguments[..]].concat())
            .env(SOCKETS, format!("{}={how}", sockets.path().display()))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let user = Self {
            process,
            _dir: dir,
            sockets,
        };
        eventually("all sockets are there", || {
            user.sockets.path().join("59.look").exists()
        });
        user
    }
}

impl Drop for HostileUser {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Sixty sockets that answer with an error message of 17 MB fill neither the exporter's log nor its
/// memory.
#[test]
fn long_answers_do_not_fill_log_or_memory() {
    if !can_be_nobody() {
        return;
    }
    let hostile = HostileUser::start("talk");
    let dir = tempfile::tempdir().unwrap();
    let exporter = Exporter::start(
        &["--vms", hostile.sockets.path().to_str().unwrap()],
        dir.path(),
        dir.path(),
    );
    let before = exporter.peak_kib();
    for _ in 0..5 {
        let text = exporter.metrics();
        let down = |line: &&str| line.starts_with("perfvisor_exporter_vm_up") && line.ends_with(" 0.0");
        assert_eq!(text.lines().filter(down).count(), 60, "{text}");
        std::thread::sleep(Duration::from_millis(700));
    }
    let said = exporter.said();
    assert!(said.len() < 16 << 10, "{} bytes of log", said.len());
    assert!(
        !said.contains('\u{1b}') && said.lines().all(|line| line.chars().count() < 400),
        "{said}"
    );
    assert!(said.contains("too long"), "{said}");
    let grown = exporter.peak_kib() - before;
    eprintln!(
        "{} bytes of log, {before} KiB at first, {grown} KiB more at most",
        said.len()
    );
    assert!(grown < 64 << 10, "{grown} KiB more");
}

/// Stalled sockets enter a back-off period, during which scrapes do not wait for them.
#[test]
fn stalling_sockets_back_off() {
    if !can_be_nobody() {
        return;
    }
    let hostile = HostileUser::start("stall");
    let dir = tempfile::tempdir().unwrap();
    let vms = hostile.sockets.path().to_str().unwrap();
    let exporter = Exporter::start(&["--vms", vms], dir.path(), dir.path());
    eventually("a scrape asks none of them", || {
        std::thread::sleep(Duration::from_millis(600));
        let text = exporter.metrics();
        let skipped =
            |line: &&str| line.starts_with("perfvisor_exporter_vm_scrape_seconds{") && line.ends_with(" 0.0");
        text.lines().filter(skipped).count() == 60
    });
    assert!(exporter.said().contains("no reply for"), "{}", exporter.said());
    // Users who are not served have no VMs in the metrics.
    let exporter = Exporter::start(&["--vms", vms, "--vm-owner", "root"], dir.path(), dir.path());
    assert!(!exporter.metrics().contains("perfvisor_exporter_vm_up{"));
}

/// Returns the descendants of process `pid`.
fn descendants(pid: u32) -> Vec<u32> {
    let of = |pid: u32| fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    let tasks = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .flatten();
    let by_task = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let mut found: Vec<u32> = by_task
        .flat_map(|text| {
            text.split_whitespace()
                .map(|pid| pid.parse().unwrap())
                .collect::<Vec<_>>()
        })
        .collect();
    let below: Vec<u32> = found
        .iter()
        .flat_map(|pid| {
            of(*pid)
                .split_whitespace()
                .map(|pid| pid.parse().unwrap())
                .collect::<Vec<_>>()
        })
        .collect();
    found.extend(below);
    found
}

/// No other user can read the files of a profile in progress. If the exporter is killed, the
/// recording process also exits, and the next exporter removes the files.
#[test]
fn killed_exporter_leaves_no_processes_and_files() {
    let Some(vm) = SpinningVm::start("profiled", &[]) else {
        return;
    };
    let temporary = tempfile::tempdir().unwrap();
    let directories = || -> Vec<PathBuf> {
        let entries = fs::read_dir(temporary.path()).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    };
    let mut exporter = Exporter::start(&[], vm.runtime.path(), temporary.path());
    let mut client = exporter.connect();
    write!(
        client,
        "GET /debug/pprof/profile?vm=profiled&seconds=100 HTTP/1.1\r\n\r\n"
    )
    .unwrap();
    let data = || Some(directories().first()?.join("perf.data"));
    eventually("it records", || data().is_some_and(|data| data.exists()));
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&directories()[0]), mode(&data().unwrap())), (0o700, 0o600));
    let mut recorders = Vec::new();
    eventually("there is a process that records", || {
        recorders = descendants(exporter.process.id());
        !recorders.is_empty()
    });
    exporter.process.kill().unwrap();
    exporter.process.wait().unwrap();
    eventually("the process that records ends", || {
        recorders.iter().all(|pid| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            // A zombie may not have been reaped yet.
            stat.rsplit_once(") ")
                .is_none_or(|(_, rest)| rest.starts_with('Z'))
        })
    });
    assert_eq!(directories().len(), 1);
    let _next = Exporter::start(&[], vm.runtime.path(), temporary.path());
    eventually("the files are gone", || directories().is_empty());
}
