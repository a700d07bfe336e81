//! Protocol between the test runner and the lab's agent over the serial port.
//!
//! A frame consists of a type, the ID of the process or file transfer to which it belongs, the
//! length of the payload, and the payload. The side that starts a process or transfer chooses its
//! ID.

use std::io::{self, Read, Write};

use serde::{Deserialize, Serialize};

/// Maximum payload of a frame, in bytes. Longer data is sent in several frames.
pub const MAX_PAYLOAD_BYTES: usize = 64 << 10;

/// Size of a frame header, in bytes. The header consists of type, ID and length.
const HEADER_BYTES: usize = 9;

/// Type of a frame, which determines its sender and its payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    /// Greeting, sent by the agent. The payload is the release of the lab's kernel.
    Hello = 1,
    /// Request to start a process, sent by the runner. The payload is a [`ProcessStartRequest`] as
    /// JSON.
    Start = 2,
    /// Standard input of a process, sent by the runner. An empty payload means end of file.
    Stdin = 3,
    /// Request to signal a process group, sent by the runner. The payload is the signal number (4
    /// bytes, little-endian).
    Signal = 4,
    /// Standard output of a process, sent by the agent.
    Stdout = 5,
    /// Standard error of a process, sent by the agent.
    Stderr = 6,
    /// Exit of a process, sent by the agent. The payload is a [`ProcessExit`] as JSON.
    Exit = 7,
    /// Request to create a file, sent by the runner. The payload is a [`NewFile`] as JSON.
    Create = 8,
    /// Chunk of a file, sent by the agent or the runner.
    Data = 9,
    /// End of a file, sent by the agent or the runner. The agent also sends this frame to
    /// acknowledge a file that it has received completely.
    Done = 10,
    /// Request for a file from the lab, sent by the runner. The payload is the path of the file.
    Fetch = 11,
    /// Failure of an operation, sent by the agent. The payload is the reason as text.
    Failed = 12,
    /// CPU time of a process and its children, sent by the agent. The payload is the total so far
    /// in clock ticks (8 bytes, little-endian).
    Used = 13,
    /// New window size of a process's terminal, sent by the runner. The payload is a
    /// [`TerminalSize`] as JSON.
    Resize = 14,
}

impl FrameKind {
    fn from_byte(byte: u8) -> Option<Self> {
        use FrameKind::*;
        [
            Hello, Start, Stdin, Signal, Stdout, Stderr, Exit, Create, Data, Done, Fetch, Failed, Used,
            Resize,
        ]
        .into_iter()
        .find(|kind| *kind as u8 == byte)
    }
}

/// A frame of the protocol.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// Type of this frame.
    pub kind: FrameKind,
    /// ID of the process or file transfer to which this frame belongs.
    pub id: u32,
    /// Payload of this frame, whose format depends on the type.
    pub payload: Vec<u8>,
}

/// A request to start a process.
#[derive(Debug, Serialize, Deserialize)]
pub struct ProcessStartRequest {
    /// Program and arguments.
    pub argv: Vec<String>,
    /// Environment variables of the process, in addition to those of the agent.
    pub env: Vec<(String, String)>,
    /// How the standard streams of the process are connected to the runner.
    pub streams: StdioMode,
}

/// How the standard streams of a process in the lab are connected to the runner.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum StdioMode {
    /// Two pipes of the usual size. Output on standard output and standard error may arrive in a
    /// different order than it was written.
    #[default]
    Pipes,
    /// Two pipes that hold one write each. Standard output and standard error arrive at the runner
    /// in the exact order, and the process waits for the agent after each write.
    Ordered,
    /// A terminal with this window size. All output is standard output.
    Terminal(TerminalSize),
}

/// Size of a terminal window, in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Height of the window, as number of rows.
    pub rows: u16,
    /// Width of the window, as number of columns.
    pub columns: u16,
}

/// How a process ended. Exactly one field is set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessExit {
    /// Exit status, if the process exited by itself.
    pub code: Option<i32>,
    /// Number of the signal that killed the process.
    pub signal: Option<i32>,
}

/// A request to create a file in the lab, the test host emulated by QEMU.
#[derive(Debug, Serialize, Deserialize)]
pub struct NewFile {
    /// Path of the file in the lab. Missing directories are created.
    pub path: String,
    /// Permission bits of the file.
    pub mode: u32,
}

