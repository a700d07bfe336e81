//! Switching a recording on and off from elsewhere, with the words and pipes that `perf record --control`
//! knows.

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::PathBuf;
use std::str::FromStr;

/// Longest line that is taken for a word.
const MOST_BYTES: usize = 64;
/// Most words that are taken in at once.
const MOST_AT_ONCE: usize = 64;

/// `--control fifo:CTL[,ACK]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pipes {
    /// Where words come from.
    ctl: PathBuf,
    /// Where it is said that they were followed.
    ack: Option<PathBuf>,
}

/// No pipes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PipesError {
    /// Something else.
    #[error("must be fifo:CTL or fifo:CTL,ACK, with the paths of two pipes (mkfifo)")]
    Shape,
    /// Nothing beside the comma.
    #[error("a path is empty")]
    EmptyPath,
}

impl FromStr for Pipes {
    type Err = PipesError;

    fn from_str(text: &str) -> Result<Self, PipesError> {
        let paths = text.strip_prefix("fifo:").filter(|paths| !paths.is_empty());
        let paths = paths.ok_or(PipesError::Shape)?;
        let (ctl, ack) = match paths.split_once(',') {
            Some((ctl, ack)) => (ctl, Some(ack)),
            None => (paths, None),
        };
        if ctl.is_empty() || ack == Some("") {
            return Err(PipesError::EmptyPath);
        }
        Ok(Self {
            ctl: ctl.into(),
            ack: ack.map(Into::into),
        })
    }
}

/// What is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// Sample from now on.
    Enable,
    /// Sample no more, for now.
    Disable,
    /// End.
    Stop,
    /// Only answer.
    Ping,
}

/// Pipes that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// It cannot be opened.
    #[error("--control: {}", path.display())]
    Open {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// Another kind of file.
    #[error("--control: {} is no pipe; make one with mkfifo", .0.display())]
    NoPipe(PathBuf),
}

/// The pipes, open.
#[derive(Debug)]
pub struct Remote {
    ctl: File,
    ack: Option<File>,
    line: Vec<u8>,
    /// The rest of a line that is too long.
    skips: bool,
}

impl Remote {
    /// Opens the pipes. Both ways, so that neither this nor its reads wait for somebody at the other end.
    ///
    /// # Errors
    /// [`RemoteError`].
    pub fn open(pipes: &Pipes) -> Result<Self, RemoteError> {
        let open = |path: &PathBuf| {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .custom_flags(libc::O_NONBLOCK)
                .open(path)
                .map_err(|source| RemoteError::Open {
                    path: path.clone(),
                    source,
                })?;
            let is_pipe = file.metadata().is_ok_and(|m| m.file_type().is_fifo());
            is_pipe
                .then_some(file)
                .ok_or_else(|| RemoteError::NoPipe(path.clone()))
        };
        Ok(Self {
            ctl: open(&pipes.ctl)?,
            ack: pipes.ack.as_ref().map(open).transpose()?,
            line: Vec::with_capacity(MOST_BYTES),
            skips: false,
        })
    }

    /// The words that have come. Of others it is said that they are not known.
    pub fn words(&mut self) -> Vec<Word> {
        let mut words = Vec::new();
        let mut bytes = [0; 256];
        while words.len() < MOST_AT_ONCE {
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

    fn take(&mut self, byte: u8) -> Option<Word> {
        if byte != b'\n' && byte != 0 {
            self.skips |= self.line.len() == MOST_BYTES;
            if !self.skips {
                self.line.push(byte);
            }
            return None;
        }
        let line = std::mem::take(&mut self.line);
        let skipped = std::mem::take(&mut self.skips);
        match line.trim_ascii() {
            b"" => None,
            b"enable" if !skipped => Some(Word::Enable),
            b"disable" if !skipped => Some(Word::Disable),
            b"stop" if !skipped => Some(Word::Stop),
            b"ping" if !skipped => Some(Word::Ping),
            other => {
                let other: String = other.escape_ascii().to_string();
                log::warn!("--control: '{other}' is none of enable, disable, stop and ping");
                None
            }
        }
    }

    /// Says that a word was followed.
    pub fn acknowledge(&mut self) {
        if let Some(ack) = &mut self.ack
            && let Err(e) = ack.write_all(b"ack\n")
        {
            log::warn!("--control: answering: {e}");
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
    fn paths_are_as_with_perf() {
        let pipes: Pipes = "fifo:/a,/b".parse().unwrap();
        assert_eq!((pipes.ctl, pipes.ack), ("/a".into(), Some("/b".into())));
        assert_eq!("fifo:/a".parse::<Pipes>().unwrap().ack, None);
        for bad in ["", "fifo:", "fifo:,/b", "fifo:/a,", "fd:3", "/a"] {
            assert!(bad.parse::<Pipes>().is_err(), "{bad}");
        }
    }

    /// Words come in pieces and together; others, however long, are left out and do no harm.
    #[test]
    fn words_are_lines() {
        let directory = tempfile::tempdir().unwrap();
        let (ctl, ack) = (pipe(directory.path(), "ctl"), pipe(directory.path(), "ack"));
        let pipes: Pipes = format!("fifo:{},{}", ctl.display(), ack.display())
            .parse()
            .unwrap();
        let mut remote = Remote::open(&pipes).unwrap();
        let mut writer = OpenOptions::new().write(true).open(&ctl).unwrap();
        assert_eq!(remote.words(), []);
        writer.write_all(b"enable\ndisa").unwrap();
        assert_eq!(remote.words(), [Word::Enable]);
        writer.write_all(b"ble\n\nping\0nonsense\n").unwrap();
        assert_eq!(remote.words(), [Word::Disable, Word::Ping]);
        writer.write_all(&[b'e'; 1000]).unwrap();
        writer.write_all(b"\nstop\n").unwrap();
        assert_eq!(remote.words(), [Word::Stop]);
        remote.acknowledge();
        let mut answer = [0; 8];
        let mut reader = OpenOptions::new().read(true).open(&ack).unwrap();
        let n = reader.read(&mut answer).unwrap();
        assert_eq!(&answer[..n], b"ack\n");
    }

    #[test]
    fn what_is_no_pipe_is_refused() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let pipes: Pipes = format!("fifo:{}", file.path().display()).parse().unwrap();
        assert!(Remote::open(&pipes).unwrap_err().to_string().contains("mkfifo"));
        let pipes: Pipes = "fifo:/nowhere/x".parse().unwrap();
        assert!(
            Remote::open(&pipes)
                .unwrap_err()
                .to_string()
                .contains("/nowhere/x")
        );
    }
}
