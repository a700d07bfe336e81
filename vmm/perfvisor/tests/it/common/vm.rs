//! VMs of the real program.

use std::io::{BufRead, BufReader};
use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::test_lock::{self, SharedLock};

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_perfvisor");

/// Puts the program at `path`, for a user who cannot go where it is. Another process writes it: were it this
/// one, a child that another test starts meanwhile could hold the file open for writing, and who executes it
/// would get ETXTBSY.
pub fn put_program(path: &Path) {
    let copied = Command::new("cp").args([Path::new(PROGRAM), path]).status();
    assert!(copied.is_ok_and(|copied| copied.success()), "{}", path.display());
}

/// Returns whether there is a KVM, and prints why the test is skipped if not.
#[track_caller]
pub fn has_kvm() -> bool {
    let has = Path::new("/dev/kvm").exists();
    if !has {
        super::skip::skipped("no /dev/kvm here", false);
    }
    has
}

/// Returns the standard output of a command, which must succeed.
#[track_caller]
pub fn stdout_of(command: &mut Command) -> String {
    let out = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(0), "{command:?}: {stderr}");
    String::from_utf8(out.stdout).unwrap()
}

/// Returns the exit status of a command, and what it wrote to standard output and standard error.
pub fn said(command: &mut Command) -> (Option<i32>, String) {
    let out = command.stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    (out.status.code(), text)
}

/// The lines that a child writes to standard error. A thread reads them, so that they never fill the pipe.
pub struct StderrLines {
    lines: Arc<Mutex<Vec<String>>>,
    reader: JoinHandle<()>,
}

impl StderrLines {
    /// Starts to collect the lines of `child`, whose standard error is a pipe.
    pub fn collect(child: &mut Child) -> Self {
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (stderr, list) = (BufReader::new(child.stderr.take().unwrap()), lines.clone());
        let reader = std::thread::spawn(move || {
            stderr
                .lines()
                .map_while(Result::ok)
                .for_each(|line| list.lock().unwrap().push(line));
        });
        Self { lines, reader }
    }

    /// Returns the lines so far.
    pub fn so_far(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }
}

/// A process of `perfvisor run` with a runtime directory of its own; killed when dropped.
pub struct VmProcess {
    pub child: Child,
    pub runtime: tempfile::TempDir,
    stderr: StderrLines,
    _lock: SharedLock,
}

impl VmProcess {
    /// Starts `perfvisor -v run --name NAME --memory 32M` with `args`. Its standard output is a pipe. Returns
    /// `None` where there is no KVM.
    pub fn spawn(mut program: Command, name: &str, args: &[&str], stdin: Stdio) -> Option<Self> {
        if !has_kvm() {
            return None;
        }
        let lock = test_lock::shared();
        let runtime = tempfile::tempdir().unwrap();
        let mut child = program
            .args(["-v", "run", "--name", name, "--memory", "32M"])
            .args(args)
            .env("XDG_RUNTIME_DIR", runtime.path())
            .env_remove("RUST_LOG")
            .stdin(stdin)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stderr = StderrLines::collect(&mut child);
        Some(Self {
            child,
            runtime,
            stderr,
            _lock: lock,
        })
    }

    /// Returns the lines that it has written to standard error so far.
    pub fn said(&self) -> Vec<String> {
        self.stderr.so_far()
    }

    /// Returns how many of these lines contain `part`.
    pub fn said_count(&self, part: &str) -> usize {
        self.said().iter().filter(|line| line.contains(part)).count()
    }

    /// Returns a command of this VM's operator.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(args).env("XDG_RUNTIME_DIR", self.runtime.path());
        command
    }

    /// Returns the number of descriptors that it has open.
    pub fn descriptors(&self) -> usize {
        let files = std::fs::read_dir(format!("/proc/{}/fd", self.child.id()));
        files.unwrap().count()
    }

    /// Waits for its end and for its last lines on standard error. Returns its exit status.
    pub fn wait(&mut self) -> Option<i32> {
        let status = self.child.wait().unwrap();
        eventually("its last lines", || self.stderr.reader.is_finished());
        status.code()
    }
}

