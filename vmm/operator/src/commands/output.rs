//! Output of commands, and their exit status.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::exit::ExitStatus;

/// Errors of writing the output.
#[derive(Debug, thiserror::Error)]
pub enum CommandOutputError {
    #[error("standard output")]
    Write(#[source] io::Error),
    #[error("standard output: cannot serialize as JSON")]
    Json(#[from] serde_json::Error),
}

/// `true` once a write to standard output has failed because the reader has closed the pipe.
static READER_CLOSED: AtomicBool = AtomicBool::new(false);

/// Returns whether the reader of standard output has closed the pipe. Commands that print
/// indefinitely exit in that case, as other programs do on SIGPIPE.
pub(crate) fn is_reader_closed() -> bool {
    READER_CLOSED.load(Ordering::Relaxed)
}

/// Prints to standard output. A closed pipe is not an error.
///
/// # Errors
/// Returns [`CommandOutputError`] if the output cannot be written.
pub fn print(text: &str) -> Result<(), CommandOutputError> {
    written(
        io::stdout()
            .write_all(text.as_bytes())
            .and_then(|()| io::stdout().flush()),
    )
}

/// Prints to standard error and ignores failures.
pub fn print_stderr(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

/// Creates or truncates a file that only this user may read, as perf does, because it contains
/// guest data. An existing file keeps its permissions.
///
/// # Errors
/// Returns the error of `open(2)`.
pub(crate) fn create_private(path: &Path) -> io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
}

/// Replaces control characters with spaces, for one-line messages with untrusted values.
pub fn one_line(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// Converts the result of a write to standard output. A closed pipe is not an error.
pub(crate) fn written(result: io::Result<()>) -> Result<(), CommandOutputError> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => {
            READER_CLOSED.store(true, Ordering::Relaxed);
            Ok(())
        }
        Err(e) => Err(CommandOutputError::Write(e)),
        Ok(()) => Ok(()),
    }
}

/// Exit status of a successful command.
pub const DONE: ExitStatus = ExitStatus::PoweredOff;