/// Writes a frame with a single write call. Threads that share the writer must hold its lock, so
/// that their frames are not interleaved.
///
/// # Errors
/// Returns an error if the peer has closed the connection or the payload is longer than
/// [`MAX_PAYLOAD_BYTES`].
pub fn write_frame(out: &mut impl Write, kind: FrameKind, id: u32, payload: &[u8]) -> io::Result<()> {
    if payload.len() > MAX_PAYLOAD_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "frame too long"));
    }
    let mut frame = Vec::with_capacity(HEADER_BYTES + payload.len());
    frame.push(kind as u8);
    frame.extend(id.to_le_bytes());
    frame.extend((payload.len() as u32).to_le_bytes());
    frame.extend(payload);
    out.write_all(&frame)
}

/// Reads one frame. Returns `None` at the end of the stream.
///
/// # Errors
/// Returns an error if the stream fails, ends within a frame, or contains an invalid frame.
pub fn read_frame(input: &mut impl Read) -> io::Result<Option<Frame>> {
    let mut header = [0; HEADER_BYTES];
    let first = loop {
        match input.read(&mut header[..1]) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => break other?,
        }
    };
    if first == 0 {
        return Ok(None);
    }
    input.read_exact(&mut header[1..])?;
    let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidData, text);
    let kind =
        FrameKind::from_byte(header[0]).ok_or_else(|| invalid(format!("no frame kind {:#x}", header[0])))?;
    let id = u32::from_le_bytes([header[1], header[2], header[3], header[4]]);
    let length = u32::from_le_bytes([header[5], header[6], header[7], header[8]]) as usize;
    if length > MAX_PAYLOAD_BYTES {
        return Err(invalid(format!(
            "frame of {length} bytes, at most {MAX_PAYLOAD_BYTES}"
        )));
    }
    let mut payload = vec![0; length];
    input.read_exact(&mut payload)?;
    Ok(Some(Frame { kind, id, payload }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_round_trips() {
        let mut bytes = Vec::new();
        write_frame(&mut bytes, FrameKind::Stdout, 7, b"hello").unwrap();
        write_frame(&mut bytes, FrameKind::Stdin, 8, b"").unwrap();
        let mut input = &bytes[..];
        let first = read_frame(&mut input).unwrap().unwrap();
        assert_eq!(
            first,
            Frame {
                kind: FrameKind::Stdout,
                id: 7,
                payload: b"hello".to_vec()
            }
        );
        let second = read_frame(&mut input).unwrap().unwrap();
        assert_eq!(
            second,
            Frame {
                kind: FrameKind::Stdin,
                id: 8,
                payload: vec![]
            }
        );
        assert_eq!(read_frame(&mut input).unwrap(), None);
    }

    #[test]
    fn every_frame_kind_reads_back_as_itself() {
        for byte in 0..=u8::MAX {
            let mut frame = vec![byte];
            frame.extend([0; HEADER_BYTES - 1]);
            match read_frame(&mut &frame[..]) {
                Ok(Some(frame)) => assert_eq!(frame.kind as u8, byte),
                other => assert!(other.is_err() && !(1..=14).contains(&byte), "kind {byte}"),
            }
        }
    }

    #[test]
    fn start_and_window_size_survive_json() {
        let size = TerminalSize {
            rows: 50,
            columns: 132,
        };
        for streams in [StdioMode::Pipes, StdioMode::Ordered, StdioMode::Terminal(size)] {
            let start = ProcessStartRequest {
                argv: vec!["sh".into(), "-c".into(), "echo \"a b\"".into()],
                env: vec![("TERM".into(), "xterm".into())],
                streams,
            };
            let read: ProcessStartRequest =
                serde_json::from_slice(&serde_json::to_vec(&start).unwrap()).unwrap();
            assert_eq!(
                (read.argv, read.env, read.streams),
                (start.argv, start.env, streams)
            );
        }
    }

    #[test]
    fn garbage_and_truncation_are_errors_and_allocate_nothing_large() {
        assert!(read_frame(&mut &[0xEE; 64][..]).is_err());
        let mut long = vec![FrameKind::Data as u8, 0, 0, 0, 0];
        long.extend(u32::MAX.to_le_bytes());
        assert!(read_frame(&mut &long[..]).is_err());
        let mut bytes = Vec::new();
        write_frame(&mut bytes, FrameKind::Data, 1, b"12345").unwrap();
        bytes.pop();
        assert!(read_frame(&mut &bytes[..]).is_err());
        assert!(write_frame(&mut Vec::new(), FrameKind::Data, 1, &[0; MAX_PAYLOAD_BYTES + 1]).is_err());
    }
}
