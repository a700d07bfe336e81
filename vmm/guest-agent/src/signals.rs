//! Resets signals that the agent inherited as ignored.
#![expect(unsafe_code, reason = "the disposition of signals")]

/// Signals that background processes of a shell and processes under nohup(1) ignore.
const IGNORED: [libc::c_int; 3] = [libc::SIGINT, libc::SIGQUIT, libc::SIGHUP];

/// Resets the signals in `IGNORED` to their default actions. Commands inherit ignored signals, so
/// Ctrl-C would otherwise not terminate a command of the agent.
pub fn reset_ignored() {
    for signal in IGNORED {
        // SAFETY: SIG_DFL installs no handler, so no code of this program can run in signal
        // context.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use nix::sys::signal::{Signal, raise};

    use super::*;

    /// Environment variable with the number of the signal that the child process raises.
    const SIGNAL: &str = "PERFVISOR_TEST_SIGNAL";
    /// Environment variable that makes the child process call [`reset_ignored`] before it raises
    /// the signal.
    const USUAL: &str = "PERFVISOR_TEST_USUAL";

    /// Body of the child process that [`terminating_signal`] starts. Does nothing in a normal test
    /// run.
    #[test]
    fn child_process_entry() {
        let Ok(signal) = std::env::var(SIGNAL) else { return };
        if std::env::var_os(USUAL).is_some() {
            reset_ignored();
        }
        raise(signal.parse::<Signal>().unwrap()).unwrap();
    }

    /// Starts a process with `signal` ignored, which raises `signal`, and returns the signal that
    /// terminates it, if any.
    fn terminating_signal(signal: Signal, reset_ignored: bool) -> Option<i32> {
        let script = "ulimit -c 0; trap '' INT QUIT HUP; exec \"$@\"";
        let mut command = Command::new("sh");
        command
            .args(["-c", script, "sh"])
            .arg(std::env::current_exe().unwrap());
        command.args(["--exact", "signals::tests::child_process_entry"]);
        command.env(SIGNAL, signal.as_str()).env_remove(USUAL);
        if reset_ignored {
            command.env(USUAL, "1");
        }
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("running 1 test"), "{text}");
        output.status.signal()
    }

    /// Signals terminate the commands of an agent that was started in the background or by nohup.
    #[test]
    fn reset_signal_terminates_process() {
        for number in IGNORED {
            let signal = Signal::try_from(number).unwrap();
            assert_eq!(terminating_signal(signal, false), None, "{signal} is ignored");
            assert_eq!(terminating_signal(signal, true), Some(number), "{signal}");
        }
    }
}
