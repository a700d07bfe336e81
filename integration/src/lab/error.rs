//! Errors of the lab host.

use std::io;
use std::path::PathBuf;

use crate::artefacts::BuildArtefactError;

/// Name of the program that starts QEMU with a parent-death signal. Part of Debian's base system.
pub(super) const SETPRIV: &str = "setpriv";

/// Error returned when the lab is unavailable or an operation in it fails.
#[derive(Debug, thiserror::Error)]
pub enum LabError {
    /// The program setpriv, which starts QEMU and terminates it together with this process, cannot
    /// be executed.
    #[error("cannot start {SETPRIV}; install the package util-linux")]
    Start(#[source] io::Error),
    /// A file for the lab could not be built.
    #[error(transparent)]
    Artefact(#[from] BuildArtefactError),
    /// A local file could not be read or written.
    #[error("{path}")]
    File {
        /// Path of the local file.
        path: PathBuf,
        /// Error returned by the operating system.
        #[source]
        source: io::Error,
    },
    /// The lab did not boot.
    #[error("the lab host did not start: {reason}; its console is in {log} and ends with:\n{tail}")]
    Boot {
        /// What did not happen in time, or why the boot failed.
        reason: String,
        /// Path of the lab's console log.
        log: PathBuf,
        /// Last lines of the lab's console.
        tail: String,
    },
    /// A file could not be copied to or from the lab.
    #[error("{path} in the lab: {message}")]
    Transfer {
        /// Path of the file in the lab.
        path: String,
        /// Error message of the lab's agent.
        message: String,
    },
}
