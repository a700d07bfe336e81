//! Destination of log messages of this process and the VM, which can change while the process runs.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use env_logger::Target;
use log::LevelFilter;
use sandbox::paths;

/// The log file; `None` for standard error.
static OUTPUT: Mutex<Option<File>> = Mutex::new(None);

/// Level of messages without `--level` and `PUT /logger`, as in the specification of Firecracker's
/// API.
pub const DEFAULT_LEVEL: LevelFilter = LevelFilter::Info;

struct LogOutput;

impl Write for LogOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        write_log(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes messages to the log. Messages that do not fit into a named pipe are lost.
pub fn write_log(bytes: &[u8]) {
    let output = OUTPUT.lock().unwrap_or_else(PoisonError::into_inner);
    let _ = match output.as_ref() {
        Some(mut file) => file.write_all(bytes),
        None => io::stderr().write_all(bytes),
    };
}

/// Initializes logging to standard error, until [`set_file`] selects a file.
pub fn init_log() {
    env_logger::Builder::new()
        .filter_level(LevelFilter::Trace)
        .target(Target::Pipe(Box::new(LogOutput)))
        .format(|out, record| {
            let level = record.level().as_str().to_lowercase();
            writeln!(out, "perfvisor: {level}: {}", record.args())
        })
        .init();
    log::set_max_level(DEFAULT_LEVEL);
}

/// Makes `file` the destination of log messages.
pub fn set_file(file: File) {
    *OUTPUT.lock().unwrap_or_else(PoisonError::into_inner) = Some(file);
}

/// Opens a file or a named pipe for messages or metrics. Creates the file if it does not exist. A
/// named pipe needs no reader, as in Firecracker.
///
/// # Errors
/// Returns the error of `open(2)`.
pub fn open_output(path: &Path) -> io::Result<File> {
    let is_fifo = std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_fifo());
    if is_fifo {
        return paths::open(path, libc::O_RDWR | libc::O_NONBLOCK | libc::O_NOCTTY);
    }
    paths::append(path, 0o666)
}
