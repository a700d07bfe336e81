//! The guest's console on this process's standard input and output.
//!
//! Output: a vCPU puts bytes into a bounded buffer and a thread writes them, so a slow terminal costs
//! the guest nothing until the buffer is full; then the vCPU waits, and [`ConsoleOutput::stop`] ends
//! that wait. Input: an event-manager subscriber. The terminal, if there is one, is raw while the guest
//! runs and restored on every way out (see [`RawTerminal`]).
#![expect(unsafe_code, reason = "termios, and reading standard input")]

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read, Write};
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use vmm_sys_util::eventfd::EventFd;

use crate::devices::SerialPort;

/// Bytes the guest may be ahead of standard output.
const OUTPUT_BUFFER_BYTES: usize = 64 * 1024;
/// Bytes read ahead of the guest from standard input.
const INPUT_BUFFER_BYTES: usize = 4096;
/// Ctrl-A starts a command to the VMM.
const ESCAPE: u8 = 0x01;

// ---------------------------------------------------------------- output

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
        Self::on(ManuallyDropFile::stdout())
    }

    /// Starts the writing thread on any sink.
    pub fn on(mut sink: impl Write + Send + 'static) -> io::Result<Self> {
        let shared = Arc::new(Output::default());
        let theirs = Arc::clone(&shared);
        thread::Builder::new()
            .name("console".into())
            .spawn(move || write_loop(&theirs, &mut sink))?;
        Ok(ConsoleOutput { shared })
    }

    /// A writer for a device.
    pub fn writer(&self) -> Box<dyn Write + Send> {
        Box::new(ConsoleWriter {
            shared: Arc::clone(&self.shared),
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
}

impl Write for ConsoleWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let mut state = self.shared.lock();
        for byte in bytes {
            while state.buffer.len() >= OUTPUT_BUFFER_BYTES && !state.stopped && !state.closed {
                state = self
                    .shared
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
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

/// A file on a descriptor that stays open when it is dropped.
struct ManuallyDropFile(ManuallyDrop<File>);

impl ManuallyDropFile {
    fn stdout() -> Self {
        Self::of(libc::STDOUT_FILENO)
    }

    fn of(fd: RawFd) -> Self {
        // SAFETY: ManuallyDrop never closes the descriptor, so the file does not own it; standard
        // descriptors stay open for the process's life, and one that is closed only gives EBADF.
        ManuallyDropFile(ManuallyDrop::new(unsafe { File::from_raw_fd(fd) }))
    }
}

impl Write for ManuallyDropFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.write(bytes) {
            // A non-blocking standard output (shared with someone who made it so): wait for room.
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                let mut poll = libc::pollfd {
                    fd: self.0.as_raw_fd(),
                    events: libc::POLLOUT,
                    revents: 0,
                };
                // SAFETY: one valid pollfd for the length of the call.
                unsafe { libc::poll(&mut poll, 1, -1) };
                Err(io::ErrorKind::Interrupted.into())
            }
            other => other,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

// ---------------------------------------------------------------- input

/// What a keyboard byte means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Guest(u8),
    Quit,
    Nothing,
}

/// The escape sequence: Ctrl-A x ends the VM, Ctrl-A Ctrl-A sends one Ctrl-A.
#[derive(Debug, Default)]
struct Escape {
    pending: bool,
}

impl Escape {
    fn feed(&mut self, byte: u8) -> Key {
        if !std::mem::take(&mut self.pending) {
            if byte == ESCAPE {
                self.pending = true;
                return Key::Nothing;
            }
            return Key::Guest(byte);
        }
        match byte {
            b'x' | b'X' => Key::Quit,
            ESCAPE => Key::Guest(ESCAPE),
            _ => Key::Nothing,
        }
    }
}

/// Standard input as an event-manager subscriber. Works on terminals, pipes, sockets and files.
pub struct ConsoleInput {
    source: ManuallyDropFile,
    serial: Arc<SerialPort>,
    /// Written once when the operator types Ctrl-A x.
    quit: EventFd,
    escape: Escape,
    waiting: VecDeque<u8>,
    /// The source is in the epoll set now.
    watching: bool,
    /// epoll refuses regular files; they are always ready instead.
    always_ready: bool,
    ended: bool,
}

impl ConsoleInput {
    /// Reads standard input for `serial`; `quit` is written on Ctrl-A x.
    pub fn stdin(serial: Arc<SerialPort>, quit: EventFd) -> Self {
        Self::on(libc::STDIN_FILENO, serial, quit)
    }

    /// As [`ConsoleInput::stdin`] on another descriptor, which must stay open.
    pub fn on(fd: RawFd, serial: Arc<SerialPort>, quit: EventFd) -> Self {
        ConsoleInput {
            source: ManuallyDropFile::of(fd),
            serial,
            quit,
            escape: Escape::default(),
            waiting: VecDeque::new(),
            watching: false,
            always_ready: false,
            ended: false,
        }
    }

    fn fd(&self) -> RawFd {
        self.source.0.as_raw_fd()
    }

    /// Watches the source while there is room for what it gives, and only then: a level-triggered
    /// event nobody reads would spin.
    fn watch(&mut self, ops: &mut EventOps) {
        let wanted = !self.ended && !self.always_ready && self.waiting.len() < INPUT_BUFFER_BYTES;
        if wanted == self.watching {
            return;
        }
        let events = Events::new_raw(self.fd(), EventSet::IN);
        if wanted {
            match ops.add(events) {
                Ok(()) => self.watching = true,
                // EPERM: a regular file or /dev/null.
                Err(event_manager::Error::Epoll(e)) if e.errno() == libc::EPERM => self.always_ready = true,
                Err(e) => {
                    log::warn!("the guest console has no input: {e}");
                    self.ended = true;
                }
            }
        } else {
            if let Err(e) = ops.remove(events) {
                log::debug!("console input: {e}");
            }
            self.watching = false;
        }
    }

    /// One read of what is there.
    fn read_source(&mut self) {
        let mut bytes = [0u8; 256];
        let room = (INPUT_BUFFER_BYTES - self.waiting.len().min(INPUT_BUFFER_BYTES)).min(bytes.len());
        if room == 0 {
            return;
        }
        match self.source.0.read(&mut bytes[..room]) {
            Ok(0) => self.ended = true,
            Ok(n) => {
                for byte in &bytes[..n] {
                    match self.escape.feed(*byte) {
                        Key::Guest(byte) => self.waiting.push_back(byte),
                        Key::Quit => {
                            if let Err(e) = self.quit.write(1) {
                                log::warn!("cannot signal the end of the VM: {e}");
                            }
                        }
                        Key::Nothing => {}
                    }
                }
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            // EIO: the terminal is gone, or we are in its background. Either way: no more input.
            Err(e) => {
                log::debug!("console input ended: {e}");
                self.ended = true;
            }
        }
    }

    /// Moves bytes to the guest, refilling from a file as long as the guest takes them.
    fn deliver(&mut self) {
        loop {
            while !self.waiting.is_empty() {
                let taken = self.serial.send(self.waiting.make_contiguous());
                if taken == 0 {
                    return;
                }
                self.waiting.drain(..taken);
            }
            if !self.always_ready || self.ended {
                return;
            }
            self.read_source();
        }
    }
}

impl MutEventSubscriber for ConsoleInput {
    fn process(&mut self, events: Events, ops: &mut EventOps) {
        if events.fd() == self.serial.input_room().as_raw_fd() {
            // The counter says how often; once is enough.
            let _ = self.serial.input_room().read();
        } else if events.fd() == self.fd() {
            self.read_source();
        }
        self.deliver();
        self.watch(ops);
    }

    fn init(&mut self, ops: &mut EventOps) {
        if let Err(e) = ops.add(Events::new(self.serial.input_room(), EventSet::IN)) {
            log::warn!("the guest console has no input: {e}");
            return;
        }
        self.watch(ops);
        self.deliver();
    }
}

// ---------------------------------------------------------------- terminal

/// The terminal's settings to go back to, set once in the process's life.
static SAVED: OnceLock<libc::termios> = OnceLock::new();
/// The terminal is raw now.
static RAW: AtomicBool = AtomicBool::new(false);
static HOOKS: Once = Once::new();

/// Signals from outside that end the process. A handler installed before raw mode is left alone: its
/// owner ends the VM in order.
const ENDING_SIGNALS: [libc::c_int; 5] = [
    libc::SIGHUP,
    libc::SIGINT,
    libc::SIGQUIT,
    libc::SIGTERM,
    libc::SIGABRT,
];
/// Signals of a fault in this process. The runtime handles some of them to report stack overflows and
/// then lets the fault happen again, so these are taken over and handed on.
const FAULT_SIGNALS: [libc::c_int; 4] = [libc::SIGILL, libc::SIGFPE, libc::SIGBUS, libc::SIGSEGV];
/// What each of [`FAULT_SIGNALS`] did before.
static PREVIOUS: [OnceLock<libc::sigaction>; FAULT_SIGNALS.len()] = [const { OnceLock::new() }; 4];

/// Raw mode of the terminal on standard input, if it is one. Restored when this is dropped, when the
/// process exits, on a panic of any thread, and on fatal signals that nobody else handles.
#[derive(Debug)]
pub struct RawTerminal(());

impl RawTerminal {
    /// Makes the terminal raw. `Ok(None)` if standard input is not a terminal.
    ///
    /// Handlers for SIGTERM and SIGINT installed before this are left alone; install them first.
    pub fn enter() -> io::Result<Option<Self>> {
        // SAFETY: isatty only looks at a descriptor number.
        if unsafe { libc::isatty(libc::STDIN_FILENO) } != 1 {
            return Ok(None);
        }
        // SAFETY: termios is a plain C struct for which all zeroes is a valid value.
        let mut settings: libc::termios = unsafe { std::mem::zeroed() };
        // SAFETY: `settings` is a valid, writable termios for the length of the call.
        if unsafe { libc::tcgetattr(libc::STDIN_FILENO, &mut settings) } != 0 {
            return Err(io::Error::last_os_error());
        }
        let saved = *SAVED.get_or_init(|| settings);
        HOOKS.call_once(install_hooks);
        let mut raw = saved;
        // SAFETY: cfmakeraw only changes the struct it is given.
        unsafe { libc::cfmakeraw(&mut raw) };
        // Output keeps its processing: messages of the VMM itself end lines with "\n" only.
        raw.c_oflag = saved.c_oflag;
        RAW.store(true, Ordering::SeqCst);
        // SAFETY: `raw` is a valid termios.
        if unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, &raw) } != 0 {
            let error = io::Error::last_os_error();
            RAW.store(false, Ordering::SeqCst);
            return Err(error);
        }
        Ok(Some(RawTerminal(())))
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        restore_terminal();
    }
}

/// Restores the terminal if it is raw. May be called from anywhere, a signal handler included, and
/// any number of times.
pub fn restore_terminal() {
    if RAW.swap(false, Ordering::SeqCst)
        && let Some(saved) = SAVED.get()
    {
        // SAFETY: `saved` is a valid termios; tcsetattr is async-signal-safe (POSIX 2.4.3).
        unsafe { libc::tcsetattr(libc::STDIN_FILENO, libc::TCSANOW, saved) };
    }
}

extern "C" fn at_exit() {
    restore_terminal();
}

extern "C" fn on_ending_signal(signal: libc::c_int) {
    restore_terminal();
    // SAFETY: signal and raise are async-signal-safe; with the default action back the signal ends
    // the process as if we had never handled it, once this handler returns and it is unblocked.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
}

extern "C" fn on_fault(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    restore_terminal();
    let previous = FAULT_SIGNALS
        .iter()
        .position(|s| *s == signal)
        .and_then(|i| PREVIOUS[i].get());
    // SAFETY: sigaction, signal and raise are async-signal-safe; `previous` is a valid action; with
    // SA_SIGINFO the kernel passes a valid siginfo. After the return a real fault happens again and
    // meets the previous action; a signal that was sent (code 0 or below) does not, so it is raised.
    unsafe {
        match previous {
            Some(previous) => _ = libc::sigaction(signal, previous, std::ptr::null_mut()),
            None => _ = libc::signal(signal, libc::SIG_DFL),
        }
        if (*info).si_code <= 0 {
            libc::raise(signal);
        }
    }
}

fn install_hooks() {
    // SAFETY: `at_exit` has the signature atexit wants and may run at any time during exit.
    unsafe { libc::atexit(at_exit) };
    let previous = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        // First, so the message is readable.
        restore_terminal();
        previous(info);
    }));
    // SAFETY: all structs are valid for the calls, and zeroed ones are valid actions; the handlers
    // only use async-signal-safe functions and atomics. A handler of an ending signal that someone
    // else installed is not replaced, one of a fault is saved before ours can run.
    unsafe {
        for signal in ENDING_SIGNALS {
            let mut current: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(signal, std::ptr::null(), &mut current) == 0
                && current.sa_sigaction == libc::SIG_DFL
            {
                let mut ours: libc::sigaction = std::mem::zeroed();
                ours.sa_sigaction = on_ending_signal as extern "C" fn(libc::c_int) as usize;
                libc::sigaction(signal, &ours, std::ptr::null_mut());
            }
        }
        for (signal, saved) in FAULT_SIGNALS.into_iter().zip(&PREVIOUS) {
            let mut current: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(signal, std::ptr::null(), &mut current) != 0 {
                continue;
            }
            let _ = saved.set(current);
            let mut ours: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = on_fault;
            ours.sa_sigaction = handler as usize;
            // On the alternate stack, for a stack overflow leaves no other.
            ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(signal, &ours, std::ptr::null_mut());
        }
    }
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// A writer whose contents a test can look at.
    #[derive(Clone, Default)]
    pub(crate) struct SharedBuffer(Arc<Mutex<Vec<u8>>>);

    impl SharedBuffer {
        pub fn contents(&self) -> Vec<u8> {
            self.0.lock().unwrap().clone()
        }
    }

    impl Write for SharedBuffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::SharedBuffer;
    use super::*;
    use crate::devices::Bus;
    use event_manager::{EventManager, SubscriberOps};
    use std::os::fd::OwnedFd;

    fn keys(bytes: &[u8]) -> Vec<Key> {
        let mut escape = Escape::default();
        bytes
            .iter()
            .map(|b| escape.feed(*b))
            .filter(|k| *k != Key::Nothing)
            .collect()
    }

    #[test]
    fn control_a_is_the_only_special_key() {
        assert_eq!(
            keys(b"a\x03\x04"),
            [Key::Guest(b'a'), Key::Guest(3), Key::Guest(4)]
        );
        assert_eq!(keys(b"\x01x"), [Key::Quit]);
        assert_eq!(keys(b"\x01\x01x"), [Key::Guest(1), Key::Guest(b'x')]);
        assert_eq!(keys(b"\x01qz"), [Key::Guest(b'z')]);
    }

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

    #[test]
    fn a_closed_reader_does_not_stop_the_guest() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let output = ConsoleOutput::on(writer).unwrap();
        let mut w = output.writer();
        w.write_all(&[b'x'; 300_000]).unwrap();
        output.finish(Duration::from_secs(10));
    }

    struct Rig {
        manager: EventManager<ConsoleInput>,
        bus: Bus,
        quit: EventFd,
        _source: OwnedFd,
    }

    fn rig(source: OwnedFd) -> Rig {
        let bus = Bus::new(Box::new(io::sink()), 16 << 20, "1".parse().unwrap()).unwrap();
        let quit = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let input = ConsoleInput::on(
            source.as_raw_fd(),
            Arc::clone(bus.serial()),
            quit.try_clone().unwrap(),
        );
        let mut manager = EventManager::new().unwrap();
        manager.add_subscriber(input);
        Rig {
            manager,
            bus,
            quit,
            _source: source,
        }
    }

    impl Rig {
        /// Reads the serial port as a polling guest would until `n` bytes came.
        fn read_guest(&mut self, n: usize) -> Vec<u8> {
            let mut got = Vec::new();
            while got.len() < n {
                let mut byte = [0];
                self.bus.io_in(0x3FD, &mut byte);
                if byte[0] & 1 == 0 {
                    assert!(
                        self.manager.run_with_timeout(5000).unwrap() > 0,
                        "no more input after {}",
                        got.len()
                    );
                    continue;
                }
                self.bus.io_in(0x3F8, &mut byte);
                got.push(byte[0]);
            }
            got
        }
    }

    #[test]
    fn a_pipe_is_fed_to_the_guest_and_its_end_is_quiet() {
        let (reader, mut writer) = io::pipe().unwrap();
        let mut rig = rig(reader.into());
        let text: Vec<u8> = (0..3000u32).map(|i| b'a' + (i % 26) as u8).collect();
        writer.write_all(&text).unwrap();
        drop(writer);
        assert_eq!(rig.read_guest(3000), text);
        // After the end nothing is left in the set that could spin the loop.
        while rig.manager.run_with_timeout(0).unwrap() > 0 {}
        assert_eq!(rig.manager.run_with_timeout(20).unwrap(), 0);
    }

    #[test]
    fn a_regular_file_and_dev_null_work_as_input() {
        let mut file = tempfile::tempfile().unwrap();
        let text: Vec<u8> = (0..10_000u32).map(|i| b'A' + (i % 26) as u8).collect();
        file.write_all(&text).unwrap();
        io::Seek::rewind(&mut file).unwrap();
        assert_eq!(rig(file.into()).read_guest(10_000), text);
        let mut null = rig(File::open("/dev/null").unwrap().into());
        assert_eq!(null.manager.run_with_timeout(10).unwrap(), 0);
    }

    #[test]
    fn the_quit_key_is_seen_although_the_guest_reads_nothing() {
        let (reader, mut writer) = io::pipe().unwrap();
        let mut rig = rig(reader.into());
        writer.write_all(&[b'y'; 2000]).unwrap();
        writer.write_all(b"\x01x").unwrap();
        let mut rounds = 0;
        while rig.quit.read().is_err() {
            rig.manager.run_with_timeout(1000).unwrap();
            rounds += 1;
            assert!(rounds < 100);
        }
    }
}
