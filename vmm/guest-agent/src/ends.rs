//! Shuts down a connection to the host in an orderly way.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use guest_agent::wire::{FrameKind, MAX_PAYLOAD, read_frame, write_frame};

/// Timeout for the host to send its request, and later to close the connection.
pub const HOST_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of frames that are read and discarded before a connection is closed. The host may
/// have sent them before it reads the reason for a rejected copy, which it must still receive.
const LINGER: usize = 64;

/// Sends the reason why a request is rejected to the host.
pub fn refuse(stream: &UnixStream, why: &str) {
    let mut stream = stream;
    // The write fails only if the host has disconnected.
    let bytes = &why.as_bytes()[..why.len().min(MAX_PAYLOAD)];
    let _ = write_frame(&mut stream, FrameKind::Refused, bytes);
}

/// Waits until the host has read all frames and closed the connection. Discards at most `LINGER`
/// frames, and waits at most [`HOST_TIMEOUT`] for each.
pub fn close(stream: &UnixStream) {
    let _ = stream.shutdown(Shutdown::Write);
    let _ = stream.set_read_timeout(Some(HOST_TIMEOUT));
    for _ in 0..LINGER {
        if !matches!(read_frame(&mut &*stream), Ok(Some(_))) {
            break;
        }
    }
}

/// Formats an error and its causes as one line.
pub fn line(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
