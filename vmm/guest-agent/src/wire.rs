//! Wire format of frames: one byte with the type, four bytes with the payload length
//! (little-endian), and the payload.

use std::io::{self, Read, Write};

/// Maximum length of a frame's payload, in bytes. Longer data is sent in several frames.
pub const MAX_PAYLOAD: usize = 128 << 10;
/// Maximum amount of unacknowledged standard input, in bytes. When it is reached, the host waits
/// for [`FrameKind::Taken`] before it sends more. Signals are therefore not delayed by input that
/// the command does not read.
pub const INPUT_WINDOW: u32 = 256 << 10;

const HEADER: usize = 5;

/// Type of a frame between the host and the guest agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// Request, sent once by the host as its first frame. The payload is a
    /// [`crate::request::AgentRequest`] as JSON.
    Request = 1,
    /// Acceptance of the request, sent by the agent.
    Accepted = 2,
    /// Rejection or abortion of the request, sent by either side. The payload is the reason as
    /// text.
    Refused = 3,
    /// Standard input of the command, sent by the host. An empty payload means end of file.
    Stdin = 4,
    /// Number of standard input bytes that were passed to the command, or discarded because it has
    /// closed its input (4 bytes), sent by the agent. 0 acknowledges a signal.
    Taken = 5,
    /// Standard output of the command, sent by the agent.
    Stdout = 6,
    /// Standard error of the command, sent by the agent.
    Stderr = 7,
    /// Signal for the command, sent by the host. The payload is the signal number (4 bytes).
    Signal = 8,
    /// New size of the command's terminal, sent by the host. The payload consists of rows and
    /// columns (2 bytes each).
    Resize = 9,
    /// Exit of the command, sent by the agent. The payload is a [`crate::request::CommandExit`] as
    /// JSON.
    Exit = 10,
    /// Header of the next entry of a tree, sent by the sender of the tree. The payload is a
    /// [`crate::entry::FileTreeEntry`].
    TreeEntry = 11,
    /// Chunk of the current file's contents, sent by the sender of the tree.
    Data = 12,
    /// End of the current file, sent by the sender of the tree.
    FileEnd = 13,
    /// End of the tree, sent by the sender of the tree. The receiver replies with the same type
    /// when the tree is complete.
    Done = 14,
    /// Notice that an entry has been skipped, sent by the sender of the tree. The payload is the
    /// path and the reason as text.
    Skipped = 15,
}

impl FrameKind {
    fn from_byte(byte: u8) -> Option<Self> {
        use FrameKind::*;
        [
            Request, Accepted, Refused, Stdin, Taken, Stdout, Stderr, Signal, Resize, Exit, TreeEntry, Data,
            FileEnd, Done, Skipped,
        ]
        .into_iter()
        .find(|kind| *kind as u8 == byte)
    }
}

/// A received frame of the agent protocol.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Type of this frame.
    pub kind: FrameKind,
    /// Payload of this frame, whose format depends on the type.
    pub payload: Vec<u8>,
}

impl Frame {
    /// Decodes the payload as a 32-bit little-endian number. Returns `None` if it is not four bytes
    /// long.
    pub fn number(&self) -> Option<u32> {
        Some(u32::from_le_bytes(self.payload.as_slice().try_into().ok()?))
    }

    /// Returns the payload, which is untrusted, as one line of printable text.
    pub fn text(&self) -> String {
        let text = String::from_utf8_lossy(&self.payload);
        text.chars()
            .take(1000)
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect()
    }
}

/// Error returned when a frame cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum AgentFrameError {
    /// The connection failed or was closed within a frame.
    #[error("the connection was lost")]
    Io(#[from] io::Error),
    /// The frame has an unknown type.
    #[error("protocol error: the peer sent an unknown frame (kind {0})")]
    FrameKind(u8),
    /// The payload length exceeds [`MAX_PAYLOAD`].
    #[error("protocol error: the peer sent a frame of {0} bytes; must be at most {MAX_PAYLOAD}")]
    TooLong(u32),
}

