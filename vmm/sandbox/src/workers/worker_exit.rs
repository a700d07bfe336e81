//! Termination status of a worker.

use std::fmt;

/// Exit status of a worker that has panicked.
pub(super) const PANICKED: i32 = 101;
/// Maximum number of characters of a worker's output that are kept.
pub(super) const MOST_WORDS: usize = 300;
/// Message that the standard library prints before it aborts on memory exhaustion.
const NO_MEMORY: &[u8] = b"memory allocation of ";

/// Termination status of a worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerExit {
    /// The worker completed its task.
    Done,
    /// The worker panicked, with the location and message.
    Panicked(String),
    /// The worker exceeded its memory limit.
    Memory,
    /// The worker aborted for another reason, such as a stack overflow, with its output.
    Aborted(String),
    /// The worker exceeded its CPU time limit.
    Time,
    /// The worker made a forbidden system call.
    Forbidden,
    /// The worker was terminated by this signal.
    Signal(i32),
    /// The worker exited with this status.
    Status(i32),
}

impl WorkerExit {
    /// Determines how a worker terminated from its `wait(2)` status and its output.
    pub(super) fn of(status: i32, words: &[u8]) -> Self {
        if libc::WIFSIGNALED(status) {
            return match libc::WTERMSIG(status) {
                libc::SIGABRT if contains(words, NO_MEMORY) => Self::Memory,
                // A signal sent by another process is not preceded by output.
                libc::SIGABRT if !words.is_empty() => Self::Aborted(shown(words)),
                libc::SIGXCPU => Self::Time,
                libc::SIGSYS => Self::Forbidden,
                signal => Self::Signal(signal),
            };
        }
        match libc::WEXITSTATUS(status) {
            0 => Self::Done,
            PANICKED => Self::Panicked(shown(words)),
            status => Self::Status(status),
        }
    }
}

fn contains(words: &[u8], these: &[u8]) -> bool {
    words.windows(these.len()).any(|part| part == these)
}

/// Makes possibly guest-controlled output printable.
fn shown(words: &[u8]) -> String {
    let shown = |byte: &u8| match byte {
        b' '..=b'~' => char::from(*byte),
        b'\n' => ' ',
        _ => '?',
    };
    let words = words.trim_ascii();
    words.iter().take(MOST_WORDS).map(shown).collect()
}

impl fmt::Display for WorkerExit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => f.write_str("it ended"),
            Self::Panicked(words) => write!(f, "it panicked {words}; please report this"),
            Self::Aborted(words) => write!(f, "it gave up: {words}; please report this"),
            // When memory is low, the kernel kills workers first.
            Self::Signal(libc::SIGKILL) => {
                f.write_str("it was ended by signal 9, by somebody or because the host has no memory left")
            }
            Self::Memory => f.write_str("it wanted more memory than it may have"),
            Self::Time => f.write_str("it took more time of a processor than it may have"),
            Self::Forbidden => f.write_str(
                "it asked the host's kernel for what its seccomp filter forbids; please report this",
            ),
            Self::Signal(signal) => write!(f, "it was ended by signal {signal}"),
            Self::Status(status) => write!(f, "it ended with status {status}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worker_exit_is_derived_from_status() {
        let exit = |status: i32| status << 8;
        let ends = [
            (exit(0), "it ended"),
            (exit(7), "it ended with status 7"),
            (exit(PANICKED), "it panicked at x y; please report this"),
            (libc::SIGXCPU, "it took more time of a processor than it may have"),
            (
                libc::SIGKILL,
                "it was ended by signal 9, by somebody or because the host has no memory left",
            ),
            (libc::SIGABRT, "it gave up: at x y; please report this"),
        ];
        for (status, line) in ends {
            assert_eq!(WorkerExit::of(status, b"at x\ny").to_string(), line);
        }
        assert_eq!(WorkerExit::of(libc::SIGSYS, &[]), WorkerExit::Forbidden);
        let no_memory = b"memory allocation of 1048576 bytes failed\n";
        assert_eq!(WorkerExit::of(libc::SIGABRT, no_memory), WorkerExit::Memory);
        assert_eq!(
            WorkerExit::of(libc::SIGABRT, &[]),
            WorkerExit::Signal(libc::SIGABRT)
        );
        let long = WorkerExit::of(exit(PANICKED), &[b'x'; 4000]);
        assert_eq!(long, WorkerExit::Panicked("x".repeat(MOST_WORDS)));
    }
}
