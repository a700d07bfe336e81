//! Mocks of the machine and of a virtio device. Both record the calls that they receive.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use vmm_sys_util::eventfd::EventFd;

use super::machine::{MsiMessage, PciBackend};
use crate::device::{
    ActivateError, DeviceActivation, DeviceFailureCallback, VirtioDevice, read_config_bytes,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BackendCall {
    AddDoorbell(u64),
    RemoveDoorbell(u64),
    Connect(u32, MsiMessage),
    Disconnect(u32),
}

#[derive(Debug, Default)]
pub(super) struct MockPciBackend {
    calls: Mutex<Vec<BackendCall>>,
    refuses: AtomicBool,
    /// `true` after a device has triggered [`DeviceFailureCallback`].
    pub ended: Arc<AtomicBool>,
}

impl MockPciBackend {
    /// Returns the recorded calls and clears the record.
    pub(super) fn take(&self) -> Vec<BackendCall> {
        std::mem::take(&mut self.calls.lock().unwrap())
    }

    pub(super) fn refuse(&self, refuses: bool) {
        self.refuses.store(refuses, Ordering::Relaxed);
    }

    fn add(&self, call: BackendCall) -> io::Result<()> {
        if self.refuses.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(libc::EEXIST));
        }
        self.calls.lock().unwrap().push(call);
        Ok(())
    }
}

impl PciBackend for MockPciBackend {
    fn add_doorbell(&self, address: u64, _: &EventFd) -> io::Result<()> {
        self.add(BackendCall::AddDoorbell(address))
    }

    fn remove_doorbell(&self, address: u64, _: &EventFd) -> io::Result<()> {
        self.add(BackendCall::RemoveDoorbell(address))
    }

    fn connect(&self, line: u32, message: MsiMessage, _: &EventFd) -> io::Result<()> {
        self.add(BackendCall::Connect(line, message))
    }

    fn disconnect(&self, line: u32, _: &EventFd) -> io::Result<()> {
        self.add(BackendCall::Disconnect(line))
    }

    fn fatal_error_callback(&self) -> DeviceFailureCallback {
        let ended = self.ended.clone();
        DeviceFailureCallback::new(Arc::new(move || ended.store(true, Ordering::Relaxed)))
    }
}

/// Calls that a mock device has received.
#[derive(Debug, Default)]
pub(super) struct DeviceCalls {
    pub activation: Option<DeviceActivation>,
    pub activations: u32,
    pub resets: u32,
    pub refuses: bool,
}

pub(super) struct MockDevice {
    pub seen: Arc<Mutex<DeviceCalls>>,
    pub queues: Vec<u16>,
    pub config: Vec<u8>,
}

impl MockDevice {
    pub(super) fn new(queues: &[u16]) -> (Self, Arc<Mutex<DeviceCalls>>) {
        let seen = Arc::new(Mutex::new(DeviceCalls::default()));
        let device = Self {
            seen: seen.clone(),
            queues: queues.to_vec(),
            config: vec![0x11, 0x22, 0x33, 0x44],
        };
        (device, seen)
    }
}

impl VirtioDevice for MockDevice {
    fn id(&self) -> u32 {
        4
    }

    fn name(&self) -> &str {
        "fake0"
    }

    fn features(&self) -> u64 {
        1 << 5
    }

    fn queue_max_sizes(&self) -> &[u16] {
        &self.queues
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.config, offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        for (i, byte) in data.iter().enumerate() {
            let at = usize::try_from(offset).unwrap() + i;
            if let Some(old) = self.config.get_mut(at) {
                *old = *byte;
            }
        }
    }

    fn unsupported_in_snapshot(&self) -> Option<&'static str> {
        None
    }

    fn identity(&self) -> Vec<u8> {
        self.config.clone()
    }

    fn activate(&mut self, activation: DeviceActivation) -> Result<(), ActivateError> {
        let mut seen = self.seen.lock().unwrap();
        if seen.refuses {
            return Err(ActivateError::Driver("anything"));
        }
        assert!(seen.activation.is_none(), "activated twice");
        seen.activation = Some(activation);
        seen.activations += 1;
        Ok(())
    }

    fn reset(&mut self) {
        let mut seen = self.seen.lock().unwrap();
        seen.activation = None;
        seen.resets += 1;
    }
}
