//! A VM of the real program whose guest says lines, and to which keys can be sent.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::vm::PROGRAM;

/// It only makes a failure end.
const PATIENCE: Duration = Duration::from_secs(300);

/// A VM with a runtime directory of its own; killed when the test ends.
pub struct Machine {
    pub child: Child,
    pub runtime: tempfile::TempDir,
    lines: Receiver<String>,
    said: Arc<Mutex<Vec<String>>>,
    listener: JoinHandle<()>,
}

impl Machine {
    /// `perfvisor -v run --name machine` with `args`, when its operator can reach it, or when it has ended
    /// before that. `None` where there is no KVM.
    pub fn start(args: &[&str]) -> Option<Self> {
        Self::start_by(Command::new(PROGRAM), args)
    }

    /// Likewise, with a variable in the VM's environment.
    pub fn start_with(args: &[&str], variable: (&str, &Path)) -> Option<Self> {
        let mut program = Command::new(PROGRAM);
        program.env(variable.0, variable.1);
        Self::start_by(program, args)
    }

    fn start_by(mut program: Command, args: &[&str]) -> Option<Self> {
        if !Path::new("/dev/kvm").exists() {
            super::skip::skipped("no /dev/kvm here", false);
            return None;
        }
        let runtime = tempfile::tempdir().unwrap();
        let mut child = program
            .args(["-v", "run", "--name", "machine", "--memory", "32M"])
            .args(args)
            .env("XDG_RUNTIME_DIR", runtime.path())
            .env_remove("RUST_LOG")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (tell, lines) = channel();
        let out = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                if tell.send(line).is_err() {
                    break;
                }
            }
        });
        let said = Arc::new(Mutex::new(Vec::new()));
        let (err, list) = (BufReader::new(child.stderr.take().unwrap()), said.clone());
        let listener = std::thread::spawn(move || {
            err.lines()
                .map_while(Result::ok)
                .for_each(|l| list.lock().unwrap().push(l));
        });
        let socket = runtime.path().join("perfvisor/machine.sock");
        super::vm::eventually("its operator can reach it", || {
            UnixStream::connect(&socket).is_ok() || child.try_wait().unwrap().is_some()
        });
        Some(Self {
            child,
            runtime,
            lines,
            said,
            listener,
        })
    }

    /// The next line of the guest that has `part` in it.
    #[track_caller]
    pub fn line_with(&self, part: &str) -> String {
        loop {
            match self.lines.recv_timeout(PATIENCE) {
                Ok(line) if line.contains(part) => return line,
                Ok(_) => {}
                Err(e) => panic!("no line with {part:?}: {e}; {:?}", self.said()),
            }
        }
    }

    /// As [`Machine::line_with`], of what the guest says from now on.
    #[track_caller]
    pub fn new_line_with(&self, part: &str) -> String {
        while self.lines.try_recv().is_ok() {}
        self.line_with(part)
    }

    /// Presses a key on the guest's console.
    pub fn key(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    }

    /// What it has said on standard error so far.
    pub fn said(&self) -> Vec<String> {
        self.said.lock().unwrap().clone()
    }

    /// How many lines of standard error have `part` in them.
    pub fn said_count(&self, part: &str) -> usize {
        self.said().iter().filter(|line| line.contains(part)).count()
    }

    /// Standard output of an operator's command, which must succeed.
    #[track_caller]
    pub fn operator(&self, args: &[&str]) -> String {
        let out = self.command(args).output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(0), "{args:?}: {stderr}");
        String::from_utf8(out.stdout).unwrap()
    }

    /// What `ps` lists, with these options, when the VM has answered it.
    #[track_caller]
    pub fn ps(&self, options: &[&str]) -> String {
        super::vm::with_answers(|| self.operator(&[&["ps"], options].concat()))
    }

    /// A command of this VM's operator.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(args).env("XDG_RUNTIME_DIR", self.runtime.path());
        command
    }

    /// Its descriptors and threads.
    pub fn holds(&self) -> (usize, usize) {
        let count = |what| {
            let path = format!("/proc/{}/{what}", self.child.id());
            std::fs::read_dir(path).unwrap().count()
        };
        (count("fd"), count("task"))
    }

    /// Its exit status, when all that it has said is there.
    pub fn status(&mut self) -> Option<i32> {
        let status = self.child.wait().unwrap();
        super::vm::eventually("its last words", || self.listener.is_finished());
        status.code()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