impl Drop for VmProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A VM whose guest spins in three functions, 60, 30 and 10 % of its time.
pub struct SpinningVm(VmProcess);

impl SpinningVm {
    /// Starts a VM, and waits until its guest spins. Returns `None` where there is no KVM.
    pub fn start(name: &str, args: &[&str]) -> Option<Self> {
        Self::start_by(Command::new(PROGRAM), name, args)
    }

    /// Like [`SpinningVm::start`], with a variable in the VM's environment.
    pub fn start_with(name: &str, args: &[&str], variable: (&str, &Path)) -> Option<Self> {
        let mut program = Command::new(PROGRAM);
        program.env(variable.0, variable.1);
        Self::start_by(program, name, args)
    }

    /// Like [`SpinningVm::start`], with a limit on the number of descriptors.
    pub fn start_with_few_descriptors(name: &str, args: &[&str], descriptors: u32) -> Option<Self> {
        let mut shell = Command::new("/bin/sh");
        shell
            .arg("-c")
            .arg(format!("ulimit -n {descriptors} && exec \"$0\" \"$@\""))
            .arg(PROGRAM);
        Self::start_by(shell, name, args)
    }

    /// Starts the VM by a program that executes the real one with the arguments that it gets.
    pub fn start_by(program: Command, name: &str, args: &[&str]) -> Option<Self> {
        let args = [&["--cmdline", "loop"], args].concat();
        let mut process = VmProcess::spawn(program, name, &args, Stdio::null())?;
        // The sockets were there before the guest started.
        let mut lines = BufReader::new(process.child.stdout.take().unwrap()).lines();
        let spins = lines.any(|line| line.unwrap_or_default().contains("spinning"));
        assert!(spins, "the guest does not spin: {:?}", process.said());
        Some(Self(process))
    }

    /// Returns the CPU time of the first vCPU's thread so far.
    pub fn cpu_time(&self) -> Duration {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        let of_vcpu = |task: std::io::Result<std::fs::DirEntry>| {
            let path = task.ok()?.path();
            let name = std::fs::read_to_string(path.join("comm")).ok()?;
            (name.trim() == "vcpu0").then(|| std::fs::read_to_string(path.join("schedstat")).unwrap())
        };
        let schedstat = tasks.filter_map(of_vcpu).next().expect("it has a vCPU");
        Duration::from_nanos(schedstat.split(' ').next().unwrap().parse().unwrap())
    }

    /// Has `look` look at the VM for so many seconds, and again for twice as long until the first vCPU ran
    /// for a third of a second meanwhile, of which samples are taken: on a machine that does other work it
    /// has little time.
    pub fn looked_at_while_it_ran<T>(&self, mut seconds: f64, mut look: impl FnMut(&str) -> T) -> T {
        loop {
            let before = self.cpu_time();
            let seen = look(&seconds.to_string());
            if self.cpu_time() - before > Duration::from_millis(333) {
                return seen;
            }
            seconds *= 2.0;
        }
    }

    /// Returns a command of this VM's operator.
    pub fn operator(&self, args: &[&str]) -> Command {
        self.command(args)
    }
}

impl Deref for SpinningVm {
    type Target = VmProcess;

    fn deref(&self) -> &VmProcess {
        &self.0
    }
}

impl DerefMut for SpinningVm {
    fn deref_mut(&mut self) -> &mut VmProcess {
        &mut self.0
    }
}

/// What `ps` says when each VM has answered: on a machine that does other work one may take longer to answer
/// than `ps` waits.
pub fn with_answers(mut ps: impl FnMut() -> String) -> String {
    let mut text = String::new();
    eventually("ps has its answers", || {
        text = ps();
        !text.contains("not_responding") && !text.contains("not responding")
    });
    text
}

/// Waits for something that must come about; the bound only makes a failure end.
pub fn eventually(what: &str, mut test: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(300);
    while !test() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
