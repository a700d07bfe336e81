//! A VM whose guest writes lines and reads keys.

use std::io::{BufRead, BufReader, Write};
use std::ops::{Deref, DerefMut};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use super::vm::{PROGRAM, VmProcess};

/// Time limit for a line of the guest, reached only by failing tests.
const LINE_TIMEOUT: Duration = Duration::from_secs(300);

/// A VM named `machine` with its console connected to the test.
pub struct ConsoleVm {
    process: VmProcess,
    lines: Receiver<String>,
}

impl ConsoleVm {
    /// Starts a VM with `args`, and waits until its control socket is ready or the VM has exited.
    /// Returns `None` if KVM is unavailable.
    pub fn start(args: &[&str]) -> Option<Self> {
        Self::start_by(Command::new(PROGRAM), args)
    }

    /// Starts a VM like [`ConsoleVm::start`], with an additional environment variable.
    pub fn start_with(args: &[&str], variable: (&str, &Path)) -> Option<Self> {
        let mut program = Command::new(PROGRAM);
        program.env(variable.0, variable.1);
        Self::start_by(program, args)
    }

    fn start_by(program: Command, args: &[&str]) -> Option<Self> {
        let mut process = VmProcess::spawn(program, "machine", args, Stdio::piped())?;
        let (sender, lines) = channel();
        let out = BufReader::new(process.child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let socket = process.runtime.path().join("perfvisor/machine.sock");
        super::vm::eventually("its operator can reach it", || {
            UnixStream::connect(&socket).is_ok() || process.child.try_wait().unwrap().is_some()
        });
        Some(Self { process, lines })
    }

    /// Returns the guest's next line that contains `part`.
    #[track_caller]
    pub fn line_with(&self, part: &str) -> String {
        loop {
            match self.lines.recv_timeout(LINE_TIMEOUT) {
                Ok(line) if line.contains(part) => return line,
                Ok(_) => {}
                Err(e) => panic!("no line with {part:?}: {e}; {:?}", self.log_lines()),
            }
        }
    }

    /// Discards the lines that have arrived, and returns the next line that contains `part`.
    #[track_caller]
    pub fn new_line_with(&self, part: &str) -> String {
        while self.lines.try_recv().is_ok() {}
        self.line_with(part)
    }

    /// Presses a key on the guest's console.
    pub fn key(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"x").unwrap();
    }

    /// Runs an operator command that must succeed, and returns its standard output.
    #[track_caller]
    pub fn operator(&self, args: &[&str]) -> String {
        super::vm::stdout_of(&mut self.command(args))
    }

    /// Returns the output of `ps` with `options`, once the VM has answered.
    #[track_caller]
    pub fn ps(&self, options: &[&str]) -> String {
        super::vm::ps_until_all_answer(|| self.operator(&[&["ps"], options].concat()))
    }

    /// Returns the numbers of open descriptors and threads of the VM.
    pub fn resource_counts(&self) -> (usize, usize) {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id()));
        (self.descriptors(), tasks.unwrap().count())
    }

    /// Waits for the VM to exit and its standard error to close. Returns the exit status.
    pub fn status(&mut self) -> Option<i32> {
        self.process.wait()
    }
}

impl Deref for ConsoleVm {
    type Target = VmProcess;

    fn deref(&self) -> &VmProcess {
        &self.process
    }
}

impl DerefMut for ConsoleVm {
    fn deref_mut(&mut self) -> &mut VmProcess {
        &mut self.process
    }
}
