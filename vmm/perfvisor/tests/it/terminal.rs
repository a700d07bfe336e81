//! The terminal settings are restored on every exit path of the process.
//!
//! The test starts itself as a child on a pseudo-terminal. The child enters raw mode and exits in
//! the requested way.
#![expect(unsafe_code, reason = "sends signals, and ends its process by a fault")]

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crate::common::pty::{Settings, pseudo_terminal, settings};
use vmm::console::RawTerminal;

const WAY_OUT: &str = "PERFVISOR_TEST_WAY_OUT";

/// Runs the child until the terminal is in raw mode, sends `signal` if given, and waits for the
/// child to exit. Returns the settings before, during and after raw mode.
fn leave_by(way: &str, signal: Option<libc::c_int>) -> (Settings, Settings, Settings, ExitStatus) {
    let (master, slave) = pseudo_terminal();
    let before = settings(&slave);
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([
            "--exact",
            "terminal::child_leaves_raw_mode",
            "--nocapture",
            "--test-threads=1",
        ])
        .env(WAY_OUT, way)
        .stdin(Stdio::from(File::from(slave.try_clone().unwrap())))
        .stdout(Stdio::piped())
        .stderr(Stdio::null());
    // Restore default actions. SIGHUP is ignored under nohup, and SIGINT and SIGQUIT are ignored in
    // background jobs.
    let by_default = move || {
        if let Some(signal) = signal {
            // SAFETY: the signal number is one of the constants below, and the default action is no
            // function.
            unsafe { libc::signal(signal, libc::SIG_DFL) };
        }
        Ok(())
    };
    // SAFETY: between fork and exec, the closure only calls signal(2), which is async-signal-safe,
    // and allocates nothing.
    unsafe { command.pre_exec(by_default) };
    let mut child = command.spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap())
        .lines()
        .map_while(Result::ok);
    assert!(
        lines.any(|l| l.contains("RAW")),
        "the child did not enter raw mode"
    );
    let raw = settings(&slave);
    // Any byte lets the child continue.
    File::from(master.try_clone().unwrap()).write_all(b"g").unwrap();
    if let Some(signal) = signal {
        // SAFETY: the process is our child and has not been waited for.
        unsafe { libc::kill(child.id() as i32, signal) };
    }
    let end = Instant::now() + Duration::from_secs(300);
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > end {
            child.kill().unwrap();
            panic!("{way} {signal:?}: the child did not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    (before, raw, settings(&slave), status)
}

/// Child part of the test, started by [`leave_by`] with the environment variable [`WAY_OUT`].
/// Without this variable, the test passes immediately.
#[test]
fn child_leaves_raw_mode() {
    let Ok(way) = std::env::var(WAY_OUT) else { return };
    let guard = RawTerminal::enter()
        .unwrap()
        .expect("standard input is a terminal");
    println!("RAW");
    if way == "signal" {
        loop {
            std::thread::park();
        }
    }
    let mut byte = [0u8; 1];
    std::io::Read::read_exact(&mut std::io::stdin(), &mut byte).unwrap();
    match way.as_str() {
        "drop" => drop(guard),
        "exit" => std::process::exit(8),
        "abort" => std::process::abort(),
        "fault" => {
            let unmapped = std::ptr::without_provenance::<u8>(0x10);
            // SAFETY: deliberately unsound: the page at 0 is never mapped, and the resulting fault
            // is the purpose. No code runs in this process afterwards.
            unsafe { unmapped.read_volatile() };
        }
        "panic" => panic!("as asked for"),
        "thread" => {
            // A panic in another thread, while this thread holds the guard.
            let _ = std::thread::spawn(|| panic!("as asked for")).join();
            std::mem::forget(guard);
            // SAFETY: exits without exit handlers, so that only the panic hook can have restored
            // the terminal.
            unsafe { libc::_exit(0) };
        }
        other => unreachable!("{other}"),
    }
}

#[test]
fn every_exit_of_run_restores_terminal() {
    let ways = [
        ("drop", None),
        ("exit", None),
        ("abort", None),
        ("panic", None),
        ("thread", None),
    ];
    let signals = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT];
    for (way, signal) in ways.into_iter().chain(signals.map(|s| ("signal", Some(s)))) {
        let (before, raw, after, status) = leave_by(way, signal);
        assert_ne!(before.3, raw.3, "{way} {signal:?}: raw mode is on");
        assert_eq!(raw.3 & (libc::ICANON | libc::ECHO | libc::ISIG), 0);
        assert_eq!(before, after, "{way} {signal:?}: restored");
        if let Some(signal) = signal {
            use std::os::unix::process::ExitStatusExt;
            assert_eq!(status.signal(), Some(signal), "the signal's own effect is kept");
        }
    }
}
