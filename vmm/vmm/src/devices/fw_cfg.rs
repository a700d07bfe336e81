//! The part of QEMU's fw_cfg device that bare-metal test kernels use: a selector port and a data
//! port that returns the selected item byte by byte.

use snapshot::state::SavedLegacyDevices;

use super::ports::FW_CFG_SELECT;
use crate::numbers::VcpuCountRange;

const SIGNATURE: u16 = 0x00;
const INTERFACE: u16 = 0x01;
const RAM_SIZE: u16 = 0x03;
const CPU_COUNT: u16 = 0x05;
const MAX_CPUS: u16 = 0x0F;
const FILE_DIRECTORY: u16 = 0x19;

/// The fw_cfg device: the selected item and the position in it.
#[derive(Debug)]
pub(super) struct FwCfg {
    ram_bytes: u64,
    cpus: VcpuCountRange,
    key: u16,
    offset: usize,
}

impl FwCfg {
    pub fn new(ram_bytes: u64, cpus: VcpuCountRange) -> Self {
        FwCfg {
            ram_bytes,
            cpus,
            key: 0,
            offset: 0,
        }
    }

    /// Copies the registers to `board`, for a snapshot.
    pub fn save(&self, board: &mut SavedLegacyDevices) {
        board.fw_cfg_key = self.key;
        board.fw_cfg_offset = self.offset as u64;
    }

    /// Restores the registers from a snapshot.
    pub fn restore(&mut self, board: &SavedLegacyDevices) {
        self.key = board.fw_cfg_key;
        self.offset = usize::try_from(board.fw_cfg_offset).unwrap_or(usize::MAX);
    }

    /// Returns the item that the selector chooses, padded with zeros, and its length in bytes. The
    /// length of an unknown item is 0.
    fn item(&self) -> ([u8; 8], usize) {
        let padded = |bytes: &[u8]| {
            let mut item = [0; 8];
            item[..bytes.len()].copy_from_slice(bytes);
            (item, bytes.len())
        };
        match self.key {
            SIGNATURE => padded(b"QEMU"),
            // Feature bitmap: the port interface only, without DMA.
            INTERFACE => padded(&1u32.to_le_bytes()),
            RAM_SIZE => padded(&self.ram_bytes.to_le_bytes()),
            CPU_COUNT => padded(&u16::from(self.cpus.present()).to_le_bytes()),
            MAX_CPUS => padded(&u16::from(self.cpus.max()).to_le_bytes()),
            // An empty file directory: its big-endian count.
            FILE_DIRECTORY => padded(&0u32.to_be_bytes()),
            _ => ([0; 8], 0),
        }
    }

    pub fn write(&mut self, port: u16, data: &[u8]) {
        // Items are read-only. Only the selector accepts writes.
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::devices::ports::FW_CFG_DATA;

    fn device() -> FwCfg {
        FwCfg::new(0x1_1234_6000, "3,max=5".parse().unwrap())
    }

    /// Reads a fw_cfg item from its beginning.
    fn item(key: u16) -> Vec<u8> {
        match key {
            SIGNATURE => b"QEMU".to_vec(),
            INTERFACE => vec![1, 0, 0, 0],
            RAM_SIZE => vec![0, 0x60, 0x34, 0x12, 1, 0, 0, 0],
            CPU_COUNT => vec![3, 0],
            MAX_CPUS => vec![5, 0],
            _ => Vec::new(),
        }
    }

    proptest! {
        /// A read of a fw_cfg item returns the same bytes for any access widths, followed by zeros.
        /// The selector is write-only and the data port read-only.
        #[test]
        fn fw_cfg_item_is_independent_of_access_width(
            key in prop_oneof![0u16..8, Just(MAX_CPUS), Just(FILE_DIRECTORY), any::<u16>()],
            widths in prop::collection::vec(1usize..5, 1..12),
            written: [u8; 4],
        ) {
            let mut device = device();
            device.write(FW_CFG_SELECT, &key.to_le_bytes());
            let mut read = Vec::new();
            for width in widths {
                let mut data = vec![0xAA; width];
                device.read(FW_CFG_DATA, &mut data);
                read.extend(data);
                device.write(FW_CFG_DATA, &written);
                let mut selector = [0, 0];
                device.read(FW_CFG_SELECT, &mut selector);
                prop_assert_eq!(selector, [0xFF, 0xFF]);
            }
            let mut right = item(key);
            right.resize(read.len().max(right.len()), 0);
            prop_assert_eq!(&read[..], &right[..read.len()]);
            // Selecting the item again resets the read position.
            device.write(FW_CFG_SELECT, &key.to_le_bytes());
            let mut first = [0];
            device.read(FW_CFG_DATA, &mut first);
            prop_assert_eq!(first[0], right[0]);
        }
    }

    /// A write of one byte to the fw_cfg selector port selects an item whose key fits into one
    /// byte.
    #[test]
    fn fw_cfg_selector_accepts_byte_write() {
        let mut device = device();
        for (key, n) in [(&[5u8][..], 3), (&[15, 0], 5), (&[5, 1], 0), (&[], b'Q')] {
            device.write(FW_CFG_SELECT, key);
            let mut first = [0xAA];
            device.read(FW_CFG_DATA, &mut first);
            assert_eq!(first[0], n, "{key:?}");
        }
    }
}
