//! Sequential reading of files specified by the user. A file may report a wrong size, and a pipe
//! may have no writer.

use std::fs::File;
use std::io::{self, Chain, Cursor, ErrorKind, Read};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use sandbox::paths;

use crate::signals::is_end_requested;

/// Number of bytes in the first read, which detects whether a pipe has a writer.
const PROBE_BYTES: usize = 4096;

/// Polling interval for Ctrl-C while a read waits for a writer.
const POLL_INTERVAL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 20_000_000,
};

/// A file opened by [`open`]: the bytes of the first read, followed by the rest of the file.
pub type InterruptibleInput = Chain<Cursor<Vec<u8>>, InterruptibleFile>;

/// A file with a potentially slow writer. A stop signal interrupts a read even in a thread that
/// blocks signals.
#[derive(Debug)]
pub struct InterruptibleFile {
    file: File,
    /// `true` for a regular file, which needs no writer.
    is_file: bool,
}

impl Read for InterruptibleFile {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        while !self.is_file
            && poll(
                &mut [PollFd::new(&self.file, PollFlags::IN)],
                Some(&POLL_INTERVAL),
            )? == 0
        {
            if is_end_requested() {
                return Err(io::Error::other(TerminatedBySignal));
            }
        }
        self.file.read(bytes)
    }
}

/// Error returned when a stop signal interrupts a read.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub struct TerminatedBySignal;

/// Error returned when a pipe without a writer is opened. A blocking open(2) would wait
/// indefinitely.
#[derive(Debug, thiserror::Error)]
#[error("the pipe has no writer; use a file, or a pipe with a writer such as <(COMMAND)")]
pub struct PipeWithoutWriterError;

/// Opens `path` for reading without blocking.
///
/// Pipes with a writer are accepted, such as those of the shell's `<(COMMAND)`. Reads from a pipe
/// wait for the writer or for a stop signal.
///
/// # Errors
/// Returns the error of open(2), or [`PipeWithoutWriterError`] if a pipe has no writer.
pub fn open(path: &Path) -> io::Result<InterruptibleInput> {
    let mut file = open_nonblocking(path)?;
    let mut begin = Vec::new();
    let kind = file.metadata()?.file_type();
    if kind.is_fifo() {
        let mut bytes = [0; PROBE_BYTES];
        match file.read(&mut bytes) {
            Ok(0) => return Err(io::Error::new(ErrorKind::InvalidInput, PipeWithoutWriterError)),
            Ok(count) => begin.extend_from_slice(&bytes[..count]),
            // The pipe has a writer that has not written yet.
            Err(e) if e.kind() == ErrorKind::WouldBlock => {}
            Err(e) => return Err(e),
        }
    }
    // The descriptor has its own file description even for /dev/fd/N, so other descriptors keep
    // their flags.
    fcntl_setfl(&file, fcntl_getfl(&file)? - OFlags::NONBLOCK)?;
    let is_file = kind.is_file() || kind.is_dir();
    Ok(Cursor::new(begin).chain(InterruptibleFile { file, is_file }))
}

/// Checks that `path` can be opened for reading, without blocking and without reading.
///
/// # Errors
/// Returns the error of open(2).
pub fn can_be_read(path: &Path) -> io::Result<()> {
    open_nonblocking(path).map(drop)
}

fn open_nonblocking(path: &Path) -> io::Result<File> {
    paths::open(path, libc::O_RDONLY | libc::O_NONBLOCK | libc::O_NOCTTY)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn text(path: &Path) -> io::Result<String> {
        let mut text = String::new();
        open(path)?.read_to_string(&mut text)?;
        Ok(text)
    }

    #[test]
    fn pipe_without_writer_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let (file, pipe) = (dir.path().join("file"), dir.path().join("pipe"));
        std::fs::write(&file, "words").unwrap();
        assert_eq!(text(&file).unwrap(), "words");
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        let why = text(&pipe).unwrap_err();
        assert!(why.to_string().contains("no writer"), "{why}");
        can_be_read(&pipe).unwrap();
        // More data than the first read returns and than the capacity of a pipe.
        let many = "0123456789abcdef".repeat(20_000);
        for late in [false, true] {
            // Open both ends with one descriptor, so that neither open blocks.
            let both = File::options().read(true).write(true).open(&pipe).unwrap();
            let mut writer = File::options().write(true).open(&pipe).unwrap();
            let words = many.clone();
            let write = move || io::Write::write_all(&mut writer, words.as_bytes()).unwrap();
            let opened = if late {
                // The pipe has a writer that has not written yet.
                let opened = open(&pipe).unwrap();
                drop(both);
                let writes = std::thread::spawn(write);
                (opened, writes)
            } else {
                let writes = std::thread::spawn(write);
                // The writer starts before the pipe is opened and cannot finish until data has been
                // read.
                while rustix::io::ioctl_fionread(&both).unwrap() == 0 {
                    std::thread::yield_now();
                }
                let opened = open(&pipe).unwrap();
                drop(both);
                (opened, writes)
            };
            let (mut opened, writes) = opened;
            let mut read = String::new();
            opened.read_to_string(&mut read).unwrap();
            writes.join().unwrap();
            assert!(read == many, "{} bytes, late: {late}", read.len());
        }
    }

    #[test]
    fn missing_files_and_directories_report_os_errors() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(
            open(&dir.path().join("none")).unwrap_err().kind(),
            ErrorKind::NotFound
        );
        assert_eq!(text(dir.path()).unwrap_err().kind(), ErrorKind::IsADirectory);
        assert_eq!(text(Path::new("/dev/null")).unwrap(), "");
    }
}
