//! Saves the devices of the [`DeviceBus`] to a snapshot and restores them.

use std::sync::atomic::Ordering;

use snapshot::state::{SavedDevice, SavedLegacyDevices};
use virtio_devices::transport::saved::RestoreDeviceError;

use super::{CONTROL_A_RESET, DeviceBus, lock};

/// Bit of the reset control register that resets the processor. Always reads as zero.
const RESET_CPU: u8 = 0x04;

/// Error when restoring the devices of a machine from a snapshot.
#[derive(Debug, thiserror::Error)]
pub enum RestoreBoardError {
    /// The snapshot contains an invalid state of a device.
    #[error("the saved state of the {0} is not one that it can be in")]
    Impossible(&'static str),
    /// A virtio device differs from the saved one.
    #[error(transparent)]
    Device(#[from] RestoreDeviceError),
    /// The saved machine and this machine have different numbers of virtio devices.
    #[error(
        "the snapshot has {saved} virtio devices, this machine has {here}; give the same --disk, --net, --rng and --virtio-console options"
    )]
    Devices {
        /// Number of virtio devices in the snapshot.
        saved: usize,
        /// Number of virtio devices of this machine.
        here: usize,
    },
}

impl DeviceBus {
    /// Returns the state of all devices except the virtio devices. No vCPU may run. Returns `None`
    /// while an ejected processor has not been fetched with
    /// [`CpuHotplugDevice::take_ejected`](super::cpu_plug::CpuHotplugDevice::take_ejected).
    pub fn save(&self) -> Option<SavedLegacyDevices> {
        let mut board = SavedLegacyDevices {
            serial: self.serial.save(),
            cpu_plug: match &self.cpu_plug {
                Some(plug) => Some(plug.save()?),
                None => None,
            },
            reset_control: self.reset_control.load(Ordering::Relaxed),
            control_a: self.control_a.load(Ordering::Relaxed),
            control_b_reads: self.control_b_reads.load(Ordering::Relaxed),
            pci_address: self.pci.as_ref().map_or(0, |pci| pci.address()),
            ..SavedLegacyDevices::default()
        };
        lock(&self.cmos).save(&mut board);
        lock(&self.i8042).save(&mut board);
        lock(&self.fw_cfg).save(&mut board);
        lock(&self.pm).save(&mut board);
        Some(board)
    }

    /// Restores all devices, including the virtio devices. The interrupt controllers must already
    /// be restored, and no vCPU may run.
    ///
    /// # Errors
    /// Returns a [`RestoreBoardError`] if the state is invalid, or if the virtio devices differ.
    pub fn restore(
        &self,
        board: &SavedLegacyDevices,
        devices: &[SavedDevice],
    ) -> Result<(), RestoreBoardError> {
        let here = self.pci.as_ref().map_or(0, |pci| pci.device_count());
        if here != devices.len() {
            return Err(RestoreBoardError::Devices {
                saved: devices.len(),
                here,
            });
        }
        if !lock(&self.cmos).restore(board) {
            return Err(RestoreBoardError::Impossible("CMOS"));
        }
        lock(&self.i8042).restore(board);
        lock(&self.fw_cfg).restore(board);
        match (&self.cpu_plug, &board.cpu_plug) {
            (Some(plug), Some(saved)) => plug.restore(saved),
            (None, None) => {}
            _ => return Err(RestoreBoardError::Impossible("CPU hot-plug registers")),
        }
        let reset_control = board.reset_control & !RESET_CPU;
        self.reset_control.store(reset_control, Ordering::Relaxed);
        self.control_a
            .store(board.control_a & !CONTROL_A_RESET, Ordering::Relaxed);
        self.control_b_reads
            .store(board.control_b_reads, Ordering::Relaxed);
        lock(&self.pm).restore(board);
        if !self.serial.restore(&board.serial) {
            return Err(RestoreBoardError::Impossible("serial port"));
        }
        if let Some(pci) = &self.pci {
            pci.restore(board.pci_address, devices)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::devices::cpu_plug::VcpuSet;
    use crate::devices::ports;

    fn bus() -> DeviceBus {
        DeviceBus::new(Box::new(io::sink()), 64 << 20, "2,max=4".parse().unwrap()).unwrap()
    }

    fn inb(bus: &DeviceBus, port: u16) -> u8 {
        let mut byte = [0];
        bus.io_in(port, &mut byte);
        byte[0]
    }

    /// Every device continues from its saved state, even if the VM was saved between the parts of a
    /// device command.
    #[test]
    fn restored_board_continues_where_it_was() {
        let first = bus();
        for (port, value) in [
            (0x70, 0x40),
            (0x71, 0x5A),
            (0x64, 0x60),
            (0x60, 0x47),
            (0x64, 0xAA),
            (0x3FB, 0x03),
            (0x3F9, 0x01),
            (0x3FF, 0x77),
            (0xCF9, 0x02),
            (0x92, 0x02),
            (ports::PM1A_EVENT + 3, 1),
        ] {
            first.io_out(port, &[value]);
        }
        first.io_out(ports::FW_CFG_SELECT, &[0, 0]);
        assert_eq!(inb(&first, ports::FW_CFG_DATA), b'Q');
        assert!(first.press_power_button());
        let plug = first.cpu_plug().unwrap();
        plug.show(VcpuSet::of(2));
        let saved = first.save().unwrap();

        let second = bus();
        second.restore(&saved, &[]).unwrap();
        assert_eq!(second.save().unwrap(), saved);
        assert_eq!(inb(&second, 0x71), 0x5A, "CMOS");
        assert_eq!(inb(&second, 0x60), 0x55, "the answer to the self-test");
        assert_eq!(inb(&second, 0x3FF), 0x77, "scratch register");
        assert_eq!(inb(&second, ports::FW_CFG_DATA), b'E');
        assert_eq!(inb(&second, ports::PM1A_EVENT + 1), 1, "power button");
        let state = second.cpu_plug().unwrap().state();
        assert_eq!(state.present, VcpuSet::first(3));
        assert_eq!(state.unnoticed, VcpuSet::of(2));
    }

    #[test]
    fn impossible_boards_are_refused_by_name() {
        let saved = bus().save().unwrap();
        let refused = |saved: &SavedLegacyDevices| bus().restore(saved, &[]).unwrap_err().to_string();
        let mut short = saved.clone();
        short.cmos.0.pop();
        assert!(refused(&short).contains("CMOS"));
        let mut full = saved.clone();
        full.serial.input.0 = vec![0; 1000];
        assert!(refused(&full).contains("serial port"));
        let mut fixed = saved.clone();
        fixed.cpu_plug = None;
        assert!(refused(&fixed).contains("hot-plug"));
        let devices = [SavedDevice::default()];
        let line = bus().restore(&saved, &devices).unwrap_err().to_string();
        assert!(line.contains("1 virtio devices, this machine has 0"), "{line}");
    }
}
