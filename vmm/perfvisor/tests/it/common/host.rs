//! Several VMs on one host, with an exporter.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::test_lock::{self, SharedLock};
use super::vm::{PROGRAM, StderrLines, eventually, has_kvm};

/// Time limit of a wait, reached only by failing tests.
const PATIENCE: Duration = Duration::from_secs(300);

/// VMs that share a runtime directory, and their exporter; killed on drop.
pub struct Host {
    pub runtime: tempfile::TempDir,
    pub vms: BTreeMap<String, Child>,
    exporter: Child,
    pub port: u16,
    stderr: StderrLines,
    _lock: SharedLock,
}

impl Host {
    /// Starts VMs and an exporter. Returns `None` if KVM is unavailable.
    pub fn start(vms: &[(&str, &[&str])]) -> Option<Self> {
        if !has_kvm() {
            return None;
        }
        let mut host = Self::with_exporter(Command::new(PROGRAM), &[]);
        for (name, args) in vms {
            host.add(name, args);
        }
        Some(host)
    }

    /// Starts only an exporter, which `program` executes with the arguments `args`.
    pub fn with_exporter(mut program: Command, args: &[&str]) -> Self {
        let lock = test_lock::shared();
        let runtime = tempfile::tempdir().unwrap();
        let mut exporter = program
            .args([
                "-v",
                "exporter",
                "--listen",
                "127.0.0.1:0",
                "--allow-host",
                "here.example",
            ])
            .args(args)
            .env("XDG_RUNTIME_DIR", runtime.path())
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = StderrLines::collect(&mut exporter);
        let mut host = Self {
            runtime,
            vms: BTreeMap::new(),
            exporter,
            port: 0,
            stderr,
            _lock: lock,
        };
        eventually("the exporter says where it serves", || {
            let said = host.stderr.so_far();
            let port = |line: &String| line.split_once("serving at 127.0.0.1:")?.1.trim().parse().ok();
            host.port = said.iter().find_map(port).unwrap_or(0);
            host.port != 0
        });
        host
    }

    /// Starts a VM with a spinning guest.
    pub fn add(&mut self, name: &str, args: &[&str]) {
        let mut vm = Command::new(PROGRAM)
            .args(["run", "--name", name, "--memory", "32M", "--cmdline", "loop"])
            .args(args)
            .env("XDG_RUNTIME_DIR", self.runtime.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(vm.stdout.take().unwrap()).lines();
        self.vms.insert(name.to_owned(), vm);
        assert!(
            lines.any(|line| line.unwrap_or_default().contains("spinning")),
            "{name} does not spin"
        );
    }

    /// Returns the lines that the exporter has written to stderr so far.
    pub fn stderr(&self) -> Vec<String> {
        self.stderr.so_far()
    }

    pub fn socket(&self, name: &str) -> PathBuf {
        self.runtime.path().join(format!("perfvisor/{name}.sock"))
    }

    pub fn signal(&self, name: &str, signal: &str) {
        let pid = self.vms[name].id().to_string();
        assert!(
            Command::new("kill")
                .args([signal, &pid])
                .status()
                .unwrap()
                .success()
        );
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        stream
    }

    pub fn get(&self, target: &str) -> (u16, Vec<u8>) {
        get(self.connect(), target)
    }

    pub fn text(&self, target: &str) -> String {
        let (status, body) = self.get(target);
        let text = String::from_utf8(body).unwrap();
        assert_eq!(status, 200, "{target}: {text}");
        text
    }

    /// Returns the metrics once the VMs `names` are up. On a busy host, a VM may take longer to
    /// answer than the exporter waits.
    pub fn metrics_with(&self, names: &[&str]) -> String {
        let mut text = String::new();
        super::vm::eventually(&format!("{names:?} are up"), || {
            text = self.text("/metrics");
            let up = self.up(&text);
            names.iter().all(|name| up.get(*name) == Some(&true))
        });
        text
    }

    /// Returns for each VM in the metrics whether it is up.
    pub fn up(&self, text: &str) -> BTreeMap<String, bool> {
        let up = |line: &str| {
            let (name, value) = line
                .strip_prefix("perfvisor_exporter_vm_up{vm=\"")?
                .split_once("\"} ")?;
            Some((name.to_owned(), value == "1.0"))
        };
        text.lines().filter_map(up).collect()
    }

    pub fn is_up(&self, name: &str) -> Option<bool> {
        self.up(&self.text("/metrics")).get(name).copied()
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        for child in self.vms.values_mut().chain([&mut self.exporter]) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

pub fn get(mut stream: impl Read + Write, target: &str) -> (u16, Vec<u8>) {
    write!(stream, "GET {target} HTTP/1.1\r\nHost: here.example:99\r\n\r\n").unwrap();
    reply(stream)
}

pub fn reply(mut stream: impl Read) -> (u16, Vec<u8>) {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    let end = bytes
        .windows(4)
        .position(|w| w == b"\r\n\r\n")
        .expect("a head and a body");
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
    let length = head
        .lines()
        .find_map(|l| l.strip_prefix("Content-Length: ")?.parse().ok());
    assert_eq!(length, Some(bytes.len() - end - 4));
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, bytes[end + 4..].to_vec())
}
