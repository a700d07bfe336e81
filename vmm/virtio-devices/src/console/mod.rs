//! Console device (virtio 1.2, 5.3) with one port and two queues (`hvc0` in Linux).
//!
//! | module | contents |
//! |---|---|
//! | this module | the device and its thread |
//! | [`escape`] | escape sequences of a terminal |
//! | [`port`] | input for the guest, and the window size |
//! | [`queues`] | the driver's two queues |
//!
//! Linux holds a lock and spins until the device has consumed its output, so writes to the output
//! sink must not block for long. The sink, which the machine provides, determines what happens to
//! output that no client reads.

pub mod escape;
pub mod port;
pub mod queues;

use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};

use event_manager::{EventOps, Events, MutEventSubscriber};
use sandbox::SandboxedThreadKind;
use virtio_bindings::virtio_ids::VIRTIO_ID_CONSOLE;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

use crate::device::{ActivateError, ConfigChangeNotifier, DeviceActivation, VirtioDevice, read_config_bytes};
use crate::serve::request_reset_if_broken;
use crate::worker::{DeviceWorker, watch_readable};
use port::{ConsolePort, TerminalSize};
use queues::ConsoleQueues;

/// Feature bit: the device configuration contains the window size (virtio 1.2, 5.3.3).
const VIRTIO_CONSOLE_F_SIZE: u32 = 0;
/// Maximum sizes of the receive and transmit queues, in entries.
const QUEUE_SIZES: [u16; 2] = [64, 64];

/// Writer that receives the guest's console output. It is kept across device resets.
type OutputSink = Arc<Mutex<Box<dyn Write + Send>>>;

/// A virtio console device with one port.
pub struct VirtioConsole {
    output: OutputSink,
    port: Arc<ConsolePort>,
    has_size: bool,
    worker: Option<DeviceWorker>,
}

impl VirtioConsole {
    /// Creates a console that writes guest output to `output`. `size` is the size of the terminal
    /// window, if there is one.
    ///
    /// # Errors
    /// Returns an error if the host has run out of file descriptors.
    pub fn new(output: Box<dyn Write + Send>, size: Option<TerminalSize>) -> io::Result<Self> {
        // A terminal whose size is unknown reports zero columns and rows.
        let size = size.filter(|size| size.columns != 0 && size.rows != 0);
        Ok(Self {
            output: Arc::new(Mutex::new(output)),
            port: Arc::new(ConsolePort::new(size)?),
            has_size: size.is_some(),
            worker: None,
        })
    }

    /// Returns the port, which accepts input for the guest.
    pub fn port(&self) -> &Arc<ConsolePort> {
        &self.port
    }
}

impl VirtioDevice for VirtioConsole {
    fn id(&self) -> u32 {
        VIRTIO_ID_CONSOLE
    }

    fn name(&self) -> &str {
        "hvc0"
    }

    fn features(&self) -> u64 {
        u64::from(self.has_size) << VIRTIO_CONSOLE_F_SIZE
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.port.config(), offset, data);
    }

    /// Returns `None`, because a snapshot may include the device. If the window size differs after
    /// the restore, the guest sees a resize.
    fn unsupported_in_snapshot(&self) -> Option<&'static str> {
        None
    }

    fn activate(&mut self, activation: DeviceActivation) -> Result<(), ActivateError> {
        let queues = <[_; 2]>::try_from(activation.queues)
            .map_err(|_| ActivateError::Driver("another number of queues"))?;
        let [Some(input), Some(output)] = queues else {
            return Err(ActivateError::Driver("a console without one of its queues"));
        };
        let server = ConsoleHandler {
            queues: ConsoleQueues { input, output },
            sink: self.output.clone(),
            port: self.port.clone(),
            memory: activation.memory,
            config_change: activation.config_change.clone(),
            broken: false,
        };
        self.port.set_config_notifier(Some(activation.config_change));
        let callback = activation.fatal_error_callback;
        self.worker = Some(DeviceWorker::spawn(
            SandboxedThreadKind::Device,
            "hvc0",
            server,
            callback,
        )?);
        Ok(())
    }

    fn reset(&mut self) {
        self.port.set_config_notifier(None);
        self.worker = None;
    }
}

struct ConsoleHandler {
    queues: ConsoleQueues,
    sink: OutputSink,
    port: Arc<ConsolePort>,
    memory: GuestMemoryMmap,
    config_change: ConfigChangeNotifier,
    broken: bool,
}

impl ConsoleHandler {
    fn events(&self) -> [&EventFd; 3] {
        [
            &self.queues.input.kick,
            &self.queues.output.kick,
            self.port.input_event(),
        ]
    }
}

impl MutEventSubscriber for ConsoleHandler {
    fn process(&mut self, _: Events, _: &mut EventOps) {
        for event in self.events() {
            let _ = event.read();
        }
        if self.broken {
            return;
        }
        let mut sink = self.sink.lock().unwrap_or_else(PoisonError::into_inner);
        let served = self.queues.serve_output(&self.memory, &mut **sink);
        let served = served.and_then(|()| self.queues.serve_input(&self.memory, &self.port));
        self.broken = request_reset_if_broken("hvc0", served, &self.config_change);
    }

    fn init(&mut self, ops: &mut EventOps) {
        watch_readable(ops, "hvc0", self.events().map(AsRawFd::as_raw_fd));
        // Deliver input that arrived before the driver was ready.
        let _ = self.port.input_event().write(1);
    }
}

#[cfg(test)]
mod tests;
