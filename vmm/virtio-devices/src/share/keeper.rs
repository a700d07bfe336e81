//! Supervisor process, called the keeper, that keeps the backend of a shared directory running.
//!
//! The VM starts the keeper before dropping its own privileges, because a confined VM could not
//! restart virtiofsd.

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use diagnostics::guest_log;

/// Interval at which the keeper checks whether the backend and the VM are still running.
const CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Minimum and maximum delay before a backend that has exited is restarted.
const RESTART_DELAYS: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(60));
/// Uptime after which a backend counts as stable, so that its next restart has the minimum delay.
const MIN_UPTIME: Duration = Duration::from_secs(60);
/// Maximum number of log lines forwarded per backend. A guest may be able to cause unlimited
/// output.
const MAX_LINES: usize = 16;
const MAX_LINE_BYTES: u64 = 1024;
/// Message with which the VM tells the keeper that the backend has answered.
const SERVES: u8 = b'S';

/// The program that runs as the keeper.
#[derive(Debug)]
pub struct BackendKeeperCommand {
    /// Command line of the keeper, a program that calls [`run_keeper`].
    pub words: Vec<OsString>,
    /// Log file of the keeper, or `None` for the standard error of this process.
    pub log: Option<File>,
}

/// A running keeper process. The process ends when this value is dropped and when the VM ends.
#[derive(Debug)]
pub(super) struct BackendKeeper {
    process: Child,
    /// The VM's end of a socket to the keeper, which exits when this end is closed. The VM sends at
    /// most one byte.
    lifeline: Option<UnixStream>,
}

impl BackendKeeper {
    /// Starts the keeper process `keeper`. The keeper runs `command` with the listening socket
    /// `listener` as its standard input.
    pub(super) fn start(
        keeper: &BackendKeeperCommand,
        command: &[OsString],
        listener: UnixListener,
    ) -> io::Result<Self> {
        let (ours, its) = UnixStream::pair()?;
        let (program, words) = keeper.words.split_first().ok_or(ErrorKind::InvalidInput)?;
        let log = keeper.log.as_ref().map(File::try_clone).transpose()?;
        let process = Command::new(program)
            .args(words)
            .args(command)
            .stdin(Stdio::from(OwnedFd::from(listener)))
            .stdout(Stdio::from(OwnedFd::from(its)))
            .stderr(log.map_or_else(Stdio::inherit, Stdio::from))
            // Terminal signals must not reach the keeper.
            .process_group(0)
            .spawn()?;
        Ok(Self {
            process,
            lifeline: Some(ours),
        })
    }

    /// Reports to the keeper that the backend has answered. The keeper then discards what the
    /// backend prints when the VM ends.
    pub(super) fn report_ready(&self) {
        if let Some(mut lifeline) = self.lifeline.as_ref() {
            // The write fails only if the keeper has ended.
            let _ = lifeline.write_all(&[SERVES]);
        }
    }
}

impl Drop for BackendKeeper {
    fn drop(&mut self) {
        self.lifeline = None;
        let _ = self.process.wait();
    }
}

/// Runs `command`, and restarts it whenever it exits, until the VM ends.
///
/// `command` inherits the standard input of this process. Standard output must be a socket, which
/// the VM closes when it ends. Lines that `command` writes to standard error are logged as
/// warnings.
///
/// # Errors
/// Returns an error if standard output is not a socket.
pub fn run_keeper(command: &[OsString]) -> io::Result<()> {
    let mut lifeline = UnixStream::from(io::stdout().as_fd().try_clone_to_owned()?);
    lifeline.set_read_timeout(Some(CHECK_INTERVAL))?;
    let (first_pause, longest_pause) = RESTART_DELAYS;
    let mut pause = first_pause;
    let mut running: Option<Child> = None;
    let mut since = Instant::now();
    let mut due = since;
    let mut says = BackendLog::new();
    let mut serves = false;
    loop {
        let ended = running
            .as_mut()
            .map(|child| !matches!(child.try_wait(), Ok(None)));
        match ended {
            Some(true) => {
                running = None;
                pause = if since.elapsed() > MIN_UPTIME {
                    first_pause
                } else {
                    (pause * 2).min(longest_pause)
                };
                due = Instant::now() + pause;
            }
            None if Instant::now() >= due => {
                since = Instant::now();
                running = start(command, &says.to);
                due = since + pause;
            }
            Some(false) | None => {}
        }
        match lifeline.read(&mut [0]) {
            Ok(0) => break,
            Ok(_) => serves = true,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => break,
        }
        says.log_held();
    }
    if let Some(mut child) = running {
        let _ = child.kill();
        let _ = child.wait();
    }
    // If the backend has never answered, its output explains why it failed. Otherwise discard the
    // output, because backends log the end of each VM.
    if !serves {
        says.log_rest();
    }
    Ok(())
}

