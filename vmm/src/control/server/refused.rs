//! Why a connection is turned away, and the line that says so before it is closed.

use std::io::{self, Write};
use std::os::unix::net::UnixStream;

use control_api::protocol::{Failure, FailureKind, ReplyLine};
use perf_core::error_line;

/// Why a connection is turned away.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    /// Of another user than the VM's, at the socket for operators.
    #[error("user {0} is not the VM's owner")]
    NotOwner(u32),
    /// All places are taken by clients that have said hello.
    #[error(
        "{0} connections are open, one more is refused; end one (a stat, record or top of this VM) and try again"
    )]
    Full(usize),
    /// The process has none left.
    #[error("no descriptor is left for a connection, it is refused")]
    NoDescriptor(#[source] io::Error),
    /// It made room for another one before it said hello.
    #[error("all {0} connections are taken, and this one has not said hello: another one takes its place")]
    MadeRoom(usize),
    /// A call failed.
    #[error("a connection cannot be served")]
    Failed(#[from] io::Error),
}

impl Refused {
    fn kind(&self) -> FailureKind {
        match self {
            Self::NotOwner(_) => FailureKind::Denied,
            Self::Full(_) | Self::NoDescriptor(_) | Self::MadeRoom(_) => FailureKind::Limit,
            Self::Failed(_) => FailureKind::Internal,
        }
    }

    /// Says it to the client, whose connection ends behind it. Nobody waits for one that does not read: what
    /// has no room is not said.
    pub(super) fn tell(&self, mut stream: &UnixStream) {
        let reply = ReplyLine {
            id: 0,
            ok: None,
            error: Some(Failure {
                kind: self.kind(),
                message: error_line(self),
            }),
        };
        if let Ok(mut line) = serde_json::to_vec(&reply)
            && stream.set_nonblocking(true).is_ok()
        {
            line.push(b'\n');
            // The client may have gone.
            let _ = stream.write(&line);
        }
    }
}