/// Writes a frame.
///
/// # Errors
/// Returns an error if the connection fails or the payload is longer than [`MAX_PAYLOAD`].
pub fn write_frame(out: &mut impl Write, kind: FrameKind, payload: &[u8]) -> io::Result<()> {
    let length = u32::try_from(payload.len())
        .ok()
        .filter(|_| payload.len() <= MAX_PAYLOAD)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "longer than a frame"))?;
    let mut frame = Vec::with_capacity(HEADER + payload.len());
    frame.push(kind as u8);
    frame.extend(length.to_le_bytes());
    frame.extend(payload);
    out.write_all(&frame)
}

/// Reads a frame. Returns `None` if the connection was closed between frames.
///
/// # Errors
/// Returns an [`AgentFrameError`] if the connection fails or the frame is invalid.
pub fn read_frame(input: &mut impl Read) -> Result<Option<Frame>, AgentFrameError> {
    let mut header = [0; HEADER];
    loop {
        match input.read(&mut header[..1]) {
            Ok(0) => return Ok(None),
            Ok(_) => break,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    input.read_exact(&mut header[1..])?;
    let [number, a, b, c, d] = header;
    let kind = FrameKind::from_byte(number).ok_or(AgentFrameError::FrameKind(number))?;
    let length = u32::from_le_bytes([a, b, c, d]);
    let bytes = usize::try_from(length)
        .ok()
        .filter(|bytes| *bytes <= MAX_PAYLOAD)
        .ok_or(AgentFrameError::TooLong(length))?;
    let mut payload = vec![0; bytes];
    input.read_exact(&mut payload)?;
    Ok(Some(Frame { kind, payload }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn frame_round_trips() {
        let mut bytes = Vec::new();
        let long = vec![7; MAX_PAYLOAD];
        write_frame(&mut bytes, FrameKind::Stdin, b"").unwrap();
        write_frame(&mut bytes, FrameKind::Data, &long).unwrap();
        let mut input = &bytes[..];
        let read = |input: &mut &[u8]| read_frame(input).unwrap();
        assert_eq!(read(&mut input).unwrap().kind, FrameKind::Stdin);
        assert_eq!(read(&mut input).unwrap().payload, long);
        assert_eq!(read(&mut input), None);
        assert!(write_frame(&mut Vec::new(), FrameKind::Data, &vec![0; MAX_PAYLOAD + 1]).is_err());
    }

    #[test]
    fn invalid_frame_allocates_nothing() {
        let refused = |bytes: &[u8]| read_frame(&mut &bytes[..]).unwrap_err();
        assert!(matches!(refused(&[0, 0, 0, 0, 0]), AgentFrameError::FrameKind(0)));
        assert!(matches!(
            refused(&[16, 0, 0, 0, 0]),
            AgentFrameError::FrameKind(16)
        ));
        assert!(matches!(
            refused(&[12, 0xff, 0xff, 0xff, 0xff]),
            AgentFrameError::TooLong(u32::MAX)
        ));
        assert!(matches!(refused(&[12, 5, 0, 0, 0, 1]), AgentFrameError::Io(_)));
        assert!(matches!(refused(&[12, 5]), AgentFrameError::Io(_)));
    }

    #[test]
    fn peer_text_is_one_short_line() {
        let frame = Frame {
            kind: FrameKind::Refused,
            payload: [&b"a\n\x1b[2J\xff"[..], &[b'x'; 5000]].concat(),
        };
        let text = frame.text();
        assert!(text.starts_with("a  [2J") && text.chars().count() == 1000);
    }

    proptest! {
        #[test]
        fn arbitrary_frame_bytes_do_not_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut input = &bytes[..];
            while let Ok(Some(_)) = read_frame(&mut input) {}
        }
    }
}
