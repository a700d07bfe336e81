//! What a command prints, and its end.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::exit::ExitStatus;

/// What was printed is not complete.
#[derive(Debug, thiserror::Error)]
pub enum OutputError {
    /// It was not written.
    #[error("standard output")]
    Write(#[source] io::Error),
    /// It was not made.
    #[error("standard output: no JSON can be made of it")]
    Json(#[from] serde_json::Error),
}

/// Something was printed that nobody read.
static UNREAD: AtomicBool = AtomicBool::new(false);

/// Whether the reader of standard output has gone away, as far as printing has shown: what prints for ever
/// ends then, as others do by SIGPIPE.
pub(crate) fn is_unread() -> bool {
    UNREAD.load(Ordering::Relaxed)
}

/// Prints to standard output. A reader that has gone away is no error.
///
/// # Errors
/// [`OutputError`].
pub fn print(text: &str) -> Result<(), OutputError> {
    written(
        io::stdout()
            .write_all(text.as_bytes())
            .and_then(|()| io::stdout().flush()),
    )
}

/// Prints to standard error, whose reader may have gone away: what is said there is not worth ending for.
pub fn say(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

/// Creates or truncates a file for samples or for names of a guest, which only this user may read, as perf
/// does. A file that was there before keeps its permissions.
///
/// # Errors
/// That of `open(2)`.
pub(crate) fn create_private(path: &Path) -> io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
}

/// `text` with its control characters as spaces, for a message of one line: values come from the user and may
/// hold anything.
pub fn one_line(text: &str) -> String {
    text.chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// The result of writing to standard output.
pub(crate) fn written(result: io::Result<()>) -> Result<(), OutputError> {
    match result {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => {
            UNREAD.store(true, Ordering::Relaxed);
            Ok(())
        }
        Err(e) => Err(OutputError::Write(e)),
        Ok(()) => Ok(()),
    }
}

/// The end of a command that did what it was asked.
pub(crate) const DONE: ExitStatus = ExitStatus::PoweredOff;
