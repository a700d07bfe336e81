//! The standard streams of the process as files that are never closed.
#![expect(
    unsafe_code,
    reason = "files on descriptors that the process has from its start"
)]

use std::fs::File;
use std::io::{self, Read, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

use super::poll::wait_for_room;

/// A standard stream, as a file whose descriptor is not closed on drop.
pub(super) struct StandardStream(ManuallyDrop<File>);

impl StandardStream {
    pub(super) fn stdout() -> Self {
        Self::of(libc::STDOUT_FILENO)
    }

    pub(super) fn of(fd: RawFd) -> Self {
        // SAFETY: ManuallyDrop never closes the descriptor, so the file does not own it. Standard
        // descriptors stay open for the lifetime of the process; using a closed one only returns
        // EBADF.
        StandardStream(ManuallyDrop::new(unsafe { File::from_raw_fd(fd) }))
    }
}

impl Write for StandardStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.write(bytes) {
            // Another process may have made the shared standard output nonblocking. Wait for space.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                wait_for_room(self.0.as_raw_fd(), None);
                Err(io::ErrorKind::Interrupted.into())
            }
            other => other,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for StandardStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.0.read(into)
    }
}

impl AsRawFd for StandardStream {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;
    use std::time::Duration;

    use super::*;

    /// Returns both ends of a full pipe, in nonblocking mode.
    fn full_pipe() -> (File, OwnedFd) {
        let (read, write) = io::pipe().unwrap();
        let write = OwnedFd::from(write);
        let mut stream = StandardStream::of(write.as_raw_fd());
        // SAFETY: the descriptor is open, and F_SETFL takes an integer.
        let set = unsafe { libc::fcntl(write.as_raw_fd(), libc::F_SETFL, libc::O_NONBLOCK) };
        assert_eq!(set, 0);
        while stream.0.write(&[0; 4096]).is_ok() {}
        (OwnedFd::from(read).into(), write)
    }

    /// Dropping a [`StandardStream`] does not close the stream, which the parent process may share.
    #[test]
    fn standard_stream_drop_keeps_descriptor_open() {
        let (mut read, write) = io::pipe().unwrap();
        for byte in *b"ab" {
            StandardStream::of(write.as_raw_fd()).write_all(&[byte]).unwrap();
        }
        drop(write);
        let mut text = String::new();
        read.read_to_string(&mut text).unwrap();
        assert_eq!(text, "ab");
    }

    /// A nonblocking standard output loses nothing, because the writer waits for space.
    #[test]
    fn nonblocking_stdout_waits_for_space() {
        let (mut read, write) = full_pipe();
        let writer = std::thread::spawn(move || {
            StandardStream::of(write.as_raw_fd())
                .write_all(b"the end")
                .unwrap();
        });
        let mut all = Vec::new();
        read.read_to_end(&mut all).unwrap();
        writer.join().unwrap();
        assert!(all.ends_with(b"\0the end"));
    }

    /// A wait for free space ends at its time limit, or when the reader closes the stream.
    #[test]
    fn poll_ends_at_timeout_and_hangup() {
        let (read, write) = full_pipe();
        wait_for_room(write.as_raw_fd(), Some(Duration::from_millis(1)));
        drop(read);
        wait_for_room(write.as_raw_fd(), None);
        let gone = StandardStream::of(write.as_raw_fd()).write(b"x").unwrap_err();
        assert_eq!(gone.kind(), io::ErrorKind::BrokenPipe);
    }
}
