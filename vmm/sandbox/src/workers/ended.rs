//! How a worker ended.

use std::fmt;

/// The status of a worker that has panicked.
pub(super) const PANICKED: i32 = 101;
/// Most characters of what a worker said at its end.
pub(super) const MOST_WORDS: usize = 300;
/// What the standard library says before it aborts for want of memory.
const NO_MEMORY: &[u8] = b"memory allocation of ";

/// How a worker ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It was done.
    Done,
    /// It panicked; where, and what it said.
    Panicked(String),
    /// It wanted more memory than it may have.
    Memory,
    /// It gave up for another reason, for instance a stack without end; what it said.
    Aborted(String),
    /// It took more time of a processor than it may have.
    Time,
    /// It made a system call that it may not make.
    Forbidden,
    /// By this signal.
    Signal(i32),
    /// With this status.
    Status(i32),
}

impl Ended {
    /// By the status of `wait(2)` and its last words.
    pub(super) fn of(status: i32, words: &[u8]) -> Self {
        if libc::WIFSIGNALED(status) {
            return match libc::WTERMSIG(status) {
                libc::SIGABRT if said(words, NO_MEMORY) => Self::Memory,
                // Who only sends the signal has it say nothing.
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

fn said(words: &[u8], these: &[u8]) -> bool {
    words.windows(these.len()).any(|part| part == these)
}

/// What may be a guest's, as it may be shown.
fn shown(words: &[u8]) -> String {
    let shown = |byte: &u8| match byte {
        b' '..=b'~' => char::from(*byte),
        b'\n' => ' ',
        _ => '?',
    };
    let words = words.trim_ascii();
    words.iter().take(MOST_WORDS).map(shown).collect()
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Done => f.write_str("it ended"),
            Self::Panicked(words) => write!(f, "it panicked {words}; please report this"),
            Self::Aborted(words) => write!(f, "it gave up: {words}; please report this"),
            // A worker is the first that is ended for want of memory.
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
    fn an_end_is_told_by_its_status() {
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
            assert_eq!(Ended::of(status, b"at x\ny").to_string(), line);
        }
        assert_eq!(Ended::of(libc::SIGSYS, &[]), Ended::Forbidden);
        let no_memory = b"memory allocation of 1048576 bytes failed\n";
        assert_eq!(Ended::of(libc::SIGABRT, no_memory), Ended::Memory);
        assert_eq!(Ended::of(libc::SIGABRT, &[]), Ended::Signal(libc::SIGABRT));
        let long = Ended::of(exit(PANICKED), &[b'x'; 4000]);
        assert_eq!(long, Ended::Panicked("x".repeat(MOST_WORDS)));
    }
}
