//! Starts VMs with the built `perfvisor` program.

use std::io::{BufRead, BufReader};
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::test_lock::{self, SharedLock};

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_perfvisor");

/// Copies the program to `path` for a user without access to the build directory. The copy is made
/// by another process, because a concurrently started child could otherwise hold the file open for
/// writing, and executing it would fail with ETXTBSY.
pub fn put_program(path: &Path) {
    let copied = Command::new("cp").args([Path::new(PROGRAM), path]).status();
    assert!(copied.is_ok_and(|copied| copied.success()), "{}", path.display());
}

/// Returns whether KVM is available. If not, prints why the test is skipped.
#[track_caller]
pub fn has_kvm() -> bool {
    let has = Path::new("/dev/kvm").exists();
    if !has {
        test_support::skip::skipped("no /dev/kvm here", false);
    }
    has
}

/// Runs a command that must succeed, and returns its standard output.
#[track_caller]
pub fn stdout_of(command: &mut Command) -> String {
    let out = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(0), "{command:?}: {stderr}");
    String::from_utf8(out.stdout).unwrap()
}

/// Runs a command, and returns its exit status and the combined text of standard output and
/// standard error.
pub fn run_and_read_stderr(command: &mut Command) -> (Option<i32>, String) {
    let out = command.stdin(Stdio::null()).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned() + &String::from_utf8_lossy(&out.stderr);
    (out.status.code(), text)
}

/// Runs a command that must exit with status 2 and print one line. Returns that line.
#[track_caller]
pub fn refusal(command: &mut Command) -> String {
    let (status, text) = run_and_read_stderr(command);
    assert_eq!(
        (status, text.lines().count()),
        (Some(2), 1),
        "{command:?}: {text}"
    );
    text
}

#[track_caller]
pub fn assert_contains(text: &str, part: &str) {
    assert!(text.contains(part), "no {part:?} in {text}");
}

/// Returns the child processes of `pid`, including zombies, with their names.
pub fn children(pid: u32) -> Vec<(u32, String)> {
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let child = |number: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
        let (name, rest) = stat.split_once('(')?.1.rsplit_once(") ")?;
        let parent: u32 = rest.split(' ').nth(1)?.parse().ok()?;
        (parent == pid).then(|| (number, name.to_owned()))
    };
    numbers.filter_map(child).collect()
}

/// Returns the ID of the process that runs the VM. In a jail with a PID namespace, this is process
/// 1 of the namespace, which the started process supervises. Otherwise it is the started process.
pub fn vm_pid(started: u32) -> u32 {
    let first = |(pid, _): &(u32, String)| {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        let ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        ids.is_some_and(|ids| ids.split_whitespace().nth(1) == Some("1"))
    };
    children(started)
        .into_iter()
        .find(first)
        .map_or(started, |(pid, _)| pid)
}

/// Collects the standard error of a child on a thread, so that the pipe never fills.
pub struct StderrLines {
    lines: Arc<Mutex<Vec<String>>>,
    reader: JoinHandle<()>,
}

impl StderrLines {
    /// Starts collecting the lines of `child`, whose standard error is a pipe.
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

    /// Returns the lines collected so far.
    pub fn so_far(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }
}

/// A process of `perfvisor run` with a private runtime directory; killed on drop.
pub struct VmProcess {
    pub child: Child,
    pub runtime: tempfile::TempDir,
    stderr: StderrLines,
    _lock: SharedLock,
}

impl VmProcess {
    /// Starts `perfvisor -v run --name NAME --memory 32M` with `args`. Omits `--memory` if `args`
    /// contain `--restore` or `--incoming`. The standard output of the process is a pipe. Returns
    /// `None` if KVM is unavailable.
    pub fn spawn(mut program: Command, name: &str, args: &[&str], stdin: Stdio) -> Option<Self> {
        if !has_kvm() {
            return None;
        }
        let lock = test_lock::shared();
        let runtime = tempfile::tempdir().unwrap();
        let memory: &[&str] = if args.contains(&"--restore") || args.contains(&"--incoming") {
            &[]
        } else {
            &["--memory", "32M"]
        };
        let mut child = program
            .args(["-v", "run", "--name", name])
            .args(memory)
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

    /// Returns the lines written to standard error so far.
    pub fn log_lines(&self) -> Vec<String> {
        self.stderr.so_far()
    }

    /// Returns the number of lines on standard error that contain `part`.
    pub fn count_log_lines(&self, part: &str) -> usize {
        self.log_lines().iter().filter(|line| line.contains(part)).count()
    }

    /// Returns an operator command for this VM.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(args).env("XDG_RUNTIME_DIR", self.runtime.path());
        command
    }

    /// Returns the ID of the process that runs the VM. In a jail with a PID namespace, the started
    /// process supervises that process.
    pub fn pid(&self) -> u32 {
        vm_pid(self.child.id())
    }

    /// Returns the CPU time consumed by the first vCPU's thread.
    pub fn cpu_time(&self) -> Duration {
        cpu_time(&self.vcpu_schedstat())
    }

    /// Returns the file with the scheduler's statistics of the first vCPU's thread.
    pub fn vcpu_schedstat(&self) -> PathBuf {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap();
        let of_vcpu = |task: std::io::Result<std::fs::DirEntry>| {
            let path = task.ok()?.path();
            let name = std::fs::read_to_string(path.join("comm")).ok()?;
            (name.trim() == "vcpu0").then(|| path.join("schedstat"))
        };
        tasks.filter_map(of_vcpu).next().expect("it has a vCPU")
    }

    /// Returns the number of open descriptors of the process.
    pub fn descriptors(&self) -> usize {
        let files = std::fs::read_dir(format!("/proc/{}/fd", self.pid()));
        files.unwrap().count()
    }

