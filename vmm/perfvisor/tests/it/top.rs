//! `perfvisor top` with a running guest, as text and on a terminal. The terminal settings must be
//! restored.
#![expect(unsafe_code, reason = "sends signals")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::common::host::Host;
use crate::common::pty::{Settings, pseudo_terminal, set_window_size, settings};
use crate::common::vm::{PROGRAM, SpinningVm, eventually, stdout_of};

struct TestVm(SpinningVm);

impl TestVm {
    /// Starts a spinning VM. Returns `None` if KVM is unavailable.
    fn spinning() -> Option<Self> {
        SpinningVm::start("test", &["--cpus", "2"]).map(Self)
    }

    fn top(&self, args: &[&str]) -> Command {
        let mut command = self.0.operator(&["top"]);
        command.args(args);
        command
    }
}

/// The text output contains the sampled functions and rows for each vCPU and counter, and errors
/// consist of one line.
#[test]
fn text_screen_shows_all_views() {
    let Some(vm) = TestVm::spinning() else { return };
    let out = vm.0.observe_while_running(1.5, |seconds| {
        let args = ["test", "--once", "-d", seconds, "-F", "500"];
        vm.top(&args).output().unwrap()
    });
    let text = String::from_utf8(out.stdout).unwrap();
    assert_eq!(
        out.status.code(),
        Some(0),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    let share = |name: &str| -> f64 {
        let line = text
            .lines()
            .find(|l| l.ends_with(name))
            .unwrap_or_else(|| panic!("{name}: {text}"));
        line.split_whitespace()
            .next()
            .unwrap()
            .trim_end_matches('%')
            .parse()
            .unwrap()
    };
    assert!(
        share("spin_hot") > share("spin_warm") && share("spin_warm") > 0.0,
        "{text}"
    );
    let shares = text
        .lines()
        .filter(|l| l.contains(" [.] ") || l.contains(" [k] "));
    let sum: f64 = shares
        .map(|l| {
            l.split_whitespace()
                .next()
                .unwrap()
                .trim_end_matches('%')
                .parse::<f64>()
                .unwrap()
        })
        .sum();
    assert!((99.0..=101.0).contains(&sum), "{sum}: {text}");
    assert!(
        !text.contains('\x1b'),
        "no terminal codes where there is no terminal"
    );
    let rows = |first: &str| {
        text.lines()
            .filter(|l| l.split_whitespace().next() == Some(first))
            .count()
    };
    // One of the rows belongs to the table of vCPUs, and the others belong to the table of guest
    // counters.
    assert!(rows("0") > 1 && rows("0") == rows("1"), "{text}");
    for (args, word) in [
        (&["test", "--once", "-e", "kvm:exits"][..], "cannot sample"),
        (&["test", "--once", "-e", "cyclez"], "unknown event"),
        (&["nobody", "--once"], "running are test"),
        (&["test", "--once", "--vcpu", "9"], "vCPU 9 not found"),
        (&["test", "-d", "0"], "above 0"),
    ] {
        let out = vm.top(args).output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(2), "{args:?}: {stderr}");
        assert!(
            stderr.contains(word) && stderr.trim_end().lines().count() == 1,
            "{args:?}: {stderr}"
        );
    }
}

/// Returns the lines of a terminal of 100 by 20 characters after the output `text`. Only changes
/// are drawn, so words in the output are not contiguous.
fn on_screen(text: &str) -> Vec<String> {
    let mut screen = vec![vec![' '; 100]; 20];
    let (mut row, mut column) = (0, 0);
    let mut left = text.chars();
    while let Some(c) = left.next() {
        if c != '\x1b' {
            if let Some(cell) = screen.get_mut(row).and_then(|line| line.get_mut(column)) {
                *cell = c;
            }
            column += 1;
            continue;
        }
        if left.next() != Some('[') {
            continue;
        }
        let mut numbers = String::new();
        for c in left.by_ref() {
            match c {
                'H' => {
                    let (r, c) = numbers.split_once(';').unwrap_or(("1", "1"));
                    (row, column) = (r.parse().unwrap_or(1) - 1, c.parse().unwrap_or(1) - 1);
                }
                'J' => screen.iter_mut().for_each(|line| line.fill(' ')),
                '\x40'..='\x7e' => {}
                c => {
                    numbers.push(c);
                    continue;
                }
            }
            break;
        }
    }
    let line = |line: Vec<char>| line.into_iter().collect();
    screen.into_iter().map(line).collect()
}

