//! How a connection of the host's ends.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use guest_agent::wire::{Kind, MAX_PAYLOAD, read_frame, write_frame};

/// How long the host may take to say what it wants, and to close in the end.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// Frames that are read and thrown away so that the host sees why its copy was refused: what it may have
/// sent before it looks.
const LINGER: usize = 64;

/// Tells the host why nothing is done.
pub fn refuse(stream: &UnixStream, why: &str) {
    let mut stream = stream;
    // The host may have gone.
    let bytes = &why.as_bytes()[..why.len().min(MAX_PAYLOAD)];
    let _ = write_frame(&mut stream, Kind::Refused, bytes);
}

/// Lets the host read everything before the connection goes: it closes first, or time is up.
pub fn close(stream: &UnixStream) {
    let _ = stream.shutdown(Shutdown::Write);
    let _ = stream.set_read_timeout(Some(PATIENCE));
    for _ in 0..LINGER {
        if !matches!(read_frame(&mut &*stream), Ok(Some(_))) {
            break;
        }
    }
}

/// An error with its cause.
pub fn line(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}
