//! Errors of `perfvisor record`.

use std::io;
use std::path::PathBuf;

use control_api::client::ClientError;

use super::super::OperatorCommandError;
use super::remote::RecordingControlError;

/// Errors of `perfvisor record`.
#[derive(Debug, thiserror::Error)]
pub enum RecordError {
    #[error(transparent)]
    Command(#[from] OperatorCommandError),
    #[error(transparent)]
    Remote(#[from] RecordingControlError),
    #[error("--delay -1 requires --control; use --control, or a delay in milliseconds")]
    NeverBegins,
    #[error(
        "--call-graph dwarf,{stack_bytes}: rings must have at least {least} pages, not {pages}; \
        use -m {least}"
    )]
    SmallRings {
        stack_bytes: u32,
        pages: u32,
        least: u32,
    },
    #[error(
        "--overwrite writes nothing before --switch-output is due, so that cannot be a size; use signal or a time"
    )]
    OverwriteBySize,
    #[error("writing the samples")]
    Write(#[source] io::Error),
    #[error("{}: the recording was stopped after {samples} samples; free space or use another disk", path.display())]
    Truncated {
        path: PathBuf,
        samples: u64,
        #[source]
        source: io::Error,
    },
}

impl From<ClientError> for RecordError {
    fn from(error: ClientError) -> Self {
        Self::Command(error.into())
    }
}
