//! The process's standard streams as files that stay open.
#![expect(
    unsafe_code,
    reason = "files on descriptors that the process has from its start"
)]

use std::fs::File;
use std::io::{self, Read, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

use super::poll::wait_for_room;

/// A file on a descriptor that stays open when it is dropped.
pub(super) struct StandardStream(ManuallyDrop<File>);

impl StandardStream {
    pub(super) fn stdout() -> Self {
        Self::of(libc::STDOUT_FILENO)
    }

    pub(super) fn of(fd: RawFd) -> Self {
        // SAFETY: ManuallyDrop never closes the descriptor, so the file does not own it; standard
        // descriptors stay open for the process's life, and one that is closed only gives EBADF.
        StandardStream(ManuallyDrop::new(unsafe { File::from_raw_fd(fd) }))
    }
}

impl Write for StandardStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.write(bytes) {
            // A non-blocking standard output (shared with someone who made it so): wait for room.
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
