//! `perfvisor cp`: copies files to or from a guest.

use std::io::{self, IsTerminal, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use control_api::socket_dir;
use guest_agent::entry::{FileTreeEntry, FileTreeEntryType};
use guest_agent::receive::{FileTreeCopyProgress, FileTreeReceiveError, FileTreeReceiver};
use guest_agent::request::AgentOperation;
use guest_agent::send::{FileTreeSendError, send_stream, send_tree};
use guest_agent::wire::{Frame, FrameKind, write_frame};

use super::guest::{AgentAddress, GuestAgentError};
use super::{CommandOutputError, DONE, print_stderr, written};
use crate::exit::ExitStatus;
use crate::values::parse_seconds;

/// Interval between updates of the progress display.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// `perfvisor cp`.
#[derive(Clone, Debug, Args)]
pub struct CopyFilesArgs {
    /// Source: a file or a directory (copied recursively), on this host (PATH) or in a guest
    /// (NAME:PATH); - for standard input.
    #[arg(value_name = "SOURCE")]
    pub source: String,
    /// Target, which is an existing directory or the new name; - for standard output.
    #[arg(value_name = "TARGET")]
    pub target: String,
    /// Wait up to this time for a guest that is still booting.
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub wait: Option<Duration>,
    /// Use the vsock socket at this path, for a VM started with --vsock socket=PATH.
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

/// Errors of `perfvisor cp`.
#[derive(Debug, thiserror::Error)]
pub enum CopyFilesError {
    #[error(transparent)]
    Guest(#[from] GuestAgentError),
    #[error(
        "either SOURCE or TARGET must be NAME:PATH, a path in a guest, and the other a path on \
         this host"
    )]
    Sides,
    #[error("{0}: no path in the guest; use for example {0}/tmp")]
    NoPath(String),
    #[error("{}: no file name; name the copy", .0.display())]
    NoName(PathBuf),
    #[error(transparent)]
    Send(#[from] FileTreeSendError),
    #[error(transparent)]
    Receive(#[from] FileTreeReceiveError),
    #[error(transparent)]
    Output(#[from] CommandOutputError),
    #[error("{0}: cannot write a directory to standard output")]
    NoFile(String),
}

/// Source or destination of a copy.
#[derive(Debug, PartialEq, Eq)]
enum CopyEndpoint<'a> {
    Here(&'a Path),
    Guest(&'a str, &'a str),
}

/// Parses a source or destination of a copy. `NAME:PATH` is a path in a guest, and `./NAME:PATH` is
/// a path on the host.
fn side(text: &str) -> Result<CopyEndpoint<'_>, CopyFilesError> {
    match text.split_once(':') {
        Some((name, "")) if socket_dir::check_name(name).is_ok() => {
            Err(CopyFilesError::NoPath(text.to_owned()))
        }
        Some((name, path)) if socket_dir::check_name(name).is_ok() => Ok(CopyEndpoint::Guest(name, path)),
        _ => Ok(CopyEndpoint::Here(Path::new(text))),
    }
}

/// Copies files to or from a guest.
///
/// # Errors
/// Returns [`CopyFilesError`] if a file cannot be copied.
pub fn cp(args: &CopyFilesArgs) -> Result<ExitStatus, CopyFilesError> {
    let way = |name: &str| AgentAddress {
        name: name.to_owned(),
        socket: args.socket.clone(),
        wait: args.wait,
    };
    match (side(&args.source)?, side(&args.target)?) {
        (CopyEndpoint::Here(source), CopyEndpoint::Guest(name, target)) => put(&way(name), source, target),
        (CopyEndpoint::Guest(name, source), CopyEndpoint::Here(target)) => get(&way(name), source, target),
        _ => Err(CopyFilesError::Sides),
    }
}

/// Counts copied bytes for the progress display, and records skipped files.
struct TransferMeter {
    bytes: u64,
    shown: Instant,
    terminal: bool,
    skipped: bool,
}

impl TransferMeter {
    fn new() -> Self {
        Self {
            bytes: 0,
            shown: Instant::now(),
            terminal: io::stderr().is_terminal(),
            skipped: false,
        }
    }

    fn add(&mut self, count: usize) {
        self.bytes = self.bytes.saturating_add(count as u64);
        if self.terminal && self.shown.elapsed() > PROGRESS_INTERVAL {
            self.shown = Instant::now();
            print_stderr(&format!("\r{} MiB ", self.bytes >> 20));
        }
    }

    fn skipped(&mut self, what: &str) {
        self.skipped = true;
        self.clear();
        print_stderr(&format!("perfvisor: warn: not copied: {what}\n"));
    }

    fn clear(&self) {
        if self.terminal {
            print_stderr("\r\x1b[K");
        }
    }

    fn end(&self) -> ExitStatus {
        self.clear();
        if self.skipped {
            ExitStatus::CheckFailed
        } else {
            DONE
        }
    }
}

fn put(way: &AgentAddress, source: &Path, target: &str) -> Result<ExitStatus, CopyFilesError> {
    let piped = source == Path::new("-");
    let name = if piped {
        String::new()
    } else {
        // If the source is `..` or `.`, take the name of the directory from its real path.
        let full = source.canonicalize().map_err(|error| FileTreeSendError::Source {
            path: source.to_owned(),
            source: error,
        })?;
        let named = source.file_name().or(full.file_name());
        let text = named.and_then(|name| name.to_str());
        text.ok_or_else(|| CopyFilesError::NoName(source.to_owned()))?
            .to_owned()
    };
    let path = target.to_owned();
    let stream = way.request_job(AgentOperation::Put { path, name })?;
    let mut meter = TransferMeter::new();
    let mut out = |kind: FrameKind, payload: &[u8]| {
        match kind {
            FrameKind::Data => meter.add(payload.len()),
            FrameKind::Skipped => {
                let payload = payload.to_vec();
                meter.skipped(&Frame { kind, payload }.text());
            }
            _ => {}
        }
        write_frame(&mut &stream, kind, payload)
    };
    let sent = if piped {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        send_stream(
            io::stdin().lock(),
            0o644,
            (now.as_secs(), now.subsec_nanos()),
            &mut out,
        )
    } else {
        send_tree(source, &mut out)
    };
    match sent {
        // If the connection broke, the agent has aborted the copy. Its next frame contains the
        // reason.
        Ok(()) | Err(FileTreeSendError::Connection(_)) => {}
        Err(error) => return Err(error.into()),
    }
    match way.next(&mut &stream)? {
        Frame {
            kind: FrameKind::Done,
            ..
        } => Ok(meter.end()),
        frame => {
            meter.clear();
            Err(way.refused(&frame).into())
        }
    }
}

fn get(way: &AgentAddress, source: &str, target: &Path) -> Result<ExitStatus, CopyFilesError> {
    let piped = target == Path::new("-");
    // Detect local errors before contacting the guest.
    let name = Path::new(source).file_name().and_then(|name| name.to_str());
    let mut receiver = if piped {
        None
    } else {
        Some(FileTreeReceiver::new(target, name)?)
    };
    let stream = way.request_job(AgentOperation::Get {
        path: source.to_owned(),
    })?;
    let mut meter = TransferMeter::new();
    loop {
        let frame = way.next(&mut &stream)?;
        if frame.kind == FrameKind::Data {
            meter.add(frame.payload.len());
        }
        let progress = match &mut receiver {
            _ if frame.kind == FrameKind::Refused => return Err(way.refused(&frame).into()),
            Some(receiver) => receiver.take(&frame)?,
            None => print_file(&frame, source)?,
        };
        match progress {
            FileTreeCopyProgress::More => {}
            FileTreeCopyProgress::Skipped(what) => meter.skipped(&what),
            FileTreeCopyProgress::Done => {
                close(&stream);
                return Ok(meter.end());
            }
        }
    }
}

/// Shuts down the stream to the agent, which waits for the end of the stream.
fn close(stream: &UnixStream) {
    let _ = stream.shutdown(std::net::Shutdown::Both);
}

/// Handles a frame from the agent: writes the file contents in the frame to standard output.
fn print_file(frame: &Frame, source: &str) -> Result<FileTreeCopyProgress, CopyFilesError> {
    match frame.kind {
        FrameKind::TreeEntry => match FileTreeEntry::from_bytes(&frame.payload)
            .map_err(FileTreeReceiveError::from)?
            .what
        {
            FileTreeEntryType::File => Ok(FileTreeCopyProgress::More),
            _ => Err(CopyFilesError::NoFile(source.to_owned())),
        },
        FrameKind::Data => {
            written(io::stdout().write_all(&frame.payload))?;
            Ok(FileTreeCopyProgress::More)
        }
        FrameKind::FileEnd => Ok(FileTreeCopyProgress::More),
        FrameKind::Skipped => Ok(FileTreeCopyProgress::Skipped(frame.text())),
        FrameKind::Done => {
            written(io::stdout().flush())?;
            Ok(FileTreeCopyProgress::Done)
        }
        _ => Err(FileTreeReceiveError::Order.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_and_colon_select_a_guest() {
        assert_eq!(side("vm:/tmp/x").unwrap(), CopyEndpoint::Guest("vm", "/tmp/x"));
        assert_eq!(side("vm:x:y").unwrap(), CopyEndpoint::Guest("vm", "x:y"));
        for here in ["x", "./vm:/x", "/a:b", "-", ""] {
            assert_eq!(side(here).unwrap(), CopyEndpoint::Here(Path::new(here)));
        }
        assert!(matches!(side("vm:"), Err(CopyFilesError::NoPath(_))));
    }
}
