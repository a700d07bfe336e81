//! Opens consoles and connects them to devices.

use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf, absolute};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use event_manager::MutEventSubscriber;
use sandbox::paths;
use virtio_devices::console::port::TerminalSize;
use vmm_sys_util::eventfd::EventFd;

use super::poll::wait_for_room;
use super::pty::Pty;
use super::stream::{Backlog, Listener, StreamConsole};
use super::terminal;
use super::{ConsoleInput, ConsoleInputSink, ConsoleOutput, ConsoleTarget};

/// Error when opening a console.
#[derive(Debug, thiserror::Error)]
pub enum ConsoleError {
    /// Starting the thread that writes console output failed.
    #[error("failed to start the thread of a console")]
    Thread(#[source] io::Error),
    /// The file cannot be opened for appending.
    #[error("file={path}: cannot append; name a file in a directory that this user may write to")]
    File {
        /// Path of the file for console output.
        path: PathBuf,
        /// Error of the system call that opened the file.
        source: io::Error,
    },
    /// Creating the socket for console clients failed.
    #[error("socket={path}: cannot listen{}", remedy(.source))]
    Socket {
        /// Path of the socket for console clients.
        path: PathBuf,
        /// Error of the system call that created the socket.
        source: io::Error,
    },
    /// Allocating a pseudo-terminal failed.
    #[error("pty: cannot allocate a pseudo-terminal; see /proc/sys/kernel/pty/max, or use socket=PATH")]
    Pty(#[source] io::Error),
}

fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "; something is there: choose another path, or end what listens there",
        _ => "; choose a path in a directory that this user may write to",
    }
}

/// An open console, which connects a guest device to the target that the operator chose. Console
/// output comes from the device. If the target has input, the device receives it.
pub struct Console {
    location: String,
    kind: Kind,
}

enum Kind {
    Terminal(ConsoleOutput),
    File(ConsoleOutput),
    Stream(Arc<Backlog>, Arc<Mutex<StreamConsole>>),
    None,
}

impl Console {
    /// Opens the console that `target` describes.
    ///
    /// # Errors
    /// Returns a [`ConsoleError`] if the console cannot be opened. The message is one line and
    /// contains a remedy.
    pub fn open(target: &ConsoleTarget) -> Result<Self, ConsoleError> {
        let mut place = target.to_string();
        let kind = match target {
            ConsoleTarget::Tty => Kind::Terminal(ConsoleOutput::stdout().map_err(ConsoleError::Thread)?),
            ConsoleTarget::File(path) => {
                let file = LogFile::open(path)?;
                place = format!("file={}", file.path.display());
                Kind::File(ConsoleOutput::on(file).map_err(ConsoleError::Thread)?)
            }
            ConsoleTarget::Socket(path) => {
                let path = absolute(path).unwrap_or_else(|_| path.clone());
                place = format!("socket={}", path.display());
                let socket = |source| ConsoleError::Socket {
                    path: path.clone(),
                    source,
                };
                let listener = Listener::bind(&path).map_err(socket)?;
                let backlog = Arc::new(Backlog::new().map_err(ConsoleError::Thread)?);
                let stream = StreamConsole::on_socket(listener, backlog.clone());
                Kind::Stream(backlog, Arc::new(Mutex::new(stream)))
            }
            ConsoleTarget::Pty => {
                let pty = Pty::open().map_err(ConsoleError::Pty)?;
                place = format!("pty={}", pty.name.display());
                let backlog = Arc::new(Backlog::new().map_err(ConsoleError::Thread)?);
                let stream = StreamConsole::on_pty(pty, backlog.clone());
                Kind::Stream(backlog, Arc::new(Mutex::new(stream)))
            }
            ConsoleTarget::None => Kind::None,
        };
        Ok(Self {
            location: place,
            kind,
        })
    }

    /// Returns the kind of the console and its absolute path, if it has one, for example
    /// `pty=/dev/pts/3`.
    pub fn location(&self) -> &str {
        &self.location
    }

    /// Returns whether the console uses the terminal from which Perfvisor was started.
    pub fn is_terminal(&self) -> bool {
        matches!(self.kind, Kind::Terminal(_))
    }

    /// Returns a writer for a device of the guest. While the target is standard output or a file
    /// and its buffer is full, a write blocks the vCPU.
    pub fn writer(&self) -> Box<dyn Write + Send> {
        match &self.kind {
            Kind::Terminal(output) | Kind::File(output) => output.writer(),
            Kind::Stream(backlog, _) => backlog.writer(),
            Kind::None => Box::new(io::sink()),
        }
    }

    /// Returns a writer for a device whose guest busy-waits until its output is written. See
    /// [`ConsoleOutput::impatient_writer`].
    pub fn impatient_writer(&self) -> Box<dyn Write + Send> {
        match &self.kind {
            Kind::Terminal(output) | Kind::File(output) => output.impatient_writer(),
            Kind::Stream(..) | Kind::None => self.writer(),
        }
    }

