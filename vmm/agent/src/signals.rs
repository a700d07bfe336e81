//! Signals as commands expect them.
#![expect(unsafe_code, reason = "the disposition of signals")]

/// Those that a shell has what it starts in the background ignore, and nohup(1).
const IGNORED: [libc::c_int; 3] = [libc::SIGINT, libc::SIGQUIT, libc::SIGHUP];

/// Gives these signals their usual meaning. What is ignored stays so in the commands that are started, and
/// Ctrl-C would not end them.
pub fn usual() {
    for signal in IGNORED {
        // SAFETY: SIG_DFL installs no handler, so no code of ours can run in a signal's context.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use nix::sys::signal::{Signal, raise};

    use super::*;

    /// Names the signal to raise, in the process that [`ending`] starts.
    const SIGNAL: &str = "PERFVISOR_TEST_SIGNAL";
    /// There [`usual`] is called before.
    const USUAL: &str = "PERFVISOR_TEST_USUAL";

    /// What such a process does. In the run of all tests it is none.
    #[test]
    fn in_a_process_of_its_own() {
        let Ok(signal) = std::env::var(SIGNAL) else { return };
        if std::env::var_os(USUAL).is_some() {
            usual();
        }
        raise(signal.parse::<Signal>().unwrap()).unwrap();
    }

    /// The signal that ends a process which was started with `signal` ignored and raises it.
    fn ending(signal: Signal, usual: bool) -> Option<i32> {
        let script = "ulimit -c 0; trap '' INT QUIT HUP; exec \"$@\"";
        let mut command = Command::new("sh");
        command
            .args(["-c", script, "sh"])
            .arg(std::env::current_exe().unwrap());
        command.args(["--exact", "signals::tests::in_a_process_of_its_own"]);
        command.env(SIGNAL, signal.as_str()).env_remove(USUAL);
        if usual {
            command.env(USUAL, "1");
        }
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("running 1 test"), "{text}");
        output.status.signal()
    }

    /// An agent that was started in a shell's background, or by nohup, starts commands that Ctrl-C ends.
    #[test]
    fn what_was_left_ignored_ends_a_process_again() {
        for number in IGNORED {
            let signal = Signal::try_from(number).unwrap();
            assert_eq!(ending(signal, false), None, "{signal} is ignored");
            assert_eq!(ending(signal, true), Some(number), "{signal}");
        }
    }
}