fn start(command: &[OsString], says: &SyncSender<String>) -> Option<Child> {
    let (program, words) = command.split_first()?;
    let started = Command::new(program)
        .args(words)
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    match started {
        Ok(mut child) => {
            if let Some(stderr) = child.stderr.take() {
                let says = says.clone();
                std::thread::spawn(move || forward_output(stderr, &says));
            }
            Some(child)
        }
        Err(e) => {
            let _ = says.try_send(format!("{}: {e}", program.display()));
            None
        }
    }
}

/// Forwards the first lines of a backend's output to the log. Discards the remaining output, so
/// that the backend never blocks on a full pipe.
fn forward_output(stderr: ChildStderr, says: &SyncSender<String>) {
    let mut stderr = BufReader::new(stderr);
    for _ in 0..MAX_LINES {
        let mut line = Vec::new();
        match stderr.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line) {
            Ok(1..) => {}
            _ => return,
        }
        let text = String::from_utf8_lossy(&line);
        let text: String = text
            .trim_end()
            .chars()
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        if says.send(text).is_err() {
            return;
        }
    }
    let more = io::copy(&mut stderr, &mut io::sink());
    if more.is_ok_and(|bytes| bytes > 0) {
        let _ = says.send(format!(
            "it said more than {MAX_LINES} lines; the others are left out"
        ));
    }
}

/// Output of the backend that has not been logged yet.
struct BackendLog {
    to: SyncSender<String>,
    from: Receiver<String>,
    /// Lines that were read at the previous check. They are logged at the next check, unless the VM
    /// has ended by then.
    held: Vec<String>,
}

impl BackendLog {
    fn new() -> Self {
        let (to, from) = sync_channel(MAX_LINES);
        Self {
            to,
            from,
            held: Vec::new(),
        }
    }

    fn log_held(&mut self) {
        let came = self.from.try_iter().collect();
        tell(&std::mem::replace(&mut self.held, came));
    }

    /// Logs the remaining output of a backend that has exited.
    fn log_rest(self) {
        tell(&self.held);
        drop(self.to);
        while let Ok(line) = self.from.recv_timeout(CHECK_INTERVAL) {
            tell(&[line]);
        }
    }
}

