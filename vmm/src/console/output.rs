//! Output to a sink that may be slow: standard output, or a file.
//!
//! A vCPU puts bytes into a bounded buffer and a thread writes them, so a slow terminal costs the guest
//! nothing until the buffer is full; then the vCPU waits, and [`ConsoleOutput::stop`] ends that wait.

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use sandbox::ThreadKind;

use super::standard::StandardStream;
use crate::privileges;

/// Bytes the guest may be ahead of standard output.
const OUTPUT_BUFFER_BYTES: usize = 64 * 1024;
/// How long a guest that spins until its output is taken may wait for a sink that takes nothing.
const PATIENCE: Duration = Duration::from_millis(100);

#[derive(Default)]
struct OutputState {
    buffer: VecDeque<u8>,
    /// The thread is in write(2) with bytes taken out of the buffer.
    writing: bool,
    /// No vCPU waits any more; what does not fit is dropped.
    stopped: bool,
    /// The last sender is gone or standard output is closed: the thread ends.
    closed: bool,
    dropped_bytes: u64,
    /// A writer that does not wait for long has waited for nothing: the thread has taken no bytes since.
    stalled: bool,
}

#[derive(Default)]
struct Output {
    state: Mutex<OutputState>,
    /// Signals both directions: bytes for the thread, room for the vCPUs.
    changed: Condvar,
}

impl Output {
    fn lock(&self) -> MutexGuard<'_, OutputState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The sending side of the console; give [`ConsoleOutput::writer`] to the serial port.
#[derive(Clone)]
pub struct ConsoleOutput {
    shared: Arc<Output>,
}

impl ConsoleOutput {
    /// Starts the writing thread on standard output.
    pub fn stdout() -> io::Result<Self> {
        Self::on(StandardStream::stdout())
    }

    /// Starts the writing thread on any sink.
    pub fn on(mut sink: impl Write + Send + 'static) -> io::Result<Self> {
        let shared = Arc::new(Output::default());
        let theirs = Arc::clone(&shared);
        thread::Builder::new().name("console".into()).spawn(move || {
            privileges::keep_no_capability();
            sandbox::enter(ThreadKind::Console);
            write_loop(&theirs, &mut sink);
        })?;
        Ok(ConsoleOutput { shared })
    }

    /// A writer for a device. It waits for room.
    pub fn writer(&self) -> Box<dyn Write + Send> {
        Box::new(ConsoleWriter {
            shared: Arc::clone(&self.shared),
            patience: None,
        })
    }

    /// A writer that waits for room for 100 ms at most. After that it drops what does not fit and does
    /// not wait again before the sink has taken something.
    pub fn impatient_writer(&self) -> Box<dyn Write + Send> {
        Box::new(ConsoleWriter {
            shared: Arc::clone(&self.shared),
            patience: Some(PATIENCE),
        })
    }

    /// Ends every wait for room, now and later. Call it first when the VM is to end.
    pub fn stop(&self) {
        self.shared.lock().stopped = true;
        self.shared.changed.notify_all();
    }

    /// Waits until everything is written, at most for `timeout` (a stalled pipe must not keep the
    /// process). Returns the number of bytes that were lost.
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
            // The reader of standard output is gone: the guest runs on and its output is dropped.
            log::warn!("guest console output is dropped from here on: {e}");
            state.closed = true;
        }
        shared.changed.notify_all();
    }
}

struct ConsoleWriter {
    shared: Arc<Output>,
    /// How long it waits for room; without it as long as it takes.
    patience: Option<Duration>,
}

impl ConsoleWriter {
    /// Waits until there is room, or nobody waits any more.
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
            // The thread is only woken when it may sleep, not for each byte.
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
    fn output_arrives_in_order_and_finish_waits_for_it() {
        let sink = SharedBuffer::default();
        let output = ConsoleOutput::on(sink.clone()).unwrap();
        let mut writer = output.writer();
        let text: Vec<u8> = (0..200_000u32).map(|i| i as u8).collect();
        writer.write_all(&text).unwrap();
        assert_eq!(output.finish(Duration::from_secs(10)), 0);
        assert_eq!(sink.contents(), text);
    }

    #[test]
    fn a_stalled_reader_cannot_keep_a_vcpu_after_stop() {
        let (reader, writer) = io::pipe().unwrap();
        let output = ConsoleOutput::on(writer).unwrap();
        let mut vcpu_side = output.writer();
        let vcpu = thread::spawn(move || vcpu_side.write(&[b'x'; 1_000_000]).unwrap());
        // The pipe and the buffer fill up and the writer waits; how long does not matter.
        while output.shared.lock().buffer.len() < OUTPUT_BUFFER_BYTES {
            thread::yield_now();
        }
        output.stop();
        assert_eq!(vcpu.join().unwrap(), 1_000_000);
        assert!(output.finish(Duration::from_millis(10)) > 0);
        drop(reader);
    }

    /// A guest that spins until its output is taken: a reader that reads nothing costs it one wait, not one
    /// for each byte, and what there is room for still arrives when the reader goes on.
    #[test]
    fn an_impatient_writer_waits_once_for_a_reader_that_reads_nothing() {
        let (mut reader, writer) = io::pipe().unwrap();
        let output = ConsoleOutput::on(writer).unwrap();
        let mut device = output.impatient_writer();
        let waited = || output.shared.lock().stalled;
        while !waited() {
            device.write_all(&[b'x'; 4096]).unwrap();
        }
        // A wait for each of these bytes would take a day.
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
    fn a_closed_reader_does_not_stop_the_guest() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let output = ConsoleOutput::on(writer).unwrap();
        let mut w = output.writer();
        w.write_all(&[b'x'; 300_000]).unwrap();
        output.finish(Duration::from_secs(10));
    }
}
