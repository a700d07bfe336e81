//! Why nothing is recorded, or not to the end.

use std::io;
use std::path::PathBuf;

use control_api::client::ClientError;

use super::super::CommandError;
use super::remote::RemoteError;

/// Why nothing is recorded, or not to the end.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    /// As with any command.
    #[error(transparent)]
    Command(#[from] CommandError),
    /// The pipes of `--control`.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// Nobody could say that it is to begin.
    #[error("--delay -1 waits for a word, so it needs --control; or give a delay in milliseconds")]
    NeverBegins,
    /// A sample with its stack does not fit in a ring.
    #[error(
        "--call-graph dwarf,{stack_bytes} needs rings of {least} pages or more, not {pages}; use -m {least}"
    )]
    SmallRings {
        /// Bytes of stack.
        stack_bytes: u32,
        /// Pages asked for.
        pages: u32,
        /// Pages that do.
        least: u32,
    },
    /// The file has not got everything.
    #[error("writing the samples")]
    Write(#[source] io::Error),
    /// The file has what it had when it was last told of it.
    #[error("{}: the recording ends here, with the {samples} samples that fitted; free space or use another disk", path.display())]
    CutBack {
        /// The file.
        path: PathBuf,
        /// Samples that it has.
        samples: u64,
        /// What writing said.
        #[source]
        source: io::Error,
    },
}

impl From<ClientError> for RecordError {
    fn from(error: ClientError) -> Self {
        Self::Command(error.into())
    }
}