    /// Returns the output of `perfvisor ctl NAME status`.
    pub fn state_of(&self, name: &str) -> String {
        run_and_read_stderr(&mut self.command(&["ctl", name, "status"])).1
    }

    /// Waits until the output of `ctl NAME status` begins with `state`, which has the form `NAME:
    /// STATE`.
    pub fn await_state(&self, state: &str) {
        let name = state.split(':').next().unwrap();
        eventually(state, || self.state_of(name).starts_with(state));
    }

    /// Asserts that cycles of the VM are counted.
    pub fn assert_counts_cycles(&self, name: &str) {
        let args = ["stat", name, "-x,", "-e", "cycles", "-d", "0.5"];
        let text = stdout_of(&mut self.command(&args));
        let count = text.split(',').next().and_then(|count| count.parse::<f64>().ok());
        assert!(count.is_some_and(|count| count > 0.0), "{text}");
    }

    /// Stops the VM `name` with `perfvisor ctl NAME stop`, and checks its exit status.
    #[track_caller]
    pub fn stop(&mut self, name: &str) {
        stdout_of(&mut self.command(&["ctl", name, "stop"]));
        assert_eq!(self.wait(), Some(0), "{:?}", self.log_lines());
    }

    /// Waits for the process to exit and its standard error to close. Returns the exit status.
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

/// A VM with a guest that spins in three functions, which take 60, 30 and 10 % of its time.
pub struct SpinningVm(VmProcess);

impl SpinningVm {
    /// Starts a VM, and waits until its guest is spinning. Returns `None` if KVM is unavailable.
    pub fn start(name: &str, args: &[&str]) -> Option<Self> {
        Self::start_by(Command::new(PROGRAM), name, args)
    }

    /// Starts a VM like [`SpinningVm::start`], with an additional environment variable.
    pub fn start_with(name: &str, args: &[&str], variable: (&str, &Path)) -> Option<Self> {
        let mut program = Command::new(PROGRAM);
        program.env(variable.0, variable.1);
        Self::start_by(program, name, args)
    }

    /// Starts a VM like [`SpinningVm::start`], with a limit on the number of descriptors.
    pub fn start_with_few_descriptors(name: &str, args: &[&str], descriptors: u32) -> Option<Self> {
        let mut shell = Command::new("/bin/sh");
        shell
            .arg("-c")
            .arg(format!("ulimit -n {descriptors} && exec \"$0\" \"$@\""))
            .arg(PROGRAM);
        Self::start_by(shell, name, args)
    }

    /// Starts the VM through `program`, which executes `perfvisor` with the arguments that it
    /// receives.
    pub fn start_by(program: Command, name: &str, args: &[&str]) -> Option<Self> {
        let args = [&["--cmdline", "loop"], args].concat();
        let mut process = VmProcess::spawn(program, name, &args, Stdio::null())?;
        // Once the guest prints, the VM's sockets exist.
        let mut lines = BufReader::new(process.child.stdout.take().unwrap()).lines();
        let spins = lines.any(|line| line.unwrap_or_default().contains("spinning"));
        assert!(spins, "the guest does not spin: {:?}", process.log_lines());
        Some(Self(process))
    }

    /// Calls `look` with a duration in seconds. Repeats the call with twice the duration until the
    /// first vCPU has run for a third of a second during a call, because a vCPU on a busy host has
    /// little CPU time to sample.
    pub fn observe_while_running<T>(&self, mut seconds: f64, mut look: impl FnMut(&str) -> T) -> T {
        loop {
            let before = self.cpu_time();
            let seen = look(&seconds.to_string());
            if self.cpu_time() - before > Duration::from_millis(333) {
                return seen;
            }
            seconds *= 2.0;
        }
    }

    /// Checks that an operator can count `events`, which include cycles and task-clock, and sample
    /// the guest.
    pub fn assert_counted_and_sampled(&self, name: &str, events: &str) {
        let text = self.observe_while_running(1.0, |seconds| {
            let args = ["stat", name, "-x,", "-e", events, "-d", seconds];
            let (status, text) = run_and_read_stderr(&mut self.operator(&args));
            assert_eq!(status, Some(0), "{text}");
            text
        });
        for event in ["cycles", "task-clock"] {
            let line = text.lines().find(|line| line.contains(event));
            let count = line.and_then(|line| line.split(',').next()?.parse::<f64>().ok());
            assert!(count.is_some_and(|count| count > 0.0), "{event}: {text}");
        }
        let file = self.runtime.path().join("perf.data");
        let file = file.to_str().unwrap();
        self.observe_while_running(1.0, |seconds| {
            let args = ["record", name, "-F", "500", "-d", seconds, "-q", "-o", file];
            let (status, text) = run_and_read_stderr(&mut self.operator(&args));
            assert_eq!(status, Some(0), "{text}");
        });
        let (status, text) = run_and_read_stderr(&mut self.operator(&["report", "-i", file]));
        assert_eq!(status, Some(0), "{text}");
        assert!(text.contains("spin_hot"), "{text}");
    }

    /// Returns an operator command for this VM.
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

/// Repeats `ps` until all VMs have answered. On a busy host, a VM may take longer to answer than
/// `ps` waits.
pub fn ps_until_all_answer(mut ps: impl FnMut() -> String) -> String {
    let mut text = String::new();
    eventually("ps has its answers", || {
        text = ps();
        !text.contains("not_responding") && !text.contains("not responding")
    });
    text
}

/// Returns the CPU time of a thread, read from its schedstat file.
pub fn cpu_time(schedstat: &Path) -> Duration {
    let text = std::fs::read_to_string(schedstat).unwrap();
    Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
}

/// Waits until `test` returns `true`. Panics at a time limit that only failing tests reach.
pub fn eventually(what: &str, mut test: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(300);
    while !test() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}
