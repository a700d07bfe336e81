//! Fuzzes accesses of a hostile guest to the PCI configuration ports and virtio registers, in any
//! width and order.
//!
//! Input: records of 12 bytes: type (port or memory, read or write), width, offset, value.
#![no_main]

use std::io;
use std::sync::Arc;

use libfuzzer_sys::fuzz_target;
use virtio_devices::device::{DeviceFailureCallback, VirtioDevice};
use virtio_devices::rng::EntropyDevice;
use virtio_devices::transport::bus::{CONFIG_PORT, PciBus};
use virtio_devices::transport::machine::{PciBackend, MsiMessage};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

const WINDOW: std::ops::Range<u32> = 0xE000_0000..0xF000_0000;

/// PCI back end whose operations succeed without any effect.
struct NoOpPciBackend;

impl PciBackend for NoOpPciBackend {
    fn add_doorbell(&self, _: u64, _: &EventFd) -> io::Result<()> {
        Ok(())
    }

    fn remove_doorbell(&self, _: u64, _: &EventFd) -> io::Result<()> {
        Ok(())
    }

    fn connect(&self, _: u32, _: MsiMessage, _: &EventFd) -> io::Result<()> {
        Ok(())
    }

    fn disconnect(&self, _: u32, _: &EventFd) -> io::Result<()> {
        Ok(())
    }

    fn fatal_error_callback(&self) -> DeviceFailureCallback {
        DeviceFailureCallback::default()
    }
}

fuzz_target!(|data: &[u8]| {
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 16)]).expect("memory");
    let machine: Arc<dyn PciBackend> = Arc::new(NoOpPciBackend);
    let device: Box<dyn VirtioDevice> = Box::new(EntropyDevice::new().expect("/dev/urandom"));
    let bus = PciBus::new(vec![device], &memory, WINDOW, &machine).expect("one device fits");
    // Enable memory decoding from the start.
    bus.write_port(CONFIG_PORT, &0x8000_0804u32.to_le_bytes());
    bus.write_port(CONFIG_PORT + 4, &6u16.to_le_bytes());
    for record in data.chunks_exact(12).take(512) {
        let (what, width) = (record[0], usize::from(record[1] % 8) + 1);
        let offset = u16::from_le_bytes([record[2], record[3]]);
        let mut value: [u8; 8] = record[4..].try_into().expect("eight bytes");
        let value = &mut value[..width];
        let address = u64::from(WINDOW.start) + u64::from(offset % 0x8000);
        let port = CONFIG_PORT + offset % 8;
        match what % 4 {
            0 => bus.write_port(port, value),
            1 => bus.read_port(port, value),
            2 => drop(bus.write_memory(address, value)),
            _ => drop(bus.read_memory(address, value)),
        }
    }
});
