//! Remote control of a recording through named pipes, compatible with `perf record --control`.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::PathBuf;
use std::str::FromStr;

/// Maximum length of a command from the control pipe, in bytes.
const MAX_COMMAND_BYTES: usize = 64;
/// Maximum number of commands accepted from the control pipe at a time.
const MAX_COMMANDS: usize = 64;

/// The pipes of `--control fifo:CTL[,ACK]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlPipes {
    /// Path of the pipe from which commands are read.
    ctl: PathBuf,
    /// Path of the pipe to which acknowledgements are written.
    ack: Option<PathBuf>,
}

/// Errors of parsing `--control`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ControlPipesError {
    #[error("must be fifo:CTL or fifo:CTL,ACK, with the paths of two pipes (mkfifo)")]
    Shape,
    #[error("a path is empty")]
    EmptyPath,
}

impl FromStr for ControlPipes {
    type Err = ControlPipesError;

    fn from_str(text: &str) -> Result<Self, ControlPipesError> {
        let paths = text.strip_prefix("fifo:").filter(|paths| !paths.is_empty());
        let paths = paths.ok_or(ControlPipesError::Shape)?;
        let (ctl, ack) = match paths.split_once(',') {
            Some((ctl, ack)) => (ctl, Some(ack)),
            None => (paths, None),
        };
        if ctl.is_empty() || ack == Some("") {
            return Err(ControlPipesError::EmptyPath);
        }
        Ok(Self {
            ctl: ctl.into(),
            ack: ack.map(Into::into),
        })
    }
}

/// A command from the control pipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlCommand {
    /// Enables sampling.
    Enable,
    /// Disables sampling.
    Disable,
    /// Ends the recording.
    Stop,
    /// Requests only an acknowledgement.
    Ping,
}

/// Errors of opening the pipes of `--control`.
#[derive(Debug, thiserror::Error)]
pub enum RecordingControlError {
    #[error("--control: {}", path.display())]
    Open {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("--control: {} is not a pipe; create one with mkfifo", .0.display())]
    NoPipe(PathBuf),
}

/// The open pipes of `--control`.
#[derive(Debug)]
pub struct OpenControlPipes {
    ctl: File,
    ack: Option<File>,
    line: Vec<u8>,
    /// `true` while the rest of an overlong line is discarded.
    skips: bool,
}

