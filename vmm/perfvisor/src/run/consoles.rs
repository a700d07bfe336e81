//! The guest's consoles, where the arguments of `run` want them: the serial port's, and the virtio console's
//! if there is one.

use std::io;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use event_manager::{EventOps, EventSet, Events, MutEventSubscriber};
use perf_core::error_line;
use perfvisor_vmm::console::{Console, ConsoleError, ConsoleTarget, GuestInput, window_size};
use virtio_devices::console as virtio;
use virtio_devices::console::port::ConsolePort;
use vmm_sys_util::eventfd::EventFd;

use crate::cli::RunArgs;
use crate::commands::say;

/// A part of the main loop.
pub(super) type Subscriber = Arc<Mutex<dyn MutEventSubscriber>>;

/// Why there are no consoles: bad input of the user.
#[derive(Debug, thiserror::Error)]
pub enum ConsolesError {
    /// The guest's serial port cannot go there.
    #[error("--console")]
    Serial(#[source] ConsoleError),
    /// Its virtio console cannot.
    #[error("--virtio-console")]
    Virtio(#[source] ConsoleError),
    /// Both want the terminal.
    #[error(
        "--virtio-console tty: the serial port has the terminal; give it another place, as in --console none"
    )]
    TerminalTwice,
    /// Both want one place.
    #[error("--virtio-console {0}: the serial port is there already; choose another place for one of them")]
    PlaceTwice(ConsoleTarget),
    /// No descriptor for the device.
    #[error("--virtio-console: eventfd")]
    Device(#[source] io::Error),
}

/// The consoles of one VM.
pub struct Consoles {
    serial: Console,
    virtio: Option<(Console, Arc<ConsolePort>)>,
}

impl Consoles {
    /// Opens them, and makes the virtio console's device. Says where those are that the user could not know.
    ///
    /// # Errors
    /// [`ConsolesError`], one line with the remedy.
    pub fn open(args: &RunArgs) -> Result<(Self, Option<virtio::Console>), ConsolesError> {
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
        say_place(&args.console, &serial, "console");
        let Some(target) = &args.virtio_console else {
            let virtio = None;
            return Ok((Self { serial, virtio }, None));
        };
        let console = Console::open(target).map_err(ConsolesError::Virtio)?;
        say_place(target, &console, "virtio console");
        let device = virtio::Console::new(console.impatient_writer(), console.window_size())
            .map_err(ConsolesError::Device)?;
        let virtio = Some((console, device.port().clone()));
        Ok((Self { serial, virtio }, Some(device)))
    }

    /// That of the serial port.
    pub fn serial(&self) -> &Console {
        &self.serial
    }

    /// Where the virtio console is.
    pub fn virtio_place(&self) -> Option<&str> {
        self.virtio.as_ref().map(|(console, _)| console.place())
    }

    fn all(&self) -> impl Iterator<Item = &Console> {
        let virtio = self.virtio.as_ref().map(|(console, _)| console);
        [&self.serial].into_iter().chain(virtio)
    }

    /// Whether one of them is the terminal.
    pub fn has_terminal(&self) -> bool {
        self.all().any(Console::is_terminal)
    }

    /// What the main loop has to serve. `serial` takes the serial port's input, `resized` is readable when
    /// the terminal's window has another size, `quit` is written on Ctrl-A x.
    ///
    /// # Errors
    /// The host has no descriptor left.
    pub fn subscribers(
        &self,
        serial: Arc<dyn GuestInput>,
        resized: EventFd,
        quit: &EventFd,
    ) -> io::Result<Vec<Subscriber>> {
        let mut all = Vec::new();
        all.extend(self.serial.subscriber(serial, quit.try_clone()?));
        if let Some((console, port)) = &self.virtio {
            all.extend(console.subscriber(port.clone(), quit.try_clone()?));
            if console.is_terminal() {
                let port = port.clone();
                all.push(Arc::new(Mutex::new(Window { resized, port })));
            }
        }
        Ok(all)
    }

    /// Ends every wait for room in a console, now and later.
    pub fn stop(&self) {
        self.all().for_each(Console::stop);
    }

    /// Waits until everything is written, at most for `limit` each. How many bytes were lost.
    pub fn finish(&self, limit: Duration) -> u64 {
        self.all().map(|console| console.finish(limit)).sum()
    }
}

/// Says where a console is that the user could not know.
fn say_place(target: &ConsoleTarget, console: &Console, what: &str) {
    if *target == ConsoleTarget::Pty {
        say(&format!("perfvisor: the {what} is {}\n", console.place()));
    }
}

/// Tells the guest of the size of the terminal's window.
struct Window {
    resized: EventFd,
    port: Arc<ConsolePort>,
}

impl MutEventSubscriber for Window {
    fn process(&mut self, _: Events, _: &mut EventOps) {
        let _ = self.resized.read();
        if let Some(size) = window_size() {
            self.port.resize(size);
        }
    }

    fn init(&mut self, ops: &mut EventOps) {
        if let Err(e) = ops.add(Events::new_raw(self.resized.as_raw_fd(), EventSet::IN)) {
            log::warn!("the guest is not told of the window's size: {}", error_line(&e));
        }
    }
}
