//! A VM of the real program with the built-in guest, spinning.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_perfvisor");

/// Puts the program at `path`, for a user who cannot go where it is. Another process writes it: were it this
/// one, a child that another test starts meanwhile could hold the file open for writing, and who executes it
/// would get ETXTBSY.
pub fn put_program(path: &Path) {
    let copied = Command::new("cp").args([Path::new(PROGRAM), path]).status();
    assert!(copied.is_ok_and(|copied| copied.success()), "{}", path.display());
}

/// A VM with a runtime directory of its own; killed when the test ends.
pub struct SpinningVm {
    pub child: Child,
    pub runtime: tempfile::TempDir,
    said: Arc<Mutex<Vec<String>>>,
}

impl SpinningVm {
    /// Its guest spins in three functions, 60, 30 and 10 % of its time. `None` where there is no KVM.
    pub fn start(name: &str, args: &[&str]) -> Option<Self> {
        Self::start_by(Command::new(PROGRAM), name, args)
    }

    /// Likewise, with a variable in the VM's environment.
    pub fn start_with(name: &str, args: &[&str], variable: (&str, &Path)) -> Option<Self> {
        let mut program = Command::new(PROGRAM);
        program.env(variable.0, variable.1);
        Self::start_by(program, name, args)
    }

    /// Likewise, with no more than `descriptors` of them for the VM.
    pub fn start_with_few_descriptors(name: &str, args: &[&str], descriptors: u32) -> Option<Self> {
        let mut shell = Command::new("/bin/sh");
        shell
            .arg("-c")
            .arg(format!("ulimit -n {descriptors} && exec \"$0\" \"$@\""))
            .arg(PROGRAM);
        Self::start_by(shell, name, args)
    }

    fn start_by(mut program: Command, name: &str, args: &[&str]) -> Option<Self> {
        if !Path::new("/dev/kvm").exists() {
            super::skip::skipped("no /dev/kvm here", false);
            return None;
        }
        let runtime = tempfile::tempdir().unwrap();
        let mut child = program
            .args([
                "-v",
                "run",
                "--name",
                name,
                "--memory",
                "32M",
                "--cmdline",
                "loop",
            ])
            .args(args)
            .env("XDG_RUNTIME_DIR", runtime.path())
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let said = Arc::new(Mutex::new(Vec::new()));
        let (lines, list) = (BufReader::new(child.stderr.take().unwrap()).lines(), said.clone());
        // What it says must not fill the pipe.
        std::thread::spawn(move || {
            lines
                .map_while(Result::ok)
                .for_each(|l| list.lock().unwrap().push(l))
        });
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let vm = Self { child, runtime, said };
        // The sockets were there before the guest started.
        let spins = lines.any(|line| line.unwrap_or_default().contains("spinning"));
        assert!(spins, "the guest does not spin: {:?}", vm.said());
        Some(vm)
    }

    /// What it has said on standard error so far.
    pub fn said(&self) -> Vec<String> {
        self.said.lock().unwrap().clone()
    }

    /// CPU time of the first vCPU's thread so far.
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

    /// A command of this VM's operator.
    pub fn operator(&self, args: &[&str]) -> Command {
        let mut command = Command::new(PROGRAM);
        command.args(args).env("XDG_RUNTIME_DIR", self.runtime.path());
        command
    }
}

impl Drop for SpinningVm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
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