impl OpenControlPipes {
    /// Opens both pipes for reading and writing. Neither opening a pipe nor reading from it then
    /// waits for a peer.
    ///
    /// # Errors
    /// Returns [`RecordingControlError`] if a pipe cannot be opened or is not a pipe.
    pub fn open(pipes: &ControlPipes) -> Result<Self, RecordingControlError> {
        let open = |path: &PathBuf| {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_NONBLOCK)
                .open(path)
                .map_err(|source| RecordingControlError::Open {
                    path: path.clone(),
                    source,
                })?;
            let is_pipe = file.metadata().is_ok_and(|m| m.file_type().is_fifo());
            is_pipe
                .then_some(file)
                .ok_or_else(|| RecordingControlError::NoPipe(path.clone()))
        };
        Ok(Self {
            ctl: open(&pipes.ctl)?,
            ack: pipes.ack.as_ref().map(open).transpose()?,
            line: Vec::with_capacity(MAX_COMMAND_BYTES),
            skips: false,
        })
    }

    /// Returns the commands received since the previous call, and logs unknown commands.
    pub fn words(&mut self) -> Vec<ControlCommand> {
        let mut words = Vec::new();
        let mut bytes = [0; 256];
        while words.len() < MAX_COMMANDS {
            match self.ctl.read(&mut bytes) {
                Ok(0) => break,
                Ok(n) => words.extend(bytes[..n].iter().filter_map(|&byte| self.take(byte))),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => {
                    if e.kind() != ErrorKind::WouldBlock {
                        log::warn!("--control: {e}");
                    }
                    break;
                }
            }
        }
        words
    }

    fn take(&mut self, byte: u8) -> Option<ControlCommand> {
        if byte != b'\n' && byte != 0 {
            self.skips |= self.line.len() == MAX_COMMAND_BYTES;
            if !self.skips {
                self.line.push(byte);
            }
            return None;
        }
        let line = std::mem::take(&mut self.line);
        let skipped = std::mem::take(&mut self.skips);
        match line.trim_ascii() {
            b"" => None,
            b"enable" if !skipped => Some(ControlCommand::Enable),
            b"disable" if !skipped => Some(ControlCommand::Disable),
            b"stop" if !skipped => Some(ControlCommand::Stop),
            b"ping" if !skipped => Some(ControlCommand::Ping),
            other => {
                let other: String = other.escape_ascii().to_string();
                log::warn!("--control: unknown command '{other}'; must be enable, disable, stop or ping");
                None
            }
        }
    }

    /// Writes the acknowledgement of one command, if there is a pipe for acknowledgements.
    pub fn acknowledge(&mut self) {
        if let Some(ack) = &mut self.ack
            && let Err(e) = ack.write_all(b"ack\n")
        {
            log::warn!("--control: cannot acknowledge: {e}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pipe(directory: &std::path::Path, name: &str) -> PathBuf {
        let path = directory.join(name);
        let made = std::process::Command::new("mkfifo").arg(&path).status().unwrap();
        assert!(made.success());
        path
    }

    #[test]
    fn pipe_paths_are_parsed_like_perf() {
        let pipes: ControlPipes = "fifo:/a,/b".parse().unwrap();
        assert_eq!((pipes.ctl, pipes.ack), ("/a".into(), Some("/b".into())));
        assert_eq!("fifo:/a".parse::<ControlPipes>().unwrap().ack, None);
        for bad in ["", "fifo:", "fifo:,/b", "fifo:/a,", "fd:3", "/a"] {
            assert!(bad.parse::<ControlPipes>().is_err(), "{bad}");
        }
    }

    /// One read from the control pipe may return a part of a command or several commands. Unknown
    /// and overlong lines are skipped.
    #[test]
    fn commands_are_separated_by_newlines() {
        let directory = tempfile::tempdir().unwrap();
        let (ctl, ack) = (pipe(directory.path(), "ctl"), pipe(directory.path(), "ack"));
        let pipes: ControlPipes = format!("fifo:{},{}", ctl.display(), ack.display())
            .parse()
            .unwrap();
        let mut remote = OpenControlPipes::open(&pipes).unwrap();
        let mut writer = OpenOptions::new().write(true).open(&ctl).unwrap();
        assert_eq!(remote.words(), []);
        writer.write_all(b"enable\ndisa").unwrap();
        assert_eq!(remote.words(), [ControlCommand::Enable]);
        writer.write_all(b"ble\n\nping\0nonsense\n").unwrap();
        assert_eq!(remote.words(), [ControlCommand::Disable, ControlCommand::Ping]);
        writer.write_all(&[b'e'; 1000]).unwrap();
        writer.write_all(b"\nstop\n").unwrap();
        assert_eq!(remote.words(), [ControlCommand::Stop]);
        remote.acknowledge();
        let mut answer = [0; 8];
        let mut reader = OpenOptions::new().read(true).open(&ack).unwrap();
        let n = reader.read(&mut answer).unwrap();
        assert_eq!(&answer[..n], b"ack\n");
    }

    #[test]
    fn non_pipe_is_rejected() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let pipes: ControlPipes = format!("fifo:{}", file.path().display()).parse().unwrap();
        assert!(
            OpenControlPipes::open(&pipes)
                .unwrap_err()
                .to_string()
                .contains("mkfifo")
        );
        let pipes: ControlPipes = "fifo:/nowhere/x".parse().unwrap();
        assert!(
            OpenControlPipes::open(&pipes)
                .unwrap_err()
                .to_string()
                .contains("/nowhere/x")
        );
    }
}
