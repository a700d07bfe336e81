//! An event-manager subscriber that passes standard input to the guest.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use virtio_devices::console::escape::{ConsoleEscapeParser, ConsoleKeyAction};
use vmm_sys_util::eventfd::EventFd;

use super::standard::StandardStream;
use super::{ConsoleInputSink, INPUT_BUFFER_BYTES};

/// Help text with the key sequences, printed when the operator types Ctrl-A h. Lines end in `\r\n`
/// because the terminal is in raw mode.
const KEYS: &str = "\r\nCtrl-A x       end the VM\r\nCtrl-A Ctrl-A  send Ctrl-A to the guest\r\n\
    Ctrl-A h       list the keys\r\n";

/// Main-loop subscriber that reads input for the guest from a descriptor, by default standard
/// input. The descriptor may be a terminal, pipe, socket or file.
pub struct ConsoleInput {
    source: StandardStream,
    guest: Arc<dyn ConsoleInputSink>,
    /// Eventfd to which the subscriber writes when the input contains Ctrl-A x.
    quit: EventFd,
    escape: ConsoleEscapeParser,
    waiting: VecDeque<u8>,
    /// `true` if the input descriptor is in the epoll set.
    watching: bool,
    /// `true` if the input is a regular file, which is always readable and which epoll rejects.
    always_ready: bool,
    ended: bool,
}

impl ConsoleInput {
    /// Creates a subscriber that passes standard input to `guest`. Ctrl-A x in the input writes to
    /// `quit`.
    pub fn stdin(guest: Arc<dyn ConsoleInputSink>, quit: EventFd) -> Self {
        Self::on(libc::STDIN_FILENO, guest, quit)
    }

    /// Creates a subscriber like [`ConsoleInput::stdin`] that reads `fd` instead of standard input.
    /// `fd` must stay open.
    pub fn on(fd: RawFd, guest: Arc<dyn ConsoleInputSink>, quit: EventFd) -> Self {
        ConsoleInput {
            source: StandardStream::of(fd),
            guest,
            quit,
            escape: ConsoleEscapeParser::default(),
            waiting: VecDeque::new(),
            watching: false,
            always_ready: false,
            ended: false,
        }
    }

    fn fd(&self) -> RawFd {
        self.source.as_raw_fd()
    }

    /// Adds the input descriptor to the epoll set while the input buffer has space, and removes it
    /// otherwise. epoll reports unread input again and again, so a full buffer would keep the main
    /// loop busy.
    fn watch(&mut self, ops: &mut EventOps) {
        let wanted = !self.ended && !self.always_ready && self.waiting.len() < INPUT_BUFFER_BYTES;
        if wanted == self.watching {
            return;
        }
        let events = Events::new_raw(self.fd(), EventSet::IN);
        if wanted {
            match ops.add(events) {
                Ok(()) => self.watching = true,
                // epoll rejects regular files and /dev/null with EPERM.
                Err(event_manager::Error::Epoll(e)) if e.errno() == libc::EPERM => self.always_ready = true,
                Err(e) => {
                    log::warn!("cannot read the input of the guest console: {e}");
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

    /// Reads from the input descriptor once.
    fn read_source(&mut self) {
        let mut bytes = [0u8; 256];
        let room = (INPUT_BUFFER_BYTES - self.waiting.len().min(INPUT_BUFFER_BYTES)).min(bytes.len());
        if room == 0 {
            return;
        }
        match self.source.read(&mut bytes[..room]) {
            Ok(0) => self.ended = true,
            Ok(n) => {
                for byte in &bytes[..n] {
                    match self.escape.feed(*byte) {
                        ConsoleKeyAction::Guest(byte) => self.waiting.push_back(byte),
                        ConsoleKeyAction::Quit => {
                            if let Err(e) = self.quit.write(1) {
                                log::warn!("cannot signal the end of the VM: {e}");
                            }
                        }
                        ConsoleKeyAction::Help => print_keys(),
                        ConsoleKeyAction::Nothing => {}
                    }
                }
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock) => {}
            // EIO: the terminal is closed, or the process is in the terminal's background. In both
            // cases there is no more input.
            Err(e) => {
                log::debug!("console input ended: {e}");
                self.ended = true;
            }
        }
    }

    /// Passes buffered input to the guest until the guest accepts no more. If the input is a
    /// regular file, refills the buffer.
    fn deliver(&mut self) {
        loop {
            while !self.waiting.is_empty() {
                let taken = self.guest.send(self.waiting.make_contiguous());
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

/// Prints the help text with the key sequences to standard error. Ignores a failed write.
fn print_keys() {
    let _ = io::stderr().write_all(KEYS.as_bytes());
}

impl MutEventSubscriber for ConsoleInput {
    fn process(&mut self, events: Events, ops: &mut EventOps) {
        if events.fd() == self.guest.space_event().as_raw_fd() {
            // Reset the eventfd. Its count is irrelevant.
            let _ = self.guest.space_event().read();
        } else if events.fd() == self.fd() {
            self.read_source();
        }
        self.deliver();
        self.watch(ops);
    }

    fn init(&mut self, ops: &mut EventOps) {
        if let Err(e) = ops.add(Events::new(self.guest.space_event(), EventSet::IN)) {
            log::warn!("cannot read the input of the guest console: {e}");
            return;
        }
        self.watch(ops);
        self.deliver();
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::OwnedFd;

    use event_manager::{EventManager, SubscriberOps};

    use super::*;
    use crate::devices::DeviceBus;

    struct ConsoleInputTest {
        manager: EventManager<ConsoleInput>,
        bus: DeviceBus,
        quit: EventFd,
        _source: OwnedFd,
    }

    fn rig(source: OwnedFd) -> ConsoleInputTest {
        let bus = DeviceBus::new(Box::new(io::sink()), 16 << 20, "1".parse().unwrap()).unwrap();
        let quit = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let input = ConsoleInput::on(
            source.as_raw_fd(),
            bus.serial().clone(),
            quit.try_clone().unwrap(),
        );
        let mut manager = EventManager::new().unwrap();
        manager.add_subscriber(input);
        ConsoleInputTest {
            manager,
            bus,
            quit,
            _source: source,
        }
    }

    impl ConsoleInputTest {
        /// Reads `n` bytes from the serial port, as a guest does that polls the port.
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
    fn pipe_input_reaches_guest_and_ends_quietly() {
        let (reader, mut writer) = io::pipe().unwrap();
        let mut rig = rig(reader.into());
        let text: Vec<u8> = (0..3000u32).map(|i| b'a' + (i % 26) as u8).collect();
        writer.write_all(&text).unwrap();
        drop(writer);
        assert_eq!(rig.read_guest(3000), text);
        // After the end of input, nothing in the epoll set keeps the loop busy.
        while rig.manager.run_with_timeout(0).unwrap() > 0 {}
        assert_eq!(rig.manager.run_with_timeout(20).unwrap(), 0);
    }

    #[test]
    fn regular_file_and_dev_null_work_as_input() {
        let mut file = tempfile::tempfile().unwrap();
        let text: Vec<u8> = (0..10_000u32).map(|i| b'A' + (i % 26) as u8).collect();
        file.write_all(&text).unwrap();
        io::Seek::rewind(&mut file).unwrap();
        assert_eq!(rig(file.into()).read_guest(10_000), text);
        let mut null = rig(File::open("/dev/null").unwrap().into());
        assert_eq!(null.manager.run_with_timeout(10).unwrap(), 0);
    }

    #[test]
    fn quit_key_works_with_full_guest_input() {
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
