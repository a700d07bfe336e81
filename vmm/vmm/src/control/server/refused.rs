//! Reasons for refusing a connection, and the error line that the client receives.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;

use control_api::protocol::{ReplyLine, RequestError, RequestErrorKind};
use perf_core::error_line;

/// Reason why the server refuses a connection.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionRefusal {
    /// The client is neither root nor the user of the VM, and has connected to the operator socket.
    #[error("user {0} is not the VM's owner")]
    NotOwner(u32),
    /// All connections are in use by clients that have sent their hello.
    #[error(
        "the limit of {0} connections is reached; end one (a stat, record or top of this VM) and \
        try again"
    )]
    Full(usize),
    /// The process has no free descriptors.
    #[error("no file descriptor is left for a connection")]
    NoDescriptor(#[source] io::Error),
    /// The client had not sent its hello when all connections were in use, so another client took
    /// its connection.
    #[error("all {0} connections are in use, and this one sent no hello; it is replaced by another one")]
    MadeRoom(usize),
    /// A system call that checks or registers the accepted connection failed.
    #[error("cannot serve the connection")]
    Failed(#[from] io::Error),
}

impl ConnectionRefusal {
    fn kind(&self) -> RequestErrorKind {
        match self {
            Self::NotOwner(_) => RequestErrorKind::Denied,
            Self::Full(_) | Self::NoDescriptor(_) | Self::MadeRoom(_) => RequestErrorKind::Limit,
            Self::Failed(_) => RequestErrorKind::Internal,
        }
    }

    /// Sends the reason to the client over the connection that is about to be closed. Never blocks;
    /// drops the message if the socket buffer is full.
    pub(super) fn send_to(&self, mut stream: &UnixStream) {
        let reply = ReplyLine {
            id: 0,
            ok: None,
            error: Some(RequestError {
                kind: self.kind(),
                message: error_line(self),
            }),
        };
        if let Ok(mut line) = serde_json::to_vec(&reply)
            && stream.set_nonblocking(true).is_ok()
        {
            line.push(b'\n');
            // An error is ignored, because the client may have disconnected.
            let _ = stream.write(&line);
        }
    }
}