/// A `top` process on a pseudo-terminal, and its output.
struct OnTerminal {
    child: Child,
    slave: OwnedFd,
    keys: File,
    before: Settings,
    shown: Arc<Mutex<String>>,
    reader: std::thread::JoinHandle<()>,
}

impl OnTerminal {
    fn start(command: &mut Command) -> Self {
        let (master, slave) = pseudo_terminal();
        set_window_size(&slave, 20, 100);
        let before = settings(&slave);
        let stdio = || Stdio::from(File::from(slave.try_clone().unwrap()));
        let child = command
            .env("TERM", "xterm")
            .stdin(stdio())
            .stdout(stdio())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let shown = Arc::new(Mutex::new(String::new()));
        let keys = File::from(master.try_clone().unwrap());
        let (all, mut master) = (shown.clone(), File::from(master));
        let reader = std::thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(n @ 1..) = master.read(&mut chunk) {
                all.lock()
                    .unwrap()
                    .push_str(&String::from_utf8_lossy(&chunk[..n]));
            }
        });
        Self {
            child,
            slave,
            keys,
            before,
            shown,
            reader,
        }
    }

    /// Waits until all of `words` are on the screen.
    fn shows(&self, words: &[&str]) {
        crate::common::vm::eventually(&format!("{words:?} are shown"), || {
            let screen = on_screen(&self.shown.lock().unwrap());
            words
                .iter()
                .all(|word| screen.iter().any(|line| line.contains(word)))
        });
    }

    fn types(&mut self, keys: &[u8]) {
        self.keys.write_all(keys).unwrap();
    }

    /// Waits for `top` to exit, checks that the terminal was restored, and returns the status and
    /// the output.
    fn ended(mut self) -> (ExitStatus, String) {
        let end = Instant::now() + Duration::from_secs(300);
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > end {
                self.child.kill().unwrap();
                panic!("top did not end");
            }
            std::thread::sleep(Duration::from_millis(10));
        };
        assert_eq!(settings(&self.slave), self.before, "the terminal is as it was");
        drop(self.slave);
        self.reader.join().unwrap();
        let shown = self.shown.lock().unwrap().clone();
        // The mouse is released, the alternate screen is left, and the cursor is visible.
        let last = |code: &str| shown.rfind(code);
        assert!(
            last("\x1b[?1000l").is_some() && last("\x1b[?1000l") > last("\x1b[?1000h"),
            "{shown:?}"
        );
        assert!(last("\x1b[?1049l") > last("\x1b[?1049h"), "{shown:?}");
        assert!(last("\x1b[?25h") > last("\x1b[?25l"), "{shown:?}");
        (status, shown)
    }
}

/// Runs `top` on a terminal until it has drawn the guest, terminates it with `leave`, and checks
/// that the terminal is restored.
fn leave_by(vm: &mut TestVm, leave: impl FnOnce(&mut TestVm, &Child, &mut File)) -> (ExitStatus, String) {
    let mut top = OnTerminal::start(&mut vm.top(&["test", "-d", "0.3"]));
    top.shows(&["spin_hot"]);
    assert_ne!(settings(&top.slave), top.before, "keys come one by one");
    leave(vm, &top.child, &mut top.keys);
    top.ended()
}

#[test]
fn every_exit_of_top_restores_terminal() {
    let Some(mut vm) = TestVm::spinning() else { return };
    for key in [&b"q"[..], b"\t\ts\x03"] {
        let (status, _) = leave_by(&mut vm, |_, _, terminal| terminal.write_all(key).unwrap());
        assert_eq!(status.code(), Some(0));
    }
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        let (status, _) = leave_by(&mut vm, |_, top, _| {
            // SAFETY: the process is our child and has not been waited for.
            unsafe { libc::kill(top.id() as i32, signal) };
        });
        assert_eq!(status.code(), Some(0));
    }
    let (status, shown) = leave_by(&mut vm, |vm, _, _| vm.0.child.kill().unwrap());
    assert_eq!(status.code(), Some(0));
    assert!(shown.contains("the VM has exited"));
}

