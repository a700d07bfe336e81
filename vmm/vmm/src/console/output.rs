//! Writes console output to standard output or a file, which may be slow.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use sandbox::{SandboxedThreadKind, privileges};

use super::standard::StandardStream;

/// Size of the output buffer in bytes.
const OUTPUT_BUFFER_BYTES: usize = 64 * 1024;
/// Maximum time for which a full buffer blocks a writer whose guest busy-waits.
const IMPATIENT_WRITER_TIMEOUT: Duration = Duration::from_millis(100);

#[derive(Default)]
struct OutputState {
    buffer: VecDeque<u8>,
    /// `true` while the writer thread is in write(2). The bytes that it writes are no longer in the
    /// buffer.
    writing: bool,
    /// `true` if writers no longer block. They drop output that does not fit into the buffer.
    stopped: bool,
    /// `true` if the writer thread must exit, because [`ConsoleOutput::finish`] no longer waits or
    /// the sink has failed.
    closed: bool,
    dropped_bytes: u64,
    /// `true` if an impatient writer has timed out and the writer thread has not taken any bytes
    /// from the buffer since then.
    stalled: bool,
}

#[derive(Default)]
struct Output {
    state: Mutex<OutputState>,
    /// Wakes the writer thread when there are bytes to write, and the vCPUs when there is free
    /// space.
    changed: Condvar,
}

impl Output {
    fn lock(&self) -> MutexGuard<'_, OutputState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Output of a console: a bounded buffer, and a thread that writes the buffer to a sink. A device
/// writes through [`ConsoleOutput::writer`].
#[derive(Clone)]
pub struct ConsoleOutput {
    shared: Arc<Output>,
}

impl ConsoleOutput {
    /// Starts a writer thread for standard output.
    pub fn stdout() -> io::Result<Self> {
        Self::on(StandardStream::stdout())
    }

    /// Starts a writer thread for `sink`.
    pub fn on(mut sink: impl Write + Send + 'static) -> io::Result<Self> {
        let shared = Arc::new(Output::default());
        let theirs = Arc::clone(&shared);
        thread::Builder::new().name("console".into()).spawn(move || {
            privileges::drop_thread_capabilities();
            sandbox::enter(SandboxedThreadKind::Console);
            write_loop(&theirs, &mut sink);
        })?;
        Ok(ConsoleOutput { shared })
    }

    /// Returns a writer for a device. A write blocks while the buffer is full.
    pub fn writer(&self) -> Box<dyn Write + Send> {
        Box::new(ConsoleWriter {
            shared: Arc::clone(&self.shared),
            patience: None,
        })
    }

    /// Returns a writer that blocks for at most 100 ms while the buffer is full. After a timeout,
    /// the writer drops output that does not fit. It does not block again before the sink has
    /// accepted output.
    pub fn impatient_writer(&self) -> Box<dyn Write + Send> {
        Box::new(ConsoleWriter {
            shared: Arc::clone(&self.shared),
            patience: Some(IMPATIENT_WRITER_TIMEOUT),
        })
    }

    /// Unblocks all writers and prevents them from blocking again. Must be called first when the VM
    /// shuts down.
    pub fn stop(&self) {
        self.shared.lock().stopped = true;
        self.shared.changed.notify_all();
    }

