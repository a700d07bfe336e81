//! The guest's consoles: the serial port, and the optional virtio console.

use std::io::{self, IsTerminal};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use perf_core::error_line;
use virtio_devices::console as virtio;
use virtio_devices::console::port::ConsolePort;
use vmm::console::{Console, ConsoleError, ConsoleInputSink, ConsoleTarget, window_size};
use vmm_sys_util::eventfd::EventFd;

use crate::cli::RunArgs;
use operator::commands::print_stderr;

/// An event subscriber of the main loop.
pub(super) type Subscriber = Arc<Mutex<dyn MutEventSubscriber>>;

/// Error returned when a console cannot be opened or its option is invalid.
#[derive(Debug, thiserror::Error)]
pub enum ConsolesError {
    #[error("--console")]
    Serial(#[source] ConsoleError),
    #[error("--virtio-console")]
    Virtio(#[source] ConsoleError),
    #[error(
        "--virtio-console tty: the serial port uses the terminal; also use --console none or \
        another target"
    )]
    TerminalTwice,
    #[error("--virtio-console {0}: already used by the serial port; choose another target")]
    PlaceTwice(ConsoleTarget),
    #[error("--virtio-console: eventfd")]
    Device(#[source] io::Error),
}

/// The consoles of one VM.
pub struct Consoles {
    serial: Console,
    virtio: Option<(Console, Arc<ConsolePort>)>,
}

impl Consoles {
    /// Opens the consoles and creates the virtio console device. Prints the location of a console
    /// if the kernel chose its path.
    ///
    /// # Errors
    /// Returns [`ConsolesError`] if a console cannot be opened.
    pub fn open(args: &RunArgs) -> Result<(Self, Option<virtio::VirtioConsole>), ConsolesError> {
        if let Some(target) = &args.virtio_console
            && *target == args.console
        {
            match target {
                ConsoleTarget::Tty => return Err(ConsolesError::TerminalTwice),
                ConsoleTarget::File(_) | ConsoleTarget::Socket(_) => {
                    return Err(ConsolesError::PlaceTwice(target.clone()));
                }
                ConsoleTarget::Pty | ConsoleTarget::None => {}
            }
        }
        let serial = Console::open(&args.console).map_err(ConsolesError::Serial)?;
        print_location(&args.console, &serial, "console");
        let Some(target) = &args.virtio_console else {
            let virtio = None;
            return Ok((Self { serial, virtio }, None));
        };
        let console = Console::open(target).map_err(ConsolesError::Virtio)?;
        print_location(target, &console, "virtio console");
        let device = virtio::VirtioConsole::new(console.impatient_writer(), console.window_size())
            .map_err(ConsolesError::Device)?;
        let virtio = Some((console, device.port().clone()));
        Ok((Self { serial, virtio }, Some(device)))
    }

    /// Returns the console of the serial port.
    pub fn serial(&self) -> &Console {
        &self.serial
    }

    /// Returns the location of the virtio console.
    pub fn virtio_location(&self) -> Option<&str> {
        self.virtio.as_ref().map(|(console, _)| console.location())
    }

    fn all(&self) -> impl Iterator<Item = &Console> {
        let virtio = self.virtio.as_ref().map(|(console, _)| console);
        [&self.serial].into_iter().chain(virtio)
    }

    /// Returns whether a console uses the terminal.
    pub fn has_terminal(&self) -> bool {
        self.all().any(Console::is_terminal)
    }

    /// Returns the event subscribers for the main loop.
    ///
    /// `serial` receives the serial port's input, `resized` is readable after the terminal window
    /// has changed its size, and `quit` is signalled by Ctrl-A x.
    ///
    /// # Errors
    /// Returns an error if the process has no free descriptor.
    pub fn subscribers(
        &self,
        serial: Arc<dyn ConsoleInputSink>,
        resized: EventFd,
        quit: &EventFd,
    ) -> io::Result<Vec<Subscriber>> {
        let mut all = Vec::new();
        all.extend(self.serial.subscriber(serial, quit.try_clone()?));
        if let Some((console, port)) = &self.virtio {
            all.extend(console.subscriber(port.clone(), quit.try_clone()?));
            if console.is_terminal() {
                let port = port.clone();
                all.push(Arc::new(Mutex::new(WindowSizeForwarder { resized, port })));
            }
        }
        Ok(all)
    }

    /// Makes all current and future waits for console output return immediately.
    pub fn stop(&self) {
        self.all().for_each(Console::stop);
    }

    /// Waits until all output is written, for at most `limit` per console. Returns the number of
    /// lost bytes.
    pub fn finish(&self, limit: Duration) -> u64 {
        self.all().map(|console| console.finish(limit)).sum()
    }
}

/// Prints the keys that terminate the VM and that list other keys, if standard input is a terminal.
pub(super) fn print_keys() {
    if io::stdin().is_terminal() {
        print_stderr("perfvisor: Ctrl-A x terminates the VM; Ctrl-A h lists the keys\n");
    }
}

/// Prints the location of a console if the kernel chose its path.
fn print_location(target: &ConsoleTarget, console: &Console, what: &str) {
    if *target == ConsoleTarget::Pty {
        print_stderr(&format!("perfvisor: the {what} is {}\n", console.location()));
    }
}

/// Forwards the size of the terminal window to the guest.
struct WindowSizeForwarder {
    resized: EventFd,
    port: Arc<ConsolePort>,
}

impl MutEventSubscriber for WindowSizeForwarder {
    fn process(&mut self, _: Events, _: &mut EventOps) {
        let _ = self.resized.read();
        if let Some(size) = window_size() {
            self.port.resize(size);
        }
    }

    fn init(&mut self, ops: &mut EventOps) {
        if let Err(e) = ops.add(Events::new_raw(self.resized.as_raw_fd(), EventSet::IN)) {
            log::warn!(
                "cannot pass the size of the window to the guest: {}",
                error_line(&e)
            );
        }
    }
}