    /// Returns the size of the terminal window of the console, or `None` if the console is not a
    /// terminal.
    pub fn window_size(&self) -> Option<TerminalSize> {
        self.is_terminal().then(terminal::window_size).flatten()
    }

    /// Returns the subscriber with which the main loop passes input to `guest` and output to
    /// clients. When standard input contains Ctrl-A x, the subscriber writes to the eventfd `quit`.
    pub fn subscriber(
        &self,
        guest: Arc<dyn ConsoleInputSink>,
        quit: EventFd,
    ) -> Option<Arc<Mutex<dyn MutEventSubscriber>>> {
        match &self.kind {
            Kind::Terminal(_) => Some(Arc::new(Mutex::new(ConsoleInput::stdin(guest, quit)))),
            Kind::Stream(_, stream) => {
                lock(stream).connect(guest);
                Some(stream.clone())
            }
            Kind::File(_) | Kind::None => None,
        }
    }

    /// Unblocks all writers of the console and prevents them from blocking again. Must be called
    /// first when the VM shuts down.
    pub fn stop(&self) {
        if let Kind::Terminal(output) | Kind::File(output) = &self.kind {
            output.stop();
        }
    }

    /// Waits up to `limit` until all output is written. Returns the number of bytes that a
    /// connected reader has not received by then.
    pub fn finish(&self, limit: Duration) -> u64 {
        match &self.kind {
            Kind::Terminal(output) | Kind::File(output) => output.finish(limit),
            Kind::Stream(_, stream) => {
                let mut stream = lock(stream);
                let left = stream.finish(limit);
                let lost = stream.lost_bytes();
                if lost > 0 {
                    log::info!("{}: {lost} bytes of output had no reader in time", self.location);
                }
                left
            }
            Kind::None => 0,
        }
    }
}

fn lock(stream: &Mutex<StreamConsole>) -> MutexGuard<'_, StreamConsole> {
    stream.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A writer that appends output to a file. If a write fails, for example because the disk is full,
/// the output is lost and the guest continues.
struct LogFile {
    file: std::fs::File,
    path: PathBuf,
    /// `true` if a write has failed. Only the first failure is logged.
    failed: bool,
}

impl LogFile {
    fn open(path: &Path) -> Result<Self, ConsoleError> {
        let path = absolute(path).unwrap_or_else(|_| path.to_owned());
        // Nonblocking: opening a FIFO without a reader fails instead of waiting for one.
        match paths::append(&path, 0o600) {
            Ok(file) => Ok(Self {
                file,
                path,
                failed: false,
            }),
            Err(source) => Err(ConsoleError::File { path, source }),
        }
    }
}

impl Write for LogFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.file.write(bytes) {
            Ok(count) => Ok(count),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                wait_for_room(self.file.as_raw_fd(), None);
                Err(io::ErrorKind::Interrupted.into())
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => Err(e),
            Err(e) => {
                if !std::mem::replace(&mut self.failed, true) {
                    let path = self.path.display();
                    log::warn!("file={path}: guest console output is lost, because writing fails: {e}");
                }
                Ok(bytes.len())
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_console_appends_all_output() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        for part in ["one\n", "two\n"] {
            let console = Console::open(&ConsoleTarget::File(path.clone())).unwrap();
            assert_eq!(console.location(), format!("file={}", path.display()));
            console
                .writer()
                .write_all(part.repeat(40_000).as_bytes())
                .unwrap();
            assert_eq!(console.finish(Duration::from_secs(60)), 0);
        }
        let text = std::fs::read_to_string(&path).unwrap();
        assert_eq!(text, "one\n".repeat(40_000) + &"two\n".repeat(40_000));
    }

    /// A file console survives failed writes on a full disk, which `/dev/full` simulates.
    #[test]
    fn file_console_survives_full_disk() {
        let console = Console::open(&ConsoleTarget::File("/dev/full".into())).unwrap();
        let mut writer = console.writer();
        for _ in 0..100 {
            writer.write_all(&[b'x'; 4096]).unwrap();
        }
        assert_eq!(console.finish(Duration::from_secs(60)), 0);
    }

    #[test]
    fn console_open_error_names_remedy() {
        let dir = tempfile::tempdir().unwrap();
        let plain = dir.path().join("plain");
        std::fs::write(&plain, "mine").unwrap();
        let live = dir.path().join("live");
        let _listener = std::os::unix::net::UnixListener::bind(&live).unwrap();
        for (target, words) in [
            (
                ConsoleTarget::File(dir.path().join("no/log")),
                "a directory that this user",
            ),
            (ConsoleTarget::File(dir.path().to_owned()), "cannot append"),
            (ConsoleTarget::Socket(plain.clone()), "choose another path"),
            (ConsoleTarget::Socket(live), "end what listens there"),
            (
                ConsoleTarget::Socket(dir.path().join("no/s")),
                "a directory that this user",
            ),
        ] {
            let line = perf_core::error_line(&Console::open(&target).err().unwrap());
            assert!(line.contains(words) && !line.contains('\n'), "{line}");
        }
        assert_eq!(std::fs::read_to_string(&plain).unwrap(), "mine");
    }
}
