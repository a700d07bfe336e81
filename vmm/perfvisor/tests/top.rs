//! `perfvisor top` against a running guest: as text, and on a terminal that must be as it was afterwards.
#![expect(unsafe_code, reason = "opens a terminal of its own")]

mod common;

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::vm::SpinningVm;

struct TestVm(SpinningVm);

impl TestVm {
    /// `None` where there is no KVM.
    fn spinning() -> Option<Self> {
        SpinningVm::start("test", &["--cpus", "2"]).map(Self)
    }

    fn top(&self, args: &[&str]) -> Command {
        let mut command = self.0.operator(&["top"]);
        command.args(args);
        command
    }
}

/// Text for one screen: where the guest spins, a row for each vCPU and counter, and one line for a mistake.
#[test]
fn one_screen_as_text_has_all_there_is() {
    let Some(vm) = TestVm::spinning() else { return };
    let out = vm
        .top(&["test", "--once", "-d", "1.5", "-F", "500"])
        .output()
        .unwrap();
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
    // One in the vCPUs' table, the others the guest's counters.
    assert!(rows("0") > 1 && rows("0") == rows("1"), "{text}");
    for (args, word) in [
        (&["test", "--once", "-e", "kvm:exits"][..], "cannot be sampled"),
        (&["test", "--once", "-e", "cyclez"], "unknown event"),
        (&["nobody", "--once"], "running are test"),
        (&["test", "--once", "--vcpu", "9"], "no vCPU 9"),
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

/// The master and the slave of a new pseudo-terminal of 100 by 20.
fn pseudo_terminal() -> (OwnedFd, OwnedFd) {
    let (mut master, mut slave) = (-1, -1);
    let size = libc::winsize {
        ws_row: 20,
        ws_col: 100,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    let null = std::ptr::null_mut::<libc::c_char>();
    // SAFETY: both integers are writable, the size is a live local, name and termios may be null
    // (openpty(3)).
    let result = unsafe {
        libc::openpty(
            &mut master,
            &mut slave,
            null,
            std::ptr::null_mut(),
            &raw const size as *mut _,
        )
    };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    // SAFETY: openpty succeeded, so both descriptors are open and ours alone.
    unsafe { (OwnedFd::from_raw_fd(master), OwnedFd::from_raw_fd(slave)) }
}

/// The settings that raw mode changes.
fn settings(terminal: &OwnedFd) -> (u32, u32, u32, u32) {
    // SAFETY: termios is a plain C struct for which all zeroes is a valid value.
    let mut t: libc::termios = unsafe { std::mem::zeroed() };
    // SAFETY: `t` is a valid, writable termios for the length of the call.
    assert_eq!(unsafe { libc::tcgetattr(terminal.as_raw_fd(), &mut t) }, 0);
    (t.c_iflag, t.c_oflag, t.c_cflag, t.c_lflag)
}

/// Runs `top` on a terminal until it has drawn the guest, has `leave` end it, and checks what it leaves
/// behind.
fn leave_by(vm: &mut TestVm, leave: impl FnOnce(&mut TestVm, &Child, &mut File)) -> (ExitStatus, String) {
    let (master, slave) = pseudo_terminal();
    let before = settings(&slave);
    let stdio = || Stdio::from(File::from(slave.try_clone().unwrap()));
    let mut child = vm
        .top(&["test", "-d", "0.3"])
        .env("TERM", "xterm")
        .stdin(stdio())
        .stdout(stdio())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let shown = Arc::new(Mutex::new(String::new()));
    let reader = {
        let (shown, mut master) = (shown.clone(), File::from(master.try_clone().unwrap()));
        std::thread::spawn(move || {
            let mut chunk = [0; 4096];
            while let Ok(n @ 1..) = master.read(&mut chunk) {
                shown
                    .lock()
                    .unwrap()
                    .push_str(&String::from_utf8_lossy(&chunk[..n]));
            }
        })
    };
    let end = Instant::now() + Duration::from_secs(300);
    while !shown.lock().unwrap().contains("spin_hot") {
        assert!(
            Instant::now() < end,
            "nothing was drawn: {:?}",
            shown.lock().unwrap()
        );
        std::thread::sleep(Duration::from_millis(10));
    }
    assert_ne!(settings(&slave), before, "keys come one by one");
    leave(vm, &child, &mut File::from(master.try_clone().unwrap()));
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("top did not end");
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(settings(&slave), before, "the terminal is as it was");
    drop(slave);
    reader.join().unwrap();
    let shown = shown.lock().unwrap().clone();
    // The alternate screen was left and the cursor shown again.
    let last = |code: &str| shown.rfind(code);
    assert!(last("\x1b[?1049l") > last("\x1b[?1049h"), "{shown:?}");
    assert!(last("\x1b[?25h") > last("\x1b[?25l"), "{shown:?}");
    (status, shown)
}

#[test]
fn every_way_out_restores_the_terminal() {
    let Some(mut vm) = TestVm::spinning() else { return };
    for key in [&b"q"[..], b"\t\ts\x03"] {
        let (status, _) = leave_by(&mut vm, |_, _, terminal| terminal.write_all(key).unwrap());
        assert_eq!(status.code(), Some(0));
    }
    for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
        let (status, _) = leave_by(&mut vm, |_, top, _| {
            // SAFETY: signals the child we started, which has not been waited for yet.
            unsafe { libc::kill(top.id() as i32, signal) };
        });
        assert_eq!(status.code(), Some(0));
    }
    let (status, shown) = leave_by(&mut vm, |vm, _, _| vm.0.child.kill().unwrap());
    assert_eq!(status.code(), Some(0));
    assert!(shown.contains("the VM ended"));
}
