//! Keeps a back end running, in a process of its own that is started before the VM gives up its rights: with
//! those left to the VM no virtiofsd could be started for one that has died.

use std::ffi::OsString;
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Between two looks at the back end and at the VM.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// From the end of a back end to the start of the next, at first and at most.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(60));
/// A back end that lived so long did not fail at its start.
const LIVED: Duration = Duration::from_secs(60);

/// The keeper's process, which ends with this, however the VM ends.
#[derive(Debug)]
pub(super) struct Keeper {
    process: Child,
    /// Its end here; nothing is ever sent.
    lifeline: Option<UnixStream>,
}

impl Keeper {
    /// Starts `keeper` (a program that calls [`keep`], with its words), to run `command` with `listener` as
    /// its standard input.
    pub(super) fn start(
        keeper: &[OsString],
        command: &[OsString],
        listener: UnixListener,
    ) -> io::Result<Self> {
        let (ours, its) = UnixStream::pair()?;
        let (program, words) = keeper.split_first().ok_or(ErrorKind::InvalidInput)?;
        let process = Command::new(program)
            .args(words)
            .args(command)
            .stdin(Stdio::from(OwnedFd::from(listener)))
            .stdout(Stdio::from(OwnedFd::from(its)))
            // Keys of the terminal are not for it.
            .process_group(0)
            .spawn()?;
        Ok(Self {
            process,
            lifeline: Some(ours),
        })
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.lifeline = None;
        let _ = self.process.wait();
    }
}

/// Runs `command` with this process's standard input as its own, and again each time that it ends, until the
/// other end of standard output, a socket, is closed.
///
/// # Errors
/// Standard output is no socket.
pub fn keep(command: &[OsString]) -> io::Result<()> {
    let mut lifeline = UnixStream::from(io::stdout().as_fd().try_clone_to_owned()?);
    lifeline.set_read_timeout(Some(LOOK_EVERY))?;
    let (first_pause, longest_pause) = PAUSES;
    let mut pause = first_pause;
    let mut running: Option<Child> = None;
    let mut since = Instant::now();
    let mut due = since;
    loop {
        let ended = running
            .as_mut()
            .map(|child| !matches!(child.try_wait(), Ok(None)));
        match ended {
            Some(true) => {
                running = None;
                pause = if since.elapsed() > LIVED {
                    first_pause
                } else {
                    (pause * 2).min(longest_pause)
                };
                due = Instant::now() + pause;
            }
            None if Instant::now() >= due => {
                since = Instant::now();
                running = start(command);
                due = since + pause;
            }
            Some(false) | None => {}
        }
        match lifeline.read(&mut [0]) {
            Ok(0) => break,
            Ok(_) => {}
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => break,
        }
    }
    if let Some(mut child) = running {
        let _ = child.kill();
        let _ = child.wait();
    }
    Ok(())
}

fn start(command: &[OsString]) -> Option<Child> {
    let (program, words) = command.split_first()?;
    Command::new(program)
        .args(words)
        .stdout(Stdio::null())
        .spawn()
        .ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    const LIMIT: Duration = Duration::from_secs(60);

    /// Waits until `there` says so; a machine that has much to do takes long.
    fn eventually(what: &str, mut there: impl FnMut() -> bool) {
        let end = Instant::now() + LIMIT;
        while !there() {
            assert!(Instant::now() < end, "{what}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// The keeper, in a process of its own: this test program, whose one test calls it.
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

    /// What it runs, by the environment: a test program takes no words of its own.
    const COMMAND: &str = "KEEPER_TEST_COMMAND";

    #[test]
    #[ignore = "a child of the test below"]
    fn as_a_child() {
        match std::env::var_os(COMMAND) {
            Some(command) => keep(&["sh".into(), "-c".into(), command]).unwrap(),
            None => keep(&["/does/not/exist".into()]).unwrap(),
        }
    }

    fn lines(file: &Path) -> usize {
        std::fs::read_to_string(file).map_or(0, |text| text.lines().count())
    }

    /// A back end that ends is started again, with the same socket; none is left when the VM has gone.
    #[test]
    fn a_back_end_that_ends_is_followed_by_another_until_the_vm_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let (log, socket) = (dir.path().join("log"), dir.path().join("socket"));
        let listener = UnixListener::bind(&socket).unwrap();
        let (ours, its) = UnixStream::pair().unwrap();
        // Each says where its standard input leads, and waits to be killed.
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
        // The test program around it cannot print its result any more.
        process.wait().unwrap();
        eventually("it is gone", || {
            !Path::new(&format!("/proc/{}", second.0)).exists()
        });
        assert_eq!(lines(&log), 2);
    }

    /// A program that cannot be started is tried again, and ends with the VM all the same.
    #[test]
    fn what_does_not_start_holds_nobody_up() {
        let dir = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("socket")).unwrap();
        let keeper = Keeper::start(&keeper(), &[], listener).unwrap();
        drop(keeper);
    }
}