fn tell(lines: &[String]) {
    for line in lines {
        guest_log!(Warn, "--share-dir: virtiofsd: {line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const LIMIT: Duration = Duration::from_secs(60);

    /// Waits until `there` returns `true`. Panics with `what` after a long timeout.
    fn eventually(what: &str, mut there: impl FnMut() -> bool) {
        let end = Instant::now() + LIMIT;
        while !there() {
            assert!(Instant::now() < end, "{what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the command line of a keeper process. The process runs the one test of this program
    /// that calls `run_keeper`.
    fn keeper() -> Vec<OsString> {
        let program = std::env::current_exe().unwrap().into_os_string();
        let words = [
            "--exact",
            "share::keeper::tests::as_a_child",
            "--nocapture",
            "--ignored",
        ];
        [program].into_iter().chain(words.map(OsString::from)).collect()
    }

    /// Environment variable with the command that the keeper runs. A test program accepts no
    /// additional arguments.
    const COMMAND: &str = "KEEPER_TEST_COMMAND";

    #[test]
    #[ignore = "a child of the test below"]
    fn as_a_child() {
        match std::env::var_os(COMMAND) {
            Some(command) => run_keeper(&["sh".into(), "-c".into(), command]).unwrap(),
            None => run_keeper(&["/does/not/exist".into()]).unwrap(),
        }
    }

    fn lines(file: &Path) -> usize {
        std::fs::read_to_string(file).map_or(0, |text| text.lines().count())
    }

    /// The keeper restarts a backend that exits, with the same socket. No backend survives the VM.
    #[test]
    fn exited_backend_is_restarted_until_vm_ends() {
        let dir = tempfile::tempdir().unwrap();
        let (log, socket) = (dir.path().join("log"), dir.path().join("socket"));
        let listener = UnixListener::bind(&socket).unwrap();
        let (ours, its) = UnixStream::pair().unwrap();
        // Each backend reports its standard input and waits to be killed.
        let script = format!(
            "echo $$ $(readlink /proc/self/fd/0) >>{}; exec sleep 1000",
            log.display()
        );
        let keeper = keeper();
        let mut process = Command::new(&keeper[0])
            .args(&keeper[1..])
            .env(COMMAND, script)
            .stdin(Stdio::from(OwnedFd::from(listener)))
            .stdout(Stdio::from(OwnedFd::from(its)))
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let last = || {
            let text = std::fs::read_to_string(&log).unwrap();
            let line = text.lines().last().unwrap().to_owned();
            let (pid, socket) = line.split_once(' ').unwrap();
            (pid.to_owned(), socket.to_owned())
        };
        eventually("the first comes", || lines(&log) == 1);
        let first = last();
        assert!(first.1.starts_with("socket:"), "{first:?}");
        let killed = Command::new("kill").args(["-9", &first.0]).output().unwrap();
        assert!(killed.status.success());
        eventually("another comes", || lines(&log) == 2);
        let second = last();
        assert_eq!(second.1, first.1, "at the same socket");
        assert_ne!(second.0, first.0);
        drop(ours);
        // The test harness in the child cannot print its result to the closed pipe.
        process.wait().unwrap();
        eventually("it is gone", || {
            !Path::new(&format!("/proc/{}", second.0)).exists()
        });
        assert_eq!(lines(&log), 2);
    }

    /// The keeper forwards a backend's output to the log line by line, up to the limits.
    #[test]
    fn backend_output_is_limited() {
        let (to, from) = sync_channel(1);
        let script = "printf 'one\\033[31m\\n' >&2; for n in $(seq 40); do echo more >&2; done; head -c 5000 /dev/zero >&2";
        let mut child = start(&["sh".into(), "-c".into(), script.into()], &to).unwrap();
        drop(to);
        let said: Vec<String> = from.iter().collect();
        child.wait().unwrap();
        assert_eq!(said.len(), MAX_LINES + 1, "{said:?}");
        assert_eq!(said[0], "one [31m");
        assert_eq!(said[MAX_LINES - 1], "more");
        assert!(said[MAX_LINES].contains("left out"), "{said:?}");
        // A long line without a newline is truncated.
        let (to, from) = sync_channel(1);
        let mut child = start(
            &["sh".into(), "-c".into(), "head -c 1500 /dev/zero >&2".into()],
            &to,
        )
        .unwrap();
        drop(to);
        let lengths: Vec<usize> = from.iter().map(|line| line.len()).collect();
        child.wait().unwrap();
        assert_eq!(lengths, [1024, 476]);
    }

    /// The keeper retries a backend program that fails to start, and still exits when the VM ends.
    #[test]
    fn unstartable_backend_does_not_block_keeper() {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
        let program = BackendKeeperCommand {
            words: keeper(),
            log: None,
        };
        let keeper = BackendKeeper::start(&program, &[], listener).unwrap();
        drop(keeper);
    }
}
