//! Why the lab cannot be used.

use std::io;
use std::path::PathBuf;

use crate::artefacts::ArtefactError;

/// Part of Debian's base system.
pub(super) const SETPRIV: &str = "setpriv";

/// Why the lab cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// The program that starts QEMU, and ends it with us, does not run. That QEMU does was seen before.
    #[error("{SETPRIV} cannot be started: it is in the package util-linux")]
    Start(#[source] io::Error),
    /// Something to put into the lab could not be built.
    #[error(transparent)]
    Artefact(#[from] ArtefactError),
    /// A file could not be read or written here.
    #[error("{path}")]
    File {
        /// The file.
        path: PathBuf,
        /// What went wrong.
        #[source]
        source: io::Error,
    },
    /// It did not come up.
    #[error("the lab host did not come up: {reason}; its console is in {log}, and ends with:\n{tail}")]
    Boot {
        /// What was waited for.
        reason: String,
        /// Its console.
        log: PathBuf,
        /// The end of it.
        tail: String,
    },
    /// A file could not be moved.
    #[error("{path} in the lab: {message}")]
    Transfer {
        /// The file in the lab.
        path: String,
        /// What the agent said.
        message: String,
    },
}