/// If the VM moves, the view of `top` continues in the process to which the VM has moved.
#[test]
fn top_follows_a_vm_that_moves() {
    let Some(mut vm) = TestVm::spinning() else { return };
    let mut top = OnTerminal::start(&mut vm.top(&["test", "-d", "0.3"]));
    top.shows(&["spin_hot"]);
    let socket = vm.0.runtime.path().join("in");
    let address = format!("unix:{}", socket.display());
    let mut receiver = vm.0.operator(&[
        "run",
        "--name",
        "two",
        "--incoming",
        &address,
        "--console",
        "none",
    ]);
    let mut receiver = receiver.stderr(Stdio::null()).spawn().unwrap();
    eventually("it waits", || socket.exists());
    stdout_of(&mut vm.0.operator(&["ctl", "test", "migrate", &address]));
    assert_eq!(vm.0.wait(), Some(0));
    // Wait for several updates of the screen.
    std::thread::sleep(Duration::from_secs(2));
    assert!(
        top.child.try_wait().unwrap().is_none(),
        "it has ended with the first process"
    );
    top.types(b"q");
    let (status, shown) = top.ended();
    assert_eq!(status.code(), Some(0));
    assert!(!shown.contains("the VM has exited"));
    stdout_of(&mut vm.0.operator(&["ctl", "two", "stop"]));
    receiver.wait().unwrap();
}

/// For several VMs, the text output has one row per VM and combines their functions. A VM that does
/// not respond is listed with the reason.
#[test]
fn text_screen_shows_all_vms() {
    let Some(host) = Host::start(&[("a", &[]), ("b", &["--cpus", "2"]), ("c", &[])]) else {
        return;
    };
    let top = |args: &[&str]| {
        let mut command = Command::new(PROGRAM);
        command.args(args).env("XDG_RUNTIME_DIR", host.runtime.path());
        command
    };
    host.signal("c", "-STOP");
    let mut text = String::new();
    crate::common::vm::eventually("both guests ran meanwhile", || {
        let out = top(&["top", "--all", "--once", "-d", "0.5"]).output().unwrap();
        let said = String::from_utf8_lossy(&out.stderr);
        text = String::from_utf8(out.stdout).unwrap();
        assert_eq!(out.status.code(), Some(1), "{text}{said}");
        assert!(said.contains("c: the VM does not respond"), "{said}");
        text.contains("] spin_hot")
    });
    let row = |first: &str| text.lines().find(|l| l.split_whitespace().next() == Some(first));
    assert!(text.contains("2 of 3 VMs"), "{text}");
    for vm in ["a", "b"] {
        assert!(
            row(vm).is_some_and(|row| row.contains("running") && row.contains('%')),
            "{text}"
        );
    }
    assert!(
        text.lines().filter(|l| l.contains("] spin_hot")).count() == 1,
        "one row for both: {text}"
    );
    host.signal("c", "-CONT");

    let mut live = OnTerminal::start(&mut top(&["top", "--all", "-d", "0.3"]));
    live.shows(&["3 of 3 VMs"]);
    // Open the functions of the second VM and search them.
    live.types(b"\x1b[B\r");
    live.shows(&["spin_hot", "only VM b"]);
    live.types(b"/warm\r");
    live.shows(&["'warm' (1 found)"]);
    live.types(b"5");
    live.shows(&["Mean (us)"]);
    live.types(b"q");
    let (status, _) = live.ended();
    assert_eq!(status.code(), Some(0));

    let both = top(&["top", "a", "--all"]).output().unwrap();
    assert_eq!(both.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&both.stderr).contains("--all"));
}

/// A mouse click on a title selects the view.
#[test]
fn mouse_click_selects_view() {
    let Some(vm) = TestVm::spinning() else { return };
    let mut top = OnTerminal::start(&mut vm.top(&["test", "-d", "0.3"]));
    top.shows(&["spin_hot"]);
    // Press and release the first button at column 16 of line 2, the title of the second view (SGR
    // encoding).
    top.types(b"\x1b[<0;16;2M\x1b[<0;16;2m");
    top.shows(&["Hottest"]);
    top.types(b"q");
    assert_eq!(top.ended().0.code(), Some(0));
}
