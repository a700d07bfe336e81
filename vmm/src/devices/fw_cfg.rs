//! The firmware configuration device, as far as bare-metal test kernels read it: a selector port and a
//! data port that gives the selected item byte by byte.

use super::ports::FW_CFG_SELECT;
use crate::numbers::VcpuNumbers;

const SIGNATURE: u16 = 0x00;
const INTERFACE: u16 = 0x01;
const RAM_SIZE: u16 = 0x03;
const CPU_COUNT: u16 = 0x05;
const MAX_CPUS: u16 = 0x0F;
const FILE_DIRECTORY: u16 = 0x19;

/// The device.
#[derive(Debug)]
pub(super) struct FwCfg {
    ram_bytes: u64,
    cpus: VcpuNumbers,
    key: u16,
    offset: usize,
}

impl FwCfg {
    pub fn new(ram_bytes: u64, cpus: VcpuNumbers) -> Self {
        FwCfg {
            ram_bytes,
            cpus,
            key: 0,
            offset: 0,
        }
    }

    /// The selected item, zero-padded to the longest. A key nobody filled has no bytes.
    fn item(&self) -> ([u8; 8], usize) {
        let padded = |bytes: &[u8]| {
            let mut item = [0; 8];
            item[..bytes.len()].copy_from_slice(bytes);
            (item, bytes.len())
        };
        match self.key {
            SIGNATURE => padded(b"QEMU"),
            // The port interface and nothing else (no DMA).
            INTERFACE => padded(&1u32.to_le_bytes()),
            RAM_SIZE => padded(&self.ram_bytes.to_le_bytes()),
            CPU_COUNT => padded(&u16::from(self.cpus.present()).to_le_bytes()),
            MAX_CPUS => padded(&u16::from(self.cpus.max()).to_le_bytes()),
            // A directory of no files: its big-endian count.
            FILE_DIRECTORY => padded(&0u32.to_be_bytes()),
            _ => ([0; 8], 0),
        }
    }

    pub fn write(&mut self, port: u16, data: &[u8]) {
        // Items are read-only; only the selector takes writes.
        if port == FW_CFG_SELECT {
            let low = data.first().copied().unwrap_or(0);
            let high = data.get(1).copied().unwrap_or(0);
            self.key = u16::from_le_bytes([low, high]);
            self.offset = 0;
        }
    }

    pub fn read(&mut self, port: u16, data: &mut [u8]) {
        if port == FW_CFG_SELECT {
            data.fill(0xFF);
            return;
        }
        let (item, len) = self.item();
        for byte in data {
            *byte = if self.offset < len { item[self.offset] } else { 0 };
            self.offset = self.offset.saturating_add(1);
        }
    }
}
