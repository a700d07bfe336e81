//! [`ClientError`]: failures of requests to a VM.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::nearest::did_you_mean;
use crate::protocol::RequestError;
use crate::socket_dir::ControlSocketError;

/// Error returned when a request to a VM fails.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The VM name is invalid, or the socket directory cannot be read.
    #[error(transparent)]
    Place(#[from] ControlSocketError),
    /// No VM has this name.
    #[error("no VM named '{name}' is running{}", running(name, .others))]
    NoSuchVm {
        /// Name of the requested VM.
        name: String,
        /// Names of the running VMs.
        others: Vec<String>,
    },
    /// No VM name was given, and no VM or more than one VM is running. Contains the names of the
    /// running VMs.
    #[error("{}", which(.0))]
    Which(Vec<String>),
    /// No VM listens on the given socket.
    #[error("no VM can be reached at {}", path.display())]
    Socket {
        /// Path of the socket.
        path: PathBuf,
        /// Error of the connection attempt.
        #[source]
        source: io::Error,
    },
    /// The VM refused the request.
    #[error(transparent)]
    Refused(#[from] RequestError),
    /// Reading from the connection or writing to it failed.
    #[error("the VM's control socket")]
    Io(#[from] io::Error),
    /// The VM's process is stopped.
    #[error("the VM does not respond: its process {0} is stopped; resume it with `kill -CONT {0}`")]
    Stopped(u32),
    /// The VM did not reply within the timeout. The value is the timeout.
    #[error("the VM does not respond: no reply for {} s", .0.as_secs_f64())]
    Silent(Duration),
    /// The reply is malformed.
    #[error("cannot parse the VM's reply ({0}); use the same version of Perfvisor as the VM")]
    Reply(&'static str),
}

fn running(name: &str, others: &[String]) -> String {
    match others {
        [] => "; no VM is".to_owned(),
        others => {
            let meant = did_you_mean(name, others.iter().map(String::as_str));
            format!("{meant}; running are {}", others.join(", "))
        }
    }
}

fn which(names: &[String]) -> String {
    match names {
        [] => "no VM is running; start one with perfvisor run".to_owned(),
        names => format!("more than one VM is running, name one: {}", names.join(", ")),
    }
}

impl ClientError {
    /// Returns whether the VM exists but does not reply.
    pub fn is_silence(&self) -> bool {
        matches!(self, Self::Stopped(_) | Self::Silent(_))
    }

    /// Returns whether the VM has exited.
    pub fn is_gone(&self) -> bool {
        matches!(self, Self::Io(e) if matches!(e.kind(),
            io::ErrorKind::UnexpectedEof | io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset))
    }
}