    /// Waits up to `timeout` until all output is written. Returns the number of bytes that were
    /// lost. The time limit prevents a stalled pipe from keeping the process alive.
    pub fn finish(&self, timeout: Duration) -> u64 {
        self.stop();
        let end = Instant::now() + timeout;
        let mut state = self.shared.lock();
        while !state.closed && (state.writing || !state.buffer.is_empty()) {
            let Some(left) = end
                .checked_duration_since(Instant::now())
                .filter(|d| !d.is_zero())
            else {
                break;
            };
            state = self
                .shared
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        state.closed = true;
        self.shared.changed.notify_all();
        state.dropped_bytes + state.buffer.len() as u64
    }
}

fn write_loop(shared: &Output, sink: &mut impl Write) {
    let mut chunk = Vec::with_capacity(OUTPUT_BUFFER_BYTES);
    let mut state = shared.lock();
    loop {
        while state.buffer.is_empty() && !state.closed {
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.buffer.is_empty() || state.closed {
            return;
        }
        chunk.clear();
        chunk.extend(state.buffer.drain(..));
        state.writing = true;
        state.stalled = false;
        shared.changed.notify_all();
        drop(state);
        let result = sink.write_all(&chunk).and_then(|()| sink.flush());
        state = shared.lock();
        state.writing = false;
        if let Err(e) = result {
            // The reader has closed standard output. The guest continues, and its output is
            // dropped.
            log::warn!("guest console output is discarded from now on: {e}");
            state.closed = true;
        }
        shared.changed.notify_all();
    }
}

struct ConsoleWriter {
    shared: Arc<Output>,
    /// Maximum time that a write waits for free space in the buffer, or `None` for no limit.
    patience: Option<Duration>,
}

impl ConsoleWriter {
    /// Waits until the buffer has space or writers no longer block.
    fn wait_for_room<'a>(&self, mut state: MutexGuard<'a, OutputState>) -> MutexGuard<'a, OutputState> {
        let end = self.patience.map(|patience| Instant::now() + patience);
        while state.buffer.len() >= OUTPUT_BUFFER_BYTES && !state.stopped && !state.closed {
            let changed = &self.shared.changed;
            let Some(end) = end else {
                state = changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = end.saturating_duration_since(Instant::now());
            if state.stalled || left.is_zero() {
                state.stalled = true;
                break;
            }
            state = changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        state
    }
}

impl Write for ConsoleWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.shared.lock();
        for byte in bytes {
            state = self.wait_for_room(state);
            if state.closed || state.buffer.len() >= OUTPUT_BUFFER_BYTES {
                state.dropped_bytes += 1;
                continue;
            }
            let was_empty = state.buffer.is_empty();
            state.buffer.push_back(*byte);
            // Wake the writer thread only if it may be asleep, not for each byte.
            if was_empty && !state.writing {
                self.shared.changed.notify_all();
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::SharedBuffer;
    use super::*;

    #[test]
    fn output_is_ordered_and_finish_flushes() {
        let sink = SharedBuffer::default();
        let output = ConsoleOutput::on(sink.clone()).unwrap();
        let mut writer = output.writer();
        let text: Vec<u8> = (0..200_000u32).map(|i| i as u8).collect();
        writer.write_all(&text).unwrap();
        assert_eq!(output.finish(Duration::from_secs(10)), 0);
        assert_eq!(sink.contents(), text);
    }

    #[test]
    fn stop_unblocks_vcpu_with_stalled_reader() {
        let (reader, writer) = io::pipe().unwrap();
        let output = ConsoleOutput::on(writer).unwrap();
        let mut vcpu_side = output.writer();
        let vcpu = thread::spawn(move || vcpu_side.write(&[b'x'; 1_000_000]).unwrap());
        // The pipe and the buffer fill up until the writer blocks.
        while output.shared.lock().buffer.len() < OUTPUT_BUFFER_BYTES {
            thread::yield_now();
        }
        output.stop();
        assert_eq!(vcpu.join().unwrap(), 1_000_000);
        assert!(output.finish(Duration::from_millis(10)) > 0);
        drop(reader);
    }

    /// A reader that does not read delays a busy-waiting guest by one timeout in total, not by one
    /// per byte. When the reader resumes, it receives the buffered output.
    #[test]
    fn impatient_writer_times_out_once_for_stalled_reader() {
        let (mut reader, writer) = io::pipe().unwrap();
        let output = ConsoleOutput::on(writer).unwrap();
        let mut device = output.impatient_writer();
        let waited = || output.shared.lock().stalled;
        while !waited() {
            device.write_all(&[b'x'; 4096]).unwrap();
        }
        // With one timeout for each byte, these writes would take a day.
        let before = output.shared.lock().dropped_bytes;
        device.write_all(&[b'y'; 1_000_000]).unwrap();
        assert!(output.shared.lock().dropped_bytes >= before + 1_000_000);
        let mut bytes = [0; 4096];
        while waited() {
            io::Read::read(&mut reader, &mut bytes).unwrap();
        }
        let before = output.shared.lock().dropped_bytes;
        device.write_all(b"z").unwrap();
        assert_eq!(output.shared.lock().dropped_bytes, before);
    }

    #[test]
    fn closed_stdout_drops_guest_output() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let output = ConsoleOutput::on(writer).unwrap();
        let mut w = output.writer();
        w.write_all(&[b'x'; 300_000]).unwrap();
        output.finish(Duration::from_secs(10));
    }
}
